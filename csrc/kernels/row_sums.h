// Sums over the classes of each row, and the statistics that they give: math/row_sums.h.
#pragma once

#include "kernels/layout.h"
#include "math/row_sums.h"

namespace focalkern {

template <typename Scalar>
struct Rows {
  int64_t count;
  int64_t classes;       // at least 1
  const Scalar* logits;  // [count, classes] in `layout`
  RowLayout layout;
};

// All [rows].
struct RowSumsResult {
  double* largest;  // NaN in rows with NaN
  double* rest;
  double* fall;
  int64_t* index;  // 0 in rows with NaN
};

// All [rows]; the statistics of ignored rows are 0, false or -1.
template <typename Real>
struct RowStatisticsResult {
  Real* log_p;
  Real* entropy;
  Real* lse;
  int64_t* predicted;  // -1 in rows with NaN
  bool* correct;
  bool* counts;
};

// The sums that a loss of labels needs, all [rows]; 0 for ignored rows.
template <typename Real>
struct TargetSums {
  Real* largest;
  Real* others;  // sum of e^(z_j - largest) over the classes other than the target
  Real* target;  // its logit
};

namespace cpu {

template <typename Scalar>
void row_sums(const Rows<Scalar>& rows, const RowSumsResult& result, int64_t row_begin, int64_t row_end);

// Labels that are neither ignored nor a class give NaN. The sums for a loss (or null) start at row_begin.
template <typename Scalar>
void row_statistics(const Rows<Scalar>& rows, const Labels& labels, int64_t ignore_index,
                    const RowStatisticsResult<compute_t<Scalar>>& result, int64_t row_begin, int64_t row_end,
                    const TargetSums<compute_t<Scalar>>* sums_of_loss = nullptr);

}  // namespace cpu
}  // namespace focalkern
