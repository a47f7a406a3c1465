// The focal and inverse focal loss of one class, and G, which relates the focal loss to the calibration map.
//
//   p = probability of the class,  u = 1 - p,  phi = -p log p / u,  psi = -p log p / (1 + p)
//   gamma >= 0:  L = -u^gamma log p              dL/dz_j = G (p_j - [j = y]),  G = u^gamma (1 + gamma phi)
//   gamma <  0:  L = -(1 + p)^g log p, g = |gamma|   dL/dz_j = (1 + p)^g (1 - g psi) (p_j - [j = y])
//
// The functions take log p and log u, not p: 1 - p cancels near p = 1, while the log-sum-exp of the other classes gives
// both logarithms accurately.
#pragma once

#include <type_traits>
#include <utility>

#include "math/portable.h"

namespace focalkern {

// The type of one lane of a vector (gnu::vector_size); a plain number is its own lane. Formulas for both declare their
// constants in this type.
template <typename Real, bool = std::is_floating_point_v<Real>>
struct NumberOf {
  using type = Real;
};
template <typename Vector>
struct NumberOf<Vector, false> {
  using type = std::remove_cv_t<std::remove_reference_t<decltype(std::declval<Vector&>()[0])>>;
};
template <typename Real>
using number_t = typename NumberOf<Real>::type;

// Below this u, -p log p / u divides two vanishing numbers; the series is exact to rounding there.
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
  // At p = 0, log p = -inf and the product has the limit 0. A NaN p stays NaN.
  return p == Real(0) ? Real(0) : value;
}

// gamma * log_base, which is 0 for gamma = 0 even where log_base is -inf.
template <typename Real>
FK_HOST_DEVICE Real scaled_log(Real gamma, Real log_base) {
  return gamma == Real(0) ? Real(0) : gamma * log_base;
}

// The gradient with respect to the target share of a class: its loss (infinite at p = 0) times its weight; 0 for a
// weight of 0.
template <typename Real>
FK_HOST_DEVICE Real weighted_slope(Real weight, Real slope) {
  constexpr Real kInfinity = std::numeric_limits<Real>::infinity();
  const bool infinite = (slope == kInfinity) | (slope == -kInfinity);
  return (weight == Real(0)) & infinite ? Real(0) : weight * slope;
}

// The loss of a row times its class weight. A weight of 0 gives 0, even if the loss is infinite because its target is
// impossible.
template <typename Real>
FK_HOST_DEVICE Real weighted_loss(Real weight, Real loss) {
  const bool infinite = loss == std::numeric_limits<Real>::infinity();
  return (weight == Real(0)) & infinite ? Real(0) : weight * loss;
}

// The factor f, the coefficient c and dL/dgamma = -df/dgamma log p, which share two exponentials.
template <typename Real>
struct FocalTerms {
  Real factor;       // f(p): u^gamma, or (1 + p)^|gamma|
  Real coefficient;  // c(p): dL/dz_j = c (p_j - [j = y])
  Real loss;         // -f log p
  Real grad_gamma;   // dL/dgamma; at gamma = 0 the derivative from the right
};

// kEverInverse = false: no gamma is negative, so the formula of the inverse loss is left out.
template <bool kEverInverse = true, typename Real>
FK_HOST_DEVICE FocalTerms<Real> focal_terms(Real log_p, Real log_u, Real gamma) {
  const Real p = exponential(log_p);
  const Real u = exponential(log_u);
  const bool inverse = kEverInverse && gamma < Real(0);
  const Real magnitude = inverse ? -gamma : gamma;
  const Real log_base = inverse ? log_one_plus(p) : log_u;
  const Real factor = exponential(scaled_log(magnitude, log_base));
  // -p log p over u or over 1 + p; the two formulas have opposite signs of df/dp.
  const Real phi = phi_of(p, log_p, u);
  const Real psi = p == Real(0) ? Real(0) : -p * log_p / (Real(1) + p);
  FocalTerms<Real> terms;
  terms.factor = factor;
  terms.coefficient = factor * (inverse ? Real(1) - magnitude * psi : Real(1) + magnitude * phi);
  // 0 * inf does not occur: a factor of 0 or 1 meets log p = 0 at p = 1, and a factor of 1 meets log p = -inf at p = 0.
  terms.loss = -factor * log_p;
  // The product is -inf * 0 at p = 1 and 0 * -inf at p = 0; its limit is 0 at both ends.
  const Real finite_log_p = p == Real(0) ? Real(0) : log_p;
  const Real slope = finite_log_p == Real(0) ? Real(0) : factor * (log_base * finite_log_p);
  terms.grad_gamma = inverse ? slope : -slope;
  return terms;
}

// The loss without a gradient. Only the inverse loss needs p, so each formula has its own branch.
template <typename Real>
FK_HOST_DEVICE Real focal_loss_alone(Real log_p, Real log_u, Real gamma) {
  if (gamma < Real(0)) return focal_terms(log_p, log_u, gamma).loss;
  return -exponential(scaled_log(gamma, log_u)) * log_p;
}

// ---- classes of at most kUnlikely ---------------------------------------------------------------------------------
//
// For these 1 - p does not cancel, so p and log p suffice. At most one class of a row has a larger p.

template <typename Real>
constexpr Real kUnlikely = Real(0.55);

// log(1 + x) for |x| <= kUnlikely, to 3 units in the last place plus the error of the quotient.
template <typename Real>
FK_HOST_DEVICE Real log_one_plus_small(const Real& x) {
  using Number = number_t<Real>;
  constexpr bool kIsNumber = std::is_floating_point_v<Real>;
  if constexpr (kIsNumber && sizeof(Number) == sizeof(double)) {
    return log_one_plus(x);
  } else {
    // 2 atanh(s) for s = x / (2 + x)
    Real s;
    if constexpr (kIsNumber) {
      s = quick_quotient(x, Number(2) + x);
    } else {
      s = x / (Number(2) + x);
    }
    const Real w = s * s;
    Real q;
    if constexpr (sizeof(Number) == sizeof(float)) {
      q = Number(2.50911623e-1) * w + Number(2.12891594e-1);
      q = q * w + Number(2.86210895e-1);
      q = q * w + Number(3.99990886e-1);
      q = q * w + Number(6.66666687e-1);
    } else {
      q = Number(2.0 / 39) * w + Number(2.0 / 37);  // the first omitted term is below 2^-59
#pragma GCC unroll 17
      for (int n = 35; n > 1; n -= 2) q = q * w + Number(2) / Number(n);
    }
    return s * (w * q) + (s + s);
  }
}

// The factor f = base^|gamma| as base * lower. The base is 1 - p or, for a negative gamma, 1 + p.
template <typename Real>
struct FactorParts {
  Real base;
  Real lower;
  Real log_base;
};

// gamma in the coefficient of the gradient; 0 where the factor is detached.
template <typename Real>
struct SlopeOfGamma {
  static constexpr bool kIsZero = false;
  Real pull;  // gamma
  Real rise;  // gamma + 1

  FK_HOST_DEVICE SlopeOfGamma(Real gamma, bool detached)
      : pull(detached ? Real(0) : gamma), rise(detached ? Real(0) : gamma + Real(1)) {}
};

// gamma = 0, 1, 2 or 3. log_base is not computed: only dL/dgamma needs it.
template <typename Real, int kGamma>
struct WholeGamma : SlopeOfGamma<Real> {
  static constexpr bool kIsZero = kGamma == 0;

  explicit FK_HOST_DEVICE WholeGamma(bool detached) : SlopeOfGamma<Real>(Real(kGamma), detached) {}
  template <typename Reals>
  FK_HOST_DEVICE FactorParts<Reals> factor_at(const Reals& p) const {
    const Reals u = Real(1) - p;
    if constexpr (kGamma == 2) return {u, u, Reals{}};
    if constexpr (kGamma == 3) return {u, u * u, Reals{}};
    return {u, Reals{} + Real(1), Reals{}};  // 1 is not the value for gamma = 0: see kIsZero
  }
  template <typename Reals>
  FK_HOST_DEVICE Reals signed_like_gamma(const Reals& x) const {
    return x;
  }
};
template <typename Real>
using SquareGamma = WholeGamma<Real, 2>;

template <typename Real>
struct AnyGamma : SlopeOfGamma<Real> {
  Real exponent;  // |gamma| - 1
  Real sign;      // of gamma

  FK_HOST_DEVICE AnyGamma(Real gamma, bool detached)
      : SlopeOfGamma<Real>(gamma, detached),
        exponent((gamma < Real(0) ? -gamma : gamma) - Real(1)),
        sign(gamma < Real(0) ? Real(-1) : Real(1)) {}
  FK_HOST_DEVICE FactorParts<Real> factor_at(Real p) const {
    const Real x = -sign * p;
    const Real log_base = log_one_plus_small(x);
    return {Real(1) + x, quick_exponential(exponent * log_base), log_base};
  }
  FK_HOST_DEVICE Real signed_like_gamma(Real x) const { return sign * x; }
};

template <typename Real>
constexpr Real kLargestLog = Real(1e30);

// -log p, clamped so that its product with p is 0, not NaN, at p = 0.
template <typename Real>
FK_HOST_DEVICE Real finite_log(const Real& minus_log_p) {
#if defined(__CUDA_ARCH__)
  return fmin(minus_log_p, kLargestLog<Real>);
#else
  const Real most = Real{} + kLargestLog<number_t<Real>>;
  return most < minus_log_p ? most : minus_log_p;
#endif
}

// -log p of a class, and the same number bounded: its product with p = 0 is 0, not NaN.
template <typename Real>
struct MinusLog {
  Real value;
  Real finite;
};
template <typename Real>
FK_HOST_DEVICE MinusLog<Real> with_finite(const Real& minus_log_p) {
  return {minus_log_p, finite_log(minus_log_p)};
}

// The terms of the focal and of the inverse focal loss are the same in base and gamma:
//   f = base^|gamma|,  c = base^(|gamma| - 1) (base - gamma p log p)
template <typename Gamma, typename Real>
FK_HOST_DEVICE FocalTerms<Real> unlikely_focal_terms(const Real& p, const MinusLog<Real>& minus_log_p,
                                                     const Gamma& gamma) {
  FocalTerms<Real> terms;
  if constexpr (Gamma::kIsZero) {
    terms.factor = terms.coefficient = Real{} + number_t<Real>(1);
    terms.loss = minus_log_p.value;
    terms.grad_gamma = Real{};
    return terms;
  }
  const FactorParts<Real> parts = gamma.factor_at(p);
  const Real factor = parts.lower * parts.base;
  terms.factor = factor;
  terms.coefficient = parts.lower * (parts.base + gamma.pull * (p * minus_log_p.finite));
  terms.loss = factor * minus_log_p.value;
  terms.grad_gamma = gamma.signed_like_gamma(Real(factor * parts.log_base * minus_log_p.finite));
  return terms;
}

// log G(p; gamma) = gamma log u + log(1 + gamma phi), for any gamma > -1. A negative gamma is not the inverse focal
// loss here.
template <typename Real>
FK_HOST_DEVICE Real log_focal_g(Real phi, Real log_u, Real gamma) {
  return scaled_log(gamma, log_u) + log_one_plus(gamma * phi);
}

// One step of the look-up of p in a table of bins [lo, hi); the first and last bin are unbounded. The caller visits the
// bins 1, 2, ... in order, starting with the gamma of bin 0; the last bin whose lower edge is at most p is taken. Bins
// between equal edges are empty.
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
