// Calibration errors on a grid of gammas and temperatures, and running sums for them: arguments and launchers.
// Formulas: math/binning.h.
#pragma once

#include <cstdint>

#include "kernels/layout.h"
#include "math/binning.h"
#include "math/portable.h"

namespace focalkern {

// Reasons why a row is invalid. row * kRowProblems + problem identifies a problem of a row, kNoRowProblem none. The
// minimum of this number over any split of the rows gives the first invalid row.
enum class RowProblem : int64_t {
  kNotANumber,
  kPositiveInfinity,
  kNoFiniteLogit,  // all -inf, or all probabilities zero
  kNegativeProbability,
  kProbabilitySum,  // further than probability_sum_tolerance from 1
  kLabelOutOfRange,
};
constexpr int64_t kRowProblems = 8;
constexpr int64_t kNoRowProblem = INT64_MAX;

// The samples. An input of -inf (probability 0) is an impossible class.
template <typename Scalar>
struct CalibrationGridSamples {
  int64_t rows;         // number of samples that count
  int64_t classes;      // at least 2
  const Scalar* input;  // [*, classes] with stride `row_stride`: logits, or probabilities
  int64_t row_stride;
  bool input_is_probs;
  Labels labels;        // [*]
  const int64_t* kept;  // [rows]: the rows of `input` and `labels` that count, or null for all of them

  // Written by `prepare`, read by all later steps. Row numbers count only the rows that `rows` selects.
  int32_t* top;      // [rows]: class of the largest input, the first one if several are equal
  uint8_t* correct;  // [rows]: 1 where top is the label

  FK_HOST_DEVICE int64_t input_row(int64_t row) const { return kept == nullptr ? row : kept[row]; }
};

// A block of temperatures of the grid. Cell (g, t) of a table is table[g * table_stride + t].
template <typename Scalar>
struct CalibrationGridBlock {
  CalibrationGridSamples<Scalar> samples;
  int64_t n_gammas;
  int64_t n_temperatures;
  const double* gammas;        // [n_gammas], on the host, for the plan
  const double* temperatures;  // [n_temperatures], on the device of the input
  int64_t n_bins;
  BinEstimator estimator;

  // Tables in double, on the device of the input; null if a criterion is not wanted.
  double* ece;
  double* mce;
  double* nll;
  double* brier;
  int64_t table_stride;

  // Whether to keep the confidences even if no table needs them.
  bool keep_confidence;
};

// Numbers that depend only on a grid's gammas; the host computes them once (math/grid_plan.h).
struct CalibrationGridPlan;
// Whether one sum over the classes may serve several gammas of a block.
template <typename Scalar>
bool calibration_grid_shares_sums(const CalibrationGridBlock<Scalar>& block) {
  return sizeof(compute_t<Scalar>) == sizeof(float) && block.brier == nullptr;
}

// Running sums over samples, for grids that are computed batch by batch: the sums of each cell of a block, per bucket
// of the confidences.
template <typename Real>
struct CalibrationSums {
  int64_t rows;
  int64_t n_gammas;
  int64_t n_temperatures;
  const Real* confidence;  // [n_temperatures, n_gammas, rows]: the confidences of a block with keep_confidence
  const uint8_t* correct;  // [rows]
  int64_t n_buckets;
  bool sketch;  // buckets of sketch_bucket if true, else of equal_width_bin

  // Sums to add to. Those of cell (g, t) begin at (g * cell_stride + t) * n_buckets.
  int64_t* count;
  double* confidence_sum;
  int64_t* correct_sum;
  int64_t cell_stride;
};
// The largest number of rows per call.
constexpr int64_t kMaxCalibrationSumRows = int64_t{1} << 22;

namespace cpu {

// These three depend only on the shape, so that sums do not depend on the number of threads.
int64_t calibration_grid_chunk_rows(int64_t rows, int64_t classes);
// Temperatures per block: enough to keep every thread busy, few enough for little scratch memory and a short wait
// between two blocks.
int64_t calibration_grid_block_temperatures(int64_t rows, int64_t classes, int64_t n_gammas, int64_t real_size);

// Scratch memory of one block, from stage 1 to stage 2.
template <typename Scalar>
struct CalibrationGridScratch {
  // Confidence of the class `top` in each cell, rounded to the compute type.
  compute_t<Scalar>* confidence;  // [n_temperatures, n_gammas, rows]
  // Sums over the rows of one chunk.
  double* nll;    // [chunks, n_temperatures, n_gammas], or null
  double* brier;  // the same for the Brier score
};

// Checks the rows and writes top and correct. Returns the first problem; its row number counts the rows of `input`.
template <typename Scalar>
int64_t calibration_grid_prepare(const CalibrationGridSamples<Scalar>& samples, int64_t row_begin, int64_t row_end);

// Stage 1: confidences and sums, for whole chunks of rows.
template <typename Scalar>
void calibration_grid_confidences(const CalibrationGridBlock<Scalar>& block, const CalibrationGridPlan& plan,
                                  const CalibrationGridScratch<Scalar>& scratch, int64_t chunk_begin,
                                  int64_t chunk_end);

// Stage 2: the values of the tables for each cell = t * n_gammas + g.
template <typename Scalar>
void calibration_grid_cells(const CalibrationGridBlock<Scalar>& block, const CalibrationGridScratch<Scalar>& scratch,
                            int64_t cell_begin, int64_t cell_end);

// Cell = t * n_gammas + g.
template <typename Real>
void calibration_sums(const CalibrationSums<Real>& args, int64_t cell_begin, int64_t cell_end);

}  // namespace cpu

namespace cuda {

// `first_problem` (on the device) receives what cpu::calibration_grid_prepare returns.
template <typename Scalar>
int calibration_grid_prepare(const CalibrationGridSamples<Scalar>& samples, int64_t* first_problem, void* stream);

int64_t calibration_grid_block_temperatures(int64_t rows, int64_t classes, int64_t n_gammas, int64_t real_size);

// Size in bytes of the scratch memory of a block; it need not be cleared.
int64_t calibration_grid_workspace(int64_t rows, int64_t classes, int64_t n_gammas, int64_t n_temperatures,
                                   int64_t n_bins, int64_t real_size);

// If confidences are kept, they are at the start of the workspace.
template <typename Scalar>
int calibration_grid_block(const CalibrationGridBlock<Scalar>& block, const CalibrationGridPlan& plan, void* workspace,
                           void* stream);

template <typename Real>
int calibration_sums(const CalibrationSums<Real>& args, void* stream);

}  // namespace cuda

}  // namespace focalkern
