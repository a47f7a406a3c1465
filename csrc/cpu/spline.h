// Spline scaling on the CPU: its functions. Arguments: kernels/spline.h; formulas: math/spline.h.
//
// Functions take a range of rows and start no threads.
#pragma once

#include <cstdint>
#include <vector>

#include "kernels/spline.h"

namespace focalkern::cpu {

constexpr int64_t kSplineBinsPerUnit = 64;   // of the histogram of log-odds
constexpr int64_t kSplineHistogramEnd = 60;  // from minus that on
constexpr int64_t kSplineFewClasses = 32;    // up to this many, the rows of a tile lie side by side
constexpr int64_t kSplineBins = 2 * kSplineHistogramEnd * kSplineBinsPerUnit;

// ---- the map -------------------------------------------------------------------------------------------------------

// Returns the first invalid row, or -1. Outputs of invalid rows are NaN.
int64_t spline_map_forward(const SplineMapForward& args, int64_t row_begin, int64_t row_end);

// Sums over rows; the gradients of the parameters are these sums.
struct SplineMapGradient {
  explicit SplineMapGradient(int64_t knots = 0, int64_t classes = 0);
  void add(const SplineMapGradient& other);
  double factor = 0, temperature = 0, floor = 0;
  std::vector<double> coefficients;  // [m + 1, 4]
  std::vector<double> weight, bias;  // [classes], or nothing
};

void spline_map_backward(const SplineMapBackward& args, int64_t row_begin, int64_t row_end, SplineMapGradient& sums);

// Computes x of the rows and writes it to `output` [row_end - row_begin, classes]; and u to `odds`, if given.
void spline_log_probs(const SplineInput& rows, double* output, int64_t row_begin, int64_t row_end,
                      double* odds = nullptr);

// ---- sums for the fit ----------------------------------------------------------------------------------------------

struct SplineFitScores : SplineScores {
  SplineFitScores(const SplineScores& scores, const double* matrix = nullptr) : SplineScores(scores), matrix(matrix) {}
  const double* matrix;  // [classes, classes], D; null is 0; for at most kSplineFewClasses
};

// Sums over rows with p = exp(log p), F the derivative of a score in (a, f_1, ..., f_m), mean = sum_j p_j F_j.
struct SplineCurveSums {
  static constexpr int64_t kSize = kSplineMaxFitKnots + 1;
  double nll = 0;
  double x_squared = 0;             // p x^2
  double of_target_x = 0;           // x of the target
  double moments[kSize][12] = {};   // per piece: p s^k for k < 7, 0, and p x s^k for k < 4
  double of_target[kSize][4] = {};  // s^k of the target
  double means[kSize][kSize] = {};  // mean times its transpose
  void add(const SplineCurveSums& other);
};
// basis: [m + 1, 4, m], the coefficients of the spline that is 1 at one knot and 0 at the others.
void spline_curve_sums(const SplineInput& rows, const SplineCurve& curve, const SplineFitScores& scores,
                       const SplineTargets& targets, const double* basis, int64_t row_begin, int64_t row_end,
                       SplineCurveSums& sums);
// gradient [m + 1] and Hessian [m + 1, m + 1] of the sum of weight * -log p_target in (a, f).
void spline_curve_derivatives(const SplineCurveSums& sums, int64_t knots, const double* basis, double* gradient,
                              double* hessian);

// The gradient in the curve and in a vector or a matrix, without the Hessian; or the slopes for a matrix.
struct SplineLinearSums {
  explicit SplineLinearSums(int64_t classes = 0, bool of_matrix = false)
      : weight(of_matrix ? classes * classes : classes), bias(classes) {}
  void add(const SplineLinearSums& other);
  double nll = 0;
  double moments[kSplineMaxFitKnots + 1][4] = {};  // per piece: r s^k with r = w (p - [target])
  double x = 0;                                    // r x
  std::vector<double> weight, bias;                // [classes]: r x and r; [classes, classes]: r_j x_k
};
// slopes: [rows, classes], r; null if not needed.
void spline_linear_sums(const SplineInput& rows, const SplineCurve& curve, const SplineFitScores& scores,
                        const SplineTargets& targets, double* slopes, int64_t row_begin, int64_t row_end,
                        SplineLinearSums& sums);

// The unweighted loss -log p_target and the Brier score of each row, [rows] each.
void spline_row_losses(const SplineInput& rows, const SplineCurve& curve, const SplineFitScores& scores,
                       const SplineTargets& targets, double* nll, double* brier, int64_t row_begin, int64_t row_end);

// The Hessian in the curve, D and b, without its block of the curve, for at most kSplineFewClasses classes. With z =
// (x, 1), F and mean as above and E = F - mean:
struct SplineMatrixSums {
  explicit SplineMatrixSums(int64_t classes);
  void add(const SplineMatrixSums& other);
  std::vector<double> pairs;  // [pairs j <= k of classes, pairs s <= t of terms of z]: w p_j ([j = k] - p_k) z_s z_t
  std::vector<double> cross;  // [classes, classes + 1, kSize]: w p_j z_t E_j
};
void spline_matrix_sums(const SplineInput& rows, const SplineCurve& curve, const SplineFitScores& scores,
                        const SplineTargets& targets, const double* basis, int64_t row_begin, int64_t row_end,
                        SplineMatrixSums& sums);
// hessian: [n, n] in (a, f) [m + 1], the rows of D [classes, classes] and b [classes]; 0 in its block of (a, f).
void spline_matrix_hessian(const SplineMatrixSums& sums, int64_t classes, int64_t knots, double* hessian);

// Per 1 / T: the sum of -w log((1 - e) q_target + e / C), and its derivative in 1 / T. Here e may be 0.
void spline_temperature_sums(const SplineInput& rows, const SplineTargets& targets, const double* betas,
                             int64_t n_betas, int64_t row_begin, int64_t row_end, double* values, double* slopes);

// counts [kSplineBins]: histogram of u with weights w P (1 - P).
void spline_histogram(const SplineInput& rows, const double* weight, int64_t row_begin, int64_t row_end,
                      double* counts);
// The sum over rows of w times the variance of x = logit / `scale`. An x below the largest of its row less `lowest`
// counts as that.
double spline_spread(const SplineInput& rows, const double* weight, double scale, double lowest, int64_t row_begin,
                     int64_t row_end);

// Rows per unit of work. It depends only on sizes, so that sums do not depend on the number of threads.
int64_t spline_chunk_rows(int64_t rows, int64_t classes);

}  // namespace focalkern::cpu
