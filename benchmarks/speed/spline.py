"""The map of spline scaling and one evaluation of its fit, compared with plain torch and with temperature scaling; the
automatic choice among all candidates."""

import time
from collections.abc import Callable, Iterator

import numpy as np
import torch

import focalkern as fk
from benchmarks.harness import Provider, Row, measure
from focalkern import fallback
from focalkern.calibrators._spline_module import SplineLogProbs
from focalkern.fallback.spline_map import spline_coefficients
from focalkern.ops.spline_sums import spline_sums_for

SHAPES = [(65536, 10), (10000, 100), (1000, 1000)]
TEMPERATURE, FLOOR, SLOPE = 1.3, 1e-5, 0.1
KNOTS = torch.linspace(-9, 5, 10, dtype=torch.float64)
VALUES = torch.linspace(-0.3, 0.5, 10, dtype=torch.float64).sin()
BASIS = spline_coefficients(KNOTS, torch.eye(10, dtype=torch.float64))


def run(
    device: str = "cpu", quick: bool = False, seconds: float = 2.0, wanted: Callable[[str], bool] = lambda case: True
) -> Iterator[list[Row]]:
    for shape in SHAPES if device == "cpu" else []:
        if wanted(f"{shape[0]}x{shape[1]} float32"):
            yield from run_shape(shape, seconds)
        for dtype in (torch.float32, torch.float64):
            if wanted(f"{shape[0]}x{shape[1]} {str(dtype).removeprefix('torch.')}"):
                yield run_in_order(shape, dtype, seconds)
    if device == "cpu" and not quick and wanted("choice 10000x100 float32"):
        yield run_choice((10000, 100), seconds)


def rows_of(shape: tuple[int, int]) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    logits = 3 * torch.randn(shape, generator=generator)
    target = torch.randint(shape[1], shape[:1], generator=generator)
    logits[torch.arange(shape[0]), target] += 8
    return logits, target


def run_in_order(shape: tuple[int, int], dtype: torch.dtype, seconds: float) -> list[Row]:
    """The map of a prediction, which keeps the order of the classes; the module has the coefficients of its curve."""
    logits = rows_of(shape)[0].to(dtype)
    destination = torch.empty_like(logits)
    curve = (TEMPERATURE, FLOOR, SLOPE, KNOTS, VALUES)
    module = SplineLogProbs(*curve, keep_order=True)
    expected = fk.spline_calibration_map(logits, *curve)

    def matches(found: object) -> None:
        assert isinstance(found, torch.Tensor)
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-7)

    return measure(
        op="spline",
        case=f"forward, order kept {'x'.join(map(str, shape))}",
        n=shape[0],
        classes=shape[1],
        dtype=dtype,
        providers=[
            Provider("focalkern", lambda: module.mapped(logits, log=False), check=matches),
            Provider("temperature scaling", lambda: fk.focal_calibration_map(logits, 0.0, TEMPERATURE)),
            Provider("(z / T).softmax", lambda: (logits / TEMPERATURE).softmax(-1)),
        ],
        bytes_moved=2 * logits.nbytes,
        copy=Provider("copy", lambda: destination.copy_(logits)),
        seconds=seconds,
        device="cpu",
    )


def run_choice(shape: tuple[int, int], seconds: float) -> list[Row]:
    """All default candidates with five folds, in CPU time, which the load of the machine changes little."""
    logits, target = rows_of(shape)
    cpu: list[float] = []

    def choose() -> object:
        start = time.process_time()
        chosen = fk.AutoCalibrator().fit_quietly(logits, target)
        cpu.append(time.process_time() - start)
        return chosen

    rows = measure(
        op="spline",
        case=f"choice among all candidates, 5 folds, CPU time {'x'.join(map(str, shape))}",
        n=shape[0],
        classes=shape[1],
        dtype=torch.float32,
        providers=[Provider("focalkern", choose)],
        bytes_moved=logits.nbytes,
        copy=None,
        seconds=seconds,
        device="cpu",
    )
    row, milliseconds = rows[0], [1e3 * one for one in cpu]
    row.low_ms, row.median_ms, row.high_ms = (float(np.quantile(milliseconds, at)) for at in (0.25, 0.5, 0.75))
    row.repeats, row.gb_per_s = len(cpu), float("nan")
    return rows


def run_shape(shape: tuple[int, int], seconds: float) -> Iterator[list[Row]]:
    logits, target = rows_of(shape)
    weight, destination = torch.ones(shape[0], dtype=torch.float64), torch.empty_like(logits)
    parameters = torch.tensor([1 + SLOPE, TEMPERATURE, FLOOR], dtype=torch.float64)
    mapped = (logits, parameters, KNOTS, spline_coefficients(KNOTS, VALUES), None, None, False, False, False, False)
    rows = (logits, target, weight, TEMPERATURE, FLOOR)
    evaluated = (*rows, KNOTS, BASIS, SLOPE, VALUES, None, None, None, False, False)
    expected = fallback.spline_map(*mapped), fallback.spline_curve_sums(*evaluated)[1]

    def matches(found: object) -> None:
        assert isinstance(found, torch.Tensor)
        torch.testing.assert_close(found, expected[0], rtol=1e-5, atol=1e-7)

    def gradient_matches(found: object) -> None:
        assert isinstance(found, tuple)
        torch.testing.assert_close(found[1], expected[1])

    kernels = spline_sums_for(logits)
    providers = {
        "forward": [
            Provider(
                "focalkern",
                lambda: fk.spline_calibration_map(logits, TEMPERATURE, FLOOR, SLOPE, KNOTS, VALUES),
                check=matches,
            ),
            Provider("plain torch", lambda: fallback.spline_map(*mapped), check=matches),
            Provider("temperature scaling", lambda: fk.focal_calibration_map(logits, 0.0, TEMPERATURE)),
        ],
        "value, gradient, Hessian": [
            Provider("focalkern", lambda: kernels.spline_curve_sums(*evaluated), check=gradient_matches),
            Provider("plain torch", lambda: fallback.spline_curve_sums(*evaluated), check=gradient_matches),
        ],
    }
    for case, of_case in providers.items():
        yield measure(
            op="spline",
            case=f"{case} {'x'.join(map(str, shape))}",
            n=shape[0],
            classes=shape[1],
            dtype=torch.float32,
            providers=of_case,
            bytes_moved=(2 if case == "forward" else 1) * logits.nbytes,
            copy=Provider("copy", lambda: destination.copy_(logits)),
            seconds=seconds,
            device="cpu",
        )
