"""The record of an AdaFocal schedule, and the bytes in which a checkpoint keeps it."""

from dataclasses import dataclass, fields
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

__all__ = ["AdaFocalRecord", "gathered", "packed", "unpacked"]

# History and accumulated samples are one tensor of bytes: safetensors accepts only tensors, and casts and averages of
# floating-point states leave bytes unchanged.
_FORMAT, _HEADER = 1, 5


@dataclass(frozen=True, eq=False)  # == on tensors is elementwise
class AdaFocalRecord:
    """One update of an :class:`AdaFocalLoss`. All tensors are on the CPU; statistics are fractions, float64.

    Attributes:
        bin_edges: [n_bins + 1], the new bins.
        confidence: [n_bins], mean top-1 confidence of the validation samples in each bin, NaN for an empty bin.
        accuracy: [n_bins], the fraction of correct samples in each bin, NaN for an empty bin.
        count: [n_bins], int64, number of samples in each bin; None if :meth:`AdaFocalLoss.update_bins` got no counts.
        bin_gammas: [n_bins], after the update.

    Example:
        >>> criterion = fk.AdaFocalLoss(n_bins=2)
        >>> record = criterion.update_bins([0.0, 0.5, 1.0], mean_confidence=[0.4, 0.9], accuracy=[0.4, 0.6])
        >>> record.bin_gammas
        tensor([1.0000, 1.3499], dtype=torch.float64)
        >>> record is criterion.history[-1]
        True
    """

    bin_edges: Tensor
    confidence: Tensor
    accuracy: Tensor
    count: Tensor | None
    bin_gammas: Tensor


def packed(n_bins: int, history: list[AdaFocalRecord], confidence: list[Tensor], correct: list[Tensor]) -> Tensor:
    waiting = torch.cat([torch.empty(0, dtype=torch.float32, device="cpu"), *confidence])
    header = (_FORMAT, n_bins, len(history), len(waiting), waiting.dtype == torch.float64)
    parts = [torch.tensor(header, device="cpu")]
    for record in history:
        count = torch.full((n_bins,), -1, device="cpu") if record.count is None else record.count
        parts += [record.bin_edges, record.confidence, record.accuracy, count, record.bin_gammas]
    parts += [waiting, *correct]
    return torch.cat([part.to(torch.float64) for part in parts]).view(torch.uint8)


def unpacked(n_bins: int, state: Any) -> tuple[list[AdaFocalRecord], Tensor, Tensor]:
    """The history, and confidence and correctness of the accumulated samples; raises for an invalid state."""
    if isinstance(state, dict):  # the format of versions before 0.2
        return _from_dict(state)
    damaged = ValueError("AdaFocalLoss: _extra_state must be the saved bytes of a loss with the same n_bins, complete")
    if not isinstance(state, Tensor) or state.dtype != torch.uint8 or state.dim() != 1 or len(state) % 8:
        raise damaged
    # Copy, because bytes from a file may be unaligned.
    numbers = state.cpu().clone().view(torch.float64)
    if len(numbers) < _HEADER or not bool((numbers[:_HEADER] >= 0).all()):  # NaN fails too
        raise damaged
    updates, waiting = float(numbers[2]), float(numbers[3])
    width = 5 * n_bins + 1
    if (
        numbers[:2].tolist() != [_FORMAT, n_bins]
        or numbers[4] > 1
        or not updates.is_integer()
        or len(numbers) != _HEADER + updates * width + 2 * waiting
    ):
        raise damaged
    history, rest = [], numbers[_HEADER:]
    for row in rest[: int(updates) * width].view(int(updates), width):
        edges, *statistics, gammas = row.split([n_bins + 1, n_bins, n_bins, n_bins, n_bins])
        confidence, accuracy, count = statistics
        counts = None if bool((count < 0).all()) else count.long()
        history.append(AdaFocalRecord(edges.clone(), confidence.clone(), accuracy.clone(), counts, gammas.clone()))
    confidence, correct = rest[int(updates) * width :].split([int(waiting)] * 2)
    if numbers[4] == 0:
        confidence = confidence.float()
    return history, *_samples(confidence.clone(), correct.bool())


def _from_dict(state: dict[str, Any]) -> tuple[list[AdaFocalRecord], Tensor, Tensor]:
    if state.keys() != {"history", "confidence", "correct"}:
        raise ValueError("AdaFocalLoss: _extra_state must hold history, confidence and correct")
    names = {field.name for field in fields(AdaFocalRecord)}
    records = state["history"]
    if not (
        isinstance(records, list) and all(isinstance(record, dict) and record.keys() == names for record in records)
    ):
        raise ValueError(f"AdaFocalLoss: the history in _extra_state must be a list of dicts of {sorted(names)}")
    return [AdaFocalRecord(**record) for record in records], *_samples(state["confidence"], state["correct"])


def _samples(confidence: Any, correct: Any) -> tuple[Tensor, Tensor]:
    if not (
        isinstance(confidence, Tensor)
        and isinstance(correct, Tensor)
        and correct.dtype == torch.bool
        and confidence.dim() == 1
        and confidence.shape == correct.shape
        and bool(((confidence >= 0) & (confidence <= 1 + 1e-3)).all())  # NaN fails too
    ):
        raise ValueError("AdaFocalLoss: _extra_state must hold one correctness per confidence, confidences in [0, 1]")
    return confidence, correct


def gathered(
    parts: tuple[Tensor, Tensor], problem: Exception | None, group: Any
) -> tuple[tuple[Tensor, Tensor], Exception | None]:
    """The validation samples of all ranks, and an error if any rank has one. All ranks must then raise: otherwise the
    others would wait for the rank that failed."""
    everywhere: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(everywhere, (*parts, None if problem is None else str(problem)), group=group)
    for rank, (_, _, message) in enumerate(everywhere):
        if problem is None and message is not None:
            problem = RuntimeError(f"AdaFocalLoss.update: rank {rank} failed: {message}")
    return (torch.cat([part[0] for part in everywhere]), torch.cat([part[1] for part in everywhere])), problem
