// Kernel calls of the spline map, for each device and for fake tensors.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/zeros.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <atomic>
#include <limits>
#include <tuple>
#include <vector>

#include "bindings/spline_map_arguments.h"

#ifdef FOCALKERN_WITH_CUDA
#include <ATen/ops/constant_pad_nd.h>
#include <ATen/ops/cummax.h>
#include <ATen/ops/cummin.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/sort.h>
#endif

namespace focalkern::bindings {
namespace {

// x of some rows on the CPU, [end - begin, C].
Tensor log_probs_of(const SplineInput& rows, int64_t begin, int64_t end) {
  const Tensor x = at::empty({end - begin, rows.classes}, at::kDouble);
  cpu::spline_log_probs(rows, x.mutable_data_ptr<double>(), begin, end);
  return x;
}

Tensor forward_cpu(const Tensor& input, const Tensor& parameters, const Tensor& knots, const Tensor& coefficients,
                   const OptionalTensor& weight, const OptionalTensor& bias, bool is_probs, bool keep_zeros,
                   bool keep_order, bool log_output, bool wide, bool validate) {
  check_arguments(input, parameters, knots, coefficients, weight, bias);
  const Prepared prepared(input, parameters, knots, coefficients, weight, bias, is_probs, keep_zeros);
  const Tensor output = empty_result_like(prepared.input, output_dtype(input, wide));
  const SplineMapForward args{prepared.rows,
                              prepared.curve,
                              prepared.scores,
                              log_output,
                              keep_order,
                              output.mutable_data_ptr(),
                              spline_storage(output.scalar_type()),
                              sum_tolerance(input.scalar_type())};
  std::atomic<int64_t> first_invalid{std::numeric_limits<int64_t>::max()};
  for_each_spline_chunk(args.rows, [&](int64_t /*chunk*/, int64_t begin, int64_t end) {
    SplineMapForward part = args;
    Tensor extra;
    if (prepared.is_matrix) {
      const at::AutoDispatchBelowADInplaceOrView guard;
      extra = prepared.matrix_scores(log_probs_of(args.rows, begin, end));
      part.scores.extra = extra.const_data_ptr<double>();
      part.scores.first_row = begin;
    }
    const int64_t invalid = cpu::spline_map_forward(part, begin, end);
    int64_t first = first_invalid.load();
    while (invalid >= 0 && invalid < first && !first_invalid.compare_exchange_weak(first, invalid)) {
    }
  });
  if (first_invalid < std::numeric_limits<int64_t>::max() && (validate || validation_requested())) {
    raise_invalid_row(input, is_probs, first_invalid);
  }
  return output;
}

void check_gradient(const Tensor& grad, const Tensor& input) {
  TORCH_CHECK_VALUE(grad.sym_sizes() == input.sym_sizes() && grad.is_floating_point(), kOp,
                    ": grad must have the shape of the output, ", input.sym_sizes(), ", got ", grad.sym_sizes());
}

using Gradients = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor>;

// The derivative in the origins of the pieces; knot 1 is the origin of two. f depends on u - origin.
Tensor gradient_of_knots(const double* of_powers, const SplineCurve& curve) {
  const Tensor result = at::zeros({curve.knots}, at::kDouble);
  double* grad = result.mutable_data_ptr<double>();
  for (int64_t piece = 0; piece <= curve.knots; ++piece) {
    const double *of = of_powers + 4 * piece, *c = curve.coefficients + 4 * piece;
    grad[std::max<int64_t>(piece - 1, 0)] -= c[1] * of[0] + 2 * c[2] * of[1] + 3 * c[3] * of[2];
  }
  return result;
}

Tensor to_tensor(const std::vector<double>& values, at::IntArrayRef shape) {
  const Tensor result = at::empty(shape, at::kDouble);
  std::copy(values.begin(), values.end(), result.mutable_data_ptr<double>());
  return result;
}

Gradients backward_cpu(const Tensor& grad, const Tensor& input, const Tensor& parameters, const Tensor& knots,
                       const Tensor& coefficients, const OptionalTensor& weight, const OptionalTensor& bias,
                       bool is_probs, bool keep_zeros, bool log_output, bool need_input) {
  check_arguments(input, parameters, knots, coefficients, weight, bias);
  check_gradient(grad, input);
  const Prepared prepared(input, parameters, knots, coefficients, weight, bias, is_probs, keep_zeros);
  const Tensor upstream = grad.contiguous();
  const Tensor grad_input =
      need_input ? empty_result_like(prepared.input, input.scalar_type()) : at::empty({0}, input.options());
  const SplineMapBackward args{prepared.rows,
                               prepared.curve,
                               prepared.scores,
                               log_output,
                               upstream.const_data_ptr(),
                               spline_storage(upstream.scalar_type()),
                               /*of_x=*/nullptr,
                               /*grad_scores=*/nullptr,
                               need_input ? grad_input.mutable_data_ptr() : nullptr};
  const int64_t classes = weight || bias ? args.rows.classes : 0;
  std::vector<cpu::SplineMapGradient> sums(n_spline_chunks(args.rows) + 1,
                                           cpu::SplineMapGradient(args.curve.knots, classes));
  // The gradient of a matrix is a product over all rows at once.
  const auto of_entries = [&] {
    return at::empty({prepared.is_matrix ? args.rows.rows : 0, args.rows.classes}, at::kDouble);
  };
  const Tensor all_x = of_entries(), all_slopes = of_entries();
  for_each_spline_chunk(args.rows, [&](int64_t chunk, int64_t begin, int64_t end) {
    SplineMapBackward part = args;
    Tensor extra, of_x;
    if (prepared.is_matrix) {
      const at::AutoDispatchBelowADInplaceOrView guard;
      const Tensor x = all_x.slice(0, begin, end), slopes = all_slopes.slice(0, begin, end);
      cpu::spline_log_probs(args.rows, x.mutable_data_ptr<double>(), begin, end);
      extra = prepared.matrix_scores(x);
      part.scores.extra = extra.const_data_ptr<double>();
      part.scores.first_row = begin;
      part.grad_scores = slopes.mutable_data_ptr<double>();
      part.grad_input = nullptr;
      cpu::SplineMapGradient unused(args.curve.knots, classes);
      cpu::spline_map_backward(part, begin, end, unused);
      of_x = at::mm(slopes, *prepared.weight);
      part.of_x = of_x.const_data_ptr<double>();
      part.grad_scores = nullptr;
      part.grad_input = args.grad_input;
    }
    cpu::spline_map_backward(part, begin, end, sums[chunk]);
  });
  cpu::SplineMapGradient& sum = sums.back();
  for (size_t i = 0; i + 1 < sums.size(); ++i) sum.add(sums[i]);
  const auto of_class = [&](const OptionalTensor& tensor, const std::vector<double>& values) {
    return tensor ? to_tensor(values, {args.rows.classes}) : at::empty({0}, at::kDouble);
  };
  return {grad_input,
          to_tensor({sum.factor, sum.temperature, sum.floor}, {3}),
          gradient_of_knots(sum.coefficients.data(), args.curve),
          to_tensor(sum.coefficients, {args.curve.knots + 1, 4}),
          prepared.is_matrix ? at::mm(all_slopes.t(), all_x) : of_class(weight, sum.weight),
          of_class(bias, sum.bias)};
}

#ifdef FOCALKERN_WITH_CUDA
// Calls work(begin, end) for all rows at once; for a matrix, whose products need tensors [rows, C] in float64, for
// ranges that keep these small.
template <typename Work>
void for_each_part(const Prepared& prepared, Work work) {
  constexpr int64_t kEntries = int64_t{1} << 24;
  const int64_t rows = prepared.rows.rows;
  const int64_t step =
      std::max<int64_t>(1, prepared.is_matrix ? kEntries / std::max<int64_t>(1, prepared.rows.classes) : rows);
  for (int64_t begin = 0; begin < rows; begin += step) work(begin, std::min(rows, begin + step));
}

// Rows begin to end of a tensor [..., C].
Tensor part_of(const Tensor& tensor, int64_t begin, int64_t end) {
  return tensor.view({-1, tensor.size(-1)}).slice(0, begin, end);
}

SplineInput rows_of_part(const Prepared& prepared, int64_t begin, int64_t end) {
  SplineInput rows = prepared.rows;
  rows.input = part_of(prepared.input, begin, end).const_data_ptr();
  rows.rows = end - begin;
  return rows;
}

Tensor log_probs_on_device(const Prepared& prepared, const SplineInput& rows) {
  const auto options = prepared.input.options().dtype(at::kDouble);
  const Tensor x = at::empty({rows.rows, rows.classes}, options);
  const SplineDeviceSums memory(rows, options, /*numbers=*/0, /*by_class=*/false);
  launch_spline(cuda::spline_log_probs, rows, x.mutable_data_ptr<double>(), memory.scratch);
  return x;
}

// `result` in the order of `input`: each class takes the largest result of all classes whose input is at most its own.
Tensor in_order(const Tensor& input, const Tensor& result) {
  const auto [ordered, order] = at::sort(input, -1);
  const Tensor raised = std::get<0>(at::cummax(result.gather(-1, order), -1));
  const Tensor same = ordered.slice(-1, 1).eq(ordered.slice(-1, 0, -1));
  const Tensor last = at::constant_pad_nd(same.logical_not(), {0, 1}, 1);  // of equal ones
  const Tensor of_last = std::get<0>(at::cummin(raised.masked_fill(last.logical_not(), kInfinity).flip(-1), -1));
  return at::empty_like(result).scatter_(-1, order, of_last.flip(-1));
}

// `validate` asks for the checks that are free on the CPU; on CUDA only FOCALKERN_VALIDATE=1 waits for the device.
Tensor forward_cuda(const Tensor& input, const Tensor& parameters, const Tensor& knots, const Tensor& coefficients,
                    const OptionalTensor& weight, const OptionalTensor& bias, bool is_probs, bool keep_zeros,
                    bool keep_order, bool log_output, bool wide, bool /*validate*/) {
  check_arguments(input, parameters, knots, coefficients, weight, bias);
  const c10::cuda::CUDAGuard guard(input.device());
  const at::AutoDispatchBelowADInplaceOrView below;
  const Prepared prepared(input, parameters, knots, coefficients, weight, bias, is_probs, keep_zeros);
  const Tensor output = at::empty(input.sizes(), input.options().dtype(output_dtype(input, wide)));
  const bool sorts = keep_order && prepared.rows.storage == SplineStorage::kDouble;
  for_each_part(prepared, [&](int64_t begin, int64_t end) {
    SplineMapForward args{rows_of_part(prepared, begin, end),
                          prepared.curve,
                          prepared.scores,
                          log_output,
                          keep_order,
                          part_of(output, begin, end).mutable_data_ptr(),
                          spline_storage(output.scalar_type()),
                          sum_tolerance(input.scalar_type())};
    Tensor extra;
    if (prepared.is_matrix) {
      extra = prepared.matrix_scores(log_probs_on_device(prepared, args.rows));
      args.scores.extra = extra.const_data_ptr<double>();
    }
    args.rows.in_steps = keep_order && !sorts;
    const SplineDeviceSums memory(args.rows, input.options(), /*numbers=*/0, /*by_class=*/false);
    launch_spline(cuda::spline_map_forward, args, memory.scratch);
  });
  if (validation_requested() && output.numel() > 0) {
    const Tensor invalid = part_of(output, 0, prepared.rows.rows).select(1, 0).isnan().nonzero();
    if (invalid.numel() > 0) raise_invalid_row(input, is_probs, invalid.reshape(-1)[0].item<int64_t>());
  }
  return sorts ? in_order(prepared.input, output) : output;
}

Gradients backward_cuda(const Tensor& grad, const Tensor& input, const Tensor& parameters, const Tensor& knots,
                        const Tensor& coefficients, const OptionalTensor& weight, const OptionalTensor& bias,
                        bool is_probs, bool keep_zeros, bool log_output, bool need_input) {
  check_arguments(input, parameters, knots, coefficients, weight, bias);
  check_gradient(grad, input);
  const c10::cuda::CUDAGuard guard(input.device());
  const at::AutoDispatchBelowADInplaceOrView below;
  const Prepared prepared(input, parameters, knots, coefficients, weight, bias, is_probs, keep_zeros);
  const Tensor upstream = grad.contiguous();
  const Tensor grad_input = need_input ? at::empty(input.sizes(), input.options()) : at::empty({0}, input.options());
  const int64_t m = prepared.curve.knots, numbers = cuda::kSplineOfRows + 4 * (m + 1), classes = prepared.rows.classes;
  const bool by_class = weight || bias;
  const auto wide = input.options().dtype(at::kDouble);
  const Tensor sums = at::zeros({numbers}, wide), of_classes = at::zeros({by_class ? 2 : 0, classes}, wide);
  const Tensor of_matrix = prepared.is_matrix ? at::zeros({classes, classes}, wide) : Tensor();
  for_each_part(prepared, [&](int64_t begin, int64_t end) {
    SplineMapBackward args{rows_of_part(prepared, begin, end),
                           prepared.curve,
                           prepared.scores,
                           log_output,
                           part_of(upstream, begin, end).const_data_ptr(),
                           spline_storage(upstream.scalar_type()),
                           /*of_x=*/nullptr,
                           /*grad_scores=*/nullptr,
                           /*grad_input=*/nullptr};
    Tensor x, extra, slopes, of_x;
    if (prepared.is_matrix) {
      x = log_probs_on_device(prepared, args.rows);
      extra = prepared.matrix_scores(x);
      slopes = at::empty_like(x);
      args.scores.extra = extra.const_data_ptr<double>();
      args.grad_scores = slopes.mutable_data_ptr<double>();
      const SplineDeviceSums memory(args.rows, wide, /*numbers=*/0, /*by_class=*/false);
      launch_spline(cuda::spline_map_backward, args, memory.sums, memory.scratch);
      of_x = at::mm(slopes, *prepared.weight);
      args.of_x = of_x.const_data_ptr<double>();
      args.grad_scores = nullptr;
      of_matrix.add_(at::mm(slopes.t(), x));
    }
    if (need_input) args.grad_input = part_of(grad_input, begin, end).mutable_data_ptr();
    const SplineDeviceSums memory(args.rows, wide, numbers, by_class);
    launch_spline(cuda::spline_map_backward, args, memory.sums, memory.scratch);
    sums.add_(memory.of_threads.sum(1));
    if (by_class) of_classes.add_(memory.of_classes.sum(0));
  });
  // Parameters and their gradients are on the host.
  const Tensor host = sums.cpu(), of_curve = host.slice(0, cuda::kSplineOfRows).reshape({m + 1, 4}).contiguous();
  const Tensor positions_host = coefficients.contiguous();
  const SplineCurve on_host{m, nullptr, positions_host.const_data_ptr<double>()};
  const auto of_class = [&](const OptionalTensor& tensor, int64_t which) {
    return tensor ? of_classes[which].cpu() : at::empty({0}, at::kDouble);
  };
  return {grad_input,
          host.slice(0, 0, cuda::kSplineOfRows).clone(),
          gradient_of_knots(of_curve.const_data_ptr<double>(), on_host),
          of_curve,
          prepared.is_matrix ? of_matrix.cpu() : of_class(weight, 0),
          of_class(bias, 1)};
}
#endif

Tensor forward_meta(const Tensor& input, const Tensor& parameters, const Tensor& knots, const Tensor& coefficients,
                    const OptionalTensor& weight, const OptionalTensor& bias, bool /*is_probs*/, bool /*keep_zeros*/,
                    bool /*keep_order*/, bool /*log_output*/, bool wide, bool /*validate*/) {
  TORCH_CHECK_VALUE(parameters.dim() == 1 && knots.dim() == 1 && coefficients.dim() == 2, kOp,
                    ": parameters, knots and coefficients must be [3], [m] and [m + 1, 4]");
  check_floating(kOp, "input", input);
  return at::empty_symint(input.sym_sizes(), input.options().dtype(output_dtype(input, wide)));
}

Gradients backward_meta(const Tensor& /*grad*/, const Tensor& input, const Tensor& parameters, const Tensor& knots,
                        const Tensor& coefficients, const OptionalTensor& weight, const OptionalTensor& bias,
                        bool /*is_probs*/, bool /*keep_zeros*/, bool /*log_output*/, bool need_input) {
  const auto like = [](const Tensor& tensor) { return at::empty_symint(tensor.sym_sizes(), tensor.options()); };
  const auto like_optional = [&](const OptionalTensor& tensor) {
    return tensor ? like(*tensor) : at::empty({0}, knots.options());
  };
  return {need_input ? like(input) : at::empty({0}, input.options()),
          like(parameters),
          like(knots),
          like(coefficients),
          like_optional(weight),
          like_optional(bias)};
}

}  // namespace
}  // namespace focalkern::bindings
