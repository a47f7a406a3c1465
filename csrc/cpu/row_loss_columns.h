// Sums and gradient of a tile of adjacent rows.
//
// A vector of rows at a time, whose sums stay in registers from class to class. If the last one is not full, it starts
// earlier and overlaps its neighbour; fewer rows than one vector go one by one.
#pragma once

#include <algorithm>
#include <limits>

#include "cpu/elementary.h"
#include "cpu/lanes.h"
#include "cpu/row_loss_tile.h"

namespace focalkern::cpu {
namespace {

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

}  // namespace
}  // namespace focalkern::cpu
