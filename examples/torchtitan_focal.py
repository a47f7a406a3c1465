"""A focal loss for torchtitan's trainer, for both of its ways to split the vocabulary, in a small training loop.

    python examples/torchtitan_focal.py                                     # one process
    torchrun --nproc-per-node 4 examples/torchtitan_focal.py --way group    # FSDP2 on 2 x tensor parallel on 2

torchtitan calls a loss with logits [T, V] and labels [T], expects the sum over the tokens of the process, and divides
by the number of tokens of all processes. The logits are a DTensor, or the slice of this process with a process group.
"""

import argparse
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

import focalkern as fk

VOCABULARY, FEATURES, TOKENS = 101, 16, 32


def focal_loss(pred, labels, gamma=2.0, group=None):
    """The sum over the tokens, the same on all processes of the tensor-parallel group."""
    if group is not None:
        return fk.focal_loss_vocab_parallel(pred, labels, gamma, process_group=group, reduction="sum")
    loss = fk.focal_loss(pred, labels, gamma, reduction="sum")
    return loss.to_local() if isinstance(loss, DTensor) else loss


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.body = nn.Embedding(VOCABULARY, FEATURES), nn.Linear(FEATURES, FEATURES)
        self.head = nn.Linear(FEATURES, VOCABULARY, bias=False)

    def forward(self, tokens):
        return self.head(torch.tanh(self.body(self.embedding(tokens))))


def batch(step):
    """Tokens and labels of all processes; a label of -100 is ignored."""
    tokens = torch.randint(VOCABULARY, (TOKENS,), generator=torch.Generator().manual_seed(step))
    labels = (tokens * 7 + 3) % VOCABULARY
    labels[: TOKENS // 3] = -100  # the first processes get more ignored labels than the last
    return tokens, labels


def train(mesh, way, steps):
    """Trains the model; returns the losses of the steps, and the model."""
    torch.manual_seed(0)
    model, data, tensor = Model(), mesh["dp"], mesh["tp"]
    parallelize_module(model.head, tensor, ColwiseParallel(use_local_output=way == "group"))
    fully_shard(model, mesh=data)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.03, foreach=False)
    losses = []
    for step in range(steps):
        tokens, labels = (part.chunk(data.size())[data.get_local_rank()] for part in batch(step))
        loss = focal_loss(model(tokens), labels, group=tensor.get_group() if way == "group" else None)
        loss = loss / (batch(step)[1] != -100).sum()  # number of tokens of all processes
        optimizer.zero_grad()
        (loss * data.size()).backward()  # FSDP averages gradients over the data ranks, but the loss is a sum
        optimizer.step()
        dist.all_reduce(loss.detach_(), group=data.get_group())
        losses.append(loss.item())
    return losses, model


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--way", choices=["dtensor", "group"], default="dtensor")
    chosen = parser.parse_args(arguments)
    alone = {} if "RANK" in os.environ else {"store": dist.HashStore(), "rank": 0, "world_size": 1}
    dist.init_process_group("gloo", **alone)
    world, n_tensor = dist.get_world_size(), 1 + (dist.get_world_size() % 2 == 0)
    mesh = init_device_mesh("cpu", (world // n_tensor, n_tensor), mesh_dim_names=("dp", "tp"))
    losses, _ = train(mesh, chosen.way, chosen.steps)
    if dist.get_rank() == 0:
        print(
            f"focal loss {losses[0]:.3f} -> {losses[-1]:.3f} in {chosen.steps} steps on {tuple(mesh.shape)} processes"
        )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
