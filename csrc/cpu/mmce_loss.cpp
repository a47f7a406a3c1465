// Cross-entropy with the maximum mean calibration error of a batch, on the CPU. The rows are those of every loss; the
// batch is
//
//   mmce^2 = sum_ij a_i a_j e^(-|r_i - r_j| / h),   a_i = (c_i - r_i) / m
//
// over confidences r and correctness c. In the order of r the kernel is a product of decays from one row to the next,
// so that a pass up and a pass down give the sums over the smaller and the larger confidences of every row. Rows of
// equal confidence are a third part, to which r contributes no derivative, as for |r_i - r_j| at 0.

#include "cpu/mmce_loss.h"

#include <algorithm>
#include <memory>
#include <utility>

#include "math/mmce.h"

#include "cpu/row_loss.h"

namespace focalkern::cpu {

FK_ROW_LOSS(MmceRow)

namespace {

template <typename Bits>
struct Key {
  Bits bits;
  Bits row;
};

constexpr int64_t kManyKeys = 1024;  // from here on counting digits beats comparing
constexpr int kDigitBits = 11;

// Ascending by bits, then by row: the order of `keys`. `other` has room for as many; either of the two is returned.
template <typename Bits>
Key<Bits>* sort_by_bits(Key<Bits>* keys, Key<Bits>* other, int64_t n) {
  if (n < kManyKeys) {
    std::sort(keys, keys + n, [](const Key<Bits>& x, const Key<Bits>& y) {
      return x.bits < y.bits || (x.bits == y.bits && x.row < y.row);
    });
    return keys;
  }
  constexpr int kDigits = (8 * sizeof(Bits) + kDigitBits - 1) / kDigitBits;
  constexpr Bits kMask = (Bits(1) << kDigitBits) - 1;
  const auto digit = [](const Key<Bits>& key, int d) { return (key.bits >> (d * kDigitBits)) & kMask; };
  const std::unique_ptr<int64_t[]> counts(new int64_t[kDigits << kDigitBits]());
  for (int64_t i = 0; i < n; ++i) {
    for (int d = 0; d < kDigits; ++d) ++counts[(d << kDigitBits) + digit(keys[i], d)];
  }
  for (int d = 0; d < kDigits; ++d) {
    int64_t* place = counts.get() + (d << kDigitBits);
    if (place[digit(keys[0], d)] == n) continue;
    int64_t before = 0;
    for (Bits value = 0; value <= kMask; ++value) before += std::exchange(place[value], before);
    for (int64_t i = 0; i < n; ++i) other[place[digit(keys[i], d)]++] = keys[i];
    std::swap(keys, other);
  }
  return keys;
}

// The rows that count, by ascending confidence r = e^-log_s. The bits of log_s, which is not negative, are in its
// order.
template <typename Bits, typename Real>
void order_rows(const MmceBatch& batch, const Real* log_s, int64_t count, const double* r, int64_t* order) {
  const std::unique_ptr<Key<Bits>[]> keys(new Key<Bits>[2 * count]);
  int64_t n = 0;
  for (int64_t i = 0; i < batch.rows; ++i) {
    using Given = std::make_unsigned_t<typename detail::Format<Real>::Int>;
    if (batch.counts[i]) keys[n++] = {static_cast<Bits>(static_cast<Given>(~bit_cast<Given>(log_s[i]))), Bits(i)};
  }
  const Key<Bits>* sorted = sort_by_bits(keys.get(), keys.get() + count, n);
  for (int64_t i = 0; i < n; ++i) {
    const int64_t row = static_cast<int64_t>(sorted[i].row);
    // Neighbours may have changed places by rounding in the exponential.
    int64_t at = i;
    for (; at > 0 && r[row] < r[order[at - 1]]; --at) order[at] = order[at - 1];
    order[at] = row;
  }
}

template <typename Real>
FK_VECTOR_CLONES void confidences(const Real* log_s, int64_t rows, double* r, double* lack) {
#pragma omp simd
  for (int64_t i = 0; i < rows; ++i) {
    const double s = static_cast<double>(log_s[i]);
    r[i] = exponential(-s);
    lack[i] = -exponential_minus_one(-s);
  }
}

// What is left of a sum on the way from one confidence to the next.
FK_VECTOR_CLONES void decays(const double* r, int64_t n, double rate, double* decay) {
#pragma omp simd
  for (int64_t i = 0; i < n - 1; ++i) decay[i] = exponential((r[i] - r[i + 1]) * rate);
}

}  // namespace

template <typename Real>
double mmce_of_batch(const MmceBatch& batch, const Real* log_s, double* slope) {
  int64_t count = 0, n_correct = 0;
  for (int64_t i = 0; i < batch.rows; ++i) {
    count += batch.counts[i];
    n_correct += batch.counts[i] & batch.correct[i];
    slope[i] = 0;
  }
  if (count == 0 || (batch.weighted && (n_correct == 0 || n_correct == count))) return 0;
  const double of_correct = 1.0 / static_cast<double>(batch.weighted ? n_correct : count);
  const double of_wrong = 1.0 / static_cast<double>(batch.weighted ? count - n_correct : count);

  const std::unique_ptr<double[]> numbers(new double[2 * batch.rows + 4 * count]);
  double *r_of_row = numbers.get(), *lack_of_row = r_of_row + batch.rows;
  double *r = lack_of_row + batch.rows, *a = r + count, *below = a + count, *decay = below + count;
  confidences(log_s, batch.rows, r_of_row, lack_of_row);
  for (int64_t i = 0; i < batch.rows; ++i) {
    // A row without a softmax makes the batch one without an error; it has no place in the order either.
    if (batch.counts[i] && r_of_row[i] != r_of_row[i]) {
      std::fill(slope, slope + batch.rows, r_of_row[i]);
      return r_of_row[i];
    }
  }
  const int64_t n = count;
  const std::unique_ptr<int64_t[]> order(new int64_t[n]);
  if (sizeof(Real) == sizeof(uint32_t) && batch.rows <= std::numeric_limits<uint32_t>::max()) {
    order_rows<uint32_t>(batch, log_s, n, r_of_row, order.get());
  } else {
    order_rows<uint64_t>(batch, log_s, n, r_of_row, order.get());
  }
  for (int64_t i = 0; i < n; ++i) {
    const int64_t row = order[i];
    r[i] = r_of_row[row];
    a[i] = batch.correct[row] ? lack_of_row[row] * of_correct : -r[i] * of_wrong;
  }

  const double rate = 1.0 / batch.bandwidth;
  decays(r, n, rate, decay);
  double running = 0;  // sum over what is below, seen from the confidence at hand
  for (int64_t begin = 0, end; begin < n; begin = end) {
    double mass = 0;
    for (end = begin; end < n && r[end] == r[begin]; ++end) {
      below[end] = running;
      mass += a[end];
    }
    if (end < n) running = (running + mass) * decay[end - 1];
  }
  double squared = 0;
  running = 0;
  for (int64_t end = n, begin; end > 0; end = begin) {
    double mass = 0;
    for (begin = end; begin > 0 && r[begin - 1] == r[end - 1]; --begin) mass += a[begin - 1];
    for (int64_t i = begin; i < end; ++i) {
      const int64_t row = order[i];
      const double all = below[i] + mass + running;
      const double per_r = batch.correct[row] ? of_correct : of_wrong;  // -da/dr
      squared += a[i] * all;
      // d(squared)/dr, and dr/d(log_s) = -r.
      slope[row] = -r[i] * 2.0 * (a[i] * (running - below[i]) * rate - per_r * all);
    }
    if (begin > 0) running = (running + mass) * decay[begin - 1];
  }
  // At 0 the root has no derivative; 0 is taken. Rounding may leave the square just below 0.
  const double error = squared > 0 ? std::sqrt(squared) : 0;
  const double of_root = squared > 0 ? 0.5 / error : 0;
  for (int64_t i = 0; i < batch.rows; ++i) slope[i] *= of_root;
  return error;
}

template double mmce_of_batch<float>(const MmceBatch&, const float*, double*);
template double mmce_of_batch<double>(const MmceBatch&, const double*, double*);

}  // namespace focalkern::cpu
