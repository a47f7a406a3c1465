"""python -m benchmarks.studies.joint_focal --logits DIR: the focal map of structured scaling, fitted on top or jointly.

``fk.StructuredScaling(focal=True)`` fits W and b first, and then gamma and T of the focal map of W x + b. The joint fit
minimises the same penalised NLL over all parameters together. Its L-BFGS starts at the result of the separate fits, so
on the validation rows the joint fit is never worse. The command measures NLL, Brier score and ECE (equal_width, 15
bins) on test rows, and the seconds of a fit, for every .npz with logits or probabilities in DIR, read as
``benchmarks.studies.calibrator_table`` reads them. Writes a CSV and a Markdown table.
"""

import argparse
import csv
import datetime
import math
import time
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import focalkern as fk
from benchmarks.harness import RESULTS, in_threads
from benchmarks.studies.calibrator_table import figures
from benchmarks.studies.networks import about_run, markdown, two_sets, without_zeros, write_rows
from focalkern.files import LogitSet

FIGURES = ("nll", "brier", "ece_equal_width")
WAYS = ("none on top", "on top", "jointly")


def joint(start: Any, rows: LogitSet) -> Any:
    """A function from logits to probabilities: all parameters of ``start``, fitted jointly."""
    module = start.as_module()
    features = module.features(rows.input.double())
    labels = rows.labels.unsqueeze(1)
    n_classes = rows.n_classes
    identity = torch.ones(n_classes, dtype=torch.float64)
    strength = start.penalty * n_classes / len(rows)
    penalties = torch.full_like(module.weight, strength)
    if module.weight.dim() == 2:
        identity = torch.diag(identity)
        penalties.mul_(n_classes - 1).fill_diagonal_(strength)
    gamma, temperature = module.focal
    parameters = [
        module.weight.clone().requires_grad_(),
        module.bias.clone().requires_grad_(),
        torch.tensor([math.log1p(gamma), math.log(temperature)], dtype=torch.float64, requires_grad=True),
    ]

    def log_probs(features: Tensor) -> Tensor:
        weight, bias, focal = parameters
        scores = (features * weight if weight.dim() == 1 else features @ weight.T) + bias
        return fk.focal_calibration_map(scores, focal[0].expm1(), focal[1].exp(), log=True)

    optimizer = torch.optim.LBFGS(
        parameters,
        max_iter=500,
        tolerance_grad=1e-7,
        tolerance_change=1e-11,
        history_size=20,
        line_search_fn="strong_wolfe",
    )

    def closure() -> Tensor:
        optimizer.zero_grad()
        weight, bias, _ = parameters
        value = -log_probs(features).gather(1, labels).mean()
        value = value + (penalties * (weight - identity).square()).sum() + strength * bias.square().sum()
        value.backward()
        return value

    optimizer.step(closure)
    return lambda new: log_probs(module.features(new.double())).detach().exp()


def measure(path: Path) -> list[dict[str, Any]]:
    sets = two_sets(path)
    if sets is None:
        return []
    selection, report = sets
    without_zeros(sets)
    result = []
    for kind in ("vector", "matrix"):
        for way in WAYS:
            begin = time.perf_counter()
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                options: Any = {"kind": kind, "focal": way != "none on top", "input_kind": selection.kind}
                options["solver"] = "lbfgs"  # as the joint fit
                calibrator = fk.StructuredScaling(**options).fit(selection.input, selection.labels)
                apply = joint(calibrator, selection) if way == "jointly" else calibrator.predict_proba
            seconds = time.perf_counter() - begin
            found, fitted = (figures(torch.as_tensor(apply(rows.input)), rows) for rows in (report, selection))
            about = {"file": path.stem, "n_fit": len(selection), "kind": kind, "focal": way}
            of_test = {name: found[name] for name in FIGURES}
            result.append({**about, **of_test, "nll_of_fit": fitted["nll"], "seconds": seconds})
            print(result[-1], flush=True)
    return result


def summary(rows: list[dict[str, str]]) -> str:
    """Means over the files, and network by network the NLL."""
    files = list(dict.fromkeys(row["file"] for row in rows))
    lines, alone = [], []
    for kind in ("vector", "matrix"):
        for way in WAYS:
            of = [row for row in rows if (row["kind"], row["focal"]) == (kind, way)]
            mean = [sum(float(row[name]) for row in of) / len(of) for name in (*FIGURES, "nll_of_fit", "seconds")]
            lines.append([f"{kind}, {way}", *(f"{value:.4f}" for value in mean[:-1]), f"{mean[-1]:.2g}"])
            by_file = {row["file"]: float(row["nll"]) for row in of}
            alone.append([f"{kind}, {way}", *(f"{by_file[file]:.4f}" for file in files)])
    heads = ["focal map", "test NLL", "Brier", "ECE equal_width", "NLL of fit", "seconds"]
    about = rows[0]
    return (
        f"# The focal map of structured scaling: on top, or jointly\n\nMeans over {len(files)} files, "
        f"{about['device']}, {in_threads(about['threads'])}, commit {about['commit']}; test rows, but for "
        "the NLL of fit.\n\n"
        f"{markdown(lines, heads)}\n\nTest NLL:\n\n"
        f"{markdown(alone, ['focal map', *files])}\n"
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.studies.joint_focal",
        description=__doc__,
        formatter_class=argparse.RawTextHelpFormatter,
    )
    parser.add_argument("--logits", type=Path, required=True, metavar="DIR", help="a folder of .npz files")
    parser.add_argument("--out", type=Path, default=RESULTS, metavar="DIR")
    arguments = parser.parse_args()
    about = about_run()
    target = arguments.out / f"joint_focal_{datetime.date.today().isoformat()}.csv"
    rows = [row for path in sorted(arguments.logits.glob("*.npz")) for row in measure(path)]
    if not rows:
        parser.error(f"{arguments.logits}: no .npz file with logits and labels")
    write_rows(target, rows[0], rows, about)
    with target.open(newline="") as file:
        text = summary(list(csv.DictReader(file)))
    target.with_suffix(".md").write_text(text)
    print(f"\n{text}\nwritten: {target}, {target.with_suffix('.md')}")


if __name__ == "__main__":
    main()
