// Checks of linear_focal_loss before a small batch. In Python they would take longer than the kernel.

#include <ATen/autocast_mode.h>
#include <torch/csrc/autograd/python_variable.h>

#include <initializer_list>

#include "bindings/common.h"
#include "bindings/direct_call.h"
#include "bindings/small_head.h"

namespace focalkern::bindings {
namespace {

bool is_label_type(at::ScalarType type) { return type == at::kLong || type == at::kInt || type == at::kByte; }

// Whether a label on the CPU equals `value`.
bool has_label(const Tensor& given, int64_t value) {
  TORCH_CHECK_VALUE(given.is_cpu() && is_label_type(given.scalar_type()),
                    "has_label: target must be int64, int32 or uint8 labels on the CPU, got ",
                    dtype_name(given.scalar_type()), " on ", given.device());
  const Tensor target = given.contiguous();
  const Labels labels = labels_of(target);
  for (int64_t i = 0; i < target.numel(); ++i) {
    if (labels[i] == value) return true;
  }
  return false;
}

// Whether one matrix product and focal_loss compute the loss of input [N, D], linear_weight [C, D], target [N] and
// linear_bias [C] or None: plain tensors on the CPU whose logits have at most most_bytes, none of whose labels is
// ignore_index. False for arguments that are invalid, or that need other checks.
bool is_small_head(pybind11::handle input, pybind11::handle linear_weight, pybind11::handle target,
                   pybind11::handle linear_bias, int64_t ignore_index, int64_t most_bytes) {
  c10::DispatchKeySet keys;
  for (const auto& given : {input, linear_weight, target, linear_bias.is_none() ? input : linear_bias}) {
    if (!THPVariable_CheckExact(given.ptr())) return false;
    keys = keys | THPVariable_Unpack(given.ptr()).key_set();
  }
  const Tensor &rows = THPVariable_Unpack(input.ptr()), &head = THPVariable_Unpack(linear_weight.ptr());
  const Tensor& labels = THPVariable_Unpack(target.ptr());
  const at::ScalarType dtype = rows.scalar_type();
  if (!only_chooses_a_kernel(keys) || !rows.is_cpu() || rows.dim() != 2 || head.dim() != 2) return false;
  if (dtype != at::kDouble && (dtype != at::kFloat || at::autocast::is_autocast_enabled(at::kCPU))) return false;
  const int64_t classes = head.size(0);
  // F.linear would broadcast a bias of another shape.
  if (!linear_bias.is_none() && THPVariable_Unpack(linear_bias.ptr()).sizes() != at::IntArrayRef({classes})) {
    return false;
  }
  return rows.size(0) * classes * static_cast<int64_t>(rows.element_size()) <= most_bytes &&
         is_label_type(labels.scalar_type()) && !has_label(labels, ignore_index);
}

}  // namespace

void register_small_head(pybind11::module_& module) {
  module.def("has_label", &has_label, pybind11::call_guard<pybind11::gil_scoped_release>());
  module.def("is_small_head", &is_small_head);
}

}  // namespace focalkern::bindings
