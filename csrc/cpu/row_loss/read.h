// Reads a tile of rows: labels, class weights, gammas, and logits of any layout as a transposed tile. Writes it back.
#pragma once

#include <algorithm>
#include <limits>
#include <type_traits>

#include "cpu/row_loss/tile.h"
#include "cpu/simd/dispatch.h"
#include "cpu/simd/transpose.h"
#include "kernels/row_loss.h"

namespace focalkern::cpu {
namespace {

// Returns whether all labels are in range. If not, the caller must not use the values that it wrote.
template <typename Label, typename Real>
FK_HOST_DEVICE bool read_labels_in_range(const Label* labels, int64_t n_rows, int64_t classes, Tile<Real>& tile) {
  using Bits = std::make_unsigned_t<Label>;  // a negative label is large as an unsigned number
  Bits largest = 0;
#pragma GCC ivdep  // gcc would keep an integer reduction of `omp simd` in memory
  for (int64_t r = 0; r < n_rows; ++r) {
    const Bits label = static_cast<Bits>(labels[r]);
    largest = label > largest ? label : largest;
    tile.label[r] = static_cast<label_int<Real>>(labels[r]);
    tile.weight[r] = Real(1);
  }
  return static_cast<uint64_t>(largest) < static_cast<uint64_t>(classes) && static_cast<Label>(largest) >= 0;
}

// Returns whether any label is neither in range nor ignore_index.
template <typename Label, typename Real>
FK_HOST_DEVICE bool read_any_labels(const Label* labels, int64_t n_rows, int64_t classes, int64_t ignore_index,
                                    Tile<Real>& tile) {
  int64_t wrong = 0;
#pragma omp simd reduction(| : wrong)
  for (int64_t r = 0; r < n_rows; ++r) {
    const int64_t label = labels[r];
    const bool in_range = static_cast<uint64_t>(label) < static_cast<uint64_t>(classes);
    const bool kept = label != ignore_index;
    wrong |= !in_range & kept ? 1 : 0;
    tile.label[r] = in_range & kept ? static_cast<label_int<Real>>(label) : label_int<Real>(kNoTarget);
    tile.weight[r] = in_range & kept ? Real(1) : Real(0);
  }
  return wrong != 0;
}

// Returns whether any label is wrong. Sets tile.plain if no row is ignored.
template <typename Label, typename Scalar>
FK_HOST_DEVICE bool read_labels(const RowLossArgs<Scalar>& args, int64_t row_begin, int64_t n_rows,
                                Tile<compute_t<Scalar>>& tile) {
  const Label* labels = static_cast<const Label*>(args.labels.data) + row_begin;
  const bool ignores_a_class = args.ignore_index >= 0 && args.ignore_index < args.classes;
  tile.is_plain = !ignores_a_class && read_labels_in_range(labels, n_rows, args.classes, tile);
  return !tile.is_plain && read_any_labels(labels, n_rows, args.classes, args.ignore_index, tile);
}

// Whether any gamma is negative or NaN.
template <typename Real>
FK_HOST_DEVICE bool any_inverse(const Real* gamma, int64_t n) {
  label_int<Real> count = 0;
#pragma omp simd reduction(+ : count)
  for (int64_t i = 0; i < n; ++i) count += gamma[i] >= Real(0) ? 0 : 1;
  return count != 0;
}

// One gamma for each row, or one for all of them (stride 0).
template <typename Real>
FK_HOST_DEVICE void read_gammas(const Real* gamma, int64_t stride, int64_t n_rows, Tile<Real>& tile) {
  if (stride == 0) {
    for (int64_t r = 0; r < n_rows; ++r) tile.gamma[r] = gamma[0];
  } else {
    for (int64_t r = 0; r < n_rows; ++r) tile.gamma[r] = gamma[r];
  }
  tile.ever_inverse = any_inverse(tile.gamma, n_rows);
}

// Reads labels, class weights and, if wanted, gammas of a tile. Returns the first row whose label is out of range, or
// -1.
template <typename Scalar>
FK_VECTOR_CLONES int64_t read_rows(const RowLossArgs<Scalar>& args, int64_t row_begin, int64_t n_rows, bool with_gammas,
                                   Tile<compute_t<Scalar>>& tile) {
  const Labels& labels = args.labels;
  bool wrong;
  if (labels.type == Labels::Type::kInt64) {
    wrong = read_labels<int64_t>(args, row_begin, n_rows, tile);
  } else if (labels.type == Labels::Type::kInt32) {
    wrong = read_labels<int32_t>(args, row_begin, n_rows, tile);
  } else {
    wrong = read_labels<uint8_t>(args, row_begin, n_rows, tile);
  }
  if (args.class_weight) {
    tile.is_plain = false;
    for (int64_t r = 0; r < n_rows; ++r) {
      if (tile.label[r] != kNoTarget) tile.weight[r] = args.class_weight[tile.label[r]];
    }
  }
  if (with_gammas && args.gamma && !args.edges) {
    read_gammas(args.gamma + row_begin * args.gamma_stride, args.gamma_stride, n_rows, tile);
  }
  if (!wrong) return -1;
  int64_t row = row_begin;
  while ((labels[row] >= 0 && labels[row] < args.classes) || labels[row] == args.ignore_index) ++row;
  return row;
}

// The number of rows in this tile. Columns must be adjacent in memory.
template <typename Scalar>
int64_t tile_rows(const RowLossArgs<Scalar>& args, bool columns, int64_t row, int64_t row_end) {
  int64_t n = std::min(kTileRows, row_end - row);
  return columns ? std::min(n, args.layout.inner - row % args.layout.inner) : n;
}

// The distance between rows where they can be transposed as a matrix, or 0.
template <typename Scalar>
int64_t matrix_stride(const RowLayout& layout, int64_t classes, int64_t row_begin, int64_t n_rows) {
  if (sizeof(Scalar) > sizeof(float) || layout.class_stride != 1 || classes < 4 || n_rows < 4) return 0;
  return row_stride(layout, row_begin, n_rows);
}

// Writes the addresses of rows.
template <typename Number>
void pointers_of_rows(Number* from, const RowLayout& layout, int64_t row, int64_t n_rows, Number** to) {
  if (const int64_t stride = layout.lines == 0 ? row_stride(layout, row, n_rows) : 0) {
    from += layout.row_offset(row);
    for (int64_t r = 0; r < n_rows; ++r, from += stride) to[r] = from;
    return;
  }
  RowCursor at(layout, row);
  for (int64_t r = 0; r < n_rows; ++r, at.next()) to[r] = from + at.offset();
}

// [n_rows, classes] in any layout <-> [classes, kTileRows] in the type of the computation
template <typename Scalar>
void gather_columns(const Scalar* from, const RowLayout& layout, int64_t classes, int64_t row_begin, int64_t n_rows,
                    compute_t<Scalar>* tile) {
  if constexpr (sizeof(Scalar) <= sizeof(float)) {
    if (const int64_t stride = matrix_stride<Scalar>(layout, classes, row_begin, n_rows)) {
      to_columns<kTileRows>(from + layout.row_offset(row_begin), stride, n_rows, classes, tile);
      return;
    }
  }
  RowCursor row(layout, row_begin);
  for (int64_t r = 0; r < n_rows; ++r, row.next()) {
    const Scalar* z = from + row.offset();
    for (int64_t c = 0; c < classes; ++c) tile[c * kTileRows + r] = load_as_compute(z[c * layout.class_stride]);
  }
}
template <typename Scalar>
void scatter_columns(const compute_t<Scalar>* tile, int64_t classes, int64_t row_begin, int64_t n_rows,
                     const RowLayout& layout, Scalar* to) {
  if constexpr (sizeof(Scalar) <= sizeof(float)) {
    if (const int64_t stride = matrix_stride<Scalar>(layout, classes, row_begin, n_rows)) {
      to_rows<kTileRows>(tile, n_rows, classes, to + layout.row_offset(row_begin), stride);
      return;
    }
  }
  RowCursor row(layout, row_begin);
  for (int64_t r = 0; r < n_rows; ++r, row.next()) {
    Scalar* grad = to + row.offset();
    for (int64_t c = 0; c < classes; ++c) {
      grad[c * layout.class_stride] = Store<Scalar>::from_compute(tile[c * kTileRows + r]);
    }
  }
}

template <typename Scalar>
void gather_tile(const RowLossArgs<Scalar>& args, int64_t row_begin, int64_t n_rows, compute_t<Scalar>* tile) {
  gather_columns(args.logits, args.layout, args.classes, row_begin, n_rows, tile);
}
template <typename Scalar>
void scatter_tile(const RowLossBackward<Scalar>& args, int64_t row_begin, int64_t n_rows,
                  const compute_t<Scalar>* tile) {
  scatter_columns(tile, args.classes, row_begin, n_rows, args.grad_layout, args.grad_logits);
}

}  // namespace
}  // namespace focalkern::cpu
