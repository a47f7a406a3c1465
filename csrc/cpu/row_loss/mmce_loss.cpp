// Cross-entropy with the maximum mean calibration error of a batch, on the CPU. Every row has the same sums as the
// other losses. The error of the batch is
//   mmce^2 = sum_ij a_i a_j e^(-|r_i - r_j| / h),   a_i = (c_i - r_i) / m
//
// over confidences r and correctness c. If the rows are sorted by r, the kernel of two rows is a product of factors
// between neighbours, so that one ascending and one descending pass give every row's sums over smaller and over larger
// confidences. Rows of equal confidence form a third part, with derivative 0 in r, as |r_i - r_j| has at 0.

#include "cpu/row_loss/mmce_loss.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <memory>
#include <utility>

#include "math/mmce.h"

#include "cpu/row_loss/driver.h"

namespace focalkern::cpu {

FK_ROW_LOSS_INSTANCES(MmceFormula)

namespace {

template <typename Real>
using BitsOf = std::make_unsigned_t<typename detail::Format<Real>::Int>;

// A sort key: `kNumberBits` bits that grow with the confidence, then the row's index, then one bit that is 1 for a
// correct row. The key takes two words if one has no room for the index.
template <int kNumberBits>
struct KeyOf {
  using type = uint64_t;
};
template <>
struct KeyOf<64> {
  __extension__ using type = unsigned __int128;
};

// Flags of a row, in words as wide as the logits: loops over both then have one vector width.
enum Flag { kCorrect = 1, kCounts = 2 };

template <typename Label, typename Real>
FK_VECTOR_CLONES void compare_rows(const Label* labels, int64_t ignore_index, const Real* top, int64_t rows,
                                   BitsOf<Real>* flags) {
#pragma omp simd
  for (int64_t i = 0; i < rows; ++i) {
    const int64_t label = static_cast<int64_t>(labels[i]);
    const BitsOf<Real> flag = label == number_as_class(top[i]) ? kCounts | kCorrect : kCounts;
    flags[i] = label != ignore_index ? flag : 0;
  }
}

// The number of rows that count, the number of correct ones, and the range of log_s as bits. The order of the bits is
// that of log_s, because log_s is not negative.
template <typename Bits>
struct Extent {
  int64_t count;
  int64_t n_correct;
  Bits least;
  Bits most;
};

template <typename Real>
FK_HOST_DEVICE BitsOf<Real> magnitude(Real log_s) {
  return bit_cast<BitsOf<Real>>(log_s) & (~BitsOf<Real>(0) >> 1);
}

template <typename Real>
FK_VECTOR_CLONES void extent_of(const Real* log_s, const BitsOf<Real>* flags, int64_t rows,
                                Extent<BitsOf<Real>>* extent) {
  using Bits = BitsOf<Real>;
  Bits least = ~Bits(0), most = 0, count = 0, n_correct = 0;
#pragma omp simd reduction(min : least) reduction(max : most) reduction(+ : count, n_correct)
  for (int64_t i = 0; i < rows; ++i) {
    const Bits bits = magnitude(log_s[i]);
    const Bits counts = flags[i] >> 1;
    const Bits high = counts ? bits : ~Bits(0), low = counts ? bits : Bits(0);
    least = high < least ? high : least;
    most = low > most ? low : most;
    count += counts;
    n_correct += flags[i] & kCorrect;
  }
  *extent = {static_cast<int64_t>(count), static_cast<int64_t>(n_correct), least, most};
}

// The keys of the rows that count.
template <typename Key, int kShift, typename Real>
FK_VECTOR_CLONES void write_keys(const Real* log_s, const BitsOf<Real>* flags, int64_t rows, BitsOf<Real> most,
                                 bool all, Key* keys) {
  if (all) {
#pragma omp simd
    for (int64_t i = 0; i < rows; ++i) {
      keys[i] = Key(most - magnitude(log_s[i])) << kShift | (Key(i) << 1 | (flags[i] & kCorrect));
    }
    return;
  }
  int64_t n = 0;
  for (int64_t i = 0; i < rows; ++i) {
    keys[n] = Key(most - magnitude(log_s[i])) << kShift | (Key(i) << 1 | (flags[i] & kCorrect));
    n += flags[i] >> 1;
  }
}

// Insertion sort for nearly ascending keys. Returns false, with the keys in any order, if they are not nearly
// ascending.
template <typename Key>
bool insert_keys(Key* keys, int64_t n) {
  int64_t moves = 0;
  Key largest = keys[0];
  for (int64_t i = 1; i < n; ++i) {
    const Key key = keys[i];
    if (largest < key) {
      largest = key;
      continue;
    }
    int64_t at = i;
    for (; at > 0 && key < keys[at - 1]; --at) keys[at] = keys[at - 1];
    keys[at] = key;
    moves += i - at;
    if (moves > 8 * n) return false;
  }
  return true;
}

constexpr int64_t kFewKeys = 16, kManyKeys = 1024;

// Radix sort, ascending. `other` has room for as many keys; the result is in one of the two arrays. It sorts by the
// leading bits of `width` first; insertion sort then finishes nearly every batch.
template <int kShift, typename Key>
Key* sort_keys(Key* keys, Key* other, int64_t n, int width) {
  if (n <= kFewKeys && insert_keys(keys, n)) return keys;
  constexpr int kMostBits = 11;
  const int digit_bits = n < kManyKeys ? 8 : kMostBits;
  const auto mask = static_cast<uint32_t>((1 << digit_bits) - 1);
  using Place = std::conditional_t<sizeof(Key) == sizeof(uint64_t), uint32_t, uint64_t>;
  Place places[2][1 << kMostBits];
  // Sorts by the bits from this one on; if insertion sort then fails, by all bits.
  for (int lowest = std::max(0, width - 2 * digit_bits);; lowest = 0) {
    for (int first = lowest; first < width; first += 2 * digit_bits) {
      const int digits = first + digit_bits < width ? 2 : 1;
      const int shift[2] = {kShift + first, kShift + first + (digits - 1) * digit_bits};
      const auto digit = [&](Key key, int d) { return static_cast<uint32_t>(key >> shift[d]) & mask; };
      for (auto& place : places) std::fill_n(place, mask + 1, Place(0));
      for (int64_t i = 0; i < n; ++i) {
        ++places[0][digit(keys[i], 0)];
        ++places[1][digit(keys[i], 1)];
      }
      for (int d = 0; d < digits; ++d) {
        Place* place = places[d];
        if (place[digit(keys[0], d)] == static_cast<Place>(n)) continue;
        Place before = 0;
        for (uint32_t value = 0; value <= mask; ++value) before += std::exchange(place[value], before);
        for (int64_t i = 0; i < n; ++i) other[place[digit(keys[i], d)]++] = keys[i];
        std::swap(keys, other);
      }
    }
    if (lowest == 0 || insert_keys(keys, n)) return keys;
  }
}

// Arrays with one number per row, in the order of the confidences.
struct Ordered {
  double* r;      // ascending
  double* a;      // (c - r) / m
  double* decay;  // the kernel between neighbours: e^(-(difference of confidences) / h)
  double* up;     // sum over the rows of lower or equal confidence
  double* down;   // sum over the rows of higher or equal confidence
  double* grad;   // d(squared)/d(log_s)
};
constexpr int kArrays = 6;

template <typename Real, int kShift, typename Key>
FK_VECTOR_CLONES void confidences(const Key* keys, BitsOf<Real> most, int64_t n, double of_correct, double of_wrong,
                                  double* r, double* a) {
#pragma omp simd
  for (int64_t i = 0; i < n; ++i) {
    const double s = static_cast<double>(bit_cast<Real>(static_cast<BitsOf<Real>>(most - (keys[i] >> kShift))));
    const double lack = -exponential_minus_one(-s);
    // For float logits the difference is accurate enough; double needs the exponential.
    const double confidence = sizeof(Real) == sizeof(float) ? 1.0 - lack : exponential(-s);
    r[i] = confidence;
    a[i] = keys[i] & 1 ? lack * of_correct : -confidence * of_wrong;
  }
}

FK_VECTOR_CLONES void decays(const double* r, int64_t n, double rate, double* decay) {
#pragma omp simd
  for (int64_t i = 0; i < n - 1; ++i) decay[i] = exponential((r[i] - r[i + 1]) * rate);
}

// Both sums in one loop: each step waits for the multiplication and addition of the step before, so the two overlap.
FK_VECTOR_CLONES void sum_up_and_down(const double* a, const double* decay, int64_t n, double* up, double* down) {
  double from_below = a[0], from_above = a[n - 1];
  up[0] = from_below;
  down[n - 1] = from_above;
  for (int64_t i = 1, j = n - 2; i < n; ++i, --j) {
    from_below = from_below * decay[i - 1] + a[i];
    from_above = from_above * decay[j] + a[j];
    up[i] = from_below;
    down[j] = from_above;
  }
}

// Returns sum_ij a_i a_j e^(-|r_i - r_j| / h).
template <typename Key>
FK_VECTOR_CLONES double gradients(const Ordered& rows, const Key* keys, int64_t n, double rate, double of_correct,
                                  double of_wrong) {
  const double *r = rows.r, *a = rows.a, *decay = rows.decay, *up = rows.up, *down = rows.down;
  double* grad = rows.grad;
  double squared = 0;
#pragma omp simd reduction(+ : squared)
  for (int64_t i = 0; i < n; ++i) {
    const double below = i > 0 ? up[i - 1] * decay[i - 1] : 0.0, above = i < n - 1 ? down[i + 1] * decay[i] : 0.0;
    const double all = below + a[i] + above;
    const double per_r = keys[i] & 1 ? of_correct : of_wrong;  // -da/dr
    squared += a[i] * all;
    // d(squared)/dr, and dr/d(log_s) = -r.
    grad[i] = -r[i] * 2.0 * (a[i] * (above - below) * rate - per_r * all);
  }
  return squared;
}

// Corrects the gradients of rows of equal confidence, which count neither as lower nor as higher.
void correct_ties(const Ordered& rows, int64_t n, double rate) {
  const double *r = rows.r, *a = rows.a, *decay = rows.decay, *up = rows.up, *down = rows.down;
  const auto below = [&](int64_t i) { return i > 0 ? up[i - 1] * decay[i - 1] : 0.0; };
  const auto above = [&](int64_t i) { return i < n - 1 ? down[i + 1] * decay[i] : 0.0; };
  for (int64_t i = 1; i < n; ++i) {
    if (r[i] != r[i - 1]) continue;
    const int64_t begin = i - 1;
    while (i < n && r[i] == r[begin]) ++i;
    const double difference = above(i - 1) - below(begin);
    for (int64_t k = begin; k < i; ++k) {
      rows.grad[k] += -r[k] * 2.0 * a[k] * (difference - (above(k) - below(k))) * rate;
    }
  }
}

template <typename Key, int kShift, typename Real>
void store_gradients(const Key* keys, int64_t n, const double* grad, double scale, Real* to) {
  for (int64_t i = 0; i < n; ++i) {
    const auto row = static_cast<int64_t>((keys[i] & ((Key(1) << kShift) - 1)) >> 1);
    to[row] = static_cast<Real>(scale * grad[i]);
  }
}

template <int kNumberBits, typename Real>
double error_of_rows(const MmceBatch& batch, const Real* log_s, const BitsOf<Real>* flags,
                     const Extent<BitsOf<Real>>& extent, double scale, Real* grad) {
  using Key = typename KeyOf<kNumberBits>::type;
  constexpr int kShift = 8 * sizeof(Key) - kNumberBits;
  const int64_t n = extent.count;
  const double of_correct = 1.0 / static_cast<double>(batch.weighted ? extent.n_correct : n);
  const double of_wrong = 1.0 / static_cast<double>(batch.weighted ? n - extent.n_correct : n);
  const double rate = 1.0 / batch.bandwidth;

  const std::unique_ptr<Key[]> memory(new Key[2 * n]);
  write_keys<Key, kShift>(log_s, flags, batch.rows, extent.most, n == batch.rows, memory.get());
  int width = 0;
  for (auto range = extent.most - extent.least; range > 0; range >>= 1) ++width;
  const Key* keys = sort_keys<kShift>(memory.get(), memory.get() + n, n, width);

  const std::unique_ptr<double[]> numbers(new double[kArrays * n]);
  double* next = numbers.get();
  Ordered rows;
  for (double** array : {&rows.r, &rows.a, &rows.decay, &rows.up, &rows.down, &rows.grad}) {
    *array = std::exchange(next, next + n);
  }
  confidences<Real, kShift>(keys, extent.most, n, of_correct, of_wrong, rows.r, rows.a);
  decays(rows.r, n, rate, rows.decay);
  sum_up_and_down(rows.a, rows.decay, n, rows.up, rows.down);
  const double squared = gradients(rows, keys, n, rate, of_correct, of_wrong);
  correct_ties(rows, n, rate);
  // The root has no derivative at 0; the code uses 0. Rounding may leave the square slightly below 0.
  const double error = squared > 0 ? std::sqrt(squared) : 0;
  const double of_root = squared > 0 ? 0.5 / error : 0;
  if (n < batch.rows) std::fill_n(grad, batch.rows, Real(0));
  store_gradients<Key, kShift>(keys, n, rows.grad, scale * static_cast<double>(n) * of_root, grad);
  return error;
}

}  // namespace

template <typename Real>
MmceError mmce_of_batch(const MmceBatch& batch, const Real* log_s, const Real* top, double scale, Real* grad) {
  using Bits = BitsOf<Real>;
  const std::unique_ptr<Bits[]> flags(new Bits[batch.rows]);
  const auto compare = [&](const auto* labels) {
    compare_rows(labels, batch.ignore_index, top, batch.rows, flags.get());
  };
  switch (batch.labels.type) {
    case Labels::Type::kInt64:
      compare(static_cast<const int64_t*>(batch.labels.data));
      break;
    case Labels::Type::kInt32:
      compare(static_cast<const int32_t*>(batch.labels.data));
      break;
    case Labels::Type::kUInt8:
      compare(static_cast<const uint8_t*>(batch.labels.data));
      break;
  }
  Extent<Bits> extent;
  extent_of(log_s, flags.get(), batch.rows, &extent);
  const bool one_sided = extent.n_correct == 0 || extent.n_correct == extent.count;
  if (extent.count == 0 || (batch.weighted && one_sided)) {
    std::fill_n(grad, batch.rows, Real(0));
    return {0, extent.count};
  }
  if (extent.most > bit_cast<Bits>(std::numeric_limits<Real>::infinity())) {
    // A row with NaN logits has no place in the order; the error of the batch is then NaN.
    std::fill_n(grad, batch.rows, std::numeric_limits<Real>::quiet_NaN());
    return {std::numeric_limits<double>::quiet_NaN(), extent.count};
  }
  double error;
  if (sizeof(Real) == sizeof(float) && batch.rows <= std::numeric_limits<int32_t>::max()) {
    error = error_of_rows<32>(batch, log_s, flags.get(), extent, scale, grad);
  } else {
    error = error_of_rows<64>(batch, log_s, flags.get(), extent, scale, grad);
  }
  return {error, extent.count};
}

template MmceError mmce_of_batch<float>(const MmceBatch&, const float*, const float*, double, float*);
template MmceError mmce_of_batch<double>(const MmceBatch&, const double*, const double*, double, double*);

}  // namespace focalkern::cpu
