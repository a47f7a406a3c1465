// The calibration grid: ECE, MCE, NLL and Brier score of every (gamma, temperature) of a block of temperatures.
//
// Stage 1  thread (row, temperature): the lanes of a warp are temperatures, so all of them want the same logit at the
//          same time, and none needs another's sums. Two passes over the row: the softmax, then p_k / p_t of every
//          class for a few gammas at once. It leaves the confidence of each (temperature, gamma, row), and sums of NLL
//          and Brier score per tile of rows.
// Stage 2  block (temperature, gamma): finds the cuts between bins by radix selection over (confidence, row), then adds
//          each sample to its bin. A pair of confidence and row is unique, so ties need no care.
// Stage 3  thread (temperature, gamma): adds up the tiles' sums.
//
// Memory: the probabilities of a cell exist in registers only. Scratch is confidence [temperatures, gammas, rows] and
// two sums per cell and tile of rows. All sums are taken in an order that depends on the shape alone.

#include "cuda/common.cuh"
#include "kernels.h"
#include "math/calibration_map.h"

namespace focalkern::cuda {
namespace {

// ---- checking the samples ------------------------------------------------------------------------------------------

__global__ void no_problem_kernel(int64_t* first_problem) { *first_problem = kNoRowProblem; }

// A warp for each row.
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
      // The least of all is the same in any order.
      atomicMin(reinterpret_cast<long long*>(first_problem), static_cast<long long>(source * kRowProblems + problem));
    }
    samples.top[row] = top < classes ? top : 0;
    samples.correct[row] = top == label ? 1 : 0;
  }
}

// ---- stage 1 -------------------------------------------------------------------------------------------------------

template <typename Scalar>
struct Scratch {
  compute_t<Scalar>* confidence;  // [n_temperatures, n_gammas, rows], or null
  double* nll;                    // [row_tiles, n_temperatures, n_gammas], or null
  double* brier;                  // likewise
};

// The row as logits relative to the largest of the others, divided by T; -inf for the largest class itself.
template <typename Scalar>
struct ScaledRow {
  using Real = compute_t<Scalar>;
  const Scalar* input;
  bool is_probs;
  int top;
  Real shift;
  Real beta;

  __device__ __forceinline__ Real logit(int k) const {
    const Real value = load_as_compute(input[k]);
    return is_probs ? logit_of_probability(value) : value;
  }
  __device__ __forceinline__ Real y(int k) const { return k == top ? -kInfinity<Real> : (logit(k) - shift) * beta; }
};

// Terms that are added in Real before the sum goes on in double.
constexpr int kTermsPerSum = 16;

template <typename Scalar, bool with_brier>
__global__ __launch_bounds__(
    kBlock, sizeof(compute_t<Scalar>) == sizeof(float)
                ? 2
                : 1) void calibration_grid_confidence_kernel(const __grid_constant__ CalibrationGridBlock<Scalar> block,
                                                             const __grid_constant__ GridPlan plan,
                                                             const __grid_constant__ Scratch<Scalar> scratch) {
  using Real = compute_t<Scalar>;
  __shared__ double shared_sums[kBlock];
  const CalibrationGridSamples<Scalar>& samples = block.samples;
  const int thread = static_cast<int>(threadIdx.x);
  const int classes = static_cast<int>(samples.classes);
  const int64_t row_tile = blockIdx.x % plan.row_tiles;
  const int64_t rest = blockIdx.x / plan.row_tiles;
  const int64_t t = rest % plan.temperature_tiles * plan.lanes + thread % plan.lanes;
  const int64_t first_gamma = rest / plan.temperature_tiles * kGammasAtOnce;

  // Beyond the last temperature or gamma: any value, and nothing is written.
  const bool has_temperature = t < block.n_temperatures;
  const Real beta = inverse_temperature<Real>(block.temperatures[has_temperature ? t : 0]);
  double gammas[kGammasAtOnce];
  double nll[kGammasAtOnce];
  double brier[kGammasAtOnce];
#pragma unroll
  for (int g = 0; g < kGammasAtOnce; ++g) {
    gammas[g] = block.gammas[first_gamma + g < block.n_gammas ? first_gamma + g : first_gamma];
    nll[g] = 0;
    brier[g] = 0;
  }

  const int rows_at_once = kBlock / plan.lanes;
  for (int step = 0; step < plan.rows_per_tile; step += rows_at_once) {
    const int64_t row = row_tile * plan.rows_per_tile + step + thread / plan.lanes;
    const bool has_row = row < samples.rows;
    ScaledRow<Scalar> x = {};
    int64_t source = 0;
    Real next = -kInfinity<Real>;
    if (has_row) {
      source = samples.input_row(row);
      x.input = samples.input + source * samples.row_stride;
      x.is_probs = samples.input_is_probs;
      x.top = samples.top[row];
      x.beta = beta;
      for (int k = thread % plan.lanes; k < classes; k += plan.lanes) {
        if (k != x.top) next = fmax(next, x.logit(k));
      }
    }
    next = group_max(next, plan.lanes);
    if (!has_row || !has_temperature) continue;

    const Real top_logit = x.logit(x.top);
    // No other class can occur: any number serves as the shift.
    x.shift = next > -kInfinity<Real> ? next : top_logit;
    const Real lowest_gap = -largest_finite<Real>() / Real(16);
    const Real gap = fmax((x.shift - top_logit) * beta, lowest_gap);

    double odds_sum = 0;
    for (int k0 = 0; k0 < classes; k0 += kTermsPerSum) {
      const int end = k0 + kTermsPerSum < classes ? k0 + kTermsPerSum : classes;
      Real sum = 0;
      for (int k = k0; k < end; ++k) sum += exponential(x.y(k));
      odds_sum += static_cast<double>(sum);
    }
    const Real others = odds_sum > 0 ? static_cast<Real>(odds_sum) : Real(1);

    MapRow<Real> map;
    Real gamma[kGammasAtOnce];
    Real ratio_offset[kGammasAtOnce];
    double ratio_sum[kGammasAtOnce];
    Real square_sum[kGammasAtOnce];
#pragma unroll
    for (int g = 0; g < kGammasAtOnce; ++g) {
      map = map_row(gap, others, gammas[g]);
      gamma[g] = map.gamma;
      ratio_offset[g] = map.ratio_offset;
      ratio_sum[g] = 0;
      square_sum[g] = 0;
    }
    for (int k0 = 0; k0 < classes; k0 += kTermsPerSum) {
      const int end = k0 + kTermsPerSum < classes ? k0 + kTermsPerSum : classes;
      Real sum[kGammasAtOnce] = {};
      Real squares[kGammasAtOnce] = {};
      for (int k = k0; k < end; ++k) {
        const Real y = x.y(k);
        const Real e = exponential(y);
#pragma unroll
        for (int g = 0; g < kGammasAtOnce; ++g) {
          const Real ratio = exponential(map_log_ratio(y, e, gamma[g], map.q_scale, map.log_q_offset, ratio_offset[g]));
          sum[g] += ratio;
          if (with_brier) squares[g] += ratio * ratio;
        }
      }
#pragma unroll
      for (int g = 0; g < kGammasAtOnce; ++g) {
        ratio_sum[g] += static_cast<double>(sum[g]);
        if (with_brier) square_sum[g] += squares[g];
      }
    }

    const int label = static_cast<int>(samples.labels[source]);
    const bool correct = samples.correct[row] != 0;
    const Real y_label = correct ? Real(0) : x.y(label);
    const Real e_label = exponential(y_label);
#pragma unroll
    for (int g = 0; g < kGammasAtOnce; ++g) {
      if (first_gamma + g < block.n_gammas) {
        const Real ratios = static_cast<Real>(ratio_sum[g]);
        const Real confidence = Real(1) / (Real(1) + ratios);
        const Real log_norm = log_one_plus(ratios);  // -log p_t
        const Real log_ratio =
            correct ? Real(0)
                    : map_log_ratio(y_label, e_label, gamma[g], map.q_scale, map.log_q_offset, ratio_offset[g]);
        if (scratch.confidence != nullptr) {
          scratch.confidence[(t * block.n_gammas + first_gamma + g) * samples.rows + row] = confidence;
        }
        nll[g] += static_cast<double>(log_norm - log_ratio);
        if (with_brier) {
          // sum_k (p_k - [k = y])^2, in which 1 - p_t is p_t times the sum of the ratios.
          const double p = static_cast<double>(confidence);
          const double missing = correct ? p * ratio_sum[g] : p;
          const double of_label = correct ? 0.0 : 1.0 - 2.0 * p * static_cast<double>(exponential(log_ratio));
          brier[g] += (missing * missing + p * p * static_cast<double>(square_sum[g])) + of_label;
        }
      }
    }
  }

  // Sums over the rows of the tile: threads with one temperature are `lanes` apart.
  const auto sum_over_rows = [&](double value, double* sums, int64_t gamma) {
    __syncthreads();
    shared_sums[thread] = value;
    __syncthreads();
    if (thread >= plan.lanes || !has_temperature || gamma >= block.n_gammas) return;
    double sum = 0;
    for (int i = thread; i < kBlock; i += plan.lanes) sum += shared_sums[i];
    sums[(row_tile * block.n_temperatures + t) * block.n_gammas + gamma] = sum;
  };
#pragma unroll
  for (int g = 0; g < kGammasAtOnce; ++g) {
    if (scratch.nll != nullptr) sum_over_rows(nll[g], scratch.nll, first_gamma + g);
    if (with_brier) sum_over_rows(brier[g], scratch.brier, first_gamma + g);
  }
}

// ---- stage 2 -------------------------------------------------------------------------------------------------------

constexpr int kBinsAtOnce = 8;
constexpr int kCuts = 2 * (kBinsAtOnce + 1);  // order statistics wanted at a time: two per edge
constexpr int kDigitBits = 8;
constexpr int kDigits = 1 << kDigitBits;

template <typename Real>
using KeyOf = std::conditional_t<sizeof(Real) == sizeof(float), uint32_t, uint64_t>;

// The sample of a certain rank in the order of (confidence, row), found digit by digit: what is known of it so far, and
// its rank among the samples that share these digits.
template <typename Real>
struct Cut {
  KeyOf<Real> key;  // the bits of a confidence, which is not negative, are ordered as it is
  uint32_t row;
  uint32_t rank;
};

template <typename Real>
struct CellShared {
  uint32_t counts[kCuts][kDigits];
  Cut<Real> cuts[kCuts];
  double scratch[kWarpsPerBlock];
};

// The bits above `shift`, of `bits` in all.
template <typename Key>
__device__ __forceinline__ Key high_bits(Key key, int shift, int bits) {
  return shift >= bits ? Key(0) : key >> shift;
}

// Finds shared.cuts[0 .. n_cuts), whose ranks are given; by confidence alone if row_digits is 0.
template <typename Real>
__device__ void select_cuts(const Real* confidence, int rows, int n_cuts, int row_digits, CellShared<Real>& shared) {
  using Key = KeyOf<Real>;
  constexpr int kKeyBits = 8 * static_cast<int>(sizeof(Key));
  constexpr int kKeyDigits = kKeyBits / kDigitBits;
  const int thread = static_cast<int>(threadIdx.x);
  const int lane = thread % kWarp;
  for (int pass = 0; pass < kKeyDigits + row_digits; ++pass) {
    const bool in_key = pass < kKeyDigits;
    const int shift = kDigitBits * ((in_key ? kKeyDigits : kKeyDigits + row_digits) - 1 - pass);
    for (int i = thread; i < n_cuts * kDigits; i += kBlock) shared.counts[i / kDigits][i % kDigits] = 0;
    __syncthreads();
    for (int i = thread; i < rows; i += kBlock) {
      const Key key = bit_cast<Key>(confidence[i]);
      const auto row = static_cast<uint32_t>(i);
      const auto digit = static_cast<uint32_t>((in_key ? key >> shift : Key(row >> shift)) & (kDigits - 1));
      for (int c = 0; c < n_cuts; ++c) {
        const Cut<Real>& cut = shared.cuts[c];
        const bool matches =
            in_key ? high_bits(key, shift + kDigitBits, kKeyBits) == high_bits(cut.key, shift + kDigitBits, kKeyBits)
                   : key == cut.key &&
                         high_bits(row, shift + kDigitBits, 32) == high_bits(cut.row, shift + kDigitBits, 32);
        if (matches) atomicAdd(&shared.counts[c][digit], 1u);
      }
    }
    __syncthreads();
    // A warp for each cut, a run of digits for each lane.
    constexpr int kRun = kDigits / kWarp;
    for (int c = thread / kWarp; c < n_cuts; c += kWarpsPerBlock) {
      const uint32_t* counts = shared.counts[c] + lane * kRun;
      const uint32_t rank = shared.cuts[c].rank;
      uint32_t mine = 0;
      for (int d = 0; d < kRun; ++d) mine += counts[d];
      uint32_t up_to = mine;
      for (int offset = 1; offset < kWarp; offset *= 2) {
        const uint32_t before = __shfl_up_sync(kFullWarp, up_to, offset);
        if (lane >= offset) up_to += before;
      }
      const uint32_t below = up_to - mine;
      __syncwarp();  // every lane has read the rank
      if (below <= rank && rank < up_to) {
        uint32_t left = rank - below;
        int digit = lane * kRun;
        for (int d = 0; d < kRun - 1 && left >= counts[d]; ++d) {
          left -= counts[d];
          ++digit;
        }
        Cut<Real>& cut = shared.cuts[c];
        cut.rank = left;
        if (in_key) {
          cut.key |= static_cast<Key>(digit) << shift;
        } else {
          cut.row |= static_cast<uint32_t>(digit) << shift;
        }
      }
    }
    __syncthreads();
  }
}

template <typename Real>
struct CellArgs {
  const Real* confidence;  // [n_temperatures, n_gammas, rows]
  const uint8_t* correct;  // [rows]
  int rows;
  int64_t n_gammas;
  int64_t n_bins;
  BinEstimator estimator;
  double* ece;  // or null
  double* mce;  // or null
  int64_t table_stride;
};

template <typename Real>
__global__ __launch_bounds__(kBlock) void calibration_grid_bins_kernel(const __grid_constant__ CellArgs<Real> args) {
  using Key = KeyOf<Real>;
  __shared__ CellShared<Real> shared;
  const int thread = static_cast<int>(threadIdx.x);
  const int64_t cell = blockIdx.x;
  const Real* confidence = args.confidence + cell * args.rows;
  const bool by_rank = args.estimator == BinEstimator::kEqualMass;
  const bool by_edge = args.estimator == BinEstimator::kEqualMassInterp;
  int row_digits = 1;
  while (row_digits < 4 && (static_cast<uint32_t>(args.rows - 1) >> (kDigitBits * row_digits)) != 0) ++row_digits;

  double ece = 0;
  double mce = 0;
  for (int64_t first_bin = 0; first_bin < args.n_bins; first_bin += kBinsAtOnce) {
    const int64_t left = args.n_bins - first_bin;
    const int bins = left < kBinsAtOnce ? static_cast<int>(left) : kBinsAtOnce;
    __syncthreads();  // the cuts of the bins before have been read
    if (by_rank && thread <= bins) {
      const int64_t rank = equal_mass_begin(first_bin + thread, args.rows, args.n_bins);
      // Past the last sample there is none to be found: look for the last one, and replace it below.
      shared.cuts[thread] = {Key(0), 0u, static_cast<uint32_t>(rank < args.rows ? rank : args.rows - 1)};
    }
    if (by_edge && thread <= bins) {
      const InterpolatedRank at = equal_mass_interp_rank(first_bin + thread, args.rows, args.n_bins);
      shared.cuts[2 * thread] = {Key(0), 0u, static_cast<uint32_t>(at.rank)};
      shared.cuts[2 * thread + 1] = {Key(0), 0u, static_cast<uint32_t>(at.next)};
    }
    __syncthreads();
    if (by_rank) select_cuts(confidence, args.rows, bins + 1, row_digits, shared);
    if (by_edge) select_cuts(confidence, args.rows, 2 * (bins + 1), 0, shared);

    Real edges[kBinsAtOnce + 1];
    Key keys[kBinsAtOnce + 1];
    uint32_t cut_rows[kBinsAtOnce + 1];
#pragma unroll
    for (int b = 0; b <= kBinsAtOnce; ++b) {
      // Edges that no confidence exceeds, for bins that are not there.
      edges[b] = kInfinity<Real>;
      keys[b] = ~Key(0);
      cut_rows[b] = ~0u;
      if (b <= bins && by_edge) {
        const InterpolatedRank at = equal_mass_interp_rank(first_bin + b, args.rows, args.n_bins);
        edges[b] = equal_mass_interp_edge(bit_cast<Real>(shared.cuts[2 * b].key),
                                          bit_cast<Real>(shared.cuts[2 * b + 1].key), at.fraction);
      }
      if (b <= bins && by_rank && equal_mass_begin(first_bin + b, args.rows, args.n_bins) < args.rows) {
        keys[b] = shared.cuts[b].key;
        cut_rows[b] = shared.cuts[b].row;
      }
    }

    double excess[kBinsAtOnce] = {};
    int count[kBinsAtOnce] = {};
    for (int i = thread; i < args.rows; i += kBlock) {
      const Real value = confidence[i];
      const Key key = bit_cast<Key>(value);
      const auto row = static_cast<uint32_t>(i);
      // Among the edges of these bins, the number that lie below the sample; the last one of them opens its bin.
      int bin = -1;
      if (by_rank) {
#pragma unroll
        for (int b = 0; b <= kBinsAtOnce; ++b) bin += key > keys[b] || (key == keys[b] && row >= cut_rows[b]);
      } else if (by_edge) {
#pragma unroll
        for (int b = 0; b <= kBinsAtOnce; ++b) bin += value > edges[b];
      } else {
        const int64_t from_first = equal_width_bin(value, args.n_bins) - first_bin;
        bin = from_first < 0 || from_first >= kBinsAtOnce ? -1 : static_cast<int>(from_first);
      }
      const double gap_of_sample = static_cast<double>(value) - static_cast<double>(args.correct[i]);
#pragma unroll
      for (int b = 0; b < kBinsAtOnce; ++b) {
        excess[b] += bin == b ? gap_of_sample : 0.0;
        count[b] += bin == b;
      }
    }
#pragma unroll
    for (int b = 0; b < kBinsAtOnce; ++b) {
      const double size = block_sum(static_cast<double>(count[b]), shared.scratch);
      const double sum = block_sum(excess[b], shared.scratch);
      const BinSums bin_sums = {static_cast<int64_t>(size), sum};
      if (b < bins) {
        ece += weighted_gap(bin_sums, args.rows);
        mce = fmax(mce, gap(bin_sums));
      }
    }
  }
  if (thread == 0) {
    const int64_t out = cell % args.n_gammas * args.table_stride + cell / args.n_gammas;
    if (args.ece != nullptr) args.ece[out] = ece;
    if (args.mce != nullptr) args.mce[out] = mce;
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
  const GridPlan plan = plan_grid(rows, n_temperatures, n_gammas);
  return aligned(plan.row_tiles * n_temperatures * n_gammas * static_cast<int64_t>(sizeof(double)));
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
int calibration_grid_block(const CalibrationGridBlock<Scalar>& block, void* workspace, void* stream) {
  using Real = compute_t<Scalar>;
  const int64_t rows = block.samples.rows;
  const int64_t cells = block.n_temperatures * block.n_gammas;
  if (!samples_are_valid(block.samples) || cells < 1 || cells > INT32_MAX || block.n_bins < 1) {
    return cudaErrorInvalidValue;
  }
  const bool binned = block.ece != nullptr || block.mce != nullptr;
  const GridPlan plan = plan_grid(rows, block.n_temperatures, block.n_gammas);
  char* memory = static_cast<char*>(workspace);
  const int64_t offset = confidence_bytes(rows, block.n_gammas, block.n_temperatures, sizeof(Real));
  auto* nll = reinterpret_cast<double*>(memory + offset);
  auto* brier = reinterpret_cast<double*>(memory + offset + sums_bytes(rows, block.n_gammas, block.n_temperatures));
  const Scratch<Scalar> scratch = {binned || block.keep_confidence ? reinterpret_cast<Real*>(memory) : nullptr,
                                   block.nll != nullptr ? nll : nullptr, block.brier != nullptr ? brier : nullptr};
  void (*confidences)(CalibrationGridBlock<Scalar>, GridPlan, Scratch<Scalar>) =
      block.brier != nullptr ? calibration_grid_confidence_kernel<Scalar, true>
                             : calibration_grid_confidence_kernel<Scalar, false>;
  int error = launch(confidences, plan.blocks(), kBlock, stream, block, plan, scratch);
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

#define FK_INSTANTIATE(Scalar)                                                                           \
  template int calibration_grid_prepare<Scalar>(const CalibrationGridSamples<Scalar>&, int64_t*, void*); \
  template int calibration_grid_block<Scalar>(const CalibrationGridBlock<Scalar>&, void*, void*);
FK_INSTANTIATE(Half)
FK_INSTANTIATE(BFloat16)
FK_INSTANTIATE(float)
FK_INSTANTIATE(double)
#undef FK_INSTANTIATE

}  // namespace focalkern::cuda
