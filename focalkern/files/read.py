"""Reading logits with their labels, or probabilities with theirs, from the formats that people keep them in."""

import os
import pickle
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
from torch import Tensor

from focalkern._checks import path_text
from focalkern._types import InputKind
from focalkern.files.checks import (
    KINDS,
    Hint,
    InputError,
    LogitSet,
    check_file,
    check_options,
    check_said,
    checked_set,
    find_sets,
)
from focalkern.files.tables import read_arrow, read_csv

__all__ = ["ARCHIVES", "BARE", "DAMAGE", "damaged", "labels_of_npy", "read_sets"]


def read_sets(
    path: str | os.PathLike[str],
    *,
    labels: str | os.PathLike[str] | None = None,
    input_kind: InputKind | None = None,
    logits_key: str | None = None,
    labels_key: str | None = None,
) -> dict[str, LogitSet]:
    """Read every set of a file.

    Args:
        path: .npz, .npy, .pt, .pth, .safetensors, .csv, .parquet or .feather.
        labels: the .npy file with the labels, for a .npy ``path`` only.
        input_kind: ``"logits"`` or ``"probs"``. None takes what the name of the array (or of the .npy file) says, and
            logits where it says nothing; rows that are not negative and sum to 1 are then an error.
        logits_key, labels_key: the names of the arrays; of tables, a pattern for the columns of the classes (``"p_*"``)
            and the column of the labels.

    Returns:
        By prefix, ``""``, ``"val"`` or ``"test"``, at least one :class:`LogitSet`.

    Raises:
        InputError: anything at all that is wrong with the files.

    Example:
        >>> val, test = 4 * np.eye(2), 3 * np.eye(2)
        >>> np.savez("logits.npz", val_logits=val, val_labels=[0, 1], test_logits=test, test_labels=[1, 1])
        >>> sets = fk.files.read_sets("logits.npz")
        >>> sorted(sets), sets["test"].labels
        (['test', 'val'], tensor([1, 1]))
    """
    source = check_options("read_sets", input_kind, path, logits_key=logits_key, labels_key=labels_key)
    labels = None if labels is None else path_text("read_sets", "labels", labels)
    suffix = Path(source).suffix.lower()
    readers: dict[str, Callable[[str], dict[str, Any]]] = {
        **ARCHIVES,
        ".safetensors": _read_safetensors,
        ".npy": lambda p: _read_npy_pair(p, labels, input_kind),
    }
    tables = {".csv": read_csv, ".parquet": read_arrow, ".feather": read_arrow}
    if suffix not in readers and suffix not in tables:
        known = ", ".join([*readers, *tables])
        raise InputError(f"{source}: expected {known}, found {suffix or 'no suffix'!r}")
    if labels is not None and suffix != ".npy":
        raise InputError(source, f"no other file of labels, because a {suffix} file has them in it", labels)
    check_file(source)
    if suffix == ".npy" and (logits_key or labels_key):
        raise InputError(source, "arrays or columns of a name for logits_key and labels_key", ".npy")
    arrays: Mapping[str, Any] | LogitSet
    if suffix in tables:
        arrays = tables[suffix](source, logits_key=logits_key, labels_key=labels_key, input_kind=input_kind)
        if isinstance(arrays, LogitSet):
            return {"": arrays}
    else:
        arrays = readers[suffix](source)
        if list(arrays) == [BARE]:
            found = f"a tensor {list(arrays[BARE].shape)}"
            raise InputError(f"{source}: expected a dict of tensors with logits and labels, found {found}")
    sets = {}
    for prefix, (kind, name, label_name) in find_sets(source, arrays, input_kind, logits_key, labels_key).items():
        sets[prefix] = checked_set(source, prefix, kind, name, arrays[name], label_name, arrays[label_name])
        check_said(source, name, kind, input_kind, sets[prefix].input)
    return sets


# What the readers below raise for files that are cut off, damaged or of another kind: there is nothing that NumPy's
# header, torch's unpickler or a decompressor has not been seen to raise of bytes that are no longer what they were.
DAMAGE = (Exception,)


def damaged(source: str, expected: str, error: BaseException) -> InputError:
    if isinstance(error, InputError):
        return error
    if isinstance(error, OSError) and error.errno is not None and error.strerror:
        return InputError(f"{source}: expected a file that can be read, found: {error.strerror}")
    text = str(error).strip()
    # NumPy says this of pickles and of files that are no arrays at all; torch refuses a pickle in many words.
    if "allow_pickle" in text or "Object arrays" in text:
        found = "pickled Python objects, or something else that is not an array; they are refused"
    elif "weights_only" in text.lower() or "Unsupported" in text or isinstance(error, pickle.UnpicklingError):
        found = "pickled Python objects other than tensors, or a damaged file; they are refused"
    else:
        reason = text.splitlines()[0].partition(". ")[0][:200] if text else type(error).__name__
        found = f"a damaged or truncated file, or another format ({reason})"
        if isinstance(error, MemoryError):
            found = f"a damaged file, or one too large for the memory ({reason}); .npy and .safetensors can be streamed"
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


def _kind_of_npy(source: str) -> InputKind | None:
    stem = Path(source).stem
    return next((kind for kind in KINDS if stem == kind or stem.endswith(f"_{kind}")), None)


def labels_of_npy(source: str, labels: str | os.PathLike[str] | None = None) -> str | os.PathLike[str]:
    """The file of the labels of a .npy file: the one that is named, or the one beside it."""
    if labels is not None:
        check_file(os.fspath(labels), f"the labels of {source}")
        return labels
    path, said = Path(source), _kind_of_npy(source)
    if said is None:
        expected = "a name that ends in logits.npy or probs.npy, which tells where the labels are"
        raise InputError(source, expected, "another", hint=Hint("labels", "FILE.npy"))
    beside = path.with_name(path.name[: -len(f"{said}.npy")] + "labels.npy")
    if not beside.exists():
        raise InputError(source, f"its labels in {beside}", "nothing there", hint=Hint("labels", "FILE.npy"))
    return beside


def _read_npy_pair(source: str, labels: str | os.PathLike[str] | None, input_kind: InputKind | None) -> dict[str, Any]:
    said = _kind_of_npy(source)
    labels = labels_of_npy(source, labels)
    loaded = []
    for name in (source, os.fspath(labels)):
        with _open(name) as stream:
            array = _load_numpy(stream, name, "an array (.npy)")
        if not isinstance(array, np.ndarray):
            raise InputError(f"{name}: expected an array (.npy), found an archive of {', '.join(array.files)} (.npz)")
        loaded.append(array)
    if input_kind is not None and said not in (None, input_kind):
        raise InputError(source, input_kind, f"a file that is called {said}", hint=Hint("input_kind", str(said)))
    return {said or input_kind or "logits": loaded[0], "labels": loaded[1]}


BARE = ""


def _read_pt(source: str) -> dict[str, Any]:
    """A dict of tensors; a single tensor, which has no name, is called :data:`BARE`."""
    expected = "a dict of tensors"
    try:
        with _open(source) as stream, warnings.catch_warnings():
            # torch warns of pickles that it then refuses; the refusal is enough.
            warnings.simplefilter("ignore")
            loaded = torch.load(stream, map_location="cpu", weights_only=True)
    except DAMAGE as error:
        raise damaged(source, expected, error) from error
    if isinstance(loaded, Tensor):
        return {BARE: loaded}
    if not isinstance(loaded, dict):
        raise InputError(f"{source}: expected {expected}, found a {type(loaded).__name__}")
    return {str(key): value for key, value in loaded.items()}


def _read_safetensors(source: str) -> dict[str, Any]:
    try:
        from safetensors.torch import load_file
    except ImportError as error:
        raise InputError(f"{source}: safetensors is needed to read it: pip install safetensors") from error
    _open(source).close()
    try:
        return dict(load_file(source))
    except DAMAGE as error:
        raise damaged(source, "a .safetensors file", error) from error


# By suffix, what reads all arrays of a file.
ARCHIVES: dict[str, Callable[[str], dict[str, Any]]] = {".npz": _read_npz, ".pt": _read_pt, ".pth": _read_pt}
