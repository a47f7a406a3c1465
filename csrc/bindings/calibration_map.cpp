// focal_calibration_map and binary_focal_calibration_map: argument checks, kernel calls, autograd, the eager entry.
//
//   calibration_map_forward    -> output
//   calibration_map_backward   -> (grad_input, grad_gamma, grad_temperature), empty where not needed
//   calibration_map_composite  -> output   in differentiable torch operations, by focalkern.fallback
//
// `kind` says what the input is: rows of logits, rows of probabilities, or one logit each (the binary map). The
// backward pass needs only the arguments. Derivatives of higher order, torch.func transforms and forward-mode tangents
// go through calibration_map_composite.

#include <ATen/ExpandUtils.h>
#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/full.h>
#include <ATen/ops/scalar_tensor.h>
#include <c10/util/Exception.h>
#include <torch/csrc/autograd/custom_function.h>

#include <atomic>
#include <cmath>
#include <limits>
#include <string>
#include <tuple>
#include <vector>

#include "bindings/common.h"
#include "kernels/calibration_map.h"
#include "math/calibration_map.h"
#ifdef FOCALKERN_WITH_CUDA
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#endif

namespace focalkern::bindings {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();
constexpr double kNan = std::numeric_limits<double>::quiet_NaN();

enum Kind : int64_t { kLogits = 0, kProbs = 1, kBinary = 2 };

struct Options {
  int64_t kind;
  bool log_output;  // log-probabilities, or log-odds
  bool wide;        // a half-precision input has a float32 output, as autocast wants it
};

const char* op_name(int64_t kind) { return kind == kBinary ? "binary_focal_calibration_map" : "focal_calibration_map"; }
const char* input_name(int64_t kind) { return kind == kBinary ? "logits" : "input"; }

// Shape of the parameters: one number per row, or per element of the binary map.
c10::SymDimVector leading_shape(const Tensor& input, int64_t kind) {
  c10::SymDimVector shape(input.sym_sizes().begin(), input.sym_sizes().end());
  if (kind != kBinary) shape.pop_back();
  return shape;
}

// ---- checks of shapes and types, for real and for fake tensors alike
// ---------------------------------------------------

void check_parameter(const char* op, const char* name, const Tensor& parameter, const Tensor& input, int64_t kind) {
  TORCH_CHECK_TYPE(parameter.is_floating_point(), op, ": ", name, " must be a number or a floating-point tensor, got ",
                   "a tensor of ", parameter.scalar_type());
  if (is_host_number(parameter)) return;
  check_same_device(op, name, parameter, input);
  const auto shape = leading_shape(input, kind);
  bool fits = parameter.dim() <= static_cast<int64_t>(shape.size());
  for (int64_t d = 1; fits && d <= parameter.dim(); ++d) {
    const auto size = parameter.sym_size(-d);
    fits = size == 1 || size == shape[shape.size() - d];
  }
  TORCH_CHECK_VALUE(fits, op, ": ", name, " must be broadcastable to the ",
                    kind == kBinary ? "shape of logits " : "leading shape of input ", c10::SymIntArrayRef(shape),
                    ", got ", parameter.sym_sizes());
}

void check_arguments(const Tensor& input, const Tensor& gamma, const Tensor& temperature, int64_t kind) {
  TORCH_CHECK_VALUE(kind >= kLogits && kind <= kBinary, "focal_calibration_map: kind must be 0, 1 or 2, got ", kind);
  const char* op = op_name(kind);
  check_floating(op, input_name(kind), input);
  if (kind != kBinary) {
    TORCH_CHECK_VALUE(input.dim() >= 1, op, ": input must be [..., C], got a scalar");
    TORCH_CHECK_VALUE(input.sym_size(-1) >= 2, op, ": input must have at least two classes in its last dimension, ",
                      "got shape ", input.sym_sizes());
  }
  check_parameter(op, "gamma", gamma, input, kind);
  check_parameter(op, "temperature", temperature, input, kind);
}

double parameter_of_row(const Tensor& parameter, const Tensor& input, int64_t kind, int64_t row) {
  if (parameter.numel() == 1) return parameter.item<double>();
  return parameter.expand(C10_AS_INTARRAYREF_SLOW(leading_shape(input, kind))).reshape(-1)[row].item<double>();
}

// Raises the error of an invalid row. Only called if there is one.
[[noreturn]] void raise_invalid_row(const Tensor& input, const Tensor& gamma, const Tensor& temperature, int64_t kind,
                                    int64_t row) {
  const char* op = op_name(kind);
  const char* name = input_name(kind);
  const double gamma_value = parameter_of_row(gamma, input, kind, row);
  const double temperature_value = parameter_of_row(temperature, input, kind, row);
  TORCH_CHECK_VALUE(gamma_value > -1 && gamma_value < kInfinity, op, ": gamma must be finite and greater than -1, got ",
                    gamma_value, " at row ", row);
  TORCH_CHECK_VALUE(temperature_value > 0 && temperature_value < kInfinity, op,
                    ": temperature must be finite and positive, got ", temperature_value, " at row ", row);
  const int64_t classes = kind == kBinary ? 1 : input.size(-1);
  const Tensor values = input.reshape({-1, classes})[row].to(at::kDouble).cpu().contiguous();
  const double* x = values.const_data_ptr<double>();
  double sum = 0;
  for (int64_t c = 0; c < classes; ++c) {
    const char* problem = nullptr;
    if (std::isnan(x[c])) problem = " must not be NaN, got NaN";
    if (x[c] == kInfinity) problem = " must not be +inf, got inf";
    TORCH_CHECK_VALUE(problem == nullptr, op, ": ", name, problem, " at row ", row, kind == kBinary ? "" : ", class ",
                      kind == kBinary ? "" : std::to_string(c));
    TORCH_CHECK_VALUE(kind != kProbs || x[c] >= 0, op, ": ", name, " must be probabilities, got ", x[c], " at row ",
                      row, ", class ", c);
    sum += x[c];
  }
  TORCH_CHECK_VALUE(kind != kProbs, op, ": ", name, " must be probabilities that sum to 1 within ",
                    sum_tolerance(input.scalar_type()), ", got a sum of ", sum, " at row ", row);
  TORCH_CHECK_VALUE(false, op, ": ", name, " must have a logit above -inf in every row, got none at row ", row);
}

// ---- from tensors to kernel arguments ------------------------------------------------------------------------------

// A parameter in the form that the kernels take. Keeps the copy alive if one is needed.
struct Parameter {
  Tensor values;
  const double* data = nullptr;
  int64_t stride = 0;
  double value = 0;
};

Parameter prepare_parameter(const Tensor& parameter, const Tensor& input, int64_t kind) {
  Parameter p;
  if (is_host_number(parameter)) {
    p.value = parameter.item<double>();
    return p;
  }
  p.values = parameter;
  if (parameter.numel() != 1) {
    p.values = parameter.expand(C10_AS_INTARRAYREF_SLOW(leading_shape(input, kind)));
    p.stride = 1;
  }
  p.values = p.values.to(at::kDouble).contiguous();
  p.data = static_cast<const double*>(p.values.const_data_ptr());
  return p;
}

template <typename Args>
void set_parameters(Args& args, const Parameter& gamma, const Parameter& temperature) {
  args.gamma = gamma.data;
  args.gamma_stride = gamma.stride;
  args.gamma_value = gamma.value;
  args.temperature = temperature.data;
  args.temperature_stride = temperature.stride;
  args.temperature_value = temperature.value;
}

template <typename Scalar>
void set_input(CalibrationMapArgs<Scalar>& args, const Tensor& input, const Options& options) {
  args.classes = input.size(-1);
  args.rows = input.numel() / args.classes;
  args.input = static_cast<const Scalar*>(input.const_data_ptr());
  args.input_is_probs = options.kind == kProbs;
  args.log_output = options.log_output;
}
template <typename Scalar>
void set_input(BinaryCalibrationMapArgs<Scalar>& args, const Tensor& input, const Options& options) {
  args.size = input.numel();
  args.logits = static_cast<const Scalar*>(input.const_data_ptr());
  args.log_odds_output = options.log_output;
}

template <typename Scalar>
void set_grad_input(CalibrationMapBackward<Scalar>& args, void* data) {
  args.grad_input = static_cast<Scalar*>(data);
}
template <typename Scalar>
void set_grad_input(BinaryCalibrationMapBackward<Scalar>& args, void* data) {
  args.grad_logits = static_cast<Scalar*>(data);
}

template <typename Scalar, typename Args>
void set_output(Args& args, const Tensor& output) {
  if (output.element_size() == sizeof(Scalar)) {
    args.output = static_cast<Scalar*>(output.mutable_data_ptr());
  } else {
    args.output_wide = static_cast<compute_t<Scalar>*>(output.mutable_data_ptr());
  }
}

// Calls f with the forward struct of the scalar type and kind.
template <typename Launch>
void launch_forward(const Tensor& input, const Tensor& gamma, const Tensor& temperature, const Options& options,
                    const Tensor& output, Launch launch) {
  const Parameter gamma_parameter = prepare_parameter(gamma, input, options.kind);
  const Parameter temperature_parameter = prepare_parameter(temperature, input, options.kind);
  dispatch_scalar(input.scalar_type(), [&](auto scalar) {
    using Scalar = decltype(scalar);
    const auto run = [&](auto args) {
      set_input(args, input, options);
      set_parameters(args, gamma_parameter, temperature_parameter);
      set_output<Scalar>(args, output);
      launch(args);
    };
    if (options.kind == kBinary) {
      run(BinaryCalibrationMapForward<Scalar>{});
    } else {
      run(CalibrationMapForward<Scalar>{});
    }
  });
}

struct Gradients {
  Tensor input, gamma, temperature;
};

double* data_or_null(const Tensor& tensor) {
  return tensor.defined() ? static_cast<double*>(tensor.mutable_data_ptr()) : nullptr;
}

// Gradients as the kernels write them: those of the parameters per row, in double.
template <typename Launch>
Gradients launch_backward(const Tensor& grad, const Tensor& input, const Tensor& gamma, const Tensor& temperature,
                          const Options& options, std::array<bool, 3> needed, Launch launch) {
  const Parameter gamma_parameter = prepare_parameter(gamma, input, options.kind);
  const Parameter temperature_parameter = prepare_parameter(temperature, input, options.kind);
  const auto rows = C10_AS_INTARRAYREF_SLOW(leading_shape(input, options.kind));
  Gradients grads;
  if (needed[0]) grads.input = empty_result_like(input, input.scalar_type());
  if (needed[1]) grads.gamma = at::empty(rows, input.options().dtype(at::kDouble));
  if (needed[2]) grads.temperature = at::empty(rows, input.options().dtype(at::kDouble));
  dispatch_scalar(input.scalar_type(), [&](auto scalar) {
    using Scalar = decltype(scalar);
    using Real = compute_t<Scalar>;
    const bool narrow = grad.scalar_type() == input.scalar_type();
    const Tensor upstream = (narrow ? grad : grad.to(compute_dtype(input.scalar_type()))).contiguous();
    const auto run = [&](auto args) {
      set_input(args, input, options);
      set_parameters(args, gamma_parameter, temperature_parameter);
      if (narrow) {
        args.grad_output = static_cast<const Scalar*>(upstream.const_data_ptr());
      } else {
        args.grad_output_wide = static_cast<const Real*>(upstream.const_data_ptr());
      }
      if (needed[0]) set_grad_input(args, grads.input.mutable_data_ptr());
      args.grad_gamma = data_or_null(grads.gamma);
      args.grad_temperature = data_or_null(grads.temperature);
      launch(args);
    };
    if (options.kind == kBinary) {
      run(BinaryCalibrationMapBackward<Scalar>{});
    } else {
      run(CalibrationMapBackward<Scalar>{});
    }
  });
  return grads;
}

// The gradient of a parameter: the rows' gradients summed over the broadcast dimensions.
Tensor reduce_to(const Tensor& rows, const Tensor& parameter) {
  if (parameter.numel() != 1 || !rows.device().is_cpu()) {
    return at::sum_to(rows, parameter.sym_sizes()).to(parameter.options());
  }
  // Added in order: the result of torch's sum would depend on the number of threads.
  const double* values = static_cast<const double*>(rows.const_data_ptr());
  const int64_t n = rows.numel();
  double sum = 0;
  for (int64_t i = 0; i < n; ++i) sum += values[i];
  return at::full_symint(parameter.sym_sizes(), sum, parameter.options());
}

std::tuple<Tensor, Tensor, Tensor> finish(const Gradients& grads, const Tensor& input, const Tensor& gamma,
                                          const Tensor& temperature) {
  return {
      grads.input.defined() ? grads.input : at::empty({0}, input.options()),
      grads.gamma.defined() ? reduce_to(grads.gamma, gamma) : at::empty({0}, gamma.options()),
      grads.temperature.defined() ? reduce_to(grads.temperature, temperature) : at::empty({0}, temperature.options())};
}

void check_gradient(const Tensor& grad, const Tensor& input, int64_t kind) {
  TORCH_CHECK_VALUE(grad.sym_sizes() == input.sym_sizes() && grad.is_floating_point(), op_name(kind),
                    ": grad must have the shape of the output, ", input.sym_sizes(), ", got ", grad.sym_sizes());
  check_same_device(op_name(kind), "grad", grad, input);
}

// ---- kernels -------------------------------------------------------------------------------------------------------

template <typename Scalar>
int64_t size_of(const CalibrationMapArgs<Scalar>& args) {
  return args.rows;
}
template <typename Scalar>
int64_t size_of(const BinaryCalibrationMapArgs<Scalar>& args) {
  return args.size;
}
template <typename Scalar>
int64_t classes_of(const CalibrationMapArgs<Scalar>& args) {
  return args.classes;
}
template <typename Scalar>
int64_t classes_of(const BinaryCalibrationMapArgs<Scalar>&) {
  return 1;
}

// Calls work(begin, end, chunk) for every chunk of the rows, whose bounds do not depend on the number of threads.
template <typename Args, typename Work>
void for_each_chunk(const Args& args, Work work) {
  const int64_t rows = size_of(args);
  const int64_t chunk_rows = cpu::calibration_map_chunk_rows(rows, classes_of(args));
  const int64_t n_chunks = (rows + chunk_rows - 1) / chunk_rows;
  at::parallel_for(0, n_chunks, 1, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) work(i * chunk_rows, std::min(rows, (i + 1) * chunk_rows));
  });
}

template <typename Scalar>
int64_t run_cpu(const CalibrationMapForward<Scalar>& args, int64_t begin, int64_t end) {
  return cpu::calibration_map_forward(args, begin, end);
}
template <typename Scalar>
int64_t run_cpu(const BinaryCalibrationMapForward<Scalar>& args, int64_t begin, int64_t end) {
  return cpu::binary_calibration_map_forward(args, begin, end);
}
template <typename Scalar>
void run_cpu(const CalibrationMapBackward<Scalar>& args, int64_t begin, int64_t end) {
  cpu::calibration_map_backward(args, begin, end);
}
template <typename Scalar>
void run_cpu(const BinaryCalibrationMapBackward<Scalar>& args, int64_t begin, int64_t end) {
  cpu::binary_calibration_map_backward(args, begin, end);
}

Tensor forward_cpu(const Tensor& input_as_given, const Tensor& gamma, const Tensor& temperature, int64_t kind,
                   bool log_output, bool wide, bool validate) {
  check_arguments(input_as_given, gamma, temperature, kind);
  const Tensor input = input_as_given.contiguous();
  const Tensor output = empty_result_like(input, result_dtype(input, wide));
  std::atomic<int64_t> first_invalid{std::numeric_limits<int64_t>::max()};
  launch_forward(input, gamma, temperature, {kind, log_output, wide}, output, [&](const auto& args) {
    for_each_chunk(args, [&](int64_t begin, int64_t end) {
      const int64_t invalid = run_cpu(args, begin, end);
      int64_t first = first_invalid.load();
      while (invalid >= 0 && invalid < first && !first_invalid.compare_exchange_weak(first, invalid)) {
      }
    });
  });
  if (first_invalid < std::numeric_limits<int64_t>::max() && (validate || validation_requested())) {
    raise_invalid_row(input, gamma, temperature, kind, first_invalid);
  }
  return output;
}

std::tuple<Tensor, Tensor, Tensor> backward_cpu(const Tensor& grad, const Tensor& input_as_given, const Tensor& gamma,
                                                const Tensor& temperature, int64_t kind, bool log_output,
                                                std::array<bool, 3> needed) {
  check_arguments(input_as_given, gamma, temperature, kind);
  check_gradient(grad, input_as_given, kind);
  const Tensor input = input_as_given.contiguous();
  const auto grads = launch_backward(
      grad, input, gamma, temperature, {kind, log_output, false}, needed,
      [&](const auto& args) { for_each_chunk(args, [&](int64_t begin, int64_t end) { run_cpu(args, begin, end); }); });
  return finish(grads, input, gamma, temperature);
}

#ifdef FOCALKERN_WITH_CUDA
template <typename Scalar>
int run_cuda(const CalibrationMapForward<Scalar>& args, void* stream) {
  return cuda::calibration_map_forward(args, stream);
}
template <typename Scalar>
int run_cuda(const BinaryCalibrationMapForward<Scalar>& args, void* stream) {
  return cuda::binary_calibration_map_forward(args, stream);
}
template <typename Scalar>
int run_cuda(const CalibrationMapBackward<Scalar>& args, void* stream) {
  return cuda::calibration_map_backward(args, stream);
}
template <typename Scalar>
int run_cuda(const BinaryCalibrationMapBackward<Scalar>& args, void* stream) {
  return cuda::binary_calibration_map_backward(args, stream);
}

template <typename Args>
void launch_cuda(const Args& args) {
  if (size_of(args) == 0) return;
  C10_CUDA_CHECK(static_cast<cudaError_t>(run_cuda(args, c10::cuda::getCurrentCUDAStream().stream())));
}

// `validate` asks for the checks that are free on the CPU; on CUDA only FOCALKERN_VALIDATE=1 waits for the device.
Tensor forward_cuda(const Tensor& input_as_given, const Tensor& gamma, const Tensor& temperature, int64_t kind,
                    bool log_output, bool wide, bool /*validate*/) {
  check_arguments(input_as_given, gamma, temperature, kind);
  const c10::cuda::CUDAGuard guard(input_as_given.device());
  const Tensor input = input_as_given.contiguous();
  const Tensor output = at::empty(input.sizes(), input.options().dtype(result_dtype(input, wide)));
  launch_forward(input, gamma, temperature, {kind, log_output, wide}, output,
                 [](const auto& args) { launch_cuda(args); });
  if (validation_requested() && output.numel() > 0) {
    const int64_t classes = kind == kBinary ? 1 : input.size(-1);
    const Tensor invalid = output.reshape({-1, classes}).select(1, 0).isnan().nonzero();
    if (invalid.numel() > 0) {
      raise_invalid_row(input, gamma, temperature, kind, invalid.reshape(-1)[0].item<int64_t>());
    }
  }
  return output;
}

std::tuple<Tensor, Tensor, Tensor> backward_cuda(const Tensor& grad, const Tensor& input_as_given, const Tensor& gamma,
                                                 const Tensor& temperature, int64_t kind, bool log_output,
                                                 std::array<bool, 3> needed) {
  check_arguments(input_as_given, gamma, temperature, kind);
  check_gradient(grad, input_as_given, kind);
  const c10::cuda::CUDAGuard guard(input_as_given.device());
  const Tensor input = input_as_given.contiguous();
  const auto grads = launch_backward(grad, input, gamma, temperature, {kind, log_output, false}, needed,
                                     [](const auto& args) { launch_cuda(args); });
  return finish(grads, input, gamma, temperature);
}
#endif

Tensor forward_meta(const Tensor& input, const Tensor& gamma, const Tensor& temperature, int64_t kind,
                    bool /*log_output*/, bool wide, bool /*validate*/) {
  check_arguments(input, gamma, temperature, kind);
  return at::empty_symint(input.sym_sizes(), input.options().dtype(result_dtype(input, wide)));
}

std::tuple<Tensor, Tensor, Tensor> backward_meta(const Tensor& /*grad*/, const Tensor& input, const Tensor& gamma,
                                                 const Tensor& temperature, int64_t /*kind*/, bool /*log_output*/,
                                                 std::array<bool, 3> needed) {
  const auto like = [](const Tensor& tensor, bool wanted) {
    return wanted ? at::empty_symint(tensor.sym_sizes(), tensor.options()) : at::empty({0}, tensor.options());
  };
  return {like(input, needed[0]), like(gamma, needed[1]), like(temperature, needed[2])};
}

// ---- autograd ------------------------------------------------------------------------------------------------------

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
    torch::autograd::variable_list result(7);  // autograd wants as many gradients as forward has arguments
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
  return calibration_map(input, at::scalar_tensor(gamma, at::kDouble), at::scalar_tensor(temperature, at::kDouble),
                         kind, log_output);
}

}  // namespace

void register_calibration_map(torch::Library& definitions, pybind11::module_& module) {
  const std::vector<at::Tag> tags{at::Tag::pt2_compliant_tag};
  definitions.def(kCalibrationMapForwardSchema, tags);
  definitions.def(kCalibrationMapBackwardSchema, tags);
  definitions.def(kCalibrationMapCompositeSchema, tags);
  definitions.impl("calibration_map_forward", torch::dispatch(c10::DispatchKey::CPU, &forward_cpu));
  definitions.impl("calibration_map_backward", torch::dispatch(c10::DispatchKey::CPU, &backward_cpu));
#ifdef FOCALKERN_WITH_CUDA
  definitions.impl("calibration_map_forward", torch::dispatch(c10::DispatchKey::CUDA, &forward_cuda));
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
