// Registration of kernels/z_loss.h.
#pragma once

#include <torch/csrc/utils/pybind.h>

namespace focalkern::bindings {

void register_z_loss(pybind11::module_& module);

}  // namespace focalkern::bindings
