// Confidences, NLL and Brier score of one sample at every gamma, from the sums over its classes.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "cpu/calibration_grid/class_sums.h"
#include "cpu/calibration_grid/softmax.h"
#include "cpu/simd/dispatch.h"
#include "math/focal.h"

namespace focalkern::cpu {
namespace {

// The class of the label, if it is not t: the parts of a_y.
template <typename Real>
struct LabelPieces {
  Lanes<Real> minus_x;  // -x_y
  Lanes<Real> log_u;
  Lanes<Real> phi;
};
template <typename Real>
FK_VECTOR_CLONES void label_pieces(Real d_label, const Real* __restrict inverse_temperature,
                                   const SoftmaxPieces<Real>& pieces, LabelPieces<Real>* __restrict label) {
#pragma omp simd
  for (int t = 0; t < kLanes; ++t) {
    // The loss is not clamped: a class of probability 0 has an infinite loss.
    const Real product = d_label * inverse_temperature[t];
    const Real x = product < -kFar<Real> ? -std::numeric_limits<Real>::infinity() : product;
    const Real log_q = x - pieces.lse[t];
    const Real q = bounded_exponential(log_q);
    label->minus_x[t] = -x;
    label->log_u[t] = log_one_plus(-q);
    label->phi[t] = phi_of(q, log_q, Real(1) - q);
  }
}

// The NLL of kSamples samples, as a product with one logarithm for all of them. With R as above,
//   nll = log(1 + R) + [y != t] (-x_y + gamma (log u_y - log u_t) + log((1 + gamma phi_y) / (1 + gamma phi_t)))
// A double holds a product of kSamples factors up to 2^60. Where 1 + R would round away digits of R, a sum accumulates
// R.
struct NllOfGroup {
  Lanes<double> product;
  Lanes<double> small;
};
struct LinearNllOfGroup {  // the same for every gamma
  Lanes<double> minus_x;
  Lanes<double> log_u_gap;
};
template <typename Real>
FK_HOST_DEVICE void add_odds(Real odds, double factor, double* product, double* small) {
  const bool is_small = odds < Real(1e-5);
  const Real log_series = odds * (Real(1) - odds * (Real(0.5) - odds * Real(1.0 / 3)));
  *small += static_cast<double>(is_small ? log_series : Real(0));
  *product *= factor * (1.0 + static_cast<double>(is_small ? Real(0) : odds));
}
template <typename Real>
FK_HOST_DEVICE Real denominator_ratio(const SoftmaxPieces<Real>& pieces, const LabelPieces<Real>& label,
                                      Gamma<Real> gamma, int t) {
  const Real ratio = (Real(1) + gamma.value * label.phi[t]) / top_denominator(gamma, pieces.psi[t]);
  // Only gammas above 2^60 give less; the other terms of the NLL then dominate.
  return ratio < Real(0x1p-60) ? Real(0x1p-60) : ratio;
}
template <typename Real>
FK_VECTOR_CLONES void add_linear_nll(const SoftmaxPieces<Real>& pieces, const LabelPieces<Real>& label,
                                     LinearNllOfGroup* __restrict linear) {
#pragma omp simd
  for (int t = 0; t < kLanes; ++t) {
    linear->minus_x[t] += static_cast<double>(label.minus_x[t]);
    linear->log_u_gap[t] += static_cast<double>(label.log_u[t]) - static_cast<double>(pieces.log_u[t]);
  }
}
FK_VECTOR_CLONES void nll_of_group(const NllOfGroup& nll, const LinearNllOfGroup& linear, double gamma,
                                   double* __restrict sum /* [kLanes] */) {
#pragma omp simd
  for (int t = 0; t < kLanes; ++t) {
    sum[t] = nll.small[t] + logarithm(nll.product[t]) + (linear.minus_x[t] + gamma * linear.log_u_gap[t]);
  }
}

// The numbers of one gamma.
template <typename Real>
struct CellPlan {
  Gamma<Real> gamma;
  Real coefficient[kMoments];
  Real tail_coefficient[kTailMoments];
  const Real* numerator;   // [kLanes]: sum_k e_k / G(q_k); null if the moments give it
  const Real* square_sum;  // [kLanes]: sum_k (e_k / G(q_k))^2, for the Brier score
};

// Confidences and NLL for every gamma from the sums over the classes. `label` is null if the label is t.
template <typename Real, bool kWithNll, bool kWithLabel>
FK_VECTOR_CLONES void finish_cells(const SoftmaxPieces<Real>& pieces, const LabelPieces<Real>& label,
                                   const Lanes<Real>* __restrict moments,
                                   const Lanes<Real>* __restrict tail_moments /* or null */,
                                   const CellPlan<Real>* __restrict plans, int64_t n_gammas,
                                   Lanes<Real>* __restrict confidence /* [n_gammas] */,
                                   Lanes<Real>* __restrict odds /* [n_gammas] */,
                                   NllOfGroup* __restrict nll /* [n_gammas] */) {
  for (int64_t g = 0; g < n_gammas; ++g) {
    const CellPlan<Real>& plan = plans[g];
    const Gamma<Real> gamma = plan.gamma;
    Lanes<Real> numerator;
    if (plan.numerator == nullptr) {
#pragma omp simd
      for (int t = 0; t < kLanes; ++t) {
        Real sum = plan.coefficient[0] * moments[0][t];
        for (int i = 1; i < kMoments; ++i) sum += plan.coefficient[i] * moments[i][t];
        numerator[t] = sum;
      }
    } else {
      std::memcpy(numerator.value, plan.numerator, sizeof(numerator));
    }
    if (tail_moments != nullptr) {
#pragma omp simd
      for (int t = 0; t < kLanes; ++t) {
        Real sum = plan.tail_coefficient[0] * tail_moments[0][t];
        for (int i = 1; i < kTailMoments; ++i) sum += plan.tail_coefficient[i] * tail_moments[i][t];
        numerator[t] += sum;
      }
    }
#pragma omp simd
    for (int t = 0; t < kLanes; ++t) {
      const Real rho = numerator[t] * pieces.mean_weight[t];
      const Real plain = gamma.plus_one * pieces.log_u[t] + pieces.lse[t];
      const Real log_u_second = log_one_plus(-pieces.scale[t]);
      // u_t <= u of the runner-up, except for rounding. For ties a large gamma would amplify the rounding error.
      const Real gap = pieces.log_u[t] < log_u_second ? pieces.log_u[t] - log_u_second : Real(0);
      const Real relative = pieces.log_u[t] + pieces.lse[t] + gamma.value * gap;
      // At most the number of classes: R is rho times slightly more than this.
      const Real scale = bounded_exponential(gamma.value > Real(kMaxPlainGamma) ? relative : plain);
      odds[g][t] = rho * top_denominator(gamma, pieces.psi[t]) * scale;
      confidence[g][t] = Real(1) / (Real(1) + odds[g][t]);
    }
    if constexpr (kWithNll) {
#pragma omp simd
      for (int t = 0; t < kLanes; ++t) {
        const double ratio = kWithLabel ? static_cast<double>(denominator_ratio(pieces, label, gamma, t)) : 1.0;
        add_odds(odds[g][t], ratio, &nll[g].product[t], &nll[g].small[t]);
      }
    }
  }
}

// sum_k (p_k - [k = y])^2 with p_k = confidence * e^(a_k - a_t); the sums over the classes give the squares of all but
// t.
template <typename Real>
FK_VECTOR_CLONES void add_brier(const SoftmaxPieces<Real>& pieces, const LabelPieces<Real>* label,
                                const CellPlan<Real>& plan, const Real* __restrict odds,
                                const Real* __restrict confidence, double* __restrict brier) {
  const Gamma<Real> gamma = plan.gamma;
  const Real* __restrict numerator = plan.numerator;
  const Real* __restrict square_sum = plan.square_sum;
  if (label == nullptr) {
#pragma omp simd
    for (int t = 0; t < kLanes; ++t) {
      const Real others = odds[t] * confidence[t];  // 1 - confidence
      const Real squares = others * others * (square_sum[t] / (numerator[t] * numerator[t]));
      brier[t] += static_cast<double>(others * others + squares);
    }
    return;
  }
#pragma omp simd
  for (int t = 0; t < kLanes; ++t) {
    const Real others = odds[t] * confidence[t];
    const Real squares = others * others * (square_sum[t] / (numerator[t] * numerator[t]));
    // a_t - a_y. The map keeps t on top; for ties a large gamma would amplify the rounding error.
    Real gap = label->minus_x[t] + scaled_log(gamma.value, label->log_u[t] - pieces.log_u[t]) +
               logarithm(denominator_ratio(pieces, *label, gamma, t));
    gap = gap > Real(0) ? gap : Real(0);
    const Real p_label = confidence[t] * exponential(-gap);
    brier[t] +=
        static_cast<double>(confidence[t] * confidence[t] + squares) + (1.0 - 2.0 * static_cast<double>(p_label));
  }
}

}  // namespace
}  // namespace focalkern::cpu
