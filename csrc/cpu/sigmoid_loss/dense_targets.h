// Dense targets: whether all are hard, and the positions of those that are not 0.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "cpu/sigmoid_loss/tile.h"
#include "cpu/simd/dispatch.h"
#include "math/portable.h"
#include "math/storage.h"

namespace focalkern::cpu {
namespace {

// Whether all targets are 0 or 1. Only then is t^2 - t 0 (never -0), for every rounding.
template <typename Bits, typename Real>
FK_VECTOR_CLONES bool all_hard_of_real(const Real* target, int64_t n) {
  Bits found = 0;
  const int64_t half = n / 2;
#pragma omp simd reduction(| : found)
  for (int64_t i = 0; i < half; ++i) {
    const Real first = target[i], second = target[i + half];
    found |= bit_cast<Bits>(first * first - first) | bit_cast<Bits>(second * second - second);
  }
  for (int64_t i = 2 * half; i < n; ++i) found |= bit_cast<Bits>(target[i] * target[i] - target[i]);
  return found == 0;
}

// all_hard for 16-bit floats, by their bits: two instructions per vector instead of conversions. In the bits of 0, no
// two neighbours differ. In those of 1, neighbours differ only at the two ends of the run of set bits.
template <typename Stored, typename Bits, int kMantissaBits>
FK_VECTOR_CLONES bool all_hard_of_bits(const Stored* target, int64_t n) {
  Bits changes = 0, set = 0;
  const int64_t quarter = n / 4;
#pragma omp simd reduction(| : changes, set)
  for (int64_t i = 0; i < quarter; ++i) {
    const Bits first = bit_cast<Bits>(target[i]), second = bit_cast<Bits>(target[i + quarter]);
    const Bits third = bit_cast<Bits>(target[i + 2 * quarter]), fourth = bit_cast<Bits>(target[i + 3 * quarter]);
    changes |=
        static_cast<Bits>((first ^ static_cast<Bits>(first + first)) | (second ^ static_cast<Bits>(second + second)));
    changes |=
        static_cast<Bits>((third ^ static_cast<Bits>(third + third)) | (fourth ^ static_cast<Bits>(fourth + fourth)));
    set |= static_cast<Bits>((first | second) | (third | fourth));
  }
  for (int64_t i = 4 * quarter; i < n; ++i) {
    const Bits bits = bit_cast<Bits>(target[i]);
    changes |= static_cast<Bits>(bits ^ static_cast<Bits>(bits + bits));
    set |= bits;
  }
  constexpr int kBits = 8 * sizeof(Bits);
  constexpr auto kOfOne = static_cast<Bits>(Bits(1) << kMantissaBits | Bits(1) << (kBits - 2));
  return (changes & static_cast<Bits>(~kOfOne)) == 0 && set >> (kBits - 1) == 0;
}

bool all_hard(const float* target, int64_t n) { return all_hard_of_real<uint32_t>(target, n); }
bool all_hard(const double* target, int64_t n) { return all_hard_of_real<uint64_t>(target, n); }
bool all_hard(const Half* target, int64_t n) { return all_hard_of_bits<Half, uint16_t, 10>(target, n); }
bool all_hard(const BFloat16* target, int64_t n) { return all_hard_of_bits<BFloat16, uint16_t, 7>(target, n); }

// So many of the first `n` targets may differ from 0: an eighth, and some more because they may stand together.
int64_t most_nonzero(int64_t n) { return n / 8 + 16; }

#ifdef FK_HAS_AVX512_CODE
// One bit for each of 64 elements: whether it is not 0. Asks for the same elements of the next tile.
template <typename Stored>
FK_AVX512 FK_HOST_DEVICE uint64_t nonzero_bits(const Stored* target) {
  constexpr int64_t kLanes = 64 / sizeof(Stored);
  uint64_t bits = 0;
  for (int64_t i = 0; i < 64; i += kLanes) {
    __builtin_prefetch(target + i + kTile);
    const __m512i vector = _mm512_loadu_si512(target + i);
    uint64_t of_vector;
    if constexpr (sizeof(Stored) == 2) {
      of_vector = _mm512_test_epi16_mask(vector, _mm512_set1_epi16(0x7fff));
    } else if constexpr (sizeof(Stored) == 4) {
      of_vector = _mm512_test_epi32_mask(vector, _mm512_set1_epi32(0x7fffffff));
    } else {
      of_vector = _mm512_test_epi64_mask(vector, _mm512_set1_epi64(0x7fffffffffffffff));
    }
    bits |= of_vector << i;
  }
  return bits;
}

// find_nonzero for groups of 64 targets. Returns the number of targets whose positions were written.
template <typename Stored>
FK_AVX512 int64_t find_nonzero_by_vectors(const Stored* target, int64_t n, TileLabels* found) {
  int64_t ones = 0, i = 0;
  for (; i + 64 <= n; i += 64) {
    const uint64_t bits = nonzero_bits(target + i);
    int16_t* to = found->one + ones;
    ones += _mm_popcnt_u64(bits);
    if (ones > most_nonzero(i + 64)) break;
    // Two positions are written without a branch, which would be mispredicted. Few vectors have more.
    const uint64_t rest = bits & (bits - 1);
    to[0] = static_cast<int16_t>(i + static_cast<int64_t>(_tzcnt_u64(bits)));
    to[1] = static_cast<int16_t>(i + static_cast<int64_t>(_tzcnt_u64(rest)));
    to += 2;
    for (uint64_t more = rest & (rest - 1); more != 0; more &= more - 1) {
      *to++ = static_cast<int16_t>(i + static_cast<int64_t>(_tzcnt_u64(more)));
    }
  }
  found->ones = ones;
  return i;
}
#endif

// Finds the targets that are not 0 (or -0). Returns false if there are more than a few.
template <typename Stored>
bool find_nonzero(const Stored* target, int64_t n, TileLabels* found) {
  using Bits =
      std::conditional_t<sizeof(Stored) == 8, uint64_t, std::conditional_t<sizeof(Stored) == 4, uint32_t, uint16_t>>;
  // Groups of 32 bytes whose bits, except signs, are all 0 are skipped.
  constexpr int64_t kWords = 4, kGroup = kWords * 8 / sizeof(Stored);
  constexpr auto kSigns = ~uint64_t(0) / static_cast<Bits>(~Bits(0)) << (8 * sizeof(Stored) - 1);
  int64_t i = 0;
  found->ones = 0;
#ifdef FK_HAS_AVX512_CODE
  if (has_avx512()) i = find_nonzero_by_vectors(target, n, found);
#endif
  int64_t ones = found->ones;
  for (int64_t last; i < n && ones <= most_nonzero(i); i = last) {
    last = std::min(i + kGroup, n);
    if (last == i + kGroup) {
      uint64_t words[kWords];
      std::memcpy(words, target + i, sizeof(words));
      if (((words[0] | words[1] | words[2] | words[3]) & ~kSigns) == 0) continue;
    }
    for (int64_t k = i; k < last; ++k) {
      found->one[ones] = static_cast<int16_t>(k);
      ones += static_cast<Bits>(bit_cast<Bits>(target[k]) << 1) != 0;
    }
  }
  found->ones = ones;
  return ones <= most_nonzero(i);
}

}  // namespace
}  // namespace focalkern::cpu
