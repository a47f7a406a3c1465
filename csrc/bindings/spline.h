// Shared by the bindings of spline scaling: rows as kernel arguments, and chunks of rows.
#pragma once

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>

#include <algorithm>

#include "cpu/spline.h"

namespace focalkern::bindings {

inline cpu::SplineStorage spline_storage(at::ScalarType dtype) {
  return dtype == at::kHalf       ? cpu::SplineStorage::kHalf
         : dtype == at::kBFloat16 ? cpu::SplineStorage::kBFloat16
         : dtype == at::kFloat    ? cpu::SplineStorage::kFloat
                                  : cpu::SplineStorage::kDouble;
}

// input: contiguous, [..., classes].
inline cpu::SplineInput spline_input(const at::Tensor& input, double temperature, double floor, bool is_probs) {
  const int64_t classes = input.size(-1);
  return {input.const_data_ptr(),
          spline_storage(input.scalar_type()),
          is_probs,
          input.numel() / classes,
          classes,
          temperature,
          floor};
}

inline int64_t n_spline_chunks(const cpu::SplineInput& rows) {
  const int64_t chunk_rows = cpu::spline_chunk_rows(rows.rows, rows.classes);
  return (rows.rows + chunk_rows - 1) / chunk_rows;
}

// Calls work(chunk, begin, end) for every chunk of rows, whose bounds do not depend on the number of threads.
template <typename Work>
void for_each_spline_chunk(const cpu::SplineInput& rows, Work work) {
  const int64_t chunk_rows = cpu::spline_chunk_rows(rows.rows, rows.classes);
  at::parallel_for(0, n_spline_chunks(rows), 1, [&](int64_t first, int64_t last) {
    for (int64_t i = first; i < last; ++i) work(i, i * chunk_rows, std::min(rows.rows, (i + 1) * chunk_rows));
  });
}

}  // namespace focalkern::bindings
