// Soft targets and label smoothing.
//
//   t = (1 - e) target + e / C,   dL/dz_j = p_j A - a_j,  A = sum_i a_i,  a_i = -p_i dL/dp_i
//   focal: L = -sum_i w_i t_i f(p_i) log p_i,  a = w t c(p)
//
// The forward pass reads a row three times while it is in a cache: for the largest logit m, for the sum of
// exponentials, and for the terms of the classes; rows of fewer than 2 kBlock classes keep their exponentials for the
// terms. It saves [3 or 4, rows] = (m, rest, others): rest is the sum of e^(z_j - m) over all classes but the largest,
// and others is the sum of a_j over all classes except one above kUnlikely. The backward pass then reads a row once and
// writes its gradient. Vectors run along the classes of a row, or across rows if classes are few or rows adjacent
// (soft_targets_across.h). Half-precision logits are first copied to float.
#pragma once

#include <algorithm>
#include <type_traits>

#include "cpu/row_loss/read.h"
#include "cpu/row_loss/soft_reader.h"
#include "cpu/row_loss/soft_targets_tile.h"

namespace focalkern::cpu {
namespace {

template <typename Loss, typename Scalar, typename Gammas>
void soft_rows(const RowLossArgs<Scalar>& args, int64_t n_rows, Gammas, compute_t<Scalar> uniform_share,
               SoftTile<compute_t<Scalar>>& tile) {
  if (tile.has_labels) soft_labels<Loss, Gammas>(n_rows, args.epsilon, args.detach_modulation, tile);
  soft_losses<Loss, Gammas>(n_rows, args.epsilon, args.detach_modulation, uniform_share, tile);
}

template <typename Loss, typename Scalar>
RowLossSums forward_soft(const RowLossForward<Scalar>& args, int64_t row_begin, int64_t row_end) {
  using Real = compute_t<Scalar>;
  SoftReader<Loss, Scalar> reader(args);
  auto& tile = reader.tile;
  RowLossSums sums{0, 0, -1};
  for (int64_t row = row_begin, n; row < row_end; row += n) {
    n = reader.count(row, row_end);
    const int64_t invalid = reader.read(row, n);
    if (invalid >= 0) {
      sums.invalid_row = invalid;
      return sums;
    }
    reader.find_largest(n);
    const int64_t whole = whole_vectors(n);
    soft_numbers(whole, tile);
    soft_gammas(args, n, tile);
    reader.with_gammas([&](auto gammas) { reader.template add_classes<false>(n, gammas); });
    reader.read_top_shares(n);
    reader.with_gammas([&](auto gammas) { soft_rows<Loss>(args, whole, gammas, reader.uniform_share, tile); });
    soft_saved(n, args.saved + row, args.rows, tile);
    if constexpr (Loss::kSpecialClass != SpecialClass::kNone) std::fill_n(args.saved + 3 * args.rows + row, n, Real(0));
    if (args.row_loss) std::copy_n(tile.loss, n, args.row_loss + row);
    for (int64_t r = 0; r < n; ++r) {
      sums.loss += static_cast<double>(tile.loss[r]);
      sums.weight += static_cast<double>(tile.weight[r]);
    }
  }
  return sums;
}

template <typename Loss, typename Scalar>
void backward_soft(const RowLossBackward<Scalar>& args, int64_t row_begin, int64_t row_end) {
  using Real = compute_t<Scalar>;
  SoftReader<Loss, Scalar> reader(args);
  auto& tile = reader.tile;
  const bool needs_loss = kLabelApart<Loss> && args.grad_target && args.class_weight;
  const Real divisor = args.divisor ? *args.divisor : Real(1);
  const Real kept = reader.shares.kept, spread_share = reader.shares.spread;
  for (int64_t row = row_begin, n; row < row_end; row += n) {
    n = reader.count(row, row_end);
    reader.read(row, n);
    const int64_t whole = whole_vectors(n);
    std::copy_n(args.saved + row, n, tile.shift);
    std::copy_n(args.saved + args.rows + row, n, tile.sum_exp_others);
    std::fill_n(tile.gamma_sum, kTileRows, Real(0));
    if (args.grad_stride == 0) {
      std::fill_n(tile.upstream, kTileRows, args.grad_loss[0] / divisor);
    } else {
      for (int64_t r = 0; r < n; ++r) tile.upstream[r] = args.grad_loss[(row + r) * args.grad_stride] / divisor;
    }
    soft_zeros(whole, tile);
    soft_numbers(whole, tile);
    soft_gammas(args, n, tile);
    reader.find_likely();
    reader.read_top_shares(n);
    if (args.grad_gamma && Loss::kHasGamma) reader.template add_classes<true>(n, AnyGammas());
    if (needs_loss) {
      reader.with_gammas([&](auto gammas) { reader.template add_classes<false>(n, gammas); });
      reader.with_gammas([&](auto gammas) { soft_rows<Loss>(args, whole, gammas, reader.uniform_share, tile); });
      for (int64_t r = 0; r < n; ++r) tile.weight_grad[r] = tile.upstream[r] * tile.loss[r];
    } else {
      std::fill_n(tile.weight_grad, kTileRows, Real(0));
    }
    std::copy_n(args.saved + 2 * args.rows + row, n, tile.others);
    if (!kLabelApart<Loss>) {
      std::fill_n(tile.label_share, kTileRows, kept + spread_share);
      if (args.class_weight && tile.has_labels) {
        for (int64_t r = 0; r < n; ++r) tile.label_share[r] *= tile.weight[r];
      }
    }
    const auto finish = [&](auto gammas) {
      if (tile.has_labels) {
        soft_labels<Loss, decltype(gammas)>(whole, args.epsilon, args.detach_modulation, tile);
      }
      soft_grads<Loss, decltype(gammas)>(whole, args.epsilon, args.detach_modulation, reader.uniform_share,
                                         kept / (kept + spread_share), kept, tile);
    };
    args.grad_gamma&& Loss::kHasGamma ? finish(AnyGammas()) : reader.with_gammas(finish);
    if (args.grad_gamma) {
      for (int64_t r = 0; r < n; ++r) args.grad_gamma[row + r] = tile.is_zero[r] != 0 ? Real(0) : tile.grad_gamma[r];
    }
    if (!args.grad_logits && !args.grad_target) continue;
    write_soft_grads<Loss>(args, row, n, reader);
  }
}

template <typename Real, typename Number>
FK_VECTOR_CLONES void store_row(const Real* from, int64_t n, Number* to) {
#pragma omp simd
  for (int64_t c = 0; c < n; ++c) to[c] = Store<Number>::from_compute(from[c]);
}

// Writes the gradients of a tile, directly or through scratch memory in the layout of the loops.
template <typename Loss, typename Scalar>
void write_soft_grads(const RowLossBackward<Scalar>& args, int64_t row, int64_t n, SoftReader<Loss, Scalar>& reader) {
  using Real = compute_t<Scalar>;
  const auto run = [&] { reader.with_gammas([&](auto gammas) { reader.grad_of_classes(n, gammas); }); };
  if (reader.across) {
    auto& columns = reader.columns;
    const bool direct = columns.stride != kTileRows || reader.memory_of_logits == nullptr;
    const bool same = args.grad_layout.inner == args.layout.inner && args.grad_layout.inner_stride == 1 &&
                      args.grad_layout.class_stride != 1;
    bool in_place = false;
    columns.grad = columns.grad_target = nullptr;
    if constexpr (SoftReader<Loss, Scalar>::kIsDirect) {
      in_place = args.grad_logits && direct && same && columns.z != reader.memory_of_logits.get();
      if (in_place) {
        columns.grad = args.grad_logits + args.grad_layout.row_offset(row);
        columns.grad_stride = args.grad_layout.class_stride;
      }
    }
    if (args.grad_logits && !in_place) {
      columns.grad = reader.scratch(reader.memory_of_grads);
      columns.grad_stride = kTileRows;
    }
    const bool target_in_place = args.grad_target && columns.target != reader.memory_of_targets.get();
    if (args.grad_target) {
      columns.grad_target = target_in_place ? args.grad_target + args.target_layout.row_offset(row)
                                            : reader.scratch(reader.memory_of_target_grads);
    }
    run();
    if (args.grad_logits && !in_place) {
      scatter_columns(columns.grad, args.classes, row, n, args.grad_layout, args.grad_logits);
    }
    if (args.grad_target && !target_in_place) {
      scatter_columns(columns.grad_target, args.classes, row, n, args.target_layout, args.grad_target);
    }
    return;
  }
  auto& rows = reader.rows;
  // A missing gradient has no layout; that of its input serves, as it has the same number of rows.
  const RowLayout& grad_layout = args.grad_logits ? args.grad_layout : args.layout;
  const RowLayout& target_layout = args.grad_target ? args.target_layout : args.layout;
  const bool target_in_place = target_layout.class_stride == 1;
  const bool in_place = SoftReader<Loss, Scalar>::kIsDirect && grad_layout.class_stride == 1;
  if constexpr (SoftReader<Loss, Scalar>::kIsDirect) {
    if (args.grad_logits && in_place) pointers_of_rows(args.grad_logits, grad_layout, row, n, rows.grad);
  }
  if (args.grad_logits && !in_place) {
    Real* to = reader.scratch(reader.memory_of_grads);
    for (int64_t r = 0; r < n; ++r) rows.grad[r] = to + r * args.classes;
  }
  if (args.grad_target && target_in_place) {
    pointers_of_rows(args.grad_target, target_layout, row, n, rows.grad_target);
  } else if (args.grad_target) {
    Real* to = reader.scratch(reader.memory_of_target_grads);
    for (int64_t r = 0; r < n; ++r) rows.grad_target[r] = to + r * args.classes;
  }
  run();
  if ((!args.grad_logits || in_place) && (!args.grad_target || target_in_place)) return;
  RowCursor at(grad_layout, row), target_at(target_layout, row);
  for (int64_t r = 0; r < n; ++r, at.next()) {
    if (args.grad_logits && !in_place) {
      Scalar* to = args.grad_logits + at.offset();
      const int64_t stride = grad_layout.class_stride;
      if (stride == 1) {
        store_row(rows.grad[r], args.classes, to);
      } else {
        for (int64_t c = 0; c < args.classes; ++c) to[c * stride] = Store<Scalar>::from_compute(rows.grad[r][c]);
      }
    }
    if (args.grad_target) {
      if (!target_in_place) {
        Real* to = args.grad_target + target_at.offset();
        for (int64_t c = 0; c < args.classes; ++c) to[c * target_layout.class_stride] = rows.grad_target[r][c];
      }
      target_at.next();
    }
  }
}

}  // namespace
}  // namespace focalkern::cpu
