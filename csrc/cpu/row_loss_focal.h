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
//
// A loop has one exponential or logarithm, and leaves to the next what it found of the tile: in a longer one the steps
// of a row wait for each other, and those of the next are out of the processor's sight.
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

// e^(z_y - m), in the place of p.
template <typename Real>
FK_HOST_DEVICE void exponentials_of_targets(int64_t n_rows, Tile<Real>& tile) {
  const Real lowest = tile.exp_zero[0];
#pragma omp simd
  for (int64_t r = 0; r < n_rows; ++r) {
    const Real z_minus_max = tile.target_logit[r] - tile.max[r];
    const ScaledExponential<Real> e = scaled_exponential(lowest > z_minus_max ? lowest : z_minus_max);
    tile.p[r] = e.mantissa * e.scale;
  }
}

template <typename Real>
struct RowOfSums {
  Real per_sum;      // 1 / S
  Real minus_log_p;  // L
};
template <typename Real>
FK_HOST_DEVICE RowOfSums<Real> row_of_sums(const Tile<Real>& tile, int64_t r) {
  // If the target is the largest class its own term is exactly 1, and the sum is 1 + rest without rounding.
  const Real e = tile.p[r], rest = tile.rest[r];
  const Real log_s = log_of_sum(Real(1), rest + (e - Real(1)));
  return {Real(1) / (rest + e), log_s - (tile.target_logit[r] - tile.max[r])};
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

// The base of f as a sum that keeps its digits: of a likely class it is u itself, otherwise 1 - p or 1 + p.
template <typename Real>
struct TwoTerms {
  Real large;
  Real small;
};
// Without kEverInverse gamma is not negative.
template <bool kEverInverse, typename Real>
FK_HOST_DEVICE TwoTerms<Real> base_of_factor(const Tile<Real>& tile, int64_t r) {
  const Real p = tile.p[r];
  const bool inverse = kEverInverse && tile.gamma[r] < Real(0);
  const Real u_or_one = inverse ? Real(1) : -tile.minus_u[r], other = inverse ? p : -p;
  const bool likely = u_or_one < Real(0.5);
  return {likely ? u_or_one : Real(1), likely ? Real(0) : other};
}

// Where the base is 0 its logarithm is not -inf but far below 0: L is 0 there, and so is all that f multiplies.
template <bool kEverInverse, bool kKeepsBase, typename Real>
FK_HOST_DEVICE void logs_of_bases(int64_t n_rows, Tile<Real>& tile) {
#pragma omp simd
  for (int64_t r = 0; r < n_rows; ++r) {
    const TwoTerms<Real> base = base_of_factor<kEverInverse>(tile, r);
    if constexpr (kKeepsBase) tile.base[r] = base.large + base.small;
    tile.log_base[r] = log_of_sum(base.large, base.small);
  }
}
template <bool kEverInverse, typename Real>
FK_HOST_DEVICE Real focal_factor(const Tile<Real>& tile, int64_t r, Real lowest) {
  const Real gamma = tile.gamma[r], log_base = tile.log_base[r];
  if constexpr (kEverInverse) return exponential((gamma < Real(0) ? -gamma : gamma) * log_base);
  const Real log_factor = gamma * log_base;
  const ScaledExponential<Real> e = scaled_exponential(lowest > log_factor ? lowest : log_factor);
  return e.mantissa * e.scale;
}

// ---- forward -------------------------------------------------------------------------------------------------------

// A number of a row, 0 if it is ignored. Where all count, with weight 1 (kPlain), there is nothing to ask.
template <bool kPlain, typename Real>
FK_HOST_DEVICE Real kept(const Tile<Real>& tile, int64_t r, Real number) {
  if constexpr (kPlain) return number;
  return tile.label[r] == kNoTarget ? Real(0) : number;
}
template <bool kPlain, typename Real>
FK_HOST_DEVICE Real kept_loss(const Tile<Real>& tile, int64_t r, Real loss) {
  if constexpr (kPlain) return loss;
  return kept<kPlain>(tile, r, loss * tile.weight[r]);
}

template <bool kPlain, typename Real>
FK_HOST_DEVICE void save_row(const Tile<Real>& tile, int64_t r, Real per_sum, Real minus_log_p, Real* saved,
                             int64_t rows) {
  saved[r] = kept<kPlain>(tile, r, tile.max[r]);
  saved[rows + r] = kept<kPlain>(tile, r, per_sum);
  saved[2 * rows + r] = kept<kPlain>(tile, r, minus_log_p);
}

template <bool kPlain, typename Real>
FK_HOST_DEVICE void square_loss_of(int64_t n_rows, Tile<Real>& tile, Real* saved, int64_t rows, Real* losses,
                                   FocalLossSums* sums) {
  exponentials_of_targets(n_rows, tile);
  double loss_sum = 0, weight_sum = 0;
#pragma omp simd reduction(+ : loss_sum, weight_sum)
  for (int64_t r = 0; r < n_rows; ++r) {
    const RowOfSums<Real> row = row_of_sums(tile, r);
    const Real u = tile.rest[r] * row.per_sum;
    const Real loss = kept_loss<kPlain>(tile, r, (u * u) * row.minus_log_p);
    losses[r] = loss;
    loss_sum += static_cast<double>(loss);
    if constexpr (!kPlain) weight_sum += static_cast<double>(tile.weight[r]);
    save_row<kPlain>(tile, r, row.per_sum, row.minus_log_p, saved, rows);
  }
  sums->loss += loss_sum;
  sums->weight += kPlain ? static_cast<double>(n_rows) : weight_sum;
}

// The loss for gamma = 2, and the numbers of the rows for the backward pass.
template <typename Real>
FK_VECTOR_CLONES void finish_square_loss(int64_t n_rows, Tile<Real>& tile,
                                         Real* saved /* [kSavedNumbers, rows], at this tile */, int64_t rows,
                                         Real* losses, FocalLossSums* sums) {
  if (tile.is_plain) {
    square_loss_of<true>(n_rows, tile, saved, rows, losses, sums);
  } else {
    square_loss_of<false>(n_rows, tile, saved, rows, losses, sums);
  }
}

// p and u for other gammas, and the same numbers for the backward pass.
template <typename Real>
FK_VECTOR_CLONES void finish_shares(int64_t n_rows, Tile<Real>& tile, Real* saved, int64_t rows) {
  exponentials_of_targets(n_rows, tile);
#pragma omp simd
  for (int64_t r = 0; r < n_rows; ++r) {
    const RowOfSums<Real> row = row_of_sums(tile, r);
    tile.p[r] *= row.per_sum;
    tile.minus_u[r] = -tile.rest[r] * row.per_sum;
    tile.minus_log_p[r] = row.minus_log_p;
    save_row<false>(tile, r, row.per_sum, row.minus_log_p, saved, rows);
  }
}

template <bool kEverInverse, bool kPlain, typename Real>
FK_HOST_DEVICE void power_loss_of(int64_t n_rows, const Tile<Real>& tile, Real* losses, FocalLossSums* sums) {
  const Real lowest = tile.exp_zero[0];
  double loss_sum = 0, weight_sum = 0;
#pragma omp simd reduction(+ : loss_sum, weight_sum)
  for (int64_t r = 0; r < n_rows; ++r) {
    const Real factor = focal_factor<kEverInverse>(tile, r, lowest);
    const Real loss = kept_loss<kPlain>(tile, r, factor * tile.minus_log_p[r]);
    losses[r] = loss;
    loss_sum += static_cast<double>(loss);
    if constexpr (!kPlain) weight_sum += static_cast<double>(tile.weight[r]);
  }
  sums->loss += loss_sum;
  sums->weight += kPlain ? static_cast<double>(n_rows) : weight_sum;
}

template <bool kEverInverse, typename Real>
FK_VECTOR_CLONES void finish_power_loss(int64_t n_rows, Tile<Real>& tile, Real* losses, FocalLossSums* sums) {
  logs_of_bases<kEverInverse, false>(n_rows, tile);
  if (tile.is_plain) {
    power_loss_of<kEverInverse, true>(n_rows, tile, losses, sums);
  } else {
    power_loss_of<kEverInverse, false>(n_rows, tile, losses, sums);
  }
}

// ---- backward ------------------------------------------------------------------------------------------------------

// p and u of L: what a table is looked up in, in both directions, because they have to find the same gammas.
template <typename Real>
FK_VECTOR_CLONES void shares_of_logs(int64_t n_rows, const Real* minus_log_p, Tile<Real>& tile) {
  const Real largest = -tile.exp_zero[0];
#pragma omp simd
  for (int64_t r = 0; r < n_rows; ++r) {
    const Shares<Real> shares = shares_of(minus_log_p[r], largest);
    tile.p[r] = shares.p;
    tile.minus_u[r] = shares.minus_u;
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
    const bool is_zero = kept<kPlain>(tile, r, upstream) == Real(0);
    tile.max[r] = is_zero ? kInfinity : max;
    tile.factor[r] = is_zero ? Real(0) : factor;
    tile.target_slope[r] = is_zero ? Real(0) : target_slope;
  }
}

// The upstream gradient of plain rows is one number here, and not 0.
template <bool kPlain, typename Real>
FK_HOST_DEVICE void square_slope_of(const Real* saved, int64_t rows, int64_t n_rows, bool detach_modulation,
                                    Tile<Real>& tile) {
  const Real largest = -tile.exp_zero[0], one_upstream = tile.upstream[0];
  const Real pull = detach_modulation ? 0 : 2;
#pragma omp simd
  for (int64_t r = 0; r < n_rows; ++r) {
    const Shares<Real> shares = shares_of(saved[2 * rows + r], largest);
    const Real coefficient = shares.minus_u * (shares.minus_u - pull * (shares.p * shares.finite));
    const Real upstream = kPlain ? one_upstream : tile.upstream[r] * tile.weight[r];
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

// p of the logit: the slope in gamma of a small p is in proportion to it, and L has rounded that by more than one unit.
template <typename Real>
FK_VECTOR_CLONES void read_small_shares(const Real* saved, int64_t rows, int64_t n_rows, Tile<Real>& tile) {
#pragma omp simd
  for (int64_t r = 0; r < n_rows; ++r) tile.max[r] = saved[r];
  exponentials_of_targets(n_rows, tile);
#pragma omp simd
  for (int64_t r = 0; r < n_rows; ++r) tile.p[r] *= saved[rows + r];
}

template <bool kEverInverse, bool kGradGamma, typename Real>
FK_VECTOR_CLONES void finish_power_slope(const Real* saved, int64_t rows, int64_t n_rows, bool detach_modulation,
                                         Tile<Real>& tile) {
  constexpr Real kTiny = std::numeric_limits<Real>::epsilon() / 2;
  logs_of_bases<kEverInverse, true>(n_rows, tile);
  const Real lowest = tile.exp_zero[0], largest = -lowest;
  const Real detached = detach_modulation ? 1 : 0;  // as wide as the numbers it selects, or the loop stays scalar
#pragma omp simd
  for (int64_t r = 0; r < n_rows; ++r) {
    const Real gamma = tile.gamma[r], base = tile.base[r], minus_log_p = saved[2 * rows + r];
    const Real finite = largest < minus_log_p ? largest : minus_log_p;  // where it was cut off p is 0
    const Real factor = focal_factor<kEverInverse>(tile, r, lowest);
    const Real ratio = (tile.p[r] * finite) / base;
    const Real phi = base < kTiny ? Real(1) : ratio;  // 0 / 0 in the end
    const Real whole = factor * (Real(1) + gamma * phi);
    const Real coefficient = detached > Real(0) ? factor : whole;
    const Real upstream = tile.upstream[r] * tile.weight[r];
    store_slope<false>(saved, rows, r, upstream, coefficient, tile.minus_u[r], tile);
    if constexpr (kGradGamma) {
      const Real size = factor * (tile.log_base[r] * finite);
      tile.grad_gamma[r] = kept<false>(tile, r, upstream * (gamma < Real(0) ? -size : size));
    }
  }
}

// ---- a tile --------------------------------------------------------------------------------------------------------

template <typename Scalar>
FK_HOST_DEVICE bool gamma_is_two(const FocalLossArgs<Scalar>& args) {
  return !args.gamma && args.gamma_value == 2;
}
template <typename Scalar>
FK_HOST_DEVICE bool ever_inverse(const FocalLossArgs<Scalar>& args) {
  return args.gamma || !(args.gamma_value >= 0);
}

template <typename Scalar>
void finish_focal_loss(const FocalLossForward<Scalar>& args, int64_t row_begin, int64_t n_rows,
                       Tile<compute_t<Scalar>>& tile, FocalLossSums* sums) {
  auto* const saved = args.saved + row_begin;
  auto* const losses = args.row_loss ? args.row_loss + row_begin : tile.loss;
  if (gamma_is_two(args)) return finish_square_loss(n_rows, tile, saved, args.rows, losses, sums);
  finish_shares(n_rows, tile, saved, args.rows);
  if (args.edges) {
    shares_of_logs(n_rows, tile.minus_log_p, tile);
    look_up_gamma(tile.p, n_rows, args.edges, args.gamma, args.n_bins, tile.gamma);
  }
  if (ever_inverse(args)) {
    finish_power_loss<true>(n_rows, tile, losses, sums);
  } else {
    finish_power_loss<false>(n_rows, tile, losses, sums);
  }
}

// tile.target_logit is needed for the slope in gamma alone, which is never wanted of a table.
template <typename Scalar>
void finish_focal_slope(const FocalLossBackward<Scalar>& args, int64_t row_begin, int64_t n_rows,
                        Tile<compute_t<Scalar>>& tile) {
  const auto* const saved = args.saved + row_begin;
  const bool detached = args.detach_modulation;
  if (gamma_is_two(args) && !args.grad_gamma) {
    const bool is_plain = tile.is_plain && args.grad_stride == 0 && tile.upstream[0] != 0;
    return finish_square_slope(saved, args.rows, n_rows, detached, is_plain, tile);
  }
  shares_of_logs(n_rows, saved + 2 * args.rows, tile);
  if (args.edges) look_up_gamma(tile.p, n_rows, args.edges, args.gamma, args.n_bins, tile.gamma);
  if (args.grad_gamma) {
    read_small_shares(saved, args.rows, n_rows, tile);
    finish_power_slope<true, true>(saved, args.rows, n_rows, detached, tile);
    std::copy(tile.grad_gamma, tile.grad_gamma + n_rows, args.grad_gamma + row_begin);
  } else if (ever_inverse(args)) {
    finish_power_slope<true, false>(saved, args.rows, n_rows, detached, tile);
  } else {
    finish_power_slope<false, false>(saved, args.rows, n_rows, detached, tile);
  }
}

}  // namespace
}  // namespace focalkern::cpu
