// The calibration maps: from checked tensors to the kernels of csrc/cpu and csrc/cuda.
//
//   calibration_map_forward_out   fills output; returns the first invalid row, or -1 (always -1 on CUDA)
//   calibration_map_backward_out  fills the gradient tensors passed in; parameter gradients are per row, in double
//
// All tensors are contiguous. gamma and temperature are in double, or none for their numbers.

#include <atomic>
#include <limits>

#include "kernels/calibration_map.h"
#include "stable/common.h"
#ifdef FOCALKERN_WITH_CUDA
#include "stable/cuda_scope.h"
#endif

namespace focalkern::stable {
namespace {

enum Kind : int64_t { kLogits = 0, kProbs = 1, kBinary = 2 };

struct Parameters {
  const OptionalTensor& gamma;
  const OptionalTensor& temperature;
  double gamma_value;
  double temperature_value;
};

template <typename Scalar>
void set_parameters(CalibrationMapArgs<Scalar>& args, const Parameters& given) {
  const auto stride_of = [](const OptionalTensor& tensor) { return tensor && tensor->numel() != 1 ? 1 : 0; };
  args.gamma = pointer_or_null<double>(given.gamma);
  args.gamma_stride = stride_of(given.gamma);
  args.gamma_value = given.gamma_value;
  args.temperature = pointer_or_null<double>(given.temperature);
  args.temperature_stride = stride_of(given.temperature);
  args.temperature_value = given.temperature_value;
}

template <typename Scalar>
void set_input(CalibrationMapArgs<Scalar>& args, const Tensor& input, int64_t kind, bool log_output) {
  args.classes = kind == kBinary ? 1 : input.size(input.dim() - 1);
  args.rows = input.numel() / args.classes;
  args.input = static_cast<const Scalar*>(input.const_data_ptr());
  args.input_is_probs = kind == kProbs;
  args.log_output = log_output;
}

template <typename Scalar, typename Work>
void for_each_part(const CalibrationMapArgs<Scalar>& args, Work work) {
  for_each_chunk(args.rows, cpu::calibration_map_chunk_rows(args.rows, args.classes),
                 [&](int64_t, int64_t begin, int64_t end) { work(begin, end); });
}

int64_t forward(const Tensor& input, const OptionalTensor& gamma, const OptionalTensor& temperature,
                const Tensor& output, double gamma_value, double temperature_value, int64_t kind, bool log_output) {
  constexpr int64_t kNone = std::numeric_limits<int64_t>::max();
  std::atomic<int64_t> first{kNone};
  dispatch_scalar(input.scalar_type(), [&](auto scalar) {
    using Scalar = decltype(scalar);
    CalibrationMapForward<Scalar> args{};
    set_input(args, input, kind, log_output);
    set_parameters(args, {gamma, temperature, gamma_value, temperature_value});
    if (output.element_size() == sizeof(Scalar)) {
      args.output = static_cast<Scalar*>(output.mutable_data_ptr());
    } else {
      args.output_wide = static_cast<compute_t<Scalar>*>(output.mutable_data_ptr());
    }
    if (args.rows == 0) return;
#ifdef FOCALKERN_WITH_CUDA
    if (input.is_cuda()) {
      const CudaScope device(input);
      return CudaScope::check("focal_calibration_map", cuda::calibration_map_forward(args, device.stream()));
    }
#endif
    for_each_part(args, [&](int64_t begin, int64_t end) {
      const int64_t invalid = cpu::calibration_map_forward(args, begin, end);
      int64_t known = first.load();
      while (invalid >= 0 && invalid < known && !first.compare_exchange_weak(known, invalid)) {
      }
    });
  });
  return first == kNone ? -1 : first.load();
}

void backward(const Tensor& grad, const Tensor& input, const OptionalTensor& gamma, const OptionalTensor& temperature,
              const OptionalTensor& grad_input, const OptionalTensor& grad_gamma,
              const OptionalTensor& grad_temperature, double gamma_value, double temperature_value, int64_t kind,
              bool log_output) {
  dispatch_scalar(input.scalar_type(), [&](auto scalar) {
    using Scalar = decltype(scalar);
    CalibrationMapBackward<Scalar> args{};
    set_input(args, input, kind, log_output);
    set_parameters(args, {gamma, temperature, gamma_value, temperature_value});
    if (grad.scalar_type() == input.scalar_type()) {
      args.grad_output = static_cast<const Scalar*>(grad.const_data_ptr());
    } else {
      args.grad_output_wide = static_cast<const compute_t<Scalar>*>(grad.const_data_ptr());
    }
    args.grad_input = mutable_or_null<Scalar>(grad_input);
    args.grad_gamma = mutable_or_null<double>(grad_gamma);
    args.grad_temperature = mutable_or_null<double>(grad_temperature);
    if (args.rows == 0) return;
#ifdef FOCALKERN_WITH_CUDA
    if (input.is_cuda()) {
      const CudaScope device(input);
      return CudaScope::check("focal_calibration_map", cuda::calibration_map_backward(args, device.stream()));
    }
#endif
    for_each_part(args, [&](int64_t begin, int64_t end) { cpu::calibration_map_backward(args, begin, end); });
  });
}

FK_KERNELS_FRAGMENT(m) {
  m.def(
      "calibration_map_forward_out(Tensor input, Tensor? gamma, Tensor? temperature, Tensor(a!) output, float "
      "gamma_value, float temperature_value, int kind, bool log_output) -> int");
  m.def(
      "calibration_map_backward_out(Tensor grad, Tensor input, Tensor? gamma, Tensor? temperature, Tensor(a!)? "
      "grad_input, Tensor(b!)? grad_gamma, Tensor(c!)? grad_temperature, float gamma_value, float temperature_value, "
      "int kind, bool log_output) -> ()");
}

void implement(torch::stable::detail::StableLibrary& m) {
  m.impl("calibration_map_forward_out", TORCH_BOX(&forward));
  m.impl("calibration_map_backward_out", TORCH_BOX(&backward));
}

FK_KERNELS_IMPL_ALL(implement)

}  // namespace
}  // namespace focalkern::stable
