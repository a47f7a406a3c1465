"""The networks: a small CNN, ResNets and wide ResNets for 32 x 32 images, and a CNN over tokens.

Each ends in a linear layer named ``head``, whose weight norm the study follows.
"""

import re

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.train_study.data import Dataset
from benchmarks.train_study.errors import StudyError

NAMES = ("small-cnn", "resnet-18", "resnet-50", "wrn-26-10", "text-cnn")


class SmallCNN(nn.Module):
    """Three convolutions and two linear layers: 0.2 million weights on 28 x 28 images.

    Strides replace pooling, which would take three times as long on a CPU.
    """

    def __init__(self, channels: int, size: tuple[int, int], n_classes: int, width: int = 16) -> None:
        super().__init__()
        self.features = nn.Sequential(
            *_conv(channels, width, 5, 2 if min(size) >= 24 else 1),
            nn.ReLU(),
            *_conv(width, 2 * width, 3, 2),
            nn.ReLU(),
            *_conv(2 * width, 4 * width, 3, 2),
            nn.ReLU(),
            nn.Flatten(),
        )
        with torch.no_grad():
            n_features = self.features.eval()(torch.zeros(1, channels, *size)).shape[1]
        self.hidden = nn.Linear(n_features, 128)
        self.head = nn.Linear(128, n_classes)

    def forward(self, images: Tensor) -> Tensor:
        return self.head(F.relu(self.hidden(self.features(images))))


class _Basic(nn.Module):
    """Two 3 x 3 convolutions around a shortcut (He et al. 2016)."""

    growth = 1

    def __init__(self, before: int, width: int, stride: int) -> None:
        super().__init__()
        self.path = nn.Sequential(*_conv(before, width, 3, stride), nn.ReLU(), *_conv(width, width * self.growth, 3, 1))
        self.shortcut = _shortcut(before, width * self.growth, stride)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.path(x) + self.shortcut(x))


class _Bottleneck(_Basic):
    """1 x 1, 3 x 3 and 1 x 1 convolutions around a shortcut."""

    growth = 4

    def __init__(self, before: int, width: int, stride: int) -> None:
        nn.Module.__init__(self)
        self.path = nn.Sequential(
            *_conv(before, width, 1, 1),
            nn.ReLU(),
            *_conv(width, width, 3, stride),
            nn.ReLU(),
            *_conv(width, width * self.growth, 1, 1),
        )
        self.shortcut = _shortcut(before, width * self.growth, stride)


class ResNet(nn.Module):
    """A ResNet without the stride and pooling of its stem, because images are small."""

    def __init__(self, block: type[_Basic], depths: tuple[int, ...], channels: int, n_classes: int) -> None:
        super().__init__()
        layers: list[nn.Module] = [*_conv(channels, 64, 3, 1), nn.ReLU()]
        before = 64
        for stage, depth in enumerate(depths):
            width = 64 * 2**stage
            for i in range(depth):
                layers.append(block(before, width, 2 if stage and i == 0 else 1))
                before = width * block.growth
        self.features = nn.Sequential(*layers)
        self.head = nn.Linear(before, n_classes)

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.features(images).mean((2, 3)))


class _PreActivation(nn.Module):
    """Normalise, activate, convolve, twice (Zagoruyko & Komodakis 2016)."""

    def __init__(self, before: int, width: int, stride: int) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.BatchNorm2d(before), nn.ReLU())
        self.path = nn.Sequential(
            *_conv(before, width, 3, stride), nn.ReLU(), nn.Conv2d(width, width, 3, padding=1, bias=False)
        )
        same = before == width and stride == 1
        self.shortcut = None if same else nn.Conv2d(before, width, 1, stride=stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        active = self.first(x)
        return self.path(active) + (x if self.shortcut is None else self.shortcut(active))


class WideResNet(nn.Module):
    """WRN-depth-width: (depth - 2) / 6 blocks in each of three stages (26-10 rounds down to 4)."""

    def __init__(self, depth: int, width: int, channels: int, n_classes: int) -> None:
        super().__init__()
        layers: list[nn.Module] = [nn.Conv2d(channels, 16, 3, padding=1, bias=False)]
        before = 16
        for stage in range(3):
            for i in range((depth - 2) // 6):
                layers.append(_PreActivation(before, 16 * width * 2**stage, 2 if stage and i == 0 else 1))
                before = 16 * width * 2**stage
        self.features = nn.Sequential(*layers, nn.BatchNorm2d(before), nn.ReLU())
        self.head = nn.Linear(before, n_classes)

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.features(images).mean((2, 3)))


class TextCNN(nn.Module):
    """Convolutions over 3, 4 and 5 tokens, the maximum over positions (Kim 2014), and trained embeddings."""

    def __init__(self, n_tokens: int, n_classes: int, width: int = 64) -> None:
        super().__init__()
        self.embedding = nn.Embedding(n_tokens, width, padding_idx=0)
        self.convolutions = nn.ModuleList(nn.Conv1d(width, width, size, padding=size // 2) for size in (3, 4, 5))
        self.dropout = nn.Dropout(0.5)
        self.head = nn.Linear(3 * width, n_classes)

    def forward(self, tokens: Tensor) -> Tensor:
        words = self.embedding(tokens).transpose(1, 2)
        found = torch.cat([F.relu(convolution(words)).amax(-1) for convolution in self.convolutions], 1)
        return self.head(self.dropout(found))


def build(name: str, dataset: Dataset, width: int = 16) -> nn.Module:
    """The network called ``name`` for the inputs and classes of ``dataset``; ``width`` applies to the small CNN.

    Raises:
        StudyError: an unknown name, or images for text and the other way round.
    """
    if (name == "text-cnn") != bool(dataset.n_tokens):
        raise StudyError(f"network: {name} does not take {'tokens' if dataset.n_tokens else 'images'}")
    n_classes = dataset.n_classes
    if name == "text-cnn":
        return TextCNN(dataset.n_tokens, n_classes)
    channels, *size = dataset.train_inputs.shape[1:]
    if name == "small-cnn":
        network: nn.Module = SmallCNN(channels, tuple(size), n_classes, width)
    elif name == "resnet-18":
        network = ResNet(_Basic, (2, 2, 2, 2), channels, n_classes)
    elif name == "resnet-50":
        network = ResNet(_Bottleneck, (3, 4, 6, 3), channels, n_classes)
    elif wide := re.fullmatch(r"wrn-(\d+)-(\d+)", name):
        depth, factor = int(wide[1]), int(wide[2])
        if depth < 8 or factor < 1:
            raise StudyError(f"network: expected wrn-DEPTH-WIDTH with a depth of at least 8, got {name}")
        network = WideResNet(depth, factor, channels, n_classes)
    else:
        raise StudyError(f"network: expected one of {', '.join(NAMES)} (or wrn-DEPTH-WIDTH), got {name!r}")
    return network.to(memory_format=torch.channels_last)


def _conv(before: int, after: int, size: int, stride: int) -> tuple[nn.Module, nn.Module]:
    return nn.Conv2d(before, after, size, stride=stride, padding=size // 2, bias=False), nn.BatchNorm2d(after)


def _shortcut(before: int, after: int, stride: int) -> nn.Module:
    return nn.Identity() if before == after and stride == 1 else nn.Sequential(*_conv(before, after, 1, stride))
