// The dual focal loss on the CPU.

#include "math/dual_focal.h"

#include "cpu/row_loss/driver.h"

namespace focalkern::cpu {

FK_ROW_LOSS_INSTANCES(DualFocalFormula)

}  // namespace focalkern::cpu
