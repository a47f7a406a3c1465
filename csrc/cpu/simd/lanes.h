// Operations on vectors of n doubles (gnu::vector_size) that need another instruction for each width. Vectors of 8
// doubles occur only on processors with AVX-512, vectors of 4 only with AVX2.
#pragma once

#include <cmath>
#include <cstdint>
#include <type_traits>
#include <utility>

#include "cpu/simd/dispatch.h"
#include "cpu/simd/vector.h"

namespace focalkern::cpu {

// Body::run<bytes>(arguments...) in one width; the processor must support it (has_avx512, has_avx2).
template <int64_t bytes, typename Body, typename... Arguments>
void run_in(Arguments&&... arguments) {
#ifdef FK_HAS_AVX512_CODE
  if constexpr (bytes == 64) return run_in_64_bytes<Body>(arguments...);
  if constexpr (bytes == 32) return run_in_32_bytes<Body>(arguments...);
#endif
  if constexpr (bytes == 16) Body::template run<16>(arguments...);
}

namespace {

#ifdef FK_HAS_AVX512_CODE
using EightDoubles = simd_t<double, 8>;
FK_AVX512 inline EightDoubles fused(EightDoubles x, EightDoubles y, EightDoubles z) { return _mm512_fmadd_pd(x, y, z); }
// x times 2 to the integer part of `power`.
FK_AVX512 inline EightDoubles scaled(EightDoubles x, EightDoubles power) { return _mm512_scalef_pd(x, power); }
// Words whose last four bits are those of floor(16 x); |x| < 2^31.
FK_AVX512 inline simd_t<uint64_t, 8> sixteenths(EightDoubles x) {
  constexpr int kDown = _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC;
  return lanes_cast<simd_t<uint64_t, 8>>(_mm512_add_round_pd(x, _mm512_set1_pd(0x1.8p48), kDown));
}
// x - floor(16 x) / 16
FK_AVX512 inline EightDoubles rest_of_sixteenths(EightDoubles x) {
  return _mm512_reduce_pd(x, 4 << 4 | _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);
}
FK_AVX512 inline EightDoubles exponents(EightDoubles x) { return _mm512_getexp_pd(x); }
FK_AVX512 inline EightDoubles mantissas(EightDoubles x) {
  return _mm512_getmant_pd(x, _MM_MANT_NORM_1_2, _MM_MANT_SIGN_src);
}
// Adds `step` to the codes of lanes of x above those of y.
FK_AVX512 inline simd_t<uint64_t, 8> add_above(simd_t<uint64_t, 8> code, EightDoubles x, EightDoubles y, int64_t step) {
  const __m512i codes = lanes_cast<__m512i>(code);
  return lanes_cast<simd_t<uint64_t, 8>>(
      _mm512_mask_add_epi64(codes, _mm512_cmp_pd_mask(x, y, _CMP_GT_OQ), codes, _mm512_set1_epi64(step)));
}
FK_AVX512 inline bool any_above(EightDoubles x, EightDoubles y) { return _mm512_cmp_pd_mask(x, y, _CMP_GT_OQ) != 0; }
FK_AVX512 inline EightDoubles larger(EightDoubles x, EightDoubles y) { return _mm512_max_pd(x, y); }
FK_AVX512 inline EightDoubles widened(simd_t<float, 8> x) { return _mm512_cvtps_pd(x); }
FK_AVX512 inline __mmask8 first_lanes(int64_t count) { return static_cast<__mmask8>((1 << count) - 1); }
FK_AVX512 inline simd_t<float, 8> load_first(simd_t<float, 8> others, const float* from, int64_t count) {
  return _mm256_mask_loadu_ps(others, first_lanes(count), from);
}
FK_AVX512 inline void store_first(simd_t<float, 8> x, int64_t count, float* to) {
  _mm256_mask_storeu_ps(to, first_lanes(count), x);
}
// table[index], lane by lane.
template <int64_t size>
FK_AVX512 inline EightDoubles permuted(const double* table, simd_t<uint64_t, 8> index) {
  static_assert(size == 8 || size == 16);
  const __m512i places = lanes_cast<__m512i>(index);
  if constexpr (size == 8) return _mm512_permutexvar_pd(places, _mm512_loadu_pd(table));
  return _mm512_permutex2var_pd(_mm512_loadu_pd(table), places, _mm512_loadu_pd(table + 8));
}

using FourDoubles = simd_t<double, 4>;
FK_AVX2 inline bool any_above(FourDoubles x, FourDoubles y) {
  const __m256d found = _mm256_cmp_pd(x, y, _CMP_GT_OQ);
  return !_mm256_testz_pd(found, found);
}
FK_AVX2 inline FourDoubles fused(FourDoubles x, FourDoubles y, FourDoubles z) { return _mm256_fmadd_pd(x, y, z); }
FK_AVX2 inline FourDoubles larger(FourDoubles x, FourDoubles y) { return _mm256_max_pd(x, y); }
FK_AVX2 inline FourDoubles widened(simd_t<float, 4> x) { return _mm256_cvtps_pd(x); }
// table[index], lane by lane, for words of 32 bits; only the low three bits of an index count.
FK_AVX2 inline simd_t<uint32_t, 8> permuted(const uint32_t* table, simd_t<uint32_t, 8> index) {
  return lanes_cast<simd_t<uint32_t, 8>>(_mm256_permutevar8x32_epi32(
      _mm256_load_si256(reinterpret_cast<const __m256i*>(table)), lanes_cast<__m256i>(index)));
}
// The upper halves of `high` with the lower halves of `low`.
FK_AVX2 inline FourDoubles joined(simd_t<uint32_t, 8> low, simd_t<uint32_t, 8> high) {
  return lanes_cast<FourDoubles>(_mm256_blend_epi32(lanes_cast<__m256i>(low), lanes_cast<__m256i>(high), 0xaa));
}
FK_AVX2 inline FourDoubles selected(FourDoubles mask, FourDoubles yes, FourDoubles no) {
  return _mm256_blendv_pd(no, yes, mask);
}
FK_AVX2 inline FourDoubles above(FourDoubles x, FourDoubles y) { return _mm256_cmp_pd(x, y, _CMP_GT_OQ); }
// Writes minus the counts of the four lanes, which have two halves each, as bytes.
FK_AVX2 inline void store_negated(simd_t<uint32_t, 8> counts, uint8_t* to) {
  const __m256i first = _mm256_setr_epi8(0, 8, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, 0, 8, -1,
                                         -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1);
  const __m256i pairs =
      _mm256_shuffle_epi8(_mm256_sub_epi32(_mm256_setzero_si256(), lanes_cast<__m256i>(counts)), first);
  const __m128i bytes = _mm_or_si128(_mm256_castsi256_si128(pairs), _mm256_extracti128_si256(pairs, 1));
  _mm_storeu_si32(to, bytes);
}

constexpr bool kHasAvx512Code = true;
#else
constexpr bool kHasAvx512Code = false;
#endif

// A table of 16 numbers for vectors of four with AVX2. Each comparison that holds adds -1 to both halves of a lane, so
// the halves of a number are stored at minus its index, modulo 8.
constexpr uint32_t kCountsOfFour[8] = {0, 4, 0, 4, 0, 4, 0, 4};  // before the first comparison, for four numbers
struct TableOfFourDoubles {
  alignas(32) uint32_t first[8], fourth[8];    // both halves of the numbers 0 to 3, and 8 to 11
  alignas(32) uint32_t low[2][8], high[2][8];  // lower and upper halves of the numbers 0 to 7, and 8 to 15
  void set(int64_t index, double number) {
    const auto bits = bit_cast<uint64_t>(number);
    const uint32_t halves[] = {static_cast<uint32_t>(bits), static_cast<uint32_t>(bits >> 32)};
    for (int64_t i = 0; i < 2; ++i) {
      (index < 8 ? low : high)[i][-index & 7] = halves[i];
      if (index % 8 < 4) (index < 8 ? first : fourth)[(4 * i - index) & 7] = halves[i];
    }
  }
};

struct TableOfDoubles {
  double numbers[16];
  void set(int64_t index, double number) { numbers[index] = number; }
};

template <int64_t n>
struct DoubleLanes {
  static constexpr bool kIsAvx512 = kHasAvx512Code && n == 8, kIsAvx2 = kHasAvx512Code && n == 4;
  using Format = detail::Format<double>;
  using Doubles = simd_t<double, n>;
  using Floats = simd_t<float, n>;
  using Words = simd_t<uint64_t, n>;  // unsigned: sums and shifts wrap

  // x y + z, rounded once where the processor has such an instruction. The compiler may round x * y + z once in one
  // branch and twice in another.
  static FK_HOST_DEVICE Doubles fma(const Doubles& x, const Doubles& y, const Doubles& z) {
    if constexpr (kIsAvx512 || kIsAvx2) {
      return fused(x, y, z);
    } else {
#ifdef FP_FAST_FMA
      Doubles result;
      for (int64_t i = 0; i < n; ++i) result[i] = std::fma(x[i], y[i], z[i]);
      return result;
#else
      return x * y + z;
#endif
    }
  }
  static FK_HOST_DEVICE Doubles fma(const Doubles& x, double y, double z) {
    return fma(x, spread<Doubles>(y), spread<Doubles>(z));
  }

  // x = 2^exponent mantissa with 1 <= mantissa < 2, for positive normal numbers.
  static FK_HOST_DEVICE Doubles exponent(const Doubles& x) {
    if constexpr (kIsAvx512) {
      return exponents(x);
    } else {
      // Before AVX-512 no instruction converts 64-bit integers; the last bits of 2^52 are an integer.
      const Words biased = lanes_cast<Words>(x) >> Format::kMantissaBits;
      return lanes_cast<Doubles>(biased | bit_cast<uint64_t>(0x1p52)) - (0x1p52 + Format::kBias);
    }
  }
  static FK_HOST_DEVICE Doubles mantissa(const Doubles& x) {
    if constexpr (kIsAvx512) {
      return mantissas(x);
    } else {
      constexpr uint64_t kBits = (uint64_t{1} << Format::kMantissaBits) - 1;
      return lanes_cast<Doubles>((lanes_cast<Words>(x) & kBits) | bit_cast<uint64_t>(1.0));
    }
  }

  // Whether a lane of x is above that of y.
  static FK_HOST_DEVICE bool any(const Doubles& x, const Doubles& y) {
    if constexpr (kIsAvx512 || kIsAvx2) {
      return any_above(x, y);
    } else {
      bool found = false;
      for (int64_t i = 0; i < n; ++i) found |= x[i] > y[i];
      return found;
    }
  }

  // The larger of x and y; y if one of them is NaN.
  static FK_HOST_DEVICE Doubles max(const Doubles& x, const Doubles& y) {
    if constexpr (kIsAvx512 || kIsAvx2) {
      return larger(x, y);
    } else {
      return x > y ? x : y;
    }
  }

  static FK_HOST_DEVICE Doubles widen(const Floats& x) {
    if constexpr (kIsAvx512 || kIsAvx2) {
      return widened(x);
    } else {
      return __builtin_convertvector(x, Doubles);
    }
  }

  // `count` < n floats, with `other` in the remaining lanes.
  static FK_HOST_DEVICE Floats load_front(const float* from, int64_t count, float other) {
    if constexpr (kIsAvx512) {
      return load_first(spread<Floats>(other), from, count);
    } else {
      float lanes[n];
      for (int64_t i = 0; i < n; ++i) lanes[i] = i < count ? from[i] : other;
      return load_simd<Floats>(lanes);
    }
  }
  static FK_HOST_DEVICE void store_front(const Floats& x, int64_t count, float* to) {
    if constexpr (kIsAvx512) {
      store_first(x, count, to);
    } else {
      float lanes[n];
      store_simd(x, lanes);
      for (int64_t i = 0; i < count; ++i) to[i] = lanes[i];
    }
  }

  // A table of 16 numbers, and places in it: with AVX2 those that count_below finds, else indices.
  using Table = std::conditional_t<kIsAvx2, TableOfFourDoubles, TableOfDoubles>;
  struct PlacesOfFour {
    simd_t<uint32_t, 2 * n> counts;
    Doubles above_half;
  };
  using Places = std::conditional_t<kIsAvx2, PlacesOfFour, Words>;

  // The places whose index is the number of the first `size` - 1 bounds that are below x; `size` is 4, 8, 12 or 16.
  template <int64_t size>
  static FK_HOST_DEVICE Places count_below(const Doubles* bounds, const Doubles& x) {
    Places found{};
    if constexpr (kIsAvx2) {
      if constexpr (size == 4) found.counts = load_simd<decltype(found.counts)>(kCountsOfFour);
#pragma GCC unroll 16
      for (int64_t k = 0; k < size - 1; ++k) {
        const Doubles mask = above(x, bounds[k]);
        if (k == 7) found.above_half = mask;
        found.counts += lanes_cast<decltype(found.counts)>(mask);
      }
    } else {
#pragma GCC unroll 16
      for (int64_t k = 0; k < size - 1; ++k) found -= lanes_cast<Words>(x > bounds[k]);
    }
    return found;
  }

  // The numbers at these places; with AVX-512 `size` is 8 or 16.
  template <int64_t size>
  static FK_HOST_DEVICE Doubles look_up(const Table& table, const Places& places) {
    if constexpr (kIsAvx2) {
      const auto& counts = places.counts;
      if constexpr (size == 4) return lanes_cast<Doubles>(permuted(table.first, counts));
      const Doubles low = joined(permuted(table.low[0], counts), permuted(table.low[1], counts));
      if constexpr (size <= 8) return low;
      Doubles high;
      if constexpr (size == 12) {
        high = lanes_cast<Doubles>(permuted(table.fourth, counts + load_simd<simd_t<uint32_t, 2 * n>>(kCountsOfFour)));
      } else {
        high = joined(permuted(table.high[0], counts), permuted(table.high[1], counts));
      }
      return selected(places.above_half, high, low);
    } else {
      return look_up<size>(table.numbers, places);
    }
  }
  template <int64_t size>
  static FK_HOST_DEVICE Doubles look_up(const double* table, const Words& index) {
    if constexpr (kIsAvx512) {
      return permuted<size>(table, index);
    } else {
      return look_up(table, index, std::make_index_sequence<n>());
    }
  }

 private:
  template <size_t... lane>
  static FK_HOST_DEVICE Doubles look_up(const double* table, const Words& index, std::index_sequence<lane...>) {
    return Doubles{table[index[lane]]...};
  }
};

}  // namespace
}  // namespace focalkern::cpu
