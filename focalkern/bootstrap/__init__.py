r"""Precision of a metric: paired bootstrap intervals, and the calibration error of a perfectly calibrated model.

Each resample draws N of the N rows with replacement, and every metric is recomputed on it. All calibrators get the same
resamples (they depend only on N and the seed), so the interval of a *difference* between two calibrators does not
contain the sampling error that they share.

Intervals of calibration errors
-------------------------------
ECE cannot be negative, so noise raises it: a perfectly calibrated model has an ECE above 0, which grows as the rows per
bin become fewer (:func:`bias_floor` computes it). Resampling adds the same noise again, so the replicates of an ECE lie
above the ECE itself. If the true ECE (for infinitely many rows) is small, the plain quantiles hardly ever contain it.
``method`` chooses the correction, with t the metric on the original rows:

``"symmetric"`` (default)
    t -+ the ``level`` quantile of \|replicate - t\|. The interval contains t, and noise and bias widen both sides. The
    interval of a difference excludes 0 only if the difference exceeds the effect of resampling. It is conservative for
    small calibration errors. For large ones, and for means (accuracy, NLL, Brier score), it agrees with the others.
``"basic"``
    [2 t - high quantile, 2 t - low quantile]: subtracts the bias of resampling from t. It covers the ECE of infinitely
    many rows best, but it may lie below t, and for two equally good calibrators it reports a difference far too often.
``"percentile"``
    The quantiles of the replicates.

A bias-corrected (BCa) interval is not offered: its correction uses the number of replicates below t, which is almost 0
for a small ECE.

For a perfectly calibrated model no method contains 0 as often as it should, because the bootstrap fails at the boundary
of a metric's range. :meth:`BiasFloor.p_value` tests this case. For the same reason the estimated difference between a
calibrated and a miscalibrated model is too small, so the comparison is conservative. If the confidences of two
calibrators differ in sharpness, their bias floors differ too, and this changes the difference of their ECEs: compare
ECEs and floors. ``python -m benchmarks.speed.bootstrap`` measures these effects.

If all rows are correct, or all are wrong, no resample differs in accuracy, and the interval of the accuracy is the
exact one of Clopper and Pearson (1934).

Equal-mass bins are recomputed in every resample; equal-width bins are fixed.

Sources: Efron & Tibshirani, "An Introduction to the Bootstrap", 1993; Davison & Hinkley, "Bootstrap Methods and their
Application", 1997, section 5.2 (the basic interval); Hall 1988, "On symmetric bootstrap confidence intervals"; Kumar,
Liang & Ma 2019 (arXiv 1909.10155) and Roelofs et al. 2022 (arXiv 2012.08668) on the bias of ECE; Broecker & Smith,
"Increasing the Reliability of Reliability Diagrams", 2007 (the error of a calibrated model, by sampling the outcomes
from the forecasts).
"""

from focalkern.bootstrap._bias_floor import BiasFloor, bias_floor
from focalkern.bootstrap._figures import FIGURES
from focalkern.bootstrap._intervals import METHODS, Interval, PairedBootstrap, paired_bootstrap

__all__ = ["FIGURES", "METHODS", "BiasFloor", "Interval", "PairedBootstrap", "bias_floor", "paired_bootstrap"]
