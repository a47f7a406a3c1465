// Backward, passes 3 and 4: slopes, then the gradients.
#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>

#include "cpu/calibration_map/forward.h"
#include "cpu/calibration_map/read.h"
#include "cpu/calibration_map/softmax.h"
#include "cpu/calibration_map/tile.h"
#include "cpu/simd/dispatch.h"
#include "kernels/calibration_map.h"
#include "math/calibration_map.h"
#include "math/map_gradient.h"

namespace focalkern::cpu {
namespace {

// The upstream gradient of each class; 0 at the largest class (stored separately), at padding and at classes of
// probability zero.
template <typename In, typename Real>
FK_HOST_DEVICE void read_gradient(const Tile<Real>& tile, int64_t classes, const In* grad_output) {
  constexpr Real kMinusInfinity = -std::numeric_limits<Real>::infinity();
  TileRows<Real>& row = *tile.row;
  for (int64_t r = 0; r < tile.n_rows; ++r) {
    const In* grad = grad_output + r * classes;
    Real* g = tile.g + r * tile.row_stride;
    const Real* x = tile.x + r * tile.row_stride;
    row.grad_top[r] = load_as_compute(grad[row.top[r]]);
    if (tile.column) {
      for (int64_t c = 0; c < classes; ++c) g[c * kMaxTileRows] = load_as_compute(grad[c]);
    } else {
#pragma omp simd
      for (int64_t c = 0; c < classes; ++c) g[c] = x[c] == kMinusInfinity ? Real(0) : load_as_compute(grad[c]);
      std::fill(g + classes, g + tile.classes, Real(0));
    }
  }
  if (!tile.column) return;
  for (int64_t r = tile.n_rows; r < kMaxTileRows; ++r) row.grad_top[r] = 0;
  for (int64_t c = 0; c < classes; ++c) {
    Real* g = tile.g + c * kMaxTileRows;
    const Real* x = tile.x + c * kMaxTileRows;
    for (int64_t r = tile.n_rows; r < kMaxTileRows; ++r) g[r] = 0;
#pragma omp simd
    for (int64_t r = 0; r < kMaxTileRows; ++r) g[r] = x[r] == kMinusInfinity ? Real(0) : g[r];
  }
}

template <typename Real>
FK_VECTOR_CLONES void slopes_of_rows(const Tile<Real>& tile, bool log_output) {
  // m_k = w_k or r_k v_k; the loop has no branch.
  const Real bias = log_output ? Real(1) : Real(0), factor = Real(1) - bias;
  TileRows<Real>& row = *tile.row;
  for (int64_t i = 0; i < tile.n_rows; ++i) {
    const Real* x = tile.x + i * tile.row_stride;
    const Real* e = tile.e + i * tile.row_stride;
    Real* g = tile.g + i * tile.row_stride;
    Real* h = tile.h + i * tile.row_stride;
    const MapTerms<Real> terms = row.terms(i);
    const Real shared_grad = factor * row.grad_top[i];
    double r_all = 0, m_all = 0, hr_all = 0, hm_all = 0, cr_all = 0, cm_all = 0;
    for (int64_t begin = 0; begin < tile.classes; begin += kSumBlock) {
      const int64_t end = std::min(begin + kSumBlock, tile.classes);
      Real r_sum = 0, m_sum = 0, hr_sum = 0, hm_sum = 0, cr_sum = 0, cm_sum = 0;
#pragma omp simd reduction(+ : r_sum, m_sum, hr_sum, hm_sum, cr_sum, cm_sum)
      for (int64_t c = begin; c < end; ++c) {
        const auto k = map_class(x[c], e[c], terms);
        const Real ratio = k.ratio;
        const Real m = (g[c] - shared_grad) * (bias + factor * ratio);
        const Real hr = k.slope * ratio;
        const Real hm = k.slope * m;
        g[c] = hm;
        h[c] = hr;
        r_sum += ratio;
        m_sum += m;
        hr_sum += hr;
        hm_sum += hm;
        cr_sum += k.grad_gamma * ratio;
        cm_sum += k.grad_gamma * m;
      }
      r_all += r_sum;
      m_all += m_sum;
      hr_all += hr_sum;
      hm_all += hm_sum;
      cr_all += cr_sum;
      cm_all += cm_sum;
    }
    row.sum_r[i] = static_cast<Real>(r_all);
    row.sum_m[i] = static_cast<Real>(m_all);
    row.sum_hr[i] = static_cast<Real>(hr_all);
    row.sum_hm[i] = static_cast<Real>(hm_all);
    row.sum_cr[i] = static_cast<Real>(cr_all);
    row.sum_cm[i] = static_cast<Real>(cm_all);
  }
}

template <typename Real>
FK_VECTOR_CLONES void slopes_of_columns(const Tile<Real>& tile, bool log_output) {
  const Real bias = log_output ? Real(1) : Real(0), factor = Real(1) - bias;
  TileRows<Real>& row = *tile.row;
  for (int64_t i = 0; i < kMaxTileRows; ++i) {
    row.sum_r[i] = row.sum_m[i] = row.sum_hr[i] = row.sum_hm[i] = row.sum_cr[i] = row.sum_cm[i] = 0;
  }
  for (int64_t c = 0; c < tile.classes; ++c) {
    const Real* x = tile.x + c * kMaxTileRows;
    const Real* e = tile.e + c * kMaxTileRows;
    Real* g = tile.g + c * kMaxTileRows;
    Real* h = tile.h + c * kMaxTileRows;
#pragma omp simd
    for (int64_t i = 0; i < kMaxTileRows; ++i) {
      const auto k = map_class(x[i], e[i], row.terms(i));
      const Real ratio = k.ratio;
      const Real m = (g[i] - factor * row.grad_top[i]) * (bias + factor * ratio);
      const Real hr = k.slope * ratio;
      const Real hm = k.slope * m;
      g[i] = hm;
      h[i] = hr;
      row.sum_r[i] += ratio;
      row.sum_m[i] += m;
      row.sum_hr[i] += hr;
      row.sum_hm[i] += hm;
      row.sum_cr[i] += k.grad_gamma * ratio;
      row.sum_cm[i] += k.grad_gamma * m;
    }
  }
}

template <typename Real>
FK_VECTOR_CLONES void finish_gradients(const Tile<Real>& tile, bool log_output) {
  TileRows<Real>& row = *tile.row;
  const int64_t rows = round_up(tile.n_rows);
#pragma omp simd
  for (int64_t r = 0; r < rows; ++r) {
    MapRow<Real> m;
    m.q_top = row.q_top[r];
    m.u_top = row.u_top[r];
    m.inverse_rest = row.inverse_rest[r];
    m.scaled_slope_top = row.scaled_slope_top[r];
    m.grad_gamma_top = row.grad_gamma_top[r];
    const MapGradSums<Real> sums{row.sum_r[r],  row.sum_m[r],  row.sum_hr[r],
                                 row.sum_hm[r], row.sum_cr[r], row.sum_cm[r]};
    const MapRowGrad<Real> grad = map_row_grad(m, sums, row.grad_top[r], log_output);
    row.keep[r] = grad.keep;
    row.spread[r] = grad.spread;
    row.shared[r] = grad.shared;
    row.grad_x_top[r] = grad.top;
    row.grad_gamma[r] = grad.gamma;
  }
}

// Writes dL/dx to g, and dL/dbeta * beta = sum dL/dx_k (x_k - x_t).
template <typename Real>
FK_VECTOR_CLONES void gradients_of_rows(const Tile<Real>& tile) {
  constexpr Real kMinusInfinity = -std::numeric_limits<Real>::infinity();
  TileRows<Real>& row = *tile.row;
  for (int64_t r = 0; r < tile.n_rows; ++r) {
    const Real* x = tile.x + r * tile.row_stride;
    const Real* e = tile.e + r * tile.row_stride;
    const Real* h = tile.h + r * tile.row_stride;
    Real* g = tile.g + r * tile.row_stride;
    const Real gap = row.gap[r];
    const Real keep = row.keep[r], spread = row.spread[r], shared = row.shared[r];
    double sum = 0;
    for (int64_t begin = 0; begin < tile.classes; begin += kSumBlock) {
      const int64_t end = std::min(begin + kSumBlock, tile.classes);
      Real block = 0;
#pragma omp simd reduction(+ : block)
      for (int64_t c = begin; c < end; ++c) {
        const Real grad = keep * g[c] - (spread * h[c] + shared * e[c]);
        g[c] = grad;
        block += x[c] == kMinusInfinity ? Real(0) : grad * (x[c] + gap);
      }
      sum += block;
    }
    row.grad_beta[r] = static_cast<Real>(sum);
  }
}

template <typename Real>
FK_VECTOR_CLONES void gradients_of_columns(const Tile<Real>& tile) {
  constexpr Real kMinusInfinity = -std::numeric_limits<Real>::infinity();
  TileRows<Real>& row = *tile.row;
  for (int64_t r = 0; r < kMaxTileRows; ++r) row.grad_beta[r] = 0;
  for (int64_t c = 0; c < tile.classes; ++c) {
    const Real* x = tile.x + c * kMaxTileRows;
    const Real* e = tile.e + c * kMaxTileRows;
    const Real* h = tile.h + c * kMaxTileRows;
    Real* g = tile.g + c * kMaxTileRows;
#pragma omp simd
    for (int64_t r = 0; r < kMaxTileRows; ++r) {
      const Real grad = row.keep[r] * g[r] - (row.spread[r] * h[r] + row.shared[r] * e[r]);
      g[r] = grad;
      row.grad_beta[r] += x[r] == kMinusInfinity ? Real(0) : grad * (x[r] + row.gap[r]);
    }
  }
}

template <typename Scalar>
FK_HOST_DEVICE void write_gradient(const CalibrationMapBackward<Scalar>& args, int64_t row_begin,
                                   const Tile<compute_t<Scalar>>& tile) {
  using Real = compute_t<Scalar>;
  constexpr Real kNan = std::numeric_limits<Real>::quiet_NaN();
  const TileRows<Real>& row = *tile.row;
  const int64_t classes = args.classes;
  for (int64_t r = 0; r < tile.n_rows; ++r) {
    const int64_t index = row_begin + r;
    if (args.grad_gamma) args.grad_gamma[index] = row.valid[r] ? row.grad_gamma[r] : kNan;
    if (args.grad_temperature) {
      args.grad_temperature[index] = row.valid[r] ? -row.grad_beta[r] / args.temperature_of(index) : kNan;
    }
    if (!args.grad_input) continue;
    Scalar* grad = args.grad_input + index * classes;
    if (!row.valid[r]) {
      fill_nan(grad, classes);
      continue;
    }
    Real* g = tile.g + r * tile.row_stride;
    g[row.top[r] * tile.class_stride] = row.grad_x_top[r];
    const Real beta = row.beta[r];
    if (args.input_is_probs) {
      const Scalar* p = args.input + index * classes;
      for (int64_t c = 0; c < classes; ++c) {
        // At p = 0 the map excludes the class, so the gradient is undefined; the code returns 0.
        const Real p_c = load_as_compute(p[c]);
        const Real grad_p = p_c == Real(0) ? Real(0) : g[c * tile.class_stride] * beta / p_c;
        grad[c] = Store<Scalar>::from_compute(grad_p);
      }
    } else if (tile.column) {
      for (int64_t c = 0; c < classes; ++c) grad[c] = Store<Scalar>::from_compute(g[c * kMaxTileRows] * beta);
    } else {
#pragma omp simd
      for (int64_t c = 0; c < classes; ++c) grad[c] = Store<Scalar>::from_compute(g[c] * beta);
    }
  }
}

template <typename Scalar>
FK_VECTOR_CLONES void backward_tile(const CalibrationMapBackward<Scalar>& args, int64_t row_begin,
                                    const Tile<compute_t<Scalar>>& tile) {
  read_tile(args, row_begin, tile);
  const int64_t offset = row_begin * args.classes;
  if (args.grad_output) {
    read_gradient(tile, args.classes, args.grad_output + offset);
  } else {
    read_gradient(tile, args.classes, args.grad_output_wide + offset);
  }
  tile.column ? exponentials_of_columns<false>(tile) : exponentials_of_rows<false>(tile);
  finish_rows(tile);
  tile.column ? slopes_of_columns(tile, args.log_output) : slopes_of_rows(tile, args.log_output);
  finish_gradients(tile, args.log_output);
  tile.column ? gradients_of_columns(tile) : gradients_of_rows(tile);
  write_gradient(args, row_begin, tile);
}

}  // namespace
}  // namespace focalkern::cpu
