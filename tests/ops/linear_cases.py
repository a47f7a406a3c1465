"""Samples and checks shared by the tests of linear_focal_loss."""

import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

import focalkern as fk

N, D, C = 23, 5, 19  # no power of two, and more rows than a chunk


def pair(input, linear_weight, target, gamma=2.0, *, linear_bias=None, softcap=None, chunk_rows=None, **options):
    """The definition of the operator, with all logits at once."""
    z = F.linear(input, linear_weight, linear_bias)
    if softcap is not None:
        z = softcap * torch.tanh(z / softcap)
    leading = input.shape[:-1]
    if isinstance(gamma, torch.Tensor) and gamma.dim():
        gamma = gamma.expand(leading).reshape(-1)
    target = target.reshape(-1, z.shape[-1]) if target.is_floating_point() else target.reshape(-1)
    loss = fk.focal_loss(z.reshape(-1, z.shape[-1]), target, gamma, **options)
    return loss.reshape(leading) if options.get("reduction") == "none" else loss


def problem(dtype=torch.float64, device="cpu", ignored=True, leading=(N,)):
    """Leaves: input, weight, bias; and labels, some of them ignored."""
    x, w, b = (torch.randn(*size, dtype=torch.float64) for size in ((*leading, D), (C, D), (C,)))
    target = torch.randint(C, leading)
    if ignored:
        target.view(-1)[::3] = -100
    leaves = [t.to(device=device, dtype=dtype).requires_grad_() for t in (x, w, b)]
    return (*leaves, target.to(device))


def derivatives(loss, leaves, retain_graph=False):
    upstream = torch.randn(loss.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(7))
    return torch.autograd.grad(loss, leaves, upstream.to(loss), retain_graph=retain_graph)


# ---- the two operations, option by option ----------------------------------------------------------------------------
OPTIONS = {
    "cross-entropy": {"gamma": 0.0},
    "focal": {"gamma": 2.0},
    "inverse": {"gamma": -1.5},
    "between 0 and 1": {"gamma": 0.5},
    "table": {"gamma": fk.FLSD_53},
    "class weights": {"weight": torch.linspace(0.0, 2.0, C, dtype=torch.float64)},
    "smoothing": {"label_smoothing": 0.1},
    "detached": {"detach_modulation": True},
    "capped": {"softcap": 1.5},
    "all at once": {
        "gamma": fk.GammaTable([0, 0.1, 1], [2.0, -1.0]),
        "weight": torch.linspace(0.1, 2.0, C, dtype=torch.float64),
        "label_smoothing": 0.1,
        "softcap": 2.0,
    },
}


# ---- chunks: products and memory -------------------------------------------------------------------------------------
class Products(TorchDispatchMode):
    """Records matrix products (rows of the first factor, or of the sum) and the largest tensor of any operation."""

    def __init__(self):
        super().__init__()
        self.products, self.largest, self.fetched = [], 0, 0

    def __torch_dispatch__(self, operator, types, arguments=(), options=None):
        result = operator(*arguments, **(options or {}))
        name = operator.name().split("::")[1].split(".")[0]
        if name in ("mm", "addmm", "addmm_"):
            first, second = (arguments[0], arguments[1]) if name == "mm" else arguments[1:3]
            self.products.append((tuple(first.shape), tuple(second.shape), first.dtype))
        self.fetched += name == "_local_scalar_dense"
        for tensor in result if isinstance(result, tuple | list) else [result]:
            if isinstance(tensor, torch.Tensor):
                self.largest = max(self.largest, tensor.untyped_storage().nbytes())
        return result
