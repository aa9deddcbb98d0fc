/* Work that threads share, as the other files see it: chunks, which any thread may do in any order. */

#pragma once

#include <stdint.h>

#define CHUNK 16384 /* numbers of a chunk, at least: a few microseconds of work */
#define CHUNKS 512  /* of a job, about: enough for each of many threads to have several */

typedef void chunk_of(void *job, int64_t chunk);
typedef void sharing(int64_t chunks, chunk_of *run, void *job);

/* The pool of this process (pool.c). Libraries are several, and threads are there once: each is told where it is. */
static sharing *pool_of_all;
void use_pool(sharing *pool) { pool_of_all = pool; }
sharing *pool_in_use(void) { return pool_of_all; }

/* Run all chunks of a job, and return when all are done. Where chunks begin must not depend on the number of threads. */
static inline void share(int64_t chunks, chunk_of *run, void *job) {
    if (pool_of_all && chunks > 1) pool_of_all(chunks, run, job);
    else
        for (int64_t chunk = 0; chunk < chunks; chunk++) run(job, chunk);
}

/* How many of some items, of ``cost`` numbers each, are a chunk; items of no rows cost nothing. */
static inline int64_t items_of_chunk(int64_t items, int64_t cost) {
    if (cost < 1) cost = 1;
    const int64_t least = (CHUNK + cost - 1) / cost, wanted = (items + CHUNKS - 1) / CHUNKS;
    return least > wanted ? (int64_t)least : (int64_t)wanted;
}

static inline int64_t chunks_of(int64_t items, int64_t each) { return (items + each - 1) / each; }
