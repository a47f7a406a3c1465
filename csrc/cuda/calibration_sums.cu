// Running sums of the calibration grid: per cell and bucket, the number of samples, the sum of their confidences, and
// the number of correct ones. A block owns a cell. It reads the cell's confidences once for each run of kBucketsAtOnce
// buckets, whose sums are in shared memory. Confidences are added as integers in units of 2^-40, so that the sums do
// not depend on the order of the threads. A sum is two 32-bit halves, and the carry of the low half is added to the
// high one: a 64-bit atomic in shared memory would compile to a loop.

#include "cuda/common.cuh"
#include "kernels/calibration_grid.h"

namespace focalkern::cuda {
namespace {

constexpr int kBucketsAtOnce = 1024;
constexpr double kUnit = 0x1p-40;  // the sum of kMaxCalibrationSumRows confidences fits 63 bits

// Four blocks per multiprocessor: by default the compiler aims at five and spills.
template <typename Real>
__global__ __launch_bounds__(kBlock,
                             4) void calibration_sums_kernel(const __grid_constant__ CalibrationSums<Real> args) {
  __shared__ unsigned int low_sum[kBucketsAtOnce];  // of the confidences
  __shared__ unsigned int high_sum[kBucketsAtOnce];
  __shared__ unsigned int count[kBucketsAtOnce];
  __shared__ unsigned int correct_sum[kBucketsAtOnce];
  const int64_t cell = blockIdx.x;
  const Real* confidence = args.confidence + cell * args.rows;
  const int64_t out = (cell % args.n_gammas * args.cell_stride + cell / args.n_gammas) * args.n_buckets;
  const int rows = static_cast<int>(args.rows);
  for (int64_t first = 0; first < args.n_buckets; first += kBucketsAtOnce) {
    const int64_t left = args.n_buckets - first;
    const int buckets = left < kBucketsAtOnce ? static_cast<int>(left) : kBucketsAtOnce;
    for (int b = static_cast<int>(threadIdx.x); b < buckets; b += kBlock) {
      low_sum[b] = 0;
      high_sum[b] = 0;
      count[b] = 0;
      correct_sum[b] = 0;
    }
    __syncthreads();
    for (int i = static_cast<int>(threadIdx.x); i < rows; i += kBlock) {
      const Real c = confidence[i];
      const int64_t place = args.sketch ? sketch_bucket(c, args.n_buckets) : equal_width_bin(c, args.n_buckets);
      const int64_t b = place - first;
      if (b < 0 || b >= buckets) continue;
      const auto units = static_cast<unsigned long long>(static_cast<double>(c) / kUnit + 0.5);
      const auto low = static_cast<unsigned int>(units);
      const unsigned int carry = atomicAdd(&low_sum[b], low) + low < low ? 1 : 0;
      atomicAdd(&high_sum[b], static_cast<unsigned int>(units >> 32) + carry);
      atomicAdd(&count[b], 1u);
      if (args.correct[i] != 0) atomicAdd(&correct_sum[b], 1u);
    }
    __syncthreads();
    for (int b = static_cast<int>(threadIdx.x); b < buckets; b += kBlock) {
      args.count[out + first + b] += count[b];
      const unsigned long long units = static_cast<unsigned long long>(high_sum[b]) << 32 | low_sum[b];
      args.confidence_sum[out + first + b] += static_cast<double>(units) * kUnit;
      args.correct_sum[out + first + b] += correct_sum[b];
    }
    __syncthreads();  // all threads have read the sums
  }
}

}  // namespace

template <typename Real>
int calibration_sums(const CalibrationSums<Real>& args, void* stream) {
  const int64_t cells = args.n_gammas * args.n_temperatures;
  if (args.rows < 0 || args.rows > kMaxCalibrationSumRows || cells < 1 || cells > INT32_MAX || args.n_buckets < 1) {
    return cudaErrorInvalidValue;
  }
  return launch(calibration_sums_kernel<Real>, cells, kBlock, stream, args);
}

template int calibration_sums<float>(const CalibrationSums<float>&, void*);
template int calibration_sums<double>(const CalibrationSums<double>&, void*);

}  // namespace focalkern::cuda
