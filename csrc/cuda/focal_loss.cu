// Focal loss of [rows, classes] logits in any of the layouts that RowLayout describes, forward and backward.
//
// Index targets without smoothing: one pass over the logits each way. A block takes tiles of rows; for each tile
//   forward:  threads share the rows out and reduce each to (max, sum exp(z - max)) over the classes other than the
//             target; then one thread per row turns that into the loss, the three numbers that are kept, and its share
//             of the sums. The last block to finish adds the shares up.
//   backward: one thread per row turns the three numbers into the factor of p_j; then the block writes
//             factor * p_j, or the target's own value, for every element.
// plan_rows in launch.h says which threads share a row: for short rows the whole block reads the tile as one run of
// vectors (and a thread then has one or two of the shortest for itself), for longer ones a group of lanes, a warp or
// the block reads a row, and where classes lie further apart than rows ([N, C, H, W]) a lane reads a row, or two that
// lie side by side, so that a warp reads neighbours. Long rows that are fewer than multiprocessors are cut into chunks
// of classes, a block for each: forward, a second kernel of one block brings their sums together.
//
// Probability targets and label smoothing need the focal terms of every class: those kernels are in
// row_loss_soft.cu, as for the other losses of rows.

#include "cuda/common.cuh"
#include "cuda/grid_sum.cuh"
#include "cuda/row_loss.cuh"
#include "kernels.h"
#include "math/focal.h"

namespace focalkern::cuda {
namespace {

// Blocks that a multiprocessor should hold at once: left to itself, the compiler may spill registers to make room for
// more of them.
template <typename Scalar>
constexpr int kBlocksAtOnce = sizeof(Scalar) == sizeof(double) ? 2 : 4;
// A lane holds up to 26 values of a short row in 16 bits.
template <typename Scalar>
constexpr int kTileBlocks = sizeof(Scalar) == sizeof(uint16_t) ? 3 : kBlocksAtOnce<Scalar>;

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

// x / y for a y of normal size, and log x to an absolute 2^-22 and a relative 2^-22: enough for what is added to
// another logarithm.
__device__ __forceinline__ double quotient(double x, double y) { return x / y; }
__device__ __forceinline__ double absolute_logarithm(double x) { return logarithm(x); }
__device__ __forceinline__ float quotient(float x, float y) {
#if defined(__CUDA_ARCH__)
  float result;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(y));
  return x * result;
#else
  return x / y;
#endif
}
__device__ __forceinline__ float absolute_logarithm(float x) {
#if defined(__CUDA_ARCH__)
  float result;
  asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
  return result * 0.693147181f;
#else
  return logarithm(x);
#endif
}

// log(1 + t) for t in [0, 1], to 2 units in the last place.
__device__ __forceinline__ double log_one_plus_ratio(double t) { return log_one_plus(t); }
__device__ __forceinline__ float log_one_plus_ratio(float t) {
  float q = -0.00325637846f;
  q = q * t + 0.0199071616f;
  q = q * t - 0.0570642017f;
  q = q * t + 0.106142648f;
  q = q * t - 0.153118625f;
  q = q * t + 0.196781173f;
  q = q * t - 0.249545589f;
  q = q * t + 0.333300054f;
  q = q * t - 0.499999046f;
  return t + t * (t * q);
}

// From the target's logit and the sum over all other classes: their shares are as `mine` to `others`, and of the two
// shares the logarithm of the larger is -log(1 + ratio), which cancels nowhere.
template <typename Real>
__device__ __forceinline__ TargetLogs<Real> target_logs(Real z, const ExpSum<Real>& rest) {
  const bool is_top = z >= rest.max;
  const Real max = fmax(rest.max, z);
  const Real e = exponential(is_top ? rest.max - max : z - max);
  const Real mine = is_top ? Real(1) + (z - max) : e;  // 1, or NaN at infinity
  const Real others = is_top ? rest.sum * e : rest.sum;
  const bool is_likely = mine > others;
  const Real ratio = is_likely ? others : quotient(mine, others);
  const Real log_larger = log_one_plus_ratio(ratio);
  // A target far above the rest: their sum may vanish beside it, their logarithm does not.
  const Real log_others = absolute_logarithm(is_likely ? rest.sum : others);
  const Real log_s = is_likely ? log_larger : log_others + log_larger;
  const Real log_p = (z - max) - log_s;
  const Real log_u = is_likely ? (rest.max - max) + log_others - log_larger : -log_larger;
  return {max, log_s, log_p, log_u};
}

// The inverse loss is rare, and costs another exponential, a logarithm and a quotient.
template <typename Real>
__device__ __forceinline__ FocalTerms<Real> terms_of_row(Real log_p, Real log_u, Real gamma) {
  if (gamma < Real(0)) return focal_terms(log_p, log_u, gamma);
  return focal_terms<false>(log_p, log_u, gamma);
}

// ---- index targets: forward ----------------------------------------------------------------------------------------

// The next `count` of a thread's classes from `first` on, and `at` behind them.
template <int count, typename Scalar>
__device__ __forceinline__ void add_strided(ExpSum<compute_t<Scalar>>& total, const Scalar*& at, int64_t step,
                                            int classes, int target, int first, int threads) {
  using Real = compute_t<Scalar>;
  Real values[count];
#pragma unroll
  for (int k = 0; k < count; ++k, at += step) {
    const int j = first + k * threads;
    values[k] = j < classes && j != target ? load_as_compute(*at) : -kInfinity<Real>;
  }
  add_to_exp_sum(total, values);
}

// One thread's share of a row's other classes; `index` of `threads` threads on the row.
template <typename Scalar>
__device__ __forceinline__ ExpSum<compute_t<Scalar>> strided_exp_sum(const Scalar* row, int64_t class_stride,
                                                                     int classes, int target, int index, int threads) {
  ExpSum<compute_t<Scalar>> total = empty_exp_sum<compute_t<Scalar>>();
  constexpr int kUnroll = sizeof(Scalar) == sizeof(double) ? 4 : 8;  // more would spill registers
  const int64_t step = threads * class_stride;
  const Scalar* at = row + index * class_stride;
  int first = index;
  for (; first + kUnroll / 2 * threads < classes; first += kUnroll * threads) {
    add_strided<kUnroll>(total, at, step, classes, target, first, threads);
  }
  if (first < classes) add_strided<kUnroll / 2>(total, at, step, classes, target, first, threads);
  return total;
}

// A warp's share of classes that lie next to each other, with 16-byte loads; a constant says whether a warp or the
// block has the row.
template <typename Scalar, typename Threads>
__device__ __forceinline__ ExpSum<compute_t<Scalar>> row_exp_sum(const Scalar* row, int classes, int target, int index,
                                                                 Threads threads) {
  using Real = compute_t<Scalar>;
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
  Elements<Scalar> nothing;
#pragma unroll
  for (int e = 0; e < kSize; ++e) nothing.at[e] = Store<Scalar>::from_compute(-kInfinity<Real>);
  const Scalar* at = row + head + index * kSize;
  for (int first = index; first < vectors; first += kUnroll * threads, at += kUnroll * threads * kSize) {
    uint4 loaded[kUnroll];
#pragma unroll
    for (int k = 0; k < kUnroll; ++k) {
      loaded[k] = bit_cast<uint4>(nothing);
      if (first + k * threads < vectors) loaded[k] = load_vector(at + k * threads * kSize);
    }
    Real values[kUnroll * kSize];
    const int target_at = target - head - first * kSize;
#pragma unroll
    for (int k = 0; k < kUnroll; ++k) {
      unpack<Scalar>(loaded[k], values + k * kSize);
      const int target_here = target_at - k * threads * kSize;
      if (static_cast<unsigned>(target_here) < static_cast<unsigned>(kSize)) {
#pragma unroll
        for (int e = 0; e < kSize; ++e) {
          if (e == target_here) values[k * kSize + e] = -kInfinity<Real>;
        }
      }
    }
    add_to_exp_sum(total, values);
  }
  return group_exp_sum(total, kWarp);
}

template <typename Scalar>
__device__ __forceinline__ ExpSum<compute_t<Scalar>> row_exp_sum(const Scalar* row, int classes, int target, int index,
                                                                 int threads) {
  if constexpr (sizeof(Scalar) == sizeof(double)) {
    return row_exp_sum<Scalar, int>(row, classes, target, index, threads);  // both would spill registers
  } else {
    return threads == kWarp ? row_exp_sum(row, classes, target, index, std::integral_constant<int, kWarp>())
                            : row_exp_sum(row, classes, target, index, std::integral_constant<int, kBlock>());
  }
}

// Two neighbours in memory, as one word.
template <typename Scalar>
using PairWord = std::conditional_t<sizeof(Scalar) == sizeof(uint16_t), uint32_t, uint64_t>;

template <typename Scalar>
struct Pair {
  Scalar at[2];
};

// Minus infinity twice, where there is none.
template <typename Scalar>
__device__ __forceinline__ Pair<compute_t<Scalar>> load_pair(const void* address, bool exists = true) {
  const Scalar nothing = Store<Scalar>::from_compute(-kInfinity<compute_t<Scalar>>);
  auto word = bit_cast<PairWord<Scalar>>(Pair<Scalar>{nothing, nothing});
  if (exists) word = *static_cast<const PairWord<Scalar>*>(address);
  if constexpr (std::is_same_v<Scalar, BFloat16>) {
    return {bit_cast<float>(word << 16), bit_cast<float>(word & 0xffff0000u)};
  } else {
    const auto pair = bit_cast<Pair<Scalar>>(word);
    return {load_as_compute(pair.at[0]), load_as_compute(pair.at[1])};
  }
}

template <typename Scalar>
__device__ __forceinline__ void store_pair(void* address, compute_t<Scalar> first, compute_t<Scalar> second) {
  const Pair<Scalar> pair = {Store<Scalar>::from_compute(first), Store<Scalar>::from_compute(second)};
  *static_cast<PairWord<Scalar>*>(address) = bit_cast<PairWord<Scalar>>(pair);
}

// The rows of a tile; the last one may have fewer. (Unsigned: a product with a sign takes twice the instructions.)
struct TileRows {
  int64_t first;
  int rows;

  __device__ __forceinline__ TileRows(const RowPlan& plan, int64_t all, int64_t t) {
    const auto most = static_cast<uint32_t>(plan.rows_per_tile);
    first = t * most;
    const auto left = static_cast<uint64_t>(all - first);
    rows = static_cast<int>(left < most ? static_cast<uint32_t>(left) : most);
  }

  template <typename Scalar>
  __device__ __forceinline__ Scalar* of(Scalar* operand, int classes) const {
    return operand + first * static_cast<uint32_t>(classes);
  }
};

// A tile on its way to shared memory: all of a thread's loads are issued before the first is waited for. Both ends
// start on a 16-byte boundary.
template <typename Scalar>
struct TileLoad {
  static constexpr int kVectors = kTileBytes / kVectorBytes / kBlock;
  uint4 loaded[kVectors];
  int left;  // vectors from the thread's first on

  __device__ __forceinline__ void start(const Scalar* source, int count) {
    const auto* at = reinterpret_cast<const uint4*>(source) + threadIdx.x;
    left = static_cast<int>(static_cast<uint32_t>(count) / kVectorSize<Scalar> - threadIdx.x);
#pragma unroll
    for (int k = 0; k < kVectors; ++k) {
      if (k * kBlock < left) loaded[k] = at[k * kBlock];
    }
  }

  __device__ __forceinline__ void finish(Scalar* tile, const Scalar* source, int count) const {
    auto* to = reinterpret_cast<uint4*>(tile) + threadIdx.x;
#pragma unroll
    for (int k = 0; k < kVectors; ++k) {
      if (k * kBlock < left) to[k * kBlock] = loaded[k];
    }
    // What fills no vector, in the last tile alone: a loop, which others step over.
    const int in_vectors = count & ~(kVectorSize<Scalar> - 1);
#pragma unroll 1
    for (int at = in_vectors + static_cast<int>(threadIdx.x); at < count; at += kBlock) tile[at] = source[at];
  }
};

// Back again.
template <typename Scalar>
__device__ __forceinline__ void store_tile(Scalar* target, const Scalar* tile, int count) {
  constexpr int kSize = kVectorSize<Scalar>;
  const int thread = static_cast<int>(threadIdx.x);
  const int vectors = count / kSize;
  for (int vector = thread; vector < vectors; vector += kBlock) {
    store_vector(target + vector * kSize, load_vector(tile + vector * kSize));
  }
  const int at = vectors * kSize + thread;
  if (at < count) target[at] = tile[at];
}

// sum e^(z - base), for a base that is the maximum or exp_base of it. A product and a difference are one operation:
// what rounding the base's own product leaves is the same for all of them, and is made up for in the end. From 2^30 on
// that would be too much; numbers that differ there differ by 32 at the least, and any scale will do.
template <int count>
__device__ __forceinline__ double sum_of_exponentials(const double* values, double base) {
  double sum = summand(values[0] - base);
#pragma unroll
  for (int k = 1; k < count; ++k) sum += summand(values[k] - base);
  return sum;
}
template <int count>
__device__ __forceinline__ float sum_of_exponentials(const float* values, float base) {
  const float scale = fabsf(base) < 0x1p30f ? 1.44269504f : 1.0f;
  const float scaled_base = base * scale;
  float sum = power_of_two(fmaf(values[0], scale, -scaled_base));
#pragma unroll
  for (int k = 1; k < count; ++k) sum += power_of_two(fmaf(values[k], scale, -scaled_base));
  return sum * power_of_two(-fmaf(base, scale, -scaled_base));
}

// A group's share of a short row in shared memory, in at most kSlots steps, of which it surely has the first kSure: all
// of it is held in registers between the maximum and the sum. A step is an element of each lane, or a word of two;
// places are counted in bytes, which need no multiplication. Lanes: int, or a constant.
template <int kSlots, int kSure, bool kAround, typename Scalar, int kValues, typename Lanes>
__device__ __forceinline__ ExpSum<compute_t<Scalar>> tile_exp_sum(const unsigned char* tile, int row, int classes,
                                                                  int steps, int index, Lanes lanes) {
  using Real = compute_t<Scalar>;
  using Step = std::conditional_t<kValues == 2, Pair<Scalar>, Scalar>;
  constexpr int kBytes = static_cast<int>(sizeof(Step));
  const int row_bytes = classes * static_cast<int>(sizeof(Scalar));
  const int step = lanes * kBytes;
  const int around = steps * step;
  int at = index * kBytes;  // in the row
  // Rows begin a step apart from each other, as far as a power of two allows: at row lengths of many 2s their lanes
  // would meet in one bank.
  if constexpr (kAround) at += (row & ((1 << (31 - __clz(steps))) - 1)) * step;
  const unsigned char* of_row = tile + row * row_bytes;
  Real values[kSlots * kValues];
#pragma unroll
  for (int k = 0; k < kSlots; ++k) {
    const int place = kAround ? at : at + k * step;
    const bool exists = kAround ? (k < kSure || k < steps) && place < row_bytes : k < kSure || place < row_bytes;
    if constexpr (kValues == 2) {
      const Pair<Real> pair = load_pair<Scalar>(of_row + place, exists);
      values[2 * k] = pair.at[0];
      values[2 * k + 1] = pair.at[1];
    } else {
      values[k] = -kInfinity<Real>;
      if (exists) values[k] = load_as_compute(*reinterpret_cast<const Scalar*>(of_row + place));
    }
    if constexpr (kAround) {
      at += step;
      if (at >= around) at -= around;
    }
  }
  Real max = values[0];
#pragma unroll
  for (int k = 1; k < kSlots * kValues; ++k) max = fmax(max, values[k]);
  max = group_max(max, lanes);
  return {max, group_sum(sum_of_exponentials<kSlots * kValues>(values, exp_base(max)), lanes)};
}

// Slots beyond the steps cost as much as others: of some numbers of them, the least that will do.
template <bool kAround, typename Scalar, int kValues, typename Lanes>
__device__ __forceinline__ ExpSum<compute_t<Scalar>> tile_exp_sum(const unsigned char* tile, int row, int classes,
                                                                  int steps, int index, Lanes lanes) {
  static_assert(kValuesPerLane == 16 && kWordsPerLane == 13, "as many slots as there may be steps");
  // Several lanes have more than half of the most that a lane can have.
  constexpr bool kMayBeFew = std::is_same_v<Lanes, int> || Lanes() == 1;
  if constexpr (kMayBeFew) {
    if (steps <= 4) return tile_exp_sum<4, 0, kAround, Scalar, kValues>(tile, row, classes, steps, index, lanes);
  }
  if constexpr (kMayBeFew || kValues == 2) {
    if (steps <= 8) return tile_exp_sum<8, 4, kAround, Scalar, kValues>(tile, row, classes, steps, index, lanes);
  }
  if (steps <= 10) return tile_exp_sum<10, 8, kAround, Scalar, kValues>(tile, row, classes, steps, index, lanes);
  if (kValues == 2 || steps <= 13) {
    return tile_exp_sum<13, 10, kAround, Scalar, kValues>(tile, row, classes, steps, index, lanes);
  }
  return tile_exp_sum<16, 13, kAround, Scalar, kValues>(tile, row, classes, steps, index, lanes);
}

template <bool kAround, typename Scalar, typename Lanes>
__device__ __forceinline__ ExpSum<compute_t<Scalar>> tile_exp_sum(const unsigned char* tile, int row, int classes,
                                                                  int steps, int index, Lanes lanes) {
  if constexpr (sizeof(Scalar) == sizeof(uint16_t)) {
    if (classes % 2 == 0) return tile_exp_sum<kAround, Scalar, 2>(tile, row, classes, steps, index, lanes);
  }
  return tile_exp_sum<kAround, Scalar, 1>(tile, row, classes, steps, index, lanes);
}

// f(an integral constant) for the logarithm of the number of lanes.
template <int least, int most, typename Function>
__device__ __forceinline__ void with_lane_bits(int bits, const Function& f) {
  if constexpr (least == most) {
    f(std::integral_constant<int, least>());
  } else {
    constexpr int middle = (least + most) / 2;
    if (bits <= middle) {
      with_lane_bits<least, middle>(bits, f);
    } else {
      with_lane_bits<middle + 1, most>(bits, f);
    }
  }
}

// What comes of a row, by the thread that has its target's logit and the sum over its other classes.
template <typename Real>
struct RowLoss {
  TargetLogs<Real> logs;
  Real loss;
  Real weight;  // 0 in a row that is not counted
};

template <typename Scalar>
__device__ __forceinline__ RowLoss<compute_t<Scalar>> loss_of_row(const FocalLossForward<Scalar>& args, int64_t row,
                                                                  int label, compute_t<Scalar> z_target,
                                                                  const ExpSum<compute_t<Scalar>>& rest) {
  using Real = compute_t<Scalar>;
  if (label < 0) return {{0, 0, 0, 0}, label == kIgnored ? Real(0) : kNaN<Real>, 0};
  const TargetLogs<Real> logs = target_logs(z_target, rest);
  const Real gamma = gamma_at_log(args, row, logs.log_p);
  const Real weight = args.class_weight != nullptr ? args.class_weight[label] : Real(1);
  return {logs, weight * focal_loss_alone(logs.log_p, logs.log_u, gamma), weight};
}

template <typename Scalar>
__device__ __forceinline__ void finish_row(const FocalLossForward<Scalar>& args, int64_t row, int label,
                                           compute_t<Scalar> z_target, const ExpSum<compute_t<Scalar>>& rest,
                                           double& loss_sum, double& weight_sum) {
  const auto [logs, loss, weight] = loss_of_row(args, row, label, z_target, rest);
  args.saved[row] = logs.max;
  args.saved[args.rows + row] = logs.log_s;
  args.saved[2 * args.rows + row] = logs.log_u;
  if (args.row_loss != nullptr) args.row_loss[row] = loss;
  loss_sum += static_cast<double>(loss);
  weight_sum += static_cast<double>(weight);
}

template <typename Scalar, RowPath path>
__global__ __launch_bounds__(kBlock, kBlocksAtOnce<Scalar>) void focal_loss_forward_kernel(
    const __grid_constant__ FocalLossForward<Scalar> args, const __grid_constant__ Geometry geometry,
    const __grid_constant__ GridSum<compute_t<Scalar>> reduction) {
  using Real = compute_t<Scalar>;
  const RowPlan& plan = geometry.plan;
  __shared__ int labels[kBlock];           // [rows_per_tile]
  __shared__ int64_t offsets[kBlock];      // [rows_per_tile]
  __shared__ ExpSum<Real> shares[kBlock];  // [rows_per_tile, parts]

  const int thread = static_cast<int>(threadIdx.x);
  const int classes = static_cast<int>(args.classes);
  // Whether a thread has its row for itself. (In double, both ways together would spill registers.)
  const bool is_alone = sizeof(Scalar) != sizeof(double) && path == RowPath::kPixels && plan.parts == 1;
  double loss_sum = 0;
  double weight_sum = 0;
  for (int64_t t = blockIdx.x; t < plan.tiles; t += gridDim.x) {
    const int64_t first = t * plan.rows_per_tile;
    const int64_t left = args.rows - first;
    const int rows = left < plan.rows_per_tile ? static_cast<int>(left) : plan.rows_per_tile;

    // A thread for each row finds its label and the target's logit.
    int label = kIgnored;
    Real z_target = 0;
    int64_t offset = 0;
    if (thread < rows) {
      label = as_class(args, args.labels[first + thread]);
      labels[thread] = label;
      offset = geometry.logits(first + thread);
      offsets[thread] = offset;
      if (label >= 0) z_target = load_as_compute(args.logits[offset + label * args.layout.class_stride]);
    }

    // All threads reduce the classes other than the target. Rows that are ignored are not read.
    ExpSum<Real> rest = empty_exp_sum<Real>();
    if (is_alone) {
      if (label >= 0) {
        rest = strided_exp_sum(args.logits + offset, args.layout.class_stride, classes, label, 0, 1);
      }
    } else {
      __syncthreads();
      if constexpr (path == RowPath::kPixels) {
        const int warp = thread / kWarp;
        const int part = warp % plan.parts;
        const int r = warp / plan.parts * kWarp + thread % kWarp;
        if (r < rows && labels[r] >= 0) {
          shares[r * plan.parts + part] =
              strided_exp_sum(args.logits + offsets[r], args.layout.class_stride, classes, labels[r], part, plan.parts);
        }
      } else {
        const int lanes = plan.lanes;
        const int rows_at_once = kBlock >> plan.lane_bits;
        const int warp_lanes = lanes < kWarp ? lanes : kWarp;
        const int index = thread & (lanes - 1);
        for (int r0 = 0; r0 < rows; r0 += rows_at_once) {
          const int r = r0 + (thread >> plan.lane_bits);
          const bool is_live = r < rows && labels[r < rows ? r : 0] >= 0;
          ExpSum<Real> share = empty_exp_sum<Real>();
          const Scalar* row = args.logits + offsets[r < rows ? r : 0];
          // A warp or the block is of one mind about a row.
          if (lanes >= kWarp && args.layout.class_stride == 1) {
            if (is_live) share = row_exp_sum(row, classes, labels[r], index, lanes);
          } else {
            if (is_live) {
              share = strided_exp_sum(row, args.layout.class_stride, classes, labels[r], index, lanes);
            }
            share = group_exp_sum(share, warp_lanes);
          }
          const int part = plan.parts == 1 ? 0 : thread / kWarp;
          if ((thread & (warp_lanes - 1)) == 0 && is_live) shares[r * plan.parts + part] = share;
        }
      }
    }
    __syncthreads();

    // A thread for each row again.
    if (thread < rows) {
      if (label >= 0) {
        const ExpSum<Real>* parts = shares + thread * plan.parts;
        if (!is_alone) rest = parts[0];
        if (plan.parts > 1) {
          for (int part = 1; part < plan.parts; ++part) rest.max = fmax(rest.max, parts[part].max);
          const Real base = exp_base(rest.max);
          rest.sum = 0;
          for (int part = 0; part < plan.parts; ++part) {
            rest.sum += parts[part].sum * exponential(parts[part].max - base);
          }
        }
      }
      finish_row(args, first + thread, label, z_target, rest, loss_sum, weight_sum);
    }
  }
  sum_over_grid(reduction, loss_sum, weight_sum);
}

// Short rows that lie end to end: a group of lanes for each row of a tile in shared memory.
template <typename Scalar>
__global__ __launch_bounds__(kBlock, kTileBlocks<Scalar>) void focal_loss_forward_tile_kernel(
    const __grid_constant__ FocalLossForward<Scalar> args, const __grid_constant__ RowPlan plan,
    const __grid_constant__ GridSum<compute_t<Scalar>> reduction) {
  using Real = compute_t<Scalar>;
  __shared__ __align__(16) unsigned char tile_bytes[kTileBytes];
  __shared__ ExpSum<Real> shares[kBlock];  // [rows_per_tile]
  Scalar* tile = reinterpret_cast<Scalar*>(tile_bytes);
  const int thread = static_cast<int>(threadIdx.x);
  const int classes = static_cast<int>(args.classes);
  double loss_sum = 0;
  double weight_sum = 0;
  for (int64_t t = blockIdx.x; t < plan.tiles; t += gridDim.x) {
    const TileRows of_tile(plan, args.rows, t);
    const int64_t first = of_tile.first;
    const int rows = of_tile.rows;
    const Scalar* logits = of_tile.of(args.logits, classes);
    TileLoad<Scalar> load;
    load.start(logits, rows * classes);
    // A thread for each row finds its label, and takes the target's logit out of the tile.
    int label = kIgnored;
    if (thread < rows) label = as_class(args, args.labels[first + thread]);
    load.finish(tile, logits, rows * classes);
    __syncthreads();
    Real z_target = 0;
    if (label >= 0) {
      z_target = load_as_compute(tile[thread * classes + label]);
      tile[thread * classes + label] = Store<Scalar>::from_compute(-kInfinity<Real>);
    }
    __syncthreads();

    // All threads reduce the other classes, of rows without a target too. Any row will do where there is none: its sum
    // goes nowhere.
    const auto reduce = [&](auto around, int lane_bits, auto lanes) {
      const int index = thread & (lanes - 1);
      int first_of_round = 0;
      do {
        const int r = first_of_round + (thread >> lane_bits);
        const int of = r < rows ? r : 0;
        const auto share = tile_exp_sum<around, Scalar>(tile_bytes, of, classes, plan.steps, index, lanes);
        if (index == 0) shares[r] = share;
        first_of_round += kBlock / lanes;
      } while (first_of_round < rows);
    };
    if (sizeof(Scalar) == sizeof(double) || plan.around) {
      reduce(std::true_type(), plan.lane_bits, plan.lanes);
    } else {
      with_lane_bits<0, 5>(plan.lane_bits, [&](auto lane_bits) {
        reduce(std::false_type(), lane_bits, std::integral_constant<int, (1 << lane_bits)>());
      });
    }
    __syncthreads();

    // A thread for each row again.
    if (thread < rows) finish_row(args, first + thread, label, z_target, shares[thread], loss_sum, weight_sum);
  }
  // Warps beyond the rows of a tile have nothing to add.
  sum_over_grid(reduction, loss_sum, weight_sum, thread < plan.rows_per_tile || thread < kWarp);
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

// What the forward pass kept of a row.
template <typename Real>
struct SavedRow {
  Real max;
  Real log_s;
  Real log_u;
};

// z: the target's logit.
template <typename Scalar>
__device__ __forceinline__ RowGradient<compute_t<Scalar>> row_gradient(const FocalLossBackward<Scalar>& args,
                                                                       int64_t row, int label, compute_t<Scalar> z,
                                                                       const SavedRow<compute_t<Scalar>>& saved,
                                                                       compute_t<Scalar> grad_loss,
                                                                       bool has_grad_gamma = true) {
  using Real = compute_t<Scalar>;
  RowGradient<Real> result = {0, 0, 0, label};
  Real grad_gamma = 0;
  if (label >= 0) {
    const auto [max, log_s, log_u] = saved;
    const Real log_p = (z - max) - log_s;
    const Real gamma = gamma_at_log(args, row, log_p);
    const FocalTerms<Real> terms = terms_of_row(log_p, log_u, gamma);
    const Real weight = args.class_weight != nullptr ? args.class_weight[label] : Real(1);
    const Real row_scale = weight * grad_loss;
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
  if (has_grad_gamma && args.grad_gamma != nullptr) args.grad_gamma[row] = grad_gamma;
  return result;
}

template <typename Scalar>
__device__ __forceinline__ RowGradient<compute_t<Scalar>> row_gradient(const FocalLossBackward<Scalar>& args,
                                                                       int64_t row, int64_t offset,
                                                                       bool has_grad_gamma = true) {
  using Real = compute_t<Scalar>;
  const int label = as_class(args, args.labels[row]);
  SavedRow<Real> saved = {0, 0, 0};
  Real z = 0;
  Real grad_loss = 0;
  if (label >= 0) {
    saved = {args.saved[row], args.saved[args.rows + row], args.saved[2 * args.rows + row]};
    z = load_as_compute(args.logits[offset + label * args.layout.class_stride]);
    grad_loss = upstream(args, row);
  }
  return row_gradient(args, row, label, z, saved, grad_loss, has_grad_gamma);
}

// One element, the target's aside. No logit is above the maximum, and a NaN reaches the whole row through the saved
// numbers: the minimum is for rows that are ignored, where anything may lie, and where it takes care of infinity and
// NaN. A gradient that is stored in 16 bits loses more by that than `summand` costs it.
template <typename Scalar>
__device__ __forceinline__ Scalar gradient_at(const RowGradient<compute_t<Scalar>>& row, compute_t<Scalar> z) {
  using Real = compute_t<Scalar>;
  const Real below_max = fmin(z - row.max, Real(0));
  const Real e = sizeof(Scalar) < sizeof(Real) ? summand(below_max) : exponential(below_max);
  return Store<Scalar>::from_compute(row.scale * e);
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
      const Scalar value = gradient_at<Scalar>(gradient, values[k]);
      if (first + k * threads < classes) *grad_at = value;
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
    grad[loose] = gradient_at<Scalar>(gradient, load_as_compute(row[loose]));
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
          result.at[e] = gradient_at<Scalar>(gradient, load_as_compute(elements.at[e]));
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
          result.at[e] = gradient_at<Scalar>(gradient, load_as_compute(elements.at[e]));
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
    grad[rest] = gradient_at<Scalar>(gradients[divide(rest)], z);
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
  __shared__ RowGradient<Real> gradients[kBlock];                   // [rows_per_tile]
  __shared__ int64_t offsets[path == RowPath::kTile ? 1 : kBlock];  // of the same
  const int thread = static_cast<int>(threadIdx.x);
  const int classes = static_cast<int>(args.classes);
  for (int64_t t = blockIdx.x; t < plan.tiles; t += gridDim.x) {
    const int64_t first = t * plan.rows_per_tile;
    const int64_t left = args.rows - first;
    const int rows = left < plan.rows_per_tile ? static_cast<int>(left) : plan.rows_per_tile;

    __syncthreads();  // the last tile's gradients have been read
    if (thread < rows) {
      const int64_t offset = geometry.logits(first + thread);
      gradients[thread] = row_gradient(args, first + thread, offset);
      if constexpr (path != RowPath::kTile) offsets[thread] = offset;
    }
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
        const Scalar* row = args.logits + offsets[r];
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

// ---- index targets: rows of a few classes ---------------------------------------------------------------------------
// A thread has a row of a tile for itself, or two in 16 bits, which are read a word at a time. How many classes there
// are is known when the loops are compiled.

template <typename Scalar>
constexpr int kOwnRows = 4 / static_cast<int>(sizeof(Scalar));

// f(an integral constant) for the number of classes, which is at most kValuesPerLane and fills no vectors.
template <typename Scalar, int least = 1, int most = kValuesPerLane, typename Function>
__device__ __forceinline__ void with_classes(int classes, const Function& f) {
  if constexpr (least < most) {
    constexpr int middle = (least + most) / 2;
    if (classes <= middle) {
      with_classes<Scalar, least, middle>(classes, f);
    } else {
      with_classes<Scalar, middle + 1, most>(classes, f);
    }
  } else if constexpr (least * sizeof(Scalar) % kVectorBytes != 0) {
    f(std::integral_constant<int, least>());
  }
}

// All values of the thread's rows.
template <int count, typename Scalar>
__device__ __forceinline__ void load_own(const Scalar* own, float* values) {
#pragma unroll
  for (int k = 0; k < count; k += kOwnRows<Scalar>) {
    if constexpr (kOwnRows<Scalar> == 2) {
      const Pair<float> pair = load_pair<Scalar>(own + k);
      values[k] = pair.at[0];
      values[k + 1] = pair.at[1];
    } else {
      values[k] = load_as_compute(own[k]);
    }
  }
}

// The row beyond the last, beside it, has zeros.
template <typename Scalar>
__device__ __forceinline__ void fill_beyond(Scalar* own, int mine, int rows, int classes) {
  if (kOwnRows<Scalar> == 1 || mine + 1 != rows) return;
  for (int j = classes; j < 2 * classes; ++j) own[j] = Store<Scalar>::from_compute(0);
}

template <typename Scalar>
__global__ __launch_bounds__(kBlock, kBlocksAtOnce<Scalar>) void focal_loss_forward_own_kernel(
    const __grid_constant__ FocalLossForward<Scalar> args, const __grid_constant__ RowPlan plan,
    const __grid_constant__ GridSum<float> reduction) {
  __shared__ __align__(16) unsigned char tile_bytes[kTileBytes];
  Scalar* tile = reinterpret_cast<Scalar*>(tile_bytes);
  const int classes = static_cast<int>(args.classes);
  const int mine = kOwnRows<Scalar> * static_cast<int>(threadIdx.x);
  Scalar* own = tile + mine * classes;
  double loss_sum = 0;
  double weight_sum = 0;
  for (int64_t t = blockIdx.x; t < plan.tiles; t += gridDim.x) {
    const TileRows of_tile(plan, args.rows, t);
    const int64_t first = of_tile.first;
    const int rows = of_tile.rows;
    const Scalar* logits = of_tile.of(args.logits, classes);
    TileLoad<Scalar> load;
    load.start(logits, rows * classes);
    int labels[kOwnRows<Scalar>];
    if (mine < rows) read_labels(args, first + mine, rows - mine, labels);
    load.finish(tile, logits, rows * classes);
    __syncthreads();
    if (mine < rows) {
      fill_beyond(own, mine, rows, classes);
      float z_target[kOwnRows<Scalar>];
      ExpSum<float> rest[kOwnRows<Scalar>];
#pragma unroll
      for (int p = 0; p < kOwnRows<Scalar>; ++p) {
        z_target[p] = 0;
        if (labels[p] < 0) continue;
        Scalar& target = own[p * classes + labels[p]];
        z_target[p] = load_as_compute(target);
        target = Store<Scalar>::from_compute(-kInfinity<float>);
      }
      with_classes<Scalar>(classes, [&](auto count) {
        float values[kOwnRows<Scalar> * count];
        load_own<kOwnRows<Scalar> * count>(own, values);
#pragma unroll
        for (int p = 0; p < kOwnRows<Scalar>; ++p) rest[p] = exp_sum_of<count>(values + p * count);
      });
      const int64_t row = first + mine;
      float* const saved = args.saved + row;
#pragma unroll
      for (int p = 0; p < kOwnRows<Scalar>; ++p) {
        if (mine + p >= rows) break;
        const auto [logs, loss, weight] = loss_of_row(args, row + p, labels[p], z_target[p], rest[p]);
        saved[p] = logs.max;
        saved[args.rows + p] = logs.log_s;
        saved[2 * args.rows + p] = logs.log_u;
        if (args.row_loss != nullptr) args.row_loss[row + p] = loss;
        loss_sum += static_cast<double>(loss);
        weight_sum += static_cast<double>(weight);
      }
    }
    __syncthreads();  // before the next tile
  }
  sum_over_grid(reduction, loss_sum, weight_sum);
}

template <typename Scalar>
__global__ __launch_bounds__(kBlock, kBlocksAtOnce<Scalar>) void focal_loss_backward_own_kernel(
    const __grid_constant__ FocalLossBackward<Scalar> args, const __grid_constant__ RowPlan plan) {
  __shared__ __align__(16) unsigned char tile_bytes[kTileBytes];
  Scalar* tile = reinterpret_cast<Scalar*>(tile_bytes);
  const int classes = static_cast<int>(args.classes);
  const int mine = kOwnRows<Scalar> * static_cast<int>(threadIdx.x);
  Scalar* own = tile + mine * classes;
  for (int64_t t = blockIdx.x; t < plan.tiles; t += gridDim.x) {
    const TileRows of_tile(plan, args.rows, t);
    const int64_t first = of_tile.first;
    const int rows = of_tile.rows;
    const Scalar* logits = of_tile.of(args.logits, classes);
    TileLoad<Scalar> load;
    load.start(logits, rows * classes);
    int labels[kOwnRows<Scalar>];
    if (mine < rows) read_labels(args, first + mine, rows - mine, labels);
    load.finish(tile, logits, rows * classes);
    __syncthreads();
    if (mine < rows) {
      fill_beyond(own, mine, rows, classes);
      RowGradient<float> gradients[kOwnRows<Scalar>];
#pragma unroll
      for (int p = 0; p < kOwnRows<Scalar>; ++p) {
        gradients[p] = {0, 0, 0, kIgnored};
        if (mine + p >= rows) break;
        const int64_t row = first + mine + p;
        SavedRow<float> saved = {0, 0, 0};
        float z = 0;
        float grad_loss = 0;
        if (labels[p] >= 0) {
          saved = {args.saved[row], args.saved[args.rows + row], args.saved[2 * args.rows + row]};
          z = load_as_compute(own[p * classes + labels[p]]);
          grad_loss = upstream(args, row);
        }
        gradients[p] = row_gradient(args, row, labels[p], z, saved, grad_loss);
      }
      with_classes<Scalar>(classes, [&](auto count) {
        float values[kOwnRows<Scalar> * count];
        load_own<kOwnRows<Scalar> * count>(own, values);
#pragma unroll
        for (int k = 0; k < kOwnRows<Scalar> * count; k += kOwnRows<Scalar>) {
          if constexpr (kOwnRows<Scalar> == 2) {
            const Pair<Scalar> pair = {gradient_at<Scalar>(gradients[k / count], values[k]),
                                       gradient_at<Scalar>(gradients[(k + 1) / count], values[k + 1])};
            *reinterpret_cast<PairWord<Scalar>*>(own + k) = bit_cast<PairWord<Scalar>>(pair);
          } else {
            own[k] = gradient_at<Scalar>(gradients[0], values[k]);
          }
        }
      });
#pragma unroll
      for (int p = 0; p < kOwnRows<Scalar>; ++p) {
        if (labels[p] >= 0) own[p * classes + labels[p]] = Store<Scalar>::from_compute(gradients[p].at_target);
      }
    }
    __syncthreads();
    store_tile(of_tile.of(args.grad_logits, classes), tile, rows * classes);
    __syncthreads();  // before the next tile
  }
}

// ---- index targets: pairs of pixels --------------------------------------------------------------------------------
// Where there are pixels enough for a thread to have several for itself: two neighbours, whose logits of a class are
// one word, so that they share its place, its load and the loop.

// The values of `size` classes, or of `count` where those are fewer; -inf for none, and for the targets.
template <int size, typename Scalar>
__device__ __forceinline__ void load_pairs(float (&values)[2][size], const char* logits, int stride, int count,
                                           const int (&target)[2]) {
#pragma unroll
  for (int k = 0; k < size; ++k) {
    Pair<float> pair = {-kInfinity<float>, -kInfinity<float>};
    if (k < count) pair = load_pair<Scalar>(logits + k * static_cast<int64_t>(stride));
    values[0][k] = k == target[0] ? -kInfinity<float> : pair.at[0];
    values[1][k] = k == target[1] ? -kInfinity<float> : pair.at[1];
  }
}

template <int size, typename Scalar>
__device__ __forceinline__ void first_pairs(ExpSum<float> (&total)[2], const char* logits, int stride, int count,
                                            const int (&target)[2]) {
  float values[2][size];
  load_pairs<size, Scalar>(values, logits, stride, count, target);
  total[0] = exp_sum_of<size>(values[0]);
  total[1] = exp_sum_of<size>(values[1]);
}

template <typename Scalar>
__global__ __launch_bounds__(kBlock, kBlocksAtOnce<Scalar>) void focal_loss_forward_pairs_kernel(
    const __grid_constant__ FocalLossForward<Scalar> args, const __grid_constant__ RowOffset offset_of,
    const __grid_constant__ GridSum<float> reduction) {
  constexpr int kUnroll = 16;
  const int classes = static_cast<int>(args.classes);
  const int stride = static_cast<int>(args.layout.class_stride) * static_cast<int>(sizeof(Scalar));
  double loss_sum = 0;
  double weight_sum = 0;
  for (int64_t row = 2 * (int64_t{blockIdx.x} * kBlock + threadIdx.x); row < args.rows;
       row += 2 * int64_t{gridDim.x} * kBlock) {
    int labels[2];
    read_labels(args, row, 2, labels);
    const char* at = reinterpret_cast<const char*>(args.logits + offset_of(row));
    float z_target[2];
    ExpSum<float> rest[2];
#pragma unroll
    for (int p = 0; p < 2; ++p) {
      const auto* mine = reinterpret_cast<const Scalar*>(at + labels[p] * static_cast<int64_t>(stride)) + p;
      z_target[p] = labels[p] >= 0 ? load_as_compute(*mine) : 0.0f;
    }
    // What is over comes first: it has nothing before it to be brought to the same maximum.
    const int over = (classes - 1) % kUnroll + 1;
    int target[2] = {labels[0], labels[1]};  // from the class that `at` is at
    if (over <= 4) {
      first_pairs<4, Scalar>(rest, at, stride, over, target);
    } else if (over <= 8) {
      first_pairs<8, Scalar>(rest, at, stride, over, target);
    } else {
      first_pairs<kUnroll, Scalar>(rest, at, stride, over, target);
    }
    at += over * static_cast<int64_t>(stride);
    target[0] -= over;
    target[1] -= over;
    for (int left = classes - over; left > 0; left -= kUnroll) {
      float values[2][kUnroll];
      load_pairs<kUnroll, Scalar>(values, at, stride, kUnroll, target);
      add_to_exp_sum(rest[0], values[0]);
      add_to_exp_sum(rest[1], values[1]);
      at += kUnroll * static_cast<int64_t>(stride);
      target[0] -= kUnroll;
      target[1] -= kUnroll;
    }
    const RowLoss<float> of[2] = {loss_of_row(args, row, labels[0], z_target[0], rest[0]),
                                  loss_of_row(args, row + 1, labels[1], z_target[1], rest[1])};
    float* saved = args.saved + row;
    store_pair<float>(saved, of[0].logs.max, of[1].logs.max);
    store_pair<float>(saved + args.rows, of[0].logs.log_s, of[1].logs.log_s);
    store_pair<float>(saved + 2 * args.rows, of[0].logs.log_u, of[1].logs.log_u);
    if (args.row_loss != nullptr) {
      args.row_loss[row] = of[0].loss;
      args.row_loss[row + 1] = of[1].loss;
    }
    loss_sum += static_cast<double>(of[0].loss) + static_cast<double>(of[1].loss);
    weight_sum += static_cast<double>(of[0].weight) + static_cast<double>(of[1].weight);
  }
  sum_over_grid(reduction, loss_sum, weight_sum);
}

// `count` classes, or those that there are of them.
template <int count, bool kIsLast, typename Scalar>
__device__ __forceinline__ void write_pairs(char* grad, int grad_stride, const char* logits, int stride, int left,
                                            const RowGradient<float> (&gradients)[2]) {
  Pair<float> values[count];
#pragma unroll
  for (int k = 0; k < count; ++k) {
    values[k] = {0, 0};
    if (!kIsLast || k < left) values[k] = load_pair<Scalar>(logits + k * static_cast<int64_t>(stride));
  }
#pragma unroll
  for (int k = 0; k < count; ++k) {
    const Pair<Scalar> pair = {gradient_at<Scalar>(gradients[0], values[k].at[0]),
                               gradient_at<Scalar>(gradients[1], values[k].at[1])};
    auto* to = reinterpret_cast<PairWord<Scalar>*>(grad + k * static_cast<int64_t>(grad_stride));
    if (!kIsLast || k < left) *to = bit_cast<PairWord<Scalar>>(pair);
  }
}

template <typename Scalar>
__global__ __launch_bounds__(kBlock, kBlocksAtOnce<Scalar>) void focal_loss_backward_pairs_kernel(
    const __grid_constant__ FocalLossBackward<Scalar> args, const __grid_constant__ RowOffset offset_of,
    const __grid_constant__ RowOffset grad_offset_of) {
  constexpr int kUnroll = 8;
  constexpr int kBytes = static_cast<int>(sizeof(Scalar));
  const int classes = static_cast<int>(args.classes);
  const int stride = static_cast<int>(args.layout.class_stride) * kBytes;
  const int grad_stride = static_cast<int>(args.grad_layout.class_stride) * kBytes;
  for (int64_t row = 2 * (int64_t{blockIdx.x} * kBlock + threadIdx.x); row < args.rows;
       row += 2 * int64_t{gridDim.x} * kBlock) {
    int labels[2];
    read_labels(args, row, 2, labels);
    const char* at = reinterpret_cast<const char*>(args.logits + offset_of(row));
    const float* saved = args.saved + row;
    const Pair<float> max = load_pair<float>(saved);
    const Pair<float> log_s = load_pair<float>(saved + args.rows);
    const Pair<float> log_u = load_pair<float>(saved + 2 * args.rows);
    const float grad_loss = upstream(args, row);
    const float next_grad_loss = args.grad_stride != 0 ? upstream(args, row + 1) : grad_loss;
    RowGradient<float> gradients[2];
#pragma unroll
    for (int p = 0; p < 2; ++p) {
      const auto* mine = reinterpret_cast<const Scalar*>(at + labels[p] * static_cast<int64_t>(stride)) + p;
      const float z = labels[p] >= 0 ? load_as_compute(*mine) : 0.0f;
      const SavedRow<float> of_row = {max.at[p], log_s.at[p], log_u.at[p]};
      gradients[p] = row_gradient(args, row + p, labels[p], z, of_row, p == 0 ? grad_loss : next_grad_loss);
    }
    char* const grad = reinterpret_cast<char*>(args.grad_logits + grad_offset_of(row));
    char* to = grad;
    int left = classes;
    for (; left >= kUnroll; left -= kUnroll) {
      write_pairs<kUnroll, false, Scalar>(to, grad_stride, at, stride, left, gradients);
      at += kUnroll * static_cast<int64_t>(stride);
      to += kUnroll * static_cast<int64_t>(grad_stride);
    }
    if (left > kUnroll / 2) {
      write_pairs<kUnroll, true, Scalar>(to, grad_stride, at, stride, left, gradients);
    } else if (left > 0) {
      write_pairs<kUnroll / 2, true, Scalar>(to, grad_stride, at, stride, left, gradients);
    }
#pragma unroll
    for (int p = 0; p < 2; ++p) {
      auto* target = reinterpret_cast<Scalar*>(grad + labels[p] * static_cast<int64_t>(grad_stride)) + p;
      if (labels[p] >= 0) *target = Store<Scalar>::from_compute(gradients[p].at_target);
    }
  }
}

// ---- few long rows -------------------------------------------------------------------------------------------------

// The part of a row that a block has.
struct Chunk {
  int64_t row;
  int first;    // class
  int classes;  // from there on

  __device__ __forceinline__ Chunk(const RowPlan& plan, int64_t classes_of_row) {
    const int chunk = static_cast<int>(blockIdx.x) % plan.chunks;
    row = static_cast<int>(blockIdx.x) / plan.chunks;
    first = chunk * plan.chunk_classes;
    const int left = static_cast<int>(classes_of_row) - first;
    classes = left < plan.chunk_classes ? left : plan.chunk_classes;
  }
};

// sums: [rows, chunks], of the classes other than the target. Those of rows without a target stay unwritten.
template <typename Scalar>
__global__ __launch_bounds__(kBlock, kBlocksAtOnce<Scalar>) void focal_loss_chunk_forward_kernel(
    const __grid_constant__ FocalLossForward<Scalar> args, const __grid_constant__ Geometry geometry,
    ExpSum<compute_t<Scalar>>* sums) {
  using Real = compute_t<Scalar>;
  __shared__ ExpSum<Real> shares[kWarpsPerBlock];
  const int thread = static_cast<int>(threadIdx.x);
  const Chunk chunk(geometry.plan, args.classes);
  const int label = as_class(args, args.labels[chunk.row]);
  if (label < 0) return;
  const int64_t class_stride = args.layout.class_stride;
  const Scalar* logits = args.logits + geometry.logits(chunk.row) + chunk.first * class_stride;
  const int target = label - chunk.first;  // possibly in another chunk
  ExpSum<Real> share;
  if (class_stride == 1) {
    share = row_exp_sum(logits, chunk.classes, target, thread, std::integral_constant<int, kBlock>());
  } else {
    share = strided_exp_sum(logits, class_stride, chunk.classes, target, thread, kBlock);
    share = group_exp_sum(share, kWarp);
  }
  if (thread % kWarp == 0) shares[thread / kWarp] = share;
  __syncthreads();
  if (thread >= kWarp) return;
  share = group_exp_sum(shares[thread % kWarpsPerBlock], kWarpsPerBlock);
  if (thread == 0) sums[blockIdx.x] = share;
}

// One block: `lanes` threads, a power of two up to a warp, bring the chunks of a row together.
template <typename Scalar>
__global__ __launch_bounds__(kBlock) void focal_loss_chunk_total_kernel(
    const __grid_constant__ FocalLossForward<Scalar> args, const __grid_constant__ Geometry geometry,
    const ExpSum<compute_t<Scalar>>* sums, int lanes, const __grid_constant__ GridSum<compute_t<Scalar>> reduction) {
  using Real = compute_t<Scalar>;
  const int thread = static_cast<int>(threadIdx.x);
  const int index = thread & (lanes - 1);
  const int chunks = geometry.plan.chunks;
  const int rows = static_cast<int>(args.rows);
  const int rows_at_once = kBlock / lanes;
  double loss_sum = 0;
  double weight_sum = 0;
  for (int first = 0; first < rows; first += rows_at_once) {
    const int row = first + thread / lanes;
    const int label = row < rows ? as_class(args, args.labels[row]) : kIgnored;
    Real z_target = 0;
    ExpSum<Real> rest = empty_exp_sum<Real>();
    if (label >= 0) {
      z_target = load_as_compute(args.logits[geometry.logits(row) + label * args.layout.class_stride]);
      for (int c = index; c < chunks; c += lanes) {
        const ExpSum<Real> next = sums[row * chunks + c];
        const Real max = fmax(rest.max, next.max);
        const Real base = exp_base(max);
        rest = {max, rest.sum * exponential(rest.max - base) + next.sum * exponential(next.max - base)};
      }
    }
    rest = group_exp_sum(rest, lanes);
    if (index == 0 && row < rows) finish_row(args, row, label, z_target, rest, loss_sum, weight_sum);
  }
  sum_over_grid(reduction, loss_sum, weight_sum);
}

template <typename Scalar>
__global__ __launch_bounds__(kBlock, kBlocksAtOnce<Scalar>) void focal_loss_chunk_backward_kernel(
    const __grid_constant__ FocalLossBackward<Scalar> args, const __grid_constant__ Geometry geometry) {
  __shared__ RowGradient<compute_t<Scalar>> of_row;
  const int thread = static_cast<int>(threadIdx.x);
  const Chunk chunk(geometry.plan, args.classes);
  const int64_t offset = geometry.logits(chunk.row);
  if (thread == 0) of_row = row_gradient(args, chunk.row, offset, chunk.first == 0);
  __syncthreads();
  RowGradient<compute_t<Scalar>> gradient = of_row;
  gradient.target -= chunk.first;
  if (gradient.target >= chunk.classes) gradient.target = kIgnored;  // the target is in a later chunk
  const int64_t class_stride = args.layout.class_stride;
  const int64_t grad_stride = args.grad_layout.class_stride;
  write_row_gradient(args.grad_logits + geometry.grad_logits(chunk.row) + chunk.first * grad_stride, grad_stride,
                     args.logits + offset + chunk.first * class_stride, class_stride, chunk.classes, gradient, thread,
                     kBlock);
}

// ---- launchers -----------------------------------------------------------------------------------------------------

bool has_no_gaps(const RowLayout& layout, int64_t rows, int64_t classes) {
  if (classes > 1 && layout.class_stride != 1) return false;
  if (layout.inner > 1 && layout.inner_stride != classes) return false;
  return rows <= layout.inner || layout.outer_stride == layout.inner * classes;
}

bool on_boundary(const void* address) { return reinterpret_cast<uintptr_t>(address) % kVectorBytes == 0; }

// Whether neighbouring rows lie side by side, two in a word of memory, and classes not too far apart for 32 bits.
template <typename Scalar>
bool in_pairs(const Scalar* address, const RowLayout& layout, int64_t rows) {
  constexpr int64_t kMostBytes = int64_t{1} << 30;
  constexpr auto kBytes = static_cast<int64_t>(sizeof(Scalar));
  return layout.inner_stride == 1 && layout.inner % 2 == 0 && rows % 2 == 0 && layout.class_stride % 2 == 0 &&
         (rows <= layout.inner || layout.outer_stride % 2 == 0) && layout.class_stride < kMostBytes / kBytes &&
         layout.class_stride > -kMostBytes / kBytes && reinterpret_cast<uintptr_t>(address) % (2 * kBytes) == 0;
}

template <typename Scalar>
RowPlan plan_for(const FocalLossArgs<Scalar>& args, bool end_to_end, bool pairs) {
  pairs = pairs && sizeof(Scalar) != sizeof(double) && in_pairs(args.logits, args.layout, args.rows) &&
          reinterpret_cast<uintptr_t>(args.saved) % (2 * sizeof(float)) == 0;
  return plan_rows(args.rows, args.classes, sizeof(Scalar), end_to_end, class_is_outermost(args), pairs);
}

template <typename Scalar>
int forward_in_chunks(const FocalLossForward<Scalar>& args, const Geometry& geometry,
                      const GridSum<compute_t<Scalar>>& reduction, void* workspace, void* stream) {
  if (workspace == nullptr) return cudaErrorInvalidValue;
  const RowPlan& plan = geometry.plan;
  auto* sums = static_cast<ExpSum<compute_t<Scalar>>*>(workspace);
  const int64_t grid = args.rows * plan.chunks;
  const int error = launch(focal_loss_chunk_forward_kernel<Scalar>, grid, kBlock, stream, args, geometry, sums);
  if (error != cudaSuccess) return error;
  const int lanes = power_of_two_at_least(plan.chunks, kWarp);
  return launch(focal_loss_chunk_total_kernel<Scalar>, 1, kBlock, stream, args, geometry, sums, lanes, reduction);
}

}  // namespace

int64_t focal_loss_workspace(int64_t rows, int64_t classes, bool reduced) {
  const int64_t of_sums = reduced && !fits_one_block(rows, classes) ? grid_sum_workspace(kMaxGrid) : 0;
  const bool may_be_cut = rows < kFewRows && classes > kLongRowBytes / static_cast<int64_t>(sizeof(double));
  const int64_t of_chunks = may_be_cut ? kMostChunks * static_cast<int64_t>(sizeof(ExpSum<double>)) : 0;
  return of_sums > of_chunks ? of_sums : of_chunks;
}

template <typename Scalar>
int focal_loss_forward(const FocalLossForward<Scalar>& args, bool mean, compute_t<Scalar>* loss,
                       compute_t<Scalar>* divisor, void* workspace, void* stream) {
  if (args.rows > 0 && !sizes_are_valid(args)) return cudaErrorInvalidValue;
  GridSum<compute_t<Scalar>> reduction = {loss, divisor, mean, nullptr, nullptr};
  if (is_soft(args)) return row_loss_soft_forward<FocalRow>(args, reduction, workspace, stream);
  const bool end_to_end = has_no_gaps(args.layout, args.rows, args.classes) && on_boundary(args.logits);
  const RowPlan plan = plan_for(args, end_to_end, true);
  const Geometry geometry = {plan, ClassDivider(args.classes), RowOffset(args.layout), RowOffset(args.layout)};
  if (plan.chunks > 1) return forward_in_chunks(args, geometry, reduction, workspace, stream);
  const cudaError_t error = prepare_grid_sum(reduction, plan.grid, workspace, stream);
  if (error != cudaSuccess) return error;
  if constexpr (sizeof(Scalar) != sizeof(double)) {
    if (plan.path == RowPath::kPairs) {
      return launch(focal_loss_forward_pairs_kernel<Scalar>, plan.grid, kBlock, stream, args, RowOffset(args.layout),
                    reduction);
    }
    if (plan.path == RowPath::kOwn) {
      return launch(focal_loss_forward_own_kernel<Scalar>, plan.grid, kBlock, stream, args, plan, reduction);
    }
  }
  if (plan.path == RowPath::kTile) {
    return launch(focal_loss_forward_tile_kernel<Scalar>, plan.grid, kBlock, stream, args, plan, reduction);
  }
  void (*kernel)(FocalLossForward<Scalar>, Geometry, GridSum<compute_t<Scalar>>) =
      plan.path == RowPath::kPixels ? focal_loss_forward_kernel<Scalar, RowPath::kPixels>
                                    : focal_loss_forward_kernel<Scalar, RowPath::kRows>;
  return launch(kernel, plan.grid, kBlock, stream, args, geometry, reduction);
}

template <typename Scalar>
int focal_loss_backward(const FocalLossBackward<Scalar>& args, void* stream) {
  if (args.rows == 0) return cudaSuccess;
  if (!sizes_are_valid(args)) return cudaErrorInvalidValue;
  if (args.grad_logits != nullptr && args.grad_layout.inner <= 0) return cudaErrorInvalidValue;
  if (is_soft(args)) return row_loss_soft_backward<FocalRow>(args, stream);
  const bool end_to_end = has_no_gaps(args.layout, args.rows, args.classes) && on_boundary(args.logits) &&
                          args.grad_logits != nullptr && has_no_gaps(args.grad_layout, args.rows, args.classes) &&
                          on_boundary(args.grad_logits);
  const bool pairs = args.grad_logits != nullptr && in_pairs(args.grad_logits, args.grad_layout, args.rows);
  const RowPlan plan = plan_for(args, end_to_end, pairs);
  if constexpr (sizeof(Scalar) != sizeof(double)) {
    if (plan.path == RowPath::kPairs) {
      return launch(focal_loss_backward_pairs_kernel<Scalar>, plan.grid, kBlock, stream, args, RowOffset(args.layout),
                    RowOffset(args.grad_layout));
    }
    if (plan.path == RowPath::kOwn && args.grad_logits != nullptr) {
      return launch(focal_loss_backward_own_kernel<Scalar>, plan.grid, kBlock, stream, args, plan);
    }
  }
  const Geometry geometry = {plan, ClassDivider(args.classes), RowOffset(args.layout), RowOffset(args.grad_layout)};
  if (plan.chunks > 1 && args.grad_logits != nullptr) {
    return launch(focal_loss_chunk_backward_kernel<Scalar>, args.rows * plan.chunks, kBlock, stream, args, geometry);
  }
  void (*kernel)(FocalLossBackward<Scalar>, Geometry) =
      plan.path == RowPath::kTile     ? focal_loss_backward_kernel<Scalar, RowPath::kTile>
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
