// The losses of rows: from checked tensors to the kernels of csrc/cpu and csrc/cuda.
//
//   row_loss_forward_out          fills saved and loss; returns the first row whose label is out of range, or -1
//   row_loss_with_statistics_out  also fills the statistics of the rows, from the same read of the logits
//   row_loss_backward_out         fills the gradient tensors passed in
//
// gamma is contiguous in the type of the computation, or none for the number gamma_value; so are edges and weight.
// Labels are contiguous, class probabilities in the type of the computation.

#include <string>
#include <vector>

#include "bindings/row_layout.h"
#include "bindings/row_sums_run.h"
#include "kernels/row_loss.h"
#include "math/row_losses.h"
#include "stable/common.h"
#ifdef FOCALKERN_WITH_CUDA
#include "stable/cuda_scope.h"
#endif

namespace focalkern::stable {
namespace {

enum class RowLoss : int64_t {
#define FK_ROW_LOSS(number, Formula, name) number,
#include "math/row_losses.def"
};

// Calls f with the formula of the loss.
template <typename Function>
void dispatch_loss(int64_t kind, Function f) {
  switch (static_cast<RowLoss>(kind)) {
#define FK_ROW_LOSS(number, Formula, name) \
  case RowLoss::number:                    \
    return f(Formula{});
#include "math/row_losses.def"
  }
  STD_TORCH_CHECK(false, "focal_loss: no loss has the number ", kind);
}

struct Inputs {
  const Tensor& input;
  const Tensor& target;
  const OptionalTensor& gamma;
  const OptionalTensor& edges;
  const OptionalTensor& weight;
  double gamma_value;
  int64_t ignore_index;
  double label_smoothing;
  bool detach_modulation;
  double epsilon;
};

int64_t class_dim_of(const Tensor& input) { return input.dim() == 1 ? 0 : 1; }

bool is_soft(const Tensor& target) {
  const ScalarType type = target.scalar_type();
  return type != ScalarType::Long && type != ScalarType::Int && type != ScalarType::Byte;
}

// The tensor, or a copy if its strides are no row layout.
Tensor with_row_layout(const Tensor& tensor, int64_t class_dim, RowLayout* layout) {
  if (const auto found = bindings::row_layout(tensor, class_dim, tensor.is_cpu())) {
    *layout = *found;
    return tensor;
  }
  const Tensor copy = torch::stable::contiguous(tensor);
  *layout = *bindings::row_layout(copy, class_dim, /*with_images=*/false);
  return copy;
}

// The arguments of the kernels, and the copies that they point to.
template <typename Scalar>
struct Prepared {
  Prepared(const Inputs& inputs, const Tensor& saved) : input(inputs.input), target(inputs.target) {
    using Real = compute_t<Scalar>;
    const int64_t class_dim = class_dim_of(input);
    args.classes = input.size(class_dim);
    args.rows = input.numel() / args.classes;
    input = with_row_layout(inputs.input, class_dim, &args.layout);
    args.logits = static_cast<const Scalar*>(input.const_data_ptr());
    if (is_soft(target)) {
      target = with_row_layout(inputs.target, class_dim, &args.target_layout);
      args.target_probs = {target.const_data_ptr(), target.scalar_type() != input.scalar_type()};
    } else {
      args.labels = labels_of(target);
    }
    args.ignore_index = inputs.ignore_index;
    args.label_smoothing = static_cast<Real>(inputs.label_smoothing);
    args.class_weight = pointer_or_null<Real>(inputs.weight);
    args.detach_modulation = inputs.detach_modulation;
    args.epsilon = static_cast<Real>(inputs.epsilon);
    args.gamma = pointer_or_null<Real>(inputs.gamma);
    args.gamma_value = static_cast<Real>(inputs.gamma_value);
    args.edges = pointer_or_null<Real>(inputs.edges);
    if (inputs.edges) {
      args.n_bins = inputs.gamma->numel();
    } else if (inputs.gamma) {
      args.gamma_stride = inputs.gamma->numel() == 1 ? 0 : 1;
    }
    args.saved = static_cast<Real*>(const_cast<void*>(saved.const_data_ptr()));
  }

  Tensor input, target;
  RowLossArgs<Scalar> args{};
};

// Of the rows, or nothing.
template <typename Scalar>
using Statistics = std::optional<RowStatisticsResult<compute_t<Scalar>>>;

// Returns the first invalid row, or -1.
template <typename Loss, typename Scalar>
int64_t run_forward(const RowLossForward<Scalar>& args, const Statistics<Scalar>& statistics, bool mean,
                    compute_t<Scalar>* reduced) {
  using Real = compute_t<Scalar>;
  const int64_t chunk_rows = cpu::row_loss_chunk_rows(args.rows, args.classes);
  std::vector<RowLossSums> chunks((args.rows + chunk_rows - 1) / chunk_rows);
  for_each_chunk(args.rows, chunk_rows, [&](int64_t i, int64_t begin, int64_t end) {
    chunks[i] = statistics ? bindings::row_loss_and_statistics<Loss>(args, *statistics, begin, end)
                           : cpu::row_loss_forward<Loss>(args, begin, end);
  });
  double total = 0, divisor = 0;
  for (const auto& chunk : chunks) {
    if (chunk.invalid_row >= 0) return chunk.invalid_row;
    total += chunk.loss;
    divisor += chunk.weight;
  }
  if (mean) total /= divisor;
  if (reduced) *reduced = static_cast<Real>(total);
  args.saved[kSavedNumbers<Loss> * args.rows] = static_cast<Real>(divisor);
  return -1;
}

#ifdef FOCALKERN_WITH_CUDA
template <typename Loss, typename Scalar>
void launch_forward(const RowLossForward<Scalar>& args, const Statistics<Scalar>& statistics, bool mean,
                    compute_t<Scalar>* reduced, const Tensor& input) {
  const CudaScope device(input);
  const int64_t bytes = cuda::focal_loss_workspace(args.rows, args.classes, reduced != nullptr);
  Tensor workspace;
  if (bytes > 0) workspace = torch::stable::new_empty(input, {bytes}, ScalarType::Byte);
  void* const scratch = bytes > 0 ? workspace.mutable_data_ptr() : nullptr;
  auto* const divisor = args.saved + kSavedNumbers<Loss> * args.rows;
  CudaScope::check("focal_loss",
                   statistics ? cuda::row_loss_with_statistics<Loss>(args, *statistics, mean, reduced, divisor, scratch,
                                                                     device.stream())
                              : cuda::row_loss_forward<Loss>(args, mean, reduced, divisor, scratch, device.stream()));
}
#endif

// With the six tensors of bindings/row_sums_run.h, or without tensors.
template <typename... OfRows>
int64_t forward(const Tensor& input, const Tensor& target, const OptionalTensor& gamma, const OptionalTensor& edges,
                const OptionalTensor& weight, const Tensor& saved, const Tensor& loss, double gamma_value,
                int64_t ignore_index, double label_smoothing, bool detach_modulation, int64_t kind, double epsilon,
                bool reduce, bool mean, const OfRows&... of_rows) {
  const Inputs inputs{
      input, target, gamma, edges, weight, gamma_value, ignore_index, label_smoothing, detach_modulation, epsilon};
  int64_t invalid = -1;
  dispatch_scalar(input.scalar_type(), [&](auto scalar) {
    using Scalar = decltype(scalar);
    using Real = compute_t<Scalar>;
    const Prepared<Scalar> prepared(inputs, saved);
    Real* const result = static_cast<Real*>(loss.mutable_data_ptr());
    const RowLossForward<Scalar> args{prepared.args, reduce ? nullptr : result};
    Statistics<Scalar> statistics;
    if constexpr (sizeof...(of_rows) > 0) statistics = bindings::row_statistics_result<Real>(of_rows...);
    dispatch_loss(kind, [&](auto formula) {
      using Loss = decltype(formula);
#ifdef FOCALKERN_WITH_CUDA
      if (input.is_cuda()) return launch_forward<Loss>(args, statistics, mean, reduce ? result : nullptr, input);
#endif
      invalid = run_forward<Loss>(args, statistics, mean, reduce ? result : nullptr);
    });
  });
  return invalid;
}

// The gradients have the shapes of their inputs; dL/dgamma has the shape of the unreduced loss. The gradient of the
// target has the strides of the target. `mean` takes the divisor of the forward pass, the last number of `saved`.
void backward(const Tensor& grad, const Tensor& input, const Tensor& target, const OptionalTensor& gamma,
              const OptionalTensor& edges, const OptionalTensor& weight, const Tensor& saved,
              const OptionalTensor& grad_input, const OptionalTensor& grad_target, const OptionalTensor& grad_gamma,
              double gamma_value, int64_t ignore_index, double label_smoothing, bool detach_modulation, int64_t kind,
              double epsilon, bool mean) {
  const Inputs inputs{
      input, target, gamma, edges, weight, gamma_value, ignore_index, label_smoothing, detach_modulation, epsilon};
  dispatch_scalar(input.scalar_type(), [&](auto scalar) {
    using Scalar = decltype(scalar);
    using Real = compute_t<Scalar>;
    const Prepared<Scalar> prepared(inputs, saved);
    RowLossBackward<Scalar> args{};
    static_cast<RowLossArgs<Scalar>&>(args) = prepared.args;
    OptionalTensor buffer = grad_input;  // where the kernel writes: a gradient may have strides that are no row layout
    if (grad_input) {
      auto layout = bindings::row_layout(*grad_input, class_dim_of(input), input.is_cpu());
      if (!layout) {
        buffer = torch::stable::empty_like(prepared.input);
        layout = bindings::row_layout(*buffer, class_dim_of(input), input.is_cpu());
      }
      args.grad_layout = *layout;
    }
    args.grad_logits = mutable_or_null<Scalar>(buffer);
    args.grad_target = mutable_or_null<Real>(grad_target);
    args.grad_gamma = mutable_or_null<Real>(grad_gamma);
    args.grad_loss = static_cast<const Real*>(grad.const_data_ptr());
    args.grad_stride = grad.dim() == 0 ? 0 : 1;
    if (mean) args.divisor = args.saved + (saved.numel() - 1);
    if (args.rows == 0) return;
    dispatch_loss(kind, [&](auto formula) {
      using Loss = decltype(formula);
#ifdef FOCALKERN_WITH_CUDA
      if (input.is_cuda()) {
        const CudaScope device(input);
        const int64_t numbers = kSavedNumbers<Loss> * args.rows;
        if (saved.numel() == numbers + args.rows + 1) args.lse_slope = args.saved + numbers;
        return CudaScope::check("focal_loss", cuda::row_loss_backward<Loss>(args, device.stream()));
      }
#endif
      for_each_chunk(args.rows, cpu::row_loss_chunk_rows(args.rows, args.classes),
                     [&](int64_t, int64_t begin, int64_t end) { cpu::row_loss_backward<Loss>(args, begin, end); });
    });
    if (grad_input && buffer->get() != grad_input->get()) {
      Tensor result = *grad_input;
      torch::stable::copy_(result, *buffer);
    }
  });
}

constexpr auto* forward_alone = &forward<>;
constexpr auto* forward_with_statistics = &forward<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor>;

#define FK_FORWARD_ARGUMENTS                                                                                           \
  "(Tensor input, Tensor target, Tensor? gamma, Tensor? edges, Tensor? weight, Tensor(a!) saved, Tensor(b!) loss, "    \
  "float gamma_value, int ignore_index, float label_smoothing, bool detach_modulation, int kind, float epsilon, bool " \
  "reduce, bool mean"

FK_KERNELS_FRAGMENT(m) {
  m.def("row_loss_forward_out" FK_FORWARD_ARGUMENTS ") -> int");
  m.def("row_loss_with_statistics_out" FK_FORWARD_ARGUMENTS
        ", Tensor(c!) log_p, Tensor(d!) entropy, Tensor(e!) lse, Tensor(f!) predicted, Tensor(g!) correct, Tensor(h!) "
        "counts) -> int");
  m.def(
      "row_loss_backward_out(Tensor grad, Tensor input, Tensor target, Tensor? gamma, Tensor? edges, Tensor? weight, "
      "Tensor saved, Tensor(a!)? grad_input, Tensor(b!)? grad_target, Tensor(c!)? grad_gamma, float gamma_value, int "
      "ignore_index, float label_smoothing, bool detach_modulation, int kind, float epsilon, bool mean) -> ()");
}

void implement(torch::stable::detail::StableLibrary& m) {
  m.impl("row_loss_forward_out", TORCH_BOX(forward_alone));
  m.impl("row_loss_with_statistics_out", TORCH_BOX(forward_with_statistics));
  m.impl("row_loss_backward_out", TORCH_BOX(&backward));
}

FK_KERNELS_IMPL_ALL(implement)

}  // namespace
}  // namespace focalkern::stable

// Name and number of saved values per row of every loss: "focal_loss:3 poly_focal_loss:3 ...".
extern "C" __attribute__((visibility("default"))) const char* focalkern_row_losses() {
  using namespace focalkern;
  static const std::string text = [] {
    std::string found;
#define FK_ROW_LOSS(number, Formula, name) found += name ":" + std::to_string(kSavedNumbers<Formula>) + " ";
#include "math/row_losses.def"
    return found;
  }();
  return text.c_str();
}
