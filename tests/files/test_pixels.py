"""Files of pixels [N, C, d1, ...] give bitwise the results of the same pixels as rows [N d1 ..., C]."""

import json
import os

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import focalkern as fk
from focalkern.files import InputError, pixels, read_sets
from focalkern.files.samples import as_tensor

N, C, SHAPE, VOID = 12, 3, (5, 4), 255


def images(seed=0, n=N):
    """[N, C, d1, d2] logits, and labels of which a third are ignored: all of one image and none of another."""
    random = np.random.RandomState(seed)
    labels = random.randint(C, size=(n, *SHAPE)).astype(np.uint8)
    logits = np.moveaxis(2 * np.eye(C)[labels], -1, 1) + random.standard_normal((n, C, *SHAPE))
    labels[random.uniform(size=labels.shape) < 0.3] = VOID
    labels[1], labels[2] = VOID, 0
    return logits.astype(np.float32), labels


def by_hand(logits, labels):
    """The pixels that count, as rows."""
    places = [place for place in np.ndindex(labels.shape) if labels[place] != VOID]
    rows = np.stack([logits[(place[0], slice(None), *place[1:])] for place in places])
    return rows, np.array([labels[place] for place in places], dtype=np.int64)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(pixels, "_NUMBERS", 3 * C * 20)  # three images at a time
    return tmp_path


def write(name, logits, labels):
    suffix = os.path.splitext(name)[1]
    if suffix == ".npz":
        np.savez(name, logits=logits, labels=labels)
    elif suffix == ".npy":
        np.save(name, logits)
        np.save(name.replace("logits", "labels"), labels)
    else:
        tensors = {"logits": torch.from_numpy(logits), "labels": torch.from_numpy(labels)}
        if suffix == ".pt":
            torch.save(tensors, name)
        else:
            pytest.importorskip("safetensors.torch").save_file(tensors, name)
    return name


def same(found, expected):
    assert torch.equal(found.input, torch.from_numpy(expected[0])) and found.input.is_contiguous()
    assert torch.equal(found.labels, torch.from_numpy(expected[1]))


@pytest.mark.parametrize("name", ["a.npz", "logits.npy", "a.pt", "a.safetensors"])
def test_pixels_are_rows(folder, name):
    logits, labels = images()
    write(name, logits, labels)
    same(read_sets(name, ignore_index=VOID)[""], by_hand(logits, labels))
    labels %= C
    write(name, logits, labels)
    same(read_sets(name)[""], by_hand(logits, labels))
    rows = by_hand(logits, labels)
    rows[1][::3] = -100
    write(name, *rows)
    same(read_sets(name, ignore_index=-100)[""], (rows[0][rows[1] >= 0], rows[1][rows[1] >= 0]))


def test_images_of_other_sizes_follow_each_other(folder):
    first, second = images(1, 3), images(2, 4)
    second = (second[0][..., :2].copy(), second[1][..., :2].copy())
    for place, given in enumerate((first, second)):
        write(f"{place}_logits.npy", *given)
        write(f"{place}.npz", *given)
    expected = [np.concatenate(parts) for parts in zip(by_hand(*first), by_hand(*second), strict=True)]
    same(read_sets("*_logits.npy", ignore_index=VOID)[""], expected)
    same(read_sets("*.npz", ignore_index=VOID)[""], expected)


@pytest.mark.parametrize("ignored", [True, False])
def test_batches_of_streamed_pixels(folder, ignored):
    logits, labels = images()
    if not ignored:
        labels %= C
    write("logits.npy", logits, labels)
    rows = fk.study.stream_sets("logits.npy", ignore_index=VOID if ignored else None)[""]
    expected = by_hand(logits, labels)
    assert len(rows) == len(expected[1])
    for at_once in (1, 7, 1000):
        firsts, inputs, targets = zip(*rows.shards.batches(2, len(rows), at_once), strict=True)
        assert list(firsts) == list(range(2, len(rows), at_once))
        assert torch.equal(torch.cat(inputs), torch.from_numpy(expected[0][2:]))
        assert torch.equal(torch.cat(targets), torch.from_numpy(expected[1][2:]))
    if not ignored:  # a saved search then belongs to another set
        other = fk.study.stream_sets("logits.npy", ignore_index=VOID)[""]
        assert len(other) == len(rows) and other.shards.shards[0].stamp() != rows.shards.shards[0].stamp()


def test_no_copy_is_larger_than_the_rows(folder):
    """Apart from the rows, no new tensor of logits is larger than three images."""
    logits, labels = images(n=60)
    sizes = []

    class Sizes(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            found = function(*args, **(kwargs or {}))
            given = [one.untyped_storage().data_ptr() for one in args if isinstance(one, torch.Tensor)]
            if isinstance(found, torch.Tensor) and found.is_floating_point():
                sizes.append(0 if found.untyped_storage().data_ptr() in given else found.numel())
            return found

    with Sizes():
        rows, _ = pixels.rows_that_count(torch.from_numpy(logits), torch.from_numpy(labels), VOID)
    *others, largest = sorted(sizes)
    assert largest == rows.numel() and max(others) <= 3 * C * 20


@pytest.mark.parametrize("text", [False, True])
def test_a_table_leaves_out_a_label(folder, text):
    lines = [("1.5,0.5,-1", 2), ("0,2,1", 255), ("0,1,0.5", 3), ("2,1,0", 1)]
    (folder / "a.csv").write_text("1,2,3,label\n" + "".join(f"{row},{label}\n" for row, label in lines))
    if text:  # names of the columns
        (folder / "a.csv").write_text("c1,c2,c3,label\n1.5,0.5,-1,c2\n0,2,1,255\n0,1,0.5,c3\n2,1,0,c1\n")
    rows = read_sets("a.csv", ignore_index=VOID)[""]
    assert rows.labels.tolist() == [1, 2, 0]
    assert rows.input.tolist() == [[1.5, 0.5, -1], [0, 1, 0.5], [2, 1, 0]]
    (folder / "a.csv").write_text("0,1,label\n1,nan,0\n1,0,255\n1,0,7\n")
    with pytest.raises(InputError, match="found 7 in row 2"):
        read_sets("a.csv", ignore_index=VOID)
    (folder / "a.csv").write_text("0,1,label\n1,0,255\n")
    with pytest.raises(InputError, match="label: expected a label other than 255, found none"):
        read_sets("a.csv", ignore_index=VOID)


def both(suffix=".npz"):
    """Names of the files with the pixels, and with the same pixels as rows."""
    given = images()
    os.makedirs("rows", exist_ok=True)
    return write(f"logits{suffix}", *given), write(f"rows/logits{suffix}", *by_hand(*given))


def plain(document, name):
    """JSON without the name of the file."""
    return json.loads(document.replace(name, "FILE"))


@pytest.mark.parametrize("suffix", [".npz", ".npy"])
def test_calibrate_and_evaluate(folder, run, suffix):
    pytest.importorskip("tabulate")
    dense, rows = both(suffix)
    options = ("--split", "0.5", "--bootstrap", "20", "--json", "--temperatures", "0.5:3:0.5")
    found = run("calibrate", dense, "--ignore-index", VOID, "--out", "dense.json", *options)
    expected = run("calibrate", rows, "--out", "rows.json", *options)
    assert (found[0], plain(found[1], dense)) == (0, plain(expected[1], rows))
    streamed = ("--stream",) if suffix == ".npy" else ()
    found = run("calibrate", dense, "--ignore-index", VOID, *streamed, *options)
    assert (found[0], plain(found[1], dense)) == (0, plain(run("calibrate", rows, *streamed, *options)[1], rows))
    found = run("evaluate", dense, "--ignore-index", VOID, "--calibrator", "dense.json", "--json")
    expected = run("evaluate", rows, "--calibrator", "rows.json", "--json")
    assert (found[0], plain(found[1].replace("dense.json", "rows.json"), dense)) == (0, plain(expected[1], rows))
    assert "of these" in expected[1]  # both have the note on the rows of the fit


def test_sweep(folder, run):
    pytest.importorskip("tabulate")
    dense, rows = both()
    found, expected = fk.sweep([dense], ignore_index=VOID), fk.sweep([rows])
    assert not found.failed
    assert {**found.networks[0], "path": rows} == {**expected.networks[0], "name": found.networks[0]["name"]}
    assert fk.sweep_one(dense, ignore_index=VOID) == {**fk.sweep_one(rows), "path": dense}
    code, _, err = run("sweep", dense, "--ignore-index", VOID, "--report", "report")
    assert code == 0, err
    assert json.loads((folder / "report" / "sweep.json").read_text()) == found.to_dict()
    code, _, err = run("sweep", dense)
    assert code == 2 and "found 255 in pixel [0, " in err and " --ignore-index 255" in err


def test_compare_calibrators(folder):
    given = images()
    write("logits.npy", *given)
    options = {"resamples": 0, "candidates": ["none", "temperature"]}
    found = fk.compare_calibrators("logits.npy", ignore_index=VOID, **options)
    os.makedirs("rows")
    write("rows/logits.npy", *by_hand(*given))
    expected = fk.compare_calibrators("rows/logits.npy", **options)
    assert found.to_dict()["rows"] == expected.to_dict()["rows"]


@pytest.mark.parametrize("out", ["p.npy", "p.npz", "p.pt", "p.safetensors"])
@pytest.mark.parametrize("source", ["logits.npy", "logits.npz"])
def test_apply_writes_the_shape_that_came_in(folder, run, monkeypatch, source, out):
    monkeypatch.setattr("focalkern.study.apply._BATCH", 5 * C * 20)
    logits, labels = images()
    write(source, logits, labels)
    rows = by_hand(logits, labels % C)
    fitted = fk.TemperatureScaling().fit(*map(torch.from_numpy, rows))
    fitted.save("c.json")
    code, text, err = run("apply", "c.json", source, "--out", out)
    assert (code, text, err) == (0, f"{out}: probs, 12 images [5, 4] of 3 classes\n", "")
    if out.endswith(".npy"):
        found = torch.from_numpy(np.load(out))
    elif out.endswith(".npz"):
        found = torch.from_numpy(np.load(out)["probs"])
    elif out.endswith(".pt"):
        found = torch.load(out)["probs"]
    else:
        found = pytest.importorskip("safetensors.torch").load_file(out)["probs"]
    assert found.shape == logits.shape and found.dtype == torch.float32
    expected = fitted.predict_proba(torch.from_numpy(rows[0]))
    assert torch.equal(found.movedim(1, -1).reshape(-1, C), expected)


def test_apply_needs_one_shape_and_an_array(folder, run):
    logits, labels = images()
    fk.TemperatureScaling().fit(*map(torch.from_numpy, by_hand(logits, labels))).save("c.json")
    np.save("a-0.npy", logits)
    np.save("a-1.npy", logits[..., :2])
    code, _, err = run("apply", "c.json", "a-0.npy", "--out", "p.csv")
    assert code == 2 and "expected .npy, .npz, .safetensors or .pt for [12, 3, 5, 4], found .csv" in err
    code, _, err = run("apply", "c.json", "a-*.npy", "--out", "p.npy")
    assert code == 2 and "a-1.npy: expected logits of 3 classes [5, 4] as in a-0.npy, found logits of 3 classes" in err
    logits[3, 1, 4, 2] = np.nan
    np.save("b.npy", logits)
    code, _, err = run("apply", "c.json", "b.npy", "--out", "p.npy")
    assert code == 2 and "found NaN in pixel [3, 4, 2]" in err


LOGITS, LABELS = images()
SHAPES = "labels have the shape of the logits without axis 1"


@pytest.mark.parametrize("name", ["a.npz", "logits.npy"])
@pytest.mark.parametrize(
    ("logits", "labels", "options", "words"),
    [
        (LOGITS, LABELS[..., 0], {}, rf"\[N, d1, d2\] = \[12, 5, 4\] to go with .*found \[12, 5\]; {SHAPES}"),
        (LOGITS, LABELS[:, None], {}, r"found \[12, 1, 5, 4\]; save the labels without axis 1: labels\[:, 0\]"),
        (np.moveaxis(LOGITS, 1, -1), LABELS, {}, r"the classes must be axis 1: numpy.moveaxis\(logits, -1, 1\)"),
        (LOGITS[0], LABELS[0], {}, r"for one image \[C, d1, \.\.\.\] save logits\[None\] and labels\[None\]$"),
        (LOGITS[:, :1], LABELS, {}, r"expected .*\[N, C, d1, \.\.\.\] with C >= 2 classes, found \[12, 1, 5, 4\]"),
        (LOGITS, LABELS, {}, r"expected class numbers from 0 to 2, found 255 in pixel \[0, .*; pass ignore_index=255"),
        (LOGITS, LABELS, {"ignore_index": -1}, r"found 255 in pixel \[0, "),
        (LOGITS, LABELS * 0 + VOID, {"ignore_index": VOID}, "at least one row with another label than 255, found none"),
    ],
)
def test_pixels_that_do_not_fit(folder, name, logits, labels, options, words):
    write(name, logits, labels)
    with pytest.raises(InputError, match=words) as caught:
        read_sets(name, **options)
    assert str(caught.value).startswith((name, "labels.npy"))
    if name.endswith(".npy"):
        with pytest.raises(InputError, match=words):
            list(fk.study.stream_sets(name, **options)[""].shards.batches(0, 240, 240))


def test_the_place_of_a_pixel_among_those_that_count(folder):
    logits, labels = images()
    place = tuple(np.argwhere(labels == 2)[-1])
    logits[(place[0], 1, *place[1:])] = np.nan
    write("logits.npy", logits, labels)
    words = rf"found NaN in pixel \[{place[0]}, {place[1]}, {place[2]}\]"
    with pytest.raises(InputError, match=words):
        read_sets("logits.npy", ignore_index=VOID)
    rows = fk.study.stream_sets("logits.npy", ignore_index=VOID, input_kind="logits")[""].shards
    with pytest.raises(InputError, match=words):
        list(rows.batches(0, len(rows), 50))
    with pytest.raises(TypeError, match=r"read_sets: ignore_index must be an int or None, got '255'"):
        read_sets("logits.npy", ignore_index="255")
    assert as_tensor("a", "b", labels).dtype == torch.uint8
