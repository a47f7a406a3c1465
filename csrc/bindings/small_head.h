// Registration of the questions of linear_focal_loss about a small batch.
#pragma once

#include <torch/csrc/utils/pybind.h>

namespace focalkern::bindings {

void register_small_head(pybind11::module_& module);

}  // namespace focalkern::bindings
