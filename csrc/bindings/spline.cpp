// Sums for the fit of spline scaling: tensors of a calibrator's rows to kernel arguments, chunks added up in order.
//
// Not for autograd: a calibrator calls them with rows that it has checked. Parameters lie on the host in float64.

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <c10/util/Exception.h>

#include <tuple>
#include <vector>

#include "bindings/common.h"
#include "bindings/spline.h"

namespace focalkern::bindings {
namespace {

Tensor wide(const Tensor& tensor) { return tensor.to(at::kDouble).contiguous(); }

// Rows of a calibrator with what their tensors hold.
struct Rows {
  Rows(const char* op, const Tensor& input, const OptionalTensor& target, const Tensor& weight, double temperature,
       double floor, bool is_probs)
      : input(input.contiguous()), weight(wide(weight)) {
    check_floating(op, "input", input);
    TORCH_CHECK_VALUE(input.is_cpu() && input.dim() == 2 && input.size(1) >= 2, op,
                      ": input must be [N, C] on the CPU with C >= 2, got ", input.sizes());
    rows = spline_input(this->input, temperature, floor, is_probs);
    TORCH_CHECK_VALUE(weight.is_cpu() && weight.dim() == 1 && weight.size(0) == rows.rows, op,
                      ": weight must be [N] = [", rows.rows, "] on the CPU, got ", weight.sizes());
    if (target) {
      this->target = target->contiguous();
      TORCH_CHECK_VALUE(
          target->is_cpu() && target->scalar_type() == at::kLong && target->dim() == 1 && target->size(0) == rows.rows,
          op, ": target must be [N] = [", rows.rows, "] int64 on the CPU, got ", target->sizes());
      const int64_t* labels = this->target.const_data_ptr<int64_t>();
      for (int64_t i = 0; i < rows.rows; ++i) {
        TORCH_CHECK_INDEX(labels[i] >= 0 && labels[i] < rows.classes, op, ": target must be from 0 to ",
                          rows.classes - 1, ", got ", labels[i], " at row ", i);
      }
      targets = {labels, this->weight.const_data_ptr<double>()};
    }
  }
  Tensor input, target, weight;
  cpu::SplineInput rows;
  cpu::SplineTargets targets{};
};

// A curve with what its tensors hold; basis [m + 1, 4, m].
struct Curve {
  Curve(const char* op, const Tensor& knots, const Tensor& basis, const Tensor& values)
      : knots(wide(knots)), basis(wide(basis)) {
    const int64_t m = knots.numel();
    TORCH_CHECK_VALUE(knots.dim() == 1 && m >= 2 && m <= cpu::kSplineMaxFitKnots, op,
                      ": knots must be [m] with m from 2 to ", cpu::kSplineMaxFitKnots, ", got ", knots.sizes());
    TORCH_CHECK_VALUE(basis.dim() == 3 && basis.size(0) == m + 1 && basis.size(1) == 4 && basis.size(2) == m, op,
                      ": basis must be [m + 1, 4, m], got ", basis.sizes());
    TORCH_CHECK_VALUE(values.dim() == 1 && values.numel() == m, op, ": values must be [m] = [", m, "], got ",
                      values.sizes());
    coefficients = this->basis.matmul(wide(values)).contiguous();
    curve = {m, this->knots.const_data_ptr<double>(), coefficients.const_data_ptr<double>()};
  }
  Tensor knots, basis, coefficients;
  cpu::SplineCurve curve;
};

double* data_of(const Tensor& tensor) { return tensor.mutable_data_ptr<double>(); }

// Scores with what their tensors hold; each may be missing.
struct Scores {
  Scores(const char* op, const cpu::SplineInput& rows, double slope, const OptionalTensor& of_x,
         const OptionalTensor& bias, const OptionalTensor& extra, bool keep_zeros) {
    const OptionalTensor* given[3] = {&of_x, &bias, &extra};
    for (int i = 0; i < 3; ++i) {
      if (!*given[i]) continue;
      held[i] = wide(**given[i]);
      TORCH_CHECK_VALUE(held[i]->numel() == (i < 2 ? 1 : rows.rows) * rows.classes, op,
                        ": vectors must be [C] and extra scores [N, C], got ", held[i]->sizes());
    }
    scores = {1 + slope, pointer_or_null<double>(held[0]), pointer_or_null<double>(held[1]),
              pointer_or_null<double>(held[2]), keep_zeros};
  }
  OptionalTensor held[3];
  cpu::SplineScores scores;
};

// (value, gradient [m + 1], Hessian [m + 1, m + 1]) of the sum of weight * -log p_target in (a, f).
std::tuple<double, Tensor, Tensor> curve_sums(const Tensor& input, const Tensor& target, const Tensor& weight,
                                              double temperature, double floor, const Tensor& knots,
                                              const Tensor& basis, double slope, const Tensor& values,
                                              const OptionalTensor& of_x, const OptionalTensor& bias,
                                              const OptionalTensor& extra, bool is_probs, bool keep_zeros) {
  const char* op = "spline_curve_sums";
  const Rows of(op, input, target, weight, temperature, floor, is_probs);
  const Curve curve(op, knots, basis, values);
  const Scores scores(op, of.rows, slope, of_x, bias, extra, keep_zeros);
  std::vector<cpu::SplineCurveSums> sums(n_spline_chunks(of.rows) + 1);
  const double* terms = curve.basis.const_data_ptr<double>();
  for_each_spline_chunk(of.rows, [&](int64_t chunk, int64_t begin, int64_t end) {
    cpu::spline_curve_sums(of.rows, curve.curve, scores.scores, of.targets, terms, begin, end, sums[chunk]);
  });
  for (size_t i = 0; i + 1 < sums.size(); ++i) sums.back().add(sums[i]);
  const int64_t n = curve.curve.knots + 1;
  const Tensor gradient = at::empty({n}, at::kDouble), hessian = at::empty({n, n}, at::kDouble);
  cpu::spline_curve_derivatives(sums.back(), curve.curve.knots, terms, data_of(gradient), data_of(hessian));
  return {sums.back().nll, gradient, hessian};
}

// (value, gradient in (a, f) [m + 1], in v [C], in b [C], dL/dscore [N, C] if wanted).
std::tuple<double, Tensor, Tensor, Tensor, OptionalTensor> linear_sums(
    const Tensor& input, const Tensor& target, const Tensor& weight, double temperature, double floor,
    const Tensor& knots, const Tensor& basis, double slope, const Tensor& values, const OptionalTensor& of_x,
    const OptionalTensor& bias, const OptionalTensor& extra, bool is_probs, bool keep_zeros, bool want_slopes) {
  const char* op = "spline_linear_sums";
  const Rows of(op, input, target, weight, temperature, floor, is_probs);
  const Curve curve(op, knots, basis, values);
  const int64_t classes = of.rows.classes;
  const Scores scores(op, of.rows, slope, of_x, bias, extra, keep_zeros);
  OptionalTensor slopes;
  if (want_slopes) slopes = at::empty({of.rows.rows, classes}, at::kDouble);
  double* const to = slopes ? data_of(*slopes) : nullptr;
  std::vector<cpu::SplineLinearSums> sums(n_spline_chunks(of.rows) + 1, cpu::SplineLinearSums(classes));
  for_each_spline_chunk(of.rows, [&](int64_t chunk, int64_t begin, int64_t end) {
    cpu::spline_linear_sums(of.rows, curve.curve, scores.scores, of.targets, to, begin, end, sums[chunk]);
  });
  cpu::SplineLinearSums& sum = sums.back();
  for (size_t i = 0; i + 1 < sums.size(); ++i) sum.add(sums[i]);
  const int64_t m = curve.curve.knots;
  const Tensor gradient = at::zeros({m + 1}, at::kDouble);
  double* grad = data_of(gradient);
  const double* terms = curve.basis.const_data_ptr<double>();
  grad[0] = sum.x;
  for (int64_t i = 0; i < (m + 1) * 4; ++i) {
    for (int64_t j = 0; j < m; ++j) grad[1 + j] += sum.moments[i / 4][i % 4] * terms[i * m + j];
  }
  const Tensor of_weight = at::empty({classes}, at::kDouble), of_bias = at::empty({classes}, at::kDouble);
  std::copy(sum.weight.begin(), sum.weight.end(), data_of(of_weight));
  std::copy(sum.bias.begin(), sum.bias.end(), data_of(of_bias));
  return {sum.nll, gradient, of_weight, of_bias, slopes};
}

// [2, B]: the sum of -w log((1 - e) softmax(z beta)_target + e / C) for each beta, and its slope in beta.
Tensor temperature_sums(const Tensor& input, const Tensor& target, const Tensor& weight, const Tensor& betas,
                        double floor, bool is_probs) {
  const Rows of("spline_temperature_sums", input, target, weight, 1.0, floor, is_probs);
  const Tensor at_betas = wide(betas);
  const int64_t n = at_betas.numel();
  const Tensor sums = at::zeros({n_spline_chunks(of.rows) + 1, 2, n}, at::kDouble);
  double* const data = data_of(sums);
  const double* values = at_betas.const_data_ptr<double>();
  for_each_spline_chunk(of.rows, [&](int64_t chunk, int64_t begin, int64_t end) {
    double* to = data + chunk * 2 * n;
    cpu::spline_temperature_sums(of.rows, of.targets, values, n, begin, end, to, to + n);
  });
  double* const sum = data + (sums.size(0) - 1) * 2 * n;
  for (int64_t i = 0; i < (sums.size(0) - 1) * 2 * n; ++i) sum[i % (2 * n)] += data[i];
  return sums[-1].clone();
}

// [7680]: the weights w P (1 - P) of the log-odds u in bins of 1/64 from -60 to 60.
Tensor histogram(const Tensor& input, const Tensor& weight, double temperature, double floor, bool is_probs) {
  const Rows of("spline_histogram", input, std::nullopt, weight, temperature, floor, is_probs);
  const Tensor counts = at::zeros({n_spline_chunks(of.rows) + 1, cpu::kSplineBins}, at::kDouble);
  double* const data = data_of(counts);
  const double* weights = of.weight.const_data_ptr<double>();
  for_each_spline_chunk(of.rows, [&](int64_t chunk, int64_t begin, int64_t end) {
    cpu::spline_histogram(of.rows, weights, begin, end, data + chunk * cpu::kSplineBins);
  });
  double* const sum = data + (counts.size(0) - 1) * cpu::kSplineBins;
  for (int64_t i = 0; i < (counts.size(0) - 1) * cpu::kSplineBins; ++i) sum[i % cpu::kSplineBins] += data[i];
  return counts[-1].clone();
}

// The sum of w times the variance of the logits over scale of a row, each at least the largest one - lowest.
double spread(const Tensor& input, const Tensor& weight, double scale, double lowest, bool is_probs) {
  const Rows of("spline_spread", input, std::nullopt, weight, 1.0, 0.5, is_probs);
  std::vector<double> sums(n_spline_chunks(of.rows));
  const double* weights = of.weight.const_data_ptr<double>();
  for_each_spline_chunk(of.rows, [&](int64_t chunk, int64_t begin, int64_t end) {
    sums[chunk] = cpu::spline_spread(of.rows, weights, scale, lowest, begin, end);
  });
  double sum = 0;
  for (const double one : sums) sum += one;
  return sum;
}

// x [N, C] float64.
Tensor log_probs(const Tensor& input_as_given, double temperature, double floor, bool is_probs) {
  check_floating("spline_log_probs", "input", input_as_given);
  const Tensor input = input_as_given.contiguous();
  const auto rows = spline_input(input, temperature, floor, is_probs);
  const Tensor output = empty_result_like(input, at::kDouble);
  double* const to = data_of(output);
  for_each_spline_chunk(rows, [&](int64_t /*chunk*/, int64_t begin, int64_t end) {
    cpu::spline_log_probs(rows, to + begin * rows.classes, begin, end);
  });
  return output;
}

}  // namespace

void register_spline(pybind11::module_& module) {
  using release = pybind11::call_guard<pybind11::gil_scoped_release>;
  module.def("spline_curve_sums", &curve_sums, release());
  module.def("spline_linear_sums", &linear_sums, release());
  module.def("spline_temperature_sums", &temperature_sums, release());
  module.def("spline_histogram", &histogram, release());
  module.def("spline_spread", &spread, release());
  module.def("spline_log_probs", &log_probs, release());
}

}  // namespace focalkern::bindings
