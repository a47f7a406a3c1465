// Curve, scores and softmax of a tile of rows with computed features (cpu/spline_tile.h).
#pragma once

#include <optional>

#include "cpu/spline_narrow_curve.h"

namespace focalkern::cpu {
namespace {

// ---- the curve -----------------------------------------------------------------------------------------------------

// A curve as tables of its pieces, for look-ups in registers.
struct CurveTables {
  explicit CurveTables(const SplineCurve& curve) : curve(curve) {
    if (curve.knots >= kSplineTables) return;
#ifdef FK_HAS_AVX512_CODE
    if (has_avx2() && !has_avx512()) in_fours.emplace(curve, /*unit=*/1.0);
#endif
    std::fill_n(knot, kSplineTables, -kMinusInfinity);
    std::copy_n(curve.positions, curve.knots, knot);
    std::fill_n(origin, kSplineTables, curve.positions[curve.knots - 1]);
    origin[0] = curve.positions[0];
    std::copy_n(curve.positions, curve.knots, origin + 1);
    const double* c = curve.coefficients;
    for (int64_t i = 0; i < kSplineTables; ++i) {
      for (int k = 0; k < 4; ++k) power[k][i] = c[k];
      if (i < curve.knots) c += 4;
    }
  }
  SplineCurve curve;
  std::optional<VectorCurve<4>> in_fours;  // with AVX2 but without AVX-512
  alignas(64) double knot[kSplineTables], origin[kSplineTables], power[4][kSplineTables];
};

#ifdef FK_HAS_AVX512_CODE
// The number of knots below u, by bisection over 15 knots.
FK_AVX512 inline __m512i pieces_of(__m512d u, const CurveTables& tables) {
  __m512i piece = _mm512_setzero_si512();
  for (const int step : {8, 4, 2, 1}) {
    const __m512i next = _mm512_add_epi64(piece, _mm512_set1_epi64(step));
    const __m512d knot = look_up(tables.knot, _mm512_sub_epi64(next, _mm512_set1_epi64(1)));
    piece = _mm512_mask_mov_epi64(piece, _mm512_cmp_pd_mask(u, knot, _CMP_GT_OQ), next);
  }
  return piece;
}

struct WideCurve {
  __m512d value, slope, offset;
  __m512i piece;
};
template <bool with_slope>
FK_AVX512 inline WideCurve curve_at(__m512d u, const CurveTables& tables) {
  WideCurve found;
  // With many classes, nearly all lie left of the first knot, where the curve is a line. The result has the same bits
  // as below.
  if (!_mm512_cmp_pd_mask(u, _mm512_set1_pd(tables.knot[0]), _CMP_GT_OQ)) {
    found.piece = _mm512_setzero_si512();
    found.offset = _mm512_sub_pd(u, _mm512_set1_pd(tables.origin[0]));
    found.slope = _mm512_set1_pd(tables.power[1][0]);
    found.value = _mm512_fmadd_pd(found.slope, found.offset, _mm512_set1_pd(tables.power[0][0]));
    return found;
  }
  found.piece = pieces_of(u, tables);
  const __m512d s = found.offset = _mm512_sub_pd(u, look_up(tables.origin, found.piece));
  const __m512d c1 = look_up(tables.power[1], found.piece), c2 = look_up(tables.power[2], found.piece);
  const __m512d c3 = look_up(tables.power[3], found.piece);
  const __m512d tail = _mm512_fmadd_pd(_mm512_fmadd_pd(c3, s, c2), s, c1);
  found.value = _mm512_fmadd_pd(tail, s, look_up(tables.power[0], found.piece));
  if constexpr (with_slope) {
    const __m512d rise = _mm512_fmadd_pd(_mm512_mul_pd(c3, _mm512_set1_pd(3)), s, _mm512_add_pd(c2, c2));
    found.slope = _mm512_fmadd_pd(rise, s, c1);
  }
  return found;
}

template <bool with_slope>
FK_AVX512 void curve_in_registers(const SplineTile& t, const CurveTables& tables) {
  const int64_t n = t.outer * t.inner;
  for (int64_t i = 0; i < n; i += 8) {
    const WideCurve found = curve_at<with_slope>(_mm512_load_pd(t.u + i), tables);
    _mm512_store_pd(t.f + i, found.value);
    _mm512_store_pd(t.u + i, found.offset);
    _mm_storel_epi64(reinterpret_cast<__m128i*>(t.piece + i), _mm512_cvtepi64_epi8(found.piece));
    if constexpr (with_slope) _mm512_store_pd(t.slope + i, found.slope);
  }
}

// `pieces`: at least the number of pieces, for few classes, where the branches of VectorCurve would be mispredicted; 0:
// with these branches, because most of many classes are left of the first knot.
template <bool with_slope, int64_t pieces>
FK_AVX2 void curve_in_fours(const SplineTile& t, const VectorCurve<4>& curve) {
  const int64_t n = t.outer * t.inner;
  for (int64_t i = 0; i < n; i += 4) {
    const auto u = load_simd<simd_t<double, 4>>(t.u + i);
    VectorCurve<4>::Point found;
    if constexpr (pieces > 0) {
      found = curve.at<pieces>(u);
    } else {
      found = curve.are_left(u) ? curve.on_line(u) : curve(u);
    }
    store_simd(found.value, t.f + i);
    store_simd(found.offset, t.u + i);
    store_negated(found.place.counts, t.piece + i);
    if constexpr (with_slope) store_simd(found.slope, t.slope + i);
  }
}
template <bool with_slope>
void curve_in_fours(const SplineTile& t, const CurveTables& tables) {
  const VectorCurve<4>& curve = *tables.in_fours;
  const int64_t knots = tables.curve.knots;
  if (!t.column) return curve_in_fours<with_slope, 0>(t, curve);
  knots < 8    ? curve_in_fours<with_slope, 8>(t, curve)
  : knots < 12 ? curve_in_fours<with_slope, 12>(t, curve)
               : curve_in_fours<with_slope, kSplineTables>(t, curve);
}
#endif

FK_VECTOR_CLONES inline void count_knots_below(const double* u, int64_t n, const SplineCurve& curve, uint8_t* piece) {
  for (int64_t i = 0; i < n; ++i) piece[i] = 0;
  for (int64_t k = 0; k < curve.knots; ++k) {
    const double knot = curve.positions[k];
#pragma omp simd
    for (int64_t i = 0; i < n; ++i) piece[i] += u[i] > knot ? 1 : 0;
  }
}

template <bool with_slope>
void curve_one_by_one(const SplineTile& t, const SplineCurve& curve) {
  const int64_t n = t.outer * t.inner;
  if (curve.knots < kSplineTables) {
    count_knots_below(t.u, n, curve, t.piece);
  } else {
    const double* end = curve.positions + curve.knots;
    for (int64_t i = 0; i < n; ++i) {
      t.piece[i] = static_cast<uint8_t>(std::lower_bound(curve.positions, end, t.u[i]) - curve.positions);
    }
  }
  for (int64_t i = 0; i < n; ++i) {
    const int64_t piece = t.piece[i];
    const double* c = curve.coefficients + piece * 4;
    const double s = t.u[i] - curve.positions[std::max<int64_t>(piece - 1, 0)];
    t.f[i] = spline_value(c[0], c[1], c[2], c[3], s);
    if constexpr (with_slope) t.slope[i] = spline_slope(c[1], c[2], c[3], s);
    t.u[i] = s;
  }
}

// Computes f(u), the piece of u, and s, which replaces u; with_slope: f'(u), too.
template <bool with_slope>
void curve_of_tile(const SplineTile& t, const CurveTables& tables) {
#ifdef FK_HAS_AVX512_CODE
  if (tables.curve.knots < kSplineTables && has_avx512()) return curve_in_registers<with_slope>(t, tables);
  if (tables.in_fours) return curve_in_fours<with_slope>(t, tables);
#endif
  curve_one_by_one<with_slope>(t, tables.curve);
}

// ---- scores and their softmax --------------------------------------------------------------------------------------

FK_VECTOR_CLONES inline void scores_of_tile(const SplineScores& args, int64_t row, const SplineTile& t) {
  for (int64_t o = 0; o < t.outer; ++o) {
    const double* d = t.d + o * t.inner;
    const double* x = t.x + o * t.inner;
    double* f = t.f + o * t.inner;
    if (t.column) {
      const double factor = args.factor + (args.weight ? args.weight[o] : 0), bias = args.bias ? args.bias[o] : 0;
#pragma omp simd
      for (int64_t i = 0; i < kSplineTileRows; ++i) f[i] += factor * x[i] + bias;
    } else if (args.weight || args.bias) {
      for (int64_t i = 0; i < t.classes; ++i) {
        f[i] += (args.factor + (args.weight ? args.weight[i] : 0)) * x[i] + (args.bias ? args.bias[i] : 0);
      }
    } else {
#pragma omp simd
      for (int64_t i = 0; i < t.inner; ++i) f[i] += args.factor * x[i];
    }
    if (args.keep_zeros) {
#pragma omp simd
      for (int64_t i = 0; i < t.inner; ++i) f[i] = d[i] == kMinusInfinity ? kMinusInfinity : f[i];
    }
    for (int64_t i = t.column ? t.inner : t.classes; i < t.inner; ++i) f[i] = kMinusInfinity;
  }
  if (!args.extra) return;
  for (int64_t r = 0; r < t.n_rows; ++r) {
    const double* extra = args.extra + (row + r - args.first_row) * t.classes;
    double* f = t.f + r * t.row_stride;
    for (int64_t c = 0; c < t.classes; ++c) f[c * t.class_stride] += extra[c];
  }
}

#ifdef FK_HAS_AVX512_CODE
// 1 / x to 28 bits.
FK_AVX512 inline __m512d inverses(__m512d x) {
  const __m512d guess = _mm512_rcp14_pd(x);
  return _mm512_mul_pd(guess, _mm512_fnmadd_pd(x, guess, _mm512_set1_pd(2)));
}

// Computes scores that have no per-class terms, and the largest score of each row, from the exponentials. x and u have
// a loop of their own: the processor overlaps more vectors of two short loops than of one long loop.
//
// `in_order` keeps the order of double inputs. Each P lies in a step of relative size 2^-30. Its score is the score at
// the start of the step, plus the slope there times the distance of P from the start, so within a step it rises with P,
// also after rounding. Only a rise above `slack` counts; then the score at the start of the next step, whose rounding
// error differs, is not below it.
template <bool in_order>
FK_AVX512 inline void scores_in_registers(const SplineTile& t, const CurveTables& tables, const SplineScores& args,
                                          uint64_t kept_bits, double slack) {
  log_odds_in_registers(t, kept_bits);
  const __m512d kept = _mm512_castsi512_pd(_mm512_set1_epi64(static_cast<int64_t>(kept_bits)));
  const __m512d nothing = _mm512_set1_pd(kMinusInfinity);
  const __m512d factor = _mm512_set1_pd(args.factor);
  const auto score_at = [&](int64_t i, const SplineRows& row, __mmask8 there) FK_AVX512 {
    const WideCurve curve = curve_at<in_order>(_mm512_load_pd(t.u + i), tables);
    __m512d score = _mm512_fmadd_pd(factor, _mm512_load_pd(t.x + i), curve.value);
    if constexpr (in_order) {
      const __m512d p = _mm512_fmadd_pd(_mm512_load_pd(t.e + i), row.scale, row.floor), start = _mm512_and_pd(p, kept);
      const __mmask8 rest = _mm512_cmp_pd_mask(p, _mm512_set1_pd(kSplineLarge<double>), _CMP_LE_OQ);
      const __m512d rise_of_u = inverses(_mm512_sub_pd(_mm512_set1_pd(1), start));  // du / dx; 1 for a large P
      const __m512d slope =
          _mm512_fmadd_pd(curve.slope, _mm512_mask_mov_pd(_mm512_set1_pd(1), rest, rise_of_u), factor);
      const __m512d rise = _mm512_mul_pd(slope, _mm512_mul_pd(_mm512_sub_pd(p, start), inverses(start)));
      score = _mm512_add_pd(
          score, _mm512_max_pd(_mm512_sub_pd(rise, _mm512_set1_pd(slack)), _mm512_min_pd(rise, _mm512_setzero_pd())));
    }
    if (args.keep_zeros) there &= _mm512_cmp_pd_mask(_mm512_load_pd(t.d + i), nothing, _CMP_NEQ_UQ);
    score = _mm512_mask_mov_pd(nothing, there, score);
    _mm512_store_pd(t.f + i, score);
    return score;
  };
  if (t.column) {
    for (int64_t r = 0; r < kSplineTileRows; r += 8) {
      const SplineRows rows = rows_at(t, r);
      __m512d top = nothing;
      for (int64_t c = 0; c < t.classes; ++c) top = _mm512_max_pd(score_at(c * kSplineTileRows + r, rows, 0xff), top);
      _mm512_storeu_pd(t.score_top + r, top);
    }
    return;
  }
  for (int64_t r = 0; r < t.n_rows; ++r) {
    const SplineRows row = row_at(t, r);
    __m512d top = nothing;
    for (int64_t c = 0; c < t.inner; c += 8) {
      const int64_t left = t.classes - c;  // the other lanes are padding
      const __mmask8 there = left >= 8 ? 0xff : static_cast<__mmask8>((1 << left) - 1);
      top = _mm512_max_pd(score_at(r * t.inner + c, row, there), top);
    }
    t.score_top[r] = _mm512_reduce_max_pd(top);
  }
}
#endif

// Replaces the scores by exp(score - largest), and computes the sum per row. `keep` leaves the scores unchanged.
// `in_order` rounds their differences to a grid on which the exponential cannot change the order.
template <bool keep, bool in_order = false>
FK_VECTOR_CLONES void softmax_of_scores(const SplineTile& t) {
  if (t.column) {
    for (int64_t i = 0; i < kSplineTileRows; ++i) t.sum[i] = 0;
    for (int64_t o = 0; o < t.outer; ++o) {
      double* f = t.f + o * kSplineTileRows;
#pragma omp simd
      for (int64_t i = 0; i < kSplineTileRows; ++i) {
        const double p = bounded_exponential(spline_difference<in_order>(f[i] - t.score_top[i]));
        t.sum[i] += p;
        if constexpr (!keep) f[i] = p;
      }
    }
  } else {
    for (int64_t o = 0; o < t.outer; ++o) {
      double* f = t.f + o * t.inner;
      const double top = t.score_top[o];
      double sum = 0;
#pragma omp simd reduction(+ : sum)
      for (int64_t i = 0; i < t.inner; ++i) {
        const double p = bounded_exponential(spline_difference<in_order>(f[i] - top));
        sum += p;
        if constexpr (!keep) f[i] = p;
      }
      t.sum[o] = sum;
    }
  }
}

// Whether the scores have no terms of a class, and the pieces of the curve fit tables.
inline bool is_scalar(const SplineCurve& curve, const SplineScores& args) {
  return !args.weight && !args.bias && !args.extra && curve.knots < kSplineTables;
}

// Computes the scores of a tile from its exponentials, and the largest score of each row.
inline void scores_of_exponents(const SplineInput& input, const CurveTables& curve, const SplineScores& args,
                                int64_t row, double slack, const SplineTile& t) {
#ifdef FK_HAS_AVX512_CODE
  if (is_scalar(curve.curve, args) && has_avx512()) {
    const uint64_t kept = kept_bits_of(input);
    return slack > 0 ? scores_in_registers<true>(t, curve, args, kept, slack)
                     : scores_in_registers<false>(t, curve, args, kept, slack);
  }
#endif
  features_of_exponents(input, t);
  curve_of_tile<false>(t, curve);
  scores_of_tile(args, row, t);
  largest_of_rows(t, t.f, t.score_top);
}

// f <- f * scale + shift, with scale and shift of the row.
FK_VECTOR_CLONES inline void scale_and_shift(const SplineTile& t, const double* scale, const double* shift) {
  for (int64_t o = 0; o < t.outer; ++o) {
    double* f = t.f + o * t.inner;
    if (t.column) {
#pragma omp simd
      for (int64_t i = 0; i < kSplineTileRows; ++i) f[i] = f[i] * scale[i] + shift[i];
    } else {
      const double factor = scale[o], term = shift[o];
#pragma omp simd
      for (int64_t i = 0; i < t.inner; ++i) f[i] = f[i] * factor + term;
    }
  }
}

// The same, and writes the results; in the row layout both are one loop.
template <typename Scalar>
FK_VECTOR_CLONES void write_scaled(const SplineTile& t, const double* scale, const double* shift, Scalar* to) {
  for (int64_t r = 0; r < t.n_rows; ++r) {
    const double* f = t.f + r * t.inner;
    const double factor = scale[r], term = shift[r];
    Scalar* row = to + r * t.classes;
#pragma omp simd
    for (int64_t c = 0; c < t.classes; ++c) {
      row[c] = Store<Scalar>::from_compute(static_cast<compute_t<Scalar>>(f[c] * factor + term));
    }
  }
}
inline void write_scaled(const SplineTile& t, const double* scale, const double* shift, void* to, SplineStorage storage,
                         int64_t row) {
  if (t.column) {
    scale_and_shift(t, scale, shift);
    return write_tile(t, t.f, to, storage, row);
  }
  with_storage(storage, [&](auto scalar) {
    using Scalar = decltype(scalar);
    write_scaled<Scalar>(t, scale, shift, static_cast<Scalar*>(to) + row * t.classes);
  });
}

}  // namespace
}  // namespace focalkern::cpu
