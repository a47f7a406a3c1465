// The focal calibration map, forward and backward, on the CPU.
//
//   forward   input [rows, classes], gamma, temperature -> output [rows, classes]: p or log p
//   backward  input, grad_output -> grad_input [rows, classes], grad_gamma [rows], grad_temperature [rows]
//   and the binary map, elementwise on one logit each
//
// Memory: each direction reads its inputs once and writes its outputs once; nothing is kept between the two. A tile of
// rows is converted into scratch memory that stays in cache, and the passes over it are
//   1. the largest class and the second largest   2. exp and its sum over all but the largest
//   3. log(p_k / p_t) and sums                    4. normalise and write
// The numbers that a row has only one of are worked out between the passes, for all rows of the tile at once.
//
// Two layouts of the tile, chosen by the number of classes: `row` has the classes of a row side by side, padded with
// classes of probability zero to whole vectors; `column` has the rows side by side, for few classes.

#include <algorithm>
#include <cstring>
#include <memory>

#include "cpu/simd/dispatch.h"
#include "kernels/calibration_map.h"
#include "math/calibration_map.h"

namespace focalkern::cpu {
namespace {

constexpr int64_t kMaxTileRows = 64;
constexpr int64_t kLanes = 16;             // rows of scratch memory are padded to whole groups of this many
constexpr int64_t kFewClasses = 32;        // up to here vectors run across rows
constexpr int64_t kTileElements = 8192;    // of one scratch array, so that all of them stay in the second-level cache
constexpr int64_t kSumBlock = 256;         // terms that are added in Real before the sum goes on in double
constexpr int64_t kChunkElements = 32768;  // inputs per unit of parallel work

int64_t round_up(int64_t n) { return (n + kLanes - 1) / kLanes * kLanes; }

// The numbers of each row of a tile, as arrays over rows.
template <typename Real>
struct TileRows {
  double gamma[kMaxTileRows];
  Real beta[kMaxTileRows];    // 1 / T
  Real top_x[kMaxTileRows];   // largest input, as a logit
  Real next_x[kMaxTileRows];  // largest of the others
  Real rest[kMaxTileRows];    // S
  Real gap[kMaxTileRows];     // M
  bool valid[kMaxTileRows];
  int64_t top[kMaxTileRows];  // class of the largest input

  // MapRow, field by field
  Real gamma_real[kMaxTileRows], q_scale[kMaxTileRows], log_q_offset[kMaxTileRows], ratio_offset[kMaxTileRows];
  Real power_offset[kMaxTileRows], ratio_scale[kMaxTileRows], tie[kMaxTileRows];
  Real q_top[kMaxTileRows], u_top[kMaxTileRows], inverse_rest[kMaxTileRows], scaled_slope_top[kMaxTileRows];
  Real grad_gamma_top[kMaxTileRows];

  Real ratio_sum[kMaxTileRows];  // P
  Real log_norm[kMaxTileRows];   // -log p_t
  Real p_top[kMaxTileRows];

  // Backward
  Real grad_top[kMaxTileRows];  // upstream gradient of the largest class
  Real sum_r[kMaxTileRows], sum_m[kMaxTileRows], sum_hr[kMaxTileRows], sum_hm[kMaxTileRows], sum_cr[kMaxTileRows];
  Real sum_cm[kMaxTileRows];
  Real keep[kMaxTileRows], spread[kMaxTileRows], grad_x_top[kMaxTileRows], shared[kMaxTileRows];
  Real grad_gamma[kMaxTileRows];
  Real grad_beta[kMaxTileRows];  // sum dL/dx_k (x_k - x_t)

  FK_HOST_DEVICE MapTerms<Real> terms(int64_t r) const {
    return {gamma_real[r],   gamma_real[r] - Real(1), q_scale[r],     log_q_offset[r],
            ratio_offset[r], power_offset[r],         ratio_scale[r], tie[r]};
  }
};

// A tile of rows in scratch memory. Element (row r, class c) is at r * row_stride + c * class_stride.
template <typename Real>
struct Tile {
  int64_t n_rows;   // of the input
  int64_t rows;     // with padding: whole vectors in the column layout
  int64_t classes;  // with padding: whole vectors in the row layout
  int64_t row_stride;
  int64_t class_stride;
  bool column;
  Real* x;  // inputs as logits; from pass 2 on y; -inf at the largest class, which is kept apart, and at padding
  Real* e;  // exp(y); later log(p_k / p_t), or its exponential
  Real* g;  // backward: upstream gradient, later h m
  Real* h;  // backward: h r
  TileRows<Real>* row;
};

template <typename Real>
class Scratch {
 public:
  Scratch(int64_t classes, int arrays) {
    column_ = classes <= kFewClasses;
    classes_ = column_ ? classes : round_up(classes);
    const int64_t fitting = std::clamp<int64_t>(kTileElements / classes_, 1, kMaxTileRows);
    tile_rows_ = column_ ? kMaxTileRows : fitting;
    size_ = round_up(tile_rows_ * classes_);
    buffer_.reset(new Real[size_ * arrays + kLanes]);
    const auto address = reinterpret_cast<uintptr_t>(buffer_.get());
    first_ = reinterpret_cast<Real*>((address + 63) / 64 * 64);
  }

  int64_t tile_rows() const { return tile_rows_; }

  Tile<Real> tile(int64_t n_rows) {
    Tile<Real> t{};
    t.n_rows = n_rows;
    t.rows = column_ ? kMaxTileRows : n_rows;
    t.classes = classes_;
    t.row_stride = column_ ? 1 : classes_;
    t.class_stride = column_ ? kMaxTileRows : 1;
    t.column = column_;
    t.x = first_;
    t.e = first_ + size_;
    t.g = first_ + 2 * size_;  // backward only
    t.h = first_ + 3 * size_;
    t.row = &row_;
    return t;
  }

 private:
  bool column_;
  int64_t classes_;
  int64_t tile_rows_;
  int64_t size_;
  std::unique_ptr<Real[]> buffer_;
  Real* first_;
  TileRows<Real> row_{};
};

// ---- pass 0 and 1: read a tile, find the two largest classes of each row
// ------------------------------------------------

template <typename Scalar>
FK_HOST_DEVICE void read_rows(const CalibrationMapArgs<Scalar>& args, int64_t row_begin,
                              const Tile<compute_t<Scalar>>& tile) {
  using Real = compute_t<Scalar>;
  constexpr Real kMinusInfinity = -std::numeric_limits<Real>::infinity();
  const int64_t classes = args.classes;
  for (int64_t r = 0; r < tile.n_rows; ++r) {
    const Scalar* input = args.input + (row_begin + r) * classes;
    Real* x = tile.x + r * tile.row_stride;
    if (tile.column) {
      for (int64_t c = 0; c < classes; ++c) x[c * kMaxTileRows] = load_as_compute(input[c]);
    } else {
#pragma omp simd
      for (int64_t c = 0; c < classes; ++c) x[c] = load_as_compute(input[c]);
      for (int64_t c = classes; c < tile.classes; ++c) x[c] = args.input_is_probs ? Real(0) : kMinusInfinity;
    }
  }
  if (tile.column) {
    // Rows that are not there: any row that has an answer.
    for (int64_t c = 0; c < classes; ++c) {
      for (int64_t r = tile.n_rows; r < tile.rows; ++r)
        tile.x[c * kMaxTileRows + r] = args.input_is_probs ? Real(1) : Real(0);
    }
  }
}

template <typename Real>
FK_HOST_DEVICE bool sums_to_one(const Tile<Real>& tile, int64_t r, int64_t classes, double tolerance) {
  double sum = 0;
  for (int64_t c = 0; c < classes; c += kSumBlock) {
    const int64_t end = std::min(c + kSumBlock, classes);
    const Real* p = tile.x + r * tile.row_stride;
    Real block = 0;
#pragma omp simd reduction(+ : block)
    for (int64_t j = c; j < end; ++j) block += p[j * tile.class_stride];
    sum += block;
  }
  return sum >= 1 - tolerance && sum <= 1 + tolerance;
}

template <typename Real>
FK_VECTOR_CLONES void find_top_two_in_rows(const Tile<Real>& tile) {
  constexpr Real kMinusInfinity = -std::numeric_limits<Real>::infinity();
  TileRows<Real>& row = *tile.row;
  for (int64_t r = 0; r < tile.n_rows; ++r) {
    Real* x = tile.x + r * tile.row_stride;
    Real top = kMinusInfinity;
#pragma omp simd reduction(max : top)
    for (int64_t c = 0; c < tile.classes; ++c) top = x[c] > top ? x[c] : top;
    int64_t index = 0;
    for (int64_t group = 0; group < tile.classes; group += kLanes) {
      int found = 0;
#pragma omp simd reduction(| : found)
      for (int64_t l = 0; l < kLanes; ++l) found |= x[group + l] == top ? 1 : 0;
      if (!found) continue;
      index = group;
      while (x[index] != top) ++index;
      break;
    }
    x[index] = kMinusInfinity;
    Real next = kMinusInfinity;
#pragma omp simd reduction(max : next)
    for (int64_t c = 0; c < tile.classes; ++c) next = x[c] > next ? x[c] : next;
    row.top[r] = index;
    row.top_x[r] = top;
    row.next_x[r] = next;
  }
}

template <typename Real>
FK_VECTOR_CLONES void find_top_two_in_columns(const Tile<Real>& tile) {
  constexpr Real kMinusInfinity = -std::numeric_limits<Real>::infinity();
  using Int = typename detail::Format<Real>::Int;  // as wide as Real, so that comparisons stay in one vector
  TileRows<Real>& row = *tile.row;
  alignas(64) Real top[kMaxTileRows];
  alignas(64) Real next[kMaxTileRows];
  alignas(64) Int index[kMaxTileRows];
  for (int64_t r = 0; r < kMaxTileRows; ++r) {
    top[r] = next[r] = kMinusInfinity;
    index[r] = 0;
  }
  for (int64_t c = 0; c < tile.classes; ++c) {
    const Real* x = tile.x + c * kMaxTileRows;
    const Int this_class = static_cast<Int>(c);
#pragma omp simd
    for (int64_t r = 0; r < kMaxTileRows; ++r) {
      const bool leads = x[r] > top[r];
      const Real loser = leads ? top[r] : x[r];
      next[r] = loser > next[r] ? loser : next[r];
      index[r] = leads ? this_class : index[r];
      top[r] = leads ? x[r] : top[r];
    }
  }
  for (int64_t r = 0; r < kMaxTileRows; ++r) {
    row.top[r] = index[r];
    row.top_x[r] = top[r];
    row.next_x[r] = next[r];
    tile.x[index[r] * kMaxTileRows + r] = kMinusInfinity;
  }
}

template <typename Scalar>
FK_HOST_DEVICE void read_tile(const CalibrationMapArgs<Scalar>& args, int64_t row_begin,
                              const Tile<compute_t<Scalar>>& tile) {
  using Real = compute_t<Scalar>;
  constexpr Real kInfinity = std::numeric_limits<Real>::infinity();
  TileRows<Real>& row = *tile.row;
  for (int64_t r = 0; r < kMaxTileRows; ++r) {
    const bool real_row = r < tile.n_rows;
    const double gamma = real_row ? args.gamma_of(row_begin + r) : 0.0;
    const double temperature = real_row ? args.temperature_of(row_begin + r) : 1.0;
    row.valid[r] = map_parameters_valid(gamma, temperature);
    row.gamma[r] = gamma;
    row.beta[r] = inverse_temperature<Real>(temperature);
  }
  read_rows(args, row_begin, tile);
  if (args.input_is_probs) {
    for (int64_t r = 0; r < tile.n_rows; ++r) {
      if (!sums_to_one(tile, r, args.classes, probability_sum_tolerance<Scalar>())) row.valid[r] = false;
    }
    const int64_t size = tile.rows * tile.classes;
#pragma omp simd
    for (int64_t i = 0; i < size; ++i) tile.x[i] = logit_of_probability(tile.x[i]);
  }
  tile.column ? find_top_two_in_columns(tile) : find_top_two_in_rows(tile);
  // `next_x` is -inf where only one class can occur (or all others are NaN): any number serves as its shift.
  const Real lowest_gap = -largest_finite<Real>() / Real(16);
#pragma omp simd
  for (int64_t r = 0; r < kMaxTileRows; ++r) {
    row.next_x[r] = row.next_x[r] > -kInfinity ? row.next_x[r] : row.top_x[r];
    const Real gap = (row.next_x[r] - row.top_x[r]) * row.beta[r];
    row.gap[r] = gap < lowest_gap ? lowest_gap : gap;
  }
  for (int64_t r = 0; r < tile.n_rows; ++r) {
    // Also false for a NaN; NaN in other classes shows in the sum of exponentials.
    if (!(row.top_x[r] > -kInfinity && row.top_x[r] < kInfinity)) row.valid[r] = false;
  }
}

// ---- pass 2: exponentials, then what a row needs once --------------------------------------------------------------

template <bool on_grid, typename Real>
FK_VECTOR_CLONES void exponentials_of_rows(const Tile<Real>& tile) {
  TileRows<Real>& row = *tile.row;
  for (int64_t r = 0; r < tile.n_rows; ++r) {
    Real* x = tile.x + r * tile.row_stride;
    Real* e = tile.e + r * tile.row_stride;
    const Real shift = row.next_x[r];
    const Real beta = row.beta[r];
    double sum = 0;
    for (int64_t begin = 0; begin < tile.classes; begin += kSumBlock) {
      const int64_t end = std::min(begin + kSumBlock, tile.classes);
      Real block = 0;
#pragma omp simd reduction(+ : block)
      for (int64_t c = begin; c < end; ++c) {
        x[c] = map_exponent<on_grid>(x[c], shift, beta);
        e[c] = bounded_exponential(x[c]);
        block += e[c];
      }
      sum += block;
    }
    row.rest[r] = static_cast<Real>(sum);
  }
}

template <bool on_grid, typename Real>
FK_VECTOR_CLONES void exponentials_of_columns(const Tile<Real>& tile) {
  TileRows<Real>& row = *tile.row;
  for (int64_t r = 0; r < kMaxTileRows; ++r) row.rest[r] = 0;
  for (int64_t c = 0; c < tile.classes; ++c) {
    Real* x = tile.x + c * kMaxTileRows;
    Real* e = tile.e + c * kMaxTileRows;
#pragma omp simd
    for (int64_t r = 0; r < kMaxTileRows; ++r) {
      x[r] = map_exponent<on_grid>(x[r], row.next_x[r], row.beta[r]);
      e[r] = bounded_exponential(x[r]);
      row.rest[r] += e[r];
    }
  }
}

template <typename Real>
FK_VECTOR_CLONES void finish_rows(const Tile<Real>& tile) {
  TileRows<Real>& row = *tile.row;
  for (int64_t r = 0; r < tile.n_rows; ++r) {
    if (row.rest[r] != row.rest[r]) row.valid[r] = false;
  }
  const int64_t rows = round_up(tile.n_rows);
#pragma omp simd
  for (int64_t r = 0; r < rows; ++r) {
    // Only one class can occur: every e is 0, and any S gives p_t = 1.
    const Real rest = row.rest[r] > Real(0) ? row.rest[r] : Real(1);
    const MapRow<Real> m = map_row(row.gap[r], rest, map_gamma<Real>(row.gamma[r]));
    row.gamma_real[r] = m.terms.gamma;
    row.q_scale[r] = m.terms.q_scale;
    row.log_q_offset[r] = m.terms.log_q_offset;
    row.ratio_offset[r] = m.terms.ratio_offset;
    row.power_offset[r] = m.terms.power_offset;
    row.ratio_scale[r] = m.terms.ratio_scale;
    row.tie[r] = m.terms.tie;
    row.q_top[r] = m.q_top;
    row.u_top[r] = m.u_top;
    row.inverse_rest[r] = m.inverse_rest;
    row.scaled_slope_top[r] = m.scaled_slope_top;
    row.grad_gamma_top[r] = m.grad_gamma_top;
  }
}

template <typename Real>
FK_HOST_DEVICE void fill_nan(Real* begin, int64_t n) {
  std::fill(begin, begin + n, std::numeric_limits<Real>::quiet_NaN());
}
template <>
FK_HOST_DEVICE void fill_nan<Half>(Half* begin, int64_t n) {
  std::fill(begin, begin + n, Store<Half>::from_compute(std::numeric_limits<float>::quiet_NaN()));
}
template <>
FK_HOST_DEVICE void fill_nan<BFloat16>(BFloat16* begin, int64_t n) {
  std::fill(begin, begin + n, Store<BFloat16>::from_compute(std::numeric_limits<float>::quiet_NaN()));
}

// ---- forward: passes 3 and 4 ---------------------------------------------------------------------------------------

// p_k / p_t into e, or where that is wanted its logarithm into x.
template <bool log_output, typename Real>
FK_VECTOR_CLONES void ratios_of_rows(const Tile<Real>& tile) {
  TileRows<Real>& row = *tile.row;
  for (int64_t r = 0; r < tile.n_rows; ++r) {
    Real* x = tile.x + r * tile.row_stride;
    Real* e = tile.e + r * tile.row_stride;
    const MapTerms<Real> terms = row.terms(r);
    double sum = 0;
    for (int64_t begin = 0; begin < tile.classes; begin += kSumBlock) {
      const int64_t end = std::min(begin + kSumBlock, tile.classes);
      Real block = 0;
#pragma omp simd reduction(+ : block)
      for (int64_t c = begin; c < end; ++c) {
        if constexpr (log_output) {
          x[c] = map_log_ratio(x[c], e[c], terms);
          block += exponential(x[c]);
        } else {
          e[c] = map_ratio(x[c], e[c], terms);
          block += e[c];
        }
      }
      sum += block;
    }
    row.ratio_sum[r] = static_cast<Real>(sum);
  }
}

template <bool log_output, typename Real>
FK_VECTOR_CLONES void ratios_of_columns(const Tile<Real>& tile) {
  TileRows<Real>& row = *tile.row;
  for (int64_t r = 0; r < kMaxTileRows; ++r) row.ratio_sum[r] = 0;
  for (int64_t c = 0; c < tile.classes; ++c) {
    Real* x = tile.x + c * kMaxTileRows;
    Real* e = tile.e + c * kMaxTileRows;
#pragma omp simd
    for (int64_t r = 0; r < kMaxTileRows; ++r) {
      if constexpr (log_output) {
        x[r] = map_log_ratio(x[r], e[r], row.terms(r));
        row.ratio_sum[r] += exponential(x[r]);
      } else {
        e[r] = map_ratio(x[r], e[r], row.terms(r));
        row.ratio_sum[r] += e[r];
      }
    }
  }
}

template <bool log_output, typename Real>
void ratios(const Tile<Real>& tile) {
  tile.column ? ratios_of_columns<log_output>(tile) : ratios_of_rows<log_output>(tile);
}

template <typename Out, typename Real>
FK_HOST_DEVICE void write_tile(const Tile<Real>& tile, int64_t classes, bool log_output, Out* output) {
  const TileRows<Real>& row = *tile.row;
  for (int64_t r = 0; r < tile.n_rows; ++r) {
    Out* out = output + r * classes;
    if (!row.valid[r]) {
      fill_nan(out, classes);
      continue;
    }
    const Real* value = (log_output ? tile.x : tile.e) + r * tile.row_stride;
    const Real scale = log_output ? Real(1) : row.p_top[r];
    const Real offset = log_output ? Real(0) - row.log_norm[r] : Real(0);  // 0, not -0
    if (tile.column) {
      for (int64_t c = 0; c < classes; ++c) out[c] = Store<Out>::from_compute(value[c * kMaxTileRows] * scale + offset);
    } else {
#pragma omp simd
      for (int64_t c = 0; c < classes; ++c) out[c] = Store<Out>::from_compute(value[c] * scale + offset);
    }
    out[row.top[r]] = Store<Out>::from_compute(log_output ? offset : scale);
  }
}

template <typename Scalar>
FK_VECTOR_CLONES void forward_tile(const CalibrationMapForward<Scalar>& args, int64_t row_begin,
                                   const Tile<compute_t<Scalar>>& tile) {
  using Real = compute_t<Scalar>;
  TileRows<Real>& row = *tile.row;
  read_tile(args, row_begin, tile);
  tile.column ? exponentials_of_columns<true>(tile) : exponentials_of_rows<true>(tile);
  finish_rows(tile);
  args.log_output ? ratios<true>(tile) : ratios<false>(tile);
  const int64_t rows = round_up(tile.n_rows);
#pragma omp simd
  for (int64_t r = 0; r < rows; ++r) {
    row.log_norm[r] = log_one_plus(row.ratio_sum[r]);
    row.p_top[r] = Real(1) / (Real(1) + row.ratio_sum[r]);
  }
  const int64_t offset = row_begin * args.classes;
  if (args.output) {
    write_tile(tile, args.classes, args.log_output, args.output + offset);
  } else {
    write_tile(tile, args.classes, args.log_output, args.output_wide + offset);
  }
}

// ---- backward: passes 3 and 4 --------------------------------------------------------------------------------------

// The upstream gradient of each class, 0 at the largest one (kept apart), at padding and at classes of probability
// zero.
template <typename In, typename Real>
FK_HOST_DEVICE void read_gradient(const Tile<Real>& tile, int64_t classes, const In* grad_output) {
  constexpr Real kMinusInfinity = -std::numeric_limits<Real>::infinity();
  TileRows<Real>& row = *tile.row;
  for (int64_t r = 0; r < tile.n_rows; ++r) {
    const In* grad = grad_output + r * classes;
    Real* g = tile.g + r * tile.row_stride;
    const Real* x = tile.x + r * tile.row_stride;
    row.grad_top[r] = load_as_compute(grad[row.top[r]]);
    if (tile.column) {
      for (int64_t c = 0; c < classes; ++c) g[c * kMaxTileRows] = load_as_compute(grad[c]);
    } else {
#pragma omp simd
      for (int64_t c = 0; c < classes; ++c) g[c] = x[c] == kMinusInfinity ? Real(0) : load_as_compute(grad[c]);
      std::fill(g + classes, g + tile.classes, Real(0));
    }
  }
  if (!tile.column) return;
  for (int64_t r = tile.n_rows; r < kMaxTileRows; ++r) row.grad_top[r] = 0;
  for (int64_t c = 0; c < classes; ++c) {
    Real* g = tile.g + c * kMaxTileRows;
    const Real* x = tile.x + c * kMaxTileRows;
    for (int64_t r = tile.n_rows; r < kMaxTileRows; ++r) g[r] = 0;
#pragma omp simd
    for (int64_t r = 0; r < kMaxTileRows; ++r) g[r] = x[r] == kMinusInfinity ? Real(0) : g[r];
  }
}

template <typename Real>
FK_VECTOR_CLONES void slopes_of_rows(const Tile<Real>& tile, bool log_output) {
  // m_k = w_k or r_k v_k, without a choice in the loop.
  const Real bias = log_output ? Real(1) : Real(0), factor = Real(1) - bias;
  TileRows<Real>& row = *tile.row;
  for (int64_t i = 0; i < tile.n_rows; ++i) {
    const Real* x = tile.x + i * tile.row_stride;
    const Real* e = tile.e + i * tile.row_stride;
    Real* g = tile.g + i * tile.row_stride;
    Real* h = tile.h + i * tile.row_stride;
    const MapTerms<Real> terms = row.terms(i);
    const Real shared_grad = factor * row.grad_top[i];
    double r_all = 0, m_all = 0, hr_all = 0, hm_all = 0, cr_all = 0, cm_all = 0;
    for (int64_t begin = 0; begin < tile.classes; begin += kSumBlock) {
      const int64_t end = std::min(begin + kSumBlock, tile.classes);
      Real r_sum = 0, m_sum = 0, hr_sum = 0, hm_sum = 0, cr_sum = 0, cm_sum = 0;
#pragma omp simd reduction(+ : r_sum, m_sum, hr_sum, hm_sum, cr_sum, cm_sum)
      for (int64_t c = begin; c < end; ++c) {
        const auto k = map_class(x[c], e[c], terms);
        const Real ratio = k.ratio;
        const Real m = (g[c] - shared_grad) * (bias + factor * ratio);
        const Real hr = k.slope * ratio;
        const Real hm = k.slope * m;
        g[c] = hm;
        h[c] = hr;
        r_sum += ratio;
        m_sum += m;
        hr_sum += hr;
        hm_sum += hm;
        cr_sum += k.grad_gamma * ratio;
        cm_sum += k.grad_gamma * m;
      }
      r_all += r_sum;
      m_all += m_sum;
      hr_all += hr_sum;
      hm_all += hm_sum;
      cr_all += cr_sum;
      cm_all += cm_sum;
    }
    row.sum_r[i] = static_cast<Real>(r_all);
    row.sum_m[i] = static_cast<Real>(m_all);
    row.sum_hr[i] = static_cast<Real>(hr_all);
    row.sum_hm[i] = static_cast<Real>(hm_all);
    row.sum_cr[i] = static_cast<Real>(cr_all);
    row.sum_cm[i] = static_cast<Real>(cm_all);
  }
}

template <typename Real>
FK_VECTOR_CLONES void slopes_of_columns(const Tile<Real>& tile, bool log_output) {
  const Real bias = log_output ? Real(1) : Real(0), factor = Real(1) - bias;
  TileRows<Real>& row = *tile.row;
  for (int64_t i = 0; i < kMaxTileRows; ++i) {
    row.sum_r[i] = row.sum_m[i] = row.sum_hr[i] = row.sum_hm[i] = row.sum_cr[i] = row.sum_cm[i] = 0;
  }
  for (int64_t c = 0; c < tile.classes; ++c) {
    const Real* x = tile.x + c * kMaxTileRows;
    const Real* e = tile.e + c * kMaxTileRows;
    Real* g = tile.g + c * kMaxTileRows;
    Real* h = tile.h + c * kMaxTileRows;
#pragma omp simd
    for (int64_t i = 0; i < kMaxTileRows; ++i) {
      const auto k = map_class(x[i], e[i], row.terms(i));
      const Real ratio = k.ratio;
      const Real m = (g[i] - factor * row.grad_top[i]) * (bias + factor * ratio);
      const Real hr = k.slope * ratio;
      const Real hm = k.slope * m;
      g[i] = hm;
      h[i] = hr;
      row.sum_r[i] += ratio;
      row.sum_m[i] += m;
      row.sum_hr[i] += hr;
      row.sum_hm[i] += hm;
      row.sum_cr[i] += k.grad_gamma * ratio;
      row.sum_cm[i] += k.grad_gamma * m;
    }
  }
}

template <typename Real>
FK_VECTOR_CLONES void finish_gradients(const Tile<Real>& tile, bool log_output) {
  TileRows<Real>& row = *tile.row;
  const int64_t rows = round_up(tile.n_rows);
#pragma omp simd
  for (int64_t r = 0; r < rows; ++r) {
    MapRow<Real> m;
    m.q_top = row.q_top[r];
    m.u_top = row.u_top[r];
    m.inverse_rest = row.inverse_rest[r];
    m.scaled_slope_top = row.scaled_slope_top[r];
    m.grad_gamma_top = row.grad_gamma_top[r];
    const MapGradSums<Real> sums{row.sum_r[r],  row.sum_m[r],  row.sum_hr[r],
                                 row.sum_hm[r], row.sum_cr[r], row.sum_cm[r]};
    const MapRowGrad<Real> grad = map_row_grad(m, sums, row.grad_top[r], log_output);
    row.keep[r] = grad.keep;
    row.spread[r] = grad.spread;
    row.shared[r] = grad.shared;
    row.grad_x_top[r] = grad.top;
    row.grad_gamma[r] = grad.gamma;
  }
}

// dL/dx into g, and dL/dbeta * beta = sum dL/dx_k (x_k - x_t).
template <typename Real>
FK_VECTOR_CLONES void gradients_of_rows(const Tile<Real>& tile) {
  constexpr Real kMinusInfinity = -std::numeric_limits<Real>::infinity();
  TileRows<Real>& row = *tile.row;
  for (int64_t r = 0; r < tile.n_rows; ++r) {
    const Real* x = tile.x + r * tile.row_stride;
    const Real* e = tile.e + r * tile.row_stride;
    const Real* h = tile.h + r * tile.row_stride;
    Real* g = tile.g + r * tile.row_stride;
    const Real gap = row.gap[r];
    const Real keep = row.keep[r], spread = row.spread[r], shared = row.shared[r];
    double sum = 0;
    for (int64_t begin = 0; begin < tile.classes; begin += kSumBlock) {
      const int64_t end = std::min(begin + kSumBlock, tile.classes);
      Real block = 0;
#pragma omp simd reduction(+ : block)
      for (int64_t c = begin; c < end; ++c) {
        const Real grad = keep * g[c] - (spread * h[c] + shared * e[c]);
        g[c] = grad;
        block += x[c] == kMinusInfinity ? Real(0) : grad * (x[c] + gap);
      }
      sum += block;
    }
    row.grad_beta[r] = static_cast<Real>(sum);
  }
}

template <typename Real>
FK_VECTOR_CLONES void gradients_of_columns(const Tile<Real>& tile) {
  constexpr Real kMinusInfinity = -std::numeric_limits<Real>::infinity();
  TileRows<Real>& row = *tile.row;
  for (int64_t r = 0; r < kMaxTileRows; ++r) row.grad_beta[r] = 0;
  for (int64_t c = 0; c < tile.classes; ++c) {
    const Real* x = tile.x + c * kMaxTileRows;
    const Real* e = tile.e + c * kMaxTileRows;
    const Real* h = tile.h + c * kMaxTileRows;
    Real* g = tile.g + c * kMaxTileRows;
#pragma omp simd
    for (int64_t r = 0; r < kMaxTileRows; ++r) {
      const Real grad = row.keep[r] * g[r] - (row.spread[r] * h[r] + row.shared[r] * e[r]);
      g[r] = grad;
      row.grad_beta[r] += x[r] == kMinusInfinity ? Real(0) : grad * (x[r] + row.gap[r]);
    }
  }
}

template <typename Scalar>
FK_HOST_DEVICE void write_gradient(const CalibrationMapBackward<Scalar>& args, int64_t row_begin,
                                   const Tile<compute_t<Scalar>>& tile) {
  using Real = compute_t<Scalar>;
  constexpr Real kNan = std::numeric_limits<Real>::quiet_NaN();
  const TileRows<Real>& row = *tile.row;
  const int64_t classes = args.classes;
  for (int64_t r = 0; r < tile.n_rows; ++r) {
    const int64_t index = row_begin + r;
    if (args.grad_gamma) args.grad_gamma[index] = row.valid[r] ? row.grad_gamma[r] : kNan;
    if (args.grad_temperature) {
      args.grad_temperature[index] = row.valid[r] ? -row.grad_beta[r] / args.temperature_of(index) : kNan;
    }
    if (!args.grad_input) continue;
    Scalar* grad = args.grad_input + index * classes;
    if (!row.valid[r]) {
      fill_nan(grad, classes);
      continue;
    }
    Real* g = tile.g + r * tile.row_stride;
    g[row.top[r] * tile.class_stride] = row.grad_x_top[r];
    const Real beta = row.beta[r];
    if (args.input_is_probs) {
      const Scalar* p = args.input + index * classes;
      for (int64_t c = 0; c < classes; ++c) {
        // The gradient at p = 0 is not defined; as the class is left out of the map, it is given as 0.
        const Real p_c = load_as_compute(p[c]);
        const Real grad_p = p_c == Real(0) ? Real(0) : g[c * tile.class_stride] * beta / p_c;
        grad[c] = Store<Scalar>::from_compute(grad_p);
      }
    } else if (tile.column) {
      for (int64_t c = 0; c < classes; ++c) grad[c] = Store<Scalar>::from_compute(g[c * kMaxTileRows] * beta);
    } else {
#pragma omp simd
      for (int64_t c = 0; c < classes; ++c) grad[c] = Store<Scalar>::from_compute(g[c] * beta);
    }
  }
}

template <typename Scalar>
FK_VECTOR_CLONES void backward_tile(const CalibrationMapBackward<Scalar>& args, int64_t row_begin,
                                    const Tile<compute_t<Scalar>>& tile) {
  read_tile(args, row_begin, tile);
  const int64_t offset = row_begin * args.classes;
  if (args.grad_output) {
    read_gradient(tile, args.classes, args.grad_output + offset);
  } else {
    read_gradient(tile, args.classes, args.grad_output_wide + offset);
  }
  tile.column ? exponentials_of_columns<false>(tile) : exponentials_of_rows<false>(tile);
  finish_rows(tile);
  tile.column ? slopes_of_columns(tile, args.log_output) : slopes_of_rows(tile, args.log_output);
  finish_gradients(tile, args.log_output);
  tile.column ? gradients_of_columns(tile) : gradients_of_rows(tile);
  write_gradient(args, row_begin, tile);
}

// ---- the binary map ------------------------------------------------------------------------------------------------

constexpr int64_t kBinaryBlock = 64;

// A block of elements with their parameters side by side, so that the loop over it has neither branches nor gathers.
template <typename Real>
struct BinaryBlock {
  alignas(64) double gamma[kBinaryBlock];
  alignas(64) Real beta[kBinaryBlock];
  alignas(64) Real x[kBinaryBlock];  // s / T
  alignas(64) Real w[kBinaryBlock];  // upstream gradient, then that of the log-odds
  alignas(64) Real result[kBinaryBlock];
  alignas(64) Real grad_gamma[kBinaryBlock];
  alignas(64) Real grad_beta[kBinaryBlock];
  bool valid[kBinaryBlock];
};

// Reads a block of n elements; returns the first that has no answer, or -1.
template <typename Scalar>
FK_HOST_DEVICE int64_t read_block(const BinaryCalibrationMapArgs<Scalar>& args, int64_t begin, int64_t n,
                                  BinaryBlock<compute_t<Scalar>>& block) {
  using Real = compute_t<Scalar>;
  constexpr Real kInfinity = std::numeric_limits<Real>::infinity();
  int64_t invalid = -1;
  for (int64_t i = 0; i < kBinaryBlock; ++i) {
    const bool present = i < n;
    const double gamma = present ? args.gamma_of(begin + i) : 0.0;
    const double temperature = present ? args.temperature_of(begin + i) : 1.0;
    const Real logit = present ? load_as_compute(args.logits[begin + i]) : Real(0);
    block.gamma[i] = gamma;
    block.beta[i] = inverse_temperature<Real>(temperature);
    block.x[i] = logit * block.beta[i];
    block.valid[i] = map_parameters_valid(gamma, temperature) && logit < kInfinity;
    if (!block.valid[i] && invalid < 0) invalid = begin + i;
  }
  return invalid;
}

template <typename Scalar>
FK_VECTOR_CLONES int64_t binary_forward_block(const BinaryCalibrationMapForward<Scalar>& args, int64_t begin,
                                              int64_t n) {
  using Real = compute_t<Scalar>;
  constexpr Real kNan = std::numeric_limits<Real>::quiet_NaN();
  BinaryBlock<Real> block;
  const int64_t invalid = read_block(args, begin, n, block);
  const bool log_odds_output = args.log_odds_output;
#pragma omp simd
  for (int64_t i = 0; i < kBinaryBlock; ++i) {
    const Real log_odds = binary_map(block.x[i], block.gamma[i]).log_odds;
    block.result[i] = log_odds_output ? log_odds : sigmoid(log_odds);
  }
  for (int64_t i = 0; i < n; ++i) {
    const Real result = block.valid[i] ? block.result[i] : kNan;
    if (args.output) {
      args.output[begin + i] = Store<Scalar>::from_compute(result);
    } else {
      args.output_wide[begin + i] = result;
    }
  }
  return invalid;
}

template <typename Scalar>
FK_VECTOR_CLONES void binary_backward_block(const BinaryCalibrationMapBackward<Scalar>& args, int64_t begin,
                                            int64_t n) {
  using Real = compute_t<Scalar>;
  constexpr Real kNan = std::numeric_limits<Real>::quiet_NaN();
  BinaryBlock<Real> block;
  read_block(args, begin, n, block);
  for (int64_t i = 0; i < n; ++i) {
    block.w[i] = args.grad_output ? load_as_compute(args.grad_output[begin + i]) : args.grad_output_wide[begin + i];
  }
  for (int64_t i = n; i < kBinaryBlock; ++i) block.w[i] = 0;
  const bool log_odds_output = args.log_odds_output;
#pragma omp simd
  for (int64_t i = 0; i < kBinaryBlock; ++i) {
    const BinaryMapGrad<Real> grad = binary_map_grad(block.x[i], block.gamma[i], block.w[i], log_odds_output);
    block.result[i] = grad.x * block.beta[i];
    block.grad_gamma[i] = grad.gamma;
    block.grad_beta[i] = grad.beta;
  }
  for (int64_t i = 0; i < n; ++i) {
    const int64_t index = begin + i;
    const bool valid = block.valid[i];
    if (args.grad_logits) args.grad_logits[index] = Store<Scalar>::from_compute(valid ? block.result[i] : kNan);
    if (args.grad_gamma) args.grad_gamma[index] = valid ? block.grad_gamma[i] : kNan;
    if (args.grad_temperature) {
      args.grad_temperature[index] = valid ? -block.grad_beta[i] / args.temperature_of(index) : kNan;
    }
  }
}

}  // namespace

int64_t calibration_map_chunk_rows(int64_t rows, int64_t classes) {
  const int64_t chunk = std::max<int64_t>(1, kChunkElements / std::max<int64_t>(1, classes));
  return std::min(std::max<int64_t>(1, rows), chunk < kMaxTileRows ? chunk : chunk - chunk % kMaxTileRows);
}

template <typename Scalar>
int64_t calibration_map_forward(const CalibrationMapForward<Scalar>& args, int64_t row_begin, int64_t row_end) {
  Scratch<compute_t<Scalar>> scratch(args.classes, /*arrays=*/2);
  int64_t invalid = -1;
  for (int64_t row = row_begin; row < row_end; row += scratch.tile_rows()) {
    const auto tile = scratch.tile(std::min(scratch.tile_rows(), row_end - row));
    forward_tile(args, row, tile);
    for (int64_t r = 0; r < tile.n_rows && invalid < 0; ++r) {
      if (!tile.row->valid[r]) invalid = row + r;
    }
  }
  return invalid;
}

template <typename Scalar>
void calibration_map_backward(const CalibrationMapBackward<Scalar>& args, int64_t row_begin, int64_t row_end) {
  Scratch<compute_t<Scalar>> scratch(args.classes, /*arrays=*/4);
  for (int64_t row = row_begin; row < row_end; row += scratch.tile_rows()) {
    backward_tile(args, row, scratch.tile(std::min(scratch.tile_rows(), row_end - row)));
  }
}

template <typename Scalar>
int64_t binary_calibration_map_forward(const BinaryCalibrationMapForward<Scalar>& args, int64_t begin, int64_t end) {
  int64_t invalid = -1;
  for (int64_t i = begin; i < end; i += kBinaryBlock) {
    const int64_t found = binary_forward_block(args, i, std::min(kBinaryBlock, end - i));
    if (invalid < 0) invalid = found;
  }
  return invalid;
}

template <typename Scalar>
void binary_calibration_map_backward(const BinaryCalibrationMapBackward<Scalar>& args, int64_t begin, int64_t end) {
  for (int64_t i = begin; i < end; i += kBinaryBlock) {
    binary_backward_block(args, i, std::min(kBinaryBlock, end - i));
  }
}

#define FK_INSTANTIATE(Scalar)                                                                                 \
  template int64_t calibration_map_forward<Scalar>(const CalibrationMapForward<Scalar>&, int64_t, int64_t);    \
  template void calibration_map_backward<Scalar>(const CalibrationMapBackward<Scalar>&, int64_t, int64_t);     \
  template int64_t binary_calibration_map_forward<Scalar>(const BinaryCalibrationMapForward<Scalar>&, int64_t, \
                                                          int64_t);                                            \
  template void binary_calibration_map_backward<Scalar>(const BinaryCalibrationMapBackward<Scalar>&, int64_t, int64_t);
FK_INSTANTIATE(Half)
FK_INSTANTIATE(BFloat16)
FK_INSTANTIATE(float)
FK_INSTANTIATE(double)
#undef FK_INSTANTIATE

}  // namespace focalkern::cpu
