// Tiles of rows for spline scaling on the CPU: a few rows in cache, and their features. Scores: cpu/spline_scores.h.
//
// Two layouts: `row` has the classes of a row side by side, padded to whole vectors with classes of probability 0;
// `column` has the rows side by side, for few classes. Element (r, c) is at r * row_stride + c * class_stride, and a
// loop over [outer] [inner] visits memory in order. All numbers are double for every input type.
#pragma once

#include <algorithm>
#include <limits>
#include <memory>

#include "cpu/simd/dispatch.h"
#include "cpu/spline.h"
#include "math/calibration_map.h"
#include "math/spline.h"

namespace focalkern::cpu {
namespace {

constexpr int64_t kSplineTileRows = 64;
constexpr int64_t kSplineLanes = 8;  // classes of the row layout are padded to whole groups of this many
constexpr int64_t kSplineTileElements = 2048;
constexpr int kSplineTables = 16;        // entries of a table of pieces that two registers hold
constexpr double kSplineSmall = 0x1p-6;  // up to this p a polynomial gives log(1 - p)
constexpr double kMinusInfinity = -std::numeric_limits<double>::infinity();

struct SplineTile {
  int64_t n_rows;   // of the input
  int64_t classes;  // of the input
  int64_t outer, inner, row_stride, class_stride;
  bool column;
  double* d;  // z, then (z - top) / T
  double* e;  // exp(d)
  double* x;
  double* u;      // u, then s, its offset on the piece
  double* f;      // f(u), then the scores, then their softmax
  double* slope;  // f'(u); backward only
  double* g;      // upstream gradient; backward only
  uint8_t* piece;
  double *top, *rest, *inverse, *score_top, *sum, *shared;  // one number per row
  SplineRow<double>* row;
  bool* valid;
};

class SplineScratch {
 public:
  SplineScratch(int64_t classes, int arrays) : classes_(classes), arrays_(arrays) {
    column_ = classes <= kSplineFewClasses;
    padded_ = column_ ? classes : (classes + kSplineLanes - 1) / kSplineLanes * kSplineLanes;
    rows_ = column_ ? kSplineTileRows : std::clamp<int64_t>(kSplineTileElements / padded_, 1, kSplineTileRows);
    size_ = (rows_ * padded_ + 63) / 64 * 64;
    buffer_.reset(new double[size_ * arrays + size_ / 8 + 6 * kSplineTileRows + 8]);
    first_ = reinterpret_cast<double*>((reinterpret_cast<uintptr_t>(buffer_.get()) + 63) / 64 * 64);
  }
  int64_t rows() const { return rows_; }

  SplineTile tile(int64_t n_rows) {
    SplineTile t{};
    t.n_rows = n_rows;
    t.classes = classes_;
    t.column = column_;
    t.outer = column_ ? classes_ : n_rows;
    t.inner = column_ ? kSplineTileRows : padded_;
    t.row_stride = column_ ? 1 : padded_;
    t.class_stride = column_ ? kSplineTileRows : 1;
    double** const parts[] = {&t.d, &t.e, &t.x, &t.u, &t.f, &t.slope, &t.g};
    for (int i = 0; i < arrays_; ++i) *parts[i] = first_ + i * size_;
    double* const rest = first_ + arrays_ * size_;
    t.piece = reinterpret_cast<uint8_t*>(rest);
    double** const of_row[] = {&t.top, &t.rest, &t.inverse, &t.score_top, &t.sum, &t.shared};
    for (int i = 0; i < 6; ++i) *of_row[i] = rest + size_ / 8 + i * kSplineTileRows;
    t.row = row_;
    t.valid = valid_;
    return t;
  }

 private:
  int64_t classes_, arrays_, padded_, rows_, size_;
  bool column_;
  std::unique_ptr<double[]> buffer_;
  double* first_;
  SplineRow<double> row_[kSplineTileRows] = {};
  bool valid_[kSplineTileRows] = {};
};

template <typename Function>
void with_storage(SplineStorage storage, Function f) {
  switch (storage) {
    case SplineStorage::kHalf:
      return f(Half{});
    case SplineStorage::kBFloat16:
      return f(BFloat16{});
    case SplineStorage::kFloat:
      return f(float{});
    default:
      return f(double{});
  }
}

// ---- reading and writing -------------------------------------------------------------------------------------------

template <typename Scalar>
FK_VECTOR_CLONES void read_tile(const SplineTile& t, const Scalar* from, double* to, double padding) {
  for (int64_t r = 0; r < t.n_rows; ++r) {
    const Scalar* source = from + r * t.classes;
    double* line = to + r * t.row_stride;
    if (t.column) {
      for (int64_t c = 0; c < t.classes; ++c) line[c * kSplineTileRows] = load_as_compute(source[c]);
    } else {
#pragma omp simd
      for (int64_t c = 0; c < t.classes; ++c) line[c] = load_as_compute(source[c]);
      for (int64_t c = t.classes; c < t.inner; ++c) line[c] = padding;
    }
  }
  if (t.column) {  // missing rows: any valid row serves
    for (int64_t c = 0; c < t.classes; ++c) {
      for (int64_t r = t.n_rows; r < kSplineTileRows; ++r) to[c * kSplineTileRows + r] = 0;
    }
  }
}

template <typename Scalar>
FK_VECTOR_CLONES void write_tile(const SplineTile& t, const double* from, Scalar* to) {
  for (int64_t r = 0; r < t.n_rows; ++r) {
    const double* line = from + r * t.row_stride;
    Scalar* row = to + r * t.classes;
    if (t.column) {
      for (int64_t c = 0; c < t.classes; ++c) {
        row[c] = Store<Scalar>::from_compute(static_cast<compute_t<Scalar>>(line[c * kSplineTileRows]));
      }
    } else {
#pragma omp simd
      for (int64_t c = 0; c < t.classes; ++c) {
        row[c] = Store<Scalar>::from_compute(static_cast<compute_t<Scalar>>(line[c]));
      }
    }
  }
}

inline void read_tile(const SplineTile& t, const void* from, SplineStorage storage, int64_t row, double* to,
                      double padding) {
  with_storage(storage, [&](auto scalar) {
    using Scalar = decltype(scalar);
    read_tile<Scalar>(t, static_cast<const Scalar*>(from) + row * t.classes, to, padding);
  });
}
inline void write_tile(const SplineTile& t, const double* from, void* to, SplineStorage storage, int64_t row) {
  with_storage(storage, [&](auto scalar) {
    using Scalar = decltype(scalar);
    write_tile<Scalar>(t, from, static_cast<Scalar*>(to) + row * t.classes);
  });
}

// For probabilities; padding and missing rows are 0.
FK_VECTOR_CLONES inline void logits_of_probabilities(double* z, int64_t n) {
#pragma omp simd
  for (int64_t i = 0; i < n; ++i) z[i] = logit_of_probability(z[i]);
}

inline void read_logits(const SplineInput& args, int64_t row, const SplineTile& t) {
  read_tile(t, args.input, args.storage, row, t.d, args.is_probs ? 0 : kMinusInfinity);
  if (!args.is_probs) return;
  logits_of_probabilities(t.d, t.outer * t.inner);
  for (int64_t r = t.n_rows; t.column && r < kSplineTileRows; ++r) {
    for (int64_t c = 0; c < t.classes; ++c) t.d[c * kSplineTileRows + r] = 0;
  }
}

// ---- features ------------------------------------------------------------------------------------------------------

FK_VECTOR_CLONES inline void largest_of_rows(const SplineTile& t, const double* from, double* to) {
  if (t.column) {
    for (int64_t i = 0; i < kSplineTileRows; ++i) to[i] = kMinusInfinity;
    for (int64_t o = 0; o < t.outer; ++o) {
      const double* line = from + o * kSplineTileRows;
#pragma omp simd
      for (int64_t i = 0; i < kSplineTileRows; ++i) to[i] = line[i] > to[i] ? line[i] : to[i];
    }
  } else {
    for (int64_t o = 0; o < t.outer; ++o) {
      const double* line = from + o * t.inner;
      double top = kMinusInfinity;
#pragma omp simd reduction(max : top)
      for (int64_t i = 0; i < t.inner; ++i) top = line[i] > top ? line[i] : top;
      to[o] = top;
    }
  }
}

// log(1 - p) / p for p of at most kSplineSmall, as a polynomial.
constexpr double kLogComplement[] = {-1.0 / 8, -1.0 / 7, -1.0 / 6, -1.0 / 5, -1.0 / 4, -1.0 / 3, -1.0 / 2, -1.0};

#ifdef FK_HAS_AVX512_CODE
FK_AVX512 inline __m512d look_up(const double* table, __m512i index) {
  return _mm512_permutex2var_pd(_mm512_load_pd(table), index, _mm512_load_pd(table + 8));
}

alignas(64) constexpr double kInverseMantissa[16] = {
    0.9696969696969697, 0.9142857142857143, 0.8648648648648649, 0.8205128205128205, 0.7804878048780488,
    0.7441860465116279, 0.7111111111111111, 0.6808510638297872, 0.6530612244897959, 0.6274509803921569,
    0.6037735849056604, 0.5818181818181818, 0.5614035087719298, 0.5423728813559322, 0.5245901639344263,
    0.5079365079365079};  // at the middle of the 16ths from 1 to 2
alignas(64) constexpr double kLogMantissa[16] = {
    0.03077165866675366, 0.08961215868968717, 0.14518200984449783, 0.19782574332991992,
    0.2478361639045812,  0.2954642128938359,  0.3409265869705932,  0.38441169891033206,
    0.42608439531090014, 0.46608972992459924, 0.5045560107523953,  0.5415972824327444,
    0.5773153650348236,  0.6118015411059929,  0.6451379613735847,  0.6773988235918061};  // minus their logarithms

// log x of a normal number, with an error of a unit in the last place or 2^-53, without a division: x = 2^n m with 1 <=
// m < 2, and log m = log(1 + r) - log i, where i is the table's inverse of m and |r| < 1/32.
FK_AVX512 inline __m512d logarithms(__m512d x) {
  const __m512i place = _mm512_srli_epi64(_mm512_castpd_si512(x), 48);  // its last four bits are the first bits of m
  const __m512d mantissa = _mm512_getmant_pd(x, _MM_MANT_NORM_1_2, _MM_MANT_SIGN_src);
  const __m512d r = _mm512_fmsub_pd(mantissa, look_up(kInverseMantissa, place), _mm512_set1_pd(1));
  __m512d tail = _mm512_set1_pd(-1.0 / 10);
  for (const double term : {1.0 / 9, -1.0 / 8, 1.0 / 7, -1.0 / 6, 1.0 / 5, -1.0 / 4, 1.0 / 3, -1.0 / 2}) {
    tail = _mm512_fmadd_pd(tail, r, _mm512_set1_pd(term));
  }
  const __m512d whole =
      _mm512_fmadd_pd(_mm512_getexp_pd(x), _mm512_set1_pd(0.693147180559945309417), look_up(kLogMantissa, place));
  return _mm512_add_pd(whole, _mm512_fmadd_pd(_mm512_mul_pd(r, r), tail, r));
}

// log(1 - p) for p of at most kSplineSmall.
FK_AVX512 inline __m512d log_complements_of_small(__m512d p) {
  __m512d tail = _mm512_set1_pd(kLogComplement[0]);
  for (int i = 1; i < 8; ++i) tail = _mm512_fmadd_pd(tail, p, _mm512_set1_pd(kLogComplement[i]));
  return _mm512_mul_pd(tail, p);
}

// The numbers of eight rows, or those of one row in all lanes.
struct SplineRows {
  __m512d scale, floor, log_complement;
};
FK_AVX512 inline SplineRows rows_at(const SplineTile& t, int64_t first) {
  const auto gather = [](const double* from) FK_AVX512 {
    constexpr int64_t kStride = sizeof(SplineRow<double>);
    return _mm512_i64gather_pd(
        _mm512_set_epi64(7 * kStride, 6 * kStride, 5 * kStride, 4 * kStride, 3 * kStride, 2 * kStride, kStride, 0),
        from, 1);
  };
  return {gather(&t.row[first].scale), gather(&t.row[first].floor), gather(&t.row[first].log_complement)};
}
FK_AVX512 inline SplineRows row_at(const SplineTile& t, int64_t row) {
  return {_mm512_set1_pd(t.row[row].scale), _mm512_set1_pd(t.row[row].floor),
          _mm512_set1_pd(t.row[row].log_complement)};
}

// spline_features for vectors of probabilities.
struct WideFeatures {
  __m512d x, u;
};
FK_AVX512 inline WideFeatures features_of(__m512d p, const SplineRows& row) {
  const __m512d x = logarithms(p);
  __m512d log_complement = log_complements_of_small(p);
  // Selected lane by lane: the result of a class must not depend on its neighbours, so that ties stay ties.
  if (const __mmask8 above = _mm512_cmp_pd_mask(p, _mm512_set1_pd(kSplineSmall), _CMP_GT_OQ)) {
    const __mmask8 large = _mm512_cmp_pd_mask(p, _mm512_set1_pd(kSplineLarge<double>), _CMP_GT_OQ);
    log_complement = _mm512_mask_mov_pd(log_complement, above, logarithms(_mm512_sub_pd(_mm512_set1_pd(1), p)));
    log_complement = _mm512_mask_mov_pd(log_complement, large, row.log_complement);
  }
  return {x, _mm512_sub_pd(x, log_complement)};
}

FK_AVX512 inline void log_odds_in_registers(const SplineTile& t, uint64_t kept_bits) {
  const __m512d kept = _mm512_castsi512_pd(_mm512_set1_epi64(static_cast<int64_t>(kept_bits)));
  const auto store = [&](int64_t i, const SplineRows& row) FK_AVX512 {
    const __m512d p = _mm512_fmadd_pd(_mm512_load_pd(t.e + i), row.scale, row.floor);
    const WideFeatures found = features_of(_mm512_and_pd(p, kept), row);
    _mm512_store_pd(t.x + i, found.x);
    _mm512_store_pd(t.u + i, found.u);
  };
  if (t.column) {
    for (int64_t r = 0; r < kSplineTileRows; r += 8) {
      const SplineRows rows = rows_at(t, r);
      for (int64_t c = 0; c < t.classes; ++c) store(c * kSplineTileRows + r, rows);
    }
    return;
  }
  for (int64_t r = 0; r < t.n_rows; ++r) {
    const SplineRows row = row_at(t, r);
    for (int64_t i = 0; i < t.inner; i += 8) store(r * t.inner + i, row);
  }
}
#endif

// Computes d, e, and the sum of e over all classes but the largest. The sum is NaN if a class is NaN or +inf, or if all
// are -inf.
FK_VECTOR_CLONES inline void exponentials(const SplineTile& t, double beta, double grid) {
  if (t.column) {
    double ties[kSplineTileRows];
    for (int64_t i = 0; i < kSplineTileRows; ++i) t.rest[i] = 0, ties[i] = -1;
    for (int64_t o = 0; o < t.outer; ++o) {
      double* d = t.d + o * kSplineTileRows;
      double* e = t.e + o * kSplineTileRows;
#pragma omp simd
      for (int64_t i = 0; i < kSplineTileRows; ++i) {
        d[i] = spline_exponent(d[i], t.top[i], beta, grid);
        e[i] = bounded_exponential(d[i]);
        t.rest[i] += d[i] >= 0 ? 0 : e[i];
        ties[i] += d[i] >= 0 ? 1 : 0;
      }
    }
    for (int64_t i = 0; i < kSplineTileRows; ++i) t.rest[i] += ties[i];
  } else {
    for (int64_t o = 0; o < t.outer; ++o) {
      double* d = t.d + o * t.inner;
      double* e = t.e + o * t.inner;
      const double top = t.top[o];
      double rest = 0, ties = -1;
#pragma omp simd reduction(+ : rest, ties)
      for (int64_t i = 0; i < t.inner; ++i) {
        d[i] = spline_exponent(d[i], top, beta, grid);
        e[i] = bounded_exponential(d[i]);
        rest += d[i] >= 0 ? 0 : e[i];
        ties += d[i] >= 0 ? 1 : 0;
      }
      t.rest[o] = rest + ties;
    }
  }
}

FK_VECTOR_CLONES inline void log_odds(const SplineTile& t, uint64_t kept_bits) {
  for (int64_t o = 0; o < t.outer; ++o) {
    const double* e = t.e + o * t.inner;
    double* x = t.x + o * t.inner;
    double* u = t.u + o * t.inner;
    if (t.column) {
#pragma omp simd
      for (int64_t i = 0; i < kSplineTileRows; ++i) {
        const auto found = spline_features(spline_probability(e[i], t.row[i], kept_bits), t.row[i]);
        x[i] = found.x;
        u[i] = found.u;
      }
    } else {
      const SplineRow<double> row = t.row[o];
#pragma omp simd
      for (int64_t i = 0; i < t.inner; ++i) {
        const auto found = spline_features(spline_probability(e[i], row, kept_bits), row);
        x[i] = found.x;
        u[i] = found.u;
      }
    }
  }
}

inline uint64_t kept_bits_of(const SplineInput& args) { return ~uint64_t{0} << (args.in_steps ? 22 : 0); }

// Computes d, e and the numbers that the classes of a row share, for the rows whose logits are in d. `grid` as in
// spline_exponent.
inline void exponents_of_logits(const SplineInput& args, const SplineTile& t, double grid) {
  exponentials(t, inverse_temperature<double>(args.temperature), grid);
  const int64_t rows = t.column ? kSplineTileRows : t.n_rows;
  for (int64_t r = 0; r < rows; ++r) {
    t.inverse[r] = 1 / (1 + t.rest[r]);
    t.row[r] = spline_row(t.rest[r], args.floor, static_cast<double>(args.classes));
  }
}

// Computes the features x and u of the tile from its exponentials.
inline void features_of_exponents(const SplineInput& args, const SplineTile& t) {
#ifdef FK_HAS_AVX512_CODE
  if (has_avx512()) return log_odds_in_registers(t, kept_bits_of(args));
#endif
  log_odds(t, kept_bits_of(args));
}

// Reads or computes x and u. Only computed features come with d, e and the numbers that the classes of a row share.
inline void features_of_rows(const SplineInput& args, int64_t row, const SplineTile& t) {
  if (args.storage == SplineStorage::kFeatures) {
    const double* x = static_cast<const double*>(args.input) + row * args.classes;
    read_tile<double>(t, x, t.x, /*padding=*/0);
    read_tile<double>(t, x + args.rows * args.classes, t.u, /*padding=*/0);
    return;
  }
  read_logits(args, row, t);
  largest_of_rows(t, t.d, t.top);
  exponents_of_logits(args, t, /*grid=*/0);
  features_of_exponents(args, t);
}

}  // namespace
}  // namespace focalkern::cpu
