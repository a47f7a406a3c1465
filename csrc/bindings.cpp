// The Python module focalkern._C and the definition of the torch library "focalkern".

#include <torch/csrc/utils/pybind.h>
#include <torch/library.h>
#include <torch/version.h>

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  // Not TORCH_LIBRARY: a second build of this library in one process then raises an ImportError here, instead of
  // terminating the process from a static initializer.
  static torch::Library definitions(torch::Library::DEF, "focalkern", std::nullopt, __FILE__, __LINE__);

  m.def("build_info", [] {
    pybind11::dict info;
    info["torch"] = TORCH_VERSION;
#ifdef FOCALKERN_WITH_CUDA
    info["cuda"] = true;
#else
    info["cuda"] = false;
#endif
    return info;
  });
}
