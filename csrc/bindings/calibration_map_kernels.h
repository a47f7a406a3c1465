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

// Calls work(begin, end) for every chunk of the rows, whose bounds do not depend on the number of threads.
template <typename Work>
void for_each_chunk(int64_t rows, int64_t classes, Work work) {
  const int64_t chunk_rows = cpu::calibration_map_chunk_rows(rows, classes);
  const int64_t n_chunks = (rows + chunk_rows - 1) / chunk_rows;
  at::parallel_for(0, n_chunks, 1, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) work(i * chunk_rows, std::min(rows, (i + 1) * chunk_rows));
  });
}

template <typename Number>
Tensor forward_cpu(const Tensor& input_as_given, const Number& gamma, const Number& temperature, int64_t kind,
                   bool log_output, bool wide, bool validate) {
  check_arguments(input_as_given, gamma, temperature, kind);
  const Tensor input = input_as_given.contiguous();
  const Tensor output = empty_result_like(input, result_dtype(input, wide));
  std::atomic<int64_t> first_invalid{std::numeric_limits<int64_t>::max()};
  launch_forward(input, gamma, temperature, {kind, log_output, wide}, output, [&](const auto& args) {
    for_each_chunk(args.rows, args.classes, [&](int64_t begin, int64_t end) {
      const int64_t invalid = cpu::calibration_map_forward(args, begin, end);
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
  const auto grads =
      launch_backward(grad, input, gamma, temperature, {kind, log_output, false}, needed, [&](const auto& args) {
        for_each_chunk(args.rows, args.classes,
                       [&](int64_t begin, int64_t end) { cpu::calibration_map_backward(args, begin, end); });
      });
  return finish(grads, input, gamma, temperature);
}

#ifdef FOCALKERN_WITH_CUDA
void* current_stream() { return c10::cuda::getCurrentCUDAStream().stream(); }

void check_launch(int error) { C10_CUDA_CHECK(static_cast<cudaError_t>(error)); }

// `validate` asks for the checks that are free on the CPU; on CUDA only FOCALKERN_VALIDATE=1 waits for the device.
template <typename Number>
Tensor forward_cuda(const Tensor& input_as_given, const Number& gamma, const Number& temperature, int64_t kind,
                    bool log_output, bool wide, bool /*validate*/) {
  check_arguments(input_as_given, gamma, temperature, kind);
  const c10::cuda::CUDAGuard guard(input_as_given.device());
  const Tensor input = input_as_given.contiguous();
  const Tensor output = at::empty(input.sizes(), input.options().dtype(result_dtype(input, wide)));
  launch_forward(input, gamma, temperature, {kind, log_output, wide}, output,
                 [](const auto& args) { check_launch(cuda::calibration_map_forward(args, current_stream())); });
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
  const auto grads =
      launch_backward(grad, input, gamma, temperature, {kind, log_output, false}, needed,
                      [](const auto& args) { check_launch(cuda::calibration_map_backward(args, current_stream())); });
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
