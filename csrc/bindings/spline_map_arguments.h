// Arguments of the spline map: checks, errors of rows, and the step from tensors to kernel arguments.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/Exception.h>

#include <cmath>
#include <limits>

#include "bindings/interface.h"
#include "bindings/spline_map_run.h"

namespace focalkern::bindings {
namespace {

constexpr const char* kOp = "spline_calibration_map";
constexpr double kInfinity = std::numeric_limits<double>::infinity();

void check_arguments(const Tensor& input, const Tensor& parameters, const Tensor& knots, const Tensor& coefficients,
                     const OptionalTensor& weight, const OptionalTensor& bias) {
  check_dense(kOp, "input", input);
  check_floating(kOp, "input", input);
  TORCH_CHECK_VALUE(input.dim() >= 1 && input.sym_size(-1) >= 2, kOp,
                    ": input must be [..., C] with C >= 2, got shape ", input.sym_sizes());
  // The parameters of a calibrator's module are on the device of its input; all tensors of a fake call are on `meta`.
  const auto check = [&](const char* name, const char* expected, const Tensor& tensor, bool fits) {
    check_dense(kOp, name, tensor);
    const auto device = tensor.device();
    fits &= tensor.scalar_type() == at::kDouble && (device.is_cpu() || device == input.device());
    TORCH_CHECK_VALUE(fits, kOp, ": ", name, " must be ", expected, ", got ", tensor.sym_sizes(), " ",
                      dtype_name(tensor.scalar_type()), " on ", device);
  };
  const auto is_of_classes = [&](const Tensor& tensor, int64_t most_dims) {
    bool fits = tensor.dim() >= 1 && tensor.dim() <= most_dims;
    for (const auto& size : tensor.sym_sizes()) fits &= size == input.sym_size(-1);
    return fits;
  };
  check("parameters", "[3] float64 on the CPU", parameters,
        parameters.sym_numel() == 3 && (parameters.device().is_cpu() || parameters.is_meta()));
  static_assert(kSplineMaxKnots == 255);
  check("knots", "[m] float64, m from 2 to 255, on the CPU or with the input", knots,
        knots.dim() == 1 && knots.sym_size(0) >= 2 && knots.sym_size(0) <= kSplineMaxKnots);
  check("coefficients", "[m + 1, 4] float64 on the CPU or with the input", coefficients,
        coefficients.dim() == 2 && coefficients.sym_size(0) == knots.sym_size(0) + 1 && coefficients.sym_size(1) == 4);
  if (weight) check("weight", "[C] or [C, C] float64 on the CPU or with the input", *weight, is_of_classes(*weight, 2));
  if (bias) check("bias", "[C] float64 on the CPU or with the input", *bias, is_of_classes(*bias, 1));
}

// Raises the error of an invalid row. Only called if there is one.
[[noreturn]] void raise_invalid_row(const Tensor& input, bool is_probs, int64_t row) {
  const Tensor values = input.reshape({-1, input.size(-1)})[row].to(at::kDouble).contiguous();
  const double* x = values.const_data_ptr<double>();
  double sum = 0;
  for (int64_t c = 0; c < values.numel(); ++c) {
    TORCH_CHECK_VALUE(!std::isnan(x[c]), kOp, ": input must not be NaN, got NaN at row ", row, ", class ", c);
    TORCH_CHECK_VALUE(x[c] != kInfinity, kOp, ": input must not be +inf, got inf at row ", row, ", class ", c);
    TORCH_CHECK_VALUE(!is_probs || x[c] >= 0, kOp, ": input must be probabilities, got ", x[c], " at row ", row,
                      ", class ", c);
    sum += x[c];
  }
  TORCH_CHECK_VALUE(!is_probs, kOp, ": input must be probabilities that sum to 1 within ",
                    sum_tolerance(input.scalar_type()), ", got a sum of ", sum, " at row ", row);
  TORCH_CHECK_VALUE(false, kOp, ": input must have a logit above -inf in every row, got none at row ", row);
}

// The arguments of the kernels.
SplineMapRun<Interface> prepared(const Tensor& input, const Tensor& parameters, const Tensor& knots,
                                 const Tensor& coefficients, const OptionalTensor& weight, const OptionalTensor& bias,
                                 bool is_probs, bool keep_zeros) {
  const auto on_device = [&](const Tensor& tensor) { return tensor.to(input.device()).contiguous(); };
  const auto given = [&](const OptionalTensor& tensor) {
    return tensor ? OptionalTensor(on_device(*tensor)) : std::nullopt;
  };
  return {input.contiguous(), parameters.contiguous(),
          on_device(knots),   on_device(coefficients),
          given(weight),      given(bias),
          is_probs,           keep_zeros};
}

}  // namespace
}  // namespace focalkern::bindings
