// Rows of logits or probabilities as gaps to the largest logit; transposes confidences to one run per temperature.
#pragma once

#include <algorithm>
#include <cstring>
#include <vector>

#include "cpu/calibration_grid/softmax.h"
#include "cpu/simd/dispatch.h"
#include "cpu/simd/vector.h"
#include "kernels/calibration_grid.h"

namespace focalkern::cpu {
namespace {

// log p including denormal p, which `logarithm` treats as 0: a float32 softmax produces such p.
template <typename Real>
FK_HOST_DEVICE Real log_probability(Real p) {
  const Real rescaled = p * Real(0x1p64);
  const bool small = p < Real(0x1p-60);
  return logarithm(small ? rescaled : p) - (small ? Real(64 * 0.693147180559945309) : Real(0));
}

// One row, as gaps to its largest logit.
template <typename Real>
struct Row {
  Real* d;  // [classes - 1]: z_k - z_t for the classes other than t, clamped to finite values
  Real second;
  Real label;
  bool correct;
};
template <typename Scalar>
FK_VECTOR_CLONES void load_gaps(const Scalar* __restrict input, int64_t classes, bool probs, int64_t top,
                                compute_t<Scalar>* __restrict d /* [classes] */) {
  using Real = compute_t<Scalar>;
  if (probs) {
    const Real log_top = log_probability(load_as_compute(input[top]));
    for (int64_t k = 0; k < classes; ++k) d[k] = log_probability(load_as_compute(input[k])) - log_top;
  } else {
    const Real z_top = load_as_compute(input[top]);
    for (int64_t k = 0; k < classes; ++k) d[k] = load_as_compute(input[k]) - z_top;
  }
}
template <typename Real>
FK_VECTOR_CLONES Real largest_and_bound(Real* __restrict d, int64_t n) {
  Real largest = -std::numeric_limits<Real>::infinity();
#pragma omp simd reduction(max : largest)
  for (int64_t k = 0; k < n; ++k) largest = d[k] > largest ? d[k] : largest;
  for (int64_t k = 0; k < n; ++k) d[k] = d[k] < -kFar<Real> ? -kFar<Real> : d[k];
  return largest < -kFar<Real> ? -kFar<Real> : largest;
}
template <typename Scalar>
void load_row(const CalibrationGridSamples<Scalar>& samples, int64_t row, Row<compute_t<Scalar>>* out) {
  const int64_t source = samples.input_row(row);
  const int64_t n = samples.classes - 1;
  const int64_t top = samples.top[row];
  load_gaps(samples.input + source * samples.row_stride, samples.classes, samples.input_is_probs, top, out->d);
  out->label = out->d[samples.labels[source]];
  out->correct = samples.correct[row] != 0;
  out->d[top] = out->d[n];  // the order of the other classes does not matter
  out->second = largest_and_bound(out->d, n);
}

// Transposes from one vector of temperatures per sample to one run of samples per temperature.
template <typename Real>
void write_confidences(const Real* __restrict in, int64_t in_stride, int64_t n_rows, int64_t n_lanes,
                       Real* __restrict out, int64_t out_stride) {
  if constexpr (sizeof(Real) == sizeof(float)) {
    // In 4 x 4 blocks, which fit any vector unit.
    using Four [[gnu::vector_size(16)]] = float;
    if (n_rows == kSamples) {
      for (int64_t t = 0; t < n_lanes; t += 4) {
        for (int64_t i = 0; i < kSamples; i += 4) {
          Four v[4];
          for (int64_t j = 0; j < 4; ++j) std::memcpy(&v[j], in + (i + j) * in_stride + t, sizeof(v[j]));
          transpose_4x4(v);
          for (int64_t j = 0; j < std::min<int64_t>(4, n_lanes - t); ++j) {
            std::memcpy(out + (t + j) * out_stride + i, &v[j], sizeof(v[j]));
          }
        }
      }
      return;
    }
  }
  for (int64_t t = 0; t < n_lanes; ++t) {
    for (int64_t i = 0; i < n_rows; ++i) out[t * out_stride + i] = in[i * in_stride + t];
  }
}

}  // namespace
}  // namespace focalkern::cpu
