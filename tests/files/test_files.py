"""Reading logits: every format, and every kind of invalid file."""

import io
import pickle
import zipfile

import numpy as np
import pytest
import torch

from focalkern.files import InputError, read_sets
from focalkern.files.shards import open_shards

LOGITS = np.array([[1.0, 2.0, 0.5], [0.25, -1.0, 3.0], [2.0, 0.0, 1.0], [-4.0, 0.5, 0.25]], dtype=np.float32)
LABELS = np.array([1, 2, 0, 1])
PROBS = np.array([[0.2, 0.8], [1.0, 0.0], [0.5, 0.5]], dtype=np.float32)
PROB_LABELS = np.array([1, 0, 1])


def same(found, values=LOGITS, labels=LABELS, kind="logits", name=""):
    assert np.array_equal(found.input.double().numpy(), values.astype(np.float64))
    assert found.labels.tolist() == labels.tolist()
    assert found.labels.dtype == torch.int64
    assert (found.kind, found.name) == (kind, name)
    assert (len(found), found.n_classes) == values.shape


def write(path, **arrays):
    """A file in one of the formats that hold arrays by name."""
    if path.suffix == ".npz":
        np.savez(path, **arrays)
    elif path.suffix in (".pt", ".pth"):
        torch.save({key: torch.from_numpy(value) for key, value in arrays.items()}, path)
    else:
        safetensors = pytest.importorskip("safetensors.torch", reason="safetensors is not installed")
        safetensors.save_file({key: torch.from_numpy(value) for key, value in arrays.items()}, path)
    return path


@pytest.mark.parametrize("suffix", [".npz", ".pt", ".pth", ".safetensors"])
def test_arrays_by_name(suffix, tmp_path):
    path = write(tmp_path / f"a{suffix}", logits=LOGITS, labels=LABELS)
    sets = read_sets(path)
    assert list(sets) == [""]
    same(sets[""])
    assert sets[""].source == str(path)
    reverse = LABELS[::-1].copy()
    both = read_sets(
        write(tmp_path / f"b{suffix}", val_logits=LOGITS, val_labels=LABELS, test_logits=-LOGITS, test_labels=reverse)
    )
    assert list(both) == ["val", "test"]
    same(both["val"], name="val")
    same(both["test"], -LOGITS, LABELS[::-1], name="test")
    same(
        read_sets(write(tmp_path / f"c{suffix}", test_probs=PROBS, test_labels=PROB_LABELS))["test"],
        PROBS,
        PROB_LABELS,
        "probs",
        "test",
    )


def test_half_precision_tensors(tmp_path):
    torch.save({"logits": torch.from_numpy(LOGITS).bfloat16(), "labels": torch.from_numpy(LABELS)}, tmp_path / "a.pt")
    same(read_sets(tmp_path / "a.pt")[""])


@pytest.mark.parametrize("dtype", ["<i4", ">i4", "u1", "u2", "<u8", "i1"])
def test_labels_of_any_integer_type(dtype, tmp_path):
    same(read_sets(write(tmp_path / "a.npz", logits=LOGITS, labels=LABELS.astype(dtype)))[""])


def test_logits_of_another_byte_order_and_of_fortran_order(tmp_path):
    same(read_sets(write(tmp_path / "a.npz", logits=np.asfortranarray(LOGITS.astype(">f8")), labels=LABELS))[""])


@pytest.mark.parametrize(
    ("name", "labels"),
    [("logits.npy", "labels.npy"), ("val_logits.npy", "val_labels.npy"), ("run.7_logits.npy", "run.7_labels.npy")],
)
def test_npy_finds_its_labels_beside_it(name, labels, tmp_path):
    np.save(tmp_path / name, LOGITS)
    np.save(tmp_path / labels, LABELS)
    same(read_sets(tmp_path / name)[""])


def test_npy_of_probabilities_and_with_labels_elsewhere(tmp_path):
    np.save(tmp_path / "probs.npy", PROBS)
    np.save(tmp_path / "labels.npy", PROB_LABELS)
    same(read_sets(tmp_path / "probs.npy")[""], PROBS, PROB_LABELS, "probs")
    np.save(tmp_path / "scores.npy", PROBS)
    with pytest.raises(InputError, match=r"scores.npy: logits: expected logits, found non-negative rows"):
        read_sets(tmp_path / "scores.npy", labels=tmp_path / "labels.npy")
    same(
        read_sets(tmp_path / "scores.npy", labels=tmp_path / "labels.npy", input_kind="logits")[""], PROBS, PROB_LABELS
    )
    same(
        read_sets(tmp_path / "scores.npy", labels=tmp_path / "labels.npy", input_kind="probs")[""],
        PROBS,
        PROB_LABELS,
        "probs",
    )


@pytest.mark.parametrize("label", ["label", "labels", "target", "Label "])
def test_csv(label, tmp_path):
    lines = [f"a,{label},b,c"] + [f"{x},{y},{v},{w}" for (x, v, w), y in zip(LOGITS.tolist(), LABELS, strict=True)]
    # A byte-order mark, Windows line endings and a final blank line, as spreadsheets write them.
    (tmp_path / "a.csv").write_bytes(b"\xef\xbb\xbf" + "\r\n".join([*lines, "", ""]).encode())
    same(read_sets(tmp_path / "a.csv")[""])


def test_csv_of_probabilities(tmp_path):
    (tmp_path / "a.csv").write_text("label,cat,dog\n1,0.2,0.8\n0,1.0,0\n")
    same(
        read_sets(tmp_path / "a.csv", input_kind="probs")[""], np.array([[0.2, 0.8], [1, 0]]), np.array([1, 0]), "probs"
    )


def test_minus_infinity_is_a_class_that_is_ruled_out(tmp_path):
    logits = LOGITS.copy()
    logits[0, 0] = -np.inf
    same(read_sets(write(tmp_path / "a.npz", logits=logits, labels=LABELS))[""], logits)


def test_the_kind_is_what_the_caller_or_the_name_says(tmp_path):
    path = write(tmp_path / "a.npz", logits=LOGITS[:3, :2], probs=PROBS, labels=PROB_LABELS)
    same(read_sets(path, input_kind="probs")[""], PROBS, PROB_LABELS, "probs")
    same(read_sets(path, input_kind="logits")[""], LOGITS[:3, :2], PROB_LABELS)
    with pytest.raises(InputError, match="found both; pass input_kind=logits or input_kind=probs"):
        read_sets(path)
    only = write(tmp_path / "b.npz", val_logits=LOGITS, val_labels=LABELS)
    with pytest.raises(
        InputError, match=r"val_logits: expected probabilities that sum to 1 within 0\.001, found values"
    ):
        read_sets(only, input_kind="probs")
    misnamed = write(tmp_path / "c.npz", val_logits=PROBS, val_labels=PROB_LABELS)
    same(read_sets(misnamed, input_kind="probs")["val"], PROBS, PROB_LABELS, "probs", "val")
    only = write(tmp_path / "d.npz", probs=PROBS, labels=PROB_LABELS)
    with pytest.raises(InputError, match=r"expected logits, found probs \[.*; pass input_kind=probs"):
        read_sets(only, input_kind="logits")


def rows(values, **cells):
    changed = values.copy()
    for place, value in cells.items():
        changed[int(place[1:])] = value
    return changed


@pytest.mark.parametrize("suffix", [".npz", ".pt", ".safetensors"])
@pytest.mark.parametrize(
    ("arrays", "words"),
    [
        ({"logits": LOGITS}, "expected labels beside logits, found logits [4, 3]"),
        ({"labels": LABELS}, "expected logits and labels"),
        ({"val_logits": LOGITS, "labels": LABELS}, "expected val_labels beside val_logits"),
        ({"conf": LOGITS, "labels": LABELS}, "of all classes are needed, not those of the top class"),
        (
            {"logits": LOGITS[0], "labels": LABELS},
            "logits: expected [N, C] or [N, C, d1, ...] with C >= 2 classes, found [3]",
        ),
        ({"logits": LOGITS[:, :1].copy(), "labels": LABELS * 0}, "with C >= 2 classes, found [4, 1]"),
        ({"logits": LOGITS[None], "labels": LABELS}, "[N, d1] = [1, 3] to go with logits [1, 4, 3], found [4]"),
        ({"logits": LOGITS[:0], "labels": LABELS[:0]}, "expected at least one row, found none"),
        ({"logits": LOGITS.astype(int), "labels": LABELS}, "logits: expected floating point, found int64"),
        ({"logits": LOGITS, "labels": LABELS + 0.5}, "labels: expected "),
        (
            {"logits": LOGITS, "labels": LABELS > 0},
            "labels: expected integer class numbers, found bool; convert them with .long()",
        ),
        ({"logits": LOGITS, "labels": LABELS[:3].copy()}, "expected [N] = [4] to go with logits [4, 3], found [3]"),
        ({"logits": LOGITS, "labels": LABELS[:, None].copy()}, "found [4, 1]"),
        ({"logits": LOGITS, "labels": LABELS + 1}, "not from 1 to 3 (save labels - 1), found 3 in row 1"),
        ({"logits": LOGITS, "labels": rows(LABELS, r0=-1)}, "found -1 in row 0"),
        ({"logits": LOGITS, "labels": rows(LABELS, r3=-100)}, "found -100 in row 3"),
        ({"logits": rows(LOGITS, r2=np.nan), "labels": LABELS}, "found NaN in row 2"),
        ({"logits": rows(LOGITS, r2=np.inf, r3=np.inf), "labels": LABELS}, "+inf in row 2 (and 1 more such row)"),
        ({"logits": rows(LOGITS, r1=-np.inf), "labels": LABELS}, "found only -inf in row 1"),
        (
            {"probs": LOGITS[:, :2].copy(), "labels": LABELS * 0},
            "probabilities that sum to 1 within 0.001, found",
        ),
        ({"probs": PROBS * 1.002, "labels": PROB_LABELS}, "that sum to 1.002 in row 0 (and 2 more such rows)"),
        ({"probs": rows(PROBS, r1=np.nan), "labels": PROB_LABELS}, "found NaN in row 1"),
    ],
)
def test_contents_that_do_not_fit(suffix, arrays, words, tmp_path):
    path = write(tmp_path / f"a{suffix}", **arrays)
    with pytest.raises(InputError) as caught:
        read_sets(path)
    assert str(caught.value).startswith(f"{path}: ")
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


class Trap:
    """A pickle that leaves a mark when it is loaded."""

    def __init__(self, mark):
        self.mark = mark

    def __reduce__(self):
        return open, (str(self.mark), "w")


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (torch.Tensor.to_sparse, "found a tensor of layout torch.sparse_coo"),
        (lambda z: z.to("meta"), "found a tensor of the meta device, which has no values"),
        (lambda z: torch.quantize_per_tensor(z, 0.1, 0, torch.qint8), "found a quantized tensor"),
    ],
)
@pytest.mark.filterwarnings("ignore")  # a warning of torch about quantized tensors
def test_tensors_that_are_not_plain(spoil, words, tmp_path):
    path = tmp_path / "a.pt"
    torch.save({"logits": spoil(torch.ones(4, 3)), "labels": torch.zeros(4, dtype=torch.int64)}, path)
    with pytest.raises(InputError, match=words):
        read_sets(path)


def test_pickled_objects_are_refused_and_not_executed(tmp_path):
    mark = tmp_path / "executed"
    np.savez(tmp_path / "a.npz", logits=np.array([[Trap(mark)]], dtype=object), labels=LABELS)
    np.save(tmp_path / "logits.npy", np.array([Trap(mark)], dtype=object))
    np.save(tmp_path / "labels.npy", LABELS)
    torch.save({"logits": Trap(mark), "labels": torch.from_numpy(LABELS)}, tmp_path / "a.pt")
    (tmp_path / "b.npz").write_bytes(pickle.dumps(Trap(mark)))
    (tmp_path / "b.pt").write_bytes(pickle.dumps(Trap(mark)))
    for name in ("a.npz", "logits.npy", "a.pt", "b.npz", "b.pt"):
        with pytest.raises(InputError, match=r"pickled|damaged") as caught:
            read_sets(tmp_path / name)
        assert str(caught.value).startswith(f"{tmp_path / name}: expected ")
        assert "\n" not in str(caught.value)
    assert not mark.exists()


@pytest.mark.parametrize("suffix", [".npz", ".pt", ".safetensors", ".npy"])
@pytest.mark.parametrize("keep", [0.0, 0.02, 0.5, 0.97])
def test_truncated_files(suffix, keep, tmp_path):
    path = tmp_path / f"logits{suffix}"
    if suffix == ".npy":
        np.save(path, LOGITS)
        np.save(tmp_path / "labels.npy", LABELS)
    else:
        write(path, logits=LOGITS, labels=LABELS)
    data = path.read_bytes()
    path.write_bytes(data[: int(len(data) * keep)])
    with pytest.raises(InputError) as caught:
        read_sets(path)
    assert str(caught.value).startswith(f"{path}: expected ")
    assert "\n" not in str(caught.value)


def test_the_reason_of_a_damaged_pickle_is_readable(tmp_path):
    """The unpickler raises KeyError(101) for the first, EOFError() for the second, and torch names a line of its source
    for the third."""
    path = write(tmp_path / "a.pt", logits=LOGITS, labels=LABELS)
    newer = io.BytesIO()
    with zipfile.ZipFile(path) as archive, zipfile.ZipFile(newer, "w") as changed:
        for name in archive.namelist():
            changed.writestr(name, b"99\n" if name.endswith("/version") else archive.read(name))
    version = (
        "Attempted to read a PyTorch file with version 99, but the maximum supported version for reading is [0-9]+"
    )
    for content, reason in (
        (b"hello", "it refers to an entry that it does not have"),
        (b"", "it ends too early"),
        (newer.getvalue(), version),
    ):
        path.write_bytes(content)
        with pytest.raises(InputError, match=rf"found a damaged or truncated file, or another format \({reason}\)$"):
            read_sets(path)


def test_the_reason_of_a_damaged_header_has_no_address(tmp_path):
    np.save(tmp_path / "labels.npy", LABELS)
    np.save(tmp_path / "logits.npy", LOGITS)
    content = (tmp_path / "logits.npy").read_bytes()
    (tmp_path / "logits.npy").write_bytes(content.replace(b"False", b"F4lse"))
    for read in (read_sets, open_shards):
        with pytest.raises(InputError, match=r"or another format \(malformed node or string on line 1\)$"):
            read(tmp_path / "logits.npy")


def test_damaged_inside(tmp_path):
    path = write(tmp_path / "a.npz", logits=LOGITS, labels=LABELS)
    with zipfile.ZipFile(path) as archive:
        data = archive.read("logits.npy")
    spoiled = path.read_bytes().replace(data[-16:], b"\0" * 16)
    path.write_bytes(spoiled)
    with pytest.raises(InputError, match="expected an array in logits, found a damaged or truncated file"):
        read_sets(path)


def test_formats_under_the_wrong_name(tmp_path):
    np.save(tmp_path / "a.npy", LOGITS)
    (tmp_path / "a.npy").rename(tmp_path / "a.npz")
    with pytest.raises(InputError, match=r"expected an \.npz file of arrays, found a single array \[4, 3\]"):
        read_sets(tmp_path / "a.npz")
    write(tmp_path / "b.npz", logits=LOGITS, labels=LABELS).rename(tmp_path / "logits.npy")
    np.save(tmp_path / "labels.npy", LABELS)
    with pytest.raises(InputError, match="found an archive of logits, labels"):
        read_sets(tmp_path / "logits.npy")
    torch.save(torch.from_numpy(LOGITS), tmp_path / "c.pt")
    with pytest.raises(InputError, match=r"expected a dict of tensors with logits and labels, found a tensor \[4, 3\]"):
        read_sets(tmp_path / "c.pt")
    torch.save({"logits": "none", "labels": torch.from_numpy(LABELS)}, tmp_path / "d.pt")
    with pytest.raises(InputError, match="logits: expected an array of numbers"):
        read_sets(tmp_path / "d.pt")


def test_paths_that_are_no_file(tmp_path):
    with pytest.raises(InputError, match=r"missing\.npz: expected a file, found nothing there"):
        read_sets(tmp_path / "missing.npz")
    (tmp_path / "folder.npz").mkdir()
    with pytest.raises(InputError, match=r"folder\.npz: expected at least one file, found a folder without any"):
        read_sets(tmp_path / "folder.npz")
    with pytest.raises(InputError, match=r"expected \.npz, .*, found '\.xlsx'"):
        read_sets(tmp_path / "a.xlsx")


def test_npy_without_labels(tmp_path):
    np.save(tmp_path / "val_logits.npy", LOGITS)
    with pytest.raises(InputError, match=r"its labels in .*val_labels\.npy, found nothing there; pass labels=FILE.npy"):
        read_sets(tmp_path / "val_logits.npy")
    with pytest.raises(InputError, match=r"nothing\.npy: expected the labels of .*val_logits\.npy, found nothing"):
        read_sets(tmp_path / "val_logits.npy", labels=tmp_path / "nothing.npy")
    np.save(tmp_path / "scores.npy", LOGITS)
    with pytest.raises(
        InputError, match=r"expected a name that ends in logits\.npy or probs\.npy, .*; pass labels=FILE.npy"
    ):
        read_sets(tmp_path / "scores.npy")


def test_labels_option_for_a_file_that_has_its_own(tmp_path):
    path = write(tmp_path / "a.npz", logits=LOGITS, labels=LABELS)
    with pytest.raises(InputError, match=r"expected no other file of labels, because a \.\w+ file has them in it"):
        read_sets(path, labels=path)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "expected a header line with the names of the columns, found an empty file"),
        ("1,0.5,0.5\n", "expected a header line, found 1, 0.5, 0.5; begin with a line such as label,0,1,2"),
        ("label,target,a\n", "found several in: label, target, a"),
        ("label,a,b\n", "expected at least one row, found none"),
        ("label,a,b\n0,1.0\n", "line 2: expected 3 columns as in the header, found 2"),
        ("label,a,b\n0,1.0,2.0\n0.5,1,2\n", "label: expected class numbers or names, found 0.5 in row 1"),
        ("label,a,b\n0,1.0,cat\n", "line 2, column 'b': expected a number such as 0.25, found 'cat'"),
        (f"label,a,b\n0,1.0,{'x' * 200}\n", f"expected a number such as 0.25, found '{'x' * 76}..."),
        (f"label,a,b\n{'x' * 200},1,2\n", f"expected one of the columns a, b, found '{'x' * 76}... in row 0"),
        (f"label,0,1\n{'x' * 200},1,2\nb,1,2\nc,1,2\n", f"found 3: 'b', 'c', '{'x' * 76}..."),
        ("label,p_0,p_1,p_1\n0,1,2,3\n", "found several called 'p_1'; rename or delete all but one"),
        ("label,a,b\n0,,1.0\n", "line 2, column 'a': expected a number such as 0.25, found an empty cell"),
        ("label,a\n0,1.0\n", "with C >= 2 classes, found [1, 1]"),
        ("label,a,b\n0,nan,1\n", "found NaN in row 0"),
        ("label,a,b\n2,0,1\n", "expected class numbers from 0 to 1, found 2 in row 0"),
    ],
)
def test_bad_csv(text, words, tmp_path):
    (tmp_path / "a.csv").write_text(text)
    with pytest.raises(InputError) as caught:
        read_sets(tmp_path / "a.csv")
    assert str(caught.value).startswith(f"{tmp_path / 'a.csv'}: ")
    assert words in str(caught.value)


def test_binary_csv(tmp_path):
    (tmp_path / "a.csv").write_bytes(bytes(range(256)))
    with pytest.raises(
        InputError, match="with comma-separated values in UTF-8, found other bytes; save the table as CSV in UTF-8"
    ):
        read_sets(tmp_path / "a.csv")
