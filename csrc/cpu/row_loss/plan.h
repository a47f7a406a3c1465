// The plan: pure functions of the shape that choose the loop for a tile of rows. tests/kernels/test_cpu_row_paths.py
// calls them for every size without running a kernel. Soft targets have their own loops (soft_targets.h).
#pragma once

#include <algorithm>
#include <cstdint>

#include "cpu/simd/transpose.h"
#include "kernels/layout.h"

namespace focalkern::cpu {

constexpr int64_t kTileRows = 64;    // rows per tile: their epilogue runs once; also the width of a transposed tile
constexpr int64_t kRowsAtOnce = 16;  // float rows of kFourRows per step: their logits stay in the first-level cache
constexpr int64_t kFewClasses = 32;  // up to here a transposed tile wastes less than padding rows to full vectors
constexpr int64_t kMostOfFourRows = 192;
constexpr int64_t kMostTransposed = 256;  // sixteen float rows of this many fill half of a first-level cache
constexpr int64_t kMostDense = 128;       // longer rows fill their own vectors well enough

enum class RowPath {
  kAlongClasses,         // vectors run along a row whose classes are adjacent
  kAcrossRows,           // vectors run across rows that are adjacent: pixels, [N, C, d1, ...]
  kTransposedTile,       // rows are copied to a tile [classes, kTileRows], then as kAcrossRows
  kFourRows,             // forward, AVX-512: four float rows side by side share the loop and the reductions
  kTransposedRegisters,  // forward, AVX-512: sixteen rows are transposed in registers, four words of each at a time
  kDenseRows,            // backward, AVX-512: contiguous rows are one run of full vectors
};

inline bool is_across_rows(const RowLayout& layout, int64_t classes) { return layout.class_stride != 1 && classes > 1; }

// The distance between rows if it is constant, else 0.
inline int64_t row_stride(const RowLayout& layout, int64_t row_begin, int64_t n_rows) {
  if (layout.inner == 1) return layout.outer_stride;
  return row_begin % layout.inner + n_rows <= layout.inner ? layout.inner_stride : 0;
}

// Whether 32-bit offsets reach sixteen rows at this distance.
inline bool is_near(int64_t stride) { return stride > 0 && stride < kFarthest / 16; }

// The loop of `n_rows` rows from `row` on. sum_only: the loss needs the sum of exponentials and no second class.
inline RowPath plan_forward(const RowLayout& layout, int64_t classes, int64_t scalar_size, bool sum_only,
                            bool has_avx512, int64_t row, int64_t n_rows) {
  if (is_across_rows(layout, classes)) return RowPath::kAcrossRows;
  const bool takes_four_rows = sum_only && scalar_size == sizeof(float);
  if (has_avx512 && layout.class_stride == 1 && n_rows >= kWideRows && scalar_size <= int64_t{sizeof(float)} &&
      is_near(row_stride(layout, row, n_rows))) {
    if (takes_four_rows && classes > kFewClasses && classes <= kMostOfFourRows) return RowPath::kFourRows;
    // Two or three classes are gathered: this beats a tile, which needs four classes for its transposition.
    const bool fits = classes >= wide_classes(scalar_size) || classes == 2 || classes == 3;
    if (fits && classes <= (takes_four_rows ? kFewClasses : kMostTransposed)) return RowPath::kTransposedRegisters;
  }
  return classes <= kFewClasses ? RowPath::kTransposedTile : RowPath::kAlongClasses;
}

// Whether the rows follow each other without a gap, and are short enough for kDenseRows.
inline bool is_dense(const RowLayout& layout, int64_t rows, int64_t classes, int64_t scalar_size, bool has_avx512) {
  if (scalar_size > int64_t{sizeof(float)} || classes < 2 || classes > kMostDense || !has_avx512) return false;
  if (layout.lines > 0) return false;
  const bool runs_follow = layout.inner >= rows || layout.outer_stride == layout.inner * classes;
  return layout.class_stride == 1 && runs_follow && (layout.inner == 1 || layout.inner_stride == classes);
}

// The loop of the gradient for all `rows`. If it is kDenseRows, a tile of less than 16 rows takes plan_backward_rest.
inline RowPath plan_backward_rest(const RowLayout& layout, const RowLayout& grad_layout, int64_t classes) {
  // If both are dense, the gradient has the layout of the logits; any other pair goes through a tile.
  if (is_across_rows(layout, classes)) {
    // Whether a run of the logits lies in one run of the gradient.
    const bool alike =
        grad_layout.class_stride != 1 && grad_layout.inner % layout.inner == 0 && grad_layout.inner_stride == 1;
    return alike ? RowPath::kAcrossRows : RowPath::kTransposedTile;
  }
  return grad_layout.class_stride == 1 && classes > kFewClasses ? RowPath::kAlongClasses : RowPath::kTransposedTile;
}
inline RowPath plan_backward(const RowLayout& layout, const RowLayout& grad_layout, int64_t rows, int64_t classes,
                             int64_t scalar_size, bool has_avx512) {
  const bool dense = is_dense(layout, rows, classes, scalar_size, has_avx512) &&
                     is_dense(grad_layout, rows, classes, scalar_size, has_avx512);
  const RowPath rest = plan_backward_rest(layout, grad_layout, classes);
  return dense && rest != RowPath::kAcrossRows ? RowPath::kDenseRows : rest;
}

}  // namespace focalkern::cpu
