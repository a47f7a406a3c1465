// Kernel calls of the losses of rows, for each device and for fake tensors.
#pragma once

#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <c10/util/Exception.h>

#include <optional>
#include <tuple>
#include <vector>

#include "bindings/row_loss_arguments.h"
#include "bindings/row_sums.h"
#include "bindings/row_sums_run.h"
#include "kernels/row_loss_statistics.h"

#ifdef FOCALKERN_WITH_CUDA
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#endif

namespace focalkern::bindings {
namespace {

Tensor empty_saved(const Tensor& input, const Options& options) {
  const auto rows = input.sym_numel() / input.sym_size(class_dim_of(input));
  return at::empty_symint({rows * saved_numbers(options) + 1},
                          input.options().dtype(compute_dtype(input.scalar_type())));
}

template <typename Real>
RowStatisticsResult<Real> result_of(const RowStatistics& statistics) {
  return std::apply([](const auto&... tensors) { return row_statistics_result<Real>(tensors...); }, statistics);
}

// Each device class reads labels if that needs no synchronisation, allocates scratch memory, and launches the kernels.
struct Cpu {
  struct Guard {
    explicit Guard(c10::Device /* device */) {}
  };
  static void check_labels(const Inputs& /* inputs */, const Options& /* options */) {}  // the kernels do

  // Fills the statistics of the rows, if not null.
  template <typename Scalar>
  static void forward(RowLossForward<Scalar>& args, const Prepared<Scalar>& prepared, const Options& options,
                      const Tensor& loss, const RowStatistics* statistics = nullptr) {
    using Real = compute_t<Scalar>;
    std::optional<RowStatisticsResult<Real>> of_rows;
    if (statistics) of_rows = result_of<Real>(*statistics);
    const int64_t chunk_rows = cpu::row_loss_chunk_rows(args.rows, args.classes);
    const int64_t n_chunks = (args.rows + chunk_rows - 1) / chunk_rows;
    std::vector<RowLossSums> chunks(n_chunks);
    dispatch_loss(options.kind, [&](auto formula) {
      using Loss = decltype(formula);
      at::parallel_for(0, n_chunks, 1, [&](int64_t begin, int64_t end) {
        for (int64_t i = begin; i < end; ++i) {
          const int64_t row = i * chunk_rows, end_row = std::min(args.rows, row + chunk_rows);
          chunks[i] = of_rows ? row_loss_and_statistics<Loss>(args, *of_rows, row, end_row)
                              : cpu::row_loss_forward<Loss>(args, row, end_row);
        }
      });
    });
    double total = 0, divisor = 0;
    for (const auto& chunk : chunks) {
      if (chunk.invalid_row >= 0)
        raise_invalid_label(name_of(options), prepared.target, chunk.invalid_row, args.classes);
      total += chunk.loss;
      divisor += chunk.weight;
    }
    if (options.reduction == kMean) total /= divisor;
    if (options.reduction != kNone) *static_cast<Real*>(loss.mutable_data_ptr()) = static_cast<Real>(total);
    args.saved[saved_numbers(options) * args.rows] = static_cast<Real>(divisor);
  }

  template <typename Scalar>
  static void backward(const RowLossBackward<Scalar>& args, const Options& options) {
    const int64_t chunk_rows = cpu::row_loss_chunk_rows(args.rows, args.classes);
    const int64_t n_chunks = (args.rows + chunk_rows - 1) / chunk_rows;
    dispatch_loss(options.kind, [&](auto formula) {
      using Loss = decltype(formula);
      at::parallel_for(0, n_chunks, 1, [&](int64_t begin, int64_t end) {
        // Runs backwards: the rows that the forward pass read last may still be in the cache. Some chunks at a time,
        // because the first rows of a call are not prefetched.
        constexpr int64_t kAtOnce = 4;
        for (int64_t stop = end, start; stop > begin; stop = start) {
          start = std::max(begin, stop - kAtOnce);
          cpu::row_loss_backward<Loss>(args, start * chunk_rows, std::min(args.rows, stop * chunk_rows));
        }
      });
    });
  }
};

#ifdef FOCALKERN_WITH_CUDA
struct Cuda {
  using Guard = c10::cuda::CUDAGuard;

  static void check_labels(const Inputs& inputs, const Options& options) {
    if (!validation_requested() || is_soft_target(inputs.target)) return;
    const int64_t classes = inputs.input.size(class_dim_of(inputs.input));
    check_labels_on_device(name_of(options), inputs.target, classes, options.ignore_index);
  }

  template <typename Scalar>
  static void forward(RowLossForward<Scalar>& args, const Prepared<Scalar>& prepared, const Options& options,
                      const Tensor& loss, const RowStatistics* statistics = nullptr) {
    using Real = compute_t<Scalar>;
    const bool mean = options.reduction == kMean;
    Real* reduced = options.reduction == kNone ? nullptr : static_cast<Real*>(loss.mutable_data_ptr());
    Tensor workspace;
    const int64_t bytes = cuda::focal_loss_workspace(args.rows, args.classes, options.reduction != kNone);
    if (bytes > 0) workspace = at::empty({bytes}, prepared.input.options().dtype(at::kByte));
    void* scratch = workspace.defined() ? workspace.mutable_data_ptr() : nullptr;
    Real* divisor = args.saved + saved_numbers(options) * args.rows;
    void* stream = c10::cuda::getCurrentCUDAStream().stream();
    dispatch_loss(options.kind, [&](auto formula) {
      using Loss = decltype(formula);
      const int error = statistics ? cuda::row_loss_with_statistics<Loss>(args, result_of<Real>(*statistics), mean,
                                                                          reduced, divisor, scratch, stream)
                                   : cuda::row_loss_forward<Loss>(args, mean, reduced, divisor, scratch, stream);
      C10_CUDA_CHECK(static_cast<cudaError_t>(error));
    });
  }

  template <typename Scalar>
  static void backward(const RowLossBackward<Scalar>& args, const Options& options) {
    void* stream = c10::cuda::getCurrentCUDAStream().stream();
    dispatch_loss(options.kind, [&](auto formula) {
      const int error = cuda::row_loss_backward<decltype(formula)>(args, stream);
      C10_CUDA_CHECK(static_cast<cudaError_t>(error));
    });
  }
};
#endif  // FOCALKERN_WITH_CUDA

template <typename Device, typename... More>
std::tuple<Tensor, Tensor> forward_with(const Inputs& inputs, const Options& options, const More&... more) {
  check_arguments(inputs, options);
  const Tensor& input = inputs.input;
  const typename Device::Guard guard(input.device());
  Device::check_labels(inputs, options);
  const Tensor saved = empty_saved(input, options);
  const bool unreduced = options.reduction == kNone;
  const Tensor loss =
      at::empty(unreduced ? C10_AS_INTARRAYREF_SLOW(loss_shape(input)) : at::IntArrayRef(), saved.options());
  dispatch_scalar(input.scalar_type(), [&](auto scalar) {
    using Scalar = decltype(scalar);
    using Real = compute_t<Scalar>;
    const auto prepared = prepare<Scalar>(inputs, options);
    RowLossForward<Scalar> args{prepared.args, nullptr};
    args.saved = static_cast<Real*>(saved.mutable_data_ptr());
    if (unreduced) args.row_loss = static_cast<Real*>(loss.mutable_data_ptr());
    Device::forward(args, prepared, options, loss, more...);
  });
  return {as_dtype(loss, result_dtype(input, options.float32_loss)), saved};
}

template <typename Device>
std::tuple<Tensor, Tensor> forward(const Inputs& inputs, const Options& options) {
  return forward_with<Device>(inputs, options);
}

// A gradient that is not needed is an undefined tensor.
template <typename Device>
std::tuple<Tensor, Tensor, Tensor> backward(const Tensor& grad, const Inputs& inputs, const Tensor& saved,
                                            const Options& options, std::array<bool, 3> needed) {
  check_arguments(inputs, options);
  const auto& [input, target, gamma, edges, weight] = inputs;
  const typename Device::Guard guard(input.device());
  const char* op = name_of(options);
  const int64_t numbers = saved_numbers(options);
  const auto real = compute_dtype(input.scalar_type());
  const int64_t classes = input.size(class_dim_of(input));
  const int64_t rows = input.numel() / classes;
  const auto shape = options.reduction == kNone ? loss_shape(input) : c10::SymDimVector();
  TORCH_CHECK_VALUE(grad.sym_sizes() == c10::SymIntArrayRef(shape), op, ": grad must have the shape of the loss, ",
                    c10::SymIntArrayRef(shape), ", got ", grad.sym_sizes());
  // The divisor is the last number. On CUDA a number per row may precede it: RowLossBackward::lse_slope.
  const bool has_slope = input.is_cuda() && rows > 0 && saved.numel() == (numbers + 1) * rows + 1;
  TORCH_CHECK_VALUE(saved.dim() == 1 && (has_slope || saved.numel() == numbers * rows + 1) &&
                        saved.scalar_type() == real && saved.is_contiguous(),
                    op, ": saved must be what the forward pass returned for this input");
  TORCH_CHECK_VALUE(!edges || !needed[2], op, ": the gammas of a table have no gradient, and needed[2] asks for it");
  check_same_device(op, "grad", grad, input);
  check_same_device(op, "saved", saved, input);
  Tensor grad_input, grad_target, grad_gamma;
  dispatch_scalar(input.scalar_type(), [&](auto scalar) {
    using Scalar = decltype(scalar);
    using Real = compute_t<Scalar>;
    auto prepared = prepare<Scalar>(inputs, options);
    RowLossBackward<Scalar> args{};
    const int64_t class_dim = class_dim_of(input);
    // The tensor that the kernel writes: the gradient, or a temporary if no RowLayout describes its strides.
    Tensor input_buffer, target_buffer;
    if (needed[0]) {
      grad_input = empty_result_like(input, input.scalar_type());
      input_buffer = row_layout(grad_input, class_dim, input.is_cpu())
                         ? grad_input
                         : empty_result_like(prepared.input, input.scalar_type());
      args.grad_logits = static_cast<Scalar*>(input_buffer.mutable_data_ptr());
    }
    if (needed[1]) {
      // The kernel has one layout for the target and its gradient, so an expanded target cannot provide it.
      if (!prepared.target.is_non_overlapping_and_dense()) {
        prepared.target = prepared.target.contiguous();
        prepared.args.target_layout = *row_layout(prepared.target, class_dim, input.is_cpu());
        prepared.args.target_probs.data = prepared.target.const_data_ptr();
      }
      grad_target = at::empty_like(target, target.options().dtype(real));
      const bool same_layout = grad_target.strides() == prepared.target.strides();
      target_buffer = same_layout ? grad_target : at::empty_like(prepared.target, grad_target.options());
      args.grad_target = static_cast<Real*>(target_buffer.mutable_data_ptr());
    }
    if (needed[2]) {
      grad_gamma = at::empty(C10_AS_INTARRAYREF_SLOW(loss_shape(input)), input.options().dtype(real));
      args.grad_gamma = static_cast<Real*>(grad_gamma.mutable_data_ptr());
    }
    static_cast<RowLossArgs<Scalar>&>(args) = prepared.args;
    if (needed[0]) args.grad_layout = *row_layout(input_buffer, class_dim, input.is_cpu());
    args.saved = static_cast<Real*>(const_cast<void*>(saved.const_data_ptr()));
    if (has_slope) args.lse_slope = args.saved + numbers * rows;
    if (options.reduction == kMean) args.divisor = args.saved + (saved.numel() - 1);
    Tensor upstream = as_dtype(grad, real);
    args.grad_stride = options.reduction == kNone ? 1 : 0;
    if (args.grad_stride) upstream = upstream.contiguous();
    args.grad_loss = static_cast<const Real*>(upstream.const_data_ptr());
    if (rows > 0) Device::backward(args, options);
    if (needed[0] && !input_buffer.is_same(grad_input)) grad_input.copy_(input_buffer);
    if (needed[1] && !target_buffer.is_same(grad_target)) grad_target.copy_(target_buffer);
  });
  if (needed[1]) grad_target = as_dtype(grad_target, target.scalar_type());
  if (needed[2]) grad_gamma = grad_gamma.sum_to_size(gamma.sizes()).to(gamma.scalar_type());
  return {grad_input, grad_target, grad_gamma};
}

std::tuple<Tensor, Tensor> forward_meta(const Inputs& inputs, const Options& options) {
  check_arguments(inputs, options);
  const Tensor& input = inputs.input;
  const auto shape = options.reduction == kNone ? loss_shape(input) : c10::SymDimVector();
  return {at::empty_symint(shape, input.options().dtype(result_dtype(input, options.float32_loss))),
          empty_saved(input, options)};
}

std::tuple<Tensor, Tensor, Tensor> backward_meta(const Tensor& /* grad */, const Inputs& inputs,
                                                 const Tensor& /* saved */, const Options& /* options */,
                                                 std::array<bool, 3> needed) {
  const auto& [input, target, gamma, edges, weight] = inputs;
  return {needed[0] ? at::empty_like(input) : Tensor(), needed[1] ? at::empty_like(target) : Tensor(),
          needed[2] ? at::empty_like(gamma, gamma.options(), at::MemoryFormat::Contiguous) : Tensor()};
}

}  // namespace
}  // namespace focalkern::bindings
