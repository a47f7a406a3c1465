"""Reading logits with their labels, or probabilities with theirs, from the formats that people keep them in."""

import csv
import math
import os
import pickle
import warnings
import zipfile
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
from torch import Tensor

from focalkern.calibrators import InputKind

__all__ = [
    "DAMAGE",
    "FORMATS_HELP",
    "KINDS",
    "InputError",
    "LogitSet",
    "as_tensor",
    "check_rows",
    "damaged",
    "find_sets",
    "read_sets",
]

FORMATS_HELP = """\
files:
  .npz .pt .pth .safetensors
      arrays by name: logits [N, C] and labels [N]; or val_logits, val_labels, test_logits, test_labels in one file;
      or the same with probs for logits. (.pt: a dict of tensors, read with weights_only=True.)
  .npy
      two files. For val_logits.npy the labels are looked for in val_labels.npy beside it (logits.npy: labels.npy;
      probs likewise); for any other name, or to take another file, say --labels FILE.npy (--test-labels for --test).
  'val_logits-*.npy', 'val-*.safetensors', in quotes
      all the files that match, read a few rows at a time, in the order of their names and numbers. The labels of
      val_logits-3.npy are looked for in val_labels-3.npy, those of val-3.npy in val_labels-3.npy too, or say
      --labels 'FILES' with as many files.
  .csv
      a header line; one column is called label, labels or target, all the others are the classes, in their order.
Labels are class numbers, the first class is 0. Files with pickled objects are refused, never executed.
"""

KINDS: tuple[InputKind, ...] = ("logits", "probs")
_PREFIXES = ("", "val", "test")
_LABEL_COLUMNS = ("label", "labels", "target")


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


def read_sets(
    path: str | os.PathLike[str],
    *,
    labels: str | os.PathLike[str] | None = None,
    input_kind: InputKind | None = None,
    labels_option: str = "--labels",
) -> dict[str, LogitSet]:
    """Read every set of a file.

    Args:
        path: .npz, .npy, .pt, .pth, .safetensors or .csv.
        labels: the .npy file with the labels, for a .npy ``path`` only.
        input_kind: ``"logits"`` or ``"probs"``. None takes what the name of the array (or of the .npy file) says, and
            logits where it says nothing. It is never guessed from the values.
        labels_option: what ``labels`` is called on the command line, for the errors.

    Returns:
        By prefix, ``""``, ``"val"`` or ``"test"``, at least one :class:`LogitSet`.

    Raises:
        InputError: anything at all that is wrong with the files.
    """
    source = os.fspath(path)
    suffix = Path(source).suffix.lower()
    readers: dict[str, Callable[[str], dict[str, Any]]] = {
        ".npz": _read_npz,
        ".pt": _read_pt,
        ".pth": _read_pt,
        ".safetensors": _read_safetensors,
        ".npy": lambda p: _read_npy_pair(p, labels, input_kind, labels_option),
        ".csv": lambda p: _read_csv(p, input_kind),
    }
    if suffix not in readers:
        raise InputError(f"{source}: expected {', '.join(readers)}, found {suffix or 'no suffix'!r}")
    if labels is not None and suffix != ".npy":
        raise InputError(f"{source}: {labels_option} goes with a .npy file; in {suffix} files the labels are in it")
    if not os.path.exists(source):
        raise InputError(f"{source}: expected a file, found nothing there")
    if os.path.isdir(source):
        raise InputError(f"{source}: expected a file, found a folder")
    arrays = readers[suffix](source)
    return _sets(source, arrays, input_kind)


def _sets(source: str, arrays: Mapping[str, Any], input_kind: InputKind | None) -> dict[str, LogitSet]:
    return {
        prefix: _checked(source, prefix, kind, input_name, arrays[input_name], label_name, arrays[label_name])
        for prefix, (kind, input_name, label_name) in find_sets(source, arrays, input_kind).items()
    }


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


def _checked(
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


# What the readers below raise for files that are cut off, damaged or of another kind.
DAMAGE = (
    OSError,
    EOFError,
    ValueError,
    KeyError,
    RuntimeError,
    MemoryError,
    zipfile.BadZipFile,
    zlib.error,
    pickle.UnpicklingError,
    NotImplementedError,
)


def damaged(source: str, expected: str, error: BaseException) -> InputError:
    text = str(error).strip()
    # NumPy says this of pickles and of files that are no arrays at all; torch refuses a pickle in many words.
    if "allow_pickle" in text or "Object arrays" in text:
        found = "pickled Python objects, or something else that is not an array; they are refused"
    elif "weights_only" in text.lower() or "Unsupported" in text or isinstance(error, pickle.UnpicklingError):
        found = "pickled Python objects other than tensors, or a damaged file; they are refused"
    else:
        reason = text.splitlines()[0].partition(". ")[0] if text else type(error).__name__
        found = f"a damaged or truncated file, or another format ({reason})"
        if isinstance(error, MemoryError):
            remedy = "--stream reads .npy and .safetensors in parts"
            found = f"a damaged file, or one too large for the memory: {remedy} ({reason})"
    return InputError(f"{source}: expected {expected}, found {found}")


def _open(source: str) -> BinaryIO:
    try:
        return open(source, "rb")
    except OSError as error:
        raise InputError(f"{source}: expected a file that can be read, found: {error.strerror}") from error


def _load_numpy(stream: BinaryIO, source: str, expected: str) -> Any:
    # A stream and not a path: NumPy leaves a file that it opened itself open when it is damaged.
    try:
        return np.load(stream, allow_pickle=False)
    except DAMAGE as error:
        raise damaged(source, expected, error) from error


def _read_npz(source: str) -> dict[str, Any]:
    expected = "an .npz file of arrays"
    arrays: dict[str, Any] = {}
    with _open(source) as stream:
        archive = _load_numpy(stream, source, expected)
        if not isinstance(archive, np.lib.npyio.NpzFile):
            raise InputError(f"{source}: expected {expected}, found a single array {list(archive.shape)} (.npy)")
        with archive:
            for key in archive.files:
                try:
                    arrays[key] = archive[key]
                except DAMAGE as error:
                    raise damaged(source, f"an array in {key}", error) from error
    return arrays


def _read_npy_pair(
    source: str, labels: str | os.PathLike[str] | None, input_kind: InputKind | None, labels_option: str
) -> dict[str, Any]:
    path = Path(source)
    said = next((kind for kind in KINDS if path.stem == kind or path.stem.endswith(f"_{kind}")), None)
    if labels is None:
        if said is None:
            raise InputError(
                f"{source}: expected a name that ends in logits.npy or probs.npy, or {labels_option} FILE.npy, "
                f"found neither, so it is not known where the labels are"
            )
        labels = path.with_name(path.name[: -len(f"{said}.npy")] + "labels.npy")
        if not labels.exists():
            raise InputError(
                f"{source}: expected its labels in {labels}, found nothing there; say {labels_option} FILE.npy"
            )
    elif not os.path.exists(labels):
        raise InputError(f"{labels}: expected the labels of {source}, found nothing there")
    loaded = []
    for name in (source, os.fspath(labels)):
        with _open(name) as stream:
            array = _load_numpy(stream, name, "an array (.npy)")
        if not isinstance(array, np.ndarray):
            raise InputError(f"{name}: expected an array (.npy), found an archive of {', '.join(array.files)} (.npz)")
        loaded.append(array)
    if input_kind is not None and said not in (None, input_kind):
        raise InputError(f"{source}: expected {input_kind} (as --input-kind says), found a file that is called {said}")
    return {said or input_kind or "logits": loaded[0], "labels": loaded[1]}


def _read_pt(source: str) -> dict[str, Any]:
    expected = "a dict of tensors"
    try:
        with _open(source) as stream, warnings.catch_warnings():
            # torch warns of pickles that it then refuses; the refusal is enough.
            warnings.simplefilter("ignore")
            loaded = torch.load(stream, map_location="cpu", weights_only=True)
    except DAMAGE as error:
        raise damaged(source, expected, error) from error
    if not isinstance(loaded, dict):
        found = f"a tensor {list(loaded.shape)}" if isinstance(loaded, Tensor) else f"a {type(loaded).__name__}"
        raise InputError(f"{source}: expected {expected} with logits and labels, found {found}")
    return {str(key): value for key, value in loaded.items()}


def _read_safetensors(source: str) -> dict[str, Any]:
    try:
        import safetensors
        from safetensors.torch import load_file
    except ImportError as error:
        raise InputError(f"{source}: safetensors is needed to read it: pip install safetensors") from error
    _open(source).close()
    try:
        return dict(load_file(source))
    except (*DAMAGE, safetensors.SafetensorError) as error:
        raise damaged(source, "a .safetensors file", error) from error


def _read_csv(source: str, input_kind: InputKind | None) -> dict[str, Any]:
    try:
        with open(source, newline="", encoding="utf-8-sig") as stream:
            reader = csv.reader(stream)
            header = [name.strip() for name in next(reader, [])]
            columns = [i for i, name in enumerate(header) if name.lower() in _LABEL_COLUMNS]
            if len(columns) != 1:
                shown = ", ".join(header[:8]) + (", ..." if len(header) > 8 else "")
                raise InputError(
                    f"{source}: expected a header line with one column called {', '.join(_LABEL_COLUMNS[:-1])} or "
                    f"{_LABEL_COLUMNS[-1]}, found {'several' if columns else 'none'} in: {shown or 'an empty file'}"
                )
            place = columns[0]
            inputs: list[list[float]] = []
            labels: list[int] = []
            for row in reader:
                if not row:
                    continue
                if len(row) != len(header):
                    raise InputError(
                        f"{source}: line {reader.line_num}: expected {len(header)} columns as in the header, "
                        f"found {len(row)}"
                    )
                try:
                    labels.append(int(row.pop(place)))
                    inputs.append([float(cell) for cell in row])
                except ValueError as error:
                    raise InputError(
                        f"{source}: line {reader.line_num}: expected an integer label and numbers, found: {error}"
                    ) from error
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise InputError(f"{source}: expected a text file with comma-separated values, found: {error}") from error
    width = len(header) - 1
    return {
        input_kind or "logits": np.array(inputs, dtype=np.float64).reshape(len(inputs), width),
        "labels": np.array(labels, dtype=np.int64),
    }
