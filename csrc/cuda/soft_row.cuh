// A row of a loss with class probabilities or label smoothing, and its classes (row_loss_soft.cu).
#pragma once

#include <type_traits>

#include "cuda/common.cuh"
#include "cuda/row_groups.cuh"
#include "cuda/row_loss.cuh"
#include "cuda/soft_shares.cuh"
#include "kernels/row_loss.h"
#include "math/row_losses.h"

namespace focalkern::cuda {
namespace {

// The weight of a row, if the loss weights rows: that of its label, or the mean over its class probabilities.
template <typename Loss, typename Scalar>
__device__ __forceinline__ compute_t<Scalar> row_weight(const RowLossArgs<Scalar>& args, const Row<Scalar>& row,
                                                        const RowGroup& group) {
  using Real = compute_t<Scalar>;
  if (Loss::kTarget != SoftTarget::kRows || args.class_weight == nullptr) return Real(1);
  if (!args.target_probs) return row.is_live ? args.class_weight[row.label] : Real(0);
  Real mean = 0;
  for (int64_t j = row.index; row.is_live && j < row.classes; j += row.lanes) {
    mean += args.class_weight[j] * row.targets[j * row.target_stride];
  }
  return group.sum(mean);
}

// The largest class, where the first saved number is a class (row_loss_shared.cu). Other numbers give another class of
// the row.
template <typename Scalar>
__device__ __forceinline__ int saved_class(const RowLossArgs<Scalar>& args, int64_t row) {
  const auto found = number_as_class(args.saved[row]);
  return found >= 0 && found < args.classes ? static_cast<int>(found) : 0;
}

// Whether the largest class of a row is its likely one: p = 1 / S above kUnlikely. All kernels ask this function,
// because a forward pass leaves out the class that the backward pass adds.
template <typename Real>
__device__ __forceinline__ bool has_likely_class(Real log_s) {
  static_assert(kUnlikely<Real> == Real(0.55));
  return log_s < Real(0.59783700075562044);  // -log 0.55
}

// The numbers that all classes of a row use.
template <typename Scalar>
struct SoftRow {
  using Real = compute_t<Scalar>;
  Real max;
  Real log_s;
  Real log_u;   // of the largest class
  Real likely;  // logit of the likely class, or NaN if there is none
  Real gamma;
  Real epsilon;
  bool is_square;  // gamma is 2
  bool is_zero;    // gamma is 0
  bool is_detached;

  __device__ __forceinline__ SoftRow(const RowLossArgs<Scalar>& args, const Row<Scalar>& row, Real max, Real log_s,
                                     Real log_u, bool is_detached, bool has_gamma_slope)
      : max(max), log_s(log_s), log_u(log_u), epsilon(args.epsilon), is_detached(is_detached) {
    likely = has_likely_class(log_s) ? max : kNaN<Real>;
    gamma = row.is_live && args.edges == nullptr ? gamma_at(args, row.row, Real(0)) : Real(0);
    const bool is_number = args.edges == nullptr && !has_gamma_slope;
    is_square = is_number && gamma == Real(2);
    is_zero = is_number && gamma == Real(0);
  }
};

// A loss without an inverse is NaN for a gamma below 0.
template <typename Loss, typename Real>
__device__ __forceinline__ Real gamma_of_loss(Real gamma) {
  return Loss::kHasInverse || !(gamma < Real(0)) ? gamma : kNaN<Real>;
}

// Calls f(gamma_of); gamma_of maps the probability of a class to its gamma.
template <typename Loss, typename Scalar, typename Function>
__device__ __forceinline__ void with_gamma(const RowLossArgs<Scalar>& args, const SoftRow<Scalar>& numbers,
                                           Function f) {
  using Real = compute_t<Scalar>;
  const bool detached = numbers.is_detached;
  if (!Loss::kHasGamma || numbers.is_square) {
    f([&](Real) { return SquareGamma<Real>(detached); });
  } else if (numbers.is_zero) {
    f([&](Real) { return WholeGamma<Real, 0>(detached); });
  } else if (args.edges == nullptr) {
    const AnyGamma<Real> gamma(gamma_of_loss<Loss>(numbers.gamma), detached);
    f([&](Real) { return gamma; });
  } else {
    f([&](Real p) {
      return AnyGamma<Real>(gamma_of_loss<Loss>(table_gamma(p, args.edges, args.gamma, args.n_bins)), detached);
    });
  }
}

template <typename Real>
struct UnlikelyClass {
  Real p;
  ClassTerms<Real> terms;
};

template <typename Loss, typename Scalar, typename Gamma>
__device__ __forceinline__ UnlikelyClass<compute_t<Scalar>> unlikely_class(const SoftRow<Scalar>& row,
                                                                           compute_t<Scalar> z, Gamma gamma_of,
                                                                           compute_t<Scalar> share) {
  using Real = compute_t<Scalar>;
  const Real log_p = (z - row.max) - row.log_s;
  const Real p = quick_exponential(log_p);
  return {p, Loss::unlikely_terms(p, with_finite(-log_p), gamma_of(p), row.epsilon, share)};
}

// The terms of a class with a share of 1.
template <typename Loss, typename Scalar>
__device__ __forceinline__ UnlikelyClass<compute_t<Scalar>> unlikely_class(const RowLossArgs<Scalar>& args,
                                                                           const SoftRow<Scalar>& row,
                                                                           compute_t<Scalar> z) {
  using Real = compute_t<Scalar>;
  UnlikelyClass<Real> result = {};
  with_gamma<Loss>(args, row, [&](auto gamma_of) { result = unlikely_class<Loss>(row, z, gamma_of, Real(1)); });
  return result;
}

// The terms of the largest class.
template <typename Loss, typename Scalar>
__device__ __forceinline__ ClassTerms<compute_t<Scalar>> likely_terms(const RowLossArgs<Scalar>& args,
                                                                      const Row<Scalar>& row,
                                                                      const SoftRow<Scalar>& numbers,
                                                                      compute_t<Scalar> share) {
  const compute_t<Scalar> log_p = -numbers.log_s;
  return Loss::class_terms(log_p, numbers.log_u, gamma_at(args, row.row, exponential(log_p)), numbers.epsilon,
                           numbers.is_detached, share);
}

// Calls take(terms) for these classes except the likely one, whose index it stores in `top`.
template <typename Loss, typename Scalar, typename Gamma, typename Values, typename Shares, typename Take>
__device__ __forceinline__ void each_unlikely(const SoftRow<Scalar>& numbers, Gamma gamma_of, const Values& values,
                                              const Shares& shares, int first, int step, int& top, Take take) {
#pragma unroll
  for (int k = 0; k < kCount<Values>; ++k) {
    const auto of_class = unlikely_class<Loss>(numbers, values[k], gamma_of, shares[k]);
    if (values[k] == numbers.likely) {
      top = first + k * step;
    } else {
      take(of_class.terms);
    }
  }
}

// The label's share minus the share of every other class, and the share of every other class.
template <typename Scalar>
__device__ __forceinline__ compute_t<Scalar> label_share(const RowLossArgs<Scalar>& args) {
  return compute_t<Scalar>(1) - args.label_smoothing;
}
template <bool kUniform, typename Scalar>
__device__ __forceinline__ compute_t<Scalar> uniform_share(const RowLossArgs<Scalar>& args) {
  return kUniform ? args.label_smoothing / static_cast<compute_t<Scalar>>(args.classes) : compute_t<Scalar>(1);
}

}  // namespace
}  // namespace focalkern::cuda
