// Sums over rows for the fit of spline scaling: the loss with its derivatives in the curve, in a vector and for a
// matrix, and the loss of the temperature. [rows, classes] -> the numbers of each thread (kernels/spline.h).
//
// Passes over a row (spline_row.cuh): 1. the largest logit   2. the sum of exp over the others   3. scores 4. their
// softmax   5. the sums. The temperature needs pass 1, and pass 2 with its sum for each 1/T. Only pass 1 reads the
// input.

#include "cuda/spline_row.cuh"

namespace focalkern::cuda {
namespace {

constexpr int kTableSize = kSplineMaxFitKnots + 1;

// Valid in the thread that has the target's class.
struct SplineTarget {
  bool mine = false;
  double score = 0;
  double x = 0;
  SplinePlace place = {0, 0};
};

// Passes 1 to 4, after which part.score is the softmax times the returned sum.
struct SplineLoss {
  SplineStart start;
  double sum;
  double loss;  // valid in the thread that has the target
};
template <bool kept>
__device__ __forceinline__ SplineLoss softmax_and_loss(const SplineBlock<kTableSize, kept>& block,
                                                       const SplineFit& args, const SplinePart& part, int64_t label,
                                                       SplineTarget& target) {
  SplineLoss result;
  result.start = block.start(args.rows, part);
  const double largest =
      block.scores(args.rows, args.scores, result.start, part, [&](int c, const SplineEntry& of, double score) {
        if (c == label) target = {true, score, of.features.x, of.place};
      });
  result.sum = block.template exponentials<false>(part, largest);
  result.loss = largest - target.score + logarithm(result.sum);
  return result;
}

template <bool kept>
__global__ __launch_bounds__(kBlock, 1) void spline_curve_sums_kernel(const __grid_constant__ SplineFit args,
                                                                      SplinePlan plan, const double* basis,
                                                                      double* means, SplineSums sums_of,
                                                                      double* scratch) {
  __shared__ SplineShared<kTableSize, kept> shared;
  __shared__ double terms[kTableSize][4][kSplineMaxFitKnots];  // the basis; 0 beyond the last knot
  const int knots = static_cast<int>(args.curve.knots);
  for (int i = static_cast<int>(threadIdx.x); i < 4 * kTableSize * kSplineMaxFitKnots; i += kBlock) {
    const int j = i % kSplineMaxFitKnots, of_piece = i / kSplineMaxFitKnots;
    terms[of_piece / 4][of_piece % 4][j] = j < knots && of_piece / 4 <= knots ? basis[of_piece * knots + j] : 0.0;
  }
  SplineBlock<kTableSize, kept> block(shared, plan, scratch);
  block.load(args.curve);
  const SplineThreadSums sums(sums_of);
  double nll = 0, squares = 0, of_target_x = 0;
  double left[5] = {0, 0, 0, 0, 0};  // p s^k for k < 3 and p x s^k for k < 2, left of the first knot
  block.each_row(args.rows, [&](const SplinePart& part, int64_t row, bool exists) {
    const double weight = exists ? args.targets.weight[row] : 0.0;
    SplineTarget target;
    const SplineLoss loss = softmax_and_loss(block, args, part, exists ? args.targets.target[row] : -1, target);
    const double share = 1 / loss.sum;
    const bool counts = weight != 0;
    double mean[kTableSize];  // of x, then of the functions of the basis
#pragma unroll
    for (int j = 0; j < kTableSize; ++j) mean[j] = 0;
    double p0 = 0, p1 = 0;
    part.each([&](int, int at) {
      const SplineEntry of = block.entry(args.rows, loss.start, part.d[at]);
      const double p = part.score[at] * share, x = of.features.x, s = of.place.s;
      const double q = counts ? weight * p : 0.0, with_s = q * s;  // a row of weight 0 may hold any logits
      squares += q * x * x;
      mean[0] += p * x;
      if (of.place.piece == 0) {
        p0 += p;
        p1 += p * s;
        left[0] += q;
        left[1] += with_s;
        left[2] += with_s * s;
        left[3] += q * x;
        left[4] += with_s * x;
        return;
      }
      const double (&of_piece)[4][kSplineMaxFitKnots] = terms[of.place.piece];
#pragma unroll
      for (int j = 0; j < kSplineMaxFitKnots; ++j) {
        mean[1 + j] += p * spline_value(of_piece[0][j], of_piece[1][j], of_piece[2][j], of_piece[3][j], s);
      }
      const int64_t number = kSplineOfRows + kSplineCurveNumbers * of.place.piece;
      double power = q;
#pragma unroll
      for (int k = 0; k < 7; ++k, power *= s) {
        sums.add(number + k, power);
        if (k < 4) sums.add(number + 8 + k, power * x);
      }
    });
#pragma unroll
    for (int j = 0; j < kSplineMaxFitKnots; ++j) mean[1 + j] += p0 * terms[0][0][j] + p1 * terms[0][1][j];
#pragma unroll
    for (int j = 0; j < kTableSize; ++j) {
      if (j > knots) break;
      const double of_row = block.group.sum(mean[j]);
      if (exists && part.lane == 0) means[row * (knots + 1) + j] = counts ? of_row : 0.0;
    }
    if (!target.mine || !counts) return;
    nll += weight * loss.loss;
    of_target_x += weight * target.x;
    const int64_t number = kSplineOfRows + kSplineCurveNumbers * target.place.piece + 12;
    double power = weight;
#pragma unroll
    for (int k = 0; k < 4; ++k, power *= target.place.s) sums.add(number + k, power);
  });
  sums.add(0, nll);
  sums.add(1, squares);
  sums.add(2, of_target_x);
#pragma unroll
  for (int k = 0; k < 3; ++k) sums.add(kSplineOfRows + k, left[k]);
  sums.add(kSplineOfRows + 8, left[3]);
  sums.add(kSplineOfRows + 9, left[4]);
}

template <bool kept>
__global__ __launch_bounds__(kBlock, 2) void spline_linear_sums_kernel(const __grid_constant__ SplineFit args,
                                                                       SplinePlan plan, double* slopes,
                                                                       SplineSums sums_of, double* scratch) {
  __shared__ SplineShared<kTableSize, kept> shared;
  SplineBlock<kTableSize, kept> block(shared, plan, scratch);
  block.load(args.curve);
  const SplineThreadSums sums(sums_of);
  const SplineClassSums of_classes(sums_of, block.group_number(), args.rows.classes);
  double nll = 0, with_x = 0;
  SplineMoments moments;
  block.each_row(args.rows, [&](const SplinePart& part, int64_t row, bool exists) {
    const double weight = exists ? args.targets.weight[row] : 0.0;
    const int64_t label = exists ? args.targets.target[row] : -1;
    SplineTarget target;
    const SplineLoss loss = softmax_and_loss(block, args, part, label, target);
    if (target.mine) nll += weight * loss.loss;
    const double share = weight / loss.sum;
    part.each([&](int c, int at) {
      const SplineEntry of = block.entry(args.rows, loss.start, part.d[at]);
      const double r = part.score[at] * share - (c == label ? weight : 0.0);
      if (slopes != nullptr) slopes[part.offset + c] = r;
      with_x += r * of.features.x;
      moments.add(sums, of.place, r);
      of_classes.add(c, r, of.features.x);
    });
  });
  moments.finish(sums);
  sums.add(0, nll);
  sums.add(1, with_x);
}

template <bool kept>
__global__ __launch_bounds__(kBlock, 2) void spline_temperature_sums_kernel(
    const __grid_constant__ SplineInput rows, const __grid_constant__ SplineTargets targets, const double* betas,
    int64_t n_betas, SplinePlan plan, SplineSums sums_of, double* scratch) {
  __shared__ SplineShared<1, kept> shared;
  const SplineBlock<1, kept> block(shared, plan, scratch);
  const SplineThreadSums sums(sums_of);
  block.each_row(rows, [&](const SplinePart& part, int64_t row, bool exists) {
    const int64_t label = exists ? targets.target[row] : -1;
    bool valid;
    const double top = block.template read_row<false>(rows, part, 0, &valid);
    bool mine = false;
    double of_target = 0;
    part.each([&](int c, int at) {
      const double fall = part.d[at] - top;
      part.d[at] = fall > -kSplineLowestFall ? fall : -kSplineLowestFall;
      if (c != label) return;
      mine = true;
      of_target = part.d[at];
    });
    for (int64_t b = 0; b < n_betas; ++b) {
      const double beta = betas[b];
      double sum = 0, with_fall = 0;
      part.each([&](int, int at) {
        const double fall = part.d[at], e = bounded_exponential(fall * beta);
        sum += e;
        with_fall += e * fall;
      });
      sum = block.group.sum(sum);
      with_fall = block.group.sum(with_fall);
      if (!mine) continue;
      const auto loss =
          spline_temperature_loss(of_target, beta, sum, with_fall, rows.floor, static_cast<double>(rows.classes));
      sums.add(b, targets.weight[row] * loss.value);
      sums.add(n_betas + b, targets.weight[row] * loss.slope);
    }
  });
}

}  // namespace

int spline_curve_sums(const SplineFit& args, const double* basis, double* means, const SplineSums& sums,
                      double* scratch, void* stream) {
  if (args.rows.rows == 0) return cudaSuccess;
  const SplinePlan plan = plan_spline(args.rows.rows, args.rows.classes, sums.numbers);
  return launch(plan.in_shared ? spline_curve_sums_kernel<true> : spline_curve_sums_kernel<false>, plan.grid, kBlock,
                stream, args, plan, basis, means, sums, scratch);
}

int spline_linear_sums(const SplineFit& args, double* slopes, const SplineSums& sums, double* scratch, void* stream) {
  if (args.rows.rows == 0) return cudaSuccess;
  const SplinePlan plan = plan_spline(args.rows.rows, args.rows.classes, sums.numbers, sums.of_classes != nullptr);
  return launch(plan.in_shared ? spline_linear_sums_kernel<true> : spline_linear_sums_kernel<false>, plan.grid, kBlock,
                stream, args, plan, slopes, sums, scratch);
}

int spline_temperature_sums(const SplineInput& rows, const SplineTargets& targets, const double* betas, int64_t n_betas,
                            const SplineSums& sums, double* scratch, void* stream) {
  if (rows.rows == 0) return cudaSuccess;
  const SplinePlan plan = plan_spline(rows.rows, rows.classes, sums.numbers);
  return launch(plan.in_shared ? spline_temperature_sums_kernel<true> : spline_temperature_sums_kernel<false>,
                plan.grid, kBlock, stream, rows, targets, betas, n_betas, plan, sums, scratch);
}

}  // namespace focalkern::cuda
