// The largest of many logits, from words of 32 bits: one of float32, or two of 16 bits, which one instruction compares.
#pragma once

#include <type_traits>

#include "cuda/common.cuh"
#include "math/portable.h"

namespace focalkern::cuda {

// The numbers of a word.
template <typename Scalar>
constexpr int kOfWord = sizeof(uint32_t) / sizeof(Scalar);

template <typename Scalar>
struct WordOf {
  Scalar at[kOfWord<Scalar>];
};

template <typename Scalar>
__device__ __forceinline__ void unpack_word(uint32_t word, float (&values)[kOfWord<Scalar>]) {
  if constexpr (std::is_same_v<Scalar, float>) {
    values[0] = bit_cast<float>(word);
  } else if constexpr (std::is_same_v<Scalar, BFloat16>) {
    values[0] = bit_cast<float>(word << 16);
    values[1] = bit_cast<float>(word & 0xffff0000u);
  } else {
    const auto pair = bit_cast<WordOf<Scalar>>(word);
    values[0] = load_as_compute(pair.at[0]);
    values[1] = load_as_compute(pair.at[1]);
  }
}

// A word of -inf.
template <typename Scalar>
__device__ __forceinline__ uint32_t least_word() {
  WordOf<Scalar> least;
#pragma unroll
  for (Scalar& z : least.at) z = Store<Scalar>::from_compute(-kInfinity<float>);
  return bit_cast<uint32_t>(least);
}

// The larger numbers of two words. If one of two is NaN, the result is the other.
template <typename Scalar>
__device__ __forceinline__ uint32_t larger(uint32_t a, uint32_t b) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  if constexpr (sizeof(Scalar) == sizeof(uint16_t)) {
    uint32_t result;
    if constexpr (std::is_same_v<Scalar, BFloat16>) {
      asm("max.bf16x2 %0, %1, %2;" : "=r"(result) : "r"(a), "r"(b));
    } else {
      asm("max.f16x2 %0, %1, %2;" : "=r"(result) : "r"(a), "r"(b));
    }
    return result;
  }
#endif
  WordOf<Scalar> result;
  float of_a[kOfWord<Scalar>], of_b[kOfWord<Scalar>];
  unpack_word<Scalar>(a, of_a);
  unpack_word<Scalar>(b, of_b);
#pragma unroll
  for (int k = 0; k < kOfWord<Scalar>; ++k) result.at[k] = Store<Scalar>::from_compute(fmax(of_a[k], of_b[k]));
  return bit_cast<uint32_t>(result);
}

// The largest number of a word, at least -inf.
template <typename Scalar>
__device__ __forceinline__ float largest_of(uint32_t word) {
  float values[kOfWord<Scalar>], max = -kInfinity<float>;
  unpack_word<Scalar>(word, values);
#pragma unroll
  for (float z : values) max = fmax(max, z);
  return max;
}

template <typename Scalar>
class LargestOfVectors {
 public:
  __device__ __forceinline__ void add(uint4 vector) {
    max_ = {larger<Scalar>(max_.x, vector.x), larger<Scalar>(max_.y, vector.y), larger<Scalar>(max_.z, vector.z),
            larger<Scalar>(max_.w, vector.w)};
  }
  __device__ __forceinline__ float value() const {
    return largest_of<Scalar>(larger<Scalar>(larger<Scalar>(max_.x, max_.y), larger<Scalar>(max_.z, max_.w)));
  }

 private:
  uint4 max_ = {least_word<Scalar>(), least_word<Scalar>(), least_word<Scalar>(), least_word<Scalar>()};
};

}  // namespace focalkern::cuda
