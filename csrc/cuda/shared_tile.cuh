// The focal loss of short rows of class probabilities, without class weights and label smoothing, whose logits and
// targets lie end to end. Forward, a block copies a tile of both to shared memory, where a thread or lanes
// compute the sums of shared_row.cuh. Backward, it reads and writes a tile as one run of vectors.
#pragma once

#include "cuda/common.cuh"
#include "cuda/focal_loss_tiles.cuh"
#include "cuda/largest_logit.cuh"
#include "cuda/row_groups.cuh"
#include "cuda/row_loss.cuh"
#include "cuda/shared_numbers.cuh"
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
  const float rest = exponential_minus_one(log_s);
  const auto largest = largest_of_row<kGamma>(quick_quotient(1.0f, 1.0f + rest), rest, log_s, args.detach_modulation);
  const bool has_likely = has_likely_class(log_s);
  const float likely_slope = has_likely ? load_as_compute(targets[top]) * largest.terms.slope : 0.0f;
  const float of_lse = given * lse_slope(args, row);
  const float of_p = given * (others + likely_slope) + of_lse;
  // p_j (sum a - a_j) - u a_j, without the difference p a_j - a_j, which would cancel as p -> 1.
  const float at_top = given * (largest.p * others - largest.u * likely_slope) + of_lse * largest.p;
  return {max, log_s, of_p + (log_s - log_s), given, at_top, has_likely ? top : kIgnored};
}

// ---- kernels -------------------------------------------------------------------------------------------------------

// Shared memory for a tile of logits and targets and, if its rows have lanes, the numbers of the rows.
constexpr int kSharedTileBytes = 2 * kTileBytes + kBlock * static_cast<int>(sizeof(SharedNumbers));

// The forward kernel of row_loss_shared.cu for such rows: a thread, or lanes, take a row of a tile in shared memory,
// and a thread finishes it.
template <typename Scalar, typename Target, int kGamma, bool kHasLanes>
__global__ __launch_bounds__(kBlock, 2) void shared_focal_forward_tile_kernel(
    const __grid_constant__ RowLossForward<Scalar> args, const __grid_constant__ RowPlan plan,
    const __grid_constant__ GridSum<float> totals) {
  __shared__ __align__(16) unsigned char tile_bytes[kSharedTileBytes];
  const int thread = static_cast<int>(threadIdx.x), classes = static_cast<int>(args.classes);
  auto* tile = reinterpret_cast<Scalar*>(tile_bytes);
  auto* targets = reinterpret_cast<Target*>(tile + plan.rows_per_tile * classes);
  double loss_sum = 0;
  for (int64_t t = blockIdx.x; t < plan.tiles; t += gridDim.x) {
    const TileRows of_tile(plan, args.rows, t);
    const int count = of_tile.rows * classes;
    load_large_tile(tile, of_tile.of(args.logits, classes), count);
    load_large_tile(targets, of_tile.of(static_cast<const Target*>(args.target_probs.data), classes), count);
    __syncthreads();
    each_row_of_tile<kHasLanes, SharedNumbers>(
        plan, of_tile.rows, tile_bytes + kSharedTileBytes,
        [&](int r, int lane, bool exists) {
          if constexpr (kHasLanes) {
            return shared_numbers<kGamma>(tile, targets, r, classes, plan.around, lane, plan.lanes, exists);
          } else {
            return shared_numbers<kGamma>(tile, targets, r, classes, plan.around);
          }
        },
        [&](int r, const SharedNumbers& numbers) {
          Row<Scalar> row = {};
          row.row = of_tile.first + static_cast<uint32_t>(r);
          row.is_live = true;
          const TileTargets<Scalar, Target> of_row = {targets + r * classes};
          loss_sum += static_cast<double>(finish_row<kGamma>(args, row, of_row, numbers.sums()));
        });
    __syncthreads();  // before the next tile
  }
  const double rows = blockIdx.x == 0 && thread == 0 ? static_cast<double>(args.rows) : 0;
  sum_over_grid(totals, loss_sum, rows, finishes_any<kHasLanes>(plan));
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
        const RowPlan plan = plan_rows(args.rows, args.classes, kBytes, end_to_end, false);
        if (plan.path != RowPath::kOwn && plan.path != RowPath::kTile) return kNoTiles;
        return launch(targets, plan);
      });
    }
  }
  return kNoTiles;
}

template <int kGamma, typename Scalar, typename Target>
int launch_target_tiles(const RowLossForward<Scalar>& args, const Target*, RowPlan plan, GridSum<float> totals,
                        void* workspace, void* stream) {
  plan = plan_short_rows<SharesOfLoad<Scalar, Target>>(plan, args.rows, args.classes, sizeof(SharedNumbers),
                                                       kSharedTileBytes);
  const cudaError_t error = prepare_grid_sum(totals, plan.grid, workspace, stream);
  if (error != cudaSuccess) return error;
  const auto kernel = plan.lanes > 1 ? shared_focal_forward_tile_kernel<Scalar, Target, kGamma, true>
                                     : shared_focal_forward_tile_kernel<Scalar, Target, kGamma, false>;
  return launch(kernel, plan.grid, kBlock, stream, args, plan, totals);
}

}  // namespace
}  // namespace focalkern::cuda
