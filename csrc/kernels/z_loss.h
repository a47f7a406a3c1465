// The z-loss beside a row loss on the CPU: math/z_loss.h.
#pragma once

#include "kernels/layout.h"
#include "math/z_loss.h"

namespace focalkern {

template <typename Real>
struct ZLossArgs {
  int64_t rows;
  const Real* saved;           // [3, rows], of the row loss
  const double* target_logit;  // [rows]; null for smoothing and class probabilities
  Labels labels;               // null for class probabilities
  int64_t ignore_index;
  int64_t classes;
  const double* class_weight;  // [classes], or null
  double coefficient;          // c
  double* loss;                // [rows], 0 in ignored rows
  Real* edited;                // [3, rows], saved for the sum of both losses
};

namespace cpu {

template <typename Real>
void z_loss(const ZLossArgs<Real>& args, int64_t row_begin, int64_t row_end);

}  // namespace cpu
}  // namespace focalkern
