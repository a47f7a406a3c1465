// Rows of any length and layout: a group of lanes, a warp or the block reads a row; if classes are further apart than
// rows, one lane does. The backward kernel also handles the tiles of short rows.
#pragma once

#include "cuda/focal_loss_row.cuh"
#include "cuda/focal_loss_tiles.cuh"
#include "cuda/grid_sum.cuh"

namespace focalkern::cuda {
namespace {

// Adds the next `count` of a thread's classes, from `first` on, and moves `at` past them.
template <int count, typename Scalar>
__device__ __forceinline__ void add_strided(LongExpSum<compute_t<Scalar>>& total, const Scalar*& at, int64_t step,
                                            int classes, int target, int first, int threads) {
  using Real = compute_t<Scalar>;
  Real values[count];
#pragma unroll
  for (int k = 0; k < count; ++k, at += step) {
    const int j = first + k * threads;
    values[k] = j < classes && j != target ? load_as_compute(*at) : -kInfinity<Real>;
  }
  total.add(values);
}

// One thread's sum over its part of a row, without the target. The thread is number `index` of `threads` on this row.
template <typename Scalar>
__device__ __forceinline__ ExpSum<compute_t<Scalar>> strided_exp_sum(const Scalar* row, int64_t class_stride,
                                                                     int classes, int target, int index, int threads) {
  LongExpSum<compute_t<Scalar>> total;
  constexpr int kUnroll = sizeof(Scalar) == sizeof(double) ? 4 : 8;  // more would spill registers
  const int64_t step = threads * class_stride;
  const Scalar* at = row + index * class_stride;
  int first = index;
  for (; first + kUnroll / 2 * threads < classes; first += kUnroll * threads) {
    add_strided<kUnroll>(total, at, step, classes, target, first, threads);
  }
  if (first < classes) add_strided<kUnroll / 2>(total, at, step, classes, target, first, threads);
  return total.result();
}

// A warp's sum over its part of adjacent classes, with 16-byte loads. `threads` is a constant if the warp or the block
// is known at compile time.
template <typename Scalar, typename Threads>
__device__ __forceinline__ ExpSum<compute_t<Scalar>> row_exp_sum(const Scalar* row, int classes, int target, int index,
                                                                 Threads threads) {
  using Real = compute_t<Scalar>;
  ExpSum<Real> total = empty_exp_sum<Real>();
  constexpr int kSize = kVectorSize<Scalar>;
  constexpr int kUnroll = 4;
  // Elements before the first 16-byte boundary and after the last one: fewer than a warp has lanes.
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

template <typename Scalar, RowPath path>
__global__ __launch_bounds__(kBlock, kBlocksAtOnce<Scalar>) void focal_loss_forward_kernel(
    const __grid_constant__ RowLossForward<Scalar> args, const __grid_constant__ Geometry geometry,
    const __grid_constant__ GridSum<compute_t<Scalar>> reduction) {
  using Real = compute_t<Scalar>;
  const RowPlan& plan = geometry.plan;
  __shared__ int labels[kBlock];           // [rows_per_tile]
  __shared__ int64_t offsets[kBlock];      // [rows_per_tile]
  __shared__ ExpSum<Real> shares[kBlock];  // [rows_per_tile, parts]

  const int thread = static_cast<int>(threadIdx.x);
  const int classes = static_cast<int>(args.classes);
  // Whether each thread has a whole row. (In double, a kernel with both cases would spill registers.)
  const bool is_alone = sizeof(Scalar) != sizeof(double) && path == RowPath::kPixels && plan.parts == 1;
  double loss_sum = 0;
  double weight_sum = 0;
  for (int64_t t = blockIdx.x; t < plan.tiles; t += gridDim.x) {
    const int64_t first = t * plan.rows_per_tile;
    const int64_t left = args.rows - first;
    const int rows = left < plan.rows_per_tile ? static_cast<int>(left) : plan.rows_per_tile;

    // One thread per row reads its label and the target's logit.
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

    // All threads reduce the classes other than the target. Ignored rows are not read.
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
          // All threads of a warp or block have the same row, so this branch does not diverge.
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

    // One thread per row adds up the parts.
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

// Writes the gradient with 16-byte loads and stores, for rows whose 16-byte boundaries fall on the same classes in
// logits and gradient.
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

template <typename Scalar, RowPath path>
__global__ __launch_bounds__(kBlock, kBlocksAtOnce<Scalar>) void focal_loss_backward_kernel(
    const __grid_constant__ RowLossBackward<Scalar> args, const __grid_constant__ Geometry geometry) {
  using Real = compute_t<Scalar>;
  const RowPlan& plan = geometry.plan;
  __shared__ RowGradient<Real> gradients[kBlock];                   // [rows_per_tile]
  __shared__ int64_t offsets[path == RowPath::kTile ? 1 : kBlock];  // of the same rows
  const int thread = static_cast<int>(threadIdx.x);
  const int classes = static_cast<int>(args.classes);
  for (int64_t t = blockIdx.x; t < plan.tiles; t += gridDim.x) {
    const int64_t first = t * plan.rows_per_tile;
    const int64_t left = args.rows - first;
    const int rows = left < plan.rows_per_tile ? static_cast<int>(left) : plan.rows_per_tile;

    __syncthreads();  // all threads have read the gradients of the previous tile
    if (thread < rows) {
      const int64_t offset = geometry.logits(first + thread);
      gradients[thread] = row_gradient(args, first + thread, offset);
      if constexpr (path != RowPath::kTile) offsets[thread] = offset;
    }
    if (args.grad_logits == nullptr) continue;
    __syncthreads();

    if constexpr (path == RowPath::kTile) {
      write_tile_gradient(args.grad_logits + first * classes, args.logits + first * classes, rows, classes,
                          geometry.classes, gradients,
                          [](const auto& gradient, Real z, Real) { return gradient_at<Scalar>(gradient, z); });
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

}  // namespace
}  // namespace focalkern::cuda
