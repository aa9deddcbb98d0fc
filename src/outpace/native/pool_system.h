/* Threads, locks and clocks of the system, for pool.c. */

#pragma once

#include <stdint.h>

#ifdef _WIN32
#include <windows.h>
typedef SRWLOCK lock_t;
typedef CONDITION_VARIABLE signal_t;
typedef HANDLE thread_t;
#define THREAD_RESULT DWORD WINAPI
static inline void prepare(lock_t *lock, signal_t *signal) { InitializeSRWLock(lock), InitializeConditionVariable(signal); }
static inline void acquire(lock_t *lock) { AcquireSRWLockExclusive(lock); }
static inline void release(lock_t *lock) { ReleaseSRWLockExclusive(lock); }
static inline void await(signal_t *signal, lock_t *lock) { SleepConditionVariableSRW(signal, lock, INFINITE, 0); }
static inline void notify(signal_t *signal) { WakeConditionVariable(signal); }
static inline void give_way(void) { SwitchToThread(); }
static inline int begin(thread_t *thread, DWORD(WINAPI *run)(void *), void *own) {
    return !(*thread = CreateThread(NULL, STACK, run, own, STACK_SIZE_PARAM_IS_A_RESERVATION, NULL));
}
static inline uint64_t nanoseconds(void) {
    LARGE_INTEGER count, second;
    QueryPerformanceCounter(&count), QueryPerformanceFrequency(&second);
    return (uint64_t)((double)count.QuadPart * 1e9 / (double)second.QuadPart);
}
#else
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <time.h>
typedef pthread_mutex_t lock_t;
typedef pthread_cond_t signal_t;
typedef pthread_t thread_t;
#define THREAD_RESULT void *
static inline void prepare(lock_t *lock, signal_t *signal) { pthread_mutex_init(lock, NULL), pthread_cond_init(signal, NULL); }
static inline void acquire(lock_t *lock) { pthread_mutex_lock(lock); }
static inline void release(lock_t *lock) { pthread_mutex_unlock(lock); }
static inline void await(signal_t *signal, lock_t *lock) { pthread_cond_wait(signal, lock); }
static inline void notify(signal_t *signal) { pthread_cond_signal(signal); }
static inline void give_way(void) { sched_yield(); }
/* Start a thread that takes no signals: they are for those of the program. Returns 1 if there is none to be had. */
static inline int begin(thread_t *thread, void *(*run)(void *), void *own) {
    sigset_t all, before;
    pthread_attr_t options;
    pthread_attr_init(&options);
    pthread_attr_setstacksize(&options, STACK);
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    const int failed = pthread_create(thread, &options, run, own);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    pthread_attr_destroy(&options);
    return failed != 0;
}
static inline void end(thread_t thread) { pthread_join(thread, NULL); }
static inline uint64_t nanoseconds(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}
#endif

/* Tell the processor that this is a loop that waits. */
static inline void relax(void) {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("isb");
#endif
}
