// The forward pass of the losses of labels that also gives the statistics of the rows: row_statistics reads the logits,
// and its sums go to the epilogue of the loss.

#include <algorithm>
#include <type_traits>

#include "cpu/row_loss/epilogue.h"
#include "cpu/row_loss/epilogue_focal.h"
#include "cpu/row_loss/read.h"
#include "cpu/row_loss/tile.h"
#include "kernels/row_loss_statistics.h"
#include "math/row_losses.h"

namespace focalkern::cpu {

template <typename Loss, typename Scalar>
RowLossSums row_loss_with_statistics(const RowLossForward<Scalar>& args,
                                     const RowStatisticsResult<compute_t<Scalar>>& statistics, int64_t row_begin,
                                     int64_t row_end) {
  using Real = compute_t<Scalar>;
  const Rows<Scalar> rows{args.rows, args.classes, args.logits, args.layout};
  Tile<Real> tile;
  const TargetSums<Real> sums_of_loss{tile.shift, tile.sum_exp_others, tile.target_logit};
  if (!args.gamma) std::fill_n(tile.gamma, kTileRows, args.gamma_value);
  if (!args.gamma || args.edges) {
    tile.ever_inverse = args.edges ? any_inverse(args.gamma, args.n_bins) : any_inverse(&args.gamma_value, 1);
  }
  RowLossSums sums{0, 0, -1};
  for (int64_t row = row_begin; row < row_end; row += kTileRows) {
    const int64_t n = std::min(kTileRows, row_end - row);
    sums.invalid_row = read_rows(args, row, n, true, tile);
    if (sums.invalid_row >= 0) return sums;
    row_statistics(rows, args.labels, args.ignore_index, statistics, row, row + n, &sums_of_loss);
    if constexpr (kIsFocal<Loss>) {
      finish_focal_loss(args, row, n, tile, &sums);
    } else if constexpr (kHasStatistics<Loss>) {
      finish_sums<Loss>(n, tile);
      if (args.edges) look_up_gamma_of_log(tile.log_p, n, args.edges, args.gamma, args.n_bins, tile.gamma);
      finish_loss<Loss>(n, args.epsilon, tile, args.saved + row, args.rows, &sums);
      if (args.row_loss) std::copy(tile.loss, tile.loss + n, args.row_loss + row);
    }
  }
  return sums;
}

#define FK_WITH_STATISTICS(Loss, Scalar)                       \
  template RowLossSums row_loss_with_statistics<Loss, Scalar>( \
      const RowLossForward<Scalar>&, const RowStatisticsResult<compute_t<Scalar>>&, int64_t, int64_t);
#define FK_ALL_TYPES(Loss)           \
  FK_WITH_STATISTICS(Loss, Half)     \
  FK_WITH_STATISTICS(Loss, BFloat16) \
  FK_WITH_STATISTICS(Loss, float)    \
  FK_WITH_STATISTICS(Loss, double)
#define FK_ROW_LOSS(number, Formula, name) FK_ALL_TYPES(Formula)
#include "math/row_losses.def"

}  // namespace focalkern::cpu
