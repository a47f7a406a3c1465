"""Constructor arguments of a calibrator by scikit-learn's conventions, and their checks."""

import inspect
from collections.abc import Iterable, Iterator
from typing import Any, ClassVar, Self

from torch import Tensor

from focalkern._checks import number, short
from focalkern._types import ESTIMATORS, INPUT_KINDS, LOGITS, InputKind, is_assumed

__all__ = ["LOGITS", "Parameters", "as_numbers", "is_assumed", "kept_axis"]


class Parameters:
    """The constructor arguments of a calibrator: read, changed, checked and printed.

    A subclass has ``method`` and an ``__init__`` that only stores its arguments.
    """

    method: ClassVar[str]

    input_kind: InputKind

    def get_params(self, deep: bool = True) -> dict[str, Any]:
        """The arguments of the constructor, by name.

        Args:
            deep: also list the arguments of a nested calibrator, as ``name__argument``.

        Returns:
            {name: value}.

        Example:
            >>> fk.HistogramBinning(n_bins=10).get_params()
            {'n_bins': 10, 'binning': 'equal_mass', 'scaling': None, 'input_kind': 'logits'}
            >>> fk.TemperatureScaling(criterion="brier").get_params()["criterion"]
            'brier'
        """
        params = {name: getattr(self, name) for name in self._defaults()}
        if deep:
            for name, value in list(params.items()):
                if isinstance(value, Parameters):
                    params.update({f"{name}__{key}": nested for key, nested in value.get_params().items()})
        return params

    def set_params(self, **params: Any) -> Self:
        """Change arguments of the constructor; they take effect with the next ``fit``.

        Args:
            **params: new values by name, ``name__argument`` for a nested calibrator.

        Returns:
            The calibrator itself.

        Raises:
            ValueError: a name that the constructor does not have.

        Example:
            >>> calibrator = fk.HistogramBinning(scaling=fk.TemperatureScaling())
            >>> calibrator.set_params(n_bins=10, scaling__criterion="brier").get_params()["scaling__criterion"]
            'brier'
        """
        known = self._defaults()
        for name in params:
            first, _, rest = name.partition("__")
            nested = getattr(self, first) if rest and first in known else None
            if first not in known or (rest and not isinstance(nested, Parameters)):
                raise ValueError(f"{type(self).__name__}: parameters are {', '.join(known)}, got {name!r}")
        # Nested arguments last: the same call may replace the nested calibrator.
        for name, value in sorted(params.items(), key=lambda item: "__" in item[0]):
            first, _, rest = name.partition("__")
            if rest:
                getattr(self, first).set_params(**{rest: value})
            else:
                setattr(self, name, value)
        return self

    def __repr__(self) -> str:
        params = self.get_params(deep=False)
        return f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in params.items())})"

    @classmethod
    def _defaults(cls) -> dict[str, Any]:
        """The arguments of ``__init__`` and their defaults; those of the base class first if it takes ``**options``."""
        found: dict[str, Any] = {}
        for parent in cls.__mro__:
            if "__init__" in vars(parent):
                _, *parameters = inspect.signature(vars(parent)["__init__"]).parameters.values()
                named = [each for each in parameters if each.kind not in (each.VAR_POSITIONAL, each.VAR_KEYWORD)]
                found = {each.name: each.default for each in named} | found
                if all(each.kind != each.VAR_KEYWORD for each in parameters):
                    break
        return found

    def _check_parameters(self) -> None:
        self._check_option("input_kind", INPUT_KINDS)
        name, floor = type(self).__name__, getattr(self, "floor", 0.0)
        if isinstance(floor, bool) or not 0 <= number(name, "floor", floor) < 1:
            raise ValueError(f"{name}: floor must be at least 0 and less than 1, got {short(floor)}")

    def _check_option(self, option: str, known: tuple[Any, ...]) -> None:
        value = getattr(self, option)
        if not isinstance(value, str | None) or value not in known:
            words = ", ".join(str(choice) for choice in known if choice is not None)
            raise ValueError(f"{type(self).__name__}: {option} must be one of {words}, got {short(value)}")

    def _check_estimator(self) -> None:
        self._check_option("estimator", ESTIMATORS)

    def _check_scaling(self, methods: tuple[str, ...], expected: str) -> None:
        """A parameter ``scaling``, a calibrator of one of these methods or None."""
        name, scaling = type(self).__name__, getattr(self, "scaling", None)
        if scaling is None:
            return
        if not isinstance(scaling, Parameters) or scaling.method not in methods:
            raise TypeError(f"{name}: scaling must be {expected} or None, got {type(scaling).__name__}")
        scaling._check_parameters()
        if scaling.input_kind != self.input_kind:
            raise ValueError(f"{name}: input_kind of scaling must be {self.input_kind!r}, got {scaling.input_kind!r}")


def as_numbers(calibrator: str, name: str, values: Iterable[float] | Tensor) -> tuple[float, ...]:
    try:
        return tuple(float(value) for value in (values.tolist() if isinstance(values, Tensor) else values))
    except Exception:  # not iterable, not numbers, beyond float64, or its class raises something else
        raise TypeError(f"{calibrator}: {name} must be a sequence of numbers, got {short(values)}") from None


def kept_axis(axis: Any) -> Any:
    """The axis unchanged, but an iterator as a list, because the first use would exhaust it."""
    return tuple(axis) if isinstance(axis, Iterator) else axis
