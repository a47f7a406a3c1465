// The Python module focalkern._C and the definition of the torch library "focalkern".

#include "bindings/common.h"
#include "bindings/map_nll_sums.h"
#include "bindings/row_sums.h"
#include "bindings/small_head.h"
#include "bindings/z_loss.h"

#include <ATen/autocast_mode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/version.h>

#include <cstdlib>
#include <vector>

namespace focalkern::bindings {

void check_dense(const char* op, const char* argument, const Tensor& tensor) {
  TORCH_CHECK_TYPE(tensor.layout() == at::kStrided, op, ": ", argument,
                   " must be a dense (strided) tensor, got layout ", tensor.layout());
}

void check_device(const char* op, const Tensor& input) {
  check_dense(op, "input", input);
  const auto device = input.device();
  if (device.is_cpu() || device.is_meta()) return;
#ifdef FOCALKERN_WITH_CUDA
  if (device.is_cuda()) return;
#else
  TORCH_CHECK_NOT_IMPLEMENTED(!device.is_cuda(), op, ": input is on ", device,
                              ", but focalkern was built without CUDA kernels; rebuild it with FOCALKERN_CUDA=1");
#endif
  TORCH_CHECK_NOT_IMPLEMENTED(false, op, ": no kernel for device ", device,
                              "; move the tensors to a CPU or CUDA device, or use focalkern.reference");
}

void check_floating(const char* op, const char* argument, const Tensor& tensor) {
  const auto dtype = tensor.scalar_type();
  TORCH_CHECK_TYPE(dtype == at::kHalf || dtype == at::kBFloat16 || dtype == at::kFloat || dtype == at::kDouble, op,
                   ": ", argument, " must be float16, bfloat16, float32 or float64, got ", dtype_name(dtype));
}

void check_same_device(const char* op, const char* argument, const Tensor& tensor, const Tensor& input) {
  check_dense(op, argument, tensor);
  TORCH_CHECK_VALUE(tensor.device() == input.device(), op, ": ", argument, " must be on the device of input, ",
                    input.device(), ", got ", tensor.device());
}

bool validation_requested() {
  const char* value = std::getenv("FOCALKERN_VALIDATE");
  return value != nullptr && value[0] == '1';
}

std::string dtype_name(at::ScalarType dtype) { return "torch." + std::string(c10::getDtypeNames(dtype).first); }

at::ScalarType compute_dtype(at::ScalarType dtype) { return dtype == at::kDouble ? at::kDouble : at::kFloat; }

bool autocasts(const Tensor& input) {
  const auto device = input.device().type();
  return compute_dtype(input.scalar_type()) != input.scalar_type() && at::autocast::is_autocast_available(device) &&
         at::autocast::is_autocast_enabled(device);
}

bool needs_composite(std::initializer_list<const Tensor*> tensors) {
  if (c10::impl::tls_is_dispatch_key_included(c10::DispatchKey::FuncTorchDynamicLayerFrontMode)) return true;
  for (const Tensor* tensor : tensors) {
    if (tensor->defined() && tensor->_fw_grad(/*level=*/0).defined()) return true;
  }
  return false;
}

Labels labels_of(const Tensor& target) {
  const auto type = target.scalar_type() == at::kLong  ? Labels::Type::kInt64
                    : target.scalar_type() == at::kInt ? Labels::Type::kInt32
                                                       : Labels::Type::kUInt8;
  return {target.const_data_ptr(), type};
}

namespace {

pybind11::dict build_info() {
  pybind11::dict info;
  info["torch"] = TORCH_VERSION;
#ifdef FOCALKERN_WITH_CUDA
  info["cuda"] = true;
#else
  info["cuda"] = false;
#endif
  return info;
}

}  // namespace

}  // namespace focalkern::bindings

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
  // Not TORCH_LIBRARY: a second build of this library in one process then raises an ImportError here, instead of
  // terminating the process from a static initializer.
  static torch::Library definitions(torch::Library::DEF, "focalkern", std::nullopt, __FILE__, __LINE__);

  module.def("build_info", &focalkern::bindings::build_info);
  focalkern::bindings::register_memory(module);
  focalkern::bindings::register_focal_loss(definitions, module);
  focalkern::bindings::register_mmce_loss(definitions, module);
  focalkern::bindings::register_sigmoid_loss(definitions, module);
  focalkern::bindings::register_calibration_grid(definitions, module);
  focalkern::bindings::register_calibration_map(definitions, module);
  focalkern::bindings::register_spline_map(definitions, module);
  focalkern::bindings::register_spline(module);
  focalkern::bindings::register_map_nll_sums(module);
  focalkern::bindings::register_row_sums(module);
  focalkern::bindings::register_small_head(module);
  focalkern::bindings::register_z_loss(module);
}
