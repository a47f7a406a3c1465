// Sums over the classes of a row that give its log-sum-exp, its entropy and its largest class.
//
//   m = max_j z_j
//   rest = sum of e^(z_j - m) over all classes but one of the largest
//   fall = sum_j (m - z_j) e^(z_j - m)
//   log-sum-exp = m + log(1 + rest),   entropy = log(1 + rest) + fall / (1 + rest)
//
// Every term is positive, so that nothing cancels as the largest probability approaches 1.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>

#include "math/portable.h"

namespace focalkern {

struct RowSums {
  double largest;  // -inf without a possible class; the other numbers are then 0
  double rest;
  double fall;
  int64_t index;  // of the first class with the largest logit
};

// The sums of the classes of both, of which those of `before` come first.
inline RowSums merged(const RowSums& before, const RowSums& after) {
  constexpr double kNoClass = -std::numeric_limits<double>::infinity();
  const bool in_after = after.largest > before.largest;
  RowSums larger = in_after ? after : before;
  const RowSums& smaller = in_after ? before : after;
  if (smaller.largest == kNoClass) return larger;
  constexpr double kFar = 1e4;  // e^-kFar is 0
  const double gap = std::min(larger.largest - smaller.largest, kFar), scale = std::exp(-gap);
  larger.rest += scale * (1 + smaller.rest);
  larger.fall += scale * (smaller.fall + gap * (1 + smaller.rest));
  return larger;
}

template <typename Real>
struct RowEntropy {
  Real log_sum;  // log-sum-exp - m
  Real entropy;
};
template <typename Real>
FK_HOST_DEVICE RowEntropy<Real> row_entropy(Real rest, Real fall) {
  const Real log_sum = log_one_plus(rest);
  return {log_sum, log_sum + fall / (1 + rest)};
}

}  // namespace focalkern
