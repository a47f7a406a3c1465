// The focal loss of a row whose classes have shares t, for gamma = 0, 1 or 2, from one read of logits and shares. As in
// smoothed_row.cuh, with the sums of e, t, t e, t e^2, t x, t e x and t e^2 x. The largest class is apart.
#pragma once

#include "cuda/common.cuh"
#include "cuda/row_groups.cuh"
#include "cuda/smoothed_row.cuh"
#include "cuda/soft_shares.cuh"

namespace focalkern::cuda {

// The sums over all classes of a row but one of the largest, the first except for rows in a tile. A warp writes those
// up to `max` by their place.
template <typename Real>
struct SharedSums {
  Real rest;   // of e
  Real share;  // of t
  Real once;   // of t e
  Real twice;  // of t e^2
  Real depth;  // of t x
  Real fall;   // of t e x
  Real fall2;  // of t e^2 x
  Real max;
  Real plain_fall;  // of e x; only with kHasPlainFall
  int largest;      // may be kNoClass if no logit is above -inf

  // Adds a class. far: the smaller of x and 1e4, because 0 times infinity is NaN
  template <int kGamma>
  __device__ __forceinline__ void add(Real x, Real e, Real far, Real t) {
    const Real te = t * e;
    rest += e;
    share += t;
    // A class with a share of 0 adds 0, even at probability zero.
    if (t != Real(0)) depth += t * x;
    if constexpr (kGamma >= 1) {
      once += te;
      fall += te * far;
    }
    if constexpr (kGamma == 2) {
      const Real te2 = te * e;
      twice += te2;
      fall2 += te2 * far;
    }
  }
};

// The sums of a thread, in which max is coarse_base of its largest logit, without its largest class. `kGamma` says
// which are needed.
template <int kGamma, bool kHasPlainFall, typename Real, typename Total, typename Shares>
class SharedSumOfThread {
 public:
  __device__ __forceinline__ explicit SharedSumOfThread(const Shares& shares) : shares_(shares) {}

  template <typename Scalar>
  __device__ __forceinline__ void read(const Row<Scalar>& row) {
    each_class(row, [&](const auto& values, int first, int step) {
      Real shares[kCount<decltype(values)>];
      shares_.read(first, step, shares);
      add(values, shares, first, step);
    });
  }

  __device__ __forceinline__ SharedSums<Real> of(const RowGroup& group) const {
    SharedSums<Real> row = {};
    row.max = group.max(max_);
    const Real base = exp_base(row.max);
    const Real rise = fmin(base - floor(max_), kFar);
    const Real shrink = exponential(-rise), shrink2 = shrink * shrink;
    // The thread's largest class, unless it is the row's.
    const Real x = fmin(base - max_, kFar);
    row.largest = group.min(max_ == row.max ? largest_ : kNoClass);
    const bool is_apart = largest_ == row.largest || largest_ == kNoClass;
    const Real own = is_apart ? Real(0) : exponential(-x), t = is_apart ? Real(0) : share_of_largest_;
    row.rest = group.sum(rest_.sum * shrink + own);
    if constexpr (kHasPlainFall) row.plain_fall = group.sum((plain_fall_.sum + rise * rest_.sum) * shrink + own * x);
    row.share = group.sum(share_.sum + t);
    const Real deeper = (base - coarse_base(max_)) * share_.sum;
    row.depth = group.sum(static_cast<Real>(depth_) + deeper + (is_apart ? Real(0) : t * (base - max_)));
    if constexpr (kGamma >= 1) {
      row.once = group.sum(once_.sum * shrink + t * own);
      row.fall = group.sum((fall_.sum + rise * once_.sum) * shrink + t * own * x);
    }
    if constexpr (kGamma == 2) {
      row.twice = group.sum(twice_.sum * shrink2 + t * own * own);
      row.fall2 = group.sum((fall2_.sum + rise * twice_.sum) * shrink2 + t * own * own * x);
    }
    return row;
  }

 private:
  static constexpr Real kFar = Real(1e4);  // e^-kFar is 0; a factor of e^-infinity must not be infinite

  // Adds several classes with one rescaling of the sums.
  template <int count>
  __device__ __forceinline__ void add(const Real (&values)[count], const Real (&shares)[count], int first, int step) {
    const Real before = max_;
    Real others[count], t[count];
#pragma unroll
    for (int k = 0; k < count; ++k) {
      // A comparison with NaN is false, so a NaN goes to `others`.
      const bool is_above = values[k] > max_;
      others[k] = is_above ? max_ : values[k];
      t[k] = is_above ? share_of_largest_ : shares[k];
      max_ = is_above ? values[k] : max_;
      share_of_largest_ = is_above ? shares[k] : share_of_largest_;
      largest_ = is_above ? first + k * step : largest_;
    }
    const Real base = coarse_base(max_);
    Real rest = 0, share = 0, once = 0, twice = 0, depth = 0, fall = 0, fall2 = 0, plain_fall = 0;
#pragma unroll
    for (int k = 0; k < count; ++k) {
      const Real x = base - others[k];
      const Real e = summand(-x), far = fmin(x, kFar), te = t[k] * e;
      rest += e;
      if constexpr (kHasPlainFall) plain_fall += e * far;
      share += t[k];
      // Each term is multiplied by the share before adding: if several classes are masked by a large number, their sum
      // would be infinite. A class with a share of 0 adds 0, even at probability zero.
      depth += t[k] * (t[k] == Real(0) ? Real(0) : x);
      if constexpr (kGamma >= 1) {
        once += te;
        fall += te * far;
      }
      if constexpr (kGamma == 2) {
        twice += te * e;
        fall2 += te * e * far;
      }
    }
    const Real rise = base - coarse_base(before);
    const Real shrink = summand(floor(before) - base), shrink2 = shrink * shrink;
    depth_ += static_cast<Depth>(depth + rise * share_.sum);
    if constexpr (kGamma >= 1) {
      fall_.add(shrink, fall + shrink * rise * once_.sum);
      once_.add(shrink, once);
    }
    if constexpr (kGamma == 2) {
      fall2_.add(shrink2, fall2 + shrink2 * rise * twice_.sum);
      twice_.add(shrink2, twice);
    }
    if constexpr (kHasPlainFall) plain_fall_.add(shrink, plain_fall + shrink * rise * rest_.sum);
    share_.add(Real(1), share);
    rest_.add(shrink, rest);
  }

  const Shares& shares_;
  Real max_ = -kInfinity<Real>;
  int largest_ = kNoClass;
  Real share_of_largest_ = 0;
  // Infinite for a masked class, which a compensated sum would turn into NaN.
  using Depth = std::conditional_t<std::is_same_v<Total, PlainSum<Real>>, Real, double>;
  Depth depth_ = 0;
  Total rest_, share_, once_, twice_, fall_, fall2_, plain_fall_;
};

template <int kGamma, typename Scalar, typename Shares>
__device__ __forceinline__ SharedSums<compute_t<Scalar>> shared_sums(const Row<Scalar>& row, const Shares& shares,
                                                                     const RowGroup& group) {
  using Real = compute_t<Scalar>;
  if (row.classes <= kFewClasses * row.lanes) {
    SharedSumOfThread<kGamma, false, Real, PlainSum<Real>, Shares> mine(shares);
    mine.read(row);
    return mine.of(group);
  }
  SharedSumOfThread<kGamma, false, Real, CompensatedSum<Real>, Shares> mine(shares);
  mine.read(row);
  return mine.of(group);
}

// inverse: 1 / S
template <int kGamma, typename Real>
__device__ __forceinline__ SoftTerms<Real> shared_terms(const SharedSums<Real>& sums, Real log_s, Real inverse,
                                                        bool detached) {
  const Real l0 = sums.depth + sums.share * log_s;  // of t l
  if constexpr (kGamma == 0) return {l0, sums.share};
  const Real p1 = sums.once * inverse, l1 = (sums.fall + log_s * sums.once) * inverse;  // of t p, of t p l
  if constexpr (kGamma == 1) return {l0 - l1, sums.share - p1 + (detached ? Real(0) : l1)};
  const Real p2 = sums.twice * inverse * inverse, l2 = (sums.fall2 + log_s * sums.twice) * inverse * inverse;
  return {l0 - (Real(2) * l1 - l2), sums.share - Real(2) * p1 + p2 + (detached ? Real(0) : Real(2) * (l1 - l2))};
}

template <typename Real>
using class_int = decltype(number_as_class(Real()));

// Writes the saved numbers of a row and its loss, and returns the loss. shares.of(j) is the share of a class.
template <int kGamma, typename Scalar, typename SharesOfRow>
__device__ __forceinline__ compute_t<Scalar> finish_row(const RowLossForward<Scalar>& args, const Row<Scalar>& row,
                                                        const SharesOfRow& shares,
                                                        const SharedSums<compute_t<Scalar>>& sums) {
  using Real = compute_t<Scalar>;
  Real loss = row.label == kOutOfRange ? kNaN<Real> : Real(0);
  Real log_s = 0, slopes = 0;
  int top = 0;
  if (row.is_live) {
    if (sums.largest != kNoClass) top = sums.largest;
    // m - m makes the result NaN for an infinite m; the sum over the others alone would be finite.
    log_s = log_one_plus(sums.rest) + (sums.max - sums.max);
    const bool detached = args.detach_modulation;
    const Real p = exponential(-log_s);  // a quotient would take a register too many
    const SoftTerms<Real> others = shared_terms<kGamma>(sums, log_s, p, detached);
    const ClassOfRow<Real> largest = largest_of_row<kGamma>(p, sums.rest, log_s, detached);
    const Real share = shares.of(top);
    loss = others.loss + share * largest.terms.loss;
    slopes = others.slope + (has_likely_class(log_s) ? Real(0) : share * largest.terms.slope);
  }
  args.saved[row.row] = class_as_number(class_int<Real>(top));
  args.saved[args.rows + row.row] = log_s;
  args.saved[2 * args.rows + row.row] = slopes;
  if (args.row_loss != nullptr) args.row_loss[row.row] = loss;
  return loss;
}

}  // namespace focalkern::cuda
