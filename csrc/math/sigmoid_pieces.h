// Parts of the losses of one logit (sigmoid_loss.h): powers, logarithms, exponentials, and the terms of a logit.
#pragma once

#include "math/portable.h"

namespace focalkern {

// ---- powers --------------------------------------------------------------------------------------------------------

// base^n for n = 0 ... 7 without a branch: each factor is a power of the base or 1. 0^0 = 1.
template <typename Real>
struct SmallPower {
  Real slope1, offset1, slope2, offset2, slope4, offset4;
  Real exponent;

  static FK_HOST_DEVICE bool covers(Real exponent) {
    return exponent >= Real(0) && exponent <= Real(7) && exponent == static_cast<Real>(static_cast<int>(exponent));
  }
  explicit FK_HOST_DEVICE SmallPower(Real n) : exponent(n) {
    const int bits = static_cast<int>(n);
    slope1 = (bits & 1) ? Real(1) : Real(0);
    slope2 = (bits & 2) ? Real(1) : Real(0);
    slope4 = (bits & 4) ? Real(1) : Real(0);
    offset1 = Real(1) - slope1;
    offset2 = Real(1) - slope2;
    offset4 = Real(1) - slope4;
  }
  FK_HOST_DEVICE Real operator()(Real base, Real /* log_base */) const {
    const Real square = base * base;
    return (base * slope1 + offset1) * (square * slope2 + offset2) * (square * square * slope4 + offset4);
  }
};

// base^2, the most frequent power.
template <typename Real>
struct Square {
  static constexpr Real exponent = Real(2);
  FK_HOST_DEVICE Real operator()(Real base, Real /* log_base */) const { return base * base; }
};

// base^exponent for any exponent, from the logarithm of the base. 0^0 = 1.
template <typename Real>
struct AnyPower {
  Real exponent;
  FK_HOST_DEVICE Real operator()(Real /* base */, Real log_base) const {
    return exponential(exponent == Real(0) ? Real(0) : exponent * log_base);
  }
};

// ---- pieces --------------------------------------------------------------------------------------------------------

// log(1 + e) for e in [0, 1], in half the instructions of log_one_plus.
template <typename Real>
FK_HOST_DEVICE Real log_one_plus_fraction(Real e) {
  if constexpr (sizeof(Real) == sizeof(float)) {
    // log(1 + e) / e, to 5e-9
    float q = -3.2440375e-3f;
    q = q * e + 1.9851530e-2f;
    q = q * e - 5.6959692e-2f;
    q = q * e + 1.06036745e-1f;
    q = q * e - 1.53056070e-1f;
    q = q * e + 1.96759450e-1f;
    q = q * e - 2.49541360e-1f;
    q = q * e + 3.33299640e-1f;
    q = q * e - 4.99999020e-1f;
    q = q * e + 1.0f;
    return q * e;
  } else {
    return log_one_plus(e);
  }
}

// 1 / y for y in [1, 2]: on the device by the approximate instruction, whose error is one unit in the last place there.
FK_HOST_DEVICE double reciprocal_of_sum(double y) { return 1.0 / y; }
FK_HOST_DEVICE float reciprocal_of_sum(float y) {
#if defined(__CUDA_ARCH__)
  float result;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(y));
  return result;
#else
  return 1.0f / y;
#endif
}

// e^-x for x >= 0. A result below the smallest normal number is 0, so that its product with a very large x is 0, too.
template <typename Real>
FK_HOST_DEVICE Real exponential_of_minus(Real x) {
#if defined(__CUDA_ARCH__)
  return exp(-x);
#else
  constexpr Real kMost = -detail::Format<Real>::kExpMin;
  const auto reduced = detail::reduce_exponent(-(kMost < x ? kMost : x));  // NaN stays NaN
  const Real e = detail::exp_of_reduced(reduced.r) * detail::power_of_two<Real>(reduced.n);
  return kMost < x ? Real(0) : e;
#endif
}

// e^-x in fewer operations. For NaN the result is any number, so the caller must handle NaN. Where the exact result is
// denormal, the result is about the smallest normal number, which is negligible in any sum; returning 0 would cost
// more. Bits of non-negative numbers have the order of the numbers, so the clamp compares integers; 2^n is added to the
// exponent bits. Relative error in float: 2^-23 plus x 2^-26, because the fraction of -x / ln 2 is the remainder of a
// fused product (x 2^-24 without such an instruction).
template <typename Real>
FK_HOST_DEVICE Real exponential_of_minus_number(Real x) {
#if defined(__CUDA_ARCH__)
  return exp(-x);
#else
  using F = detail::Format<Real>;
  using Int = typename F::Int;
  using Bits = std::make_unsigned_t<Int>;
  const Int most = bit_cast<Int>(-F::kExpMin), bits = bit_cast<Int>(x);
  const Real bounded = bit_cast<Real>(bits < most ? bits : most);
  const Real shifted = F::kRoundToInt - bounded * F::kLog2e;
  const Real n = shifted - F::kRoundToInt;
  Real mantissa;
  if constexpr (sizeof(Real) == sizeof(float)) {
    const Real f = -bounded * F::kLog2e - n;
    mantissa = 1.3264727e-3f;  // 2^f for |f| <= 1/2, exactly 1 at 0
    mantissa = mantissa * f + 9.6715130e-3f;
    mantissa = mantissa * f + 5.5507336e-2f;
    mantissa = mantissa * f + 2.4022242e-1f;
    mantissa = mantissa * f + 6.9314700e-1f;
    mantissa = mantissa * f + 1.0f;
  } else {
    mantissa = detail::exp_of_reduced((-bounded - n * F::kLn2Hi) - n * F::kLn2Lo);
  }
  return bit_cast<Real>(static_cast<Bits>(bit_cast<Bits>(mantissa) + (bit_cast<Bits>(shifted) << F::kMantissaBits)));
#endif
}

#if !defined(__CUDA_ARCH__)
// log(large + small) for |large| >= |small| and a normal sum. The rounding error of the sum is added to the fraction;
// for a sum near 1 it is the whole fraction. For NaN the result is any number.
template <typename Real>
FK_HOST_DEVICE Real log_of_normal_sum(Real large, Real small) {
  using F = detail::Format<Real>;
  using Int = typename F::Int;
  using Bits = std::make_unsigned_t<Int>;
  const Real sum = large + small, lost = small - (sum - large);
  constexpr Bits kSqrtHalf = sizeof(Real) == 4 ? Bits(0x3f3504f3) : Bits(0x3fe6a09e667f3bcd);
  const Int exponent = static_cast<Int>(bit_cast<Bits>(sum) - kSqrtHalf) >> F::kMantissaBits;
  const Bits shift = static_cast<Bits>(exponent) << F::kMantissaBits;
  const Real m = bit_cast<Real>(bit_cast<Bits>(sum) - shift);
  const Real n = bit_cast<Real>(static_cast<Int>(exponent + bit_cast<Int>(F::kRoundToInt))) - F::kRoundToInt;
  const Real f = (m - Real(1)) + lost * bit_cast<Real>(bit_cast<Bits>(Real(1)) - shift);
  const Real s = f / (Real(2) + f);
  const Real w = s * s;
  const Real half_square = Real(0.5) * f * f;
  const Real tail = s * (half_square + w * detail::log_tail(w)) + n * F::kLn2Lo;
  return n * F::kLn2Hi + (f - (half_square - tail));
}
#endif

template <typename Real>
struct LogitPieces {
  Real size;      // |x|
  Real e;         // exp(-|x|)
  Real r;         // 1 / (1 + e), the larger of p and 1 - p
  Real log1p_e;   // log(1 + e)
  Real sign;      // sign of x: 1 or -1
  bool positive;  // x > 0
};

// Without kNaN, a NaN gives any numbers as e, r and log1p_e.
template <bool kNaN = true, typename Real>
FK_HOST_DEVICE LogitPieces<Real> logit_pieces(Real x) {
  LogitPieces<Real> z;
  z.positive = x > Real(0);
  z.size = fabs(x);
  z.sign = z.positive ? Real(1) : Real(-1);
  z.e = kNaN ? exponential_of_minus(z.size) : exponential_of_minus_number(z.size);
  z.r = reciprocal_of_sum(Real(1) + z.e);
  z.log1p_e = log_one_plus_fraction(z.e);
  return z;
}

// Loss and derivatives of one element, from one exponential. The compiler removes the unused ones.
template <typename Real>
struct SigmoidTerms {
  Real loss;
  Real slope;           // dL/dx
  Real slope_target;    // dL/dt; not set by kHard formulas
  Real slope_gamma;     // dL/dgamma
  Real slope_positive;  // dL/dgamma_positive
};

// The losses of scored_loss.h, for kernels that take the loss as a runtime parameter.
enum class ScoredLoss : int { kVarifocal, kMatchability, kIaBce };

// The parameters of an element. Focal: `positive` and `negative` are the weights of t and 1 - t (alpha and 1 - alpha).
// Asymmetric: `positive` is gamma_positive. `constant` is the margin of the asymmetric loss and the floor of IA-BCE;
// for the other scored losses it is 1 if p^gamma is detached.
template <typename Real, typename Power>
struct SigmoidParameters {
  const Power& gamma;
  const Power& gamma_positive;
  Real positive;
  Real negative;
  Real constant;
  ScoredLoss scored{};
};

// A target outside [0, 1] makes all results NaN.
template <typename Real>
FK_HOST_DEVICE Real checked_share(Real t) {
  const bool is_share = (t >= Real(0)) & (t <= Real(1));
  return is_share ? t : std::numeric_limits<Real>::quiet_NaN();
}

// share * value; 0 for a share of 0, even if the value is infinite or NaN.
template <typename Real>
FK_HOST_DEVICE Real share_of(Real share, Real value) {
  return share == Real(0) ? Real(0) : share * value;
}

// x log y, with 0 * -inf = 0: the factor of y^gamma in the derivative of y^gamma x with respect to gamma.
template <typename Real>
FK_HOST_DEVICE Real times_log(Real x, Real log_y) {
  return x == Real(0) ? Real(0) : x * log_y;
}

// log y for a y that was rounded, from log y and 1 - y. Near 1 the logarithm is about y - 1, so the rounding error of y
// is large relative to it. Below 1/2 it is not, and `rest` is not read.
template <typename Real>
FK_HOST_DEVICE Real log_with_rest(Real log_y, Real y, Real rest) {
  return y > Real(0.5) ? log_y + ((Real(1) - y) - rest) : log_y;
}

}  // namespace focalkern
