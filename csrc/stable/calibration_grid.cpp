// The calibration grid: from checked tensors to the kernels of csrc/cpu and csrc/cuda.
//
//   calibration_grid_prepare    fills top and correct of the rows that count; returns the first problem
//   calibration_grid_plan       the plan of a run as bytes, the temperatures per block, and a block's scratch memory
//   calibration_grid_block_out  fills the tables of the temperatures begin to end
//   calibration_grid_add_to     adds the samples to running sums
//
// Classes are adjacent; all other tensors are contiguous. gammas lie on the CPU, temperatures with the input.

#include <cstring>
#include <tuple>
#include <type_traits>

#include "bindings/calibration_grid_run.h"
#include "stable/interface.h"

namespace focalkern::stable {
namespace {

using Samples = bindings::GridSamples<Interface>;
using Run = bindings::GridRun<Interface>;

int64_t prepare(const Tensor& input, const Tensor& target, const OptionalTensor& kept, const Tensor& top,
                const Tensor& correct, bool is_probs) {
  return Samples{input, target, kept, top, correct, is_probs}.prepare();
}

// A plan as bytes: its gammas, then its other numbers.
struct Numbers {
  int moments, reciprocals, exponentials;
  bool tail;
};
static_assert(std::is_trivially_copyable_v<GammaPlan>);

Tensor to_bytes(const CalibrationGridPlan& plan, const Tensor& on_host) {
  const size_t of_gammas = plan.gammas.size() * sizeof(GammaPlan);
  const Numbers numbers{plan.moments, plan.reciprocals, plan.exponentials, plan.tail};
  const Tensor bytes = Interface::empty_bytes(on_host, static_cast<int64_t>(of_gammas + sizeof(Numbers)));
  auto* to = static_cast<uint8_t*>(bytes.mutable_data_ptr());
  std::memcpy(to, plan.gammas.data(), of_gammas);
  std::memcpy(to + of_gammas, &numbers, sizeof(Numbers));
  return bytes;
}

CalibrationGridPlan from_bytes(const Tensor& bytes) {
  const size_t of_gammas = bytes.numel() - sizeof(Numbers);
  const auto* from = static_cast<const uint8_t*>(bytes.const_data_ptr());
  CalibrationGridPlan plan;
  plan.gammas.resize(of_gammas / sizeof(GammaPlan));
  std::memcpy(plan.gammas.data(), from, of_gammas);
  Numbers numbers;
  std::memcpy(&numbers, from + of_gammas, sizeof(Numbers));
  plan.moments = numbers.moments;
  plan.reciprocals = numbers.reciprocals;
  plan.exponentials = numbers.exponentials;
  plan.tail = numbers.tail;
  return plan;
}

std::tuple<Tensor, int64_t, int64_t> plan(const Tensor& input, const Tensor& target, const OptionalTensor& kept,
                                          const Tensor& top, const Tensor& correct, const Tensor& gammas,
                                          const Tensor& temperatures, int64_t n_bins, int64_t criteria,
                                          int64_t estimator, bool is_probs) {
  Run run({input, target, kept, top, correct, is_probs}, gammas, temperatures, n_bins, criteria, estimator);
  return {to_bytes(run.plan(), gammas), run.per_block(), run.scratch_bytes()};
}

void block(const Tensor& input, const Tensor& target, const OptionalTensor& kept, const Tensor& top,
           const Tensor& correct, const Tensor& gammas, const Tensor& temperatures, const Tensor& plan,
           const Tensor& tables, const Tensor& scratch, int64_t n_bins, int64_t criteria, int64_t estimator,
           bool is_probs, int64_t begin, int64_t end) {
  Run run({input, target, kept, top, correct, is_probs}, gammas, temperatures, n_bins, criteria, estimator);
  run.reuse(from_bytes(plan), scratch);
  run.run_block(begin, end, criteria, /*keep_confidence=*/false, static_cast<double*>(tables.mutable_data_ptr()));
}

void add_to(const Tensor& input, const Tensor& target, const OptionalTensor& kept, const Tensor& top,
            const Tensor& correct, const Tensor& gammas, const Tensor& temperatures, const Tensor& rows,
            const OptionalTensor& count, const OptionalTensor& confidence, const OptionalTensor& n_correct,
            const OptionalTensor& nll, const OptionalTensor& brier, int64_t criteria, bool is_probs, bool sketch) {
  Run run({input, target, kept, top, correct, is_probs}, gammas, temperatures, /*n_bins=*/1, criteria,
          /*estimator=*/0);
  run.add_to(count, confidence, n_correct, nll, brier, sketch);
  *static_cast<int64_t*>(rows.mutable_data_ptr()) += run.samples().rows();
}

FK_KERNELS_FRAGMENT(m) {
  m.def(
      "calibration_grid_prepare(Tensor input, Tensor target, Tensor? kept, Tensor(a!) top, Tensor(b!) correct, bool "
      "is_probs) -> int");
  m.def(
      "calibration_grid_plan(Tensor input, Tensor target, Tensor? kept, Tensor top, Tensor correct, Tensor gammas, "
      "Tensor temperatures, int n_bins, int criteria, int estimator, bool is_probs) -> (Tensor, int, int)");
  m.def(
      "calibration_grid_block_out(Tensor input, Tensor target, Tensor? kept, Tensor top, Tensor correct, Tensor "
      "gammas, Tensor temperatures, Tensor plan, Tensor(a!) tables, Tensor(b!) scratch, int n_bins, int criteria, int "
      "estimator, bool is_probs, int begin, int end) -> ()");
  m.def(
      "calibration_grid_add_to(Tensor input, Tensor target, Tensor? kept, Tensor top, Tensor correct, Tensor gammas, "
      "Tensor temperatures, Tensor(a!) rows, Tensor(b!)? count, Tensor(c!)? confidence, Tensor(d!)? n_correct, "
      "Tensor(e!)? nll, Tensor(f!)? brier, int criteria, bool is_probs, bool sketch) -> ()");
}

void implement(torch::stable::detail::StableLibrary& m) {
  m.impl("calibration_grid_prepare", TORCH_BOX(&prepare));
  m.impl("calibration_grid_plan", TORCH_BOX(&plan));
  m.impl("calibration_grid_block_out", TORCH_BOX(&block));
  m.impl("calibration_grid_add_to", TORCH_BOX(&add_to));
}

FK_KERNELS_IMPL_ALL(implement)

}  // namespace
}  // namespace focalkern::stable
