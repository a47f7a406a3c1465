// Short rows in a tile of shared memory: the loads of a lane, or of a thread that takes a whole row, and such a part of
// a row in registers, with one of the largest classes apart.
#pragma once

#include <type_traits>

#include "cuda/common.cuh"
#include "cuda/largest_logit.cuh"
#include "cuda/launch.h"

namespace focalkern::cuda {

// The most loads of a lane. A load has kCount classes: one, or two of 16 bits. A thread that takes a whole row has
// registers for fewer.
template <int kCount, bool kHasLanes>
constexpr int kMostLoads = kHasLanes     ? 2 * kWordsPerLane
                           : kCount == 2 ? kWordsPerLane
                                         : kValuesPerLane;

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

// A load of a lane: the logits of kValues classes.
template <typename Scalar, int kValues>
struct LogitsOfLoad {
  static constexpr int kCount = kValues;
  static constexpr int kBytes = sizeof(Scalar);                  // of a class in the tile
  static constexpr int kWidest = sizeof(Scalar);                 // bytes of its widest number
  using Kept = std::conditional_t<kValues == 2, Scalar, float>;  // the type of the numbers in a word
  uint32_t word;

  struct From {
    using Word = std::conditional_t<kValues == 2, uint32_t, Scalar>;
    const Word* logits;

    __device__ __forceinline__ explicit From(const Scalar* logits) : logits(reinterpret_cast<const Word*>(logits)) {}
    __device__ __forceinline__ LogitsOfLoad operator[](int load) const {
      if constexpr (kValues == 2) {
        return {logits[load]};
      } else {
        return {bit_cast<uint32_t>(load_as_compute(logits[load]))};
      }
    }
    __device__ __forceinline__ void operator+=(int loads) { logits += loads; }
  };

  // The largest of several loads.
  struct Largest {
    uint32_t word;

    Largest() = default;
    __device__ __forceinline__ explicit Largest(const LogitsOfLoad& first) : word(first.word) {}
    // Keeps the larger of each two numbers, and returns the smaller.
    __device__ __forceinline__ LogitsOfLoad add(const LogitsOfLoad& other, int) {
      const uint32_t before = word;
      word = larger<Kept>(before, other.word);
      return {before ^ other.word ^ word};
    }
  };
  // The largest of the numbers of `Largest`, and the other.
  struct Pair {
    float largest = -kInfinity<float>;
    float beside = 0;

    __device__ __forceinline__ void set(const Largest& of) {
      float values[kValues];
      unpack_word<Kept>(of.word, values);
      largest = values[0];
      if constexpr (kValues == 2) {
        largest = fmax(values[0], values[1]);
        beside = bit_cast<float>(bit_cast<uint32_t>(values[0]) ^ bit_cast<uint32_t>(values[1]) ^
                                 bit_cast<uint32_t>(largest));
      }
    }
    template <typename Take>
    __device__ __forceinline__ void take_beside(Take take) const {
      if constexpr (kValues == 2) take(beside);
    }
  };

  // Calls take(logit) for each class.
  template <typename Take>
  __device__ __forceinline__ void each(Take take) const {
    float values[kValues];
    unpack_word<Kept>(word, values);
#pragma unroll
    for (float z : values) take(z);
  }
};

// A tile of plan_rows with the lanes of these kernels, and with twice the rows if there are many: what a tile costs a
// thread hardly depends on its rows. If rows have lanes, the tile has at most kBlock rows, whose numbers are kept in
// it. tile_bytes: its shared memory
template <typename Load>
RowPlan plan_short_rows(RowPlan plan, int64_t rows, int64_t classes, int64_t bytes_of_numbers, int64_t tile_bytes) {
  const bool has_lanes = classes > Load::kCount * kMostLoads<Load::kCount, false>;
  const int64_t lanes = divide_up(classes, Load::kCount * kMostLoads<Load::kCount, true>);
  plan.lanes = has_lanes ? power_of_two_at_least(lanes < 2 ? 2 : lanes, kWarp) : 1;
  plan.around = classes * Load::kWidest % (16 * plan.lanes) == 0;
  const int64_t row_bytes = classes * Load::kBytes + (has_lanes ? bytes_of_numbers : 0);
  const int larger = 2 * plan.rows_per_tile;
  if (larger * row_bytes <= tile_bytes && rows >= larger * (kMaxGrid / 8)) plan.rows_per_tile = larger;
  return finish_row_plan(plan, rows);
}

// Where the loads of one of `lanes` adjacent threads lie. They are adjacent if all lanes have as many, so that their
// addresses are constants.
template <typename Load>
struct PlaceOfLane {
  int count;
  int step;
  int first;

  __device__ __forceinline__ PlaceOfLane(int classes, int lane, int lanes, bool around) {
    const int loads = classes / Load::kCount;
    count = (loads + lanes - 1 - lane) >> (31 - __clz(lanes));
    const bool is_adjacent = !around && (loads & (lanes - 1)) == 0;
    step = is_adjacent ? 1 : lanes;
    first = is_adjacent ? lane * count : lane;
  }
};

// The loads of a row of a lane: `count` at a distance of `step`, or none. With `around`, rows begin at different loads,
// because their first lie in few banks.
template <typename Load, bool kHasLanes>
class LoadsOfRow {
  static constexpr int kAtOnce = 4;  // loads with one test for all
  static constexpr int kMost = kMostLoads<Load::kCount, kHasLanes>;
  static constexpr int kSure = kHasLanes ? 1 : 0;  // groups of kAtOnce that every lane with loads has
  static_assert((kMostLoads<Load::kCount, false> + 1) / 2 > kSure * kAtOnce, "the fewest loads of a lane");

 public:
  static constexpr int kNumbers = kAtOnce + (kMost - 1) / kAtOnce * kAtOnce;

  __device__ __forceinline__ LoadsOfRow(typename Load::From from, int count, int step, int row, bool around)
      : from_(from),
        count_(count),
        step_(step),
        few_((count - 1) % kAtOnce),
        many_((count - 1) / kAtOnce),
        around_(around) {
    start_ = around ? row & ((1 << (31 - __clz(count | 1))) - 1) : 0;
  }

  __device__ __forceinline__ bool is_empty() const { return kHasLanes && count_ == 0; }
  // Calls take(load, number). The numbers are constants from 0 to kNumbers - 1, not all of which exist.
  template <typename Take>
  __device__ __forceinline__ void each(Take take) const {
    if (is_empty()) return;
    auto from = from_;
    if (around_) {
      int at = start_;
      each_number([&](int number) {
        take(from[at * step_], number);
        at = at + 1 < count_ ? at + 1 : 0;
      });
    } else {
      const auto take_each = [&](auto distance) {
        each_number([&](int number) {
          take(from[0], number);
          from += distance;
        });
      };
      if (!kHasLanes || step_ == 1) {
        take_each(std::integral_constant<int, 1>());
      } else {
        take_each(step_);
      }
    }
  }
  // The place of a load in the row of the lane.
  __device__ __forceinline__ int load_of(int number) const {
    const int turn = start_ + (number < kAtOnce ? number : number + few_ - (kAtOnce - 1));
    return turn < count_ ? turn : turn - count_;
  }

  // Calls take(number), in the order of `each`, for the loads after the first.
  template <typename Take>
  __device__ __forceinline__ void each_number_but_first(Take take) const {
#pragma unroll
    for (int k = 0; k < kAtOnce - 1; ++k) {
      if (k >= few_) break;
      take(k + 1);
    }
#pragma unroll
    for (int k = 0; k < (kMost - 1) / kAtOnce; ++k) {
      if (k >= kSure && k >= many_) break;
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) take((k + 1) * kAtOnce + i);
    }
  }

 private:
  template <typename Take>
  __device__ __forceinline__ void each_number(Take take) const {
    take(0);
    each_number_but_first(take);
  }

  typename Load::From from_;
  int count_;
  int step_;
  int few_;  // loads after the first, besides many_ times kAtOnce
  int many_;
  bool around_;
  int start_;  // the load that is read first
};

// The part of a row of a lane, in registers. Each load is compared with the largest so far, and the smaller numbers are
// kept: all but one of the largest.
template <typename Load, bool kHasLanes>
class ShortRowOfLane {
 public:
  __device__ __forceinline__ explicit ShortRowOfLane(const LoadsOfRow<Load, kHasLanes>& loads) : loads_(loads) {
    if (loads.is_empty()) return;
    typename Load::Largest largest;
    loads.each([&](const Load& load, int number) {
      if (number == 0) {
        largest = typename Load::Largest(load);
      } else {
        kept_[number - 1] = largest.add(load, number);
      }
    });
    pair_.set(largest);
  }

  // Calls take for all classes but one of the largest.
  template <typename Take>
  __device__ __forceinline__ void each_other(Take take) const {
    if (loads_.is_empty()) return;
    pair_.take_beside(take);
    loads_.each_number_but_first([&](int number) { kept_[number - 1].each(take); });
  }
  __device__ __forceinline__ const typename Load::Pair& pair() const { return pair_; }

 private:
  const LoadsOfRow<Load, kHasLanes>& loads_;
  typename Load::Pair pair_;
  Load kept_[LoadsOfRow<Load, kHasLanes>::kNumbers - 1];
};

// Calls finish(r, numbers) for each row r of a tile, in one thread. numbers_of(r, lane, exists) returns the numbers of
// a row, in every lane of it; with lanes, they are kept in shared memory before `end` until a thread finishes the row.
template <bool kHasLanes, typename Numbers, typename NumbersOf, typename Finish>
__device__ __forceinline__ void each_row_of_tile(const RowPlan& plan, int rows, unsigned char* end,
                                                 NumbersOf numbers_of, Finish finish) {
  const int thread = static_cast<int>(threadIdx.x);
  if constexpr (kHasLanes) {
    auto* first_numbers = reinterpret_cast<Numbers*>(end) - 1;  // those of row r are first_numbers[-r]
    const int lane = thread & (plan.lanes - 1);
    // Warps without a row skip it.
    for (int first = (thread & -kWarp) >> plan.lane_bits; first < rows; first += kBlock >> plan.lane_bits) {
      const int r = first + (thread % kWarp >> plan.lane_bits);
      const Numbers numbers = numbers_of(r, lane, r < rows);
      if (lane == 0 && r < rows) first_numbers[-r] = numbers;
    }
    __syncthreads();
    if (thread < rows) finish(thread, first_numbers[-thread]);
  } else {
#pragma unroll 1
    for (int r = thread; r < rows; r += kBlock) finish(r, numbers_of(r, 0, true));
  }
}
// Whether a thread of the warp finishes rows; other warps have only zeros for the sum over the grid.
template <bool kHasLanes>
__device__ __forceinline__ bool finishes_any(const RowPlan& plan) {
  return !kHasLanes || threadIdx.x < plan.rows_per_tile || threadIdx.x < kWarp;
}

}  // namespace focalkern::cuda
