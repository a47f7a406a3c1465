"""The calibration maps, the calibration error and the grid."""

from collections.abc import Sequence

import torch
from torch import Tensor

from focalkern._types import compute_dtype
from focalkern.reference._log_space import log_softmax_and_complement, number_tensor, phi_of

__all__ = [
    "assign_bins",
    "binary_focal_calibration_map",
    "calibration_error",
    "calibration_grid",
    "focal_calibration_map",
    "in_order",
    "spline_calibration_map",
]


def in_order(result: Tensor, given: Tensor) -> Tensor:
    """Corrects the rounding of ``result`` [..., C], which is an increasing function of ``given``.

    Each class gets the largest result among the classes whose ``given`` is not larger, so equal ``given`` have equal
    results. Derivatives are those of ``result``.
    """
    if torch.onnx.is_in_onnx_export():  # ONNX has no cummax, and its exponentials round differently
        return result
    value = result.detach()
    ascending, order = given.detach().sort(-1)
    goes_on = torch.nn.functional.pad(ascending[..., 1:] == ascending[..., :-1], (0, 1))
    ordered = value.gather(-1, order).cummax(-1).values
    # Of equal ones the last has the largest result, and the next result is not smaller.
    ordered = ordered.masked_fill(goes_on, torch.inf).flip(-1).cummin(-1).values.flip(-1)
    ordered = torch.zeros_like(value).scatter(-1, order, ordered)
    return torch.where(ordered == value, result, result + (ordered - value))


def focal_calibration_map(
    input: Tensor,
    gamma: float | Tensor,
    temperature: float | Tensor = 1.0,
    *,
    input_kind: str = "logits",
    log: bool = False,
) -> Tensor:
    r"""The focal calibration map of tempered probabilities.

    .. math::
        \hat p_j = \frac{q_j / G(q_j)}{\sum_k q_k / G(q_k)}, \qquad
        G(q) = (1 - q)^\gamma (1 + \gamma\phi(q)), \quad q = \mathrm{softmax}(z / T)

    computed in log space, as the log-softmax of a_j = log q_j - gamma log(1 - q_j) - log(1 + gamma phi_j). A negative
    gamma uses the same formula; it does not stand for the inverse focal loss.

    Args:
        input: [..., C] logits, or probabilities with ``input_kind="probs"``; -inf, or probability 0, is a class with
            q = 0 and output 0.
        gamma: a number or a tensor broadcastable to [...], > -1.
        temperature: a number or a tensor broadcastable to [...], > 0.
        input_kind: ``"logits"`` or ``"probs"``. Probabilities are renormalised.
        log: return log-probabilities.

    Returns:
        [..., C] calibrated probabilities in ``input``'s dtype; NaN rows outside the domain.

    Raises:
        RuntimeError: shapes that do not fit. Nothing else is checked.

    Source: Komisarenko & Kull, ECAI 2024 (arXiv 2408.11598).

    Example:
        >>> logits = torch.tensor([2.0, 0.0, -1.0], dtype=torch.float64)
        >>> fk.reference.focal_calibration_map(logits, gamma=2.0)
        tensor([0.9895, 0.0076, 0.0029], dtype=torch.float64)
    """
    z = input.to(compute_dtype(input.dtype))
    gamma = number_tensor(gamma, z).unsqueeze(-1)
    temperature = number_tensor(temperature, z).unsqueeze(-1)

    # Impossible classes are masked before any arithmetic, so that no gradient is 0 * inf.
    if input_kind == "probs":
        absent = z == 0
        finite = torch.where(absent, 1.0, z).log()
    else:
        absent = z == -torch.inf
        finite = torch.where(absent, 0.0, z)
    log_q, log_u = log_softmax_and_complement(torch.where(absent, -torch.inf, finite / temperature))

    certain = log_u == -torch.inf  # q = 1: every other class is impossible, and the result is 1 too
    a = log_q - gamma * torch.where(certain, 0.0, log_u) - (gamma * phi_of(log_q, log_u)).log1p()
    log_p, _ = log_softmax_and_complement(a)
    log_p = in_order(log_p, finite.masked_fill(absent, -torch.inf))
    log_p = torch.where((gamma > -1) & (temperature > 0), log_p, torch.nan)
    return (log_p if log else log_p.exp()).to(input.dtype)


def spline_calibration_map(
    input: Tensor,
    temperature: float,
    floor: float,
    slope: float,
    knots: Tensor,
    values: Tensor,
    *,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    input_kind: str = "logits",
    log: bool = False,
) -> Tensor:
    r"""The map of spline scaling: a natural cubic spline of the log-odds of every class, in the softmax.

    .. math::
        \hat p = \mathrm{softmax}\big((1 + a) x + f(u) + W x + b\big)

        x = \log\big((1 - e)\, \mathrm{softmax}(z / T) + e / C\big), \quad u_j = x_j - \log \sum_{k \ne j} e^{x_k}

    With the second derivatives M of the spline at its knots, h_i = t_{i+1} - t_i and B = (u - t_i) / h_i = 1 - A,

    .. math::
        f(u) = A f_i + B f_{i+1} + \big((A^3 - A) M_i + (B^3 - B) M_{i+1}\big) h_i^2 / 6

    between t_i and t_{i+1}, and a straight line beyond the first and the last knot.

    Args:
        input: [..., C] logits, or probabilities with ``input_kind="probs"``; -inf, or probability 0, counts as e / C.
        temperature: T > 0.
        floor: e, between 0 and 1.
        slope: a.
        knots, values: [m] ascending t and f(t), m >= 3.
        weight: W [C, C], or its diagonal [C]; None is 0.
        bias: b [C]; None is 0.
        input_kind: ``"logits"`` or ``"probs"``.
        log: return log-probabilities.

    Returns:
        [..., C] calibrated probabilities in ``input``'s dtype.

    Raises:
        RuntimeError: shapes that do not fit. Nothing else is checked.

    Source: Green & Silverman, Nonparametric Regression and Generalized Linear Models, 1994, section 2.1.2.

    Example:
        >>> logits, knots = torch.tensor([2.0, 0.0, -1.0], dtype=torch.float64), torch.tensor([-2.0, -1.0, 0.0, 1.0])
        >>> fk.reference.spline_calibration_map(logits, 1.0, 1e-3, 0.0, knots, torch.zeros(4))
        tensor([0.8433, 0.1144, 0.0423], dtype=torch.float64)
        >>> fk.reference.spline_calibration_map(logits, 1.0, 1e-3, 0.0, knots, torch.tensor([0.0, 0.0, 0.1, 0.5]))
        tensor([0.9244, 0.0551, 0.0205], dtype=torch.float64)
    """
    z = input.to(compute_dtype(input.dtype))
    t, f = knots.to(z), values.to(z)
    q = ((z.log() if input_kind == "probs" else z) / temperature).softmax(-1)
    x = ((1 - floor) * q + floor / z.shape[-1]).log()
    itself = torch.eye(z.shape[-1], dtype=torch.bool, device=z.device)
    others = x.unsqueeze(-2).masked_fill(itself, -torch.inf)
    u = x - others.logsumexp(-1)

    h = t.diff()
    middle = (h[:-1] + h[1:]).diag() / 3 + h[1:-1].diag(1) / 6 + h[1:-1].diag(-1) / 6
    inner = torch.linalg.solve(middle.double(), (f.diff() / h).diff().double()).to(z)
    second = torch.cat([f.new_zeros(1), inner, f.new_zeros(1)])
    i = torch.searchsorted(t[1:-1].contiguous(), u.contiguous())
    inside = u.clamp(t[0], t[-1])
    far = (inside - t[i]) / h[i]
    near = 1 - far
    cubic = ((near**3 - near) * second[i] + (far**3 - far) * second[i + 1]) * h[i] ** 2 / 6
    curve = near * f[i] + far * f[i + 1] + cubic
    first = (f[1] - f[0]) / h[0] - h[0] * second[1] / 6
    last = (f[-1] - f[-2]) / h[-1] + h[-1] * second[-2] / 6
    curve = curve + torch.where(u < t[0], first, last) * (u - inside)

    scores = (1 + slope) * x + curve
    if weight is not None:
        scores = scores + (x * weight.to(z) if weight.dim() == 1 else x @ weight.to(z).T)
    if bias is not None:
        scores = scores + bias.to(z)
    result = scores.log_softmax(-1) if log else scores.softmax(-1)
    return result.to(input.dtype)


def binary_focal_calibration_map(
    logits: Tensor, gamma: float | Tensor, temperature: float | Tensor = 1.0, *, log_odds: bool = False
) -> Tensor:
    r"""The focal calibration map of two classes, as a function of s = (z_1 - z_0) / T.

    .. math:: g(s) = (1 + \gamma) s - \log(1 + \gamma\phi(\sigma(s))) + \log(1 + \gamma\phi(\sigma(-s)))

    Args:
        logits: any shape, the difference of the two logits.
        gamma: a number or a tensor broadcastable to ``logits``, > -1.
        temperature: a number or a tensor broadcastable to ``logits``, > 0.
        log_odds: return g(s) instead of the probability sigmoid(g(s)).

    Returns:
        The shape and dtype of ``logits``; NaN outside the domain.

    Raises:
        RuntimeError: shapes that do not fit. Nothing else is checked.

    Source: Komisarenko & Kull, ECAI 2024 (arXiv 2408.11598).

    Example:
        >>> logits = torch.tensor([0.0, 2.0], dtype=torch.float64)
        >>> fk.reference.binary_focal_calibration_map(logits, gamma=2.0)
        tensor([0.5000, 0.9955], dtype=torch.float64)
    """
    z = logits.to(compute_dtype(logits.dtype))
    gamma = number_tensor(gamma, z)
    temperature = number_tensor(temperature, z)
    s = z / temperature
    log_q, log_u = torch.nn.functional.logsigmoid(s), torch.nn.functional.logsigmoid(-s)
    g = (1 + gamma) * s - (gamma * phi_of(log_q, log_u)).log1p() + (gamma * phi_of(log_u, log_q)).log1p()
    g = torch.where((gamma > -1) & (temperature > 0), g, torch.nan)
    return (g if log_odds else g.sigmoid()).to(logits.dtype)


# ---------------------------------------------------------------------------------------------------------------------


# ---------------------------------------------------------------------------------------------------------------------
# Calibration error and the grid
# ---------------------------------------------------------------------------------------------------------------------


def assign_bins(confidence: Tensor, n_bins: int, estimator: str) -> Tensor:
    """The bin of each sample.

    ``equal_width``
        (k/M, (k+1)/M], with 0 in the first bin; the edges are rounded to the confidence's dtype.
    ``equal_mass``
        sorted ascending, ties by row, and cut into M runs whose sizes differ by at most one, the longer ones first.
    ``equal_mass_interp``
        edges interpolated between the sorted confidences at the ranks 0, N/M, 2N/M, ..., N (the last edge is the
        largest confidence) and rounded to the confidence's dtype; bins (lo, hi]. Samples at the lowest edge fall in no
        bin.

    Args:
        confidence: [N] float32 or float64.
        n_bins: M >= 1.
        estimator: one of the three names.

    Returns:
        [N] int64, -1 for samples in no bin.

    Raises:
        ValueError: another estimator.

    Example:
        >>> confidence = torch.tensor([0.2, 0.9, 0.6])
        >>> fk.reference.assign_bins(confidence, 2, "equal_width")
        tensor([0, 1, 1])
    """
    n = len(confidence)
    bins = torch.full((n,), -1, dtype=torch.int64, device=confidence.device)
    if estimator == "equal_mass":
        order = confidence.argsort(stable=True)
        begin = 0
        for b in range(n_bins):
            end = begin + n // n_bins + (1 if b < n % n_bins else 0)
            bins[order[begin:end]] = b
            begin = end
        return bins
    if estimator == "equal_width":
        edges = [torch.tensor(k / n_bins, dtype=torch.float64).to(confidence.dtype) for k in range(n_bins + 1)]
        bins[confidence == 0] = 0
    elif estimator == "equal_mass_interp":
        sorted_confidence = confidence.double().sort().values
        edges = []
        for k in range(n_bins + 1):
            rank = min(k * (n / n_bins), n - 1)  # rounded as numpy.linspace rounds it
            low = int(rank)
            high = min(low + 1, n - 1)
            edge = sorted_confidence[low] + (rank - low) * (sorted_confidence[high] - sorted_confidence[low])
            edges.append(edge.to(confidence.dtype))
    else:
        raise ValueError(
            f"assign_bins: estimator must be equal_width, equal_mass or equal_mass_interp, got {estimator!r}"
        )
    for b in range(n_bins):
        bins[(confidence > edges[b]) & (confidence <= edges[b + 1])] = b
    return bins


def calibration_error(
    confidence: Tensor, correct: Tensor, n_bins: int = 15, estimator: str = "equal_width"
) -> tuple[float, float]:
    r"""Expected and maximum calibration error, as fractions.

    .. math::
        \mathrm{ECE} = \sum_b \frac{|B_b|}{N} |\mathrm{acc}_b - \mathrm{conf}_b|, \qquad
        \mathrm{MCE} = \max_{b: |B_b| > 0} |\mathrm{acc}_b - \mathrm{conf}_b|

    Args:
        confidence: [N] float32 or float64.
        correct: [N] bool.
        n_bins: number of bins.
        estimator: see :func:`assign_bins`.

    Returns:
        (ECE, MCE); NaN for N = 0.

    Raises:
        ValueError: another estimator.

    Example:
        >>> confidence, correct = torch.tensor([0.25, 0.75, 0.75]), torch.tensor([False, True, False])
        >>> fk.reference.calibration_error(confidence, correct, n_bins=2)
        (0.25, 0.25)
    """
    n = len(confidence)
    if n == 0:
        return float("nan"), float("nan")
    bins = assign_bins(confidence, n_bins, estimator)
    ece, mce = 0.0, 0.0
    for b in range(n_bins):
        members = bins == b
        size = int(members.sum())
        if size > 0:
            gap = abs(float(correct[members].double().mean()) - float(confidence[members].double().mean()))
            ece += size / n * gap
            mce = max(mce, gap)
    return ece, mce


def calibration_grid(
    input: Tensor,
    target: Tensor,
    gammas: Tensor | Sequence[float],
    temperatures: Tensor | Sequence[float],
    *,
    n_bins: int = 15,
    criteria: Sequence[str] = ("ece", "nll"),
    estimator: str = "equal_mass",
    input_kind: str = "logits",
    ignore_index: int = -100,
) -> dict[str, Tensor]:
    """Criteria of the calibrated probabilities at every (gamma, T): one call of the map per cell.

    Args:
        input: [N, C] logits or probabilities.
        target: [N] class indices; rows equal to ``ignore_index`` are dropped.
        gammas: Gg numbers > -1.
        temperatures: Gt numbers > 0.
        n_bins: bins of ``"ece"`` and ``"mce"``.
        criteria: from ``"ece"``, ``"mce"``, ``"nll"``, ``"brier"``.
        estimator: see :func:`assign_bins`.
        input_kind: ``"logits"`` or ``"probs"``.
        ignore_index: marks rows to drop.

    Returns:
        {criterion: [Gg, Gt] float64}. The confidence of a row is its largest calibrated probability; it is correct
        when the first largest entry of ``input`` is the target.

    Raises:
        RuntimeError: shapes that do not fit.
        ValueError: another estimator.

    Example:
        >>> logits, target = 3.0 * torch.eye(3, dtype=torch.float64)[[0, 1, 2, 0]], torch.tensor([0, 1, 2, 1])
        >>> fk.reference.calibration_grid(logits, target, [0.0], [1.0, 2.0])["nll"]
        tensor([[0.8449, 0.7440]], dtype=torch.float64)
    """
    keep = target.long() != ignore_index
    input, target = input[keep], target[keep].long()
    correct = input.argmax(-1) == target
    onehot = torch.nn.functional.one_hot(target, input.shape[-1])
    tables = {name: torch.empty(len(gammas), len(temperatures), dtype=torch.float64) for name in criteria}
    for i, gamma in enumerate(gammas):
        for j, temperature in enumerate(temperatures):
            log_p = focal_calibration_map(input, float(gamma), float(temperature), input_kind=input_kind, log=True)
            p = log_p.exp()
            ece, mce = calibration_error(p.max(-1).values, correct, n_bins, estimator)
            cell = {
                "ece": ece,
                "mce": mce,
                "nll": -float(log_p.gather(-1, target.unsqueeze(-1)).double().mean()),
                "brier": float((p - onehot).double().square().sum(-1).mean()),
            }
            for name in criteria:
                tables[name][i, j] = cell[name]
    return tables
