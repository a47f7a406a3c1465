// Loops along the classes of a row with soft targets: sums, and the gradient.
#pragma once

#include <algorithm>
#include <limits>

#include "cpu/row_loss/along_classes.h"
#include "cpu/row_loss/soft_targets_lanes.h"
#include "cpu/row_loss/tile.h"
#include "cpu/simd/dispatch.h"
#include "cpu/simd/math.h"
#include "cpu/simd/vector.h"
#include "math/row_loss.h"

namespace focalkern::cpu {
namespace {

// Rows whose classes are adjacent, in place or copied.
template <typename Real>
struct SoftRows {
  int64_t classes;
  const Real* z[kTileRows];
  Real* e[kTileRows];             // e^(z - max), or null: rows of fewer than 2 kBlock classes, in the forward pass
  const Real* target[kTileRows];  // or null
  Real* grad[kTileRows];          // or null
  Real* grad_target[kTileRows];   // or null
};

template <int64_t n, typename Real>
struct SharesOfRow {
  using Reals = simd_t<Real, n>;
  const Real* target;
  int64_t target_step;
  const SoftShares<Real>& shares;

  FK_HOST_DEVICE Reals at(int64_t j) const {
    const Reals given = shares.kept * load_simd<Reals>(target + j * target_step) + shares.spread;
    return given * load_simd<Reals>(shares.weight + j * shares.weight_step);
  }
};

// Writes e^(z_j - max), and returns its sum over all classes but one at the maximum. If several classes are at the
// maximum, the sum leaves out any one of them.
template <int64_t n, typename Real>
FK_HOST_DEVICE Real sum_exp_beside_largest(const Real* z, int64_t classes, Real max, const SoftTile<Real>& tile,
                                           Real* to) {
  using Reals = simd_t<Real, n>;
  const Reals most = spread<Reals>(-tile.exp_zero[0]), shift = spread<Reals>(max), one = spread<Reals>(Real(1));
  Reals all{}, part{}, at_max{};
  const auto add = [&](const Reals& v, int64_t j) __attribute__((always_inline)) {
    const ScaledExponential<Reals> parts = exponential_of_fall(Reals(shift - v), most);
    const Reals e = parts.mantissa * parts.scale;
    store_simd(e, to + j);
    if constexpr (sizeof(Reals) == 64) {  // AVX-512 adds where a mask says so
      part = v != shift ? part + e : part;
    } else {
      part += v != shift ? e : Reals{};
    }
    at_max = v == shift ? at_max + one : at_max;
  };
  const int64_t whole = classes & -n;
  for (int64_t j = 0; j < whole;) {
    const int64_t stop = std::min(whole, j + kPart * n);
    for (; j < stop; j += n) add(load_simd<Reals>(z + j), j);
    all += part;
    part = Reals{};
  }
  Real again = 1;
  if (whole < classes) {
    // Classes that were added before are set to the maximum, and their number is subtracted at the end.
    const int64_t begin = classes - n;
    const Real done = static_cast<Real>(whole - begin);
    const Reals first = load_simd<Reals>(tile.first), before = load_simd<Reals>(to + begin);
    add(Reals(first < spread<Reals>(done) ? shift : load_simd<Reals>(z + begin)), begin);
    store_simd(Reals(first < spread<Reals>(done) ? before : load_simd<Reals>(to + begin)), to + begin);
    all += part;
    again += done;
  }
  return fold_lanes(all, Sum{}) + (fold_lanes(at_max, Sum{}) - again);
}

struct LargestOfRows {
  template <int64_t bytes, typename Real>
  static FK_HOST_DEVICE void run(const SoftRows<Real>& rows, int64_t n_rows, SoftTile<Real>& tile) {
    constexpr int64_t n = kLanesOf<bytes, Real>;
    for (int64_t r = 0; r < n_rows; ++r) {
      const Real* z = rows.z[r];
      const Real max = max_of<n>(z, rows.classes);
      double rest = 0;
      const int64_t blocks = std::max<int64_t>(1, rows.classes / kBlock);  // the last block also takes the remainder
      if (blocks == 1) {
        rest = sum_exp_beside_largest<n>(z, rows.classes, max, tile, rows.e[r]);
      } else {
        const int64_t top = first_equal(z, rows.classes, max);
        for (int64_t block = 0; block < blocks; ++block) {
          const int64_t begin = block * kBlock;
          const int64_t count = block + 1 < blocks ? kBlock : rows.classes - begin;
          rest += sum_exp_except<n, false>(z + begin, count, max, top - begin, tile.exp_zero[0]).first;
        }
      }
      tile.shift[r] = max;
      tile.sum_exp_others[r] = static_cast<Real>(rest);
    }
  }
};

// The likely class of each row, or class 0 if it has none.
struct LikelyOfRows {
  template <int64_t bytes, typename Real>
  static FK_HOST_DEVICE void run(const SoftRows<Real>& rows, int64_t n_rows, SoftTile<Real>& tile) {
    for (int64_t r = 0; r < n_rows; ++r) {
      const bool is_likely = tile.inv_sum_exp[r] > kUnlikely<Real>;
      tile.special[r] =
          static_cast<label_int<Real>>(is_likely ? first_equal(rows.z[r], rows.classes, tile.likely[r]) : 0);
    }
  }
};

template <typename Loss, typename Gammas, bool kUniform, bool kGamma>
struct SoftSumsOfRows {
  template <int64_t bytes, typename Real>
  static FK_HOST_DEVICE void run(const SoftRows<Real>& rows, int64_t n_rows, const SoftShares<Real>& shares,
                                 Real epsilon, bool detached, const GammaTableOf<Real>& table, SoftTile<Real>& tile) {
    constexpr int64_t n = kLanesOf<bytes, Real>;
    using Reals = simd_t<Real, n>;
    using Int = label_int<Real>;
    using Ints = simd_t<Int, n>;
    const int64_t classes = rows.classes, whole = classes & -n;
    const auto fold = [](const Reals& v) { return static_cast<double>(fold_lanes(v, Sum{})); };
    const Reals one_share = spread<Reals>(kLabelApart<Loss> ? shares.spread : Real(1));
    for (int64_t r = 0; r < n_rows; ++r) {
      const Real *z = rows.z[r], *e = rows.e[r];
      const auto lanes = lanes_of_row<Loss, Gammas, n>(tile, r, epsilon, detached, table);
      const SharesOfRow<n, Real> share{rows.target[r], tile.target_step, shares};
      [[maybe_unused]] const Ints label = spread<Ints>(tile.label[r]);
      [[maybe_unused]] Ints index = load_simd<Ints>(kFirst<Int>);
      SoftSums<kGamma, Reals, double> sums;
      const auto terms_of = [&](const Reals& v, int64_t j) __attribute__((always_inline)) {
        const Reals of_share = kUniform ? one_share : share.at(j);
        ClassTerms<Reals> terms = (e ? lanes.at(v, load_simd<Reals>(e + j), of_share) : lanes.at(v, of_share)).terms;
        leave_out(v == lanes.likely, terms);
        if constexpr (kUniform && kLabelApart<Loss>) leave_out_by_bits(index == label, terms);
        return terms;
      };
      for (int64_t j = 0; j < whole;) {
        if (j > 0) sums.flush(fold);
        const int64_t stop = std::min(whole, j + kSoftPart * n);
        for (; j < stop; j += n) {
          sums.add(terms_of(load_simd<Reals>(z + j), j));
          if constexpr (kUniform && kLabelApart<Loss>) index += static_cast<Int>(n);
        }
      }
      if (whole < classes) {
        const int64_t begin = classes - n;
        if constexpr (kUniform && kLabelApart<Loss>) index -= static_cast<Int>(whole - begin);
        // Classes that were added before get the likely class's logit, so that the sum excludes them.
        const Reals first = load_simd<Reals>(tile.first), done = spread<Reals>(static_cast<Real>(whole - begin));
        const Reals v = load_simd<Reals>(z + begin);
        sums.add(terms_of(Reals(first < done ? lanes.likely : v), begin));
      }
      sums.flush(fold);
      tile.loss_sum[r] = static_cast<Real>(sums.all_loss);
      tile.grad_sum[r] = static_cast<Real>(sums.all_grad);
      if constexpr (kGamma) tile.gamma_sum[r] = static_cast<Real>(sums.all_gamma);
    }
  }
};

template <typename Loss, typename Gammas, bool kUniform>
struct SoftGradOfRows {
  template <int64_t bytes, typename Real>
  static FK_HOST_DEVICE void run(const SoftRows<Real>& rows, int64_t n_rows, const SoftShares<Real>& shares,
                                 Real epsilon, bool detached, const GammaTableOf<Real>& table, const Real* class_weight,
                                 int64_t class_weight_step, SoftTile<Real>& tile) {
    constexpr int64_t n = kLanesOf<bytes, Real>;
    using Reals = simd_t<Real, n>;
    const int64_t classes = rows.classes, whole = classes & -n;
    const Reals one_share = spread<Reals>(kLabelApart<Loss> ? shares.spread : Real(1));
    for (int64_t r = 0; r < n_rows; ++r) {
      const Real* z = rows.z[r];
      Real *grad = rows.grad[r], *grad_target = rows.grad_target[r];
      if (tile.is_zero[r]) {
        if (grad) std::fill_n(grad, classes, Real(0));
        if (grad_target) std::fill_n(grad_target, classes, Real(0));
        continue;
      }
      const auto lanes = lanes_of_row<Loss, Gammas, n>(tile, r, epsilon, detached, table);
      const SharesOfRow<n, Real> share{rows.target[r], tile.target_step, shares};
      const Reals p_factor = spread<Reals>(tile.p_factor[r]), share_factor = spread<Reals>(tile.share_factor[r]);
      const Reals top_grad = spread<Reals>(tile.top_grad[r]);
      const auto grad_at = [&](int64_t j) __attribute__((always_inline)) {
        const Reals v = load_simd<Reals>(z + j);
        const auto of_class = lanes.at(v, kUniform ? one_share : share.at(j));
        const Reals value = of_class.e * p_factor - of_class.terms.slope * share_factor;
        if (grad) store_simd(Reals(v == lanes.likely ? top_grad : value), grad + j);
        if constexpr (!kUniform) {
          if (grad_target) {
            const Reals top = spread<Reals>(tile.top_share_grad[r]);
            const Reals of_share = v == lanes.likely ? top : of_class.terms.grad_share;
            const Reals weight = load_simd<Reals>(class_weight + j * class_weight_step);
            store_simd(share_grad<Reals, Real>(of_share, spread<Reals>(tile.share_grad_factor[r]), weight,
                                               spread<Reals>(tile.weight_grad[r]), kLabelApart<Loss>),
                       grad_target + j);
          }
        }
      };
      if (whole < classes) grad_at(classes - n);
      for (int64_t j = 0; j < whole; j += n) grad_at(j);
      if (tile.has_labels && grad) grad[tile.label[r]] = tile.label_grad[r];
    }
  }
};

}  // namespace
}  // namespace focalkern::cpu
