// The loss of dynamic fine-tuning on the CPU.

#include "math/dft.h"

#include "cpu/row_loss/driver.h"

namespace focalkern::cpu {
namespace {

// The same instructions as in AnyGamma.
template <typename Reals>
FK_HOST_DEVICE Reals power_of(const GammaOfLanes<Reals>& gamma, const Reals& /*p*/, const Reals& minus_log_p) {
  const Reals zero{}, magnitude = gamma.exponent + number_t<Reals>(1);
  const Reals x = magnitude == zero ? zero : magnitude * minus_log_p;
  return x > gamma.most ? zero : power_of_lanes(Reals(-x), gamma.most);
}

}  // namespace

FK_ROW_LOSS_INSTANCES(DftFormula)

}  // namespace focalkern::cpu
