"""AutoCalibrator: the candidate chosen by cross-validation, as one calibrator with scikit-learn's interface."""

import copy
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor

from focalkern._checks import flag
from focalkern._types import PROPER, InputKind, Proper
from focalkern.calibrators._base import Calibrator
from focalkern.calibrators._candidates import as_candidates, fitted_identity, keeps_predictions, log_proba
from focalkern.calibrators._copies import HashSample
from focalkern.calibrators._cross_validation import cross_validate
from focalkern.calibrators._fit_batches import FitsBatches
from focalkern.calibrators._fit_data import FitData
from focalkern.calibrators._fitted import renamed
from focalkern.calibrators._folds import check_folds, fold_of
from focalkern.calibrators._inputs import as_scores, losses_of
from focalkern.calibrators._parameters import LOGITS
from focalkern.calibrators._row_source import RowSource, rows_of
from focalkern.calibrators._selection import CrossValidation
from focalkern.calibrators._source_selection import cross_validate_source
from focalkern.calibrators._spline import SplineScaling
from focalkern.calibrators._verdict import (
    Verdict,
    cross_validation_warnings,
    describe_copies,
    describe_evidence,
    describe_method,
    describe_predictions,
)
from focalkern.calibrators._warnings import few_by_weight

__all__ = ["AutoCalibrator"]


class AutoCalibrator(FitsBatches):
    r"""The calibrator with the lowest loss in a cross-validation on the rows of ``fit``; of equal ones the simplest.

    The rule starts with the candidate of lowest mean loss among those that change no predicted class (by default none,
    temperature and spline scaling). A richer candidate, spline-vector and then spline-matrix, replaces it if

    .. math:: \overline{l - b} < -\tfrac12\, \text{sd}(l - b) / \sqrt{N}

    with the losses l of the richer candidate and b of the current one, each on rows that its fit did not see. A
    candidate is excluded if its mean loss exceeds that of no calibration, if its optimum hits a bound of the search (on
    all rows or in a fold), or if its loss is infinite on a row. "No calibration" is excluded if a row gives probability
    0 to a class that is possible in another row. A matrix needs 3 classes and 2 rows per class. With ``sample_weight``,
    fits and means are weighted, and the standard error is that of a weighted mean, which does not depend on the scale
    of the weights. A candidate whose ``fit`` has no ``sample_weight`` is then excluded, and a warning names it.

    Args:
        candidates: as :func:`focalkern.compare_calibrators`.
        criterion: ``"nll"`` or ``"brier"``, by which the candidates are fitted and compared.
        folds: number of folds of the cross-validation, at least 2. The rows are divided at random, copies of a row
            together: ``fit`` warns if many rows are copies.
        seed: random seed of the folds.
        input_kind: ``"logits"`` or ``"probs"``. Without it ``fit`` expects logits, and raises an error if they look
            like probabilities.
        keep_predictions: only candidates that change no predicted class.

    ``fit`` sets ``chosen_`` (a name), ``calibrator_`` (fitted on all samples), ``table_`` (a list with a dictionary per
    candidate: ``name``, ``loss``, ``difference`` from the best one, its ``standard_error``, ``excluded`` and
    ``chosen``) and ``verdict_``, a :class:`focalkern.Verdict`. ``save`` writes ``calibrator_``, with the table and the
    verdict as ``"evidence"`` in the summary of its fit; ``load_calibrator`` returns that calibrator.

    Raises:
        TypeError, ValueError, IndexError: in ``fit``, which checks the arguments of the constructor too.

    Source: the one-standard-error rule of Breiman et al., Classification and Regression Trees, 1984, section 3.4.3,
    with half a standard error.

    Example:
        >>> labels = torch.arange(300) % 3
        >>> logits = 4.0 * torch.eye(3)[(labels + (torch.arange(300) >= 240)) % 3]  # right in 240 of 300 rows
        >>> calibrator = fk.AutoCalibrator().fit(logits, labels)
        >>> calibrator.chosen_
        'spline-matrix'
        >>> calibrator.predict_proba(logits[:1]).round(decimals=3)
        tensor([[0.8000, 0.0390, 0.1610]])
        >>> list(calibrator.as_module()(logits).shape)  # log-probabilities
        [300, 3]
    """

    method = "auto"

    chosen_: str
    calibrator_: Any
    table_: list[dict[str, Any]]
    verdict_: Verdict

    _about_rows: tuple[str, ...] = ()  # warnings of the cross-validation about the rows

    def __init__(
        self,
        candidates: Sequence[str] | Mapping[str, Any] | None = None,
        criterion: Proper = "nll",
        folds: int = 5,
        seed: int = 0,
        input_kind: InputKind = LOGITS,
        keep_predictions: bool = False,
    ) -> None:
        self.candidates = candidates
        self.criterion = criterion
        self.folds = folds
        self.seed = seed
        self.input_kind = input_kind
        self.keep_predictions = keep_predictions

    def as_module(self, *, fused: bool = True) -> torch.nn.Module:
        """The module of ``calibrator_``, for the layout of the input of ``fit``.

        Args:
            fused: as :meth:`TemperatureScaling.as_module`.

        Returns:
            The module, without parameters to train.

        Raises:
            NotFittedError: call ``fit`` first.
            TypeError: the chosen calibrator is not a calibrator of this library; ``fused`` is no bool.
        """
        flag(type(self).__name__, "fused", fused)
        chosen = copy.copy(self._fitted_calibrator("as_module"))  # which was fitted to rows [N, C]
        chosen.one_logit_, chosen.dense_ = self.one_logit_, self.dense_
        return chosen.as_module(fused=fused)

    # -- private ------------------------------------------------------------------------------------------------

    def _fitted_calibrator(self, what: str) -> Calibrator:
        self._check_fitted()
        if not isinstance(self.calibrator_, Calibrator):
            raise TypeError(
                f"AutoCalibrator: {what} needs a calibrator of this library, but {self.chosen_} was chosen, a "
                f"{type(self.calibrator_).__name__}"
            )
        return self.calibrator_

    def _check_parameters(self) -> None:
        super()._check_parameters()
        self._check_option("criterion", PROPER)
        check_folds("AutoCalibrator", self.folds, self.seed)
        flag("AutoCalibrator", "keep_predictions", self.keep_predictions)
        try:
            as_candidates(self.candidates, self.criterion, self.input_kind, self.keep_predictions)
        except (TypeError, ValueError) as error:
            raise type(error)(f"AutoCalibrator: {error}") from None

    def _fit(self, rows: FitData) -> dict[str, Any]:
        candidates = as_candidates(self.candidates, self.criterion, self.input_kind, self.keep_predictions)
        folds, seed = check_folds("AutoCalibrator", self.folds, self.seed)
        try:
            cross_validation = cross_validate(
                rows.input,
                rows.target,
                candidates,
                criterion=self.criterion,
                folds=folds,
                seed=seed,
                weight=rows.weight,
                only_chosen=True,
            )
        except (TypeError, ValueError) as error:
            raise renamed("AutoCalibrator", error) from None
        return self._concluded(cross_validation, rows_of(rows))

    def _fit_source(self, source: RowSource) -> dict[str, Any]:
        """Fits to rows read in batches, with the same folds as rows in memory. Candidates that need all rows in memory
        are left out."""
        candidates = as_candidates(self.candidates, self.criterion, self.input_kind, self.keep_predictions)
        folds, seed = check_folds("AutoCalibrator", self.folds, self.seed)
        brier, hashes = torch.zeros(1, dtype=torch.float64), HashSample(source.n_rows, folds, seed, source.add_up)
        for part in source.parts():
            hashes.keep(part)
            if bool((part.weight != 1).any()):
                raise ValueError("AutoCalibrator: fit_batches takes no sample_weight, got weights other than 1")
            for block in part.blocks():
                log_probs = as_scores(block.input, self.input_kind).log_softmax(-1)
                brier += losses_of(log_probs, block.target, ("brier",)).sum().cpu()
        none = fitted_identity(
            self.input_kind,
            float(source.add_up(brier)) / source.n_rows,
            n_samples=source.n_rows,
            n_classes=source.n_classes,
        )
        copies = hashes.found()
        folds = min(folds, source.n_rows) if copies is None else copies.folds
        cross_validation = cross_validate_source(
            source,
            candidates,
            none,
            copies or (lambda number: fold_of(number, source.n_rows, folds, seed)),
            folds if folds > 1 else 0,
            criterion=self.criterion,
        )
        n_copies = 0 if copies is None else copies.n_copies
        return self._concluded(replace(cross_validation, n_copies=n_copies), source)

    def _concluded(self, cross_validation: CrossValidation, source: RowSource) -> dict[str, Any]:
        winner = cross_validation.winner
        use = describe_method(winner.name)
        values = ((symbol, getattr(winner.calibrator, name, None)) for symbol, name in _SYMBOLS)
        words = [f"{symbol} = {value:.4g}" for symbol, value in values if value]
        if winner.name != "none" and words and not isinstance(winner.calibrator, SplineScaling):
            use = f"{use}, {', '.join(words)}"
        changed = torch.zeros(1, dtype=torch.float64)
        if not keeps_predictions(winner.calibrator):
            for part in source.parts():
                for block in part.blocks():
                    after = log_proba(winner.calibrator, block.input).argmax(-1)
                    changed += (after != block.input.argmax(-1)).sum().cpu()
        n_changed = int(source.add_up(changed))
        return {
            "chosen_": winner.name,
            "calibrator_": winner.calibrator,
            "table_": cross_validation.table(),
            "_about_rows": tuple(describe_copies(cross_validation)),
            "verdict_": Verdict(
                use,
                describe_evidence(cross_validation),
                "" if winner.name == "none" else describe_predictions(n_changed, source.n_rows),
                tuple(cross_validation_warnings(cross_validation)),
            ),
        }

    def _fit_warnings(self, rows: FitData) -> list[str]:
        return list(dict.fromkeys([*few_by_weight(rows), *super()._fit_warnings(rows)]))

    def _warnings_of(self, class_counts: Tensor) -> tuple[str, ...]:
        chosen = self.calibrator_.warnings_ if isinstance(self.calibrator_, Calibrator) else ()
        return (*self._about_rows, *chosen)

    def _invalid_rows_are(self) -> Literal["rejected"] | None:
        return "rejected" if isinstance(self.calibrator_, Calibrator) else None

    def _apply(self, input: Tensor, *, log: bool) -> Tensor:
        if isinstance(self.calibrator_, Calibrator):
            result: Tensor = self.calibrator_.predict_log_proba(input) if log else self.calibrator_.predict_proba(input)
            return result
        flat = log_proba(self.calibrator_, input.reshape(-1, input.shape[-1])).reshape(input.shape)
        return flat if log else flat.exp()

    def _keeps_predictions(self) -> bool:
        chosen = vars(self).get("calibrator_")  # not set before fit
        if chosen is None:
            return self.keep_predictions
        return isinstance(chosen, Calibrator) and chosen._keeps_predictions()

    def _predicted(self, input: Tensor) -> Tensor:
        if isinstance(self.calibrator_, Calibrator):
            return torch.as_tensor(self.calibrator_.predict(input), device=input.device)
        return self._apply(input, log=True).argmax(-1)

    def _document(self) -> dict[str, Any]:
        document = self._fitted_calibrator("save")._document()
        document["fit"]["evidence"] = {
            "candidates": self.table_,
            "criterion": self.criterion,
            "folds": self.folds,
            "seed": self.seed,
            "because": self.verdict_.because,
            "warnings": list(self.verdict_.warnings),
        }
        if self.classes_.dtype.kind not in "iu":
            document["fit"]["classes"] = self.classes_.tolist()
        if self.one_logit_:
            document["fit"]["one_logit"] = True
        if self.dense_:
            document["fit"]["dense"] = True
        return document


_SYMBOLS = (("gamma", "gamma_"), ("T", "temperature_"))
