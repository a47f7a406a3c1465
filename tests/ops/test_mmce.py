"""The kernel of MMCE compared with its definition in torch."""

import pytest
import torch
from row_loss_cases import near

import focalkern as fk


# Small and large batches, both forms, ties among the confidences, ignored rows, and all rows correct.
@pytest.mark.kernels("stable")
@pytest.mark.parametrize("weighted", [False, True])
def test_mmce_in_a_kernel_is_its_definition_in_torch(weighted):
    for n, classes in ((1, 3), (2, 2), (50, 7), (300, 40), (64, 5000)):
        z = torch.randn(n, classes, dtype=torch.float64).mul_(2)
        if n > 2:
            z[n // 2] = z[0]
        z.requires_grad_()
        for target in (torch.randint(classes, (n,)), z.detach().argmax(1)):
            target = target.clone()
            target[::5] = -100 if n > 2 else target[::5]
            for reduction in ("mean", "sum"):
                loss = fk.MMCELoss(1.5, weighted=weighted, reduction=reduction)
                found = loss(z, target)
                (gradient,) = torch.autograd.grad(found, z)
                # Class weights of 1 equal no weights; with weights, torch operations compute the loss.
                plain = fk.MMCELoss(
                    1.5, weighted=weighted, reduction=reduction, weight=torch.ones(classes, dtype=torch.float64)
                )
                expected = plain(z, target)
                near(found, expected, factor=100)
                near(gradient, torch.autograd.grad(expected, z)[0], factor=100)


# At a tie the derivative of |r_i - r_j| may be any number from -1 to 1. float32 has ties that float64 does not have.
@pytest.mark.parametrize("weight", [None, torch.ones(3)], ids=["kernel", "plain torch"])
def test_gradient_of_mmce_beside_a_tie(weight):
    z = torch.tensor([[2.0, 0.0, 0.1], [2.0, 0.1, -3e-8], [0.3, 1.5, 0.0], [1.0, 0.0, 0.4]])
    target = torch.tensor([0, 1, 1, 2])

    def with_order(sign):
        logits = z.double().requires_grad_()
        confidence, top = logits.softmax(1).max(1)
        lack = (top == target).double() - confidence
        apart = confidence[:, None] - confidence
        signs = apart.detach().sign()
        signs[0, 1], signs[1, 0] = sign, -sign
        error = (lack @ (-signs * apart / 0.4).exp() @ lack).sqrt() / 4
        return torch.autograd.grad(torch.nn.functional.cross_entropy(logits, target) + 2 * error, logits)[0]

    confidence = z.double().softmax(1).amax(1)
    assert 0 < (confidence[0] - confidence[1]).abs() < 1e-8
    ends = torch.stack([with_order(1.0), with_order(-1.0)])
    assert (ends[0] - ends[1]).abs().max() > 1e-2
    logits = z.clone().requires_grad_()
    (found,) = torch.autograd.grad(fk.MMCELoss(weight=weight)(logits, target), logits)
    assert ((ends.amin(0) - 1e-6 <= found) & (found <= ends.amax(0) + 1e-6)).all()


@pytest.mark.parametrize("weighted", [False, True])
def test_second_derivatives_of_mmce(weighted):
    z = torch.randn(6, 4, dtype=torch.float64, requires_grad=True)
    target = torch.tensor([0, 3, 2, -100, 1, 1])
    loss = fk.MMCELoss(weighted=weighted)
    assert torch.autograd.gradcheck(loss, (z, target))
    assert torch.autograd.gradgradcheck(loss, (z, target))


@pytest.mark.kernels  # torch.jit.trace refuses the operators of the stable module
@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning", "ignore:.*torch.jit.trace")
def test_a_jit_trace_has_the_error_of_the_batch():
    loss, target = fk.MMCELoss(), torch.tensor([0, 3, 2, -100, 1, 1])
    traced = torch.jit.trace(loss, (torch.randn(6, 4), target), check_trace=False)
    z = torch.randn(6, 4)
    torch.testing.assert_close(traced(z, target), loss(z, target))
