"""The study of ``focalkern calibrate``: search the grid, compare calibrators, and report the result."""

from focalkern.calibrators import CANDIDATES
from focalkern.study.apply import apply_calibrator
from focalkern.study.card import calibrator_card
from focalkern.study.compare import compare_calibrators, run_study
from focalkern.study.distributed import Processes, Progress
from focalkern.study.evaluate import Evaluation, evaluate_rows
from focalkern.study.partitions import share_rows
from focalkern.study.report.export import to_json
from focalkern.study.report.page import cells_of, python_lines, write_report
from focalkern.study.report.tables import describe, format_table
from focalkern.study.results import CalibratorResult, Comparison, Intervals
from focalkern.study.samples import (
    MOST_KEPT,
    SCORES,
    MemorySamples,
    Samples,
    StreamedSamples,
    as_samples,
    stream_sets,
    wants_streaming,
)
from focalkern.study.study import Predictor, Study
from focalkern.study.sweep import Sweep

__all__ = [
    "CANDIDATES",
    "MOST_KEPT",
    "SCORES",
    "CalibratorResult",
    "Comparison",
    "Evaluation",
    "Intervals",
    "MemorySamples",
    "Predictor",
    "Processes",
    "Progress",
    "Samples",
    "StreamedSamples",
    "Study",
    "Sweep",
    "apply_calibrator",
    "as_samples",
    "calibrator_card",
    "cells_of",
    "compare_calibrators",
    "describe",
    "evaluate_rows",
    "format_table",
    "python_lines",
    "run_study",
    "share_rows",
    "stream_sets",
    "to_json",
    "wants_streaming",
    "write_report",
]
