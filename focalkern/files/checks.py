"""Rows of logits or probabilities with their labels, and what is checked of them before they are used."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from focalkern.calibrators import InputKind

__all__ = ["KINDS", "InputError", "LogitSet", "as_tensor", "check_rows", "checked_set", "find_sets"]

KINDS: tuple[InputKind, ...] = ("logits", "probs")
_PREFIXES = ("", "val", "test")


class InputError(Exception):
    """A file or an option that cannot be used; one line that names it, what was expected and what was found."""


@dataclass(frozen=True)
class LogitSet:
    """One set of rows.

    Attributes:
        input: [N, C] float, logits or probabilities, checked: N >= 1, C >= 2, no NaN.
        labels: [N] int64, checked: in [0, C).
        kind: ``"logits"`` or ``"probs"``.
        name: ``""``, ``"val"`` or ``"test"``, from the prefix of the arrays' names.
        source: the file, as the user wrote it.
        part: in words, which rows of the file these are; nothing for all.
    """

    input: Tensor
    labels: Tensor
    kind: InputKind
    name: str
    source: str
    part: str = ""

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def n_classes(self) -> int:
        return self.input.shape[1]

    def rows(self, index: Tensor, part: str) -> "LogitSet":
        """The rows of ``index``, called ``part``."""
        return LogitSet(self.input[index], self.labels[index], self.kind, self.name, self.source, part)


def find_sets(
    source: str, arrays: Mapping[str, Any], input_kind: InputKind | None
) -> dict[str, tuple[InputKind, str, str]]:
    """By prefix, the kind of a set and the names of its arrays; at least one."""
    sets = {}
    for prefix in _PREFIXES:
        names = {kind: f"{prefix}_{kind}" if prefix else kind for kind in KINDS}
        present = [kind for kind in KINDS if names[kind] in arrays]
        if not present:
            continue
        if input_kind is None and len(present) > 1:
            raise InputError(f"{source}: expected one of {' and '.join(names.values())}, found both; say --input-kind")
        kind = present[0] if input_kind is None else input_kind
        if kind not in present:
            raise InputError(
                f"{source}: expected {names[kind]} (as --input-kind {kind} says), found {_listing(arrays)}"
            )
        label_name = f"{prefix}_labels" if prefix else "labels"
        if label_name not in arrays:
            raise InputError(f"{source}: expected {label_name} beside {names[kind]}, found {_listing(arrays)}")
        sets[prefix] = (kind, names[kind], label_name)
    if sets:
        return sets
    top_only = {"conf", "pred"} & {key.lower() for key in arrays}
    raise InputError(
        f"{source}: expected logits and labels (or probs and labels, or either with val_ or test_ in front), "
        f"found {_listing(arrays)}"
        + ("; the logits or probabilities of all classes are needed, not those of the top class" if top_only else "")
    )


def checked_set(
    source: str, prefix: str, kind: InputKind, input_name: str, values: Any, label_name: str, labels: Any
) -> LogitSet:
    input, target = as_tensor(source, input_name, values), as_tensor(source, label_name, labels)
    if not input.is_floating_point():
        raise InputError(f"{source}: {input_name}: expected floating point, found {_dtype(input)}")
    if input.dim() != 2 or input.shape[1] < 2:
        raise InputError(f"{source}: {input_name}: expected [N, C] with C >= 2 classes, found {list(input.shape)}")
    if target.is_floating_point() or target.is_complex() or target.dtype == torch.bool:
        raise InputError(f"{source}: {label_name}: expected integer class numbers, found {_dtype(target)}")
    if target.dim() != 1 or len(target) != len(input):
        raise InputError(
            f"{source}: {label_name}: expected [N] = [{len(input)}] to go with {input_name} {list(input.shape)}, "
            f"found {list(target.shape)}"
        )
    if len(input) == 0:
        raise InputError(f"{source}: {input_name}: expected at least one row, found none")
    # A comparison with uint64 is not defined for every value; class numbers fit into int64 or are wrong anyway.
    target = target.to(torch.int64)
    check_rows(source, kind, input_name, input, label_name, target)
    return LogitSet(input.contiguous(), target, kind, prefix, source)


def check_rows(
    source: str, kind: InputKind, input_name: str, input: Tensor, label_name: str, target: Tensor, first_row: int = 0
) -> None:
    """Raises InputError for the first row that cannot be used; ``first_row`` is its number in the file."""
    _refuse_rows(
        source,
        label_name,
        (target < 0) | (target >= input.shape[1]),
        f"class numbers from 0 to {input.shape[1] - 1}",
        lambda row: f"{int(target[row])}",
        first_row,
    )
    if kind == "logits":
        # -inf is a class that is ruled out; a row needs one that is not.
        refused = (input.isnan() | (input == math.inf)).any(1) | (input == -math.inf).all(1)
        expected = "finite logits, or -inf for some of a row"
    else:
        total = input.sum(1, dtype=torch.float64)
        refused = ~((input >= 0).all(1) & ((total - 1).abs() <= 1e-3))
        expected = "probabilities that sum to 1 within 0.001"
    _refuse_rows(source, input_name, refused, expected, lambda row: _describe_row(input[row]), first_row)


def _refuse_rows(source: str, name: str, refused: Tensor, expected: str, describe: Any, first_row: int) -> None:
    if bool(refused.any()):
        row = int(refused.nonzero()[0])
        others = int(refused.sum()) - 1
        more = f" (and {others} more such row{'s' * (others > 1)})" if others else ""
        raise InputError(f"{source}: {name}: expected {expected}, found {describe(row)} in row {first_row + row}{more}")


def _describe_row(row: Tensor) -> str:
    for word, odd in (("NaN", row.isnan()), ("+inf", row == math.inf)):
        if bool(odd.any()):
            return word
    if bool((row == -math.inf).all()):
        return "only -inf"
    return f"values from {float(row.min()):g} to {float(row.max()):g} that sum to {float(row.double().sum()):g}"


def as_tensor(source: str, name: str, values: Any) -> Tensor:
    if isinstance(values, Tensor):
        if values.layout != torch.strided or values.is_quantized or values.is_nested:
            kind = "a quantized tensor" if values.is_quantized else f"a tensor of layout {values.layout}"
            raise InputError(f"{source}: {name}: expected a plain dense tensor, found {kind}")
        return values.detach()
    try:
        array = np.ascontiguousarray(values)
        # torch has no other byte order than the machine's.
        return torch.from_numpy(array.astype(array.dtype.newbyteorder("="), copy=not array.flags.writeable))
    except TypeError as error:
        raise InputError(f"{source}: {name}: expected an array of numbers, found {np.asarray(values).dtype}") from error


def _dtype(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _listing(arrays: Mapping[str, Any]) -> str:
    """``labels [50000], pred [14, 50000]``: names and shapes of what is there."""
    if not arrays:
        return "nothing"
    shown = [
        f"{key} {list(value.shape)}" if hasattr(value, "shape") else f"{key} ({type(value).__name__})"
        for key, value in list(arrays.items())[:8]
    ]
    return ", ".join(shown) + (f" and {len(arrays) - 8} more" if len(arrays) > 8 else "")
