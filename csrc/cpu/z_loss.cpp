// The z-loss of each row and the saved numbers of its sum with the row loss (math/z_loss.h). No pass over the classes.

#include <algorithm>
#include <type_traits>

#include "cpu/simd/dispatch.h"
#include "kernels/z_loss.h"

namespace focalkern::cpu {
namespace {

constexpr int64_t kTile = 64;

// c, times the weight of a row whose class weight is not part of the saved numbers; and what to multiply lse^2 with.
struct Tile {
  double coefficient[kTile];
  double factor[kTile];
  double counts[kTile];
};

template <typename Real>
void read_rows(const ZLossArgs<Real>& args, int64_t begin, int64_t n, Tile& tile) {
  for (int64_t r = 0; r < n; ++r) {
    double weight = 1;
    tile.counts[r] = 1;
    if (args.labels.data) {
      const int64_t label = args.labels[begin + r];
      tile.counts[r] = label == args.ignore_index ? 0 : 1;
      if (args.class_weight && label >= 0 && label < args.classes) weight = args.class_weight[label];
    }
    // The backward pass of labels multiplies the saved coefficient by the weight.
    tile.coefficient[r] = args.coefficient * (args.target_logit ? 1 : weight);
    tile.factor[r] = args.coefficient * weight;
  }
}

template <bool kLabels, typename Real>
FK_HOST_DEVICE void finish_rows(const ZLossArgs<Real>& args, int64_t begin, int64_t n, const Tile& tile) {
  constexpr double kLeast = std::is_same_v<Real, float> ? 1e-30 : 1e-300;
  const Real *first = args.saved + begin, *second = first + args.rows, *third = second + args.rows;
  Real *first_of_sum = args.edited + begin, *second_of_sum = first_of_sum + args.rows,
       *third_of_sum = second_of_sum + args.rows;
  double* loss = args.loss + begin;
  const double* target = args.target_logit + (kLabels ? begin : 0);
#pragma GCC ivdep
  for (int64_t r = 0; r < n; ++r) {
    const double m = first[r], b = second[r], c = third[r];
    ZLossRow row;
    if constexpr (kLabels) {
      row = z_loss_of_label(m, b, c, target[r], tile.coefficient[r], kLeast);
    } else {
      row = z_loss_of_soft(m, b, c, tile.coefficient[r]);
    }
    const bool counts = tile.counts[r] != 0;
    loss[r] = counts ? tile.factor[r] * row.loss : 0;
    first_of_sum[r] = first[r];
    second_of_sum[r] = counts ? static_cast<Real>(row.second) : Real(0);
    third_of_sum[r] = counts ? static_cast<Real>(row.third) : Real(0);
  }
}

template <typename Real>
FK_VECTOR_CLONES void finish_labels(const ZLossArgs<Real>& args, int64_t begin, int64_t n, const Tile& tile) {
  finish_rows<true>(args, begin, n, tile);
}
template <typename Real>
FK_VECTOR_CLONES void finish_soft(const ZLossArgs<Real>& args, int64_t begin, int64_t n, const Tile& tile) {
  finish_rows<false>(args, begin, n, tile);
}

}  // namespace

template <typename Real>
void z_loss(const ZLossArgs<Real>& args, int64_t row_begin, int64_t row_end) {
  Tile tile{};
  for (int64_t begin = row_begin; begin < row_end; begin += kTile) {
    const int64_t n = std::min(kTile, row_end - begin);
    read_rows(args, begin, n, tile);
    args.target_logit ? finish_labels(args, begin, n, tile) : finish_soft(args, begin, n, tile);
  }
}

template void z_loss(const ZLossArgs<float>&, int64_t, int64_t);
template void z_loss(const ZLossArgs<double>&, int64_t, int64_t);

}  // namespace focalkern::cpu
