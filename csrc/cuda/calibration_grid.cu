// The calibration grid: ECE, MCE, NLL and Brier score of every (gamma, temperature) of a block of temperatures.
//
// Stage 1  thread (row, temperature), in grid_confidence.cuh: writes the confidence of each (temperature, gamma, row),
// Stage 2  block (temperature, gamma): finds the edges of the bins by radix selection over (confidence, row), then adds
// Stage 3  thread (temperature, gamma): adds up the tiles' sums.
//
// Memory: the probabilities of a cell exist in registers only. Scratch memory holds confidence [temperatures, gammas,
// rows] and two sums per cell and tile of rows. The order of all sums depends only on the shape.

#include "cuda/common.cuh"
#include "cuda/grid_bins.cuh"
#include "cuda/grid_confidence.cuh"
#include "kernels/calibration_grid.h"
#include "math/grid_plan.h"

namespace focalkern::cuda {
namespace {

// ---- checking the samples ------------------------------------------------------------------------------------------

__global__ void no_problem_kernel(int64_t* first_problem) { *first_problem = kNoRowProblem; }

// One warp per row.
template <typename Scalar>
__global__ __launch_bounds__(kBlock) void calibration_grid_prepare_kernel(
    const __grid_constant__ CalibrationGridSamples<Scalar> samples, int64_t* first_problem) {
  using Real = compute_t<Scalar>;
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  const int warp = static_cast<int>(threadIdx.x) / kWarp;
  const int classes = static_cast<int>(samples.classes);
  for (int64_t row = static_cast<int64_t>(blockIdx.x) * kWarpsPerBlock + warp; row < samples.rows;
       row += static_cast<int64_t>(gridDim.x) * kWarpsPerBlock) {
    const int64_t source = samples.input_row(row);
    const Scalar* input = samples.input + source * samples.row_stride;
    Real best = -kInfinity<Real>;
    int top = INT32_MAX;
    int nan = 0;
    int negative = 0;
    double sum = 0;
    for (int k = lane; k < classes; k += kWarp) {
      const Real value = load_as_compute(input[k]);
      nan |= value != value;
      negative |= value < Real(0);
      sum += static_cast<double>(value);
      if (value > best) {
        best = value;
        top = k;
      }
    }
    const Real row_best = group_max(best, kWarp);
    if (best != row_best) top = INT32_MAX;
    for (int offset = kWarp / 2; offset > 0; offset /= 2) {
      const int other = __shfl_xor_sync(kFullWarp, top, offset);
      top = other < top ? other : top;
      nan |= __shfl_xor_sync(kFullWarp, nan, offset);
      negative |= __shfl_xor_sync(kFullWarp, negative, offset);
    }
    sum = group_sum(sum, kWarp);
    if (lane != 0) continue;

    const int64_t label = samples.labels[source];
    int problem = -1;
    if (nan != 0) {
      problem = static_cast<int>(RowProblem::kNotANumber);
    } else if (row_best == kInfinity<Real>) {
      problem = static_cast<int>(RowProblem::kPositiveInfinity);
    } else if (samples.input_is_probs && negative != 0) {
      problem = static_cast<int>(RowProblem::kNegativeProbability);
    } else if (samples.input_is_probs ? sum == 0 : row_best == -kInfinity<Real>) {
      problem = static_cast<int>(RowProblem::kNoFiniteLogit);
    } else if (samples.input_is_probs && fabs(sum - 1) > probability_sum_tolerance<Scalar>()) {
      problem = static_cast<int>(RowProblem::kProbabilitySum);
    } else if (label < 0 || label >= samples.classes) {
      problem = static_cast<int>(RowProblem::kLabelOutOfRange);
    }
    if (problem >= 0) {
      // A minimum does not depend on the order of the threads.
      atomicMin(reinterpret_cast<long long*>(first_problem), static_cast<long long>(source * kRowProblems + problem));
    }
    samples.top[row] = top < classes ? top : 0;
    samples.correct[row] = top == label ? 1 : 0;
  }
}

// ---- stage 3 -------------------------------------------------------------------------------------------------------

__global__ __launch_bounds__(kBlock) void calibration_grid_mean_kernel(const double* sums, int64_t row_tiles,
                                                                       int64_t rows, int64_t n_temperatures,
                                                                       int64_t n_gammas, int64_t table_stride,
                                                                       double* table) {
  const int64_t cells = n_temperatures * n_gammas;
  const int64_t cell = static_cast<int64_t>(blockIdx.x) * kBlock + threadIdx.x;
  if (cell >= cells) return;
  double sum = 0;
  for (int64_t tile = 0; tile < row_tiles; ++tile) sum += sums[tile * cells + cell];
  table[cell % n_gammas * table_stride + cell / n_gammas] = sum / static_cast<double>(rows);
}

// ---- launchers -----------------------------------------------------------------------------------------------------

int64_t aligned(int64_t bytes) { return divide_up(bytes, 256) * 256; }

int64_t confidence_bytes(int64_t rows, int64_t n_gammas, int64_t n_temperatures, int64_t real_bytes) {
  return aligned(rows * n_gammas * n_temperatures * real_bytes);
}

int64_t sums_bytes(int64_t rows, int64_t n_gammas, int64_t n_temperatures) {
  const GridPlan plan = plan_grid(rows, n_temperatures);
  return aligned(plan.row_tiles * n_temperatures * n_gammas * static_cast<int64_t>(sizeof(double)));
}

// First the gammas that share sums, up to kSharedGammas per launch; then the others, up to kGammasAtOnce per launch.
template <typename Scalar>
int launch_confidences(const CalibrationGridBlock<Scalar>& block, const CalibrationGridPlan& gammas,
                       const GridPlan& plan, const Scratch<Scalar>& scratch, void* stream) {
  int error = cudaSuccess;
  if constexpr (sizeof(Scalar) < sizeof(double)) {
    SharedGammas tile = {};
    const auto flush = [&] {
      if (error == cudaSuccess && tile.count > 0) {
        static_assert(kMaxReciprocals == 2, "one kernel for each number of whole gammas");
        auto* kernel = tile.reciprocals == 2   ? calibration_grid_shared_kernel<Scalar, 2>
                       : tile.reciprocals == 1 ? calibration_grid_shared_kernel<Scalar, 1>
                                               : calibration_grid_shared_kernel<Scalar, 0>;
        error = launch(kernel, plan.blocks(), kBlock, stream, block, plan, tile, scratch);
      }
      tile = {};
    };
    for (size_t g = 0; g < gammas.gammas.size(); ++g) {
      if (gammas.gammas[g].route == Route::kExponential) continue;
      tile.add(gammas.gammas[g], static_cast<int>(g));
      if (tile.count == kSharedGammas) flush();
    }
    flush();
  }
  auto* kernel = block.brier != nullptr ? calibration_grid_confidence_kernel<Scalar, true>
                                        : calibration_grid_confidence_kernel<Scalar, false>;
  OtherGammas tile = {};
  const auto flush = [&] {
    if (error == cudaSuccess && tile.count > 0) {
      error = launch(kernel, plan.blocks(), kBlock, stream, block, plan, tile, scratch);
    }
    tile = {};
  };
  for (size_t g = 0; g < gammas.gammas.size(); ++g) {
    if (gammas.gammas[g].route != Route::kExponential) continue;
    tile.add(gammas.gammas[g].gamma, static_cast<int>(g));
    if (tile.count == kGammasAtOnce) flush();
  }
  flush();
  return error;
}

template <typename Scalar>
bool samples_are_valid(const CalibrationGridSamples<Scalar>& samples) {
  return samples.rows >= 1 && samples.rows <= INT32_MAX - kBlock && samples.classes >= 1 &&
         samples.classes <= INT32_MAX - kBlock;
}

}  // namespace

int64_t calibration_grid_block_temperatures(int64_t rows, int64_t classes, int64_t n_gammas, int64_t real_size) {
  (void)classes;
  return grid_block_temperatures(rows, n_gammas, real_size);
}

int64_t calibration_grid_workspace(int64_t rows, int64_t classes, int64_t n_gammas, int64_t n_temperatures,
                                   int64_t n_bins, int64_t real_size) {
  (void)classes;
  (void)n_bins;
  return confidence_bytes(rows, n_gammas, n_temperatures, real_size) + 2 * sums_bytes(rows, n_gammas, n_temperatures);
}

template <typename Scalar>
int calibration_grid_prepare(const CalibrationGridSamples<Scalar>& samples, int64_t* first_problem, void* stream) {
  if (!samples_are_valid(samples)) return cudaErrorInvalidValue;
  const int error = launch(no_problem_kernel, 1, 1, stream, first_problem);
  if (error != cudaSuccess) return error;
  const int64_t blocks = divide_up(samples.rows, kWarpsPerBlock);
  return launch(calibration_grid_prepare_kernel<Scalar>, blocks < kMaxGrid ? blocks : kMaxGrid, kBlock, stream, samples,
                first_problem);
}

template <typename Scalar>
int calibration_grid_block(const CalibrationGridBlock<Scalar>& block, const CalibrationGridPlan& gammas,
                           void* workspace, void* stream) {
  using Real = compute_t<Scalar>;
  const int64_t rows = block.samples.rows;
  const int64_t cells = block.n_temperatures * block.n_gammas;
  if (!samples_are_valid(block.samples) || cells < 1 || cells > INT32_MAX || block.n_bins < 1) {
    return cudaErrorInvalidValue;
  }
  const bool binned = block.ece != nullptr || block.mce != nullptr;
  const GridPlan plan = plan_grid(rows, block.n_temperatures);
  char* memory = static_cast<char*>(workspace);
  const int64_t offset = confidence_bytes(rows, block.n_gammas, block.n_temperatures, sizeof(Real));
  auto* nll = reinterpret_cast<double*>(memory + offset);
  auto* brier = reinterpret_cast<double*>(memory + offset + sums_bytes(rows, block.n_gammas, block.n_temperatures));
  const Scratch<Scalar> scratch = {binned || block.keep_confidence ? reinterpret_cast<Real*>(memory) : nullptr,
                                   block.nll != nullptr ? nll : nullptr, block.brier != nullptr ? brier : nullptr};
  int error = launch_confidences(block, gammas, plan, scratch, stream);
  if (error == cudaSuccess && binned) {
    const CellArgs<Real> args = {scratch.confidence,
                                 block.samples.correct,
                                 static_cast<int>(rows),
                                 block.n_gammas,
                                 block.n_bins,
                                 block.estimator,
                                 block.ece,
                                 block.mce,
                                 block.table_stride};
    error = launch(calibration_grid_bins_kernel<Real>, cells, kBlock, stream, args);
  }
  const auto mean = [&](const double* sums, double* table) {
    if (error != cudaSuccess || table == nullptr) return;
    error = launch(calibration_grid_mean_kernel, divide_up(cells, kBlock), kBlock, stream, sums, plan.row_tiles, rows,
                   block.n_temperatures, block.n_gammas, block.table_stride, table);
  };
  mean(nll, block.nll);
  mean(brier, block.brier);
  return error;
}

#define FK_INSTANTIATE(Scalar)                                                                                        \
  template int calibration_grid_prepare<Scalar>(const CalibrationGridSamples<Scalar>&, int64_t*, void*);              \
  template int calibration_grid_block<Scalar>(const CalibrationGridBlock<Scalar>&, const CalibrationGridPlan&, void*, \
                                              void*);
FK_INSTANTIATE(Half)
FK_INSTANTIATE(BFloat16)
FK_INSTANTIATE(float)
FK_INSTANTIATE(double)
#undef FK_INSTANTIATE

}  // namespace focalkern::cuda
