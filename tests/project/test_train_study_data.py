"""Data, networks and losses of the training study."""

import gzip
import struct

import numpy as np
import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("sklearn", reason="the study's default data come with scikit-learn")
training = pytest.importorskip("benchmarks.train_study.training", reason="the benchmarks are in the source tree only")
import study_cases  # noqa: E402

from benchmarks.train_study import data, networks, objectives  # noqa: E402
from benchmarks.train_study.errors import DataError, StudyError  # noqa: E402

digits = study_cases.digits  # fixture

pytestmark = pytest.mark.usefixtures("one_thread")


def test_augmentation_crops_and_flips():
    images = torch.arange(1, 17, dtype=torch.uint8).reshape(1, 1, 4, 4).repeat(500, 2, 1, 1)
    images[:, 1] += 100
    moved = data.augment(images, torch.Generator().manual_seed(0))
    padded = F.pad(images[0], (4, 4, 4, 4))
    views = [padded[:, i : i + 4, j : j + 4] for i in range(9) for j in range(9)]
    possible = {view.numpy().tobytes() for one in views for view in (one.contiguous(), one.flip(-1).contiguous())}
    found = {one.contiguous().numpy().tobytes() for one in moved}
    assert found <= possible
    assert len(found) > 80


# ---------------------------------------------------------------------------------------------------------------------
# Data, networks, losses
# ---------------------------------------------------------------------------------------------------------------------
def idx(array):
    header = bytes([0, 0, 8, array.ndim]) + struct.pack(f">{array.ndim}I", *array.shape)
    return header + array.astype(np.uint8).tobytes()


@pytest.fixture
def idx_folder(tmp_path):
    rng = np.random.default_rng(0)
    for part, n in (("train", 7), ("t10k", 3)):
        (tmp_path / f"{part}-images-idx3-ubyte.gz").write_bytes(gzip.compress(idx(rng.integers(256, size=(n, 5, 6)))))
        (tmp_path / f"{part}-labels-idx1-ubyte").write_bytes(idx(rng.integers(4, size=n)))
    return tmp_path


def test_idx_files(idx_folder):
    found = data.load(str(idx_folder))
    expected = np.random.default_rng(0).integers(256, size=(7, 5, 6))
    assert found.train_inputs.shape == (7, 1, 5, 6)
    assert found.test_inputs.shape == (3, 1, 5, 6)
    assert np.array_equal(found.train_inputs[:, 0].numpy(), expected)
    assert found.test_labels.dtype == torch.int64


def test_idx_errors(idx_folder):
    path = idx_folder / "t10k-labels-idx1-ubyte"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(DataError, match=r"expected 11 bytes for shape \[3\], got 10"):
        data.load(str(idx_folder))
    path.write_bytes(b"no idx file")
    with pytest.raises(DataError, match="not an IDX file of unsigned bytes"):
        data.load(str(idx_folder))
    path.unlink()
    with pytest.raises(DataError, match=r"t10k-labels-idx1-ubyte \(.gz or not\) is missing"):
        data.load(str(idx_folder))


def test_npz_files(tmp_path):
    rng = np.random.default_rng(0)
    x, y = rng.integers(256, size=(20, 8, 8, 3), dtype=np.uint8), rng.integers(3, size=(20, 1))
    path = tmp_path / "set.npz"
    for names in (
        ("train_images", "train_labels", "test_images", "test_labels"),
        ("x_train", "y_train", "x_test", "y_test"),
    ):
        np.savez(path, **dict(zip(names, (x[:15], y[:15], x[15:], y[15:]), strict=True)))
        found = data.load(str(path))
        assert np.array_equal(found.train_inputs.numpy(), np.moveaxis(x[:15], -1, 1))
        assert np.array_equal(found.test_labels.numpy(), y[15:, 0])
    np.savez(path, images=x, labels=y)
    cut = data.load(str(path))
    assert (len(cut.train_labels), len(cut.test_labels)) == (16, 4)
    np.savez(path, images=x.astype(np.float32), labels=y)
    with pytest.raises(DataError, match=r"images must be uint8 \[N, H, W\] or \[N, H, W, C\], got float32"):
        data.load(str(path))
    np.savez(path, something=x)
    with pytest.raises(DataError, match=r"expected images and labels, .* found something"):
        data.load(str(path))
    np.savez(path, train_images=x, train_labels=y, test_images=x[:, :4], test_labels=y)
    with pytest.raises(DataError, match=r"the same shape, got \[3, 8, 8\] and \[3, 4, 8\]"):
        data.load(str(path))
    np.savez(path, images=x, labels=0 * y)
    with pytest.raises(DataError, match="at least two classes, got only 0"):
        data.load(str(path))
    np.savez(path, images=np.array([object()]), labels=y)
    with pytest.raises(DataError, match=r"not an .npz file of plain arrays: Object arrays"):
        data.load(str(path))
    for broken in (b"no zip file", path.read_bytes()[:-30]):
        path.write_bytes(broken)
        with pytest.raises(DataError, match=r"not an .npz file of plain arrays: File is not a zip file"):
            data.load(str(path))


def test_trec_takes_its_vocabulary_from_the_training_file(tmp_path):
    (tmp_path / "TREC.train.all").write_text("0 what is a tree ?\n1 who is it ?\n0 what is once\n")
    (tmp_path / "TREC.test.all.gz").write_bytes(gzip.compress(b"1 what is unseen unseen ?\n"))
    found = data.load(str(tmp_path))
    # "?", "is" and "what" come twice or more in the training file; the rest, "unseen" included, is one unknown word.
    assert found.n_tokens == 2 + 3
    assert found.train_labels.tolist() == [0, 1, 0]
    what, is_, unknown, question = found.test_inputs[0, [0, 1, 2, 4]].tolist()
    assert found.train_inputs[0, :5].tolist() == [what, is_, unknown, unknown, question]
    assert unknown == 1
    assert found.test_inputs[0, 5:].eq(0).all()
    assert networks.build("text-cnn", found)(found.test_inputs).shape == (1, 2)


def test_unknown_data(tmp_path):
    with pytest.raises(DataError, match="no such data set"):
        data.load(str(tmp_path / "nowhere"))
    with pytest.raises(DataError, match="expected train-images-idx3-ubyte or TREC"):
        data.load(str(tmp_path))


# Weights as published: He et al. 2016 (in the form for small images), Zagoruyko & Komodakis 2016 (36.5 million).
@pytest.mark.parametrize(
    ("name", "weights"), [("resnet-18", 11_173_962), ("resnet-50", 23_520_842), ("wrn-28-10", 36_479_194)]
)
def test_networks_have_the_published_size(name, weights):
    images, labels = torch.zeros(1, 3, 32, 32, dtype=torch.uint8), torch.tensor([9])
    dataset = data.Dataset("cifar", images, labels, images, labels)
    with torch.device("meta"):
        network = networks.build(name, dataset)
        assert network(torch.zeros(2, 3, 32, 32)).shape == (2, 10)
    assert sum(parameter.numel() for parameter in network.parameters()) == weights


def test_networks_and_data_must_fit(digits):
    with pytest.raises(StudyError, match="text-cnn does not take images"):
        networks.build("text-cnn", digits)
    with pytest.raises(StudyError, match="expected one of small-cnn"):
        networks.build("large-cnn", digits)


@pytest.mark.parametrize("name", objectives.ALL)
def test_every_loss_is_one(name):
    logits = torch.randn(6, 4, requires_grad=True)
    loss = objectives.build(name)(logits, torch.tensor([0, 1, 2, 3, 0, 1]))
    loss.backward()
    assert loss.shape == ()
    assert bool(logits.grad.isfinite().all())
    assert bool(logits.grad.any())
    assert objectives.canonical(name) == name


def test_names_of_losses():
    assert objectives.canonical("focal") == "focal-3"
    assert objectives.canonical("label-smoothing-.050") == "label-smoothing-0.05"
    assert objectives.build("focal-1.5").gamma == 1.5
    assert [objectives.gamma(name) for name in ("focal-2", "cross-entropy", "inverse-focal-2", "brier")] == [
        2,
        0,
        -2,
        None,
    ]
    for wrong in ("focal-x", "brier-2", "hinge", "flsd-54"):
        with pytest.raises(StudyError, match="loss: expected one of cross-entropy, focal-X"):
            objectives.build(wrong)
