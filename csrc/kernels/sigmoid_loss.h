// Losses of one logit: arguments and launchers. Formulas: math/sigmoid_loss.h and math/scored_loss.h.
#pragma once

#include <cstdint>
#include <vector>

#include "kernels/layout.h"
#include "math/portable.h"

namespace focalkern {

enum class SigmoidLoss : int32_t {
  kFocal = 0,
  kAsymmetric = 1,
  kQuality = 2,
  kVarifocal = 3,
  kMatchability = 4,
  kIaBce = 5
};

// Whether the loss is one of math/scored_loss.h, and whether it may have an alpha.
constexpr bool is_scored(SigmoidLoss loss) { return loss >= SigmoidLoss::kVarifocal; }
constexpr bool may_have_alpha(SigmoidLoss loss) { return loss == SigmoidLoss::kFocal || is_scored(loss); }

enum class ElementType : int32_t { kFloat, kDouble, kHalf, kBFloat16, kUInt8, kInt32, kInt64 };

constexpr int kMaxDims = 10;

// Elements in the memory order of the results, which are dense. Every other tensor is addressed by strides. Dims that
// are adjacent in all tensors are merged; a contiguous case then has one dim.
struct ElementSpace {
  int64_t size;  // number of all elements
  int dims;
  int64_t sizes[kMaxDims];  // outermost first
};

// A tensor broadcast to the space, or one number.
struct Operand {
  const void* data;  // if null, `value` applies
  ElementType type;
  bool dense;                 // whether it has the layout of the results
  int64_t strides[kMaxDims];  // in elements
  double value;
};

template <typename Scalar>
struct SigmoidLossArgs {
  using Real = compute_t<Scalar>;

  SigmoidLoss loss_kind;
  ElementSpace space;
  Operand input;          // of Scalar
  Operand target;         // shares, or labels
  bool target_is_labels;  // one-hot: 1 where the label equals the position along `class_dim`
  bool has_alpha;         // without alpha, both factors are 1
  int class_dim;          // the dim of the classes, with stride 0 in `target`
  int64_t classes;        // label `classes` means background: all targets of the row are 0
  int64_t ignore_index;   // number of elements with an ignored label
  Operand gamma;          // a number, or of type Real; likewise the next ones
  Operand second;         // alpha, or gamma_positive
  Operand weight;         // or the number 1
  Operand scores;         // with labels: the target of the label's class; 1 if data is null
  Real constant;          // margin (asymmetric), floor (IA-BCE), or 1 if p^gamma is detached (the other scored losses)
};

template <typename Scalar>
struct SigmoidLossForward : SigmoidLossArgs<Scalar> {
  // Unreduced losses, in Scalar or (`loss_wide`) in the compute type; both null if only the sum is wanted.
  Scalar* loss;
  compute_t<Scalar>* loss_wide;
};

struct SigmoidLossSums {
  double loss;
  int64_t count;          // number of elements that are not ignored
  bool is_valid;          // whether every label is in range
  int64_t invalid_label;  // if not valid: a label that is out of range
};

template <typename Scalar>
struct SigmoidLossBackward : SigmoidLossArgs<Scalar> {
  using Real = compute_t<Scalar>;
  Operand grad_loss;    // of type Real: one number for all, or one per element
  const Real* divisor;  // the divisor of the mean, or null
  Scalar* grad_input;   // or null; likewise the next ones
  Real* grad_target;
  Real* grad_gamma;
  Real* grad_second;  // gradient of gamma_positive
};

namespace cpu {

// Elements per unit of work; independent of the number of threads.
constexpr int64_t kSigmoidLossChunk = 16384;

// `table` holds the losses of all bfloat16 values, in the backward pass their gradients. It may be null.
template <typename Scalar>
SigmoidLossSums sigmoid_loss_forward(const SigmoidLossForward<Scalar>& args, int64_t begin, int64_t end,
                                     const compute_t<Scalar>* table);

template <typename Scalar>
void sigmoid_loss_backward(const SigmoidLossBackward<Scalar>& args, int64_t begin, int64_t end, const Scalar* table);

// Arguments that compute the look-up table; empty if no table applies. It pays off from kBFloat16TablePays elements per
// thread.
constexpr int64_t kBFloat16TablePays = int64_t(1) << 20;
std::vector<float> sigmoid_loss_bfloat16_table(const SigmoidLossForward<BFloat16>& args);
std::vector<BFloat16> sigmoid_grad_bfloat16_table(const SigmoidLossBackward<BFloat16>& args);

}  // namespace cpu

namespace cuda {

// Size in bytes of the scratch memory that a reduced forward pass needs; it need not be cleared.
int64_t sigmoid_loss_workspace(int64_t size);

// `total` (null for no reduction) receives the sum or the mean, `divisor` the divisor of the mean (1 for a sum).
template <typename Scalar>
int sigmoid_loss_forward(const SigmoidLossForward<Scalar>& args, bool mean, compute_t<Scalar>* total,
                         compute_t<Scalar>* divisor, void* workspace, void* stream);

template <typename Scalar>
int sigmoid_loss_backward(const SigmoidLossBackward<Scalar>& args, void* stream);

}  // namespace cuda

}  // namespace focalkern
