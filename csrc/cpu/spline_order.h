// The results of a row of the spline map in the order of its inputs, where rounding may have exchanged neighbours.
#pragma once

#include <algorithm>
#include <vector>

#include "cpu/row_order.h"
#include "cpu/spline_tile.h"

namespace focalkern::cpu {
namespace {

// Rounding may exchange the results of nearly equal inputs. So each class gets the largest result among the classes
// whose input is at most its own. Compares all pairs of classes; reads f, writes e.
FK_VECTOR_CLONES void largest_up_to_each(const SplineTile& t) {
  if (t.column) {
    for (int64_t i = 0; i < t.classes; ++i) {
      const double *z = t.d + i * kSplineTileRows, *p = t.f + i * kSplineTileRows;
      double* to = t.e + i * kSplineTileRows;
      for (int64_t r = 0; r < kSplineTileRows; ++r) to[r] = p[r];
      for (int64_t j = 0; j < t.classes; ++j) {
        const double *other_z = t.d + j * kSplineTileRows, *other_p = t.f + j * kSplineTileRows;
#pragma omp simd
        for (int64_t r = 0; r < kSplineTileRows; ++r) {
          const double other = other_z[r] <= z[r] ? other_p[r] : kMinusInfinity;
          to[r] = other > to[r] ? other : to[r];
        }
      }
    }
    return;
  }
  for (int64_t r = 0; r < t.n_rows; ++r) {
    const double *z = t.d + r * t.inner, *p = t.f + r * t.inner;
    double* to = t.e + r * t.inner;
    for (int64_t i = 0; i < t.inner; ++i) to[i] = p[i];
    for (int64_t j = 0; j < t.classes; ++j) {
      const double other_z = z[j], other_p = p[j];
#pragma omp simd
      for (int64_t i = 0; i < t.inner; ++i) {
        const double other = other_z <= z[i] ? other_p : kMinusInfinity;
        to[i] = other > to[i] ? other : to[i];
      }
    }
  }
}

// The same as largest_up_to_each, for a sorted row of many classes.
void put_in_order(const double* input, const std::vector<uint32_t>& order, double* result) {
  double reached = kMinusInfinity;
  for (size_t begin = 0, end = 0; begin < order.size(); begin = end) {
    for (end = begin; end < order.size() && input[order[end]] == input[order[begin]]; ++end) {
      reached = std::max(reached, result[order[end]]);
    }
    for (size_t i = begin; i < end; ++i) result[order[i]] = reached;
  }
}

// Returns the results of the tile in the order of its inputs. It reads the inputs into t.d again.
double* keep_order(const SplineInput& input, int64_t row, const SplineTile& t, RowOrder& order) {
  read_tile(t, input.input, input.storage, row, t.d, 0);
  if (t.classes <= kFewPairs) {
    largest_up_to_each(t);
    return t.e;
  }
  for (int64_t r = 0; r < t.n_rows; ++r) {
    const double* z = t.d + r * t.inner;
    if (t.valid[r]) put_in_order(z, order.of(z, input.is_probs), t.f + r * t.inner);
  }
  return t.f;
}

}  // namespace
}  // namespace focalkern::cpu
