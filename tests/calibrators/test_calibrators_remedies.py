"""Errors of ``fit`` name a remedy that works."""

import numpy as np
import pytest
import torch

import focalkern as fk

LABELS = torch.arange(60) % 3
LOGITS = 2 * torch.eye(3)[(LABELS + (torch.arange(60) % 4 == 0)) % 3] - torch.linspace(0, 1, 180).view(60, 3)
IMAGES, MAPS = LOGITS.T.reshape(3, 3, 4, 5).swapaxes(0, 1), LABELS.view(3, 4, 5)
ONE_HOT = torch.eye(3, dtype=torch.int64)[LABELS]


@pytest.mark.parametrize("convert", [lambda tensor: tensor, torch.Tensor.numpy], ids=["torch", "numpy"])
@pytest.mark.parametrize(
    ("logits", "target", "words", "mend"),
    [
        (LOGITS, ONE_HOT, "; for one-hot rows pass target.argmax(1)", lambda z, y: (z, y.argmax(1))),
        (LOGITS, LABELS[:, None], "; pass target.squeeze(-1)", lambda z, y: (z, y.squeeze(-1))),
        (LOGITS.T, LABELS, "; logits must be [N, C]: pass logits.T", lambda z, y: (z.T, y)),
        (
            LOGITS.long(),
            LABELS,
            "; convert them with .float(), in NumPy with .astype('float32')",
            lambda z, y: (z.float() if isinstance(z, torch.Tensor) else z.astype("float32"), y),
        ),
        (LOGITS + 0j, LABELS, "complex64; complex numbers are not supported", lambda z, y: (z.real, y)),
        (LOGITS, LABELS[:7], "got [7]", lambda z, y: (z[:7], y)),
        (IMAGES, MAPS[:, None], "; pass target.squeeze(1)", lambda z, y: (z, y.squeeze(1))),
        (
            IMAGES.swapaxes(1, 2).swapaxes(2, 3),
            MAPS,
            "; classes must be dimension 1 of logits, not the last",
            lambda z, y: (z.swapaxes(2, 3).swapaxes(1, 2), y),
        ),
    ],
)
def test_the_remedy_works(convert, logits, target, words, mend):
    logits, target = convert(logits), convert(target)
    with pytest.raises((TypeError, ValueError)) as caught:
        fk.TemperatureScaling().fit(logits, target)
    assert str(caught.value).startswith("TemperatureScaling: ")
    assert str(caught.value).endswith(words)
    fk.TemperatureScaling(input_kind="logits").fit_quietly(*mend(logits, target))


def test_one_logit_per_row_has_no_transpose():
    with pytest.raises(ValueError, match=r"target must be \[N\] = \[5\], got \[2\]$"):
        fk.TemperatureScaling().fit(np.linspace(-1, 1, 5), [0, 1])
