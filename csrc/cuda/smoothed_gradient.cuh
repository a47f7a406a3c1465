// The gradient of the focal loss of a row with label smoothing (smoothed_row.cuh) or class probabilities
// (shared_tile.cuh).
#pragma once

#include "cuda/common.cuh"
#include "cuda/row_groups.cuh"
#include "cuda/row_loss.cuh"
#include "cuda/smoothed_row.cuh"
#include "kernels/row_loss.h"

namespace focalkern::cuda {

// dL/dz_j = p_j (sum a) - a_j, where a_j is the slope of class j times its share. One class, the target, has a value of
// its own, which is written last: with smoothing the label, which has a larger share; with class probabilities the
// likely class, whose difference would cancel. With smoothing nothing cancels for any other class, even if it is
// likely: its gradient is not small beside a_j.
template <typename Real>
struct alignas(4 * sizeof(Real)) SmoothedGradient {
  Real max;  // infinite if the row does not count; then p is 0
  Real log_s;
  Real of_p;
  Real of_slope;
  Real at_target;
  int target;  // or kIgnored, kOutOfRange

  // z: the logit of any class but the target; share: that of the class, or 1 if of_slope includes it. If the row has a
  // NaN, of_p is NaN.
  template <int kGamma>
  __device__ __forceinline__ Real at(Real z, Real share, bool detached) const {
    const Real log_p = fmax((z - max) - log_s, kLeast), p = quick_exponential(log_p);
    return p * of_p - of_slope * share * slope_of_class<kGamma>(p, Real(1) - p, -log_p, detached);
  }

 private:
  static constexpr Real kLeast = Real(-1e4);  // e^kLeast is 0
};

template <int kGamma, typename Scalar>
__device__ __forceinline__ SmoothedGradient<compute_t<Scalar>> smoothed_gradient(const RowLossBackward<Scalar>& args,
                                                                                 const Row<Scalar>& row,
                                                                                 compute_t<Scalar> share) {
  using Real = compute_t<Scalar>;
  // A row that does not count has a zero gradient, even where its logits are infinite or NaN.
  const Real given = row.is_live ? upstream(args, row.row) : Real(0);
  if (given == Real(0)) {
    const Real value = row.label == kOutOfRange ? kNaN<Real> : Real(0);
    return {kInfinity<Real>, Real(0), value, Real(0), value, row.label};
  }
  const Real max = args.saved[row.row], log_s = args.saved[args.rows + row.row];
  const Real others = args.saved[2 * args.rows + row.row];
  const SmoothedRow<Scalar, kGamma> special(args, row, share, max, log_s, exponential_minus_one(log_s));
  const Real likely_slope = special.likely_slope();
  const Real of_lse = given * lse_slope(args, row.row);
  const Real of_p = given * (others + likely_slope) + of_lse;
  const ClassOfRow<Real>& label = special.label;
  Real at_target = label.p * of_p - given * ((share + special.of_label) * label.terms.slope);
  if (special.label_is_likely) {
    // p_j (sum a - a_j) - u a_j, without the difference p a_j - a_j, which would cancel as p -> 1.
    at_target = given * (label.p * others - label.u * likely_slope) + of_lse * label.p;
  }
  return {max, log_s, of_p + (log_s - log_s), given * share, at_target, row.label};
}

}  // namespace focalkern::cuda
