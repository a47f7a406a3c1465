// The z-loss c lse^2 of a row, beside a row loss on the CPU. Its gradient k p_j, k = 2 c lse, joins the coefficient of
// the row loss in the numbers that a row saves for its backward pass (cpu/row_loss):
//
//   labels                      m, c_f / S, -rest     S = rest + e^(z_y - m); dL/dz_y is the product of the last two
//   smoothing, probabilities    m, rest, others       m is the largest logit; dL/dz_j is p_j others plus a number that
//                                                     does not depend on others
//
// with rest the sum of e^(z_j - m) over the classes other than the target, or other than the largest.
#pragma once

#include "math/portable.h"

namespace focalkern {

struct ZLossRow {
  double loss;    // lse^2, without c
  double second;  // the saved numbers of the sum of both losses
  double third;
};

// `least`: smaller coefficients count as this. Where the two terms cancel, the third number would be infinite.
FK_HOST_DEVICE ZLossRow z_loss_of_label(double m, double coefficient, double minus_rest, double z_y, double c,
                                        double least) {
  const double of_label = exponential(z_y - m);
  const double log_sum = log_one_plus((of_label - 1) - minus_rest);
  const double lse = m + log_sum, k_over_s = 2 * c * lse / (of_label - minus_rest);
  const double sum = coefficient + k_over_s;
  const double total = sum < least && sum > -least ? least : sum;
  return {lse * lse, total, (coefficient * minus_rest + k_over_s * of_label) / total};
}

FK_HOST_DEVICE ZLossRow z_loss_of_soft(double m, double rest, double others, double c) {
  const double lse = m + log_one_plus(rest);
  return {lse * lse, rest, others + 2 * c * lse};
}

}  // namespace focalkern
