"""A saved calibrator on rows without labels, file to file."""

import csv
import importlib
import os

import numpy as np
import pytest
import torch

import focalkern as fk
from focalkern.study import apply, apply_calibrator

NAMES = ["ant", "bee", "cat", "dog"]
LOGITS = 3 * torch.randn(50, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(apply, "_BATCH", 4 * 7)  # batches of 7 rows
    labels = (LOGITS.argmax(-1) + (torch.arange(50) % 4 == 0)) % 4  # a mistake in four rows
    fk.TemperatureScaling().fit(LOGITS, labels).save("c.json")
    return tmp_path


def expected(logits):
    return fk.load_calibrator("c.json").predict_proba(logits)


def written(name):
    if name.endswith(".npy"):
        return {"probs": torch.from_numpy(np.load(name))}
    if name.endswith(".npz"):
        with np.load(name) as arrays:
            return {key: torch.from_numpy(arrays[key]) for key in arrays.files}
    if name.endswith(".pt"):
        return torch.load(name, weights_only=True)
    if name.endswith(".csv"):
        with open(name, newline="") as stream:
            rows = list(csv.reader(stream))
        places = [place for place, column in enumerate(rows[0]) if column.startswith("prob_")]
        cells = [[float(row[place]) for place in places] for row in rows[1:]]
        return {"probs": torch.tensor(cells, dtype=torch.float64)}
    if name.endswith((".parquet", ".feather")):
        module = pytest.importorskip(f"pyarrow.{'parquet' if name.endswith('.parquet') else 'feather'}")
        table = module.read_table(name)
        return {
            "probs": torch.from_numpy(
                np.stack([table[key].to_numpy() for key in table.column_names if key.startswith("prob_")], 1)
            )
        }
    return pytest.importorskip("safetensors.torch").load_file(name)


# Every format as input and output, in both dtypes of results.
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("suffix", [".npy", ".npz", ".pt", ".csv", ".safetensors", ".parquet", ".feather"])
def test_every_format(folder, run, suffix, dtype):
    logits = LOGITS.to(dtype)
    if suffix == ".npy":
        np.save("x_logits.npy", logits.numpy())
    elif suffix == ".npz":
        np.savez("x_logits.npz", logits=logits.numpy())
    elif suffix == ".pt":
        torch.save({"logits": logits, "epoch": 3}, "x_logits.pt")
    elif suffix == ".csv":
        lines = [",".join(map(repr, row)) for row in LOGITS.tolist()]
        (folder / "x_logits.csv").write_text("\n".join(["ant,bee,cat,dog", *lines]))
        logits = LOGITS
    elif suffix in (".parquet", ".feather"):
        arrow = pytest.importorskip("pyarrow")
        table = arrow.table(dict(zip(NAMES, logits.numpy().T, strict=True)))
        if suffix == ".parquet":
            importlib.import_module("pyarrow.parquet").write_table(table, "x_logits.parquet")
        else:
            importlib.import_module("pyarrow.feather").write_feather(table, "x_logits.feather")
        logits = logits.double()  # as tables are read
    else:
        pytest.importorskip("safetensors.torch").save_file({"logits": logits}, "x_logits.safetensors")
    code, out, err = run("apply", "c.json", f"x_logits{suffix}", "--out", f"p{suffix}")
    assert (code, err) == (0, "")
    assert out == f"p{suffix}: probs, 50 rows of 4 classes\n"
    (probs,) = written(f"p{suffix}").values()
    assert probs.dtype == logits.dtype
    assert torch.equal(probs, expected(logits))
    if suffix == ".csv":
        assert (folder / "p.csv").read_text().startswith("prob_ant,prob_bee,prob_cat,prob_dog\n")
    if suffix in (".parquet", ".feather"):
        module = importlib.import_module(f"pyarrow.{suffix[1:]}")
        assert module.read_table(f"p{suffix}").column_names == [f"prob_{name}" for name in NAMES]


def test_labels_in_a_parquet_file_are_not_read_and_columns_keep_their_names(folder):
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    columns = dict(zip(("p_3", "p_2", "p_0", "p_1"), LOGITS.numpy().T, strict=True))
    parquet.write_table(arrow.table({"label": [0] * 50, **columns}), "t.parquet")
    assert apply_calibrator("c.json", "t.parquet", "p.feather", logits_key="p_*", input_kind="logits") == {
        "probs": (50, 4)
    }
    table = importlib.import_module("pyarrow.feather").read_table("p.feather")
    # In the order of their numbers, which are the classes.
    assert table.column_names == ["label", "prob_0", "prob_1", "prob_2", "prob_3"]
    assert table["label"].to_pylist() == [0] * 50
    assert torch.equal(written("p.feather")["probs"], expected(LOGITS[:, [2, 3, 1, 0]]))


def test_a_calibrator_of_named_columns_takes_no_others(folder, run):
    pytest.importorskip("tabulate", reason="tabulate is not installed")
    labels = LOGITS.argmax(-1)
    for name, places in (("fit.csv", [0, 1, 2, 3]), ("other.csv", [0, 2, 1, 3])):
        with open(name, "w", newline="") as stream:
            rows = csv.writer(stream)
            rows.writerow(["label", *(f"logit_{NAMES[place]}" for place in places)])
            rows.writerows([int(label), *row] for label, row in zip(labels, LOGITS[:, places].tolist(), strict=True))
    np.save("rows.npy", LOGITS.numpy())
    options = ("--split", "0.5", "--candidates", "temperature", "--bootstrap", "0", "--out", "named.json")
    assert run("calibrate", "fit.csv", *options)[0] == 0
    assert "| classes | ant, bee, cat, dog |" in run("card", "named.json")[1]
    for name in ("fit.csv", "rows.npy"):
        assert run("apply", "named.json", name, "--out", "probs.npy")[0] == 0
    assert run("evaluate", "fit.csv", "--calibrator", "named.json")[0] == 0
    words = "other.csv: expected the columns to which named.json was fitted, 'bee' as class 1, found 'cat'"
    for command in (
        ("apply", "named.json", "other.csv", "--out", "no.npy"),
        ("evaluate", "other.csv", "--calibrator", "named.json"),
    ):
        code, _, err = run(*command)
        assert code == 2 and words in err
    assert not os.path.exists("no.npy")
    loaded = fk.load_calibrator("named.json")
    (fit,), (other,) = (fk.files.read_sets(name).values() for name in ("fit.csv", "other.csv"))
    study = fk.compare_calibrators(fit, candidates=["temperature"], resamples=0)
    for call in (
        lambda: fk.study.evaluate_rows(other, study.calibrator),
        lambda: apply_calibrator(loaded, "other.csv", "no.npy"),
        lambda: fk.study.evaluate_rows(other, loaded),
    ):
        with pytest.raises(fk.files.InputError, match="'bee' as class 1, found 'cat'"):
            call()


def test_several_sets_and_labels_that_are_there(folder):
    np.savez("both.npz", val_logits=LOGITS[:20], val_labels=np.zeros(20, int), test_logits=LOGITS[20:])
    assert apply_calibrator("c.json", "both.npz", "p.npz") == {"val_probs": (20, 4), "test_probs": (30, 4)}
    probs = written("p.npz")
    assert torch.equal(probs["test_probs"], expected(LOGITS)[20:])
    with pytest.raises(Exception, match=r"p.npy: expected .npz, .safetensors or .pt for val and test, found .npy"):
        apply_calibrator("c.json", "both.npz", "p.npy")
    lines = [f"{row[0]},{row[1]},{row[2]},{row[3]},2" for row in LOGITS.tolist()]
    (folder / "labelled.csv").write_text("\n".join(["0,1,2,3,label", *lines]))
    apply_calibrator("c.json", "labelled.csv", "p.csv")
    assert torch.equal(written("p.csv")["probs"], expected(LOGITS))


@pytest.mark.parametrize("named", [False, True])
def test_a_column_of_labels_with_another_name(folder, run, named):
    """The next command that calibrate prints reads the table of calibrate."""
    labels = NAMES if named else range(4)
    lines = [",".join([*map(str, row), str(labels[place % 4])]) for place, row in enumerate(LOGITS.tolist())]
    (folder / "species.csv").write_text("\n".join([",".join([*NAMES, "species"]), *lines]))
    code, out, err = run("calibrate", "species.csv", "--labels-key", "species", "--bootstrap", "0", "--out", "s.json")
    assert code == 0, err
    (command,) = [line.split() for line in out.splitlines() if line.startswith("  focalkern apply ")]
    assert command[-4:] == ["--labels-key", "species", "--out", "probs.npz"]
    code, out, err = run(*command[1:])
    assert (code, err) == (0, "")
    expected = fk.load_calibrator("s.json").predict_proba(LOGITS)
    assert torch.equal(written("probs.npz")["probs"], expected)
    assert run("apply", "s.json", "species.csv", "--labels-key", "species", "--out", "p.csv")[0] == 0
    with open("p.csv") as stream:
        assert stream.readline().strip() == "prob_ant,prob_bee,prob_cat,prob_dog,species"
    code, _, err = run("apply", "s.json", "species.csv", "--out", "p.csv")
    assert code == 2 and "species" in err


def test_shards_in_the_order_of_their_numbers_without_quotes(folder, run):
    for part, rows in enumerate(np.array_split(np.arange(50), 12)):
        np.save(f"x_logits-{part}.npy", LOGITS[rows].half().numpy())
    names = sorted(name for name in os.listdir() if name.startswith("x_logits-"))
    for files in (names, ["x_logits-*.npy"]):
        code, _, err = run("apply", "c.json", *files, "--out", "p.npy")
        assert code == 0, err
        assert torch.equal(written("p.npy")["probs"], expected(LOGITS.half().float()))


@pytest.mark.parametrize("dtypes", [("float32", "float64"), ("float64", "float32")])
def test_shards_of_different_dtypes(folder, run, dtypes):
    for part, dtype in enumerate(dtypes):
        np.save(f"m_logits-{part}.npy", LOGITS[25 * part : 25 * part + 25].numpy().astype(dtype))
    assert run("apply", "c.json", "m_logits-*.npy", "--out", "p.npy")[0] == 0
    found = np.load("p.npy")
    assert found.dtype == dtypes[0] and np.allclose(found, expected(LOGITS[:50]), rtol=0, atol=1e-6)


def test_a_column_that_is_no_class_is_named(folder, run):
    for name, names, label in (
        ("fit.csv", NAMES, True),
        ("more.csv", [*NAMES, "length"], False),
        ("more_test.csv", [*NAMES, "length"], True),
        ("less.csv", NAMES[:3], False),
    ):
        values = np.concatenate([LOGITS.numpy(), np.linspace(0.1, 9, 50)[:, None]], axis=1)[:, : len(names)]
        labels = [[NAMES[k]] if label else [] for k in LOGITS.argmax(-1)]
        with open(name, "w", newline="") as stream:
            rows = csv.writer(stream)
            rows.writerow([*(["label"] if label else []), *names])
            rows.writerows([*one, *row] for one, row in zip(labels, values.tolist(), strict=True))
    evidence = {"data": {"validation": {"classes": NAMES}}}
    fk.TemperatureScaling().fit_quietly(LOGITS, LOGITS.argmax(-1)).save("named.json", evidence=evidence)
    besides = "found 5, with 'length' besides"
    for command, words in (
        (("apply", "named.json", "more.csv", "--out", "p.npy"), f"{besides}; pass --logits-key '*,!length'"),
        (("evaluate", "more_test.csv", "--calibrator", "named.json"), f"{besides}; pass --logits-key '*,!length'"),
        (("calibrate", "fit.csv", "--test", "more_test.csv"), f"expected the 4 classes of fit.csv, {besides}"),
        (
            ("apply", "c.json", "more.csv", "--out", "p.npy"),
            "found 5: 'ant', 'bee', 'cat', 'dog', 'length'; use a calibrator of the same network, or leave out the "
            "columns that are no classes; pass --logits-key '*,!NAME'",
        ),
        (
            ("apply", "named.json", "less.csv", "--out", "p.npy"),
            "found 3: 'ant', 'bee', 'cat'; use a calibrator of the same network\n",
        ),
    ):
        code, _, err = run(*command)
        assert code == 2 and words in err, err
    assert run("apply", "named.json", "more.csv", "--out", "p.npy", "--logits-key", "*,!length")[0] == 0


def test_an_array_by_name_and_half_precision(folder, run):
    save_file = pytest.importorskip("safetensors.torch").save_file
    save_file({"outputs": LOGITS.bfloat16()}, "x.safetensors")
    code, _, err = run("apply", "c.json", "x.safetensors", "--out", "p.pt")
    assert code == 2 and "x.safetensors: expected an array called logits or probs, found outputs" in err
    code, _, err = run("apply", "c.json", "x.safetensors", "--out", "p.pt", "--logits-key", "outputs")
    assert code == 0, err
    assert torch.equal(written("p.pt")["probs"], expected(LOGITS.bfloat16().float()))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("c.json", "x_logits.npy", "--out", "p.txt"), "p.txt: expected a name that ends in .npy"),
        (("c.json", "x_logits.npy", "--out", "no/p.npy"), "expected a file in an existing folder"),
        (("c.json", "x_logits.npy", "--out", "x_logits.npy"), "expected another file for --out"),
        (("c.json", "nothing.npy", "--out", "p.npy"), "nothing.npy: expected a file, found nothing there"),
        (("c.json", "five_logits.npy", "--out", "p.npy"), "expected the 4 classes of c.json, found 5"),
        (("c.json", "x_probs.npy", "--out", "p.npy"), "expected logits, for which c.json was fitted, found probs"),
        (("c.json", "nan_logits.npy", "--out", "p.npy"), "found NaN in row 33"),
        (("x_logits.npy", "x_logits.npy", "--out", "p.npy"), "expected the .json file of a calibrator"),
    ],
)
def test_a_mistake_is_one_line_and_nothing_is_written(folder, run, arguments, words):
    np.save("x_logits.npy", LOGITS.numpy())
    np.save("five_logits.npy", np.zeros((3, 5)))
    np.save("x_probs.npy", LOGITS.softmax(-1).numpy())
    broken = LOGITS.clone()
    broken[33, 1] = torch.nan
    np.save("nan_logits.npy", broken.numpy())
    before = sorted(os.listdir())
    code, out, err = run("apply", *arguments)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert words in err
    assert sorted(os.listdir()) == before


def test_a_table_keeps_its_other_columns_and_says_what_it_holds(folder, run):
    """Probabilities are written, read again and measured; no step treats them as logits."""
    labels = (LOGITS.argmax(-1) + (torch.arange(50) % 4 == 0)) % 4
    lines = [
        f"row {row},{','.join(map(repr, logits))},{NAMES[label]},a note"
        for row, (logits, label) in enumerate(zip(LOGITS.tolist(), labels.tolist(), strict=True))
    ]
    header = ",".join(["id", *(f"logit_{name}" for name in NAMES), "label", "note"])
    (folder / "t.csv").write_text("\n".join([header, *lines]))
    for name in ("p.csv", "p.parquet", "p.feather"):
        if name != "p.csv":
            pytest.importorskip("pyarrow")
        code, _, err = run("apply", "c.json", "t.csv", "--logits-key", "logit_*", "--out", name)
        assert code == 0, err
        assert torch.equal(written(name)["probs"], expected(LOGITS))
        code, _, err = run("apply", "c.json", name, "--logits-key", "prob_*", "--out", "again.csv")
        assert code == 2 and "expected logits, for which c.json was fitted, found probs" in err
        (rows,) = fk.files.read_sets(name, logits_key="prob_*").values()
        assert rows.kind == "probs" and torch.equal(rows.labels, labels)
    with open("p.csv", newline="") as stream:
        found = list(csv.reader(stream))
    assert found[0] == ["id", *(f"prob_{name}" for name in NAMES), "label", "note"]
    assert [(row[0], *row[-2:]) for row in found[1:]] == [
        (f"row {row}", NAMES[label], "a note") for row, label in enumerate(labels.tolist())
    ]
    (folder / "twice.csv").write_text("\n".join(["prob_2," + ",".join("0123"), *(f"1,{line}" for line in ["1,2,3,4"])]))
    code, _, err = run("apply", "c.json", "twice.csv", "--logits-key", "[0-3]", "--out", "q.csv")
    assert code == 2 and "expected no column prob_2 beside the classes, found one" in err


@pytest.mark.parametrize("suffix", [".npy", ".npz", ".csv", ".pt"])
def test_probabilities_given_as_logits_are_refused_until_said(folder, run, suffix):
    probs = LOGITS.softmax(-1)
    if suffix == ".npy":
        np.save("x.npy", probs.numpy())
    elif suffix == ".npz":
        np.savez("x.npz", logits=probs.numpy())
    elif suffix == ".pt":
        torch.save({"logits": probs}, "x.pt")
    else:
        (folder / "x.csv").write_text(
            "\n".join([",".join(NAMES), *(",".join(map(repr, row)) for row in probs.tolist())])
        )
    code, _, err = run("apply", "c.json", f"x{suffix}", "--out", "p.npy")
    assert code == 2 and "found non-negative rows that sum to 1" in err
    assert not os.path.exists("p.npy")
    code, _, err = run("apply", "c.json", f"x{suffix}", "--out", "p.npy", "--input-kind", "logits")
    assert code == 0, err


def test_a_tensor_without_a_name(folder, run):
    torch.save(LOGITS, "x.pt")
    torch.save(LOGITS.softmax(-1), "x_probs.pt")
    code, _, err = run("apply", "c.json", "x.pt", "--out", "p.npy")
    assert code == 0, err
    assert torch.equal(written("p.npy")["probs"], expected(LOGITS))
    code, _, err = run("apply", "c.json", "x_probs.pt", "--out", "p.npy")
    assert code == 2 and "expected logits, for which c.json was fitted, found probs" in err
    code, _, err = run("evaluate", "x.pt")
    assert code == 2 and "expected a dict of tensors with logits and labels, found a tensor [50, 4]" in err
