// sigmoid_focal_loss, asymmetric_loss and quality_focal_loss: argument checks, kernel calls, autograd and the eager
// entry. The three are one operator, told apart by `kind`.
//
//   sigmoid_loss_forward   -> (loss, divisor)   divisor = [1]: what the mean was divided by, or 1
//   sigmoid_loss_backward  -> (grad_input, grad_target, grad_gamma, grad_second), empty where not needed
//   sigmoid_loss_composite -> loss              in differentiable torch operations, by focalkern.fallback
//
// `second` is alpha of the focal loss (none is no alpha) and gamma_positive of the asymmetric loss.
// Derivatives of higher order, torch.func transforms and forward-mode tangents go through sigmoid_loss_composite.

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/scalar_tensor.h>
#include <c10/util/Exception.h>
#include <torch/csrc/autograd/custom_function.h>

#include <algorithm>
#include <numeric>
#include <string>
#include <tuple>
#include <vector>

#include "bindings/common.h"
#include "bindings/strided_iteration.h"
#include "kernels/sigmoid_loss.h"
#ifdef FOCALKERN_WITH_CUDA
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#endif

namespace focalkern::bindings {
namespace {

struct Options {
  SigmoidLoss kind;
  double margin;
  int64_t reduction;
  int64_t ignore_index;
  bool float32_loss;  // a half-precision loss is returned as float32, as autocast wants it
};

struct Inputs {
  const Tensor& input;
  const Tensor& target;
  const Tensor& gamma;
  const OptionalTensor& second;
  const OptionalTensor& weight;
};

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

// Integer targets with one dim less than the input are labels.
bool is_labels(const Tensor& input, const Tensor& target) {
  return target.dim() + 1 == input.dim() && at::isIntegralType(target.scalar_type(), /*includeBool=*/false);
}

// ---- checks, for real and for fake tensors alike -------------------------------------------------------------------

void check_broadcast(const char* op, const char* name, const Tensor& tensor, const Tensor& input) {
  check_floating(op, name, tensor);
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

void check_target(const char* op, const Tensor& input, const Tensor& target) {
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

void check_arguments(const Inputs& inputs, const Options& options) {
  const auto& [input, target, gamma, second, weight] = inputs;
  const auto& names = names_of(options.kind);
  const char* op = names.op;
  TORCH_CHECK_TYPE(input.is_floating_point(), op, ": input must be floating point, got ", input.dtype());
  check_floating(op, "input", input);
  check_target(op, input, target);
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

// Adds a tensor that broadcasts to the results.
Operand broadcast(StridedIteration<Tensor>& walk, const Tensor& tensor, at::IntArrayRef sizes) {
  return walk.add(tensor.sizes() == sizes ? tensor : tensor.expand(sizes), element_type(tensor.scalar_type()));
}

// A number on the host, or a tensor in the type of the computation.
Operand parameter(const OptionalTensor& tensor, double absent, at::ScalarType real, StridedIteration<Tensor>& walk,
                  at::IntArrayRef sizes) {
  Operand operand{};
  operand.value = absent;
  if (!tensor.has_value()) return operand;
  if (is_host_number(*tensor)) {
    operand.value = tensor->item<double>();
    return operand;
  }
  return broadcast(walk, as_dtype(*tensor, real), sizes);
}

// `like` is dense and has the layout of the results. Sets everything but the results.
template <typename Scalar>
void prepare(SigmoidLossArgs<Scalar>& args, StridedIteration<Tensor>& walk, Operand* grad_loss, const Tensor& grad,
             const Inputs& inputs, const Options& options) {
  const auto& [input, target, gamma, second, weight] = inputs;
  const auto real = compute_dtype(input.scalar_type());
  args.loss_kind = options.kind;
  args.margin = static_cast<compute_t<Scalar>>(options.margin);
  args.ignore_index = options.ignore_index;
  args.target_is_labels = is_labels(input, target);
  args.classes = input.dim() > 0 ? input.size(class_dim_of(input)) : 1;
  const auto sizes = input.sizes();
  args.input = broadcast(walk, input, sizes);
  const bool known = has_element_type(target.scalar_type());
  Tensor given = known ? target : target.to(args.target_is_labels ? at::kLong : at::kFloat);
  if (args.target_is_labels) given = given.unsqueeze(class_dim_of(input));
  args.target = broadcast(walk, given, sizes);
  args.gamma = parameter(gamma, 0, real, walk, sizes);
  args.has_alpha = options.kind == SigmoidLoss::kFocal && second.has_value();
  args.second = parameter(second, 0, real, walk, sizes);
  args.weight = parameter(weight, 1, real, walk, sizes);
  std::vector<Operand*> operands{&args.input, &args.target, &args.gamma, &args.second, &args.weight};
  if (grad_loss) {
    if (grad.numel() == 1 && grad.device().is_cpu()) {
      grad_loss->value = grad.item<double>();
    } else {
      *grad_loss = broadcast(walk, as_dtype(grad, real), sizes);
    }
    operands.push_back(grad_loss);
  }
  TORCH_CHECK_VALUE(walk.finish(&args.space, operands, &args.class_dim), "focalkern: tensors with more than ", kMaxDims,
                    " dimensions of different strides must be made contiguous first");
}

// The dim of the classes where the target is labels, else -1.
int64_t label_dim(const Tensor& input, const Tensor& target) {
  return is_labels(input, target) ? class_dim_of(input) : -1;
}

// ---- kernels -------------------------------------------------------------------------------------------------------

// A device allocates losses, reads labels where that is free, and launches the kernels.
struct Cpu {
  struct Guard {
    explicit Guard(c10::Device /* device */) {}
  };
  static void check_labels(const Inputs& /* inputs */, const Options& /* options */) {}  // the kernels do
  static Tensor empty_like(const Tensor& input, at::ScalarType dtype) { return empty_result_like(input, dtype); }
  static at::ScalarType reduced_dtype(at::ScalarType stored) { return stored; }

  template <typename Scalar>
  static void forward(const SigmoidLossForward<Scalar>& args, const Inputs& inputs, const Options& options,
                      const Tensor& loss, const Tensor& divisor) {
    using Real = compute_t<Scalar>;
    const int64_t chunk = cpu::kSigmoidLossChunk, size = args.space.size;
    const int64_t n_chunks = (size + chunk - 1) / chunk;
    std::vector<Real> table;
    if constexpr (std::is_same_v<Scalar, BFloat16>) {
      if (size >= cpu::kBFloat16TablePays * at::get_num_threads()) table = cpu::sigmoid_loss_bfloat16_table(args);
    }
    std::vector<SigmoidLossSums> chunks(n_chunks);
    at::parallel_for(0, n_chunks, 1, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) {
        chunks[i] = cpu::sigmoid_loss_forward(args, i * chunk, std::min(size, (i + 1) * chunk),
                                              table.empty() ? nullptr : table.data());
      }
    });
    double total = 0;
    int64_t count = 0;
    for (const auto& sums : chunks) {
      if (!sums.is_valid) raise_invalid_label(inputs.input, inputs.target, options);
      total += sums.loss;
      count += sums.count;
    }
    const bool mean = options.reduction == kMean;
    if (mean) total /= static_cast<double>(count);
    if (options.reduction != kNone) {
      dispatch_scalar(loss.scalar_type(), [&](auto stored) {
        using Stored = decltype(stored);
        *static_cast<Stored*>(loss.mutable_data_ptr()) =
            Store<Stored>::from_compute(static_cast<compute_t<Stored>>(total));
      });
    }
    *static_cast<Real*>(divisor.mutable_data_ptr()) = mean ? static_cast<Real>(count) : Real(1);
  }

  template <typename Scalar>
  static void backward(const SigmoidLossBackward<Scalar>& args) {
    const int64_t chunk = cpu::kSigmoidLossChunk, size = args.space.size;
    std::vector<Scalar> table;
    if constexpr (std::is_same_v<Scalar, BFloat16>) {
      if (size >= cpu::kBFloat16TablePays * at::get_num_threads()) table = cpu::sigmoid_grad_bfloat16_table(args);
    }
    at::parallel_for(0, (size + chunk - 1) / chunk, 1, [&](int64_t begin, int64_t end) {
      // Runs backwards: the end of the tensor, which the forward pass read last, may still be in the cache.
      for (int64_t i = end - 1; i >= begin; --i) {
        cpu::sigmoid_loss_backward(args, i * chunk, std::min(size, (i + 1) * chunk),
                                   table.empty() ? nullptr : table.data());
      }
    });
  }
};

#ifdef FOCALKERN_WITH_CUDA
struct Cuda {
  using Guard = c10::cuda::CUDAGuard;

  static void check_labels(const Inputs& inputs, const Options& options) {
    if (!validation_requested() || !is_labels(inputs.input, inputs.target)) return;
    const Tensor labels = inputs.target.reshape({-1}).to(at::kLong);
    const int64_t classes = inputs.input.size(class_dim_of(inputs.input));
    const Tensor wrong = labels.ne(options.ignore_index).logical_and_(labels.lt(0).logical_or_(labels.gt(classes)));
    if (wrong.any().item<bool>()) raise_invalid_label(inputs.input, inputs.target, options);
  }
  static Tensor empty_like(const Tensor& input, at::ScalarType dtype) {
    return at::empty_like(input, input.options().dtype(dtype));
  }
  static at::ScalarType reduced_dtype(at::ScalarType stored) { return compute_dtype(stored); }  // rounded afterwards

  template <typename Scalar>
  static void forward(const SigmoidLossForward<Scalar>& args, const Inputs& inputs, const Options& options,
                      const Tensor& loss, const Tensor& divisor) {
    using Real = compute_t<Scalar>;
    const bool reduced = options.reduction != kNone;
    Tensor workspace;
    if (reduced) {
      const int64_t bytes = cuda::sigmoid_loss_workspace(args.space.size);
      workspace = at::empty({bytes}, inputs.input.options().dtype(at::kByte));
    }
    C10_CUDA_CHECK(static_cast<cudaError_t>(cuda::sigmoid_loss_forward(
        args, options.reduction == kMean, reduced ? static_cast<Real*>(loss.mutable_data_ptr()) : nullptr,
        static_cast<Real*>(divisor.mutable_data_ptr()), reduced ? workspace.mutable_data_ptr() : nullptr,
        c10::cuda::getCurrentCUDAStream().stream())));
  }

  template <typename Scalar>
  static void backward(const SigmoidLossBackward<Scalar>& args) {
    C10_CUDA_CHECK(
        static_cast<cudaError_t>(cuda::sigmoid_loss_backward(args, c10::cuda::getCurrentCUDAStream().stream())));
  }
};
#endif  // FOCALKERN_WITH_CUDA

template <typename Device>
std::tuple<Tensor, Tensor> forward(const Inputs& inputs, const Options& options) {
  check_arguments(inputs, options);
  const Tensor& input = inputs.input;
  const typename Device::Guard guard(input.device());
  Device::check_labels(inputs, options);
  const auto real = compute_dtype(input.scalar_type()), stored = result_dtype(input, options.float32_loss);
  const bool unreduced = options.reduction == kNone;
  const Tensor divisor = at::empty({1}, input.options().dtype(real));
  const Tensor loss = unreduced ? Device::empty_like(input, stored)
                                : at::empty({}, input.options().dtype(Device::reduced_dtype(stored)));
  // Results have the layout of the input if it is dense.
  const Tensor layout = input.is_non_overlapping_and_dense() ? input
                        : unreduced                          ? loss
                                                             : at::empty_like(input, input.options().device(at::kMeta));
  dispatch_scalar(input.scalar_type(), [&](auto scalar) {
    using Scalar = decltype(scalar);
    SigmoidLossForward<Scalar> args{};
    StridedIteration<Tensor> walk(layout, label_dim(input, inputs.target));
    prepare(args, walk, nullptr, Tensor(), inputs, options);
    if (unreduced && stored == real) {
      args.loss_wide = static_cast<compute_t<Scalar>*>(loss.mutable_data_ptr());
    } else if (unreduced) {
      args.loss = static_cast<Scalar*>(loss.mutable_data_ptr());
    }
    Device::forward(args, inputs, options, loss, divisor);
  });
  return {as_dtype(loss, stored), divisor};
}

template <typename Device>
std::tuple<Tensor, Tensor, Tensor, Tensor> backward(const Tensor& grad, const Inputs& inputs, const Tensor& divisor,
                                                    const Options& options, std::array<bool, 4> needed) {
  check_arguments(inputs, options);
  const auto& [input, target, gamma, second, weight] = inputs;
  const typename Device::Guard guard(input.device());
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
    StridedIteration<Tensor> walk(layout, label_dim(input, target));
    prepare(args, walk, &args.grad_loss, grad, inputs, options);
    if (options.reduction == kMean) args.divisor = static_cast<const Real*>(divisor.const_data_ptr());
    if (needed[0]) args.grad_input = static_cast<Scalar*>(grad_input.mutable_data_ptr());
    if (needed[1]) args.grad_target = static_cast<Real*>(grad_target.mutable_data_ptr());
    if (needed[2]) args.grad_gamma = static_cast<Real*>(grad_gamma.mutable_data_ptr());
    if (needed[3]) args.grad_second = static_cast<Real*>(grad_second.mutable_data_ptr());
    if (args.space.size > 0) Device::backward(args);
  });
  if (needed[1]) grad_target = as_dtype(grad_target, target.scalar_type());
  if (needed[2]) grad_gamma = grad_gamma.sum_to_size(gamma.sizes()).to(gamma.options());
  if (needed[3]) grad_second = grad_second.sum_to_size(second->sizes()).to(second->options());
  return {grad_input, grad_target, grad_gamma, grad_second};
}

std::tuple<Tensor, Tensor> forward_meta(const Inputs& inputs, const Options& options) {
  check_arguments(inputs, options);
  const Tensor& input = inputs.input;
  const auto stored = input.options().dtype(result_dtype(input, options.float32_loss));
  return {options.reduction == kNone ? at::empty_like(input, stored) : at::empty({}, stored),
          at::empty({1}, input.options().dtype(compute_dtype(input.scalar_type())))};
}

std::tuple<Tensor, Tensor, Tensor, Tensor> backward_meta(const Tensor& /* grad */, const Inputs& inputs,
                                                         const Tensor& /* divisor */, const Options& options,
                                                         std::array<bool, 4> needed) {
  check_arguments(inputs, options);
  const auto& [input, target, gamma, second, weight] = inputs;
  const auto real = input.options().dtype(compute_dtype(input.scalar_type()));
  const auto contiguous_like = [](const Tensor& tensor) {
    return at::empty_like(tensor, tensor.options(), at::MemoryFormat::Contiguous);
  };
  return {needed[0] ? at::empty_like(input) : at::empty({0}, input.options()),
          needed[1] ? at::empty_like(input, input.options().dtype(target.scalar_type())) : at::empty({0}, real),
          needed[2] ? contiguous_like(gamma) : at::empty({0}, real),
          needed[3] ? contiguous_like(*second) : at::empty({0}, real)};
}

// ---- autograd ------------------------------------------------------------------------------------------------------

// The dispatcher's arguments of the forward pass (and of the composite), and of the backward pass, packed: for every
// dispatch key.
template <auto function>
auto unpacked(const Tensor& input, const Tensor& target, const Tensor& gamma, const OptionalTensor& second,
              const OptionalTensor& weight, int64_t kind, double margin, int64_t reduction, int64_t ignore_index,
              bool float32_loss) {
  return function(Inputs{input, target, gamma, second, weight},
                  options_of(kind, margin, reduction, ignore_index, float32_loss));
}

template <auto function>
auto unpacked_backward(const Tensor& grad, const Tensor& input, const Tensor& target, const Tensor& gamma,
                       const OptionalTensor& second, const OptionalTensor& weight, const Tensor& divisor, int64_t kind,
                       double margin, int64_t reduction, int64_t ignore_index, std::array<bool, 4> needed) {
  return function(grad, Inputs{input, target, gamma, second, weight}, divisor,
                  options_of(kind, margin, reduction, ignore_index), needed);
}

template <typename Operator>
auto call_packed(const Operator& op, const Inputs& inputs, const Options& options) {
  return op.call(inputs.input, inputs.target, inputs.gamma, inputs.second, inputs.weight,
                 static_cast<int64_t>(options.kind), options.margin, options.reduction, options.ignore_index,
                 options.float32_loss);
}

std::tuple<Tensor, Tensor> call_forward(const Inputs& inputs, const Options& options) {
  static const auto op = find_operator<decltype(unpacked<&forward_meta>)>("focalkern::sigmoid_loss_forward");
  return call_packed(op, inputs, options);
}

// sigmoid_loss_composite, which focalkern.fallback implements.
Tensor composite_loss(const Inputs& inputs, const Options& options) {
  static const auto op = find_operator<decltype(unpacked<&composite_loss>)>("focalkern::sigmoid_loss_composite");
  return call_packed(op, inputs, options);
}

// Options that the backward pass needs beside the variables, in one allocation: boxed values would take one each.
struct SavedOptions : torch::CustomClassHolder {
  Options options;
  Tensor gamma, second, weight;  // where they are numbers on the host, which nothing differentiates
};

struct SigmoidLossFunction : torch::autograd::Function<SigmoidLossFunction> {
  static torch::autograd::variable_list forward(torch::autograd::AutogradContext* ctx, const Tensor& input,
                                                const Tensor& target, const Tensor& gamma, const OptionalTensor& second,
                                                const OptionalTensor& weight, const Options& options) {
    const at::AutoDispatchBelowADInplaceOrView guard;
    auto [loss, divisor] = call_forward({input, target, gamma, second, weight}, options);
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
    torch::autograd::variable_list result(6);  // autograd wants as many gradients as forward has arguments
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
      const auto composite = [&](const auto& v) {
        return composite_loss({v[0], v[1], v[2], v[3].defined() ? OptionalTensor(v[3]) : std::nullopt, weight},
                              options);
      };
      differentiable_gradients<4>({input, target, gamma, second.value_or(Tensor())}, needed, grad, composite, result);
      return result;
    }
    static const auto op =
        find_operator<decltype(unpacked_backward<&backward_meta>)>("focalkern::sigmoid_loss_backward");
    auto [grad_input, grad_target, grad_gamma, grad_second] =
        op.call(grad, input, target, gamma, second, weight, divisor, static_cast<int64_t>(options.kind), options.margin,
                options.reduction, options.ignore_index, needed);
    if (needed[0]) result[0] = std::move(grad_input);
    if (needed[1]) result[1] = std::move(grad_target);
    if (needed[2]) result[2] = std::move(grad_gamma);
    if (needed[3]) result[3] = std::move(grad_second);
    return result;
  }
};

std::tuple<Tensor, Tensor> forward_autograd(const Inputs& inputs, const Options& options) {
  const auto& [input, target, gamma, second, weight] = inputs;
  auto outputs = SigmoidLossFunction::apply(input, target, gamma, second, weight, options);
  return {std::move(outputs[0]), std::move(outputs[1])};
}

// ---- the eager entry -----------------------------------------------------------------------------------------------

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
  const Options options = options_of(kind, margin, reduction, ignore_index, autocasts(input));
  const Inputs inputs{input, target, gamma_tensor, second_tensor, weight};
  const Tensor second_or_none = second_tensor.value_or(Tensor()), weight_or_none = weight.value_or(Tensor());
  if (needs_composite({&input, &target, &gamma_tensor, &second_or_none, &weight_or_none})) {
    check_arguments(inputs, options);
    return composite_loss(inputs, options);
  }
  check_device(names_of(options.kind).op, input);
  return std::get<0>(call_forward(inputs, options));
}

}  // namespace

void register_sigmoid_loss(torch::Library& definitions, pybind11::module_& module) {
  const std::vector<at::Tag> tags{at::Tag::pt2_compliant_tag};
  definitions.def(kSigmoidLossForwardSchema, tags);
  definitions.def(kSigmoidLossBackwardSchema, tags);
  definitions.def(kSigmoidLossCompositeSchema, tags);
  using c10::DispatchKey;
  definitions.impl("sigmoid_loss_forward", torch::dispatch(DispatchKey::CPU, &unpacked<&forward<Cpu>>));
  definitions.impl("sigmoid_loss_backward", torch::dispatch(DispatchKey::CPU, &unpacked_backward<&backward<Cpu>>));
#ifdef FOCALKERN_WITH_CUDA
  definitions.impl("sigmoid_loss_forward", torch::dispatch(DispatchKey::CUDA, &unpacked<&forward<Cuda>>));
  definitions.impl("sigmoid_loss_backward", torch::dispatch(DispatchKey::CUDA, &unpacked_backward<&backward<Cuda>>));
#endif
  definitions.impl("sigmoid_loss_forward", torch::dispatch(DispatchKey::Meta, &unpacked<&forward_meta>));
  definitions.impl("sigmoid_loss_backward", torch::dispatch(DispatchKey::Meta, &unpacked_backward<&backward_meta>));
  definitions.impl("sigmoid_loss_forward", torch::dispatch(DispatchKey::Autograd, &unpacked<&forward_autograd>));

  module.def("sigmoid_loss", &sigmoid_loss_entry);
}

}  // namespace focalkern::bindings
