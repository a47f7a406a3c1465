// Sums over the classes of each row, and the statistics that they give: math/row_sums.h.
#pragma once

#include "kernels/layout.h"
#include "math/row_sums.h"

namespace focalkern {

template <typename Scalar>
struct Rows {
  int64_t count;
  int64_t classes;       // at least 1
  const Scalar* logits;  // [count, classes], contiguous
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

namespace cpu {

template <typename Scalar>
void row_sums(const Rows<Scalar>& rows, const RowSumsResult& result, int64_t row_begin, int64_t row_end);

// Labels that are neither ignored nor a class give NaN.
template <typename Scalar>
void row_statistics(const Rows<Scalar>& rows, const Labels& labels, int64_t ignore_index,
                    const RowStatisticsResult<compute_t<Scalar>>& result, int64_t row_begin, int64_t row_end);

}  // namespace cpu
}  // namespace focalkern
