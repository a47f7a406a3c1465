"""Focusing parameters that depend on the predicted probability."""

from collections.abc import Sequence

import torch
from torch import Tensor

from focalkern._checks import counted, dense, short
from focalkern._devices import on_device
from focalkern._tracing import has_values, is_readable
from focalkern._types import FLOATS

__all__ = ["FLSD_53", "GammaTable"]


class GammaTable:
    r"""A piecewise-constant focusing parameter, looked up at a probability p.

    .. math:: \gamma(p) = \text{gammas}[b], \quad \text{edges}[b] \le p < \text{edges}[b + 1]

    The first and the last bin are open-ended: the look-up never compares p with ``edges[0]`` and ``edges[-1]``. Equal
    neighbouring edges make an empty bin. Edges are rounded to the dtype in which the loss computes (float32, or float64
    for float64 logits). Gamma is a constant: no gradient flows through the look-up.

    A p that equals an edge in exact arithmetic may be rounded to either side of it: for five equal logits the computed
    p is 0.2 up to its last digit, so with an edge at 0.2 the look-up may take either gamma. The same call takes the
    same bin on every run. The CPU, a GPU and plain torch may differ, and so may two losses, or a label and the other
    classes of its row with ``label_smoothing``, because some formulas compute p from log p. An edge at 0.199 instead of
    0.2 avoids this.

    Args:
        edges: [n_bins + 1] numbers or a 1-D tensor, floating point, ascending (equal neighbours are allowed).
        gammas: [n_bins] numbers or a 1-D tensor, floating point, on the device of ``edges``. A positive value is a
            focal loss, a negative one an inverse focal loss.

    Attributes:
        edges: tensor [n_bins + 1]. The table keeps a given tensor itself, so that the next look-up sees values written
            into it in place; numbers become float64.
        gammas: tensor [n_bins], likewise.

    Raises:
        TypeError: neither a floating-point tensor nor a sequence of numbers.
        ValueError: not one-dimensional; ``len(edges) != len(gammas) + 1``; no bin; edges that descend or are NaN; a
            gamma that is not finite. Values of tensors on other devices than the CPU are not checked, because that
            would synchronise the device.

    Source: the FLSD schedule of Mukhoti et al. 2020 (arXiv 2002.09437, section 4) and the bins of AdaFocal (Ghosh et
    al., NeurIPS 2022).

    Example:
        >>> table = fk.GammaTable(edges=[0.0, 0.2, 1.0], gammas=[5.0, 3.0])
        >>> table == fk.FLSD_53
        True
        >>> logits, target = torch.tensor([[1.4, 0.0], [1.4, 0.0]]), torch.tensor([0, 1])  # p = 0.802 and 0.198
        >>> fk.focal_loss(logits, target, gamma=table, reduction="none")
        tensor([0.0017, 0.5383])
        >>> fk.focal_loss(logits, target, gamma=torch.tensor([3.0, 5.0]), reduction="none")
        tensor([0.0017, 0.5383])
    """

    __slots__ = ("edges", "gammas")

    edges: Tensor
    gammas: Tensor

    def __init__(self, edges: Tensor | Sequence[float], gammas: Tensor | Sequence[float]) -> None:
        edges = _as_vector("edges", edges)
        gammas = _as_vector("gammas", gammas)
        if len(gammas) < 1:
            raise ValueError("GammaTable: gammas must have at least one bin, got none")
        if len(edges) != len(gammas) + 1:
            raise ValueError(
                f"GammaTable: edges must have len(gammas) + 1 = {len(gammas) + 1} entries, got {len(edges)}"
            )
        if edges.device != gammas.device:
            raise ValueError(f"GammaTable: gammas must be on the device of edges, {edges.device}, got {gammas.device}")
        if is_readable(edges) and is_readable(gammas):
            # The comparison is false for NaN, so NaN raises too.
            ascending = edges[1:] >= edges[:-1]
            if not bool(ascending.all()):
                first = int((~ascending).nonzero()[0])
                raise ValueError(
                    "GammaTable: edges must be ascending and not NaN, got "
                    f"edges[{first}] = {edges[first].item()}, edges[{first + 1}] = {edges[first + 1].item()}"
                )
            finite = gammas.isfinite()
            if not bool(finite.all()):
                first = int((~finite).nonzero()[0])
                raise ValueError(f"GammaTable: gammas must be finite, got gammas[{first}] = {gammas[first].item()}")
        self.edges = edges
        self.gammas = gammas

    @classmethod
    def _unchecked(cls, edges: Tensor, gammas: Tensor) -> "GammaTable":
        """A table over tensors that were checked before, such as a module's buffers. Their values are not checked
        again, which would synchronise the device and break the compiled graph at every training step."""
        table = object.__new__(cls)
        table.edges = edges
        table.gammas = gammas
        return table

    def to(self, device: torch.device | str) -> "GammaTable":
        """The table with both tensors on ``device``, in float32 if the device has no float64.

        Args:
            device: the target device.

        Returns:
            A new table. It shares the tensors that are already on ``device`` in the right dtype.

        Raises:
            RuntimeError: torch does not have this device.

        Example:
            >>> table = fk.FLSD_53.to("cpu")
            >>> table.gammas
            tensor([5., 3.], dtype=torch.float64)
        """
        device = torch.device(device)
        return GammaTable(on_device(self.edges, device), on_device(self.gammas, device))

    def __eq__(self, other: object) -> bool:
        """Whether edges and gammas are equal as numbers, in any dtypes. Reading values synchronises a device."""
        if not isinstance(other, GammaTable):
            return NotImplemented
        pairs = ((self.edges, other.edges), (self.gammas, other.gammas))
        return all(torch.equal(one.double().cpu(), two.double().cpu()) for one, two in pairs)

    def __hash__(self) -> int:
        # The hash uses only the number of bins, because values may be written into the tensors in place.
        return hash((GammaTable, len(self.gammas)))

    def __len__(self) -> int:
        return len(self.gammas)

    def __repr__(self) -> str:
        if not has_values(self.edges):
            return f"GammaTable({counted(len(self), 'bin')})"
        return f"GammaTable(edges={self.edges.tolist()}, gammas={self.gammas.tolist()})"


def _as_vector(name: str, values: Tensor | Sequence[float]) -> Tensor:
    if isinstance(values, Tensor):
        dense("GammaTable", name, values)
        if values.dtype not in FLOATS:
            raise TypeError(f"GammaTable: {name} must be a floating-point tensor, got {values.dtype}")
        vector = values.detach()
    else:
        try:
            vector = torch.tensor(values, dtype=torch.float64)
        except Exception as error:  # text, gaps, numbers beyond float64, or its class raises something else
            raise TypeError(f"GammaTable: {name} must be a sequence of numbers, got {short(values)}") from error
    if vector.dim() != 1:
        raise ValueError(f"GammaTable: {name} must be one-dimensional, got shape {list(vector.shape)}")
    return vector


FLSD_53 = GammaTable(edges=[0.0, 0.2, 1.0], gammas=[5.0, 3.0])
"""FLSD-53 of Mukhoti et al. 2020: gamma 5 where p < 0.2, gamma 3 elsewhere."""
