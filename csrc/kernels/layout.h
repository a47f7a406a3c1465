// Parts that the arguments of several kernels share. Everything in kernels/ is plain structs and one declaration per
// operator, direction and device. None of it includes torch or CUDA, so that a kernel is read, built and tested without
// them.
#pragma once

#include <cstdint>

#include "math/portable.h"

namespace focalkern {

// The offset of element (row, class), in elements from the base pointer. Rows are the positions of the unreduced loss
// in their logical order. [N, C, d1, ...] in any memory format has at most two nested runs of rows. A crop of it has
// three: `lines` lines of pixels form an image. Only the CPU kernels support images.
struct RowLayout {
  int64_t inner;  // rows in the innermost run
  int64_t outer_stride;
  int64_t inner_stride;
  int64_t class_stride;
  int64_t lines = 0;      // runs in an image, or 0 without images
  int64_t image_gap = 0;  // from the end of an image's lines to the next image

  FK_HOST_DEVICE int64_t row_offset(int64_t row) const {
    const int64_t offset = (row / inner) * outer_stride + (row % inner) * inner_stride;
    return lines == 0 ? offset : offset + row / inner / lines * image_gap;
  }
};

// Labels in the type that the user passed: converting them would cost a launch and a copy.
struct Labels {
  enum class Type : int32_t { kInt64, kInt32, kUInt8 };
  const void* data;  // [rows], contiguous
  Type type;

  FK_HOST_DEVICE int64_t operator[](int64_t row) const {
    if (type == Type::kInt64) return static_cast<const int64_t*>(data)[row];
    if (type == Type::kInt32) return static_cast<const int32_t*>(data)[row];
    return static_cast<const uint8_t*>(data)[row];
  }
};

}  // namespace focalkern
