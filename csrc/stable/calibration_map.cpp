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

template <typename Args>
void set_parameters(Args& args, const Parameters& given) {
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
  args.classes = input.size(input.dim() - 1);
  args.rows = input.numel() / args.classes;
  args.input = static_cast<const Scalar*>(input.const_data_ptr());
  args.input_is_probs = kind == kProbs;
  args.log_output = log_output;
}
template <typename Scalar>
void set_input(BinaryCalibrationMapArgs<Scalar>& args, const Tensor& input, int64_t /*kind*/, bool log_output) {
  args.size = input.numel();
  args.logits = static_cast<const Scalar*>(input.const_data_ptr());
  args.log_odds_output = log_output;
}

// Rows, classes, and what a device runs: the same for rows of classes and for one logit each.
template <typename Scalar>
struct Rows {
  static int64_t size(const CalibrationMapArgs<Scalar>& args) { return args.rows; }
  static int64_t size(const BinaryCalibrationMapArgs<Scalar>& args) { return args.size; }
  static int64_t classes(const CalibrationMapArgs<Scalar>& args) { return args.classes; }
  static int64_t classes(const BinaryCalibrationMapArgs<Scalar>&) { return 1; }
};

template <typename Scalar, typename Args, typename Work>
void for_each_part(const Args& args, Work work) {
  const int64_t rows = Rows<Scalar>::size(args);
  for_each_chunk(rows, cpu::calibration_map_chunk_rows(rows, Rows<Scalar>::classes(args)),
                 [&](int64_t, int64_t begin, int64_t end) { work(begin, end); });
}

int64_t forward(const Tensor& input, const OptionalTensor& gamma, const OptionalTensor& temperature,
                const Tensor& output, double gamma_value, double temperature_value, int64_t kind, bool log_output) {
  constexpr int64_t kNone = std::numeric_limits<int64_t>::max();
  std::atomic<int64_t> first{kNone};
  dispatch_scalar(input.scalar_type(), [&](auto scalar) {
    using Scalar = decltype(scalar);
    const auto run = [&](auto args, auto on_cpu, [[maybe_unused]] auto on_cuda) {
      set_input(args, input, kind, log_output);
      set_parameters(args, {gamma, temperature, gamma_value, temperature_value});
      if (output.element_size() == sizeof(Scalar)) {
        args.output = static_cast<Scalar*>(output.mutable_data_ptr());
      } else {
        args.output_wide = static_cast<compute_t<Scalar>*>(output.mutable_data_ptr());
      }
      if (Rows<Scalar>::size(args) == 0) return;
#ifdef FOCALKERN_WITH_CUDA
      if (input.is_cuda()) {
        const CudaScope device(input);
        return CudaScope::check("focal_calibration_map", on_cuda(args, device.stream()));
      }
#endif
      for_each_part<Scalar>(args, [&](int64_t begin, int64_t end) {
        const int64_t invalid = on_cpu(args, begin, end);
        int64_t known = first.load();
        while (invalid >= 0 && invalid < known && !first.compare_exchange_weak(known, invalid)) {
        }
      });
    };
    if (kind == kBinary) {
      run(BinaryCalibrationMapForward<Scalar>{}, cpu::binary_calibration_map_forward<Scalar>,
          [](const auto& args, void* stream) { return cuda::binary_calibration_map_forward(args, stream); });
    } else {
      run(CalibrationMapForward<Scalar>{}, cpu::calibration_map_forward<Scalar>,
          [](const auto& args, void* stream) { return cuda::calibration_map_forward(args, stream); });
    }
  });
  return first == kNone ? -1 : first.load();
}

void backward(const Tensor& grad, const Tensor& input, const OptionalTensor& gamma, const OptionalTensor& temperature,
              const OptionalTensor& grad_input, const OptionalTensor& grad_gamma,
              const OptionalTensor& grad_temperature, double gamma_value, double temperature_value, int64_t kind,
              bool log_output) {
  dispatch_scalar(input.scalar_type(), [&](auto scalar) {
    using Scalar = decltype(scalar);
    const auto run = [&](auto args, Scalar* const& grad_of_input, auto on_cpu, [[maybe_unused]] auto on_cuda) {
      set_input(args, input, kind, log_output);
      set_parameters(args, {gamma, temperature, gamma_value, temperature_value});
      if (grad.scalar_type() == input.scalar_type()) {
        args.grad_output = static_cast<const Scalar*>(grad.const_data_ptr());
      } else {
        args.grad_output_wide = static_cast<const compute_t<Scalar>*>(grad.const_data_ptr());
      }
      if constexpr (requires { args.grad_input; }) {
        args.grad_input = grad_of_input;
      } else {
        args.grad_logits = grad_of_input;
      }
      args.grad_gamma = mutable_or_null<double>(grad_gamma);
      args.grad_temperature = mutable_or_null<double>(grad_temperature);
      if (Rows<Scalar>::size(args) == 0) return;
#ifdef FOCALKERN_WITH_CUDA
      if (input.is_cuda()) {
        const CudaScope device(input);
        return CudaScope::check("focal_calibration_map", on_cuda(args, device.stream()));
      }
#endif
      for_each_part<Scalar>(args, [&](int64_t begin, int64_t end) { on_cpu(args, begin, end); });
    };
    Scalar* const of_input = mutable_or_null<Scalar>(grad_input);
    if (kind == kBinary) {
      run(BinaryCalibrationMapBackward<Scalar>{}, of_input, cpu::binary_calibration_map_backward<Scalar>,
          [](const auto& args, void* stream) { return cuda::binary_calibration_map_backward(args, stream); });
    } else {
      run(CalibrationMapBackward<Scalar>{}, of_input, cpu::calibration_map_backward<Scalar>,
          [](const auto& args, void* stream) { return cuda::calibration_map_backward(args, stream); });
    }
  });
}

FK_KERNELS_FRAGMENT(m) {
  m.def(
      "calibration_map_forward_out(Tensor input, Tensor? gamma, Tensor? temperature, Tensor(a!) output, float "
      "gamma_value, "
      "float temperature_value, int kind, bool log_output) -> int");
  m.def(
      "calibration_map_backward_out(Tensor grad, Tensor input, Tensor? gamma, Tensor? temperature, Tensor(a!)? "
      "grad_input, "
      "Tensor(b!)? grad_gamma, Tensor(c!)? grad_temperature, float gamma_value, float temperature_value, int kind, "
      "bool log_output) -> ()");
}

void implement(torch::stable::detail::StableLibrary& m) {
  m.impl("calibration_map_forward_out", TORCH_BOX(&forward));
  m.impl("calibration_map_backward_out", TORCH_BOX(&backward));
}

FK_KERNELS_IMPL(CPU, m) { implement(m); }
#ifdef FOCALKERN_WITH_CUDA
FK_KERNELS_IMPL(CUDA, m) { implement(m); }
#endif

}  // namespace
}  // namespace focalkern::stable
