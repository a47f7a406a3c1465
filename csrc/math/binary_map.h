// The focal calibration map of two classes, on one logit.
#pragma once

#include "math/calibration_map.h"

namespace focalkern {

// The map of the log-odds s / T, and its derivatives. The map is odd in s, so the code computes it for |s|.
template <typename Real>
struct BinaryMap {
  Real log_odds;
  Real slope;       // dlog_odds / d(s/T)
  Real grad_gamma;  // dlog_odds / dgamma
};

// 1 - phi = 1 - log(1 + t) / t, for odds 1 : t with 0 <= t <= 1, to 2 units in the last place. The series is that of
// log(1 + t) = 2 atanh s with s = t / (2 + t); no terms of it cancel.
template <typename Real>
FK_HOST_DEVICE Real one_minus_phi_of_odds(Real t) {
  constexpr int kTerms = sizeof(Real) == sizeof(float) ? 7 : 16;
  const Real inverse = Real(1) / (Real(2) + t);
  const Real s = t * inverse;
  const Real w = s * s;
  Real sum = Real(1.0 / (2 * kTerms + 1));
#if defined(__CUDACC__)
#pragma unroll
#else
#pragma GCC unroll 16
#endif
  for (int k = kTerms - 1; k >= 1; --k) sum = sum * w + Real(1.0 / (2 * k + 1));
  return (t - Real(2) * w * sum) * inverse;
}

template <typename Real>
FK_HOST_DEVICE BinaryMap<Real> binary_map(Real s_over_t, double gamma_wide) {
  const Real gamma = static_cast<Real>(gamma_wide);
  // Inputs on this grid keep their order. The step is coarser for gamma < 0, because the rounding error of the term
  // added to (1 + gamma) a grows as gamma -> -1; at gamma = 0 that term is 0.
  const int step = gamma < Real(-0.9) ? 16 : gamma < Real(0) ? 8 : gamma > Real(0) ? 4 : 1;
  const Real x = rounded_to(s_over_t, step);
  const Real one_plus_gamma = static_cast<Real>(1.0 + gamma_wide);
  const Real a = x < Real(0) ? -x : x;
  const Real odds = exponential(-a);
  const Real q = Real(1) / (Real(1) + odds);  // the likelier class
  const Real u = odds * q;
  const Real one_minus_phi = one_minus_phi_of_odds(odds);
  const Real phi = Real(1) - one_minus_phi;
  const Real denominator = one_plus_gamma - gamma * one_minus_phi;

  // phi of the unlikely class minus phi of the likely one. As a -> 0 both tend to log 2, so the code computes odds a -
  // (1 - odds^2) phi instead of subtracting them.
  const Real odds_a = odds == Real(0) ? Real(0) : odds * a;
  const Real difference = odds_a + exponential_minus_one(Real(-2) * a) * phi;
  const Real other_phi = odds_a + odds * odds * phi;
  const Real other_denominator = Real(1) + gamma * other_phi;

  BinaryMap<Real> map;
  const Real log_odds = one_plus_gamma * a + log_one_plus(gamma * difference / denominator);
  const Real grad_gamma = a + difference / (denominator * other_denominator);
  map.log_odds = x < Real(0) ? -log_odds : log_odds;
  map.grad_gamma = x < Real(0) ? -grad_gamma : grad_gamma;
  map.slope =
      u + gamma * (q - (u - one_minus_phi) / denominator) + q + gamma * (u - (other_phi - u) / other_denominator);
  return map;
}

template <typename Real>
FK_HOST_DEVICE Real sigmoid(Real x) {
  return Real(1) / (Real(1) + exponential(-rounded_to(x, 4)));
}

// The vector-Jacobian product of the map (w = dL/dlog_odds) or of its sigmoid (w = dL/dp).
template <typename Real>
struct BinaryMapGrad {
  Real x;      // dL/dx, x = s / T
  Real gamma;  // dL/dgamma
  Real beta;   // dL/dx x;  dL/dT = -beta / T
};

template <typename Real>
FK_HOST_DEVICE BinaryMapGrad<Real> binary_map_grad(Real x, double gamma, Real w, bool log_odds_output) {
  const BinaryMap<Real> map = binary_map(x, gamma);
  // The derivative of the sigmoid, p (1 - p), with the smaller of p and 1 - p computed without cancellation.
  const Real odds = exponential(map.log_odds < Real(0) ? map.log_odds : -map.log_odds);
  const Real slope = odds / ((Real(1) + odds) * (Real(1) + odds));
  const Real w_log_odds = log_odds_output ? w : w * slope;
  const Real grad_x = w_log_odds * map.slope;
  BinaryMapGrad<Real> grad;
  grad.x = grad_x;
  // At s = -inf the product of 0 and infinity has the limit 0.
  grad.gamma = w_log_odds == Real(0) ? Real(0) : w_log_odds * map.grad_gamma;
  grad.beta = grad_x == Real(0) ? Real(0) : grad_x * x;
  return grad;
}

}  // namespace focalkern
