// The plan of a calibration grid: which kind of sum over the classes each gamma takes. Host only: the host makes it
// once per grid, for both devices.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

#include "math/focal.h"
#include "math/grid_moments.h"

namespace focalkern {

// kMoments: a linear combination of shared sums (math/grid_moments.h). kReciprocal: one division per class, for a small
// whole gamma. kExponential: one exponential per class, for any gamma.
enum class Route : int32_t { kMoments, kReciprocal, kExponential };

constexpr int kMaxReciprocals = 2;
constexpr int kMaxWholeGamma = 8;
// Above this gamma, 1 / G(q) and its square approach the range of a float near q = 1/2. kExponential, whose sums are
// relative to the term of the runner-up, takes such a gamma.
constexpr double kMaxPlainGamma = 32;

struct GammaPlan {
  double gamma;
  Route route;
  int index;  // index among the gammas of its kind
  double coefficient[WideBasis::kTerms];
  double tail_coefficient[TailBasis::kTerms];
};

constexpr int64_t kMinTailClasses = 64;

// The largest allowed relative error of rho from a fit: half a unit in the last place of a float.
constexpr double kMaxFitError = 3e-8;

// Nodes that are dense at both ends of (0, max_q]: near 0, 1 / G is steep because of the logarithm.
inline std::vector<double> fit_nodes(double max_q, int per_end) {
  std::vector<double> nodes;
  for (int i = 0; i < per_end; ++i) {
    const double part = (i + 0.5) / per_end;
    nodes.push_back(max_q * std::exp(-30 * part));
    nodes.push_back(max_q * (0.5 - 0.5 * std::cos(part * 3.141592653589793)));
  }
  return nodes;
}

inline double inverse_g(double q, double gamma) {
  const double log_u = std::log1p(-q);
  return std::exp(-log_focal_g(phi_of(q, std::log(q), 1 - q), log_u, gamma));
}

// Least squares of sum_i c_i term_i / (1 / G) = 1 by Householder reflections. The basis is far from orthogonal; normal
// equations would lose half of the digits.
template <typename Basis>
class MomentFit {
 public:
  static constexpr int kTerms = Basis::kTerms;

  // Writes the coefficients; returns the largest relative error.
  double fit(double gamma, double (&coefficient)[kTerms]) const {
    if (gamma == 0) {  // 1 / G = 1 exactly
      std::fill_n(coefficient, kTerms, 0.0);
      coefficient[0] = 1;
      return 0;
    }
    const size_t n = nodes_.size();
    std::vector<double> a(n * kTerms), b(n, 1.0), v(n);
    for (size_t i = 0; i < n; ++i) row(nodes_[i], gamma, &a[i * kTerms]);
    for (int j = 0; j < kTerms; ++j) {
      double norm = 0;
      for (size_t i = j; i < n; ++i) norm += a[i * kTerms + j] * a[i * kTerms + j];
      const double alpha = a[j * kTerms + j] > 0 ? -std::sqrt(norm) : std::sqrt(norm);
      double v_norm = 0;
      for (size_t i = j; i < n; ++i) {
        v[i] = a[i * kTerms + j] - (i == static_cast<size_t>(j) ? alpha : 0.0);
        v_norm += v[i] * v[i];
      }
      for (int k = j; k <= kTerms; ++k) {
        double* column = k < kTerms ? &a[k] : b.data();
        const size_t stride = k < kTerms ? kTerms : 1;
        double dot = 0;
        for (size_t i = j; i < n; ++i) dot += v[i] * column[i * stride];
        for (size_t i = j; i < n; ++i) column[i * stride] -= 2 * dot / v_norm * v[i];
      }
    }
    for (int j = kTerms - 1; j >= 0; --j) {
      double rest = b[j];
      for (int k = j + 1; k < kTerms; ++k) rest -= a[j * kTerms + k] * coefficient[k];
      coefficient[j] = rest / a[j * kTerms + j];
    }
    double worst = 0;
    for (const double q : test_nodes_) {
      double terms[kTerms];
      row(q, gamma, terms);
      double value = 0;
      for (int j = 0; j < kTerms; ++j) value += terms[j] * coefficient[j];
      worst = std::max(worst, std::fabs(value - 1));
    }
    return worst;
  }

 private:
  static void row(double q, double gamma, double* out) {
    double terms[kTerms];
    Basis::terms(1 / inverse_g(q, gamma), q, -q * std::log(q), terms);
    std::memcpy(out, terms, sizeof(terms));
  }
  std::vector<double> nodes_ = fit_nodes(Basis::kMaxQ, 120), test_nodes_ = fit_nodes(Basis::kMaxQ, 401);
};

struct CalibrationGridPlan {
  std::vector<GammaPlan> gammas;
  int moments = 0, reciprocals = 0, exponentials = 0;  // gammas on each route
  bool tail = false;                                   // whether classes with a small q have sums of their own
};

// `shared`: whether a sum may serve several gammas. The fits have float accuracy and give the sum of p_hat, not that of
// p_hat^2, which the Brier score needs.
inline CalibrationGridPlan calibration_grid_plan(const double* gammas, int64_t n_gammas, int64_t classes, bool shared) {
  CalibrationGridPlan plan;
  const MomentFit<WideBasis> wide;
  const MomentFit<TailBasis> tail;
  // With fewer classes a separate sum for the tail does not pay.
  plan.tail = shared && classes >= kMinTailClasses;
  for (int64_t g = 0; g < n_gammas; ++g) {
    GammaPlan entry{gammas[g], Route::kExponential, 0, {}, {}};
    const bool whole = entry.gamma == std::floor(entry.gamma) && entry.gamma >= 1 && entry.gamma <= kMaxWholeGamma;
    if (shared && entry.gamma <= 1 && wide.fit(entry.gamma, entry.coefficient) <= kMaxFitError) {
      entry.route = Route::kMoments;
    } else if (shared && whole && plan.reciprocals < kMaxReciprocals) {
      entry.route = Route::kReciprocal;
    }
    plan.tail =
        plan.tail && entry.gamma <= kMaxPlainGamma && tail.fit(entry.gamma, entry.tail_coefficient) <= kMaxFitError;
    int& count = entry.route == Route::kMoments      ? plan.moments
                 : entry.route == Route::kReciprocal ? plan.reciprocals
                                                     : plan.exponentials;
    entry.index = count++;
    plan.gammas.push_back(entry);
  }
  return plan;
}

}  // namespace focalkern
