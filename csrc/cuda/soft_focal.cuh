// The launchers of the focal loss with label smoothing or class probabilities for gamma = 0, 1 or 2
// (row_loss_smoothed.cu, row_loss_shared.cu), and which of them has a loss.
#pragma once

#include <type_traits>

#include "cuda/row_groups.cuh"
#include "cuda/row_loss.cuh"
#include "kernels/row_loss.h"
#include "kernels/row_sums.h"

namespace focalkern::cuda {

template <typename Scalar>
int smoothed_focal_forward(const RowLossForward<Scalar>& args, const GridSum<compute_t<Scalar>>& totals,
                           void* workspace, void* stream);
template <typename Scalar>
int smoothed_focal_with_statistics(const RowLossForward<Scalar>& args,
                                   const RowStatisticsResult<compute_t<Scalar>>& statistics,
                                   const GridSum<compute_t<Scalar>>& totals, void* workspace, void* stream);
template <typename Scalar>
int smoothed_focal_backward(const RowLossBackward<Scalar>& args, void* stream);

// The loss and the statistics of the rows from one read of the logits, for labels with smoothing and has_small_gamma.
template <typename Scalar>
int soft_focal_with_statistics(const RowLossForward<Scalar>& args,
                               const RowStatisticsResult<compute_t<Scalar>>& statistics,
                               const GridSum<compute_t<Scalar>>& totals, void* workspace, void* stream);

// Blocks per multiprocessor. More would spill registers; only the code for sm_90 has enough for four.
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ == 900
constexpr int kMostBlocks = 4;
#else
constexpr int kMostBlocks = 3;
#endif

// Whether gamma is the number 0, 1 or 2.
template <typename Scalar>
bool has_small_gamma(const RowLossArgs<Scalar>& args) {
  return args.gamma == nullptr && (args.gamma_value == 0 || args.gamma_value == 1 || args.gamma_value == 2);
}

// Calls the function with this gamma as a constant.
template <typename Real, typename Function>
FK_HOST_DEVICE auto with_constant_gamma(Real gamma, Function function) {
  if (gamma == 0) return function(std::integral_constant<int, 0>());
  if (gamma == 1) return function(std::integral_constant<int, 1>());
  return function(std::integral_constant<int, 2>());
}

}  // namespace focalkern::cuda
