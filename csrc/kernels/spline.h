// Spline scaling: arguments of its kernels on both devices, and the CUDA launchers. Formulas: math/spline.h.
//
// Rows of `input` are contiguous, [rows, classes], of any storage type; the computation is in double.
#pragma once

#include <cstdint>

namespace focalkern {

constexpr int64_t kSplineMaxKnots = 255;    // for the map
constexpr int64_t kSplineMaxFitKnots = 15;  // for the sums

enum class SplineStorage : int32_t { kHalf, kBFloat16, kFloat, kDouble, kFeatures };

// Rows and the features x and u of their classes.
struct SplineInput {
  const void* input;  // [rows, classes]; for kFeatures [2, rows, classes] double, x and u; on the CPU, for sums
  SplineStorage storage;
  bool is_probs;
  int64_t rows;
  int64_t classes;
  double temperature;
  double floor;           // e
  bool in_steps = false;  // whether to round to a grid on which rounding errors cannot change the order (math/spline.h)
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
  int64_t first_row = 0;  // the first row of `extra`, and of the double arrays [rows, classes] of the backward pass
};

struct SplineTargets {
  const int64_t* target;  // [rows]
  const double* weight;   // [rows]
};

struct SplineMapForward {
  SplineInput rows;
  SplineCurve curve;
  SplineScores scores;
  bool log_output;
  bool keep_order;   // whether to keep the order of the classes of every row exactly, also after rounding
  void* output;      // [rows, classes]
  SplineStorage to;  // of output
  double tolerance;  // for the sums of probabilities
};

struct SplineMapBackward {
  SplineInput rows;
  SplineCurve curve;
  SplineScores scores;
  bool log_output;
  const void* grad_output;  // [rows, classes]
  SplineStorage of_grad;
  const double* of_x;   // [rows, classes], added to dL/dx: the contribution of the matrix; null is 0
  double* grad_scores;  // [rows, classes] dL/dscore; null if not needed
  void* grad_input;     // [rows, classes], of the input's storage; null if not needed
};

namespace cuda {

// Sums over rows. Each thread adds to its own numbers and the caller adds these up, so the result is bitwise the same
// on every run. The caller sets all of them to 0 first. With m knots, pieces i from 0 to m and powers s^k from k = 0,
// the numbers are
//   backward pass of the map   factor, T, e; then 3 + 4 i + k: dL/dscore s^k
//   curve sums                 loss, p x^2, x of the target; then 3 + 16 i + k: p s^k for k < 7, 3 + 16 i + 8 + k: p x
//   s^k
//                              for k < 4, and 3 + 16 i + 12 + k: s^k of the target for k < 4
//   linear sums                loss, r x, 0; then 3 + 4 i + k: r s^k, with r = w (p - [target])
//   temperature sums           the loss of each 1 / T, then its slope in each
struct SplineSums {
  double* of_threads;  // [numbers, threads]; null if not needed
  double* of_classes;  // [groups, 2, classes]: sums of dL/dscore x and of dL/dscore; null if not needed
  int64_t numbers;
};
constexpr int64_t kSplineOfRows = 3;         // numbers that belong to no piece
constexpr int64_t kSplineCurveNumbers = 16;  // numbers per piece

// Sizes of the memory of a launch with `numbers` sums per thread (0: none), and with sums per class if by_class.
struct SplineSizes {
  int64_t threads;
  int64_t groups;
  int64_t scratch;  // doubles of a workspace for long rows; it need not be cleared
};
SplineSizes spline_sizes(int64_t rows, int64_t classes, int64_t numbers, bool by_class);

// All pointers are device pointers. Launchers put their work on `stream` and return a cudaError_t, 0 for success.
// Results of invalid rows are NaN.
int spline_map_forward(const SplineMapForward& args, double* scratch, void* stream);
int spline_map_backward(const SplineMapBackward& args, const SplineSums& sums, double* scratch, void* stream);
// Writes the features x of the rows to `output` [rows, classes].
int spline_log_probs(const SplineInput& rows, double* output, double* scratch, void* stream);

// For the fit. means: [rows, m + 1], sum_j p_j F_j with F the derivative of a score in (a, f_1, ..., f_m).
// basis: [m + 1, 4, m], the coefficients of the spline that is 1 at one knot and 0 at the others.
struct SplineFit {
  SplineInput rows;
  SplineCurve curve;
  SplineScores scores;
  SplineTargets targets;
};
int spline_curve_sums(const SplineFit& args, const double* basis, double* means, const SplineSums& sums,
                      double* scratch, void* stream);
// slopes: [rows, classes], r; null if not needed.
int spline_linear_sums(const SplineFit& args, double* slopes, const SplineSums& sums, double* scratch, void* stream);
// Per 1 / T: the sum of -w log((1 - e) q_target + e / C), and its derivative in 1 / T. Here e may be 0.
int spline_temperature_sums(const SplineInput& rows, const SplineTargets& targets, const double* betas, int64_t n_betas,
                            const SplineSums& sums, double* scratch, void* stream);

}  // namespace cuda
}  // namespace focalkern
