// Softmax and loss of a tile of rows, and the basis of the curve, for the sums of a fit.
#pragma once

#include "cpu/simd/vector.h"
#include "cpu/spline_scores.h"

namespace focalkern::cpu {
namespace {

using Four = simd_t<double, 4>;
constexpr int64_t kSize = SplineCurveSums::kSize;

FK_HOST_DEVICE double total_of(const Four& terms) { return (terms[0] + terms[1]) + (terms[2] + terms[3]); }
FK_HOST_DEVICE void add_to(double* sums, const Four& terms) { store_simd(load_simd<Four>(sums) + terms, sums); }
FK_HOST_DEVICE Four powers_of(double s) {
  const double square = s * s;
  return Four{1.0, s, square, square * s};
}

// basis[piece][k]: coefficients of (a, f_1, ..., f_m); that of a is 0.
struct Basis {
  explicit Basis(int64_t knots, const double* of) {
    for (int64_t piece = 0; piece <= knots; ++piece) {
      for (int64_t k = 0; k < 4; ++k) {
        for (int64_t j = 0; j < knots; ++j) terms[piece][k][1 + j] = of[(piece * 4 + k) * knots + j];
      }
    }
  }
  double terms[kSize][4][kSize] = {};
};

// Adds log sum of each row to t.shared. A NaN sum gives NaN.
FK_VECTOR_CLONES void add_log_sums(const SplineTile& t) {
#pragma omp simd
  for (int64_t r = 0; r < t.n_rows; ++r) t.shared[r] += logarithm_of_normal(t.sum[r]) + (t.sum[r] - t.sum[r]);
}

// Adds D x in the column layout.
FK_VECTOR_CLONES void add_matrix(const double* matrix, const SplineTile& t) {
  for (int64_t j = 0; j < t.classes; ++j) {
    double* f = t.f + j * kSplineTileRows;
    for (int64_t i = 0; i < kSplineTileRows; i += 16) {
      Four score[4];
      for (int64_t q = 0; q < 4; ++q) score[q] = load_simd<Four>(f + i + 4 * q);
      for (int64_t k = 0; k < t.classes; ++k) {
        const double* x = t.x + k * kSplineTileRows + i;
        for (int64_t q = 0; q < 4; ++q) score[q] += matrix[j * t.classes + k] * load_simd<Four>(x + 4 * q);
      }
      for (int64_t q = 0; q < 4; ++q) store_simd(score[q], f + i + 4 * q);
    }
  }
}

// Computes p of the tile in f, not yet divided by the sum, and the loss of each row in t.shared.
void softmax_and_loss(const SplineInput& input, const CurveTables& curve, const SplineFitScores& scores,
                      const SplineTargets& targets, int64_t row, const SplineTile& t) {
  features_of_rows(input, row, t);
  curve_of_tile<false>(t, curve);
  scores_of_tile(scores, row, t);
  if (scores.matrix) add_matrix(scores.matrix, t);
  largest_of_rows(t, t.f, t.score_top);
  for (int64_t r = 0; r < t.n_rows; ++r) {
    t.shared[r] = t.score_top[r] - t.f[r * t.row_stride + targets.target[row + r] * t.class_stride];
  }
  softmax_of_scores<false>(t);
  add_log_sums(t);
}

}  // namespace
}  // namespace focalkern::cpu
