"""Bootstrap intervals of the scores, paired differences, and bias floors."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor

from focalkern.bootstrap import BiasFloor, PairedBootstrap, bias_floor, paired_bootstrap
from focalkern.study.results import CalibratorResult, Intervals
from focalkern.study.samples import CALIBRATION_ERRORS, SCORES, Samples
from focalkern.study.scores import confidences, log_probabilities

__all__ = ["DEFAULT_RESAMPLES", "bootstrap_intervals", "default_resamples"]

DEFAULT_RESAMPLES = 200
_MOST_RESAMPLED_ROWS = 200_000
# In memory every score is resampled; above this number of probabilities (N times C) that takes minutes.
_MOST_RESAMPLED_NUMBERS = 20_000_000


def default_resamples(samples: Samples) -> int:
    """200, which takes about as long as the search; 0 if a bootstrap would take minutes."""
    few = samples.keeps_confidences and len(samples) <= _MOST_RESAMPLED_ROWS
    if samples.memory is not None:
        few = few and samples.memory.input.numel() <= _MOST_RESAMPLED_NUMBERS
    return DEFAULT_RESAMPLES if few else 0


def bootstrap_intervals(
    results: Sequence[CalibratorResult], samples: Samples, n_bins: int, resamples: int, seed: int
) -> Intervals:
    """The intervals of the results on ``samples``, and of their differences from the baselines."""
    calibrators: dict[str, Any] = {}
    names: list[str | None] = []
    for result in results:
        if result.test is None:
            names.append(None)
            continue
        name = f"gamma = {result.gamma!r}, T = {result.temperature!r}{' + bins' if result.binning else ''}"
        if _is_other(result):
            name = f"candidate {result.method}"
        calibrators[name] = result.calibrator
        names.append(name)
    # numpy rejects negative seeds
    options: Any = {"n_bins": n_bins, "n_resamples": resamples, "seed": seed % 2**63}
    resample = _resample_confidences if samples.memory is None else _resample_probabilities
    bootstrap, floors = resample(samples, calibrators, options)
    return Intervals(
        names=tuple(names),
        bootstrap=bootstrap,
        floors=tuple(None if name is None else floors[name] for name in names),
        baseline=baselines_of(results),
        binned=any(result.binning for result in results),
        others=any(_is_other(one) and one.method != "temperature" for one in results),
    )


def baselines_of(results: Sequence[CalibratorResult]) -> tuple[int | None, ...]:
    """For each result, the index of its baseline, the result with which it is compared."""
    places = {(one.method, one.criterion, one.search, one.binning is None): i for i, one in enumerate(results)}
    temperature_scaling: dict[str | None, int] = {}
    for i, one in enumerate(results):
        if one.method == "temperature" and one.binning is None:
            temperature_scaling.setdefault(one.criterion, i)
            if one.cross_validated:
                temperature_scaling[None] = i  # candidates of other classes have no criterion

    def baseline_of(result: CalibratorResult) -> int | None:
        if result.binning is not None and result.scaling is not None:
            return places[result.method, result.criterion, result.search, True]
        without_search = {"none": None, "temperature": 0, "histogram": 0}
        scaled = temperature_scaling.get(result.criterion, temperature_scaling.get(None))
        return without_search.get(result.method, scaled)

    return tuple(map(baseline_of, results))


def _is_other(result: CalibratorResult) -> bool:
    return result.binning is None and not result.is_scaling


_Resampled = tuple[PairedBootstrap, dict[str, dict[str, BiasFloor]]]


def _resample_confidences(samples: Samples, calibrators: Mapping[str, Any], options: dict[str, Any]) -> _Resampled:
    """Bootstrap of accuracy and ECE only: for samples in files, probabilities of other classes are not kept."""
    found = {name: confidences(samples, one, options["n_bins"]) for name, one in calibrators.items()}
    confidence = {name: one for name, (one, _) in found.items()}
    correct = {name: one for name, (_, one) in found.items()}
    bootstrap = paired_bootstrap(confidence=confidence, correct=correct, **options)
    return bootstrap, {name: bias_floor(confidence=one, **options) for name, one in confidence.items()}


def _resample_probabilities(samples: Samples, calibrators: Mapping[str, Any], options: dict[str, Any]) -> _Resampled:
    assert samples.memory is not None
    calibrated = _Calibrated(samples, calibrators)
    bootstrap = paired_bootstrap(
        calibrated,
        samples.memory.labels,
        log=True,
        correct={name: confidences(samples, one, options["n_bins"])[1] for name, one in calibrators.items()},
        figures=tuple(SCORES),
        **options,
    )
    return bootstrap, {
        name: bias_floor(calibrated[name].exp_(), figures=CALIBRATION_ERRORS, **options) for name in calibrators
    }


class _Calibrated(Mapping[str, Tensor]):
    """Log-probabilities by name, computed on access: one tensor is in memory at a time."""

    def __init__(self, samples: Samples, calibrators: Mapping[str, Any]) -> None:
        assert samples.memory is not None
        self._input, self._kind, self._calibrators = samples.memory.input, samples.kind, calibrators

    def __getitem__(self, name: str) -> Tensor:
        return log_probabilities(self._calibrators[name], self._input, self._kind)

    def __iter__(self) -> Iterator[str]:
        return iter(self._calibrators)

    def __len__(self) -> int:
        return len(self._calibrators)
