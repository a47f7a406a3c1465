// Storage types for the host and the device, and the macro that declares functions for both.
#pragma once

#include <cstdint>
#include <limits>
#include <type_traits>

#if defined(__CUDACC__)
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#define FK_HOST_DEVICE __host__ __device__ __forceinline__
#else
#define FK_HOST_DEVICE inline __attribute__((always_inline))
#endif

namespace focalkern {

struct Half {
  uint16_t bits;
};
struct BFloat16 {
  uint16_t bits;
};

// The type that a storage type computes in: float for anything narrower than double.
template <typename Scalar>
struct ComputeType {
  using type = float;
};
template <>
struct ComputeType<double> {
  using type = double;
};
template <typename Scalar>
using compute_t = typename ComputeType<Scalar>::type;

// gcc and nvcc both turn this into a register move.
template <typename To, typename From>
FK_HOST_DEVICE To bit_cast(From from) {
  static_assert(sizeof(To) == sizeof(From), "bit_cast needs types of one size");
  To to;
  __builtin_memcpy(&to, &from, sizeof(To));
  return to;
}

FK_HOST_DEVICE float load_as_compute(float x) { return x; }
FK_HOST_DEVICE double load_as_compute(double x) { return x; }
FK_HOST_DEVICE float load_as_compute(BFloat16 x) { return bit_cast<float>(static_cast<uint32_t>(x.bits) << 16); }
FK_HOST_DEVICE float load_as_compute(Half x) {
#if defined(__CUDA_ARCH__)
  return __half2float(__ushort_as_half(x.bits));
#else
  // Puts the fraction into a float with a small exponent. Multiplying by 0x1p112f = 2^(127 - 15) corrects the exponent,
  // also for denormal halves.
  const uint32_t magnitude = static_cast<uint32_t>(x.bits & 0x7fffu) << 13;
  const uint32_t sign = static_cast<uint32_t>(x.bits & 0x8000u) << 16;
  const float rebiased = bit_cast<float>(magnitude) * 0x1p112f;
  // Infinities and NaN have all exponent bits set.
  const uint32_t special = magnitude | 0x7f800000u;
  const uint32_t bits = magnitude >= 0x0f800000u ? special : bit_cast<uint32_t>(rebiased);
  return bit_cast<float>(bits | sign);
#endif
}

template <typename Scalar>
struct Store;
template <>
struct Store<float> {
  static FK_HOST_DEVICE float from_compute(float x) { return x; }
};
template <>
struct Store<double> {
  static FK_HOST_DEVICE double from_compute(double x) { return x; }
};
template <>
struct Store<BFloat16> {
  static FK_HOST_DEVICE BFloat16 from_compute(float x) {
#if defined(__CUDA_ARCH__)
    return BFloat16{__bfloat16_as_ushort(__float2bfloat16_rn(x))};
#else
    // Rounds to nearest, ties to even; rounding must not turn a NaN into an infinity.
    const uint32_t bits = bit_cast<uint32_t>(x);
    const uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
    return BFloat16{static_cast<uint16_t>(x != x ? 0x7fc0u : rounded)};
#endif
  }
};
template <>
struct Store<Half> {
  static FK_HOST_DEVICE Half from_compute(float x) {
#if defined(__CUDA_ARCH__)
    return Half{__half_as_ushort(__float2half_rn(x))};
#else
    const uint32_t bits = bit_cast<uint32_t>(x);
    const uint32_t sign = (bits >> 16) & 0x8000u;
    const uint32_t magnitude = bits & 0x7fffffffu;
    // Normal results: corrects the exponent and rounds to nearest even in integers. A carry reaches the exponent; past
    // the largest half it gives infinity, as do larger numbers.
    const uint32_t rebiased = (magnitude - 0x38000000u + 0x0fffu + ((magnitude >> 13) & 1u)) >> 13;
    const uint32_t normal = rebiased < 0x7c00u ? rebiased : 0x7c00u;
    // Denormal results: after adding 0.5 the float adder rounds at half's smallest step, 2^-24.
    const uint32_t denormal = bit_cast<uint32_t>(bit_cast<float>(magnitude) + 0.5f) - 0x3f000000u;
    const uint32_t finite = magnitude < 0x38800000u ? denormal : normal;
    return Half{static_cast<uint16_t>((x != x ? 0x7e00u : finite) | sign)};
#endif
  }
};

// The tolerance for the sum of a row of probabilities: 1e-3, plus the rounding error of entries in a narrow type.
template <typename Scalar>
FK_HOST_DEVICE double probability_sum_tolerance() {
  return 1e-3;
}
template <>
FK_HOST_DEVICE double probability_sum_tolerance<Half>() {
  return 1e-3 + 0x1p-11;
}
template <>
FK_HOST_DEVICE double probability_sum_tolerance<BFloat16>() {
  return 1e-3 + 0x1p-8;
}

}  // namespace focalkern
