"""Tables of logits: .csv, .parquet, .feather and data frames. A column that may not be a class is never read as one."""

import sys

import numpy as np
import pytest
import torch

import focalkern as fk
from focalkern.files import InputError, csv_text, from_frame, read_sets
from focalkern.study.samples import as_samples, describe_samples
from focalkern.study.split import select_samples
from focalkern.study.verdict import column_problem

pd = pytest.importorskip("pandas")

rng = np.random.default_rng(0)
LOGITS = rng.normal(size=(60, 4)) * 3
LABELS = rng.integers(4, size=60)
FRAME = pd.DataFrame(LOGITS)
NAMED = FRAME.set_axis(["dog", "bird", "cat", "ant"], axis=1)
WORDS = np.array(NAMED.columns)[LABELS]


def csv(frame, folder, index=False):
    frame.to_csv(folder / "a.csv", index=index)
    return folder / "a.csv"


def parquet(frame, folder):
    pytest.importorskip("pyarrow")
    frame.rename(columns=str).to_parquet(folder / "a.parquet")
    return folder / "a.parquet"


def feather(frame, folder):
    pytest.importorskip("pyarrow")
    frame.rename(columns=str).to_feather(folder / "a.feather")
    return folder / "a.feather"


def read(form, frame, folder, **options):
    if form == "frame":
        return from_frame(frame, **options)
    return read_sets({"csv": csv, "parquet": parquet, "feather": feather}[form](frame, folder), **options)[""]


FORMS = ["csv", "parquet", "feather", "frame"]


def same(rows, kind="logits", logits=LOGITS, labels=LABELS):
    assert rows.kind == kind
    np.testing.assert_allclose(rows.input.numpy(), logits, rtol=1e-12)
    assert rows.labels.tolist() == labels.tolist()


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    ("frame", "options"),
    [
        (FRAME.assign(label=LABELS), {}),
        (FRAME[[1, 0, 3, 2]].assign(label=LABELS), {}),  # in the order of the numbers
        (FRAME.add_prefix("logit_")[["logit_3", "logit_0", "logit_1", "logit_2"]].assign(label=LABELS), {}),
        (FRAME.rename(columns=lambda c: f"class{c + 1}").assign(target=LABELS + 1), {}),  # the number is in the name
        (FRAME.assign(label=LABELS.astype(float)), {}),
        (NAMED.assign(label=WORDS), {}),
        (NAMED.assign(label=LABELS), {}),
        (FRAME.assign(label=np.array(list("abcd"))[LABELS]), {}),  # in alphabetical order, as scikit-learn has it
        (FRAME.add_prefix("p_").assign(label=[f"p_{label}" for label in LABELS]), {}),
        (FRAME.add_prefix("p_").assign(y=LABELS, id="x", p=1), {"logits_key": "p_*", "labels_key": "y"}),
        (NAMED.assign(y=LABELS), {"labels_key": "y"}),
        (NAMED.assign(label=WORDS, file="x.jpg", light=LOGITS[:, 0]), {"logits_key": "cat, ant,bird,d?g"}),
        (NAMED.assign(label=WORDS, file="x.jpg", light=LOGITS[:, 0]), {"logits_key": "*,!file,!light"}),
        (NAMED.assign(label=WORDS, file="x.jpg", light=LOGITS[:, 0]), {"logits_key": "!file, !l*"}),
        (NAMED.assign(label=WORDS, file="x.jpg", light=LOGITS[:, 0]), {"logits_key": "!file,*,!light"}),
        (NAMED.assign(label=LABELS).rename(columns={"ant": "ant, red"}), {"logits_key": "*"}),
    ],
)
def test_columns_and_labels(form, frame, options, tmp_path):
    same(read(form, frame, tmp_path, **options))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    ("frame", "words"),
    [
        (FRAME.assign(label=LABELS, id=range(60)), "found 'id' next to '0' to '3'; pass logits_key="),
        (FRAME.add_prefix("p_").assign(label=LABELS, pred=LABELS), "found 'pred' next to 'p_0' to 'p_3'"),
        (FRAME.assign(label=LABELS, anything=LABELS), "found 'anything' next to"),
        (
            NAMED.assign(label=WORDS, prediction=LOGITS.argmax(1)),
            "found 'prediction'; pass logits_key='*,!prediction', labels_key=label",
        ),
        (NAMED.assign(label=WORDS, sample_id=0.5), "found 'sample_id'"),
        (
            NAMED.assign(label=WORDS, sample_id=0.5).rename(columns={"dog": "dog1"}),
            "found 'sample_id'; pass logits_key='*,!sample_id', labels_key=label",
        ),
        (
            FRAME.add_prefix("p_").assign(label=LABELS, p_max=0.5),
            "found 'p_max' next to 'p_0' to 'p_3'; pass logits_key='p_[0-9]*', labels_key=label",
        ),
        (
            NAMED.assign(label=WORDS, top5=LOGITS.argmax(1)),
            "whole numbers only, as predicted classes are, in 'top5'; pass logits_key='*,!top5', labels_key=label",
        ),
        (NAMED.assign(label=WORDS, other=range(7, 67)), "found the numbers of the rows in 'other'"),
        (FRAME.rename(columns={3: 6}).assign(label=LABELS), "found 0 to 6 without '3', '4', '5'"),
        (FRAME.rename(columns=lambda c: c + 2).assign(label=LABELS), "found 2 to 5 without '1'"),
        (
            FRAME.add_prefix("logit_").join(FRAME.add_prefix("prob_")).assign(label=LABELS),
            "expected one group of numbered columns, found 2: logit_* and prob_*",
        ),
        (FRAME.rename(columns=lambda c: c + 1).assign(label=LABELS), "expected 1 to 4, as the columns are numbered, f"),
        (FRAME.assign(label=LABELS, target=LABELS), "found several in"),
        (FRAME.assign(class_of=LABELS), "found none in"),
        (FRAME.assign(label=LABELS + 0.5), "label: expected class numbers or names, found"),
        (FRAME.assign(label="cow"), "expected class numbers, or the names of all 4 classes, found 1: 'cow'"),
        (NAMED.assign(label="cow"), "expected one of the columns dog, bird, cat, ant, found 'cow' in row 0"),
        (FRAME.assign(label=[None, *LABELS[1:]]), "row"),
        (FRAME.assign(label=LABELS, **{"4": "text"}).rename(columns={"4": 4}), "number"),
    ],
)
def test_what_may_be_no_class_is_named(form, frame, words, tmp_path):
    with pytest.raises(InputError) as caught:
        read(form, frame, tmp_path)
    assert words in str(caught.value) and "\n" not in str(caught.value)
    if "say which" in words:
        assert ("logits_key '" if form == "frame" else "--logits-key '") in str(caught.value)


def test_every_name_of_a_list_must_be_a_column():
    with pytest.raises(InputError, match=r"expected columns that match 'can', found 'dog', 'bird', 'cat', 'ant'"):
        from_frame(NAMED.assign(label=WORDS), logits_key="dog,can,bird")
    with pytest.raises(InputError, match=r"expected columns that match 'fill', found 'dog', 'bird', 'cat', 'ant'"):
        from_frame(NAMED.assign(label=WORDS), logits_key="*,!fill")
    with pytest.raises(InputError, match=r"expected columns that match 'cat,!cat', found 'dog', 'bird', 'cat', 'ant'"):
        from_frame(NAMED.assign(label=WORDS), logits_key="cat,!cat")
    frame = NAMED.rename(columns={"dog": "dog, wild", "cat": "dog, white"}).assign(label=0)
    of_marks = frame.rename(columns={"bird": "!b", "ant": "!a"})
    assert from_frame(of_marks, logits_key="!?").classes == ("!b", "!a")
    assert from_frame(frame, logits_key="dog, w*").classes == ("dog, wild", "dog, white")  # a pattern with a comma


@pytest.mark.parametrize("prefix", ["", "logit_"])
def test_a_column_that_may_be_no_class_is_in_the_verdict(prefix):
    """A column of numbers next to named classes would be a class without a label."""
    named = pd.DataFrame(np.tile(LOGITS, (5, 1)), columns=[f"{prefix}{name}" for name in NAMED]).assign(
        label=np.tile(WORDS, 5)
    )
    with_light = named.assign(**{f"{prefix}light": np.linspace(0, 1, 300)})

    def problem(frame, **options):
        rows = from_frame(frame, **options)
        return column_problem(as_samples(rows.rows(torch.arange(len(rows)), "all")))

    assert problem(named) == ""
    expected = "" if prefix else "frame (all): no row has the label 'light', a column of the table. If this is no class"
    found = problem(with_light)
    assert found.startswith(expected) and bool(found) == bool(expected)
    assert problem(with_light, logits_key="*") == ""
    assert prefix or "pass logits_key='*,!light'; if it is" in found
    assert problem(with_light, logits_key=f"*,!{prefix}light") == ""
    assert problem(with_light, logits_key=",".join(named.columns[:4])) == ""
    assert problem(with_light[:90]) == ""  # few rows may lack a class


@pytest.mark.parametrize("trained_on", ["the long tail", "balanced classes"])
def test_a_rare_class_without_rows_is_a_class(trained_on):
    """Rows of a long tail; a model that has learned from balanced classes predicts the rare ones as often as others."""
    generator = np.random.default_rng(0)
    shares = 100.0 ** -np.linspace(0, 1, 10)
    labels = generator.choice(10, size=400, p=shares / shares.sum())
    labels[labels == 9] = 0
    logits = generator.normal(size=(400, 10)) + 3 * np.eye(10)[labels]
    if trained_on == "the long tail":
        logits += np.log(shares)
    names = np.array([f"class {letter}" for letter in "abcdefghij"])
    frame = pd.DataFrame(logits, columns=names).assign(label=names[labels])

    def problem(table):
        rows = from_frame(table)
        return column_problem(as_samples(rows.rows(torch.arange(len(rows)), "all")))

    assert "class j" not in set(frame["label"]) and problem(frame) == ""
    assert "the label 'light', a column" in problem(frame.assign(light=np.linspace(0, 100, 400)))


def test_the_index_of_a_frame_is_no_class(tmp_path):
    for frame in (FRAME.assign(label=LABELS), NAMED.assign(label=WORDS)):
        with pytest.raises(InputError, match=r"found '' \(no name\)"):
            read_sets(csv(frame, tmp_path, index=True))
        again = pd.read_csv(tmp_path / "a.csv")
        with pytest.raises(InputError, match="found 'Unnamed: 0'"):
            from_frame(again)
    same(read_sets(csv(FRAME.assign(label=LABELS), tmp_path, index=True), logits_key="[0-9]*")[""])


def test_the_prefix_says_what_the_columns_hold(tmp_path):
    probs = torch.from_numpy(LOGITS).softmax(-1).numpy()
    frame = pd.DataFrame(probs).add_prefix("prob_").assign(label=LABELS)
    for form in FORMS:
        same(read(form, frame, tmp_path), "probs", probs)
        same(read(form, frame, tmp_path, input_kind="logits"), "logits", probs)


def test_two_tables_have_their_classes_in_one_order(tmp_path):
    other = NAMED[["dog", "cat", "bird", "ant"]]
    for name, frame in (("a.csv", NAMED), ("b.csv", other), ("c.csv", FRAME)):
        frame.assign(label=LABELS).to_csv(tmp_path / name, index=False)
    words = r"b\.csv: expected the columns of .*a\.csv, 'bird' as class 1, found 'cat'$"
    with pytest.raises(InputError, match=words):
        read_sets(str(tmp_path / "[ab].csv"))
    with pytest.raises(InputError, match=words):
        select_samples(read_sets, str(tmp_path / "a.csv"), test=str(tmp_path / "b.csv"))
    for test in ("a.csv", "c.csv"):  # numbered columns have no names
        select_samples(read_sets, str(tmp_path / "a.csv"), test=str(tmp_path / test))


def test_the_parts_of_a_split_are_not_both_test_rows(tmp_path):
    np.savez(tmp_path / "a.npz", test_logits=LOGITS, test_labels=LABELS)
    validation, test = select_samples(read_sets, str(tmp_path / "a.npz"), split=0.5)
    assert describe_samples(validation) == "30 validation rows"
    assert describe_samples(test) == "30 test rows"


@pytest.mark.parametrize("form", ["parquet", "feather"])
def test_columns_of_lists(form, tmp_path):
    frame = pd.DataFrame({"out": list(LOGITS), "y": LABELS})
    same(read(form, frame, tmp_path, logits_key="out", labels_key="y"))
    same(read(form, frame.rename(columns={"out": "logits", "y": "labels"}), tmp_path))
    ragged = pd.DataFrame({"logits": [[1.0, 2.0], [1.0]], "labels": [0, 1]})
    with pytest.raises(InputError, match="logits: expected lists of one length, found 1 to 2"):
        read(form, ragged, tmp_path)
    with pytest.raises(InputError, match=r"found out \[60, 4\], y \[60\]; pass logits_key=NAME, labels_key=NAME"):
        read(form, frame, tmp_path)


@pytest.mark.parametrize("suffix", [".parquet", ".feather"])
def test_damaged_tables(suffix, tmp_path):
    pytest.importorskip("pyarrow")
    path = tmp_path / f"a{suffix}"
    FRAME.rename(columns=str).assign(label=LABELS).to_parquet(path)
    for data in (b"", b"PAR1", bytes(range(256)), path.read_bytes()[:-20]):
        path.write_bytes(data)
        with pytest.raises(InputError, match="expected a table of Arrow"):
            read_sets(path)


def test_keys_of_arrays(tmp_path):
    np.savez(tmp_path / "a.npz", outputs=LOGITS, y=LABELS.astype(float), words=np.array(list("abcd"))[LABELS])
    same(read_sets(tmp_path / "a.npz", logits_key="outputs", labels_key="y")[""])
    same(read_sets(tmp_path / "a.npz", logits_key="outputs", labels_key="words")[""])
    with pytest.raises(InputError, match=r"expected an array labels, found outputs.*; pass labels_key=NAME"):
        read_sets(tmp_path / "a.npz", logits_key="outputs")
    np.savez(tmp_path / "b.npz", logits=LOGITS, y=LABELS)
    same(read_sets(tmp_path / "b.npz", labels_key="y")[""])
    with pytest.raises(InputError, match=r"expected labels beside logits.*pass labels_key=NAME"):
        read_sets(tmp_path / "b.npz")
    np.save(tmp_path / "logits.npy", LOGITS)
    np.save(tmp_path / "labels.npy", LABELS)
    words = r"expected named arrays or columns to go with a key, found \.npy; leave out the key$"
    for read in (read_sets, fk.study.stream_sets):
        with pytest.raises(InputError, match=words):
            read(tmp_path / "logits.npy", logits_key="a")


def test_frames_are_read_by_their_columns_everywhere():
    """Also as arguments instead of arrays: columns are ordered by number, and no other columns are allowed."""
    expected = fk.focal_calibration_map(LOGITS, 1.0)
    np.testing.assert_array_equal(fk.focal_calibration_map(FRAME[[2, 0, 1, 3]], 1.0), expected)
    np.testing.assert_array_equal(fk.focal_calibration_map(NAMED, 1.0), expected)
    probs = FRAME.set_axis([f"p{c}" for c in range(4)], axis=1)
    labels = np.where(np.arange(60) % 3 == 0, LABELS, LOGITS.argmax(1))
    fitted = fk.TemperatureScaling().fit(LOGITS, labels)
    again = fk.TemperatureScaling().fit(probs[["p1", "p0", "p2", "p3"]], labels)
    assert again.temperature_ == fitted.temperature_
    for frame in (FRAME.assign(id=1.0), FRAME.reset_index(), NAMED.assign(pred=1.0)):
        with pytest.raises(ValueError, match="focal_calibration_map: input: expected only columns of classes"):
            fk.focal_calibration_map(frame, 1.0)


# Python reads all of these as numbers, but the authors meant something else, and other programs read other numbers.
@pytest.mark.parametrize("cell", ["1_0", "\u0661", "\uff11"])
def test_a_number_is_written_in_ascii_digits_without_underscores(cell, tmp_path, run):
    fk.TemperatureScaling().fit_quietly(torch.from_numpy(LOGITS), torch.from_numpy(LABELS)).save(tmp_path / "c.json")
    lines = [",".join(map(repr, row)) for row in LOGITS.tolist()]
    lines[7] = lines[7].replace(lines[7].split(",")[1], cell)
    (tmp_path / "a.csv").write_text("\n".join(["0,1,2,3", *lines]), encoding="utf-8")
    for action in ("evaluate", "apply"):
        if action == "evaluate":
            labelled = [f"{line},{label}" for line, label in zip(lines, LABELS, strict=True)]
            (tmp_path / "a.csv").write_text("\n".join(["0,1,2,3,label", *labelled]), encoding="utf-8")
            code, _, err = run("evaluate", tmp_path / "a.csv")
        else:
            code, _, err = run("apply", tmp_path / "c.json", tmp_path / "a.csv", "--out", tmp_path / "p.csv")
        assert code == 2 and repr(cell) in err and "line 9, column '1': expected a number" in err
    labels = [cell if row == 3 else label for row, label in enumerate(LABELS.tolist())]
    with pytest.raises(InputError, match="expected class numbers, or the names of all 4 classes"):
        from_frame(FRAME.assign(label=np.array(labels, dtype=object)))


@pytest.mark.parametrize("option", [("--n-bins", "1_5"), ("--gammas=1_0",), ("--split", "0.2_5"), ("--seed", "\u0661")])
def test_so_is_an_option(option, tmp_path, run):
    np.savez(tmp_path / "a.npz", logits=LOGITS, labels=LABELS)
    code, _, err = run("calibrate", tmp_path / "a.npz", *option)
    assert code == 2 and "expected" in err


CELLS = [
    "1",
    "-0",
    " 2.5",
    "+1.5",
    "1e-400",
    "5e-324",
    "1e400",
    "-inf",
    "nan",
    "0.1",
    "1_0",
    "0x1p3",
    "",
    "NA",
    "٣",
    '"3"',
]


@pytest.mark.parametrize("end", ["\n", "\r\n", "\n\n", "\r"])
def test_pyarrow_reads_the_same_text_or_none(end, monkeypatch):
    """Numbers with any digits, and cells that only one of the two readers accepts."""
    pytest.importorskip("pyarrow")
    bits = np.random.default_rng(0).integers(0, 2**64, size=600, dtype=np.uint64).view(np.float64)
    forms = ("{!r}", "{:.3e}", "{:.17g}", "{:.30e}", "{:.6f}")
    cells = [form.format(value) for value in bits[np.isfinite(bits)].tolist() for form in forms]
    taken = 0
    for one in (cells, *([cell] for cell in CELLS)):
        lines = ["a, b,label", *(f"{cell},{cell},word{row % 3} " for row, cell in enumerate(one))]
        data = (end.join(lines) + end).encode()
        found = csv_text._by_arrow(data, 3, [0, 1], [2])
        if found is not None:
            text = csv_text.TextTable("a.csv", ["a", "b", "label"], data)
            values, words = csv_text._by_python(text, [0, 1], [2], lambda _: ())
            assert found[0].tobytes() == values.tobytes() and found[1] == words
            taken += len(one)
    assert taken > len(cells) if end != "\r" else taken == 0
    # If pyarrow does not accept the text, or is not installed, Python reads it.
    for data in (b'a,b,label\n1,"2",0\n', b"a,b,label\n1,2,0\n"):
        if b'"' not in data:
            monkeypatch.setitem(sys.modules, "pyarrow", None)
        values, words = csv_text.TextTable("a.csv", ["a", "b", "label"], data).values([0, 1], [2], lambda _: ())
        assert values.tolist() == [[1.0, 2.0]] and words == [["0"]]


@pytest.mark.parametrize("share", [0.3, 0.5, 0.9])
def test_a_split_keeps_copies_of_a_row_in_one_part(share, tmp_path):
    generator = np.random.default_rng(0)
    logits, labels = generator.normal(size=(300, 4)), generator.integers(4, size=300)
    copied = generator.integers(300, size=400)
    np.savez(tmp_path / "a.npz", logits=np.r_[logits, logits[copied]], labels=np.r_[labels, labels[copied]])
    validation, test = select_samples(read_sets, str(tmp_path / "a.npz"), split=share)
    parts = [{tuple(row) for row in part.memory.input.tolist()} for part in (validation, test)]
    assert parts[0] and parts[1] and not parts[0] & parts[1] and len(parts[0] | parts[1]) == 300
    most = np.bincount(copied).max() + 1
    assert len(validation) + len(test) == 700 and abs(len(validation) - 700 * share) <= most
    # Few copies, as rows of chance: the parts are those of any rows.
    np.savez(tmp_path / "a.npz", logits=np.r_[logits, logits[:4]], labels=np.r_[labels, labels[:4]])
    validation, _ = select_samples(read_sets, str(tmp_path / "a.npz"), split=share)
    order = torch.randperm(304, generator=torch.Generator().manual_seed(0))
    expected = torch.from_numpy(np.r_[logits, logits[:4]])[order[: round(304 * share)]]
    assert torch.equal(validation.memory.input.double(), expected)
