// Sums over the classes of each row, and the statistics of rows for a trainer's log: kernels/row_sums.h. Without
// autograd.

#include <ATen/ops/empty.h>
#include <c10/util/Exception.h>

#include <tuple>

#include "bindings/interface.h"
#include "bindings/row_sums.h"
#include "bindings/row_sums_run.h"

namespace focalkern::bindings {
namespace {

Tensor checked_input(const char* op, const Tensor& input) {
  check_floating(op, "input", input);
  check_device(op, input);
  TORCH_CHECK_VALUE(input.dim() == 2 && input.size(1) >= 1, op, ": input must be [N, C] with C >= 1, got ",
                    input.sizes());
  return input.contiguous();
}

// Largest logit, `rest` and `fall` [3, N] in float64, and the class of the largest logit [N].
std::tuple<Tensor, Tensor> checked_row_sums(const Tensor& given) {
  TORCH_CHECK_VALUE(given.is_cpu(), "row_sums: input must be on the CPU, got ", given.device());
  const Tensor input = checked_input("row_sums", given);
  const Tensor sums = at::empty({3, input.size(0)}, input.options().dtype(at::kDouble));
  const Tensor index = at::empty({input.size(0)}, input.options().dtype(at::kLong));
  row_sums<Interface>(input, sums, index);
  return {sums, index};
}

RowStatistics checked_row_statistics(const Tensor& given, const Tensor& given_target, int64_t ignore_index) {
  const char* op = "row_statistics";
  const Tensor input = checked_input(op, given);
  const Tensor target = given_target.contiguous();
  const int64_t n = input.size(0);
  const auto type = target.scalar_type();
  check_same_device(op, "target", target, input);
  TORCH_CHECK_VALUE(
      (type == at::kLong || type == at::kInt || type == at::kByte) && target.sizes() == at::IntArrayRef({n}), op,
      ": target must be int64, int32 or uint8 labels [N] = [", n, "], got ", dtype_name(type), " ", target.sizes());
  const RowStatistics found = empty_row_statistics(input, n);
  std::apply([&](const auto&... results) { row_statistics<Interface>(input, target, ignore_index, results...); },
             found);
  return found;
}

}  // namespace

RowStatistics empty_row_statistics(const Tensor& input, int64_t rows) {
  const auto make = [&](at::ScalarType dtype) { return at::empty({rows}, input.options().dtype(dtype)); };
  const auto real = compute_dtype(input.scalar_type());
  return {make(real), make(real), make(real), make(at::kLong), make(at::kBool), make(at::kBool)};
}

void register_row_sums(pybind11::module_& module) {
  module.def("row_sums", &checked_row_sums, pybind11::call_guard<pybind11::gil_scoped_release>());
  module.def("row_statistics", &checked_row_statistics, pybind11::call_guard<pybind11::gil_scoped_release>());
}

}  // namespace focalkern::bindings
