// The order of the classes of a row.
#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>
#include <vector>

#include "math/portable.h"

namespace focalkern::cpu {
namespace {

constexpr int64_t kFewPairs = 400;  // up to this many classes, comparing all pairs is faster than a sort

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
  static constexpr double kMinusInfinity = -std::numeric_limits<double>::infinity();
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

}  // namespace
}  // namespace focalkern::cpu
