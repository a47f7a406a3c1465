// Sums and gradient of rows of adjacent classes.
//
// The loop processes one group of classes at a time (ClassGroup). If the last group is not full, it starts earlier and
// overlaps the previous one. Rows with fewer classes than one group have their own loop (kFewClasses).
#pragma once

#include <algorithm>
#include <cstring>
#include <limits>

#include "cpu/row_loss/tile.h"
#include "cpu/simd/dispatch.h"
#include "cpu/simd/math.h"
#include "cpu/simd/vector.h"

namespace focalkern::cpu {
namespace {

// A vector whose largest lane is the largest number of a row; any number if one is NaN.
template <int64_t n, typename Scalar>
FK_HOST_DEVICE auto max_lanes_of(const Scalar* z, int64_t classes) {
  using Group = ClassGroup<Scalar, n>;
  using Reals = typename Group::Reals;
  Reals max[Group::kVectors], v[Group::kVectors];
  Group::load(z + classes - Group::kClasses, max);
#pragma GCC unroll 2
  for (const Scalar* end = z + (classes & -Group::kClasses); z != end; z += Group::kClasses) {
    Group::load(z, v);
    for (int64_t i = 0; i < Group::kVectors; ++i) max[i] = max[i] > v[i] ? max[i] : v[i];
  }
  for (int64_t i = 1; i < Group::kVectors; ++i) max[0] = Larger{}(max[0], max[i]);
  return max[0];
}
template <int64_t n, typename Scalar>
FK_HOST_DEVICE compute_t<Scalar> max_of(const Scalar* z, int64_t classes) {
  return fold_lanes(max_lanes_of<n>(z, classes), Larger{});
}

// The maximum, as the shift of the exponentials. If all logits are -inf, the shift must be finite: -inf - -inf would be
// NaN, not 0. log p_y is then NaN through z_y - m.
template <typename Real>
FK_HOST_DEVICE Real finite_shift(Real max) {
  return max == -std::numeric_limits<Real>::infinity() ? Real(0) : max;
}

template <typename Real>
struct ExpSums {
  Real first;
  Real squares;  // sum of the squared exponentials
};

// Excluding a class from the sum, instead of subtracting it afterwards, keeps 1 - p of it exact as p -> 1. With
// kMayRise the shift need not be the maximum; if it is too small, the sum is at least kLargestSum.
template <int64_t n, bool kSquares, bool kMayRise = false, typename Scalar>
FK_HOST_DEVICE ExpSums<compute_t<Scalar>> sum_exp_except(const Scalar* z, int64_t classes, compute_t<Scalar> shift,
                                                         int64_t except, compute_t<Scalar> exp_zero) {
  using Real = compute_t<Scalar>;
  using Int = label_int<Real>;
  using Group = ClassGroup<Scalar, n>;
  using Reals = typename Group::Reals;
  using Ints = typename Group::Ints;
  constexpr int64_t kVectors = Group::kVectors, kClasses = Group::kClasses;
  const Reals most = spread<Reals>(-exp_zero), shifts = spread<Reals>(shift);
  // `skipped` is compared with the class indices of the first vector; those of the second are one larger. If the class
  // is not in this block, `skipped` matches no class.
  const bool is_here = except >= 0 && except < classes;
  Ints skipped[kVectors];
  for (int64_t i = 0; i < kVectors; ++i) {
    skipped[i] = spread<Ints>(static_cast<Int>((is_here ? except : int64_t(-kVectors)) - i));
  }
  const int64_t whole = classes & -kClasses;
  Reals v[kVectors], sum{}, part[kVectors];
  [[maybe_unused]] Reals squares{}, part_squares[kVectors];
  Ints index = Group::first_classes();
  const Scalar* group = z;
  for (const Scalar* end = z + whole; group != end;) {
    // The sum has parts: in a long run of equal terms, all rounding errors would have the same sign.
    const Scalar* stop = end - group < kPart * kClasses ? end : group + kPart * kClasses;
    for (int64_t i = 0; i < kVectors; ++i) {
      part[i] = Reals{};
      if constexpr (kSquares) part_squares[i] = Reals{};
    }
#pragma GCC unroll 4
    for (; group != stop; group += kClasses, index += static_cast<Int>(kClasses)) {
      prefetch(group + kBlock);  // the next rows or, in a long row, the next block, whose maximum comes first
      Group::load(group, v);
      for (int64_t i = 0; i < kVectors; ++i) {
        const ScaledExponential<Reals> e = exponential_of_fall<kMayRise>(Reals(shifts - v[i]), most);
        if constexpr (sizeof(Reals) == 64) {  // AVX-512 has masked additions
          const Reals product = e.mantissa * e.scale;
          part[i] = index != skipped[i] ? part[i] + product : part[i];
          if constexpr (kSquares) {
            part_squares[i] = index != skipped[i] ? part_squares[i] + product * product : part_squares[i];
          }
        } else {
          const Reals product = e.mantissa * (index != skipped[i] ? e.scale : Reals{});
          part[i] += product;
          if constexpr (kSquares) part_squares[i] += product * product;
        }
      }
    }
    for (int64_t i = 0; i < kVectors; ++i) {
      sum += part[i];
      if constexpr (kSquares) squares += part_squares[i];
    }
  }
  if (whole < classes) {
    Group::load(z + classes - kClasses, v);
    index -= static_cast<Int>(whole - (classes - kClasses));
    for (int64_t i = 0; i < kVectors; ++i) {
      const ScaledExponential<Reals> e = exponential_of_fall<kMayRise>(Reals(shifts - v[i]), most);
      // Excludes the classes that were added before: for these the difference is negative. A comparison would be
      // slower, because gcc makes one per lane.
      const Ints were_before = (index + static_cast<Int>(i - whole)) >> (8 * sizeof(Int) - 1);
      const Reals new_scale = lanes_cast<Reals>(lanes_cast<Ints>(e.scale) & ~were_before);
      const Reals product = e.mantissa * (index != skipped[i] ? new_scale : Reals{});
      sum += product;
      if constexpr (kSquares) squares += product * product;
    }
  }
  return {fold_lanes(sum, Sum{}), kSquares ? fold_lanes(squares, Sum{}) : Real(0)};
}

// The largest logit below `limit`, or -inf.
template <typename Scalar>
FK_HOST_DEVICE compute_t<Scalar> max_below(const Scalar* z, int64_t n, compute_t<Scalar> limit) {
  using Real = compute_t<Scalar>;
  Real lanes[kLanes<Scalar>];
  std::fill_n(lanes, kLanes<Scalar>, -std::numeric_limits<Real>::infinity());
  const int64_t last = n - kLanes<Scalar>;
  for (int64_t j = 0; j < n; j += kLanes<Scalar>) {
    const Scalar* group = z + (j < last ? j : last);
#pragma omp simd
    for (int64_t l = 0; l < kLanes<Scalar>; ++l) {
      const Real v = load_as_compute(group[l]);
      lanes[l] = (v < limit) & (v > lanes[l]) ? v : lanes[l];
    }
  }
  Real m = -std::numeric_limits<Real>::infinity();
#pragma omp simd reduction(max : m)
  for (int64_t l = 0; l < kLanes<Scalar>; ++l) m = lanes[l] > m ? lanes[l] : m;
  return m;
}

// The first class with this logit; 0 if no class has it.
template <typename Scalar>
FK_HOST_DEVICE int64_t first_equal(const Scalar* z, int64_t n, compute_t<Scalar> value) {
  using Int = label_int<compute_t<Scalar>>;
  const int64_t last = n - kLanes<Scalar>;
  for (int64_t j = 0; j < n; j += kLanes<Scalar>) {
    const int64_t begin = j < last ? j : last;
    Int any = 0;
#pragma omp simd reduction(| : any)
    for (int64_t l = 0; l < kLanes<Scalar>; ++l) any |= load_as_compute(z[begin + l]) == value ? 1 : 0;
    if (!any) continue;
    int64_t c = begin;
    while (load_as_compute(z[c]) != value) ++c;
    return c;
  }
  return 0;
}

// The sum of a row of several blocks, for kSumOnly. The loop stops once the sum is too large.
struct SumOfLongRow {
  template <int64_t bytes, typename Scalar>
  static FK_HOST_DEVICE void run(const Scalar* z, int64_t classes, int64_t target, int64_t r,
                                 Tile<compute_t<Scalar>>& tile) {
    using Real = compute_t<Scalar>;
    const Real target_logit = load_as_compute(z[target]);
    double sum = 0;
    const int64_t blocks = classes / kBlock;  // the last block also takes the remainder
    for (int64_t block = 0; block < blocks && sum < kLargestSum<Real>; ++block) {  // false for NaN, too
      const int64_t begin = block * kBlock;
      const int64_t n = block + 1 < blocks ? kBlock : classes - begin;
      sum += sum_exp_except<kLanesOf<bytes, Scalar>, false, true>(z + begin, n, target_logit, target - begin,
                                                                  tile.exp_zero[0])
                 .first;
    }
    tile.shift[r] = target_logit;
    tile.sum_exp_others[r] = static_cast<Real>(sum);
  }
};

// The sums of a row of several blocks, with a running maximum.
template <typename Loss>
struct SumsOfLongRow {
  template <int64_t bytes, typename Scalar>
  static FK_HOST_DEVICE void run(const Scalar* z, int64_t classes, int64_t target, int64_t r,
                                 Tile<compute_t<Scalar>>& tile) {
    constexpr int64_t kWidth = kLanesOf<bytes, Scalar>;
    using Real = compute_t<Scalar>;
    constexpr Real kMinusInfinity = -std::numeric_limits<Real>::infinity();
    [[maybe_unused]] const Real target_logit = load_as_compute(z[target]);
    Real m = kMinusInfinity;
    [[maybe_unused]] Real rival = kMinusInfinity;
    int64_t marked = Loss::kSpecialClass == SpecialClass::kLargest ? 0 : kNoTarget;
    double sum = 0, squares = 0;
    const int64_t blocks = classes / kBlock;  // the last block also takes the remainder
    for (int64_t block = 0; block < blocks; ++block) {
      const int64_t begin = block * kBlock;
      const int64_t n = block + 1 < blocks ? kBlock : classes - begin;
      const Real block_max = max_of<kWidth>(z + begin, n);
      if (block_max > m) {
        const Real shrink = exponential(m - block_max);
        if constexpr (Loss::kSumExcludesTop) {
          // The sum excluded the largest class so far. A larger one follows, so its term, 1, is added now.
          sum = (sum + 1) * shrink;
          squares = (squares + 1) * shrink * shrink;
          marked = begin + first_equal(z + begin, n, block_max);
        } else {
          sum *= shrink;
        }
        m = block_max;
      }
      if constexpr (Loss::kSpecialClass == SpecialClass::kRunnerUp) {
        const Real of_block = max_below(z + begin, n, target_logit);
        if (of_block > rival) {
          rival = of_block;
          marked = begin + first_equal(z + begin, n, of_block);
        }
      }
      const int64_t left_out = Loss::kSumExcludesTop ? marked : target;
      const auto sums =
          sum_exp_except<kWidth, Loss::kSquares>(z + begin, n, finite_shift(m), left_out - begin, tile.exp_zero[0]);
      sum += sums.first;
      squares += sums.squares;
    }
    tile.shift[r] = m;
    tile.sum_exp_others[r] = static_cast<Real>(sum);
    if constexpr (Loss::kSquares) tile.squares[r] = static_cast<Real>(squares);
    if constexpr (Loss::kSpecialClass != SpecialClass::kNone) tile.special[r] = static_cast<label_int<Real>>(marked);
  }
};

// grad_j = e^(z_j - m) * factor, or e (factor + e square)
template <int64_t n, bool kSquares, typename Scalar>
FK_HOST_DEVICE void scaled_exp_of_group(const Scalar* z, compute_t<Scalar> max, compute_t<Scalar> factor,
                                        [[maybe_unused]] compute_t<Scalar> square, compute_t<Scalar> exp_zero,
                                        Scalar* grad) {
  using Group = ClassGroup<Scalar, n>;
  using Reals = typename Group::Reals;
  const Reals most = -exp_zero - Reals{};
  Reals v[Group::kVectors];
  Group::load(z, v);
  for (int64_t i = 0; i < Group::kVectors; ++i) {
    const Reals fall = max - v[i];
    // This minimum turns NaN into 0; the factor of such a row is NaN already. A row without a gradient has an infinite
    // maximum, so its gradient is 0.
    const ScaledExponential<Reals> parts = scaled_exponential(-(fall < most ? fall : most));
    const Reals e = parts.mantissa * parts.scale;
    if constexpr (kSquares) {
      v[i] = e * (factor + e * square);
    } else {
      v[i] = e * factor;
    }
  }
  Group::store(v, grad);
}
template <int64_t n, bool kSquares, typename Scalar>
FK_HOST_DEVICE void scaled_exp(const Scalar* z, int64_t classes, compute_t<Scalar> max, compute_t<Scalar> factor,
                               compute_t<Scalar> square, compute_t<Scalar> exp_zero, Scalar* grad) {
  constexpr int64_t kClasses = ClassGroup<Scalar, n>::kClasses;
  scaled_exp_of_group<n, kSquares>(z + classes - kClasses, max, factor, square, exp_zero, grad + classes - kClasses);
#pragma GCC unroll 2
  for (const Scalar* end = z + (classes & -kClasses); z != end; z += kClasses, grad += kClasses) {
    prefetch(z + kAhead);
    prefetch(grad + kAhead);
    scaled_exp_of_group<n, kSquares>(z, max, factor, square, exp_zero, grad);
  }
}

// Rows of at most one block. This function makes no calls, so that constants stay in registers from row to row.
template <typename Loss>
struct SumsOfRows {
  template <int64_t bytes, typename Scalar>
  static FK_HOST_DEVICE void run(const RowLossArgs<Scalar>& args, int64_t row_begin, int64_t n_rows,
                                 Tile<compute_t<Scalar>>& tile) {
    constexpr int64_t n = kLanesOf<bytes, Scalar>;
    // A group has as many rows as fit the first-level cache. Separate loops for maxima and sums avoid waiting for the
    // maximum or the sum of the previous row.
    using Real = compute_t<Scalar>;
    const int64_t group = std::max<int64_t>(1, kBlock / args.classes);
    RowCursor row(args.layout, row_begin);
    for (int64_t begin = 0; begin < n_rows; begin += group) {
      const int64_t end = std::min(n_rows, begin + group);
      const RowCursor first = row;
      for (int64_t r = begin; r < end; ++r, row.next()) {
        if (tile.label[r] == kNoTarget) {
          tile.shift[r] = tile.sum_exp_others[r] = tile.target_logit[r] = 0;
          continue;
        }
        const Scalar* z = args.logits + row.offset();
        tile.shift[r] = max_of<n>(z, args.classes);
        tile.target_logit[r] = load_as_compute(z[tile.label[r]]);
      }
      row = first;
      for (int64_t r = begin; r < end; ++r, row.next()) {
        if (tile.label[r] == kNoTarget) continue;
        const Scalar* z = args.logits + row.offset();
        int64_t left_out = tile.label[r];
        if constexpr (Loss::kSpecialClass == SpecialClass::kLargest) {
          tile.special[r] = static_cast<label_int<Real>>(first_equal(z, args.classes, tile.shift[r]));
          left_out = tile.special[r];
        } else if constexpr (Loss::kSpecialClass == SpecialClass::kRunnerUp) {
          const Real rival = max_below(z, args.classes, tile.target_logit[r]);
          const bool alone = rival == -std::numeric_limits<Real>::infinity();
          tile.special[r] = alone ? kNoTarget : static_cast<label_int<Real>>(first_equal(z, args.classes, rival));
        }
        const auto sums =
            sum_exp_except<n, Loss::kSquares>(z, args.classes, finite_shift(tile.shift[r]), left_out, tile.exp_zero[0]);
        tile.sum_exp_others[r] = sums.first;
        if constexpr (Loss::kSquares) tile.squares[r] = sums.squares;
      }
    }
  }
};

// SumsOfRows for kSumOnly: relative to the logit of the target; if the sum is then too large, relative to the largest
// logit.
struct SumOfRows {
  template <int64_t bytes, typename Scalar>
  static FK_HOST_DEVICE void run(const RowLossArgs<Scalar>& args, int64_t row_begin, int64_t n_rows,
                                 Tile<compute_t<Scalar>>& tile) {
    constexpr int64_t n = kLanesOf<bytes, Scalar>;
    using Real = compute_t<Scalar>;
    const Real exp_zero = tile.exp_zero[0];
    RowCursor row(args.layout, row_begin);
    for (int64_t r = 0; r < n_rows; ++r, row.next()) {
      const int64_t label = tile.label[r];
      if (label == kNoTarget) {
        tile.shift[r] = tile.sum_exp_others[r] = tile.target_logit[r] = 0;
        continue;
      }
      const Scalar* z = args.logits + row.offset();
      Real shift = load_as_compute(z[label]);
      tile.target_logit[r] = shift;
      Real rest = sum_exp_except<n, false, true>(z, args.classes, shift, label, exp_zero).first;
      if (!(rest < kLargestSum<Real>)) {  // or NaN
        shift = max_of<n>(z, args.classes);
        rest = sum_exp_except<n, false>(z, args.classes, finite_shift(shift), label, exp_zero).first;
      }
      tile.shift[r] = shift;
      tile.sum_exp_others[r] = rest;
    }
  }
};

template <typename Loss, typename Scalar>
void sums_of_long_rows(const RowLossArgs<Scalar>& args, int64_t row_begin, int64_t n_rows,
                       Tile<compute_t<Scalar>>& tile) {
  RowCursor row(args.layout, row_begin);
  for (int64_t r = 0; r < n_rows; ++r, row.next()) {
    if (tile.label[r] == kNoTarget) {
      tile.shift[r] = tile.sum_exp_others[r] = tile.target_logit[r] = 0;
      continue;
    }
    const Scalar* z = args.logits + row.offset();
    bool is_done = false;
    if constexpr (kSumOnly<Loss>) {
      run_in_widest<SumOfLongRow>(z, args.classes, tile.label[r], r, tile);
      is_done = tile.sum_exp_others[r] < kLargestSum<compute_t<Scalar>>;
    }
    if (!is_done) run_in_widest<SumsOfLongRow<Loss>>(z, args.classes, tile.label[r], r, tile);
    tile.target_logit[r] = load_as_compute(z[tile.label[r]]);
  }
}

// The logit of the special class minus the target's logit.
template <typename Loss, typename Scalar>
void read_gaps(const Scalar* logits, const RowLayout& layout, int64_t row_begin, int64_t n_rows,
               Tile<compute_t<Scalar>>& tile) {
  using Real = compute_t<Scalar>;
  RowCursor row(layout, row_begin);
  for (int64_t r = 0; r < n_rows; ++r, row.next()) {
    const bool is_there = tile.label[r] != kNoTarget && tile.special[r] != kNoTarget;
    const Real marked = is_there ? load_as_compute(logits[row.offset() + tile.special[r] * layout.class_stride]) : 0;
    tile.gap[r] = is_there ? marked - tile.target_logit[r] : -std::numeric_limits<Real>::infinity();
  }
}

template <typename Loss>
struct GradOfRows {
  template <int64_t bytes, typename Scalar>
  static FK_HOST_DEVICE void run(const RowLossBackward<Scalar>& args, int64_t row_begin, int64_t n_rows,
                                 const Tile<compute_t<Scalar>>& tile) {
    constexpr int64_t n = kLanesOf<bytes, Scalar>;
    RowCursor row(args.layout, row_begin), grad_row(args.grad_layout, row_begin);
    for (int64_t r = 0; r < n_rows; ++r, row.next(), grad_row.next()) {
      Scalar* grad = args.grad_logits + grad_row.offset();
      using Group = ClassGroup<Scalar, n>;
      scaled_exp<n, Loss::kSquares>(args.logits + row.offset(), args.classes, tile.shift[r],
                                    Group::with_plain_nan(tile.factor[r]), Group::with_plain_nan(tile.square_factor[r]),
                                    tile.exp_zero[0], grad);
      store_special_grads<Loss>(tile, r, grad);
    }
  }
};

}  // namespace
}  // namespace focalkern::cpu
