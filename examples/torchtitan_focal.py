"""A focal loss for torchtitan's trainer, in a model with FSDP2 over two and tensor parallelism over two processes.

    torchrun --nproc-per-node 4 examples/torchtitan_focal.py

Copy `focal_loss`. torchtitan calls a loss with logits [T, V] and labels [T], expects the sum over the tokens of the
process, and divides by the number of tokens. The logits are a DTensor, or a slice of the classes with its group.
"""

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

import focalkern as fk


def focal_loss(pred, labels, gamma=2.0, group=None):
    """The sum over the tokens, the same on all processes of the tensor-parallel group."""
    if group is not None:
        return fk.focal_loss_vocab_parallel(pred, labels, gamma, process_group=group, reduction="sum")
    return fk.focal_loss(pred, labels, gamma, reduction="sum").to_local()


if __name__ == "__main__":
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(101, 16), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 101, bias=False))
    parallelize_module(model[-1], mesh["tensor"], ColwiseParallel(use_local_output=False))
    fully_shard(model, mesh=mesh["data"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.03, foreach=False)
    torch.manual_seed(mesh["data"].get_local_rank())  # each data rank has its own tokens
    for step in range(21):
        tokens = torch.randint(101, (64,))
        loss = focal_loss(model(tokens), (7 * tokens + 3) % 101) / len(tokens)
        loss.backward()  # FSDP averages the gradients of the data ranks
        optimizer.step()
        optimizer.zero_grad()
        if step % 10 == 0 and mesh.get_rank() == 0:
            print(f"step {step}: focal loss {loss.item():.3f}")
