"""The losses in the trainers of transformers and Lightning, compared with a plain training loop."""

import copy

import pytest
import torch
import torch.nn.functional as F
from conftest import assert_close, peer
from training_cases import assert_same_parameters, network, samples

import focalkern as fk

# ---- Hugging Face ---------------------------------------------------------------------------------------------------


def causal_model(transformers):
    config = transformers.LlamaConfig(
        vocab_size=17,
        hidden_size=8,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=16,
        pad_token_id=0,
    )
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(config)


def token_rows():
    generator = torch.Generator().manual_seed(2)
    rows = []
    for ignored in (0, 7, 3, 1, 5, 0, 2, 6):
        tokens = torch.randint(1, 17, (10,), generator=generator)
        labels = tokens.clone()
        labels[:ignored] = -100
        rows.append({"input_ids": tokens, "labels": labels})
    return rows


def trainer_arguments(transformers, folder, **options):
    return transformers.TrainingArguments(
        output_dir=str(folder),
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        max_steps=3,
        optim="sgd",
        learning_rate=0.1,
        lr_scheduler_type="constant",
        max_grad_norm=0.0,
        report_to=[],
        use_cpu=True,
        save_strategy="no",
        disable_tqdm=True,
        remove_unused_columns=False,
        train_sampling_strategy="sequential",
        **options,
    )


def test_hugging_face_trainer_of_a_causal_model(tmp_path):
    transformers = peer("transformers")
    peer("accelerate")

    def next_token_focal_loss(outputs, labels, num_items_in_batch=None):
        logits = outputs.logits.flatten(0, 1)
        target = F.pad(labels[:, 1:], (0, 1), value=-100).flatten()
        if num_items_in_batch is None:  # evaluation
            return fk.focal_loss(logits, target, gamma=2.0)
        return fk.focal_loss(logits, target, gamma=2.0, reduction="sum") / num_items_in_batch

    model, rows = causal_model(transformers), token_rows()
    expected = copy.deepcopy(model)
    trainer = transformers.Trainer(
        model=model,
        args=trainer_arguments(transformers, tmp_path),
        train_dataset=rows,
        eval_dataset=rows,
        compute_loss_func=next_token_focal_loss,
    )
    trainer.train()

    # The same three steps in a plain loop, each over the four rows together.
    optimizer = torch.optim.SGD(expected.parameters(), lr=0.1)
    for first in (0, 4, 0):
        batch = rows[first : first + 4]
        tokens = torch.stack([row["input_ids"] for row in batch])
        labels = torch.stack([row["labels"] for row in batch])
        logits = expected(input_ids=tokens).logits
        loss = fk.focal_loss(logits[:, :-1].transpose(1, 2), labels[:, 1:], gamma=2.0)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert_same_parameters(model, expected)
    assert trainer.evaluate()["eval_loss"] > 0


def test_hugging_face_trainer_of_a_classifier(tmp_path):
    transformers = peer("transformers")
    peer("accelerate")
    config = transformers.BertConfig(
        vocab_size=17,
        hidden_size=8,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_labels=3,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    torch.manual_seed(0)
    model = transformers.BertForSequenceClassification(config)
    expected = copy.deepcopy(model)
    rows = [{"input_ids": row["input_ids"], "labels": number % 3} for number, row in enumerate(token_rows())]
    criterion = fk.FLSDLoss(reduction="sum")

    def focal_loss(outputs, labels, num_items_in_batch=None):
        loss = criterion(outputs.logits, labels)
        return loss / (len(labels) if num_items_in_batch is None else num_items_in_batch)

    transformers.Trainer(
        model=model,
        args=trainer_arguments(transformers, tmp_path),
        train_dataset=rows,
        compute_loss_func=focal_loss,
    ).train()

    optimizer = torch.optim.SGD(expected.parameters(), lr=0.1)
    for first in (0, 4, 0):
        batch = rows[first : first + 4]
        logits = expected(input_ids=torch.stack([row["input_ids"] for row in batch])).logits
        fk.FLSDLoss()(logits, torch.tensor([row["labels"] for row in batch])).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert_same_parameters(model, expected)


@pytest.mark.parametrize("make", [fk.FLSDLoss, lambda: fk.AdaFocalLoss(n_bins=5)])
def test_from_pretrained_keeps_the_table_of_a_loss_in_the_model(make, tmp_path):
    """It fills buffers that the checkpoint lacks with uninitialised memory. No checkpoint has the table of FLSDLoss."""
    transformers = peer("transformers")
    x, y = samples()

    class Model(transformers.PreTrainedModel):
        config_class = transformers.PretrainedConfig
        make_loss = torch.nn.CrossEntropyLoss

        def __init__(self, config):
            super().__init__(config)
            self.linear = torch.nn.Linear(6, 4)
            self.criterion = self.make_loss()
            self.post_init()

    Model(transformers.PretrainedConfig()).save_pretrained(tmp_path / "backbone")
    Model.make_loss = staticmethod(make)
    model = Model.from_pretrained(tmp_path / "backbone")
    logits = model.linear(x)
    assert torch.equal(model.criterion(logits, y), make()(logits, y))
    if isinstance(model.criterion, fk.AdaFocalLoss):
        model.criterion.update(logits, y)
    model.save_pretrained(tmp_path / "trained")
    again = Model.from_pretrained(tmp_path / "trained")
    assert torch.equal(again.criterion(logits, y), model.criterion(logits, y))
    assert getattr(again.criterion, "n_accumulated", 0) == 0
    assert len(getattr(again.criterion, "history", [])) == len(getattr(model.criterion, "history", []))


# ---- Lightning ------------------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:.*LeafSpec.*is deprecated:FutureWarning")
def test_lightning_with_a_loss_that_adapts(tmp_path):
    lightning = peer("lightning")
    x, y = samples()
    train, validation = (x[:32], y[:32]), (x[32:], y[32:])
    discarded = []

    class Classifier(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.model = network()
            self.criterion = fk.AdaFocalLoss(n_bins=5)

        def training_step(self, batch, _):
            x, y = batch
            return self.criterion(self.model(x), y)

        def validation_step(self, batch, _):
            x, y = batch
            self.criterion.accumulate(self.model(x), y)

        def on_validation_epoch_end(self):
            if self.trainer.state.fn == "fit" and not self.trainer.sanity_checking:
                self.criterion.update()
            else:
                discarded.append(self.criterion.n_accumulated)
                self.criterion.reset()

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.1)

    def loader(pair):
        return torch.utils.data.DataLoader(torch.utils.data.TensorDataset(*pair), batch_size=16)

    module = Classifier()
    trainer = lightning.Trainer(
        max_epochs=3,
        accelerator="cpu",
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=tmp_path,
    )
    trainer.fit(module, loader(train), loader(validation))
    trainer.validate(module, loader(validation), verbose=False)
    assert discarded == [16, 16]  # before the first epoch, and after the last

    expected, criterion = network(), fk.AdaFocalLoss(n_bins=5)
    optimizer = torch.optim.SGD(expected.parameters(), lr=0.1)
    for _ in range(3):
        for rows in torch.arange(32).split(16):
            criterion(expected(train[0][rows]), train[1][rows]).backward()
            optimizer.step()
            optimizer.zero_grad()
        criterion.update(expected(validation[0]), validation[1])
    assert_same_parameters(module.model, expected)
    assert_close(module.criterion.bin_gammas, criterion.bin_gammas, torch.float32)
    assert len(module.criterion.history) == 3

    # The schedule is in the checkpoint.
    restored = Classifier.load_from_checkpoint(trainer.checkpoint_callback.best_model_path)
    assert torch.equal(restored.criterion.bin_gammas, module.criterion.bin_gammas)
    assert len(restored.criterion.history) == 3
