// Counts the instructions of the losses on this processor by stepping through one chunk of rows: see
// instruction_counts.py.
//
//   instruction_counts rows classes float32|bfloat16 number|table           prints: elements forward backward
//   instruction_counts smoothed|probabilities classes float32|bfloat16 gamma
//   instruction_counts focal|asymmetric classes float32|bfloat16 dense|labels

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <random>
#include <type_traits>
#include <vector>

#include "count_steps.h"
#include "cpu/row_loss/focal_loss.cpp"
#include "kernels/sigmoid_loss.h"

namespace {

enum class Target { kLabels, kSmoothed, kProbabilities };

template <typename Scalar>
int count_rows(int64_t classes, bool with_table, Target target = Target::kLabels, compute_t<Scalar> gamma = 2) {
  using Real = compute_t<Scalar>;
  const int64_t rows = cpu::row_loss_chunk_rows(int64_t(1) << 20, classes);
  std::mt19937 random(0);
  const std::vector<Scalar> logits = normal_logits<Scalar>(rows * classes, random);
  std::vector<Scalar> grad(rows * classes);
  std::vector<int64_t> labels(rows);
  for (auto& label : labels) label = random() % classes;
  std::vector<Real> saved(3 * rows), edges(16), gammas(15);
  for (int k = 0; k < 16; ++k) edges[k] = Real(k) / 15;
  for (int k = 0; k < 15; ++k) gammas[k] = Real(3 - 0.3 * k);

  RowLossForward<Scalar> forward{};
  forward.rows = rows;
  forward.classes = classes;
  forward.logits = logits.data();
  forward.layout = {rows, 0, classes, 1};
  std::vector<Real> shares;
  if (target == Target::kProbabilities) {
    shares.assign(rows * classes, Real(1) / static_cast<Real>(classes));
    forward.target_probs = {shares.data(), true};
    forward.target_layout = forward.layout;
  } else {
    forward.labels = {labels.data(), Labels::Type::kInt64};
  }
  if (target == Target::kSmoothed) forward.label_smoothing = Real(0.1);
  forward.ignore_index = -100;
  forward.gamma_value = gamma;
  forward.saved = saved.data();
  if (with_table) {
    forward.edges = edges.data();
    forward.gamma = gammas.data();
    forward.n_bins = 15;
  }
  const Real upstream = 1, divisor = static_cast<Real>(rows);
  RowLossBackward<Scalar> backward{};
  static_cast<RowLossArgs<Scalar>&>(backward) = forward;
  backward.grad_loss = &upstream;
  backward.divisor = &divisor;
  backward.grad_logits = grad.data();
  backward.grad_layout = forward.layout;
  return count(
      rows * classes, [&] { cpu::row_loss_forward<FocalFormula>(forward, 0, rows); },
      [&] { cpu::row_loss_backward<FocalFormula>(backward, 0, rows); });
}

// The losses of a detector's head, with the mean as reduction. Half of the labels are background.
template <typename Scalar>
int count_elements(SigmoidLoss loss, int64_t classes, bool with_labels) {
  using Real = compute_t<Scalar>;
  const int64_t rows = cpu::kSigmoidLossChunk / classes, size = rows * classes;
  std::mt19937 random(0);
  const std::vector<Scalar> logits = normal_logits<Scalar>(size, random);
  std::vector<Scalar> dense(size, Store<Scalar>::from_compute(0)), grad(size);
  std::vector<int64_t> labels(rows);
  for (int64_t row = 0; row < rows; ++row) {
    labels[row] = std::min<int64_t>(random() % (2 * classes), classes);
    if (labels[row] < classes) dense[row * classes + labels[row]] = Store<Scalar>::from_compute(1);
  }
  constexpr ElementType kType = std::is_same_v<Scalar, float> ? ElementType::kFloat : ElementType::kBFloat16;

  SigmoidLossForward<Scalar> forward{};
  forward.loss_kind = loss;
  forward.classes = classes;
  forward.ignore_index = -100;
  if (with_labels) {
    forward.space = {size, 2, {rows, classes}};
    forward.input = {logits.data(), kType, true, {classes, 1}, 0};
    forward.target = {labels.data(), ElementType::kInt64, false, {1, 0}, 0};
    forward.target_is_labels = true;
    forward.class_dim = 1;
  } else {
    forward.space = {size, 1, {size}};
    forward.input = {logits.data(), kType, true, {1}, 0};
    forward.target = {dense.data(), kType, true, {1}, 0};
  }
  const bool asymmetric = loss == SigmoidLoss::kAsymmetric;
  forward.gamma.value = asymmetric ? 4 : 2;
  forward.has_alpha = !asymmetric;
  forward.second.value = asymmetric ? 1 : 0.25;
  forward.weight.value = 1;
  forward.constant = asymmetric ? Real(0.05) : Real(0);
  SigmoidLossBackward<Scalar> backward{};
  static_cast<SigmoidLossArgs<Scalar>&>(backward) = forward;
  const Real divisor = static_cast<Real>(size);
  backward.grad_loss.value = 1;
  backward.divisor = &divisor;
  backward.grad_input = grad.data();
  std::vector<Real> losses;
  std::vector<Scalar> slopes;
  if constexpr (std::is_same_v<Scalar, BFloat16>) {
    losses = cpu::sigmoid_loss_bfloat16_table(forward);
    slopes = cpu::sigmoid_grad_bfloat16_table(backward);
  }
  return count(
      size, [&] { cpu::sigmoid_loss_forward(forward, 0, size, losses.empty() ? nullptr : losses.data()); },
      [&] { cpu::sigmoid_loss_backward(backward, 0, size, slopes.empty() ? nullptr : slopes.data()); });
}

template <typename Scalar>
int run(const char* op, int64_t classes, const char* kind) {
  if (std::strcmp(op, "rows") == 0) return count_rows<Scalar>(classes, std::strcmp(kind, "table") == 0);
  const bool smoothed = std::strcmp(op, "smoothed") == 0;
  if (smoothed || std::strcmp(op, "probabilities") == 0) {
    const auto gamma = static_cast<compute_t<Scalar>>(std::atof(kind));
    return count_rows<Scalar>(classes, false, smoothed ? Target::kSmoothed : Target::kProbabilities, gamma);
  }
  const bool focal = std::strcmp(op, "focal") == 0;
  return count_elements<Scalar>(focal ? SigmoidLoss::kFocal : SigmoidLoss::kAsymmetric, classes,
                                std::strcmp(kind, "labels") == 0);
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 5) return 2;
  const int64_t classes = std::atoll(argv[2]);
  return std::strcmp(argv[3], "float32") == 0 ? run<float>(argv[1], classes, argv[4])
                                              : run<BFloat16>(argv[1], classes, argv[4]);
}
