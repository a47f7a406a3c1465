"""Temperature scaling."""

from collections.abc import Iterable
from typing import Any

from torch import Tensor

from focalkern._types import PROPER, Criterion, Estimator, InputKind, Proper
from focalkern.calibrators._fit_data import FitData
from focalkern.calibrators._newton_search import brier_temperature, nll_temperature
from focalkern.calibrators._parameters import LOGITS, kept_axis
from focalkern.calibrators._scaling import Scaling
from focalkern.calibrators._search import Search, SearchResult

__all__ = ["TemperatureScaling"]


class TemperatureScaling(Scaling):
    r"""Temperature scaling: all logits are divided by one number.

    .. math:: \hat p = \text{softmax}(z / T)

    By default T minimises the NLL, as in Guo et al. and most libraries. The NLL is convex in 1/T, so ``fit`` finds its
    only optimum up to rounding, at any distance from 1. If no optimum exists, ``fit`` warns and ``at_border_`` gives
    the reason. If the targets are no better than chance, T is the upper of ``TEMPERATURE_BOUNDS``. If the target of
    every row has the largest logit, as on small sets of an accurate network, the NLL falls all the way to T = 0; with
    such a T, a single wrong row has a loss of thousands. The result is then the T at which the mean confidence of the N
    rows is (N + 1) / (N + 2), Laplace's estimate of the probability that the next row is correct. The same holds if the
    Brier score falls all the way to T = 0. (scikit-learn stops at exp(-10), probmetrics at exp(-16).)

    Args:
        search: ``"nll"``: Newton steps on the derivative in 1/T, inside a bracket. ``"brier"``: Newton steps in log T
            from the local minima of a coarse grid. ``"grid"``: all ``temperatures``. ``"refine"``: from coarse to fine
            between the smallest and the largest of them. None is ``"nll"`` or ``"brier"`` for that criterion if no
            temperatures are given, else ``"grid"``.
        temperatures: the grid, all > 0; None is the paper's 0.01, 0.02, ... 5. The first of equal optima is used.
        criterion: ``"nll"``, ``"brier"``, or ``"ece"``, with ``estimator`` and ``n_bins``.
        estimator: ``"equal_mass"``, ``"equal_mass_interp"`` or ``"equal_width"``; see :mod:`focalkern.metrics`.
        n_bins: bins of the ECE.
        widen: if the optimum of a grid or refinement is at an end of the axis, extend the axis, up to
            ``TEMPERATURE_BOUNDS``. The first of equal optima is used. ``fit`` warns if the optimum stays at an end.
        floor: in [0, 1): first, the probabilities p of a row become (1 - floor) p + floor / C. Forests and nearest
            neighbours give the true class probability 0 in some rows, whose NLL is infinite at every temperature; a
            floor of 0.1 / N makes it finite. With floor 0, a class that cannot occur (probability 0, a logit of -inf)
            keeps probability 0, and ``fit`` raises if it is the target.
        input_kind: ``"logits"`` or ``"probs"``; focalkern does not infer it. Without it ``fit`` rejects logits that
            look like probabilities.

    ``fit`` sets ``temperature_``, ``gamma_`` (0), ``search_`` and ``criterion_`` (of this fit), ``best_value_`` (the
    criterion at the optimum), ``n_cells_`` (number of its evaluations), ``at_border_`` (a sentence for each parameter
    whose optimum lies at a bound of the search) and, after a search on a grid, ``grid_``, the whole
    :class:`focalkern.CalibrationGrid`. It warns if the optimum lies at a bound of the search, if a target has
    probability 0, or if calibration makes the rows worse: the mean loss rises by more than a standard error. The loss
    is the criterion; for the criterion ``"ece"`` both NLL and Brier score are checked. With ``sample_weight`` a search
    on a grid takes ten times longer, and ``"equal_mass_interp"`` is not defined. The bins of ``"equal_mass"`` then hold
    equal weights, so that rows that are repeated may be divided differently.

    Raises:
        TypeError, ValueError, IndexError: in ``fit``, which checks the arguments of the constructor too.

    Source: Guo et al. 2017 (arXiv 1706.04599), section 4.2; the grid and the ECE criterion of Komisarenko & Kull 2024
    (arXiv 2408.11598), section 5.

    Example:
        >>> logits = torch.tensor([[4.0, 0.0]]).repeat(10, 1)  # class 0 with probability 0.98 in every row,
        >>> labels = torch.tensor([0] * 8 + [1] * 2)  # correct in 8 of 10 rows
        >>> calibrator = fk.TemperatureScaling().fit(logits, labels)
        >>> round(calibrator.temperature_, 4)
        2.8854
        >>> calibrator.predict_proba(logits[:1]).round(decimals=4)
        tensor([[0.8000, 0.2000]])
        >>> calibrator.as_module()(logits[:1]).exp().round(decimals=4)  # as the last layer of a network
        tensor([[0.8000, 0.2000]])
    """

    method = "temperature"
    _searches = ("grid", "refine", *PROPER)

    def __init__(
        self,
        *,
        search: Search | None = None,
        temperatures: Iterable[float] | Tensor | None = None,
        criterion: Criterion = "nll",
        estimator: Estimator = "equal_mass",
        n_bins: int = 15,
        widen: bool = False,
        floor: float = 0.0,
        input_kind: InputKind = LOGITS,
    ) -> None:
        self.search = search
        self.temperatures = kept_axis(temperatures)
        self.criterion = criterion
        self.estimator = estimator
        self.n_bins = n_bins
        self.widen = widen
        self.floor = floor
        self.input_kind = input_kind

    def _gammas(self) -> Any:
        return (0.0,)

    def _search_smooth(self, rows: FitData, criterion: Proper) -> SearchResult:
        search = nll_temperature if criterion == "nll" else brier_temperature
        return search(rows.input, rows.target, self.input_kind, rows.weight)
