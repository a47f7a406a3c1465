// Elements of broadcast tensors in the memory order of the results, for torch's interface and its stable one.
#pragma once

#include <algorithm>
#include <vector>

#include "kernels/sigmoid_loss.h"

namespace focalkern::bindings {

// Brings tensors into the form that the kernels iterate over, in the memory order of a result with the shape of `like`.
// Keeps the copies that this needs alive.
template <typename Tensor>
class StridedIteration {
 public:
  // `like`: the gradient or the loss, dense. `class_dim` is not merged with its neighbours; -1 for none.
  StridedIteration(const Tensor& like, int64_t class_dim) : like_(like) {
    if (like.is_contiguous() && class_dim < 0) {
      flat_ = true;
      return;
    }
    for (int64_t d = 0; d < like.dim(); ++d) {
      if (like.size(d) != 1 || d == class_dim) order_.push_back(d);
    }
    std::stable_sort(order_.begin(), order_.end(),
                     [&](int64_t a, int64_t b) { return like.stride(a) > like.stride(b); });
    if (class_dim >= 0) class_dim_ = class_dim;
  }

  // A tensor with another layout than the results keeps all dims separate; `finish` then merges what it can. `expanded`
  // has the shape of the results.
  Operand add(const Tensor& expanded, ElementType type) {
    Operand operand{};
    operand.data = expanded.const_data_ptr();
    operand.type = type;
    operand.dense = expanded.strides().equals(like_.strides()) || (flat_ && expanded.is_contiguous());
    if (!operand.dense && flat_) {
      flat_ = false;
      for (int64_t d = 0; d < like_.dim(); ++d) {
        if (like_.size(d) != 1) order_.push_back(d);
      }
    }
    kept_.push_back(expanded);
    return operand;
  }

  // Sets the space, and the strides of the operands in the order in which they were added. Returns false if they need
  // more than kMaxDims.
  bool finish(ElementSpace* space, const std::vector<Operand*>& operands, int* class_dim) {
    space->size = like_.numel();
    space->dims = 1;
    space->sizes[0] = space->size;
    *class_dim = -1;
    for (Operand* operand : operands) operand->strides[0] = operand->data && operand->dense ? 1 : 0;
    if (flat_ || order_.empty() || space->size == 0) {
      if (class_dim_ >= 0) *class_dim = 0;
      return true;
    }
    int dims = 0;
    int64_t outer_of[64];
    for (size_t i = 0; i < order_.size(); ++i) {
      const int64_t d = order_[i];
      if (dims > 0 && merges(outer_of[dims - 1], d)) {
        space->sizes[dims - 1] *= like_.size(d);
      } else {
        if (dims == kMaxDims) return false;
        space->sizes[dims++] = like_.size(d);
      }
      outer_of[dims - 1] = d;
      if (d == class_dim_) *class_dim = dims - 1;
    }
    space->dims = dims;
    size_t next = 0;
    for (Operand* operand : operands) {
      if (!operand->data) continue;
      const Tensor& tensor = kept_[next++];
      for (int i = 0; i < dims; ++i)
        operand->strides[i] = tensor.size(outer_of[i]) == 1 ? 0 : tensor.stride(outer_of[i]);
    }
    return true;
  }

 private:
  // Whether dim `inner` continues dim `outer` in every tensor.
  bool merges(int64_t outer, int64_t inner) const {
    if (outer == class_dim_ || inner == class_dim_) return false;
    if (like_.stride(outer) != like_.size(inner) * like_.stride(inner)) return false;
    for (const Tensor& tensor : kept_) {
      if (tensor.stride(outer) != tensor.size(inner) * tensor.stride(inner)) return false;
    }
    return true;
  }

  const Tensor& like_;
  bool flat_ = false;  // true while all tensors are contiguous; they then have one dim
  int64_t class_dim_ = -1;
  std::vector<int64_t> order_;  // dims of more than one element, outermost first
  std::vector<Tensor> kept_;
};

}  // namespace focalkern::bindings
