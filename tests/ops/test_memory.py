"""Memory of large results on the CPU: in the compiled module, the next result of about the same size reuses it."""

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

import focalkern as fk

ROWS, CLASSES = 4096, 128  # 2 MiB in float32: large enough to be kept


def gradient(seed, rows=ROWS):
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(rows, CLASSES, generator=generator).requires_grad_()
    target = torch.randint(CLASSES, (rows,), generator=generator)
    fk.focal_loss(logits, target, 2.0).backward()
    return logits.grad


@pytest.fixture(autouse=True)
def nothing_kept():
    """Frees the memory that earlier tests left."""
    fk.empty_cache()


@pytest.mark.kernels
@pytest.mark.parametrize("rows", [ROWS, ROWS - ROWS // 8])  # a slightly smaller batch fits, too
def test_freed_gradient_is_used_again(rows):
    first = gradient(0)
    address = first.data_ptr()
    del first
    others = [torch.empty(ROWS, CLASSES) for _ in range(8)]  # these use memory that the C library has already freed
    assert all(other.data_ptr() != address for other in others)
    assert gradient(1, rows).data_ptr() == address


@pytest.mark.kernels
def test_much_smaller_gradient_leaves_a_large_block_alone():
    first = gradient(0)
    address = first.data_ptr()
    del first
    assert gradient(1, ROWS // 2).data_ptr() != address


def test_gradient_in_use_is_not_touched():
    first = gradient(0)
    kept = first.clone()
    second = gradient(1)
    assert second.data_ptr() != first.data_ptr()
    assert torch.equal(first, kept) and not torch.equal(first, second)


@pytest.mark.kernels
def test_map_shares_the_memory():
    first = gradient(0)
    address = first.data_ptr()
    del first
    logits = torch.randn(ROWS, CLASSES, generator=torch.Generator().manual_seed(2)).requires_grad_()
    probs = fk.focal_calibration_map(logits, gamma=1.0)
    assert probs.data_ptr() == address
    probs.square().sum().backward()
    address = logits.grad.data_ptr()
    logits.grad = None
    assert gradient(1).data_ptr() == address


def test_gradients_of_several_threads():
    expected = [gradient(seed) for seed in range(4)]

    def repeated(seed):
        return all(torch.equal(gradient(seed), expected[seed]) for _ in range(10))

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(repeated, range(4)))


@pytest.mark.kernels
def test_number_of_kept_blocks():
    fk.empty_cache()
    grads = [gradient(seed) for seed in range(5)]
    addresses = [grad.data_ptr() for grad in grads]
    while grads:
        del grads[0]
    again = [gradient(seed) for seed in range(4)]
    assert {grad.data_ptr() for grad in again} == set(addresses[1:])


# The gradient of logits that are transposed, expanded, or sliced from a larger tensor.
@pytest.mark.kernels("stable")
@pytest.mark.parametrize(
    "change",
    [lambda z: z.t(), lambda z: z.t()[:1].expand(ROWS, CLASSES), lambda z: z.t()[:, ::2].unflatten(0, (2, -1)).mT],
)
def test_strides_are_those_of_torch(change):
    logits = change(torch.randn(CLASSES, ROWS, generator=torch.Generator().manual_seed(3))).requires_grad_()
    target = torch.zeros(logits.shape[:1] + logits.shape[2:], dtype=torch.long)
    (grad,) = torch.autograd.grad(fk.focal_loss(logits, target, 0.0), logits)
    (expected,) = torch.autograd.grad(torch.nn.functional.cross_entropy(logits, target), logits)
    assert grad.stride() == torch.empty_like(logits).stride()
    torch.testing.assert_close(grad, expected)


def test_result_wider_than_the_logits():
    logits = torch.randn(ROWS, CLASSES, generator=torch.Generator().manual_seed(4)).bfloat16()
    with torch.autocast("cpu", torch.bfloat16):
        probs = fk.focal_calibration_map(logits, gamma=1.0)
    torch.testing.assert_close(probs, fk.focal_calibration_map(logits.float(), gamma=1.0))


RESIDENT = """
import resource
import torch
import focalkern as fk

def resident():  # bytes
    return int(open("/proc/self/statm").read().split()[1]) * resource.getpagesize()

def step(rows):
    logits = torch.zeros(rows, 1024).requires_grad_()
    fk.focal_loss(logits, torch.zeros(rows, dtype=torch.long), 2.0).backward()

step(64)
before = resident()
step(1 << 15)  # a gradient of 128 MiB, which the C library would give back to the system
print((resident() - before) >> 20)
fk.empty_cache()
print((resident() - before) >> 20)
"""


@pytest.mark.kernels
@pytest.mark.skipif(not os.path.exists("/proc/self/statm"), reason="/proc/self/statm is not there")
@pytest.mark.parametrize(("limit", "kept"), [("", True), ("128", True), ("127", False), ("0", False)])
def test_limit(limit, kept):
    environment = dict(os.environ, FOCALKERN_CACHE_MIB=limit)
    result = subprocess.run([sys.executable, "-c", RESIDENT], env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    after_step, after_emptying = map(int, result.stdout.split())
    assert (after_step > 100) == kept and after_emptying < 28


@pytest.mark.kernels
@pytest.mark.parametrize("limit", ["many", "-1", "0.5", "99999999999"])
def test_wrong_limit(limit):
    environment = dict(os.environ, FOCALKERN_CACHE_MIB=limit)
    result = subprocess.run([sys.executable, "-c", RESIDENT], env=environment, capture_output=True, text=True)
    assert result.returncode != 0
    message = f"ValueError: FOCALKERN_CACHE_MIB must be a whole number of MiB, 0 to 4294967296, got {limit}"
    assert message in result.stderr
