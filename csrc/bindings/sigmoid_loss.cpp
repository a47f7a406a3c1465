// The losses of one logit: argument checks, kernel calls, autograd and the eager entry. They are one operator, told
// apart by `kind`.
//
//   sigmoid_loss_forward   -> (loss, divisor)   divisor = [1]: the divisor of the mean, or 1
//   sigmoid_loss_backward  -> (grad_input, grad_target, grad_gamma, grad_second), empty where not needed
//   sigmoid_loss_composite -> loss              in differentiable torch operations, by focalkern.fallback
//
// `scores` belong to labels: each is the target at its label's class. Without scores it is 1.
// `second` is gamma_positive for the asymmetric loss and alpha for the others; without it a loss has no alpha.
// `constant` is the margin of the asymmetric loss and the floor of IA-BCE; for the varifocal and the matchability loss
// it is 1 if p^gamma is a constant for the gradient, else 0. Derivatives of higher order, torch.func transforms and
// forward-mode tangents go through sigmoid_loss_composite.

#include <ATen/core/grad_mode.h>
#include <ATen/ops/scalar_tensor.h>
#include <torch/csrc/autograd/custom_function.h>

#include <tuple>
#include <vector>

#include "bindings/sigmoid_loss_kernels.h"

namespace focalkern::bindings {
namespace {

// The dispatcher passes arguments one by one. `unpacked` packs those of the forward pass (and of the composite) and
// calls the function; `unpacked_backward` does so for the backward pass. Every dispatch key uses them.
template <auto function>
auto unpacked(const Tensor& input, const Tensor& target, const Tensor& gamma, const OptionalTensor& second,
              const OptionalTensor& weight, const OptionalTensor& scores, int64_t kind, double constant,
              int64_t reduction, int64_t ignore_index, bool float32_loss) {
  return function(Inputs{input, target, gamma, second, weight, scores},
                  options_of(kind, constant, reduction, ignore_index, float32_loss));
}

template <auto function>
auto unpacked_backward(const Tensor& grad, const Tensor& input, const Tensor& target, const Tensor& gamma,
                       const OptionalTensor& second, const OptionalTensor& weight, const OptionalTensor& scores,
                       const Tensor& divisor, int64_t kind, double constant, int64_t reduction, int64_t ignore_index,
                       std::array<bool, 4> needed) {
  return function(grad, Inputs{input, target, gamma, second, weight, scores}, divisor,
                  options_of(kind, constant, reduction, ignore_index), needed);
}

template <typename Operator>
auto call_packed(const Operator& op, const Inputs& inputs, const Options& options) {
  return op.call(inputs.input, inputs.target, inputs.gamma, inputs.second, inputs.weight, inputs.scores,
                 static_cast<int64_t>(options.kind), options.constant, options.reduction, options.ignore_index,
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

// Options that the backward pass needs in addition to the variables, in one allocation: boxed values would take one
// each.
struct SavedOptions : torch::CustomClassHolder {
  Options options;
  Tensor gamma, second, weight;  // if they are numbers on the host, without gradients
};

struct SigmoidLossFunction : torch::autograd::Function<SigmoidLossFunction> {
  static torch::autograd::variable_list forward(torch::autograd::AutogradContext* ctx, const Tensor& input,
                                                const Tensor& target, const Tensor& gamma, const OptionalTensor& second,
                                                const OptionalTensor& weight, const OptionalTensor& scores,
                                                const Options& options) {
    const at::AutoDispatchBelowADInplaceOrView guard;
    auto [loss, divisor] = call_forward({input, target, gamma, second, weight, scores}, options);
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
    variables.push_back(scores.value_or(Tensor()));
    ctx->save_for_backward(std::move(variables));
    ctx->saved_data["options"] = c10::IValue::make_capsule(std::move(stored));
    ctx->mark_non_differentiable({divisor});
    ctx->set_materialize_grads(false);
    return {loss, divisor};
  }

  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* ctx,
                                                 torch::autograd::variable_list grads) {
    torch::autograd::variable_list result(7);  // autograd requires one gradient per argument of forward
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
    const OptionalTensor scores = variables[6].defined() ? OptionalTensor(variables[6]) : std::nullopt;
    const std::array<bool, 4> needed{
        ctx->needs_input_grad(0), ctx->needs_input_grad(1) && target.is_floating_point(), ctx->needs_input_grad(2),
        second.has_value() && second->requires_grad() && options.kind == SigmoidLoss::kAsymmetric};
    if (c10::GradMode::is_enabled()) {
      const auto composite = [&](const auto& v) {
        return composite_loss({v[0], v[1], v[2], v[3].defined() ? OptionalTensor(v[3]) : std::nullopt, weight, scores},
                              options);
      };
      differentiable_gradients<4>({input, target, gamma, second.value_or(Tensor())}, needed, grad, composite, result);
      return result;
    }
    static const auto op =
        find_operator<decltype(unpacked_backward<&backward_meta>)>("focalkern::sigmoid_loss_backward");
    auto [grad_input, grad_target, grad_gamma, grad_second] =
        op.call(grad, input, target, gamma, second, weight, scores, divisor, static_cast<int64_t>(options.kind),
                options.constant, options.reduction, options.ignore_index, needed);
    if (needed[0]) result[0] = std::move(grad_input);
    if (needed[1]) result[1] = std::move(grad_target);
    if (needed[2]) result[2] = std::move(grad_gamma);
    if (needed[3]) result[3] = std::move(grad_second);
    return result;
  }
};

std::tuple<Tensor, Tensor> forward_autograd(const Inputs& inputs, const Options& options) {
  const auto& [input, target, gamma, second, weight, scores] = inputs;
  auto outputs = SigmoidLossFunction::apply(input, target, gamma, second, weight, scores, options);
  return {std::move(outputs[0]), std::move(outputs[1])};
}

// ---- the eager entry -----------------------------------------------------------------------------------------------

// Gammas are Python numbers or tensors; the function is called with the GIL held.
Tensor sigmoid_loss_entry(const Tensor& input, const Tensor& target, const pybind11::object& gamma,
                          const pybind11::object& second, const OptionalTensor& weight, const OptionalTensor& scores,
                          int64_t kind, double constant, int64_t reduction, int64_t ignore_index) {
  const auto as_tensor = [](const pybind11::object& value) {
    return PyFloat_Check(value.ptr()) ? at::scalar_tensor(PyFloat_AS_DOUBLE(value.ptr()), at::kDouble)
                                      : value.cast<Tensor>();
  };
  const Tensor gamma_tensor = as_tensor(gamma);
  const OptionalTensor second_tensor = second.is_none() ? OptionalTensor() : OptionalTensor(as_tensor(second));
  const pybind11::gil_scoped_release release;
  const Options options = options_of(kind, constant, reduction, ignore_index, autocasts(input));
  const Inputs inputs{input, target, gamma_tensor, second_tensor, weight, scores};
  const Tensor second_or_none = second_tensor.value_or(Tensor()), weight_or_none = weight.value_or(Tensor());
  const Tensor scores_or_none = scores.value_or(Tensor());
  if (needs_composite({&input, &target, &gamma_tensor, &second_or_none, &weight_or_none, &scores_or_none})) {
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
