// Losses of rows of logits with class probabilities or label smoothing, which need the terms of every class, in any of
// the layouts that RowLayout describes, forward and backward.
//
// row_groups.cuh assigns threads to rows. Forward, a group reads its row twice: for the largest logit with the sum of
// exponentials (unless row_statistics.cu has saved them), then for the terms. Backward, it reads the row twice again:
// for the sum of the slopes, then for the gradient. The likely class is the one, if any, with more than about half of
// the probability. It takes the exact formulas, once per row. For all others 1 - p does not cancel, and a few
// operations suffice (unlikely_terms). If all classes but the label have the same share (kUniform), the label's share
// is added separately, too.

#include <type_traits>

#include "cuda/common.cuh"
#include "cuda/grid_sum.cuh"
#include "cuda/row_groups.cuh"
#include "cuda/row_loss.cuh"
#include "cuda/soft_row.cuh"
#include "cuda/soft_shares.cuh"
#include "kernels/row_loss.h"
#include "math/row_losses.h"

namespace focalkern::cuda {
namespace {

// In double, the exact formulas need more registers than two blocks per multiprocessor leave.
template <typename Scalar>
constexpr int kBlocksAtOnce = sizeof(Scalar) == sizeof(double) ? 1 : 2;

// ---- forward -------------------------------------------------------------------------------------------------------

template <typename Loss, typename Scalar, bool kUniform>
__global__ __launch_bounds__(kBlock, kBlocksAtOnce<Scalar>) void row_loss_soft_forward_kernel(
    const __grid_constant__ RowLossForward<Scalar> args, const __grid_constant__ RowGeometry geometry,
    const __grid_constant__ GridSum<compute_t<Scalar>> totals, const bool has_sums) {
  using Real = compute_t<Scalar>;
  __shared__ double scratch[kWarpsPerBlock];
  const RowGroup group = {geometry.lanes, scratch};
  double loss_sum = 0;
  double weight_sum = 0;
  for (int64_t t = blockIdx.x; t < geometry.tiles; t += gridDim.x) {
    const auto row = row_of<Scalar>(args, geometry, t);
    Real max = 0, log_s = 0, log_u = 0;
    if (!has_sums) {
      SumBesideLargest<Real> mine;
      mine.read(row);
      const SumsBesideLargest<Real> sums = mine.of(group);
      max = sums.max;
      // m - m makes the result NaN for an infinite m; the sum over the others alone would be finite.
      log_s = log_one_plus(sums.rest) + (max - max);
      log_u = logarithm(sums.rest) - log_s;
    } else if (row.is_live) {
      max = args.saved[row.row];
      log_s = args.saved[args.rows + row.row];
      log_u = args.saved[2 * args.rows + row.row];
    }
    const SoftRow<Scalar> numbers(args, row, max, log_s, log_u, false, false);

    double row_sum = 0;
    int top = kNoClass;
    const Real share = uniform_share<kUniform>(args);
    const ClassShares<Loss, Scalar, kUniform> shares(args, row);
    with_gamma<Loss>(args, numbers, [&](auto gamma_of) {
      each_class_with_share(row, shares, [&](const auto& values, const auto& some, int first, int step) {
        Real sum = 0;
        // Multiplies each loss by its share before adding: if several classes are masked by a large number, the sum of
        // their losses would be infinite.
        each_unlikely<Loss>(numbers, gamma_of, values, some, first, step, top,
                            [&](const ClassTerms<Real>& terms) { sum += share * terms.loss; });
        row_sum += static_cast<double>(sum);
      });
    });
    Real loss = group.sum(static_cast<Real>(row_sum));
    const int row_top = group.min(top);
    const Real weight = row_weight<Loss>(args, row, group);
    if (row.row >= args.rows || row.index != 0) continue;

    if (row.is_live) {
      if (row_top != kNoClass) loss += likely_terms<Loss>(args, row, numbers, shares.of(row_top)).loss;
      if (kUniform && row.label != row_top && label_share(args) != Real(0)) {
        loss += label_share(args) * unlikely_class<Loss>(args, numbers, row.z(row.label)).terms.loss;
      }
      loss *= weight;
      // Probability targets: the mean is over all rows.
      weight_sum += args.target_probs ? 1.0 : static_cast<double>(weight_of(args, row.label));
    } else {
      loss = row.label == kOutOfRange ? kNaN<Real> : Real(0);
    }
    if (!has_sums) {  // other threads may still read them
      args.saved[row.row] = row.is_live ? numbers.max : Real(0);
      args.saved[args.rows + row.row] = row.is_live ? numbers.log_s : Real(0);
      args.saved[2 * args.rows + row.row] = row.is_live ? numbers.log_u : Real(0);
    }
    if constexpr (Loss::kSpecialClass != SpecialClass::kNone) args.saved[3 * args.rows + row.row] = Real(0);
    if (args.row_loss != nullptr) args.row_loss[row.row] = loss;
    loss_sum += static_cast<double>(loss);
  }
  sum_over_grid(totals, loss_sum, weight_sum);
}

// ---- backward ------------------------------------------------------------------------------------------------------

// The coefficients of a row's gradient, common to all classes.
template <typename Scalar>
struct SoftSlopes {
  using Real = compute_t<Scalar>;
  Real scale;  // factor of the row's loss
  Real all;    // sum of the slopes a
  Real given;  // scale without the row's weight
  Real loss;   // loss of the row, without its weight
};

// The gradient with respect to the share of a class, from the derivative of its loss, `slope`.
template <typename Loss, typename Scalar>
__device__ __forceinline__ compute_t<Scalar> target_gradient(const RowLossArgs<Scalar>& args,
                                                             const SoftSlopes<Scalar>& row, int64_t j,
                                                             compute_t<Scalar> slope) {
  using Real = compute_t<Scalar>;
  const Real weight = weight_of(args, j);
  const Real value = row.scale * (Real(1) - args.label_smoothing) * slope;
  if constexpr (Loss::kTarget == SoftTarget::kClasses) return weighted_slope(weight, value);
  // The weight of a row is a mean over its target, so it adds this part to the gradient of the target.
  return args.class_weight != nullptr ? value + weight * row.given * row.loss : value;
}

template <typename Loss, typename Scalar, bool kUniform>
__global__ __launch_bounds__(kBlock, kBlocksAtOnce<Scalar>) void row_loss_soft_backward_kernel(
    const __grid_constant__ RowLossBackward<Scalar> args, const __grid_constant__ RowGeometry geometry) {
  using Real = compute_t<Scalar>;
  __shared__ double scratch[kWarpsPerBlock];
  const RowGroup group = {geometry.lanes, scratch};
  const bool with_gamma_slope = args.grad_gamma != nullptr;
  for (int64_t t = blockIdx.x; t < geometry.tiles; t += gridDim.x) {
    const auto row = row_of<Scalar>(args, geometry, t);
    Real max = 0, log_s = 0, log_u = 0, given = 0;
    if (row.is_live) {
      max = args.saved[row.row];
      if (args.first_is_class) max = row.z(static_cast<int>(number_as_class(max)));
      log_s = args.saved[args.rows + row.row];
      // Other kernels may have saved another third number (row_loss_smoothed.cu, row_loss_shared.cu).
      log_u = logarithm(exponential_minus_one(log_s)) - log_s;
      given = upstream(args, row.row);
    }
    const SoftRow<Scalar> numbers(args, row, max, log_s, log_u, args.detach_modulation, with_gamma_slope);

    // Sums over the classes other than the likely one.
    double slope_sum = 0;
    double gamma_sum = 0;
    [[maybe_unused]] double loss_sum = 0;
    int top = kNoClass;
    const ClassShares<Loss, Scalar, kUniform> shares(args, row);
    with_gamma<Loss>(args, numbers, [&](auto gamma_of) {
      each_class_with_share(row, shares, [&](const auto& values, const auto& some, int first, int step) {
        Real slope = 0;
        Real of_gamma = 0;
        [[maybe_unused]] Real loss = 0;
        each_unlikely<Loss>(numbers, gamma_of, values, some, first, step, top, [&](const ClassTerms<Real>& terms) {
          slope += terms.slope;
          of_gamma += terms.grad_gamma;
          if constexpr (Loss::kTarget == SoftTarget::kRows) loss += terms.loss;
        });
        slope_sum += static_cast<double>(slope);
        if (with_gamma_slope) gamma_sum += static_cast<double>(of_gamma);
        if constexpr (Loss::kTarget == SoftTarget::kRows) loss_sum += static_cast<double>(loss);
      });
    });
    const Real share = uniform_share<kUniform>(args);
    const int row_top = group.min(top);
    Real others = share * group.sum(static_cast<Real>(slope_sum));
    Real of_gamma = with_gamma_slope ? share * group.sum(static_cast<Real>(gamma_sum)) : Real(0);
    SoftSlopes<Scalar> slopes = {given * row_weight<Loss>(args, row, group), Real(0), given, Real(0)};
    if constexpr (Loss::kTarget == SoftTarget::kRows) slopes.loss = group.sum(static_cast<Real>(loss_sum));
    if (row.row >= args.rows) continue;

    Scalar* grad = args.grad_logits == nullptr ? nullptr : args.grad_logits + geometry.grad_logits(row.row);
    Real* grad_target = args.grad_target == nullptr ? nullptr : args.grad_target + geometry.target_probs(row.row);
    const int64_t stride = args.grad_layout.class_stride;
    // A row that does not count has a zero gradient, even where its logits are infinite or NaN.
    if (given == Real(0)) {
      const Real missing = row.label == kOutOfRange ? kNaN<Real> : Real(0);
      if (with_gamma_slope && row.index == 0) args.grad_gamma[row.row] = missing;
      for (int64_t j = row.index; j < row.classes; j += row.lanes) {
        if (grad != nullptr) grad[j * stride] = Store<Scalar>::from_compute(missing);
        if (grad_target != nullptr) grad_target[j * row.target_stride] = missing;
      }
      continue;
    }

    UnlikelyClass<Real> of_label = {};
    if (kUniform && row.label != row_top) {
      of_label = unlikely_class<Loss>(args, numbers, row.z(row.label));
      others += label_share(args) * of_label.terms.slope;
      of_gamma += label_share(args) * of_label.terms.grad_gamma;
    }
    ClassTerms<Real> of_top = {};
    if (row_top != kNoClass) {
      of_top = likely_terms<Loss>(args, row, numbers, shares.of(row_top));
      of_gamma += of_top.grad_gamma;
      slopes.loss += of_top.loss;
    }
    slopes.all = others + of_top.slope;
    const Real scale = slopes.scale;
    if (with_gamma_slope && row.index == 0) args.grad_gamma[row.row] = scale * of_gamma;
    if (grad == nullptr && grad_target == nullptr) continue;

    // dL/dz_j = p_j (sum a) - a_j
    const Real of_lse = given * lse_slope(args, row.row);
    const Real of_p = scale * slopes.all + of_lse;
    const Real of_slope = scale * share;
    const RowWriter<Scalar> writer(row, grad, stride);
    with_gamma<Loss>(args, numbers, [&](auto gamma_of) {
      each_class_with_share(row, shares, [&](const auto& values, const auto& some, int first, int step) {
        constexpr int count = kCount<decltype(values)>;
        Scalar result[count];
#pragma unroll
        for (int k = 0; k < count; ++k) {
          const auto of_class = unlikely_class<Loss>(numbers, values[k], gamma_of, some[k]);
          result[k] = Store<Scalar>::from_compute(of_class.p * of_p - of_slope * of_class.terms.slope);
          if (!kUniform && grad_target != nullptr) {
            const int j = first + k * step;
            grad_target[j * row.target_stride] = target_gradient<Loss>(args, slopes, j, of_class.terms.grad_share);
          }
        }
        if (grad != nullptr) writer.write(result, first, step);
      });
    });
    // Overwrites a value that the same thread wrote.
    if (kUniform && grad != nullptr && row.label != row_top && is_mine(row, row.label)) {
      const Real slope = (label_share(args) + share) * of_label.terms.slope;
      grad[row.label * stride] = Store<Scalar>::from_compute(of_label.p * of_p - scale * slope);
    }
    if (row_top != kNoClass && is_mine(row, row_top)) {
      if (grad != nullptr) {
        // p_j (sum a - a_j) - u a_j, without the difference p a_j - a_j, which would cancel as p -> 1.
        const Real value = scale * (exponential(-log_s) * others - exponential(log_u) * of_top.slope);
        grad[row_top * stride] = Store<Scalar>::from_compute(value + of_lse * exponential(-log_s));
      }
      if (grad_target != nullptr) {
        grad_target[row_top * row.target_stride] = target_gradient<Loss>(args, slopes, row_top, of_top.grad_share);
      }
    }
  }
}

}  // namespace

template <typename Loss, typename Scalar>
int row_loss_soft_forward(const RowLossForward<Scalar>& args, GridSum<compute_t<Scalar>> totals, void* workspace,
                          void* stream, bool has_sums) {
  if constexpr (Loss::kTarget == SoftTarget::kClasses) {
    if (is_uniform<Loss>(args)) {
      return launch_forward(row_loss_soft_forward_kernel<Loss, Scalar, true>, args, totals, workspace, stream,
                            has_sums);
    }
  }
  if constexpr (Loss::kTarget == SoftTarget::kNone) {
    return cudaErrorInvalidValue;
  } else {
    return launch_forward(row_loss_soft_forward_kernel<Loss, Scalar, false>, args, totals, workspace, stream, has_sums);
  }
}

template <typename Loss, typename Scalar>
int row_loss_soft_backward(const RowLossBackward<Scalar>& args, void* stream) {
  if constexpr (Loss::kTarget == SoftTarget::kClasses) {
    if (is_uniform<Loss>(args)) {
      return launch_backward(row_loss_soft_backward_kernel<Loss, Scalar, true>, args, stream);
    }
  }
  if constexpr (Loss::kTarget == SoftTarget::kNone) {
    return cudaErrorInvalidValue;
  } else {
    return launch_backward(row_loss_soft_backward_kernel<Loss, Scalar, false>, args, stream);
  }
}

#define FK_INSTANTIATE(Loss, Scalar)                                                                                \
  template int row_loss_soft_forward<Loss>(const RowLossForward<Scalar>&, GridSum<compute_t<Scalar>>, void*, void*, \
                                           bool);                                                                   \
  template int row_loss_soft_backward<Loss>(const RowLossBackward<Scalar>&, void*);
#define FK_ROW_LOSS(number, Formula, name) \
  FK_INSTANTIATE(Formula, Half)            \
  FK_INSTANTIATE(Formula, BFloat16)        \
  FK_INSTANTIATE(Formula, float)           \
  FK_INSTANTIATE(Formula, double)
#include "math/row_losses.def"
#undef FK_INSTANTIATE

}  // namespace focalkern::cuda
