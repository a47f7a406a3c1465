"""Fits to batches, in one process and in two, give the calibrator of a fit in memory."""

import datetime
import functools
import itertools
import multiprocessing
import os
import time
import warnings

import pytest
import torch
import torch.distributed as dist

import focalkern as fk
from focalkern._diagnostics import label_problems, sampled_parts
from focalkern.calibrators import _copies
from focalkern.calibrators._candidates import as_candidates
from focalkern.calibrators._cross_validation import cross_validate
from focalkern.calibrators._folds import fold_of
from focalkern.calibrators._row_source import BatchedRows, memory_rows
from focalkern.calibrators._source_selection import cross_validate_source

PATIENCE = 60  # seconds a test waits for its processes

CALIBRATORS = {
    "temperature": fk.RobustTemperatureScaling,
    "scalar": fk.SplineScaling,
    "free": lambda **options: fk.SplineScaling(keep_order=False, **options),
    "vector": lambda **options: fk.SplineScaling(kind="vector", **options),
    "matrix": lambda **options: fk.SplineScaling(kind="matrix", **options),
    "auto": lambda **options: fk.AutoCalibrator(candidates=["temperature", "spline", "spline-vector"], **options),
}


def rows(n=700, n_classes=4):
    """Logits of an over-confident network with a bias, and labels."""
    generator = torch.Generator().manual_seed(3)
    logits = 2 * torch.randn(n, n_classes, generator=generator, dtype=torch.float64)
    target = torch.multinomial(logits.softmax(-1), 1, generator=generator).squeeze(1)
    return 2.5 * logits + torch.linspace(-1, 1, n_classes, dtype=torch.float64), target


def in_batches(*columns, size=150):
    return list(zip(*(column.split(size) for column in columns), strict=True))


@pytest.mark.parametrize("name", [name for name in CALIBRATORS if name != "auto"])
@pytest.mark.parametrize("case", ["plain", "weights", "zeros", "empty batches", "large logits"])
def test_batches_give_the_calibrator_of_all_rows(name, case):
    logits, target = rows()
    options, columns = {}, [logits, target]
    if case == "weights":
        columns.append(torch.arange(700) % 4)  # including weights of 0
    elif case == "zeros":
        logits = logits.softmax(-1)
        logits[::7, 1] = 0
        columns[0] = logits / logits.sum(-1, keepdim=True)
        options = {"input_kind": "probs"}
    elif case == "large logits":
        columns[0] = 1e4 * logits
    batches = in_batches(*columns)
    if case == "empty batches":
        batches[1:1] = [(logits[:0], target[:0])]
        batches.append((logits[:20], torch.full((20,), -100)))
    make = CALIBRATORS[name]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", fk.CalibrationWarning)
        expected = make(**options).fit(*columns)
        found = make(**options).fit_batches(lambda: iter(batches), ignore_index=-100)
    theirs, ours = (torch.as_tensor(one.predict_log_proba(columns[0])) for one in (expected, found))
    assert ours.numpy() == pytest.approx(theirs.numpy(), rel=1e-9, abs=1e-9)
    assert (found.n_samples_, found.warnings_) == (expected.n_samples_, expected.warnings_)
    assert found.best_value_ == pytest.approx(expected.best_value_, rel=1e-12)


def test_a_cross_validation_in_batches_is_that_in_memory():
    logits, target = rows()
    logits[:3, 0] = -torch.inf
    target[:2] = 0  # a label at a logit of -inf, so no calibration has an infinite loss
    candidates = as_candidates(None, "nll", "logits")
    expected = cross_validate(logits, target, candidates, criterion="nll", folds=4, seed=0)
    none = expected.entries[0].calibrator

    def read():
        begin = 0
        for input, labels in in_batches(logits, target):
            yield input, labels, None, torch.arange(begin, begin + len(labels))
            begin += len(labels)

    folds = functools.partial(fold_of, rows=len(target), folds=4, seed=0)
    for source in (memory_rows(logits, target), BatchedRows(read, 4)):
        found = cross_validate_source(source, candidates, none, folds, 4, criterion="nll")
        for ours, theirs in zip(found.entries, expected.entries, strict=True):
            assert ours.name == theirs.name
            if ours.name == "spline-matrix" and isinstance(source, BatchedRows):
                assert ours.excluded == "needs all rows in memory"
                continue
            assert (ours.excluded, ours.keeps_predictions) == (theirs.excluded, theirs.keeps_predictions)
            assert ours.loss == pytest.approx(theirs.loss, rel=1e-10)
            if ours.name != "none":
                assert ours.error == pytest.approx(theirs.error, rel=1e-8, abs=1e-12)
    assert memory_rows(logits, target).n_rows == 700


def test_the_automatic_choice_of_batches():
    logits, target = rows()
    found = CALIBRATORS["auto"]().fit_batches(in_batches(logits, target))
    expected = CALIBRATORS["auto"]().fit(logits, target)
    assert found.chosen_ == expected.chosen_ == "spline-vector"
    assert found.predict_log_proba(logits).numpy() == pytest.approx(
        expected.predict_log_proba(logits).numpy(), abs=1e-9
    )
    assert found.verdict_.costs == expected.verdict_.costs  # how many predictions change
    every = fk.AutoCalibrator(candidates=["isotonic", "spline-matrix"]).fit_batches(in_batches(logits, target))
    assert "left out: isotonic, which needs all rows in memory" in every.verdict_.warnings
    assert any("needs all rows in memory, so it is not chosen" in words for words in every.verdict_.warnings)


def copied(n, times):
    """``times`` copies of n rows, in random order."""
    logits, target = rows(n)
    order = torch.randperm(times * n, generator=torch.Generator().manual_seed(0)) % n
    return logits[order], target[order]


@pytest.mark.filterwarnings("ignore::focalkern.CalibrationWarning")
@pytest.mark.parametrize("size", [1, 37, 400])
def test_copies_of_a_row_in_batches_stay_in_one_fold(size):
    logits, target = copied(100, 4)
    found = CALIBRATORS["auto"]().fit_batches(in_batches(logits, target, size=size))
    expected = CALIBRATORS["auto"]().fit(logits, target)
    assert found.chosen_ == expected.chosen_
    for ours, theirs in zip(found.table_, expected.table_, strict=True):
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-10)
    assert found.warnings_[0] == expected.warnings_[0]
    assert found.verdict_.warnings[0].startswith("300 of the 400 validation rows are copies of others")


@pytest.mark.filterwarnings("ignore::focalkern.CalibrationWarning")
def test_copies_among_many_rows_are_found_in_a_sample(monkeypatch):
    monkeypatch.setattr(_copies, "_MOST", 600)
    logits, target = copied(300, 10)
    source = memory_rows(logits, target)
    hashes = _copies.HashSample(source.n_rows, 5, 0, source.add_up)
    hashes.keep(source)
    assert hashes._kept < 1000  # about 300 of 3,000
    found = hashes.found()
    fold = found(torch.arange(3000))
    groups = torch.unique(torch.column_stack([logits, target, fold]), dim=0)
    assert len(groups) == 300  # no row has copies in two folds
    assert torch.bincount(groups[:, -1].long(), minlength=5).min() > 30
    assert (found.folds, found.n_copies) == (5, 2700)
    calibrator = CALIBRATORS["auto"]().fit_batches(lambda: iter(in_batches(logits, target)))
    assert calibrator.verdict_.warnings[0].startswith("2,700 of the 3,000 validation rows are copies of others")
    # Few outputs, as those of a tree, are no copies.
    few = logits.round(decimals=-1)
    assert not any("copies" in words for words in CALIBRATORS["auto"]().fit_batches([(few, target)]).warnings_)


def test_invalid_batches_are_named():
    logits, target = rows(20)
    spline = fk.SplineScaling()
    with pytest.raises(TypeError, match="batches must be iterated for every pass, got an iterator, list_iterator"):
        spline.fit_batches(iter([(logits, target)]))
    with pytest.raises(TypeError, match="batches must be an iterable or a function, got int"):
        spline.fit_batches(3)
    with pytest.raises(TypeError, match=r"a batch must be \(logits, target\) or .* in batch 0"):
        spline.fit_batches([logits])
    with pytest.raises(ValueError, match="every batch must have 4 classes as the first, got 3 in batch 1"):
        spline.fit_batches([(logits, target), (logits[:, :3], target % 3)])
    with pytest.raises(ValueError, match="fit_batches needs at least one row, got none"):
        spline.fit_batches([(logits[:0], target[:0])])
    with pytest.raises(TypeError, match="target must be integer class indices in fit_batches, got strings in batch 0"):
        spline.fit_batches([(logits[:4], ["a", "b", "c", "d"])])
    with pytest.raises(ValueError, match="SplineScaling, batch 1: logits must not be NaN, got NaN at row 0, class 0"):
        spline.fit_batches([(logits, target), (logits * float("nan"), target)])
    with pytest.raises(IndexError, match=r"SplineScaling, batch 1: target must be in \[0, 4\), got 4 at row 2"):
        spline.fit_batches([(logits, target), (logits, torch.where(torch.arange(20) == 2, 4, target))])
    with pytest.raises(ValueError, match=r"logits of a batch must be \[n, C\], got shape \[4\] in batch 0"):
        spline.fit_batches([(logits[0], target[:4])])
    with pytest.raises(ValueError, match="fit_batches takes no sample_weight"):
        fk.AutoCalibrator().fit_batches([(logits, target, torch.full((20,), 2.0))])
    assert not hasattr(spline, "n_classes_")


@pytest.mark.parametrize("name", ["temperature", "scalar", "auto"])
def test_a_loader_that_shuffles_is_an_error(name):
    torch.manual_seed(0)
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(*rows()), batch_size=150, shuffle=True)
    calibrator = CALIBRATORS[name]()
    words = rf"^{type(calibrator).__name__}: batches must give the same rows .* in batch 0 .* shuffle=False"
    with pytest.raises(ValueError, match=words):
        calibrator.fit_batches(loader)
    assert not hasattr(calibrator, "n_classes_")


@pytest.mark.parametrize(
    ("later", "words"),
    [
        (lambda batches: batches[::-1], "other rows in batch 0 than in the first pass"),
        (lambda batches: [*batches[:3], batches[4], batches[3]], "other rows in batch 3 than in the first pass"),
        (lambda batches: batches[:3], "3 batches after 5 in the first pass"),
        (lambda batches: [], "0 batches after 5 in the first pass"),
        (lambda batches: [*batches, batches[0]], "more than the 5 batches of the first pass"),
        (lambda batches: [(z.flip(0), y.flip(0)) for z, y in batches], "other rows in batch 0"),
        (lambda batches: [(z + 1.0, y) for z, y in batches], "other rows in batch 0"),
    ],
)
@pytest.mark.parametrize("since", [1, 7])
def test_a_pass_with_other_rows_is_an_error(later, words, since):
    batches, passes = in_batches(*rows()), []
    batches = [batches[place] for place in (0, 1, 2, 3, 4)]

    def read():
        passes.append(later(batches) if len(passes) >= since else batches)
        return iter(passes[-1])

    if since == 7:  # a later pass compares one batch
        words = words if "batches" in words else "other rows in batch"
    with pytest.raises(ValueError, match=f"got .*{words}"):
        fk.SplineScaling().fit_batches(read)
    # Within five passes each batch is compared.
    assert len(passes) <= since + 5


def test_rounding_errors_that_differ_between_passes_are_no_error():
    """The logits of a model on a GPU may have other last bits in each pass."""
    logits, target = rows()
    logits[::3, 1] = -torch.inf
    logits[target == 1, 1] = 3.0
    generator = torch.Generator().manual_seed(0)

    def read():
        noise = 1 + 2**-8 * (torch.rand(logits.shape, generator=generator) - 0.5)
        return iter(in_batches(logits * noise, target))

    for name in ("temperature", "vector"):
        found = CALIBRATORS[name]().fit_batches(read)
        expected = CALIBRATORS[name]().fit(logits, target)
        assert found.best_value_ == pytest.approx(expected.best_value_, rel=0.01)


def rows_in_another_order(n=500):
    """Logits whose columns are not in the order of the labels, and a label that fits none."""
    generator = torch.Generator().manual_seed(1)
    target = torch.randint(5, (n,), generator=generator)
    logits = torch.randn(n, 5, generator=generator, dtype=torch.float64) + 4 * torch.eye(5, dtype=torch.float64)[target]
    return logits[:, [1, 2, 3, 4, 0]], target


@pytest.mark.parametrize("name", ["temperature", "scalar", "auto"])
def test_batches_get_the_warnings_of_a_fit_about_labels(name):
    logits, target = rows_in_another_order()
    for case in ((logits, target), (logits, target.roll(1)), (logits.softmax(-1).round() * 100, target)):
        with pytest.warns(fk.CalibrationWarning) as said:
            expected = CALIBRATORS[name](input_kind="logits").fit(*case)
        with pytest.warns(fk.CalibrationWarning) as told:
            found = CALIBRATORS[name](input_kind="logits").fit_batches(in_batches(*case))
        assert found.warnings_ == expected.warnings_ != ()
        assert [str(one.message) for one in told] == [str(one.message) for one in said]
    with pytest.warns(fk.CalibrationWarning, match="the rows to predict look like probabilities"):
        found.predict_proba(logits.softmax(-1))


def test_a_sample_of_many_rows_is_checked():
    logits, target = rows_in_another_order(100_000)
    with pytest.warns(fk.CalibrationWarning) as told:
        fk.RobustTemperatureScaling().fit_batches(in_batches(logits, target, size=7001))
    words = str(told[0].message)
    start = "RobustTemperatureScaling: in a sample of 65,536 of the 100,000 rows, the label has the largest logit in "
    assert words.startswith(start)
    places = torch.cat([torch.arange(*part) for part in sampled_parts(100_000, 5)])
    (expected,) = label_problems(logits[places], target[places])
    assert words.startswith(start + expected.removeprefix("the label has the largest logit in "))


def process(rank, store, folder):
    """The work of each of two processes; it writes its result to a file."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=2, timeout=datetime.timedelta(seconds=PATIENCE)
    )
    logits, target = rows()
    part = slice(0, 233) if rank == 0 else slice(233, None)
    for name, make in CALIBRATORS.items():
        calibrator = make().fit_batches(in_batches(logits[part], target[part]))
        torch.save((calibrator.predict_log_proba(logits), calibrator.n_samples_), f"{folder}/{name}-{rank}.pt")
    logits_of_copies, labels = copied(100, 7)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", fk.CalibrationWarning)
        calibrator = CALIBRATORS["auto"]().fit_batches(in_batches(logits_of_copies[part], labels[part]))
    torch.save(calibrator.table_, f"{folder}/copies-{rank}.pt")
    other, labels = rows_in_another_order()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", fk.CalibrationWarning)
        calibrator = fk.SplineScaling().fit_batches(in_batches(other[part], labels[part]))
    torch.save(calibrator.warnings_, f"{folder}/warnings-{rank}.pt")
    one = slice(0, 0) if rank == 0 else slice(None)  # the first process has no rows
    calibrator = fk.SplineScaling().fit_batches([(logits[one], target[one])])
    torch.save(calibrator.predict_log_proba(logits), f"{folder}/one-{rank}.pt")
    torch.save([message_of(batches) for batches in failing(rank)], f"{folder}/failures-{rank}.pt")
    dist.destroy_process_group()


def failing(rank):
    """Batches that are invalid for the second process: in the first pass and in later passes."""
    logits, target = rows()
    nan = torch.where(torch.arange(len(logits))[:, None] == 600, torch.nan, logits)
    yield in_batches(logits if rank == 0 else nan, target)
    for valid in (1, 3):
        passes = itertools.count()

        def read(valid=valid, passes=passes):
            shuffled = rank == 1 and next(passes) >= valid
            return iter(in_batches(logits.roll(int(shuffled), 0), target))

        yield read


def message_of(batches):
    start = time.monotonic()
    try:
        fk.SplineScaling().fit_batches(batches)
    except Exception as error:
        return type(error).__name__, str(error), time.monotonic() - start
    return "no error", "", 0.0


@pytest.mark.skipif(not dist.is_available(), reason="torch is built without torch.distributed")
def test_two_processes_fit_the_calibrator_of_one(tmp_path):
    context = multiprocessing.get_context("spawn")
    store = tmp_path / "store"
    workers = [context.Process(target=process, args=(rank, os.fspath(store), os.fspath(tmp_path))) for rank in (0, 1)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(PATIENCE * 3)
    assert [worker.exitcode for worker in workers] == [0, 0]
    logits, target = rows()
    for name, make in CALIBRATORS.items():
        expected = make().fit_batches(in_batches(logits, target)).predict_log_proba(logits)
        (first, n_samples), (second, _) = (torch.load(tmp_path / f"{name}-{rank}.pt") for rank in (0, 1))
        assert n_samples == 700
        assert torch.equal(first, second)
        assert first.numpy() == pytest.approx(expected.numpy(), abs=1e-9)
    with pytest.warns(fk.CalibrationWarning, match="600 of the 700 validation rows are copies"):
        expected = CALIBRATORS["auto"]().fit(*copied(100, 7)).table_
    for rank in (0, 1):
        table = torch.load(tmp_path / f"copies-{rank}.pt")
        assert [one["loss"] for one in table] == pytest.approx([one["loss"] for one in expected], rel=1e-9)
    expected = fk.SplineScaling().fit(logits, target).predict_log_proba(logits)
    for rank in (0, 1):
        assert torch.load(tmp_path / f"one-{rank}.pt").numpy() == pytest.approx(expected.numpy(), abs=1e-9)
    with pytest.warns(fk.CalibrationWarning, match="in the order of the class numbers"):
        expected = fk.SplineScaling().fit(*rows_in_another_order()).warnings_
    for rank in (0, 1):
        assert torch.load(tmp_path / f"warnings-{rank}.pt") == expected
    first, second = (torch.load(tmp_path / f"failures-{rank}.pt") for rank in (0, 1))
    assert [kind for kind, _, _ in second] == ["ValueError"] * 3
    assert all(kind == "RuntimeError" and words.startswith("rank 1 raised an error") for kind, words, _ in first)
    assert max(seconds for *_, seconds in [*first, *second]) < PATIENCE / 4
