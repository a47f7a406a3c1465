"""Train a small network on the digits images with a loss of choice, and save its logits for calibration.

    python examples/train.py
    python examples/train.py --loss cross-entropy --out cross_entropy.npz

Next: python examples/calibrate.py logits.npz, or the command: focalkern calibrate logits.npz
"""

import argparse

import numpy as np
import torch
from sklearn.datasets import load_digits
from torch import nn

import focalkern as fk

LOSSES = {
    "cross-entropy": nn.CrossEntropyLoss,
    "focal": lambda: fk.FocalLoss(gamma=3.0),
    "flsd": fk.FLSDLoss,  # gamma is 5 if the probability of the target is below 0.2, else 3
    "adafocal": fk.AdaFocalLoss,  # one gamma per bin of confidence, adapted after every epoch
}


def digits():
    """Shuffled images [N, 1, 8, 8] and labels [N]: one third each for training, calibration and test."""
    images, labels = load_digits(return_X_y=True)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    images = torch.from_numpy(images).float().reshape(-1, 1, 8, 8)[order] / 16
    labels = torch.from_numpy(labels)[order]
    return list(zip(images.chunk(3), labels.chunk(3), strict=True))


def report(name, logits, labels):
    probs = logits.softmax(-1)
    accuracy = fk.metrics.accuracy(logits, labels)
    nll = fk.metrics.nll(logits.log_softmax(-1), labels, log=True)
    ece = fk.metrics.expected_calibration_error(probs, labels)
    print(f"{name:10}  accuracy {accuracy:.4f}  NLL {nll:.4f}  ECE {ece:.4f}")


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--loss", choices=LOSSES, default="flsd")
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--out", default="logits.npz")
    chosen = parser.parse_args(arguments)

    torch.manual_seed(0)
    (images, labels), (val_images, val_labels), (test_images, test_labels) = digits()
    network = nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 16, 3), nn.ReLU(), nn.Flatten(), nn.Linear(576, 10)
    )
    criterion = LOSSES[chosen.loss]()
    optimizer = torch.optim.Adam(network.parameters(), lr=3e-3)
    for _ in range(chosen.epochs):
        for batch in torch.randperm(len(labels)).split(64):
            loss = criterion(network(images[batch]), labels[batch])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        if isinstance(criterion, fk.AdaFocalLoss):
            with torch.no_grad():
                criterion.update(network(val_images), val_labels)

    with torch.no_grad():
        val_logits, test_logits = network(val_images), network(test_images)
    print(f"{chosen.loss}: {chosen.epochs} epochs, {len(labels)} images")
    report("validation", val_logits, val_labels)
    report("test", test_logits, test_labels)
    np.savez(
        chosen.out,
        val_logits=val_logits.numpy(),
        val_labels=val_labels.numpy(),
        test_logits=test_logits.numpy(),
        test_labels=test_labels.numpy(),
    )
    print(f"logits and labels are in {chosen.out}")


if __name__ == "__main__":
    main()
