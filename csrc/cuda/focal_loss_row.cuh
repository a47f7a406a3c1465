// Per-row epilogue of the focal loss, shared by all kernels: the loss from the target's logit and the sum over the
// other classes, and the gradient from the three saved numbers.
#pragma once

#include "cuda/common.cuh"
#include "cuda/row_loss.cuh"
#include "kernels/row_loss.h"
#include "math/focal.h"

namespace focalkern::cuda {
namespace {

// Blocks per multiprocessor. Without this bound the compiler may spill registers to fit more blocks.
template <typename Scalar>
constexpr int kBlocksAtOnce = sizeof(Scalar) == sizeof(double) ? 2 : 4;
// A tile kernel for 16 bits needs more registers: a lane holds up to 26 values of a short row.
template <typename Scalar>
constexpr int kTileBlocks = sizeof(Scalar) == sizeof(uint16_t) ? 3 : kBlocksAtOnce<Scalar>;

// n / classes for positions n in a tile, by multiplication; exact for n up to 2^31 / classes^2.
struct ClassDivider {
  uint32_t reciprocal;

  explicit ClassDivider(int64_t classes)
      : reciprocal(classes > 0 ? static_cast<uint32_t>(divide_up(int64_t{1} << 31, classes)) : 0) {}

  __device__ __forceinline__ int operator()(int n) const {
    return static_cast<int>(static_cast<uint64_t>(n) * reciprocal >> 31);
  }
};

// The plan of a launch, and the offsets of its rows.
struct Geometry {
  RowPlan plan;
  ClassDivider classes;
  RowOffset logits;
  RowOffset grad_logits;
};

template <typename Real>
struct TargetLogs {
  Real max;    // of the whole row
  Real log_s;  // log sum exp(z - max)
  Real log_p;
  Real log_u;
};

// x / y for a normal y, and log x with an absolute error of 2^-22 plus a relative one of 2^-22: accurate enough for a
// term beside another logarithm.
__device__ __forceinline__ double quotient(double x, double y) { return x / y; }
__device__ __forceinline__ double absolute_logarithm(double x) { return logarithm(x); }
__device__ __forceinline__ float quotient(float x, float y) {
#if defined(__CUDA_ARCH__)
  float result;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(y));
  return x * result;
#else
  return x / y;
#endif
}
__device__ __forceinline__ float absolute_logarithm(float x) {
#if defined(__CUDA_ARCH__)
  float result;
  asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
  return result * 0.693147181f;
#else
  return logarithm(x);
#endif
}

// log(1 + t) for t in [0, 1], to 2 units in the last place.
__device__ __forceinline__ double log_one_plus_ratio(double t) { return log_one_plus(t); }
__device__ __forceinline__ float log_one_plus_ratio(float t) {
  float q = -0.00325637846f;
  q = q * t + 0.0199071616f;
  q = q * t - 0.0570642017f;
  q = q * t + 0.106142648f;
  q = q * t - 0.153118625f;
  q = q * t + 0.196781173f;
  q = q * t - 0.249545589f;
  q = q * t + 0.333300054f;
  q = q * t - 0.499999046f;
  return t + t * (t * q);
}

// The logarithms of a row, from the target's logit and the sum over all other classes. `mine` : `others` is the ratio
// of their probabilities; the logarithm of the larger one is -log(1 + ratio), which does not cancel.
template <typename Real>
__device__ __forceinline__ TargetLogs<Real> target_logs(Real z, const ExpSum<Real>& rest) {
  const bool is_top = z >= rest.max;
  const Real max = fmax(rest.max, z);
  const Real e = exponential(is_top ? rest.max - max : z - max);
  const Real mine = is_top ? Real(1) + (z - max) : e;  // 1, or NaN at infinity
  const Real others = is_top ? rest.sum * e : rest.sum;
  const bool is_likely = mine > others;
  const Real ratio = is_likely ? others : quotient(mine, others);
  const Real log_larger = log_one_plus_ratio(ratio);
  // If the target is far above the other classes, their scaled sum may underflow; the logarithm of the unscaled sum
  // does not.
  const Real log_others = absolute_logarithm(is_likely ? rest.sum : others);
  const Real log_s = is_likely ? log_larger : log_others + log_larger;
  const Real log_p = (z - max) - log_s;
  const Real log_u = is_likely ? (rest.max - max) + log_others - log_larger : -log_larger;
  return {max, log_s, log_p, log_u};
}

// The inverse loss is rare and needs another exponential, a logarithm and a division, so it has its own branch.
template <typename Real>
__device__ __forceinline__ FocalTerms<Real> terms_of_row(Real log_p, Real log_u, Real gamma) {
  if (gamma < Real(0)) return focal_terms(log_p, log_u, gamma);
  return focal_terms<false>(log_p, log_u, gamma);
}

// Loss and saved numbers of a row, computed by the thread that has the target's logit and the sum over the other
// classes.
template <typename Real>
struct RowLoss {
  TargetLogs<Real> logs;
  Real loss;
  Real weight;  // 0 for an ignored row
};

template <typename Scalar>
__device__ __forceinline__ RowLoss<compute_t<Scalar>> loss_of_row(const RowLossForward<Scalar>& args, int64_t row,
                                                                  int label, compute_t<Scalar> z_target,
                                                                  const ExpSum<compute_t<Scalar>>& rest) {
  using Real = compute_t<Scalar>;
  if (label < 0) return {{0, 0, 0, 0}, label == kIgnored ? Real(0) : kNaN<Real>, 0};
  const TargetLogs<Real> logs = target_logs(z_target, rest);
  const Real gamma = gamma_at_log(args, row, logs.log_p);
  Real loss = focal_loss_alone(logs.log_p, logs.log_u, gamma), weight = Real(1);
  if (args.class_weight != nullptr) {
    weight = args.class_weight[label];
    loss = weighted_loss(weight, loss);
  }
  return {logs, loss, weight};
}

template <typename Scalar>
__device__ __forceinline__ void finish_row(const RowLossForward<Scalar>& args, int64_t row, int label,
                                           compute_t<Scalar> z_target, const ExpSum<compute_t<Scalar>>& rest,
                                           double& loss_sum, double& weight_sum) {
  const auto [logs, loss, weight] = loss_of_row(args, row, label, z_target, rest);
  args.saved[row] = logs.max;
  args.saved[args.rows + row] = logs.log_s;
  args.saved[2 * args.rows + row] = logs.log_u;
  if (args.row_loss != nullptr) args.row_loss[row] = loss;
  loss_sum += static_cast<double>(loss);
  weight_sum += static_cast<double>(weight);
}

// dL/dz_j = scale * exp(z_j - max), and `at_target` for the target. The same thread, or another one after a barrier,
// overwrites the target's value: selecting would cost a branch per element.
template <typename Real>
struct RowGradient {
  Real max;
  Real scale;  // 0 if the row does not count
  Real at_target;
  int target;  // the label, or kIgnored, kOutOfRange
};

// The numbers of a row that the forward pass saved.
template <typename Real>
struct SavedRow {
  Real max;
  Real log_s;
  Real log_u;
};

// z: the target's logit.
template <typename Scalar>
__device__ __forceinline__ RowGradient<compute_t<Scalar>> row_gradient(const RowLossBackward<Scalar>& args, int64_t row,
                                                                       int label, compute_t<Scalar> z,
                                                                       const SavedRow<compute_t<Scalar>>& saved,
                                                                       compute_t<Scalar> grad_loss,
                                                                       bool has_grad_gamma = true) {
  using Real = compute_t<Scalar>;
  RowGradient<Real> result = {0, 0, 0, label};
  Real grad_gamma = 0;
  const Real weight = label >= 0 && args.class_weight != nullptr ? args.class_weight[label] : Real(1);
  const Real row_scale = weight * grad_loss;
  // A row that does not count has a zero gradient, even where its logits are infinite or NaN.
  if (label >= 0 && row_scale != Real(0)) {
    const auto [max, log_s, log_u] = saved;
    const Real log_p = (z - max) - log_s;
    const Real gamma = gamma_at_log(args, row, log_p);
    const FocalTerms<Real> terms = terms_of_row(log_p, log_u, gamma);
    const Real coefficient = row_scale * (args.detach_modulation ? terms.factor : terms.coefficient);
    result.max = max;
    result.scale = coefficient * exponential(-log_s);
    // p - 1 = -u, accurate where 1 - p cancels.
    result.at_target = -coefficient * exponential(log_u);
    const Real of_lse = row_scale * lse_slope(args, row);
    if (of_lse != Real(0)) {
      result.scale += of_lse * exponential(-log_s);
      result.at_target += of_lse * exponential(log_p);
    }
    grad_gamma = row_scale * terms.grad_gamma;
  } else if (label == kOutOfRange) {
    result.scale = kNaN<Real>;
    grad_gamma = kNaN<Real>;
  }
  if (has_grad_gamma && args.grad_gamma != nullptr) args.grad_gamma[row] = grad_gamma;
  return result;
}

template <typename Scalar>
__device__ __forceinline__ RowGradient<compute_t<Scalar>> row_gradient(const RowLossBackward<Scalar>& args, int64_t row,
                                                                       int64_t offset, bool has_grad_gamma = true) {
  using Real = compute_t<Scalar>;
  const int label = as_class(args, args.labels[row]);
  SavedRow<Real> saved = {0, 0, 0};
  Real z = 0;
  Real grad_loss = 0;
  if (label >= 0) {
    saved = {args.saved[row], args.saved[args.rows + row], args.saved[2 * args.rows + row]};
    z = load_as_compute(args.logits[offset + label * args.layout.class_stride]);
    grad_loss = upstream(args, row);
  }
  return row_gradient(args, row, label, z, saved, grad_loss, has_grad_gamma);
}

// The gradient of an element other than the target. No logit of a counted row exceeds the maximum, and a NaN reaches
// the whole row through the saved numbers; the minimum serves ignored rows, which may hold infinity and NaN. For a
// gradient stored in 16 bits, `summand` is accurate enough.
template <typename Scalar>
__device__ __forceinline__ Scalar gradient_at(const RowGradient<compute_t<Scalar>>& row, compute_t<Scalar> z) {
  using Real = compute_t<Scalar>;
  const Real below_max = fmin(z - row.max, Real(0));
  const Real e = sizeof(Scalar) < sizeof(Real) ? summand(below_max) : exponential(below_max);
  return Store<Scalar>::from_compute(row.scale * e);
}

// Two neighbouring elements as one word.
template <typename Scalar>
using PairWord = std::conditional_t<sizeof(Scalar) == sizeof(uint16_t), uint32_t, uint64_t>;

template <typename Scalar>
struct Pair {
  Scalar at[2];
};

// Loads two elements as one word; two minus infinities if the pair does not exist.
template <typename Scalar>
__device__ __forceinline__ Pair<compute_t<Scalar>> load_pair(const void* address, bool exists = true) {
  const Scalar nothing = Store<Scalar>::from_compute(-kInfinity<compute_t<Scalar>>);
  auto word = bit_cast<PairWord<Scalar>>(Pair<Scalar>{nothing, nothing});
  if (exists) word = *static_cast<const PairWord<Scalar>*>(address);
  if constexpr (std::is_same_v<Scalar, BFloat16>) {
    return {bit_cast<float>(word << 16), bit_cast<float>(word & 0xffff0000u)};
  } else {
    const auto pair = bit_cast<Pair<Scalar>>(word);
    return {load_as_compute(pair.at[0]), load_as_compute(pair.at[1])};
  }
}

template <typename Scalar>
__device__ __forceinline__ void store_pair(void* address, compute_t<Scalar> first, compute_t<Scalar> second) {
  const Pair<Scalar> pair = {Store<Scalar>::from_compute(first), Store<Scalar>::from_compute(second)};
  *static_cast<PairWord<Scalar>*>(address) = bit_cast<PairWord<Scalar>>(pair);
}

}  // namespace
}  // namespace focalkern::cuda
