// Pass 2: exponentials, then the numbers of each row.
#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>

#include "cpu/calibration_map/tile.h"
#include "cpu/simd/dispatch.h"
#include "math/calibration_map.h"

namespace focalkern::cpu {
namespace {

template <bool on_grid, typename Real>
FK_VECTOR_CLONES void exponentials_of_rows(const Tile<Real>& tile) {
  TileRows<Real>& row = *tile.row;
  for (int64_t r = 0; r < tile.n_rows; ++r) {
    Real* x = tile.x + r * tile.row_stride;
    Real* e = tile.e + r * tile.row_stride;
    const Real shift = row.next_x[r];
    const Real beta = row.beta[r];
    double sum = 0;
    for (int64_t begin = 0; begin < tile.classes; begin += kSumBlock) {
      const int64_t end = std::min(begin + kSumBlock, tile.classes);
      Real block = 0;
#pragma omp simd reduction(+ : block)
      for (int64_t c = begin; c < end; ++c) {
        x[c] = map_exponent<on_grid>(x[c], shift, beta);
        e[c] = bounded_exponential(x[c]);
        block += e[c];
      }
      sum += block;
    }
    row.rest[r] = static_cast<Real>(sum);
  }
}

template <bool on_grid, typename Real>
FK_VECTOR_CLONES void exponentials_of_columns(const Tile<Real>& tile) {
  TileRows<Real>& row = *tile.row;
  for (int64_t r = 0; r < kMaxTileRows; ++r) row.rest[r] = 0;
  for (int64_t c = 0; c < tile.classes; ++c) {
    Real* x = tile.x + c * kMaxTileRows;
    Real* e = tile.e + c * kMaxTileRows;
#pragma omp simd
    for (int64_t r = 0; r < kMaxTileRows; ++r) {
      x[r] = map_exponent<on_grid>(x[r], row.next_x[r], row.beta[r]);
      e[r] = bounded_exponential(x[r]);
      row.rest[r] += e[r];
    }
  }
}

// Marks rows with a NaN that is not the row's maximum: their sum is NaN.
template <typename Real>
FK_HOST_DEVICE void check_sums(const Tile<Real>& tile) {
  TileRows<Real>& row = *tile.row;
  for (int64_t r = 0; r < tile.n_rows; ++r) {
    if (row.rest[r] != row.rest[r]) row.valid[r] = false;
  }
}

template <typename Real>
FK_VECTOR_CLONES void finish_rows(const Tile<Real>& tile) {
  TileRows<Real>& row = *tile.row;
  check_sums(tile);
  const int64_t rows = round_up(tile.n_rows);
#pragma omp simd
  for (int64_t r = 0; r < rows; ++r) {
    // Only one class is possible: every e is 0, and p_t is 1 for any S.
    const Real rest = row.rest[r] > Real(0) ? row.rest[r] : Real(1);
    const MapRow<Real> m = map_row(row.gap[r], rest, map_gamma<Real>(row.gamma[r]));
    row.gamma_real[r] = m.terms.gamma;
    row.q_scale[r] = m.terms.q_scale;
    row.log_q_offset[r] = m.terms.log_q_offset;
    row.ratio_offset[r] = m.terms.ratio_offset;
    row.power_offset[r] = m.terms.power_offset;
    row.ratio_scale[r] = m.terms.ratio_scale;
    row.tie[r] = m.terms.tie;
    row.q_top[r] = m.q_top;
    row.u_top[r] = m.u_top;
    row.inverse_rest[r] = m.inverse_rest;
    row.scaled_slope_top[r] = m.scaled_slope_top;
    row.grad_gamma_top[r] = m.grad_gamma_top;
  }
}

}  // namespace
}  // namespace focalkern::cpu
