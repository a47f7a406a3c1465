// NLL of the focal calibration map and its derivatives in gamma and 1/T, summed over rows, in float64.
//
// Memory: one read of the logits. A tile of 16 rows is transposed, so that the rows of a class are adjacent. Every loop
// runs over classes and, in vectors, over rows. Passes over the tile in cache: the two largest logits; exponentials
// with moments; with gamma, the classes of the map.

#include "kernels/map_nll_sums.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "cpu/simd/dispatch.h"
#include "math/map_curvature.h"

namespace focalkern::cpu {
namespace {

constexpr int64_t kRows = 16;
constexpr double kMinusInfinity = -std::numeric_limits<double>::infinity();

// Per-row numbers of a tile.
struct alignas(64) Tile {
  double top[kRows], next[kRows], index[kRows];  // index of the largest class
  double target[kRows], of_target[kRows];        // class and logit
  double share[kRows];
  double sum_exp_others[kRows], first[kRows], second[kRows];  // sums of e, e d and e d^2
  double sums[kMapNllSums][kRows];
};

template <typename Scalar>
FK_VECTOR_CLONES void read_rows(const MapNllRows<Scalar>& rows, int64_t begin, int64_t n, double* x, Tile& tile) {
  for (int64_t r = 0; r < kRows; ++r) {
    const int64_t row = begin + (r < n ? r : 0);  // rows beyond the last are filled with 0
    const Scalar* from = rows.input + row * rows.classes;
    for (int64_t c = 0; c < rows.classes; ++c) x[c * kRows + r] = static_cast<double>(load_as_compute(from[c]));
    tile.target[r] = static_cast<double>(rows.target[row]);
    tile.share[r] = r < n ? rows.share[row] : 0;
  }
  if (!rows.is_probs) return;
#pragma omp simd
  for (int64_t i = 0; i < rows.classes * kRows; ++i) x[i] = x[i] > 0 ? logarithm(x[i]) : kMinusInfinity;
}

FK_VECTOR_CLONES void find_top_two(const double* x, int64_t classes, Tile& tile) {
  for (int64_t r = 0; r < kRows; ++r) {
    tile.top[r] = tile.next[r] = kMinusInfinity;
    tile.index[r] = 0;
  }
  for (int64_t c = 0; c < classes; ++c) {
    const double this_class = static_cast<double>(c);
#pragma omp simd
    for (int64_t r = 0; r < kRows; ++r) {
      const double value = x[c * kRows + r];
      const bool leads = value > tile.top[r];
      const double loser = leads ? tile.top[r] : value;
      tile.next[r] = loser > tile.next[r] ? loser : tile.next[r];
      tile.index[r] = leads ? this_class : tile.index[r];
      tile.top[r] = leads ? value : tile.top[r];
      tile.of_target[r] = this_class == tile.target[r] ? value : tile.of_target[r];
    }
  }
  // If only one class is possible, the loss does not depend on the map.
  for (int64_t r = 0; r < kRows; ++r) {
    if (tile.next[r] != kMinusInfinity) continue;
    tile.next[r] = tile.top[r];
    tile.share[r] = 0;
  }
}

// (z - shift) beta; -inf stays -inf also for beta = 0.
FK_HOST_DEVICE double exponent(double z, double shift, double beta) {
  return z == kMinusInfinity ? kMinusInfinity : (z - shift) * beta;
}

// Exponentials of all classes but the largest, their sum and moments.
FK_VECTOR_CLONES void exponentials(const double* x, double* e, int64_t classes, double beta, Tile& tile) {
  for (int64_t r = 0; r < kRows; ++r) tile.sum_exp_others[r] = tile.first[r] = tile.second[r] = 0;
  for (int64_t c = 0; c < classes; ++c) {
    const double this_class = static_cast<double>(c);
#pragma omp simd
    for (int64_t r = 0; r < kRows; ++r) {
      const double z = x[c * kRows + r];
      const double y = this_class == tile.index[r] ? kMinusInfinity : exponent(z, tile.next[r], beta);
      const double power = bounded_exponential(y);
      const double d = power == 0 ? 0 : z - tile.top[r];
      e[c * kRows + r] = power;
      tile.sum_exp_others[r] += power;
      tile.first[r] += power * d;
      tile.second[r] += power * d * d;
    }
  }
  // The sum is 0 only where a single class is possible; 1 keeps such a row finite.
  for (int64_t r = 0; r < kRows; ++r) tile.sum_exp_others[r] = tile.sum_exp_others[r] > 0 ? tile.sum_exp_others[r] : 1;
}

// The NLL at gamma = 0, without derivatives in gamma.
FK_VECTOR_CLONES void softmax_sums(double beta, Tile& tile) {
#pragma omp simd
  for (int64_t r = 0; r < kRows; ++r) {
    const double scale = exponential((tile.next[r] - tile.top[r]) * beta);
    const double odds = tile.sum_exp_others[r] * scale;  // of all other classes to the largest
    const double inverse = scale / (1 + odds);
    const double mean = tile.first[r] * inverse;
    const double below = tile.top[r] - tile.of_target[r];
    tile.sums[kSumValue][r] = log_one_plus(odds) + beta * below;
    tile.sums[kSumBeta][r] = mean + below;
    tile.sums[kSumBetaBeta][r] = tile.second[r] * inverse - mean * mean;
    tile.sums[kSumOfTarget][r] = below;
  }
}

// The numbers of map_curvature_row for each row, except those that only the derivatives of the largest class need.
// These are arrays, because gcc does not vectorize a loop over structs.
struct alignas(64) MapTile {
  double q_scale[kRows], log_q_offset[kRows], ratio_offset[kRows], mean[kRows], variance[kRows];
  double beta[kRows], gamma[kRows], beta_beta[kRows], gamma_beta[kRows], gamma_gamma[kRows];  // of the largest class

  FK_HOST_DEVICE void put(int64_t r, const MapCurvatureRow<double>& row) {
    q_scale[r] = row.terms.q_scale;
    log_q_offset[r] = row.terms.log_q_offset;
    ratio_offset[r] = row.terms.ratio_offset;
    mean[r] = row.mean;
    variance[r] = row.variance;
    beta[r] = row.top.beta;
    gamma[r] = row.top.gamma;
    beta_beta[r] = row.top.beta_beta;
    gamma_beta[r] = row.top.gamma_beta;
    gamma_gamma[r] = row.top.gamma_gamma;
  }
  FK_HOST_DEVICE MapCurvatureRow<double> row(int64_t r) const {
    MapCurvatureRow<double> result{};
    result.terms.q_scale = q_scale[r];
    result.terms.log_q_offset = log_q_offset[r];
    result.terms.ratio_offset = ratio_offset[r];
    result.mean = mean[r];
    result.variance = variance[r];
    return result;
  }
};

// Sums over the classes other than the largest: of the ratio p_k / p_t, of its products with the first derivatives
// relative to those of the largest class, and of its products with the second derivatives.
struct alignas(64) MapMoments {
  double ratio[kRows], beta[kRows], gamma[kRows], beta_beta[kRows], gamma_beta[kRows], gamma_gamma[kRows];
};

FK_VECTOR_CLONES void rows_of_map(MapGamma<double> gamma, double beta, const Tile& tile, MapTile& map) {
#pragma omp simd
  for (int64_t r = 0; r < kRows; ++r) {
    const double gap = (tile.next[r] - tile.top[r]) * beta;
    map.put(r, map_curvature_row(gap, tile.sum_exp_others[r], tile.first[r], tile.second[r], gamma));
  }
}

FK_VECTOR_CLONES void classes_of_map(const double* __restrict x, const double* __restrict e, int64_t classes,
                                     double gamma, double beta, const Tile& tile, const MapTile& map,
                                     MapMoments& moments) {
  moments = {};
  for (int64_t c = 0; c < classes; ++c) {
#pragma omp simd
    for (int64_t r = 0; r < kRows; ++r) {
      const double power = e[c * kRows + r];
      const double z = power == 0 ? tile.next[r] : x[c * kRows + r];  // any number serves: its product is 0
      const auto one = map_curvature_class((z - tile.next[r]) * beta, power, z - tile.top[r], gamma, map.row(r));
      const double b = one.of.beta - map.beta[r], g = one.of.gamma - map.gamma[r];
      moments.ratio[r] += one.ratio;
      moments.beta[r] += one.ratio * b;
      moments.gamma[r] += one.ratio * g;
      moments.beta_beta[r] += one.ratio * (one.of.beta_beta - map.beta_beta[r] + b * b);
      moments.gamma_beta[r] += one.ratio * (one.of.gamma_beta - map.gamma_beta[r] + g * b);
      moments.gamma_gamma[r] += one.ratio * (one.of.gamma_gamma - map.gamma_gamma[r] + g * g);
    }
  }
}

FK_VECTOR_CLONES void map_sums(double gamma, double beta, const MapTile& map, const MapMoments& moments, Tile& tile) {
#pragma omp simd
  for (int64_t r = 0; r < kRows; ++r) {
    const bool is_top = tile.target[r] == tile.index[r];
    const double z = is_top ? tile.next[r] : tile.of_target[r];
    const double y = (z - tile.next[r]) * beta;
    const auto of = map_curvature_class(y, bounded_exponential(y), z - tile.top[r], gamma, map.row(r));
    const double log_ratio = y + map.ratio_offset[r] - (gamma - 1) * of.log_complement - logarithm(of.v);
    const double keep = is_top ? 0 : 1;
    const double p = 1 / (1 + moments.ratio[r]);  // of the largest class
    const double b = moments.beta[r] * p, g = moments.gamma[r] * p;
    tile.sums[kSumValue][r] = log_one_plus(moments.ratio[r]) - keep * log_ratio;
    tile.sums[kSumBeta][r] = b - keep * (of.of.beta - map.beta[r]);
    tile.sums[kSumGamma][r] = g - keep * (of.of.gamma - map.gamma[r]);
    tile.sums[kSumBetaBeta][r] = moments.beta_beta[r] * p - b * b - keep * (of.of.beta_beta - map.beta_beta[r]);
    tile.sums[kSumGammaBeta][r] = moments.gamma_beta[r] * p - g * b - keep * (of.of.gamma_beta - map.gamma_beta[r]);
    tile.sums[kSumGammaGamma][r] = moments.gamma_gamma[r] * p - g * g - keep * (of.of.gamma_gamma - map.gamma_gamma[r]);
    tile.sums[kSumOfTarget][r] = tile.top[r] - tile.of_target[r];
  }
}

}  // namespace

template <typename Scalar>
void map_nll_sums(const MapNllRows<Scalar>& rows, const double* gamma, double beta, int64_t begin, int64_t end,
                  double* sums) {
  std::vector<double> memory(2 * rows.classes * kRows + 8);
  // A multiple of 64 bytes, so that no vector straddles a cache line.
  double* const x = memory.data() + (64 - reinterpret_cast<uintptr_t>(memory.data()) % 64) % 64 / sizeof(double);
  double* const e = x + rows.classes * kRows;
  const int64_t n_sums = gamma == nullptr ? kSumGamma : kMapNllSums;
  Tile tile = {};
  MapTile map = {};
  MapMoments moments = {};
  for (int64_t row = begin; row < end; row += kRows) {
    read_rows(rows, row, std::min(kRows, end - row), x, tile);
    find_top_two(x, rows.classes, tile);
    exponentials(x, e, rows.classes, beta, tile);
    if (gamma == nullptr) {
      softmax_sums(beta, tile);
    } else {
      rows_of_map(map_gamma<double>(*gamma), beta, tile, map);
      classes_of_map(x, e, rows.classes, *gamma, beta, tile, map, moments);
      map_sums(*gamma, beta, map, moments, tile);
    }
    for (int64_t i = 0; i < n_sums; ++i) {
      for (int64_t r = 0; r < kRows; ++r) {
        if (tile.share[r] != 0) sums[i] += tile.share[r] * tile.sums[i][r];
      }
    }
  }
}

template void map_nll_sums(const MapNllRows<float>&, const double*, double, int64_t, int64_t, double*);
template void map_nll_sums(const MapNllRows<double>&, const double*, double, int64_t, int64_t, double*);
template void map_nll_sums(const MapNllRows<Half>&, const double*, double, int64_t, int64_t, double*);
template void map_nll_sums(const MapNllRows<BFloat16>&, const double*, double, int64_t, int64_t, double*);

}  // namespace focalkern::cpu
