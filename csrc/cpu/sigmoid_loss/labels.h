// Labels of rows of classes: the positions of the ones, or one-hot shares for rows of few classes.
#pragma once

#include <algorithm>
#include <cstdint>
#include <utility>

#include "cpu/sigmoid_loss/read.h"
#include "cpu/sigmoid_loss/tile.h"
#include "cpu/simd/dispatch.h"

namespace focalkern::cpu {
namespace {

// share = 1 where the label is this class, else 0.
template <typename Label, typename Real>
FK_VECTOR_CLONES void compare_labels(const Label* labels, int64_t stride, int64_t this_class, int64_t n, Real* share) {
  const auto wanted = static_cast<Label>(this_class);
  if (static_cast<int64_t>(wanted) != this_class) {  // for instance class 256 of uint8, which no label equals
    std::fill_n(share, n, Real(0));
  } else if (stride == 1) {
#pragma omp simd
    for (int64_t i = 0; i < n; ++i) share[i] = labels[i] == wanted ? Real(1) : Real(0);
  } else {
    for (int64_t i = 0; i < n; ++i) share[i] = labels[i * stride] == wanted ? Real(1) : Real(0);
  }
}

// Whether all labels are in [0, classes] and none is ignored.
template <typename Label>
FK_VECTOR_CLONES bool all_count(const Label* labels, int64_t stride, int64_t n, int64_t classes, int64_t ignore_index) {
  using Wide = std::conditional_t<sizeof(Label) == 8, int64_t, int32_t>;
  using Bits = std::make_unsigned_t<Wide>;  // unsigned: differences wrap
  const auto top = static_cast<Bits>(std::min<int64_t>(classes, std::numeric_limits<Wide>::max()));
  // The sign bit of the label, or of top - label, is set if the label is out of range.
  Bits signs = 0;
  if (stride == 1) {
#pragma omp simd reduction(| : signs)
    for (int64_t i = 0; i < n; ++i) signs |= static_cast<Bits>(labels[i]) | (top - static_cast<Bits>(labels[i]));
  } else {
    for (int64_t i = 0; i < n; ++i) {
      signs |= static_cast<Bits>(labels[i * stride]) | (top - static_cast<Bits>(labels[i * stride]));
    }
  }
  int64_t ignored = 0;
  if (ignore_index >= 0 && ignore_index <= classes) {
    for (int64_t i = 0; i < n; ++i) ignored += static_cast<int64_t>(labels[i * stride]) == ignore_index;
  }
  return static_cast<Wide>(signs) >= 0 && ignored == 0;
}

// One-hot shares of rows of few classes.
template <int kClasses, typename Real>
FK_VECTOR_CLONES void spread_loop(const int32_t* labels, int64_t rows, Real* share) {
#pragma omp simd
  for (int64_t row = 0; row < rows; ++row) {
    for (int c = 0; c < kClasses; ++c) share[row * kClasses + c] = labels[row] == c ? Real(1) : Real(0);
  }
}

#ifdef FK_HAS_AVX512_CODE
// For sixteen rows, which fill kClasses vectors of shares: the row and the class of each element.
template <int kClasses>
struct SpreadOrder {
  alignas(64) int32_t row[kClasses * kRowGroup];
  alignas(64) int32_t class_index[kClasses * kRowGroup];
  constexpr SpreadOrder() : row(), class_index() {
    for (int i = 0; i < kClasses * kRowGroup; ++i) {
      row[i] = i / kClasses;
      class_index[i] = i % kClasses;
    }
  }
};

FK_AVX512 FK_HOST_DEVICE void store_shares(__mmask16 is_one, float* to) {
  _mm512_storeu_ps(to, _mm512_maskz_mov_ps(is_one, _mm512_set1_ps(1)));
}
FK_AVX512 FK_HOST_DEVICE void store_shares(__mmask16 is_one, double* to) {
  _mm512_storeu_pd(to, _mm512_maskz_mov_pd(static_cast<__mmask8>(is_one), _mm512_set1_pd(1)));
  _mm512_storeu_pd(to + 8, _mm512_maskz_mov_pd(static_cast<__mmask8>(is_one >> 8), _mm512_set1_pd(1)));
}

// Reads and writes whole groups of rows.
template <int kClasses, typename Real>
FK_AVX512 void spread_groups(const int32_t* labels, int64_t rows, Real* share) {
  static constexpr SpreadOrder<kClasses> kOrder;
  for (int64_t row = 0; row < rows; row += kRowGroup, share += kRowGroup * kClasses) {
    const __m512i of_rows = _mm512_loadu_si512(labels + row);
    for (int v = 0; v < kClasses * kRowGroup; v += kRowGroup) {
      const __m512i label = _mm512_permutexvar_epi32(_mm512_load_si512(kOrder.row + v), of_rows);
      store_shares(_mm512_cmpeq_epi32_mask(label, _mm512_load_si512(kOrder.class_index + v)), share + v);
    }
  }
}
#endif

template <int kClasses, typename Real>
void spread(const int32_t* labels, int64_t rows, Real* share) {
#ifdef FK_HAS_AVX512_CODE
  if (has_avx512()) return spread_groups<kClasses>(labels, rows, share);
#endif
  spread_loop<kClasses>(labels, rows, share);
}

// Calls f<classes>, for 1 to kFewClasses classes.
template <typename Function>
void with_few_classes(int64_t classes, Function f) {
  [&]<int... k>(std::integer_sequence<int, k...>) {
    ((classes == k + 1 ? f(std::integral_constant<int, k + 1>{}) : void()), ...);
  }(std::make_integer_sequence<int, kFewClasses>{});
}

// The positions of the ones in n elements of rows of classes; the first row begins at `row`. Returns whether every
// label counts. The loop has no branch on labels: half of a detector's rows are background, in random order.
template <typename Label>
bool find_ones(const Label* label, int64_t row_stride, int64_t row, int64_t n, int64_t classes, int64_t ignore_index,
               TileLabels* found) {
  const auto top = static_cast<uint64_t>(classes), ignored = static_cast<uint64_t>(ignore_index);
  int64_t ones = 0;
  uint64_t most = 0;
  bool none_ignored = true;
  const auto take_checked = [&] {
    const auto of_row = static_cast<uint64_t>(*label), at = static_cast<uint64_t>(row) + of_row;
    const bool counts = of_row != ignored;
    found->one[ones] = static_cast<int16_t>(at);
    ones += (of_row < top) & (at < static_cast<uint64_t>(n)) & counts;
    none_ignored &= counts;
    most = std::max(most, of_row);
    row += classes;
    label += row_stride;
  };
  if (row < 0) take_checked();
  if (ignored > top) {
    for (; row + classes <= n; row += classes, label += row_stride) {
      const auto of_row = static_cast<uint64_t>(*label);
      found->one[ones] = static_cast<int16_t>(row + of_row);
      ones += of_row < top;
      most = std::max(most, of_row);
    }
  }
  while (row < n) take_checked();
  found->ones = ones;
  return none_ignored && most <= top;
}

// Labels of the elements [begin, end). Stores the positions of the ones in `found` and returns null. For rows of few
// classes, or labels that do not lie along the classes, it returns one-hot shares in `buffer` (a tile and a group of
// rows).
template <typename Scalar, typename Label>
const compute_t<Scalar>* read_labels(const SigmoidLossArgs<Scalar>& args, const Label* labels, int64_t begin,
                                     int64_t end, compute_t<Scalar>* buffer, TileLabels* found) {
  const int last = args.space.dims - 1;
  const int64_t stride = args.target.strides[last];
  // Returns whether the run of elements is ignored or invalid.
  const auto leave_out = [&](int64_t label, int64_t first, int64_t n) {
    if (label >= 0 && label <= args.classes && label != args.ignore_index) return false;
    if (label == args.ignore_index) {
      found->ignored += n;
      found->ignored_run[found->ignored_runs++] = {static_cast<int16_t>(first), static_cast<int16_t>(n)};
    } else {
      found->is_valid = false;
      found->invalid_label = label;
    }
    return true;
  };
  if (args.class_dim == last && args.space.dims <= 2) {
    // Rows of classes, the most frequent case.
    const int64_t classes = args.space.sizes[last], row_stride = last > 0 ? args.target.strides[0] : 0;
    const int64_t first_row = begin / classes, start = first_row * classes - begin, n = end - begin;
    const Label* label = labels + first_row * row_stride;
    const bool are_few = classes <= kFewClasses;
    bool all;
    if (are_few) {
      const int64_t rows = (end - 1) / classes - first_row + 1;
      int32_t narrow[kTile + kRowGroup];
      read_run(label, row_stride, rows, narrow);
      with_few_classes(classes, [&](auto known) { spread<decltype(known)::value>(narrow, rows, buffer); });
      all = all_count(label, row_stride, rows, classes, args.ignore_index);
    } else {
      all = find_ones(label, row_stride, start, n, classes, args.ignore_index, found);
    }
    for (int64_t row = start; row < n && !all; row += classes, label += row_stride) {
      const int64_t from = std::max<int64_t>(row, 0);
      leave_out(static_cast<int64_t>(*label), from, std::min(row + classes, n) - from);
    }
    return are_few ? buffer - start : nullptr;
  }
  int64_t first = 0;
  for (Runs runs(args.space, begin, end); runs.more(); first += runs.length(), runs.next()) {
    const Label* label = labels + runs.offset(args.target);
    const int64_t n = runs.length();
    if (args.class_dim == last) {
      // A run is a row of classes, or part of one.
      if (leave_out(*label, first, n)) continue;
      const int64_t at = static_cast<int64_t>(*label) - runs.position(last);
      if (at >= 0 && at < n) found->one[found->ones++] = static_cast<int16_t>(first + at);
      continue;
    }
    if (!all_count(label, stride, n, args.classes, args.ignore_index)) {
      for (int64_t i = 0; i < n; ++i) leave_out(label[i * stride], first + i, 1);
    }
    compare_labels(label, stride, runs.position(args.class_dim), n, buffer + first);
  }
  return args.class_dim == last ? nullptr : buffer;
}

}  // namespace
}  // namespace focalkern::cpu
