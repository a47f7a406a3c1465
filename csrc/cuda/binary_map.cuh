// The binary calibration map: elementwise, one logit each (classes = 1).
#pragma once

#include "cuda/common.cuh"
#include "kernels/calibration_map.h"
#include "math/binary_map.h"

namespace focalkern::cuda {
namespace {

template <typename Scalar>
__device__ __forceinline__ bool binary_is_valid(const CalibrationMapArgs<Scalar>& args, int64_t i,
                                                compute_t<Scalar> logit) {
  return map_parameters_valid(args.gamma_of(i), args.temperature_of(i)) && logit < kInfinity<compute_t<Scalar>>;
}

template <typename Scalar>
__global__ __launch_bounds__(kBlock) void binary_calibration_map_forward_kernel(
    const __grid_constant__ CalibrationMapForward<Scalar> args) {
  using Real = compute_t<Scalar>;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * kBlock + threadIdx.x; i < args.rows;
       i += static_cast<int64_t>(gridDim.x) * kBlock) {
    const Real logit = load_as_compute(args.input[i]);
    const Real x = logit * inverse_temperature<Real>(args.temperature_of(i));
    const Real log_odds = binary_map(x, args.gamma_of(i)).log_odds;
    Real result = args.log_output ? log_odds : sigmoid(log_odds);
    if (!binary_is_valid(args, i, logit)) result = kNaN<Real>;
    if (args.output != nullptr) {
      args.output[i] = Store<Scalar>::from_compute(result);
    } else {
      args.output_wide[i] = result;
    }
  }
}

template <typename Scalar>
__global__ __launch_bounds__(kBlock) void binary_calibration_map_backward_kernel(
    const __grid_constant__ CalibrationMapBackward<Scalar> args) {
  using Real = compute_t<Scalar>;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * kBlock + threadIdx.x; i < args.rows;
       i += static_cast<int64_t>(gridDim.x) * kBlock) {
    const Real logit = load_as_compute(args.input[i]);
    const Real beta = inverse_temperature<Real>(args.temperature_of(i));
    const Real w = args.grad_output != nullptr ? load_as_compute(args.grad_output[i]) : args.grad_output_wide[i];
    const BinaryMapGrad<Real> grad = binary_map_grad(logit * beta, args.gamma_of(i), w, args.log_output);
    const bool valid = binary_is_valid(args, i, logit);
    if (args.grad_input != nullptr) {
      args.grad_input[i] = Store<Scalar>::from_compute(valid ? grad.x * beta : kNaN<Real>);
    }
    if (args.grad_gamma != nullptr) args.grad_gamma[i] = valid ? static_cast<double>(grad.gamma) : kNaN<double>;
    if (args.grad_temperature != nullptr) {
      args.grad_temperature[i] = valid ? -static_cast<double>(grad.beta) / args.temperature_of(i) : kNaN<double>;
    }
  }
}

}  // namespace
}  // namespace focalkern::cuda
