"""The study behind the command: search the grid, compare the choices, say what was found, in words and in pictures."""

from focalkern.study.apply import apply_calibrator
from focalkern.study.auto import AutoCalibrator
from focalkern.study.candidates import Choice
from focalkern.study.compare import compare_calibrators
from focalkern.study.comparison import run_study
from focalkern.study.contest import CANDIDATES
from focalkern.study.evaluate import Evaluation, evaluate_rows
from focalkern.study.memory import MemorySet, as_rows
from focalkern.study.page import cells_of, write_report
from focalkern.study.processes import Processes, Progress
from focalkern.study.record import finite_or_none, to_json
from focalkern.study.result import Predictor, Study
from focalkern.study.rows import FIGURES, Rows
from focalkern.study.streamed import MOST_KEPT, StreamedSet, stream_sets, wants_streaming
from focalkern.study.sweep import Sweep
from focalkern.study.table import format_table
from focalkern.study.trust import Trust, default_resamples
from focalkern.study.verdict import Verdict, as_sentence
from focalkern.study.words import bin_remarks, describe, read_remarks, rows_in_words

__all__ = [
    "CANDIDATES",
    "FIGURES",
    "MOST_KEPT",
    "AutoCalibrator",
    "Choice",
    "Evaluation",
    "MemorySet",
    "Predictor",
    "Processes",
    "Progress",
    "Rows",
    "StreamedSet",
    "Study",
    "Sweep",
    "Trust",
    "Verdict",
    "apply_calibrator",
    "as_rows",
    "as_sentence",
    "bin_remarks",
    "cells_of",
    "compare_calibrators",
    "default_resamples",
    "describe",
    "evaluate_rows",
    "finite_or_none",
    "format_table",
    "read_remarks",
    "rows_in_words",
    "run_study",
    "stream_sets",
    "to_json",
    "wants_streaming",
    "write_report",
]
