// Kernel calls of the spline map: both devices, and fake tensors.
#pragma once

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/constant_pad_nd.h>
#include <ATen/ops/cummax.h>
#include <ATen/ops/cummin.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/sort.h>
#include <c10/util/Exception.h>

#include <array>
#include <tuple>

#include "bindings/spline_map_arguments.h"

namespace focalkern::bindings {
namespace {

// `result` in the order of `input`: each class takes the largest result of all classes whose input is at most its own.
Tensor in_order(const Tensor& input, const Tensor& result) {
  const auto [ordered, order] = at::sort(input, -1);
  const Tensor raised = std::get<0>(at::cummax(result.gather(-1, order), -1));
  const Tensor same = ordered.slice(-1, 1).eq(ordered.slice(-1, 0, -1));
  const Tensor last = at::constant_pad_nd(same.logical_not(), {0, 1}, 1);  // of equal ones
  const Tensor of_last = std::get<0>(at::cummin(raised.masked_fill(last.logical_not(), kInfinity).flip(-1), -1));
  return at::empty_like(result).scatter_(-1, order, of_last.flip(-1));
}

// On CUDA only FOCALKERN_VALIDATE=1 waits for the device, to look for invalid rows.
Tensor forward(const Tensor& input, const Tensor& parameters, const Tensor& knots, const Tensor& coefficients,
               const OptionalTensor& weight, const OptionalTensor& bias, bool is_probs, bool keep_zeros,
               bool log_output, bool wide, bool keep_order, bool validate) {
  check_arguments(input, parameters, knots, coefficients, weight, bias);
  const at::AutoDispatchBelowADInplaceOrView below;
  const auto run = prepared(input, parameters, knots, coefficients, weight, bias, is_probs, keep_zeros);
  const Tensor output = empty_result_like(run.input(), result_dtype(input, wide));
  int64_t invalid = run.forward(output, log_output, keep_order);
  const bool requested = validation_requested();
  if (input.is_cuda() && requested && output.numel() > 0) {
    const Tensor rows = output.view({-1, output.size(-1)}).select(1, 0).isnan().nonzero();
    if (rows.numel() > 0) invalid = rows.reshape(-1)[0].item<int64_t>();
  }
  if (invalid >= 0 && (validate || requested)) raise_invalid_row(input, is_probs, invalid);
  return keep_order && run.leaves_order() ? in_order(run.input(), output) : output;
}

void check_gradient(const Tensor& grad, const Tensor& input) {
  check_floating(kOp, "grad", grad);
  check_same_device(kOp, "grad", grad, input);
  TORCH_CHECK_VALUE(grad.sym_sizes() == input.sym_sizes(), kOp, ": grad must have the shape of the output, ",
                    input.sym_sizes(), ", got ", grad.sym_sizes());
}

using Gradients = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor>;

using Gradients = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor>;

// All parameters get their gradients; `needed` is about the input.
Gradients backward(const Tensor& grad, const Tensor& input, const Tensor& parameters, const Tensor& knots,
                   const Tensor& coefficients, const OptionalTensor& weight, const OptionalTensor& bias, bool is_probs,
                   bool keep_zeros, bool log_output, std::array<bool, 6> needed) {
  check_arguments(input, parameters, knots, coefficients, weight, bias);
  check_gradient(grad, input);
  const at::AutoDispatchBelowADInplaceOrView below;
  const auto run = prepared(input, parameters, knots, coefficients, weight, bias, is_probs, keep_zeros);
  OptionalTensor grad_input;
  if (needed[0]) grad_input = empty_result_like(run.input(), input.scalar_type());
  return std::tuple_cat(std::make_tuple(grad_input ? *grad_input : at::empty({0}, input.options())),
                        run.backward(grad.contiguous(), grad_input, log_output));
}

Tensor forward_meta(const Tensor& input, const Tensor& parameters, const Tensor& knots, const Tensor& coefficients,
                    const OptionalTensor& weight, const OptionalTensor& bias, bool /*is_probs*/, bool /*keep_zeros*/,
                    bool /*log_output*/, bool wide, bool /*keep_order*/, bool /*validate*/) {
  check_arguments(input, parameters, knots, coefficients, weight, bias);
  return at::empty_symint(input.sym_sizes(), input.options().dtype(result_dtype(input, wide)));
}

Gradients backward_meta(const Tensor& grad, const Tensor& input, const Tensor& parameters, const Tensor& knots,
                        const Tensor& coefficients, const OptionalTensor& weight, const OptionalTensor& bias,
                        bool /*is_probs*/, bool /*keep_zeros*/, bool /*log_output*/, std::array<bool, 6> needed) {
  check_arguments(input, parameters, knots, coefficients, weight, bias);
  check_gradient(grad, input);
  const auto like = [](const Tensor& tensor) { return at::empty_symint(tensor.sym_sizes(), tensor.options()); };
  const auto like_optional = [&](const OptionalTensor& tensor) {
    return tensor ? like(*tensor) : at::empty({0}, knots.options());
  };
  return {needed[0] ? like(input) : at::empty({0}, input.options()),
          like(parameters),
          like(knots),
          like(coefficients),
          like_optional(weight),
          like_optional(bias)};
}

}  // namespace
}  // namespace focalkern::bindings
