// The loops over a tile, for each loss, kind of target and kind of gamma.
#pragma once

#include <algorithm>
#include <cstdint>
#include <type_traits>

#include "cpu/sigmoid_loss/asymmetric.h"
#include "cpu/sigmoid_loss/scored.h"
#include "cpu/sigmoid_loss/tile.h"
#include "cpu/sigmoid_loss/tile_reader.h"
#include "cpu/simd/dispatch.h"
#include "math/scored_loss.h"
#include "math/sigmoid_loss.h"

namespace focalkern::cpu {
namespace {

// The asymmetric loss, with or without a margin: a known margin of 0 saves a logarithm.
template <bool kShifted>
struct AsymmetricOfKnown {
  static constexpr bool kHasMargin = kShifted;
  template <bool kHard, typename Real, typename Power>
  static FK_HOST_DEVICE SigmoidTerms<Real> terms(Real x, Real share, const SigmoidParameters<Real, Power>& with) {
    return AsymmetricElement::terms_of<kHard>(x, share, with, kShifted);
  }
};

template <typename Loss>
constexpr bool kIsAsymmetric =
    std::is_same_v<Loss, AsymmetricOfKnown<false>> || std::is_same_v<Loss, AsymmetricOfKnown<true>>;

template <typename Loss>
constexpr bool kIsScored = false;
template <ScoredLoss kLoss>
constexpr bool kIsScored<KnownScoredElement<kLoss>> = true;
template <ScoredLoss kLoss>
constexpr ScoredLoss loss_of(KnownScoredElement<kLoss>) {
  return kLoss;
}
// Losses whose `constant` is 1 if p^gamma is detached: then the gradient needs no logarithm.
template <typename Loss>
constexpr bool kMayBeDetached = kIsScored<Loss> && !std::is_same_v<Loss, KnownScoredElement<ScoredLoss::kIaBce>>;

template <typename Loss, Targets kTargets, typename Power, typename Real>
FK_HOST_DEVICE SigmoidTerms<Real> terms_with(const TileView<Real>& view, int64_t i, const Power& gamma,
                                             const Power& gamma_positive, Real constant) {
  const Real share = kTargets == Targets::kLabels ? Real(0) : view.target[i];
  return Loss::template terms<kTargets != Targets::kSoft>(
      view.input[i], share,
      SigmoidParameters<Real, Power>{gamma, gamma_positive, view.second[i], view.negative[i], constant});
}

// Loss and slope with weight and sign, as the loops store them.
template <typename Loss, Targets kTargets, bool kDetached, typename Power, typename Real>
FK_HOST_DEVICE LossAndSlope<Real> result_with(const TileView<Real>& view, int64_t i, const Power& gamma,
                                              const Power& gamma_positive, Real constant) {
  if constexpr (std::is_same_v<Loss, FocalElement> && kTargets != Targets::kSoft) {
    const Real x = view.input[i], zero = view.zero[i];
    if constexpr (kTargets == Targets::kLabels) {
      return FocalElement::against_zero(x * view.sign[i], zero, gamma);
    } else {
      const Real one = view.one[i];
      const bool is_one = view.target[i] > Real(0);
      return FocalElement::against_zero(is_one ? -x : x, is_one ? one : zero, gamma);
    }
  } else if constexpr (kIsAsymmetric<Loss> && kTargets != Targets::kSoft) {
    const bool is_one = kTargets == Targets::kHard && view.target[i] > Real(0);
    const LossAndSlope<Real> result =
        hard_asymmetric_loss<Loss::kHasMargin>(view.input[i], is_one, constant, gamma, gamma_positive);
    return {result.loss * view.scale[i], result.slope * view.scale[i]};
  } else if constexpr (kIsScored<Loss>) {
    const Real share = kTargets == Targets::kLabels ? Real(0) : view.target[i];
    const LossAndSlope<Real> result =
        scored_loss<loss_of(Loss{}), kTargets, kDetached>(view.input[i], share, view.second[i], constant, gamma);
    return {result.loss * view.scale[i], result.slope * view.scale[i]};
  } else {
    const SigmoidTerms<Real> terms = terms_with<Loss, kTargets>(view, i, gamma, gamma_positive, constant);
    return {terms.loss * view.scale[i], terms.slope * view.scale[i]};
  }
}

template <typename Loss, Targets kTargets, Powers kPowers, bool kDetached = false, typename Real>
FK_HOST_DEVICE LossAndSlope<Real> result_at(const TileView<Real>& view, int64_t i, const SmallPower<Real>& gamma,
                                            const SmallPower<Real>& gamma_positive, Real constant) {
  if constexpr (kPowers == Powers::kSquare) {
    const Square<Real> square;
    return result_with<Loss, kTargets, kDetached>(view, i, square, square, constant);
  } else if constexpr (kPowers == Powers::kSmall) {
    return result_with<Loss, kTargets, kDetached>(view, i, gamma, gamma_positive, constant);
  } else {
    const AnyPower<Real> any{view.gamma[i]}, any_positive{view.second[i]};
    return result_with<Loss, kTargets, kDetached>(view, i, any, any_positive, constant);
  }
}

// Prefetches the same block of the next tile: the loop bodies are too long for out-of-order execution to reach the next
// loads. For elements in a buffer this has no effect; an address outside the tensor never faults.
FK_HOST_DEVICE void ask_ahead(const void* block, int64_t size_of_element) {
  const char* ahead = static_cast<const char*>(block) + kTile * size_of_element;
  for (int64_t i = 0; i < kBlock * size_of_element; i += 64) __builtin_prefetch(ahead + i);
}

template <typename Real>
FK_HOST_DEVICE void ask_for_target(const TileView<Real>& view, int64_t first) {
  const char* block = view.target_source + first * view.target_size;
  if (view.target_size == static_cast<int64_t>(sizeof(Real))) {
    ask_ahead(block, sizeof(Real));  // without a loop
  } else if (view.target_size > 0) {
    ask_ahead(block, view.target_size);
  }
}

// Calls f(i) for each element of a tile, and ask(first) once per whole block.
template <typename Ask, typename Function>
FK_HOST_DEVICE void for_each_element(int64_t n, Ask ask, Function f) {
  int64_t first = 0;
  for (; first + kBlock <= n; first += kBlock) {
    ask(first);
#pragma omp simd
    for (int64_t i = 0; i < kBlock; ++i) f(first + i);
  }
#pragma omp simd
  for (int64_t i = first; i < n; ++i) f(i);
}

// A loop should have numbers of one width, so the sum in double has its own loop.
template <typename Loss, Targets kTargets, Powers kPowers, typename Real>
FK_VECTOR_CLONES void forward_loop(const TileView<Real>& tile, Real constant, int64_t n, Real* loss) {
  const TileView<Real> view = tile;
  constexpr bool kSmall = kPowers == Powers::kSmall;
  const SmallPower<Real> gamma(kSmall ? view.gamma[0] : Real(0)), gamma_positive(kSmall ? view.second[0] : Real(0));
  for_each_element(
      n,
      [&](int64_t i) __attribute__((always_inline)) {
        ask_ahead(view.input + i, sizeof(Real));
        if (kTargets != Targets::kLabels) ask_for_target(view, i);
      },
      [&](int64_t i) __attribute__((always_inline)) {
        loss[i] = result_at<Loss, kTargets, kPowers>(view, i, gamma, gamma_positive, constant).loss;
      });
}

template <typename Real>
FK_VECTOR_CLONES double sum_of(const Real* loss, int64_t n) {
  double sum = 0;
  if (n == kTile) {
    // Adds eight numbers pairwise in Real: three roundings, and one conversion to double per eight numbers.
    constexpr int64_t kPart = kTile / 8;
#pragma omp simd reduction(+ : sum)
    for (int64_t i = 0; i < kPart; ++i) {
      const Real* at = loss + i;
      const Real low = (at[0] + at[kPart]) + (at[2 * kPart] + at[3 * kPart]);
      const Real high = (at[4 * kPart] + at[5 * kPart]) + (at[6 * kPart] + at[7 * kPart]);
      sum += static_cast<double>(low + high);
    }
    return sum;
  }
#pragma omp simd reduction(+ : sum)
  for (int64_t i = 0; i < n; ++i) sum += static_cast<double>(loss[i]);
  return sum;
}

template <typename Loss, Targets kTargets, Powers kPowers, typename Real>
FK_VECTOR_CLONES void backward_loop(const TileView<Real>& tile, Real constant, int64_t n, Real* grad_input) {
  const TileView<Real> view = tile;
  constexpr bool kSmall = kPowers == Powers::kSmall;
  const SmallPower<Real> gamma(kSmall ? view.gamma[0] : Real(0)), gamma_positive(kSmall ? view.second[0] : Real(0));
  const auto loop = [&](auto detached) __attribute__((always_inline)) {
    for_each_element(
        n,
        [&](int64_t i) __attribute__((always_inline)) {
          ask_ahead(view.input + i, sizeof(Real));
          if (kTargets != Targets::kLabels) ask_for_target(view, i);
          ask_ahead(grad_input + i, sizeof(Real));
        },
        [&](int64_t i) __attribute__((always_inline)) {
          constexpr bool kDetached = decltype(detached)::value;
          grad_input[i] = result_at<Loss, kTargets, kPowers, kDetached>(view, i, gamma, gamma_positive, constant).slope;
        });
  };
  if constexpr (kMayBeDetached<Loss>) {
    if (constant == Real(1)) return loop(std::true_type{});
  }
  loop(std::false_type{});
}

// Computes all derivatives.
template <typename Real>
struct Slopes {
  Real target[kTile];
  Real gamma[kTile];
  Real second[kTile];
};

template <typename Loss, typename Real>
FK_VECTOR_CLONES void slopes_loop(const TileView<Real>& tile, Real constant, int64_t n, Slopes<Real>& slopes) {
  const TileView<Real> view = tile;
#pragma omp simd
  for (int64_t i = 0; i < n; ++i) {
    const AnyPower<Real> gamma{view.gamma[i]}, gamma_positive{view.second[i]};
    const SigmoidTerms<Real> terms = terms_with<Loss, Targets::kSoft>(view, i, gamma, gamma_positive, constant);
    const Real scale = view.scale[i];
    slopes.target[i] = scale == Real(0) ? Real(0) : terms.slope_target * scale;
    slopes.gamma[i] = scale == Real(0) ? Real(0) : terms.slope_gamma * scale;
    slopes.second[i] = scale == Real(0) ? Real(0) : terms.slope_positive * scale;
  }
}

using VarifocalElement = KnownScoredElement<ScoredLoss::kVarifocal>;
using MatchabilityElement = KnownScoredElement<ScoredLoss::kMatchability>;
using IaBceElement = KnownScoredElement<ScoredLoss::kIaBce>;

// Calls f with the formula of the loss. For hard targets the quality focal loss equals a focal loss, and the
// matchability loss equals the varifocal loss.
template <typename Scalar, typename Function>
auto with_loss(const SigmoidLossArgs<Scalar>& args, bool hard, Function f) {
  const SigmoidLoss loss = args.loss_kind;
  if (loss == SigmoidLoss::kAsymmetric) {
    return args.constant > 0 ? f(AsymmetricOfKnown<true>{}) : f(AsymmetricOfKnown<false>{});
  }
  if (loss == SigmoidLoss::kQuality && !hard) return f(QualityElement{});
  if (loss == SigmoidLoss::kIaBce) return f(IaBceElement{});
  if (loss == SigmoidLoss::kMatchability && !hard) return f(MatchabilityElement{});
  if (is_scored(loss)) return f(VarifocalElement{});
  return f(FocalElement{});
}

// Calls f<targets, powers> for the combinations that the formula supports.
template <typename Loss, typename Function>
void with_variant(Targets targets, Powers powers, Function f) {
  const auto with_powers = [&](auto known) {
    if constexpr (!kIsAsymmetric<Loss>) {
      if (powers == Powers::kSquare) return f(known, std::integral_constant<Powers, Powers::kSquare>{});
    }
    if (powers == Powers::kAny) return f(known, std::integral_constant<Powers, Powers::kAny>{});
    return f(known, std::integral_constant<Powers, Powers::kSmall>{});
  };
  if constexpr (!std::is_same_v<Loss, QualityElement> && !std::is_same_v<Loss, MatchabilityElement>) {
    if (targets == Targets::kHard) return with_powers(std::integral_constant<Targets, Targets::kHard>{});
    if (targets == Targets::kLabels) return with_powers(std::integral_constant<Targets, Targets::kLabels>{});
  }
  with_powers(std::integral_constant<Targets, Targets::kSoft>{});
}

template <typename Scalar>
void forward_tile(const SigmoidLossArgs<Scalar>& args, const TileView<compute_t<Scalar>>& view, Powers powers,
                  int64_t n, compute_t<Scalar>* to) {
  with_loss(args, view.targets != Targets::kSoft, [&](auto formula) {
    using Loss = decltype(formula);
    with_variant<Loss>(view.targets, powers, [&](auto targets, auto known) {
      forward_loop<Loss, decltype(targets)::value, decltype(known)::value>(view, args.constant, n, to);
    });
  });
}

template <typename Scalar>
void backward_tile(const SigmoidLossArgs<Scalar>& args, const TileView<compute_t<Scalar>>& view, Powers powers,
                   int64_t n, compute_t<Scalar>* to) {
  with_loss(args, view.targets != Targets::kSoft, [&](auto formula) {
    using Loss = decltype(formula);
    with_variant<Loss>(view.targets, powers, [&](auto targets, auto known) {
      backward_loop<Loss, decltype(targets)::value, decltype(known)::value>(view, args.constant, n, to);
    });
  });
}

// Computes the ones of a tile with compute(view, n, to).
template <typename Scalar, typename Result, typename Compute>
void compute_ones(TileReader<Scalar>& reader, const TileView<compute_t<Scalar>>& view, Result* to, Compute compute) {
  const TileLabels& labels = reader.labels();
  if (view.targets != Targets::kLabels || labels.ones == 0) return;
  alignas(64) compute_t<Scalar> of_ones[kTile];
  compute(reader.ones(view), reader.padded_ones(), of_ones);
  for (int64_t k = 0; k < labels.ones; ++k) to[labels.one[k]] = Store<Result>::from_compute(of_ones[k]);
}

}  // namespace
}  // namespace focalkern::cpu
