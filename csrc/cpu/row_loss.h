// Losses of rows of logits, forward and backward, on the CPU: the loops, which are the same for every loss. What a loss
// is besides is in its header in math (see math/row_loss.h), and its kernels are made by FK_ROW_LOSS.
//
//   forward   logits [rows, classes] -> row_loss [rows], saved [3 or 4, rows] = (m, log S, log u or squares, marked)
//   backward  logits, saved, grad_loss -> grad_logits [rows, classes] (and grad_gamma, grad_target)
//
// Memory: each direction reads the logits from memory once; second looks at a row find it in cache. Three shapes of
// the same work:
//   rows      classes are adjacent and many: vectors run along a row, in blocks that stay in the first-level cache
//   columns   rows are adjacent (pixels, [N, C, d1, ...]): vectors run across a tile of rows
//   few classes in adjacent memory are turned into a tile of columns first; with AVX-512 the gradient of 9 to 32
//   float32 classes is written without (cpu/short_rows.h)
// What is left of a row after its sums, a handful of numbers, is computed for a whole tile of rows at once.
// Soft targets and label smoothing need every class's factor; they take a plainer path at the end of the file.
#pragma once

#include <algorithm>
#include <cstring>
#include <memory>
#include <type_traits>

#include "cpu/elementary.h"
#include "cpu/lanes.h"
#include "cpu/short_rows.h"
#include "cpu/transpose.h"
#include "cpu/vector_clones.h"
#include "kernels.h"
#include "math/row_loss.h"

namespace focalkern::cpu {
namespace {

constexpr int64_t kTileRows = 64;        // rows whose scalars are finished together; also the width of a column tile
constexpr int64_t kFewClasses = 32;      // up to here a transposed tile wastes less than padding a row to full vectors
constexpr int64_t kBlock = 4096;         // logits of a row that are looked at twice while in the first-level cache
constexpr int64_t kChunkLogits = 16384;  // logits per unit of parallel work
constexpr int64_t kAhead = 1024;         // how many logits ahead a prefetch reaches along a row
constexpr int64_t kPart = 32;            // vectors of a row that are added one after the other

template <typename Real>
using label_int = typename detail::Format<Real>::Int;  // as wide as Real, so that comparisons stay in one vector

// Classes that a loop over a row takes at once: whole vectors of the widest kind, of Scalar and of its compute type.
template <typename Scalar>
constexpr int64_t kLanes = sizeof(Scalar) == 2 ? 32 : 16;

constexpr int kNoTarget = -1;  // never equals a class: the label of an ignored row

// The numbers of a tile of rows on their way from sums to loss and gradient.
template <typename Real>
struct alignas(64) Tile {
  label_int<Real> label[kTileRows];
  Real weight[kTileRows];
  Real gamma[kTileRows];
  Real max[kTileRows];                // m
  Real rest[kTileRows];               // sum of exp(z_j - m) over every class but the one left out
  Real squares[kTileRows];            // sum of exp(z_j - m)^2 over the same classes, then of p_j^2
  Real gap[kTileRows];                // logit of the marked class minus that of the target
  label_int<Real> marked[kTileRows];  // or kNoTarget
  Real target_logit[kTileRows];       // z_y
  Real log_s[kTileRows];              // log sum_j exp(z_j - m)
  Real log_p[kTileRows];
  Real log_u[kTileRows];
  Real loss[kTileRows];
  Real upstream[kTileRows];       // the gradient of the row's loss
  Real factor[kTileRows];         // what multiplies e^(z_j - m) in the gradient
  Real square_factor[kTileRows];  // what multiplies e^(2 (z_j - m))
  Real target_slope[kTileRows];   // the gradient of the target's logit
  Real marked_slope[kTileRows];   // and of the marked class's
  Real grad_gamma[kTileRows];
  Real exp_zero = kExpZero<Real>;  // here compilers do not see it: of a constant gcc makes no maximum
};

// The processor foresees a run of addresses, but not beyond a page, and not the many runs of a tile of columns. The
// address may lie outside the tensor: a prefetch never faults.
FK_HOST_DEVICE void prefetch(const void* address) { __builtin_prefetch(address); }

// ---- a row of adjacent classes -------------------------------------------------------------------------------------
//
// A vector of classes after another; if the last one is not full, it starts earlier and overlaps its neighbour. A row
// that has fewer classes than one vector takes another road (kFewClasses).

// Offsets of one row after another, without two divisions each.
class RowCursor {
 public:
  FK_HOST_DEVICE RowCursor(const RowLayout& layout, int64_t row)
      : layout_(layout), position_(row % layout.inner), offset_(layout.row_offset(row)) {}
  FK_HOST_DEVICE int64_t offset() const { return offset_; }
  FK_HOST_DEVICE void next() {
    offset_ += layout_.inner_stride;
    if (++position_ < layout_.inner) return;
    offset_ += layout_.outer_stride - layout_.inner * layout_.inner_stride;
    position_ = 0;
  }

 private:
  RowLayout layout_;
  int64_t position_, offset_;
};

template <int64_t n, typename Scalar>
FK_HOST_DEVICE compute_t<Scalar> max_of(const Scalar* z, int64_t classes) {
  using Reals = lanes_t<compute_t<Scalar>, n>;
  Reals max = load_lanes<Reals>(z + classes - n);
#pragma GCC unroll 2
  for (const Scalar* end = z + (classes & -n); z != end; z += n) {
    const Reals v = load_lanes<Reals>(z);
    max = v > max ? v : max;
  }
  return fold_lanes(max, Larger{});
}

// What is subtracted before exponentials: the maximum. Where no class has any probability, -inf - -inf would be NaN
// where 0 is meant; log p_y becomes NaN all the same, from z_y - m.
template <typename Real>
FK_HOST_DEVICE Real finite_shift(Real max) {
  return max == -std::numeric_limits<Real>::infinity() ? Real(0) : max;
}

template <typename Real>
struct ExpSums {
  Real first;
  Real squares;  // of the exponentials
};

// Leaving a class out of the sum, rather than subtracting it afterwards, keeps 1 - p of it exact as p -> 1.
template <int64_t n, bool kSquares, typename Scalar>
FK_HOST_DEVICE ExpSums<compute_t<Scalar>> sum_exp_except(const Scalar* z, int64_t classes, compute_t<Scalar> shift,
                                                         int64_t except, compute_t<Scalar> exp_zero) {
  using Real = compute_t<Scalar>;
  using Int = label_int<Real>;
  using Reals = lanes_t<Real, n>;
  using Ints = lanes_t<Int, n>;
  // Out of this block: any number that no index equals.
  const Ints skipped = Ints{} + (except >= 0 && except < classes ? static_cast<Int>(except) : Int(kNoTarget));
  const Reals lowest = exp_zero - Reals{}, shifts = shift - Reals{};
  const int64_t whole = classes & -n;
  Reals sum{};
  [[maybe_unused]] Reals squares{};
  Ints index = load_lanes<Ints>(kFirst<Int>);
  const Scalar* group = z;
  for (const Scalar* end = z + whole; group != end;) {
    // In parts, whose sums are added up: a long run of roundings would all go one way where logits are equal.
    const Scalar* stop = end - group < kPart * n ? end : group + kPart * n;
    Reals part{};
    [[maybe_unused]] Reals part_squares{};
#pragma GCC unroll 2
    for (; group != stop; group += n, index += static_cast<Int>(n)) {
      prefetch(group + kBlock);  // for the next max_of, which has little to do but wait for memory
      const Reals x = load_lanes<Reals>(group) - shifts;
      const ScaledExponential<Reals> e = scaled_exponential(x < lowest ? lowest : x);
      const Reals scale = index != skipped ? e.scale : Reals{};
      part += e.mantissa * scale;
      if constexpr (kSquares) part_squares += (e.mantissa * scale) * (e.mantissa * scale);
    }
    sum += part;
    if constexpr (kSquares) squares += part_squares;
  }
  if (whole < classes) {
    const Reals x = load_lanes<Reals>(z + classes - n) - shifts;
    const ScaledExponential<Reals> e = scaled_exponential(x < lowest ? lowest : x);
    index -= static_cast<Int>(whole - (classes - n));
    // Without the classes before, whose difference is negative. Not by a comparison: gcc would make one for each lane.
    const Ints were_before = (index - static_cast<Int>(whole)) >> (8 * sizeof(Int) - 1);
    Ints bits;
    std::memcpy(&bits, &e.scale, sizeof(bits));
    bits &= ~were_before;
    Reals new_scale;
    std::memcpy(&new_scale, &bits, sizeof(bits));
    const Reals scale = index != skipped ? new_scale : Reals{};
    sum += e.mantissa * scale;
    if constexpr (kSquares) squares += (e.mantissa * scale) * (e.mantissa * scale);
  }
  Real square_sum = 0;
  if constexpr (kSquares) square_sum = fold_lanes(squares, Sum{});
  return {fold_lanes(sum, Sum{}), square_sum};
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

// The first class with this logit, or 0 where there is none.
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
    int64_t marked = Loss::kMarked == Marked::kLargest ? 0 : kNoTarget;
    double sum = 0, squares = 0;
    const int64_t blocks = classes / kBlock;  // the last one also takes what is left
    for (int64_t block = 0; block < blocks; ++block) {
      const int64_t begin = block * kBlock;
      const int64_t n = block + 1 < blocks ? kBlock : classes - begin;
      const Real block_max = max_of<kWidth>(z + begin, n);
      if (block_max > m) {
        const Real shrink = exponential(m - block_max);
        if constexpr (Loss::kLargestIsLeftOut) {
          // The one left out so far is one of the others from here on.
          sum = (sum + 1) * shrink;
          squares = (squares + 1) * shrink * shrink;
          marked = begin + first_equal(z + begin, n, block_max);
        } else {
          sum *= shrink;
        }
        m = block_max;
      }
      if constexpr (Loss::kMarked == Marked::kRival) {
        const Real of_block = max_below(z + begin, n, target_logit);
        if (of_block > rival) {
          rival = of_block;
          marked = begin + first_equal(z + begin, n, of_block);
        }
      }
      const int64_t left_out = Loss::kLargestIsLeftOut ? marked : target;
      const auto sums =
          sum_exp_except<kWidth, Loss::kSquares>(z + begin, n, finite_shift(m), left_out - begin, tile.exp_zero);
      sum += sums.first;
      squares += sums.squares;
    }
    tile.max[r] = m;
    tile.rest[r] = static_cast<Real>(sum);
    if constexpr (Loss::kSquares) tile.squares[r] = static_cast<Real>(squares);
    if constexpr (Loss::kMarked != Marked::kNone) tile.marked[r] = static_cast<label_int<Real>>(marked);
  }
};

// grad_j = e^(z_j - m) * factor, or e (factor + e square)
template <int64_t n, bool kSquares, typename Scalar>
FK_HOST_DEVICE void scaled_exp_of_group(const Scalar* z, compute_t<Scalar> max, compute_t<Scalar> factor,
                                        [[maybe_unused]] compute_t<Scalar> square, compute_t<Scalar> exp_zero,
                                        Scalar* grad) {
  using Reals = lanes_t<compute_t<Scalar>, n>;
  const Reals lowest = exp_zero - Reals{}, x = load_lanes<Reals>(z) - max;
  // 0 for NaN, which is in the factor already. A row without a gradient has an infinite maximum, whatever it holds.
  const ScaledExponential<Reals> parts = scaled_exponential(x > lowest ? x : lowest);
  const Reals e = parts.mantissa * parts.scale;
  if constexpr (kSquares) {
    store_lanes(e * (factor + e * square), grad);
  } else {
    store_lanes(e * factor, grad);
  }
}
template <int64_t n, bool kSquares, typename Scalar>
FK_HOST_DEVICE void scaled_exp(const Scalar* z, int64_t classes, compute_t<Scalar> max, compute_t<Scalar> factor,
                               compute_t<Scalar> square, compute_t<Scalar> exp_zero, Scalar* grad) {
  scaled_exp_of_group<n, kSquares>(z + classes - n, max, factor, square, exp_zero, grad + classes - n);
#pragma GCC unroll 2
  for (const Scalar* end = z + (classes & -n); z != end; z += n, grad += n) {
    prefetch(z + kAhead);
    prefetch(grad + kAhead);
    scaled_exp_of_group<n, kSquares>(z, max, factor, square, exp_zero, grad);
  }
}

// Rows of one block at most. In a function of their own, which calls no other: constants stay in registers from row to
// row.
template <typename Loss>
struct SumsOfRows {
  template <int64_t bytes, typename Scalar>
  static FK_HOST_DEVICE void run(const FocalLossArgs<Scalar>& args, int64_t row_begin, int64_t n_rows,
                                 Tile<compute_t<Scalar>>& tile) {
    constexpr int64_t n = kLanesOf<bytes, Scalar>;
    // As many rows together as stay in the first-level cache: one waits for the other neither for its maximum nor its
    // sum.
    using Real = compute_t<Scalar>;
    const int64_t group = std::max<int64_t>(1, kBlock / args.classes);
    RowCursor row(args.layout, row_begin);
    for (int64_t begin = 0; begin < n_rows; begin += group) {
      const int64_t end = std::min(n_rows, begin + group);
      const RowCursor first = row;
      for (int64_t r = begin; r < end; ++r, row.next()) {
        if (tile.label[r] == kNoTarget) {
          tile.max[r] = tile.rest[r] = tile.target_logit[r] = 0;
          continue;
        }
        const Scalar* z = args.logits + row.offset();
        tile.max[r] = max_of<n>(z, args.classes);
        tile.target_logit[r] = load_as_compute(z[tile.label[r]]);
      }
      row = first;
      for (int64_t r = begin; r < end; ++r, row.next()) {
        if (tile.label[r] == kNoTarget) continue;
        const Scalar* z = args.logits + row.offset();
        int64_t left_out = tile.label[r];
        if constexpr (Loss::kMarked == Marked::kLargest) {
          tile.marked[r] = static_cast<label_int<Real>>(first_equal(z, args.classes, tile.max[r]));
          left_out = tile.marked[r];
        } else if constexpr (Loss::kMarked == Marked::kRival) {
          const Real rival = max_below(z, args.classes, tile.target_logit[r]);
          const bool alone = rival == -std::numeric_limits<Real>::infinity();
          tile.marked[r] = alone ? kNoTarget : static_cast<label_int<Real>>(first_equal(z, args.classes, rival));
        }
        const auto sums =
            sum_exp_except<n, Loss::kSquares>(z, args.classes, finite_shift(tile.max[r]), left_out, tile.exp_zero);
        tile.rest[r] = sums.first;
        if constexpr (Loss::kSquares) tile.squares[r] = sums.squares;
      }
    }
  }
};

template <typename Loss, typename Scalar>
void sums_of_long_rows(const FocalLossArgs<Scalar>& args, int64_t row_begin, int64_t n_rows,
                       Tile<compute_t<Scalar>>& tile) {
  RowCursor row(args.layout, row_begin);
  for (int64_t r = 0; r < n_rows; ++r, row.next()) {
    if (tile.label[r] == kNoTarget) {
      tile.max[r] = tile.rest[r] = tile.target_logit[r] = 0;
      continue;
    }
    const Scalar* z = args.logits + row.offset();
    run_in_widest<SumsOfLongRow<Loss>>(z, args.classes, tile.label[r], r, tile);
    tile.target_logit[r] = load_as_compute(z[tile.label[r]]);
  }
}

// The marked class's logit beside the target's.
template <typename Loss, typename Scalar>
void read_gaps(const Scalar* logits, const RowLayout& layout, int64_t row_begin, int64_t n_rows,
               Tile<compute_t<Scalar>>& tile) {
  using Real = compute_t<Scalar>;
  RowCursor row(layout, row_begin);
  for (int64_t r = 0; r < n_rows; ++r, row.next()) {
    const bool is_there = tile.label[r] != kNoTarget && tile.marked[r] != kNoTarget;
    const Real marked = is_there ? load_as_compute(logits[row.offset() + tile.marked[r] * layout.class_stride]) : 0;
    tile.gap[r] = is_there ? marked - tile.target_logit[r] : -std::numeric_limits<Real>::infinity();
  }
}

template <typename Loss>
struct GradOfRows {
  template <int64_t bytes, typename Scalar>
  static FK_HOST_DEVICE void run(const FocalLossBackward<Scalar>& args, int64_t row_begin, int64_t n_rows,
                                 const Tile<compute_t<Scalar>>& tile) {
    constexpr int64_t n = kLanesOf<bytes, Scalar>;
    RowCursor row(args.layout, row_begin), grad_row(args.grad_layout, row_begin);
    for (int64_t r = 0; r < n_rows; ++r, row.next(), grad_row.next()) {
      Scalar* grad = args.grad_logits + grad_row.offset();
      scaled_exp<n, Loss::kSquares>(args.logits + row.offset(), args.classes, tile.max[r], tile.factor[r],
                                    tile.square_factor[r], tile.exp_zero, grad);
      if constexpr (Loss::kMarked != Marked::kNone) {
        if (tile.marked[r] != kNoTarget) grad[tile.marked[r]] = Store<Scalar>::from_compute(tile.marked_slope[r]);
      }
      if (tile.label[r] != kNoTarget) grad[tile.label[r]] = Store<Scalar>::from_compute(tile.target_slope[r]);
    }
  }
};

// ---- a tile of adjacent rows ---------------------------------------------------------------------------------------
//
// A vector of rows at a time, whose sums stay in registers from class to class. If the last one is not full, it starts
// earlier and overlaps its neighbour; fewer rows than one vector go one by one.

template <typename Loss, int64_t n, bool kTurned, typename Scalar>
FK_HOST_DEVICE void sums_of_lanes(const Scalar* z, int64_t class_stride, int64_t classes, int64_t row,
                                  Tile<compute_t<Scalar>>& tile) {
  using Real = compute_t<Scalar>;
  using Int = label_int<Real>;
  using Reals = lanes_t<Real, n>;
  using Ints = lanes_t<Int, n>;
  constexpr bool kRival = Loss::kMarked == Marked::kRival;
  const Reals minus_infinity = -std::numeric_limits<Real>::infinity() - Reals{}, lowest = tile.exp_zero - Reals{};
  const Ints label = load_lanes<Ints>(tile.label + row);
  const Int n_classes = static_cast<Int>(classes);
  const Scalar* column = z + row;
  Reals max = minus_infinity, rest{}, target_logit{};
  [[maybe_unused]] Reals squares{}, rival = minus_infinity;
  [[maybe_unused]] Ints marked = Ints{} + (kRival ? Int(kNoTarget) : Int(0));
  Int first = 0;
  if constexpr (Loss::kMarked == Marked::kNone) {
    for (; first < n_classes - 1; first += 2, column += 2 * class_stride) {
      const Reals v = load_lanes<Reals>(column), w = load_lanes<Reals>(column + class_stride);
      max = v > max ? v : max;
      max = w > max ? w : max;
    }
  }
  for (Int c = first; c < n_classes; ++c, column += class_stride) {
    const Reals v = load_lanes<Reals>(column);
    if constexpr (Loss::kMarked == Marked::kLargest) marked = v > max ? Ints{} + c : marked;
    if constexpr (kRival) target_logit = label == c ? v : target_logit;
    max = v > max ? v : max;
  }
  column = z + row;
  Ints this_class{};
#pragma GCC unroll 2
  for (Int c = 0; c < n_classes; ++c, column += class_stride, this_class += 1) {
    if constexpr (!kTurned) prefetch(column + kTileRows);  // the same class of the next tile
    const Reals v = load_lanes<Reals>(column);
    const Reals x = v - max;
    const ScaledExponential<Reals> e = scaled_exponential(x < lowest ? lowest : x);
    const auto is_other = label != this_class;
    const auto counts = Loss::kLargestIsLeftOut ? marked != this_class : is_other;
    const Reals scale = counts ? e.scale : Reals{};
    rest += e.mantissa * scale;
    if constexpr (Loss::kSquares) squares += (e.mantissa * scale) * (e.mantissa * scale);
    if constexpr (kRival) {
      // One comparison at a time: of two joined by & gcc makes one for each lane.
      const Reals lower = v < target_logit ? v : minus_infinity;
      marked = lower > rival ? this_class : marked;
      rival = lower > rival ? lower : rival;
    } else {
      target_logit = is_other ? target_logit : v;
    }
  }
  store_lanes(max, tile.max + row);
  store_lanes(rest, tile.rest + row);
  store_lanes(target_logit, tile.target_logit + row);
  if constexpr (Loss::kSquares) store_lanes(squares, tile.squares + row);
  if constexpr (Loss::kMarked != Marked::kNone) store_lanes(marked, tile.marked + row);
  if constexpr (kRival) store_lanes(rival - target_logit, tile.gap + row);
}

// kTurned: a tile that was made of rows, all of it in the cache.
template <typename Loss, bool kTurned>
struct SumsOfColumns {
  template <int64_t bytes, typename Scalar>
  static FK_HOST_DEVICE void run(const Scalar* z, int64_t class_stride, int64_t classes, int64_t n_rows,
                                 Tile<compute_t<Scalar>>& tile) {
    constexpr int64_t n = kLanesOf<bytes, Scalar>;
    if (n_rows < n) {
      for (int64_t r = 0; r < n_rows; ++r) sums_of_lanes<Loss, 1, kTurned>(z, class_stride, classes, r, tile);
      return;
    }
    for (int64_t r = 0; r < n_rows; r += n) {
      sums_of_lanes<Loss, n, kTurned>(z, class_stride, classes, std::min(r, n_rows - n), tile);
    }
  }
};

template <typename Loss, int64_t n, bool kTurned, typename Scalar>
FK_HOST_DEVICE void grad_of_lanes(const Scalar* z, int64_t class_stride, int64_t classes, int64_t row,
                                  const Tile<compute_t<Scalar>>& tile, Scalar* grad, int64_t grad_class_stride) {
  using Real = compute_t<Scalar>;
  using Int = label_int<Real>;
  using Reals = lanes_t<Real, n>;
  using Ints = lanes_t<Int, n>;
  const Reals lowest = tile.exp_zero - Reals{};
  const Reals max = load_lanes<Reals>(tile.max + row), factor = load_lanes<Reals>(tile.factor + row);
  const Reals target_slope = load_lanes<Reals>(tile.target_slope + row);
  const Ints label = load_lanes<Ints>(tile.label + row);
  [[maybe_unused]] Reals square_factor, marked_slope;
  [[maybe_unused]] Ints marked;
  if constexpr (Loss::kSquares) square_factor = load_lanes<Reals>(tile.square_factor + row);
  if constexpr (Loss::kMarked != Marked::kNone) {
    marked = load_lanes<Ints>(tile.marked + row);
    marked_slope = load_lanes<Reals>(tile.marked_slope + row);
  }
  const Scalar* column = z + row;
  Scalar* grad_column = grad + row;
  const Int n_classes = static_cast<Int>(classes);
  Ints this_class{};
#pragma GCC unroll 2
  for (Int c = 0; c < n_classes; ++c, column += class_stride, grad_column += grad_class_stride, this_class += 1) {
    if constexpr (!kTurned) {
      prefetch(column + kTileRows);
      prefetch(grad_column + kTileRows);
    }
    const Reals x = load_lanes<Reals>(column) - max;
    const ScaledExponential<Reals> e = scaled_exponential(x > lowest ? x : lowest);  // as in a row
    Reals slope = e.mantissa * e.scale;
    if constexpr (Loss::kSquares) {
      slope *= factor + slope * square_factor;
    } else {
      slope *= factor;
    }
    if constexpr (Loss::kMarked != Marked::kNone) slope = marked == this_class ? marked_slope : slope;
    slope = label == this_class ? target_slope : slope;
    store_lanes(slope, grad_column);
  }
}

template <typename Loss, bool kTurned>
struct GradOfColumns {
  template <int64_t bytes, typename Scalar>
  static FK_HOST_DEVICE void run(const Scalar* z, int64_t class_stride, int64_t classes, int64_t n_rows,
                                 const Tile<compute_t<Scalar>>& tile, Scalar* grad, int64_t grad_class_stride) {
    constexpr int64_t n = kLanesOf<bytes, Scalar>;
    if (n_rows < n) {
      for (int64_t r = 0; r < n_rows; ++r) {
        grad_of_lanes<Loss, 1, kTurned>(z, class_stride, classes, r, tile, grad, grad_class_stride);
      }
      return;
    }
    for (int64_t r = 0; r < n_rows; r += n) {
      grad_of_lanes<Loss, n, kTurned>(z, class_stride, classes, std::min(r, n_rows - n), tile, grad, grad_class_stride);
    }
  }
};

// ---- from sums to loss and slope, a tile of rows at a time ---------------------------------------------------------

template <typename Loss, typename Real>
FK_VECTOR_CLONES void finish_sums(int64_t n_rows, Tile<Real>& tile) {
#pragma omp simd
  for (int64_t r = 0; r < n_rows; ++r) {
    const Real z_minus_max = tile.target_logit[r] - tile.max[r];
    if constexpr (Loss::kLargestIsLeftOut) {
      // The largest class adds exactly 1. m - m is NaN for an infinite m, which the sum over the others would not show.
      const Real log_s = log_of_unit_sum(Real(1), tile.rest[r]) + (tile.max[r] - tile.max[r]);
      tile.log_s[r] = log_s;
      tile.log_p[r] = z_minus_max - log_s;
      tile.log_u[r] = 0;
      if constexpr (Loss::kSquares) tile.squares[r] *= bounded_exponential(Real(-2) * log_s);
      continue;
    }
    // If the target is the largest class its own term is exactly 1, and the sum is 1 + rest without rounding.
    const Real e = bounded_exponential(z_minus_max);
    const Real rest = tile.rest[r], all_but_one = rest + (e - Real(1));
    const Real log_s = log_of_unit_sum(Real(1), all_but_one);
    // The target's u = rest / S; as p -> 0 it approaches 1, and only log(1 - p) keeps its digits.
    const bool is_top = z_minus_max == Real(0);
    const Real p = e / (Real(1) + all_but_one);
    const Real log_rest_or_u = log_of_unit_sum(is_top ? rest : Real(1), is_top ? Real(0) : -p);
    tile.log_s[r] = log_s;
    tile.log_p[r] = z_minus_max - log_s;
    tile.log_u[r] = log_rest_or_u - (is_top ? log_s : Real(0));
  }
}

// table_gamma for many probabilities, bins outermost, so that the rows of a tile are compared together.
template <typename Real>
FK_VECTOR_CLONES void look_up_gamma_by_steps(const Real* log_p, int64_t n, const Real* edges, const Real* gammas,
                                             int64_t n_bins, Real* gamma) {
  Real p[kTileRows];
  for (int64_t begin = 0; begin < n; begin += kTileRows) {
    const int64_t count = std::min(kTileRows, n - begin);
    for (int64_t r = 0; r < count; ++r) {
      p[r] = exponential(log_p[begin + r]);
      gamma[begin + r] = gammas[0];
    }
    for (int64_t bin = 1; bin < n_bins; ++bin) {
      const Real edge = edges[bin], gamma_of_bin = gammas[bin];
#pragma omp simd
      for (int64_t r = 0; r < count; ++r) {
        gamma[begin + r] = table_step(p[r], edge, gamma_of_bin, gamma[begin + r]);
      }
    }
  }
}

#ifdef FK_HAS_AVX512_CODE
constexpr int64_t kWideTable = 16;

// The same for a table that fits a register each for its edges and gammas: halving instead of steps, the edges being in
// ascending order.
FK_AVX512 inline void look_up_gamma_in_registers(const float* log_p, int64_t n, const float* edges, const float* gammas,
                                                 int64_t n_bins, float* gamma) {
  float lower[kWideTable], of_bin[kWideTable];
  for (int64_t bin = 0; bin < kWideTable; ++bin) {
    lower[bin] = bin < n_bins ? edges[bin] : std::numeric_limits<float>::infinity();
    of_bin[bin] = gammas[std::min(bin, n_bins - 1)];
  }
  const __m512 all_edges = _mm512_loadu_ps(lower), all_gammas = _mm512_loadu_ps(of_bin);
  for (int64_t begin = 0; begin < n; begin += kWideTable) {
    const int64_t count = std::min(kWideTable, n - begin);
    const __mmask16 there = static_cast<__mmask16>((1u << count) - 1);
    float lanes[kWideTable];
    _mm512_storeu_ps(lanes, _mm512_maskz_loadu_ps(there, log_p + begin));
#pragma omp simd
    for (int64_t l = 0; l < kWideTable; ++l) lanes[l] = exponential(lanes[l]);
    const __m512 p = _mm512_loadu_ps(lanes);
    __m512i bin = _mm512_setzero_si512();
    for (int step = kWideTable / 2; step > 0; step /= 2) {
      const __m512i next = _mm512_or_si512(bin, _mm512_set1_epi32(step));
      const __mmask16 reached = _mm512_cmp_ps_mask(_mm512_permutexvar_ps(next, all_edges), p, _CMP_LE_OQ);
      bin = _mm512_mask_mov_epi32(bin, reached, next);
    }
    _mm512_mask_storeu_ps(gamma + begin, there, _mm512_permutexvar_ps(bin, all_gammas));
  }
}
#endif

template <typename Real>
void look_up_gamma(const Real* log_p, int64_t n, const Real* edges, const Real* gammas, int64_t n_bins, Real* gamma) {
#ifdef FK_HAS_AVX512_CODE
  if constexpr (std::is_same_v<Real, float>) {
    if (n_bins <= kWideTable && has_avx512()) {
      return look_up_gamma_in_registers(log_p, n, edges, gammas, n_bins, gamma);
    }
  }
#endif
  look_up_gamma_by_steps(log_p, n, edges, gammas, n_bins, gamma);
}

// Whether any row of a tile needs the formula of the inverse focal loss, which would otherwise be computed in vain.
template <typename Real>
FK_HOST_DEVICE bool any_inverse(int64_t n_rows, bool one_gamma, const Tile<Real>& tile) {
  if (one_gamma) return tile.gamma[0] < Real(0);
  label_int<Real> any = 0;
#pragma omp simd reduction(| : any)
  for (int64_t r = 0; r < n_rows; ++r) any |= tile.gamma[r] < Real(0) ? 1 : 0;
  return any != 0;
}

// Without the logarithms and squares.
template <typename Loss, typename Real>
FK_HOST_DEVICE RowNumbers<Real> numbers_of(const Tile<Real>& tile, int64_t r, Real epsilon, bool detached) {
  RowNumbers<Real> row;
  row.gap = Loss::kMarked == Marked::kRival ? tile.gap[r] : Real(0);
  row.target_is_marked = Loss::kMarked != Marked::kNone && tile.label[r] == tile.marked[r];
  row.gamma = tile.gamma[r];
  row.epsilon = epsilon;
  row.detached = detached;
  return row;
}

template <typename Loss, bool kEverInverse, typename Real>
FK_HOST_DEVICE void finish_loss_of(int64_t n_rows, Real epsilon, Tile<Real>& tile,
                                   Real* saved /* [kSavedNumbers, rows], at this tile */, int64_t rows,
                                   FocalLossSums* sums) {
  double loss_sum = 0, weight_sum = 0;
#pragma omp simd reduction(+ : loss_sum, weight_sum)
  for (int64_t r = 0; r < n_rows; ++r) {
    const bool ignored = tile.label[r] == kNoTarget;
    const Real weight = tile.weight[r], max = tile.max[r];
    RowNumbers<Real> row = numbers_of<Loss>(tile, r, epsilon, false);
    row.log_s = tile.log_s[r];
    row.log_p = tile.log_p[r];
    row.log_u = tile.log_u[r];
    row.squares = Loss::kSquares ? tile.squares[r] : Real(0);
    const Real loss_of_row = Loss::template loss<kEverInverse>(row) * weight;
    const Real loss = ignored ? Real(0) : loss_of_row;
    tile.loss[r] = loss;
    loss_sum += static_cast<double>(loss);
    weight_sum += static_cast<double>(weight);
    saved[r] = ignored ? Real(0) : max;
    saved[rows + r] = ignored ? Real(0) : row.log_s;
    saved[2 * rows + r] = ignored ? Real(0) : (Loss::kSquares ? row.squares : row.log_u);
    if constexpr (Loss::kMarked != Marked::kNone) {
      saved[3 * rows + r] = class_as_number(ignored ? label_int<Real>(kNoTarget) : tile.marked[r]);
    }
  }
  sums->loss += loss_sum;
  sums->weight += weight_sum;
}

template <typename Loss, typename Real>
FK_VECTOR_CLONES void finish_loss(int64_t n_rows, Real epsilon, bool one_gamma, Tile<Real>& tile, Real* saved,
                                  int64_t rows, FocalLossSums* sums) {
  if (Loss::kHasInverse && any_inverse(n_rows, one_gamma, tile)) {
    finish_loss_of<Loss, Loss::kHasInverse>(n_rows, epsilon, tile, saved, rows, sums);
  } else {
    finish_loss_of<Loss, false>(n_rows, epsilon, tile, saved, rows, sums);
  }
}

template <typename Real>
FK_VECTOR_CLONES void log_p_of_targets(const Real* saved, int64_t rows, int64_t n_rows, Tile<Real>& tile) {
#pragma omp simd
  for (int64_t r = 0; r < n_rows; ++r) tile.log_p[r] = (tile.target_logit[r] - saved[r]) - saved[rows + r];
}

template <typename Loss, bool kEverInverse, bool kGradGamma, typename Real>
FK_HOST_DEVICE void finish_slope_of(const Real* saved /* [kSavedNumbers, rows], at this tile */, int64_t rows,
                                    int64_t n_rows, Real epsilon, bool detach_modulation, Tile<Real>& tile) {
  constexpr Real kInfinity = std::numeric_limits<Real>::infinity();
  const Real detached = detach_modulation ? 1 : 0;  // as wide as the numbers it selects, or the loop stays scalar
#pragma omp simd
  for (int64_t r = 0; r < n_rows; ++r) {
    const Real max = saved[r], log_s = saved[rows + r], third = saved[2 * rows + r];
    RowNumbers<Real> row = numbers_of<Loss>(tile, r, epsilon, detached > Real(0));
    row.log_s = log_s;
    row.log_p = (tile.target_logit[r] - max) - log_s;
    row.log_u = Loss::kLargestIsLeftOut ? Real(0) : third;
    row.squares = Loss::kSquares ? third : Real(0);
    const RowSlope<Real> slope = Loss::template slope<kEverInverse>(row);
    const bool ignored = tile.label[r] == kNoTarget;
    const Real upstream = tile.upstream[r] * tile.weight[r];
    const Real scale = ignored ? Real(0) : upstream;
    // Also where the logits are infinite or NaN: an ignored row has a zero gradient whatever it holds.
    const bool is_zero = scale == Real(0);
    const Real per_sum = bounded_exponential(-log_s);
    const Real factor = upstream * slope.factor * per_sum, target_slope = upstream * slope.at_target;
    tile.max[r] = is_zero ? kInfinity : max;
    tile.factor[r] = is_zero ? Real(0) : factor;
    tile.target_slope[r] = is_zero ? Real(0) : target_slope;
    if constexpr (kGradGamma) tile.grad_gamma[r] = ignored ? Real(0) : upstream * slope.grad_gamma;
    if constexpr (Loss::kSquares) {
      const Real square = upstream * slope.square * (per_sum * per_sum);
      tile.square_factor[r] = is_zero ? Real(0) : square;
    }
    if constexpr (Loss::kMarked != Marked::kNone) {
      const Real marked_slope = upstream * slope.at_marked;
      tile.marked_slope[r] = is_zero ? Real(0) : marked_slope;
    }
  }
}

template <typename Loss, bool kGradGamma, typename Real>
FK_VECTOR_CLONES void finish_slope(const Real* saved, int64_t rows, int64_t n_rows, Real epsilon,
                                   bool detach_modulation, bool one_gamma, Tile<Real>& tile) {
  if (Loss::kHasInverse && any_inverse(n_rows, one_gamma, tile)) {
    finish_slope_of<Loss, Loss::kHasInverse, kGradGamma>(saved, rows, n_rows, epsilon, detach_modulation, tile);
  } else {
    finish_slope_of<Loss, false, kGradGamma>(saved, rows, n_rows, epsilon, detach_modulation, tile);
  }
}

// Returns whether any label is neither in range nor the ignored one.
template <typename Label, typename Int, typename Real>
FK_HOST_DEVICE bool read_labels(const void* labels, int64_t row_begin, int64_t n_rows, int64_t classes,
                                int64_t ignore_index, Int* found, Real* weight) {
  const Label* given = static_cast<const Label*>(labels) + row_begin;
  int64_t wrong = 0;
#pragma omp simd reduction(| : wrong)
  for (int64_t r = 0; r < n_rows; ++r) {
    const int64_t label = given[r];
    const bool in_range = static_cast<uint64_t>(label) < static_cast<uint64_t>(classes);
    const bool kept = label != ignore_index;
    wrong |= !in_range & kept ? 1 : 0;
    found[r] = in_range & kept ? static_cast<Int>(label) : Int(kNoTarget);
    weight[r] = in_range & kept ? Real(1) : Real(0);
  }
  return wrong != 0;
}

// Labels, class weights and gammas of a tile. Returns the first row whose label is out of range, or -1.
template <typename Scalar>
FK_VECTOR_CLONES int64_t read_rows(const FocalLossArgs<Scalar>& args, int64_t row_begin, int64_t n_rows,
                                   Tile<compute_t<Scalar>>& tile) {
  const Labels& labels = args.labels;
  bool wrong;
  if (labels.type == Labels::Type::kInt64) {
    wrong =
        read_labels<int64_t>(labels.data, row_begin, n_rows, args.classes, args.ignore_index, tile.label, tile.weight);
  } else if (labels.type == Labels::Type::kInt32) {
    wrong =
        read_labels<int32_t>(labels.data, row_begin, n_rows, args.classes, args.ignore_index, tile.label, tile.weight);
  } else {
    wrong =
        read_labels<uint8_t>(labels.data, row_begin, n_rows, args.classes, args.ignore_index, tile.label, tile.weight);
  }
  if (args.class_weight) {
    for (int64_t r = 0; r < n_rows; ++r) {
      if (tile.label[r] != kNoTarget) tile.weight[r] = args.class_weight[tile.label[r]];
    }
  }
  if (args.gamma && !args.edges) {
    for (int64_t r = 0; r < n_rows; ++r) tile.gamma[r] = args.gamma[(row_begin + r) * args.gamma_stride];
  }
  if (!wrong) return -1;
  int64_t row = row_begin;
  while ((labels[row] >= 0 && labels[row] < args.classes) || labels[row] == args.ignore_index) ++row;
  return row;
}

// How many rows of a tile can be handled together: for columns, those that are adjacent in memory.
template <typename Scalar>
int64_t tile_rows(const FocalLossArgs<Scalar>& args, bool columns, int64_t row, int64_t row_end) {
  int64_t n = std::min(kTileRows, row_end - row);
  return columns ? std::min(n, args.layout.inner - row % args.layout.inner) : n;
}

template <typename Scalar>
bool is_columns(const FocalLossArgs<Scalar>& args) {
  return args.layout.class_stride != 1 && args.classes > 1;
}

// The distance between rows that can be turned as a matrix, or 0 where it cannot.
template <typename Scalar>
int64_t matrix_stride(const RowLayout& layout, int64_t classes, int64_t row_begin, int64_t n_rows) {
  if (sizeof(Scalar) > sizeof(float) || layout.class_stride != 1 || classes < 4 || n_rows < 4) return 0;
  if (layout.inner == 1) return layout.outer_stride;
  return row_begin % layout.inner + n_rows <= layout.inner ? layout.inner_stride : 0;
}

// [n_rows, classes] in any layout <-> [classes, kTileRows] in the type of the computation
template <typename Scalar>
void gather_tile(const FocalLossArgs<Scalar>& args, int64_t row_begin, int64_t n_rows, compute_t<Scalar>* tile) {
  if constexpr (sizeof(Scalar) <= sizeof(float)) {
    if (const int64_t stride = matrix_stride<Scalar>(args.layout, args.classes, row_begin, n_rows)) {
      to_columns<kTileRows>(args.logits + args.layout.row_offset(row_begin), stride, n_rows, args.classes, tile);
      return;
    }
  }
  RowCursor row(args.layout, row_begin);
  for (int64_t r = 0; r < n_rows; ++r, row.next()) {
    const Scalar* z = args.logits + row.offset();
    for (int64_t c = 0; c < args.classes; ++c) {
      tile[c * kTileRows + r] = load_as_compute(z[c * args.layout.class_stride]);
    }
  }
}
template <typename Scalar>
void scatter_tile(const FocalLossBackward<Scalar>& args, int64_t row_begin, int64_t n_rows,
                  const compute_t<Scalar>* tile) {
  if constexpr (sizeof(Scalar) <= sizeof(float)) {
    if (const int64_t stride = matrix_stride<Scalar>(args.grad_layout, args.classes, row_begin, n_rows)) {
      to_rows<kTileRows>(tile, n_rows, args.classes, args.grad_logits + args.grad_layout.row_offset(row_begin), stride);
      return;
    }
  }
  RowCursor row(args.grad_layout, row_begin);
  for (int64_t r = 0; r < n_rows; ++r, row.next()) {
    Scalar* grad = args.grad_logits + row.offset();
    for (int64_t c = 0; c < args.classes; ++c) {
      grad[c * args.grad_layout.class_stride] = Store<Scalar>::from_compute(tile[c * kTileRows + r]);
    }
  }
}

template <typename Loss, typename Scalar>
FocalLossSums forward_labels(const FocalLossForward<Scalar>& args, int64_t row_begin, int64_t row_end) {
  using Real = compute_t<Scalar>;
  const bool columns = is_columns(args);
  const bool few_classes = !columns && args.classes <= kFewClasses;
  alignas(64) Real transposed[kFewClasses * kTileRows];
  Tile<Real> tile;
  if (!args.gamma) std::fill_n(tile.gamma, kTileRows, args.gamma_value);
  FocalLossSums sums{0, 0, -1};
  for (int64_t row = row_begin, n; row < row_end; row += n) {
    n = tile_rows(args, columns, row, row_end);
    const int64_t invalid = read_rows(args, row, n, tile);
    if (invalid >= 0) {
      sums.invalid_row = invalid;
      return sums;
    }
    if (columns) {
      run_in_widest<SumsOfColumns<Loss, false>>(args.logits + args.layout.row_offset(row), args.layout.class_stride,
                                                args.classes, n, tile);
    } else if (few_classes) {
      gather_tile(args, row, n, transposed);
      run_in_widest<SumsOfColumns<Loss, true>>(transposed, kTileRows, args.classes, n, tile);
    } else {
      if (args.classes > kBlock) {
        sums_of_long_rows<Loss>(args, row, n, tile);
      } else {
        run_in_widest<SumsOfRows<Loss>>(args, row, n, tile);
      }
      if constexpr (Loss::kMarked == Marked::kRival) read_gaps<Loss>(args.logits, args.layout, row, n, tile);
    }
    finish_sums<Loss>(n, tile);
    if (args.edges) look_up_gamma(tile.log_p, n, args.edges, args.gamma, args.n_bins, tile.gamma);
    finish_loss<Loss>(n, args.epsilon, !args.gamma, tile, args.saved + row, args.rows, &sums);
    if (args.row_loss) std::copy(tile.loss, tile.loss + n, args.row_loss + row);
  }
  return sums;
}

// The logit of each row's target among columns of logits.
struct TargetOfColumns {
  template <int64_t bytes, typename Real>
  static FK_HOST_DEVICE void run(const Real* z /* [classes, kTileRows] */, int64_t classes, int64_t n_rows,
                                 Tile<Real>& tile) {
    using Int = label_int<Real>;
    constexpr int64_t n = kLanesOf<bytes, Real>;
    for (int64_t row = 0; row < n_rows; row += n) {
      using Reals = lanes_t<Real, n>;
      const auto label = load_lanes<lanes_t<Int, n>>(tile.label + row);
      const Real* column = z + row;
      Reals found{};
      lanes_t<Int, n> this_class{};
      const Int n_classes = static_cast<Int>(classes);
#pragma GCC unroll 2
      for (Int c = 0; c < n_classes; ++c, column += kTileRows, this_class += 1) {
        found = label == this_class ? load_lanes<Reals>(column) : found;
      }
      store_lanes(found, tile.target_logit + row);
    }
  }
};

// The logits of the targets and the upstream gradient. The former come from `transposed`, if they were brought there,
// or from short rows, if there is a distance between them.
template <typename Loss, typename Scalar>
void read_for_slope(const FocalLossBackward<Scalar>& args, int64_t row_begin, int64_t n_rows,
                    const compute_t<Scalar>* transposed, [[maybe_unused]] int64_t short_row,
                    Tile<compute_t<Scalar>>& tile) {
  bool found = false;
#ifdef FK_HAS_AVX512_CODE
  if constexpr (std::is_same_v<Scalar, float>) {
    found = short_row != 0 && !transposed;
    if (found) {
      const float* z = args.logits + args.layout.row_offset(row_begin);
      short_row_targets(z, short_row, n_rows, tile.label, tile.target_logit);
    }
  }
#endif
  if (transposed && args.classes <= kFewClasses) {
    run_in_widest<TargetOfColumns>(transposed, args.classes, n_rows, tile);
  } else if (!found) {
    RowCursor row(args.layout, row_begin);
    for (int64_t r = 0; r < n_rows; ++r, row.next()) {
      const int64_t target = std::max<int64_t>(tile.label[r], 0);
      tile.target_logit[r] = load_as_compute(args.logits[row.offset() + target * args.layout.class_stride]);
    }
  }
  if constexpr (Loss::kMarked != Marked::kNone) {
    const auto* marked = args.saved + 3 * args.rows + row_begin;
    for (int64_t r = 0; r < n_rows; ++r) tile.marked[r] = number_as_class(marked[r]);
  }
  if constexpr (Loss::kMarked == Marked::kRival) read_gaps<Loss>(args.logits, args.layout, row_begin, n_rows, tile);
  if (args.grad_stride == 0) return;
  const compute_t<Scalar> divisor = args.divisor ? *args.divisor : compute_t<Scalar>(1);
  for (int64_t r = 0; r < n_rows; ++r) tile.upstream[r] = args.grad_loss[(row_begin + r) * args.grad_stride] / divisor;
}

// The distance between rows that cpu/short_rows.h takes, or 0 where it does not take them.
template <typename Scalar>
int64_t short_row_stride(const RowLayout& layout, int64_t classes, int64_t row_begin, int64_t n_rows) {
#ifdef FK_HAS_AVX512_CODE
  if (std::is_same_v<Scalar, float> && classes >= kLeastOfShortRow && classes <= kMostOfShortRow && has_avx512()) {
    const int64_t stride = matrix_stride<Scalar>(layout, classes, row_begin, n_rows);
    return stride < kMostOfShortStride ? std::max<int64_t>(stride, 0) : 0;
  }
#endif
  return 0;
}

template <typename Loss, typename Scalar>
void grad_of_short_rows(const FocalLossBackward<Scalar>& args, int64_t row_begin, int64_t n_rows, int64_t stride,
                        int64_t grad_stride, const Tile<compute_t<Scalar>>& tile) {
#ifdef FK_HAS_AVX512_CODE
  if constexpr (std::is_same_v<Scalar, float>) {
    const float* z = args.logits + args.layout.row_offset(row_begin);
    float* grad = args.grad_logits + args.grad_layout.row_offset(row_begin);
    if (args.classes <= 16) {
      short_row_grad<Loss, 1>(z, stride, args.classes, n_rows, tile, grad, grad_stride);
    } else {
      short_row_grad<Loss, 2>(z, stride, args.classes, n_rows, tile, grad, grad_stride);
    }
  }
#endif
}

template <typename Loss, typename Scalar>
void backward_labels(const FocalLossBackward<Scalar>& args, int64_t row_begin, int64_t row_end) {
  using Real = compute_t<Scalar>;
  // The gradient keeps the layout of the logits wherever both are dense; any other pair goes through a tile.
  const bool columns = is_columns(args) && args.grad_layout.class_stride != 1 &&
                       args.grad_layout.inner == args.layout.inner && args.grad_layout.inner_stride == 1;
  const bool rows = !is_columns(args) && args.grad_layout.class_stride == 1 && args.classes > kFewClasses;
  // On the stack where it fits: an allocation of this size would be a tenth of a small batch's time.
  alignas(64) Real small[2 * kFewClasses * kTileRows];
  std::unique_ptr<Real[]> large;
  if (!columns && !rows && args.classes > kFewClasses) large.reset(new Real[2 * args.classes * kTileRows]);
  Real* transposed = large ? large.get() : small;
  Real* grad_transposed = transposed + args.classes * kTileRows;
  Tile<Real> tile;
  if (!args.gamma) std::fill_n(tile.gamma, kTileRows, args.gamma_value);
  if (args.grad_stride == 0) {
    std::fill_n(tile.upstream, kTileRows, args.grad_loss[0] / (args.divisor ? *args.divisor : Real(1)));
  }
  for (int64_t row = row_begin, n; row < row_end; row += n) {
    n = tile_rows(args, columns, row, row_end);
    read_rows(args, row, n, tile);
    const int64_t short_row = short_row_stride<Scalar>(args.layout, args.classes, row, n);
    const int64_t short_grad_row = short_row_stride<Scalar>(args.grad_layout, args.classes, row, n);
    const bool short_rows = short_row != 0 && short_grad_row != 0;
    const bool through_tile = args.grad_logits && !columns && !rows && !short_rows;
    if (through_tile) gather_tile(args, row, n, transposed);
    read_for_slope<Loss>(args, row, n, through_tile ? transposed : nullptr, short_row, tile);
    const Real* saved = args.saved + row;
    if (args.edges) {
      log_p_of_targets(saved, args.rows, n, tile);
      look_up_gamma(tile.log_p, n, args.edges, args.gamma, args.n_bins, tile.gamma);
    }
    if (args.grad_gamma) {
      finish_slope<Loss, true>(saved, args.rows, n, args.epsilon, args.detach_modulation, !args.gamma, tile);
      std::copy(tile.grad_gamma, tile.grad_gamma + n, args.grad_gamma + row);
    } else {
      finish_slope<Loss, false>(saved, args.rows, n, args.epsilon, args.detach_modulation, !args.gamma, tile);
    }
    if (!args.grad_logits) continue;
    if (columns) {
      run_in_widest<GradOfColumns<Loss, false>>(
          args.logits + args.layout.row_offset(row), args.layout.class_stride, args.classes, n, tile,
          args.grad_logits + args.grad_layout.row_offset(row), args.grad_layout.class_stride);
    } else if (rows) {
      run_in_widest<GradOfRows<Loss>>(args, row, n, tile);
    } else if (short_rows) {
      grad_of_short_rows<Loss>(args, row, n, short_row, short_grad_row, tile);
    } else {
      run_in_widest<GradOfColumns<Loss, true>>(transposed, kTileRows, args.classes, n, tile, grad_transposed,
                                               kTileRows);
      scatter_tile(args, row, n, grad_transposed);
    }
  }
}

// ---- soft targets and label smoothing ------------------------------------------------------------------------------
//
//   t = (1 - e) target + e / C,   dL/dz_j = p_j sum_i a_i - a_j,  a_i = -p_i dL/dp_i
//   focal: L = -sum_i w_i t_i f(p_i) log p_i,  a = w t c(p)
//
// One row at a time, in scratch arrays over the classes.

template <typename Real>
struct SoftRow {
  explicit SoftRow(int64_t classes)
      : padded((classes + kLanes<Real> - 1) & -kLanes<Real>),
        storage(new Real[padded + 5 * classes]),
        z(storage.get()),
        log_q(z + padded),
        log_u(log_q + classes),
        gamma(log_u + classes),
        target(gamma + classes),
        slope(target + classes) {}
  int64_t padded;  // classes, up to whole vectors
  std::unique_ptr<Real[]> storage;
  Real* z;       // [padded] logits, then the gradient
  Real* log_q;   // log-probabilities
  Real* log_u;   // log(1 - q)
  Real* gamma;   // gamma of each class (one table look-up each)
  Real* target;  // w_i t_i, or t_i where the row has one weight
  Real* slope;   // a_i
  int64_t top;   // first largest class
  Real weight;   // of the row, where it has one
  Real exp_zero = kExpZero<Real>;
};

struct SoftSums {
  template <int64_t bytes, typename Real>
  static FK_HOST_DEVICE void run(int64_t classes, SoftRow<Real>& row, Real* max, Real* log_s, Real* log_u_top) {
    constexpr int64_t n = kLanesOf<bytes, Real>;
    const Real m = max_of<n>(row.z, row.padded);
    row.top = 0;
    while (row.top + 1 < classes && row.z[row.top] != m) ++row.top;
    double rest = 0;
    for (int64_t begin = 0; begin < row.padded; begin += kBlock) {
      rest += sum_exp_except<n, false>(row.z + begin, std::min(kBlock, row.padded - begin), m, row.top - begin,
                                       row.exp_zero)
                  .first;
    }
    *max = m;
    // m - m is NaN for an infinite m, which the sum over the other classes would not show.
    *log_s = log_one_plus(static_cast<Real>(rest)) + (m - m);
    *log_u_top = logarithm(static_cast<Real>(rest)) - *log_s;
  }
};

template <typename Real>
FK_VECTOR_CLONES void soft_pieces(int64_t classes, Real max, Real log_s, Real log_u_top, SoftRow<Real>& row) {
#pragma omp simd
  for (int64_t c = 0; c < classes; ++c) {
    const Real log_q = (row.z[c] - max) - log_s;
    row.log_q[c] = log_q;
    row.log_u[c] = log_one_plus(-exponential(log_q));
  }
  row.log_u[row.top] = log_u_top;
}

template <typename Loss, typename Real>
FK_VECTOR_CLONES Real soft_loss(int64_t classes, Real epsilon, const SoftRow<Real>& row) {
  const Real *log_q = row.log_q, *log_u = row.log_u, *gamma = row.gamma, *target = row.target;
  Real sum = 0;
#pragma omp simd reduction(+ : sum)
  for (int64_t c = 0; c < classes; ++c) {
    sum += Loss::class_terms(log_q[c], log_u[c], gamma[c], epsilon, false, target[c]).loss;
  }
  return sum;
}

template <typename Loss, typename Real>
FK_VECTOR_CLONES void soft_slopes(int64_t classes, Real epsilon, bool detach_modulation, SoftRow<Real>& row,
                                  Real* grad_gamma) {
  const Real *log_q = row.log_q, *log_u = row.log_u, *gamma = row.gamma, *target = row.target;
  Real* slope = row.slope;
  const Real detached = detach_modulation ? 1 : 0;
  Real gamma_sum = 0;
#pragma omp simd reduction(+ : gamma_sum)
  for (int64_t c = 0; c < classes; ++c) {
    const ClassTerms<Real> terms =
        Loss::class_terms(log_q[c], log_u[c], gamma[c], epsilon, detached > Real(0), target[c]);
    slope[c] = terms.slope;
    gamma_sum += terms.grad_gamma;
  }
  *grad_gamma = gamma_sum;
}

// dL/dz_j = q_j (A - a_j) - u_j a_j: written so that the largest class does not subtract a_j from q_j a_j as q_j -> 1.
template <typename Real>
FK_VECTOR_CLONES void soft_grad(int64_t classes, Real scale, SoftRow<Real>& row) {
  Real others = 0;
  const Real top_slope = row.slope[row.top];
  row.slope[row.top] = 0;
#pragma omp simd reduction(+ : others)
  for (int64_t c = 0; c < classes; ++c) others += row.slope[c];
  const Real all = others + top_slope;
#pragma omp simd
  for (int64_t c = 0; c < classes; ++c) {
    const Real a = row.slope[c];
    row.z[c] = scale * (exponential(row.log_q[c]) * (all - a) - exponential(row.log_u[c]) * a);
  }
  row.slope[row.top] = top_slope;
  row.z[row.top] = scale * (exponential(row.log_q[row.top]) * others - exponential(row.log_u[row.top]) * top_slope);
}

template <typename Loss, typename Real>
FK_VECTOR_CLONES void soft_grad_target(int64_t classes, Real epsilon, Real scale, SoftRow<Real>& row) {
  const Real *log_q = row.log_q, *log_u = row.log_u, *gamma = row.gamma, *target = row.target;
  Real* slope = row.slope;
#pragma omp simd
  for (int64_t c = 0; c < classes; ++c) {
    slope[c] = scale * Loss::class_terms(log_q[c], log_u[c], gamma[c], epsilon, false, target[c]).grad_share;
  }
}

// Logits and target of one row. Returns the weight that the row adds to the mean, or -1 for an invalid label; an
// ignored row has weight 0 and `ignored` set.
template <typename Loss, typename Scalar>
double read_soft_row(const FocalLossArgs<Scalar>& args, int64_t index, SoftRow<compute_t<Scalar>>& row, bool* ignored) {
  using Real = compute_t<Scalar>;
  const Scalar* z = args.logits + args.layout.row_offset(index);
  for (int64_t c = 0; c < args.classes; ++c) row.z[c] = load_as_compute(z[c * args.layout.class_stride]);
  std::fill(row.z + args.classes, row.z + row.padded, -std::numeric_limits<Real>::infinity());
  const Real kept = Real(1) - args.label_smoothing;
  const Real spread = args.label_smoothing / static_cast<Real>(args.classes);
  double weight = 1;
  row.weight = 1;
  *ignored = false;
  if (args.target_probs) {
    const Real* target = args.target_probs + args.target_layout.row_offset(index);
    Real mean = 0;
    for (int64_t c = 0; c < args.classes; ++c) {
      const Real share = target[c * args.target_layout.class_stride];
      row.target[c] = kept * share + spread;
      if (Loss::kTarget == SoftTarget::kRows && args.class_weight) mean += args.class_weight[c] * share;
    }
    if (Loss::kTarget == SoftTarget::kRows && args.class_weight) row.weight = mean;
  } else {
    const int64_t label = args.labels[index];
    if (label == args.ignore_index) {
      *ignored = true;
      return 0;
    }
    if (label < 0 || label >= args.classes) return -1;
    std::fill(row.target, row.target + args.classes, spread);
    row.target[label] += kept;
    if (args.class_weight) weight = args.class_weight[label];
    if (Loss::kTarget == SoftTarget::kRows) row.weight = static_cast<Real>(weight);
  }
  if (Loss::kTarget == SoftTarget::kClasses && args.class_weight) {
    for (int64_t c = 0; c < args.classes; ++c) row.target[c] *= args.class_weight[c];
  }
  if (!args.edges) {
    const Real gamma = args.gamma ? args.gamma[index * args.gamma_stride] : args.gamma_value;
    std::fill(row.gamma, row.gamma + args.classes, gamma);
  }
  return weight;
}

template <typename Loss, typename Scalar>
FocalLossSums forward_soft(const FocalLossForward<Scalar>& args, int64_t row_begin, int64_t row_end) {
  using Real = compute_t<Scalar>;
  SoftRow<Real> row(args.classes);
  FocalLossSums sums{0, 0, -1};
  for (int64_t index = row_begin; index < row_end; ++index) {
    Real max = 0, log_s = 0, log_u_top = 0, loss = 0;
    bool ignored;
    const double weight = read_soft_row<Loss>(args, index, row, &ignored);
    if (weight < 0) {
      sums.invalid_row = index;
      return sums;
    }
    if (!ignored) {
      run_in_widest<SoftSums>(args.classes, row, &max, &log_s, &log_u_top);
      soft_pieces(args.classes, max, log_s, log_u_top, row);
      if (args.edges) look_up_gamma(row.log_q, args.classes, args.edges, args.gamma, args.n_bins, row.gamma);
      loss = row.weight * soft_loss<Loss>(args.classes, args.epsilon, row);
    }
    args.saved[index] = max;
    args.saved[args.rows + index] = log_s;
    args.saved[2 * args.rows + index] = log_u_top;
    if constexpr (Loss::kMarked != Marked::kNone) args.saved[3 * args.rows + index] = 0;
    if (args.row_loss) args.row_loss[index] = loss;
    sums.loss += loss;
    sums.weight += weight;
  }
  return sums;
}

template <typename Loss, typename Scalar>
void backward_soft(const FocalLossBackward<Scalar>& args, int64_t row_begin, int64_t row_end) {
  using Real = compute_t<Scalar>;
  SoftRow<Real> row(args.classes);
  for (int64_t index = row_begin; index < row_end; ++index) {
    bool ignored;
    read_soft_row<Loss>(args, index, row, &ignored);
    Scalar* grad = args.grad_logits ? args.grad_logits + args.grad_layout.row_offset(index) : nullptr;
    Real* grad_target = args.grad_target ? args.grad_target + args.target_layout.row_offset(index) : nullptr;
    if (ignored) {
      for (int64_t c = 0; grad && c < args.classes; ++c) grad[c * args.grad_layout.class_stride] = Scalar{};
      if (args.grad_gamma) args.grad_gamma[index] = 0;
      continue;
    }
    const Real max = args.saved[index];
    row.top = 0;
    while (row.top + 1 < args.classes && row.z[row.top] != max) ++row.top;
    soft_pieces(args.classes, max, args.saved[args.rows + index], args.saved[2 * args.rows + index], row);
    if (args.edges) look_up_gamma(row.log_q, args.classes, args.edges, args.gamma, args.n_bins, row.gamma);
    const Real upstream = args.grad_loss[index * args.grad_stride] / (args.divisor ? *args.divisor : Real(1));
    const Real scale = upstream * row.weight;
    Real grad_gamma;
    soft_slopes<Loss>(args.classes, args.epsilon, args.detach_modulation, row, &grad_gamma);
    if (args.grad_gamma) args.grad_gamma[index] = scale * grad_gamma;
    if (grad) {
      soft_grad(args.classes, scale, row);
      for (int64_t c = 0; c < args.classes; ++c) {
        grad[c * args.grad_layout.class_stride] = Store<Scalar>::from_compute(row.z[c]);
      }
    }
    if (grad_target) {
      // The target is also what the weight of a row is the mean under.
      [[maybe_unused]] Real of_weight = 0;
      if constexpr (Loss::kTarget == SoftTarget::kRows) {
        if (args.class_weight) of_weight = upstream * soft_loss<Loss>(args.classes, args.epsilon, row);
      }
      soft_grad_target<Loss>(args.classes, args.epsilon, scale * (Real(1) - args.label_smoothing), row);
      for (int64_t c = 0; c < args.classes; ++c) {
        const Real weight = args.class_weight ? args.class_weight[c] : Real(1);
        Real& result = grad_target[c * args.target_layout.class_stride];
        if constexpr (Loss::kTarget == SoftTarget::kRows) {
          result = row.slope[c] + weight * of_weight;
        } else {
          result = weighted_slope(weight, row.slope[c]);
        }
      }
    }
  }
}

template <typename Scalar>
bool is_soft(const FocalLossArgs<Scalar>& args) {
  return args.target_probs != nullptr || args.label_smoothing != 0;
}

}  // namespace

template <typename Loss, typename Scalar>
FocalLossSums row_loss_forward(const FocalLossForward<Scalar>& args, int64_t row_begin, int64_t row_end) {
  if constexpr (Loss::kTarget != SoftTarget::kNone) {
    if (is_soft(args)) return forward_soft<Loss>(args, row_begin, row_end);
  }
  return forward_labels<Loss>(args, row_begin, row_end);
}

template <typename Loss, typename Scalar>
void row_loss_backward(const FocalLossBackward<Scalar>& args, int64_t row_begin, int64_t row_end) {
  if constexpr (Loss::kTarget != SoftTarget::kNone) {
    if (is_soft(args)) return backward_soft<Loss>(args, row_begin, row_end);
  }
  backward_labels<Loss>(args, row_begin, row_end);
}

#define FK_ROW_LOSS_OF(Loss, Scalar)                                                                        \
  template FocalLossSums row_loss_forward<Loss, Scalar>(const FocalLossForward<Scalar>&, int64_t, int64_t); \
  template void row_loss_backward<Loss, Scalar>(const FocalLossBackward<Scalar>&, int64_t, int64_t);
#define FK_ROW_LOSS(Loss)        \
  FK_ROW_LOSS_OF(Loss, Half)     \
  FK_ROW_LOSS_OF(Loss, BFloat16) \
  FK_ROW_LOSS_OF(Loss, float)    \
  FK_ROW_LOSS_OF(Loss, double)

}  // namespace focalkern::cpu
