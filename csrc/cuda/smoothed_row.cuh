// The focal loss of a row with label smoothing, if all classes but the label have one share s and gamma is 0, 1 or 2,
// from one read of the logits. With l = -log p, the loss of a class is a polynomial in p times l, and so is its slope
// -p dL/dp, whose sum over the classes the backward pass needs:
//
//   gamma   loss              slope
//   0       l                 1
//   1       (1 - p) l         1 - p + p l
//   2       (1 - p)^2 l       (1 - p)^2 + 2 p (1 - p) l
//
// A detached factor leaves the first term of the slope. In e = e^(z - m) and x = m - z, with p = e / S and l = x + log
// S, five sums suffice: of e, e^2, x, e x, e^2 x. The largest class is apart, because 1 - p may cancel there.
#pragma once

#include "cuda/common.cuh"
#include "cuda/row_groups.cuh"
#include "cuda/row_loss.cuh"
#include "cuda/soft_row.cuh"
#include "kernels/row_loss.h"
#include "math/focal.h"

namespace focalkern::cuda {

// The sums over all classes of a row but one of the largest.
template <typename Real>
struct SmoothedSums {
  Real max;
  Real rest;     // of e
  Real squares;  // of e^2
  Real depth;    // of s x
  Real fall;     // of e x
  Real fall2;    // of e^2 x
  int largest;   // the first of the largest classes, kNoClass if no logit is above -inf; only with kHasLargest
};

// The sums of a thread, in which max is coarse_base of its largest logit. `kGamma` says which are needed.
template <int kGamma, bool kHasLargest, typename Real, typename Total>
class SmoothedSumOfThread {
 public:
  __device__ __forceinline__ explicit SmoothedSumOfThread(Real share) : share_(share) {}

  template <typename Scalar>
  __device__ __forceinline__ void read(const Row<Scalar>& row) {
    each_class(
        row, [&](const auto& values, int first, int step) { add(values, first, step); },
        [&](const auto& values, int first, const auto& more, int next) { add_two(values, first, more, next); });
  }

  __device__ __forceinline__ SmoothedSums<Real> of(const RowGroup& group) const {
    SmoothedSums<Real> row = {};
    row.max = group.max(max_);
    const Real base = exp_base(row.max);
    const Real rise = fmin(base - floor(max_), kFar);
    const Real shrink = exponential(-rise), shrink2 = shrink * shrink;
    // The thread's largest class, unless it is the row's: of those all but one are added.
    const bool has_largest = max_ == row.max;
    if constexpr (kHasLargest) row.largest = group.min(has_largest ? largest_ : kNoClass);
    const Real x = fmin(base - max_, kFar), own = has_largest ? Real(0) : exponential(-x), own2 = own * own;
    const Real others = group.sum(has_largest ? Real(1) : Real(0)) - Real(1);
    row.rest = group.sum(rest_.sum * shrink + own) + others;
    const Real deeper = share_ * (base - coarse_base(max_)) * static_cast<Real>(count_);
    row.depth = group.sum(static_cast<Real>(depth_) + deeper);
    if constexpr (kGamma >= 1) row.fall = group.sum((fall_.sum + rise * rest_.sum) * shrink + own * x);
    if constexpr (kGamma == 2) {
      row.squares = group.sum(squares_.sum * shrink2 + own2) + others;
      row.fall2 = group.sum((fall2_.sum + rise * squares_.sum) * shrink2 + own2 * x);
    }
    return row;
  }

 private:
  static constexpr Real kFar = Real(1e4);  // e^-kFar is 0; a factor of e^-infinity must not be infinite

  struct Terms {
    Real rest = 0, depth = 0, fall = 0, squares = 0, fall2 = 0;

    __device__ __forceinline__ void add(Real x) {
      const Real e = summand(-x), far = fmin(x, kFar);
      rest += e;
      if constexpr (kGamma >= 1) fall += e * far;
      if constexpr (kGamma == 2) {
        squares += e * e;
        fall2 += e * e * far;
      }
    }
  };

  template <int count>
  __device__ __forceinline__ void set_aside(const Real (&values)[count], int first, int step, Real (&others)[count]) {
#pragma unroll
    for (int k = 0; k < count; ++k) {
      // A comparison with NaN is false, so a NaN goes to `others`.
      const bool is_above = values[k] > max_;
      others[k] = is_above ? max_ : values[k];
      max_ = is_above ? values[k] : max_;
      if constexpr (kHasLargest) largest_ = is_above ? first + k * step : largest_;
    }
  }

  template <int count>
  __device__ __forceinline__ void add_terms(Terms& terms, const Real (&values)[count], const Real (&others)[count]) {
    const Real base = coarse_base(max_);
    // Each term is multiplied by the share before adding: if several classes are masked by a large number, their sum
    // would be infinite.
#pragma unroll
    for (int k = 0; k < count; ++k) terms.depth += share_ * (base - values[k]);
#pragma unroll
    for (int k = 0; k < count; ++k) terms.add(base - others[k]);
  }

  template <int count>
  __device__ __forceinline__ void add(const Real (&values)[count], int first, int step) {
    const Real before = max_;
    Real others[count];
    set_aside(values, first, step, others);
    Terms terms;
    add_terms(terms, values, others);
    take(before, terms, count);
  }

  // Adds two vectors with one rescaling of the sums.
  template <int count>
  __device__ __forceinline__ void add_two(const Real (&values)[count], int first, const Real (&more)[count], int next) {
    const Real before = max_;
    Real others[count], more_others[count];
    set_aside(values, first, 1, others);
    set_aside(more, next, 1, more_others);
    Terms terms;
    add_terms(terms, values, others);
    add_terms(terms, more, more_others);
    take(before, terms, 2 * count);
  }

  __device__ __forceinline__ void take(Real before, const Terms& terms, int count) {
    const Real rise = coarse_base(max_) - coarse_base(before);
    const Real shrink = summand(floor(before) - coarse_base(max_)), shrink2 = shrink * shrink;
    depth_ += static_cast<Depth>(terms.depth + share_ * rise * static_cast<Real>(count_));
    if constexpr (kGamma >= 1) fall_.add(shrink, terms.fall + shrink * rise * rest_.sum);
    if constexpr (kGamma == 2) {
      fall2_.add(shrink2, terms.fall2 + shrink2 * rise * squares_.sum);
      squares_.add(shrink2, terms.squares);
    }
    rest_.add(shrink, terms.rest);
    count_ += count;
  }

  Real share_;
  Real max_ = -kInfinity<Real>;
  int largest_ = kNoClass;
  int count_ = 0;  // classes read
  // Infinite for a masked class, which a compensated sum would turn into NaN.
  using Depth = std::conditional_t<std::is_same_v<Total, PlainSum<Real>>, Real, double>;
  Depth depth_ = 0;
  Total rest_, squares_, fall_, fall2_;
};

template <int kGamma, bool kHasLargest = false, typename Scalar>
__device__ __forceinline__ SmoothedSums<compute_t<Scalar>> smoothed_sums(const Row<Scalar>& row, const RowGroup& group,
                                                                         compute_t<Scalar> share) {
  using Real = compute_t<Scalar>;
  if (row.classes <= kFewClasses * row.lanes) {
    SmoothedSumOfThread<kGamma, kHasLargest, Real, PlainSum<Real>> mine(share);
    mine.read(row);
    return mine.of(group);
  }
  SmoothedSumOfThread<kGamma, kHasLargest, Real, CompensatedSum<Real>> mine(share);
  mine.read(row);
  return mine.of(group);
}

// The sums of loss and slope over the classes but the largest, each times its share.
template <typename Real>
struct SoftTerms {
  Real loss;
  Real slope;
};

// inverse: 1 / S
template <int kGamma, typename Real>
__device__ __forceinline__ SoftTerms<Real> smoothed_terms(const SmoothedSums<Real>& sums, Real log_s, Real inverse,
                                                          Real share, Real count, bool detached) {
  const Real l0 = sums.depth + share * count * log_s;  // of s l
  if constexpr (kGamma == 0) return {l0, share * count};
  const Real p1 = sums.rest * inverse, l1 = (sums.fall + log_s * sums.rest) * inverse;  // of p, of p l
  if constexpr (kGamma == 1) return {l0 - share * l1, share * (count - p1 + (detached ? Real(0) : l1))};
  const Real p2 = sums.squares * inverse * inverse, l2 = (sums.fall2 + log_s * sums.squares) * inverse * inverse;
  return {l0 - share * (Real(2) * l1 - l2), share * (count - Real(2) * p1 + p2 + (detached ? Real(0) : 2 * (l1 - l2)))};
}

// A class of a row, with its terms for a share of 1.
template <typename Real>
struct ClassOfRow {
  Real p;
  Real u;  // 1 - p
  SoftTerms<Real> terms;
};

// The slope of a class with u = 1 - p and a finite l.
template <int kGamma, typename Real>
__device__ __forceinline__ Real slope_of_class(Real p, Real u, Real l, bool detached) {
  if constexpr (kGamma == 0) return Real(1);
  const Real lower = kGamma == 2 ? u : Real(1), pull = detached ? Real(0) : Real(kGamma);
  return lower * (u + pull * (p * l));
}

// minus_log_p: l
template <int kGamma, typename Real>
__device__ __forceinline__ ClassOfRow<Real> class_of_row(Real p, Real u, Real minus_log_p, bool detached) {
  const Real factor = kGamma == 0 ? Real(1) : kGamma == 1 ? u : u * u;
  return {p, u, {factor * minus_log_p, slope_of_class<kGamma>(p, u, finite_log(minus_log_p), detached)}};
}

// The largest class, whose 1 - p may cancel. p: 1 / S; rest: the sum of e over all other classes, S - 1
template <int kGamma, typename Real>
__device__ __forceinline__ ClassOfRow<Real> largest_of_row(Real p, Real rest, Real log_s, bool detached) {
  return class_of_row<kGamma>(p, rest * p, log_s, detached);
}

// A class of at most kUnlikely.
template <int kGamma, typename Real>
__device__ __forceinline__ ClassOfRow<Real> unlikely_of_row(Real log_p, bool detached) {
  const Real p = quick_exponential(log_p);
  return class_of_row<kGamma>(p, Real(1) - p, -log_p, detached);
}

// The classes of a row with their own formulas: the label and the largest one.
template <typename Scalar, int kGamma>
struct SmoothedRow {
  using Real = compute_t<Scalar>;
  Real max;
  Real log_s;
  bool detached;
  Real share;     // of every class
  Real of_label;  // what the label has in addition
  ClassOfRow<Real> largest;
  ClassOfRow<Real> label;  // which may be the largest, or one of them
  Real likely;             // logit of the likely class, or NaN if there is none
  bool label_is_likely;

  // rest: S - 1
  __device__ __forceinline__ SmoothedRow(const RowLossArgs<Scalar>& args, const Row<Scalar>& row, Real share, Real max,
                                         Real log_s, Real rest)
      : max(max),
        log_s(log_s),
        detached(args.detach_modulation),
        share(share),
        of_label(label_share(args)),
        largest(largest_of_row<kGamma>(quick_quotient(Real(1), Real(1) + rest), rest, log_s, detached)) {
    likely = has_likely_class(log_s) ? max : kNaN<Real>;
    const Real z_label = row.z(row.label);
    label_is_likely = z_label == likely;
    label = z_label == max ? largest : of(z_label);
  }

  __device__ __forceinline__ ClassOfRow<Real> of(Real z) const {
    return unlikely_of_row<kGamma>((z - max) - log_s, detached);
  }
  // The slope of the likely class, times its share; 0 if there is none.
  __device__ __forceinline__ Real likely_slope() const {
    return likely == max ? (share + (label_is_likely ? of_label : Real(0))) * largest.terms.slope : Real(0);
  }
};

}  // namespace focalkern::cuda
