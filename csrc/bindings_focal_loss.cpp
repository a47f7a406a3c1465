// focal_loss and the other losses of rows: argument checks, kernel calls, autograd and the eager entry. They are one
// operator, told apart by `kind`; kLosses and dispatch_loss have a line for each.
//
//   focal_loss_forward    -> (loss, saved)   saved = [kSavedNumbers * rows + 1]: numbers of rows, then the mean's
//   divisor focal_loss_backward   -> (grad_input, grad_target, grad_gamma), empty where not needed
//
// Derivatives of higher order, torch.func transforms and forward-mode tangents go through `composite_loss`, the same
// loss written in differentiable torch operations.

#include <ATen/Parallel.h>
#include <ATen/autocast_mode.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/alias.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/constant_pad_nd.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/full.h>
#include <ATen/ops/log_sigmoid.h>
#include <ATen/ops/log_softmax.h>
#include <ATen/ops/scalar_tensor.h>
#include <ATen/ops/searchsorted.h>
#include <ATen/ops/where.h>
#include <c10/util/Exception.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/custom_function.h>

#include <limits>
#include <string>
#include <tuple>
#include <vector>

#include "bindings.h"
#include "math/brier.h"
#include "math/dual_focal.h"
#include "math/mmce.h"
#include "math/poly_focal.h"
#include "math/row_loss.h"
#ifdef FOCALKERN_WITH_CUDA
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#endif

namespace focalkern::bindings {
namespace {

enum Reduction : int64_t { kNone = 0, kMean = 1, kSum = 2 };

struct Options {
  int64_t kind;
  double epsilon;  // of the poly focal loss
  int64_t reduction;
  int64_t ignore_index;
  double label_smoothing;
  bool detach_modulation;
  bool float32_loss;  // a half-precision loss is returned as float32, as autocast wants it
};

using OptionalTensor = std::optional<Tensor>;

// A batch in differentiable torch operations: see composite_loss.
struct Batch {
  int64_t dim;            // of the classes
  Tensor logits;          // in the type of the computation, as everything
  Tensor q, log_q;        // softmax
  Tensor u, log_u;        // 1 - q
  Tensor target;          // shares t of the classes, with label smoothing
  OptionalTensor weight;  // of the classes, shaped like them
  Tensor row_weight;  // of the rows without their class dim: of the label, or the mean under the target; or undefined
  Tensor gamma;       // of the classes, or one number
  Options options;
};

Tensor focal_rows(const Batch& batch);
Tensor poly_focal_rows(const Batch& batch);
Tensor dual_focal_rows(const Batch& batch);
Tensor brier_rows(const Batch& batch);
Tensor mmce_rows(const Batch& batch);

struct LossEntry {
  const char* name;              // in error messages
  Tensor (*rows)(const Batch&);  // the losses of a batch, unreduced
};

// In the order of `kind`.
constexpr LossEntry kLosses[] = {
    {"focal_loss", focal_rows},
    {"poly_focal_loss", poly_focal_rows},
    {"DualFocalLoss", dual_focal_rows},
    {"BrierLoss", brier_rows},
    {"MMCELoss", mmce_rows},
};

template <typename Function>
void dispatch_loss(int64_t kind, Function f) {
  switch (kind) {
    case 1:
      return f(PolyFocalRow{});
    case 2:
      return f(DualFocalRow{});
    case 3:
      return f(BrierRow{});
    case 4:
      return f(MmceRow{});
    default:
      return f(FocalRow{});
  }
}

const char* name_of(const Options& options) { return kLosses[options.kind].name; }

Options options_of(int64_t reduction, int64_t ignore_index, double label_smoothing, bool detach_modulation,
                   bool float32_loss, int64_t kind, double epsilon) {
  TORCH_CHECK_VALUE(kind >= 0 && kind < static_cast<int64_t>(std::size(kLosses)), "focal_loss: kind must be in [0, ",
                    std::size(kLosses), "), got ", kind);
  return {kind, epsilon, reduction, ignore_index, label_smoothing, detach_modulation, float32_loss};
}

int64_t saved_numbers(const Options& options) {
  int64_t count = 0;
  dispatch_loss(options.kind, [&](auto loss) { count = kSavedNumbers<decltype(loss)>; });
  return count;
}

SoftTarget soft_target_of(const Options& options) {
  SoftTarget found{};
  dispatch_loss(options.kind, [&](auto loss) { found = decltype(loss)::kTarget; });
  return found;
}

// Label smoothing of a loss whose kernels take labels without it.
bool has_no_kernel(const Options& options) {
  return options.label_smoothing != 0 && soft_target_of(options) == SoftTarget::kNone;
}

bool is_soft_target(const Tensor& target) { return target.is_floating_point(); }

int64_t class_dim_of(const Tensor& input) { return input.dim() == 1 ? 0 : 1; }

// Shape of the unreduced loss: that of the input without its class dimension.
c10::SymDimVector loss_shape(const Tensor& input) {
  c10::SymDimVector shape(input.sym_sizes().begin(), input.sym_sizes().end());
  if (!shape.empty()) shape.erase(shape.begin() + class_dim_of(input));
  return shape;
}

at::ScalarType loss_dtype(const Tensor& input, const Options& options) {
  return options.float32_loss ? compute_dtype(input.scalar_type()) : input.scalar_type();
}

// Without the dispatcher's half microsecond where there is nothing to convert.
Tensor as_dtype(const Tensor& tensor, at::ScalarType dtype) {
  return tensor.scalar_type() == dtype ? tensor : tensor.to(dtype);
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
  // One number may stay on the host: it becomes a kernel argument.
  if (gamma.dim() == 0 && gamma.device().is_cpu()) return;
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

void check_arguments(const Tensor& input, const Tensor& target, const Tensor& gamma, const OptionalTensor& edges,
                     const OptionalTensor& weight, const Options& options) {
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
  FocalLossArgs<Scalar> args{};
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
Prepared<Scalar> prepare(const Tensor& input, const Tensor& target, const Tensor& gamma, const OptionalTensor& edges,
                         const OptionalTensor& weight, const Options& options) {
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
  } else if (gamma.dim() == 0 && gamma.device().is_cpu()) {
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

std::tuple<Tensor, Tensor> forward_cpu(const Tensor& input, const Tensor& target, const Tensor& gamma,
                                       const OptionalTensor& edges, const OptionalTensor& weight, int64_t reduction,
                                       int64_t ignore_index, double label_smoothing, bool detach_modulation,
                                       bool float32_loss, int64_t kind, double epsilon) {
  const Options options =
      options_of(reduction, ignore_index, label_smoothing, detach_modulation, float32_loss, kind, epsilon);
  check_arguments(input, target, gamma, edges, weight, options);
  const Tensor saved = empty_saved(input, options);
  Tensor loss =
      at::empty(reduction == kNone ? C10_AS_INTARRAYREF_SLOW(loss_shape(input)) : at::IntArrayRef(), saved.options());
  dispatch_scalar(input.scalar_type(), [&](auto scalar) {
    using Scalar = decltype(scalar);
    using Real = compute_t<Scalar>;
    const auto prepared = prepare<Scalar>(input, target, gamma, edges, weight, options);
    FocalLossForward<Scalar> args{prepared.args, nullptr};
    args.saved = static_cast<Real*>(saved.mutable_data_ptr());
    if (reduction == kNone) args.row_loss = static_cast<Real*>(loss.mutable_data_ptr());

    const int64_t chunk_rows = cpu::row_loss_chunk_rows(args.rows, args.classes);
    const int64_t n_chunks = (args.rows + chunk_rows - 1) / chunk_rows;
    std::vector<FocalLossSums> chunks(n_chunks);
    dispatch_loss(kind, [&](auto loss_kind) {
      using Loss = decltype(loss_kind);
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
    if (reduction == kMean) total /= divisor;
    if (reduction != kNone) *static_cast<Real*>(loss.mutable_data_ptr()) = static_cast<Real>(total);
    args.saved[saved_numbers(options) * args.rows] = static_cast<Real>(divisor);
  });
  return {as_dtype(loss, loss_dtype(input, options)), saved};
}

// What both devices' backward passes need; `launch` receives the finished argument struct.
template <typename Launch>
std::tuple<Tensor, Tensor, Tensor> backward(const Tensor& grad, const Tensor& input, const Tensor& target,
                                            const Tensor& gamma, const OptionalTensor& edges,
                                            const OptionalTensor& weight, const Tensor& saved, const Options& options,
                                            std::array<bool, 3> needed, Launch launch) {
  check_arguments(input, target, gamma, edges, weight, options);
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
    auto prepared = prepare<Scalar>(input, target, gamma, edges, weight, options);
    FocalLossBackward<Scalar> args{};
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
    static_cast<FocalLossArgs<Scalar>&>(args) = prepared.args;
    if (needed[0]) args.grad_layout = *row_layout(input_buffer, class_dim);
    args.saved = static_cast<Real*>(const_cast<void*>(saved.const_data_ptr()));
    if (options.reduction == kMean) args.divisor = args.saved + numbers * rows;
    Tensor upstream = as_dtype(grad, real);
    args.grad_stride = options.reduction == kNone ? 1 : 0;
    if (args.grad_stride) upstream = upstream.contiguous();
    args.grad_loss = static_cast<const Real*>(upstream.const_data_ptr());
    if (rows > 0) launch(args);
    if (needed[0] && !input_buffer.is_same(grad_input)) grad_input.copy_(input_buffer);
    if (needed[1] && !target_buffer.is_same(grad_target)) grad_target.copy_(target_buffer);
  });
  if (needed[1]) grad_target = as_dtype(grad_target, target.scalar_type());
  if (needed[2]) grad_gamma = grad_gamma.sum_to_size(gamma.sizes()).to(gamma.options());
  return {grad_input, grad_target, grad_gamma};
}

std::tuple<Tensor, Tensor, Tensor> backward_cpu(const Tensor& grad, const Tensor& input, const Tensor& target,
                                                const Tensor& gamma, const OptionalTensor& edges,
                                                const OptionalTensor& weight, const Tensor& saved, int64_t reduction,
                                                int64_t ignore_index, double label_smoothing, bool detach_modulation,
                                                std::array<bool, 3> needed, int64_t kind, double epsilon) {
  const Options options = options_of(reduction, ignore_index, label_smoothing, detach_modulation, false, kind, epsilon);
  return backward(grad, input, target, gamma, edges, weight, saved, options, needed, [&](const auto& args) {
    const int64_t chunk_rows = cpu::row_loss_chunk_rows(args.rows, args.classes);
    const int64_t n_chunks = (args.rows + chunk_rows - 1) / chunk_rows;
    dispatch_loss(kind, [&](auto loss_kind) {
      using Loss = decltype(loss_kind);
      at::parallel_for(0, n_chunks, 1, [&](int64_t begin, int64_t end) {
        // Backwards: what the forward pass read last may still be in the cache, and the gradient evicts the rest first.
        for (int64_t i = end - 1; i >= begin; --i) {
          cpu::row_loss_backward<Loss>(args, i * chunk_rows, std::min(args.rows, (i + 1) * chunk_rows));
        }
      });
    });
  });
}

#ifdef FOCALKERN_WITH_CUDA

std::tuple<Tensor, Tensor> forward_cuda(const Tensor& input, const Tensor& target, const Tensor& gamma,
                                        const OptionalTensor& edges, const OptionalTensor& weight, int64_t reduction,
                                        int64_t ignore_index, double label_smoothing, bool detach_modulation,
                                        bool float32_loss, int64_t kind, double epsilon) {
  const Options options =
      options_of(reduction, ignore_index, label_smoothing, detach_modulation, float32_loss, kind, epsilon);
  check_arguments(input, target, gamma, edges, weight, options);
  const c10::cuda::CUDAGuard guard(input.device());
  if (validation_requested() && !is_soft_target(target)) {
    check_labels_on_device(name_of(options), target, input.size(class_dim_of(input)), ignore_index);
  }
  const Tensor saved = empty_saved(input, options);
  Tensor loss =
      at::empty(reduction == kNone ? C10_AS_INTARRAYREF_SLOW(loss_shape(input)) : at::IntArrayRef(), saved.options());
  dispatch_scalar(input.scalar_type(), [&](auto scalar) {
    using Scalar = decltype(scalar);
    using Real = compute_t<Scalar>;
    const auto prepared = prepare<Scalar>(input, target, gamma, edges, weight, options);
    FocalLossForward<Scalar> args{prepared.args, nullptr};
    args.saved = static_cast<Real*>(saved.mutable_data_ptr());
    Real* reduced = nullptr;
    (reduction == kNone ? args.row_loss : reduced) = static_cast<Real*>(loss.mutable_data_ptr());
    Tensor workspace;
    const int64_t bytes = cuda::focal_loss_workspace(args.rows, args.classes, reduction != kNone);
    if (bytes > 0) workspace = at::empty({bytes}, input.options().dtype(at::kByte));
    void* scratch = workspace.defined() ? workspace.mutable_data_ptr() : nullptr;
    Real* divisor = args.saved + saved_numbers(options) * args.rows;
    void* stream = c10::cuda::getCurrentCUDAStream().stream();
    dispatch_loss(kind, [&](auto loss_kind) {
      using Loss = decltype(loss_kind);
      int error = cudaErrorNotSupported;
      if constexpr (std::is_same_v<Loss, FocalRow>) {
        error = cuda::focal_loss_forward(args, reduction == kMean, reduced, divisor, scratch, stream);
      } else if constexpr (!std::is_same_v<Loss, MmceRow>) {
        error = cuda::row_loss_forward<Loss>(args, reduction == kMean, reduced, divisor, scratch, stream);
      }
      C10_CUDA_CHECK(static_cast<cudaError_t>(error));
    });
  });
  return {as_dtype(loss, loss_dtype(input, options)), saved};
}

std::tuple<Tensor, Tensor, Tensor> backward_cuda(const Tensor& grad, const Tensor& input, const Tensor& target,
                                                 const Tensor& gamma, const OptionalTensor& edges,
                                                 const OptionalTensor& weight, const Tensor& saved, int64_t reduction,
                                                 int64_t ignore_index, double label_smoothing, bool detach_modulation,
                                                 std::array<bool, 3> needed, int64_t kind, double epsilon) {
  const Options options = options_of(reduction, ignore_index, label_smoothing, detach_modulation, false, kind, epsilon);
  const c10::cuda::CUDAGuard guard(input.device());
  return backward(grad, input, target, gamma, edges, weight, saved, options, needed, [&](const auto& args) {
    void* stream = c10::cuda::getCurrentCUDAStream().stream();
    dispatch_loss(kind, [&](auto loss_kind) {
      using Loss = decltype(loss_kind);
      int error = cudaErrorNotSupported;
      if constexpr (std::is_same_v<Loss, FocalRow>) {
        error = cuda::focal_loss_backward(args, stream);
      } else if constexpr (!std::is_same_v<Loss, MmceRow>) {
        error = cuda::row_loss_backward<Loss>(args, stream);
      }
      C10_CUDA_CHECK(static_cast<cudaError_t>(error));
    });
  });
}

#endif  // FOCALKERN_WITH_CUDA

std::tuple<Tensor, Tensor> forward_meta(const Tensor& input, const Tensor& target, const Tensor& gamma,
                                        const OptionalTensor& edges, const OptionalTensor& weight, int64_t reduction,
                                        int64_t ignore_index, double label_smoothing, bool detach_modulation,
                                        bool float32_loss, int64_t kind, double epsilon) {
  const Options options =
      options_of(reduction, ignore_index, label_smoothing, detach_modulation, float32_loss, kind, epsilon);
  check_arguments(input, target, gamma, edges, weight, options);
  const auto shape = reduction == kNone ? loss_shape(input) : c10::SymDimVector();
  return {at::empty_symint(shape, input.options().dtype(loss_dtype(input, options))), empty_saved(input, options)};
}

std::tuple<Tensor, Tensor, Tensor> backward_meta(const Tensor& grad, const Tensor& input, const Tensor& target,
                                                 const Tensor& gamma, const OptionalTensor& edges,
                                                 const OptionalTensor& weight, const Tensor& saved, int64_t reduction,
                                                 int64_t ignore_index, double label_smoothing, bool detach_modulation,
                                                 std::array<bool, 3> needed, int64_t kind, double epsilon) {
  const auto real = compute_dtype(input.scalar_type());
  const auto absent = [&](at::ScalarType dtype) { return at::empty({0}, input.options().dtype(dtype)); };
  return {needed[0] ? at::empty_like(input) : absent(input.scalar_type()),
          needed[1] ? at::empty_like(target) : absent(real),
          needed[2] ? at::empty_like(gamma, gamma.options(), at::MemoryFormat::Contiguous) : absent(real)};
}

// ---- the same losses in differentiable torch operations ------------------------------------------------------------

// The sum over the classes of their losses by the shares of the target in them.
Tensor weighted_sum(const Batch& batch, const Tensor& class_loss) {
  const Tensor mass = batch.weight.has_value() ? batch.target * *batch.weight : batch.target;
  // A class without target mass adds nothing, even at probability zero.
  const Tensor impossible = batch.log_q.isinf().logical_and(mass == 0);
  Tensor product = mass * at::where(impossible, 0, class_loss);
  if (mass.requires_grad()) {
    // The slope in the share is the loss of the class, infinite: a square root has it at 0. Without weight it is 0.
    const Tensor steep = batch.weight.has_value() ? impossible.logical_and(*batch.weight != 0) : impossible;
    product = at::where(steep, at::where(steep, mass, 1).sqrt(), product);
  }
  return product.sum(batch.dim);
}

Tensor focal_factor(const Batch& batch) {
  const Tensor focal = batch.gamma >= 0;
  // The second exponent also takes a NaN along.
  Tensor factor =
      (at::where(focal, batch.gamma, 0) * batch.log_u + at::where(focal, 0, -batch.gamma) * batch.q.log1p()).exp();
  // 1 at p = 0, as a constant: its slope would be 0 * inf there, times log p. A NaN gamma stays.
  factor = at::where(batch.log_q.isinf().logical_and(batch.gamma == batch.gamma), 1, factor);
  return batch.options.detach_modulation ? factor.detach() : factor;
}

Tensor focal_rows(const Batch& batch) { return weighted_sum(batch, -focal_factor(batch) * batch.log_q); }

Tensor poly_focal_rows(const Batch& batch) {
  const Tensor loss = focal_factor(batch) * (batch.options.epsilon * batch.u - batch.log_q);
  return weighted_sum(batch, at::where(batch.gamma < 0, std::numeric_limits<double>::quiet_NaN(), loss));
}

Tensor dual_focal_rows(const Batch& batch) {
  // The logarithm of a probability that is 0, where -inf would meet itself.
  constexpr double kNothing = -1e30;
  // Every class has a next lower one, of equal ones the first: in ascending order the one before all of its own logit.
  const Tensor z = batch.logits.detach().movedim(batch.dim, -1).contiguous();
  const auto [ascending, order] = z.flip(-1).sort(std::optional<bool>(true), /*dim=*/-1, /*descending=*/false);
  const Tensor index = z.size(-1) - 1 - order;
  const Tensor n_below = at::searchsorted(ascending.contiguous(), z);
  const Tensor in_order = batch.log_q.movedim(batch.dim, -1).gather(-1, index);
  Tensor log_below = at::constant_pad_nd(in_order, {1, 0}, kNothing).gather(-1, n_below).movedim(-1, batch.dim);
  log_below = log_below.clamp_min(kNothing);
  const Tensor log_u = at::where(batch.u == 0, kNothing, batch.log_u);
  // log(u + p_below), where p_below <= u. (logaddexp has no second derivative for p_below = 0.)
  const Tensor log_m = log_u - at::log_sigmoid(log_u - log_below);
  Tensor factor = (batch.gamma * log_m).exp();
  if (batch.options.detach_modulation) factor = factor.detach();
  // At p = 0 the slope of the factor is 0, also times log p; computed, it would be 0 * inf.
  factor = at::where(batch.log_q.isinf(), 1, factor);
  return weighted_sum(batch, -factor * batch.log_q);
}

Tensor brier_rows(const Batch& batch) {
  // Where p and t may both be near 1, p - t is (1 - t) - u.
  const Tensor difference = at::where(batch.q > 0.5, (1 - batch.target) - batch.u, batch.q - batch.target);
  const Tensor loss = difference.square().sum(batch.dim);
  return batch.row_weight.defined() ? batch.row_weight * loss : loss;
}

// Without the term that the batch adds: see bindings_mmce_loss.cpp.
Tensor mmce_rows(const Batch& batch) { return weighted_sum(batch, -batch.log_q); }

Tensor composite_loss(const Tensor& input, const Tensor& target, const Tensor& gamma, const OptionalTensor& edges,
                      const OptionalTensor& weight, const Options& options) {
  const int64_t dim = class_dim_of(input);
  const auto real = compute_dtype(input.scalar_type());
  const int64_t classes = input.size(dim);
  // [C, 1, ...], to be compared with labels along the class dimension.
  std::vector<int64_t> class_shape(input.dim() - dim, 1);
  class_shape[0] = classes;
  const Tensor class_index = at::arange(classes, input.options().dtype(at::kLong)).view(class_shape);

  Batch batch;
  batch.dim = dim;
  batch.options = options;
  batch.logits = input.to(real);
  Tensor labels, valid;
  if (!is_soft_target(target)) {
    labels = target.to(at::kLong);
    valid = labels != options.ignore_index;
    // An ignored row has a zero gradient whatever it holds.
    batch.logits = at::where(valid.unsqueeze(dim), batch.logits, 0);
  }
  // u = 1 - q cancels for the largest class: there it is the sum of the others.
  const Tensor log_softmax = at::log_softmax(batch.logits, dim);
  batch.q = log_softmax.exp();
  const Tensor is_top = class_index == batch.logits.argmax(dim, /*keepdim=*/true);
  const Tensor rest = at::where(is_top, 0, batch.q).sum(dim, /*keepdim=*/true);
  const Tensor dominant = is_top.logical_and(rest < 0.5);
  batch.log_q = at::where(dominant, at::where(dominant, -rest, 0).log1p(), log_softmax);
  batch.u = at::where(is_top, rest, 1 - batch.q);
  // At u = 0 the loss and all its slopes are 0 through log q; any finite log u will do.
  batch.log_u = at::where(batch.u == 0, 1, batch.u).log();

  if (edges.has_value()) {
    const Tensor inner_edges = edges->to(real).slice(0, 1, -1);
    const Tensor bin = (batch.q.detach().unsqueeze(-1) >= inner_edges).sum(-1);
    batch.gamma = gamma.detach().to(real).index({bin});
  } else if (gamma.numel() == 1) {
    batch.gamma = gamma.reshape({}).to(real);  // a number on the host stays there: no copy, no waiting
  } else {
    batch.gamma = gamma.to(real).expand_symint(loss_shape(input)).unsqueeze(dim);
  }

  Tensor in_range, target_probs, class_weight;
  if (weight.has_value()) {
    class_weight = weight->to(real);
    batch.weight = class_weight.view(class_shape);
  }
  if (is_soft_target(target)) {
    target_probs = target.to(real);
    if (weight.has_value()) batch.row_weight = (*batch.weight * target_probs).sum(dim);
  } else {
    in_range = (labels >= 0).logical_and(labels < classes);
    const Tensor known = at::where(in_range, labels, 0);
    target_probs = (class_index == known.unsqueeze(dim)).to(real);
    if (weight.has_value()) batch.row_weight = class_weight.index({known});
  }
  batch.target = (1 - options.label_smoothing) * target_probs + options.label_smoothing / static_cast<double>(classes);
  Tensor loss = kLosses[options.kind].rows(batch);
  if (!is_soft_target(target)) {
    loss = at::where(in_range, loss, std::numeric_limits<double>::quiet_NaN());
    loss = at::where(valid, loss, 0);
  }
  if (options.reduction != kNone) {
    Tensor total = loss.sum();
    if (options.reduction == kMean) {
      if (is_soft_target(target)) {
        total = total / static_cast<double>(loss.numel());
      } else {
        const Tensor row_weight = batch.row_weight.defined() ? batch.row_weight : at::ones_like(loss);
        total = total / at::where(valid, row_weight, 0).sum();
      }
    }
    loss = total;
  }
  return loss.to(loss_dtype(input, options));
}

// ---- autograd ------------------------------------------------------------------------------------------------------

using ForwardSignature = std::tuple<Tensor, Tensor>(const Tensor&, const Tensor&, const Tensor&, const OptionalTensor&,
                                                    const OptionalTensor&, int64_t, int64_t, double, bool, bool,
                                                    int64_t, double);
using BackwardSignature = std::tuple<Tensor, Tensor, Tensor>(const Tensor&, const Tensor&, const Tensor&, const Tensor&,
                                                             const OptionalTensor&, const OptionalTensor&,
                                                             const Tensor&, int64_t, int64_t, double, bool,
                                                             std::array<bool, 3>, int64_t, double);

const auto& forward_op() {
  static const auto op = find_operator<ForwardSignature>("focalkern::focal_loss_forward");
  return op;
}
const auto& backward_op() {
  static const auto op = find_operator<BackwardSignature>("focalkern::focal_loss_backward");
  return op;
}

// What the backward pass must know besides the variables, in one allocation: boxed values would take one each.
struct SavedOptions : torch::CustomClassHolder {
  Options options;
  bool has_edges;
  bool has_weight;
  Tensor number;  // gamma where it is a constant number on the host, else undefined
};

bool is_number(const Tensor& gamma) { return gamma.dim() == 0 && gamma.device().is_cpu() && !gamma.requires_grad(); }

struct FocalLossFunction : torch::autograd::Function<FocalLossFunction> {
  static torch::autograd::variable_list forward(torch::autograd::AutogradContext* ctx, const Tensor& input,
                                                const Tensor& target, const Tensor& gamma, const OptionalTensor& edges,
                                                const OptionalTensor& weight, const Options& options) {
    const at::AutoDispatchBelowADInplaceOrView guard;
    auto [loss, saved] = forward_op().call(input, target, gamma, edges, weight, options.reduction, options.ignore_index,
                                           options.label_smoothing, options.detach_modulation, options.float32_loss,
                                           options.kind, options.epsilon);
    auto stored = c10::make_intrusive<SavedOptions>();
    stored->options = options;
    stored->has_edges = edges.has_value();
    stored->has_weight = weight.has_value();
    torch::autograd::variable_list variables{input, target, saved};
    if (is_number(gamma)) {
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
      // The gradient is itself to be differentiated. Aliases, so that a hook on the user's tensor fires once.
      const Tensor input_alias = at::alias(input), target_alias = at::alias(target), gamma_alias = at::alias(gamma);
      const Tensor loss = composite_loss(input_alias, target_alias, gamma_alias, edges, weight, options);
      const std::array<Tensor, 3> sources{input_alias, target_alias, gamma_alias};
      torch::autograd::variable_list wanted;
      for (int i = 0; i < 3; ++i) {
        if (needed[i]) wanted.push_back(sources[i]);
      }
      const auto found = torch::autograd::grad({loss}, wanted, {grad}, /*retain_graph=*/true, /*create_graph=*/true,
                                               /*allow_unused=*/true);
      for (int i = 0, k = 0; i < 3; ++i) {
        if (needed[i]) result[i] = found[k++];
      }
      return result;
    }
    auto [grad_input, grad_target, grad_gamma] =
        backward_op().call(grad, input, target, gamma, edges, weight, saved, options.reduction, options.ignore_index,
                           options.label_smoothing, options.detach_modulation, needed, options.kind, options.epsilon);
    if (needed[0]) result[0] = std::move(grad_input);
    if (needed[1]) result[1] = std::move(grad_target);
    if (needed[2]) result[2] = std::move(grad_gamma);
    return result;
  }
};

std::tuple<Tensor, Tensor> forward_autograd(const Tensor& input, const Tensor& target, const Tensor& gamma,
                                            const OptionalTensor& edges, const OptionalTensor& weight,
                                            int64_t reduction, int64_t ignore_index, double label_smoothing,
                                            bool detach_modulation, bool float32_loss, int64_t kind, double epsilon) {
  const Options options =
      options_of(reduction, ignore_index, label_smoothing, detach_modulation, float32_loss, kind, epsilon);
  auto outputs = FocalLossFunction::apply(input, target, gamma, edges, weight, options);
  return {std::move(outputs[0]), std::move(outputs[1])};
}

// ---- the eager entry -----------------------------------------------------------------------------------------------

Tensor composite_entry(const Tensor& input, const Tensor& target, const Tensor& gamma, const OptionalTensor& edges,
                       const OptionalTensor& weight, int64_t reduction, int64_t ignore_index, double label_smoothing,
                       bool detach_modulation, bool float32_loss, int64_t kind, double epsilon) {
  const Options options =
      options_of(reduction, ignore_index, label_smoothing, detach_modulation, float32_loss, kind, epsilon);
  check_arguments(input, target, gamma, edges, weight, options);
  return composite_loss(input, target, gamma, edges, weight, options);
}

Tensor row_loss(Tensor input, const Tensor& target, const Tensor& gamma, const OptionalTensor& edges,
                const OptionalTensor& weight, Options options) {
  const auto device = input.device().type();
  const bool is_half = compute_dtype(input.scalar_type()) != input.scalar_type();
  options.float32_loss =
      is_half && at::autocast::is_autocast_available(device) && at::autocast::is_autocast_enabled(device);
  if (target.is_floating_point() && target.scalar_type() != input.scalar_type()) {
    // The loss has the dtype that logits and target probabilities promote to, as in torch.
    const auto common = c10::promoteTypes(input.scalar_type(), target.scalar_type());
    if (common == at::kDouble) input = input.to(common);
    options.float32_loss = is_half && common == at::kFloat;
  }
  const bool is_transformed = needs_composite({&input, &target, &gamma});
  if (is_transformed || has_no_kernel(options)) {
    check_arguments(input, target, gamma, edges, weight, options);
    if (!is_transformed) {
      check_device(name_of(options), input);
      if (input.is_cpu() || (validation_requested() && !input.is_meta())) {
        check_labels_on_device(name_of(options), target, input.size(class_dim_of(input)), options.ignore_index);
      }
    }
    return composite_loss(input, target, gamma, edges, weight, options);
  }
  check_device(name_of(options), input);
  return std::get<0>(forward_op().call(input, target, gamma, edges, weight, options.reduction, options.ignore_index,
                                       options.label_smoothing, options.detach_modulation, options.float32_loss,
                                       options.kind, options.epsilon));
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
                        detach_modulation, /*kind=*/0, /*epsilon=*/0);
}

}  // namespace

void register_focal_loss(torch::Library& definitions, pybind11::module_& module) {
  const std::vector<at::Tag> tags{at::Tag::pt2_compliant_tag};
  definitions.def(
      "focal_loss_forward(Tensor input, Tensor target, Tensor gamma, Tensor? edges, Tensor? weight, int reduction, "
      "int ignore_index, float label_smoothing, bool detach_modulation, bool float32_loss, int kind=0, float "
      "epsilon=0.0) -> (Tensor loss, Tensor saved)",
      tags);
  definitions.def(
      "focal_loss_backward(Tensor grad, Tensor input, Tensor target, Tensor gamma, Tensor? edges, Tensor? weight, "
      "Tensor saved, int reduction, int ignore_index, float label_smoothing, bool detach_modulation, bool[3] needed, "
      "int kind=0, float epsilon=0.0) -> (Tensor grad_input, Tensor grad_target, Tensor grad_gamma)",
      tags);
  definitions.def(
      "focal_loss_composite(Tensor input, Tensor target, Tensor gamma, Tensor? edges, Tensor? weight, int reduction, "
      "int ignore_index, float label_smoothing, bool detach_modulation, bool float32_loss, int kind=0, float "
      "epsilon=0.0) -> Tensor",
      tags);
  definitions.impl("focal_loss_composite",
                   torch::dispatch(c10::DispatchKey::CompositeImplicitAutograd, &composite_entry));
  definitions.impl("focal_loss_forward", torch::dispatch(c10::DispatchKey::CPU, &forward_cpu));
  definitions.impl("focal_loss_backward", torch::dispatch(c10::DispatchKey::CPU, &backward_cpu));
#ifdef FOCALKERN_WITH_CUDA
  definitions.impl("focal_loss_forward", torch::dispatch(c10::DispatchKey::CUDA, &forward_cuda));
  definitions.impl("focal_loss_backward", torch::dispatch(c10::DispatchKey::CUDA, &backward_cuda));
#endif
  definitions.impl("focal_loss_forward", torch::dispatch(c10::DispatchKey::Meta, &forward_meta));
  definitions.impl("focal_loss_backward", torch::dispatch(c10::DispatchKey::Meta, &backward_meta));
  definitions.impl("focal_loss_forward", torch::dispatch(c10::DispatchKey::Autograd, &forward_autograd));

  module.def("focal_loss", &focal_loss_entry);
  module.def("row_loss", &row_loss_entry);
}

}  // namespace focalkern::bindings
