"""The metrics ("figures") that can be resampled, and their names in print."""

from collections.abc import Sequence

from focalkern._checks import short
from focalkern._types import LOSS_NAMES

__all__ = ["CLASSWISE", "FIGURES", "HIGHER_IS_BETTER", "NAMES_IN_WORDS", "TOP_CLASS_ONLY", "chosen_figures"]
NAMES_IN_WORDS = {
    "accuracy": "accuracy",
    **LOSS_NAMES,
    "ece_equal_width": "ECE (equal_width)",
    "ece_equal_mass": "ECE (equal_mass)",
    "ece_equal_mass_interp": "ECE (equal_mass_interp)",
    "classwise_ece_equal_width": "classwise ECE (equal_width)",
}

FIGURES = tuple(NAMES_IN_WORDS)
"""The metrics that can be resampled. For confidences without probabilities: accuracy and ECE only."""

CLASSWISE = "classwise_ece_equal_width"
TOP_CLASS_ONLY = ("accuracy", "ece_equal_width", "ece_equal_mass", "ece_equal_mass_interp")

HIGHER_IS_BETTER = ("accuracy",)


def chosen_figures(op: str, figures: Sequence[str] | None, possible: tuple[str, ...]) -> tuple[str, ...]:
    if figures is None:
        return possible
    try:
        names = (figures,) if isinstance(figures, str) else tuple(figures)
    except Exception:  # not iterable, or its class raises something else
        raise TypeError(f"{op}: figures must be a sequence of names, got {short(figures)}") from None
    for name in names:
        if not isinstance(name, str) or name not in possible:
            raise ValueError(f"{op}: figures must be from {', '.join(possible)}, got {short(name)}")
    if not names:
        raise ValueError(f"{op}: figures must name at least one of {', '.join(possible)}, got none")
    return tuple(dict.fromkeys(names))
