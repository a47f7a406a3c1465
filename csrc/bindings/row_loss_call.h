// The operator of the losses of rows, as MMCELoss calls it too.
#pragma once

#include <array>
#include <tuple>

#include "bindings/common.h"
#include "kernels/row_loss.h"

namespace focalkern::bindings {

enum class RowLoss : int64_t {
#define FK_ROW_LOSS(number, Formula, name) number,
#include "math/row_losses.def"
};

struct RowLossInputs {
  const Tensor& input;
  const Tensor& target;
  const Tensor& gamma;  // undefined for RowLossOptions::gamma
  const OptionalTensor& edges;
  const OptionalTensor& weight;
};

struct RowLossOptions {
  RowLoss kind;
  double epsilon;  // of the poly focal loss
  int64_t reduction;
  int64_t ignore_index;
  double label_smoothing;
  bool detach_modulation;
  bool float32_loss;  // a half-precision loss is returned as float32, as autocast requires
  double gamma = 0;   // where it is a number that needs no tensor
};

// focal_loss_forward and focal_loss_backward, by way of the dispatcher.
std::tuple<Tensor, Tensor> call_row_loss_forward(const RowLossInputs& inputs, const RowLossOptions& options);
std::tuple<Tensor, Tensor, Tensor> call_row_loss_backward(const Tensor& grad, const RowLossInputs& inputs,
                                                          const Tensor& saved, const RowLossOptions& options,
                                                          std::array<bool, 3> needed);

}  // namespace focalkern::bindings
