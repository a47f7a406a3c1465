// The z-loss of each row and the saved numbers of its sum with the row loss (math/z_loss.h): no pass over the classes.

#include <algorithm>
#include <type_traits>

#include "cpu/simd/dispatch.h"
#include "kernels/z_loss.h"

namespace focalkern::cpu {
namespace {

constexpr int64_t kTile = 64;

struct Tile {
  double target[kTile];       // the logit
  double coefficient[kTile];  // c, times the weight of the row unless the backward pass multiplies with it
  double factor[kTile];       // of lse^2 in the loss: 0 in ignored rows
  double loss[kTile];
};

template <typename Scalar>
void read_rows(const ZLossArgs<Scalar>& args, int64_t begin, int64_t n, Tile& tile) {
  for (int64_t r = 0; r < n; ++r) {
    tile.target[r] = 0;
    tile.coefficient[r] = tile.factor[r] = args.coefficient;
    if (!args.labels.data) continue;
    const int64_t label = args.labels[begin + r];
    const bool counts = label != args.ignore_index && label >= 0 && label < args.classes;
    if (!counts) {
      tile.coefficient[r] = tile.factor[r] = 0;
      continue;
    }
    if (args.class_weight) tile.factor[r] *= static_cast<double>(args.class_weight[label]);
    if (args.logits) {
      const int64_t at = args.layout.row_offset(begin + r) + label * args.layout.class_stride;
      tile.target[r] = static_cast<double>(load_as_compute(args.logits[at]));
    } else {
      tile.coefficient[r] = tile.factor[r];
    }
  }
}

// The saved numbers of ignored rows are 0: the third is kept at 0, because the second may be replaced.
template <bool kLabels, typename Real>
FK_HOST_DEVICE void finish_rows(const Real* saved, int64_t rows, int64_t n, Tile& tile, Real* edited) {
  constexpr double kLeast = std::is_same_v<Real, float> ? 1e-30 : 1e-300;
#pragma GCC ivdep
  for (int64_t r = 0; r < n; ++r) {
    const double first = saved[r], second = saved[rows + r], third = saved[2 * rows + r];
    ZLossRow row;
    if constexpr (kLabels) {
      row = z_loss_of_label(first, second, third, tile.target[r], tile.coefficient[r], kLeast);
    } else {
      row = z_loss_of_soft(first, second, third, tile.coefficient[r]);
    }
    const bool is_zero = tile.factor[r] == 0;
    tile.loss[r] = is_zero ? 0 : tile.factor[r] * row.loss;
    edited[r] = saved[r];
    edited[rows + r] = is_zero ? saved[rows + r] : static_cast<Real>(row.second);
    edited[2 * rows + r] = is_zero ? saved[2 * rows + r] : static_cast<Real>(row.third);
  }
}

template <typename Real>
FK_VECTOR_CLONES void finish_labels(const Real* saved, int64_t rows, int64_t n, Tile& tile, Real* edited) {
  finish_rows<true>(saved, rows, n, tile, edited);
}
template <typename Real>
FK_VECTOR_CLONES void finish_soft(const Real* saved, int64_t rows, int64_t n, Tile& tile, Real* edited) {
  finish_rows<false>(saved, rows, n, tile, edited);
}

}  // namespace

template <typename Scalar>
double z_loss(const ZLossArgs<Scalar>& args, int64_t row_begin, int64_t row_end) {
  using Real = compute_t<Scalar>;
  Tile tile{};
  double sum = 0;
  for (int64_t begin = row_begin; begin < row_end; begin += kTile) {
    const int64_t n = std::min(kTile, row_end - begin);
    read_rows(args, begin, n, tile);
    const Real* saved = args.saved + begin;
    Real* edited = args.edited + begin;
    args.logits ? finish_labels(saved, args.rows, n, tile, edited) : finish_soft(saved, args.rows, n, tile, edited);
    for (int64_t r = 0; r < n; ++r) {
      sum += tile.loss[r];
      if (args.row_loss) args.row_loss[begin + r] = static_cast<Real>(args.row_loss[begin + r] + tile.loss[r]);
    }
  }
  return sum;
}

template double z_loss(const ZLossArgs<float>&, int64_t, int64_t);
template double z_loss(const ZLossArgs<double>&, int64_t, int64_t);
template double z_loss(const ZLossArgs<Half>&, int64_t, int64_t);
template double z_loss(const ZLossArgs<BFloat16>&, int64_t, int64_t);

}  // namespace focalkern::cpu
