// Sums over the classes other than the largest; one set of them serves many gammas of a calibration grid.
//
//   sum_k e_k / G(q_k)        is the only sum that a gamma needs (math/calibration_map.h)
//
// For a gamma between -1 and 1, 1 / G is a smooth function of q and s = -q log q on [0, 1/2], approximated by a linear
// combination of twelve products q^i s^j. The sums of these products over the classes serve all such gammas. For q
// below 1/200, seven products serve every gamma up to about 5. The host fits the coefficients (math/grid_plan.h).
#pragma once

#include "math/portable.h"

namespace focalkern {

// The terms that are summed over the classes, as functions of q in (0, kMaxQ] and s = -q log q. Both variables are
// scaled, to [0, 1] and [-1, 1]: unscaled powers would cancel in float. The first term is the weight itself.
struct WideBasis {
  static constexpr int kTerms = 12;
  static constexpr double kMaxQ = 0.5;
  template <typename Real>
  static FK_HOST_DEVICE void terms(Real weight, Real q, Real s, Real (&term)[kTerms]) {
    constexpr double kMaxS = 0.36787944117144233;  // s at q = 1 / e
    const Real x = s * Real(2 / kMaxS) - Real(1);
    const Real y = q * Real(1 / kMaxQ);
    const Real yy = y * y;
    term[0] = weight;
    term[1] = term[0] * x;
    term[2] = term[1] * x;
    term[3] = term[0] * y;
    term[4] = term[3] * x;
    term[5] = term[4] * x;
    term[6] = term[5] * x;
    term[7] = term[6] * x;
    term[8] = term[3] * yy;
    term[9] = term[8] * x;
    term[10] = term[9] * x;
    term[11] = term[10] * x;
  }
};
struct TailBasis {
  static constexpr int kTerms = 7;
  static constexpr double kMaxQ = 0.005;
  template <typename Real>
  static FK_HOST_DEVICE void terms(Real weight, Real q, Real s, Real (&term)[kTerms]) {
    constexpr double kMaxS = 0.026491586832740187;  // s at kMaxQ
    const Real x = s * Real(2 / kMaxS) - Real(1);
    const Real y = q * Real(1 / kMaxQ);
    term[0] = weight;
    term[1] = term[0] * x;
    term[2] = term[1] * x;
    term[3] = term[2] * x;
    term[4] = term[0] * y;
    term[5] = term[4] * x;
    term[6] = term[5] * x;
  }
};

}  // namespace focalkern
