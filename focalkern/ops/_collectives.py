"""Reductions over the ranks of a process group: in place in eager mode, functional collectives in traced graphs.

``torch.distributed.all_reduce`` ends a compiled graph; the functional collectives are operators of it. They are
imported only while a graph is traced.
"""

from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

__all__ = ["ALONE", "all_gather", "all_reduce", "group_of"]


class _Alone:
    """Stands for a group of one: this process has all classes, and its reductions are no-ops."""

    group_name = ""

    def rank(self) -> int:
        return 0


ALONE = _Alone()


def group_of(op: str, group: Any) -> Any:
    """``group`` itself; the group of all ranks if it is None.

    Raises:
        RuntimeError: ``group`` is None and torch.distributed has no group.
        TypeError: ``group`` is neither a process group nor None.
    """
    if group is ALONE:
        return group
    if not (dist.is_available() and dist.is_initialized()):
        raise RuntimeError(f"{op}: torch.distributed has no process group; call init_process_group first")
    if group is not None and not isinstance(group, dist.ProcessGroup):
        raise TypeError(f"{op}: process_group must be a process group or None, got {type(group).__name__}")
    return dist.group.WORLD if group is None else group


def all_reduce(tensor: Tensor, operation: Literal["sum", "max"], group: Any) -> Tensor:
    """The sum or maximum over the ranks. In eager mode it overwrites ``tensor``."""
    if group is ALONE:
        return tensor
    if torch.compiler.is_compiling():
        import torch.distributed._functional_collectives as functional

        return functional.all_reduce(tensor, operation, group)
    dist.all_reduce(tensor, op=dist.ReduceOp.SUM if operation == "sum" else dist.ReduceOp.MAX, group=group)
    return tensor


def all_gather(tensor: Tensor, group: Any) -> Tensor:
    """The tensors [n] of all ranks, [R, n]."""
    if group is ALONE:
        return tensor.unsqueeze(0)
    ranks = dist.get_world_size(group)
    if torch.compiler.is_compiling():
        import torch.distributed._functional_collectives as functional

        return functional.all_gather_tensor(tensor, 0, group).reshape(ranks, -1)
    everywhere = [torch.empty_like(tensor) for _ in range(ranks)]
    dist.all_gather(everywhere, tensor, group=group)
    return torch.stack(everywhere)
