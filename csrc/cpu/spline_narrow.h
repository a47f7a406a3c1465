// Scalar spline map of results of at most 24 bits: two passes over the classes of a row instead of four.
//
//   1. E = exp((z - top) / T) and its sum
//   2. P, x, u, f(u), the score and exp(score), and its sum; log p needs a third pass, for the largest score
//
// The functions are those of math/spline.h with errors of up to 3e-9, a twentieth of half a unit in the last place of
// float32. All numbers are double, so that the order of the classes is kept as in the other code: each approximation is
// continuous, and its relative slope is right to 1e-6. A step of the grid then raises the score by at least 4e-13,
// which outweighs the rounding errors.
//
// Vectors have n doubles. Every loop is a Body of run_in (cpu/simd/lanes.h).
#pragma once

#include "cpu/simd/transpose.h"
#include "cpu/spline_narrow_curve.h"

namespace focalkern::cpu {
namespace {

constexpr double kNarrowLargest = 600;    // of a score: its exponential needs no largest score
constexpr double kNarrowSteepest = 8;     // of a score in x: the result then has an error of 2.5e-8
constexpr double kNarrowFloor = 0x1p-24;  // smallest e: the sum without the largest class then keeps its digits
constexpr int64_t kNarrowMixed = 128;     // classes of a row of which many vectors have a P above kSplineSmall
constexpr int64_t kNarrowBlock = 256;     // classes of a row that stay in the first-level cache from loop to loop
constexpr double kNarrowLowest = -1000;   // lower binary logarithms count as this

// Logits in memory: those of a tile, with padding of -inf, or floats of the input, which the row layout reads where
// they are.
template <int64_t n>
FK_HOST_DEVICE simd_t<double, n> narrow_logits(const double* z) {
  return load_simd<simd_t<double, n>>(z);
}
template <int64_t n>
FK_HOST_DEVICE simd_t<double, n> narrow_logits(const float* z) {
  return DoubleLanes<n>::widen(load_simd<simd_t<float, n>>(z));
}
// The last classes of a row, and -inf in the other lanes.
template <int64_t n>
FK_HOST_DEVICE simd_t<double, n> narrow_logits(const double* z, int64_t) {
  return narrow_logits<n>(z);
}
template <int64_t n>
FK_HOST_DEVICE simd_t<double, n> narrow_logits(const float* z, int64_t count) {
  return DoubleLanes<n>::widen(DoubleLanes<n>::load_front(z, count, static_cast<float>(kMinusInfinity)));
}
// The end of the rows of the column layout, in whole vectors: a tile of few rows computes no more of them.
template <int64_t n>
FK_HOST_DEVICE int64_t narrow_rows_end(const SplineTile& t) {
  return (t.n_rows + n - 1) / n * n;
}
template <typename Logit>
int64_t narrow_stride(const SplineTile& t) {
  return sizeof(Logit) == sizeof(float) ? t.classes : t.inner;
}

// The largest float of each row; a NaN does not count. In the column layout, z is [classes, kSplineTileRows].
struct NarrowTops {
  template <int64_t bytes>
  static FK_HOST_DEVICE void run(const SplineTile& t, const float* z) {
    constexpr int64_t n = bytes / sizeof(float);
    using Floats = simd_t<float, n>;
    constexpr Larger larger;
    const Floats nothing = spread<Floats>(static_cast<float>(kMinusInfinity));
    if (t.column) {
      const int64_t end = t.classes * kSplineTileRows;
      for (int64_t r = 0; r < narrow_rows_end<n>(t); r += n) {
        Floats top = nothing;
        for (int64_t i = r; i < end; i += kSplineTileRows) {
          top = larger(load_simd<Floats>(z + i), top);
        }
        store_simd(__builtin_convertvector(top, simd_t<double, n>), t.top + r);
      }
      return;
    }
    for (int64_t r = 0; r < t.n_rows; ++r, z += t.classes) {
      Floats top = load_simd<Floats>(z + t.classes - n);  // overlaps the others
      top = larger(top, nothing);
#pragma GCC unroll 4
      for (int64_t c = 0; c + n <= t.classes; c += n) top = larger(load_simd<Floats>(z + c), top);
      t.top[r] = fold_lanes(top, larger);
    }
  }
};

// Whether a logit is -inf.
FK_VECTOR_CLONES inline bool has_impossible(const float* z, int64_t n) {
  int found = 0;
#pragma omp simd reduction(| : found)
  for (int64_t i = 0; i < n; ++i) found |= z[i] == static_cast<float>(kMinusInfinity);
  return found != 0;
}

// Writes E to t.f, and the sum of all but the largest to t.rest: NaN for a row without a result.
template <typename Logit>
struct NarrowExponents {
  template <int64_t bytes>
  static FK_HOST_DEVICE void run(const SplineTile& t, const Logit* z, double temperature, double grid) {
    constexpr int64_t n = bytes / sizeof(double);
    using Lanes = DoubleLanes<n>;
    using Reals = typename Lanes::Doubles;
    const double beta = std::min(inverse_temperature<double>(temperature) * kNarrowLog2e, largest_finite<double>());
    const auto write = [&](const Reals& logits, const Reals& top, double* to) __attribute__((always_inline)) {
      Reals d = Lanes::fma(logits - top, beta, grid);
      d = Lanes::max(spread<Reals>(kNarrowLowest + grid), d);  // NaN stays NaN
      if constexpr (Lanes::kIsAvx512) d -= grid;               // the others drop the grid with higher bits of the power
      const Reals e = narrow_powers_of_two<n>(d);
      store_simd(e, to);
      return e;
    };
    if (t.column) {
      const int64_t end = t.classes * kSplineTileRows;
      for (int64_t r = 0; r < narrow_rows_end<n>(t); r += n) {
        const Reals top = load_simd<Reals>(t.top + r);
        Reals sum = spread<Reals>(-1.0);
        double* const e = t.f;
        for (int64_t i = r; i < end; i += kSplineTileRows) {
          sum += write(narrow_logits<n>(z + i), top, e + i);
        }
        store_simd(sum, t.rest + r);
      }
      return;
    }
    const int64_t whole = t.classes / n * n, left = t.classes - whole;
    for (int64_t r = 0; r < t.n_rows; ++r, z += narrow_stride<Logit>(t)) {
      const Reals top = spread<Reals>(t.top[r]);
      double* const to = t.f + r * t.inner;
      Reals sum{};
#pragma GCC unroll 2
      for (int64_t c = 0; c < whole; c += n) sum += write(narrow_logits<n>(z + c), top, to + c);
      if (left > 0) sum += write(narrow_logits<n>(z + whole, left), top, to + whole);
      t.rest[r] = fold_lanes(sum, Sum{}) - 1;
    }
  }
};

// Computes scale and log_complement of spline_row, and writes them to t.inverse and t.shared.
struct NarrowRowNumbers {
  template <int64_t bytes>
  static FK_HOST_DEVICE void run(const SplineTile& t, double e) {
    constexpr int64_t n = bytes / sizeof(double);
    using Reals = simd_t<double, n>;
    const auto classes = static_cast<double>(t.classes);
    for (int64_t r = 0; r < t.n_rows; r += n) {
      const auto rest = load_simd<Reals>(t.rest + r);
      const Reals scale = (1 - e) / (1 + rest);
      store_simd(scale, t.inverse + r);
      store_simd(narrow_logarithms<n>(scale * rest + e / classes * (classes - 1)), t.shared + r);
    }
  }
};

// Memory that later loops need: the logits of the next tile, and the place for the results of this one. The processor
// loads both while it computes; a burst of loads per tile would keep it waiting.
struct NarrowAhead {
  const float* logits = nullptr;  // null: neither
  const float* results;
  FK_HOST_DEVICE void fetch(int64_t begin, int64_t end) const {
    constexpr int64_t kLine = 64 / sizeof(float);
    if (logits == nullptr) return;
    for (int64_t i = begin; i < end; i += kLine) {
      __builtin_prefetch(logits + i);
      __builtin_prefetch(results + i, /*write*/ 1);
    }
  }
};

// Writes the exponentials of the scores, or with `log` the scores, both as powers of two, to t.f, and to `of_rows` the
// sum of a row's exponentials, or its largest score. An impossible class has 0, or -inf.
template <bool log, bool keep_zeros, typename Logit>
struct NarrowScores {
  template <int64_t bytes>
  static FK_HOST_DEVICE void run(const SplineTile& t, const Logit* z, const VectorCurve<bytes / 8>& curve,
                                 const SplineMapForward& args, const NarrowAhead& ahead, double* of_rows) {
    constexpr int64_t n = bytes / sizeof(double);
    using Lanes = DoubleLanes<n>;
    using Reals = typename Lanes::Doubles;
    using Words = typename Lanes::Words;
    const uint64_t kept = ~uint64_t{0} << (args.keep_order ? 22 : 0);  // as kept_bits_of
    const Reals factor = spread<Reals>(args.scores.factor * kNarrowLog2e);
    const Reals floor = spread<Reals>(args.rows.floor / static_cast<double>(t.classes));
    const Reals nothing = spread<Reals>(log ? kMinusInfinity : 0.0);
    const auto p_of = [&](const double* e, const NarrowRows<n>& row) __attribute__((always_inline)) {
      return lanes_cast<Reals>(lanes_cast<Words>(Lanes::fma(load_simd<Reals>(e), row.scale, row.floor)) & kept);
    };
    // Replaces P at f by the scores, for two vectors with one test; x: log P.
    const auto write_two = [&](const double* logs, double* f, int64_t step, const NarrowRows<n>& row)
                               __attribute__((always_inline)) {
                                 const Reals p[] = {load_simd<Reals>(f), load_simd<Reals>(f + step)};
                                 const Reals x[] = {load_simd<Reals>(logs), load_simd<Reals>(logs + step)};
                                 const Reals larger = Lanes::max(p[0], p[1]);
                                 Reals value[2];
                                 if (curve.are_on_line(larger)) {
                                   for (int k = 0; k < 2; ++k)
                                     value[k] = curve.on_line(narrow_log_odds_of_small<n>(p[k], x[k])).value;
                                 } else if (curve.are_on_quarter(larger)) {
                                   for (int k = 0; k < 2; ++k)
                                     value[k] = curve.on_quarter(narrow_log_odds_of_small<n>(p[k], x[k])).value;
                                 } else {
#pragma GCC unroll 1
                                   for (int k = 0; k < 2; ++k)
                                     value[k] = curve(narrow_log_odds<n>(p[k], x[k], row)).value;
                                 }
                                 for (int k = 0; k < 2; ++k)
                                   store_simd(Lanes::fma(x[k], factor, value[k]), f + k * step);
                               };
    // Replaces the exponentials at f by the scores. log P is at t.e, which stays in the first-level cache. A vector
    // needs about a hundred cycles, and the processor overlaps more vectors of short loops than of one long loop.
    const auto write_scores = [&](auto is_mixed, double* f, int64_t end, int64_t step,
                                  const NarrowRows<n>& row) __attribute__((always_inline)) {
      double* const logs = t.e;
      constexpr bool kMixed = is_mixed, kStoresOdds = kMixed || Lanes::kIsAvx512;
#pragma GCC unroll 2
      for (int64_t i = 0; i < end; i += step) {
        const Reals p = p_of(f + i, row), x = narrow_logarithms<n>(p);
        store_simd(x, logs + i);
        store_simd(kStoresOdds ? narrow_log_odds<n, kMixed>(p, x, row) : p, f + i);
      }
      int64_t i = 0;
      if constexpr (!kStoresOdds) {
        for (; i + step < end; i += 2 * step) write_two(logs + i, f + i, step, row);
      }
#pragma GCC unroll 2
      for (; i < end; i += step) {
        const auto x = load_simd<Reals>(logs + i), found = load_simd<Reals>(f + i);
        const Reals u = kStoresOdds ? found : narrow_log_odds<n>(found, x, row);
        const auto at = kMixed && Lanes::kIsAvx512 ? curve.template at<kSplineTables>(u) : curve(u);
        store_simd(Lanes::fma(x, factor, at.value), f + i);
      }
    };
    const auto exponential_of = [&](const Reals& score, const Reals& logits) __attribute__((always_inline)) {
      const Reals found = log ? score : narrow_powers_of_two<n>(score);
      return keep_zeros ? logits == kMinusInfinity ? nothing : found : found;
    };
    const auto add = [&](const Reals& found, double* at, Reals& all) __attribute__((always_inline)) {
      store_simd(found, at);
      all = log ? Lanes::max(found, all) : found + all;
    };
    const auto write = [&](double* f, const Logit* logits, Reals& all) __attribute__((always_inline)) {
      add(exponential_of(load_simd<Reals>(f), narrow_logits<n>(logits)), f, all);
    };
    if (t.column) {
      const int64_t end = t.classes * kSplineTileRows;
      for (int64_t r = 0; r < narrow_rows_end<n>(t); r += n) {
        const NarrowRows<n> rows{load_simd<Reals>(t.inverse + r), floor, load_simd<Reals>(t.shared + r)};
        double* const f = t.f + r;
        Reals all = nothing;
        ahead.fetch(r * t.classes, std::min(r + n, t.n_rows) * t.classes);
        write_scores(std::true_type(), f, end - r, kSplineTileRows, rows);
#pragma GCC unroll 2
        for (int64_t i = 0; i < end - r; i += kSplineTileRows) write(f + i, z + r + i, all);
        store_simd(all, of_rows + r);
      }
      return;
    }
    const bool is_mixed = Lanes::kIsAvx512 && t.classes <= kNarrowMixed;
    const int64_t whole = t.classes / n * n, left = t.classes - whole;
    for (int64_t r = 0; r < t.n_rows; ++r, z += narrow_stride<Logit>(t)) {
      const NarrowRows<n> row{spread<Reals>(t.inverse[r]), floor, spread<Reals>(t.shared[r])};
      double* const f = t.f + r * t.inner;
      Reals all = nothing;
      for (int64_t c = 0; c < t.classes; c += kNarrowBlock) {
        const int64_t end = std::min(kNarrowBlock, t.classes - c), whole_end = std::min(c + kNarrowBlock, whole);
        ahead.fetch(r * t.classes + c, r * t.classes + c + end);
        is_mixed ? write_scores(std::true_type(), f + c, end, n, row)
                 : write_scores(std::false_type(), f + c, end, n, row);
#pragma GCC unroll 2
        for (int64_t i = c; i < whole_end; i += n) write(f + i, z + i, all);
      }
      if (left > 0) {  // the other lanes are padding
        const auto lane = load_simd<Words>(kFirst<uint64_t>);
        const Reals found = exponential_of(load_simd<Reals>(f + whole), narrow_logits<n>(z + whole, left));
        add(lane < static_cast<uint64_t>(left) ? found : nothing, f + whole, all);
      }
      of_rows[r] = log ? fold_lanes(all, Larger{}) : fold_lanes(all, Sum{});
    }
  }
};

// Subtracts the largest score of its row from each score, and sums the exponentials. That of the largest score is 1, so
// no probability has a logarithm above 0.
struct NarrowSums {
  template <int64_t bytes>
  static FK_HOST_DEVICE void run(const SplineTile& t) {
    constexpr int64_t n = bytes / sizeof(double);
    using Lanes = DoubleLanes<n>;
    using Reals = typename Lanes::Doubles;
    const auto power_of = [&](double* score, const Reals& top) __attribute__((always_inline)) {
      const Reals difference = load_simd<Reals>(score) - top;
      store_simd(difference, score);
      return narrow_powers_of_two<n>(Lanes::max(spread<Reals>(kNarrowLowest), difference));
    };
    if (t.column) {
      const int64_t end = t.classes * kSplineTileRows;
      for (int64_t r = 0; r < narrow_rows_end<n>(t); r += n) {
        const auto top = load_simd<Reals>(t.score_top + r);
        Reals sum{};
        for (int64_t i = r; i < end; i += kSplineTileRows) sum += power_of(t.f + i, top);
        store_simd(sum, t.sum + r);
      }
      return;
    }
    for (int64_t r = 0; r < t.n_rows; ++r) {
      const Reals top = spread<Reals>(t.score_top[r]);
      Reals sum{};
      for (int64_t c = 0; c < t.classes; c += n) sum += power_of(t.f + r * t.inner + c, top);
      t.sum[r] = fold_lanes(sum, Sum{});
    }
  }
};

// Writes t.f * scale (+ shift, with `log`) to rows of floats. The column layout uses t.d.
template <bool log>
struct NarrowResults {
  template <int64_t bytes>
  static FK_HOST_DEVICE void run(const SplineTile& t, const double* scale, const double* shift, float* to) {
    constexpr int64_t n = bytes / sizeof(double);
    using Lanes = DoubleLanes<n>;
    using Reals = typename Lanes::Doubles;
    using Floats = typename Lanes::Floats;
    const auto result_of = [&](const double* f, const Reals& factor, const Reals& term) __attribute__((always_inline)) {
      const auto value = load_simd<Reals>(f);
      return __builtin_convertvector(log ? Lanes::fma(value, factor, term) : value * factor, Floats);
    };
    if (t.column) {
      float* const columns = reinterpret_cast<float*>(t.d);
      const double* const f = t.f;
      const int64_t end = t.classes * kSplineTileRows;
      for (int64_t r = 0; r < narrow_rows_end<n>(t); r += n) {
        const auto factor = load_simd<Reals>(scale + r), term = load_simd<Reals>(shift + r);
        for (int64_t i = r; i < end; i += kSplineTileRows) {
          store_simd(result_of(f + i, factor, term), columns + i);
        }
      }
      return to_rows<kSplineTileRows>(columns, t.n_rows, t.classes, to, t.classes);
    }
    const int64_t whole = t.classes / n * n, left = t.classes - whole;
    for (int64_t r = 0; r < t.n_rows; ++r, to += t.classes) {
      const double* const f = t.f + r * t.inner;
      const Reals factor = spread<Reals>(scale[r]), term = spread<Reals>(shift[r]);
#pragma GCC unroll 4
      for (int64_t c = 0; c < whole; c += n) store_simd(result_of(f + c, factor, term), to + c);
      if (left > 0) Lanes::store_front(result_of(f + whole, factor, term), left, to + whole);
    }
  }
};

}  // namespace
}  // namespace focalkern::cpu
