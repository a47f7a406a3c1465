// The focal calibration map in log space, and its derivatives.
//
//   q = softmax(z / T),  u = 1 - q,  phi = -q log q / u,  G(q) = u^gamma (1 + gamma phi)
//   p_j = (q_j / G(q_j)) / sum_k (q_k / G(q_k))                    gamma > -1
//
// A negative gamma is inserted into this formula unchanged: the inverse focal loss does not apply here.
//
// The computation of a row. Let t be its largest class (any one of them if several are equal), m2 the largest of the
// other inputs, and
//   y_k = (z_k - m2) / T,  e_k = exp(y_k) for k != t,   S = sum_{k != t} e_k,   M = (m2 - z_t) / T
// The per-row numbers follow from S and M (MapRow). Then, for each k != t,
//   log_ratio = log(p_k / p_t)   (map_log_ratio; map_ratio without the logarithm, map_class with the derivatives)
// and with P = sum_{k != t} exp(log_ratio):   log p_t = -log1p(P),   log p_k = log_ratio - log1p(P).
// No difference of large numbers occurs, so a fully saturated row keeps its digits in log space, and the code never
// computes 1 - q_t for the largest class.
//
// Order. Equal inputs give bitwise equal results, and a larger input never gives a smaller result:
//   - y_k is rounded to a grid (map_exponent); one step of it changes log_ratio by more than the error of the functions
//     below;
//   - log_ratio = (y_k - log G(q_k)) + a constant of the row, so rounding the sum cannot change the order;
//   - log_ratio is at most 0, and 0 for every class that ties with t (in_order).
#pragma once

#include "math/focal.h"

namespace focalkern {

// Differences of inputs beyond this, after division by T, are clamped; exp is 0 at far smaller ones, in float and
// double.
template <typename Real>
FK_HOST_DEVICE Real largest_finite() {
  return sizeof(Real) == sizeof(float) ? Real(3.402823466e38) : Real(1.7976931348623157e308);
}

// gamma > -1 and T > 0, both finite; a NaN fails every comparison.
FK_HOST_DEVICE bool map_parameters_valid(double gamma, double temperature) {
  return gamma > -1.0 && gamma <= largest_finite<double>() && temperature > 0.0 &&
         temperature <= largest_finite<double>();
}

// 1/T, clamped. For a tiny T it must stay finite in float, so that classes tied for the largest keep the difference 0.
// For a huge T it must stay above 0, because 0 times a logit of -inf is NaN.
template <typename Real>
FK_HOST_DEVICE Real inverse_temperature(double temperature) {
  const double beta = 1.0 / temperature;
  const double bound = static_cast<double>(largest_finite<Real>());
  const double lowest = sizeof(Real) == sizeof(float) ? 0x1p-126 : 0x1p-1022;
  return static_cast<Real>(beta > bound ? bound : beta < lowest ? lowest : beta);
}

// x rounded to a multiple of `step` units in its last place; step is a power of two. A function whose error is below a
// step keeps the order of such numbers.
template <typename Real>
FK_HOST_DEVICE Real rounded_to(Real x, typename detail::Format<Real>::Int step) {
  using Bits = std::make_unsigned_t<typename detail::Format<Real>::Int>;
  const Bits units = static_cast<Bits>(step);
  return bit_cast<Real>(static_cast<Bits>((bit_cast<Bits>(x) + (units >> 1)) & (Bits(0) - units)));
}

// The logarithm of a probability. Denormal probabilities count: they are scaled up before the logarithm.
template <typename Real>
FK_HOST_DEVICE Real logit_of_probability(Real p) {
  constexpr bool kFloat = sizeof(Real) == sizeof(float);
  const Real smallest_normal = kFloat ? Real(1.17549435e-38) : Real(2.2250738585072014e-308);
  const bool denormal = p < smallest_normal && p > Real(0);
  const Real scaled = denormal ? p * Real(0x1p64) : p;
  return logarithm(rounded_to(scaled, 4)) - (denormal ? Real(44.361419555836498) : Real(0));
}

// 1 - phi as a function of u = 1 - q: sum_{k >= 1} u^k / (k (k + 1)), for u <= 1/8.
template <typename Real>
FK_HOST_DEVICE Real one_minus_phi_series(Real u) {
  constexpr int kTerms = sizeof(Real) == sizeof(float) ? 8 : 17;
  Real sum = Real(1.0 / (kTerms * (kTerms + 1)));
#if defined(__CUDACC__)
#pragma unroll
#else
#pragma GCC unroll 17
#endif
  for (int k = kTerms - 1; k >= 1; --k) sum = sum * u + Real(1.0 / (k * (k + 1)));
  return sum * u;
}

// y = (x - shift) * scale <= 0. In the forward direction y lies on a grid of 4 units in the last place of 1 where y >
// -4; below, neighbouring floating-point numbers are at least as far apart. On the device the step is larger, because
// the quick functions have larger errors. For dL/dT the differences are not rounded.
template <bool on_grid, typename Real>
FK_HOST_DEVICE Real map_exponent(Real x, Real shift, Real scale) {
  constexpr Real kGrid = quick_unit<Real>() == Real(1) ? 8 : 16;
  if (!on_grid) return (x - shift) * scale;
  return multiply_add(x - shift, scale, kGrid) - kGrid;
}

// The numbers of a row that the computation of each class needs. Logarithms are to the base of quick_power.
template <typename Real>
struct MapTerms {
  Real gamma;         // gamma, as a factor of such a logarithm
  Real power;         // gamma - 1
  Real q_scale;       // q_k = e_k * q_scale
  Real log_q_offset;  // log q_k = y_k + log_q_offset
  Real ratio_offset;  // log(p_k / p_t) = y_k + ratio_offset - log G(q_k)
  Real power_offset;  // p_k / p_t = e_k base^(power_offset - log G(q_k)) ratio_scale
  Real ratio_scale;
  Real tie;  // classes with y_k >= tie are equal to the largest class; 0 if another class is possible, else 1
};

// The numbers that are computed once per row.
template <typename Real>
struct MapRow {
  MapTerms<Real> terms;

  // Needed by the derivatives:
  Real q_top;
  Real u_top;
  Real inverse_rest;      // 1 / S: e_k / S = q_k / u_t is accurate even when both vanish
  Real scaled_slope_top;  // u_t da_t/dlog q_t
  Real grad_gamma_top;    // da_t/dgamma
};

// The numbers of a row that do not depend on gamma.
template <typename Real>
struct MapSoftmax {
  Real gap;            // M
  Real log_rest;       // log S
  Real minus_log_q;    // -log q_t
  Real q;              // q_t
  Real u;              // 1 - q_t
  Real one_minus_phi;  // 1 - phi_t
  Real q_scale;        // q_k = e_k * q_scale
  Real log_q_offset;   // log q_k = y_k + log_q_offset
};

// `rest` = S, at least 1 (two or more classes have a probability above 0); `gap` = M <= 0.
template <typename Real>
FK_HOST_DEVICE MapSoftmax<Real> map_softmax(Real gap, Real rest) {
  MapSoftmax<Real> row;
  const Real exp_gap = quick_exponential(gap);
  const Real odds = rest * exp_gap;  // u_t / q_t = sum_{k != t} q_k / q_t
  row.gap = gap;
  row.log_rest = logarithm_of_normal(rest);
  row.q = quick_quotient(Real(1), Real(1) + odds);
  row.minus_log_q = log_one_plus(odds, row.q);
  row.u = odds * row.q;
  const Real direct = Real(1) - quick_quotient(row.q * row.minus_log_q, row.u);
  row.one_minus_phi = row.u < Real(0.125) ? one_minus_phi_series(row.u) : direct;
  row.q_scale = exp_gap * row.q;
  row.log_q_offset = gap - row.minus_log_q;
  return row;
}

// log(p_k / p_t) = y_k + offset + log(denominator) - log G(q_k)
template <typename Real>
struct MapOffset {
  Real gamma;
  Real offset;
  Real denominator;  // 1 + gamma phi_t
};

// 1 + gamma phi_t = (1 + gamma) - gamma (1 - phi_t). As gamma -> -1 both terms are small. Rounding gamma to float
// before the addition would lose half of the digits of 1 + gamma.
template <typename Real>
struct MapGamma {  // passed by value: gcc does not vectorize a loop over rows with a reference
  Real gamma;
  Real one_plus;
};
template <typename Real>
FK_HOST_DEVICE MapGamma<Real> map_gamma(double gamma) {
  return {static_cast<Real>(gamma), static_cast<Real>(1.0 + gamma)};
}

template <typename Real>
FK_HOST_DEVICE MapOffset<Real> map_offset(const MapSoftmax<Real>& row, MapGamma<Real> of) {
  // a_k - a_t = (y_k + M) + gamma log u_t + log(1 + gamma phi_t) - log G(q_k), with log u_t = M + log S - log1p(odds).
  // Collecting the terms in M gives (1 + gamma) M, which stays accurate as gamma -> -1.
  return {of.gamma, of.one_plus * row.gap + of.gamma * (row.log_rest - row.minus_log_q),
          of.one_plus - of.gamma * row.one_minus_phi};
}

// The part of ratio_offset that map_ratio applies as a factor. The exponent of the power takes the rest; the power is
// then at most about 1 + gamma.
template <typename Real>
FK_HOST_DEVICE Real lowest_scale(Real gamma) {
  constexpr bool kFloat = sizeof(Real) == sizeof(float);
  const Real of_large = gamma < Real(1e4) ? Real(kFloat ? -76 : -695) : Real(0);
  return gamma < Real(1) ? -std::numeric_limits<Real>::infinity() : of_large;
}

template <typename Real>
FK_HOST_DEVICE MapRow<Real> map_row(Real gap, Real rest, MapGamma<Real> of) {
  constexpr Real kUnit = quick_unit<Real>();
  const MapSoftmax<Real> soft = map_softmax(gap, rest);
  const MapOffset<Real> offset = map_offset(soft, of);
  const Real inverse_denominator = quick_quotient(Real(1), offset.denominator);
  MapRow<Real> row;
  row.terms.gamma = of.gamma * (Real(1) / kUnit);
  row.terms.power = of.gamma - Real(1);
  row.terms.q_scale = soft.q_scale;
  row.terms.log_q_offset = soft.log_q_offset * kUnit;
  row.terms.ratio_offset = (offset.offset + logarithm_of_normal(offset.denominator)) * kUnit;
  const Real natural_offset = row.terms.ratio_offset * (Real(1) / kUnit);
  const Real factor = natural_offset > lowest_scale(of.gamma) ? natural_offset : lowest_scale(of.gamma);
  row.terms.power_offset = row.terms.ratio_offset - factor * kUnit;
  row.terms.ratio_scale = quick_power(factor * kUnit);
  row.terms.tie = gap == Real(0) ? Real(0) : Real(1);
  row.q_top = soft.q;
  row.u_top = soft.u;
  row.inverse_rest = quick_quotient(Real(1), rest);
  row.scaled_slope_top = soft.u + of.gamma * (soft.q - (soft.u - soft.one_minus_phi) * inverse_denominator);
  row.grad_gamma_top =
      -(gap + (soft.log_rest - soft.minus_log_q)) - (Real(1) - soft.one_minus_phi) * inverse_denominator;
  return row;
}

// A class other than the largest: q <= 1/2, so nothing cancels.
template <typename Real>
struct MapClass {
  Real ratio;       // p_k / p_t
  Real slope;       // h = da_k / dlog q_k
  Real grad_gamma;  // c = da_k / dgamma, as a logarithm to the base of quick_power
};

namespace detail {

// -log(1 - q) / q times `unit`, for 0 <= q <= 1/2; before rounding the relative error is 4e-9 (float) and 8e-18
// (double).
FK_HOST_DEVICE float minus_log_complement_over_q(float q, float unit) {
  float p = 1.73361195f * unit;
  p = p * q - 2.45896188f * unit;
  p = p * q + 1.95987057f * unit;
  p = p * q - 0.590088703f * unit;
  p = p * q + 0.340746471f * unit;
  p = p * q + 0.175440773f * unit;
  p = p * q + 0.251956794f * unit;
  p = p * q + 0.333255162f * unit;
  p = p * q + 0.500001199f * unit;
  return p * q + 0.999999997f * unit;
}
FK_HOST_DEVICE double minus_log_complement_over_q(double q, double /* 1 */) {
  double p = 26.459987993950119;
  p = p * q - 111.5016083008295;
  p = p * q + 223.12436325902685;
  p = p * q - 277.58570995112508;
  p = p * q + 239.63818240560249;
  p = p * q - 151.46552820345242;
  p = p * q + 72.58379957646765;
  p = p * q - 26.680599026360989;
  p = p * q + 7.7606284335350173;
  p = p * q - 1.641118843588303;
  p = p * q + 0.39280029679314911;
  p = p * q + 0.059052899350405551;
  p = p * q + 0.1153620293486034;
  p = p * q + 0.12466842774185391;
  p = p * q + 0.14287606118661554;
  p = p * q + 0.16666590679409988;
  p = p * q + 0.20000002031370527;
  p = p * q + 0.2499999996684111;
  p = p * q + 0.33333333333619306;
  p = p * q + 0.49999999999999022;
  return p * q + 1.0;
}

}  // namespace detail

// log(1 - q) for q <= 1/2, by a polynomial in q: no 1 - q that could cancel, and no division.
template <typename Real>
FK_HOST_DEVICE Real log_complement(Real q) {
  return -q * detail::minus_log_complement_over_q(q, Real(1));
}

// log(1 - q) to the base of quick_power; `u` = 1 - q. For 16-bit storage (`narrow`) the absolute error is up to 2^-22,
// plus the rounding error of u.
template <bool narrow, typename Real>
FK_HOST_DEVICE Real quick_log_complement(Real q, [[maybe_unused]] Real u) {
#if defined(__CUDA_ARCH__)
  if constexpr (narrow) return quick_logarithm(u);
#endif
  return -q * detail::minus_log_complement_over_q(q, quick_unit<Real>());
}

// -q log q, 0 at q = 0, where the product is NaN and the selection discards it.
template <typename Real>
FK_HOST_DEVICE Real minus_q_log_q(Real q, Real log_q) {
#if defined(__CUDA_ARCH__)
  return fmax(-q * log_q, Real(0));
#else
  return q == Real(0) ? Real(0) : -q * log_q;
#endif
}

// Clamps a ratio, or its logarithm, so that rounding never makes it exceed that of the largest class, and classes that
// tie with the largest get its value.
template <typename Real>
FK_HOST_DEVICE Real in_order(Real ratio, Real y, Real of_largest, const MapTerms<Real>& row) {
  const Real bounded = ratio < of_largest ? ratio : of_largest;
  return y < row.tie ? bounded : of_largest;
}

// With s = -q log q and v = u + gamma s, so that 1 + gamma phi = v / u:
//   log G = (gamma - 1) log u + log v
//   h = 1 + gamma (q v - s + q u) / (u v),   c = -log u - s / v
// The derivatives need one division, and log G none. All results are defined at probability zero (y = -inf, e = 0):
// log_ratio = -inf, slope = 1, grad_gamma = 0. y and all logarithms are to the base of quick_power. An absolute
// error of log v suffices: v is above 0.15, and log v is a term of log p_k < -log 2.
template <typename Real>
FK_HOST_DEVICE Real map_log_ratio(Real y, Real e, const MapTerms<Real>& row) {
  const Real q = rounded_product(e, row.q_scale);
  const Real u = Real(1) - q;
  const Real v = multiply_add(row.gamma, minus_q_log_q(q, y + row.log_q_offset), u);
  const Real a = y - multiply_add(row.power, quick_log_complement<false>(q, u), quick_logarithm(v));
  return in_order(a + row.ratio_offset, y, Real(0), row);
}

// The ratio of map_log_ratio without its logarithm: e_k base^... / v. Most of the row's constant is a factor of the
// power: added to the exponent, it would round away differences of q. Nothing overflows: without that factor the power
// is p_k v / (p_t e_k), at most slightly above 1 + gamma.
template <typename Real>
FK_HOST_DEVICE Real map_ratio(Real y, Real e, const MapTerms<Real>& row) {
  const Real q = rounded_product(e, row.q_scale);
  const Real u = Real(1) - q;
  const Real v = multiply_add(row.gamma, minus_q_log_q(q, y + row.log_q_offset), u);
  const Real power = quick_power(multiply_add(-row.power, quick_log_complement<false>(q, u), row.power_offset));
  return in_order(quick_quotient(e * power, v) * row.ratio_scale, y, Real(1), row);
}

// `finite`: the caller has replaced every y of -inf by a very low number.
template <bool narrow = false, bool finite = false, typename Real>
FK_HOST_DEVICE MapClass<Real> map_class(Real y, Real e, const MapTerms<Real>& row) {
  [[maybe_unused]] constexpr Real kUnit = quick_unit<Real>();
  const Real q = e * row.q_scale;
  const Real u = Real(1) - q;
  const Real log_q = y + row.log_q_offset;
  const Real s = finite ? -q * log_q : minus_q_log_q(q, log_q);
  const Real v = u + row.gamma * s;
  const Real log_u = quick_log_complement<narrow>(q, u);
  MapClass<Real> c;
  Real inverse_v;
  if constexpr (narrow) {
    // h = 1 + (gamma q + 1) / v + (gamma q - 1) / u. 1 / v and 1 / u nearly cancel, at an absolute error of about
    // 2^-22.
    const Real gamma_q = e * (row.q_scale * (row.power + Real(1)));
    inverse_v = quick_quotient(Real(1), v);
    c.slope = (Real(1) + (gamma_q - Real(1)) * quick_quotient(Real(1), u)) + (gamma_q + Real(1)) * inverse_v;
  } else {
    const Real inverse_uv = quick_quotient(Real(1), u * v);
    inverse_v = u * inverse_uv;
    c.slope = Real(1) + row.gamma * (q * kUnit * (u + v) - s) * inverse_uv;
  }
  c.ratio = e * quick_power(row.ratio_offset - row.power * log_u) * inverse_v;
  c.grad_gamma = -log_u - s * inverse_v;
  return c;
}

// map_log_ratio from the numbers that all gammas of a row share. One logarithm serves both quotients; logarithms are
// natural.
template <typename Real>
FK_HOST_DEVICE Real map_log_ratio_of_q(Real y, Real q, Real log_q_offset, const MapOffset<Real>& row) {
  const Real s = q == Real(0) ? Real(0) : -q * (y + log_q_offset);
  const Real v = (Real(1) - q) + row.gamma * s;
  return (y + row.offset) - ((row.gamma - Real(1)) * log_complement(q) + logarithm(v / row.denominator));
}

}  // namespace focalkern
