// Curve of the scalar spline map, and functions for results of at most 24 bits, in vectors of n doubles. The passes
// over the classes, which say how exact the functions are: cpu/spline_narrow.h.
#pragma once

#include <algorithm>
#include <cmath>

#include "cpu/simd/lanes.h"
#include "cpu/spline_tile.h"

namespace focalkern::cpu {
namespace {

constexpr double kNarrowLn2 = 0.693147180559945309417, kNarrowLog2e = 1.44269504088896340736;

alignas(64) constexpr double kNarrowInverse[8] = {
    0.9411764705882353, 0.8421052631578947, 0.7619047619047619, 0.6956521739130435, 0.64,
    0.5925925925925926, 0.5517241379310345, 0.5161290322580645};
alignas(64) constexpr double kNarrowLog[8] = {0.06062462155414807, 0.17185025716694705, 0.2719337157310255,
                                              0.3629054938211174,  0.44628710263572074, 0.5232481436698231,
                                              0.594707107577045,   0.6613984820246952};

// 2^(i / 16)
alignas(64) constexpr double kNarrowRoots[16] = {1.0,
                                                 1.0442737824274138,
                                                 1.0905077326652577,
                                                 1.1387886347566916,
                                                 1.189207115002721,
                                                 1.241857812073484,
                                                 1.2968395546510096,
                                                 1.3542555469368927,
                                                 1.4142135623730951,
                                                 1.4768261459394993,
                                                 1.5422108254079407,
                                                 1.6104903319492543,
                                                 1.681792830507429,
                                                 1.7562521603732995,
                                                 1.8340080864093424,
                                                 1.9152065613971474};

// The polynomial with these coefficients, the highest first.
template <int64_t n, size_t terms>
FK_HOST_DEVICE simd_t<double, n> polynomial(const simd_t<double, n>& x, const double (&of)[terms]) {
  using Lanes = DoubleLanes<n>;
  using Reals = typename Lanes::Doubles;
  Reals value = Lanes::fma(x, of[0], of[1]);
#pragma GCC unroll 16
  for (size_t i = 2; i < terms; ++i) value = Lanes::fma(value, x, spread<Reals>(of[i]));
  return value;
}

// 2^x for |x| < 1022, with an error of 2.6e-9; exact for integers, and continuous where the parts of x change.
template <int64_t n>
FK_HOST_DEVICE simd_t<double, n> narrow_powers_of_two(const simd_t<double, n>& x) {
  using Lanes = DoubleLanes<n>;
  if constexpr (Lanes::kIsAvx512) {  // x = whole + i / 16 + r with 0 <= r < 1 / 16
    constexpr double kTerms[] = {0.05671884449536471, 0.2401806359521799, 0.6931476711053002, 1.0};
    const auto root = Lanes::template look_up<16>(kNarrowRoots, sixteenths(x));
    return scaled(polynomial<n>(rest_of_sixteenths(x), kTerms) * root, x);
  } else {  // x = whole + r with |r| <= 1/2
    using Format = detail::Format<double>;
    using Words = typename Lanes::Words;
    constexpr double kTerms[] = {0.00015376692782553098,
                                 0.0013403072036946493,
                                 0.009618374760873242,
                                 0.05550321098221978,
                                 0.24022648276742742,
                                 0.6931472092026533,
                                 1.0};
    const auto shifted = x + Format::kRoundToInt;
    const auto power = polynomial<n>(x - (shifted - Format::kRoundToInt), kTerms);
    // Adds the integer to the exponent. A NaN that comes from a float stays NaN.
    const Words exponent = lanes_cast<Words>(shifted) << Format::kMantissaBits;
    return lanes_cast<typename Lanes::Doubles>(lanes_cast<Words>(power) + exponent);
  }
}

// log x of a normal number, with an error of 7.9e-10, continuous where the exponent or the table's entry changes; 0
// for 1.
template <int64_t n>
FK_HOST_DEVICE simd_t<double, n> narrow_logarithms(const simd_t<double, n>& x) {
  using Lanes = DoubleLanes<n>;
  using Reals = typename Lanes::Doubles;
  const Reals mantissa = Lanes::mantissa(x), exponent = Lanes::exponent(x), ln2 = spread<Reals>(kNarrowLn2);
  if constexpr (Lanes::kIsAvx512) {  // a table of eight numbers, of which the index is the last three bits
    const auto place = lanes_cast<typename Lanes::Words>(x) >> 49;
    const Reals inverse = Lanes::template look_up<8>(kNarrowInverse, place);
    const Reals r = Lanes::fma(mantissa, inverse, spread<Reals>(-1.0));
    const Reals whole = Lanes::fma(exponent, ln2, Lanes::template look_up<8>(kNarrowLog, place));
    constexpr double kTerms[] = {0.20086805491503334, -0.2508097458385684, 0.3333318297933007, -0.49999912358602294,
                                 1.0000000007098266};
    return Lanes::fma(polynomial<n>(r, kTerms), r, whole);
  } else {
    constexpr double kTerms[] = {-0.0023872520148381566, 0.0037737049193732127, -0.004659241276272851,
                                 0.008122327515007025,   -0.014664812497876389, 0.026364879660220216,
                                 -0.0493804649657888,    0.09876416039400537,   -0.2222222794078703,
                                 0.6666666830804169,     0.4054651083496125};
    return Lanes::fma(exponent, ln2, polynomial<n>(mantissa - 1.5, kTerms));
  }
}

// The numbers of n rows, or those of one row in all lanes.
template <int64_t n>
struct NarrowRows {
  simd_t<double, n> scale, floor, log_complement;
};

// u = x - log(1 - p). Selected lane by lane, so that ties stay ties.
template <int64_t n>
FK_HOST_DEVICE simd_t<double, n> narrow_log_odds_of_small(const simd_t<double, n>& p, const simd_t<double, n>& x) {
  constexpr double kTerms[] = {0.33971349436581727, 0.49995990208080004, 1.0000000370896};
  return DoubleLanes<n>::fma(polynomial<n>(p, kTerms), p, x);
}
// `is_mixed`: without the test whether all p are small. The processor often mispredicts it where some vectors have a
// larger one.
template <int64_t n, bool is_mixed = false>
FK_HOST_DEVICE simd_t<double, n> narrow_log_odds(const simd_t<double, n>& p, const simd_t<double, n>& x,
                                                 const NarrowRows<n>& row) {
  using Reals = simd_t<double, n>;
  const Reals u = narrow_log_odds_of_small<n>(p, x);  // for p up to kSplineSmall, where both branches agree
  if (!is_mixed && !DoubleLanes<n>::any(p, spread<Reals>(kSplineSmall))) return u;
  const Reals log_complement = narrow_logarithms<n>(1 - p);
  return p > kSplineSmall ? x - (p > kSplineLarge<double> ? row.log_complement : log_complement) : u;
}

// A curve, times `unit`, in tables of its pieces. With AVX-512 bisection finds the piece of u: in the tables' index the
// low three bits of a piece's number are reversed, so that bisection needs one permutation per step, of the first half
// of the tables if all u are below the knot in the middle. Narrower vectors count the knots below u.
template <int64_t n>
class VectorCurve {
  using Lanes = DoubleLanes<n>;
  using Reals = typename Lanes::Doubles;
  using Words = typename Lanes::Words;
  static constexpr int64_t kHalf = kSplineTables / 2, kQuarter = kHalf / 2;

 public:
  VectorCurve(const SplineCurve& curve, double unit) {
    const auto knot_at = [&](int64_t k) { return k < curve.knots ? curve.positions[k] : -kMinusInfinity; };
    for (int64_t code = 0; code < kSplineTables; ++code) {
      const int64_t half = code & kHalf, quarter = half + 4 * (code & 1), eighth = quarter + (code & 2);
      const int64_t piece = std::min(Lanes::kIsAvx512 ? eighth + (code >> 2 & 1) : code, curve.knots);
      if constexpr (Lanes::kIsAvx512) {
        in_half_[code] = knot_at(half + 3);
        in_quarter_[code] = knot_at(quarter + 1);
        in_eighth_[code] = knot_at(eighth);
      }
      knot_[code] = spread<Reals>(knot_at(code));
      origin_.set(code, curve.positions[std::max<int64_t>(piece - 1, 0)]);
      for (int k = 0; k < 4; ++k) power_[k].set(code, curve.coefficients[piece * 4 + k] * unit);
    }
    line_origin_ = spread<Reals>(curve.positions[0]);
    for (int k = 0; k < 2; ++k) line_[k] = spread<Reals>(curve.coefficients[k] * unit);
    // P whose log-odds are left of a knot, also after rounding.
    const auto left_of = [&](int64_t k) { return std::min(kSplineSmall, 1 / (1 + std::exp(1e-6 - knot_at(k)))); };
    on_line_ = spread<Reals>(left_of(0));
    on_quarter_ = spread<Reals>(left_of(kQuarter - 1));
  }

  // Whether the log-odds of all P are left of the first knot, or of the fourth.
  FK_HOST_DEVICE bool are_on_line(const Reals& p) const { return !Lanes::any(p, on_line_); }
  FK_HOST_DEVICE bool are_on_quarter(const Reals& p) const { return !Lanes::any(p, on_quarter_); }

  FK_HOST_DEVICE bool are_left(const Reals& u) const { return !Lanes::any(u, knot_[0]); }

  // f(u), f'(u), the piece of u, and the offset of u on it.
  struct Point {
    Reals value, slope, offset;
    typename Lanes::Places place{};
  };
  // Each lane has the same bits in each of these functions.
  FK_HOST_DEVICE Point on_line(const Reals& u) const {
    const Reals s = u - line_origin_;
    return {Lanes::fma(s, line_[1], line_[0]), line_[1], s};
  }
  FK_HOST_DEVICE Point on_quarter(const Reals& u) const { return at<Lanes::kIsAvx512 ? kHalf : kQuarter>(u); }
  FK_HOST_DEVICE Point operator()(const Reals& u) const {
    if constexpr (!Lanes::kIsAvx512) {
      if (!Lanes::any(u, knot_[kQuarter - 1])) return at<kQuarter>(u);
    }
    if (!Lanes::any(u, knot_[kHalf - 1])) return at<kHalf>(u);
    if constexpr (!Lanes::kIsAvx512) {
      if (!Lanes::any(u, knot_[kHalf + kQuarter - 1])) return at<kHalf + kQuarter>(u);
    }
    return at<kSplineTables>(u);
  }

  // For u on the first `pieces` pieces.
  template <int64_t pieces>
  FK_HOST_DEVICE Point at(const Reals& u) const {
    typename Lanes::Places places;
    if constexpr (Lanes::kIsAvx512) {
      Words code{};
      if constexpr (pieces > kHalf) code = add_above(code, u, knot_[kHalf - 1], kHalf);
      code = add_above(code, u, pieces > kHalf ? entry<pieces>(in_half_, code) : knot_[kQuarter - 1], 1);
      code = add_above(code, u, entry<pieces>(in_quarter_, code), 2);
      places = add_above(code, u, entry<pieces>(in_eighth_, code), 4);
    } else {
      places = Lanes::template count_below<pieces>(knot_, u);
    }
    const Reals s = u - Lanes::template look_up<pieces>(origin_, places);
    Reals power[4];
    for (int k = 0; k < 4; ++k) power[k] = Lanes::template look_up<pieces>(power_[k], places);
    const Reals square = Lanes::fma(power[3], s, power[2]), rise = Lanes::fma(power[3] * 3, s, power[2] + power[2]);
    return {Lanes::fma(Lanes::fma(square, s, power[1]), s, power[0]), Lanes::fma(rise, s, power[1]), s, places};
  }

 private:
  template <int64_t pieces>
  static FK_HOST_DEVICE Reals entry(const double* table, const Words& code) {
    return Lanes::template look_up<pieces>(table, code);
  }

  Reals knot_[kSplineTables], on_line_, on_quarter_, line_origin_, line_[2];
  double in_half_[kSplineTables], in_quarter_[kSplineTables], in_eighth_[kSplineTables];  // with AVX-512
  typename Lanes::Table origin_, power_[4];
};

}  // namespace
}  // namespace focalkern::cpu
