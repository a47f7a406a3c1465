// focal_calibration_map and binary_focal_calibration_map: argument checks, kernel calls, autograd, the eager entry.
//
//   calibration_map_forward    -> output
//   calibration_map_backward   -> (grad_input, grad_gamma, grad_temperature), empty where not needed
//   calibration_map_composite  -> output   in differentiable torch operations, by focalkern.fallback
//
// `kind` is the kind of the input: rows of logits, rows of probabilities, or one logit each (the binary map). The
// backward pass needs only the arguments. Derivatives of higher order, torch.func transforms and forward-mode tangents
// go through calibration_map_composite.

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/scalar_tensor.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/csrc/autograd/functions/utils.h>

#include <tuple>
#include <vector>

#include "bindings/calibration_map_kernels.h"
#include "bindings/direct_call.h"
#include "math/calibration_map.h"

namespace focalkern::bindings {
namespace {

using ForwardSignature = Tensor(const Tensor&, const Tensor&, const Tensor&, int64_t, bool, bool, bool);
using BackwardSignature = std::tuple<Tensor, Tensor, Tensor>(const Tensor&, const Tensor&, const Tensor&, const Tensor&,
                                                             int64_t, bool, std::array<bool, 3>);

using CompositeSignature = Tensor(const Tensor&, const Tensor&, const Tensor&, int64_t, bool, bool);

const auto& forward_op() {
  static const auto op = find_operator<ForwardSignature>("focalkern::calibration_map_forward");
  return op;
}
const auto& backward_op() {
  static const auto op = find_operator<BackwardSignature>("focalkern::calibration_map_backward");
  return op;
}

// calibration_map_composite, which focalkern.fallback implements.
Tensor composite_map(const Tensor& input, const Tensor& gamma, const Tensor& temperature, const Options& options) {
  static const auto op = find_operator<CompositeSignature>("focalkern::calibration_map_composite");
  return op.call(input, gamma, temperature, options.kind, options.log_output, options.wide);
}

struct CalibrationMapFunction : torch::autograd::Function<CalibrationMapFunction> {
  static Tensor forward(torch::autograd::AutogradContext* ctx, const Tensor& input, const Tensor& gamma,
                        const Tensor& temperature, int64_t kind, bool log_output, bool wide, bool validate) {
    const at::AutoDispatchBelowADInplaceOrView guard;
    const Tensor output = forward_op().call(input, gamma, temperature, kind, log_output, wide, validate);
    ctx->save_for_backward({input, gamma, temperature});
    ctx->saved_data["kind"] = kind;
    ctx->saved_data["log_output"] = log_output;
    ctx->saved_data["wide"] = wide;
    return output;
  }

  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* ctx,
                                                 torch::autograd::variable_list grads) {
    torch::autograd::variable_list result(7);  // autograd requires one gradient per argument of forward
    const Tensor& grad = grads[0];
    if (!grad.defined()) return result;
    const auto saved = ctx->get_saved_variables();
    const Options options{ctx->saved_data["kind"].toInt(), ctx->saved_data["log_output"].toBool(),
                          ctx->saved_data["wide"].toBool()};
    const std::array<bool, 3> needed{ctx->needs_input_grad(0), ctx->needs_input_grad(1), ctx->needs_input_grad(2)};
    if (c10::GradMode::is_enabled()) {
      const auto composite = [&](const auto& v) { return composite_map(v[0], v[1], v[2], options); };
      differentiable_gradients<3>({saved[0], saved[1], saved[2]}, needed, grad, composite, result);
      return result;
    }
    auto found = backward_op().call(grad, saved[0], saved[1], saved[2], options.kind, options.log_output, needed);
    if (needed[0]) result[0] = std::move(std::get<0>(found));
    if (needed[1]) result[1] = std::move(std::get<1>(found));
    if (needed[2]) result[2] = std::move(std::get<2>(found));
    return result;
  }
};

Tensor forward_autograd(const Tensor& input, const Tensor& gamma, const Tensor& temperature, int64_t kind,
                        bool log_output, bool wide, bool validate) {
  return CalibrationMapFunction::apply(input, gamma, temperature, kind, log_output, wide, validate);
}

// ---- the eager entry -----------------------------------------------------------------------------------------------

Tensor calibration_map(const Tensor& input, const Tensor& gamma, const Tensor& temperature, int64_t kind,
                       bool log_output) {
  const bool wide = autocasts(input);
  if (needs_composite({&input, &gamma, &temperature})) {
    check_arguments(input, gamma, temperature, kind);
    return composite_map(input, gamma, temperature, {kind, log_output, wide});
  }
  check_device(op_name(kind), input);
  return forward_op().call(input, gamma, temperature, kind, log_output, wide, /*validate=*/true);
}

Tensor calibration_map_scalar(const Tensor& input, double gamma, double temperature, int64_t kind, bool log_output) {
  const bool is_recorded = torch::autograd::compute_requires_grad(input);
  if (!is_recorded && !needs_composite({&input}) && only_chooses_a_kernel(input.key_set())) {
    const at::AutoDispatchBelowADInplaceOrView guard;
    const bool wide = autocasts(input);
#ifdef FOCALKERN_WITH_CUDA
    if (input.is_cuda()) return forward_cuda(input, gamma, temperature, kind, log_output, wide, /*validate=*/true);
#endif
    return forward_cpu(input, gamma, temperature, kind, log_output, wide, /*validate=*/true);
  }
  return calibration_map(input, at::scalar_tensor(gamma, at::kDouble), at::scalar_tensor(temperature, at::kDouble),
                         kind, log_output);
}

}  // namespace

void register_calibration_map(torch::Library& definitions, pybind11::module_& module) {
  const std::vector<at::Tag> tags{at::Tag::pt2_compliant_tag};
  definitions.def(kCalibrationMapForwardSchema, tags);
  definitions.def(kCalibrationMapBackwardSchema, tags);
  definitions.def(kCalibrationMapCompositeSchema, tags);
  definitions.impl("calibration_map_forward", torch::dispatch(c10::DispatchKey::CPU, &forward_cpu<Tensor>));
  definitions.impl("calibration_map_backward", torch::dispatch(c10::DispatchKey::CPU, &backward_cpu));
#ifdef FOCALKERN_WITH_CUDA
  definitions.impl("calibration_map_forward", torch::dispatch(c10::DispatchKey::CUDA, &forward_cuda<Tensor>));
  definitions.impl("calibration_map_backward", torch::dispatch(c10::DispatchKey::CUDA, &backward_cuda));
#endif
  definitions.impl("calibration_map_forward", torch::dispatch(c10::DispatchKey::Meta, &forward_meta));
  definitions.impl("calibration_map_backward", torch::dispatch(c10::DispatchKey::Meta, &backward_meta));
  definitions.impl("calibration_map_forward", torch::dispatch(c10::DispatchKey::Autograd, &forward_autograd));

  using release = pybind11::call_guard<pybind11::gil_scoped_release>;
  module.def("calibration_map", &calibration_map, release());
  module.def("calibration_map_scalar", &calibration_map_scalar, release());
}

}  // namespace focalkern::bindings
