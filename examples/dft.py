"""DFT (dynamic fine-tuning) beside cross-entropy: a token's loss is -log p times p, and this p has no gradient.

    python examples/dft.py

Copy the line with `fk.DFTLoss()`: it takes the place of `nn.CrossEntropyLoss()`. One token in ten of the toy data is an
error; DFT learns less from tokens that the model finds unlikely. With a Trainer or TRL:
`use_focal_loss(trainer, 1.0, modulation="confidence", detach_modulation=True)`.
"""

import torch
from torch import nn

import focalkern as fk

for name, criterion in (("cross-entropy", nn.CrossEntropyLoss()), ("DFT", fk.DFTLoss())):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(64, 32), nn.Linear(32, 64))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-2)
    for _ in range(100):
        tokens = (torch.randint(64, (32, 1)) + torch.arange(16)) % 64  # sentences that count
        is_error = torch.rand(32, 15) < 0.1
        labels = torch.where(is_error, torch.randint(64, (32, 15)), tokens[:, 1:])
        labels[:, :4] = -100  # the prompt
        logits = model(tokens[:, :-1])
        loss = criterion(logits.flatten(0, 1), labels.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    p = logits.softmax(-1).gather(-1, tokens[:, 1:, None]).mean()
    print(f"{name}: mean probability of the right token {p:.3f}")
