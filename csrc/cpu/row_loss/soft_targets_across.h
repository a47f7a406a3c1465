// Loops over the classes of adjacent rows with soft targets: sums, and the gradient.
#pragma once

#include <algorithm>
#include <limits>

#include "cpu/row_loss/across_rows_lanes.h"
#include "cpu/row_loss/soft_targets_lanes.h"
#include "cpu/row_loss/tile.h"
#include "cpu/simd/dispatch.h"
#include "cpu/simd/math.h"
#include "cpu/simd/vector.h"
#include "math/row_loss.h"

namespace focalkern::cpu {
namespace {

// Classes of adjacent rows, each `stride` from the one before.
template <typename Real>
struct SoftColumns {
  int64_t classes;
  const Real* z;
  int64_t stride;
  const Real* target;  // constants have stride 0
  int64_t target_stride;
  Real* grad;  // or null
  int64_t grad_stride;
  Real* grad_target;  // or null
};

struct LargestIsLeftOut {
  static constexpr bool kSumExcludesTop = true;
  static constexpr bool kSquares = false;
  static constexpr SpecialClass kSpecialClass = SpecialClass::kLargest;
};

struct LargestOfColumns {
  template <int64_t bytes, typename Real>
  static FK_HOST_DEVICE void run(const SoftColumns<Real>& columns, int64_t n_rows, SoftTile<Real>& tile) {
    constexpr int64_t n = kLanesOf<bytes, Real>;
    using Lanes = SumsOfLanes<LargestIsLeftOut, Real, n>;
    using Reals = simd_t<Real, n>;
    for (int64_t row = 0; row < n_rows; row += n) {
      const int64_t r = std::min(row, n_rows - n);
      Lanes sums(tile, r);
      const Real* z = columns.z + r;
      for (int64_t c = 0; c < columns.classes; ++c) {
        sums.look(load_simd<Reals>(z + c * columns.stride), static_cast<typename Lanes::Int>(c));
      }
      CompensatedSum<Reals> rest;
      for (int64_t c = 0; c < columns.classes;) {
        const int64_t stop = std::min(columns.classes, c + kSoftPart);
        for (; c < stop; ++c) sums.add(load_simd<Reals>(z + c * columns.stride));
        rest.add(sums.rest);
        sums.rest = Reals{};
      }
      sums.rest = rest.sum;
      sums.store(tile, r);
    }
  }
};

// The index of the likely class of each row, 0 without one.
struct LikelyOfColumns {
  template <int64_t bytes, typename Real>
  static FK_HOST_DEVICE void run(const SoftColumns<Real>& columns, int64_t n_rows, SoftTile<Real>& tile) {
    constexpr int64_t n = kLanesOf<bytes, Real>;
    using Reals = simd_t<Real, n>;
    using Ints = simd_t<label_int<Real>, n>;
    for (int64_t row = 0; row < n_rows; row += n) {
      const int64_t r = std::min(row, n_rows - n);
      const Reals likely = load_simd<Reals>(tile.likely + r);
      Ints found{}, index{};
      for (int64_t c = 0; c < columns.classes; ++c, index += 1) {
        found = load_simd<Reals>(columns.z + c * columns.stride + r) == likely ? index : found;
      }
      store_simd(found, tile.special + r);
    }
  }
};

template <int64_t n, typename Real>
FK_HOST_DEVICE simd_t<Real, n> share_of_columns(const SoftColumns<Real>& columns, const SoftShares<Real>& shares,
                                                int64_t c, int64_t r) {
  using Reals = simd_t<Real, n>;
  const Reals target = load_simd<Reals>(columns.target + c * columns.target_stride + r);
  return (shares.kept * target + shares.spread) * shares.weight[c * shares.weight_step];
}

template <typename Loss, typename Gammas, bool kUniform, bool kGamma>
struct SoftSumsOfColumns {
  template <int64_t bytes, typename Real>
  static FK_HOST_DEVICE void run(const SoftColumns<Real>& columns, int64_t n_rows, const SoftShares<Real>& shares,
                                 Real epsilon, bool detached, const GammaTableOf<Real>& table, SoftTile<Real>& tile) {
    constexpr int64_t n = kLanesOf<bytes, Real>;
    using Reals = simd_t<Real, n>;
    using Int = label_int<Real>;
    using Ints = simd_t<Int, n>;
    using Doubles = simd_t<double, n>;
    const auto fold = [](const Reals& v) { return __builtin_convertvector(v, Doubles); };
    const Reals one_share = spread<Reals>(kLabelApart<Loss> ? shares.spread : Real(1));
    for (int64_t row = 0; row < n_rows; row += n) {
      const int64_t r = std::min(row, n_rows - n);
      const auto lanes = lanes_of_rows<Loss, Gammas, n>(tile, r, epsilon, detached, table);
      [[maybe_unused]] const Ints label = load_simd<Ints>(tile.label + r);
      [[maybe_unused]] Ints index{};
      SoftSums<kGamma, Reals, Doubles> sums;
      for (int64_t c = 0; c < columns.classes;) {
        const int64_t stop = std::min(columns.classes, c + 2 * kSoftPart);
        for (; c < stop; ++c) {
          const Reals v = load_simd<Reals>(columns.z + c * columns.stride + r);
          const Reals share = kUniform ? one_share : share_of_columns<n>(columns, shares, c, r);
          ClassTerms<Reals> terms = lanes.at(v, share).terms;
          if constexpr (!kUniform && !kLabelApart<Loss>) {
            sums.add(terms, Reals(v != lanes.likely ? share : Reals{}));
          } else {
            leave_out(v == lanes.likely, terms);
            if constexpr (kUniform && kLabelApart<Loss>) {
              leave_out_by_bits(index == label, terms);
              index += Int(1);
            }
            sums.add(terms);
          }
        }
        sums.flush(fold);
      }
      store_simd(__builtin_convertvector(sums.all_loss, Reals), tile.loss_sum + r);
      store_simd(__builtin_convertvector(sums.all_grad, Reals), tile.grad_sum + r);
      if constexpr (kGamma) store_simd(__builtin_convertvector(sums.all_gamma, Reals), tile.gamma_sum + r);
    }
  }
};

template <typename Loss, typename Gammas, bool kUniform>
struct SoftGradOfColumns {
  template <int64_t bytes, typename Real>
  static FK_HOST_DEVICE void run(const SoftColumns<Real>& columns, int64_t n_rows, const SoftShares<Real>& shares,
                                 Real epsilon, bool detached, const GammaTableOf<Real>& table, const Real* class_weight,
                                 int64_t class_weight_step, SoftTile<Real>& tile) {
    constexpr int64_t n = kLanesOf<bytes, Real>;
    using Reals = simd_t<Real, n>;
    using Int = label_int<Real>;
    using Ints = simd_t<Int, n>;
    const Reals one_share = spread<Reals>(kLabelApart<Loss> ? shares.spread : Real(1));
    for (int64_t row = 0; row < n_rows; row += n) {
      const int64_t r = std::min(row, n_rows - n);
      const auto lanes = lanes_of_rows<Loss, Gammas, n>(tile, r, epsilon, detached, table);
      const Reals p_factor = load_simd<Reals>(tile.p_factor + r);
      const Reals share_factor = load_simd<Reals>(tile.share_factor + r);
      const Reals top_grad = load_simd<Reals>(tile.top_grad + r), label_grad = load_simd<Reals>(tile.label_grad + r);
      const Reals is_zero = load_simd<Reals>(tile.is_zero + r);
      const Ints label = load_simd<Ints>(tile.label + r);
      Ints index{};
      for (int64_t c = 0; c < columns.classes; ++c, index += Int(1)) {
        const Reals v = load_simd<Reals>(columns.z + c * columns.stride + r);
        const Reals share = kUniform ? one_share : share_of_columns<n>(columns, shares, c, r);
        const auto of_class = lanes.at(v, share);
        if (columns.grad) {
          const Reals slope = kUniform || kLabelApart<Loss> ? of_class.terms.slope : share * of_class.terms.slope;
          Reals value = of_class.e * p_factor - slope * share_factor;
          value = v == lanes.likely ? top_grad : value;
          value = index == label ? label_grad : value;
          store_simd(Reals(is_zero > Reals{} ? Reals{} : value), columns.grad + c * columns.grad_stride + r);
        }
        if constexpr (!kUniform) {
          if (columns.grad_target) {
            const Reals top = load_simd<Reals>(tile.top_share_grad + r);
            const Reals of_share = v == lanes.likely ? top : of_class.terms.grad_share;
            const Reals weight = Reals{} + class_weight[c * class_weight_step];
            const Reals value = share_grad<Reals, Real>(of_share, load_simd<Reals>(tile.share_grad_factor + r), weight,
                                                        load_simd<Reals>(tile.weight_grad + r), kLabelApart<Loss>);
            store_simd(Reals(is_zero > Reals{} ? Reals{} : value), columns.grad_target + c * columns.target_stride + r);
          }
        }
      }
    }
  }
};

}  // namespace
}  // namespace focalkern::cpu
