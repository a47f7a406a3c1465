// Short contiguous rows, read as one run of vectors, a tile at a time. Forward, the tile is copied to shared memory,
// where groups of lanes reduce its rows. Backward, vectors go from memory to memory.
#pragma once

#include "cuda/focal_loss_row.cuh"
#include "cuda/grid_sum.cuh"

namespace focalkern::cuda {
namespace {

// The rows of a tile; the last tile may have fewer. (Unsigned: a signed product needs twice the instructions.)
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

// Copies a tile to shared memory. A thread issues all its loads before it waits for the first. The tile starts on a
// 16-byte boundary in both memories.
template <typename Scalar>
struct TileLoad {
  static constexpr int kVectors = kTileBytes / kVectorBytes / kBlock;
  uint4 loaded[kVectors];
  int left;  // number of vectors beyond the thread's first

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
    // The remainder that does not fill a vector. Only the last tile has one, so a loop handles it, which other tiles
    // skip.
    const int in_vectors = count & ~(kVectorSize<Scalar> - 1);
#pragma unroll 1
    for (int at = in_vectors + static_cast<int>(threadIdx.x); at < count; at += kBlock) tile[at] = source[at];
  }
};

// Copies the tile from shared memory back to global memory.
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

// sum e^(z - base), where base is the maximum or its exp_base. One fused operation computes product and difference. The
// rounding error of base * scale is the same for all terms; the last factor corrects it. From 2^30 on this error would
// be too large; but such logits differ by at least 32 or not at all, so any scale serves.
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

// The maximum and the sum of a group's part of a short row in shared memory. The loop has at most kSlots steps; the
// first kSure exist in every row. A step loads one word per lane: one element, or two of 16 bits. The values stay in
// registers between the maximum and the sum. Positions are in bytes, which saves multiplications. Lanes: int, or a
// constant.
template <int kSlots, int kSure, bool kAround, typename Scalar, int kValues, typename Lanes>
__device__ __forceinline__ ExpSum<compute_t<Scalar>> tile_exp_sum(const unsigned char* tile, int row, int classes,
                                                                  int steps, int index, Lanes lanes) {
  using Real = compute_t<Scalar>;
  using Step = std::conditional_t<kValues == 2, Pair<Scalar>, Scalar>;
  constexpr int kBytes = static_cast<int>(sizeof(Step));
  const int row_bytes = classes * static_cast<int>(sizeof(Scalar));
  const int step = lanes * kBytes;
  const int around = steps * step;
  int at = index * kBytes;  // position in the row
  // Each row starts one step further around than the previous one, modulo a power of two: if the row length is a
  // multiple of a high power of two, the lanes of all rows would otherwise access one bank.
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

// Empty slots cost as much as full ones, so this picks the smallest sufficient number of slots.
template <bool kAround, typename Scalar, int kValues, typename Lanes>
__device__ __forceinline__ ExpSum<compute_t<Scalar>> tile_exp_sum(const unsigned char* tile, int row, int classes,
                                                                  int steps, int index, Lanes lanes) {
  static_assert(kValuesPerLane == 16 && kWordsPerLane == 13, "as many slots as there may be steps");
  // With several lanes, each has more than half of the maximum per lane, so few slots never suffice.
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

// Calls f with the logarithm of the number of lanes as an integral constant.
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

// Short contiguous rows: a group of lanes for each row of a tile in shared memory.
template <typename Scalar>
__global__ __launch_bounds__(kBlock, kTileBlocks<Scalar>) void focal_loss_forward_tile_kernel(
    const __grid_constant__ RowLossForward<Scalar> args, const __grid_constant__ RowPlan plan,
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
    // One thread per row reads its label and takes the target's logit out of the tile.
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

    // All threads reduce the other classes, also in rows without a target. Threads beyond the last row reduce row 0;
    // that sum is not used.
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

    // One thread per row computes its loss.
    if (thread < rows) finish_row(args, first + thread, label, z_target, shares[thread], loss_sum, weight_sum);
  }
  // Warps beyond the rows of a tile contribute only zeros.
  sum_over_grid(reduction, loss_sum, weight_sum, thread < plan.rows_per_tile || thread < kWarp);
}

// The shares of write_tile_gradient for a loss whose classes have no shares of their own.
template <typename Scalar>
struct NoShares {
  static constexpr int kVectors = 0;
  struct Loaded {};

  __device__ __forceinline__ compute_t<Scalar> of(int) const { return compute_t<Scalar>(1); }
  __device__ __forceinline__ Loaded load(int) const { return {}; }
  __device__ __forceinline__ void unpack_to(Loaded, compute_t<Scalar> (&shares)[kVectorSize<Scalar>]) const {
#pragma unroll
    for (auto& share : shares) share = 1;
  }
};

// Writes the gradient of a tile of short rows as one run of vectors: a vector may hold parts of two rows, or several
// rows. at(gradient, z, share) is the gradient of an element other than the target. Every thread of the block calls it.
// kValues: a divisor of the number of classes
template <int kValues = 1, typename Scalar, typename Gradient, typename At, typename Shares = NoShares<Scalar>>
__device__ __forceinline__ void write_tile_gradient(Scalar* grad, const Scalar* logits, int rows, int classes,
                                                    const ClassDivider& divide, const Gradient* gradients, At at,
                                                    const Shares& shares = {}) {
  using Real = compute_t<Scalar>;
  constexpr int kSize = kVectorSize<Scalar>;
  constexpr int kUnroll = Shares::kVectors > 1 ? 2 : 4;
  const int thread = static_cast<int>(threadIdx.x);
  const int count = rows * classes;
  const int vectors = count / kSize;
  for (int first = thread; first < vectors; first += kUnroll * kBlock) {
    uint4 loaded[kUnroll];
    typename Shares::Loaded loaded_shares[kUnroll];
#pragma unroll
    for (int k = 0; k < kUnroll; ++k) {
      const int vector = first + k * kBlock;
      if (vector < vectors) {
        loaded[k] = load_vector(logits + vector * kSize);
        loaded_shares[k] = shares.load(vector);
      }
    }
#pragma unroll
    for (int k = 0; k < kUnroll; ++k) {
      const int vector = first + k * kBlock;
      if (vector < vectors) {
        const auto elements = bit_cast<Elements<Scalar>>(loaded[k]);
        Real share_of[kSize];
        shares.unpack_to(loaded_shares[k], share_of);
        Elements<Scalar> result;
        int r = divide(vector * kSize);
        int j = vector * kSize - r * classes;
        Gradient gradient = gradients[r];
#pragma unroll
        for (int e = 0; e < kSize; ++e) {
          result.at[e] = at(gradient, load_as_compute(elements.at[e]), share_of[e]);
          if (e % kValues == kValues - 1 && (j += kValues) == classes) {
            j = 0;
            r += r + 1 < rows;  // no vector lies past the last row
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
    grad[rest] = at(gradients[divide(rest)], z, shares.of(rest));
  }
  __syncthreads();  // before the elements of the targets are overwritten
  if (thread < rows && gradients[thread].target >= 0) {
    grad[thread * classes + gradients[thread].target] = Store<Scalar>::from_compute(gradients[thread].at_target);
  }
}

}  // namespace
}  // namespace focalkern::cuda
