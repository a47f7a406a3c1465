// The statistics of a row (math/row_sums.h) from its sums.
#pragma once

#include "cuda/common.cuh"
#include "cuda/row_groups.cuh"
#include "cuda/row_loss.cuh"
#include "kernels/row_sums.h"

namespace focalkern::cuda {
namespace {

// Whether a logit of the row is NaN; then the sum is NaN, too. Every thread of the block calls it.
template <typename Scalar>
__device__ __forceinline__ bool has_nan(const Row<Scalar>& row, const RowGroup& group, compute_t<Scalar> sum) {
  int first = kNoClass;
  if (row.is_live && sum != sum) {
    for (int j = row.index; j < row.classes; j += row.lanes) {
      const compute_t<Scalar> z = row.z(j);
      if (z != z && j < first) first = j;
    }
  }
  return group.min(first) != kNoClass;
}

template <typename Scalar>
__device__ __forceinline__ void write_statistics(const RowStatisticsResult<compute_t<Scalar>>& to,
                                                 const Row<Scalar>& row,
                                                 const SumsBesideLargest<compute_t<Scalar>>& sums, bool is_nan) {
  using Real = compute_t<Scalar>;
  const bool counts = row.label != kIgnored;
  Real log_p = 0, entropy = 0, lse = 0;
  int predicted = -1;
  if (counts) {
    // NaN for a logit of infinity, as with a NaN.
    const Real rest = sums.rest + Real(0) * exp_base(sums.max);
    const RowEntropy<Real> found = row_entropy(rest, sums.second);
    entropy = found.entropy;
    lse = sums.max + found.log_sum;
    log_p = row.label >= 0 ? (row.z(row.label) - sums.max) - found.log_sum : kNaN<Real>;
    if (!is_nan) predicted = sums.largest == kNoClass ? 0 : sums.largest;
  }
  to.log_p[row.row] = log_p;
  to.entropy[row.row] = entropy;
  to.lse[row.row] = lse;
  to.predicted[row.row] = predicted;
  to.correct[row.row] = counts && predicted == row.label;
  to.counts[row.row] = counts;
}

}  // namespace
}  // namespace focalkern::cuda
