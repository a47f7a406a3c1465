"""Samples and checks shared by the tests of the calibration maps."""

import torch
import torch._dynamo


def leaf(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().requires_grad_()


# ---- the edges, at 300 digits ---------------------------------------------------------------------------------------

# 80 is the largest gap of the contract. At 18, 1 - q falls below float32's digits, at 40 below float64's. 7.5 and 12
# are just past the point where a series must replace -q log(q) / (1 - q), in float32 and in float64.
EDGE_GAPS = [0.0, 1.0, 7.5, 12.0, 18.0, 40.0, 80.0]


def edge_row(gap: float) -> list[float]:
    # Multiples of 1/4 are exact in float32.
    return [0.25 - gap, 0.25, -0.75 - gap] if gap else [0.25, 0.25, 0.25]
