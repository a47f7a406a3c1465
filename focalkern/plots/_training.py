"""The history of an AdaFocal training."""

from collections.abc import Sequence

import numpy as np
import torch
from matplotlib import colormaps
from matplotlib.cm import ScalarMappable
from matplotlib.colors import BoundaryNorm, ListedColormap
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, NullLocator

from focalkern._checks import short
from focalkern.losses import AdaFocalRecord
from focalkern.plots._figure import INK, check_title, new_figure, on_white, plain_axes, wrapped

__all__ = ["adafocal_history"]


@on_white
def adafocal_history(history: Sequence[AdaFocalRecord], *, title: str | None = None) -> Figure:
    r"""The history of AdaFocal by bin: calibration error above, gamma below, against the update.

    .. math:: E_b = \text{conf}_b - \text{acc}_b

    The figure has one line per bin, dark for low confidence and light for high confidence. A bin without validation
    samples has a gap in the upper panel and keeps its gamma in the lower panel. There the line at 0 separates the focal
    loss from the inverse focal loss.

    Args:
        history: ``AdaFocalLoss.history``; all records have the same number of bins.
        title: heading of the figure.

    Returns:
        ``matplotlib.figure.Figure``.

    Raises:
        ValueError: an empty history.
        ImportError: matplotlib is not installed (on import of this module).

    Source: Ghosh et al., NeurIPS 2022, whose figures show a few bins this way.

    Example:
        >>> criterion = fk.AdaFocalLoss(n_bins=2)
        >>> for accuracy in ([0.4, 0.6], [0.4, 0.7]):
        ...     record = criterion.update_bins([0.0, 0.5, 1.0], mean_confidence=[0.4, 0.9], accuracy=accuracy)
        >>> figure = fk.plots.adafocal_history(criterion.history)
        >>> len(figure.axes)
        3
    """
    check_title("adafocal_history", title)
    given: object = history
    listed = isinstance(given, Sequence) and not isinstance(given, str | bytes)
    if not listed or not all(isinstance(record, AdaFocalRecord) for record in history):
        raise TypeError(f"adafocal_history: history must be a list of AdaFocalRecord, got {short(history)}")
    if not history:
        raise ValueError("adafocal_history: history must have at least one update, got none")
    update = np.arange(1, len(history) + 1)
    error = torch.stack([record.confidence - record.accuracy for record in history]).numpy()
    gamma = torch.stack([record.bin_gammas for record in history]).numpy()
    n_bins = gamma.shape[1]
    figure = new_figure(width=7.2, height=6.0)
    above, below = figure.subplots(2, 1, sharex=True)
    colours = colormaps["cividis"](np.linspace(0, 0.92, n_bins))  # light yellow is not visible on white
    for b in range(n_bins):
        marker = "." if len(history) < 30 else ""
        above.plot(update, error[:, b], color=colours[b], linewidth=1.2, marker=marker)
        below.plot(update, gamma[:, b], color=colours[b], linewidth=1.2, marker=marker)
    above.set_ylabel("confidence - accuracy")
    below.set_ylabel("gamma")
    below.set_xlabel("update")
    below.xaxis.set_major_locator(MaxNLocator(integer=True))
    for axes in (above, below):
        axes.axhline(0, color=INK, linewidth=0.8, zorder=0)
        plain_axes(axes)
    shades = ScalarMappable(BoundaryNorm(np.arange(n_bins + 1) - 0.5, n_bins), ListedColormap(colours))
    bar = figure.colorbar(shades, ax=[above, below], pad=0.015, fraction=0.04, aspect=30)
    bar.ax.yaxis.set_major_locator(MaxNLocator(5, integer=True))
    bar.ax.yaxis.set_minor_locator(NullLocator())
    bar.ax.tick_params(labelsize=8.5)
    bar.set_label("bin, by confidence", fontsize=9)
    heading = title or "AdaFocal in validation, bin by bin"
    above.set_title(wrapped(heading, 0.8 * figure.get_figwidth(), 12), fontsize=12)
    return figure
