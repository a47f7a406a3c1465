"""The formats of files, as ``--help`` describes them."""

__all__ = ["FORMATS_HELP"]

FORMATS_HELP = """\
files:
  .npz .pt .pth .safetensors .zarr
      named arrays: logits [N, C] and labels [N]; or val_logits, val_labels,
      test_logits and test_labels in one file. Names may have probs in place
      of logits. A .pt file holds a dict of tensors (read with
      weights_only=True). Pixels are logits [N, C, d1, ...] and labels [N, d1,
      ...], also in .npy; --ignore-index 255 leaves out a label.
  .npy
      two files. The labels of val_logits.npy are in val_labels.npy, those of
      logits.npy in labels.npy (also with probs in place of logits). For other
      names give the file: --labels FILE.npy (--test-labels for --test).
  val-*.npz, folder/, rows.parquet/, @LIST
      all files that match a pattern (quoted or not), lie in a folder, or are
      listed in a text file, one per line. They are read in the order of their
      names and numbers, .npy, .safetensors and .zarr a few rows at a time.
      The labels of val_logits-3.npy and of val-3.npy are in val_labels-3.npy;
      for other names give as many files: --labels FILES.
  s3://bucket/val.npz, gs://, hf://, https://
      any URL or pattern that fsspec opens. Install the package of the
      protocol; give options with --storage-options '{"anon": true}'.
  .csv .parquet .feather
      a column of labels (label, labels, target or --labels-key NAME) and one
      column per class. Class columns are numbered (0, 1, ... or logit_0,
      logit_1, ...) and read in the order of the numbers, or have the names of
      the classes. Any other column (an index, an id, a prediction) is an
      error; name the class columns in this case: --logits-key 'logit_*',
      --logits-key 'cat,dog', or --logits-key '*,!file' for all but file. A
      .parquet or .feather file may have one column of lists.
In files of arrays --logits-key NAME and --labels-key NAME name the arrays.
Labels are class numbers or class names. The first class has number 0, or the
number of the first class column. Names are those of the class columns;
without them, the classes are in alphabetical order. Files with pickled
objects are an error; nothing in a file is executed.
"""
