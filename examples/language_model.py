"""A small language model with head and loss in one module, which never holds all logits of a batch.

    python examples/language_model.py

It is trained on the words of Python's help pages (pydoc) with a focal loss. Then gamma and temperature of the
calibration map are chosen on validation words, batch by batch, and evaluated on test words.
"""

import argparse
import re
from pydoc_data.topics import topics

import torch
from torch import nn

import focalkern as fk


def words():
    """The help pages as word indices [n], and the size of the vocabulary."""
    text = re.findall(r"[A-Za-z_]+|[^\sA-Za-z_]", "\n".join(topics[name] for name in sorted(topics)))
    vocabulary = {word: number for number, word in enumerate(dict.fromkeys(text))}
    return torch.tensor([vocabulary[word] for word in text]), len(vocabulary)


class Model(nn.Module):
    """Maps words [B, S] to features [B, S, D]. The loss contains the head."""

    def __init__(self, vocabulary, features=64):
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, features)
        self.layers = nn.GRU(features, features, batch_first=True)

    def forward(self, tokens):
        return self.layers(self.embedding(tokens))[0]


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--gamma", type=float, default=2.0)
    chosen = parser.parse_args(arguments)

    torch.manual_seed(0)
    tokens, vocabulary = words()
    rows = tokens[: len(tokens) // 33 * 33].view(-1, 33)  # 32 words, each with the next one
    rows = rows[torch.randperm(len(rows))]
    train, val, test = rows[:-512], rows[-512:-256], rows[-256:]

    model = Model(vocabulary)
    criterion = fk.LinearFocalLoss(64, vocabulary, gamma=chosen.gamma)  # the head is criterion.linear
    parameters = [*model.parameters(), *criterion.parameters()]
    optimizer = torch.optim.Adam(parameters, lr=5e-3)
    for _ in range(chosen.steps):
        batch = train[torch.randint(len(train), (32,))]
        loss = criterion(model(batch[:, :-1]), batch[:, 1:])  # the features of a word predict the next one
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print(f"{vocabulary} words, {chosen.steps} steps, last focal loss {loss:.3f}")

    @torch.no_grad()
    def logits_of(part):
        for batch in part.split(32):
            yield criterion.logits(model(batch[:, :-1])).flatten(0, 1), batch[:, 1:].flatten()

    # A network trained with a focal loss tends to be under-confident; the focal map of about that gamma corrects it.
    temperatures = [0.7, 0.8, 0.9, 1.0, 1.1, 1.2, 1.3]
    grid = fk.CalibrationGridState(gammas=[0.0, 1.0, 2.0, 3.0], temperatures=temperatures, criteria=("nll",))
    for logits, target in logits_of(val):
        grid.update(logits, target)
    found = grid.compute()
    focal_gamma, focal_t, _ = found.best("nll")
    plain_t = temperatures[int(found.tables["nll"][0].argmin())]  # gamma = 0 is temperature scaling
    for name, gamma, t in (("before", 0.0, 1.0), ("temperature", 0.0, plain_t), ("focal map", focal_gamma, focal_t)):
        state = fk.CalibrationGridState(gammas=[gamma], temperatures=[t], estimator="equal_width")
        for logits, target in logits_of(test):
            state.update(logits, target)
        nll, ece = (state.compute().tables[criterion].item() for criterion in ("nll", "ece"))
        print(f"{name:12} gamma {gamma:.0f}  T {t:.2f}  test NLL {nll:.4f}  ECE {ece:.4f}  on {state.n_samples} words")


if __name__ == "__main__":
    main()
