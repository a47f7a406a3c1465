// Rows and classes of a tensor, for torch's interface and its stable one.
#pragma once

#include <algorithm>
#include <optional>
#include <vector>

#include "kernels/layout.h"

namespace focalkern::bindings {

// The rows of a tensor whose classes run along `class_dim`, as at most two nested runs, or three with images. Returns
// nothing if its strides do not allow that, or if neither the classes nor the rows of a run are adjacent; such a tensor
// must be copied.
template <typename Tensor>
std::optional<RowLayout> row_layout(const Tensor& tensor, int64_t class_dim, bool with_images) {
  if (tensor.numel() == 0) return RowLayout{1, 0, 1, 1};  // any stride is possible
  struct Run {
    int64_t size;
    int64_t stride;
  };
  std::vector<Run> runs;  // outermost first
  for (int64_t d = 0; d < tensor.dim(); ++d) {
    if (d == class_dim || tensor.size(d) == 1) continue;
    const Run run{tensor.size(d), tensor.stride(d)};
    if (!runs.empty() && runs.back().stride == run.size * run.stride) {
      runs.back() = {runs.back().size * run.size, run.stride};
    } else {
      runs.push_back(run);
    }
  }
  if (runs.size() > (with_images ? 3 : 2)) return std::nullopt;
  RowLayout layout{1, 0, 1, tensor.size(class_dim) == 1 ? 1 : tensor.stride(class_dim)};
  if (!runs.empty()) {
    layout.inner = std::max<int64_t>(1, runs.back().size);
    layout.inner_stride = runs.back().stride;
  }
  if (runs.size() >= 2) layout.outer_stride = runs[runs.size() - 2].stride;
  if (runs.size() == 3) {
    layout.lines = runs[1].size;
    layout.image_gap = runs[0].stride - layout.lines * layout.outer_stride;
  }
  const bool adjacent = layout.class_stride == 1 || layout.inner_stride == 1;
  return adjacent ? std::optional<RowLayout>(layout) : std::nullopt;
}

}  // namespace focalkern::bindings
