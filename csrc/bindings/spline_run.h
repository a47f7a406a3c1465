// Kernel calls of spline scaling, for torch's interface and its stable one: the map, and the sums of its fit. `Torch`
// is the interface: bindings/interface.h, stable/interface.h.
#pragma once

#include <algorithm>
#include <atomic>
#include <limits>
#include <optional>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include "cpu/spline.h"
#include "kernels/layout.h"

namespace focalkern::bindings {

template <typename Torch>
SplineStorage spline_storage(const typename Torch::Tensor& tensor) {
  auto storage = SplineStorage::kDouble;
  Torch::dispatch(tensor, [&](auto scalar) {
    using Scalar = decltype(scalar);
    storage = std::is_same_v<Scalar, Half>       ? SplineStorage::kHalf
              : std::is_same_v<Scalar, BFloat16> ? SplineStorage::kBFloat16
              : std::is_same_v<Scalar, float>    ? SplineStorage::kFloat
                                                 : SplineStorage::kDouble;
  });
  return storage;
}

// input: contiguous, [..., classes].
template <typename Torch>
SplineInput spline_input(const typename Torch::Tensor& input, double temperature, double floor, bool is_probs) {
  const int64_t classes = input.size(input.dim() - 1);
  return {input.const_data_ptr(),
          spline_storage<Torch>(input),
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
template <typename Torch, typename Work>
void for_each_spline_chunk(const SplineInput& rows, Work work) {
  const int64_t chunk_rows = cpu::spline_chunk_rows(rows.rows, rows.classes);
  Torch::parallel_for(0, n_spline_chunks(rows), 1, [&](int64_t first, int64_t last) {
    for (int64_t i = first; i < last; ++i) work(i, i * chunk_rows, std::min(rows.rows, (i + 1) * chunk_rows));
  });
}

// The sum of `none` and of the sums that work(sums, begin, end) makes for every chunk of rows, added in order.
template <typename Torch, typename Sums, typename Work>
Sums add_spline_chunks(const SplineInput& rows, const Sums& none, Work work) {
  std::vector<Sums> sums(n_spline_chunks(rows) + 1, none);
  for_each_spline_chunk<Torch>(rows,
                               [&](int64_t chunk, int64_t begin, int64_t end) { work(sums[chunk + 1], begin, end); });
  for (size_t i = 1; i < sums.size(); ++i) sums[0].add(sums[i]);
  return std::move(sums[0]);
}

template <typename Tensor>
double* doubles_of(const Tensor& tensor) {
  return static_cast<double*>(tensor.mutable_data_ptr());
}
template <typename Tensor>
const double* const_doubles_of(const Tensor& tensor) {
  return static_cast<const double*>(tensor.const_data_ptr());
}
template <typename Tensor>
const double* const_doubles_of(const std::optional<Tensor>& tensor) {
  return tensor.has_value() ? const_doubles_of(*tensor) : nullptr;
}

#ifdef FOCALKERN_WITH_CUDA
// The memory of one launch over rows of the device: sums of threads and by class, and scratch memory.
template <typename Torch>
struct SplineDeviceSums {
  using Tensor = typename Torch::Tensor;
  SplineDeviceSums(const SplineInput& rows, const Tensor& like, int64_t numbers, bool by_class)
      : SplineDeviceSums(cuda::spline_sizes(rows.rows, rows.classes, numbers, by_class), rows, like, numbers,
                         by_class) {}

  Tensor of_threads, of_classes, memory;
  cuda::SplineSums sums;
  double* scratch;

 private:
  SplineDeviceSums(const cuda::SplineSizes& sizes, const SplineInput& rows, const Tensor& like, int64_t numbers,
                   bool by_class)
      : of_threads(Torch::zero_doubles(like, {numbers, sizes.threads})),
        of_classes(Torch::zero_doubles(like, {by_class ? sizes.groups : 0, 2, rows.classes})),
        memory(Torch::empty_doubles(like, {sizes.scratch})),
        sums{numbers > 0 ? doubles_of(of_threads) : nullptr, by_class ? doubles_of(of_classes) : nullptr, numbers},
        scratch(doubles_of(memory)) {}
};

template <typename Torch, typename Launcher, typename... Arguments>
void launch_spline(const typename Torch::Tensor& on_device, Launcher launcher, const Arguments&... arguments) {
  const typename Torch::CudaScope device(on_device);
  device.check("spline scaling", launcher(arguments..., device.stream()));
}
#endif

}  // namespace focalkern::bindings
