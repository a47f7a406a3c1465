"""The JSON file of a calibrator: writing, reading and checks."""

import json
import math
import os
from collections.abc import Mapping
from typing import Any, TypeVar

import numpy as np

from focalkern._checks import short
from focalkern._columns import ClassColumns
from focalkern._version import __version__
from focalkern.calibrators._fitted import BY_METHOD, Fitted, Layout
from focalkern.calibrators._parameters import Parameters, as_numbers

__all__ = [
    "FORMAT_VERSION",
    "LEAST_EPSILON",
    "as_array",
    "as_count",
    "as_list",
    "as_map",
    "as_number",
    "calibrator_from_json",
    "class_of",
    "columns_of_fit",
    "data_of_fit",
    "from_document",
    "nested_document",
    "read_document",
    "to_document",
]

_Value = TypeVar("_Value")

_FORMAT = "focalkern-calibrator"
_WRITTEN = "the .json file of a calibrator, which save or focalkern calibrate wrote"
# Increases with every change of the format. Files of released versions stay readable.
FORMAT_VERSION = 5

# Bound for values read from a file: no search exceeds it.
_MOST_GAMMA, _MOST_TEMPERATURE = 1e6, 1e30
# Lower bound for epsilon = 1 / (N + 1): with a smaller one, 1 - epsilon would round to 1.
LEAST_EPSILON = 1e-100


def to_document(calibrator: Fitted) -> dict[str, Any]:
    """The fitted calibrator as JSON."""
    calibrator._check_fitted()
    fitted, fit = calibrator._fitted_to_json()
    data: dict[str, Any] = {"n_samples": calibrator.n_samples_, "n_classes": calibrator.n_classes_}
    if calibrator._names is not None:
        data["classes"] = calibrator._names.tolist()
    if calibrator.one_logit_:
        data["one_logit"] = True
    if calibrator.dense_:
        data["dense"] = True
    if calibrator.warnings_:
        data["warnings"] = list(calibrator.warnings_)
    return {
        "format": _FORMAT,
        "format_version": FORMAT_VERSION,
        "focalkern": __version__,
        "method": calibrator.method,
        **({"input_floor": calibrator.input_floor_} if calibrator.input_floor_ else {}),
        **fitted,
        "parameters": _parameters_of(calibrator),
        "fit": {**data, **fit},
    }


def nested_document(calibrator: Fitted) -> dict[str, Any]:
    """The fitted calibrator as part of the document of another one."""
    document = to_document(calibrator)
    return {key: document[key] for key in document if key not in ("format", "format_version", "focalkern")}


def _parameters_of(calibrator: Parameters) -> dict[str, Any]:
    """The arguments of the class that ``load_calibrator`` makes, which may be a base class of the calibrator's."""
    return {name: _plain(name, getattr(calibrator, name)) for name in BY_METHOD[calibrator.method]._defaults()}


def _plain(name: str, value: Any) -> Any:
    """A parameter as a JSON value."""
    if isinstance(value, Parameters):
        return {"method": value.method, "parameters": _parameters_of(value)}
    if name in ("gammas", "temperatures") and value is not None:
        return list(as_numbers("save", name, value))
    return int(value) if name == "n_bins" else value


def read_document(path: str | os.PathLike[str]) -> dict[str, Any]:
    """The parsed file. Only format, version and method are checked."""
    try:
        with open(path, "rb") as stream:
            data = stream.read()
    except (FileNotFoundError, IsADirectoryError) as error:
        found = "nothing there" if isinstance(error, FileNotFoundError) else "a folder"
        raise type(error)(error.errno, f"expected {_WRITTEN}, found {found}", os.fspath(path)) from None
    try:
        document = json.loads(data)
    except (ValueError, RecursionError) as error:  # not UTF-8, not JSON, or nested too deep
        found = f"something else ({error})"
        if isinstance(error, UnicodeDecodeError) or not data:
            found = "bytes that are no text" if data else "an empty file"
        raise ValueError(f"{path}: expected {_WRITTEN}, found {found}") from error
    if not isinstance(document, dict) or document.get("format") != _FORMAT:
        raise ValueError(f'{path}: expected a calibrator with "format": "{_FORMAT}", found other JSON; pass {_WRITTEN}')
    version, writer = document.get("format_version"), document.get("focalkern", "of another version")
    if isinstance(version, bool) or version != FORMAT_VERSION:
        newer = isinstance(version, int) and version > FORMAT_VERSION
        remedy = "upgrade focalkern" if newer else "fit and save it again with this version"
        raise ValueError(
            f"{path}: expected a calibrator of format version {FORMAT_VERSION}, found {version!r}, written by "
            f"focalkern {writer}; {remedy}"
        )
    try:
        class_of(document.get("method"))
    except ValueError as error:
        raise ValueError(f"{path}: {error}; fit and save it again") from None
    return document


def class_of(method: Any) -> type[Fitted]:
    """The class of a calibrator in a file."""
    # AutoCalibrator saves the calibrator that it has chosen.
    known = {name: kind for name, kind in BY_METHOD.items() if kind._fitted_from_json != Fitted._fitted_from_json}
    if method not in tuple(known):  # a tuple, because a list or an object in JSON has no hash
        raise ValueError(f"expected a method out of {', '.join(known)}, found {short(method)}")
    return known[method]


def from_document(path: str | os.PathLike[str], document: Mapping[str, Any], cls: type[Fitted] | None = None) -> Fitted:
    """A calibrator from parsed JSON whose format, version and method are checked; ``cls`` as in
    :func:`calibrator_from_json`."""
    try:
        return calibrator_from_json(document, cls)
    except KeyError as error:
        raise ValueError(
            f"{path}: not a complete calibrator, {error.args[0]!r} is missing; fit and save it again"
        ) from error
    except (TypeError, AttributeError, ValueError, OverflowError, RecursionError) as error:
        raise ValueError(f"{path}: not a valid calibrator: {error}; fit and save it again") from error


def calibrator_from_json(document: Mapping[str, Any], cls: type[Fitted] | None = None) -> Fitted:
    """A calibrator, possibly nested in another one. It is fitted if the document has the key ``fit``.

    Args:
        document: parsed JSON.
        cls: the class of the result, a subclass of the saved class whose own arguments have defaults; None is the saved
            class.
    """
    document = _as("a calibrator", document, dict)
    saved = class_of(document["method"])
    cls = cls or saved
    given = _as("parameters", document["parameters"], dict)
    parameters = {key: value for key, value in given.items() if key in saved._defaults()}
    for key, value in parameters.items():
        if isinstance(value, dict):
            parameters[key] = calibrator_from_json(value)
    takes = cls._defaults()
    calibrator = cls(**{key: value for key, value in parameters.items() if key in takes})
    vars(calibrator).update({key: value for key, value in parameters.items() if key not in takes})
    calibrator._check_parameters()
    if "fit" not in document and "format" not in document:
        return calibrator
    fit = _as("fit", document["fit"], dict)
    n_samples = as_count("n_samples", fit["n_samples"])
    n_classes = as_count("n_classes", fit["n_classes"], cls._fewest_classes)
    names = np.asarray(as_list("classes", fit["classes"], str)) if "classes" in fit else None
    if names is not None and names.shape != (n_classes,):
        raise ValueError(f"expected {n_classes} classes with names, found {short(fit['classes'])}")
    if names is not None and len(set(names.tolist())) < n_classes:
        raise ValueError(f"expected every class once, found {short(fit['classes'])}")
    called = columns_of_fit(document)
    columns = ClassColumns.called(called) if len(called) == n_classes else None
    layout = Layout(n_classes, names, fit.get("one_logit") is True, fit.get("dense") is True, columns)
    if layout.one_logit and n_classes != 2:
        raise ValueError(f"expected 2 classes where a row is one logit, found {n_classes}")
    floor = as_number("input_floor", document.get("input_floor", 0.0))
    if not 0 <= floor < 1:
        raise ValueError(f"expected an input_floor of at least 0 and less than 1, found {floor}")
    fitted = calibrator._fitted_from_json(document, fit)
    calibrator._become(fitted, layout, n_samples=n_samples, floor=floor)
    calibrator.warnings_ = tuple(as_list("warnings", fit.get("warnings", []), str))
    calibrator._fitted_on = data_of_fit(document) or None
    return calibrator


def columns_of_fit(document: Mapping[str, Any]) -> tuple[str, ...]:
    """The names of the columns of the table to which a saved calibrator was fitted; empty without names."""
    found = data_of_fit(document).get("validation")
    names = found.get("classes") if isinstance(found, dict) else None
    return tuple(names) if isinstance(names, list) and all(isinstance(name, str) for name in names) else ()


def data_of_fit(document: Mapping[str, Any]) -> Mapping[str, Any]:
    """The description of the rows of a study in a saved calibrator; empty without one."""
    found: Any = document["fit"]
    for key in ("evidence", "data"):
        found = found.get(key) if isinstance(found, dict) else None
    return found if isinstance(found, dict) else {}


_KINDS: dict[type, str] = {dict: "an object", list: "a list", str: "text"}


def _as(name: str, value: Any, kind: type[_Value]) -> _Value:
    """A value from JSON, which must be of this kind."""
    if not isinstance(value, kind):
        raise ValueError(f"{name} must be {_KINDS[kind]}, found {short(value)}")
    return value


def as_list(name: str, value: Any, kind: type[Any] = object) -> list[Any]:
    """A list from JSON, of values of this kind."""
    return [_as(f"{name}[{place}]", one, kind) for place, one in enumerate(_as(name, value, list))]


def as_array(name: str, value: Any) -> np.ndarray[Any, np.dtype[np.float64]]:
    """A list of numbers, or of lists of numbers, from JSON."""
    try:
        return np.array(as_list(name, value), dtype=np.float64)
    except (TypeError, ValueError, OverflowError):
        raise ValueError(f"{name} must be a list of numbers, found {short(value)}") from None


def as_number(name: str, value: Any) -> float:
    """A finite number from JSON."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ValueError(f"{name} must be a finite number, found {short(value)}")
    return float(value)


def as_map(gamma: Any, temperature: Any, names: tuple[str, str] = ("gamma", "temperature")) -> tuple[float, float]:
    """gamma and T of a focal calibration map from JSON, within bounds that prevent overflow in float32."""
    found = as_number(names[0], gamma), as_number(names[1], temperature)
    if not (-1 < found[0] <= _MOST_GAMMA and 1 / _MOST_TEMPERATURE <= found[1] <= _MOST_TEMPERATURE):
        raise ValueError(
            f"expected {names[0]} > -1 and {names[1]} > 0, at most {_MOST_GAMMA:g} and {_MOST_TEMPERATURE:g}, "
            f"found {found[0]} and {found[1]}"
        )
    return found


def as_count(name: str, value: Any, least: int = 1) -> int:
    """A count from JSON."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(f"{name} must be a count of at least {least}, found {short(value)}")
    return value
