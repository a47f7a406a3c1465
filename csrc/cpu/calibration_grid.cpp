// The calibration grid on the CPU: ECE, MCE, NLL and Brier score of every (gamma, temperature) at once.
//
// Stage 1 loops over the samples. It reads a row once per block of temperatures, computes the softmax once per
// temperature, and derives every gamma from that; a vector lane is a temperature. It writes the confidence of each
// (temperature, gamma, sample) and sums of NLL and Brier score per chunk of rows. Stage 2 loops over the cells
// (temperature, gamma). It finds the bins of a cell by counting, without sorting it.
//
// With t the class of the largest logit, x_k = (z_k - z_t) / T, and sums over the classes k other than t:
//   S = sum e^(x_k),  L = log(1 + S),  log q_t = -L,  log u_t = log S - L,  phi_t = L / S
//   log q_k = x_k - L,  and q_k <= 1/2
//   rho = sum_k q_k / G(q_k) / sum_k q_k      the mean of 1 / G over the other classes
//   R = rho (1 + gamma phi_t) exp((1 + gamma) log u_t + L)      odds against the class t
//   confidence = 1 / (1 + R),  -log p_hat_t = log(1 + R)
// No terms cancel, and nothing overflows: (1 + gamma) is positive, and the map keeps t the largest class, so R <=
// classes - 1. S is summed relative to its largest term, because S may underflow where R does not (gamma near -1).
//
// Only rho needs all classes. For a gamma between -1 and 1, 1 / G is a smooth function of q and s = -q log q on [0,
// 1/2]; twelve sums over the classes, of products q^i s^j, serve all such gammas. Their coefficients are fitted when
// the grid starts, and the fit is checked. A small whole gamma needs one division per class. Any other gamma, float64
// and the Brier score take an exponential per class and gamma. With many classes, most have q below 1/200; for these,
// seven products serve every gamma up to about 5.

#include <algorithm>
#include <cmath>
#include <vector>

#include "cpu/calibration_grid/bins.h"
#include "cpu/calibration_grid/class_sums.h"
#include "cpu/calibration_grid/rows.h"
#include "cpu/calibration_grid/scores.h"
#include "cpu/calibration_grid/softmax.h"
#include "kernels/calibration_grid.h"
#include "math/focal.h"
#include "math/grid_plan.h"

namespace focalkern::cpu {

int64_t calibration_grid_chunk_rows(int64_t rows, int64_t) {
  // About 128 chunks: enough for any number of threads, and few enough partial sums.
  const int64_t even = (rows + 127) / 128;
  return (even + kSamples - 1) / kSamples * kSamples;
}

int64_t calibration_grid_block_temperatures(int64_t rows, int64_t, int64_t n_gammas, int64_t real_size) {
  constexpr int64_t kConfidenceBytes = int64_t{16} << 20;
  const int64_t fit = kConfidenceBytes / std::max<int64_t>(1, rows * n_gammas * real_size);
  return std::max<int64_t>(kLanes, fit / kLanes * kLanes);
}

template <typename Scalar>
void calibration_grid_confidences(const CalibrationGridBlock<Scalar>& block, const CalibrationGridPlan& plan,
                                  const CalibrationGridScratch<Scalar>& scratch, int64_t chunk_begin,
                                  int64_t chunk_end) {
  using Real = compute_t<Scalar>;
  const auto& samples = block.samples;
  const int64_t others = samples.classes - 1;
  const int64_t n_gammas = block.n_gammas;
  const int64_t cells = block.n_temperatures * n_gammas;
  const int64_t chunk_rows = calibration_grid_chunk_rows(samples.rows, samples.classes);

  std::vector<Real> gaps(kSamples * samples.classes), exact_gammas;
  std::vector<Lanes<Real>> e(others), sums(kMoments + kMaxReciprocals), tail_moments(kTailMoments), odds(n_gammas);
  std::vector<Lanes<Real>> exact(plan.exponentials), exact_squares(plan.exponentials);
  std::vector<Lanes<Real>> confidence(kSamples * n_gammas);
  std::vector<NllOfGroup> nll(n_gammas);
  std::vector<Lanes<double>> brier(n_gammas);
  LinearNllOfGroup linear;
  SoftmaxPieces<Real> pieces;
  LabelPieces<Real> label;
  Lanes<Real> inverse_temperature;
  int whole[kMaxReciprocals] = {1, 1};

  std::vector<CellPlan<Real>> cell_plans(n_gammas);
  for (int64_t g = 0; g < n_gammas; ++g) {
    const GammaPlan& entry = plan.gammas[g];
    CellPlan<Real>& cell = cell_plans[g];
    cell.gamma = rounded_gamma<Real>(entry.gamma);
    for (int i = 0; i < kMoments; ++i) cell.coefficient[i] = static_cast<Real>(entry.coefficient[i]);
    for (int i = 0; i < kTailMoments; ++i) cell.tail_coefficient[i] = static_cast<Real>(entry.tail_coefficient[i]);
    cell.numerator = cell.square_sum = nullptr;
    if (entry.route == Route::kReciprocal) {
      whole[entry.index] = static_cast<int>(entry.gamma);
      cell.numerator = sums[kMoments + entry.index].value;
    } else if (entry.route == Route::kExponential) {
      exact_gammas.push_back(cell.gamma.value);
      cell.numerator = exact[entry.index].value;
      cell.square_sum = exact_squares[entry.index].value;
    }
  }

  for (int64_t chunk = chunk_begin; chunk < chunk_end; ++chunk) {
    const int64_t row_end = std::min(samples.rows, (chunk + 1) * chunk_rows);
    if (scratch.nll != nullptr) std::fill_n(scratch.nll + chunk * cells, cells, 0.0);
    if (scratch.brier != nullptr) std::fill_n(scratch.brier + chunk * cells, cells, 0.0);
    for (int64_t row_begin = chunk * chunk_rows; row_begin < row_end; row_begin += kSamples) {
      const int64_t n_rows = std::min<int64_t>(kSamples, row_end - row_begin);
      Row<Real> rows[kSamples];
      for (int64_t i = 0; i < n_rows; ++i) {
        rows[i].d = gaps.data() + i * samples.classes;
        load_row(samples, row_begin + i, &rows[i]);
      }
      for (int64_t t_begin = 0; t_begin < block.n_temperatures; t_begin += kLanes) {
        const int64_t n_lanes = std::min<int64_t>(kLanes, block.n_temperatures - t_begin);
        for (int64_t t = 0; t < kLanes; ++t) {
          // The last group repeats the last temperature to fill its lanes.
          const double temperature = block.temperatures[t_begin + std::min(t, n_lanes - 1)];
          inverse_temperature[t] = static_cast<Real>(std::min<double>(1 / temperature, kFar<Real>));
        }
        linear = {};
        for (int64_t g = 0; g < n_gammas; ++g) {
          brier[g] = {};
          nll[g].small = {};
          std::fill_n(nll[g].product.value, kLanes, 1.0);
        }
        for (int64_t i = 0; i < n_rows; ++i) {
          const Row<Real>& row = rows[i];
          Real* inv_t = inverse_temperature.value;
          Real* weights = e[0].value;
          softmax_pieces(row.d, others, row.second, inv_t, weights, &pieces);
          // The classes [0, head) are summed in full.
          int64_t head = others;
          if (plan.tail) {
            head = split_classes(others, row.d, e.data(), pieces, inverse_temperature);
            tail_sums(row.d + head, others - head, inv_t, weights + head * kLanes, pieces, tail_moments.data());
          }
          if (plan.reciprocals == 2) {
            shared_sums<Real, 2>(row.d, head, inv_t, weights, pieces, whole, sums.data());
          } else if (plan.reciprocals == 1) {
            shared_sums<Real, 1>(row.d, head, inv_t, weights, pieces, whole, sums.data());
          } else if (plan.moments > 0) {
            shared_sums<Real, 0>(row.d, head, inv_t, weights, pieces, whole, sums.data());
          }
          if (plan.exponentials > 0) {
            exact_sums(row.d, head, inv_t, weights, pieces, exact_gammas.data(), plan.exponentials, exact.data(),
                       exact_squares.data());
          }
          const bool wants_label = !row.correct && (scratch.nll != nullptr || scratch.brier != nullptr);
          if (wants_label) {
            label_pieces(row.label, inv_t, pieces, &label);
            add_linear_nll(pieces, label, &linear);
          }
          const Lanes<Real>* small_classes = plan.tail ? tail_moments.data() : nullptr;
          Lanes<Real>* row_confidence = &confidence[i * n_gammas];
          if (scratch.nll == nullptr) {
            finish_cells<Real, false, false>(pieces, label, sums.data(), small_classes, cell_plans.data(), n_gammas,
                                             row_confidence, odds.data(), nll.data());
          } else if (row.correct) {
            finish_cells<Real, true, false>(pieces, label, sums.data(), small_classes, cell_plans.data(), n_gammas,
                                            row_confidence, odds.data(), nll.data());
          } else {
            finish_cells<Real, true, true>(pieces, label, sums.data(), small_classes, cell_plans.data(), n_gammas,
                                           row_confidence, odds.data(), nll.data());
          }
          for (int64_t g = 0; scratch.brier != nullptr && g < n_gammas; ++g) {
            add_brier(pieces, row.correct ? nullptr : &label, cell_plans[g], odds[g].value, row_confidence[g].value,
                      brier[g].value);
          }
        }
        for (int64_t g = 0; g < n_gammas; ++g) {
          const int64_t first_cell = t_begin * n_gammas + g;
          write_confidences(confidence[g].value, n_gammas * kLanes, n_rows, n_lanes,
                            scratch.confidence + first_cell * samples.rows + row_begin, n_gammas * samples.rows);
          if (scratch.nll != nullptr) {
            Lanes<double> sum;
            nll_of_group(nll[g], linear, plan.gammas[g].gamma, sum.value);
            double* out = scratch.nll + chunk * cells + first_cell;
            for (int64_t t = 0; t < n_lanes; ++t) out[t * n_gammas] += sum[t];
          }
          if (scratch.brier != nullptr) {
            double* out = scratch.brier + chunk * cells + first_cell;
            for (int64_t t = 0; t < n_lanes; ++t) out[t * n_gammas] += brier[g][t];
          }
        }
      }
    }
  }
}

// ---- prepare -------------------------------------------------------------------------------------------------------

template <typename Scalar>
int64_t calibration_grid_prepare(const CalibrationGridSamples<Scalar>& samples, int64_t row_begin, int64_t row_end) {
  using Real = compute_t<Scalar>;
  constexpr Real kInfinity = std::numeric_limits<Real>::infinity();
  for (int64_t row = row_begin; row < row_end; ++row) {
    const int64_t source = samples.input_row(row);
    const Scalar* input = samples.input + source * samples.row_stride;
    Real best = -kInfinity;
    int64_t top = 0;
    bool nan = false, negative = false;
    for (int64_t k = 0; k < samples.classes; ++k) {
      const Real value = load_as_compute(input[k]);
      nan |= value != value;
      negative |= value < Real(0);
      if (value > best) {
        best = value;
        top = k;
      }
    }
    const auto problem = [source](RowProblem kind) { return source * kRowProblems + static_cast<int64_t>(kind); };
    if (nan) return problem(RowProblem::kNotANumber);
    if (best == kInfinity) return problem(RowProblem::kPositiveInfinity);
    if (samples.input_is_probs) {
      if (negative) return problem(RowProblem::kNegativeProbability);
      double sum = 0;
      for (int64_t k = 0; k < samples.classes; ++k) sum += static_cast<double>(load_as_compute(input[k]));
      if (sum == 0) return problem(RowProblem::kNoFiniteLogit);
      if (std::fabs(sum - 1) > probability_sum_tolerance<Scalar>()) return problem(RowProblem::kProbabilitySum);
    } else if (best == -kInfinity) {
      return problem(RowProblem::kNoFiniteLogit);
    }
    const int64_t label = samples.labels[source];
    if (label < 0 || label >= samples.classes) return problem(RowProblem::kLabelOutOfRange);
    samples.top[row] = static_cast<int32_t>(top);
    samples.correct[row] = top == label ? 1 : 0;
  }
  return kNoRowProblem;
}

template <typename Scalar>
void calibration_grid_cells(const CalibrationGridBlock<Scalar>& block, const CalibrationGridScratch<Scalar>& scratch,
                            int64_t cell_begin, int64_t cell_end) {
  using Real = compute_t<Scalar>;
  const int64_t rows = block.samples.rows;
  const int64_t cells = block.n_temperatures * block.n_gammas;
  const int64_t chunk_rows = calibration_grid_chunk_rows(rows, block.samples.classes);
  const int64_t chunks = (rows + chunk_rows - 1) / chunk_rows;
  const bool binned = block.ece != nullptr || block.mce != nullptr;
  const bool ordered = binned && block.estimator != BinEstimator::kEqualWidth;
  std::vector<BinSums> bins(block.n_bins);
  std::vector<BinSums> copies(block.estimator == BinEstimator::kEqualWidth ? kCopies * block.n_bins : 0);
  OrderedConfidences<Real> order(ordered ? rows : 0);

  const auto mean_of_chunks = [&](const double* partial, int64_t cell) {
    double sum = 0;
    for (int64_t chunk = 0; chunk < chunks; ++chunk) sum += partial[chunk * cells + cell];
    return sum / static_cast<double>(rows);
  };
  for (int64_t cell = cell_begin; cell < cell_end; ++cell) {
    const int64_t out = (cell % block.n_gammas) * block.table_stride + cell / block.n_gammas;
    if (block.nll != nullptr) block.nll[out] = mean_of_chunks(scratch.nll, cell);
    if (block.brier != nullptr) block.brier[out] = mean_of_chunks(scratch.brier, cell);
    if (!binned) continue;
    const Real* confidence = scratch.confidence + cell * rows;
    if (block.estimator == BinEstimator::kEqualWidth) {
      equal_width_bins(confidence, block.samples.correct, rows, block.n_bins, copies, bins.data());
    } else {
      order.assign(confidence, block.samples.correct);
      if (block.estimator == BinEstimator::kEqualMass) {
        equal_mass_bins(order, rows, block.n_bins, bins.data());
      } else {
        equal_mass_interp_bins(order, rows, block.n_bins, bins.data());
      }
    }
    double ece = 0, mce = 0;
    for (const BinSums& bin : bins) {
      ece += weighted_gap(bin, rows);
      mce = std::max(mce, gap(bin));
    }
    if (block.ece != nullptr) block.ece[out] = ece;
    if (block.mce != nullptr) block.mce[out] = mce;
  }
}

#define FK_INSTANTIATE(Scalar)                                                                                     \
  template int64_t calibration_grid_prepare(const CalibrationGridSamples<Scalar>&, int64_t, int64_t);              \
  template void calibration_grid_confidences(const CalibrationGridBlock<Scalar>&, const CalibrationGridPlan&,      \
                                             const CalibrationGridScratch<Scalar>&, int64_t, int64_t);             \
  template void calibration_grid_cells(const CalibrationGridBlock<Scalar>&, const CalibrationGridScratch<Scalar>&, \
                                       int64_t, int64_t);
FK_INSTANTIATE(float)
FK_INSTANTIATE(double)
FK_INSTANTIATE(Half)
FK_INSTANTIATE(BFloat16)
#undef FK_INSTANTIATE

}  // namespace focalkern::cpu
