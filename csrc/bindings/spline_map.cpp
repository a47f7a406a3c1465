// spline_calibration_map: autograd and the eager entry.
//
//   spline_map_forward    -> output
//   spline_map_backward   -> (grad_input, grad_parameters, grad_knots, grad_coefficients, grad_weight, grad_bias)
//   spline_map_composite  -> output   in differentiable torch operations, by focalkern.fallback
//
// `parameters` holds 1 + a, T and e; `coefficients` [m + 1, 4] define the curve on its pieces. Tensors on the
// host stay there, in float64. The forward pass saves only its arguments for the backward pass. Derivatives of higher
// order, torch.func transforms and forward-mode tangents go through spline_map_composite.

#include <ATen/autocast_mode.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/alias.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/csrc/autograd/functions/utils.h>

#include <array>
#include <tuple>
#include <vector>

#include "bindings/direct_call.h"
#include "bindings/spline_map_kernels.h"

namespace focalkern::bindings {
namespace {

// ---- autograd ------------------------------------------------------------------------------------------------------

using ForwardSignature = Tensor(const Tensor&, const Tensor&, const Tensor&, const Tensor&, const OptionalTensor&,
                                const OptionalTensor&, bool, bool, bool, bool, bool, bool);
using BackwardSignature = Gradients(const Tensor&, const Tensor&, const Tensor&, const Tensor&, const Tensor&,
                                    const OptionalTensor&, const OptionalTensor&, bool, bool, bool,
                                    std::array<bool, 6>);
using CompositeSignature = Tensor(const Tensor&, const Tensor&, const Tensor&, const Tensor&, const OptionalTensor&,
                                  const OptionalTensor&, bool, bool, bool, bool);

const auto& forward_op() {
  static const auto op = find_operator<ForwardSignature>("focalkern::spline_map_forward");
  return op;
}
const auto& composite_op() {
  static const auto op = find_operator<CompositeSignature>("focalkern::spline_map_composite");
  return op;
}

constexpr int kTensors = 6;  // input, parameters, knots, coefficients, weight, bias

OptionalTensor optional(const Tensor& tensor) { return tensor.defined() ? OptionalTensor(tensor) : std::nullopt; }

struct SplineMapFunction : torch::autograd::Function<SplineMapFunction> {
  static Tensor forward(torch::autograd::AutogradContext* ctx, const Tensor& input, const Tensor& parameters,
                        const Tensor& knots, const Tensor& coefficients, const OptionalTensor& weight,
                        const OptionalTensor& bias, bool is_probs, bool keep_zeros, bool log_output, bool wide,
                        bool keep_order, bool validate) {
    const at::AutoDispatchBelowADInplaceOrView guard;
    const Tensor output = forward_op().call(input, parameters, knots, coefficients, weight, bias, is_probs, keep_zeros,
                                            log_output, wide, keep_order, validate);
    ctx->save_for_backward(
        {input, parameters, knots, coefficients, weight.value_or(Tensor()), bias.value_or(Tensor())});
    ctx->saved_data["is_probs"] = is_probs;
    ctx->saved_data["keep_zeros"] = keep_zeros;
    ctx->saved_data["log_output"] = log_output;
    ctx->saved_data["wide"] = wide;
    return output;
  }

  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* ctx,
                                                 torch::autograd::variable_list grads) {
    torch::autograd::variable_list result(12);  // autograd requires one gradient per argument of forward
    const Tensor& grad = grads[0];
    if (!grad.defined()) return result;
    const auto saved = ctx->get_saved_variables();
    const bool is_probs = ctx->saved_data["is_probs"].toBool(), keep_zeros = ctx->saved_data["keep_zeros"].toBool();
    const bool log_output = ctx->saved_data["log_output"].toBool(), wide = ctx->saved_data["wide"].toBool();
    std::array<bool, kTensors> needed{};
    // Absent tensors have no edge in the graph.
    for (int i = 0, edge = 0; i < kTensors; ++i) needed[i] = saved[i].defined() && ctx->needs_input_grad(edge++);
    if (c10::GradMode::is_enabled()) {
      // The gradient must be differentiable. Because of the aliases, a hook on the user's tensor fires only once.
      std::vector<Tensor> sources;
      for (const auto& tensor : saved) sources.push_back(tensor.defined() ? at::alias(tensor) : Tensor());
      const Tensor output = composite_op().call(sources[0], sources[1], sources[2], sources[3], optional(sources[4]),
                                                optional(sources[5]), is_probs, keep_zeros, log_output, wide);
      torch::autograd::variable_list wanted;
      for (int i = 0; i < kTensors; ++i) {
        if (needed[i]) wanted.push_back(sources[i]);
      }
      const auto found = torch::autograd::grad({output}, wanted, {grad}, /*retain_graph=*/true, /*create_graph=*/true,
                                               /*allow_unused=*/true);
      for (int i = 0, k = 0; i < kTensors; ++i) {
        if (needed[i]) result[i] = found[k++];
      }
      return result;
    }
    static const auto op = find_operator<BackwardSignature>("focalkern::spline_map_backward");
    const auto found = op.call(grad, saved[0], saved[1], saved[2], saved[3], optional(saved[4]), optional(saved[5]),
                               is_probs, keep_zeros, log_output, needed);
    if (needed[0]) result[0] = std::get<0>(found);
    if (needed[1]) result[1] = std::get<1>(found);
    if (needed[2]) result[2] = std::get<2>(found);
    if (needed[3]) result[3] = std::get<3>(found);
    if (needed[4]) result[4] = std::get<4>(found);
    if (needed[5]) result[5] = std::get<5>(found);
    return result;
  }
};

Tensor forward_autograd(const Tensor& input, const Tensor& parameters, const Tensor& knots, const Tensor& coefficients,
                        const OptionalTensor& weight, const OptionalTensor& bias, bool is_probs, bool keep_zeros,
                        bool log_output, bool wide, bool keep_order, bool validate) {
  return SplineMapFunction::apply(input, parameters, knots, coefficients, weight, bias, is_probs, keep_zeros,
                                  log_output, wide, keep_order, validate);
}

// ---- the eager entry -----------------------------------------------------------------------------------------------

Tensor spline_map(const Tensor& input, const Tensor& parameters, const Tensor& knots, const Tensor& coefficients,
                  const OptionalTensor& weight, const OptionalTensor& bias, bool is_probs, bool keep_zeros,
                  bool keep_order, bool log_output) {
  const auto device = input.device().type();
  const bool wide = compute_dtype(input.scalar_type()) != input.scalar_type() &&
                    at::autocast::is_autocast_available(device) && at::autocast::is_autocast_enabled(device);
  const Tensor of_weight = weight.value_or(Tensor()), of_bias = bias.value_or(Tensor());
  if (needs_composite({&input, &parameters, &knots, &coefficients, &of_weight, &of_bias})) {
    return composite_op().call(input, parameters, knots, coefficients, weight, bias, is_probs, keep_zeros, log_output,
                               wide);
  }
  check_device(kOp, input);
  constexpr bool validate = true;
  const auto keys = input.key_set() | parameters.key_set() | knots.key_set() | coefficients.key_set() |
                    of_weight.key_set() | of_bias.key_set();
  if (!torch::autograd::compute_requires_grad(input, parameters, knots, coefficients, of_weight, of_bias) &&
      only_chooses_a_kernel(keys)) {
    return forward(input, parameters, knots, coefficients, weight, bias, is_probs, keep_zeros, log_output, wide,
                   keep_order, validate);
  }
  return forward_op().call(input, parameters, knots, coefficients, weight, bias, is_probs, keep_zeros, log_output, wide,
                           keep_order, validate);
}

}  // namespace

void register_spline_map(torch::Library& definitions, pybind11::module_& module) {
  const std::vector<at::Tag> tags{at::Tag::pt2_compliant_tag};
  for (const char* schema : {kSplineMapForwardSchema, kSplineMapBackwardSchema, kSplineMapCompositeSchema}) {
    definitions.def(schema, tags);
  }
  definitions.impl("spline_map_forward", torch::dispatch(c10::DispatchKey::CPU, &forward));
  definitions.impl("spline_map_backward", torch::dispatch(c10::DispatchKey::CPU, &backward));
#ifdef FOCALKERN_WITH_CUDA
  definitions.impl("spline_map_forward", torch::dispatch(c10::DispatchKey::CUDA, &forward));
  definitions.impl("spline_map_backward", torch::dispatch(c10::DispatchKey::CUDA, &backward));
#endif
  definitions.impl("spline_map_forward", torch::dispatch(c10::DispatchKey::Meta, &forward_meta));
  definitions.impl("spline_map_backward", torch::dispatch(c10::DispatchKey::Meta, &backward_meta));
  definitions.impl("spline_map_forward", torch::dispatch(c10::DispatchKey::Autograd, &forward_autograd));

  module.def("spline_map", &spline_map, pybind11::call_guard<pybind11::gil_scoped_release>());
}

}  // namespace focalkern::bindings
