// The map of spline scaling on the CPU, forward and backward.
//
//   forward   input [rows, classes] -> output [rows, classes]: p or log p
//   backward  input, grad_output -> grad_input [rows, classes] and sums over rows for the parameters
//
// Memory: each direction reads its inputs once and writes its outputs once; the forward pass saves nothing for the
// backward pass.

#include <algorithm>
#include <cmath>
#include <optional>
#include <vector>

#include "cpu/spline_narrow.h"
#include "cpu/spline_order.h"
#include "cpu/spline_scores.h"
#include "cpu/spline_wide.h"

namespace focalkern::cpu {
namespace {

constexpr double kNan = std::numeric_limits<double>::quiet_NaN();

// Sets t.valid. A row is invalid if it has a NaN or +inf or no class above -inf; the sum of its exponentials is then
// NaN. Rows of probabilities must also be non-negative and sum to 1.
void validate_rows(const SplineMapForward& args, int64_t row, const SplineTile& t) {
  for (int64_t r = 0; r < t.n_rows; ++r) t.valid[r] = t.rest[r] == t.rest[r];
  if (!args.rows.is_probs) return;
  read_tile(t, args.rows.input, args.rows.storage, row, t.x, 0);
  for (int64_t r = 0; r < t.n_rows; ++r) {
    const double* p = t.x + r * t.row_stride;
    double sum = 0;
    bool positive = true;
    for (int64_t c = 0; c < t.classes; ++c) {
      sum += p[c * t.class_stride];
      positive &= p[c * t.class_stride] >= 0;
    }
    t.valid[r] &= positive && sum >= 1 - args.tolerance && sum <= 1 + args.tolerance;
  }
}

// Makes the results of invalid rows NaN, and updates the first of these rows.
void leave_out_invalid(const SplineTile& t, int64_t row, double* scale, double* shift, int64_t& invalid) {
  if (std::all_of(t.valid, t.valid + t.n_rows, [](bool valid) { return valid; })) return;
  for (int64_t r = 0; r < t.n_rows; ++r) {
    if (t.valid[r]) continue;
    scale[r] = shift[r] = kNan;
    if (invalid < 0) invalid = row + r;
  }
}

// Bounds of |x| and |u|, and of |f| and |f'| there.
struct CurveBounds {
  double farthest, largest, steepest;
};
CurveBounds bounds_of(const SplineMapForward& args) {
  const double farthest = std::log(static_cast<double>(args.rows.classes) / args.rows.floor);
  double largest = 0, steepest = 0;
  const auto add_piece = [&](int64_t piece, double s) {
    const double* c = args.curve.coefficients + piece * 4;
    const double of[] = {std::abs(c[0]), std::abs(c[1]), std::abs(c[2]), std::abs(c[3])};
    largest = std::max(largest, of[0] + s * (of[1] + s * (of[2] + s * of[3])));
    steepest = std::max(steepest, of[1] + s * (2 * of[2] + s * 3 * of[3]));
  };
  const double* knots = args.curve.positions;
  const int64_t last = args.curve.knots - 1;
  add_piece(0, farthest + std::abs(knots[0]));
  for (int64_t k = 0; k < last; ++k) add_piece(k + 1, knots[k + 1] - knots[k]);
  add_piece(last + 1, farthest + std::abs(knots[last]));
  return {farthest, largest, steepest};
}

// Whether vectors compute the scores of doubles directly from the exponentials.
bool scores_fit_registers(const SplineMapForward& args) {
  bool has_wide_vectors = has_avx512();
#ifdef FK_HAS_AVX512_CODE
  has_wide_vectors |= has_avx2();
#endif
  return has_wide_vectors && is_scalar(args.curve, args.scores);
}

// The `slack` of scores_in_registers: four times a bound of the rounding error of a score. Returns 0 if that is not
// small compared with the rise of a score from step to step, or if the scores are not computed in registers.
double slack_of_steps(const SplineMapForward& args) {
  if (!scores_fit_registers(args)) return 0;
  constexpr double kLeastSlope = 1e-3;  // smallest slope in log q of a curve that keeps the order
  constexpr double kUnit = 0x1p-51, kLeastStep = 0x1p-31;
  const CurveBounds of = bounds_of(args);
  const double rounding = kUnit * (of.largest + (std::abs(args.scores.factor) + of.steepest) * of.farthest);
  return 4 * rounding <= kLeastSlope * kLeastStep ? 4 * rounding : 0;
}

// Whether cpu/spline_narrow.h supports this map.
bool is_narrow(const SplineMapForward& args) {
  if (args.rows.storage == SplineStorage::kDouble || args.to == SplineStorage::kDouble) return false;
  if (!is_scalar(args.curve, args.scores) || args.rows.floor < kNarrowFloor) return false;
  const CurveBounds of = bounds_of(args);
  const double factor = std::abs(args.scores.factor);
  return factor * of.farthest + of.largest <= kNarrowLargest && factor + of.steepest <= kNarrowSteepest;
}

// Whether the rows are side by side in the row layout, or many enough to be transposed.
bool is_transposed(const SplineTile& t) { return !t.column || (t.n_rows >= 4 && t.classes >= 4); }

// The forward pass in vectors of one width. Returns the first invalid row, or -1.
template <int64_t bytes>
class NarrowMap {
 public:
  explicit NarrowMap(const SplineMapForward& args) : args_(args), curve_(args.curve, kNarrowLog2e) {}

  int64_t forward(int64_t row_begin, int64_t row_end) const {
    SplineScratch scratch(args_.rows.classes, /*arrays=*/5);
    int64_t invalid = -1;
    double scale[kSplineTileRows] = {}, shift[kSplineTileRows] = {};
    for (int64_t row = row_begin; row < row_end; row += scratch.rows()) {
      const auto t = scratch.tile(std::min(scratch.rows(), row_end - row));
      from_input(t, row);
      if (args_.log_output) {
        for (int64_t r = 0; r < t.n_rows; ++r) scale[r] = kNarrowLn2, shift[r] = -std::log(t.sum[r]);
      } else {
        for (int64_t r = 0; r < t.n_rows; ++r) scale[r] = 1 / t.sum[r];
      }
      leave_out_invalid(t, row, scale, shift, invalid);
      if (args_.to != SplineStorage::kFloat || !is_transposed(t)) {
        write_scaled(t, scale, shift, args_.output, args_.to, row);
        continue;
      }
      float* const to = static_cast<float*>(args_.output) + row * t.classes;
      args_.log_output ? run_in<bytes, NarrowResults<true>>(t, scale, shift, to)
                       : run_in<bytes, NarrowResults<false>>(t, scale, shift, to);
    }
    return invalid;
  }

 private:
  void from_input(const SplineTile& t, int64_t row) const {
    const SplineInput& input = args_.rows;
    if (input.is_probs || input.storage != SplineStorage::kFloat || !is_transposed(t)) {
      read_logits(input, row, t);
      largest_of_rows(t, t.d, t.top);
      return from_logits(t, row, static_cast<const double*>(t.d));
    }
    const float* z = static_cast<const float*>(input.input) + row * t.classes;
    if (t.column) {
      float* const columns = reinterpret_cast<float*>(t.d);
      if (t.n_rows < kSplineTileRows) std::fill_n(columns, t.classes * kSplineTileRows, 0.0f);
      to_columns<kSplineTileRows>(z, t.classes, t.n_rows, t.classes, columns);
      z = columns;
    }
    run_in<bytes, NarrowTops>(t, z);
    from_logits(t, row, z);
  }

  // Writes the exponentials of the scores, or the differences of the scores from the largest of their row, as binary
  // logarithms, to t.f, and the sums of the exponentials to t.sum.
  template <typename Logit>
  void from_logits(const SplineTile& t, int64_t row, const Logit* z) const {
    run_in<bytes, NarrowExponents<Logit>>(t, z, args_.rows.temperature, args_.keep_order ? kSplineGrid : 0);
    run_in<bytes, NarrowRowNumbers>(t, args_.rows.floor);
    validate_rows(args_, row, t);
    bool keep_zeros = args_.scores.keep_zeros;
    if constexpr (std::is_same_v<Logit, float>) {
      keep_zeros = keep_zeros && has_impossible(z, t.classes * (t.column ? kSplineTileRows : t.n_rows));
    }
    if (args_.log_output) {
      keep_zeros ? scores<true, true>(t, row, z, t.score_top) : scores<true, false>(t, row, z, t.score_top);
      run_in<bytes, NarrowSums>(t);
    } else {
      keep_zeros ? scores<false, true>(t, row, z, t.sum) : scores<false, false>(t, row, z, t.sum);
    }
  }
  template <bool log, bool keep_zeros, typename Logit>
  void scores(const SplineTile& t, int64_t row, const Logit* z, double* of_rows) const {
    NarrowAhead ahead;
    const bool is_last = row + t.n_rows >= args_.rows.rows;
    if (std::is_same_v<Logit, float> && args_.to == SplineStorage::kFloat && !is_last) {
      ahead.logits = static_cast<const float*>(args_.rows.input) + (row + t.n_rows) * t.classes;
      ahead.results = static_cast<const float*>(args_.output) + row * t.classes;
    }
    run_in<bytes, NarrowScores<log, keep_zeros, Logit>>(t, z, curve_, args_, ahead, of_rows);
  }

  const SplineMapForward& args_;
  const VectorCurve<bytes / sizeof(double)> curve_;
};

int64_t narrow_map_forward(const SplineMapForward& args, int64_t row_begin, int64_t row_end) {
#ifdef FK_HAS_AVX512_CODE
  if (has_avx512()) return NarrowMap<64>(args).forward(row_begin, row_end);
  if (has_avx2()) return NarrowMap<32>(args).forward(row_begin, row_end);
#endif
  return NarrowMap<16>(args).forward(row_begin, row_end);
}

// Computes the scores of a tile from its exponentials with AVX2, and the largest score of each row.
void scores_in_fours(const VectorCurve<4>& curve, const SplineMapForward& args, uint64_t kept, double slack,
                     const SplineTile& t) {
  slack > 0 ? run_in<32, WideScores<true>>(t, curve, args.scores.factor, kept, slack)
            : run_in<32, WideScores<false>>(t, curve, args.scores.factor, kept, slack);
  for (int64_t i = 0; args.scores.keep_zeros && i < t.outer * t.inner; ++i) {
    if (t.d[i] == kMinusInfinity) t.f[i] = kMinusInfinity;
  }
  for (int64_t r = 0; !t.column && r < t.n_rows; ++r) {
    std::fill(t.f + r * t.inner + t.classes, t.f + (r + 1) * t.inner, kMinusInfinity);
  }
  largest_of_rows(t, t.f, t.score_top);
}

// ---- backward ------------------------------------------------------------------------------------------------------

// Replaces g by dL/dscore, from the upstream gradient in g and the softmax in f. Classes of probability 0 are excluded.
FK_VECTOR_CLONES void slopes_of_scores(const SplineTile& t, bool log_output) {
  for (int64_t i = 0; i < kSplineTileRows; ++i) t.shared[i] = 0;
  for (int64_t o = 0; o < t.outer; ++o) {
    const double* f = t.f + o * t.inner;
    double* g = t.g + o * t.inner;
    if (t.column) {
#pragma omp simd
      for (int64_t i = 0; i < kSplineTileRows; ++i) t.shared[i] += log_output ? g[i] : g[i] * f[i];
    } else {
      double sum = 0;
#pragma omp simd reduction(+ : sum)
      for (int64_t i = 0; i < t.inner; ++i) sum += log_output ? g[i] : g[i] * f[i];
      t.shared[o] = sum;
    }
  }
  for (int64_t o = 0; o < t.outer; ++o) {
    const double* f = t.f + o * t.inner;
    double* g = t.g + o * t.inner;
#pragma omp simd
    for (int64_t i = 0; i < t.inner; ++i) {
      const double shared = t.shared[t.column ? i : o];
      g[i] = log_output ? g[i] - f[i] * shared : f[i] * (g[i] - shared);
    }
  }
}

FK_VECTOR_CLONES void leave_out_impossible(const SplineTile& t) {
  const int64_t n = t.outer * t.inner;
#pragma omp simd
  for (int64_t i = 0; i < n; ++i) t.g[i] = t.f[i] == kMinusInfinity ? 0 : t.g[i];
}

void add_parameters(const SplineTile& t, SplineMapGradient& sums) {
  for (int64_t r = 0; r < t.n_rows; ++r) {
    for (int64_t c = 0; c < t.classes; ++c) {
      const int64_t i = r * t.row_stride + c * t.class_stride;
      const double g = t.g[i], s = t.u[i];
      double* of_piece = sums.coefficients.data() + 4 * t.piece[i];
      of_piece[0] += g;
      of_piece[1] += g * s;
      of_piece[2] += g * s * s;
      of_piece[3] += g * s * s * s;
      sums.factor += g * t.x[i];
      if (!sums.weight.empty()) {
        sums.weight[c] += g * t.x[i];
        sums.bias[c] += g;
      }
    }
  }
}

// Replaces dL/dscore in g by dL/dd of every class, and adds up the sums for e and T.
void slopes_of_exponents(const SplineMapBackward& args, int64_t row, const SplineTile& t, SplineMapGradient& sums) {
  const uint64_t kept = kept_bits_of(args.rows);
  const double share = 1 / static_cast<double>(t.classes);
  for (int64_t r = 0; r < t.n_rows; ++r) {
    const SplineRow<double>& of = t.row[r];
    double rest = 0, large = 0, of_floor = 0;
    for (int64_t c = 0; c < t.classes; ++c) {
      const int64_t i = r * t.row_stride + c * t.class_stride;
      const double p = spline_probability(t.e[i], of, kept);
      const bool is_large = p > kSplineLarge<double>;
      const double factor = args.scores.factor + (args.scores.weight ? args.scores.weight[c] : 0);
      double of_x = spline_grad_x(t.g[i], factor, t.slope[i], is_large ? of.complement : 1 - p);
      if (args.of_x) of_x += args.of_x[(row + r - args.scores.first_row) * t.classes + c];
      of_floor += spline_grad_floor(of_x, t.e[i], p, t.inverse[r], share);
      const double of_log_q = spline_grad_log_q(of_x, t.e[i], p, of);
      (is_large ? large : rest) += of_log_q;
      t.slope[i] = of_log_q;  // its old value is not needed any more
    }
    const double complement = t.rest[r] * t.inverse[r];
    double of_temperature = 0;
    for (int64_t c = 0; c < t.classes; ++c) {
      const int64_t i = r * t.row_stride + c * t.class_stride;
      const bool is_large = spline_probability(t.e[i], of, kept) > kSplineLarge<double>;
      t.g[i] = spline_grad_exponent(t.slope[i], t.e[i], t.inverse[r], is_large, large, rest, complement);
      of_temperature -= t.e[i] == 0 ? 0 : t.g[i] * t.d[i];
    }
    sums.floor += of_floor;
    sums.temperature += of_temperature / args.rows.temperature;
  }
}

// Replaces dL/dd by dL/dz, or by dL/dp for probabilities.
void slopes_of_input(const SplineMapBackward& args, int64_t row, const SplineTile& t) {
  const double beta = inverse_temperature<double>(args.rows.temperature);
  const int64_t n = t.outer * t.inner;
  for (int64_t i = 0; i < n; ++i) t.g[i] *= beta;
  if (!args.rows.is_probs) return;
  // At p = 0 the gradient is not defined; the code returns 0.
  read_tile(t, args.rows.input, args.rows.storage, row, t.f, 0);
  for (int64_t i = 0; i < n; ++i) t.g[i] = t.f[i] == 0 ? 0 : t.g[i] / t.f[i];
}

}  // namespace

SplineMapGradient::SplineMapGradient(int64_t knots, int64_t classes)
    : coefficients((knots + 1) * 4), weight(classes), bias(classes) {}

void SplineMapGradient::add(const SplineMapGradient& other) {
  factor += other.factor;
  temperature += other.temperature;
  floor += other.floor;
  for (size_t i = 0; i < coefficients.size(); ++i) coefficients[i] += other.coefficients[i];
  for (size_t c = 0; c < weight.size(); ++c) {
    weight[c] += other.weight[c];
    bias[c] += other.bias[c];
  }
}

int64_t spline_map_forward(const SplineMapForward& args, int64_t row_begin, int64_t row_end) {
  if (is_narrow(args)) return narrow_map_forward(args, row_begin, row_end);
  SplineScratch scratch(args.rows.classes, /*arrays=*/5);
  const CurveTables tables(args.curve);
  // For narrow types the grid keeps the order: distinct inputs are many steps apart. For double, scores that rise
  // within each step keep it if their rounding error is small enough.
  SplineInput input = args.rows;
  const bool wide = input.storage == SplineStorage::kDouble;
  const double slack = args.keep_order && wide ? slack_of_steps(args) : 0;
  input.in_steps = args.keep_order && (!wide || slack > 0);
  const double grid = !input.in_steps ? 0 : wide ? kSplineFineGrid : kSplineGrid;
  const bool sorts = args.keep_order && !input.in_steps;
  RowOrder order(sorts && args.rows.classes > kFewPairs ? args.rows.classes : 0);
  const bool in_fours = scores_fit_registers(args) && tables.in_fours;
  int64_t invalid = -1;
  double scale[kSplineTileRows], shift[kSplineTileRows];
  for (int64_t row = row_begin; row < row_end; row += scratch.rows()) {
    const auto t = scratch.tile(std::min(scratch.rows(), row_end - row));
    read_logits(args.rows, row, t);
    largest_of_rows(t, t.d, t.top);
    exponents_of_logits(input, t, grid);
    validate_rows(args, row, t);
    in_fours ? scores_in_fours(*tables.in_fours, args, kept_bits_of(input), slack, t)
             : scores_of_exponents(input, tables, args.scores, row, slack, t);
    const int64_t rows = t.column ? kSplineTileRows : t.n_rows;
    if (args.log_output) {
      softmax_of_scores</*keep=*/true>(t);
      for (int64_t r = 0; r < rows; ++r) scale[r] = 1, shift[r] = -(t.score_top[r] + std::log(t.sum[r]));
    } else {
      slack > 0 ? softmax_of_scores</*keep=*/false, /*in_order=*/true>(t) : softmax_of_scores</*keep=*/false>(t);
      for (int64_t r = 0; r < rows; ++r) scale[r] = 1 / t.sum[r], shift[r] = 0;
    }
    leave_out_invalid(t, row, scale, shift, invalid);
    if (!sorts) {
      write_scaled(t, scale, shift, args.output, args.to, row);
      continue;
    }
    scale_and_shift(t, scale, shift);
    write_tile(t, keep_order(args.rows, row, t, order), args.output, args.to, row);
  }
  return invalid;
}

void spline_map_backward(const SplineMapBackward& args, int64_t row_begin, int64_t row_end, SplineMapGradient& sums) {
  SplineScratch scratch(args.rows.classes, /*arrays=*/7);
  const CurveTables tables(args.curve);
  double scale[kSplineTileRows], shift[kSplineTileRows] = {};
  for (int64_t row = row_begin; row < row_end; row += scratch.rows()) {
    const auto t = scratch.tile(std::min(scratch.rows(), row_end - row));
    features_of_rows(args.rows, row, t);
    curve_of_tile<true>(t, tables);
    scores_of_tile(args.scores, row, t);
    largest_of_rows(t, t.f, t.score_top);
    read_tile(t, args.grad_output, args.of_grad, row, t.g, 0);
    leave_out_impossible(t);
    softmax_of_scores<false>(t);
    for (int64_t r = 0; r < kSplineTileRows; ++r) scale[r] = t.column || r < t.n_rows ? 1 / t.sum[r] : 0;
    scale_and_shift(t, scale, shift);
    slopes_of_scores(t, args.log_output);
    if (args.grad_scores) write_tile(t, t.g, args.grad_scores, SplineStorage::kDouble, row - args.scores.first_row);
    add_parameters(t, sums);
    slopes_of_exponents(args, row, t, sums);
    if (!args.grad_input) continue;
    slopes_of_input(args, row, t);
    write_tile(t, t.g, args.grad_input, args.rows.storage, row);
  }
}

void spline_log_probs(const SplineInput& rows, double* output, int64_t row_begin, int64_t row_end, double* odds) {
  SplineScratch scratch(rows.classes, /*arrays=*/4);
  for (int64_t row = row_begin; row < row_end; row += scratch.rows()) {
    const auto t = scratch.tile(std::min(scratch.rows(), row_end - row));
    features_of_rows(rows, row, t);
    write_tile(t, t.x, output, SplineStorage::kDouble, row - row_begin);
    if (odds) write_tile(t, t.u, odds, SplineStorage::kDouble, row - row_begin);
  }
}

}  // namespace focalkern::cpu
