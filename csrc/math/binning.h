// Confidence to bin, for the three named estimators of the calibration error, and the gap of a bin.
//
//   equal_width         (k / M, (k + 1) / M], 0 in the first bin; k / M is rounded to the type of the confidence
//   equal_mass          confidences in ascending order, ties by row, cut into M runs whose sizes differ by one at most
//   equal_mass_interp   edges at the positions b * N / M of the sorted confidences, linearly interpolated, and bins
//                       (lo, hi]: the lowest confidence is on the first edge and falls in no bin
//
// and for a stream of samples, whose order statistics are not known, the buckets of a sketch.
//
// Comparisons are made in the type of the confidence, sums over samples in double and int64_t.
#pragma once

#include <cmath>

#include "math/portable.h"

namespace focalkern {

enum class BinEstimator : int32_t { kEqualWidth, kEqualMass, kEqualMassInterp };

// The edge k / M. The quotient is formed in double, so that it is rounded to Real once.
template <typename Real>
FK_HOST_DEVICE Real equal_width_edge(int64_t k, int64_t n_bins) {
  return static_cast<Real>(static_cast<double>(k) / static_cast<double>(n_bins));
}

// Bin of a confidence in [0, 1].
template <typename Real>
FK_HOST_DEVICE int64_t equal_width_bin(Real confidence, int64_t n_bins) {
  // The product may be off by one at an edge, either way; the edges themselves decide.
  int64_t bin = static_cast<int64_t>(confidence * static_cast<Real>(n_bins));
  bin = bin > n_bins - 1 ? n_bins - 1 : bin;
  bin -= bin > 0 && confidence <= equal_width_edge<Real>(bin, n_bins) ? 1 : 0;
  bin += bin < n_bins - 1 && confidence > equal_width_edge<Real>(bin + 1, n_bins) ? 1 : 0;
  return bin;
}

// Rank of the first sample of a bin among the sorted confidences; `rows` for bin == n_bins. The first rows % n_bins
// bins are one sample larger than the others.
FK_HOST_DEVICE int64_t equal_mass_begin(int64_t bin, int64_t rows, int64_t n_bins) {
  const int64_t larger = rows % n_bins;
  return bin * (rows / n_bins) + (bin < larger ? bin : larger);
}

// Where edge b of equal_mass_interp lies: `fraction` of the way from sorted[rank] to sorted[next].
struct InterpolatedRank {
  int64_t rank;
  int64_t next;
  double fraction;
};
FK_HOST_DEVICE InterpolatedRank equal_mass_interp_rank(int64_t edge, int64_t rows, int64_t n_bins) {
  const double position = static_cast<double>(edge) * (static_cast<double>(rows) / static_cast<double>(n_bins));
  // Positions beyond the last sample, rows - 1, all mean the last sample.
  if (edge == n_bins || position >= static_cast<double>(rows - 1)) return {rows - 1, rows - 1, 0.0};
  const int64_t rank = static_cast<int64_t>(position);
  return {rank, rank + 1, position - static_cast<double>(rank)};
}
template <typename Real>
FK_HOST_DEVICE Real equal_mass_interp_edge(Real lower, Real upper, double fraction) {
  const double lo = static_cast<double>(lower);
  const Real edge = static_cast<Real>((static_cast<double>(upper) - lo) * fraction + lo);
  return edge > upper ? upper : edge;  // rounding must not carry an edge past its neighbour
}

// Bucket of a confidence in a sketch, ascending with the confidence: with n buckets, n / 3 of them lie uniformly in
// sqrt(c) below 1/2, and the others uniformly in the fourth root of 1 - c above it; the width is the same on both sides
// of 1/2. Networks are sure of most of their answers, but it is the wrong ones among a bucket's samples that make a cut
// inside it uncertain: the spacing follows the mass where it is dense, and still resolves the middle.
template <typename Real>
FK_HOST_DEVICE int32_t sketch_bucket(Real confidence, int64_t n_buckets) {
  const Real n = static_cast<Real>(n_buckets);
  const Real u = Real(1) - confidence;
  const int32_t middle = static_cast<int32_t>(n_buckets / 3);  // rounding must not carry one half past the other
  const int32_t last = static_cast<int32_t>(n_buckets - 1);
  const int32_t low = static_cast<int32_t>(std::sqrt(confidence + confidence) * (n / Real(3)));
  const int32_t high = static_cast<int32_t>(n - std::sqrt(std::sqrt(u + u)) * (n * Real(2) / Real(3)));
  const int32_t below = low < middle ? low : middle;
  const int32_t above = high < middle ? middle : high > last ? last : high;
  return confidence <= Real(0.5) ? below : above;
}

// The sums of one bin. |acc - conf| |B| is the modulus of the sum of conf - correct, so that neither the
// accuracy nor the mean confidence is needed by itself.
struct BinSums {
  int64_t count;
  double excess;  // sum over the bin of confidence - correct
};
// |B| / N * |acc - conf|
FK_HOST_DEVICE double weighted_gap(BinSums bin, int64_t rows) {
  const double size = bin.excess < 0 ? -bin.excess : bin.excess;
  return size / static_cast<double>(rows);
}
// |acc - conf|; an empty bin has no gap.
FK_HOST_DEVICE double gap(BinSums bin) {
  const double size = bin.excess < 0 ? -bin.excess : bin.excess;
  return bin.count == 0 ? 0.0 : size / static_cast<double>(bin.count);
}

}  // namespace focalkern
