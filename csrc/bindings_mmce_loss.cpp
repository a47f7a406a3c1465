// MMCELoss on the CPU, for labels without class weights and smoothing: the rows' kernels are focal_loss_forward and
// focal_loss_backward, and in between the error of the batch becomes a number for each row. Derivatives of higher order
// go through `composite_loss`, the same in differentiable torch operations.

#include <ATen/autocast_mode.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/alias.h>
#include <ATen/ops/constant_pad_nd.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/scalar_tensor.h>
#include <ATen/ops/searchsorted.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/custom_function.h>

#include <tuple>

#include "bindings.h"
#include "cpu/mmce_loss.h"
#include "math/row_loss.h"

namespace focalkern::bindings {
namespace {

constexpr int64_t kKind = 4;  // among the losses of rows

struct Settings : torch::CustomClassHolder {
  double coefficient;
  bool weighted;
  double bandwidth;
  int64_t reduction;  // 1 mean, 2 sum
  int64_t ignore_index;
};

using OptionalTensor = std::optional<Tensor>;
using ForwardSignature = std::tuple<Tensor, Tensor>(const Tensor&, const Tensor&, const Tensor&, const OptionalTensor&,
                                                    const OptionalTensor&, int64_t, int64_t, double, bool, bool,
                                                    int64_t, double);
using BackwardSignature = std::tuple<Tensor, Tensor, Tensor>(const Tensor&, const Tensor&, const Tensor&, const Tensor&,
                                                             const OptionalTensor&, const OptionalTensor&,
                                                             const Tensor&, int64_t, int64_t, double, bool,
                                                             std::array<bool, 3>, int64_t, double);

// sum_ij a_i a_j exp(-|r_i - r_j| / h): see cpu/mmce_loss.cpp.
Tensor laplacian_form(const Tensor& given_a, const Tensor& given_r, double h) {
  const auto [r, order] = given_r.sort(std::optional<bool>(true), /*dim=*/0, /*descending=*/false);
  const Tensor a = given_a.index({order});
  const Tensor sorted = r.detach();
  const Tensor first = at::searchsorted(sorted, sorted);
  const Tensor behind = at::searchsorted(sorted, sorted, /*out_int32=*/false, /*right=*/true);
  const Tensor rise = (r / h).exp(), fall = (-r / h).exp();
  const Tensor below = at::constant_pad_nd((a * rise).cumsum(0), {1, 0}).index({first}) * fall;
  const Tensor above = at::constant_pad_nd((a * fall).flip(0).cumsum(0).flip(0), {0, 1}).index({behind}) * rise;
  const Tensor mass = at::constant_pad_nd(a.cumsum(0), {1, 0});
  return (a * (below + (mass.index({behind}) - mass.index({first})) + above)).sum();
}

Tensor composite_loss(const Tensor& input, const Tensor& target, const Settings& settings) {
  const Tensor valid = (target != settings.ignore_index).reshape({-1});
  const Tensor rows = input.to(compute_dtype(input.scalar_type())).movedim(input.dim() == 1 ? 0 : 1, -1);
  const Tensor z = at::where(valid.unsqueeze(-1), rows.reshape({-1, rows.size(-1)}), 0);
  const Tensor labels = at::where(valid, target.reshape({-1}).to(at::kLong), 0).unsqueeze(-1);
  const Tensor top = z.detach().argmax(-1, /*keepdim=*/true);
  // Beside the largest class the others are a sum without it, and nothing cancels.
  const Tensor beside = z - z.gather(-1, top);
  const Tensor rest = beside.exp().scatter(-1, top, 0).sum(-1);
  const Tensor log_s = rest.log1p();
  const Tensor losses = at::where(valid, log_s - beside.gather(-1, labels).squeeze(-1), 0);
  const Tensor count = valid.sum();
  const Tensor correct = (top == labels).squeeze(-1);
  const Tensor r = (-log_s.to(at::kDouble)).exp(), lack = -((-log_s.to(at::kDouble)).expm1());
  Tensor of_correct = 1.0 / count.to(at::kDouble), of_wrong = of_correct;
  if (settings.weighted) {
    const Tensor n_correct = correct.logical_and(valid).sum();
    const Tensor both = (n_correct > 0).logical_and(n_correct < count);
    of_correct = at::where(both, 1.0 / n_correct.to(at::kDouble), 0);
    of_wrong = at::where(both, 1.0 / (count - n_correct).to(at::kDouble), 0);
  }
  const Tensor a = at::where(valid, at::where(correct, lack * of_correct, -r * of_wrong), 0);
  const Tensor squared = laplacian_form(a, r, settings.bandwidth);
  const Tensor positive = squared > 0;
  Tensor error = at::where(positive, at::where(positive, squared, 1).sqrt(), 0);
  Tensor total = losses.sum();
  if (settings.reduction == 1) {
    total = total / count;
  } else {
    error = error * count;
  }
  return total + (settings.coefficient * error).to(total.scalar_type());
}

struct MmceFunction : torch::autograd::Function<MmceFunction> {
  static Tensor forward(torch::autograd::AutogradContext* ctx, const Tensor& input, const Tensor& target,
                        const c10::intrusive_ptr<Settings>& settings) {
    const at::AutoDispatchBelowADInplaceOrView guard;
    static const auto op = find_operator<ForwardSignature>("focalkern::focal_loss_forward");
    static const Tensor& no_gamma = *new Tensor(at::scalar_tensor(0, at::kDouble));  // outlives torch's own statics
    auto [loss, saved] = op.call(input, target, no_gamma, std::nullopt, std::nullopt, settings->reduction,
                                 settings->ignore_index, /*label_smoothing=*/0.0, /*detach_modulation=*/false,
                                 /*float32_loss=*/true, kKind, /*epsilon=*/0.0);
    const int64_t rows = target.numel();
    const Tensor labels = target.contiguous();
    const Tensor gamma = at::empty(target.sizes(), saved.options());
    auto* const to_loss = loss.mutable_data_ptr();
    dispatch_scalar(saved.scalar_type(), [&](auto scalar) {
      using Real = compute_t<decltype(scalar)>;
      const auto* numbers = static_cast<const Real*>(saved.const_data_ptr());
      const cpu::MmceBatch batch{rows, settings->weighted, settings->bandwidth, labels_of(labels),
                                 settings->ignore_index};
      // The kernel multiplies it by what the cross-entropy of a row has in the loss: 1 / count for a mean.
      const auto found = cpu::mmce_of_batch(batch, numbers + rows, numbers + 3 * rows, settings->coefficient,
                                            static_cast<Real*>(gamma.mutable_data_ptr()));
      const double error = settings->reduction == 1 ? found.error : found.error * static_cast<double>(found.count);
      *static_cast<Real*>(to_loss) += static_cast<Real>(settings->coefficient * error);
    });
    ctx->save_for_backward({input, target, saved, gamma});
    ctx->saved_data["settings"] = c10::IValue::make_capsule(settings);
    return loss;
  }

  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* ctx,
                                                 torch::autograd::variable_list grads) {
    const auto variables = ctx->get_saved_variables();
    const auto capsule = ctx->saved_data["settings"].toCapsule();
    const auto& settings = static_cast<const Settings&>(*capsule);
    const Tensor &input = variables[0], &target = variables[1];
    if (c10::GradMode::is_enabled()) {
      const Tensor source = at::alias(input);
      const Tensor loss = composite_loss(source, target, settings);
      auto found = torch::autograd::grad({loss}, {source}, {grads[0].to(loss.scalar_type())}, /*retain_graph=*/true,
                                         /*create_graph=*/true);
      return {found[0], Tensor(), Tensor()};
    }
    static const auto op = find_operator<BackwardSignature>("focalkern::focal_loss_backward");
    auto [grad_input, grad_target, grad_gamma] =
        op.call(grads[0], input, target, variables[3], std::nullopt, std::nullopt, variables[2], settings.reduction,
                settings.ignore_index, 0.0, false, {true, false, false}, kKind, 0.0);
    return {grad_input, Tensor(), Tensor()};
  }
};

// Nothing where the loss is to be put together from torch's operations, which also say what is wrong with a batch: for
// all but labels and logits on the CPU at which nothing but this function's autograd looks.
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

void register_mmce_loss(pybind11::module_& module) { module.def("mmce_loss", &mmce_loss); }

}  // namespace focalkern::bindings
