// The interface of a loss of rows: the numbers of a row of logits and its target that the kernels pass to a loss.
//
// The loops over rows and classes are written once (cpu/row_loss/driver.h, cuda/row_loss*.cu); a loss is a struct of
// static functions in a header of its own, next to this one:
//
//   kSumExcludesTop    the sums leave out the largest class; otherwise the target
//   kSpecialClass      a class other than the target whose gradient is not that of the rest
//   kSquares           the sum of squares is needed too
//   kHasInverse        a negative gamma has a formula of its own
//   kTarget            the targets that the loss accepts besides labels without smoothing
//   loss(row)          of one row, from RowNumbers
//   grad(row)          its gradient, as RowGrad
//   class_terms(...)   for class probabilities and label smoothing: the terms that one class adds
//   unlikely_terms     the same in fewer operations for a class of at most kUnlikely
//   kHasGamma          whether gamma matters
//
// Everything is branch-free, so that loops over rows vectorize. Both log p and log(1 - p) are given, so that no formula
// computes 1 - p.
#pragma once

#include "math/focal.h"
#include "math/portable.h"

namespace focalkern {

enum class SpecialClass {
  kNone,
  kRunnerUp,  // the first class with the largest logit below the target's
  kLargest,   // the first class with the largest logit
};

enum class SoftTarget {
  kNone,     // labels without smoothing only
  kClasses,  // each class of the target has its own class weight
  kRows,     // a row has one weight: that of its label, or the mean over its class probabilities
};

// p_k is the softmax of the row and y its target.
template <typename Real>
struct RowNumbers {
  Real log_s;    // log sum_k e^(z_k - m)
  Real log_p;    // log p_y
  Real log_u;    // log(1 - p_y); undefined if the sums exclude the largest class
  Real squares;  // sum of p_k^2 over the classes that the sums include
  Real gap;      // logit of the special class minus that of the target, -inf if there is none
  bool target_is_special;
  Real gamma;
  Real epsilon;
  bool detached;
};

// The gradient in the logits: p_j (factor + square p_j), except for the target and the special class.
template <typename Real>
struct RowGrad {
  Real factor;
  Real square;
  Real at_target;
  Real at_special;
  Real grad_gamma;
};

// The terms of one class in the loss of a row with the target shares t: `slope` is -p dL/dp, `grad_share` dL/dt.
template <typename Real>
struct ClassTerms {
  Real loss;
  Real slope;
  Real grad_share;
  Real grad_gamma;
};

// Losses -sum_k t_k l(p_k): `Loss::terms` gives l and its derivatives, from which everything follows.
template <typename Loss>
struct SumOverClasses {
  static constexpr bool kSumExcludesTop = false;
  static constexpr SpecialClass kSpecialClass = SpecialClass::kNone;
  static constexpr bool kSquares = false;
  static constexpr SoftTarget kTarget = SoftTarget::kClasses;
  static constexpr bool kHasGamma = true;

  template <bool kEverInverse, typename Real>
  static FK_HOST_DEVICE Real loss(const RowNumbers<Real>& row) {
    return Loss::template terms<kEverInverse>(row.log_p, row.log_u, row.gamma, row.epsilon).loss;
  }

  template <bool kEverInverse, typename Real>
  static FK_HOST_DEVICE RowGrad<Real> grad(const RowNumbers<Real>& row) {
    const FocalTerms<Real> terms = Loss::template terms<kEverInverse>(row.log_p, row.log_u, row.gamma, row.epsilon);
    const Real coefficient = row.detached ? terms.factor : terms.coefficient;
    // p_y - 1 = -u, accurate where p_y - 1 cancels.
    return {coefficient, Real(0), -exponential(row.log_u) * coefficient, Real(0), terms.grad_gamma};
  }

  template <typename Real>
  static FK_HOST_DEVICE ClassTerms<Real> class_terms(Real log_p, Real log_u, Real gamma, Real epsilon, bool detached,
                                                     Real share) {
    const FocalTerms<Real> terms = Loss::template terms<true>(log_p, log_u, gamma, epsilon);
    // A class with a share of 0 adds 0, even at probability zero.
    const bool has_share = share != Real(0);
    const Real slope = detached ? terms.factor : terms.coefficient;
    return {has_share ? share * terms.loss : Real(0), has_share ? share * slope : Real(0), terms.loss,
            has_share ? share * terms.grad_gamma : Real(0)};
  }

  template <typename Gamma, typename Real>
  static FK_HOST_DEVICE ClassTerms<Real> unlikely_terms(const Real& p, const MinusLog<Real>& minus_log_p,
                                                        const Gamma& gamma, number_t<Real> epsilon, const Real& share) {
    const FocalTerms<Real> terms = Loss::unlikely(p, minus_log_p, gamma, epsilon);
    const auto has_share = share != Real{};
    return {has_share ? share * terms.loss : Real{}, has_share ? share * terms.coefficient : Real{}, terms.loss,
            has_share ? share * terms.grad_gamma : Real{}};
  }
};

// The focal and inverse focal loss.
struct FocalFormula : SumOverClasses<FocalFormula> {
  static constexpr bool kHasInverse = true;

  template <bool kEverInverse, typename Real>
  static FK_HOST_DEVICE FocalTerms<Real> terms(Real log_p, Real log_u, Real gamma, Real /*epsilon*/) {
    return focal_terms<kEverInverse>(log_p, log_u, gamma);
  }

  template <typename Gamma, typename Real>
  static FK_HOST_DEVICE FocalTerms<Real> unlikely(const Real& p, const MinusLog<Real>& minus_log_p, const Gamma& gamma,
                                                  number_t<Real> /*epsilon*/) {
    return unlikely_focal_terms(p, minus_log_p, gamma);
  }
};

// The number of values that a row saves for its backward pass: the m of its sums, log_s, log_u or squares, and the
// special class.
template <typename Loss>
constexpr int64_t kSavedNumbers = Loss::kSpecialClass == SpecialClass::kNone ? 3 : 4;

// A class index stored in a floating-point array, bit by bit; -1, for no class, is stored as 0.
FK_HOST_DEVICE float class_as_number(int32_t index) { return bit_cast<float>(index + 1); }
FK_HOST_DEVICE double class_as_number(int64_t index) { return bit_cast<double>(index + 1); }
FK_HOST_DEVICE int32_t number_as_class(float number) { return bit_cast<int32_t>(number) - 1; }
FK_HOST_DEVICE int64_t number_as_class(double number) { return bit_cast<int64_t>(number) - 1; }

}  // namespace focalkern
