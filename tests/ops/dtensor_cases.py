"""Losses and maps over a mesh and in one process, for the tests of DTensors."""

import torch

import focalkern as fk

WORLD, N, C = 4, 10, 7  # neither is a multiple of 2 or 4
ROWS, CLASSES, WHOLE, PARTIAL, FEATURES = "rows", "classes", "whole", "partial", "features"
LINEAR = {
    "labels": {},
    "weights, gamma": {"gamma": "one", "weight": True},
    "smoothing": {"label_smoothing": 0.1, "softcap": 2.0},
    "probabilities": {"soft": True},
    "z-loss": {"z_loss": 0.1, "weight": True},
}
TABLE = fk.GammaTable([0, 0.1, 0.4, 1], [2.0, -1.0, 0.5])
WEIGHT = torch.linspace(0.5, 2, C, dtype=torch.float64)


def focal(z, y, **options):
    return fk.focal_loss(z, y, **options)


def module(name, **settings):
    def loss(z, y, **options):
        return getattr(fk, name)(**settings, **options)(z, y)

    return loss


# name -> (function, options, kind of the target)
CASES = {
    "focal": (focal, {"gamma": 2.0}, "labels"),
    "inverse, weights": (focal, {"gamma": -1.0, "weight": WEIGHT}, "labels"),
    "table": (focal, {"gamma": TABLE}, "labels"),
    "one tensor": (focal, {"gamma": "one"}, "labels"),
    "per row": (focal, {"gamma": "rows"}, "labels"),
    "smoothing": (focal, {"gamma": 2.0, "label_smoothing": 0.1, "weight": WEIGHT}, "labels"),
    "probabilities": (focal, {"gamma": 1.5, "weight": WEIGHT}, "probabilities"),
    "confidence": (focal, {"gamma": 1.0, "modulation": "confidence", "detach_modulation": True}, "labels"),
    "z-loss": (focal, {"gamma": 2.0, "z_loss": 0.1, "weight": WEIGHT}, "labels"),
    "z-loss, smoothing": (focal, {"gamma": 2.0, "z_loss": 0.1, "label_smoothing": 0.1}, "labels"),
    "images": (focal, {"gamma": 2.0}, "images"),
    "poly": (fk.poly_focal_loss, {"gamma": 2.0, "epsilon": 1.5}, "labels"),
    "poly, smoothing": (fk.poly_focal_loss, {"gamma": 2.0, "label_smoothing": 0.1}, "labels"),
    "dual": (module("DualFocalLoss", gamma=2.0), {}, "labels"),
    "Brier": (module("BrierLoss"), {}, "labels"),
    "module": (module("FocalLoss", gamma=3.0), {"weight": WEIGHT}, "labels"),
    "FLSD": (module("FLSDLoss"), {}, "labels"),
    "sigmoid": (fk.sigmoid_focal_loss, {"gamma": "one", "weight": WEIGHT}, "probabilities"),
    "sigmoid, labels": (fk.sigmoid_focal_loss, {"gamma": 2.0}, "background"),
    "sigmoid, a label of the slice ignored": (fk.sigmoid_focal_loss, {"gamma": 2.0, "ignore_index": 1}, "background"),
    "asymmetric": (fk.asymmetric_loss, {"gamma_negative": "elements"}, "probabilities"),
    "varifocal": (fk.varifocal_loss, {"gamma": "elements"}, "probabilities"),
    "varifocal, scores": (fk.varifocal_loss, {"gamma": "elements", "alpha": 0.75}, "scores"),
    "quality, scores": (fk.quality_focal_loss, {"beta": 2.0, "ignore_index": 1}, "scores"),
    "matchability, scores": (fk.matchability_loss, {"gamma": 1.5}, "scores"),
    "IA-BCE, scores": (fk.ia_bce_loss, {"gamma": "one"}, "scores"),
}
MAPS = {
    "map": (fk.focal_calibration_map, {"gamma": 2.0, "temperature": "one"}),
    "map per row": (fk.focal_calibration_map, {"gamma": "rows", "log": True}),
    "binary map": (fk.binary_focal_calibration_map, {"gamma": 1.5}),
}


def problem(kind, options):
    random = torch.Generator().manual_seed(5)
    shape = (N, C, 3, 2) if kind == "images" else (N, C)
    z = 2 * torch.randn(shape, generator=random, dtype=torch.float64)
    labels = torch.randint(C + (kind in ("background", "scores")), (N, *shape[2:]), generator=random)
    # Most of the first half is ignored: a mean of means would give both halves the same weight.
    labels[: N // 3] = options.get("ignore_index", -100)
    target = torch.rand(shape, generator=random, dtype=torch.float64) if kind == "probabilities" else labels
    if kind == "scores":
        target = labels, torch.rand(N, generator=random, dtype=torch.float64)
    tensors = {
        "one": torch.tensor(1.5, dtype=torch.float64),
        "rows": torch.linspace(0, 3, N, dtype=torch.float64),
        "elements": torch.linspace(0, 3, C, dtype=torch.float64),
    }
    given = {name: tensors[value] if value in list(tensors) else value for name, value in options.items()}
    return z, target, given


def leaves_of(z, target, options):
    scores = [target[1]] if isinstance(target, tuple) else []
    given = (value for name, value in options.items() if isinstance(value, torch.Tensor) and name != "weight")
    return [z, *scores, *given]


def expected_of(case, reduction):
    function, options, kind = CASES[case]
    z, target, options = problem(kind, options)
    leaves = [leaf.requires_grad_() for leaf in leaves_of(z, target, options)]
    loss = function(z, target, reduction=reduction, **options)
    upstream = torch.linspace(1, 2, loss.numel(), dtype=torch.float64).reshape(loss.shape)
    return [loss.detach(), *torch.autograd.grad(loss, leaves, upstream)]


def expected_map(case):
    function, options = MAPS[case]
    z, _, options = problem("labels", options)
    leaves = [leaf.requires_grad_() for leaf in leaves_of(z, None, options)]
    out = function(z, **options)
    upstream = torch.linspace(1, 2, out.numel(), dtype=torch.float64).reshape(out.shape)
    return [out.detach(), *torch.autograd.grad(out, leaves, upstream)]


def placed(tensor, mesh, layout, of_rows=False):
    """A leaf with the placements of a layout."""
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

    rows, classes = Shard(0), Replicate() if of_rows else Shard(1)
    placements = [{ROWS: rows, CLASSES: classes, WHOLE: Replicate(), PARTIAL: Replicate()}[kind] for kind in layout]
    if PARTIAL in layout and not of_rows:
        return DTensor.from_local(tensor / WORLD, mesh, [Partial()])
    return distribute_tensor(tensor, mesh, placements)


def over_mesh(function, case, layout, mesh, **more):
    from torch.distributed.tensor import Replicate, distribute_tensor

    if case in MAPS:
        _, options = MAPS[case]
        z, target, options = problem("labels", options)
    else:
        _, options, kind = CASES[case]
        z, target, options = problem(kind, options)
        if kind == "scores":
            target = tuple(placed(part, mesh, layout, of_rows=True) for part in target)
        else:
            target = placed(target, mesh, layout, of_rows=target.dim() < z.dim())
    parameters = [leaf.requires_grad_() for leaf in leaves_of(z, target, options)[1:]]
    z = placed(z, mesh, layout).detach().requires_grad_()
    result = function(z, **options) if case in MAPS else function(z, target, **options, **more)
    upstream = torch.linspace(1, 2, result.numel(), dtype=torch.float64).reshape(result.shape)
    upstream = distribute_tensor(upstream, mesh, [p if p.is_shard() else Replicate() for p in result.placements])
    # Not by backward(): torch 2.11 gives every rank the whole gradient of an uneven shard when it copies it.
    grad, *others = torch.autograd.grad(result, [z, *parameters], upstream)
    others = [other.full_tensor() if hasattr(other, "full_tensor") else other for other in others]
    out = [result.detach().full_tensor(), grad.full_tensor(), *others]
    return out, [str(p) for p in result.placements], [str(p) for p in grad.placements], [str(p) for p in z.placements]


def head_problem(case):
    random = torch.Generator().manual_seed(5)
    options = dict(LINEAR[case])
    x, w, b = (torch.randn(*size, generator=random, dtype=torch.float64) for size in ((N, 6), (C, 6), (C,)))
    target = torch.randint(C, (N,), generator=random)
    target[: N // 3] = -100
    if options.pop("soft", False):
        target = torch.rand(N, C, generator=random, dtype=torch.float64)
    if options.pop("weight", False):
        options["weight"] = WEIGHT
    if options.get("gamma") == "one":
        options["gamma"] = torch.tensor(1.5, dtype=torch.float64, requires_grad=True)
    return x, w, b, target, options


def head_over_mesh(case, layouts, mesh, reduction):
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    x, w, b, target, options = head_problem(case)
    of_input, of_head = layouts
    places = {ROWS: Shard(0), WHOLE: Replicate(), CLASSES: Shard(0), FEATURES: Shard(1)}
    x = distribute_tensor(x, mesh, [places[kind] for kind in of_input]).detach().requires_grad_()
    w = distribute_tensor(w, mesh, [places[kind] for kind in of_head]).detach().requires_grad_()
    of_bias = [Shard(0) if kind == CLASSES else Replicate() for kind in of_head]
    b = distribute_tensor(b, mesh, of_bias).detach().requires_grad_()
    of_target = [
        Shard(0) if kind == ROWS and head != CLASSES else Replicate() for kind, head in zip(*layouts, strict=True)
    ]
    target = distribute_tensor(target, mesh, of_target)
    loss = fk.linear_focal_loss(x, w, target, linear_bias=b, reduction=reduction, **options)
    upstream = torch.linspace(1, 2, loss.numel(), dtype=torch.float64).reshape(loss.shape)
    loss.backward(distribute_tensor(upstream, mesh, [p if p.is_shard() else Replicate() for p in loss.placements]))
    assert all(leaf.grad.placements == leaf.placements for leaf in (x, w, b))
    gamma = [options["gamma"].grad] if "gamma" in options else []
    return [loss.detach().full_tensor(), *(leaf.grad.full_tensor() for leaf in (x, w, b)), *gamma]


def head_expected(case, reduction):
    x, w, b, target, options = head_problem(case)
    leaves = [leaf.requires_grad_() for leaf in (x, w, b)] + ([options["gamma"]] if "gamma" in options else [])
    loss = fk.linear_focal_loss(x, w, target, linear_bias=b, reduction=reduction, **options)
    upstream = torch.linspace(1, 2, loss.numel(), dtype=torch.float64).reshape(loss.shape)
    return [loss.detach(), *torch.autograd.grad(loss, leaves, upstream)]
