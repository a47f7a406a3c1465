// Packs of elements of a loss of one logit, and their targets (sigmoid_loss_vectorized.cu).
//
// A thread takes 16 bytes of logits at a time, and either 16 bytes of targets or the label of their row. For labels of
// pixels ([N, C, H, W]) it takes 16 bytes of pixels and loops over several classes with the same labels. A pack of hard
// targets (0 and 1, or labels) takes the short formulas, a pack with a soft target the general ones. The score of a
// label is a single soft target: it alone takes the general formulas. The forward pass saves nothing. Elements of
// ignored rows, and those beyond the end, get a logit whose loss and gradient are 0, so that no later step needs a
// selection.
#pragma once

#include "cuda/common.cuh"
#include "kernels/sigmoid_loss.h"
#include "math/scored_loss.h"
#include "math/sigmoid_loss.h"

namespace focalkern::cuda {
namespace {

// e^-1000 is 0 in every type: for target 0, loss and slope are then 0, too.
template <typename Real>
constexpr Real kLogitWithoutLoss = Real(-1000);

enum class PowerKind { kSquare, kSmall, kAny };

// The parameters of a launch.
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

// n / classes for n below 2^32, by multiplication; the product may be one too small, which is corrected.
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
  RowDivider packs;   // divides by the packs of pixels
  RowDivider chunks;  // divides by the chunks of classes, one per thread
  int chunk_classes;
  int64_t units;  // vectors of pixels over all chunks of classes
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
  int scored = -1;  // the element whose target is a score, if any; all others are hard
  compute_t<Scalar> scored_x;
  compute_t<Scalar> score;
};

template <typename Scalar>
__device__ __forceinline__ Elements<Scalar> load_elements(const void* data, int64_t first, int size, Scalar missing) {
  constexpr int kSize = kVectorSize<Scalar>;
  const Scalar* at = static_cast<const Scalar*>(data) + first;
  uint4 loaded;  // whole words: the compiler would take 16-bit elements apart here and again at their use
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
  Real otherwise;        // the substitute logit if the row is ignored
  Real score;            // the target of that class

  // Sets the target of an element. `has_scores` is the same for all elements.
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
  const bool is_live = counts && label >= 0 && label <= args.classes;  // the last label is background
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
      soft += fabs(share * share - share);  // 0 only for targets 0 and 1; NaN for NaN
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
                                             compute_t<Scalar> constant, Take take) {
  using Real = compute_t<Scalar>;
  const auto power = [&](Real exponent, const SmallPower<Real>& small) {
    if constexpr (kind == PowerKind::kSquare) return Square<Real>{};
    if constexpr (kind == PowerKind::kSmall) return small;
    if constexpr (kind == PowerKind::kAny) return AnyPower<Real>{exponent};
  };
  const auto gamma = power(numbers.gamma, numbers.small);
  const auto gamma_positive = power(numbers.gamma_positive, numbers.small_positive);
  const SigmoidParameters<Real, std::decay_t<decltype(gamma)>> with{
      gamma, gamma_positive, numbers.positive, numbers.negative, constant, numbers.scored};
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
                                        compute_t<Scalar> constant, Take take) {
  if (numbers.power == PowerKind::kSquare) {
    each_of_kind<Loss, kHard, PowerKind::kSquare>(pack, numbers, constant, take);
  } else if (numbers.power == PowerKind::kSmall) {
    each_of_kind<Loss, kHard, PowerKind::kSmall>(pack, numbers, constant, take);
  } else {
    each_of_kind<Loss, kHard, PowerKind::kAny>(pack, numbers, constant, take);
  }
}

template <typename Loss, Targets targets, typename Scalar, typename Take>
__device__ __forceinline__ void each(const Pack<Scalar>& pack, const PlainNumbers<compute_t<Scalar>>& numbers,
                                     compute_t<Scalar> constant, Take take) {
  if ((targets != Targets::kDense && !kHasScores<Loss>) || pack.is_hard) {
    each_of<Loss, true>(pack, numbers, constant, take);
  } else {
    each_of<Loss, false>(pack, numbers, constant, take);
  }
}

}  // namespace
}  // namespace focalkern::cuda
