"""``focalkern evaluate``: the figures of logits as they are, and after a saved calibrator."""

import argparse
import json
import sys
from collections.abc import Mapping
from typing import Any

import focalkern
from focalkern import study as report
from focalkern.calibrators import FocalTemperatureScaling, HistogramBinning, TemperatureScaling, load_calibrator
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
        cells: list[tuple[str, float, float]] = [("none", 0.0, 1.0)]
        binning = calibrator if isinstance(calibrator, HistogramBinning) else None
        if calibrator is not None:
            if not isinstance(calibrator, TemperatureScaling | FocalTemperatureScaling | HistogramBinning):
                raise InputError(
                    f"{arguments.calibrator}: expected a (focal) temperature scaling or histogram binning, found "
                    f"{calibrator.method!r}"
                )
            if binning is not None and (binning.one_logit_ or isinstance(rows, StreamedSet)):
                found = "bins of one logit per row" if binning.one_logit_ else "bins, for which rows must be in memory"
                raise InputError(f"{arguments.calibrator}: expected a scaling for {rows.source}, found {found}")
            if rows.kind != calibrator.input_kind:
                raise InputError(
                    f"{rows.source}: expected {calibrator.input_kind}, for which {arguments.calibrator} was fitted, "
                    f"found {rows.kind}"
                )
            if rows.n_classes != calibrator.n_classes_:
                raise InputError(
                    f"{rows.source}: expected the {calibrator.n_classes_} classes of {arguments.calibrator}, "
                    f"found {rows.n_classes}"
                )
            scaling = calibrator.scaling_ if isinstance(calibrator, HistogramBinning) else calibrator
            cell = (0.0, 1.0) if scaling is None else (scaling.gamma_, scaling.temperature_)
            cells.append((calibrator.method if scaling is None else scaling.method, *cell))
        if isinstance(rows, StreamedSet):
            rows.measure([cell[1:] for cell in cells], arguments.n_bins)  # one pass for all
        table = [
            report.Choice(
                method=method,
                criterion=None,
                gamma=gamma,
                temperature=temperature,
                calibrator=None,
                selection=None,
                report=report.figures(rows, gamma, temperature, arguments.n_bins, bins),
                binning=bins,
            )
            for (method, gamma, temperature), bins in zip(cells, (None, binning), strict=False)
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
