"""Rows in files: logits or probabilities with their labels, read at once or a few rows at a time."""

from focalkern.files.errors import Hint, InputError
from focalkern.files.read import read_sets
from focalkern.files.samples import LogitSet
from focalkern.files.tables import from_frame

__all__ = [
    "Hint",
    "InputError",
    "LogitSet",
    "from_frame",
    "read_sets",
]
