// Epilogue of the focal and inverse focal loss of labels. The formulas are those of math/focal.h, written with the
// sums:
//
//   S = rest + e^(z_y - m)    L = -log p = log S - (z_y - m)    p = e^(z_y - m) / S    u = 1 - p = rest / S
//   f = base^|gamma|          base = u, or 1 + p for a negative gamma
//   loss = f L                c = f (1 + gamma p L / base), or f where the modulation is detached
//
// The gradient is c p_j = (c / S) e^(z_j - m), and that of the target -c u = -(c / S) rest. The forward pass saves
// three numbers: saved [3, rows] = (m, c / S, -rest). If gamma is 2 for every row, the common case, the factor is a
// square: no logarithm and no power.
//
// Each loop computes one exponential or logarithm per row and stores it for the next loop. A fused loop would be bound
// by latency.
#pragma once

#include <algorithm>
#include <limits>
#include <type_traits>

#include "cpu/row_loss/epilogue.h"
#include "cpu/row_loss/tile.h"
#include "cpu/simd/dispatch.h"
#include "cpu/simd/math.h"

namespace focalkern::cpu {
namespace {

template <typename Loss>
constexpr bool kIsFocal = std::is_same_v<Loss, FocalFormula>;

// Writes e^(z_y - m) to tile.p.
template <typename Real>
FK_HOST_DEVICE void exponentials_of_targets(int64_t n_rows, Tile<Real>& tile) {
  const Real lowest = tile.exp_zero[0];
#pragma omp simd
  for (int64_t r = 0; r < n_rows; ++r) {
    const Real z_minus_max = tile.target_logit[r] - tile.shift[r];
    const ScaledExponential<Real> e = scaled_exponential(lowest > z_minus_max ? lowest : z_minus_max);
    tile.p[r] = e.mantissa * e.scale;
  }
}

// 1 / S, p, p - 1 without cancellation, and L.
template <typename Real>
FK_HOST_DEVICE void shares_of_sums(int64_t n_rows, Tile<Real>& tile) {
  exponentials_of_targets(n_rows, tile);
#pragma omp simd
  for (int64_t r = 0; r < n_rows; ++r) {
    // If m is the target's logit, its term is exactly 1, and the sum is 1 + rest without rounding.
    const Real e = tile.p[r], rest = tile.sum_exp_others[r];
    const Real log_s = log_of_sum(Real(1), rest + (e - Real(1)));
    const Real inv_sum_exp = Real(1) / (rest + e);
    tile.inv_sum_exp[r] = inv_sum_exp;
    tile.p[r] = e * inv_sum_exp;
    tile.p_minus_one[r] = -rest * inv_sum_exp;
    tile.minus_log_p[r] = log_s - (tile.target_logit[r] - tile.shift[r]);
  }
}

// L, clamped to a finite number for its product with p: where L exceeds the largest number, p is 0.
template <typename Real>
FK_HOST_DEVICE Real finite_part(Real minus_log_p, Real largest) {
  return largest < minus_log_p ? largest : minus_log_p;
}

// The base of f as a sum of two terms without cancellation: u + 0 if the class is likely, otherwise 1 + (-p), or 1 + p.
template <typename Real>
struct TwoTerms {
  Real large;
  Real small;
};
// Without kEverInverse no gamma is negative.
template <bool kEverInverse, typename Real>
FK_HOST_DEVICE TwoTerms<Real> base_of_factor(const Tile<Real>& tile, int64_t r) {
  const Real p = tile.p[r];
  const bool inverse = kEverInverse && tile.gamma[r] < Real(0);
  const Real u_or_one = inverse ? Real(1) : -tile.p_minus_one[r], other = inverse ? p : -p;
  const bool likely = u_or_one < Real(0.5);
  return {likely ? u_or_one : Real(1), likely ? Real(0) : other};
}

// Where the base is 0, log_base is a large negative number, not -inf: L is 0 there, so its products with f are 0, not
// NaN.
template <bool kEverInverse, typename Real>
FK_HOST_DEVICE void logs_of_bases(int64_t n_rows, Tile<Real>& tile) {
#pragma omp simd
  for (int64_t r = 0; r < n_rows; ++r) {
    const TwoTerms<Real> base = base_of_factor<kEverInverse>(tile, r);
    tile.base[r] = base.large + base.small;
    tile.log_base[r] = log_of_sum(base.large, base.small);
  }
}
template <bool kEverInverse, typename Real>
FK_HOST_DEVICE Real focal_factor(const Tile<Real>& tile, int64_t r, Real lowest) {
  const Real gamma = tile.gamma[r], log_base = tile.log_base[r];
  const Real log_factor = (kEverInverse && gamma < Real(0) ? -gamma : gamma) * log_base;
  const ScaledExponential<Real> e = scaled_exponential(lowest > log_factor ? lowest : log_factor);
  const Real factor = e.mantissa * e.scale;
  // the factor overflows from half of the largest number on
  return kEverInverse && log_factor > -lowest ? std::numeric_limits<Real>::infinity() : factor;
}

// ---- forward -------------------------------------------------------------------------------------------------------

// The number, or 0 for an ignored row. kPlain: every row counts with weight 1, so no test is needed.
template <bool kPlain, typename Real>
FK_HOST_DEVICE Real kept(const Tile<Real>& tile, int64_t r, Real number) {
  if constexpr (kPlain) return number;
  return tile.label[r] == kNoTarget ? Real(0) : number;
}
template <bool kPlain, typename Real>
FK_HOST_DEVICE Real kept_loss(const Tile<Real>& tile, int64_t r, Real loss) {
  if constexpr (kPlain) return loss;
  return kept<kPlain>(tile, r, weighted_loss(tile.weight[r], loss));
}

template <bool kPlain, typename Real>
FK_HOST_DEVICE void save_row(const Tile<Real>& tile, int64_t r, Real coefficient, Real* saved, int64_t rows) {
  saved[r] = kept<kPlain>(tile, r, tile.shift[r]);
  saved[rows + r] = kept<kPlain>(tile, r, coefficient * tile.inv_sum_exp[r]);
  saved[2 * rows + r] = kept<kPlain>(tile, r, -tile.sum_exp_others[r]);
}

template <bool kPlain, typename Real>
FK_HOST_DEVICE void square_loss_of(int64_t n_rows, bool detach_modulation, Tile<Real>& tile, Real* saved, int64_t rows,
                                   Real* losses, RowLossSums* sums) {
  shares_of_sums(n_rows, tile);
  const Real largest = -tile.exp_zero[0], pull = detach_modulation ? 0 : 2;
  double loss_sum = 0, weight_sum = 0;
#pragma omp simd reduction(+ : loss_sum, weight_sum)
  for (int64_t r = 0; r < n_rows; ++r) {
    const Real p_minus_one = tile.p_minus_one[r], minus_log_p = tile.minus_log_p[r], square = p_minus_one * p_minus_one;
    const Real loss = kept_loss<kPlain>(tile, r, square * minus_log_p);
    losses[r] = loss;
    loss_sum += static_cast<double>(loss);
    if constexpr (!kPlain) weight_sum += static_cast<double>(tile.weight[r]);
    save_row<kPlain>(tile, r, square - (pull * p_minus_one * tile.p[r]) * finite_part(minus_log_p, largest), saved,
                     rows);
  }
  sums->loss += loss_sum;
  sums->weight += kPlain ? static_cast<double>(n_rows) : weight_sum;
}

// The loss for gamma = 2, and the numbers that the rows save.
template <typename Real>
FK_VECTOR_CLONES void finish_square_loss(int64_t n_rows, bool detach_modulation, Tile<Real>& tile,
                                         Real* saved /* [kSavedNumbers, rows], at this tile */, int64_t rows,
                                         Real* losses, RowLossSums* sums) {
  if (tile.is_plain) {
    square_loss_of<true>(n_rows, detach_modulation, tile, saved, rows, losses, sums);
  } else {
    square_loss_of<false>(n_rows, detach_modulation, tile, saved, rows, losses, sums);
  }
}

template <typename Real>
FK_VECTOR_CLONES void finish_shares(int64_t n_rows, Tile<Real>& tile) {
  shares_of_sums(n_rows, tile);
}

template <bool kEverInverse, bool kPlain, typename Real>
FK_HOST_DEVICE void power_loss_of(int64_t n_rows, bool detach_modulation, const Tile<Real>& tile, Real* saved,
                                  int64_t rows, Real* losses, RowLossSums* sums) {
  constexpr Real kTiny = std::numeric_limits<Real>::epsilon() / 2;
  const Real lowest = tile.exp_zero[0], largest = -lowest;
  // as wide as the numbers that it selects; otherwise gcc does not vectorize the loop
  const Real detached = detach_modulation ? 1 : 0;
  double loss_sum = 0, weight_sum = 0;
#pragma omp simd reduction(+ : loss_sum, weight_sum)
  for (int64_t r = 0; r < n_rows; ++r) {
    const Real factor = focal_factor<kEverInverse>(tile, r, lowest), base = tile.base[r];
    const Real loss = kept_loss<kPlain>(tile, r, factor * tile.minus_log_p[r]);
    losses[r] = loss;
    loss_sum += static_cast<double>(loss);
    if constexpr (!kPlain) weight_sum += static_cast<double>(tile.weight[r]);
    const Real ratio = (tile.p[r] * finite_part(tile.minus_log_p[r], largest)) / base;
    const Real phi = base < kTiny ? Real(1) : ratio;  // the limit of 0 / 0
    const Real whole = factor * (Real(1) + tile.gamma[r] * phi);
    save_row<kPlain>(tile, r, detached > Real(0) ? factor : whole, saved, rows);
  }
  sums->loss += loss_sum;
  sums->weight += kPlain ? static_cast<double>(n_rows) : weight_sum;
}

template <bool kEverInverse, typename Real>
FK_VECTOR_CLONES void finish_power_loss(int64_t n_rows, bool detach_modulation, Tile<Real>& tile, Real* saved,
                                        int64_t rows, Real* losses, RowLossSums* sums) {
  logs_of_bases<kEverInverse>(n_rows, tile);
  if (tile.is_plain) {
    power_loss_of<kEverInverse, true>(n_rows, detach_modulation, tile, saved, rows, losses, sums);
  } else {
    power_loss_of<kEverInverse, false>(n_rows, detach_modulation, tile, saved, rows, losses, sums);
  }
}

// ---- backward ------------------------------------------------------------------------------------------------------

// The coefficients of a row's gradient. Plain rows share one upstream gradient, which is not 0.
template <bool kPlain, typename Real>
FK_HOST_DEVICE void grads_of(const Real* saved, int64_t rows, int64_t n_rows, Tile<Real>& tile) {
  constexpr Real kInfinity = std::numeric_limits<Real>::infinity();
  const Real one_upstream = tile.upstream[0];
#pragma omp simd
  for (int64_t r = 0; r < n_rows; ++r) {
    const Real max = saved[r], upstream = kPlain ? one_upstream : tile.upstream[r] * tile.weight[r];
    const Real factor = upstream * saved[rows + r], target_grad = factor * saved[2 * rows + r];
    if constexpr (kPlain) {
      tile.shift[r] = max;
      tile.factor[r] = factor;
      tile.target_grad[r] = target_grad;
    } else {
      // An ignored row has a zero gradient even where its logits are infinite or NaN.
      const bool is_zero = kept<kPlain>(tile, r, upstream) == Real(0);
      tile.shift[r] = is_zero ? kInfinity : max;
      tile.factor[r] = is_zero ? Real(0) : factor;
      tile.target_grad[r] = is_zero ? Real(0) : target_grad;
    }
  }
}

template <typename Real>
FK_VECTOR_CLONES void finish_focal_grads(const Real* saved, int64_t rows, int64_t n_rows, bool is_plain,
                                         Tile<Real>& tile) {
  if (is_plain) {
    grads_of<true>(saved, rows, n_rows, tile);
  } else {
    grads_of<false>(saved, rows, n_rows, tile);
  }
}

// dL/dgamma = f L log(base). It recomputes p from the logits of the targets.
template <typename Real>
FK_VECTOR_CLONES void finish_gamma_grads(const Real* saved, int64_t rows, int64_t n_rows, Tile<Real>& tile,
                                         Real* grad_gamma) {
#pragma omp simd
  for (int64_t r = 0; r < n_rows; ++r) {
    tile.shift[r] = saved[r];
    tile.sum_exp_others[r] = -saved[2 * rows + r];
  }
  shares_of_sums(n_rows, tile);
  logs_of_bases<true>(n_rows, tile);
  const Real lowest = tile.exp_zero[0], largest = -lowest;
#pragma omp simd
  for (int64_t r = 0; r < n_rows; ++r) {
    const Real factor = focal_factor<true>(tile, r, lowest);
    const Real size = factor * (tile.log_base[r] * finite_part(tile.minus_log_p[r], largest));
    const Real slope = tile.gamma[r] < Real(0) ? -size : size;
    grad_gamma[r] = kept<false>(tile, r, tile.upstream[r] * tile.weight[r] * slope);
  }
}

// ---- a tile --------------------------------------------------------------------------------------------------------

template <typename Scalar>
FK_HOST_DEVICE bool gamma_is_two(const RowLossArgs<Scalar>& args) {
  return !args.gamma && args.gamma_value == 2;
}

template <typename Scalar>
void finish_focal_loss(const RowLossForward<Scalar>& args, int64_t row_begin, int64_t n_rows,
                       Tile<compute_t<Scalar>>& tile, RowLossSums* sums) {
  auto* const saved = args.saved + row_begin;
  auto* const losses = args.row_loss ? args.row_loss + row_begin : tile.loss;
  const bool detached = args.detach_modulation;
  if (gamma_is_two(args)) return finish_square_loss(n_rows, detached, tile, saved, args.rows, losses, sums);
  finish_shares(n_rows, tile);
  if (args.edges) look_up_gamma(tile.p, n_rows, args.edges, args.gamma, args.n_bins, tile.gamma);
  if (tile.ever_inverse) {
    finish_power_loss<true>(n_rows, detached, tile, saved, args.rows, losses, sums);
  } else {
    finish_power_loss<false>(n_rows, detached, tile, saved, args.rows, losses, sums);
  }
}

// Only dL/dgamma needs tile.target_logit, and with a table of gammas it does not exist.
template <typename Scalar>
void finish_focal_grad(const RowLossBackward<Scalar>& args, int64_t row_begin, int64_t n_rows,
                       Tile<compute_t<Scalar>>& tile) {
  const auto* const saved = args.saved + row_begin;
  if (args.grad_gamma) finish_gamma_grads(saved, args.rows, n_rows, tile, args.grad_gamma + row_begin);
  const bool is_plain = tile.is_plain && args.grad_stride == 0 && tile.upstream[0] != 0;
  finish_focal_grads(saved, args.rows, n_rows, is_plain, tile);
}

}  // namespace
}  // namespace focalkern::cpu
