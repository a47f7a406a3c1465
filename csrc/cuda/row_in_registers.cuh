// Rows of a matrix that a warp keeps in registers: of 513 to 1024 classes, or with half of the registers, of 257 to
// 512.
#pragma once

#include "cuda/common.cuh"
#include "cuda/largest_logit.cuh"
#include "cuda/row_groups.cuh"

namespace focalkern::cuda {

constexpr int kClassesOfLane = 32;

// The vectors of a row that a lane keeps. kMost: classes
template <typename Scalar, int kMost = kClassesOfLane>
struct VectorsOfLane {
  static constexpr int kSize = kVectorSize<Scalar>;
  static constexpr int kCount = kMost / kSize;

  uint4 at[kCount];
  int left;  // vectors of the row beyond the lane's first

  __device__ __forceinline__ VectorsOfLane(const Scalar* own, int left) : left(left) {
#pragma unroll
    for (int v = 0; v < kCount; ++v) {
      if (has(v)) at[v] = load_vector(own + v * kWarp * kSize);
    }
  }
  __device__ __forceinline__ bool has(int vector) const { return 2 * vector < kCount || vector * kWarp < left; }
};

// The classes of a row that a lane keeps.
template <typename Scalar, int kMost = kClassesOfLane>
class RowOfLane {
  static constexpr int kSize = kVectorSize<Scalar>;
  static constexpr int kCount = kMost / kSize;

 public:
  __device__ __forceinline__ RowOfLane(const Scalar* own, int left) : vectors_(own, left) {
#pragma unroll
    for (int v = 0; v < kCount; ++v) {
      unpack<Scalar>(vectors_.at[v], values_[v]);
#if defined(__CUDA_ARCH__)
#pragma unroll
      for (int k = 0; k < kSize; ++k) asm("" : "+f"(values_[v][k]));  // or the compiler would unpack several times
#endif
    }
  }

  // Calls take(logit, vector, number in the vector), or begins with the last.
  template <bool kBackwards = false, typename Take>
  __device__ __forceinline__ void each(Take take) const {
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      const int v = kBackwards ? kCount - 1 - i : i;
      if (vectors_.has(v)) {
#pragma unroll
        for (int j = 0; j < kSize; ++j) {
          const int k = kBackwards ? kSize - 1 - j : j;
          take(values_[v][k], v, k);
        }
      }
    }
  }

  // The largest logit of the whole row.
  __device__ __forceinline__ float largest() const {
    LargestOfVectors<Scalar> max;
#pragma unroll
    for (int v = 0; v < kCount; ++v) {
      if (vectors_.has(v)) max.add(vectors_.at[v]);
    }
    return group_max(max.value(), kWarp);
  }

 private:
  VectorsOfLane<Scalar, kMost> vectors_;
  float values_[kCount][kSize];
};

constexpr int kNumbersOfWarp = 8;
constexpr int kLanesOfNumber = kWarp / kNumbersOfWarp;

// The sums of several numbers over the warp: lane k kLanesOfNumber gets that of number k.
template <int count>
__device__ __forceinline__ float sum_over_warp(float (&numbers)[count], int lane) {
  static_assert(count > kNumbersOfWarp / 2 && count <= kNumbersOfWarp);
  int offset = kWarp / 2;
#pragma unroll
  for (int half = kNumbersOfWarp / 2; half > 0; half /= 2, offset /= 2) {
    const bool is_upper = (lane & offset) != 0;
#pragma unroll
    for (int k = 0; k < half; ++k) {
      // A number without a partner is added in both halves of the warp.
      const float low = numbers[k], high = numbers[k + half < count ? k + half : k];
      numbers[k] = (is_upper ? high : low) + __shfl_xor_sync(kFullWarp, is_upper ? low : high, offset);
    }
  }
  return group_sum(numbers[0], kLanesOfNumber);
}

// For each tile of kBlock / lanes rows, at most a warp of them: every warp calls sum(row, its place in the tile) for
// some rows that count. Then one warp calls finish(row, place) for all.
template <bool kHasLabels, typename Scalar, typename Sum, typename Finish>
__device__ __forceinline__ void rows_in_registers(const RowLossForward<Scalar>& args, const RowGeometry& geometry,
                                                  Sum sum, Finish finish) {
  const int thread = static_cast<int>(threadIdx.x), lane = thread % kWarp;
  const int of_tile = kBlock >> geometry.lane_bits, of_warp = of_tile / kWarpsPerBlock;
  const int begin = thread / kWarp * of_warp;
  for (int64_t t = blockIdx.x; t < geometry.tiles; t += gridDim.x) {
    const int64_t first = t * of_tile;
    const int there = static_cast<int>(args.rows - first < of_tile ? args.rows - first : of_tile);
    const int end = begin + of_warp < there ? begin + of_warp : there;
    int label = 0;
    if (kHasLabels && begin + lane < end) label = read_label(args, first + begin + lane);
#pragma unroll 1
    for (int place = begin; place < end; ++place) {
      if (!kHasLabels || __shfl_sync(kFullWarp, label, place - begin) >= 0) sum(first + place, place);
    }
    __syncthreads();
    if (thread < there) finish(row_at<Scalar>(args, geometry, first + thread, 0, 1), thread);
    __syncthreads();
  }
}

// ---- host ----------------------------------------------------------------------------------------------------------

// Whether the rows are those of a matrix whose first row begins with a vector.
template <typename Scalar>
bool is_matrix(const Scalar* data, const RowLayout& layout, int64_t rows) {
  return layout.class_stride == 1 && rows <= layout.inner && reinterpret_cast<uintptr_t>(data) % kVectorBytes == 0;
}
// Whether they also lie without gaps.
template <typename Scalar>
bool is_end_to_end(const Scalar* data, const RowLayout& layout, int64_t rows, int64_t classes) {
  return is_matrix(data, layout, rows) && layout.inner_stride == classes;
}
// Whether the lanes of a warp may keep such a row, with kMost classes each.
template <int kMost = kClassesOfLane, typename Scalar>
bool fits_registers(const Scalar* data, const RowLayout& layout, int64_t rows, int64_t classes) {
  constexpr int kSize = kVectorSize<Scalar>;
  return is_matrix(data, layout, rows) && layout.inner_stride % kSize == 0 && classes % kSize == 0 &&
         classes > kMost * kWarp / 2 && classes <= kMost * kWarp;
}

// The number of rows of a tile: one for each lane of the warp that finishes them, or fewer if there would be too few
// tiles.
inline int rows_per_tile_of_warps(int64_t rows) {
  int count = kWarp;
  while (count > kWarpsPerBlock && rows / count < kMaxGrid / 8) count /= 2;
  return count;
}

template <typename Scalar, typename... More>
int launch_tiles_of_warps(void (*kernel)(RowLossForward<Scalar>, RowGeometry, GridSum<float>, More...),
                          const RowLossForward<Scalar>& args, int of_tile, GridSum<float> totals, void* workspace,
                          void* stream, const More&... more) {
  RowGeometry geometry = plan_groups(args, args.layout);
  geometry.lanes = kBlock / of_tile;  // says how many rows a tile has
  geometry.lane_bits = 0;
  while (1 << geometry.lane_bits < geometry.lanes) ++geometry.lane_bits;
  geometry.tiles = divide_up(args.rows, of_tile);
  geometry.grid = geometry.tiles < 1 ? 1 : geometry.tiles < kMaxGrid ? geometry.tiles : kMaxGrid;
  const cudaError_t error = prepare_grid_sum(totals, geometry.grid, workspace, stream);
  return error != cudaSuccess ? error : launch(kernel, geometry.grid, kBlock, stream, args, geometry, totals, more...);
}

template <typename Scalar, typename... More>
int launch_in_registers(void (*kernel)(RowLossForward<Scalar>, RowGeometry, GridSum<float>, More...),
                        const RowLossForward<Scalar>& args, GridSum<float> totals, void* workspace, void* stream,
                        const More&... more) {
  return launch_tiles_of_warps(kernel, args, rows_per_tile_of_warps(args.rows), totals, workspace, stream, more...);
}

}  // namespace focalkern::cuda
