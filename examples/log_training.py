"""A language model's training step with z-loss, and the logged statistics: entropy, accuracy, log p, log-sum-exp.

    python examples/log_training.py

Head and loss are one operator, which never holds all logits. It returns the statistics with the loss. Gradient
accumulation adds up their sums and counts, so that the logged means are over tokens, not over micro batches.
"""

import argparse

import torch
import torch.nn.functional as F

import focalkern as fk

VOCABULARY, FEATURES, BATCH, LENGTH = 500, 32, 8, 24


def batch(generator):
    """Sentences of a synthetic language in which the next word depends on the last; 4 words are the prompt."""
    words = torch.randint(VOCABULARY, (BATCH, 1), generator=generator)
    for _ in range(LENGTH - 1):
        words = torch.cat([words, (words[:, -1:] * 7 + 3) % VOCABULARY], dim=1)
    labels = F.pad(words[:, 1:], (0, 1), value=-100)
    labels[:, :4] = -100
    return words, labels


def step(body, embedding, optimizer, batches):
    """One optimizer step over several micro batches; returns means over all their tokens."""
    tokens = sum((labels != -100).sum() for _, labels in batches)
    totals = {}
    for words, labels in batches:
        hidden, _ = body(embedding(words))
        loss, stats = fk.linear_focal_loss(
            hidden, embedding.weight, labels, gamma=1.0, reduction="sum", z_loss=1e-3, return_stats=True
        )
        (loss / tokens).backward()
        now = {"loss": loss.detach(), "log_p": stats.log_p, "entropy": stats.entropy, "accuracy": stats.correct}
        for name, values in {**now, "lse": stats.lse}.items():
            totals[name] = totals.get(name, 0) + values.sum()
    optimizer.step()
    optimizer.zero_grad()
    return {name: float(total / tokens) for name, total in totals.items()}


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=60)
    steps = parser.parse_args(arguments).steps
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(0)
    body, embedding = torch.nn.GRU(FEATURES, FEATURES, batch_first=True), torch.nn.Embedding(VOCABULARY, FEATURES)
    optimizer = torch.optim.AdamW([*body.parameters(), *embedding.parameters()], lr=0.01)
    for number in range(steps):
        logged = step(body, embedding, optimizer, [batch(generator), batch(generator)])
        if number % 20 == 0 or number == steps - 1:
            print(f"step {number:3d}  " + "  ".join(f"{name} {value:.3f}" for name, value in logged.items()))


if __name__ == "__main__":
    main()
