// Loops over the classes of rows with soft targets: sums, and the gradient.
//
// A likely class is one with p above kUnlikely; a row has at most one. The epilogue computes it (soft_targets_tile.h).
// For all others 1 - p does not cancel, and p and log p suffice (`unlikely_terms`). Vectors run along the classes of
// one row, or across adjacent rows; SoftLanes has the step at one class for both.
#pragma once

#include <algorithm>
#include <limits>

#include "cpu/row_loss/across_rows_lanes.h"
#include "cpu/row_loss/along_classes.h"
#include "cpu/row_loss/tile.h"
#include "cpu/simd/dispatch.h"
#include "cpu/simd/math.h"
#include "cpu/simd/vector.h"
#include "math/row_loss.h"

namespace focalkern::cpu {
namespace {

// vectors per partial sum: the sum of these in the type of the logits goes into a double
constexpr int64_t kSoftPart = 16;

template <typename Real>
struct SoftTile : Tile<Real> {
  // Aligned: otherwise the loops over a tile would take its first rows one by one.
  alignas(64) Real likely[kTileRows];  // logit of the likely class, or a number that no logit of the row equals
  Real top_share[kTileRows];
  Real top_gamma[kTileRows];
  Real label_gamma[kTileRows];
  // Sums over all classes but the likely one and, for some losses, the label. Uniform shares count as 1 here.
  Real loss_sum[kTileRows];
  Real grad_sum[kTileRows];
  Real gamma_sum[kTileRows];
  Real others[kTileRows];        // sum of a_j over all classes but the likely one
  Real p_factor[kTileRows];      // factor of e^(z_j - max) in the gradient
  Real share_factor[kTileRows];  // minus the factor of a_j
  Real top_grad[kTileRows];
  Real label_grad[kTileRows];
  Real top_share_grad[kTileRows];  // of the likely class: the gradient in its share before weights
  Real share_grad_factor[kTileRows];
  Real weight_grad[kTileRows];  // the part of the gradient in a share that the row's weight adds, per class weight
  Real is_zero[kTileRows];      // 1 for a row without a gradient, or 0
  // share of the label beyond that of the other classes; backward with kLabelApart, its whole share
  Real label_share[kTileRows];
  Real row_weight[kTileRows];  // factor of the row's loss
  Real first[16];              // 0, 1, 2, ...
  int64_t target_step;         // 1; 0 without target probabilities
  bool has_labels;

  SoftTile() {
    for (int i = 0; i < 16; ++i) first[i] = static_cast<Real>(i);
    // Fills the rows beyond the last, because a tile is computed in whole vectors.
    std::fill_n(this->label, kTileRows, label_int<Real>(kNoTarget));
    for (Real* numbers : {this->shift, this->sum_exp_others, this->target_logit, this->gamma, this->upstream, top_share,
                          top_gamma, label_gamma, loss_sum, grad_sum, gamma_sum, others}) {
      std::fill_n(numbers, kTileRows, Real(0));
    }
  }
};

// The share of a class with its weight: (kept target + spread) weight. Without target or weights the pointers lead to
// constants, and the strides are 0.
template <typename Real>
struct SoftShares {
  Real kept;
  Real spread;
  const Real* weight;
  int64_t weight_step;
};
template <typename Real>
struct Constants {
  alignas(64) Real zeros[kTileRows] = {};
  alignas(64) Real ones[kTileRows];
  Constants() { std::fill_n(ones, kTileRows, Real(1)); }
};
template <typename Real>
const Constants<Real>& constants() {
  static const Constants<Real> all;
  return all;
}

// ---- gamma ---------------------------------------------------------------------------------------------------------

template <typename Reals>
FK_HOST_DEVICE Reals power_of_lanes(const Reals& x, const Reals& most) {
  constexpr auto kInfinity = std::numeric_limits<number_t<Reals>>::infinity();
  const Reals least = -most;
  Reals bounded = x < least ? least : x;
  bounded = bounded > most ? most : bounded;
  const ScaledExponential<Reals> e = scaled_exponential(bounded);
  return x > most ? kInfinity + Reals{} : e.mantissa * e.scale;
}

// As AnyGamma.
template <typename Reals>
struct GammaOfLanes {
  static constexpr bool kIsZero = false;
  Reals pull, rise, exponent, sign, most;

  FK_HOST_DEVICE GammaOfLanes(const Reals& gamma, bool detached, const Reals& most) : most(most) {
    using Real = number_t<Reals>;
    const Reals zero{}, one = zero + Real(1);
    pull = detached ? zero : gamma;
    rise = detached ? zero : gamma + one;
    exponent = (gamma < zero ? -gamma : gamma) - one;
    sign = gamma < zero ? -one : one;
  }
  FK_HOST_DEVICE FactorParts<Reals> factor_at(const Reals& p) const {
    const Reals x = -sign * p;
    const Reals log_base = log_one_plus_small(x);
    return {number_t<Reals>(1) + x, power_of_lanes(Reals(exponent * log_base), most), log_base};
  }
  FK_HOST_DEVICE Reals signed_like_gamma(const Reals& x) const { return sign * x; }
};

template <typename Real>
struct GammaTableOf {
  const Real* edges;  // or null
  const Real* gammas;
  int64_t n_bins;
};

// kGamma = 0 to 3: every row has this gamma.
template <int kGamma>
struct WholeGammas {
  template <typename Loss, typename Reals>
  struct Of {
    WholeGamma<number_t<Reals>, kGamma> gamma;
    FK_HOST_DEVICE Of(const Reals& /*gammas*/, bool detached, const Reals& /*most*/,
                      const GammaTableOf<number_t<Reals>>& /*table*/)
        : gamma(detached) {}
    FK_HOST_DEVICE WholeGamma<number_t<Reals>, kGamma> at(const Reals& /*p*/) const { return gamma; }
  };
};
// One gamma for each row, or a table.
struct AnyGammas {
  template <typename Loss, typename Reals>
  struct Of {
    GammaOfLanes<Reals> gamma;
    bool detached;
    GammaTableOf<number_t<Reals>> table;
    FK_HOST_DEVICE Of(const Reals& gammas, bool detached, const Reals& most, const GammaTableOf<number_t<Reals>>& table)
        : gamma(in_domain(gammas), detached, most), detached(detached), table(table) {}
    // A loss without an inverse is NaN below 0.
    static FK_HOST_DEVICE Reals in_domain(const Reals& gammas) {
      if constexpr (Loss::kHasInverse) return gammas;
      return gammas < Reals{} ? std::numeric_limits<number_t<Reals>>::quiet_NaN() + Reals{} : gammas;
    }
    FK_HOST_DEVICE GammaOfLanes<Reals> at(const Reals& p) const {
      if (table.edges == nullptr) return gamma;
      Reals found = Reals{} + table.gammas[0];
      for (int64_t bin = 1; bin < table.n_bins; ++bin) {
        const Reals edge = Reals{} + table.edges[bin], next = Reals{} + table.gammas[bin];
        found = edge <= p ? next : found;
      }
      return {in_domain(found), detached, gamma.most};
    }
  };
};

// Losses that need the whole share of the label at once.
template <typename Loss>
constexpr bool kLabelApart = Loss::kTarget == SoftTarget::kRows;

// Sets some lanes to 0 by a bit mask: for two selections in a row gcc makes one for each lane.
template <typename Mask, typename Reals>
FK_HOST_DEVICE Reals without(const Mask& mask, const Reals& x) {
  return lanes_cast<Reals>(lanes_cast<Mask>(x) & ~mask);
}

// ---- one vector of classes or rows ---------------------------------------------------------------------------------

template <typename Loss, typename Gammas, typename Reals>
struct SoftLanes {
  using Real = number_t<Reals>;
  Reals max, log_s, inv_sum_exp, likely, most;
  Real epsilon;
  typename Gammas::template Of<Loss, Reals> gammas;

  struct Class {
    Reals e;  // e^(z - max)
    ClassTerms<Reals> terms;
  };
  FK_HOST_DEVICE Class at(const Reals& v, const Reals& share) const {
    const Reals fall = max - v;
    const ScaledExponential<Reals> parts = exponential_of_fall(fall, most);
    const Reals e = parts.mantissa * parts.scale, p = e * inv_sum_exp;
    if constexpr (kLabelApart<Loss>) {
      return {e, Loss::unlikely_terms(p, Reals(fall + log_s), gammas.at(p), epsilon, share)};
    } else {
      const Reals one = Reals{} + Real(1);
      ClassTerms<Reals> terms = Loss::unlikely_terms(p, Reals(fall + log_s), gammas.at(p), epsilon, one);
      // A class whose share is 0 adds 0, even where its own loss is infinite. The terms of the others are finite.
      terms.loss = share * without(share == Reals{}, terms.loss);
      terms.slope *= share;
      terms.grad_gamma *= share;
      return {e, terms};
    }
  }
};

template <typename Loss, typename Gammas, int64_t n, typename Real>
FK_HOST_DEVICE SoftLanes<Loss, Gammas, simd_t<Real, n>> lanes_of_row(const SoftTile<Real>& tile, int64_t r,
                                                                     Real epsilon, bool detached,
                                                                     const GammaTableOf<Real>& table) {
  using Reals = simd_t<Real, n>;
  const Reals most = spread<Reals>(-tile.exp_zero[0]);
  return {spread<Reals>(tile.shift[r]),
          spread<Reals>(tile.log_s[r]),
          spread<Reals>(tile.inv_sum_exp[r]),
          spread<Reals>(tile.likely[r]),
          most,
          epsilon,
          {spread<Reals>(tile.gamma[r]), detached, most, table}};
}
template <typename Loss, typename Gammas, int64_t n, typename Real>
FK_HOST_DEVICE SoftLanes<Loss, Gammas, simd_t<Real, n>> lanes_of_rows(const SoftTile<Real>& tile, int64_t r,
                                                                      Real epsilon, bool detached,
                                                                      const GammaTableOf<Real>& table) {
  using Reals = simd_t<Real, n>;
  const Reals most = -load_simd<Reals>(tile.exp_zero);
  return {load_simd<Reals>(tile.shift + r),
          load_simd<Reals>(tile.log_s + r),
          load_simd<Reals>(tile.inv_sum_exp + r),
          load_simd<Reals>(tile.likely + r),
          most,
          epsilon,
          {load_simd<Reals>(tile.gamma + r), detached, most, table}};
}

// Sums over some classes, in partial sums.
template <bool kGamma, typename Reals, typename Double>
struct SoftSums {
  Reals loss{}, grad{}, gamma{};
  Double all_loss{}, all_grad{}, all_gamma{};

  FK_HOST_DEVICE void add(const ClassTerms<Reals>& terms) {
    loss += terms.loss;
    grad += terms.slope;
    if constexpr (kGamma) gamma += terms.grad_gamma;
  }
  template <typename Fold>
  FK_HOST_DEVICE void flush(Fold fold) {
    all_loss += fold(loss);
    all_grad += fold(grad);
    loss = grad = Reals{};
    if constexpr (kGamma) {
      all_gamma += fold(gamma);
      gamma = Reals{};
    }
  }
};

template <typename Reals, typename Mask>
FK_HOST_DEVICE void leave_out(const Mask& mask, ClassTerms<Reals>& terms) {
  terms.loss = mask ? Reals{} : terms.loss;
  terms.slope = mask ? Reals{} : terms.slope;
  terms.grad_gamma = mask ? Reals{} : terms.grad_gamma;
}
template <typename Reals, typename Mask>
FK_HOST_DEVICE void leave_out_by_bits(const Mask& mask, ClassTerms<Reals>& terms) {
  terms.loss = without(mask, terms.loss);
  terms.slope = without(mask, terms.slope);
  terms.grad_gamma = without(mask, terms.grad_gamma);
}

// ---- along the classes of a row ------------------------------------------------------------------------------------

// Rows whose classes are adjacent, in place or copied.
template <typename Real>
struct SoftRows {
  int64_t classes;
  const Real* z[kTileRows];
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

// The sum of e^(z_j - max) over all classes but one at the maximum. Where several are at the maximum, any of them is
// left out.
template <int64_t n, typename Real>
FK_HOST_DEVICE Real sum_exp_beside_largest(const Real* z, int64_t classes, Real max, const SoftTile<Real>& tile) {
  using Reals = simd_t<Real, n>;
  const Reals most = spread<Reals>(-tile.exp_zero[0]), shift = spread<Reals>(max), one = spread<Reals>(Real(1));
  Reals all{}, part{}, at_max{};
  const auto add = [&](const Reals& v) __attribute__((always_inline)) {
    const ScaledExponential<Reals> e = exponential_of_fall(Reals(shift - v), most);
    if constexpr (sizeof(Reals) == 64) {  // AVX-512 adds where a mask says so
      const Reals product = e.mantissa * e.scale;
      part = v != shift ? part + product : part;
    } else {
      part += e.mantissa * (v != shift ? e.scale : Reals{});
    }
    at_max = v == shift ? at_max + one : at_max;
  };
  const int64_t whole = classes & -n;
  for (int64_t j = 0; j < whole;) {
    const int64_t stop = std::min(whole, j + kPart * n);
    for (; j < stop; j += n) add(load_simd<Reals>(z + j));
    all += part;
    part = Reals{};
  }
  Real again = 1;
  if (whole < classes) {
    // Classes that were added before are set to the maximum and are not counted.
    const Real done = static_cast<Real>(n - (classes - whole));
    const Reals first = load_simd<Reals>(tile.first), v = load_simd<Reals>(z + classes - n);
    add(Reals(first < spread<Reals>(done) ? shift : v));
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
        rest = sum_exp_beside_largest<n>(z, rows.classes, max, tile);
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
      const Real* z = rows.z[r];
      const auto lanes = lanes_of_row<Loss, Gammas, n>(tile, r, epsilon, detached, table);
      const SharesOfRow<n, Real> share{rows.target[r], tile.target_step, shares};
      [[maybe_unused]] const Ints label = spread<Ints>(tile.label[r]);
      [[maybe_unused]] Ints index = load_simd<Ints>(kFirst<Int>);
      SoftSums<kGamma, Reals, double> sums;
      const auto terms_of = [&](const Reals& v, int64_t j) __attribute__((always_inline)) {
        ClassTerms<Reals> terms = lanes.at(v, kUniform ? one_share : share.at(j)).terms;
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
        // Classes that were added before are left out in the same way as the likely one.
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

// The gradient in the share of a class, from the gradient of its loss.
template <typename Reals, typename Real>
FK_HOST_DEVICE Reals share_grad(const Reals& grad, const Reals& factor, const Reals& weight, const Reals& of_weight,
                                bool is_row_weight) {
  const Reals value = factor * grad;
  if (is_row_weight) return value + weight * of_weight;
  return weight == Reals{} ? Reals{} : weight * value;
}

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

// ---- across rows ---------------------------------------------------------------------------------------------------

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
          ClassTerms<Reals> terms =
              lanes.at(v, kUniform ? one_share : share_of_columns<n>(columns, shares, c, r)).terms;
          leave_out(v == lanes.likely, terms);
          if constexpr (kUniform && kLabelApart<Loss>) {
            leave_out_by_bits(index == label, terms);
            index += Int(1);
          }
          sums.add(terms);
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
        const auto of_class = lanes.at(v, kUniform ? one_share : share_of_columns<n>(columns, shares, c, r));
        if (columns.grad) {
          Reals value = of_class.e * p_factor - of_class.terms.slope * share_factor;
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
