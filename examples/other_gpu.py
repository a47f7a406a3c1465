"""A training step on a GPU for which focalkern has no kernels, and a line that says which code computes the loss.

    python examples/other_gpu.py
    FOCALKERN_KERNELS=compile python examples/other_gpu.py    # as on ROCm and XPU, also on a CPU

On ROCm, XPU and CUDA 12 focalkern computes with plain torch, and torch.compile fuses each loss, once per dtype and
options. The first step waits for its compiler. On MPS it is plain torch unless FOCALKERN_KERNELS=compile is set.
"""

import time

import torch
from torch import nn

import focalkern as fk

torch.manual_seed(0)
device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
info = fk.build_info()
print(f"{device}: {info['devices'][device.type]} ({info['why']})")

model, criterion = nn.Linear(64, 1000, device=device), fk.FocalLoss(2.0)
optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
x, y = torch.randn(256, 64, device=device), torch.randint(1000, (256,), device=device)
for step in range(5):
    start = time.perf_counter()
    loss = criterion(model(x), y)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(f"step {step}: loss {loss.item():.4f} in {1e3 * (time.perf_counter() - start):.1f} ms")
