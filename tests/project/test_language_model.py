"""The study of a small language model, at a small size."""

from dataclasses import replace

import pytest
import torch

language_model = pytest.importorskip(
    "benchmarks.studies.language_model", reason="the benchmarks are in the source tree only", exc_type=ImportError
)

pytestmark = pytest.mark.usefixtures("one_thread")

TINY = language_model.Settings(
    vocabulary=50,
    features=8,
    layers=1,
    heads=2,
    length=8,
    batch=2,
    steps=3,
    compared_steps=2,
    learning_rate=1e-2,
    held_out=64,
)
TEXTS = ["The cat sat on the mat . " * 40, "A dog ran to the cat . " * 100]


def test_every_few_pieces_are_held_out():
    texts = [" ".join(f"w{i}" for i in range(1280))]  # ten pieces, each word in one piece only
    training, held_out = language_model.split_text(replace(TINY, held_out=128, vocabulary=2000), texts)
    assert len(held_out) == 2 * 128 + 1
    assert torch.equal(training, torch.arange(1, len(training) + 1))
    assert not held_out.any()  # the vocabulary has none of the held-out words
    assert len(training) == 1280 - 4 * language_model.PIECE


def test_targets_are_the_next_tokens():
    x, y = language_model.rows(torch.arange(10), 3)
    assert x.tolist() == [[0, 1, 2], [3, 4, 5], [6, 7, 8]]
    assert torch.equal(y, x + 1)


def test_the_text_is_in_every_python():
    texts = language_model.documents()
    assert len(texts) > 100
    assert texts == language_model.documents()


def test_the_study_writes_its_tables_and_picture(tmp_path, monkeypatch, capsys):
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(language_model, "GRID_TEMPERATURES", [1.0, 2.0])
    monkeypatch.setattr(language_model, "GRID_GAMMAS", [0.0, 1.0])
    language_model.study(TINY, TEXTS, [0, 1], tmp_path)
    rows = language_model.read(tmp_path / "calibration.csv")
    assert [(row["seed"], row["loss"]) for row in rows] == [(seed, n) for seed in "01" for n in language_model.GAMMAS]
    assert all(rows[i]["last"] != rows[i + 4]["last"] for i in range(4))
    assert all(float(row["difference in all compared"]) < 1e-4 for row in rows)
    assert len(language_model.read(tmp_path / "curves.csv")) == 2 * 4 * TINY.steps
    language_model.draw(tmp_path)
    assert (tmp_path / "language_model.png").stat().st_size > 1000
    assert "held out" in capsys.readouterr().out
