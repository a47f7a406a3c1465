// The map of spline scaling, forward and backward: [rows, classes] -> [rows, classes].
//
// Passes over a row (spline_row.cuh): 1. the largest logit   2. the sum of exp over the others   3. scores 4. their
// softmax. Forward: 5. write. Backward: 5. dL/dscore and dL/dlog q, added to the sums   6. dL/dd, written. Memory: pass
// 1 reads the input, the last one writes; the backward pass reads the upstream gradient twice.

#include "cuda/spline_row.cuh"

namespace focalkern::cuda {
namespace {

constexpr int kTableSize = kSplineMaxKnots + 1;

template <bool kept>
__global__ __launch_bounds__(kBlock, 2) void spline_map_forward_kernel(const __grid_constant__ SplineMapForward args,
                                                                       SplinePlan plan, double* scratch) {
  __shared__ SplineShared<kTableSize, kept> shared;
  SplineBlock<kTableSize, kept> block(shared, plan, scratch);
  block.load(args.curve);
  block.each_row(args.rows, [&](const SplinePart& part, int64_t, bool) {
    const SplineStart start = block.template start<true>(args.rows, part, args.tolerance);
    const double largest = block.scores(args.rows, args.scores, start, part, [](int, const SplineEntry&, double) {});
    double scale = 1, shift = 0;
    if (args.log_output) {
      shift = -(largest + logarithm(block.template exponentials<true>(part, largest)));
    } else {
      scale = 1 / block.template exponentials<false>(part, largest);
    }
    if (!start.valid) shift = kNaN<double>;
    part.each(
        [&](int c, int at) { store_number(part.score[at] * scale + shift, args.output, args.to, part.offset + c); });
  });
}

template <bool kept>
__global__ __launch_bounds__(kBlock, 2) void spline_map_backward_kernel(const __grid_constant__ SplineMapBackward args,
                                                                        SplinePlan plan, SplineSums sums_of,
                                                                        double* scratch) {
  __shared__ SplineShared<kTableSize, kept> shared;
  SplineBlock<kTableSize, kept> block(shared, plan, scratch);
  block.load(args.curve);
  const SplineThreadSums sums(sums_of);
  const SplineClassSums of_classes(sums_of, block.group_number(), args.rows.classes);
  const double share = 1.0 / static_cast<double>(args.rows.classes);
  const double beta = inverse_temperature<double>(args.rows.temperature);
  double of_factor = 0, of_temperature = 0, of_floor = 0;
  SplineMoments moments;
  block.each_row(args.rows, [&](const SplinePart& part, int64_t, bool) {
    const SplineStart start = block.start(args.rows, part);
    const double largest = block.scores(args.rows, args.scores, start, part, [](int, const SplineEntry&, double) {});
    const double scale = 1 / block.template exponentials<false>(part, largest);
    // An impossible class is excluded, even if its upstream gradient is not finite.
    const auto upstream = [&](int c, int at) {
      const bool impossible = args.scores.keep_zeros && part.d[at] == -kInfinity<double>;
      return impossible ? 0.0 : load_number(args.grad_output, args.of_grad, part.offset + c);
    };
    double total = 0;
    part.each([&](int c, int at) {
      const double g = upstream(c, at);
      total += args.log_output ? g : g * (part.score[at] * scale);
    });
    total = block.group.sum(total);
    double of_large = 0, of_rest = 0;
    part.each([&](int c, int at) {
      const double probability = part.score[at] * scale, given = upstream(c, at);
      const double g = args.log_output ? given - probability * total : probability * (given - total);
      if (args.grad_scores != nullptr) args.grad_scores[part.offset + c] = g;
      const SplineEntry of = block.entry(args.rows, start, part.d[at]);
      if (sums.at != nullptr) {
        moments.add(sums, of.place, g);
        of_factor += g * of.features.x;
      }
      of_classes.add(c, g, of.features.x);
      const double factor = args.scores.factor + (args.scores.weight != nullptr ? args.scores.weight[c] : 0.0);
      double of_x = spline_grad_x(g, factor, block.slope(of.place), of.features.complement);
      if (args.of_x != nullptr) of_x += args.of_x[part.offset + c];
      of_floor += spline_grad_floor(of_x, of.e, of.p, start.inverse, share);
      const double of_log_q = spline_grad_log_q(of_x, of.e, of.p, start.row);
      (of.features.large ? of_large : of_rest) += of_log_q;
      part.score[at] = of_log_q;
    });
    of_large = block.group.sum(of_large);
    of_rest = block.group.sum(of_rest);
    const double complement = start.rest * start.inverse;
    part.each([&](int c, int at) {
      const double d = part.d[at], e = bounded_exponential(d);
      const bool large = spline_probability(e, start.row, kept_bits(args.rows)) > kSplineLarge<double>;
      const double of_d = spline_grad_exponent(part.score[at], e, start.inverse, large, of_large, of_rest, complement);
      of_temperature -= e == 0 ? 0.0 : of_d * d;
      if (args.grad_input == nullptr) return;
      double of_input = of_d * beta;
      if (args.rows.is_probs) {
        const double p = load_number(args.rows.input, args.rows.storage, part.offset + c);
        of_input = p == 0 ? 0.0 : of_input / p;  // not defined at 0
      }
      store_number(of_input, args.grad_input, args.rows.storage, part.offset + c);
    });
  });
  if (sums.at == nullptr) return;
  moments.finish(sums);
  sums.add(0, of_factor);
  sums.add(1, of_temperature / args.rows.temperature);
  sums.add(2, of_floor);
}

template <bool kept>
__global__ __launch_bounds__(kBlock, 2) void spline_log_probs_kernel(const __grid_constant__ SplineInput rows,
                                                                     SplinePlan plan, double* output, double* scratch) {
  __shared__ SplineShared<1, kept> shared;
  const SplineBlock<1, kept> block(shared, plan, scratch);
  block.each_row(rows, [&](const SplinePart& part, int64_t, bool) {
    const SplineStart start = block.start(rows, part);
    part.each([&](int c, int at) {
      const double p = spline_probability(bounded_exponential(part.d[at]), start.row, kept_bits(rows));
      output[part.offset + c] = spline_features(p, start.row).x;
    });
  });
}

}  // namespace

SplineSizes spline_sizes(int64_t rows, int64_t classes, int64_t numbers, bool by_class) {
  const SplinePlan plan = plan_spline(rows, classes, numbers, by_class);
  return {plan.grid * kBlock, plan.grid * (kBlock / plan.lanes), plan.in_shared ? 0 : plan.grid * 2 * classes};
}

int spline_map_forward(const SplineMapForward& args, double* scratch, void* stream) {
  if (args.rows.rows == 0) return cudaSuccess;
  const SplinePlan plan = plan_spline(args.rows.rows, args.rows.classes);
  return launch(plan.in_shared ? spline_map_forward_kernel<true> : spline_map_forward_kernel<false>, plan.grid, kBlock,
                stream, args, plan, scratch);
}

int spline_map_backward(const SplineMapBackward& args, const SplineSums& sums, double* scratch, void* stream) {
  if (args.rows.rows == 0) return cudaSuccess;
  const SplinePlan plan = plan_spline(args.rows.rows, args.rows.classes, sums.numbers, sums.of_classes != nullptr);
  return launch(plan.in_shared ? spline_map_backward_kernel<true> : spline_map_backward_kernel<false>, plan.grid,
                kBlock, stream, args, plan, sums, scratch);
}

int spline_log_probs(const SplineInput& rows, double* output, double* scratch, void* stream) {
  if (rows.rows == 0) return cudaSuccess;
  const SplinePlan plan = plan_spline(rows.rows, rows.classes);
  return launch(plan.in_shared ? spline_log_probs_kernel<true> : spline_log_probs_kernel<false>, plan.grid, kBlock,
                stream, rows, plan, output, scratch);
}

}  // namespace focalkern::cuda
