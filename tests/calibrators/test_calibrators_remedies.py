"""Errors of ``fit`` name a remedy that works."""

import re

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
        (
            IMAGES[0],
            MAPS[0],
            "must be [N, d1] = [3, 5], got [4, 5]; for one image [C, d1, ...] pass logits[None] and target[None]",
            lambda z, y: (z[None], y[None]),
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


@pytest.mark.parametrize("convert", [lambda tensor: tensor, torch.Tensor.numpy], ids=["torch", "numpy"])
@pytest.mark.parametrize("method", ["predict_proba", "predict_log_proba", "predict", "changed"])
@pytest.mark.parametrize(
    ("pixels", "logits", "words"),
    [
        (True, IMAGES[0], " in dimension 1, got shape [3, 4, 5]; for one image [C, d1, ...] pass logits[None]"),
        (True, IMAGES.permute(0, 2, 3, 1), " in dimension 1, got shape [3, 4, 5, 3]"),  # N = C
        (
            True,
            IMAGES[:2].permute(0, 2, 3, 1),
            " in dimension 1, got shape [2, 4, 5, 3]; move dimension 3 to dimension 1",
        ),
        (True, LOGITS.T, ", got shape [3, 60]; move dimension 0 to the end"),
        (True, torch.zeros(2, 7, 5), " in dimension 1, got shape [2, 7, 5]"),
        (False, IMAGES[0], ", got shape [3, 4, 5]; move dimension 0 to the end"),
        (False, IMAGES[:2], ", got shape [2, 3, 4, 5]; move dimension 1 to the end"),
        (False, torch.zeros(2, 7), ", got shape [2, 7]"),
    ],
)
def test_classes_in_another_dimension(convert, method, pixels, logits, words):
    fitted = fk.TemperatureScaling().fit_quietly(*((IMAGES, MAPS) if pixels else (LOGITS, LABELS)))
    expected = f"TemperatureScaling: logits must have the 3 classes of fit{words}"
    with pytest.raises(ValueError, match=f"^{re.escape(expected)}$"):
        getattr(fitted, method)(convert(logits))


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_the_module_has_the_error_of_its_calibrator(compiled):
    fitted = fk.TemperatureScaling().fit_quietly(IMAGES, MAPS)
    module = fitted.as_module()
    torch.compiler.reset()
    called = torch.compile(module, backend="aot_eager") if compiled else module
    for logits in (IMAGES[0], IMAGES[:2].permute(0, 2, 3, 1), LOGITS.T, torch.zeros(2, 7)):
        with pytest.raises(ValueError, match="must have the 3 classes of fit") as expected:
            fitted.predict_log_proba(logits)
        words = (
            str(expected.value).replace("TemperatureScaling: logits", "ClassAxis: input").replace("logits[", "input[")
        )
        with pytest.raises(ValueError, match=f"^{re.escape(words)}$"):
            called(logits)
    for logits in (IMAGES, IMAGES[:1], LOGITS, LOGITS[0]):
        assert torch.equal(called(logits), fitted.predict_log_proba(logits))


def test_exports_of_pixels_leave_the_other_dimensions_open():
    module = fk.TemperatureScaling().fit_quietly(IMAGES, MAPS).as_module()
    with pytest.raises(ValueError, match=r"; for one image \[C, d1, \.\.\.\] pass input\[None\]$"):
        torch.export.export(module, (IMAGES[0],))
    batch, height, width = (torch.export.Dim(name) for name in ("batch", "height", "width"))
    exported = torch.export.export(module, (IMAGES,), dynamic_shapes=({0: batch, 2: height, 3: width},)).module()
    assert torch.equal(exported(IMAGES[:2, :, :3, :4]), module(IMAGES[:2, :, :3, :4]))
