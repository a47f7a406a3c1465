// The sums of smoothed_row.cuh for a row whose largest logit m is known before the first exponential, so that no sum is
// rescaled. With c = log2 e and b = m c, rounded, one fused operation gives t = z c - b. Then e' = 2^t is e 2^d for the
// rounding error d = m c - b, for which the sums are corrected once per row.
#pragma once

#include "cuda/common.cuh"
#include "cuda/largest_logit.cuh"
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

  // each(sums, take) calls take(logit) for some classes of the row, which adds to `sums`.
  template <typename Each>
  __device__ __forceinline__ SmoothedNumbers of(Each each) const {
    SmoothedNumbers sums;
    if (is_near_) {
      sums = {0, 0, 0, 0, 0, 0, fmaf(max_, kLog2E, -base_), max_};
      const float of_t = share_ * kLn2;
      each(sums, [&](float z) {
        const float t = fmaf(z, kLog2E, -base_);
        add(sums, z, t, t, of_t * t);
      });
      // Otherwise a logit is -inf or NaN, or t overflows.
      if (sums.depth > -kInfinity<float>) return sums;
    }
    // Without the error in the depth, which is large or not finite here.
    sums = {0, 0, 0, 0, 0, 0, is_near_ ? sums.error : 0.0f, max_};
    each(sums, [&](float z) {
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

// The number of a row that a lane keeps, of the sums of all lanes.
__device__ __forceinline__ float number_of_warp(const SmoothedNumbers& sums, int lane) {
  float numbers[] = {sums.rest, sums.ties, sums.depth, sums.fall, sums.squares, sums.fall2};
  const float number = sum_over_warp(numbers, lane);
  static_assert(offsetof(SmoothedNumbers, error) == 6 * sizeof(float) &&
                sizeof(sums) == kNumbersOfWarp * sizeof(float));
  if (lane == 6 * kLanesOfNumber) return sums.error;
  return lane == 7 * kLanesOfNumber ? sums.max : number;
}

template <int kGamma, typename Scalar, int kMost>
__device__ __forceinline__ float smoothed_number(const RowOfLane<Scalar, kMost>& row, float share, int lane) {
  return number_of_warp(SmoothedTerms<kGamma>(row.largest(), share).of([&](SmoothedNumbers&, auto take) {
    row.each([&](float z, int, int) { take(z); });
  }),
                        lane);
}

// ---- short rows in shared memory -----------------------------------------------------------------------------------

// The most loads of a lane. A load has one class, or two of 16 bits. A thread that takes a whole row has registers for
// fewer.
template <int kValues, bool kHasLanes>
constexpr int kMostLoads = kHasLanes      ? 2 * kWordsPerLane
                           : kValues == 2 ? kWordsPerLane
                                          : kValuesPerLane;

// Threads per row.
template <int kValues>
int lanes_of_short_row(int64_t classes) {
  if (classes <= kValues * kMostLoads<kValues, false>) return 1;
  const int64_t lanes = divide_up(classes, kValues * kMostLoads<kValues, true>);
  return power_of_two_at_least(lanes < 2 ? 2 : lanes, kWarp);
}

// The part of a row of a lane, in registers: `count` loads at a distance of `step`, at least kSure and at most kMost,
// or none. With `around`, rows begin at different loads, because their first lie in few banks; then `count` is even.
template <typename Scalar, int kValues, int kSure, int kMost, typename Step>
class ShortRowOfLane {
  static constexpr bool kIsPaired = kValues == 2;
  using Load = std::conditional_t<kIsPaired, uint32_t, Scalar>;
  using Kept = std::conditional_t<kIsPaired, uint32_t, float>;

 public:
  __device__ __forceinline__ ShortRowOfLane(const Scalar* own, int count, Step step, int row, bool around)
      : count_(count), is_odd_(count % 2 != 0) {
    const auto* from = reinterpret_cast<const Load*>(own);
    if (around) {
      int at = row & ((1 << (31 - __clz(count | 1))) - 1);
      each_index([&](int k) {
        kept_[k] = load(from[at * step]);
        at = at + 1 < count ? at + 1 : 0;
      });
      return;
    }
    each_index([&](int k) { kept_[k] = load(from[k * step]); });
    if (is_odd_) last_ = load(from[(count - 1) * step]);
  }

  template <typename Take>
  __device__ __forceinline__ void each(Take take) const {
    if (is_odd_) take_all(last_, take);
    each_index([&](int k) { take_all(kept_[k], take); });
  }
  __device__ __forceinline__ float largest() const {
    if constexpr (kIsPaired) {
      uint32_t max = least_word<Scalar>();
      if (is_odd_) max = larger<Scalar>(max, last_);
      each_index([&](int k) { max = larger<Scalar>(max, kept_[k]); });
      return largest_of<Scalar>(max);
    } else {
      float max = -kInfinity<float>;
      each([&](float z) { max = fmax(max, z); });
      return max;
    }
  }

 private:
  static __device__ __forceinline__ Kept load(Load value) {
    if constexpr (kIsPaired) {
      return value;
    } else {
      return load_as_compute(value);
    }
  }
  template <typename Take>
  static __device__ __forceinline__ void take_all(Kept kept, Take take) {
    if constexpr (kIsPaired) {
      float values[2];
      unpack_word<Scalar>(kept, values);
      take(values[0]);
      take(values[1]);
    } else {
      take(kept);
    }
  }
  // Two loads at a time, with one test for both.
  template <typename Take>
  __device__ __forceinline__ void each_index(Take take) const {
    if (kSure > 0 && count_ == 0) return;
#pragma unroll
    for (int k = 0; k < kMost - 1; k += 2) {
      if (k + 1 >= kSure && k + 1 >= count_) break;
      take(k);
      take(k + 1);
    }
  }

  int count_;
  bool is_odd_;
  Kept last_;
  Kept kept_[kMost];
};

// The numbers of the row `own` of a tile, which a thread computes. row: its number in the tile
template <int kGamma, int kValues, typename Scalar>
__device__ __forceinline__ SmoothedNumbers smoothed_numbers(const Scalar* own, int row, int classes, float share,
                                                            bool around) {
  constexpr int kMost = kMostLoads<kValues, false>;
  using Step = std::integral_constant<int, 1>;
  const ShortRowOfLane<Scalar, kValues, 0, kMost, Step> values(own, classes / kValues, {}, row, around);
  return SmoothedTerms<kGamma>(values.largest(), share).of([&](SmoothedNumbers&, auto take) { values.each(take); });
}

// The same for `lanes` adjacent threads. A row that does not exist is not read.
template <int kGamma, int kValues, typename Scalar>
__device__ __forceinline__ SmoothedNumbers smoothed_numbers(const Scalar* tile, int row, int classes, float share,
                                                            bool around, int lane, int lanes, bool exists) {
  constexpr int kMost = kMostLoads<kValues, true>, kSure = kMostLoads<kValues, false> / 2;
  const int count = exists ? (classes / kValues + lanes - 1 - lane) >> (31 - __clz(lanes)) : 0;
  const ShortRowOfLane<Scalar, kValues, kSure, kMost, int> values(tile + row * classes + lane * kValues, count, lanes,
                                                                  row, around);
  const SmoothedTerms<kGamma> terms(group_max(values.largest(), lanes), share);
  SmoothedNumbers sums = terms.of([&](SmoothedNumbers&, auto take) { values.each(take); });
#pragma unroll
  for (int offset = 1; offset < kWarp; offset *= 2) {
    if (offset >= lanes) break;
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
