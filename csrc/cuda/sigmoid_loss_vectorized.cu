// Losses of one logit, the common case: gamma, alpha and weight are numbers, logits and results have the same layout,
// and only the gradient of the logits is needed. Forward and backward; sigmoid_loss_strided.cu has the other cases.

#include "cuda/common.cuh"
#include "cuda/grid_sum.cuh"
#include "cuda/sigmoid_loss.h"
#include "cuda/sigmoid_loss_pack.cuh"
#include "kernels/sigmoid_loss.h"
#include "math/scored_loss.h"
#include "math/sigmoid_loss.h"

namespace focalkern::cuda {
namespace {

constexpr int kBlocksAtOnce = 2;

// ---- kernels -------------------------------------------------------------------------------------------------------

template <typename Scalar, typename Loss, Targets targets>
__global__ __launch_bounds__(kBlock, kBlocksAtOnce) void sigmoid_loss_plain_forward_kernel(
    const __grid_constant__ SigmoidLossForward<Scalar> args,
    const __grid_constant__ PlainNumbers<compute_t<Scalar>> numbers, const __grid_constant__ Places places,
    const __grid_constant__ GridSum<compute_t<Scalar>> totals) {
  using Real = compute_t<Scalar>;
  constexpr int kSize = kVectorSize<Scalar>;
  double sum = 0;
  int64_t count = 0;
  each_pack<targets, kHasScores<Loss>>(args, places, [&](int64_t first, const Pack<Scalar>& pack) {
    Real losses[kSize];
    Real pack_sum = 0;
    each<Loss, targets>(pack, numbers, args.constant, [&](int e, const SigmoidTerms<Real>& terms) {
      losses[e] = terms.loss * numbers.weight;
      pack_sum += losses[e];
    });
    sum += static_cast<double>(pack_sum);
    count += pack.counts;
    if (args.loss == nullptr && args.loss_wide == nullptr) return;
#pragma unroll
    for (int e = 0; e < kSize; ++e) {
      if (e >= pack.size) break;
      if (args.loss != nullptr) args.loss[first + e] = Store<Scalar>::from_compute(losses[e]);
      if (args.loss_wide != nullptr) args.loss_wide[first + e] = losses[e];
    }
  });
  sum_over_grid(totals, sum, static_cast<double>(count));
}

template <typename Scalar, typename Loss, Targets targets>
__global__ __launch_bounds__(kBlock, kBlocksAtOnce) void sigmoid_loss_plain_backward_kernel(
    const __grid_constant__ SigmoidLossBackward<Scalar> args,
    const __grid_constant__ PlainNumbers<compute_t<Scalar>> numbers, const __grid_constant__ Places places) {
  using Real = compute_t<Scalar>;
  constexpr int kSize = kVectorSize<Scalar>;
  const Real upstream = args.grad_loss.data != nullptr ? *static_cast<const Real*>(args.grad_loss.data)
                                                       : static_cast<Real>(args.grad_loss.value);
  const Real divisor = args.divisor != nullptr ? *args.divisor : Real(1);
  // If every row is ignored, the mean is NaN and its gradient 0.
  const Real scale = divisor == Real(0) ? Real(0) : numbers.weight * (upstream / divisor);
  each_pack<targets, kHasScores<Loss>>(args, places, [&](int64_t first, const Pack<Scalar>& pack) {
    Elements<Scalar> result;
    each<Loss, targets>(pack, numbers, args.constant, [&](int e, const SigmoidTerms<Real>& terms) {
      result.at[e] = Store<Scalar>::from_compute(terms.slope * scale);
    });
    if (pack.size == kSize) {
      store_vector(args.grad_input + first, bit_cast<uint4>(result));
      return;
    }
#pragma unroll
    for (int e = 0; e < kSize; ++e) {
      if (e < pack.size) args.grad_input[first + e] = result.at[e];
    }
  });
}

// ---- launch --------------------------------------------------------------------------------------------------------

template <typename Scalar>
constexpr ElementType kTypeOf = ElementType::kFloat;
template <>
constexpr ElementType kTypeOf<double> = ElementType::kDouble;
template <>
constexpr ElementType kTypeOf<Half> = ElementType::kHalf;
template <>
constexpr ElementType kTypeOf<BFloat16> = ElementType::kBFloat16;

bool on_boundary(const void* address) { return reinterpret_cast<uintptr_t>(address) % kVectorBytes == 0; }

// Whether the space is [outer, classes, pixels] with a label for each pixel, in whole vectors.
template <typename Scalar>
bool labels_are_of_pixels(const SigmoidLossArgs<Scalar>& args) {
  const ElementSpace& space = args.space;
  const int last = space.dims - 1;
  if (!args.target_is_labels || last < 1 || last > 2 || args.class_dim != last - 1) return false;
  const int64_t pixels = space.sizes[last];
  return pixels > 0 && pixels % kVectorSize<Scalar> == 0 && args.target.strides[last] == 1 &&
         (last == 1 || space.sizes[0] <= 1 || args.target.strides[0] == pixels);
}

template <typename Scalar>
bool has_plain_arguments(const SigmoidLossArgs<Scalar>& args) {
  if (args.gamma.data != nullptr || args.second.data != nullptr || args.weight.data != nullptr) return false;
  if (!args.input.dense || !on_boundary(args.input.data)) return false;
  if (!args.target_is_labels) {
    return args.target.dense && args.target.type == kTypeOf<Scalar> && on_boundary(args.target.data);
  }
  // One label per row of memory, optionally with a score. Elements are counted in 32 bits.
  const ElementSpace& space = args.space;
  for (int d = 0; d < space.dims && args.scores.data != nullptr; ++d) {
    if (args.scores.strides[d] != args.target.strides[d] && space.sizes[d] > 1) return false;
  }
  if (args.classes <= 0 || args.class_dim < 0 || space.sizes[args.class_dim] != args.classes) return false;
  if (space.size > INT32_MAX) return false;
  return labels_are_of_pixels(args) || (space.dims == 2 && args.class_dim == 1 && args.target.strides[0] == 1);
}

template <typename Scalar>
Places places_of(const SigmoidLossArgs<Scalar>& args) {
  Places places = {RowDivider(args.classes), RowDivider(0), RowDivider(0), 0, 0};
  if (!labels_are_of_pixels(args) || args.space.size == 0) return places;
  const int64_t packs = args.space.sizes[args.space.dims - 1] / kVectorSize<Scalar>;
  const int64_t vectors = args.space.size / kVectorSize<Scalar>;
  // More classes per thread need fewer reads of labels, but enough blocks must remain.
  places.chunk_classes = 8;
  while (places.chunk_classes > 1 && vectors / places.chunk_classes < kMaxGrid / 8 * kBlock) places.chunk_classes /= 2;
  const int64_t chunks = divide_up(args.classes, places.chunk_classes);
  places.packs = RowDivider(packs);
  places.chunks = RowDivider(chunks);
  places.units = vectors / args.classes * chunks;
  return places;
}

template <typename Scalar>
PlainNumbers<compute_t<Scalar>> numbers_of(const SigmoidLossArgs<Scalar>& args) {
  using Real = compute_t<Scalar>;
  const auto gamma = static_cast<Real>(args.gamma.value), second = static_cast<Real>(args.second.value);
  const bool is_asymmetric = args.loss_kind == SigmoidLoss::kAsymmetric;
  const bool is_small = SmallPower<Real>::covers(gamma) && (!is_asymmetric || SmallPower<Real>::covers(second));
  const PowerKind power = !is_small                            ? PowerKind::kAny
                          : gamma == Real(2) && !is_asymmetric ? PowerKind::kSquare
                                                               : PowerKind::kSmall;
  return {power,
          gamma,
          second,
          SmallPower<Real>(is_small ? gamma : Real(0)),
          SmallPower<Real>(is_small && is_asymmetric ? second : Real(0)),
          args.has_alpha ? second : Real(1),
          args.has_alpha ? Real(1) - second : Real(1),
          static_cast<Real>(args.weight.value),
          scored_loss_of(args.loss_kind)};
}

// Calls f(loss, kind of targets).
template <typename Scalar, typename Function>
int with_kernel(const SigmoidLossArgs<Scalar>& args, Function f) {
  const auto with_loss = [&](auto targets) {
    return args.loss_kind == SigmoidLoss::kFocal     ? f(FocalElement{}, targets)
           : args.loss_kind == SigmoidLoss::kQuality ? f(QualityElement{}, targets)
           : is_scored(args.loss_kind)               ? f(ScoredElement{}, targets)
                                                     : f(AsymmetricElement{}, targets);
  };
  if (!args.target_is_labels) return with_loss(std::integral_constant<Targets, Targets::kDense>{});
  return labels_are_of_pixels(args) ? with_loss(std::integral_constant<Targets, Targets::kPixelLabels>{})
                                    : with_loss(std::integral_constant<Targets, Targets::kLabels>{});
}

}  // namespace

template <typename Scalar>
bool sigmoid_loss_is_plain(const SigmoidLossForward<Scalar>& args) {
  return has_plain_arguments<Scalar>(args);
}

template <typename Scalar>
bool sigmoid_loss_is_plain(const SigmoidLossBackward<Scalar>& args) {
  if (args.grad_target != nullptr || args.grad_gamma != nullptr || args.grad_second != nullptr) return false;
  if (args.grad_input == nullptr || !on_boundary(args.grad_input) || !has_plain_arguments<Scalar>(args)) return false;
  for (int d = 0; d < args.space.dims && args.grad_loss.data != nullptr; ++d) {
    if (args.grad_loss.strides[d] != 0 && args.space.sizes[d] > 1) return false;
  }
  return true;
}

template <typename Scalar>
int64_t sigmoid_loss_plain_grid(int64_t size) {
  const int64_t blocks = divide_up(size, static_cast<int64_t>(kBlock) * kVectorSize<Scalar>);
  return blocks < 1 ? 1 : blocks < kMaxGrid ? blocks : kMaxGrid;
}

// At most the blocks that sigmoid_loss_plain_grid returns: the scratch memory is sized for these.
template <typename Scalar>
int64_t grid_of(const SigmoidLossArgs<Scalar>& args, const Places& places) {
  return sigmoid_loss_plain_grid<Scalar>(places.units > 0 ? places.units * kVectorSize<Scalar> : args.space.size);
}

template <typename Scalar>
int sigmoid_loss_plain_forward(const SigmoidLossForward<Scalar>& args, const GridSum<compute_t<Scalar>>& totals,
                               void* stream) {
  const Places places = places_of<Scalar>(args);
  return with_kernel<Scalar>(args, [&](auto loss, auto targets) {
    return launch(sigmoid_loss_plain_forward_kernel<Scalar, decltype(loss), targets.value>, grid_of(args, places),
                  kBlock, stream, args, numbers_of<Scalar>(args), places, totals);
  });
}

template <typename Scalar>
int sigmoid_loss_plain_backward(const SigmoidLossBackward<Scalar>& args, void* stream) {
  const Places places = places_of<Scalar>(args);
  return with_kernel<Scalar>(args, [&](auto loss, auto targets) {
    return launch(sigmoid_loss_plain_backward_kernel<Scalar, decltype(loss), targets.value>, grid_of(args, places),
                  kBlock, stream, args, numbers_of<Scalar>(args), places);
  });
}

#define FK_INSTANTIATE(Scalar)                                                               \
  template bool sigmoid_loss_is_plain<Scalar>(const SigmoidLossForward<Scalar>&);            \
  template bool sigmoid_loss_is_plain<Scalar>(const SigmoidLossBackward<Scalar>&);           \
  template int64_t sigmoid_loss_plain_grid<Scalar>(int64_t);                                 \
  template int sigmoid_loss_plain_forward<Scalar>(const SigmoidLossForward<Scalar>&,         \
                                                  const GridSum<compute_t<Scalar>>&, void*); \
  template int sigmoid_loss_plain_backward<Scalar>(const SigmoidLossBackward<Scalar>&, void*);
FK_INSTANTIATE(Half)
FK_INSTANTIATE(BFloat16)
FK_INSTANTIATE(float)
FK_INSTANTIATE(double)
#undef FK_INSTANTIATE

}  // namespace focalkern::cuda
