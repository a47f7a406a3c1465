"""Models for the study of shift: validation rows, and test rows of several sources.

Models of scikit-learn on small data, and rows whose labels are drawn from their own probabilities.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from scipy.ndimage import gaussian_filter, shift
from sklearn.datasets import load_digits, make_classification
from sklearn.ensemble import ExtraTreesClassifier, HistGradientBoostingClassifier, RandomForestClassifier
from sklearn.feature_extraction.text import TfidfVectorizer
from sklearn.linear_model import LogisticRegression
from sklearn.naive_bayes import GaussianNB, MultinomialNB
from sklearn.neighbors import KNeighborsClassifier
from sklearn.neural_network import MLPClassifier
from sklearn.tree import DecisionTreeClassifier

from benchmarks.train_study.data import Dataset, load

__all__ = ["CALIBRATED", "SAME", "Model", "models", "other_priors"]

SAME = "same source"
"""The name of test rows from the source of the validation rows."""

CALIBRATED = "calibrated rows"
"""Test rows whose labels are drawn from the model's probabilities, so that the model is calibrated exactly."""

Array = np.ndarray[Any, Any]
Rows = tuple[Array, Array]  # features [N, F] and labels [N]


@dataclass(frozen=True)
class Model:
    """A trained model: its probabilities and labels of validation rows and of test rows by source."""

    name: str
    validation: tuple[torch.Tensor, torch.Tensor]  # [N, C] float64 and [N] int64
    tests: dict[str, tuple[torch.Tensor, torch.Tensor]]


def classifiers() -> dict[str, Callable[[], Any]]:
    """Small and fast models; some over-confident, some under-confident, some with probabilities of 0."""
    return {
        "forest": lambda: RandomForestClassifier(100, random_state=0),
        "extra trees": lambda: ExtraTreesClassifier(20, random_state=0),
        "tree": lambda: DecisionTreeClassifier(max_depth=8, min_samples_leaf=5, random_state=0),
        "neighbours": lambda: KNeighborsClassifier(10),
        "logistic": lambda: LogisticRegression(C=10, max_iter=100),
        "perceptron": lambda: MLPClassifier((128,), alpha=0, max_iter=40, random_state=0),
        "wide perceptron": lambda: MLPClassifier((512,), alpha=0, max_iter=15, random_state=1),
        "gaussian": GaussianNB,
        "boosting": lambda: HistGradientBoostingClassifier(max_iter=25, random_state=0),
    }


def models(data: Path, wanted: Callable[[str], bool] = lambda name: True) -> Iterator[Model]:
    """Yields every model whose name is requested.

    Args:
        data: a folder with the folders fashion_mnist and trec.
    """
    for name, (train, validation, tests) in sources(data).items():
        found = classifiers()
        if name == "trec":
            found = {key: found[key] for key in ("forest", "neighbours", "logistic", "perceptron")}
            found["multinomial"] = lambda: MultinomialNB(alpha=0.1)
        for kind, make in found.items():
            if wanted(f"{name}, {kind}"):
                classifier = make().fit(*train)
                yield Model(
                    f"{name}, {kind}",
                    probabilities(classifier, validation),
                    {key: probabilities(classifier, rows) for key, rows in tests().items()},
                )
    for n_classes in (3, 10, 30, 50):
        name = f"calibrated, {n_classes} classes"
        if wanted(name):
            yield Model(name, calibrated(n_classes, 2000, 0), {CALIBRATED: calibrated(n_classes, 5000, 1)})


def calibrated(n_classes: int, n_rows: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    probs = (2 * torch.randn(n_rows, n_classes, generator=generator, dtype=torch.float64)).softmax(-1)
    return probs, torch.multinomial(probs, 1, generator=generator).squeeze(1)


def probabilities(classifier: Any, rows: Rows) -> tuple[torch.Tensor, torch.Tensor]:
    probs = torch.as_tensor(classifier.predict_proba(rows[0]), dtype=torch.float64)
    return probs, torch.as_tensor(rows[1], dtype=torch.int64)


Parts = tuple[Rows, Rows, Callable[[], dict[str, Rows]]]  # train, validation and tests


def sources(data: Path) -> dict[str, Parts]:
    digits = load_digits()
    found = {
        "fashion": fashion(load(str(data / "fashion_mnist"))),
        "trec": questions(load(str(data / "trec"))),
        "digits": cut(digits.data / 16, digits.target, 500, 600),
    }
    for n_classes, noise in ((2, 0.1), (4, 0.0), (4, 0.2), (12, 0.05)):
        x, y = make_classification(
            5000,
            20,
            n_informative=10,
            n_redundant=4,
            n_classes=n_classes,
            n_clusters_per_class=2,
            flip_y=noise,
            class_sep=1.0,
            random_state=n_classes,
        )
        found[f"blobs {n_classes}, noise {noise}"] = cut(x, y, 1000, 2000, {"moved": lambda x: x + 0.5})
    return found


def cut(x: Array, y: Array, n_train: int, n_validation: int, changes: dict[str, Any] | None = None) -> Parts:
    """Random parts of the data; further test sources have other class priors and ``changes`` of the features."""
    order = np.random.default_rng(0).permutation(len(y))
    train, validation, test = np.split(order, [n_train, n_train + n_validation])
    same = x[test], y[test]

    def tests() -> dict[str, Rows]:
        changed = {name: (change(same[0]), same[1]) for name, change in (changes or {}).items()}
        return {SAME: same, "other priors": other_priors(same), **changed}

    return (x[train], y[train]), (x[validation], y[validation]), tests


def other_priors(rows: Rows) -> Rows:
    """As many rows, drawn with class frequencies in a geometric sequence; the first class is nine times as frequent as
    the last."""
    x, y = rows
    n_classes = int(y.max()) + 1
    weight = 9.0 ** (-np.arange(n_classes) / max(1, n_classes - 1))[y] / np.bincount(y, minlength=n_classes)[y]
    chosen = np.random.default_rng(1).choice(len(y), len(y), p=weight / weight.sum())
    return x[chosen], y[chosen]


def fashion(dataset: Dataset) -> Parts:
    """5,000 images each to train and validate, and the test images: unchanged, and noisy, blurred or dark."""
    images, labels = dataset.train_inputs.numpy()[:10000, 0] / 255, dataset.train_labels.numpy()[:10000]
    new, new_labels = dataset.test_inputs.numpy()[:5000, 0] / 255, dataset.test_labels.numpy()[:5000]
    noise = np.random.default_rng(0).normal(0, 0.15, new.shape)

    def flat(images: Array) -> Array:
        return images.reshape(len(images), -1).astype(np.float32)

    def tests() -> dict[str, Rows]:
        spoiled = {
            SAME: new,
            "noise": (new + noise).clip(0, 1),
            "blur": gaussian_filter(new, (0, 1.2, 1.2)),
            "dark": 0.6 * new,
            "moved": shift(new, (0, 2, 2), order=0),
        }
        rows = {name: (flat(images), new_labels) for name, images in spoiled.items()}
        return {**rows, "other priors": other_priors(rows[SAME])}

    return (flat(images[:5000]), labels[:5000]), (flat(images[5000:]), labels[5000:]), tests


def questions(dataset: Dataset) -> Parts:
    """TREC: its test file comes from another source than its training file and has other priors."""
    words = [" ".join(map(str, row[row > 1].tolist())) for row in dataset.train_inputs]
    new = [" ".join(map(str, row[row > 1].tolist())) for row in dataset.test_inputs]
    labels = dataset.train_labels.numpy()
    order = np.random.default_rng(0).permutation(len(labels))
    train, validation, test = np.split(order, [2500, 4000])
    reader = TfidfVectorizer(ngram_range=(1, 2), token_pattern=r"\d+").fit([words[i] for i in train])

    def part(place: Array) -> Rows:
        return reader.transform([words[i] for i in place]), labels[place]

    def tests() -> dict[str, Rows]:
        return {SAME: part(test), "its test file": (reader.transform(new), dataset.test_labels.numpy())}

    return part(train), part(validation), tests
