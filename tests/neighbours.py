"""Rows whose classes are equal or one unit in the last place apart, and a check that results keep their order."""

import torch

INTEGERS = {
    torch.float64: torch.int64,
    torch.float32: torch.int32,
    torch.bfloat16: torch.int16,
    torch.float16: torch.int16,
}


def consecutive(start: torch.Tensor, steps: torch.Tensor) -> torch.Tensor:
    """The numbers ``steps`` units in the last place from ``start``, away from 0."""
    return (start.view(INTEGERS[start.dtype]) + steps.to(INTEGERS[start.dtype])).view(start.dtype)


def rows_of_neighbours(rows: int, classes: int, dtype: torch.dtype) -> torch.Tensor:
    """Logits [rows, classes]: neighbours, some of them equal, at any distance below the two largest classes, which lead
    by any gap or none; part of a row is arbitrary."""
    depth = torch.empty(rows, 1, dtype=torch.float64).exponential_() * 10.0 ** torch.randint(-2, 1, (rows, 1))
    z = consecutive((-depth).to(dtype).expand(rows, classes).contiguous(), torch.randint(0, classes, (rows, classes)))
    anything = torch.arange(classes) < torch.randint(0, classes, (rows, 1)) * (torch.rand(rows, 1) < 0.3)
    z = torch.where(anything, -3 * torch.rand(rows, classes).to(dtype), z)
    eps = torch.finfo(dtype).eps
    leads = torch.tensor([0, 0, eps, 2 * eps, 1e-3, 0.5, 3.0, 12.0], dtype=torch.float64)
    z[:, 0] = leads[torch.randint(len(leads), (rows,))].to(dtype)
    z[:, 1] = 0
    z[::7, 0] = z[::7, 2:].amax(1)  # no leading class, perhaps a tie
    z[::7, 1] = z[::7, 0]
    places = torch.rand(rows, classes).argsort(1)
    return z.gather(1, places)


def broken_pairs(given: torch.Tensor, result: torch.Tensor) -> int:
    """Adjacent pairs of the sorted rows that are equal but have different results, or whose results fall."""
    ascending, order = given.double().sort(-1)
    steps = result.double().gather(-1, order).diff()
    equal = ascending.diff() == 0
    return int(((steps < 0) | (equal & (steps != 0)) | steps.isnan()).sum())
