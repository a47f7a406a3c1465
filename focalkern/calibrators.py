"""Calibrators: fitted on held-out logits, applied to new ones, saved as JSON, appended to a network as a module."""

import json
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar, Literal, Self, get_args

import torch
from torch import Tensor

from focalkern._atomic import write_atomically
from focalkern.metrics import ESTIMATORS, as_tensor
from focalkern.ops.calibration_grid import PAPER_GAMMAS, PAPER_TEMPERATURES, CalibrationGrid, calibration_grid
from focalkern.ops.calibration_map import focal_calibration_map

__all__ = [
    "DEFAULT_GAMMAS",
    "CalibratedLogProbs",
    "FocalTemperatureScaling",
    "NotFittedError",
    "TemperatureScaling",
    "grid_border",
    "load_calibrator",
]

DEFAULT_GAMMAS: tuple[float, ...] = (0.0, *PAPER_GAMMAS)
"""What :class:`FocalTemperatureScaling` searches: the paper's nine values, and before them 0, plain temperature
scaling. First, because of two equal cells the earlier one is taken: the plainer calibrator wins a tie."""

Criterion = Literal["ece", "nll"]
Estimator = Literal["equal_width", "equal_mass", "equal_mass_interp"]
InputKind = Literal["logits", "probs"]

_FORMAT = "focalkern-calibrator"
_FORMAT_VERSION = 1
_CRITERIA: tuple[Criterion, ...] = get_args(Criterion)
_NOTHING = torch.iinfo(torch.int64).min
_INPUT_KINDS: tuple[InputKind, ...] = get_args(InputKind)


class NotFittedError(ValueError, AttributeError):
    """A calibrator was used before ``fit`` or ``load``."""


class CalibratedLogProbs(torch.nn.Module):
    r"""Logits (or probabilities) to calibrated log-probabilities, with the constants of a fitted calibrator.

    .. math:: q = \text{softmax}(z / T), \quad \hat p_j \propto \frac{q_j}{(1 - q_j)^\gamma (1 + \gamma \varphi(q_j))}

    with phi(q) = -q log q / (1 - q). Both constants are Python numbers, not buffers, so that ``module.half()`` does
    not round them; ``torch.export`` and ``torch.compile`` take them as constants. ``state_dict`` has them as one
    float64 tensor [gamma, temperature].

    Args:
        gamma: > -1, put straight into the formula; 0 is temperature scaling.
        temperature: > 0.
        input_kind: ``"logits"`` or ``"probs"``, what ``forward`` will be given.

    Source: Komisarenko & Kull 2024 (arXiv 2408.11598), section 4.
    """

    def __init__(self, gamma: float, temperature: float, input_kind: InputKind = "logits") -> None:
        super().__init__()
        self.gamma = float(gamma)
        self.temperature = float(temperature)
        self.input_kind = input_kind

    def forward(self, input: Tensor) -> Tensor:
        """``input`` [..., C], floating point -> log-probabilities [..., C]."""
        return focal_calibration_map(input, self.gamma, self.temperature, input_kind=self.input_kind, log=True)

    def get_extra_state(self) -> Tensor:
        return torch.tensor([self.gamma, self.temperature], dtype=torch.float64)

    def set_extra_state(self, state: Tensor) -> None:
        self.gamma, self.temperature = state.tolist()

    def extra_repr(self) -> str:
        return f"gamma={self.gamma}, temperature={self.temperature}, input_kind={self.input_kind!r}"


class _Scaling:
    """What both calibrators share: everything but which gammas are searched."""

    method: ClassVar[str]

    # scikit-learn's contract: __init__ stores its arguments as they are and looks at them in fit only.
    _parameter_names: ClassVar[tuple[str, ...]] = ("temperatures", "criterion", "estimator", "n_bins", "input_kind")

    temperatures: Iterable[float] | Tensor | None
    criterion: Criterion
    estimator: Estimator
    n_bins: int
    input_kind: InputKind

    # Set by fit and load.
    gamma_: float
    temperature_: float
    best_value_: float
    n_classes_: int
    n_samples_: int
    at_border_: tuple[str, ...]
    grid_: CalibrationGrid

    def fit(self, logits: Any, target: Any) -> Self:
        """Search the grid on held-out data.

        Args:
            logits: [N, C] floating point, tensor or array; probabilities with ``input_kind="probs"``.
            target: [N] class indices, integer, tensor or array.

        Returns:
            The calibrator itself, with ``temperature_``, ``gamma_`` (0 for :class:`TemperatureScaling`),
            ``best_value_`` (the criterion at the optimum), ``at_border_`` (in words, each parameter whose optimum is
            the first or last value that was searched), ``n_samples_``, ``n_classes_`` and ``grid_``, the whole
            :class:`focalkern.CalibrationGrid`.

        Raises:
            TypeError: logits that are not floating point, a target that is not integer.
            ValueError: no rows; one class; shapes that do not fit; NaN or +inf logits; a temperature <= 0, a gamma
                <= -1; an unknown criterion or estimator; n_bins < 1; no cell with a finite criterion.
            IndexError: a target outside [0, C).
        """
        name = type(self).__name__
        self._check_parameters()
        input, target = as_tensor(logits), _as_target(target)
        _check_input(name, input)
        if target.dim() != 1 or target.shape[0] != input.shape[0]:
            raise ValueError(f"{name}: target must be [N] = [{input.shape[0]}], got {list(target.shape)}")
        if input.shape[0] == 0:
            raise ValueError(f"{name}: fit needs at least one row, got none")
        grid = calibration_grid(
            input,
            target,
            self._gammas(),
            self._temperatures(),
            n_bins=self.n_bins,
            criteria=(self.criterion,),
            estimator=self.estimator,
            input_kind=self.input_kind,
            # Every row counts here: a label of -100 is as wrong as any other that is no class.
            ignore_index=_NOTHING,
        )
        return self.choose(grid, n_samples=input.shape[0], n_classes=input.shape[1])

    def choose(self, grid: CalibrationGrid, *, n_samples: int, n_classes: int) -> Self:
        """Take the optimum of a grid that is there already, in place of ``fit``, which would search it again.

        Args:
            grid: holds the table of ``criterion``. The gammas and temperatures are the grid's, whatever the
                calibrator's own are.
            n_samples, n_classes: shape of the logits that the grid was computed on.

        Returns:
            The calibrator itself, fitted as by ``fit``.

        Raises:
            ValueError: the criterion is not in the grid, or no cell of it is finite.
        """
        self.gamma_, self.temperature_, self.best_value_ = grid.best(self.criterion)
        self.at_border_ = grid_border(grid, self.gamma_, self.temperature_)
        self.n_samples_, self.n_classes_ = n_samples, n_classes
        self.grid_ = grid
        return self

    def predict_proba(self, logits: Any) -> Any:
        """Calibrated probabilities.

        Args:
            logits: [..., C] floating point, with the number of classes of ``fit``.

        Returns:
            [..., C] probabilities: a tensor for a tensor, on its device; a NumPy array for anything else.

        Raises:
            NotFittedError: neither ``fit`` nor ``load`` came before.
            TypeError, ValueError: as ``fit``.
        """
        return self._predict(logits, log=False)

    def predict_log_proba(self, logits: Any) -> Any:
        """Calibrated log-probabilities; as :meth:`predict_proba`."""
        return self._predict(logits, log=True)

    def predict(self, logits: Any) -> Any:
        """Class indices [...], int64: the largest *input*, which no calibrator of this module changes."""
        self._check_fitted()
        input = as_tensor(logits)
        self._check_classes(input)
        return _like(logits, input.argmax(-1))

    def as_module(self) -> CalibratedLogProbs:
        """The fitted map as a module from logits to calibrated log-probabilities, to append to a network.

        Raises:
            NotFittedError: neither ``fit`` nor ``load`` came before.
        """
        self._check_fitted()
        return CalibratedLogProbs(self.gamma_, self.temperature_, self.input_kind)

    def get_params(self, deep: bool = True) -> dict[str, Any]:
        """The arguments of the constructor, by name. ``deep`` is scikit-learn's and changes nothing here."""
        return {name: getattr(self, name) for name in self._parameter_names}

    def set_params(self, **params: Any) -> Self:
        """Change arguments of the constructor; they take effect with the next ``fit``.

        Raises:
            ValueError: a name that the constructor does not have.
        """
        for name in params:
            if name not in self._parameter_names:
                raise ValueError(
                    f"{type(self).__name__}: parameters are {', '.join(self._parameter_names)}, got {name!r}"
                )
        for name, value in params.items():
            setattr(self, name, value)
        return self

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the fitted calibrator as JSON. All of it or nothing: a failed write leaves an existing file alone.

        Raises:
            NotFittedError: neither ``fit`` nor ``load`` came before.
            OSError: the file cannot be written.
        """
        write_atomically(path, (json.dumps(self._to_json(), indent=2, allow_nan=False) + "\n").encode())

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Self:
        """Read what ``save`` wrote. ``grid_`` is not in the file.

        Raises:
            OSError: the file cannot be read.
            ValueError: it is not a calibrator, is of a newer version, or of another class.
        """
        document = _read_json(path)
        if document["method"] != cls.method:
            raise ValueError(f"{path}: expected a calibrator of method {cls.method!r}, found {document['method']!r}")
        return cls._from_json(path, document)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{k}={v!r}' for k, v in self.get_params().items())})"

    def __sklearn_is_fitted__(self) -> bool:
        return hasattr(self, "temperature_")

    # -- private ------------------------------------------------------------------------------------------------

    def _gammas(self) -> Any:
        raise NotImplementedError

    def _temperatures(self) -> Any:
        return PAPER_TEMPERATURES if self.temperatures is None else _as_numbers("temperatures", self.temperatures)

    def _predict(self, logits: Any, log: bool) -> Any:
        self._check_fitted()
        input = as_tensor(logits)
        self._check_classes(input)
        output = focal_calibration_map(input, self.gamma_, self.temperature_, input_kind=self.input_kind, log=log)
        return _like(logits, output)

    def _check_parameters(self) -> None:
        name = type(self).__name__
        for option, known in (
            ("criterion", _CRITERIA),
            ("estimator", ESTIMATORS),
            ("input_kind", _INPUT_KINDS),
        ):
            value = getattr(self, option)
            if value not in known:
                raise ValueError(f"{name}: {option} must be one of {', '.join(known)}, got {value!r}")

    def _check_fitted(self) -> None:
        if not hasattr(self, "temperature_"):
            name = type(self).__name__
            raise NotFittedError(f"{name}: not fitted yet; call fit(logits, target) or {name}.load(path) first")

    def _check_classes(self, input: Tensor) -> None:
        _check_input(type(self).__name__, input, any_rank=True)
        if input.shape[-1] != self.n_classes_:
            raise ValueError(
                f"{type(self).__name__}: logits must have the {self.n_classes_} classes of fit, "
                f"got shape {list(input.shape)}"
            )

    def _to_json(self) -> dict[str, Any]:
        self._check_fitted()
        return {
            "format": _FORMAT,
            "format_version": _FORMAT_VERSION,
            "method": self.method,
            "gamma": self.gamma_,
            "temperature": self.temperature_,
            "parameters": {key: _plain(key, value) for key, value in self.get_params().items()},
            "fit": {
                "n_samples": self.n_samples_,
                "n_classes": self.n_classes_,
                "best_value": self.best_value_,
                "at_border": list(self.at_border_),
            },
        }

    @classmethod
    def _from_json(cls, path: str | os.PathLike[str], document: Mapping[str, Any]) -> Self:
        try:
            known = {key: value for key, value in document["parameters"].items() if key in cls._parameter_names}
            calibrator = cls(**known)
            calibrator._check_parameters()
            fit = document["fit"]
            calibrator.gamma_ = _number("gamma", document["gamma"])
            calibrator.temperature_ = _number("temperature", document["temperature"])
            calibrator.best_value_ = _number("best_value", fit["best_value"])
            calibrator.n_samples_, calibrator.n_classes_ = _count(fit["n_samples"]), _count(fit["n_classes"])
            calibrator.at_border_ = tuple(str(text) for text in fit["at_border"])
            if not (calibrator.gamma_ > -1 and calibrator.temperature_ > 0):
                raise ValueError(
                    f"expected gamma > -1 and temperature > 0, found {calibrator.gamma_} and {calibrator.temperature_}"
                )
        except KeyError as error:
            raise ValueError(f"{path}: not a complete calibrator, {error.args[0]!r} is missing") from error
        except (TypeError, AttributeError, ValueError) as error:
            raise ValueError(f"{path}: not a valid calibrator: {error}") from error
        return calibrator


class TemperatureScaling(_Scaling):
    r"""Temperature scaling, the temperature chosen on a grid.

    .. math:: \hat p = \text{softmax}(z / T)

    Args:
        temperatures: the grid, all > 0; the paper's 0.01, 0.02, ... 5 when None. Of equal optima the first is taken.
        criterion: ``"ece"``, with ``estimator`` and ``n_bins``, or ``"nll"``.
        estimator: ``"equal_mass"``, ``"equal_mass_interp"`` or ``"equal_width"``; see :mod:`focalkern.metrics`.
        n_bins: bins of the ECE.
        input_kind: ``"logits"`` or ``"probs"``; never guessed. Exact zeros among probabilities stay zero.

    Source: Guo et al. 2017 (arXiv 1706.04599), section 4.2; the grid and the ECE criterion of Komisarenko & Kull 2024
    (arXiv 2408.11598), section 5.
    """

    method = "temperature"

    def __init__(
        self,
        *,
        temperatures: Iterable[float] | Tensor | None = None,
        criterion: Criterion = "ece",
        estimator: Estimator = "equal_mass",
        n_bins: int = 15,
        input_kind: InputKind = "logits",
    ) -> None:
        self.temperatures = temperatures
        self.criterion = criterion
        self.estimator = estimator
        self.n_bins = n_bins
        self.input_kind = input_kind

    def _gammas(self) -> Any:
        return (0.0,)


class FocalTemperatureScaling(_Scaling):
    r"""Temperature scaling followed by the focal calibration map, both parameters chosen on a grid.

    .. math:: q = \text{softmax}(z / T), \quad \hat p_j \propto \frac{q_j}{(1 - q_j)^\gamma (1 + \gamma \varphi(q_j))}

    with phi(q) = -q log q / (1 - q). gamma > 0 raises confidence where it is high, gamma < 0 lowers it; a negative
    gamma is put straight into the formula and is *not* the inverse focal loss of :func:`focalkern.focal_loss`.

    Args:
        gammas: all > -1; :data:`DEFAULT_GAMMAS` when None: 0, and then the paper's nine values. As gamma = 0 is
            temperature scaling, on the data of ``fit`` the result is never worse by the criterion than
            :class:`TemperatureScaling`; and because 0 comes first and of equal optima the first is taken, it differs
            from it only where it is better. ``focalkern.PAPER_GAMMAS`` is the paper's own grid, without 0.
        temperatures: as :class:`TemperatureScaling`.
        criterion: as :class:`TemperatureScaling`.
        estimator: as :class:`TemperatureScaling`. The paper selects by ``"equal_mass"``, its published code by
            ``"equal_mass_interp"``.
        n_bins: as :class:`TemperatureScaling`.
        input_kind: as :class:`TemperatureScaling`.

    Source: Komisarenko & Kull 2024 (arXiv 2408.11598), section 5.
    """

    method = "focal-temperature"
    _parameter_names = ("gammas", *_Scaling._parameter_names)

    gammas: Iterable[float] | Tensor | None

    def __init__(
        self,
        *,
        gammas: Iterable[float] | Tensor | None = None,
        temperatures: Iterable[float] | Tensor | None = None,
        criterion: Criterion = "ece",
        estimator: Estimator = "equal_mass",
        n_bins: int = 15,
        input_kind: InputKind = "logits",
    ) -> None:
        self.gammas = gammas
        self.temperatures = temperatures
        self.criterion = criterion
        self.estimator = estimator
        self.n_bins = n_bins
        self.input_kind = input_kind

    def _gammas(self) -> Any:
        return DEFAULT_GAMMAS if self.gammas is None else _as_numbers("gammas", self.gammas)


_BY_METHOD: dict[str, type[TemperatureScaling] | type[FocalTemperatureScaling]] = {
    cls.method: cls for cls in (TemperatureScaling, FocalTemperatureScaling)
}


def load_calibrator(path: str | os.PathLike[str]) -> TemperatureScaling | FocalTemperatureScaling:
    """Read any calibrator that ``save`` wrote; the file says which.

    Raises:
        OSError: the file cannot be read.
        ValueError: it is not a calibrator, or is of a newer version.
    """
    document = _read_json(path)
    return _BY_METHOD[document["method"]]._from_json(path, document)


def grid_border(grid: CalibrationGrid, gamma: float, temperature: float) -> tuple[str, ...]:
    """In words, each parameter of a chosen cell that is the smallest or largest of those searched.

    Args:
        grid: the grid that was searched.
        gamma, temperature: the chosen cell.

    Returns:
        Up to two sentences without a full stop, such as ``"gamma = 5 is the largest that was searched"``. Nothing is
        said of a parameter of which only one value was searched.
    """
    words = []
    for name, value, axis in (("gamma", gamma, grid.gammas), ("temperature", temperature, grid.temperatures)):
        low, high = float(axis.min()), float(axis.max())
        if low < high and value in (low, high):
            words.append(f"{name} = {value:g} is the {'smallest' if value == low else 'largest'} that was searched")
    return tuple(words)


def _as_target(values: Any) -> Tensor:
    target = as_tensor(values)
    if target.is_floating_point() or target.is_complex() or target.dtype == torch.bool:
        raise TypeError(f"fit: target must be integer class indices, got {target.dtype}")
    return target.to(torch.int64)


def _like(given: Any, result: Tensor) -> Any:
    return result if isinstance(given, Tensor) else result.numpy()


def _check_input(name: str, input: Tensor, *, any_rank: bool = False) -> None:
    if not input.is_floating_point():
        raise TypeError(f"{name}: logits must be floating point, got {input.dtype}")
    if input.dim() < 1 or (not any_rank and input.dim() != 2):
        raise ValueError(f"{name}: logits must be [N, C], got shape {list(input.shape)}")
    if input.shape[-1] < 2:
        raise ValueError(f"{name}: logits must have at least 2 classes, got shape {list(input.shape)}")


def _as_numbers(name: str, values: Iterable[float] | Tensor) -> tuple[float, ...]:
    if isinstance(values, Tensor):
        values = values.tolist()
    try:
        return tuple(float(value) for value in values)
    except TypeError:
        raise TypeError(f"fit: {name} must be a sequence of numbers, got {values!r}") from None


def _plain(name: str, value: Any) -> Any:
    """A parameter as JSON has it."""
    if name in ("gammas", "temperatures") and value is not None:
        return list(_as_numbers(name, value))
    return int(value) if name == "n_bins" else value


def _number(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ValueError(f"{name} must be a finite number, found {value!r}")
    return float(value)


def _count(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"expected a count of at least 1, found {value!r}")
    return value


def _read_json(path: str | os.PathLike[str]) -> dict[str, Any]:
    """The parsed file; format, version and method are checked, nothing else."""
    with open(path, "rb") as stream:
        data = stream.read()
    try:
        document = json.loads(data)
    except ValueError as error:  # not UTF-8, or not JSON
        raise ValueError(f"{path}: expected a calibrator in JSON, found something else ({error})") from error
    if not isinstance(document, dict) or document.get("format") != _FORMAT:
        raise ValueError(f'{path}: expected a calibrator with "format": "{_FORMAT}", found other JSON')
    version = document.get("format_version")
    if isinstance(version, bool) or not isinstance(version, int) or not 1 <= version <= _FORMAT_VERSION:
        raise ValueError(f"{path}: expected a calibrator of format version 1 to {_FORMAT_VERSION}, found {version!r}")
    method: Sequence[str] = tuple(_BY_METHOD)
    if document.get("method") not in method:
        raise ValueError(f"{path}: expected a method out of {', '.join(method)}, found {document.get('method')!r}")
    return document
