// Confidence to bin, for the three named estimators of the calibration error, and |acc - conf| of a bin.
//
//   equal_width         (k / M, (k + 1) / M], 0 in the first bin; k / M is rounded to the type of the confidence
//   equal_mass          confidences in ascending order, ties by row, cut into M runs whose sizes differ by one at most
//   equal_mass_interp   edges at the positions b * N / M of the sorted confidences, linearly interpolated, and bins
//                       (lo, hi]: the lowest confidence is on the first edge and falls in no bin
//
// and, for a stream of samples, whose order statistics are unknown, the buckets of a sketch.
//
// Comparisons are made in the type of the confidence, sums over samples in double and int64_t.
#pragma once

#include <cmath>

#include "math/portable.h"

namespace focalkern {

enum class BinEstimator : int32_t { kEqualWidth, kEqualMass, kEqualMassInterp };

// The edge k / M. The quotient is computed in double, so that only one rounding to Real occurs.
template <typename Real>
FK_HOST_DEVICE Real equal_width_edge(int64_t k, int64_t n_bins) {
  return static_cast<Real>(static_cast<double>(k) / static_cast<double>(n_bins));
}

// Bin of a confidence in [0, 1].
template <typename Real>
FK_HOST_DEVICE int64_t equal_width_bin(Real confidence, int64_t n_bins) {
  // The product may be off by one at an edge, in either direction; comparing with the edges corrects it.
  int64_t bin = static_cast<int64_t>(confidence * static_cast<Real>(n_bins));
  bin = bin > n_bins - 1 ? n_bins - 1 : bin;
  bin -= bin > 0 && confidence <= equal_width_edge<Real>(bin, n_bins) ? 1 : 0;
  bin += bin < n_bins - 1 && confidence > equal_width_edge<Real>(bin + 1, n_bins) ? 1 : 0;
  return bin;
}

// Rank of the first sample of a bin among the sorted confidences; `rows` for bin == n_bins. The first rows % n_bins
// bins hold one sample more than the others.
FK_HOST_DEVICE int64_t equal_mass_begin(int64_t bin, int64_t rows, int64_t n_bins) {
  const int64_t larger = rows % n_bins;
  return bin * (rows / n_bins) + (bin < larger ? bin : larger);
}

// The position of edge b of equal_mass_interp: `fraction` of the way from sorted[rank] to sorted[next].
struct InterpolatedRank {
  int64_t rank;
  int64_t next;
  double fraction;
};
FK_HOST_DEVICE InterpolatedRank equal_mass_interp_rank(int64_t edge, int64_t rows, int64_t n_bins) {
  const double position = static_cast<double>(edge) * (static_cast<double>(rows) / static_cast<double>(n_bins));
  // A position past the last sample, rows - 1, means the last sample.
  if (edge == n_bins || position >= static_cast<double>(rows - 1)) return {rows - 1, rows - 1, 0.0};
  const int64_t rank = static_cast<int64_t>(position);
  return {rank, rank + 1, position - static_cast<double>(rank)};
}
template <typename Real>
FK_HOST_DEVICE Real equal_mass_interp_edge(Real lower, Real upper, double fraction) {
  const double lo = static_cast<double>(lower);
  const Real edge = static_cast<Real>((static_cast<double>(upper) - lo) * fraction + lo);
  return edge > upper ? upper : edge;  // rounding must not push an edge past the next sample
}

// Bucket of a confidence in a sketch, ascending with the confidence c. Of n buckets, n / 3 divide c < 1/2 uniformly in
// sqrt(c); the others divide c > 1/2 uniformly in the fourth root of 1 - c. The widths agree at 1/2. Most confidences
// of a network are near 1, so buckets are narrow there. But the error of a cut inside a bucket comes from the bucket's
// wrong predictions, so the middle needs resolution, too.
template <typename Real>
FK_HOST_DEVICE int32_t sketch_bucket(Real confidence, int64_t n_buckets) {
  const Real n = static_cast<Real>(n_buckets);
  const Real u = Real(1) - confidence;
  const int32_t middle = static_cast<int32_t>(n_buckets / 3);  // rounding must not exceed a half's buckets
  const int32_t last = static_cast<int32_t>(n_buckets - 1);
  const int32_t low = static_cast<int32_t>(std::sqrt(confidence + confidence) * (n / Real(3)));
  const int32_t high = static_cast<int32_t>(n - std::sqrt(std::sqrt(u + u)) * (n * Real(2) / Real(3)));
  const int32_t below = low < middle ? low : middle;
  const int32_t above = high < middle ? middle : high > last ? last : high;
  return confidence <= Real(0.5) ? below : above;
}

// The sums of one bin. |acc - conf| |B| is the absolute value of the sum of conf - correct, so the accuracy and the
// mean confidence are not needed separately.
struct BinSums {
  int64_t count;
  double excess;  // sum over the bin of confidence - correct
};
// |B| / N * |acc - conf|
FK_HOST_DEVICE double weighted_gap(BinSums bin, int64_t rows) {
  const double size = bin.excess < 0 ? -bin.excess : bin.excess;
  return size / static_cast<double>(rows);
}
// |acc - conf|; 0 for an empty bin.
FK_HOST_DEVICE double gap(BinSums bin) {
  const double size = bin.excess < 0 ? -bin.excess : bin.excess;
  return bin.count == 0 ? 0.0 : size / static_cast<double>(bin.count);
}

}  // namespace focalkern
