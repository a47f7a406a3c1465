// Arguments of the spline map: checks, errors of rows, and the step from tensors to kernel arguments.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/mm.h>
#include <c10/util/Exception.h>

#include <cmath>
#include <limits>

#include "bindings/common.h"
#include "bindings/spline.h"

namespace focalkern::bindings {
namespace {

constexpr const char* kOp = "spline_calibration_map";
constexpr double kInfinity = std::numeric_limits<double>::infinity();

void check_arguments(const Tensor& input, const Tensor& parameters, const Tensor& knots, const Tensor& coefficients,
                     const OptionalTensor& weight, const OptionalTensor& bias) {
  check_floating(kOp, "input", input);
  TORCH_CHECK_VALUE(input.dim() >= 1 && input.sym_size(-1) >= 2, kOp,
                    ": input must be [..., C] with C >= 2, got shape ", input.sym_sizes());
  // The parameters of a calibrator's module are on the device of its input.
  const auto is_wide = [&](const Tensor& tensor) {
    return tensor.scalar_type() == at::kDouble && (tensor.device().is_cpu() || tensor.device() == input.device());
  };
  TORCH_CHECK_VALUE(is_wide(parameters) && parameters.device().is_cpu() && parameters.numel() == 3, kOp,
                    ": parameters must be [3] float64 on the CPU, got ", parameters.sym_sizes());
  TORCH_CHECK_VALUE(
      is_wide(knots) && knots.dim() == 1 && knots.sym_size(0) >= 2 && knots.sym_size(0) <= kSplineMaxKnots, kOp,
      ": knots must be [m] float64 with m from 2 to ", kSplineMaxKnots, ", got shape ", knots.sym_sizes());
  TORCH_CHECK_VALUE(is_wide(coefficients) && coefficients.dim() == 2 &&
                        coefficients.sym_size(0) == knots.sym_size(0) + 1 && coefficients.sym_size(1) == 4,
                    kOp, ": coefficients must be [m + 1, 4] float64, got shape ", coefficients.sym_sizes());
  for (const auto* tensor : {&weight, &bias}) {
    if (!*tensor) continue;
    const auto sizes = (*tensor)->sym_sizes();
    bool fits = is_wide(**tensor) && !sizes.empty() && sizes.size() <= (tensor == &weight ? 2 : 1);
    for (const auto& size : sizes) fits &= size == input.sym_size(-1);
    TORCH_CHECK_VALUE(fits, kOp, ": weight must be [C] or [C, C] and bias [C], in float64, got ", sizes);
  }
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

at::ScalarType output_dtype(const Tensor& input, bool wide) {
  return wide ? compute_dtype(input.scalar_type()) : input.scalar_type();
}

// The arguments of the kernels, with the tensors whose memory they point to.
struct Prepared {
  Prepared(const Tensor& input, const Tensor& parameters, const Tensor& knots, const Tensor& coefficients,
           const OptionalTensor& weight, const OptionalTensor& bias, bool is_probs, bool keep_zeros)
      : input(input.contiguous()), knots(on_device(knots)), coefficients(on_device(coefficients)) {
    const Tensor numbers = parameters.contiguous();
    const double* values = numbers.const_data_ptr<double>();
    rows = spline_input(this->input, values[1], values[2], is_probs);
    curve = {this->knots.size(0), this->knots.const_data_ptr<double>(), this->coefficients.const_data_ptr<double>()};
    if (weight) this->weight = on_device(*weight);
    if (bias) this->bias = on_device(*bias);
    is_matrix = weight && weight->dim() == 2;
    scores = {values[0], is_matrix ? nullptr : pointer_or_null<double>(this->weight),
              pointer_or_null<double>(this->bias), nullptr, keep_zeros};
  }

  Tensor on_device(const Tensor& tensor) const { return tensor.to(input.device()).contiguous(); }

  // W x of the rows x.
  Tensor matrix_scores(const Tensor& x) const { return at::mm(x, weight->t()); }

  Tensor input, knots, coefficients;
  OptionalTensor weight, bias;
  bool is_matrix;
  SplineInput rows;
  SplineCurve curve;
  SplineScores scores;
};

}  // namespace
}  // namespace focalkern::bindings
