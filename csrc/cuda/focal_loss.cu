// Focal loss of [rows, classes] logits in any of the layouts that RowLayout describes, forward and backward.
//
// Index targets without smoothing: one pass over the logits each way. A block takes tiles of rows. For each tile:
//   forward:  threads share the rows out and reduce each to (max, sum exp(z - max)) over the classes other than the
//             target; then one thread per row turns that into the loss, the three numbers that are kept, and its share
//             of the sums. The last block to finish adds the shares up.
//   backward: one thread per row turns the three numbers into the factor of p_j; then the block writes
//             factor * p_j, or the target's own value, for every element.
// plan_rows in launch.h decides which threads share a row. Short rows: the whole block reads the tile as one run of
// vectors; for the shortest rows a thread then computes one or two rows by itself. Longer rows: a group of lanes, a
// warp or the block reads a row. If classes lie further apart than rows ([N, C, H, W]), a lane reads one row or two
// adjacent rows, so that a warp reads adjacent addresses. If long rows are fewer than multiprocessors, they are cut
// into chunks of classes, one block per chunk; forward, a second kernel of one block combines their sums.
//
// Probability targets and label smoothing need the focal terms of every class; row_loss_soft.cu has those kernels, as
// for the other losses of rows.

#include "cuda/common.cuh"
#include "cuda/focal_loss_row.cuh"
#include "cuda/focal_loss_rows.cuh"
#include "cuda/focal_loss_split_rows.cuh"
#include "cuda/focal_loss_thread_per_row.cuh"
#include "cuda/focal_loss_tiles.cuh"
#include "cuda/focal_loss_two_rows_per_thread.cuh"
#include "cuda/grid_sum.cuh"
#include "cuda/row_loss.cuh"
#include "kernels/row_loss.h"

namespace focalkern::cuda {
namespace {

bool has_no_gaps(const RowLayout& layout, int64_t rows, int64_t classes) {
  if (classes > 1 && layout.class_stride != 1) return false;
  if (layout.inner > 1 && layout.inner_stride != classes) return false;
  return rows <= layout.inner || layout.outer_stride == layout.inner * classes;
}

bool on_boundary(const void* address) { return reinterpret_cast<uintptr_t>(address) % kVectorBytes == 0; }

// Whether neighbouring rows are adjacent, two in a word of memory, and the class stride fits 32 bits.
template <typename Scalar>
bool in_pairs(const Scalar* address, const RowLayout& layout, int64_t rows) {
  constexpr int64_t kMostBytes = int64_t{1} << 30;
  constexpr auto kBytes = static_cast<int64_t>(sizeof(Scalar));
  return layout.inner_stride == 1 && layout.inner % 2 == 0 && rows % 2 == 0 && layout.class_stride % 2 == 0 &&
         (rows <= layout.inner || layout.outer_stride % 2 == 0) && layout.class_stride < kMostBytes / kBytes &&
         layout.class_stride > -kMostBytes / kBytes && reinterpret_cast<uintptr_t>(address) % (2 * kBytes) == 0;
}

template <typename Scalar>
RowPlan plan_for(const RowLossArgs<Scalar>& args, bool end_to_end, bool pairs) {
  pairs = pairs && sizeof(Scalar) != sizeof(double) && in_pairs(args.logits, args.layout, args.rows) &&
          reinterpret_cast<uintptr_t>(args.saved) % (2 * sizeof(float)) == 0;
  return plan_rows(args.rows, args.classes, sizeof(Scalar), end_to_end, class_is_outermost(args), pairs);
}

template <typename Scalar>
int forward_in_chunks(const RowLossForward<Scalar>& args, const Geometry& geometry,
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
int focal_loss_forward(const RowLossForward<Scalar>& args, bool mean, compute_t<Scalar>* loss,
                       compute_t<Scalar>* divisor, void* workspace, void* stream) {
  if (args.rows > 0 && !sizes_are_valid(args)) return cudaErrorInvalidValue;
  GridSum<compute_t<Scalar>> reduction = {loss, divisor, mean, nullptr, nullptr};
  if (is_soft(args)) return soft_focal_forward(args, reduction, workspace, stream);
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
  void (*kernel)(RowLossForward<Scalar>, Geometry, GridSum<compute_t<Scalar>>) =
      plan.path == RowPath::kPixels ? focal_loss_forward_kernel<Scalar, RowPath::kPixels>
                                    : focal_loss_forward_kernel<Scalar, RowPath::kRows>;
  return launch(kernel, plan.grid, kBlock, stream, args, geometry, reduction);
}

template <typename Scalar>
int focal_loss_backward(const RowLossBackward<Scalar>& args, void* stream) {
  if (args.rows == 0) return cudaSuccess;
  if (!sizes_are_valid(args)) return cudaErrorInvalidValue;
  if (args.grad_logits != nullptr && args.grad_layout.inner <= 0) return cudaErrorInvalidValue;
  if (is_soft(args)) return soft_focal_backward(args, stream);
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
  void (*kernel)(RowLossBackward<Scalar>, Geometry) =
      plan.path == RowPath::kTile     ? focal_loss_backward_kernel<Scalar, RowPath::kTile>
      : plan.path == RowPath::kPixels ? focal_loss_backward_kernel<Scalar, RowPath::kPixels>
                                      : focal_loss_backward_kernel<Scalar, RowPath::kRows>;
  return launch(kernel, plan.grid, kBlock, stream, args, geometry);
}

#define FK_INSTANTIATE(Scalar)                                                                                         \
  template int focal_loss_forward<Scalar>(const RowLossForward<Scalar>&, bool, compute_t<Scalar>*, compute_t<Scalar>*, \
                                          void*, void*);                                                               \
  template int focal_loss_backward<Scalar>(const RowLossBackward<Scalar>&, void*);
FK_INSTANTIATE(Half)
FK_INSTANTIATE(BFloat16)
FK_INSTANTIATE(float)
FK_INSTANTIATE(double)
#undef FK_INSTANTIATE

}  // namespace focalkern::cuda
