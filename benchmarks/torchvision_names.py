"""Imports torchvision beside a torch of another build, for the tests and the benchmarks."""

import importlib.util
from pathlib import Path

import torch


def import_torchvision_beside_any_torch() -> torch.library.Library | None:
    """Makes torchvision's Python part importable if its compiled part was built for another torch.

    PyPI's torchvision is a CUDA build. Its library does not load with a CPU build of torch. The import of torchvision,
    and of every peer that imports it, then fails at missing operators. Nothing here calls an operator of torchvision,
    so defining the names suffices.
    """
    spec = importlib.util.find_spec("torchvision")
    for library in Path(spec.origin).parent.glob("_C*.so") if spec is not None and spec.origin else []:
        try:
            torch.ops.load_library(library)
        except OSError:
            names = torch.library.Library("torchvision", "FRAGMENT")
            for name in ("nms", "qnms"):
                if not hasattr(torch.ops.torchvision, name):  # the tests import benchmarks
                    names.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
            return names
    return None
