// Sums for the fit of spline scaling: tensors of a calibrator's rows to kernel arguments, chunks added up in order.
//
// Without autograd and argument checks: a calibrator calls them with checked rows. Parameters are on the host, in
// float64. Tensors with an entry per row are on the device of the input, CPU or CUDA.

#include <ATen/core/Tensor.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/zeros.h>
#include <c10/util/Exception.h>

#include <tuple>
#include <vector>

#include "bindings/common.h"
#include "bindings/spline.h"

namespace focalkern::bindings {
namespace {

Tensor wide(const Tensor& tensor) { return tensor.to(at::kDouble).contiguous(); }
Tensor wide(const Tensor& tensor, const at::Device& device) { return tensor.to(device, at::kDouble).contiguous(); }

// The rows of a calibrator: tensors, and the kernel arguments that point to them.
struct Rows {
  Rows(const char* op, const Tensor& input, const OptionalTensor& target, const Tensor& weight, double temperature,
       double floor, bool is_probs)
      : input(input.contiguous()), weight(wide(weight)) {
    check_floating(op, "input", input);
    check_device(op, input);
    TORCH_CHECK_VALUE(input.dim() == 2 && input.size(1) >= 2, op, ": input must be [N, C] with C >= 2, got ",
                      input.sizes());
    rows = spline_input(this->input, temperature, floor, is_probs);
    check_same_device(op, "weight", weight, input);
    TORCH_CHECK_VALUE(weight.dim() == 1 && weight.size(0) == rows.rows, op, ": weight must be [N] = [", rows.rows,
                      "], got ", weight.sizes());
    if (target) {
      this->target = target->contiguous();
      check_same_device(op, "target", *target, input);
      TORCH_CHECK_VALUE(target->scalar_type() == at::kLong && target->dim() == 1 && target->size(0) == rows.rows, op,
                        ": target must be [N] = [", rows.rows, "] int64, got ", target->sizes());
      const int64_t* labels = this->target.const_data_ptr<int64_t>();
      // On CUDA this check would wait for the device; a kernel treats such a label as no class.
      for (int64_t i = 0; input.is_cpu() && i < rows.rows; ++i) {
        TORCH_CHECK_INDEX(labels[i] >= 0 && labels[i] < rows.classes, op, ": target must be from 0 to ",
                          rows.classes - 1, ", got ", labels[i], " at row ", i);
      }
      targets = {labels, this->weight.const_data_ptr<double>()};
    }
  }
  Tensor input, target, weight;
  SplineInput rows;
  SplineTargets targets{};
};

// A curve: tensors, and the kernel arguments that point to them; basis [m + 1, 4, m].
struct Curve {
  Curve(const char* op, const Tensor& knots, const Tensor& basis, const Tensor& values, const Tensor& input)
      : knots(wide(knots, input.device())), basis(wide(basis)) {
    const int64_t m = knots.numel();
    TORCH_CHECK_VALUE(knots.dim() == 1 && m >= 2 && m <= kSplineMaxFitKnots, op,
                      ": knots must be [m] with m from 2 to ", kSplineMaxFitKnots, ", got ", knots.sizes());
    TORCH_CHECK_VALUE(basis.dim() == 3 && basis.size(0) == m + 1 && basis.size(1) == 4 && basis.size(2) == m, op,
                      ": basis must be [m + 1, 4, m], got ", basis.sizes());
    TORCH_CHECK_VALUE(values.dim() == 1 && values.numel() == m, op, ": values must be [m] = [", m, "], got ",
                      values.sizes());
    coefficients = wide(this->basis.matmul(wide(values)), input.device());
    curve = {m, this->knots.const_data_ptr<double>(), coefficients.const_data_ptr<double>()};
  }
  Tensor knots, basis, coefficients;
  SplineCurve curve;
};

void check_on_cpu(const char* op, const Tensor& input) {
  TORCH_CHECK_VALUE(input.is_cpu(), op, ": input must be on the CPU, got ", input.device());
}

double* data_of(const Tensor& tensor) { return tensor.mutable_data_ptr<double>(); }

// Scores with the tensors whose memory they point to; each tensor may be absent.
struct Scores {
  Scores(const char* op, const Rows& of, double slope, const OptionalTensor& of_x, const OptionalTensor& bias,
         const OptionalTensor& extra, bool keep_zeros) {
    const OptionalTensor* given[3] = {&of_x, &bias, &extra};
    for (int i = 0; i < 3; ++i) {
      if (!*given[i]) continue;
      held[i] = wide(**given[i], of.input.device());
      TORCH_CHECK_VALUE(held[i]->numel() == (i < 2 ? 1 : of.rows.rows) * of.rows.classes, op,
                        ": vectors must be [C] and extra scores [N, C], got ", held[i]->sizes());
    }
    scores = {1 + slope, pointer_or_null<double>(held[0]), pointer_or_null<double>(held[1]),
              pointer_or_null<double>(held[2]), keep_zeros};
  }
  OptionalTensor held[3];
  SplineScores scores;
};

#ifdef FOCALKERN_WITH_CUDA
cuda::SplineFit fit_on_device(const Rows& of, const Curve& curve, const Scores& scores) {
  return {of.rows, curve.curve, scores.scores, of.targets};
}

cpu::SplineCurveSums curve_sums_cuda(const Rows& of, const Curve& curve, const Scores& scores) {
  const c10::cuda::CUDAGuard guard(of.input.device());
  const int64_t n = curve.curve.knots + 1;
  const Tensor basis = wide(curve.basis, of.input.device());
  const Tensor means = at::empty({of.rows.rows, n}, basis.options());
  const SplineDeviceSums memory(of.rows, basis.options(), cuda::kSplineOfRows + cuda::kSplineCurveNumbers * n,
                                /*by_class=*/false);
  launch_spline(cuda::spline_curve_sums, fit_on_device(of, curve, scores), basis.const_data_ptr<double>(),
                means.mutable_data_ptr<double>(), memory.sums, memory.scratch);
  const Tensor products = at::mm(means.mul(of.weight.unsqueeze(1)).t(), means);
  const Tensor found = at::cat({memory.of_threads.sum(1), products.reshape(-1)}).cpu();  // one synchronisation
  const double* from = found.const_data_ptr<double>();
  cpu::SplineCurveSums sums;
  sums.nll = from[0];
  sums.x_squared = from[1];
  sums.of_target_x = from[2];
  from += cuda::kSplineOfRows;
  for (int64_t piece = 0; piece < n; ++piece, from += cuda::kSplineCurveNumbers) {
    std::copy(from, from + 12, sums.moments[piece]);
    std::copy(from + 12, from + 16, sums.of_target[piece]);
  }
  for (int64_t i = 0; i < n; ++i) std::copy(from + i * n, from + (i + 1) * n, sums.means[i]);
  return sums;
}
#endif

// (value, gradient [m + 1], Hessian [m + 1, m + 1]) of the sum of weight * -log p_target in (a, f).
std::tuple<double, Tensor, Tensor> curve_sums(const Tensor& input, const Tensor& target, const Tensor& weight,
                                              double temperature, double floor, const Tensor& knots,
                                              const Tensor& basis, double slope, const Tensor& values,
                                              const OptionalTensor& of_x, const OptionalTensor& bias,
                                              const OptionalTensor& extra, bool is_probs, bool keep_zeros) {
  const char* op = "spline_curve_sums";
  const Rows of(op, input, target, weight, temperature, floor, is_probs);
  const Curve curve(op, knots, basis, values, input);
  const Scores scores(op, of, slope, of_x, bias, extra, keep_zeros);
  const double* terms = curve.basis.const_data_ptr<double>();
  std::vector<cpu::SplineCurveSums> sums(input.is_cpu() ? n_spline_chunks(of.rows) + 1 : 1);
#ifdef FOCALKERN_WITH_CUDA
  if (input.is_cuda()) sums.back() = curve_sums_cuda(of, curve, scores);
#endif
  if (input.is_cpu()) {
    for_each_spline_chunk(of.rows, [&](int64_t chunk, int64_t begin, int64_t end) {
      cpu::spline_curve_sums(of.rows, curve.curve, scores.scores, of.targets, terms, begin, end, sums[chunk]);
    });
  }
  for (size_t i = 0; i + 1 < sums.size(); ++i) sums.back().add(sums[i]);
  const int64_t n = curve.curve.knots + 1;
  const Tensor gradient = at::empty({n}, at::kDouble), hessian = at::empty({n, n}, at::kDouble);
  cpu::spline_curve_derivatives(sums.back(), curve.curve.knots, terms, data_of(gradient), data_of(hessian));
  return {sums.back().nll, gradient, hessian};
}

// Results of the linear sums for C classes; of_weight and of_bias are on the device of the input.
struct LinearSums {
  double nll, x;
  std::vector<double> moments;  // [m + 1, 4]
  Tensor of_weight, of_bias;
};

LinearSums linear_sums_cpu(const Rows& of, const Curve& curve, const Scores& scores, double* slopes) {
  const int64_t classes = of.rows.classes;
  std::vector<cpu::SplineLinearSums> sums(n_spline_chunks(of.rows) + 1, cpu::SplineLinearSums(classes));
  for_each_spline_chunk(of.rows, [&](int64_t chunk, int64_t begin, int64_t end) {
    cpu::spline_linear_sums(of.rows, curve.curve, scores.scores, of.targets, slopes, begin, end, sums[chunk]);
  });
  cpu::SplineLinearSums& sum = sums.back();
  for (size_t i = 0; i + 1 < sums.size(); ++i) sum.add(sums[i]);
  const double* moments = sum.moments[0];
  LinearSums result{sum.nll, sum.x, std::vector<double>(moments, moments + 4 * (curve.curve.knots + 1)),
                    at::empty({classes}, at::kDouble), at::empty({classes}, at::kDouble)};
  std::copy(sum.weight.begin(), sum.weight.end(), data_of(result.of_weight));
  std::copy(sum.bias.begin(), sum.bias.end(), data_of(result.of_bias));
  return result;
}

#ifdef FOCALKERN_WITH_CUDA
LinearSums linear_sums_cuda(const Rows& of, const Curve& curve, const Scores& scores, double* slopes) {
  const c10::cuda::CUDAGuard guard(of.input.device());
  const int64_t numbers = cuda::kSplineOfRows + 4 * (curve.curve.knots + 1);
  const SplineDeviceSums memory(of.rows, of.input.options(), numbers, /*by_class=*/true);
  launch_spline(cuda::spline_linear_sums, fit_on_device(of, curve, scores), slopes, memory.sums, memory.scratch);
  const Tensor found = memory.of_threads.sum(1).cpu(), of_classes = memory.of_classes.sum(0);
  const double* from = found.const_data_ptr<double>();
  return {from[0], from[1], std::vector<double>(from + cuda::kSplineOfRows, from + numbers), of_classes[0],
          of_classes[1]};
}
#endif

// (value, gradient in (a, f) [m + 1], in v [C], in b [C], dL/dscore [N, C] if wanted).
std::tuple<double, Tensor, Tensor, Tensor, OptionalTensor> linear_sums(
    const Tensor& input, const Tensor& target, const Tensor& weight, double temperature, double floor,
    const Tensor& knots, const Tensor& basis, double slope, const Tensor& values, const OptionalTensor& of_x,
    const OptionalTensor& bias, const OptionalTensor& extra, bool is_probs, bool keep_zeros, bool want_slopes) {
  const char* op = "spline_linear_sums";
  const Rows of(op, input, target, weight, temperature, floor, is_probs);
  const Curve curve(op, knots, basis, values, input);
  const Scores scores(op, of, slope, of_x, bias, extra, keep_zeros);
  OptionalTensor slopes;
  if (want_slopes) slopes = at::empty(input.sizes(), input.options().dtype(at::kDouble));
  double* const to = slopes ? data_of(*slopes) : nullptr;
#ifdef FOCALKERN_WITH_CUDA
  const LinearSums sum = (input.is_cuda() ? linear_sums_cuda : linear_sums_cpu)(of, curve, scores, to);
#else
  const LinearSums sum = linear_sums_cpu(of, curve, scores, to);
#endif
  const int64_t m = curve.curve.knots;
  const Tensor gradient = at::zeros({m + 1}, at::kDouble);
  double* grad = data_of(gradient);
  const double* terms = curve.basis.const_data_ptr<double>();
  grad[0] = sum.x;
  for (int64_t i = 0; i < (m + 1) * 4; ++i) {
    for (int64_t j = 0; j < m; ++j) grad[1 + j] += sum.moments[i] * terms[i * m + j];
  }
  return {sum.nll, gradient, sum.of_weight, sum.of_bias, slopes};
}

// [2, B]: the sum of -w log((1 - e) softmax(z beta)_target + e / C) for each beta, and its slope in beta.
Tensor temperature_sums(const Tensor& input, const Tensor& target, const Tensor& weight, const Tensor& betas,
                        double floor, bool is_probs) {
  const Rows of("spline_temperature_sums", input, target, weight, 1.0, floor, is_probs);
  const Tensor at_betas = wide(betas, input.device());
  const int64_t n = at_betas.numel();
#ifdef FOCALKERN_WITH_CUDA
  if (input.is_cuda()) {
    const c10::cuda::CUDAGuard guard(input.device());
    const SplineDeviceSums memory(of.rows, input.options(), 2 * n, /*by_class=*/false);
    launch_spline(cuda::spline_temperature_sums, of.rows, of.targets, at_betas.const_data_ptr<double>(), n, memory.sums,
                  memory.scratch);
    return memory.of_threads.sum(1).reshape({2, n}).cpu();
  }
#endif
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
  check_on_cpu("spline_histogram", input);
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

// The sum over rows of w times the variance of z / scale. Each z / scale is raised to at least its row's maximum -
// lowest.
double spread(const Tensor& input, const Tensor& weight, double scale, double lowest, bool is_probs) {
  check_on_cpu("spline_spread", input);
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
#ifdef FOCALKERN_WITH_CUDA
  if (input.is_cuda()) {
    const c10::cuda::CUDAGuard guard(input.device());
    const SplineDeviceSums memory(rows, input.options(), /*numbers=*/0, /*by_class=*/false);
    launch_spline(cuda::spline_log_probs, rows, data_of(output), memory.scratch);
    return output;
  }
#endif
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
