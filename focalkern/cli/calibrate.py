"""``focalkern calibrate``: choose a calibrator on validation rows, compute its metrics on test rows, save it."""

import argparse
import functools
import json
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, get_args

from focalkern import study as report
from focalkern._atomic import is_device
from focalkern.calibrators import CANDIDATES, Binning, Criterion, Search
from focalkern.calibrators._candidates import DEFAULT_CANDIDATES
from focalkern.cli._formats import FORMATS_HELP
from focalkern.cli._method import GRID, candidate_names, settle_method
from focalkern.cli._next import next_commands, print_next
from focalkern.cli._notes import print_note, with_options
from focalkern.cli._options import (
    OneOrMany,
    add_input_arguments,
    bins,
    check_out,
    check_out_folder,
    gammas_of,
    locate,
    not_negative,
    path_of,
    seconds,
    seed,
    share,
    temperature_range,
)
from focalkern.files import InputError, LogitSet, read_sets
from focalkern.files.paths import files_of
from focalkern.metrics import ESTIMATORS
from focalkern.ops.calibration_grid import PAPER_GAMMAS, PAPER_TEMPERATURES
from focalkern.study import MOST_KEPT, Processes, Progress, Samples, Study, stream_sets, wants_streaming
from focalkern.study.remarks import printed_remarks
from focalkern.study.split import select_samples

__all__ = ["add_parser"]

_EPILOG = f"""\
The validation set chooses the calibrator, the test set measures it:
  VAL holds val_* and test_*
      these two sets
  --test TEST
      validation: val_* or the only set of VAL
      test: test_* or the only set of TEST
  --split F
      validation: a random share F of the only set of VAL
      test: the other rows
  none of these
      one set for both; the verdict then begins with "Optimistic"

{FORMATS_HELP}
Data larger than memory:
  The command reads files a few rows at a time, in several passes, if they
  match a pattern (val_logits-*.npy), with --stream or --state, in several
  processes, and above an eighth of the memory. Memory then does not grow with
  the number of rows (except for --split). The search is in float32; the
  choice among the lowest ECEs and all metrics are in float64. Above 524,288
  rows the equal-mass ECE is approximate; a note states the error bound.
  torchrun shares the rows between processes, on one machine or more:
    torchrun --nproc-per-node 2 -m focalkern calibrate ...

Output:
  The verdict in three lines, a table and notes on stdout. With --json stdout
  has one JSON object, in which infinite metrics are null, and stderr has
  verdict and notes. The exit code is 0; after an error it is 2, with one line
  on stderr.

examples:
  focalkern calibrate logits.npz --out calibrator.json --report report/
  focalkern calibrate val_logits.npy --test test_logits.npy --criterion brier
  focalkern calibrate logits.npz --method focal-temperature --criterion ece
  focalkern calibrate logits.npz --search refine --binning equal_mass
  focalkern calibrate 'val-*.npy' --test 'test-*.npy' --state calibrate.state
  focalkern calibrate probs.csv --input-kind probs --split 0.5 \\
      --gammas 0 paper --temperatures 0.5:3:0.05
"""


def add_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "calibrate",
        help="choose a calibrator, measure it, and save it",
        description="Compares no calibration, temperature scaling and spline scaling (scalar,\n"
        "vector, matrix) by cross-validation on validation rows, recommends one, and\n"
        "prints the metrics of all of them and of focal temperature scaling on test\n"
        "rows.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_input_arguments(parser, "VAL", "the file of the validation rows")
    parser.add_argument(
        "--test", metavar="TEST", nargs="+", action=OneOrMany, help="the file of the test rows, or several"
    )
    parser.add_argument(
        "--test-labels", metavar="FILE.npy", nargs="+", action=OneOrMany, help="labels of a .npy TEST, or of several"
    )
    parser.add_argument("--split", type=share, metavar="F", help="share of the rows for validation, 0 < F < 1")
    parser.add_argument(
        "--seed", type=seed, default=0, help="seed of the split, the folds and the resamples (default 0)"
    )
    parser.add_argument(
        "--bootstrap",
        type=not_negative,
        metavar="N",
        help="number of bootstrap resamples of the test rows, for the intervals and marks of the table; 0 for none. "
        "The default is 200 (0 above 200,000 rows or 20 million rows x classes); use 1000 or more for a publication",
    )
    parser.add_argument(
        "--method",
        metavar="METHOD",
        choices=("auto", "focal-temperature", "temperature", "histogram"),
        help="the calibrator that --out saves. auto (default): the candidate with the lowest cross-validated loss, "
        "or a simpler one if the losses are close. temperature: T alone. focal-temperature: gamma and T, the default "
        "with --search or --binning. histogram: bins the confidence of the top class",
    )
    parser.add_argument(
        "--candidates",
        type=candidate_names,
        metavar="NAME,...",
        help=f"candidates of --method auto (default: {','.join(DEFAULT_CANDIDATES)}): any of {', '.join(CANDIDATES)}",
    )
    parser.add_argument(
        "--keep-predictions",
        action="store_true",
        help="choose only among candidates that change no predicted class: none, temperature and spline",
    )
    parser.add_argument(
        "--accept-risk",
        type=share,
        metavar="R",
        help="add a line to the verdict: the confidence above which predictions can be accepted with an error rate of "
        "at most R, such as 0.02, and their share of the test rows. The error rate has an exact binomial bound of 95%% "
        "confidence",
    )
    parser.add_argument(
        "--criterion",
        choices=get_args(Criterion),
        help="loss that chooses the calibrator (default: nll, or the loss of --search). ece is the choice of the "
        "paper: focal temperature scaling (or --method) with the lowest ECE of its grid, even if the NLL rises; --all "
        "shows it in the table",
    )
    parser.add_argument(
        "--search",
        choices=get_args(Search),
        help="how to find gamma and T of the saved calibrator. nll, brier: by derivatives, the default for these "
        "losses. grid: all cells, the default for the ECE, with --gammas, --temperatures or --binning, and for rows "
        "read in parts. refine: from coarse to fine within the bounds of the grid. line: along a line in the grid. "
        "Each search except grid adds a row to the table",
    )
    parser.add_argument(
        "--binning",
        choices=get_args(Binning),
        help="add histogram binning with --n-bins bins of this kind after the scaling of --method; without a scaling "
        "after --method histogram (default there: equal_mass). It adds a row to the table",
    )
    parser.add_argument(
        "--estimator",
        choices=ESTIMATORS,
        metavar="NAME",
        help=f"estimator of the ECE: {', '.join(ESTIMATORS)} (default: equal_mass, as in the paper, "
        "to choose; equal_width, the usual one, for the table)",
    )
    parser.add_argument("--n-bins", type=bins, default=15, help="bins of every ECE and of --binning (default 15)")
    parser.add_argument(
        "--gammas",
        nargs="+",
        metavar="G",
        default=["0", "paper"],
        help="gammas that focal temperature scaling searches, all > -1; paper stands for "
        f"{' '.join(f'{gamma:g}' for gamma in PAPER_GAMMAS)}; the first of equal optima is used "
        "(default: 0 paper). Put VAL before this option, or write --gammas=-0.5,0,1",
    )
    parser.add_argument(
        "--temperatures",
        type=temperature_range,
        metavar="LO:HI:STEP",
        default=PAPER_TEMPERATURES,
        help="multiples of STEP from LO to HI (default 0.01:5:0.01, the paper's)",
    )
    parser.add_argument(
        "--out",
        type=path_of,
        metavar="FILE.json",
        help="save the calibrator; an existing file is replaced only when the new one is complete",
    )
    parser.add_argument(
        "--report",
        type=path_of,
        metavar="DIR",
        help="write report.html (a single file that works offline), its diagrams and maps, table.csv and report.json",
    )
    parser.add_argument(
        "--all",
        action="store_true",
        help="also show every estimator of the ECE, and the ECE-optimal rows",
    )
    parser.add_argument("--json", action="store_true", help="print JSON in place of the table")
    parser.add_argument("--stream", action="store_true", help="read a few rows at a time, even if they fit into memory")
    parser.add_argument(
        "--state",
        type=path_of,
        metavar="FILE",
        help="save the search's progress, also on Ctrl-C; the same command then continues (implies --stream)",
    )
    parser.add_argument(
        "--state-every", type=seconds, default=60.0, metavar="SECONDS", help="seconds between saves (default 60)"
    )
    parser.add_argument(
        "--timeout",
        type=seconds,
        default=1800.0,
        metavar="SECONDS",
        help="longest time that a process of torchrun waits for the others (default 1800)",
    )
    parser.set_defaults(run=_run)


def _run(arguments: argparse.Namespace) -> int:
    gammas = gammas_of(arguments.gammas)
    locate(arguments, "input", "labels", "test", "test_labels")
    binning, criterion = settle_method(arguments)
    _check_outputs(arguments)
    processes = Processes(arguments.timeout)
    progress = Progress(arguments.state, arguments.state_every, processes, say=_say)
    validation, test = select_samples(
        _reader(arguments, processes, progress),
        arguments.input,
        labels=arguments.labels,
        test=arguments.test,
        test_labels=arguments.test_labels,
        split=arguments.split,
        seed=arguments.seed,
        input_kind=arguments.input_kind,
        logits_key=arguments.logits_key,
        labels_key=arguments.labels_key,
        ignore_index=arguments.ignore_index,
    )
    if arguments.bootstrap and not test.keeps_confidences:
        raise InputError(
            f"{test.source}: expected --bootstrap 0, or at most {MOST_KEPT} test rows where they are read in "
            f"parts, found {len(test)}"
        )
    if arguments.accept_risk is not None and not test.keeps_confidences:
        raise InputError(f"{test.source}: expected at most {MOST_KEPT} test rows for --accept-risk, found {len(test)}")
    if validation.memory is None and (arguments.search not in GRID or binning is not None):
        option = "--binning or --method histogram" if binning is not None else f"--search {arguments.search}"
        raise InputError(
            f"{validation.source}: expected rows in memory for {option}, found rows that are read in parts"
        )
    compared = report.run_study(
        validation,
        test,
        gammas=gammas,
        temperatures=arguments.temperatures,
        method=arguments.method,
        candidates=arguments.candidates,
        keep_predictions=arguments.keep_predictions,
        search=arguments.search,
        binning=binning,
        criterion=criterion,
        estimator=arguments.estimator or "equal_mass",
        report_estimator=arguments.estimator or "equal_width",
        n_bins=arguments.n_bins,
        resamples=arguments.bootstrap,
        seed=arguments.seed,
        accept_risk=arguments.accept_risk,
    )
    study = with_options(compared)
    cells = None if arguments.report is None else report.cells_of(study)  # all processes take part
    processes.close()
    if processes.rank > 0:
        progress.remove()
        return 0
    split = {"split": {"share": arguments.split, "seed": arguments.seed}} if arguments.split is not None else {}
    document = report.to_json(study, more=split)
    written: list[str] = []
    try:
        # Write files before printing: if the reader of stdout ends early (head), all files exist.
        _write(arguments, study, document, cells, written)
        progress.remove()  # the search is complete and its results are written
    finally:
        _show(arguments, compared, document, criterion, written)
    return 0


def _write(
    arguments: argparse.Namespace, study: Study, document: dict[str, Any], cells: Any, written: list[str]
) -> None:
    """Writes the requested files; adds a line about each to ``written``."""
    if arguments.report is not None:
        commands = next_commands(arguments)
        files = report.write_report(
            study, arguments.report, document, cells=cells, saved=arguments.out, commands=commands
        )
        pictures = sum(file.suffix == ".png" for file in files)
        others = [file.name for file in files[:-1] if file.suffix != ".png"]
        written.append(f"Report: {files[-1]}; beside it {', '.join(others)} and {pictures} pictures")
    if arguments.out is not None:
        if study.chosen is None:
            raise InputError(f"{arguments.out}: not written, because no calibrator was chosen")
        study.save(arguments.out)
        written.append(f"Calibrator: {arguments.out}")


def _show(
    arguments: argparse.Namespace, study: Study, document: dict[str, Any], criterion: Criterion, written: list[str]
) -> None:
    verdict = with_options(study).verdict  # the remarks keep their words, by which printed_remarks knows them
    if arguments.json:
        print(json.dumps(document, indent=2, allow_nan=False))
    else:
        print(verdict)
        print()
        print(study.table(all=arguments.all))
        print()
        print(report.describe(study))
        print()
    # With --json, stdout must hold only JSON, so verdict and remarks go to stderr.
    said = sys.stderr if arguments.json else sys.stdout
    if arguments.json:
        print(verdict, file=said)
    # Like the table, without --all the notes leave out the ECE-optimal rows; the JSON has all rows.
    found = study.remarks if arguments.all or arguments.json else printed_remarks(study)
    notes = [*verdict.notes(), *found]
    if study.test is study.validation:
        notes.append("--test FILE or --split 0.5 provides a separate test set.")
    for note in notes:
        print_note(note, said)
    if notes:
        print(file=said)

    if study.chosen is None:
        words = f"{criterion.upper()}-optimal {arguments.method}: the criterion is infinite in every cell"
        print(f"Nothing chosen. {words}.", file=said)
    else:
        words = study.chosen.parameters
        print(f"Chosen (->): {study.chosen.label}{', ' if words else ''}{words}", file=said)
    for line in written:
        print(line, file=said)
    all_written = len(written) == sum(given is not None for given in (arguments.report, arguments.out))
    if study.chosen is not None and all_written:
        print_next(arguments, study.validation.kind, said)


def _check_outputs(arguments: argparse.Namespace) -> None:
    """Raises, before the search, if an output cannot be written."""
    if arguments.out is not None:
        check_out(arguments.out, "--out")
        _check_not_read(arguments, arguments.out, "--out")
    if arguments.state is not None:
        check_out(arguments.state, "--state")
        if is_device(arguments.state):  # the command reads the file and removes it at the end
            raise InputError(f"{arguments.state}: expected a file for --state, found a device or a pipe")
        _check_not_read(arguments, arguments.state, "--state")
        if arguments.out is not None and arguments.state.resolve() == arguments.out.resolve():
            raise InputError(f"{arguments.state}: expected different files for --state and --out, found the same")
    if arguments.report is not None:
        check_out_folder(arguments.report, "--report")
        import matplotlib  # noqa: F401  # an extra; main reports its absence
    if not arguments.json:
        import tabulate  # noqa: F401


def _check_not_read(arguments: argparse.Namespace, file: Path, option: str) -> None:
    for source in (arguments.input, arguments.labels, arguments.test, arguments.test_labels):
        named = () if source is None or not os.path.exists(file) else files_of(source)
        for name in named:
            if os.path.exists(name) and os.path.samefile(file, name):
                raise InputError(f"{file}: expected another file for {option}, found one that is read")


def _reader(
    arguments: argparse.Namespace, processes: Processes, progress: Progress
) -> Callable[..., Mapping[str, LogitSet | Samples]]:
    """``read_sets``, or ``stream_sets`` if samples are read in batches."""
    paths = (arguments.input, arguments.labels, arguments.test, arguments.test_labels)
    if not (arguments.stream or arguments.state is not None or processes.size > 1 or wants_streaming(paths)):
        return read_sets
    return functools.partial(stream_sets, processes=processes, progress=progress)


def _say(text: str) -> None:
    print(text, file=sys.stderr)
