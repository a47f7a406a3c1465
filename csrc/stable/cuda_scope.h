// The device of a tensor and its current stream, by torch's stable ABI.
#pragma once

#include <torch/headeronly/util/shim_utils.h>

#include "stable/common.h"

namespace focalkern::stable {

// Makes the device of a tensor the current one during its lifetime, and has its current stream.
class CudaScope {
 public:
  explicit CudaScope(const Tensor& tensor) : guard_(tensor.get_device_index()) {
    TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(tensor.get_device_index(), &stream_));
  }
  void* stream() const { return stream_; }
  static void check(const char* op, int error) { STD_TORCH_CHECK(error == 0, op, ": CUDA error ", error); }

 private:
  torch::stable::accelerator::DeviceGuard guard_;
  void* stream_ = nullptr;
};

}  // namespace focalkern::stable
