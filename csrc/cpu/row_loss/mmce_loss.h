// The maximum mean calibration error of a batch, from the confidences of its rows.
#pragma once

#include <cstdint>

#include "kernels/layout.h"

namespace focalkern::cpu {

struct MmceBatch {
  int64_t rows;
  bool weighted;  // whether weights balance correct and incorrect rows
  double bandwidth;
  Labels labels;  // [rows]
  int64_t ignore_index;
};

struct MmceError {
  double error;
  int64_t count;  // of the rows that are not ignored
};

// log_s: [rows], minus the logarithm of the confidence. `top`: [rows], the predicted class, as class_as_number. `grad`
// receives scale * count * d(error)/d(log_s), 0 in ignored rows.
template <typename Real>
MmceError mmce_of_batch(const MmceBatch& batch, const Real* log_s, const Real* top, double scale, Real* grad);

}  // namespace focalkern::cpu
