// The sums and statistics of kernels/row_sums.h, for torch's interface and its stable one.
#pragma once

#include <algorithm>

#include "kernels/row_loss_statistics.h"
#include "kernels/row_sums.h"

namespace focalkern::bindings {

inline RowLayout contiguous_rows(int64_t rows, int64_t classes) { return {std::max<int64_t>(1, rows), 0, classes, 1}; }

// Calls f with the rows of input [N, C], checked and contiguous, and the bounds of a run of them.
template <typename Torch, typename Scalar, typename Function>
void over_rows(const typename Torch::Tensor& input, Function f) {
  constexpr int64_t kLogitsPerTask = 16384;
  const int64_t count = input.size(0), classes = input.size(1);
  const auto* const logits = static_cast<const Scalar*>(input.const_data_ptr());
  const Rows<Scalar> rows{count, classes, logits, contiguous_rows(count, classes)};
  Torch::parallel_for(0, rows.count, std::max<int64_t>(1, kLogitsPerTask / rows.classes),
                      [&](int64_t begin, int64_t end) { f(rows, begin, end); });
}

// Fills sums [3, N] with the largest logit, `rest` and `fall`, and index [N].
template <typename Torch>
void row_sums(const typename Torch::Tensor& input, const typename Torch::Tensor& sums,
              const typename Torch::Tensor& index) {
  auto* const sum = static_cast<double*>(sums.mutable_data_ptr());
  const int64_t n = input.size(0);
  const RowSumsResult result{sum, sum + n, sum + 2 * n, static_cast<int64_t*>(index.mutable_data_ptr())};
  Torch::dispatch(input, [&](auto scalar) {
    over_rows<Torch, decltype(scalar)>(
        input, [&](const auto& rows, int64_t begin, int64_t end) { cpu::row_sums(rows, result, begin, end); });
  });
}

template <typename Real, typename Tensor>
RowStatisticsResult<Real> row_statistics_result(const Tensor& log_p, const Tensor& entropy, const Tensor& lse,
                                                const Tensor& predicted, const Tensor& correct, const Tensor& counts) {
  RowStatisticsResult<Real> result{};
  result.log_p = static_cast<Real*>(log_p.mutable_data_ptr());
  result.entropy = static_cast<Real*>(entropy.mutable_data_ptr());
  result.lse = static_cast<Real*>(lse.mutable_data_ptr());
  result.predicted = static_cast<int64_t*>(predicted.mutable_data_ptr());
  result.correct = static_cast<bool*>(correct.mutable_data_ptr());
  result.counts = static_cast<bool*>(counts.mutable_data_ptr());
  return result;
}

// The loss of a chunk of rows with labels, and their statistics.
template <typename Loss, typename Scalar>
RowLossSums row_loss_and_statistics(const RowLossForward<Scalar>& args,
                                    const RowStatisticsResult<compute_t<Scalar>>& statistics, int64_t row_begin,
                                    int64_t row_end) {
  if constexpr (kHasStatistics<Loss>) {
    if (args.label_smoothing == 0) return cpu::row_loss_with_statistics<Loss>(args, statistics, row_begin, row_end);
  }
  const Rows<Scalar> rows{args.rows, args.classes, args.logits, args.layout};
  cpu::row_statistics(rows, args.labels, args.ignore_index, statistics, row_begin, row_end);
  return cpu::row_loss_forward<Loss>(args, row_begin, row_end);  // reads the chunk from the cache
}

// Fills tensors [N]: log p, entropy and log-sum-exp in the type of the computation; the predicted class; whether it is
// correct; and whether the row counts. target [N] is contiguous.
template <typename Torch>
void row_statistics(const typename Torch::Tensor& input, const typename Torch::Tensor& target, int64_t ignore_index,
                    const typename Torch::Tensor& log_p, const typename Torch::Tensor& entropy,
                    const typename Torch::Tensor& lse, const typename Torch::Tensor& predicted,
                    const typename Torch::Tensor& correct, const typename Torch::Tensor& counts) {
  const Labels labels = Torch::labels(target);
  Torch::dispatch(input, [&](auto scalar) {
    using Scalar = decltype(scalar);
    using Real = compute_t<Scalar>;
    const auto result = row_statistics_result<Real>(log_p, entropy, lse, predicted, correct, counts);
#ifdef FOCALKERN_WITH_CUDA
    if (input.is_cuda()) {
      const typename Torch::CudaScope scope(input);
      RowLossArgs<Scalar> args{};
      args.rows = input.size(0);
      args.classes = input.size(1);
      args.logits = static_cast<const Scalar*>(input.const_data_ptr());
      args.layout = contiguous_rows(args.rows, args.classes);
      args.labels = labels;
      args.ignore_index = ignore_index;
      return Torch::CudaScope::check("row_statistics", cuda::row_statistics(args, result, scope.stream()));
    }
#endif
    over_rows<Torch, Scalar>(input, [&](const auto& rows, int64_t begin, int64_t end) {
      cpu::row_statistics(rows, labels, ignore_index, result, begin, end);
    });
  });
}

}  // namespace focalkern::bindings
