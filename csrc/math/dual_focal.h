// Dual focal loss of one row: the factor also depends on the class ranked next below the target.
//
//   r = the first of the largest classes strictly below the target y,  m = 1 - p_y + p_r,  e = p_r / p_y
//   L = -m^gamma log p_y
//   dL/dz_j = (c_y - c_r) p_j - c_y [j = y] + c_r [j = r]
//     c_y = m^gamma (1 + gamma h),  c_r = m^gamma gamma h e,  h = -p_y log p_y / m
//   dL/dgamma = -m^gamma log m log p_y
//
// With u = 1 - p_y and k = p_r / u, both in [0, 1]: m = u (1 + k), h = phi / (1 + k), and no terms cancel as p_y -> 1.
//
// With label smoothing every class i has a share a_i of the target, a loss l_i = -m_i^gamma log p_i and a rival r(i):
//
//   L = sum_i a_i l_i,  dL/dz_j = p_j sum_i q_i - q_j
//     s_i = dl_i/dp_r(i) = -gamma m_i^(gamma - 1) log p_i
//     q_j = a_j m_j^gamma + p_j (a_j s_j - sum_i [r(i) = j] a_i s_i)
#pragma once

#include "math/row_loss.h"

namespace focalkern {

struct DualFocalFormula {
  static constexpr bool kSumExcludesTop = false;
  static constexpr SpecialClass kSpecialClass = SpecialClass::kRunnerUp;
  static constexpr bool kSquares = false;
  static constexpr bool kHasInverse = false;
  // Smoothing needs the order of all classes: the CPU has kernels for it (cpu/row_loss/ordered_rows.h).
  static constexpr SoftTarget kTarget = SoftTarget::kNone;

  template <typename Real>
  struct Terms {
    Real factor;
    Real pull;  // gamma h
    Real log_m;
  };

  template <typename Real>
  static FK_HOST_DEVICE Terms<Real> terms(const RowNumbers<Real>& row) {
    const Real p = exponential(row.log_p);
    const Real u = exponential(row.log_u);
    const bool alone = row.gap == -std::numeric_limits<Real>::infinity();
    // The logarithm of p_r / u, which is at most 0 except for rounding.
    const Real log_k = row.log_p + row.gap - row.log_u;
    const Real k = alone ? Real(0) : exponential(log_k < Real(0) ? log_k : Real(0));
    const Real log_m = row.log_u + log_one_plus(k);
    const Real factor = exponential(scaled_log(row.gamma, log_m));
    return {factor, row.gamma * phi_of(p, row.log_p, u) / (Real(1) + k), log_m};
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
    // At p = 1 the product would be inf * 0; its limit is 0.
    grad.grad_gamma = row.log_p == Real(0) ? Real(0) : given.factor * (given.log_m * finite_log(-row.log_p));
    return grad;
  }
};

// The terms of one class with label smoothing.
template <typename Real>
struct DualTerms {
  Real loss;
  Real factor;      // m^gamma
  Real slope;       // s, the derivative of the loss in p_r
  Real grad_gamma;  // the derivative of the loss
};

// For p of at most kUnlikely, where 1 - p does not cancel.
template <typename Real>
FK_HOST_DEVICE DualTerms<Real> unlikely_dual_terms(Real p, Real p_r, Real minus_log_p, Real gamma) {
  const Real x = p_r - p, log_m = log_one_plus_small(x);
  const Real lower = exponential((gamma - Real(1)) * log_m), factor = lower * (Real(1) + x);
  const Real finite = finite_log(minus_log_p);
  return {factor * minus_log_p, factor, gamma * (lower * finite), factor * (log_m * finite)};
}

// For any p, given log p, log(1 - p) and log(p_r / p), which is -inf without a rival.
template <typename Real>
FK_HOST_DEVICE DualTerms<Real> dual_terms(Real log_p, Real log_u, Real gap, Real gamma) {
  RowNumbers<Real> row{};
  row.log_p = log_p;
  row.log_u = log_u;
  row.gap = gap;
  row.gamma = gamma;
  const DualFocalFormula::Terms<Real> terms = DualFocalFormula::terms(row);
  const Real slope = terms.factor * terms.pull / exponential(log_p);
  // At p = 1 the product would be inf * 0; its limit is 0.
  const Real grad_gamma = log_p == Real(0) ? Real(0) : -terms.factor * (terms.log_m * log_p);
  return {-terms.factor * log_p, terms.factor, slope, grad_gamma};
}

}  // namespace focalkern
