"""Errors about the contents of files name a remedy, and the file is read after it."""

import numpy as np
import pytest

from focalkern.files import InputError, read_sets
from focalkern.study import stream_sets

PROBS = np.array([[0.2, 0.8], [1.0, 0.0], [0.5, 0.5]], dtype=np.float32)
LABELS = np.array([1, 0, 1])


def write(path, **arrays):
    np.savez(path, **arrays)
    return path


@pytest.mark.parametrize("read", [read_sets, stream_sets])
def test_probabilities_in_a_file_called_logits(read, tmp_path):
    for name in ("val_logits.npy", "probs.npy"):
        np.save(tmp_path / name, PROBS)
    for name in ("val_labels.npy", "labels.npy"):
        np.save(tmp_path / name, LABELS)
    with pytest.raises(InputError, match="as probabilities do; pass input_kind=probs or"):
        read(tmp_path / "val_logits.npy")
    assert read(tmp_path / "val_logits.npy", input_kind="probs")[""].kind == "probs"
    with pytest.raises(InputError, match="expected logits, found a file that is called probs; pass input_kind=probs"):
        read(tmp_path / "probs.npy", input_kind="logits")
