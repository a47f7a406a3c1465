// Kernel calls of the calibration maps, for each device and for fake tensors.
#pragma once

#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>
#include <c10/util/Exception.h>

#include <atomic>
#include <limits>
#include <tuple>

#include "bindings/calibration_map_arguments.h"
#include "math/calibration_map.h"

#ifdef FOCALKERN_WITH_CUDA
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#endif

namespace focalkern::bindings {
namespace {

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

}  // namespace
}  // namespace focalkern::bindings
