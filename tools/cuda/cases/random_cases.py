"""Random combinations of all arguments of the launchers, from seed FOCALKERN_FUZZ_SEED (0) on, for
FOCALKERN_FUZZ_SECONDS (20). A failure prints its seed. Normal test runs do not include these cases.
"""

import os
import random
import time
from ctypes import c_int64

import torch

from focalkern import GammaTable, reference
from tools.cuda.cases.calibration_grid import ESTIMATORS, run_grid
from tools.cuda.cases.calibration_map import check_map
from tools.cuda.cases.common import DTYPES, LABELS, assert_near, real_of
from tools.cuda.cases.focal_loss import check_focal_loss

CLASSES = [
    1, 2, 3, 4, 5, 7, 8, 9, 10, 16, 19, 31, 32, 33, 63, 64, 100, 127, 128, 129, 255, 256, 257, 300, 511, 512, 513, 600,
    1000, 1023, 1025, 2047, 2049, 2500, 4097, 5000,
]  # fmt: skip


def source_of(form, rows, classes, r):
    """Standard normal numbers in one of the layouts."""
    if form in ("nchw", "nhwc"):
        d = r.randint(1, 9)
        n = max(1, rows // d)
        return torch.randn(n, classes, d) if form == "nchw" else torch.randn(n, d, classes).transpose(1, 2)
    if form == "transposed":
        return torch.randn(classes, rows).t()
    if form == "offset":
        k = r.randint(1, 7)
        return torch.randn(rows * classes + k)[k:].reshape(rows, classes)
    if form == "gap":
        return torch.randn(rows, classes + r.randint(1, 9))[:, :classes]
    return torch.randn(rows, classes)


def focal(library, r):
    dtype = r.choice(DTYPES)
    classes = r.choice(CLASSES)
    rows = r.randint(1, max(1, 6000 // classes)) if r.random() < 0.7 else r.randint(1, 4)
    form = r.choice(["plain", "plain", "offset", "gap", "transposed", "nchw", "nhwc"])
    source = source_of(form, rows, classes, r)
    logits = torch.empty_strided(source.shape, source.stride(), dtype=dtype).copy_(r.choice([0.3, 3, 8]) * source)
    shape = logits.shape[:1] + logits.shape[2:]
    soft = r.random() < 0.15
    options = {"reduction": r.choice(["none", "mean", "sum"]), "label_smoothing": r.choice([0.0, 0.0, 0.0, 0.1, 0.5])}
    if soft:
        target_type = r.choice([dtype, real_of(dtype)])
        target = torch.empty_like(logits, dtype=target_type).copy_(torch.randn(logits.shape).softmax(1))
        if r.random() < 0.3:
            target = target.contiguous()
    else:
        kind = r.choice(LABELS)
        target = torch.randint(min(classes, 250), shape).to(kind)
        if r.random() < 0.4 and kind != torch.uint8:
            target[torch.rand(shape) < 0.2] = -100
        elif r.random() < 0.3:
            options["ignore_index"] = r.randrange(min(classes, 250))
        if r.random() < 0.15 and options["reduction"] == "none" and kind == torch.int64:
            target[torch.rand(shape) < 0.1] = r.choice([classes, 2**40, -5, 2**31])
    gamma = r.choice([0.0, 1.0, 2.0, 0.5, -2.0, 3.7, torch.tensor(1.5), "rows", "table"])
    if isinstance(gamma, str):
        table = GammaTable([0.0, 0.0131, 0.2717, 0.7133, 1.0], [5.0, -1.5, 3.0, 0.0])
        gamma = 4 * torch.rand(shape) - 1 if gamma == "rows" else table
    if r.random() < 0.4:
        options["weight"] = torch.rand(classes) + 0.05
    outside = not soft and bool((((target < 0) & (target != -100)) | (target >= classes)).any())
    if outside and isinstance(gamma, torch.Tensor) and gamma.dim() == 0:
        gamma = 2.0  # the sum of the gradients of the rows is NaN if any of them is NaN, as it should be
    if isinstance(gamma, float | GammaTable) and r.random() < 0.2:
        options["detach_modulation"] = True
    if r.random() < 0.3:
        options["grad_like"] = torch.empty(logits.shape, dtype=dtype)
    try:
        check_focal_loss(library, logits, target, gamma, **options)
    except AssertionError as e:
        shown = "rows" if isinstance(gamma, torch.Tensor) and gamma.dim() > 0 else gamma
        given = {name: "tensor" if isinstance(o, torch.Tensor) else o for name, o in options.items()}
        what = f"{dtype} {tuple(logits.shape)} {logits.stride()} {form} {target.dtype} gamma={shown} {given}"
        raise AssertionError(f"{what}: {e}") from e


def mapping(library, r):
    dtype = r.choice(DTYPES)
    kind = r.choice(["logits", "logits", "probs", "binary"])
    classes = r.choice([2, 3, 5, 10, 16, 17, 33, 64, 100, 129, 257, 512, 513, 1000, 1025, 2049, 4097])
    n = r.randint(1, max(1, 2000 // classes))
    if kind == "binary":
        n = r.randint(1, 600)
        values = (5 * torch.randn(n)).to(dtype)
    elif kind == "probs":
        if dtype not in (torch.float32, torch.float64):
            return  # rounded probabilities do not sum to 1: only for logits do reference and kernel agree
        values = torch.randn(n, classes).softmax(1).to(dtype)
    else:
        values = (r.choice([0.5, 3]) * torch.randn(n, classes)).to(dtype)
        if r.random() < 0.3 and classes > 4:
            values[0, 1 : classes // 2] = -torch.inf
    gamma = r.choice([0.0, 1.0, 2.0, -0.5, 4 * torch.rand(n).double() - 0.9])
    temperature = r.choice([1.0, 0.5, 2.0, 0.3 + torch.rand(n).double()])
    try:
        check_map(library, values, gamma, temperature, kind=kind, log=r.random() < 0.5, wide=r.random() < 0.5)
    except AssertionError as e:
        raise AssertionError(f"map {dtype} {kind} {tuple(values.shape)}: {e}") from e


def grid(library, r):
    dtype = r.choice(DTYPES)
    rows, classes = r.choice([1, 2, 7, 50, 255, 256, 257, 500]), r.choice([2, 3, 10, 33])
    logits = (3 * torch.randn(rows, classes)).to(dtype)
    labels = torch.randint(classes, (rows,)).to(r.choice(LABELS))
    gammas = [r.choice([-0.5, 0.0, 0.37, 1.0, 5.0, 2.0]) for _ in range(r.randint(1, 7))]
    temperatures = [0.2 + 0.05 * i for i in range(r.choice([1, 2, 3, 9]))]
    kept = torch.arange(rows)[torch.rand(rows) < 0.7] if r.random() < 0.4 and rows > 20 else None
    n_bins = r.choice([1, 2, 7, 8, 9, 15, 20])
    estimator = r.choice(ESTIMATORS)
    tables, confidence, correct = run_grid(
        library, logits, labels, gammas, temperatures, n_bins=n_bins, estimator=estimator, kept=kept
    )
    z, y = (logits, labels) if kept is None else (logits[kept], labels[kept])
    expected = reference.calibration_grid(z.double(), y.long(), gammas, temperatures, criteria=("nll", "brier"))
    for name in ("nll", "brier"):
        assert_near(tables[name], expected[name], real_of(dtype))
    for g in range(len(gammas)):
        for t in range(len(temperatures)):
            ece, _ = reference.calibration_error(confidence[t, g], correct, n_bins, estimator)
            assert abs(tables["ece"][g, t].item() - ece) < 1e-12, (rows, n_bins, estimator)


def test_random_cases(library):
    first = seed = int(os.environ.get("FOCALKERN_FUZZ_SEED", "0"))
    end = time.monotonic() + float(os.environ.get("FOCALKERN_FUZZ_SECONDS", "20"))
    failures = []
    while time.monotonic() < end:
        r = random.Random(seed)
        torch.manual_seed(seed)
        which = r.choice([focal, focal, focal, mapping, grid])
        try:
            which(library, r)
        except AssertionError as e:
            failures.append((seed, which.__name__, str(e)[:700]))
        if hasattr(library, "ptxrun_error_count") and library.ptxrun_error_count():
            failures.append((seed, which.__name__, library.ptxrun_error(c_int64(0)).decode()))
            library.ptxrun_clear_errors()
        seed += 1
    print(f"{seed - first} random cases, seeds {first} to {seed - 1}")
    assert not failures
