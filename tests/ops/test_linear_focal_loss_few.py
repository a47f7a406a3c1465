"""linear_focal_loss of few logits, which it computes without chunks."""

import math

import pytest
import torch
from conftest import assert_close
from linear_cases import OPTIONS, C, N, derivatives, pair, problem

import focalkern as fk

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def passes(monkeypatch):
    """Counts the passes over chunks."""
    from focalkern.ops import linear_focal_loss as module

    found = []
    loss_of = module.loss_of

    def counted(*arguments):
        found.append(1)
        return loss_of(*arguments)

    monkeypatch.setattr("focalkern.ops.linear_focal_loss.loss_of", counted)
    return found


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("option", OPTIONS)
def test_value_and_gradients_equal_the_two_operations(passes, option, reduction):
    x, w, b, target = problem(ignored=False)
    options = {**OPTIONS[option], "reduction": reduction}
    found = fk.linear_focal_loss(x, w, target, linear_bias=b, **options)
    expected = pair(x, w, target, linear_bias=b, **options)
    assert torch.equal(found, expected)
    for actual, wanted in zip(derivatives(found, (x, w, b)), derivatives(expected, (x, w, b)), strict=True):
        assert torch.equal(actual, wanted)
    assert not passes


@pytest.mark.parametrize("leading", [(), (N,), (3, 4)])
@pytest.mark.parametrize("soft", [False, True])
def test_shapes_of_input(passes, leading, soft):
    x, w, b, target = problem(leading=leading, ignored=False)
    if soft:
        target = torch.rand(*leading, C, dtype=torch.float64).softmax(-1)
    gamma = torch.rand(leading, dtype=torch.float64, requires_grad=True)
    for reduction in ("mean", "none"):
        found = fk.linear_focal_loss(x, w, target, gamma, linear_bias=b, reduction=reduction)
        expected = pair(x, w, target, gamma, linear_bias=b, reduction=reduction)
        assert found.shape == expected.shape
        assert_close(found, expected)
        for actual, wanted in zip(derivatives(found, (x, w, gamma)), derivatives(expected, (x, w, gamma)), strict=True):
            assert_close(actual, wanted)
    assert not passes


def test_ignored_rows_may_hold_anything(passes):
    x, w, b, target = problem()
    with torch.no_grad():
        x[target == -100] = math.nan
    loss = fk.linear_focal_loss(x, w, target, linear_bias=b)
    loss.backward()
    assert loss.isfinite() and w.grad.isfinite().all() and b.grad.isfinite().all()
    assert (x.grad[target == -100] == 0).all()
    assert passes  # in chunks, which skip these rows


def test_chunks_are_taken_if_asked_for_or_needed(passes):
    x, w, _, target = problem(torch.float32, ignored=False)
    fk.linear_focal_loss(x, w, target, chunk_rows=4)
    half = [t.detach().bfloat16() for t in (x, w)]
    fk.linear_focal_loss(*half, target)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        fk.linear_focal_loss(x, w, target)
    many = torch.zeros(2**20 // 4 // C + 1, x.shape[1])
    fk.linear_focal_loss(many, w, torch.zeros(len(many), dtype=torch.int64))
    assert len(passes) == 4


def test_a_label_out_of_range_is_named():
    x, w, _, target = problem(ignored=False)
    target[3] = C
    message = rf"^linear_focal_loss: target must be in \[0, {C}\) or ignore_index, got {C} at row 3$"
    with pytest.raises(IndexError, match=message):
        fk.linear_focal_loss(x, w, target)


def test_transforms_of_few_logits():
    """vmap over rows and labels, whose values Python cannot read."""
    x, w, _, _ = problem(ignored=False)
    x, target = torch.stack([x, x + 1]), torch.randint(C, (2, N))
    found = torch.func.vmap(lambda a, b: fk.linear_focal_loss(a, w, b, 2.0))(x, target)
    assert_close(found, torch.stack([fk.linear_focal_loss(a, w, b, 2.0) for a, b in zip(x, target, strict=True)]))


@pytest.mark.parametrize("rows", [1, 300])
def test_a_label_under_vmap_is_named_by_its_place_among_all(rows):
    """As focal_loss does. vmap calls the passes over the rows once per sample."""
    x, w = torch.randn(4, rows, 5), torch.randn(C, 5)
    target = torch.zeros(4, rows, dtype=torch.int64)
    target[2, rows // 2] = C
    message = rf"^linear_focal_loss: target must be in .*, got {C} at row {2 * rows + rows // 2}$"
    with pytest.raises(IndexError, match=message):
        torch.func.vmap(lambda a, b: fk.linear_focal_loss(a, w, b))(x, target)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"target": [0, 9, 1]}, IndexError, "linear_focal_loss: target must be in"),
        ({"target": [0, -7, 1]}, IndexError, "linear_focal_loss: target must be in"),
        ({"reduction": "median"}, ValueError, "linear_focal_loss: reduction must be"),
        ({"linear_bias": torch.zeros(5)}, ValueError, "linear_focal_loss: linear_bias must be"),
        ({"label_smoothing": 1.5}, ValueError, "linear_focal_loss: label_smoothing must be"),
        ({"gamma": math.nan}, ValueError, "linear_focal_loss: gamma must be"),
        ({"ignore_index": 2**63}, ValueError, "linear_focal_loss: ignore_index must be"),
    ],
)
def test_errors_of_few_rows_name_the_function(change, error, message):
    given = {"target": torch.tensor([0, 2, 1]), "gamma": 2.0, **change}
    given["target"] = torch.as_tensor(given["target"])
    with pytest.raises(error, match=message):
        fk.linear_focal_loss(torch.ones(3, 2), torch.ones(4, 2), **given)


def test_no_row_and_a_positive_ignore_index():
    x, w = torch.ones(2, 3), torch.ones(4, 3)
    assert fk.linear_focal_loss(x[:0], w, torch.zeros(0, dtype=torch.int64)).isnan()
    target = torch.tensor([0, 3])
    found = fk.linear_focal_loss(x, w, target, ignore_index=3)
    assert torch.equal(found, fk.focal_loss(x @ w.T, target, ignore_index=3))


class _Subclass(torch.Tensor):
    pass


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({}, True),
        ({"bias": torch.ones(4)}, True),
        ({"weight": torch.nn.Parameter(torch.ones(4, 3))}, True),
        ({"most": 4 * 4 * 2 - 1}, False),
        ({"target": torch.tensor([3, -100])}, False),
        ({"target": torch.tensor([0.0, 3.0])}, False),
        ({"bias": torch.ones(1)}, False),  # F.linear would broadcast it
        ({"input": torch.ones(2, 3).as_subclass(_Subclass)}, False),
        ({"input": torch.ones(2, 3, device="meta")}, False),
        ({"input": torch.ones(2, 3).bfloat16()}, False),
        ({"input": torch.ones(3)}, False),
        ({"input": torch.ones(2, 3).to_sparse()}, False),
        ({"target": [0, 3]}, False),
    ],
)
def test_which_heads_are_small(change, expected):
    from focalkern import fallback
    from focalkern.ops._backend import module_or_fallback

    given = {"input": torch.ones(2, 3), "weight": torch.ones(4, 3), "target": torch.tensor([0, 3]), "bias": None}
    arguments = (*{**given, "ignore": -100, "most": 2**20, **change}.values(),)
    module = module_or_fallback()
    if module.is_small_head is fallback.is_small_head:  # the compiled module answers, other modules never take this way
        expected = False
    assert module.is_small_head(*arguments) is expected
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert not module.is_small_head(*arguments)
