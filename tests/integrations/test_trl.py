"""TRL's SFTTrainer with the focal loss, and its DFT: losses, gradient norms and metrics of a model made here."""

import warnings

import pytest
import torch
from conftest import assert_close, peer

transformers = peer("transformers")
peer("accelerate")
with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of the libraries that TRL imports
    trl, datasets = peer("trl"), peer("datasets")
    trl.SFTTrainer  # noqa: B018 (TRL imports it at its first use)
tokenizers = peer("tokenizers")

from focalkern.integrations.transformers import CalibrationCallback, use_focal_loss  # noqa: E402

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),  # of arguments that TRL 2 removes, and that it sets itself
    pytest.mark.filterwarnings("ignore::UserWarning"),
]
STEPS = 6


def language_model():
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=23, hidden_size=8, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2
    )
    return transformers.LlamaForCausalLM(config)


def rows():
    ids = torch.randint(3, 23, (8, 9), generator=torch.Generator().manual_seed(1))
    masks = [[0] * (row % 4) + [1] * (9 - row % 4) for row in range(8)]  # the tokens of a prompt do not count
    return datasets.Dataset.from_dict({"input_ids": ids.tolist(), "completion_mask": masks})


def sft(folder, model=None, peft_config=None, **options):
    words = {"<pad>": 0, "<eos>": 1, "<unk>": 2, **{f"w{i}": i for i in range(3, 23)}}
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="<unk>"))
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
    )
    settings = {
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "max_steps": STEPS,
        "optim": "sgd",
        "learning_rate": 0.1,
        "logging_steps": 1,
        "report_to": [],
        "use_cpu": True,
        "bf16": False,
        "gradient_checkpointing": False,
        "save_strategy": "no",
        "disable_tqdm": True,
    }
    return trl.SFTTrainer(
        model or language_model(),
        args=trl.SFTConfig(output_dir=str(folder), **settings | options),
        train_dataset=rows(),
        eval_dataset=rows(),
        processing_class=tokenizer,
        peft_config=peft_config,
    )


def curve(trainer, **loss):
    """Loss, gradient norm and metrics of every step."""
    if loss:
        with use_focal_loss(trainer, **loss):
            trainer.train()
    else:
        trainer.train()
    names = ("loss", "grad_norm", "entropy", "mean_token_accuracy")
    return torch.tensor([[step[name] for name in names] for step in trainer.state.log_history[:STEPS]])


def test_gamma_0_is_the_loss_of_trl(tmp_path):
    expected = curve(sft(tmp_path / "a"))
    assert_close(curve(sft(tmp_path / "b"), gamma=0.0), expected.double(), torch.bfloat16)  # the log rounds to 4 digits
    assert_close(curve(sft(tmp_path / "c"), gamma=0.0)[:, 1], expected[:, 1].double())


def test_adapters(tmp_path):
    """A model that TRL wraps into adapters, whose forward pass calls no hook of the model inside."""
    peft = peer("peft")

    def lora(folder, **loss):
        config = peft.LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights="gaussian")
        torch.manual_seed(0)
        return curve(sft(tmp_path / folder, peft_config=config), **loss)

    expected = lora("a")
    assert_close(lora("b", gamma=0.0)[:, 1], expected[:, 1].double())
    assert (lora("c", gamma=2.0)[:, 0] < expected[:, 0]).all()


def test_gamma_2_is_another_loss(tmp_path):
    found, expected = curve(sft(tmp_path / "a"), gamma=2.0), curve(sft(tmp_path / "b"))
    assert (found[:, 0] < expected[:, 0]).all()
    assert_close(found[0, 2:], expected[0, 2:].double())  # metrics before the first update


@pytest.mark.parametrize("gamma", [0.5, 2.0])
@pytest.mark.parametrize("confidence", [False, True])
def test_step_is_the_focal_loss_of_the_models_logits(tmp_path, gamma, confidence):
    trainer = sft(tmp_path)
    options = {"gamma": gamma} | ({"modulation": "confidence", "detach_modulation": True} if confidence else {})
    batch = trainer.data_collator([dict(row) for row in trainer.train_dataset])
    model = trainer.model.train()
    with use_focal_loss(trainer, **options):
        found = trainer.compute_loss(model, dict(batch), num_items_in_batch=50)
    slopes = torch.autograd.grad(found, list(model.parameters()))
    logits = model(**{name: batch[name] for name in ("input_ids", "attention_mask")}).logits[:, :-1]
    log_p = logits.log_softmax(-1).gather(-1, batch["labels"][:, 1:].clamp(min=0).unsqueeze(-1)).squeeze(-1)
    weight = log_p.exp().detach() ** gamma if confidence else (1 - log_p.exp()) ** gamma
    expected = -(weight * log_p)[batch["labels"][:, 1:] != -100].sum() / 50
    assert_close(found, expected.double())
    for ours, theirs in zip(slopes, torch.autograd.grad(expected, list(model.parameters())), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)


def test_dft_is_the_loss_of_trl(tmp_path):
    expected = curve(sft(tmp_path / "a", loss_type="dft"))
    found = curve(sft(tmp_path / "b"), gamma=1.0, modulation="confidence", detach_modulation=True)
    assert_close(found, expected.double(), torch.bfloat16)
    assert_close(found[:, 1], expected[:, 1].double())


def test_evaluation_and_undo(tmp_path):
    trainer = sft(tmp_path)
    own = trainer.evaluate()["eval_loss"]
    with use_focal_loss(trainer, 2.0):
        assert trainer.evaluate()["eval_loss"] < own
    assert trainer.evaluate()["eval_loss"] == own
    assert not any(module._forward_hooks for module in trainer.model.modules())


def test_the_callback_says_that_trl_computes_no_logits(tmp_path):
    trainer, callback = sft(tmp_path), CalibrationCallback()
    trainer.add_callback(callback)
    callback.on_init_end(None, None, None, model=trainer.model)
    with pytest.warns(UserWarning, match="no numbers for this evaluation: TRL's SFTTrainer computes no logits; "):
        assert "eval_ece" not in trainer.evaluate()


def test_a_target_without_doubt_has_loss_and_gradient_0(tmp_path):
    """Where p is 1 in float32, and where it is 0."""
    trainer = sft(tmp_path)
    log_probs = torch.tensor([[0.0, -1e-9, -200.0, 0.0]], requires_grad=True)

    class Certain(torch.nn.Module):
        def forward(self, **_):
            counts = torch.tensor([[True, True, True, False]])
            none = torch.zeros(1, 4)
            return trl.trainer.utils.FusedCausalLMOutput(
                log_probs=log_probs, entropy=none, is_top1=counts, label_mask=counts
            )

    batch = {"labels": torch.zeros(1, 5, dtype=torch.long), "attention_mask": torch.ones(1, 5)}
    for gamma in (0.5, 2.0):
        with use_focal_loss(trainer, gamma):
            loss = trainer.compute_loss(Certain(), dict(batch))
        assert_close(loss, torch.tensor(200 / 3, dtype=torch.float64))
        (slope,) = torch.autograd.grad(loss, log_probs)
        assert_close(slope, torch.tensor([[0, 0, -1 / 3, 0]], dtype=torch.float64))


def test_errors(tmp_path):
    trainer = sft(tmp_path)
    for options in ({"linear": True}, {"label_smoothing": 0.1}):
        with pytest.raises(ValueError, match="an SFTTrainer takes neither linear=True"):
            use_focal_loss(trainer, **options)
    with pytest.raises(ValueError, match=r"with loss_type='nll'.* got SFTTrainer with loss_type 'dft'"):
        use_focal_loss(sft(tmp_path, loss_type="dft"))
    model = language_model()
    with (
        use_focal_loss(model),
        pytest.raises(ValueError, match=r"TRL's trainers do not use the loss of the model.*use_focal_loss\(trainer"),
    ):
        sft(tmp_path, model).train()
