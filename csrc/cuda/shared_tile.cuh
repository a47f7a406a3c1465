// The focal loss of short rows of class probabilities, without class weights and label smoothing, whose logits and
// targets lie end to end. Forward, a block copies a tile of both to shared memory, where lanes compute the sums of
// shared_row.cuh. Backward, it reads and writes a tile as one run of vectors.
#pragma once

#include "cuda/common.cuh"
#include "cuda/focal_loss_tiles.cuh"
#include "cuda/largest_logit.cuh"
#include "cuda/row_groups.cuh"
#include "cuda/row_loss.cuh"
#include "cuda/shared_row.cuh"
#include "cuda/smoothed_gradient.cuh"
#include "cuda/soft_row.cuh"
#include "kernels/row_loss.h"

namespace focalkern::cuda {
namespace {

// The targets of a tile, or of one of its rows. Scalar: type of the logits
template <typename Scalar, typename Target>
struct TileTargets {
  static constexpr int kVectors = kVectorSize<Scalar> / kVectorSize<Target>;  // for a vector of logits
  struct Loaded {
    uint4 at[kVectors];
  };
  const Target* at;

  __device__ __forceinline__ float of(int j) const { return load_as_compute(at[j]); }
  __device__ __forceinline__ Loaded load(int vector) const {
    Loaded loaded;
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      loaded.at[v] = load_vector(at + vector * kVectorSize<Scalar> + v * kVectorSize<Target>);
    }
    return loaded;
  }
  __device__ __forceinline__ void unpack_to(const Loaded& loaded, float (&shares)[kVectorSize<Scalar>]) const {
#pragma unroll
    for (int v = 0; v < kVectors; ++v) unpack<Target>(loaded.at[v], shares + v * kVectorSize<Target>);
  }
};

// These functions load the adjacent numbers of a row in shared memory with one instruction.
template <typename Number>
__device__ __forceinline__ void read_together(const Number* from, float (&values)[1]) {
  values[0] = load_as_compute(*from);
}
struct alignas(2 * sizeof(float)) TwoFloats {
  float at[2];
};
template <typename Number>
__device__ __forceinline__ void read_together(const Number* from, float (&values)[2]) {
  if constexpr (sizeof(Number) == sizeof(uint16_t)) {
    unpack_word<Number>(*reinterpret_cast<const uint32_t*>(from), values);
  } else {
    const TwoFloats two = *reinterpret_cast<const TwoFloats*>(from);
    values[0] = two.at[0];
    values[1] = two.at[1];
  }
}
// Writes a number that read_together may read next: of 16 bits, in the word that it loads.
template <typename Number>
__device__ __forceinline__ void write_number(Number* row, int j, Number value) {
  if constexpr (sizeof(Number) == sizeof(uint16_t)) {
    auto* word = reinterpret_cast<uint32_t*>(row) + j / 2;
    const int shift = j % 2 * 16;
    *word = (*word & ~(0xffffu << shift)) | static_cast<uint32_t>(bit_cast<uint16_t>(value)) << shift;
  } else {
    row[j] = value;
  }
}

// The part of a row of a tile that one of `lanes` adjacent threads takes: loads of kValues classes at a distance of
// `step`. With `around`, rows begin at different loads, because their first lie in few banks.
template <int kValues>
struct LoadsOfLane {
  int first;  // class
  int step;
  int classes;
  int start;
  bool around;

  __device__ __forceinline__ LoadsOfLane(const RowPlan& plan, int row, int classes, int lane)
      : first(lane * kValues), step(plan.lanes * kValues), classes(classes), around(plan.around) {
    const int count = (classes / kValues + plan.lanes - 1 - lane) >> plan.lane_bits;
    start = first + (row & ((1 << (31 - __clz(count | 1))) - 1)) * step;
  }

  // Calls take(j) for the first class of each load.
  template <typename Take>
  __device__ __forceinline__ void each(Take take) const {
    if (!around) {
#pragma unroll 4
      for (int j = first; j < classes; j += step) take(j);
    } else if (first < classes) {
      int j = start;
      do {
        take(j);
        j = j + step < classes ? j + step : first;
      } while (j != start);
    }
  }
};

// The sums of a row of a tile, which `lanes` adjacent threads compute. They overwrite the logit of its largest class.
template <int kGamma, int kValues, typename Scalar, typename Target>
__device__ __forceinline__ SharedSums<float> sums_of_tile_row(Scalar* logits, Target* targets,
                                                              const LoadsOfLane<kValues>& loads, int lanes) {
  float mine = -kInfinity<float>;
  int own = kNoClass;
  loads.each([&](int j) {
    float z[kValues];
    read_together(logits + j, z);
#pragma unroll
    for (int k = 0; k < kValues; ++k) {
      own = z[k] > mine ? j + k : own;
      mine = z[k] > mine ? z[k] : mine;
    }
  });
  const float max = group_max(mine, lanes);
  int largest = mine == max ? own : kNoClass;
  for (int offset = lanes / 2; offset > 0; offset /= 2) {
    const int other = __shfl_xor_sync(kFullWarp, largest, offset);
    largest = other < largest ? other : largest;
  }
  // Without probability and share the largest class adds 0 to every sum.
  const bool has_largest = own == largest && own != kNoClass;
  Target share = {};
  if (has_largest) {
    share = targets[own];
    write_number(logits, own, Store<Scalar>::from_compute(-kInfinity<float>));
    write_number(targets, own, Store<Target>::from_compute(0.0f));
  }
  SharedSums<float> sums = {0, 0, 0, 0, 0, 0, 0, max, 0, largest};
  loads.each([&](int j) {
    float z[kValues], t[kValues];
    read_together(logits + j, z);
    read_together(targets + j, t);
#pragma unroll
    for (int k = 0; k < kValues; ++k) {
      const float x = max - z[k];
      sums.template add<kGamma>(x, summand(-x), fmin(x, 1e4f), t[k]);
    }
  });
  if (has_largest) write_number(targets, own, share);
#pragma unroll 1
  for (int offset = lanes / 2; offset > 0; offset /= 2) {
    const auto add = [&](float& sum) { sum += __shfl_xor_sync(kFullWarp, sum, offset); };
    add(sums.rest);
    add(sums.share);
    add(sums.depth);
    if constexpr (kGamma >= 1) {
      add(sums.once);
      add(sums.fall);
    }
    if constexpr (kGamma == 2) {
      add(sums.twice);
      add(sums.fall2);
    }
  }
  return sums;
}

// The gradient of a row, which lacks the shares of the classes. `target` is the likely class.
template <int kGamma, typename Scalar, typename Target>
__device__ __forceinline__ SmoothedGradient<float> shared_gradient(const RowLossBackward<Scalar>& args, int64_t row,
                                                                   const Scalar* logits, const Target* targets) {
  const float given = upstream(args, row);
  // A row that does not count has a zero gradient, even where its logits are infinite or NaN.
  if (given == 0.0f) return {kInfinity<float>, 0, 0, 0, 0, kIgnored};
  const int top = saved_class(args, row);
  const float max = load_as_compute(logits[top]), log_s = args.saved[args.rows + row];
  const float others = args.saved[2 * args.rows + row];
  const auto largest = largest_of_row<kGamma>(exponential_minus_one(log_s), log_s, args.detach_modulation);
  const float likely_slope = largest.is_likely() ? load_as_compute(targets[top]) * largest.terms.slope : 0.0f;
  const float of_lse = given * lse_slope(args, row);
  const float of_p = given * (others + likely_slope) + of_lse;
  // p_j (sum a - a_j) - u a_j, without the difference p a_j - a_j, which would cancel as p -> 1.
  const float at_top = given * (largest.p * others - largest.u * likely_slope) + of_lse * largest.p;
  return {max, log_s, of_p + (log_s - log_s), given, at_top, largest.is_likely() ? top : kIgnored};
}

// ---- kernels -------------------------------------------------------------------------------------------------------

// The forward kernel of row_loss_shared.cu for such rows.
template <typename Scalar, typename Target, int kGamma>
__global__ __launch_bounds__(kBlock, 3) void shared_focal_forward_tile_kernel(
    const __grid_constant__ RowLossForward<Scalar> args, const __grid_constant__ RowPlan plan,
    const __grid_constant__ GridSum<float> totals) {
  constexpr int kLarger = sizeof(Target) > sizeof(Scalar) ? sizeof(Target) : sizeof(Scalar);
  __shared__ __align__(16) unsigned char tile_bytes[kTileBytes / kLarger * sizeof(Scalar)];
  __shared__ __align__(16) unsigned char target_bytes[kTileBytes / kLarger * sizeof(Target)];
  __shared__ SharedSums<float> kept[kBlock / 2];
  Scalar* tile = reinterpret_cast<Scalar*>(tile_bytes);
  Target* targets = reinterpret_cast<Target*>(target_bytes);
  const int thread = static_cast<int>(threadIdx.x), classes = static_cast<int>(args.classes);
  const int place = thread >> plan.lane_bits, lane = thread & (plan.lanes - 1);
  double loss_sum = 0;
  for (int64_t t = blockIdx.x; t < plan.tiles; t += gridDim.x) {
    const TileRows of_tile(plan, args.rows, t);
    const int count = of_tile.rows * classes;
    const Scalar* logits = of_tile.of(args.logits, classes);
    const Target* given = of_tile.of(static_cast<const Target*>(args.target_probs.data), classes);
    TileLoad<Scalar> load;
    load.start(logits, count);
    TileLoad<Target> load_targets;
    load_targets.start(given, count);
    load.finish(tile, logits, count);
    load_targets.finish(targets, given, count);
    __syncthreads();
    // Lanes without a row have no classes.
    const LoadsOfLane<kOfWord<Scalar>> loads(plan, place, place < of_tile.rows ? classes : 0, lane);
    auto sums = sums_of_tile_row<kGamma>(tile + place * classes, targets + place * classes, loads, plan.lanes);
    if (plan.lanes > 1 && lane == 0) kept[place] = sums;
    __syncthreads();
    if (thread < of_tile.rows) {
      if (plan.lanes > 1) sums = kept[thread];
      Row<Scalar> row = {};
      row.row = of_tile.first + thread;
      row.is_live = true;
      const TileTargets<Scalar, Target> of_row = {targets + thread * classes};
      loss_sum += static_cast<double>(finish_row<kGamma>(args, row, of_row, sums));
    }
    __syncthreads();  // before the next tile
  }
  const double rows = blockIdx.x == 0 && thread == 0 ? static_cast<double>(args.rows) : 0;
  sum_over_grid(totals, loss_sum, rows, thread < plan.rows_per_tile || thread < kWarp);
}

// The backward kernel: a tile is read and written as one run of vectors.
template <typename Scalar, typename Target, int kGamma>
__global__ __launch_bounds__(kBlock, 3) void shared_focal_backward_tile_kernel(
    const __grid_constant__ RowLossBackward<Scalar> args, const __grid_constant__ RowPlan plan,
    const __grid_constant__ ClassDivider divide) {
  __shared__ SmoothedGradient<float> gradients[kBlock];  // [rows_per_tile]
  const int thread = static_cast<int>(threadIdx.x), classes = static_cast<int>(args.classes);
  for (int64_t t = blockIdx.x; t < plan.tiles; t += gridDim.x) {
    const TileRows of_tile(plan, args.rows, t);
    const Scalar* logits = of_tile.of(args.logits, classes);
    const Target* targets = of_tile.of(static_cast<const Target*>(args.target_probs.data), classes);
    // After the last barrier of the previous tile, a thread reads only the gradient that it wrote.
    if (thread < of_tile.rows) {
      gradients[thread] =
          shared_gradient<kGamma>(args, of_tile.first + thread, logits + thread * classes, targets + thread * classes);
    }
    __syncthreads();
    write_tile_gradient<kOfWord<Scalar>>(
        of_tile.of(args.grad_logits, classes), logits, of_tile.rows, classes, divide, gradients,
        [&](const auto& gradient, float z, float share) {
          // The target of a row that does not count may be NaN.
          const float of_class = gradient.of_slope == 0.0f ? 0.0f : share;
          return Store<Scalar>::from_compute(gradient.template at<kGamma>(z, of_class, args.detach_modulation));
        },
        TileTargets<Scalar, Target>{targets});
  }
}

// ---- host ----------------------------------------------------------------------------------------------------------

constexpr int kNoTiles = -1;

// Calls launch(targets, plan) and returns its result if short rows of class probabilities lie in tiles; otherwise
// returns kNoTiles.
template <typename Scalar, typename Launch>
int with_target_tiles(const RowLossArgs<Scalar>& args, Launch launch) {
  if constexpr (sizeof(Scalar) <= sizeof(float)) {
    if (args.target_probs && args.class_weight == nullptr && args.label_smoothing == 0 &&
        args.classes % kOfWord<Scalar> == 0) {
      return args.target_probs.typed([&](const auto* targets) -> int {
        const bool end_to_end = is_end_to_end(args.logits, args.layout, args.rows, args.classes) &&
                                is_end_to_end(targets, args.target_layout, args.rows, args.classes);
        constexpr int kBytes = sizeof(*targets) > sizeof(Scalar) ? sizeof(*targets) : sizeof(Scalar);
        RowPlan plan = plan_rows(args.rows, args.classes, kBytes, end_to_end, false);
        if (plan.path != RowPath::kOwn && plan.path != RowPath::kTile) return kNoTiles;
        if (plan.rows_per_tile > kBlock) plan.rows_per_tile = kBlock;
        plan.lanes = kBlock / plan.rows_per_tile;
        plan.around = args.classes * kBytes % (16 * plan.lanes) == 0;
        return launch(targets, finish_row_plan(plan, args.rows));
      });
    }
  }
  return kNoTiles;
}

}  // namespace
}  // namespace focalkern::cuda
