// Rows of spline scaling: features, curve and scores of the classes that a thread has.
//
// A thread computes a row of up to eight classes by itself; longer rows are shared by lanes of a warp, a warp, or the
// block. Two numbers per class, d and its score, stay in shared memory between the passes over a row; for rows beyond
// 2048 classes they are in a workspace. Each thread reads only its own. Everything is computed in double.
#pragma once

#include "cuda/common.cuh"
#include "kernels/spline.h"
#include "math/calibration_map.h"
#include "math/spline.h"

namespace focalkern::cuda {

constexpr int kSplineSlots = 8;                              // classes per thread in shared memory
constexpr int64_t kSplineSumBytes = int64_t{128} << 20;      // bytes of the numbers that threads add up
constexpr int64_t kSplineScratchBytes = int64_t{256} << 20;  // bytes for the classes of long rows

struct SplinePlan {
  int lanes;  // threads that share a row
  int64_t grid;
  bool in_shared;  // d and the scores
};
inline SplinePlan plan_spline(int64_t rows, int64_t classes, int64_t numbers = 0, bool by_class = false) {
  const MapPlan map = plan_map(rows, classes, kSplineSlots, kSplineSlots);
  SplinePlan plan = {map.lanes, map.grid, map.capacity > 0};
  const auto limit = [&](int64_t budget, int64_t of_a_block) {
    const int64_t fit = of_a_block > 0 ? budget / of_a_block : plan.grid;
    if (plan.grid > fit) plan.grid = fit > 1 ? fit : 1;
  };
  const int64_t of_classes = by_class ? 2 * classes * (kBlock / plan.lanes) : 0;
  limit(kSplineSumBytes, 8 * (numbers * kBlock + of_classes));
  if (!plan.in_shared) limit(kSplineScratchBytes, 16 * classes);
  return plan;
}

__device__ __forceinline__ double load_number(const void* from, SplineStorage storage, int64_t at) {
  switch (storage) {
    case SplineStorage::kHalf:
      return load_as_compute(static_cast<const Half*>(from)[at]);
    case SplineStorage::kBFloat16:
      return load_as_compute(static_cast<const BFloat16*>(from)[at]);
    case SplineStorage::kFloat:
      return static_cast<const float*>(from)[at];
    default:
      return static_cast<const double*>(from)[at];
  }
}
__device__ __forceinline__ void store_number(double value, void* to, SplineStorage storage, int64_t at) {
  switch (storage) {
    case SplineStorage::kHalf:
      static_cast<Half*>(to)[at] = Store<Half>::from_compute(static_cast<float>(value));
      break;
    case SplineStorage::kBFloat16:
      static_cast<BFloat16*>(to)[at] = Store<BFloat16>::from_compute(static_cast<float>(value));
      break;
    case SplineStorage::kFloat:
      static_cast<float*>(to)[at] = static_cast<float>(value);
      break;
    default:
      static_cast<double*>(to)[at] = value;
  }
}

// ---- the curve -----------------------------------------------------------------------------------------------------

// A curve in shared memory. Knots beyond the last are infinite.
template <int kSize>
struct SplineTables {
  double knot[kSize];
  double power[kSize][4];

  // Every thread of the block calls it; the tables are valid after the next barrier.
  __device__ __forceinline__ void load(const SplineCurve& curve) {
    for (int i = static_cast<int>(threadIdx.x); i < kSize; i += kBlock) {
      knot[i] = i < curve.knots ? curve.positions[i] : kInfinity<double>;
    }
    for (int i = static_cast<int>(threadIdx.x); i < 4 * (curve.knots + 1); i += kBlock) {
      power[i / 4][i % 4] = curve.coefficients[i];
    }
  }
};

// The position of a class on the curve.
struct SplinePlace {
  int piece;
  double s;  // u minus the origin of the piece
};
template <int kSize>
__device__ __forceinline__ SplinePlace place_on(const SplineTables<kSize>& tables, int first_step, double u) {
  int piece = 0;  // the number of knots below u, by bisection
  for (int step = first_step; step > 0; step /= 2) {
    if (u > tables.knot[piece + step - 1]) piece += step;
  }
  return {piece, u - tables.knot[piece > 0 ? piece - 1 : 0]};
}

// ---- rows ----------------------------------------------------------------------------------------------------------

// A thread's part of a row: classes lane, lane + lanes, ... .
struct SplinePart {
  int lane;
  int lanes;
  int classes;     // 0 in a row beyond the last
  int64_t offset;  // start of the row in [rows, classes]
  double* d;       // one number for each of the thread's classes, kBlock apart
  double* score;

  template <typename Function>
  __device__ __forceinline__ void each(Function f) const {
    int at = 0;
    for (int c = lane; c < classes; c += lanes, at += kBlock) f(c, at);
  }
};

// The results of passes 1 and 2.
struct SplineStart {
  double rest;     // S
  double inverse;  // 1 / (1 + S)
  SplineRow<double> row;
  bool valid;
};

// The quantities of one class.
struct SplineEntry {
  double e;
  double p;
  SplineFeatures<double> features;
  SplinePlace place;
};

__device__ __forceinline__ uint64_t kept_bits(const SplineInput& input) {
  return ~uint64_t{0} << (input.in_steps ? 22 : 0);
}

// The shared memory of a kernel: kSize entries of a curve, and the classes of a row if they fit (`kept`).
template <int kSize, bool kept>
struct SplineShared {
  static constexpr int kSlots = kept ? kSplineSlots * kBlock : 1;
  double d[kSlots];
  double score[kSlots];
  double reduced[kWarpsPerBlock];
  SplineTables<kSize> tables;
};

// A block's memory and its loop over rows.
template <int kSize, bool kept>
struct SplineBlock {
  SplineShared<kSize, kept>& shared;
  SplinePlan plan;
  RowGroup group;
  int first_step;  // steps of the bisection of the knots
  double* scratch;

  __device__ __forceinline__ SplineBlock(SplineShared<kSize, kept>& shared, const SplinePlan& plan, double* scratch)
      : shared(shared), plan(plan), group{plan.lanes, shared.reduced}, first_step(0), scratch(scratch) {}

  __device__ __forceinline__ void load(const SplineCurve& curve) {
    shared.tables.load(curve);
    int pieces = 1;
    while (pieces < curve.knots + 1) pieces *= 2;
    first_step = pieces / 2;
    __syncthreads();
  }

  __device__ __forceinline__ int rows_at_once() const { return kBlock / plan.lanes; }
  // Number of this thread's group in the grid.
  __device__ __forceinline__ int64_t group_number() const {
    return static_cast<int64_t>(blockIdx.x) * rows_at_once() + static_cast<int>(threadIdx.x) / plan.lanes;
  }

  // Calls f(part, row, exists) for every row of the group; all threads of the block call f equally often.
  template <typename Function>
  __device__ __forceinline__ void each_row(const SplineInput& input, Function f) const {
    const int thread = static_cast<int>(threadIdx.x);
    SplinePart part;
    part.lanes = plan.lanes;
    part.lane = thread & (plan.lanes - 1);
    if constexpr (kept) {
      part.d = shared.d + thread;
      part.score = shared.score + thread;
    } else {
      part.d = scratch + static_cast<int64_t>(blockIdx.x) * 2 * input.classes + thread;
      part.score = part.d + input.classes;
    }
    const int64_t stride = static_cast<int64_t>(gridDim.x) * rows_at_once();
    for (int64_t first = static_cast<int64_t>(blockIdx.x) * rows_at_once(); first < input.rows; first += stride) {
      const int64_t row = first + thread / plan.lanes;
      const bool exists = row < input.rows;
      part.classes = exists ? static_cast<int>(input.classes) : 0;
      part.offset = row * input.classes;
      f(part, row, exists);
    }
  }

  // Reads the logits of a row into part.d and returns the largest. With `checks`, `valid` says whether the row is
  // valid.
  template <bool checks>
  __device__ __forceinline__ double read_row(const SplineInput& input, const SplinePart& part, double tolerance,
                                             bool* valid) const {
    double top = -kInfinity<double>, total = 0, wrong = 0;
    part.each([&](int c, int at) {
      double z = load_number(input.input, input.storage, part.offset + c);
      if (input.is_probs) {
        total += z;
        z = logit_of_probability(z);
      }
      if (z != z) wrong = 1;  // also if a probability is negative
      part.d[at] = z;
      top = fmax(top, z);
    });
    top = group.max(top);
    if constexpr (checks) {
      wrong = group.sum(wrong);
      *valid = wrong == 0 && top > -kInfinity<double> && top < kInfinity<double>;
      if (input.is_probs) {
        total = group.sum(total);
        *valid = *valid && total >= 1 - tolerance && total <= 1 + tolerance;
      }
    }
    return top;
  }

  // Passes 1 and 2: d of the classes and the sum over all but the largest.
  template <bool checks = false>
  __device__ __forceinline__ SplineStart start(const SplineInput& input, const SplinePart& part,
                                               double tolerance = 0) const {
    SplineStart result;
    result.valid = true;
    const double top = read_row<checks>(input, part, tolerance, &result.valid);
    const double beta = inverse_temperature<double>(input.temperature);
    const double grid = input.in_steps ? kSplineGrid : 0.0;
    double rest = 0, ties = 0;
    part.each([&](int, int at) {
      const double d = spline_exponent(part.d[at], top, beta, grid);
      part.d[at] = d;
      rest += d < 0 ? bounded_exponential(d) : 0.0;
      ties += d < 0 ? 0.0 : 1.0;
    });
    result.rest = group.sum(rest);
    result.rest += group.sum(ties) - 1.0;
    result.inverse = 1.0 / (1.0 + result.rest);
    result.row = spline_row(result.rest, input.floor, static_cast<double>(input.classes));
    return result;
  }

  __device__ __forceinline__ SplineEntry entry(const SplineInput& input, const SplineStart& start, double d) const {
    SplineEntry result;
    result.e = bounded_exponential(d);
    result.p = spline_probability(result.e, start.row, kept_bits(input));
    result.features = spline_features(result.p, start.row);
    result.place = place_on(shared.tables, first_step, result.features.u);
    return result;
  }

  __device__ __forceinline__ double value(const SplinePlace& place) const {
    const double* c = shared.tables.power[place.piece];
    return spline_value(c[0], c[1], c[2], c[3], place.s);
  }
  __device__ __forceinline__ double slope(const SplinePlace& place) const {
    const double* c = shared.tables.power[place.piece];
    return spline_slope(c[1], c[2], c[3], place.s);
  }

  // Pass 3: replaces part.score by the scores and returns the largest. take(c, entry, score) is called for each.
  template <typename Take>
  __device__ __forceinline__ double scores(const SplineInput& input, const SplineScores& args, const SplineStart& start,
                                           const SplinePart& part, Take take) const {
    double largest = -kInfinity<double>;
    part.each([&](int c, int at) {
      const double d = part.d[at];
      const SplineEntry of = entry(input, start, d);
      double score = value(of.place) + (args.factor + (args.weight != nullptr ? args.weight[c] : 0.0)) * of.features.x;
      if (args.bias != nullptr) score += args.bias[c];
      if (args.keep_zeros && d == -kInfinity<double>) score = -kInfinity<double>;
      if (args.extra != nullptr) score += args.extra[part.offset + c];
      part.score[at] = score;
      largest = fmax(largest, score);
      take(c, of, score);
    });
    return group.max(largest);
  }

  // Pass 4: replaces the scores by exp(score - largest), unless `keep`; returns their sum.
  template <bool keep>
  __device__ __forceinline__ double exponentials(const SplinePart& part, double largest) const {
    double sum = 0;
    part.each([&](int, int at) {
      const double p = bounded_exponential(part.score[at] - largest);
      sum += p;
      if constexpr (!keep) part.score[at] = p;
    });
    return group.sum(sum);
  }
};

// ---- sums over rows ------------------------------------------------------------------------------------------------

// The numbers of a thread (kernels/spline.h).
struct SplineThreadSums {
  double* at;  // numbers of this thread; null if not needed
  int64_t stride;

  __device__ __forceinline__ explicit SplineThreadSums(const SplineSums& sums)
      : at(sums.of_threads == nullptr ? nullptr
                                      : sums.of_threads + static_cast<int64_t>(blockIdx.x) * kBlock + threadIdx.x),
        stride(static_cast<int64_t>(gridDim.x) * kBlock) {}

  __device__ __forceinline__ void add(int64_t number, double value) const { at[number * stride] += value; }
};

// Adds g s^k by piece. With many classes, most lie left of the first knot; their sums stay in registers.
struct SplineMoments {
  double left[4] = {0, 0, 0, 0};

  __device__ __forceinline__ void add(const SplineThreadSums& sums, const SplinePlace& place, double g) {
    const double with_s = g * place.s, with_square = with_s * place.s, with_cube = with_square * place.s;
    if (place.piece == 0) {
      left[0] += g;
      left[1] += with_s;
      left[2] += with_square;
      left[3] += with_cube;
      return;
    }
    const int64_t number = kSplineOfRows + 4 * place.piece;
    sums.add(number, g);
    sums.add(number + 1, with_s);
    sums.add(number + 2, with_square);
    sums.add(number + 3, with_cube);
  }
  __device__ __forceinline__ void finish(const SplineThreadSums& sums) const {
#pragma unroll
    for (int k = 0; k < 4; ++k) sums.add(kSplineOfRows + k, left[k]);
  }
};

// Adds g x and g by class to the numbers of a group.
struct SplineClassSums {
  double* at;  // [2, classes]; null if not needed
  int64_t classes;

  __device__ __forceinline__ SplineClassSums(const SplineSums& sums, int64_t group, int64_t classes)
      : at(sums.of_classes == nullptr ? nullptr : sums.of_classes + group * 2 * classes), classes(classes) {}

  __device__ __forceinline__ void add(int c, double g, double x) const {
    if (at == nullptr) return;
    at[c] += g * x;
    at[classes + c] += g;
  }
};

}  // namespace focalkern::cuda
