// The binary map: elementwise, one logit each (classes = 1).
#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>

#include "cpu/simd/dispatch.h"
#include "kernels/calibration_map.h"
#include "math/binary_map.h"

namespace focalkern::cpu {
namespace {

constexpr int64_t kBinaryBlock = 64;

// A block of elements with their parameters in arrays: the loop then has neither branches nor gathers.
template <typename Real>
struct BinaryBlock {
  alignas(64) double gamma[kBinaryBlock];
  alignas(64) Real beta[kBinaryBlock];
  alignas(64) Real x[kBinaryBlock];  // s / T
  alignas(64) Real w[kBinaryBlock];  // upstream gradient, then gradient of the log-odds
  alignas(64) Real result[kBinaryBlock];
  alignas(64) Real grad_gamma[kBinaryBlock];
  alignas(64) Real grad_beta[kBinaryBlock];
  bool valid[kBinaryBlock];
};

// Reads a block of n elements. Returns the first invalid one, or -1.
template <typename Scalar>
FK_HOST_DEVICE int64_t read_block(const CalibrationMapArgs<Scalar>& args, int64_t begin, int64_t n,
                                  BinaryBlock<compute_t<Scalar>>& block) {
  using Real = compute_t<Scalar>;
  constexpr Real kInfinity = std::numeric_limits<Real>::infinity();
  int64_t invalid = -1;
  for (int64_t i = 0; i < kBinaryBlock; ++i) {
    const bool present = i < n;
    const double gamma = present ? args.gamma_of(begin + i) : 0.0;
    const double temperature = present ? args.temperature_of(begin + i) : 1.0;
    const Real logit = present ? load_as_compute(args.input[begin + i]) : Real(0);
    block.gamma[i] = gamma;
    block.beta[i] = inverse_temperature<Real>(temperature);
    block.x[i] = logit * block.beta[i];
    block.valid[i] = map_parameters_valid(gamma, temperature) && logit < kInfinity;
    if (!block.valid[i] && invalid < 0) invalid = begin + i;
  }
  return invalid;
}

template <typename Scalar>
FK_VECTOR_CLONES int64_t binary_forward_block(const CalibrationMapForward<Scalar>& args, int64_t begin, int64_t n) {
  using Real = compute_t<Scalar>;
  constexpr Real kNan = std::numeric_limits<Real>::quiet_NaN();
  BinaryBlock<Real> block;
  const int64_t invalid = read_block(args, begin, n, block);
  const bool log_odds_output = args.log_output;
#pragma omp simd
  for (int64_t i = 0; i < kBinaryBlock; ++i) {
    const Real log_odds = binary_map(block.x[i], block.gamma[i]).log_odds;
    block.result[i] = log_odds_output ? log_odds : sigmoid(log_odds);
  }
  for (int64_t i = 0; i < n; ++i) {
    const Real result = block.valid[i] ? block.result[i] : kNan;
    if (args.output) {
      args.output[begin + i] = Store<Scalar>::from_compute(result);
    } else {
      args.output_wide[begin + i] = result;
    }
  }
  return invalid;
}

template <typename Scalar>
FK_VECTOR_CLONES void binary_backward_block(const CalibrationMapBackward<Scalar>& args, int64_t begin, int64_t n) {
  using Real = compute_t<Scalar>;
  constexpr Real kNan = std::numeric_limits<Real>::quiet_NaN();
  BinaryBlock<Real> block;
  read_block(args, begin, n, block);
  for (int64_t i = 0; i < n; ++i) {
    block.w[i] = args.grad_output ? load_as_compute(args.grad_output[begin + i]) : args.grad_output_wide[begin + i];
  }
  for (int64_t i = n; i < kBinaryBlock; ++i) block.w[i] = 0;
  const bool log_odds_output = args.log_output;
#pragma omp simd
  for (int64_t i = 0; i < kBinaryBlock; ++i) {
    const BinaryMapGrad<Real> grad = binary_map_grad(block.x[i], block.gamma[i], block.w[i], log_odds_output);
    block.result[i] = grad.x * block.beta[i];
    block.grad_gamma[i] = grad.gamma;
    block.grad_beta[i] = grad.beta;
  }
  for (int64_t i = 0; i < n; ++i) {
    const int64_t index = begin + i;
    const bool valid = block.valid[i];
    if (args.grad_input) args.grad_input[index] = Store<Scalar>::from_compute(valid ? block.result[i] : kNan);
    if (args.grad_gamma) args.grad_gamma[index] = valid ? block.grad_gamma[i] : kNan;
    if (args.grad_temperature) {
      args.grad_temperature[index] = valid ? -block.grad_beta[i] / args.temperature_of(index) : kNan;
    }
  }
}

// Returns the first invalid element, or -1.
template <typename Scalar>
int64_t binary_forward(const CalibrationMapForward<Scalar>& args, int64_t begin, int64_t end) {
  int64_t invalid = -1;
  for (int64_t i = begin; i < end; i += kBinaryBlock) {
    const int64_t found = binary_forward_block(args, i, std::min(kBinaryBlock, end - i));
    if (invalid < 0) invalid = found;
  }
  return invalid;
}

template <typename Scalar>
void binary_backward(const CalibrationMapBackward<Scalar>& args, int64_t begin, int64_t end) {
  for (int64_t i = begin; i < end; i += kBinaryBlock) {
    binary_backward_block(args, i, std::min(kBinaryBlock, end - i));
  }
}

}  // namespace
}  // namespace focalkern::cpu
