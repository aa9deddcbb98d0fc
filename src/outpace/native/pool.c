/* The threads of this process that share work: one pool, which the libraries of functions are handed (pool.h).

   The calling thread publishes a job, takes chunks of it as the others do, and returns when every chunk is done. Each
   thread begins with a range of its own, so that it reads memory in order and shares no counter with others, and then
   takes what is left of theirs. Finished chunks are counted, not threads: one that is not running, or was never
   started, delays nobody, unless it holds a chunk. A thread touches a job only while it holds a chunk, so one that
   comes late touches nothing.

   One job at a time: who calls meanwhile, also from within a chunk, does its chunks alone. Which thread does a chunk
   never changes a result. Threads that wait spin for a while, then sleep. Where other programs need the
   processors, a thread with a chunk may be kept from running while all others wait for it: then the pool does
   with one thread less for a time, the longer the more often that happens. */

#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

#include "pool.h"
#define STACK (4 << 20)
#include "pool_system.h"

#define MOST_THREADS 256
#define APART _Alignas(64) /* in a cache line of its own */
#define SPINS 32           /* between looks at the clock */
#define AWAKE 100000       /* nanoseconds that a thread without work stays awake: longer than most gaps in a forward */
#define PATIENCE 200000    /* nanoseconds, and twice a chunk's, after which a thread with a chunk is taken not to run */
#define REST 4000000       /* nanoseconds for which the pool then has a thread less */
#define LONGEST 32000000 /* so that at most about a tenth of the time is lost by trying again */

struct worker {
    APART atomic_int asleep;
    int place;     /* of its range; the caller's is 0 */
    uint64_t seen; /* the last job that it looked at */
    lock_t lock;
    signal_t woken;
    thread_t thread;
};

/* Chunks of a job that a thread begins with: the end, and in the lower half the next one. */
struct range {
    APART _Atomic uint64_t ticket;
};

static struct {
    APART _Atomic uint64_t number;   /* of the job */
    APART _Atomic uint64_t finished; /* chunks that workers have done */
    atomic_int waiting;              /* the caller sleeps until they are done */
    lock_t lock;
    signal_t done;
    APART atomic_int taken; /* by a caller; guards all below */
    atomic_int team;        /* threads that may take chunks, with the caller */
    atomic_int started, closing;
    chunk_of *run;
    void *job;
    int less;             /* threads that are done without */
    uint64_t until, rest; /* when there is one more again; for how long there was not */
    uint64_t stalls;
    struct range ranges[MOST_THREADS];
    struct worker workers[MOST_THREADS - 1];
} pool;

static atomic_int usual = 1;   /* threads of who has not said another number */
static _Thread_local int wish; /* of this thread, or 0 */

static inline int open_chunks(uint64_t ticket) { return (uint32_t)ticket < ticket >> 32; }

/* The next chunk of a range, which must be done then; -1 if there is none. */
static inline int64_t take(struct range *range) {
    if (!open_chunks(atomic_load_explicit(&range->ticket, memory_order_relaxed))) return -1;
    const uint64_t ticket = atomic_fetch_add_explicit(&range->ticket, 1, memory_order_acq_rel);
    return open_chunks(ticket) ? (int64_t)(uint32_t)ticket : -1;
}

/* Do chunks until all are taken, of the range ``place`` first; returns how many. */
static uint64_t do_chunks(int place) {
    uint64_t done = 0;
    const int team = atomic_load(&pool.team);
    for (int other = 0; other < team; other++)
        for (int64_t chunk; (chunk = take(pool.ranges + (place + other) % team)) >= 0; done++) pool.run(pool.job, chunk);
    return done;
}

static inline int called(const struct worker *own) {
    return atomic_load_explicit(&pool.closing, memory_order_relaxed) ||
           (atomic_load(&pool.number) != own->seen && own->place < atomic_load(&pool.team));
}

/* Wait for work: awake at first, then asleep. */
static void idle(struct worker *own) {
    uint64_t from = 0;
    for (unsigned spin = 1; !called(own); spin++) {
        relax();
        if (spin % SPINS) continue;
        const uint64_t now = nanoseconds();
        if (!from) from = now;
        if (now - from < AWAKE) {
            if (now - from > AWAKE / 4) give_way();
            continue;
        }
        atomic_store(&own->asleep, 1);
        acquire(&own->lock);
        while (atomic_load(&own->asleep) && !called(own)) await(&own->woken, &own->lock);
        atomic_store(&own->asleep, 0);
        release(&own->lock);
        from = 0;
    }
}

static void wake(struct worker *worker) {
    if (!atomic_load(&worker->asleep)) return;
    acquire(&worker->lock);
    atomic_store(&worker->asleep, 0);
    notify(&worker->woken);
    release(&worker->lock);
}

static THREAD_RESULT work(void *given) {
    struct worker *own = given;
    for (;;) {
        idle(own);
        if (atomic_load(&pool.closing)) return 0;
        own->seen = atomic_load(&pool.number);
        const uint64_t done = do_chunks(own->place);
        if (!done) continue;
        atomic_fetch_add(&pool.finished, done);
        if (!atomic_load(&pool.waiting)) continue;
        acquire(&pool.lock);
        notify(&pool.done);
        release(&pool.lock);
    }
}

/* Have as many workers, or as many as there are to be had. */
static void start(int workers) {
    for (int place = atomic_load(&pool.started); place < workers; place++) {
        struct worker *own = pool.workers + place;
        own->place = place + 1;
        own->seen = atomic_load(&pool.number);
        atomic_store(&own->asleep, 0);
        prepare(&own->lock, &own->woken);
        if (begin(&own->thread, work, own)) return;
        atomic_store(&pool.started, place + 1);
    }
}

/* Wait until workers have done their chunks; returns 1 if one of them seems not to run. ``each``: time of a chunk. */
static int join(uint64_t chunks, uint64_t each) {
    uint64_t from = 0;
    for (unsigned spin = 1; atomic_load_explicit(&pool.finished, memory_order_acquire) != chunks; spin++) {
        relax();
        if (spin % SPINS) continue;
        const uint64_t now = nanoseconds();
        if (!from) from = now;
        if (now - from < PATIENCE + 2 * each) continue;
        acquire(&pool.lock);
        atomic_store(&pool.waiting, 1);
        while (atomic_load(&pool.finished) != chunks) await(&pool.done, &pool.lock);
        atomic_store(&pool.waiting, 0);
        release(&pool.lock);
        return 1;
    }
    return 0;
}

/* The threads of a job: all that are wanted, less those that have been kept from running. */
static int present(int wanted, uint64_t now) {
    if (pool.less && now > pool.until) {
        pool.less--;
        pool.until = now + pool.rest;
    }
    return wanted - (pool.less < wanted - 1 ? pool.less : wanted - 1);
}

static void stalled(int team) {
    const uint64_t now = nanoseconds();
    const int again = now < pool.until + 4 * pool.rest;
    pool.rest = !again ? REST : pool.rest < LONGEST / 2 ? 2 * pool.rest : LONGEST;
    pool.until = now + pool.rest;
    if (pool.less < team - 1) pool.less++;
    pool.stalls++;
}

static void alone(int64_t chunks, chunk_of *run, void *job) {
    for (int64_t chunk = 0; chunk < chunks; chunk++) run(job, chunk);
}

/* Threads of the calling thread's jobs. */
int pool_threads(void) { return wish ? wish : atomic_load_explicit(&usual, memory_order_relaxed); }

/* Run all chunks of a job. */
void pool_share(int64_t chunks, chunk_of *run, void *job) {
    const int wanted = pool_threads();
    if (chunks < 2 || wanted < 2 || atomic_load(&pool.closing) || atomic_exchange(&pool.taken, 1)) {
        alone(chunks, run, job);
        return;
    }
    const uint64_t from = nanoseconds();
    const int team = present(wanted, from);
    if (team < 2) {
        atomic_store(&pool.taken, 0);
        alone(chunks, run, job);
        return;
    }
    if (atomic_load(&pool.started) < team - 1) start(team - 1);
    pool.run = run;
    pool.job = job;
    atomic_store_explicit(&pool.finished, 0, memory_order_relaxed);
    atomic_store(&pool.team, team);
    for (int place = 0; place < team; place++) {
        const uint64_t first = (uint64_t)chunks * place / team, end = (uint64_t)chunks * (place + 1) / team;
        atomic_store(&pool.ranges[place].ticket, end << 32 | first);
    }
    atomic_fetch_add(&pool.number, 1);
    const int workers = atomic_load(&pool.started);
    for (int place = 0; place < workers && place < team - 1 && place < chunks - 1; place++) wake(pool.workers + place);
    const uint64_t own = do_chunks(0);
    if (own < (uint64_t)chunks && join((uint64_t)chunks - own, own ? (nanoseconds() - from) / own : PATIENCE))
        stalled(team);
    atomic_store(&pool.taken, 0);
}

/* Threads of the calling thread's jobs, itself included; 0 for the usual number. */
void pool_wish(int threads) { wish = threads < 0 ? 0 : threads < MOST_THREADS ? threads : MOST_THREADS; }

void pool_usual(int threads) { atomic_store(&usual, threads < 1 ? 1 : threads < MOST_THREADS ? threads : MOST_THREADS); }

int pool_usual_threads(void) { return atomic_load(&usual); }

/* Threads that are there beside callers, and how often one of them has kept a caller waiting. */
int pool_workers(void) { return atomic_load(&pool.started); }
uint64_t pool_stalls(void) { return pool.stalls; }

#ifndef _WIN32 /* which has ended all threads but one when libraries are told */
/* End the threads, at the end of the process: a job of another thread goes on alone. */
static void close_pool(void) {
    atomic_store(&pool.closing, 1);
    for (const uint64_t from = nanoseconds(); atomic_exchange(&pool.taken, 1); give_way())
        if (nanoseconds() - from > 2 * 1000000000ull) return; /* exit() was called within a chunk */
    const int workers = atomic_load(&pool.started);
    for (int place = 0; place < workers; place++) {
        acquire(&pool.workers[place].lock);
        atomic_store(&pool.workers[place].asleep, 0);
        notify(&pool.workers[place].woken);
        release(&pool.workers[place].lock);
    }
    for (int place = 0; place < workers; place++) end(pool.workers[place].thread);
}

/* A fork has none of the threads, nor the jobs of others. */
static void begin_anew(void) {
    memset(&pool, 0, sizeof pool);
    prepare(&pool.lock, &pool.done);
}
#endif

static __attribute__((constructor)) void open_pool(void) {
    prepare(&pool.lock, &pool.done);
#ifndef _WIN32
    pthread_atfork(NULL, NULL, begin_anew);
    atexit(close_pool);
#endif
}
