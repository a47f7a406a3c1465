// spline_calibration_map: argument checks, kernel calls, autograd, the eager entry.
//
//   spline_map_forward    -> output
//   spline_map_backward   -> (grad_input, grad_parameters, grad_knots, grad_coefficients, grad_weight, grad_bias)
//   spline_map_composite  -> output   in differentiable torch operations, by focalkern.fallback
//
// `parameters` holds 1 + a, T and e; `coefficients` [m + 1, 4] define the curve on its pieces. Tensors on the
// host stay there, in float64. The forward pass saves only its arguments for the backward pass. Derivatives of higher
// order, torch.func transforms and forward-mode tangents go through spline_map_composite.

#include <ATen/Parallel.h>
#include <ATen/autocast_mode.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/alias.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/zeros.h>
#include <c10/util/Exception.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/custom_function.h>

#include <atomic>
#include <cmath>
#include <limits>
#include <string>
#include <tuple>
#include <vector>

#include "bindings/common.h"
#include "bindings/spline.h"

#ifdef FOCALKERN_WITH_CUDA
#include <ATen/ops/constant_pad_nd.h>
#include <ATen/ops/cummax.h>
#include <ATen/ops/cummin.h>
#include <ATen/ops/sort.h>
#endif

namespace focalkern::bindings {
namespace {

constexpr const char* kOp = "spline_calibration_map";
constexpr double kInfinity = std::numeric_limits<double>::infinity();

void check_arguments(const Tensor& input, const Tensor& parameters, const Tensor& knots, const Tensor& coefficients,
                     const OptionalTensor& weight, const OptionalTensor& bias) {
  check_floating(kOp, "input", input);
  TORCH_CHECK_VALUE(input.dim() >= 1 && input.sym_size(-1) >= 2, kOp,
                    ": input must be [..., C] with C >= 2, got shape ", input.sym_sizes());
  // Those of a calibrator's module lie on the device of its input.
  const auto is_wide = [&](const Tensor& tensor) {
    return tensor.scalar_type() == at::kDouble && (tensor.device().is_cpu() || tensor.device() == input.device());
  };
  TORCH_CHECK_VALUE(is_wide(parameters) && parameters.device().is_cpu() && parameters.numel() == 3, kOp,
                    ": parameters must be [3] float64 on the CPU, got ", parameters.sym_sizes());
  TORCH_CHECK_VALUE(
      is_wide(knots) && knots.dim() == 1 && knots.sym_size(0) >= 2 && knots.sym_size(0) <= kSplineMaxKnots, kOp,
      ": knots must be [m] float64 with m from 2 to ", kSplineMaxKnots, ", got shape ", knots.sym_sizes());
  TORCH_CHECK_VALUE(is_wide(coefficients) && coefficients.dim() == 2 &&
                        coefficients.sym_size(0) == knots.sym_size(0) + 1 && coefficients.sym_size(1) == 4,
                    kOp, ": coefficients must be [m + 1, 4] float64, got shape ", coefficients.sym_sizes());
  for (const auto* tensor : {&weight, &bias}) {
    if (!*tensor) continue;
    const auto sizes = (*tensor)->sym_sizes();
    bool fits = is_wide(**tensor) && !sizes.empty() && sizes.size() <= (tensor == &weight ? 2 : 1);
    for (const auto& size : sizes) fits &= size == input.sym_size(-1);
    TORCH_CHECK_VALUE(fits, kOp, ": weight must be [C] or [C, C] and bias [C], in float64, got ", sizes);
  }
}

// Raises the error of an invalid row. Only called if there is one.
[[noreturn]] void raise_invalid_row(const Tensor& input, bool is_probs, int64_t row) {
  const Tensor values = input.reshape({-1, input.size(-1)})[row].to(at::kDouble).contiguous();
  const double* x = values.const_data_ptr<double>();
  double sum = 0;
  for (int64_t c = 0; c < values.numel(); ++c) {
    TORCH_CHECK_VALUE(!std::isnan(x[c]), kOp, ": input must not be NaN, got NaN at row ", row, ", class ", c);
    TORCH_CHECK_VALUE(x[c] != kInfinity, kOp, ": input must not be +inf, got inf at row ", row, ", class ", c);
    TORCH_CHECK_VALUE(!is_probs || x[c] >= 0, kOp, ": input must be probabilities, got ", x[c], " at row ", row,
                      ", class ", c);
    sum += x[c];
  }
  TORCH_CHECK_VALUE(!is_probs, kOp, ": input must be probabilities that sum to 1 within ",
                    sum_tolerance(input.scalar_type()), ", got a sum of ", sum, " at row ", row);
  TORCH_CHECK_VALUE(false, kOp, ": input must have a logit above -inf in every row, got none at row ", row);
}

at::ScalarType output_dtype(const Tensor& input, bool wide) {
  return wide ? compute_dtype(input.scalar_type()) : input.scalar_type();
}

// The arguments of the kernels, with the tensors whose memory they point to.
struct Prepared {
  Prepared(const Tensor& input, const Tensor& parameters, const Tensor& knots, const Tensor& coefficients,
           const OptionalTensor& weight, const OptionalTensor& bias, bool is_probs, bool keep_zeros)
      : input(input.contiguous()), knots(on_device(knots)), coefficients(on_device(coefficients)) {
    const Tensor numbers = parameters.contiguous();
    const double* values = numbers.const_data_ptr<double>();
    rows = spline_input(this->input, values[1], values[2], is_probs);
    curve = {this->knots.size(0), this->knots.const_data_ptr<double>(), this->coefficients.const_data_ptr<double>()};
    if (weight) this->weight = on_device(*weight);
    if (bias) this->bias = on_device(*bias);
    is_matrix = weight && weight->dim() == 2;
    scores = {values[0], is_matrix ? nullptr : pointer_or_null<double>(this->weight),
              pointer_or_null<double>(this->bias), nullptr, keep_zeros};
  }

  Tensor on_device(const Tensor& tensor) const { return tensor.to(input.device()).contiguous(); }

  // W x of the rows x.
  Tensor matrix_scores(const Tensor& x) const { return at::mm(x, weight->t()); }

  Tensor input, knots, coefficients;
  OptionalTensor weight, bias;
  bool is_matrix;
  SplineInput rows;
  SplineCurve curve;
  SplineScores scores;
};

// x of some rows on the CPU, [end - begin, C].
Tensor log_probs_of(const SplineInput& rows, int64_t begin, int64_t end) {
  const Tensor x = at::empty({end - begin, rows.classes}, at::kDouble);
  cpu::spline_log_probs(rows, x.mutable_data_ptr<double>(), begin, end);
  return x;
}

// ---- kernels -------------------------------------------------------------------------------------------------------

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
  // Parameters and their gradients lie on the host.
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

// ---- autograd ------------------------------------------------------------------------------------------------------

using ForwardSignature = Tensor(const Tensor&, const Tensor&, const Tensor&, const Tensor&, const OptionalTensor&,
                                const OptionalTensor&, bool, bool, bool, bool, bool, bool);
using BackwardSignature = Gradients(const Tensor&, const Tensor&, const Tensor&, const Tensor&, const Tensor&,
                                    const OptionalTensor&, const OptionalTensor&, bool, bool, bool, bool);
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
                        const OptionalTensor& bias, bool is_probs, bool keep_zeros, bool keep_order, bool log_output,
                        bool wide, bool validate) {
    const at::AutoDispatchBelowADInplaceOrView guard;
    const Tensor output = forward_op().call(input, parameters, knots, coefficients, weight, bias, is_probs, keep_zeros,
                                            keep_order, log_output, wide, validate);
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
    for (int i = 0; i < kTensors; ++i) needed[i] = saved[i].defined() && ctx->needs_input_grad(i);
    if (c10::GradMode::is_enabled()) {
      // The gradient is itself to be differentiated. Aliases, so that a hook on the user's tensor fires once.
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
                               is_probs, keep_zeros, log_output, needed[0]);
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
                        bool keep_order, bool log_output, bool wide, bool validate) {
  return SplineMapFunction::apply(input, parameters, knots, coefficients, weight, bias, is_probs, keep_zeros,
                                  keep_order, log_output, wide, validate);
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
  return forward_op().call(input, parameters, knots, coefficients, weight, bias, is_probs, keep_zeros, keep_order,
                           log_output, wide, /*validate=*/true);
}

}  // namespace

void register_spline_map(torch::Library& definitions, pybind11::module_& module) {
  const std::vector<at::Tag> tags{at::Tag::pt2_compliant_tag};
  for (const char* schema : {kSplineMapForwardSchema, kSplineMapBackwardSchema, kSplineMapCompositeSchema}) {
    definitions.def(schema, tags);
  }
  definitions.impl("spline_map_forward", torch::dispatch(c10::DispatchKey::CPU, &forward_cpu));
  definitions.impl("spline_map_backward", torch::dispatch(c10::DispatchKey::CPU, &backward_cpu));
#ifdef FOCALKERN_WITH_CUDA
  definitions.impl("spline_map_forward", torch::dispatch(c10::DispatchKey::CUDA, &forward_cuda));
  definitions.impl("spline_map_backward", torch::dispatch(c10::DispatchKey::CUDA, &backward_cuda));
#endif
  definitions.impl("spline_map_forward", torch::dispatch(c10::DispatchKey::Meta, &forward_meta));
  definitions.impl("spline_map_backward", torch::dispatch(c10::DispatchKey::Meta, &backward_meta));
  definitions.impl("spline_map_forward", torch::dispatch(c10::DispatchKey::Autograd, &forward_autograd));

  module.def("spline_map", &spline_map, pybind11::call_guard<pybind11::gil_scoped_release>());
}

}  // namespace focalkern::bindings
