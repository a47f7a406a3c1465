"""A DETR criterion: match queries to boxes, and train the score of each match to be its overlap.

    python examples/detr_criterion.py --loss varifocal

Copy `criterion`: the loss takes a class and an overlap for each query, without a dense target. The data are synthetic:
the network gets noisy boxes and classes, and predicts both.
"""

import argparse

import torch
from torch import nn

import focalkern as fk

CLASSES, QUERIES, OBJECTS = 6, 12, 3
LOSSES = {
    "varifocal": fk.VarifocalLoss(reduction="sum", detach_modulation=True),  # RT-DETR, D-FINE
    "matchability": fk.MatchabilityLoss(reduction="sum"),  # DEIM
    "ia-bce": fk.IABCELoss(reduction="sum"),  # LW-DETR, RF-DETR
}


def overlap(a, b):
    """IoU of boxes (center, size) along the leading dimensions."""
    low = torch.maximum(a[..., :2] - a[..., 2:] / 2, b[..., :2] - b[..., 2:] / 2)
    high = torch.minimum(a[..., :2] + a[..., 2:] / 2, b[..., :2] + b[..., 2:] / 2)
    shared = (high - low).clamp(min=0).prod(-1)
    return shared / (a[..., 2:].prod(-1) + b[..., 2:].prod(-1) - shared)


@torch.no_grad()
def match(logits, boxes, classes, truth):
    """The query of each object, [B, OBJECTS], by greedy matching. Published code solves the assignment problem."""
    score = logits.sigmoid().gather(2, classes[:, None].expand(-1, QUERIES, -1))
    cost = 5 * torch.cdist(boxes, truth, p=1) - score
    queries = []
    for k in range(OBJECTS):
        queries.append(cost[:, :, k].argmin(1))
        cost[torch.arange(len(cost)), queries[-1]] = torch.inf
    return torch.stack(queries, 1)


def criterion(loss, logits, boxes, classes, truth):
    queries = match(logits, boxes, classes, truth)
    matched = boxes.gather(1, queries[..., None].expand(-1, -1, 4))
    labels = torch.full(logits.shape[:2], CLASSES).scatter(1, queries, classes)  # CLASSES is the background
    scores = torch.zeros(logits.shape[:2]).scatter(1, queries, overlap(matched.detach(), truth))
    of_classes = loss(logits.flatten(0, 1), (labels.flatten(), scores.flatten())) / queries.numel()
    of_boxes = (matched - truth).abs().sum(-1).mean()
    return of_classes + 5 * of_boxes, logits.detach().flatten(0, 1)[labels.flatten() < CLASSES], scores[scores > 0]


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--loss", choices=LOSSES, default="varifocal")
    parser.add_argument("--steps", type=int, default=400)
    options = parser.parse_args(arguments)
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(OBJECTS * (CLASSES + 4), 128), nn.ReLU(), nn.Linear(128, QUERIES * (CLASSES + 4)))
    optimizer = torch.optim.AdamW(network.parameters(), lr=2e-3)
    for step in range(options.steps):
        classes, truth = torch.randint(CLASSES, (64, OBJECTS)), torch.rand(64, OBJECTS, 4) * 0.4 + 0.1
        seen = torch.cat([nn.functional.one_hot(classes, CLASSES), truth + 0.02 * torch.randn_like(truth)], -1)
        found = network(seen.flatten(1)).unflatten(1, (QUERIES, CLASSES + 4))
        logits, boxes = found[..., :CLASSES] - 2, found[..., CLASSES:].sigmoid()
        total, matched, overlaps = criterion(LOSSES[options.loss], logits, boxes, classes, truth)
        optimizer.zero_grad()
        total.backward()
        optimizer.step()
        if step in (0, options.steps - 1):
            score = matched.sigmoid().amax(1).mean()
            print(f"step {step}: loss {total:.3f} overlap {overlaps.mean():.3f} score {score:.3f}")


if __name__ == "__main__":
    main()
