"""Sums over the processes of a group."""

import datetime
from collections.abc import Callable
from typing import Any

import torch

from focalkern.ops.calibration_sums import CalibrationSums

__all__ = ["all_reduced"]


def all_reduced(
    op: str,
    sums: CalibrationSums | None,
    zeros: Callable[[torch.device], CalibrationSums],
    *,
    digest: int,
    n_classes: int | None,
    exact: bool,
    words: str,
    group: Any,
    timeout: datetime.timedelta | None,
) -> tuple[CalibrationSums, int | None]:
    """The total of ``sums`` on every process, and the number of classes; None if no process has seen a row.

    Args:
        op: function that errors name.
        sums: sums of this process; None before its first row.
        zeros: a function of a device that returns the sums of zero rows.
        digest: digest of the arguments that all processes must share.
        n_classes, exact, words: number of classes, ``exact``, and a description of this process's state for errors.
        group, timeout: as :meth:`CalibrationGridState.all_reduce`.

    Raises:
        ValueError, RuntimeError: as :meth:`CalibrationGridState.all_reduce`.
    """
    import torch.distributed as dist

    if not dist.is_available() or not dist.is_initialized():
        raise RuntimeError(f"{op}: torch.distributed must be initialized: call init_process_group first")
    device = torch.device("cpu")
    if "nccl" in dist.get_backend(group):
        device = torch.device("cuda", torch.cuda.current_device())

    def wait(work: Any) -> None:
        if timeout is None:
            work.wait()
        else:
            work.wait(timeout)

    try:
        facts = torch.tensor([digest, n_classes or 0, int(exact)], device=device)
        everybody = [torch.empty_like(facts) for _ in range(dist.get_world_size(group))]
        wait(dist.all_gather(everybody, facts, group=group, async_op=True))
        known = torch.stack(everybody).cpu()
        classes = known[:, 1][known[:, 1] > 0].unique()
        if bool((known[:, 0] != known[0, 0]).any()) or bool(known[:, 2].any()) or len(classes) > 1:
            raise ValueError(
                f"{op}: every process must have a state for the same grid, criteria, bins, kind of input and "
                f"number of classes, without exact=True; this one is {words}"
            )
        mine = zeros(device) if sums is None else sums
        rows = torch.tensor([int(mine.rows)], device=device)
        wait(dist.all_reduce(rows, group=group, async_op=True))
        total = CalibrationSums(rows.cpu())
        for name, tensor in mine.items():
            moved = tensor.to(device, copy=True)
            wait(dist.all_reduce(moved, group=group, async_op=True))
            setattr(total, name, moved.to(tensor.device))
    except RuntimeError as error:
        reason = str(error).strip().partition("\n")[0]
        raise RuntimeError(
            f"{op}: another process has died or did not answer in time, and nothing was added: {reason}"
        ) from error
    return total, int(classes[0]) if len(classes) else None
