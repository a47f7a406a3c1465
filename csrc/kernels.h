// What the kernels take and where they are: plain argument structs, and one declaration per operator, direction and
// device. Neither torch nor CUDA is known here, so a kernel can be read, built and tested without them.
#pragma once

#include <cstdint>

#include "math/portable.h"

namespace focalkern {

// Where the element of (row, class) lies, in elements from the base pointer. Rows are the positions of the unreduced
// loss in their logical order; [N, C, d1, ...] in any memory format is two nested runs of rows at most.
struct RowLayout {
  int64_t inner;  // rows in the innermost run
  int64_t outer_stride;
  int64_t inner_stride;
  int64_t class_stride;

  FK_HOST_DEVICE int64_t row_offset(int64_t row) const {
    return (row / inner) * outer_stride + (row % inner) * inner_stride;
  }
};

// Labels as they were given: a conversion would cost a launch and a copy.
struct Labels {
  enum class Type : int32_t { kInt64, kInt32, kUInt8 };
  const void* data;  // [rows], contiguous
  Type type;

  FK_HOST_DEVICE int64_t operator[](int64_t row) const {
    if (type == Type::kInt64) return static_cast<const int64_t*>(data)[row];
    if (type == Type::kInt32) return static_cast<const int32_t*>(data)[row];
    return static_cast<const uint8_t*>(data)[row];
  }
};

// ---- focal loss ----------------------------------------------------------------------------------------------------

// Exactly one of `labels.data` and `target_probs` is set. Pointers marked "or null" are absent options.
template <typename Scalar>
struct FocalLossArgs {
  using Real = compute_t<Scalar>;

  int64_t rows;
  int64_t classes;
  const Scalar* logits;  // [rows, classes] in `layout`
  RowLayout layout;

  Labels labels;
  int64_t ignore_index;
  const Real* target_probs;  // [rows, classes] in `target_layout`, or null
  RowLayout target_layout;
  Real label_smoothing;

  const Real* class_weight;  // [classes], or null
  bool detach_modulation;

  // gamma[row * gamma_stride], or with `edges`: the table gamma[n_bins], looked up at p.
  const Real* gamma;     // or null: then `gamma_value` serves every row
  int64_t gamma_stride;  // 0 or 1
  Real gamma_value;
  const Real* edges;  // [n_bins + 1], or null
  int64_t n_bins;

  // What a row keeps for its backward pass, as three arrays: its largest logit m; log sum_j exp(z_j - m); and log u of
  // the target (labels without smoothing) or of the largest class (otherwise).
  Real* saved;  // [3, rows]
};

template <typename Scalar>
struct FocalLossForward : FocalLossArgs<Scalar> {
  compute_t<Scalar>* row_loss;  // [rows], or null if only the sums are wanted
};

// What a run of rows adds to a reduced loss. The sums are in double on every device.
struct FocalLossSums {
  double loss;
  double weight;        // class weights of the rows that were not ignored
  int64_t invalid_row;  // first row whose label is out of range, or -1
};

template <typename Scalar>
struct FocalLossBackward : FocalLossArgs<Scalar> {
  using Real = compute_t<Scalar>;
  const Real* grad_loss;  // [rows] with stride `grad_stride`
  int64_t grad_stride;    // 0 or 1
  const Real* divisor;    // what the mean was divided by, on the device of the logits, or null
  Scalar* grad_logits;    // [rows, classes] in `grad_layout`, or null
  RowLayout grad_layout;
  Real* grad_target;  // [rows, classes] in `target_layout`, or null
  Real* grad_gamma;   // [rows], or null
};

namespace cpu {

// Rows per unit of work. It depends on the shape alone, so that sums do not depend on the number of threads.
int64_t focal_loss_chunk_rows(int64_t rows, int64_t classes);

template <typename Scalar>
FocalLossSums focal_loss_forward(const FocalLossForward<Scalar>& args, int64_t row_begin, int64_t row_end);

template <typename Scalar>
void focal_loss_backward(const FocalLossBackward<Scalar>& args, int64_t row_begin, int64_t row_end);

}  // namespace cpu

namespace cuda {

// Launchers put their work on `stream` (a cudaStream_t) and return a cudaError_t, 0 for success.

// Size in bytes of the scratch memory that a reduced forward pass needs; it need not be cleared.
int64_t focal_loss_workspace(int64_t rows, int64_t classes);

// `loss` (or null for no reduction) receives the sum or the mean, `divisor` what the mean was divided by (1 for a sum).
template <typename Scalar>
int focal_loss_forward(const FocalLossForward<Scalar>& args, bool mean, compute_t<Scalar>* loss,
                       compute_t<Scalar>* divisor, void* workspace, void* stream);

template <typename Scalar>
int focal_loss_backward(const FocalLossBackward<Scalar>& args, void* stream);

}  // namespace cuda

}  // namespace focalkern
