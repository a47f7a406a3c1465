// Second derivatives of the focal calibration map in log space, in gamma and beta = 1/T.
//
// With a = log(q / G(q)) of calibration_map.h, s = -q log q, u = 1 - q, phi = s / u, n = 1 + gamma phi, psi = phi - q:
//   da/dlog q      h  = 1 + gamma (q - psi / n) / u
//   d2a/dlog q^2   h2 = gamma (q - (psi (1 + q) - u q) / n + gamma (psi / n)^2) / u^2
//   da/dgamma      c  = -log u - phi / n
//   dh/dgamma      hc = (q - psi / n^2) / u
//   dc/dgamma      cc = (phi / n)^2
// In beta, log q_k has the derivatives d_k - mu and -V, where d_k = z_k - z_t, and mu and V are the mean and variance
// of d under q.
// For the largest class, h, h2 and hc grow as 1 / u and 1 / u^2, while d - mu = -u A1 and V = u (A2 - u A1^2) fall as
// u, where A1 and A2 are the means of d and d^2 over the other classes. The code therefore computes only their
// products.
#pragma once

#include "math/calibration_map.h"

namespace focalkern {

// Derivatives of a_k in (gamma, beta).
template <typename Real>
struct MapCurvature {
  Real beta, gamma;                         // first
  Real beta_beta, gamma_beta, gamma_gamma;  // second
};

// The numbers that are computed once per row.
template <typename Real>
struct MapCurvatureRow {
  MapTerms<Real> terms;
  Real mean;      // mu
  Real variance;  // V
  MapCurvature<Real> top;
};

// gap and rest as map_row; first and second: sums over k != t of e_k d_k and e_k d_k^2.
template <typename Real>
FK_HOST_DEVICE MapCurvatureRow<Real> map_curvature_row(Real gap, Real rest, Real first, Real second,
                                                       MapGamma<Real> of) {
  const MapRow<Real> row = map_row(gap, rest, of);
  const MapSoftmax<Real> soft = map_softmax(gap, rest);
  const Real gamma = of.gamma, q = soft.q, u = soft.u, phi = Real(1) - soft.one_minus_phi;
  const Real psi = u - soft.one_minus_phi;
  const Real inverse_n = Real(1) / map_offset(soft, of).denominator;
  const Real psi_n = psi * inverse_n;
  const Real a1 = first * row.inverse_rest, a2 = second * row.inverse_rest;
  const Real spread = a2 - u * a1 * a1;
  const Real curve = gamma * (q - (psi * (Real(1) + q) - u * q) * inverse_n + gamma * psi_n * psi_n);
  MapCurvatureRow<Real> result;
  result.terms = row.terms;
  result.mean = u * a1;
  result.variance = u * spread;
  result.top.beta = -row.scaled_slope_top * a1;
  result.top.gamma = row.grad_gamma_top;
  result.top.beta_beta = curve * a1 * a1 - row.scaled_slope_top * spread;
  result.top.gamma_beta = -(q - psi_n * inverse_n) * a1;
  result.top.gamma_gamma = (phi * inverse_n) * (phi * inverse_n);
  return result;
}

// A class other than the largest: q <= 1/2.
template <typename Real>
struct MapCurvatureClass {
  Real ratio;           // p_k / p_t
  Real log_complement;  // log(1 - q)
  Real v;               // (1 - q) n
  MapCurvature<Real> of;
};

// y = (z - m2) beta with its exponential e; d = z - z_t, or any number if e is 0. Natural logarithms.
template <typename Real>
FK_HOST_DEVICE MapCurvatureClass<Real> map_curvature_class(Real y, Real e, Real d, Real gamma,
                                                           const MapCurvatureRow<Real>& row) {
  MapCurvatureClass<Real> result;
  const Real q = e * row.terms.q_scale;
  const Real u = Real(1) - q;
  const Real s = minus_q_log_q(q, y + row.terms.log_q_offset);
  const Real v = u + gamma * s;
  const Real inverse_uv = Real(1) / (u * v);
  const Real inverse_u = v * inverse_uv, inverse_v = u * inverse_uv;
  const Real inverse_n = u * inverse_v;
  const Real psi = s * inverse_u - q;
  const Real psi_n = psi * inverse_n;
  const Real of_gamma = s * inverse_v;
  const Real log_u = log_complement(q);
  const Real h = Real(1) + gamma * (q - psi_n) * inverse_u;
  const Real curve = gamma * (q - (psi * (Real(1) + q) - u * q) * inverse_n + gamma * psi_n * psi_n);
  const Real moved = d - row.mean;
  const Real scaled = moved * inverse_u;
  result.ratio = e * exponential(row.terms.ratio_offset - (gamma - Real(1)) * log_u) * inverse_v;
  result.log_complement = log_u;
  result.v = v;
  result.of.beta = h * moved;
  result.of.gamma = -log_u - of_gamma;
  result.of.beta_beta = curve * scaled * scaled - h * row.variance;
  result.of.gamma_beta = (q - psi_n * inverse_n) * scaled;
  result.of.gamma_gamma = of_gamma * of_gamma;
  return result;
}

}  // namespace focalkern
