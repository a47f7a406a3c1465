// The threads that share a row of the calibration map, and the numbers of a row.
#pragma once

#include <type_traits>

#include "cuda/common.cuh"
#include "math/calibration_map.h"

namespace focalkern::cuda {
namespace {

// Classes that one thread holds in registers.
template <typename Scalar>
constexpr int kSmall = sizeof(Scalar) == sizeof(double) ? 8 : 16;
template <typename Scalar>
constexpr int kLarge = sizeof(Scalar) == sizeof(double) ? 16 : 32;

// Blocks per multiprocessor for which the registers suffice.
template <typename Scalar, int capacity>
constexpr int kForwardBlocks = sizeof(Scalar) == sizeof(double) && capacity == kLarge<Scalar> ? 1 : 2;
template <typename Scalar, int capacity>
constexpr int kBackwardBlocks = sizeof(Scalar) == sizeof(double) || capacity == kLarge<Scalar> ? 1 : 2;

// Sums are added in double only where they may have many terms.
template <typename Real, bool few>
using SumOf = std::conditional_t<few, Real, double>;

// The threads that share a row. Every thread of the block calls the reductions. All threads of a group get the same
// result: both partners of an exchange combine the same two numbers.
struct MapGroup {
  static constexpr int kMost = 6;  // numbers per reduction
  int lanes;
  double* scratch;  // [kWarpsPerBlock * kMost], shared

  // Reduces `count` numbers each by combine(mine, others).
  template <int count, typename Number, typename Combine>
  __device__ __forceinline__ void reduce(Number (&mine)[count], Combine combine) const {
    static_assert(count <= kMost, "more than the scratch memory holds");
    const auto exchange = [&](int offset) {
      Number others[count];
#pragma unroll
      for (int i = 0; i < count; ++i) others[i] = __shfl_xor_sync(kFullWarp, mine[i], offset);
      combine(mine, others);
    };
    if (lanes < kWarp) {
      for (int offset = lanes / 2; offset > 0; offset /= 2) exchange(offset);
      return;
    }
#pragma unroll
    for (int offset = kWarp / 2; offset > 0; offset /= 2) exchange(offset);
    if (lanes == kWarp) return;
    const int thread = static_cast<int>(threadIdx.x);
    auto* shared = reinterpret_cast<Number*>(scratch);  // [kWarpsPerBlock, count]
    __syncthreads();
    if (thread % kWarp == 0) {
#pragma unroll
      for (int i = 0; i < count; ++i) shared[thread / kWarp * count + i] = mine[i];
    }
    __syncthreads();
#pragma unroll
    for (int i = 0; i < count; ++i) mine[i] = shared[i];
    for (int warp = 1; warp < kWarpsPerBlock; ++warp) {
      Number others[count];
#pragma unroll
      for (int i = 0; i < count; ++i) others[i] = shared[warp * count + i];
      combine(mine, others);
    }
  }
  template <int count, typename Number>
  __device__ __forceinline__ void add(Number (&mine)[count]) const {
    reduce(mine, [](Number(&a)[count], const Number(&b)[count]) {
#pragma unroll
      for (int i = 0; i < count; ++i) a[i] += b[i];
    });
  }
  template <typename Number>
  __device__ __forceinline__ Number sum(Number value) const {
    Number values[1] = {value};
    add(values);
    return values[0];
  }
  template <typename Number>
  __device__ __forceinline__ Number max(Number value) const {
    Number values[1] = {value};
    reduce(values, [](Number(&a)[1], const Number(&b)[1]) { a[0] = fmax(a[0], b[0]); });
    return values[0];
  }
  __device__ __forceinline__ int min(int value) const {
    int values[1] = {value};
    reduce(values, [](int (&a)[1], const int (&b)[1]) { a[0] = a[0] < b[0] ? a[0] : b[0]; });
    return values[0];
  }
};

// If a warp shares a row, the row has more than half of the classes that a warp can hold (plan_map), so the first half
// of the vectors needs no bounds check.
template <typename Scalar, int constant_lanes>
__device__ __forceinline__ void assume_classes([[maybe_unused]] int classes) {
#if defined(__CUDA_ARCH__)
  if constexpr (constant_lanes == kWarp) __builtin_assume(classes > kLarge<Scalar> * kWarp / 2);
#endif
}

// Without this the compiler recomputes the row's address for each vector.
template <typename T>
__device__ __forceinline__ T* worked_out(T* address) {
#if defined(__CUDA_ARCH__)
  asm("" : "+l"(address));
  __builtin_assume(__isGlobal(address));
#endif
  return address;
}

// The numbers of a row that depend only on gamma and temperature.
template <typename Real>
struct MapNumbers {
  MapGamma<Real> gamma;
  Real beta;  // 1/T
  bool valid;
};
template <typename Real>
FK_HOST_DEVICE MapNumbers<Real> map_numbers(double gamma, double temperature) {
  // A gamma that overflows to infinity in float is invalid.
  const bool valid = map_parameters_valid(gamma, temperature) && gamma <= static_cast<double>(largest_finite<Real>());
  return {map_gamma<Real>(gamma), inverse_temperature<Real>(temperature), valid};
}

// The results of passes 1 and 2.
template <typename Real>
struct RowStart {
  bool valid;
  int top;
  Real shift;  // largest of the other inputs
  Real beta;
  Real scale;  // beta for logarithms to the base of quick_power
  Real gap;
  MapRow<Real> map;
};

}  // namespace
}  // namespace focalkern::cuda
