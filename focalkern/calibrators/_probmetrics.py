"""Structured scaling fitted by probmetrics, the library of the method's authors."""

import importlib
import sys
import warnings
from importlib.metadata import version
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

__all__ = ["fit_structured"]

_CLASSES = {"vector": "SVSCalibrator", "matrix": "SMSCalibrator"}


def fit_structured(
    kind: Literal["vector", "matrix"], probs: Tensor, target: Tensor, penalty: float
) -> tuple[str, float, Tensor, Tensor]:
    """Name and version of the library, and its fitted temperature, weight and bias, in float32.

    Args:
        kind: ``"vector"`` or ``"matrix"``.
        probs: [N, C] float64 > 0.
        target: [N] int64.
        penalty: lambda.

    Raises:
        ImportError: probmetrics is not installed, or its version stores the parameters in other attributes.
    """
    calibrators = _library()
    name = f"probmetrics {version('probmetrics')}"
    # The defaults of probmetrics 1.3, passed explicitly: a later version may have other defaults.
    options = {"penalty": "ridge", "rho": 1.0, "tau": 1.0, "opt": "bfgs"}
    names = ("lambda_intercept", "lambda_diagonal", *(("lambda_off_diagonal",) if kind == "matrix" else ()))
    try:
        scaling = getattr(calibrators, _CLASSES[kind])(**options, **dict.fromkeys(names, penalty))
        with torch.inference_mode(False):  # its derivatives are autograd's
            scaling.fit(probs.cpu().numpy(), target.cpu().numpy())
        temperature = 1 / float(scaling.ts_.cal_.invtemp_)
        weight, bias = (scaling.v_, scaling.b_) if kind == "vector" else (scaling.W_[:, :-1], scaling.W_[:, -1])
    except (AttributeError, TypeError) as error:
        raise ImportError(f"expected probmetrics 1.3, found {name}: {error}") from error
    return name, temperature, _wide(weight).to(probs.device), _wide(bias).to(probs.device)


def _library() -> Any:
    if "probmetrics.calibrators" in sys.modules:
        return importlib.import_module("probmetrics.calibrators")
    with warnings.catch_warnings():
        # probmetrics imports code that uses torch.jit.script, for which torch warns.
        warnings.simplefilter("ignore", DeprecationWarning)
        warnings.simplefilter("ignore", FutureWarning)
        return importlib.import_module("probmetrics.calibrators")


def _wide(values: np.ndarray[Any, Any]) -> Tensor:
    return torch.from_numpy(np.array(values, dtype=np.float64))
