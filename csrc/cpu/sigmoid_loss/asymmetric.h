// The asymmetric loss of a hard target. One formula serves targets 0 and 1, so that the loop computes one logarithm per
// element.
//
//   L = base^gamma w,  w = -log(1 - base),  dL/dx = +-base^gamma (gamma w (1 - base) + base) ratio
//
// For target 0: base = v = max(p - margin, 0), and ratio = p (1 - p) / (v (1 - v)). For target 1: base = 1 - p, ratio =
// 1, and the sign is -.
#pragma once

#include <limits>

#include "cpu/simd/math.h"
#include "math/sigmoid_loss.h"

namespace focalkern::cpu {
namespace {

// The power for this target.
template <typename Real>
FK_HOST_DEVICE SmallPower<Real> power_of_side(bool is_one, const SmallPower<Real>& zero, const SmallPower<Real>& one) {
  SmallPower<Real> power = zero;
  power.slope1 = is_one ? one.slope1 : zero.slope1;
  power.slope2 = is_one ? one.slope2 : zero.slope2;
  power.slope4 = is_one ? one.slope4 : zero.slope4;
  power.offset1 = Real(1) - power.slope1;
  power.offset2 = Real(1) - power.slope2;
  power.offset4 = Real(1) - power.slope4;
  power.exponent = is_one ? one.exponent : zero.exponent;
  return power;
}
template <typename Real>
FK_HOST_DEVICE AnyPower<Real> power_of_side(bool is_one, const AnyPower<Real>& zero, const AnyPower<Real>& one) {
  return {is_one ? one.exponent : zero.exponent};
}

// kShifted: the margin is at least 1e-30. Relative to it, the error of 1 - p near 0 (see exponential_of_minus_number)
// is negligible.
template <bool kShifted, typename Real, typename Power>
FK_HOST_DEVICE LossAndSlope<Real> hard_asymmetric_loss(Real x, bool is_one, Real margin, const Power& negative,
                                                       const Power& positive) {
  // Beyond this, 1 - base is negligible, but its product with the largest logits would not be.
  constexpr Real kMost = Real(1e4);
  const LogitPieces<Real> z = logit_pieces<false>(x);
  const Real small = z.e * z.r;
  const Real p = z.positive ? z.r : small, q = z.positive ? small : z.r;
  const Real excess_of_p = z.positive ? Real(0) : z.size, excess_of_q = z.positive ? z.size : Real(0);
  const Power power = power_of_side(is_one, negative, positive);
  Real base = is_one ? q : p, rest = is_one ? p : q, w, log_base, ratio = 1;
  if constexpr (kShifted) {
    // Selections only: gcc does not vectorize loops with && or ||.
    const Real shift = is_one ? Real(0) : margin, half = is_one ? Real(2) : Real(0.5);
    base -= shift;
    base = base > Real(0) ? base : Real(0);
    rest += shift;
    // For target 1: log(1 + e). For target 0: log(1 - v), computed from v where v is small, and from q and the margin
    // where v is near 1.
    const bool is_large = base >= half;
    const Real larger = q > margin ? q : margin, smaller = q > margin ? margin : q;
    const Real added = is_one ? z.e : -base;
    const Real log = log_of_sum(is_large ? larger : Real(1), is_large ? smaller : added);
    const Real of_one = excess_of_p + log, log_of_q = -excess_of_q - log;
    w = is_one ? of_one : Real(0) - log;  // not -0
    const Real log_of_v = logarithm(is_one ? Real(1) : base);
    log_base = is_one ? log_of_q : log_of_v;
    const Real quotient = p * q / (base * rest), v = is_one ? Real(0) : base;
    ratio = v > Real(0) ? quotient : Real(1);
  } else {
    w = (is_one ? excess_of_p : excess_of_q) + z.log1p_e;
    log_base = -(is_one ? excess_of_q : excess_of_p) - z.log1p_e;
  }
  const Real factor = x == x ? power(base, log_base) : std::numeric_limits<Real>::quiet_NaN();
  const Real slope = factor * (power.exponent * (w < kMost ? w : kMost) * rest + base) * ratio;
  return {factor * w, is_one ? -slope : slope};
}

}  // namespace
}  // namespace focalkern::cpu
