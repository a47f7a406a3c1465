// A loss of rows and the statistics of the rows from one read of the logits, on the CPU.
#pragma once

#include "kernels/row_loss.h"
#include "kernels/row_sums.h"
#include "math/row_loss.h"

namespace focalkern {

// The losses that need no sum of squares and no second class.
template <typename Loss>
inline constexpr bool kHasStatistics = Loss::kSpecialClass == SpecialClass::kNone && !Loss::kSquares;

namespace cpu {

// As row_loss_forward, for labels without smoothing, contiguous rows, and losses with kHasStatistics.
template <typename Loss, typename Scalar>
RowLossSums row_loss_with_statistics(const RowLossForward<Scalar>& args,
                                     const RowStatisticsResult<compute_t<Scalar>>& statistics, int64_t row_begin,
                                     int64_t row_end);

}  // namespace cpu
}  // namespace focalkern
