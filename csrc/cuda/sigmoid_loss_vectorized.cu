// Losses of one logit, the common case: gamma, alpha and weight are numbers, logits and
// results have one layout, and only the gradient of the logits is wanted. Forward and backward; sigmoid_loss_strided.cu
// has the rest.
//
// A thread takes 16 bytes of logits at a time, and with them either 16 bytes of targets or the label of their row.
// For labels of pixels ([N, C, H, W]) it takes 16 bytes of pixels and goes through several classes with the same
// labels. A pack of hard targets (0 and 1, or labels) takes the short formulas, a pack with a soft one the general
// ones. The score of a label is one soft target among hard ones: it alone takes the general formulas. Nothing is saved
// between the passes. Elements of ignored rows, and those beyond the end, get a logit whose loss and gradient are 0, so
// that no later step needs a selection.

#include "cuda/common.cuh"
#include "cuda/grid_sum.cuh"
#include "cuda/sigmoid_loss.h"
#include "kernels/sigmoid_loss.h"
#include "math/scored_loss.h"
#include "math/sigmoid_loss.h"

namespace focalkern::cuda {
namespace {

constexpr int kBlocksAtOnce = 2;

// e^-1000 is 0 in every type: for a target of 0, loss and slope are 0, too.
template <typename Real>
constexpr Real kLogitWithoutLoss = Real(-1000);

enum class PowerKind { kSquare, kSmall, kAny };

// The numbers of a launch.
template <typename Real>
struct PlainNumbers {
  PowerKind power;
  Real gamma;
  Real gamma_positive;
  SmallPower<Real> small;  // gamma as a small power, if it is one
  SmallPower<Real> small_positive;
  Real positive;  // weights of t and of 1 - t
  Real negative;
  Real weight;
  ScoredLoss scored;
};

// n / classes for n below 2^32, by multiplication: the product is at most one too small, and is then corrected.
struct RowDivider {
  uint32_t classes;
  uint32_t reciprocal;

  explicit RowDivider(int64_t n)
      : classes(static_cast<uint32_t>(n)), reciprocal(n > 0 ? static_cast<uint32_t>(0xffffffffLL / n) : 0) {}

  __device__ __forceinline__ void operator()(uint32_t n, uint32_t& row, uint32_t& j) const {
    row = static_cast<uint32_t>(static_cast<uint64_t>(n) * reciprocal >> 32);
    j = n - row * classes;
    if (j >= classes) {
      row += 1;
      j -= classes;
    }
  }
};

enum class Targets { kDense, kLabels, kPixelLabels };

// Whether labels of the loss may have scores.
template <typename Loss>
constexpr bool kHasScores = std::is_same_v<Loss, QualityElement> || std::is_same_v<Loss, ScoredElement>;

// The layout of labels: one per row of [rows, classes], or one per pixel of [outer, classes, pixels].
struct Places {
  RowDivider rows;
  RowDivider packs;   // of pixels
  RowDivider chunks;  // classes per thread
  int chunk_classes;
  int64_t units;  // vectors of pixels in all chunks
};

// ---- a pack of elements --------------------------------------------------------------------------------------------

template <typename Scalar>
struct Pack {
  static constexpr int kSize = kVectorSize<Scalar>;
  compute_t<Scalar> x[kSize];
  compute_t<Scalar> share[kSize];
  int size;    // elements before the end
  int counts;  // number of elements that are not ignored
  bool is_hard;
  int scored = -1;  // the element whose target is a score, if there is one; the others are hard
  compute_t<Scalar> scored_x;
  compute_t<Scalar> score;
};

template <typename Scalar>
__device__ __forceinline__ Elements<Scalar> load_elements(const void* data, int64_t first, int size, Scalar missing) {
  constexpr int kSize = kVectorSize<Scalar>;
  const Scalar* at = static_cast<const Scalar*>(data) + first;
  uint4 loaded;  // whole words: 16-bit elements would be taken apart here and again where they are used
  if (size == kSize) {
    loaded = load_vector(at);
  } else {
    Elements<Scalar> elements;
#pragma unroll
    for (int e = 0; e < kSize; ++e) elements.at[e] = e < size ? at[e] : missing;
    loaded = bit_cast<uint4>(elements);
  }
  return bit_cast<Elements<Scalar>>(loaded);
}

// The targets of the elements of a row, from its label.
template <typename Real>
struct RowLabel {
  uint32_t class_index;  // the class with target 1, or none
  bool counts;           // not ignored
  bool is_live;          // nor out of range
  Real otherwise;        // the substitute logit where it is ignored
  Real score;            // the target of that class

  // Sets the target of an element. `has_scores` is one for all elements.
  template <typename Pack>
  __device__ __forceinline__ void set_share(Pack& pack, int e, bool is_match, bool has_scores) const {
    pack.share[e] = is_match ? score : Real(0);
    if (!is_match || !has_scores) return;
    pack.is_hard = pack.is_hard && pack.scored < 0;
    pack.scored = e;
    pack.scored_x = pack.x[e];
    pack.score = score;
  }
};

template <bool may_score, typename Scalar>
__device__ __forceinline__ RowLabel<compute_t<Scalar>> row_label(const SigmoidLossArgs<Scalar>& args, uint32_t row) {
  using Real = compute_t<Scalar>;
  const Labels labels = {args.target.data, args.target.type == ElementType::kInt64   ? Labels::Type::kInt64
                                           : args.target.type == ElementType::kInt32 ? Labels::Type::kInt32
                                                                                     : Labels::Type::kUInt8};
  const int64_t label = labels[row];
  const bool counts = label != args.ignore_index;
  const bool is_live = counts && label >= 0 && label <= args.classes;  // the last is background
  Real score = 1;
  if constexpr (may_score) {
    if (args.scores.data != nullptr && is_live && label < args.classes) {
      score = score_of_match(read_share<Real>(args.scores, row));
    }
  }
  return {is_live ? static_cast<uint32_t>(label) : ~0u, counts, is_live, counts ? kNaN<Real> : kLogitWithoutLoss<Real>,
          score};
}

template <Targets targets, bool may_score, typename Scalar>
__device__ __forceinline__ Pack<Scalar> load_pack(const SigmoidLossArgs<Scalar>& args, const RowDivider& divide,
                                                  int64_t first) {
  using Real = compute_t<Scalar>;
  constexpr int kSize = kVectorSize<Scalar>;
  Pack<Scalar> pack;
  const int64_t left = args.space.size - first;
  pack.size = left < kSize ? static_cast<int>(left) : kSize;
  const auto x = load_elements(args.input.data, first, pack.size, Store<Scalar>::from_compute(kLogitWithoutLoss<Real>));
  if constexpr (targets == Targets::kLabels) {
    uint32_t row, j;
    divide(static_cast<uint32_t>(first), row, j);
    RowLabel<Real> label = row_label<may_score>(args, row);
    const bool has_scores = may_score && args.scores.data != nullptr;
    pack.is_hard = true;
    if (j + kSize <= divide.classes) {
      pack.counts = label.counts ? kSize : 0;
#pragma unroll
      for (int e = 0; e < kSize; ++e) {
        pack.x[e] = label.is_live ? load_as_compute(x.at[e]) : label.otherwise;
        label.set_share(pack, e, j + e == label.class_index, has_scores);
      }
    } else {
      // The vector continues into further rows, or ends with the last one.
      pack.counts = 0;
#pragma unroll
      for (int e = 0; e < kSize; ++e) {
        const bool exists = e < pack.size;
        if (j == divide.classes) {
          j = 0;
          row += 1;
          if (exists) label = row_label<may_score>(args, row);
        }
        pack.x[e] = label.is_live || !exists ? load_as_compute(x.at[e]) : label.otherwise;
        label.set_share(pack, e, j == label.class_index && exists, has_scores);
        pack.counts += label.counts && exists;
        j += 1;
      }
    }
  } else {
    const auto target = load_elements(args.target.data, first, pack.size, Store<Scalar>::from_compute(Real(0)));
    pack.counts = pack.size;
    Real soft = 0;
#pragma unroll
    for (int e = 0; e < kSize; ++e) {
      const Real share = load_as_compute(target.at[e]);
      pack.x[e] = load_as_compute(x.at[e]);
      pack.share[e] = share;
      soft += fabs(share * share - share);  // 0 only for 0 and 1; NaN for NaN
    }
    pack.is_hard = soft == Real(0);
  }
  return pack;
}

// Calls take(first, pack) for every vector of the thread; `first` is its first element.
template <Targets targets, bool may_score, typename Scalar, typename Take>
__device__ __forceinline__ void each_pack(const SigmoidLossArgs<Scalar>& args, const Places& places, Take take) {
  using Real = compute_t<Scalar>;
  constexpr int kSize = kVectorSize<Scalar>;
  const int64_t threads = static_cast<int64_t>(gridDim.x) * kBlock;
  const int64_t thread = static_cast<int64_t>(blockIdx.x) * kBlock + threadIdx.x;
  if constexpr (targets != Targets::kPixelLabels) {
    for (int64_t first = thread * kSize; first < args.space.size; first += threads * kSize) {
      take(first, load_pack<targets, may_score>(args, places.rows, first));
    }
  } else {
    const uint32_t pixels = places.packs.classes * kSize;
    const int classes = static_cast<int>(args.classes);
    for (int64_t unit = thread; unit < places.units; unit += threads) {
      uint32_t rest, pack_of_pixels, outer, chunk;
      places.packs(static_cast<uint32_t>(unit), rest, pack_of_pixels);
      places.chunks(rest, outer, chunk);
      RowLabel<Real> labels[kSize];
      Pack<Scalar> pack;
      pack.size = kSize;
      pack.counts = 0;
      pack.is_hard = true;
#pragma unroll
      for (int e = 0; e < kSize; ++e) {
        labels[e] = row_label<may_score>(args, outer * pixels + pack_of_pixels * kSize + e);
        pack.counts += labels[e].counts;
      }
      const int begin = static_cast<int>(chunk) * places.chunk_classes;
      const int end = begin + places.chunk_classes < classes ? begin + places.chunk_classes : classes;
      int64_t first = (static_cast<int64_t>(outer) * classes + begin) * pixels + pack_of_pixels * kSize;
      for (int j = begin; j < end; ++j, first += pixels) {
        const auto x = bit_cast<Elements<Scalar>>(load_vector(static_cast<const Scalar*>(args.input.data) + first));
        pack.is_hard = true;
        pack.scored = -1;
#pragma unroll
        for (int e = 0; e < kSize; ++e) {
          pack.x[e] = labels[e].is_live ? load_as_compute(x.at[e]) : labels[e].otherwise;
          labels[e].set_share(pack, e, static_cast<uint32_t>(j) == labels[e].class_index,
                              may_score && args.scores.data != nullptr);
        }
        take(first, pack);
      }
    }
  }
}

template <typename Loss, bool kHard, PowerKind kind, typename Scalar, typename Take>
__device__ __forceinline__ void each_of_kind(const Pack<Scalar>& pack, const PlainNumbers<compute_t<Scalar>>& numbers,
                                             compute_t<Scalar> margin, Take take) {
  using Real = compute_t<Scalar>;
  const auto power = [&](Real exponent, const SmallPower<Real>& small) {
    if constexpr (kind == PowerKind::kSquare) return Square<Real>{};
    if constexpr (kind == PowerKind::kSmall) return small;
    if constexpr (kind == PowerKind::kAny) return AnyPower<Real>{exponent};
  };
  const auto gamma = power(numbers.gamma, numbers.small);
  const auto gamma_positive = power(numbers.gamma_positive, numbers.small_positive);
  const SigmoidParameters<Real, std::decay_t<decltype(gamma)>> with{
      gamma, gamma_positive, numbers.positive, numbers.negative, margin, numbers.scored};
  constexpr int kSize = kVectorSize<Scalar>;
  if constexpr (kHard && kHasScores<Loss>) {
    SigmoidTerms<Real> of_score = {};
    if (pack.scored >= 0) of_score = Loss::template terms<false>(pack.scored_x, pack.score, with);
#pragma unroll
    for (int e = 0; e < kSize; ++e) {
      const bool is_scored = e == pack.scored;
      const auto terms = Loss::template terms<true>(pack.x[e], is_scored ? Real(0) : pack.share[e], with);
      take(e, is_scored ? of_score : terms);
    }
  } else {
#pragma unroll
    for (int e = 0; e < kSize; ++e) take(e, Loss::template terms<kHard>(pack.x[e], pack.share[e], with));
  }
}

// Calls take(e, terms) for every element of the vector.
template <typename Loss, bool kHard, typename Scalar, typename Take>
__device__ __forceinline__ void each_of(const Pack<Scalar>& pack, const PlainNumbers<compute_t<Scalar>>& numbers,
                                        compute_t<Scalar> margin, Take take) {
  if (numbers.power == PowerKind::kSquare) {
    each_of_kind<Loss, kHard, PowerKind::kSquare>(pack, numbers, margin, take);
  } else if (numbers.power == PowerKind::kSmall) {
    each_of_kind<Loss, kHard, PowerKind::kSmall>(pack, numbers, margin, take);
  } else {
    each_of_kind<Loss, kHard, PowerKind::kAny>(pack, numbers, margin, take);
  }
}

template <typename Loss, Targets targets, typename Scalar, typename Take>
__device__ __forceinline__ void each(const Pack<Scalar>& pack, const PlainNumbers<compute_t<Scalar>>& numbers,
                                     compute_t<Scalar> margin, Take take) {
  if ((targets != Targets::kDense && !kHasScores<Loss>) || pack.is_hard) {
    each_of<Loss, true>(pack, numbers, margin, take);
  } else {
    each_of<Loss, false>(pack, numbers, margin, take);
  }
}

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
    each<Loss, targets>(pack, numbers, args.margin, [&](int e, const SigmoidTerms<Real>& terms) {
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
    each<Loss, targets>(pack, numbers, args.margin, [&](int e, const SigmoidTerms<Real>& terms) {
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
  // One row of memory per label, and a score for each. Elements are counted in 32 bits.
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
  // Classes per thread: the more, the fewer reads of labels, but enough blocks must remain.
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

// At most as many blocks as sigmoid_loss_plain_grid returns, because the scratch memory is for these.
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
