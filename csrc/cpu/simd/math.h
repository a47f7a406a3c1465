// Elementary functions for the loops over rows: those of math/portable.h with fewer instructions, for narrower domains.
// The exponential also takes vectors (gnu::vector_size).
#pragma once

#include <cstdint>
#include <limits>
#include <type_traits>
#include <utility>

#include "cpu/simd/dispatch.h"
#include "cpu/simd/vector.h"
#include "math/portable.h"

// g++ warns that returning such vectors changes the ABI; all callers are inlined.
#pragma GCC diagnostic ignored "-Wpsabi"

namespace focalkern::cpu {
namespace {

// The type of a vector's lanes, and an integer of the same width. A plain number is its own lane.
template <typename Real, bool = std::is_floating_point_v<Real>>
struct Lane {
  using type = Real;
  using Bits = std::make_unsigned_t<typename detail::Format<Real>::Int>;
};
template <typename Vector>
struct Lane<Vector, false> {
  using type = std::remove_reference_t<decltype(std::declval<Vector&>()[0])>;
  using Bits = decltype(std::declval<Vector>() < std::declval<Vector>());
};

// Below this x, e^x is negligible against 1 and counts as 0: its power of two has the biased exponent 0.
// exponential_by_table gives 0 only near x = -127 ln 2, within half a step of its table.
template <typename Real>
constexpr Real kExpZero = static_cast<Real>(sizeof(Real) == sizeof(float) ? -88.03 : -709);

template <typename Real>
struct ScaledExponential {
  Real mantissa;  // in [sqrt(1/2), sqrt(2)]
  Real scale;     // a power of two or, with a table, a power of its root; anything down to 0 below 2^-126
};

// x = n ln 2 + r with |r| <= ln(2)/2, for a number or a vector, x in [kExpZero, -kExpZero]. At kExpZero the scale is 0.
template <typename Real>
struct ReducedPower {
  Real r;
  Real tail;   // (e^r - 1 - r) / r^2
  Real scale;  // 2^n, or 0
};
template <typename Real>
FK_HOST_DEVICE ReducedPower<Real> reduced_power(const Real& x) {
  using Number = typename Lane<Real>::type;
  using F = detail::Format<Number>;
  using Bits = typename Lane<Real>::Bits;
  // As in bounded_exponential: the low bits hold n plus the bias, and a shift makes 2^n of them.
  const Real shifted = x * F::kLog2e + F::kRoundToBiased;
  const Real n = shifted - F::kRoundToBiased;
  const Real r = (x - n * F::kLn2Hi) - n * F::kLn2Lo;
  Bits bits;
  __builtin_memcpy(&bits, &shifted, sizeof(bits));
  bits <<= F::kMantissaBits;
  Real scale;
  __builtin_memcpy(&scale, &bits, sizeof(scale));
  // The polynomial of detail::exp_tail.
  Real q;
  if constexpr (sizeof(Number) == sizeof(float)) {
    q = 1.3926251e-3f * r + 8.3632329e-3f;
    q = q * r + 4.1666554e-2f;
    q = q * r + 1.6666577e-1f;
    q = q * r + 0.5f;
  } else {
    q = 2.5100472505694996e-8 * r + 2.7620201591031549e-7;
    q = q * r + 2.7557268976905696e-6;
    q = q * r + 2.4801521057868205e-5;
    q = q * r + 1.9841269863171556e-4;
    q = q * r + 1.3888888917367081e-3;
    q = q * r + 8.3333333333300382e-3;
    q = q * r + 4.1666666666623821e-2;
    q = q * r + 1.6666666666666667e-1;
    q = q * r + 0.5;
  }
  return {r, q, scale};
}

#ifdef FK_HAS_AVX512_CODE
// A register of 8 or 16 floats holds a table of the roots 2^(k / lanes), which one instruction looks up. With x = m
// ln(2) / lanes + r, r is so small that a polynomial of degree three suffices, which saves four multiply-adds. Its
// error is 1.6e-9 with 16 lanes and 2.6e-8 with 8. Rounding ln(2) to one float adds 2.7e-9 |x|, a twentieth of the
// error that rounding x itself causes. x - m ln(2) / lanes must be one fused multiply-add.
template <int lanes>
struct RootsOfTwo;
template <>
struct RootsOfTwo<16> {
  static constexpr int kBits = 4;
  static constexpr float kPerLn2 = 23.08312f, kLn2 = 0.0433217f, kSquare = 0.50001615f, kCube = 0.16666718f;
  // The bits of 2^(k / 16) minus k << 19. Adding m << 19 restores that k and sets the exponent.
  static constexpr int kTable[] = {0x3f800000, 0x3f7daac3, 0x3f7b95c2, 0x3f79c3d3, 0x3f7837f0, 0x3f76f532,
                                   0x3f75fed7, 0x3f75583f, 0x3f7504f3, 0x3f7508a4, 0x3f75672a, 0x3f76248c,
                                   0x3f7744fd, 0x3f78ccdf, 0x3f7ac0c7, 0x3f7d257d};
};
template <>
struct RootsOfTwo<8> {
  static constexpr int kBits = 3;
  static constexpr float kPerLn2 = 11.54156f, kLn2 = 0.0866434f, kSquare = 0.50006455f, kCube = 0.16666858f;
  static constexpr int kTable[] = {0x3f800000, 0x3f7b95c2, 0x3f7837f0, 0x3f75fed7,
                                   0x3f7504f3, 0x3f75672a, 0x3f7744fd, 0x3f7ac0c7};
};

template <typename Reals>
FK_HOST_DEVICE ScaledExponential<Reals> exponential_by_table(const Reals& x) {
  using Roots = RootsOfTwo<sizeof(Reals) / sizeof(float)>;
  using Bits = simd_t<uint32_t, sizeof(Reals) / sizeof(float)>;  // unsigned: sums wrap
  constexpr float kRoundToInt = detail::Format<float>::kRoundToInt;
  constexpr float kStepsToZero = kExpZero<float> * Roots::kPerLn2 + 127 * (1 << Roots::kBits);
  static_assert(kStepsToZero > -0.5f && kStepsToZero < 0.5f);
  const Reals shifted = x * Roots::kPerLn2 + kRoundToInt;
  const Reals m = shifted - kRoundToInt;
  const Reals r = x - m * Roots::kLn2;
  Bits table, bits;
  __builtin_memcpy(&table, Roots::kTable, sizeof(table));
  __builtin_memcpy(&bits, &shifted, sizeof(bits));
  // The lowest bits select the root; the others are the exponent.
  bits = __builtin_shuffle(table, bits) + (bits << (detail::Format<float>::kMantissaBits - Roots::kBits));
  Reals scale;
  __builtin_memcpy(&scale, &bits, sizeof(scale));
  const Reals q = (Roots::kCube * r + Roots::kSquare) * r + 1.0f;
  return {q * r + 1.0f, scale};
}
#endif

// e^x as two factors, for x in the same range. Other x give arbitrary numbers; NaN gives a NaN mantissa. Slightly above
// kExpZero, where e^x is denormal, the result may be too small, down to 0.
template <typename Real>
FK_HOST_DEVICE ScaledExponential<Real> scaled_exponential(const Real& x) {
#ifdef FK_HAS_AVX512_CODE
  // Vectors of this width occur only on processors with AVX-512.
  constexpr bool is_wide = sizeof(Real) == 32 || sizeof(Real) == 64;
  if constexpr (is_wide && std::is_same_v<typename Lane<Real>::type, float>) return exponential_by_table(x);
#endif
  constexpr typename Lane<Real>::type kOne = 1;
  const ReducedPower<Real> power = reduced_power(x);
  return {kOne + power.r * (kOne + power.r * power.tail), power.scale};
}

// e^-fall, which is 0 where fall >= `most`. With kMayRise the fall may also be negative; it is clamped to -most.
template <bool kMayRise = false, typename Reals>
FK_HOST_DEVICE ScaledExponential<Reals> exponential_of_fall(const Reals& fall, const Reals& most) {
  const Reals bounded = fall > most ? most : fall;
  if constexpr (kMayRise) {
    const Reals least = -most;
    return scaled_exponential(-(bounded < least ? least : bounded));
  }
  return scaled_exponential(-bounded);
}

// log(2^n (1 + f)) for 1 + f in [sqrt(1/2), sqrt(2)]. For float: no division, error 8e-9 plus the last rounding.
// `power` is n shifted to the bits of the exponent; the constants divide this factor out.
template <typename Real>
FK_HOST_DEVICE Real log_of_parts(Real f, typename detail::Format<Real>::Int power) {
  using F = detail::Format<Real>;
  if constexpr (sizeof(Real) == sizeof(float)) {
    const float n = static_cast<float>(power);
    // (log(1 + f) - f + f^2 / 2) / f^3
    float q = -7.6342300e-2f;
    q = q * f + 1.2761469e-1f;
    q = q * f - 1.3160233e-1f;
    q = q * f + 1.4201777e-1f;
    q = q * f - 1.6623354e-1f;
    q = q * f + 2.0001227e-1f;
    q = q * f - 2.5000823e-1f;
    q = q * f + 3.3333331e-1f;
    const float tail = (f * f) * (f * q - 0.5f) + n * (F::kLn2Lo * 0x1p-23f);
    return n * (F::kLn2Hi * 0x1p-23f) + (f + tail);
  } else {
    // Before AVX-512 no instruction converts these integers; adding their bits to a float converts them.
    const Real n =
        bit_cast<Real>((power >> F::kMantissaBits) + bit_cast<decltype(power)>(F::kRoundToInt)) - F::kRoundToInt;
    const Real s = f / (Real(2) + f);
    const Real w = s * s;
    const Real half_square = Real(0.5) * f * f;
    const Real tail = s * (half_square + w * detail::log_tail(w)) + n * F::kLn2Lo;
    return n * F::kLn2Hi + (f - (half_square - tail));
  }
}

// log(a + b) for a sum below 2^126, corrected for the rounding of the sum if a >= |b|. NaN stays NaN. For a denormal
// sum the error is up to 4e-5; for 0 the result is some number below kExpZero. Negative sums are not allowed.
template <typename Real>
FK_HOST_DEVICE Real log_of_sum(Real a, Real b) {
  using F = detail::Format<Real>;
  using Int = typename F::Int;
  using Bits = std::make_unsigned_t<Int>;  // unsigned: differences and shifts wrap
  constexpr Bits kSqrtHalf = sizeof(Real) == 4 ? Bits(0x3f3504f3) : Bits(0x3fe6a09e667f3bcd);
  constexpr Bits kMantissa = (Bits(1) << F::kMantissaBits) - 1;
  const Bits power = (bit_cast<Bits>(a + b) - kSqrtHalf) & ~kMantissa;
  const Real scale = bit_cast<Real>(static_cast<Bits>(bit_cast<Bits>(Real(1)) - power));
  // As in detail::log_of_normal, with f = m - 1. For a sum near 1 all products and differences but one are exact.
  const Real f = b * scale + (a * scale - Real(1));
  return log_of_parts(f, static_cast<Int>(power));
}

// log_of_sum for a = 1 or b = 0: log1p in some lanes, log in others. -inf at 0.
template <typename Real>
FK_HOST_DEVICE Real log_of_unit_sum(Real a, Real b) {
  const Real result = log_of_sum(a, b);
  return a + b == Real(0) ? -std::numeric_limits<Real>::infinity() : result;
}

}  // namespace
}  // namespace focalkern::cpu
