// The losses of rows of logits other than the focal loss, in any of the layouts that RowLayout describes, forward and
// backward, for labels without smoothing (row_loss_soft.cu has the rest). The formula of a loss is in its header in
// math (see math/row_loss.h). row_groups.cuh assigns threads to rows.
//
// One pass over the logits each way. The threads of a group divide the classes and reduce them to the sums of the row.
// Every thread then has the numbers of the row and writes its share of the gradient.

#include <type_traits>

#include "cuda/common.cuh"
#include "cuda/grid_sum.cuh"
#include "cuda/row_groups.cuh"
#include "cuda/row_loss.cuh"
#include "cuda/row_loss_numbers.cuh"
#include "kernels/row_loss.h"
#include "math/row_losses.h"

namespace focalkern::cuda {
namespace {

// ---- sums over the classes -----------------------------------------------------------------------------------------

// LongExpSum::add with fewer instructions: the sum is relative to coarse_base(max), which needs fewer rescalings, and
// its terms have the error of `summand`.
template <int count, typename Real>
__device__ __forceinline__ void add_some(LongExpSum<Real>& rest, const Real (&values)[count]) {
  Real max = rest.max;
#pragma unroll
  for (int k = 0; k < count; ++k) max = fmax(max, values[k]);
  const Real base = coarse_base(max);
  Real sum = summand(values[0] - base);
#pragma unroll
  for (int k = 1; k < count; ++k) sum += summand(values[k] - base);
  rest.total.add(summand(floor(rest.max) - base), sum);
  rest.max = max;
}

template <typename Loss, typename Scalar>
__device__ __forceinline__ KeptNumbers<compute_t<Scalar>> sums_of_row(const Row<Scalar>& row, const RowGroup& group) {
  using Real = compute_t<Scalar>;
  if constexpr (Loss::kSumExcludesTop) {
    constexpr SecondSum kSecond = Loss::kSquares ? SecondSum::kSquares : SecondSum::kNone;
    SumsBesideLargest<Real> sums;
    if (row.classes <= kFewClasses * row.lanes) {
      SumBesideLargest<Real, kSecond, PlainSum<Real>> mine;
      mine.read(row);
      sums = mine.of(group);
    } else {
      SumBesideLargest<Real, kSecond> mine;
      mine.read(row);
      sums = mine.of(group);
    }
    // m - m makes the result NaN for an infinite m; the sum over the others alone would be finite.
    const Real log_s = log_one_plus(sums.rest) + (sums.max - sums.max);
    const int largest = sums.largest == kNoClass ? 0 : sums.largest;
    return {sums.max, log_s, sums.second * exponential(Real(-2) * log_s), largest};
  } else {
    const Real z_target = row.is_live ? row.z(row.label) : Real(0);
    LongExpSum<Real> rest;
    [[maybe_unused]] Real rival = -kInfinity<Real>;
    [[maybe_unused]] int rival_class = kNoClass;
    each_class(row, [&](const auto& values, int first, int step) {
      constexpr int count = std::extent_v<std::remove_reference_t<decltype(values)>>;
      Real others[count];
      const int target_at = row.label - first;
#pragma unroll
      for (int k = 0; k < count; ++k) {
        if constexpr (Loss::kSpecialClass == SpecialClass::kRunnerUp) {
          const bool is_closer = values[k] < z_target && values[k] > rival;
          rival = is_closer ? values[k] : rival;
          rival_class = is_closer ? first + k * step : rival_class;
        }
        others[k] = values[k];
      }
      // A group of adjacent classes seldom contains the target.
      if (step != 1 || static_cast<unsigned>(target_at) < static_cast<unsigned>(count)) {
#pragma unroll
        for (int k = 0; k < count; ++k) {
          if (k * step == target_at) others[k] = -kInfinity<Real>;
        }
      }
      add_some(rest, others);
    });
    const Real rest_max = group.max(rest.max);
    const Real rest_sum = group.sum(rest.total.sum * exponential(floor(rest.max) - exp_base(rest_max)));
    int marked = kNoClass;
    if constexpr (Loss::kSpecialClass == SpecialClass::kRunnerUp) {
      const Real row_rival = group.max(rival);
      marked = group.min(rival == row_rival ? rival_class : kNoClass);
    }
    // Either the target is the largest class, or 1 - p does not cancel.
    const bool is_top = z_target >= rest_max;
    const Real max = fmax(rest_max, z_target);
    const Real shrunk = is_top ? rest_sum * exponential(rest_max - max) : rest_sum;
    const Real log_s = log_one_plus(shrunk + (exponential(z_target - max) - Real(1)));
    const Real log_p = (z_target - max) - log_s;
    const Real log_u = is_top ? (rest_max - max) + logarithm(rest_sum) - log_s : log_one_plus(-exponential(log_p));
    return {max, log_s, log_u, marked == kNoClass ? kIgnored : marked};
  }
}

// ---- labels --------------------------------------------------------------------------------------------------------

template <typename Loss, typename Scalar>
__global__ __launch_bounds__(kBlock, 2) void row_loss_forward_kernel(
    const __grid_constant__ RowLossForward<Scalar> args, const __grid_constant__ RowGeometry geometry,
    const __grid_constant__ GridSum<compute_t<Scalar>> totals) {
  using Real = compute_t<Scalar>;
  __shared__ double scratch[kWarpsPerBlock];
  const RowGroup group = {geometry.lanes, scratch};
  double loss_sum = 0;
  double weight_sum = 0;
  for (int64_t t = blockIdx.x; t < geometry.tiles; t += gridDim.x) {
    const auto row = row_of<Scalar>(args, geometry, t);
    KeptNumbers<Real> kept = sums_of_row<Loss>(row, group);
    if (row.row >= args.rows || row.index != 0) continue;
    Real loss = row.label == kOutOfRange ? kNaN<Real> : Real(0);
    if (row.is_live) {
      const Real weight = weight_of(args, row.label);
      loss = weighted_loss(weight, Loss::template loss<Loss::kHasInverse>(numbers_of<Loss, Scalar>(args, row, kept)));
      weight_sum += static_cast<double>(weight);
    } else {
      kept = {0, 0, 0, kIgnored};
    }
    keep<Loss, Scalar>(args, row.row, kept);
    if (args.row_loss != nullptr) args.row_loss[row.row] = loss;
    loss_sum += static_cast<double>(loss);
  }
  sum_over_grid(totals, loss_sum, weight_sum);
}

template <typename Loss, typename Scalar>
__global__ __launch_bounds__(kBlock,
                             2) void row_loss_backward_kernel(const __grid_constant__ RowLossBackward<Scalar> args,
                                                              const __grid_constant__ RowGeometry geometry) {
  using Real = compute_t<Scalar>;
  for (int64_t t = blockIdx.x; t < geometry.tiles; t += gridDim.x) {
    const auto row = row_of<Scalar>(args, geometry, t);
    if (row.row >= args.rows) continue;
    const Real missing = row.label == kOutOfRange ? kNaN<Real> : Real(0);
    RowGrad<Real> row_grad = {missing, Real(0), missing, missing, missing};
    Real max = 0;
    int marked = kIgnored;
    // A row that does not count has a zero gradient, even where its logits are infinite or NaN.
    const Real scale = row.is_live ? weight_of(args, row.label) * upstream(args, row.row) : Real(0);
    const bool counts = scale != Real(0);
    if (counts) {
      KeptNumbers<Real> kept = {args.saved[row.row], args.saved[args.rows + row.row],
                                args.saved[2 * args.rows + row.row], kIgnored};
      if constexpr (Loss::kSpecialClass != SpecialClass::kNone) {
        kept.marked = static_cast<int>(number_as_class(args.saved[3 * args.rows + row.row]));
      }
      const Real inv_sum_exp = exponential(-kept.log_s);
      row_grad = Loss::template grad<Loss::kHasInverse>(numbers_of<Loss, Scalar>(args, row, kept));
      row_grad.factor *= scale * inv_sum_exp;
      row_grad.square *= scale * (inv_sum_exp * inv_sum_exp);
      row_grad.at_target *= scale;
      row_grad.at_special *= scale;
      row_grad.grad_gamma *= scale;
      const Real of_lse = scale * lse_slope(args, row.row);
      if (of_lse != Real(0)) {
        row_grad.factor += of_lse * inv_sum_exp;
        row_grad.at_target += of_lse * exponential((row.z(row.label) - kept.max) - kept.log_s);
        if (kept.marked >= 0) row_grad.at_special += of_lse * exponential((row.z(kept.marked) - kept.max) - kept.log_s);
      }
      max = kept.max;
      marked = kept.marked;
    }
    if (args.grad_gamma != nullptr && row.index == 0) args.grad_gamma[row.row] = row_grad.grad_gamma;
    if (args.grad_logits == nullptr) continue;
    Scalar* grad = args.grad_logits + geometry.grad_logits(row.row);
    const int64_t stride = args.grad_layout.class_stride;
    if (!counts) {
      for (int64_t j = row.index; j < row.classes; j += row.lanes) {
        grad[j * stride] = Store<Scalar>::from_compute(missing);
      }
      continue;
    }
    const RowWriter<Scalar> writer(row, grad, stride);
    each_class(row, [&](const auto& values, int first, int step) {
      constexpr int count = std::extent_v<std::remove_reference_t<decltype(values)>>;
      Scalar result[count];
#pragma unroll
      for (int k = 0; k < count; ++k) {
        // For a gradient stored in 16 bits, `summand` is accurate enough.
        const Real below_max = values[k] - max;
        const Real e = sizeof(Scalar) < sizeof(Real) ? summand(below_max) : exponential(below_max);
        result[k] =
            Store<Scalar>::from_compute(e * (Loss::kSquares ? row_grad.factor + e * row_grad.square : row_grad.factor));
      }
      writer.write(result, first, step);
    });
    // Overwrites the general value, which the same thread wrote: selecting would cost a branch per element.
    if (Loss::kSpecialClass != SpecialClass::kNone && marked >= 0 && is_mine(row, marked)) {
      grad[marked * stride] = Store<Scalar>::from_compute(row_grad.at_special);
    }
    if (is_mine(row, row.label)) grad[row.label * stride] = Store<Scalar>::from_compute(row_grad.at_target);
  }
}

}  // namespace

template <typename Loss, typename Scalar>
int row_loss_forward(const RowLossForward<Scalar>& args, bool mean, compute_t<Scalar>* loss, compute_t<Scalar>* divisor,
                     void* workspace, void* stream) {
  if constexpr (!kHasKernels<Loss>) {
    return cudaErrorNotSupported;
  } else if constexpr (std::is_same_v<Loss, FocalFormula>) {
    return focal_loss_forward(args, mean, loss, divisor, workspace, stream);
  } else {
    if (args.rows > 0 && !sizes_are_valid(args)) return cudaErrorInvalidValue;
    const GridSum<compute_t<Scalar>> totals = {loss, divisor, mean, nullptr, nullptr};
    if (is_soft(args)) return row_loss_soft_forward<Loss>(args, totals, workspace, stream);
    return launch_forward(row_loss_forward_kernel<Loss, Scalar>, args, totals, workspace, stream);
  }
}

template <typename Loss, typename Scalar>
int row_loss_backward(const RowLossBackward<Scalar>& args, void* stream) {
  if constexpr (!kHasKernels<Loss>) {
    return cudaErrorNotSupported;
  } else if constexpr (std::is_same_v<Loss, FocalFormula>) {
    return focal_loss_backward(args, stream);
  } else {
    if (args.rows == 0) return cudaSuccess;
    if (!sizes_are_valid(args)) return cudaErrorInvalidValue;
    if (args.grad_logits != nullptr && args.grad_layout.inner <= 0) return cudaErrorInvalidValue;
    if (is_soft(args)) return row_loss_soft_backward<Loss>(args, stream);
    return launch_backward(row_loss_backward_kernel<Loss, Scalar>, args, stream);
  }
}

#define FK_INSTANTIATE(Loss, Scalar)                                                                   \
  template int row_loss_forward<Loss, Scalar>(const RowLossForward<Scalar>&, bool, compute_t<Scalar>*, \
                                              compute_t<Scalar>*, void*, void*);                       \
  template int row_loss_backward<Loss, Scalar>(const RowLossBackward<Scalar>&, void*);
#define FK_ROW_LOSS(number, Formula, name) \
  FK_INSTANTIATE(Formula, Half)            \
  FK_INSTANTIATE(Formula, BFloat16)        \
  FK_INSTANTIATE(Formula, float)           \
  FK_INSTANTIATE(Formula, double)
#include "math/row_losses.def"
#undef FK_INSTANTIATE

}  // namespace focalkern::cuda
