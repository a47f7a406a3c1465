// Spline scaling on the CPU: arguments of its functions. Formulas: math/spline.h.
//
// Rows of `input` are adjacent, [rows, classes], of any storage type; everything is computed in double. Functions take
// a range of rows and start no threads.
#pragma once

#include <cstdint>
#include <vector>

#include "kernels.h"

namespace focalkern::cpu {

constexpr int64_t kSplineMaxKnots = 255;     // of the map
constexpr int64_t kSplineMaxFitKnots = 15;   // of the sums
constexpr int64_t kSplineBinsPerUnit = 64;   // of the histogram of log-odds
constexpr int64_t kSplineHistogramEnd = 60;  // from minus that on
constexpr int64_t kSplineBins = 2 * kSplineHistogramEnd * kSplineBinsPerUnit;

enum class SplineStorage { kHalf, kBFloat16, kFloat, kDouble };

// Rows and the features x and u of their classes.
struct SplineInput {
  const void* input;  // [rows, classes]
  SplineStorage storage;
  bool is_probs;
  int64_t rows;
  int64_t classes;
  double temperature;
  double floor;           // e
  bool in_steps = false;  // round to the grid on which rounding cannot change the order (math/spline.h)
};

struct SplineCurve {
  int64_t knots;               // m
  const double* positions;     // [m], ascending
  const double* coefficients;  // [m + 1, 4]
};

struct SplineScores {
  double factor;          // 1 + a
  const double* weight;   // [classes], v; null is 0
  const double* bias;     // [classes], b; null is 0
  const double* extra;    // [rows, classes], added to the scores; null is 0
  bool keep_zeros;        // a class of logit -inf, or probability 0, keeps the probability 0
  int64_t first_row = 0;  // of extra, and of the arrays [rows, classes] in double of the backward pass
};

// ---- the map -------------------------------------------------------------------------------------------------------

struct SplineMapForward {
  SplineInput rows;
  SplineCurve curve;
  SplineScores scores;
  bool log_output;
  bool keep_order;   // of the classes of every row, whatever rounding does
  void* output;      // [rows, classes]
  SplineStorage to;  // of output
  double tolerance;  // of the sums of probabilities
};
// Returns the first row without an answer, whose outputs are NaN, or -1.
int64_t spline_map_forward(const SplineMapForward& args, int64_t row_begin, int64_t row_end);

// Sums over rows that the gradients of the parameters are.
struct SplineMapGradient {
  explicit SplineMapGradient(int64_t knots = 0, int64_t classes = 0);
  void add(const SplineMapGradient& other);
  double factor = 0, temperature = 0, floor = 0;
  std::vector<double> coefficients;  // [m + 1, 4]
  std::vector<double> weight, bias;  // [classes], or nothing
};

struct SplineMapBackward {
  SplineInput rows;
  SplineCurve curve;
  SplineScores scores;
  bool log_output;
  const void* grad_output;  // [rows, classes]
  SplineStorage of_grad;
  const double* of_x;   // [rows, classes], added to dL/dx: what the matrix gives; null is 0
  double* grad_scores;  // [rows, classes] dL/dscore; null if not wanted
  void* grad_input;     // [rows, classes], of the input's storage; null if not wanted
};
void spline_map_backward(const SplineMapBackward& args, int64_t row_begin, int64_t row_end, SplineMapGradient& sums);

// x of the rows, to `output` [row_end - row_begin, classes].
void spline_log_probs(const SplineInput& rows, double* output, int64_t row_begin, int64_t row_end);

// ---- sums for the fit ----------------------------------------------------------------------------------------------

struct SplineTargets {
  const int64_t* target;  // [rows]
  const double* weight;   // [rows]
};

// Sums over rows with p = exp(log p), F the derivative of a score in (a, f_1, ..., f_m), mean = sum_j p_j F_j.
struct SplineCurveSums {
  static constexpr int64_t kSize = kSplineMaxFitKnots + 1;
  double nll = 0;
  double x_squared = 0;             // p x^2
  double of_target_x = 0;           // x of the target
  double moments[kSize][12] = {};   // per piece: p s^k for k < 7, 0, and p x s^k for k < 4
  double of_target[kSize][4] = {};  // s^k of the target
  double means[kSize][kSize] = {};  // mean mean'
  void add(const SplineCurveSums& other);
};
// basis: [m + 1, 4, m], the coefficients of the spline that is 1 at one knot and 0 at the others.
void spline_curve_sums(const SplineInput& rows, const SplineCurve& curve, const SplineScores& scores,
                       const SplineTargets& targets, const double* basis, int64_t row_begin, int64_t row_end,
                       SplineCurveSums& sums);
// gradient [m + 1] and Hessian [m + 1, m + 1] of the sum of weight * -log p_target in (a, f).
void spline_curve_derivatives(const SplineCurveSums& sums, int64_t knots, const double* basis, double* gradient,
                              double* hessian);

// The gradient alone, with that in a vector, or the slopes for a matrix.
struct SplineLinearSums {
  explicit SplineLinearSums(int64_t classes = 0) : weight(classes), bias(classes) {}
  void add(const SplineLinearSums& other);
  double nll = 0;
  double moments[kSplineMaxFitKnots + 1][4] = {};  // per piece: r s^k with r = w (p - [target])
  double x = 0;                                    // r x
  std::vector<double> weight, bias;                // [classes]: r x and r
};
// slopes: [rows, classes], r; null if not wanted.
void spline_linear_sums(const SplineInput& rows, const SplineCurve& curve, const SplineScores& scores,
                        const SplineTargets& targets, double* slopes, int64_t row_begin, int64_t row_end,
                        SplineLinearSums& sums);

// Per 1 / T: the sum of -w log((1 - e) q_target + e / C), and its slope in 1 / T. Here e may be 0.
void spline_temperature_sums(const SplineInput& rows, const SplineTargets& targets, const double* betas,
                             int64_t n_betas, int64_t row_begin, int64_t row_end, double* values, double* slopes);

// counts [kSplineBins]: w P (1 - P) by u.
void spline_histogram(const SplineInput& rows, const double* weight, int64_t row_begin, int64_t row_end,
                      double* counts);
// The sum of w times the variance of the logits over `scale` of a row, each at least the largest one - `lowest`.
double spline_spread(const SplineInput& rows, const double* weight, double scale, double lowest, int64_t row_begin,
                     int64_t row_end);

// Rows per unit of work: it depends on sizes alone, so that sums do not depend on the number of threads.
int64_t spline_chunk_rows(int64_t rows, int64_t classes);

}  // namespace focalkern::cpu
