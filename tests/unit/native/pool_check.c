/* Checks of the pool (src/outpace/native/pool.c), one a run: pool_check NAME. It ends with status 0 if all is well. */

#include "pool.c"

#include <stdio.h>
#include <sys/wait.h>
#include <unistd.h>

#define MUST(what) ((what) ? (void)0 : (fprintf(stderr, "%s:%d: %s\n", __func__, __LINE__, #what), _exit(1)))
#define MOST_CHUNKS 300

/* A job that counts how often each of its chunks was run; ``valid`` while its caller waits. */
struct counting {
    int valid;
    atomic_int runs[MOST_CHUNKS];
};

static void count(void *given, int64_t chunk) {
    struct counting *job = given;
    MUST(job->valid == 42);
    atomic_fetch_add(&job->runs[chunk], 1);
}

static void check_job(int64_t chunks) {
    struct counting job = {.valid = 42};
    pool_share(chunks, count, &job);
    job.valid = 0;
    for (int64_t chunk = 0; chunk < MOST_CHUNKS; chunk++) MUST(atomic_load(&job.runs[chunk]) == (chunk < chunks));
}

static void check_jobs(int times) {
    for (int i = 0; i < times; i++) check_job(i % MOST_CHUNKS);
}

static void every_chunk_once(void) {
    for (int threads = 1; threads <= 8; threads++) {
        pool_wish(threads);
        check_jobs(2 * MOST_CHUNKS);
        MUST(pool_workers() < threads && (threads == 1 || pool_workers()));
    }
}

static void nest(void *given, int64_t chunk) {
    (void)chunk;
    atomic_fetch_add((atomic_int *)given, 1);
    check_job(7);
}

static void nested(void) {
    atomic_int done = 0;
    for (int i = 0; i < 50; i++) pool_share(20, nest, &done);
    MUST(atomic_load(&done) == 1000);
}

static void *call(void *given) {
    (void)given;
    check_jobs(3000);
    return NULL;
}

static void callers(void) {
    pthread_t threads[8];
    for (int i = 0; i < 8; i++) MUST(!pthread_create(threads + i, NULL, call, NULL));
    for (int i = 0; i < 8; i++) pthread_join(threads[i], NULL);
}

static atomic_int ended;

static void *call_until_ended(void *given) {
    while (!atomic_load(&ended)) check_job(50), atomic_store((atomic_int *)given, 1);
    return NULL;
}

static pthread_t calling(void) {
    static atomic_int called;
    pthread_t thread;
    MUST(!pthread_create(&thread, NULL, call_until_ended, &called));
    while (!atomic_load(&called)) sched_yield();
    return thread;
}

static void fork_once(void) {
    const pid_t child = fork();
    if (!child) {
        MUST(pool_workers() == 0);
#ifdef __SANITIZE_THREAD__ /* which lets a fork of several threads have no new ones */
        pool_wish(1);
#endif
        check_jobs(MOST_CHUNKS);
        MUST(pool_workers() == pool_threads() - 1);
        exit(0);
    }
    int status = 1;
    MUST(waitpid(child, &status, 0) == child && status == 0);
    check_jobs(MOST_CHUNKS);
}

static void forks(void) {
    check_jobs(MOST_CHUNKS);
    fork_once();
    const pthread_t thread = calling();
    for (int i = 0; i < 10; i++) fork_once();
    atomic_store(&ended, 1);
    pthread_join(thread, NULL);
}

static void exit_in_the_middle(void) {
    calling();
    exit(0);
}

static pthread_t first;
static atomic_int interrupts;

static void interrupted(int number) {
    (void)number;
    MUST(pthread_equal(pthread_self(), first));
    atomic_fetch_add(&interrupts, 1);
}

static void interrupt(void *given, int64_t chunk) {
    kill(getpid(), SIGINT);
    count(given, chunk);
}

static void interrupts_are_the_callers(void) {
    first = pthread_self();
    signal(SIGINT, interrupted);
    for (int i = 0; i < 100; i++) {
        struct counting job = {.valid = 42};
        pool_share(9, interrupt, &job);
        for (int64_t chunk = 0; chunk < 9; chunk++) MUST(atomic_load(&job.runs[chunk]) == 1);
    }
    MUST(atomic_load(&interrupts) > 0);
}

/* A worker that keeps its first chunk until all others are done, and the caller has gone to sleep. */
struct holding {
    pthread_t caller;
    atomic_int held, done;
};

static void hold(void *given, int64_t chunk) {
    struct holding *job = given;
    (void)chunk;
    if (pthread_equal(pthread_self(), job->caller)) {
        while (!atomic_load(&job->held)) sched_yield();
    } else {
        atomic_store(&job->held, 1);
        while (atomic_load(&job->done) < 99 || !atomic_load(&pool.waiting)) sched_yield();
    }
    atomic_fetch_add(&job->done, 1);
}

static void a_worker_that_does_not_run_holds_one_chunk(void) {
    pool_wish(2);
    for (int i = 1; i <= 3; i++) {
        struct holding job = {.caller = pthread_self()};
        pool_share(100, hold, &job);
        MUST(atomic_load(&job.done) == 100 && pool_stalls() == (uint64_t)i);
        MUST(pool.less == 1 && pool.until > nanoseconds() - LONGEST && pool.rest >= REST);
        const uint64_t before = atomic_load(&pool.number);
        pool.until = UINT64_MAX;
        check_job(50); /* without it */
        MUST(atomic_load(&pool.number) == before);
        pool.until = 0; /* with it again, and no rest is remembered */
        check_job(50);
        MUST(atomic_load(&pool.number) != before && pool.less == 0);
        pool.rest = pool.until = 0;
    }
}

static void no_thread_can_be_had(void) {
    atomic_store(&pool.closing, 1); /* new workers end at once, and take no chunk */
    start(3);
    atomic_store(&pool.taken, 0);
    for (int place = 0; place < 3; place++) end(pool.workers[place].thread);
    atomic_store(&pool.closing, 0);
    check_jobs(2 * MOST_CHUNKS);
    atomic_store(&pool.started, 0);
}

static const struct {
    const char *name;
    void (*check)(void);
} checks[] = {
    {"every_chunk_once", every_chunk_once},
    {"nested", nested},
    {"callers", callers},
    {"forks", forks},
    {"exit_in_the_middle", exit_in_the_middle},
    {"interrupts_are_the_callers", interrupts_are_the_callers},
    {"a_worker_that_does_not_run_holds_one_chunk", a_worker_that_does_not_run_holds_one_chunk},
    {"no_thread_can_be_had", no_thread_can_be_had},
};

int main(int count_of, char **words) {
    pool_usual(4);
    for (unsigned i = 0; i < sizeof checks / sizeof *checks; i++)
        if (count_of == 2 && !strcmp(words[1], checks[i].name)) {
            checks[i].check();
            return 0;
        }
    return 2;
}
