// The losses of detectors that score a box by its overlap: varifocal, matchability (MAL) and IoU-aware binary
// cross-entropy (IA-BCE). A target t of 0 is the background, any other is the score of a matched box.
//
//   t = 0   alpha p^gamma (-log(1 - p)),  p = sigmoid(x); IA-BCE has no alpha here
//   t > 0   w (-s log p - (1 - s) log(1 - p))
//             varifocal     s = w = t
//             matchability  s = t^gamma, w = 1
//             IA-BCE        s = max(p^alpha t^(1 - alpha), floor), w = 1; s is detached
//
// p^gamma may be detached; then only -log(1 - p) is differentiated.
#pragma once

#include "math/sigmoid_loss.h"

namespace focalkern {

// Target of a matched box. Score 0 becomes the smallest normal number, because target 0 means background.
template <typename Real>
FK_HOST_DEVICE Real score_of_match(Real score) {
  return score == Real(0) ? std::numeric_limits<Real>::min() : score;
}

// `with.positive` is alpha. `with.constant` is the floor for IA-BCE; for the others it is 1 if p^gamma is detached,
// else 0.
struct ScoredTerms {
  template <bool kHard, typename Real, typename Power>
  static FK_HOST_DEVICE SigmoidTerms<Real> terms(Real x, Real share, const SigmoidParameters<Real, Power>& with,
                                                 ScoredLoss kind) {
    const bool is_ia = kind == ScoredLoss::kIaBce, is_matchability = kind == ScoredLoss::kMatchability;
    const Real t = kHard ? share : checked_share(share);
    const bool is_matched = t > Real(0);
    const LogitPieces<Real> z = logit_pieces(x);
    const Real small = z.e * z.r;
    const Real p = z.positive ? z.r : small, q = z.positive ? small : z.r;
    const Real log_p = -((z.positive ? Real(0) : z.size) + z.log1p_e);
    const Real minus_log_q = (z.positive ? z.size : Real(0)) + z.log1p_e;
    const Real log_t = kHard ? Real(0) : logarithm(is_matched ? t : Real(1));

    // Matchability needs t^gamma for a match and p^gamma for the background; one evaluation per element computes
    // whichever applies.
    const bool of_score = is_matchability && is_matched;
    const Real power = with.gamma(of_score ? t : p, of_score ? log_t : log_p);
    const Real factor = is_ia ? power : with.positive * power;
    const Real attached = is_ia ? Real(1) : Real(1) - with.constant;
    const Real background = factor * minus_log_q;
    const Real background_slope = factor * (p + attached * with.gamma.exponent * (q * minus_log_q));

    // rest = 1 - s, by expm1, which avoids cancellation for s near 1.
    Real s = t, rest = Real(1) - t, weight = Real(1);
    if (is_ia) {
      const Real log_s = share_of(with.positive, log_p) + (Real(1) - with.positive) * log_t;
      const Real mixed = exponential(log_s);
      const bool is_above = mixed > with.constant;
      const Real rest_of_mixed = -exponential_minus_one(log_s);
      s = is_above ? mixed : with.constant;
      rest = is_above ? rest_of_mixed : Real(1) - with.constant;
    } else if (is_matchability) {
      s = power;
      rest = -exponential_minus_one(with.gamma.exponent * log_t);
    } else {
      weight = t;
    }
    const Real against = z.positive ? rest : s;
    const Real entropy = share_of(against, z.size) + z.log1p_e;
    const Real nothing = t - t;  // 0, but NaN for NaN

    SigmoidTerms<Real> terms;
    terms.loss = (is_matched ? weight * entropy : background) + nothing;
    terms.slope = (is_matched ? weight * z.sign * (against - small) : background_slope) + nothing;
    const Real of_t = is_matchability ? -x * (with.gamma.exponent * (s / (is_matched ? t : Real(1)))) : entropy - t * x;
    terms.slope_target = (is_matched && !is_ia ? of_t : Real(0)) + nothing;
    const Real of_gamma = is_matchability ? -x * times_log(s, log_t) : Real(0);
    terms.slope_gamma = (is_matched ? of_gamma : times_log(background, log_p)) + nothing;
    terms.slope_positive = Real(0);
    return terms;
  }
};

// Here the loss is a template argument; in ScoredElement it is a parameter of the kernel.
template <ScoredLoss kind>
struct KnownScoredElement {
  template <bool kHard, typename Real, typename Power>
  static FK_HOST_DEVICE SigmoidTerms<Real> terms(Real x, Real share, const SigmoidParameters<Real, Power>& with) {
    return ScoredTerms::terms<kHard>(x, share, with, kind);
  }
};

struct ScoredElement {
  template <bool kHard, typename Real, typename Power>
  static FK_HOST_DEVICE SigmoidTerms<Real> terms(Real x, Real share, const SigmoidParameters<Real, Power>& with) {
    return ScoredTerms::terms<kHard>(x, share, with, with.scored);
  }
};

}  // namespace focalkern
