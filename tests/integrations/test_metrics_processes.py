"""The Metric classes over two processes."""

import math
import multiprocessing
import sys
import traceback

import pytest
import torch
from conftest import peer
from test_metrics_torchmetrics import sample

torchmetrics = peer("torchmetrics")
ours = pytest.importorskip("focalkern.integrations.torchmetrics", exc_type=ImportError)


def made():
    return [
        ours.CalibrationError(),
        ours.CalibrationError(estimator="equal_mass"),
        ours.ClasswiseCalibrationError(4),
        ours.NegativeLogLikelihood(),
    ]


def work(rank, folder, results):
    """One of two processes: the first has two batches, the second one of another size."""
    try:
        torch.set_num_threads(1)
        torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
        probs, target = torch.load(f"{folder}/rows.pt", weights_only=True)
        found = []
        for metric in made():
            sizes = (60, 100, 70)
            for batch in (0, 1) if rank == 0 else (2,):
                metric.update(probs.split(sizes)[batch], target.split(sizes)[batch])
            found.append(metric.compute().item())
        uneven = []
        # The second process has no batch, or rows of another dtype.
        for size, dtype in ((len(probs), probs.dtype), (100, torch.float64)):
            for metric in made():
                mine = slice(0, size) if rank == 0 else slice(size, None)
                if len(target[mine]):
                    metric.update(probs[mine].to(probs.dtype if rank == 0 else dtype), target[mine])
                uneven.append(metric.compute().item())
        without = [metric.compute().item() for metric in made()]
        torch.distributed.destroy_process_group()
        results.put((rank, (found, uneven, without)))
    except BaseException:
        results.put((rank, traceback.format_exc()))


@pytest.mark.skipif(sys.platform != "linux", reason="gloo over a file")
def test_two_processes_compute_what_one_does(tmp_path):
    logits, target = sample()
    probs = logits.softmax(-1)
    torch.save((probs, target), tmp_path / "rows.pt")
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    processes = [context.Process(target=work, args=(rank, str(tmp_path), results), daemon=True) for rank in range(2)]
    for process in processes:
        process.start()
    try:
        found = dict(results.get(timeout=120) for _ in processes)
    finally:
        for process in processes:
            process.join(20)
            process.kill()
    # Rows in the order of the processes; the order matters only for ties.
    expected = []
    for metric in made():
        metric.update(probs, target)
        expected.append(metric.compute().item())
    for rank in range(2):
        assert isinstance(found[rank], tuple), found[rank]
        of_batches, uneven, without = found[rank]
        assert of_batches == pytest.approx(expected, rel=1e-12)
        assert uneven == pytest.approx(2 * expected, rel=1e-12)
        assert all(map(math.isnan, without))
