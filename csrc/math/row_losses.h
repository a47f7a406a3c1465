// The formulas of the list row_losses.def.
#pragma once

#include "math/brier.h"
#include "math/dft.h"
#include "math/dual_focal.h"
#include "math/mmce.h"
#include "math/poly_focal.h"
#include "math/row_loss.h"
