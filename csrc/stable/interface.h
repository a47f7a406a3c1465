// Torch's stable interface, for the code that csrc/bindings compiles with its own (bindings/interface.h).
#pragma once

#include <torch/headeronly/util/shim_utils.h>

#include <array>

#include "stable/common.h"
#ifdef FOCALKERN_WITH_CUDA
#include "stable/cuda_scope.h"
#endif

namespace focalkern::stable {

struct Interface {
  using Tensor = torch::stable::Tensor;
  using Sizes = torch::headeronly::IntHeaderOnlyArrayRef;

  template <typename Function>
  static void dispatch(const Tensor& tensor, Function f) {
    dispatch_scalar(tensor.scalar_type(), f);
  }
  template <typename Work>
  static void parallel_for(int64_t begin, int64_t end, int64_t grain, const Work& work) {
    torch::stable::parallel_for(begin, end, grain, work);
  }
  static Labels labels(const Tensor& target) { return labels_of(target); }

  static Tensor empty_bytes(const Tensor& like, int64_t bytes) {
    return torch::stable::new_empty(like, {bytes}, ScalarType::Byte);
  }
  static Tensor empty_doubles(const Tensor& like, Sizes sizes) {
    return torch::stable::new_empty(like, sizes, ScalarType::Double);
  }
  static Tensor zero_doubles(const Tensor& like, Sizes sizes) {
    return torch::stable::new_zeros(like, sizes, ScalarType::Double);
  }
  static Tensor slice(const Tensor& tensor, int64_t dim, int64_t begin, int64_t end) {
    Tensor whole = tensor;
    return torch::stable::narrow(whole, dim, begin, end - begin);
  }
  static Tensor select(const Tensor& tensor, int64_t index) { return torch::stable::select(tensor, 0, index); }
  static Tensor view(const Tensor& tensor, Sizes sizes) { return torch::stable::view(tensor, sizes); }
  static Tensor sum(const Tensor& tensor, int64_t dim) { return torch::stable::sum(tensor, Sizes(&dim, 1)); }
  static Tensor multiply(const Tensor& a, const Tensor& b) {
    std::array<StableIValue, 2> stack{torch::stable::detail::from(a), torch::stable::detail::from(b)};
    TORCH_ERROR_CODE_CHECK(torch_call_dispatcher("aten::mul", "Tensor", stack.data(), TORCH_ABI_VERSION));
    return torch::stable::detail::to<Tensor>(stack[0]);
  }
  static Tensor transposed(const Tensor& matrix) { return torch::stable::transpose(matrix, 0, 1); }
  static Tensor product(const Tensor& a, const Tensor& b) { return torch::stable::matmul(a, b); }
  static void copy(const Tensor& to, const Tensor& from) {
    Tensor target = to;
    torch::stable::copy_(target, from);
  }
  static Tensor on_device_of(const Tensor& like, const Tensor& tensor) {
    return torch::stable::to(tensor, like.device());
  }
  static Tensor on_host(const Tensor& tensor) {
    return torch::stable::to(tensor, torch::stable::Device(torch::headeronly::DeviceType::CPU));
  }
  static void add_to(const Tensor& sum, const Tensor& term, double factor) {
    copy(sum, torch::stable::subtract(sum, term, -factor));
  }

#ifdef FOCALKERN_WITH_CUDA
  using CudaScope = stable::CudaScope;
#endif
};

}  // namespace focalkern::stable
