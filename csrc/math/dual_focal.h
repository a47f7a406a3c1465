// Dual focal loss of one row: the factor also depends on the class ranked next below the target.
//
//   r = the first of the largest classes strictly below the target y,  m = 1 - p_y + p_r,  e = p_r / p_y
//   L = -m^gamma log p_y
//   dL/dz_j = (c_y - c_r) p_j - c_y [j = y] + c_r [j = r]
//     c_y = m^gamma (1 + gamma h),  c_r = m^gamma gamma h e,  h = -p_y log p_y / m
//
// With u = 1 - p_y and k = p_r / u, both in [0, 1]: m = u (1 + k), h = phi / (1 + k), and no terms cancel as p_y -> 1.
#pragma once

#include "math/row_loss.h"

namespace focalkern {

struct DualFocalFormula {
  static constexpr bool kSumExcludesTop = false;
  static constexpr SpecialClass kSpecialClass = SpecialClass::kRunnerUp;
  static constexpr bool kSquares = false;
  static constexpr bool kHasInverse = false;
  // With smoothing every class has a share of the target, and each would need its own next lower class.
  static constexpr SoftTarget kTarget = SoftTarget::kNone;

  template <typename Real>
  struct Terms {
    Real factor;
    Real pull;  // gamma h
  };

  template <typename Real>
  static FK_HOST_DEVICE Terms<Real> terms(const RowNumbers<Real>& row) {
    const Real p = exponential(row.log_p);
    const Real u = exponential(row.log_u);
    const bool alone = row.gap == -std::numeric_limits<Real>::infinity();
    // The logarithm of p_r / u, which is at most 0 except for rounding.
    const Real log_k = row.log_p + row.gap - row.log_u;
    const Real k = alone ? Real(0) : exponential(log_k < Real(0) ? log_k : Real(0));
    const Real factor = exponential(scaled_log(row.gamma, row.log_u + log_one_plus(k)));
    return {factor, row.gamma * phi_of(p, row.log_p, u) / (Real(1) + k)};
  }

  template <bool kEverInverse, typename Real>
  static FK_HOST_DEVICE Real loss(const RowNumbers<Real>& row) {
    return -terms(row).factor * row.log_p;
  }

  template <bool kEverInverse, typename Real>
  static FK_HOST_DEVICE RowGrad<Real> grad(const RowNumbers<Real>& row) {
    const Terms<Real> given = terms(row);
    const Real pull = row.detached ? Real(0) : given.pull;
    const Real ratio = exponential(row.gap);  // p_r / p_y
    const Real p = exponential(row.log_p);
    const Real p_r = p * ratio;
    const Real of_target = given.factor * (Real(1) + pull);
    const Real of_rival = given.factor * pull * ratio;
    RowGrad<Real> grad;
    grad.factor = given.factor * (Real(1) - pull * exponential_minus_one(row.gap));
    grad.square = Real(0);
    grad.at_target = -(of_target * exponential(row.log_u) + of_rival * p);
    grad.at_special = of_target * p_r + of_rival * (Real(1) - p_r);
    grad.grad_gamma = Real(0);
    return grad;
  }
};

}  // namespace focalkern
