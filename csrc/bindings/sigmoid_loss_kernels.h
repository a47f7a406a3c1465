// Kernel calls of the losses of one logit, for each device and for fake tensors.
#pragma once

#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <tuple>
#include <vector>

#include "bindings/sigmoid_loss_arguments.h"
#include "bindings/strided_iteration.h"

#ifdef FOCALKERN_WITH_CUDA
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#endif

namespace focalkern::bindings {
namespace {

// A device allocates losses, reads labels where that is free, and launches the kernels.
struct Cpu {
  struct Guard {
    explicit Guard(c10::Device /* device */) {}
  };
  static void check_labels(const Inputs& /* inputs */, const Options& /* options */) {}  // the kernels do
  static Tensor empty_like(const Tensor& input, at::ScalarType dtype) { return empty_result_like(input, dtype); }
  static at::ScalarType reduced_dtype(at::ScalarType stored) { return stored; }

  template <typename Scalar>
  static void forward(const SigmoidLossForward<Scalar>& args, const Inputs& inputs, const Options& options,
                      const Tensor& loss, const Tensor& divisor) {
    using Real = compute_t<Scalar>;
    const int64_t chunk = cpu::kSigmoidLossChunk, size = args.space.size;
    const int64_t n_chunks = (size + chunk - 1) / chunk;
    std::vector<Real> table;
    if constexpr (std::is_same_v<Scalar, BFloat16>) {
      if (size >= cpu::kBFloat16TablePays * at::get_num_threads()) table = cpu::sigmoid_loss_bfloat16_table(args);
    }
    std::vector<SigmoidLossSums> chunks(n_chunks);
    at::parallel_for(0, n_chunks, 1, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) {
        chunks[i] = cpu::sigmoid_loss_forward(args, i * chunk, std::min(size, (i + 1) * chunk),
                                              table.empty() ? nullptr : table.data());
      }
    });
    double total = 0;
    int64_t count = 0;
    for (const auto& sums : chunks) {
      if (!sums.is_valid) raise_invalid_label(inputs.input, inputs.target, options);
      total += sums.loss;
      count += sums.count;
    }
    const bool mean = options.reduction == kMean;
    if (mean) total /= static_cast<double>(count);
    if (options.reduction != kNone) {
      dispatch_scalar(loss.scalar_type(), [&](auto stored) {
        using Stored = decltype(stored);
        *static_cast<Stored*>(loss.mutable_data_ptr()) =
            Store<Stored>::from_compute(static_cast<compute_t<Stored>>(total));
      });
    }
    *static_cast<Real*>(divisor.mutable_data_ptr()) = mean ? static_cast<Real>(count) : Real(1);
  }

  template <typename Scalar>
  static void backward(const SigmoidLossBackward<Scalar>& args) {
    const int64_t chunk = cpu::kSigmoidLossChunk, size = args.space.size;
    std::vector<Scalar> table;
    if constexpr (std::is_same_v<Scalar, BFloat16>) {
      if (size >= cpu::kBFloat16TablePays * at::get_num_threads()) table = cpu::sigmoid_grad_bfloat16_table(args);
    }
    at::parallel_for(0, (size + chunk - 1) / chunk, 1, [&](int64_t begin, int64_t end) {
      // Runs backwards: the end of the tensor, which the forward pass read last, may still be in the cache.
      for (int64_t i = end - 1; i >= begin; --i) {
        cpu::sigmoid_loss_backward(args, i * chunk, std::min(size, (i + 1) * chunk),
                                   table.empty() ? nullptr : table.data());
      }
    });
  }
};

#ifdef FOCALKERN_WITH_CUDA
struct Cuda {
  using Guard = c10::cuda::CUDAGuard;

  static void check_labels(const Inputs& inputs, const Options& options) {
    if (!validation_requested() || !is_labels(inputs.input, inputs.target)) return;
    const Tensor labels = inputs.target.reshape({-1}).to(at::kLong);
    const int64_t classes = inputs.input.size(class_dim_of(inputs.input));
    const Tensor wrong = labels.ne(options.ignore_index).logical_and_(labels.lt(0).logical_or_(labels.gt(classes)));
    if (wrong.any().item<bool>()) raise_invalid_label(inputs.input, inputs.target, options);
  }
  static Tensor empty_like(const Tensor& input, at::ScalarType dtype) {
    return at::empty_like(input, input.options().dtype(dtype));
  }
  static at::ScalarType reduced_dtype(at::ScalarType stored) { return compute_dtype(stored); }  // rounded afterwards

  template <typename Scalar>
  static void forward(const SigmoidLossForward<Scalar>& args, const Inputs& inputs, const Options& options,
                      const Tensor& loss, const Tensor& divisor) {
    using Real = compute_t<Scalar>;
    const bool reduced = options.reduction != kNone;
    Tensor workspace;
    if (reduced) {
      const int64_t bytes = cuda::sigmoid_loss_workspace(args.space.size);
      workspace = at::empty({bytes}, inputs.input.options().dtype(at::kByte));
    }
    C10_CUDA_CHECK(static_cast<cudaError_t>(cuda::sigmoid_loss_forward(
        args, options.reduction == kMean, reduced ? static_cast<Real*>(loss.mutable_data_ptr()) : nullptr,
        static_cast<Real*>(divisor.mutable_data_ptr()), reduced ? workspace.mutable_data_ptr() : nullptr,
        c10::cuda::getCurrentCUDAStream().stream())));
  }

  template <typename Scalar>
  static void backward(const SigmoidLossBackward<Scalar>& args) {
    C10_CUDA_CHECK(
        static_cast<cudaError_t>(cuda::sigmoid_loss_backward(args, c10::cuda::getCurrentCUDAStream().stream())));
  }
};
#endif  // FOCALKERN_WITH_CUDA

template <typename Device>
std::tuple<Tensor, Tensor> forward(const Inputs& inputs, const Options& options) {
  check_arguments(inputs, options);
  const Tensor& input = inputs.input;
  const typename Device::Guard guard(input.device());
  Device::check_labels(inputs, options);
  const auto real = compute_dtype(input.scalar_type()), stored = result_dtype(input, options.float32_loss);
  const bool unreduced = options.reduction == kNone;
  const Tensor divisor = at::empty({1}, input.options().dtype(real));
  const Tensor loss = unreduced ? Device::empty_like(input, stored)
                                : at::empty({}, input.options().dtype(Device::reduced_dtype(stored)));
  // Results have the layout of the input if it is dense.
  const Tensor layout = input.is_non_overlapping_and_dense() ? input
                        : unreduced                          ? loss
                                                             : at::empty_like(input, input.options().device(at::kMeta));
  dispatch_scalar(input.scalar_type(), [&](auto scalar) {
    using Scalar = decltype(scalar);
    SigmoidLossForward<Scalar> args{};
    StridedIteration<Tensor> walk(layout, label_dim(input, inputs.target));
    prepare(args, walk, nullptr, Tensor(), inputs, options);
    if (unreduced && stored == real) {
      args.loss_wide = static_cast<compute_t<Scalar>*>(loss.mutable_data_ptr());
    } else if (unreduced) {
      args.loss = static_cast<Scalar*>(loss.mutable_data_ptr());
    }
    Device::forward(args, inputs, options, loss, divisor);
  });
  return {as_dtype(loss, stored), divisor};
}

template <typename Device>
std::tuple<Tensor, Tensor, Tensor, Tensor> backward(const Tensor& grad, const Inputs& inputs, const Tensor& divisor,
                                                    const Options& options, std::array<bool, 4> needed) {
  check_arguments(inputs, options);
  const auto& [input, target, gamma, second, weight, scores] = inputs;
  const typename Device::Guard guard(input.device());
  const char* op = names_of(options.kind).op;
  const auto real = compute_dtype(input.scalar_type());
  TORCH_CHECK_VALUE(options.reduction == kNone ? grad.sizes() == input.sizes() : grad.dim() == 0, op,
                    ": grad must have the shape of the loss, got ", grad.sizes());
  TORCH_CHECK_VALUE(divisor.numel() == 1 && divisor.scalar_type() == real, op,
                    ": divisor must be what the forward pass returned for this input");
  check_same_device(op, "grad", grad, input);
  check_same_device(op, "divisor", divisor, input);
  const auto wide = input.options().dtype(real);
  Tensor grad_input = needed[0] ? empty_result_like(input, input.scalar_type()) : at::empty({0}, input.options());
  Tensor grad_target = needed[1] ? at::empty_like(input, wide) : at::empty({0}, wide);
  Tensor grad_gamma = needed[2] ? at::empty_like(input, wide) : at::empty({0}, wide);
  Tensor grad_second = needed[3] ? at::empty_like(input, wide) : at::empty({0}, wide);
  if (!(needed[0] || needed[1] || needed[2] || needed[3])) return {grad_input, grad_target, grad_gamma, grad_second};
  const Tensor& layout = needed[0] ? grad_input : needed[1] ? grad_target : needed[2] ? grad_gamma : grad_second;
  dispatch_scalar(input.scalar_type(), [&](auto scalar) {
    using Scalar = decltype(scalar);
    using Real = compute_t<Scalar>;
    SigmoidLossBackward<Scalar> args{};
    StridedIteration<Tensor> walk(layout, label_dim(input, target));
    prepare(args, walk, &args.grad_loss, grad, inputs, options);
    if (options.reduction == kMean) args.divisor = static_cast<const Real*>(divisor.const_data_ptr());
    if (needed[0]) args.grad_input = static_cast<Scalar*>(grad_input.mutable_data_ptr());
    if (needed[1]) args.grad_target = static_cast<Real*>(grad_target.mutable_data_ptr());
    if (needed[2]) args.grad_gamma = static_cast<Real*>(grad_gamma.mutable_data_ptr());
    if (needed[3]) args.grad_second = static_cast<Real*>(grad_second.mutable_data_ptr());
    if (args.space.size > 0) Device::backward(args);
  });
  if (needed[1]) grad_target = as_dtype(grad_target, target.scalar_type());
  if (needed[2]) grad_gamma = grad_gamma.sum_to_size(gamma.sizes()).to(gamma.options());
  if (needed[3]) grad_second = grad_second.sum_to_size(second->sizes()).to(second->options());
  return {grad_input, grad_target, grad_gamma, grad_second};
}

std::tuple<Tensor, Tensor> forward_meta(const Inputs& inputs, const Options& options) {
  check_arguments(inputs, options);
  const Tensor& input = inputs.input;
  const auto stored = input.options().dtype(result_dtype(input, options.float32_loss));
  return {options.reduction == kNone ? at::empty_like(input, stored) : at::empty({}, stored),
          at::empty({1}, input.options().dtype(compute_dtype(input.scalar_type())))};
}

std::tuple<Tensor, Tensor, Tensor, Tensor> backward_meta(const Tensor& /* grad */, const Inputs& inputs,
                                                         const Tensor& /* divisor */, const Options& options,
                                                         std::array<bool, 4> needed) {
  check_arguments(inputs, options);
  const auto& [input, target, gamma, second, weight, scores] = inputs;
  const auto real = input.options().dtype(compute_dtype(input.scalar_type()));
  const auto contiguous_like = [](const Tensor& tensor) {
    return at::empty_like(tensor, tensor.options(), at::MemoryFormat::Contiguous);
  };
  return {needed[0] ? at::empty_like(input) : at::empty({0}, input.options()),
          needed[1] ? at::empty_like(input, input.options().dtype(target.scalar_type())) : at::empty({0}, real),
          needed[2] ? contiguous_like(gamma) : at::empty({0}, real),
          needed[3] ? contiguous_like(*second) : at::empty({0}, real)};
}

}  // namespace
}  // namespace focalkern::bindings
