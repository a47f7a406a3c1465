"""Bootstrap intervals of scores, paired differences, and bias floors."""

from collections.abc import Sequence
from typing import Any

from focalkern.study.results import CalibratorResult, Intervals
from focalkern.study.samples import Samples

__all__ = ["DEFAULT_RESAMPLES", "bootstrap_intervals", "default_resamples"]

DEFAULT_RESAMPLES = 200
_MOST_RESAMPLED_ROWS = 200_000


def default_resamples(samples: Samples) -> int:
    """200, at about the cost of the search; 0 where a bootstrap would take minutes."""
    few = samples.resampled_in_seconds and len(samples) <= _MOST_RESAMPLED_ROWS
    return DEFAULT_RESAMPLES if few else 0


def bootstrap_intervals(
    results: Sequence[CalibratorResult], samples: Samples, n_bins: int, resamples: int, seed: int
) -> Intervals:
    """The intervals of the results on ``samples``, and of their differences from their baselines."""
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
    # numpy takes no negative seed.
    bootstrap, floors = samples.resampled(calibrators, n_bins=n_bins, n_resamples=resamples, seed=seed % 2**63)
    return Intervals(
        names=tuple(names),
        bootstrap=bootstrap,
        floors=tuple(None if name is None else floors[name] for name in names),
        baseline=baselines_of(results),
        binned=any(result.binning for result in results),
        others=any(_is_other(one) and one.method != "temperature" for one in results),
    )


def baselines_of(results: Sequence[CalibratorResult]) -> tuple[int | None, ...]:
    """By result, the index of the result it is compared with."""
    places = {(one.method, one.criterion, one.search, one.binning is None): i for i, one in enumerate(results)}
    temperature_scaling: dict[str | None, int] = {}
    for i, one in enumerate(results):
        if one.method == "temperature" and one.binning is None:
            temperature_scaling.setdefault(one.criterion, i)
            if one.cross_validated:
                temperature_scaling[None] = i  # candidates of another class have no criterion

    def baseline_of(result: CalibratorResult) -> int | None:
        if result.binning is not None and result.scaling is not None:
            return places[result.method, result.criterion, result.search, True]
        without_search = {"none": None, "temperature": 0, "histogram": 0}
        scaled = temperature_scaling.get(result.criterion, temperature_scaling.get(None))
        return without_search.get(result.method, scaled)

    return tuple(map(baseline_of, results))


def _is_other(result: CalibratorResult) -> bool:
    return result.binning is None and not result.is_scaling
