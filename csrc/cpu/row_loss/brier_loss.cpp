// The Brier score of the softmax on the CPU.

#include "math/brier.h"

#include "cpu/row_loss/driver.h"

namespace focalkern::cpu {

FK_ROW_LOSS_INSTANCES(BrierFormula)

}  // namespace focalkern::cpu
