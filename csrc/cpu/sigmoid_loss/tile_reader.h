// Reads a tile: logits, targets, and the parameters that vary between elements.
#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>
#include <type_traits>

#include "cpu/sigmoid_loss/dense_targets.h"
#include "cpu/sigmoid_loss/labels.h"
#include "cpu/sigmoid_loss/read.h"
#include "cpu/sigmoid_loss/tile.h"
#include "cpu/simd/dispatch.h"
#include "math/scored_loss.h"
#include "math/sigmoid_loss.h"

namespace focalkern::cpu {
namespace {

template <typename Real>
FK_VECTOR_CLONES void fill(Real value, int64_t n, Real* to) {
#pragma omp simd
  for (int64_t i = 0; i < n; ++i) to[i] = value;
}

template <typename Real>
FK_VECTOR_CLONES void one_minus(const Real* from, int64_t n, Real* to) {
#pragma omp simd
  for (int64_t i = 0; i < n; ++i) to[i] = Real(1) - from[i];
}

template <typename Real>
FK_VECTOR_CLONES void multiply(Real by, int64_t n, Real* product) {
#pragma omp simd
  for (int64_t i = 0; i < n; ++i) product[i] *= by;
}

// A scale of 0 stays 0, even if the upstream gradient is infinite or NaN.
template <typename Real>
FK_VECTOR_CLONES void multiply(const Real* by, int64_t n, Real* scale) {
#pragma omp simd
  for (int64_t i = 0; i < n; ++i) scale[i] = scale[i] == Real(0) ? Real(0) : scale[i] * by[i];
}

template <typename Real>
FK_VECTOR_CLONES void products(Real sign, const Real* a, const Real* b, int64_t n, Real* product) {
#pragma omp simd
  for (int64_t i = 0; i < n; ++i) product[i] = sign * a[i] * b[i];
}

template <typename Scalar>
class TileReader {
 public:
  using Real = compute_t<Scalar>;

  // Fills the parameters that are one number for all elements. `sign_of_one` is the sign of TileView::one. `grad_loss`
  // is null in the forward pass.
  TileReader(const SigmoidLossArgs<Scalar>& args, Real factor, Real sign_of_one, const Operand* grad_loss)
      : args_(args),
        factor_(factor),
        sign_of_one_(sign_of_one),
        grad_loss_(grad_loss && grad_loss->data ? grad_loss : nullptr) {
    fill_number(args.gamma, gamma_);
    if (args.loss_kind == SigmoidLoss::kAsymmetric) fill_number(args.second, second_);
    if (args.has_alpha) {
      fill_number(args.second, second_);
      if (!args.second.data) one_minus(second_, kTile, negative_);
    } else if (args.loss_kind != SigmoidLoss::kAsymmetric) {
      fill(Real(1), kTile, second_);
      fill(Real(1), kTile, negative_);
    }
    if (!args.weight.data) fill(factor * static_cast<Real>(args.weight.value), kTile, scale_);
    has_numbers_ = !args.weight.data && !grad_loss_ && !(args.has_alpha && args.second.data);
    if (has_numbers_ && weighs_hard_targets()) weigh(second_, scale_, kTile);
  }

  Powers powers() const {
    const auto is_small = [](const Operand& operand) {
      return !operand.data && SmallPower<Real>::covers(static_cast<Real>(operand.value));
    };
    if (!is_small(args_.gamma)) return Powers::kAny;
    if (args_.loss_kind == SigmoidLoss::kAsymmetric) return is_small(args_.second) ? Powers::kSmall : Powers::kAny;
    return args_.gamma.value == 2 ? Powers::kSquare : Powers::kSmall;
  }

  // The logits are not read here: the look-up needs them in their own type.
  TileView<Real> view(int64_t begin, int64_t end) {
    const int64_t n = end - begin;
    TileView<Real> view{};
    flip_ones(false);
    labels_.is_valid = true;
    labels_.ones = labels_.ignored_runs = labels_.ignored = 0;
    match_scores_ = nullptr;
    logits_ = read_input(args_, begin, end, raw_);
    view.gamma = read_or_number(args_.gamma, begin, end, gamma_);
    view.second = read_or_number(args_.second, begin, end, second_);
    view.negative = negative_;
    if (args_.has_alpha && args_.second.data) one_minus(view.second, n, negative_);
    view.scale = scale_;
    if (args_.weight.data) {
      view.scale = own_scale(read(args_.weight, args_.space, begin, end, scale_), n);
      multiply(factor_, n, own_scale_);
    }
    if (grad_loss_) {
      view.scale = own_scale(view.scale, n);
      multiply(read(*grad_loss_, args_.space, begin, end, grad_), n, own_scale_);
    }
    if (args_.target_is_labels) {
      const Real* shares = nullptr;
      with_type(args_.target, [&](const auto* labels) {
        if constexpr (std::is_integral_v<std::decay_t<decltype(*labels)>>) {
          shares = read_labels(args_, labels, begin, end, target_, &labels_);
        }
      });
      view.targets = shares ? Targets::kHard : Targets::kLabels;
      view.target = shares ? shares : target_;
      if (args_.scores.data) {
        match_scores_ = read(args_.scores, args_.space, begin, end, scores_);
        if (shares) {
          view.targets = Targets::kSoft;
          Real* own = target_ + (shares - target_);
          for (int64_t i = 0; i < n; ++i) own[i] = own[i] > Real(0) ? score_of_match(match_scores_[i]) : Real(0);
        }
      }
    } else {
      read_target(begin, end, &view);
    }
    if (!has_numbers_ && view.targets != Targets::kSoft && weighs_hard_targets()) {
      weigh(view.second, view.scale, n);
    }
    view.one = one_;
    view.zero = zero_;
    if (view.targets == Targets::kLabels) {
      if (!has_signs_) fill(Real(1), kTile, signs_);
      has_signs_ = true;
      view.sign = signs_;
      if (!computes_ones_again()) flip_ones(true);
    }
    return view;
  }

  // The logits of the last view as stored, and in the compute type.
  const Scalar* logits() const { return logits_; }
  const Real* input(int64_t n) {
    if constexpr (std::is_same_v<Scalar, Real>) {
      return logits_;
    } else {
      read_run(logits_, 1, n, input_);
      return input_;
    }
  }

  const TileLabels& labels() const { return labels_; }
  // Whether the ones have scores.
  bool has_scores() const { return match_scores_ != nullptr; }
  // Whether the ones need a second computation: changing sign and weight does not turn their loss into that of target
  // 0.
  bool computes_ones_again() const {
    return args_.loss_kind == SigmoidLoss::kAsymmetric || is_scored(args_.loss_kind) || has_scores();
  }

  // Elements of target 1 in a tile of labels, gathered and padded to whole vectors with the first one.
  int64_t padded_ones() const { return (labels_.ones + 15) / 16 * 16; }
  TileView<Real> ones(const TileView<Real>& tile) {
    if (!ones_) ones_ = std::make_unique_for_overwrite<Ones>();
    const auto gather = [&](const auto* from, auto* to) {
      for (int64_t k = 0; k < padded_ones(); ++k) to[k] = load_as_compute(from[labels_.one[k < labels_.ones ? k : 0]]);
      return to;
    };
    TileView<Real> view = tile;
    view.targets = has_scores() ? Targets::kSoft : Targets::kHard;
    view.target_size = 0;
    view.input = gather(logits_, ones_->input);
    view.target = ones_->target;
    if (has_scores()) {
      gather(match_scores_, ones_->target);
      for (int64_t k = 0; k < padded_ones(); ++k) ones_->target[k] = score_of_match(ones_->target[k]);
    } else {
      std::fill_n(ones_->target, padded_ones(), Real(1));
    }
    if (args_.gamma.data) view.gamma = gather(tile.gamma, ones_->gamma);
    if (args_.second.data) {
      view.second = gather(tile.second, ones_->second);
      view.negative = gather(tile.negative, ones_->negative);
    }
    if (args_.weight.data || grad_loss_) view.scale = gather(tile.scale, ones_->scale);
    if (!has_numbers_) view.one = gather(tile.one, ones_->one);
    return view;
  }

  // Writes shares for formulas that read the target.
  void write_shares(int64_t n) {
    fill(Real(0), n, target_);
    for (int64_t k = 0; k < labels_.ones; ++k) {
      const int64_t i = labels_.one[k];
      target_[i] = has_scores() ? score_of_match(match_scores_[i]) : Real(1);
    }
  }

  // Elements of ignored labels contribute 0, even where their logits are NaN.
  template <typename Result>
  void clear_ignored(Result* results) const {
    for (int64_t k = 0; k < labels_.ignored_runs; ++k) {
      std::fill_n(results + labels_.ignored_run[k].first, labels_.ignored_run[k].length, Result{});
    }
  }

 private:
  // Whether the loss of hard targets uses the weights TileView::one and TileView::zero.
  bool weighs_hard_targets() const {
    return args_.loss_kind == SigmoidLoss::kFocal || args_.loss_kind == SigmoidLoss::kQuality;
  }

  // Whether the formula for soft targets takes much longer than that for target 0.
  bool has_long_formula() const {
    return args_.loss_kind == SigmoidLoss::kMatchability || args_.loss_kind == SigmoidLoss::kIaBce;
  }

  void read_target(int64_t begin, int64_t end, TileView<Real>* view) {
    const int64_t n = end - begin;
    bool known = false, hard = false;
    if (args_.target.dense) {
      with_type(args_.target, [&](const auto* data) {
        const auto* source = data + begin;
        view->target_source = reinterpret_cast<const char*>(source);
        view->target_size = sizeof(*source);
        if constexpr (!std::is_integral_v<std::decay_t<decltype(*source)>>) {
          // In float32, hard targets in place take less time than their search.
          constexpr bool kIsHalf = sizeof(*source) == 2;
          known = true;
          hard = !kIsHalf && last_was_hard_ && all_hard(source, n);
          if (hard) return;
          if ((kIsHalf || has_long_formula()) && find_nonzero(source, n, &labels_)) return take_ones(source, view);
          labels_.ones = 0;
          hard = all_hard(source, n);
        }
      });
    }
    if (view->target) return;
    view->target = read(args_.target, args_.space, begin, end, target_);
    if (!known) hard = all_hard(view->target, n);
    last_was_hard_ = hard;
    view->targets = hard ? Targets::kHard : Targets::kSoft;
  }

  // Treats a dense target of which labels_ has the ones as labels; with scores, if not all of them are 1.
  template <typename Stored>
  void take_ones(const Stored* target, TileView<Real>* view) {
    bool has_scores = false;
    for (int64_t k = 0; k < labels_.ones; ++k) {
      const int64_t i = labels_.one[k];
      scores_[i] = static_cast<Real>(load_as_compute(target[i]));
      has_scores |= scores_[i] != Real(1);
    }
    match_scores_ = has_scores ? scores_ : nullptr;
    last_was_hard_ = !has_scores;
    view->targets = Targets::kLabels;
    view->target = target_;
  }

  // At the ones of the tile, sets the logit's sign to -1 and the weight to that of a one; flip = false undoes it.
  void flip_ones(bool flip) {
    if (are_flipped_ == flip) return;
    are_flipped_ = flip;
    const Real zero = has_numbers_ ? negative_[0] * scale_[0] : Real(0);
    for (int64_t k = 0; k < labels_.ones; ++k) {
      const int64_t i = labels_.one[k];
      signs_[i] = flip ? Real(-1) : Real(1);
      zero_[i] = flip ? one_[i] : zero;
    }
  }

  void weigh(const Real* alpha, const Real* scale, int64_t n) {
    products(sign_of_one_, alpha, scale, n, one_);
    products(Real(1), negative_, scale, n, zero_);
  }

  // The scale, copied to memory of this reader.
  Real* own_scale(const Real* scale, int64_t n) {
    if (scale != own_scale_) std::copy(scale, scale + n, own_scale_);
    return own_scale_;
  }

  void fill_number(const Operand& operand, Real* buffer) {
    if (!operand.data) fill(static_cast<Real>(operand.value), kTile, buffer);
  }
  const Real* read_or_number(const Operand& operand, int64_t begin, int64_t end, Real* buffer) {
    return operand.data ? read(operand, args_.space, begin, end, buffer) : buffer;
  }

  const SigmoidLossArgs<Scalar>& args_;
  Real factor_;  // factor of every scale
  Real sign_of_one_;
  const Operand* grad_loss_;   // null if it is one number
  bool has_numbers_;           // TileView::one and zero are each one number
  bool last_was_hard_ = true;  // of the last dense target
  bool has_signs_ = false;     // whether signs_ is filled
  bool are_flipped_ = false;   // whether signs_ and zero_ are set for the ones of labels_
  TileLabels labels_;
  struct Ones {
    Real input[kTile], target[kTile], gamma[kTile], second[kTile], negative[kTile], scale[kTile], one[kTile];
  };
  std::unique_ptr<Ones> ones_;
  const Scalar* logits_ = nullptr;
  const Real* match_scores_ = nullptr;  // of the ones of labels_, at their positions in the tile; or null
  alignas(64) Scalar raw_[kTile];
  alignas(64) Real input_[std::is_same_v<Scalar, Real> ? 1 : kTile];
  alignas(64) Real target_[kTile + (kRowGroup + 1) * kFewClasses];
  alignas(64) Real gamma_[kTile];
  alignas(64) Real second_[kTile];  // alpha, or gamma_positive
  alignas(64) Real negative_[kTile];
  alignas(64) Real scale_[kTile];
  alignas(64) Real own_scale_[kTile];
  alignas(64) Real one_[kTile];
  alignas(64) Real zero_[kTile];
  alignas(64) Real signs_[kTile];
  alignas(64) Real grad_[kTile];
  alignas(64) Real scores_[kTile];
};

}  // namespace
}  // namespace focalkern::cpu
