// The losses of math/scored_loss.h for the loops, in fewer instructions.
//
// The background is a match of score s = 0 with the weight w = alpha p^gamma (IA-BCE: p^gamma):
//
//   L = w b,  b = -s log p - (1 - s) log(1 - p),  dL/dx = w (p - s)
//
// If p^gamma is not detached, the background has w gamma (1 - p) b more in dL/dx.
#pragma once

#include <limits>

#include "cpu/sigmoid_loss/tile.h"
#include "math/scored_loss.h"

namespace focalkern::cpu {
namespace {

// `constant` is the floor of IA-BCE. A target that is not hard may be any number.
template <ScoredLoss kLoss, Targets kTargets, bool kDetached, typename Real, typename Power>
FK_HOST_DEVICE LossAndSlope<Real> scored_loss(Real x, Real t, Real alpha, Real constant, const Power& gamma) {
  constexpr bool kIa = kLoss == ScoredLoss::kIaBce, kMatchability = kLoss == ScoredLoss::kMatchability;
  constexpr bool kHard = kTargets != Targets::kSoft;
  constexpr bool kHardScore = kTargets == Targets::kLabels || (kTargets == Targets::kHard && !kIa);
  // Beyond this, 1 - p is negligible, but its product with the largest logits would not be.
  constexpr Real kMost = Real(1e4);
  const LogitPieces<Real> z = logit_pieces<false>(x);
  const Real small = z.e * z.r;
  const Real p = z.positive ? z.r : small, q = z.positive ? small : z.r;
  const Real log_p = -((z.positive ? Real(0) : z.size) + z.log1p_e);
  const bool is_matched = t > Real(0);
  const Real log_t = kHard ? Real(0) : logarithm(is_matched ? t : Real(1));

  // Matchability needs t^gamma for a match and p^gamma for the background; one evaluation per element computes
  // whichever applies.
  const bool of_score = kMatchability && is_matched;
  const Real power = gamma(of_score ? t : p, of_score ? log_t : log_p);
  const Real of_background = kIa ? power : alpha * power;
  // rest = 1 - s, by expm1, which avoids cancellation for s near 1.
  Real s = t, rest = Real(1) - t, of_match = Real(1);
  if constexpr (kIa) {
    const Real log_s = share_of(alpha, log_p) + (Real(1) - alpha) * log_t;
    const Real mixed = exponential(log_s);
    const bool is_above = mixed > constant;
    const Real rest_of_mixed = -exponential_minus_one(log_s);
    const Real of_s = is_above ? mixed : constant, of_rest = is_above ? rest_of_mixed : Real(1) - constant;
    s = is_matched ? of_s : Real(0);
    rest = is_matched ? of_rest : Real(1);
  } else if constexpr (kMatchability) {
    const Real of_rest = -exponential_minus_one(gamma.exponent * log_t);
    s = is_matched ? power : Real(0);
    rest = is_matched ? of_rest : Real(1);
  } else {
    of_match = t;
  }
  const Real against = z.positive ? rest : s;
  const Real product = against * z.size;
  const Real of_soft = product > Real(0) ? product : Real(0);  // 0 times an infinite logit is 0
  const Real of_hard = is_matched == z.positive ? Real(0) : z.size;
  const Real b = (kHardScore ? of_hard : of_soft) + z.log1p_e;
  const Real distance = kHardScore ? (is_matched ? -q : p) : z.sign * (against - small);  // p - s
  // Selections and bits only: gcc does not vectorize loops with && or ||.
  const bool is_number = x == x;
  const bool is_valid = kHard ? is_number : (t >= Real(0)) & (t <= Real(1)) & is_number;
  const Real weight = is_matched ? of_match : of_background;
  const Real w = is_valid ? weight : std::numeric_limits<Real>::quiet_NaN();
  Real slope = w * distance;
  if constexpr (!kDetached) {
    const Real of_power = w * (gamma.exponent * (q * (b < kMost ? b : kMost)));
    slope += is_matched ? Real(0) : of_power;
  }
  return {w * b, slope};
}

}  // namespace
}  // namespace focalkern::cpu
