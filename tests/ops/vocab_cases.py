"""Cases of losses of a split vocabulary: a problem, and the parts of one rank."""

import torch
import torch.nn.functional as F

import focalkern as fk

N, D = 26, 6
# Number of ranks -> sizes of their slices. Slices differ in size; one rank has no target; one has no class.
SLICES = {2: (9, 4), 3: (5, 0, 8)}
C = 13
NOT_TARGETS = {2: range(9), 3: range(5)}

TABLE = fk.GammaTable([0, 0.1, 0.4, 1], [2.0, -1.0, 0.5])
CASES = {
    "mean": {},
    "sum, cross-entropy": {"gamma": 0.0, "reduction": "sum"},
    "none, inverse": {"gamma": -1.5, "reduction": "none"},
    "table": {"gamma": TABLE},
    "class weights, detached": {"weight": torch.linspace(0, 2, C).double(), "detach_modulation": True},
    "other index ignored": {"ignore_index": 3},
    "capped": {"softcap": 1.5},
    "capped, none": {"softcap": 1.5, "reduction": "none"},
    "gamma per row": {"gamma": "rows", "reduction": "none"},
    "gamma, one tensor": {"gamma": "one"},
    "far apart": {"scale": 300.0},
    "a rank without a target": {"targets": True},
    "float32": {"dtype": torch.float32},
    "bfloat16": {"dtype": torch.bfloat16},
    "all ignored": {"ignored": True},
    "chunks": {"chunk_rows": 4},
    "DFT": {"gamma": 1.0, "modulation": "confidence", "detach_modulation": True},
    "weight p^gamma, none": {"gamma": "one", "modulation": "confidence", "reduction": "none"},
    "smoothing": {"label_smoothing": 0.1, "weight": torch.linspace(0, 2, C).double()},
    "smoothing, capped, none": {"label_smoothing": 0.3, "softcap": 1.5, "gamma": "rows", "reduction": "none"},
    "smoothing, float32, chunks": {"label_smoothing": 0.1, "dtype": torch.float32, "chunk_rows": 4},
    "smoothing, far apart": {"label_smoothing": 0.1, "scale": 300.0, "gamma": -1.0},
    "smoothing, table, sum": {"label_smoothing": 0.1, "gamma": TABLE, "reduction": "sum"},
    "probabilities": {"soft": True, "gamma": "one", "weight": torch.linspace(0, 2, C).double()},
    "probabilities, none": {"soft": True, "reduction": "none", "label_smoothing": 0.1, "softcap": 1.5},
    "probabilities, bfloat16": {"soft": True, "dtype": torch.bfloat16, "reduction": "sum"},
    "probabilities, DFT": {"soft": True, "gamma": 1.0, "modulation": "confidence", "detach_modulation": True},
    "weight p^gamma, far apart": {"gamma": 0.5, "modulation": "confidence", "scale": 300.0},
    "z-loss": {"z_loss": 0.1, "gamma": "one", "weight": torch.linspace(0, 2, C).double()},
    "z-loss, none, capped": {"z_loss": 0.3, "reduction": "none", "softcap": 1.5, "chunk_rows": 4},
    "z-loss, far apart": {"z_loss": 0.1, "scale": 300.0, "reduction": "sum"},
    "z-loss, all ignored": {"z_loss": 0.1, "ignored": True},
    "z-loss, bfloat16": {"z_loss": 0.1, "dtype": torch.bfloat16},
    "z-loss, smoothing": {"z_loss": 0.1, "label_smoothing": 0.1, "weight": torch.linspace(0, 2, C).double()},
    "z-loss, probabilities": {"z_loss": 0.1, "soft": True, "reduction": "none"},
}
STATISTICS = ("mean", "other index ignored", "far apart", "float32", "all ignored", "smoothing", "capped, none")


def slices(world):
    return SLICES.get(world, (C,))


def problem(name, world, device="cpu"):
    torch.manual_seed(5)
    options = dict(CASES[name])
    dtype = options.pop("dtype", torch.float64)
    x, w, b = (torch.randn(*size, dtype=torch.float64) for size in ((2, N // 2, D), (C, D), (C,)))
    x = x * options.pop("scale", 1.0)
    target = torch.randint(C, (2, N // 2))
    if options.pop("targets", False):
        target = torch.randint(len(NOT_TARGETS.get(world, ())), C, (2, N // 2))
    target[0, ::4] = options.get("ignore_index", -100)
    if options.pop("ignored", False):
        target[:] = -100
    if options.pop("soft", False):
        target = torch.softmax(3 * torch.randn(2, N // 2, C, dtype=torch.float64), -1).to(dtype)
        target[0, 0] = F.one_hot(torch.tensor(C - 1), C)
    gamma = options.get("gamma")
    if gamma == "rows":
        options["gamma"] = torch.linspace(-1, 3, N // 2, dtype=torch.float64, device=device).requires_grad_()
    if gamma == "one":
        options["gamma"] = torch.tensor(1.5, dtype=torch.float64, device=device, requires_grad=True)
    if "weight" in options:
        options["weight"] = options["weight"].to(device)
    return *(t.to(device, dtype) for t in (x, w, b)), target.to(device), options


def upstream_of(loss):
    return torch.linspace(1, 2, loss.numel(), dtype=torch.float64).reshape(loss.shape).to(loss)


def gradients(loss, leaves):
    return torch.autograd.grad(loss, leaves, upstream_of(loss))


def with_head(name, world, rank=None, group=None, device="cpu", **more):
    """Loss and gradients of input, weight, bias (slices, with a rank) and gamma."""
    x, w, b, target, options = problem(name, world, device)
    if rank is not None:
        begin = sum(slices(world)[:rank])
        part = slice(begin, begin + slices(world)[rank])
        w, b = w[part].clone(), b[part].clone()
        more["process_group"] = group
        target = target[..., part].clone() if target.is_floating_point() else target
    leaves = [t.requires_grad_() for t in (x, w, b)]
    leaves += [target.requires_grad_()] if target.is_floating_point() else []
    if isinstance(options.get("gamma"), torch.Tensor):
        leaves.append(options["gamma"])
    loss = fk.linear_focal_loss(x, w, target, linear_bias=b, **{**options, **more})
    return [loss.detach(), *gradients(loss, leaves)]


def of_logits(name, world, rank=None, group=None, device="cpu"):
    """Loss and gradients of the logits (a slice, with a rank) and gamma."""
    x, w, b, target, options = problem(name, world, device)
    options.pop("softcap", None)
    options.pop("chunk_rows", None)
    z = F.linear(x, w, b)
    gamma = options.pop("gamma", 2.0)
    begin = sum(slices(world)[: rank or 0])
    part = slice(None) if rank is None else slice(begin, begin + slices(world)[rank])
    if target.is_floating_point():
        target = target[..., part].clone().requires_grad_()
    leaves = [t for t in (target, gamma) if isinstance(t, torch.Tensor) and t.requires_grad]
    if rank is None:
        z = z.requires_grad_()
        flat = gamma.expand(z.shape[:-1]).reshape(-1) if isinstance(gamma, torch.Tensor) else gamma
        rows = target.flatten(0, 1) if target.is_floating_point() else target.flatten()
        loss = fk.focal_loss(z.flatten(0, 1), rows, flat, **options)
        loss = loss.reshape(z.shape[:-1]) if options.get("reduction") == "none" else loss
    else:
        z = z[..., part].clone().requires_grad_()
        loss = fk.focal_loss_vocab_parallel(z, target, gamma, process_group=group, **options)
    return [loss.detach(), *gradients(loss, [z, *leaves])]
