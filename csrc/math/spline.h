// The map of spline scaling: a natural cubic spline of the log-odds of a floored softmax.
//
//   q = softmax(z / T),   P = (1 - e) q + e / C,   x = log P,   u = x - log(1 - P)
//   score = (1 + a) x + f(u)   + v_j x + b_j (vector), or + a given number (matrix)
//   log p = log_softmax(score)
//
// 0 < e < 1, so that x and u are finite for every input. With t the largest class, d = (z - z_t) / T and
// E = exp(d), the sum of E over the classes but t is S; q = E / (1 + S), and 1 - P_t comes from S without cancellation.
//
// f is a cubic polynomial on each of the m + 1 pieces into which m knots divide the line: f(u) = c0 + c1 s + c2 s^2 +
// c3 s^3, s = u - o, where o is the origin of the piece. Beyond the first and the last knot c2 = c3 = 0.
#pragma once

#include "math/portable.h"

namespace focalkern {

// Above this P the code computes 1 - P from the sum over the other classes. At most one class of a row is above.
template <typename Real>
constexpr Real kSplineLarge = Real(0.75);

// The numbers of a row that all its classes share.
template <typename Real>
struct SplineRow {
  Real scale;           // P = E * scale + floor
  Real floor;           // e / C
  Real complement;      // 1 - P of the largest class
  Real log_complement;  // its logarithm
};

// `rest`: S, which includes the classes that tie with the largest one, but not the largest one itself.
template <typename Real>
FK_HOST_DEVICE SplineRow<Real> spline_row(Real rest, Real e, Real classes) {
  SplineRow<Real> row;
  const Real inverse = Real(1) / (Real(1) + rest);
  row.scale = (Real(1) - e) * inverse;
  row.floor = e / classes;
  row.complement = row.scale * rest + row.floor * (classes - Real(1));
  row.log_complement = logarithm_of_normal(row.complement);
  return row;
}

// d = (z - z_t) / T, rounded to steps. With kSplineGrid the step is 2^-31: one step of d then outweighs all later
// rounding errors, so that the order of the classes is kept exactly. With kSplineFineGrid the step is at most 2^-46,
// which outweighs only the rounding of the exponential. Grid 0: no rounding.
constexpr double kSplineGrid = 0x1.8p21, kSplineFineGrid = 0x1.8p6;
template <typename Real>
FK_HOST_DEVICE Real spline_exponent(Real z, Real top, Real beta, Real grid) {
  return ((z - top) * beta + grid) - grid;
}

// A difference of two scores, rounded to the fine grid if `in_order`.
template <bool in_order, typename Real>
FK_HOST_DEVICE Real spline_difference(Real difference) {
  if constexpr (!in_order) return difference;
  return (difference + Real(kSplineFineGrid)) - Real(kSplineFineGrid);
}

// P, reduced to the bits in the mask `kept`. Dropping the last 22 bits keeps the order exactly, as above.
template <typename Real>
FK_HOST_DEVICE Real spline_probability(Real e, const SplineRow<Real>& row, uint64_t kept) {
  const Real probability = e * row.scale + row.floor;
  if constexpr (sizeof(Real) == sizeof(double)) return bit_cast<Real>(bit_cast<uint64_t>(probability) & kept);
  return probability;
}

template <typename Real>
struct SplineFeatures {
  Real x, u;
  Real complement;  // 1 - P
  bool large;       // whether P is above kSplineLarge
};
template <typename Real>
FK_HOST_DEVICE SplineFeatures<Real> spline_features(Real probability, const SplineRow<Real>& row) {
  SplineFeatures<Real> result;
  result.large = probability > kSplineLarge<Real>;
  const Real complement = Real(1) - probability;
  const Real log_complement = logarithm_of_normal(complement);
  result.x = logarithm_of_normal(probability);
  result.u = result.x - (result.large ? row.log_complement : log_complement);
  result.complement = result.large ? row.complement : complement;
  return result;
}

// The spline with the coefficients of a piece at u = o + s, and its derivative.
template <typename Real>
FK_HOST_DEVICE Real spline_value(Real c0, Real c1, Real c2, Real c3, Real s) {
  return c0 + s * (c1 + s * (c2 + s * c3));
}
template <typename Real>
FK_HOST_DEVICE Real spline_slope(Real c1, Real c2, Real c3, Real s) {
  return c1 + s * (Real(2) * c2 + s * (Real(3) * c3));
}

// dL/dx of a class, where u is a function of x: `of_score` = dL/dscore, `factor` = dscore/dx at fixed u, `slope` =
// f'(u).
// du/dx = 1 + P / (1 - P) = 1 / (1 - P).
template <typename Real>
FK_HOST_DEVICE Real spline_grad_x(Real of_score, Real factor, Real slope, Real complement) {
  return of_score * (factor + slope / complement);
}

// dL/dlog q, and the class's part of dL/de, from dL/dx. share = 1 / C, inverse = 1 / (1 + S).
template <typename Real>
FK_HOST_DEVICE Real spline_grad_log_q(Real of_x, Real e, Real probability, const SplineRow<Real>& row) {
  return of_x * (e * row.scale / probability);
}
template <typename Real>
FK_HOST_DEVICE Real spline_grad_floor(Real of_x, Real e, Real probability, Real inverse, Real share) {
  return of_x / probability * (share - e * inverse);
}

// dL/dd of a class, from dL/dlog q of this class, of the class above kSplineLarge (0 if there is none), and of all
// other classes together. complement = S / (1 + S). A class with E = 0 has no gradient.
template <typename Real>
FK_HOST_DEVICE Real spline_grad_exponent(Real of_log_q, Real e, Real inverse, bool large, Real of_large, Real of_rest,
                                         Real complement) {
  const Real q = e * inverse;
  const Real of_d = large ? of_log_q * complement - q * of_rest : of_log_q - q * (of_rest + of_large);
  return e == Real(0) ? Real(0) : of_d;
}

// Differences z - z_t are clamped at minus this bound, so that products with them are finite.
constexpr double kSplineLowestFall = 0x1p500;

// -log((1 - e) q + e / C) of the target, and its derivative in 1 / T. fall = z - z_t of the target; sum and with_fall
// are the sums over the classes of exp(fall / T) and of fall exp(fall / T). e may be 0: the loss is then finite even if
// q underflows.
template <typename Real>
struct SplineTemperatureLoss {
  Real value, slope;
};
template <typename Real>
FK_HOST_DEVICE SplineTemperatureLoss<Real> spline_temperature_loss(Real fall, Real beta, Real sum, Real with_fall,
                                                                   Real e, Real classes) {
  const Real floor = e / classes;
  const Real kept = (Real(1) - e) * exponential(fall * beta) / sum, p = kept + floor;
  const Real log_p = floor > Real(0) ? logarithm(p) : fall * beta - logarithm(sum);
  const Real share = floor > Real(0) ? kept / p : Real(1);
  return {-log_p, -share * (fall - with_fall / sum)};
}

}  // namespace focalkern
