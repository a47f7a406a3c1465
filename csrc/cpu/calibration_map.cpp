// The focal calibration map, forward and backward, on the CPU.
//
//   forward   input [rows, classes], gamma, temperature -> output [rows, classes]: p or log p
//   backward  input, grad_output -> grad_input [rows, classes], grad_gamma [rows], grad_temperature [rows]
//   One class: the binary map, elementwise on one logit each (calibration_map/binary.h).
//
// Memory: each direction reads its inputs once and writes its outputs once; nothing is saved between them. A tile of
// rows is converted into scratch memory that stays in cache. The passes over a tile are
//   1. the largest class and the second largest   2. exp and its sum over all but the largest
//   3. log(p_k / p_t) and sums                    4. normalise and write
// Between the passes, the per-row numbers of all rows of the tile are computed in one loop.
//
// Two layouts of the tile, chosen by the number of classes: `row` has the classes of a row side by side, padded with
// classes of probability zero to whole vectors; `column` has the rows side by side, for few classes.

#include <algorithm>

#include "cpu/calibration_map/backward.h"
#include "cpu/calibration_map/binary.h"
#include "cpu/calibration_map/forward.h"
#include "cpu/calibration_map/tile.h"
#include "kernels/calibration_map.h"

namespace focalkern::cpu {

int64_t calibration_map_chunk_rows(int64_t rows, int64_t classes) {
  const int64_t chunk = std::max<int64_t>(1, kChunkElements / std::max<int64_t>(1, classes));
  return std::min(std::max<int64_t>(1, rows), chunk < kMaxTileRows ? chunk : chunk - chunk % kMaxTileRows);
}

template <typename Scalar>
int64_t calibration_map_forward(const CalibrationMapForward<Scalar>& args, int64_t row_begin, int64_t row_end) {
  if (args.classes == 1) return binary_forward(args, row_begin, row_end);
  Scratch<compute_t<Scalar>> scratch(args.classes, /*arrays=*/2);
  int64_t invalid = -1;
  for (int64_t row = row_begin; row < row_end; row += scratch.tile_rows()) {
    const auto tile = scratch.tile(std::min(scratch.tile_rows(), row_end - row));
    forward_tile(args, row, tile);
    for (int64_t r = 0; r < tile.n_rows && invalid < 0; ++r) {
      if (!tile.row->valid[r]) invalid = row + r;
    }
  }
  return invalid;
}

template <typename Scalar>
void calibration_map_backward(const CalibrationMapBackward<Scalar>& args, int64_t row_begin, int64_t row_end) {
  if (args.classes == 1) return binary_backward(args, row_begin, row_end);
  Scratch<compute_t<Scalar>> scratch(args.classes, /*arrays=*/4);
  for (int64_t row = row_begin; row < row_end; row += scratch.tile_rows()) {
    backward_tile(args, row, scratch.tile(std::min(scratch.tile_rows(), row_end - row)));
  }
}

#define FK_INSTANTIATE(Scalar)                                                                              \
  template int64_t calibration_map_forward<Scalar>(const CalibrationMapForward<Scalar>&, int64_t, int64_t); \
  template void calibration_map_backward<Scalar>(const CalibrationMapBackward<Scalar>&, int64_t, int64_t);
FK_INSTANTIATE(Half)
FK_INSTANTIATE(BFloat16)
FK_INSTANTIATE(float)
FK_INSTANTIATE(double)
#undef FK_INSTANTIATE

}  // namespace focalkern::cpu
