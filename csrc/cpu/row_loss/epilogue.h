// Epilogue: from sums to loss and gradient, a tile of rows at a time. epilogue_focal.h has the epilogue of the focal
// loss.
#pragma once

#include <algorithm>
#include <limits>
#include <type_traits>

#include "cpu/row_loss/tile.h"
#include "cpu/simd/dispatch.h"
#include "cpu/simd/math.h"

namespace focalkern::cpu {
namespace {

template <typename Loss, typename Real>
FK_VECTOR_CLONES void finish_sums(int64_t n_rows, Tile<Real>& tile) {
#pragma omp simd
  for (int64_t r = 0; r < n_rows; ++r) {
    const Real z_minus_max = tile.target_logit[r] - tile.shift[r];
    if constexpr (Loss::kSumExcludesTop) {
      // The largest class adds exactly 1. m - m makes the result NaN for an infinite m, which the sum over the others
      // does not show.
      const Real log_s = log_of_unit_sum(Real(1), tile.sum_exp_others[r]) + (tile.shift[r] - tile.shift[r]);
      tile.log_s[r] = log_s;
      tile.log_p[r] = z_minus_max - log_s;
      tile.log_u[r] = 0;
      if constexpr (Loss::kSquares) tile.squares[r] *= bounded_exponential(Real(-2) * log_s);
      continue;
    }
    // If m is the target's logit, its term is exactly 1, and the sum is 1 + rest without rounding.
    const Real e = bounded_exponential(z_minus_max);
    const Real rest = tile.sum_exp_others[r], all_but_one = rest + (e - Real(1));
    const Real log_s = log_of_unit_sum(Real(1), all_but_one);
    // The target's u = rest / S. As p -> 0, u approaches 1, and only log(1 - p) keeps its digits.
    const bool is_likely = rest < e;  // then m is the target's logit, with kSumOnly or without
    const Real p = e / (Real(1) + all_but_one);
    const Real log_rest_or_u = log_of_unit_sum(is_likely ? rest : Real(1), is_likely ? Real(0) : -p);
    tile.log_s[r] = log_s;
    tile.log_p[r] = z_minus_max - log_s;
    tile.log_u[r] = log_rest_or_u - (is_likely ? log_s : Real(0));
  }
}

// table_gamma for many probabilities. The outer loop runs over bins, so that the inner loop over rows vectorizes.
template <typename Real>
FK_VECTOR_CLONES void look_up_gamma_by_steps(const Real* p, int64_t n, const Real* edges, const Real* gammas,
                                             int64_t n_bins, Real* gamma) {
  for (int64_t begin = 0; begin < n; begin += kTileRows) {
    const int64_t end = std::min(begin + kTileRows, n);
    for (int64_t r = begin; r < end; ++r) gamma[r] = gammas[0];
    for (int64_t bin = 1; bin < n_bins; ++bin) {
      const Real edge = edges[bin], gamma_of_bin = gammas[bin];
#pragma omp simd
      for (int64_t r = begin; r < end; ++r) gamma[r] = table_step(p[r], edge, gamma_of_bin, gamma[r]);
    }
  }
}

#ifdef FK_HAS_AVX512_CODE
constexpr int64_t kWideTable = 16;

// table_gamma for a table whose edges and gammas fit one register each: a binary search, as the edges ascend.
FK_AVX512 inline __attribute__((always_inline)) __m512 gammas_of_bins(__m512 p, __m512 edges, __m512 gammas) {
  __m512i bin = _mm512_setzero_si512();
  for (int step = kWideTable / 2; step > 0; step /= 2) {
    const __m512i next = _mm512_or_si512(bin, _mm512_set1_epi32(step));
    const __mmask16 reached = _mm512_cmp_ps_mask(_mm512_permutexvar_ps(next, edges), p, _CMP_LE_OQ);
    bin = _mm512_mask_mov_epi32(bin, reached, next);
  }
  return _mm512_permutexvar_ps(bin, gammas);
}

FK_AVX512 inline void look_up_gamma_in_registers(const float* p, int64_t n, const float* edges, const float* gammas,
                                                 int64_t n_bins, float* gamma) {
  const auto is_bin = static_cast<__mmask16>((1u << n_bins) - 1);
  const __m512 never = _mm512_set1_ps(std::numeric_limits<float>::infinity());
  const __m512 all_edges = _mm512_mask_loadu_ps(never, is_bin, edges);
  const __m512 all_gammas = _mm512_maskz_loadu_ps(is_bin, gammas);
  int64_t r = 0;
  for (; r <= n - 16; r += 16)
    _mm512_storeu_ps(gamma + r, gammas_of_bins(_mm512_loadu_ps(p + r), all_edges, all_gammas));
  if (r < n) {
    const auto is_row = static_cast<__mmask16>((1u << (n - r)) - 1);
    const __m512 last = gammas_of_bins(_mm512_maskz_loadu_ps(is_row, p + r), all_edges, all_gammas);
    _mm512_mask_storeu_ps(gamma + r, is_row, last);
  }
}
#endif

template <typename Real>
void look_up_gamma(const Real* p, int64_t n, const Real* edges, const Real* gammas, int64_t n_bins, Real* gamma) {
#ifdef FK_HAS_AVX512_CODE
  if constexpr (std::is_same_v<Real, float>) {
    if (n_bins <= kWideTable && has_avx512()) return look_up_gamma_in_registers(p, n, edges, gammas, n_bins, gamma);
  }
#endif
  look_up_gamma_by_steps(p, n, edges, gammas, n_bins, gamma);
}

template <typename Real>
FK_VECTOR_CLONES void exponentials(const Real* x, int64_t n, Real* result) {
#pragma omp simd
  for (int64_t i = 0; i < n; ++i) result[i] = exponential(x[i]);
}

// look_up_gamma, given log p.
template <typename Real>
void look_up_gamma_of_log(const Real* log_p, int64_t n, const Real* edges, const Real* gammas, int64_t n_bins,
                          Real* gamma) {
  Real p[kTileRows];
  for (int64_t begin = 0; begin < n; begin += kTileRows) {
    const int64_t count = std::min(kTileRows, n - begin);
    exponentials(log_p + begin, count, p);
    look_up_gamma(p, count, edges, gammas, n_bins, gamma + begin);
  }
}

// Fills the fields of RowNumbers that need neither a logarithm nor a square.
template <typename Loss, typename Real>
FK_HOST_DEVICE RowNumbers<Real> numbers_of(const Tile<Real>& tile, int64_t r, Real epsilon, bool detached) {
  RowNumbers<Real> row;
  row.gap = Loss::kSpecialClass == SpecialClass::kRunnerUp ? tile.gap[r] : Real(0);
  row.target_is_special = Loss::kSpecialClass != SpecialClass::kNone && tile.label[r] == tile.special[r];
  row.gamma = tile.gamma[r];
  row.epsilon = epsilon;
  row.detached = detached;
  return row;
}

template <typename Loss, typename Real>
FK_VECTOR_CLONES void finish_loss(int64_t n_rows, Real epsilon, Tile<Real>& tile,
                                  Real* saved /* [kSavedNumbers, rows], at this tile */, int64_t rows,
                                  RowLossSums* sums) {
  double loss_sum = 0, weight_sum = 0;
#pragma omp simd reduction(+ : loss_sum, weight_sum)
  for (int64_t r = 0; r < n_rows; ++r) {
    const bool ignored = tile.label[r] == kNoTarget;
    const Real weight = tile.weight[r], max = tile.shift[r];
    RowNumbers<Real> row = numbers_of<Loss>(tile, r, epsilon, false);
    row.log_s = tile.log_s[r];
    row.log_p = tile.log_p[r];
    row.log_u = tile.log_u[r];
    row.squares = Loss::kSquares ? tile.squares[r] : Real(0);
    const Real loss_of_row = weighted_loss(weight, Loss::template loss<false>(row));
    const Real loss = ignored ? Real(0) : loss_of_row;
    tile.loss[r] = loss;
    loss_sum += static_cast<double>(loss);
    weight_sum += static_cast<double>(weight);
    saved[r] = ignored ? Real(0) : max;
    saved[rows + r] = ignored ? Real(0) : row.log_s;
    saved[2 * rows + r] = ignored ? Real(0) : (Loss::kSquares ? row.squares : row.log_u);
    if constexpr (Loss::kSpecialClass != SpecialClass::kNone) {
      saved[3 * rows + r] = class_as_number(ignored ? label_int<Real>(kNoTarget) : tile.special[r]);
    }
  }
  sums->loss += loss_sum;
  sums->weight += weight_sum;
}

template <typename Real>
FK_VECTOR_CLONES void log_p_of_targets(const Real* saved, int64_t rows, int64_t n_rows, Tile<Real>& tile) {
#pragma omp simd
  for (int64_t r = 0; r < n_rows; ++r) tile.log_p[r] = (tile.target_logit[r] - saved[r]) - saved[rows + r];
}

template <typename Loss, bool kGradGamma, typename Real>
FK_VECTOR_CLONES void finish_grad(const Real* saved /* [kSavedNumbers, rows], at this tile */, int64_t rows,
                                  int64_t n_rows, Real epsilon, bool detach_modulation, Tile<Real>& tile) {
  constexpr Real kInfinity = std::numeric_limits<Real>::infinity();
  // as wide as the numbers that it selects; otherwise gcc does not vectorize the loop
  const Real detached = detach_modulation ? 1 : 0;
#pragma omp simd
  for (int64_t r = 0; r < n_rows; ++r) {
    const Real max = saved[r], log_s = saved[rows + r], third = saved[2 * rows + r];
    RowNumbers<Real> row = numbers_of<Loss>(tile, r, epsilon, detached > Real(0));
    row.log_s = log_s;
    row.log_p = (tile.target_logit[r] - max) - log_s;
    row.log_u = Loss::kSumExcludesTop ? Real(0) : third;
    row.squares = Loss::kSquares ? third : Real(0);
    const RowGrad<Real> grad = Loss::template grad<false>(row);
    const bool ignored = tile.label[r] == kNoTarget;
    const Real upstream = tile.upstream[r] * tile.weight[r];
    const Real scale = ignored ? Real(0) : upstream;
    // An ignored row has a zero gradient even where its logits are infinite or NaN.
    const bool is_zero = scale == Real(0);
    const Real inv_sum_exp = bounded_exponential(-log_s);
    const Real factor = upstream * grad.factor * inv_sum_exp, target_grad = upstream * grad.at_target;
    tile.shift[r] = is_zero ? kInfinity : max;
    tile.factor[r] = is_zero ? Real(0) : factor;
    tile.target_grad[r] = is_zero ? Real(0) : target_grad;
    if constexpr (kGradGamma) tile.grad_gamma[r] = ignored ? Real(0) : upstream * grad.grad_gamma;
    if constexpr (Loss::kSquares) {
      const Real square = upstream * grad.square * (inv_sum_exp * inv_sum_exp);
      tile.square_factor[r] = is_zero ? Real(0) : square;
    }
    if constexpr (Loss::kSpecialClass != SpecialClass::kNone) {
      const Real special_grad = upstream * grad.at_special;
      tile.special_grad[r] = is_zero ? Real(0) : special_grad;
    }
  }
}

}  // namespace
}  // namespace focalkern::cpu
