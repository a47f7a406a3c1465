// Run-time dispatch over vector widths: a function marked FK_VECTOR_CLONES is compiled for SSE2, AVX2 + FMA and
// AVX-512, and the loader picks the widest that the machine has. A clone does not reach into lambdas or functions that
// are called: mark the plain function that holds the loop, and make everything inside it always-inline.
#pragma once

#include <cstdlib>  // defines __GLIBC__

// musl has no ifunc, and clang spells the architectures differently.
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__) && defined(__GLIBC__)
#define FK_VECTOR_CLONES __attribute__((target_clones("default", "arch=x86-64-v3", "arch=x86-64-v4")))
#else
#define FK_VECTOR_CLONES
#endif
