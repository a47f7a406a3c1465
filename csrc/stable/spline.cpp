// Spline scaling: from checked tensors to the kernels of csrc/cpu and csrc/cuda.
//
//   spline_map_forward_out   fills output; returns the first row without an answer, or -1 (always -1 on CUDA)
//   spline_map_backward_out  fills grad_input; returns the gradients of the parameters, on the CPU
//   spline_*_sums_out        fill the sums of the fit; the sum of the loss is returned
//
// All tensors are contiguous, and all but input and target in float64. Parameters, basis and gradients in the curve lie
// on the CPU, everything else with the input.

#include <tuple>

#include "bindings/spline_fit_run.h"
#include "bindings/spline_map_run.h"
#include "stable/interface.h"

namespace focalkern::stable {
namespace {

using Map = bindings::SplineMapRun<Interface>;
using Rows = bindings::SplineFitRows<Interface>;
using Fit = bindings::SplineFitRun<Interface>;

int64_t map_forward(const Tensor& input, const Tensor& parameters, const Tensor& knots, const Tensor& coefficients,
                    const OptionalTensor& weight, const OptionalTensor& bias, const Tensor& output, bool is_probs,
                    bool keep_zeros, bool keep_order, bool log_output) {
  const Map map(input, parameters, knots, coefficients, weight, bias, is_probs, keep_zeros);
  return map.forward(output, log_output, keep_order);
}

Map::Gradients map_backward(const Tensor& grad, const Tensor& input, const Tensor& parameters, const Tensor& knots,
                            const Tensor& coefficients, const OptionalTensor& weight, const OptionalTensor& bias,
                            const OptionalTensor& grad_input, bool is_probs, bool keep_zeros, bool log_output) {
  const Map map(input, parameters, knots, coefficients, weight, bias, is_probs, keep_zeros);
  return map.backward(grad, grad_input, log_output);
}

double curve_sums(const Tensor& input, const Tensor& target, const Tensor& weight, const Tensor& knots,
                  const Tensor& coefficients, const Tensor& basis, const OptionalTensor& of_x,
                  const OptionalTensor& bias, const OptionalTensor& extra, const Tensor& gradient,
                  const Tensor& hessian, double temperature, double floor, double slope, bool is_probs,
                  bool keep_zeros) {
  const Rows rows(input, target, weight, temperature, floor, is_probs);
  return Fit(rows, knots, coefficients, basis, slope, of_x, bias, extra, keep_zeros).curve_sums(gradient, hessian);
}

void row_losses(const Tensor& input, const Tensor& target, const Tensor& weight, const Tensor& knots,
                const Tensor& coefficients, const Tensor& basis, const OptionalTensor& of_x, const OptionalTensor& bias,
                const OptionalTensor& extra, const Tensor& losses, double temperature, double floor, double slope,
                bool is_probs, bool keep_zeros) {
  const Rows rows(input, target, weight, temperature, floor, is_probs);
  Fit(rows, knots, coefficients, basis, slope, of_x, bias, extra, keep_zeros).row_losses(losses);
}

void matrix_hessian(const Tensor& input, const Tensor& target, const Tensor& weight, const Tensor& knots,
                    const Tensor& coefficients, const Tensor& basis, const OptionalTensor& of_x,
                    const OptionalTensor& bias, const OptionalTensor& extra, const Tensor& hessian, double temperature,
                    double floor, double slope, bool is_probs, bool keep_zeros) {
  const Rows rows(input, target, weight, temperature, floor, is_probs);
  Fit(rows, knots, coefficients, basis, slope, of_x, bias, extra, keep_zeros).matrix_hessian(hessian);
}

double linear_sums(const Tensor& input, const Tensor& target, const Tensor& weight, const Tensor& knots,
                   const Tensor& coefficients, const Tensor& basis, const OptionalTensor& of_x,
                   const OptionalTensor& bias, const OptionalTensor& extra, const Tensor& gradient,
                   const Tensor& of_weight, const Tensor& of_bias, const OptionalTensor& slopes, double temperature,
                   double floor, double slope, bool is_probs, bool keep_zeros) {
  const Rows rows(input, target, weight, temperature, floor, is_probs);
  const Fit fit(rows, knots, coefficients, basis, slope, of_x, bias, extra, keep_zeros);
  return fit.linear_sums(gradient, of_weight, of_bias, slopes);
}

void temperature_sums(const Tensor& input, const Tensor& target, const Tensor& weight, const Tensor& betas,
                      const Tensor& result, double floor, bool is_probs) {
  Rows(input, target, weight, /*temperature=*/1, floor, is_probs).temperature_sums(betas, result);
}

void histogram(const Tensor& input, const Tensor& weight, const Tensor& result, double temperature, double floor,
               bool is_probs) {
  Rows(input, std::nullopt, weight, temperature, floor, is_probs).histogram(result);
}

double spread(const Tensor& input, const Tensor& weight, double scale, double lowest, bool is_probs) {
  return Rows(input, std::nullopt, weight, /*temperature=*/1, /*floor=*/0.5, is_probs).spread(scale, lowest);
}

void log_probs(const Tensor& input, const Tensor& output, double temperature, double floor, bool is_probs) {
  Rows(input, std::nullopt, std::nullopt, temperature, floor, is_probs).log_probs(output);
}

void features(const Tensor& input, const Tensor& output, double temperature, double floor, bool is_probs) {
  Rows(input, std::nullopt, std::nullopt, temperature, floor, is_probs).features(output);
}

FK_KERNELS_FRAGMENT(m) {
  m.def(
      "spline_map_forward_out(Tensor input, Tensor parameters, Tensor knots, Tensor coefficients, Tensor? weight, "
      "Tensor? bias, Tensor(a!) output, bool is_probs, bool keep_zeros, bool keep_order, bool log_output) -> int");
  m.def(
      "spline_map_backward_out(Tensor grad, Tensor input, Tensor parameters, Tensor knots, Tensor coefficients, "
      "Tensor? weight, Tensor? bias, Tensor(a!)? grad_input, bool is_probs, bool keep_zeros, bool log_output) -> "
      "(Tensor, Tensor, Tensor, Tensor, Tensor)");
  m.def(
      "spline_curve_sums_out(Tensor input, Tensor target, Tensor weight, Tensor knots, Tensor coefficients, Tensor "
      "basis, Tensor? of_x, Tensor? bias, Tensor? extra, Tensor(a!) gradient, Tensor(b!) hessian, float temperature, "
      "float floor, float slope, bool is_probs, bool keep_zeros) -> float");
  m.def(
      "spline_row_losses_out(Tensor input, Tensor target, Tensor weight, Tensor knots, Tensor coefficients, Tensor "
      "basis, Tensor? of_x, Tensor? bias, Tensor? extra, Tensor(a!) losses, float temperature, float floor, float "
      "slope, bool is_probs, bool keep_zeros) -> ()");
  m.def(
      "spline_matrix_hessian_out(Tensor input, Tensor target, Tensor weight, Tensor knots, Tensor coefficients, Tensor "
      "basis, Tensor? of_x, Tensor? bias, Tensor? extra, Tensor(a!) hessian, float temperature, float floor, float "
      "slope, bool is_probs, bool keep_zeros) -> ()");
  m.def(
      "spline_linear_sums_out(Tensor input, Tensor target, Tensor weight, Tensor knots, Tensor coefficients, Tensor "
      "basis, Tensor? of_x, Tensor? bias, Tensor? extra, Tensor(a!) gradient, Tensor(b!) of_weight, Tensor(c!) "
      "of_bias, Tensor(d!)? slopes, float temperature, float floor, float slope, bool is_probs, bool keep_zeros) -> "
      "float");
  m.def(
      "spline_temperature_sums_out(Tensor input, Tensor target, Tensor weight, Tensor betas, Tensor(a!) result, float "
      "floor, bool is_probs) -> ()");
  m.def(
      "spline_histogram_out(Tensor input, Tensor weight, Tensor(a!) result, float temperature, float floor, bool "
      "is_probs) -> ()");
  m.def("spline_spread(Tensor input, Tensor weight, float scale, float lowest, bool is_probs) -> float");
  m.def("spline_log_probs_out(Tensor input, Tensor(a!) output, float temperature, float floor, bool is_probs) -> ()");
  m.def("spline_features_out(Tensor input, Tensor(a!) output, float temperature, float floor, bool is_probs) -> ()");
}

void implement(torch::stable::detail::StableLibrary& m) {
  m.impl("spline_map_forward_out", TORCH_BOX(&map_forward));
  m.impl("spline_map_backward_out", TORCH_BOX(&map_backward));
  m.impl("spline_curve_sums_out", TORCH_BOX(&curve_sums));
  m.impl("spline_linear_sums_out", TORCH_BOX(&linear_sums));
  m.impl("spline_temperature_sums_out", TORCH_BOX(&temperature_sums));
  m.impl("spline_log_probs_out", TORCH_BOX(&log_probs));
}

FK_KERNELS_IMPL_ALL(implement)
FK_KERNELS_IMPL(CPU, m) {
  m.impl("spline_row_losses_out", TORCH_BOX(&row_losses));
  m.impl("spline_matrix_hessian_out", TORCH_BOX(&matrix_hessian));
  m.impl("spline_histogram_out", TORCH_BOX(&histogram));
  m.impl("spline_spread", TORCH_BOX(&spread));
  m.impl("spline_features_out", TORCH_BOX(&features));
}

}  // namespace
}  // namespace focalkern::stable
