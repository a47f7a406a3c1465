// Passes 0 and 1: reads a tile and finds the two largest classes of each row.
#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>

#include "cpu/calibration_map/tile.h"
#include "cpu/simd/dispatch.h"
#include "kernels/calibration_map.h"
#include "math/calibration_map.h"

namespace focalkern::cpu {
namespace {

template <typename Scalar>
FK_HOST_DEVICE void read_rows(const CalibrationMapArgs<Scalar>& args, int64_t row_begin,
                              const Tile<compute_t<Scalar>>& tile) {
  using Real = compute_t<Scalar>;
  constexpr Real kMinusInfinity = -std::numeric_limits<Real>::infinity();
  const int64_t classes = args.classes;
  for (int64_t r = 0; r < tile.n_rows; ++r) {
    const Scalar* input = args.input + (row_begin + r) * classes;
    Real* x = tile.x + r * tile.row_stride;
    if (tile.column) {
      for (int64_t c = 0; c < classes; ++c) x[c * kMaxTileRows] = load_as_compute(input[c]);
    } else {
#pragma omp simd
      for (int64_t c = 0; c < classes; ++c) x[c] = load_as_compute(input[c]);
      for (int64_t c = classes; c < tile.classes; ++c) x[c] = args.input_is_probs ? Real(0) : kMinusInfinity;
    }
  }
  if (tile.column) {
    // Rows beyond the last are filled with a valid row.
    for (int64_t c = 0; c < classes; ++c) {
      for (int64_t r = tile.n_rows; r < tile.rows; ++r)
        tile.x[c * kMaxTileRows + r] = args.input_is_probs ? Real(1) : Real(0);
    }
  }
}

template <typename Real>
FK_HOST_DEVICE bool sums_to_one(const Tile<Real>& tile, int64_t r, int64_t classes, double tolerance) {
  double sum = 0;
  for (int64_t c = 0; c < classes; c += kSumBlock) {
    const int64_t end = std::min(c + kSumBlock, classes);
    const Real* p = tile.x + r * tile.row_stride;
    Real block = 0;
#pragma omp simd reduction(+ : block)
    for (int64_t j = c; j < end; ++j) block += p[j * tile.class_stride];
    sum += block;
  }
  return sum >= 1 - tolerance && sum <= 1 + tolerance;
}

template <typename Real>
FK_VECTOR_CLONES void find_top_two_in_rows(const Tile<Real>& tile) {
  constexpr Real kMinusInfinity = -std::numeric_limits<Real>::infinity();
  TileRows<Real>& row = *tile.row;
  for (int64_t r = 0; r < tile.n_rows; ++r) {
    Real* x = tile.x + r * tile.row_stride;
    Real top = kMinusInfinity;
#pragma omp simd reduction(max : top)
    for (int64_t c = 0; c < tile.classes; ++c) top = x[c] > top ? x[c] : top;
    int64_t index = 0;
    for (int64_t group = 0; group < tile.classes; group += kLanes) {
      int found = 0;
#pragma omp simd reduction(| : found)
      for (int64_t l = 0; l < kLanes; ++l) found |= x[group + l] == top ? 1 : 0;
      if (!found) continue;
      index = group;
      while (x[index] != top) ++index;
      break;
    }
    x[index] = kMinusInfinity;
    Real next = kMinusInfinity;
#pragma omp simd reduction(max : next)
    for (int64_t c = 0; c < tile.classes; ++c) next = x[c] > next ? x[c] : next;
    row.top[r] = index;
    row.top_x[r] = top;
    row.next_x[r] = next;
  }
}

template <typename Real>
FK_VECTOR_CLONES void find_top_two_in_columns(const Tile<Real>& tile) {
  constexpr Real kMinusInfinity = -std::numeric_limits<Real>::infinity();
  using Int = typename detail::Format<Real>::Int;  // as wide as Real, so that comparisons stay in one vector
  TileRows<Real>& row = *tile.row;
  alignas(64) Real top[kMaxTileRows];
  alignas(64) Real next[kMaxTileRows];
  alignas(64) Int index[kMaxTileRows];
  for (int64_t r = 0; r < kMaxTileRows; ++r) {
    top[r] = next[r] = kMinusInfinity;
    index[r] = 0;
  }
  for (int64_t c = 0; c < tile.classes; ++c) {
    const Real* x = tile.x + c * kMaxTileRows;
    const Int this_class = static_cast<Int>(c);
#pragma omp simd
    for (int64_t r = 0; r < kMaxTileRows; ++r) {
      const bool leads = x[r] > top[r];
      const Real loser = leads ? top[r] : x[r];
      next[r] = loser > next[r] ? loser : next[r];
      index[r] = leads ? this_class : index[r];
      top[r] = leads ? x[r] : top[r];
    }
  }
  for (int64_t r = 0; r < kMaxTileRows; ++r) {
    row.top[r] = index[r];
    row.top_x[r] = top[r];
    row.next_x[r] = next[r];
    tile.x[index[r] * kMaxTileRows + r] = kMinusInfinity;
  }
}

template <typename Scalar>
FK_HOST_DEVICE void read_tile(const CalibrationMapArgs<Scalar>& args, int64_t row_begin,
                              const Tile<compute_t<Scalar>>& tile) {
  using Real = compute_t<Scalar>;
  constexpr Real kInfinity = std::numeric_limits<Real>::infinity();
  TileRows<Real>& row = *tile.row;
  for (int64_t r = 0; r < kMaxTileRows; ++r) {
    const bool real_row = r < tile.n_rows;
    const double gamma = real_row ? args.gamma_of(row_begin + r) : 0.0;
    const double temperature = real_row ? args.temperature_of(row_begin + r) : 1.0;
    row.valid[r] = map_parameters_valid(gamma, temperature);
    row.gamma[r] = gamma;
    row.beta[r] = inverse_temperature<Real>(temperature);
  }
  read_rows(args, row_begin, tile);
  if (args.input_is_probs) {
    for (int64_t r = 0; r < tile.n_rows; ++r) {
      if (!sums_to_one(tile, r, args.classes, probability_sum_tolerance<Scalar>())) row.valid[r] = false;
    }
    const int64_t size = tile.rows * tile.classes;
#pragma omp simd
    for (int64_t i = 0; i < size; ++i) tile.x[i] = logit_of_probability(tile.x[i]);
  }
  tile.column ? find_top_two_in_columns(tile) : find_top_two_in_rows(tile);
  // `next_x` is -inf if only one class is possible or all others are NaN; the shift may then be any number.
  const Real lowest_gap = -largest_finite<Real>() / Real(16);
#pragma omp simd
  for (int64_t r = 0; r < kMaxTileRows; ++r) {
    row.next_x[r] = row.next_x[r] > -kInfinity ? row.next_x[r] : row.top_x[r];
    const Real gap = (row.next_x[r] - row.top_x[r]) * row.beta[r];
    row.gap[r] = gap < lowest_gap ? lowest_gap : gap;
  }
  for (int64_t r = 0; r < tile.n_rows; ++r) {
    // NaN fails the comparison, too. A NaN in another class makes the sum of exponentials NaN.
    if (!(row.top_x[r] > -kInfinity && row.top_x[r] < kInfinity)) row.valid[r] = false;
  }
}

}  // namespace
}  // namespace focalkern::cpu
