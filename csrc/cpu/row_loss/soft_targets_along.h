// Loops along the classes of a row with soft targets: sums, and the gradient.
#pragma once

#include <algorithm>
#include <limits>
#include <type_traits>

#include "cpu/row_loss/along_classes.h"
#include "cpu/row_loss/soft_targets_lanes.h"
#include "cpu/row_loss/tile.h"
#include "cpu/simd/dispatch.h"
#include "cpu/simd/math.h"
#include "cpu/simd/vector.h"
#include "math/row_loss.h"

namespace focalkern::cpu {
namespace {

// The forward pass asks for shares so many classes ahead, the backward pass for logits, shares and gradients. With
// kAhead, which suits the two streams of hard labels, the backward pass of tensors that fit the last-level cache takes
// a tenth longer.
constexpr int64_t kSoftAhead = 512;

// Rows whose classes are adjacent, in place or copied.
template <typename Real>
struct SoftRows {
  int64_t classes;
  const Real* z[kTileRows];
  // e^(z - max), or null: rows of fewer than 2 kBlock classes, in the forward pass. If the last vector of classes
  // overlaps the one before, all its lanes come after the others.
  Real* e[kTileRows];
  const Real* target[kTileRows];  // class probabilities, if given
  const Real* share[kTileRows];   // of the classes, unless all but the label have the same
  Real* grad[kTileRows];          // or null
  Real* grad_target[kTileRows];   // or null
};

// Lanes of the sum of e^(z_j - max) over all classes below the maximum, and of the number of these classes.
template <typename Reals>
struct ExpBelowLargest {
  Reals sum, classes;
};
// Also writes e^(z_j - max). Lanes below `done` of the last vector repeat classes of the one before.
template <int64_t n, typename Real>
FK_HOST_DEVICE auto sum_exp_below_largest(const Real* z, int64_t classes, Real max, const simd_t<Real, n>& done,
                                          const SoftTile<Real>& tile, Real* to) {
  using Reals = simd_t<Real, n>;
  const Reals most = spread<Reals>(-tile.exp_zero[0]), shift = spread<Reals>(max), one = spread<Reals>(Real(1));
  Reals all{}, part{}, below_max{};
  const auto add = [&](const Reals& v, int64_t at) __attribute__((always_inline)) {
    const ScaledExponential<Reals> parts = exponential_of_fall(Reals(shift - v), most);
    const Reals e = parts.mantissa * parts.scale;
    store_simd(e, to + at);
    if constexpr (sizeof(Reals) == 64) {  // AVX-512 adds where a mask says so
      part = v != shift ? part + e : part;
      below_max = v != shift ? below_max + one : below_max;
    } else {
      part += v != shift ? e : Reals{};
      below_max += v != shift ? one : Reals{};
    }
  };
  const int64_t whole = classes & -n;
  for (int64_t j = 0; j < whole;) {
    const int64_t stop = std::min(whole, j + kPart * n);
    for (; j < stop; j += n) {
      prefetch(z + j + kBlock);
      add(load_simd<Reals>(z + j), j);
    }
    all += part;
    part = Reals{};
  }
  if (whole < classes) {
    const Reals v = load_simd<Reals>(z + classes - n);
    add(Reals(load_simd<Reals>(tile.first) < done ? shift : v), whole);  // the sums leave out the maximum
    all += part;
  }
  return ExpBelowLargest<Reals>{all, below_max};
}

// Writes the shares [rows, classes].
struct SharesOfRows {
  template <int64_t bytes, typename Real>
  static FK_HOST_DEVICE void run(const SoftRows<Real>& rows, int64_t n_rows, const SoftShares<Real>& shares, Real* to) {
    constexpr int64_t n = kLanesOf<bytes, Real>;
    using Reals = simd_t<Real, n>;
    const int64_t classes = rows.classes, whole = classes & -n;
    const Reals kept = spread<Reals>(shares.kept), least = spread<Reals>(shares.spread);
    const Real* weight = shares.weight;
    for (int64_t r = 0; r < n_rows; ++r, to += classes) {
      const Real* target = rows.target[r];
      for (int64_t j = 0, stop = whole;; j = classes - n, stop = classes) {
        if (shares.weight_step == 0) {
          for (; j < stop; j += n) store_simd(Reals(kept * load_simd<Reals>(target + j) + least), to + j);
        } else {
          for (; j < stop; j += n) {
            const Reals share = kept * load_simd<Reals>(target + j) + least;
            store_simd(Reals(share * load_simd<Reals>(weight + j)), to + j);
          }
        }
        if (stop == classes) break;
      }
    }
  }
};

struct LargestOfRows {
  template <int64_t bytes, typename Real>
  static FK_HOST_DEVICE void run(const SoftRows<Real>& rows, int64_t n_rows, SoftTile<Real>& tile) {
    constexpr int64_t n = kLanesOf<bytes, Real>;
    rows.e[0] ? of_short_rows<n>(rows, n_rows, tile) : of_long_rows<n>(rows, n_rows, tile);
  }

 private:
  // The lanes of several rows are folded together.
  template <int64_t n, typename Real>
  static FK_HOST_DEVICE void of_short_rows(const SoftRows<Real>& rows, int64_t n_rows, SoftTile<Real>& tile) {
    using Reals = simd_t<Real, n>;
    constexpr int64_t half = n / 2;
    Reals lanes[n];
    std::fill_n(lanes, n, Reals{});
    for (int64_t first = 0; first < n_rows; first += n) {
      const int64_t count = std::min(n, n_rows - first);
      for (int64_t i = 0; i < count; ++i) lanes[i] = max_lanes_of<n>(rows.z[first + i], rows.classes);
      store_simd(fold_each(lanes, Larger{}), tile.shift + first);
    }
    const int64_t classes = rows.classes;
    const Real others = static_cast<Real>(classes - 1);
    const Reals done = spread<Reals>(static_cast<Real>(n - classes % n));
    for (int64_t first = 0; first < n_rows; first += half) {
      const int64_t count = std::min(half, n_rows - first);
      for (int64_t i = 0; i < count; ++i) {
        const int64_t r = first + i;
        const auto below = sum_exp_below_largest<n>(rows.z[r], classes, tile.shift[r], done, tile, rows.e[r]);
        lanes[i] = below.sum;
        lanes[half + i] = below.classes;
      }
      Real sums[n];
      store_simd(fold_each(lanes, Sum{}), sums);
      // If several classes are at the maximum, the sum leaves out any one of them.
      for (int64_t i = 0; i < half; ++i) tile.sum_exp_others[first + i] = sums[i] + (others - sums[half + i]);
    }
  }

  template <int64_t n, typename Real>
  static FK_HOST_DEVICE void of_long_rows(const SoftRows<Real>& rows, int64_t n_rows, SoftTile<Real>& tile) {
    for (int64_t r = 0; r < n_rows; ++r) {
      const Real* z = rows.z[r];
      const Real max = max_of<n>(z, rows.classes);
      const int64_t top = first_equal(z, rows.classes, max);
      double rest = 0;
      const int64_t blocks = rows.classes / kBlock;  // the last block also takes the remainder
      for (int64_t block = 0; block < blocks; ++block) {
        const int64_t begin = block * kBlock;
        const int64_t count = block + 1 < blocks ? kBlock : rows.classes - begin;
        rest += sum_exp_except<n, false>(z + begin, count, max, top - begin, tile.exp_zero[0]).first;
      }
      tile.shift[r] = max;
      tile.sum_exp_others[r] = static_cast<Real>(rest);
    }
  }
};

#ifdef FK_HAS_AVX512_CODE
// The class of a logit that one class at most has; 0 if no class has it.
FK_AVX512 inline int64_t class_of_logit(const float* z, int64_t n, float value) {
  const __m512 values = _mm512_set1_ps(value);
  if (n <= kSoftPart * 16) {
    // Leaving the loop at the class would be mispredicted, which takes as long as the other vectors of a short row.
    const __m512i sixteen = _mm512_set1_epi32(16);
    __m512i index = _mm512_loadu_si512(kFirst<int32_t>), found = _mm512_setzero_si512();
    int64_t j = 0;
    for (; j + 16 <= n; j += 16) {
      const __mmask16 is_equal = _mm512_cmp_ps_mask(_mm512_loadu_ps(z + j), values, _CMP_EQ_OQ);
      found = _mm512_mask_mov_epi32(found, is_equal, index);
      index = _mm512_add_epi32(index, sixteen);
    }
    if (j < n) {
      const __mmask16 is_equal = _mm512_cmp_ps_mask(_mm512_loadu_ps(z + n - 16), values, _CMP_EQ_OQ);
      found = _mm512_mask_sub_epi32(found, is_equal, index, _mm512_set1_epi32(static_cast<int>(j - (n - 16))));
    }
    return _mm512_reduce_max_epi32(found);
  }
  for (int64_t j = 0; j < n; j += 16) {
    const int64_t begin = std::min(j, n - 16);
    const __mmask16 found = _mm512_cmp_ps_mask(_mm512_loadu_ps(z + begin), values, _CMP_EQ_OQ);
    if (found != 0) return begin + __builtin_ctz(found);
  }
  return 0;
}
#endif

// The likely class of each row and its share; class 0 if the row has none.
struct LikelyOfRows {
  template <int64_t bytes, typename Real>
  static FK_HOST_DEVICE void run(const SoftRows<Real>& rows, int64_t n_rows, SoftTile<Real>& tile) {
    for (int64_t r = 0; r < n_rows; ++r) {
      tile.special[r] = 0;
      if (!(tile.inv_sum_exp[r] > kUnlikely<Real>)) continue;
      int64_t c;
#ifdef FK_HAS_AVX512_CODE
      if constexpr (bytes == 64 && std::is_same_v<Real, float>) {
        c = class_of_logit(rows.z[r], rows.classes, tile.likely[r]);
      } else
#endif
      {
        c = first_equal(rows.z[r], rows.classes, tile.likely[r]);
      }
      tile.special[r] = static_cast<label_int<Real>>(c);
      tile.top_share[r] = rows.share[r][c];
    }
  }
};

template <typename Loss, typename Gammas, bool kUniform, bool kGamma>
struct SoftSumsOfRows {
  template <int64_t bytes, typename Real>
  static FK_HOST_DEVICE void run(const SoftRows<Real>& rows, int64_t n_rows, const SoftShares<Real>& shares,
                                 Real epsilon, bool detached, const GammaTableOf<Real>& table, SoftTile<Real>& tile) {
    rows.e[0] ? run_rows<bytes, true>(rows, n_rows, shares, epsilon, detached, table, tile)
              : run_rows<bytes, false>(rows, n_rows, shares, epsilon, detached, table, tile);
  }

 private:
  template <int64_t bytes, bool kHasExponentials, typename Real>
  static FK_HOST_DEVICE void run_rows(const SoftRows<Real>& rows, int64_t n_rows, const SoftShares<Real>& shares,
                                      Real epsilon, bool detached, const GammaTableOf<Real>& table,
                                      SoftTile<Real>& tile) {
    constexpr int64_t n = kLanesOf<bytes, Real>;
    using Reals = simd_t<Real, n>;
    // The lanes of several rows are folded together: losses, then gradients.
    constexpr int64_t half = n / 2;
    Reals lanes[n];
    std::fill_n(lanes, n, Reals{});
    [[maybe_unused]] Reals gammas[n];
    if constexpr (kGamma) std::fill_n(gammas, n, Reals{});
    double of_blocks[3][half];
    for (int64_t first = 0; first < n_rows; first += half) {
      std::fill_n(of_blocks[0], 3 * half, 0.0);
      const int64_t count = std::min(half, n_rows - first);
      for (int64_t i = 0; i < count; ++i) {
        const int64_t r = first + i;
        const auto of_row = lanes_of_row<Loss, Gammas, n>(tile, r, epsilon, detached, table);
        const auto sums = sums_of_row<kHasExponentials>(rows, r, shares, of_row, tile, of_blocks, i);
        lanes[i] = sums.all_loss;
        lanes[half + i] = sums.all_grad;
        if constexpr (kGamma) gammas[i] = sums.all_gamma;
      }
      Real folded[n];
      store_simd(fold_each(lanes, Sum{}), folded);
      for (int64_t i = 0; i < half; ++i) {
        tile.loss_sum[first + i] = static_cast<Real>(of_blocks[0][i] + static_cast<double>(folded[i]));
        tile.grad_sum[first + i] = static_cast<Real>(of_blocks[1][i] + static_cast<double>(folded[half + i]));
      }
      if constexpr (kGamma) {
        store_simd(fold_each(gammas, Sum{}), folded);
        for (int64_t i = 0; i < half; ++i) {
          tile.gamma_sum[first + i] = static_cast<Real>(of_blocks[2][i] + static_cast<double>(folded[i]));
        }
      }
    }
  }

  // Lanes of the sums over the classes of a row, in partial sums of partial sums. A row of many classes adds blocks of
  // them to of_blocks[..][i].
  template <bool kHasExponentials, typename Real, typename Lanes, int64_t half>
  static FK_HOST_DEVICE auto sums_of_row(const SoftRows<Real>& rows, int64_t r, const SoftShares<Real>& shares,
                                         const Lanes& lanes, const SoftTile<Real>& tile, double (&of_blocks)[3][half],
                                         int64_t i) {
    constexpr int64_t n = 2 * half;
    using Reals = simd_t<Real, n>;
    using Int = label_int<Real>;
    using Ints = simd_t<Int, n>;
    const int64_t classes = rows.classes, whole = classes & -n;
    const Reals one_share = spread<Reals>(kLabelApart<Loss> ? shares.spread : Real(1));
    const Real* z = rows.z[r];
    [[maybe_unused]] const Real *e = rows.e[r], *share = rows.share[r];
    [[maybe_unused]] const Ints label = spread<Ints>(tile.label[r]);
    [[maybe_unused]] Ints index = load_simd<Ints>(kFirst<Int>);
    SoftSums<kGamma, Reals, Reals> sums;
    const auto add = [&](const Reals& v, int64_t j, [[maybe_unused]] int64_t at) __attribute__((always_inline)) {
      Reals of_share = one_share;
      if constexpr (!kUniform) {
        of_share = load_simd<Reals>(share + j);
        prefetch(share + j + kSoftAhead);
      }
      ClassTerms<Reals> terms;
      if constexpr (kHasExponentials) {
        terms = lanes.at(v, load_simd<Reals>(e + at), of_share).terms;
      } else {
        terms = lanes.at(v, of_share).terms;
      }
      if constexpr (!kUniform && !kLabelApart<Loss>) {
        return sums.add(terms, Reals(v != lanes.likely ? of_share : Reals{}));
      }
      leave_out(v == lanes.likely, terms);
      if constexpr (kUniform && kLabelApart<Loss>) leave_out_by_bits(index == label, terms);
      sums.add(terms);
    };
    for (int64_t j = 0; j < whole;) {
      const int64_t stop = std::min(whole, j + kSoftPart * n);
      for (; j < stop; j += n) {
        add(load_simd<Reals>(z + j), j, j);
        if constexpr (kUniform && kLabelApart<Loss>) index += static_cast<Int>(n);
      }
      sums.flush([](const Reals& part) { return part; });
      if (j % kBlock == 0) {
        const TwoSums<Real> two = fold_two(sums.all_loss, sums.all_grad);
        of_blocks[0][i] += static_cast<double>(two.first);
        of_blocks[1][i] += static_cast<double>(two.second);
        if constexpr (kGamma) of_blocks[2][i] += static_cast<double>(fold_lanes(sums.all_gamma, Sum{}));
        sums.all_loss = sums.all_grad = sums.all_gamma = Reals{};
      }
    }
    if (whole < classes) {
      const int64_t begin = classes - n;
      if constexpr (kUniform && kLabelApart<Loss>) index -= static_cast<Int>(whole - begin);
      // Classes that were added before get the likely class's logit, so that the sum excludes them.
      const Reals first = load_simd<Reals>(tile.first), done = spread<Reals>(static_cast<Real>(whole - begin));
      const Reals v = load_simd<Reals>(z + begin);
      add(Reals(first < done ? lanes.likely : v), begin, whole);
      sums.flush([](const Reals& part) { return part; });
    }
    return sums;
  }
};

// kTarget: the gradient with respect to the shares is needed.
template <typename Loss, typename Gammas, bool kUniform, bool kTarget>
struct SoftGradOfRows {
  template <int64_t bytes, typename Real>
  static FK_HOST_DEVICE void run(const SoftRows<Real>& rows, int64_t n_rows, const SoftShares<Real>& shares,
                                 Real epsilon, bool detached, const GammaTableOf<Real>& table, const Real* class_weight,
                                 int64_t class_weight_step, SoftTile<Real>& tile) {
    constexpr int64_t n = kLanesOf<bytes, Real>;
    using Reals = simd_t<Real, n>;
    const int64_t classes = rows.classes, whole = classes & -n;
    const Reals one_share = spread<Reals>(kLabelApart<Loss> ? shares.spread : Real(1));
    for (int64_t r = 0; r < n_rows; ++r) {
      const Real* z = rows.z[r];
      Real* grad = rows.grad[r];
      [[maybe_unused]] Real* grad_target = kTarget ? rows.grad_target[r] : nullptr;
      if (tile.is_zero[r]) {
        if (grad) std::fill_n(grad, classes, Real(0));
        if (grad_target) std::fill_n(grad_target, classes, Real(0));
        continue;
      }
      const auto lanes = lanes_of_row<Loss, Gammas, n>(tile, r, epsilon, detached, table);
      [[maybe_unused]] const Real* share = rows.share[r];
      const Reals p_factor = spread<Reals>(tile.p_factor[r]), share_factor = spread<Reals>(tile.share_factor[r]);
      const Reals top_grad = spread<Reals>(tile.top_grad[r]);
      const auto grad_at = [&](int64_t j) __attribute__((always_inline)) {
        const Reals v = load_simd<Reals>(z + j);
        Reals of_share = one_share;
        if constexpr (!kUniform) {
          of_share = load_simd<Reals>(share + j);
          prefetch(share + j + kSoftAhead);
        }
        prefetch(z + j + kSoftAhead);
        prefetch(grad + j + kSoftAhead);
        const auto of_class = lanes.at(v, of_share);
        const Reals slope = kUniform || kLabelApart<Loss> ? of_class.terms.slope : of_share * of_class.terms.slope;
        const Reals value = of_class.e * p_factor - slope * share_factor;
        if constexpr (kUniform) {
          store_simd(Reals(v == lanes.likely ? top_grad : value), grad + j);
        } else if (!kTarget || grad) {
          store_simd(value, grad + j);
        }
        if constexpr (kTarget) {
          const Reals top = spread<Reals>(tile.top_share_grad[r]);
          const Reals of_share = v == lanes.likely ? top : of_class.terms.grad_share;
          const Reals weight = load_simd<Reals>(class_weight + j * class_weight_step);
          store_simd(share_grad<Reals, Real>(of_share, spread<Reals>(tile.share_grad_factor[r]), weight,
                                             spread<Reals>(tile.weight_grad[r]), kLabelApart<Loss>),
                     grad_target + j);
        }
      };
      for (int64_t j = 0, stop = whole;; j = classes - n, stop = classes) {
        do {
          grad_at(j);
          j += n;
        } while (j < stop);
        if (stop == classes) break;
      }
      if (kTarget && !grad) continue;
      if (!kUniform && tile.inv_sum_exp[r] > kUnlikely<Real>) grad[tile.special[r]] = tile.top_grad[r];
      if (tile.has_labels) grad[tile.label[r]] = tile.label_grad[r];
    }
  }
};

}  // namespace
}  // namespace focalkern::cpu
