"""Focal temperature scaling."""

from collections.abc import Iterable
from typing import Any, Self

from torch import Tensor

from focalkern._types import PROPER, Criterion, Estimator, InputKind, Proper
from focalkern.calibrators._fit_data import FitData
from focalkern.calibrators._newton_search import minimize_focal
from focalkern.calibrators._parameters import LOGITS, as_numbers, kept_axis
from focalkern.calibrators._scaling import Scaling
from focalkern.calibrators._search import DEFAULT_GAMMAS, Search, SearchResult

__all__ = ["FocalTemperatureScaling"]


class FocalTemperatureScaling(Scaling):
    r"""Temperature scaling followed by the focal calibration map.

    .. math:: q = \text{softmax}(z / T), \quad \hat p_j \propto \frac{q_j}{(1 - q_j)^\gamma (1 + \gamma \varphi(q_j))}

    with phi(q) = -q log q / (1 - q). gamma > 0 raises confidences, moderate ones most; gamma < 0 lowers high ones. A
    negative gamma uses the same formula; it does *not* stand for the inverse focal loss of
    :func:`focalkern.focal_loss`.

    Args:
        search:
            * ``"nll"``, ``"brier"``: the optimum of that criterion in gamma and T, found by derivatives of the map
              without a grid; gamma is from -0.99 to 100. On the rows of ``fit`` the criterion is never worse than that
              of :class:`TemperatureScaling`, whose docstring describes data without an optimum.
            * ``"grid"``: every pair of ``gammas`` and ``temperatures``.
            * ``"line"``: with m temperatures at most 3m cells: the best T at the first and at the last gamma, and m
              points of the line through both, from the smallest gamma to the largest. By default gamma = 0 is the
              first, so temperature scaling is among the cells. A line has fewer cells than a grid but takes as long,
              because a grid shares the softmax of a temperature among its gammas.
            * ``"refine"``: from coarse to fine between the ends of both axes; about 600 cells. On the networks of
              Mukhoti et al. it finds the grid's optimum, or a better one, in half the time or less.

            None is ``"nll"`` or ``"brier"`` for that criterion if no axis is given, else ``"grid"``.
        gammas: all > -1; None is :data:`DEFAULT_GAMMAS`: 0, and then the paper's nine values. gamma = 0 is temperature
            scaling, so on the rows of ``fit`` the criterion is never worse than that of a :class:`TemperatureScaling`
            with the same grid. Because 0 comes first and the first of equal optima is used, the result differs from
            temperature scaling only if it is better. ``focalkern.PAPER_GAMMAS`` is the paper's grid, without 0.
        temperatures: the grid, all > 0; the paper's 0.01, 0.02, ... 5 when None. The first of equal optima is used.
        criterion: the loss to minimise: ``"nll"``, ``"brier"``, or ``"ece"`` (the paper's). NLL and Brier score depend
            on all probabilities of a row. The ECE depends only on the confidence, and its optimum often has a higher
            NLL and Brier score than no calibration; ``fit`` then warns.
        estimator: of the ECE: ``"equal_mass"`` (the paper), ``"equal_mass_interp"`` (its published code) or
            ``"equal_width"``; see :mod:`focalkern.metrics`.
        n_bins: bins of the ECE.
        widen: if the optimum of a grid, line or refinement is at an end of an axis, extend the axis, up to
            ``GAMMA_BOUNDS`` and ``TEMPERATURE_BOUNDS``.
        floor: in [0, 1): first, the probabilities p of a row become (1 - floor) p + floor / C, so that a true class
            with probability 0 has a finite NLL.
        input_kind: ``"logits"`` or ``"probs"``; focalkern does not infer it. Without it ``fit`` raises an error for
            logits that look like probabilities.

    ``fit`` sets ``temperature_``, ``gamma_``, ``search_`` and ``criterion_`` (of this fit), ``best_value_`` (the
    criterion at the optimum), ``n_cells_`` (number of its evaluations), ``at_border_`` (a sentence for each parameter
    whose optimum lies at a bound of the search) and, after a search on a grid, ``grid_``, the whole
    :class:`focalkern.CalibrationGrid`. It warns if the optimum lies at a bound of the search, if a target has
    probability 0, or if calibration makes the rows worse: the mean loss rises by more than a standard error. The loss
    is the criterion; for the criterion ``"ece"`` both NLL and Brier score are checked. With ``sample_weight`` a search
    on a grid takes ten times longer, and ``"equal_mass_interp"`` is not defined. The bins of ``"equal_mass"`` then hold
    equal weights, so that rows that are repeated may be divided differently.

    Raises:
        TypeError, ValueError, IndexError: in ``fit``, which checks the arguments of the constructor too.

    Source: Komisarenko & Kull 2024 (arXiv 2408.11598), section 5.

    Example:
        >>> logits = torch.tensor([[4.0, 0.0], [2.0, 0.0]]).repeat(10, 1)  # confidence 0.98 and 0.88,
        >>> labels = torch.tensor([0] * 17 + [1] * 3)  # correct in 9 and in 8 of 10 rows
        >>> calibrator = fk.FocalTemperatureScaling().fit(logits, labels)
        >>> round(calibrator.gamma_, 3), round(calibrator.temperature_, 3)
        (-0.757, 1.087)
        >>> calibrator.predict_proba(logits[:2]).round(decimals=3)
        tensor([[0.9000, 0.1000],
                [0.8000, 0.2000]])
    """

    method = "focal-temperature"
    _searches = ("grid", "line", "refine", *PROPER)

    gammas: Iterable[float] | Tensor | None

    def __init__(
        self,
        *,
        search: Search | None = None,
        gammas: Iterable[float] | Tensor | None = None,
        temperatures: Iterable[float] | Tensor | None = None,
        criterion: Criterion = "nll",
        estimator: Estimator = "equal_mass",
        n_bins: int = 15,
        widen: bool = False,
        floor: float = 0.0,
        input_kind: InputKind = LOGITS,
    ) -> None:
        self.search = search
        self.gammas = kept_axis(gammas)
        self.temperatures = kept_axis(temperatures)
        self.criterion = criterion
        self.estimator = estimator
        self.n_bins = n_bins
        self.widen = widen
        self.floor = floor
        self.input_kind = input_kind

    def _gammas(self) -> Any:
        return DEFAULT_GAMMAS if self.gammas is None else as_numbers(type(self).__name__, "gammas", self.gammas)

    def _search_smooth(self, rows: FitData, criterion: Proper) -> SearchResult:
        return minimize_focal(rows.input, rows.target, self.input_kind, criterion, rows.weight, self._near)

    # Start of a search by derivatives, in place of a coarse grid. Only fit_quietly sets it, for one fit.
    _near: tuple[float, float] | None = None

    def fit_quietly(
        self,
        logits: Any,
        target: Any,
        sample_weight: Any = None,
        *,
        ignore_index: int | None = None,
        near: tuple[float, float] | None = None,
    ) -> Self:
        """:meth:`fit` without the warning, for callers that read ``warnings_``.

        Args:
            logits, target, sample_weight, ignore_index: as :meth:`fit`.
            near: (gamma, T) where a search by derivatives starts, in place of a coarse grid: the optimum of nearly the
                same rows, for example of all rows for the fit of a fold.

        Returns:
            The calibrator itself.

        Raises:
            TypeError, ValueError, IndexError: as :meth:`fit`.

        Example:
            >>> logits, labels = torch.tensor([[4.0, 0.0], [2.0, 0.0]]).repeat(10, 1), torch.tensor([0] * 17 + [1] * 3)
            >>> calibrator = fk.FocalTemperatureScaling().fit_quietly(logits, labels, near=(0.0, 2.0))
            >>> calibrator.warnings_
            ()
        """
        self._near = near
        try:
            return super().fit_quietly(logits, target, sample_weight, ignore_index=ignore_index)
        finally:
            del self._near
