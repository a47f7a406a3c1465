// Epilogue of rows with soft targets: from the sums over classes to loss and gradient. The label and the likely class
// take the formulas for any probability, once per row.
//
//   rest: the sum of e^(z_j - m) over all classes but the largest,  S = 1 + rest,  log u of the largest = log(rest / S)
//   dL/dz_j = p_j A - a_j,  A = sum_i a_i;  for a likely class p (A - a) - u a, in which no terms cancel as p -> 1
#pragma once

#include <limits>

#include "cpu/row_loss/epilogue.h"
#include "cpu/row_loss/soft_targets_lanes.h"
#include "cpu/simd/dispatch.h"
#include "cpu/simd/math.h"

namespace focalkern::cpu {
namespace {

// Loops over a tile process whole vectors of rows; results of rows beyond the last are not used.
inline int64_t whole_vectors(int64_t n_rows) { return (n_rows + 15) & -16; }

// The logit of each row's label; that of class 0 for an ignored row.
template <typename Real>
FK_VECTOR_CLONES void soft_logits_of_columns(const SoftColumns<Real>& columns, int64_t n_rows, SoftTile<Real>& tile) {
  const Real* const z = columns.z;
  const int64_t stride = columns.stride;
  for (int64_t r = 0; r < n_rows; ++r) {
    const int64_t label = tile.label[r] < 0 ? 0 : tile.label[r];
    tile.target_logit[r] = z[label * stride + r];
  }
}

// Sets top_share to 1 where the label is the likely class.
template <typename Real>
FK_VECTOR_CLONES void soft_label_is_top(int64_t n_rows, SoftTile<Real>& tile) {
#pragma omp simd
  for (int64_t r = 0; r < n_rows; ++r) tile.top_share[r] = tile.target_logit[r] == tile.likely[r] ? Real(1) : Real(0);
}
template <typename Real>
FK_VECTOR_CLONES void soft_shares(int64_t n_rows, const SoftShares<Real>& shares, SoftTile<Real>& tile) {
  const Real kept = shares.kept, spread_share = shares.spread;
#pragma omp simd
  for (int64_t r = 0; r < n_rows; ++r) tile.top_share[r] = kept * tile.top_share[r] + spread_share;
}

// Saves the numbers of each row for the backward pass and its weighted loss, 0 for an ignored row.
template <typename Real>
FK_VECTOR_CLONES void soft_saved(int64_t n_rows, Real* saved, int64_t rows, SoftTile<Real>& tile) {
  const label_int<Real> has_labels = tile.has_labels ? 1 : 0;
#pragma omp simd
  for (int64_t r = 0; r < n_rows; ++r) {
    const bool ignored = (has_labels != 0) & (tile.label[r] == kNoTarget);
    const Real loss = tile.row_weight[r] * tile.loss[r];
    tile.loss[r] = ignored ? Real(0) : loss;
    saved[r] = ignored ? Real(0) : tile.shift[r];
    saved[rows + r] = ignored ? Real(0) : tile.sum_exp_others[r];
    saved[2 * rows + r] = ignored ? Real(0) : tile.others[r];
  }
}

// Marks the rows without a gradient.
template <typename Real>
FK_VECTOR_CLONES void soft_zeros(int64_t n_rows, SoftTile<Real>& tile) {
  const label_int<Real> has_labels = tile.has_labels ? 1 : 0;
#pragma omp simd
  for (int64_t r = 0; r < n_rows; ++r) {
    const bool ignored = (has_labels != 0) & (tile.label[r] == kNoTarget);
    tile.is_zero[r] = ignored | (tile.upstream[r] == Real(0)) ? Real(1) : Real(0);
  }
}

template <typename Real>
FK_VECTOR_CLONES void soft_numbers(int64_t n_rows, SoftTile<Real>& tile) {
#pragma omp simd
  for (int64_t r = 0; r < n_rows; ++r) {
    const Real max = tile.shift[r], rest = tile.sum_exp_others[r];
    // m - m makes the result NaN for an infinite m; the sum over the others alone would be finite.
    const Real log_s = log_of_unit_sum(Real(1), rest) + (max - max);
    const Real inv_sum_exp = Real(1) / (Real(1) + rest) + (max - max);
    tile.log_s[r] = log_s;
    tile.inv_sum_exp[r] = inv_sum_exp;
    const Real above_all = (max + (max < Real(0) ? -max : max)) + (Real(1) + (max - max));
    tile.likely[r] = inv_sum_exp > kUnlikely<Real> ? max : above_all;
    // A denormal sum is not 0 here, although `logarithm` takes it for 0: log_s is then not 0 either, and its product
    // with log u must be finite.
    tile.log_u[r] = log_of_unit_sum(rest, Real(0)) - log_s;
    tile.log_p[r] = (tile.target_logit[r] - max) - log_s;
  }
}

// The gammas of the largest class and of the label.
template <typename Scalar>
void soft_gammas(const RowLossArgs<Scalar>& args, int64_t n_rows, SoftTile<compute_t<Scalar>>& tile) {
  if (args.edges) {
    look_up_gamma(tile.inv_sum_exp, n_rows, args.edges, args.gamma, args.n_bins, tile.top_gamma);
    look_up_gamma_of_log(tile.log_p, n_rows, args.edges, args.gamma, args.n_bins, tile.label_gamma);
  } else {
    std::copy_n(tile.gamma, n_rows, tile.top_gamma);
    std::copy_n(tile.gamma, n_rows, tile.label_gamma);
  }
}

// gamma = 0, 1, 2 or 3, for a class whose u = 1 - p is accurate.
template <typename Real, int kGamma>
struct WholeGammaAt : WholeGamma<Real, kGamma> {
  Real u;
  FK_HOST_DEVICE WholeGammaAt(Real u, bool detached) : WholeGamma<Real, kGamma>(detached), u(u) {}
  FK_HOST_DEVICE FactorParts<Real> factor_at(Real /*p*/) const {
    return {u, kGamma == 3 ? u * u : kGamma == 2 ? u : Real(1), Real(0)};
  }
};

// The largest class. A whole gamma needs no power; u is known, so no terms cancel.
template <typename Loss, typename Gammas>
struct TopTerms {
  template <typename Real>
  static FK_HOST_DEVICE ClassTerms<Real> of(const SoftTile<Real>& tile, int64_t r, Real epsilon, bool detached) {
    return Loss::class_terms(-tile.log_s[r], tile.log_u[r], tile.top_gamma[r], epsilon, detached, tile.top_share[r]);
  }
};
template <int kGamma>
struct TopTerms<FocalFormula, WholeGammas<kGamma>> {
  template <typename Real>
  static FK_HOST_DEVICE ClassTerms<Real> of(const SoftTile<Real>& tile, int64_t r, Real epsilon, bool detached) {
    const Real p = tile.inv_sum_exp[r], u = tile.sum_exp_others[r] * p;
    return FocalFormula::unlikely_terms(p, with_finite(tile.log_s[r]), WholeGammaAt<Real, kGamma>(u, detached), epsilon,
                                        tile.top_share[r]);
  }
};

// The label, where it is not the likely class.
template <typename Loss, typename Gammas>
struct LabelTerms {
  template <typename Real>
  static FK_HOST_DEVICE ClassTerms<Real> of(const SoftTile<Real>& tile, int64_t r, Real epsilon, bool detached) {
    const Real given = tile.label_gamma[r];
    // A loss without an inverse is NaN below 0.
    const bool in_domain = Loss::kHasInverse || !(given < Real(0));
    const AnyGamma<Real> gamma(in_domain ? given : std::numeric_limits<Real>::quiet_NaN(), detached);
    return Loss::unlikely_terms(exponential(tile.log_p[r]), with_finite(-tile.log_p[r]), gamma, epsilon,
                                tile.label_share[r]);
  }
};
template <typename Loss, int kGamma>
struct LabelTerms<Loss, WholeGammas<kGamma>> {
  template <typename Real>
  static FK_HOST_DEVICE ClassTerms<Real> of(const SoftTile<Real>& tile, int64_t r, Real epsilon, bool detached) {
    return Loss::unlikely_terms(exponential(tile.log_p[r]), with_finite(-tile.log_p[r]),
                                WholeGamma<Real, kGamma>(detached), epsilon, tile.label_share[r]);
  }
};

// The terms of the labels that are not the likely class; 0 for others.
template <typename Loss, typename Gammas, typename Real>
FK_VECTOR_CLONES void soft_labels(int64_t n_rows, Real epsilon, bool detach_modulation, SoftTile<Real>& tile) {
  // as wide as the numbers that it selects; otherwise gcc does not vectorize the loop
  const Real detached = detach_modulation ? 1 : 0;
#pragma omp simd
  for (int64_t r = 0; r < n_rows; ++r) {
    const ClassTerms<Real> label = LabelTerms<Loss, Gammas>::of(tile, r, epsilon, detached > Real(0));
    const bool is_apart = !(tile.target_logit[r] == tile.likely[r]);
    tile.label_loss[r] = is_apart ? label.loss : Real(0);
    tile.label_slope[r] = is_apart ? label.slope : Real(0);
    tile.label_gamma_slope[r] = is_apart ? label.grad_gamma : Real(0);
    tile.label_p[r] = exponential(tile.target_logit[r] - tile.shift[r]) * tile.inv_sum_exp[r];
  }
}

// The losses of rows before their weight, and the sum of a_j over all classes but the likely one.
template <typename Loss, typename Gammas, typename Real>
FK_VECTOR_CLONES void soft_losses(int64_t n_rows, Real epsilon, bool detach_modulation, Real uniform_share,
                                  SoftTile<Real>& tile) {
  const Real detached = detach_modulation ? 1 : 0;
#pragma omp simd
  for (int64_t r = 0; r < n_rows; ++r) {
    const ClassTerms<Real> top = TopTerms<Loss, Gammas>::of(tile, r, epsilon, detached > Real(0));
    const bool with_top = tile.inv_sum_exp[r] > kUnlikely<Real>;
    const Real of_top = with_top ? top.loss : Real(0);
    tile.loss[r] = uniform_share * tile.loss_sum[r] + tile.label_loss[r] + of_top;
    tile.others[r] = uniform_share * tile.grad_sum[r] + tile.label_slope[r];
  }
}

// Computes the results of rows whose `others` are known. `label_part`: the fraction of the label's
// share that other classes do not have.
template <typename Loss, typename Gammas, typename Real>
FK_VECTOR_CLONES void soft_grads(int64_t n_rows, Real epsilon, bool detach_modulation, Real uniform_share,
                                 Real label_part, Real kept, SoftTile<Real>& tile) {
  const Real detached = detach_modulation ? 1 : 0;
#pragma omp simd
  for (int64_t r = 0; r < n_rows; ++r) {
    const Real likely = tile.likely[r], inv_sum_exp = tile.inv_sum_exp[r], others = tile.others[r];
    const ClassTerms<Real> top = TopTerms<Loss, Gammas>::of(tile, r, epsilon, detached > Real(0));
    const bool with_top = tile.inv_sum_exp[r] > kUnlikely<Real>;
    const bool label_is_top = tile.target_logit[r] == likely;
    const Real scale = tile.upstream[r] * tile.row_weight[r];
    const Real all = others + (with_top ? top.slope : Real(0));
    const Real top_grad = scale * (inv_sum_exp * others - tile.sum_exp_others[r] * inv_sum_exp * top.slope);
    const Real label_grad = scale * (tile.label_p[r] * all - tile.label_slope[r]);
    tile.p_factor[r] = scale * all * inv_sum_exp;
    tile.share_factor[r] = scale * uniform_share;
    tile.top_grad[r] = top_grad;
    tile.label_grad[r] = label_is_top ? top_grad : label_grad;
    tile.top_share_grad[r] = top.grad_share;
    tile.share_grad_factor[r] = scale * kept;
    const Real of_label = label_part * tile.label_gamma_slope[r];
    const Real of_top = with_top ? top.grad_gamma : Real(0);
    tile.grad_gamma[r] = scale * (uniform_share * tile.gamma_sum[r] + of_label + of_top);
  }
}

}  // namespace
}  // namespace focalkern::cpu
