// focal_loss and the other losses of rows: argument checks, kernel calls, autograd and the eager entry. They are one
// operator, told apart by `kind`; math/row_losses.def has a line for each.
//
//   focal_loss_forward    -> (loss, saved)   saved = [kSavedNumbers * rows + 1]: numbers of rows, then the divisor
//   focal_loss_backward   -> (grad_input, grad_target, grad_gamma), empty where not needed
//   focal_loss_composite  -> loss            in differentiable torch operations, by focalkern.fallback
//
// Derivatives of higher order, torch.func transforms and forward-mode tangents go through focal_loss_composite.

#include <ATen/core/grad_mode.h>
#include <ATen/ops/scalar_tensor.h>
#include <torch/csrc/autograd/custom_function.h>

#include <string>
#include <tuple>
#include <vector>

#include "bindings/row_loss_kernels.h"

namespace focalkern::bindings {
namespace {

// The dispatcher passes arguments one by one. `unpacked` packs those of the forward pass (and of the composite) and
// calls the function; `unpacked_backward` does so for the backward pass. Every dispatch key uses them.
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

// Options that the backward pass needs in addition to the variables, in one allocation: boxed values would take one
// each.
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
    ctx->set_materialize_grads(false);  // avoids a zero gradient of `saved` per backward pass
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
