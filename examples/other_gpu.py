"""A training step on a GPU for which focalkern has no kernels, and a line that says which code computes the loss.

    python examples/other_gpu.py
    FOCALKERN_KERNELS=compile python examples/other_gpu.py    # as on ROCm and XPU, also on a CPU

On ROCm, XPU and CUDA 12 focalkern computes with plain torch, and torch.compile fuses each loss, once per dtype and
options. The first step waits for its compiler. On MPS it is plain torch unless FOCALKERN_KERNELS=compile is set.
"""

import argparse
import time

import torch
from torch import nn

import focalkern as fk


def device_here():
    if torch.cuda.is_available():  # CUDA and ROCm
        return "cuda"
    if torch.xpu.is_available():
        return "xpu"
    return "mps" if torch.backends.mps.is_available() else "cpu"


def what_runs(device):
    """One sentence on the code that computes on a type of device."""
    info = fk.build_info()
    if device == "cpu" and info["kernels"] != "plain torch":
        return f"kernels ({info['kernels']})"
    if device == "cuda" and info["cuda"]:
        return f"CUDA kernels ({info['kernels']})"
    compiled = device in info["torch_compile"]
    return f"plain torch{', compiled by torch.compile' if compiled else ''} ({info['why']})"


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--classes", type=int, default=1000)
    parser.add_argument("--steps", type=int, default=5)
    chosen = parser.parse_args(arguments)
    torch.manual_seed(0)
    device = device_here()
    print(f"{device}: {what_runs(device)}")
    model, criterion = nn.Linear(64, chosen.classes, device=device), fk.FocalLoss(2.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    x, y = torch.randn(256, 64, device=device), torch.randint(chosen.classes, (256,), device=device)
    for step in range(chosen.steps):
        start = time.perf_counter()
        loss = criterion(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print(f"step {step}: loss {loss.item():.4f} in {1e3 * (time.perf_counter() - start):.1f} ms")


if __name__ == "__main__":
    main()
