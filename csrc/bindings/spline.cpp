// Sums for the fit of spline scaling: checks of a calibrator's rows, conversions.
//
// Without autograd. Parameters are on the host, in float64. Tensors with an entry per row are on the device of the
// input, CPU or CUDA.

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <c10/util/Exception.h>

#include <numeric>
#include <tuple>

#include "bindings/interface.h"
#include "bindings/spline_fit_run.h"

namespace focalkern::bindings {
namespace {

Tensor wide(const Tensor& tensor) { return tensor.to(at::kDouble).contiguous(); }
Tensor wide(const Tensor& tensor, const at::Device& device) { return tensor.to(device, at::kDouble).contiguous(); }

using Rows = SplineFitRows<Interface>;

void check_input(const char* op, const Tensor& input) {
  check_floating(op, "input", input);
  check_device(op, input);
  TORCH_CHECK_NOT_IMPLEMENTED(!input.is_meta(), op, ": input must have values, on a CPU or CUDA device, got ",
                              input.device());
  TORCH_CHECK_VALUE(input.dim() == 2 && input.size(1) >= 2, op, ": input must be [N, C] with C >= 2, got ",
                    input.sizes());
}

Rows rows_of(const char* op, const Tensor& input, const OptionalTensor& target, const Tensor& weight,
             double temperature, double floor, bool is_probs, bool of_curve = false) {
  const bool features = of_curve && input.dim() == 3;
  if (features) {
    TORCH_CHECK_VALUE(input.is_cpu() && input.scalar_type() == at::kDouble && input.size(0) == 2 && input.size(2) >= 2,
                      op, ": features must be [2, N, C] float64 on the CPU with C >= 2, got ", input.sizes(), " ",
                      dtype_name(input.scalar_type()), " on ", input.device());
  } else {
    check_input(op, input);
  }
  const int64_t n_rows = input.size(-2), classes = input.size(-1);
  check_same_device(op, "weight", weight, input);
  TORCH_CHECK_VALUE(weight.dim() == 1 && weight.size(0) == n_rows, op, ": weight must be [N] = [", n_rows, "], got ",
                    weight.sizes());
  if (target) {
    check_same_device(op, "target", *target, input);
    TORCH_CHECK_VALUE(target->scalar_type() == at::kLong && target->dim() == 1 && target->size(0) == n_rows, op,
                      ": target must be [N] = [", n_rows, "] int64, got ", target->sizes(), " ",
                      dtype_name(target->scalar_type()));
    const Tensor labels = target->contiguous();
    // On CUDA this check would wait for the device; a kernel treats such a label as no class.
    for (int64_t i = 0; input.is_cpu() && i < n_rows; ++i) {
      const int64_t label = labels.const_data_ptr<int64_t>()[i];
      TORCH_CHECK_INDEX(label >= 0 && label < classes, op, ": target must be from 0 to ", classes - 1, ", got ", label,
                        " at row ", i);
    }
  }
  return {input.contiguous(),
          target ? OptionalTensor(target->contiguous()) : std::nullopt,
          wide(weight),
          temperature,
          floor,
          is_probs};
}

SplineFitRun<Interface> fit_of(const char* op, const Rows& of, const Tensor& knots, const Tensor& basis, double slope,
                               const Tensor& values, const OptionalTensor& of_x, const OptionalTensor& bias,
                               const OptionalTensor& extra, bool keep_zeros) {
  const int64_t m = knots.numel();
  TORCH_CHECK_VALUE(knots.dim() == 1 && m >= 2 && m <= kSplineMaxFitKnots, op, ": knots must be [m] with m from 2 to ",
                    kSplineMaxFitKnots, ", got ", knots.sizes());
  TORCH_CHECK_VALUE(basis.dim() == 3 && basis.size(0) == m + 1 && basis.size(1) == 4 && basis.size(2) == m, op,
                    ": basis must be [m + 1, 4, m], got ", basis.sizes());
  TORCH_CHECK_VALUE(values.dim() == 1 && values.numel() == m, op, ": values must be [m] = [", m, "], got ",
                    values.sizes());
  const auto device = of.input.device();
  const int64_t classes = of.rows.classes;
  const bool matrix = of_x && of_x->dim() == 2;
  const bool few = of.rows.storage == SplineStorage::kFeatures && classes <= cpu::kSplineFewClasses;
  TORCH_CHECK_VALUE(!matrix || (few && of_x->size(0) == classes), op,
                    ": of_x must be [C], or [C, C] for features of at most ", cpu::kSplineFewClasses, " classes, got ",
                    of_x->sizes(), " for C = ", classes);
  const auto with_rows = [&](const OptionalTensor& tensor, int64_t numbers) {
    TORCH_CHECK_VALUE(!tensor || tensor->numel() == numbers, op,
                      ": vectors must be [C], matrices [C, C] and extra scores [N, C], got ", tensor->sizes());
    return tensor ? OptionalTensor(wide(*tensor, device)) : std::nullopt;
  };
  const Tensor terms = wide(basis), heights = wide(values), coefficients = at::empty({m + 1, 4}, at::kDouble);
  for (int64_t i = 0; i < 4 * (m + 1); ++i) {  // torch's product takes longer for so few numbers
    const double* row = terms.const_data_ptr<double>() + i * m;
    doubles_of(coefficients)[i] = std::inner_product(row, row + m, heights.const_data_ptr<double>(), 0.0);
  }
  return {of,
          wide(knots, device),
          wide(coefficients, device),
          terms,
          slope,
          with_rows(of_x, matrix ? classes * classes : classes),
          with_rows(bias, classes),
          with_rows(extra, of.rows.rows * classes),
          keep_zeros};
}

void check_on_cpu(const char* op, const Tensor& input) {
  TORCH_CHECK_VALUE(input.is_cpu(), op, ": input must be on the CPU, got ", input.device());
}

// (value, gradient [m + 1], Hessian [m + 1, m + 1]) of the sum of weight * -log p_target in (a, f). The input is
// logits or probabilities [N, C], or the result of `features`.
std::tuple<double, Tensor, Tensor> curve_sums(const Tensor& input, const Tensor& target, const Tensor& weight,
                                              double temperature, double floor, const Tensor& knots,
                                              const Tensor& basis, double slope, const Tensor& values,
                                              const OptionalTensor& of_x, const OptionalTensor& bias,
                                              const OptionalTensor& extra, bool is_probs, bool keep_zeros) {
  const char* op = "spline_curve_sums";
  const auto fit = fit_of(op, rows_of(op, input, target, weight, temperature, floor, is_probs, /*of_curve=*/true),
                          knots, basis, slope, values, of_x, bias, extra, keep_zeros);
  const int64_t n = knots.numel() + 1;
  const Tensor gradient = at::empty({n}, at::kDouble), hessian = at::empty({n, n}, at::kDouble);
  const double value = fit.curve_sums(gradient, hessian);
  return {value, gradient, hessian};
}

// [2, N]: the loss -log p_target and the Brier score of each row, without its weight.
Tensor row_losses(const Tensor& input, const Tensor& target, const Tensor& weight, double temperature, double floor,
                  const Tensor& knots, const Tensor& basis, double slope, const Tensor& values,
                  const OptionalTensor& of_x, const OptionalTensor& bias, const OptionalTensor& extra, bool is_probs,
                  bool keep_zeros) {
  const char* op = "spline_row_losses";
  check_on_cpu(op, input);
  const auto fit = fit_of(op, rows_of(op, input, target, weight, temperature, floor, is_probs, /*of_curve=*/true),
                          knots, basis, slope, values, of_x, bias, extra, keep_zeros);
  const Tensor losses = at::empty({2, input.size(-2)}, at::kDouble);
  fit.row_losses(losses);
  return losses;
}

// [P, P] in (a, f) [m + 1], the rows of D [C, C] and b [C]; 0 in the block of (a, f). For at most kSplineFewClasses
// classes.
Tensor matrix_hessian(const Tensor& input, const Tensor& target, const Tensor& weight, double temperature, double floor,
                      const Tensor& knots, const Tensor& basis, double slope, const Tensor& values,
                      const OptionalTensor& of_x, const OptionalTensor& bias, const OptionalTensor& extra,
                      bool is_probs, bool keep_zeros) {
  const char* op = "spline_matrix_hessian";
  check_on_cpu(op, input);
  const auto fit = fit_of(op, rows_of(op, input, target, weight, temperature, floor, is_probs, /*of_curve=*/true),
                          knots, basis, slope, values, of_x, bias, extra, keep_zeros);
  const int64_t classes = input.size(-1);
  TORCH_CHECK_VALUE(classes <= cpu::kSplineFewClasses, op, ": input must have at most ", cpu::kSplineFewClasses,
                    " classes, got ", classes);
  const int64_t n = knots.numel() + 1 + classes * (classes + 1);
  const Tensor hessian = at::empty({n, n}, at::kDouble);
  fit.matrix_hessian(hessian);
  return hessian;
}

// (value, gradient in (a, f) [m + 1], in of_x [C] or [C, C], in b [C], dL/dscore [N, C] if wanted).
std::tuple<double, Tensor, Tensor, Tensor, OptionalTensor> linear_sums(
    const Tensor& input, const Tensor& target, const Tensor& weight, double temperature, double floor,
    const Tensor& knots, const Tensor& basis, double slope, const Tensor& values, const OptionalTensor& of_x,
    const OptionalTensor& bias, const OptionalTensor& extra, bool is_probs, bool keep_zeros, bool want_slopes) {
  const char* op = "spline_linear_sums";
  const auto fit = fit_of(op, rows_of(op, input, target, weight, temperature, floor, is_probs, /*of_curve=*/true),
                          knots, basis, slope, values, of_x, bias, extra, keep_zeros);
  OptionalTensor slopes;
  if (want_slopes) slopes = Interface::empty_doubles(input, {input.size(-2), input.size(-1)});
  const Tensor gradient = at::empty({knots.numel() + 1}, at::kDouble);
  const Tensor of_bias = Interface::empty_doubles(input, {input.size(-1)});
  const bool matrix = of_x && of_x->dim() == 2;
  const Tensor of_weight = matrix ? Interface::empty_doubles(input, of_x->sizes()) : at::empty_like(of_bias);
  const double value = fit.linear_sums(gradient, of_weight, of_bias, slopes);
  return {value, gradient, of_weight, of_bias, slopes};
}

// [2, B]: the sum of -w log((1 - e) softmax(z beta)_target + e / C) for each beta, and its slope in beta.
Tensor temperature_sums(const Tensor& input, const Tensor& target, const Tensor& weight, const Tensor& betas,
                        double floor, bool is_probs) {
  const Rows of = rows_of("spline_temperature_sums", input, target, weight, 1.0, floor, is_probs);
  const Tensor result = at::empty({2, betas.numel()}, at::kDouble);
  of.temperature_sums(wide(betas, input.device()), result);
  return result;
}

// [7680]: the weights w P (1 - P) of the log-odds u in bins of 1/64 from -60 to 60.
Tensor histogram(const Tensor& input, const Tensor& weight, double temperature, double floor, bool is_probs) {
  check_on_cpu("spline_histogram", input);
  const Tensor result = at::empty({cpu::kSplineBins}, at::kDouble);
  rows_of("spline_histogram", input, std::nullopt, weight, temperature, floor, is_probs).histogram(result);
  return result;
}

// The sum over rows of w times the variance of z / scale. Each z / scale is raised to at least its row's maximum -
// lowest.
double spread(const Tensor& input, const Tensor& weight, double scale, double lowest, bool is_probs) {
  check_on_cpu("spline_spread", input);
  return rows_of("spline_spread", input, std::nullopt, weight, 1.0, 0.5, is_probs).spread(scale, lowest);
}

// x [N, C] float64.
Tensor log_probs(const Tensor& input, double temperature, double floor, bool is_probs) {
  check_input("spline_log_probs", input);
  const Rows of(input.contiguous(), std::nullopt, std::nullopt, temperature, floor, is_probs);
  const Tensor output = empty_result_like(of.input, at::kDouble);
  of.log_probs(output);
  return output;
}

// [2, N, C] float64: x and u.
Tensor features(const Tensor& input, double temperature, double floor, bool is_probs) {
  check_input("spline_features", input);
  check_on_cpu("spline_features", input);
  const Rows of(input.contiguous(), std::nullopt, std::nullopt, temperature, floor, is_probs);
  const Tensor output = at::empty({2, input.size(0), input.size(1)}, at::kDouble);
  of.features(output);
  return output;
}

}  // namespace

void register_spline(pybind11::module_& module) {
  using release = pybind11::call_guard<pybind11::gil_scoped_release>;
  module.def("spline_curve_sums", &curve_sums, release());
  module.def("spline_row_losses", &row_losses, release());
  module.def("spline_matrix_hessian", &matrix_hessian, release());
  module.def("spline_linear_sums", &linear_sums, release());
  module.def("spline_temperature_sums", &temperature_sums, release());
  module.def("spline_histogram", &histogram, release());
  module.def("spline_spread", &spread, release());
  module.def("spline_log_probs", &log_probs, release());
  module.def("spline_features", &features, release());
}

}  // namespace focalkern::bindings
