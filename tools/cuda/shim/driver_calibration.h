// The calibration map, its grid, and the spline map and its sums, over one set of sizes and options.
#pragma once

#include <type_traits>

#include "cuda/launch.h"
#include "driver_buffers.h"
#include "kernels/calibration_grid.h"
#include "kernels/calibration_map.h"
#include "kernels/spline.h"
#include "math/grid_plan.h"

namespace {

template <typename S>
void map(int rows, int classes, bool probs, bool log, bool wide) {
  using R = compute_t<S>;
  size_t n = (size_t)rows * classes;
  Buffer<S> x(n), o(n), go(n), gi(n);
  Buffer<R> ow(n), gow(n);
  Buffer<double> ga(rows), te(rows), gg(rows), gt(rows);
  fill(x.p, n);
  fill(go.p, n, 1);
  fill(gow.p, n, 1);
  if (probs) softmax(x.p, rows, classes);
  for (int r = 0; r < rows; ++r) {
    ga[r] = r % 9 == 8 ? -2 : 0.3 * (r % 5) - 0.5;
    te[r] = 0.5 + r % 3;
  }
  CalibrationMapForward<S> f{};
  f.rows = rows;
  f.classes = classes;
  f.input = x.p;
  f.input_is_probs = probs;
  f.log_output = log;
  f.gamma = ga.p;
  f.gamma_stride = 1;
  f.temperature = te.p;
  f.temperature_stride = 1;
  if (wide)
    f.output_wide = ow.p;
  else
    f.output = o.p;
  if (cuda::calibration_map_forward(f, nullptr)) abort();
  CalibrationMapBackward<S> b{};
  static_cast<CalibrationMapArgs<S>&>(b) = f;
  if (wide)
    b.grad_output_wide = gow.p;
  else
    b.grad_output = go.p;
  b.grad_input = gi.p;
  b.grad_gamma = gg.p;
  b.grad_temperature = gt.p;
  if (cuda::calibration_map_backward(b, nullptr)) abort();
  if (wide)
    mix(ow.p, n);
  else
    mix(o.p, n);
  mix(gi.p, n);
  mix(gg.p, rows);
  mix(gt.p, rows);
}
template <typename S>
void grid(int rows, int classes, int nt, int ng, int bins, int est, bool probs, bool tie, bool brier) {
  using R = compute_t<S>;
  size_t n = (size_t)rows * classes;
  Buffer<S> x(n);
  fill(x.p, n);
  if (tie)
    for (int r = 0; r < rows; ++r)
      if (r % 2) memcpy(&x[r * classes], &x[(r - 1) * classes], classes * sizeof(S));
  if (probs) softmax(x.p, rows, classes);
  Buffer<int64_t> y(rows);
  for (int r = 0; r < rows; ++r) y[r] = rng() % classes;
  Buffer<int32_t> top(rows);
  Buffer<uint8_t> ok(rows);
  Buffer<int64_t> problem(1);
  CalibrationGridSamples<S> s{};
  s.rows = rows;
  s.classes = classes;
  s.input = x.p;
  s.row_stride = classes;
  s.input_is_probs = probs;
  s.labels = {y.p, Labels::Type::kInt64};
  s.top = top.p;
  s.correct = ok.p;
  if (cuda::calibration_grid_prepare(s, problem.p, nullptr)) abort();
  if (problem[0] != kNoRowProblem) abort();
  Buffer<double> ga(ng), te(nt), tab((size_t)4 * ng * nt);
  for (int i = 0; i < ng; ++i) ga[i] = -0.5 + 0.4 * i;
  for (int i = 0; i < nt; ++i) te[i] = 0.02 + 0.1 * i;
  CalibrationGridBlock<S> b{};
  b.samples = s;
  b.n_gammas = ng;
  b.n_temperatures = nt;
  b.gammas = ga.p;
  b.temperatures = te.p;
  b.n_bins = bins;
  b.estimator = (BinEstimator)est;
  b.ece = tab.p;
  b.mce = tab.p + ng * nt;
  b.nll = tab.p + 2 * ng * nt;
  if (brier) b.brier = tab.p + 3 * ng * nt;
  b.table_stride = nt;
  b.keep_confidence = true;
  int64_t bytes = cuda::calibration_grid_workspace(rows, classes, ng, nt, bins, sizeof(R));
  Buffer<double> ws(bytes / 8);
  const CalibrationGridPlan plan = calibration_grid_plan(b.gammas, ng, classes, calibration_grid_shares_sums(b));
  if (cuda::calibration_grid_block(b, plan, ws.p, nullptr)) abort();
  mix(tab.p, (brier ? 4 : 3) * static_cast<size_t>(ng) * nt);
  const int nb = est == 0 ? 15 : 1030;
  Buffer<int64_t> c(ng * nt * nb), k(ng * nt * nb);
  Buffer<double> cs(ng * nt * nb);
  for (size_t i = 0; i < c.n; ++i) c[i] = k[i] = 0, cs[i] = 0;
  CalibrationSums<R> sums{rows, ng, nt, (R*)ws.p, ok.p, nb, est != 0, c.p, cs.p, k.p, nt};
  if (cuda::calibration_sums(sums, nullptr)) abort();
  mix(c.p, c.n);
  mix(k.p, k.n);
  mix(cs.p, cs.n);
}

// vector: scores of a vector, sums by class, and slopes.
template <typename S>
void spline(int rows, int classes, bool probs, bool vector) {
  constexpr int kKnots = 5;
  constexpr auto kStorage = std::is_same_v<S, Half>       ? SplineStorage::kHalf
                            : std::is_same_v<S, BFloat16> ? SplineStorage::kBFloat16
                            : std::is_same_v<S, float>    ? SplineStorage::kFloat
                                                          : SplineStorage::kDouble;
  const size_t n = static_cast<size_t>(rows) * classes;
  Buffer<S> z(n), out(n), upstream(n), grad(n);
  fill(z.p, n);
  fill(upstream.p, n, 1);
  if (probs) softmax(z.p, rows, classes);
  Buffer<double> knots(kKnots), coefficients(4 * (kKnots + 1)), basis(4 * (kKnots + 1) * kKnots), weight(classes),
      bias(classes), slopes(n), row_weight(rows), means(static_cast<size_t>(rows) * (kKnots + 1)), betas(3);
  for (int i = 0; i < kKnots; ++i) knots[i] = 2.0 * i - 6;
  for (size_t i = 0; i < coefficients.n; ++i) coefficients[i] = 0.1 * (i % 4 + 1);
  for (size_t i = 0; i < basis.n; ++i) basis[i] = 0.01 * (i % 7);
  for (int c = 0; c < classes; ++c) weight[c] = 0.01 * (c % 5), bias[c] = 0.02 * (c % 3);
  Buffer<int64_t> target(rows);
  for (int r = 0; r < rows; ++r) target[r] = rng() % classes, row_weight[r] = 1 + r % 3;
  for (int i = 0; i < 3; ++i) betas[i] = 0.5 * (i + 1);
  const SplineInput input{z.p, kStorage, probs, rows, classes, 1.3, 1e-3};
  const SplineCurve curve{kKnots, knots.p, coefficients.p};
  const SplineScores scores{1.1, vector ? weight.p : nullptr, vector ? bias.p : nullptr, nullptr, vector};
  const auto with_sums = [&](int64_t numbers, bool by_class, auto run) {
    const auto sizes = cuda::spline_sizes(rows, classes, numbers, by_class);
    Buffer<double> of_threads(numbers * sizes.threads), of_classes(by_class ? sizes.groups * 2 * classes : 0),
        scratch(sizes.scratch);
    for (size_t i = 0; i < of_threads.n; ++i) of_threads[i] = 0;
    for (size_t i = 0; i < of_classes.n; ++i) of_classes[i] = 0;
    if (run(cuda::SplineSums{of_threads.p, by_class ? of_classes.p : nullptr, numbers}, scratch.p)) abort();
    mix(of_threads.p, of_threads.n);
    mix(of_classes.p, of_classes.n);
  };
  with_sums(0, false, [&](const auto&, double* scratch) {
    const SplineMapForward args{input, curve, scores, vector, false, out.p, kStorage, 1e-2};
    return cuda::spline_map_forward(args, scratch, nullptr);
  });
  mix(out.p, n);
  with_sums(3 + 4 * (kKnots + 1), vector, [&](const auto& sums, double* scratch) {
    const SplineMapBackward args{input, curve, scores, vector, upstream.p, kStorage, nullptr, nullptr, grad.p};
    return cuda::spline_map_backward(args, sums, scratch, nullptr);
  });
  mix(grad.p, n);
  with_sums(0, false,
            [&](const auto&, double* scratch) { return cuda::spline_log_probs(input, slopes.p, scratch, nullptr); });
  mix(slopes.p, n);
  const cuda::SplineFit fit{input, curve, scores, {target.p, row_weight.p}};
  with_sums(3 + 16 * (kKnots + 1), false, [&](const auto& sums, double* scratch) {
    return cuda::spline_curve_sums(fit, basis.p, means.p, sums, scratch, nullptr);
  });
  mix(means.p, means.n);
  with_sums(3 + 4 * (kKnots + 1), true, [&](const auto& sums, double* scratch) {
    return cuda::spline_linear_sums(fit, slopes.p, sums, scratch, nullptr);
  });
  mix(slopes.p, n);
  with_sums(6, false, [&](const auto& sums, double* scratch) {
    return cuda::spline_temperature_sums(input, fit.targets, betas.p, 3, sums, scratch, nullptr);
  });
}

}  // namespace
