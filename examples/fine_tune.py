"""Fine-tune a language model of transformers with a focal loss or with DFT, head and loss in one operator.

    python examples/fine_tune.py --loss dft

Copy the `with` block: `use_focal_loss` sets the loss of a model, and restores the model's own loss at the end of the
block. With TRL make the trainer first: `with use_focal_loss(trainer, gamma=1.0): trainer.train()`.
`CalibrationCallback` adds ECE, NLL and the best temperature to each evaluation. The model is tiny and starts from
random weights: nothing is downloaded.
"""

import argparse
import tempfile

import torch
import transformers

from focalkern.integrations.transformers import CalibrationCallback, use_focal_loss

VOCABULARY, LENGTH = 64, 16
LOSSES = {
    "cross-entropy": {"gamma": 0.0},
    "focal": {"gamma": 1.0},
    "dft": {"gamma": 1.0, "modulation": "confidence", "detach_modulation": True},  # TRL's loss_type="dft"
}


def sentences(n, seed):
    """Token rows in which the next token follows from the last; one token in ten is random."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(VOCABULARY, (n, LENGTH), generator=generator)
    for i in range(1, LENGTH):
        follows = torch.rand(n, generator=generator) < 0.9
        tokens[:, i] = torch.where(follows, (tokens[:, i - 1] * 5 + 1) % VOCABULARY, tokens[:, i])
    return [{"input_ids": row, "labels": row} for row in tokens]


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--loss", choices=LOSSES, default="focal")
    parser.add_argument("--steps", type=int, default=200)
    chosen = parser.parse_args(arguments)
    transformers.set_seed(0)
    model = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=1,
            num_attention_heads=2,
        )
    )
    with tempfile.TemporaryDirectory() as folder, use_focal_loss(model, linear=True, **LOSSES[chosen.loss]):
        trainer = transformers.Trainer(
            model=model,
            args=transformers.TrainingArguments(
                folder,
                max_steps=chosen.steps,
                learning_rate=1e-2,
                report_to=[],
                disable_tqdm=True,
                logging_strategy="no",
                save_strategy="no",
                use_cpu=not torch.cuda.is_available(),
            ),
            train_dataset=sentences(512, seed=1),
            eval_dataset=sentences(128, seed=2),
            callbacks=[CalibrationCallback()],
        )
        trainer.remove_callback(transformers.PrinterCallback)
        before = trainer.evaluate()
        trainer.train()
        after = trainer.evaluate()
    for name in ("nll", "ece", "temperature"):
        print(f"{name:12} {before[f'eval_{name}']:10.3f} -> {after[f'eval_{name}']:.3f}")


if __name__ == "__main__":
    main()
