// The NLL of the focal calibration map with its derivatives in gamma and 1/T, summed over rows: math/map_curvature.h.
#pragma once

#include "kernels/layout.h"

namespace focalkern {

// Index of each sum; the sums in gamma exist only with gamma.
enum MapNllSum : int64_t {
  kSumValue,
  kSumBeta,
  kSumBetaBeta,
  kSumOfTarget,  // of z_t - z_y, with z_t the largest logit: the slope as 1/T grows
  kSumGamma,
  kSumGammaBeta,
  kSumGammaGamma,
  kMapNllSums
};

// The rows of one network.
template <typename Scalar>
struct MapNllRows {
  const Scalar* input;    // [rows, classes], contiguous
  const int64_t* target;  // [rows], in [0, classes)
  const double* share;    // [rows], the factor of each row
  int64_t classes;
  bool is_probs;
};

namespace cpu {

// Adds rows [begin, end) at beta to sums [kMapNllSums]; with the terms in gamma unless gamma is null.
template <typename Scalar>
void map_nll_sums(const MapNllRows<Scalar>& rows, const double* gamma, double beta, int64_t begin, int64_t end,
                  double* sums);

}  // namespace cpu
}  // namespace focalkern
