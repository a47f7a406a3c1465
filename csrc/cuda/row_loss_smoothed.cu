// The focal loss with label smoothing for gamma = 0, 1 or 2 and without class weights, in any of the layouts that
// RowLayout describes, as row_loss_shared.cu has it for shares of every class. One read of the logits forward
// (smoothed_row.cuh), also with the statistics of the rows, one backward (smoothed_gradient.cuh). Rows of adjacent
// classes of at most 32 bits have forward kernels of their own (smoothed_numbers.cuh): they lie in a warp's registers
// or in a tile of shared memory, or are read twice (smoothed_twice.cuh). Short rows lie in a tile only if they have no
// gaps; then the backward pass reads and writes a tile as one run of vectors.
//
// A row saves its largest logit, log S, and the sum of the slopes of all classes but the likely one, each times its
// share. The likely class is the one, if any, with more than about half of the probability (row_loss_soft.cu).

#include "cuda/common.cuh"
#include "cuda/focal_loss_tiles.cuh"
#include "cuda/grid_sum.cuh"
#include "cuda/row_groups.cuh"
#include "cuda/row_loss.cuh"
#include "cuda/row_statistics.cuh"
#include "cuda/smoothed_gradient.cuh"
#include "cuda/smoothed_numbers.cuh"
#include "cuda/smoothed_row.cuh"
#include "cuda/smoothed_twice.cuh"
#include "cuda/soft_focal.cuh"
#include "cuda/soft_row.cuh"
#include "kernels/row_loss.h"
#include "math/focal.h"

namespace focalkern::cuda {
namespace {

template <typename Scalar>
constexpr int kBackwardBlocks = sizeof(Scalar) == sizeof(double) ? 2 : kMostBlocks;
// Forward, two vectors of 16-bit numbers need more registers.
template <typename Scalar>
constexpr int kForwardBlocks = sizeof(Scalar) < sizeof(float) ? 3 : kBackwardBlocks<Scalar>;

// Writes the saved numbers of a row and its loss, and returns the loss.
template <int kGamma, typename Scalar>
__device__ __forceinline__ compute_t<Scalar> finish_row(const RowLossForward<Scalar>& args, const Row<Scalar>& row,
                                                        compute_t<Scalar> share,
                                                        const SmoothedSums<compute_t<Scalar>>& sums) {
  using Real = compute_t<Scalar>;
  Real loss = row.label == kOutOfRange ? kNaN<Real> : Real(0);
  Real max = 0, log_s = 0, slopes = 0;
  if (row.is_live) {
    max = sums.max;
    // m - m makes the result NaN for an infinite m; the sum over the others alone would be finite.
    const Real rest = sums.rest + (max - max);
    log_s = log_one_plus(rest);
    const SmoothedRow<Scalar, kGamma> special(args, row, share, max, log_s, rest);
    const Real count = static_cast<Real>(row.classes - 1);
    const SoftTerms<Real> others =
        smoothed_terms<kGamma>(sums, log_s, special.largest.p, share, count, special.detached);
    const SoftTerms<Real>&largest = special.largest.terms, &label = special.label.terms;
    loss = others.loss + share * largest.loss;
    slopes = others.slope + (special.likely == max ? Real(0) : share * largest.slope);
    if (special.of_label != Real(0)) {
      loss += special.of_label * label.loss;
      slopes += special.label_is_likely ? Real(0) : special.of_label * label.slope;
    }
  }
  args.saved[row.row] = max;
  args.saved[args.rows + row.row] = log_s;
  args.saved[2 * args.rows + row.row] = slopes;
  if (args.row_loss != nullptr) args.row_loss[row.row] = loss;
  return loss;
}

// A row of adjacent classes that one thread finishes, where its logits are in a tile.
template <typename Scalar>
__device__ __forceinline__ Row<Scalar> short_row(const RowLossArgs<Scalar>& args, int64_t number,
                                                 const Scalar* logits) {
  Row<Scalar> row = {number, logits, 1, static_cast<int>(args.classes)};
  const int label = as_class(args, args.labels[number]);
  row.label = label;
  row.is_live = label >= 0;
  return row;
}

template <typename Scalar, int kGamma>
__global__ __launch_bounds__(kBlock, kForwardBlocks<Scalar>) void smoothed_focal_forward_kernel(
    const __grid_constant__ RowLossForward<Scalar> args, const __grid_constant__ RowGeometry geometry,
    const __grid_constant__ GridSum<compute_t<Scalar>> totals) {
  using Real = compute_t<Scalar>;
  __shared__ double scratch[kWarpsPerBlock];
  __shared__ SumsOfTiles<SmoothedSums<Real>> kept;
  const RowGroup group = {geometry.lanes, scratch};
  const Real share = uniform_share<true>(args);
  double loss_sum = 0;
  int rows = 0;
  int turn = 0;
  for (int64_t t = blockIdx.x; t < geometry.tiles; t += gridDim.x, turn ^= 1) {
    auto row = row_of<Scalar>(args, geometry, t);
    SmoothedSums<Real> sums = smoothed_sums<kGamma>(row, group, share);
    take_row(args, geometry, t, kept, turn, row, sums);
    if (row.row >= args.rows) continue;
    loss_sum += static_cast<double>(finish_row<kGamma>(args, row, share, sums));
    rows += row.is_live;
  }
  sum_over_grid(totals, loss_sum, static_cast<double>(rows));
}

// The same for rows that a warp keeps in registers. kMost: classes of a lane
template <typename Scalar, int kGamma, int kMost>
__global__ __launch_bounds__(kBlock, 3) void smoothed_focal_forward_registers_kernel(
    const __grid_constant__ RowLossForward<Scalar> args, const __grid_constant__ RowGeometry geometry,
    const __grid_constant__ GridSum<float> totals, const float share) {
  __shared__ SmoothedNumbers kept[kWarp];
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  const int left = static_cast<int>(args.classes) / kVectorSize<Scalar> - lane;
  double loss_sum = 0;
  int live = 0;
  rows_in_registers<true>(
      args, geometry,
      [&](int64_t row, int place) {
        const Scalar* own = args.logits + row * args.layout.inner_stride + lane * kVectorSize<Scalar>;
        const float number = smoothed_number<kGamma>(RowOfLane<Scalar, kMost>(own, left), share, lane);
        if (lane % kLanesOfNumber == 0) reinterpret_cast<float*>(kept + place)[lane / kLanesOfNumber] = number;
      },
      [&](const Row<Scalar>& row, int place) {
        const auto sums = kept[place].sums(share, static_cast<float>(args.classes));
        loss_sum += static_cast<double>(finish_row<kGamma>(args, row, share, sums));
        live += row.is_live;
      });
  sum_over_grid(totals, loss_sum, static_cast<double>(live), threadIdx.x < kWarp);
}

// The same for short rows: a thread, or lanes, take a row of a tile in shared memory, and a thread finishes it.
// kValues: classes that are loaded at once
template <typename Scalar, int kGamma, int kValues, bool kHasLanes>
__global__ __launch_bounds__(kBlock, 3) void smoothed_focal_forward_tile_kernel(
    const __grid_constant__ RowLossForward<Scalar> args, const __grid_constant__ RowPlan plan,
    const __grid_constant__ GridSum<float> totals, const float share) {
  __shared__ __align__(16) unsigned char tile_bytes[kSmoothedTileBytes];
  const int classes = static_cast<int>(args.classes);
  auto* tile = reinterpret_cast<Scalar*>(tile_bytes);
  double loss_sum = 0;
  int live = 0;
  for (int64_t t = blockIdx.x; t < plan.tiles; t += gridDim.x) {
    const TileRows of_tile(plan, args.rows, t);
    const Scalar* logits = of_tile.of(args.logits, classes);
    load_large_tile(tile, logits, of_tile.rows * classes);
    __syncthreads();
    each_row_of_tile<kHasLanes, SmoothedNumbers>(
        plan, of_tile.rows, tile_bytes + kSmoothedTileBytes,
        [&](int r, int lane, bool exists) {
          if constexpr (kHasLanes) {
            return smoothed_numbers<kGamma, kValues>(tile, r, classes, share, plan.around, lane, plan.lanes, exists);
          } else {
            return smoothed_numbers<kGamma, kValues>(tile + r * classes, r, classes, share, plan.around);
          }
        },
        [&](int r, const SmoothedNumbers& numbers) {
          const auto row = short_row(args, of_tile.first + static_cast<uint32_t>(r), tile + r * classes);
          const SmoothedSums<float> sums = numbers.sums(share, static_cast<float>(classes));
          loss_sum += static_cast<double>(finish_row<kGamma>(args, row, share, sums));
          live += row.is_live;
        });
    __syncthreads();  // before the next tile
  }
  sum_over_grid(totals, loss_sum, static_cast<double>(live), finishes_any<kHasLanes>(plan));
}

// The same for rows of adjacent classes that a warp, or the block, reads twice.
template <typename Scalar, int kGamma>
__global__ __launch_bounds__(kBlock, 3) void smoothed_focal_forward_twice_kernel(
    const __grid_constant__ RowLossForward<Scalar> args, const __grid_constant__ RowGeometry geometry,
    const __grid_constant__ GridSum<float> totals, const float share) {
  __shared__ double scratch[kWarpsPerBlock];
  __shared__ SmoothedNumbers kept[kWarp];  // of the rows of a tile, or of the warps of the row
  const int thread = static_cast<int>(threadIdx.x), warp = thread / kWarp, lane = thread % kWarp;
  const int of_tile = kBlock >> geometry.lane_bits;
  const bool is_of_block = of_tile == 1;
  const int lanes = is_of_block ? kBlock : kWarp, index = thread & (lanes - 1);
  const RowGroup group = {lanes, scratch};
  double loss_sum = 0;
  int live = 0;
  for (int64_t t = blockIdx.x; t < geometry.tiles; t += gridDim.x) {
    const int64_t first = t * of_tile;
    const int there = static_cast<int>(args.rows - first < of_tile ? args.rows - first : of_tile);
    for (int place = is_of_block ? 0 : warp; place < there; place += kWarpsPerBlock) {
      const auto row = row_at<Scalar>(args, geometry, first + place, index, lanes);
      if (!row.is_live) continue;
      const float max = group.max(largest_of_thread(row));
      const float number = number_of_warp(smoothed_numbers<kGamma>(row, max, share), lane);
      float* to = reinterpret_cast<float*>(kept + (is_of_block ? warp : place));
      if (lane % kLanesOfNumber == 0) to[lane / kLanesOfNumber] = number;
    }
    __syncthreads();
    if (thread < there) {
      const auto row = row_at<Scalar>(args, geometry, first + thread, 0, 1);
      const SmoothedNumbers numbers = sum_of(kept + thread, is_of_block ? kWarpsPerBlock : 1);
      const auto sums = numbers.sums(share, static_cast<float>(args.classes));
      loss_sum += static_cast<double>(finish_row<kGamma>(args, row, share, sums));
      live += row.is_live;
    }
    __syncthreads();
  }
  sum_over_grid(totals, loss_sum, static_cast<double>(live), threadIdx.x < kWarp);
}

// With the statistics of the rows. The sums of gamma = 2 include those of every gamma here and those of the entropy.
template <typename Scalar>
__global__ __launch_bounds__(kBlock, 2) void smoothed_focal_statistics_kernel(
    const __grid_constant__ RowLossForward<Scalar> args, const __grid_constant__ RowGeometry geometry,
    const __grid_constant__ GridSum<compute_t<Scalar>> totals,
    const __grid_constant__ RowStatisticsResult<compute_t<Scalar>> statistics) {
  using Real = compute_t<Scalar>;
  __shared__ double scratch[kWarpsPerBlock];
  const RowGroup group = {geometry.lanes, scratch};
  const Real share = uniform_share<true>(args);
  double loss_sum = 0;
  double weight_sum = 0;
  for (int64_t t = blockIdx.x; t < geometry.tiles; t += gridDim.x) {
    auto row = row_of<Scalar>(args, geometry, t);
    row.is_live = row.label != kIgnored;  // rows with a wrong label have statistics
    const auto sums = smoothed_sums<2, true>(row, group, share);
    const bool is_nan = has_nan(row, group, sums.rest);
    if (row.row >= args.rows || row.index != 0) continue;
    const Real rest = sums.largest == kNoClass ? Real(0) : sums.rest;
    write_statistics(statistics, row, {sums.max, rest, sums.fall, sums.largest}, is_nan);
    row.is_live = row.label >= 0;
    loss_sum += with_constant_gamma(args.gamma_value, [&](auto gamma) {
      return static_cast<double>(finish_row<decltype(gamma)::value>(args, row, share, sums));
    });
    if (row.is_live) weight_sum += 1;
  }
  sum_over_grid(totals, loss_sum, weight_sum);
}

template <typename Scalar, int kGamma>
__global__ __launch_bounds__(kBlock, kBackwardBlocks<Scalar>) void smoothed_focal_backward_kernel(
    const __grid_constant__ RowLossBackward<Scalar> args, const __grid_constant__ RowGeometry geometry) {
  using Real = compute_t<Scalar>;
  const Real share = uniform_share<true>(args);
  for (int64_t t = blockIdx.x; t < geometry.tiles; t += gridDim.x) {
    auto row = row_of<Scalar>(args, geometry, t);
    if (row.row >= args.rows || args.grad_logits == nullptr) continue;
    Scalar* grad = args.grad_logits + geometry.grad_logits(row.row);
    const int64_t stride = args.grad_layout.class_stride;
    const auto gradient = smoothed_gradient<kGamma>(args, row, share);
    const RowWriter<Scalar> writer(row, grad, stride);
    row.is_live = true;  // each_class visits no other rows; all are written
    each_class(row, [&](const auto& values, int first, int step) {
      constexpr int count = kCount<decltype(values)>;
      Scalar result[count];
#pragma unroll
      for (int k = 0; k < count; ++k) {
        result[k] =
            Store<Scalar>::from_compute(gradient.template at<kGamma>(values[k], Real(1), args.detach_modulation));
      }
      writer.write(result, first, step);
    });
    // Overwrites a value that the same thread wrote.
    if (gradient.target >= 0 && is_mine(row, gradient.target)) {
      grad[gradient.target * stride] = Store<Scalar>::from_compute(gradient.at_target);
    }
  }
}

// The same for short rows that lie end to end, a tile of them as one run of vectors. classes is a multiple of kValues.
template <typename Scalar, int kGamma, int kValues>
__global__ __launch_bounds__(kBlock, kBackwardBlocks<Scalar>) void smoothed_focal_backward_tile_kernel(
    const __grid_constant__ RowLossBackward<Scalar> args, const __grid_constant__ RowPlan plan,
    const __grid_constant__ ClassDivider divide) {
  using Real = compute_t<Scalar>;
  __shared__ SmoothedGradient<Real> gradients[kBlock];  // [rows_per_tile]
  const Real share = uniform_share<true>(args);
  const int thread = static_cast<int>(threadIdx.x), classes = static_cast<int>(args.classes);
  for (int64_t t = blockIdx.x; t < plan.tiles; t += gridDim.x) {
    const TileRows of_tile(plan, args.rows, t);
    const Scalar* logits = of_tile.of(args.logits, classes);
    // After the last barrier of the previous tile, a thread reads only the gradient that it wrote.
    if (thread < of_tile.rows) {
      const auto row = short_row(args, of_tile.first + thread, logits + thread * classes);
      gradients[thread] = smoothed_gradient<kGamma>(args, row, share);
    }
    __syncthreads();
    write_tile_gradient<kValues>(
        of_tile.of(args.grad_logits, classes), logits, of_tile.rows, classes, divide, gradients,
        [&](const auto& gradient, Real z, Real share) {
          return Store<Scalar>::from_compute(gradient.template at<kGamma>(z, share, args.detach_modulation));
        });
  }
}

template <int kGamma, int kValues, typename Scalar>
int launch_tiles(const RowLossForward<Scalar>& args, RowPlan plan, GridSum<float> totals, void* workspace, void* stream,
                 float share) {
  plan = plan_short_rows<LogitsOfLoad<Scalar, kValues>>(plan, args.rows, args.classes, sizeof(SmoothedNumbers),
                                                        kSmoothedTileBytes);
  const cudaError_t error = prepare_grid_sum(totals, plan.grid, workspace, stream);
  if (error != cudaSuccess) return error;
  const auto kernel = plan.lanes > 1 ? smoothed_focal_forward_tile_kernel<Scalar, kGamma, kValues, true>
                                     : smoothed_focal_forward_tile_kernel<Scalar, kGamma, kValues, false>;
  return launch(kernel, plan.grid, kBlock, stream, args, plan, totals, share);
}

}  // namespace

template <typename Scalar>
int smoothed_focal_forward(const RowLossForward<Scalar>& args, const GridSum<compute_t<Scalar>>& totals,
                           void* workspace, void* stream) {
  return with_constant_gamma(args.gamma_value, [&](auto gamma) {
    if constexpr (sizeof(Scalar) <= sizeof(float)) {
      const float share = args.label_smoothing / static_cast<float>(args.classes);
      const auto in_registers = [&](auto most) {
        return launch_in_registers(smoothed_focal_forward_registers_kernel<Scalar, gamma(), most()>, args, totals,
                                   workspace, stream, share);
      };
      constexpr std::integral_constant<int, kClassesOfLane> kMost;
      constexpr std::integral_constant<int, kClassesOfLane / 2> kHalf;
      if (fits_registers<kMost>(args.logits, args.layout, args.rows, args.classes)) return in_registers(kMost);
      if constexpr (sizeof(Scalar) == sizeof(float)) {  // of 16 bits, such rows mostly lie in a tile
        if (fits_registers<kHalf>(args.logits, args.layout, args.rows, args.classes)) return in_registers(kHalf);
      }
      const bool end_to_end = is_end_to_end(args.logits, args.layout, args.rows, args.classes);
      const RowPlan plan = plan_rows(args.rows, args.classes, sizeof(Scalar), end_to_end, false);
      if (plan.path == RowPath::kOwn || plan.path == RowPath::kTile) {
        if constexpr (sizeof(Scalar) == sizeof(uint16_t)) {
          if (args.classes % 2 == 0) return launch_tiles<gamma(), 2>(args, plan, totals, workspace, stream, share);
        }
        return launch_tiles<gamma(), 1>(args, plan, totals, workspace, stream, share);
      }
      if (plan.lanes >= kWarp && args.layout.class_stride == 1) {
        const int of_tile = plan.lanes == kBlock ? 1 : rows_per_tile_of_warps(args.rows);
        return launch_tiles_of_warps(smoothed_focal_forward_twice_kernel<Scalar, gamma()>, args, of_tile, totals,
                                     workspace, stream, share);
      }
    }
    return launch_forward(smoothed_focal_forward_kernel<Scalar, gamma()>, args, totals, workspace, stream);
  });
}

template <typename Scalar>
int smoothed_focal_with_statistics(const RowLossForward<Scalar>& args,
                                   const RowStatisticsResult<compute_t<Scalar>>& statistics,
                                   const GridSum<compute_t<Scalar>>& totals, void* workspace, void* stream) {
  return launch_forward(smoothed_focal_statistics_kernel<Scalar>, args, totals, workspace, stream, statistics);
}

template <typename Scalar>
int smoothed_focal_backward(const RowLossBackward<Scalar>& args, void* stream) {
  const bool end_to_end = args.grad_logits != nullptr &&
                          is_end_to_end(args.logits, args.layout, args.rows, args.classes) &&
                          is_end_to_end(args.grad_logits, args.grad_layout, args.rows, args.classes);
  return with_constant_gamma(args.gamma_value, [&](auto gamma) {
    RowPlan plan = plan_rows(args.rows, args.classes, sizeof(Scalar), end_to_end, false);
    if (end_to_end && (plan.path == RowPath::kOwn || plan.path == RowPath::kTile)) {
      if (plan.rows_per_tile > kBlock) plan.rows_per_tile = kBlock;
      plan = finish_row_plan(plan, args.rows);
      const auto launch_tiles = [&](auto values) {
        return launch(smoothed_focal_backward_tile_kernel<Scalar, gamma(), values()>, plan.grid, kBlock, stream, args,
                      plan, ClassDivider(args.classes));
      };
      if constexpr (sizeof(Scalar) == sizeof(uint16_t)) {
        if (args.classes % 2 == 0) return launch_tiles(std::integral_constant<int, 2>());
      }
      return launch_tiles(std::integral_constant<int, 1>());
    }
    return launch_backward(smoothed_focal_backward_kernel<Scalar, gamma()>, args, stream);
  });
}

#define FK_INSTANTIATE(Scalar)                                                                                         \
  template int smoothed_focal_forward(const RowLossForward<Scalar>&, const GridSum<compute_t<Scalar>>&, void*, void*); \
  template int smoothed_focal_with_statistics(const RowLossForward<Scalar>&,                                           \
                                              const RowStatisticsResult<compute_t<Scalar>>&,                           \
                                              const GridSum<compute_t<Scalar>>&, void*, void*);                        \
  template int smoothed_focal_backward(const RowLossBackward<Scalar>&, void*);
FK_INSTANTIATE(Half)
FK_INSTANTIATE(BFloat16)
FK_INSTANTIATE(float)
FK_INSTANTIATE(double)
#undef FK_INSTANTIATE

}  // namespace focalkern::cuda
