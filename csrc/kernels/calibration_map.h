// Calibration map: arguments and launchers. Formulas: math/calibration_map.h.
#pragma once

#include <cstdint>

#include "math/portable.h"

namespace focalkern {

// Exactly one of `output` and `output_wide` is set, and one of `grad_output` and `grad_output_wide`. Under autocast the
// output for a half-precision input has the compute type, as softmax has.
template <typename Scalar>
struct CalibrationMapArgs {
  using Real = compute_t<Scalar>;

  int64_t rows;
  int64_t classes;      // at least 2; or 1: the map of two classes on one logit each
  const Scalar* input;  // [rows, classes], contiguous: logits, or probabilities
  bool input_is_probs;
  bool log_output;  // log-probabilities; of one logit the log-odds

  // gamma[row * gamma_stride], or `gamma_value` for every row if the pointer is null; the same for temperature. Both
  // are double for every Scalar: 1 + gamma must be computed before rounding.
  const double* gamma;
  int64_t gamma_stride;  // 0 or 1
  double gamma_value;
  const double* temperature;
  int64_t temperature_stride;  // 0 or 1
  double temperature_value;

  FK_HOST_DEVICE double gamma_of(int64_t row) const { return gamma ? gamma[row * gamma_stride] : gamma_value; }
  FK_HOST_DEVICE double temperature_of(int64_t row) const {
    return temperature ? temperature[row * temperature_stride] : temperature_value;
  }
};

// All outputs of an invalid row are NaN. A row is invalid if an input is NaN or +inf, no class has a probability above
// 0, probabilities are negative or do not sum to 1, or gamma or temperature is outside its domain.
template <typename Scalar>
struct CalibrationMapForward : CalibrationMapArgs<Scalar> {
  Scalar* output;                  // [rows, classes], or null
  compute_t<Scalar>* output_wide;  // [rows, classes], or null
};

template <typename Scalar>
struct CalibrationMapBackward : CalibrationMapArgs<Scalar> {
  const Scalar* grad_output;                  // [rows, classes], or null
  const compute_t<Scalar>* grad_output_wide;  // [rows, classes], or null
  Scalar* grad_input;                         // [rows, classes], or null
  double* grad_gamma;                         // [rows], or null
  double* grad_temperature;                   // [rows], or null
};

namespace cpu {

// Rows per unit of work, a function of the shape alone.
int64_t calibration_map_chunk_rows(int64_t rows, int64_t classes);

// Returns the first invalid row, or -1.
template <typename Scalar>
int64_t calibration_map_forward(const CalibrationMapForward<Scalar>& args, int64_t row_begin, int64_t row_end);

template <typename Scalar>
void calibration_map_backward(const CalibrationMapBackward<Scalar>& args, int64_t row_begin, int64_t row_end);

}  // namespace cpu

namespace cuda {

template <typename Scalar>
int calibration_map_forward(const CalibrationMapForward<Scalar>& args, void* stream);

template <typename Scalar>
int calibration_map_backward(const CalibrationMapBackward<Scalar>& args, void* stream);

}  // namespace cuda

}  // namespace focalkern
