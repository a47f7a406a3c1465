// Losses of rows of logits: arguments and launchers. Formulas: math/row_loss.h; the list: math/row_losses.def.
#pragma once

#include <cstdint>
#include <type_traits>

#include "kernels/layout.h"
#include "math/portable.h"

namespace focalkern {

struct MmceFormula;

// Class probabilities in the type of the logits or of the computation: converting them would cost a launch and a copy.
template <typename Scalar>
struct Probabilities {
  using Real = compute_t<Scalar>;
  const void* data;  // [rows, classes], or null
  bool is_real;      // of type Real; otherwise of type Scalar

  FK_HOST_DEVICE explicit operator bool() const { return data != nullptr; }
  // Calls f with the pointer, cast to its type.
  template <typename Function>
  FK_HOST_DEVICE auto typed(Function f) const {
    if constexpr (!std::is_same_v<Scalar, Real>) {
      if (!is_real) return f(static_cast<const Scalar*>(data));
    }
    return f(static_cast<const Real*>(data));
  }
  FK_HOST_DEVICE Probabilities from(int64_t offset) const {
    return {typed([=](const auto* all) -> const void* { return all + offset; }), is_real};
  }
  FK_HOST_DEVICE Real operator[](int64_t at) const {
    return typed([=](const auto* all) { return load_as_compute(all[at]); });
  }
};

// Exactly one of `labels.data` and `target_probs` is set. Pointers marked "or null" are absent options.
template <typename Scalar>
struct RowLossArgs {
  using Real = compute_t<Scalar>;

  int64_t rows;
  int64_t classes;
  const Scalar* logits;  // [rows, classes] in `layout`
  RowLayout layout;

  Labels labels;
  int64_t ignore_index;
  Probabilities<Scalar> target_probs;  // in `target_layout`
  RowLayout target_layout;
  Real label_smoothing;

  const Real* class_weight;  // [classes], or null
  bool detach_modulation;

  // gamma[row * gamma_stride]. With `edges`: the table gamma[n_bins], looked up at p.
  const Real* gamma;     // if null, `gamma_value` serves every row
  int64_t gamma_stride;  // 0 or 1
  Real gamma_value;
  Real epsilon;       // of the poly focal loss
  const Real* edges;  // [n_bins + 1], or null
  int64_t n_bins;

  // A row saves three or four numbers for its backward pass, one array each: m, its largest logit or the logit of its
  // target; log sum_j exp(z_j - m); log u of the target (labels without smoothing), log u of the largest class
  // (otherwise), or a sum of squares; and, for some losses, the special class. On the CPU, the focal loss of labels
  // saves other numbers (cpu/row_loss/epilogue_focal.h), and so do class probabilities and label smoothing
  // (cpu/row_loss/soft_targets.h); on CUDA those of the focal loss for gamma = 0, 1 and 2 (cuda/row_loss_smoothed.cu,
  // cuda/row_loss_shared.cu).
  Real* saved;  // [kSavedNumbers, rows]
};

template <typename Scalar>
struct RowLossForward : RowLossArgs<Scalar> {
  compute_t<Scalar>* row_loss;  // [rows], or null if only the sums are needed
};

// The sums of a run of rows for a reduced loss, in double on every device.
struct RowLossSums {
  double loss;
  double weight;        // sum of the class weights of the rows that are not ignored
  int64_t invalid_row;  // first row whose label is out of range, or -1
};

template <typename Scalar>
struct RowLossBackward : RowLossArgs<Scalar> {
  using Real = compute_t<Scalar>;
  const Real* grad_loss;  // [rows] with stride `grad_stride`
  int64_t grad_stride;    // 0 or 1
  const Real* divisor;    // the divisor of the mean, on the device of the logits, or null
  Scalar* grad_logits;    // [rows, classes] in `grad_layout`, or null
  RowLayout grad_layout;
  Real* grad_target;  // [rows, classes] in `target_layout`, or null
  Real* grad_gamma;   // [rows], or null
  // [rows], or null: k of a term whose gradient in the logits is k p_j times that of the loss of the row, class weight
  // included for labels without smoothing; only on CUDA. It is saved after the numbers of all rows.
  const Real* lse_slope;
  bool first_is_class;  // the first saved number is the largest class; a launcher of CUDA sets it (row_loss_shared.cu)
};

namespace cpu {

// Rows per unit of work. It depends only on the shape, so that sums do not depend on the number of threads.
int64_t row_loss_chunk_rows(int64_t rows, int64_t classes);

template <typename Loss, typename Scalar>
RowLossSums row_loss_forward(const RowLossForward<Scalar>& args, int64_t row_begin, int64_t row_end);

template <typename Loss, typename Scalar>
void row_loss_backward(const RowLossBackward<Scalar>& args, int64_t row_begin, int64_t row_end);

}  // namespace cpu

namespace cuda {

// Launchers put their work on `stream` (a cudaStream_t) and return a cudaError_t, 0 for success.

// Size in bytes of the scratch memory of a forward pass, for the reduction and for few long rows; 0 for a small batch.
// It need not be cleared.
int64_t focal_loss_workspace(int64_t rows, int64_t classes, bool reduced);

// `loss` (null for no reduction) receives the sum or the mean, `divisor` the divisor of the mean (1 for a sum).
template <typename Scalar>
int focal_loss_forward(const RowLossForward<Scalar>& args, bool mean, compute_t<Scalar>* loss,
                       compute_t<Scalar>* divisor, void* workspace, void* stream);

template <typename Scalar>
int focal_loss_backward(const RowLossBackward<Scalar>& args, void* stream);

// MMCELoss uses torch operations on CUDA; its launchers below return cudaErrorNotSupported.
template <typename Loss>
inline constexpr bool kHasKernels = true;
template <>
inline constexpr bool kHasKernels<MmceFormula> = false;

// Every loss, with the same workspace; the focal loss takes its own launchers above.
template <typename Loss, typename Scalar>
int row_loss_forward(const RowLossForward<Scalar>& args, bool mean, compute_t<Scalar>* loss, compute_t<Scalar>* divisor,
                     void* workspace, void* stream);

template <typename Loss, typename Scalar>
int row_loss_backward(const RowLossBackward<Scalar>& args, void* stream);

}  // namespace cuda

}  // namespace focalkern
