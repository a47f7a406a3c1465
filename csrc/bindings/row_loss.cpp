// focal_loss and the other losses of rows: argument checks, kernel calls, autograd and the eager entry. They are one
// operator, told apart by `kind`; math/row_losses.def has a line for each.
//
//   focal_loss_forward        -> (loss, saved)   saved = [kSavedNumbers * rows + 1]: numbers of rows, then the divisor
//   focal_loss_backward       -> (grad_input, grad_target, grad_gamma), empty where not needed
//   focal_loss_with_gradient  -> (loss, grad_input), on the CPU, the gradient for an upstream gradient of 1
//   focal_loss_composite      -> loss            in differentiable torch operations, by focalkern.fallback
//
// Derivatives of higher order, torch.func transforms and forward-mode tangents go through focal_loss_composite.

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/ones_like.h>
#include <ATen/ops/scalar_tensor.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/saved_variable.h>
#include <torch/version.h>

#include <algorithm>
#include <memory>
#include <mutex>
#include <numeric>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "bindings/direct_call.h"
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

// Operators return an empty tensor for a gradient that was not asked for.
template <auto function>
auto with_placeholders(const Tensor& grad, const Inputs& inputs, const Tensor& saved, const Options& options,
                       std::array<bool, 3> needed) {
  auto found = function(grad, inputs, saved, options, needed);
  const auto absent = [&](Tensor& gradient, at::ScalarType dtype) {
    if (!gradient.defined()) gradient = at::empty({0}, inputs.input.options().dtype(dtype));
  };
  const auto type = inputs.input.scalar_type();
  absent(std::get<0>(found), type);
  absent(std::get<1>(found), compute_dtype(type));
  absent(std::get<2>(found), compute_dtype(type));
  return found;
}

using ForwardSignature = decltype(unpacked<&forward_meta>);
using BackwardSignature = decltype(unpacked_backward<&backward_meta>);

// Operators take every gamma as a tensor.
Tensor gamma_tensor(const Inputs& inputs, const Options& options) {
  return inputs.gamma.defined() ? inputs.gamma : at::scalar_tensor(options.gamma, at::kDouble);
}

template <typename Operator>
auto call_packed(const Operator& op, const Inputs& inputs, const Options& options) {
  return op.call(inputs.input, inputs.target, gamma_tensor(inputs, options), inputs.edges, inputs.weight,
                 options.reduction, options.ignore_index, options.label_smoothing, options.detach_modulation,
                 options.float32_loss, static_cast<int64_t>(options.kind), options.epsilon);
}

// focal_loss_composite, which focalkern.fallback implements.
Tensor composite_loss(const Inputs& inputs, const Options& options) {
  static const auto op = find_operator<decltype(unpacked<&composite_loss>)>("focalkern::focal_loss_composite");
  return call_packed(op, inputs, options);
}

// The kernels of the device of the input. All tensors are on it.
std::tuple<Tensor, Tensor> forward_kernel(const Inputs& inputs, const Options& options) {
#ifdef FOCALKERN_WITH_CUDA
  if (inputs.input.is_cuda()) return forward<Cuda>(inputs, options);
#endif
  return forward<Cpu>(inputs, options);
}

std::tuple<Tensor, Tensor, Tensor> backward_kernel(const Tensor& grad, const Inputs& inputs, const Tensor& saved,
                                                   const Options& options, std::array<bool, 3> needed) {
#ifdef FOCALKERN_WITH_CUDA
  if (inputs.input.is_cuda()) return backward<Cuda>(grad, inputs, saved, options, needed);
#endif
  return backward<Cpu>(grad, inputs, saved, options, needed);
}

bool is_direct(const Inputs& inputs, const Tensor& grad) {
  auto keys = inputs.input.key_set() | inputs.target.key_set() | inputs.gamma.key_set() | grad.key_set();
  if (inputs.edges.has_value()) keys = keys | inputs.edges->key_set();
  if (inputs.weight.has_value()) keys = keys | inputs.weight->key_set();
  return only_chooses_a_kernel(keys);
}

// torch::autograd::Function would do the same in 15,000 instructions more per step, a third of a small batch.
struct RowLossBackward : torch::autograd::Node {
  Options options;
  torch::autograd::SavedVariable input, target, gamma, edges, weight, saved, gradient;  // one of the last two

  std::string name() const override { return "RowLossBackward"; }

  void release_variables() override {
    const std::lock_guard<std::mutex> lock(mutex_);
    for (auto* variable : {&input, &target, &gamma, &edges, &weight, &saved, &gradient}) variable->reset_data();
  }

 protected:
  torch::autograd::variable_list apply(torch::autograd::variable_list&& grads) override {
    const std::lock_guard<std::mutex> lock(mutex_);
    torch::autograd::variable_list result(3);  // for input, target and gamma
    const Tensor& grad = grads[0];
    if (!grad.defined()) return result;
    const Tensor z = input.unpack(), y = target.unpack(), g = gamma.unpack(), numbers = saved.unpack();
    const Tensor bounds = edges.unpack(), shares = weight.unpack();
    const auto optional = [](const Tensor& tensor) { return tensor.defined() ? OptionalTensor(tensor) : std::nullopt; };
    const OptionalTensor table = optional(bounds), weights = optional(shares);
    // A tabulated gamma and a detached factor are constants.
    const bool gamma_is_variable = !table.has_value() && !options.detach_modulation;
    const std::array<bool, 3> needed{task_should_compute_output(0), task_should_compute_output(1) && is_soft_target(y),
                                     task_should_compute_output(2) && gamma_is_variable};
    if (c10::GradMode::is_enabled()) {
      differentiable_gradients<3>(
          {z, y, g}, needed, grad,
          [&](const auto& v) { return composite_loss({v[0], v[1], v[2], table, weights}, options); }, result);
      return result;
    }
    const Inputs inputs{z, y, g, table, weights};
    const at::AutoDispatchBelowADInplaceOrView guard;
    if (const Tensor ready = gradient.unpack(); ready.defined()) {
      // As in the kernels, an ignored row or an upstream gradient of 0 gives 0, whatever the other factor is.
      if (needed[0]) result[0] = ready.mul(grad).masked_fill(ready.eq(0).logical_or(grad.eq(0)), 0);
      return result;
    }
    auto gradients = is_direct(inputs, grad) ? backward_kernel(grad, inputs, numbers, options, needed)
                                             : call_row_loss_backward(grad, inputs, numbers, options, needed);
    if (needed[0]) result[0] = std::move(std::get<0>(gradients));
    if (needed[1]) result[1] = std::move(std::get<1>(gradients));
    if (needed[2]) result[2] = std::move(std::get<2>(gradients));
    return result;
  }
};

// Makes the loss differentiable, where a gradient is wanted, from what the forward pass saved or from the gradient.
void record(const Tensor& loss, const Tensor& saved, const Inputs& inputs, const Options& options,
            const Tensor& gradient = {}) {
  const auto& [input, target, gamma, edges, weight] = inputs;
  if (!torch::autograd::compute_requires_grad(input, target, gamma)) return;
#if TORCH_VERSION_MAJOR > 2 || TORCH_VERSION_MINOR >= 13
  const auto node = c10::make_intrusive<RowLossBackward>();
#else
  const std::shared_ptr<RowLossBackward> node(new RowLossBackward, torch::autograd::deleteNode);
#endif
  node->set_next_edges(torch::autograd::collect_next_edges(input, target, gamma));
  node->options = options;
  using torch::autograd::SavedVariable;
  node->input = SavedVariable(input, /*is_output=*/false);
  node->target = SavedVariable(target, /*is_output=*/false);
  if (saved.defined()) node->saved = SavedVariable(saved, /*is_output=*/false);
  if (gradient.defined()) node->gradient = SavedVariable(gradient, /*is_output=*/false);
  if (gamma.defined()) node->gamma = SavedVariable(gamma, /*is_output=*/false);
  if (edges.has_value()) node->edges = SavedVariable(*edges, /*is_output=*/false);
  if (weight.has_value()) node->weight = SavedVariable(*weight, /*is_output=*/false);
  torch::autograd::set_history(loss, node);
}

std::tuple<Tensor, Tensor> forward_autograd(const Inputs& inputs, const Options& options) {
  auto outputs = [&] {
    const at::AutoDispatchBelowADInplaceOrView guard;
    return call_row_loss_forward(inputs, options);
  }();
  record(std::get<0>(outputs), std::get<1>(outputs), inputs, options);
  return outputs;
}

// One call in place of two, for compiled graphs of small batches, where the two calls take most of the time. gamma is a
// number: a tensor would take a kernel of the graph that writes it.
template <auto function>
std::tuple<Tensor, Tensor> unpacked_number(const Tensor& input, const Tensor& target, double gamma,
                                           const OptionalTensor& weight, int64_t reduction, int64_t ignore_index,
                                           double label_smoothing, bool detach_modulation, int64_t kind,
                                           double epsilon) {
  auto options =
      options_of(reduction, ignore_index, label_smoothing, detach_modulation, /*float32_loss=*/false, kind, epsilon);
  options.gamma = gamma;
  return function(Inputs{input, target, /*gamma=*/Tensor(), /*edges=*/std::nullopt, weight}, options);
}

std::tuple<Tensor, Tensor> loss_with_gradient(const Inputs& inputs, const Options& options) {
  const auto [loss, saved] = forward<Cpu>(inputs, options);
  return {loss, std::get<0>(backward<Cpu>(at::ones_like(loss), inputs, saved, options, {true, false, false}))};
}

std::tuple<Tensor, Tensor> loss_with_gradient_meta(const Inputs& inputs, const Options& options) {
  return {std::get<0>(forward_meta(inputs, options)), at::empty_like(inputs.input)};
}

std::tuple<Tensor, Tensor> loss_with_gradient_autograd(const Inputs& inputs, const Options& options) {
  using Signature = decltype(unpacked_number<&loss_with_gradient_meta>);
  static const auto op = find_operator<Signature>("focalkern::focal_loss_with_gradient");
  TORCH_CHECK_VALUE(!inputs.target.requires_grad(), "focal_loss_with_gradient: only input may require grad");
  auto outputs = [&] {
    const at::AutoDispatchBelowADInplaceOrView guard;
    return op.call(inputs.input, inputs.target, options.gamma, inputs.weight, options.reduction, options.ignore_index,
                   options.label_smoothing, options.detach_modulation, static_cast<int64_t>(options.kind),
                   options.epsilon);
  }();
  record(std::get<0>(outputs), /*saved=*/{}, inputs, options, std::get<1>(outputs));
  return outputs;
}

// ---- the eager entry -----------------------------------------------------------------------------------------------

// The dimensions of logits [N, C, d1, d2, ...] with the pixels in the order of their strides, if only that spares a
// copy of the logits and of their gradient; otherwise empty.
std::vector<int64_t> order_of_strides(const Tensor& input) {
  if (input.dim() < 4 || input.is_meta() || row_layout(input, 1, input.is_cpu())) return {};
  std::vector<int64_t> order(input.dim());
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin() + 2, order.end(),
                   [&](int64_t one, int64_t other) { return input.stride(one) > input.stride(other); });
  if (!row_layout(input.permute(order), 1, input.is_cpu())) return {};
  return order;
}

Tensor row_loss(Tensor input, const Tensor& target, const Tensor& gamma, const OptionalTensor& edges,
                const OptionalTensor& weight, Options options);

// The loss of logits [N, C, d1, d2, ...] whose dimensions are put in this order, with those of the result put back.
Tensor reordered_row_loss(const Inputs& inputs, const Options& options, const std::vector<int64_t>& order) {
  check_arguments(inputs, options);
  const auto& [input, target, gamma, edges, weight] = inputs;
  std::vector<int64_t> of_rows{0}, back(order.size() - 1);  // without the classes
  for (auto d = order.begin() + 2; d < order.end(); ++d) of_rows.push_back(*d - 1);
  for (int64_t d = 0; d < static_cast<int64_t>(of_rows.size()); ++d) back[of_rows[d]] = d;
  const bool per_row = gamma.defined() && !edges.has_value() && gamma.dim() > 0;
  const Tensor gammas = per_row ? gamma.expand(C10_AS_INTARRAYREF_SLOW(loss_shape(input))).permute(of_rows) : gamma;
  try {
    const Tensor loss = row_loss(input.permute(order), target.permute(is_soft_target(target) ? order : of_rows), gammas,
                                 edges, weight, options);
    return options.reduction == kNone ? loss.permute(back).contiguous() : loss;
  } catch (const c10::IndexError&) {  // it counts the rows in the other order
    check_labels_on_device(name_of(options), target, input.size(1), options.ignore_index);
    throw;
  }
}

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
  if (is_transformed || has_no_kernel(input, options)) {
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
  if (const auto order = order_of_strides(input); !order.empty()) return reordered_row_loss(inputs, options, order);
  if (!is_direct(inputs, /*grad=*/{})) return std::get<0>(call_row_loss_forward(inputs, options));
  auto [loss, saved] = [&] {
    const at::AutoDispatchBelowADInplaceOrView guard;
    return forward_kernel(inputs, options);
  }();
  record(loss, saved, inputs, options);
  return loss;
}

// A number becomes that of the options, and the tensor is undefined.
Tensor set_gamma(const pybind11::object& gamma, Options& options) {
  if (!PyFloat_Check(gamma.ptr())) return gamma.cast<Tensor>();
  options.gamma = PyFloat_AS_DOUBLE(gamma.ptr());
  return {};
}

// gamma is a Python number or a tensor; the function is called with the GIL held.
Tensor row_loss_entry(const Tensor& input, const Tensor& target, const pybind11::object& gamma,
                      const OptionalTensor& edges, const OptionalTensor& weight, int64_t reduction,
                      int64_t ignore_index, double label_smoothing, bool detach_modulation, int64_t kind,
                      double epsilon) {
  auto options =
      options_of(reduction, ignore_index, label_smoothing, detach_modulation, /*float32_loss=*/false, kind, epsilon);
  const Tensor gamma_tensor = set_gamma(gamma, options);
  const pybind11::gil_scoped_release release;
  return row_loss(input, target, gamma_tensor, edges, weight, options);
}

// The loss, what it saves, and the statistics of the rows, from one read of the logits; nothing where only two calls
// compute them.
std::optional<std::tuple<Tensor, Tensor, RowStatistics>> row_loss_with_statistics(
    const Tensor& input, const Tensor& target, const pybind11::object& number_or_tensor, const OptionalTensor& edges,
    const OptionalTensor& weight, int64_t reduction, int64_t ignore_index, double label_smoothing,
    bool detach_modulation, int64_t kind, bool float32_loss) {
  auto options = options_of(reduction, ignore_index, label_smoothing, detach_modulation,
                            float32_loss || autocasts(input), kind, /*epsilon=*/0);
  const Tensor gamma = set_gamma(number_or_tensor, options);
  const pybind11::gil_scoped_release release;
  const Inputs inputs{input, target, gamma, edges, weight};
  if (is_soft_target(target) || needs_composite({&input, &target, &gamma}) || !is_direct(inputs, /*grad=*/{})) {
    return std::nullopt;
  }
  check_arguments(inputs, options);
  const RowStatistics statistics = empty_row_statistics(input, target.numel());
  auto [loss, saved] = [&] {
    const at::AutoDispatchBelowADInplaceOrView guard;
#ifdef FOCALKERN_WITH_CUDA
    if (input.is_cuda()) return forward_with<Cuda>(inputs, options, &statistics);
#endif
    return forward_with<Cpu>(inputs, options, &statistics);
  }();
  record(loss, saved, inputs, options);
  return std::tuple{loss, saved, statistics};
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
  return op.call(grad, inputs.input, inputs.target, gamma_tensor(inputs, options), inputs.edges, inputs.weight, saved,
                 options.reduction, options.ignore_index, options.label_smoothing, options.detach_modulation, needed,
                 static_cast<int64_t>(options.kind), options.epsilon);
}

void register_focal_loss(torch::Library& definitions, pybind11::module_& module) {
  const std::vector<at::Tag> tags{at::Tag::pt2_compliant_tag};
  definitions.def(kFocalLossForwardSchema, tags);
  definitions.def(kFocalLossBackwardSchema, tags);
  definitions.def(kFocalLossWithGradientSchema, tags);
  definitions.def(kFocalLossCompositeSchema, tags);
  using c10::DispatchKey;
  definitions.impl("focal_loss_forward", torch::dispatch(DispatchKey::CPU, &unpacked<&forward<Cpu>>));
  definitions.impl("focal_loss_backward",
                   torch::dispatch(DispatchKey::CPU, &unpacked_backward<&with_placeholders<&backward<Cpu>>>));
#ifdef FOCALKERN_WITH_CUDA
  definitions.impl("focal_loss_forward", torch::dispatch(DispatchKey::CUDA, &unpacked<&forward<Cuda>>));
  definitions.impl("focal_loss_backward",
                   torch::dispatch(DispatchKey::CUDA, &unpacked_backward<&with_placeholders<&backward<Cuda>>>));
#endif
  definitions.impl("focal_loss_forward", torch::dispatch(DispatchKey::Meta, &unpacked<&forward_meta>));
  definitions.impl("focal_loss_backward",
                   torch::dispatch(DispatchKey::Meta, &unpacked_backward<&with_placeholders<&backward_meta>>));
  definitions.impl("focal_loss_forward", torch::dispatch(DispatchKey::Autograd, &unpacked<&forward_autograd>));
  definitions.impl("focal_loss_with_gradient",
                   torch::dispatch(DispatchKey::CPU, &unpacked_number<&loss_with_gradient>));
  definitions.impl("focal_loss_with_gradient",
                   torch::dispatch(DispatchKey::Meta, &unpacked_number<&loss_with_gradient_meta>));
  definitions.impl("focal_loss_with_gradient",
                   torch::dispatch(DispatchKey::Autograd, &unpacked_number<&loss_with_gradient_autograd>));

  module.def("focal_loss", &focal_loss_entry);
  module.def("row_loss", &row_loss_entry);
  module.def("row_loss_with_statistics", &row_loss_with_statistics);
  module.def("row_losses", [] { return std::vector<std::string>(std::begin(kNames), std::end(kNames)); });
}

}  // namespace focalkern::bindings
