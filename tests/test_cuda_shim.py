"""The CUDA kernels on the CPU: blocks and threads run as fibers (tests/cuda_shim), so that indexing, reductions, tails
and launch geometry are tested on every machine. What they compute shares its formulas with the CPU kernels.

Inputs end at a page that nobody may touch, outputs start as NaN, and the threads of a block run in a random order.
"""

import ctypes
import platform
import shutil
import subprocess
from ctypes import c_bool, c_double, c_float, c_int32, c_int64, c_void_p
from pathlib import Path

import pytest
import torch
from conftest import TOLERANCE

from focalkern import GammaTable, reference

ROOT = Path(__file__).parent.parent
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]  # in the order of harness.cpp
LABELS = [torch.int64, torch.int32, torch.uint8]
NAN = float("nan")
NO_PROBLEM = 2**63 - 1


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    compiler = shutil.which("g++")
    if compiler is None or platform.machine() != "x86_64" or not (ROOT / "csrc").is_dir():
        pytest.skip("needs g++ on x86-64 and the sources")
    folder = tmp_path_factory.mktemp("cuda_shim")
    flags = ["-std=c++17", "-O1", "-fPIC", "-fno-trapping-math", f"-I{ROOT / 'tests/cuda_shim'}", f"-I{ROOT / 'csrc'}"]
    sources = [*sorted((ROOT / "csrc/cuda").glob("*.cu")), ROOT / "tests/cuda_shim/harness.cpp"]
    objects = [str(folder / f"{source.stem}.o") for source in sources]
    jobs = [
        subprocess.Popen([compiler, *flags, "-x", "c++", "-c", str(source), "-o", target])
        for source, target in zip(sources, objects, strict=True)
    ]
    assert [job.wait() for job in jobs] == [0] * len(jobs)
    subprocess.run([compiler, "-shared", *objects, "-o", str(folder / "shim.so")], check=True)
    shim = ctypes.CDLL(str(folder / "shim.so"))
    shim.guarded.restype = c_void_p
    for name in ("focal_loss_workspace", "calibration_grid_workspace", "size_of"):
        getattr(shim, name).restype = c_int64
    for name in ("check_all_row_plans", "check_row_plan"):
        getattr(shim, name).restype = ctypes.c_char_p
    shim.set_seed(c_int64(int(torch.randint(1 << 30, ()))))
    return shim


def real_of(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


class Memory:
    """Tensors copied to guarded memory, and back."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self.library = library
        self.held: list[tuple[int, int]] = []

    def __enter__(self) -> "Memory":
        return self

    def __exit__(self, *_: object) -> None:
        for address, size in self.held:
            self.library.unguard(c_void_p(address), c_int64(size))

    def put(self, tensor: torch.Tensor | None) -> int | None:
        """The address of a copy with the same strides."""
        if tensor is None:
            return None
        span = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)) + 1
        flat = tensor.as_strided((span if tensor.numel() else 0,), (1,))
        size = flat.numel() * flat.element_size()
        address = int(self.library.guarded(c_int64(size)))
        self.held.append((address, size))
        if size:
            ctypes.memmove(address, flat.data_ptr(), size)
        return address

    @staticmethod
    def get(address: int, like: torch.Tensor) -> torch.Tensor:
        result = torch.empty_strided(like.shape, like.stride(), dtype=like.dtype)
        if like.numel():
            span = sum((size - 1) * stride for size, stride in zip(like.shape, like.stride(), strict=True)) + 1
            ctypes.memmove(result.data_ptr(), address, span * like.element_size())
        return result


def nan_like(tensor: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=dtype or tensor.dtype).fill_(NAN)


def assert_near(actual: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype, factor: float = 1) -> None:
    rtol, atol = TOLERANCE[dtype]
    torch.testing.assert_close(
        actual.double(), expected.double().reshape(actual.shape), rtol=factor * rtol, atol=factor * atol, equal_nan=True
    )


# ---- the argument structs of kernels.h -----------------------------------------------------------------------------


class Layout(ctypes.Structure):
    _fields_ = [(name, c_int64) for name in ("inner", "outer_stride", "inner_stride", "class_stride")]

    @classmethod
    def of(cls, tensor: torch.Tensor) -> "Layout":  # [N, C] or [N, C, d]
        if tensor.dim() == 2:
            return cls(max(1, len(tensor)), 0, tensor.stride(0), tensor.stride(1))
        return cls(tensor.shape[2], tensor.stride(0), tensor.stride(2), tensor.stride(1))


class Labels(ctypes.Structure):
    _fields_ = [("data", c_void_p), ("type", c_int32)]


def structure(library: ctypes.CDLL, name: str, dtype: torch.dtype, fields: list[tuple[str, object]]) -> object:
    """An empty struct; "real" stands for the compute type. Its size is compared with that of the C++ struct."""
    real = c_double if dtype == torch.float64 else c_float
    members = [(field, real if kind == "real" else kind) for field, kind in fields]
    kind = type(name, (ctypes.Structure,), {"_fields_": members})
    assert ctypes.sizeof(kind) == library.size_of(name.encode(), int(dtype == torch.float64))
    return kind()


FOCAL_LOSS = [
    ("rows", c_int64), ("classes", c_int64), ("logits", c_void_p), ("layout", Layout), ("labels", Labels),
    ("ignore_index", c_int64), ("target_probs", c_void_p), ("target_layout", Layout), ("label_smoothing", "real"),
    ("class_weight", c_void_p), ("detach_modulation", c_bool), ("gamma", c_void_p), ("gamma_stride", c_int64),
    ("gamma_value", "real"), ("edges", c_void_p), ("n_bins", c_int64), ("saved", c_void_p),
]  # fmt: skip
FOCAL_LOSS_FORWARD = [*FOCAL_LOSS, ("row_loss", c_void_p)]
FOCAL_LOSS_BACKWARD = [
    *FOCAL_LOSS, ("grad_loss", c_void_p), ("grad_stride", c_int64), ("divisor", c_void_p), ("grad_logits", c_void_p),
    ("grad_layout", Layout), ("grad_target", c_void_p), ("grad_gamma", c_void_p),
]  # fmt: skip
PARAMETERS = [
    ("gamma", c_void_p), ("gamma_stride", c_int64), ("gamma_value", c_double),
    ("temperature", c_void_p), ("temperature_stride", c_int64), ("temperature_value", c_double),
]  # fmt: skip
MAP = [
    ("rows", c_int64), ("classes", c_int64), ("input", c_void_p), ("input_is_probs", c_bool), ("log_output", c_bool),
    *PARAMETERS,
]  # fmt: skip
BINARY_MAP = [("size", c_int64), ("input", c_void_p), ("log_output", c_bool), *PARAMETERS]
OUTPUTS = [("output", c_void_p), ("output_wide", c_void_p)]
GRADIENTS = [(n, c_void_p) for n in ("grad_output", "grad_output_wide", "grad_input", "grad_gamma", "grad_temperature")]
SAMPLES = [
    ("rows", c_int64), ("classes", c_int64), ("input", c_void_p), ("row_stride", c_int64), ("input_is_probs", c_bool),
    ("labels", Labels), ("kept", c_void_p), ("top", c_void_p), ("correct", c_void_p),
]  # fmt: skip


# ---- focal loss ----------------------------------------------------------------------------------------------------


def run_focal_loss(library, logits, target, gamma, grad, *, weight=None, ignore_index=-100, reduction="mean",
                   label_smoothing=0.0, detach_modulation=False, grad_like=None):  # fmt: skip
    """Everything that the two kernels write, by name."""
    dtype, real = logits.dtype, real_of(logits.dtype)
    classes = logits.shape[1]
    rows = logits.numel() // classes
    soft = target.is_floating_point()
    with Memory(library) as memory:
        forward = structure(library, "FocalLossForward", dtype, FOCAL_LOSS_FORWARD)
        forward.rows, forward.classes = rows, classes
        forward.logits, forward.layout = memory.put(logits), Layout.of(logits)
        if soft:
            forward.target_probs, forward.target_layout = memory.put(target), Layout.of(target)
        else:
            forward.labels = Labels(memory.put(target.contiguous()), LABELS.index(target.dtype))
        forward.ignore_index, forward.label_smoothing = ignore_index, label_smoothing
        forward.detach_modulation = detach_modulation
        forward.class_weight = None if weight is None else memory.put(weight.to(real))
        if isinstance(gamma, GammaTable):
            forward.gamma, forward.n_bins = memory.put(gamma.gammas.to(real)), len(gamma.gammas)
            forward.edges = memory.put(gamma.edges.to(real))
        elif isinstance(gamma, torch.Tensor):
            forward.gamma, forward.gamma_stride = memory.put(gamma.to(real)), int(gamma.dim() > 0)
        else:
            forward.gamma_value = gamma
        numbers = torch.full((3 * rows,), NAN, dtype=real)
        row_numbers, one = numbers[:rows].clone(), torch.full((1,), NAN, dtype=real)
        forward.saved = memory.put(numbers)
        divisor, loss, row_loss = memory.put(one), memory.put(one), memory.put(row_numbers)
        forward.row_loss = row_loss if reduction == "none" else None
        workspace = torch.full((library.focal_loss_workspace(c_int64(rows), c_int64(classes)),), 7, dtype=torch.uint8)
        status = library.focal_loss_forward(
            DTYPES.index(dtype), ctypes.byref(forward), int(reduction == "mean"),
            c_void_p(None if reduction == "none" else loss), c_void_p(divisor),
            c_void_p(memory.put(workspace) if len(workspace) else None),
        )  # fmt: skip
        assert status == 0

        backward = structure(library, "FocalLossBackward", dtype, FOCAL_LOSS_BACKWARD)
        for name, _ in FOCAL_LOSS:
            setattr(backward, name, getattr(forward, name))
        backward.grad_loss, backward.grad_stride = memory.put(grad), int(reduction == "none")
        backward.divisor = divisor if reduction == "mean" else None
        grad_like = logits if grad_like is None else grad_like
        backward.grad_logits, backward.grad_layout = memory.put(nan_like(grad_like)), Layout.of(grad_like)
        backward.grad_target = memory.put(nan_like(target)) if soft else None
        backward.grad_gamma = memory.put(row_numbers)
        assert library.focal_loss_backward(DTYPES.index(dtype), ctypes.byref(backward)) == 0
        return {
            "saved": memory.get(forward.saved, numbers),
            "loss": memory.get(row_loss, row_numbers) if reduction == "none" else memory.get(loss, one),
            "divisor": memory.get(divisor, one),
            "grad_logits": memory.get(backward.grad_logits, grad_like),
            "grad_target": memory.get(backward.grad_target, target) if soft else None,
            "grad_gamma": memory.get(backward.grad_gamma, row_numbers),
        }


def check_focal_loss(library, logits, target, gamma, *, reduction="mean", **options):
    grad_like = options.pop("grad_like", None)
    dtype, real = logits.dtype, real_of(logits.dtype)
    classes = logits.shape[1]
    rows = logits.numel() // classes
    grad = torch.randn(rows if reduction == "none" else 1, dtype=real)
    actual = run_focal_loss(library, logits, target, gamma, grad, reduction=reduction, grad_like=grad_like, **options)
    z = logits.double().requires_grad_()
    soft = target.is_floating_point()
    t = target.double().requires_grad_() if soft else target.long()
    differentiable = isinstance(gamma, torch.Tensor) and not options.get("detach_modulation", False)
    g = gamma.double().requires_grad_() if differentiable else gamma
    # Out of range: NaN for that row, and the others as if it were ignored.
    ignore_index = options.pop("ignore_index", -100)
    outside = torch.zeros(rows, dtype=torch.bool)
    if not soft:
        outside = ((t < 0) | (t >= classes)) & (t != ignore_index)
        t = torch.where(outside, ignore_index, t)
        outside = outside.reshape(-1)
    if options.get("weight") is not None:
        options["weight"] = options["weight"].double()
    expected = reference.focal_loss(z, t, g, reduction=reduction, ignore_index=ignore_index, **options)
    inputs = [z, *([t] if soft else []), *([g] if differentiable else [])]
    upstream = grad.double().reshape(expected.shape)
    gradients = list(torch.autograd.grad(expected, inputs, upstream, allow_unused=True))
    factor = 100 if logits.abs().nan_to_num(posinf=0, neginf=0).max() > 100 else 20
    if outside.any():
        expected = (
            torch.where(outside.reshape(expected.shape), NAN, expected) if reduction == "none" else expected * NAN
        )
    assert_near(actual["loss"], expected, real, factor)
    if reduction != "mean":
        assert actual["divisor"].item() == 1
    z_grad = gradients[0].movedim(1, -1).reshape(rows, classes)
    z_grad = torch.where(outside.unsqueeze(-1), NAN, z_grad)
    assert_near(
        actual["grad_logits"].movedim(1, -1).reshape(rows, classes), z_grad, dtype, factor if dtype == real else 2
    )
    if soft:
        assert_near(actual["grad_target"], gradients[1], real, factor)
    if differentiable:
        of_rows = actual["grad_gamma"] if gamma.dim() > 0 else actual["grad_gamma"].sum()
        assert_near(of_rows, torch.where(outside, NAN, gradients[-1].reshape(-1)) if gamma.dim() else gradients[-1],
                    real, factor)  # fmt: skip
    return actual


def labels_for(logits: torch.Tensor, dtype: torch.dtype = torch.int64) -> torch.Tensor:
    shape = logits.shape[:1] + logits.shape[2:]
    return torch.randint(min(logits.shape[1], 200), shape).to(dtype)


# Classes around each border between the ways of reading a row: one vector, one tile, a warp, the block; and their
# remainders. Rows around a tile.
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("rows", "classes"),
    [(1, 1), (33, 3), (257, 10), (300, 17), (40, 129), (17, 512), (9, 513), (5, 1023), (3, 4099), (2, 9001)],
)
def test_focal_loss_rows(library, dtype, rows, classes):
    logits = (3 * torch.randn(rows, classes)).to(dtype)
    check_focal_loss(library, logits, labels_for(logits), 2.0, reduction="mean")
    check_focal_loss(library, logits, labels_for(logits, torch.int32), torch.rand(rows), reduction="none")


# Every remainder of a vector and of a warp, at each way of reading a row: an element that no thread takes stays
# NaN in the gradient, one that is taken twice shows in the sums.
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("first", [1, 65, 129, 257, 481, 513, 2030, 4090])
def test_focal_loss_takes_each_element_once(library, dtype, first):
    for classes in range(first, first + (64 if first < 1000 else 40), 1 if first < 1000 else 3):
        logits = torch.randn(3, classes).to(dtype)
        check_focal_loss(library, logits, labels_for(logits), 2.0, reduction="sum")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("classes", [5, 300, 2100])
def test_focal_loss_layouts(library, dtype, classes):
    n = 11 if classes < 1000 else 3
    sources = [
        torch.randn(2, classes, 37 if classes < 1000 else 5),  # a row is a column of memory
        torch.randn(n, classes, 3),
        torch.randn(n, 2, classes).transpose(1, 2),  # channels last
        torch.randn(classes, n).t(),
        torch.randn(n * classes + 1)[1:].reshape(n, classes),  # not on a 16-byte boundary
        torch.randn(n, classes + 3)[:, :classes],  # with gaps
    ]
    for source in sources:
        logits = torch.empty_strided(source.shape, source.stride(), dtype=dtype).copy_(source)
        for grad_like in (logits, torch.empty(logits.shape, dtype=dtype)):
            check_focal_loss(library, logits, labels_for(logits), 1.5, grad_like=grad_like)
        soft = torch.empty_like(logits, dtype=torch.float32).copy_(torch.randn(logits.shape).softmax(1))
        check_focal_loss(library, logits, soft, 2.0, label_smoothing=0.1)


@pytest.mark.parametrize("classes", [4, 100, 1500])
@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
def test_focal_loss_options(library, classes, reduction):
    logits = 3 * torch.randn(20, classes)
    target = labels_for(logits)
    target[::5] = -100
    table = GammaTable([0.0, 0.013, 0.27, 1.0], [5.0, -1.5, 3.0])
    for gamma in (0.0, 0.5, -2.0, torch.tensor(1.5), 4 * torch.rand(20) - 1, table):
        for smoothing in (0.0, 0.2):
            options = {"label_smoothing": smoothing, "detach_modulation": smoothing > 0 and gamma is table}
            check_focal_loss(library, logits, target, gamma, reduction=reduction, weight=torch.rand(classes), **options)


@pytest.mark.parametrize("classes", [3, 200, 2500])
@pytest.mark.parametrize("label_type", LABELS)
def test_focal_loss_never_follows_a_label_out_of_range(library, classes, label_type):
    logits = torch.randn(12, classes)
    target = labels_for(logits, label_type)
    target[3] = 1
    if classes < 256 or label_type != torch.uint8:
        target[7] = classes if classes < 256 else 2**31 - 1
    if label_type != torch.uint8:
        target[11] = -1
    for smoothing in (0.0, 0.1):
        check_focal_loss(library, logits, target, 2.0, ignore_index=1, reduction="none", label_smoothing=smoothing)
        check_focal_loss(library, logits[:9], target[:9], 2.0, ignore_index=1, label_smoothing=smoothing)


@pytest.mark.parametrize("classes", [3, 100, 2500])
def test_focal_loss_edges(library, classes):
    logits = torch.randn(9, classes)
    target = torch.zeros(9, dtype=torch.int64)
    logits[0, 0] = 1e4  # certain and right
    logits[1, 1] = 1e4  # certain and wrong
    logits[2, 0] = 80
    logits[3, 1:] = -torch.inf
    logits[4, 1] = -torch.inf
    target[5] = -100
    check_focal_loss(library, logits, target, 0.5, reduction="none")
    logits[5] = NAN  # ignored, so never read
    for value in (NAN, torch.inf):
        logits[6, classes - 1] = value
        actual = run_focal_loss(library, logits, target, 2.0, torch.ones(9), reduction="none")
        assert actual["loss"].isnan().nonzero().tolist() == [[6]]
        assert actual["grad_logits"].isnan().any(1).nonzero().tolist() == [[6]]
        assert (actual["grad_logits"][5] == 0).all()
    logits[7] = -torch.inf
    assert run_focal_loss(library, logits, target, 2.0, torch.ones(9), reduction="none")["loss"][7].isnan()


def test_focal_loss_of_nothing(library):
    for rows in (0, 40):
        logits = torch.randn(rows, 5)
        target = torch.full((rows,), -100)
        actual = run_focal_loss(library, logits, target, 2.0, torch.ones(1))
        assert actual["loss"].isnan().all()
        assert (actual["grad_logits"] == 0).all()
        assert run_focal_loss(library, logits, target, 2.0, torch.ones(1), reduction="sum")["loss"] == 0


def test_focal_loss_is_deterministic(library):
    """Blocks and threads run in another order each time."""
    logits = torch.randn(1000, 100).bfloat16()
    target = labels_for(logits)
    first, *others = [run_focal_loss(library, logits, target, 2.0, torch.ones(1)) for _ in range(3)]
    for other in others:
        for name in ("loss", "divisor", "grad_logits", "saved"):
            assert torch.equal(first[name], other[name])


# ---- calibration map -----------------------------------------------------------------------------------------------


def run_map(library, values, gamma, temperature, grad, *, kind="logits", log=False, wide=False):
    dtype = values.dtype
    binary = kind == "binary"
    rows = values.numel() if binary else len(values)
    names = ("BinaryCalibrationMap" if binary else "CalibrationMap") + "%s"
    common = BINARY_MAP if binary else MAP
    with Memory(library) as memory:
        forward = structure(library, names % "Forward", dtype, common + OUTPUTS)
        backward = structure(library, names % "Backward", dtype, common + GRADIENTS)
        output = nan_like(values, real_of(dtype) if wide else dtype)
        row_numbers = torch.full((rows,), NAN, dtype=torch.float64)
        for args in (forward, backward):
            if binary:
                args.size = rows
            else:
                args.rows, args.classes, args.input_is_probs = rows, values.shape[1], kind == "probs"
            args.input, args.log_output = memory.put(values), log
            for name, value in (("gamma", gamma), ("temperature", temperature)):
                if isinstance(value, torch.Tensor):
                    setattr(args, name, memory.put(value))
                    setattr(args, name + "_stride", 1)
                else:
                    setattr(args, name + "_value", value)
        setattr(forward, "output_wide" if wide else "output", memory.put(output))
        setattr(backward, "grad_output_wide" if wide else "grad_output", memory.put(grad.to(output.dtype)))
        backward.grad_input = memory.put(nan_like(values))
        backward.grad_gamma, backward.grad_temperature = memory.put(row_numbers), memory.put(row_numbers)
        prefix = "binary_calibration_map_" if binary else "calibration_map_"
        for direction, args in (("forward", forward), ("backward", backward)):
            assert getattr(library, prefix + direction)(DTYPES.index(dtype), ctypes.byref(args)) == 0
        return (
            memory.get(forward.output_wide if wide else forward.output, output),
            memory.get(backward.grad_input, values),
            memory.get(backward.grad_gamma, row_numbers),
            memory.get(backward.grad_temperature, row_numbers),
        )


def check_map(library, values, gamma, temperature, *, kind="logits", log=False, wide=False):
    dtype, real = values.dtype, real_of(values.dtype)
    grad = torch.randn(values.shape).to(real if wide else dtype)
    output, *gradients = run_map(library, values, gamma, temperature, grad, kind=kind, log=log, wide=wide)
    inputs = [values.double().requires_grad_()]
    parameters = [
        (
            p if isinstance(p, torch.Tensor) else torch.full((len(gradients[1]),), p, dtype=torch.float64)
        ).requires_grad_()
        for p in (gamma, temperature)
    ]
    if kind == "binary":
        expected = reference.binary_focal_calibration_map(inputs[0], *parameters, log_odds=log)
    else:
        expected = reference.focal_calibration_map(inputs[0], *parameters, input_kind=kind, log=log)
    exact = torch.autograd.grad(expected, inputs + parameters, torch.where(expected.isfinite(), grad.double(), 0.0))
    assert_near(output, expected.detach(), output.dtype, 4 if output.dtype == real else 1)
    # A sum over the classes of terms of either sign: what rounds is the largest of them.
    scale = max(1.0, float(exact[0].abs().max()))
    assert_near(gradients[0] / scale, exact[0] / scale, dtype, 20 if dtype == real else 2)
    for actual, wanted in zip(gradients[1:], exact[1:], strict=True):
        scale = max(1.0, float(wanted.abs().max()))
        assert_near(actual / scale, wanted / scale, real, 50)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("rows", "classes"), [(1, 2), (300, 3), (65, 10), (33, 17), (9, 129), (5, 513), (3, 2049), (2, 4097)]
)
def test_map_rows(library, dtype, rows, classes):
    logits = (3 * torch.randn(rows, classes)).to(dtype)
    logits[0, 1 : classes // 2] = -torch.inf
    check_map(library, logits, 1.0, 1.5, log=True)
    check_map(library, logits, 4 * torch.rand(rows).double() - 0.9, 0.3 + torch.rand(rows).double(), wide=True)


@pytest.mark.parametrize("classes", [2, 40, 5000])
def test_map_of_probabilities(library, classes):
    probs = torch.randn(3, classes).softmax(1)
    for log in (False, True):
        check_map(library, probs, 0.5, 2.0, kind="probs", log=log)


@pytest.mark.parametrize("dtype", DTYPES)
def test_binary_map(library, dtype):
    values = (5 * torch.randn(1000)).to(dtype)
    for log in (False, True):
        check_map(library, values, torch.rand(1000).double(), 0.7, kind="binary", log=log)


@pytest.mark.parametrize("classes", [3, 5000])
def test_map_rows_without_an_answer(library, classes):
    logits = torch.randn(20, classes)
    gamma, temperature = torch.ones(20).double(), torch.ones(20).double()
    logits[1, 2] = NAN
    logits[2, 0] = torch.inf
    logits[3] = -torch.inf
    gamma[4] = -1
    temperature[5] = 0
    for result in run_map(library, logits, gamma, temperature, torch.ones(20, classes)):
        bad = result.reshape(20, -1).isnan()
        assert bad.any(1).nonzero().reshape(-1).tolist() == [1, 2, 3, 4, 5]
        assert bad[1:6].all()


# ---- calibration grid ----------------------------------------------------------------------------------------------

ESTIMATORS = ["equal_width", "equal_mass", "equal_mass_interp"]
CRITERIA = ["ece", "mce", "nll", "brier"]


def fill_samples(samples, memory, values, labels, kept, is_probs):
    samples.rows, samples.classes = len(labels) if kept is None else len(kept), values.shape[1]
    samples.input, samples.row_stride, samples.input_is_probs = memory.put(values), values.stride(0), is_probs
    samples.labels = Labels(memory.put(labels), LABELS.index(labels.dtype))
    samples.kept = memory.put(kept)
    samples.top = memory.put(torch.full((samples.rows,), -7, dtype=torch.int32))
    samples.correct = memory.put(torch.full((samples.rows,), 7, dtype=torch.uint8))


def run_grid(library, values, labels, gammas, temperatures, *, n_bins, estimator, kept=None, is_probs=False):
    """The tables by criterion; the confidences [Gt, Gg, N]; and which samples are right."""
    dtype, real = values.dtype, real_of(values.dtype)
    block_fields = [
        ("samples", None), ("n_gammas", c_int64), ("n_temperatures", c_int64), ("gammas", c_void_p),
        ("temperatures", c_void_p), ("n_bins", c_int64), ("estimator", c_int32),
        *[(name, c_void_p) for name in CRITERIA], ("table_stride", c_int64), ("keep_confidence", c_bool),
    ]  # fmt: skip
    with Memory(library) as memory:
        samples = structure(library, "CalibrationGridSamples", dtype, SAMPLES)
        fill_samples(samples, memory, values, labels, kept, is_probs)
        problem = memory.put(torch.zeros(1, dtype=torch.int64))
        index = DTYPES.index(dtype)
        assert library.calibration_grid_prepare(index, ctypes.byref(samples), c_void_p(problem)) == 0
        assert memory.get(problem, torch.zeros(1, dtype=torch.int64)).item() == NO_PROBLEM

        block_fields[0] = ("samples", type(samples))
        block = structure(library, "CalibrationGridBlock", dtype, block_fields)
        block.samples = samples
        block.n_gammas, block.n_temperatures, block.n_bins = len(gammas), len(temperatures), n_bins
        block.gammas = memory.put(torch.tensor(gammas, dtype=torch.float64))
        block.temperatures = memory.put(torch.tensor(temperatures, dtype=torch.float64))
        block.estimator = ESTIMATORS.index(estimator)
        table = torch.full((len(gammas), len(temperatures) + 3), NAN, dtype=torch.float64)
        block.table_stride = table.stride(0)
        for name in CRITERIA:
            setattr(block, name, memory.put(table))
        sizes = (samples.rows, values.shape[1], len(gammas), len(temperatures), n_bins, real.itemsize)
        workspace = torch.full((library.calibration_grid_workspace(*map(c_int64, sizes)),), 255, dtype=torch.uint8)
        scratch = memory.put(workspace)
        assert library.calibration_grid_block(index, ctypes.byref(block), c_void_p(scratch)) == 0
        shape = (len(temperatures), len(gammas), samples.rows)
        tables = {name: memory.get(getattr(block, name), table) for name in CRITERIA}
        assert all(values[:, len(temperatures) :].isnan().all() for values in tables.values())
        return (
            {name: values[:, : len(temperatures)] for name, values in tables.items()},
            memory.get(scratch, torch.empty(shape, dtype=real)),
            memory.get(samples.correct, torch.empty(samples.rows, dtype=torch.uint8)).bool(),
        )


# Rows: fewer than bins, than a digit of the radix, and more; ties everywhere in the saturated cells (temperature 0.01).
@pytest.mark.parametrize("estimator", ESTIMATORS)
@pytest.mark.parametrize(("rows", "classes", "n_bins"), [(1, 2, 3), (7, 3, 15), (300, 3, 15), (70, 17, 8), (30, 5, 1)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_grid(library, dtype, rows, classes, n_bins, estimator):
    logits = (3 * torch.randn(rows, classes)).to(dtype)
    labels = torch.where(torch.rand(rows) < 0.6, logits.argmax(1), torch.randint(classes, (rows,)))
    gammas, temperatures = [-0.5, 0.0, 0.37, 1.0, 5.0, 2.0], [0.01, 1.0, 2.3]
    tables, confidence, correct = run_grid(library, logits, labels, gammas, temperatures, n_bins=n_bins,
                                           estimator=estimator)  # fmt: skip
    expected = reference.calibration_grid(logits.double(), labels, gammas, temperatures, criteria=("nll", "brier"))
    for name in ("nll", "brier"):
        assert_near(tables[name], expected[name], real_of(dtype))
    assert torch.equal(correct, logits.argmax(1) == labels)
    for g, gamma in enumerate(gammas):
        for t, temperature in enumerate(temperatures):
            probs = reference.focal_calibration_map(logits.double(), gamma, temperature)
            assert_near(confidence[t, g], probs.max(1).values, real_of(dtype))
            ece, mce = reference.calibration_error(confidence[t, g], correct, n_bins, estimator)
            assert abs(tables["ece"][g, t].item() - ece) < 1e-12
            # Between neighbouring floats an interpolated edge is one of them: a sample without a gap of its own may
            # change the size of a bin there.
            if dtype == torch.float64 or estimator != "equal_mass_interp":
                assert abs(tables["mce"][g, t].item() - mce) < 1e-9


def test_grid_takes_kept_rows_probabilities_and_many_temperatures(library):
    probs = torch.randn(20, 4).softmax(1).bfloat16().float()
    probs[0, 1] = 0
    probs /= probs.sum(1, keepdim=True)
    labels = torch.randint(4, (20,)).to(torch.uint8)
    labels[3] = 200  # not kept, never looked at
    kept = torch.tensor([0, 1, 2, *range(5, 20)])
    temperatures = [0.1 * (i + 1) for i in range(40)]  # more than a warp
    tables, _, _ = run_grid(library, probs, labels, [0.75], temperatures, n_bins=5, estimator="equal_mass", kept=kept,
                            is_probs=True)  # fmt: skip
    expected = reference.calibration_grid(probs[kept].double(), labels[kept].long(), [0.75], temperatures,
                                          criteria=("nll",), input_kind="probs")  # fmt: skip
    assert_near(tables["nll"], expected["nll"], torch.float32)


SUMS = [
    ("rows", c_int64), ("n_gammas", c_int64), ("n_temperatures", c_int64), ("confidence", c_void_p),
    ("correct", c_void_p), ("n_buckets", c_int64), ("sketch", c_bool), ("count", c_void_p),
    ("confidence_sum", c_void_p), ("correct_sum", c_void_p), ("cell_stride", c_int64),
]  # fmt: skip


# Buckets: fewer than threads; more than one run of them in shared memory. Rows: none; more than a block.
@pytest.mark.parametrize(("rows", "n_buckets", "sketch"), [(0, 3, False), (300, 15, False), (300, 1030, True)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_sums_are_added_per_cell_and_bucket(library, dtype, rows, n_buckets, sketch):
    n_gammas, n_temperatures, stride = 2, 3, 5
    confidence = torch.rand(n_temperatures, n_gammas, rows, dtype=dtype)
    confidence[..., ::7] = 1
    correct = torch.rand(rows) < 0.7
    before = torch.randint(100, (n_gammas, stride, n_buckets))
    with Memory(library) as memory:
        args = structure(library, "CalibrationSums", dtype, SUMS)
        args.rows, args.n_gammas, args.n_temperatures = rows, n_gammas, n_temperatures
        args.confidence, args.correct = memory.put(confidence), memory.put(correct.to(torch.uint8))
        args.n_buckets, args.sketch, args.cell_stride = n_buckets, sketch, stride
        args.count, args.correct_sum = memory.put(before), memory.put(before)
        args.confidence_sum = memory.put(before.double())
        assert library.calibration_sums(DTYPES.index(dtype), ctypes.byref(args)) == 0
        count, right = memory.get(args.count, before) - before, memory.get(args.correct_sum, before) - before
        total = memory.get(args.confidence_sum, before.double()) - before
    if sketch:
        root = torch.where(
            confidence <= 0.5, (2 * confidence).sqrt() / 3, 1 - 2 / 3 * (2 * (1 - confidence)).sqrt().sqrt()
        )
        place = (root * n_buckets).long().clamp(max=n_buckets - 1)
    else:
        place = (confidence * n_buckets).ceil().long().clamp(min=1) - 1
    one_hot = torch.nn.functional.one_hot(place, n_buckets).transpose(0, 1)  # [n_gammas, n_temperatures, rows, B]
    assert torch.equal(total[:, n_temperatures:], torch.zeros_like(total[:, n_temperatures:]))
    sums = [x[:, :n_temperatures] for x in (count, right, total)]
    if sketch and rows:  # the roots may round to the other side of an edge
        assert (sums[0] - one_hot.sum(2)).abs().sum() <= 4
        assert torch.equal(sums[0].sum(-1), torch.full((n_gammas, n_temperatures), rows))
        return
    assert torch.equal(sums[0], one_hot.sum(2))
    assert torch.equal(sums[1], (one_hot * correct[:, None]).sum(2))
    expected = (one_hot * confidence.transpose(0, 1).double()[..., None]).sum(2)
    torch.testing.assert_close(sums[2], expected, rtol=1e-12, atol=1e-11)


def test_grid_names_the_first_bad_row(library):
    kinds = [("nan", 0), ("inf", 1), ("no logit", 2), ("label", 5)]
    for name, kind in kinds:
        logits = torch.randn(50, 33)
        labels = torch.randint(33, (50,))
        for row in (41, 17):
            if name == "nan":
                logits[row, 32] = NAN
            elif name == "inf":
                logits[row, 5] = torch.inf
            elif name == "no logit":
                logits[row] = -torch.inf
            else:
                labels[row] = 33
        assert first_problem(library, logits, labels, False) == 17 * 8 + kind
    probs = torch.randn(50, 33).softmax(1)
    labels = torch.randint(33, (50,))
    assert first_problem(library, probs, labels, True) == NO_PROBLEM
    probs[20] *= 1.01
    assert first_problem(library, probs, labels, True) == 20 * 8 + 4
    probs[19, 3] = -0.1
    assert first_problem(library, probs, labels, True) == 19 * 8 + 3


def first_problem(library, values, labels, is_probs):
    with Memory(library) as memory:
        samples = structure(library, "CalibrationGridSamples", values.dtype, SAMPLES)
        fill_samples(samples, memory, values, labels, None, is_probs)
        problem = torch.zeros(1, dtype=torch.int64)
        address = memory.put(problem)
        index = DTYPES.index(values.dtype)
        assert library.calibration_grid_prepare(index, ctypes.byref(samples), c_void_p(address)) == 0
        return memory.get(address, problem).item()


# ---- launch geometry -----------------------------------------------------------------------------------------------


def test_every_size_has_a_valid_launch(library):
    assert library.check_all_row_plans(c_int64(200_000)) is None
