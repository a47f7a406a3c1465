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

// The most loads of a lane. A load has one class, or two of 16 bits. A thread that takes a whole row has registers for
// fewer.
template <int kValues, bool kHasLanes>
constexpr int kMostLoads = kHasLanes      ? 2 * kWordsPerLane
                           : kValues == 2 ? kWordsPerLane
                                          : kValuesPerLane;

// Shared memory for a tile and, if its rows have lanes, the numbers of the rows: 128 rows of 200 bytes.
constexpr int kSmoothedTileBytes = 128 * (200 + static_cast<int>(sizeof(SmoothedNumbers)));

// A tile of plan_rows with the lanes of these kernels, and with twice the rows if there are many: what a tile costs a
// thread hardly depends on its rows. If rows have lanes, each still has a thread of its own.
template <typename Scalar, int kValues>
RowPlan plan_short_rows(RowPlan plan, int64_t rows, int64_t classes) {
  const bool has_lanes = classes > kValues * kMostLoads<kValues, false>;
  const int64_t lanes = divide_up(classes, kValues * kMostLoads<kValues, true>);
  plan.lanes = has_lanes ? power_of_two_at_least(lanes < 2 ? 2 : lanes, kWarp) : 1;
  int64_t row_bytes = classes * static_cast<int64_t>(sizeof(Scalar));
  plan.around = row_bytes % (16 * plan.lanes) == 0;
  constexpr int64_t kNumbers = sizeof(SmoothedNumbers), kFewest = kValues * kMostLoads<kValues, false> + 1;
  static_assert(2 * kBlock * (kFewest * sizeof(Scalar) + kNumbers) > kSmoothedTileBytes, "a thread for each row");
  if (has_lanes) row_bytes += kNumbers;
  const int larger = 2 * plan.rows_per_tile;
  if (larger * row_bytes <= kSmoothedTileBytes && rows >= larger * (kMaxGrid / 8)) plan.rows_per_tile = larger;
  return finish_row_plan(plan, rows);
}

// Copies a tile to shared memory. Both begin with a vector.
template <typename Scalar>
__device__ __forceinline__ void load_large_tile(Scalar* tile, const Scalar* source, int count) {
  constexpr int kAtOnce = 4, kSize = kVectorSize<Scalar>;
  const int thread = static_cast<int>(threadIdx.x);
  const int vectors = static_cast<int>(static_cast<uint32_t>(count) / kSize);
#pragma unroll 1
  for (int first = thread; first < vectors; first += kAtOnce * kBlock) {
    const auto* from = reinterpret_cast<const uint4*>(source) + first;
    auto* to = reinterpret_cast<uint4*>(tile) + first;
    uint4 loaded[kAtOnce];
#pragma unroll
    for (int k = 0; k < kAtOnce; ++k) {
      if (first + k * kBlock < vectors) loaded[k] = from[k * kBlock];
    }
#pragma unroll
    for (int k = 0; k < kAtOnce; ++k) {
      if (first + k * kBlock < vectors) to[k * kBlock] = loaded[k];
    }
  }
  const int at = vectors * kSize + thread;
  if (at < count) tile[at] = source[at];
}

// The part of a row of a lane, in registers: `count` loads at a distance of `step`, or none. With `around`, rows begin
// at different loads, because their first lie in few banks. Each load is compared with the largest so far, and the
// smaller numbers are kept: all but one of the largest.
template <typename Scalar, int kValues, bool kHasLanes>
class ShortRowOfLane {
  using Load = std::conditional_t<kValues == 2, uint32_t, Scalar>;
  using Kept = std::conditional_t<kValues == 2, Scalar, float>;  // the type of the numbers in a word

 public:
  __device__ __forceinline__ ShortRowOfLane(const Scalar* own, int count, int step, int row, bool around)
      : count_(count), few_((count - 1) % kAtOnce), many_((count - 1) / kAtOnce) {
    const auto* from = reinterpret_cast<const Load*>(own);
    if (around) {
      int at = row & ((1 << (31 - __clz(count | 1))) - 1);
      read([&] {
        const Load loaded = from[at * step];
        at = at + 1 < count ? at + 1 : 0;
        return loaded;
      });
    } else {
      const auto read_each = [&](auto distance) {
        read([&] {
          const Load loaded = *from;
          from += distance;
          return loaded;
        });
      };
      if (!kHasLanes || step == 1) {
        read_each(std::integral_constant<int, 1>());
      } else {
        read_each(step);
      }
    }
  }

  // Calls take(logit) for all classes but one of the largest.
  template <typename Take>
  __device__ __forceinline__ void each_other(Take take) const {
    if (is_empty()) return;
    if constexpr (kValues == 2) take(beside_);
    each_word([&](int k) {
      float values[kValues];
      unpack_word<Kept>(kept_[k], values);
#pragma unroll
      for (float z : values) take(z);
    });
  }
  __device__ __forceinline__ bool is_empty() const { return kHasLanes && count_ == 0; }
  __device__ __forceinline__ float largest() const { return largest_; }

 private:
  static constexpr int kAtOnce = 4;  // loads with one test for all
  static constexpr int kMost = kMostLoads<kValues, kHasLanes>;
  static constexpr int kSure = kHasLanes ? 1 : 0;  // groups of kAtOnce that every lane with loads has

  template <typename Next>
  __device__ __forceinline__ void read(Next next) {
    largest_ = beside_ = -kInfinity<float>;
    if (is_empty()) return;
    uint32_t largest = as_word(next());
    each_word([&](int k) {
      const uint32_t other = as_word(next()), larger_one = larger<Kept>(largest, other);
      kept_[k] = largest ^ other ^ larger_one;
      largest = larger_one;
    });
    float values[kValues];
    unpack_word<Kept>(largest, values);
    largest_ = values[0];
    if constexpr (kValues == 2) {
      largest_ = fmax(values[0], values[1]);
      beside_ =
          bit_cast<float>(bit_cast<uint32_t>(values[0]) ^ bit_cast<uint32_t>(values[1]) ^ bit_cast<uint32_t>(largest_));
    }
  }
  static __device__ __forceinline__ uint32_t as_word(Load load) {
    if constexpr (kValues == 2) {
      return load;
    } else {
      return bit_cast<uint32_t>(load_as_compute(load));
    }
  }
  // Calls take(k) for the words of the loads after the first.
  template <typename Take>
  __device__ __forceinline__ void each_word(Take take) const {
#pragma unroll
    for (int k = 0; k < kAtOnce - 1; ++k) {
      if (k >= few_) break;
      take(k);
    }
#pragma unroll
    for (int k = 0; k < kMost / kAtOnce; ++k) {
      if (k >= kSure && k >= many_) break;
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) take((k + 1) * kAtOnce - 1 + i);
    }
  }

  int count_;
  int few_;  // loads after the first, besides many_ times kAtOnce
  int many_;
  float largest_;
  float beside_;  // the smaller number of the largest pair
  uint32_t kept_[kAtOnce - 1 + kMost / kAtOnce * kAtOnce];
};

// The numbers of the row `own` of a tile, which a thread computes. row: its number in the tile
template <int kGamma, int kValues, typename Scalar>
__device__ __forceinline__ SmoothedNumbers smoothed_numbers(const Scalar* own, int row, int classes, float share,
                                                            bool around) {
  const ShortRowOfLane<Scalar, kValues, false> values(own, classes / kValues, 1, row, around);
  return SmoothedTerms<kGamma>(values.largest(), share).template of<true>([&](SmoothedNumbers&, auto, auto take) {
    values.each_other(take);
  });
}

// The same for `lanes` adjacent threads. A row that does not exist is not read.
template <int kGamma, int kValues, typename Scalar>
__device__ __forceinline__ SmoothedNumbers smoothed_numbers(const Scalar* tile, int row, int classes, float share,
                                                            bool around, int lane, int lanes, bool exists) {
  const int loads = classes / kValues, count = exists ? (loads + lanes - 1 - lane) >> (31 - __clz(lanes)) : 0;
  // Addresses of adjacent loads are constants.
  const bool is_adjacent = !around && (loads & (lanes - 1)) == 0;
  const int first = is_adjacent ? lane * count : lane;
  const ShortRowOfLane<Scalar, kValues, true> values(tile + row * classes + first * kValues, count,
                                                     is_adjacent ? 1 : lanes, row, around);
  const SmoothedTerms<kGamma> terms(group_max(values.largest(), lanes), share);
  SmoothedNumbers sums = terms.of([&](SmoothedNumbers&, auto take, auto take_other) {
    if (values.is_empty()) return;
    take(values.largest());
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
