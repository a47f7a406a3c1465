"""The functions that ``test_odd_arguments.py`` calls, and the arguments that it passes."""

import inspect
import os
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

import focalkern as fk
from focalkern import bootstrap, calibrators, files, losses, metrics, plots, study
from focalkern.files.shards import open_shards
from focalkern.reference._softmax_losses import ROW_LOSSES

NAN, INF = float("nan"), float("inf")
Z = np.random.default_rng(0).normal(size=(6, 4))
P = np.exp(Z) / np.exp(Z).sum(1, keepdims=True)
Y = np.array([0, 1, 2, 3, 0, 1])


EXAMPLES = int(os.environ.get("FOCALKERN_FUZZ", "0"))


def examples(usual: int) -> Iterator[np.random.Generator]:
    """A generator of random numbers for every example: the same in every run, or N new ones with FOCALKERN_FUZZ=N."""
    first = int(np.random.SeedSequence().entropy) if EXAMPLES else 0
    for number in range(EXAMPLES or usual):
        random = np.random.default_rng((first, number))
        try:
            yield random
        except GeneratorExit:
            print(f"the example is default_rng(({first}, {number}))")
            raise


class Refuses:
    """An object that raises an error if it is converted to a number or an array."""

    def __float__(self) -> float:
        raise RuntimeError("no number")

    def __array__(self, *arguments: Any, **options: Any) -> Any:
        raise RuntimeError("no array")


def values() -> list[Any]:
    """Valid and invalid values, created anew by each call, because some are consumed."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns about some kinds of tensors
        return _values()


def _values() -> list[Any]:
    z, p, y = torch.from_numpy(Z), torch.from_numpy(P), torch.from_numpy(Y)
    return [
        *(None, True, False, 0, 1, 2, 3, -1, 15, 10**9, -(2**63), 10**30, 10**400),
        *(0.0, 0.5, 1.0, 2.0, -0.5, -1.0, -5.0, 1e-300, 1e300, NAN, INF, -INF, 1j),
        *("", "mean", "none", "probs", "equal_mass", "nll", "auto", "*", "\x00", "a\nb", "x" * 5000, b"bytes"),
        *(object(), Refuses(), [], {}, (), set(), {"a": 1}, {1: Z}, [1.0], ["a"], [[]], [None], [[1.0], []]),
        *([0.0, 1.0], [1.0, 2.0], (0.5, NAN), [10**400], [[1.0, 2.0], [3.0]], range(3), iter([1.0]), (Z, Y), (P, Y)),
        *(np.float32(1), np.int8(3), np.bool_(True), np.str_("mean"), np.complex64(1), np.datetime64("2020")),
        *(Z, P, Y, Z.astype("f4"), P.astype("f2"), Z.astype(">f8"), Z[:0], Z[:, :0], Z[:, :1], Z[:, 0], Z[None], Z.T),
        *(Z * NAN, Z * INF, Z[:5], Y.astype("u1"), Y.astype("u8"), Y + 9, -Y, Y.astype(float), Y + 0.5, Y > 1),
        *(np.array(1.0), np.array(2), np.array([None, 1]), np.array(["a"]), np.array(1j), np.array([], dtype="M8[s]")),
        *(np.zeros((6, 4), dtype="g"), np.ma.masked_array(Z, Z > 0), np.zeros(3, dtype="i4,f8"), np.empty((6, 0, 4))),
        *(z, p, y, z.float(), z.half(), p.bfloat16(), y.int(), y.to(torch.uint16), z[:0], z[:, 0], z[None], z.T, z > 0),
        *(z.clone().requires_grad_(), z.float().clone().requires_grad_() * 1, torch.nn.Parameter(torch.tensor(2.0))),
        *(torch.full((6, 4), -INF), torch.full((6, 4), INF), torch.full((6, 4), NAN), torch.zeros(6, 4, 2, 2)),
        *(torch.tensor(1.5), torch.tensor(2), torch.tensor(True), torch.ones(6), torch.ones(4), torch.zeros(0)),
        *(torch.zeros(6, 4, dtype=torch.complex64), torch.zeros(6, 4, device="meta"), torch.zeros(2, 2).to_sparse()),
        *(torch.zeros(6, device="meta", dtype=torch.int64), torch.tensor(1.0, device="meta"), z.to_sparse_csr()),
        *(torch.quantize_per_tensor(z.float(), 0.1, 0, torch.qint8), torch.zeros(6, 4).to(torch.float8_e4m3fn)),
        *(torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]), torch.ones(6, 4).expand(3, 6, 4)),
        *(fk.FLSD_53, fk.TemperatureScaling(), fk.FocalLoss(), torch.float32, torch.device("cpu"), fk.metrics, int),
        *(lambda: 1, slice(3), Ellipsis, fk.FocalLoss, ValueError("x")),
    ]


@dataclass(frozen=True)
class Call:
    """A public function with valid arguments, and the first words of its errors."""

    function: Callable[..., Any]
    good: dict[str, Any]
    who: tuple[str, ...]

    @property
    def arguments(self) -> dict[str, Any]:
        """Every argument with a valid value."""
        arguments = {}
        for name, parameter in inspect.signature(self.function).parameters.items():
            if parameter.kind not in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL):
                arguments[name] = self.good.get(name, parameter.default)
        return arguments


def call(function: Callable[..., Any], *who: str, **good: Any) -> Call:
    return Call(function, good, who or (function.__name__,))


def _swept(**arguments: Any) -> fk.Sweep:
    """Without a folder, because it would create one."""
    return fk.sweep(**arguments)


def calls() -> dict[str, Call]:
    """Name -> public function or method that takes arguments."""
    z, p, y = torch.from_numpy(Z), torch.from_numpy(P), torch.from_numpy(Y)
    pair, binary = {"input": z, "target": y}, {"logits": z[:, 0].contiguous()}
    features = torch.from_numpy(Z[:, :3].copy())
    rows = {"probs": P, "target": Y}
    many = {
        "focal_loss": call(fk.focal_loss, **pair),
        "poly_focal_loss": call(fk.poly_focal_loss, **pair),
        "properized_focal_loss": call(fk.properized_focal_loss, **pair),
        "sigmoid_focal_loss": call(fk.sigmoid_focal_loss, input=z, target=p),
        "asymmetric_loss": call(fk.asymmetric_loss, input=z, target=p),
        "quality_focal_loss": call(fk.quality_focal_loss, input=z, target=p),
        "varifocal_loss": call(fk.varifocal_loss, input=z, target=p),
        "matchability_loss": call(fk.matchability_loss, input=z, target=p),
        "ia_bce_loss": call(fk.ia_bce_loss, input=z, target=p),
        "linear_focal_loss": call(
            fk.linear_focal_loss, input=features, linear_weight=torch.from_numpy(Z[:4, :3].copy()), target=y
        ),
        "focal_loss_vocab_parallel": call(fk.focal_loss_vocab_parallel, logits=z, target=y),
        "check_labels": call(fk.check_labels, target=y, n_classes=4),
        "class_balanced_weight": call(fk.class_balanced_weight, counts=[3.0, 4.0]),
        "focal_calibration_map": call(fk.focal_calibration_map, input=z, gamma=1.0),
        "binary_focal_calibration_map": call(fk.binary_focal_calibration_map, **binary, gamma=1.0),
        "spline_calibration_map": call(
            fk.spline_calibration_map,
            input=z,
            temperature=1.0,
            floor=1e-3,
            slope=0.0,
            knots=torch.tensor([-1.0, 0.0, 1.0]),
            values=torch.zeros(3),
        ),
        "inverse_focal_calibration_map": call(fk.inverse_focal_calibration_map, input=p, gamma=1.0, input_kind="probs"),
        "binary_inverse_focal_calibration_map": call(fk.binary_inverse_focal_calibration_map, **binary, gamma=1.0),
        "calibration_grid": call(fk.calibration_grid, **pair, gammas=[0.0, 1.0], temperatures=[1.0, 2.0]),
        "GammaTable": call(fk.GammaTable, edges=[0.0, 0.5, 1.0], gammas=[1.0, 2.0]),
        "per_class_report": call(fk.per_class_report, **rows),
        "load_calibrator": call(fk.load_calibrator, path="nowhere.json"),
        "compare_calibrators": call(fk.compare_calibrators, validation=(Z, Y), resamples=0),
        "fit_temperatures": call(fk.fit_temperatures, logits=Z[None], labels=Y[None]),
        "fit_focal_temperatures": call(fk.fit_focal_temperatures, logits=Z[None], labels=Y[None]),
        "sweep": call(
            _swept, "sweep", files=["no/where.npz"], jobs=1, batch=1, criterion="nll", folds=5, progress=False
        ),
        "sweep_one": call(fk.sweep_one, path="no/where.npz"),
        "paired_bootstrap": call(bootstrap.paired_bootstrap, probs={"a": P, "b": P}, target=Y, n_resamples=3),
        "bias_floor": call(bootstrap.bias_floor, probs=P, n_resamples=3),
        "from_frame": call(files.from_frame, "", frame=Frame()),
        "read_sets": call(files.read_sets, "", path="nowhere.npz"),
        "open_shards": call(open_shards, "", path="nowhere.npy", labels=None, input_kind=None),
        "apply_calibrator": call(study.apply_calibrator, "", calibrator="no.json", source="no.npy", out="no_where.npy"),
    }
    for name in metrics.__all__:
        function = getattr(metrics, name)
        if inspect.isfunction(function):
            good = {"confidence_in": P[:, 0], "confidence_out": P[:, 1]} if name == "auroc" else rows
            many[name] = call(function, **good)
    for name in losses.__all__:
        kind = getattr(losses, name)
        if isinstance(kind, type) and issubclass(kind, torch.nn.Module):
            size = {"in_features": 3, "num_classes": 4} if name.startswith("Linear") else {}
            # Errors of the checks of a table begin with the table's name.
            many[name] = call(kind, name, "GammaTable", **size)
            loss = kind(**size)
            batch = {"input": features if size else z, "target": p if "Sigm" in name or "ymm" in name else y}
            who = (
                *ROW_LOSSES,
                "linear_focal_loss",
                "sigmoid_focal_loss",
                "asymmetric_loss",
                "quality_focal_loss",
                "varifocal_loss",
                "matchability_loss",
                "ia_bce_loss",
            )
            many[f"{name}()"] = call(loss.forward, name, *who, **batch)
    adafocal = fk.AdaFocalLoss(n_bins=2)
    many["AdaFocalLoss.accumulate"] = call(adafocal.accumulate, "AdaFocalLoss.accumulate", logits=z, target=y)
    many["AdaFocalLoss.update"] = call(adafocal.update, "AdaFocalLoss.update", logits=z, target=y)
    many["AdaFocalLoss.update_bins"] = call(
        adafocal.update_bins,
        "AdaFocalLoss.update_bins",
        bin_edges=[0.0, 0.5, 1.0],
        mean_confidence=[0.2, 0.7],
        accuracy=[0.3, 0.6],
    )
    for kind in (
        fk.TemperatureScaling,
        fk.FocalTemperatureScaling,
        fk.HistogramBinning,
        fk.IsotonicCalibration,
        calibrators.RobustTemperatureScaling,
        fk.SplineScaling,
        fk.StructuredScaling,
        fk.MultiLabelScaling,
        fk.AutoCalibrator,
    ):
        name = kind.__name__
        target = (Z > 0).astype(int) if kind is fk.MultiLabelScaling else Y

        # scikit-learn's contract: the constructor stores arguments, and fit checks them.
        def constructed(_kind: Any = kind, _target: Any = target, **options: Any) -> Any:
            return _kind(**options).fit_quietly(Z, _target)

        constructed.__signature__ = inspect.signature(kind)  # type: ignore[attr-defined]
        many[name] = call(constructed, name, "TemperatureScaling", "FocalTemperatureScaling")
        fitted = kind().fit_quietly(Z, target)
        many[f"{name}.fit"] = call(kind().fit, name, logits=Z, target=target)
        for method in ("predict", "predict_proba", "predict_log_proba", "changed"):
            many[f"{name}.{method}"] = call(getattr(fitted, method), name, logits=Z)
        many[f"{name}.score"] = call(fitted.score, name, logits=Z, target=target)
    fitted = fk.TemperatureScaling().fit_quietly(Z, Y)
    many["TemperatureScaling.save"] = call(fitted.save, "TemperatureScaling", path="no/where")
    many["TemperatureScaling.load"] = call(fk.TemperatureScaling.load, "TemperatureScaling", path="no/where")
    grid = fk.calibration_grid(Z, Y, [0.0], [1.0, 2.0])
    many["TemperatureScaling.choose"] = call(fitted.choose, "TemperatureScaling", grid=grid)
    for name in ("CalibratedLogits", "CalibratedLogProbs"):
        many[name] = call(getattr(calibrators, name), gamma=1.0, temperature=1.0)
        many[f"{name}()"] = call(
            getattr(calibrators, name)(1.0, 1.0).forward,
            "focal_calibration_map",
            "binary_focal_calibration_map",
            name,
            input=z,
        )
    state = fk.CalibrationGridState([0.0, 1.0], [1.0, 2.0])
    state.update(z, y)
    who = ("CalibrationGridState", "calibration_grid")
    many["CalibrationGridState"] = call(fk.CalibrationGridState, *who, gammas=[0.0, 1.0], temperatures=[1.0, 2.0])
    many["CalibrationGridState.update"] = call(state.update, *who, logits=z, target=y)
    many["CalibrationGridState.merge"] = call(state.merge, *who, other=state)
    many["CalibrationGrid.best"] = call(state.compute().best, "CalibrationGrid", criterion="ece")
    bins = metrics.reliability_bins(P, Y, n_bins=3)
    many["reliability_bands"] = call(plots.reliability_bands, bins=bins, replicates=10)
    many["reliability_diagram"] = call(plots.reliability_diagram, bins=bins)
    both = fk.calibration_grid(Z, Y, [0.0, 1.0], [1.0, 2.0])
    for name in ("fit_ridge", "ridge_diagram", "grid_heatmap"):
        many[name] = call(getattr(plots, name), "CalibrationGrid", name, grid=both)
    many["adafocal_history"] = call(plots.adafocal_history, history=[adafocal.update(z, y)])
    found_by_study = fk.compare_calibrators((Z, Y), resamples=0, candidates={"plain": fk.TemperatureScaling()})
    many["Study.save"] = call(found_by_study.save, "TemperatureScaling", path="no/where")
    many["Study.table"] = call(found_by_study.table, "Study.table")
    many["Study.write_report"] = call(found_by_study.write_report, "Study.write_report", folder="no\0where")
    found = bootstrap.paired_bootstrap({"a": P, "b": P}, Y, n_resamples=3)
    many["PairedBootstrap.difference"] = call(found.difference, "PairedBootstrap", name="a", other="b", figure="nll")
    many["PairedBootstrap.interval"] = call(found.interval, "PairedBootstrap", name="a", figure="nll")
    return many


class Frame:
    """The part of a data frame that the test needs."""

    columns = ("label", "0", "1")

    def __getitem__(self, name: str) -> Any:
        return np.zeros(3)

    def to_numpy(self) -> Any:
        return np.zeros((3, 3))


REFUSALS = (TypeError, ValueError, IndexError, NotImplementedError, files.InputError)


def problem_of(one: Call, arguments: dict[str, Any]) -> str | None:
    """A description of the fault in the error that the call raises, or None."""
    with warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore")
        try:
            one.function(**arguments)
        except REFUSALS as error:
            text = str(error)
            if not text.startswith(one.who):
                return f"{type(error).__name__} of no name: {text}"
            if "\n" in text:
                return f"{type(error).__name__} of several lines: {text}"
            given = sum(len(value) for value in arguments.values() if isinstance(value, str))
            if len(text) > 1000 + given:
                return f"{type(error).__name__} of {len(text)} characters: {text}"
        except OSError as error:  # for a path that the system refuses, which the error names
            return None if error.filename else f"OSError without a file: {error}"
        except Exception as error:
            if "no NVIDIA driver" in str(error):  # torch's error for a device that this machine lacks
                return None
            return f"raw {type(error).__name__}: {error}"
    return None
