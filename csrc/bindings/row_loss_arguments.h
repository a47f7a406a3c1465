// Arguments of the losses of rows: checks for real and for fake tensors, and the step from tensors to kernel arguments.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/Exception.h>

#include <string>
#include <vector>

#include "bindings/row_loss_call.h"
#include "math/row_losses.h"

namespace focalkern::bindings {
namespace {

using Inputs = RowLossInputs;
using Options = RowLossOptions;

constexpr const char* kNames[] = {
#define FK_ROW_LOSS(number, Formula, name) name,
#include "math/row_losses.def"
};

// Calls f with the formula of the loss.
template <typename Function>
auto dispatch_loss(RowLoss kind, Function f) {
  switch (kind) {
#define FK_ROW_LOSS(number, Formula, name) \
  case RowLoss::number:                    \
    return f(Formula{});
#include "math/row_losses.def"
  }
  TORCH_INTERNAL_ASSERT(false, "no loss of this number");
}

const char* name_of(const Options& options) { return kNames[static_cast<int64_t>(options.kind)]; }

Options options_of(int64_t reduction, int64_t ignore_index, double label_smoothing, bool detach_modulation,
                   bool float32_loss, int64_t kind, double epsilon) {
  TORCH_CHECK_VALUE(kind >= 0 && kind < static_cast<int64_t>(std::size(kNames)), "focal_loss: kind must be in [0, ",
                    std::size(kNames), "), got ", kind);
  return {static_cast<RowLoss>(kind), epsilon,     reduction, ignore_index, label_smoothing,
          detach_modulation,          float32_loss};
}

int64_t saved_numbers(const Options& options) {
  return dispatch_loss(options.kind, [](auto loss) -> int64_t { return kSavedNumbers<decltype(loss)>; });
}

SoftTarget soft_target_of(const Options& options) {
  return dispatch_loss(options.kind, [](auto loss) { return decltype(loss)::kTarget; });
}

// Label smoothing of a loss whose kernels for this device take labels without it. The dual focal loss has kernels for
// it on the CPU (cpu/row_loss/ordered_rows.h).
bool has_no_kernel(const Tensor& input, const Options& options) {
  if (options.label_smoothing == 0 || soft_target_of(options) != SoftTarget::kNone) return false;
  return input.is_cuda() || options.kind != RowLoss::kDualFocal;
}

bool is_soft_target(const Tensor& target) { return target.is_floating_point(); }

// Shape of the unreduced loss: that of the input without its class dimension.
c10::SymDimVector loss_shape(const Tensor& input) {
  c10::SymDimVector shape(input.sym_sizes().begin(), input.sym_sizes().end());
  if (!shape.empty()) shape.erase(shape.begin() + class_dim_of(input));
  return shape;
}

// ---- checks, for real and for fake tensors alike -------------------------------------------------------------------

void check_gamma(const char* op, const Tensor& input, const Tensor& gamma, const OptionalTensor& edges) {
  if (!gamma.defined()) return;
  TORCH_CHECK_TYPE(gamma.is_floating_point(), op, ": gamma must be a float, a floating-point tensor or a GammaTable, ",
                   "got a tensor of ", dtype_name(gamma.scalar_type()));
  if (edges.has_value()) {
    TORCH_CHECK_TYPE(edges->is_floating_point(), op, ": gamma.edges must be floating point, got ",
                     dtype_name(edges->scalar_type()));
    TORCH_CHECK_VALUE(
        gamma.dim() == 1 && edges->dim() == 1 && gamma.sym_size(0) >= 1 && edges->sym_size(0) == gamma.sym_size(0) + 1,
        op, ": gamma.edges must be [n_bins + 1] for gamma.gammas [n_bins], got ", edges->sym_sizes(), " and ",
        gamma.sym_sizes());
    check_same_device(op, "gamma.edges", *edges, input);
    check_same_device(op, "gamma.gammas", gamma, input);
    return;
  }
  if (is_host_number(gamma)) return;
  check_same_device(op, "gamma", gamma, input);
  const auto shape = loss_shape(input);
  bool fits = gamma.dim() <= static_cast<int64_t>(shape.size());
  for (int64_t d = 1; fits && d <= gamma.dim(); ++d) {
    const auto size = gamma.sym_size(-d);
    fits = size == 1 || size == shape[shape.size() - d];
  }
  TORCH_CHECK_VALUE(fits, op, ": gamma must be broadcastable to the unreduced loss ", c10::SymIntArrayRef(shape),
                    ", got ", gamma.sym_sizes());
}

void check_target(const Tensor& input, const Tensor& target, const Options& options) {
  const char* op = name_of(options);
  if (is_soft_target(target)) {
    TORCH_CHECK_TYPE(soft_target_of(options) != SoftTarget::kNone, op,
                     ": target must be labels, int64, int32 or uint8, got ", dtype_name(target.scalar_type()));
    check_floating(op, "target", target);
    TORCH_CHECK_VALUE(target.sym_sizes() == input.sym_sizes(), op,
                      ": target of class probabilities must have the shape of input, ", input.sym_sizes(), ", got ",
                      target.sym_sizes());
    TORCH_CHECK_VALUE(options.ignore_index < 0, op,
                      ": ignore_index must be negative (unused) for a target of class probabilities, got ",
                      options.ignore_index);
    return;
  }
  const auto type = target.scalar_type();
  TORCH_CHECK_TYPE(type == at::kLong || type == at::kInt || type == at::kByte, op,
                   ": target must be int64, int32 or uint8 labels or floating-point class probabilities, got ",
                   dtype_name(type));
  const auto shape = loss_shape(input);
  if (target.sym_sizes() == c10::SymIntArrayRef(shape)) return;
  std::string names = "[]";
  if (input.dim() == 2) names = "[N]";
  if (input.dim() > 2) names = "[N, d1, ...]";
  TORCH_CHECK_VALUE(false, op, ": target must be ", names, " = ", c10::SymIntArrayRef(shape), ", got ",
                    target.sym_sizes());
}

void check_arguments(const Inputs& inputs, const Options& options) {
  const auto& [input, target, gamma, edges, weight] = inputs;
  const char* op = name_of(options);
  check_floating(op, "input", input);
  TORCH_CHECK_VALUE(input.dim() >= 1, op, ": input must be [C], [N, C] or [N, C, d1, ...], got a scalar");
  const auto classes = input.sym_size(class_dim_of(input));
  TORCH_CHECK_VALUE(classes >= 1, op, ": input must have at least one class, got shape ", input.sym_sizes());
  check_same_device(op, "target", target, input);
  check_target(input, target, options);
  check_gamma(op, input, gamma, edges);
  if (weight.has_value()) {
    check_floating(op, "weight", *weight);
    TORCH_CHECK_VALUE(weight->dim() == 1 && weight->sym_size(0) == classes, op, ": weight must be [C] = [", classes,
                      "], got ", weight->sym_sizes());
    check_same_device(op, "weight", *weight, input);
    TORCH_CHECK_VALUE(!weight->requires_grad(), op, ": weight must not require grad: it is a constant of the loss");
  }
  TORCH_CHECK_VALUE(options.label_smoothing >= 0 && options.label_smoothing <= 1, op,
                    ": label_smoothing must be in [0, 1], got ", options.label_smoothing);
  TORCH_CHECK_VALUE(options.reduction >= kNone && options.reduction <= kSum, op,
                    ": reduction must be 0 (none), 1 (mean) or 2 (sum), got ", options.reduction);
}

[[noreturn]] void raise_invalid_label(const char* op, const Tensor& target, int64_t row, int64_t classes) {
  TORCH_CHECK_INDEX(false, op, ": target must be in [0, ", classes, ") or ignore_index, got ", labels_of(target)[row],
                    " at row ", row);
}

void check_labels_on_device(const char* op, const Tensor& target, int64_t classes, int64_t ignore_index) {
  const Tensor labels = target.reshape({-1}).to(at::kLong);
  const Tensor invalid = labels.ne(ignore_index).logical_and_(labels.lt(0).logical_or_(labels.ge(classes))).nonzero();
  if (invalid.numel() == 0) return;
  raise_invalid_label(op, labels.cpu(), invalid[0].item<int64_t>(), classes);
}

// ---- from tensors to kernel arguments ------------------------------------------------------------------------------

// Keeps copies alive that the kernels require; tensors that fit are used in place.
template <typename Scalar>
struct Prepared {
  Tensor input, target, gamma, edges, weight;
  std::vector<compute_t<Scalar>> table;  // edges and gammas of a float64 table on the host
  RowLossArgs<Scalar> args{};
};

Tensor with_row_layout(const Tensor& tensor, int64_t class_dim, RowLayout* layout) {
  auto found = row_layout(tensor, class_dim, tensor.is_cpu());
  if (found) {
    *layout = *found;
    return tensor;
  }
  const Tensor copy = tensor.contiguous();
  *layout = *row_layout(copy, class_dim, /*with_images=*/false);
  return copy;
}

// Whether its elements can be read as a contiguous array of double on the host.
bool on_host(const Tensor& tensor) {
  return tensor.is_cpu() && tensor.scalar_type() == at::kDouble && tensor.is_contiguous();
}

template <typename Scalar>
Prepared<Scalar> prepare(const Inputs& inputs, const Options& options) {
  const auto& [input, target, gamma, edges, weight] = inputs;
  using Real = compute_t<Scalar>;
  const auto real = compute_dtype(input.scalar_type());
  const int64_t class_dim = class_dim_of(input);
  Prepared<Scalar> p;
  auto& args = p.args;
  args.classes = input.size(class_dim);
  args.rows = input.numel() / args.classes;
  p.input = with_row_layout(input, class_dim, &args.layout);
  args.logits = static_cast<const Scalar*>(p.input.const_data_ptr());
  if (is_soft_target(target)) {
    const bool is_real = target.scalar_type() != input.scalar_type();
    p.target = with_row_layout(is_real ? as_dtype(target, real) : target, class_dim, &args.target_layout);
    args.target_probs = {p.target.const_data_ptr(), is_real};
  } else {
    p.target = target.contiguous();
    args.labels = labels_of(p.target);
  }
  args.ignore_index = options.ignore_index;
  args.label_smoothing = static_cast<Real>(options.label_smoothing);
  args.detach_modulation = options.detach_modulation;
  args.epsilon = static_cast<Real>(options.epsilon);
  if (weight.has_value()) {
    p.weight = as_dtype(*weight, real).contiguous();
    args.class_weight = static_cast<const Real*>(p.weight.const_data_ptr());
  }
  if (!gamma.defined()) {
    args.gamma_value = static_cast<Real>(options.gamma);
  } else if (edges.has_value()) {
    args.n_bins = gamma.numel();
    if (on_host(*edges) && on_host(gamma)) {  // without a call of torch, which takes longer than a small batch
      for (const Tensor& part : {*edges, gamma}) {
        const double* numbers = part.const_data_ptr<double>();
        p.table.insert(p.table.end(), numbers, numbers + part.numel());
      }
      args.edges = p.table.data();
      args.gamma = args.edges + args.n_bins + 1;
    } else {
      p.edges = edges->to(real).contiguous();
      p.gamma = gamma.to(real).contiguous();
      args.edges = static_cast<const Real*>(p.edges.const_data_ptr());
      args.gamma = static_cast<const Real*>(p.gamma.const_data_ptr());
    }
  } else if (is_host_number(gamma)) {
    args.gamma_value = gamma.item<Real>();
  } else {
    const bool single = gamma.numel() == 1;
    p.gamma = (single ? gamma : gamma.expand(C10_AS_INTARRAYREF_SLOW(loss_shape(input)))).to(real).contiguous();
    args.gamma = static_cast<const Real*>(p.gamma.const_data_ptr());
    args.gamma_stride = single ? 0 : 1;
  }
  return p;
}

}  // namespace
}  // namespace focalkern::bindings
