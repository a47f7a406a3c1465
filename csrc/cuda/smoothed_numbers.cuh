// The sums of smoothed_row.cuh for a row whose largest logit m is known before the first exponential, so that no sum is
// rescaled. With c = log2 e and b = m c, rounded, one fused operation gives t = z c - b. Then e' = 2^t is e 2^d for the
// rounding error d = m c - b, for which the sums are corrected once per row.
#pragma once

#include "cuda/common.cuh"
#include "cuda/row_in_registers.cuh"
#include "cuda/smoothed_row.cuh"

namespace focalkern::cuda {

constexpr float kLog2E = 1.44269504f;
constexpr float kLn2 = 0.693147181f;

// The order is that in which a warp keeps them.
struct SmoothedNumbers {
  float rest;     // sum of e', without classes that equal the largest
  float ties;     // number of those classes
  float depth;    // of s t / c
  float fall;     // of e' t
  float squares;  // of e'^2
  float fall2;    // of e'^2 t
  float error;    // d
  float max;      // m

  __device__ __forceinline__ SmoothedSums<float> sums(float share, float classes) const {
    const float factor = power_of_two(-error), factor2 = factor * factor;
    const float of_rest = factor * rest + (ties - 1), of_squares = factor2 * squares;
    return {max,
            of_rest,
            of_squares - 1,
            share * classes * (error * kLn2) - depth,
            (error * (of_rest + 1) - factor * fall) * kLn2,
            (error * of_squares - factor2 * fall2) * kLn2,
            kNoClass};
  }
};

template <int kGamma>
class SmoothedTerms {
 public:
  __device__ __forceinline__ SmoothedTerms(float max, float share)
      : max_(max), share_(share), is_near_(fabsf(max) < kNear), base_(is_near_ ? max * kLog2E : exp_base(max)) {}

  // each(take) calls take(logit) for some classes of the row.
  template <typename Each>
  __device__ __forceinline__ SmoothedNumbers of(Each each) const {
    SmoothedNumbers sums;
    if (is_near_) {
      sums = {0, 0, 0, 0, 0, 0, fmaf(max_, kLog2E, -base_), max_};
      const float of_t = share_ * kLn2;
      each([&](float z) {
        const float t = fmaf(z, kLog2E, -base_);
        add(sums, z, t, t, of_t * t);
      });
      // Otherwise a logit is -inf or NaN, or t overflows.
      if (sums.depth > -kInfinity<float>) return sums;
    }
    // Without the error in the depth, which is large or not finite here.
    sums = {0, 0, 0, 0, 0, 0, is_near_ ? sums.error : 0.0f, max_};
    each([&](float z) {
      const float x = z - exp_base(max_), t = is_near_ ? fmaf(z, kLog2E, -base_) : x * kLog2E;
      add(sums, z, t, fmaxf(t, kLeast), share_ * x);
    });
    return sums;
  }

 private:
  static constexpr float kNear = 1024;    // below this magnitude of m, |d| < 1e-4; beyond, d is 0
  static constexpr float kLeast = -1e4f;  // 2^kLeast is 0, and its product with a finite number, too

  static __device__ __forceinline__ void add(SmoothedNumbers& sums, float z, float t, float finite, float deeper) {
    const float e = power_of_two(t), et = e * finite;
    // Beside the 1 of the largest class, the others would be rounded.
    if (z == sums.max) {
      sums.ties += 1;
    } else {
      sums.rest += e;
    }
    sums.depth += deeper;
    if constexpr (kGamma >= 1) sums.fall += et;
    if constexpr (kGamma == 2) {
      sums.squares += e * e;
      sums.fall2 += e * et;
    }
  }

  float max_;
  float share_;
  bool is_near_;
  float base_;
};

// ---- rows that a warp keeps in registers ---------------------------------------------------------------------------

// The number of a row that a lane keeps.
template <int kGamma, typename Scalar>
__device__ __forceinline__ float smoothed_number(const RowOfLane<Scalar>& row, float share, int lane) {
  const SmoothedNumbers sums =
      SmoothedTerms<kGamma>(row.largest(), share).of([&](auto take) { row.each([&](float z, int, int) { take(z); }); });
  float numbers[] = {sums.rest, sums.ties, sums.depth, sums.fall, sums.squares, sums.fall2};
  const float number = sum_over_warp(numbers, lane);
  static_assert(offsetof(SmoothedNumbers, error) == 6 * sizeof(float) &&
                sizeof(sums) == kNumbersOfWarp * sizeof(float));
  if (lane == 6 * kLanesOfNumber) return sums.error;
  return lane == 7 * kLanesOfNumber ? sums.max : number;
}

// ---- short rows in shared memory -----------------------------------------------------------------------------------

// The part of a row of a lane, in registers: `count` classes at a distance of `step`, at least kSure and at most
// kValuesPerLane, or none. With `around`, rows begin at different classes, because their first lie in few banks; then
// `count` is even.
template <typename Scalar, int kSure, typename Step>
class ShortRowOfLane {
 public:
  __device__ __forceinline__ ShortRowOfLane(const Scalar* own, int count, Step step, int row, bool around)
      : count_(count), is_odd_(count % 2 != 0) {
    if (around) {
      int at = row & ((1 << (31 - __clz(count | 1))) - 1);
      each_index([&](int k) {
        values_[k] = load_as_compute(own[at * step]);
        at = at + 1 < count ? at + 1 : 0;
      });
      return;
    }
    each_index([&](int k) { values_[k] = load_as_compute(own[k * step]); });
    if (is_odd_) last_ = load_as_compute(own[(count - 1) * step]);
  }

  template <typename Take>
  __device__ __forceinline__ void each(Take take) const {
    if (is_odd_) take(last_);
    each_index([&](int k) { take(values_[k]); });
  }
  __device__ __forceinline__ float largest() const {
    float max = -kInfinity<float>;
    each([&](float z) { max = fmax(max, z); });
    return max;
  }

 private:
  // Two numbers at a time, with one test for both.
  template <typename Take>
  __device__ __forceinline__ void each_index(Take take) const {
    if (kSure > 0 && count_ == 0) return;
#pragma unroll
    for (int k = 0; k < kValuesPerLane; k += 2) {
      if (k >= kSure && k + 1 >= count_) break;
      take(k);
      take(k + 1);
    }
  }

  int count_;
  bool is_odd_;
  float last_;
  float values_[kValuesPerLane];
};

// The numbers of the row `own` of a tile, which a thread computes. row: its number in the tile
template <int kGamma, typename Scalar>
__device__ __forceinline__ SmoothedNumbers smoothed_numbers(const Scalar* own, int row, int classes, float share,
                                                            bool around) {
  const ShortRowOfLane<Scalar, 0, std::integral_constant<int, 1>> values(own, classes, {}, row, around);
  return SmoothedTerms<kGamma>(values.largest(), share).of([&](auto take) { values.each(take); });
}

// The same for `lanes` adjacent threads. A row that does not exist is not read.
template <int kGamma, typename Scalar>
__device__ __forceinline__ SmoothedNumbers smoothed_numbers(const Scalar* tile, int row, int classes, float share,
                                                            bool around, int lane, int lanes, bool exists) {
  const int count = exists ? (classes + lanes - 1 - lane) >> (31 - __clz(lanes)) : 0;
  const ShortRowOfLane<Scalar, kValuesPerLane / 2, int> values(tile + row * classes + lane, count, lanes, row, around);
  const SmoothedTerms<kGamma> terms(group_max(values.largest(), lanes), share);
  SmoothedNumbers sums = terms.of([&](auto take) { values.each(take); });
  for (int offset = lanes / 2; offset > 0; offset /= 2) {
    sums.rest += __shfl_xor_sync(kFullWarp, sums.rest, offset);
    sums.ties += __shfl_xor_sync(kFullWarp, sums.ties, offset);
    sums.depth += __shfl_xor_sync(kFullWarp, sums.depth, offset);
    if constexpr (kGamma >= 1) sums.fall += __shfl_xor_sync(kFullWarp, sums.fall, offset);
    if constexpr (kGamma == 2) {
      sums.squares += __shfl_xor_sync(kFullWarp, sums.squares, offset);
      sums.fall2 += __shfl_xor_sync(kFullWarp, sums.fall2, offset);
    }
  }
  return sums;
}

}  // namespace focalkern::cuda
