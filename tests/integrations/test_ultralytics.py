"""A focal loss in ultralytics' classifiers and detectors, as docs/howto/migrate.md says."""

import copy

import numpy as np
import pytest
import torch
from conftest import assert_close, peer

import focalkern as fk


@pytest.fixture
def tasks(tmp_path, monkeypatch):
    """Networks from their descriptions, without weights. Settings go into an empty folder.

    The import changes the environment and the print options of numpy and torch. Later tests must not see that.
    """
    monkeypatch.setenv("YOLO_CONFIG_DIR", str(tmp_path))
    monkeypatch.setenv("YOLO_OFFLINE", "true")
    monkeypatch.setenv("YOLO_VERBOSE", "false")
    for name in ("KINETO_LOG_LEVEL", "NUMEXPR_MAX_THREADS", "TF_CPP_MIN_LOG_LEVEL", "TORCH_CPP_LOG_LEVEL"):
        monkeypatch.setenv(name, "1")
    options = vars(copy.copy(torch._tensor_str.PRINT_OPTS))
    with np.printoptions():
        module = peer("ultralytics.nn.tasks")
    torch.set_printoptions(**options)
    return module


def classifier_loss(gamma):
    """A criterion with ultralytics' interface: from predictions and batch to the loss and the logged values."""

    def criterion(predictions, batch):
        loss = fk.focal_loss(predictions, batch["cls"], gamma)
        return loss, {"loss": loss.detach()}

    return criterion


def test_classifier(tasks):
    model = tasks.ClassificationModel("yolov8n-cls.yaml", nc=4, verbose=False).double().train()
    batch = {"img": torch.randn(2, 3, 32, 32, dtype=torch.float64), "cls": torch.tensor([1, 3])}
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    expected, _ = model(batch)  # with its own cross-entropy
    model.criterion = classifier_loss(0.0)
    found, _ = model(batch)
    assert_close(found, expected)
    head = model.model[-1].linear.weight
    assert_close(*(torch.autograd.grad(loss, head)[0] for loss in (found, expected)))
    model.criterion = classifier_loss(2.0)
    assert model(batch)[0] < expected


def test_detector(tasks):
    """Its classification loss is a binary cross-entropy with soft targets: quality_focal_loss with beta = 0."""
    from types import SimpleNamespace

    model = tasks.DetectionModel("yolov8n.yaml", nc=3, verbose=False).train()
    model.args = SimpleNamespace(box=7.5, cls=0.5, dfl=1.5)
    batch = {
        "img": torch.rand(2, 3, 64, 64),
        "batch_idx": torch.tensor([0.0, 1.0]),
        "cls": torch.tensor([[0.0], [2.0]]),
        "bboxes": torch.tensor([[0.5, 0.5, 0.4, 0.4], [0.4, 0.6, 0.3, 0.5]]),
    }
    expected, _ = model.loss(batch)  # creates the criterion, whose binary cross-entropy is ``bce``
    for beta in (0.0, 2.0):
        model.criterion.bce = lambda scores, targets, beta=beta: fk.quality_focal_loss(
            scores, targets, beta, reduction="none"
        )
        found, _ = model.loss(batch)
        if beta == 0:
            assert_close(found, expected)
        else:
            assert found[1] < expected[1]
            assert_close(found[::2], expected[::2])  # the losses of the boxes


@pytest.mark.parametrize(("gamma", "alpha"), [(1.5, 0.25), (2.0, 0.6), (0.0, 0.0)])
def test_its_own_focal_loss(tasks, gamma, alpha):
    loss = peer("ultralytics.utils.loss")
    z = torch.randn(5, 3, dtype=torch.float64, requires_grad=True)
    target = torch.randint(2, (5, 3)).double()
    expected = loss.FocalLoss(gamma, alpha)(z, target)
    found = fk.sigmoid_focal_loss(z, target, gamma, alpha or None, "sum") / z.shape[1]
    tolerance = torch.float32  # alpha is a float32 tensor there
    assert_close(found, expected, tolerance)
    assert_close(torch.autograd.grad(found, z)[0], torch.autograd.grad(expected, z)[0], tolerance)
