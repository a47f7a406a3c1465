"""Data sets as two parts of arrays, and the sets of a run: train, validation and test on one device."""

import gzip
import re
import zipfile
import zlib
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.train_study.errors import DataError

_IMAGE_NAMES, _LABEL_NAMES = ("images", "x"), ("labels", "y")
_TOKENS = 24  # tokens of a question; longer questions are cut
_PADDING, _UNKNOWN = 0, 1


@dataclass
class Dataset:
    """Inputs are uint8 images [N, C, H, W] or int64 tokens [N, L]; labels int64 [N]."""

    name: str
    train_inputs: Tensor
    train_labels: Tensor
    test_inputs: Tensor
    test_labels: Tensor
    n_tokens: int = 0  # size of the vocabulary; 0 for images

    @property
    def n_classes(self) -> int:
        return int(torch.cat([self.train_labels, self.test_labels]).max()) + 1

    def fingerprint(self) -> str:
        """A text that changes with the data, so that a study does not continue on another data set."""
        crc = 0
        for part in (self.train_inputs, self.train_labels, self.test_inputs, self.test_labels):
            crc = zlib.crc32(part.contiguous().numpy().tobytes(), crc)
        return f"{self.name} {list(self.train_inputs.shape)} {list(self.test_inputs.shape)} {crc:08x}"


@dataclass
class Split:
    """The training, validation and test sets of a run. ``prepare`` makes network inputs of stored ones."""

    train_inputs: Tensor
    train_labels: Tensor
    val_inputs: Tensor
    val_labels: Tensor
    test_inputs: Tensor
    test_labels: Tensor
    mean: Tensor | None  # [C, 1, 1] of the training images in [0, 1]; None for text
    std: Tensor | None

    def prepare(self, inputs: Tensor) -> Tensor:
        """Stored inputs in the network's format: images normalised, channels last; tokens unchanged."""
        if self.mean is None:
            return inputs
        images = (inputs.to(torch.float32) / 255 - self.mean) / self.std
        return images.contiguous(memory_format=torch.channels_last)


def load(source: str) -> Dataset:
    """``digits``, a folder with the IDX files of (Fashion-)MNIST or with TREC's two files, or an ``.npz``.

    Raises:
        DataError: the path does not exist, has another format, or holds arrays that do not fit.
    """
    if source == "digits":
        return _digits()
    path = Path(source)
    if not path.exists():
        raise DataError(f"{source}: no such data set; expected digits, a folder or an .npz file")
    if path.is_dir():
        if _find(path, "train-images-idx3-ubyte"):
            dataset = _idx(path)
        elif _find(path, "TREC.train.all"):
            dataset = _trec(path)
        else:
            raise DataError(f"{source}: expected train-images-idx3-ubyte or TREC.train.all (.gz or not) in the folder")
    elif path.suffix == ".npz":
        dataset = _npz(path)
    else:
        raise DataError(f"{source}: expected digits, a folder or an .npz file")
    if dataset.n_classes < 2:
        raise DataError(f"{source}: expected labels of at least two classes, got only 0")
    return dataset


def split(dataset: Dataset, *, seed: int, val_fraction: float, train_size: int | None, device: torch.device) -> Split:
    """Splits the validation part from the training part, in an order given by ``seed``.

    ``train_size`` limits the number of samples left for training; the validation part does not change.
    """
    n = len(dataset.train_labels)
    n_val = round(val_fraction * n)
    order = torch.randperm(n, generator=torch.Generator().manual_seed(seed))
    val, train = order[:n_val], order[n_val:]
    if train_size is not None:
        if train_size > len(train):
            raise DataError(f"train_size must be at most {len(train)}, what validation leaves, got {train_size}")
        train = train[:train_size]
    if min(len(val), len(train)) == 0:
        raise DataError(f"{dataset.name}: {n} samples leave none to train on or to validate with")
    mean = std = None
    if not dataset.n_tokens:
        images = dataset.train_inputs[train].to(torch.float64) / 255
        mean = images.mean((0, 2, 3)).to(torch.float32)[:, None, None].to(device)
        std = images.std((0, 2, 3)).clamp(min=1e-3).to(torch.float32)[:, None, None].to(device)
    return Split(
        *(
            part.to(device)
            for part in (
                dataset.train_inputs[train],
                dataset.train_labels[train],
                dataset.train_inputs[val],
                dataset.train_labels[val],
                dataset.test_inputs,
                dataset.test_labels,
            )
        ),
        mean=mean,
        std=std,
    )


def out_of_distribution(dataset: Dataset, parts: Split, n: int = 2000) -> dict[str, Tensor]:
    """Out-of-distribution inputs: ``digits`` (not for digits itself) and ``noise``.

    Digits are scikit-learn's, resized to the images' shape. Noise is standard normal, as the normalised images, and for
    text uniform over the vocabulary. All losses and seeds get the same inputs.
    """
    device = parts.train_labels.device
    generator = torch.Generator().manual_seed(20)
    shape = dataset.train_inputs.shape[1:]
    if dataset.n_tokens:
        return {"noise": torch.randint(2, dataset.n_tokens, (n, *shape), generator=generator).to(device)}
    found = {"noise": torch.randn((n, *shape), generator=generator).to(device)}
    if dataset.name != "digits":
        digits = _digits().train_inputs.to(torch.float32)
        resized = F.interpolate(digits, shape[1:], mode="bilinear", align_corners=False).round().to(torch.uint8)
        found["digits"] = parts.prepare(resized.expand(-1, shape[0], -1, -1).to(device))
    return found


def augment(inputs: Tensor, generator: torch.Generator) -> Tensor:
    """A random crop after padding by 4, and a random flip, as the papers do on CIFAR: uint8 [N, C, H, W].

    The generator is on the device of the images, so no step waits for the host.
    """
    n, _, height, width = inputs.shape
    device = inputs.device
    top, left = torch.randint(0, 9, (2, n, 1, 1), generator=generator, device=device)
    flip = torch.randint(0, 2, (n, 1, 1), generator=generator, device=device) == 1
    columns = torch.arange(width, device=device)[None, None, :]
    columns = torch.where(flip, width - 1 - columns, columns) + left
    rows = torch.arange(height, device=device)[None, :, None] + top
    sample = torch.arange(n, device=device)[:, None, None]
    return F.pad(inputs, (4, 4, 4, 4)).movedim(1, -1)[sample, rows, columns].movedim(-1, 1)


def _digits() -> Dataset:
    """1797 images of 8 x 8; a third of them, always the same, is the test part."""
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise DataError("the digits come with scikit-learn, which is missing: pip install scikit-learn") from error
    digits = load_digits()
    images = torch.from_numpy(np.round(digits.images * (255 / 16)).astype(np.uint8)).unsqueeze(1)
    return _cut("digits", images, torch.from_numpy(digits.target).to(torch.int64), test_fraction=1 / 3)


def _cut(name: str, inputs: Tensor, labels: Tensor, test_fraction: float) -> Dataset:
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    test, train = order.tensor_split([round(test_fraction * len(labels))])
    return Dataset(name, inputs[train], labels[train], inputs[test], labels[test])


def _idx(folder: Path) -> Dataset:
    parts = []
    for name in ("train-images-idx3", "train-labels-idx1", "t10k-images-idx3", "t10k-labels-idx1"):
        path = _find(folder, f"{name}-ubyte")
        if path is None:
            raise DataError(f"{folder}: {name}-ubyte (.gz or not) is missing")
        data = _bytes(path)
        dimensions = data[3] if len(data) > 3 else 0
        header = 4 + 4 * dimensions
        if data[:3] != b"\x00\x00\x08" or dimensions not in (1, 3) or len(data) < header:
            raise DataError(f"{path}: not an IDX file of unsigned bytes")
        shape = np.frombuffer(data, ">u4", dimensions, offset=4).astype(int)
        if len(data) != header + shape.prod():
            raise DataError(
                f"{path}: expected {header + shape.prod()} bytes for shape {shape.tolist()}, got {len(data)}"
            )
        parts.append(np.frombuffer(data, np.uint8, offset=header).reshape(shape))
    return _images(folder.name, *parts)


def _npz(path: Path) -> Dataset:
    try:
        with zipfile.ZipFile(path), np.load(path, allow_pickle=False) as file:
            arrays = dict(file)
    except (ValueError, EOFError, OSError, zipfile.BadZipFile, zlib.error) as error:
        raise DataError(f"{path}: not an .npz file of plain arrays: {error}") from error

    def pick(prefix: str) -> tuple[np.ndarray, np.ndarray] | None:
        for x, y in zip(_IMAGE_NAMES, _LABEL_NAMES, strict=True):
            for pattern in ("{part}_{key}", "{key}_{part}") if prefix else ("{key}",):
                keys = [pattern.format(part=prefix, key=key) for key in (x, y)]
                if all(key in arrays for key in keys):
                    return arrays[keys[0]], arrays[keys[1]]
        return None

    whole, train, test = pick(""), pick("train"), pick("test")
    if train and test:
        return _images(path.stem, *train, *test)
    if whole is None:
        raise DataError(
            f"{path}: expected images and labels, or train_images, train_labels, test_images, test_labels; "
            f"found {', '.join(sorted(arrays)) or 'nothing'}"
        )
    whole_set = _images(path.stem, *whole, *whole)
    return _cut(path.stem, whole_set.train_inputs, whole_set.train_labels, test_fraction=0.2)


def _images(name: str, *parts: np.ndarray) -> Dataset:
    tensors = []
    for images, labels in (parts[:2], parts[2:]):
        labels = labels.reshape(-1) if labels.ndim == 2 and labels.shape[1] == 1 else labels
        if images.dtype != np.uint8 or images.ndim not in (3, 4):
            raise DataError(
                f"{name}: images must be uint8 [N, H, W] or [N, H, W, C], got {images.dtype} {images.shape}"
            )
        if labels.dtype.kind not in "iu" or labels.shape != images.shape[:1]:
            raise DataError(f"{name}: labels must be integers [{len(images)}], got {labels.dtype} {labels.shape}")
        if len(labels) == 0 or labels.min() < 0:
            raise DataError(f"{name}: expected labels from 0 on, got {'none' if len(labels) == 0 else labels.min()}")
        images = images[:, None] if images.ndim == 3 else np.moveaxis(images, -1, 1)
        tensors += [torch.from_numpy(images.copy()), torch.from_numpy(labels.astype(np.int64))]
    train, test = (list(images.shape[1:]) for images in tensors[::2])
    if train != test:
        raise DataError(f"{name}: training and test images must have the same shape, got {train} and {test}")
    return Dataset(name, *tensors)


def _trec(folder: Path) -> Dataset:
    """Reads ``label text`` per line. The vocabulary is that of the training file, without words that occur once."""
    lines = {}
    for part in ("train", "test"):
        path = _find(folder, f"TREC.{part}.all")
        if path is None:
            raise DataError(f"{folder}: TREC.{part}.all (.gz or not) is missing")
        pairs = [line.split(maxsplit=1) for line in _bytes(path).decode("latin-1").splitlines() if line.strip()]
        if not pairs or any(len(pair) != 2 or not pair[0].isdecimal() for pair in pairs):
            raise DataError(f"{path}: expected a label and a text in every line")
        lines[part] = [(int(label), re.findall(r"[a-z]+|\d+|[^\w\s]", text.lower())) for label, text in pairs]
    counts = Counter(word for _, words in lines["train"] for word in words)
    vocabulary = {word: 2 + i for i, word in enumerate(sorted(w for w, count in counts.items() if count > 1))}

    def tensors(pairs: list[tuple[int, list[str]]]) -> tuple[Tensor, Tensor]:
        tokens = torch.full((len(pairs), _TOKENS), _PADDING)
        for row, (_, words) in enumerate(pairs):
            ids = [vocabulary.get(word, _UNKNOWN) for word in words[:_TOKENS]]
            tokens[row, : len(ids)] = torch.tensor(ids)
        return tokens, torch.tensor([label for label, _ in pairs])

    return Dataset(folder.name, *tensors(lines["train"]), *tensors(lines["test"]), n_tokens=2 + len(vocabulary))


def _find(folder: Path, name: str) -> Path | None:
    return next((path for path in (folder / name, folder / f"{name}.gz") if path.exists()), None)


def _bytes(path: Path) -> bytes:
    try:
        return gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{path}: {error}") from error
