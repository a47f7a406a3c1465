"""Reading logits with their labels, or probabilities with theirs, from the formats that people keep them in."""

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from focalkern._checks import path_text
from focalkern._types import InputKind
from focalkern.files.arrays import ARCHIVES, BARE, ArrayRows, find_sets, load_numpy, open_file
from focalkern.files.parts import open_safetensors
from focalkern.files.samples import (
    KINDS,
    Hint,
    InputError,
    LogitSet,
    check_file,
    check_options,
    check_said,
    checked_set,
)
from focalkern.files.tables import read_arrow, read_csv

__all__ = ["labels_of_npy", "read_sets"]


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
    readers: dict[str, Callable[[str], Mapping[str, Any]]] = {
        **ARCHIVES,
        ".safetensors": open_safetensors,
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
        values, targets = (
            one.whole() if isinstance(one, ArrayRows) else one for one in (arrays[name], arrays[label_name])
        )
        sets[prefix] = checked_set(source, prefix, kind, name, values, label_name, targets)
        check_said(source, name, kind, input_kind, sets[prefix].input)
    return sets


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
        with open_file(name) as stream:
            array = load_numpy(stream, name, "an array (.npy)")
        if not isinstance(array, np.ndarray):
            raise InputError(f"{name}: expected an array (.npy), found an archive of {', '.join(array.files)} (.npz)")
        loaded.append(array)
    if input_kind is not None and said not in (None, input_kind):
        raise InputError(source, input_kind, f"a file that is called {said}", hint=Hint("input_kind", str(said)))
    return {said or input_kind or "logits": loaded[0], "labels": loaded[1]}
