"""``focalkern card``: a card for a saved calibrator."""

import argparse
import io
import sys
from typing import Any

from focalkern._atomic import write_atomically
from focalkern.cli._options import as_options, check_out, path_of, same_file
from focalkern.files import InputError
from focalkern.study import calibrator_card

__all__ = ["add_parser"]


def add_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "card",
        help="write a card for a saved calibrator: data, date, metrics, uses",
        description="Writes a card in Markdown for a calibrator that focalkern calibrate has saved:\n"
        "method, date, data, metrics with intervals, intended uses and limits.",
        epilog="example:\n  focalkern card calibrator.json --out card.md\n",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("calibrator", metavar="CALIBRATOR", help="the .json file that calibrate has saved")
    parser.add_argument(
        "--out", type=path_of, metavar="FILE.md", help="write the card into this file; without it, print the card"
    )
    parser.set_defaults(run=_run)


def _run(arguments: argparse.Namespace) -> int:
    if arguments.out is not None:
        check_out(arguments.out, "--out")
        if same_file(arguments.out, arguments.calibrator):
            raise InputError(f"{arguments.out}: expected another file for --out, found one that is read")
    card = as_options(calibrator_card(arguments.calibrator))
    if arguments.out is None:
        # Markdown in a file or pipe is UTF-8 in every locale; the terminal prints its own encoding.
        if isinstance(sys.stdout, io.TextIOWrapper) and not sys.stdout.isatty():
            sys.stdout.reconfigure(encoding="utf-8", errors="surrogateescape")
        print(card, end="")
    else:
        # A path may contain bytes that are not UTF-8.
        write_atomically(arguments.out, card.encode(errors="surrogateescape"))
        print(f"Card: {arguments.out}")
    return 0
