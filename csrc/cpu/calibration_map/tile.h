// A tile of rows in scratch memory, with the classes of a row or the rows side by side.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <memory>

#include "kernels/calibration_map.h"
#include "math/calibration_map.h"

namespace focalkern::cpu {
namespace {

constexpr int64_t kMaxTileRows = 64;
constexpr int64_t kLanes = 16;             // rows of scratch memory are padded to whole groups of this many
constexpr int64_t kFewClasses = 32;        // up to this many, the rows of a tile are adjacent (column layout)
constexpr int64_t kTileElements = 8192;    // elements of a scratch array, so that all arrays fit the second-level cache
constexpr int64_t kSumBlock = 256;         // terms per partial sum in Real; partial sums are added in double
constexpr int64_t kChunkElements = 32768;  // inputs per unit of parallel work

int64_t round_up(int64_t n) { return (n + kLanes - 1) / kLanes * kLanes; }

// The numbers of each row of a tile, as arrays over rows.
template <typename Real>
struct TileRows {
  double gamma[kMaxTileRows];
  Real beta[kMaxTileRows];    // 1 / T
  Real top_x[kMaxTileRows];   // largest input, as a logit
  Real next_x[kMaxTileRows];  // largest input of the other classes
  Real rest[kMaxTileRows];    // S
  Real gap[kMaxTileRows];     // M
  bool valid[kMaxTileRows];
  int64_t top[kMaxTileRows];  // class of the largest input

  // MapRow, field by field, so that loops over rows vectorize
  Real gamma_real[kMaxTileRows], q_scale[kMaxTileRows], log_q_offset[kMaxTileRows], ratio_offset[kMaxTileRows];
  Real power_offset[kMaxTileRows], ratio_scale[kMaxTileRows], tie[kMaxTileRows];
  Real q_top[kMaxTileRows], u_top[kMaxTileRows], inverse_rest[kMaxTileRows], scaled_slope_top[kMaxTileRows];
  Real grad_gamma_top[kMaxTileRows];

  Real ratio_sum[kMaxTileRows];  // P
  Real factor[kMaxTileRows];     // p_k / p_t = factor e_k; log_factor is its logarithm, added to x_k
  Real log_factor[kMaxTileRows];
  Real log_norm[kMaxTileRows];  // -log p_t
  Real p_top[kMaxTileRows];

  // Backward
  Real grad_top[kMaxTileRows];  // upstream gradient of the largest class
  Real sum_r[kMaxTileRows], sum_m[kMaxTileRows], sum_hr[kMaxTileRows], sum_hm[kMaxTileRows], sum_cr[kMaxTileRows];
  Real sum_cm[kMaxTileRows];
  Real keep[kMaxTileRows], spread[kMaxTileRows], grad_x_top[kMaxTileRows], shared[kMaxTileRows];
  Real grad_gamma[kMaxTileRows];
  Real grad_beta[kMaxTileRows];  // sum dL/dx_k (x_k - x_t)

  FK_HOST_DEVICE MapTerms<Real> terms(int64_t r) const {
    return {gamma_real[r],   gamma_real[r] - Real(1), q_scale[r],     log_q_offset[r],
            ratio_offset[r], power_offset[r],         ratio_scale[r], tie[r]};
  }
};

// A tile of rows in scratch memory. Element (row r, class c) is at r * row_stride + c * class_stride.
template <typename Real>
struct Tile {
  int64_t n_rows;   // of the input
  int64_t rows;     // with padding: whole vectors in the column layout
  int64_t classes;  // with padding: whole vectors in the row layout
  int64_t row_stride;
  int64_t class_stride;
  bool column;
  Real* x;  // logits; from pass 2 on y; -inf at the largest class, which is stored separately, and at padding
  Real* e;  // exp(y); later log(p_k / p_t), or its exponential
  Real* g;  // backward: upstream gradient, later h m
  Real* h;  // backward: h r
  TileRows<Real>* row;
};

template <typename Real>
class Scratch {
 public:
  Scratch(int64_t classes, int arrays) {
    column_ = classes <= kFewClasses;
    classes_ = column_ ? classes : round_up(classes);
    const int64_t fitting = std::clamp<int64_t>(kTileElements / classes_, 1, kMaxTileRows);
    tile_rows_ = column_ ? kMaxTileRows : fitting;
    size_ = round_up(tile_rows_ * classes_);
    buffer_.reset(new Real[size_ * arrays + kLanes]);
    const auto address = reinterpret_cast<uintptr_t>(buffer_.get());
    first_ = reinterpret_cast<Real*>((address + 63) / 64 * 64);
  }

  int64_t tile_rows() const { return tile_rows_; }

  Tile<Real> tile(int64_t n_rows) {
    Tile<Real> t{};
    t.n_rows = n_rows;
    t.rows = column_ ? kMaxTileRows : n_rows;
    t.classes = classes_;
    t.row_stride = column_ ? 1 : classes_;
    t.class_stride = column_ ? kMaxTileRows : 1;
    t.column = column_;
    t.x = first_;
    t.e = first_ + size_;
    t.g = first_ + 2 * size_;  // backward only
    t.h = first_ + 3 * size_;
    t.row = &row_;
    return t;
  }

 private:
  bool column_;
  int64_t classes_;
  int64_t tile_rows_;
  int64_t size_;
  std::unique_ptr<Real[]> buffer_;
  Real* first_;
  TileRows<Real> row_{};
};

}  // namespace
}  // namespace focalkern::cpu
