// What the kernels take and where they are: plain argument structs, and one declaration per operator, direction and
// device. Neither torch nor CUDA is known here, so a kernel can be read, built and tested without them.
#pragma once

#include <cstdint>
#include <vector>

#include "math/binning.h"
#include "math/portable.h"

namespace focalkern {

// Where the element of (row, class) lies, in elements from the base pointer. Rows are the positions of the unreduced
// loss in their logical order; [N, C, d1, ...] in any memory format is two nested runs of rows at most.
struct RowLayout {
  int64_t inner;  // rows in the innermost run
  int64_t outer_stride;
  int64_t inner_stride;
  int64_t class_stride;

  FK_HOST_DEVICE int64_t row_offset(int64_t row) const {
    return (row / inner) * outer_stride + (row % inner) * inner_stride;
  }
};

// Labels as they were given: a conversion would cost a launch and a copy.
struct Labels {
  enum class Type : int32_t { kInt64, kInt32, kUInt8 };
  const void* data;  // [rows], contiguous
  Type type;

  FK_HOST_DEVICE int64_t operator[](int64_t row) const {
    if (type == Type::kInt64) return static_cast<const int64_t*>(data)[row];
    if (type == Type::kInt32) return static_cast<const int32_t*>(data)[row];
    return static_cast<const uint8_t*>(data)[row];
  }
};

// ---- losses of rows ------------------------------------------------------------------------------------------------

// The focal loss and its relatives. A loss is a struct in a header of its own in math: see math/row_loss.h.
struct FocalRow;
struct PolyFocalRow;
struct DualFocalRow;
struct BrierRow;

// Exactly one of `labels.data` and `target_probs` is set. Pointers marked "or null" are absent options.
template <typename Scalar>
struct FocalLossArgs {
  using Real = compute_t<Scalar>;

  int64_t rows;
  int64_t classes;
  const Scalar* logits;  // [rows, classes] in `layout`
  RowLayout layout;

  Labels labels;
  int64_t ignore_index;
  const Real* target_probs;  // [rows, classes] in `target_layout`, or null
  RowLayout target_layout;
  Real label_smoothing;

  const Real* class_weight;  // [classes], or null
  bool detach_modulation;

  // gamma[row * gamma_stride], or with `edges`: the table gamma[n_bins], looked up at p.
  const Real* gamma;     // or null: then `gamma_value` serves every row
  int64_t gamma_stride;  // 0 or 1
  Real gamma_value;
  Real epsilon;       // of the poly focal loss
  const Real* edges;  // [n_bins + 1], or null
  int64_t n_bins;

  // What a row keeps for its backward pass, as three or four arrays: m, its largest logit or that of its target;
  // log sum_j exp(z_j - m); log u of the target (labels without smoothing) or of the largest class (otherwise), or a
  // sum of squares; and the class that some losses mark. On the CPU the focal loss of labels keeps other numbers
  // (cpu/row_loss/epilogue_focal.h), and so do class probabilities and label smoothing (cpu/row_loss/soft_targets.h).
  Real* saved;  // [kSavedNumbers, rows]
};

template <typename Scalar>
struct FocalLossForward : FocalLossArgs<Scalar> {
  compute_t<Scalar>* row_loss;  // [rows], or null if only the sums are wanted
};

// What a run of rows adds to a reduced loss. The sums are in double on every device.
struct FocalLossSums {
  double loss;
  double weight;        // class weights of the rows that were not ignored
  int64_t invalid_row;  // first row whose label is out of range, or -1
};

template <typename Scalar>
struct FocalLossBackward : FocalLossArgs<Scalar> {
  using Real = compute_t<Scalar>;
  const Real* grad_loss;  // [rows] with stride `grad_stride`
  int64_t grad_stride;    // 0 or 1
  const Real* divisor;    // what the mean was divided by, on the device of the logits, or null
  Scalar* grad_logits;    // [rows, classes] in `grad_layout`, or null
  RowLayout grad_layout;
  Real* grad_target;  // [rows, classes] in `target_layout`, or null
  Real* grad_gamma;   // [rows], or null
};

namespace cpu {

// Rows per unit of work. It depends on the shape alone, so that sums do not depend on the number of threads.
int64_t row_loss_chunk_rows(int64_t rows, int64_t classes);

template <typename Loss, typename Scalar>
FocalLossSums row_loss_forward(const FocalLossForward<Scalar>& args, int64_t row_begin, int64_t row_end);

template <typename Loss, typename Scalar>
void row_loss_backward(const FocalLossBackward<Scalar>& args, int64_t row_begin, int64_t row_end);

}  // namespace cpu

namespace cuda {

// Launchers put their work on `stream` (a cudaStream_t) and return a cudaError_t, 0 for success.

// Size in bytes of the scratch memory that a forward pass needs: to reduce the loss, and for few long rows; 0 for a
// small batch. It need not be cleared.
int64_t focal_loss_workspace(int64_t rows, int64_t classes, bool reduced);

// `loss` (or null for no reduction) receives the sum or the mean, `divisor` what the mean was divided by (1 for a sum).
template <typename Scalar>
int focal_loss_forward(const FocalLossForward<Scalar>& args, bool mean, compute_t<Scalar>* loss,
                       compute_t<Scalar>* divisor, void* workspace, void* stream);

template <typename Scalar>
int focal_loss_backward(const FocalLossBackward<Scalar>& args, void* stream);

// The other losses, with the same workspace.
template <typename Loss, typename Scalar>
int row_loss_forward(const FocalLossForward<Scalar>& args, bool mean, compute_t<Scalar>* loss,
                     compute_t<Scalar>* divisor, void* workspace, void* stream);

template <typename Loss, typename Scalar>
int row_loss_backward(const FocalLossBackward<Scalar>& args, void* stream);

}  // namespace cuda

// ---- losses of one logit -------------------------------------------------------------------------------------------

enum class SigmoidLoss : int32_t { kFocal = 0, kAsymmetric = 1, kQuality = 2 };

enum class ElementType : int32_t { kFloat, kDouble, kHalf, kBFloat16, kUInt8, kInt32, kInt64 };

constexpr int kMaxDims = 10;

// Elements in the order in which the results lie in memory, dense; every other tensor is reached by strides. Dims that
// run together in all tensors are one, so that an ordinary case has one dim.
struct ElementSpace {
  int64_t size;  // of all
  int dims;
  int64_t sizes[kMaxDims];  // outermost first
};

// A tensor broadcast to the space, or one number.
struct Operand {
  const void* data;  // or null: `value`
  ElementType type;
  bool dense;                 // lies as the results do
  int64_t strides[kMaxDims];  // in elements
  double value;
};

template <typename Scalar>
struct SigmoidLossArgs {
  using Real = compute_t<Scalar>;

  SigmoidLoss loss_kind;
  ElementSpace space;
  Operand input;          // of Scalar
  Operand target;         // shares, or labels
  bool target_is_labels;  // one-hot: 1 where the label is the position along `class_dim`
  bool has_alpha;         // of the focal loss; without it t and 1 - t weigh 1
  int class_dim;          // a dim of the space of its own, with stride 0 in `target`
  int64_t classes;        // label `classes` is background, a row of zeros
  int64_t ignore_index;   // of labels: elements that count nothing
  Operand gamma;          // numbers or of Real, as those that follow
  Operand second;         // alpha, or gamma_positive
  Operand weight;         // or the number 1
  Real margin;            // asymmetric loss
};

template <typename Scalar>
struct SigmoidLossForward : SigmoidLossArgs<Scalar> {
  // Unreduced losses, in Scalar or (`loss_wide`) in the type of the computation; both null if only the sum is wanted.
  Scalar* loss;
  compute_t<Scalar>* loss_wide;
};

struct SigmoidLossSums {
  double loss;
  int64_t count;          // elements that were not ignored
  bool is_valid;          // no label was out of range
  int64_t invalid_label;  // otherwise: one that was
};

template <typename Scalar>
struct SigmoidLossBackward : SigmoidLossArgs<Scalar> {
  using Real = compute_t<Scalar>;
  Operand grad_loss;    // of Real: one for all, or one per element
  const Real* divisor;  // what the mean was divided by, or null
  Scalar* grad_input;   // or null, as those that follow
  Real* grad_target;
  Real* grad_gamma;
  Real* grad_second;  // gamma_positive's
};

namespace cpu {

// Elements per unit of work, whatever the number of threads.
constexpr int64_t kSigmoidLossChunk = 16384;

// `every` are the losses of every logit there is, or null, as are the slopes in the backward pass.
template <typename Scalar>
SigmoidLossSums sigmoid_loss_forward(const SigmoidLossForward<Scalar>& args, int64_t begin, int64_t end,
                                     const compute_t<Scalar>* every);

template <typename Scalar>
void sigmoid_loss_backward(const SigmoidLossBackward<Scalar>& args, int64_t begin, int64_t end, const Scalar* every);

// To be looked up instead of computed, from kEveryLogitPays elements per thread on; empty where they cannot be.
constexpr int64_t kEveryLogitPays = int64_t(1) << 20;
std::vector<float> sigmoid_loss_of_every_logit(const SigmoidLossForward<BFloat16>& args);
std::vector<BFloat16> sigmoid_slope_of_every_logit(const SigmoidLossBackward<BFloat16>& args);

}  // namespace cpu

namespace cuda {

// Size in bytes of the scratch memory that a reduced forward pass needs; it need not be cleared.
int64_t sigmoid_loss_workspace(int64_t size);

// `total` (or null for no reduction) receives the sum or the mean, `divisor` what the mean was divided by (1 for a
// sum).
template <typename Scalar>
int sigmoid_loss_forward(const SigmoidLossForward<Scalar>& args, bool mean, compute_t<Scalar>* total,
                         compute_t<Scalar>* divisor, void* workspace, void* stream);

template <typename Scalar>
int sigmoid_loss_backward(const SigmoidLossBackward<Scalar>& args, void* stream);

}  // namespace cuda

// ---- calibration map -----------------------------------------------------------------------------------------------

// Exactly one of `output` and `output_wide` is set (and of `grad_output` and `grad_output_wide`): under autocast a
// narrow input has an output in the compute type, as softmax does.
template <typename Scalar>
struct CalibrationMapArgs {
  using Real = compute_t<Scalar>;

  int64_t rows;
  int64_t classes;      // at least 2
  const Scalar* input;  // [rows, classes], contiguous: logits, or probabilities
  bool input_is_probs;
  bool log_output;

  // gamma[row * gamma_stride], or `gamma_value` for every row where the pointer is null; the same for temperature.
  // In double whatever Scalar is: 1 + gamma is formed before rounding.
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

// A row that has no answer becomes NaN throughout: a NaN or +inf input, no class that can occur, probabilities that are
// negative or do not sum to 1, gamma or temperature outside their domain.
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

// The same map for two classes, on one logit each: elementwise.
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

// Rows (elements of the binary map: classes = 1) per unit of work, a function of the shape alone.
int64_t calibration_map_chunk_rows(int64_t rows, int64_t classes);

// Returns the first row that has no answer, or -1.
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

// ---- calibration grid ----------------------------------------------------------------------------------------------

// Why a sample cannot be calibrated. The first offender is handed over as one number, row * kRowProblems + problem,
// with kNoRowProblem for none: the least of these numbers over any split of the rows names the first bad row.
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

// The samples. An input of -inf (probability 0) is a class that cannot occur.
template <typename Scalar>
struct CalibrationGridSamples {
  int64_t rows;         // samples that count
  int64_t classes;      // at least 2
  const Scalar* input;  // [*, classes] with stride `row_stride`: logits, or probabilities
  int64_t row_stride;
  bool input_is_probs;
  Labels labels;        // [*]
  const int64_t* kept;  // [rows]: the rows of `input` and `labels` that count, or null for all of them

  // Written by `prepare`, read by everything after it. Rows are counted among those kept.
  int32_t* top;      // [rows]: class of the largest input, the first one of equals
  uint8_t* correct;  // [rows]: 1 where top is the label

  FK_HOST_DEVICE int64_t input_row(int64_t row) const { return kept == nullptr ? row : kept[row]; }
};

// A block of temperatures of the grid. Cell (g, t) of a table is table[g * table_stride + t].
template <typename Scalar>
struct CalibrationGridBlock {
  CalibrationGridSamples<Scalar> samples;
  int64_t n_gammas;
  int64_t n_temperatures;
  const double* gammas;        // [n_gammas], on the host: what the plan is made of
  const double* temperatures;  // [n_temperatures], on the device of the input
  int64_t n_bins;
  BinEstimator estimator;

  // Tables in double, on the device of the input; null where a criterion is not wanted.
  double* ece;
  double* mce;
  double* nll;
  double* brier;
  int64_t table_stride;

  // Whether the confidences are wanted although no table needs them.
  bool keep_confidence;
};

// What a grid's gammas need once, on the host (math/grid_plan.h).
struct CalibrationGridPlan;
// Whether sums over the classes may serve several gammas of a block.
template <typename Scalar>
bool calibration_grid_shares_sums(const CalibrationGridBlock<Scalar>& block) {
  return sizeof(compute_t<Scalar>) == sizeof(float) && block.brier == nullptr;
}

// Running sums over samples, for grids that are computed batch by batch. What the cells of a block have added up to,
// per bucket of their confidences.
template <typename Real>
struct CalibrationSums {
  int64_t rows;
  int64_t n_gammas;
  int64_t n_temperatures;
  const Real* confidence;  // [n_temperatures, n_gammas, rows]: what a block with keep_confidence leaves behind
  const uint8_t* correct;  // [rows]
  int64_t n_buckets;
  bool sketch;  // buckets of sketch_bucket, or else of equal_width_bin

  // Added to. Those of cell (g, t) begin at (g * cell_stride + t) * n_buckets.
  int64_t* count;
  double* confidence_sum;
  int64_t* correct_sum;
  int64_t cell_stride;
};
// Rows that one call takes at most.
constexpr int64_t kMaxCalibrationSumRows = int64_t{1} << 22;

namespace cpu {

// All three are functions of the shape alone, so that sums do not depend on the number of threads.
int64_t calibration_grid_chunk_rows(int64_t rows, int64_t classes);
// Temperatures that one block should take: enough to keep every thread busy, few enough to keep scratch memory and
// the wait between two blocks small.
int64_t calibration_grid_block_temperatures(int64_t rows, int64_t classes, int64_t n_gammas, int64_t real_size);

// Scratch memory of one block, between its two stages.
template <typename Scalar>
struct CalibrationGridScratch {
  // Confidence of the class `top` in each cell, rounded to the compute type.
  compute_t<Scalar>* confidence;  // [n_temperatures, n_gammas, rows]
  // Sums over the rows of one chunk.
  double* nll;    // [chunks, n_temperatures, n_gammas], or null
  double* brier;  // likewise
};

// Checks the rows, fills in top and correct; returns the first problem (row counted in `input`).
template <typename Scalar>
int64_t calibration_grid_prepare(const CalibrationGridSamples<Scalar>& samples, int64_t row_begin, int64_t row_end);

// Stage 1: confidences and sums, for whole chunks of rows.
template <typename Scalar>
void calibration_grid_confidences(const CalibrationGridBlock<Scalar>& block, const CalibrationGridPlan& plan,
                                  const CalibrationGridScratch<Scalar>& scratch, int64_t chunk_begin,
                                  int64_t chunk_end);

// Stage 2: the cells of the tables, cell = t * n_gammas + g.
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

// The confidences, if they are kept, are at the start of the workspace.
template <typename Scalar>
int calibration_grid_block(const CalibrationGridBlock<Scalar>& block, const CalibrationGridPlan& plan, void* workspace,
                           void* stream);

template <typename Real>
int calibration_sums(const CalibrationSums<Real>& args, void* stream);

}  // namespace cuda

}  // namespace focalkern
