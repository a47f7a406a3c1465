// The dual focal loss on the CPU. Label smoothing has loops of its own (ordered_rows.h).

#include "math/dual_focal.h"

#include "cpu/row_loss/driver.h"
#include "cpu/row_loss/ordered_rows.h"

namespace focalkern::cpu {

#define FK_DUAL_FOCAL_INSTANCE(Scalar)                                                                                \
  template <>                                                                                                         \
  RowLossSums row_loss_forward<DualFocalFormula, Scalar>(const RowLossForward<Scalar>& args, int64_t begin,           \
                                                         int64_t end) {                                               \
    return is_soft(args) ? forward_in_order(args, begin, end) : forward_labels<DualFocalFormula>(args, begin, end);   \
  }                                                                                                                   \
  template <>                                                                                                         \
  void row_loss_backward<DualFocalFormula, Scalar>(const RowLossBackward<Scalar>& args, int64_t begin, int64_t end) { \
    is_soft(args) ? backward_in_order(args, begin, end) : backward_labels<DualFocalFormula>(args, begin, end);        \
  }

FK_DUAL_FOCAL_INSTANCE(Half)
FK_DUAL_FOCAL_INSTANCE(BFloat16)
FK_DUAL_FOCAL_INSTANCE(float)
FK_DUAL_FOCAL_INSTANCE(double)

}  // namespace focalkern::cpu
