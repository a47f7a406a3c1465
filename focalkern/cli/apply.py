"""``focalkern apply``: calibrated probabilities for rows without labels."""

import argparse
from typing import Any

from focalkern._checks import count_rows
from focalkern._types import INPUT_KINDS
from focalkern.cli._options import OneOrMany, add_storage_options, check_out, locate, path_of, same_file
from focalkern.files import InputError
from focalkern.files.paths import files_of
from focalkern.study.apply import OUTPUTS, apply_calibrator

__all__ = ["add_parser"]


def add_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "apply",
        help="write the calibrated probabilities of rows without labels",
        description="Applies a calibrator that focalkern calibrate --out saved. It needs no labels\n"
        "and ignores labels in the file. It reads .npy, .safetensors and .zarr, and\n"
        "writes .npy, a few rows at a time.",
        epilog="examples:\n"
        "  focalkern apply calibrator.json new_logits.npy --out new_probs.npy\n"
        "  focalkern apply calibrator.json 'new_logits-*.npy' --out new_probs.npy\n"
        "  focalkern apply calibrator.json new.csv --out calibrated.csv\n",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("calibrator", metavar="CALIBRATOR", help="the .json file that calibrate --out saved")
    parser.add_argument(
        "input",
        metavar="LOGITS",
        nargs="+",
        action=OneOrMany,
        help=".npz, .npy, .pt, .safetensors, .zarr, .csv, .parquet or .feather, or a URL. Several files (not .csv), a "
        "folder, a pattern or @LIST are joined in the order of their names and numbers",
    )
    add_storage_options(parser)
    parser.add_argument(
        "--out",
        type=path_of,
        metavar="FILE",
        required=True,
        help=f"{', '.join(OUTPUTS)}; an existing file is replaced only when the new one is complete",
    )
    parser.add_argument(
        "--input-kind", choices=INPUT_KINDS, help="kind of the values in LOGITS (default: from its names)"
    )
    parser.add_argument(
        "--logits-key",
        metavar="NAME",
        help="name of the array of logits; in tables, a pattern for the columns, or several: 'p_*', '*,!file'",
    )
    parser.add_argument(
        "--labels-key", metavar="NAME", help="in tables, the column of labels (default: label, labels or target)"
    )
    parser.set_defaults(run=_run)


def _run(arguments: argparse.Namespace) -> int:
    check_out(arguments.out, "--out")
    locate(arguments, "input")
    for name in [arguments.calibrator, *(files_of(arguments.input) if arguments.out.exists() else ())]:
        if same_file(arguments.out, name):
            raise InputError(f"{arguments.out}: expected another file for --out, found one that is read")
    written = apply_calibrator(
        arguments.calibrator,
        arguments.input,
        arguments.out,
        input_kind=arguments.input_kind,
        logits_key=arguments.logits_key,
        labels_key=arguments.labels_key,
    )
    for name, (n, classes, *pixels) in written.items():
        what = f"{n} images {pixels}" if pixels else count_rows(n)
        print(f"{arguments.out}: {name}, {what} of {classes} classes")
    return 0
