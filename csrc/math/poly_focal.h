// Poly-1 focal loss of one class: the focal loss plus epsilon times a term in u = 1 - p.
//
//   L = u^gamma (-log p + epsilon u)      dL/dz_j = c (p_j - [j = y]),  c = G + epsilon (gamma + 1) u^gamma p
//
// gamma must be at least 0; otherwise every result is NaN. For epsilon near -1 the two terms cancel as p -> 1. With a =
// -log p - u = u^2/2 + u^3/3 + ..., computed as a series where the difference cancels:
//
//   L = u^gamma (a + (1 + epsilon) u)     c = u^gamma (u + gamma p a / u + (1 + epsilon) (gamma + 1) p)
#pragma once

#include "math/row_loss.h"

namespace focalkern {

// (-log(1 - u) - u) / u^2 = 1/2 + u/3 + u^2/4 + ... for u below 1/8.
template <typename Real>
FK_HOST_DEVICE Real poly_series(Real u) {
  constexpr int kLast = sizeof(Real) == sizeof(float) ? 7 : 16;
  Real sum = Real(1) / Real(kLast + 2);
#if defined(__CUDACC__)
#pragma unroll
#else
#pragma GCC unroll 16
#endif
  for (int n = kLast - 1; n >= 0; --n) sum = sum * u + Real(1) / Real(n + 2);
  return sum;
}

struct PolyFocalFormula : SumOverClasses<PolyFocalFormula> {
  static constexpr bool kHasInverse = false;

  template <bool kEverInverse, typename Real>
  static FK_HOST_DEVICE FocalTerms<Real> terms(Real log_p, Real log_u, Real given_gamma, Real epsilon) {
    const Real gamma = given_gamma < Real(0) ? std::numeric_limits<Real>::quiet_NaN() : given_gamma;
    const Real p = exponential(log_p);
    const Real u = exponential(log_u);
    const bool impossible = p == Real(0);
    const bool small = u < Real(0.125);
    const Real finite_log_p = impossible ? Real(0) : log_p;
    const Real a_over_u = small ? u * poly_series(small ? u : Real(0)) : (-finite_log_p - u) / u;
    const Real factor = exponential(scaled_log(gamma, log_u));
    const Real kept = Real(1) + epsilon;
    // a, from -log p = a + u, which is infinite at p = 0.
    const Real of_factor = u * (a_over_u + kept) + (impossible ? -log_p : Real(0));
    FocalTerms<Real> terms;
    terms.factor = factor;
    terms.coefficient = factor * (u + p * (gamma * a_over_u + kept * (gamma + Real(1))));
    terms.loss = factor * of_factor;
    // log u is 0 where the loss is infinite, and -inf where it is 0.
    const bool vanishes = (u == Real(0)) | impossible;
    terms.grad_gamma = vanishes ? Real(0) : terms.loss * log_u;
    return terms;
  }

  // -log p does not cancel against epsilon u here, so it is used directly.
  template <typename Gamma, typename Real>
  static FK_HOST_DEVICE FocalTerms<Real> unlikely(const Real& p, const MinusLog<Real>& minus_log_p, const Gamma& gamma,
                                                  number_t<Real> epsilon) {
    const FactorParts<Real> parts = gamma.factor_at(p);
    const Real u = parts.base;
    FocalTerms<Real> terms;
    if constexpr (Gamma::kIsZero) {
      const number_t<Real> one = 1;
      terms.factor = Real{} + one;
      terms.coefficient = one + (epsilon * gamma.rise) * p;
      terms.loss = minus_log_p.value + epsilon * u;
      terms.grad_gamma = Real{};
      return terms;
    }
    const Real factor = parts.lower * u;
    terms.factor = factor;
    terms.coefficient = parts.lower * (u + p * (gamma.pull * minus_log_p.finite + epsilon * gamma.rise * u));
    terms.loss = factor * (minus_log_p.value + epsilon * u);
    terms.grad_gamma = factor * (minus_log_p.finite + epsilon * u) * parts.log_base;
    return terms;
  }
};

}  // namespace focalkern
