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

#include "math/mmce.h"

#include "cpu/row_loss.h"

namespace focalkern::cpu {

FK_ROW_LOSS(MmceRow)

namespace {

struct Sample {
  double r;
  double a;
  double below;  // sum over the smaller confidences, with decay
  double per_r;  // -da/dr
  int64_t row;
};

}  // namespace

template <typename Real>
double mmce_of_batch(const MmceBatch& batch, const Real* log_s, double* slope) {
  int64_t count = 0, n_correct = 0;
  for (int64_t i = 0; i < batch.rows; ++i) {
    count += batch.counts[i];
    n_correct += batch.counts[i] && batch.correct[i];
    slope[i] = 0;
  }
  if (count == 0 || (batch.weighted && (n_correct == 0 || n_correct == count))) return 0;
  const double of_correct = 1.0 / static_cast<double>(batch.weighted ? n_correct : count);
  const double of_wrong = 1.0 / static_cast<double>(batch.weighted ? count - n_correct : count);

  const std::unique_ptr<Sample[]> samples(new Sample[count]);
  int64_t n = 0;
  for (int64_t i = 0; i < batch.rows; ++i) {
    if (!batch.counts[i]) continue;
    const double s = static_cast<double>(log_s[i]);
    const double r = exponential(-s), lack = -exponential_minus_one(-s);
    // A row without a softmax makes the batch one without an error; it has no place in the order either.
    if (r != r) {
      std::fill(slope, slope + batch.rows, r);
      return r;
    }
    const double per_r = batch.correct[i] ? of_correct : of_wrong;
    samples[n++] = {r, batch.correct[i] ? lack * per_r : -r * per_r, 0, per_r, i};
  }
  std::sort(samples.get(), samples.get() + n,
            [](const Sample& x, const Sample& y) { return x.r < y.r || (x.r == y.r && x.row < y.row); });

  const double rate = 1.0 / batch.bandwidth;
  double running = 0;  // sum over what is below, seen from the confidence at hand
  for (int64_t begin = 0, end; begin < n; begin = end) {
    double mass = 0;
    for (end = begin; end < n && samples[end].r == samples[begin].r; ++end) {
      samples[end].below = running;
      mass += samples[end].a;
    }
    if (end < n) running = (running + mass) * exponential((samples[begin].r - samples[end].r) * rate);
  }
  double squared = 0;
  running = 0;
  for (int64_t end = n, begin; end > 0; end = begin) {
    double mass = 0;
    for (begin = end; begin > 0 && samples[begin - 1].r == samples[end - 1].r; --begin) mass += samples[begin - 1].a;
    for (int64_t i = begin; i < end; ++i) {
      const Sample& at = samples[i];
      const double all = at.below + mass + running;
      squared += at.a * all;
      // d(squared)/dr, and dr/d(log_s) = -r.
      slope[at.row] = -at.r * 2.0 * (at.a * (running - at.below) * rate - at.per_r * all);
    }
    if (begin > 0) running = (running + mass) * exponential((samples[begin - 1].r - samples[begin].r) * rate);
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
