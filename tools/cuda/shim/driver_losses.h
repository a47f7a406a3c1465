// The losses of rows and of one logit: forward and backward over one set of sizes and options.
#pragma once

#include <memory>
#include <type_traits>

#include "cuda/launch.h"
#include "driver_buffers.h"
#include "kernels/row_loss.h"
#include "kernels/sigmoid_loss.h"
#include "math/brier.h"
#include "math/dual_focal.h"
#include "math/focal.h"
#include "math/poly_focal.h"
#include "math/row_loss.h"

namespace {

// layout: 0 contiguous, 1 offset by one element, 2 gaps of 3, 3 class outermost [C, N], 4 [2, C, N/2]
// mode: 0 one gamma, 1 label smoothing, 2 probability targets, 3 a table of gammas and class weights, 4 a gamma per row
template <typename Loss, typename S>
void row_loss(int rows, int classes, int layout, int mode, bool none) {
  using R = compute_t<S>;
  constexpr bool kFocal = std::is_same_v<Loss, FocalFormula>;
  constexpr bool kGamma = kFocal || std::is_same_v<Loss, PolyFocalFormula>;  // whether gamma has a gradient
  size_t span = (size_t)rows * (classes + (layout == 2 ? 3 : 0));
  Buffer<S> z(span, layout == 1 ? sizeof(S) : 0), g(span, layout == 1 ? sizeof(S) : 0);
  fill(z.p, span);
  RowLayout l{rows > 0 ? rows : 1, 0, classes, 1};
  if (layout == 2) l.inner_stride = classes + 3;
  if (layout == 3) l = {rows, 0, 1, rows};
  if (layout == 4) l = {rows / 2, (int64_t)classes * (rows / 2), 1, rows / 2};
  Buffer<int32_t> labels(rows);
  for (int i = 0; i < rows; ++i) labels[i] = i % 7 == 3 ? -100 : i % 11 == 5 ? classes : (int)(rng() % classes);
  if (rng() % 2)
    for (int i = 0; i < rows; ++i)
      if (labels[i] == classes) labels[i] = 0;
  Buffer<R> soft((size_t)rows * classes), w(classes), gam(rows), edges(4), tab(3), saved(kSavedNumbers<Loss> * rows),
      loss(1), div(1), rl(rows), gl(rows), gt((size_t)rows * classes), gg(rows);
  for (size_t i = 0; i < soft.n; ++i) soft[i] = R(rng() % 100) / 100;
  for (int i = 0; i < classes; ++i) w[i] = R(0.5) + R(i % 3);
  for (int i = 0; i < rows; ++i) {
    gam[i] = R(i % 5) - 1;
    gl[i] = R(1) + i % 3;
  }
  R e[4] = {0, R(.1), R(.4), 1}, t[3] = {5, R(-1.5), 3};
  memcpy(edges.p, e, sizeof e);
  memcpy(tab.p, t, sizeof t);
  RowLossForward<S> a{};
  a.rows = rows;
  a.classes = classes;
  a.logits = z.p;
  a.layout = l;
  a.ignore_index = -100;
  a.saved = saved.p;
  a.target_layout = {rows > 0 ? rows : 1, 0, classes, 1};
  if (mode == 2) {
    a.target_probs = {soft.p, true};
    a.label_smoothing = R(.1);
  } else
    a.labels = {labels.p, Labels::Type::kInt32};
  if (mode == 1) a.label_smoothing = R(.1);
  if (mode == 3) {
    a.gamma = tab.p;
    a.edges = edges.p;
    a.n_bins = 3;
    a.class_weight = w.p;
  } else if (mode == 4) {
    a.gamma = gam.p;
    a.gamma_stride = 1;
  } else
    a.gamma_value = 2;
  a.epsilon = 1.5;
  a.row_loss = none ? rl.p : nullptr;
  int64_t bytes = cuda::focal_loss_workspace(rows, classes, !none);
  std::unique_ptr<Buffer<double>> ws;
  if (bytes) ws = std::make_unique<Buffer<double>>(bytes / 8);
  R* total = none ? nullptr : loss.p;
  double* scratch = ws ? ws->p : nullptr;
  if constexpr (kFocal) {
    if (cuda::focal_loss_forward(a, true, total, div.p, scratch, nullptr)) abort();
  } else {
    if (cuda::row_loss_forward<Loss>(a, true, total, div.p, scratch, nullptr)) abort();
  }
  RowLossBackward<S> b{};
  static_cast<RowLossArgs<S>&>(b) = a;
  b.grad_loss = none ? gl.p : loss.p;
  R one = 1;
  if (!none) b.grad_loss = &one;
  b.grad_stride = none;
  b.divisor = none ? nullptr : div.p;
  b.grad_logits = g.p;
  b.grad_layout = l;
  b.grad_target = mode == 2 ? gt.p : nullptr;
  b.grad_gamma = kGamma ? gg.p : nullptr;
  if constexpr (kFocal) {
    if (cuda::focal_loss_backward(b, nullptr)) abort();
  } else {
    if (cuda::row_loss_backward<Loss>(b, nullptr)) abort();
  }
  mix(saved.p, saved.n);
  if (none)
    mix(rl.p, rows);
  else
    mix(loss.p, 1);
  mix(div.p, 1);
  mix(g.p, g.n);
  if (kGamma) mix(gg.p, gg.n);
  if (mode == 2) mix(gt.p, gt.n);
}
// target: 0 dense in the type of the logits, 1 labels, 2 a row of another type with parameters for classes and rows;
// offset: elements from a 16-byte boundary
template <typename S>
void sigmoid(SigmoidLoss kind, int rows, int classes, int target, int offset, bool none) {
  using R = compute_t<S>;
  const size_t n = (size_t)rows * classes, skip = offset * sizeof(S);
  Buffer<S> x(n, skip), dense(n, skip), narrow(n), gx(n, skip);
  Buffer<R> of_class(classes), of_row(rows), wide(n), gl(n), gt(n), gg(n), gs(n), total(1), div(1);
  Buffer<double> soft(classes), ws(cuda::sigmoid_loss_workspace(n) / 8);
  Buffer<int64_t> labels(rows);
  fill(x.p, n);
  for (size_t i = 0; i < n; ++i) dense[i] = make<S>(rng() % 101 / 100.f), gl[i] = R(1) + i % 3;
  for (int j = 0; j < classes; ++j) of_class[j] = R(j % 4) / 2, soft[j] = j % 5 / 4.;
  for (int i = 0; i < rows; ++i) {
    of_row[i] = R(0.25) + i % 3;
    labels[i] = i % 7 == 3 ? -100 : (int)(rng() % (classes + 1));
  }
  const auto operand = [](const auto& buffer, ElementType type, int64_t row, int64_t column) {
    return Operand{buffer.p, type, column == 1 && row > 0, {row, column}, 0.0};
  };
  const ElementType real = sizeof(R) == 8 ? ElementType::kDouble : ElementType::kFloat;
  const ElementType own = sizeof(S) > 2                 ? real
                          : std::is_same_v<S, BFloat16> ? ElementType::kBFloat16
                                                        : ElementType::kHalf;
  SigmoidLossForward<S> a{};
  a.loss_kind = kind;
  a.space = {(int64_t)n, 2, {rows, classes}};
  a.input = operand(x, own, classes, 1);
  a.target = target == 0   ? operand(dense, own, classes, 1)
             : target == 1 ? operand(labels, ElementType::kInt64, 1, 0)
                           : operand(soft, ElementType::kDouble, 0, 1);
  a.target_is_labels = target == 1;
  a.class_dim = target == 1 ? 1 : -1;
  a.classes = classes;
  a.ignore_index = -100;
  a.gamma.value = 1.5;
  a.has_alpha = may_have_alpha(kind);
  a.second.value = 0.25;
  a.weight.value = 1;
  if (target == 2) {
    a.gamma = operand(of_class, real, 0, 1);
    a.weight = operand(of_row, real, 1, 0);
  }
  a.constant = kind == SigmoidLoss::kAsymmetric ? R(0.0625) : R(0);
  if (none) (offset ? (void)(a.loss = narrow.p) : (void)(a.loss_wide = wide.p));
  if (cuda::sigmoid_loss_forward(a, true, none ? nullptr : total.p, div.p, ws.p, nullptr)) abort();
  SigmoidLossBackward<S> b{};
  static_cast<SigmoidLossArgs<S>&>(b) = a;
  if (none)
    b.grad_loss = operand(gl, real, classes, 1);
  else
    b.grad_loss.value = 2;
  b.divisor = none ? nullptr : div.p;
  b.grad_input = gx.p;
  b.grad_target = gt.p;
  b.grad_gamma = gg.p;
  b.grad_second = gs.p;
  if (cuda::sigmoid_loss_backward(b, nullptr)) abort();
  if (!none)
    mix(total.p, 1);
  else if (offset)
    mix(narrow.p, n);
  else
    mix(wide.p, n);
  mix(div.p, 1);
  mix(gx.p, n);
  mix(gt.p, n);
  mix(gg.p, n);
  mix(gs.p, n);
}

}  // namespace
