// Torch's interface, for the code that csrc/stable compiles with its own (stable/interface.h).
#pragma once

#include <ATen/Parallel.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/zeros.h>

#include "bindings/common.h"

#ifdef FOCALKERN_WITH_CUDA
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#endif

namespace focalkern::bindings {

struct Interface {
  using Tensor = at::Tensor;

  template <typename Function>
  static void dispatch(const Tensor& tensor, Function f) {
    dispatch_scalar(tensor.scalar_type(), f);
  }
  template <typename Work>
  static void parallel_for(int64_t begin, int64_t end, int64_t grain, const Work& work) {
    at::parallel_for(begin, end, grain, work);
  }
  static Labels labels(const Tensor& target) { return labels_of(target); }

  // Uninitialised tensors on the device of `like`.
  static Tensor empty_bytes(const Tensor& like, int64_t bytes) {
    return at::empty({bytes}, like.options().dtype(at::kByte));
  }
  static Tensor empty_doubles(const Tensor& like, at::IntArrayRef sizes) {
    return at::empty(sizes, like.options().dtype(at::kDouble));
  }
  static Tensor zero_doubles(const Tensor& like, at::IntArrayRef sizes) {
    return at::zeros(sizes, like.options().dtype(at::kDouble));
  }
  static Tensor slice(const Tensor& tensor, int64_t dim, int64_t begin, int64_t end) {
    return tensor.slice(dim, begin, end);
  }
  static Tensor select(const Tensor& tensor, int64_t index) { return tensor.select(0, index); }
  static Tensor view(const Tensor& tensor, at::IntArrayRef sizes) { return tensor.view(sizes); }
  static Tensor sum(const Tensor& tensor, int64_t dim) { return tensor.sum(dim); }
  static Tensor multiply(const Tensor& a, const Tensor& b) { return a.mul(b); }
  // Matrices that may belong to a graph, in threads that have none.
  static Tensor transposed(const Tensor& matrix) {
    const at::AutoDispatchBelowADInplaceOrView below;
    return matrix.t();
  }
  static Tensor product(const Tensor& a, const Tensor& b) {
    const at::AutoDispatchBelowADInplaceOrView below;
    return at::mm(a, b);
  }
  static void copy(const Tensor& to, const Tensor& from) { to.copy_(from); }
  static Tensor on_device_of(const Tensor& like, const Tensor& tensor) { return tensor.to(like.device()); }
  static Tensor on_host(const Tensor& tensor) { return tensor.cpu(); }
  static void add_to(const Tensor& sum, const Tensor& term, double factor) { sum.add_(term, factor); }

#ifdef FOCALKERN_WITH_CUDA
  // The device of a tensor for as long as this lives, and its current stream.
  class CudaScope {
   public:
    explicit CudaScope(const Tensor& tensor) : guard_(tensor.device()) {}
    void* stream() const { return c10::cuda::getCurrentCUDAStream().stream(); }
    static void check(const char* /*op*/, int error) { C10_CUDA_CHECK(static_cast<cudaError_t>(error)); }

   private:
    c10::cuda::CUDAGuard guard_;
  };
#endif
};

}  // namespace focalkern::bindings
