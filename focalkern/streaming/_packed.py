"""Lossless compression of the sums over buckets, for sending a state: only the buckets that have samples."""

import zlib
from typing import Any

import numpy as np
import torch

from focalkern._types import PROPER
from focalkern.ops.calibration_sums import CalibrationSums

__all__ = ["packed", "unpacked"]

_FAST = 1  # level of zlib: half of the buckets are empty, and higher levels save little


def packed(sums: CalibrationSums) -> dict[str, Any]:
    """The sums as numbers and bytes.

    An empty bucket takes one bit. Other buckets take their counts, in the smallest integers that hold them, and their
    sums of confidences in float64.
    """
    found: dict[str, Any] = {"rows": int(sums.rows)}
    if sums.count is not None and sums.confidence is not None and sums.correct is not None:
        of_buckets = (sums.count, sums.correct, sums.confidence)
        count, correct, confidence = (one.cpu().numpy().reshape(-1) for one in of_buckets)
        filled = count > 0
        found["shape"] = tuple(sums.count.shape)
        found["filled"] = zlib.compress(np.packbits(filled).tobytes(), _FAST)
        # Store wrong samples instead of correct ones: they are fewer, and small numbers compress better.
        for name, values in (("count", count), ("wrong", count - correct)):
            found[name] = _bytes(values[filled].astype(np.min_scalar_type(int(values.max(initial=0)))))
        found["confidence"] = _bytes(confidence[filled])
    for name, tensor in (("nll", sums.nll), ("brier", sums.brier)):
        if tensor is not None:
            found[name] = tuple(tensor.shape), _bytes(tensor.cpu().numpy().reshape(-1))
    return found


def unpacked(content: dict[str, Any]) -> CalibrationSums:
    """The sums, on the CPU."""
    with torch.inference_mode(False):  # as in CalibrationSums.zeros
        sums = CalibrationSums(torch.tensor([content["rows"]], device="cpu"))
        if "filled" in content:
            shape = content["shape"]
            size = int(np.prod(shape))
            bits = np.frombuffer(zlib.decompress(content["filled"]), dtype=np.uint8)
            filled = np.unpackbits(bits, count=size).astype(np.bool_)
            count, wrong = (_array(content[name]).astype(np.int64) for name in ("count", "wrong"))
            values = {"count": count, "correct": count - wrong, "confidence": _array(content["confidence"])}
            for name, of_filled in values.items():
                every = np.zeros(size, dtype=of_filled.dtype)
                every[filled] = of_filled
                setattr(sums, name, torch.from_numpy(every.reshape(shape)))
        for name in PROPER:
            if name in content:
                shape, data = content[name]
                setattr(sums, name, torch.from_numpy(_array(data).reshape(shape).copy()))
    return sums


def _bytes(values: np.ndarray[Any, Any]) -> tuple[str, bytes]:
    """The dtype and the bytes, grouped by position in the number: these bytes are similar and compress well."""
    planes = np.ascontiguousarray(values).view(np.uint8).reshape(-1, values.itemsize).T
    return values.dtype.str, zlib.compress(np.ascontiguousarray(planes).tobytes(), _FAST)


def _array(content: tuple[str, bytes]) -> np.ndarray[Any, Any]:
    dtype = np.dtype(content[0])
    planes = np.frombuffer(zlib.decompress(content[1]), dtype=np.uint8).reshape(dtype.itemsize, -1)
    return np.ascontiguousarray(planes.T).view(dtype).reshape(-1)
