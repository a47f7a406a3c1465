// The maximum mean calibration error of a batch, from the confidences of its rows.
#pragma once

#include <cstdint>

namespace focalkern::cpu {

struct MmceBatch {
  int64_t rows;
  bool weighted;  // balance correct and incorrect rows
  double bandwidth;
  const bool* counts;   // [rows]
  const bool* correct;  // [rows]
};

// log_s: [rows], minus the logarithm of the confidence. `slope` receives what d(error)/d(log_s) is.
template <typename Real>
double mmce_of_batch(const MmceBatch& batch, const Real* log_s, double* slope);

}  // namespace focalkern::cpu
