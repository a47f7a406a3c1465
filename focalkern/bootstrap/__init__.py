r"""Precision of a figure: paired bootstrap intervals, and the calibration error of a perfectly calibrated model.

Each resample draws N of the N rows with replacement, and every metric is recomputed on it. All calibrators
see the same sets (the sets depend on N and the seed only), so the spread of a *difference* between two of them is free
of the luck that they share.

Intervals of calibration errors
-------------------------------
ECE cannot be negative, so noise raises it: a perfectly calibrated model scores above 0, the more the fewer rows there
are per bin (:func:`bias_floor` says how much). Resampling adds the same noise once more, so the replicates of an ECE
lie above the ECE itself. If the true ECE (for infinitely many rows) is small, the plain quantiles hardly ever contain
it. ``method`` chooses the correction, with t the metric on the original rows:

``"symmetric"`` (default)
    t -+ the ``level`` quantile of \|replicate - t\|. Both sides allow for noise and bias, so the interval contains t.
    The interval of a difference excludes 0 only if the difference exceeds the effect of resampling. It is conservative
    for small calibration errors. For large ones, and for means (accuracy, NLL, Brier score), it agrees with the others.
``"basic"``
    [2 t - high quantile, 2 t - low quantile]: subtracts the bias of resampling from t. It covers the ECE of infinitely
    many rows best, but it may lie below t, and it calls one of two equally good calibrators better far too often.
``"percentile"``
    The quantiles themselves.

There is no bias-corrected (BCa) interval: its correction is estimated by how many replicates lie below t, which for a
small ECE are next to none.

For a perfectly calibrated model none of them contains 0 as often as it should, because the bootstrap fails at the
boundary of a metric's range. :meth:`BiasFloor.p_value` tests this case. For the same reason the difference between a
calibrated and a miscalibrated model comes out too small, and its interval with it: that errs on the side of no win.
Where two calibrators differ in how sharp their confidences are, so do their floors, and with them the ECEs that are
compared: look at both. ``python -m benchmarks.speed.bootstrap`` counts all of this.

Equal-mass bins are recomputed in every resample, as for another set of rows; equal-width bins are fixed.

Sources: Efron & Tibshirani, "An Introduction to the Bootstrap", 1993; Davison & Hinkley, "Bootstrap Methods and their
Application", 1997, section 5.2 (the basic interval); Hall 1988, "On symmetric bootstrap confidence intervals"; Kumar,
Liang & Ma 2019 (arXiv 1909.10155) and Roelofs et al. 2022 (arXiv 2012.08668) on the bias of ECE; Broecker & Smith,
"Increasing the Reliability of Reliability Diagrams", 2007 (the figure of a calibrated model, by drawing the outcomes
from the forecasts).
"""

from focalkern.bootstrap._bias_floor import BiasFloor, bias_floor
from focalkern.bootstrap._figures import FIGURES
from focalkern.bootstrap._intervals import METHODS, Interval, PairedBootstrap, paired_bootstrap

__all__ = ["FIGURES", "METHODS", "BiasFloor", "Interval", "PairedBootstrap", "bias_floor", "paired_bootstrap"]
