// Looks up results in a table for all 65536 values of a bfloat16, with a target of 0 and of 1.
#pragma once

#include <algorithm>
#include <cstdint>
#include <type_traits>
#include <vector>

#include "cpu/sigmoid_loss/tile.h"
#include "cpu/sigmoid_loss/tile_reader.h"
#include "cpu/simd/dispatch.h"
#include "kernels/sigmoid_loss.h"

namespace focalkern::cpu {
namespace {

constexpr int64_t kBFloat16Values = 65536;

#ifdef FK_HAS_AVX512_CODE
// `table` holds the results of all values for target 0, then those for target 1.
template <bool kHard>
FK_AVX512 FK_HOST_DEVICE __m512i place_in_table(const BFloat16* input, const float* target, __mmask16 mask) {
  const __m512i value = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(mask, input));
  if constexpr (!kHard) return value;
  const __mmask16 is_one = _mm512_cmp_ps_mask(_mm512_maskz_loadu_ps(mask, target), _mm512_setzero_ps(), _CMP_GT_OQ);
  return _mm512_mask_add_epi32(value, is_one, value, _mm512_set1_epi32(kBFloat16Values));
}

FK_AVX512 FK_HOST_DEVICE void look_up_vector(__m512i place, const float* table, __mmask16 mask, float* to) {
  _mm512_mask_storeu_ps(to, mask, _mm512_mask_i32gather_ps(_mm512_setzero_ps(), mask, place, table, 4));
}
// Reads two bytes past each result; the table has padding at its end.
FK_AVX512 FK_HOST_DEVICE void look_up_vector(__m512i place, const BFloat16* table, __mmask16 mask, BFloat16* to) {
  const __m512i found = _mm512_mask_i32gather_epi32(_mm512_setzero_si512(), mask, place, table, 2);
  _mm256_mask_storeu_epi16(to, mask, _mm512_cvtepi32_epi16(found));
}

template <bool kHard, typename Result>
FK_AVX512 void look_up(const BFloat16* input, const float* target, const Result* table, int64_t n, Result* to) {
  constexpr __mmask16 kAll = 0xffff;
  constexpr int64_t kLine = 64 / sizeof(BFloat16);
  int64_t i = 0;
  for (; i + kLine <= n; i += kLine) {
    // The next tile. The losses of a tile stay in the cache, but gradients are in the user's memory.
    __builtin_prefetch(input + i + kTile);
    if constexpr (std::is_same_v<Result, BFloat16>) __builtin_prefetch(to + i + kTile, 1);
    for (int64_t k = i; k < i + kLine; k += 16) {
      look_up_vector(place_in_table<kHard>(input + k, target + k, kAll), table, kAll, to + k);
    }
  }
  for (; i < n; i += 16) {
    const auto mask = static_cast<__mmask16>((1u << std::min<int64_t>(16, n - i)) - 1);
    look_up_vector(place_in_table<kHard>(input + i, target + i, mask), table, mask, to + i);
  }
}

template <typename Result>
void look_up_tile(const TileReader<BFloat16>& reader, const TileView<float>& view, const Result* table, int64_t n,
                  Result* to) {
  if (view.targets == Targets::kHard) return look_up<true>(reader.logits(), view.target, table, n, to);
  look_up<false>(reader.logits(), view.target, table, n, to);
  if (reader.has_scores()) return;
  const TileLabels& labels = reader.labels();
  for (int64_t k = 0; k < labels.ones; ++k) {
    const int64_t i = labels.one[k];
    to[i] = table[kBFloat16Values + reader.logits()[i].bits];
  }
}
#endif

// Returns whether the tile was looked up. Ones that have scores are left out.
template <typename Scalar, typename Result>
bool look_up_if_possible(const TileReader<Scalar>& reader, const TileView<compute_t<Scalar>>& view, const Result* table,
                         int64_t n, Result* to) {
#ifdef FK_HAS_AVX512_CODE
  if constexpr (std::is_same_v<Scalar, BFloat16>) {
    if (table != nullptr && view.targets != Targets::kSoft) {
      look_up_tile(reader, view, table, n, to);
      return true;
    }
  }
#endif
  return false;
}

// Whether most results depend only on the logit and a hard target. Only the targets of the first tile are checked.
bool can_be_looked_up(const SigmoidLossArgs<BFloat16>& args) {
  if (!has_avx512() || args.gamma.data || args.second.data || args.weight.data) return false;
  TileReader<BFloat16> reader(args, 1.0f, 1.0f, nullptr);
  return reader.view(0, std::min(kTile, args.space.size)).targets != Targets::kSoft;
}

// Arguments of the same loss for all bfloat16 values, with target 0 and 1.
template <typename Args>
Args bfloat16_table(const Args& args, std::vector<BFloat16>* logits) {
  static const uint8_t kTargets[2] = {0, 1};
  logits->resize(kBFloat16Values);
  for (int64_t k = 0; k < kBFloat16Values; ++k) (*logits)[k].bits = static_cast<uint16_t>(k);
  Args table = args;
  table.space = {2 * kBFloat16Values, 2, {2, kBFloat16Values}};
  table.input = {logits->data(), ElementType::kBFloat16, false, {0, 1}, 0};
  table.target = {kTargets, ElementType::kUInt8, false, {1, 0}, 0};
  table.target_is_labels = false;
  return table;
}

}  // namespace
}  // namespace focalkern::cpu
