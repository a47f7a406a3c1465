// From sums to loss and slope, as row_loss_finish.h, for the focal and inverse focal loss of labels. Its formulas are
// those of math/focal.h, from other numbers:
//
//   S = rest + e^(z_y - m)    L = -log p = log S - (z_y - m)    p = e^-L    u = 1 - p = -expm1(-L) = rest / S
//   f = base^|gamma|          base = u, or 1 + p for a negative gamma
//   loss = f L                coefficient = f (1 + gamma p L / base)
//
// L has all its digits at both ends, and p and u get theirs from it with one exponential. So that is what a row keeps:
// saved [3, rows] = (m, 1 / S, L), and no logit of a target is looked up for the gradient. gamma = 2 for every row, the
// common case, is a square: no logarithm and no power.
#pragma once

#include <algorithm>
#include <limits>
#include <type_traits>

#include "cpu/elementary.h"
#include "cpu/row_loss_finish.h"
#include "cpu/row_loss_tile.h"
#include "cpu/vector_clones.h"

namespace focalkern::cpu {
namespace {

template <typename Loss>
constexpr bool kIsFocal = std::is_same_v<Loss, FocalRow>;

template <typename Real>
struct RowOfSums {
  Real per_sum;      // 1 / S
  Real minus_log_p;  // L
  Real u;
};
template <typename Real>
FK_HOST_DEVICE RowOfSums<Real> row_of_sums(const Tile<Real>& tile, int64_t r, Real lowest) {
  const Real z_minus_max = tile.target_logit[r] - tile.max[r], rest = tile.rest[r];
  const ScaledExponential<Real> parts = scaled_exponential(lowest > z_minus_max ? lowest : z_minus_max);
  // If the target is the largest class its own term is exactly 1, and the sum is 1 + rest without rounding.
  const Real e = parts.mantissa * parts.scale;
  const Real log_s = log_of_sum(Real(1), rest + (e - Real(1)));
  const Real per_sum = Real(1) / (rest + e);
  return {per_sum, log_s - z_minus_max, rest * per_sum};
}

// p and -u, and an L that is finite: where it was cut off p is 0.
template <typename Real>
struct Shares {
  Real p;
  Real minus_u;
  Real finite;
};
template <typename Real>
FK_HOST_DEVICE Shares<Real> shares_of(Real minus_log_p, Real largest) {
  const Real finite = largest < minus_log_p ? largest : minus_log_p;
  const PowerPair<Real> e = power_and_minus_one(-finite);
  return {e.power, e.minus_one, finite};
}

// f, and of which number it is a power. With one logarithm: of a likely class log u is that of u itself, otherwise it
// is log1p(-p). Where u is 0 the logarithm is not -inf but far below 0; L is 0 there, and so is all that f multiplies.
template <typename Real>
struct FocalFactor {
  Real factor;
  Real base;
  Real log_base;
};
template <typename Real>
FK_HOST_DEVICE FocalFactor<Real> focal_factor(Real p, Real minus_u, Real gamma) {
  const bool inverse = gamma < Real(0);
  const Real magnitude = inverse ? -gamma : gamma;
  const Real a = inverse ? Real(1) : -minus_u, b = inverse ? p : -p;
  const bool likely = a < Real(0.5);
  const Real large = likely ? a : Real(1), small = likely ? Real(0) : b;
  const Real log_base = log_of_sum(large, small);
  return {exponential(magnitude * log_base), large + small, log_base};
}

// Of rows that all count, with weight 1 (kPlain), or not.
template <bool kPlain, typename Real>
FK_HOST_DEVICE Real weighted_loss(const Tile<Real>& tile, int64_t r, Real loss) {
  if constexpr (kPlain) return loss;
  const Real weighted = loss * tile.weight[r];
  return tile.label[r] == kNoTarget ? Real(0) : weighted;
}
template <bool kPlain, typename Real>
FK_HOST_DEVICE Real kept(const Tile<Real>& tile, int64_t r, Real number) {
  if constexpr (kPlain) return number;
  return tile.label[r] == kNoTarget ? Real(0) : number;
}

template <bool kPlain, typename Real>
FK_HOST_DEVICE void square_loss_of(int64_t n_rows, const Tile<Real>& tile, Real* saved, int64_t rows, Real* losses,
                                   FocalLossSums* sums) {
  const Real lowest = tile.exp_zero[0];
  double loss_sum = 0, weight_sum = 0;
#pragma omp simd reduction(+ : loss_sum, weight_sum)
  for (int64_t r = 0; r < n_rows; ++r) {
    const RowOfSums<Real> row = row_of_sums(tile, r, lowest);
    const Real loss = weighted_loss<kPlain>(tile, r, (row.u * row.u) * row.minus_log_p);
    losses[r] = loss;
    loss_sum += static_cast<double>(loss);
    if constexpr (!kPlain) weight_sum += static_cast<double>(tile.weight[r]);
    saved[r] = kept<kPlain>(tile, r, tile.max[r]);
    saved[rows + r] = kept<kPlain>(tile, r, row.per_sum);
    saved[2 * rows + r] = kept<kPlain>(tile, r, row.minus_log_p);
  }
  sums->loss += loss_sum;
  sums->weight += kPlain ? static_cast<double>(n_rows) : weight_sum;
}

// The loss for gamma = 2 and, as all that follow, the numbers of rows for the backward pass.
template <typename Real>
FK_VECTOR_CLONES void finish_square_loss(int64_t n_rows, const Tile<Real>& tile,
                                         Real* saved /* [kSavedNumbers, rows], at this tile */, int64_t rows,
                                         Real* losses, FocalLossSums* sums) {
  if (tile.is_plain) {
    square_loss_of<true>(n_rows, tile, saved, rows, losses, sums);
  } else {
    square_loss_of<false>(n_rows, tile, saved, rows, losses, sums);
  }
}

// p and u first, in which a table of gammas may be looked up.
template <typename Real>
FK_VECTOR_CLONES void finish_shares(int64_t n_rows, Tile<Real>& tile, Real* saved, int64_t rows) {
  const Real lowest = tile.exp_zero[0];
#pragma omp simd
  for (int64_t r = 0; r < n_rows; ++r) {
    const RowOfSums<Real> row = row_of_sums(tile, r, lowest);
    const Shares<Real> shares = shares_of(row.minus_log_p, -lowest);
    tile.p[r] = shares.p;
    tile.minus_u[r] = shares.minus_u;
    tile.minus_log_p[r] = row.minus_log_p;
    saved[r] = kept<false>(tile, r, tile.max[r]);
    saved[rows + r] = kept<false>(tile, r, row.per_sum);
    saved[2 * rows + r] = kept<false>(tile, r, row.minus_log_p);
  }
}

template <bool kPlain, typename Real>
FK_HOST_DEVICE void power_loss_of(int64_t n_rows, const Tile<Real>& tile, Real* losses, FocalLossSums* sums) {
  double loss_sum = 0, weight_sum = 0;
#pragma omp simd reduction(+ : loss_sum, weight_sum)
  for (int64_t r = 0; r < n_rows; ++r) {
    const Real factor = focal_factor(tile.p[r], tile.minus_u[r], tile.gamma[r]).factor;
    const Real loss = weighted_loss<kPlain>(tile, r, factor * tile.minus_log_p[r]);
    losses[r] = loss;
    loss_sum += static_cast<double>(loss);
    if constexpr (!kPlain) weight_sum += static_cast<double>(tile.weight[r]);
  }
  sums->loss += loss_sum;
  sums->weight += kPlain ? static_cast<double>(n_rows) : weight_sum;
}

template <typename Real>
FK_VECTOR_CLONES void finish_power_loss(int64_t n_rows, const Tile<Real>& tile, Real* losses, FocalLossSums* sums) {
  if (tile.is_plain) {
    power_loss_of<true>(n_rows, tile, losses, sums);
  } else {
    power_loss_of<false>(n_rows, tile, losses, sums);
  }
}

// From the slopes of a row to what its gradient is made of.
template <bool kPlain, typename Real>
FK_HOST_DEVICE void store_slope(const Real* saved, int64_t rows, int64_t r, Real upstream, Real coefficient,
                                Real minus_u, Tile<Real>& tile) {
  constexpr Real kInfinity = std::numeric_limits<Real>::infinity();
  const Real max = saved[r], scaled = upstream * coefficient;
  const Real factor = scaled * saved[rows + r], target_slope = scaled * minus_u;
  if constexpr (kPlain) {
    tile.max[r] = max;
    tile.factor[r] = factor;
    tile.target_slope[r] = target_slope;
  } else {
    // Also where the logits are infinite or NaN: an ignored row has a zero gradient whatever it holds.
    const Real scale = tile.label[r] == kNoTarget ? Real(0) : upstream;
    const bool is_zero = scale == Real(0);
    tile.max[r] = is_zero ? kInfinity : max;
    tile.factor[r] = is_zero ? Real(0) : factor;
    tile.target_slope[r] = is_zero ? Real(0) : target_slope;
  }
}

// A plain row's upstream gradient is one number, and not 0.
template <bool kPlain, typename Real>
FK_HOST_DEVICE Real upstream_of(const Tile<Real>& tile, int64_t r, Real one_upstream) {
  if constexpr (kPlain) return one_upstream;
  return tile.upstream[r] * tile.weight[r];
}

template <bool kPlain, typename Real>
FK_HOST_DEVICE void square_slope_of(const Real* saved, int64_t rows, int64_t n_rows, bool detach_modulation,
                                    Tile<Real>& tile) {
  const Real largest = -tile.exp_zero[0], one_upstream = tile.upstream[0];
  const Real pull = detach_modulation ? Real(0) : Real(2);
#pragma omp simd
  for (int64_t r = 0; r < n_rows; ++r) {
    const Shares<Real> shares = shares_of(saved[2 * rows + r], largest);
    const Real coefficient = shares.minus_u * (shares.minus_u - pull * (shares.p * shares.finite));
    const Real upstream = upstream_of<kPlain>(tile, r, one_upstream);
    store_slope<kPlain>(saved, rows, r, upstream, coefficient, shares.minus_u, tile);
  }
}

template <typename Real>
FK_VECTOR_CLONES void finish_square_slope(const Real* saved, int64_t rows, int64_t n_rows, bool detach_modulation,
                                          bool is_plain, Tile<Real>& tile) {
  if (is_plain) {
    square_slope_of<true>(saved, rows, n_rows, detach_modulation, tile);
  } else {
    square_slope_of<false>(saved, rows, n_rows, detach_modulation, tile);
  }
}

template <typename Real>
FK_VECTOR_CLONES void read_shares(const Real* saved, int64_t rows, int64_t n_rows, Tile<Real>& tile) {
  const Real largest = -tile.exp_zero[0];
#pragma omp simd
  for (int64_t r = 0; r < n_rows; ++r) {
    const Shares<Real> shares = shares_of(saved[2 * rows + r], largest);
    tile.p[r] = shares.p;
    tile.minus_u[r] = shares.minus_u;
    tile.minus_log_p[r] = shares.finite;
  }
}

template <bool kPlain, bool kGradGamma, typename Real>
FK_HOST_DEVICE void power_slope_of(const Real* saved, int64_t rows, int64_t n_rows, bool detach_modulation,
                                   Tile<Real>& tile) {
  constexpr Real kTiny = std::numeric_limits<Real>::epsilon() / 2;
  const Real one_upstream = tile.upstream[0], lowest = tile.exp_zero[0];
  const Real detached = detach_modulation ? 1 : 0;  // as wide as the numbers it selects, or the loop stays scalar
#pragma omp simd
  for (int64_t r = 0; r < n_rows; ++r) {
    const Real gamma = tile.gamma[r], minus_u = tile.minus_u[r], finite = tile.minus_log_p[r];
    Real p = tile.p[r];
    if constexpr (kGradGamma) {
      // The slope in gamma of a small p is in proportion to it, and L has rounded that by more than one unit.
      const Real z_minus_max = tile.target_logit[r] - saved[r];
      const ScaledExponential<Real> e = scaled_exponential(lowest > z_minus_max ? lowest : z_minus_max);
      p = (e.mantissa * e.scale) * saved[rows + r];
    }
    const FocalFactor<Real> f = focal_factor(p, minus_u, gamma);
    // p L / u is 0 / 0 in the end.
    const Real ratio = (p * finite) / f.base;
    const Real phi = f.base < kTiny ? Real(1) : ratio;
    const Real whole = f.factor * (Real(1) + gamma * phi);
    const Real coefficient = detached > Real(0) ? f.factor : whole;
    const Real upstream = upstream_of<kPlain>(tile, r, one_upstream);
    store_slope<kPlain>(saved, rows, r, upstream, coefficient, minus_u, tile);
    if constexpr (kGradGamma) {
      const Real size = f.factor * (f.log_base * finite);
      tile.grad_gamma[r] = kept<false>(tile, r, upstream * (gamma < Real(0) ? -size : size));
    }
  }
}

template <bool kGradGamma, typename Real>
FK_VECTOR_CLONES void finish_power_slope(const Real* saved, int64_t rows, int64_t n_rows, bool detach_modulation,
                                         bool is_plain, Tile<Real>& tile) {
  if (!kGradGamma && is_plain) {
    power_slope_of<!kGradGamma, kGradGamma>(saved, rows, n_rows, detach_modulation, tile);
  } else {
    power_slope_of<false, kGradGamma>(saved, rows, n_rows, detach_modulation, tile);
  }
}

template <typename Scalar>
FK_HOST_DEVICE bool gamma_is_two(const FocalLossArgs<Scalar>& args) {
  return !args.gamma && args.gamma_value == compute_t<Scalar>(2);
}

template <typename Scalar>
void finish_focal_loss(const FocalLossForward<Scalar>& args, int64_t row_begin, int64_t n_rows,
                       Tile<compute_t<Scalar>>& tile, FocalLossSums* sums) {
  auto* const saved = args.saved + row_begin;
  auto* const losses = args.row_loss ? args.row_loss + row_begin : tile.loss;
  if (gamma_is_two(args)) return finish_square_loss(n_rows, tile, saved, args.rows, losses, sums);
  finish_shares(n_rows, tile, saved, args.rows);
  if (args.edges) look_up_gamma(tile.p, n_rows, args.edges, args.gamma, args.n_bins, tile.gamma);
  finish_power_loss(n_rows, tile, losses, sums);
}

// tile.target_logit is needed for the slope in gamma alone.
template <typename Scalar>
void finish_focal_slope(const FocalLossBackward<Scalar>& args, int64_t row_begin, int64_t n_rows,
                        Tile<compute_t<Scalar>>& tile) {
  using Real = compute_t<Scalar>;
  const auto* const saved = args.saved + row_begin;
  const bool is_plain = tile.is_plain && args.grad_stride == 0 && tile.upstream[0] != Real(0);
  if (gamma_is_two(args) && !args.grad_gamma) {
    return finish_square_slope(saved, args.rows, n_rows, args.detach_modulation, is_plain, tile);
  }
  read_shares(saved, args.rows, n_rows, tile);
  if (args.edges) look_up_gamma(tile.p, n_rows, args.edges, args.gamma, args.n_bins, tile.gamma);
  if (args.grad_gamma) {
    finish_power_slope<true>(saved, args.rows, n_rows, args.detach_modulation, false, tile);
    std::copy(tile.grad_gamma, tile.grad_gamma + n_rows, args.grad_gamma + row_begin);
  } else {
    finish_power_slope<false>(saved, args.rows, n_rows, args.detach_modulation, is_plain, tile);
  }
}

}  // namespace
}  // namespace focalkern::cpu
