"""The fused focal calibration map compared with the same formula in torch operations."""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

import focalkern as fk
from benchmarks.harness import Provider, Row, measure

GAMMA, TEMPERATURE = 1.5, 2.0
SHAPES = [(65536, 10), (10000, 100), (10000, 1000)]
MORE_SHAPES = [(65536, 2), (65536, 3), (65536, 17), (1024, 32000), (100, 100), (1000, 100), (100000, 100)]


def composite(logits: Tensor) -> Tensor:
    """The map as the formula is usually written, without care for saturated rows."""
    q = torch.softmax(logits / TEMPERATURE, dim=1)
    phi = -q * q.log() / (1 - q)
    weight = q / ((1 - q) ** GAMMA * (1 + GAMMA * phi))
    return weight / weight.sum(dim=1, keepdim=True)


def fused(logits: Tensor) -> Tensor:
    return fk.focal_calibration_map(logits, GAMMA, TEMPERATURE)


def run(
    device: str = "cpu", quick: bool = False, seconds: float = 2.0, wanted: Callable[[str], bool] = lambda case: True
) -> Iterator[list[Row]]:
    for shape in SHAPES if quick else SHAPES + MORE_SHAPES:
        if wanted(f"{shape[0]}x{shape[1]} float32"):
            yield from run_shape(shape, device, quick, seconds)


def run_shape(shape: tuple[int, int], device: str, quick: bool, seconds: float) -> Iterator[list[Row]]:
    generator = torch.Generator(device).manual_seed(0)
    logits = torch.randn(shape, generator=generator, device=device)
    upstream = torch.randn(shape, generator=generator, device=device)
    variable = logits.clone().requires_grad_()
    destination = torch.empty_like(logits)
    # The float64 reference checks the first rows; the code is the same for every row.
    rows = slice(0, 256)
    exact = logits[rows].double().requires_grad_()
    reference = fk.reference.focal_calibration_map(exact, GAMMA, TEMPERATURE)
    slope = torch.autograd.grad(reference, exact, upstream[rows].double())[0]
    compiled = None
    if not quick:
        torch._dynamo.reset()
        compiled = torch.compile(composite, fullgraph=True, dynamic=False)

    def matches(expected: Tensor):
        def check(found: object) -> None:
            assert isinstance(found, Tensor)
            torch.testing.assert_close(found[rows].double(), expected.detach(), rtol=1e-4, atol=1e-6)

        return check

    def forward(function):
        return function and (lambda: function(logits))

    def both(function):
        return function and (lambda: torch.autograd.grad(function(variable), variable, upstream)[0])

    absent = "left out of the quick run, for its compilation time"
    for case, wrap, expected, passes in (("forward", forward, reference, 2), ("forward+backward", both, slope, 5)):
        check = matches(expected)
        yield measure(
            op="calibration_map",
            case=f"{case} {'x'.join(map(str, shape))}",
            n=shape[0],
            classes=shape[1],
            dtype=torch.float32,
            providers=[
                Provider("focalkern", wrap(fused), check=check),
                Provider("composite", wrap(composite), check=check),
                Provider("composite, compiled", wrap(compiled), absent=absent, check=check),
            ],
            bytes_moved=passes * logits.numel() * logits.element_size(),
            copy=Provider("copy", lambda: destination.copy_(logits)),
            seconds=seconds,
            device=device,
        )
