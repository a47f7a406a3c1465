// Registration of the sums of kernels/row_sums.h.
#pragma once

#include <torch/csrc/utils/pybind.h>

namespace focalkern::bindings {

void register_row_sums(pybind11::module_& module);

}  // namespace focalkern::bindings
