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
  int64_t classes;      // at least 2
  const Scalar* input;  // [rows, classes], contiguous: logits, or probabilities
  bool input_is_probs;
  bool log_output;

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

// The binary map: the same map for two classes, elementwise on one logit each.
template <typename Scalar>
struct BinaryCalibrationMapArgs {
  int64_t size;
  const Scalar* logits;  // [size]
  bool log_odds_output;
  const double* gamma;  // as above, per element
  int64_t gamma_stride;
  double gamma_value;
  const double* temperature;
  int64_t temperature_stride;
  double temperature_value;

  FK_HOST_DEVICE double gamma_of(int64_t i) const { return gamma ? gamma[i * gamma_stride] : gamma_value; }
  FK_HOST_DEVICE double temperature_of(int64_t i) const {
    return temperature ? temperature[i * temperature_stride] : temperature_value;
  }
};

template <typename Scalar>
struct BinaryCalibrationMapForward : BinaryCalibrationMapArgs<Scalar> {
  Scalar* output;                  // [size], or null
  compute_t<Scalar>* output_wide;  // [size], or null
};

template <typename Scalar>
struct BinaryCalibrationMapBackward : BinaryCalibrationMapArgs<Scalar> {
  const Scalar* grad_output;                  // [size], or null
  const compute_t<Scalar>* grad_output_wide;  // [size], or null
  Scalar* grad_logits;                        // [size], or null
  double* grad_gamma;                         // [size], or null
  double* grad_temperature;                   // [size], or null
};

namespace cpu {

// Rows (elements of the binary map: classes = 1) per unit of work; depends only on the shape.
int64_t calibration_map_chunk_rows(int64_t rows, int64_t classes);

// Returns the first invalid row, or -1.
template <typename Scalar>
int64_t calibration_map_forward(const CalibrationMapForward<Scalar>& args, int64_t row_begin, int64_t row_end);

template <typename Scalar>
void calibration_map_backward(const CalibrationMapBackward<Scalar>& args, int64_t row_begin, int64_t row_end);

template <typename Scalar>
int64_t binary_calibration_map_forward(const BinaryCalibrationMapForward<Scalar>& args, int64_t begin, int64_t end);

template <typename Scalar>
void binary_calibration_map_backward(const BinaryCalibrationMapBackward<Scalar>& args, int64_t begin, int64_t end);

}  // namespace cpu

namespace cuda {

template <typename Scalar>
int calibration_map_forward(const CalibrationMapForward<Scalar>& args, void* stream);

template <typename Scalar>
int calibration_map_backward(const CalibrationMapBackward<Scalar>& args, void* stream);

template <typename Scalar>
int binary_calibration_map_forward(const BinaryCalibrationMapForward<Scalar>& args, void* stream);

template <typename Scalar>
int binary_calibration_map_backward(const BinaryCalibrationMapBackward<Scalar>& args, void* stream);

}  // namespace cuda

}  // namespace focalkern
