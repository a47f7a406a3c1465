"""The losses inside the loops of the page "Put a loss into your training loop", run on networks of a few numbers.

Most tests train the same network twice, with the recipe and with a plain loop, and require equal final parameters.
"""

import copy

import pytest
import torch
import torch.nn.functional as F
from conftest import assert_close
from torch import nn
from training_cases import assert_same_parameters, network, samples

import focalkern as fk

# Every loss that can replace nn.CrossEntropyLoss; a class that may hold gamma in two ways appears twice.
LOSSES = {
    "focal": lambda: fk.FocalLoss(2.0),
    "focal, gamma in a buffer": lambda: fk.FocalLoss(torch.tensor(2.0)),
    "focal, table": lambda: fk.FocalLoss(fk.GammaTable([0.0, 0.3, 1.0], [4.0, 1.0])),
    "inverse": lambda: fk.InverseFocalLoss(2.0),
    "FLSD": fk.FLSDLoss,
    "AdaFocal": fk.AdaFocalLoss,
    "dual": lambda: fk.DualFocalLoss(2.0),
    "Brier": fk.BrierLoss,
    "MMCE": fk.MMCELoss,
    "norm": lambda: fk.LogitNormPenalty(0.001),
}


# ---- The plain loop -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", LOSSES)
def test_plain_loop(name):
    model, criterion = network(), LOSSES[name]()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    x, y = samples()
    first = criterion(model(x), y).item()
    for _ in range(25):
        for rows in torch.randperm(len(x)).split(16):
            loss = criterion(model(x[rows]), y[rows])
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        if isinstance(criterion, fk.AdaFocalLoss):
            criterion.update(model(x), y)
    if not isinstance(criterion, fk.AdaFocalLoss):  # its scale changes with its gammas
        assert criterion(model(x), y).item() < 0.5 * first
    assert (model(x).argmax(1) == y).double().mean() > 0.9


# ---- torch.compile --------------------------------------------------------------------------------------------------


@pytest.fixture
def dynamo():
    torch._dynamo.reset()
    yield torch._dynamo
    torch._dynamo.reset()


def other_gammas(criterion, step):
    """A schedule or an update between steps: new values in the same memory."""
    if isinstance(criterion, fk.AdaFocalLoss):
        torch.manual_seed(step)
        criterion.update(3 * torch.randn(64, 4), torch.randint(4, (64,)))
    elif isinstance(criterion, fk.FocalLoss):
        for values in (criterion.gamma, criterion.__dict__["_buffers"].get("gammas")):
            if isinstance(values, torch.Tensor):
                values.add_(0.25)


@pytest.mark.parametrize("name", ["focal, gamma in a buffer", "focal, table", "AdaFocal", "dual", "MMCE"])
def test_compiled_step_is_one_graph_and_stays_it(name, dynamo):
    # Forward pass, loss, gradient and update in one graph, which torch supports for autograd.grad.
    x, y = samples()
    models, losses = (network(), network()), []
    criteria = (LOSSES[name](), LOSSES[name]())

    def step(model, criterion):
        loss = criterion(model(x), y)
        parameters = tuple(model.parameters())
        gradient = torch.autograd.grad(loss, parameters)
        with torch.no_grad():
            for parameter, grad in zip(parameters, gradient, strict=True):
                parameter -= 0.1 * grad
        return loss.detach()

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    with dynamo.config.patch(trace_autograd_ops=True):
        losses.append((compiled(models[0], criteria[0]), step(models[1], criteria[1])))
        with dynamo.config.patch(error_on_recompile=True):
            for number in range(4):
                for criterion in criteria:
                    other_gammas(criterion, number)
                losses.append((compiled(models[0], criteria[0]), step(models[1], criteria[1])))
    for actual, expected in losses:
        assert_close(actual, expected)
    assert_same_parameters(*models)
    assert not torch.equal(models[0][0].weight, network()[0].weight)


# torch's own optimizers and decompositions still use torch.jit.script, which is deprecated.
@pytest.mark.filterwarnings(r"ignore:.*torch\.jit\.script")
def test_compiled_loop_breaks_where_that_of_cross_entropy_does(dynamo):
    # backward() and an optimizer break a graph anyway; the loss must add no break.
    x, y = samples()
    breaks, parameters = [], []
    for criterion in (nn.CrossEntropyLoss(), fk.FocalLoss(0.0)):
        dynamo.reset()
        dynamo.utils.counters.clear()
        model = network()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def step(x, y, model=model, optimizer=optimizer, criterion=criterion):
            criterion(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()

        compiled = torch.compile(step, backend="aot_eager")
        for _ in range(2):
            compiled(x, y)
        breaks.append(sum(dynamo.utils.counters["graph_break"].values()))
        parameters.append(model)
    assert breaks[0] == breaks[1]
    assert_same_parameters(*parameters)


# ---- Half precision -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast(name, dtype):
    model, criterion = network(), LOSSES[name]()
    x, y = samples()
    with torch.autocast("cpu", dtype=dtype):
        logits = model(x)
        assert logits.dtype == dtype
        logits.retain_grad()
        loss = criterion(logits, y)
    assert loss.dtype == torch.float32
    loss.backward()
    exact = logits.detach().double().requires_grad_()
    expected = criterion(exact, y)
    expected.backward()
    # The loss is computed in float32, and the gradient is rounded once, to the dtype of the logits.
    assert_close(loss, expected)
    assert logits.grad.dtype == dtype
    assert_close(logits.grad, exact.grad)
    assert all(parameter.grad.dtype == torch.float32 for parameter in model.parameters())


def underflowing_problem():
    """Many samples with high confidence: the gradient of each logit is below the smallest float16."""
    model = network(inputs=6, classes=4)
    with torch.no_grad():
        model[2].weight.mul_(20)
    x, _ = samples(2048)
    return model, x, model(x).argmax(1)


def parameter_gradient(model):
    return torch.cat([parameter.grad.flatten().double() for parameter in model.parameters()])


def test_grad_scaler_keeps_what_float16_loses():
    model, x, y = underflowing_problem()
    sure = model(x).softmax(1).amax(1) > 0.99
    x, y = x[sure], y[sure]
    criterion = fk.FocalLoss(1.0)
    exact = copy.deepcopy(model).double()
    with torch.autocast("cpu", dtype=torch.float16):
        # The gradient in float32, for the same logits as those of the half-precision network.
        half = copy.deepcopy(model)
        logits = half(x)
    exact_logits = logits.detach().double().requires_grad_()
    criterion(exact_logits, y).backward()
    exact(x.double()).backward(exact_logits.grad)
    expected = parameter_gradient(exact)

    errors = {}
    for scale in (1.0, 2.0**16):
        scaler = torch.amp.GradScaler("cpu", init_scale=scale)
        half.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16):
            loss = criterion(half(x), y)
        scaler.scale(loss).backward()
        optimizer = torch.optim.SGD(half.parameters(), lr=0.1)
        scaler.unscale_(optimizer)
        errors[scale] = (parameter_gradient(half) - expected).norm() / expected.norm()
    assert errors[1.0] > 0.1
    assert errors[2.0**16] < 0.01


def test_grad_scaler_sees_an_overflow_and_skips_the_step():
    model, criterion = network(), fk.FocalLoss(2.0)
    x, y = samples()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**40)
    before = copy.deepcopy(model)
    scales = []
    for _ in range(40):
        with torch.autocast("cpu", dtype=torch.float16):
            loss = criterion(model(x), y)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        scales.append(scaler.get_scale())
        if len(scales) == 1:
            assert_same_parameters(model, before)  # 2^40 overflows float16: no step
    assert scales[0] == 2.0**39
    assert 1.0 < scales[-1] < 2.0**30  # found a scale that fits,
    assert scales[-1] == scales[-2]
    assert not torch.equal(model[0].weight, before[0].weight)  # and trained with it


def test_one_logit_per_class_compiles_and_autocasts(dynamo):
    model, criterion = network(), fk.SigmoidFocalLoss(1.5)
    x, target = samples()[0], torch.randint(2, (48, 4))

    def forward(x, target):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return criterion(model(x), target)

    gradients = []
    for function in (forward, torch.compile(forward, fullgraph=True, backend="aot_eager")):
        model.zero_grad()
        loss = function(x, target)
        assert loss.dtype == torch.float32
        loss.backward()
        gradients.append(parameter_gradient(model))
    assert_close(gradients[1], gradients[0], torch.bfloat16)


# ---- Gradient accumulation ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("name", ["focal", "FLSD", "Brier"])
def test_gradient_accumulation_is_the_whole_batch(name, weighted):
    weight = torch.tensor([0.5, 1.0, 2.0, 0.25]) if weighted else None
    kinds = {"focal": (fk.FocalLoss, {"gamma": 2.0}), "FLSD": (fk.FLSDLoss, {}), "Brier": (fk.BrierLoss, {})}
    make, options = kinds[name]
    x, y = samples()
    y[torch.tensor([0, 1, 2, 3, 4, 5, 6, 7, 20, 40])] = -100  # micro batches with different numbers of counting rows
    whole = network()
    make(weight=weight, **options)(whole(x), y).backward()

    accumulated, criterion = network(), make(weight=weight, reduction="sum", **options)
    counted = y[y != -100]
    count = len(counted) if weight is None else weight[counted].sum()
    means = network()
    for rows in torch.arange(len(x)).split(16):
        (criterion(accumulated(x[rows]), y[rows]) / count).backward()
        (make(weight=weight, **options)(means(x[rows]), y[rows]) / 3).backward()
    assert_close(parameter_gradient(accumulated), parameter_gradient(whole), torch.float32)
    # The mean of the micro batches' means is another value.
    assert (parameter_gradient(means) - parameter_gradient(whole)).abs().max() > 1e-3


# ---- Per-pixel segmentation -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
def test_segmentation(name, memory_format):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 4, 1)).to(memory_format=memory_format)
    images = torch.randn(2, 3, 6, 5).contiguous(memory_format=memory_format)
    labels = torch.randint(4, (2, 6, 5))
    labels[:, 0] = 255
    criterion = LOSSES[name]()
    criterion.ignore_index = 255
    logits = model(images)
    assert logits.is_contiguous(memory_format=memory_format)
    logits.retain_grad()
    loss = criterion(logits, labels)
    loss.backward()
    # A pixel is a sample: the same loss as over a list of pixels.
    listed = logits.detach().movedim(1, -1).reshape(-1, 4).contiguous().requires_grad_()
    expected = criterion(listed, labels.flatten())
    expected.backward()
    assert_close(loss, expected)
    assert_close(logits.grad, listed.grad.reshape(2, 6, 5, 4).movedim(-1, 1))
    assert logits.grad[:, :, 0].eq(0).all()
    assert all(parameter.grad.abs().max() > 0 for parameter in model.parameters())


# ---- Next token -----------------------------------------------------------------------------------------------------


def next_token_loss(criterion, logits, labels):
    """The loss of the page: it shifts the labels, because slicing the logits would copy them."""
    shifted = F.pad(labels[:, 1:], (0, 1), value=-100)
    return criterion(logits.flatten(0, 1), shifted.flatten())


@pytest.mark.parametrize("name", LOSSES)
def test_next_token(name):
    criterion = LOSSES[name]()
    logits = torch.randn(3, 7, 11, requires_grad=True)
    labels = torch.randint(11, (3, 7))
    labels[0, :4] = -100  # a prompt
    labels[2, 5:] = -100  # padding
    loss = next_token_loss(criterion, logits, labels)
    loss.backward()
    # Position s predicts token s + 1, in the layout (B, V, S - 1) of cross-entropy.
    expected = criterion(logits[:, :-1].transpose(1, 2), labels[:, 1:])
    assert_close(loss, expected)
    (expected_grad,) = torch.autograd.grad(expected, logits)
    assert_close(logits.grad, expected_grad)
    assert logits.grad[:, -1].eq(0).all()
    assert logits.grad[0, :3].eq(0).all()
    assert logits.grad[2, 4:].eq(0).all()
    assert logits.grad[1, :-1].ne(0).any(-1).all()


def test_next_token_at_gamma_0_is_cross_entropy():
    logits, labels = torch.randn(3, 7, 11), torch.randint(11, (3, 7))
    labels[0, :4] = -100
    expected = F.cross_entropy(logits[:, :-1].transpose(1, 2), labels[:, 1:])
    assert_close(next_token_loss(fk.FocalLoss(0.0), logits, labels), expected)
