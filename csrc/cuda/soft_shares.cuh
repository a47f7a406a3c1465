// The target shares of the classes of a row, for class probabilities and label smoothing.
#pragma once

#include <type_traits>

#include "cuda/common.cuh"
#include "cuda/row_groups.cuh"
#include "kernels/row_loss.h"
#include "math/row_loss.h"

namespace focalkern::cuda {

template <typename Array>
constexpr int kCount = std::extent_v<std::remove_reference_t<Array>>;

// The share of a class is (1 - e) target + e / classes, times the weight of its class if the loss weights classes.
// kUniform: all classes but the label have the same share, and `read` returns 1 for it.
template <typename Loss, typename Scalar, bool kUniform>
class ClassShares {
 public:
  using Real = compute_t<Scalar>;

  __device__ __forceinline__ ClassShares(const RowLossArgs<Scalar>& args, const Row<Scalar>& row)
      : row_(row),
        kept_(Real(1) - args.label_smoothing),
        spread_(args.label_smoothing / static_cast<Real>(args.classes)),
        weight_(Loss::kTarget == SoftTarget::kClasses ? args.class_weight : nullptr),
        is_wide_(false) {
    if (kUniform || !row.targets || !is_in_vectors(row) || row.target_stride != 1) return;
    // The first class of the logits' vectors must lie on a vector boundary of the targets, too.
    const int head = elements_to_boundary(row.logits);
    is_wide_ = row.targets.typed([&](const auto* targets) { return elements_to_boundary(targets + head) == 0; });
  }

  __device__ __forceinline__ Real of(int j) const {
    const Real target = row_.targets ? row_.targets[j * row_.target_stride] : Real(j == row_.label ? 1 : 0);
    const Real share = kept_ * target + spread_;
    return weight_ != nullptr ? weight_[j] * share : share;
  }

  // The shares of logits that each_class passes.
  template <int count>
  __device__ __forceinline__ void read(int first, int step, Real (&shares)[count]) const {
    if constexpr (kUniform) {
#pragma unroll
      for (int k = 0; k < count; ++k) shares[k] = Real(1);
    } else {
      if (row_.targets) {
        row_.targets.typed([&](const auto* targets) { read_targets(targets, first, step, shares); });
      } else {
#pragma unroll
        for (int k = 0; k < count; ++k) shares[k] = Real(first + k * step == row_.label ? 1 : 0);
      }
#pragma unroll
      for (int k = 0; k < count; ++k) shares[k] = kept_ * shares[k] + spread_;
      if (weight_ != nullptr) {
#pragma unroll
        for (int k = 0; k < count; ++k) shares[k] *= weight_[first + k * step];
      }
    }
  }

 private:
  template <typename Number, int count>
  __device__ __forceinline__ void read_targets(const Number* targets, int first, int step,
                                               Real (&numbers)[count]) const {
    constexpr int kSize = kVectorSize<Number>;
    if constexpr (count == kVectorSize<Scalar>) {
      if (is_wide_) {
#pragma unroll
        for (int k = 0; k < count; k += kSize) unpack<Number>(load_vector(targets + first + k), numbers + k);
        return;
      }
    }
    const Number* at = targets + first * row_.target_stride;
    const int64_t distance = step * row_.target_stride;
#pragma unroll
    for (int k = 0; k < count; ++k, at += distance) numbers[k] = load_as_compute(*at);
  }

  const Row<Scalar>& row_;
  Real kept_;
  Real spread_;
  const Real* weight_;  // or null
  bool is_wide_;        // targets are read in vectors where logits are
};

// Calls take(logits, shares, first, step) in the order of each_class. The targets of two vectors are read before either
// is used.
template <typename Scalar, typename Shares, typename Take>
__device__ __forceinline__ void each_class_with_share(const Row<Scalar>& row, const Shares& shares, Take take) {
  using Real = compute_t<Scalar>;
  each_class(
      row,
      [&](const auto& values, int first, int step) {
        Real some[kCount<decltype(values)>];
        shares.read(first, step, some);
        take(values, some, first, step);
      },
      [&](const auto& values, int first, const auto& more_values, int next) {
        Real some[kCount<decltype(values)>], more[kCount<decltype(values)>];
        shares.read(first, 1, some);
        shares.read(next, 1, more);
        take(values, some, first, 1);
        take(more_values, more, next, 1);
      });
}

}  // namespace focalkern::cuda
