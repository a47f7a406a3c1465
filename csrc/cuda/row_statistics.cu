// Statistics of rows of logits (math/row_sums.h), in any of the layouts that RowLayout describes, alone or from the
// read of a loss of labels. row_groups.cuh assigns threads to rows. Alone, they are the first read of the losses of
// row_loss_soft.cu, too. Gamma = 0, 1 and 2 with label smoothing have kernels of their own (soft_focal.cuh).

#include <type_traits>

#include "cuda/common.cuh"
#include "cuda/grid_sum.cuh"
#include "cuda/row_groups.cuh"
#include "cuda/row_loss.cuh"
#include "cuda/row_loss_numbers.cuh"
#include "cuda/row_statistics.cuh"
#include "cuda/soft_focal.cuh"
#include "kernels/row_loss_statistics.h"
#include "math/row_losses.h"

namespace focalkern::cuda {
namespace {

struct NoLoss {};

template <typename Scalar>
__device__ __forceinline__ SumsBesideLargest<compute_t<Scalar>> sums_of_row(const Row<Scalar>& row,
                                                                            const RowGroup& group) {
  using Real = compute_t<Scalar>;
  if (row.classes <= kFewClasses * row.lanes) {
    SumBesideLargest<Real, SecondSum::kFall, PlainSum<Real>> mine;
    mine.read(row);
    return mine.of(group);
  }
  SumBesideLargest<Real, SecondSum::kFall> mine;
  mine.read(row);
  return mine.of(group);
}

// The saved numbers of a loss with kHasStatistics for labels without smoothing.
template <typename Scalar>
__device__ __forceinline__ KeptNumbers<compute_t<Scalar>> kept_numbers(
    const Row<Scalar>& row, const SumsBesideLargest<compute_t<Scalar>>& sums) {
  using Real = compute_t<Scalar>;
  // m - m makes the result NaN for an infinite m; the sum over the others alone would be finite.
  const Real log_s = log_one_plus(sums.rest) + (sums.max - sums.max);
  const Real log_p = (row.z(row.label) - sums.max) - log_s;
  // Either the target is the class that the sum leaves out, or 1 - p does not cancel.
  const Real log_u = row.label == sums.largest ? logarithm(sums.rest) - log_s : log_one_plus(-exponential(log_p));
  return {sums.max, log_s, log_u, kIgnored};
}

template <typename Loss, typename Scalar>
__global__ __launch_bounds__(kBlock, 2) void row_statistics_kernel(
    const __grid_constant__ RowLossForward<Scalar> args, const __grid_constant__ RowGeometry geometry,
    const __grid_constant__ GridSum<compute_t<Scalar>> totals,
    const __grid_constant__ RowStatisticsResult<compute_t<Scalar>> statistics) {
  using Real = compute_t<Scalar>;
  constexpr bool kHasLoss = !std::is_same_v<Loss, NoLoss>;
  __shared__ double scratch[kWarpsPerBlock];
  const RowGroup group = {geometry.lanes, scratch};
  [[maybe_unused]] double loss_sum = 0;
  [[maybe_unused]] double weight_sum = 0;
  for (int64_t t = blockIdx.x; t < geometry.tiles; t += gridDim.x) {
    auto row = row_of<Scalar>(args, geometry, t);
    row.is_live = row.label != kIgnored;  // rows with a wrong label have statistics
    const SumsBesideLargest<Real> sums = sums_of_row(row, group);
    const bool is_nan = has_nan(row, group, sums.rest);
    if (row.row >= args.rows || row.index != 0) continue;
    write_statistics(statistics, row, sums, is_nan);
    if constexpr (kHasLoss) {
      KeptNumbers<Real> kept = {0, 0, 0, kIgnored};
      Real loss = row.label == kOutOfRange ? kNaN<Real> : Real(0);
      if (row.label >= 0) {
        kept = kept_numbers(row, sums);
        const Real weight = weight_of(args, row.label);
        loss = weight * Loss::template loss<Loss::kHasInverse>(numbers_of<Loss, Scalar>(args, row, kept));
        weight_sum += static_cast<double>(weight);
      }
      keep<Loss, Scalar>(args, row.row, kept);
      if (args.row_loss != nullptr) args.row_loss[row.row] = loss;
      loss_sum += static_cast<double>(loss);
    } else if (args.saved != nullptr) {
      const bool has_label = row.label >= 0;
      const Real log_s = log_one_plus(sums.rest) + (sums.max - sums.max);
      args.saved[row.row] = has_label ? sums.max : Real(0);
      args.saved[args.rows + row.row] = has_label ? log_s : Real(0);
      args.saved[2 * args.rows + row.row] = has_label ? logarithm(sums.rest) - log_s : Real(0);
    }
  }
  if constexpr (kHasLoss) sum_over_grid(totals, loss_sum, weight_sum);
}

}  // namespace

template <typename Scalar>
int row_statistics(const RowLossArgs<Scalar>& args, const RowStatisticsResult<compute_t<Scalar>>& statistics,
                   void* stream) {
  if (args.rows == 0) return cudaSuccess;
  if (!sizes_are_valid(args)) return cudaErrorInvalidValue;
  const RowLossForward<Scalar> rows = {args, nullptr};
  return launch_forward(row_statistics_kernel<NoLoss, Scalar>, rows, GridSum<compute_t<Scalar>>{}, nullptr, stream,
                        statistics);
}

template <typename Loss, typename Scalar>
int row_loss_with_statistics(const RowLossForward<Scalar>& args,
                             const RowStatisticsResult<compute_t<Scalar>>& statistics, bool mean,
                             compute_t<Scalar>* loss, compute_t<Scalar>* divisor, void* workspace, void* stream) {
  if (args.rows > 0 && !sizes_are_valid(args)) return cudaErrorInvalidValue;
  const GridSum<compute_t<Scalar>> totals = {loss, divisor, mean, nullptr, nullptr};
  if constexpr (kHasKernels<Loss> && kHasStatistics<Loss>) {
    if (!is_soft(args)) {
      return launch_forward(row_statistics_kernel<Loss, Scalar>, args, totals, workspace, stream, statistics);
    }
  }
  if constexpr (std::is_same_v<Loss, FocalFormula>) {
    if (is_soft(args) && has_small_gamma(args)) {
      return soft_focal_with_statistics(args, statistics, totals, workspace, stream);
    }
  }
  const int error = row_statistics<Scalar>(args, statistics, stream);
  if (error != cudaSuccess) return error;
  if constexpr (Loss::kTarget != SoftTarget::kNone) {
    if (is_soft(args)) return row_loss_soft_forward<Loss>(args, totals, workspace, stream, true);
  }
  return row_loss_forward<Loss>(args, mean, loss, divisor, workspace, stream);
}

#define FK_INSTANTIATE(Loss, Scalar)                                                                       \
  template int row_loss_with_statistics<Loss, Scalar>(const RowLossForward<Scalar>&,                       \
                                                      const RowStatisticsResult<compute_t<Scalar>>&, bool, \
                                                      compute_t<Scalar>*, compute_t<Scalar>*, void*, void*);
#define FK_ROW_LOSS(number, Formula, name) \
  FK_INSTANTIATE(Formula, Half)            \
  FK_INSTANTIATE(Formula, BFloat16)        \
  FK_INSTANTIATE(Formula, float)           \
  FK_INSTANTIATE(Formula, double)
#include "math/row_losses.def"
#undef FK_INSTANTIATE
#define FK_INSTANTIATE(Scalar) \
  template int row_statistics(const RowLossArgs<Scalar>&, const RowStatisticsResult<compute_t<Scalar>>&, void*);
FK_INSTANTIATE(Half)
FK_INSTANTIATE(BFloat16)
FK_INSTANTIATE(float)
FK_INSTANTIATE(double)
#undef FK_INSTANTIATE

}  // namespace focalkern::cuda
