// The gradient of contiguous rows of few classes, with AVX-512: sixteen rows are as many vectors as there are classes,
// all of them full, whatever row a number belongs to. What a row has is brought to its numbers by one shuffle each.
#pragma once

#include <algorithm>

#include "cpu/elementary.h"
#include "cpu/lanes.h"
#include "cpu/row_loss_tile.h"
#include "cpu/transpose.h"
#include "cpu/vector_clones.h"
#include "math/row_loss.h"

namespace focalkern::cpu {
namespace {

// Classes. Longer rows fill vectors of their own well enough; half precision takes more to be converted there.
template <typename Scalar>
constexpr int64_t kMostFlat = sizeof(Scalar) == 2 ? 128 : 64;

#ifdef FK_HAS_AVX512_CODE

// The numbers 0, 1, 2, ... of sixteen rows one after the other: which of these rows each belongs to. Of half precision
// the even ones of 32 come first, then the odd ones, as words of two are split.
template <typename Scalar>
struct FlatRows {
  alignas(64) int32_t row[(kMostFlat<Scalar> + 1) * 16];

  FK_AVX512 void prepare(int64_t classes) {
    constexpr bool kPairs = sizeof(Scalar) == 2;
    const __m512 per_class = _mm512_set1_ps(1.0f / static_cast<float>(classes));
    const __m512i lane = _mm512_loadu_si512(kFirst<int32_t>);
    const int64_t end = kPairs ? (classes + 1) / 2 * 32 : classes * 16;
    for (int64_t i = 0; i < end; i += 16) {
      const auto begin = static_cast<int32_t>(kPairs ? i / 32 * 32 + i / 16 % 2 : i);
      const __m512i number = _mm512_add_epi32(_mm512_slli_epi32(lane, kPairs), _mm512_set1_epi32(begin));
      // Half a number away from where the next row begins, for what the product errs.
      const __m512 middle = _mm512_add_ps(_mm512_cvtepi32_ps(number), _mm512_set1_ps(0.5f));
      _mm512_store_si512(row + i, _mm512_cvttps_epi32(_mm512_mul_ps(middle, per_class)));
    }
  }
};

// What sixteen rows have, in registers, and the gradient of sixteen of their numbers.
template <typename Loss, typename Scalar>
struct FlatGroup {
  using Reals = lanes_t<float, 16>;
  static constexpr bool kMarks = Loss::kMarked != Marked::kNone;

  __m512 most, max, factor, target_slope, square_factor, marked_slope;
  __m512i target, marked;

  FK_AVX512 inline __attribute__((always_inline)) FlatGroup(const Tile<float>& tile, int64_t row, __m512i begins)
      : most(_mm512_sub_ps(_mm512_setzero_ps(), _mm512_loadu_ps(tile.exp_zero))),
        max(_mm512_loadu_ps(tile.max + row)),
        factor(load(tile.factor + row)),
        target_slope(load(tile.target_slope + row)),
        target(place_of(tile.label + row, begins)) {
    if constexpr (Loss::kSquares) square_factor = load(tile.square_factor + row);
    if constexpr (kMarks) {
      marked_slope = load(tile.marked_slope + row);
      marked = place_of(tile.marked + row, begins);
    }
  }

  // Of the numbers z in the rows `own`, at `place`.
  FK_AVX512 inline __attribute__((always_inline)) __m512 slopes(__m512 z, __m512i own, __m512i place) const {
    // 0 for NaN, as in a row.
    const __m512 fall = _mm512_min_ps(_mm512_sub_ps(_mm512_permutexvar_ps(own, max), z), most);
    const ScaledExponential<Reals> e = scaled_exponential(-lanes_cast<Reals>(fall));
    __m512 slope = _mm512_mul_ps(lanes_cast<__m512>(e.mantissa), lanes_cast<__m512>(e.scale));
    __m512 own_factor = _mm512_permutexvar_ps(own, factor);
    if constexpr (Loss::kSquares) {
      own_factor = _mm512_fmadd_ps(slope, _mm512_permutexvar_ps(own, square_factor), own_factor);
    }
    slope = _mm512_mul_ps(slope, own_factor);
    if constexpr (kMarks) {
      const __mmask16 is_marked = _mm512_cmpeq_epi32_mask(_mm512_permutexvar_epi32(own, marked), place);
      slope = _mm512_mask_permutexvar_ps(slope, is_marked, own, marked_slope);
    }
    const __mmask16 is_target = _mm512_cmpeq_epi32_mask(_mm512_permutexvar_epi32(own, target), place);
    return _mm512_mask_permutexvar_ps(slope, is_target, own, target_slope);
  }

  // The same of words of two numbers.
  FK_AVX512 inline __attribute__((always_inline)) __m512i slopes_of_pairs(__m512i z, const int32_t* own,
                                                                          __m512i even) const {
    __m512i low, high;
    Pair<Scalar>::split(z, &low, &high);
    const __m512i odd = _mm512_add_epi32(even, _mm512_set1_epi32(1));
    const __m512 of_low = slopes(_mm512_castsi512_ps(low), _mm512_load_si512(own), even);
    const __m512 of_high = slopes(_mm512_castsi512_ps(high), _mm512_load_si512(own + 16), odd);
    return Pair<Scalar>::join_plain(_mm512_castps_si512(of_low), _mm512_castps_si512(of_high));
  }

 private:
  FK_AVX512 static inline __attribute__((always_inline)) __m512 load(const float* from) {
    const __m512 numbers = _mm512_loadu_ps(from);
    return sizeof(Scalar) == 2 ? _mm512_castsi512_ps(with_plain_nan(_mm512_castps_si512(numbers))) : numbers;
  }
  // Where the number of a label is; of -1, a number of another row or none.
  FK_AVX512 static inline __attribute__((always_inline)) __m512i place_of(const int32_t* label, __m512i begins) {
    return _mm512_add_epi32(_mm512_loadu_si512(label), begins);
  }
};

// As GradOfColumns, at least sixteen rows, the last of which overlap their neighbours.
template <typename Loss, typename Scalar>
FK_AVX512 void grad_of_flat_rows(const Scalar* logits, int64_t classes, int64_t n_rows, const FlatRows<Scalar>& flat,
                                 const Tile<float>& tile, Scalar* grads) {
  const __m512i first = _mm512_loadu_si512(kFirst<int32_t>), step = _mm512_set1_epi32(sizeof(Scalar) == 2 ? 32 : 16);
  const __m512i begins = _mm512_mullo_epi32(first, _mm512_set1_epi32(static_cast<int32_t>(classes)));
  for (int64_t r = 0; r < n_rows; r += 16) {
    const int64_t row = std::min(r, n_rows - 16);
    const Scalar* z = logits + row * classes;
    Scalar* grad = grads + row * classes;
    const FlatGroup<Loss, Scalar> group(tile, row, begins);
    if constexpr (sizeof(Scalar) == sizeof(float)) {
      __m512i place = first;
      for (int64_t i = 0; i < classes * 16; i += 16, place = _mm512_add_epi32(place, step)) {
        const __m512i own = _mm512_load_si512(flat.row + i);
        _mm512_storeu_ps(grad + i, group.slopes(_mm512_loadu_ps(z + i), own, place));
      }
    } else {
      __m512i even = _mm512_add_epi32(first, first);
      int64_t i = 0;
      for (; i <= classes * 16 - 32; i += 32, even = _mm512_add_epi32(even, step)) {
        const __m512i z_pairs = _mm512_loadu_si512(z + i);
        _mm512_storeu_si512(grad + i, group.slopes_of_pairs(z_pairs, flat.row + i, even));
      }
      if (i < classes * 16) {  // half of a vector
        const __m512i z_pairs = _mm512_castsi256_si512(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(z + i)));
        const __m512i slopes = group.slopes_of_pairs(z_pairs, flat.row + i, even);
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(grad + i), _mm512_castsi512_si256(slopes));
      }
    }
  }
}

// The logits of the rows' targets, in any layout with constant distances below kFarthest; 0 of an ignored row. At least
// sixteen rows, the last of which overlap their neighbours.
template <typename Scalar>
FK_AVX512 void gather_targets(const Scalar* z, int64_t row_stride, int64_t class_stride, int64_t n_rows,
                              const int32_t* label, float* target_logit) {
  const __m512i rows =
      _mm512_mullo_epi32(_mm512_loadu_si512(kFirst<int32_t>), _mm512_set1_epi32(static_cast<int32_t>(row_stride)));
  const __m512i class_step = _mm512_set1_epi32(static_cast<int32_t>(class_stride));
  for (int64_t r = 0; r < n_rows; r += 16) {
    const int64_t row = std::min(r, n_rows - 16);
    const Scalar* from = z + row * row_stride;
    const __m512i labels = _mm512_loadu_si512(label + row);
    const __mmask16 is_there = _mm512_cmpge_epi32_mask(labels, _mm512_setzero_si512());
    const __m512i place = _mm512_add_epi32(rows, _mm512_mullo_epi32(labels, class_step));
    _mm512_storeu_ps(target_logit + row, gathered(from, place, is_there));
  }
}

#endif  // FK_HAS_AVX512_CODE

}  // namespace
}  // namespace focalkern::cpu
