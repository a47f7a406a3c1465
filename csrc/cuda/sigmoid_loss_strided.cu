// Losses of one logit, forward and backward.
//
// A thread takes four adjacent elements at a time (two of double), in the memory order of the results. It reads the
// logits and a dense target of their type as one vector. For other operands (a broadcast alpha, labels, logits with
// strides) it computes the offset from the position, with one division per dim. Each direction reads the logits once;
// the forward pass saves nothing. The last block to finish adds up the sums of all blocks.
//
// These kernels handle every case; they use the soft formulas for hard targets, too. sigmoid_loss_vectorized.cu has
// faster kernels for the common cases.

#include "cuda/common.cuh"
#include "cuda/grid_sum.cuh"
#include "cuda/sigmoid_loss.h"
#include "kernels/sigmoid_loss.h"
#include "math/scored_loss.h"
#include "math/sigmoid_loss.h"

namespace focalkern::cuda {
namespace {

// Without this bound the compiler keeps so many values of four elements in registers that only one block fits a
// multiprocessor.
template <typename Scalar>
constexpr int kBlocksAtOnce = 2;

template <typename Scalar>
constexpr int kStep = sizeof(Scalar) == sizeof(double) ? 2 : 4;

template <typename Scalar>
struct Pack {
  Scalar at[kStep<Scalar>];
};

template <typename Scalar>
__device__ __forceinline__ Pack<Scalar> load_pack(const Scalar* address) {
  if constexpr (sizeof(Pack<Scalar>) == sizeof(uint4)) {
    return bit_cast<Pack<Scalar>>(*reinterpret_cast<const uint4*>(address));
  } else {
    return bit_cast<Pack<Scalar>>(*reinterpret_cast<const unsigned long long*>(address));
  }
}

template <typename Scalar>
__device__ __forceinline__ void store_pack(Scalar* address, const Pack<Scalar>& pack) {
  if constexpr (sizeof(Pack<Scalar>) == sizeof(uint4)) {
    __stcg(reinterpret_cast<uint4*>(address), bit_cast<uint4>(pack));
  } else {
    __stcg(reinterpret_cast<unsigned long long*>(address), bit_cast<unsigned long long>(pack));
  }
}

// ---- one element ---------------------------------------------------------------------------------------------------

// A small constant power needs no exponential.
template <typename Real>
struct Power {
  SmallPower<Real> by_products;
  bool is_small;
  Real exponent;

  __device__ __forceinline__ Real operator()(Real base, Real log_base) const {
    return is_small ? by_products(base, log_base) : AnyPower<Real>{exponent}(base, log_base);
  }
};

template <typename Real>
Power<Real> power_of(const Operand& operand) {
  const Real number = static_cast<Real>(operand.value);
  const bool is_small = !operand.data && SmallPower<Real>::covers(number);
  return {SmallPower<Real>(is_small ? number : Real(0)), is_small, number};
}

// The arguments of a launch that every thread reads.
template <typename Real>
struct Plan {
  Power<Real> gamma;
  Power<Real> second;  // gamma_positive of the asymmetric loss
  bool has_alpha;
  bool walks;           // some tensor has a layout other than that of the results
  bool input_in_packs;  // dense, and aligned to a vector
  bool target_in_packs;
  bool result_in_packs;
};

// Offsets of an element in the tensors, and its class.
struct Position {
  int64_t input, target, scores, gamma, second, weight, grad;
  int64_t class_index;
};

template <typename Scalar>
__device__ __forceinline__ Position position_of(const SigmoidLossArgs<Scalar>& args, const int64_t* grad_strides,
                                                int64_t element) {
  Position at = {0, 0, 0, 0, 0, 0, 0, 0};
  int64_t rest = element;
  for (int d = args.space.dims - 1; d >= 0; --d) {
    const int64_t size = args.space.sizes[d];
    // A 64-bit division is a subroutine, so it is used only if a tensor needs it.
    const int64_t outer = rest <= 0xffffffffLL && size <= 0xffffffffLL
                              ? static_cast<int64_t>(static_cast<uint32_t>(rest) / static_cast<uint32_t>(size))
                              : rest / size;
    const int64_t c = rest - outer * size;
    rest = outer;
    at.input += c * args.input.strides[d];
    at.target += c * args.target.strides[d];
    at.scores += c * args.scores.strides[d];
    at.gamma += c * args.gamma.strides[d];
    at.second += c * args.second.strides[d];
    at.weight += c * args.weight.strides[d];
    if (grad_strides != nullptr) at.grad += c * grad_strides[d];
    if (d == args.class_dim) at.class_index = c;
  }
  return at;
}

__device__ __forceinline__ int64_t read_label(const Operand& operand, int64_t at) {
  if (operand.type == ElementType::kInt64) return static_cast<const int64_t*>(operand.data)[at];
  if (operand.type == ElementType::kInt32) return static_cast<const int32_t*>(operand.data)[at];
  return static_cast<const uint8_t*>(operand.data)[at];
}

// A parameter: a number, or a tensor of Real. A dense tensor is read at the element's own index.
template <typename Real>
__device__ __forceinline__ Real parameter_at(const Operand& operand, int64_t element, int64_t walked) {
  if (operand.data == nullptr) return static_cast<Real>(operand.value);
  return static_cast<const Real*>(operand.data)[operand.dense ? element : walked];
}

template <typename Real>
struct Element {
  Real x;
  Real share;
  Real weight;
  bool counts;  // not ignored
  Power<Real> gamma;
  Power<Real> gamma_positive;
  Real positive;  // weights of t and of 1 - t
  Real negative;
};

template <typename Loss, typename Real>
__device__ __forceinline__ SigmoidTerms<Real> terms_of(const Element<Real>& found, Real constant, ScoredLoss scored) {
  const SigmoidParameters<Real, Power<Real>> with{
      found.gamma, found.gamma_positive, found.positive, found.negative, constant, scored};
  return Loss::template terms<false>(found.x, found.share, with);
}

// `x` and `share` are values of the vectors, if vectors are read.
template <typename Scalar>
__device__ __forceinline__ Element<compute_t<Scalar>> element_at(const SigmoidLossArgs<Scalar>& args,
                                                                 const Plan<compute_t<Scalar>>& plan, int64_t element,
                                                                 const Position& at, compute_t<Scalar> x,
                                                                 compute_t<Scalar> share) {
  using Real = compute_t<Scalar>;
  Element<Real> found{x, share, Real(1), true, plan.gamma, plan.second, Real(1), Real(1)};
  if (!plan.input_in_packs) {
    const auto* input = static_cast<const Scalar*>(args.input.data);
    found.x = load_as_compute(input[args.input.dense ? element : at.input]);
  }
  if (args.target_is_labels) {
    const int64_t label = read_label(args.target, args.target.dense ? element : at.target);
    found.counts = label != args.ignore_index;
    found.share = label == at.class_index ? Real(1) : Real(0);
    if (args.scores.data != nullptr && label == at.class_index) {
      found.share = score_of_match(read_share<Real>(args.scores, args.scores.dense ? element : at.scores));
    }
    if (label < 0 || label > args.classes) found.share = kNaN<Real>;
  } else if (!plan.target_in_packs) {
    found.share = read_share<Real>(args.target, args.target.dense ? element : at.target);
  }
  if (args.gamma.data != nullptr) found.gamma.exponent = parameter_at<Real>(args.gamma, element, at.gamma);
  if (plan.has_alpha) {
    found.positive = parameter_at<Real>(args.second, element, at.second);
    found.negative = Real(1) - found.positive;
  } else if (args.loss_kind == SigmoidLoss::kAsymmetric && args.second.data != nullptr) {
    found.gamma_positive.exponent = parameter_at<Real>(args.second, element, at.second);
  }
  found.weight = parameter_at<Real>(args.weight, element, at.weight);
  return found;
}

// Vectors that a thread loads before it processes their elements.
template <typename Scalar>
struct Packs {
  Pack<Scalar> input;
  Pack<Scalar> target;
};

template <typename Scalar>
__device__ __forceinline__ Packs<Scalar> load_packs(const SigmoidLossArgs<Scalar>& args,
                                                    const Plan<compute_t<Scalar>>& plan, int64_t first) {
  Packs<Scalar> packs = {};
  const bool whole = first + kStep<Scalar> <= args.space.size;
  const auto* input = static_cast<const Scalar*>(args.input.data) + first;
  const auto* target = static_cast<const Scalar*>(args.target.data) + first;
  if (plan.input_in_packs && whole) packs.input = load_pack(input);
  if (plan.target_in_packs && whole) packs.target = load_pack(target);
  if (!whole) {
#pragma unroll
    for (int e = 0; e < kStep<Scalar>; ++e) {
      if (first + e < args.space.size) {
        if (plan.input_in_packs) packs.input.at[e] = input[e];
        if (plan.target_in_packs) packs.target.at[e] = target[e];
      }
    }
  }
  return packs;
}

// ---- forward -------------------------------------------------------------------------------------------------------

template <typename Scalar, typename Loss>
__global__ __launch_bounds__(kBlock, kBlocksAtOnce<Scalar>) void sigmoid_loss_forward_kernel(
    const __grid_constant__ SigmoidLossForward<Scalar> args, const __grid_constant__ Plan<compute_t<Scalar>> plan,
    const __grid_constant__ GridSum<compute_t<Scalar>> totals) {
  using Real = compute_t<Scalar>;
  const int64_t stride = static_cast<int64_t>(gridDim.x) * kBlock * kStep<Scalar>;
  double sum = 0, count = 0;
  for (int64_t first = (static_cast<int64_t>(blockIdx.x) * kBlock + threadIdx.x) * kStep<Scalar>;
       first < args.space.size; first += stride) {
    const Packs<Scalar> packs = load_packs(args, plan, first);
#pragma unroll
    for (int e = 0; e < kStep<Scalar>; ++e) {
      const int64_t element = first + e;
      if (element >= args.space.size) break;
      const Position at = plan.walks ? position_of(args, nullptr, element) : Position{};
      const Element<Real> found = element_at(args, plan, element, at, load_as_compute(packs.input.at[e]),
                                             static_cast<Real>(load_as_compute(packs.target.at[e])));
      Real loss = terms_of<Loss>(found, args.constant, scored_loss_of(args.loss_kind)).loss * found.weight;
      loss = found.counts ? loss : Real(0);
      if (args.loss != nullptr) args.loss[element] = Store<Scalar>::from_compute(loss);
      if (args.loss_wide != nullptr) args.loss_wide[element] = loss;
      sum += static_cast<double>(loss);
      count += found.counts ? 1.0 : 0.0;
    }
  }
  sum_over_grid(totals, sum, count);
}

// ---- backward ------------------------------------------------------------------------------------------------------

template <typename Scalar, typename Loss>
__global__ __launch_bounds__(kBlock, kBlocksAtOnce<Scalar>) void sigmoid_loss_backward_kernel(
    const __grid_constant__ SigmoidLossBackward<Scalar> args, const __grid_constant__ Plan<compute_t<Scalar>> plan) {
  using Real = compute_t<Scalar>;
  const int64_t stride = static_cast<int64_t>(gridDim.x) * kBlock * kStep<Scalar>;
  const Real divisor = args.divisor != nullptr ? *args.divisor : Real(1);
  for (int64_t first = (static_cast<int64_t>(blockIdx.x) * kBlock + threadIdx.x) * kStep<Scalar>;
       first < args.space.size; first += stride) {
    const Packs<Scalar> packs = load_packs(args, plan, first);
    Pack<Scalar> result = {};
#pragma unroll
    for (int e = 0; e < kStep<Scalar>; ++e) {
      const int64_t element = first + e;
      if (element >= args.space.size) break;
      const Position at = plan.walks ? position_of(args, args.grad_loss.strides, element) : Position{};
      const Element<Real> found = element_at(args, plan, element, at, load_as_compute(packs.input.at[e]),
                                             static_cast<Real>(load_as_compute(packs.target.at[e])));
      const SigmoidTerms<Real> terms = terms_of<Loss>(found, args.constant, scored_loss_of(args.loss_kind));
      const Real scale = found.weight * (parameter_at<Real>(args.grad_loss, element, at.grad) / divisor);
      // This holds even where the logits of an ignored row are NaN.
      const bool counts = found.counts;
      result.at[e] = Store<Scalar>::from_compute(counts ? terms.slope * scale : Real(0));
      if (args.grad_target != nullptr) args.grad_target[element] = counts ? terms.slope_target * scale : Real(0);
      if (args.grad_gamma != nullptr) args.grad_gamma[element] = counts ? terms.slope_gamma * scale : Real(0);
      if (args.grad_second != nullptr) args.grad_second[element] = counts ? terms.slope_positive * scale : Real(0);
    }
    if (args.grad_input == nullptr) continue;
    if (plan.result_in_packs && first + kStep<Scalar> <= args.space.size) {
      store_pack(args.grad_input + first, result);
      continue;
    }
#pragma unroll
    for (int e = 0; e < kStep<Scalar>; ++e) {
      if (first + e < args.space.size) args.grad_input[first + e] = result.at[e];
    }
  }
}

// ---- launch --------------------------------------------------------------------------------------------------------

template <typename Scalar>
constexpr ElementType kTypeOf = ElementType::kFloat;
template <>
constexpr ElementType kTypeOf<double> = ElementType::kDouble;
template <>
constexpr ElementType kTypeOf<Half> = ElementType::kHalf;
template <>
constexpr ElementType kTypeOf<BFloat16> = ElementType::kBFloat16;

template <typename Scalar>
bool on_boundary(const void* address) {
  return reinterpret_cast<uintptr_t>(address) % sizeof(Pack<Scalar>) == 0;
}

bool must_walk(const Operand& operand) { return operand.data != nullptr && !operand.dense; }

template <typename Scalar>
Plan<compute_t<Scalar>> plan_of(const SigmoidLossArgs<Scalar>& args) {
  using Real = compute_t<Scalar>;
  Plan<Real> plan = {
      power_of<Real>(args.gamma), power_of<Real>(args.second), args.has_alpha, false, false, false, false};
  plan.walks = args.target_is_labels || must_walk(args.input) || must_walk(args.target) || must_walk(args.gamma) ||
               must_walk(args.second) || must_walk(args.weight);
  plan.input_in_packs = args.input.dense && on_boundary<Scalar>(args.input.data);
  plan.target_in_packs = !args.target_is_labels && args.target.dense && args.target.type == kTypeOf<Scalar> &&
                         on_boundary<Scalar>(args.target.data);
  return plan;
}

int64_t blocks_for(int64_t size, int step) {
  const int64_t blocks = divide_up(size, static_cast<int64_t>(kBlock) * step);
  return blocks < 1 ? 1 : blocks < kMaxGrid ? blocks : kMaxGrid;
}

template <typename Scalar>
bool is_valid(const SigmoidLossArgs<Scalar>& args) {
  return args.space.size >= 0 && args.space.dims >= 1 && args.space.dims <= kMaxDims;
}

}  // namespace

int64_t sigmoid_loss_workspace(int64_t size) { return grid_sum_workspace(blocks_for(size, kStep<double>)); }

template <typename Scalar>
int sigmoid_loss_forward(const SigmoidLossForward<Scalar>& args, bool mean, compute_t<Scalar>* total,
                         compute_t<Scalar>* divisor, void* workspace, void* stream) {
  using Real = compute_t<Scalar>;
  if (!is_valid(args)) return cudaErrorInvalidValue;
  GridSum<Real> totals = {total, divisor, mean, nullptr, nullptr};
  const bool is_plain = sigmoid_loss_is_plain(args);
  const int64_t grid =
      is_plain ? sigmoid_loss_plain_grid<Scalar>(args.space.size) : blocks_for(args.space.size, kStep<Scalar>);
  const cudaError_t error = prepare_grid_sum(totals, grid, workspace, stream);
  if (error != cudaSuccess) return error;
  if (is_plain) return sigmoid_loss_plain_forward(args, totals, stream);
  void (*kernel)(SigmoidLossForward<Scalar>, Plan<Real>, GridSum<Real>) =
      args.loss_kind == SigmoidLoss::kFocal     ? sigmoid_loss_forward_kernel<Scalar, FocalElement>
      : args.loss_kind == SigmoidLoss::kQuality ? sigmoid_loss_forward_kernel<Scalar, QualityElement>
      : is_scored(args.loss_kind)               ? sigmoid_loss_forward_kernel<Scalar, ScoredElement>
                                                : sigmoid_loss_forward_kernel<Scalar, AsymmetricElement>;
  return launch(kernel, grid, kBlock, stream, args, plan_of(args), totals);
}

template <typename Scalar>
int sigmoid_loss_backward(const SigmoidLossBackward<Scalar>& args, void* stream) {
  using Real = compute_t<Scalar>;
  if (!is_valid(args)) return cudaErrorInvalidValue;
  if (args.space.size == 0) return cudaSuccess;
  if (sigmoid_loss_is_plain(args)) return sigmoid_loss_plain_backward(args, stream);
  Plan<Real> plan = plan_of(args);
  plan.walks = plan.walks || must_walk(args.grad_loss);
  plan.result_in_packs = on_boundary<Scalar>(args.grad_input);
  void (*kernel)(SigmoidLossBackward<Scalar>, Plan<Real>) =
      args.loss_kind == SigmoidLoss::kFocal     ? sigmoid_loss_backward_kernel<Scalar, FocalElement>
      : args.loss_kind == SigmoidLoss::kQuality ? sigmoid_loss_backward_kernel<Scalar, QualityElement>
      : is_scored(args.loss_kind)               ? sigmoid_loss_backward_kernel<Scalar, ScoredElement>
                                                : sigmoid_loss_backward_kernel<Scalar, AsymmetricElement>;
  return launch(kernel, blocks_for(args.space.size, kStep<Scalar>), kBlock, stream, args, plan);
}

#define FK_INSTANTIATE(Scalar)                                                                           \
  template int sigmoid_loss_forward<Scalar>(const SigmoidLossForward<Scalar>&, bool, compute_t<Scalar>*, \
                                            compute_t<Scalar>*, void*, void*);                           \
  template int sigmoid_loss_backward<Scalar>(const SigmoidLossBackward<Scalar>&, void*);
FK_INSTANTIATE(Half)
FK_INSTANTIATE(BFloat16)
FK_INSTANTIATE(float)
FK_INSTANTIATE(double)
#undef FK_INSTANTIATE

}  // namespace focalkern::cuda
