// The losses of one logit in their common cases: declarations that sigmoid_loss_strided.cu and
// sigmoid_loss_vectorized.cu share.
#pragma once

#include "cuda/grid_sum.cuh"
#include "kernels/sigmoid_loss.h"
#include "math/sigmoid_loss.h"

namespace focalkern::cuda {

// Meaningful only if is_scored(loss).
__host__ __device__ inline ScoredLoss scored_loss_of(SigmoidLoss loss) {
  return static_cast<ScoredLoss>(static_cast<int>(loss) - static_cast<int>(SigmoidLoss::kVarifocal));
}

// A target share, of any type.
template <typename Real>
__device__ __forceinline__ Real read_share(const Operand& operand, int64_t at) {
  switch (operand.type) {
    case ElementType::kFloat:
      return static_cast<Real>(static_cast<const float*>(operand.data)[at]);
    case ElementType::kDouble:
      return static_cast<Real>(static_cast<const double*>(operand.data)[at]);
    case ElementType::kHalf:
      return static_cast<Real>(load_as_compute(static_cast<const Half*>(operand.data)[at]));
    case ElementType::kBFloat16:
      return static_cast<Real>(load_as_compute(static_cast<const BFloat16*>(operand.data)[at]));
    case ElementType::kUInt8:
      return static_cast<Real>(static_cast<const uint8_t*>(operand.data)[at]);
    case ElementType::kInt32:
      return static_cast<Real>(static_cast<const int32_t*>(operand.data)[at]);
    default:
      return static_cast<Real>(static_cast<const int64_t*>(operand.data)[at]);
  }
}

// Whether the vectorized kernels apply. Parameters must be numbers. Logits must have the layout of the results and
// begin on a 16-byte boundary. Targets must be one label per row, optionally with a score, or dense with the type,
// layout and alignment of the logits.
template <typename Scalar>
bool sigmoid_loss_is_plain(const SigmoidLossForward<Scalar>& args);
// Also requires one upstream gradient, and the gradient of the logits as only output.
template <typename Scalar>
bool sigmoid_loss_is_plain(const SigmoidLossBackward<Scalar>& args);

template <typename Scalar>
int64_t sigmoid_loss_plain_grid(int64_t size);

template <typename Scalar>
int sigmoid_loss_plain_forward(const SigmoidLossForward<Scalar>& args, const GridSum<compute_t<Scalar>>& totals,
                               void* stream);
template <typename Scalar>
int sigmoid_loss_plain_backward(const SigmoidLossBackward<Scalar>& args, void* stream);

}  // namespace focalkern::cuda
