/* What systems differ in, for every file. */

#pragma once

#if defined(_WIN32) && !defined(__clang__)
#error "gcc does not align vectors on the stack of Windows; set CC to zig or clang"
#endif

/* Before functions that Python calls: Windows' libraries show what is marked alone. */
#ifdef _WIN32
#define SHOWN __declspec(dllexport)
#else
#define SHOWN
#endif
