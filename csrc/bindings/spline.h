// Shared by the bindings of spline scaling: rows as kernel arguments, and chunks of rows.
#pragma once

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>

#include <algorithm>

#include "cpu/spline.h"

#ifdef FOCALKERN_WITH_CUDA
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#endif

namespace focalkern::bindings {

inline SplineStorage spline_storage(at::ScalarType dtype) {
  return dtype == at::kHalf       ? SplineStorage::kHalf
         : dtype == at::kBFloat16 ? SplineStorage::kBFloat16
         : dtype == at::kFloat    ? SplineStorage::kFloat
                                  : SplineStorage::kDouble;
}

// input: contiguous, [..., classes].
inline SplineInput spline_input(const at::Tensor& input, double temperature, double floor, bool is_probs) {
  const int64_t classes = input.size(-1);
  return {input.const_data_ptr(),
          spline_storage(input.scalar_type()),
          is_probs,
          input.numel() / classes,
          classes,
          temperature,
          floor};
}

inline int64_t n_spline_chunks(const SplineInput& rows) {
  const int64_t chunk_rows = cpu::spline_chunk_rows(rows.rows, rows.classes);
  return (rows.rows + chunk_rows - 1) / chunk_rows;
}

// Calls work(chunk, begin, end) for every chunk of rows, whose bounds do not depend on the number of threads.
template <typename Work>
void for_each_spline_chunk(const SplineInput& rows, Work work) {
  const int64_t chunk_rows = cpu::spline_chunk_rows(rows.rows, rows.classes);
  at::parallel_for(0, n_spline_chunks(rows), 1, [&](int64_t first, int64_t last) {
    for (int64_t i = first; i < last; ++i) work(i, i * chunk_rows, std::min(rows.rows, (i + 1) * chunk_rows));
  });
}

#ifdef FOCALKERN_WITH_CUDA
// The memory of one launch over rows of the device: sums of threads and by class, and scratch memory.
struct SplineDeviceSums {
  SplineDeviceSums(const SplineInput& rows, const at::TensorOptions& device, int64_t numbers, bool by_class) {
    const auto sizes = cuda::spline_sizes(rows.rows, rows.classes, numbers, by_class);
    const auto options = device.dtype(at::kDouble);
    of_threads = at::zeros({numbers, sizes.threads}, options);
    if (by_class) of_classes = at::zeros({sizes.groups, 2, rows.classes}, options);
    memory = at::empty({sizes.scratch}, options);
    sums = {numbers > 0 ? of_threads.mutable_data_ptr<double>() : nullptr,
            by_class ? of_classes.mutable_data_ptr<double>() : nullptr, numbers};
    scratch = memory.mutable_data_ptr<double>();
  }
  at::Tensor of_threads, of_classes, memory;
  cuda::SplineSums sums;
  double* scratch;
};

template <typename Launcher, typename... Arguments>
void launch_spline(Launcher launcher, const Arguments&... arguments) {
  C10_CUDA_CHECK(static_cast<cudaError_t>(launcher(arguments..., c10::cuda::getCurrentCUDAStream().stream())));
}
#endif

}  // namespace focalkern::bindings
