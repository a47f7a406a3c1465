// Distributes rows of logits over groups of threads: lanes of a warp, a warp, or the block. If classes are further
// apart than rows, one thread takes a row, so that a warp reads adjacent addresses.
#pragma once

#include <cstddef>
#include <type_traits>

#include "cuda/common.cuh"
#include "cuda/grid_sum.cuh"
#include "cuda/row_loss.cuh"
#include "kernels/row_loss.h"

namespace focalkern::cuda {

constexpr int kNoClass = INT32_MAX;  // less than any class, so that the first class replaces it

// The plan of a launch, and the offsets of its rows.
struct RowGeometry {
  int lanes;
  int lane_bits;
  int64_t tiles;  // tiles of kBlock / lanes rows
  int64_t grid;
  RowOffset logits;
  RowOffset target_probs;
  RowOffset grad_logits;
};

// A row, as one thread of its group sees it.
template <typename Scalar>
struct Row {
  using Real = compute_t<Scalar>;
  int64_t row;
  const Scalar* logits;
  int64_t class_stride;
  int classes;
  Probabilities<Scalar> targets;  // or null, for labels
  int64_t target_stride;
  int label;
  bool is_live;
  int index;
  int lanes;

  __device__ __forceinline__ Real z(int64_t j) const { return load_as_compute(logits[j * class_stride]); }
};

// A row, which may lie beyond the last one, as the thread `index` of `lanes` sees it.
template <typename Scalar>
__device__ __forceinline__ Row<Scalar> row_at(const RowLossArgs<Scalar>& args, const RowGeometry& geometry, int64_t row,
                                              int index, int lanes) {
  Row<Scalar> result = {};
  result.row = row;
  result.index = index;
  result.lanes = lanes;
  result.class_stride = args.layout.class_stride;
  result.target_stride = args.target_layout.class_stride;
  result.classes = static_cast<int>(args.classes);
  result.label = kIgnored;
  if (result.row < args.rows) {
    result.logits = args.logits + geometry.logits(result.row);
    if (args.target_probs) {
      result.targets = args.target_probs.from(geometry.target_probs(result.row));
      result.label = 0;
    } else {
      result.label = read_label(args, result.row);
    }
  }
  result.is_live = result.label >= 0;
  return result;
}

// Row number `thread of the block / lanes` of a tile.
template <typename Scalar>
__device__ __forceinline__ Row<Scalar> row_of(const RowLossArgs<Scalar>& args, const RowGeometry& geometry,
                                              int64_t tile) {
  const int thread = static_cast<int>(threadIdx.x);
  return row_at(args, geometry, tile * (kBlock >> geometry.lane_bits) + (thread >> geometry.lane_bits),
                thread & (geometry.lanes - 1), geometry.lanes);
}

// The sums of the rows of a tile, for two tiles in turn, so that one barrier per tile suffices.
template <typename Sums>
using SumsOfTiles = Sums[2][kBlock / 2];

// Gives each row of a tile to a thread of its own, with its sums: if the first lane of each group finished its row, the
// rest of the warp would wait. Threads without a row get one beyond the last. `turn` is 0 and 1 for alternate tiles.
template <typename Scalar, typename Sums>
__device__ __forceinline__ void take_row(const RowLossArgs<Scalar>& args, const RowGeometry& geometry, int64_t tile,
                                         SumsOfTiles<Sums>& kept, int turn, Row<Scalar>& row, Sums& sums) {
  if (geometry.lanes == 1) return;
  const int thread = static_cast<int>(threadIdx.x), rows = kBlock >> geometry.lane_bits;
  if (row.index == 0) kept[turn][thread >> geometry.lane_bits] = sums;
  __syncthreads();
  row.row = args.rows;
  if (thread < rows) {
    row = row_at(args, geometry, tile * rows + thread, 0, 1);
    sums = kept[turn][thread];
  }
}

// ---- the classes of a thread ---------------------------------------------------------------------------------------

// A row of adjacent classes that a warp or the block shares: 16-byte vectors, the classes before the first boundary,
// and those after the last.
struct Vectors {
  int head;  // classes before the vectors
  int count;
  int tail;  // the first class after the vectors

  template <typename Scalar>
  __device__ __forceinline__ explicit Vectors(const Row<Scalar>& row) {
    const int to_boundary = elements_to_boundary(row.logits);
    head = to_boundary < row.classes ? to_boundary : row.classes;
    count = (row.classes - head) / kVectorSize<Scalar>;
    tail = head + count * kVectorSize<Scalar>;
  }
};

template <typename Scalar>
__device__ __forceinline__ bool is_in_vectors(const Row<Scalar>& row) {
  return row.lanes >= kWarp && row.class_stride == 1;
}

// Calls take(logits, first, step) for all of a thread's classes, several at a time: logits[k] belongs to class first +
// k * step. A thread gets its classes in ascending order. If take_two(logits, first, more, next) is passed, it gets two
// vectors per call.
template <typename Scalar, typename Take, typename TakeTwo = std::nullptr_t>
__device__ __forceinline__ void each_class(const Row<Scalar>& row, Take take, TakeTwo take_two = nullptr) {
  using Real = compute_t<Scalar>;
  constexpr int kSize = kVectorSize<Scalar>;
  if (!row.is_live) return;
  if (is_in_vectors(row)) {
    const Vectors vectors(row);
    if (row.index < vectors.head) {
      const Real values[1] = {load_as_compute(row.logits[row.index])};
      take(values, row.index, 1);
    }
    Real values[kSize];
    const Scalar* at = row.logits + vectors.head + row.index * kSize;
    int vector = row.index;
    // Two vectors at a time while the whole warp has two.
    for (; (vector | (kWarp - 1)) + row.lanes < vectors.count; vector += 2 * row.lanes, at += 2 * row.lanes * kSize) {
      const uint4 one = load_vector(at), other = load_vector(at + row.lanes * kSize);
      unpack<Scalar>(one, values);
      if constexpr (std::is_same_v<TakeTwo, std::nullptr_t>) {
        take(values, vectors.head + vector * kSize, 1);
        unpack<Scalar>(other, values);
        take(values, vectors.head + (vector + row.lanes) * kSize, 1);
      } else {
        Real more[kSize];
        unpack<Scalar>(other, more);
        take_two(values, vectors.head + vector * kSize, more, vectors.head + (vector + row.lanes) * kSize);
      }
    }
    for (; vector < vectors.count; vector += row.lanes, at += row.lanes * kSize) {
      unpack<Scalar>(load_vector(at), values);
      take(values, vectors.head + vector * kSize, 1);
    }
    // The classes before and after the vectors: fewer than a warp has lanes.
    if (vectors.tail + row.index < row.classes) {
      const Real values[1] = {load_as_compute(row.logits[vectors.tail + row.index])};
      take(values, vectors.tail + row.index, 1);
    }
    return;
  }
  constexpr int kUnroll = 4;
  const int64_t step = row.lanes * row.class_stride;
  const Scalar* at = row.logits + row.index * row.class_stride;
  int j = row.index;
  for (; j + (kUnroll - 1) * row.lanes < row.classes; j += kUnroll * row.lanes) {
    Real values[kUnroll];
#pragma unroll
    for (int k = 0; k < kUnroll; ++k, at += step) values[k] = load_as_compute(*at);
    take(values, j, row.lanes);
  }
  for (; j < row.classes; j += row.lanes, at += step) {
    const Real values[1] = {load_as_compute(*at)};
    take(values, j, row.lanes);
  }
}

// Whether this thread computes the class.
template <typename Scalar>
__device__ __forceinline__ bool is_mine(const Row<Scalar>& row, int j) {
  if (!is_in_vectors(row)) return (j & (row.lanes - 1)) == row.index;
  const Vectors vectors(row);
  if (j < vectors.head) return j == row.index;
  if (j >= vectors.tail) return j - vectors.tail == row.index;
  return (((j - vectors.head) / kVectorSize<Scalar>)&(row.lanes - 1)) == row.index;
}

// Writes the gradient of a row in the order in which each_class reads it.
template <typename Scalar>
struct RowWriter {
  Scalar* grad;
  int64_t stride;
  bool is_wide;  // within the vectors of the logits

  __device__ __forceinline__ RowWriter(const Row<Scalar>& row, Scalar* grad, int64_t stride)
      : grad(grad),
        stride(stride),
        is_wide(is_in_vectors(row) && stride == 1 && elements_to_boundary(grad) == elements_to_boundary(row.logits)) {}

  template <int count>
  __device__ __forceinline__ void write(const Scalar (&values)[count], int first, int step) const {
    if constexpr (count == kVectorSize<Scalar>) {
      if (is_wide) {
        Elements<Scalar> vector;
#pragma unroll
        for (int k = 0; k < count; ++k) vector.at[k] = values[k];
        store_vector(grad + first, bit_cast<uint4>(vector));
        return;
      }
    }
    Scalar* at = grad + first * stride;
#pragma unroll
    for (int k = 0; k < count; ++k, at += step * stride) *at = values[k];
  }
};

// The base of running sums, a whole number. It changes less often than the maximum, and every change rescales the sum:
// many rescalings by factors near 1 would accumulate rounding errors.
template <typename Real>
__device__ __forceinline__ Real coarse_base(Real max) {
  return exp_base(floor(max));
}

// The second of two sums over the classes of a row.
enum class SecondSum {
  kNone,
  kSquares,  // of e^(2 (z - max))
  kFall,     // of (max - z) e^(z - max)
};

// The largest logit of a row, and the sums over all other classes. If several classes are the largest, only one is
// excluded.
template <typename Real>
struct SumsBesideLargest {
  Real max;
  Real rest;    // sum of e^(z - max)
  Real second;  // 0 without a second sum
  int largest;  // the first of the largest classes; only with a second sum
};

// The largest number of classes per thread that are added without compensation. Their rounding errors stay below 1e-6
// of the sum even if all have the same sign.
constexpr int kFewClasses = 64;

// The sum of e^(z - base) over the classes of a thread, without the first of its largest, for base = coarse_base(max).
// With a second sum, also that sum, relative to the base, and the index of the largest class.
template <typename Real, SecondSum kSecond = SecondSum::kNone, typename Total = CompensatedSum<Real>>
struct SumBesideLargest {
  static constexpr bool kSquares = kSecond == SecondSum::kSquares;
  static constexpr bool kFall = kSecond == SecondSum::kFall;
  static constexpr Real kFar = Real(1e4);  // e^-kFar is 0; a factor of e^-infinity must not be infinite

  Real max = -kInfinity<Real>;
  Total rest;
  Total second;
  int largest = kNoClass;

  // Reads all classes of the thread and updates the maximum and the sums over the others.
  template <typename Scalar>
  __device__ __forceinline__ void read(const Row<Scalar>& row) {
    each_class(
        row, [&](const auto& values, int first, int step) { add(values, first, step); },
        [&](const auto& values, int first, const auto& more, int next) { add_two(values, first, more, next); });
  }

  template <int count>
  __device__ __forceinline__ void add(const Real (&values)[count], int first, int step) {
    Real others[count];
    const Real before = max;
    set_aside(values, first, step, others);
    add_sums(before, sums_of(others));
  }
  // Adds two vectors with one rescaling of the sums.
  template <int count>
  __device__ __forceinline__ void add_two(const Real (&values)[count], int first, const Real (&more)[count], int next) {
    Real others[count], more_others[count];
    const Real before = max;
    set_aside(values, first, 1, others);
    set_aside(more, next, 1, more_others);
    const Sums one = sums_of(others), two = sums_of(more_others);
    add_sums(before, {one.rest + two.rest, one.second + two.second});
  }

  struct Sums {
    Real rest;
    Real second;
  };

  // Updates the thread's maximum with these values. `others` gets the values to add: where a value exceeds the maximum,
  // the previous maximum takes its place.
  template <int count>
  __device__ __forceinline__ void set_aside(const Real (&values)[count], int first, int step, Real (&others)[count]) {
#pragma unroll
    for (int k = 0; k < count; ++k) {
      // A comparison with NaN is false, so a NaN goes to `others`.
      const bool is_above = values[k] > max;
      others[k] = is_above ? max : values[k];
      max = is_above ? values[k] : max;
      if constexpr (kSecond != SecondSum::kNone) largest = is_above ? first + k * step : largest;
    }
  }
  template <int count>
  __device__ __forceinline__ Sums sums_of(const Real (&others)[count]) const {
    const Real base = coarse_base(max);
    Sums sums = terms(others[0] - base);
#pragma unroll
    for (int k = 1; k < count; ++k) {
      const Sums more = terms(others[k] - base);
      sums.rest += more.rest;
      if constexpr (kSecond != SecondSum::kNone) sums.second += more.second;
    }
    return sums;
  }
  // x: logit of a class minus the base
  static __device__ __forceinline__ Sums terms(Real x) {
    const Real e = summand(x);
    return {e, kFall ? e * fmin(-x, kFar) : e * e};
  }
  // before: the maximum to which the previous sums are relative
  __device__ __forceinline__ void add_sums(Real before, const Sums& sums) {
    const Real shrink = summand(floor(before) - coarse_base(max));
    if constexpr (kSquares) second.add(shrink * shrink, sums.second);
    if constexpr (kFall) {
      second.add(shrink, sums.second + shrink * (coarse_base(max) - coarse_base(before)) * rest.sum);
    }
    rest.add(shrink, sums.rest);
  }

  // The sums of the row, in units of e^(z - max).
  __device__ __forceinline__ SumsBesideLargest<Real> of(const RowGroup& group) const {
    SumsBesideLargest<Real> row = {group.max(max), Real(0), Real(0), kNoClass};
    const Real base = exp_base(row.max);
    const Real shrink = exponential(floor(max) - base);
    const Real own = exponential(max - base);  // the thread's largest class
    if constexpr (kSecond != SecondSum::kNone) {
      row.largest = group.min(max == row.max ? largest : kNoClass);
      const Real left_out = largest == row.largest ? Real(0) : own;
      row.rest = group.sum(rest.sum * shrink + left_out);
      if constexpr (kSquares) {
        row.second = group.sum(second.sum * (shrink * shrink) + left_out * left_out);
      } else {
        const Real fall = second.sum + fmin(base - floor(max), kFar) * rest.sum;
        row.second = group.sum(fall * shrink + left_out * fmin(base - max, kFar));
      }
    } else {
      const bool has_largest = max == row.max;
      row.rest = group.sum(rest.sum * shrink + (has_largest ? Real(0) : own));
      row.rest += group.sum(has_largest ? Real(1) : Real(0)) - Real(1);
    }
    return row;
  }
};

// ---- host ----------------------------------------------------------------------------------------------------------

template <typename Scalar>
RowGeometry plan_groups(const RowLossArgs<Scalar>& args, const RowLayout& grad_layout) {
  const RowPlan plan = plan_rows(args.rows, args.classes, sizeof(Scalar), false, class_is_outermost(args));
  RowGeometry geometry = {plan.path == RowPath::kPixels ? 1 : plan.lanes,
                          plan.path == RowPath::kPixels ? 0 : plan.lane_bits,
                          0,
                          0,
                          RowOffset(args.layout),
                          RowOffset(args.target_layout),
                          RowOffset(grad_layout)};
  geometry.tiles = divide_up(args.rows, kBlock >> geometry.lane_bits);
  // One block even if there are no rows (it writes the sum 0), and one if there is no memory for more sums.
  geometry.grid = geometry.tiles < kMaxGrid ? geometry.tiles : kMaxGrid;
  if (geometry.grid < 1 || fits_one_block(args.rows, args.classes)) geometry.grid = 1;
  return geometry;
}

template <typename Scalar, typename... More>
int launch_forward(void (*kernel)(RowLossForward<Scalar>, RowGeometry, GridSum<compute_t<Scalar>>, More...),
                   const RowLossForward<Scalar>& args, GridSum<compute_t<Scalar>> totals, void* workspace, void* stream,
                   const More&... more) {
  const RowGeometry geometry = plan_groups(args, args.layout);
  const cudaError_t error = prepare_grid_sum(totals, geometry.grid, workspace, stream);
  return error != cudaSuccess ? error : launch(kernel, geometry.grid, kBlock, stream, args, geometry, totals, more...);
}

template <typename Scalar>
int launch_backward(void (*kernel)(RowLossBackward<Scalar>, RowGeometry), const RowLossBackward<Scalar>& args,
                    void* stream) {
  const RowGeometry geometry = plan_groups(args, args.grad_layout);
  return launch(kernel, geometry.grid, kBlock, stream, args, geometry);
}

}  // namespace focalkern::cuda
