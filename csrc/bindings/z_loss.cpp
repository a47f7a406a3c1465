// The z-loss beside a row loss on the CPU: kernels/z_loss.h. Without autograd; focalkern.ops._z_loss calls it.

#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <c10/util/Exception.h>

#include <tuple>

#include "bindings/common.h"
#include "bindings/z_loss.h"
#include "kernels/z_loss.h"

namespace focalkern::bindings {
namespace {

// The z-loss of each row [N], and the saved numbers [3 N + 1] of its sum with the row loss. target_logit [N] is that of
// labels without smoothing, target [N] that of labels, weight [C].
std::tuple<Tensor, Tensor> checked_z_loss(const Tensor& saved, const OptionalTensor& target_logit,
                                          const OptionalTensor& target, const OptionalTensor& weight,
                                          int64_t ignore_index, double coefficient) {
  constexpr int64_t kRowsPerTask = 4096;
  const char* op = "z_loss";
  const auto type = saved.scalar_type();
  TORCH_CHECK_VALUE(saved.is_cpu() && saved.dim() == 1 && saved.numel() % 3 == 1 && saved.is_contiguous() &&
                        (type == at::kFloat || type == at::kDouble),
                    op, ": saved must be the float32 or float64 numbers [3 N + 1] of a row loss, got ", type, " ",
                    saved.sizes());
  const int64_t n = saved.numel() / 3;
  for (const auto& [name, tensor] : {std::pair{"target_logit", &target_logit}, std::pair{"weight", &weight}}) {
    TORCH_CHECK_VALUE(!*tensor || ((*tensor)->is_cpu() && (*tensor)->scalar_type() == at::kDouble &&
                                   (*tensor)->dim() == 1 && (*tensor)->is_contiguous()),
                      op, ": ", name, " must be float64 and contiguous, of one dimension, on the CPU");
  }
  TORCH_CHECK_VALUE(
      !target || (target->is_cpu() && target->is_contiguous() && !target->is_floating_point() && target->numel() == n),
      op, ": target must be contiguous labels [N] = [", n, "] on the CPU");
  TORCH_CHECK_VALUE(!target_logit || (target && target_logit->numel() == n), op, ": target_logit must be [N] = [", n,
                    "], beside a target");
  const Tensor loss = at::empty({n}, saved.options().dtype(at::kDouble));
  const Tensor edited = at::empty_like(saved);
  dispatch_scalar(type, [&](auto scalar) {
    using Real = compute_t<decltype(scalar)>;
    const auto* numbers = static_cast<const Real*>(saved.const_data_ptr());
    auto* result = static_cast<Real*>(edited.mutable_data_ptr());
    const ZLossArgs<Real> args{n,
                               numbers,
                               pointer_or_null<double>(target_logit),
                               target ? labels_of(*target) : Labels{nullptr, Labels::Type::kInt64},
                               ignore_index,
                               weight ? weight->numel() : 0,
                               pointer_or_null<double>(weight),
                               coefficient,
                               static_cast<double*>(loss.mutable_data_ptr()),
                               result};
    at::parallel_for(0, n, kRowsPerTask, [&](int64_t begin, int64_t end) { cpu::z_loss(args, begin, end); });
    result[3 * n] = numbers[3 * n];  // the divisor of the mean
  });
  return {loss, edited};
}

}  // namespace

void register_z_loss(pybind11::module_& module) {
  module.def("z_loss", &checked_z_loss, pybind11::call_guard<pybind11::gil_scoped_release>());
}

}  // namespace focalkern::bindings
