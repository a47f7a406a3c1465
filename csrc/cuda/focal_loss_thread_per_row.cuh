// Rows of few classes: one thread computes a row of a tile, or two rows in 16 bits, which it reads a word at a time.
// The number of classes is a compile-time constant.
#pragma once

#include "cuda/focal_loss_row.cuh"
#include "cuda/focal_loss_tiles.cuh"
#include "cuda/grid_sum.cuh"

namespace focalkern::cuda {
namespace {

template <typename Scalar>
constexpr int kOwnRows = 4 / static_cast<int>(sizeof(Scalar));

// Calls f with the number of classes as an integral constant. Class counts are at most kValuesPerLane here.
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

// The row after the last is filled with zeros.
template <typename Scalar>
__device__ __forceinline__ void fill_beyond(Scalar* own, int mine, int rows, int classes) {
  if (kOwnRows<Scalar> == 1 || mine + 1 != rows) return;
  for (int j = classes; j < 2 * classes; ++j) own[j] = Store<Scalar>::from_compute(0);
}

template <typename Scalar>
__global__ __launch_bounds__(kBlock, kBlocksAtOnce<Scalar>) void focal_loss_forward_own_kernel(
    const __grid_constant__ RowLossForward<Scalar> args, const __grid_constant__ RowPlan plan,
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
    const __grid_constant__ RowLossBackward<Scalar> args, const __grid_constant__ RowPlan plan) {
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

}  // namespace
}  // namespace focalkern::cuda
