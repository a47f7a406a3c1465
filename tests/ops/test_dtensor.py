"""Losses and maps of DTensors: four gloo processes on a 2 x 2 mesh and on a mesh of four, compared with one process.

Every process computes every case on a mesh and returns whole tensors and the placements. The tests compare them with
the same call on plain tensors.
"""

import runpy
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from conftest import assert_close
from dtensor_cases import (
    CASES,
    CLASSES,
    FEATURES,
    LINEAR,
    MAPS,
    PARTIAL,
    ROWS,
    WHOLE,
    WORLD,
    C,
    N,
    expected_map,
    expected_of,
    head_expected,
    head_over_mesh,
    over_mesh,
    placed,
    problem,
)
from test_focal_loss_vocab_parallel import TIMEOUT, error_of, start

import focalkern as fk

pytestmark = [
    pytest.mark.skipif(not (dist.is_available() and dist.is_gloo_available()), reason="this torch has no gloo"),
    pytest.mark.usefixtures("one_thread"),
]

EXAMPLE, STEPS = Path(__file__).resolve().parents[2] / "examples" / "torchtitan_focal.py", 5
# The meshes, and how each of their dimensions divides the logits.
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
    "sequence": ((4,), (ROWS,), (CLASSES,)),  # sharded rows with sharded classes
    "rows x classes": ((2, 2), (ROWS, WHOLE), (WHOLE, CLASSES)),
    "rows x sequence": ((2, 2), (ROWS, ROWS), (WHOLE, CLASSES)),
    "rows x features": ((2, 2), (ROWS, FEATURES), (WHOLE, FEATURES)),
}


def statistics_over_mesh(mesh, layout):
    """The statistics of the rows, as whole tensors, from logits and from a head."""
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
    labels, scores = problem("scores", {})[1]
    pair = labels, scores.requires_grad_()
    out["plain scores"] = error_of(
        lambda: fk.varifocal_loss(rows, (distribute_tensor(labels, mesh, [Shard(0)]), scores))
    )
    out["score of each element"] = error_of(lambda: fk.varifocal_loss(classes, (classes.long(), classes)))
    out["scores"] = [
        torch.autograd.grad(getattr(loss, "full_tensor", lambda loss=loss: loss)(), scores)[0]
        for loss in (fk.varifocal_loss(given, pair, reduction="mean") for given in (classes, z))
    ]
    leaf = classes.detach().requires_grad_()
    nothing = fk.focal_loss(leaf, torch.full((N,), -100))
    nothing.backward()
    out["all ignored"] = nothing.full_tensor(), leaf.grad.full_tensor()
    many, labels = 100 * torch.randn(2000, C, generator=torch.Generator().manual_seed(3)), torch.arange(2000) % C
    for dtype in (torch.float16, torch.bfloat16):
        placed = distribute_tensor(many.to(dtype), mesh, [Shard(0)]), distribute_tensor(labels, mesh, [Shard(0)])
        out[dtype] = fk.focal_loss(*placed).full_tensor(), fk.focal_loss(many.to(dtype), labels)
    return out


def model_and_optimizer():
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Embedding(101, 16), torch.nn.Linear(16, 16), torch.nn.Tanh(), torch.nn.Linear(16, 101, bias=False)
    )
    return model, lambda: torch.optim.AdamW(model.parameters(), lr=0.03, foreach=False)


def batch(step):
    """Tokens and labels of all processes; a label of -100 is ignored."""
    tokens = torch.randint(101, (32,), generator=torch.Generator().manual_seed(step))
    labels = (tokens * 7 + 3) % 101
    labels[:10] = -100  # the first processes get more ignored labels than the last
    return tokens, labels


def train_with_example(mesh, way):
    """Losses and model of the example's loss, with FSDP2 and tensor parallelism."""
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

    focal_loss, data, tensor = runpy.run_path(str(EXAMPLE))["focal_loss"], mesh["dp"], mesh["tp"]
    model, make_optimizer = model_and_optimizer()
    parallelize_module(model[-1], tensor, ColwiseParallel(use_local_output=way == "group"))
    fully_shard(model, mesh=data)
    optimizer, losses = make_optimizer(), []
    for step in range(STEPS):
        tokens, labels = (part.chunk(data.size())[data.get_local_rank()] for part in batch(step))
        loss = focal_loss(model(tokens), labels, group=tensor.get_group() if way == "group" else None)
        loss = loss / (batch(step)[1] != -100).sum()  # number of tokens of all processes
        optimizer.zero_grad()
        (loss * data.size()).backward()  # FSDP averages gradients over the data ranks, but the loss is a sum
        optimizer.step()
        dist.all_reduce(loss.detach_(), group=data.get_group())
        losses.append(loss.item())
    return losses, model


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
        losses, model = train_with_example(mesh, way)
        out["example", way] = losses, [parameter.detach().full_tensor() for parameter in model.parameters()]
    out["example"] = runpy.run_path(str(EXAMPLE), run_name="__main__")["loss"].detach()
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
    model, make_optimizer = model_and_optimizer()
    optimizer, losses = make_optimizer(), []
    for step in range(STEPS):
        tokens, labels = batch(step)
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


def test_the_example_trains(ranks):
    first, *others = (result["example"] for result in ranks)
    assert first < 1  # 4.5 at the start
    assert_close(others[0], first)  # of one tensor-parallel group
    assert_close(others[2], others[1])


def test_placements_of_the_loss(ranks):
    """Rows stay sharded, and their sum is a partial sum. The ranks of a vocabulary group have the same loss."""
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
        assert other["plain scores"].startswith("TypeError: varifocal_loss: scores must be a DTensor where the rows")
        assert "target must be labels and scores, with" in other["score of each element"]
        assert_close(*other["scores"])
        assert other["all ignored"][0].isnan()
        assert other["all ignored"][1].abs().max() == 0
        # Sums of 2000 losses, which float16 cannot represent, and bfloat16 only to about a hundredth.
        for dtype in (torch.float16, torch.bfloat16):
            found, expected = other[dtype]
            assert found.dtype == dtype
            assert_close(found, expected)
