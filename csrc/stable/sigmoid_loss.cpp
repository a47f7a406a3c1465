// The losses of one logit: from checked tensors to the kernels of csrc/cpu and csrc/cuda.
//
//   sigmoid_loss_forward_out   fills loss and divisor; returns whether all labels are in range (always true on CUDA)
//   sigmoid_loss_backward_out  fills the gradient tensors passed in
//
// All tensors but `divisor`, a reduced loss and a gradient of one number have the shape of the input, by expansion
// where they broadcast; parameters are in the type of the computation, or none for their numbers. `like` has the layout
// of the results. `class_dim` is the dimension of the classes where the target is labels, else -1.

#include <type_traits>
#include <vector>

#include "bindings/strided_iteration.h"
#include "kernels/sigmoid_loss.h"
#include "stable/common.h"
#ifdef FOCALKERN_WITH_CUDA
#include "stable/cuda_scope.h"
#endif

namespace focalkern::stable {
namespace {

ElementType element_type(ScalarType dtype) {
  switch (dtype) {
    case ScalarType::Double:
      return ElementType::kDouble;
    case ScalarType::Half:
      return ElementType::kHalf;
    case ScalarType::BFloat16:
      return ElementType::kBFloat16;
    case ScalarType::Bool:
    case ScalarType::Byte:
      return ElementType::kUInt8;
    case ScalarType::Int:
      return ElementType::kInt32;
    case ScalarType::Long:
      return ElementType::kInt64;
    default:
      return ElementType::kFloat;
  }
}

struct Inputs {
  const Tensor& like;
  const Tensor& input;
  const Tensor& target;
  const OptionalTensor& gamma;
  const OptionalTensor& second;
  const OptionalTensor& weight;
  const OptionalTensor& scores;
  double gamma_value;
  double second_value;
  double weight_value;
  int64_t classes;
  int64_t class_dim;
  bool has_alpha;
  int64_t kind;
  double constant;
  int64_t ignore_index;
};

// Sets everything but the results.
template <typename Scalar>
void prepare(SigmoidLossArgs<Scalar>& args, const Inputs& inputs, Operand* grad_loss, const OptionalTensor& grad,
             double grad_value) {
  bindings::StridedIteration<Tensor> walk(inputs.like, inputs.class_dim);
  const auto operand = [&](const OptionalTensor& tensor, double value) {
    Operand made{};
    made.value = value;
    return tensor ? walk.add(*tensor, element_type(tensor->scalar_type())) : made;
  };
  args.loss_kind = static_cast<SigmoidLoss>(inputs.kind);
  args.constant = static_cast<compute_t<Scalar>>(inputs.constant);
  args.ignore_index = inputs.ignore_index;
  args.target_is_labels = inputs.class_dim >= 0;
  args.classes = inputs.classes;
  args.has_alpha = inputs.has_alpha;
  args.input = operand(inputs.input, 0);
  args.target = operand(inputs.target, 0);
  args.gamma = operand(inputs.gamma, inputs.gamma_value);
  args.second = operand(inputs.second, inputs.second_value);
  args.weight = operand(inputs.weight, inputs.weight_value);
  args.scores = operand(inputs.scores, 1);
  std::vector<Operand*> operands{&args.input, &args.target, &args.gamma, &args.second, &args.weight, &args.scores};
  if (grad_loss) {
    *grad_loss = operand(grad, grad_value);
    operands.push_back(grad_loss);
  }
  STD_TORCH_CHECK(walk.finish(&args.space, operands, &args.class_dim), "focalkern: tensors with more than ", kMaxDims,
                  " dimensions of different strides must be made contiguous first");
}

// Whether all labels are in range.
template <typename Scalar>
bool run_forward(const SigmoidLossForward<Scalar>& args, const Tensor& loss, const Tensor& divisor, bool reduce,
                 bool mean) {
  using Real = compute_t<Scalar>;
  const int64_t chunk = cpu::kSigmoidLossChunk, size = args.space.size;
  std::vector<Real> table;
  if constexpr (std::is_same_v<Scalar, BFloat16>) {
    if (size >= cpu::kBFloat16TablePays * torch::stable::get_num_threads()) {
      table = cpu::sigmoid_loss_bfloat16_table(args);
    }
  }
  std::vector<SigmoidLossSums> chunks((size + chunk - 1) / chunk);
  for_each_chunk(size, chunk, [&](int64_t i, int64_t begin, int64_t end) {
    chunks[i] = cpu::sigmoid_loss_forward(args, begin, end, table.empty() ? nullptr : table.data());
  });
  double total = 0;
  int64_t count = 0;
  for (const auto& sums : chunks) {
    if (!sums.is_valid) return false;
    total += sums.loss;
    count += sums.count;
  }
  if (mean) total /= static_cast<double>(count);
  if (reduce) {
    dispatch_scalar(loss.scalar_type(), [&](auto stored) {
      using Stored = decltype(stored);
      *static_cast<Stored*>(loss.mutable_data_ptr()) =
          Store<Stored>::from_compute(static_cast<compute_t<Stored>>(total));
    });
  }
  *static_cast<Real*>(divisor.mutable_data_ptr()) = mean ? static_cast<Real>(count) : Real(1);
  return true;
}

#ifdef FOCALKERN_WITH_CUDA
template <typename Scalar>
void launch_forward(const SigmoidLossForward<Scalar>& args, const Tensor& input, const Tensor& loss,
                    const Tensor& divisor, bool reduce, bool mean) {
  using Real = compute_t<Scalar>;
  const CudaScope device(input);
  Tensor workspace;
  if (reduce) {
    workspace = torch::stable::new_empty(input, {cuda::sigmoid_loss_workspace(args.space.size)}, ScalarType::Byte);
  }
  CudaScope::check("sigmoid_loss", cuda::sigmoid_loss_forward(
                                       args, mean, reduce ? static_cast<Real*>(loss.mutable_data_ptr()) : nullptr,
                                       static_cast<Real*>(divisor.mutable_data_ptr()),
                                       reduce ? workspace.mutable_data_ptr() : nullptr, device.stream()));
}
#endif

bool forward(const Tensor& like, const Tensor& input, const Tensor& target, const OptionalTensor& gamma,
             const OptionalTensor& second, const OptionalTensor& weight, const OptionalTensor& scores,
             const Tensor& loss, const Tensor& divisor, double gamma_value, double second_value, double weight_value,
             int64_t classes, int64_t class_dim, bool has_alpha, int64_t kind, double constant, int64_t ignore_index,
             bool reduce, bool mean) {
  const Inputs inputs{like,         input,        target,  gamma,     second,    weight, scores,   gamma_value,
                      second_value, weight_value, classes, class_dim, has_alpha, kind,   constant, ignore_index};
  bool valid = true;
  dispatch_scalar(input.scalar_type(), [&](auto scalar) {
    using Scalar = decltype(scalar);
    using Real = compute_t<Scalar>;
    SigmoidLossForward<Scalar> args{};
    prepare(args, inputs, nullptr, std::nullopt, 0);
    if (!reduce && loss.element_size() == sizeof(Real)) {
      args.loss_wide = static_cast<Real*>(loss.mutable_data_ptr());
    } else if (!reduce) {
      args.loss = static_cast<Scalar*>(loss.mutable_data_ptr());
    }
#ifdef FOCALKERN_WITH_CUDA
    if (input.is_cuda()) return launch_forward(args, input, loss, divisor, reduce, mean);
#endif
    valid = run_forward(args, loss, divisor, reduce, mean);
  });
  return valid;
}

void backward(const Tensor& like, const Tensor& input, const Tensor& target, const OptionalTensor& gamma,
              const OptionalTensor& second, const OptionalTensor& weight, const OptionalTensor& scores,
              const OptionalTensor& grad, const OptionalTensor& divisor, const OptionalTensor& grad_input,
              const OptionalTensor& grad_target, const OptionalTensor& grad_gamma, const OptionalTensor& grad_second,
              double gamma_value, double second_value, double weight_value, double grad_value, int64_t classes,
              int64_t class_dim, bool has_alpha, int64_t kind, double constant, int64_t ignore_index) {
  const Inputs inputs{like,         input,        target,  gamma,     second,    weight, scores,   gamma_value,
                      second_value, weight_value, classes, class_dim, has_alpha, kind,   constant, ignore_index};
  dispatch_scalar(input.scalar_type(), [&](auto scalar) {
    using Scalar = decltype(scalar);
    using Real = compute_t<Scalar>;
    SigmoidLossBackward<Scalar> args{};
    prepare(args, inputs, &args.grad_loss, grad, grad_value);
    args.divisor = pointer_or_null<Real>(divisor);
    args.grad_input = mutable_or_null<Scalar>(grad_input);
    args.grad_target = mutable_or_null<Real>(grad_target);
    args.grad_gamma = mutable_or_null<Real>(grad_gamma);
    args.grad_second = mutable_or_null<Real>(grad_second);
    const int64_t size = args.space.size;
    if (size == 0) return;
#ifdef FOCALKERN_WITH_CUDA
    if (input.is_cuda()) {
      const CudaScope device(input);
      return CudaScope::check("sigmoid_loss", cuda::sigmoid_loss_backward(args, device.stream()));
    }
#endif
    std::vector<Scalar> table;
    if constexpr (std::is_same_v<Scalar, BFloat16>) {
      if (size >= cpu::kBFloat16TablePays * torch::stable::get_num_threads()) {
        table = cpu::sigmoid_grad_bfloat16_table(args);
      }
    }
    for_each_chunk(size, cpu::kSigmoidLossChunk, [&](int64_t, int64_t begin, int64_t end) {
      cpu::sigmoid_loss_backward(args, begin, end, table.empty() ? nullptr : table.data());
    });
  });
}

FK_KERNELS_FRAGMENT(m) {
  m.def(
      "sigmoid_loss_forward_out(Tensor like, Tensor input, Tensor target, Tensor? gamma, Tensor? second, Tensor? "
      "weight, Tensor? scores, Tensor(a!) loss, Tensor(b!) divisor, float gamma_value, float second_value, float "
      "weight_value, int classes, int class_dim, bool has_alpha, int kind, float constant, int ignore_index, bool "
      "reduce, bool mean) -> bool");
  m.def(
      "sigmoid_loss_backward_out(Tensor like, Tensor input, Tensor target, Tensor? gamma, Tensor? second, Tensor? "
      "weight, Tensor? scores, Tensor? grad, Tensor? divisor, Tensor(a!)? grad_input, Tensor(b!)? grad_target, "
      "Tensor(c!)? grad_gamma, Tensor(d!)? grad_second, float gamma_value, float second_value, float weight_value, "
      "float grad_value, int classes, int class_dim, bool has_alpha, int kind, float constant, int ignore_index) -> "
      "()");
}

void implement(torch::stable::detail::StableLibrary& m) {
  m.impl("sigmoid_loss_forward_out", TORCH_BOX(&forward));
  m.impl("sigmoid_loss_backward_out", TORCH_BOX(&backward));
}

FK_KERNELS_IMPL_ALL(implement)

}  // namespace
}  // namespace focalkern::stable
