// focal_loss and the other losses of rows: argument checks, kernel calls, autograd and the eager entry. They are one
// operator, told apart by `kind`; math/row_losses.def has a line for each.
//
//   focal_loss_forward    -> (loss, saved)   saved = [kSavedNumbers * rows + 1]: numbers of rows, then the divisor
//   focal_loss_backward   -> (grad_input, grad_target, grad_gamma), empty where not needed
//   focal_loss_composite  -> loss            in differentiable torch operations, by focalkern.fallback
//
// Derivatives of higher order, torch.func transforms and forward-mode tangents go through focal_loss_composite.

#include "bindings/row_loss.h"

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/scalar_tensor.h>
#include <c10/util/Exception.h>
#include <torch/csrc/autograd/custom_function.h>

#include <string>
#include <tuple>
#include <vector>

#include "math/row_losses.h"
#ifdef FOCALKERN_WITH_CUDA
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#endif

namespace focalkern::bindings {
namespace {

using Inputs = RowLossInputs;
using Options = RowLossOptions;

constexpr const char* kNames[] = {
#define FK_ROW_LOSS(number, Formula, name) name,
#include "math/row_losses.def"
};

// Calls f with the formula of the loss.
template <typename Function>
auto dispatch_loss(RowLoss kind, Function f) {
  switch (kind) {
#define FK_ROW_LOSS(number, Formula, name) \
  case RowLoss::number:                    \
    return f(Formula{});
#include "math/row_losses.def"
  }
  TORCH_INTERNAL_ASSERT(false, "no loss of this number");
}

const char* name_of(const Options& options) { return kNames[static_cast<int64_t>(options.kind)]; }

Options options_of(int64_t reduction, int64_t ignore_index, double label_smoothing, bool detach_modulation,
                   bool float32_loss, int64_t kind, double epsilon) {
  TORCH_CHECK_VALUE(kind >= 0 && kind < static_cast<int64_t>(std::size(kNames)), "focal_loss: kind must be in [0, ",
                    std::size(kNames), "), got ", kind);
  return {static_cast<RowLoss>(kind), epsilon,     reduction, ignore_index, label_smoothing,
          detach_modulation,          float32_loss};
}

int64_t saved_numbers(const Options& options) {
  return dispatch_loss(options.kind, [](auto loss) -> int64_t { return kSavedNumbers<decltype(loss)>; });
}

SoftTarget soft_target_of(const Options& options) {
  return dispatch_loss(options.kind, [](auto loss) { return decltype(loss)::kTarget; });
}

// Label smoothing of a loss whose kernels take labels without it.
bool has_no_kernel(const Options& options) {
  return options.label_smoothing != 0 && soft_target_of(options) == SoftTarget::kNone;
}

bool is_soft_target(const Tensor& target) { return target.is_floating_point(); }

// Shape of the unreduced loss: that of the input without its class dimension.
c10::SymDimVector loss_shape(const Tensor& input) {
  c10::SymDimVector shape(input.sym_sizes().begin(), input.sym_sizes().end());
  if (!shape.empty()) shape.erase(shape.begin() + class_dim_of(input));
  return shape;
}

// ---- checks, for real and for fake tensors alike -------------------------------------------------------------------

void check_gamma(const char* op, const Tensor& input, const Tensor& gamma, const OptionalTensor& edges) {
  TORCH_CHECK_TYPE(gamma.is_floating_point(), op, ": gamma must be a float, a floating-point tensor or a GammaTable, ",
                   "got a tensor of ", gamma.scalar_type());
  if (edges.has_value()) {
    TORCH_CHECK_TYPE(edges->is_floating_point(), op, ": gamma.edges must be floating point, got ",
                     edges->scalar_type());
    TORCH_CHECK_VALUE(
        gamma.dim() == 1 && edges->dim() == 1 && gamma.sym_size(0) >= 1 && edges->sym_size(0) == gamma.sym_size(0) + 1,
        op, ": gamma.edges must be [n_bins + 1] for gamma.gammas [n_bins], got ", edges->sym_sizes(), " and ",
        gamma.sym_sizes());
    check_same_device(op, "gamma.edges", *edges, input);
    check_same_device(op, "gamma.gammas", gamma, input);
    return;
  }
  if (is_host_number(gamma)) return;
  check_same_device(op, "gamma", gamma, input);
  const auto shape = loss_shape(input);
  bool fits = gamma.dim() <= static_cast<int64_t>(shape.size());
  for (int64_t d = 1; fits && d <= gamma.dim(); ++d) {
    const auto size = gamma.sym_size(-d);
    fits = size == 1 || size == shape[shape.size() - d];
  }
  TORCH_CHECK_VALUE(fits, op, ": gamma must be broadcastable to the unreduced loss ", c10::SymIntArrayRef(shape),
                    ", got ", gamma.sym_sizes());
}

void check_target(const Tensor& input, const Tensor& target, const Options& options) {
  const char* op = name_of(options);
  if (is_soft_target(target)) {
    TORCH_CHECK_TYPE(soft_target_of(options) != SoftTarget::kNone, op,
                     ": target must be labels, int64, int32 or uint8, got ", target.scalar_type());
    check_floating(op, "target", target);
    TORCH_CHECK_VALUE(target.sym_sizes() == input.sym_sizes(), op,
                      ": target of class probabilities must have the shape of input, ", input.sym_sizes(), ", got ",
                      target.sym_sizes());
    TORCH_CHECK_VALUE(options.ignore_index < 0, op,
                      ": ignore_index must be negative (unused) for a target of class probabilities, got ",
                      options.ignore_index);
    return;
  }
  const auto type = target.scalar_type();
  TORCH_CHECK_TYPE(type == at::kLong || type == at::kInt || type == at::kByte, op,
                   ": target must be int64, int32 or uint8 labels or floating-point class probabilities, got ", type);
  const auto shape = loss_shape(input);
  if (target.sym_sizes() == c10::SymIntArrayRef(shape)) return;
  std::string names = "[]";
  if (input.dim() == 2) names = "[N]";
  if (input.dim() > 2) names = "[N, d1, ...]";
  TORCH_CHECK_VALUE(false, op, ": target must be ", names, " = ", c10::SymIntArrayRef(shape), ", got ",
                    target.sym_sizes());
}

void check_arguments(const Inputs& inputs, const Options& options) {
  const auto& [input, target, gamma, edges, weight] = inputs;
  const char* op = name_of(options);
  check_floating(op, "input", input);
  TORCH_CHECK_VALUE(input.dim() >= 1, op, ": input must be [C], [N, C] or [N, C, d1, ...], got a scalar");
  const auto classes = input.sym_size(class_dim_of(input));
  TORCH_CHECK_VALUE(classes >= 1, op, ": input must have at least one class, got shape ", input.sym_sizes());
  check_same_device(op, "target", target, input);
  check_target(input, target, options);
  check_gamma(op, input, gamma, edges);
  if (weight.has_value()) {
    check_floating(op, "weight", *weight);
    TORCH_CHECK_VALUE(weight->dim() == 1 && weight->sym_size(0) == classes, op, ": weight must be [C] = [", classes,
                      "], got ", weight->sym_sizes());
    check_same_device(op, "weight", *weight, input);
    TORCH_CHECK_VALUE(!weight->requires_grad(), op, ": weight must not require grad: it is a constant of the loss");
  }
  TORCH_CHECK_VALUE(options.label_smoothing >= 0 && options.label_smoothing <= 1, op,
                    ": label_smoothing must be in [0, 1], got ", options.label_smoothing);
  TORCH_CHECK_VALUE(options.reduction >= kNone && options.reduction <= kSum, op,
                    ": reduction must be 0 (none), 1 (mean) or 2 (sum), got ", options.reduction);
}

[[noreturn]] void raise_invalid_label(const char* op, const Tensor& target, int64_t row, int64_t classes) {
  TORCH_CHECK_INDEX(false, op, ": target must be in [0, ", classes, ") or ignore_index, got ", labels_of(target)[row],
                    " at row ", row);
}

void check_labels_on_device(const char* op, const Tensor& target, int64_t classes, int64_t ignore_index) {
  const Tensor labels = target.reshape({-1}).to(at::kLong);
  const Tensor invalid = labels.ne(ignore_index).logical_and_(labels.lt(0).logical_or_(labels.ge(classes))).nonzero();
  if (invalid.numel() == 0) return;
  raise_invalid_label(op, labels.cpu(), invalid[0].item<int64_t>(), classes);
}

// ---- from tensors to kernel arguments ------------------------------------------------------------------------------

// Copies that the kernels' contract asks for are kept alive here; tensors that fit are taken as they lie.
template <typename Scalar>
struct Prepared {
  Tensor input, target, gamma, edges, weight;
  RowLossArgs<Scalar> args{};
};

Tensor with_row_layout(const Tensor& tensor, int64_t class_dim, RowLayout* layout) {
  auto found = row_layout(tensor, class_dim);
  if (found) {
    *layout = *found;
    return tensor;
  }
  const Tensor copy = tensor.contiguous();
  *layout = *row_layout(copy, class_dim);
  return copy;
}

template <typename Scalar>
Prepared<Scalar> prepare(const Inputs& inputs, const Options& options) {
  const auto& [input, target, gamma, edges, weight] = inputs;
  using Real = compute_t<Scalar>;
  const auto real = compute_dtype(input.scalar_type());
  const int64_t class_dim = class_dim_of(input);
  Prepared<Scalar> p;
  auto& args = p.args;
  args.classes = input.size(class_dim);
  args.rows = input.numel() / args.classes;
  p.input = with_row_layout(input, class_dim, &args.layout);
  args.logits = static_cast<const Scalar*>(p.input.const_data_ptr());
  if (is_soft_target(target)) {
    p.target = with_row_layout(as_dtype(target, real), class_dim, &args.target_layout);
    args.target_probs = static_cast<const Real*>(p.target.const_data_ptr());
  } else {
    p.target = target.contiguous();
    args.labels = labels_of(p.target);
  }
  args.ignore_index = options.ignore_index;
  args.label_smoothing = static_cast<Real>(options.label_smoothing);
  args.detach_modulation = options.detach_modulation;
  args.epsilon = static_cast<Real>(options.epsilon);
  if (weight.has_value()) {
    p.weight = as_dtype(*weight, real).contiguous();
    args.class_weight = static_cast<const Real*>(p.weight.const_data_ptr());
  }
  if (edges.has_value()) {
    p.edges = edges->to(real).contiguous();
    p.gamma = gamma.to(real).contiguous();
    args.edges = static_cast<const Real*>(p.edges.const_data_ptr());
    args.n_bins = gamma.numel();
    args.gamma = static_cast<const Real*>(p.gamma.const_data_ptr());
  } else if (is_host_number(gamma)) {
    args.gamma_value = gamma.item<Real>();
  } else {
    const bool single = gamma.numel() == 1;
    p.gamma = (single ? gamma : gamma.expand(C10_AS_INTARRAYREF_SLOW(loss_shape(input)))).to(real).contiguous();
    args.gamma = static_cast<const Real*>(p.gamma.const_data_ptr());
    args.gamma_stride = single ? 0 : 1;
  }
  return p;
}

// ---- kernels -------------------------------------------------------------------------------------------------------

Tensor empty_saved(const Tensor& input, const Options& options) {
  const auto rows = input.sym_numel() / input.sym_size(class_dim_of(input));
  return at::empty_symint({rows * saved_numbers(options) + 1},
                          input.options().dtype(compute_dtype(input.scalar_type())));
}

// A device reads labels where that is free, allocates what its kernels need beside the results, and launches them.
struct Cpu {
  struct Guard {
    explicit Guard(c10::Device /* device */) {}
  };
  static void check_labels(const Inputs& /* inputs */, const Options& /* options */) {}  // the kernels do

  template <typename Scalar>
  static void forward(RowLossForward<Scalar>& args, const Prepared<Scalar>& prepared, const Options& options,
                      const Tensor& loss) {
    using Real = compute_t<Scalar>;
    const int64_t chunk_rows = cpu::row_loss_chunk_rows(args.rows, args.classes);
    const int64_t n_chunks = (args.rows + chunk_rows - 1) / chunk_rows;
    std::vector<RowLossSums> chunks(n_chunks);
    dispatch_loss(options.kind, [&](auto formula) {
      using Loss = decltype(formula);
      at::parallel_for(0, n_chunks, 1, [&](int64_t begin, int64_t end) {
        for (int64_t i = begin; i < end; ++i) {
          chunks[i] = cpu::row_loss_forward<Loss>(args, i * chunk_rows, std::min(args.rows, (i + 1) * chunk_rows));
        }
      });
    });
    double total = 0, divisor = 0;
    for (const auto& chunk : chunks) {
      if (chunk.invalid_row >= 0)
        raise_invalid_label(name_of(options), prepared.target, chunk.invalid_row, args.classes);
      total += chunk.loss;
      divisor += chunk.weight;
    }
    if (options.reduction == kMean) total /= divisor;
    if (options.reduction != kNone) *static_cast<Real*>(loss.mutable_data_ptr()) = static_cast<Real>(total);
    args.saved[saved_numbers(options) * args.rows] = static_cast<Real>(divisor);
  }

  template <typename Scalar>
  static void backward(const RowLossBackward<Scalar>& args, const Options& options) {
    const int64_t chunk_rows = cpu::row_loss_chunk_rows(args.rows, args.classes);
    const int64_t n_chunks = (args.rows + chunk_rows - 1) / chunk_rows;
    dispatch_loss(options.kind, [&](auto formula) {
      using Loss = decltype(formula);
      at::parallel_for(0, n_chunks, 1, [&](int64_t begin, int64_t end) {
        // Backwards: what the forward pass read last may still be in the cache, and the gradient evicts the rest first.
        for (int64_t i = end - 1; i >= begin; --i) {
          cpu::row_loss_backward<Loss>(args, i * chunk_rows, std::min(args.rows, (i + 1) * chunk_rows));
        }
      });
    });
  }
};

#ifdef FOCALKERN_WITH_CUDA
struct Cuda {
  using Guard = c10::cuda::CUDAGuard;

  static void check_labels(const Inputs& inputs, const Options& options) {
    if (!validation_requested() || is_soft_target(inputs.target)) return;
    const int64_t classes = inputs.input.size(class_dim_of(inputs.input));
    check_labels_on_device(name_of(options), inputs.target, classes, options.ignore_index);
  }

  template <typename Scalar>
  static void forward(RowLossForward<Scalar>& args, const Prepared<Scalar>& prepared, const Options& options,
                      const Tensor& loss) {
    using Real = compute_t<Scalar>;
    const bool mean = options.reduction == kMean;
    Real* reduced = options.reduction == kNone ? nullptr : static_cast<Real*>(loss.mutable_data_ptr());
    Tensor workspace;
    const int64_t bytes = cuda::focal_loss_workspace(args.rows, args.classes, options.reduction != kNone);
    if (bytes > 0) workspace = at::empty({bytes}, prepared.input.options().dtype(at::kByte));
    void* scratch = workspace.defined() ? workspace.mutable_data_ptr() : nullptr;
    Real* divisor = args.saved + saved_numbers(options) * args.rows;
    void* stream = c10::cuda::getCurrentCUDAStream().stream();
    dispatch_loss(options.kind, [&](auto formula) {
      const int error = cuda::row_loss_forward<decltype(formula)>(args, mean, reduced, divisor, scratch, stream);
      C10_CUDA_CHECK(static_cast<cudaError_t>(error));
    });
  }

  template <typename Scalar>
  static void backward(const RowLossBackward<Scalar>& args, const Options& options) {
    void* stream = c10::cuda::getCurrentCUDAStream().stream();
    dispatch_loss(options.kind, [&](auto formula) {
      const int error = cuda::row_loss_backward<decltype(formula)>(args, stream);
      C10_CUDA_CHECK(static_cast<cudaError_t>(error));
    });
  }
};
#endif  // FOCALKERN_WITH_CUDA

template <typename Device>
std::tuple<Tensor, Tensor> forward(const Inputs& inputs, const Options& options) {
  check_arguments(inputs, options);
  const Tensor& input = inputs.input;
  const typename Device::Guard guard(input.device());
  Device::check_labels(inputs, options);
  const Tensor saved = empty_saved(input, options);
  const bool unreduced = options.reduction == kNone;
  const Tensor loss =
      at::empty(unreduced ? C10_AS_INTARRAYREF_SLOW(loss_shape(input)) : at::IntArrayRef(), saved.options());
  dispatch_scalar(input.scalar_type(), [&](auto scalar) {
    using Scalar = decltype(scalar);
    using Real = compute_t<Scalar>;
    const auto prepared = prepare<Scalar>(inputs, options);
    RowLossForward<Scalar> args{prepared.args, nullptr};
    args.saved = static_cast<Real*>(saved.mutable_data_ptr());
    if (unreduced) args.row_loss = static_cast<Real*>(loss.mutable_data_ptr());
    Device::forward(args, prepared, options, loss);
  });
  return {as_dtype(loss, result_dtype(input, options.float32_loss)), saved};
}

template <typename Device>
std::tuple<Tensor, Tensor, Tensor> backward(const Tensor& grad, const Inputs& inputs, const Tensor& saved,
                                            const Options& options, std::array<bool, 3> needed) {
  check_arguments(inputs, options);
  const auto& [input, target, gamma, edges, weight] = inputs;
  const typename Device::Guard guard(input.device());
  const char* op = name_of(options);
  const int64_t numbers = saved_numbers(options);
  const auto real = compute_dtype(input.scalar_type());
  const int64_t classes = input.size(class_dim_of(input));
  const int64_t rows = input.numel() / classes;
  const auto shape = options.reduction == kNone ? loss_shape(input) : c10::SymDimVector();
  TORCH_CHECK_VALUE(grad.sym_sizes() == c10::SymIntArrayRef(shape), op, ": grad must have the shape of the loss, ",
                    c10::SymIntArrayRef(shape), ", got ", grad.sym_sizes());
  TORCH_CHECK_VALUE(
      saved.dim() == 1 && saved.numel() == numbers * rows + 1 && saved.scalar_type() == real && saved.is_contiguous(),
      op, ": saved must be what the forward pass returned for this input");
  TORCH_CHECK_VALUE(!edges || !needed[2], op, ": the gammas of a table have no gradient, and needed[2] asks for it");
  check_same_device(op, "grad", grad, input);
  check_same_device(op, "saved", saved, input);
  Tensor grad_input = at::empty({0}, input.options());
  Tensor grad_target = at::empty({0}, input.options().dtype(real));
  Tensor grad_gamma = at::empty({0}, input.options().dtype(real));
  dispatch_scalar(input.scalar_type(), [&](auto scalar) {
    using Scalar = decltype(scalar);
    using Real = compute_t<Scalar>;
    auto prepared = prepare<Scalar>(inputs, options);
    RowLossBackward<Scalar> args{};
    const int64_t class_dim = class_dim_of(input);
    // Where the kernel writes; not the gradient itself if that has strides which no RowLayout describes.
    Tensor input_buffer, target_buffer;
    if (needed[0]) {
      grad_input = empty_result_like(input, input.scalar_type());
      input_buffer =
          row_layout(grad_input, class_dim) ? grad_input : empty_result_like(prepared.input, input.scalar_type());
      args.grad_logits = static_cast<Scalar*>(input_buffer.mutable_data_ptr());
    }
    if (needed[1]) {
      // The kernel knows one layout for the target and its gradient, which an expanded target cannot lend.
      if (!prepared.target.is_non_overlapping_and_dense()) {
        prepared.target = prepared.target.contiguous();
        prepared.args.target_layout = *row_layout(prepared.target, class_dim);
        prepared.args.target_probs = static_cast<const Real*>(prepared.target.const_data_ptr());
      }
      grad_target = at::empty_like(target, target.options().dtype(real));
      const bool same_layout = grad_target.strides() == prepared.target.strides();
      target_buffer = same_layout ? grad_target : at::empty_like(prepared.target);
      args.grad_target = static_cast<Real*>(target_buffer.mutable_data_ptr());
    }
    if (needed[2]) {
      grad_gamma = at::empty(C10_AS_INTARRAYREF_SLOW(loss_shape(input)), input.options().dtype(real));
      args.grad_gamma = static_cast<Real*>(grad_gamma.mutable_data_ptr());
    }
    static_cast<RowLossArgs<Scalar>&>(args) = prepared.args;
    if (needed[0]) args.grad_layout = *row_layout(input_buffer, class_dim);
    args.saved = static_cast<Real*>(const_cast<void*>(saved.const_data_ptr()));
    if (options.reduction == kMean) args.divisor = args.saved + numbers * rows;
    Tensor upstream = as_dtype(grad, real);
    args.grad_stride = options.reduction == kNone ? 1 : 0;
    if (args.grad_stride) upstream = upstream.contiguous();
    args.grad_loss = static_cast<const Real*>(upstream.const_data_ptr());
    if (rows > 0) Device::backward(args, options);
    if (needed[0] && !input_buffer.is_same(grad_input)) grad_input.copy_(input_buffer);
    if (needed[1] && !target_buffer.is_same(grad_target)) grad_target.copy_(target_buffer);
  });
  if (needed[1]) grad_target = as_dtype(grad_target, target.scalar_type());
  if (needed[2]) grad_gamma = grad_gamma.sum_to_size(gamma.sizes()).to(gamma.options());
  return {grad_input, grad_target, grad_gamma};
}

std::tuple<Tensor, Tensor> forward_meta(const Inputs& inputs, const Options& options) {
  check_arguments(inputs, options);
  const Tensor& input = inputs.input;
  const auto shape = options.reduction == kNone ? loss_shape(input) : c10::SymDimVector();
  return {at::empty_symint(shape, input.options().dtype(result_dtype(input, options.float32_loss))),
          empty_saved(input, options)};
}

std::tuple<Tensor, Tensor, Tensor> backward_meta(const Tensor& /* grad */, const Inputs& inputs,
                                                 const Tensor& /* saved */, const Options& /* options */,
                                                 std::array<bool, 3> needed) {
  const auto& [input, target, gamma, edges, weight] = inputs;
  const auto absent = [&](at::ScalarType dtype) { return at::empty({0}, inputs.input.options().dtype(dtype)); };
  const auto real = compute_dtype(input.scalar_type());
  return {needed[0] ? at::empty_like(input) : absent(input.scalar_type()),
          needed[1] ? at::empty_like(target) : absent(real),
          needed[2] ? at::empty_like(gamma, gamma.options(), at::MemoryFormat::Contiguous) : absent(real)};
}

// ---- autograd ------------------------------------------------------------------------------------------------------

// The dispatcher's arguments of the forward pass (and of the composite), and of the backward pass, packed: for every
// dispatch key.
template <auto function>
auto unpacked(const Tensor& input, const Tensor& target, const Tensor& gamma, const OptionalTensor& edges,
              const OptionalTensor& weight, int64_t reduction, int64_t ignore_index, double label_smoothing,
              bool detach_modulation, bool float32_loss, int64_t kind, double epsilon) {
  return function(Inputs{input, target, gamma, edges, weight},
                  options_of(reduction, ignore_index, label_smoothing, detach_modulation, float32_loss, kind, epsilon));
}

template <auto function>
auto unpacked_backward(const Tensor& grad, const Tensor& input, const Tensor& target, const Tensor& gamma,
                       const OptionalTensor& edges, const OptionalTensor& weight, const Tensor& saved,
                       int64_t reduction, int64_t ignore_index, double label_smoothing, bool detach_modulation,
                       std::array<bool, 3> needed, int64_t kind, double epsilon) {
  return function(
      grad, Inputs{input, target, gamma, edges, weight}, saved,
      options_of(reduction, ignore_index, label_smoothing, detach_modulation, /*float32_loss=*/false, kind, epsilon),
      needed);
}

using ForwardSignature = decltype(unpacked<&forward_meta>);
using BackwardSignature = decltype(unpacked_backward<&backward_meta>);

template <typename Operator>
auto call_packed(const Operator& op, const Inputs& inputs, const Options& options) {
  return op.call(inputs.input, inputs.target, inputs.gamma, inputs.edges, inputs.weight, options.reduction,
                 options.ignore_index, options.label_smoothing, options.detach_modulation, options.float32_loss,
                 static_cast<int64_t>(options.kind), options.epsilon);
}

// focal_loss_composite, which focalkern.fallback implements.
Tensor composite_loss(const Inputs& inputs, const Options& options) {
  static const auto op = find_operator<decltype(unpacked<&composite_loss>)>("focalkern::focal_loss_composite");
  return call_packed(op, inputs, options);
}

// Options that the backward pass needs beside the variables, in one allocation: boxed values would take one each.
struct SavedOptions : torch::CustomClassHolder {
  Options options;
  bool has_edges;
  bool has_weight;
  Tensor number;  // gamma where it is a constant number on the host, else undefined
};

struct FocalLossFunction : torch::autograd::Function<FocalLossFunction> {
  static torch::autograd::variable_list forward(torch::autograd::AutogradContext* ctx, const Tensor& input,
                                                const Tensor& target, const Tensor& gamma, const OptionalTensor& edges,
                                                const OptionalTensor& weight, const Options& options) {
    const at::AutoDispatchBelowADInplaceOrView guard;
    auto [loss, saved] = call_row_loss_forward({input, target, gamma, edges, weight}, options);
    auto stored = c10::make_intrusive<SavedOptions>();
    stored->options = options;
    stored->has_edges = edges.has_value();
    stored->has_weight = weight.has_value();
    torch::autograd::variable_list variables{input, target, saved};
    if (is_host_number(gamma) && !gamma.requires_grad()) {
      stored->number = gamma;
    } else {
      variables.push_back(gamma);
    }
    if (edges.has_value()) variables.push_back(*edges);
    if (weight.has_value()) variables.push_back(*weight);
    ctx->save_for_backward(std::move(variables));
    ctx->saved_data["options"] = c10::IValue::make_capsule(std::move(stored));
    ctx->mark_non_differentiable({saved});
    ctx->set_materialize_grads(false);  // or a zero gradient of `saved` would be filled in for every backward pass
    return {loss, saved};
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
    size_t next = 3;
    const Tensor &input = variables[0], &target = variables[1], &saved = variables[2];
    const Tensor& gamma = stored.number.defined() ? stored.number : variables[next++];
    const OptionalTensor edges = stored.has_edges ? OptionalTensor(variables[next++]) : std::nullopt;
    const OptionalTensor weight = stored.has_weight ? OptionalTensor(variables[next++]) : std::nullopt;
    // A tabulated gamma and a detached factor are constants.
    const bool gamma_is_variable = !edges.has_value() && !options.detach_modulation;
    const std::array<bool, 3> needed{ctx->needs_input_grad(0), ctx->needs_input_grad(1) && is_soft_target(target),
                                     ctx->needs_input_grad(2) && gamma_is_variable};
    if (c10::GradMode::is_enabled()) {
      differentiable_gradients<3>(
          {input, target, gamma}, needed, grad,
          [&](const auto& v) { return composite_loss({v[0], v[1], v[2], edges, weight}, options); }, result);
      return result;
    }
    auto [grad_input, grad_target, grad_gamma] =
        call_row_loss_backward(grad, {input, target, gamma, edges, weight}, saved, options, needed);
    if (needed[0]) result[0] = std::move(grad_input);
    if (needed[1]) result[1] = std::move(grad_target);
    if (needed[2]) result[2] = std::move(grad_gamma);
    return result;
  }
};

std::tuple<Tensor, Tensor> forward_autograd(const Inputs& inputs, const Options& options) {
  const auto& [input, target, gamma, edges, weight] = inputs;
  auto outputs = FocalLossFunction::apply(input, target, gamma, edges, weight, options);
  return {std::move(outputs[0]), std::move(outputs[1])};
}

// ---- the eager entry -----------------------------------------------------------------------------------------------

Tensor row_loss(Tensor input, const Tensor& target, const Tensor& gamma, const OptionalTensor& edges,
                const OptionalTensor& weight, Options options) {
  options.float32_loss = autocasts(input);
  if (target.is_floating_point() && target.scalar_type() != input.scalar_type()) {
    // The loss has the dtype that logits and target probabilities promote to, as in torch.
    const bool is_half = compute_dtype(input.scalar_type()) != input.scalar_type();
    const auto common = c10::promoteTypes(input.scalar_type(), target.scalar_type());
    if (common == at::kDouble) input = input.to(common);
    options.float32_loss = is_half && common == at::kFloat;
  }
  const Inputs inputs{input, target, gamma, edges, weight};
  const bool is_transformed = needs_composite({&input, &target, &gamma});
  if (is_transformed || has_no_kernel(options)) {
    check_arguments(inputs, options);
    if (!is_transformed) {
      check_device(name_of(options), input);
      if (input.is_cpu() || (validation_requested() && !input.is_meta())) {
        check_labels_on_device(name_of(options), target, input.size(class_dim_of(input)), options.ignore_index);
      }
    }
    return composite_loss(inputs, options);
  }
  check_device(name_of(options), input);
  return std::get<0>(call_row_loss_forward(inputs, options));
}

// gamma is a Python number or a tensor; the function is called with the GIL held.
Tensor row_loss_entry(const Tensor& input, const Tensor& target, const pybind11::object& gamma,
                      const OptionalTensor& edges, const OptionalTensor& weight, int64_t reduction,
                      int64_t ignore_index, double label_smoothing, bool detach_modulation, int64_t kind,
                      double epsilon) {
  const Tensor gamma_tensor = PyFloat_Check(gamma.ptr())
                                  ? at::scalar_tensor(PyFloat_AS_DOUBLE(gamma.ptr()), at::kDouble)
                                  : gamma.cast<Tensor>();
  const pybind11::gil_scoped_release release;
  return row_loss(
      input, target, gamma_tensor, edges, weight,
      options_of(reduction, ignore_index, label_smoothing, detach_modulation, /*float32_loss=*/false, kind, epsilon));
}

Tensor focal_loss_entry(const Tensor& input, const Tensor& target, const pybind11::object& gamma,
                        const OptionalTensor& edges, const OptionalTensor& weight, int64_t reduction,
                        int64_t ignore_index, double label_smoothing, bool detach_modulation) {
  return row_loss_entry(input, target, gamma, edges, weight, reduction, ignore_index, label_smoothing,
                        detach_modulation, static_cast<int64_t>(RowLoss::kFocal), /*epsilon=*/0);
}

}  // namespace

std::tuple<Tensor, Tensor> call_row_loss_forward(const RowLossInputs& inputs, const RowLossOptions& options) {
  static const auto op = find_operator<ForwardSignature>("focalkern::focal_loss_forward");
  return call_packed(op, inputs, options);
}

std::tuple<Tensor, Tensor, Tensor> call_row_loss_backward(const Tensor& grad, const RowLossInputs& inputs,
                                                          const Tensor& saved, const RowLossOptions& options,
                                                          std::array<bool, 3> needed) {
  static const auto op = find_operator<BackwardSignature>("focalkern::focal_loss_backward");
  return op.call(grad, inputs.input, inputs.target, inputs.gamma, inputs.edges, inputs.weight, saved, options.reduction,
                 options.ignore_index, options.label_smoothing, options.detach_modulation, needed,
                 static_cast<int64_t>(options.kind), options.epsilon);
}

void register_focal_loss(torch::Library& definitions, pybind11::module_& module) {
  const std::vector<at::Tag> tags{at::Tag::pt2_compliant_tag};
  definitions.def(kFocalLossForwardSchema, tags);
  definitions.def(kFocalLossBackwardSchema, tags);
  definitions.def(kFocalLossCompositeSchema, tags);
  using c10::DispatchKey;
  definitions.impl("focal_loss_forward", torch::dispatch(DispatchKey::CPU, &unpacked<&forward<Cpu>>));
  definitions.impl("focal_loss_backward", torch::dispatch(DispatchKey::CPU, &unpacked_backward<&backward<Cpu>>));
#ifdef FOCALKERN_WITH_CUDA
  definitions.impl("focal_loss_forward", torch::dispatch(DispatchKey::CUDA, &unpacked<&forward<Cuda>>));
  definitions.impl("focal_loss_backward", torch::dispatch(DispatchKey::CUDA, &unpacked_backward<&backward<Cuda>>));
#endif
  definitions.impl("focal_loss_forward", torch::dispatch(DispatchKey::Meta, &unpacked<&forward_meta>));
  definitions.impl("focal_loss_backward", torch::dispatch(DispatchKey::Meta, &unpacked_backward<&backward_meta>));
  definitions.impl("focal_loss_forward", torch::dispatch(DispatchKey::Autograd, &unpacked<&forward_autograd>));

  module.def("focal_loss", &focal_loss_entry);
  module.def("row_loss", &row_loss_entry);
  module.def("row_losses", [] { return std::vector<std::string>(std::begin(kNames), std::end(kNames)); });
}

}  // namespace focalkern::bindings
