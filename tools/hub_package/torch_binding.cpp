// Declares the operators that _operators.py registers, and the Python module. The kernels are in csrc/stable.

#include "bindings/schemas.h"
#include "registration.h"
#include "stable/common.h"

FK_EXPANDED(STABLE_TORCH_LIBRARY, TORCH_EXTENSION_NAME, m) {
  using namespace focalkern::bindings;
  for (const char* schema : {kFocalLossForwardSchema, kFocalLossBackwardSchema, kFocalLossCompositeSchema,
                             kSigmoidLossForwardSchema, kSigmoidLossBackwardSchema, kSigmoidLossCompositeSchema}) {
    m.def(schema);
  }
}

REGISTER_EXTENSION(TORCH_EXTENSION_NAME)
