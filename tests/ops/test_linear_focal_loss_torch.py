"""linear_focal_loss compared with torch's own; errors and modules."""

import collections
import copy
import warnings

import pytest
import torch
import torch.nn.functional as F
from conftest import assert_close
from linear_cases import C, D, derivatives, problem
from torch import nn

import focalkern as fk

pytestmark = [
    # torch's own decompositions still use torch.jit.script, which is deprecated.
    pytest.mark.filterwarnings("ignore:`torch.jit.script"),
    pytest.mark.usefixtures("one_thread", "chunks"),
]

# ---- torch's own samples ---------------------------------------------------------------------------------------------
TORCH_HAS_IT = hasattr(nn, "LinearCrossEntropyLoss")

needs_torch = pytest.mark.skipif(not TORCH_HAS_IT, reason="this torch has no LinearCrossEntropyLoss")


def torch_samples(kind, **options):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from torch.testing._internal import common_modules
    make = getattr(common_modules, f"module_{kind}_torch_nn_LinearCrossEntropyLoss")
    return make(None, "cpu", torch.float64, training=True, **options)


def of_torch(arguments, settings):
    """The arguments of LinearCrossEntropyLoss as those of LinearFocalLoss with gamma = 0."""
    settings = dict(settings)
    options = settings.pop("options", None)
    if settings.get("ignore_index", 0) is None:
        del settings["ignore_index"]
    return fk.LinearFocalLoss(*arguments, 0.0, chunk_rows=getattr(options, "batch_chunk_size", None), **settings)


@needs_torch
@pytest.mark.filterwarnings("ignore:linear_cross_entropy")
def test_every_sample_of_torch():
    count = 0
    for sample in torch_samples("inputs", requires_grad=True):
        arguments, settings = sample.constructor_input.args, sample.constructor_input.kwargs
        theirs = nn.LinearCrossEntropyLoss(*arguments, **settings)
        ours = of_torch(arguments, settings)
        ours.load_state_dict(theirs.state_dict())
        input, target = sample.forward_input.args
        results = []
        for module in (theirs, ours):
            x = input.detach().clone().requires_grad_()
            loss = module(x, target)
            loss_gradient = torch.linspace(1, 2, loss.numel(), dtype=loss.dtype).reshape(loss.shape)
            results.append((loss, *torch.autograd.grad(loss, (x, *module.parameters()), loss_gradient)))
        for found, expected in zip(results[1], results[0], strict=True):
            assert_close(found, expected)
        count += 1
    assert count > 300


@needs_torch
def test_every_error_sample_of_torch():
    from torch.testing._internal.common_modules import ModuleErrorEnum

    samples = list(torch_samples("error_inputs", requires_grad=False))
    assert len(samples) >= 5
    for sample in samples:
        arguments = sample.module_error_input.constructor_input
        if sample.error_on == ModuleErrorEnum.CONSTRUCTION_ERROR:
            with pytest.raises((TypeError, ValueError), match="LinearFocalLoss"):
                of_torch(arguments.args, arguments.kwargs)
            continue
        module = of_torch(arguments.args, arguments.kwargs)
        with pytest.raises((TypeError, ValueError), match=r"linear_focal_loss: (input|target)"):
            module(*sample.module_error_input.forward_input.args)


@needs_torch
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_gamma_0_is_torchs_chunked_linear_cross_entropy(reduction):
    x, w, b, target = problem()
    options = nn.LinearCrossEntropyOptions(batch_chunk_size=4)
    expected = F.linear_cross_entropy(x, w, target, linear_bias=b, reduction=reduction, options=options)
    found = fk.linear_focal_loss(x, w, target, 0.0, linear_bias=b, reduction=reduction, chunk_rows=4)
    assert_close(found, expected)
    for a, e in zip(derivatives(found, (x, w, b)), derivatives(expected, (x, w, b)), strict=True):
        assert_close(a, e)


# ---- errors ----------------------------------------------------------------------------------------------------------
GOOD = {"input": torch.zeros(4, 3), "linear_weight": torch.zeros(5, 3), "target": torch.zeros(4, dtype=torch.long)}


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"input": 1}, TypeError, "input must be a tensor, got int"),
        ({"input": torch.zeros(4, 3, dtype=torch.long)}, TypeError, "input must be float16, .* got torch.int64"),
        ({"input": torch.zeros(())}, ValueError, r"input must be \[D\], \[N, D\] or \[B, S, D\], got shape \[\]"),
        ({"input": torch.zeros(4, 2)}, ValueError, "same last dimension D, got 2 and 3"),
        ({"input": torch.zeros(4, 3).double()}, TypeError, "linear_weight must have the dtype of input"),
        ({"linear_weight": torch.zeros(3)}, ValueError, r"linear_weight must be \[C, D\], got shape \[3\]"),
        ({"linear_weight": torch.zeros(0, 3)}, ValueError, "at least one class"),
        ({"linear_bias": torch.zeros(4)}, ValueError, r"linear_bias must be \[C\] = \[5\], got \[4\]"),
        ({"linear_bias": torch.zeros(5).double()}, TypeError, "linear_bias must have the dtype of input"),
        ({"target": torch.zeros(3, dtype=torch.long)}, ValueError, r"labels must be \[N\] = \[4\], got \[3\]"),
        ({"target": torch.zeros(4, 4)}, ValueError, r"class probabilities must be \[N, C\] = \[4, 5\], got \[4, 4\]"),
        ({"target": torch.zeros(4, dtype=torch.bool)}, TypeError, "target must be int64, .* got torch.bool"),
        ({"target": torch.full((4,), 5)}, IndexError, r"target must be in \[0, 5\) or ignore_index, got 5 at row 0"),
        ({"gamma": "2"}, TypeError, "gamma must be a number, a tensor or a GammaTable, got str"),
        ({"gamma": float("nan")}, ValueError, "gamma must be finite, got nan"),
        ({"gamma": torch.zeros(4, dtype=torch.long)}, TypeError, "gamma must be a float"),
        ({"gamma": torch.zeros(3)}, ValueError, r"broadcastable to the unreduced loss \[4\], got \[3\]"),
        ({"weight": torch.zeros(4)}, ValueError, r"weight must be \[C\] = \[5\], got \[4\]"),
        ({"weight": torch.zeros(5, requires_grad=True)}, ValueError, "weight must not require grad"),
        ({"reduction": "max"}, ValueError, "reduction must be 'none', 'mean' or 'sum', got 'max'"),
        ({"label_smoothing": 2}, ValueError, r"label_smoothing must be in \[0, 1\], got 2"),
        ({"label_smoothing": "0"}, TypeError, "label_smoothing must be a number, got str"),
        ({"ignore_index": 1.5}, TypeError, "ignore_index must be an int, got 1.5"),
        ({"target": torch.zeros(4, 5), "ignore_index": 1}, ValueError, "ignore_index must be negative"),
        ({"detach_modulation": 1}, TypeError, "detach_modulation must be a bool, got int"),
        ({"chunk_rows": 0}, ValueError, "chunk_rows must be at least 1, got 0"),
        ({"chunk_rows": 1.5}, TypeError, "chunk_rows must be an int or None, got 1.5"),
        ({"softcap": 0}, ValueError, "softcap must be positive and finite, got 0"),
        ({"softcap": "30"}, TypeError, "softcap must be a number or None, got str"),
    ],
)
def test_errors_name_the_argument(change, error, message):
    with pytest.raises(error, match=f"^linear_focal_loss: .*{message}"):
        fk.linear_focal_loss(**{**GOOD, **change})


def test_a_steep_inverse_gamma_is_warned_about():
    with pytest.warns(UserWarning, match=r"linear_focal_loss: gamma = -4.0 is below -3.591"):
        fk.linear_focal_loss(**GOOD, gamma=-4.0)


# ---- modules ---------------------------------------------------------------------------------------------------------
def test_modules_equal_the_two_operations():
    x, _, _, target = problem()
    for module, plain in (
        (fk.LinearFocalLoss(D, C, 1.0, bias=True, softcap=2.0, dtype=torch.float64), fk.FocalLoss(1.0)),
        (fk.LinearFLSDLoss(D, C, dtype=torch.float64, label_smoothing=0.1), fk.FLSDLoss(label_smoothing=0.1)),
        (fk.LinearAdaFocalLoss(D, C, dtype=torch.float64, n_bins=4), fk.AdaFocalLoss(n_bins=4)),
    ):
        assert_close(module(x, target), plain(module.logits(x), target))
        copied = copy.deepcopy(module)
        copied.load_state_dict(module.state_dict())
        assert_close(copied(x, target), module(x, target))


def test_adafocal_follows_features():
    x, _, _, target = problem()
    module = fk.LinearAdaFocalLoss(D, C, dtype=torch.float64, n_bins=4, chunk_rows=5)
    plain = fk.AdaFocalLoss(n_bins=4)
    module.accumulate(x, target)
    plain.accumulate(module.logits(x), target)
    assert module.n_accumulated == plain.n_accumulated == int((target != -100).sum())
    assert torch.equal(module.update().bin_gammas, plain.update().bin_gammas)
    assert_close(module(x, target), plain(module.logits(x), target))
    with pytest.raises(ValueError, match=r"LinearAdaFocalLoss.accumulate: input must be \[..., D\] with D = 5"):
        module.accumulate(x[:, :4], target)
    far, broken = target.clone(), x.clone()
    far[12], broken[-1] = C, float("nan")
    with pytest.raises(IndexError, match=rf"LinearAdaFocalLoss.accumulate: target .* got {C} at row 12"):
        module.accumulate(x, far)
    with pytest.raises(ValueError, match=rf"^LinearAdaFocalLoss.accumulate: .* in valid row {len(x) - 1}$"):
        module.accumulate(broken, target.clamp(min=0))
    with pytest.raises(TypeError, match=r"input must have the dtype of the layer, torch.float64, got torch.float16"):
        module.accumulate(x.half(), target)
    assert module.n_accumulated == 0


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"in_features": 0}, ValueError, "in_features must be at least 1, got 0"),
        ({"num_classes": 2.5}, TypeError, "num_classes must be an int, got 2.5"),
        ({"chunk_rows": 0}, ValueError, "chunk_rows must be at least 1, got 0"),
        ({"softcap": -1}, ValueError, "softcap must be positive, got -1"),
        ({"weight": torch.ones(3)}, ValueError, r"weight must be \[C\] = \[4\], got \[3\]"),
        ({"out_features": "2"}, TypeError, "out_features must be a sequence of ints, got '2'"),
        ({"out_features": 2}, TypeError, "out_features must be a sequence of ints, got 2"),
    ],
)
def test_modules_check_their_arguments(change, error, message):
    with pytest.raises(error, match=f"^LinearFocalLoss: {message}"):
        fk.LinearFocalLoss(**{"in_features": 3, "num_classes": 4, **change})


def test_a_list_of_a_configuration_is_a_sequence():
    """Hydra's lists are no Python lists."""
    module = fk.LinearFocalLoss(3, 4, out_features=collections.UserList([2]))
    assert module.logits(torch.zeros(5, 3)).shape == (5, 4, 2)


def test_modules_show_themselves():
    module = fk.LinearFocalLoss(3, 4, 1.5, chunk_rows=8, softcap=30.0)
    assert "gamma=1.5, chunk_rows=8, softcap=30.0" in repr(module)
    assert "Linear(in_features=3, out_features=4, bias=False)" in repr(module)
