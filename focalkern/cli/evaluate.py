"""``focalkern evaluate``: the figures of logits as they are, and after a saved calibrator."""

import argparse
import json
import sys
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import focalkern
from focalkern import study as report
from focalkern.calibrators import (
    Calibrator,
    FocalTemperatureScaling,
    HistogramBinning,
    MultiLabelScaling,
    TemperatureScaling,
    load_calibrator,
)
from focalkern.cli.calibrate import add_input_arguments, at_least_one
from focalkern.files import FORMATS_HELP, InputError, read_sets
from focalkern.study import Rows, StreamedSet, stream_sets, wants_streaming

__all__ = ["add_parser"]


def add_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "evaluate",
        help="print the figures of logits, before and after a saved calibrator",
        description="Accuracy, NLL, Brier score and calibration errors of every set in a file, as it is and, with "
        "--calibrator, calibrated.",
        epilog=FORMATS_HELP,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_input_arguments(parser, "LOGITS", "the file")
    parser.add_argument("--calibrator", metavar="FILE.json", help="what focalkern calibrate --out has saved")
    parser.add_argument("--n-bins", type=at_least_one, default=15, help="bins of every ECE (default 15)")
    parser.add_argument("--json", action="store_true", help="print JSON in place of the tables")
    parser.set_defaults(run=_run)


def _run(arguments: argparse.Namespace) -> int:
    if not arguments.json:
        import tabulate  # noqa: F401  # an extra; its absence is said by main
    calibrator = None if arguments.calibrator is None else load_calibrator(arguments.calibrator)
    options = {
        "labels": arguments.labels,
        "input_kind": arguments.input_kind,
        "logits_key": arguments.logits_key,
        "labels_key": arguments.labels_key,
    }
    sets: Mapping[str, Rows]
    if wants_streaming((arguments.input, arguments.labels)):
        sets = stream_sets(arguments.input, **options)
    else:
        sets = read_sets(arguments.input, **options)
    documents = []
    said = sys.stderr if arguments.json else sys.stdout
    for name, rows in sets.items():
        if calibrator is not None:
            _check(arguments.calibrator, calibrator, rows)
        table = [report.Choice("none", None, 0.0, 1.0, None, None, None)]
        binning = calibrator if isinstance(calibrator, HistogramBinning) else None
        scaling = calibrator if binning is None else binning.scaling_
        if isinstance(scaling, TemperatureScaling | FocalTemperatureScaling):
            cell = (scaling.gamma_, scaling.temperature_)
            table.append(report.Choice(scaling.method, None, *cell, None, None, None, binning=binning))
        elif binning is not None:
            table.append(report.Choice(binning.method, None, 0.0, 1.0, None, None, None, binning=binning))
        elif calibrator is not None:
            table.append(report.Choice(calibrator.method, None, None, None, None, None, None, other=calibrator))
        if isinstance(rows, StreamedSet):
            cells = [(row.gamma, row.temperature) for row in table]
            rows.measure(cells, arguments.n_bins)  # type: ignore[arg-type]  # scalings only; one pass for all
        table = [
            replace(row, report=report.figures(rows, row.gamma, row.temperature, arguments.n_bins, row.applied))
            for row in table
        ]
        remarks = report.read_remarks(rows)
        if not isinstance(rows, StreamedSet):
            remarks += report.bin_remarks(table[-1], rows)
        if arguments.json:
            documents.append(
                {
                    "source": rows.source,
                    "set": name,
                    "input_kind": rows.kind,
                    "n_samples": len(rows),
                    "n_classes": rows.n_classes,
                    "rows": [
                        {
                            "method": choice.method,
                            "binning": choice.binning.binning if choice.binning else None,
                            "gamma": choice.gamma,
                            "temperature": choice.temperature,
                            "report": report.finite_or_none(choice.report),
                        }
                        for choice in table
                    ],
                    "remarks": remarks,
                }
            )
        else:
            print(f"{report.rows_in_words(rows)}; {arguments.n_bins} bins\n")
            print(report.format_table(table))
            print()
        for remark in remarks:
            print(f"Note: {remark}\n", file=said)
    if arguments.json:
        document = {
            "focalkern": focalkern.__version__,
            "calibrator": arguments.calibrator,
            "n_bins": arguments.n_bins,
            "sets": documents,
        }
        print(json.dumps(document, indent=2, allow_nan=False))
    return 0


def _check(name: str, calibrator: Calibrator, rows: Rows) -> None:
    """Raises InputError where the calibrator cannot be applied to the rows."""
    if isinstance(calibrator, MultiLabelScaling):
        raise InputError(f"{name}: expected a calibrator of one label per row, found {calibrator.method!r}")
    if calibrator.one_logit_:
        raise InputError(f"{name}: expected a scaling for {rows.source}, found one of one logit per row")
    if isinstance(rows, StreamedSet) and not isinstance(calibrator, TemperatureScaling | FocalTemperatureScaling):
        raise InputError(
            f"{name}: expected a scaling for {rows.source}, which is read in parts, found {calibrator.method!r}"
        )
    kind = getattr(calibrator, "input_kind", rows.kind)
    if rows.kind != kind:
        raise InputError(f"{rows.source}: expected {kind}, for which {name} was fitted, found {rows.kind}")
    if rows.n_classes != calibrator.n_classes_:
        raise InputError(
            f"{rows.source}: expected the {calibrator.n_classes_} classes of {name}, found {rows.n_classes}"
        )
