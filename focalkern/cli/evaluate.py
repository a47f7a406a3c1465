"""``focalkern evaluate``: metrics of logits before and after a saved calibrator."""

import argparse
import json
import sys
from dataclasses import replace
from typing import Any

from focalkern._version import __version__
from focalkern.calibrators import load_calibrator
from focalkern.cli._formats import FORMATS_HELP
from focalkern.cli._notes import print_note
from focalkern.cli._options import add_input_arguments, as_options, bins, locate
from focalkern.files import InputError, read_sets
from focalkern.files.paths import NamedFiles
from focalkern.study import evaluate_rows, stream_sets, wants_streaming

__all__ = ["add_parser"]


def add_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "evaluate",
        help="print the metrics of logits, before and after a saved calibrator",
        description="Prints accuracy, NLL, Brier score and calibration errors of every set in a\n"
        "file, before and (with --calibrator) after calibration.",
        epilog=FORMATS_HELP,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_input_arguments(parser, "LOGITS", "the file")
    parser.add_argument("--calibrator", metavar="FILE.json", help="a calibrator that focalkern calibrate --out saved")
    parser.add_argument("--n-bins", type=bins, default=15, help="bins of every ECE (default 15)")
    parser.add_argument("--json", action="store_true", help="print JSON in place of the tables")
    parser.set_defaults(run=_run)


def _run(arguments: argparse.Namespace) -> int:
    if not arguments.json:
        import tabulate  # noqa: F401  # an extra; main reports its absence
    names = arguments.input.names if isinstance(arguments.input, NamedFiles) else [arguments.input]
    saved = next((name for name in names if name.endswith(".json")), None)
    if saved is not None:  # as apply takes it
        raise InputError(f"{saved}: expected a file of logits, found .json; pass a calibrator as --calibrator {saved}")
    locate(arguments, "input", "labels")
    calibrator = None if arguments.calibrator is None else load_calibrator(arguments.calibrator)
    options = {
        "labels": arguments.labels,
        "input_kind": arguments.input_kind,
        "logits_key": arguments.logits_key,
        "labels_key": arguments.labels_key,
        "ignore_index": arguments.ignore_index,
    }
    read = stream_sets if wants_streaming((arguments.input, arguments.labels)) else read_sets
    said = sys.stderr if arguments.json else sys.stdout
    documents = []
    for name, rows in read(arguments.input, **options).items():
        result = evaluate_rows(rows, calibrator, name=arguments.calibrator, n_bins=arguments.n_bins)
        found = replace(result, remarks=tuple(map(as_options, result.remarks)))
        documents.append({**found.to_dict(), "set": name})
        if not arguments.json:
            print(f"{found}\n")
        for remark in found.remarks:
            print_note(remark, said)
            print(file=said)
    if arguments.json:
        document = {
            "focalkern": __version__,
            "calibrator": arguments.calibrator,
            "n_bins": arguments.n_bins,
            "sets": documents,
        }
        print(json.dumps(document, indent=2, allow_nan=False))
    return 0
