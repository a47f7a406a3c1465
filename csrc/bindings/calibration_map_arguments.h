// Arguments of the calibration maps: checks for real and for fake tensors, and the step from tensors to kernel
// arguments.
#pragma once

#include <ATen/ExpandUtils.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <c10/util/Exception.h>

#include <cmath>
#include <limits>
#include <string>
#include <tuple>

#include "bindings/common.h"
#include "kernels/calibration_map.h"
#include "math/calibration_map.h"

namespace focalkern::bindings {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();
constexpr double kNan = std::numeric_limits<double>::quiet_NaN();

enum Kind : int64_t { kLogits = 0, kProbs = 1, kBinary = 2 };

struct Options {
  int64_t kind;
  bool log_output;  // log-probabilities, or log-odds
  bool wide;        // a half-precision input has a float32 output, as autocast requires
};

const char* op_name(int64_t kind) { return kind == kBinary ? "binary_focal_calibration_map" : "focal_calibration_map"; }
const char* input_name(int64_t kind) { return kind == kBinary ? "logits" : "input"; }

// Shape of the parameters: one number per row, or per element of the binary map.
c10::SymDimVector leading_shape(const Tensor& input, int64_t kind) {
  c10::SymDimVector shape(input.sym_sizes().begin(), input.sym_sizes().end());
  if (kind != kBinary) shape.pop_back();
  return shape;
}

// ---- checks of shapes and types, for real and for fake tensors alike ------------------------------------------------

void check_parameter(const char* op, const char* name, const Tensor& parameter, const Tensor& input, int64_t kind) {
  TORCH_CHECK_TYPE(parameter.is_floating_point(), op, ": ", name, " must be a number or a floating-point tensor, got ",
                   "a tensor of ", dtype_name(parameter.scalar_type()));
  if (is_host_number(parameter)) return;
  check_same_device(op, name, parameter, input);
  const auto shape = leading_shape(input, kind);
  bool fits = parameter.dim() <= static_cast<int64_t>(shape.size());
  for (int64_t d = 1; fits && d <= parameter.dim(); ++d) {
    const auto size = parameter.sym_size(-d);
    fits = size == 1 || size == shape[shape.size() - d];
  }
  TORCH_CHECK_VALUE(fits, op, ": ", name, " must be broadcastable to the ",
                    kind == kBinary ? "shape of logits " : "leading shape of input ", c10::SymIntArrayRef(shape),
                    ", got ", parameter.sym_sizes());
}

// A number has been checked before the call.
void check_parameter(const char*, const char*, double, const Tensor&, int64_t) {}

// Here and below, gamma and temperature are tensors, or numbers that need none.
template <typename Number>
void check_arguments(const Tensor& input, const Number& gamma, const Number& temperature, int64_t kind) {
  TORCH_CHECK_VALUE(kind >= kLogits && kind <= kBinary, "focal_calibration_map: kind must be 0, 1 or 2, got ", kind);
  const char* op = op_name(kind);
  check_floating(op, input_name(kind), input);
  if (kind != kBinary) {
    TORCH_CHECK_VALUE(input.dim() >= 1, op, ": input must be [..., C], got a scalar");
    TORCH_CHECK_VALUE(input.sym_size(-1) >= 2, op, ": input must have at least two classes in its last dimension, ",
                      "got shape ", input.sym_sizes());
  }
  check_parameter(op, "gamma", gamma, input, kind);
  check_parameter(op, "temperature", temperature, input, kind);
}

double parameter_of_row(const Tensor& parameter, const Tensor& input, int64_t kind, int64_t row) {
  if (parameter.numel() == 1) return parameter.item<double>();
  return parameter.expand(C10_AS_INTARRAYREF_SLOW(leading_shape(input, kind))).reshape(-1)[row].item<double>();
}

double parameter_of_row(double number, const Tensor&, int64_t, int64_t) { return number; }

// Raises the error of an invalid row. Only called if there is one.
template <typename Number>
[[noreturn]] void raise_invalid_row(const Tensor& input, const Number& gamma, const Number& temperature, int64_t kind,
                                    int64_t row) {
  const char* op = op_name(kind);
  const char* name = input_name(kind);
  const double gamma_value = parameter_of_row(gamma, input, kind, row);
  const double temperature_value = parameter_of_row(temperature, input, kind, row);
  TORCH_CHECK_VALUE(gamma_value > -1 && gamma_value < kInfinity, op, ": gamma must be finite and greater than -1, got ",
                    gamma_value, " at row ", row);
  TORCH_CHECK_VALUE(temperature_value > 0 && temperature_value < kInfinity, op,
                    ": temperature must be finite and positive, got ", temperature_value, " at row ", row);
  const int64_t classes = kind == kBinary ? 1 : input.size(-1);
  const Tensor values = input.reshape({-1, classes})[row].to(at::kDouble).cpu().contiguous();
  const double* x = values.const_data_ptr<double>();
  double sum = 0;
  for (int64_t c = 0; c < classes; ++c) {
    const char* problem = nullptr;
    if (std::isnan(x[c])) problem = " must not be NaN, got NaN";
    if (x[c] == kInfinity) problem = " must not be +inf, got inf";
    TORCH_CHECK_VALUE(problem == nullptr, op, ": ", name, problem, " at row ", row, kind == kBinary ? "" : ", class ",
                      kind == kBinary ? "" : std::to_string(c));
    TORCH_CHECK_VALUE(kind != kProbs || x[c] >= 0, op, ": ", name, " must be probabilities, got ", x[c], " at row ",
                      row, ", class ", c);
    sum += x[c];
  }
  TORCH_CHECK_VALUE(kind != kProbs, op, ": ", name, " must be probabilities that sum to 1 within ",
                    sum_tolerance(input.scalar_type()), ", got a sum of ", sum, " at row ", row);
  TORCH_CHECK_VALUE(false, op, ": ", name, " must have a logit above -inf in every row, got none at row ", row);
}

// ---- from tensors to kernel arguments ------------------------------------------------------------------------------

// A parameter in the form that the kernels take. Keeps the copy alive if one is needed.
struct Parameter {
  Tensor values;
  const double* data = nullptr;
  int64_t stride = 0;
  double value = 0;
};

Parameter prepare_parameter(const Tensor& parameter, const Tensor& input, int64_t kind) {
  Parameter p;
  if (is_host_number(parameter)) {
    p.value = parameter.item<double>();
    return p;
  }
  p.values = parameter;
  if (parameter.numel() != 1) {
    p.values = parameter.expand(C10_AS_INTARRAYREF_SLOW(leading_shape(input, kind)));
    p.stride = 1;
  }
  p.values = p.values.to(at::kDouble).contiguous();
  p.data = static_cast<const double*>(p.values.const_data_ptr());
  return p;
}

Parameter prepare_parameter(double number, const Tensor&, int64_t) { return {{}, nullptr, 0, number}; }

template <typename Scalar>
void set_parameters(CalibrationMapArgs<Scalar>& args, const Parameter& gamma, const Parameter& temperature) {
  args.gamma = gamma.data;
  args.gamma_stride = gamma.stride;
  args.gamma_value = gamma.value;
  args.temperature = temperature.data;
  args.temperature_stride = temperature.stride;
  args.temperature_value = temperature.value;
}

template <typename Scalar>
void set_input(CalibrationMapArgs<Scalar>& args, const Tensor& input, const Options& options) {
  args.classes = options.kind == kBinary ? 1 : input.size(-1);
  args.rows = input.numel() / args.classes;
  args.input = static_cast<const Scalar*>(input.const_data_ptr());
  args.input_is_probs = options.kind == kProbs;
  args.log_output = options.log_output;
}

// Calls launch with the forward struct of the scalar type.
template <typename Number, typename Launch>
void launch_forward(const Tensor& input, const Number& gamma, const Number& temperature, const Options& options,
                    const Tensor& output, Launch launch) {
  const Parameter gamma_parameter = prepare_parameter(gamma, input, options.kind);
  const Parameter temperature_parameter = prepare_parameter(temperature, input, options.kind);
  dispatch_scalar(input.scalar_type(), [&](auto scalar) {
    using Scalar = decltype(scalar);
    CalibrationMapForward<Scalar> args{};
    set_input(args, input, options);
    set_parameters(args, gamma_parameter, temperature_parameter);
    if (output.element_size() == sizeof(Scalar)) {
      args.output = static_cast<Scalar*>(output.mutable_data_ptr());
    } else {
      args.output_wide = static_cast<compute_t<Scalar>*>(output.mutable_data_ptr());
    }
    launch(args);
  });
}

struct Gradients {
  Tensor input, gamma, temperature;
};

double* data_or_null(const Tensor& tensor) {
  return tensor.defined() ? static_cast<double*>(tensor.mutable_data_ptr()) : nullptr;
}

// Gradients as the kernels write them: those of the parameters per row, in double.
template <typename Launch>
Gradients launch_backward(const Tensor& grad, const Tensor& input, const Tensor& gamma, const Tensor& temperature,
                          const Options& options, std::array<bool, 3> needed, Launch launch) {
  const Parameter gamma_parameter = prepare_parameter(gamma, input, options.kind);
  const Parameter temperature_parameter = prepare_parameter(temperature, input, options.kind);
  const auto shape = leading_shape(input, options.kind);
  const auto rows = C10_AS_INTARRAYREF_SLOW(shape);
  Gradients grads;
  if (needed[0]) grads.input = empty_result_like(input, input.scalar_type());
  if (needed[1]) grads.gamma = at::empty(rows, input.options().dtype(at::kDouble));
  if (needed[2]) grads.temperature = at::empty(rows, input.options().dtype(at::kDouble));
  dispatch_scalar(input.scalar_type(), [&](auto scalar) {
    using Scalar = decltype(scalar);
    using Real = compute_t<Scalar>;
    const bool narrow = grad.scalar_type() == input.scalar_type();
    const Tensor upstream = (narrow ? grad : grad.to(compute_dtype(input.scalar_type()))).contiguous();
    CalibrationMapBackward<Scalar> args{};
    set_input(args, input, options);
    set_parameters(args, gamma_parameter, temperature_parameter);
    if (narrow) {
      args.grad_output = static_cast<const Scalar*>(upstream.const_data_ptr());
    } else {
      args.grad_output_wide = static_cast<const Real*>(upstream.const_data_ptr());
    }
    if (needed[0]) args.grad_input = static_cast<Scalar*>(grads.input.mutable_data_ptr());
    args.grad_gamma = data_or_null(grads.gamma);
    args.grad_temperature = data_or_null(grads.temperature);
    launch(args);
  });
  return grads;
}

// The gradient of a parameter: the rows' gradients summed over the broadcast dimensions. That of a number on the CPU
// stays on the device of the rows; autograd moves it.
Tensor reduce_to(const Tensor& rows, const Tensor& parameter) {
  if (parameter.numel() != 1 || !rows.device().is_cpu()) {
    return at::sum_to(rows, parameter.sym_sizes()).to(parameter.scalar_type());
  }
  // Added in order: the result of torch's sum would depend on the number of threads.
  const double* values = static_cast<const double*>(rows.const_data_ptr());
  const int64_t n = rows.numel();
  double sum = 0;
  for (int64_t i = 0; i < n; ++i) sum += values[i];
  return at::full_symint(parameter.sym_sizes(), sum, parameter.options());
}

std::tuple<Tensor, Tensor, Tensor> finish(const Gradients& grads, const Tensor& input, const Tensor& gamma,
                                          const Tensor& temperature) {
  const auto of = [&](const Tensor& rows, const Tensor& parameter) {
    return rows.defined() ? reduce_to(rows, parameter) : at::empty({0}, parameter.options().device(input.device()));
  };
  return {grads.input.defined() ? grads.input : at::empty({0}, input.options()), of(grads.gamma, gamma),
          of(grads.temperature, temperature)};
}

void check_gradient(const Tensor& grad, const Tensor& input, int64_t kind) {
  TORCH_CHECK_VALUE(grad.sym_sizes() == input.sym_sizes() && grad.is_floating_point(), op_name(kind),
                    ": grad must have the shape of the output, ", input.sym_sizes(), ", got ", grad.sym_sizes());
  check_same_device(op_name(kind), "grad", grad, input);
}

}  // namespace
}  // namespace focalkern::bindings
