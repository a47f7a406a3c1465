"""Products, memory and passes of linear_focal_loss."""

import pytest
import torch
import torch.nn.functional as F
from conftest import assert_close, no_waiting
from linear_cases import C, D, Products, derivatives, pair, problem
from torch import nn
from torch.utils.checkpoint import checkpoint

import focalkern as fk
from focalkern.ops._linear_chunks import blocks, default_chunk_rows

pytestmark = [
    # torch's own decompositions still use torch.jit.script, which is deprecated.
    pytest.mark.filterwarnings("ignore:`torch.jit.script"),
    pytest.mark.usefixtures("one_thread", "chunks"),
]


def step(needed=(True, True, True), grad=True, classes=64, rows=96, chunk_rows=16, share=0.0, **options):
    """One training step, and a record of its products and tensors."""
    x, w, b = torch.randn(rows, 8), torch.randn(classes, 8), torch.randn(classes)
    target = torch.randint(classes, (rows,))
    target[: int(share * rows)] = -100
    leaves = [t.requires_grad_(n) for t, n in zip((x, w, b), needed, strict=True)]
    with Products() as seen, torch.set_grad_enabled(grad):
        loss = fk.linear_focal_loss(*leaves[:2], target, linear_bias=leaves[2], chunk_rows=chunk_rows, **options)
        if loss.requires_grad:
            loss.sum().backward()
    return seen


@pytest.mark.parametrize(
    ("needed", "per_chunk"),
    [
        ((True, True, True), 3),
        ((True, False, False), 2),  # frozen head
        ((False, True, False), 2),  # frozen body
        ((False, False, False), 1),
    ],
)
def test_only_the_products_that_are_needed(needed, per_chunk):
    assert len(step(needed).products) == 6 * per_chunk
    assert len(step(needed, grad=False).products) == 6


def test_an_unreduced_loss_computes_the_logits_twice():
    assert len(step(reduction="none").products) == 6 * 4


def test_ignored_rows_take_no_part_in_the_products():
    seen = step(share=0.75)
    assert len(seen.products) == 2 * 3  # 24 of 96 rows
    assert sum(first[0] for first, second, _ in seen.products if second == (8, 64)) == 24


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_no_tensor_grows_with_rows_times_classes(reduction):
    few, many = (step(classes=512, rows=rows, reduction=reduction).largest for rows in (256, 1024))
    assert few == many == 512 * 16 * 4  # a chunk of logits; the gradient of the weight is smaller


def test_the_default_chunk():
    assert default_chunk_rows(2048, 512, 32000, 4) == 256  # half of the sum of the weight's gradient
    assert default_chunk_rows(2048, 512, 32000, 8) == 256
    assert default_chunk_rows(2048, 512, 32000, 2) == 512  # which is in float32
    assert default_chunk_rows(10**6, 512, 10, 4) * 10 * 4 <= 256 * 2**20  # the input, bounded
    assert default_chunk_rows(8192, 4096, 128256, 2) * 128256 * 2 <= 256 * 2**20
    assert default_chunk_rows(5, 4, 3, 4) == 5
    assert default_chunk_rows(0, 4, 3, 4) == 1
    assert default_chunk_rows(1000, 1, 10**9, 8) == 1


def test_blocks_cover_a_chunk():
    for rows, classes in ((1, 1), (7, 10**6), (300, 17)):
        found = [row for block in blocks(torch.empty(rows, classes)) for row in range(rows)[block]]
        assert found == list(range(rows))


def test_the_chunk_changes_nothing_but_rounding():
    x, w, b, target = problem()
    losses = [fk.linear_focal_loss(x, w, target, linear_bias=b, chunk_rows=k) for k in (1, 4, 1000)]
    assert_close(losses[1], losses[0])
    assert_close(losses[2], losses[0])


def test_nothing_waits_for_the_device(cuda):
    x, w, b, target = problem(torch.float32, cuda)
    with no_waiting():
        fk.linear_focal_loss(x, w, target, linear_bias=b, chunk_rows=4).backward()
        fk.linear_focal_loss(x, w, target, linear_bias=b, chunk_rows=4, reduction="none").sum().backward()


# ---- in training -----------------------------------------------------------------------------------------------------
def test_a_second_backward_pass():
    x, w, b, target = problem()
    loss = fk.linear_focal_loss(x, w, target, linear_bias=b, chunk_rows=4)
    first = derivatives(loss, (x, w, b), retain_graph=True)
    kept = [g.clone() for g in first]
    for gradient in first:
        gradient.zero_()  # the caller owns them
    for again, before in zip(derivatives(loss, (x, w, b), retain_graph=True), kept, strict=True):
        assert_close(again, before)
    loss = fk.linear_focal_loss(x, w, target)
    loss.backward()
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_gradient_checkpointing(use_reentrant):
    x, w, b, target = problem()
    direct = derivatives(fk.linear_focal_loss(x, w, target, linear_bias=b), (x, w, b))
    loss = checkpoint(
        lambda x, w, b: fk.linear_focal_loss(x.tanh().atanh(), w, target, linear_bias=b),
        x.detach().mul(0.1).requires_grad_(),
        w,
        b,
        use_reentrant=use_reentrant,
    )
    loss.backward()
    expected = fk.linear_focal_loss(x * 0.1, w, target, linear_bias=b)
    assert_close(w.grad, torch.autograd.grad(expected, w)[0])
    assert len(direct) == 3


def test_accumulation_over_micro_batches_and_a_tied_weight():
    embedding = nn.Embedding(C, D).double()
    criterion = fk.LinearFocalLoss(D, C, reduction="sum", dtype=torch.float64)
    criterion.linear.weight = embedding.weight
    tokens, target = torch.randint(C, (12,)), torch.randint(C, (12,))
    for rows in torch.arange(12).split(5):
        (criterion(embedding(tokens[rows]).tanh(), target[rows]) / 12).backward()
    weight = embedding.weight.detach().clone().requires_grad_()
    pair(F.embedding(tokens, weight).tanh(), weight, target).backward()
    assert_close(embedding.weight.grad, weight.grad)
    assert len(list(nn.ModuleList([embedding, criterion]).parameters())) == 1


def test_the_weight_may_change_between_the_passes():
    x, w, _, target = problem()
    expected = torch.autograd.grad(pair(x, w, target), x)[0]
    loss = fk.linear_focal_loss(x, w, target, reduction="mean")
    assert_close(torch.autograd.grad(loss, x, retain_graph=True)[0], expected)
    with torch.no_grad():
        w.mul_(2)
    # The logits would be recomputed from a changed weight. As elsewhere in torch, that is an error instead of a wrong
    # gradient.
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.grad(loss, x)


@pytest.mark.parametrize(("leading", "head"), [((6,), (3,)), ((2, 3), (3,)), ((6,), (3, 2))])
def test_one_hot_labels_are_told_to_be_probabilities(leading, head):
    hidden, weight = torch.randn(*leading, 4), torch.randn(*head, 4)
    rows = torch.nn.functional.one_hot(torch.randint(3, (*leading, *head[1:])), 3)
    rows = rows.movedim(-1, len(leading))
    with pytest.raises(ValueError, match=r"; one-hot rows are class probabilities: target.to\(torch.float32\)$"):
        fk.linear_focal_loss(hidden, weight, rows)
    found = fk.linear_focal_loss(hidden, weight, rows.to(torch.float32))
    torch.testing.assert_close(found, fk.linear_focal_loss(hidden, weight, rows.argmax(len(leading))))


@pytest.mark.parametrize("leading", [(6,), (2, 3)])
def test_the_order_of_other_libraries_is_recognized(leading):
    """With the weight first, the hidden states would be a head with 6 classes, or 2 x 3."""
    hidden, weight, target = torch.randn(*leading, 4), torch.randn(5, 4), torch.randint(5, leading)
    expected = (
        r"linear_focal_loss: target of labels must be .* The order is linear_focal_loss\(input, linear_weight, target"
    )
    for labels in (target, target.reshape(-1)):
        with pytest.raises(ValueError, match=expected):
            fk.linear_focal_loss(weight, hidden, labels)
