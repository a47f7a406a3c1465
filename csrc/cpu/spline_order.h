// The results of a row of the spline map in the order of its inputs, where rounding may have exchanged neighbours.
#pragma once

#include <algorithm>
#include <vector>

#include "cpu/spline_tile.h"

namespace focalkern::cpu {
namespace {

constexpr int64_t kFewPairs = 400;  // up to this many classes, comparing all pairs is faster than a sort

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

// Sorts the classes of a row by their inputs. Buckets divide the range of the inputs; few classes share a bucket, so
// counting places nearly all of them, and insertion sort the others.
class RowOrder {
 public:
  explicit RowOrder(int64_t classes) : order_(classes), bucket_(classes), begin_(2 * classes + 2) {}

  const std::vector<uint32_t>& of(const double* input, bool is_probs) {
    count(input, is_probs);
    uint32_t sum = 0, most = 0;
    for (size_t b = 0; b + 1 < begin_.size(); ++b) {
      const uint32_t members = begin_[b];
      if (b > 0) most = std::max(most, members);  // the inputs of the first bucket are equal
      begin_[b] = sum;
      sum += members;
    }
    for (size_t c = 0; c < order_.size(); ++c) order_[begin_[bucket_[c]]++] = static_cast<uint32_t>(c);
    const auto less = [input](uint32_t a, uint32_t b) { return input[a] < input[b]; };
    if (most > kMostOfABucket) {
      std::sort(order_.begin(), order_.end(), less);
      return order_;
    }
    for (size_t i = 1; i < order_.size(); ++i) {
      const uint32_t mine = order_[i];
      size_t to = i;
      for (; to > 0 && less(mine, order_[to - 1]); --to) order_[to] = order_[to - 1];
      order_[to] = mine;
    }
    return order_;
  }

 private:
  static constexpr uint32_t kMostOfABucket = 32;

  // The number whose range the buckets divide: a logit, or the bits of a probability, which grow about as its
  // logarithm.
  static double key(double input, bool is_probs) {
    return is_probs ? static_cast<double>(bit_cast<int64_t>(input)) : input;
  }

  // Computes the bucket of each class and the size of each bucket. Classes of probability 0 have the first bucket.
  void count(const double* input, bool is_probs) {
    const double impossible = is_probs ? 0 : kMinusInfinity;
    const auto n = static_cast<int64_t>(order_.size());
    double low = -kMinusInfinity, high = kMinusInfinity;
    for (int64_t c = 0; c < n; ++c) {
      if (input[c] == impossible) continue;
      const double at = key(input[c], is_probs);
      low = at < low ? at : low;
      high = at > high ? at : high;
    }
    const double range = high - low, scale = static_cast<double>(2 * n - 1) / range;
    const bool divides = range < -kMinusInfinity && scale < -kMinusInfinity;  // otherwise one bucket holds all
    std::fill(begin_.begin(), begin_.end(), 0u);
    for (int64_t c = 0; c < n; ++c) {
      const double place = divides && input[c] != impossible ? (key(input[c], is_probs) - low) * scale : 0;
      bucket_[c] = input[c] == impossible ? 0 : 1 + static_cast<uint32_t>(place);
      ++begin_[bucket_[c]];
    }
  }

  std::vector<uint32_t> order_, bucket_, begin_;
};

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
