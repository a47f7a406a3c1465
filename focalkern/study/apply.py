"""Application of a saved calibrator to rows without labels, from file to file."""

import csv
import io
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
from torch import Tensor

from focalkern._atomic import opened_atomically, write_atomically
from focalkern._checks import path_text
from focalkern._devices import cpu_by_default
from focalkern.calibrators import Calibrator, InputKind, load_calibrator
from focalkern.files import InputError
from focalkern.files.inputs import UnlabelledRows, open_unlabelled
from focalkern.files.samples import check_options
from focalkern.study.evaluate import check_fits

__all__ = ["OUTPUTS", "apply_calibrator"]

_TABLES = (".csv", ".parquet", ".feather")
OUTPUTS = (".npy", ".npz", ".safetensors", ".pt", *_TABLES)

# Number of logits in a batch.
_BATCH = 1 << 22


@cpu_by_default()
def apply_calibrator(
    calibrator: str | os.PathLike[str] | Calibrator,
    source: str,
    out: str | os.PathLike[str],
    *,
    input_kind: InputKind | None = None,
    logits_key: str | None = None,
    labels_key: str | None = None,
    storage_options: Mapping[str, Any] | None = None,
) -> dict[str, tuple[int, ...]]:
    """Writes the calibrated probabilities of the rows of ``source``. Labels are not read.

    Logits [N, C, d1, ...] give probabilities of the same shape, the classes in axis 1.

    Args:
        calibrator: a fitted calibrator, or the file that ``save`` has written.
        source: a file .npz, .npy, .pt, .safetensors, .zarr, .csv, .parquet or .feather; a folder, pattern or ``@LIST``
            of files of one of these formats except .csv, which are read in the order of their names and numbers; or
            URLs. ``.npy``, ``.safetensors`` and ``.zarr`` are read a few rows at a time.
        out: ``.npy`` (written a few rows at a time), ``.npz``, ``.safetensors`` or ``.pt`` with an array ``probs`` (or
            ``val_probs``, ``test_probs``, by the name of the array in ``source``); or ``.csv``, ``.parquet`` or
            ``.feather`` with the columns ``prob_<class>``. The class is the name or number of the column in a table, or
            ``0, 1, ...``; all other columns of a table are kept. The dtype is float64 if the source is float64 or a
            table, else float32. An existing file is replaced only when the new one is complete.
        input_kind: ``"logits"`` or ``"probs"``, the content of ``source``; None infers it from names.
        logits_key: name of the array of logits, or a pattern for the columns of the classes.
        labels_key: the column of labels of a table, which is no class and is kept; None is ``label``, ``labels`` or
            ``target``. The table may lack it.
        storage_options: options of the fsspec file system of URLs.

    Returns:
        The shape of every array that was written, by its name.

    Raises:
        InputError: files that cannot be used, or that do not fit the calibrator.
        ValueError: ``calibrator`` is not a file of a calibrator.

    Example:
        >>> labels = torch.arange(30) % 3
        >>> logits = 4 * torch.eye(3)[(labels + (torch.arange(30) % 5 == 0)) % 3]
        >>> fk.TemperatureScaling().fit(logits, labels).save("calibrator.json")
        >>> np.save("logits.npy", logits.numpy())
        >>> fk.study.apply_calibrator("calibrator.json", "logits.npy", "probs.npy")
        {'probs': (30, 3)}
    """
    target = Path(path_text("apply_calibrator", "out", out))
    source = check_options("apply_calibrator", input_kind, source, logits_key=logits_key, labels_key=labels_key)
    suffix = target.suffix.lower()
    if suffix not in OUTPUTS:
        raise InputError(f"{out}: expected a name that ends in {', '.join(OUTPUTS)}, found {suffix or 'no suffix'!r}")
    where = "the calibrator" if isinstance(calibrator, Calibrator) else str(calibrator)
    fitted = calibrator if isinstance(calibrator, Calibrator) else load_calibrator(calibrator)
    if fitted is not calibrator:  # the kind of the rows is checked here
        fitted._look_at_next(False)
    sets = open_unlabelled(source, input_kind, logits_key, storage_options, labels_key=labels_key)
    for rows in sets.values():
        check_fits(where, fitted, rows, rows.table.names)
    if suffix in (".npy", *_TABLES) and len(sets) > 1:
        raise InputError(f"{out}: expected .npz, .safetensors or .pt for {' and '.join(sets)}, found {suffix}")
    pixels = next((rows.shape for rows in sets.values() if rows.pixels), None)
    if suffix in _TABLES and pixels is not None:
        raise InputError(f"{out}: expected .npy, .npz, .safetensors or .pt for {list(pixels)}, found {suffix}")
    named = {f"{prefix}_probs" if prefix else "probs": rows for prefix, rows in sets.items()}
    if suffix == ".npy":
        (rows,) = named.values()
        _stream(fitted, rows, target)
    else:
        arrays = {name: _together(fitted, rows) for name, rows in named.items()}
        if suffix in _TABLES:
            ((rows, probs),) = zip(named.values(), arrays.values(), strict=True)
            content = _table(suffix, probs, rows)
        else:
            content = _encoded(suffix, arrays)
        write_atomically(target, content)
    return {name: rows.shape for name, rows in named.items()}


def _batches(fitted: Calibrator, rows: UnlabelledRows) -> Iterator[Tensor]:
    """The batches [n, C, d1, ...] of probabilities, contiguous."""
    for input in rows.batches(_BATCH):
        probs = torch.as_tensor(fitted.predict_proba(input))
        yield probs.unflatten(0, (-1, *rows.pixels)).movedim(-1, 1).contiguous() if rows.pixels else probs


def _together(fitted: Calibrator, rows: UnlabelledRows) -> Tensor:
    parts = list(_batches(fitted, rows))
    return torch.cat(parts) if parts else torch.zeros(rows.shape)


def _stream(fitted: Calibrator, rows: UnlabelledRows, out: Path) -> None:
    """Writes a .npy file a few rows at a time. It uses no memory map, because on a full disk a write to a map kills the
    process without a message."""
    with opened_atomically(out) as stream:
        dtype = None
        for probs in _batches(fitted, rows):
            array = np.ascontiguousarray(probs.numpy(), dtype)  # files of another dtype than the first are converted
            if dtype is None:
                dtype = array.dtype
                _write_header(stream, dtype, rows)
            stream.write(array.data)
        if dtype is None:
            _write_header(stream, np.dtype(np.float32), rows)


def _write_header(stream: BinaryIO, dtype: np.dtype[Any], rows: UnlabelledRows) -> None:
    np.lib.format.write_array_header_1_0(
        stream,
        {
            "descr": np.lib.format.dtype_to_descr(dtype),
            "fortran_order": False,
            "shape": rows.shape,
        },
    )


def _table(suffix: str, probs: Tensor, rows: UnlabelledRows) -> bytes:
    """The table of the source with probabilities instead of the columns of its classes."""
    classes = rows.table.classes or tuple(map(str, range(rows.n_classes)))
    before, after = rows.table.before, rows.table.after
    names = [*(name for name, _ in before), *(f"prob_{name}" for name in classes), *(name for name, _ in after)]
    twice = next((name for name in names if names.count(name) > 1 and name.startswith("prob_")), None)
    if twice is not None:
        raise InputError(f"{rows.source}: expected no column {twice} beside the classes, found one")
    stream = io.BytesIO()
    if suffix == ".csv":
        text = io.TextIOWrapper(stream, encoding="utf-8", newline="")
        writer = csv.writer(text, lineterminator="\n")
        # enough digits to distinguish all float32 numbers
        text_of = repr if probs.dtype == torch.float64 else "{:.9g}".format
        cells = [[text_of(value) for value in column] for column in probs.T.tolist()]
        columns = [*(_as_text(column) for _, column in before), *cells, *(_as_text(column) for _, column in after)]
        writer.writerow(names)
        writer.writerows(zip(*columns, strict=True))
        text.flush()
        return stream.getvalue()
    try:
        import pyarrow
        from pyarrow import feather, parquet
    except ImportError as error:
        raise InputError(f"pyarrow is needed to write {suffix}: pip install pyarrow") from error
    columns = [*(column for _, column in before), *probs.numpy().T, *(column for _, column in after)]
    content = pyarrow.Table.from_arrays(
        [pyarrow.chunked_array([column]) if isinstance(column, list | np.ndarray) else column for column in columns],
        names=names,
    )
    (parquet.write_table if suffix == ".parquet" else feather.write_feather)(content, stream)
    return stream.getvalue()


def _as_text(column: Any) -> list[Any]:
    """A column as written to a .csv file: an empty cell is a missing value."""
    values: list[Any] = column if isinstance(column, list) else column.to_pylist()
    return values


def _encoded(suffix: str, arrays: dict[str, Tensor]) -> bytes:
    stream = io.BytesIO()
    if suffix == ".npz":
        np.savez(stream, **{name: tensor.numpy() for name, tensor in arrays.items()})  # type: ignore[arg-type]
    elif suffix == ".pt":
        torch.save(arrays, stream)
    else:
        try:
            from safetensors.torch import save
        except ImportError as error:
            raise InputError("safetensors is needed to write it: pip install safetensors") from error
        return bytes(save(arrays))
    return stream.getvalue()
