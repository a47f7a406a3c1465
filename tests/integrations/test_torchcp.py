"""TorchCP's conformal sets of a network behind a calibrator."""

import importlib.util
import sys
import types
import warnings

import pytest
import torch
from conftest import assert_close, peer

import focalkern as fk


@pytest.fixture
def torchcp(monkeypatch):
    """TorchCP, which imports torchsort for one of its losses; torchsort has no wheel and compiles CUDA code."""
    if importlib.util.find_spec("torchsort") is None:
        names = types.ModuleType("torchsort")
        names.soft_rank = names.soft_sort = None
        monkeypatch.setitem(sys.modules, "torchsort", names)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the libraries that it imports
        peer("torchcp")
        return peer("torchcp.classification.predictor"), peer("torchcp.classification.score")


def rows(network, n, generator):
    """Features, labels and an over-confident network."""
    x = torch.randn(n, 6, generator=generator)
    labels = torch.distributions.Categorical(logits=network(x).detach() / 3).sample()
    return x, labels


# SplitPredictor deprecates its temperature; a calibrator replaces it.
@pytest.mark.filterwarnings("ignore:The 'temperature' parameter is deprecated:DeprecationWarning")
def test_prediction_sets_of_a_calibrated_network(torchcp):
    predictor, score = torchcp
    generator = torch.Generator().manual_seed(0)
    network = torch.nn.Linear(6, 5)
    torch.nn.init.normal_(network.weight, std=2.0, generator=generator)
    torch.nn.init.zeros_(network.bias)
    fitted, conformal, test = (rows(network, 1000, generator) for _ in range(3))
    calibrator = fk.TemperatureScaling().fit(network(fitted[0]).detach(), fitted[1])
    model = torch.nn.Sequential(network, calibrator.as_module())
    # Its module returns log-probabilities, of which a softmax is the probabilities.
    sets = predictor.SplitPredictor(score.LAC(), model, alpha=0.1)
    sets.calibrate([conformal])
    with torch.no_grad():
        probs = calibrator.predict_proba(network(test[0]))
    assert_close(torch.softmax(model(test[0]), -1), probs)
    members = sets.predict(test[0])
    assert torch.equal(members.bool(), 1 - probs.float() <= sets.q_hat)
    coverage = members[torch.arange(1000), test[1]].float().mean()
    assert 0.86 < coverage < 0.94
