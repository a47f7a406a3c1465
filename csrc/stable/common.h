// Shared by the operators of the stable module. They use torch's stable ABI alone, so that one file serves every torch
// from 2.11 on. focalkern.stable checks the arguments, allocates the results and defines the derivatives.
#pragma once

#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <optional>

#include "kernels/layout.h"

// The torch library of the kernels. The Kernel Hub's builder gives each build a name (tools/hub.py).
#ifdef TORCH_EXTENSION_NAME
#define FK_KERNELS TORCH_EXTENSION_NAME
#ifdef CUDA_KERNEL
#define FOCALKERN_WITH_CUDA
#endif
#else
#define FK_KERNELS focalkern_stable
#endif
// torch's macros do not expand the macro FK_KERNELS in their arguments; these do.
#define FK_EXPANDED(macro, ...) macro(__VA_ARGS__)
#define FK_KERNELS_FRAGMENT(m) FK_EXPANDED(STABLE_TORCH_LIBRARY_FRAGMENT, FK_KERNELS, m)
#define FK_KERNELS_IMPL(key, m) FK_EXPANDED(STABLE_TORCH_LIBRARY_IMPL, FK_KERNELS, key, m)

// Registers the functions of `implement` for the CPU, and for CUDA where the module has CUDA kernels.
#ifdef FOCALKERN_WITH_CUDA
#define FK_KERNELS_IMPL_ALL(implement)      \
  FK_KERNELS_IMPL(CPU, m) { implement(m); } \
  FK_KERNELS_IMPL(CUDA, m) { implement(m); }
#else
#define FK_KERNELS_IMPL_ALL(implement) \
  FK_KERNELS_IMPL(CPU, m) { implement(m); }
#endif

namespace focalkern::stable {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;
using OptionalTensor = std::optional<Tensor>;

// Calls `f` with a value of the storage type that belongs to `dtype`.
template <typename Function>
void dispatch_scalar(ScalarType dtype, Function f) {
  switch (dtype) {
    case ScalarType::Half:
      return f(Half{});
    case ScalarType::BFloat16:
      return f(BFloat16{});
    case ScalarType::Double:
      return f(double{});
    default:
      return f(float{});
  }
}

inline Labels labels_of(const Tensor& target) {
  const auto type = target.scalar_type() == ScalarType::Long  ? Labels::Type::kInt64
                    : target.scalar_type() == ScalarType::Int ? Labels::Type::kInt32
                                                              : Labels::Type::kUInt8;
  return {target.const_data_ptr(), type};
}

template <typename T>
const T* pointer_or_null(const OptionalTensor& tensor) {
  return tensor ? static_cast<const T*>(tensor->const_data_ptr()) : nullptr;
}

template <typename T>
T* mutable_or_null(const OptionalTensor& tensor) {
  return tensor ? static_cast<T*>(tensor->mutable_data_ptr()) : nullptr;
}

// Calls work(i, begin, end) for every chunk of the rows, whose bounds do not depend on the number of threads.
template <typename Work>
void for_each_chunk(int64_t rows, int64_t chunk_rows, Work work) {
  const int64_t n_chunks = (rows + chunk_rows - 1) / chunk_rows;
  torch::stable::parallel_for(0, n_chunks, 1, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) work(i, i * chunk_rows, std::min(rows, (i + 1) * chunk_rows));
  });
}

}  // namespace focalkern::stable
