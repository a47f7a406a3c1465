// The loss of dynamic fine-tuning of one class: cross-entropy weighted by a power of the probability.
//
//   L = -p^gamma log p      dL/dz_j = c (p_j - [j = y]),  c = p^gamma (1 + gamma log p),  detached c = p^gamma
//
// gamma must be at least 0; otherwise every result is NaN. At p = 0 the loss is 0, but infinite for gamma = 0.
#pragma once

#include "math/row_loss.h"

namespace focalkern {

// p^gamma for each kind of gamma, 0 at p = 0 unless gamma is 0. A whole gamma takes powers of p, any other gamma the
// exponential of gamma log p.
template <typename Real, int kGamma, typename Reals>
FK_HOST_DEVICE Reals power_of(const WholeGamma<Real, kGamma>& /*gamma*/, const Reals& p, const Reals& /*minus_log_p*/) {
  if constexpr (kGamma == 0) return Reals{} + Real(1);
  if constexpr (kGamma == 1) return p;
  if constexpr (kGamma == 2) return p * p;
  return p * p * p;
}
template <typename Real>
FK_HOST_DEVICE Real power_of(const AnyGamma<Real>& gamma, const Real& /*p*/, const Real& minus_log_p) {
  return quick_exponential(-scaled_log(gamma.exponent + Real(1), minus_log_p));
}

struct DftFormula : SumOverClasses<DftFormula> {
  static constexpr bool kHasInverse = false;

  template <bool kEverInverse, typename Real>
  static FK_HOST_DEVICE FocalTerms<Real> terms(Real log_p, Real /*log_u*/, Real given_gamma, Real /*epsilon*/) {
    const Real gamma = given_gamma < Real(0) ? std::numeric_limits<Real>::quiet_NaN() : given_gamma;
    const Real factor = exponential(scaled_log(gamma, log_p));
    return of_factor(factor, Real(-log_p), gamma);
  }

  template <typename Gamma, typename Real>
  static FK_HOST_DEVICE FocalTerms<Real> unlikely(const Real& p, const MinusLog<Real>& minus_log_p, const Gamma& gamma,
                                                  number_t<Real> /*epsilon*/) {
    return of_factor(Real(power_of(gamma, p, minus_log_p.value)), minus_log_p.value, gamma.pull);
  }

 private:
  // pull: gamma, or 0 if the factor is detached.
  template <typename Real, typename Pull>
  static FK_HOST_DEVICE FocalTerms<Real> of_factor(const Real& factor, const Real& minus_log_p, const Pull& pull) {
    using Number = number_t<Real>;
    // Where the factor is 0 the loss is 0, even if -log p is infinite. An infinite loss has gradient 0.
    const auto vanishes = factor == Real{};
    const auto infinite = minus_log_p == std::numeric_limits<Number>::infinity() + Real{};
    const Real finite = (vanishes | infinite) ? Real{} : minus_log_p;
    FocalTerms<Real> terms;
    terms.factor = factor;
    terms.coefficient = factor * (Number(1) - pull * finite);
    terms.loss = vanishes ? Real{} : factor * minus_log_p;
    terms.grad_gamma = -(factor * finite) * finite;
    return terms;
  }
};

}  // namespace focalkern
