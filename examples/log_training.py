"""Train a language model with z-loss, and log loss, entropy, accuracy, log p and log-sum-exp of its tokens.

    python examples/log_training.py

Head and loss are one operator, which never holds all logits and returns the statistics with the loss. Weights from the
counts make the logged means those of all tokens of the micro batches.
"""

from collections import Counter

import torch

import focalkern as fk

torch.manual_seed(0)
body, embedding = torch.nn.GRU(32, 32, batch_first=True), torch.nn.Embedding(500, 32)
optimizer = torch.optim.AdamW([*body.parameters(), *embedding.parameters()], lr=0.01)
for step in range(31):
    words = (torch.randint(500, (16, 1)) + 7 * torch.arange(25)) % 500
    labels = words[:, 1:].clone()
    labels[:8, :4] = -100  # prompts
    n_labels, logged = (labels != -100).sum(), Counter()
    for part, part_labels in zip(words[:, :-1].split(8), labels.split(8), strict=True):
        hidden, _ = body(embedding(part))
        loss, stats = fk.linear_focal_loss(
            hidden, embedding.weight, part_labels, gamma=1.0, reduction="sum", z_loss=1e-3, return_stats=True
        )
        (loss / n_labels).backward()
        logged["loss"] += loss.detach() / n_labels
        share = stats.counts.sum() / n_labels
        for name, mean in stats.means().items():
            logged[name] += share * mean
    optimizer.step()
    optimizer.zero_grad()
    if step % 10 == 0:
        print(f"step {step:3d}  " + "  ".join(f"{name} {value:.3f}" for name, value in logged.items()))
