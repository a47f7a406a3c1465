// Stage 1 of the calibration grid (calibration_grid.cu): confidences, and sums of NLL and Brier score.
//
// Thread (row, temperature): the lanes of a warp are temperatures, so all of them read the same class at the same time,
// and no lane needs another's sums. A warp keeps its rows in shared memory (long rows in parts), as differences from
// the largest of the other classes. It passes over a row twice: for the softmax, then for sums over the classes, of
// which there are two kinds:
//   shared       twelve sums for all gammas from -1 to 1, and one per small whole gamma (math/grid_plan.h)
//   for a gamma  p_k / p_t, and its square for the Brier score, kGammasAtOnce gammas at a time
// In float, exponentials and reciprocals of the second pass are one instruction each. Their error is 2^-22 relative to
// the term e = 1 of the runner-up, which is accurate enough for the sums.
#pragma once

#include "cuda/common.cuh"
#include "cuda/grid_row.cuh"
#include "kernels/calibration_grid.h"
#include "math/calibration_map.h"
#include "math/grid_plan.h"

namespace focalkern::cuda {

// ---- gammas that share sums ----------------------------------------------------------------------------------------

template <typename Scalar, int reciprocals>
__global__ __launch_bounds__(kBlock, 2) void calibration_grid_shared_kernel(
    const __grid_constant__ CalibrationGridBlock<Scalar> block, const __grid_constant__ GridPlan plan,
    const __grid_constant__ SharedGammas gammas, const __grid_constant__ Scratch<Scalar> scratch) {
  using Real = compute_t<Scalar>;
  constexpr int kMoments = WideBasis::kTerms;
  alignas(kVectorBytes) __shared__ char stage[kWarpsPerBlock * kStageStride];
  __shared__ double nll[kSharedGammas][kBlock];
  const CalibrationGridSamples<Scalar>& samples = block.samples;
  const int thread = static_cast<int>(threadIdx.x);
  const GridPlace place(plan);
  const bool has_temperature = place.temperature < block.n_temperatures;
  const double temperature = block.temperatures[has_temperature ? place.temperature : 0];
  for (int g = 0; g < gammas.count; ++g) nll[g][thread] = 0;

  const int rows_at_once = kBlock / plan.lanes;
  for (int step = 0; step < plan.rows_per_tile; step += rows_at_once) {
    const int64_t row = place.row_tile * plan.rows_per_tile + step + thread / plan.lanes;
    if (row - thread % kWarp / plan.lanes >= samples.rows) break;  // the whole warp
    const bool counts = row < samples.rows && has_temperature;
    GridRow<Scalar> x;
    x.start(samples, row < samples.rows ? row : samples.rows - 1, temperature, plan.lanes,
            stage + thread / kWarp * kStageStride);
    const MapSoftmax<Real> soft = x.softmax();

    Real sum[kMoments + reciprocals] = {};
    Real part[kMoments + reciprocals] = {};
    const Real offset = -soft.log_q_offset;
    x.each(
        [&](Real d) {
          const Real y = x.exponent(d);
          const Real e = quick_power(y);
          const Real q = e * soft.q_scale;
          const Real s = q * (offset - natural(y));
          Real term[kMoments];
          WideBasis::terms(e, q, s, term);
#pragma unroll
          for (int i = 0; i < kMoments; ++i) part[i] += term[i];
          if constexpr (reciprocals > 0) {
            const Real u = Real(1) - q;
            const Real u2 = u * u;
            const Real u4 = u2 * u2;
#pragma unroll
            for (int i = 0; i < reciprocals; ++i) {
              // 1 / G(q) is 1 / (u^(gamma - 1) (u + gamma s)).
              const Real power_of_u = (gammas.bit[i][0] != 0 ? u : Real(1)) * (gammas.bit[i][1] != 0 ? u2 : Real(1)) *
                                      (gammas.bit[i][2] != 0 ? u4 : Real(1));
              part[kMoments + i] += quick_quotient(e, power_of_u * (u + gammas.whole[i] * s));
            }
          }
        },
        [&] {
#pragma unroll
          for (int i = 0; i < kMoments + reciprocals; ++i) {
            sum[i] += part[i];
            part[i] = 0;
          }
        });
    if (!counts) continue;

    const Real y_label = x.correct ? Real(0) : x.y(x.label);
    const Real q_label = exponential(y_label) * soft.q_scale;
    for (int g = 0; g < gammas.count; ++g) {
      Real numerator = 0;
#pragma unroll
      for (int i = 0; i < kMoments + reciprocals; ++i) numerator += gammas.coefficient[g][i] * sum[i];
      const MapOffset<Real> of_gamma = map_offset(soft, map_gamma<Real>(gammas.gamma[g]));
      const Real ratios = numerator * of_gamma.denominator * exponential(of_gamma.offset);
      if (scratch.confidence != nullptr) {
        scratch.confidence[(place.temperature * block.n_gammas + gammas.index[g]) * samples.rows + row] =
            Real(1) / (Real(1) + ratios);
      }
      if (scratch.nll != nullptr) {
        Real log_ratio = 0;
        if (!x.correct) {
          log_ratio = map_log_ratio_of_q(y_label, q_label, soft.log_q_offset, of_gamma);
        }
        nll[g][thread] += static_cast<double>(log_one_plus(ratios) - log_ratio);
      }
    }
  }
  if (scratch.nll == nullptr) return;

  // Sums over the rows of the tile: threads of one temperature are `lanes` apart.
  __syncthreads();
  for (int i = thread; i < gammas.count * plan.lanes; i += kBlock) {
    const int g = i / plan.lanes;
    const int lane = i % plan.lanes;
    const int64_t t = place.temperature - thread % plan.lanes + lane;
    if (t >= block.n_temperatures) continue;
    double sum = 0;
    for (int j = lane; j < kBlock; j += plan.lanes) sum += nll[g][j];
    scratch.nll[(place.row_tile * block.n_temperatures + t) * block.n_gammas + gammas.index[g]] = sum;
  }
}

// ---- gammas with sums of their own ---------------------------------------------------------------------------------

template <typename Scalar, bool with_brier>
__global__ __launch_bounds__(
    kBlock, sizeof(compute_t<Scalar>) == sizeof(float)
                ? 2
                : 1) void calibration_grid_confidence_kernel(const __grid_constant__ CalibrationGridBlock<Scalar> block,
                                                             const __grid_constant__ GridPlan plan,
                                                             const __grid_constant__ OtherGammas gammas,
                                                             const __grid_constant__ Scratch<Scalar> scratch) {
  using Real = compute_t<Scalar>;
  alignas(kVectorBytes) __shared__ char stage[kWarpsPerBlock * kStageStride];
  __shared__ double shared_sums[kBlock];
  const CalibrationGridSamples<Scalar>& samples = block.samples;
  const int thread = static_cast<int>(threadIdx.x);
  const GridPlace place(plan);
  const bool has_temperature = place.temperature < block.n_temperatures;
  const double temperature = block.temperatures[has_temperature ? place.temperature : 0];
  double nll[kGammasAtOnce] = {};
  double brier[kGammasAtOnce] = {};

  const int rows_at_once = kBlock / plan.lanes;
  for (int step = 0; step < plan.rows_per_tile; step += rows_at_once) {
    const int64_t row = place.row_tile * plan.rows_per_tile + step + thread / plan.lanes;
    if (row - thread % kWarp / plan.lanes >= samples.rows) break;  // the whole warp
    const bool counts = row < samples.rows && has_temperature;
    GridRow<Scalar> x;
    x.start(samples, row < samples.rows ? row : samples.rows - 1, temperature, plan.lanes,
            stage + thread / kWarp * kStageStride);
    const MapSoftmax<Real> soft = x.softmax();

    // p_k / p_t is e^(y_k + ratio_offset) / G(q_k), and log G(q) = (gamma - 1) log u + log(u + gamma s).
    MapOffset<Real> of_gamma[kGammasAtOnce];
    Real gamma[kGammasAtOnce];
    Real slope[kGammasAtOnce];
    Real ratio_offset[kGammasAtOnce];
    double ratio_sum[kGammasAtOnce] = {};
    double square_sum[kGammasAtOnce] = {};
    Real sum[kGammasAtOnce] = {};
    Real squares[kGammasAtOnce] = {};
#pragma unroll
    for (int g = 0; g < kGammasAtOnce; ++g) {
      of_gamma[g] = map_offset(soft, map_gamma<Real>(gammas.gamma[g]));
      gamma[g] = of_gamma[g].gamma;
      slope[g] = (gamma[g] - Real(1)) * quick_unit<Real>();
      ratio_offset[g] = (of_gamma[g].offset + logarithm_of_normal(of_gamma[g].denominator)) * quick_unit<Real>();
    }
    const Real offset = -soft.log_q_offset;
    x.each(
        [&](Real d) {
          const Real y = x.exponent(d);
          const Real e = quick_power(y);
          const Real q = e * soft.q_scale;
          const Real s = q * (offset - natural(y));
          const Real u = Real(1) - q;
          const Real minus_log_u = -log_complement(q);
#pragma unroll
          for (int g = 0; g < kGammasAtOnce; ++g) {
            const Real weight = quick_power(ratio_offset[g] + slope[g] * minus_log_u);
            // At most 1, but a huge gamma amplifies the rounding errors.
            const Real ratio = fmin(e * quick_quotient(weight, u + gamma[g] * s), Real(1));
            sum[g] += ratio;
            if (with_brier) squares[g] += ratio * ratio;
          }
        },
        [&] {
#pragma unroll
          for (int g = 0; g < kGammasAtOnce; ++g) {
            ratio_sum[g] += static_cast<double>(sum[g]);
            sum[g] = 0;
            if (with_brier) square_sum[g] += static_cast<double>(squares[g]);
            squares[g] = 0;
          }
        });
    if (!counts) continue;

    const Real y_label = x.correct ? Real(0) : x.y(x.label);
    const Real q_label = exponential(y_label) * soft.q_scale;
    const auto offset_of = [&](int g) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 1200
      // The registers do not suffice: of_gamma is computed again after the loop, and volatile forces a second read of
      // gamma.
      const volatile double& gamma = gammas.gamma[g];
      return map_offset(soft, map_gamma<Real>(gamma));
#else
      return of_gamma[g];
#endif
    };
#pragma unroll
    for (int g = 0; g < kGammasAtOnce; ++g) {
      if (g < gammas.count) {
        const Real ratios = static_cast<Real>(ratio_sum[g]);
        const Real confidence = Real(1) / (Real(1) + ratios);
        const Real log_norm = log_one_plus(ratios);  // -log p_t
        Real log_ratio = 0;
        if (!x.correct) {
          log_ratio = fmin(map_log_ratio_of_q(y_label, q_label, soft.log_q_offset, offset_of(g)), Real(0));
        }
        if (scratch.confidence != nullptr) {
          scratch.confidence[(place.temperature * block.n_gammas + gammas.index[g]) * samples.rows + row] = confidence;
        }
        nll[g] += static_cast<double>(log_norm - log_ratio);
        if (with_brier) {
          // sum_k (p_k - [k = y])^2, where 1 - p_t is p_t times the sum of the ratios.
          const double p = static_cast<double>(confidence);
          const double missing = x.correct ? p * ratio_sum[g] : p;
          const double of_label = x.correct ? 0.0 : 1.0 - 2.0 * p * static_cast<double>(exponential(log_ratio));
          brier[g] += (missing * missing + p * p * square_sum[g]) + of_label;
        }
      }
    }
  }

  // Sums over the rows of the tile: threads of one temperature are `lanes` apart.
  const auto sum_over_rows = [&](double value, double* sums, int64_t gamma) {
    __syncthreads();
    shared_sums[thread] = value;
    __syncthreads();
    if (thread >= plan.lanes || !has_temperature) return;
    double sum = 0;
    for (int i = thread; i < kBlock; i += plan.lanes) sum += shared_sums[i];
    sums[(place.row_tile * block.n_temperatures + place.temperature) * block.n_gammas + gamma] = sum;
  };
#pragma unroll
  for (int g = 0; g < kGammasAtOnce; ++g) {
    if (g >= gammas.count) break;
    if (scratch.nll != nullptr) sum_over_rows(nll[g], scratch.nll, gammas.index[g]);
    if (with_brier) sum_over_rows(brier[g], scratch.brier, gammas.index[g]);
  }
}

}  // namespace focalkern::cuda
