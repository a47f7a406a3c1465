"""Statistics of every row for a trainer's log: log p, entropy, predicted class, log-sum-exp."""

from typing import NamedTuple

import torch
from torch import Tensor

from focalkern._types import compute_dtype
from focalkern.ops._collectives import all_reduce
from focalkern.ops._vocab_slices import RowStatistics, Split
from focalkern.ops.row_sums import Statistics

__all__ = ["LossStats", "LossWithStats", "no_statistics", "packed_stats", "stats_from", "stats_of"]

_NO_CLASS = 2**62


class LossStats(NamedTuple):
    r"""Statistics of each row for a trainer's log, which ``return_stats=True`` returns with the loss.

    .. math:: \log p_y, \qquad H = -\sum_j p_j \log p_j, \qquad \hat y = \arg\max_j z_j, \qquad \log\sum_j e^{z_j}

    :func:`focal_loss`, :func:`linear_focal_loss` and :func:`focal_loss_vocab_parallel` have the option. Every field has
    the shape of the unreduced loss, with any reduction, and no gradient. log p, entropy (both in nats) and the
    log-sum-exp are float32, float64 for float64 logits. Rows with ``ignore_index`` are 0, False or -1. Over ranks every
    rank has the statistics of all classes; of DTensor logits they are DTensors.

    Attributes:
        log_p: log-probability of the target.
        entropy: entropy of the softmax.
        predicted: the class with the largest logit, the first of equal ones, int64; -1 in rows with NaN.
        correct: whether it is the target, bool. For the first of equal classes it is True, for the others False.
        lse: log-sum-exp of the logits, whose square is the z-loss.
        counts: whether the label of the row is not ``ignore_index``, bool.

    Source: the fields of Liger-Kernel's CrossEntropyOutput and the metrics of TRL's SFTTrainer (entropy, accuracy).

    Example:
        >>> logits, target = torch.tensor([[2.0, 0.0, -1.0], [0.5, 1.0, 0.0]]), torch.tensor([0, 2])
        >>> loss, stats = fk.focal_loss(logits, target, return_stats=True)
        >>> stats.log_p, stats.entropy, stats.correct
        (tensor([-0.1698, -1.6803]), tensor([0.5243, 1.0202]), tensor([ True, False]))
        >>> {name: round(float(value), 4) for name, value in stats.means().items()}
        {'log_p': -0.9251, 'entropy': 0.7722, 'accuracy': 0.5, 'lse': 1.9251}
    """

    log_p: Tensor
    entropy: Tensor
    predicted: Tensor
    correct: Tensor
    lse: Tensor
    counts: Tensor

    def means(self) -> dict[str, Tensor]:
        """Means of log_p, entropy, correct ("accuracy") and lse over the rows that count, NaN over none.

        The means stay on the device, without synchronising. For means over several processes or steps, add up sums
        instead: ``stats.entropy.sum()`` and ``stats.counts.sum()``; ignored rows add 0.

        Returns:
            Tensors without dimensions, by name.

        Example:
            >>> logits, target = torch.tensor([[2.0, 0.0], [0.5, 1.0]]), torch.tensor([0, -100])
            >>> stats = fk.focal_loss(logits, target, return_stats=True).stats
            >>> stats.means()["accuracy"]
            tensor(1.)
        """
        number = self.counts.sum()
        names = {"log_p": self.log_p, "entropy": self.entropy, "accuracy": self.correct, "lse": self.lse}
        return {name: values.sum().to(self.log_p.dtype) / number for name, values in names.items()}


class LossWithStats(NamedTuple):
    """A loss and the statistics of its rows: ``loss, stats = fk.focal_loss(z, y, return_stats=True)``.

    Attributes:
        loss: as without ``return_stats``.
        stats: a :class:`LossStats`.

    Example:
        >>> found = fk.focal_loss(torch.tensor([[2.0, 0.0, -1.0]]), torch.tensor([0]), return_stats=True)
        >>> found.loss, found.stats.predicted
        (tensor(0.0041), tensor([0]))
    """

    loss: Tensor
    stats: LossStats


def stats_of(of_rows: Statistics, leading: torch.Size) -> LossStats:
    """The statistics of :func:`focalkern.ops.row_sums.row_statistics` as fields of shape ``leading``."""
    log_p, entropy, lse, predicted, correct, counts = of_rows
    stats = LossStats(log_p, entropy, predicted, correct, lse, counts)
    return stats if len(leading) == 1 else LossStats(*(field.reshape(leading) for field in stats))


def no_statistics(rows: Tensor) -> Statistics:
    """Those of rows [N, D] that are ignored, in the order of :func:`focalkern.ops.row_sums.row_statistics`."""
    number, device = rows.shape[0], rows.device  # len() would make a dynamic size a constant
    log_p, entropy, lse = (torch.zeros(number, dtype=compute_dtype(rows.dtype), device=device) for _ in range(3))
    correct, counts = (torch.zeros(number, dtype=torch.bool, device=device) for _ in range(2))
    return log_p, entropy, lse, torch.full((number,), -1, device=device), correct, counts


def packed_stats(found: tuple[Tensor, Tensor], split: Split, rows: RowStatistics) -> Tensor:
    """[4, n] in float64: log p, entropy, predicted class and log-sum-exp, 0 (-1 for the class) of ignored rows.
    ``found`` is what ``row_sums`` gives for the slice."""
    (best, rest, fall), index = found
    # With L the log-sum-exp and m the slice's largest logit, the slice has the part
    # sum_j p_j (L - z_j) = e^(m - L) (sum_j (m - z_j) e^(z_j - m) + (L - m) sum_j e^(z_j - m)) of the entropy.
    gap = rows.log_sum - (best - rows.top)
    entropy = torch.where(best == -torch.inf, 0.0, (-gap).exp() * (fall + gap * (1.0 + rest)))
    entropy = all_reduce(entropy, "sum", split.group)
    largest = all_reduce(best.clone(), "max", split.group)
    # The first of equal classes, as argmax.
    first = torch.where(best == largest, index + split.offset, _NO_CLASS)
    predicted = -all_reduce(-first, "max", split.group)
    predicted = torch.where(predicted == _NO_CLASS, -1, predicted)
    log_p = torch.nn.functional.logsigmoid(-rows.margin)
    packed = torch.stack([log_p, entropy, predicted.to(entropy.dtype), rows.lse])
    ignored = torch.tensor([0, 0, -1, 0], dtype=packed.dtype, device=packed.device).unsqueeze(1)
    return torch.where(split.counts, packed, ignored)


def stats_from(packed: Tensor, split: Split, leading: torch.Size, dtype: torch.dtype) -> LossStats:
    """The statistics [4, n] of :func:`packed_stats` as fields of shape ``leading``; ``dtype`` is that of the logits."""
    real = compute_dtype(dtype)
    predicted = packed[2].to(torch.int64)
    correct = (predicted == split.target) & split.counts
    log_p, entropy, lse = (packed[i].to(real) for i in (0, 1, 3))
    return LossStats(*(values.reshape(leading) for values in (log_p, entropy, predicted, correct, lse, split.counts)))
