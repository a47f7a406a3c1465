// sigmoid_focal_loss, asymmetric_loss and quality_focal_loss: argument checks, kernel calls, autograd and the eager
// entry. The three are one operator, told apart by `kind`.
//
//   sigmoid_loss_forward   -> (loss, divisor)   divisor = [1]: what the mean was divided by, or 1
//   sigmoid_loss_backward  -> (grad_input, grad_target, grad_gamma, grad_second), empty where not needed
//
// `second` is alpha of the focal loss (none is no alpha) and gamma_positive of the asymmetric loss.
// Derivatives of higher order, torch.func transforms and forward-mode tangents go through `composite_loss`, the same
// losses written in differentiable torch operations.

#include <ATen/Parallel.h>
#include <ATen/autocast_mode.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/alias.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/log_sigmoid.h>
#include <ATen/ops/scalar_tensor.h>
#include <ATen/ops/where.h>
#include <c10/util/Exception.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/custom_function.h>

#include <algorithm>
#include <limits>
#include <numeric>
#include <string>
#include <tuple>
#include <vector>

#include "bindings.h"
#ifdef FOCALKERN_WITH_CUDA
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#endif

namespace focalkern::bindings {
namespace {

enum Reduction : int64_t { kNone = 0, kMean = 1, kSum = 2 };

struct Options {
  SigmoidLoss kind;
  double margin;
  int64_t reduction;
  int64_t ignore_index;
  bool float32_loss;  // a half-precision loss is returned as float32, as autocast wants it
};

using OptionalTensor = std::optional<Tensor>;

struct Names {
  const char* op;
  const char* gamma;
  const char* second;
};

const Names& names_of(SigmoidLoss kind) {
  static const Names names[] = {{"sigmoid_focal_loss", "gamma", "alpha"},
                                {"asymmetric_loss", "gamma_negative", "gamma_positive"},
                                {"quality_focal_loss", "beta", "none"}};
  return names[static_cast<int>(kind)];
}

SigmoidLoss checked_kind(int64_t kind) {
  TORCH_CHECK_VALUE(kind >= 0 && kind <= 2, "sigmoid_loss: kind must be 0, 1 or 2, got ", kind);
  return static_cast<SigmoidLoss>(kind);
}

Options options_of(int64_t kind, double margin, int64_t reduction, int64_t ignore_index, bool float32_loss = false) {
  return {checked_kind(kind), margin, reduction, ignore_index, float32_loss};
}

int64_t class_dim_of(const Tensor& input) { return input.dim() == 1 ? 0 : 1; }

// Integer targets with one dim less than the input are labels.
bool is_labels(const Tensor& input, const Tensor& target) {
  return target.dim() + 1 == input.dim() && at::isIntegralType(target.scalar_type(), /*includeBool=*/false);
}

at::ScalarType loss_dtype(const Tensor& input, const Options& options) {
  return options.float32_loss ? compute_dtype(input.scalar_type()) : input.scalar_type();
}

Tensor as_dtype(const Tensor& tensor, at::ScalarType dtype) {
  return tensor.scalar_type() == dtype ? tensor : tensor.to(dtype);
}

bool is_host_number(const Tensor& tensor) { return tensor.dim() == 0 && tensor.device().is_cpu(); }

// ---- checks, for real and for fake tensors alike -------------------------------------------------------------------

void check_broadcast(const char* op, const char* name, const Tensor& tensor, const Tensor& input) {
  check_floating(op, name, tensor);
  // One number may stay on the host: it becomes a kernel argument.
  if (is_host_number(tensor)) return;
  check_same_device(op, name, tensor, input);
  bool fits = tensor.dim() <= input.dim();
  for (int64_t d = 1; fits && d <= tensor.dim(); ++d) {
    const auto size = tensor.sym_size(-d);
    fits = size == 1 || size == input.sym_size(-d);
  }
  TORCH_CHECK_VALUE(fits, op, ": ", name, " must be broadcastable to input, ", input.sym_sizes(), ", got ",
                    tensor.sym_sizes());
}

void check_constant(const char* op, const char* name, const Tensor& tensor) {
  TORCH_CHECK_VALUE(!tensor.requires_grad(), op, ": ", name, " must not require grad: it is a constant of the loss");
}

void check_target(const char* op, const Tensor& input, const Tensor& target, const Options& options) {
  check_same_device(op, "target", target, input);
  const auto type = target.scalar_type();
  TORCH_CHECK_TYPE(target.is_floating_point() || at::isIntegralType(type, /*includeBool=*/true), op,
                   ": target must be floating point, bool or integer, got ", type);
  if (target.sym_sizes() == input.sym_sizes()) return;
  if (is_labels(input, target)) {
    c10::SymDimVector shape(input.sym_sizes().begin(), input.sym_sizes().end());
    shape.erase(shape.begin() + class_dim_of(input));
    TORCH_CHECK_VALUE(target.sym_sizes() == c10::SymIntArrayRef(shape), op,
                      ": target of labels must be the shape of input without its class dimension, ",
                      c10::SymIntArrayRef(shape), ", got ", target.sym_sizes());
    return;
  }
  TORCH_CHECK_VALUE(false, op, ": target must be the shape of input = ", input.sym_sizes(), ", got ",
                    target.sym_sizes());
}

void check_arguments(const Tensor& input, const Tensor& target, const Tensor& gamma, const OptionalTensor& second,
                     const OptionalTensor& weight, const Options& options) {
  const auto& names = names_of(options.kind);
  const char* op = names.op;
  TORCH_CHECK_TYPE(input.is_floating_point(), op, ": input must be floating point, got ", input.dtype());
  check_floating(op, "input", input);
  check_target(op, input, target, options);
  check_broadcast(op, names.gamma, gamma, input);
  if (second.has_value()) {
    check_broadcast(op, names.second, *second, input);
    if (options.kind == SigmoidLoss::kFocal) check_constant(op, names.second, *second);
  }
  TORCH_CHECK_VALUE(
      second.has_value() == (options.kind == SigmoidLoss::kAsymmetric) || options.kind == SigmoidLoss::kFocal, op,
      ": asymmetric_loss alone needs a second gamma");
  if (weight.has_value()) {
    check_broadcast(op, "weight", *weight, input);
    check_constant(op, "weight", *weight);
  }
  TORCH_CHECK_VALUE(options.margin >= 0 && options.margin < 1, op, ": margin must be in [0, 1), got ", options.margin);
  TORCH_CHECK_VALUE(options.reduction >= kNone && options.reduction <= kSum, op,
                    ": reduction must be 0 (none), 1 (mean) or 2 (sum), got ", options.reduction);
}

[[noreturn]] void raise_invalid_label(const Tensor& input, const Tensor& target, const Options& options) {
  const int64_t classes = input.size(class_dim_of(input));
  const Tensor labels = target.reshape({-1}).to(at::kLong).cpu();
  const auto* label = labels.const_data_ptr<int64_t>();
  int64_t row = 0;
  while (row + 1 < labels.numel() && ((label[row] >= 0 && label[row] <= classes) || label[row] == options.ignore_index))
    ++row;
  TORCH_CHECK_INDEX(false, names_of(options.kind).op, ": target must be in [0, ", classes,
                    "] (the last is background) or ignore_index, got ", label[row], " at row ", row);
}

// ---- from tensors to kernel arguments ------------------------------------------------------------------------------

ElementType element_type(at::ScalarType dtype) {
  switch (dtype) {
    case at::kDouble:
      return ElementType::kDouble;
    case at::kHalf:
      return ElementType::kHalf;
    case at::kBFloat16:
      return ElementType::kBFloat16;
    case at::kBool:
    case at::kByte:
      return ElementType::kUInt8;
    case at::kInt:
      return ElementType::kInt32;
    case at::kLong:
      return ElementType::kInt64;
    default:
      return ElementType::kFloat;
  }
}

bool has_element_type(at::ScalarType dtype) {
  return dtype == at::kFloat || dtype == at::kDouble || dtype == at::kHalf || dtype == at::kBFloat16 ||
         dtype == at::kBool || dtype == at::kByte || dtype == at::kInt || dtype == at::kLong;
}

// Brings tensors into the form in which the kernels walk over them, in the order in which a result of the shape of
// `like` lies in memory. Copies that this takes are kept alive here.
class Walk {
 public:
  // `like`: dense, the gradient or the loss. `class_dim`: kept apart from its neighbours, or -1.
  Walk(const Tensor& like, int64_t class_dim) : like_(like) {
    if (like.is_contiguous() && class_dim < 0) {
      flat_ = true;
      return;
    }
    for (int64_t d = 0; d < like.dim(); ++d) {
      if (like.size(d) != 1 || d == class_dim) order_.push_back(d);
    }
    std::stable_sort(order_.begin(), order_.end(),
                     [&](int64_t a, int64_t b) { return like.stride(a) > like.stride(b); });
    if (class_dim >= 0) class_dim_ = class_dim;
  }

  // Tensors that do not lie as the results do ask for all the dims; `finish` then merges those that it can.
  Operand add(const Tensor& tensor) {
    Operand operand{};
    const Tensor expanded = tensor.sizes() == like_.sizes() ? tensor : tensor.expand(like_.sizes());
    operand.data = expanded.const_data_ptr();
    operand.type = element_type(expanded.scalar_type());
    operand.dense = expanded.strides() == like_.strides() || (flat_ && expanded.is_contiguous());
    if (!operand.dense && flat_) {
      flat_ = false;
      for (int64_t d = 0; d < like_.dim(); ++d) {
        if (like_.size(d) != 1) order_.push_back(d);
      }
    }
    kept_.push_back(expanded);
    return operand;
  }

  // The space, and the strides of all operands, which were added in this order.
  void finish(ElementSpace* space, std::initializer_list<Operand*> operands, int* class_dim) {
    space->size = like_.numel();
    space->dims = 1;
    space->sizes[0] = space->size;
    *class_dim = -1;
    for (Operand* operand : operands) operand->strides[0] = operand->data && operand->dense ? 1 : 0;
    if (flat_ || order_.empty() || space->size == 0) {
      if (class_dim_ >= 0) *class_dim = 0;
      return;
    }
    int dims = 0;
    int64_t outer_of[64];
    for (size_t i = 0; i < order_.size(); ++i) {
      const int64_t d = order_[i];
      if (dims > 0 && merges(outer_of[dims - 1], d)) {
        space->sizes[dims - 1] *= like_.size(d);
      } else {
        TORCH_CHECK_VALUE(dims < kMaxDims, "focalkern: tensors with more than ", kMaxDims,
                          " dimensions of different strides must be made contiguous first");
        space->sizes[dims++] = like_.size(d);
      }
      outer_of[dims - 1] = d;
      if (d == class_dim_) *class_dim = dims - 1;
    }
    space->dims = dims;
    size_t next = 0;
    for (Operand* operand : operands) {
      if (!operand->data) continue;
      const Tensor& tensor = kept_[next++];
      for (int i = 0; i < dims; ++i)
        operand->strides[i] = tensor.size(outer_of[i]) == 1 ? 0 : tensor.stride(outer_of[i]);
    }
  }

 private:
  // Whether the dim `inner` continues `outer` in every tensor.
  bool merges(int64_t outer, int64_t inner) const {
    if (outer == class_dim_ || inner == class_dim_) return false;
    if (like_.stride(outer) != like_.size(inner) * like_.stride(inner)) return false;
    for (const Tensor& tensor : kept_) {
      if (tensor.stride(outer) != tensor.size(inner) * tensor.stride(inner)) return false;
    }
    return true;
  }

  const Tensor& like_;
  bool flat_ = false;  // contiguous, so far: one dim
  int64_t class_dim_ = -1;
  std::vector<int64_t> order_;  // dims of more than one element, outermost first
  std::vector<Tensor> kept_;
};

// A number on the host, or a tensor in the type of the computation.
Operand parameter(const OptionalTensor& tensor, double absent, at::ScalarType real, Walk& walk) {
  Operand operand{};
  operand.value = absent;
  if (!tensor.has_value()) return operand;
  if (is_host_number(*tensor)) {
    operand.value = tensor->item<double>();
    return operand;
  }
  return walk.add(as_dtype(*tensor, real));
}

// `like` is dense and lies as the results do. Fills all but the results.
template <typename Scalar>
void prepare(SigmoidLossArgs<Scalar>& args, Walk& walk, Operand* grad_loss, const Tensor& grad, const Tensor& input,
             const Tensor& target, const Tensor& gamma, const OptionalTensor& second, const OptionalTensor& weight,
             const Options& options) {
  const auto real = compute_dtype(input.scalar_type());
  args.loss_kind = options.kind;
  args.margin = static_cast<compute_t<Scalar>>(options.margin);
  args.ignore_index = options.ignore_index;
  args.target_is_labels = is_labels(input, target);
  args.classes = input.dim() > 0 ? input.size(class_dim_of(input)) : 1;
  args.input = walk.add(input);
  const bool known = has_element_type(target.scalar_type());
  Tensor given = known ? target : target.to(args.target_is_labels ? at::kLong : at::kFloat);
  if (args.target_is_labels) given = given.unsqueeze(class_dim_of(input));
  args.target = walk.add(given);
  args.gamma = parameter(gamma, 0, real, walk);
  args.has_alpha = options.kind == SigmoidLoss::kFocal && second.has_value();
  args.second = parameter(second, 0, real, walk);
  args.weight = parameter(weight, 1, real, walk);
  if (grad_loss) {
    if (grad.numel() == 1 && grad.device().is_cpu()) {
      grad_loss->value = grad.item<double>();
    } else {
      *grad_loss = walk.add(as_dtype(grad, real));
    }
    walk.finish(&args.space, {&args.input, &args.target, &args.gamma, &args.second, &args.weight, grad_loss},
                &args.class_dim);
  } else {
    walk.finish(&args.space, {&args.input, &args.target, &args.gamma, &args.second, &args.weight}, &args.class_dim);
  }
}

// The dim of the classes where the target is labels, else -1.
int64_t label_dim(const Tensor& input, const Tensor& target) {
  return is_labels(input, target) ? class_dim_of(input) : -1;
}

// ---- kernels -------------------------------------------------------------------------------------------------------

std::tuple<Tensor, Tensor> forward_cpu(const Tensor& input, const Tensor& target, const Tensor& gamma,
                                       const OptionalTensor& second, const OptionalTensor& weight, int64_t kind,
                                       double margin, int64_t reduction, int64_t ignore_index, bool float32_loss) {
  const Options options = options_of(kind, margin, reduction, ignore_index, float32_loss);
  check_arguments(input, target, gamma, second, weight, options);
  const auto real = compute_dtype(input.scalar_type());
  const Tensor divisor = at::empty({1}, input.options().dtype(real));
  Tensor loss = reduction == kNone ? empty_result_like(input, loss_dtype(input, options))
                                   : at::empty({}, input.options().dtype(loss_dtype(input, options)));
  // Results of the shape of the input lie as it does where it is dense.
  const Tensor layout = input.is_non_overlapping_and_dense() ? input
                        : reduction == kNone                 ? loss
                                                             : at::empty_like(input, input.options().device(at::kMeta));
  dispatch_scalar(input.scalar_type(), [&](auto scalar) {
    using Scalar = decltype(scalar);
    using Real = compute_t<Scalar>;
    SigmoidLossForward<Scalar> args{};
    Walk walk(layout, label_dim(input, target));
    prepare(args, walk, nullptr, Tensor(), input, target, gamma, second, weight, options);
    if (reduction == kNone && loss.scalar_type() == real) {
      args.loss_wide = static_cast<Real*>(loss.mutable_data_ptr());
    } else if (reduction == kNone) {
      args.loss = static_cast<Scalar*>(loss.mutable_data_ptr());
    }
    const int64_t chunk = cpu::kSigmoidLossChunk, size = args.space.size;
    const int64_t n_chunks = (size + chunk - 1) / chunk;
    std::vector<Real> every;
    if constexpr (std::is_same_v<Scalar, BFloat16>) {
      if (size >= cpu::kEveryLogitPays * at::get_num_threads()) every = cpu::sigmoid_loss_of_every_logit(args);
    }
    std::vector<SigmoidLossSums> chunks(n_chunks);
    at::parallel_for(0, n_chunks, 1, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) {
        chunks[i] = cpu::sigmoid_loss_forward(args, i * chunk, std::min(size, (i + 1) * chunk),
                                              every.empty() ? nullptr : every.data());
      }
    });
    double total = 0;
    int64_t count = 0;
    for (const auto& sums : chunks) {
      if (!sums.is_valid) raise_invalid_label(input, target, options);
      total += sums.loss;
      count += sums.count;
    }
    if (reduction == kMean) total /= static_cast<double>(count);
    if (reduction != kNone) {
      dispatch_scalar(loss.scalar_type(), [&](auto stored) {
        using Stored = decltype(stored);
        *static_cast<Stored*>(loss.mutable_data_ptr()) =
            Store<Stored>::from_compute(static_cast<compute_t<Stored>>(total));
      });
    }
    *static_cast<Real*>(divisor.mutable_data_ptr()) = reduction == kMean ? static_cast<Real>(count) : Real(1);
  });
  return {loss, divisor};
}

// What both devices' backward passes need; `launch` receives the finished argument struct.
template <typename Launch>
std::tuple<Tensor, Tensor, Tensor, Tensor> backward(const Tensor& grad, const Tensor& input, const Tensor& target,
                                                    const Tensor& gamma, const OptionalTensor& second,
                                                    const OptionalTensor& weight, const Tensor& divisor,
                                                    const Options& options, std::array<bool, 4> needed, Launch launch) {
  check_arguments(input, target, gamma, second, weight, options);
  const char* op = names_of(options.kind).op;
  const auto real = compute_dtype(input.scalar_type());
  TORCH_CHECK_VALUE(options.reduction == kNone ? grad.sizes() == input.sizes() : grad.dim() == 0, op,
                    ": grad must have the shape of the loss, got ", grad.sizes());
  TORCH_CHECK_VALUE(divisor.numel() == 1 && divisor.scalar_type() == real, op,
                    ": divisor must be what the forward pass returned for this input");
  check_same_device(op, "grad", grad, input);
  check_same_device(op, "divisor", divisor, input);
  const auto wide = input.options().dtype(real);
  Tensor grad_input = needed[0] ? empty_result_like(input, input.scalar_type()) : at::empty({0}, input.options());
  Tensor grad_target = needed[1] ? at::empty_like(input, wide) : at::empty({0}, wide);
  Tensor grad_gamma = needed[2] ? at::empty_like(input, wide) : at::empty({0}, wide);
  Tensor grad_second = needed[3] ? at::empty_like(input, wide) : at::empty({0}, wide);
  if (!(needed[0] || needed[1] || needed[2] || needed[3])) return {grad_input, grad_target, grad_gamma, grad_second};
  const Tensor& layout = needed[0] ? grad_input : needed[1] ? grad_target : needed[2] ? grad_gamma : grad_second;
  dispatch_scalar(input.scalar_type(), [&](auto scalar) {
    using Scalar = decltype(scalar);
    using Real = compute_t<Scalar>;
    SigmoidLossBackward<Scalar> args{};
    Walk walk(layout, label_dim(input, target));
    prepare(args, walk, &args.grad_loss, grad, input, target, gamma, second, weight, options);
    if (options.reduction == kMean) args.divisor = static_cast<const Real*>(divisor.const_data_ptr());
    if (needed[0]) args.grad_input = static_cast<Scalar*>(grad_input.mutable_data_ptr());
    if (needed[1]) args.grad_target = static_cast<Real*>(grad_target.mutable_data_ptr());
    if (needed[2]) args.grad_gamma = static_cast<Real*>(grad_gamma.mutable_data_ptr());
    if (needed[3]) args.grad_second = static_cast<Real*>(grad_second.mutable_data_ptr());
    if (args.space.size > 0) launch(args);
  });
  if (needed[1]) grad_target = as_dtype(grad_target, target.scalar_type());
  if (needed[2]) grad_gamma = grad_gamma.sum_to_size(gamma.sizes()).to(gamma.options());
  if (needed[3]) grad_second = grad_second.sum_to_size(second->sizes()).to(second->options());
  return {grad_input, grad_target, grad_gamma, grad_second};
}

std::tuple<Tensor, Tensor, Tensor, Tensor> backward_cpu(const Tensor& grad, const Tensor& input, const Tensor& target,
                                                        const Tensor& gamma, const OptionalTensor& second,
                                                        const OptionalTensor& weight, const Tensor& divisor,
                                                        int64_t kind, double margin, int64_t reduction,
                                                        int64_t ignore_index, std::array<bool, 4> needed) {
  const Options options = options_of(kind, margin, reduction, ignore_index);
  return backward(grad, input, target, gamma, second, weight, divisor, options, needed, [](const auto& args) {
    using Scalar = std::remove_pointer_t<decltype(args.grad_input)>;
    const int64_t chunk = cpu::kSigmoidLossChunk, size = args.space.size;
    std::vector<Scalar> every;
    if constexpr (std::is_same_v<Scalar, BFloat16>) {
      if (size >= cpu::kEveryLogitPays * at::get_num_threads()) every = cpu::sigmoid_slope_of_every_logit(args);
    }
    at::parallel_for(0, (size + chunk - 1) / chunk, 1, [&](int64_t begin, int64_t end) {
      // Backwards: what the forward pass read last may still be in the cache.
      for (int64_t i = end - 1; i >= begin; --i) {
        cpu::sigmoid_loss_backward(args, i * chunk, std::min(size, (i + 1) * chunk),
                                   every.empty() ? nullptr : every.data());
      }
    });
  });
}

#ifdef FOCALKERN_WITH_CUDA

std::tuple<Tensor, Tensor> forward_cuda(const Tensor& input, const Tensor& target, const Tensor& gamma,
                                        const OptionalTensor& second, const OptionalTensor& weight, int64_t kind,
                                        double margin, int64_t reduction, int64_t ignore_index, bool float32_loss) {
  const Options options = options_of(kind, margin, reduction, ignore_index, float32_loss);
  check_arguments(input, target, gamma, second, weight, options);
  const c10::cuda::CUDAGuard guard(input.device());
  if (validation_requested() && is_labels(input, target)) {
    const Tensor labels = target.reshape({-1}).to(at::kLong);
    const int64_t classes = input.size(class_dim_of(input));
    const Tensor wrong = labels.ne(ignore_index).logical_and_(labels.lt(0).logical_or_(labels.gt(classes)));
    if (wrong.any().item<bool>()) raise_invalid_label(input, target, options);
  }
  const auto real = compute_dtype(input.scalar_type());
  const Tensor divisor = at::empty({1}, input.options().dtype(real));
  const auto stored = loss_dtype(input, options);
  Tensor loss =
      reduction == kNone ? at::empty_like(input, input.options().dtype(stored)) : at::empty({}, divisor.options());
  const Tensor layout = input.is_non_overlapping_and_dense() ? input
                        : reduction == kNone                 ? loss
                                                             : at::empty_like(input, input.options().device(at::kMeta));
  dispatch_scalar(input.scalar_type(), [&](auto scalar) {
    using Scalar = decltype(scalar);
    using Real = compute_t<Scalar>;
    SigmoidLossForward<Scalar> args{};
    Walk walk(layout, label_dim(input, target));
    prepare(args, walk, nullptr, Tensor(), input, target, gamma, second, weight, options);
    Real* total = nullptr;
    Tensor workspace;
    if (reduction != kNone) {
      total = static_cast<Real*>(loss.mutable_data_ptr());
      workspace = at::empty({cuda::sigmoid_loss_workspace(args.space.size)}, input.options().dtype(at::kByte));
    } else if (stored == real) {
      args.loss_wide = static_cast<Real*>(loss.mutable_data_ptr());
    } else {
      args.loss = static_cast<Scalar*>(loss.mutable_data_ptr());
    }
    C10_CUDA_CHECK(static_cast<cudaError_t>(cuda::sigmoid_loss_forward(
        args, reduction == kMean, total, static_cast<Real*>(divisor.mutable_data_ptr()),
        workspace.defined() ? workspace.mutable_data_ptr() : nullptr, c10::cuda::getCurrentCUDAStream().stream())));
  });
  return {as_dtype(loss, stored), divisor};
}

std::tuple<Tensor, Tensor, Tensor, Tensor> backward_cuda(const Tensor& grad, const Tensor& input, const Tensor& target,
                                                         const Tensor& gamma, const OptionalTensor& second,
                                                         const OptionalTensor& weight, const Tensor& divisor,
                                                         int64_t kind, double margin, int64_t reduction,
                                                         int64_t ignore_index, std::array<bool, 4> needed) {
  const Options options = options_of(kind, margin, reduction, ignore_index);
  const c10::cuda::CUDAGuard guard(input.device());
  return backward(grad, input, target, gamma, second, weight, divisor, options, needed, [](const auto& args) {
    C10_CUDA_CHECK(
        static_cast<cudaError_t>(cuda::sigmoid_loss_backward(args, c10::cuda::getCurrentCUDAStream().stream())));
  });
}

#endif  // FOCALKERN_WITH_CUDA

std::tuple<Tensor, Tensor> forward_meta(const Tensor& input, const Tensor& target, const Tensor& gamma,
                                        const OptionalTensor& second, const OptionalTensor& weight, int64_t kind,
                                        double margin, int64_t reduction, int64_t ignore_index, bool float32_loss) {
  const Options options = options_of(kind, margin, reduction, ignore_index, float32_loss);
  check_arguments(input, target, gamma, second, weight, options);
  const auto stored = input.options().dtype(loss_dtype(input, options));
  return {reduction == kNone ? at::empty_like(input, stored) : at::empty({}, stored),
          at::empty({1}, input.options().dtype(compute_dtype(input.scalar_type())))};
}

std::tuple<Tensor, Tensor, Tensor, Tensor> backward_meta(const Tensor& grad, const Tensor& input, const Tensor& target,
                                                         const Tensor& gamma, const OptionalTensor& second,
                                                         const OptionalTensor& weight, const Tensor& divisor,
                                                         int64_t kind, double margin, int64_t reduction,
                                                         int64_t ignore_index, std::array<bool, 4> needed) {
  const Options options = options_of(kind, margin, reduction, ignore_index);
  check_arguments(input, target, gamma, second, weight, options);
  const auto real = input.options().dtype(compute_dtype(input.scalar_type()));
  const auto contiguous_like = [](const Tensor& tensor) {
    return at::empty_like(tensor, tensor.options(), at::MemoryFormat::Contiguous);
  };
  return {needed[0] ? at::empty_like(input) : at::empty({0}, input.options()),
          needed[1] ? at::empty_like(input, input.options().dtype(target.scalar_type())) : at::empty({0}, real),
          needed[2] ? contiguous_like(gamma) : at::empty({0}, real),
          needed[3] ? contiguous_like(*second) : at::empty({0}, real)};
}

// ---- the same losses in differentiable torch operations ------------------------------------------------------------

// base^exponent with 0^0 = 1, from log base; at log base = -inf the value is a constant.
Tensor power(const Tensor& log_base, const Tensor& exponent) {
  const Tensor nothing = log_base.isinf();
  const Tensor value = (exponent * at::where(nothing, 0, log_base)).exp();
  return at::where(nothing, (exponent == 0).to(log_base.scalar_type()), value);
}

// log of a number that is not negative; where it is 0, -inf without a slope.
Tensor log_or_nothing(const Tensor& value) {
  const Tensor is_zero = value == 0;
  return at::where(is_zero, -std::numeric_limits<double>::infinity(), at::where(is_zero, 1, value).log());
}

Tensor composite_loss(const Tensor& input, const Tensor& target, const Tensor& gamma, const OptionalTensor& second,
                      const OptionalTensor& weight, const Options& options) {
  const auto real = compute_dtype(input.scalar_type());
  const auto number = [&](const Tensor& tensor) {
    return is_host_number(tensor) ? tensor.to(real) : tensor.to(real).expand_as(input);
  };
  const Tensor x = input.to(real);
  Tensor t, counts, valid;
  if (is_labels(input, target)) {
    const int64_t dim = class_dim_of(input);
    const auto classes = input.sym_size(dim);
    c10::SymDimVector class_shape(input.dim() - dim, 1);
    class_shape[0] = classes;
    const Tensor labels = target.to(at::kLong).unsqueeze(dim);
    const Tensor class_index =
        at::arange(c10::Scalar(classes), input.options().dtype(at::kLong)).view_symint(class_shape);
    t = (labels == class_index).to(real);
    counts = (labels != options.ignore_index).expand_as(input);
    valid = (labels >= 0).logical_and(labels <= classes);
  } else {
    t = target.to(real);
    valid = (t >= 0).logical_and(t <= 1);
  }
  const Tensor rest = 1 - t;
  const Tensor log_p = at::log_sigmoid(x), log_q = at::log_sigmoid(-x);
  const Tensor is_one = t == 1, is_zero = t == 0;
  // A side without a share adds nothing, also where its logarithm is infinite; a target that is to be differentiated
  // has a slope there all the same.
  const Tensor b = t.requires_grad() ? -(t * log_p + rest * log_q)
                                     : -(at::where(is_zero, 0, t * log_p) + at::where(is_one, 0, rest * log_q));
  const Tensor exponent = number(gamma);
  Tensor loss;
  if (options.kind == SigmoidLoss::kAsymmetric) {
    const Tensor q = log_q.exp(), p = log_p.exp();
    Tensor log_v = log_p, log_rest = log_q;
    if (options.margin > 0) {
      const Tensor v = p - options.margin;
      const Tensor counted = v > 0, near_zero = v < 0.5;
      log_v = at::where(counted, v, 1).log();
      const Tensor small = at::where(near_zero, v, 0);
      log_rest = at::where(near_zero, (-small).log1p(), at::where(near_zero, 1, q + options.margin).log());
      log_rest = at::where(counted, log_rest, at::where(v.isnan(), v, 0));
    }
    const Tensor positive = power(log_q, number(*second)) * -log_p;
    const Tensor negative = power(log_v, exponent) * -log_rest;
    loss = t.requires_grad() ? t * positive + rest * negative
                             : at::where(is_zero, 0, t * positive) + at::where(is_one, 0, rest * negative);
  } else if (options.kind == SigmoidLoss::kQuality) {
    // |t - p|, of the two differences the one in which nothing cancels; its logarithm where the target is hard.
    const Tensor positive = x > 0;
    const Tensor gap = at::where(positive, rest - log_q.exp(), t - log_p.exp());
    const Tensor agrees = at::where(positive, is_one, is_zero);
    const Tensor size = at::where(gap < 0, -gap, gap);
    const Tensor log_size =
        at::where(agrees, at::where(positive, log_q, log_p), log_or_nothing(at::where(agrees, 1, size)));
    Tensor factor = power(log_size, exponent);
    if (t.requires_grad()) {
      const Tensor soft = at::where(gap < 0, -gap, gap);
      factor = at::where(soft == 0, factor, at::where(soft == 0, 1, soft).pow(exponent));
    }
    loss = factor * b;
  } else {
    // 1 - p_t = t (1 - p) + (1 - t) p: in logarithms it does not underflow; its derivative in a hard target needs the
    // sum itself.
    const Tensor u = t * log_q.exp() + rest * log_p.exp();
    Tensor factor;
    if (t.requires_grad()) {
      const Tensor nothing = u == 0;
      factor = at::where(nothing, (exponent == 0).to(real), at::where(nothing, 1, u).pow(exponent));
    } else {
      const Tensor hard = is_one.logical_or(is_zero);
      const Tensor log_u = at::where(is_one, log_q, at::where(is_zero, log_p, log_or_nothing(at::where(hard, 1, u))));
      factor = power(log_u, exponent);
    }
    loss = factor * b;
    if (second.has_value()) {
      const Tensor alpha = number(*second);
      loss = loss * (alpha * t + (1 - alpha) * rest);
    }
  }
  if (weight.has_value()) loss = loss * number(*weight);
  loss = at::where(valid, loss, std::numeric_limits<double>::quiet_NaN());
  if (counts.defined()) loss = at::where(counts, loss, 0);
  if (options.reduction == kSum) loss = loss.sum();
  if (options.reduction == kMean) {
    loss = counts.defined() ? loss.sum() / counts.sum() : loss.mean();
  }
  return loss.to(loss_dtype(input, options));
}

// ---- autograd ------------------------------------------------------------------------------------------------------

using ForwardSignature = std::tuple<Tensor, Tensor>(const Tensor&, const Tensor&, const Tensor&, const OptionalTensor&,
                                                    const OptionalTensor&, int64_t, double, int64_t, int64_t, bool);
using BackwardSignature = std::tuple<Tensor, Tensor, Tensor, Tensor>(const Tensor&, const Tensor&, const Tensor&,
                                                                     const Tensor&, const OptionalTensor&,
                                                                     const OptionalTensor&, const Tensor&, int64_t,
                                                                     double, int64_t, int64_t, std::array<bool, 4>);

const auto& forward_op() {
  static const auto op = find_operator<ForwardSignature>("focalkern::sigmoid_loss_forward");
  return op;
}
const auto& backward_op() {
  static const auto op = find_operator<BackwardSignature>("focalkern::sigmoid_loss_backward");
  return op;
}

// What the backward pass must know besides the variables, in one allocation: boxed values would take one each.
struct SavedOptions : torch::CustomClassHolder {
  Options options;
  Tensor gamma, second, weight;  // where they are numbers on the host, which nothing differentiates
};

struct SigmoidLossFunction : torch::autograd::Function<SigmoidLossFunction> {
  static torch::autograd::variable_list forward(torch::autograd::AutogradContext* ctx, const Tensor& input,
                                                const Tensor& target, const Tensor& gamma, const OptionalTensor& second,
                                                const OptionalTensor& weight, const Options& options) {
    const at::AutoDispatchBelowADInplaceOrView guard;
    auto [loss, divisor] =
        forward_op().call(input, target, gamma, second, weight, static_cast<int64_t>(options.kind), options.margin,
                          options.reduction, options.ignore_index, options.float32_loss);
    auto stored = c10::make_intrusive<SavedOptions>();
    stored->options = options;
    torch::autograd::variable_list variables{input, target, divisor};
    const auto keep = [&](const OptionalTensor& tensor, Tensor* number) {
      if (!tensor.has_value()) {
        variables.emplace_back();
      } else if (is_host_number(*tensor) && !tensor->requires_grad()) {
        *number = *tensor;
        variables.emplace_back();
      } else {
        variables.push_back(*tensor);
      }
    };
    keep(gamma, &stored->gamma);
    keep(second, &stored->second);
    keep(weight, &stored->weight);
    ctx->save_for_backward(std::move(variables));
    ctx->saved_data["options"] = c10::IValue::make_capsule(std::move(stored));
    ctx->mark_non_differentiable({divisor});
    ctx->set_materialize_grads(false);
    return {loss, divisor};
  }

  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* ctx,
                                                 torch::autograd::variable_list grads) {
    torch::autograd::variable_list result(6);  // as many as forward has arguments
    const Tensor& grad = grads[0];
    if (!grad.defined()) return result;
    const auto capsule = ctx->saved_data["options"].toCapsule();
    const auto& stored = static_cast<const SavedOptions&>(*capsule);
    const Options& options = stored.options;
    const auto variables = ctx->get_saved_variables();
    const Tensor &input = variables[0], &target = variables[1], &divisor = variables[2];
    const auto kept = [](const Tensor& variable, const Tensor& number) {
      if (number.defined()) return OptionalTensor(number);
      return variable.defined() ? OptionalTensor(variable) : OptionalTensor();
    };
    const Tensor gamma = *kept(variables[3], stored.gamma);
    const OptionalTensor second = kept(variables[4], stored.second), weight = kept(variables[5], stored.weight);
    const std::array<bool, 4> needed{
        ctx->needs_input_grad(0), ctx->needs_input_grad(1) && target.is_floating_point(), ctx->needs_input_grad(2),
        second.has_value() && second->requires_grad() && options.kind == SigmoidLoss::kAsymmetric};
    if (c10::GradMode::is_enabled()) {
      // The gradient is itself to be differentiated. Aliases, so that a hook on the user's tensor fires once.
      std::array<Tensor, 4> sources{at::alias(input), at::alias(target), at::alias(gamma),
                                    second.has_value() ? at::alias(*second) : Tensor()};
      const OptionalTensor second_alias = second.has_value() ? OptionalTensor(sources[3]) : OptionalTensor();
      const Tensor loss = composite_loss(sources[0], sources[1], sources[2], second_alias, weight, options);
      torch::autograd::variable_list wanted;
      for (int i = 0; i < 4; ++i) {
        if (needed[i]) wanted.push_back(sources[i]);
      }
      const auto found = torch::autograd::grad({loss}, wanted, {grad}, /*retain_graph=*/true, /*create_graph=*/true,
                                               /*allow_unused=*/true);
      for (int i = 0, k = 0; i < 4; ++i) {
        if (needed[i]) result[i] = found[k++];
      }
      return result;
    }
    auto [grad_input, grad_target, grad_gamma, grad_second] =
        backward_op().call(grad, input, target, gamma, second, weight, divisor, static_cast<int64_t>(options.kind),
                           options.margin, options.reduction, options.ignore_index, needed);
    if (needed[0]) result[0] = std::move(grad_input);
    if (needed[1]) result[1] = std::move(grad_target);
    if (needed[2]) result[2] = std::move(grad_gamma);
    if (needed[3]) result[3] = std::move(grad_second);
    return result;
  }
};

std::tuple<Tensor, Tensor> forward_autograd(const Tensor& input, const Tensor& target, const Tensor& gamma,
                                            const OptionalTensor& second, const OptionalTensor& weight, int64_t kind,
                                            double margin, int64_t reduction, int64_t ignore_index, bool float32_loss) {
  const Options options = options_of(kind, margin, reduction, ignore_index, float32_loss);
  auto outputs = SigmoidLossFunction::apply(input, target, gamma, second, weight, options);
  return {std::move(outputs[0]), std::move(outputs[1])};
}

// ---- the eager entry -----------------------------------------------------------------------------------------------

Tensor composite_entry(const Tensor& input, const Tensor& target, const Tensor& gamma, const OptionalTensor& second,
                       const OptionalTensor& weight, int64_t kind, double margin, int64_t reduction,
                       int64_t ignore_index, bool float32_loss) {
  const Options options = options_of(kind, margin, reduction, ignore_index, float32_loss);
  check_arguments(input, target, gamma, second, weight, options);
  return composite_loss(input, target, gamma, second, weight, options);
}

// Gammas are Python numbers or tensors; the function is called with the GIL held.
Tensor sigmoid_loss_entry(const Tensor& input, const Tensor& target, const pybind11::object& gamma,
                          const pybind11::object& second, const OptionalTensor& weight, int64_t kind, double margin,
                          int64_t reduction, int64_t ignore_index) {
  const auto as_tensor = [](const pybind11::object& value) {
    return PyFloat_Check(value.ptr()) ? at::scalar_tensor(PyFloat_AS_DOUBLE(value.ptr()), at::kDouble)
                                      : value.cast<Tensor>();
  };
  const Tensor gamma_tensor = as_tensor(gamma);
  const OptionalTensor second_tensor = second.is_none() ? OptionalTensor() : OptionalTensor(as_tensor(second));
  const pybind11::gil_scoped_release release;
  const auto device = input.device().type();
  const bool float32_loss = compute_dtype(input.scalar_type()) != input.scalar_type() &&
                            at::autocast::is_autocast_available(device) && at::autocast::is_autocast_enabled(device);
  const Tensor second_or_none = second_tensor.value_or(Tensor()), weight_or_none = weight.value_or(Tensor());
  if (needs_composite({&input, &target, &gamma_tensor, &second_or_none, &weight_or_none})) {
    return composite_entry(input, target, gamma_tensor, second_tensor, weight, kind, margin, reduction, ignore_index,
                           float32_loss);
  }
  check_device(names_of(checked_kind(kind)).op, input);
  return std::get<0>(forward_op().call(input, target, gamma_tensor, second_tensor, weight, kind, margin, reduction,
                                       ignore_index, float32_loss));
}

}  // namespace

void register_sigmoid_loss(torch::Library& definitions, pybind11::module_& module) {
  const std::vector<at::Tag> tags{at::Tag::pt2_compliant_tag};
  definitions.def(
      "sigmoid_loss_forward(Tensor input, Tensor target, Tensor gamma, Tensor? second, Tensor? weight, int kind, float "
      "margin, int reduction, int ignore_index, bool float32_loss) -> (Tensor loss, Tensor divisor)",
      tags);
  definitions.def(
      "sigmoid_loss_backward(Tensor grad, Tensor input, Tensor target, Tensor gamma, Tensor? second, Tensor? weight, "
      "Tensor divisor, int kind, float margin, int reduction, int ignore_index, bool[4] needed) -> (Tensor grad_input, "
      "Tensor grad_target, Tensor grad_gamma, Tensor grad_second)",
      tags);
  definitions.def(
      "sigmoid_loss_composite(Tensor input, Tensor target, Tensor gamma, Tensor? second, Tensor? weight, int kind, "
      "float margin, int reduction, int ignore_index, bool float32_loss) -> Tensor",
      tags);
  definitions.impl("sigmoid_loss_composite",
                   torch::dispatch(c10::DispatchKey::CompositeImplicitAutograd, &composite_entry));
  definitions.impl("sigmoid_loss_forward", torch::dispatch(c10::DispatchKey::CPU, &forward_cpu));
  definitions.impl("sigmoid_loss_backward", torch::dispatch(c10::DispatchKey::CPU, &backward_cpu));
#ifdef FOCALKERN_WITH_CUDA
  definitions.impl("sigmoid_loss_forward", torch::dispatch(c10::DispatchKey::CUDA, &forward_cuda));
  definitions.impl("sigmoid_loss_backward", torch::dispatch(c10::DispatchKey::CUDA, &backward_cuda));
#endif
  definitions.impl("sigmoid_loss_forward", torch::dispatch(c10::DispatchKey::Meta, &forward_meta));
  definitions.impl("sigmoid_loss_backward", torch::dispatch(c10::DispatchKey::Meta, &backward_meta));
  definitions.impl("sigmoid_loss_forward", torch::dispatch(c10::DispatchKey::Autograd, &forward_autograd));

  module.def("sigmoid_loss", &sigmoid_loss_entry);
}

}  // namespace focalkern::bindings
