"""The networks of a study and its files: validation and test rows out of a file of logits, the CSV, Markdown tables."""

import csv
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from tabulate import tabulate

from benchmarks.harness import commit, device_name
from focalkern.files import InputError, LogitSet, read_sets

__all__ = ["about_run", "markdown", "two_sets", "without_zeros", "write_rows"]


def two_sets(path: Path) -> tuple[LogitSet, LogitSet] | None:
    """Validation and test rows in float64; None if the file has neither logits nor probabilities."""
    try:
        sets = read_sets(path)
    except InputError as error:
        print(f"left out: {str(error).replace(str(path), path.name)}")
        return None
    if "val" in sets and "test" in sets:
        chosen = sets["val"], sets["test"]
    else:
        (rows,) = sets.values()
        order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(0))
        half = len(rows) // 2
        chosen = rows.rows(order[:half], "a random half"), rows.rows(order[half:], "the other half")
    first, second = (LogitSet(s.input.double(), s.labels, s.kind, s.name, s.source, s.part) for s in chosen)
    return first, second


def without_zeros(sets: Iterable[LogitSet]) -> None:
    """Replaces probabilities of 0 by a small one, in place: a target with probability 0 has an infinite NLL."""
    for rows in sets:
        if rows.kind == "probs":
            rows.input.clip_(1e-7).div_(rows.input.sum(-1, keepdim=True))


def about_run() -> dict[str, Any]:
    """Columns that every row of a run shares."""
    return {
        "threads": torch.get_num_threads(),
        "device": device_name(),
        "torch": torch.__version__,
        "commit": commit(),
    }


def write_rows(target: Path, names: Iterable[str], rows: Iterable[Mapping[str, Any]], about: Mapping[str, Any]) -> None:
    """Writes a CSV of rows, with floats of six digits, and of the columns that all rows share."""
    with target.open("w", newline="") as file:
        columns = dict.fromkeys((*names, *about))
        writer = csv.DictWriter(file, list(columns), restval="", lineterminator="\n")
        writer.writeheader()
        for row in rows:
            values = {key: f"{value:.6g}" if isinstance(value, float) else value for key, value in row.items()}
            writer.writerow({**values, **about})


def markdown(lines: Iterable[Sequence[Any]], heads: Sequence[str]) -> str:
    """A Markdown table; the cells are not formatted."""
    return tabulate(lines, heads, tablefmt="github", disable_numparse=True)
