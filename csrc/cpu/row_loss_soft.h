// Soft targets and label smoothing.
//
//   t = (1 - e) target + e / C,   dL/dz_j = p_j sum_i a_i - a_j,  a_i = -p_i dL/dp_i
//   focal: L = -sum_i w_i t_i f(p_i) log p_i,  a = w t c(p)
//
// One row at a time, in scratch arrays over the classes.
#pragma once

#include <algorithm>
#include <limits>
#include <memory>

#include "cpu/row_loss_finish.h"
#include "cpu/row_loss_rows.h"
#include "cpu/row_loss_tile.h"
#include "cpu/vector_clones.h"

namespace focalkern::cpu {
namespace {

template <typename Real>
struct SoftRow {
  explicit SoftRow(int64_t classes)
      : padded((classes + kLanes<Real> - 1) & -kLanes<Real>),
        storage(new Real[padded + 5 * classes]),
        z(storage.get()),
        log_q(z + padded),
        log_u(log_q + classes),
        gamma(log_u + classes),
        target(gamma + classes),
        slope(target + classes) {}
  int64_t padded;  // classes, up to whole vectors
  std::unique_ptr<Real[]> storage;
  Real* z;       // [padded] logits, then the gradient
  Real* log_q;   // log-probabilities
  Real* log_u;   // log(1 - q)
  Real* gamma;   // gamma of each class (one table look-up each)
  Real* target;  // w_i t_i, or t_i where the row has one weight
  Real* slope;   // a_i
  int64_t top;   // first largest class
  Real weight;   // of the row, where it has one
  Real exp_zero = kExpZero<Real>;
};

struct SoftSums {
  template <int64_t bytes, typename Real>
  static FK_HOST_DEVICE void run(int64_t classes, SoftRow<Real>& row, Real* max, Real* log_s, Real* log_u_top) {
    constexpr int64_t n = kLanesOf<bytes, Real>;
    const Real m = max_of<n>(row.z, row.padded);
    row.top = 0;
    while (row.top + 1 < classes && row.z[row.top] != m) ++row.top;
    double rest = 0;
    for (int64_t begin = 0; begin < row.padded; begin += kBlock) {
      rest += sum_exp_except<n, false>(row.z + begin, std::min(kBlock, row.padded - begin), m, row.top - begin,
                                       row.exp_zero)
                  .first;
    }
    *max = m;
    // m - m is NaN for an infinite m, which the sum over the other classes would not show.
    *log_s = log_one_plus(static_cast<Real>(rest)) + (m - m);
    *log_u_top = logarithm(static_cast<Real>(rest)) - *log_s;
  }
};

template <typename Real>
FK_VECTOR_CLONES void soft_pieces(int64_t classes, Real max, Real log_s, Real log_u_top, SoftRow<Real>& row) {
#pragma omp simd
  for (int64_t c = 0; c < classes; ++c) {
    const Real log_q = (row.z[c] - max) - log_s;
    row.log_q[c] = log_q;
    row.log_u[c] = log_one_plus(-exponential(log_q));
  }
  row.log_u[row.top] = log_u_top;
}

template <typename Loss, typename Real>
FK_VECTOR_CLONES Real soft_loss(int64_t classes, Real epsilon, const SoftRow<Real>& row) {
  const Real *log_q = row.log_q, *log_u = row.log_u, *gamma = row.gamma, *target = row.target;
  Real sum = 0;
#pragma omp simd reduction(+ : sum)
  for (int64_t c = 0; c < classes; ++c) {
    sum += Loss::class_terms(log_q[c], log_u[c], gamma[c], epsilon, false, target[c]).loss;
  }
  return sum;
}

template <typename Loss, typename Real>
FK_VECTOR_CLONES void soft_slopes(int64_t classes, Real epsilon, bool detach_modulation, SoftRow<Real>& row,
                                  Real* grad_gamma) {
  const Real *log_q = row.log_q, *log_u = row.log_u, *gamma = row.gamma, *target = row.target;
  Real* slope = row.slope;
  const Real detached = detach_modulation ? 1 : 0;
  Real gamma_sum = 0;
#pragma omp simd reduction(+ : gamma_sum)
  for (int64_t c = 0; c < classes; ++c) {
    const ClassTerms<Real> terms =
        Loss::class_terms(log_q[c], log_u[c], gamma[c], epsilon, detached > Real(0), target[c]);
    slope[c] = terms.slope;
    gamma_sum += terms.grad_gamma;
  }
  *grad_gamma = gamma_sum;
}

// dL/dz_j = q_j (A - a_j) - u_j a_j: written so that the largest class does not subtract a_j from q_j a_j as q_j -> 1.
template <typename Real>
FK_VECTOR_CLONES void soft_grad(int64_t classes, Real scale, SoftRow<Real>& row) {
  Real others = 0;
  const Real top_slope = row.slope[row.top];
  row.slope[row.top] = 0;
#pragma omp simd reduction(+ : others)
  for (int64_t c = 0; c < classes; ++c) others += row.slope[c];
  const Real all = others + top_slope;
#pragma omp simd
  for (int64_t c = 0; c < classes; ++c) {
    const Real a = row.slope[c];
    row.z[c] = scale * (exponential(row.log_q[c]) * (all - a) - exponential(row.log_u[c]) * a);
  }
  row.slope[row.top] = top_slope;
  row.z[row.top] = scale * (exponential(row.log_q[row.top]) * others - exponential(row.log_u[row.top]) * top_slope);
}

template <typename Loss, typename Real>
FK_VECTOR_CLONES void soft_grad_target(int64_t classes, Real epsilon, Real scale, SoftRow<Real>& row) {
  const Real *log_q = row.log_q, *log_u = row.log_u, *gamma = row.gamma, *target = row.target;
  Real* slope = row.slope;
#pragma omp simd
  for (int64_t c = 0; c < classes; ++c) {
    slope[c] = scale * Loss::class_terms(log_q[c], log_u[c], gamma[c], epsilon, false, target[c]).grad_share;
  }
}

// Logits and target of one row. Returns the weight that the row adds to the mean, or -1 for an invalid label; an
// ignored row has weight 0 and `ignored` set.
template <typename Loss, typename Scalar>
double read_soft_row(const FocalLossArgs<Scalar>& args, int64_t index, SoftRow<compute_t<Scalar>>& row, bool* ignored) {
  using Real = compute_t<Scalar>;
  const Scalar* z = args.logits + args.layout.row_offset(index);
  for (int64_t c = 0; c < args.classes; ++c) row.z[c] = load_as_compute(z[c * args.layout.class_stride]);
  std::fill(row.z + args.classes, row.z + row.padded, -std::numeric_limits<Real>::infinity());
  const Real kept = Real(1) - args.label_smoothing;
  const Real spread = args.label_smoothing / static_cast<Real>(args.classes);
  double weight = 1;
  row.weight = 1;
  *ignored = false;
  if (args.target_probs) {
    const Real* target = args.target_probs + args.target_layout.row_offset(index);
    Real mean = 0;
    for (int64_t c = 0; c < args.classes; ++c) {
      const Real share = target[c * args.target_layout.class_stride];
      row.target[c] = kept * share + spread;
      if (Loss::kTarget == SoftTarget::kRows && args.class_weight) mean += args.class_weight[c] * share;
    }
    if (Loss::kTarget == SoftTarget::kRows && args.class_weight) row.weight = mean;
  } else {
    const int64_t label = args.labels[index];
    if (label == args.ignore_index) {
      *ignored = true;
      return 0;
    }
    if (label < 0 || label >= args.classes) return -1;
    std::fill(row.target, row.target + args.classes, spread);
    row.target[label] += kept;
    if (args.class_weight) weight = args.class_weight[label];
    if (Loss::kTarget == SoftTarget::kRows) row.weight = static_cast<Real>(weight);
  }
  if (Loss::kTarget == SoftTarget::kClasses && args.class_weight) {
    for (int64_t c = 0; c < args.classes; ++c) row.target[c] *= args.class_weight[c];
  }
  if (!args.edges) {
    const Real gamma = args.gamma ? args.gamma[index * args.gamma_stride] : args.gamma_value;
    std::fill(row.gamma, row.gamma + args.classes, gamma);
  }
  return weight;
}

template <typename Loss, typename Scalar>
FocalLossSums forward_soft(const FocalLossForward<Scalar>& args, int64_t row_begin, int64_t row_end) {
  using Real = compute_t<Scalar>;
  SoftRow<Real> row(args.classes);
  FocalLossSums sums{0, 0, -1};
  for (int64_t index = row_begin; index < row_end; ++index) {
    Real max = 0, log_s = 0, log_u_top = 0, loss = 0;
    bool ignored;
    const double weight = read_soft_row<Loss>(args, index, row, &ignored);
    if (weight < 0) {
      sums.invalid_row = index;
      return sums;
    }
    if (!ignored) {
      run_in_widest<SoftSums>(args.classes, row, &max, &log_s, &log_u_top);
      soft_pieces(args.classes, max, log_s, log_u_top, row);
      if (args.edges) look_up_gamma_of_log(row.log_q, args.classes, args.edges, args.gamma, args.n_bins, row.gamma);
      loss = row.weight * soft_loss<Loss>(args.classes, args.epsilon, row);
    }
    args.saved[index] = max;
    args.saved[args.rows + index] = log_s;
    args.saved[2 * args.rows + index] = log_u_top;
    if constexpr (Loss::kMarked != Marked::kNone) args.saved[3 * args.rows + index] = 0;
    if (args.row_loss) args.row_loss[index] = loss;
    sums.loss += loss;
    sums.weight += weight;
  }
  return sums;
}

template <typename Loss, typename Scalar>
void backward_soft(const FocalLossBackward<Scalar>& args, int64_t row_begin, int64_t row_end) {
  using Real = compute_t<Scalar>;
  SoftRow<Real> row(args.classes);
  for (int64_t index = row_begin; index < row_end; ++index) {
    bool ignored;
    read_soft_row<Loss>(args, index, row, &ignored);
    Scalar* grad = args.grad_logits ? args.grad_logits + args.grad_layout.row_offset(index) : nullptr;
    Real* grad_target = args.grad_target ? args.grad_target + args.target_layout.row_offset(index) : nullptr;
    if (ignored) {
      for (int64_t c = 0; grad && c < args.classes; ++c) grad[c * args.grad_layout.class_stride] = Scalar{};
      if (args.grad_gamma) args.grad_gamma[index] = 0;
      continue;
    }
    const Real max = args.saved[index];
    row.top = 0;
    while (row.top + 1 < args.classes && row.z[row.top] != max) ++row.top;
    soft_pieces(args.classes, max, args.saved[args.rows + index], args.saved[2 * args.rows + index], row);
    if (args.edges) look_up_gamma_of_log(row.log_q, args.classes, args.edges, args.gamma, args.n_bins, row.gamma);
    const Real upstream = args.grad_loss[index * args.grad_stride] / (args.divisor ? *args.divisor : Real(1));
    const Real scale = upstream * row.weight;
    Real grad_gamma;
    soft_slopes<Loss>(args.classes, args.epsilon, args.detach_modulation, row, &grad_gamma);
    if (args.grad_gamma) args.grad_gamma[index] = scale * grad_gamma;
    if (grad) {
      soft_grad(args.classes, scale, row);
      for (int64_t c = 0; c < args.classes; ++c) {
        grad[c * args.grad_layout.class_stride] = Store<Scalar>::from_compute(row.z[c]);
      }
    }
    if (grad_target) {
      // The target is also what the weight of a row is the mean under.
      [[maybe_unused]] Real of_weight = 0;
      if constexpr (Loss::kTarget == SoftTarget::kRows) {
        if (args.class_weight) of_weight = upstream * soft_loss<Loss>(args.classes, args.epsilon, row);
      }
      soft_grad_target<Loss>(args.classes, args.epsilon, scale * (Real(1) - args.label_smoothing), row);
      for (int64_t c = 0; c < args.classes; ++c) {
        const Real weight = args.class_weight ? args.class_weight[c] : Real(1);
        Real& result = grad_target[c * args.target_layout.class_stride];
        if constexpr (Loss::kTarget == SoftTarget::kRows) {
          result = row.slope[c] + weight * of_weight;
        } else {
          result = weighted_slope(weight, row.slope[c]);
        }
      }
    }
  }
}

}  // namespace
}  // namespace focalkern::cpu
