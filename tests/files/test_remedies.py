"""Errors about the contents of files name a remedy, and the file is read after it."""

import re

import numpy as np
import pytest
import torch

import focalkern as fk
from focalkern.files import InputError, read_sets
from focalkern.files.inputs import open_unlabelled
from focalkern.files.paths import matches
from focalkern.study import stream_sets

PROBS = np.array([[0.2, 0.8], [1.0, 0.0], [0.5, 0.5]], dtype=np.float32)
LABELS = np.array([1, 0, 1])


def write(path, **arrays):
    np.savez(path, **arrays)
    return path


@pytest.mark.parametrize("read", [read_sets, stream_sets])
def test_probabilities_in_a_file_called_logits(read, tmp_path):
    for name in ("val_logits.npy", "probs.npy"):
        np.save(tmp_path / name, PROBS)
    for name in ("val_labels.npy", "labels.npy"):
        np.save(tmp_path / name, LABELS)
    with pytest.raises(InputError, match="as probabilities do; pass input_kind=probs or"):
        read(tmp_path / "val_logits.npy")
    assert read(tmp_path / "val_logits.npy", input_kind="probs")[""].kind == "probs"
    with pytest.raises(InputError, match="expected logits, found a file that is called probs; pass input_kind=probs"):
        read(tmp_path / "probs.npy", input_kind="logits")


@pytest.mark.parametrize(
    ("array", "words"),
    [
        (100 * PROBS, r"; divide each row by its sum$"),
        (1.002 * PROBS, r"; keep more digits of rounded probabilities, or divide each row by its sum$"),
        (50 * PROBS, r"that sum to 50 in row 0 \(and 2 more such rows\)$"),
    ],
)
def test_probabilities_of_another_sum(array, words, tmp_path):
    with pytest.raises(InputError, match=f"probs: expected probabilities that sum to 1 within 0.001, found .*{words}"):
        read_sets(write(tmp_path / "a.npz", probs=array, labels=LABELS))
    read_sets(write(tmp_path / "a.npz", probs=array / array.sum(1, keepdims=True), labels=LABELS))


@pytest.mark.parametrize("read", [read_sets, stream_sets])
def test_percentages_in_a_file_called_logits(read, tmp_path):
    np.save(tmp_path / "logits.npy", 100 * PROBS)
    np.save(tmp_path / "labels.npy", LABELS)
    words = (
        "logits: expected logits, found non-negative rows that sum to 100, as percentages do; pass each row "
        "divided by its sum with input_kind=probs or, if they are logits, input_kind=logits"
    )
    with pytest.raises(InputError, match=f"{words}$"):
        read(tmp_path / "logits.npy")
    assert read(tmp_path / "logits.npy", input_kind="logits")[""].kind == "logits"
    np.save(tmp_path / "logits.npy", PROBS)
    assert read(tmp_path / "logits.npy", input_kind="probs")[""].kind == "probs"


@pytest.mark.parametrize("total", [1, 100])
def test_rounded_probabilities_are_no_logits(total, tmp_path):
    probs = np.random.default_rng(0).dirichlet(np.ones(5), size=60).round(2) * total
    labels = np.arange(60) % 5
    assert (np.abs(probs.sum(1) / total - 1) > 9e-3).any()
    with pytest.raises(InputError, match=f"found non-negative rows that sum to {total}, as"):
        read_sets(write(tmp_path / "a.npz", logits=probs, labels=labels))
    few = slice(0, 5)  # a few logits may have a sum near 1 by chance
    assert len(read_sets(write(tmp_path / "a.npz", logits=probs[few], labels=labels[few]))[""]) == 5


@pytest.mark.parametrize("options", [{}, {"logits_key": "[0-9]*", "labels_key": "label"}])
def test_a_gap_in_the_numbers_of_the_columns(options, tmp_path):
    path = tmp_path / "a.csv"
    remedy = r"number columns and labels from 0 to 2, or add the missing columns \(logits -inf, probabilities 0\)"
    path.write_text("0,1,3,label\n2,1,0.5,0\n1,2,0.5,3\n0,2,1,1\n")
    for read in (read_sets, open_unlabelled):
        with pytest.raises(InputError, match=f"found 0 to 3 without '2'; {remedy}$"):
            read(path, **{key: value for key, value in options.items() if read is read_sets or key == "logits_key"})
    path.write_text("0,1,2,label\n2,1,0.5,0\n1,2,0.5,2\n0,2,1,1\n")
    assert read_sets(path, **options)[""].labels.tolist() == [0, 2, 1]
    path.write_text("0,1,2,3,label\n2,1,-inf,0.5,0\n1,2,-inf,0.5,3\n0,2,-inf,1,1\n")
    rows = read_sets(path, **options)[""]
    assert rows.labels.tolist() == [0, 3, 1]
    calibrator = fk.SplineScaling().fit_quietly(rows.input, rows.labels)
    assert not calibrator.predict_proba(rows.input)[:, 2].any()


Z = np.linspace(-2, 3, 6, dtype=np.float32)
BINARY = np.array([0, 0, 1, 0, 1, 1])
TWO = np.stack([np.zeros_like(Z), Z], 1)


@pytest.mark.parametrize("suffix", [".npz", ".npy"])  # .npy also reads rows for apply
@pytest.mark.parametrize(
    ("logits", "labels", "words"),
    [
        (Z, BINARY, r"found \[6\]; for one logit z per row, save the two columns 0 and z \(for one probability p, 1 -"),
        (Z[:, None], BINARY, r"found \[6, 1\]; for one logit z per row, save the two columns 0 and z"),
        (TWO.astype(int), BINARY, r"found int64; convert them with .float\(\), in NumPy with .astype\('float32'\)$"),
        (TWO + 0j, BINARY, r"found complex64; complex numbers are not supported$"),
        (
            TWO,
            np.eye(2, dtype=int)[BINARY],
            r"found \[6, 2\]; save one-hot labels as class numbers: labels.argmax\(1\)$",
        ),
        (TWO, BINARY + 1, r"numbers from 0 to 1, not from 1 to 2 \(save labels - 1\), found 2 in row 2 \(and 2 more"),
        (TWO.T.copy(), BINARY, r"found \[6\]; logits must be \[N, C\]: save logits.T$"),
    ],
)
def test_shapes_and_dtypes(suffix, logits, labels, words, tmp_path):
    def read(logits, labels):
        if suffix == ".npz":
            return read_sets(write(tmp_path / "a.npz", logits=logits, labels=labels))[""]
        np.save(tmp_path / "logits.npy", logits)
        np.save(tmp_path / "labels.npy", labels)
        if labels.ndim == 1 and logits.shape != TWO.T.shape:  # without labels, these are logits of six classes
            open_unlabelled(tmp_path / "logits.npy")
        return read_sets(tmp_path / "logits.npy")[""]

    with pytest.raises(InputError, match=words):
        read(logits, labels)
    assert read(TWO, BINARY).labels.tolist() == BINARY.tolist()


def test_two_columns_hold_one_logit():
    of_columns, of_one = (
        fk.TemperatureScaling().fit_quietly(TWO, BINARY),
        fk.TemperatureScaling().fit_quietly(Z, BINARY),
    )
    assert of_columns.temperature_ == of_one.temperature_


@pytest.mark.parametrize(
    ("arrays", "words"),
    [
        ({"logits": TWO}, r"found logits \[6, 2\]; save them in the same file$"),
        ({"logits": TWO, "y": BINARY}, r"y \[6\]; pass labels_key=NAME$"),
        (
            {"logits": TWO.astype("U8"), "labels": BINARY},
            r"found <U8; convert them .* in NumPy with .astype\('float32'\)",
        ),
    ],
)
def test_labels_that_are_missing_and_numbers_as_text(arrays, words, tmp_path):
    with pytest.raises(InputError, match=words):
        read_sets(write(tmp_path / "a.npz", **arrays))
    assert len(read_sets(write(tmp_path / "a.npz", logits=TWO, labels=BINARY))[""]) == 6


def test_a_table_without_a_header(tmp_path):
    path = tmp_path / "a.csv"
    path.write_text("1,-0.5,2.25\n0,1.5,0.5\n")
    for read in (read_sets, open_unlabelled):
        with pytest.raises(
            InputError, match=r"header line, found 1, -0.5, 2.25; begin with a line such as label,0,1,2$"
        ):
            read(path)
    path.write_text("label,0,1\n" + path.read_text())
    assert read_sets(path)[""].labels.tolist() == [1, 0]
    path.write_text("0,1\n-0.5,2.25\n1.5,0.5\n")  # numbers of classes
    assert open_unlabelled(path)[""].shape == (2, 2)


def test_a_folder_of_folders(tmp_path):
    (tmp_path / "runs" / "a").mkdir(parents=True)
    write(tmp_path / "runs" / "a" / "x.npz", logits=TWO, labels=BINARY)
    with pytest.raises(
        InputError, match=r"found a folder without any of .npz, .* for files in its folders pass "
    ) as caught:
        read_sets(str(tmp_path / "runs"))
    pattern = str(caught.value).rpartition(" ")[2].strip("'")
    assert matches(pattern) == [str(tmp_path / "runs" / "a" / "x.npz")]


def test_a_damaged_table(tmp_path):
    pytest.importorskip("pyarrow", reason="pyarrow is not installed")
    (tmp_path / "a.parquet").write_bytes(b"PAR1")
    with pytest.raises(InputError, match="found a damaged or truncated file, or another format"):
        read_sets(tmp_path / "a.parquet")


def test_long_names_are_cut(tmp_path):
    path = write(tmp_path / "a.npz", **{"n" * 300: PROBS, "m" * 300: LABELS})
    with pytest.raises(InputError, match=r"found n{77}\.\.\. \[3, 2\], m{77}\.\.\. \[3\]; pass logits_key=NAME"):
        read_sets(path)


def test_float8_is_told_to_be_converted(tmp_path):
    """torch has no arithmetic for it."""
    logits = torch.from_numpy(TWO).to(torch.float8_e4m3fn)
    torch.save({"logits": logits, "labels": torch.from_numpy(BINARY)}, tmp_path / "a.pt")
    words = r"logits: expected floating point, found float8_e4m3fn; convert them with .float\(\)"
    for read in (read_sets, open_unlabelled):
        with pytest.raises(InputError, match=words):
            read(tmp_path / "a.pt")
    with pytest.raises(ValueError, match=r"float8_e4m3fn; convert them with .float\(\)"):
        fk.compare_calibrators((logits, BINARY), resamples=0)


@pytest.mark.parametrize("suffix", [".csv", ".parquet", ".frame"])
def test_a_column_of_text_among_named_classes(suffix, tmp_path):
    pandas = pytest.importorskip("pandas")
    classes = {"cat": [1.5, -0.5], "note": ["a", "b"], "dog": [0.5, 2.5], "place": ["x", "y"]}
    frame, path = pandas.DataFrame({**classes, "label": ["cat", "dog"]}), tmp_path / f"table{suffix}"
    if suffix == ".csv":
        frame.to_csv(path, index=False)
    elif suffix == ".parquet":
        pytest.importorskip("pyarrow")
        frame.to_parquet(path)
    # The first row of text tells which columns of a .csv file are text; columns with a dtype are named one by one.
    out = "'*,!note,!place'" if suffix == ".csv" else "'*,!note'"

    def read(**options):
        return fk.files.from_frame(frame, **options) if suffix == ".frame" else read_sets(path, **options)[""]

    with pytest.raises(InputError, match=rf"note'?: expected .*; pass logits_key={re.escape(out)}, labels_key=label$"):
        read()
    with pytest.raises(InputError, match=re.escape("pass logits_key='*,!note,!place', labels_key=label")):
        read(logits_key="*,!note")
    assert read(logits_key="*,!note,!place").classes == ("cat", "dog")
    if suffix != ".frame":
        with pytest.raises(InputError, match=re.escape(f"pass logits_key={out}") + "$"):
            open_unlabelled(str(path), labels_key="label")


def test_a_typing_error_in_a_later_row_leaves_out_no_column(tmp_path):
    (tmp_path / "table.csv").write_text("a,b,c,label\n0.5,1,2,0\n0.5,1.0.5,2,1\n")
    with pytest.raises(InputError, match=r"line 3, column 'b': expected a number such as 0.25, found '1.0.5'$"):
        read_sets(tmp_path / "table.csv")
