// The calibration error of a batch between the passes of a row loss, for torch's interface and its stable one.
#pragma once

#include "cpu/row_loss/mmce_loss.h"

namespace focalkern::bindings {

// Adds coefficient times the error of the batch to `loss`, the mean or sum of the cross-entropies of the rows, and
// fills `gamma` with what the backward pass of the rows takes from it. `saved` is of their forward pass; tensors are
// contiguous.
template <typename Torch>
void add_mmce(const typename Torch::Tensor& saved, const typename Torch::Tensor& labels,
              const typename Torch::Tensor& gamma, const typename Torch::Tensor& loss, double coefficient,
              bool weighted, double bandwidth, bool mean, int64_t ignore_index) {
  const int64_t rows = labels.numel();
  Torch::dispatch(saved, [&](auto scalar) {
    using Real = compute_t<decltype(scalar)>;
    const auto* numbers = static_cast<const Real*>(saved.const_data_ptr());
    const cpu::MmceBatch batch{rows, weighted, bandwidth, Torch::labels(labels), ignore_index};
    // The kernel multiplies it by the factor of a row's cross-entropy in the loss: 1 / count for a mean.
    const auto found = cpu::mmce_of_batch(batch, numbers + rows, numbers + 3 * rows, coefficient,
                                          static_cast<Real*>(gamma.mutable_data_ptr()));
    const double error = mean ? found.error : found.error * static_cast<double>(found.count);
    *static_cast<Real*>(loss.mutable_data_ptr()) += static_cast<Real>(coefficient * error);
  });
}

}  // namespace focalkern::bindings
