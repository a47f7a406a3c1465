// Sums for the fit of spline scaling, chunks added up in order, for torch's interface and its stable one.
#pragma once

#include <utility>

#include "bindings/spline_run.h"

namespace focalkern::bindings {

// The rows of a fit: logits or probabilities [N, C], or on the CPU their features [2, N, C] float64.
template <typename Torch>
SplineInput spline_fit_input(const typename Torch::Tensor& input, double temperature, double floor, bool is_probs) {
  SplineInput rows = spline_input<Torch>(input, temperature, floor, is_probs);
  if (input.dim() == 3) {
    rows.storage = SplineStorage::kFeatures;
    rows.rows /= 2;
  }
  return rows;
}

// Checked rows of a calibrator: contiguous, on one device, all but input and target in float64. Results lie on the CPU
// where nothing else is said.
template <typename Torch>
struct SplineFitRows {
  using Tensor = typename Torch::Tensor;
  using OptionalTensor = std::optional<Tensor>;

  SplineFitRows(const Tensor& input, const OptionalTensor& target, const OptionalTensor& weight, double temperature,
                double floor, bool is_probs)
      : input(input),
        target(target),
        weight(weight),
        rows(spline_fit_input<Torch>(input, temperature, floor, is_probs)) {
    if (target.has_value()) {
      targets = {static_cast<const int64_t*>(target->const_data_ptr()), const_doubles_of(weight)};
    }
  }

  // Sums of chunks: work(sum, begin, end) for every chunk, whose sums, `numbers` each, are then added.
  template <typename Work>
  std::vector<double> add_chunks(int64_t numbers, Work work) const {
    const int64_t chunks = n_spline_chunks(rows);
    std::vector<double> sums((chunks + 1) * numbers);
    for_each_spline_chunk<Torch>(
        rows, [&](int64_t chunk, int64_t begin, int64_t end) { work(sums.data() + chunk * numbers, begin, end); });
    std::vector<double> total(numbers);
    for (int64_t i = 0; i < chunks * numbers; ++i) total[i % numbers] += sums[i];
    return total;
  }

  // [2, B]: the sum of -w log((1 - e) softmax(z beta)_target + e / C) for each beta, and its slope in beta.
  void temperature_sums(const Tensor& betas, const Tensor& result) const {
    const int64_t n = betas.numel();
    const double* values = const_doubles_of(betas);
#ifdef FOCALKERN_WITH_CUDA
    if (input.is_cuda()) {
      const SplineDeviceSums<Torch> memory(rows, input, 2 * n, /*by_class=*/false);
      launch_spline<Torch>(input, cuda::spline_temperature_sums, rows, targets, values, n, memory.sums, memory.scratch);
      const Tensor host = Torch::on_host(Torch::sum(memory.of_threads, 1));
      std::copy_n(const_doubles_of(host), 2 * n, doubles_of(result));
      return;
    }
#endif
    const auto sums = add_chunks(2 * n, [&](double* to, int64_t begin, int64_t end) {
      cpu::spline_temperature_sums(rows, targets, values, n, begin, end, to, to + n);
    });
    std::copy(sums.begin(), sums.end(), doubles_of(result));
  }

  // [7680]: the weights w P (1 - P) of the log-odds u in bins of 1/64 from -60 to 60. On the CPU only.
  void histogram(const Tensor& result) const {
    const auto sums = add_chunks(cpu::kSplineBins, [&](double* to, int64_t begin, int64_t end) {
      cpu::spline_histogram(rows, const_doubles_of(weight), begin, end, to);
    });
    std::copy(sums.begin(), sums.end(), doubles_of(result));
  }

  // The sum over rows of w times the variance of z / scale. Each z / scale is raised to at least its row's maximum -
  // lowest. On the CPU only.
  double spread(double scale, double lowest) const {
    return add_chunks(1, [&](double* to, int64_t begin, int64_t end) {
      *to = cpu::spline_spread(rows, const_doubles_of(weight), scale, lowest, begin, end);
    })[0];
  }

  // x [N, C] float64, on the device of the input.
  void log_probs(const Tensor& output) const {
    double* const to = doubles_of(output);
#ifdef FOCALKERN_WITH_CUDA
    if (input.is_cuda()) {
      const SplineDeviceSums<Torch> memory(rows, input, /*numbers=*/0, /*by_class=*/false);
      return launch_spline<Torch>(input, cuda::spline_log_probs, rows, to, memory.scratch);
    }
#endif
    for_each_spline_chunk<Torch>(rows, [&](int64_t /*chunk*/, int64_t begin, int64_t end) {
      cpu::spline_log_probs(rows, to + begin * rows.classes, begin, end);
    });
  }

  // x and u [2, N, C] float64. On the CPU only.
  void features(const Tensor& output) const {
    double* const to = doubles_of(output);
    for_each_spline_chunk<Torch>(rows, [&](int64_t /*chunk*/, int64_t begin, int64_t end) {
      double* const x = to + begin * rows.classes;
      cpu::spline_log_probs(rows, x, begin, end, x + rows.rows * rows.classes);
    });
  }

  Tensor input;
  OptionalTensor target, weight;
  SplineInput rows;
  SplineTargets targets{};
};

// A curve on rows; basis [m + 1, 4, m] lies on the CPU, coefficients [m + 1, 4] with the rows; each of the vectors of_x
// and bias [C] and of the scores `extra` [N, C] may be absent. For features of at most kSplineFewClasses classes, of_x
// may be a matrix [C, C].
template <typename Torch>
struct SplineFitRun {
  using Tensor = typename Torch::Tensor;
  using OptionalTensor = std::optional<Tensor>;

  SplineFitRun(SplineFitRows<Torch> of, const Tensor& knots, const Tensor& coefficients, const Tensor& basis,
               double slope, const OptionalTensor& of_x, const OptionalTensor& bias, const OptionalTensor& extra,
               bool keep_zeros)
      : of(std::move(of)),
        knots(knots),
        coefficients(coefficients),
        basis(basis),
        vectors{of_x, bias, extra},
        curve{knots.numel(), const_doubles_of(knots), const_doubles_of(coefficients)},
        scores(SplineScores{1 + slope, const_doubles_of(of_x), const_doubles_of(bias), const_doubles_of(extra),
                            keep_zeros && this->of.rows.storage != SplineStorage::kFeatures}) {
    if (of_x.has_value() && of_x->dim() == 2) std::swap(scores.weight, scores.matrix);
  }

  // Fills the gradient [m + 1] and the Hessian [m + 1, m + 1] of the sum of weight * -log p_target in (a, f); returns
  // the value.
  double curve_sums(const Tensor& gradient, const Tensor& hessian) const {
    cpu::SplineCurveSums sums;
#ifdef FOCALKERN_WITH_CUDA
    if (of.input.is_cuda()) sums = curve_sums_on_device();
#endif
    const double* const terms = const_doubles_of(basis);
    if (of.input.is_cpu()) {
      sums = add_spline_chunks<Torch>(of.rows, sums, [&](cpu::SplineCurveSums& to, int64_t begin, int64_t end) {
        cpu::spline_curve_sums(of.rows, curve, scores, of.targets, terms, begin, end, to);
      });
    }
    cpu::spline_curve_derivatives(sums, curve.knots, terms, doubles_of(gradient), doubles_of(hessian));
    return sums.nll;
  }

  // Fills the loss -log p_target and the Brier score of each row, [2, N]. On the CPU only.
  void row_losses(const Tensor& losses) const {
    double* const nll = doubles_of(losses);
    for_each_spline_chunk<Torch>(of.rows, [&](int64_t /*chunk*/, int64_t begin, int64_t end) {
      cpu::spline_row_losses(of.rows, curve, scores, of.targets, nll, nll + of.rows.rows, begin, end);
    });
  }

  // Fills the Hessian [n, n] in (a, f) [m + 1], the rows of a matrix and b, without its block of (a, f), for at most
  // kSplineFewClasses classes. On the CPU only.
  void matrix_hessian(const Tensor& hessian) const {
    const cpu::SplineMatrixSums none(of.rows.classes);
    const auto sums =
        add_spline_chunks<Torch>(of.rows, none, [&](cpu::SplineMatrixSums& to, int64_t begin, int64_t end) {
          cpu::spline_matrix_sums(of.rows, curve, scores, of.targets, const_doubles_of(basis), begin, end, to);
        });
    cpu::spline_matrix_hessian(sums, of.rows.classes, curve.knots, doubles_of(hessian));
  }

  // Fills the gradient in (a, f) [m + 1], in of_x [C] or [C, C] and in b [C], which lie with the rows, and dL/dscore
  // [N, C] if it is given; returns the value.
  double linear_sums(const Tensor& gradient, const Tensor& of_weight, const Tensor& of_bias,
                     const OptionalTensor& slopes) const {
    double* const to = slopes.has_value() ? doubles_of(*slopes) : nullptr;
    std::vector<double> moments(4 * (curve.knots + 1));
    double nll = 0, x = 0;
#ifdef FOCALKERN_WITH_CUDA
    if (of.input.is_cuda()) {
      const auto numbers = cuda::kSplineOfRows + static_cast<int64_t>(moments.size());
      const SplineDeviceSums<Torch> memory(of.rows, of.input, numbers, /*by_class=*/true);
      launch_spline<Torch>(of.input, cuda::spline_linear_sums, on_device(), to, memory.sums, memory.scratch);
      const Tensor found = Torch::on_host(Torch::sum(memory.of_threads, 1));
      const Tensor of_classes = Torch::sum(memory.of_classes, 0);
      const double* from = const_doubles_of(found);
      nll = from[0];
      x = from[1];
      std::copy_n(from + cuda::kSplineOfRows, moments.size(), moments.data());
      Torch::copy(of_weight, Torch::select(of_classes, 0));
      Torch::copy(of_bias, Torch::select(of_classes, 1));
    }
#endif
    if (of.input.is_cpu()) {
      const cpu::SplineLinearSums none(of.rows.classes, scores.matrix != nullptr);
      const auto sum =
          add_spline_chunks<Torch>(of.rows, none, [&](cpu::SplineLinearSums& sums, int64_t begin, int64_t end) {
            cpu::spline_linear_sums(of.rows, curve, scores, of.targets, to, begin, end, sums);
          });
      nll = sum.nll;
      x = sum.x;
      std::copy_n(sum.moments[0], moments.size(), moments.data());
      std::copy(sum.weight.begin(), sum.weight.end(), doubles_of(of_weight));
      std::copy(sum.bias.begin(), sum.bias.end(), doubles_of(of_bias));
    }
    const int64_t m = curve.knots;
    const double* terms = const_doubles_of(basis);
    double* grad = doubles_of(gradient);
    std::fill_n(grad, m + 1, 0.0);
    grad[0] = x;
    for (int64_t i = 0; i < (m + 1) * 4; ++i) {
      for (int64_t j = 0; j < m; ++j) grad[1 + j] += moments[i] * terms[i * m + j];
    }
    return nll;
  }

 private:
#ifdef FOCALKERN_WITH_CUDA
  cuda::SplineFit on_device() const { return {of.rows, curve, scores, of.targets}; }

  cpu::SplineCurveSums curve_sums_on_device() const {
    const int64_t n = curve.knots + 1;
    const Tensor terms = Torch::on_device_of(of.input, basis);
    const Tensor means = Torch::empty_doubles(of.input, {of.rows.rows, n});
    const SplineDeviceSums<Torch> memory(of.rows, of.input, cuda::kSplineOfRows + cuda::kSplineCurveNumbers * n,
                                         /*by_class=*/false);
    launch_spline<Torch>(of.input, cuda::spline_curve_sums, on_device(), const_doubles_of(terms), doubles_of(means),
                         memory.sums, memory.scratch);
    const Tensor weighted = Torch::multiply(means, Torch::view(*of.weight, {of.rows.rows, 1}));
    const int64_t numbers = memory.sums.numbers;
    const Tensor found = Torch::empty_doubles(of.input, {numbers + n * n});
    Torch::copy(Torch::slice(found, 0, 0, numbers), Torch::sum(memory.of_threads, 1));
    Torch::copy(Torch::view(Torch::slice(found, 0, numbers, numbers + n * n), {n, n}),
                Torch::product(Torch::transposed(weighted), means));
    const Tensor host = Torch::on_host(found);  // one wait
    const double* from = const_doubles_of(host);
    cpu::SplineCurveSums sums;
    sums.nll = from[0];
    sums.x_squared = from[1];
    sums.of_target_x = from[2];
    from += cuda::kSplineOfRows;
    for (int64_t piece = 0; piece < n; ++piece, from += cuda::kSplineCurveNumbers) {
      std::copy(from, from + 12, sums.moments[piece]);
      std::copy(from + 12, from + 16, sums.of_target[piece]);
    }
    for (int64_t i = 0; i < n; ++i) std::copy_n(from + i * n, n, sums.means[i]);
    return sums;
  }
#endif

  SplineFitRows<Torch> of;
  Tensor knots, coefficients, basis;
  OptionalTensor vectors[3];
  SplineCurve curve;
  cpu::SplineFitScores scores;
};

}  // namespace focalkern::bindings
