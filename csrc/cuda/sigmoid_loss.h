// The losses of one logit as most callers use them, between the launchers of sigmoid_loss_strided.cu and the kernels of
// sigmoid_loss_vectorized.cu.
#pragma once

#include "cuda/grid_sum.cuh"
#include "kernels/sigmoid_loss.h"

namespace focalkern::cuda {

// Whether the plain kernels take them: parameters that are numbers, and logits that lie as the results do, on a 16-byte
// boundary, as dense targets of their type do; or a label for each row of them.
template <typename Scalar>
bool sigmoid_loss_is_plain(const SigmoidLossForward<Scalar>& args);
// Also: one upstream gradient, and no gradient but the logits'.
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
