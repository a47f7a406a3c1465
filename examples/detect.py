"""A small one-stage detector: it predicts the digit in each cell of a picture; most cells are empty.

    python examples/detect.py

The script puts scikit-learn's digits images on noise. Each cell has one logit per class. The sigmoid focal loss takes
labels; with 10 classes, label 10 is the background.
"""

import argparse
import math

import torch
from sklearn.datasets import load_digits
from torch import nn

import focalkern as fk

CLASSES, CELLS, SIZE = 10, 4, 8  # a picture has CELLS x CELLS cells of SIZE x SIZE pixels


def pictures(n, images, labels, generator):
    """n pictures [n, 1, 32, 32] and the labels of their cells [n, 4, 4]; one of eight cells has a digit."""
    shape = (n, CELLS, CELLS)
    which = torch.randint(len(labels), shape, generator=generator)
    there = torch.rand(shape, generator=generator) < 1 / 8
    cells = torch.where(there[..., None, None], images[which], 0.0)
    canvas = cells.permute(0, 1, 3, 2, 4).reshape(n, 1, CELLS * SIZE, CELLS * SIZE)
    noise = 0.6 * torch.rand(canvas.shape, generator=generator)
    return (canvas + noise).clamp(max=1.0), torch.where(there, labels[which], CLASSES)


def report(name, probs, labels):
    """probs [N, 10] of the cells, labels [N]."""
    score, found = probs.max(-1)
    right = found == labels
    said = score > 0.5
    precision, recall = (right & said).sum() / said.sum(), (right & said).sum() / (labels < CLASSES).sum()
    is_class = nn.functional.one_hot(labels, CLASSES + 1)[:, :CLASSES]
    nll = nn.functional.binary_cross_entropy(probs, is_class.float(), reduction="sum") / len(labels)
    ece = fk.metrics.expected_calibration_error(confidence=score, correct=right)
    print(f"{name:7}  precision {precision:.3f}  recall {recall:.3f}  NLL per cell {nll:.4f}  ECE {ece:.4f}")


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=300)
    chosen = parser.parse_args(arguments)

    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(0)
    images, labels = load_digits(return_X_y=True)
    images, labels = torch.from_numpy(images).float().reshape(-1, SIZE, SIZE) / 16, torch.from_numpy(labels)
    train, val, test = (slice(0, 800), slice(800, 1300), slice(1300, None))

    network = nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(),
        nn.Conv2d(32, 64, 4, stride=4), nn.ReLU(), nn.Conv2d(64, CLASSES, 1),
    )  # fmt: skip
    nn.init.constant_(network[-1].bias, math.log(0.01 / 0.99))  # initial probabilities are low (Lin et al. 2017)
    criterion = fk.SigmoidFocalLoss(gamma=2.0, alpha=0.25, reduction="sum")
    optimizer = torch.optim.Adam(network.parameters(), lr=5e-3)
    for _ in range(chosen.steps):
        batch, target = pictures(32, images[train], labels[train], generator)
        n_objects = (target < CLASSES).sum().clamp(min=1)
        loss = criterion(network(batch), target) / n_objects  # normalised by the number of objects, as in detectors
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    def cells(part):
        batch, target = pictures(400, images[part], labels[part], generator)
        with torch.no_grad():
            return network(batch).movedim(1, -1).flatten(0, -2), target.flatten()

    # The focal loss makes scores too low; one calibrator per class, fitted on validation cells, corrects them.
    val_logits, val_labels = cells(val)
    is_class = nn.functional.one_hot(val_labels, CLASSES + 1)[:, :CLASSES]
    calibrator = fk.MultiLabelScaling().fit(val_logits, is_class)
    test_logits, test_labels = cells(test)
    print(f"{chosen.steps} steps; {len(test_labels)} test cells, {(test_labels < CLASSES).sum()} with a digit")
    report("before", test_logits.sigmoid(), test_labels)
    report("after", calibrator.predict_proba(test_logits), test_labels)


if __name__ == "__main__":
    main()
