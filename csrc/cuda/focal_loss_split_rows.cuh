// Few long rows: each row is cut into chunks of classes, one block per chunk. Forward, a second kernel of one block
// combines the sums of the chunks.
#pragma once

#include "cuda/focal_loss_row.cuh"
#include "cuda/focal_loss_rows.cuh"
#include "cuda/grid_sum.cuh"

namespace focalkern::cuda {
namespace {

// The part of a row that a block computes.
struct Chunk {
  int64_t row;
  int first;    // first class
  int classes;  // number of classes from there on

  __device__ __forceinline__ Chunk(const RowPlan& plan, int64_t classes_of_row) {
    const int chunk = static_cast<int>(blockIdx.x) % plan.chunks;
    row = static_cast<int>(blockIdx.x) / plan.chunks;
    first = chunk * plan.chunk_classes;
    const int left = static_cast<int>(classes_of_row) - first;
    classes = left < plan.chunk_classes ? left : plan.chunk_classes;
  }
};

// sums: [rows, chunks], over the classes other than the target. The sums of ignored rows are not written.
template <typename Scalar>
__global__ __launch_bounds__(kBlock, kBlocksAtOnce<Scalar>) void focal_loss_chunk_forward_kernel(
    const __grid_constant__ RowLossForward<Scalar> args, const __grid_constant__ Geometry geometry,
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

// One block combines the chunks: `lanes` threads per row, a power of two up to a warp.
template <typename Scalar>
__global__ __launch_bounds__(kBlock) void focal_loss_chunk_total_kernel(
    const __grid_constant__ RowLossForward<Scalar> args, const __grid_constant__ Geometry geometry,
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
    const __grid_constant__ RowLossBackward<Scalar> args, const __grid_constant__ Geometry geometry) {
  __shared__ RowGradient<compute_t<Scalar>> of_row;
  const int thread = static_cast<int>(threadIdx.x);
  const Chunk chunk(geometry.plan, args.classes);
  const int64_t offset = geometry.logits(chunk.row);
  if (thread == 0) of_row = row_gradient(args, chunk.row, offset, chunk.first == 0);
  __syncthreads();
  RowGradient<compute_t<Scalar>> gradient = of_row;
  gradient.target -= chunk.first;
  if (gradient.target >= chunk.classes) gradient.target = kIgnored;  // if the target is in a later chunk
  const int64_t class_stride = args.layout.class_stride;
  const int64_t grad_stride = args.grad_layout.class_stride;
  write_row_gradient(args.grad_logits + geometry.grad_logits(chunk.row) + chunk.first * grad_stride, grad_stride,
                     args.logits + offset + chunk.first * class_stride, class_stride, chunk.classes, gradient, thread,
                     kBlock);
}

}  // namespace
}  // namespace focalkern::cuda
