"""The formats of files, as ``--help`` describes them."""

__all__ = ["FORMATS_HELP"]

FORMATS_HELP = """\
files:
  .npz .pt .pth .safetensors .zarr
      arrays by name: logits [N, C] and labels [N]; or val_logits, val_labels, test_logits, test_labels in one file;
      or the same with probs for logits. (.pt: a dict of tensors, read with weights_only=True.)
  .npy
      two files. For val_logits.npy the labels are looked for in val_labels.npy beside it (logits.npy: labels.npy;
      probs likewise); for any other name, or to take another file, say --labels FILE.npy (--test-labels for --test).
  val-*.npz, folder/, rows.parquet/, @LIST
      all the files that match (in quotes or not), that a folder holds or that a text file names, one per line, in the
      order of their names and numbers. .npy, .safetensors and .zarr are read a few rows at a time. The labels of
      val_logits-3.npy are looked for in val_labels-3.npy, those of val-3.npy in val_labels-3.npy too, or say --labels
      FILES with as many files.
  s3://bucket/val.npz, gs://, hf://, https://
      what fsspec opens, with the package of the protocol; also patterns. --storage-options '{"anon": true}'.
  .csv .parquet .feather
      a column of labels (label, labels, target or --labels-key NAME) and one per class: numbered (0, 1, ... or logit_0,
      logit_1, ...), in the order of the numbers, or named. Other columns, such as an index, an id or a prediction, are
      an error: say which are the classes, --logits-key 'logit_*'. (.parquet, .feather: also a column of lists.)
In other files --logits-key NAME and --labels-key NAME are the names of the arrays. Labels are class numbers, the first
class is 0 (or as the columns are numbered); or names: those of the columns, or else all of the classes in alphabetical
order. Files with pickled objects are refused, never executed.
"""
