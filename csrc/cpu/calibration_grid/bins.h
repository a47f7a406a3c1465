// Stage 2: finds the bins of one cell by counting, without sorting its confidences.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <utility>
#include <vector>

#include "cpu/simd/dispatch.h"
#include "kernels/calibration_grid.h"
#include "math/binning.h"

namespace focalkern::cpu {
namespace {

template <typename Real>
struct KeyType;
template <>
struct KeyType<float> {
  using type = uint32_t;
};
template <>
struct KeyType<double> {
  using type = uint64_t;
};
template <typename Real>
using KeyOf = typename KeyType<Real>::type;

// A key that orders confidences as integers, spaced like their logits: by the exponent of c below 1/2, and by that of 1
// - c (which is exact) above. With equally spaced keys one bucket would hold most samples, because most confidences of
// a network are near 1.
template <typename Real>
FK_HOST_DEVICE KeyOf<Real> confidence_key(Real c) {
  using Key = KeyOf<Real>;
  // The key of c = 1 lies one octave above that of the next lower confidence.
  constexpr Real kLeast = std::numeric_limits<Real>::epsilon() / 4;
  const Real u = Real(1) - c;
  const Key above = 2 * bit_cast<Key>(Real(0.5)) - bit_cast<Key>(u < kLeast ? kLeast : u);
  return c < Real(0.5) ? bit_cast<Key>(c) : above;
}

template <typename Real>
FK_VECTOR_CLONES void key_range(const Real* __restrict confidence, int64_t rows, Real* least, Real* most) {
  Real low = Real(1), high = Real(0);
#pragma omp simd reduction(min : low) reduction(max : high)
  for (int64_t i = 0; i < rows; ++i) {
    low = confidence[i] < low ? confidence[i] : low;
    high = confidence[i] > high ? confidence[i] : high;
  }
  *least = low;
  *most = high;
}

// Types for confidence - correct of one sample and for its sum. For float they are integers in units of 2^-30: integer
// sums are fast, exact and independent of the order. Confidences above 1/64 are exact multiples of the unit; rounding
// changes smaller ones by at most half a unit.
template <typename Real>
struct Excess;
template <>
struct Excess<float> {
  using One = int32_t;
  using Sum = int64_t;
  static FK_HOST_DEVICE One of(float confidence, int32_t correct) {
    return static_cast<int32_t>(confidence * 0x1p30f) - (correct << 30);
  }
  static double value(Sum sum) { return static_cast<double>(sum) * 0x1p-30; }
};
template <>
struct Excess<double> {
  using One = double;
  using Sum = double;
  static FK_HOST_DEVICE One of(double confidence, int32_t correct) { return confidence - correct; }
  static double value(Sum sum) { return sum; }
};

template <typename Real>
FK_VECTOR_CLONES void buckets_and_excess(const Real* __restrict confidence, const uint8_t* __restrict correct,
                                         int64_t rows, KeyOf<Real> base, int shift, int32_t* __restrict bucket,
                                         typename Excess<Real>::One* __restrict excess) {
  for (int64_t i = 0; i < rows; ++i) {
    bucket[i] = static_cast<int32_t>((confidence_key(confidence[i]) - base) >> shift);
    excess[i] = Excess<Real>::of(confidence[i], correct[i]);
  }
}

// A key with the order of (confidence, row).
FK_HOST_DEVICE uint64_t sort_key(float confidence, int32_t row) {
  return static_cast<uint64_t>(bit_cast<uint32_t>(confidence)) << 32 | static_cast<uint32_t>(row);
}
FK_HOST_DEVICE int32_t row_of(uint64_t key) { return static_cast<int32_t>(key); }
inline std::pair<double, int32_t> sort_key(double confidence, int32_t row) { return {confidence, row}; }
inline int32_t row_of(const std::pair<double, int32_t>& key) { return key.second; }

// The samples of one cell, ordered by bucket of confidence. A bucket is sorted only when a bin edge falls into it.
template <typename Real>
class OrderedConfidences {
 public:
  explicit OrderedConfidences(int64_t rows) : rows_(rows), bucket_of_(rows), next_(rows), excess_(rows) {
    // The number of buckets gives few samples per bucket, and counts that fit the core's caches.
    int64_t buckets = 64;
    while (buckets < 4096 && buckets * 4 < rows) buckets *= 2;
    buckets_.resize(buckets);
  }

  void assign(const Real* confidence, const uint8_t* correct) {
    confidence_ = confidence;
    Real least, most;
    key_range(confidence, rows_, &least, &most);
    base_ = confidence_key(least);
    const KeyOf<Real> range = confidence_key(most) - base_;
    shift_ = 0;
    while (static_cast<int64_t>(range >> shift_) >= static_cast<int64_t>(buckets_.size())) ++shift_;
    used_ = static_cast<int64_t>(range >> shift_) + 1;
    buckets_and_excess(confidence, correct, rows_, base_, shift_, bucket_of_.data(), excess_.data());

    std::fill_n(buckets_.begin(), used_, Bucket{0, kEmpty});
    for (int64_t i = 0; i < rows_; ++i) {
      Bucket& bucket = buckets_[bucket_of_[i]];
      bucket.excess += excess_[i];
      next_[i] = static_cast<int32_t>(bucket.count_and_last);
      bucket.count_and_last = (bucket.count_and_last & ~kLastMask) + (kLastMask + 1) + static_cast<uint64_t>(i);
    }
    rewind();
  }

  // The cursor visits the buckets once, so calls must have ascending ranks.
  void rewind() {
    cursor_ = 0;
    rank_ = 0;
    below_ = 0;
    opened_ = -1;
  }

  // The sum of confidence - correct over the `count` lowest samples.
  double excess_of_lowest(int64_t count) {
    advance_to_rank(count);
    if (rank_ == count) return Excess<Real>::value(below_);
    open();
    // A later edge in the same bucket continues where the previous one stopped.
    for (; summed_ < count - rank_; ++summed_) partial_ += excess_[row_of(sorted_[summed_])];
    return Excess<Real>::value(below_ + partial_);
  }

  Real confidence_at(int64_t rank) {
    advance_to_rank(rank);
    open();
    return confidence_[row_of(sorted_[rank - rank_])];
  }

  // Number and sum of the samples with a confidence of at most `edge`.
  BinSums up_to(Real edge) {
    const KeyOf<Real> bucket = (confidence_key(edge) - base_) >> shift_;
    while (cursor_ < static_cast<int64_t>(bucket)) advance();
    open();
    for (; summed_ < static_cast<int64_t>(sorted_.size()); ++summed_) {
      const int32_t row = row_of(sorted_[summed_]);
      if (confidence_[row] > edge) break;
      partial_ += excess_[row];
    }
    return {rank_ + summed_, Excess<Real>::value(below_ + partial_)};
  }

 private:
  using Sum = typename Excess<Real>::Sum;
  using SortKey = decltype(sort_key(Real(), 0));
  struct Bucket {
    Sum excess;
    uint64_t count_and_last;  // the samples of a bucket are a list in next_, the last row first; -1 ends it
    int64_t count() const { return static_cast<int64_t>(count_and_last >> 32); }
  };
  static constexpr uint64_t kLastMask = 0xffffffff;
  static constexpr uint64_t kEmpty = kLastMask;

  void advance() {
    rank_ += buckets_[cursor_].count();
    below_ += buckets_[cursor_].excess;
    ++cursor_;
  }
  void advance_to_rank(int64_t rank) {
    while (cursor_ < used_ && rank_ + buckets_[cursor_].count() <= rank) advance();
  }

  void open() {
    if (opened_ == cursor_) return;
    opened_ = cursor_;
    summed_ = 0;
    partial_ = 0;
    sorted_.resize(buckets_[cursor_].count());
    size_t i = sorted_.size();
    int32_t row = static_cast<int32_t>(buckets_[cursor_].count_and_last);
    for (; row >= 0; row = next_[row]) sorted_[--i] = sort_key(confidence_[row], row);
    // Rows ascend, so a bucket of equal confidences (a saturated cell) is sorted already.
    if (!std::is_sorted(sorted_.begin(), sorted_.end())) std::sort(sorted_.begin(), sorted_.end());
  }

  int64_t rows_;
  const Real* confidence_ = nullptr;
  KeyOf<Real> base_ = 0;
  int shift_ = 0;
  int64_t used_ = 0;
  // The buckets before the cursor hold `rank_` samples, whose sum is `below_`.
  int64_t cursor_ = 0, rank_ = 0, opened_ = -1;
  Sum below_ = 0;
  // The opened bucket, sorted, and the sum of its first samples.
  int64_t summed_ = 0;
  Sum partial_ = 0;
  std::vector<int32_t> bucket_of_, next_;
  std::vector<typename Excess<Real>::One> excess_;
  std::vector<Bucket> buckets_;
  std::vector<SortKey> sorted_;
};

// Independent copies of the bins: neighbouring samples mostly share a bin, so additions to one copy would wait for each
// other.
constexpr int kCopies = 4;
template <typename Real>
void equal_width_bins(const Real* confidence, const uint8_t* correct, int64_t rows, int64_t n_bins,
                      std::vector<BinSums>& scratch, BinSums* bins) {
  std::fill(scratch.begin(), scratch.end(), BinSums{0, 0.0});
  for (int64_t i = 0; i < rows; ++i) {
    BinSums& bin = scratch[(i % kCopies) * n_bins + equal_width_bin(confidence[i], n_bins)];
    bin.count += 1;
    bin.excess += static_cast<double>(confidence[i]) - static_cast<double>(correct[i]);
  }
  for (int64_t b = 0; b < n_bins; ++b) {
    bins[b] = BinSums{0, 0.0};
    for (int copy = 0; copy < kCopies; ++copy) {
      bins[b].count += scratch[copy * n_bins + b].count;
      bins[b].excess += scratch[copy * n_bins + b].excess;
    }
  }
}

template <typename Real>
void equal_mass_bins(OrderedConfidences<Real>& order, int64_t rows, int64_t n_bins, BinSums* bins) {
  double below = 0;
  for (int64_t b = 0; b < n_bins; ++b) {
    const int64_t end = equal_mass_begin(b + 1, rows, n_bins);
    const double up_to = order.excess_of_lowest(end);
    bins[b] = {end - equal_mass_begin(b, rows, n_bins), up_to - below};
    below = up_to;
  }
}

template <typename Real>
void equal_mass_interp_bins(OrderedConfidences<Real>& order, int64_t rows, int64_t n_bins, BinSums* bins) {
  // Three passes, because with fewer samples than bins an edge may need a lower rank than the previous edge.
  std::vector<Real> edges(n_bins + 1), upper(n_bins + 1);
  for (int64_t edge = 0; edge <= n_bins; ++edge) {
    edges[edge] = order.confidence_at(equal_mass_interp_rank(edge, rows, n_bins).rank);
  }
  order.rewind();
  for (int64_t edge = 0; edge <= n_bins; ++edge) {
    upper[edge] = order.confidence_at(equal_mass_interp_rank(edge, rows, n_bins).next);
  }
  order.rewind();
  BinSums below{};
  for (int64_t edge = 0; edge <= n_bins; ++edge) {
    const double fraction = equal_mass_interp_rank(edge, rows, n_bins).fraction;
    const BinSums up_to = order.up_to(equal_mass_interp_edge(edges[edge], upper[edge], fraction));
    if (edge > 0) bins[edge - 1] = {up_to.count - below.count, up_to.excess - below.excess};
    below = up_to;
  }
}

}  // namespace
}  // namespace focalkern::cpu
