// Rows of few adjacent classes, transposed into columns in the type of the computation, and back.
//
//   to_columns  in [n_rows, classes] of Scalar  -> out [classes, stride] of compute_t<Scalar>
//   to_rows     in [classes, stride] of compute_t<Scalar> -> out [n_rows, classes] of Scalar
//
// 4 x 4 blocks fit any vector unit. AVX-512 transposes sixteen rows together, four 32-bit words of each at a time. Two
// half-precision numbers form one word and are converted in registers.
#pragma once

#include <algorithm>
#include <cstring>
#include <type_traits>

#include "cpu/simd/dispatch.h"
#include "cpu/simd/vector.h"
#include "math/portable.h"

namespace focalkern::cpu {

constexpr int64_t kWideRows = 16;                // rows that AVX-512 transposes in registers
constexpr int64_t kFarthest = int64_t(1) << 30;  // largest offset in elements that fits 32 bits

// Classes in four 32-bit words.
constexpr int64_t wide_classes(int64_t scalar_size) { return 16 / scalar_size; }

namespace {

// in [n_rows, in_stride] -> out [n_columns, out_stride]. The last 4 x 4 blocks overlap the previous ones. At least four
// rows and columns are required.
template <typename Scalar>
FK_HOST_DEVICE void transpose_by_four(const Scalar* in, int64_t in_stride, int64_t n_rows, int64_t n_columns,
                                      Scalar* out, int64_t out_stride) {
  using Int = std::conditional_t<sizeof(Scalar) == 2, int16_t, int32_t>;
  using Four [[gnu::vector_size(4 * sizeof(Scalar))]] = Int;
  for (int64_t r = 0; r < n_rows; r += 4) {
    const int64_t row = std::min(r, n_rows - 4);
    for (int64_t c = 0; c < n_columns; c += 4) {
      const int64_t column = std::min(c, n_columns - 4);
      Four line[4];
      for (int64_t i = 0; i < 4; ++i) std::memcpy(&line[i], in + (row + i) * in_stride + column, sizeof(Four));
      transpose_4x4(line);
      for (int64_t i = 0; i < 4; ++i) std::memcpy(out + (column + i) * out_stride + row, &line[i], sizeof(Four));
    }
  }
}

#ifdef FK_HAS_AVX512_CODE

// Transposes the 4 x 4 block in each quarter of the registers. Applying it twice restores the input.
FK_AVX512 inline __attribute__((always_inline)) void transpose_quarters(__m512i (&v)[4]) {
  const __m512i low01 = _mm512_unpacklo_epi32(v[0], v[1]), high01 = _mm512_unpackhi_epi32(v[0], v[1]);
  const __m512i low23 = _mm512_unpacklo_epi32(v[2], v[3]), high23 = _mm512_unpackhi_epi32(v[2], v[3]);
  v[0] = _mm512_unpacklo_epi64(low01, low23);
  v[1] = _mm512_unpackhi_epi64(low01, low23);
  v[2] = _mm512_unpacklo_epi64(high01, high23);
  v[3] = _mm512_unpackhi_epi64(high01, high23);
}

// Loads and stores four words of each of sixteen rows. Two base addresses and four strides address all rows without
// extra instructions.
template <typename Scalar>
class RowsOfSixteen {
 public:
  FK_AVX512 inline __attribute__((always_inline)) RowsOfSixteen(Scalar* rows, int64_t stride)
      : low_(reinterpret_cast<Byte*>(rows)),
        high_(reinterpret_cast<Byte*>(rows + 8 * stride)),
        one_(stride * static_cast<int64_t>(sizeof(Scalar))),
        three_(opaque(3 * one_)),
        five_(opaque(5 * one_)),
        seven_(opaque(7 * one_)) {}
  FK_AVX512 inline __attribute__((always_inline)) void move(int64_t classes) {
    low_ += classes * static_cast<int64_t>(sizeof(Scalar));
    high_ += classes * static_cast<int64_t>(sizeof(Scalar));
  }

  // Register i holds the rows i, i + 4, i + 8 and i + 12.
  FK_AVX512 inline __attribute__((always_inline)) void load(__m512i (&v)[4]) const {
    v[0] = joined(low_, low_ + 4 * one_, high_, high_ + 4 * one_);
    v[1] = joined(low_ + one_, low_ + five_, high_ + one_, high_ + five_);
    v[2] = joined(low_ + 2 * one_, low_ + 2 * three_, high_ + 2 * one_, high_ + 2 * three_);
    v[3] = joined(low_ + three_, low_ + seven_, high_ + three_, high_ + seven_);
  }
  FK_AVX512 inline __attribute__((always_inline)) void store(const __m512i (&v)[4]) const {
    split(v[0], low_, low_ + 4 * one_, high_, high_ + 4 * one_);
    split(v[1], low_ + one_, low_ + five_, high_ + one_, high_ + five_);
    split(v[2], low_ + 2 * one_, low_ + 2 * three_, high_ + 2 * one_, high_ + 2 * three_);
    split(v[3], low_ + three_, low_ + seven_, high_ + three_, high_ + seven_);
  }

 private:
  using Byte = std::conditional_t<std::is_const_v<Scalar>, const char, char>;

  // Without this gcc keeps an address for each row.
  static inline __attribute__((always_inline)) int64_t opaque(int64_t distance) {
    asm("" : "+r"(distance));
    return distance;
  }
  FK_AVX512 static inline __attribute__((always_inline)) __m512i joined(const char* a, const char* b, const char* c,
                                                                        const char* d) {
    __m512i v = _mm512_castsi128_si512(_mm_loadu_si128(reinterpret_cast<const __m128i*>(a)));
    v = _mm512_inserti32x4(v, _mm_loadu_si128(reinterpret_cast<const __m128i*>(b)), 1);
    v = _mm512_inserti32x4(v, _mm_loadu_si128(reinterpret_cast<const __m128i*>(c)), 2);
    return _mm512_inserti32x4(v, _mm_loadu_si128(reinterpret_cast<const __m128i*>(d)), 3);
  }
  FK_AVX512 static inline __attribute__((always_inline)) void split(__m512i v, char* a, char* b, char* c, char* d) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(a), _mm512_castsi512_si128(v));
    // 64-bit words: only for these does gcc store in the extracting instruction.
    _mm_storeu_si128(reinterpret_cast<__m128i*>(b), _mm512_extracti64x2_epi64(v, 1));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(c), _mm512_extracti64x2_epi64(v, 2));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(d), _mm512_extracti64x2_epi64(v, 3));
  }

  Byte *low_, *high_;
  int64_t one_, three_, five_, seven_;
};

FK_AVX512 inline __attribute__((always_inline)) __m512i with_plain_nan(__m512i bits) {
  const __m512 x = _mm512_castsi512_ps(bits);
  return _mm512_mask_mov_epi32(bits, _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q), _mm512_set1_epi32(0x7fc00000));
}

// Words of two half-precision numbers; the first is the lower half.
template <typename Scalar>
struct Pair;
template <>
struct Pair<BFloat16> {
  FK_AVX512 static inline __attribute__((always_inline)) void split(__m512i v, __m512i* first, __m512i* second) {
    *first = _mm512_slli_epi32(v, 16);
    *second = _mm512_and_si512(v, _mm512_set1_epi32(static_cast<int>(0xffff0000u)));
  }
  // As in Store<BFloat16>: the processor's own conversion would flush denormal numbers to 0. A quiet NaN replaces every
  // NaN, because rounding would turn some NaNs into numbers.
  FK_AVX512 static inline __attribute__((always_inline)) __m512i rounded(__m512i bits) {
    const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    return _mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7fff)), odd);
  }
  FK_AVX512 static inline __attribute__((always_inline)) __m512i join_plain(__m512i first, __m512i second) {
    return _mm512_mask_blend_epi16(0xaaaaaaaau, _mm512_srli_epi32(rounded(first), 16), rounded(second));
  }
  FK_AVX512 static inline __attribute__((always_inline)) __m512i join(__m512i first, __m512i second) {
    return join_plain(with_plain_nan(first), with_plain_nan(second));
  }
};
template <>
struct Pair<Half> {
  FK_AVX512 static inline __attribute__((always_inline)) __m512i widened(__m512i v) {
    return _mm512_castps_si512(_mm512_cvtph_ps(_mm512_cvtepi32_epi16(v)));
  }
  FK_AVX512 static inline __attribute__((always_inline)) void split(__m512i v, __m512i* first, __m512i* second) {
    *first = widened(v);
    *second = widened(_mm512_srli_epi32(v, 16));
  }
  FK_AVX512 static inline __attribute__((always_inline)) __m512i narrowed(__m512i v) {
    return _mm512_cvtepu16_epi32(_mm512_cvtps_ph(_mm512_castsi512_ps(v), _MM_FROUND_TO_NEAREST_INT));
  }
  FK_AVX512 static inline __attribute__((always_inline)) __m512i join_plain(__m512i first, __m512i second) {
    return _mm512_or_si512(narrowed(first), _mm512_slli_epi32(narrowed(second), 16));
  }
  FK_AVX512 static inline __attribute__((always_inline)) __m512i join(__m512i first, __m512i second) {
    return join_plain(first, second);
  }
};

// The numbers at these places; 0 where `wanted` is not set. `from` has at least two numbers.
template <typename Scalar>
FK_AVX512 inline __attribute__((always_inline)) __m512 gathered(const Scalar* from, __m512i place, __mmask16 wanted) {
  if constexpr (sizeof(Scalar) == sizeof(float)) {
    return _mm512_mask_i32gather_ps(_mm512_setzero_ps(), wanted, place, from, sizeof(Scalar));
  } else {
    // Gathers words: a number with the one before it, or the first number with the one after it.
    const __m512i zero = _mm512_setzero_si512(), one = _mm512_set1_epi32(1);
    const __m512i word = _mm512_sub_epi32(_mm512_max_epi32(place, one), one);
    __m512i before, numbers;
    Pair<Scalar>::split(_mm512_mask_i32gather_epi32(zero, wanted, word, from, sizeof(Scalar)), &before, &numbers);
    return _mm512_castsi512_ps(_mm512_mask_mov_epi32(numbers, _mm512_cmpeq_epi32_mask(place, word), before));
  }
}

template <typename Scalar>
constexpr int64_t kWideClasses = wide_classes(sizeof(Scalar));

// The last words of a row and the last rows overlap the previous ones.
template <int64_t kStride, typename Scalar>
FK_AVX512 void wide_to_columns(const Scalar* in, int64_t in_stride, int64_t n_rows, int64_t classes, float* out) {
  constexpr int64_t width = kWideClasses<Scalar>;
  for (int64_t c = 0; c < classes; c += width) {
    const int64_t column = std::min(c, classes - width);
    const Scalar* from = in + column;
    float* to = out + column * kStride;
    for (int64_t left = n_rows; left > 0; left -= kWideRows, from += kWideRows * in_stride, to += kWideRows) {
      if (left < kWideRows) {
        from += (left - kWideRows) * in_stride;
        to += left - kWideRows;
      }
      __m512i v[4];
      RowsOfSixteen<const Scalar>(from, in_stride).load(v);
      transpose_quarters(v);
      for (int64_t i = 0; i < 4; ++i) {
        if constexpr (sizeof(Scalar) == sizeof(float)) {
          _mm512_storeu_si512(to + i * kStride, v[i]);
        } else {
          __m512i first, second;
          Pair<Scalar>::split(v[i], &first, &second);
          _mm512_storeu_si512(to + 2 * i * kStride, first);
          _mm512_storeu_si512(to + (2 * i + 1) * kStride, second);
        }
      }
    }
  }
}

template <int64_t kStride, typename Scalar>
FK_AVX512 void wide_to_rows(const float* in, int64_t n_rows, int64_t classes, Scalar* out, int64_t out_stride) {
  constexpr int64_t width = kWideClasses<Scalar>;
  for (int64_t c = 0; c < classes; c += width) {
    const int64_t column = std::min(c, classes - width);
    const float* from = in + column * kStride;
    Scalar* to = out + column;
    for (int64_t left = n_rows; left > 0; left -= kWideRows, from += kWideRows, to += kWideRows * out_stride) {
      if (left < kWideRows) {
        from += left - kWideRows;
        to += (left - kWideRows) * out_stride;
      }
      __m512i v[4];
      for (int64_t i = 0; i < 4; ++i) {
        if constexpr (sizeof(Scalar) == sizeof(float)) {
          v[i] = _mm512_loadu_si512(from + i * kStride);
        } else {
          v[i] = Pair<Scalar>::join(_mm512_loadu_si512(from + 2 * i * kStride),
                                    _mm512_loadu_si512(from + (2 * i + 1) * kStride));
        }
      }
      transpose_quarters(v);
      RowsOfSixteen<Scalar>(to, out_stride).store(v);
    }
  }
}

#endif  // FK_HAS_AVX512_CODE

constexpr int64_t kTransposedClasses = 32;  // half-precision classes at a time

// Transposes whole blocks, which overlap at the end, if the row has enough classes.
template <int64_t kStride, typename Scalar>
FK_VECTOR_CLONES void narrow_to_columns(const Scalar* in, int64_t in_stride, int64_t n_rows, int64_t classes,
                                        float* out) {
  if constexpr (sizeof(Scalar) == sizeof(float)) {
    transpose_by_four(in, in_stride, n_rows, classes, out, kStride);
  } else {
    Scalar transposed[kTransposedClasses * kStride];
    const int64_t width = std::min(classes, kTransposedClasses);
    for (int64_t c = 0; c < classes; c += width) {
      const int64_t begin = std::min(c, classes - width);
      transpose_by_four(in + begin, in_stride, n_rows, width, transposed, kStride);
      for (int64_t k = 0; k < width; ++k) {
        const Scalar* from = transposed + k * kStride;
        float* to = out + (begin + k) * kStride;
#pragma omp simd
        for (int64_t r = 0; r < n_rows; ++r) to[r] = load_as_compute(from[r]);
      }
    }
  }
}

template <int64_t kStride, typename Scalar>
FK_VECTOR_CLONES void narrow_to_rows(const float* in, int64_t n_rows, int64_t classes, Scalar* out,
                                     int64_t out_stride) {
  if constexpr (sizeof(Scalar) == sizeof(float)) {
    transpose_by_four(in, kStride, classes, n_rows, out, out_stride);
  } else {
    Scalar transposed[kTransposedClasses * kStride];
    const int64_t width = std::min(classes, kTransposedClasses);
    for (int64_t c = 0; c < classes; c += width) {
      const int64_t begin = std::min(c, classes - width);
      for (int64_t k = 0; k < width; ++k) {
        const float* from = in + (begin + k) * kStride;
        Scalar* to = transposed + k * kStride;
#pragma omp simd
        for (int64_t r = 0; r < n_rows; ++r) to[r] = Store<Scalar>::from_compute(from[r]);
      }
      transpose_by_four(transposed, kStride, width, n_rows, out + begin, out_stride);
    }
  }
}

// Both need at least four classes and four rows, and a stride of at least the number of rows.
template <int64_t kStride, typename Scalar>
void to_columns(const Scalar* in, int64_t in_stride, int64_t n_rows, int64_t classes, float* out) {
#ifdef FK_HAS_AVX512_CODE
  if (n_rows >= kWideRows && classes >= kWideClasses<Scalar> && has_avx512()) {
    return wide_to_columns<kStride>(in, in_stride, n_rows, classes, out);
  }
#endif
  narrow_to_columns<kStride>(in, in_stride, n_rows, classes, out);
}
template <int64_t kStride, typename Scalar>
void to_rows(const float* in, int64_t n_rows, int64_t classes, Scalar* out, int64_t out_stride) {
#ifdef FK_HAS_AVX512_CODE
  if (n_rows >= kWideRows && classes >= kWideClasses<Scalar> && has_avx512()) {
    return wide_to_rows<kStride>(in, n_rows, classes, out, out_stride);
  }
#endif
  narrow_to_rows<kStride>(in, n_rows, classes, out, out_stride);
}

}  // namespace
}  // namespace focalkern::cpu
