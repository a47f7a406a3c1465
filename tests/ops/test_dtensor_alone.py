"""DTensors in one process."""

import pytest
import torch
import torch.distributed as dist
from conftest import assert_close

import focalkern as fk

pytestmark = [
    pytest.mark.skipif(not (dist.is_available() and dist.is_gloo_available()), reason="this torch has no gloo"),
    pytest.mark.usefixtures("one_thread"),
]


class TestOneProcess:
    """Compiles graphs on a process group that communicates nothing."""

    @pytest.fixture(autouse=True)
    def mesh(self):
        from torch.distributed.device_mesh import init_device_mesh
        from torch.testing._internal.distributed.fake_pg import FakeStore

        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
        yield init_device_mesh("cpu", (2,))
        dist.destroy_process_group()

    @pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
    @pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
    @pytest.mark.parametrize("kind", ["mean", "sum", "smoothing", "probabilities"])
    @pytest.mark.parametrize("dim", [0, 1])
    def test_compiles_into_one_graph(self, mesh, dim, kind):
        from torch.distributed.tensor import DTensor, Replicate, Shard

        torch._dynamo.reset()
        z = DTensor.from_local(torch.randn(4, 6), mesh, [Shard(dim)]).requires_grad_()
        target = DTensor.from_local(torch.randint(6, (4,)), mesh, [Shard(0) if dim == 0 else Replicate()])
        if kind == "probabilities":
            target = DTensor.from_local(torch.rand(4, 6), mesh, [Shard(dim)])
        options = {"reduction": "sum" if kind == "sum" else "mean", "label_smoothing": 0.1 * (kind == "smoothing")}

        def loss(z, target):
            return fk.focal_loss(z, target, gamma=2.0, **options)

        expected = loss(z, target)
        found = torch.compile(loss, fullgraph=True, backend="aot_eager")(z, target)
        assert found.placements == expected.placements
        assert_close(found.to_local(), expected.to_local())
        (wanted,) = torch.autograd.grad(expected.to_local(), z)
        (gradient,) = torch.autograd.grad(found.to_local(), z)
        assert gradient.placements == z.placements
        assert_close(gradient.to_local(), wanted.to_local())

    @pytest.mark.parametrize("dim", [0, 1])
    def test_losses_that_take_dtensors_or_name_the_remedy(self, mesh, dim):
        from torch.distributed.tensor import DTensor, Replicate, Shard

        logits, labels = torch.randn(4, 6), torch.randint(6, (4,))
        z = DTensor.from_local(logits, mesh, [Shard(dim)])
        target = DTensor.from_local(labels, mesh, [Shard(0) if dim == 0 else Replicate()])
        adapted = fk.AdaFocalLoss()
        adapted.update(torch.randn(200, 6), torch.randint(6, (200,)), distributed=False)
        table = fk.FLSDLoss(adapted.bin_edges, adapted.bin_gammas)
        assert torch.equal(adapted(z, target).to_local(), table(z, target).to_local())
        for call in (fk.MMCELoss(), fk.LogitNormPenalty(), adapted.accumulate):
            with pytest.raises(
                TypeError, match=r"must be a tensor of this process, got a DTensor; pass \w+.full_tensor"
            ):
                call(z, target)
