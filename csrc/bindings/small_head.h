// Registration of the checks of linear_focal_loss before a small batch.
#pragma once

#include <torch/csrc/utils/pybind.h>

namespace focalkern::bindings {

void register_small_head(pybind11::module_& module);

}  // namespace focalkern::bindings
