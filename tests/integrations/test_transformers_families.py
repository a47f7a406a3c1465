"""Models of transformers that compute their own loss, or do not shift the labels, and copies of models."""

import copy
import sys
import types

import pytest
import torch
import torch.nn.functional as F
from conftest import assert_close, peer

import focalkern as fk

transformers = peer("transformers")
peer("accelerate")

from focalkern.integrations import _focal_of_model, _own_loss  # noqa: E402
from focalkern.integrations.transformers import CalibrationCallback, use_focal_loss  # noqa: E402

BERT = {
    "vocab_size": 23, "hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
    "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "max_position_embeddings": 20, "num_labels": 3,
}  # fmt: skip
BART = {
    "vocab_size": 23, "d_model": 8, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2,
    "decoder_attention_heads": 2, "encoder_ffn_dim": 8, "decoder_ffn_dim": 8, "pad_token_id": 1, "bos_token_id": 0,
    "eos_token_id": 2, "decoder_start_token_id": 2, "dropout": 0.0,
}  # fmt: skip
T5 = {
    "vocab_size": 23, "d_model": 8, "d_ff": 16, "num_layers": 1, "num_heads": 2, "d_kv": 4, "pad_token_id": 0,
    "decoder_start_token_id": 0, "dropout_rate": 0.0,
}  # fmt: skip
GPT2 = {
    "vocab_size": 23,
    "n_embd": 8,
    "n_layer": 1,
    "n_head": 2,
    "attn_pdrop": 0.0,
    "embd_pdrop": 0.0,
    "resid_pdrop": 0.0,
}
LLAMA = {"vocab_size": 23, "hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
CONFIGS = {"Bert": BERT, "Bart": BART, "Marian": BART, "T5": T5, "GPT2": GPT2, "Llama": LLAMA}


def make(name, **options):
    """A model by the name of its class, with weights of which no two classes have the same logits."""
    torch.manual_seed(0)
    family = next(family for family in CONFIGS if name.startswith(family))
    config = getattr(transformers, f"{family}Config")(**CONFIGS[family], **options)
    model = getattr(transformers, name)(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(4)
    return model.eval()


def batch(n_rows=4):
    ids = torch.randint(3, 23, (n_rows, 9), generator=torch.Generator().manual_seed(1))
    return {"input_ids": ids, "labels": ids.flip(0)}


def trained(model, folder, rows, callbacks=(), compute_loss_func=None, **options):
    """A ``Trainer`` after three steps of plain gradient descent."""
    args = transformers.TrainingArguments(
        folder, per_device_train_batch_size=2, max_steps=3, optim="sgd", learning_rate=0.1, logging_steps=1,
        report_to=[], use_cpu=True, save_strategy="no", disable_tqdm=True, **options,
    )  # fmt: skip
    trainer = transformers.Trainer(
        model,
        args,
        train_dataset=rows,
        eval_dataset=rows,
        callbacks=list(callbacks),
        compute_loss_func=compute_loss_func,
    )
    trainer.train()
    return trainer


def losses(trainer):
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def token_rows(model):
    given = batch(8)
    labels = given["labels"]
    if _own_loss.loss_kind(model) in _own_loss.ROW:
        several = model.config.problem_type == "multi_label_classification"
        labels = torch.eye(3)[labels[:, 0] % 3] if several else labels[:, 0] % 3
    elif _own_loss.loss_kind(model) == "ForTokenClassification":
        labels = labels % 3
    return [{"input_ids": ids, "labels": label} for ids, label in zip(given["input_ids"], labels, strict=True)]


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("BertForSequenceClassification", {}),
        ("BertForSequenceClassification", {"problem_type": "multi_label_classification"}),
        ("BertForTokenClassification", {}),
        ("BertForMaskedLM", {}),
        ("T5ForConditionalGeneration", {}),
    ],
)
def test_trainer_trains_models_that_compute_their_own_loss(name, options, tmp_path):
    model = make(name, **options)
    rows = token_rows(model)
    own = losses(trained(copy.deepcopy(model), tmp_path / "own", rows))
    with use_focal_loss(model, 0.0):
        found = losses(trained(model, tmp_path / "focal", rows))
    assert found == pytest.approx(own, rel=1e-5)


@pytest.mark.parametrize(
    "name",
    [
        "T5ForConditionalGeneration",
        "BartForConditionalGeneration",
        "BartForCausalLM",
        "MarianMTModel",
        "MarianForCausalLM",
        "GPT2LMHeadModel",
        "BertLMHeadModel",
        "LlamaForCausalLM",
    ],
)
def test_labels_shift_as_in_the_own_loss(name):
    model, given = make(name), batch()
    own = model(**given).loss
    with use_focal_loss(model, 0.0):
        assert_close(model(**given).loss, own)
        given["labels"][:, 1:3] = -100
        found = model(**given).loss
    assert_close(found, model(**given).loss)


def test_equal_logits_leave_the_shift_to_the_gradient():
    """All logits are 0, so that the two cross-entropies are both log 23."""
    model, given = make("T5ForConditionalGeneration"), batch()
    torch.nn.init.zeros_(model.lm_head.weight)
    expected = torch.autograd.grad(model(**given).loss, model.lm_head.weight)[0]
    with use_focal_loss(model, 0.0):
        assert_close(torch.autograd.grad(model(**given).loss, model.lm_head.weight)[0], expected)
    assert _own_loss.known_shift(model) is False


@pytest.mark.parametrize("shift", [False, True])
def test_an_overflown_loss_leaves_the_shift_to_the_gradient(shift):
    """float16 losses of the CPU are summed in float16."""
    model, given = make("T5ForConditionalGeneration").half(), batch(3000)
    logits, labels = model(**given).logits, given["labels"]
    targets = _own_loss.next_tokens(labels) if shift else labels
    loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
    assert bool(loss.isinf())
    assert _own_loss.shift_of_own_loss(model, logits, labels, loss, None) is shift


@pytest.mark.parametrize("given_shifted", [False, True])
def test_the_shift_of_a_model_that_calls_its_loss_is_remembered(given_shifted):
    """Encoder-decoders such as Moonshine pass ``shift_labels=labels``, which are not shifted."""
    model, labels = make("LlamaForCausalLM"), batch()["labels"]
    logits = torch.randn(4, 9, 23)
    with use_focal_loss(model, 0.0):
        shifted = {"shift_labels": labels} if given_shifted else {}
        found = model.loss_function(logits=logits, labels=labels, vocab_size=23, **shifted)
    targets = labels if given_shifted else _own_loss.next_tokens(labels)
    assert_close(found, F.cross_entropy(logits.flatten(0, 1), targets.flatten()))
    assert _own_loss.known_shift(model) is not given_shifted


def test_a_loss_that_is_no_cross_entropy_is_refused():
    """A model that adds a term to its loss."""

    def add(_model, _args, output):
        output["loss"] = output.loss + 0.1

    model = make("BertForMaskedLM")
    model.register_forward_hook(add)
    with use_focal_loss(model, 2.0), pytest.raises(ValueError, match="BertForMaskedLM computes a loss of its own"):
        model(**batch())


def test_tuples_and_labels_by_position():
    model, given = make("BertForMaskedLM"), batch()
    logits = model(**given).logits
    expected = fk.focal_loss(logits.flatten(0, 1), given["labels"].flatten(), 2.0)
    with use_focal_loss(model, 2.0):
        found = model(**given, return_dict=False)
        assert_close(found[0], expected)
        assert torch.equal(found[1], logits)
        assert_close(model(given["input_ids"], *[None] * 6, given["labels"]).loss, expected)


@pytest.mark.parametrize("options", [{"label_smoothing_factor": 0.1}, {"compute_loss_func": lambda *_, **__: 0.0}])
def test_a_loss_outside_of_the_model_is_refused(options, tmp_path):
    model = make("LlamaForCausalLM")
    with (
        use_focal_loss(model, 5.0),
        pytest.raises(ValueError, match="label_smoothing_factor or compute_loss_func; leave both out"),
    ):
        trained(model, tmp_path, token_rows(model), **options)


def test_a_model_without_loss_arguments_warns_without_labels(tmp_path):
    """Trainer passes no number of items to it, by which the labels that Trainer keeps are recognised elsewhere."""
    model = make("LlamaForCausalLM").train()
    model.accepts_loss_kwargs = False
    with use_focal_loss(model):
        with torch.no_grad():
            model(input_ids=batch()["input_ids"])
        with pytest.warns(UserWarning, match="the focal loss is not used; with Trainer, leave out label_smoothing"):
            trained(model, tmp_path, token_rows(model), label_smoothing_factor=0.1)


@pytest.mark.parametrize("focal", [False, True])
@pytest.mark.parametrize("name", ["GPT2LMHeadModel", "T5ForConditionalGeneration", "BartForCausalLM"])
def test_the_nll_of_the_callback_is_of_the_own_labels(name, focal, tmp_path):
    model, given = make(name), batch(8)
    expected = float(model(**given).loss.detach())
    args = transformers.TrainingArguments(tmp_path, report_to=[], use_cpu=True, disable_tqdm=True)
    rows = [{"input_ids": ids, "labels": labels} for ids, labels in zip(*given.values(), strict=True)]
    if focal:
        use_focal_loss(model, 2.0)
    trainer = transformers.Trainer(model, args, eval_dataset=rows, callbacks=[CalibrationCallback()])
    assert trainer.evaluate()["eval_nll"] == pytest.approx(expected, rel=1e-5)


def test_a_callback_added_late_says_what_it_missed(tmp_path):
    model = make("LlamaForCausalLM")
    args = transformers.TrainingArguments(tmp_path, max_steps=1, report_to=[], use_cpu=True, disable_tqdm=True)
    trainer = transformers.Trainer(model, args, train_dataset=token_rows(model), eval_dataset=token_rows(model))
    trainer.add_callback(CalibrationCallback())
    with pytest.warns(UserWarning, match=r"trainer\.add_callback\(\) came after the Trainer was built"):
        assert "eval_nll" not in trainer.evaluate()
    assert "eval_nll" in trainer.evaluate()
    trainer = transformers.Trainer(model, args, train_dataset=token_rows(model), eval_dataset=token_rows(model))
    trainer.add_callback(CalibrationCallback())
    trainer.train()
    assert "eval_nll" in trainer.evaluate()


def test_other_callbacks_see_the_numbers(tmp_path):
    """Trainer logs an evaluation before on_evaluate; early stopping reads its result at on_evaluate, in any order."""
    logged = []

    class Reporter(transformers.TrainerCallback):
        def on_log(self, args, state, control, logs=None, **kwargs):
            logged.append(dict(logs))

    model = make("LlamaForCausalLM")
    args = transformers.TrainingArguments(
        tmp_path,
        max_steps=4,
        learning_rate=0.0,
        eval_strategy="steps",
        eval_steps=1,
        save_steps=1,
        load_best_model_at_end=True,
        metric_for_best_model="eval_nll",
        greater_is_better=False,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
    )
    callbacks = [transformers.EarlyStoppingCallback(1), CalibrationCallback(), Reporter()]
    rows = token_rows(model)
    trainer = transformers.Trainer(model, args, train_dataset=rows, eval_dataset=rows, callbacks=callbacks)
    trainer.train()
    assert trainer.state.global_step == 2  # the second evaluation is not better
    names = {"eval_nll", "eval_ece", "eval_temperature"}
    evaluations = [logs for logs in logged if "eval_runtime" in logs]
    assert len(evaluations) == 2
    assert all(names < logs.keys() for logs in evaluations)
    assert not any(names & logs.keys() for logs in logged if "eval_runtime" not in logs)
    assert names < trainer.evaluate().keys()


def test_a_callback_follows_model_init(tmp_path):
    """``train`` replaces the model of ``model_init``."""
    args = transformers.TrainingArguments(tmp_path, max_steps=1, report_to=[], use_cpu=True, disable_tqdm=True)
    rows = token_rows(make("LlamaForCausalLM"))
    trainer = transformers.Trainer(
        args=args,
        model_init=lambda: make("LlamaForCausalLM"),
        train_dataset=rows,
        eval_dataset=rows,
        callbacks=[CalibrationCallback()],
    )
    trainer.train()
    found = trainer.evaluate()
    assert found["eval_nll"] == pytest.approx(found["eval_loss"], rel=1e-5)


def own_loss(outputs, labels, num_items_in_batch=None):
    return F.cross_entropy(outputs.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


@pytest.mark.parametrize("options", [{"label_smoothing_factor": 0.1}, {"compute_loss_func": own_loss}])
def test_a_callback_without_labels_says_why(options, tmp_path):
    model = make("LlamaForCausalLM")
    trainer = trained(model, tmp_path, token_rows(model), [CalibrationCallback()], **options)
    with pytest.warns(UserWarning, match="because of compute_loss_func or label_smoothing_factor"):
        assert "eval_nll" not in trainer.evaluate()
    trainer.evaluate()  # warns once


CAPPED = [
    ("RecurrentGemmaForCausalLM", transformers.RecurrentGemmaConfig, {"logits_soft_cap": 2.0}, "logits_soft_cap"),
    ("BambaForCausalLM", transformers.BambaConfig, {"z_loss_coefficient": 0.1}, "z_loss_coefficient"),
]


@pytest.mark.parametrize(("name", "config", "options", "setting"), CAPPED)
def test_linear_refuses_models_that_change_their_logits(name, config, options, setting):
    sizes = LLAMA | {"num_key_value_heads": 2, "lru_width": 8, "mamba_n_heads": 4, "mamba_d_head": 4}
    with torch.device("meta"):
        model = getattr(transformers, name)(config(**sizes, **options))
    with pytest.raises(ValueError, match=rf"config\.{setting} is"):
        use_focal_loss(model, linear=True)


def test_linear_refuses_the_cap_of_a_text_config():
    model = make("LlamaForCausalLM")
    text = copy.deepcopy(model.config)
    text.final_logit_softcapping = 2.0
    model.config.get_text_config = lambda decoder=False: text
    with pytest.raises(ValueError, match=r"config\.final_logit_softcapping is 2"):
        use_focal_loss(model, linear=True)


@pytest.mark.parametrize("capped", [False, True])
def test_linear_compares_the_logits_with_the_output_of_the_head(capped, monkeypatch):
    """A setting that focalkern does not know."""
    monkeypatch.setattr(_focal_of_model, "_AFTER_THE_HEAD", {})
    config = transformers.Gemma2Config(
        **LLAMA, head_dim=4, num_key_value_heads=2, final_logit_softcapping=2.0 if capped else None
    )
    model, given = transformers.Gemma2ForCausalLM(config).train(), batch()
    own = model(**given).loss
    with use_focal_loss(model, 0.0, linear=True):
        if capped:
            with pytest.raises(ValueError, match="the model changes them after its head"):
                model(**given)
        else:
            assert_close(model(**given).loss, own)


@pytest.mark.parametrize(("name", "linear"), [("LlamaForCausalLM", True), ("BertForMaskedLM", False)])
def test_a_deep_copy_has_the_loss_of_its_own_head(name, linear):
    model, given = make(name).train(), batch()
    with use_focal_loss(model, 0.0, linear=linear):
        model(**given)
        twin = copy.deepcopy(model)
        with torch.no_grad():
            twin.get_output_embeddings().weight.mul_(3)
        loss = model(**given).loss
        output = twin(**given)
        assert output.logits.shape[-1] == (8 if linear else 23)
        twin.eval()
        assert_close(output.loss, twin(**given).loss)
    assert_close(loss, model(**given).loss)
    assert abs(float(loss.detach() - output.loss.detach())) > 0.1


@pytest.mark.parametrize("options", [{"num_labels": 1}, {"problem_type": "regression"}])
def test_regression_is_refused(options):
    config = transformers.LlamaConfig(**LLAMA, pad_token_id=0, **options)
    model, labels = transformers.LlamaForSequenceClassification(config), torch.zeros(4, dtype=torch.long)
    with use_focal_loss(model), pytest.raises(ValueError, match="labels must be classes, got regression"):
        model(input_ids=batch()["input_ids"], labels=labels)


def test_an_import_error_has_its_cause(monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", types.ModuleType("transformers"))
    monkeypatch.delitem(sys.modules, "focalkern.integrations.transformers")
    with pytest.raises(ImportError, match=r"needs transformers.*cannot import name 'Trainer'"):
        __import__("focalkern.integrations.transformers")


@pytest.mark.parametrize("first", [0, 1])
def test_two_focal_losses_end_in_any_order(first):
    model, data = make("LlamaForCausalLM"), batch()
    own = model(**data).loss
    ends = [use_focal_loss(model, gamma) for gamma in (1.0, 3.0)]
    outer = model(**data).loss
    ends[first].close()
    other = use_focal_loss(copy.deepcopy(model), 1.0)
    assert torch.equal(model(**data).loss, outer) == (first == 0)
    other.close()
    ends[1 - first].close()
    assert torch.equal(model(**data).loss, own)
    assert "_loss_function" not in vars(model)


@pytest.mark.parametrize("wrap", [torch.compile, torch.nn.DataParallel])
def test_a_wrapped_model_is_refused_with_the_remedy(wrap):
    wrapped = wrap(make("LlamaForCausalLM"))
    with pytest.raises(TypeError, match=f"call use_focal_loss on the model before {type(wrapped).__name__} wraps it"):
        use_focal_loss(wrapped)
