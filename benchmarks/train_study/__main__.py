"""python -m benchmarks.train_study: trains a network per loss and seed and follows how well calibrated it is."""

import argparse
import sys
from pathlib import Path

import torch
from tqdm import tqdm

from benchmarks.train_study import data, networks, objectives, records, report, sweep, training
from benchmarks.train_study.errors import StudyError

# The options that go into training.Settings under the same name.
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
_QUICK_LOSSES = ("cross-entropy", "focal-3")


def main(argv: list[str] | None = None) -> int:
    arguments = _parser().parse_args(argv)
    try:
        return _report(arguments) if arguments.command == "report" else _train(arguments)
    except StudyError as error:
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
        default=list(objectives.ALL),
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
    parser.add_argument("--batch-size", type=int, default=128)
    parser.add_argument("--lr", type=float, default=0.1)
    parser.add_argument("--momentum", type=float, default=0.9)
    parser.add_argument("--weight-decay", type=float, default=5e-4)
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
    if arguments.quick:
        arguments.losses, arguments.seeds, arguments.epochs = list(_QUICK_LOSSES), [0], 2
    losses = [objectives.canonical(name) for name in arguments.losses]
    torch.set_num_threads(arguments.threads)
    dataset = data.load(arguments.data)
    settings = training.Settings(
        data=dataset.fingerprint(),
        network=arguments.network or ("text-cnn" if dataset.n_tokens else "small-cnn"),
        **{name: getattr(arguments, name) for name in _SETTINGS},
    )
    networks.build(settings.network, dataset, settings.width)  # what does not fit is said before anything is written
    if arguments.command == "sweep":
        plan = sweep.plan(dataset, settings, arguments.sizes)
        todo = [(one, sweep.folder_of(arguments.out, one), names) for one, names in plan.items()]
    else:
        todo = [(settings, arguments.out, losses)]
    for one, out, _ in todo:
        one.claim(out)
    failed = sum(_train_all(dataset, one, names, arguments.seeds, out) for one, out, names in todo)
    return _report(arguments) or min(failed, 1)


def _report(arguments: argparse.Namespace) -> int:
    folder = arguments.report or arguments.out / "report"
    print(report.write(arguments.out, folder))
    print(f"Tables and figures: {folder}")
    return 0


def _train_all(
    dataset: data.Dataset, settings: training.Settings, losses: list[str], seeds: list[int], out: Path
) -> int:
    """Seed by seed, so that a study that is cut off compares all losses on fewer seeds."""
    wanted = [(loss, seed) for seed in seeds for loss in losses]
    diverged = []
    with tqdm(total=len(wanted), unit="run", disable=None, position=0) as runs:
        for loss, seed in wanted:
            runs.set_description(f"{loss}, seed {seed}")
            with tqdm(total=settings.epochs, unit="epoch", disable=None, position=1, leave=False) as epochs:

                def on_epoch(epoch: int, row: dict[str, float], bar: tqdm = epochs) -> None:
                    bar.update(epoch - bar.n)
                    shown = {"nll": "test_nll", "error": "test_error", "ece": "test_ece_equal_width"}
                    bar.set_postfix({name: f"{row[key]:.4f}" for name, key in shown.items()})

                try:
                    mine = training.run(dataset, settings, loss, seed, records.folder_of(out, loss, seed), on_epoch)
                except training.DivergedError as error:
                    diverged.append(f"{loss}, seed {seed}: {error}")
                    mine = False
            if mine and runs.disable:
                print(f"finished {loss}, seed {seed}", flush=True)
            runs.update()
    for line in diverged:
        print(f"train_study: diverged: {line}", file=sys.stderr)
    return len(diverged)


if __name__ == "__main__":
    sys.exit(main())
