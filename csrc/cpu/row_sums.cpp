// Sums over the classes of each row (math/row_sums.h): logits [rows, classes] -> largest, rest, fall and index [rows],
// or the statistics of the row for a trainer's log.
//
// A row of adjacent classes is read once, in blocks that fit the first-level cache: each block is read for its largest
// logit and for its sums, and the part with the largest logit for its first class. The sums of the blocks are added in
// double. Adjacent rows (pixels) take a vector of rows at a time, and two reads of a tile of rows.

#include <algorithm>
#include <cmath>
#include <limits>

#include "cpu/row_loss/across_rows_lanes.h"
#include "cpu/row_loss/along_classes.h"
#include "cpu/row_loss/plan.h"
#include "cpu/simd/dispatch.h"
#include "cpu/simd/math.h"
#include "cpu/simd/vector.h"
#include "kernels/row_sums.h"

namespace focalkern::cpu {
namespace {

template <typename Scalar>
constexpr int64_t kWidestGroup = kLanes<Scalar>;  // classes; shorter rows are padded to it

// The sums of a group of classes, lane by lane.
template <typename Scalar, int64_t n>
struct Lanes {
  using Group = ClassGroup<Scalar, n>;
  using Reals = typename Group::Reals;
  using Ints = typename Group::Ints;
  Reals rest{}, fall{};
  Ints ties{};  // minus the number of classes that have the largest logit

  // Leaves out the classes below `first_class`.
  template <bool kSome>
  FK_HOST_DEVICE void add(const Scalar* z, const Reals& shifts, const Reals& most, int64_t first_class) {
    Reals v[Group::kVectors];
    Group::load(z, v);
    for (int64_t i = 0; i < Group::kVectors; ++i) {
      const Reals below = shifts - v[i];
      const Reals bounded = below > most ? most : below;  // -inf must not make 0 * inf
      const ScaledExponential<Reals> e = scaled_exponential(-bounded);
      Reals product = e.mantissa * e.scale;
      Ints is_largest = below == Reals{};
      if constexpr (kSome) {
        using Int = label_int<compute_t<Scalar>>;
        const Ints were_before = (Group::first_classes() + static_cast<Int>(i - first_class)) >> (8 * sizeof(Int) - 1);
        product = lanes_cast<Reals>(lanes_cast<Ints>(product) & ~were_before);
        is_largest &= ~were_before;
      }
      ties += is_largest;
      rest += lanes_cast<Reals>(lanes_cast<Ints>(product) & ~is_largest);
      fall += product * bounded;
    }
  }
};

// Replaces the class of each lane whose logit has this value.
template <typename Group, typename Scalar>
FK_HOST_DEVICE void replace_equal(const Scalar* z, const typename Group::Reals& values,
                                  const typename Group::Ints& minus_class, typename Group::Ints& minus_first) {
  using Int = label_int<compute_t<Scalar>>;
  typename Group::Reals v[Group::kVectors];
  Group::load(z, v);
  for (int64_t i = Group::kVectors - 1; i >= 0; --i) {
    minus_first = v[i] == values ? minus_class - static_cast<Int>(i) : minus_first;
  }
}

// The first of the classes from `begin` to `end` with this logit, which one of them has, or the row has NaN. In a part
// of a row, a loop without branches is faster than one that ends early.
template <int64_t n, typename Scalar>
FK_HOST_DEVICE int64_t first_in_part(const Scalar* z, int64_t begin, int64_t end, compute_t<Scalar> value) {
  using Group = ClassGroup<Scalar, n>;
  using Ints = typename Group::Ints;
  using Int = label_int<compute_t<Scalar>>;
  const auto values = spread<typename Group::Reals>(value);
  const Ints minus_lane = -Group::first_classes();
  Ints minus_first = spread<Ints>(std::numeric_limits<Int>::min());
  // From the last class to the first, so that each lane keeps its first.
  int64_t c = end - Group::kClasses;
  Ints minus_class = minus_lane - static_cast<Int>(c);
#pragma GCC unroll 4
  for (; c > begin; c -= Group::kClasses, minus_class += static_cast<Int>(Group::kClasses)) {
    replace_equal<Group>(z + c, values, minus_class, minus_first);
  }
  c = std::min(begin, end - Group::kClasses);
  replace_equal<Group>(z + c, values, minus_lane - static_cast<Int>(c), minus_first);
  return -static_cast<int64_t>(fold_lanes(minus_first, Larger{}));
}

template <typename Scalar>
bool any_nan(const Scalar* z, int64_t classes, int64_t stride = 1) {
  for (int64_t c = 0; c < classes; ++c) {
    if (std::isnan(load_as_compute(z[c * stride]))) return true;
  }
  return false;
}

// Rows of at least one group of classes and at most a block, `stride` apart.
template <typename Scalar>
struct SumsOfBlocks {
  template <int64_t bytes>
  static FK_HOST_DEVICE void run(const Scalar* z, int64_t stride, int64_t n_rows, int64_t classes, RowSums* sums) {
    using Real = compute_t<Scalar>;
    constexpr int64_t n = kLanesOf<bytes, Scalar>;
    using Group = ClassGroup<Scalar, n>;
    using Reals = typename Group::Reals;
    constexpr int64_t kClasses = Group::kClasses;
    Reals most = spread<Reals>(-kExpZero<Real>);
#ifdef FK_HAS_AVX512_CODE
    asm("" : "+x"(most));  // gcc emits no min instruction for a constant
#endif
    const int64_t whole = classes & -kClasses;
    for (int64_t r = 0; r < n_rows; ++r, z += stride) {
      const Real largest = max_of<n>(z, classes);
      sums[r] = {static_cast<double>(largest), 0, 0, 0};
      if (largest == -std::numeric_limits<Real>::infinity()) {
        if (any_nan(z, classes)) sums[r].largest = sums[r].rest = std::numeric_limits<double>::quiet_NaN();
        continue;
      }
      const Reals shifts = spread<Reals>(largest);
      int64_t ties = 0, first_begin = 0, first_end = classes;  // the part with the first of the largest
      double rest = 0, fall = 0;
      for (int64_t begin = 0; begin < classes; begin += kPart * kClasses) {
        // The sum has parts: in a long run of equal terms, all rounding errors would have the same sign.
        const int64_t end = std::min(whole, begin + kPart * kClasses);
        Lanes<Scalar, n> part;
        for (int64_t c = begin; c < end; c += kClasses) part.template add<false>(z + c, shifts, most, 0);
        if (whole < classes && classes - begin <= kPart * kClasses) {
          const int64_t last = classes - kClasses;
          part.template add<true>(z + last, shifts, most, whole - last);
        }
        const int64_t more = -static_cast<int64_t>(fold_lanes(part.ties, Sum{}));
        if (ties == 0 && more > 0) {
          first_begin = begin;
          first_end = std::min(classes, begin + kPart * kClasses);
        }
        ties += more;
        rest += static_cast<double>(fold_lanes(part.rest, Sum{}));
        fall += static_cast<double>(fold_lanes(part.fall, Sum{}));
      }
      sums[r].rest = rest + static_cast<double>(ties - 1);
      sums[r].fall = fall;
      sums[r].index = first_in_part<n>(z, first_begin, first_end, largest);
    }
  }
};

template <typename Scalar>
RowSums sums_of_long_row(const Scalar* z, int64_t classes) {
  RowSums total{};
  for (int64_t begin = 0; begin < classes;) {
    const int64_t left = classes - begin, count = left < kBlock + kWidestGroup<Scalar> ? left : kBlock;
    RowSums block;
    run_in_widest<SumsOfBlocks<Scalar>>(z + begin, 0, 1, count, &block);
    block.index += begin;
    total = begin == 0 ? block : merged(total, block);
    begin += count;
  }
  return total;
}

// The sums of a tile of adjacent rows.
template <typename Real>
struct alignas(64) AdjacentSums {
  Real largest[kTileRows], rest[kTileRows], fall[kTileRows];
  label_int<Real> index[kTileRows];
  Real most[16];  // -kExpZero in each lane, in memory because gcc emits no min instruction for a constant

  AdjacentSums() { std::fill_n(most, 16, -kExpZero<Real>); }
};

// Adjacent rows, with classes that are `stride` apart.
template <typename Scalar>
struct SumsOfAdjacentRows {
  using Real = compute_t<Scalar>;
  using Int = label_int<Real>;

  template <int64_t bytes>
  static FK_HOST_DEVICE void run(const Scalar* z, int64_t stride, int64_t classes, int64_t n_rows,
                                 AdjacentSums<Real>& sums) {
    constexpr int64_t n = kLanesOf<bytes, Scalar>;
    if (n_rows < n) {
      for (int64_t r = 0; r < n_rows; ++r) of_lanes<1>(z, stride, classes, r, sums);
      return;
    }
    for (int64_t r = 0; r < n_rows; r += n) of_lanes<n>(z, stride, classes, std::min(r, n_rows - n), sums);
  }

 private:
  template <int64_t n>
  static FK_HOST_DEVICE void of_lanes(const Scalar* z, int64_t stride, int64_t classes, int64_t row,
                                      AdjacentSums<Real>& sums) {
    using Reals = simd_t<Real, n>;
    using Ints = simd_t<Int, n>;
    const Int n_classes = static_cast<Int>(classes);
    const Reals most = load_simd<Reals>(sums.most);
    Reals largest = -std::numeric_limits<Real>::infinity() - Reals{};
    Ints index{};
    const Scalar* column = z + row;
#pragma GCC unroll 2
    for (Int c = 0; c < n_classes; ++c, column += stride) {
      const Reals v = load_simd<Reals>(column);
      index = v > largest ? Ints{} + c : index;
      largest = v > largest ? v : largest;
    }
    column = z + row;
    CompensatedSum<Reals> rest, fall;
    for (Int c = 0; c < n_classes;) {
      // The sum has parts: in a long run of equal terms, all rounding errors would have the same sign.
      const Int stop = n_classes - c < Int(kPart) ? n_classes : c + Int(kPart);
      Reals part_rest{}, part_fall{};
#pragma GCC unroll 2
      for (; c < stop; ++c, column += stride) {
        prefetch(column + kTileRows);  // the same class of the next tile
        const Reals below = largest - load_simd<Reals>(column);
        const Reals bounded = below > most ? most : below;  // -inf must not make 0 * inf
        const ScaledExponential<Reals> e = scaled_exponential(-bounded);
        part_fall += (e.mantissa * e.scale) * bounded;
        part_rest += e.mantissa * (index == Ints{} + c ? Reals{} : e.scale);
      }
      rest.add(part_rest);
      fall.add(part_fall);
    }
    store_simd(largest, sums.largest + row);
    store_simd(Reals(rest.sum + (largest - largest)), sums.rest + row);  // NaN for a logit of infinity
    store_simd(fall.sum, sums.fall + row);
    store_simd(index, sums.index + row);
  }
};

template <typename Scalar>
void sums_of_adjacent_rows(const Scalar* z, int64_t stride, int64_t classes, int64_t n_rows, RowSums* sums) {
  AdjacentSums<compute_t<Scalar>> tile;
  run_in_widest<SumsOfAdjacentRows<Scalar>>(z, stride, classes, n_rows, tile);
  for (int64_t r = 0; r < n_rows; ++r) {
    sums[r] = {static_cast<double>(tile.largest[r]), static_cast<double>(tile.rest[r]),
               static_cast<double>(tile.fall[r]), tile.index[r]};
    if (sums[r].largest == -std::numeric_limits<double>::infinity() && !any_nan(z + r, classes, stride)) {
      sums[r].rest = sums[r].fall = 0;
    }
  }
}

// Rows of a tile: the distance between them is that of one run.
inline int64_t rows_of_tile(const RowLayout& layout, int64_t begin, int64_t end) {
  return std::min({kTileRows, end - begin, layout.inner - begin % layout.inner});
}

// The sums of the rows of a tile.
template <typename Scalar>
void sums_of_tile(const Rows<Scalar>& rows, int64_t begin, int64_t n_rows, RowSums* sums) {
  const int64_t classes = rows.classes, stride = rows.layout.inner_stride, class_stride = rows.layout.class_stride;
  const Scalar* z = rows.logits + rows.layout.row_offset(begin);
  if (is_across_rows(rows.layout, classes)) {
    sums_of_adjacent_rows(z, class_stride, classes, n_rows, sums);
  } else if (classes < kWidestGroup<Scalar>) {
    Scalar padded[kTileRows * kWidestGroup<Scalar>];
    constexpr auto kNoLogit = -std::numeric_limits<compute_t<Scalar>>::infinity();
    std::fill_n(padded, n_rows * kWidestGroup<Scalar>, Store<Scalar>::from_compute(kNoLogit));
    for (int64_t r = 0; r < n_rows; ++r) {
      for (int64_t c = 0; c < classes; ++c) padded[r * kWidestGroup<Scalar> + c] = z[r * stride + c];
    }
    run_in_widest<SumsOfBlocks<Scalar>>(&padded[0], kWidestGroup<Scalar>, n_rows, kWidestGroup<Scalar>, sums);
  } else if (classes < kBlock + kWidestGroup<Scalar>) {
    run_in_widest<SumsOfBlocks<Scalar>>(z, stride, n_rows, classes, sums);
  } else {
    for (int64_t r = 0; r < n_rows; ++r) sums[r] = sums_of_long_row(z + r * stride, classes);
  }
  for (int64_t r = 0; r < n_rows; ++r) {
    // A logit of infinity makes the sums NaN, too.
    if (std::isnan(sums[r].rest) && any_nan(z + r * stride, classes, class_stride)) {
      sums[r].largest = std::numeric_limits<double>::quiet_NaN();
      sums[r].index = 0;
    }
  }
}

struct StatisticsTile {
  double largest[kTileRows], rest[kTileRows], fall[kTileRows], target[kTileRows], log_sum[kTileRows];
};

// rest + 1 has the terms of all classes. Without the target's it is at least 1, or the target is the largest class.
template <typename Real>
FK_VECTOR_CLONES void finish_sums_of_loss(int64_t n_rows, const StatisticsTile& tile, Real* largest, Real* others,
                                          Real* target) {
#pragma omp simd
  for (int64_t r = 0; r < n_rows; ++r) {
    const double of_target = exponential(tile.target[r] - tile.largest[r]);
    others[r] = static_cast<Real>(tile.rest[r] + (1 - of_target));
    largest[r] = static_cast<Real>(tile.largest[r]);
    target[r] = static_cast<Real>(tile.target[r]);
  }
}

FK_VECTOR_CLONES void finish_statistics(int64_t n_rows, StatisticsTile& tile) {
#pragma omp simd
  for (int64_t r = 0; r < n_rows; ++r) {
    const RowEntropy found = row_entropy(tile.rest[r], tile.fall[r]);
    tile.log_sum[r] = found.log_sum;
    tile.fall[r] = found.entropy;
  }
}

}  // namespace

template <typename Scalar>
void row_sums(const Rows<Scalar>& rows, const RowSumsResult& result, int64_t row_begin, int64_t row_end) {
  RowSums sums[kTileRows];
  for (int64_t begin = row_begin, n; begin < row_end; begin += n) {
    n = rows_of_tile(rows.layout, begin, row_end);
    sums_of_tile(rows, begin, n, sums);
    for (int64_t r = 0; r < n; ++r) {
      result.largest[begin + r] = sums[r].largest;
      result.rest[begin + r] = sums[r].rest;
      result.fall[begin + r] = sums[r].fall;
      result.index[begin + r] = sums[r].index;
    }
  }
}

template <typename Scalar>
void row_statistics(const Rows<Scalar>& rows, const Labels& labels, int64_t ignore_index,
                    const RowStatisticsResult<compute_t<Scalar>>& result, int64_t row_begin, int64_t row_end,
                    const TargetSums<compute_t<Scalar>>* sums_of_loss) {
  using Real = compute_t<Scalar>;
  const RowLayout& layout = rows.layout;
  const bool across = is_across_rows(layout, rows.classes);
  StatisticsTile tile{};
  RowSums of_rows[kTileRows];
  for (int64_t begin = row_begin, n; begin < row_end; begin += n) {
    n = rows_of_tile(layout, begin, row_end);
    for (int64_t first = 0, end; first < n; first = end) {  // runs of rows that count, or that do not
      // A vector of adjacent rows takes ignored ones with it.
      const bool counts = across || labels[begin + first] != ignore_index;
      for (end = across ? n : first + 1; end < n && (labels[begin + end] != ignore_index) == counts;) ++end;
      if (counts) {
        sums_of_tile(rows, begin + first, end - first, of_rows + first);
      } else {
        std::fill(of_rows + first, of_rows + end, RowSums{});
      }
    }
    const Scalar* const z = rows.logits + layout.row_offset(begin);
    for (int64_t r = 0; r < n; ++r) {
      const int64_t row = begin + r, label = labels[row];
      const bool counts = label != ignore_index, is_class = label >= 0 && label < rows.classes;
      const RowSums sums = counts ? of_rows[r] : RowSums{};
      tile.largest[r] = sums.largest;
      tile.rest[r] = sums.rest;
      tile.fall[r] = sums.fall;
      const Scalar logit = z[r * layout.inner_stride + (is_class ? label * layout.class_stride : 0)];
      tile.target[r] = !counts    ? 0
                       : is_class ? static_cast<double>(load_as_compute(logit))
                                  : std::numeric_limits<double>::quiet_NaN();
      const int64_t predicted = counts && !std::isnan(sums.largest) ? sums.index : -1;
      result.predicted[row] = predicted;
      result.correct[row] = counts && predicted == label;
      result.counts[row] = counts;
    }
    if (sums_of_loss) {
      const auto [largest, others, target] = *sums_of_loss;
      const int64_t at = begin - row_begin;
      finish_sums_of_loss(n, tile, largest + at, others + at, target + at);
    }
    finish_statistics(n, tile);
    for (int64_t r = 0; r < n; ++r) {
      result.log_p[begin + r] = static_cast<Real>((tile.target[r] - tile.largest[r]) - tile.log_sum[r]);
      result.entropy[begin + r] = static_cast<Real>(tile.fall[r]);
      result.lse[begin + r] = static_cast<Real>(tile.largest[r] + tile.log_sum[r]);
    }
  }
}

#define FK_ROW_SUMS(Scalar)                                                                     \
  template void row_sums(const Rows<Scalar>&, const RowSumsResult&, int64_t, int64_t);          \
  template void row_statistics(const Rows<Scalar>&, const Labels&, int64_t,                     \
                               const RowStatisticsResult<compute_t<Scalar>>&, int64_t, int64_t, \
                               const TargetSums<compute_t<Scalar>>*);
FK_ROW_SUMS(float)
FK_ROW_SUMS(double)
FK_ROW_SUMS(Half)
FK_ROW_SUMS(BFloat16)

}  // namespace focalkern::cpu
