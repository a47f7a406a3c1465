// The focal and inverse focal loss on the CPU.

#include "cpu/row_loss/driver.h"

namespace focalkern::cpu {

int64_t row_loss_chunk_rows(int64_t rows, int64_t classes) {
  const int64_t chunk = std::max<int64_t>(1, kChunkLogits / std::max<int64_t>(1, classes));
  return std::min(std::max<int64_t>(1, rows), chunk < kTileRows ? chunk : chunk - chunk % kTileRows);
}

FK_ROW_LOSS_INSTANCES(FocalFormula)

}  // namespace focalkern::cpu
