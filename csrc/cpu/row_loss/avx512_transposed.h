// Sums of rows of few adjacent classes, with AVX-512. Sixteen rows at a time are transposed in registers, four 32-bit
// words of each at once (cpu/simd/transpose.h), so that a vector holds one class of sixteen rows
// (cpu/row_loss/across_rows_lanes.h). No reduction across a vector is needed, and sixteen rows share the cost of each
// per-row step.
#pragma once

#include <algorithm>
#include <limits>
#include <type_traits>

#include "cpu/row_loss/across_rows_lanes.h"
#include "cpu/row_loss/avx512_forward.h"
#include "cpu/row_loss/tile.h"
#include "cpu/simd/dispatch.h"
#include "cpu/simd/transpose.h"
#include "cpu/simd/vector.h"

namespace focalkern::cpu {
namespace {

#ifdef FK_HAS_AVX512_CODE

// Loads four words of each of sixteen rows as one vector per class.
template <typename Scalar>
FK_AVX512 inline __attribute__((always_inline)) void load_transposed(
    const RowsOfSixteen<const Scalar>& rows, simd_t<float, 16> (&columns)[kWideClasses<Scalar>]) {
  using Reals = simd_t<float, 16>;
  __m512i v[4];
  rows.load(v);
  transpose_quarters(v);
  for (int i = 0; i < 4; ++i) {
    if constexpr (sizeof(Scalar) == sizeof(float)) {
      columns[i] = lanes_cast<Reals>(v[i]);
    } else {
      __m512i first, second;
      Pair<Scalar>::split(v[i], &first, &second);
      columns[2 * i] = lanes_cast<Reals>(first);
      columns[2 * i + 1] = lanes_cast<Reals>(second);
    }
  }
}

// First pass over four words of each of sixteen rows, from class c on. It stores the transposed logits in `kept` for
// the second pass.
template <typename Loss, typename Scalar>
FK_AVX512 inline __attribute__((always_inline)) void look_at_words(const RowsOfSixteen<const Scalar>& rows,
                                                                   const Scalar* ahead, int64_t c,
                                                                   SumsOfLanes<Loss, float, 16>& sums, float* kept) {
  constexpr int64_t kWidth = kWideClasses<Scalar>;
  // Prefetches as many bytes as the loop reads, a few pages ahead for contiguous rows: the hardware prefetcher does not
  // follow sixteen streams.
  for (int64_t i = 0; i < kWidth * 16; i += 64 / static_cast<int64_t>(sizeof(Scalar))) prefetch(ahead + i);
  simd_t<float, 16> columns[kWidth];
  load_transposed(rows, columns);
  for (int64_t i = 0; i < kWidth; ++i) {
    sums.look(columns[i], static_cast<int32_t>(c + i));
    store_simd(columns[i], kept + i * 16);
  }
}

// First pass over the classes of the rows from `first` of the tile on, sixteen rows at a time. It stores their logits
// in kept, [n_rows / 16, classes, 16], for the second pass. At least sixteen rows are required; the last sixteen rows,
// and the last classes, overlap the previous ones.
template <typename Loss, typename Scalar>
FK_AVX512 void look_at_transposed_rows(const Scalar* z, int64_t stride, int64_t classes, int64_t first, int64_t n_rows,
                                       Tile<float>& tile, float* kept) {
  constexpr int64_t kWidth = kWideClasses<Scalar>;
  const int64_t last = classes - kWidth;
  for (int64_t r = 0; r < n_rows; r += 16, kept += classes * 16) {
    const int64_t row = std::min(r, n_rows - 16);
    SumsOfLanes<Loss, float, 16> sums(tile, first + row);
    RowsOfSixteen<const Scalar> rows(z + row * stride, stride);
    const Scalar* const ahead = z + row * stride + kBlock;
    int64_t c = 0;
    for (; c <= last; c += kWidth, rows.move(kWidth)) {
      look_at_words(rows, ahead + c * 16, c, sums, kept + c * 16);
    }
    if (c < classes) {
      rows.move(last - c);
      look_at_words(rows, ahead + last * 16, last, sums, kept + last * 16);
    }
    sums.store_looked(tile, first + row);
  }
}

// The first pass for fewer classes than four words hold: the logits are gathered.
template <typename Loss, typename Scalar>
FK_AVX512 void look_at_gathered_rows(const Scalar* z, int64_t stride, int64_t classes, int64_t first, int64_t n_rows,
                                     Tile<float>& tile, float* kept) {
  using Reals = simd_t<float, 16>;
  const __m512i step = _mm512_set1_epi32(static_cast<int32_t>(stride));
  const __m512i begins = _mm512_mullo_epi32(_mm512_loadu_si512(kFirst<int32_t>), step);
  for (int64_t r = 0; r < n_rows; r += 16) {
    const int64_t row = std::min(r, n_rows - 16);
    SumsOfLanes<Loss, float, 16> sums(tile, first + row);
    __m512i place = begins;
    for (int64_t c = 0; c < classes; ++c, kept += 16, place = _mm512_add_epi32(place, _mm512_set1_epi32(1))) {
      const auto column = lanes_cast<Reals>(gathered(z + row * stride, place, 0xffff));
      sums.look(column, static_cast<int32_t>(c));
      store_simd(column, kept);
    }
    sums.store_looked(tile, first + row);
  }
}

constexpr int64_t kComparedClasses = 32;  // up to here, comparing every class is faster than taken_out

// Classes per partial sum: in a longer run of equal terms, all rounding errors would have the same sign.
constexpr int64_t kTransposedPart = 16;

// Returns the logits of the targets (0 for a row without one) and replaces them by -inf.
FK_AVX512 inline __attribute__((always_inline)) simd_t<float, 16> taken_out(float* columns,
                                                                            const simd_t<int32_t, 16>& label) {
  const __m512i labels = lanes_cast<__m512i>(label);
  const __mmask16 is_there = _mm512_cmpge_epi32_mask(labels, _mm512_setzero_si512());
  const __m512i place = _mm512_add_epi32(_mm512_slli_epi32(labels, 4), _mm512_loadu_si512(kFirst<int32_t>));
  const __m512 logits = _mm512_mask_i32gather_ps(_mm512_setzero_ps(), is_there, place, columns, sizeof(float));
  const __m512 nothing = _mm512_set1_ps(-std::numeric_limits<float>::infinity());
  _mm512_mask_i32scatter_ps(columns, is_there, place, nothing, sizeof(float));
  return lanes_cast<simd_t<float, 16>>(logits);
}

// The second pass. kTakesOut is a template argument, because the two variants use different registers.
template <typename Loss, bool kTakesOut>
FK_AVX512 void add_kept_rows(float* kept, int64_t classes, int64_t first, int64_t n_rows, Tile<float>& tile) {
  using Sums = SumsOfLanes<Loss, float, 16>;
  using Reals = typename Sums::Reals;
  for (int64_t r = 0; r < n_rows; r += 16) {
    const int64_t row = std::min(r, n_rows - 16);
    Sums sums(tile, first + row);
    sums.load_looked(tile, first + row);
    const float* const end = kept + classes * 16;
    if constexpr (kTakesOut) {
      sums.target_logit = taken_out(kept, sums.label);
      Reals rest{}, squares{};
      while (kept != end) {
        const float* const stop = end - kept < kTransposedPart * 16 ? end : kept + kTransposedPart * 16;
#pragma GCC unroll 2
        for (; kept != stop; kept += 16) sums.add_all(load_simd<Reals>(kept));
        sums.move_sums(rest, squares);
      }
      sums.rest = rest;
      sums.squares = squares;
    } else {
#pragma GCC unroll 2
      for (; kept != end; kept += 16) sums.add(load_simd<Reals>(kept));
    }
    sums.store(tile, first + row);
  }
}

// SumsOfColumns for transposed rows.
template <typename Loss, typename Scalar>
void sums_of_transposed_rows(const Scalar* z, int64_t stride, int64_t classes, int64_t n_rows, Tile<float>& tile) {
  alignas(64) float kept[kMostTransposed * 16];
  // Processes the whole tile if its logits fit `kept`, else sixteen rows at a time.
  const int64_t at_once = classes * kTileRows <= kMostTransposed * 16 ? n_rows : 16;
  for (int64_t r = 0; r < n_rows; r += at_once) {
    const int64_t row = std::min(r, n_rows - at_once);
    if (classes < kWideClasses<Scalar>) {
      look_at_gathered_rows<Loss>(z + row * stride, stride, classes, row, at_once, tile, kept);
    } else {
      look_at_transposed_rows<Loss>(z + row * stride, stride, classes, row, at_once, tile, kept);
    }
    if (Loss::kSpecialClass == SpecialClass::kNone && classes > kComparedClasses) {
      add_kept_rows<Loss, true>(kept, classes, row, at_once, tile);
    } else {
      add_kept_rows<Loss, false>(kept, classes, row, at_once, tile);
    }
  }
}

#endif  // FK_HAS_AVX512_CODE

}  // namespace
}  // namespace focalkern::cpu
