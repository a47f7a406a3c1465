// The gradient of contiguous rows of few classes, with AVX-512. Sixteen rows fill exactly one vector per class; a
// vector may hold parts of two rows. One shuffle broadcasts a coefficient of each row to the row's elements.
#pragma once

#include <algorithm>

#include "cpu/row_loss/tile.h"
#include "cpu/simd/dispatch.h"
#include "cpu/simd/math.h"
#include "cpu/simd/transpose.h"
#include "cpu/simd/vector.h"
#include "math/row_loss.h"

namespace focalkern::cpu {

// with more classes, a last step stores the gradients of the targets one by one
constexpr int64_t kTargetsTogether = 32;

#ifdef FK_HAS_AVX512_CODE

// For each element of sixteen contiguous rows, the index of its row. For pairs (half precision), the even elements of
// 32 come first, then the odd ones, in the order that Pair::split returns.
template <bool kPairs>
struct DenseRows {
  alignas(64) int32_t row[(kMostDense + 1) * 16];
  int64_t prepared = 0;  // number of classes for which the table is prepared

  FK_AVX512 void prepare(int64_t classes) {
    if (classes == prepared) return;
    prepared = classes;
    const __m512 per_class = _mm512_set1_ps(1.0f / static_cast<float>(classes));
    const __m512i lane = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    const int64_t end = kPairs ? (classes + 1) / 2 * 32 : classes * 16;
    for (int64_t i = 0; i < end; i += 16) {
      const auto begin = static_cast<int32_t>(kPairs ? i / 32 * 32 + i / 16 % 2 : i);
      const __m512i number = _mm512_add_epi32(_mm512_slli_epi32(lane, kPairs), _mm512_set1_epi32(begin));
      // The middle of an element, so that rounding of the product cannot reach the next row.
      const __m512 middle = _mm512_add_ps(_mm512_cvtepi32_ps(number), _mm512_set1_ps(0.5f));
      _mm512_store_si512(row + i, _mm512_cvttps_epi32(_mm512_mul_ps(middle, per_class)));
    }
  }
};

#endif  // FK_HAS_AVX512_CODE

namespace {

#ifdef FK_HAS_AVX512_CODE

// The table is kept between calls: for a hundred classes it takes as long as a few rows.
template <bool kPairs>
DenseRows<kPairs>& dense_rows_of_this_thread() {
  static thread_local DenseRows<kPairs> rows;
  return rows;
}

// The coefficients of sixteen rows in registers, and the gradient of sixteen of their elements.
template <typename Loss, typename Scalar>
struct DenseGroup {
  using Reals = simd_t<float, 16>;
  static constexpr bool kMarks = Loss::kSpecialClass != SpecialClass::kNone;

  __m512 most, max, factor, target_grad, square_factor, special_grad;
  __m512i target[2], marked[2];  // element index of the class, and that index minus one

  FK_AVX512 inline __attribute__((always_inline)) DenseGroup(const Tile<float>& tile, int64_t row, __m512i begins)
      : most(_mm512_sub_ps(_mm512_setzero_ps(), _mm512_loadu_ps(tile.exp_zero))),
        max(_mm512_loadu_ps(tile.shift + row)),
        factor(load(tile.factor + row)),
        target_grad(load(tile.target_grad + row)) {
    find_places(tile.label + row, begins, target);
    if constexpr (Loss::kSquares) square_factor = load(tile.square_factor + row);
    if constexpr (kMarks) {
      special_grad = load(tile.special_grad + row);
      find_places(tile.special + row, begins, marked);
    }
  }

  // Gradients of the logits z, whose rows are `rows`, at element index `place` + kNext. kLater omits the target and the
  // special class; a later step stores them.
  template <bool kLater, int kNext = 0>
  FK_AVX512 inline __attribute__((always_inline)) __m512 gradients(__m512 z, __m512i rows, __m512i place) const {
    // The minimum turns NaN into 0; the factor of such a row is NaN already.
    const __m512 fall = _mm512_min_ps(_mm512_sub_ps(_mm512_permutexvar_ps(rows, max), z), most);
    const ScaledExponential<Reals> e = scaled_exponential(-lanes_cast<Reals>(fall));
    __m512 grad = _mm512_mul_ps(lanes_cast<__m512>(e.mantissa), lanes_cast<__m512>(e.scale));
    __m512 row_factor = _mm512_permutexvar_ps(rows, factor);
    if constexpr (Loss::kSquares) {
      row_factor = _mm512_fmadd_ps(grad, _mm512_permutexvar_ps(rows, square_factor), row_factor);
    }
    grad = _mm512_mul_ps(grad, row_factor);
    if constexpr (!kLater) {
      if constexpr (kMarks) {
        const __mmask16 is_marked = _mm512_cmpeq_epi32_mask(_mm512_permutexvar_epi32(rows, marked[kNext]), place);
        grad = _mm512_mask_permutexvar_ps(grad, is_marked, rows, special_grad);
      }
      const __mmask16 is_target = _mm512_cmpeq_epi32_mask(_mm512_permutexvar_epi32(rows, target[kNext]), place);
      grad = _mm512_mask_permutexvar_ps(grad, is_target, rows, target_grad);
    }
    return grad;
  }

  // `gradients` for words that hold two half-precision logits.
  template <bool kLater>
  FK_AVX512 inline __attribute__((always_inline)) __m512i gradients_of_pairs(__m512i z, const int32_t* rows,
                                                                             __m512i even) const {
    __m512i low, high;
    Pair<Scalar>::split(z, &low, &high);
    const __m512 of_low = gradients<kLater, 0>(_mm512_castsi512_ps(low), _mm512_load_si512(rows), even);
    const __m512 of_high = gradients<kLater, 1>(_mm512_castsi512_ps(high), _mm512_load_si512(rows + 16), even);
    return Pair<Scalar>::join_plain(_mm512_castps_si512(of_low), _mm512_castps_si512(of_high));
  }

  // Computes and stores the gradients of one vector, `bytes` after the first; its elements are at `place`. Returns the
  // next place.
  template <bool kLater>
  FK_AVX512 inline __attribute__((always_inline)) __m512i store_gradients(const char* z, const char* row_bytes,
                                                                          int64_t bytes, __m512i place,
                                                                          char* grad) const {
    constexpr int64_t kPerWord = sizeof(float) / sizeof(Scalar);
    if constexpr (kLater) {
      prefetch(z + bytes + kAhead * sizeof(Scalar));
      prefetch(grad + bytes + kAhead * sizeof(Scalar));
    }
    const auto* const rows = reinterpret_cast<const int32_t*>(row_bytes + bytes * kPerWord);
    if constexpr (kPerWord == 1) {
      _mm512_storeu_ps(grad + bytes, gradients<kLater>(_mm512_loadu_ps(z + bytes), _mm512_load_si512(rows), place));
    } else {
      _mm512_storeu_si512(grad + bytes, gradients_of_pairs<kLater>(_mm512_loadu_si512(z + bytes), rows, place));
    }
    return kLater ? place : _mm512_add_epi32(place, _mm512_set1_epi32(16 * kPerWord));
  }

 private:
  FK_AVX512 static inline __attribute__((always_inline)) __m512 load(const float* from) {
    const __m512 numbers = _mm512_loadu_ps(from);
    return sizeof(Scalar) == 2 ? _mm512_castsi512_ps(with_plain_nan(_mm512_castps_si512(numbers))) : numbers;
  }
  // The element index of each row's label. A label of -1 gives an element of another row, or none.
  FK_AVX512 static inline __attribute__((always_inline)) void find_places(const int32_t* label, __m512i begins,
                                                                          __m512i (&places)[2]) {
    places[0] = _mm512_add_epi32(_mm512_loadu_si512(label), begins);
    places[1] = _mm512_sub_epi32(places[0], _mm512_set1_epi32(1));
  }
};

template <typename Loss, bool kLater, typename Scalar>
FK_AVX512 void grad_of_dense_rows(const Scalar* logits, int64_t classes, int64_t n_rows,
                                  const DenseRows<sizeof(Scalar) == 2>& dense, const Tile<float>& tile, Scalar* grads) {
  const __m512i first = _mm512_loadu_si512(kFirst<int32_t>);
  const __m512i begins = _mm512_mullo_epi32(first, _mm512_set1_epi32(static_cast<int32_t>(classes)));
  for (int64_t r = 0; r < n_rows; r += 16) {
    const int64_t row = std::min(r, n_rows - 16), end = classes * 16 * static_cast<int64_t>(sizeof(Scalar));  // bytes
    const Scalar* z = logits + row * classes;
    Scalar* grad = grads + row * classes;
    const DenseGroup<Loss, Scalar> group(tile, row, begins);
    const char* const z_bytes = reinterpret_cast<const char*>(z);
    const char* const row_bytes = reinterpret_cast<const char*>(dense.row);
    char* const grad_bytes = reinterpret_cast<char*>(grad);
    __m512i place = sizeof(Scalar) == 2 ? _mm512_add_epi32(first, first) : first;
    int64_t i = 0;
    for (; i <= end - 128; i += 128) {
      asm("" : "+r"(i));  // without this gcc keeps an address for each of the five calls
      place = group.template store_gradients<kLater>(z_bytes, row_bytes, i, place, grad_bytes);
      place = group.template store_gradients<kLater>(z_bytes, row_bytes, i + 64, place, grad_bytes);
    }
    if (i <= end - 64) {
      place = group.template store_gradients<kLater>(z_bytes, row_bytes, i, place, grad_bytes);
      i += 64;
    }
    if constexpr (sizeof(Scalar) == 2) {
      if (i < end) {  // half of a vector
        const __m512i z_pairs =
            _mm512_castsi256_si512(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(z_bytes + i)));
        const __m512i gradients = group.template gradients_of_pairs<kLater>(z_pairs, dense.row + i / 2, place);
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(grad_bytes + i), _mm512_castsi512_si256(gradients));
      }
    }
    if constexpr (kLater) {
      for (int64_t k = 0; k < 16; ++k, grad += classes) store_special_grads<Loss>(tile, row + k, grad);
    }
  }
}

// The gradient of at least sixteen rows; the last sixteen overlap the previous ones.
template <typename Loss, typename Scalar>
void grad_of_dense_rows(const Scalar* logits, int64_t classes, int64_t n_rows,
                        const DenseRows<sizeof(Scalar) == 2>& dense, const Tile<float>& tile, Scalar* grads) {
  if (classes <= kTargetsTogether) {
    grad_of_dense_rows<Loss, false>(logits, classes, n_rows, dense, tile, grads);
  } else {
    grad_of_dense_rows<Loss, true>(logits, classes, n_rows, dense, tile, grads);
  }
}

// Gathers the target logit of each row; 0 for an ignored row. Strides must be below kFarthest. Needs at least sixteen
// rows; the last vector of sixteen overlaps the one before.
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
