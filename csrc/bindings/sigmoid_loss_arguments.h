// Arguments of the losses of one logit: checks for real and for fake tensors, and the step from tensors to kernel
// arguments.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/Exception.h>

#include <vector>

#include "bindings/common.h"
#include "bindings/strided_iteration.h"
#include "kernels/sigmoid_loss.h"

namespace focalkern::bindings {
namespace {

struct Options {
  SigmoidLoss kind;
  double constant;
  int64_t reduction;
  int64_t ignore_index;
  bool float32_loss;  // a half-precision loss is returned as float32, as autocast requires
};

struct Inputs {
  const Tensor& input;
  const Tensor& target;
  const Tensor& gamma;
  const OptionalTensor& second;
  const OptionalTensor& weight;
  const OptionalTensor& scores;
};

struct Names {
  const char* op;
  const char* gamma;
  const char* second;
};

const Names& names_of(SigmoidLoss kind) {
  static const Names names[] = {
      {"sigmoid_focal_loss", "gamma", "alpha"}, {"asymmetric_loss", "gamma_negative", "gamma_positive"},
      {"quality_focal_loss", "beta", "none"},   {"varifocal_loss", "gamma", "alpha"},
      {"matchability_loss", "gamma", "alpha"},  {"ia_bce_loss", "gamma", "alpha"}};
  return names[static_cast<int>(kind)];
}

SigmoidLoss checked_kind(int64_t kind) {
  TORCH_CHECK_VALUE(kind >= 0 && kind <= 5, "sigmoid_loss: kind must be 0, 1, 2, 3, 4 or 5, got ", kind);
  return static_cast<SigmoidLoss>(kind);
}

Options options_of(int64_t kind, double constant, int64_t reduction, int64_t ignore_index, bool float32_loss = false) {
  return {checked_kind(kind), constant, reduction, ignore_index, float32_loss};
}

// Integer targets with one dim less than the input are labels.
bool is_labels(const Tensor& input, const Tensor& target) {
  return target.dim() + 1 == input.dim() && at::isIntegralType(target.scalar_type(), /*includeBool=*/false);
}

// ---- checks, for real and for fake tensors alike -------------------------------------------------------------------

void check_broadcast(const char* op, const char* name, const Tensor& tensor, const Tensor& input) {
  check_floating(op, name, tensor);
  if (is_host_number(tensor)) return;
  check_same_device(op, name, tensor, input);
  bool fits = tensor.dim() <= input.dim();
  for (int64_t d = 1; fits && d <= tensor.dim(); ++d) {
    const auto size = tensor.sym_size(-d);
    fits = size == 1 || size == input.sym_size(-d);
  }
  TORCH_CHECK_VALUE(fits, op, ": ", name, " must be broadcastable to input, ", input.sym_sizes(), ", got ",
                    tensor.sym_sizes());
}

void check_constant(const char* op, const char* name, const Tensor& tensor) {
  TORCH_CHECK_VALUE(!tensor.requires_grad(), op, ": ", name, " must not require grad: it is a constant of the loss");
}

void check_target(const char* op, const Tensor& input, const Tensor& target) {
  check_same_device(op, "target", target, input);
  const auto type = target.scalar_type();
  TORCH_CHECK_TYPE(target.is_floating_point() || at::isIntegralType(type, /*includeBool=*/true), op,
                   ": target must be floating point, bool or integer, got ", dtype_name(type));
  if (target.sym_sizes() == input.sym_sizes()) return;
  if (is_labels(input, target)) {
    c10::SymDimVector shape(input.sym_sizes().begin(), input.sym_sizes().end());
    shape.erase(shape.begin() + class_dim_of(input));
    TORCH_CHECK_VALUE(target.sym_sizes() == c10::SymIntArrayRef(shape), op,
                      ": target of labels must be the shape of input without its class dimension, ",
                      c10::SymIntArrayRef(shape), ", got ", target.sym_sizes());
    return;
  }
  TORCH_CHECK_VALUE(false, op, ": target must be the shape of input = ", input.sym_sizes(), ", got ",
                    target.sym_sizes());
}

// Each label has one score.
void check_scores(const char* op, const Inputs& inputs, SigmoidLoss kind) {
  const Tensor& scores = *inputs.scores;
  TORCH_CHECK_VALUE(kind != SigmoidLoss::kFocal && kind != SigmoidLoss::kAsymmetric, op, ": target must be a tensor");
  check_floating(op, "the scores of target", scores);
  check_same_device(op, "the scores of target", scores, inputs.input);
  check_constant(op, "the scores of target", scores);
  TORCH_CHECK_VALUE(is_labels(inputs.input, inputs.target), op,
                    ": target must be labels and scores, with labels of the shape of input without its class "
                    "dimension, got labels ",
                    inputs.target.sym_sizes(), " of ", dtype_name(inputs.target.scalar_type()));
  TORCH_CHECK_VALUE(scores.sym_sizes() == inputs.target.sym_sizes(), op,
                    ": the scores of target must have the shape of its labels, ", inputs.target.sym_sizes(), ", got ",
                    scores.sym_sizes());
}

void check_arguments(const Inputs& inputs, const Options& options) {
  const auto& [input, target, gamma, second, weight, scores] = inputs;
  const auto& names = names_of(options.kind);
  const char* op = names.op;
  TORCH_CHECK_TYPE(input.is_floating_point(), op, ": input must be floating point, got ",
                   dtype_name(input.scalar_type()));
  check_floating(op, "input", input);
  check_target(op, input, target);
  if (scores.has_value()) check_scores(op, inputs, options.kind);
  check_broadcast(op, names.gamma, gamma, input);
  if (second.has_value()) {
    check_broadcast(op, names.second, *second, input);
    if (may_have_alpha(options.kind)) check_constant(op, names.second, *second);
  }
  const bool needs_second = options.kind == SigmoidLoss::kAsymmetric || options.kind == SigmoidLoss::kIaBce;
  TORCH_CHECK_VALUE(second.has_value() ? options.kind != SigmoidLoss::kQuality : !needs_second, op,
                    second.has_value() ? ": has no " : ": needs ", names.second);
  if (weight.has_value()) {
    check_broadcast(op, "weight", *weight, input);
    check_constant(op, "weight", *weight);
  }
  TORCH_CHECK_VALUE(
      options.constant >= 0 && (options.constant < 1 || (options.constant == 1 && is_scored(options.kind))), op,
      ": margin must be in [0, 1), got ", options.constant);
  TORCH_CHECK_VALUE(options.reduction >= kNone && options.reduction <= kSum, op,
                    ": reduction must be 0 (none), 1 (mean) or 2 (sum), got ", options.reduction);
}

[[noreturn]] void raise_invalid_label(const Tensor& input, const Tensor& target, const Options& options) {
  const int64_t classes = input.size(class_dim_of(input));
  const Tensor labels = target.reshape({-1}).to(at::kLong).cpu();
  const auto* label = labels.const_data_ptr<int64_t>();
  int64_t row = 0;
  while (row + 1 < labels.numel() && ((label[row] >= 0 && label[row] <= classes) || label[row] == options.ignore_index))
    ++row;
  TORCH_CHECK_INDEX(false, names_of(options.kind).op, ": target must be in [0, ", classes,
                    "] (the last is background) or ignore_index, got ", label[row], " at row ", row);
}

// ---- from tensors to kernel arguments ------------------------------------------------------------------------------

ElementType element_type(at::ScalarType dtype) {
  switch (dtype) {
    case at::kDouble:
      return ElementType::kDouble;
    case at::kHalf:
      return ElementType::kHalf;
    case at::kBFloat16:
      return ElementType::kBFloat16;
    case at::kBool:
    case at::kByte:
      return ElementType::kUInt8;
    case at::kInt:
      return ElementType::kInt32;
    case at::kLong:
      return ElementType::kInt64;
    default:
      return ElementType::kFloat;
  }
}

bool has_element_type(at::ScalarType dtype) {
  return dtype == at::kFloat || dtype == at::kDouble || dtype == at::kHalf || dtype == at::kBFloat16 ||
         dtype == at::kBool || dtype == at::kByte || dtype == at::kInt || dtype == at::kLong;
}

// Adds a tensor that broadcasts to the results.
Operand broadcast(StridedIteration<Tensor>& walk, const Tensor& tensor, at::IntArrayRef sizes) {
  return walk.add(tensor.sizes() == sizes ? tensor : tensor.expand(sizes), element_type(tensor.scalar_type()));
}

// A number on the host, or a tensor in the type of the computation.
Operand parameter(const OptionalTensor& tensor, double absent, at::ScalarType real, StridedIteration<Tensor>& walk,
                  at::IntArrayRef sizes) {
  Operand operand{};
  operand.value = absent;
  if (!tensor.has_value()) return operand;
  if (is_host_number(*tensor)) {
    operand.value = tensor->item<double>();
    return operand;
  }
  return broadcast(walk, as_dtype(*tensor, real), sizes);
}

// `like` is dense and has the layout of the results. Sets everything but the results.
template <typename Scalar>
void prepare(SigmoidLossArgs<Scalar>& args, StridedIteration<Tensor>& walk, Operand* grad_loss, const Tensor& grad,
             const Inputs& inputs, const Options& options) {
  const auto& [input, target, gamma, second, weight, scores] = inputs;
  const auto real = compute_dtype(input.scalar_type());
  args.loss_kind = options.kind;
  args.constant = static_cast<compute_t<Scalar>>(options.constant);
  args.ignore_index = options.ignore_index;
  args.target_is_labels = is_labels(input, target);
  args.classes = input.dim() > 0 ? input.size(class_dim_of(input)) : 1;
  const auto sizes = input.sizes();
  args.input = broadcast(walk, input, sizes);
  const bool known = has_element_type(target.scalar_type());
  Tensor given = known ? target : target.to(args.target_is_labels ? at::kLong : at::kFloat);
  if (args.target_is_labels) given = given.unsqueeze(class_dim_of(input));
  args.target = broadcast(walk, given, sizes);
  args.gamma = parameter(gamma, 0, real, walk, sizes);
  args.has_alpha = may_have_alpha(options.kind) && second.has_value();
  args.second = parameter(second, 0, real, walk, sizes);
  args.weight = parameter(weight, 1, real, walk, sizes);
  if (scores.has_value()) args.scores = broadcast(walk, scores->unsqueeze(class_dim_of(input)), sizes);
  std::vector<Operand*> operands{&args.input, &args.target, &args.gamma, &args.second, &args.weight, &args.scores};
  if (grad_loss) {
    if (grad.numel() == 1 && grad.device().is_cpu()) {
      grad_loss->value = grad.item<double>();
    } else {
      *grad_loss = broadcast(walk, as_dtype(grad, real), sizes);
    }
    operands.push_back(grad_loss);
  }
  TORCH_CHECK_VALUE(walk.finish(&args.space, operands, &args.class_dim), "focalkern: tensors with more than ", kMaxDims,
                    " dimensions of different strides must be made contiguous first");
}

// The dim of the classes where the target is labels, else -1.
int64_t label_dim(const Tensor& input, const Tensor& target) {
  return is_labels(input, target) ? class_dim_of(input) : -1;
}

}  // namespace
}  // namespace focalkern::bindings
