"""Conversion of pixels [N, C, d1, ...] with labels [N, d1, ...] to rows, in memory or from files."""

import functools
import math
from bisect import bisect_right
from collections.abc import Callable, Sequence
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

from focalkern._arrays import flat_rows
from focalkern._checks import one_image

__all__ = [
    "PixelRows",
    "class_misfit",
    "images_at_once",
    "label_misfit",
    "place_of",
    "place_of_counted",
    "rows_that_count",
]

# Number of values that are copied or read at once; at least one image.
_NUMBERS = 1 << 21


def images_at_once(shape: Sequence[int], numbers: int | None = None) -> int:
    """Number of images of [N, C, d1, ...] with about ``numbers`` values together (None: two million); at least one."""
    return max(1, (numbers or _NUMBERS) // max(1, math.prod(shape[1:])))


def label_misfit(shape: Sequence[int], found: Sequence[int], input_words: str, label_name: str = "") -> str:
    """A text with expected and found shape and the remedy, if labels do not fit logits [N, C, d1, ...]; else empty."""
    expected = [shape[0], *shape[2:]]
    if list(found) == expected:
        return ""
    names = ["N", *(f"d{axis}" for axis in range(1, len(expected)))]
    remedy = "; labels have the shape of the logits without axis 1" if len(shape) > 2 else ""
    if tuple(found) == tuple(shape):
        remedy = "; save one-hot labels as class numbers: labels.argmax(1)"
    elif len(shape) == 2 and tuple(found) == (shape[1],):
        remedy = "; logits must be [N, C]: save logits.T"
    elif len(shape) > 2 and tuple(found) == tuple(shape[:-1]):
        remedy = "; the classes must be axis 1: numpy.moveaxis(logits, -1, 1)"
    elif len(shape) > 2 and tuple(found) == tuple(shape[1:]):
        remedy = f"; {one_image('logits', 'labels', verb='save')}"
    elif tuple(found) == (shape[0], 1, *shape[2:]):
        remedy = "; save the labels without axis 1: labels[:, 0]"
    return (
        f"expected {label_name}[{', '.join(names)}] = {expected} to go with {input_words}, found {list(found)}{remedy}"
    )


def class_misfit(shape: Sequence[int], kind: str = "") -> str:
    """A text with expected and found shape and the remedy, for logits that are not [N, C] or [N, C, d1, ...]."""
    text = f"expected {kind}{' ' * bool(kind)}[N, C] or [N, C, d1, ...] with C >= 2 classes, found {list(shape)}"
    if len(shape) == 1 or (len(shape) == 2 and shape[1] == 1):
        text += "; for one logit z per row, save the two columns 0 and z (for one probability p, 1 - p and p)"
    return text


def rows_that_count(input: Tensor, labels: Tensor, ignore_index: int | None) -> tuple[Tensor, Tensor]:
    """[M, C] and [M]: the pixels in the order of the flattened labels, without pixels labelled ``ignore_index``.

    In addition to the result it needs the memory of a few images.
    """
    counts = None if ignore_index is None else labels != ignore_index
    if counts is None or bool(counts.all()):
        return flat_rows(input), labels.reshape(-1)
    rows = input.new_empty(int(counts.sum()), input.shape[1])
    at_once, first = images_at_once(input.shape), 0
    for images, kept in zip(input.split(at_once), counts.split(at_once), strict=True):
        part = flat_rows(images)[kept.reshape(-1)]
        rows[first : first + len(part)] = part
        first += len(part)
    return rows, labels.reshape(-1)[counts.reshape(-1)]


def place_of(row: int, shape: Sequence[int], first_image: int = 0) -> str:
    """``row 12`` or ``pixel [0, 3, 2]``: the place of a row in labels [N, d1, ...] of this shape."""
    image, *others = (int(place) for place in np.unravel_index(row, tuple(shape)))
    return f"pixel {[first_image + image, *others]}" if others else f"row {first_image + image}"


def place_of_counted(row: int, labels: Tensor, ignore_index: int | None, first_image: int = 0) -> str:
    """:func:`place_of` of a row of :func:`rows_that_count`."""
    if ignore_index is not None:
        row = int((labels.reshape(-1) != ignore_index).nonzero()[row])
    return place_of(row, labels.shape, first_image)


class PixelRows:
    """The rows of :func:`rows_that_count` of arrays in files, read a few images at a time.

    Args:
        shape: [N, C, d1, ...].
        input, labels: read the images [begin, end).
        ignore_index: label of ignored pixels. If given, all labels are read once to count the other pixels.
    """

    def __init__(
        self,
        shape: Sequence[int],
        input: Callable[[int, int], Tensor],
        labels: Callable[[int, int], Tensor],
        ignore_index: int | None,
    ) -> None:
        self._input, self._all_labels, self._ignored = input, labels, ignore_index
        at_once = images_at_once(shape)
        self._blocks = [(begin, min(begin + at_once, shape[0])) for begin in range(0, shape[0], at_once)]
        # A batch is a part of a block or spans a few blocks; the last block of a batch is the first of the next batch.
        self._labels = functools.lru_cache(1)(self._read_labels)
        self._rows = functools.lru_cache(1)(self._read_rows)
        pixels = math.prod(shape[2:])
        counts = (
            (end - begin) * pixels
            if ignore_index is None
            else int((self._read_labels(block) != ignore_index).count_nonzero())
            for block, (begin, end) in enumerate(self._blocks)
        )
        self._starts = list(accumulate(counts, initial=0))

    def __len__(self) -> int:
        return self._starts[-1]

    def input(self, begin: int, end: int) -> Tensor:
        """The input of the rows [begin, end), [end - begin, C]."""
        return self._between(begin, end, lambda block: self._rows(block)[0])

    def labels(self, begin: int, end: int) -> Tensor:
        """The labels of the rows [begin, end), int64 [end - begin]."""

        def of_block(block: int) -> Tensor:
            labels = self._labels(block)
            return labels.reshape(-1) if self._ignored is None else labels[labels != self._ignored]

        return self._between(begin, end, of_block)

    def place(self, row: int) -> str:
        """The place of a row in the arrays of the files."""
        block = bisect_right(self._starts, row) - 1
        return place_of_counted(row - self._starts[block], self._labels(block), self._ignored, self._blocks[block][0])

    def _read_labels(self, block: int) -> Tensor:
        return self._all_labels(*self._blocks[block]).to(torch.int64)

    def _read_rows(self, block: int) -> tuple[Tensor, Tensor]:
        return rows_that_count(self._input(*self._blocks[block]), self._labels(block), self._ignored)

    def _between(self, begin: int, end: int, of_block: Callable[[int], Tensor]) -> Tensor:
        parts = []
        for block in range(bisect_right(self._starts, begin) - 1, len(self._blocks)):
            start = self._starts[block]
            if start >= end:
                break
            parts.append(of_block(block)[max(begin - start, 0) : end - start])
        return parts[0] if len(parts) == 1 else torch.cat(parts)
