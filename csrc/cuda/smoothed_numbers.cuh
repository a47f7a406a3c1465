// The sums of smoothed_row.cuh for a row whose largest logit m is known before the first exponential, so that no sum is
// rescaled. With c = log2 e and b = m c, rounded, one fused operation gives t = z c - b. Then e' = 2^t is e 2^d for the
// rounding error d = m c - b, for which the sums are corrected once per row.
#pragma once

#include "cuda/common.cuh"
#include "cuda/row_in_registers.cuh"
#include "cuda/short_row.cuh"
#include "cuda/smoothed_row.cuh"

namespace focalkern::cuda {

constexpr float kLog2E = 1.44269504f;
constexpr float kLn2 = 0.693147181f;

// The order is that in which a warp keeps them.
struct SmoothedNumbers {
  float rest;     // sum of e' of the classes that `ties` does not count
  float ties;     // number of classes that equal the largest, or of some of them
  float depth;    // of s t / c
  float fall;     // of e' t
  float squares;  // of e'^2
  float fall2;    // of e'^2 t
  float error;    // d
  float max;      // m

  __device__ __forceinline__ SmoothedSums<float> sums(float share, float classes) const {
    const float factor = fmaf(-error, kLn2, 1.0f), factor2 = factor * factor;  // 2^-d for |d| < 1e-4
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

  // each(sums, take, take_other) calls take(logit), which adds to `sums`, for the classes of the row, or some of them.
  // take_other adds a class that equals the largest to `rest`, so one of the largest goes to take. With kIsApart that
  // class is added already.
  template <bool kIsApart = false, typename Each>
  __device__ __forceinline__ SmoothedNumbers of(Each each) const {
    SmoothedNumbers sums;
    if (is_near_) {
      const float of_t = share_ * kLn2, d = fmaf(max_, kLog2E, -base_);
      sums = {0, 0, 0, 0, 0, 0, d, max_};
      if constexpr (kIsApart) {
        const float e = fmaf(d, kLn2, 1.0f);  // 2^d
        sums = {0, 1, of_t * d, e * d, e * e, e * e * d, d, max_};
      }
      const auto take = [&](float z, auto is_other) {
        const float t = fmaf(z, kLog2E, -base_);
        add(sums, is_other || z != max_, t, t, of_t * t);
      };
      each(sums, [&](float z) { take(z, std::false_type()); }, [&](float z) { take(z, std::true_type()); });
      // Otherwise a logit is -inf or NaN, or t overflows.
      if (sums.depth > -kInfinity<float>) return sums;
    }
    // Without the error in the depth, which is large or not finite here.
    sums = {0, 0, 0, 0, 0, 0, is_near_ ? sums.error : 0.0f, max_};
    const auto take = [&](float z) {
      const float x = z - exp_base(max_), t = is_near_ ? fmaf(z, kLog2E, -base_) : x * kLog2E;
      add(sums, z != max_, t, fmaxf(t, kLeast), share_ * x);
    };
    if constexpr (kIsApart) take(max_);
    each(sums, take, take);
    return sums;
  }

 private:
  static constexpr float kNear = 1024;    // below this magnitude of m, |d| < 1e-4; beyond, d is 0
  static constexpr float kLeast = -1e4f;  // 2^kLeast is 0, and its product with a finite number, too

  static __device__ __forceinline__ void add(SmoothedNumbers& sums, bool is_below, float t, float finite,
                                             float deeper) {
    const float e = power_of_two(t), et = e * finite;
    // Beside the 1 of the largest class, the others would be rounded.
    if (is_below) {
      sums.rest += e;
    } else {
      sums.ties += 1;
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
  return number_of_warp(SmoothedTerms<kGamma>(row.largest(), share).of([&](SmoothedNumbers&, auto take, auto) {
    row.each([&](float z, int, int) { take(z); });
  }),
                        lane);
}

// ---- short rows in shared memory -----------------------------------------------------------------------------------

// Shared memory for a tile and, if its rows have lanes, the numbers of the rows: 128 rows of 200 bytes.
constexpr int kSmoothedTileBytes = 128 * (200 + static_cast<int>(sizeof(SmoothedNumbers)));

// The numbers of the row `own` of a tile, which a thread computes. row: its number in the tile
template <int kGamma, int kValues, typename Scalar>
__device__ __forceinline__ SmoothedNumbers smoothed_numbers(const Scalar* own, int row, int classes, float share,
                                                            bool around) {
  using Load = LogitsOfLoad<Scalar, kValues>;
  const LoadsOfRow<Load, false> loads(typename Load::From(own), classes / kValues, 1, row, around);
  const ShortRowOfLane<Load, false> values(loads);
  return SmoothedTerms<kGamma>(values.pair().largest, share).template of<true>([&](SmoothedNumbers&, auto, auto take) {
    values.each_other(take);
  });
}

// The same for `lanes` adjacent threads. A row that does not exist is not read.
template <int kGamma, int kValues, typename Scalar>
__device__ __forceinline__ SmoothedNumbers smoothed_numbers(const Scalar* tile, int row, int classes, float share,
                                                            bool around, int lane, int lanes, bool exists) {
  using Load = LogitsOfLoad<Scalar, kValues>;
  const PlaceOfLane<Load> place(classes, lane, lanes, around);
  const typename Load::From from(tile + row * classes + place.first * kValues);
  const LoadsOfRow<Load, true> loads(from, exists ? place.count : 0, place.step, row, around);
  const ShortRowOfLane<Load, true> values(loads);
  const SmoothedTerms<kGamma> terms(group_max(values.pair().largest, lanes), share);
  SmoothedNumbers sums = terms.of([&](SmoothedNumbers&, auto take, auto take_other) {
    if (loads.is_empty()) return;
    take(values.pair().largest);
    values.each_other(take_other);
  });
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
