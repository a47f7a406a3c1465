// The z-loss beside a row loss on the CPU: kernels/z_loss.h. Without autograd; focalkern.ops._z_loss calls it.

#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <tuple>
#include <vector>

#include "bindings/common.h"
#include "bindings/z_loss.h"
#include "kernels/z_loss.h"

namespace focalkern::bindings {
namespace {

constexpr int64_t kRowsPerTask = 4096;

// The row loss plus the z-loss, and the numbers that it saves for both. loss and saved [3 N + 1] are those of the row
// loss of input [C] or [N, C, ...], in float32 or float64; target has labels, or class probabilities; `soft` says
// whether the row loss has these or smoothing.
std::tuple<Tensor, Tensor> checked_z_loss(const Tensor& loss, const Tensor& saved, const Tensor& given,
                                          const Tensor& given_target, const OptionalTensor& given_weight,
                                          int64_t ignore_index, bool soft, int64_t reduction, double coefficient) {
  const char* op = "z_loss";
  check_floating(op, "input", given);
  check_device(op, given);
  const auto real = compute_dtype(given.scalar_type());
  const int64_t class_dim = class_dim_of(given), classes = given.size(class_dim), n = given.numel() / classes;
  const bool has_labels = !given_target.is_floating_point();
  TORCH_CHECK_VALUE(given.is_cpu() && saved.is_cpu() && saved.dim() == 1 && saved.numel() == 3 * n + 1 &&
                        saved.scalar_type() == real && saved.is_contiguous(),
                    op, ": saved must be the numbers [3 N + 1] = [", 3 * n + 1, "] of a row loss, got ",
                    dtype_name(saved.scalar_type()), " ", saved.sizes());
  TORCH_CHECK_VALUE(loss.is_cpu() && loss.scalar_type() == real && loss.numel() == (reduction == kNone ? n : 1), op,
                    ": loss must be that of the rows, got ", dtype_name(loss.scalar_type()), " ", loss.sizes());
  TORCH_CHECK_VALUE(given_target.is_cpu() && (has_labels ? given_target.numel() == n : soft), op,
                    ": target must be labels [N] = [", n, "] on the CPU, got ", given_target.sizes());
  const Tensor target = given_target.contiguous(), sum_of_losses = loss.clone(at::MemoryFormat::Contiguous);
  const Tensor edited = at::empty_like(saved);
  OptionalTensor weight;
  if (given_weight.has_value() && has_labels) weight = as_dtype(*given_weight, real).contiguous();
  TORCH_CHECK_VALUE(!weight || (weight->is_cpu() && weight->numel() == classes), op, ": weight must be [C] = [",
                    classes, "] on the CPU");
  dispatch_scalar(given.scalar_type(), [&](auto scalar) {
    using Scalar = decltype(scalar);
    using Real = compute_t<Scalar>;
    Tensor input = given;
    auto layout = row_layout(input, class_dim, /*with_images=*/true);
    if (!layout) {
      input = input.contiguous();
      layout = row_layout(input, class_dim, /*with_images=*/true);
    }
    ZLossArgs<Scalar> args{};
    args.rows = n;
    args.classes = classes;
    args.saved = static_cast<const Real*>(saved.const_data_ptr());
    if (!soft) args.logits = static_cast<const Scalar*>(input.const_data_ptr());
    args.layout = *layout;
    if (has_labels) args.labels = labels_of(target);
    args.ignore_index = ignore_index;
    args.class_weight = pointer_or_null<Real>(weight);
    args.coefficient = coefficient;
    args.edited = static_cast<Real*>(edited.mutable_data_ptr());
    auto* result = static_cast<Real*>(sum_of_losses.mutable_data_ptr());
    if (reduction == kNone) args.row_loss = result;
    const int64_t chunks = (n + kRowsPerTask - 1) / kRowsPerTask;
    std::vector<double> sums(chunks);
    at::parallel_for(0, chunks, 1, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) {
        sums[i] = cpu::z_loss(args, i * kRowsPerTask, std::min(n, (i + 1) * kRowsPerTask));
      }
    });
    const Real divisor = args.saved[3 * n];
    args.edited[3 * n] = divisor;
    if (reduction == kNone) return;
    double sum = 0;
    for (const double part : sums) sum += part;
    if (reduction == kMean) sum /= static_cast<double>(divisor);
    *result = static_cast<Real>(*result + sum);
  });
  return {sum_of_losses, edited};
}

}  // namespace

void register_z_loss(pybind11::module_& module) {
  module.def("z_loss", &checked_z_loss, pybind11::call_guard<pybind11::gil_scoped_release>());
}

}  // namespace focalkern::bindings
