// MMCELoss on the CPU, for labels without class weights and smoothing: the kernels focal_loss_forward and
// focal_loss_backward compute the rows. Between them, the error of the batch gives one coefficient per row. Derivatives
// of higher order go through mmce_loss_composite, which focalkern.fallback implements in differentiable torch
// operations.

#include <ATen/autocast_mode.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/scalar_tensor.h>
#include <torch/csrc/autograd/custom_function.h>

#include <tuple>

#include "bindings/interface.h"
#include "bindings/mmce_run.h"
#include "bindings/row_loss_call.h"
#include "math/row_loss.h"

namespace focalkern::bindings {
namespace {

struct Settings : torch::CustomClassHolder {
  double coefficient;
  bool weighted;
  double bandwidth;
  int64_t reduction;  // kMean or kSum
  int64_t ignore_index;
};

// Cross-entropy, whose saved numbers the error of the batch needs.
RowLossOptions options_of(const Settings& settings) {
  return {RowLoss::kMmce,
          /*epsilon=*/0.0,
          settings.reduction,
          settings.ignore_index,
          /*label_smoothing=*/0.0,
          /*detach_modulation=*/false,
          /*float32_loss=*/true};
}

using MmceSignature = Tensor(const Tensor&, const Tensor&, double, bool, double, int64_t, int64_t);

struct MmceFunction : torch::autograd::Function<MmceFunction> {
  static Tensor forward(torch::autograd::AutogradContext* ctx, const Tensor& input, const Tensor& target,
                        const c10::intrusive_ptr<Settings>& settings) {
    const at::AutoDispatchBelowADInplaceOrView guard;
    static const Tensor& no_gamma = *new Tensor(at::scalar_tensor(0, at::kDouble));  // outlives torch's own statics
    auto [loss, saved] =
        call_row_loss_forward({input, target, no_gamma, std::nullopt, std::nullopt}, options_of(*settings));
    const Tensor gamma = at::empty(target.sizes(), saved.options());
    add_mmce<Interface>(saved, target.contiguous(), gamma, loss, settings->coefficient, settings->weighted,
                        settings->bandwidth, settings->reduction == kMean, settings->ignore_index);
    ctx->save_for_backward({input, target, saved, gamma});
    ctx->saved_data["settings"] = c10::IValue::make_capsule(settings);
    return loss;
  }

  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* ctx,
                                                 torch::autograd::variable_list grads) {
    const auto variables = ctx->get_saved_variables();
    const auto capsule = ctx->saved_data["settings"].toCapsule();
    const auto& settings = static_cast<const Settings&>(*capsule);
    const Tensor &input = variables[0], &target = variables[1], &gamma = variables[3];
    torch::autograd::variable_list result(3);
    if (c10::GradMode::is_enabled()) {
      static const auto op = find_operator<MmceSignature>("focalkern::mmce_loss_composite");
      const auto composite = [&](const auto& v) {
        return op.call(v[0], target, settings.coefficient, settings.weighted, settings.bandwidth, settings.reduction,
                       settings.ignore_index);
      };
      differentiable_gradients<1>({input}, {true}, grads[0], composite, result);
      return result;
    }
    result[0] = std::get<0>(call_row_loss_backward(grads[0], {input, target, gamma, std::nullopt, std::nullopt},
                                                   variables[2], options_of(settings), {true, false, false}));
    return result;
  }
};

// Returns nothing if torch's operations must compute the loss: for inputs other than labels and logits on the CPU, and
// if a transform or a forward-mode tangent is active. Those operations also report invalid batches.
OptionalTensor mmce_loss(const Tensor& input, const Tensor& target, double coefficient, bool weighted, double bandwidth,
                         int64_t reduction, int64_t ignore_index) {
  const auto labels = target.scalar_type();
  const bool is_taken = input.is_cpu() && target.is_cpu() && !input.is_nested() && input.layout() == at::kStrided &&
                        input.dim() >= 1 && input.is_floating_point() &&
                        (labels == at::kLong || labels == at::kInt || labels == at::kByte);
  if (!is_taken || needs_composite({&input, &target})) return std::nullopt;
  const pybind11::gil_scoped_release release;
  auto settings = c10::make_intrusive<Settings>();
  settings->coefficient = coefficient;
  settings->weighted = weighted;
  settings->bandwidth = bandwidth;
  settings->reduction = reduction;
  settings->ignore_index = ignore_index;
  const Tensor loss = MmceFunction::apply(input, target, settings);
  const bool autocast = at::autocast::is_autocast_enabled(at::kCPU);
  return autocast || loss.scalar_type() == input.scalar_type() ? loss : loss.to(input.scalar_type());
}

}  // namespace

void register_mmce_loss(torch::Library& definitions, pybind11::module_& module) {
  definitions.def(kMmceLossCompositeSchema, {at::Tag::pt2_compliant_tag});
  module.def("mmce_loss", &mmce_loss);
}

}  // namespace focalkern::bindings
