"""python -m benchmarks.studies.language_model: trains a small causal language model with linear_focal_loss.

The text is part of every Python: the topics of ``help()`` and the docstrings of the standard library. Its 8191 most
frequent words and marks are the vocabulary; a transformer of a few million parameters, whose head is its embedding,
learns the next one. With cross-entropy, focal loss and inverse focal loss it is trained with ``linear_focal_loss``. The
first steps are repeated from the same start with ``focal_loss`` of all logits: the curves must agree up to rounding,
whose effect grows with every step. Then the command measures the next token's calibration error on held-out text,
before and after focal temperature scaling, whose gamma and temperature the streaming grid chooses, by NLL, on the other
half of that text. Everything runs once per seed.

Writes curves.csv, calibration.csv, speed.csv and language_model.png. ``--speed`` only times the steps again, and
``--plot`` only draws.
"""

import argparse
import ast
import csv
import itertools
import pydoc_data.topics
import random
import re
import sysconfig
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import focalkern as fk
from benchmarks.harness import RESULTS, Provider, commit, device_name, peak_extra_mib, time_in_turns

PIECE = 128  # number of consecutive words that stay together, in the training or the held-out text
GAMMAS = {"cross-entropy": 0.0, "focal 1": 1.0, "focal 2": 2.0, "inverse focal 1": -1.0}
GRID_GAMMAS = [0.0, 0.25, 0.5, 1.0, 2.0, -0.25, -0.5]
GRID_TEMPERATURES = [k / 20 for k in range(10, 31)]  # 0.5 to 1.5


@dataclass(frozen=True)
class Settings:
    vocabulary: int = 8192
    features: int = 192
    layers: int = 2
    heads: int = 4
    length: int = 64
    batch: int = 16
    steps: int = 300
    compared_steps: int = 100  # steps that are trained a second time, with all logits at once
    learning_rate: float = 3e-3
    held_out: int = 8192  # tokens that fit the scaling, and as many for the scores


# ---- text ------------------------------------------------------------------------------------------------------------


def documents() -> list[str]:
    """The texts in an order that depends only on their contents."""
    found = [pydoc_data.topics.topics[name] for name in sorted(pydoc_data.topics.topics)]
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        kinds = (ast.Module, ast.ClassDef, ast.FunctionDef)
        texts = [ast.get_docstring(node) for node in ast.walk(tree) if isinstance(node, kinds)]
        found.append("\n".join(text for text in texts if text))
    found = [text for text in found if text]
    random.Random(0).shuffle(found)
    return found


def split_text(settings: Settings, texts: list[str]) -> tuple[Tensor, Tensor]:
    """Tokens of the training text and of the held-out text, which is every n-th piece of all documents; 0 means a word
    outside the vocabulary."""
    words = [word for text in texts for word in re.findall(r"\w+|[^\w\s]", text.lower())]
    pieces = [words[i : i + PIECE] for i in range(0, len(words), PIECE)]
    wanted = 2 * settings.held_out + 1
    every = len(pieces) * PIECE // (wanted + PIECE)
    held_out = [word for piece in pieces[::every] for word in piece][:wanted]
    training = [word for i, piece in enumerate(pieces) if i % every for word in piece]
    index = {word: i for i, (word, _) in enumerate(Counter(training).most_common(settings.vocabulary - 1), start=1)}
    return tuple(torch.tensor([index.get(word, 0) for word in part]) for part in (training, held_out))


def rows(tokens: Tensor, length: int) -> tuple[Tensor, Tensor]:
    """[n, length] inputs and the tokens that follow them."""
    n = (len(tokens) - 1) // length
    return tokens[: n * length].view(n, length), tokens[1 : n * length + 1].view(n, length)


# ---- model -----------------------------------------------------------------------------------------------------------


class Block(nn.Module):
    def __init__(self, features: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.before, self.after = nn.LayerNorm(features), nn.LayerNorm(features)
        self.qkv, self.out = nn.Linear(features, 3 * features), nn.Linear(features, features)
        self.mlp = nn.Sequential(nn.Linear(features, 4 * features), nn.GELU(), nn.Linear(4 * features, features))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in self.qkv(self.before(x)).chunk(3, -1))
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.mlp(self.after(x))


class Model(nn.Module):
    """Features of the next token; the head is the embedding."""

    def __init__(self, settings: Settings) -> None:
        super().__init__()
        self.embedding = nn.Embedding(settings.vocabulary, settings.features)
        self.position = nn.Parameter(torch.randn(settings.length, settings.features) * 0.02)
        self.blocks = nn.Sequential(*(Block(settings.features, settings.heads) for _ in range(settings.layers)))
        self.norm = nn.LayerNorm(settings.features)
        nn.init.normal_(self.embedding.weight, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.norm(self.blocks(self.embedding(tokens) + self.position[: tokens.shape[1]]))


Loss = Callable[[Tensor, Tensor, Tensor], Tensor]


def fused(gamma: float) -> Loss:
    return lambda hidden, head, target: fk.linear_focal_loss(hidden, head, target, gamma)


def unfused(gamma: float) -> Loss:
    return lambda hidden, head, target: fk.focal_loss(F.linear(hidden, head).flatten(0, 1), target.flatten(), gamma)


def train(settings: Settings, tokens: Tensor, loss: Loss, steps: int, seed: int) -> tuple[Model, list[float]]:
    """Trains the first ``steps`` steps of ``settings.steps``. The seed determines the initial weights and the order of
    the text."""
    torch.manual_seed(seed)
    model = Model(settings)
    optimizer = torch.optim.AdamW(model.parameters(), lr=settings.learning_rate, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, settings.learning_rate, settings.steps, pct_start=0.1)
    x, y = rows(tokens, settings.length)
    generator = torch.Generator().manual_seed(seed + 1)
    curve = []
    for _ in range(steps):
        batch = torch.randint(len(x), (settings.batch,), generator=generator)
        value = loss(model(x[batch]), model.embedding.weight, y[batch])
        value.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        curve.append(value.item())
    return model, curve


# ---- calibration -----------------------------------------------------------------------------------------------------


@torch.no_grad()
def logits_of(model: Model, tokens: Tensor, length: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Logits of a few rows at a time; those of all rows never exist together."""
    x, y = rows(tokens, length)
    for batch in torch.arange(len(x)).split(8):
        yield F.linear(model(x[batch]), model.embedding.weight).flatten(0, 1), y[batch].flatten()


def grid_of(
    model: Model, tokens: Tensor, length: int, gammas: list[float], temperatures: list[float]
) -> fk.CalibrationGrid:
    state = fk.CalibrationGridState(gammas, temperatures, criteria=("ece", "nll"))
    for logits, target in logits_of(model, tokens, length):
        state.update(logits, target)
    return state.compute()


def calibration(settings: Settings, model: Model, held_out: Tensor) -> dict[str, float]:
    choose, report = held_out[: settings.held_out + 1], held_out[settings.held_out :]
    best = grid_of(model, choose, settings.length, GRID_GAMMAS, GRID_TEMPERATURES).best("nll")
    plain = grid_of(model, choose, settings.length, [0.0], GRID_TEMPERATURES).best("nll")
    right = [(logits.argmax(-1) == target).float() for logits, target in logits_of(model, report, settings.length)]
    figures = {"accuracy": torch.cat(right).mean().item()}
    for name, gamma, temperature in (
        ("uncalibrated", 0.0, 1.0),
        ("temperature", *plain[:2]),
        ("focal temperature", *best[:2]),
    ):
        tables = grid_of(model, report, settings.length, [gamma], [temperature]).tables
        figures[f"{name}: gamma"], figures[f"{name}: T"] = gamma, temperature
        figures[f"{name}: nll"], figures[f"{name}: ece"] = tables["nll"].item(), tables["ece"].item()
    return figures


# ---- speed and memory of a step --------------------------------------------------------------------------------------


def speed(settings: Settings, seconds: float) -> list[dict[str, object]]:
    """One step's forward and backward pass, fused and not, in turns."""
    torch.manual_seed(0)
    model = Model(settings)
    tokens = torch.randint(settings.vocabulary, (settings.batch, settings.length + 1))

    def step(loss: Loss) -> Callable[[], object]:
        def run() -> None:
            loss(model(tokens[:, :-1]), model.embedding.weight, tokens[:, 1:]).backward()
            model.zero_grad()

        return run

    providers = [Provider("fused", step(fused(2.0))), Provider("unfused", step(unfused(2.0)))]
    samples = time_in_turns(providers, seconds=seconds)
    return [
        {
            "loss": provider.name,
            "tokens": settings.batch * settings.length,
            "vocabulary": settings.vocabulary,
            "median_ms": sorted(samples[provider.name])[len(samples[provider.name]) // 2],
            "peak_extra_mib": peak_extra_mib(provider.run),
            "repeats": len(samples[provider.name]),
            "device": device_name(),
            "threads": torch.get_num_threads(),
            "commit": commit(),
        }
        for provider in providers
    ]


# ---- files -----------------------------------------------------------------------------------------------------------


def write(path: Path, table: list[dict[str, object]]) -> None:
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(table[0]), lineterminator="\n")
        writer.writeheader()
        for row in table:
            writer.writerow({k: f"{v:.6g}" if isinstance(v, float) else v for k, v in row.items()})


def read(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def draw(out: Path) -> None:
    """The curves of the first seed, and the errors of all of them: the mean as a bar, each seed as a dot."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    curves, table = read(out / "curves.csv"), read(out / "calibration.csv")
    names = list(dict.fromkeys(row["loss"] for row in table))
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4))
    for color, name in enumerate(names):
        steps = [row for row in curves if row["loss"] == name and row["seed"] == table[0]["seed"]]
        x = [int(row["step"]) for row in steps]
        left.plot(x, [float(row["fused"]) for row in steps], color=f"C{color}", lw=1, label=name)
        compared = [row for row in steps if row["unfused"]]
        every = max(1, len(compared) // 8)
        dots = [float(row["unfused"]) for row in compared]
        left.plot(x[: len(dots)][::every], dots[::every], "o", color=f"C{color}", ms=4, mfc="none")
    left.set(xlabel="step", ylabel="training loss", title="lines: fused, circles: all logits at once")
    left.legend()
    for place, kind in enumerate(("uncalibrated", "temperature", "focal temperature")):
        positions = [i + 0.27 * (place - 1) for i in range(len(names))]
        errors = [[float(row[f"{kind}: ece"]) for row in table if row["loss"] == name] for name in names]
        means = [sum(values) / len(values) for values in errors]
        right.bar(positions, means, width=0.25, label=kind, hatch=("", "//", "..")[place])
        for position, values in zip(positions, errors, strict=True):
            right.plot([position] * len(values), values, ".", color="black", ms=5)
    right.set_xticks(range(len(names)), names)
    right.set(ylabel="ECE of the next token (equal mass, 15 bins)", title="held-out text; dots: seeds")
    right.legend()
    figure.tight_layout()
    figure.savefig(out / "language_model.png", dpi=110)
    plt.close(figure)


def study(settings: Settings, texts: list[str], seeds: list[int], out: Path) -> None:
    tokens, held_out = split_text(settings, texts)
    parameters = sum(p.numel() for p in Model(settings).parameters())
    print(f"{len(tokens)} tokens to train, {len(held_out)} held out, {parameters / 1e6:.1f} million parameters")
    curves: list[dict[str, object]] = []
    table: list[dict[str, object]] = []
    for seed, (name, gamma) in itertools.product(seeds, GAMMAS.items()):
        model, with_fused = train(settings, tokens, fused(gamma), settings.steps, seed)
        figures = calibration(settings, model, held_out)
        _, with_all = train(settings, tokens, unfused(gamma), settings.compared_steps, seed)
        compared = list(zip(with_fused, with_all, strict=False))
        early, late = (max(abs(a - b) / abs(b) for a, b in compared[:n]) for n in (10, len(compared)))
        pairs = zip(with_fused, [*with_all, *[""] * (settings.steps - len(with_all))], strict=True)
        run = {"seed": seed, "loss": name}
        curves += [{**run, "step": i, "fused": a, "unfused": b} for i, (a, b) in enumerate(pairs)]
        differences = {"difference in 10 steps": early, "difference in all compared": late}
        table.append({**run, "last": with_fused[-1], **differences, **figures, "commit": commit()})
        print(table[-1], flush=True)
        write(out / "curves.csv", curves)
        write(out / "calibration.csv", table)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.studies.language_model", description=__doc__)
    parser.add_argument("--out", type=Path, default=RESULTS / "language_model")
    parser.add_argument("--steps", type=int, default=Settings.steps)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--speed", action="store_true", help="only measure the steps")
    parser.add_argument("--plot", action="store_true", help="only draw what is recorded")
    arguments = parser.parse_args(argv)
    settings = replace(Settings(), steps=arguments.steps, compared_steps=min(arguments.steps, Settings.compared_steps))
    arguments.out.mkdir(parents=True, exist_ok=True)
    if not arguments.speed and not arguments.plot:
        study(settings, documents(), arguments.seeds, arguments.out)
    if not arguments.plot:
        write(arguments.out / "speed.csv", speed(replace(settings, batch=32), seconds=8.0))
    draw(arguments.out)


if __name__ == "__main__":
    main()
