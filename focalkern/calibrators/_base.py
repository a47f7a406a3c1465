"""The base of all calibrators: fit, save, load, and the hooks of a subclass."""

import contextlib
import copy
import inspect
import json
import os
import threading
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any, ClassVar, Self, cast

import torch
from torch import Tensor

from focalkern._atomic import write_atomically
from focalkern._checks import flag, path_text, short
from focalkern._devices import cpu_by_default, one_thread, without_autocast
from focalkern._diagnostics import (
    input_problems,
    label_problems,
    likely_sum,
    one_logit_problems,
    refuse_probs,
)
from focalkern.calibrators._document import FORMAT_VERSION, class_of, from_document, read_document, to_document
from focalkern.calibrators._fit_data import FitData, as_rows
from focalkern.calibrators._fitted import Fitted, Layout
from focalkern.calibrators._inputs import floored_input
from focalkern.calibrators._named_columns import given_columns, with_names
from focalkern.calibrators._parameters import is_assumed
from focalkern.calibrators._warnings import warn

__all__ = ["Calibrator", "load_calibrator"]

# The arguments of a method that scikit-learn's metadata routing may pass.
_METADATA = {"fit": ("sample_weight", "ignore_index"), "score": ("sample_weight",)}


class Calibrator(Fitted):
    """Base class of all calibrators; a subclass defines the fit and the map.

    A subclass defines ``method``, an ``__init__`` that only stores its arguments (scikit-learn's convention), and the
    hooks at the end of this class and of :class:`Fitted`.
    """

    _estimator_type = "classifier"  # for scikit-learn before 1.6

    # A fit to at most so many logits takes one thread. Its passes over the rows are short, and on a busy machine the
    # threads of OpenMP would wait for each other longer than they compute.
    _few_logits: ClassVar[float] = 2**20

    def fit(self, logits: Any, target: Any, sample_weight: Any = None, *, ignore_index: int | None = None) -> Self:
        """Fit on held-out data.

        Args:
            logits: [N, C] floating point, tensor or array; probabilities with ``input_kind="probs"``. Or [N], one
                logit (or probability) per row, of class 1 of two classes: equal to [N, 2] with a logit of 0 for class
                0. Or [N, C, d1, ...] with the classes in dimension 1, as in torch's losses: every position is a row,
                and the fitted calibrator takes and returns this layout.
            target: [N], or [N, d1, ...]. Integers, bools and whole floats are class indices, columns of ``logits``.
                Strings, as in scikit-learn, are the columns in alphabetical order; each must occur. Numbers as text
                raise an error if their alphabetical order is not their own. If ``logits`` is a frame and all strings
                are names or numbers of its columns, the classes are the columns in their order (numbered columns in
                the order of their numbers).
            sample_weight: [N], or of the shape of ``target``: a row with weight w counts w times; None is 1.
            ignore_index: label of ignored rows; None ignores no row.

        Returns:
            The calibrator itself, with ``n_samples_``, ``n_classes_``, ``classes_``, ``one_logit_``, ``warnings_``, and
            the attributes that the class documents. After an error, an earlier fit stays unchanged.

        Warns:
            CalibrationWarning: the result should be checked, or the labels cannot be right (shifted, of another row, of
                columns in another order, no better than chance). One warning holds all sentences, each with its remedy
                or likely cause; ``warnings_`` has them too.

        Raises:
            TypeError: logits that are not floating point, a target that is neither integer nor strings.
            ValueError: no rows; one class; shapes that do not fit; NaN or +inf logits; logits that look like
                probabilities, unless ``input_kind`` was given; an option or parameter outside its domain; more or fewer
                strings than classes.
            IndexError: an integer target outside [0, C).

        Example:
            >>> logits, labels = torch.tensor([[4.0, 0.0]]).repeat(10, 1), torch.tensor([0] * 8 + [1] * 2)
            >>> calibrator = fk.HistogramBinning(n_bins=2).fit(logits, labels)
            >>> calibrator.n_samples_, calibrator.n_classes_, calibrator.warnings_
            (10, 2, ())
        """
        assumed = is_assumed(self.input_kind)
        rows = self._fit_rows(logits, target, sample_weight, ignore_index, assumed=assumed)
        if not rows.one_logit:
            of_input = input_problems(rows.input, self.input_kind, assumed=assumed)
        else:
            of_input = one_logit_problems(rows.input[:, 1]) if self.input_kind == "logits" else []
        self.warnings_ = (*of_input, *label_problems(rows.input, rows.target), *self.warnings_)
        warn(type(self).__name__, self.warnings_)
        self._look_at_next(self.input_kind == "logits" and not likely_sum(rows.input))
        return self

    def fit_quietly(
        self, logits: Any, target: Any, sample_weight: Any = None, *, ignore_index: int | None = None
    ) -> Self:
        """:meth:`fit` without the warning and without the checks of labels, for callers that read ``warnings_``.

        Args:
            logits, target, sample_weight, ignore_index: as :meth:`fit`.

        Returns:
            The calibrator itself.

        Raises:
            TypeError, ValueError, IndexError: as :meth:`fit`.

        Example:
            >>> logits, labels = torch.tensor([[4.0, 0.0]]).repeat(10, 1), torch.tensor([0] * 8 + [1] * 2)
            >>> calibrator = fk.TemperatureScaling(temperatures=[1.0, 2.0]).fit_quietly(logits, labels)
            >>> len(calibrator.warnings_)  # the optimum lies beyond 2
            1
        """
        self._fit_rows(logits, target, sample_weight, ignore_index)
        return self

    @cpu_by_default()
    def _fit_rows(
        self, logits: Any, target: Any, sample_weight: Any, ignore_index: int | None, *, assumed: bool = False
    ) -> FitData:
        """Fit, and return the rows; ``assumed`` means that the user did not set ``input_kind``."""
        name = type(self).__name__
        self._check_parameters()
        input = self._as_tensor(logits)
        columns = given_columns(name, logits)
        one_logit = input.dim() == 1
        input = self._pairs(input) if one_logit else input
        rows = as_rows(
            name,
            input,
            target,
            sample_weight,
            ignore_index,
            input_kind=self.input_kind,
            one_logit=one_logit,
            columns=columns,
        )
        if assumed:
            refuse_probs(name, rows.input)
        floor = float(getattr(self, "floor", 0.0))
        of_fit = replace(rows, input=floored_input(rows.input, floor, self.input_kind)) if floor else rows
        # In another thread the setting would race with those of other fits.
        is_small = rows.input.numel() <= self._few_logits and threading.current_thread() is threading.main_thread()
        with one_thread() if is_small else contextlib.nullcontext(), without_autocast(rows.input.device.type):
            fitted = self._fit(of_fit)
            layout = Layout(rows.input.shape[1], rows.names, one_logit, rows.dense, with_names(columns))
            self._become(fitted, layout, n_samples=len(rows.input), floor=floor)
            self.warnings_ = tuple(self._fit_warnings(of_fit))
        return rows

    def as_module(self, *, fused: bool = True) -> torch.nn.Module:
        """The fitted map as a module, to append to a network.

        It maps logits [..., C] to calibrated log-probabilities; after a fit on one logit per row, it maps logits
        [...] to calibrated logits.

        Args:
            fused: the compiled operator, if the map has one; False computes in torch's own operators, for exporters
                that support only these.

        Returns:
            The module, without parameters to train.

        Raises:
            NotFittedError: call ``fit`` or ``load`` first.
            TypeError: ``fused`` is no bool.

        Example:
            >>> logits, labels = torch.tensor([[4.0, 0.0]]).repeat(10, 1), torch.tensor([0] * 8 + [1] * 2)
            >>> calibrator = fk.TemperatureScaling().fit(logits, labels)
            >>> network = torch.nn.Sequential(torch.nn.Linear(5, 2), calibrator.as_module())
            >>> network(torch.ones(1, 5)).exp().sum().round(decimals=4).item()
            1.0
        """
        self._check_fitted()
        flag(type(self).__name__, "fused", fused)
        return self._placed(self._module(fused, one_logit=self.one_logit_))

    def save(self, path: str | os.PathLike[str], *, evidence: Mapping[str, Any] | None = None) -> None:
        """Write the fitted calibrator as JSON. The write is atomic: after an error an existing file is unchanged.

        Args:
            path: the file to write; :func:`focalkern.load_calibrator` reads it.
            evidence: reasons for this calibrator, a mapping that ``json.dumps`` accepts; the file holds it in the
                summary of the fit.

        Raises:
            NotFittedError: call ``fit`` or ``load`` first.
            OSError: the file cannot be written.

        Example:
            >>> logits, labels = torch.tensor([[4.0, 0.0]]).repeat(10, 1), torch.tensor([0] * 8 + [1] * 2)
            >>> fk.TemperatureScaling().fit(logits, labels).save("calibrator.json")
            >>> round(fk.load_calibrator("calibrator.json").temperature_, 4)
            2.8854
        """
        path = path_text(type(self).__name__, "path", path)
        write_atomically(path, self._to_bytes(evidence))

    def _to_bytes(self, evidence: Mapping[str, Any] | None = None) -> bytes:
        """The content of the file that ``save`` writes."""
        document = self._document()
        if evidence is not None:
            name = type(self).__name__
            if not isinstance(evidence, Mapping):
                raise TypeError(f"{name}: evidence must be a mapping, got {short(evidence)}")
            try:
                document["fit"]["evidence"] = json.loads(json.dumps(dict(evidence), allow_nan=False))
            except (TypeError, ValueError) as error:
                raise TypeError(f"{name}: evidence must be what json.dumps takes, got {short(evidence)}") from error
        return (json.dumps(document, indent=2, allow_nan=False) + "\n").encode()

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Self:
        """Read a calibrator that ``save`` wrote.

        Args:
            path: the file. A file of a subclass without its own ``method`` has the arguments of its base class.

        Returns:
            The fitted calibrator, of this class. The other arguments of a subclass have their defaults.

        Raises:
            OSError: the file cannot be read.
            ValueError: the file is not a calibrator, or has another format version or another class.
            TypeError: an argument of a subclass is neither in the file nor has a default.

        Example:
            >>> logits, labels = torch.tensor([[4.0, 0.0]]).repeat(10, 1), torch.tensor([0] * 8 + [1] * 2)
            >>> fk.TemperatureScaling().fit(logits, labels).save("calibrator.json")
            >>> round(fk.TemperatureScaling.load("calibrator.json").temperature_, 4)
            2.8854
        """
        document = read_document(path_text(cls.__name__, "path", path))
        saved = class_of(document["method"])
        method = getattr(cls, "method", cls.__name__)
        if method != saved.method and not issubclass(saved, cls):
            raise ValueError(
                f"{path}: expected a calibrator of method {method!r}, found {saved.method!r}; load_calibrator reads any"
            )
        kind = saved if issubclass(saved, cls) else cls
        absent = [
            name
            for name, default in kind._defaults().items()
            if default is inspect.Parameter.empty and name not in saved._defaults()
        ]
        if absent:
            raise TypeError(
                f"{cls.__name__}: load expected a default for each argument that {saved.__name__} lacks, found none "
                f"for {', '.join(absent)}; give it one, or call load_calibrator, which returns a {saved.__name__}"
            )
        loaded = from_document(path, document, kind)
        loaded._look_at_next(loaded.input_kind == "logits")
        return cast(Self, loaded)

    def __getstate__(self) -> dict[str, Any]:
        state = {name: value for name, value in vars(self).items() if name != "_made_for"}
        return {**state, "_format_version": FORMAT_VERSION}

    def __setstate__(self, state: dict[str, Any]) -> None:
        version = state.get("_format_version")
        if version != FORMAT_VERSION:
            raise ValueError(
                f"{type(self).__name__}: expected a pickle of format version {FORMAT_VERSION}, found {version}; load "
                "it with the focalkern that wrote it, or fit again"
            )
        vars(self).update({name: value for name, value in state.items() if name != "_format_version"})

    def __sklearn_is_fitted__(self) -> bool:
        return hasattr(self, "n_classes_")

    def __sklearn_tags__(self) -> Any:
        # Only scikit-learn (1.6 and newer) calls this, so it is installed here.
        from sklearn.utils import ClassifierTags, InputTags, Tags, TargetTags

        return Tags(
            estimator_type="classifier",
            target_tags=TargetTags(required=True),
            classifier_tags=ClassifierTags(),
            input_tags=InputTags(one_d_array=True),
        )

    def get_metadata_routing(self) -> Any:
        """The requests of ``fit`` and ``score``, which scikit-learn reads if its metadata routing is enabled.

        Returns:
            A ``sklearn.utils.metadata_routing.MetadataRequest``.
        """
        from sklearn.utils.metadata_routing import MetadataRequest  # only scikit-learn's users call this

        known = getattr(self, "_metadata_request", None)  # scikit-learn's name: its clone copies the attribute
        if known is not None:
            return copy.deepcopy(known)
        request = MetadataRequest(owner=type(self).__name__)
        for method, names in _METADATA.items():
            for name in names:
                getattr(request, method).add_request(param=name, alias=None)
        return request

    def set_fit_request(self, **requests: bool | str | None) -> Self:
        """Request arguments of ``fit`` from pipelines and searches of scikit-learn whose metadata routing is enabled.

        Args:
            **requests: ``sample_weight`` or ``ignore_index``: True to get it, a string for its name in the caller,
                False to ignore it, None to raise if the caller has it.

        Returns:
            The calibrator itself.

        Raises:
            TypeError: a name that ``fit`` does not have.
        """
        return self._set_request("fit", requests)

    def set_score_request(self, **requests: bool | str | None) -> Self:
        """Request arguments of ``score``, as :meth:`set_fit_request` those of ``fit``.

        Args:
            **requests: ``sample_weight``, as in :meth:`set_fit_request`.

        Returns:
            The calibrator itself.

        Raises:
            TypeError: a name that ``score`` does not have.
        """
        return self._set_request("score", requests)

    def _set_request(self, method: str, requests: Mapping[str, bool | str | None]) -> Self:
        request, known = self.get_metadata_routing(), _METADATA[method]
        for name, alias in requests.items():
            if name not in known:
                raise TypeError(f"{type(self).__name__}: arguments of {method} are {', '.join(known)}, got {name!r}")
            getattr(request, method).add_request(param=name, alias=alias)
        self._metadata_request = request
        return self

    def _document(self) -> dict[str, Any]:
        return to_document(self)

    # -- hooks of a subclass ------------------------------------------------------------------------------------

    def _fit(self, rows: FitData) -> dict[str, Any]:
        """Fits to the rows and returns the fitted attributes by name."""
        raise NotImplementedError

    def _module(self, fused: bool = True, *, one_logit: bool = False) -> torch.nn.Module:
        """The fitted map before the floor, as :meth:`as_module` returns it."""
        raise NotImplementedError

    def _made(self, device: torch.device) -> Any:
        return self._module().to(device)

    def _fit_warnings(self, rows: FitData) -> Iterable[str]:
        """Sentences of the warning about a fit on these rows, each with its remedy."""
        return self._warnings_of(torch.bincount(rows.target, minlength=rows.input.shape[1]))

    def _warnings_of(self, class_counts: Tensor) -> Iterable[str]:
        """The warnings of :meth:`_fit_warnings` that need only the number of rows per class [C]."""
        return ()


def load_calibrator(path: str | os.PathLike[str]) -> Calibrator:
    """Reads any calibrator that ``save`` wrote; its class is stored in the file.

    Args:
        path: the file.

    Returns:
        The fitted calibrator, of the class that was saved.

    Raises:
        OSError: the file cannot be read.
        ValueError: the file is not a calibrator, or has another format version.

    Example:
        >>> logits, labels = torch.tensor([[4.0, 0.0]]).repeat(10, 1), torch.tensor([0] * 8 + [1] * 2)
        >>> fk.TemperatureScaling().fit(logits, labels).save("calibrator.json")
        >>> calibrator = fk.load_calibrator("calibrator.json")
        >>> type(calibrator).__name__, round(calibrator.temperature_, 4)
        ('TemperatureScaling', 2.8854)
    """
    path = path_text("load_calibrator", "path", path)
    loaded = cast(Calibrator, from_document(path, read_document(path)))
    loaded._look_at_next(loaded.input_kind == "logits")
    return loaded
