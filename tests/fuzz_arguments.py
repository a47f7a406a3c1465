"""Arguments and files of any kind: a result, or an error in words that names who refuses what. Never a raw one.

By hand, because it still finds raw errors: ``pytest tests/fuzz_arguments.py`` takes the same examples every time,
``FOCALKERN_FUZZ=20000`` in the environment more and others.
"""
# ruff: noqa: PT017  an error is allowed here, and only its words are asserted

import csv
import io
import os
import warnings

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import focalkern as fk
from focalkern import metrics
from focalkern.files import InputError, from_frame, open_shards, read_sets

EXAMPLES = int(os.environ.get("FOCALKERN_FUZZ", "0"))


def fuzz(function, examples):
    return settings(
        max_examples=EXAMPLES or examples,
        derandomize=not EXAMPLES,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
    )(function)


# ---------------------------------------------------------------------------------------------------------------------
# Arguments
# ---------------------------------------------------------------------------------------------------------------------

NAN = float("nan")
RNG = np.random.default_rng(0)
Z = RNG.normal(size=(6, 4))
P = np.exp(Z) / np.exp(Z).sum(1, keepdims=True)
Y = np.array([0, 1, 2, 3, 0, 1])

# What belongs somewhere, and what belongs nowhere.
VALUES = [
    *(None, True, 0, 1, 2, -1, 15, 10**30, 0.0, 0.5, -0.5, 2.0, -5.0, 1e-300, 1e300, NAN, float("inf"), 1j),
    *(
        "",
        "mean",
        "none",
        "probs",
        "equal_mass",
        "nll",
        "\x00",
        b"bytes",
        object(),
        [],
        {},
        (),
        set(),
        [1.0],
        ["a"],
        [[]],
    ),
    *([0.0, 1.0], [1.0, 2.0], (0.5, NAN), [[1.0, 2.0], [3.0]], range(3), iter([1.0]), np.float32(1), np.int8(3)),
    *(Z, P, Y, Z.astype("f4"), P.astype("f2"), Z[:0], Z[:, :1], Z[:, 0], Z[None], Z.T, Z * NAN, Y.astype("u1"), Y + 9),
    *(np.array(1.0), np.array([None, 1]), np.array(["a"]), np.array(1j), np.array([], dtype="M8[s]"), Y > 1),
    *(torch.from_numpy(Z), torch.from_numpy(P), torch.from_numpy(Y), torch.from_numpy(Z).half(), torch.tensor(1.5)),
    *(torch.from_numpy(Z).bfloat16().requires_grad_(), torch.full((6, 4), -torch.inf), torch.full((6, 4), torch.inf)),
    *(torch.zeros(6, 4, dtype=torch.complex64), torch.zeros(6, 4, device="meta"), torch.zeros(2, 2).to_sparse()),
    *(torch.tensor(2), torch.tensor(True), torch.ones(6), torch.ones(4), torch.zeros(6, 4, 2, 2), torch.zeros(0)),
    *(torch.nn.Parameter(torch.tensor(2.0)), fk.FLSD_53, torch.float32, fk.metrics, int, lambda: 1),
]
GOOD = {
    "input": [Z, torch.from_numpy(Z), torch.from_numpy(Z).float()],
    "logits": [Z, torch.from_numpy(Z), torch.from_numpy(Z[:, 0].copy())],
    "probs": [P, torch.from_numpy(P)],
    "target": [Y, torch.from_numpy(Y), torch.from_numpy(P)],
    "confidence": [P[:, 0], torch.from_numpy(P[:, 0].copy())],
    "correct": [Y == 0, P[:, 0]],
    "gammas": [[0.0, 1.0], np.array([0.5])],
    "temperatures": [[1.0], torch.tensor([1.0, 2.0])],
}

FUNCTIONS = {
    fk.focal_loss: ("input target gamma weight ignore_index reduction label_smoothing detach_modulation", 2),
    fk.properized_focal_loss: ("input target gamma weight ignore_index reduction label_smoothing", 2),
    fk.sigmoid_focal_loss: ("input target gamma alpha reduction", 2),
    fk.check_labels: ("target n_classes ignore_index", 2),
    fk.focal_calibration_map: ("input gamma temperature input_kind log", 2),
    fk.binary_focal_calibration_map: ("logits gamma temperature log_odds", 2),
    fk.inverse_focal_calibration_map: ("input gamma input_kind log", 2),
    fk.binary_inverse_focal_calibration_map: ("logits gamma log_odds", 2),
    fk.calibration_grid: ("input target gammas temperatures n_bins criteria estimator input_kind ignore_index", 4),
    metrics.expected_calibration_error: ("probs target n_bins estimator confidence correct", 0),
    metrics.maximum_calibration_error: ("probs target n_bins estimator confidence correct", 0),
    metrics.rms_calibration_error: ("probs target n_bins estimator confidence correct", 0),
    metrics.debiased_calibration_error: ("probs target n_bins estimator norm confidence correct", 0),
    metrics.smooth_calibration_error: ("probs target bandwidth confidence correct", 0),
    metrics.classwise_calibration_error: ("probs target n_bins estimator reduction", 2),
    metrics.reliability_bins: ("probs target n_bins estimator confidence correct", 0),
    metrics.nll: ("probs target log", 2),
    metrics.brier_score: ("probs target", 2),
    metrics.accuracy: ("probs target correct", 0),
    metrics.aurc: ("probs target excess confidence correct", 0),
    metrics.auroc: ("confidence_in confidence_out", 2),
    fk.GammaTable: ("edges gammas", 2),
    fk.FocalLoss: ("gamma weight ignore_index reduction label_smoothing detach_modulation alpha", 0),
    fk.InverseFocalLoss: ("gamma weight reduction", 0),
    fk.FLSDLoss: ("edges gammas weight ignore_index", 0),
    fk.DualFocalLoss: ("gamma weight label_smoothing", 0),
    fk.BrierLoss: ("weight ignore_index reduction label_smoothing", 0),
    fk.MMCELoss: ("coefficient weighted bandwidth reduction", 0),
    fk.LogitNormPenalty: ("coefficient weight reduction", 0),
    fk.AdaFocalLoss: ("n_bins lam gamma_init gamma_max gamma_min switch weight", 0),
}
REFUSALS = (TypeError, ValueError, IndexError, NotImplementedError)


def refused(call, who):
    """Runs it; an error must be one of ours, which begin with who raised them."""
    with warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore")
        try:
            call()
        except REFUSALS as error:
            text = str(error)
            # Python's own words for a keyword that is missing.
            assert text.startswith(who) or f"{who.split(' ')[0]}()" in text, f"{type(error).__name__}: {text}"


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda function: function.__name__)
def test_any_argument(function):
    names, needed = FUNCTIONS[function]
    names = names.split()

    def value(name):
        return st.sampled_from(GOOD[name] * 8 + VALUES) if name in GOOD else st.sampled_from(VALUES)

    optional = {name: value(name) for name in names[needed:]}
    calls = st.tuples(st.fixed_dictionaries({name: value(name) for name in names[:needed]}, optional=optional))

    @given(calls)
    def run(arguments):
        refused(lambda: function(**arguments[0]), function.__name__)

    fuzz(run, 60)()


LOSSES = [fk.FocalLoss(), fk.FLSDLoss(), fk.AdaFocalLoss(), fk.DualFocalLoss(), fk.BrierLoss(), fk.MMCELoss()]
LOSSES += [fk.LogitNormPenalty(), fk.InverseFocalLoss(), fk.FocalLoss(weight=torch.ones(4)), fk.SigmoidFocalLoss()]
CALIBRATORS = [fk.TemperatureScaling, fk.FocalTemperatureScaling, fk.HistogramBinning]


@given(
    st.sampled_from(LOSSES), st.sampled_from(GOOD["input"] * 8 + VALUES), st.sampled_from(GOOD["target"] * 8 + VALUES)
)
def _any_batch(loss, input, target):
    def call():
        try:
            loss(input, target)
        except REFUSALS as error:  # the function behind the module may say it
            assert str(error).startswith((type(loss).__name__, "focal_loss:", "sigmoid_focal_loss:")), str(error)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        call()


def test_any_batch():
    fuzz(_any_batch, 300)()


@given(st.sampled_from(CALIBRATORS), st.sampled_from(GOOD["input"] * 4 + VALUES), st.sampled_from([Y] * 8 + VALUES))
def _any_fit(calibrator, logits, target):
    refused(lambda: calibrator().fit(logits, target), calibrator.__name__)


def test_any_fit():
    fuzz(_any_fit, 100)()


# ---------------------------------------------------------------------------------------------------------------------
# Files
# ---------------------------------------------------------------------------------------------------------------------


def csv_text(rows):
    stream = io.StringIO()
    csv.writer(stream).writerows(rows)
    return stream.getvalue().encode(errors="replace")


def seeds():
    """A good file of each format."""
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


@st.composite
def damaged(draw, suffix):
    data = bytearray(SEEDS[suffix])
    for _ in range(draw(st.integers(0, 4))):
        place = draw(st.integers(0, len(data)))
        kind = draw(st.sampled_from(["replace", "insert", "cut", "drop"]))
        if kind == "replace" and place < len(data):
            data[place] = draw(st.integers(0, 255))
        elif kind == "insert":
            data[place:place] = draw(st.binary(max_size=8))
        elif kind == "cut":
            del data[place:]
        elif kind == "drop":
            del data[place : place + draw(st.integers(1, 64))]
    return bytes(data)


@pytest.mark.parametrize("suffix", SEEDS)
def test_any_file(suffix, tmp_path):
    path = tmp_path / f"a_logits{suffix}"
    np.save(tmp_path / "a_labels.npy", Y)

    @given(st.one_of(damaged(suffix), st.binary(max_size=64)))
    def run(data):
        path.write_bytes(data)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for read in (read_sets, lambda path: open_shards(str(path), labels=None, input_kind=None)):
                try:
                    for rows in read(path).values():
                        for _ in rows.batches(0, len(rows), 100) if hasattr(rows, "batches") else ():
                            pass
                except InputError as error:
                    assert "\n" not in str(error) and str(tmp_path) in str(error)

    fuzz(run, 60)()


CELLS = st.one_of(
    st.sampled_from(
        ["", "0", "1", "-1", "3.0", "nan", "inf", "1e400", "cat", "label", "id", "0x1", "１", "1_0", '"', "\r"]
    ),
    st.floats().map(repr),
    st.text(max_size=3),
)
NAMES = st.one_of(
    st.sampled_from(
        ["label", "target", "0", "1", "2", "00", "logit_0", "logit_1", "", "id", "p_99999999999999999999", "²"]
    ),
    st.text(max_size=3),
)


def test_any_table(tmp_path):
    path = tmp_path / "a.csv"
    pd = pytest.importorskip("pandas")

    @given(
        st.lists(NAMES, max_size=6),
        st.lists(st.lists(CELLS, max_size=6), max_size=5),
        st.sampled_from([None, "*", "[", "p_*"]),
    )
    def run(header, rows, key):
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

    fuzz(run, 150)()


JSON = fk.TemperatureScaling().fit_quietly(Z, Y)


def test_any_calibrator_file(tmp_path):
    path = tmp_path / "a.json"
    JSON.save(path)
    SEEDS[".json"] = path.read_bytes()

    @given(st.one_of(damaged(".json"), st.binary(max_size=64)))
    def run(data):
        path.write_bytes(data)
        try:
            fk.load_calibrator(path)
        except (ValueError, TypeError) as error:
            assert str(path) in str(error), str(error)

    fuzz(run, 100)()
