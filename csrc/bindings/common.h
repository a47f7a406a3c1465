// Shared by the bindings of all operators: registration, checks, and the step from tensors to kernel arguments.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/alias.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/utils/pybind.h>
#include <torch/library.h>

#include <array>
#include <functional>
#include <initializer_list>
#include <optional>
#include <string>

#include "bindings/row_layout.h"
#include "bindings/schemas.h"
#include "kernels/layout.h"

namespace focalkern::bindings {

using at::Tensor;
using OptionalTensor = std::optional<Tensor>;

enum Reduction : int64_t { kNone = 0, kMean = 1, kSum = 2 };

// Each operator registers its schemas and kernels with torch's dispatcher, and its eager entry with the module. The
// operators *_composite are implemented in Python: focalkern.fallback registers them.
void register_focal_loss(torch::Library& definitions, pybind11::module_& module);
void register_calibration_grid(torch::Library& definitions, pybind11::module_& module);
void register_calibration_map(torch::Library& definitions, pybind11::module_& module);
void register_sigmoid_loss(torch::Library& definitions, pybind11::module_& module);
void register_spline_map(torch::Library& definitions, pybind11::module_& module);
void register_spline(pybind11::module_& module);
void register_mmce_loss(torch::Library& definitions, pybind11::module_& module);
void register_memory(pybind11::module_& module);

// Raises TypeError unless the tensor is dense.
void check_dense(const char* op, const char* argument, const Tensor& tensor);

// Raises NotImplementedError for a device that has no kernel in this build, TypeError for a tensor that is not dense.
void check_device(const char* op, const Tensor& input);

// Raises TypeError unless the dtype is one of the four that the kernels take.
void check_floating(const char* op, const char* argument, const Tensor& tensor);

// Raises ValueError unless both tensors are on one device, TypeError for a tensor that is not dense.
void check_same_device(const char* op, const char* argument, const Tensor& tensor, const Tensor& input);

// FOCALKERN_VALIDATE=1: also check values that only a synchronisation with the device can read.
bool validation_requested();

// A dtype in a message, as Python prints it: torch.int64.
std::string dtype_name(at::ScalarType dtype);

// float64 for float64, float32 for everything narrower.
at::ScalarType compute_dtype(at::ScalarType dtype);

// The dtype of a result: that of the input, or of the computation for a half-precision input under autocast.
inline at::ScalarType result_dtype(const Tensor& input, bool wide) {
  return wide ? compute_dtype(input.scalar_type()) : input.scalar_type();
}

// Skips the dispatcher (half a microsecond) if there is nothing to convert.
inline Tensor as_dtype(const Tensor& tensor, at::ScalarType dtype) {
  return tensor.scalar_type() == dtype ? tensor : tensor.to(dtype);
}

// Classes are dimension 1, or the only dimension.
inline int64_t class_dim_of(const Tensor& input) { return input.dim() == 1 ? 0 : 1; }

// A single number may stay on the host: it becomes a kernel argument.
inline bool is_host_number(const Tensor& parameter) { return parameter.dim() == 0 && parameter.device().is_cpu(); }

// Whether autocast requires a float32 result for this half-precision input.
bool autocasts(const Tensor& input);

// Whether a torch.func transform is active or a tensor carries a forward-mode tangent: the fused kernels would drop
// both silently.
bool needs_composite(std::initializer_list<const Tensor*> tensors);

Labels labels_of(const Tensor& target);

// Calls `f` with a value of the storage type that belongs to `dtype`.
template <typename Function>
void dispatch_scalar(at::ScalarType dtype, Function f) {
  switch (dtype) {
    case at::kHalf:
      return f(Half{});
    case at::kBFloat16:
      return f(BFloat16{});
    case at::kDouble:
      return f(double{});
    default:
      return f(float{});
  }
}

// The tolerance of the sum of a row of probabilities of this dtype.
inline double sum_tolerance(at::ScalarType dtype) {
  double tolerance = 0;
  dispatch_scalar(dtype, [&](auto scalar) { tolerance = probability_sum_tolerance<decltype(scalar)>(); });
  return tolerance;
}

// at::empty_like for a result as large as the input. On the CPU its memory, once freed, is kept for the next such
// result, up to FOCALKERN_CACHE_MIB in all.
Tensor empty_result_like(const Tensor& tensor, at::ScalarType dtype);

// The handle of an operator that was registered above. It is looked up once.
template <typename Signature>
c10::TypedOperatorHandle<Signature> find_operator(const char* name) {
  return c10::Dispatcher::singleton().findSchemaOrThrow(name, "").typed<Signature>();
}

// Gradients that can be differentiated again, result[i] for variables[i] if it is needed. `composite` computes
// the loss from aliases of the variables, so that a hook on the user's tensor fires once.
template <size_t kVariables, typename Composite>
void differentiable_gradients(const std::array<Tensor, kVariables>& variables,
                              const std::array<bool, kVariables>& needed, const Tensor& grad, Composite composite,
                              std::vector<Tensor>& result) {
  std::array<Tensor, kVariables> aliases;
  std::vector<Tensor> wanted;
  for (size_t i = 0; i < kVariables; ++i) {
    if (variables[i].defined()) aliases[i] = at::alias(variables[i]);
    if (needed[i]) wanted.push_back(aliases[i]);
  }
  const Tensor loss = composite(aliases);
  const auto found = torch::autograd::grad({loss}, wanted, {as_dtype(grad, loss.scalar_type())}, /*retain_graph=*/true,
                                           /*create_graph=*/true, /*allow_unused=*/true);
  for (size_t i = 0, k = 0; i < kVariables; ++i) {
    if (needed[i]) result[i] = found[k++];
  }
}

template <typename T>
const T* pointer_or_null(const std::optional<Tensor>& tensor) {
  return tensor.has_value() ? static_cast<const T*>(tensor->const_data_ptr()) : nullptr;
}

}  // namespace focalkern::bindings
