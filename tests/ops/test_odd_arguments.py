"""Arguments of any kind: a call returns a result or raises one line that names the function and the argument. No
argument may cause a raw error, a crash or a hang.

Every argument of every public function gets every value of ``odd_arguments.values()``, with the other arguments valid.
Then random pairs of arguments get random values, the same in every run; with ``FOCALKERN_FUZZ=20000`` in the
environment, 20000 new ones are drawn.
"""

import inspect
import os

import numpy as np
import odd_arguments
import pytest
import torch
import torch.distributed as dist

import focalkern as fk
from focalkern import bootstrap, calibrators, losses, metrics

# Result classes, which users do not construct; constants; and functions without arguments.
NO_CALL = {
    "CalibrationGrid",
    "CalibrationWarning",
    "LossStats",
    "LossWithStats",
    "Study",
    "Sweep",
    "Verdict",
    "build_info",
    "empty_cache",
}
NO_CALL |= {"AdaFocalRecord", "BiasFloor", "Interval", "PairedBootstrap", "ReliabilityBins", "NotFittedError"}
NO_CALL |= {"AcceptThreshold", "RiskCoverage"}
# The base class, types for annotations, and modules that calibrators create from arrays that they have checked.
NO_CALL |= {"Calibrator", "Binning", "Criterion", "Estimator", "InputKind", "Search", "Structure"}
NO_CALL |= {
    "ClassAxis",
    "FlooredInput",
    "FlooredLogProbs",
    "HistogramLogProbs",
    "IsotonicLogProbs",
    "MultiLabelLogits",
    "SplineKind",
    "SplineLogProbs",
    "StructuredLogProbs",
}
NO_CALL |= {"grid_border"}

# With 6 rows each fit takes a tenth of a second: they get values that they must refuse, and few others.
SLOW = {"AutoCalibrator", "AutoCalibrator.fit", "compare_calibrators", "Study.write_report"}


@pytest.fixture(scope="module")
def calls(tmp_path_factory):
    """All calls run in a process group of one process and in an empty folder."""
    before, threads = os.getcwd(), torch.get_num_threads()
    os.chdir(tmp_path_factory.mktemp("odd"))
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    yield odd_arguments.calls()
    dist.destroy_process_group()
    torch.set_num_threads(threads)
    os.chdir(before)


def test_nothing_public_is_left_out(calls):
    for module in (fk, metrics, bootstrap, losses, calibrators):
        for name in module.__all__:
            value = getattr(module, name)
            if callable(value) and not inspect.ismodule(value) and name not in NO_CALL:
                assert name in calls, name


def test_every_value_in_every_place(calls):
    problems = {}
    for name, one in calls.items():
        good = one.arguments
        for argument in good:
            for number, value in enumerate(odd_arguments.values()):
                if name in SLOW and number % 5:
                    continue
                problem = odd_arguments.problem_of(one, {**good, argument: value})
                if problem is not None:
                    kind = (name, argument, problem.partition(", got")[0][:60])
                    problems.setdefault(kind, f"{name}({argument}={type(value).__name__}): {problem[:200]}")
    assert not problems, "\n".join([f"{len(problems)} kinds", *list(problems.values())[:80]])


def test_several_at_once(calls):
    names = sorted(calls.keys() - SLOW)
    for random in odd_arguments.examples(1500):
        name = names[random.integers(len(names))]
        values, arguments = odd_arguments.values(), calls[name].arguments
        chosen = random.choice([*arguments], size=min(2, len(arguments)), replace=False).tolist()
        places = random.integers(len(values), size=len(chosen)).tolist()
        arguments.update(zip(chosen, (values[place] for place in places), strict=True))
        problem = odd_arguments.problem_of(calls[name], arguments)
        assert problem is None, f"{name}, {dict(zip(chosen, places, strict=True))}: {problem}"


@pytest.mark.parametrize("odd", [3, "x", [], {}, torch.zeros(3), object()], ids=lambda odd: type(odd).__name__)
def test_a_study_of_something_else_is_refused(odd, tmp_path):
    np.savez(tmp_path / "a.npz", logits=3 * np.eye(3), labels=np.arange(3))
    rows = fk.files.read_sets(tmp_path / "a.npz")[""]
    for call in (
        lambda: fk.study.evaluate_rows(odd),
        lambda: fk.study.evaluate_rows(rows, odd),
        lambda: fk.study.stream_sets("a-*.npy", processes=odd),
        lambda: fk.study.stream_sets("a-*.npy", progress=odd),
    ):
        with pytest.raises(TypeError, match=r"^(evaluate_rows: (given|calibrator)|stream_sets: processes) .*got "):
            call()
    for n_bins in (0, -1, 1.5, "15", None, 2**24 + 1):
        with pytest.raises((TypeError, ValueError), match=r"^evaluate_rows: n_bins must be "):
            fk.study.evaluate_rows(rows, n_bins=n_bins)


@pytest.mark.parametrize("odd", [2.5, "x", b"x", [None], {1}, torch.zeros(3), object()], ids=lambda odd: repr(odd)[:9])
@pytest.mark.parametrize(
    "name", ["files", "folder", "jobs", "executor", "batch", "labels", "criterion", "folds", "seed"]
)
def test_a_sweep_refuses_what_does_not_fit(odd, name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    if name in ("files", "folder", "labels") and odd == "x":
        pytest.skip("a folder or a file may be called so")
    with pytest.raises((TypeError, ValueError), match=rf"^sweep: {name} must be .*"):
        fk.sweep(**{"files": [], name: odd})
