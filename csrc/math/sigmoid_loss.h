// The losses of one logit: sigmoid focal, asymmetric and quality focal loss, for a target t in [0, 1]. Those with a
// background apart are in scored_loss.h.
//
//   p = sigmoid(x),  b = -(t log p + (1 - t) log(1 - p))
//   focal       a u^gamma b,  u = t (1 - p) + (1 - t) p,  a = positive t + negative (1 - t)
//   quality     |t - p|^gamma b
//   asymmetric  t (1 - p)^gamma_positive (-log p) + (1 - t) v^gamma (-log(1 - v)),  v = max(p - margin, 0)
//
// All of it comes from e = exp(-|x|), which neither overflows nor cancels: the larger of p and 1 - p is r = 1 / (1 +
// e), the smaller one e r, and their logarithms are -log(1 + e) and -log(1 + e) - |x|. With A the share of the target
// on the side that the logit speaks against (1 - t for x > 0, t otherwise) and B = 1 - A:
//
//   u = r (A + B e),  b = A |x| + log(1 + e),  p - t = +-(A - e r)
//
// A hard target needs less: one exponential instead of two, or a division less (kHard; without the slopes in target and
// gamma, which only the general formulas have).
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

// e^-x for x >= 0; 0 below the smallest normal number, also in products with a very large x.
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

// e^-x in fewer operations; NaN becomes any number, so the caller must handle it. Where the result would be denormal,
// it is about the smallest normal number: negligible in any sum, and cheaper than 0. The bits of non-negative numbers
// have their order, and 2^n is added to the bits of the exponent. Relative error in float: 2^-23 plus x 2^-26, because
// the fraction of -x / ln 2 is the remainder of a fused product (x 2^-24 without such an instruction).
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
// log(large + small) for |large| >= |small| and a normal sum. The rounding error of the sum is added to the fraction,
// which for a sum near 1 is all of it. NaN becomes any number.
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

// Without kNaN, the results e, r and log1p_e for a NaN are any numbers.
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

// Loss and derivatives of one element, from one exponential. The compiler removes those that are not used.
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
// Asymmetric: `margin`, and the second power.
template <typename Real, typename Power>
struct SigmoidParameters {
  const Power& gamma;
  const Power& gamma_positive;
  Real positive;
  Real negative;
  Real margin;
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

// x log y, with 0 * -inf = 0: the derivative of y^gamma x in gamma.
template <typename Real>
FK_HOST_DEVICE Real times_log(Real x, Real log_y) {
  return x == Real(0) ? Real(0) : x * log_y;
}

// ---- the losses ----------------------------------------------------------------------------------------------------

template <typename Real>
struct LossAndSlope {
  Real loss;
  Real slope;
};

struct FocalElement {
  template <bool kHard, typename Real, typename Power>
  static FK_HOST_DEVICE SigmoidTerms<Real> terms(Real x, Real share, const SigmoidParameters<Real, Power>& with) {
    if constexpr (kHard) {
      return hard_terms(x, share, with);
    } else {
      return soft_terms(x, checked_share(share), with);
    }
  }

  // With s = x for a target of 0 and s = -x for 1: u = sigmoid(s), b = softplus(s), dL/ds = u^gamma (u + gamma (1 - u)
  // b).
  template <typename Real, typename Power>
  static FK_HOST_DEVICE SigmoidTerms<Real> hard_terms(Real x, Real t, const SigmoidParameters<Real, Power>& with) {
    const bool is_one = t > Real(0);
    const Real s = is_one ? -x : x;
    const LogitPieces<Real> z = logit_pieces(s);
    // Where the logit agrees with the target, u = e r may underflow; its logarithm does not.
    const Real excess = s > Real(0) ? s : s - s;  // 0, but NaN for NaN
    const Real u = z.r * (z.positive ? Real(1) : z.e), p = z.r * (z.positive ? z.e : Real(1));
    const Real log_u = (z.positive ? Real(0) : s) - z.log1p_e;
    const Real b = excess + z.log1p_e;
    const Real factor = (is_one ? with.positive : with.negative) * with.gamma(u, log_u);
    const Real slope = factor * (u + with.gamma.exponent * p * b);
    return {factor * b, is_one ? -slope : slope, Real(0), Real(0), Real(0)};
  }

#if !defined(__CUDA_ARCH__)
  // The hard focal loss for the host's loops, in as few instructions as possible: the loss of s times `weight`, and its
  // slope in s.
  template <typename Real, typename Power>
  static FK_HOST_DEVICE LossAndSlope<Real> against_zero(Real s, Real weight, const Power& gamma) {
    const LogitPieces<Real> z = logit_pieces<false>(s);
    const bool positive = !(s < Real(0));  // NaN fails this, so that one comparison covers both
    const Real u = z.r * (positive ? Real(1) : z.e), p = z.r * (positive ? z.e : Real(1));
    const Real log_u = (positive ? Real(0) : s) - z.log1p_e;
    const Real b = (positive ? s : Real(0)) + z.log1p_e;
    const Real factor = weight * gamma(u, log_u);
    // Beyond this p is practically 0, but its product with the largest logits would not be.
    constexpr Real kMost = Real(1e4);
    return {factor * b, factor * (u + gamma.exponent * p * (b > kMost ? kMost : b))};
  }
#endif

  template <typename Real, typename Power>
  static FK_HOST_DEVICE SigmoidTerms<Real> soft_terms(Real x, Real t, const SigmoidParameters<Real, Power>& with) {
    const LogitPieces<Real> z = logit_pieces(x);
    const Real against = z.positive ? Real(1) - t : t;  // A
    const Real in_favour = z.positive ? t : Real(1) - t;
    const bool agrees = against == Real(0);
    const Real a = with.positive * t + with.negative * (Real(1) - t);
    // u = r v. Where the logit agrees with a hard target, v = e may underflow; its logarithm does not.
    const Real v = against + in_favour * z.e;
    const Real log_v = agrees ? -z.size : logarithm(agrees ? Real(1) : v);
    const Real log_u = log_v - z.log1p_e;
    const Real u = z.r * v;
    const Real b = share_of(against, z.size) + z.log1p_e;
    const Real power = with.gamma(u, log_u);
    const Real factor = a * power;

    SigmoidTerms<Real> terms;
    terms.loss = factor * b;
    // (p - t) + gamma p (1 - p) (1 - 2 t) b / u, divided by the sign of x; e / v is 1 where v = e.
    const Real e_over_v = agrees ? Real(1) : z.e / v;
    const Real distance = against - z.e * z.r;
    const Real tilt = against - in_favour;
    // b e / v first: e is 0 for a very large |x|, and gamma b may be infinite.
    terms.slope = z.sign * factor * (distance + with.gamma.exponent * z.r * tilt * (b * e_over_v));
    // du/dt = 1 - 2 p, db/dt = -x; b / v is log(1 + e) / e where v = e.
    const Real b_over_v = agrees ? (z.e == Real(0) ? Real(1) : z.log1p_e / z.e) : b / v;
    terms.slope_target = (with.positive - with.negative) * power * b +
                         (with.gamma.exponent * -z.sign * (Real(1) - z.e) * (factor * b_over_v) - factor * x);
    terms.slope_gamma = times_log(terms.loss, log_u);
    terms.slope_positive = Real(0);
    return terms;
  }
};

// For hard targets this is the focal loss without alpha.
struct QualityElement {
  template <bool kHard, typename Real, typename Power>
  static FK_HOST_DEVICE SigmoidTerms<Real> terms(Real x, Real share, const SigmoidParameters<Real, Power>& with) {
    if constexpr (kHard) {
      return FocalElement::terms<true>(
          x, share, SigmoidParameters<Real, Power>{with.gamma, with.gamma, Real(1), Real(1), Real(0)});
    }
    const Real t = checked_share(share);
    const LogitPieces<Real> z = logit_pieces(x);
    const Real against = z.positive ? Real(1) - t : t;
    const bool agrees = against == Real(0);
    const Real b = share_of(against, z.size) + z.log1p_e;
    // p - t, divided by the sign of x.
    const Real gap = against - z.e * z.r;
    const Real size = gap < Real(0) ? -gap : gap;
    const Real log_size = agrees ? -z.size - z.log1p_e : logarithm(size);
    const Real factor = with.gamma(size, log_size);

    SigmoidTerms<Real> terms;
    terms.loss = factor * b;
    // p (1 - p) / (p - t) is -r where p - t = -e r. At p = t the factor or the exponent is 0, so any finite quotient
    // will do.
    const Real divisor = gap == Real(0) ? Real(1) : gap;
    const Real quotient = z.e * z.r * z.r / divisor;
    const Real ratio = agrees ? -z.r : quotient;
    terms.slope = z.sign * factor * (gap + with.gamma.exponent * ratio * b);
    const Real b_over_gap = agrees ? -(z.e == Real(0) ? Real(1) : z.log1p_e / z.e) / z.r : b / divisor;
    terms.slope_target = -z.sign * with.gamma.exponent * factor * b_over_gap - factor * x;
    terms.slope_gamma = size == Real(0) ? Real(0) : times_log(terms.loss, log_size);
    terms.slope_positive = Real(0);
    return terms;
  }
};

struct AsymmetricElement {
  template <bool kHard, typename Real, typename Power>
  static FK_HOST_DEVICE SigmoidTerms<Real> terms(Real x, Real share, const SigmoidParameters<Real, Power>& with) {
    return terms_of<kHard>(x, share, with, with.margin > Real(0));
  }

  template <bool kHard, typename Real, typename Power>
  static FK_HOST_DEVICE SigmoidTerms<Real> terms_of(Real x, Real share, const SigmoidParameters<Real, Power>& with,
                                                    bool shifted) {
    const Real t = kHard ? share : checked_share(share);
    const LogitPieces<Real> z = logit_pieces(x);
    const Real small = z.e * z.r;
    const Real p = z.positive ? z.r : small, q = z.positive ? small : z.r;
    // t: (1 - p)^gamma_positive (-log p)
    const Real minus_log_p = (z.positive ? Real(0) : z.size) + z.log1p_e;
    const Real minus_log_q = (z.positive ? z.size : Real(0)) + z.log1p_e;
    const Real positive_factor = with.gamma_positive(q, -minus_log_q);
    const Real positive_loss = positive_factor * minus_log_p;
    const Real positive_slope = -positive_factor * (q + with.gamma_positive.exponent * (p * minus_log_p));
    // 1 - t: v^gamma (-log(1 - v)), where 1 - v = q + margin. Without a margin it is the mirror image of the other.
    const Real v = p - with.margin;
    const bool counts = v > (shifted ? Real(0) : Real(-1));
    const Real rest = q + with.margin;  // 1 - v
    const Real log_of_rest = log_of_complement(v, q, with.margin);
    const Real w = shifted ? -log_of_rest : minus_log_q;
    const Real log_of_shifted = logarithm(counts ? v : Real(1));
    const Real log_v = shifted ? log_of_shifted : -minus_log_p;
    const Real factor = with.gamma(v, log_v);
    const Real nothing = v - v;  // 0, but NaN for NaN
    const Real negative_loss = counts ? factor * w : nothing;
#if defined(__CUDA_ARCH__)
    const Real p_over_v = p / v, q_over_rest = q / rest;
    const Real inner =
        with.gamma.exponent * (q * w) * (shifted ? p_over_v : Real(1)) + p * (shifted ? q_over_rest : Real(1));
#else
    // The slope in one division.
    const Real of_power = with.gamma.exponent * (q * w);
    const Real quotient = (of_power * rest + q * v) * p / (v * rest);
    const Real inner = shifted ? quotient : of_power + p;
#endif
    const Real negative_slope = counts ? factor * inner : nothing;

    SigmoidTerms<Real> terms;
    if (kHard) {
      const bool is_positive = t > Real(0);
      terms.loss = is_positive ? positive_loss : negative_loss;
      terms.slope = is_positive ? positive_slope : negative_slope;
      terms.slope_gamma = Real(0);  // of the general formula
      terms.slope_positive = Real(0);
      terms.slope_target = Real(0);
      return terms;
    }
    const Real share_of_rest = Real(1) - t;
    // A side with a share of 0 adds 0, even if it is infinite.
    terms.loss = share_of(t, positive_loss) + share_of(share_of_rest, negative_loss);
    terms.slope = share_of(t, positive_slope) + share_of(share_of_rest, negative_slope);
    terms.slope_target = (positive_loss - negative_loss) + (t - t);
    terms.slope_gamma = share_of(share_of_rest, times_log(negative_loss, log_v));
    terms.slope_positive = share_of(t, times_log(positive_loss, -minus_log_q));
    return terms;
  }

  // log(1 - v) = log(q + margin) for a margin above 0: from v where v is small, from q and the margin where v is near
  // 1. NaN becomes any number.
  template <typename Real>
  static FK_HOST_DEVICE Real log_of_complement(Real v, Real q, Real margin) {
    const bool near_zero = v < Real(0.5);
#if defined(__CUDA_ARCH__)
    return near_zero ? log1p(-v) : log(q + margin);
#else
    const Real large = q > margin ? q : margin, small = q > margin ? margin : q;
    return log_of_normal_sum(near_zero ? Real(1) : large, near_zero ? -v : small);
#endif
  }
};

}  // namespace focalkern
