// The sums and statistics of kernels/row_sums.h, for torch's interface and its stable one.
#pragma once

#include <algorithm>

#include "kernels/row_sums.h"

namespace focalkern::bindings {

// Calls f with the rows of input [N, C], checked and contiguous, and the bounds of a run of them.
template <typename Torch, typename Function>
void over_rows(const typename Torch::Tensor& input, Function f) {
  constexpr int64_t kLogitsPerTask = 16384;
  Torch::dispatch(input, [&](auto scalar) {
    using Scalar = decltype(scalar);
    const Rows<Scalar> rows{input.size(0), input.size(1), static_cast<const Scalar*>(input.const_data_ptr())};
    Torch::parallel_for(0, rows.count, std::max<int64_t>(1, kLogitsPerTask / rows.classes),
                        [&](int64_t begin, int64_t end) { f(rows, begin, end); });
  });
}

// Fills sums [3, N] with the largest logit, `rest` and `fall`, and index [N].
template <typename Torch>
void row_sums(const typename Torch::Tensor& input, const typename Torch::Tensor& sums,
              const typename Torch::Tensor& index) {
  auto* const sum = static_cast<double*>(sums.mutable_data_ptr());
  const int64_t n = input.size(0);
  const RowSumsResult result{sum, sum + n, sum + 2 * n, static_cast<int64_t*>(index.mutable_data_ptr())};
  over_rows<Torch>(input,
                   [&](const auto& rows, int64_t begin, int64_t end) { cpu::row_sums(rows, result, begin, end); });
}

// Fills numbers [3, N], in the type of the computation, with log p, entropy and log-sum-exp; predicted [N]; and flags
// [2, N] with correct and counts. target [N] is contiguous.
template <typename Torch>
void row_statistics(const typename Torch::Tensor& input, const typename Torch::Tensor& target, int64_t ignore_index,
                    const typename Torch::Tensor& numbers, const typename Torch::Tensor& predicted,
                    const typename Torch::Tensor& flags) {
  const int64_t n = input.size(0);
  const Labels labels = Torch::labels(target);
  auto* const classes = static_cast<int64_t*>(predicted.mutable_data_ptr());
  auto* const flag = static_cast<bool*>(flags.mutable_data_ptr());
  void* const memory = numbers.mutable_data_ptr();
  over_rows<Torch>(input, [&]<typename Scalar>(const Rows<Scalar>& rows, int64_t begin, int64_t end) {
    auto* const number = static_cast<compute_t<Scalar>*>(memory);
    const RowStatisticsResult<compute_t<Scalar>> result{number, number + n, number + 2 * n, classes, flag, flag + n};
    cpu::row_statistics(rows, labels, ignore_index, result, begin, end);
  });
}

}  // namespace focalkern::bindings
