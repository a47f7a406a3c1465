"""Arrays in files: all of them by name, or a few rows at a time if the format permits it."""

import pickle
import re
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, BinaryIO, Literal

import numpy as np
import torch
from torch import Tensor

from focalkern._checks import cut
from focalkern._columns import kind_from_name
from focalkern._types import FLOATS, INPUT_KINDS, InputKind
from focalkern.files.errors import Hint, InputError
from focalkern.files.paths import open_file

__all__ = [
    "ARCHIVES",
    "BARE",
    "READ_ERRORS",
    "ArrayRows",
    "find_sets",
    "kind_of_file",
    "load_numpy",
    "rows_of_tensor",
    "unreadable",
]

_PREFIXES = ("", "val", "test")


@dataclass(frozen=True)
class ArrayRows:
    """An array that is read a few rows at a time.

    Attributes:
        source: the file.
        name: name of the array in the file.
        shape: [N, ...].
        dtype: the name of the dtype in the file.
        numbers: kind of the values: floating-point numbers, integers, or others.
        read: function that returns the rows [begin, end) as a tensor in memory.
    """

    source: str
    name: str
    shape: tuple[int, ...]
    dtype: str
    numbers: Literal["float", "integer", "other"]
    read: Callable[[int, int], Tensor]

    def rows(self, begin: int, end: int) -> Tensor:
        """The rows [begin, end).

        Raises:
            InputError: the file is damaged, or has changed.
        """
        try:
            return self.read(begin, end)
        except READ_ERRORS as error:
            raise unreadable(self.source, f"rows {begin} to {end - 1}", error) from error

    def whole(self) -> Tensor:
        """All rows."""
        return self.rows(0, self.shape[0] if self.shape else 0)


# For truncated or damaged bytes, NumPy's header parser, torch's unpickler and decompressors raise errors of any class.
READ_ERRORS = (Exception,)


# An error of the unpickler with one of these classes has no text, or only the number of an entry.
_REASONS = {EOFError: "it ends too early", KeyError: "it refers to an entry that it does not have"}


def _reason(error: BaseException) -> str:
    """The first sentence of a reader's error, without the line of torch's source and addresses of Python's objects."""
    text = re.sub(r"^\[enforce fail at \S+\] \. |:? <[^>]* object at 0x[0-9a-f]+>", "", str(error).strip())
    if " " in text:
        return text.splitlines()[0].partition(". ")[0][:200]
    return next((words for kind, words in _REASONS.items() if isinstance(error, kind)), text or type(error).__name__)


def unreadable(source: str, expected: str, error: BaseException) -> InputError:
    """The InputError for an error of a reader."""
    if isinstance(error, InputError):
        return error
    if isinstance(error, OSError) and error.errno is not None and error.strerror:
        return InputError(f"{source}: expected a file that can be read, found: {error.strerror}")
    text = str(error).strip()
    # NumPy's error is the same for pickles and for files that are not arrays; torch's error for pickles is long.
    if "allow_pickle" in text or "Object arrays" in text:
        found = "pickled Python objects, or something else that is not an array; they are refused; save numbers"
    elif "weights_only" in text.lower() or "Unsupported" in text or isinstance(error, pickle.UnpicklingError):
        found = "pickled Python objects other than tensors, or a damaged file; they are refused; save tensors"
    else:
        reason = _reason(error)
        found = f"a damaged or truncated file, or another format ({reason})"
        if isinstance(error, MemoryError):
            found = f"a damaged file, or one too large for the memory ({reason}); .npy and .safetensors can be streamed"
    return InputError(f"{source}: expected {expected}, found {found}")


# ---- files that are read at once -----------------------------------------------------------------------------------


def load_numpy(stream: BinaryIO, source: str, expected: str) -> Any:
    # A stream, not a path: NumPy does not close a damaged file that it has opened itself.
    try:
        return np.load(stream, allow_pickle=False)
    except READ_ERRORS as error:
        raise unreadable(source, expected, error) from error


def _read_npz(source: str) -> dict[str, Any]:
    expected = "an .npz file of arrays"
    arrays: dict[str, Any] = {}
    with open_file(source) as stream:
        archive = load_numpy(stream, source, expected)
        if not isinstance(archive, np.lib.npyio.NpzFile):
            raise InputError(f"{source}: expected {expected}, found a single array {list(archive.shape)} (.npy)")
        with archive:
            for key in archive.files:
                try:
                    arrays[key] = archive[key]
                except READ_ERRORS as error:
                    raise unreadable(source, f"an array in {key}", error) from error
    return arrays


BARE = ""


def _read_pt(source: str) -> dict[str, Any]:
    """A dict of tensors; a single tensor without a name is called :data:`BARE`."""
    expected = "a dict of tensors"
    try:
        with open_file(source) as stream, warnings.catch_warnings():
            # torch warns about pickles before it refuses them; the error is enough.
            warnings.simplefilter("ignore")
            loaded = torch.load(stream, map_location="cpu", weights_only=True)
    except READ_ERRORS as error:
        raise unreadable(source, expected, error) from error
    if isinstance(loaded, Tensor):
        return {BARE: loaded}
    if not isinstance(loaded, dict):
        raise InputError(f"{source}: expected {expected}, found a {type(loaded).__name__}")
    return {str(key): value for key, value in loaded.items()}


# Readers of all arrays of a file, by suffix.
ARCHIVES: dict[str, Callable[[str], dict[str, Any]]] = {".npz": _read_npz, ".pt": _read_pt, ".pth": _read_pt}


def rows_of_tensor(source: str, name: str, tensor: Tensor) -> ArrayRows:
    """:class:`ArrayRows` of a tensor in memory."""
    numbers: Literal["float", "other"] = "float" if tensor.dtype in FLOATS else "other"
    dtype = str(tensor.dtype).removeprefix("torch.")
    return ArrayRows(source, name, tuple(tensor.shape), dtype, numbers, lambda begin, end: tensor[begin:end])


# ---- names of arrays -----------------------------------------------------------------------------------------------


def kind_of_file(source: str, name_says: InputKind | None, input_kind: InputKind | None) -> InputKind:
    """The kind of input in a file: the user's, also for probabilities in a file called logits; else the name's."""
    if (name_says, input_kind) == ("probs", "logits"):
        raise InputError(source, "logits", "a file that is called probs", hint=Hint("input_kind", "probs"))
    return input_kind or name_says or "logits"


def find_sets(
    source: str,
    arrays: Mapping[str, Any],
    input_kind: InputKind | None,
    logits_key: str | None = None,
    labels_key: str | None = None,
) -> dict[str, tuple[InputKind, str, str]]:
    """For each prefix, the kind of the set and the names of its arrays; at least one set. Keys select a single set."""
    sets: dict[str, tuple[InputKind, str, str]] = {}
    if logits_key is not None:
        labels_key = labels_key or "labels"
        for argument, key in (("logits_key", logits_key), ("labels_key", labels_key)):
            if key not in arrays:
                raise InputError(source, f"an array {key}", _listing(arrays), hint=Hint(argument, "NAME"))
        _refuse_equal(source, logits_key, labels_key)
        return {"": (input_kind or kind_from_name(logits_key) or "logits", logits_key, labels_key)}
    for prefix in _PREFIXES:
        names = {kind: f"{prefix}_{kind}" if prefix else kind for kind in INPUT_KINDS}
        present = [kind for kind in INPUT_KINDS if names[kind] in arrays]
        if not present:
            continue
        if input_kind is None and len(present) > 1:
            both = (Hint("input_kind", "logits"), "or", Hint("input_kind", "probs"))
            raise InputError(source, f"one of {' and '.join(names.values())}", "both", hint=both)
        kind = present[0] if input_kind is None else input_kind
        if kind not in present and kind == "logits":
            raise InputError(source, names[kind], _listing(arrays), hint=Hint("input_kind", "probs"))
        name = names[kind if kind in present else "logits"]  # probabilities under the name of logits, as the user says
        label_name = labels_key or (f"{prefix}_labels" if prefix else "labels")
        if label_name not in arrays:
            if len(arrays) > len(present):
                named = Hint("labels_key", "NAME")
                raise InputError(source, f"{label_name} beside {name}", _listing(arrays), hint=named)
            raise InputError(
                f"{source}: expected {label_name} beside {name}, found {_listing(arrays)}; save them in the same file"
            )
        _refuse_equal(source, name, label_name)
        sets[prefix] = (kind, name, label_name)
    if labels_key is not None and len(sets) > 1:
        found = f"sets called {', '.join(sets)}"
        hint = (Hint("logits_key", "NAME"), Hint("labels_key", labels_key))
        raise InputError(source, f"one set for the labels {labels_key}", found, hint=hint)
    if sets:
        return sets
    top_only = {"conf", "pred"} & {key.lower() for key in arrays}
    of_all = "; the logits or probabilities of all classes are needed, not those of the top class" if top_only else ""
    raise InputError(
        source,
        "logits and labels (or probs and labels, or either with val_ or test_ in front)",
        f"{_listing(arrays)}{of_all}",
        hint=(Hint("logits_key", "NAME"), Hint("labels_key", "NAME")),
    )


def _refuse_equal(source: str, name: str, label_name: str) -> None:
    if name == label_name:
        hint = (Hint("logits_key", "NAME"), Hint("labels_key", "NAME"))
        raise InputError(source, "the logits and the labels in two arrays", f"{name} for both", hint=hint)


def _listing(arrays: Mapping[str, Any]) -> str:
    """``labels [50000], pred [14, 50000]``: names and shapes of the arrays."""
    if not arrays:
        return "nothing"
    shown = [
        f"{cut(key)} {list(value.shape)}" if hasattr(value, "shape") else f"{cut(key)} ({type(value).__name__})"
        for key, value in list(arrays.items())[:8]
    ]
    return ", ".join(shown) + (f" and {len(arrays) - 8} more" if len(arrays) > 8 else "")
