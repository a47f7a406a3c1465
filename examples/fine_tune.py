"""Fine-tune a language model of transformers with a focal loss, and measure its calibration.

    python examples/fine_tune.py

Copy the `with` line and the callback. `linear=True` fuses the output head with the loss. With TRL make the trainer
first: `with use_focal_loss(trainer, gamma=1.0): trainer.train()`. The model is tiny: nothing is downloaded.
"""

import torch
import transformers

from focalkern.integrations.transformers import CalibrationCallback, use_focal_loss

transformers.set_seed(0)
tokens = (torch.randint(64, (640, 1)) + torch.arange(16)) % 64  # sentences that count, with errors
tokens = torch.where(torch.rand(tokens.shape) < 0.1, torch.randint(64, tokens.shape), tokens)
rows = [{"input_ids": row, "labels": row} for row in tokens]
config = transformers.LlamaConfig(
    vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2
)
model = transformers.LlamaForCausalLM(config)

with use_focal_loss(model, gamma=1.0, linear=True):
    trainer = transformers.Trainer(
        model,
        transformers.TrainingArguments("out", max_steps=50, learning_rate=1e-2, report_to=[], save_strategy="no"),
        train_dataset=rows[:512],
        eval_dataset=rows[512:],
        callbacks=[CalibrationCallback()],
    )
    before = trainer.evaluate()
    trainer.train()
    after = trainer.evaluate()
for name in ("nll", "ece", "temperature"):
    print(f"{name:12} {before[f'eval_{name}']:10.3f} -> {after[f'eval_{name}']:.3f}")
