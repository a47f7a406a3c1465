"""Losses and maps of DTensors: four gloo processes on a 2 x 2 mesh, and on four in a row, against one process.

Every process computes every case on a mesh, and gives back whole tensors and the placements; the tests compare them
with the same call on plain tensors.
"""

import runpy
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from conftest import assert_close
from test_focal_loss_vocab_parallel import TIMEOUT, error_of, start

import focalkern as fk

pytestmark = [
    pytest.mark.skipif(not (dist.is_available() and dist.is_gloo_available()), reason="this torch has no gloo"),
    pytest.mark.usefixtures("one_thread"),
]

EXAMPLE, STEPS = Path(__file__).resolve().parents[2] / "examples" / "torchtitan_focal.py", 5
WORLD, N, C = 4, 10, 7  # neither is a multiple of 2 or 4
ROWS, CLASSES, WHOLE, PARTIAL, FEATURES = "rows", "classes", "whole", "partial", "features"
# The meshes, and what each of their dimensions does to the logits.
MESHES = {
    "rows": ((4,), (ROWS,)),
    "classes": ((4,), (CLASSES,)),
    "whole": ((4,), (WHOLE,)),
    "partial": ((4,), (PARTIAL,)),
    "rows x classes": ((2, 2), (ROWS, CLASSES)),
    "classes x rows": ((2, 2), (CLASSES, ROWS)),
    "rows x rows": ((2, 2), (ROWS, ROWS)),
    "classes x classes": ((2, 2), (CLASSES, CLASSES)),
    "whole x classes": ((2, 2), (WHOLE, CLASSES)),
}
# Placements of the head's input and weight for each dimension of the mesh.
HEADS = {
    "rows": ((4,), (ROWS,), (WHOLE,)),
    "classes": ((4,), (WHOLE,), (CLASSES,)),
    "sequence": ((4,), (ROWS,), (CLASSES,)),  # sharded rows meet sharded classes
    "rows x classes": ((2, 2), (ROWS, WHOLE), (WHOLE, CLASSES)),
    "rows x sequence": ((2, 2), (ROWS, ROWS), (WHOLE, CLASSES)),
    "rows x features": ((2, 2), (ROWS, FEATURES), (WHOLE, FEATURES)),
}
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
    labels = torch.randint(C + (kind == "background"), (N, *shape[2:]), generator=random)
    # Most of the first half: a mean of means would weigh the halves alike.
    labels[: N // 3] = options.get("ignore_index", -100)
    target = torch.rand(shape, generator=random, dtype=torch.float64) if kind == "probabilities" else labels
    tensors = {
        "one": torch.tensor(1.5, dtype=torch.float64),
        "rows": torch.linspace(0, 3, N, dtype=torch.float64),
        "elements": torch.linspace(0, 3, C, dtype=torch.float64),
    }
    given = {name: tensors[value] if value in list(tensors) else value for name, value in options.items()}
    return z, target, given


def leaves_of(z, options):
    return [z, *(value for name, value in options.items() if isinstance(value, torch.Tensor) and name != "weight")]


def expected_of(case, reduction):
    function, options, kind = CASES[case]
    z, target, options = problem(kind, options)
    leaves = [leaf.requires_grad_() for leaf in leaves_of(z, options)]
    loss = function(z, target, reduction=reduction, **options)
    upstream = torch.linspace(1, 2, loss.numel(), dtype=torch.float64).reshape(loss.shape)
    return [loss.detach(), *torch.autograd.grad(loss, leaves, upstream)]


def expected_map(case):
    function, options = MAPS[case]
    z, _, options = problem("labels", options)
    leaves = [leaf.requires_grad_() for leaf in leaves_of(z, options)]
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
        target = placed(target, mesh, layout, of_rows=target.dim() < z.dim())
    parameters = [leaf.requires_grad_() for leaf in leaves_of(z, options)[1:]]
    z = placed(z, mesh, layout).detach().requires_grad_()
    result = function(z, **options) if case in MAPS else function(z, target, **options, **more)
    upstream = torch.linspace(1, 2, result.numel(), dtype=torch.float64).reshape(result.shape)
    upstream = distribute_tensor(upstream, mesh, [p if p.is_shard() else Replicate() for p in result.placements])
    # Not by backward(): torch 2.11 gives every rank the whole gradient of an uneven shard when it copies it.
    grad, *others = torch.autograd.grad(result, [z, *parameters], upstream)
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


def statistics_over_mesh(mesh, layout):
    """Those of the rows, as whole tensors, of the logits and of a head."""
    z, target, _ = problem("labels", {})
    rows = placed(target, mesh, layout, of_rows=True)
    loss, stats = fk.focal_loss(placed(z, mesh, layout), rows, return_stats=True)
    means = {name: value.full_tensor() for name, value in stats.means().items()}
    return loss.full_tensor(), [values.full_tensor() for values in stats], means


def other_facts(mesh):
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    z, target, _ = problem("labels", {})
    rows, classes = distribute_tensor(z, mesh, [Shard(0)]), distribute_tensor(z, mesh, [Shard(1)])
    out = {
        "plain target": error_of(lambda: fk.focal_loss(rows, target)),
        "no tensor": error_of(lambda: fk.focal_loss(rows, [1, 2])),
        "replicated target": fk.focal_loss(rows, distribute_tensor(target, mesh, [Replicate()])).full_tensor(),
        "whole": fk.focal_loss(z, target),
        "plain head": error_of(lambda: fk.linear_focal_loss(rows, torch.zeros(3, C).double(), target)),
        "plain input": error_of(lambda: fk.linear_focal_loss(torch.zeros(N, C).double(), rows, target)),
    }
    leaf = classes.detach().requires_grad_()
    nothing = fk.focal_loss(leaf, torch.full((N,), -100))
    nothing.backward()
    out["all ignored"] = nothing.full_tensor(), leaf.grad.full_tensor()
    many, labels = 100 * torch.randn(2000, C, generator=torch.Generator().manual_seed(3)), torch.arange(2000) % C
    for dtype in (torch.float16, torch.bfloat16):
        placed = distribute_tensor(many.to(dtype), mesh, [Shard(0)]), distribute_tensor(labels, mesh, [Shard(0)])
        out[dtype] = fk.focal_loss(*placed).full_tensor(), fk.focal_loss(many.to(dtype), labels)
    return out


def process(rank, folder):
    from torch.distributed.device_mesh import init_device_mesh

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=WORLD, timeout=TIMEOUT)
    meshes = {shape: init_device_mesh("cpu", shape) for shape in ((4,), (2, 2))}
    out = {}
    for name, (shape, layout) in MESHES.items():
        mesh = meshes[shape]
        for case, (function, _, _) in CASES.items():
            for reduction in ("none", "sum", "mean"):
                out[name, case, reduction] = over_mesh(function, case, layout, mesh, reduction=reduction)
        for case, (function, _) in MAPS.items():
            out[name, case] = over_mesh(function, case, layout, mesh)
        out["statistics", name] = statistics_over_mesh(mesh, layout)
    for name, (shape, *layouts) in HEADS.items():
        for case in LINEAR:
            for reduction in ("none", "sum", "mean"):
                out["head", name, case, reduction] = head_over_mesh(case, layouts, meshes[shape], reduction)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    for way in ("dtensor", "group"):
        losses, model = runpy.run_path(str(EXAMPLE))["train"](mesh, way, STEPS)
        out["example", way] = losses, [parameter.detach().full_tensor() for parameter in model.parameters()]
    out["other"] = other_facts(meshes[(4,)])
    torch.save(out, f"{folder}/{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ranks")
    start(process, (str(folder),), WORLD, lambda context: context.join(timeout=1))
    return [torch.load(folder / f"{rank}.pt") for rank in range(WORLD)]


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("mesh", MESHES)
def test_losses_are_those_of_one_process(mesh, case, ranks):
    for reduction in ("none", "sum", "mean"):
        expected = expected_of(case, reduction)
        for result in ranks:
            found, of_loss, of_gradient, of_logits = result[mesh, case, reduction]
            for value, wanted in zip(found, expected, strict=True):
                assert_close(value, wanted)
            if PARTIAL not in MESHES[mesh][1]:
                assert of_gradient == of_logits
            if reduction == "mean":
                assert set(of_loss) == {"R"}


@pytest.mark.parametrize("case", MAPS)
@pytest.mark.parametrize("mesh", MESHES)
def test_maps_are_those_of_one_process(mesh, case, ranks):
    expected = expected_map(case)
    for result in ranks:
        found, of_map, of_gradient, of_logits = result[mesh, case]
        for value, wanted in zip(found, expected, strict=True):
            assert_close(value, wanted)
        if PARTIAL not in MESHES[mesh][1]:
            assert of_map == of_gradient == of_logits


@pytest.mark.parametrize("mesh", MESHES)
def test_statistics_are_those_of_one_process(mesh, ranks):
    z, target, _ = problem("labels", {})
    loss, expected = fk.focal_loss(z, target, return_stats=True)
    for result in ranks:
        found, stats, means = result["statistics", mesh]
        assert_close(found, loss)
        for values, wanted in zip(stats, expected, strict=True):
            assert values.dtype == wanted.dtype
            assert_close(values, wanted, torch.float64)
        for name, value in expected.means().items():
            assert_close(means[name], value)


@pytest.mark.parametrize("case", LINEAR)
@pytest.mark.parametrize("mesh", HEADS)
def test_heads_are_those_of_one_process(mesh, case, ranks):
    for reduction in ("none", "sum", "mean"):
        expected = head_expected(case, reduction)
        for result in ranks:
            for value, wanted in zip(result["head", mesh, case, reduction], expected, strict=True):
                assert_close(value, wanted)


@pytest.mark.parametrize("way", ["dtensor", "group"])
def test_fsdp_and_tensor_parallel_training_is_that_of_one_process(way, ranks):
    """The loss of examples/torchtitan_focal.py, with different numbers of counted tokens on the ranks."""
    example = runpy.run_path(str(EXAMPLE))
    torch.manual_seed(0)
    model, losses = example["Model"](), []
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.03)
    for step in range(STEPS):
        tokens, labels = example["batch"](step)
        loss = fk.focal_loss(model(tokens), labels, 2.0)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    for result in ranks:
        found, parameters = result["example", way]
        torch.testing.assert_close(found, losses, rtol=1e-5, atol=0)
        for parameter, expected in zip(parameters, model.parameters(), strict=True):
            torch.testing.assert_close(parameter, expected, rtol=1e-3, atol=1e-5)


def test_placements_of_the_loss(ranks):
    """Rows stay sharded, their sum is a part of the whole; a slice's loss is the same on all ranks of its group."""
    for result in ranks:
        assert result["rows", "focal", "none"][1] == ["S(0)"]
        assert result["rows", "focal", "sum"][1] == ["P(sum)"]
        assert result["classes", "focal", "sum"][1] == ["R"]
        assert result["rows x classes", "focal", "none"][1] == ["S(0)", "R"]
        assert result["rows x classes", "focal", "sum"][1] == ["P(sum)", "R"]
        assert result["classes x rows", "sigmoid", "sum"][1] == ["P(sum)", "P(sum)"]


def test_other_facts(ranks):
    for result in ranks:
        other = result["other"]
        assert other["plain target"].startswith(
            "TypeError: focal_loss: target must be a DTensor where the rows of input are sharded, got a plain tensor"
        )
        assert "linear_weight must be a DTensor on the mesh of input, got a plain tensor" in other["plain head"]
        assert "input and linear_weight must both be DTensors" in other["plain input"]
        assert other["no tensor"] == "TypeError: focal_loss: target must be a tensor, got list"
        assert_close(other["replicated target"], other["whole"])
        assert other["all ignored"][0].isnan()
        assert other["all ignored"][1].abs().max() == 0
        # Sums of 2000 losses, which float16 does not hold, and bfloat16 not to a hundredth.
        for dtype in (torch.float16, torch.bfloat16):
            found, expected = other[dtype]
            assert found.dtype == dtype
            assert_close(found, expected)


class TestOneProcess:
    """Compiled graphs, on a process group that moves nothing."""

    @pytest.fixture(autouse=True)
    def mesh(self):
        from torch.distributed.device_mesh import init_device_mesh
        from torch.testing._internal.distributed.fake_pg import FakeStore

        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
        yield init_device_mesh("cpu", (2,))
        dist.destroy_process_group()

    @pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
    @pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
    @pytest.mark.parametrize("reduction", ["mean", "sum"])
    @pytest.mark.parametrize("dim", [0, 1])
    def test_compiles_into_one_graph(self, mesh, dim, reduction):
        from torch.distributed.tensor import DTensor, Replicate, Shard

        torch._dynamo.reset()
        z = DTensor.from_local(torch.randn(4, 6), mesh, [Shard(dim)]).requires_grad_()
        target = DTensor.from_local(torch.randint(6, (4,)), mesh, [Shard(0) if dim == 0 else Replicate()])

        def loss(z, target):
            return fk.focal_loss(z, target, gamma=2.0, reduction=reduction)

        expected = loss(z, target)
        found = torch.compile(loss, fullgraph=True, backend="aot_eager")(z, target)
        assert found.placements == expected.placements
        assert_close(found.to_local(), expected.to_local())
        (wanted,) = torch.autograd.grad(expected.to_local(), z)
        (gradient,) = torch.autograd.grad(found.to_local(), z)
        assert gradient.placements == z.placements
        assert_close(gradient.to_local(), wanted.to_local())
