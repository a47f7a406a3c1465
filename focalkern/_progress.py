"""The progress bar of long computations."""

import sys
from typing import Any, Self

__all__ = ["ProgressBar"]

_PATIENCE = 2.0  # seconds before the bar shows
_MANY = 100_000  # from this total on, the bar counts thousands and millions


class ProgressBar:
    """A tqdm bar on stderr that shows after two seconds.

    Args:
        total: number of units.
        description: text in front of the bar.
        unit: name of one unit.
        wanted: True shows the bar at once; None shows it after two seconds where stderr is a terminal and tqdm is
            installed; False shows none.
        done: number of units that are done already.

    Raises:
        ImportError: ``wanted`` is True and tqdm is missing.
    """

    def __init__(self, total: int, description: str, unit: str, wanted: bool | None = None, done: int = 0) -> None:
        self._bar: Any = None
        on_terminal = sys.stderr is not None and sys.stderr.isatty()
        if wanted or (wanted is None and on_terminal):
            try:
                from tqdm import tqdm
            except ImportError:
                if wanted:
                    raise ImportError("focalkern: progress=True needs tqdm: pip install tqdm") from None
            else:
                delay = 0.0 if wanted else _PATIENCE
                self._bar = tqdm(
                    total=total,
                    desc=description,
                    unit=unit,
                    unit_scale=total >= _MANY,
                    initial=done,
                    delay=delay,
                    leave=False,
                )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.close()

    def update(self, n: int) -> None:
        if self._bar is not None:
            self._bar.update(n)
