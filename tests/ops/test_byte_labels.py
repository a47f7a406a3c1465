"""uint8 labels and ignore_index = -100: the class 156, which is -100 modulo 256, counts."""

import pytest
import torch
from conftest import assert_close, peer

import focalkern as fk
from focalkern import metrics, reference

N, C = 12, 160
LABELS = torch.tensor([156, 156, 3, 0, 159, 156, 28, 155, 157, 156, 1, 2])


def linear(logits, target, **options):
    return fk.linear_focal_loss(logits, torch.eye(C, device=logits.device), target, **options)


CALLS = {
    "focal_loss": fk.focal_loss,
    "smoothing": lambda z, y: fk.focal_loss(z, y, label_smoothing=0.1),
    "z-loss": lambda z, y: fk.focal_loss(z, y, z_loss=0.1),
    "statistics": lambda z, y: fk.focal_loss(z, y, return_stats=True).stats.log_p,
    "linear": linear,
    "linear, in chunks": lambda z, y: linear(z, y, chunk_rows=5, reduction="sum"),
    "linear, z-loss": lambda z, y: linear(z, y, z_loss=0.1),
    "linear, statistics": lambda z, y: linear(z, y, return_stats=True).stats.log_p,
    "properized": fk.properized_focal_loss,
    "reference": reference.focal_loss,
    "reference of the grid": lambda z, y: reference.calibration_grid(z, y, [1.0], [1.0])["nll"],
    "dual": fk.DualFocalLoss(),
    "Brier": fk.BrierLoss(),
    "MMCE": fk.MMCELoss(),
    "AdaFocal": fk.AdaFocalLoss(),
    "sigmoid": fk.sigmoid_focal_loss,
    "scores": lambda z, y: fk.quality_focal_loss(z, (y, torch.ones(N, device=z.device))),
    "grid": lambda z, y: fk.calibration_grid(z, y, [1.0], [1.0]).tables["nll"],
    "calibrator": lambda z, y: fk.TemperatureScaling().fit_quietly(z, y, ignore_index=-100).predict_proba(z),
    "metric": lambda z, y: metrics.nll(z.log_softmax(-1), y, log=True, ignore_index=-100),
    "per image": lambda z, y: metrics.nll(
        z.log_softmax(-1).view(3, 4, C).mT, y.view(3, 4), log=True, ignore_index=-100, per="image"
    ),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_byte_is_compared_as_a_number(name, device):
    logits, target = (2 * torch.randn(N, C)).to(device), LABELS.to(device)
    assert_close(CALLS[name](logits, target.to(torch.uint8)), CALLS[name](logits, target))


def test_the_adaptive_loss_measures_the_row(device):
    loss = fk.AdaFocalLoss().to(device)
    loss.accumulate(torch.randn(N, C, device=device), LABELS.to(device, torch.uint8))
    assert loss.n_accumulated == N


def test_the_metric_of_torchmetrics_counts_the_row():
    peer("torchmetrics")
    integration = pytest.importorskip("focalkern.integrations.torchmetrics", exc_type=ImportError)
    metric = integration.NegativeLogLikelihood(input_kind="logits", ignore_index=-100)
    metric.update(torch.randn(N, C), LABELS.to(torch.uint8))
    assert int(metric.n_samples) == N
