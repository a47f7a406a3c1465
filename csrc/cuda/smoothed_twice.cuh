// The sums of smoothed_numbers.cuh for a row of adjacent classes that a warp or the block reads twice, for the largest
// logit and for the sums. The second read finds most rows in the cache.
#pragma once

#include "cuda/common.cuh"
#include "cuda/largest_logit.cuh"
#include "cuda/row_groups.cuh"
#include "cuda/smoothed_numbers.cuh"

namespace focalkern::cuda {

// The sums of a thread that adds many classes, a few at a time.
template <int kGamma>
class SmoothedTotals {
 public:
  // Leaves zeros in `part`.
  __device__ __forceinline__ void add(SmoothedNumbers& part) {
    rest_.add(1, part.rest);
    depth_ += static_cast<double>(part.depth);
    part.rest = part.depth = 0;
    if constexpr (kGamma >= 1) {
      fall_.add(1, part.fall);
      part.fall = 0;
    }
    if constexpr (kGamma == 2) {
      squares_.add(1, part.squares);
      fall2_.add(1, part.fall2);
      part.squares = part.fall2 = 0;
    }
  }
  __device__ __forceinline__ void finish(SmoothedNumbers& part) {
    add(part);
    part.rest = rest_.sum;
    part.depth = static_cast<float>(depth_);
    if constexpr (kGamma >= 1) part.fall = fall_.sum;
    if constexpr (kGamma == 2) {
      part.squares = squares_.sum;
      part.fall2 = fall2_.sum;
    }
  }

 private:
  CompensatedSum<float> rest_, fall_, squares_, fall2_;
  double depth_ = 0;  // infinite for a masked class, which a compensated sum would turn into NaN
};

// Calls take(vector) for the vectors of a thread, kAtOnce at a time while the whole warp has as many, and
// take_one(logit) for the classes before and after the vectors.
template <int kAtOnce, typename Scalar, typename Take, typename TakeOne>
__device__ __forceinline__ void each_vector(const Row<Scalar>& row, Take take, TakeOne take_one) {
  const Vectors vectors(row);
  if (row.index < vectors.head) take_one(load_as_compute(row.logits[row.index]));
  if (vectors.tail + row.index < row.classes) take_one(load_as_compute(row.logits[vectors.tail + row.index]));
  const auto* at = reinterpret_cast<const uint4*>(row.logits + vectors.head) + row.index;
  int left = vectors.count - row.index;               // beyond the thread's first
  const int of_warp = kWarp - 1 - row.index % kWarp;  // by how much the warp's last thread has fewer
#pragma unroll 1
  for (; left - of_warp > (kAtOnce - 1) * row.lanes; left -= kAtOnce * row.lanes, at += kAtOnce * row.lanes) {
    uint4 loaded[kAtOnce];
#pragma unroll
    for (int k = 0; k < kAtOnce; ++k) loaded[k] = at[k * row.lanes];
#pragma unroll
    for (int k = 0; k < kAtOnce; ++k) take(loaded[k]);
  }
#pragma unroll 1
  for (; left > 0; left -= row.lanes, at += row.lanes) take(*at);
}

template <typename Scalar>
__device__ __forceinline__ float largest_of_thread(const Row<Scalar>& row) {
  LargestOfVectors<Scalar> max;
  float beside = -kInfinity<float>;
  each_vector<4>(row, [&](uint4 vector) { max.add(vector); }, [&](float z) { beside = fmax(beside, z); });
  return fmax(max.value(), beside);
}

// The sums of a thread. max: that of the row. The first part has up to two more classes than kFewClasses, those beside
// the vectors.
template <int kGamma, typename Scalar>
__device__ __forceinline__ SmoothedNumbers smoothed_numbers(const Row<Scalar>& row, float max, float share) {
  constexpr int kSize = kVectorSize<Scalar>;
  return SmoothedTerms<kGamma>(max, share).of([&](SmoothedNumbers& sums, auto take, auto) {
    SmoothedTotals<kGamma> totals;
    int added = 0;
    const auto take_vector = [&](uint4 vector) {
      float values[kSize];
      unpack<Scalar>(vector, values);
#pragma unroll
      for (float z : values) take(z);
      added += kSize;
      if (added < kFewClasses) return;
      totals.add(sums);
      added = 0;
    };
    each_vector<2>(row, take_vector, take);
    totals.finish(sums);
  });
}

// The sums of the parts of a row.
__device__ __forceinline__ SmoothedNumbers sum_of(const SmoothedNumbers* parts, int count) {
  SmoothedNumbers sums = parts[0];
  for (int k = 1; k < count; ++k) {
    sums.rest += parts[k].rest;
    sums.ties += parts[k].ties;
    sums.depth += parts[k].depth;
    sums.fall += parts[k].fall;
    sums.squares += parts[k].squares;
    sums.fall2 += parts[k].fall2;
  }
  return sums;
}

}  // namespace focalkern::cuda
