// Building blocks of every kernel here: 16-byte vectors, reductions in a fixed order, kernel launches.
#pragma once

#include <cuda_runtime.h>
#include <math.h>

#include <cstdint>
#include <limits>
#include <type_traits>
#include <utility>

#include "cuda/launch.h"
#include "math/portable.h"

namespace focalkern::cuda {

// ---- launch --------------------------------------------------------------------------------------------------------

template <typename... Parameters, typename... Arguments>
int launch(void (*kernel)(Parameters...), int64_t grid, int block, void* stream, Arguments&&... arguments) {
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(static_cast<unsigned>(grid));
  config.blockDim = dim3(static_cast<unsigned>(block));
  config.stream = static_cast<cudaStream_t>(stream);
  const cudaError_t error = cudaLaunchKernelEx(&config, kernel, std::forward<Arguments>(arguments)...);
  // Errors are reported here once and cleared, so that no later call reports them as its own.
  if (error != cudaSuccess) cudaGetLastError();
  return error;
}

// ---- vectors -------------------------------------------------------------------------------------------------------

template <typename Scalar>
constexpr int kVectorSize = kVectorBytes / static_cast<int>(sizeof(Scalar));

template <typename Scalar>
struct Elements {
  Scalar at[kVectorSize<Scalar>];
};

template <typename Real>
constexpr Real kInfinity = std::numeric_limits<Real>::infinity();
template <typename Real>
constexpr Real kNaN = std::numeric_limits<Real>::quiet_NaN();

// Sixteen bytes of global memory on a 16-byte boundary. __stcg is one instruction; the compiler would split a plain
// store of a value that was built from elements. (For shared memory there is no __stcg.)
template <typename Scalar>
__device__ __forceinline__ uint4 load_vector(const Scalar* address) {
  return *reinterpret_cast<const uint4*>(address);
}
template <typename Scalar>
__device__ __forceinline__ void store_vector(Scalar* address, uint4 vector) {
  __stcg(reinterpret_cast<uint4*>(address), vector);
}

// The number of elements before the next 16-byte boundary.
template <typename Scalar>
__device__ __forceinline__ int elements_to_boundary(const Scalar* address) {
  const auto low = static_cast<uint32_t>(reinterpret_cast<uintptr_t>(address));
  return static_cast<int>(((0u - low) & (kVectorBytes - 1)) / sizeof(Scalar));
}

// The elements of a vector as numbers. Two bfloat16 are split as one 32-bit word: separate halves would need extra
// instructions before the shift.
template <typename Scalar>
__device__ __forceinline__ void unpack(uint4 vector, compute_t<Scalar>* values) {
  if constexpr (std::is_same_v<Scalar, BFloat16>) {
    const uint32_t words[] = {vector.x, vector.y, vector.z, vector.w};
#pragma unroll
    for (int w = 0; w < 4; ++w) {
      values[2 * w] = bit_cast<float>(words[w] << 16);
      values[2 * w + 1] = bit_cast<float>(words[w] & 0xffff0000u);
    }
  } else {
    const auto elements = bit_cast<Elements<Scalar>>(vector);
#pragma unroll
    for (int e = 0; e < kVectorSize<Scalar>; ++e) values[e] = load_as_compute(elements.at[e]);
  }
}

// ---- reductions ----------------------------------------------------------------------------------------------------
// Every thread of the warp must call these. Groups are aligned runs of `lanes` threads, a power of two up to the warp.
// The order of the additions depends only on the geometry.

constexpr unsigned kFullWarp = 0xffffffffu;

template <typename Real>
__device__ __forceinline__ Real group_sum(Real value, int lanes) {
  for (int offset = lanes / 2; offset > 0; offset /= 2) value += __shfl_xor_sync(kFullWarp, value, offset);
  return value;
}

// If one operand is NaN, the result is the other.
template <typename Real>
__device__ __forceinline__ Real group_max(Real value, int lanes) {
  for (int offset = lanes / 2; offset > 0; offset /= 2) {
    value = fmax(value, __shfl_xor_sync(kFullWarp, value, offset));
  }
  return value;
}

// The threads that share a row: lanes of a warp, or the block. Every thread of the block calls the reductions.
struct RowGroup {
  int lanes;
  double* scratch;  // [kWarpsPerBlock], shared

  template <typename Real, typename Combine>
  __device__ __forceinline__ Real reduce(Real value, Combine combine) const {
    // The addition of two lanes is commutative, so all lanes get the same result.
    if (lanes < kWarp) {
      for (int offset = lanes / 2; offset > 0; offset /= 2) {
        value = combine(value, __shfl_xor_sync(kFullWarp, value, offset));
      }
      return value;
    }
#pragma unroll
    for (int offset = kWarp / 2; offset > 0; offset /= 2) {
      value = combine(value, __shfl_xor_sync(kFullWarp, value, offset));
    }
    if (lanes == kWarp) return value;
    const int thread = static_cast<int>(threadIdx.x);
    auto* shared = reinterpret_cast<Real*>(scratch);
    __syncthreads();
    if (thread % kWarp == 0) shared[thread / kWarp] = value;
    __syncthreads();
    value = shared[0];
    for (int warp = 1; warp < kWarpsPerBlock; ++warp) value = combine(value, shared[warp]);
    return value;
  }
  template <typename Real>
  __device__ __forceinline__ Real sum(Real value) const {
    return reduce(value, [](Real a, Real b) { return a + b; });
  }
  template <typename Real>
  __device__ __forceinline__ Real max(Real value) const {
    return reduce(value, [](Real a, Real b) { return fmax(a, b); });
  }
  __device__ __forceinline__ int min(int value) const {
    return reduce(value, [](int a, int b) { return a < b ? a : b; });
  }
};

// The maximum of a set of numbers, and sum exp(z - max) over it; {-inf, 0} for the empty set. A NaN or +inf in the set
// makes the sum NaN and does not change the maximum.
template <typename Real>
struct ExpSum {
  Real max;
  Real sum;
};

template <typename Real>
__device__ __forceinline__ ExpSum<Real> empty_exp_sum() {
  return {-kInfinity<Real>, Real(0)};
}

// The number to subtract. Where no number is above -inf yet, exp(-inf - (-inf)) would be NaN instead of 0.
template <typename Real>
__device__ __forceinline__ Real exp_base(Real max) {
  return max == -kInfinity<Real> ? Real(0) : max;
}

// 2^x with a relative error of 2^-22.
__device__ __forceinline__ float power_of_two(float x) {
#if defined(__CUDA_ARCH__)
  float result;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
  return result;
#else
  return exp2f(x);
#endif
}

// e^x for x <= 0, as a term of a sum that is at least 1. Rounding x log2(e), and the approximate power of two, give a
// relative error of |x| 2^-24 + 2^-22. Multiplied by e^x, this is below the rounding error of the sum.
__device__ __forceinline__ double summand(double x) { return exponential(x); }
__device__ __forceinline__ float summand(float x) {
#if defined(__CUDA_ARCH__)
  return power_of_two(x * 1.44269504f);
#else
  return exponential(x);
#endif
}

template <int count, typename Real>
__device__ __forceinline__ ExpSum<Real> exp_sum_of(const Real* values) {
  Real max = values[0];
#pragma unroll
  for (int k = 1; k < count; ++k) max = fmax(max, values[k]);
  const Real base = exp_base(max);
  Real sum = summand(values[0] - base);
#pragma unroll
  for (int k = 1; k < count; ++k) sum += summand(values[k] - base);
  return {max, sum};
}

// The sum of e^(z - m) over `count` numbers; m is the maximum of these numbers and `max`.
template <int count, typename Real>
__device__ __forceinline__ ExpSum<Real> exp_sum_beside(Real max, const Real (&values)[count]) {
#pragma unroll
  for (int k = 0; k < count; ++k) max = fmax(max, values[k]);
  const Real base = exp_base(max);
  Real sum = 0;
#pragma unroll
  for (int k = 0; k < count; ++k) sum += summand(values[k] - base);
  return {max, sum};
}

// Adds `count` numbers with one rescaling. Their own sum comes first: adding each class to the total would round once
// per class at the magnitude of the total.
template <int count, typename Real>
__device__ __forceinline__ void add_to_exp_sum(ExpSum<Real>& total, const Real (&values)[count]) {
  const ExpSum<Real> step = exp_sum_beside(total.max, values);
  total = {step.max, total.sum * exponential(total.max - exp_base(step.max)) + step.sum};
}

// A plain sum, for few numbers, with the interface of CompensatedSum.
template <typename Real>
struct PlainSum {
  Real sum = 0;

  __device__ __forceinline__ void add(Real shrink, Real summand) { sum = sum * shrink + summand; }
};

// A compensated sum (Kahan), for a thread that adds many classes: `excess` is the rounding error of the additions.
template <typename Real>
struct CompensatedSum {
  Real sum = 0;
  Real excess = 0;

  // shrink: factor that rescales the previous sum
  __device__ __forceinline__ void add(Real shrink, Real summand) {
    const Real before = sum * shrink;
    const Real given = summand - excess * shrink;
    sum = before + given;
    excess = (sum - before) - given;
  }
};

// add_to_exp_sum with a compensated sum, for a thread that adds many classes.
template <typename Real>
struct LongExpSum {
  Real max = -kInfinity<Real>;
  CompensatedSum<Real> total;

  template <int count>
  __device__ __forceinline__ void add(const Real (&values)[count]) {
    const ExpSum<Real> step = exp_sum_beside(max, values);
    total.add(exponential(max - exp_base(step.max)), step.sum);
    max = step.max;
  }
  __device__ __forceinline__ ExpSum<Real> result() const { return {max, total.sum}; }
};

template <typename Real>
__device__ __forceinline__ ExpSum<Real> group_exp_sum(ExpSum<Real> mine, int lanes) {
  const Real max = group_max(mine.max, lanes);
  return {max, group_sum(mine.sum * summand(mine.max - exp_base(max)), lanes)};
}

}  // namespace focalkern::cuda
