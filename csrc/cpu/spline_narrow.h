// Scalar spline map of results of at most 24 bits, with AVX-512: two passes over the classes of a row instead of four.
//
//   1. E = exp((z - top) / T) and its sum
//   2. P, x, u, f(u), the score and exp(score), and its sum; log p needs a third pass, for the largest score
//
// The functions are those of math/spline.h with errors of up to 3e-9, a twentieth of half a unit in the last place of
// float32. All numbers are double, so that the order of the classes is kept as in the other code: each approximation is
// continuous, and its relative slope is right to 1e-6. A step of the grid then raises the score by at least 4e-13,
// which outweighs the rounding errors.
#pragma once

#include "cpu/simd/transpose.h"
#include "cpu/spline_scores.h"

#ifdef FK_HAS_AVX512_CODE

namespace focalkern::cpu {
namespace {

constexpr double kNarrowLn2 = 0.693147180559945309417, kNarrowLog2e = 1.44269504088896340736;
constexpr double kNarrowLargest = 600;    // of a score: its exponential needs no largest score
constexpr double kNarrowSteepest = 8;     // of a score in x: the result then has an error of 2.5e-8
constexpr double kNarrowFloor = 0x1p-24;  // smallest e: the sum without the largest class then keeps its digits
constexpr double kNarrowLowest = -1000;   // lower binary logarithms count as this

// A curve in tables. In their index the low three bits of a piece's number are reversed: bisection then needs one
// permutation per step, of the first half of the tables if all u are below the knot in the middle.
struct NarrowCurve {
  explicit NarrowCurve(const SplineCurve& curve) {
    const auto knot_at = [&](int64_t k) { return k < curve.knots ? curve.positions[k] : -kMinusInfinity; };
    for (int64_t code = 0; code < kSplineTables; ++code) {
      const int64_t half = code & 8, quarter = half + 4 * (code & 1), eighth = quarter + (code & 2);
      const int64_t piece = std::min(eighth + (code >> 2 & 1), curve.knots);
      in_half[code] = knot_at(half + 3);
      in_quarter[code] = knot_at(quarter + 1);
      in_eighth[code] = knot_at(eighth);
      origin[code] = curve.positions[std::max<int64_t>(piece - 1, 0)];
      for (int k = 0; k < 4; ++k) power[k][code] = curve.coefficients[piece * 4 + k] * kNarrowLog2e;
    }
    middle = knot_at(7);
  }
  alignas(64) double in_half[kSplineTables], in_quarter[kSplineTables], in_eighth[kSplineTables];
  alignas(64) double origin[kSplineTables], power[4][kSplineTables];
  double middle;
};

alignas(64) constexpr double kNarrowInverse[8] = {
    0.9411764705882353, 0.8421052631578947, 0.7619047619047619, 0.6956521739130435, 0.64,
    0.5925925925925926, 0.5517241379310345, 0.5161290322580645};
alignas(64) constexpr double kNarrowLog[8] = {0.06062462155414807, 0.17185025716694705, 0.2719337157310255,
                                              0.3629054938211174,  0.44628710263572074, 0.5232481436698231,
                                              0.594707107577045,   0.6613984820246952};

// The polynomial with these coefficients, the highest first.
template <size_t n>
FK_AVX512 inline __m512d polynomial(__m512d x, const double (&terms)[n]) {
  __m512d value = _mm512_set1_pd(terms[0]);
  for (size_t i = 1; i < n; ++i) value = _mm512_fmadd_pd(value, x, _mm512_set1_pd(terms[i]));
  return value;
}

// 2^x, with an error of 2.6e-9, continuous where the integer part changes.
FK_AVX512 inline __m512d narrow_powers_of_two(__m512d x) {
  const __m512d whole = _mm512_roundscale_pd(x, 0);
  constexpr double kTerms[] = {0.00015376692782553098,
                               0.0013403072036946493,
                               0.009618374760873242,
                               0.05550321098221978,
                               0.24022648276742742,
                               0.6931472092026533,
                               1.0};
  return _mm512_scalef_pd(polynomial(_mm512_sub_pd(x, whole), kTerms), whole);
}

// log x of a normal number, with an error of 5.3e-10, continuous where its piece changes; 0 for 1.
FK_AVX512 inline __m512d narrow_logarithms(__m512d x) {
  const __m512i place = _mm512_srli_epi64(_mm512_castpd_si512(x), 49);  // its last three bits choose a table's entry
  const __m512d mantissa = _mm512_getmant_pd(x, _MM_MANT_NORM_1_2, _MM_MANT_SIGN_src);
  const __m512d inverse = _mm512_permutexvar_pd(place, _mm512_load_pd(kNarrowInverse));
  const __m512d r = _mm512_fmsub_pd(mantissa, inverse, _mm512_set1_pd(1));
  const __m512d whole = _mm512_fmadd_pd(_mm512_getexp_pd(x), _mm512_set1_pd(kNarrowLn2),
                                        _mm512_permutexvar_pd(place, _mm512_load_pd(kNarrowLog)));
  constexpr double kTerms[] = {0.20086805491503334, -0.2508097458385684, 0.3333318297933007, -0.49999912358602294,
                               1.0000000007098266};
  return _mm512_fmadd_pd(polynomial(r, kTerms), r, whole);
}

// u = x - log(1 - p). Selected lane by lane, so that ties stay ties.
FK_AVX512 inline __m512d narrow_log_odds(__m512d p, __m512d x, const SplineRows& row) {
  constexpr double kTerms[] = {0.33971349436581727, 0.49995990208080004, 1.0000000370896};
  __m512d u = _mm512_fmadd_pd(polynomial(p, kTerms), p, x);  // for p up to kSplineSmall, where both branches agree
  if (const __mmask8 above = _mm512_cmp_pd_mask(p, _mm512_set1_pd(kSplineSmall), _CMP_GT_OQ)) {
    const __mmask8 large = _mm512_cmp_pd_mask(p, _mm512_set1_pd(kSplineLarge<double>), _CMP_GT_OQ);
    const __m512d log_complement =
        _mm512_mask_mov_pd(narrow_logarithms(_mm512_sub_pd(_mm512_set1_pd(1), p)), large, row.log_complement);
    u = _mm512_mask_sub_pd(u, above, x, log_complement);
  }
  return u;
}

template <bool whole>
FK_AVX512 inline __m512d narrow_entry(const double* table, __m512i code) {
  if constexpr (whole) return look_up(table, code);
  return _mm512_permutexvar_pd(code, _mm512_load_pd(table));
}
template <bool whole>
FK_AVX512 inline __m512d narrow_value(__m512d u, __mmask8 upper, const NarrowCurve& curve) {
  const auto above = [&](__m512d knots) FK_AVX512 { return _mm512_cmp_pd_mask(u, knots, _CMP_GT_OQ); };
  __m512i code = whole ? _mm512_maskz_set1_epi64(upper, 8) : _mm512_setzero_si512();
  const auto next = [&](const double* knots, int64_t bit) FK_AVX512 {
    code = _mm512_mask_add_epi64(code, above(narrow_entry<whole>(knots, code)), code, _mm512_set1_epi64(bit));
  };
  if constexpr (whole) {
    next(curve.in_half, 1);
  } else {
    code = _mm512_maskz_set1_epi64(above(_mm512_set1_pd(curve.in_half[0])), 1);
  }
  next(curve.in_quarter, 2);
  next(curve.in_eighth, 4);
  const __m512d s = _mm512_sub_pd(u, narrow_entry<whole>(curve.origin, code));
  __m512d value = narrow_entry<whole>(curve.power[3], code);
  for (int k = 2; k >= 0; --k) value = _mm512_fmadd_pd(value, s, narrow_entry<whole>(curve.power[k], code));
  return value;
}
// f(u). With many classes, nearly all lie in the first half of the tables; both ways have the same bits.
FK_AVX512 inline __m512d narrow_curve(__m512d u, const NarrowCurve& curve) {
  const __mmask8 upper = _mm512_cmp_pd_mask(u, _mm512_set1_pd(curve.middle), _CMP_GT_OQ);
  return upper ? narrow_value<true>(u, upper, curve) : narrow_value<false>(u, upper, curve);
}

// Logits in memory: those of a tile, or floats of the input, which the row layout reads where they are.
FK_AVX512 inline __m512d narrow_logits(const double* z) { return _mm512_load_pd(z); }
FK_AVX512 inline __m512d narrow_logits(const float* z) { return _mm512_cvtps_pd(_mm256_loadu_ps(z)); }
FK_AVX512 inline __mmask8 possible_classes(const double* z) {
  return _mm512_cmp_pd_mask(_mm512_load_pd(z), _mm512_set1_pd(kMinusInfinity), _CMP_NEQ_UQ);
}
FK_AVX512 inline __mmask8 possible_classes(const float* z) {
  return _mm256_cmp_ps_mask(_mm256_loadu_ps(z), _mm256_set1_ps(static_cast<float>(kMinusInfinity)), _CMP_NEQ_UQ);
}
// The last classes of a row, and -inf in the other lanes.
FK_AVX512 inline __m512d narrow_logits(const float* z, __mmask8 there) {
  const __m256 nothing = _mm256_set1_ps(static_cast<float>(kMinusInfinity));
  return _mm512_cvtps_pd(_mm256_mask_loadu_ps(nothing, there, z));
}

// The largest float of each row; a NaN does not count. In the column layout, z is [classes, kSplineTileRows].
FK_AVX512 inline void narrow_tops(const SplineTile& t, const float* z) {
  const __m512 nothing = _mm512_set1_ps(static_cast<float>(kMinusInfinity));
  if (t.column) {
    for (int64_t r = 0; r < kSplineTileRows; r += 16) {
      __m512 top = nothing;
      for (int64_t i = r; i < t.outer * kSplineTileRows; i += kSplineTileRows) {
        top = _mm512_max_ps(_mm512_loadu_ps(z + i), top);
      }
      _mm512_storeu_pd(t.top + r, _mm512_cvtps_pd(_mm512_castps512_ps256(top)));
      _mm512_storeu_pd(t.top + r + 8, _mm512_cvtps_pd(_mm512_extractf32x8_ps(top, 1)));
    }
    return;
  }
  for (int64_t r = 0; r < t.n_rows; ++r, z += t.classes) {
    __m512 top = nothing;
    const int64_t whole = t.classes / 16 * 16;
#pragma GCC unroll 4
    for (int64_t c = 0; c < whole; c += 16) top = _mm512_max_ps(_mm512_loadu_ps(z + c), top);
    const auto there = static_cast<__mmask16>((1 << (t.classes - whole)) - 1);
    t.top[r] = _mm512_reduce_max_ps(_mm512_max_ps(_mm512_mask_loadu_ps(nothing, there, z + whole), top));
  }
}

// Writes E to t.e, and the sum of all but the largest to t.rest: NaN for a row without a result.
struct NarrowExponent {
  __m512d beta, steps;
  FK_AVX512 inline __m512d operator()(__m512d z, __m512d top) const {
    const __m512d d = _mm512_sub_pd(_mm512_fmadd_pd(_mm512_sub_pd(z, top), beta, steps), steps);
    return narrow_powers_of_two(_mm512_max_pd(_mm512_set1_pd(kNarrowLowest), d));  // NaN stays NaN
  }
};
template <typename Logit>
FK_AVX512 inline void narrow_exponents(const SplineTile& t, const Logit* z, double temperature, double grid) {
  const double beta = std::min(inverse_temperature<double>(temperature) * kNarrowLog2e, largest_finite<double>());
  const NarrowExponent exponential{_mm512_set1_pd(beta), _mm512_set1_pd(grid)};
  if (t.column) {
    for (int64_t r = 0; r < kSplineTileRows; r += 8) {
      const __m512d top = _mm512_loadu_pd(t.top + r);
      __m512d sum = _mm512_set1_pd(-1);
      for (int64_t i = r; i < t.outer * kSplineTileRows; i += kSplineTileRows) {
        const __m512d e = exponential(narrow_logits(z + i), top);
        _mm512_store_pd(t.e + i, e);
        sum = _mm512_add_pd(sum, e);
      }
      _mm512_storeu_pd(t.rest + r, sum);
    }
    return;
  }
  const int64_t whole = t.classes / 8 * 8, stride = sizeof(Logit) == sizeof(float) ? t.classes : t.inner;
  const auto there = static_cast<__mmask8>((1 << (t.classes - whole)) - 1);
  for (int64_t r = 0; r < t.n_rows; ++r, z += stride) {
    const __m512d top = _mm512_set1_pd(t.top[r]);
    double* const to = t.e + r * t.inner;
    __m512d sum = _mm512_setzero_pd();
#pragma GCC unroll 2
    for (int64_t c = 0; c < whole; c += 8) {
      const __m512d e = exponential(narrow_logits(z + c), top);
      _mm512_store_pd(to + c, e);
      sum = _mm512_add_pd(sum, e);
    }
    if (there) {
      __m512d last;
      if constexpr (sizeof(Logit) == sizeof(float)) {
        last = narrow_logits(z + whole, there);
      } else {
        last = narrow_logits(z + whole);  // with its padding of -inf
      }
      const __m512d e = exponential(last, top);
      _mm512_store_pd(to + whole, e);
      sum = _mm512_add_pd(sum, e);
    }
    t.rest[r] = _mm512_reduce_add_pd(sum) - 1;
  }
}

// Computes scale and log_complement of spline_row, and writes them to t.inverse and t.shared.
FK_AVX512 inline void narrow_rows(const SplineTile& t, double e) {
  const auto classes = static_cast<double>(t.classes);
  const __m512d kept = _mm512_set1_pd(1 - e), others = _mm512_set1_pd(e / classes * (classes - 1));
  for (int64_t r = 0; r < kSplineTileRows && (t.column || r < t.n_rows); r += 8) {
    const __m512d rest = _mm512_loadu_pd(t.rest + r);
    const __m512d scale = _mm512_div_pd(kept, _mm512_add_pd(_mm512_set1_pd(1), rest));
    _mm512_storeu_pd(t.inverse + r, scale);
    _mm512_storeu_pd(t.shared + r, narrow_logarithms(_mm512_fmadd_pd(scale, rest, others)));
  }
}

// The exponential of a score, or with `log` the score, both as powers of two; an impossible class has 0, or -inf.
template <bool log, bool keep_zeros, typename Logit>
struct NarrowScores {
  const NarrowCurve& curve;
  __m512d factor, kept;

  FK_AVX512 inline __m512d operator()(const Logit* z, const double* e, const SplineRows& row) const {
    const __m512d result = result_of(e, row);
    if constexpr (keep_zeros) return masked(result, possible_classes(z));
    return result;
  }
  // The last classes of a row.
  FK_AVX512 inline __m512d operator()(const Logit* z, const double* e, const SplineRows& row, __mmask8 there) const {
    if constexpr (keep_zeros && sizeof(Logit) == sizeof(float)) {
      there &= _mm512_cmp_pd_mask(narrow_logits(z, there), _mm512_set1_pd(kMinusInfinity), _CMP_NEQ_UQ);
    } else if constexpr (keep_zeros) {
      there &= possible_classes(z);
    }
    return masked(result_of(e, row), there);
  }
  static constexpr double kNothing = log ? kMinusInfinity : 0;
  FK_AVX512 static inline __m512d joined(__m512d a, __m512d b) {
    return log ? _mm512_max_pd(a, b) : _mm512_add_pd(a, b);
  }

 private:
  FK_AVX512 inline __m512d result_of(const double* e, const SplineRows& row) const {
    const __m512d p = _mm512_and_pd(_mm512_fmadd_pd(_mm512_load_pd(e), row.scale, row.floor), kept);
    const __m512d x = narrow_logarithms(p);
    const __m512d score = _mm512_fmadd_pd(factor, x, narrow_curve(narrow_log_odds(p, x, row), curve));
    return log ? score : narrow_powers_of_two(score);
  }
  FK_AVX512 static inline __m512d masked(__m512d result, __mmask8 there) {
    return _mm512_mask_mov_pd(_mm512_set1_pd(kNothing), there, result);
  }
};
// Writes them to t.f, and to `of_rows` the sum of a row's exponentials, or its largest score.
template <bool log, bool keep_zeros, typename Logit>
FK_AVX512 inline void narrow_scores(const SplineTile& t, const Logit* z, const NarrowCurve& curve,
                                    const SplineMapForward& args, double* of_rows) {
  using Scores = NarrowScores<log, keep_zeros, Logit>;
  const int64_t kept = ~int64_t{0} << (args.keep_order ? 22 : 0);  // as kept_bits_of
  const Scores scores{curve, _mm512_set1_pd(args.scores.factor * kNarrowLog2e),
                      _mm512_castsi512_pd(_mm512_set1_epi64(kept))};
  const __m512d floor = _mm512_set1_pd(args.rows.floor / static_cast<double>(t.classes));
  if (t.column) {
    for (int64_t r = 0; r < kSplineTileRows; r += 8) {
      const SplineRows rows{_mm512_loadu_pd(t.inverse + r), floor, _mm512_loadu_pd(t.shared + r)};
      __m512d all = _mm512_set1_pd(Scores::kNothing);
      for (int64_t i = r; i < t.outer * kSplineTileRows; i += kSplineTileRows) {
        const __m512d found = scores(z + i, t.e + i, rows);
        _mm512_store_pd(t.f + i, found);
        all = Scores::joined(all, found);
      }
      _mm512_storeu_pd(of_rows + r, all);
    }
    return;
  }
  const int64_t whole = t.classes / 8 * 8, stride = sizeof(Logit) == sizeof(float) ? t.classes : t.inner;
  const auto there = static_cast<__mmask8>((1 << (t.classes - whole)) - 1);
  for (int64_t r = 0; r < t.n_rows; ++r, z += stride) {
    const SplineRows row{_mm512_set1_pd(t.inverse[r]), floor, _mm512_set1_pd(t.shared[r])};
    const double* const e = t.e + r * t.inner;
    double* const to = t.f + r * t.inner;
    __m512d all = _mm512_set1_pd(Scores::kNothing);
#pragma GCC unroll 2
    for (int64_t c = 0; c < whole; c += 8) {
      const __m512d found = scores(z + c, e + c, row);
      _mm512_store_pd(to + c, found);
      all = Scores::joined(all, found);
    }
    if (there) {
      const __m512d found = scores(z + whole, e + whole, row, there);
      _mm512_store_pd(to + whole, found);
      all = Scores::joined(all, found);
    }
    of_rows[r] = log ? _mm512_reduce_max_pd(all) : _mm512_reduce_add_pd(all);
  }
}

// Subtracts the largest score of its row from each score, and sums the exponentials. That of the largest score is 1, so
// no probability has a logarithm above 0.
FK_AVX512 inline void narrow_sums(const SplineTile& t) {
  const auto power_of = [&](double* score, __m512d top) FK_AVX512 {
    const __m512d difference = _mm512_sub_pd(_mm512_load_pd(score), top);
    _mm512_store_pd(score, difference);
    return narrow_powers_of_two(_mm512_max_pd(_mm512_set1_pd(kNarrowLowest), difference));
  };
  if (t.column) {
    for (int64_t r = 0; r < kSplineTileRows; r += 8) {
      const __m512d top = _mm512_loadu_pd(t.score_top + r);
      __m512d sum = _mm512_setzero_pd();
      for (int64_t i = r; i < t.outer * kSplineTileRows; i += kSplineTileRows) {
        sum = _mm512_add_pd(sum, power_of(t.f + i, top));
      }
      _mm512_storeu_pd(t.sum + r, sum);
    }
    return;
  }
  for (int64_t r = 0; r < t.n_rows; ++r) {
    const __m512d top = _mm512_set1_pd(t.score_top[r]);
    __m512d sum = _mm512_setzero_pd();
    for (int64_t c = 0; c < t.inner; c += 8) sum = _mm512_add_pd(sum, power_of(t.f + r * t.inner + c, top));
    t.sum[r] = _mm512_reduce_add_pd(sum);
  }
}

// Writes t.f * scale (+ shift, with `log`) to rows of floats. The column layout uses t.d.
template <bool log>
FK_AVX512 inline void narrow_results(const SplineTile& t, const double* scale, const double* shift, float* to) {
  if (t.column) {
    float* const columns = reinterpret_cast<float*>(t.d);
    for (int64_t r = 0; r < kSplineTileRows; r += 8) {
      const __m512d factor = _mm512_loadu_pd(scale + r), term = _mm512_loadu_pd(shift + r);
      for (int64_t i = r; i < t.outer * kSplineTileRows; i += kSplineTileRows) {
        const __m512d value = _mm512_load_pd(t.f + i);
        const __m512d result = log ? _mm512_fmadd_pd(value, factor, term) : _mm512_mul_pd(value, factor);
        _mm256_storeu_ps(columns + i, _mm512_cvtpd_ps(result));
      }
    }
    return to_rows<kSplineTileRows>(columns, t.n_rows, t.classes, to, t.classes);
  }
  const int64_t whole = t.classes / 8 * 8;
  const auto there = static_cast<__mmask8>((1 << (t.classes - whole)) - 1);
  for (int64_t r = 0; r < t.n_rows; ++r, to += t.classes) {
    const double* const f = t.f + r * t.inner;
    const __m512d factor = _mm512_set1_pd(scale[r]), term = _mm512_set1_pd(shift[r]);
    const auto result_at = [&](int64_t c) FK_AVX512 {
      const __m512d value = _mm512_load_pd(f + c);
      return _mm512_cvtpd_ps(log ? _mm512_fmadd_pd(value, factor, term) : _mm512_mul_pd(value, factor));
    };
#pragma GCC unroll 2
    for (int64_t c = 0; c < whole; c += 8) _mm256_storeu_ps(to + c, result_at(c));
    if (there) _mm256_mask_storeu_ps(to + whole, there, result_at(whole));
  }
}

// Writes the exponentials of the scores, or the differences of the scores from the largest of their row, as binary
// logarithms, to t.f, and the sums of the exponentials to t.sum.
template <typename Logit>
void narrow_softmax(const SplineTile& t, const Logit* z, const NarrowCurve& curve, const SplineMapForward& args) {
  const bool keep_zeros = args.scores.keep_zeros;
  if (args.log_output) {
    keep_zeros ? narrow_scores<true, true>(t, z, curve, args, t.score_top)
               : narrow_scores<true, false>(t, z, curve, args, t.score_top);
    narrow_sums(t);
  } else {
    keep_zeros ? narrow_scores<false, true>(t, z, curve, args, t.sum)
               : narrow_scores<false, false>(t, z, curve, args, t.sum);
  }
}

}  // namespace
}  // namespace focalkern::cpu
#endif
