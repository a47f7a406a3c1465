// Elementary functions with the same meaning on the host and on the device.
//
// On the host every function is straight-line code without branches, so that a loop around it vectorizes at the width
// that the compiler is given. The device uses the CUDA math library, which is as accurate and faster there.
// Accuracy, float and double alike: 2 units in the last place or better over the stated domain.
#pragma once

#include <cmath>
#include <cstdint>
#include <limits>
#include <type_traits>

#include "math/storage.h"

namespace focalkern {

namespace detail {

template <typename Real>
struct Format;
template <>
struct Format<float> {
  using Int = int32_t;
  static constexpr int kMantissaBits = 23;
  static constexpr Int kBias = 127;
  static constexpr float kRoundToInt = 0x1.8p23f;  // adding it leaves the nearest integer in the low mantissa bits
  static constexpr float kRoundToBiased = kRoundToInt + kBias;
  static constexpr float kLog2e = 1.44269504088896341f;
  static constexpr float kLn2Hi = 0x1.62e4p-1f;  // short enough that n * kLn2Hi is exact for every exponent n
  static constexpr float kLn2Lo = 0x1.7f7d1cp-20f;
  static constexpr float kExpMin = -86.9f;  // below this the result is 0; denormal results would begin slightly lower
  static constexpr float kExpMax = 88.7228390f;  // above this the result is infinity
};
template <>
struct Format<double> {
  using Int = int64_t;
  static constexpr int kMantissaBits = 52;
  static constexpr Int kBias = 1023;
  static constexpr double kRoundToInt = 0x1.8p52;
  static constexpr double kRoundToBiased = kRoundToInt + kBias;
  static constexpr double kLog2e = 1.44269504088896340736;
  static constexpr double kLn2Hi = 0x1.62e42fefa0000p-1;
  static constexpr double kLn2Lo = 0x1.cf79abc9e3b39p-40;
  static constexpr double kExpMin = -707.9;
  static constexpr double kExpMax = 709.782712893384;
};

// (e^r - 1 - r) / r^2 for |r| <= ln(2)/2, relative error of e^r 1e-8 (float) and 2e-17 (double).
FK_HOST_DEVICE float exp_tail(float r) {
  float q = 1.3926251e-3f;
  q = q * r + 8.3632329e-3f;
  q = q * r + 4.1666554e-2f;
  q = q * r + 1.6666577e-1f;
  return q * r + 0.5f;
}
FK_HOST_DEVICE double exp_tail(double r) {
  double q = 2.5100472505694996e-8;
  q = q * r + 2.7620201591031549e-7;
  q = q * r + 2.7557268976905696e-6;
  q = q * r + 2.4801521057868205e-5;
  q = q * r + 1.9841269863171556e-4;
  q = q * r + 1.3888888917367081e-3;
  q = q * r + 8.3333333333300382e-3;
  q = q * r + 4.1666666666623821e-2;
  q = q * r + 1.6666666666666667e-1;
  return q * r + 0.5;
}

// (2 atanh(s) - 2 s) / s^3 as a polynomial in w = s^2, for |s| <= (sqrt(2) - 1) / (sqrt(2) + 1).
FK_HOST_DEVICE float log_tail(float w) {
  float q = 2.3332763e-1f;
  q = q * w + 2.8550736e-1f;
  q = q * w + 4.0000123e-1f;
  return q * w + 6.6666667e-1f;
}
FK_HOST_DEVICE double log_tail(double w) {
  double q = 1.4619166134887971e-1;
  q = q * w + 1.5331501611145328e-1;
  q = q * w + 1.8182895750119194e-1;
  q = q * w + 2.2222211043776858e-1;
  q = q * w + 2.8571428626533616e-1;
  q = q * w + 3.9999999999898273e-1;
  return q * w + 6.6666666666666697e-1;
}

// 2^n, for an n that makes it a normal number.
template <typename Real>
FK_HOST_DEVICE Real power_of_two(typename Format<Real>::Int n) {
  using F = Format<Real>;
  // other n may give any number, but the behaviour must be defined
  using Bits = std::make_unsigned_t<typename F::Int>;
  return bit_cast<Real>(static_cast<Bits>((static_cast<Bits>(n) + Bits(F::kBias)) << F::kMantissaBits));
}

// x = n ln 2 + r with |r| <= ln(2)/2 and n an integer.
template <typename Real>
struct ReducedExponent {
  Real r;
  typename Format<Real>::Int n;
};
template <typename Real>
FK_HOST_DEVICE ReducedExponent<Real> reduce_exponent(Real x) {
  using F = Format<Real>;
  using Int = typename F::Int;
  const Real shifted = x * F::kLog2e + F::kRoundToInt;
  const Real n = shifted - F::kRoundToInt;
  const Real r = (x - n * F::kLn2Hi) - n * F::kLn2Lo;
  using Bits = std::make_unsigned_t<Int>;
  return {r, static_cast<Int>(bit_cast<Bits>(shifted) - bit_cast<Bits>(F::kRoundToInt))};
}

// e^r for |r| <= ln(2)/2.
template <typename Real>
FK_HOST_DEVICE Real exp_of_reduced(Real r) {
  return Real(1) + r * (Real(1) + r * exp_tail(r));
}

}  // namespace detail

// e^x. Results below the smallest normal number are 0; NaN stays NaN.
template <typename Real>
FK_HOST_DEVICE Real exponential(Real x) {
#if defined(__CUDA_ARCH__)
  return exp(x);
#else
  using F = detail::Format<Real>;
  // Outside the bounds the arithmetic gives any number, which the selection discards. A clamp would cost one more
  // selection.
  const auto reduced = detail::reduce_exponent(x);
  const Real mantissa = detail::exp_of_reduced(reduced.r);
  // Two factors, because 2^n alone overflows slightly before e^x does.
  Real result = (mantissa + mantissa) * detail::power_of_two<Real>(reduced.n - 1);
  result = x < F::kExpMin ? Real(0) : result;
  return x > F::kExpMax ? std::numeric_limits<Real>::infinity() : result;
#endif
}

// e^x in fewer operations, for x below 88, or NaN.
template <typename Real>
FK_HOST_DEVICE Real bounded_exponential(Real x) {
#if defined(__CUDA_ARCH__)
  return exp(x);
#else
  using F = detail::Format<Real>;
  using Bits = std::make_unsigned_t<typename F::Int>;
  // As in reduce_exponent, but the low bits hold n plus the bias of the exponent of 2^n; a shift makes 2^n of them.
  const Real shifted = x * F::kLog2e + F::kRoundToBiased;
  const Real n = shifted - F::kRoundToBiased;
  const Real r = (x - n * F::kLn2Hi) - n * F::kLn2Lo;
  const Real scale = bit_cast<Real>(static_cast<Bits>(bit_cast<Bits>(shifted) << F::kMantissaBits));
  const Real result = detail::exp_of_reduced(r) * scale;
  return x < F::kExpMin ? Real(0) : result;
#endif
}

// e^x - 1 without cancellation near 0.
template <typename Real>
FK_HOST_DEVICE Real exponential_minus_one(Real x) {
#if defined(__CUDA_ARCH__)
  return expm1(x);
#else
  using F = detail::Format<Real>;
  Real bounded = x < F::kExpMin ? F::kExpMin : x;
  bounded = bounded > F::kExpMax ? F::kExpMax : bounded;
  const auto reduced = detail::reduce_exponent(bounded);
  const Real r = reduced.r;
  // 2^n e^r - 1 = 2^n (e^r - 1) + (2^n - 1), with n = 0 for every x that could cancel.
  const Real fraction = r + r * r * detail::exp_tail(r);
  const Real half_scale = detail::power_of_two<Real>(reduced.n - 1);
  const Real result = Real(2) * (fraction * half_scale + (half_scale - Real(0.5)));
  return x > F::kExpMax ? std::numeric_limits<Real>::infinity() : result;
#endif
}

namespace detail {

// log(m 2^e) + correction for x = m 2^e > 0 normal, with m in [sqrt(1/2), sqrt(2)).
template <typename Real>
FK_HOST_DEVICE Real log_of_normal(Real x, Real correction) {
  using F = Format<Real>;
  using Int = typename F::Int;
  using Bits = std::make_unsigned_t<Int>;  // unsigned: differences and shifts wrap
  constexpr Bits kSqrtHalf = sizeof(Real) == 4 ? Bits(0x3f3504f3) : Bits(0x3fe6a09e667f3bcd);
  const Int exponent = static_cast<Int>(bit_cast<Bits>(x) - kSqrtHalf) >> F::kMantissaBits;
  const Real m = bit_cast<Real>(bit_cast<Bits>(x) - (static_cast<Bits>(exponent) << F::kMantissaBits));
  // Before AVX-512 no vector instruction converts int64 to double; adding the bits of 1.5 * 2^52 does.
  const Real n = bit_cast<Real>(static_cast<Int>(exponent + bit_cast<Int>(F::kRoundToInt))) - F::kRoundToInt;
  const Real f = m - Real(1);
  const Real s = f / (Real(2) + f);
  const Real w = s * s;
  const Real half_square = Real(0.5) * f * f;
  // f is exact; the other terms are small compared with it.
  const Real tail = s * (half_square + w * log_tail(w)) + (n * F::kLn2Lo + correction);
  return n * F::kLn2Hi + (f - (half_square - tail));
}

// log(sum + lost), where `lost` is the rounding error of the sum. -inf at 0, NaN below.
template <typename Real>
FK_HOST_DEVICE Real log_of_rounded(Real sum, Real lost) {
  constexpr Real kInfinity = std::numeric_limits<Real>::infinity();
  Real result = log_of_normal(sum, lost / sum);
  result = sum == Real(0) ? -kInfinity : result;
  result = sum < Real(0) ? std::numeric_limits<Real>::quiet_NaN() : result;
  result = sum == kInfinity ? kInfinity : result;
  return sum != sum ? sum : result;
}

}  // namespace detail

// log x. log 0 = -inf, log of a negative number = NaN; denormal numbers count as 0.
template <typename Real>
FK_HOST_DEVICE Real logarithm(Real x) {
#if defined(__CUDA_ARCH__)
  return log(x);
#else
  constexpr Real kInfinity = std::numeric_limits<Real>::infinity();
  Real result = detail::log_of_normal(x, Real(0));
  result = x < std::numeric_limits<Real>::min() ? -kInfinity : result;
  result = x < Real(0) ? std::numeric_limits<Real>::quiet_NaN() : result;
  result = x == kInfinity ? kInfinity : result;
  return x != x ? x : result;
#endif
}

// log(1 + x) without cancellation near 0. -inf at -1, NaN below.
template <typename Real>
FK_HOST_DEVICE Real log_one_plus(Real x) {
#if defined(__CUDA_ARCH__)
  return log1p(x);
#else
  const Real sum = Real(1) + x;
  // Subtracting the larger term first makes both differences exact.
  return detail::log_of_rounded(sum, x < Real(1) ? x - (sum - Real(1)) : Real(1) - (sum - x));
#endif
}

#if !defined(__CUDA_ARCH__)
// log(large + small) for |large| >= |small|, corrected for the rounding of the sum. With small = 0 this is log, with
// large = 1 log1p; one vector may mix the two. Denormal sums are not allowed.
template <typename Real>
FK_HOST_DEVICE Real log_of_sum(Real large, Real small) {
  const Real sum = large + small;
  return detail::log_of_rounded(sum, small - (sum - large));
}
#endif

// ---- in fewer instructions, for float on the device -----------------------------------------------------------------
// Everywhere else these are the exact functions.

// e^x with a relative error of |x| 2^-24 + 2^-22. If x is a rounded difference times 1/T, rounding x causes an error at
// least as large.
template <typename Real>
FK_HOST_DEVICE Real quick_exponential(Real x) {
#if defined(__CUDA_ARCH__)
  if constexpr (sizeof(Real) == sizeof(float)) {
    float result;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x * 1.44269504f));
    return result;
  }
#endif
  return exponential(x);
}

// The base whose powers take one instruction: 2 for float on the device, e elsewhere. Logarithms to this base are
// quick_unit() times natural ones.
template <typename Real>
FK_HOST_DEVICE constexpr Real quick_unit() {
#if defined(__CUDA_ARCH__)
  if constexpr (sizeof(Real) == sizeof(float)) return Real(1.44269504);
#endif
  return Real(1);
}

// base^x with a relative error of |x| 2^-24 + 2^-22.
template <typename Real>
FK_HOST_DEVICE Real quick_power(Real x) {
#if defined(__CUDA_ARCH__)
  if constexpr (sizeof(Real) == sizeof(float)) {
    float result;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
    return result;
  }
#endif
  return exponential(x);
}

// The logarithm of a positive normal number to that base. Its error is at most 2^-22 for numbers between 1/2 and 2, and
// at most 2^-22 relative elsewhere.
template <typename Real>
FK_HOST_DEVICE Real quick_logarithm(Real x) {
#if defined(__CUDA_ARCH__)
  if constexpr (sizeof(Real) == sizeof(float)) {
    float result;
    asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
    return result;
  } else {
    return log(x);
  }
#else
  return detail::log_of_normal(x, Real(0));
#endif
}

// log x to two units in the last place, for a positive normal number.
template <typename Real>
FK_HOST_DEVICE Real logarithm_of_normal(Real x) {
#if defined(__CUDA_ARCH__)
  if constexpr (sizeof(Real) == sizeof(float)) {
    // x = 2^n (1 + f) with 2/3 <= 1 + f < 4/3, and (log(1 + f) - f + f^2 / 2) / f^3 as a polynomial.
    const uint32_t bits = bit_cast<uint32_t>(x);
    const uint32_t scaled = (bits - 0x3f2aaaabu) & 0xff800000u;  // n 2^23
    const float n = static_cast<float>(static_cast<int32_t>(scaled)) * 0x1p-23f;
    const float f = bit_cast<float>(bits - scaled) - 1.0f;
    float p = -0.128916889f;
    p = p * f + 0.139844432f;
    p = p * f - 0.1218426f;
    p = p * f + 0.140058681f;
    p = p * f - 0.16680488f;
    p = p * f + 0.200104058f;
    p = p * f - 0.249997973f;
    p = p * f + 0.333332151f;
    p = p * f - 0.5f;
    return n * 0.693147181f + (f * f * p + f);
  } else {
    return log(x);
  }
#else
  return detail::log_of_normal(x, Real(0));
#endif
}

// log(1 + x) for a finite x >= 0; the caller passes 1 / (1 + x).
template <typename Real>
FK_HOST_DEVICE Real log_one_plus(Real x, Real inverse) {
#if defined(__CUDA_ARCH__)
  if constexpr (sizeof(Real) == sizeof(float)) {
    const Real sum = Real(1) + x;
    const Real lost = fmin(x, Real(1)) - (sum - fmax(x, Real(1)));
    return logarithm_of_normal(sum) + lost * inverse;
  }
#endif
  return log_one_plus(x);
}

// The device compiler may fuse a product and the following sum in one copy of a loop's body and not in another; equal
// numbers would then have unequal results. multiply_add always fuses them on the device, rounded_product never.
template <typename Real>
FK_HOST_DEVICE Real multiply_add(Real a, Real b, Real c) {  // a b + c
#if defined(__CUDA_ARCH__)
  return fma(a, b, c);
#else
  return a * b + c;
#endif
}
template <typename Real>
FK_HOST_DEVICE Real rounded_product(Real a, Real b) {  // a b
#if defined(__CUDA_ARCH__)
  if constexpr (sizeof(Real) == sizeof(float)) {
    return __fmul_rn(a, b);
  } else {
    return __dmul_rn(a, b);
  }
#else
  return a * b;
#endif
}

// a / b to two units in the last place, for b below 2^126.
template <typename Real>
FK_HOST_DEVICE Real quick_quotient(Real a, Real b) {
#if defined(__CUDA_ARCH__)
  if constexpr (sizeof(Real) == sizeof(float)) {
    float inverse;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(inverse) : "f"(b));
    return a * inverse;
  }
#endif
  return a / b;
}

}  // namespace focalkern
