"""The classification loss of a DETR: the score of a matched query learns the overlap of its box.

    python examples/detr_criterion.py

Copy `loss_of_classes`: it takes what a matcher returns, and needs no dense target. `fk.matchability_loss` (DEIM) and
`fk.ia_bce_loss` (LW-DETR, RF-DETR) take the same target. In the toy data a picture has one box, which is a width.
"""

import torch
from torch import nn

import focalkern as fk


def loss_of_classes(logits, overlaps, classes, matches, n_boxes):
    """logits [B, Q, C], overlaps [B, Q]; for each picture the classes of its objects and matched (queries, objects)."""
    labels = torch.full(overlaps.shape, logits.shape[2])  # C is the background
    for row, (queries, objects) in enumerate(matches):
        labels[row, queries] = classes[row][objects]
    target = labels.flatten(), overlaps.detach().flatten()
    return fk.varifocal_loss(logits.flatten(0, 1), target, reduction="sum", detach_modulation=True) / n_boxes


torch.manual_seed(0)
network = nn.Sequential(nn.Linear(7, 64), nn.ReLU(), nn.Linear(64, 5 * 7), nn.Unflatten(1, (5, 7)))  # 5 queries
optimizer = torch.optim.AdamW(network.parameters(), lr=1e-2)
for step in range(101):
    classes, log_width = torch.randint(6, (64, 1)), torch.randn(64, 1)
    logits, log_widths = network(torch.cat([torch.eye(6)[classes[:, 0]], log_width], 1)).split((6, 1), -1)
    overlaps = (log_widths.squeeze(-1) - log_width).abs().neg().exp()  # the smaller width by the larger
    matches = [(query[None], torch.tensor([0])) for query in overlaps.argmax(1)]
    loss = loss_of_classes(logits, overlaps, classes, matches, 64) + (1 - overlaps.amax(1)).mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if step % 50 == 0:
        print(f"step {step}: loss {loss:.3f} overlap {overlaps.amax(1).mean():.3f}")
