// Forward, passes 3 and 4: ratios to the largest class, then the output.
#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>

#include "cpu/calibration_map/read.h"
#include "cpu/calibration_map/softmax.h"
#include "cpu/calibration_map/tile.h"
#include "cpu/simd/dispatch.h"
#include "kernels/calibration_map.h"
#include "math/calibration_map.h"

namespace focalkern::cpu {
namespace {

template <typename Real>
FK_HOST_DEVICE void fill_nan(Real* begin, int64_t n) {
  std::fill(begin, begin + n, std::numeric_limits<Real>::quiet_NaN());
}
template <>
FK_HOST_DEVICE void fill_nan<Half>(Half* begin, int64_t n) {
  std::fill(begin, begin + n, Store<Half>::from_compute(std::numeric_limits<float>::quiet_NaN()));
}
template <>
FK_HOST_DEVICE void fill_nan<BFloat16>(BFloat16* begin, int64_t n) {
  std::fill(begin, begin + n, Store<BFloat16>::from_compute(std::numeric_limits<float>::quiet_NaN()));
}

// Writes p_k / p_t to e or, if wanted, its logarithm to x.
template <bool log_output, typename Real>
FK_VECTOR_CLONES void ratios_of_rows(const Tile<Real>& tile) {
  TileRows<Real>& row = *tile.row;
  for (int64_t r = 0; r < tile.n_rows; ++r) {
    Real* x = tile.x + r * tile.row_stride;
    Real* e = tile.e + r * tile.row_stride;
    const MapTerms<Real> terms = row.terms(r);
    double sum = 0;
    for (int64_t begin = 0; begin < tile.classes; begin += kSumBlock) {
      const int64_t end = std::min(begin + kSumBlock, tile.classes);
      Real block = 0;
#pragma omp simd reduction(+ : block)
      for (int64_t c = begin; c < end; ++c) {
        if constexpr (log_output) {
          x[c] = map_log_ratio(x[c], e[c], terms);
          block += exponential(x[c]);
        } else {
          e[c] = map_ratio(x[c], e[c], terms);
          block += e[c];
        }
      }
      sum += block;
    }
    row.ratio_sum[r] = static_cast<Real>(sum);
  }
}

template <bool log_output, typename Real>
FK_VECTOR_CLONES void ratios_of_columns(const Tile<Real>& tile) {
  TileRows<Real>& row = *tile.row;
  for (int64_t r = 0; r < kMaxTileRows; ++r) row.ratio_sum[r] = 0;
  for (int64_t c = 0; c < tile.classes; ++c) {
    Real* x = tile.x + c * kMaxTileRows;
    Real* e = tile.e + c * kMaxTileRows;
#pragma omp simd
    for (int64_t r = 0; r < kMaxTileRows; ++r) {
      if constexpr (log_output) {
        x[r] = map_log_ratio(x[r], e[r], row.terms(r));
        row.ratio_sum[r] += exponential(x[r]);
      } else {
        e[r] = map_ratio(x[r], e[r], row.terms(r));
        row.ratio_sum[r] += e[r];
      }
    }
  }
}

template <bool log_output, typename Real>
FK_HOST_DEVICE void ratios(const Tile<Real>& tile) {
  tile.column ? ratios_of_columns<log_output>(tile) : ratios_of_rows<log_output>(tile);
  for (int64_t r = 0; r < kMaxTileRows; ++r) {
    tile.row->factor[r] = 1;
    tile.row->log_factor[r] = 0;
  }
}

// With gamma = 0, p_k / p_t = e_k exp(M): pass 3 has nothing to do.
template <typename Real>
FK_VECTOR_CLONES void ratios_of_softmax(const Tile<Real>& tile) {
  TileRows<Real>& row = *tile.row;
  check_sums(tile);
  for (int64_t r = 0; r < kMaxTileRows; ++r) {
    row.log_factor[r] = row.gap[r];
    row.factor[r] = exponential(row.gap[r]);
    row.ratio_sum[r] = row.rest[r] * row.factor[r];
  }
}

template <typename Out, typename Real>
FK_HOST_DEVICE void write_tile(const Tile<Real>& tile, int64_t classes, bool log_output, Out* output) {
  const TileRows<Real>& row = *tile.row;
  for (int64_t r = 0; r < tile.n_rows; ++r) {
    Out* out = output + r * classes;
    if (!row.valid[r]) {
      fill_nan(out, classes);
      continue;
    }
    const Real* value = (log_output ? tile.x : tile.e) + r * tile.row_stride;
    const Real scale = log_output ? Real(1) : row.p_top[r] * row.factor[r];
    const Real offset = log_output ? row.log_factor[r] - row.log_norm[r] : Real(0);
    if (tile.column) {
      for (int64_t c = 0; c < classes; ++c) out[c] = Store<Out>::from_compute(value[c * kMaxTileRows] * scale + offset);
    } else {
#pragma omp simd
      for (int64_t c = 0; c < classes; ++c) out[c] = Store<Out>::from_compute(value[c] * scale + offset);
    }
    out[row.top[r]] = Store<Out>::from_compute(log_output ? Real(0) - row.log_norm[r] : row.p_top[r]);  // 0, not -0
  }
}

template <typename Scalar>
FK_VECTOR_CLONES void forward_tile(const CalibrationMapForward<Scalar>& args, int64_t row_begin,
                                   const Tile<compute_t<Scalar>>& tile) {
  using Real = compute_t<Scalar>;
  TileRows<Real>& row = *tile.row;
  read_tile(args, row_begin, tile);
  tile.column ? exponentials_of_columns<true>(tile) : exponentials_of_rows<true>(tile);
  const bool softmax = std::all_of(row.gamma, row.gamma + tile.n_rows, [](double gamma) { return gamma == 0; });
  if (softmax) {
    ratios_of_softmax(tile);
  } else {
    finish_rows(tile);
    args.log_output ? ratios<true>(tile) : ratios<false>(tile);
  }
  const int64_t rows = round_up(tile.n_rows);
#pragma omp simd
  for (int64_t r = 0; r < rows; ++r) {
    row.log_norm[r] = log_one_plus(row.ratio_sum[r]);
    row.p_top[r] = Real(1) / (Real(1) + row.ratio_sum[r]);
  }
  const int64_t offset = row_begin * args.classes;
  if (args.output) {
    write_tile(tile, args.classes, args.log_output, args.output + offset);
  } else {
    write_tile(tile, args.classes, args.log_output, args.output_wide + offset);
  }
}

}  // namespace
}  // namespace focalkern::cpu
