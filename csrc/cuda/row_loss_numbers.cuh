// The numbers that a row saves for its backward pass, and those that its loss is a function of.
#pragma once

#include "cuda/common.cuh"
#include "cuda/row_groups.cuh"
#include "cuda/row_loss.cuh"
#include "kernels/row_loss.h"
#include "math/row_losses.h"

namespace focalkern::cuda {
namespace {

template <typename Real>
using class_int = decltype(number_as_class(Real()));

// The saved numbers of a row, and its label or special class.
template <typename Real>
struct KeptNumbers {
  Real max;
  Real log_s;
  Real third;  // log_u or squares
  int marked;  // or kIgnored
};

template <typename Loss, typename Scalar>
__device__ __forceinline__ RowNumbers<compute_t<Scalar>> numbers_of(const RowLossArgs<Scalar>& args,
                                                                    const Row<Scalar>& row,
                                                                    const KeptNumbers<compute_t<Scalar>>& kept) {
  using Real = compute_t<Scalar>;
  RowNumbers<Real> numbers;
  const Real z_target = row.z(row.label);
  numbers.log_s = kept.log_s;
  numbers.log_p = (z_target - kept.max) - kept.log_s;
  numbers.log_u = Loss::kSquares ? Real(0) : kept.third;
  numbers.squares = Loss::kSquares ? kept.third : Real(0);
  numbers.gap = Real(0);
  if constexpr (Loss::kSpecialClass == SpecialClass::kRunnerUp) {
    numbers.gap = kept.marked >= 0 ? row.z(kept.marked) - z_target : -kInfinity<Real>;
  }
  numbers.target_is_special = kept.marked == row.label;
  numbers.gamma = gamma_at(args, row.row, exponential(numbers.log_p));
  numbers.epsilon = args.epsilon;
  numbers.detached = args.detach_modulation;
  return numbers;
}

template <typename Loss, typename Scalar>
__device__ __forceinline__ void keep(const RowLossArgs<Scalar>& args, int64_t row,
                                     const KeptNumbers<compute_t<Scalar>>& kept) {
  args.saved[row] = kept.max;
  args.saved[args.rows + row] = kept.log_s;
  args.saved[2 * args.rows + row] = kept.third;
  if constexpr (Loss::kSpecialClass != SpecialClass::kNone) {
    args.saved[3 * args.rows + row] = class_as_number(class_int<compute_t<Scalar>>(kept.marked));
  }
}

}  // namespace
}  // namespace focalkern::cuda
