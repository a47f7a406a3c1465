"""A linear layer and its focal loss in one module, like ``torch.nn.LinearCrossEntropyLoss``."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from focalkern._checks import flag, integer, short
from focalkern._devices import autocast_is_on
from focalkern._types import Reduction
from focalkern.gamma import GammaTable
from focalkern.losses._adafocal import AdaFocalLoss, sound
from focalkern.losses._base import check_pair, check_range, number
from focalkern.losses._flsd import FLSDLoss
from focalkern.losses._focal import FocalFamily, FocalLoss
from focalkern.ops._linear_chunks import default_chunk_rows
from focalkern.ops._row_loss import Modulation
from focalkern.ops.linear_focal_loss import linear_focal_loss


def _positive_int(op: str, name: str, value: object) -> int:
    return integer(op, name, value, 1, 2**28)  # a larger size would not fit into memory


class _Head(FocalFamily):
    """Base of the losses of features: adds the linear layer that computes the logits."""

    linear: nn.Linear

    def _add_head(
        self,
        in_features: int,
        num_classes: int,
        *,
        out_features: Sequence[int],
        bias: bool,
        chunk_rows: int | None,
        softcap: float | None,
        device: Any,
        dtype: Any,
    ) -> None:
        self.in_features = _positive_int(self._name, "in_features", in_features)
        self.num_classes = _positive_int(self._name, "num_classes", num_classes)
        bias = flag(self._name, "bias", bias)
        if dtype is not None and not isinstance(dtype, torch.dtype):
            raise TypeError(f"{self._name}: dtype must be a torch.dtype or None, got {short(dtype)}")
        if device is not None and not isinstance(device, torch.device):
            try:
                device = torch.device(device)
            except Exception:  # torch raises several types, with messages of several lines
                raise TypeError(f"{self._name}: device must be a device or None, got {short(device)}") from None
        if not isinstance(out_features, Sequence) or isinstance(out_features, str | bytes):
            raise TypeError(f"{self._name}: out_features must be a sequence of ints, got {short(out_features)}")
        self.out_features = tuple(_positive_int(self._name, "out_features", size) for size in out_features)
        self.chunk_rows = None if chunk_rows is None else _positive_int(self._name, "chunk_rows", chunk_rows)
        self.softcap = None if softcap is None else number(self._name, "softcap", softcap)
        if self.softcap is not None and self.softcap <= 0:
            raise ValueError(f"{self._name}: softcap must be positive, got {self.softcap}")
        if self.weight is not None and len(self.weight) != self.num_classes:
            raise ValueError(f"{self._name}: weight must be [C] = [{self.num_classes}], got {list(self.weight.shape)}")
        outputs = self.num_classes * math.prod(self.out_features)
        self.linear = nn.Linear(self.in_features, outputs, bias=bias, device=device, dtype=dtype)

    def forward(self, input: Tensor, target: Tensor) -> Any:
        """The loss of a batch of features.

        Args:
            input: features [D], [N, D] or [B, S, D], in the dtype of the layer (under autocast in any).
            target: labels of the shape of ``input`` without D, or class probabilities; see
                :func:`focalkern.linear_focal_loss`.

        Returns:
            The loss in the dtype of ``input``: a scalar, or of the shape of the labels with ``reduction="none"``. With
            ``return_stats=True`` a :class:`focalkern.LossWithStats` (loss, stats).

        Raises:
            TypeError, ValueError, IndexError: as :func:`focalkern.linear_focal_loss`; TypeError if another layer, such
                as an adapter of PEFT, has replaced ``linear``.
        """
        gamma = self._gamma()
        if isinstance(gamma, GammaTable) and isinstance(input, Tensor):
            gamma = self._table_beside(input, gamma)
        found: type = type(self.linear)
        if not issubclass(found, nn.Linear):
            raise TypeError(
                f"{self._name}: linear must be an nn.Linear, got {found.__module__}.{found.__name__}, whose output is "
                "not given by its weight; leave it out of the target_modules of an adapter, or use a loss of logits"
            )
        weight: Tensor = self.linear.weight
        bias: Tensor | None = self.linear.bias
        if self.out_features:
            weight = weight.reshape(self.num_classes, *self.out_features, self.in_features)
            bias = None if bias is None else bias.reshape(self.num_classes, *self.out_features)
        return linear_focal_loss(
            input,
            weight,
            target,
            gamma,
            linear_bias=bias,
            weight=self.weight,
            ignore_index=self.ignore_index,
            reduction=self.reduction,
            label_smoothing=self.label_smoothing,
            detach_modulation=self.detach_modulation,
            modulation=self.modulation,
            chunk_rows=self.chunk_rows,
            softcap=self.softcap,
            **self._extras(),
        )

    def logits(self, input: Tensor) -> Tensor:
        """All logits at once, for inference.

        Args:
            input: features [..., D].

        Returns:
            [..., C], or [N, C, d1, ...] for a K-dimensional head; capped if the loss has a softcap.

        Raises:
            RuntimeError: shapes or dtypes that do not fit, as ``torch.nn.Linear``.
        """
        z: Tensor = self.linear(input)
        if self.out_features:
            z = z.reshape(*input.shape[:-1], self.num_classes, *self.out_features)
        return z if self.softcap is None else self.softcap * torch.tanh(z / self.softcap)

    def _settings(self) -> dict[str, object]:
        shown: dict[str, object] = {}
        if self.out_features:
            shown["out_features"] = self.out_features
        for name in ("chunk_rows", "softcap"):
            if getattr(self, name) is not None:
                shown[name] = getattr(self, name)
        return {**super()._settings(), **shown}


class LinearFocalLoss(_Head, FocalLoss):
    r"""The module form of :func:`focalkern.linear_focal_loss`: a linear layer and its focal loss in one.

    .. math:: L = \mathrm{focal\_loss}(x W^\top + b, \mathrm{target}, \gamma)

    The layer is the attribute ``linear``, an ``nn.Linear``. ``torch.nn.LinearCrossEntropyLoss`` uses the same name, so
    its checkpoints load. To tie the layer to an embedding: ``criterion.linear.weight = embedding.weight``. For
    inference use :meth:`logits`.

    Args:
        in_features: D, the features of a row.
        num_classes: C.
        gamma: as in :class:`FocalLoss`.
        bias: whether the layer has a bias.
        out_features: (d1, ...) for a K-dimensional head; its logits are computed all at once.
        weight, ignore_index, reduction, label_smoothing, detach_modulation, modulation: as in
            :class:`FocalLoss`.
        chunk_rows, softcap: as in :func:`focalkern.linear_focal_loss`.
        z_loss, return_stats: as in :class:`FocalLoss`.
        device, dtype: device and dtype of the layer.

    The module is called with (input, target): features [D], [N, D] or [B, S, D], and labels of the leading shape or
    class probabilities.

    Raises:
        TypeError, ValueError: in the constructor for an argument of the wrong kind or value, in the call for a wrong
            shape.

    Source: the chunks of torch.nn.functional.linear_cross_entropy and Liger-Kernel (Hsu et al. 2024, arXiv 2410.10989);
    the loss of Lin et al. 2017 (arXiv 1708.02002).

    Example:
        >>> criterion = fk.LinearFocalLoss(in_features=4, num_classes=5, gamma=2.0)  # includes the last linear layer
        >>> hidden, target = torch.linspace(-1, 1, 8).reshape(2, 4), torch.tensor([1, 4])
        >>> loss = criterion(hidden, target)
        >>> same = fk.focal_loss(criterion.linear(hidden), target, gamma=2.0)
        >>> bool((loss - same).abs() < 1e-5), list(criterion.logits(hidden).shape)
        (True, [2, 5])
    """

    def __init__(
        self,
        in_features: int,
        num_classes: int,
        gamma: float | Tensor | GammaTable = 2.0,
        *,
        bias: bool = False,
        out_features: Sequence[int] = (),
        weight: Tensor | None = None,
        ignore_index: int = -100,
        reduction: Reduction = "mean",
        label_smoothing: float = 0.0,
        detach_modulation: bool = False,
        modulation: Modulation | None = None,
        chunk_rows: int | None = None,
        softcap: float | None = None,
        z_loss: float = 0.0,
        return_stats: bool = False,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        FocalLoss.__init__(
            self,
            gamma,
            weight,
            ignore_index=ignore_index,
            reduction=reduction,
            label_smoothing=label_smoothing,
            detach_modulation=detach_modulation,
            modulation=modulation,
            z_loss=z_loss,
            return_stats=return_stats,
        )
        self._add_head(
            in_features,
            num_classes,
            out_features=out_features,
            bias=bias,
            chunk_rows=chunk_rows,
            softcap=softcap,
            device=device,
            dtype=dtype,
        )


class LinearFLSDLoss(_Head, FLSDLoss):
    """:class:`FLSDLoss` over a linear layer: gamma is a step function of the target's probability.

    Args:
        in_features, num_classes: as in :class:`LinearFocalLoss`.
        edges, gammas: as in :class:`FLSDLoss`.
        bias, chunk_rows, softcap, device, dtype: as in :class:`LinearFocalLoss`.
        **options: weight and the other options of :class:`FLSDLoss`.

    Raises:
        TypeError, ValueError: as :class:`LinearFocalLoss` and :class:`FLSDLoss`.

    Source: Mukhoti et al. 2020 (arXiv 2002.09437), section 4; the chunks of :func:`focalkern.linear_focal_loss`.

    Example:
        >>> criterion = fk.LinearFLSDLoss(in_features=4, num_classes=5)
        >>> hidden, target = torch.linspace(-1, 1, 8).reshape(2, 4), torch.tensor([1, 4])
        >>> same = fk.FLSDLoss()(criterion.logits(hidden), target)
        >>> bool((criterion(hidden, target) - same).abs() < 1e-5)
        True
    """

    def __init__(
        self,
        in_features: int,
        num_classes: int,
        edges: Tensor | Sequence[float] = (0.0, 0.2, 1.0),
        gammas: Tensor | Sequence[float] = (5.0, 3.0),
        *,
        bias: bool = False,
        chunk_rows: int | None = None,
        softcap: float | None = None,
        device: Any = None,
        dtype: Any = None,
        **options: Any,
    ) -> None:
        FLSDLoss.__init__(self, edges, gammas, **options)
        self._add_head(
            in_features,
            num_classes,
            out_features=(),
            bias=bias,
            chunk_rows=chunk_rows,
            softcap=softcap,
            device=device,
            dtype=dtype,
        )


class LinearAdaFocalLoss(_Head, AdaFocalLoss):
    """:class:`AdaFocalLoss` over a linear layer: one gamma per bin of confidence, adapted to validation samples.

    ``accumulate`` and ``update`` take features [D], [N, D] or [B, S, D], not logits as in :class:`AdaFocalLoss`. They
    too compute the logits chunk by chunk.

    Args:
        in_features, num_classes, bias, chunk_rows, softcap, device, dtype: as in :class:`LinearFocalLoss`.
        **options: n_bins, lam and the other options of :class:`AdaFocalLoss`.

    Raises:
        TypeError, ValueError: as :class:`LinearFocalLoss` and :class:`AdaFocalLoss`.

    Source: Ghosh, Schaaf & Gormley, NeurIPS 2022; the chunks of :func:`focalkern.linear_focal_loss`.

    Example:
        >>> criterion = fk.LinearAdaFocalLoss(in_features=4, num_classes=5, n_bins=3)
        >>> hidden, target = torch.linspace(-1, 1, 24).reshape(6, 4), torch.tensor([0, 1, 2, 3, 4, 0])
        >>> criterion(hidden, target).backward()  # in training
        >>> criterion.accumulate(hidden, target)  # for each validation batch
        >>> record = criterion.update()  # once after validation
        >>> record.count.tolist(), list(criterion.logits(hidden).shape)
        ([2, 2, 1], [6, 5])
    """

    def __init__(
        self,
        in_features: int,
        num_classes: int,
        *,
        bias: bool = False,
        chunk_rows: int | None = None,
        softcap: float | None = None,
        device: Any = None,
        dtype: Any = None,
        **options: Any,
    ) -> None:
        AdaFocalLoss.__init__(self, **options)
        self._add_head(
            in_features,
            num_classes,
            out_features=(),
            bias=bias,
            chunk_rows=chunk_rows,
            softcap=softcap,
            device=device,
            dtype=dtype,
        )

    def _validation_samples(self, method: str, logits: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        op, input = f"{self._name}.{method}", logits
        for name, value in (("input", input), ("target", target)):
            if not isinstance(value, Tensor):
                raise TypeError(f"{op}: {name} must be a tensor, got {type(value).__name__}")
        if input.dim() < 1 or input.shape[-1] != self.in_features:
            raise ValueError(f"{op}: input must be [..., D] with D = {self.in_features}, got {list(input.shape)}")
        if target.shape != input.shape[:-1]:
            raise ValueError(f"{op}: target must be {list(input.shape[:-1])}, got {list(target.shape)}")
        expected = self.linear.weight.dtype
        if input.dtype != expected and not autocast_is_on(input.device.type):
            raise TypeError(f"{op}: input must have the dtype of the layer, {expected}, got {input.dtype}")
        rows, labels = input.reshape(-1, self.in_features), target.reshape(-1)
        check_pair(op, self.logits(rows[:0]), labels[:0], input_name="logits", labels_only=True)
        check_range(op, labels, self.num_classes, self.ignore_index)
        size = self.chunk_rows or default_chunk_rows(len(rows), self.in_features, self.num_classes, rows.element_size())
        parts = [self._top(self.logits(x), y) for x, y in zip(rows.split(size), labels.split(size), strict=True)]
        confidence, correct = (torch.cat(values) for values in zip(*parts, strict=True))
        return sound(op, confidence, correct)
