// Rows with soft targets: a tile, shares, gammas, and the step of the loops at one vector of classes or rows.
//
// A likely class is one with p above kUnlikely; a row has at most one. The epilogue computes its terms
// (soft_targets_tile.h). For all others 1 - p does not cancel, and p and log p suffice (`unlikely_terms`). Vectors run
// along the classes of one row (soft_targets_along.h), or across adjacent rows (soft_targets_across.h). SoftLanes is
// the step at one class for both.
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

// vectors per partial sum, in the type of the logits; partial sums are added in double
constexpr int64_t kSoftPart = 16;

template <typename Real>
struct SoftTile : Tile<Real> {
  // Aligned: otherwise gcc would peel the first rows of each loop over a tile.
  alignas(64) Real likely[kTileRows];  // logit of the likely class, or a number that is no logit of the row
  Real top_share[kTileRows];
  Real top_gamma[kTileRows];
  Real label_gamma[kTileRows];
  // Of the label, with label_share; 0 for targets without labels.
  Real label_loss[kTileRows];
  Real label_slope[kTileRows];
  Real label_gamma_slope[kTileRows];
  Real label_p[kTileRows];
  // Sums over all classes but the likely one and, for some losses, the label. A uniform share is factored out of them.
  Real loss_sum[kTileRows];
  Real grad_sum[kTileRows];
  Real gamma_sum[kTileRows];
  Real others[kTileRows];        // sum of a_j over all classes but the likely one
  Real p_factor[kTileRows];      // factor of e^(z_j - max) in the gradient
  Real share_factor[kTileRows];  // minus the factor of a_j
  Real top_grad[kTileRows];
  Real label_grad[kTileRows];
  Real top_share_grad[kTileRows];  // of the likely class: gradient with respect to its share, before weights
  Real share_grad_factor[kTileRows];
  Real weight_grad[kTileRows];  // part of the gradient in a share from the row's weight, per class weight
  Real is_zero[kTileRows];      // 1 for a row without a gradient, else 0
  // share of the label minus the share of every other class; in backward with kLabelApart the whole share
  Real label_share[kTileRows];
  Real row_weight[kTileRows];  // factor of the row's loss
  Real first[16];              // 0, 1, 2, ...
  Real largest_log;            // bound of -log p; in memory like exp_zero
  bool has_labels;

  SoftTile() {
    for (int i = 0; i < 16; ++i) first[i] = static_cast<Real>(i);
    largest_log = kLargestLog<Real>;
    // Rows beyond the last need values, because loops over a tile process whole vectors.
    std::fill_n(this->label, kTileRows, label_int<Real>(kNoTarget));
    const auto clear = [](auto&... numbers) { (std::fill_n(numbers, kTileRows, Real(0)), ...); };
    clear(this->shift, this->sum_exp_others, this->target_logit, this->gamma, this->upstream, top_share, top_gamma,
          label_gamma, label_loss, label_slope, label_gamma_slope, label_p, loss_sum, grad_sum, gamma_sum, others);
  }
};

// The share of a class times its weight: (kept target + spread) weight. Without target or weights the pointers refer to
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

// AnyGamma for vectors.
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

// Losses that are not linear in the share, so that the label's whole share enters at once.
template <typename Loss>
constexpr bool kLabelApart = Loss::kTarget == SoftTarget::kRows;

// Sets the masked lanes to 0 by a bit operation, because gcc turns two consecutive selections into scalar code.
template <typename Mask, typename Reals>
FK_HOST_DEVICE Reals without(const Mask& mask, const Reals& x) {
  return lanes_cast<Reals>(lanes_cast<Mask>(x) & ~mask);
}

// ---- one vector of classes or rows ---------------------------------------------------------------------------------

template <typename Loss, typename Gammas, typename Reals>
struct SoftLanes {
  using Real = number_t<Reals>;
  Reals max, log_s, inv_sum_exp, likely, most, largest_log;
  Real epsilon;
  typename Gammas::template Of<Loss, Reals> gammas;

  // The terms are those of a share of 1, unless kLabelApart.
  struct Class {
    Reals e;  // e^(z - max)
    ClassTerms<Reals> terms;
  };
  FK_HOST_DEVICE Class at(const Reals& v, const Reals& share) const {
    const Reals fall = max - v, bounded = fall > most ? most : fall;
    const ScaledExponential<Reals> parts = scaled_exponential(-bounded);
    // Where `bounded` differs from `fall`, p is 0.
    return of(Reals(parts.mantissa * parts.scale), {fall + log_s, bounded + log_s}, share);
  }
  FK_HOST_DEVICE Class at(const Reals& v, const Reals& e, const Reals& share) const {
    const Reals minus_log_p = (max - v) + log_s;
    return of(e, {minus_log_p, minus_log_p > largest_log ? largest_log : minus_log_p}, share);
  }

 private:
  FK_HOST_DEVICE Class of(const Reals& e, const MinusLog<Reals>& minus_log_p, const Reals& share) const {
    const Reals p = e * inv_sum_exp;
    const Reals of_share = kLabelApart<Loss> ? share : spread<Reals>(Real(1));
    return {e, Loss::unlikely_terms(p, minus_log_p, gammas.at(p), epsilon, of_share)};
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
          spread<Reals>(tile.largest_log),
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
          spread<Reals>(tile.largest_log),
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
  // A class with share 0 adds 0, even where its own terms are infinite or NaN.
  FK_HOST_DEVICE void add(const ClassTerms<Reals>& terms, const Reals& share) {
    const auto add_to = [&share](Reals& sum, const Reals& term) __attribute__((always_inline)) {
      if constexpr (sizeof(Reals) == 64) {  // AVX-512 adds where a mask says so
        sum = share != Reals{} ? sum + share * term : sum;
      } else {
        sum += share * without(share == Reals{}, term);
      }
    };
    add_to(loss, terms.loss);
    add_to(grad, terms.slope);
    if constexpr (kGamma) add_to(gamma, terms.grad_gamma);
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

// The gradient with respect to the share of a class, from the derivative of its loss.
template <typename Reals, typename Real>
FK_HOST_DEVICE Reals share_grad(const Reals& grad, const Reals& factor, const Reals& weight, const Reals& of_weight,
                                bool is_row_weight) {
  const Reals value = factor * grad;
  if (is_row_weight) return value + weight * of_weight;
  return weight == Reals{} ? Reals{} : weight * value;
}

}  // namespace
}  // namespace focalkern::cpu
