// The z-loss beside a row loss on the CPU: math/z_loss.h.
#pragma once

#include "kernels/layout.h"
#include "math/z_loss.h"

namespace focalkern {

// If `logits` is set, the row loss has labels without smoothing.
template <typename Scalar>
struct ZLossArgs {
  using Real = compute_t<Scalar>;
  int64_t rows;
  int64_t classes;
  const Real* saved;     // [3, rows], of the row loss
  const Scalar* logits;  // [rows, classes] in `layout`, or null
  RowLayout layout;
  Labels labels;  // null for class probabilities
  int64_t ignore_index;
  const Real* class_weight;  // [classes], or null
  double coefficient;        // c
  Real* edited;              // [3, rows], saved for the sum of both losses
  Real* row_loss;            // [rows], to which the z-loss is added, or null
};

namespace cpu {

// Returns the sum of the z-losses of the rows.
template <typename Scalar>
double z_loss(const ZLossArgs<Scalar>& args, int64_t row_begin, int64_t row_end);

}  // namespace cpu
}  // namespace focalkern
