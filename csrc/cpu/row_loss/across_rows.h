// Sums and gradient of a tile of adjacent rows.
//
// The loop processes one vector of rows at a time; the sums stay in registers from class to class. If the last vector
// is not full, it starts earlier and overlaps the previous one. Fewer rows than one vector are processed one by one.
#pragma once

#include <algorithm>

#include "cpu/row_loss/across_rows_lanes.h"
#include "cpu/row_loss/tile.h"
#include "cpu/simd/vector.h"

namespace focalkern::cpu {
namespace {

// Classes per partial sum: in a longer run of equal terms, all rounding errors would have the same sign.
constexpr int64_t kColumnPart = 64;

template <typename Loss, int64_t n, bool kTransposed, typename Scalar>
FK_HOST_DEVICE void sums_of_lanes(const Scalar* z, int64_t class_stride, int64_t classes, int64_t row,
                                  Tile<compute_t<Scalar>>& tile) {
  using Sums = SumsOfLanes<Loss, compute_t<Scalar>, n>;
  using Reals = typename Sums::Reals;
  using Int = typename Sums::Int;
  const Int n_classes = static_cast<Int>(classes);
  Sums sums(tile, row);
  const Scalar* column = z + row;
  Int c = 0;
  for (; c < n_classes - 1; c += 2, column += 2 * class_stride) {
    const Reals v = load_simd<Reals>(column), w = load_simd<Reals>(column + class_stride);
    sums.look(v, c);
    sums.look(w, c + 1);
  }
  if (c < n_classes) sums.look(load_simd<Reals>(column), c);
  column = z + row;
  CompensatedSum<Reals> rest, squares;
  for (c = 0; c < n_classes;) {
    const Int stop = n_classes - c < Int(kColumnPart) ? n_classes : c + Int(kColumnPart);
#pragma GCC unroll 2
    for (; c < stop; ++c, column += class_stride) {
      if constexpr (!kTransposed) prefetch(column + kTileRows);  // the same class of the next tile
      sums.add(load_simd<Reals>(column));
    }
    rest.add(sums.rest);
    squares.add(sums.squares);
    sums.rest = sums.squares = Reals{};
  }
  sums.rest = rest.sum;
  sums.squares = squares.sum;
  sums.store(tile, row);
}

// kTransposed: the tile is a transposed copy of rows and fits the cache, so no prefetch is needed.
template <typename Loss, bool kTransposed>
struct SumsOfColumns {
  template <int64_t bytes, typename Scalar>
  static FK_HOST_DEVICE void run(const Scalar* z, int64_t class_stride, int64_t classes, int64_t n_rows,
                                 Tile<compute_t<Scalar>>& tile) {
    constexpr int64_t n = kLanesOf<bytes, Scalar>;
    if (n_rows < n) {
      for (int64_t r = 0; r < n_rows; ++r) sums_of_lanes<Loss, 1, kTransposed>(z, class_stride, classes, r, tile);
      return;
    }
    for (int64_t r = 0; r < n_rows; r += n) {
      sums_of_lanes<Loss, n, kTransposed>(z, class_stride, classes, std::min(r, n_rows - n), tile);
    }
  }
};

template <typename Loss, int64_t n, bool kTransposed, typename Scalar>
FK_HOST_DEVICE void grad_of_lanes(const Scalar* z, int64_t class_stride, int64_t classes, int64_t row,
                                  const Tile<compute_t<Scalar>>& tile, Scalar* grad, int64_t grad_class_stride) {
  using Grad = GradOfLanes<Loss, compute_t<Scalar>, n>;
  using Int = typename Grad::Int;
  const Int n_classes = static_cast<Int>(classes);
  Grad gradients(tile, row);
  const Scalar* column = z + row;
  Scalar* grad_column = grad + row;
#pragma GCC unroll 2
  for (Int c = 0; c < n_classes; ++c, column += class_stride, grad_column += grad_class_stride) {
    if constexpr (!kTransposed) {
      prefetch(column + kTileRows);
      prefetch(grad_column + kTileRows);
    }
    store_simd(gradients.next(load_simd<typename Grad::Reals>(column)), grad_column);
  }
}

template <typename Loss, bool kTransposed>
struct GradOfColumns {
  template <int64_t bytes, typename Scalar>
  static FK_HOST_DEVICE void run(const Scalar* z, int64_t class_stride, int64_t classes, int64_t n_rows,
                                 const Tile<compute_t<Scalar>>& tile, Scalar* grad, int64_t grad_class_stride) {
    constexpr int64_t n = kLanesOf<bytes, Scalar>;
    if (n_rows < n) {
      for (int64_t r = 0; r < n_rows; ++r) {
        grad_of_lanes<Loss, 1, kTransposed>(z, class_stride, classes, r, tile, grad, grad_class_stride);
      }
      return;
    }
    for (int64_t r = 0; r < n_rows; r += n) {
      grad_of_lanes<Loss, n, kTransposed>(z, class_stride, classes, std::min(r, n_rows - n), tile, grad,
                                          grad_class_stride);
    }
  }
};

}  // namespace
}  // namespace focalkern::cpu
