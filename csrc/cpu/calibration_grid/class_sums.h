// Sums over the classes for rho: the mean of 1 / G over all classes but t, for many gammas at once.
#pragma once

#include <algorithm>
#include <cstdint>

#include "cpu/calibration_grid/softmax.h"
#include "cpu/simd/dispatch.h"
#include "math/focal.h"
#include "math/grid_plan.h"

namespace focalkern::cpu {
namespace {

// The sums over the classes for rho. `whole` holds the gammas for which 1 / G(q) = 1 / (u^(gamma - 1) (u + gamma s))
// needs no exponential: the power is a product of some of u, u^2 and u^4.
template <typename Real, int kReciprocals>
FK_VECTOR_CLONES void shared_sums(const Real* __restrict d, int64_t n, const Real* __restrict inverse_temperature,
                                  const Real* __restrict e, const SoftmaxPieces<Real>& pieces,
                                  const int* __restrict whole /* [kReciprocals] */,
                                  Lanes<Real>* __restrict sums /* [kMoments + kReciprocals] */) {
  Real gamma[kMaxReciprocals] = {}, bit[3][kMaxReciprocals] = {};
  for (int i = 0; i < kReciprocals; ++i) {
    gamma[i] = static_cast<Real>(whole[i]);
    for (int b = 0; b < 3; ++b) bit[b][i] = static_cast<Real>(((whole[i] - 1) >> b) & 1);
  }
  for (int i = 0; i < kMoments + kReciprocals; ++i) sums[i] = {};
  for (int64_t begin = 0; begin < n; begin += kRun) {
    const int64_t end = begin + kRun < n ? begin + kRun : n;
    Lanes<Real> moment[kMoments] = {}, reciprocal[kMaxReciprocals] = {};
    for (int64_t k = begin; k < end; ++k) {
      const Real d_k = d[k];
#pragma omp simd
      for (int t = 0; t < kLanes; ++t) {
        const Real e_k = e[k * kLanes + t];
        const Real q = e_k * pieces.scale[t];
        const Real s = q * (pieces.lse[t] - scaled_gap(d_k, inverse_temperature[t]));
        Real term[kMoments];
        WideBasis::terms(e_k, q, s, term);
        for (int i = 0; i < kMoments; ++i) moment[i][t] += term[i];
        const Real u = Real(1) - q;
        const Real u2 = u * u;
        const Real u4 = u2 * u2;
        for (int i = 0; i < kReciprocals; ++i) {
          const Real power = (Real(1) - bit[0][i] * q) * (Real(1) - bit[1][i] * (Real(1) - u2)) *
                             (Real(1) - bit[2][i] * (Real(1) - u4));
          reciprocal[i][t] += e_k / (power * (u + gamma[i] * s));
        }
      }
    }
#pragma omp simd
    for (int t = 0; t < kLanes; ++t) {
      for (int i = 0; i < kMoments; ++i) sums[i][t] += moment[i][t];
      for (int i = 0; i < kReciprocals; ++i) sums[kMoments + i][t] += reciprocal[i][t];
    }
  }
}

// The sums over classes with q <= TailBasis::kMaxQ, for every gamma.
template <typename Real>
FK_VECTOR_CLONES void tail_sums(const Real* __restrict d, int64_t n, const Real* __restrict inverse_temperature,
                                const Real* __restrict e, const SoftmaxPieces<Real>& pieces,
                                Lanes<Real>* __restrict sums /* [kTailMoments] */) {
  for (int i = 0; i < kTailMoments; ++i) sums[i] = {};
  for (int64_t begin = 0; begin < n; begin += kRun) {
    const int64_t end = begin + kRun < n ? begin + kRun : n;
    Lanes<Real> moment[kTailMoments] = {};
    for (int64_t k = begin; k < end; ++k) {
      const Real d_k = d[k];
#pragma omp simd
      for (int t = 0; t < kLanes; ++t) {
        const Real e_k = e[k * kLanes + t];
        const Real q = e_k * pieces.scale[t];
        const Real s = q * (pieces.lse[t] - scaled_gap(d_k, inverse_temperature[t]));
        Real term[kTailMoments];
        TailBasis::terms(e_k, q, s, term);
        for (int i = 0; i < kTailMoments; ++i) moment[i][t] += term[i];
      }
    }
#pragma omp simd
    for (int t = 0; t < kLanes; ++t) {
      for (int i = 0; i < kTailMoments; ++i) sums[i][t] += moment[i][t];
    }
  }
}

// Moves the classes with q above TailBasis::kMaxQ at some temperature to the front of d and e, and returns their
// number. This set changes little from one group of temperatures to the next.
template <typename Real>
int64_t split_classes(int64_t n, Real* __restrict d, Lanes<Real>* __restrict e, const SoftmaxPieces<Real>& pieces,
                      const Lanes<Real>& inverse_temperature) {
  // e_k grows with T, so the highest temperature decides.
  int hottest = 0;
  Real scale = 0;
  for (int t = 0; t < kLanes; ++t) {
    hottest = inverse_temperature[t] < inverse_temperature[hottest] ? t : hottest;
    scale = std::max(scale, pieces.scale[t]);
  }
  const Real limit = static_cast<Real>(TailBasis::kMaxQ);
  int64_t head = 0;
  for (int64_t k = 0; k < n; ++k) {
    if (e[k][hottest] * scale <= limit) continue;
    if (k != head) {
      std::swap(d[k], d[head]);
      std::swap(e[k], e[head]);
    }
    ++head;
  }
  return head;
}

// The sums for rho at any gamma, and the sums of squares for the Brier score.
template <typename Real>
FK_VECTOR_CLONES void exact_sums(const Real* __restrict d, int64_t n, const Real* __restrict inverse_temperature,
                                 const Real* __restrict e, const SoftmaxPieces<Real>& pieces,
                                 const Real* __restrict gammas, int64_t n_gammas,
                                 Lanes<Real>* __restrict sums /* [n_gammas] */,
                                 Lanes<Real>* __restrict square_sums /* [n_gammas] */) {
  for (int64_t g = 0; g < n_gammas; ++g) sums[g] = square_sums[g] = {};
  // The logarithms of a run of classes serve all gammas.
  Lanes<Real> log_u[kRun], phi[kRun], log_u_second;
#pragma omp simd
  for (int t = 0; t < kLanes; ++t) log_u_second[t] = log_one_plus(-pieces.scale[t]);
  for (int64_t begin = 0; begin < n; begin += kRun) {
    const int64_t end = begin + kRun < n ? begin + kRun : n;
    for (int64_t k = begin; k < end; ++k) {
      const Real d_k = d[k];
#pragma omp simd
      for (int t = 0; t < kLanes; ++t) {
        const Real q = e[k * kLanes + t] * pieces.scale[t];
        log_u[k - begin][t] = log_one_plus(-q);
        phi[k - begin][t] = phi_of(q, scaled_gap(d_k, inverse_temperature[t]) - pieces.lse[t], Real(1) - q);
      }
    }
    for (int64_t g = 0; g < n_gammas; ++g) {
      const Real gamma = gammas[g];
      const Real relative = gamma > Real(kMaxPlainGamma) ? Real(1) : Real(0);
      Lanes<Real> run = {}, square_run = {};
      for (int64_t k = begin; k < end; ++k) {
#pragma omp simd
        for (int t = 0; t < kLanes; ++t) {
          const Real gap = log_u[k - begin][t] - relative * log_u_second[t];
          const Real weight = e[k * kLanes + t] * exponential(-gamma * gap) / (Real(1) + gamma * phi[k - begin][t]);
          run[t] += weight;
          square_run[t] += weight * weight;
        }
      }
#pragma omp simd
      for (int t = 0; t < kLanes; ++t) {
        sums[g][t] += run[t];
        square_sums[g][t] += square_run[t];
      }
    }
  }
}

}  // namespace
}  // namespace focalkern::cpu
