// The sums of shared_row.cuh for a row whose logits and shares a warp keeps in registers: the largest class is known
// before the first exponential, so no sum is rescaled.
#pragma once

#include "cuda/common.cuh"
#include "cuda/row_in_registers.cuh"
#include "cuda/shared_row.cuh"

namespace focalkern::cuda {

// The part of a row of a lane. A share is kept target + spread.
template <int kGamma, typename Scalar>
class SharedRowOfLane {
  static constexpr int kSize = kVectorSize<Scalar>;

 public:
  __device__ __forceinline__ SharedRowOfLane(const Scalar* own, const Scalar* own_targets, int left)
      : row_(own, left), targets_(own_targets, left) {}

  // Returns the number of the row that the lane keeps; `largest` is the first of the largest classes.
  __device__ __forceinline__ float number(float kept, float spread, int lane, int& largest) const {
    const float max = row_.largest(), base = exp_base(max);
    int mine = kNoClass;
    row_.template each<true>([&](float z, int v, int k) {
      if (z == max) mine = v * kWarp * kSize + k;
    });
    // No class is the largest if none is above -inf.
    largest = mine == kNoClass || max == -kInfinity<float> ? kNoClass : mine + lane * kSize;
    for (int offset = kWarp / 2; offset > 0; offset /= 2) {
      const int other = __shfl_xor_sync(kFullWarp, largest, offset);
      largest = other < largest ? other : largest;
    }
    const int apart = largest - lane * kSize;
    SharedSums<float> sums = {};
    float targets[kSize];
    row_.each([&](float z, int v, int k) {
      if (k == 0) unpack<Scalar>(targets_.at[v], targets);
      const bool is_apart = v * kWarp * kSize + k == apart;
      const float x = base - z, e = is_apart ? 0.0f : summand(-x), far = fmin(x, 1e4f);
      const float t = is_apart ? 0.0f : kept * targets[k] + spread;
      sums.add<kGamma>(x, e, far, t);
    });
    float numbers[] = {sums.rest, sums.share, sums.once, sums.twice, sums.depth, sums.fall, sums.fall2};
    const float number = sum_over_warp(numbers, lane);
    static_assert(offsetof(SharedSums<float>, max) == 7 * sizeof(float), "the numbers of a warp come first");
    return lane == 7 * kLanesOfNumber ? max : number;
  }

 private:
  RowOfLane<Scalar> row_;
  VectorsOfLane<Scalar> targets_;
};

}  // namespace focalkern::cuda
