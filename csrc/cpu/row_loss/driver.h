// Losses of rows of logits on the CPU, forward and backward, for every loss. Formulas: math/row_loss.h, and one header
// per loss beside it. Each loss has a source here that expands FK_ROW_LOSS_INSTANCES.
//
//   forward   logits [rows, classes] -> row_loss [rows], saved [3 or 4, rows] = (m, log S, log u or squares, class);
//             of the focal loss (m, c / S, -sum_exp_others): see epilogue_focal.h
//   backward  logits, saved, grad_loss -> grad_logits [rows, classes] (and grad_gamma, grad_target)
//
// Each direction reads the logits from memory once. A second read of a row comes from the cache, unless the row is
// longer than a block and its target very unlikely. plan.h chooses the loop over the classes of a tile of rows. The
// epilogue (epilogue.h) then computes the losses and gradient coefficients of the whole tile. Soft targets and label
// smoothing need the factor of every class (soft_targets.h).
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
#include "cpu/row_loss/plan.h"
#include "cpu/row_loss/read.h"
#include "cpu/row_loss/soft_targets.h"
#include "cpu/row_loss/tile.h"
#include "cpu/simd/dispatch.h"
#include "cpu/simd/transpose.h"
#include "cpu/simd/vector.h"
#include "kernels/row_loss.h"
#include "math/row_loss.h"

namespace focalkern::cpu {
namespace {

// Forward, the paths that need AVX-512.
template <typename Scalar>
void sums_of_four_rows(const RowLossArgs<Scalar>& args, int64_t row_begin, int64_t n_rows,
                       Tile<compute_t<Scalar>>& tile) {
#ifdef FK_HAS_AVX512_CODE
  if constexpr (std::is_same_v<Scalar, float>) {
    sums_of_four_rows(args.logits + args.layout.row_offset(row_begin), row_stride(args.layout, row_begin, n_rows),
                      args.classes, n_rows, tile);
  }
#endif
}

template <typename Loss, typename Scalar>
void sums_of_transposed_rows(const RowLossArgs<Scalar>& args, int64_t row_begin, int64_t n_rows,
                             Tile<compute_t<Scalar>>& tile) {
#ifdef FK_HAS_AVX512_CODE
  if constexpr (sizeof(Scalar) <= sizeof(float)) {
    sums_of_transposed_rows<Loss>(args.logits + args.layout.row_offset(row_begin),
                                  row_stride(args.layout, row_begin, n_rows), args.classes, n_rows, tile);
  }
#endif
}

template <typename Loss, typename Scalar>
void sums_along_classes(const RowLossArgs<Scalar>& args, int64_t row_begin, int64_t n_rows,
                        Tile<compute_t<Scalar>>& tile) {
  if (args.classes > kBlock) {
    sums_of_long_rows<Loss>(args, row_begin, n_rows, tile);
  } else if constexpr (kSumOnly<Loss>) {
    run_in_widest<SumOfRows>(args, row_begin, n_rows, tile);
  } else {
    run_in_widest<SumsOfRows<Loss>>(args, row_begin, n_rows, tile);
  }
}

template <typename Loss, typename Scalar>
RowLossSums forward_labels(const RowLossForward<Scalar>& args, int64_t row_begin, int64_t row_end) {
  using Real = compute_t<Scalar>;
  const bool columns = is_across_rows(args.layout, args.classes), avx512 = has_avx512();
  alignas(64) Real transposed[kFewClasses * kTileRows];
  Tile<Real> tile;
  if (!args.gamma) std::fill_n(tile.gamma, kTileRows, args.gamma_value);
  if (kIsFocal<Loss> && (!args.gamma || args.edges)) {
    tile.ever_inverse = args.edges ? any_inverse(args.gamma, args.n_bins) : any_inverse(&args.gamma_value, 1);
  }
  RowLossSums sums{0, 0, -1};
  for (int64_t row = row_begin, n; row < row_end; row += n) {
    n = tile_rows(args, columns, row, row_end);
    const int64_t invalid = read_rows(args, row, n, true, tile);
    if (invalid >= 0) {
      sums.invalid_row = invalid;
      return sums;
    }
    const RowPath path = plan_forward(args.layout, args.classes, sizeof(Scalar), kSumOnly<Loss>, avx512, row, n);
    switch (path) {
      case RowPath::kAcrossRows:
        run_in_widest<SumsOfColumns<Loss, false>>(args.logits + args.layout.row_offset(row), args.layout.class_stride,
                                                  args.classes, n, tile);
        break;
      case RowPath::kFourRows:
        sums_of_four_rows(args, row, n, tile);
        break;
      case RowPath::kTransposedRegisters:
        sums_of_transposed_rows<Loss>(args, row, n, tile);
        break;
      case RowPath::kTransposedTile:
        gather_tile(args, row, n, transposed);
        run_in_widest<SumsOfColumns<Loss, true>>(transposed, kTileRows, args.classes, n, tile);
        break;
      default:
        sums_along_classes<Loss>(args, row, n, tile);
        if constexpr (Loss::kSpecialClass == SpecialClass::kRunnerUp) {
          read_gaps<Loss>(args.logits, args.layout, row, n, tile);
        }
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

// Reads the logit of each row's target from a transposed tile.
struct TargetOfColumns {
  template <int64_t bytes, typename Real>
  static FK_HOST_DEVICE void run(const Real* z /* [classes, kTileRows] */, int64_t classes, int64_t n_rows,
                                 Tile<Real>& tile) {
    using Int = label_int<Real>;
    constexpr int64_t n = kLanesOf<bytes, Real>;
    for (int64_t row = 0; row < n_rows; row += n) {
      using Reals = simd_t<Real, n>;
      const auto label = load_simd<simd_t<Int, n>>(tile.label + row);
      const Real* column = z + row;
      Reals found{};
      simd_t<Int, n> this_class{};
      const Int n_classes = static_cast<Int>(classes);
#pragma GCC unroll 2
      for (Int c = 0; c < n_classes; ++c, column += kTileRows, this_class += 1) {
        found = label == this_class ? load_simd<Reals>(column) : found;
      }
      store_simd(found, tile.target_logit + row);
    }
  }
};

// Reads the targets' logits with gather instructions. Returns false if the layout does not allow it.
template <typename Scalar>
bool gather_targets_of(const RowLossArgs<Scalar>& args, int64_t row_begin, int64_t n_rows,
                       Tile<compute_t<Scalar>>& tile) {
#ifdef FK_HAS_AVX512_CODE
  if constexpr (sizeof(Scalar) <= sizeof(float)) {
    const int64_t stride = row_stride(args.layout, row_begin, n_rows), class_stride = args.layout.class_stride;
    const bool classes_are_near = class_stride > 0 && class_stride < kFarthest / args.classes;
    if (is_near(stride) && classes_are_near && n_rows >= kWideRows && has_avx512()) {
      gather_targets(args.logits + args.layout.row_offset(row_begin), stride, class_stride, n_rows, tile.label,
                     tile.target_logit);
      return true;
    }
  }
#endif
  return false;
}

// Reads the upstream gradient and, if needed, the logits of the targets, from `transposed` if that is not null.
template <typename Loss, typename Scalar>
void read_for_grad(const RowLossBackward<Scalar>& args, int64_t row_begin, int64_t n_rows, bool needed,
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
  if constexpr (Loss::kSpecialClass != SpecialClass::kNone) {
    const auto* marked = args.saved + 3 * args.rows + row_begin;
    const auto classes = static_cast<label_int<compute_t<Scalar>>>(args.classes);
    for (int64_t r = 0; r < n_rows; ++r) {
      // The caller may pass any `saved`: the special class must lie in the row.
      const auto c = number_as_class(marked[r]);
      tile.special[r] = c >= 0 && c < classes ? c : kNoTarget;
    }
  }
  if constexpr (Loss::kSpecialClass == SpecialClass::kRunnerUp)
    read_gaps<Loss>(args.logits, args.layout, row_begin, n_rows, tile);
  if (args.grad_stride == 0) return;
  const compute_t<Scalar> divisor = args.divisor ? *args.divisor : compute_t<Scalar>(1);
  for (int64_t r = 0; r < n_rows; ++r) tile.upstream[r] = args.grad_loss[(row_begin + r) * args.grad_stride] / divisor;
}

template <typename Loss, typename Scalar>
void finish_any_grad(const RowLossBackward<Scalar>& args, int64_t row_begin, int64_t n_rows,
                     Tile<compute_t<Scalar>>& tile) {
  const auto* saved = args.saved + row_begin;
  if (args.edges) {
    log_p_of_targets(saved, args.rows, n_rows, tile);
    look_up_gamma_of_log(tile.log_p, n_rows, args.edges, args.gamma, args.n_bins, tile.gamma);
  }
  if (args.grad_gamma) {
    finish_grad<Loss, true>(saved, args.rows, n_rows, args.epsilon, args.detach_modulation, tile);
    std::copy(tile.grad_gamma, tile.grad_gamma + n_rows, args.grad_gamma + row_begin);
  } else {
    finish_grad<Loss, false>(saved, args.rows, n_rows, args.epsilon, args.detach_modulation, tile);
  }
}

// The gradient of contiguous rows; there is no such loop for double.
template <typename Scalar, bool = sizeof(Scalar) <= sizeof(float)>
struct DenseGradient {
  void prepare(int64_t /*classes*/) {}
  template <typename Loss>
  void run(const RowLossBackward<Scalar>&, int64_t, int64_t, const Tile<compute_t<Scalar>>&) const {}
};
#ifdef FK_HAS_AVX512_CODE
template <typename Scalar>
struct DenseGradient<Scalar, true> {
  DenseRows<sizeof(Scalar) == 2>& dense = dense_rows_of_this_thread<sizeof(Scalar) == 2>();
  void prepare(int64_t classes) { dense.prepare(classes); }
  template <typename Loss>
  void run(const RowLossBackward<Scalar>& args, int64_t row_begin, int64_t n_rows, const Tile<float>& tile) const {
    grad_of_dense_rows<Loss>(args.logits + args.layout.row_offset(row_begin), args.classes, n_rows, dense, tile,
                             args.grad_logits + args.grad_layout.row_offset(row_begin));
  }
};
#endif

template <typename Loss, typename Scalar>
void backward_labels(const RowLossBackward<Scalar>& args, int64_t row_begin, int64_t row_end) {
  using Real = compute_t<Scalar>;
  const RowPath whole_tiles =
      plan_backward(args.layout, args.grad_layout, args.rows, args.classes, sizeof(Scalar), has_avx512());
  const RowPath rest = plan_backward_rest(args.layout, args.grad_layout, args.classes);
  const bool columns = rest == RowPath::kAcrossRows;
  // On the stack if it fits: an allocation would take a tenth of the time of a small batch.
  alignas(64) Real small[2 * kFewClasses * kTileRows];
  std::unique_ptr<Real[]> large;
  if (rest == RowPath::kTransposedTile && args.classes > kFewClasses)
    large.reset(new Real[2 * args.classes * kTileRows]);
  Real* transposed = large ? large.get() : small;
  Real* grad_transposed = transposed + args.classes * kTileRows;
  DenseGradient<Scalar> dense_gradient;
  if (whole_tiles == RowPath::kDenseRows) dense_gradient.prepare(args.classes);
  // the focal loss saved everything else in the forward pass
  const bool needs_more = !kIsFocal<Loss> || args.grad_gamma;
  Tile<Real> tile;
  if (!args.gamma) std::fill_n(tile.gamma, kTileRows, args.gamma_value);
  if (args.grad_stride == 0) {
    std::fill_n(tile.upstream, kTileRows, args.grad_loss[0] / (args.divisor ? *args.divisor : Real(1)));
  }
  for (int64_t row = row_begin, n; row < row_end; row += n) {
    n = tile_rows(args, columns, row, row_end);
    read_rows(args, row, n, needs_more, tile);
    const RowPath path = n >= kWideRows ? whole_tiles : rest;
    const bool through_tile = args.grad_logits && path == RowPath::kTransposedTile;
    if (through_tile) gather_tile(args, row, n, transposed);
    read_for_grad<Loss>(args, row, n, needs_more, through_tile ? transposed : nullptr, tile);
    if constexpr (kIsFocal<Loss>) {
      finish_focal_grad(args, row, n, tile);
    } else {
      finish_any_grad<Loss>(args, row, n, tile);
    }
    if (!args.grad_logits) continue;
    switch (path) {
      case RowPath::kAcrossRows:
        run_in_widest<GradOfColumns<Loss, false>>(
            args.logits + args.layout.row_offset(row), args.layout.class_stride, args.classes, n, tile,
            args.grad_logits + args.grad_layout.row_offset(row), args.grad_layout.class_stride);
        break;
      case RowPath::kDenseRows:
        dense_gradient.template run<Loss>(args, row, n, tile);
        break;
      case RowPath::kTransposedTile:
        run_in_widest<GradOfColumns<Loss, true>>(transposed, kTileRows, args.classes, n, tile, grad_transposed,
                                                 kTileRows);
        scatter_tile(args, row, n, grad_transposed);
        break;
      default:
        run_in_widest<GradOfRows<Loss>>(args, row, n, tile);
    }
  }
}

template <typename Scalar>
bool is_soft(const RowLossArgs<Scalar>& args) {
  return args.target_probs || args.label_smoothing != 0;
}

}  // namespace

template <typename Loss, typename Scalar>
RowLossSums row_loss_forward(const RowLossForward<Scalar>& args, int64_t row_begin, int64_t row_end) {
  if constexpr (Loss::kTarget != SoftTarget::kNone) {
    if (is_soft(args)) return forward_soft<Loss>(args, row_begin, row_end);
  }
  return forward_labels<Loss>(args, row_begin, row_end);
}

template <typename Loss, typename Scalar>
void row_loss_backward(const RowLossBackward<Scalar>& args, int64_t row_begin, int64_t row_end) {
  if constexpr (Loss::kTarget != SoftTarget::kNone) {
    if (is_soft(args)) return backward_soft<Loss>(args, row_begin, row_end);
  }
  backward_labels<Loss>(args, row_begin, row_end);
}

#define FK_ROW_LOSS_INSTANCE(Loss, Scalar)                                                              \
  template RowLossSums row_loss_forward<Loss, Scalar>(const RowLossForward<Scalar>&, int64_t, int64_t); \
  template void row_loss_backward<Loss, Scalar>(const RowLossBackward<Scalar>&, int64_t, int64_t);
#define FK_ROW_LOSS_INSTANCES(Loss)    \
  FK_ROW_LOSS_INSTANCE(Loss, Half)     \
  FK_ROW_LOSS_INSTANCE(Loss, BFloat16) \
  FK_ROW_LOSS_INSTANCE(Loss, float)    \
  FK_ROW_LOSS_INSTANCE(Loss, double)

}  // namespace focalkern::cpu
