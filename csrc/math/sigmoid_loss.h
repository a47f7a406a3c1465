// The losses of one logit: sigmoid focal, asymmetric and quality focal loss, for a target t in [0, 1]. scored_loss.h
// has the losses that treat the background separately.
//
//   p = sigmoid(x),  b = -(t log p + (1 - t) log(1 - p))
//   focal       a u^gamma b,  u = t (1 - p) + (1 - t) p,  a = positive t + negative (1 - t)
//   quality     |t - p|^gamma b
//   asymmetric  t (1 - p)^gamma_positive (-log p) + (1 - t) v^gamma (-log(1 - v)),  v = max(p - margin, 0)
//
// Everything follows from e = exp(-|x|), which neither overflows nor cancels. The larger of p and 1 - p is r = 1 / (1 +
// e), the smaller e r; their logarithms are -log(1 + e) and -log(1 + e) - |x|. Let A be the share of the target that
// contradicts the sign of the logit (1 - t for x > 0, t otherwise) and B = 1 - A:
//
//   u = r (A + B e),  b = A |x| + log(1 + e),  p - t = +-(A - e r)
//
// A hard target saves an exponential or a division (kHard). Only the general formulas have the derivatives in target
// and gamma.
#pragma once

#include "math/portable.h"
#include "math/sigmoid_pieces.h"

namespace focalkern {

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
  // The hard focal loss for the host's loops, in as few instructions as possible: the loss at s times `weight`, and its
  // derivative in s.
  template <typename Real, typename Power>
  static FK_HOST_DEVICE LossAndSlope<Real> against_zero(Real s, Real weight, const Power& gamma) {
    const LogitPieces<Real> z = logit_pieces<false>(s);
    const bool positive = !(s < Real(0));  // NaN fails the comparison and counts as positive
    const Real u = z.r * (positive ? Real(1) : z.e), p = z.r * (positive ? z.e : Real(1));
    const Real log_u = (positive ? Real(0) : s) - z.log1p_e;
    const Real b = (positive ? s : Real(0)) + z.log1p_e;
    const Real factor = weight * gamma(u, log_u);
    // Beyond this, p is negligible, but its product with the largest logits would not be.
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
    // b e / v comes first: e is 0 for a very large |x|, and gamma b may be infinite.
    terms.slope = z.sign * factor * (distance + with.gamma.exponent * z.r * tilt * (b * e_over_v));
    // du/dt = 1 - 2 p, db/dt = -x; b / v is log(1 + e) / e where v = e.
    const Real b_over_v = agrees ? (z.e == Real(0) ? Real(1) : z.log1p_e / z.e) : b / v;
    terms.slope_target = (with.positive - with.negative) * power * b +
                         (with.gamma.exponent * -z.sign * (Real(1) - z.e) * (factor * b_over_v) - factor * x);
    // v = 1 - (1 - A) (1 - e)
    const Real exact_log_v = log_with_rest(log_v, v, in_favour * (Real(1) - z.e));
    terms.slope_gamma = times_log(terms.loss, exact_log_v - z.log1p_e);
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
    const Real in_favour = z.positive ? t : Real(1) - t;
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
    // Where |p - t| is near 1, it is 1 - (1 - A + e r).
    const Real exact_log_size = log_with_rest(log_size, size, in_favour + z.e * z.r);
    terms.slope_gamma = size == Real(0) ? Real(0) : times_log(terms.loss, exact_log_size);
    terms.slope_positive = Real(0);
    return terms;
  }
};

struct AsymmetricElement {
  template <bool kHard, typename Real, typename Power>
  static FK_HOST_DEVICE SigmoidTerms<Real> terms(Real x, Real share, const SigmoidParameters<Real, Power>& with) {
    return terms_of<kHard>(x, share, with, with.constant > Real(0));
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
    // 1 - t: v^gamma (-log(1 - v)), where 1 - v = q + margin. Without a margin it mirrors the term of t.
    const Real v = p - with.constant;
    const bool counts = v > (shifted ? Real(0) : Real(-1));
    const Real rest = q + with.constant;  // 1 - v
    const Real log_of_rest = log_of_complement(v, q, with.constant);
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
    // The derivative, with one division.
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
      terms.slope_gamma = Real(0);  // only the general formula computes it, as the next two
      terms.slope_positive = Real(0);
      terms.slope_target = Real(0);
      return terms;
    }
    const Real share_of_rest = Real(1) - t;
    // A side with a share of 0 adds 0, even if its loss is infinite.
    terms.loss = share_of(t, positive_loss) + share_of(share_of_rest, negative_loss);
    terms.slope = share_of(t, positive_slope) + share_of(share_of_rest, negative_slope);
    terms.slope_target = (positive_loss - negative_loss) + (t - t);
    const Real exact_log_v = shifted ? log_with_rest(log_v, v, rest) : log_v;
    terms.slope_gamma = share_of(share_of_rest, times_log(negative_loss, exact_log_v));
    terms.slope_positive = share_of(t, times_log(positive_loss, -minus_log_q));
    return terms;
  }

  // log(1 - v) = log(q + margin) for a margin above 0: computed from v where v is small, and from q and the margin
  // where v is near 1. For NaN the result is any number.
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
