// A loss of rows and the statistics of the rows from one read of the logits.
#pragma once

#include "kernels/row_loss.h"
#include "kernels/row_sums.h"
#include "math/row_loss.h"

namespace focalkern {

// The losses that need no sum of squares and no second class.
template <typename Loss>
inline constexpr bool kHasStatistics = Loss::kSpecialClass == SpecialClass::kNone && !Loss::kSquares;

namespace cpu {

// As row_loss_forward, for labels without smoothing and losses with kHasStatistics.
template <typename Loss, typename Scalar>
RowLossSums row_loss_with_statistics(const RowLossForward<Scalar>& args,
                                     const RowStatisticsResult<compute_t<Scalar>>& statistics, int64_t row_begin,
                                     int64_t row_end);

}  // namespace cpu

namespace cuda {

// As row_loss_forward, for labels. Losses without kHasStatistics take another read of the logits if the labels have no
// smoothing. With smoothing the statistics take none: the focal loss for the numbers gamma = 0, 1 and 2 reads the
// logits once, every other loss twice, as without statistics.
template <typename Loss, typename Scalar>
int row_loss_with_statistics(const RowLossForward<Scalar>& args,
                             const RowStatisticsResult<compute_t<Scalar>>& statistics, bool mean,
                             compute_t<Scalar>* loss, compute_t<Scalar>* divisor, void* workspace, void* stream);

// The statistics alone, of the rows and labels of `args`. `saved`, if not null, gets the numbers that a loss with label
// smoothing saves (cuda/row_loss_soft.cu).
template <typename Scalar>
int row_statistics(const RowLossArgs<Scalar>& args, const RowStatisticsResult<compute_t<Scalar>>& statistics,
                   void* stream);

}  // namespace cuda
}  // namespace focalkern
