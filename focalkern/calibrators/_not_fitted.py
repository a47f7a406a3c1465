"""The error of a calibrator without a fit."""

import sys
from typing import Any

__all__ = ["NotFittedError", "not_fitted"]


class NotFittedError(ValueError, AttributeError):
    """A calibrator was used before ``fit`` or ``load``; with scikit-learn imported also its ``NotFittedError``."""

    def __reduce__(self) -> tuple[Any, ...]:
        return not_fitted, self.args  # pickle does not find the class with both bases by its name


def not_fitted(words: str) -> NotFittedError:
    """The error, an instance of scikit-learn's class only if that is imported."""
    theirs = sys.modules.get("sklearn.exceptions")
    if theirs is None:  # without scikit-learn no code can expect its error
        return NotFittedError(words)
    both: type[NotFittedError] = type("NotFittedError", (NotFittedError, theirs.NotFittedError), {})
    return both(words)
