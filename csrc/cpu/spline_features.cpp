// Sums over rows for the features of spline scaling: the loss of robust temperature scaling, the histogram of log-odds,
// and the spread of the logits.
//
// Memory: one read of the logits, a tile of rows at a time (spline_tile.h).

#include <cmath>

#include "cpu/simd/vector.h"
#include "cpu/spline_tile.h"

namespace focalkern::cpu {
namespace {

// Sums of e^(beta d) and of d e^(beta d) per row, into t.sum and t.shared. d = z - top is finite.
FK_VECTOR_CLONES void sums_at_beta(const SplineTile& t, double beta) {
  if (t.column) {
    for (int64_t i = 0; i < kSplineTileRows; ++i) t.sum[i] = t.shared[i] = 0;
    for (int64_t o = 0; o < t.outer; ++o) {
      const double* d = t.d + o * kSplineTileRows;
#pragma omp simd
      for (int64_t i = 0; i < kSplineTileRows; ++i) {
        const double e = bounded_exponential(d[i] * beta);
        t.sum[i] += e;
        t.shared[i] += e * d[i];
      }
    }
  } else {
    for (int64_t o = 0; o < t.outer; ++o) {
      const double* d = t.d + o * t.inner;
      double sum = 0, with_d = 0;
#pragma omp simd reduction(+ : sum, with_d)
      for (int64_t i = 0; i < t.inner; ++i) {
        const double e = bounded_exponential(d[i] * beta);
        sum += e;
        with_d += e * d[i];
      }
      t.sum[o] = sum;
      t.shared[o] = with_d;
    }
  }
}

// The losses of the rows at 1 / T, whose targets have these z - top, and their derivatives in 1 / T.
FK_VECTOR_CLONES void losses_at_beta(const SplineTile& t, const double* of_target, double beta, double floor,
                                     double* losses, double* slopes) {
  const auto classes = static_cast<double>(t.classes);
#pragma omp simd
  for (int64_t r = 0; r < t.n_rows; ++r) {
    const auto loss = spline_temperature_loss(of_target[r], beta, t.sum[r], t.shared[r], floor, classes);
    losses[r] = loss.value;
    slopes[r] = loss.slope;
  }
}

// z - top, at least -lowest.
FK_VECTOR_CLONES void falls_of_tile(const SplineTile& t, double lowest) {
  for (int64_t o = 0; o < t.outer; ++o) {
    double* d = t.d + o * t.inner;
#pragma omp simd
    for (int64_t i = 0; i < t.inner; ++i) {
      const double fall = d[i] - t.top[t.column ? i : o];
      d[i] = fall > -lowest ? fall : -lowest;
    }
  }
}

}  // namespace

void spline_temperature_sums(const SplineInput& rows, const SplineTargets& targets, const double* betas,
                             int64_t n_betas, int64_t row_begin, int64_t row_end, double* values, double* slopes) {
  SplineScratch scratch(rows.classes, /*arrays=*/1);
  double of_target[kSplineTileRows], of_rows[kSplineTileRows], slopes_of_rows[kSplineTileRows];
  for (int64_t row = row_begin; row < row_end; row += scratch.rows()) {
    const auto tile = scratch.tile(std::min(scratch.rows(), row_end - row));
    read_logits(rows, row, tile);
    largest_of_rows(tile, tile.d, tile.top);
    falls_of_tile(tile, kSplineLowestFall);
    for (int64_t r = 0; r < tile.n_rows; ++r) {
      of_target[r] = tile.d[r * tile.row_stride + targets.target[row + r] * tile.class_stride];
    }
    for (int64_t b = 0; b < n_betas; ++b) {
      sums_at_beta(tile, betas[b]);
      losses_at_beta(tile, of_target, betas[b], rows.floor, of_rows, slopes_of_rows);
      for (int64_t r = 0; r < tile.n_rows; ++r) {
        values[b] += targets.weight[row + r] * of_rows[r];
        slopes[b] += targets.weight[row + r] * slopes_of_rows[r];
      }
    }
  }
}

void spline_histogram(const SplineInput& rows, const double* weight, int64_t row_begin, int64_t row_end,
                      double* counts) {
  SplineScratch scratch(rows.classes, /*arrays=*/4);
  for (int64_t row = row_begin; row < row_end; row += scratch.rows()) {
    const auto tile = scratch.tile(std::min(scratch.rows(), row_end - row));
    features_of_rows(rows, row, tile);
    for (int64_t r = 0; r < tile.n_rows; ++r) {
      const double of_row = weight[row + r];
      for (int64_t c = 0; c < rows.classes; ++c) {
        const int64_t i = r * tile.row_stride + c * tile.class_stride;
        const double p = tile.e[i] * tile.row[r].scale + tile.row[r].floor;
        const double complement = p > kSplineLarge<double> ? tile.row[r].complement : 1 - p;
        const double place = (tile.u[i] + kSplineHistogramEnd) * kSplineBinsPerUnit;
        counts[static_cast<int64_t>(std::clamp(place, 0.0, kSplineBins - 1.0))] += of_row * p * complement;
      }
    }
  }
}

double spline_spread(const SplineInput& rows, const double* weight, double scale, double lowest, int64_t row_begin,
                     int64_t row_end) {
  SplineScratch scratch(rows.classes, /*arrays=*/1);
  double sum = 0;
  for (int64_t row = row_begin; row < row_end; row += scratch.rows()) {
    const auto tile = scratch.tile(std::min(scratch.rows(), row_end - row));
    read_logits(rows, row, tile);
    largest_of_rows(tile, tile.d, tile.top);
    falls_of_tile(tile, lowest * scale);
    for (int64_t r = 0; r < tile.n_rows; ++r) {
      const double* d = tile.d + r * tile.row_stride;
      double mean = 0, squares = 0;
      for (int64_t c = 0; c < rows.classes; ++c) mean += d[c * tile.class_stride];
      mean /= static_cast<double>(rows.classes);
      for (int64_t c = 0; c < rows.classes; ++c) {
        const double away = (d[c * tile.class_stride] - mean) / scale;
        squares += away * away;
      }
      sum += weight[row + r] * (squares / static_cast<double>(rows.classes));
    }
  }
  return sum;
}

}  // namespace focalkern::cpu
