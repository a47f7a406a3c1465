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
from focalkern.calibrators import InputKind
from focalkern.files.checks import KINDS, InputError, LogitSet, check_options, checked_set, find_sets
from focalkern.files.tables import read_arrow, read_csv

__all__ = ["ARCHIVES", "DAMAGE", "FORMATS_HELP", "damaged", "read_sets"]

FORMATS_HELP = """\
files:
  .npz .pt .pth .safetensors
      arrays by name: logits [N, C] and labels [N]; or val_logits, val_labels, test_logits, test_labels in one file;
      or the same with probs for logits. (.pt: a dict of tensors, read with weights_only=True.)
  .npy
      two files. For val_logits.npy the labels are looked for in val_labels.npy beside it (logits.npy: labels.npy;
      probs likewise); for any other name, or to take another file, say --labels FILE.npy (--test-labels for --test).
  val_logits-*.npy, val-*.safetensors
      all the files that match (in quotes or not), read a few rows at a time, in the order of their names and numbers.
      The labels of val_logits-3.npy are looked for in val_labels-3.npy, those of val-3.npy in val_labels-3.npy too, or
      say --labels FILES with as many files.
  .csv .parquet .feather
      a column of labels (label, labels, target or --labels-key NAME) and one per class: numbered (0, 1, ... or logit_0,
      logit_1, ...), in the order of the numbers, or named. Other columns, such as an index, an id or a prediction, are
      an error: say which are the classes, --logits-key 'logit_*'. (.parquet, .feather: also a column of lists.)
In other files --logits-key NAME and --labels-key NAME are the names of the arrays. Labels are class numbers, the first
class is 0 (or as the columns are numbered); or names: those of the columns, or else all of the classes in alphabetical
order. Files with pickled objects are refused, never executed.
"""


def read_sets(
    path: str | os.PathLike[str],
    *,
    labels: str | os.PathLike[str] | None = None,
    input_kind: InputKind | None = None,
    labels_option: str = "--labels",
    logits_key: str | None = None,
    labels_key: str | None = None,
) -> dict[str, LogitSet]:
    """Read every set of a file.

    Args:
        path: .npz, .npy, .pt, .pth, .safetensors, .csv, .parquet or .feather.
        labels: the .npy file with the labels, for a .npy ``path`` only.
        input_kind: ``"logits"`` or ``"probs"``. None takes what the name of the array (or of the .npy file) says, and
            logits where it says nothing. It is never guessed from the values.
        labels_option: what ``labels`` is called on the command line, for the errors.
        logits_key, labels_key: the names of the arrays; of tables, a pattern for the columns of the classes (``"p_*"``)
            and the column of the labels.

    Returns:
        By prefix, ``""``, ``"val"`` or ``"test"``, at least one :class:`LogitSet`.

    Raises:
        InputError: anything at all that is wrong with the files.

    Example:
        >>> np.savez("logits.npz", val_logits=np.eye(2), val_labels=[0, 1], test_logits=np.eye(2), test_labels=[1, 1])
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
        ".npy": lambda p: _read_npy_pair(p, labels, input_kind, labels_option),
    }
    tables = {".csv": read_csv, ".parquet": read_arrow, ".feather": read_arrow}
    if suffix not in readers and suffix not in tables:
        known = ", ".join([*readers, *tables])
        raise InputError(f"{source}: expected {known}, found {suffix or 'no suffix'!r}")
    if labels is not None and suffix != ".npy":
        raise InputError(f"{source}: {labels_option} goes with a .npy file; in {suffix} files the labels are in it")
    if not os.path.exists(source):
        raise InputError(f"{source}: expected a file, found nothing there")
    if os.path.isdir(source):
        raise InputError(f"{source}: expected a file, found a folder")
    if suffix == ".npy" and (logits_key or labels_key):
        raise InputError(f"{source}: --logits-key and --labels-key go with arrays or columns of a name, found .npy")
    arrays: Mapping[str, Any] | LogitSet
    if suffix in tables:
        arrays = tables[suffix](source, logits_key=logits_key, labels_key=labels_key, input_kind=input_kind)
        if isinstance(arrays, LogitSet):
            return {"": arrays}
    else:
        arrays = readers[suffix](source)
    return {
        prefix: checked_set(source, prefix, kind, input_name, arrays[input_name], label_name, arrays[label_name])
        for prefix, (kind, input_name, label_name) in find_sets(
            source, arrays, input_kind, logits_key, labels_key
        ).items()
    }


# What the readers below raise for files that are cut off, damaged or of another kind: there is nothing that NumPy's
# header, torch's unpickler or a decompressor has not been seen to raise of bytes that are no longer what they were.
DAMAGE = (Exception,)


def damaged(source: str, expected: str, error: BaseException) -> InputError:
    if isinstance(error, InputError):
        return error
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
