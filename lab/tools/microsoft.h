/* What the sources need of Microsoft's headers, as they declare it: clang compiles them for its libraries without them. */

#pragma once

#include <stddef.h>
#include <stdint.h>

/* math.h, stdlib.h, malloc.h, string.h */
#define INFINITY ((float)(1e300 * 1e300))
#define NAN (-(float)(INFINITY * 0.0f))
#define isfinite(number) __builtin_isfinite(number)
double floor(double), exp(double), log(double);
float fminf(float, float), logf(float), nextafterf(float, float), sqrtf(float);
void *malloc(size_t), *calloc(size_t, size_t), *realloc(void *, size_t), *_aligned_malloc(size_t, size_t);
void free(void *), _aligned_free(void *);
int atexit(void(__cdecl *)(void)), memcmp(const void *, const void *, size_t);
void *memcpy(void *, const void *, size_t), *memmove(void *, const void *, size_t), *memset(void *, int, size_t);

/* windows.h */
#define WINAPI __stdcall
#define INFINITE 0xffffffff
#define STACK_SIZE_PARAM_IS_A_RESERVATION 0x10000
typedef int BOOL;
typedef unsigned long DWORD;
typedef void *HANDLE;
typedef struct {
    void *Ptr;
} SRWLOCK, CONDITION_VARIABLE;
typedef union {
    struct {
        DWORD LowPart;
        long HighPart;
    };
    int64_t QuadPart;
} LARGE_INTEGER;
void WINAPI InitializeSRWLock(SRWLOCK *), WINAPI AcquireSRWLockExclusive(SRWLOCK *), WINAPI ReleaseSRWLockExclusive(SRWLOCK *);
void WINAPI InitializeConditionVariable(CONDITION_VARIABLE *), WINAPI WakeConditionVariable(CONDITION_VARIABLE *);
BOOL WINAPI SleepConditionVariableSRW(CONDITION_VARIABLE *, SRWLOCK *, DWORD, DWORD);
BOOL WINAPI SwitchToThread(void), WINAPI QueryPerformanceCounter(LARGE_INTEGER *), WINAPI QueryPerformanceFrequency(LARGE_INTEGER *);
HANDLE WINAPI CreateThread(void *, size_t, DWORD(WINAPI *)(void *), void *, DWORD, DWORD *);
