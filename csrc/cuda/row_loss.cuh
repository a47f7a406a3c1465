// Common parts of the kernels of focal_loss.cu and row_loss.cu: labels, parameters and offsets of rows. Also declares
// the kernels for class probabilities and label smoothing, which row_loss_soft.cu has for every loss.
#pragma once

#include "cuda/common.cuh"
#include "cuda/grid_sum.cuh"
#include "kernels/row_loss.h"
#include "math/row_loss.h"

namespace focalkern::cuda {

// A label as a class index, or as a code for ignored or out of range.
constexpr int kIgnored = -1;
constexpr int kOutOfRange = -2;

// No branch.
template <typename Scalar>
__device__ __forceinline__ int as_class(const RowLossArgs<Scalar>& args, int64_t label) {
  const bool is_class = static_cast<uint64_t>(label) < static_cast<uint64_t>(args.classes);
  const int found = is_class ? static_cast<int>(label) : kOutOfRange;
  return label == args.ignore_index ? kIgnored : found;
}

template <typename Scalar>
__device__ __forceinline__ int read_label(const RowLossArgs<Scalar>& args, int64_t row) {
  const int64_t label = args.labels[row];
  if (label == args.ignore_index) return kIgnored;
  return label < 0 || label >= args.classes ? kOutOfRange : static_cast<int>(label);
}

// The labels of rows from `row` on. `there` of them exist (at least one); the missing ones count as ignored.
template <int rows, typename Scalar>
__device__ __forceinline__ void read_labels(const RowLossArgs<Scalar>& args, int64_t row, int there,
                                            int (&labels)[rows]) {
  int64_t given[rows];
  if (args.labels.type == Labels::Type::kInt64) {  // one test for all of them
    const auto* at = static_cast<const int64_t*>(args.labels.data) + row;
#pragma unroll
    for (int p = 0; p < rows; ++p) given[p] = at[p < there ? p : 0];
  } else {
#pragma unroll
    for (int p = 0; p < rows; ++p) given[p] = args.labels[row + (p < there ? p : 0)];
  }
#pragma unroll
  for (int p = 0; p < rows; ++p) labels[p] = p < there ? as_class(args, given[p]) : kIgnored;
}

template <typename Scalar>
__device__ __forceinline__ compute_t<Scalar> gamma_at(const RowLossArgs<Scalar>& args, int64_t row,
                                                      compute_t<Scalar> p) {
  if (args.edges != nullptr) return table_gamma(p, args.edges, args.gamma, args.n_bins);
  return args.gamma != nullptr ? args.gamma[row * args.gamma_stride] : args.gamma_value;
}

// row_gamma, given log p, for callers that do not need p otherwise.
template <typename Scalar>
__device__ __forceinline__ compute_t<Scalar> gamma_at_log(const RowLossArgs<Scalar>& args, int64_t row,
                                                          compute_t<Scalar> log_p) {
  return gamma_at(args, row, args.edges != nullptr ? exponential(log_p) : compute_t<Scalar>(0));
}

template <typename Scalar>
__device__ __forceinline__ compute_t<Scalar> weight_of(const RowLossArgs<Scalar>& args, int64_t j) {
  return args.class_weight != nullptr ? args.class_weight[j] : compute_t<Scalar>(1);
}

// d(reduced loss)/d(loss of the row).
template <typename Scalar>
__device__ __forceinline__ compute_t<Scalar> upstream(const RowLossBackward<Scalar>& args, int64_t row) {
  const compute_t<Scalar> grad = args.grad_loss[row * args.grad_stride];
  return args.divisor != nullptr ? grad / *args.divisor : grad;
}

template <typename Scalar>
__device__ __forceinline__ compute_t<Scalar> lse_slope(const RowLossBackward<Scalar>& args, int64_t row) {
  return args.lse_slope != nullptr ? args.lse_slope[row] : compute_t<Scalar>(0);
}

// RowLayout::row_offset without a 64-bit division, which would be a subroutine in every kernel. The quotient from the
// reciprocal is off by at most one, for any number of rows below 2^53.
struct RowOffset {
  int64_t inner;
  int64_t outer_stride;
  int64_t inner_stride;
  double reciprocal;

  explicit RowOffset(const RowLayout& layout)
      : inner(layout.inner),
        outer_stride(layout.outer_stride),
        inner_stride(layout.inner_stride),
        reciprocal(1.0 / static_cast<double>(layout.inner)) {}

  __device__ __forceinline__ int64_t operator()(int64_t row) const {
    if (row < inner) return row * inner_stride;  // all rows in one run, as in a matrix
    auto outer = static_cast<int64_t>(static_cast<double>(row) * reciprocal);
    int64_t rest = row - outer * inner;
    if (rest < 0) {
      outer -= 1;
      rest += inner;
    } else if (rest >= inner) {
      outer += 1;
      rest -= inner;
    }
    return outer * outer_stride + rest * inner_stride;
  }
};

// ---- host ----------------------------------------------------------------------------------------------------------

// Whether a loss needs the terms of every class.
template <typename Scalar>
bool is_soft(const RowLossArgs<Scalar>& args) {
  return args.target_probs || args.label_smoothing != 0;
}

// Whether the classes of a row are further apart than neighbouring rows.
template <typename Scalar>
bool class_is_outermost(const RowLossArgs<Scalar>& args) {
  const auto distance = [](int64_t stride) { return stride < 0 ? -stride : stride; };
  const RowLayout& layout = args.layout;
  const int64_t row_stride = layout.inner > 1 ? layout.inner_stride : layout.outer_stride;
  return args.rows > 1 && args.classes > 1 && distance(row_stride) < distance(layout.class_stride);
}

// Classes are counted in int; the bound leaves room for one step of any loop over them.
template <typename Scalar>
bool sizes_are_valid(const RowLossArgs<Scalar>& args) {
  constexpr int64_t kMostClasses = INT32_MAX - 64 * kBlock * kVectorBytes;
  return args.rows >= 0 && args.classes >= 0 && args.classes <= kMostClasses && args.layout.inner > 0 &&
         (!args.target_probs || args.target_layout.inner > 0) &&
         static_cast<bool>(args.target_probs) != (args.labels.data != nullptr);
}

// Whether all classes but the label have the same share, to which their terms are proportional.
template <typename Loss, typename Scalar>
bool is_uniform(const RowLossArgs<Scalar>& args) {
  return Loss::kTarget == SoftTarget::kClasses && !args.target_probs && args.class_weight == nullptr;
}

// The launchers for losses where is_soft is true; their arguments are valid. has_sums: `saved` already holds the
// numbers that the kernels of row_loss_soft.cu save.
template <typename Loss, typename Scalar>
int row_loss_soft_forward(const RowLossForward<Scalar>& args, GridSum<compute_t<Scalar>> totals, void* workspace,
                          void* stream, bool has_sums = false);
template <typename Loss, typename Scalar>
int row_loss_soft_backward(const RowLossBackward<Scalar>& args, void* stream);

// The same for the focal loss, with kernels of its own where it has them (soft_focal.cuh).
template <typename Scalar>
int soft_focal_forward(const RowLossForward<Scalar>& args, const GridSum<compute_t<Scalar>>& totals, void* workspace,
                       void* stream);
template <typename Scalar>
int soft_focal_backward(const RowLossBackward<Scalar>& args, void* stream);

}  // namespace focalkern::cuda
