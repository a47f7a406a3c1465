// The losses of one logit in their common case: declarations shared by sigmoid_loss_strided.cu and
// sigmoid_loss_vectorized.cu.
#pragma once

#include "cuda/grid_sum.cuh"
#include "kernels/sigmoid_loss.h"
#include "math/sigmoid_loss.h"

namespace focalkern::cuda {

// Meaningful only if is_scored(loss).
__host__ __device__ inline ScoredLoss scored_loss_of(SigmoidLoss loss) {
  return static_cast<ScoredLoss>(static_cast<int>(loss) - static_cast<int>(SigmoidLoss::kVarifocal));
}

// Whether the vectorized kernels apply. Parameters must be numbers. Logits must have the layout of the results and
// begin on a 16-byte boundary. Targets must be one label per row, or dense with the type, layout and alignment of the
// logits.
template <typename Scalar>
bool sigmoid_loss_is_plain(const SigmoidLossForward<Scalar>& args);
// Also requires one upstream gradient, and only the logits' gradient as output.
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
