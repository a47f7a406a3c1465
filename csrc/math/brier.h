// Brier score of the softmax of one row.
//
//   L = sum_k (p_k - t_k)^2      dL/dz_j = 2 p_j ((p_j - t_j) - D),  D = sum_k p_k (p_k - t_k)
//
// For a label y, with t the largest class, u_t = 1 - p_t and Q the sum of squares of all classes but t:
//
//   y = t:   L = Q + u_t^2,            D = Q - p_t u_t
//   y != t:  L = Q + p_t^2 + 1 - 2 p_y,  D = Q + p_t^2 - p_y
//
// and dL/dz_y = -2 p_y L in both. u_t is a sum over the other classes, so that nothing cancels as p_t -> 1.
#pragma once

#include "math/row_loss.h"

namespace focalkern {

struct BrierFormula {
  static constexpr bool kSumExcludesTop = true;
  static constexpr SpecialClass kSpecialClass = SpecialClass::kLargest;
  static constexpr bool kSquares = true;
  static constexpr bool kHasInverse = false;
  static constexpr SoftTarget kTarget = SoftTarget::kRows;
  static constexpr bool kHasGamma = false;

  template <bool kEverInverse, typename Real>
  static FK_HOST_DEVICE Real loss(const RowNumbers<Real>& row) {
    const Real p_top = exponential(-row.log_s);
    const Real u_top = -exponential_minus_one(-row.log_s);
    const Real wrong = p_top * p_top + (Real(1) - Real(2) * exponential(row.log_p));
    return row.squares + (row.target_is_special ? u_top * u_top : wrong);
  }

  template <bool kEverInverse, typename Real>
  static FK_HOST_DEVICE RowGrad<Real> grad(const RowNumbers<Real>& row) {
    const Real p = exponential(row.log_p);
    const Real p_top = exponential(-row.log_s);
    const Real u_top = -exponential_minus_one(-row.log_s);
    const Real mean = row.squares + (row.target_is_special ? -p_top * u_top : p_top * p_top - p);
    RowGrad<Real> grad;
    grad.factor = Real(-2) * mean;
    grad.square = Real(2);
    grad.at_target = Real(-2) * p * loss<kEverInverse>(row);
    // p_t (1 - p_t) instead of p_t - p_t^2, which would cancel for a certain but wrong class.
    grad.at_special = Real(2) * p_top * (p_top * u_top + (p - row.squares));
    grad.grad_gamma = Real(0);
    return grad;
  }

  template <typename Real>
  static FK_HOST_DEVICE ClassTerms<Real> class_terms(Real log_p, Real log_u, Real /*gamma*/, Real /*epsilon*/,
                                                     bool /*detached*/, Real share) {
    const Real p = exponential(log_p);
    // Where p and t may both be near 1, p - t is computed as (1 - t) - u.
    const Real difference = p > Real(0.5) ? (Real(1) - share) - exponential(log_u) : p - share;
    return {difference * difference, Real(-2) * p * difference, Real(-2) * difference, Real(0)};
  }

  template <typename Gamma, typename Real>
  static FK_HOST_DEVICE ClassTerms<Real> unlikely_terms(const Real& p, const MinusLog<Real>& /*minus_log_p*/,
                                                        const Gamma& /*gamma*/, number_t<Real> /*epsilon*/,
                                                        const Real& share) {
    const Real difference = p - share, twice = number_t<Real>(-2) * difference;
    return {difference * difference, p * twice, twice, Real{}};
  }
};

}  // namespace focalkern
