// The sum, or the mean, of one number per thread of a launch, in an order that depends only on the geometry: each block
// writes its sums, and the last block to finish adds them up.
#pragma once

#include "cuda/common.cuh"

namespace focalkern::cuda {

template <typename Real>
struct GridSum {
  Real* result;   // the sum or mean, or null for no reduction
  Real* divisor;  // receives the divisor of the mean, 1 for a sum; or null
  bool mean;
  unsigned* finished;  // blocks that have written their sums
  double* sums;        // [2, grid]
};

constexpr int64_t kGridSumCounterBytes = 16;

// Size of the scratch memory for a launch of this many blocks.
inline int64_t grid_sum_workspace(int64_t grid) {
  return kGridSumCounterBytes + 2 * grid * static_cast<int64_t>(sizeof(double));
}

// Divides the scratch memory. A single block needs none.
template <typename Real>
cudaError_t prepare_grid_sum(GridSum<Real>& to, int64_t grid, void* workspace, void* stream) {
  if (to.result == nullptr || grid <= 1) return cudaSuccess;
  if (workspace == nullptr) return cudaErrorInvalidValue;
  to.finished = static_cast<unsigned*>(workspace);
  to.sums = reinterpret_cast<double*>(static_cast<char*>(workspace) + kGridSumCounterBytes);
  const cudaError_t error = cudaMemsetAsync(to.finished, 0, sizeof(unsigned), static_cast<cudaStream_t>(stream));
  if (error != cudaSuccess) cudaGetLastError();
  return error;
}

template <typename Real>
__device__ __forceinline__ void write_grid_sum(const GridSum<Real>& to, double value, double weight) {
  *to.result = static_cast<Real>(to.mean ? value / weight : value);
  if (to.divisor != nullptr) *to.divisor = to.mean ? static_cast<Real>(weight) : Real(1);
}

// Adds both sums over the block; thread 0 gets the result. The lower half of each warp continues with one sum, the
// upper half with the other. Warps without contributions may skip it.
__device__ __forceinline__ void block_sums(double& value, double& weight, double (*scratch)[kWarpsPerBlock],
                                           bool brings_any) {
  const int thread = static_cast<int>(threadIdx.x);
  const int which = thread / (kWarp / 2) % 2;
  double mine = 0;
  if (brings_any) {
    const double theirs = __shfl_xor_sync(kFullWarp, which == 0 ? weight : value, kWarp / 2);
    mine = group_sum((which == 0 ? value : weight) + theirs, kWarp / 2);
  }
  if (thread % (kWarp / 2) == 0) scratch[which][thread / kWarp] = mine;
  __syncthreads();
  if (thread != 0) return;
  value = 0;
  weight = 0;
  for (int warp = 0; warp < kWarpsPerBlock; ++warp) {
    value += scratch[0][warp];
    weight += scratch[1][warp];
  }
}

// Every thread of every block calls this once. The block of the last step varies; its terms and their order do not.
// brings_any: whether a thread of the warp may contribute anything but zeros. (Internal linkage: the host tests look
// for its shared memory beside that of the kernels.)
template <typename Real>
static __device__ __forceinline__ void sum_over_grid(const GridSum<Real>& to, double value, double weight,
                                                     bool brings_any = true) {
  __shared__ double scratch[2][kWarpsPerBlock];
  __shared__ bool is_last;
  const int thread = static_cast<int>(threadIdx.x);
  if (to.result == nullptr) {
    if (to.divisor != nullptr && blockIdx.x == 0 && thread == 0) *to.divisor = Real(1);
    return;
  }
  block_sums(value, weight, scratch, brings_any);
  if (gridDim.x == 1) {
    if (thread == 0) write_grid_sum(to, value, weight);
    return;
  }
  if (thread == 0) {
    to.sums[blockIdx.x] = value;
    to.sums[gridDim.x + blockIdx.x] = weight;
    __threadfence();  // makes the sums visible before the counter is incremented
    is_last = atomicAdd(to.finished, 1u) == gridDim.x - 1;
  }
  __syncthreads();
  if (!is_last) return;
  __threadfence();
  value = 0;
  weight = 0;
  for (unsigned block = threadIdx.x; block < gridDim.x; block += kBlock) {
    value += __ldcg(to.sums + block);
    weight += __ldcg(to.sums + gridDim.x + block);
  }
  block_sums(value, weight, scratch, true);  // all threads read `scratch` before the barrier above
  if (thread == 0) write_grid_sum(to, value, weight);
}

}  // namespace focalkern::cuda
