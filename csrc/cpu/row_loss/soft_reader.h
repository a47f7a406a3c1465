// Reads the rows of a loss with soft targets (soft_targets.h).
#pragma once

#include <algorithm>
#include <limits>
#include <memory>
#include <type_traits>

#include "cpu/row_loss/read.h"
#include "cpu/row_loss/soft_targets_across.h"
#include "cpu/row_loss/soft_targets_along.h"
#include "cpu/row_loss/soft_targets_lanes.h"
#include "cpu/row_loss/soft_targets_tile.h"

namespace focalkern::cpu {
namespace {

// Reads logits and targets of a chunk of rows, and copies them where their layout or dtype requires it.
template <typename Loss, typename Scalar>
class SoftReader {
 public:
  using Real = compute_t<Scalar>;
  static constexpr bool kIsDirect = std::is_same_v<Scalar, Real>;

  const RowLossArgs<Scalar>& args;
  const bool is_columns_of_memory = is_across_rows(args.layout, args.classes);
  const bool across = is_columns_of_memory || args.classes <= kFewClasses;  // vectors run across rows
  const bool uniform = !args.target_probs && !(Loss::kTarget == SoftTarget::kClasses && args.class_weight);
  SoftShares<Real> shares;
  GammaTableOf<Real> table{args.edges, args.gamma, args.n_bins};
  Real uniform_share;
  int64_t rows_per_tile = kTileRows;  // at most
  SoftTile<Real> tile;
  SoftRows<Real> rows;
  SoftColumns<Real> columns;

  explicit SoftReader(const RowLossArgs<Scalar>& given) : args(given) {
    const bool weighs_classes = Loss::kTarget == SoftTarget::kClasses && args.class_weight;
    shares = {Real(1) - args.label_smoothing, args.label_smoothing / static_cast<Real>(args.classes),
              weighs_classes ? args.class_weight : constants<Real>().ones, weighs_classes ? 1 : 0};
    uniform_share = uniform && !kLabelApart<Loss> ? shares.spread : Real(1);
    tile.has_labels = !args.target_probs;
    if (!args.gamma) std::fill_n(tile.gamma, kTileRows, args.gamma_value);
    rows.classes = columns.classes = args.classes;
    if (!across) {
      // as many rows as fit the first-level cache; the epilogue computes sixteen rows at once
      const int64_t most = std::clamp<int64_t>(kBlock / args.classes, 1, kTileRows);
      rows_per_tile = most < 16 ? most : most & -16;
      std::fill_n(rows.e, rows_per_tile, nullptr);
      std::fill_n(rows.grad, rows_per_tile, nullptr);
      std::fill_n(rows.grad_target, rows_per_tile, nullptr);
    }
  }

  int64_t count(int64_t row, int64_t row_end) const {
    const int64_t n = tile_rows(args, is_columns_of_memory, row, row_end);
    return std::min(n, rows_per_tile);
  }

  // Reads labels, gammas and pointers of a tile. Returns the first row whose label is out of range, or -1.
  int64_t read(int64_t row, int64_t n) {
    if (args.target_probs) {
      std::fill_n(tile.label, kTileRows, label_int<Real>(kNoTarget));
      std::fill_n(tile.weight, kTileRows, Real(1));
      if (args.gamma && !args.edges) {
        read_gammas(args.gamma + row * args.gamma_stride, args.gamma_stride, n, static_cast<Tile<Real>&>(tile));
      }
    } else {
      const int64_t invalid = read_rows(args, row, n, true, static_cast<Tile<Real>&>(tile));
      if (invalid >= 0) return invalid;
    }
    whole_gamma_ = -1;
    if (!args.edges && Loss::kHasGamma) {
      const Real first = tile.gamma[0];
      bool all = first == Real(0) || first == Real(1) || first == Real(2) || first == Real(3);
      for (int64_t r = 1; all && r < n && args.gamma_stride != 0; ++r) all = tile.gamma[r] == first;
      if (all) whole_gamma_ = static_cast<int>(first);
    }
    across ? read_columns(row, n) : read_rows_of_classes(row, n);
    read_target_logits(n);
    read_weights(n);
    return -1;
  }

  Real target(int64_t r, int64_t c) const {
    return across ? columns.target[c * columns.target_stride + r] : rows.target[r][c];
  }

  void find_largest(int64_t n) {
    if (across) return run_in_widest<LargestOfColumns>(columns, padded_, tile);
    if (args.classes < 2 * kBlock && !exponentials) {
      const int64_t stride = (args.classes + 15) & -16;  // whole vectors of the widest kind
      exponentials.reset(new Real[rows_per_tile * stride]);
      for (int64_t r = 0; r < rows_per_tile; ++r) rows.e[r] = exponentials.get() + r * stride;
    }
    run_in_widest<LargestOfRows>(rows, n, tile);
  }

  // Finds the likely classes across rows, if find_largest has not found the largest ones.
  void find_likely() {
    if (!uniform && across) run_in_widest<LikelyOfColumns>(columns, padded_, tile);
  }

  // Reads the target share of the likely class, for each row that has one.
  void read_top_shares(int64_t n) {
    if (!uniform && !across) {
      run_in_widest<LikelyOfRows>(rows, n, tile);
      if (!tile.has_labels) return;
    }
    if (tile.has_labels) {
      soft_label_is_top(n, tile);
    } else {
      for (int64_t r = 0; r < n; ++r) tile.top_share[r] = target(r, tile.special[r]);
    }
    if (shares.weight_step == 0) return soft_shares(n, shares, tile);
    for (int64_t r = 0; r < n; ++r) {
      tile.top_share[r] = (shares.kept * tile.top_share[r] + shares.spread) * shares.weight[tile.special[r]];
    }
  }

  // Calls f with the type of this tile's gammas.
  template <typename Function>
  void with_gammas(Function f) const {
    if constexpr (!Loss::kHasGamma) {
      f(WholeGammas<0>());
    } else if constexpr (std::is_same_v<Real, double>) {
      whole_gamma_ == 0 ? f(WholeGammas<0>()) : whole_gamma_ == 2 ? f(WholeGammas<2>()) : f(AnyGammas());
    } else {
      switch (whole_gamma_) {
        case 0:
          return f(WholeGammas<0>());
        case 1:
          return f(WholeGammas<1>());
        case 2:
          return f(WholeGammas<2>());
        case 3:
          return f(WholeGammas<3>());
        default:
          return f(AnyGammas());
      }
    }
  }

  template <bool kGamma, typename Gammas>
  void add_classes(int64_t n, Gammas) {
    uniform ? add_with_shares<true, kGamma, Gammas>(n) : add_with_shares<false, kGamma, Gammas>(n);
  }
  template <typename Gammas>
  void grad_of_classes(int64_t n, Gammas) {
    if (uniform) {
      grad_with_shares<true, Gammas>(n);
    } else {
      grad_with_shares<false, Gammas>(n);
    }
  }

  std::unique_ptr<Real[]> memory_of_logits, memory_of_targets, memory_of_grads, memory_of_target_grads;
  std::unique_ptr<Real[]> memory_of_shares;
  std::unique_ptr<Real[]> exponentials;  // of a tile along classes: count(row, row_end) rows

  // Scratch memory for a tile that must be copied.
  Real* scratch(std::unique_ptr<Real[]>& memory) const {
    if (!memory) memory.reset(new Real[args.classes * rows_per_tile]());
    return memory.get();
  }

 private:
  int whole_gamma_ = -1;
  int64_t padded_ = 0;

  void read_columns(int64_t row, int64_t n) {
    const bool direct = kIsDirect && is_columns_of_memory && n >= kLanes<Real>;
    padded_ = direct ? n : (n + kLanes<Real> - 1) & -kLanes<Real>;
    if constexpr (kIsDirect) {
      if (direct) columns.z = args.logits + args.layout.row_offset(row);
    }
    columns.stride = args.layout.class_stride;
    if (!direct) {
      gather_columns(args.logits, args.layout, args.classes, row, n, scratch(memory_of_logits));
      columns.z = memory_of_logits.get();
      columns.stride = kTileRows;
    }
    const RowLayout& layout = args.target_layout;
    columns.target = constants<Real>().zeros;
    columns.target_stride = 0;
    if (args.target_probs && direct && layout.inner == args.layout.inner && layout.inner_stride == 1) {
      columns.target = static_cast<const Real*>(args.target_probs.data) + layout.row_offset(row);
      columns.target_stride = layout.class_stride;
    } else if (args.target_probs) {
      args.target_probs.typed([&](const auto* probabilities) {
        gather_columns(probabilities, layout, args.classes, row, n, scratch(memory_of_targets));
      });
      columns.target = memory_of_targets.get();
      columns.target_stride = kTileRows;
    }
  }

  template <typename Number>
  const Real* copy_of_row(const Number* from, const RowLayout& layout, std::unique_ptr<Real[]>& memory, int64_t r) {
    Real* to = scratch(memory) + r * args.classes;
    if (layout.class_stride == 1) {
      copy_row(from, args.classes, to);
    } else {
      for (int64_t c = 0; c < args.classes; ++c) to[c] = load_as_compute(from[c * layout.class_stride]);
    }
    return to;
  }
  template <typename Number>
  static FK_VECTOR_CLONES void copy_row(const Number* from, int64_t n, Real* to) {
#pragma omp simd
    for (int64_t c = 0; c < n; ++c) to[c] = load_as_compute(from[c]);
  }

  // Pointers to rows, which are copied to `memory` if their layout or dtype requires it.
  template <typename Number>
  void point_to_rows(const Number* from, const RowLayout& layout, int64_t row, int64_t n,
                     std::unique_ptr<Real[]>& memory, const Real** to) {
    if constexpr (std::is_same_v<Number, Real>) {
      if (layout.class_stride == 1) return pointers_of_rows(from, layout, row, n, to);
    }
    RowCursor at(layout, row);
    for (int64_t r = 0; r < n; ++r, at.next()) to[r] = copy_of_row(from + at.offset(), layout, memory, r);
  }

  void read_rows_of_classes(int64_t row, int64_t n) {
    point_to_rows(args.logits, args.layout, row, n, memory_of_logits, rows.z);
    if (args.target_probs) {
      args.target_probs.typed([&](const auto* probabilities) {
        point_to_rows(probabilities, args.target_layout, row, n, memory_of_targets, rows.target);
      });
    }
    if (!uniform) share_rows(n);
  }

  // The shares of the classes: the probabilities themselves, or (kept target + spread) weight in scratch memory.
  void share_rows(int64_t n) {
    if (tile.has_labels) {
      if (!memory_of_shares) {
        memory_of_shares.reset(new Real[args.classes]);
        for (int64_t c = 0; c < args.classes; ++c) memory_of_shares[c] = shares.spread * args.class_weight[c];
      }
      std::fill_n(rows.share, n, memory_of_shares.get());
    } else if (args.label_smoothing == 0 && shares.weight_step == 0) {
      std::copy_n(rows.target, n, rows.share);
    } else {
      if (!memory_of_shares) memory_of_shares.reset(new Real[args.classes * rows_per_tile]);
      Real* to = memory_of_shares.get();
      for (int64_t r = 0; r < n; ++r) rows.share[r] = to + r * args.classes;
      run_in_widest<SharesOfRows>(rows, n, shares, to);
    }
  }

  // tile.label_share: the share of the label minus the share of every other class. tile.row_weight: the factor of the
  // row's loss.
  void read_weights(int64_t n) {
    constexpr bool kOfRows = Loss::kTarget == SoftTarget::kRows;
    std::fill_n(tile.label_share, kTileRows, kOfRows ? shares.kept + shares.spread : shares.kept);
    std::fill_n(tile.row_weight, kTileRows, Real(1));
    if (!args.class_weight) return;
    for (int64_t r = 0; r < n; ++r) {
      if (tile.has_labels) {
        (kOfRows ? tile.row_weight[r] : tile.label_share[r]) *= tile.weight[r];
      } else if (kOfRows) {
        double mean = 0;
        for (int64_t c = 0; c < args.classes; ++c) {
          mean += static_cast<double>(args.class_weight[c]) * static_cast<double>(target(r, c));
        }
        tile.row_weight[r] = static_cast<Real>(mean);
      }
    }
  }

  void read_target_logits(int64_t n) {
    if (!tile.has_labels) {
      std::fill_n(tile.target_logit, kTileRows, Real(0));
    } else if (across) {
      soft_logits_of_columns(columns, n, tile);
    } else {
      for (int64_t r = 0; r < n; ++r) tile.target_logit[r] = rows.z[r][std::max<int64_t>(tile.label[r], 0)];
    }
  }

  template <bool kUniform, bool kGamma, typename Gammas>
  void add_with_shares(int64_t n) {
    if (across) {
      run_in_widest<SoftSumsOfColumns<Loss, Gammas, kUniform, kGamma>>(columns, padded_, shares, args.epsilon,
                                                                       args.detach_modulation, table, tile);
    } else {
      run_in_widest<SoftSumsOfRows<Loss, Gammas, kUniform, kGamma>>(rows, n, shares, args.epsilon,
                                                                    args.detach_modulation, table, tile);
    }
  }
  template <bool kUniform, typename Gammas>
  void grad_with_shares(int64_t n) {
    const Real* weight = args.class_weight ? args.class_weight : constants<Real>().ones;
    const int64_t step = args.class_weight ? 1 : 0;
    if (across) {
      run_in_widest<SoftGradOfColumns<Loss, Gammas, kUniform>>(columns, padded_, shares, args.epsilon,
                                                               args.detach_modulation, table, weight, step, tile);
    } else {
      const auto run = [&](auto with_target) {
        run_in_widest<SoftGradOfRows<Loss, Gammas, kUniform, decltype(with_target)::value>>(
            rows, n, shares, args.epsilon, args.detach_modulation, table, weight, step, tile);
      };
      if constexpr (!kUniform) {
        if (rows.grad_target[0]) return run(std::true_type());
      }
      run(std::false_type());
    }
  }
};

}  // namespace
}  // namespace focalkern::cpu
