// The poly focal loss on the CPU.

#include "math/poly_focal.h"

#include "cpu/row_loss/driver.h"

namespace focalkern::cpu {

FK_ROW_LOSS_INSTANCES(PolyFocalFormula)

}  // namespace focalkern::cpu
