// The calibration grid on the CPU: ECE, MCE, NLL and Brier score of every (gamma, temperature) at once.
//
// Stage 1 goes over the samples. It reads a row once per block of temperatures, takes the softmax once per
// temperature, and derives every gamma from that; a vector lane is a temperature. What it leaves behind is the
// confidence of each (temperature, gamma, sample) and sums of NLL and Brier score per chunk of rows.
// Stage 2 goes over the cells (temperature, gamma). It finds the bins of a cell by counting, without sorting it.
//
// With t the class of the largest logit, x_k = (z_k - z_t) / T, and sums over the classes k other than t:
//   S = sum e^(x_k),  L = log(1 + S),  log q_t = -L,  log u_t = log S - L,  phi_t = L / S
//   log q_k = x_k - L,  and q_k <= 1/2
//   rho = sum_k q_k / G(q_k) / sum_k q_k      the mean of 1 / G over the other classes
//   R = rho (1 + gamma phi_t) exp((1 + gamma) log u_t + L)      odds against the class t
//   confidence = 1 / (1 + R),  -log p_hat_t = log(1 + R)
// Nothing here cancels or overflows: (1 + gamma) is positive, and the map keeps t on top, so that R <= classes - 1.
// S is summed relative to its largest term, because that alone may underflow while R does not (gamma near -1).
//
// Only rho looks at all classes. For a gamma between -1 and 1, 1 / G is a smooth function of q and s = -q log q on
// [0, 1/2], and a sum over the classes of twelve products q^i s^j serves all such gammas; the coefficients are
// fitted when the grid starts, and the fit is checked. A small whole gamma needs one division per class. Anything
// else, float64 and the Brier score take an exponential per class and gamma. Where there are many classes most have a
// q below 1/200, and there seven products serve every gamma up to 5 or so.

#include <algorithm>
#include <cmath>
#include <cstring>
#include <utility>
#include <vector>

#include "cpu/simd/dispatch.h"
#include "cpu/simd/vector.h"
#include "kernels/calibration_grid.h"
#include "math/focal.h"
#include "math/grid_plan.h"

namespace focalkern::cpu {

namespace {

constexpr int kLanes = 16;    // temperatures that are worked on together
constexpr int kRun = 64;      // classes that are summed on their own: one long float sum would lose digits
constexpr int kSamples = 16;  // samples whose confidences are written together: a cache line of floats
constexpr int kMoments = WideBasis::kTerms;
constexpr int kTailMoments = TailBasis::kTerms;

// ---- stage 1 -------------------------------------------------------------------------------------------------------

// Gaps and 1 / T are kept within this, so that 0 * x is 0 for a class that cannot occur, and so that a product of the
// two or a multiple of one stays finite or overflows the right way.
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

// gamma with what rounding would take from it: near -1, 1 + gamma and 1 + gamma phi cancel.
template <typename Real>
struct Gamma {
  Real value;
  Real plus_one;
};
template <typename Real>
Gamma<Real> rounded_gamma(double gamma) {
  // A larger gamma leaves all to the top class already, and its square, by which sums are divided, would overflow.
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
    // phi_t = log(1 + S) / S. The series of 1 - phi_t serves where the difference would cancel, also where S
    // underflows to 0.
    const Real series = odds * (Real(0.5) - odds * (Real(1.0 / 3) - odds * (Real(0.25) - odds * Real(0.2))));
    pieces->psi[t] = odds < Real(sizeof(Real) == sizeof(float) ? 0.02 : 1e-4) ? series : Real(1) - lse / odds;
  }
}

// The sums over the classes behind rho. `whole` holds the gammas of the reciprocal route: 1 / G(q) is
// 1 / (u^(gamma - 1) (u + gamma s)), and the power is a product of some of u, u^2 and u^4.
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

// The same for classes with a q of at most TailBasis::kMaxQ, for every gamma.
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

// Moves the classes whose q leaves the tail at some of the temperatures to the front, in d and e, and returns their
// number. They mostly stay the same from one group of temperatures to the next.
template <typename Real>
int64_t split_classes(int64_t n, Real* __restrict d, Lanes<Real>* __restrict e, const SoftmaxPieces<Real>& pieces,
                      const Lanes<Real>& inverse_temperature) {
  // e_k grows with T.
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

// The sums behind rho for any gamma, and those of the squares for the Brier score.
template <typename Real>
FK_VECTOR_CLONES void exact_sums(const Real* __restrict d, int64_t n, const Real* __restrict inverse_temperature,
                                 const Real* __restrict e, const SoftmaxPieces<Real>& pieces,
                                 const Real* __restrict gammas, int64_t n_gammas,
                                 Lanes<Real>* __restrict sums /* [n_gammas] */,
                                 Lanes<Real>* __restrict square_sums /* [n_gammas] */) {
  for (int64_t g = 0; g < n_gammas; ++g) sums[g] = square_sums[g] = {};
  // A run of classes at a time, so that its logarithms serve all gammas.
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

// The label's class where it is not t: what its own a_y needs.
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
    // Not kept finite: a class that cannot occur has an infinite loss.
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
// A double holds a product of kSamples factors up to 2^60. Where 1 + R would drop the digits of R, R goes into a sum.
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
  // Only a gamma beyond 2^60 gets below this, and there the other terms leave nothing of this one.
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

// What every cell of a temperature needs to know of its gamma.
template <typename Real>
struct CellPlan {
  Gamma<Real> gamma;
  Real coefficient[kMoments];
  Real tail_coefficient[kTailMoments];
  const Real* numerator;   // [kLanes]: sum_k e_k / G(q_k), or null: the combination of the moments
  const Real* square_sum;  // [kLanes]: sum_k (e_k / G(q_k))^2, for the Brier score
};

// From the sums over the classes to confidences and NLL, for every gamma. `label` is null where the label is t.
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
      // Rounding apart u_t <= u of the runner-up; where they tie, a large gamma would blow up the rounding.
      const Real gap = pieces.log_u[t] < log_u_second ? pieces.log_u[t] - log_u_second : Real(0);
      const Real relative = pieces.log_u[t] + pieces.lse[t] + gamma.value * gap;
      // At most the number of classes: R is a little more than rho times this.
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

// sum_k (p_k - [k = y])^2. p_k = confidence times e^(a_k - a_t), and the squares of the others are known by their sum.
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
    // a_t - a_y; the map keeps t on top, but where the two tie a large gamma blows up the rounding
    Real gap = label->minus_x[t] + scaled_log(gamma.value, label->log_u[t] - pieces.log_u[t]) +
               logarithm(denominator_ratio(pieces, *label, gamma, t));
    gap = gap > Real(0) ? gap : Real(0);
    const Real p_label = confidence[t] * exponential(-gap);
    brier[t] +=
        static_cast<double>(confidence[t] * confidence[t] + squares) + (1.0 - 2.0 * static_cast<double>(p_label));
  }
}

// log p with denormal p, which `logarithm` takes for 0: a float32 softmax does produce them.
template <typename Real>
FK_HOST_DEVICE Real log_probability(Real p) {
  const Real rescaled = p * Real(0x1p64);
  const bool small = p < Real(0x1p-60);
  return logarithm(small ? rescaled : p) - (small ? Real(64 * 0.693147180559945309) : Real(0));
}

// One row, as gaps to its largest logit.
template <typename Real>
struct Row {
  Real* d;  // [classes - 1]: z_k - z_t of the classes other than t, kept finite
  Real second;
  Real label;
  bool correct;
};
template <typename Scalar>
FK_VECTOR_CLONES void load_gaps(const Scalar* __restrict input, int64_t classes, bool probs, int64_t top,
                                compute_t<Scalar>* __restrict d /* [classes] */) {
  using Real = compute_t<Scalar>;
  if (probs) {
    const Real log_top = log_probability(load_as_compute(input[top]));
    for (int64_t k = 0; k < classes; ++k) d[k] = log_probability(load_as_compute(input[k])) - log_top;
  } else {
    const Real z_top = load_as_compute(input[top]);
    for (int64_t k = 0; k < classes; ++k) d[k] = load_as_compute(input[k]) - z_top;
  }
}
template <typename Real>
FK_VECTOR_CLONES Real largest_and_bound(Real* __restrict d, int64_t n) {
  Real largest = -std::numeric_limits<Real>::infinity();
#pragma omp simd reduction(max : largest)
  for (int64_t k = 0; k < n; ++k) largest = d[k] > largest ? d[k] : largest;
  for (int64_t k = 0; k < n; ++k) d[k] = d[k] < -kFar<Real> ? -kFar<Real> : d[k];
  return largest < -kFar<Real> ? -kFar<Real> : largest;
}
template <typename Scalar>
void load_row(const CalibrationGridSamples<Scalar>& samples, int64_t row, Row<compute_t<Scalar>>* out) {
  const int64_t source = samples.input_row(row);
  const int64_t n = samples.classes - 1;
  const int64_t top = samples.top[row];
  load_gaps(samples.input + source * samples.row_stride, samples.classes, samples.input_is_probs, top, out->d);
  out->label = out->d[samples.labels[source]];
  out->correct = samples.correct[row] != 0;
  out->d[top] = out->d[n];  // the order of the others does not matter
  out->second = largest_and_bound(out->d, n);
}

// From one vector of temperatures per sample to one run of samples per temperature.
template <typename Real>
void write_confidences(const Real* __restrict in, int64_t in_stride, int64_t n_rows, int64_t n_lanes,
                       Real* __restrict out, int64_t out_stride) {
  if constexpr (sizeof(Real) == sizeof(float)) {
    // By squares of four, which fit any vector unit.
    using Four [[gnu::vector_size(16)]] = float;
    if (n_rows == kSamples) {
      for (int64_t t = 0; t < n_lanes; t += 4) {
        for (int64_t i = 0; i < kSamples; i += 4) {
          Four v[4];
          for (int64_t j = 0; j < 4; ++j) std::memcpy(&v[j], in + (i + j) * in_stride + t, sizeof(v[j]));
          transpose_4x4(v);
          for (int64_t j = 0; j < std::min<int64_t>(4, n_lanes - t); ++j) {
            std::memcpy(out + (t + j) * out_stride + i, &v[j], sizeof(v[j]));
          }
        }
      }
      return;
    }
  }
  for (int64_t t = 0; t < n_lanes; ++t) {
    for (int64_t i = 0; i < n_rows; ++i) out[t * out_stride + i] = in[i * in_stride + t];
  }
}

}  // namespace

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
          // The last group repeats its last temperature.
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

// ---- stage 2 -------------------------------------------------------------------------------------------------------

namespace {

template <typename Real>
struct KeyType;
template <>
struct KeyType<float> {
  using type = uint32_t;
};
template <>
struct KeyType<double> {
  using type = uint64_t;
};
template <typename Real>
using KeyOf = typename KeyType<Real>::type;

// A key that orders confidences as integers, and is spaced like their logits: by the exponent below 1/2, by that of
// 1 - c (which is exact) above. Networks are sure of most of their answers, and would share one bucket otherwise.
template <typename Real>
FK_HOST_DEVICE KeyOf<Real> confidence_key(Real c) {
  using Key = KeyOf<Real>;
  // c = 1 comes one octave above its neighbour.
  constexpr Real kLeast = std::numeric_limits<Real>::epsilon() / 4;
  const Real u = Real(1) - c;
  const Key above = 2 * bit_cast<Key>(Real(0.5)) - bit_cast<Key>(u < kLeast ? kLeast : u);
  return c < Real(0.5) ? bit_cast<Key>(c) : above;
}

template <typename Real>
FK_VECTOR_CLONES void key_range(const Real* __restrict confidence, int64_t rows, Real* least, Real* most) {
  Real low = Real(1), high = Real(0);
#pragma omp simd reduction(min : low) reduction(max : high)
  for (int64_t i = 0; i < rows; ++i) {
    low = confidence[i] < low ? confidence[i] : low;
    high = confidence[i] > high ? confidence[i] : high;
  }
  *least = low;
  *most = high;
}

// confidence - correct of one sample, and a sum of it. For float in units of 2^-30: confidences above 1/64 are whole
// multiples of it, others are off by half of it at most, and integers add up fast, exactly and in any order.
template <typename Real>
struct Excess;
template <>
struct Excess<float> {
  using One = int32_t;
  using Sum = int64_t;
  static FK_HOST_DEVICE One of(float confidence, int32_t correct) {
    return static_cast<int32_t>(confidence * 0x1p30f) - (correct << 30);
  }
  static double value(Sum sum) { return static_cast<double>(sum) * 0x1p-30; }
};
template <>
struct Excess<double> {
  using One = double;
  using Sum = double;
  static FK_HOST_DEVICE One of(double confidence, int32_t correct) { return confidence - correct; }
  static double value(Sum sum) { return sum; }
};

template <typename Real>
FK_VECTOR_CLONES void buckets_and_excess(const Real* __restrict confidence, const uint8_t* __restrict correct,
                                         int64_t rows, KeyOf<Real> base, int shift, int32_t* __restrict bucket,
                                         typename Excess<Real>::One* __restrict excess) {
  for (int64_t i = 0; i < rows; ++i) {
    bucket[i] = static_cast<int32_t>((confidence_key(confidence[i]) - base) >> shift);
    excess[i] = Excess<Real>::of(confidence[i], correct[i]);
  }
}

// What sorts like (confidence, row).
FK_HOST_DEVICE uint64_t sort_key(float confidence, int32_t row) {
  return static_cast<uint64_t>(bit_cast<uint32_t>(confidence)) << 32 | static_cast<uint32_t>(row);
}
FK_HOST_DEVICE int32_t row_of(uint64_t key) { return static_cast<int32_t>(key); }
inline std::pair<double, int32_t> sort_key(double confidence, int32_t row) { return {confidence, row}; }
inline int32_t row_of(const std::pair<double, int32_t>& key) { return key.second; }

// The samples of one cell in the order of their confidences, known to the resolution of its buckets; a bucket is
// sorted when a cut falls into it.
template <typename Real>
class OrderedConfidences {
 public:
  explicit OrderedConfidences(int64_t rows) : rows_(rows), bucket_of_(rows), next_(rows), excess_(rows) {
    // Few samples per bucket where a cut falls, but buckets that stay in the caches next to the core.
    int64_t buckets = 64;
    while (buckets < 4096 && buckets * 4 < rows) buckets *= 2;
    buckets_.resize(buckets);
  }

  void assign(const Real* confidence, const uint8_t* correct) {
    confidence_ = confidence;
    Real least, most;
    key_range(confidence, rows_, &least, &most);
    base_ = confidence_key(least);
    const KeyOf<Real> range = confidence_key(most) - base_;
    shift_ = 0;
    while (static_cast<int64_t>(range >> shift_) >= static_cast<int64_t>(buckets_.size())) ++shift_;
    used_ = static_cast<int64_t>(range >> shift_) + 1;
    buckets_and_excess(confidence, correct, rows_, base_, shift_, bucket_of_.data(), excess_.data());

    std::fill_n(buckets_.begin(), used_, Bucket{0, kEmpty});
    for (int64_t i = 0; i < rows_; ++i) {
      Bucket& bucket = buckets_[bucket_of_[i]];
      bucket.excess += excess_[i];
      next_[i] = static_cast<int32_t>(bucket.count_and_last);
      bucket.count_and_last = (bucket.count_and_last & ~kLastMask) + (kLastMask + 1) + static_cast<uint64_t>(i);
    }
    rewind();
  }

  // The cursor passes over the buckets once; what it is asked for must not descend.
  void rewind() {
    cursor_ = 0;
    rank_ = 0;
    below_ = 0;
    opened_ = -1;
  }

  // The sum of confidence - correct over the `count` lowest samples.
  double excess_of_lowest(int64_t count) {
    advance_to_rank(count);
    if (rank_ == count) return Excess<Real>::value(below_);
    open();
    // Cuts that share a bucket go on where the one before them stopped.
    for (; summed_ < count - rank_; ++summed_) partial_ += excess_[row_of(sorted_[summed_])];
    return Excess<Real>::value(below_ + partial_);
  }

  Real confidence_at(int64_t rank) {
    advance_to_rank(rank);
    open();
    return confidence_[row_of(sorted_[rank - rank_])];
  }

  // Count and sum of the samples with a confidence of at most `edge`.
  BinSums up_to(Real edge) {
    const KeyOf<Real> bucket = (confidence_key(edge) - base_) >> shift_;
    while (cursor_ < static_cast<int64_t>(bucket)) advance();
    open();
    for (; summed_ < static_cast<int64_t>(sorted_.size()); ++summed_) {
      const int32_t row = row_of(sorted_[summed_]);
      if (confidence_[row] > edge) break;
      partial_ += excess_[row];
    }
    return {rank_ + summed_, Excess<Real>::value(below_ + partial_)};
  }

 private:
  using Sum = typename Excess<Real>::Sum;
  using SortKey = decltype(sort_key(Real(), 0));
  struct Bucket {
    Sum excess;
    uint64_t count_and_last;  // its samples are a list through next_, the last row first; -1 ends it
    int64_t count() const { return static_cast<int64_t>(count_and_last >> 32); }
  };
  static constexpr uint64_t kLastMask = 0xffffffff;
  static constexpr uint64_t kEmpty = kLastMask;

  void advance() {
    rank_ += buckets_[cursor_].count();
    below_ += buckets_[cursor_].excess;
    ++cursor_;
  }
  void advance_to_rank(int64_t rank) {
    while (cursor_ < used_ && rank_ + buckets_[cursor_].count() <= rank) advance();
  }

  void open() {
    if (opened_ == cursor_) return;
    opened_ = cursor_;
    summed_ = 0;
    partial_ = 0;
    sorted_.resize(buckets_[cursor_].count());
    size_t i = sorted_.size();
    int32_t row = static_cast<int32_t>(buckets_[cursor_].count_and_last);
    for (; row >= 0; row = next_[row]) sorted_[--i] = sort_key(confidence_[row], row);
    // The rows ascend, so the one large bucket of a saturated cell, all ties, is sorted as it is.
    if (!std::is_sorted(sorted_.begin(), sorted_.end())) std::sort(sorted_.begin(), sorted_.end());
  }

  int64_t rows_;
  const Real* confidence_ = nullptr;
  KeyOf<Real> base_ = 0;
  int shift_ = 0;
  int64_t used_ = 0;
  // The buckets before the cursor hold `rank_` samples and the sum `below_`.
  int64_t cursor_ = 0, rank_ = 0, opened_ = -1;
  Sum below_ = 0;
  // The opened bucket in order, and the sum of its first samples.
  int64_t summed_ = 0;
  Sum partial_ = 0;
  std::vector<int32_t> bucket_of_, next_;
  std::vector<typename Excess<Real>::One> excess_;
  std::vector<Bucket> buckets_;
  std::vector<SortKey> sorted_;
};

// Independent copies of the bins: neighbouring samples mostly share a bin, and would wait for each other.
constexpr int kCopies = 4;
template <typename Real>
void equal_width_bins(const Real* confidence, const uint8_t* correct, int64_t rows, int64_t n_bins,
                      std::vector<BinSums>& scratch, BinSums* bins) {
  std::fill(scratch.begin(), scratch.end(), BinSums{0, 0.0});
  for (int64_t i = 0; i < rows; ++i) {
    BinSums& bin = scratch[(i % kCopies) * n_bins + equal_width_bin(confidence[i], n_bins)];
    bin.count += 1;
    bin.excess += static_cast<double>(confidence[i]) - static_cast<double>(correct[i]);
  }
  for (int64_t b = 0; b < n_bins; ++b) {
    bins[b] = BinSums{0, 0.0};
    for (int copy = 0; copy < kCopies; ++copy) {
      bins[b].count += scratch[copy * n_bins + b].count;
      bins[b].excess += scratch[copy * n_bins + b].excess;
    }
  }
}

template <typename Real>
void equal_mass_bins(OrderedConfidences<Real>& order, int64_t rows, int64_t n_bins, BinSums* bins) {
  double below = 0;
  for (int64_t b = 0; b < n_bins; ++b) {
    const int64_t end = equal_mass_begin(b + 1, rows, n_bins);
    const double up_to = order.excess_of_lowest(end);
    bins[b] = {end - equal_mass_begin(b, rows, n_bins), up_to - below};
    below = up_to;
  }
}

template <typename Real>
void equal_mass_interp_bins(OrderedConfidences<Real>& order, int64_t rows, int64_t n_bins, BinSums* bins) {
  // Three passes, because with fewer samples than bins an edge may ask for a rank below that of the edge before it.
  std::vector<Real> edges(n_bins + 1), upper(n_bins + 1);
  for (int64_t edge = 0; edge <= n_bins; ++edge) {
    edges[edge] = order.confidence_at(equal_mass_interp_rank(edge, rows, n_bins).rank);
  }
  order.rewind();
  for (int64_t edge = 0; edge <= n_bins; ++edge) {
    upper[edge] = order.confidence_at(equal_mass_interp_rank(edge, rows, n_bins).next);
  }
  order.rewind();
  BinSums below{};
  for (int64_t edge = 0; edge <= n_bins; ++edge) {
    const double fraction = equal_mass_interp_rank(edge, rows, n_bins).fraction;
    const BinSums up_to = order.up_to(equal_mass_interp_edge(edges[edge], upper[edge], fraction));
    if (edge > 0) bins[edge - 1] = {up_to.count - below.count, up_to.excess - below.excess};
    below = up_to;
  }
}

}  // namespace

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
