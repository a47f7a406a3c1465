// The softmax of one sample at sixteen temperatures, relative to its largest class t.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>

#include "cpu/simd/dispatch.h"
#include "kernels/calibration_grid.h"
#include "math/focal.h"
#include "math/grid_plan.h"

namespace focalkern::cpu {
namespace {

constexpr int kLanes = 16;    // temperatures per vector
constexpr int kRun = 64;      // classes per partial sum: one long float sum would lose digits
constexpr int kSamples = 16;  // samples whose confidences are written together: a cache line of floats
constexpr int kMoments = WideBasis::kTerms;
constexpr int kTailMoments = TailBasis::kTerms;

// Gaps and 1 / T are clamped to this bound. Then 0 * x is 0 for a class of probability 0, and products stay finite or
// overflow with the right sign.
template <typename Real>
constexpr Real kFar = sizeof(Real) == sizeof(float) ? Real(1e30) : Real(1e300);

// x = d / T
template <typename Real>
FK_HOST_DEVICE Real scaled_gap(Real d, Real inverse_temperature) {
  const Real x = d * inverse_temperature;
  return x < -kFar<Real> ? -kFar<Real> : x;
}

template <typename Real>
struct alignas(64) Lanes {
  Real value[kLanes];
  FK_HOST_DEVICE Real& operator[](int t) { return value[t]; }
  FK_HOST_DEVICE Real operator[](int t) const { return value[t]; }
};

// One sample at kLanes temperatures.
template <typename Real>
struct SoftmaxPieces {
  // With e_k = exp(x_k - x of the runner-up):
  Lanes<Real> mean_weight;  // 1 / sum_k e_k, at most 1
  Lanes<Real> scale;        // q_k = scale e_k
  Lanes<Real> lse;          // L
  Lanes<Real> log_u;        // log u_t
  Lanes<Real> psi;          // 1 - phi_t
};

// gamma and, rounded separately, 1 + gamma: near -1, 1 + gamma and 1 + gamma phi cancel.
template <typename Real>
struct Gamma {
  Real value;
  Real plus_one;
};
template <typename Real>
Gamma<Real> rounded_gamma(double gamma) {
  // With a larger gamma the top class still has all probability, but the square of gamma, which divides sums, would
  // overflow.
  gamma = std::min(gamma, sizeof(Real) == sizeof(float) ? 1e15 : 1e150);
  return {static_cast<Real>(gamma), static_cast<Real>(gamma + 1)};
}
// 1 + gamma phi_t
template <typename Real>
FK_HOST_DEVICE Real top_denominator(Gamma<Real> gamma, Real psi) {
  return gamma.plus_one - gamma.value * psi;
}

template <typename Real>
FK_VECTOR_CLONES void softmax_pieces(const Real* __restrict d /* [n] */, int64_t n, Real d_second,
                                     const Real* __restrict inverse_temperature /* [kLanes] */,
                                     Real* __restrict e /* [n, kLanes] */, SoftmaxPieces<Real>* __restrict pieces) {
  Lanes<Real> x_second, sum;
#pragma omp simd
  for (int t = 0; t < kLanes; ++t) {
    x_second[t] = scaled_gap(d_second, inverse_temperature[t]);
    sum[t] = 0;
  }
  for (int64_t begin = 0; begin < n; begin += kRun) {
    const int64_t end = begin + kRun < n ? begin + kRun : n;
    Lanes<Real> run = {};
    for (int64_t k = begin; k < end; ++k) {
      const Real d_k = d[k];
#pragma omp simd
      for (int t = 0; t < kLanes; ++t) {
        const Real e_k = bounded_exponential(scaled_gap(d_k, inverse_temperature[t]) - x_second[t]);
        e[k * kLanes + t] = e_k;
        run[t] += e_k;
      }
    }
#pragma omp simd
    for (int t = 0; t < kLanes; ++t) sum[t] += run[t];
  }
#pragma omp simd
  for (int t = 0; t < kLanes; ++t) {
    pieces->mean_weight[t] = Real(1) / sum[t];
    const Real e_second = bounded_exponential(x_second[t]);
    const Real odds = e_second * sum[t];
    const Real lse = log_one_plus(odds);
    pieces->lse[t] = lse;
    pieces->scale[t] = e_second / (Real(1) + odds);
    pieces->log_u[t] = x_second[t] + logarithm(sum[t]) - lse;
    // phi_t = log(1 + S) / S. The series for 1 - phi_t is used where the difference would cancel, and where S
    // underflows to 0.
    const Real series = odds * (Real(0.5) - odds * (Real(1.0 / 3) - odds * (Real(0.25) - odds * Real(0.2))));
    pieces->psi[t] = odds < Real(sizeof(Real) == sizeof(float) ? 0.02 : 1e-4) ? series : Real(1) - lse / odds;
  }
}

}  // namespace
}  // namespace focalkern::cpu
