// Focal loss of [rows, classes] logits in any of the layouts that RowLayout describes, forward and backward.
//
// Index targets without smoothing: one pass over the logits each way. A block takes tiles of rows; for each tile
//   forward:  threads share the rows out and reduce each to (max, sum exp(z - max)) over the classes other than the
//             target; then one thread per row turns that into the loss, the three numbers that are kept, and its share
//             of the sums. The last block to finish adds the shares up.
//   backward: one thread per row turns the three numbers into the factor of p_j; then the block writes
//             factor * p_j, or the target's own value, for every element.
// plan_rows in launch.h says which threads share a row: for short rows the whole block reads the tile as one run of
// vectors, for longer ones a group of lanes, a warp or the block reads a row, and where classes lie further apart than
// rows ([N, C, H, W]) a lane reads a row, so that a warp reads neighbours.
//
// Probability targets and label smoothing need the focal terms of every class: a plainer pair of kernels, which reads
// the logits twice forward and three times at most backward.

#include "cuda/common.cuh"
#include "cuda/grid_sum.cuh"
#include "kernels.h"
#include "math/focal.h"

namespace focalkern::cuda {
namespace {

// Blocks that a multiprocessor should hold at once: left to itself, the compiler may spill registers to make room for
// more of them.
template <typename Scalar>
constexpr int kBlocksAtOnce = sizeof(Scalar) == sizeof(double) ? 2 : 4;

// A label as a class, or why it is none.
constexpr int kIgnored = -1;
constexpr int kOutOfRange = -2;

template <typename Scalar>
__device__ __forceinline__ int read_label(const FocalLossArgs<Scalar>& args, int64_t row) {
  const int64_t label = args.labels[row];
  if (label == args.ignore_index) return kIgnored;
  return label < 0 || label >= args.classes ? kOutOfRange : static_cast<int>(label);
}

template <typename Scalar>
__device__ __forceinline__ compute_t<Scalar> gamma_at(const FocalLossArgs<Scalar>& args, int64_t row,
                                                      compute_t<Scalar> p) {
  if (args.edges != nullptr) return table_gamma(p, args.edges, args.gamma, args.n_bins);
  return args.gamma != nullptr ? args.gamma[row * args.gamma_stride] : args.gamma_value;
}

// RowLayout::row_offset without the 64-bit division, which would be a subroutine in every kernel: a quotient from the
// reciprocal, right to within one for as many rows as a double can count.
struct RowOffset {
  int64_t inner;
  int64_t outer_stride;
  int64_t inner_stride;
  double reciprocal;

  explicit RowOffset(const RowLayout& layout)
      : inner(layout.inner),
        outer_stride(layout.outer_stride),
        inner_stride(layout.inner_stride),
        reciprocal(1.0 / static_cast<double>(layout.inner)) {}

  __device__ __forceinline__ int64_t operator()(int64_t row) const {
    auto outer = static_cast<int64_t>(static_cast<double>(row) * reciprocal);
    int64_t rest = row - outer * inner;
    if (rest < 0) {
      outer -= 1;
      rest += inner;
    } else if (rest >= inner) {
      outer += 1;
      rest -= inner;
    }
    return outer * outer_stride + rest * inner_stride;
  }
};

// n / classes for the places of a tile, by multiplication: exact for as many as 2^31 / classes^2.
struct ClassDivider {
  uint32_t reciprocal;

  explicit ClassDivider(int64_t classes)
      : reciprocal(classes > 0 ? static_cast<uint32_t>(divide_up(int64_t{1} << 31, classes)) : 0) {}

  __device__ __forceinline__ int operator()(int n) const {
    return static_cast<int>(static_cast<uint64_t>(n) * reciprocal >> 31);
  }
};

// How a launch divides its work, and where its rows are.
struct Geometry {
  RowPlan plan;
  ClassDivider classes;
  RowOffset logits;
  RowOffset target_probs;
  RowOffset grad_logits;
};

// ---- index targets: what is known of a row -------------------------------------------------------------------------

template <typename Real>
struct TargetLogs {
  Real max;    // of the whole row
  Real log_s;  // log sum exp(z - max)
  Real log_p;
  Real log_u;
};

// From the target's logit and the sum over all other classes.
template <typename Real>
__device__ __forceinline__ TargetLogs<Real> target_logs(Real z, const ExpSum<Real>& rest) {
  const bool is_top = z >= rest.max;
  const Real max = fmax(rest.max, z);
  // A target far above the rest: their sum may vanish beside it, their logarithm does not.
  const Real rest_sum = is_top ? rest.sum * exponential(rest.max - max) : rest.sum;
  const Real log_s = log_one_plus(rest_sum + (exponential(z - max) - Real(1)));
  const Real log_p = (z - max) - log_s;
  // 1 - p cancels for the largest class, and for no other.
  const Real log_u = is_top ? (rest.max - max) + logarithm(rest.sum) - log_s : log_one_plus(-exponential(log_p));
  return {max, log_s, log_p, log_u};
}

// ---- index targets: forward ----------------------------------------------------------------------------------------

// One thread's share of a row's other classes; `index` of `threads` threads on the row.
template <typename Scalar>
__device__ __forceinline__ ExpSum<compute_t<Scalar>> strided_exp_sum(const Scalar* row, int64_t class_stride,
                                                                     int classes, int target, int index, int threads) {
  using Real = compute_t<Scalar>;
  ExpSum<Real> total = empty_exp_sum<Real>();
  constexpr int kUnroll = 8;
  const int64_t step = threads * class_stride;
  const Scalar* at = row + index * class_stride;
  for (int first = index; first < classes; first += kUnroll * threads) {
    Real values[kUnroll];
#pragma unroll
    for (int k = 0; k < kUnroll; ++k, at += step) {
      const int j = first + k * threads;
      values[k] = j < classes && j != target ? load_as_compute(*at) : -kInfinity<Real>;
    }
    add_to_exp_sum(total, values);
  }
  return total;
}

// The same with 16-byte loads, by a warp at least.
template <typename Scalar>
__device__ __forceinline__ ExpSum<compute_t<Scalar>> row_exp_sum(const Scalar* row, int64_t class_stride, int classes,
                                                                 int target, int index, int threads) {
  using Real = compute_t<Scalar>;
  if (class_stride != 1 || threads < kWarp) {
    return strided_exp_sum(row, class_stride, classes, target, index, threads);
  }
  ExpSum<Real> total = empty_exp_sum<Real>();
  constexpr int kSize = kVectorSize<Scalar>;
  constexpr int kUnroll = 4;
  // Elements before the first 16-byte boundary and after the last: fewer than a warp has lanes.
  const int to_boundary = elements_to_boundary(row);
  const int head = to_boundary < classes ? to_boundary : classes;
  const int vectors = (classes - head) / kSize;
  const int tail = head + vectors * kSize;
  const int loose = index < head ? index : tail + (index - head);
  if (loose < classes && loose != target && (index < head || loose >= tail)) {
    const Real values[1] = {load_as_compute(row[loose])};
    add_to_exp_sum(total, values);
  }
  const Scalar* body = row + head;
  for (int first = index; first < vectors; first += kUnroll * threads) {
    uint4 loaded[kUnroll];
#pragma unroll
    for (int k = 0; k < kUnroll; ++k) {
      const int vector = first + k * threads;
      if (vector < vectors) loaded[k] = load_vector(body + static_cast<int64_t>(vector) * kSize);
    }
    // All loads are on their way; the values of two at a time take up registers.
    constexpr int kTogether = 2;
#pragma unroll
    for (int k0 = 0; k0 < kUnroll; k0 += kTogether) {
      if (k0 > 0 && first + k0 * threads >= vectors) break;  // a row just beyond a step has few vectors in the next
      Real values[kTogether * kSize];
#pragma unroll
      for (int k = 0; k < kTogether; ++k) {
        const int vector = first + (k0 + k) * threads;
        const auto elements = bit_cast<Elements<Scalar>>(loaded[k0 + k]);
        const int target_at = target - head - vector * kSize;
#pragma unroll
        for (int e = 0; e < kSize; ++e) {
          values[k * kSize + e] = vector < vectors ? load_as_compute(elements.at[e]) : -kInfinity<Real>;
        }
        if (static_cast<unsigned>(target_at) < static_cast<unsigned>(kSize)) {
#pragma unroll
          for (int e = 0; e < kSize; ++e) {
            if (e == target_at) values[k * kSize + e] = -kInfinity<Real>;
          }
        }
      }
      add_to_exp_sum(total, values);
    }
  }
  return total;
}

// A tile on its way to shared memory: all of a thread's loads are issued before the first is waited for. Both ends
// start on a 16-byte boundary.
template <typename Scalar>
struct TileLoad {
  static constexpr int kVectors = kTileBytes / kVectorBytes / kBlock;
  uint4 loaded[kVectors];
  Scalar rest;

  __device__ __forceinline__ void start(const Scalar* source, int count) {
    constexpr int kSize = kVectorSize<Scalar>;
    const int thread = static_cast<int>(threadIdx.x);
    const int vectors = count / kSize;
#pragma unroll
    for (int k = 0; k < kVectors; ++k) {
      const int vector = thread + k * kBlock;
      if (vector < vectors) loaded[k] = load_vector(source + vector * kSize);
    }
    const int at = vectors * kSize + thread;
    if (at < count) rest = source[at];
  }

  __device__ __forceinline__ void finish(Scalar* tile, int count) const {
    constexpr int kSize = kVectorSize<Scalar>;
    const int thread = static_cast<int>(threadIdx.x);
    const int vectors = count / kSize;
#pragma unroll
    for (int k = 0; k < kVectors; ++k) {
      const int vector = thread + k * kBlock;
      if (vector < vectors) *reinterpret_cast<uint4*>(tile + vector * kSize) = loaded[k];
    }
    const int at = vectors * kSize + thread;
    if (at < count) tile[at] = rest;
  }
};

// A group's share of a short row in shared memory, in `steps` of at most kSlots: all of it is held in registers between
// the maximum and the sum.
template <int kSlots, typename Scalar>
__device__ __forceinline__ ExpSum<compute_t<Scalar>> tile_exp_sum(const Scalar* row, bool is_live, int classes,
                                                                  int steps, int row_in_tile, int index, int lanes) {
  using Real = compute_t<Scalar>;
  const int end = steps * lanes;
  const int limit = is_live ? classes : 0;
  // Rows begin a step apart from each other, as far as a power of two allows: at row lengths of many 2s their lanes
  // would meet in one bank.
  int j = index + (row_in_tile & ((1 << (31 - __clz(steps))) - 1)) * lanes;
  Real values[kSlots];
  Real max = -kInfinity<Real>;
#pragma unroll
  for (int k = 0; k < kSlots; ++k) {
    const bool inside = k < steps && j < limit;
    const Real value = load_as_compute(row[inside ? j : 0]);
    values[k] = inside ? value : -kInfinity<Real>;
    j += lanes;
    j -= j >= end ? end : 0;
    max = fmax(max, values[k]);
  }
  max = group_max(max, lanes);
  const Real base = exp_base(max);
  Real sum = 0;
#pragma unroll
  for (int k = 0; k < kSlots; ++k) sum += summand(values[k] - base);
  return {max, group_sum(sum, lanes)};
}

// Slots beyond the steps cost as much as others: of four numbers of them, the least that will do.
template <typename Scalar>
__device__ __forceinline__ ExpSum<compute_t<Scalar>> tile_exp_sum(const Scalar* row, bool is_live, int classes,
                                                                  int steps, int row_in_tile, int index, int lanes) {
  static_assert(kValuesPerLane == 16, "as many slots as there may be steps");
  if (steps <= 4) return tile_exp_sum<4>(row, is_live, classes, steps, row_in_tile, index, lanes);
  if (steps <= 8) return tile_exp_sum<8>(row, is_live, classes, steps, row_in_tile, index, lanes);
  if (steps <= 12) return tile_exp_sum<12>(row, is_live, classes, steps, row_in_tile, index, lanes);
  return tile_exp_sum<16>(row, is_live, classes, steps, row_in_tile, index, lanes);
}

template <typename Scalar, RowPath path>
__global__ __launch_bounds__(kBlock, kBlocksAtOnce<Scalar>) void focal_loss_forward_kernel(
    const __grid_constant__ FocalLossForward<Scalar> args, const __grid_constant__ Geometry geometry,
    const __grid_constant__ GridSum<compute_t<Scalar>> reduction) {
  using Real = compute_t<Scalar>;
  const RowPlan& plan = geometry.plan;
  __shared__ __align__(16) unsigned char tile_bytes[path == RowPath::kTile ? kTileBytes : 16];
  __shared__ int labels[kBlock];           // [rows_per_tile]
  __shared__ ExpSum<Real> shares[kBlock];  // [rows_per_tile, parts]
  Scalar* tile = reinterpret_cast<Scalar*>(tile_bytes);

  const int thread = static_cast<int>(threadIdx.x);
  const int classes = static_cast<int>(args.classes);
  double loss_sum = 0;
  double weight_sum = 0;
  for (int64_t t = blockIdx.x; t < plan.tiles; t += gridDim.x) {
    const int64_t first = t * plan.rows_per_tile;
    const int64_t left = args.rows - first;
    const int rows = left < plan.rows_per_tile ? static_cast<int>(left) : plan.rows_per_tile;

    [[maybe_unused]] TileLoad<Scalar> load;
    if constexpr (path == RowPath::kTile) load.start(args.logits + first * classes, rows * classes);
    // A thread for each row finds its label and the target's logit.
    int label = kIgnored;
    Real z_target = 0;
    if (thread < rows) {
      label = read_label(args, first + thread);
      labels[thread] = label;
      if (path != RowPath::kTile && label >= 0) {
        z_target = load_as_compute(args.logits[geometry.logits(first + thread) + label * args.layout.class_stride]);
      }
    }
    if constexpr (path == RowPath::kTile) {
      load.finish(tile, rows * classes);
      __syncthreads();
      if (label >= 0) {
        z_target = load_as_compute(tile[thread * classes + label]);
        tile[thread * classes + label] = Store<Scalar>::from_compute(-kInfinity<Real>);
      }
    }
    __syncthreads();

    // All threads reduce the classes other than the target. Rows that are ignored are not read.
    if constexpr (path == RowPath::kPixels) {
      const int warp = thread / kWarp;
      const int part = warp % plan.parts;
      const int r = warp / plan.parts * kWarp + thread % kWarp;
      if (r < rows && labels[r] >= 0) {
        shares[r * plan.parts + part] = strided_exp_sum(args.logits + geometry.logits(first + r),
                                                        args.layout.class_stride, classes, labels[r], part, plan.parts);
      }
    } else {
      const int lanes = plan.lanes;
      const int rows_at_once = kBlock >> plan.lane_bits;
      const int warp_lanes = lanes < kWarp ? lanes : kWarp;
      const int index = thread & (lanes - 1);
      const int steps = (classes + lanes - 1) >> plan.lane_bits;
      for (int r0 = 0; r0 < rows; r0 += rows_at_once) {
        const int r = r0 + (thread >> plan.lane_bits);
        const bool is_live = r < rows && labels[r < rows ? r : 0] >= 0;
        ExpSum<Real> share;
        if constexpr (path == RowPath::kTile) {
          share = tile_exp_sum(tile + (is_live ? r : 0) * classes, is_live, classes, steps, r, index, lanes);
        } else {
          share = empty_exp_sum<Real>();
          if (is_live) {
            share = row_exp_sum(args.logits + geometry.logits(first + r), args.layout.class_stride, classes, labels[r],
                                index, lanes);
          }
          share = group_exp_sum(share, warp_lanes);
        }
        const int part = plan.parts == 1 ? 0 : thread / kWarp;
        if ((thread & (warp_lanes - 1)) == 0 && is_live) shares[r * plan.parts + part] = share;
      }
    }
    __syncthreads();

    // A thread for each row again.
    if (thread < rows) {
      const int64_t row = first + thread;
      TargetLogs<Real> logs = {0, 0, 0, 0};
      Real loss = label == kIgnored ? Real(0) : kNaN<Real>;
      if (label >= 0) {
        const ExpSum<Real>* parts = shares + thread * plan.parts;
        ExpSum<Real> rest = parts[0];
        if (plan.parts > 1) {
          for (int part = 1; part < plan.parts; ++part) rest.max = fmax(rest.max, parts[part].max);
          const Real base = exp_base(rest.max);
          rest.sum = 0;
          for (int part = 0; part < plan.parts; ++part) {
            rest.sum += parts[part].sum * exponential(parts[part].max - base);
          }
        }
        logs = target_logs(z_target, rest);
        const Real gamma = gamma_at(args, row, exponential(logs.log_p));
        const Real weight = args.class_weight != nullptr ? args.class_weight[label] : Real(1);
        loss = weight * focal_terms(logs.log_p, logs.log_u, gamma).loss;
        weight_sum += static_cast<double>(weight);
      }
      args.saved[row] = logs.max;
      args.saved[args.rows + row] = logs.log_s;
      args.saved[2 * args.rows + row] = logs.log_u;
      if (args.row_loss != nullptr) args.row_loss[row] = loss;
      loss_sum += static_cast<double>(loss);
    }
  }
  sum_over_grid(reduction, loss_sum, weight_sum);
}

// ---- index targets: backward ---------------------------------------------------------------------------------------

// dL/dz_j = scale * exp(z_j - max), but `at_target` for the target. The target's value is written over the other one,
// by the same thread or after a barrier: to choose between the two costs every element a branch.
template <typename Real>
struct RowGradient {
  Real max;
  Real scale;  // 0 in a row that is ignored
  Real at_target;
  int target;  // or kIgnored, kOutOfRange
};

// What d(reduced loss)/d(loss of the row) is.
template <typename Scalar>
__device__ __forceinline__ compute_t<Scalar> upstream(const FocalLossBackward<Scalar>& args, int64_t row) {
  const compute_t<Scalar> grad = args.grad_loss[row * args.grad_stride];
  return args.divisor != nullptr ? grad / *args.divisor : grad;
}

template <typename Scalar>
__device__ __forceinline__ RowGradient<compute_t<Scalar>> row_gradient(const FocalLossBackward<Scalar>& args,
                                                                       const Geometry& geometry, int64_t row) {
  using Real = compute_t<Scalar>;
  const int label = read_label(args, row);
  RowGradient<Real> result = {0, 0, 0, label};
  Real grad_gamma = 0;
  if (label >= 0) {
    const Real max = args.saved[row];
    const Real log_s = args.saved[args.rows + row];
    const Real log_u = args.saved[2 * args.rows + row];
    const Real z = load_as_compute(args.logits[geometry.logits(row) + label * args.layout.class_stride]);
    const Real log_p = (z - max) - log_s;
    const Real gamma = gamma_at(args, row, exponential(log_p));
    const FocalTerms<Real> terms = focal_terms(log_p, log_u, gamma);
    const Real weight = args.class_weight != nullptr ? args.class_weight[label] : Real(1);
    const Real row_scale = weight * upstream(args, row);
    const Real coefficient = row_scale * (args.detach_modulation ? terms.factor : terms.coefficient);
    result.max = max;
    result.scale = coefficient * exponential(-log_s);
    // p - 1 = -u, which has all its digits where 1 - p has none.
    result.at_target = -coefficient * exponential(log_u);
    grad_gamma = row_scale * terms.grad_gamma;
  } else if (label == kOutOfRange) {
    result.scale = kNaN<Real>;
    grad_gamma = kNaN<Real>;
  }
  if (args.grad_gamma != nullptr) args.grad_gamma[row] = grad_gamma;
  return result;
}

// One element, the target's aside. No logit is above the maximum, and a NaN reaches the whole row through the saved
// numbers: the minimum is for rows that are ignored, where anything may lie, and where it takes care of infinity and
// NaN.
template <typename Real>
__device__ __forceinline__ Real gradient_at(const RowGradient<Real>& row, Real z) {
  return row.scale * exponential(fmin(z - row.max, Real(0)));
}

template <typename Scalar>
__device__ __forceinline__ void write_strided_gradient(Scalar* grad, int64_t grad_stride, const Scalar* row,
                                                       int64_t class_stride, int classes,
                                                       const RowGradient<compute_t<Scalar>>& gradient, int index,
                                                       int threads) {
  using Real = compute_t<Scalar>;
  constexpr int kUnroll = 4;
  const int64_t step = threads * class_stride;
  const int64_t grad_step = threads * grad_stride;
  const Scalar* at = row + index * class_stride;
  Scalar* grad_at = grad + index * grad_stride;
  for (int first = index; first < classes; first += kUnroll * threads) {
    Real values[kUnroll];
#pragma unroll
    for (int k = 0; k < kUnroll; ++k, at += step) {
      values[k] = first + k * threads < classes ? load_as_compute(*at) : Real(0);
    }
#pragma unroll
    for (int k = 0; k < kUnroll; ++k, grad_at += grad_step) {
      if (first + k * threads < classes) *grad_at = Store<Scalar>::from_compute(gradient_at(gradient, values[k]));
    }
  }
  const int target = gradient.target;
  if (target >= 0 && (target & (threads - 1)) == index) {
    grad[target * grad_stride] = Store<Scalar>::from_compute(gradient.at_target);
  }
}

// The same with 16-byte loads and stores where both rows have their 16-byte boundaries at the same classes.
template <typename Scalar>
__device__ __forceinline__ void write_row_gradient(Scalar* grad, int64_t grad_stride, const Scalar* row,
                                                   int64_t class_stride, int classes,
                                                   const RowGradient<compute_t<Scalar>>& gradient, int index,
                                                   int threads) {
  constexpr int kUnroll = 4;
  const int head_of_row = elements_to_boundary(row);
  if (class_stride != 1 || grad_stride != 1 || threads < kWarp || head_of_row != elements_to_boundary(grad)) {
    write_strided_gradient(grad, grad_stride, row, class_stride, classes, gradient, index, threads);
    return;
  }

  constexpr int kSize = kVectorSize<Scalar>;
  const int head = head_of_row < classes ? head_of_row : classes;
  const int vectors = (classes - head) / kSize;
  const int tail = head + vectors * kSize;
  const int loose = index < head ? index : tail + (index - head);
  if (loose < classes && (index < head || loose >= tail)) {
    grad[loose] = Store<Scalar>::from_compute(gradient_at(gradient, load_as_compute(row[loose])));
  }
  const Scalar* body = row + head;
  Scalar* grad_body = grad + head;
  for (int first = index; first < vectors; first += kUnroll * threads) {
    uint4 loaded[kUnroll];
#pragma unroll
    for (int k = 0; k < kUnroll; ++k) {
      const int vector = first + k * threads;
      if (vector < vectors) loaded[k] = load_vector(body + static_cast<int64_t>(vector) * kSize);
    }
#pragma unroll
    for (int k = 0; k < kUnroll; ++k) {
      const int vector = first + k * threads;
      if (vector < vectors) {
        const auto elements = bit_cast<Elements<Scalar>>(loaded[k]);
        Elements<Scalar> result;
#pragma unroll
        for (int e = 0; e < kSize; ++e) {
          result.at[e] = Store<Scalar>::from_compute(gradient_at(gradient, load_as_compute(elements.at[e])));
        }
        store_vector(grad_body + static_cast<int64_t>(vector) * kSize, bit_cast<uint4>(result));
      }
    }
  }
  const int target = gradient.target;
  const int writer = target < head    ? target
                     : target >= tail ? head + (target - tail)
                                      : ((target - head) / kSize) & (threads - 1);
  if (target >= 0 && index == writer) grad[target] = Store<Scalar>::from_compute(gradient.at_target);
}

// A tile of short rows as one run of vectors: a vector may hold parts of two rows, or several rows. Every thread of the
// block calls it.
template <typename Scalar>
__device__ __forceinline__ void write_tile_gradient(Scalar* grad, const Scalar* logits, int rows, int classes,
                                                    const ClassDivider& divide,
                                                    const RowGradient<compute_t<Scalar>>* gradients) {
  using Real = compute_t<Scalar>;
  constexpr int kSize = kVectorSize<Scalar>;
  constexpr int kUnroll = 4;
  const int thread = static_cast<int>(threadIdx.x);
  const int count = rows * classes;
  const int vectors = count / kSize;
  for (int first = thread; first < vectors; first += kUnroll * kBlock) {
    uint4 loaded[kUnroll];
#pragma unroll
    for (int k = 0; k < kUnroll; ++k) {
      const int vector = first + k * kBlock;
      if (vector < vectors) loaded[k] = load_vector(logits + vector * kSize);
    }
#pragma unroll
    for (int k = 0; k < kUnroll; ++k) {
      const int vector = first + k * kBlock;
      if (vector < vectors) {
        const auto elements = bit_cast<Elements<Scalar>>(loaded[k]);
        Elements<Scalar> result;
        int r = divide(vector * kSize);
        int j = vector * kSize - r * classes;
        RowGradient<Real> gradient = gradients[r];
#pragma unroll
        for (int e = 0; e < kSize; ++e) {
          result.at[e] = Store<Scalar>::from_compute(gradient_at(gradient, load_as_compute(elements.at[e])));
          if (++j == classes) {
            j = 0;
            r += r + 1 < rows;  // past the last row nothing is left to compute
            gradient = gradients[r];
          }
        }
        store_vector(grad + vector * kSize, bit_cast<uint4>(result));
      }
    }
  }
  const int rest = vectors * kSize + thread;
  if (rest < count) {
    const Real z = load_as_compute(logits[rest]);
    grad[rest] = Store<Scalar>::from_compute(gradient_at(gradients[divide(rest)], z));
  }
  __syncthreads();  // the targets' elements have their other values
  if (thread < rows && gradients[thread].target >= 0) {
    grad[thread * classes + gradients[thread].target] = Store<Scalar>::from_compute(gradients[thread].at_target);
  }
}

template <typename Scalar, RowPath path>
__global__ __launch_bounds__(kBlock, kBlocksAtOnce<Scalar>) void focal_loss_backward_kernel(
    const __grid_constant__ FocalLossBackward<Scalar> args, const __grid_constant__ Geometry geometry) {
  using Real = compute_t<Scalar>;
  const RowPlan& plan = geometry.plan;
  __shared__ RowGradient<Real> gradients[kBlock];  // [rows_per_tile]
  const int thread = static_cast<int>(threadIdx.x);
  const int classes = static_cast<int>(args.classes);
  for (int64_t t = blockIdx.x; t < plan.tiles; t += gridDim.x) {
    const int64_t first = t * plan.rows_per_tile;
    const int64_t left = args.rows - first;
    const int rows = left < plan.rows_per_tile ? static_cast<int>(left) : plan.rows_per_tile;

    __syncthreads();  // the last tile's gradients have been read
    if (thread < rows) gradients[thread] = row_gradient(args, geometry, first + thread);
    if (args.grad_logits == nullptr) continue;
    __syncthreads();

    if constexpr (path == RowPath::kTile) {
      write_tile_gradient(args.grad_logits + first * classes, args.logits + first * classes, rows, classes,
                          geometry.classes, gradients);
    } else {
      constexpr bool kPixels = path == RowPath::kPixels;
      const int warp = thread / kWarp;
      const int threads = kPixels ? plan.parts : plan.lanes;
      const int index = kPixels ? warp % plan.parts : thread & (plan.lanes - 1);
      const int rows_at_once = kPixels ? plan.rows_per_tile : kBlock >> plan.lane_bits;
      const int r_first = kPixels ? warp / plan.parts * kWarp + thread % kWarp : thread >> plan.lane_bits;
      for (int r = r_first; r < rows; r += rows_at_once) {
        Scalar* grad = args.grad_logits + geometry.grad_logits(first + r);
        const Scalar* row = args.logits + geometry.logits(first + r);
        if constexpr (kPixels) {
          write_strided_gradient(grad, args.grad_layout.class_stride, row, args.layout.class_stride, classes,
                                 gradients[r], index, threads);
        } else {
          write_row_gradient(grad, args.grad_layout.class_stride, row, args.layout.class_stride, classes, gradients[r],
                             index, threads);
        }
      }
    }
  }
}

// ---- probability targets and label smoothing -----------------------------------------------------------------------

// A row as one thread of its group sees it.
template <typename Scalar>
struct GeneralRow {
  using Real = compute_t<Scalar>;
  int64_t row;
  const Scalar* logits;
  int64_t class_stride;
  const Real* targets;  // or null: labels with smoothing
  int64_t target_stride;
  int label;
  bool is_live;
  int index;

  __device__ __forceinline__ Real z(int64_t j) const { return load_as_compute(logits[j * class_stride]); }
  __device__ __forceinline__ Real target(const FocalLossArgs<Scalar>& args, int64_t j) const {
    const Real kept = Real(1) - args.label_smoothing;
    const Real spread = args.label_smoothing / static_cast<Real>(args.classes);
    if (targets != nullptr) return kept * targets[j * target_stride] + spread;
    return j == label ? kept + spread : spread;
  }
};

template <typename Scalar>
__device__ __forceinline__ GeneralRow<Scalar> general_row(const FocalLossArgs<Scalar>& args, const Geometry& geometry,
                                                          int64_t row, bool exists, int index) {
  GeneralRow<Scalar> result = {};
  result.row = row;
  result.index = index;
  result.class_stride = args.layout.class_stride;
  result.target_stride = args.target_layout.class_stride;
  result.label = kIgnored;
  if (exists) {
    result.logits = args.logits + geometry.logits(row);
    if (args.target_probs != nullptr) {
      result.targets = args.target_probs + geometry.target_probs(row);
      result.label = 0;
    } else {
      result.label = read_label(args, row);
    }
  }
  result.is_live = result.label >= 0;
  return result;
}

template <typename Real>
struct RowLogs {
  Real max;
  Real log_s;      // log sum exp(z - max)
  Real log_u_top;  // log u of the largest class
};

template <typename Scalar>
__device__ __forceinline__ RowLogs<compute_t<Scalar>> row_logs(const FocalLossArgs<Scalar>& args,
                                                               const GeneralRow<Scalar>& row, const RowGroup& group) {
  using Real = compute_t<Scalar>;
  // The largest so far, and sum exp(z - max) over all the others.
  Real max = -kInfinity<Real>;
  double others = 0;
  if (row.is_live) {
    for (int64_t j = row.index; j < args.classes; j += group.lanes) {
      const Real z = row.z(j);
      if (z > max) {
        others = (others + 1) * static_cast<double>(exponential(max - z));
        max = z;
      } else {
        others += static_cast<double>(exponential(z - exp_base(max)));
      }
    }
  }
  const Real row_max = group.max(max);
  // Among the threads that have met the maximum, one leaves it out of the sum.
  const int owner = group.min(max == row_max ? row.index : kBlock);
  const double own = row.index == owner ? others : others + 1;
  const auto rest = static_cast<Real>(group.sum(own * static_cast<double>(exponential(max - exp_base(row_max)))));
  const Real log_s = row_max == kInfinity<Real> ? kNaN<Real> : log_one_plus(rest);
  return {row_max, log_s, logarithm(rest) - log_s};
}

template <typename Scalar>
__device__ __forceinline__ FocalTerms<compute_t<Scalar>> class_terms(const FocalLossArgs<Scalar>& args, int64_t row,
                                                                     const RowLogs<compute_t<Scalar>>& logs,
                                                                     compute_t<Scalar> z) {
  using Real = compute_t<Scalar>;
  const Real log_p = (z - logs.max) - logs.log_s;
  const Real p = exponential(log_p);
  const Real log_u = z == logs.max ? logs.log_u_top : log_one_plus(-p);
  return focal_terms(log_p, log_u, gamma_at(args, row, p));
}

template <typename Scalar>
__device__ __forceinline__ compute_t<Scalar> weight_of(const FocalLossArgs<Scalar>& args, int64_t j) {
  return args.class_weight != nullptr ? args.class_weight[j] : compute_t<Scalar>(1);
}

template <typename Scalar>
__global__ __launch_bounds__(kBlock, 2) void focal_loss_general_forward_kernel(
    const __grid_constant__ FocalLossForward<Scalar> args, const __grid_constant__ Geometry geometry,
    const __grid_constant__ GridSum<compute_t<Scalar>> reduction) {
  using Real = compute_t<Scalar>;
  const RowPlan& plan = geometry.plan;
  __shared__ double scratch[kWarpsPerBlock];
  const RowGroup group = {plan.lanes, scratch};
  const int thread = static_cast<int>(threadIdx.x);
  const int rows_at_once = kBlock / plan.lanes;
  double loss_sum = 0;
  double weight_sum = 0;
  for (int64_t t = blockIdx.x; t < plan.tiles; t += gridDim.x) {
    const int64_t first = t * plan.rows_per_tile;
    const int64_t left = args.rows - first;
    const int rows = left < plan.rows_per_tile ? static_cast<int>(left) : plan.rows_per_tile;
    for (int r0 = 0; r0 < rows; r0 += rows_at_once) {
      const int r = r0 + thread / plan.lanes;
      const auto row = general_row<Scalar>(args, geometry, first + r, r < rows, thread % plan.lanes);
      const RowLogs<Real> logs = row_logs(args, row, group);
      double row_sum = 0;
      if (row.is_live) {
        for (int64_t j = row.index; j < args.classes; j += plan.lanes) {
          const Real weighted = weight_of(args, j) * row.target(args, j);
          // A class without a share has no say, not even at z = -inf.
          if (weighted != Real(0)) {
            row_sum += static_cast<double>(weighted * class_terms(args, row.row, logs, row.z(j)).loss);
          }
        }
      }
      row_sum = group.sum(row_sum);
      const Real loss = row.label == kOutOfRange ? kNaN<Real> : static_cast<Real>(row_sum);
      if (r < rows && row.index == 0) {
        const bool is_live = row.is_live;
        args.saved[row.row] = is_live ? logs.max : Real(0);
        args.saved[args.rows + row.row] = is_live ? logs.log_s : Real(0);
        args.saved[2 * args.rows + row.row] = is_live ? logs.log_u_top : Real(0);
        if (args.row_loss != nullptr) args.row_loss[row.row] = loss;
        loss_sum += static_cast<double>(loss);
        // Probability targets: the mean is over the rows.
        if (is_live) weight_sum += args.target_probs != nullptr ? 1.0 : static_cast<double>(weight_of(args, row.label));
      }
    }
  }
  sum_over_grid(reduction, loss_sum, weight_sum);
}

template <typename Scalar>
__global__ __launch_bounds__(kBlock, 2) void focal_loss_general_backward_kernel(
    const __grid_constant__ FocalLossBackward<Scalar> args, const __grid_constant__ Geometry geometry) {
  using Real = compute_t<Scalar>;
  const RowPlan& plan = geometry.plan;
  __shared__ double scratch[kWarpsPerBlock];
  const RowGroup group = {plan.lanes, scratch};
  const int thread = static_cast<int>(threadIdx.x);
  const int rows_at_once = kBlock / plan.lanes;
  for (int64_t t = blockIdx.x; t < plan.tiles; t += gridDim.x) {
    const int64_t first = t * plan.rows_per_tile;
    const int64_t left = args.rows - first;
    const int rows = left < plan.rows_per_tile ? static_cast<int>(left) : plan.rows_per_tile;
    for (int r0 = 0; r0 < rows; r0 += rows_at_once) {
      const int r = r0 + thread / plan.lanes;
      const auto row = general_row<Scalar>(args, geometry, first + r, r < rows, thread % plan.lanes);
      RowLogs<Real> logs = {0, 0, 0};
      Real scale = 0;
      if (row.is_live) {
        logs = {args.saved[row.row], args.saved[args.rows + row.row], args.saved[2 * args.rows + row.row]};
        scale = upstream(args, row.row);
      }

      // a_i = w_i t_i c(p_i), summed over the classes other than the largest; and the derivative by gamma.
      double others = 0;
      double top_slope = 0;
      double gamma_sum = 0;
      int top = INT32_MAX;  // the first of the largest that this thread meets
      if (row.is_live) {
        for (int64_t j = row.index; j < args.classes; j += plan.lanes) {
          const Real weighted = weight_of(args, j) * row.target(args, j);
          const Real z = row.z(j);
          Real slope = 0;
          if (weighted != Real(0)) {
            const FocalTerms<Real> terms = class_terms(args, row.row, logs, z);
            slope = weighted * (args.detach_modulation ? terms.factor : terms.coefficient);
            gamma_sum += static_cast<double>(weighted * terms.grad_gamma);
          }
          if (z == logs.max && top == INT32_MAX) {
            top = static_cast<int>(j);
            top_slope = static_cast<double>(slope);
          } else {
            others += static_cast<double>(slope);
          }
        }
      }
      const int row_top = group.min(top);
      if (top != row_top) {
        others += top_slope;
        top_slope = 0;
      }
      others = group.sum(others);
      top_slope = group.sum(top_slope);
      gamma_sum = group.sum(gamma_sum);
      if (r >= rows) continue;

      const Real missing = row.label == kOutOfRange ? kNaN<Real> : Real(0);
      if (args.grad_gamma != nullptr && row.index == 0) {
        args.grad_gamma[row.row] = row.is_live ? scale * static_cast<Real>(gamma_sum) : missing;
      }
      Scalar* grad = args.grad_logits == nullptr ? nullptr : args.grad_logits + geometry.grad_logits(row.row);
      Real* grad_target = args.grad_target == nullptr ? nullptr : args.grad_target + geometry.target_probs(row.row);
      if (grad == nullptr && grad_target == nullptr) continue;
      for (int64_t j = row.index; j < args.classes; j += plan.lanes) {
        Real value = missing;
        Real target_value = missing;
        if (row.is_live) {
          const Real z = row.z(j);
          const FocalTerms<Real> terms = class_terms(args, row.row, logs, z);
          const Real weight = weight_of(args, j);
          const Real weighted = weight * row.target(args, j);
          const Real slope =
              weighted == Real(0) ? Real(0) : weighted * (args.detach_modulation ? terms.factor : terms.coefficient);
          // p (sum a - a_j) - u a_j, in which the largest class does not subtract a_j from p a_j as p -> 1.
          const Real log_p = (z - logs.max) - logs.log_s;
          const Real log_u = z == logs.max ? logs.log_u_top : log_one_plus(-exponential(log_p));
          const Real rest = j == row_top ? static_cast<Real>(others) : static_cast<Real>(others + top_slope) - slope;
          value = scale * (exponential(log_p) * rest - exponential(log_u) * slope);
          target_value = scale * (Real(1) - args.label_smoothing) * weight * terms.loss;
        }
        if (grad != nullptr) grad[j * args.grad_layout.class_stride] = Store<Scalar>::from_compute(value);
        if (grad_target != nullptr) grad_target[j * args.target_layout.class_stride] = target_value;
      }
    }
  }
}

// ---- launchers -----------------------------------------------------------------------------------------------------

bool has_no_gaps(const RowLayout& layout, int64_t rows, int64_t classes) {
  if (classes > 1 && layout.class_stride != 1) return false;
  if (layout.inner > 1 && layout.inner_stride != classes) return false;
  return rows <= layout.inner || layout.outer_stride == layout.inner * classes;
}

bool on_boundary(const void* address) { return reinterpret_cast<uintptr_t>(address) % kVectorBytes == 0; }

template <typename Scalar>
bool is_general(const FocalLossArgs<Scalar>& args) {
  return args.target_probs != nullptr || args.label_smoothing != 0;
}

template <typename Scalar>
RowPlan plan_for(const FocalLossArgs<Scalar>& args, bool end_to_end) {
  const auto distance = [](int64_t stride) { return stride < 0 ? -stride : stride; };
  const RowLayout& layout = args.layout;
  const int64_t row_stride = layout.inner > 1 ? layout.inner_stride : layout.outer_stride;
  const bool class_outermost =
      args.rows > 1 && args.classes > 1 && distance(row_stride) < distance(layout.class_stride);
  RowPlan plan = plan_rows(args.rows, args.classes, sizeof(Scalar), end_to_end && !is_general(args), class_outermost);
  if (is_general(args) && plan.path == RowPath::kPixels) {
    // Those kernels keep no partial results: one thread sees a row through.
    plan.parts = 1;
    plan.rows_per_tile = kBlock;
    plan = finish_row_plan(plan, args.rows);
  }
  return plan;
}

// Classes are counted in int, with room for one step of any loop over them.
template <typename Scalar>
bool sizes_are_valid(const FocalLossArgs<Scalar>& args) {
  constexpr int64_t kMostClasses = INT32_MAX - 64 * kBlock * kVectorBytes;
  return args.rows >= 0 && args.classes >= 0 && args.classes <= kMostClasses && args.layout.inner > 0 &&
         (args.target_probs == nullptr || args.target_layout.inner > 0) &&
         (args.target_probs != nullptr) != (args.labels.data != nullptr);
}

}  // namespace

int64_t focal_loss_workspace(int64_t rows, int64_t classes) {
  return fits_one_block(rows, classes) ? 0 : grid_sum_workspace(kMaxGrid);
}

template <typename Scalar>
int focal_loss_forward(const FocalLossForward<Scalar>& args, bool mean, compute_t<Scalar>* loss,
                       compute_t<Scalar>* divisor, void* workspace, void* stream) {
  if (args.rows > 0 && !sizes_are_valid(args)) return cudaErrorInvalidValue;
  const RowPlan plan = plan_for(args, has_no_gaps(args.layout, args.rows, args.classes) && on_boundary(args.logits));
  GridSum<compute_t<Scalar>> reduction = {loss, divisor, mean, nullptr, nullptr};
  const cudaError_t error = prepare_grid_sum(reduction, plan.grid, workspace, stream);
  if (error != cudaSuccess) return error;
  const Geometry geometry = {plan, ClassDivider(args.classes), RowOffset(args.layout), RowOffset(args.target_layout),
                             RowOffset(args.layout)};
  void (*kernel)(FocalLossForward<Scalar>, Geometry, GridSum<compute_t<Scalar>>) =
      is_general(args)                ? focal_loss_general_forward_kernel<Scalar>
      : plan.path == RowPath::kTile   ? focal_loss_forward_kernel<Scalar, RowPath::kTile>
      : plan.path == RowPath::kPixels ? focal_loss_forward_kernel<Scalar, RowPath::kPixels>
                                      : focal_loss_forward_kernel<Scalar, RowPath::kRows>;
  return launch(kernel, plan.grid, kBlock, stream, args, geometry, reduction);
}

template <typename Scalar>
int focal_loss_backward(const FocalLossBackward<Scalar>& args, void* stream) {
  if (args.rows == 0) return cudaSuccess;
  if (!sizes_are_valid(args)) return cudaErrorInvalidValue;
  if (args.grad_logits != nullptr && args.grad_layout.inner <= 0) return cudaErrorInvalidValue;
  const bool end_to_end = has_no_gaps(args.layout, args.rows, args.classes) && on_boundary(args.logits) &&
                          args.grad_logits != nullptr && has_no_gaps(args.grad_layout, args.rows, args.classes) &&
                          on_boundary(args.grad_logits);
  const RowPlan plan = plan_for(args, end_to_end);
  const Geometry geometry = {plan, ClassDivider(args.classes), RowOffset(args.layout), RowOffset(args.target_layout),
                             RowOffset(args.grad_layout)};
  void (*kernel)(FocalLossBackward<Scalar>, Geometry) =
      is_general(args)                ? focal_loss_general_backward_kernel<Scalar>
      : plan.path == RowPath::kTile   ? focal_loss_backward_kernel<Scalar, RowPath::kTile>
      : plan.path == RowPath::kPixels ? focal_loss_backward_kernel<Scalar, RowPath::kPixels>
                                      : focal_loss_backward_kernel<Scalar, RowPath::kRows>;
  return launch(kernel, plan.grid, kBlock, stream, args, geometry);
}

#define FK_INSTANTIATE(Scalar)                                                                       \
  template int focal_loss_forward<Scalar>(const FocalLossForward<Scalar>&, bool, compute_t<Scalar>*, \
                                          compute_t<Scalar>*, void*, void*);                         \
  template int focal_loss_backward<Scalar>(const FocalLossBackward<Scalar>&, void*);
FK_INSTANTIATE(Half)
FK_INSTANTIATE(BFloat16)
FK_INSTANTIATE(float)
FK_INSTANTIATE(double)
#undef FK_INSTANTIATE

}  // namespace focalkern::cuda
