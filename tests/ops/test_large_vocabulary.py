"""docs/large_vocabulary.md: its examples run, its recipes give the described results, and its table is recomputed."""

import copy
import csv
import re
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from conftest import assert_close, peer

import focalkern as fk

PAGE = Path(__file__).resolve().parents[2] / "docs" / "large_vocabulary.md"
if not (PAGE.exists() and (PAGE.parents[1] / "benchmarks" / "results").exists()):
    pytest.skip("the page is in the source tree only", allow_module_level=True)
TEXT = PAGE.read_text()
MIB = 2**20
KINDS = ("uncalibrated", "temperature", "focal temperature")

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore:'pin_memory' argument is set as true but no accelerator:UserWarning"),
]


@pytest.mark.parametrize("number", range(3), ids=["plain loop", "transformers", "ranks"])
def test_example(number):
    code = re.findall(r"^```python\n(.*?)^```$", TEXT, re.MULTILINE | re.DOTALL)[number]
    if "transformers" in code:
        peer("transformers")
        peer("accelerate")
    if "dist." in code and not (dist.is_available() and dist.is_gloo_available()):
        pytest.skip("this torch has no gloo")
    exec(compile(code, str(PAGE), "exec"), {"__name__": "__main__"})


def mib(size):
    return f"{size / MIB:.0f} MiB" if size >= 10 * MIB else f"{size / MIB:.2g} MiB"


def test_the_table_of_bytes():
    rows, features, chunk = 8192, 4096, 1024
    lines = []
    for classes in (128256, 1048576):
        for ranks in (8, 64, 256, 1024):
            piece, ring = -(-classes // ranks), 2 * (ranks - 1) / ranks
            figures = (
                2 * piece * features,  # weight
                4 * piece * features,  # its gradient, float32
                2 * piece * chunk,  # logits of a chunk
                2 * 2 * piece * rows,  # logits and gradient at once
                24 * rows * ring,  # statistics
                2 * features * rows * ring,  # input's gradient
                2 * classes * rows * ring / 2,  # gathered logits
            )
            lines.append(f"| {classes:,} | {ranks} | " + " | ".join(map(mib, figures)) + " |")
    assert "\n".join(lines) in TEXT


def test_the_table_of_the_study_is_the_recorded_one():
    with (PAGE.parents[1] / "benchmarks" / "results" / "language_model" / "calibration.csv").open(newline="") as file:
        for row in csv.DictReader(file):
            figures = ("accuracy", "uncalibrated: nll", *(f"{kind}: ece" for kind in KINDS))
            cells = [row["loss"], *(f"{float(row[figure]):.4f}" for figure in figures)]
            assert "| " + " | ".join(cells) + " |" in TEXT


def test_the_table_of_times_is_the_recorded_one():
    last = {}
    for path in sorted((PAGE.parents[1] / "benchmarks" / "results").glob("*_linear_focal_loss_*.csv")):
        with path.open(newline="") as file:
            for row in csv.DictReader(file):
                last[(row["case"].removeprefix("forward+backward "), row["dtype"]), row["provider"]] = row
    own, pair, entropy, torchs = "focalkern", "focal_loss of linear", "cross_entropy of linear", "torch, chunked"
    for case in {case for case, _ in last}:
        cells = [*case, f"{float(last[case, own]['median_ms']):.0f} ms"]
        cells += [f"{float(last[case, name]['speedup']):.2f} x" for name in (pair, entropy, torchs)]
        cells += [f"{float(last[case, name]['peak_extra_mib']):.0f}" for name in (own, pair, torchs)]
        cells.append(f"{float(last[case, 'three products']['speedup']):.2f} x")
        assert "| " + " | ".join(cells) + " |" in TEXT


def test_the_recipe_for_transformers_equals_the_two_operations(tmp_path):
    transformers = peer("transformers")
    peer("accelerate")
    config = transformers.LlamaConfig(
        vocab_size=17,
        hidden_size=8,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        tie_word_embeddings=True,
        pad_token_id=0,
    )
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    start = copy.deepcopy(model.state_dict())
    tokens = torch.randint(1, 17, (8, 10), generator=torch.Generator().manual_seed(2))
    labels = torch.where(torch.arange(10) < torch.arange(8).unsqueeze(1), -100, tokens)
    rows = [{"input_ids": row, "labels": label} for row, label in zip(tokens, labels, strict=True)]

    def fused(outputs, labels, num_items_in_batch=None):
        target = F.pad(labels[:, 1:], (0, 1), value=-100)
        head = model.get_output_embeddings().weight
        return fk.linear_focal_loss(outputs.logits, head, target, 2.0, reduction="sum") / num_items_in_batch

    def unfused(outputs, labels, num_items_in_batch=None):
        target = F.pad(labels[:, 1:], (0, 1), value=-100).flatten()
        return fk.focal_loss(outputs.logits.flatten(0, 1), target, 2.0, reduction="sum") / num_items_in_batch

    results = []
    for loss in (unfused, fused):
        model.load_state_dict(start)
        if loss is fused:
            model.lm_head.forward = lambda hidden: hidden
        transformers.Trainer(
            model=model,
            args=transformers.TrainingArguments(
                output_dir=str(tmp_path),
                per_device_train_batch_size=2,
                gradient_accumulation_steps=2,
                max_steps=3,
                optim="sgd",
                learning_rate=0.1,
                max_grad_norm=0.0,
                report_to=[],
                use_cpu=True,
                save_strategy="no",
                disable_tqdm=True,
                remove_unused_columns=False,
            ),
            train_dataset=rows,
            compute_loss_func=loss,
        ).train()
        results.append([parameter.detach().clone() for parameter in model.parameters()])
    del model.lm_head.forward
    moved = 0.0
    for found, expected, before in zip(
        results[1], results[0], [start[n] for n, _ in model.named_parameters()], strict=True
    ):
        assert_close(found, expected)
        moved = max(moved, (expected - before).abs().max().item())
    assert moved > 1e-3
    assert model(tokens).logits.shape == (8, 10, 17)
