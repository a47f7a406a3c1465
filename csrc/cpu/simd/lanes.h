// Operations on vectors of n doubles (gnu::vector_size) that need another instruction for each width. Vectors of 8
// doubles occur only on processors with AVX-512, vectors of 4 only with AVX2.
#pragma once

#include <cmath>
#include <cstdint>
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
FK_AVX512 inline EightDoubles rounded(EightDoubles x) { return _mm512_roundscale_pd(x, 0); }
FK_AVX512 inline EightDoubles scaled(EightDoubles x, EightDoubles power) { return _mm512_scalef_pd(x, power); }
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
  return _mm256_movemask_pd(_mm256_cmp_pd(x, y, _CMP_GT_OQ)) != 0;
}
FK_AVX2 inline FourDoubles fused(FourDoubles x, FourDoubles y, FourDoubles z) { return _mm256_fmadd_pd(x, y, z); }
FK_AVX2 inline FourDoubles larger(FourDoubles x, FourDoubles y) { return _mm256_max_pd(x, y); }
FK_AVX2 inline FourDoubles widened(simd_t<float, 4> x) { return _mm256_cvtps_pd(x); }
// Permutes the halves of four numbers; a bit of the index selects between two tables.
template <int64_t size>
FK_AVX2 inline FourDoubles permuted(const double* table, simd_t<uint64_t, 4> index) {
  if constexpr (size <= 4) {
    const __m256i twice = lanes_cast<__m256i>(index + index);
    const __m256i places = _mm256_or_si256(_mm256_shuffle_epi32(twice, 0xa0), _mm256_set1_epi64x(int64_t{1} << 32));
    return lanes_cast<FourDoubles>(_mm256_permutevar8x32_epi32(lanes_cast<__m256i>(_mm256_loadu_pd(table)), places));
  } else {
    constexpr int64_t kFirst = size <= 8 ? 4 : 8;
    const FourDoubles low = permuted<kFirst>(table, index), high = permuted<size - kFirst>(table + kFirst, index);
    return _mm256_blendv_pd(low, high, lanes_cast<__m256d>(index << (kFirst == 4 ? 61 : 60)));
  }
}
constexpr bool kHasAvx512Code = true;
#else
constexpr bool kHasAvx512Code = false;
#endif

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

  // x as an integer and a fraction in [-1/2, 1/2]; |x| < 2^31.
  struct Power {
    Doubles fraction;
    Words whole;  // shifted to the bits of the exponent; with AVX-512 a vector of doubles
  };
  static FK_HOST_DEVICE Power parts(const Doubles& x) {
    if constexpr (kIsAvx512) {
      const Doubles whole = rounded(x);
      return {x - whole, lanes_cast<Words>(whole)};
    } else {
      const Doubles shifted = x + Format::kRoundToInt;
      return {x - (shifted - Format::kRoundToInt), lanes_cast<Words>(shifted) << Format::kMantissaBits};
    }
  }
  // x times 2 to the integer; both are normal numbers. A NaN that comes from a float stays NaN.
  static FK_HOST_DEVICE Doubles times_power(const Doubles& x, const Words& whole) {
    if constexpr (kIsAvx512) {
      return scaled(x, lanes_cast<Doubles>(whole));
    } else {
      return lanes_cast<Doubles>(lanes_cast<Words>(x) + whole);
    }
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

  // table[index], lane by lane, for a table of 4, 8, 12 or 16 numbers; with AVX-512 of 8 or 16.
  template <int64_t size>
  static FK_HOST_DEVICE Doubles look_up(const double* table, const Words& index) {
    if constexpr (kIsAvx512 || kIsAvx2) {
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
