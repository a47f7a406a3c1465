"""The options of ``focalkern calibrate`` that choose the calibrator, and which of them go together."""

import argparse

from focalkern.calibrators import CANDIDATES, Binning, Criterion
from focalkern.calibrators._candidates import as_candidates, keeps_predictions
from focalkern.files import InputError

__all__ = ["GRID", "candidate_names", "settle_method"]

GRID = (None, "grid")
"""Values of --search that add no search to the grid."""


def candidate_names(text: str) -> tuple[str, ...]:
    """Parses names of candidates, separated by commas."""
    names = tuple(name.strip() for name in text.split(","))
    unknown = [name for name in names if name not in CANDIDATES]
    if unknown:
        raise argparse.ArgumentTypeError(f"expected names out of {', '.join(CANDIDATES)}, got {unknown[0]!r}")
    return names


def settle_method(arguments: argparse.Namespace) -> tuple[Binning | None, Criterion]:
    """Sets the default of ``--method``; returns the bins and the criterion, from their options or from the others.

    Raises:
        InputError: options that contradict each other.
    """
    search = arguments.search
    _check_auto(arguments)
    if arguments.method is None:
        arguments.method = "auto" if search is None and arguments.binning is None else "focal-temperature"
    method = arguments.method
    for option in ("candidates", "keep_predictions"):
        if getattr(arguments, option) and method != "auto":
            raise InputError(f"--{option.replace('_', '-')}: expected only with --method auto, found {method}")
    _check_candidates(arguments)
    if search in ("nll", "brier") and arguments.criterion not in (None, search):
        raise InputError(f"--search {search}: expected --criterion {search}, or none, found {arguments.criterion}")
    if search not in GRID and method == "histogram":
        raise InputError(f"--search {search}: expected --method focal-temperature or temperature, found {method}")
    if search == "line" and method == "temperature":
        raise InputError("--search line: expected --method focal-temperature, found temperature, which has one gamma")
    binning: Binning | None = arguments.binning or ("equal_mass" if method == "histogram" else None)
    criterion: Criterion = arguments.criterion or ("brier" if search == "brier" else "nll")
    return binning, criterion


def _check_candidates(arguments: argparse.Namespace) -> None:
    """Raises for candidates that may change predicted classes, with ``--keep-predictions``."""
    if not (arguments.keep_predictions and arguments.candidates):
        return
    made = as_candidates(tuple(CANDIDATES), "nll", "logits")
    changing = ", ".join(name for name in arguments.candidates if not keeps_predictions(made[name]))
    if changing:
        others = ", ".join(name for name, candidate in made.items() if keeps_predictions(candidate))
        raise InputError(
            f"--keep-predictions: expected only candidates that change no predicted class ({others}), "
            f"found {changing}; leave out {changing}, or --keep-predictions"
        )


def _check_auto(arguments: argparse.Namespace) -> None:
    """Raises for an option that the automatic choice would ignore."""
    if arguments.method == "auto":
        for option, value in (("--search", arguments.search), ("--binning", arguments.binning)):
            if value is not None:
                raise InputError(
                    f"{option} {value}: expected only with --method focal-temperature or temperature, found auto; "
                    f"pass --method focal-temperature, or leave out {option}"
                )
    if arguments.criterion == "ece":
        of_auto = {
            "--method auto": arguments.method == "auto",
            "--candidates": arguments.candidates,
            "--keep-predictions": arguments.keep_predictions,
        }
        for option, is_given in of_auto.items():
            if is_given:
                raise InputError(
                    f"--criterion ece: expected no {option}, because the NLL or the Brier score compares "
                    f"candidates, found both; leave out {option}, or pass --criterion nll"
                )
