// Sums of the NLL of the focal calibration map of many networks, for torch's interface and its stable one.
#pragma once

#include <algorithm>
#include <cmath>
#include <optional>
#include <vector>

#include "kernels/map_nll_sums.h"

namespace focalkern::bindings {

// Fills total [B, 7] with the sums of kernels/map_nll_sums.h over the rows of each network, 0 for a network whose beta
// is NaN. All tensors are checked and contiguous: input [B, N, C], target and share [B, N], gammas and betas [B].
template <typename Torch>
void map_nll_sums(const typename Torch::Tensor& input, const typename Torch::Tensor& target,
                  const typename Torch::Tensor& share, const std::optional<typename Torch::Tensor>& gammas,
                  const typename Torch::Tensor& betas, bool is_probs, const typename Torch::Tensor& total) {
  const int64_t networks = input.size(0), n_rows = input.size(1), classes = input.size(2);
  const auto* labels = static_cast<const int64_t*>(target.const_data_ptr());
  const auto* shares = static_cast<const double*>(share.const_data_ptr());
  const auto* gamma = gammas.has_value() ? static_cast<const double*>(gammas->const_data_ptr()) : nullptr;
  const auto* beta = static_cast<const double*>(betas.const_data_ptr());
  // Rows per partial sum; its bounds do not depend on the number of threads.
  const int64_t at_once = std::max<int64_t>(64, (int64_t{1} << 16) / classes / 16 * 16);
  const int64_t chunks = (n_rows + at_once - 1) / at_once;
  std::vector<double> sums(networks * chunks * kMapNllSums);
  Torch::dispatch(input, [&](auto scalar) {
    using Scalar = decltype(scalar);
    const auto* data = static_cast<const Scalar*>(input.const_data_ptr());
    Torch::parallel_for(0, networks * chunks, 1, [&](int64_t first, int64_t last) {
      for (int64_t i = first; i < last; ++i) {
        const int64_t network = i / chunks, row = i % chunks * at_once;
        if (std::isnan(beta[network])) continue;
        const MapNllRows<Scalar> rows{data + network * n_rows * classes, labels + network * n_rows,
                                      shares + network * n_rows, classes, is_probs};
        cpu::map_nll_sums(rows, gamma == nullptr ? nullptr : gamma + network, beta[network], row,
                          std::min(n_rows, row + at_once), sums.data() + i * kMapNllSums);
      }
    });
  });
  auto* const sum = static_cast<double*>(total.mutable_data_ptr());
  std::fill_n(sum, networks * kMapNllSums, 0.0);
  for (size_t i = 0; i < sums.size(); ++i) {
    sum[i / (chunks * kMapNllSums) * kMapNllSums + i % kMapNllSums] += sums[i];
  }
}

}  // namespace focalkern::bindings
