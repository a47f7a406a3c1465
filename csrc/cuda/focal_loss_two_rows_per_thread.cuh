// Many pixels: a thread computes several. Two adjacent pixels share a word per class, so they share its address, its
// load and the loop.
#pragma once

#include "cuda/focal_loss_row.cuh"
#include "cuda/grid_sum.cuh"

namespace focalkern::cuda {
namespace {

// The values of `size` classes, or of the first `count` if that is less; -inf beyond them and for the targets.
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
__device__ __forceinline__ void first_pairs(LongExpSum<float> (&total)[2], const char* logits, int stride, int count,
                                            const int (&target)[2]) {
  float values[2][size];
  load_pairs<size, Scalar>(values, logits, stride, count, target);
#pragma unroll
  for (int p = 0; p < 2; ++p) {
    const ExpSum<float> first = exp_sum_of<size>(values[p]);
    total[p].max = first.max;
    total[p].total.sum = first.sum;
  }
}

template <typename Scalar>
__global__ __launch_bounds__(kBlock, kBlocksAtOnce<Scalar>) void focal_loss_forward_pairs_kernel(
    const __grid_constant__ RowLossForward<Scalar> args, const __grid_constant__ RowOffset offset_of,
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
    LongExpSum<float> rest[2];
#pragma unroll
    for (int p = 0; p < 2; ++p) {
      const auto* mine = reinterpret_cast<const Scalar*>(at + labels[p] * static_cast<int64_t>(stride)) + p;
      z_target[p] = labels[p] >= 0 ? load_as_compute(*mine) : 0.0f;
    }
    // Handle the remainder first: no running maximum exists yet, so no rescaling is needed.
    const int over = (classes - 1) % kUnroll + 1;
    int target[2] = {labels[0], labels[1]};  // first class of the loads at `at`
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
      rest[0].add(values[0]);
      rest[1].add(values[1]);
      at += kUnroll * static_cast<int64_t>(stride);
      target[0] -= kUnroll;
      target[1] -= kUnroll;
    }
    const RowLoss<float> of[2] = {loss_of_row(args, row, labels[0], z_target[0], rest[0].result()),
                                  loss_of_row(args, row + 1, labels[1], z_target[1], rest[1].result())};
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

// The values of `count` classes, or of the remaining ones if those are fewer.
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
    const __grid_constant__ RowLossBackward<Scalar> args, const __grid_constant__ RowOffset offset_of,
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

}  // namespace
}  // namespace focalkern::cuda
