// Scores of the scalar spline map in double, in vectors of n doubles: what scores_in_registers (cpu/spline_scores.h)
// does with AVX-512, for AVX2. Short loops over the classes keep more vectors in flight than one long loop would.
#pragma once

#include "cpu/spline_narrow_curve.h"

namespace focalkern::cpu {
namespace {

// log x of a normal number, with an error of a unit in the last place.
template <int64_t n>
FK_HOST_DEVICE simd_t<double, n> wide_logarithms(const simd_t<double, n>& x) {
  using Lanes = DoubleLanes<n>;
  using Reals = typename Lanes::Doubles;
  using F = detail::Format<double>;
  const uint64_t kSqrtHalf = bit_cast<uint64_t>(0x1.6a09e667f3bcdp-1);
  // x = 2^power (1 + f) with 1 + f from the root of 1/2 to that of 2.
  const auto bits = lanes_cast<typename Lanes::Words>(x) + (bit_cast<uint64_t>(1.0) - kSqrtHalf);
  const Reals power = Lanes::exponent(lanes_cast<Reals>(bits));
  const Reals f = lanes_cast<Reals>((bits & ((uint64_t{1} << F::kMantissaBits) - 1)) + kSqrtHalf) - 1;
  const Reals s = f / (f + 2), w = s * s, half_square = f * (f * 0.5);
  constexpr double kTerms[] = {1.4619166134887971e-1, 1.5331501611145328e-1, 1.8182895750119194e-1,
                               2.2222211043776858e-1, 2.8571428626533616e-1, 3.9999999999898273e-1,
                               6.6666666666666697e-1};  // of detail::log_tail
  const Reals tail = s * Lanes::fma(polynomial<n>(w, kTerms), w, half_square);
  const Reals rest = half_square - Lanes::fma(power, spread<Reals>(F::kLn2Lo), tail);
  return Lanes::fma(power, spread<Reals>(F::kLn2Hi), f - rest);
}

// Writes the features to t.x and t.u, and the scores to t.f; also for classes that are padding.
template <bool in_order>
struct WideScores {
  template <int64_t bytes>
  static FK_HOST_DEVICE void run(const SplineTile& t, const VectorCurve<bytes / 8>& curve, double factor, uint64_t kept,
                                 double slack) {
    constexpr int64_t n = bytes / sizeof(double);
    using Reals = simd_t<double, n>;
    if (t.column) {
      const int64_t end = t.classes * kSplineTileRows;
      for (int64_t r = 0; r < (t.n_rows + n - 1) / n * n; r += n) {
        NarrowRows<n> rows;
        for (int64_t i = 0; i < n; ++i) {
          rows.scale[i] = t.row[r + i].scale;
          rows.floor[i] = t.row[r + i].floor;
          rows.log_complement[i] = t.row[r + i].log_complement;
        }
        features<n>(t, r, end, kSplineTileRows, rows, kept);
        scores<n>(t, r, end, kSplineTileRows, rows, kept, curve, spread<Reals>(factor), slack);
      }
      return;
    }
    for (int64_t r = 0; r < t.n_rows; ++r) {
      const SplineRow<double>& of = t.row[r];
      const NarrowRows<n> row{spread<Reals>(of.scale), spread<Reals>(of.floor), spread<Reals>(of.log_complement)};
      const int64_t begin = r * t.inner, end = begin + t.inner;
      features<n>(t, begin, end, n, row, kept);
      scores<n>(t, begin, end, n, row, kept, curve, spread<Reals>(factor), slack);
    }
  }

 private:
  template <int64_t n>
  static FK_HOST_DEVICE simd_t<double, n> start_of(const simd_t<double, n>& p, uint64_t kept) {
    return lanes_cast<simd_t<double, n>>(lanes_cast<simd_t<uint64_t, n>>(p) & kept);
  }

  template <int64_t n>
  static FK_HOST_DEVICE void features(const SplineTile& t, int64_t begin, int64_t end, int64_t step,
                                      const NarrowRows<n>& row, uint64_t kept) {
    using Lanes = DoubleLanes<n>;
    using Reals = typename Lanes::Doubles;
    const double* const e = t.e;
    double *const to_x = t.x, *const to_u = t.u;
#pragma GCC unroll 2
    for (int64_t i = begin; i < end; i += step) {
      const Reals p = start_of<n>(Lanes::fma(load_simd<Reals>(e + i), row.scale, row.floor), kept);
      const Reals x = wide_logarithms<n>(p);
      Reals log_complement = polynomial<n>(p, kLogComplement) * p;
      // Selected lane by lane: the result of a class must not depend on its neighbours, so that ties stay ties.
      if (Lanes::any(p, spread<Reals>(kSplineSmall))) {
        log_complement = p > kSplineSmall ? wide_logarithms<n>(1 - p) : log_complement;
        log_complement = p > kSplineLarge<double> ? row.log_complement : log_complement;
      }
      store_simd(x, to_x + i);
      store_simd(x - log_complement, to_u + i);
    }
  }

  template <int64_t n>
  static FK_HOST_DEVICE void scores(const SplineTile& t, int64_t begin, int64_t end, int64_t step,
                                    const NarrowRows<n>& row, uint64_t kept, const VectorCurve<n>& curve,
                                    const simd_t<double, n>& factor, double slack) {
    using Lanes = DoubleLanes<n>;
    using Reals = typename Lanes::Doubles;
    const double *const e = t.e, *const x = t.x, *const u = t.u;
    double* const to = t.f;
    const auto write = [&](int64_t i, const typename VectorCurve<n>::Point& of) __attribute__((always_inline)) {
      Reals score = Lanes::fma(factor, load_simd<Reals>(x + i), of.value);
      if constexpr (in_order) {
        const Reals p = Lanes::fma(load_simd<Reals>(e + i), row.scale, row.floor), start = start_of<n>(p, kept);
        const Reals complement = p > kSplineLarge<double> ? spread<Reals>(1.0) : 1 - start;  // dx / du
        const Reals slope = Lanes::fma(factor, complement, of.slope), none{};                // times the complement
        const Reals rise = slope * (p - start) / (complement * start);
        score += Lanes::max(rise - slack, rise < none ? rise : none);
      }
      store_simd(score, to + i);
    };
    for (int64_t i = begin; i < end; i += step) {
      const auto odds = load_simd<Reals>(u + i);
      write(i, curve.are_left(odds) ? curve.on_line(odds) : curve(odds));
    }
  }
};

}  // namespace
}  // namespace focalkern::cpu
