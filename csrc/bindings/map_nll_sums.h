// Registration of the sums of kernels/map_nll_sums.h.
#pragma once

#include <torch/csrc/utils/pybind.h>

namespace focalkern::bindings {

void register_map_nll_sums(pybind11::module_& module);

}  // namespace focalkern::bindings
