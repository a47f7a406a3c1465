// Instructions of spline scaling, and of temperature scaling beside it: see instruction_counts.py.
//
//   spline_counts maps|backward|fit classes float32|float64          prints: elements first second
//
//   maps      temperature scaling, then the map that keeps the order
//   backward  the backward pass of that map; the second number is 0
//   fit       value, gradient and Hessian of the curve, then value and gradient of a vector
//
// A step takes a microsecond or more, so `backward` and `fit` read one tile of rows.

#include <algorithm>
#include <cstdlib>
#include <cstring>

#include "count_steps.h"
#include "cpu/spline.h"
#include "kernels/calibration_map.h"

namespace {

constexpr int64_t kKnots = 10;

// A curve that keeps the order: straight pieces with slopes from 0.05 to 0.5.
struct Curve {
  double positions[kKnots], coefficients[(kKnots + 1) * 4] = {}, basis[(kKnots + 1) * 4 * kKnots] = {};
  Curve() {
    double value = 0;
    for (int k = 0; k < kKnots; ++k) positions[k] = -9 + 1.5 * k;
    for (int piece = 0; piece <= kKnots; ++piece) {
      const double slope = 0.05 + 0.045 * piece;
      coefficients[4 * piece] = value;
      coefficients[4 * piece + 1] = slope;
      if (piece > 0) value += 1.5 * slope;
      basis[4 * kKnots * piece + std::min<int64_t>(piece, kKnots - 1)] = 1;
    }
  }
};

template <typename Scalar>
int count_spline_of(const char* op, int64_t classes) {
  constexpr SplineStorage kStorage = sizeof(Scalar) == 8 ? SplineStorage::kDouble : SplineStorage::kFloat;
  const bool is_maps = std::strcmp(op, "maps") == 0;
  const int64_t rows = is_maps ? std::max<int64_t>(6, 6400 / classes) : std::clamp<int64_t>(2048 / classes, 1, 64);
  std::mt19937 random(0);
  std::vector<Scalar> logits = normal_logits<Scalar>(rows * classes, random), output(rows * classes);
  std::vector<int64_t> labels(rows);
  for (int64_t row = 0; row < rows; ++row) {
    labels[row] = random() % classes;
    logits[row * classes + labels[row]] += 8;
  }
  const std::vector<double> weight(rows, 1.0), by_class(classes, 0.1);
  const Curve of;
  const SplineInput input{logits.data(), kStorage, false, rows, classes, 1.3, 1e-5};
  const SplineCurve curve{kKnots, of.positions, of.coefficients};
  const SplineScores scores{1.1, nullptr, nullptr, nullptr, false};
  const SplineTargets targets{labels.data(), weight.data()};
  if (is_maps) {
    CalibrationMapForward<Scalar> temperature{};
    temperature.rows = rows;
    temperature.classes = classes;
    temperature.input = logits.data();
    temperature.temperature_value = 1.3;
    temperature.output = output.data();
    const SplineMapForward forward{input, curve, scores, false, true, output.data(), kStorage, 1e-3};
    return count(
        rows * classes, [&] { cpu::calibration_map_forward(temperature, 0, rows); },
        [&] { cpu::spline_map_forward(forward, 0, rows); });
  }
  if (std::strcmp(op, "backward") == 0) {
    const SplineMapBackward backward{input,    curve,   scores,  false,        logits.data(),
                                     kStorage, nullptr, nullptr, output.data()};
    cpu::SplineMapGradient sums(kKnots, 0);
    return count(rows * classes, [&] { cpu::spline_map_backward(backward, 0, rows, sums); }, [] {});
  }
  SplineScores of_vector = scores;
  of_vector.weight = of_vector.bias = by_class.data();
  cpu::SplineCurveSums curve_sums;
  cpu::SplineLinearSums linear_sums(classes);
  return count(
      rows * classes, [&] { cpu::spline_curve_sums(input, curve, scores, targets, of.basis, 0, rows, curve_sums); },
      [&] { cpu::spline_linear_sums(input, curve, of_vector, targets, nullptr, 0, rows, linear_sums); });
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 4) return 2;
  const int64_t classes = std::atoll(argv[2]);
  return std::strcmp(argv[3], "float64") == 0 ? count_spline_of<double>(argv[1], classes)
                                              : count_spline_of<float>(argv[1], classes);
}
