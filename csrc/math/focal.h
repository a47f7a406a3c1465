// The focal and inverse focal loss of one class, and the function G that ties the loss to the calibration map.
//
//   p = probability of the class,  u = 1 - p,  phi = -p log p / u,  psi = -p log p / (1 + p)
//   gamma >= 0:  L = -u^gamma log p              dL/dz_j = G (p_j - [j = y]),  G = u^gamma (1 + gamma phi)
//   gamma <  0:  L = -(1 + p)^g log p, g = |gamma|   dL/dz_j = (1 + p)^g (1 - g psi) (p_j - [j = y])
//
// Everything takes log p and log u rather than p: near p = 1 the difference 1 - p has no digits left, while both
// logarithms can be had to full precision from the log-sum-exp of the other classes.
#pragma once

#include "math/portable.h"

namespace focalkern {

// Below this u the ratio -p log p / u would divide two vanishing numbers, and its series is exact to rounding.
template <typename Real>
FK_HOST_DEVICE Real small_u() {
  return sizeof(Real) == sizeof(float) ? Real(1e-3) : Real(1e-5);
}

// phi = -p log p / (1 - p), in [0, 1]: 0 at p = 0, 1 at p = 1.
template <typename Real>
FK_HOST_DEVICE Real phi_of(Real p, Real log_p, Real u) {
  const Real series = Real(1) - u * (Real(0.5) + u * Real(1.0 / 6.0));
  const Real ratio = -p * log_p / u;
  const Real value = u < small_u<Real>() ? series : ratio;
  // p = 0 comes with log p = -inf, and the product has the limit 0. A NaN p is not caught here, and stays NaN.
  return p == Real(0) ? Real(0) : value;
}

// gamma * log u, with the limit 0 for gamma = 0 at u = 0.
template <typename Real>
FK_HOST_DEVICE Real scaled_log(Real gamma, Real log_base) {
  return gamma == Real(0) ? Real(0) : gamma * log_base;
}

// The slope in the share of a class: the loss of the class, infinite at p = 0, by its weight. No weight, no slope.
template <typename Real>
FK_HOST_DEVICE Real weighted_slope(Real weight, Real slope) {
  constexpr Real kInfinity = std::numeric_limits<Real>::infinity();
  const bool infinite = (slope == kInfinity) | (slope == -kInfinity);
  return (weight == Real(0)) & infinite ? Real(0) : weight * slope;
}

// The factor f, the coefficient c and df/dgamma log p belong together: they share both exponentials.
template <typename Real>
struct FocalTerms {
  Real factor;       // f(p): u^gamma, or (1 + p)^|gamma|
  Real coefficient;  // c(p): dL/dz_j = c (p_j - [j = y])
  Real loss;         // -f log p
  Real grad_gamma;   // dL/dgamma; at gamma = 0 the derivative from the right
};

// kEverInverse = false is for a caller that knows gamma not to be negative, and saves it the other formula.
template <bool kEverInverse = true, typename Real>
FK_HOST_DEVICE FocalTerms<Real> focal_terms(Real log_p, Real log_u, Real gamma) {
  const Real p = exponential(log_p);
  const Real u = exponential(log_u);
  const bool inverse = kEverInverse && gamma < Real(0);
  const Real magnitude = inverse ? -gamma : gamma;
  const Real log_base = inverse ? log_one_plus(p) : log_u;
  const Real factor = exponential(scaled_log(magnitude, log_base));
  // -p log p over u or over 1 + p: the derivative of the factor pulls in opposite directions.
  const Real phi = phi_of(p, log_p, u);
  const Real psi = p == Real(0) ? Real(0) : -p * log_p / (Real(1) + p);
  FocalTerms<Real> terms;
  terms.factor = factor;
  terms.coefficient = factor * (inverse ? Real(1) - magnitude * psi : Real(1) + magnitude * phi);
  // At p = 1 a factor of 0 or 1 meets log p = 0, at p = 0 a factor of 1 meets log p = -inf: neither is a 0 * inf.
  terms.loss = -factor * log_p;
  // -inf * 0 at p = 1 and 0 * -inf at p = 0: the product vanishes at both ends.
  const Real finite_log_p = p == Real(0) ? Real(0) : log_p;
  const Real slope = finite_log_p == Real(0) ? Real(0) : factor * (log_base * finite_log_p);
  terms.grad_gamma = inverse ? slope : -slope;
  return terms;
}

// log G(p; gamma) = gamma log u + log(1 + gamma phi), for gamma > -1 of either sign: the formula itself, not the sign
// rule of the inverse focal loss.
template <typename Real>
FK_HOST_DEVICE Real log_focal_g(Real phi, Real log_u, Real gamma) {
  return scaled_log(gamma, log_u) + log_one_plus(gamma * phi);
}

// One step of the look-up of p in a table with open-ended outer bins [lo, hi): over the bins 1, 2, ... in order, the
// last one whose lower edge is not above p wins. Equal edges are stepped over together, which leaves the bins between
// them empty. Start with the gamma of bin 0.
template <typename Real>
FK_HOST_DEVICE Real table_step(Real p, Real lower_edge, Real gamma_of_bin, Real gamma_so_far) {
  return lower_edge <= p ? gamma_of_bin : gamma_so_far;
}

template <typename Real>
FK_HOST_DEVICE Real table_gamma(Real p, const Real* edges /* [n_bins + 1] */, const Real* gammas /* [n_bins] */,
                                int64_t n_bins) {
  Real gamma = gammas[0];
  for (int64_t bin = 1; bin < n_bins; ++bin) gamma = table_step(p, edges[bin], gammas[bin], gamma);
  return gamma;
}

}  // namespace focalkern
