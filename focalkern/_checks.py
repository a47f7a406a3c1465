"""Checks of arguments. An error is one line: function, argument, expected value, received value."""

import math
import operator
import os
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from focalkern._tracing import constant_in_graphs, values_of
from focalkern._types import FLOATS, REDUCTIONS

__all__ = [
    "MOST_BINS",
    "MOST_RESAMPLES",
    "ONE_HOT",
    "ONE_LOGIT",
    "SOFT_ONE_HOT",
    "TO_INT",
    "check_floating",
    "count_rows",
    "counted",
    "cut",
    "dense",
    "finite",
    "flag",
    "float_labels",
    "from_one",
    "integer",
    "is_number",
    "label",
    "label_range",
    "labels_expected",
    "labels_to_check",
    "may_wait_for",
    "no_float8",
    "not_floating",
    "number",
    "one_image",
    "one_of",
    "parsed_float",
    "parsed_int",
    "path_text",
    "probabilities_misfit",
    "reduction_code",
    "reworded",
    "short",
    "sizes",
    "smoothing",
    "target_misfit",
    "without_class_dim",
]

_LONGEST = 80

# A larger number of bins is a mistake, and would not fit into memory.
MOST_BINS = 1 << 24

# A larger number of resamples is a mistake, too.
MOST_RESAMPLES = 1_000_000


# The remedy for labels that are no integers.
TO_INT = "; convert them with .long(), in NumPy with .astype('int64')"


def short(value: object) -> str:
    """The value on one line: numbers and text literally, other values by their type."""
    if isinstance(value, Tensor):
        if value.is_nested:
            return "a nested tensor"
        kind = "" if value.layout == torch.strided else f"{str(value.layout).removeprefix('torch.')} "
        return f"a {kind}tensor of shape {list(value.shape)} and {str(value.dtype).removeprefix('torch.')}"
    if isinstance(value, np.ndarray):
        return f"an array of shape {list(value.shape)} and {value.dtype}"
    try:
        text = " ".join(repr(value).split())
    except Exception:  # a number of too many digits, or anything that a class does in its __repr__
        return f"a value of type {type(value).__name__}"
    return cut(text)


def sizes(shape: Iterable[int]) -> list[int]:
    """A shape for an error, with numbers in place of the symbols of a graph of dynamic shapes."""
    return [operator.index(size) for size in shape]


def cut(text: str) -> str:
    """The text, or the beginning of a long one."""
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 3]}..."


def not_floating(dtype: object) -> str:
    """A dtype that is not floating point, as an error about logits or probabilities prints it, with the remedy."""
    if "complex" in str(dtype):
        return f"{dtype}; complex numbers are not supported"
    return f"{dtype}; convert them with .float(), in NumPy with .astype('float32')"


def is_number(value: object) -> bool:
    """Whether float() accepts a value of this type; False for strings."""
    kind = type(value)
    return not isinstance(value, str | bytes | np.ndarray) and (
        hasattr(kind, "__float__") or hasattr(kind, "__index__")
    )


def number(op: str, name: str, value: Any, expected: str = "a number") -> float:
    """The value as a float, which may be NaN or infinite."""
    if is_number(value) or (isinstance(value, np.ndarray) and value.ndim == 0 and value.dtype.kind in "fiu"):
        try:
            return float(value)
        except OverflowError:
            raise ValueError(f"{op}: {name} must be finite, got {short(value)}") from None
        except Exception:  # its class may raise anything here
            pass
    raise TypeError(f"{op}: {name} must be {expected}, got {type(value).__name__}")


def integer(
    op: str, name: str, value: Any, least: int | None = None, most: int | None = None, or_none: str = ""
) -> int:
    """The value as an int within both bounds; ``or_none`` is added to the expected value in the error."""
    try:
        if isinstance(value, bool | np.bool_) or getattr(value, "dtype", None) is torch.bool:
            raise TypeError
        found = operator.index(value)
    except Exception:  # its class may raise anything here, besides TypeError
        raise TypeError(f"{op}: {name} must be an int{or_none}, got {short(value)}") from None
    if least is not None and found < least:
        raise ValueError(f"{op}: {name} must be at least {least}, got {short(found)}")
    if most is not None and found > most:
        raise ValueError(f"{op}: {name} must be at most {most}, got {short(found)}")
    return found


def label(op: str, name: str, value: Any, or_none: str = "") -> int:
    """A label as an int within the range of int64."""
    if torch.compiler.is_compiling() and type(value) is int:
        return value  # a number that may change without a compilation has no attributes to look at
    return integer(op, name, value, -(2**63), 2**63 - 1, or_none)


def parsed_float(text: str) -> float:
    """The number written in ASCII digits. Unlike float(), it refuses underscores (1_0) and the digits of other scripts.

    Raises:
        ValueError: the text is not such a number.
    """
    text = text.strip()
    if "_" in text or not text.isascii():
        raise ValueError(f"could not convert string to float: {text!r}")
    return float(text)


def parsed_int(text: str) -> int:
    """The integer written in ASCII digits; see :func:`parsed_float`."""
    text = text.strip()
    if "_" in text or not text.isascii():
        raise ValueError(f"invalid literal for int(): {text!r}")
    return int(text)


def reduction_code(op: str, reduction: Any) -> int:
    """The number of a reduction in the compiled module."""
    code = _code_of(reduction)
    if code < 0:
        raise ValueError(f"{op}: reduction must be 'none', 'mean' or 'sum', got {short(reduction)}")
    return code


@constant_in_graphs
def _code_of(reduction: Any) -> int:
    return _CODES.get(reduction, -1) if isinstance(reduction, str) else -1


_CODES: dict[str, int] = {name: code for code, name in enumerate(REDUCTIONS)}


def flag(op: str, name: str, value: Any) -> bool:
    if not isinstance(value, bool | np.bool_):
        raise TypeError(f"{op}: {name} must be a bool, got {type(value).__name__}")
    return bool(value)


def one_of(op: str, name: str, value: Any, known: Iterable[str]) -> None:
    """Raises unless the value is one of the known words."""
    if not isinstance(value, str) or value not in known:
        raise ValueError(f"{op}: {name} must be one of {', '.join(known)}, got {short(value)}")


def path_text(op: str, name: str, value: Any) -> str:
    """A path as text. Numbers are refused, because open() would read them as file descriptors."""
    if not isinstance(value, str | os.PathLike):
        raise TypeError(f"{op}: {name} must be a path, got {type(value).__name__}")
    text = os.fspath(value)
    if not isinstance(text, str) or not text or "\0" in text:
        raise ValueError(f"{op}: {name} must be a path, got {short(text)}")
    return text


def dense(op: str, name: str, value: Tensor) -> Tensor:
    """Raises for tensors whose elements do not lie in ordinary memory (sparse, quantized, ...)."""
    if value.is_nested or value.layout != torch.strided:
        layout = "nested" if value.is_nested else str(value.layout).removeprefix("torch.")
        raise TypeError(f"{op}: {name} must be a dense (strided) tensor, got layout {layout}")
    if value.is_quantized:
        raise TypeError(f"{op}: {name} must not be quantized, got {value.dtype}")
    return value


def smoothing(op: str, value: Any) -> None:
    """Raises unless ``label_smoothing`` is a number in [0, 1]."""
    if isinstance(value, bool | Tensor):
        raise TypeError(f"{op}: label_smoothing must be a number, got {type(value).__name__}")
    if not 0 <= number(op, "label_smoothing", value) <= 1:
        raise ValueError(f"{op}: label_smoothing must be in [0, 1], got {value}")


def may_wait_for(tensor: Tensor) -> bool:
    """Whether a check may read the tensor's values: on the CPU, and with FOCALKERN_VALIDATE=1 on other devices too."""
    return tensor.device.type == "cpu" or os.environ.get("FOCALKERN_VALIDATE", "").startswith("1")


def labels_to_check(target: Tensor) -> Tensor | None:
    """The labels if invalid ones raise; under torch.func's grad, jvp and vmap too, without their wrappers."""
    labels = values_of(target)
    return labels if labels is not None and may_wait_for(target) else None


def label_range(op: str, target: Tensor, n_classes: int, ignore_index: int | None = None) -> None:
    """Raises unless every label is in [0, n_classes) or ignore_index. It reads the labels, which synchronises a device.

    Raises:
        IndexError: names the first label out of range and its row (the index into the flattened target).
    """
    labels = target.reshape(-1).long()
    if len(labels) == 0:
        return
    low, high = torch.stack(labels.aminmax()).tolist()
    if low >= 0 and high < n_classes:
        return
    invalid = (labels < 0) | (labels >= n_classes)
    if ignore_index is not None:
        invalid = invalid & (labels != ignore_index)  # not in place, which selective checkpoints refuse
    if bool(invalid.any()):
        row = int(invalid.nonzero()[0])
        ignored = "" if ignore_index is None else " or ignore_index"
        found = f"got {int(labels[row])} at row {row}{from_one(labels, n_classes, ignore_index)}"
        raise IndexError(f"{op}: target must be in [0, {n_classes}){ignored}, {found}")


def from_one(labels: Tensor, n_classes: int, ignore_index: int | None = None) -> str:
    """The remedy for labels that count the classes from 1; empty for others."""
    if n_classes == 1:
        return ""
    used = labels if ignore_index is None else labels[labels != ignore_index]
    bounds = [int(bound) for bound in used.aminmax()] if used.numel() else []
    return "; classes count from 0: target - 1" if bounds == [1, n_classes] else ""


ONE_LOGIT = "for one logit per sample use SigmoidFocalLoss (sigmoid_focal_loss) with target.view_as(input)"


ONE_HOT = "for one-hot rows pass target.argmax(1)"
SOFT_ONE_HOT = "one-hot rows are class probabilities: target.to(torch.float32)"


def one_image(*names: str, verb: str = "pass") -> str:
    """The remedy for arguments of a single sample of pixels."""
    return f"for one image [C, d1, ...] {verb} {' and '.join(f'{name}[None]' for name in names)}"


def target_misfit(
    op: str, input: Tensor, target: Tensor, input_name: str = "input", *, labels_only: bool = False
) -> ValueError | None:
    """The error of labels whose shape does not fit logits [C], [N, C] or [N, C, d1, ...], with the likely remedy."""
    n_dims = input.dim()
    if target.shape == input.shape[: min(n_dims - 1, 1)] + input.shape[2:]:
        return None
    found, shape = sizes(target.shape), sizes(input.shape)
    expected = shape[: min(n_dims - 1, 1)] + shape[2:]
    what = f"{'[N]' if n_dims == 2 else '[N, d1, ...]'} = {expected}"
    remedy = ""
    if n_dims == 1:
        what = f"one label, [], for one sample of [C] = {shape} logits"
        remedy = ONE_LOGIT if found == shape else ""
    elif n_dims > 2 and found == shape[:-1]:
        last = n_dims - 2
        remedy = f"classes are dimension 1, not the last: {input_name}.flatten(0, {last}), target.flatten(0, {last})"
    elif n_dims > 2 and found == shape[1:]:
        remedy = one_image(input_name, "target")
    elif found == shape and shape[1] == 1:
        remedy = ONE_LOGIT
    elif found == shape:
        remedy = ONE_HOT if labels_only else SOFT_ONE_HOT
    else:
        remedy = without_class_dim(expected, found)
    return ValueError(f"{op}: target must be {what}, got {found}{remedy and '; '}{remedy}")


def probabilities_misfit(op: str, input: Tensor, target: Tensor) -> ValueError:
    """The error of class probabilities whose shape is not that of the logits, with the likely remedy."""
    expected, found = sizes(input.shape), sizes(target.shape)
    return ValueError(
        f"{op}: target of class probabilities must have the shape of input, {expected}, got {found}"
        f"{float_labels(input, target)}"
    )


def float_labels(input: Tensor, target: Tensor) -> str:
    """The remedy for a floating-point target in the shape of labels; empty for another shape."""
    shape, found, class_dim = sizes(input.shape), sizes(target.shape), min(input.dim() - 1, 1)
    expected = shape[:class_dim] + shape[class_dim + 1 :]
    squeezed = "target" if found == expected else without_class_dim(expected, found)
    if not squeezed:
        return ""
    return f"; {ONE_LOGIT}" if shape[class_dim] == 1 else f"; labels are integers: {squeezed}.long()"


def without_class_dim(expected: list[int], found: list[int]) -> str:
    """The call that removes a dimension of size 1 from labels; empty if they have another shape."""
    if found == [*expected, 1]:
        return "target.squeeze(-1)"
    return "target.squeeze(1)" if found == [*expected[:1], 1, *expected[1:]] else ""


def check_floating(op: str, name: str, value: Tensor) -> None:
    """Raises unless the tensor has a dtype of logits and parameters."""
    if value.dtype not in FLOATS:
        raise TypeError(f"{op}: {name} must be float16, bfloat16, float32 or float64, got {value.dtype}")


def no_float8(op: str, name: str, value: object) -> None:
    """Raises for a floating-point tensor without arithmetic in torch. A compiled graph would check the names that are
    read here before each call, so it leaves them to the operator."""
    if isinstance(value, Tensor) and not torch.compiler.is_compiling() and value.is_floating_point():
        check_floating(op, name, value)


def labels_expected(op: str, input: Tensor, target: Tensor) -> TypeError:
    """The error of a floating-point target for a loss that takes labels only, with the remedy."""
    remedy = f"; {ONE_HOT}" if dense(op, "target", target).dim() > 1 and target.shape == input.shape else TO_INT
    return TypeError(f"{op}: target must be labels, int64, int32 or uint8, got {target.dtype}{remedy}")


def reworded(op: str, error: Exception, labels_only: bool = False, /, **arguments: Any) -> Exception:
    """Turns an error of torch or of the compiled module that names no argument into one that names it.

    It is called only after an error, so that calls without errors do not pay for these checks.
    """
    if isinstance(error, ValueError | IndexError) and f"{op}: target must be" in str(error):
        input, target = arguments["input"], arguments["target"]
        if isinstance(error, ValueError):
            return target_misfit(op, input, target, labels_only=labels_only) or error
        classes = input.shape[min(input.dim() - 1, 1)]
        labels = values_of(target)
        remedy = f"; {ONE_LOGIT}" if classes == 1 else from_one(labels, classes, -100) if labels is not None else ""
        return IndexError(f"{error}{remedy}") if remedy not in str(error) else error
    if isinstance(error, ValueError) and "of class probabilities must have the shape" in str(error):
        return probabilities_misfit(op, arguments["input"], arguments["target"])
    if str(error).startswith(op) or isinstance(error, ValueError | IndexError):
        return error
    for name, value in arguments.items():
        if isinstance(value, Tensor):
            try:
                dense(op, name, value)
                no_float8(op, name, value)
            except TypeError as refused:
                return refused
            if value.is_complex():
                return TypeError(f"{op}: {name} must be real, got {value.dtype}")
    return error


def finite(op: str, name: str, value: Any, expected: str = "a number") -> float:
    found = number(op, name, value, expected)
    if not -math.inf < found < math.inf:  # graphs with variable numbers cannot trace math.isfinite
        raise ValueError(f"{op}: {name} must be finite, got {found}")
    return found


def count_rows(count: int, kind: str = "") -> str:
    """``5,000 rows``; with the kind ``"test "`` it is ``1 test row``."""
    return counted(count, f"{kind}row")


def counted(count: int, noun: str) -> str:
    """``1 bin`` or ``15 bins``."""
    return f"{count:,} {noun}{'s' * (count != 1)}"
