// One vector of rows: the step of the sums and of the gradient at one class.
#pragma once

#include <limits>

#include "cpu/row_loss/tile.h"
#include "cpu/simd/math.h"
#include "cpu/simd/vector.h"

namespace focalkern::cpu {
namespace {

// A compensated sum (Kahan): `excess` is the rounding error of the additions.
template <typename Reals>
struct CompensatedSum {
  Reals sum{}, excess{};

  FK_HOST_DEVICE void add(const Reals& summand) {
    const Reals given = summand - excess, before = sum;
    sum = before + given;
    excess = (sum - before) - given;
  }
};

// Two passes over the classes in order: the first calls look() for each, the second add().
template <typename Loss, typename Real, int64_t n>
struct SumsOfLanes {
  using Int = label_int<Real>;
  using Reals = simd_t<Real, n>;
  using Ints = simd_t<Int, n>;
  static constexpr bool kRunnerUp = Loss::kSpecialClass == SpecialClass::kRunnerUp;

  Ints label, this_class{}, marked;
  Reals lowest, max, rest{}, target_logit{}, squares{}, rival;

  FK_HOST_DEVICE SumsOfLanes(const Tile<Real>& tile, int64_t row)
      : label(load_simd<Ints>(tile.label + row)),
        marked(Ints{} + (kRunnerUp ? Int(kNoTarget) : Int(0))),
        lowest(load_simd<Reals>(tile.exp_zero)),
        max(-std::numeric_limits<Real>::infinity() - Reals{}),
        rival(max) {}

  // look() may visit a class twice.
  FK_HOST_DEVICE void look(const Reals& v, [[maybe_unused]] Int c) {
    if constexpr (Loss::kSpecialClass == SpecialClass::kLargest) marked = v > max ? Ints{} + c : marked;
    if constexpr (kRunnerUp) target_logit = label == c ? v : target_logit;
    max = v > max ? v : max;
  }

  FK_HOST_DEVICE void add(const Reals& v) {
    const Reals x = v - max;
    const ScaledExponential<Reals> e = scaled_exponential(x < lowest ? lowest : x);
    const auto is_other = label != this_class;
    const auto counts = Loss::kSumExcludesTop ? marked != this_class : is_other;
    if constexpr (sizeof(Reals) == 64) {  // AVX-512 has masked additions
      const Reals product = e.mantissa * e.scale;
      rest = counts ? rest + product : rest;
      if constexpr (Loss::kSquares) squares = counts ? squares + product * product : squares;
    } else {
      const Reals product = e.mantissa * (counts ? e.scale : Reals{});
      rest += product;
      if constexpr (Loss::kSquares) squares += product * product;
    }
    if constexpr (kRunnerUp) {
      // Joining the comparisons by & would be slower: gcc makes one comparison per lane of each.
      const Reals lower = v < target_logit ? v : -std::numeric_limits<Real>::infinity() - Reals{};
      marked = lower > rival ? this_class : marked;
      rival = lower > rival ? lower : rival;
    } else {
      target_logit = is_other ? target_logit : v;
    }
    this_class += 1;
  }

  // Stores the results of look().
  FK_HOST_DEVICE void store_looked(Tile<Real>& tile, int64_t row) const {
    store_simd(max, tile.shift + row);
    if constexpr (Loss::kSpecialClass == SpecialClass::kLargest) store_simd(marked, tile.special + row);
    if constexpr (kRunnerUp) store_simd(target_logit, tile.target_logit + row);
  }
  FK_HOST_DEVICE void load_looked(const Tile<Real>& tile, int64_t row) {
    max = load_simd<Reals>(tile.shift + row);
    if constexpr (Loss::kSpecialClass == SpecialClass::kLargest) marked = load_simd<Ints>(tile.special + row);
    if constexpr (kRunnerUp) target_logit = load_simd<Reals>(tile.target_logit + row);
  }

  // add() for a tile in which the excluded class is already -inf and the logit of the target is known.
  FK_HOST_DEVICE void add_all(const Reals& v) {
    const Reals fall = max - v, most = -lowest;
    const ScaledExponential<Reals> e = scaled_exponential(-(fall > most ? most : fall));
    rest += e.mantissa * e.scale;
    if constexpr (Loss::kSquares) {
      const Reals product = e.mantissa * e.scale;
      squares += product * product;
    }
  }

  // Adds the sums to `all` and `all_squares`, and resets them to 0.
  FK_HOST_DEVICE void move_sums(Reals& all, Reals& all_squares) {
    all += rest;
    all_squares += squares;
    rest = squares = Reals{};
  }

  FK_HOST_DEVICE void store(Tile<Real>& tile, int64_t row) const {
    store_simd(max, tile.shift + row);
    store_simd(rest, tile.sum_exp_others + row);
    store_simd(target_logit, tile.target_logit + row);
    if constexpr (Loss::kSquares) store_simd(squares, tile.squares + row);
    if constexpr (Loss::kSpecialClass != SpecialClass::kNone) store_simd(marked, tile.special + row);
    if constexpr (kRunnerUp) store_simd(rival - target_logit, tile.gap + row);
  }
};

// The gradient, class by class.
template <typename Loss, typename Real, int64_t n>
struct GradOfLanes {
  using Int = label_int<Real>;
  using Reals = simd_t<Real, n>;
  using Ints = simd_t<Int, n>;

  Ints label, this_class{}, marked{};
  Reals lowest, max, factor, target_grad, square_factor{}, special_grad{};

  FK_HOST_DEVICE GradOfLanes(const Tile<Real>& tile, int64_t row)
      : label(load_simd<Ints>(tile.label + row)),
        lowest(load_simd<Reals>(tile.exp_zero)),
        max(load_simd<Reals>(tile.shift + row)),
        factor(load_simd<Reals>(tile.factor + row)),
        target_grad(load_simd<Reals>(tile.target_grad + row)) {
    if constexpr (Loss::kSquares) square_factor = load_simd<Reals>(tile.square_factor + row);
    if constexpr (Loss::kSpecialClass != SpecialClass::kNone) {
      marked = load_simd<Ints>(tile.special + row);
      special_grad = load_simd<Reals>(tile.special_grad + row);
    }
  }

  FK_HOST_DEVICE Reals next(const Reals& v) {
    const Reals x = v - max;
    // This minimum turns NaN into 0; the factor of such a row is NaN already. A row without a gradient has an infinite
    // maximum, so its gradient is 0.
    const ScaledExponential<Reals> e = scaled_exponential(x > lowest ? x : lowest);
    Reals grad = e.mantissa * e.scale;
    if constexpr (Loss::kSquares) {
      grad *= factor + grad * square_factor;
    } else {
      grad *= factor;
    }
    if constexpr (Loss::kSpecialClass != SpecialClass::kNone) grad = marked == this_class ? special_grad : grad;
    grad = label == this_class ? target_grad : grad;
    this_class += 1;
    return grad;
  }
};

}  // namespace
}  // namespace focalkern::cpu
