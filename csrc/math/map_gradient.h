// The gradient of the calibration map: its sums over the classes of a row, and the gradients computed from them.
#pragma once

#include "math/calibration_map.h"

namespace focalkern {

// The vector-Jacobian product of a row, from w_j = dL/dlog p_j. With h_j = da_j/dlog q_j, c_j = da_j/dgamma, sums over
// k != t and x = z / T:
//   s_j = w_j - p_j sum_i w_i, which for the largest class is s_t = w_t sum p_k - p_t sum w_k
//   B = sum h_k s_k,   D = u_t h_t s_t + u_t B
//   dL/dx_k = h_k s_k - (q_k / u_t) D,   dL/dx_t = u_t h_t s_t - q_t B
//   dL/dgamma = sum c_k s_k + c_t s_t,   dL/dT = -(1/T) sum dL/dx_k (x_k - x_t)
// No division by u_t occurs. If the output is probabilities, w_j = p_j g_j; with v_k = g_k - g_t and V = sum p_k v_k,
// this gives s_k = p_k (v_k - V) and s_t = -p_t V.
//
// One pass over the classes gives the sums, before p is normalised: with r_k = exp(log_ratio) = p_k / p_t and m_k = w_k
// (log output) or r_k v_k, every s_k is  keep * m_k - spread * r_k.
template <typename Real>
struct MapGradSums {
  Real r;   // sum r_k
  Real m;   // sum m_k
  Real hr;  // sum h_k r_k
  Real hm;
  Real cr;  // sum c_k r_k
  Real cm;
};

template <typename Real>
struct MapRowGrad {
  Real keep;
  Real spread;
  Real top;     // dL/dx_t
  Real shared;  // D / S: dL/dx_k = keep h_k m_k - spread h_k r_k - e_k shared
  Real gamma;   // dL/dgamma
};

// `grad_top` = dL/dlog p_t, used only if the output is log p.
template <typename Real>
FK_HOST_DEVICE MapRowGrad<Real> map_row_grad(const MapRow<Real>& row, const MapGradSums<Real>& sums, Real grad_top,
                                             bool log_output) {
  const Real p_top = quick_quotient(Real(1), Real(1) + sums.r);
  MapRowGrad<Real> grad;
  grad.keep = log_output ? Real(1) : p_top;
  grad.spread = log_output ? (sums.m + grad_top) * p_top : sums.m * p_top * p_top;
  const Real s_top = log_output ? (grad_top * sums.r - sums.m) * p_top : -sums.m * p_top * p_top;
  const Real sum_hs = grad.keep * sums.hm - grad.spread * sums.hr;
  const Real own = row.scaled_slope_top * s_top;
  grad.top = own - row.q_top * sum_hs;
  grad.shared = (own + row.u_top * sum_hs) * row.inverse_rest;
  grad.gamma =
      row.grad_gamma_top * s_top + (grad.keep * sums.cm - grad.spread * sums.cr) * (Real(1) / quick_unit<Real>());
  return grad;
}

}  // namespace focalkern
