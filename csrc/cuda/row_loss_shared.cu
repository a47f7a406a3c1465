// The focal loss of rows whose classes have shares (class probabilities; label smoothing with class weights) for gamma
// = 0, 1 or 2, in any of the layouts that RowLayout describes: one read of logits and shares forward (shared_row.cuh),
// one backward. Short rows of class probabilities have kernels of their own (shared_tile.cuh), and so have rows of 16
// bits that a warp keeps in registers. Also chooses the kernels of the focal loss for all such targets.
//
// A row saves a largest class as a number (class_as_number), log S, and the sum of the slopes of all classes but the
// likely one, each times its share. The likely class is the one, if any, with more than about half of the
// probability (row_loss_soft.cu).

#include "cuda/common.cuh"
#include "cuda/focal_loss_tiles.cuh"
#include "cuda/grid_sum.cuh"
#include "cuda/row_groups.cuh"
#include "cuda/row_loss.cuh"
#include "cuda/row_statistics.cuh"
#include "cuda/shared_in_registers.cuh"
#include "cuda/shared_row.cuh"
#include "cuda/shared_tile.cuh"
#include "cuda/smoothed_gradient.cuh"
#include "cuda/soft_focal.cuh"
#include "cuda/soft_row.cuh"
#include "cuda/soft_shares.cuh"
#include "kernels/row_loss.h"
#include "math/focal.h"

namespace focalkern::cuda {
namespace {

template <typename Scalar>
constexpr int kSharedBlocks = sizeof(Scalar) == sizeof(double)  ? 1
                              : sizeof(Scalar) == sizeof(float) ? kMostBlocks
                                                                : 3;

template <typename Scalar>
using Shares = ClassShares<FocalFormula, Scalar, false>;

// Probability targets: the mean is over all rows.
template <typename Scalar>
__device__ __forceinline__ double weight_of_row(const RowLossArgs<Scalar>& args, const Row<Scalar>& row) {
  if (!row.is_live) return 0;
  return args.target_probs ? 1.0 : static_cast<double>(weight_of(args, row.label));
}

template <typename Scalar, int kGamma>
__global__ __launch_bounds__(kBlock, kSharedBlocks<Scalar>) void shared_focal_forward_kernel(
    const __grid_constant__ RowLossForward<Scalar> args, const __grid_constant__ RowGeometry geometry,
    const __grid_constant__ GridSum<compute_t<Scalar>> totals) {
  using Real = compute_t<Scalar>;
  __shared__ double scratch[kWarpsPerBlock];
  __shared__ SumsOfTiles<SharedSums<Real>> kept;
  const RowGroup group = {geometry.lanes, scratch};
  // Of each thread, in shared memory because all registers are taken.
  __shared__ double loss_sums[kBlock], weight_sums[kBlock];
  double &loss_sum = loss_sums[threadIdx.x], &weight_sum = weight_sums[threadIdx.x];
  loss_sum = weight_sum = 0;
  int turn = 0;
  for (int64_t t = blockIdx.x; t < geometry.tiles; t += gridDim.x, turn ^= 1) {
    auto row = row_of<Scalar>(args, geometry, t);
    SharedSums<Real> sums = shared_sums<kGamma>(row, Shares<Scalar>(args, row), group);
    take_row(args, geometry, t, kept, turn, row, sums);
    if (row.row >= args.rows) continue;
    loss_sum += static_cast<double>(finish_row<kGamma>(args, row, Shares<Scalar>(args, row), sums));
    weight_sum += weight_of_row(args, row);
  }
  sum_over_grid(totals, loss_sum, weight_sum);
}

// The same for class probabilities of the type of the logits, without class weights, in rows that a warp keeps in
// registers.
template <typename Scalar, int kGamma>
__global__ __launch_bounds__(kBlock, 2) void shared_focal_forward_registers_kernel(
    const __grid_constant__ RowLossForward<Scalar> args, const __grid_constant__ RowGeometry geometry,
    const __grid_constant__ GridSum<float> totals, const float spread) {
  __shared__ SharedSums<float> kept[kWarp];
  constexpr int kSize = kVectorSize<Scalar>;
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  const int left = static_cast<int>(args.classes) / kSize - lane;
  const auto* targets = static_cast<const Scalar*>(args.target_probs.data);
  double loss_sum = 0;
  rows_in_registers<false>(
      args, geometry,
      [&](int64_t row, int place) {
        const SharedRowOfLane<kGamma, Scalar> of_lane(args.logits + row * args.layout.inner_stride + lane * kSize,
                                                      targets + row * args.target_layout.inner_stride + lane * kSize,
                                                      left);
        int largest;
        const float number = of_lane.number(1 - args.label_smoothing, spread, lane, largest);
        if (lane % kLanesOfNumber == 0) reinterpret_cast<float*>(kept + place)[lane / kLanesOfNumber] = number;
        if (lane == 0) kept[place].largest = largest;
      },
      [&](const Row<Scalar>& row, int place) {
        loss_sum += static_cast<double>(finish_row<kGamma>(args, row, Shares<Scalar>(args, row), kept[place]));
      });
  const double rows = blockIdx.x == 0 && threadIdx.x == 0 ? static_cast<double>(args.rows) : 0;
  sum_over_grid(totals, loss_sum, rows, threadIdx.x < kWarp);
}

// For labels, with the statistics of the rows; the sums of gamma = 2 include those of every gamma here. Short rows have
// compensated sums, too: a second loop for them would double the time to compile.
template <typename Scalar>
__global__ __launch_bounds__(kBlock, sizeof(Scalar) == sizeof(double) ? 1 : 2) void shared_focal_statistics_kernel(
    const __grid_constant__ RowLossForward<Scalar> args, const __grid_constant__ RowGeometry geometry,
    const __grid_constant__ GridSum<compute_t<Scalar>> totals,
    const __grid_constant__ RowStatisticsResult<compute_t<Scalar>> statistics) {
  using Real = compute_t<Scalar>;
  __shared__ double scratch[kWarpsPerBlock];
  const RowGroup group = {geometry.lanes, scratch};
  double loss_sum = 0;
  double weight_sum = 0;
  for (int64_t t = blockIdx.x; t < geometry.tiles; t += gridDim.x) {
    auto row = row_of<Scalar>(args, geometry, t);
    row.is_live = row.label != kIgnored;  // rows with a wrong label have statistics
    const Shares<Scalar> shares(args, row);
    SharedSumOfThread<2, true, Real, CompensatedSum<Real>, Shares<Scalar>> mine(shares);
    mine.read(row);
    const SharedSums<Real> sums = mine.of(group);
    const bool is_nan = has_nan(row, group, sums.rest);
    if (row.row >= args.rows || row.index != 0) continue;
    write_statistics(statistics, row, {sums.max, sums.rest, sums.plain_fall, sums.largest}, is_nan);
    row.is_live = row.label >= 0;
    loss_sum += with_constant_gamma(args.gamma_value, [&](auto gamma) {
      return static_cast<double>(finish_row<decltype(gamma)::value>(args, row, shares, sums));
    });
    weight_sum += weight_of_row(args, row);
  }
  sum_over_grid(totals, loss_sum, weight_sum);
}

template <typename Scalar, int kGamma>
__global__ __launch_bounds__(kBlock, kSharedBlocks<Scalar>) void shared_focal_backward_kernel(
    const __grid_constant__ RowLossBackward<Scalar> args, const __grid_constant__ RowGeometry geometry) {
  using Real = compute_t<Scalar>;
  for (int64_t t = blockIdx.x; t < geometry.tiles; t += gridDim.x) {
    const auto row = row_of<Scalar>(args, geometry, t);
    if (row.row >= args.rows) continue;
    Scalar* grad = args.grad_logits == nullptr ? nullptr : args.grad_logits + geometry.grad_logits(row.row);
    Real* grad_target = args.grad_target == nullptr ? nullptr : args.grad_target + geometry.target_probs(row.row);
    const int64_t stride = args.grad_layout.class_stride;
    // A row that does not count has a zero gradient, even where its logits are infinite or NaN.
    const Real given = row.is_live ? upstream(args, row.row) : Real(0);
    if (given == Real(0)) {
      const Real missing = row.label == kOutOfRange ? kNaN<Real> : Real(0);
      for (int64_t j = row.index; j < row.classes; j += row.lanes) {
        if (grad != nullptr) grad[j * stride] = Store<Scalar>::from_compute(missing);
        if (grad_target != nullptr) grad_target[j * row.target_stride] = missing;
      }
      continue;
    }
    const Shares<Scalar> shares(args, row);
    const int top = saved_class(args, row.row);
    const Real max = row.z(top), log_s = args.saved[args.rows + row.row];
    const Real others = args.saved[2 * args.rows + row.row];
    const bool detached = args.detach_modulation;
    const SoftRow<Scalar> numbers(args, row, max, log_s, logarithm(exponential_minus_one(log_s)) - log_s, detached,
                                  false);
    const bool has_likely = numbers.likely == max;
    ClassTerms<Real> likely = {};
    if (has_likely) likely = likely_terms<FocalFormula>(args, row, numbers, shares.of(top));
    // dL/dz_j = p_j (sum a) - a_j
    const Real of_lse = given * lse_slope(args, row.row);
    const Real of_p = given * (others + likely.slope) + of_lse;
    const Real of_target = given * (Real(1) - args.label_smoothing);
    const RowWriter<Scalar> writer(row, grad, stride);
    const WholeGamma<Real, kGamma> gamma(detached);
    each_class(row, [&](const auto& values, int first, int step) {
      constexpr int count = kCount<decltype(values)>;
      Real some[count];
      shares.read(first, step, some);
      Scalar result[count];
#pragma unroll
      for (int k = 0; k < count; ++k) {
        const auto of_class = unlikely_class<FocalFormula>(numbers, values[k], [&](Real) { return gamma; }, some[k]);
        result[k] = Store<Scalar>::from_compute(of_class.p * of_p - given * of_class.terms.slope);
        if (grad_target != nullptr) {
          const int j = first + k * step;
          grad_target[j * row.target_stride] =
              weighted_slope(weight_of(args, j), of_target * of_class.terms.grad_share);
        }
      }
      if (grad != nullptr) writer.write(result, first, step);
    });
    // Overwrites values that the same thread wrote.
    if (!has_likely || !is_mine(row, top)) continue;
    if (grad != nullptr) {
      // p_j (sum a - a_j) - u a_j, without the difference p a_j - a_j, which would cancel as p -> 1.
      const Real p = exponential(-log_s), u = exponential(numbers.log_u);
      grad[top * stride] = Store<Scalar>::from_compute(given * (p * others - u * likely.slope) + of_lse * p);
    }
    if (grad_target != nullptr) {
      grad_target[top * row.target_stride] = weighted_slope(weight_of(args, top), of_target * likely.grad_share);
    }
  }
}

}  // namespace

template <typename Scalar>
int soft_focal_forward(const RowLossForward<Scalar>& args, const GridSum<compute_t<Scalar>>& totals, void* workspace,
                       void* stream) {
  if (!has_small_gamma(args)) return row_loss_soft_forward<FocalFormula>(args, totals, workspace, stream);
  if (is_uniform<FocalFormula>(args)) return smoothed_focal_forward(args, totals, workspace, stream);
  return with_constant_gamma(args.gamma_value, [&](auto gamma) {
    const int tiles = with_target_tiles(args, [&](const auto* targets, const RowPlan& plan) -> int {
      return launch_target_tiles<gamma()>(args, targets, plan, totals, workspace, stream);
    });
    if (tiles != kNoTiles) return tiles;
    if constexpr (sizeof(Scalar) < sizeof(float)) {
      const auto* targets = static_cast<const Scalar*>(args.target_probs.data);
      if (targets != nullptr && !args.target_probs.is_real && args.class_weight == nullptr &&
          fits_registers(args.logits, args.layout, args.rows, args.classes) &&
          fits_registers(targets, args.target_layout, args.rows, args.classes)) {
        return launch_in_registers(shared_focal_forward_registers_kernel<Scalar, gamma()>, args, totals, workspace,
                                   stream, args.label_smoothing / static_cast<float>(args.classes));
      }
    }
    return launch_forward(shared_focal_forward_kernel<Scalar, gamma()>, args, totals, workspace, stream);
  });
}

template <typename Scalar>
int soft_focal_with_statistics(const RowLossForward<Scalar>& args,
                               const RowStatisticsResult<compute_t<Scalar>>& statistics,
                               const GridSum<compute_t<Scalar>>& totals, void* workspace, void* stream) {
  if (is_uniform<FocalFormula>(args)) {
    return smoothed_focal_with_statistics(args, statistics, totals, workspace, stream);
  }
  return launch_forward(shared_focal_statistics_kernel<Scalar>, args, totals, workspace, stream, statistics);
}

template <typename Scalar>
int soft_focal_backward(const RowLossBackward<Scalar>& args, void* stream) {
  const bool has_gamma_slope = args.grad_gamma != nullptr;
  if (!has_small_gamma(args)) return row_loss_soft_backward<FocalFormula>(args, stream);
  if (is_uniform<FocalFormula>(args)) {
    if (has_gamma_slope) return row_loss_soft_backward<FocalFormula>(args, stream);
    return smoothed_focal_backward(args, stream);
  }
  if (has_gamma_slope) {
    RowLossBackward<Scalar> with_class = args;
    with_class.first_is_class = true;
    return row_loss_soft_backward<FocalFormula>(with_class, stream);
  }
  return with_constant_gamma(args.gamma_value, [&](auto gamma) {
    if (args.grad_target == nullptr && args.grad_logits != nullptr &&
        is_end_to_end(args.grad_logits, args.grad_layout, args.rows, args.classes)) {
      const int tiles = with_target_tiles(args, [&](const auto* targets, RowPlan plan) {
        if (plan.rows_per_tile > kBlock) plan.rows_per_tile = kBlock;
        plan = finish_row_plan(plan, args.rows);
        using Target = std::remove_const_t<std::remove_pointer_t<decltype(targets)>>;
        return launch(shared_focal_backward_tile_kernel<Scalar, Target, gamma()>, plan.grid, kBlock, stream, args, plan,
                      ClassDivider(args.classes));
      });
      if (tiles != kNoTiles) return tiles;
    }
    return launch_backward(shared_focal_backward_kernel<Scalar, gamma()>, args, stream);
  });
}

#define FK_INSTANTIATE(Scalar)                                                                                     \
  template int soft_focal_forward(const RowLossForward<Scalar>&, const GridSum<compute_t<Scalar>>&, void*, void*); \
  template int soft_focal_with_statistics(const RowLossForward<Scalar>&,                                           \
                                          const RowStatisticsResult<compute_t<Scalar>>&,                           \
                                          const GridSum<compute_t<Scalar>>&, void*, void*);                        \
  template int soft_focal_backward(const RowLossBackward<Scalar>&, void*);
FK_INSTANTIATE(Half)
FK_INSTANTIATE(BFloat16)
FK_INSTANTIATE(float)
FK_INSTANTIATE(double)
#undef FK_INSTANTIATE

}  // namespace focalkern::cuda
