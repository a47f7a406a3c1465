"""Hugging Face transformers with the focal loss: all calls of models to their loss, Trainer, and the callback."""

import copy
import math
import warnings
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import pytest
import torch
import torch.nn.functional as F
from conftest import assert_close, peer

import focalkern as fk

transformers = peer("transformers")
peer("accelerate")

from focalkern.integrations import transformers as integration  # noqa: E402
from focalkern.integrations.transformers import CalibrationCallback, use_focal_loss  # noqa: E402

SMALL = {"vocab_size": 23, "hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}


def causal_model(**options):
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SMALL, **options))


def bert(kind, **options):
    torch.manual_seed(0)
    config = transformers.BertConfig(**SMALL, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, **options)
    return getattr(transformers, f"BertFor{kind}")(config)


def llama(kind, **options):
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**SMALL, pad_token_id=0, **options)
    return getattr(transformers, f"LlamaFor{kind}")(config)


def images(**options):
    torch.manual_seed(0)
    config = transformers.ViTConfig(
        hidden_size=8, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, image_size=8, patch_size=4,
        num_labels=3, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, **options,
    )  # fmt: skip
    return transformers.ViTForImageClassification(config)


def tokens(n_rows=4, ignored=3):
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(1, 23, (n_rows, 9), generator=generator)
    labels = ids.clone()
    labels[:, :ignored] = -100
    return ids, labels


def gradients(model):
    return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]


def loss_and_gradients(model, **batch):
    model.zero_grad()
    loss = model(**batch).loss
    loss.backward()
    return loss.detach(), [gradient.clone() for gradient in gradients(model)]


def cases():
    ids, labels = tokens()
    classes = torch.tensor([0, 2, 1, 0])
    yield "causal", causal_model(), {"input_ids": ids, "labels": labels}
    yield "causal, tied", causal_model(tie_word_embeddings=True), {"input_ids": ids, "labels": labels}
    yield "masked", bert("MaskedLM"), {"input_ids": ids, "labels": labels}
    yield "tokens", bert("TokenClassification", num_labels=23), {"input_ids": ids, "labels": labels}
    yield "tokens, Llama", llama("TokenClassification", num_labels=23), {"input_ids": ids, "labels": labels}
    yield "rows", bert("SequenceClassification", num_labels=3), {"input_ids": ids, "labels": classes}
    yield "rows, Llama", llama("SequenceClassification", num_labels=3), {"input_ids": ids, "labels": classes}
    yield "images", images(), {"pixel_values": torch.randn(4, 3, 8, 8), "labels": classes}


CASES = [pytest.param(name, model.eval(), batch, id=name) for name, model, batch in cases()]


@pytest.mark.parametrize("name, model, batch", CASES)
def test_gamma_0_is_the_models_own_loss(name, model, batch):
    loss, expected = loss_and_gradients(model, **batch)
    with use_focal_loss(model, 0.0):
        focal, found = loss_and_gradients(model, **batch)
        if name.startswith("causal"):
            assert_close(model(**batch, shift_labels=None).loss, loss)
    assert_close(focal, loss)
    for ours, theirs in zip(found, expected, strict=True):
        assert_close(ours, theirs)
    again, _ = loss_and_gradients(model, **batch)
    assert torch.equal(again, loss)


@pytest.mark.parametrize("name, model, batch", CASES)
def test_it_is_the_focal_loss_of_the_logits(name, model, batch):
    logits = model(**batch).logits
    labels = batch["labels"]
    if name.startswith("causal"):
        logits, labels = logits[:, :-1], labels[:, 1:]
    expected = fk.focal_loss(logits.reshape(-1, logits.shape[-1]), labels.reshape(-1), 3.0, label_smoothing=0.1)
    with use_focal_loss(model, 3.0, label_smoothing=0.1):
        assert_close(model(**batch).loss, expected)
        assert_close(model(**batch, num_items_in_batch=7).loss * 7, expected * int((labels != -100).sum()))
        assert_close(model(**batch).loss, expected)


@pytest.mark.parametrize("linear", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_models_have_a_float32_loss(dtype, linear):
    """The losses of the 28,000 tokens sum to more than the largest float16."""
    model = causal_model().to(dtype).train()
    ids = tokens(4000)[0]
    batch = {"input_ids": ids, "labels": ids.masked_fill(ids == 1, -100)}
    expected = model(**batch).loss.detach()
    with use_focal_loss(model, 0.0, linear=linear):
        loss, found = loss_and_gradients(model, **batch)
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss, expected, rtol=1e-6, atol=0)
    assert all(bool(gradient.isfinite().all()) for gradient in found)


@pytest.mark.parametrize("make", [bert, llama])
def test_several_labels_per_row(make):
    model = make("SequenceClassification", num_labels=3, problem_type="multi_label_classification")
    ids, _ = tokens()
    labels = torch.tensor([[1.0, 0, 1], [0, 0, 0], [0, 1, 0], [1, 1, 1]])
    expected = fk.sigmoid_focal_loss(model(input_ids=ids).logits, labels, 2.0, None, reduction="mean")
    own = model(input_ids=ids, labels=labels).loss
    with use_focal_loss(model, 0.0):
        assert_close(model(input_ids=ids, labels=labels).loss, own)
    with use_focal_loss(model):
        assert_close(model(input_ids=ids, labels=labels).loss, expected)
        loss = model(input_ids=ids, labels=labels, num_items_in_batch=2 * labels.numel()).loss
        assert_close(2 * loss, expected)
    with (
        use_focal_loss(model, label_smoothing=0.1),
        pytest.raises(ValueError, match="several labels per row take a number gamma"),
    ):
        model(input_ids=ids, labels=labels)


@pytest.mark.parametrize("tied", [False, True])
def test_linear_makes_no_logits_in_training(tied):
    model = causal_model(tie_word_embeddings=tied).train()
    ids, labels = tokens()
    with use_focal_loss(model, 2.0):
        expected, slopes = loss_and_gradients(model, input_ids=ids, labels=labels)
    with use_focal_loss(model, 2.0, linear=True):
        loss, found = loss_and_gradients(model, input_ids=ids, labels=labels)
        assert model(input_ids=ids, labels=labels).logits.shape == (4, 9, 8)
        assert model(input_ids=ids).logits.shape == (4, 9, 23)
        assert model.eval()(input_ids=ids, labels=labels).logits.shape == (4, 9, 23)
        with pytest.raises(IndexError):  # the head is restored after an error, too
            model.train()(input_ids=ids, labels=labels + 1000)
        assert model(input_ids=ids).logits.shape == (4, 9, 23)
    assert_close(loss, expected)
    for ours, theirs in zip(found, slopes, strict=True):
        assert_close(ours, theirs)


def train(model, folder, **options):
    ids, labels = tokens(8)
    rows = [{"input_ids": row, "labels": label} for row, label in zip(ids, labels, strict=True)]
    trainer = transformers.Trainer(
        model=model,
        args=transformers.TrainingArguments(
            output_dir=str(folder),
            per_device_train_batch_size=2,
            gradient_accumulation_steps=2,
            max_steps=20,
            optim="sgd",
            learning_rate=0.1,
            logging_steps=1,
            report_to=[],
            use_cpu=True,
            save_strategy="no",
            disable_tqdm=True,
        ),
        train_dataset=rows,
        eval_dataset=rows,
        **options,
    )
    trainer.train()
    return trainer


def test_twenty_steps_at_gamma_0_are_those_of_cross_entropy(tmp_path):
    """Losses and gradient norms, with accumulated batches."""
    model = causal_model()
    ours = copy.deepcopy(model)
    expected = train(model, tmp_path / "a").state.log_history
    with use_focal_loss(ours, 0.0, linear=True):
        found = train(ours, tmp_path / "b").state.log_history
    assert len(found) == len(expected) == 21
    for step, reference in zip(found[:-1], expected[:-1], strict=True):
        assert step["loss"] == pytest.approx(reference["loss"], rel=1e-4)
        assert step["grad_norm"] == pytest.approx(reference["grad_norm"], rel=1e-4)


def test_callback_tells_the_calibration_of_each_evaluation(tmp_path):
    callback = CalibrationCallback()
    model = causal_model()
    trainer = train(model, tmp_path, callbacks=[callback])
    result = trainer.evaluate()
    ids, labels = tokens(8)
    with torch.no_grad():
        logits = model.eval()(input_ids=ids).logits[:, :-1].reshape(-1, 23)
    labels = labels[:, 1:].reshape(-1)
    logits, labels = logits[labels >= 0], labels[labels >= 0]
    assert result["eval_nll"] == pytest.approx(float(F.cross_entropy(logits, labels)), rel=1e-5)
    ece = fk.metrics.expected_calibration_error(logits.softmax(-1), labels)
    assert result["eval_ece"] == pytest.approx(float(ece), abs=1e-6)
    scaling = fk.TemperatureScaling().fit_quietly(logits, labels)
    assert result["eval_temperature"] == pytest.approx(scaling.temperature_, rel=1e-5)
    assert trainer.state.log_history[-1]["eval_nll"] == result["eval_nll"]


def evaluated(callback, model, folder, data):
    args = transformers.TrainingArguments(folder, report_to=[], use_cpu=True, disable_tqdm=True)
    return transformers.Trainer(model, args, eval_dataset=data, callbacks=[callback])


def test_callback_keeps_the_logits_that_it_uses(tmp_path, monkeypatch):
    """20,000 targets of 128,256 classes would be 10 GB on every process, and four times as much in the fit."""
    data, kept = [{"input_ids": row, "labels": row} for row in tokens(5)[0]], []
    monkeypatch.setattr(integration, "_MOST_LOGITS", 7 * 23 + 22)
    for callback in (CalibrationCallback(), CalibrationCallback(max_samples=30)):
        figures = callback._figures
        monkeypatch.setattr(callback, "_figures", lambda rows, figures=figures: kept.append(rows) or figures(rows))
        result = evaluated(callback, causal_model(), tmp_path, data).evaluate()
        logits, labels = (torch.cat(parts) for parts in zip(*kept[-1], strict=True))
        assert result["eval_nll"] == pytest.approx(float(F.cross_entropy(logits, labels)), rel=1e-5)
    assert [sum(len(labels) for _, labels in rows) for rows in kept] == [7, 30]
    monkeypatch.setattr(integration, "rank_and_size", lambda: (1, 2))
    assert CalibrationCallback()._missing(23) == 0  # only the rows of the first process are used


def test_callback_leaves_predictions_out_and_survives_nan(tmp_path):
    data, others = ([{"input_ids": row, "labels": row} for row in tokens(n)[0]] for n in (3, 5))
    callback, model = CalibrationCallback(), causal_model()
    trainer = evaluated(callback, model, tmp_path, data)
    expected = trainer.evaluate()["eval_nll"]
    trainer.predict(others)
    assert trainer.evaluate()["eval_nll"] == expected
    torch.nn.init.constant_(model.lm_head.weight, float("nan"))
    result = trainer.evaluate()
    assert all(result[name] != result[name] for name in ("eval_nll", "eval_ece", "eval_temperature"))


def test_each_evaluation_set_has_its_own_figures(tmp_path):
    sets = {name: [{"input_ids": row, "labels": row} for row in tokens(n)[0]] for name, n in (("a", 3), ("b", 5))}
    trainer = evaluated(CalibrationCallback(), causal_model(), tmp_path, sets)
    result = trainer.evaluate()
    for name in sets:
        assert result[f"eval_{name}_nll"] == pytest.approx(result[f"eval_{name}_loss"], rel=1e-5)
    assert "test_ece" in trainer.evaluate(sets["a"], metric_key_prefix="test")


def test_a_masked_label_does_not_end_the_training():
    callback, metrics = CalibrationCallback(), {"eval_runtime": 0.0}
    callback._kept = [(torch.tensor([[1.0, -torch.inf, 0.0], [0.0, 2.0, 1.0]]), torch.tensor([1, 1]))]
    callback.on_evaluate(None, transformers.TrainerState(), None, metrics)
    assert metrics["eval_nll"] == torch.inf
    assert 0 < metrics["eval_ece"] < 1
    assert math.isnan(metrics["eval_temperature"])


def evaluate_part(rank, store):
    """One of two processes: evaluates its own rows, then none."""
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    generator = torch.Generator().manual_seed(rank)
    logits, labels = torch.randn(60, 5, generator=generator), torch.randint(5, (60,), generator=generator)
    callback, state = CalibrationCallback(), transformers.TrainerState()
    callback._kept = [(logits[:40], labels[:40]), (logits[40:], labels[40:])]
    found = [{"eval_runtime": 0.0}, {"eval_runtime": 0.0}]
    callback.on_evaluate(None, state, None, found[0])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        callback.on_evaluate(None, state, None, found[1])
    torch.distributed.destroy_process_group()
    return found, float(F.cross_entropy(logits, labels))


@pytest.mark.skipif(not torch.distributed.is_available(), reason="no torch.distributed")
def test_every_process_has_the_figures_of_the_first(tmp_path):
    """The figures of its own rows would let one process stop early, and the others wait for it."""
    with ProcessPoolExecutor(2, get_context("spawn")) as pool:
        (first, nll), (second, _) = pool.map(evaluate_part, (0, 1), (str(tmp_path / "store"),) * 2)
    assert first == second
    assert first[0]["eval_nll"] == pytest.approx(nll, rel=1e-6)
    assert set(first[0]) == {"eval_runtime", "eval_nll", "eval_ece", "eval_temperature"}
    assert set(first[1]) == {"eval_runtime"}


@pytest.mark.parametrize(
    ("n_labels", "problem", "labels"), [(3, "multi_label_classification", [1.0, 0.0, 1.0]), (1, "regression", 0.5)]
)
def test_callback_is_for_classes(n_labels, problem, labels, tmp_path):
    model = llama("SequenceClassification", num_labels=n_labels, problem_type=problem)
    data = [{"input_ids": row, "labels": labels} for row in tokens()[0]]
    with pytest.raises(ValueError, match=r"CalibrationCallback: labels must be classes.* leave the callback out"):
        evaluated(CalibrationCallback(), model, tmp_path, data).evaluate()


def with_adapter(model, target):
    peft = peer("peft")
    config = peft.LoraConfig(r=2, target_modules=[target], init_lora_weights="gaussian")
    return peft.get_peft_model(model, config).train()


of_peft = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")


@of_peft
@pytest.mark.parametrize("linear", [False, True])
def test_a_causal_model_of_peft(linear):
    model, (ids, labels) = with_adapter(causal_model(), "q_proj"), tokens()
    logits = model(input_ids=ids).logits[:, :-1]
    expected = fk.focal_loss(logits.reshape(-1, 23), labels[:, 1:].reshape(-1), 2.0)
    adapter = [parameter for parameter in model.parameters() if parameter.requires_grad]
    expected_gradients = torch.autograd.grad(expected, adapter)
    with use_focal_loss(model, 2.0, linear=linear):
        output = model(input_ids=ids, labels=labels)
    assert_close(output.loss, expected)
    for ours, theirs in zip(torch.autograd.grad(output.loss, adapter), expected_gradients, strict=True):
        assert_close(ours, theirs)
    assert output.logits.shape[-1] == (8 if linear else 23)
    assert_close(model(input_ids=ids, labels=labels).loss, F.cross_entropy(logits.mT, labels[:, 1:]))


@of_peft
@pytest.mark.filterwarnings("ignore:.*embedding layers.*:UserWarning")
def test_linear_refuses_an_adapter_of_the_head():
    """The fused loss reads the weight of the head, which lacks the adapter."""
    model = with_adapter(causal_model(), "lm_head")
    with pytest.raises(ValueError, match=r"needs an nn.Linear as output head, got peft.*; leave out linear, or"):
        use_focal_loss(model, linear=True)
    head = with_adapter(torch.nn.Sequential(fk.LinearFocalLoss(4, 3)), "0.linear").base_model.model[0]
    with pytest.raises(TypeError, match=r"LinearFocalLoss: linear must be an nn.Linear, got peft.*target_modules"):
        head(torch.randn(2, 4), torch.tensor([0, 2]))
    assert head.logits(torch.randn(2, 4)).shape == (2, 3)


@of_peft
def test_a_model_of_peft_that_computes_its_own_loss():
    model, (ids, labels) = with_adapter(bert("TokenClassification", num_labels=23), "query"), tokens()
    logits = model(input_ids=ids).logits
    with use_focal_loss(model, 2.0):
        found = model(input_ids=ids, labels=labels).loss
    assert_close(found, fk.focal_loss(logits.reshape(-1, 23), labels.reshape(-1), 2.0))


def test_errors_say_what_is_wrong():
    with pytest.raises(TypeError, match="use_focal_loss: model must be a transformers model"):
        use_focal_loss(torch.nn.Linear(2, 2))
    with pytest.raises(ValueError, match="with loss_type 'ForQuestionAnswering'"):
        use_focal_loss(bert("QuestionAnswering"))
    with pytest.raises(ValueError, match="linear=True is for language models"):
        use_focal_loss(llama("SequenceClassification", num_labels=3), linear=True)
    with pytest.raises(ValueError, match="BertForMaskedLM computes its own loss"):
        use_focal_loss(bert("MaskedLM"), linear=True)
    capped = transformers.Gemma2Config(**SMALL, head_dim=4, num_key_value_heads=2)
    with pytest.raises(ValueError, match=r"config\.final_logit_softcapping"):
        use_focal_loss(transformers.Gemma2ForCausalLM(capped), linear=True)
    model = causal_model()
    with pytest.raises(ValueError, match="gamma"):
        use_focal_loss(model, float("nan"))
    assert "_loss_function" not in vars(model)
    model = bert("SequenceClassification", num_labels=1)
    with use_focal_loss(model), pytest.raises(ValueError, match="labels must be classes, got regression"):
        model(input_ids=tokens()[0], labels=torch.rand(4))


@pytest.mark.parametrize("linear", [False, True])
def test_dft_is_the_loss_of_trl(linear):
    """TRL's ``loss_type="dft"``: -p log p of the next token with the first p detached, over the tokens that count."""
    ids, labels = tokens()
    model = causal_model().train()
    logits = model(input_ids=ids).logits[:, :-1]
    log_p = logits.log_softmax(-1).gather(-1, labels[:, 1:].clamp(min=0).unsqueeze(-1)).squeeze(-1)
    counts = labels[:, 1:] != -100
    expected = (-log_p.exp().detach() * log_p * counts).sum() / counts.sum()
    expected.backward()
    slopes = [gradient.clone() for gradient in gradients(model)]
    with use_focal_loss(model, 1.0, linear=linear, modulation="confidence", detach_modulation=True):
        loss, found = loss_and_gradients(model, input_ids=ids, labels=labels)
    assert_close(loss, expected.detach().double())
    for ours, theirs in zip(found, slopes, strict=True):
        assert_close(ours, theirs.double())
