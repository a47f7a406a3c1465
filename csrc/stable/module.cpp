// The definition of the torch library "focalkern" in the stable module: the operators of the bindings. Their
// implementations come from Python: focalkern.stable registers them.

#include "bindings/schemas.h"
#include "stable/common.h"

STABLE_TORCH_LIBRARY(focalkern, m) {
  using namespace focalkern::bindings;
  for (const char* schema :
       {kFocalLossForwardSchema, kFocalLossBackwardSchema, kFocalLossCompositeSchema, kSigmoidLossForwardSchema,
        kSigmoidLossBackwardSchema, kSigmoidLossCompositeSchema, kCalibrationMapForwardSchema,
        kCalibrationMapBackwardSchema, kCalibrationMapCompositeSchema, kCalibrationGridSchema, kMmceLossCompositeSchema,
        kSplineMapForwardSchema, kSplineMapBackwardSchema, kSplineMapCompositeSchema}) {
    m.def(schema);
  }
}
