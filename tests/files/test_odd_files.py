"""Damaged and odd files for every reader: it returns rows or raises one line that names the file. No file may cause a
raw error, a crash or a hang.

The examples are the same in every run. With ``FOCALKERN_FUZZ=20000`` in the environment, 20000 new ones are drawn.
"""

# ruff: noqa: PT017  an error is allowed here; only its message is checked

import csv
import io
import json
import warnings

import numpy as np
import pytest
import torch
from odd_arguments import Y, Z, examples

import focalkern as fk
from focalkern.files import InputError, from_frame, read_sets
from focalkern.files.inputs import open_unlabelled
from focalkern.files.shards import open_shards


def csv_text(rows):
    stream = io.StringIO()
    csv.writer(stream).writerows(rows)
    return stream.getvalue().encode(errors="replace")


def seeds():
    """A valid file of each format."""
    files = {}
    stream = io.BytesIO()
    np.savez(stream, logits=Z, labels=Y)
    files[".npz"] = stream.getvalue()
    stream = io.BytesIO()
    np.save(stream, Z)
    files[".npy"] = stream.getvalue()
    stream = io.BytesIO()
    torch.save({"logits": torch.from_numpy(Z), "labels": torch.from_numpy(Y)}, stream)
    files[".pt"] = stream.getvalue()
    files[".csv"] = csv_text([["label", *map(str, range(4))], *([y, *z] for y, z in zip(Y, Z, strict=True))])
    try:
        from safetensors.numpy import save

        files[".safetensors"] = save({"logits": Z, "labels": Y})
    except ImportError:
        pass
    try:
        import pyarrow
        from pyarrow import feather, parquet

        table = pyarrow.table({"label": Y, **{str(c): Z[:, c] for c in range(4)}})
        for suffix, write in ((".parquet", parquet.write_table), (".feather", feather.write_feather)):
            stream = io.BytesIO()
            write(table, stream)
            files[suffix] = stream.getvalue()
    except ImportError:
        pass
    return files


SEEDS = seeds()


def assert_one_line(error, folder):
    text = str(error)
    assert "\n" not in text and str(folder) in text and len(text) < 1000, text


def damaged(random, good):
    """The bytes with up to four faults; one time in ten, other bytes."""
    if random.random() < 0.1:
        return random.bytes(random.integers(65))
    data = bytearray(good)
    for _ in range(random.integers(5)):
        place = int(random.integers(len(data) + 1))
        kind = random.integers(4)
        if kind == 0 and place < len(data):
            data[place] = random.integers(256)
        elif kind == 1:
            data[place:place] = random.bytes(random.integers(9))
        elif kind == 2:
            del data[place:]
        elif kind == 3:
            del data[place : place + random.integers(1, 65)]
    return bytes(data)


@pytest.mark.parametrize("suffix", SEEDS)
def test_any_file(suffix, tmp_path):
    path = tmp_path / f"a_logits{suffix}"
    np.save(tmp_path / "a_labels.npy", Y)

    for random in examples(60):
        path.write_bytes(damaged(random, SEEDS[suffix]))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for read in (read_sets, lambda path: open_shards(str(path), labels=None, input_kind=None)):
                try:
                    for rows in read(path).values():
                        for _ in rows.batches(0, len(rows), 100) if hasattr(rows, "batches") else ():
                            pass
                except InputError as error:
                    assert_one_line(error, tmp_path)
            try:
                for rows in open_unlabelled(str(path)).values():
                    for _ in rows.batches(100):
                        pass
            except InputError as error:
                assert_one_line(error, tmp_path)


CELLS = [
    "",
    "0",
    "1",
    "-1",
    "3.0",
    "nan",
    "inf",
    "1e400",
    "cat",
    "label",
    "id",
    "0x1",
    "１",
    "1_0",
    '"',
    "\r",
    "a\nb",
    "\0",
]
CELLS += ["-0.0", "5e-324", "1.7976931348623157e308", " 1", "1,5", "٣", "😀"]
NAMES = [
    "label",
    "target",
    "0",
    "1",
    "2",
    "00",
    "logit_0",
    "logit_1",
    "",
    "id",
    "p_99999999999999999999",
    "²",
    "a\nb",
    "٣",
]
NAMES += ["p_0", "p_1", "p_2", "-1", "[0]", "*", "\0", "0.0"]
KEYS = [None, "*", "[", "p_*", "", "label"]


def test_any_table(tmp_path):
    path = tmp_path / "a.csv"
    pd = pytest.importorskip("pandas")

    def some(random, words, most):
        return [words[place] for place in random.integers(len(words), size=random.integers(most + 1))]

    for random in examples(300):
        header, key = some(random, NAMES, 6), KEYS[random.integers(len(KEYS))]
        rows = [some(random, CELLS, 6) for _ in range(random.integers(6))]
        if random.random() < 0.7:  # a valid table
            header = ["label", *dict.fromkeys(name for name in header if name not in ("label", "target"))]
            rows = [([str(random.integers(3))] + row + ["0"] * len(header))[: len(header)] for row in rows]
        path.write_bytes(csv_text([header, *rows]))
        try:
            read_sets(path, logits_key=key)
        except InputError as error:
            assert str(error).startswith(str(path))
        width = len(header)
        frame = pd.DataFrame([(row + ["0"] * width)[:width] for row in rows], columns=header)
        for given_frame in (frame, frame.apply(pd.to_numeric, errors="coerce")):
            try:
                from_frame(given_frame, logits_key=key)
            except InputError as error:
                assert str(error).startswith("frame")


FITTED = {
    "temperature": lambda: fk.TemperatureScaling(),
    "focal": lambda: fk.FocalTemperatureScaling(),
    "histogram": lambda: fk.HistogramBinning(n_bins=3, scaling=fk.TemperatureScaling()),
    "isotonic": lambda: fk.IsotonicCalibration(),
    "spline": lambda: fk.SplineScaling(),
    "spline-matrix": lambda: fk.SplineScaling(kind="matrix"),
    "structured": lambda: fk.StructuredScaling(),
    "multi-label": lambda: fk.MultiLabelScaling(),
}


@pytest.mark.parametrize("kind", FITTED)
def test_any_calibrator_file(kind, tmp_path):
    """Damaged bytes, and valid JSON in which a value has another type; calibrators that load are also applied."""
    path = tmp_path / "a.json"
    logits = np.random.default_rng(0).normal(size=(30, 4))
    target = (logits > 0).astype(int) if kind == "multi-label" else np.arange(30) % 4
    FITTED[kind]().fit_quietly(logits, target).save(path)
    good = path.read_bytes()
    document = json.loads(good)
    places = [*places_of(document)]
    for random in examples(150):
        if random.random() < 0.5:
            path.write_bytes(damaged(random, good))
        else:
            changed = replaced(document, places[random.integers(len(places))], ODD[random.integers(len(ODD))])
            path.write_bytes(changed)
        try:
            calibrator = fk.load_calibrator(path)
        except ValueError as error:
            assert_one_line(error, tmp_path)
            continue
        try:
            calibrator.predict_proba(logits)
        except (TypeError, ValueError) as error:  # with other classes than before
            assert str(error).startswith(type(calibrator).__name__), str(error)


ODD = [None, True, -1, 0, 1e308, 10**400, "", "nll", [], {}, [None], [[1.0]], {"a": 1}]


def places_of(value, place=()):
    """The path to every value of a document."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, part in inner:
        yield (*place, key)
        yield from places_of(part, (*place, key))


def replaced(document, place, value):
    document = json.loads(json.dumps(document))
    part = document
    for key in place[:-1]:
        part = part[key]
    part[place[-1]] = value
    return json.dumps(document).encode()
