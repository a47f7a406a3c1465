// Sums of float rows of a few dozen adjacent classes, with AVX-512: four rows side by side, vector after vector. The
// four rows share the overhead of the loop, and one reduction serves their four vectors. (Transposed rows are faster
// for half precision, which needs a conversion, and for fewer classes. Row-by-row loops are faster for more classes.)
#pragma once

#include <algorithm>
#include <type_traits>

#include "cpu/row_loss/avx512_backward.h"
#include "cpu/row_loss/tile.h"
#include "cpu/simd/dispatch.h"
#include "cpu/simd/math.h"
#include "cpu/simd/vector.h"

namespace focalkern::cpu {
namespace {

#ifdef FK_HAS_AVX512_CODE

// A row as vectors. The first vector has `first_count` classes (at least one) of its own; its other classes are the
// first ones of the second vector.
struct RowVectors {
  int64_t count, first_count;
  explicit RowVectors(int64_t classes) : count((classes + 15) / 16), first_count(classes - (count - 1) * 16) {}
};

// Reduces each of four vectors to one lane.
template <typename Combine>
FK_AVX512 inline __attribute__((always_inline)) __m128 folded(const simd_t<float, 16> (&rows)[4], Combine combine) {
  using Reals = simd_t<float, 16>;
  using Half = simd_t<float, 8>;
  using Quarter = simd_t<float, 4>;
  __m512 v[4];
  for (int i = 0; i < 4; ++i) v[i] = lanes_cast<__m512>(rows[i]);
  for (int i = 0; i < 4; i += 2) {
    v[i] = lanes_cast<__m512>(combine(lanes_cast<Reals>(_mm512_unpacklo_ps(v[i], v[i + 1])),
                                      lanes_cast<Reals>(_mm512_unpackhi_ps(v[i], v[i + 1]))));
  }
  const __m512 all = lanes_cast<__m512>(combine(lanes_cast<Reals>(_mm512_shuffle_ps(v[0], v[2], 0x44)),
                                                lanes_cast<Reals>(_mm512_shuffle_ps(v[0], v[2], 0xee))));
  const __m256 half = lanes_cast<__m256>(
      combine(lanes_cast<Half>(_mm512_castps512_ps256(all)), lanes_cast<Half>(_mm512_extractf32x8_ps(all, 1))));
  return lanes_cast<__m128>(
      combine(lanes_cast<Quarter>(_mm256_castps256_ps128(half)), lanes_cast<Quarter>(_mm256_extractf128_ps(half, 1))));
}

// max_of for four rows.
FK_AVX512 inline __attribute__((always_inline)) __m128 maxima_of_four(const float* z, int64_t stride,
                                                                      const RowVectors& vectors) {
  using Reals = simd_t<float, 16>;
  Reals max[4];
  for (int i = 0; i < 4; ++i) max[i] = load_simd<Reals>(z + i * stride);
  z += vectors.first_count;
  for (const float* const end = z + (vectors.count - 1) * 16; z != end; z += 16) {
    for (int i = 0; i < 4; ++i) max[i] = Larger{}(max[i], load_simd<Reals>(z + i * stride));
  }
  return folded(max, Larger{});
}

// sum_exp_except for four rows, over every class but the target.
template <bool kMayRise>
FK_AVX512 inline __attribute__((always_inline)) __m128 sums_of_four(const float* z, int64_t stride,
                                                                    const RowVectors& vectors, const float* shift,
                                                                    const int32_t* label, const float* exp_zero) {
  using Reals = simd_t<float, 16>;
  const Reals most = lanes_cast<Reals>(_mm512_sub_ps(_mm512_setzero_ps(), _mm512_loadu_ps(exp_zero)));
  Reals shifts[4], sums[4];
  __m512i labels[4];
  for (int i = 0; i < 4; ++i) {
    shifts[i] = lanes_cast<Reals>(_mm512_set1_ps(shift[i]));
    labels[i] = _mm512_set1_epi32(label[i]);
    sums[i] = Reals{};
  }
  // Prefetches as many bytes as the loop reads, in the order of addresses: contiguous rows follow each other.
  // Prefetching in the order of the reads, four rows at a time, is slower.
  const float* ahead = z + kBlock;
  int64_t step = vectors.first_count;
  __m512i index = _mm512_loadu_si512(kFirst<int32_t>), index_step = _mm512_set1_epi32(static_cast<int32_t>(step));
  __mmask16 is_own = _mm512_cmplt_epi32_mask(index, index_step);
  for (int64_t k = 0; k < vectors.count; ++k, ahead += 64) {
    for (int i = 0; i < 4; ++i) {
      prefetch(ahead + i * 16);
      const Reals fall = shifts[i] - load_simd<Reals>(z + i * stride);
      const ScaledExponential<Reals> e = exponential_of_fall<kMayRise>(fall, most);
      const __mmask16 is_other = _mm512_mask_cmpneq_epi32_mask(is_own, index, labels[i]);
      sums[i] = lanes_cast<Reals>(_mm512_mask3_fmadd_ps(lanes_cast<__m512>(e.mantissa), lanes_cast<__m512>(e.scale),
                                                        lanes_cast<__m512>(sums[i]), is_other));
    }
    z += step;
    index = _mm512_add_epi32(index, index_step);
    step = 16;
    index_step = _mm512_set1_epi32(16);
    is_own = 0xffff;
  }
  return folded(sums, Sum{});
}

// For at least sixteen rows; the last sixteen overlap the previous ones.
FK_AVX512 inline void sums_of_four_rows(const float* z, int64_t stride, int64_t classes, int64_t n_rows,
                                        Tile<float>& tile) {
  const RowVectors vectors(classes);
  const __m128 largest = _mm_set1_ps(kLargestSum<float>);
  for (int64_t begin = 0; begin < n_rows; begin += kRowsAtOnce) {
    const int64_t row = std::min(begin, n_rows - kRowsAtOnce);
    gather_targets(z + row * stride, stride, 1, kRowsAtOnce, tile.label + row, tile.target_logit + row);
    _mm512_storeu_ps(tile.shift + row, _mm512_loadu_ps(tile.target_logit + row));
    for (int64_t r = row; r < row + kRowsAtOnce; r += 4) {
      const float* const rows = z + r * stride;
      float* const shift = tile.shift + r;
      __m128 rest = sums_of_four<true>(rows, stride, vectors, shift, tile.label + r, tile.exp_zero);
      const __mmask8 is_large = _mm_cmp_ps_mask(rest, largest, _CMP_NLT_UQ);  // or NaN
      if (is_large) {
        // The result of a row must not depend on its neighbours, so only these rows are computed again.
        _mm_mask_storeu_ps(shift, is_large, maxima_of_four(rows, stride, vectors));
        rest = _mm_mask_mov_ps(rest, is_large,
                               sums_of_four<false>(rows, stride, vectors, shift, tile.label + r, tile.exp_zero));
      }
      _mm_storeu_ps(tile.sum_exp_others + r, rest);
    }
  }
}

#endif  // FK_HAS_AVX512_CODE

}  // namespace
}  // namespace focalkern::cpu
