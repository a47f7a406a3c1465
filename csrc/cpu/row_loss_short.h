// The gradient of rows of few adjacent classes, with AVX-512: a row is one vector or two, of which the last is masked.
// That takes fewer instructions than turning rows into columns and back (cpu/transpose.h) where a vector is filled well
// and nothing is to be converted; the sums of the forward pass, which would have to be folded across, stay there.
#pragma once

#include "cpu/elementary.h"
#include "cpu/lanes.h"
#include "cpu/row_loss_tile.h"
#include "cpu/vector_clones.h"
#include "math/row_loss.h"

namespace focalkern::cpu {
namespace {

constexpr int64_t kLeastOfShortRow = 9;  // classes; of fewer, too many lanes are empty
constexpr int64_t kMostOfShortRow = 32;
constexpr int64_t kMostOfShortStride = 1 << 26;  // between rows, sixteen of which are looked up by 32 bits

#ifdef FK_HAS_AVX512_CODE

// The logits of the rows' targets; 0 of an ignored row.
FK_AVX512 inline void short_row_targets(const float* z, int64_t stride, int64_t n_rows, const int32_t* label,
                                        float* target_logit) {
  constexpr int64_t kRows = 16;
  const __m512i first = _mm512_loadu_si512(kFirst<int32_t>);
  const __m512i place = _mm512_mullo_epi32(first, _mm512_set1_epi32(static_cast<int32_t>(stride)));
  for (int64_t r = 0; r < n_rows; r += kRows) {
    const auto is_row = static_cast<__mmask16>(n_rows - r < kRows ? (1u << (n_rows - r)) - 1 : 0xffffu);
    const __m512i labels = _mm512_maskz_loadu_epi32(is_row, label + r);
    const __mmask16 has_target = _mm512_mask_cmpge_epi32_mask(is_row, labels, _mm512_setzero_si512());
    const __m512 logits = _mm512_mask_i32gather_ps(_mm512_setzero_ps(), has_target, _mm512_add_epi32(place, labels),
                                                   z + r * stride, sizeof(float));
    _mm512_mask_storeu_ps(target_logit + r, is_row, logits);
  }
}

// As GradOfColumns.
template <typename Loss, int kVectors>
FK_AVX512 void short_row_grad(const float* z, int64_t stride, int64_t classes, int64_t n_rows, const Tile<float>& tile,
                              float* grad, int64_t grad_stride) {
  using Reals = lanes_t<float, 16>;
  __mmask16 mask[kVectors];
  __m512i index[kVectors];
  for (int v = 0; v < kVectors; ++v) {
    const int64_t left = classes - 16 * v;
    mask[v] = static_cast<__mmask16>(left < 16 ? (1u << left) - 1 : 0xffffu);
    index[v] = _mm512_loadu_si512(kFirst<int32_t> + 16 * v);
  }
  const __m512 lowest = _mm512_set1_ps(tile.exp_zero);
  for (int64_t r = 0; r < n_rows; ++r, z += stride, grad += grad_stride) {
    for (int v = 0; v < kVectors; ++v) {
      const __m512 logits = _mm512_maskz_loadu_ps(mask[v], z + 16 * v);
      // 0 for NaN, as in GradOfRows.
      const __m512 x = _mm512_max_ps(_mm512_sub_ps(logits, _mm512_set1_ps(tile.max[r])), lowest);
      const ScaledExponential<Reals> e = scaled_exponential(lanes_cast<Reals>(x));
      __m512 slope = _mm512_mul_ps(lanes_cast<__m512>(e.mantissa), lanes_cast<__m512>(e.scale));
      __m512 factor = _mm512_set1_ps(tile.factor[r]);
      if constexpr (Loss::kSquares) factor = _mm512_fmadd_ps(slope, _mm512_set1_ps(tile.square_factor[r]), factor);
      slope = _mm512_mul_ps(slope, factor);
      if constexpr (Loss::kMarked != Marked::kNone) {
        const __mmask16 is_marked = _mm512_cmpeq_epi32_mask(index[v], _mm512_set1_epi32(tile.marked[r]));
        slope = _mm512_mask_mov_ps(slope, is_marked, _mm512_set1_ps(tile.marked_slope[r]));
      }
      const __mmask16 is_target = _mm512_cmpeq_epi32_mask(index[v], _mm512_set1_epi32(tile.label[r]));
      slope = _mm512_mask_mov_ps(slope, is_target, _mm512_set1_ps(tile.target_slope[r]));
      _mm512_mask_storeu_ps(grad + 16 * v, mask[v], slope);
    }
  }
}

#endif  // FK_HAS_AVX512_CODE

}  // namespace
}  // namespace focalkern::cpu
