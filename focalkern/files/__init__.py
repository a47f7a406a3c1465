"""Rows in files: logits or probabilities with their labels, read at once or a few at a time."""

from focalkern.files.checks import InputError, LogitSet
from focalkern.files.read import FORMATS_HELP, read_sets
from focalkern.files.shards import NamedFiles, ShardedRows, is_pattern, open_shards
from focalkern.files.tables import from_frame

__all__ = [
    "FORMATS_HELP",
    "InputError",
    "LogitSet",
    "NamedFiles",
    "ShardedRows",
    "from_frame",
    "is_pattern",
    "open_shards",
    "read_sets",
]
