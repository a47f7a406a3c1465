// Common parts of the loops of a loss of rows: a tile of rows, for which the epilogue runs once, and steps along rows.
#pragma once

#include <algorithm>
#include <cstdint>

#include "cpu/row_loss/plan.h"
#include "cpu/simd/math.h"
#include "kernels/row_loss.h"
#include "math/row_loss.h"

namespace focalkern::cpu {
namespace {

constexpr int64_t kBlock = 4096;  // logits of a row that fit the first-level cache, so that a second read is cheap
constexpr int64_t kChunkLogits = 16384;  // logits per unit of parallel work
constexpr int64_t kAhead = 2048;         // how many logits ahead a prefetch reaches along a row
constexpr int64_t kPart = 32;            // vectors of a row per partial sum

template <typename Real>
using label_int = typename detail::Format<Real>::Int;  // as wide as Real, so that comparisons stay in one vector

// Classes per step of a loop over a row: whole vectors of the widest kind, of Scalar and of its compute type.
template <typename Scalar>
constexpr int64_t kLanes = sizeof(Scalar) == 2 ? 32 : 16;

// Losses that need only the sum of exp(z_j - m) over the classes other than the target. For long rows that are not
// transposed, m is the target's logit, which saves the pass for the maximum; the target's term is then 1. If that sum
// is too large (rare), the kernel computes it again with the maximum.
template <typename Loss>
constexpr bool kSumOnly = Loss::kSpecialClass == SpecialClass::kNone && !Loss::kSquares;
// No term of such a sum exceeds e^16: for larger differences, the rounding error of z_j - m would matter.
template <typename Real>
constexpr Real kLargestSum = Real(0x1p23);

constexpr int kNoTarget = -1;  // no class has this index: the label of an ignored row

// The numbers of a tile of rows, from the sums to loss and gradient.
template <typename Real>
struct alignas(64) Tile {
  label_int<Real> label[kTileRows];
  Real weight[kTileRows];
  Real gamma[kTileRows];
  Real shift[kTileRows];               // m, the largest logit or the target's logit (kSumOnly)
  Real sum_exp_others[kTileRows];      // sum of exp(z_j - m) over every class but one
  Real squares[kTileRows];             // sum of exp(z_j - m)^2 over the same classes, then of p_j^2
  Real gap[kTileRows];                 // logit of the special class minus that of the target
  label_int<Real> special[kTileRows];  // or kNoTarget
  Real target_logit[kTileRows];        // z_y
  Real log_s[kTileRows];               // log sum_j exp(z_j - m)
  Real log_p[kTileRows];
  Real log_u[kTileRows];
  Real loss[kTileRows];
  Real upstream[kTileRows];       // the upstream gradient of the row
  Real factor[kTileRows];         // factor of e^(z_j - m) in the gradient
  Real square_factor[kTileRows];  // factor of e^(2 (z_j - m))
  Real target_grad[kTileRows];    // gradient of the target's logit
  Real special_grad[kTileRows];   // gradient of the special class's logit
  Real grad_gamma[kTileRows];
  Real p[kTileRows];            // of the target; only the focal loss uses it and the next five
  Real inv_sum_exp[kTileRows];  // 1 / sum_j exp(z_j - m)
  Real p_minus_one[kTileRows];  // p - 1 without cancellation
  Real minus_log_p[kTileRows];
  Real base[kTileRows];  // of the factor
  Real log_base[kTileRows];
  bool is_plain;      // every row counts with weight 1
  bool ever_inverse;  // a gamma may be negative or NaN
  // kExpZero in each lane, in memory because gcc emits no max instruction for a compile-time constant.
  Real exp_zero[16];

  Tile() { std::fill_n(exp_zero, 16, kExpZero<Real>); }
};

// The processor prefetches one stream of addresses within a page, but not across pages and not the many streams of a
// tile of columns. The address may lie outside the tensor: a prefetch never faults.
FK_HOST_DEVICE void prefetch(const void* address) { __builtin_prefetch(address); }

// Stores the gradients of the target and of the special class, which have formulas of their own.
template <typename Loss, typename Scalar>
FK_HOST_DEVICE void store_special_grads(const Tile<compute_t<Scalar>>& tile, int64_t r, Scalar* grad) {
  if constexpr (Loss::kSpecialClass != SpecialClass::kNone) {
    if (tile.special[r] != kNoTarget) grad[tile.special[r]] = Store<Scalar>::from_compute(tile.special_grad[r]);
  }
  if (tile.label[r] != kNoTarget) grad[tile.label[r]] = Store<Scalar>::from_compute(tile.target_grad[r]);
}

// Offsets of consecutive rows, without two divisions each.
class RowCursor {
 public:
  FK_HOST_DEVICE RowCursor(const RowLayout& layout, int64_t row)
      : layout_(layout),
        position_(row % layout.inner),
        offset_(layout.row_offset(row)),
        line_(layout.lines == 0 ? 0 : row / layout.inner % layout.lines) {}
  FK_HOST_DEVICE int64_t offset() const { return offset_; }
  FK_HOST_DEVICE void next() {
    offset_ += layout_.inner_stride;
    if (++position_ < layout_.inner) return;
    offset_ += layout_.outer_stride - layout_.inner * layout_.inner_stride;
    position_ = 0;
    if (++line_ != layout_.lines) return;
    offset_ += layout_.image_gap;
    line_ = 0;
  }

 private:
  RowLayout layout_;
  int64_t position_, offset_, line_;
};

}  // namespace
}  // namespace focalkern::cpu
