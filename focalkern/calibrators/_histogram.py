"""Histogram binning on the top class, alone or after a scaling."""

from collections.abc import Mapping
from typing import Any, Literal, get_args

import numpy as np
import torch
from torch import Tensor

from focalkern._checks import MOST_BINS, counted, integer
from focalkern._types import PROPER, InputKind, compute_dtype
from focalkern.calibrators._base import Calibrator
from focalkern.calibrators._document import as_count, as_list, as_number, calibrator_from_json, nested_document
from focalkern.calibrators._fit_data import FitData
from focalkern.calibrators._histogram_module import HistogramLogProbs, bin_of, bin_top_class, cannot_occur_after, scaled
from focalkern.calibrators._modules import CalibratedLogProbs, FlooredInput, RowMap, in_each_dtype
from focalkern.calibrators._parameters import LOGITS
from focalkern.calibrators._scaling import Scaling
from focalkern.calibrators._temperature import TemperatureScaling
from focalkern.calibrators._warnings import call_with_floor, worse_than_uncalibrated

__all__ = ["Binning", "HistogramBinning"]

Binning = Literal["equal_width", "equal_mass"]
_BINNINGS: tuple[Binning, ...] = get_args(Binning)


class HistogramBinning(Calibrator):
    r"""Histogram binning of the top class: a confidence becomes the accuracy of its bin.

    .. math::
        \hat p_{top} = \text{acc}(B), \qquad \hat p_k = p_k \frac{1 - \text{acc}(B)}{1 - p_{top}} \quad (k \ne top)

    for a row whose confidence p_top lies in the bin B. The value of a bin without rows is the mean of its edges.
    A class with logit -inf or probability 0 keeps probability 0. If only one class of a row is possible, it keeps
    probability 1. A bin with accuracy 1 gives the other classes probability 0, so a wrong row in this bin has an
    infinite NLL. This is a property of the method and a reason to use few bins.

    The predicted class changes if another class gets more than acc(B); a tie does not change it. ``n_changed_`` counts
    such rows of ``fit``, and :meth:`changed` marks them in other data.

    Args:
        n_bins: M >= 1.
        binning: ``"equal_mass"``: bin k of M ends with the sorted row that reaches the share k/M of the rows (of their
            weight); the edge is half-way to the next confidence. Confidences that are equal, or differ only by
            rounding, stay together in the lower bin; a bin that gets no rows this way has width 0.
            ``"equal_width"``: (k/M, (k+1)/M].
            In both, the first bin begins at 0 and the last ends at 1.
        scaling: a :class:`TemperatureScaling` or :class:`FocalTemperatureScaling`; a copy of it is fitted on the same
            rows before the bins. None bins the uncalibrated probabilities.
        input_kind: ``"logits"`` or ``"probs"``; focalkern does not infer it. Without it ``fit`` rejects logits that
            look like probabilities. ``scaling`` must have the same value.

    ``fit`` sets ``edges_`` [M + 1] from 0 to 1, ``counts_`` [M] (rows per bin), ``values_`` [M] (calibrated
    confidences), ``n_changed_``, and ``scaling_``, the fitted copy or None.

    Raises:
        TypeError, ValueError, IndexError: in ``fit``, which checks the arguments of the constructor too.

    Source: Zadrozny & Elkan 2001; Guo et al. 2017 (arXiv 1706.04599), section 4.1; on the top class, after a scaling,
    Wang et al., NeurIPS 2021.

    Example:
        >>> logits = torch.tensor([[4.0, 0.0], [2.0, 0.0]]).repeat(10, 1)  # confidence 0.98 and 0.88,
        >>> labels = torch.tensor([0] * 17 + [1] * 3)  # correct in 9 and in 8 of 10 rows
        >>> calibrator = fk.HistogramBinning(n_bins=2).fit(logits, labels)
        >>> calibrator.predict_proba(logits[:2]).round(decimals=4)
        tensor([[0.9000, 0.1000],
                [0.8000, 0.2000]])
        >>> list(calibrator.as_module()(logits).shape)  # log-probabilities
        [20, 2]
    """

    method = "histogram"

    edges_: np.ndarray[Any, np.dtype[np.float64]]
    counts_: np.ndarray[Any, np.dtype[np.int64]]
    values_: np.ndarray[Any, np.dtype[np.float64]]
    n_changed_: int
    scaling_: Scaling | None

    def __init__(
        self,
        *,
        n_bins: int = 15,
        binning: Binning = "equal_mass",
        scaling: Scaling | None = None,
        input_kind: InputKind = LOGITS,
    ) -> None:
        self.n_bins = n_bins
        self.binning = binning
        self.scaling = scaling
        self.input_kind = input_kind

    # -- private ------------------------------------------------------------------------------------------------

    def _module(self, fused: bool = True, *, one_logit: bool = False) -> HistogramLogProbs:
        cuts, values = self.edges_[1:-1].tolist(), self.values_.tolist()
        return HistogramLogProbs(self._scaling_module(self.scaling_, fused), cuts, values, one_logit=one_logit)

    def _scaling_module(self, scaling: Scaling | None, fused: bool = True) -> CalibratedLogProbs | FlooredInput:
        if scaling is None:
            return CalibratedLogProbs(0.0, 1.0, self.input_kind, fused=fused)
        module = CalibratedLogProbs(scaling.gamma_, scaling.temperature_, self.input_kind, fused=fused)
        return FlooredInput(module, scaling.input_floor_, self.input_kind) if scaling.input_floor_ else module

    def _check_parameters(self) -> None:
        super()._check_parameters()
        name = type(self).__name__
        self._check_option("binning", _BINNINGS)
        integer(name, "n_bins", self.n_bins, 1, MOST_BINS)
        self._check_scaling(("temperature", "focal-temperature"), "a TemperatureScaling, a FocalTemperatureScaling")

    def _fit(self, rows: FitData) -> dict[str, Any]:
        input, target = rows.input, rows.target
        scaling = None
        if self.scaling is not None:
            scaling = type(self.scaling)(**self.scaling.get_params(deep=False)).fit_quietly(input, target, rows.weight)
        module = self._scaling_module(scaling)
        log_probs = scaled(module, input)
        top = input.argmax(-1, keepdim=True)
        confidence = log_probs.gather(-1, top).exp().squeeze(-1)

        n_bins = int(self.n_bins)
        if self.binning == "equal_width":
            cuts = torch.arange(1, n_bins, dtype=torch.float64) / n_bins
        else:
            ordered, order = (part.cpu() for part in confidence.to(torch.float64).sort(stable=True))
            # The row that reaches a bin's share of the weight is its last row.
            reached = (torch.ones_like(ordered) if rows.weight is None else rows.weight.cpu()[order]).cumsum(0)
            shares = torch.arange(1, n_bins, dtype=torch.float64) / n_bins * reached[-1]
            after = (torch.searchsorted(reached, shares * (1 - 1e-12)) + 1).clamp(max=len(ordered))
            # Confidences that differ by their rounding are equal, and stay together.
            equal = ordered[after - 1] * (1 + 16 * torch.finfo(confidence.dtype).eps)
            after = torch.searchsorted(ordered, equal, right=True)
            cuts = (ordered[after - 1] + torch.cat([ordered, ordered.new_ones(1)])[after]) / 2
        index = bin_of(confidence.unsqueeze(-1), cuts.to(confidence.device)).squeeze(-1).cpu()
        correct = (top.squeeze(-1) == target).to(torch.float64).cpu()
        weight = torch.ones_like(correct) if rows.weight is None else rows.weight.cpu()
        counts = torch.zeros(n_bins, dtype=torch.int64).scatter_add_(0, index, torch.ones_like(index))
        mass = torch.zeros(n_bins, dtype=torch.float64).scatter_add_(0, index, weight)
        right = torch.zeros(n_bins, dtype=torch.float64).scatter_add_(0, index, weight * correct)
        edges = torch.cat([torch.zeros(1, dtype=torch.float64), cuts, torch.ones(1, dtype=torch.float64)])
        centres = (edges[1:] + edges[:-1]) / 2
        values = torch.where(counts > 0, right / torch.where(counts > 0, mass, 1.0), centres)
        device = log_probs.device
        impossible = cannot_occur_after(module, input)
        binned = bin_top_class(log_probs, top, impossible, cuts.to(device), values.to(device), log=True)
        return {
            "edges_": edges.numpy(),
            "counts_": counts.numpy(),
            "values_": values.numpy(),
            "n_changed_": int(_has_larger_class(binned, top).sum()),
            "scaling_": scaling,
        }

    def _fit_warnings(self, rows: FitData) -> list[str]:
        warnings = []
        certain = int(((self.values_ == 1) & (self.counts_ > 0)).sum())
        if certain:
            warnings.append(
                f"all rows of {certain} of {counted(len(self.values_), 'bin')} are right, so that one mistake "
                "there makes the NLL infinite (fewer bins, n_bins, or a scaling alone)"
            )
        if self.scaling_ is not None and self.scaling_.at_border_:
            warnings.append(f"of the scaling, {self.scaling_.warnings_[0]}")  # the bound, with its remedy
        scaling = TemperatureScaling(input_kind=self.input_kind) if self.scaling is None else self.scaling
        worse = worse_than_uncalibrated(
            rows,
            self._apply,
            by=PROPER,
            input_kind=self.input_kind,
            remedy="fewer bins, n_bins, or a scaling alone",
            floor=f"scaling={call_with_floor(scaling)}",
        )
        return [*warnings, *worse]

    def _invalid_rows_are(self) -> Literal["nan"]:
        return "nan"

    def _made(self, device: torch.device) -> dict[torch.dtype, RowMap]:
        return in_each_dtype(self._module().to(device))

    def _apply(self, input: Tensor, *, log: bool) -> Tensor:
        module: RowMap = self._kept(input.device)[compute_dtype(input.dtype)]
        return module.mapped(input, log=log)

    def _predicted(self, input: Tensor) -> Tensor:
        top = input.argmax(-1, keepdim=True)
        log_probs = self._apply(input, log=True)
        return torch.where(_has_larger_class(log_probs, top), log_probs.argmax(-1), top.squeeze(-1))

    def _fitted_to_json(self) -> tuple[dict[str, Any], dict[str, Any]]:
        top = {"edges": self.edges_.tolist(), "values": self.values_.tolist()}
        if self.scaling_ is not None:
            top["scaling"] = nested_document(self.scaling_)
        return top, {"counts": self.counts_.tolist(), "n_changed": self.n_changed_}

    def _fitted_from_json(self, document: Mapping[str, Any], fit: Mapping[str, Any]) -> dict[str, Any]:
        edges = np.array([as_number("an edge", edge) for edge in as_list("edges", document["edges"])])
        values = np.array([as_number("a value", value) for value in as_list("values", document["values"])])
        counts = np.array(
            [as_count("a count", one, least=0) for one in as_list("counts", fit["counts"])], dtype=np.int64
        )
        if not len(edges) == len(values) + 1 == len(counts) + 1 >= 2:
            raise ValueError(
                f"expected M + 1 edges, M values and M counts, found {len(edges)}, {len(values)}, {len(counts)}"
            )
        if edges[0] != 0 or edges[-1] != 1 or (np.diff(edges) < 0).any():
            raise ValueError(f"expected ascending edges from 0 to 1, found {edges.tolist()}")
        if (values < 0).any() or (values > 1).any():
            raise ValueError(f"expected values in [0, 1], found {values.tolist()}")
        scaling = calibrator_from_json(document["scaling"]) if "scaling" in document else None
        if scaling is not None and not isinstance(scaling, Scaling):
            raise ValueError(f"expected a scaling before the bins, found {scaling.method!r}")
        if scaling is not None and not hasattr(scaling, "gamma_"):
            raise ValueError("expected a fitted scaling before the bins, found one without its fit")
        changed = as_count("n_changed", fit["n_changed"], least=0)
        return {"edges_": edges, "counts_": counts, "values_": values, "n_changed_": changed, "scaling_": scaling}


def _has_larger_class(log_probs: Tensor, top: Tensor) -> Tensor:
    """[...] bool: whether some class has a strictly larger probability than the top class."""
    return (log_probs > log_probs.gather(-1, top)).any(-1)
