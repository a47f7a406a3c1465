"""Class weights from class counts."""

from collections.abc import Sequence

import torch
from torch import Tensor

from focalkern._arrays import as_tensor
from focalkern._checks import number, short
from focalkern._devices import where_float64


def class_balanced_weight(counts: Tensor | Sequence[float], beta: float = 0.999) -> Tensor:
    r"""Class weights by the effective number of samples, for the ``weight`` of a loss.

    .. math:: w_c \propto \frac{1 - \beta}{1 - \beta^{n_c}}

    scaled to a mean of 1 over the classes that occur. beta = 0 gives all of them the same weight. As beta approaches 1,
    the weights approach inverse frequencies, proportional to 1 / n_c; beta = 1 gives exactly those.

    Args:
        counts: [C], the number of samples of each class, at least 0. A class without samples has weight 0.
        beta: in [0, 1]; the paper uses 0.9 to 0.9999.

    Returns:
        [C] float32 weights on the device of ``counts``, a constant. (float64 for float64 counts.)

    Raises:
        TypeError: ``counts`` is not a vector of numbers, or ``beta`` is not a number.
        ValueError: a shape other than [C], a count that is negative or not finite, no count above 0, beta outside of
            [0, 1]. Checking the counts synchronises their device.

    Source: Cui et al., Class-Balanced Loss Based on Effective Number of Samples, CVPR 2019.

    Example:
        >>> weight = fk.class_balanced_weight([1000, 100, 10], beta=0.99)
        >>> weight
        tensor([0.2301, 0.3630, 2.4068])
        >>> criterion = fk.FocalLoss(2.0, weight=weight)
    """
    op = "class_balanced_weight"
    if isinstance(beta, bool | Tensor):
        raise TypeError(f"{op}: beta must be a number, got {type(beta).__name__}")
    beta = number(op, "beta", beta)
    if not 0.0 <= beta <= 1.0:
        raise ValueError(f"{op}: beta must be in [0, 1], got {beta}")
    given = as_tensor(counts, f"{op}: counts")
    if given.dtype == torch.bool or given.is_complex():
        raise TypeError(f"{op}: counts must be numbers, got {given.dtype}")
    if given.dim() != 1:
        raise ValueError(f"{op}: counts must be [C], got {list(given.shape)}")
    n = where_float64(given).double()
    if not bool(((n >= 0) & n.isfinite()).all()):
        raise ValueError(f"{op}: counts must be finite and at least 0, got {short(counts)}")
    occurs = n > 0
    if not bool(occurs.any()):
        raise ValueError(f"{op}: at least one class must have samples")
    n = torch.where(occurs, n, 1.0)
    if beta == 1.0:
        weight = 1.0 / n
    else:
        # 1 - beta^n = -expm1(n log beta), because the difference cancels for beta near 1. The scaling cancels the
        # constant factor 1 - beta.
        log_beta = torch.tensor(beta, dtype=torch.float64).log().to(n.device)
        weight = -1.0 / torch.expm1(n * log_beta)
    weight = torch.where(occurs, weight, 0.0)
    weight = weight * (occurs.sum() / weight.sum())
    return (weight if given.dtype == torch.float64 else weight.float()).to(given.device)
