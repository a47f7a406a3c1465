"""Random cases of every operator compared with float64: value, all first gradients, and sometimes more.

    python tests/random_cases.py --seed 0 --count 1000
    python tests/random_cases.py --seed 4711 --count 1          repeat one draw
    python tests/random_cases.py --only map,sigmoid_focal
    FOCALKERN_KERNELS=0 python tests/random_cases.py    plain torch (see tools/cpu/without_avx512.py for AVX2)

A draw chooses operator, layout, dtype, number of classes (to 300,000), ties, classes at -inf, saturated rows, weights,
smoothing, soft targets and every kind of gamma. The oracle is `focalkern.reference` in float64, applied to the rounded
inputs. A failure is one line with the seed and the arguments. test_random_cases.py runs some."""

import argparse
import math
import sys
import warnings
from collections.abc import Callable
from typing import Any

import torch
from random_checks import Figures, check, check_operators, check_twice
from random_draws import (
    DTYPES,
    Case,
    Draw,
    draw_classes,
    draw_gamma,
    draw_logits,
    draw_row_target,
    draw_rows,
    laid_out,
    outer_shape,
    row_options,
)
from row_losses import public_form, takes_tensors
from torch import Tensor

import focalkern as fk
from focalkern import reference
from focalkern.reference._softmax_losses import ROW_LOSSES, RowLossSpec

# ---- operators: the call, and its float64 reference ------------------------------------------------------------------


def as_real(value: Any, dtype: torch.dtype) -> Any:
    """Parameters are given in the dtype of the computation."""
    real = torch.float64 if dtype == torch.float64 else torch.float32
    return value.to(real) if isinstance(value, Tensor) and value.is_floating_point() else value


def row_loss(spec: RowLossSpec) -> Callable[[Draw], Case]:
    def case(draw: Draw) -> Case:
        dtype = draw.pick("dtype", DTYPES)
        classes = draw_classes(draw)
        z = laid_out(draw, draw_logits(draw, draw_rows(draw, classes), classes, dtype), dtype)
        if draw.said.get("masked") and not spec.soft_target:  # for a class at -inf the next lower class is not defined
            z = z.clamp(min=-50.0)
        soft = spec.soft_target and draw.chance(0.2)
        draw.said["soft"] = soft
        target = draw_row_target(draw, z, soft)
        options = {key: as_real(value, dtype) for key, value in row_options(draw, classes).items()}
        gamma, magnitude = spec.example.get("gamma"), 2.0
        if gamma is not None and takes_tensors(spec):
            gamma, magnitude = draw_gamma(draw, outer_shape(z), spec.has_inverse, True)
            gamma = as_real(gamma, dtype)
        if spec.detachable and spec.soft_target and not isinstance(gamma, Tensor) and draw.chance(0.15):
            options["detach_modulation"] = draw.said["detach"] = True
        inputs = [z]
        if isinstance(gamma, Tensor):
            inputs.append(gamma)
        if soft:
            inputs.append(target)

        def call(function: Callable[..., Tensor], *arguments: Tensor) -> Tensor:
            left = list(arguments)
            logits = left.pop(0)
            wide = logits.dtype == torch.float64 and dtype != torch.float64
            of_gamma = left.pop(0) if isinstance(gamma, Tensor) else gamma
            of_target = left.pop(0) if soft else target
            given = {
                key: value.double() if wide and isinstance(value, Tensor) else value for key, value in options.items()
            }
            return function(logits, of_target, *(() if gamma is None else (of_gamma,)), **given)

        ours = public_form(spec)
        return Case(lambda *a: call(ours, *a), lambda *a: call(spec.definition, *a), inputs, 1 + magnitude)

    return case


def mmce(draw: Draw) -> Case:
    dtype = draw.pick("dtype", (torch.float32, torch.float64))
    classes = min(draw_classes(draw), 1000)
    # The derivative of |r_i - r_j| jumps where two confidences are equal in the dtype of the computation, so such rows
    # are excluded.
    z = (3 * draw.normal(draw_rows(draw, classes) + 1, classes)).to(dtype)
    confidence, order = z.double().softmax(1).amax(1).sort()
    is_apart = torch.nn.functional.pad(confidence.diff() > 8 * torch.finfo(dtype).eps, (1, 0), value=True)
    z = z[order[is_apart]]
    target = draw_row_target(draw, z, False)
    weighted = draw.pick("weighted", (False, True))

    def oracle(logits: Tensor) -> Tensor:
        keep = target != -100
        kept, labels = logits[keep], target[keep]
        entropy = torch.nn.functional.cross_entropy(kept, labels)
        confidence, best = kept.softmax(1).max(1)
        correct = (best == labels).double()
        a = (correct - confidence) / len(labels)
        if weighted:
            right, wrong = correct.sum(), (1 - correct).sum()
            if right == 0 or wrong == 0:
                return entropy
            a = correct * (1 - confidence) / right - (1 - correct) * confidence / wrong
        kernel = (-(confidence[:, None] - confidence[None]).abs() / 0.4).exp()
        return entropy + 2 * (a @ kernel @ a).clamp(min=0).sqrt()

    if int((target != -100).sum()) < 1:
        target = torch.zeros_like(target)
    return Case(lambda logits: fk.MMCELoss(weighted=weighted)(logits, target), oracle, [z], 30.0, twice=False)


def linear(draw: Draw) -> Case:
    dtype = draw.pick("dtype", (torch.float32, torch.float64))
    classes, rows, features = min(draw_classes(draw), 5000), 1 + draw.below(60), draw.pick("features", (1, 3, 16, 33))
    x, w = draw.normal(rows, features).to(dtype), draw.normal(classes, features).to(dtype)
    b = draw.normal(classes).to(dtype)
    if draw.chance(0.3):
        b[1 + draw.below(classes - 1) :] = -math.inf
    possible = int(b.isfinite().sum())
    target = draw.labels(possible, (rows,))
    target[draw.uniform(rows) < 0.1] = -100
    target[0] = 0
    gamma, magnitude = draw_gamma(draw, (rows,), True, True)
    gamma = as_real(gamma, dtype)
    reduction = draw.pick("reduction", ("none", "mean", "sum"))
    chunk = draw.pick("chunk_rows", (None, 1, 7, 64))
    inputs = [x, w, b, *([gamma] if isinstance(gamma, Tensor) else [])]

    def ours(x: Tensor, w: Tensor, b: Tensor, *rest: Tensor) -> Tensor:
        of = rest[0] if rest else gamma
        return fk.linear_focal_loss(x, w, target, of, linear_bias=b, reduction=reduction, chunk_rows=chunk)

    def oracle(x: Tensor, w: Tensor, b: Tensor, *rest: Tensor) -> Tensor:
        of = rest[0] if rest else gamma
        return reference.focal_loss(torch.nn.functional.linear(x, w, b), target, of, reduction=reduction)

    return Case(ours, oracle, inputs, (4 + magnitude) * math.sqrt(features), twice=False)


def properized(draw: Draw) -> Case:
    dtype = draw.pick("dtype", (torch.float32, torch.float64))
    classes = min(draw_classes(draw), 1000)
    z = laid_out(draw, (3 * draw.normal(min(draw_rows(draw, classes), 40), classes)), dtype)
    target = draw_row_target(draw, z, False)
    gamma = draw.pick("gamma", (0.0, 0.3, 1.0, 2.0, 5.0))
    dimension = 0 if z.dim() == 1 else 1

    def oracle(logits: Tensor) -> Tensor:
        q = fk.inverse_focal_calibration_map(logits.movedim(dimension, -1), gamma, log=True)
        back = reference.focal_calibration_map(q.detach(), gamma, log=True)
        wanted = logits.detach().movedim(dimension, -1).log_softmax(-1)
        torch.testing.assert_close(back, wanted, rtol=1e-8, atol=1e-8)
        return reference.focal_loss(q.movedim(-1, dimension), target, gamma, reduction="none")

    return Case(lambda a: fk.properized_focal_loss(a, target, gamma, reduction="none"), oracle, [z], 8 + gamma)


def elements(name: str) -> Callable[[Draw], Case]:
    def case(draw: Draw) -> Case:
        dtype = draw.pick("dtype", DTYPES)
        n, classes = 1 + draw.below(50), 1 + draw.below(90)
        draw.said["shape"] = (n, classes)
        x = draw.normal(n, classes) * draw.pick("scale", (0.01, 1.0, 5.0, 30.0, 100.0))
        if draw.chance(0.2):
            x = x.round()
        x = x.to(dtype)
        form = draw.pick("layout", ("rows", "rows", "flat", "transposed"))
        if form == "flat":
            x = x.reshape(-1)
        if form == "transposed":
            x = x.t().contiguous().t()
        kind = draw.pick("target", ("hard", "soft", "labels") if x.dim() == 2 else ("hard", "soft"))
        if kind == "labels":
            target = draw.labels(classes + 1, (n,))
            target[draw.uniform(n) < 0.1] = -100
        elif kind == "hard":
            target = (draw.uniform(*x.shape) < 0.2).to(dtype)
        else:
            target = draw.uniform(*x.shape).to(dtype)
            target = torch.where(draw.uniform(*x.shape) < 0.3, target.round(), target)
        reduction = draw.pick("reduction", ("none", "mean", "sum"))
        options: dict[str, Any] = {"reduction": reduction}
        if draw.chance(0.3):
            draw.said["weight"] = True
            options["weight"] = as_real(draw.uniform(x.shape[-1]) + 0.1, dtype)
        # Near p = t, p - t has no correct digits, and a power of it below 1 not even the correct magnitude.
        cancels = name == "quality_focal" and kind == "soft"
        gamma = draw.pick("gamma", (1.0, 2.0, 3.3) if cancels else (0.0, 0.5, 1.0, 2.0, 2.0, 3.3))
        inputs = [x]
        if draw.chance(0.2):
            draw.said["tensor_gamma"] = True
            inputs.append(as_real(torch.tensor(gamma, dtype=torch.float64), dtype))
        if name == "sigmoid_focal":
            options["alpha"] = draw.pick("alpha", (0.25, None, 0.7))
        if name in ("varifocal", "matchability", "ia_bce"):
            options["alpha"] = draw.pick("alpha", (0.25, 0.75, 1.0))
            if name != "ia_bce":
                options["detach_modulation"] = draw.pick("detach_modulation", (False, True))
        if name == "asymmetric":
            options["margin"] = draw.pick("margin", (0.0, 0.05, 0.2))
            options["gamma_positive"] = draw.pick("gamma_positive", (0.0, 1.0, 2.5))

        def call(module: Any, *arguments: Tensor) -> Tensor:
            wide = arguments[0].dtype == torch.float64
            given = {k: v.double() if wide and isinstance(v, Tensor) else v for k, v in options.items()}
            of_target = target.double() if wide and target.is_floating_point() else target
            of_gamma = arguments[1] if len(arguments) > 1 else gamma
            result: Tensor = getattr(module, name + "_loss")(arguments[0], of_target, of_gamma, **given)
            return result

        twice = name == "sigmoid_focal" and kind != "soft"
        return Case(lambda *a: call(fk, *a), lambda *a: call(reference, *a), inputs, 4 + gamma, cancels, twice=twice)

    return case


def calibration_map(draw: Draw) -> Case:
    dtype = draw.pick("dtype", DTYPES)
    classes = draw_classes(draw)
    z = draw_logits(draw, draw_rows(draw, classes), classes, dtype).to(dtype)
    kind = draw.pick("input_kind", ("logits", "logits", "logits", "probs"))
    if kind == "probs":
        if draw.said["logits"] == "near":  # not where the logarithms are too close to distinguish
            z = z * 100
        z = z.double().softmax(1).to(dtype)
        z = z[(z.double().sum(1) - 1).abs() < 5e-4]
    if draw.chance(0.2):
        z = z.t().contiguous().t()
    if draw.chance(0.1) and len(z):
        z = z[0]
    shape = tuple(z.shape[:-1])
    gamma: Any = draw.pick("gamma", (0.0, 0.5, 1.0, 2.0, 5.0, 20.0, -0.3, -0.7, -0.95))
    temperature: Any = draw.pick("temperature", (1.0, 1.0, 0.1, 0.5, 2.0, 10.0))
    inputs = [z]
    per_row = draw.chance(0.3)
    if per_row:
        draw.said["per_row"] = True
        inputs += [6 * draw.uniform(*shape) - 0.95, 0.2 + 2 * draw.uniform(*shape)]
    log = draw.pick("log", (False, True))

    def call(module: Any, values: Tensor, *parameters: Tensor) -> Tensor:
        result: Tensor = module.focal_calibration_map(
            values, *(parameters or (gamma, temperature)), input_kind=kind, log=log
        )
        return result

    magnitude = 6 if per_row else abs(gamma)
    spread = float(z[z.isfinite()].abs().max()) / (0.2 if per_row else temperature) if z.numel() else 0.0
    narrow = dtype in (torch.float16, torch.bfloat16)
    condition = (4 + magnitude) * (1 + (0.0 if narrow else 0.02) * spread) + (4 / (1 + gamma) if gamma < 0 else 0)
    twice = kind == "logits" and not bool((z == -math.inf).any())
    return Case(
        lambda *a: call(fk, *a),
        lambda *a: call(reference, *a),
        inputs,
        condition,
        rows_last=True,
        twice=twice,
        slope_of_log=kind == "probs",
    )


def binary_map(draw: Draw) -> Case:
    dtype = draw.pick("dtype", DTYPES)
    s = (draw.normal(1 + draw.below(300)) * draw.pick("scale", (1e-3, 1.0, 5.0, 30.0))).to(dtype)
    gamma = draw.pick("gamma", (0.0, 0.5, 2.0, 20.0, -0.3, -0.95))
    temperature = draw.pick("temperature", (1.0, 0.3, 4.0))
    log_odds = draw.pick("log_odds", (False, True))

    def call(module: Any, values: Tensor) -> Tensor:
        result: Tensor = module.binary_focal_calibration_map(values, gamma, temperature, log_odds=log_odds)
        return result

    return Case(lambda a: call(fk, a), lambda a: call(reference, a), [s], 4 + abs(gamma) + (10 if gamma < 0 else 0))


def inverse_map(draw: Draw) -> Case:
    dtype = draw.pick("dtype", (torch.float32, torch.float64))
    classes = min(draw_classes(draw), 1000)
    z = (3 * draw.normal(min(draw_rows(draw, classes), 40), classes)).to(dtype)
    if draw.chance(0.2):
        z = z.round()
    gamma = draw.pick("gamma", (0.0, 0.3, 1.0, 2.0, 10.0))

    def oracle(logits: Tensor) -> Tensor:
        q = fk.inverse_focal_calibration_map(logits, gamma, log=True)
        back = reference.focal_calibration_map(q.detach(), gamma, log=True)
        torch.testing.assert_close(back, logits.detach().log_softmax(-1), rtol=1e-8, atol=1e-8)
        return q

    return Case(lambda a: fk.inverse_focal_calibration_map(a, gamma, log=True), oracle, [z], 10 + gamma, rows_last=True)


def grid(draw: Draw) -> Case:
    dtype = draw.pick("dtype", (torch.float32, torch.float64))
    classes, rows = draw.pick("classes", (2, 3, 10, 33, 100)), 2 + draw.below(200)
    z = draw_logits(draw, rows, classes, dtype).to(dtype)
    target = draw_row_target(draw, z, False)
    target[0] = int(z[0].argmax())
    estimator = draw.pick("estimator", ("equal_width", "equal_mass", "equal_mass_interp"))
    gammas, temperatures = [-0.5, 0.0, 1.0, 5.0], [0.5, 1.0, 2.0]

    def tables(found: dict[str, Tensor]) -> Tensor:
        # A sample within rounding of a cut may change its bin, and an ECE changes in steps of such samples. If all
        # confidences are bitwise 1, they are on the first cut of equal_mass_interp, in no bin.
        kinds = ("normal",) if estimator == "equal_mass_interp" else ("normal", "leader")
        exact = dtype == torch.float64 and draw.said["logits"] in kinds and not draw.said.get("masked")
        return torch.stack([found[name] for name in ("nll", "brier", "ece") if name != "ece" or exact])

    def ours(given: Tensor) -> Tensor:
        found = fk.calibration_grid(
            given.detach(), target, gammas, temperatures, criteria=("nll", "brier", "ece"), estimator=estimator
        )
        return tables(found.tables)

    def oracle(given: Tensor) -> Tensor:
        found = reference.calibration_grid(
            given.detach(), target, gammas, temperatures, criteria=("nll", "brier", "ece"), estimator=estimator
        )
        return tables(found)

    return Case(ours, oracle, [z], 20.0, twice=False)


OPERATORS: dict[str, Callable[[Draw], Case]] = {
    **{spec.short: mmce if spec.of_batch else row_loss(spec) for spec in ROW_LOSSES.values()},
    "linear": linear,
    "properized": properized,
    "sigmoid_focal": elements("sigmoid_focal"),
    "asymmetric": elements("asymmetric"),
    "quality_focal": elements("quality_focal"),
    "varifocal": elements("varifocal"),
    "matchability": elements("matchability"),
    "ia_bce": elements("ia_bce"),
    "map": calibration_map,
    "binary_map": binary_map,
    "inverse_map": inverse_map,
    "grid": grid,
}
# Weights of the draws: kernels with more code paths are drawn more often.
SHARES = {"focal": 5, "poly": 2, "map": 4, "sigmoid_focal": 2}


def run(seed: int, only: list[str] | None = None, figures: Figures | None = None) -> str | None:
    """Checks the draw of a seed: None, or a description of the fault. ``figures`` collects the errors."""
    draw, figures = Draw(seed), figures or Figures()
    names = [name for name in OPERATORS for _ in range(SHARES.get(name, 1)) if only is None or name in only]
    name = draw.pick("operator", names)
    figures.draws[name] = figures.draws.get(name, 0) + 1
    try:
        case = OPERATORS[name](draw)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            errors = check(case, draw)
            if seed % 5 == 0:
                errors.update(check_twice(case, draw))
            if seed % 20 == 0:
                figures.checked.update(check_operators(case))
        figures.add(name, case.inputs[0].dtype, errors)
    except Exception as problem:
        figures.failures[name] = figures.failures.get(name, 0) + 1
        message = str(problem).splitlines()[0] if str(problem) else ""
        said = ", ".join(f"{key}={value}" for key, value in draw.said.items())
        return f"seed {seed}: {type(problem).__name__}: {message} [{said}]"
    return None


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0, help="of the first draw")
    parser.add_argument("--count", type=int, default=1000, help="draws; each has the next seed")
    parser.add_argument("--only", help="operators, separated by commas: " + ", ".join(OPERATORS))
    arguments = parser.parse_args()
    only = arguments.only.split(",") if arguments.only else None
    if unknown := set(only or ()) - set(OPERATORS):
        parser.error("--only: no such operator: " + ", ".join(sorted(unknown)))
    figures = Figures()
    for seed in range(arguments.seed, arguments.seed + arguments.count):
        problem = run(seed, only, figures)
        if problem is not None:
            print(problem, flush=True)
    failures = sum(figures.failures.values())
    if arguments.count > 1:
        print(figures.table())
    print(f"{arguments.count} draws, {failures} failures")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
