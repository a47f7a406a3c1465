// Run-time dispatch over vector widths. A function marked FK_VECTOR_CLONES is compiled for SSE2, AVX2 + FMA and
// AVX-512; the loader picks the widest that the machine supports. Lambdas and called functions are not cloned: mark the
// plain function that holds the loop, and make everything inside it always-inline.
//
// Shuffles between rows have hand-written AVX-512 code, and a loop for all other processors. A function marked
// FK_AVX512 exists where FK_HAS_AVX512_CODE is defined; call it only where has_avx512() returns true.
//
// Code with vector types (gnu::vector_size) must know their width: run_in_widest<Body>(arguments...) calls
// Body::run<bytes>(arguments...) with the widest that the machine supports.
#pragma once

#include <cstdlib>  // defines __GLIBC__

// Without clones (musl has no ifunc, clang names the architectures differently, g++ before 12 selects the wrong one), a
// kernel is compiled once, for the processor that the compiler flags name.
#if defined(__x86_64__) && defined(__GNUC__) && __GNUC__ >= 12 && !defined(__clang__) && defined(__GLIBC__)
#define FK_VECTOR_CLONES __attribute__((target_clones("default", "arch=x86-64-v3", "arch=x86-64-v4")))
#define FK_AVX2 __attribute__((target("arch=x86-64-v3")))
#define FK_AVX512 __attribute__((target("arch=x86-64-v4")))
#define FK_HAS_AVX512_CODE
// g++ 12 warns of the undefined registers in this header.
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#pragma GCC diagnostic ignored "-Wuninitialized"
#include <immintrin.h>
#pragma GCC diagnostic pop
#else
#define FK_VECTOR_CLONES
#endif

namespace focalkern::cpu {

inline bool has_avx512() {
#ifdef FK_HAS_AVX512_CODE
  return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512cd");
#else
  return false;
#endif
}

#ifdef FK_HAS_AVX512_CODE
inline bool has_avx2() {
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("bmi2");
}

template <typename Body, typename... Arguments>
FK_AVX512 void run_in_64_bytes(Arguments&... arguments) {
  Body::template run<64>(arguments...);
}
template <typename Body, typename... Arguments>
FK_AVX2 void run_in_32_bytes(Arguments&... arguments) {
  Body::template run<32>(arguments...);
}
#endif

template <typename Body, typename... Arguments>
void run_in_widest(Arguments&&... arguments) {
#ifdef FK_HAS_AVX512_CODE
  if (has_avx512()) return run_in_64_bytes<Body>(arguments...);
  if (has_avx2()) return run_in_32_bytes<Body>(arguments...);
#endif
  Body::template run<16>(arguments...);
}

}  // namespace focalkern::cpu
