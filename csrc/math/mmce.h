// Per-row part of the MMCE loss: cross-entropy of the target, plus g times the cross-entropy of the largest class.
//
//   L = -log p_y      dL/dz_j = (p_j - [j = y]) + g (p_j - [j = t])
//
// t is the largest class. g, passed as gamma, is the derivative of the batch's MMCE with respect to the row's
// confidence (cpu/row_loss/mmce_loss.cpp).
#pragma once

#include "math/row_loss.h"

namespace focalkern {

struct MmceFormula {
  static constexpr bool kSumExcludesTop = true;
  static constexpr SpecialClass kSpecialClass = SpecialClass::kLargest;
  static constexpr bool kSquares = false;
  static constexpr bool kHasInverse = false;
  static constexpr SoftTarget kTarget = SoftTarget::kNone;

  template <bool kEverInverse, typename Real>
  static FK_HOST_DEVICE Real loss(const RowNumbers<Real>& row) {
    return -row.log_p;
  }

  template <bool kEverInverse, typename Real>
  static FK_HOST_DEVICE RowGrad<Real> grad(const RowNumbers<Real>& row) {
    const Real p = exponential(row.log_p);
    const Real u_top = -exponential_minus_one(-row.log_s);
    const Real u = row.target_is_special ? u_top : Real(1) - p;
    RowGrad<Real> grad;
    grad.factor = Real(1) + row.gamma;
    grad.square = Real(0);
    grad.at_target = -u + row.gamma * (row.target_is_special ? -u_top : p);
    grad.at_special = exponential(-row.log_s) - row.gamma * u_top;
    grad.grad_gamma = Real(0);
    return grad;
  }
};

}  // namespace focalkern
