// Arguments of the calibration grid: checks, axes on the host, and the samples that count.
#pragma once

#include <ATen/ops/empty.h>
#include <c10/util/Exception.h>

#include <cmath>
#include <limits>

#include "bindings/calibration_grid_run.h"
#include "bindings/interface.h"

namespace focalkern::bindings {
namespace {

constexpr const char* kOp = "calibration_grid";

// ---- checks --------------------------------------------------------------------------------------------------------

// Checks of dtypes and shapes only, for real and for fake tensors.
void check_tensors(const Tensor& input, const Tensor& target, const Tensor& gammas, const Tensor& temperatures,
                   int64_t n_bins, int64_t criteria, int64_t estimator) {
  check_floating(kOp, "input", input);
  TORCH_CHECK_VALUE(input.dim() == 2, kOp, ": input must be [N, C], got ", input.sym_sizes());
  TORCH_CHECK_VALUE(input.sym_size(1) >= 2, kOp,
                    ": input must have at least two classes, got [N, C] = ", input.sym_sizes());
  const auto type = target.scalar_type();
  TORCH_CHECK_TYPE(type == at::kLong || type == at::kInt || type == at::kByte, kOp,
                   ": target must be int64, int32 or uint8, got ", dtype_name(type));
  TORCH_CHECK_VALUE(target.dim() == 1 && target.sym_size(0) == input.sym_size(0), kOp, ": target must be [N] = [",
                    input.sym_size(0), "], got ", target.sym_sizes());
  check_same_device(kOp, "target", target, input);
  const auto check_axis = [](const char* name, const Tensor& axis) {
    TORCH_CHECK_TYPE(axis.scalar_type() == at::kDouble, kOp, ": ", name, " must be float64, got ",
                     dtype_name(axis.scalar_type()));
    TORCH_CHECK_VALUE(axis.dim() == 1 && axis.sym_size(0) >= 1, kOp, ": ", name,
                      " must be one-dimensional and not empty, got shape ", axis.sym_sizes());
  };
  check_axis("gammas", gammas);
  check_axis("temperatures", temperatures);
  TORCH_CHECK_VALUE(n_bins >= 1, kOp, ": n_bins must be at least 1, got ", n_bins);
  TORCH_CHECK_VALUE(criteria > 0 && criteria < 16, kOp, ": criteria must name at least one table, got ", criteria);
  TORCH_CHECK_VALUE(estimator >= 0 && estimator <= 2, kOp, ": estimator must be 0, 1 or 2, got ", estimator);
}

// Returns gammas or temperatures as contiguous float64 on the CPU; raises if a value is out of range.
Tensor axis_on_host(const char* name, const Tensor& axis, double above) {
  const Tensor host = axis.to(at::kCPU).contiguous();
  const double* values = host.const_data_ptr<double>();
  for (int64_t i = 0; i < host.numel(); ++i) {
    TORCH_CHECK_VALUE(std::isfinite(values[i]) && values[i] > above, kOp, ": ", name,
                      " must be finite and greater than ", above, ", got ", values[i], " at index ", i);
  }
  return host;
}

[[noreturn]] void raise_row_problem(int64_t problem, const Tensor& input, const Tensor& target) {
  const int64_t row = problem / kRowProblems;
  switch (static_cast<RowProblem>(problem % kRowProblems)) {
    case RowProblem::kNotANumber:
      TORCH_CHECK_VALUE(false, kOp, ": input must not contain NaN, got one in row ", row);
    case RowProblem::kPositiveInfinity:
      TORCH_CHECK_VALUE(false, kOp, ": input must not contain +inf, got one in row ", row);
    case RowProblem::kNoFiniteLogit:
      TORCH_CHECK_VALUE(false, kOp, ": input must give some class a positive probability, got none in row ", row);
    case RowProblem::kNegativeProbability:
      TORCH_CHECK_VALUE(false, kOp, ": input must not contain negative probabilities, got one in row ", row);
    case RowProblem::kProbabilitySum:
      TORCH_CHECK_VALUE(false, kOp, ": input must have rows that sum to 1 within ", sum_tolerance(input.scalar_type()),
                        ", got ", input[row].to(at::kDouble).sum().item<double>(), " in row ", row);
    case RowProblem::kLabelOutOfRange:
      TORCH_CHECK_INDEX(false, kOp, ": target must be in [0, ", input.size(1), ") or ignore_index, got ",
                        target[row].item<int64_t>(), " at row ", row);
  }
  TORCH_INTERNAL_ASSERT(false, "unknown row problem ", problem);
}

// ---- samples -------------------------------------------------------------------------------------------------------

using Samples = GridSamples<Interface>;

Samples prepare(const Tensor& input, const Tensor& target, bool input_is_probs, int64_t ignore_index) {
  TORCH_CHECK_VALUE(input.size(0) > 0, kOp, ": input must have at least one row, got [N, C] = ", input.sizes());
  // the last step of a block must not overflow int32
  constexpr int64_t kLimit = std::numeric_limits<int32_t>::max() - 256;
  TORCH_CHECK_VALUE(input.size(0) < kLimit && input.size(1) < kLimit, kOp,
                    ": input must have fewer than 2^31 - 257 rows and classes, got [N, C] = ", input.sizes());
  Samples samples;
  samples.input_is_probs = input_is_probs;
  samples.input = input.stride(1) == 1 ? input : input.contiguous();
  samples.target = target.contiguous();
  // Compared in int64: a uint8 label would be compared with ignore_index modulo 256.
  const Tensor valid = samples.target.to(at::kLong).ne(ignore_index);
  int64_t rows = input.size(0);
  if (!valid.all().item<bool>()) {
    samples.kept = valid.nonzero().squeeze(1).contiguous();
    rows = samples.kept->numel();
    TORCH_CHECK_VALUE(rows > 0, kOp, ": target must have at least one label other than ignore_index = ", ignore_index);
  }
  samples.top = at::empty({rows}, input.options().dtype(at::kInt));
  samples.correct = at::empty({rows}, input.options().dtype(at::kByte));
  const int64_t problem = samples.prepare();
  if (problem != kNoRowProblem) raise_row_problem(problem, samples.input, samples.target);
  return samples;
}

}  // namespace
}  // namespace focalkern::bindings
