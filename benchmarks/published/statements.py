"""The statements of [1] and [2] about the focal loss and its calibration map, which need no data.

[1] Komisarenko & Kull, Improving Calibration by Relating Focal Loss, Temperature Scaling, and Properness, ECAI 2024
    (arXiv 2408.11598)
[2] Mukhoti et al., Calibrating Deep Neural Networks using Focal Loss, NeurIPS 2020 (arXiv 2002.09437)
"""

import functools
import itertools
import math
from collections.abc import Callable, Iterator

import numpy as np
import torch
from torch import Tensor

import focalkern as fk
from benchmarks.published.lines import NOT_AT_HAND, Line, number, statement

# -- [1], two classes and more ---------------------------------------------------------------------------------------

# 1/T = slope * gamma + intercept, by the number of classes.
FITS = {2: ("0.95", "0.85", "Fig. 2"), 3: ("0.64", "0.91", "Fig. 6"), 4: ("0.47", "0.85", "4 classes")}

FIT_GAMMAS = tuple(0.5 * index for index in range(11))  # 0 to 5, the range of the paper's grid


def simplex(n_classes: int, steps: int) -> Tensor:
    """[points, C] float64: the points inside the simplex whose coordinates are multiples of 1/steps."""
    cuts = torch.tensor(list(itertools.combinations(range(1, steps), n_classes - 1)), dtype=torch.float64)
    ends = torch.nn.functional.pad(torch.nn.functional.pad(cuts, (1, 0)), (0, 1), value=float(steps))
    return ends.diff(dim=1) / steps


def apart(log_q: Tensor, gamma: float, beta: float) -> tuple[float, float]:
    """Root of the mean square, and the largest, of the differences between map and temperature scaling (T = 1/beta)."""
    difference = fk.focal_calibration_map(log_q, gamma) - (log_q * beta).softmax(-1)
    return float(difference.square().mean().sqrt()), float(difference.abs().max())


@functools.cache
def points(n_classes: int) -> Tensor:
    """Log-probabilities of a regular grid over the simplex: 1999, 1770 and 3654 points for 2, 3 and 4 classes."""
    return simplex(n_classes, {2: 2000, 3: 61, 4: 30}[n_classes]).log()


@functools.cache
def best_beta(n_classes: int, gamma: float, measure: int = 0) -> float:
    """The inverse temperature whose scaling is nearest to the map: golden section on the valley of :func:`apart`."""
    log_q = points(n_classes)
    low, high, ratio = 0.3, 1.3 * gamma + 2, (math.sqrt(5) - 1) / 2
    left, right = high - ratio * (high - low), low + ratio * (high - low)
    at_left, at_right = apart(log_q, gamma, left)[measure], apart(log_q, gamma, right)[measure]
    while high - low > 1e-5:
        if at_left < at_right:
            high, right, at_right = right, left, at_left
            left = high - ratio * (high - low)
            at_left = apart(log_q, gamma, left)[measure]
        else:
            low, left, at_left = left, right, at_right
            right = low + ratio * (high - low)
            at_right = apart(log_q, gamma, right)[measure]
    return (low + high) / 2


def decomposition() -> Iterator[Line]:
    """Figure 1: focal loss = proper loss of the calibrated probabilities, so its minimizer is the inverse map."""
    generator = torch.Generator().manual_seed(0)
    largest, largest_proper, raised = 0.0, 0.0, True
    for n_classes, gamma in itertools.product((2, 3, 10), (0.5, 1.0, 2.0, 3.0, 5.0)):
        truth = (2 * torch.randn(200, n_classes, dtype=torch.float64, generator=generator)).softmax(-1)
        minimizer = fk.inverse_focal_calibration_map(truth, gamma, input_kind="probs", log=True).requires_grad_()
        (slope,) = torch.autograd.grad(fk.focal_loss(minimizer, truth, gamma, reduction="sum"), minimizer)
        largest = max(largest, float(slope.abs().max()))
        at_truth = truth.log().requires_grad_()
        (slope,) = torch.autograd.grad(fk.properized_focal_loss(at_truth, truth, gamma, reduction="sum"), at_truth)
        largest_proper = max(largest_proper, float(slope.abs().max()))
        if n_classes == 2:
            raised &= bool((minimizer.exp().amax(-1) <= truth.amax(-1)).all())
    source = "[1] Theorem of the decomposition, section 4"
    yield statement(
        "Fig. 1", "expected focal loss is flat at the inverse map of the truth (3000 distributions)", largest < 1e-12,
        f"largest slope {largest:.1e}", source,
    )  # fmt: skip
    yield statement(
        "Fig. 1", "expected properized loss is flat at the truth", largest_proper < 1e-10,
        f"largest slope {largest_proper:.1e}", source,
    )  # fmt: skip
    yield statement(
        "Fig. 1", "two classes: a focal-trained network is less confident than the truth", raised, "every case", source
    )
    for gamma in (1.0, 3.0):
        truth = torch.tensor([0.8, 0.2], dtype=torch.float64)
        trained = float(fk.inverse_focal_calibration_map(truth, gamma, input_kind="probs")[0])
        yield number("Fig. 1", f"minimizer where the truth is 0.8, gamma = {gamma:g}", None, trained, source)


def relations() -> Iterator[Line]:
    """Figures 2, 5 and 6, and the fit for four classes.

    [1] does not state how it measures the distance between map and temperature scaling, nor its gammas. The rows have
    both usual measures over the range of its grid, and the distance of the published line from the map."""
    for n_classes, (slope, intercept, figure) in FITS.items():
        log_q = points(n_classes)
        source = f"[1] {figure}, fit for {n_classes} classes"
        for measure, words in ((0, "least squares"), (1, "least maximum")):
            beta = [best_beta(n_classes, gamma, measure) for gamma in FIT_GAMMAS]
            found_slope, found_intercept = np.polyfit(FIT_GAMMAS, beta, 1)
            what = f"{n_classes} classes, 1/T = a gamma + b, gamma 0 to 5, {words}"
            yield number(figure, f"{what}: a", slope, found_slope, source, judge=False)
            yield number(figure, f"{what}: b", intercept, found_intercept, source, judge=False)
        for gamma in (1.0, 3.0, 5.0):
            for words, beta_of in (
                ("fit", float(slope) * gamma + float(intercept)),
                ("nearest", best_beta(n_classes, gamma)),
            ):
                what = (
                    f"{n_classes} classes, gamma = {gamma:g}, T = {1 / beta_of:.4f} ({words}): error of a probability"
                )
                rms, largest = apart(log_q, gamma, beta_of)
                error = f"rms {rms:.4f}, at most {largest:.4f}"
                yield Line(figure, what, NOT_AT_HAND, error, "", "", source)
    for figure, gamma, caption in (("Fig. 2", 3.0, "0.36"), ("Fig. 5", 1.0, "0.81")):
        source = f"[1] {figure}, caption (contradicts the fits)"
        for n_classes, (slope, intercept, _) in FITS.items():
            what = f"caption: gamma = {gamma:g}; {n_classes} classes"
            fit = 1 / (float(slope) * gamma + float(intercept))
            yield number(figure, f"{what}, T of the fit", caption, fit, source, judge=False)
            yield number(figure, f"{what}, nearest T", caption, 1 / best_beta(n_classes, gamma), source, judge=False)
            rms, largest = apart(points(n_classes), gamma, 1 / float(caption))
            error = f"rms {rms:.4f}, at most {largest:.4f}"
            yield Line(figure, f"{what}, error of a probability at T = {caption}", NOT_AT_HAND, error, "", "", source)


def log_odds_of_map(s: Tensor, gamma: float) -> Tensor:
    return fk.binary_focal_calibration_map(s, gamma, log_odds=True)


def bounds() -> Iterator[Line]:
    """Figure 3 and Proposition 3: the two temperatures between which the map of two classes lies."""
    s = torch.cat([torch.logspace(-6, 0, 2000, dtype=torch.float64), torch.linspace(1, 60, 5901, dtype=torch.float64)])
    source = "[1] Proposition 3"
    worst_low, worst_high, odd = math.inf, math.inf, 0.0
    gammas = (0.05, 0.25, 0.37, 0.5, 0.75, 1.0, 2.0, 3.0, 4.0, 5.0, 10.0, 50.0)
    for gamma in gammas:
        # As slopes, which is equivalent for log-odds: (gamma + 1 - log(gamma + 1) / 2) s <= g(s) <= (gamma + 1) s.
        slope = log_odds_of_map(s, gamma) / s
        worst_low = min(worst_low, float(slope.min()) - (gamma + 1 - math.log1p(gamma) / 2))
        worst_high = min(worst_high, gamma + 1 - float(slope.max()))
        odd = max(odd, float((log_odds_of_map(-s, gamma) + log_odds_of_map(s, gamma)).abs().max()))
    tiny = 1e-12 * (1 + max(gammas))
    what = f"{len(gammas)} gammas from {gammas[0]} to {gammas[-1]:g}"
    yield statement("Prop. 3", f"lower bound, {what}", worst_low > 0, f"smallest slack {worst_low:.2e}", source)
    yield statement("Prop. 3", f"upper bound, {what}", worst_high >= -tiny, f"smallest slack {worst_high:.1e}", source)
    yield statement("Prop. 3", "reversed below one half (the map is odd)", odd < 1e-12, f"within {odd:.1e}", source)

    slope = log_odds_of_map(s, 4.0) / s
    source = "[1] Fig. 3, gamma = 4"
    steepest, flattest = float(slope.max()), float(slope.min())
    at_zero = float(slope[0])
    yield number("Fig. 3", "theory: lowest T, 1/(gamma + 1)", None, 1 / 5, "[1] Proposition 3, gamma = 4")
    yield number(
        "Fig. 3", "theory: highest T, 1/(gamma + 1 - log(gamma + 1)/2)", None, 1 / (5 - math.log(5) / 2),
        "[1] Proposition 3, gamma = 4",
    )  # fmt: skip
    yield number("Fig. 3", "experiment: highest T, 1 / slope at one half", "0.218", 1 / at_zero, source)
    yield statement(
        "Fig. 3", "experiment: one half is where T is highest", flattest >= at_zero - 1e-9,
        f"{1 / flattest:.6f} over all s", source, published="0.218",
    )  # fmt: skip
    yield number("Fig. 3", "experiment: lowest T, s up to 60", "0.206", 1 / steepest, source, judge=False)
    # T falls to 1/(gamma + 1) as the probability goes to 1, so the experiment's 0.206 shows how far it searched.
    reach = float(s[slope <= 1 / 0.206].max())
    yield number(
        "Fig. 3", "T = 0.206 bounds the map up to the probability", None, float(torch.tensor(reach).sigmoid()), source
    )
    far = s[slope > 1 / 0.206]
    excess = (log_odds_of_map(far, 4.0).neg().sigmoid() - (-far / 0.206).sigmoid()).abs().max()
    yield number("Fig. 3", "beyond it, the map is above T = 0.206 by at most", None, float(excess), source)


def confidence() -> Iterator[Line]:
    """Proposition 5: from which confidence on the map never lowers it, and a counterexample to the unconditional
    statement."""
    source = "[1] Proposition 5 (as printed, without a condition)"
    q = torch.tensor([0.11, *[0.89 / 9] * 9], dtype=torch.float64)
    raised = float(fk.focal_calibration_map(q, 1.0, input_kind="probs")[0])
    yield number("Prop. 5", "counterexample: 10 classes, gamma = 1, confidence 0.11 becomes", "0.10975", raised, source)
    for gamma, published in ((1.0, f"{1 / math.e:.4f}"), (2.0, "0.2976"), (3.0, "0.2526")):
        root = safe_confidence(gamma)
        yield number("Prop. 5", f"gamma = {gamma:g}: guaranteed from confidence", published, root, source)
    generator = torch.Generator().manual_seed(0)
    fell, below, counted = 0, 0, 0
    for n_classes, gamma in itertools.product((2, 3, 5, 10, 50), (0.25, 1.0, 2.0, 3.0, 5.0)):
        spread = 3 * torch.rand(2000, 1, dtype=torch.float64, generator=generator)
        q = (spread * torch.randn(2000, n_classes, dtype=torch.float64, generator=generator)).softmax(-1)
        top, after = q.amax(-1), fk.focal_calibration_map(q, gamma, input_kind="probs").amax(-1)
        falls, safe = after < top - 1e-12, top >= safe_confidence(gamma)
        fell += int((falls & safe).sum())
        below += int((falls & ~safe).sum())
        counted += int(safe.sum())
    yield statement("Prop. 5", "confidence never falls from there on", fell == 0, f"{fell} of {counted} rows", source)
    yield statement(
        "Prop. 5",
        "below, it may: the unconditional statement fails",
        below > 0,
        f"{below} of {50000 - counted} rows",
        source,
        published="never falls",
    )


def safe_confidence(gamma: float) -> float:
    """The root of G(p) = (1 - p)^gamma (1 - gamma p log(p) / (1 - p)) = 1 inside (0, 1), by bisection."""
    low, high = 1e-9, 1 - 1e-9
    for _ in range(100):
        p = (low + high) / 2
        above = (1 - p) ** gamma * (1 - gamma * p * math.log(p) / (1 - p)) > 1
        low, high = (p, high) if above else (low, p)
    return (low + high) / 2


def three_and_more() -> Iterator[Line]:
    """Figures 4, 5 and 7: the map on the simplex compared with temperature scaling."""
    for figure, n_classes, gamma in (("Fig. 4", 3, 3.0), ("Fig. 5", 3, 1.0), ("Fig. 7", 4, 3.0)):
        log_q = points(n_classes)
        mapped = fk.focal_calibration_map(log_q, gamma)
        scaled = (log_q * best_beta(n_classes, gamma)).softmax(-1)
        # Equal classes stay equal up to rounding.
        kept = bool((mapped.gather(-1, log_q.argsort(-1)).diff(dim=-1) > -1e-15).all())
        source = f"[1] {figure}; drawn here, its values are not at hand"
        what = f"{n_classes} classes, gamma = {gamma:g}"
        yield statement(figure, f"{what}: the order of the classes is kept", kept, f"{len(log_q)} points", source)
        moved = float((mapped - log_q.exp()).abs().max())
        yield number(figure, f"{what}: the map moves a probability by at most", None, moved, source)
        rest = float((mapped - scaled).abs().max())
        yield number(figure, f"{what}: of which the nearest temperature leaves at most", None, rest, source)


# -- [2], without data -----------------------------------------------------------------------------------------------
def optimum_of_bound(q: float, gamma: float) -> float:
    """argmin over p of KL(q || p) - gamma H[p], two classes: bisection on its slope, which rises in p."""
    low, high = 1e-12, 1 - 1e-12
    for _ in range(200):
        p = (low + high) / 2
        slope = -q / p + (1 - q) / (1 - p) + gamma * math.log(p / (1 - p))
        low, high = (p, high) if slope < 0 else (low, p)
    return (low + high) / 2


def entropy_bound() -> Iterator[Line]:
    """L_f >= KL(q || p) + H[q] - gamma H[p], and Figure A.1: which p minimizes the two sides."""
    source = "[2] section 4 and appendix A"
    generator = torch.Generator().manual_seed(0)
    slack, slack_hard, below_one = math.inf, math.inf, math.inf
    for n_classes, gamma in itertools.product((2, 3, 10, 100), (0.5, 1.0, 2.0, 3.0, 5.0, 10.0)):
        log_p, log_t = (
            (4 * torch.rand(3000, 1, dtype=torch.float64, generator=generator)
             * torch.randn(3000, n_classes, dtype=torch.float64, generator=generator)).log_softmax(-1)
            for _ in range(2)
        )  # fmt: skip
        entropy = -(log_p.exp() * log_p).sum(-1)
        for hard in (False, True):
            target: Tensor = log_t.argmax(-1) if hard else log_t.exp()
            loss = fk.focal_loss(log_p, target, gamma, reduction="none")
            # KL(q || p) + H[q] is the cross-entropy.
            bound = torch.nn.functional.cross_entropy(log_p, target, reduction="none") - gamma * entropy
            least = float((loss - bound).min())
            if gamma < 1:
                below_one = min(below_one, least)
            elif hard:
                slack_hard = min(slack_hard, least)
            else:
                slack = min(slack, least)
    what = "L_f >= KL + H[q] - gamma H[p], gamma 1 to 10"
    yield statement("Bound", f"{what}, q a distribution", slack >= -1e-12, f"smallest slack {slack:.2e}", source)
    yield statement("Bound", f"{what}, q one-hot", slack_hard >= -1e-12, f"smallest slack {slack_hard:.2e}", source)
    yield number("Bound", "gamma = 0.5, where it is not claimed: smallest slack", None, below_one, source)

    ordered, gap = True, 0.0
    for gamma in (1.0, 2.0, 3.0, 5.0):
        truth = torch.linspace(0.52, 0.98, 24, dtype=torch.float64)
        both = torch.stack([truth, 1 - truth], 1)
        minimizer = fk.inverse_focal_calibration_map(both, gamma, input_kind="probs")[:, 0]
        for q, focal in zip(truth.tolist(), minimizer.tolist(), strict=True):
            bound = optimum_of_bound(q, gamma)
            ordered &= 0.5 < focal < q and 0.5 < bound < q
            gap = max(gap, abs(focal - bound))
    source = "[2] Fig. A.1, two classes"
    yield statement("Fig. A.1", "both sides have their minimum at p between 1/2 and q", ordered, "every case", source)
    yield number("Fig. A.1", "the two minimizers differ by at most", None, gap, source)
    for q, gamma in itertools.product((0.6, 0.8, 0.95), (1.0, 3.0)):
        truth = torch.tensor([q, 1 - q], dtype=torch.float64)
        focal = float(fk.inverse_focal_calibration_map(truth, gamma, input_kind="probs")[0])
        yield number("Fig. A.1", f"q = {q}, gamma = {gamma:g}: p that minimizes the focal loss", None, focal, source)
        bound = optimum_of_bound(q, gamma)
        yield number("Fig. A.1", f"q = {q}, gamma = {gamma:g}: p that minimizes the bound", None, bound, source)


STATEMENTS: tuple[Callable[[], Iterator[Line]], ...] = (
    decomposition,
    relations,
    bounds,
    confidence,
    three_and_more,
    entropy_bound,
)
