// Losses of rows of logits, forward and backward, on the CPU: the loops, which are the same for every loss. What a loss
// is besides is in its header in math (see math/row_loss.h), and its kernels are made by FK_ROW_LOSS.
//
//   forward   logits [rows, classes] -> row_loss [rows], saved [3 or 4, rows] = (m, log S, log u or squares, marked),
//             of the focal loss (m, c / S, -rest): see row_loss_focal.h
//   backward  logits, saved, grad_loss -> grad_logits [rows, classes] (and grad_gamma, grad_target)
//
// Memory: each direction reads the logits from memory once; second looks at a row find it in cache, unless it is longer
// than a block and its target very unlikely. Three shapes of the same work:
//   rows      classes are adjacent and many: vectors run along a row, in blocks that stay in the first-level cache
//   columns   rows are adjacent (pixels, [N, C, d1, ...]): vectors run across a tile of rows
//   few classes in adjacent memory are turned into a tile of columns first; with AVX-512 they are turned in registers
//   forward (row_loss_turned.h), or some dozens of them taken in four rows side by side (row_loss_abreast.h), and
//   backward, where rows are contiguous, they are not turned at all (row_loss_flat.h)
// What is left of a row after its sums, a handful of numbers, is computed for a whole tile of rows at once
// (row_loss_finish.h). Soft targets and label smoothing need every class's factor (row_loss_soft.h).
#pragma once

#include <algorithm>
#include <limits>
#include <memory>
#include <type_traits>

#include "cpu/row_loss/across_rows.h"
#include "cpu/row_loss/along_classes.h"
#include "cpu/row_loss/avx512_backward.h"
#include "cpu/row_loss/avx512_forward.h"
#include "cpu/row_loss/avx512_transposed.h"
#include "cpu/row_loss/epilogue.h"
#include "cpu/row_loss/epilogue_focal.h"
#include "cpu/row_loss/read.h"
#include "cpu/row_loss/soft_targets.h"
#include "cpu/row_loss/tile.h"
#include "cpu/simd/dispatch.h"
#include "cpu/simd/transpose.h"
#include "cpu/simd/vector.h"
#include "kernels.h"
#include "math/row_loss.h"

namespace focalkern::cpu {
namespace {

// The distance between rows that row_loss_turned.h takes, or 0 where it does not take them.
template <typename Loss, typename Scalar>
int64_t turned_stride(const RowLayout& layout, int64_t classes, int64_t row_begin, int64_t n_rows) {
#ifdef FK_HAS_AVX512_CODE
  // Classes that are fewer than four words are gathered, which beats a tile where even the tile is not turned.
  const bool fits = classes >= kWideClasses<Scalar> || classes == 2 || classes == 3;
  if (sizeof(Scalar) <= sizeof(float) && layout.class_stride == 1 && n_rows >= kWideRows && fits &&
      classes <= kMostTurnedOf<Loss, Scalar> && has_avx512()) {
    const int64_t stride = row_stride(layout, row_begin, n_rows);
    return stride < kFarthest / 16 ? stride : 0;
  }
#endif
  return 0;
}

// The same of row_loss_abreast.h.
template <typename Loss, typename Scalar>
int64_t abreast_stride(const RowLayout& layout, int64_t classes, int64_t row_begin, int64_t n_rows) {
#ifdef FK_HAS_AVX512_CODE
  if (kIsAbreast<Loss, Scalar> && classes > kFewClasses && classes <= kMostAbreast && layout.class_stride == 1 &&
      n_rows >= kRowsAbreast && has_avx512()) {
    const int64_t stride = row_stride(layout, row_begin, n_rows);
    return stride < kFarthest / 16 ? stride : 0;
  }
#endif
  return 0;
}

template <typename Scalar>
void sums_abreast(const FocalLossArgs<Scalar>& args, int64_t row, int64_t n_rows, int64_t stride,
                  Tile<compute_t<Scalar>>& tile) {
#ifdef FK_HAS_AVX512_CODE
  if constexpr (std::is_same_v<Scalar, float>) {
    sums_of_rows_abreast(args.logits + args.layout.row_offset(row), stride, args.classes, n_rows, tile);
  }
#endif
}

template <typename Loss, typename Scalar>
void sums_of_turned(const FocalLossArgs<Scalar>& args, int64_t row_begin, int64_t n_rows, int64_t stride,
                    Tile<compute_t<Scalar>>& tile) {
#ifdef FK_HAS_AVX512_CODE
  if constexpr (sizeof(Scalar) <= sizeof(float)) {
    sums_of_turned_rows<Loss>(args.logits + args.layout.row_offset(row_begin), stride, args.classes, n_rows, tile);
  }
#endif
}

template <typename Loss, typename Scalar>
FocalLossSums forward_labels(const FocalLossForward<Scalar>& args, int64_t row_begin, int64_t row_end) {
  using Real = compute_t<Scalar>;
  const bool columns = is_columns(args);
  const bool few_classes = !columns && args.classes <= kFewClasses;
  alignas(64) Real transposed[kFewClasses * kTileRows];
  Tile<Real> tile;
  if (!args.gamma) std::fill_n(tile.gamma, kTileRows, args.gamma_value);
  if (kIsFocal<Loss> && (!args.gamma || args.edges)) {
    tile.ever_inverse = args.edges ? any_inverse(args.gamma, args.n_bins) : any_inverse(&args.gamma_value, 1);
  }
  FocalLossSums sums{0, 0, -1};
  for (int64_t row = row_begin, n; row < row_end; row += n) {
    n = tile_rows(args, columns, row, row_end);
    const int64_t invalid = read_rows(args, row, n, true, tile);
    if (invalid >= 0) {
      sums.invalid_row = invalid;
      return sums;
    }
    if (columns) {
      run_in_widest<SumsOfColumns<Loss, false>>(args.logits + args.layout.row_offset(row), args.layout.class_stride,
                                                args.classes, n, tile);
    } else if (const int64_t stride = abreast_stride<Loss, Scalar>(args.layout, args.classes, row, n)) {
      sums_abreast(args, row, n, stride, tile);
    } else if (const int64_t stride = turned_stride<Loss, Scalar>(args.layout, args.classes, row, n)) {
      sums_of_turned<Loss>(args, row, n, stride, tile);
    } else if (few_classes) {
      gather_tile(args, row, n, transposed);
      run_in_widest<SumsOfColumns<Loss, true>>(transposed, kTileRows, args.classes, n, tile);
    } else {
      if (args.classes > kBlock) {
        sums_of_long_rows<Loss>(args, row, n, tile);
      } else if constexpr (kSumOnly<Loss>) {
        run_in_widest<SumOfRows>(args, row, n, tile);
      } else {
        run_in_widest<SumsOfRows<Loss>>(args, row, n, tile);
      }
      if constexpr (Loss::kMarked == Marked::kRival) read_gaps<Loss>(args.logits, args.layout, row, n, tile);
    }
    if constexpr (kIsFocal<Loss>) {
      finish_focal_loss(args, row, n, tile, &sums);
    } else {
      finish_sums<Loss>(n, tile);
      if (args.edges) look_up_gamma_of_log(tile.log_p, n, args.edges, args.gamma, args.n_bins, tile.gamma);
      finish_loss<Loss>(n, args.epsilon, tile, args.saved + row, args.rows, &sums);
      if (args.row_loss) std::copy(tile.loss, tile.loss + n, args.row_loss + row);
    }
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

// Whether the targets of these rows were gathered.
template <typename Scalar>
bool gather_targets_of(const FocalLossArgs<Scalar>& args, int64_t row_begin, int64_t n_rows,
                       Tile<compute_t<Scalar>>& tile) {
#ifdef FK_HAS_AVX512_CODE
  if constexpr (sizeof(Scalar) <= sizeof(float)) {
    const int64_t stride = row_stride(args.layout, row_begin, n_rows), class_stride = args.layout.class_stride;
    const bool is_near = stride < kFarthest / 16 && class_stride < kFarthest / args.classes;
    if (stride > 0 && class_stride > 0 && is_near && n_rows >= kWideRows && has_avx512()) {
      gather_targets(args.logits + args.layout.row_offset(row_begin), stride, class_stride, n_rows, tile.label,
                     tile.target_logit);
      return true;
    }
  }
#endif
  return false;
}

// The logits of the targets, where they are needed, and the upstream gradient. The former come from `transposed`, if
// they were brought there.
template <typename Loss, typename Scalar>
void read_for_slope(const FocalLossBackward<Scalar>& args, int64_t row_begin, int64_t n_rows, bool needed,
                    const compute_t<Scalar>* transposed, Tile<compute_t<Scalar>>& tile) {
  if (needed && transposed && args.classes <= kFewClasses) {
    run_in_widest<TargetOfColumns>(transposed, args.classes, n_rows, tile);
  } else if (needed && !gather_targets_of(args, row_begin, n_rows, tile)) {
    RowCursor row(args.layout, row_begin);
    for (int64_t r = 0; r < n_rows; ++r, row.next()) {
      const int64_t target = std::max<int64_t>(tile.label[r], 0);
      tile.target_logit[r] = load_as_compute(args.logits[row.offset() + target * args.layout.class_stride]);
    }
  }
  if constexpr (Loss::kMarked != Marked::kNone) {
    const auto* marked = args.saved + 3 * args.rows + row_begin;
    const auto classes = static_cast<label_int<compute_t<Scalar>>>(args.classes);
    for (int64_t r = 0; r < n_rows; ++r) {
      // Not beyond the row, whatever was given as saved.
      const auto c = number_as_class(marked[r]);
      tile.marked[r] = c >= 0 && c < classes ? c : kNoTarget;
    }
  }
  if constexpr (Loss::kMarked == Marked::kRival) read_gaps<Loss>(args.logits, args.layout, row_begin, n_rows, tile);
  if (args.grad_stride == 0) return;
  const compute_t<Scalar> divisor = args.divisor ? *args.divisor : compute_t<Scalar>(1);
  for (int64_t r = 0; r < n_rows; ++r) tile.upstream[r] = args.grad_loss[(row_begin + r) * args.grad_stride] / divisor;
}

template <typename Loss, typename Scalar>
void finish_any_slope(const FocalLossBackward<Scalar>& args, int64_t row_begin, int64_t n_rows,
                      Tile<compute_t<Scalar>>& tile) {
  const auto* saved = args.saved + row_begin;
  if (args.edges) {
    log_p_of_targets(saved, args.rows, n_rows, tile);
    look_up_gamma_of_log(tile.log_p, n_rows, args.edges, args.gamma, args.n_bins, tile.gamma);
  }
  if (args.grad_gamma) {
    finish_slope<Loss, true>(saved, args.rows, n_rows, args.epsilon, args.detach_modulation, tile);
    std::copy(tile.grad_gamma, tile.grad_gamma + n_rows, args.grad_gamma + row_begin);
  } else {
    finish_slope<Loss, false>(saved, args.rows, n_rows, args.epsilon, args.detach_modulation, tile);
  }
}

// Whether rows follow each other without a gap, and have few enough classes for row_loss_flat.h.
template <typename Scalar>
bool is_flat(const RowLayout& layout, int64_t rows, int64_t classes) {
#ifdef FK_HAS_AVX512_CODE
  if (sizeof(Scalar) > sizeof(float) || classes < 2 || classes > kMostFlat || !has_avx512()) return false;
  const bool runs_follow = layout.inner >= rows || layout.outer_stride == layout.inner * classes;
  return layout.class_stride == 1 && runs_follow && (layout.inner == 1 || layout.inner_stride == classes);
#else
  return false;
#endif
}

// For what is not flat, nothing.
template <typename Scalar, bool = sizeof(Scalar) <= sizeof(float)>
struct FlatGradient {
  void prepare(int64_t /*classes*/) {}
  template <typename Loss>
  void run(const FocalLossBackward<Scalar>&, int64_t, int64_t, const Tile<compute_t<Scalar>>&) const {}
};
#ifdef FK_HAS_AVX512_CODE
template <typename Scalar>
struct FlatGradient<Scalar, true> {
  FlatRows<sizeof(Scalar) == 2>& flat = flat_rows_of_this_thread<sizeof(Scalar) == 2>();
  void prepare(int64_t classes) { flat.prepare(classes); }
  template <typename Loss>
  void run(const FocalLossBackward<Scalar>& args, int64_t row_begin, int64_t n_rows, const Tile<float>& tile) const {
    grad_of_flat_rows<Loss>(args.logits + args.layout.row_offset(row_begin), args.classes, n_rows, flat, tile,
                            args.grad_logits + args.grad_layout.row_offset(row_begin));
  }
};
#endif

template <typename Loss, typename Scalar>
void backward_labels(const FocalLossBackward<Scalar>& args, int64_t row_begin, int64_t row_end) {
  using Real = compute_t<Scalar>;
  // The gradient keeps the layout of the logits wherever both are dense; any other pair goes through a tile.
  const bool columns = is_columns(args) && args.grad_layout.class_stride != 1 &&
                       args.grad_layout.inner == args.layout.inner && args.grad_layout.inner_stride == 1;
  const bool rows = !is_columns(args) && args.grad_layout.class_stride == 1 && args.classes > kFewClasses;
  const bool all_flat = is_flat<Scalar>(args.layout, args.rows, args.classes) &&
                        is_flat<Scalar>(args.grad_layout, args.rows, args.classes);
  // On the stack where it fits: an allocation of this size would be a tenth of a small batch's time.
  alignas(64) Real small[2 * kFewClasses * kTileRows];
  std::unique_ptr<Real[]> large;
  if (!columns && !rows && args.classes > kFewClasses) large.reset(new Real[2 * args.classes * kTileRows]);
  Real* transposed = large ? large.get() : small;
  Real* grad_transposed = transposed + args.classes * kTileRows;
  FlatGradient<Scalar> flat_gradient;
  if (all_flat) flat_gradient.prepare(args.classes);
  const bool needs_more = !kIsFocal<Loss> || args.grad_gamma;  // the focal loss has all else from the forward pass
  Tile<Real> tile;
  if (!args.gamma) std::fill_n(tile.gamma, kTileRows, args.gamma_value);
  if (args.grad_stride == 0) {
    std::fill_n(tile.upstream, kTileRows, args.grad_loss[0] / (args.divisor ? *args.divisor : Real(1)));
  }
  for (int64_t row = row_begin, n; row < row_end; row += n) {
    n = tile_rows(args, columns, row, row_end);
    read_rows(args, row, n, needs_more, tile);
    const bool flat = all_flat && n >= 16;
    const bool through_tile = args.grad_logits && !columns && !rows && !flat;
    if (through_tile) gather_tile(args, row, n, transposed);
    read_for_slope<Loss>(args, row, n, needs_more, through_tile ? transposed : nullptr, tile);
    if constexpr (kIsFocal<Loss>) {
      finish_focal_slope(args, row, n, tile);
    } else {
      finish_any_slope<Loss>(args, row, n, tile);
    }
    if (!args.grad_logits) continue;
    if (columns) {
      run_in_widest<GradOfColumns<Loss, false>>(
          args.logits + args.layout.row_offset(row), args.layout.class_stride, args.classes, n, tile,
          args.grad_logits + args.grad_layout.row_offset(row), args.grad_layout.class_stride);
    } else if (flat) {
      flat_gradient.template run<Loss>(args, row, n, tile);
    } else if (rows) {
      run_in_widest<GradOfRows<Loss>>(args, row, n, tile);
    } else {
      run_in_widest<GradOfColumns<Loss, true>>(transposed, kTileRows, args.classes, n, tile, grad_transposed,
                                               kTileRows);
      scatter_tile(args, row, n, grad_transposed);
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
