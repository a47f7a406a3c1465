"""python -m benchmarks.train_study: trains a network per loss and seed and records its calibration per epoch."""

import argparse
import sys
from pathlib import Path

import torch
from tqdm import tqdm

from benchmarks.train_study import data, networks, objectives, records, report, sweep, training
from benchmarks.train_study.errors import StudyError

# The options that are fields of training.Settings with the same name.
_SETTINGS = (
    "width",
    "epochs",
    "batch_size",
    "lr",
    "momentum",
    "weight_decay",
    "val_fraction",
    "train_size",
    "augment",
    "device",
)
_SEEDS = 2**31
_QUICK_LOSSES = ("cross-entropy", "focal-3")


def main(argv: list[str] | None = None) -> int:
    arguments = _parser().parse_args(argv)
    try:
        return _report(arguments) if arguments.command == "report" else _train(arguments)
    except (StudyError, OSError) as error:
        print(f"train_study: {error}", file=sys.stderr)
        return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.train_study",
        description="Trains a network per loss and seed, epoch by epoch resumable: killed at any point, the same "
        "command goes on after the last finished epoch. Started twice on the same --out, the two share the runs.",
    )
    parser.add_argument(
        "command",
        nargs="?",
        default="study",
        choices=["study", "sweep", "report"],
        help="study (default): --losses from --seeds, then the report. sweep: short runs over coefficients and sizes "
        "of the training part, then theirs. report: the tables and figures of what --out holds, be it complete or not",
    )
    parser.add_argument(
        "--data",
        default="digits",
        metavar="PATH",
        help="digits (default); a folder with the IDX files of (Fashion-)MNIST or TREC.{train,test}.all; "
        "an .npz of uint8 images and labels",
    )
    parser.add_argument(
        "--network", help=f"{', '.join(networks.NAMES)}, or another WRN (default small-cnn, text-cnn for text)"
    )
    parser.add_argument("--width", type=int, default=16, help="channels of the small CNN's first layer (default 16)")
    parser.add_argument(
        "--losses",
        nargs="+",
        metavar="LOSS",
        help=f"by default {' '.join(objectives.ALL)}; any coefficient can be written after the name",
    )
    parser.add_argument(
        "--seeds",
        nargs="+",
        type=int,
        default=[0, 1, 2],
        metavar="SEED",
        help="of weights, order and validation part (default 0 1 2)",
    )
    parser.add_argument(
        "--epochs",
        type=int,
        default=21,
        help="the steps of the learning rate scale with it (default 21; the papers' 350)",
    )
    parser.add_argument("--batch-size", type=int, default=128, help="default %(default)s")
    parser.add_argument("--lr", type=float, default=0.1, help="default %(default)s")
    parser.add_argument("--momentum", type=float, default=0.9, help="default %(default)s")
    parser.add_argument("--weight-decay", type=float, default=5e-4, help="default %(default)s")
    parser.add_argument(
        "--val-fraction", type=float, default=0.1, help="of the training part, cut off for validation (default 0.1)"
    )
    parser.add_argument("--train-size", type=int, help="train on so many of the samples that validation leaves")
    parser.add_argument("--augment", action="store_true", help="random crops and flips, as the papers on CIFAR")
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="default: torch's")
    parser.add_argument(
        "--out", type=Path, default=Path("train-study"), help="folder of the runs (default ./train-study)"
    )
    parser.add_argument("--report", type=Path, help="folder of the tables and figures (default: report, in --out)")
    parser.add_argument(
        "--sizes", nargs="+", type=int, help="sweep: of the training part (default an eighth, a third and all of it)"
    )
    parser.add_argument("--quick", action="store_true", help="two losses, one seed, two epochs: to see that it works")
    return parser


def _train(arguments: argparse.Namespace) -> int:
    if arguments.command == "sweep" and arguments.losses:
        raise StudyError("losses: the sweep has its own, got --losses")
    if arguments.command == "study" and arguments.sizes:
        raise StudyError("sizes: they are the sweep's; a study has one, --train-size")
    if arguments.threads < 1:
        raise StudyError(f"threads must be at least 1, got {arguments.threads}")
    for seed in arguments.seeds:
        if not 0 <= seed < _SEEDS:
            raise StudyError(f"seeds must be from 0 to {_SEEDS - 1}, got {seed}")
    if arguments.quick:
        arguments.losses, arguments.seeds, arguments.epochs = arguments.losses or _QUICK_LOSSES, [0], 2
    losses = list(dict.fromkeys(objectives.canonical(name) for name in arguments.losses or objectives.ALL))
    seeds = list(dict.fromkeys(arguments.seeds))
    torch.set_num_threads(arguments.threads)
    dataset = data.load(arguments.data)
    settings = training.Settings(
        data=dataset.fingerprint(),
        network=arguments.network or ("text-cnn" if dataset.n_tokens else "small-cnn"),
        **{name: getattr(arguments, name) for name in _SETTINGS},
    )
    # Errors are reported before anything is written.
    networks.build(settings.network, dataset, settings.width)
    data.split(
        dataset,
        seed=0,
        val_fraction=settings.val_fraction,
        train_size=settings.train_size,
        device=torch.device("cpu"),
    )
    for name in losses:
        objectives.build(name)
    if arguments.command == "sweep":
        plan = sweep.plan(dataset, settings, arguments.sizes)
        todo = [(one, sweep.folder_of(arguments.out, one), names) for one, names in plan.items()]
    else:
        todo = [(settings, arguments.out, losses)]
    for one, out, _ in todo:
        one.claim(out)
    diverged, left = 0, []
    for one, out, names in todo:
        more, others = _train_all(dataset, one, names, seeds, out)
        diverged, left = diverged + more, left + others
    unfinished = [folder for folder in left if not records.is_complete(folder)]
    if unfinished:
        # Another process could otherwise write its report, with fewer runs, after this one.
        print(f"{len(unfinished)} runs are with another process, which writes the report when it has them all")
        return min(diverged, 1)
    return _report(arguments) or min(diverged, 1)


def _report(arguments: argparse.Namespace) -> int:
    folder = arguments.report or arguments.out / "report"
    print(report.write(arguments.out, folder))
    print(f"Tables and figures: {folder}")
    return 0


def _train_all(
    dataset: data.Dataset, settings: training.Settings, losses: list[str], seeds: list[int], out: Path
) -> tuple[int, list[Path]]:
    """Trains seed by seed, so that an interrupted study compares all losses on fewer seeds.

    Returns the number of diverged runs, and the folders of runs that another process trains.
    """
    wanted = [(loss, seed) for seed in seeds for loss in losses]
    diverged, left = [], []
    with tqdm(total=len(wanted), unit="run", disable=None, position=0) as runs:
        for loss, seed in wanted:
            runs.set_description(f"{loss}, seed {seed}")
            folder = records.folder_of(out, loss, seed)
            with tqdm(total=settings.epochs, unit="epoch", disable=None, position=1, leave=False) as epochs:

                def on_epoch(epoch: int, row: dict[str, float], bar: tqdm = epochs) -> None:
                    bar.update(epoch - bar.n)
                    shown = {"nll": "test_nll", "error": "test_error", "ece": "test_ece_equal_width"}
                    bar.set_postfix({name: f"{row[key]:.4f}" for name, key in shown.items()})

                try:
                    mine = training.run(dataset, settings, loss, seed, folder, on_epoch)
                except training.DivergedError as error:
                    diverged.append(f"{loss}, seed {seed}: {error}")
                else:
                    if not mine:
                        left.append(folder)
                    elif runs.disable:
                        print(f"finished {loss}, seed {seed}", flush=True)
            runs.update()
    for line in diverged:
        print(f"train_study: diverged: {line}", file=sys.stderr)
    return len(diverged), left


if __name__ == "__main__":
    sys.exit(main())
