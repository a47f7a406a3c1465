// Registration of the sums of kernels/row_sums.h.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/utils/pybind.h>

#include <tuple>

namespace focalkern::bindings {

// log p, entropy, log-sum-exp, predicted class, whether it is correct, and whether the row counts, all [N].
using RowStatistics = std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor>;

RowStatistics empty_row_statistics(const at::Tensor& input, int64_t rows);

void register_row_sums(pybind11::module_& module);

}  // namespace focalkern::bindings
