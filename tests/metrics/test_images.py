"""Metrics of pixels: bitwise equal to those of the flattened rows; means over images."""

import inspect

import numpy as np
import pytest
import torch

import focalkern as fk
from focalkern import metrics

N, C, SHAPE, IGNORED = 3, 4, (5, 2), 255

METRICS = {
    "expected": (metrics.expected_calibration_error, {}),
    "expected_equal_mass": (metrics.expected_calibration_error, {"estimator": "equal_mass", "n_bins": 4}),
    "maximum": (metrics.maximum_calibration_error, {}),
    "rms": (metrics.rms_calibration_error, {}),
    "debiased": (metrics.debiased_calibration_error, {"norm": "l1"}),
    "classwise": (metrics.classwise_calibration_error, {}),
    "classwise_none": (metrics.classwise_calibration_error, {"reduction": "none"}),
    "smooth": (metrics.smooth_calibration_error, {}),
    "nll": (metrics.nll, {}),
    "brier": (metrics.brier_score, {}),
    "accuracy": (metrics.accuracy, {}),
    "aurc": (metrics.aurc, {"excess": True}),
}
# Metrics of one set, without a mean over images.
TABLES = {
    "reliability_bins": lambda *given, **options: metrics.reliability_bins(*given, **options).accuracy,
    "risk_coverage": lambda *given, **options: metrics.risk_coverage(*given, **options).risk,
    "accept_threshold": lambda *given, **options: torch.tensor(
        fk.accept_threshold(*given, max_risk=0.9, confidence=0.6, **options).bound
    ),
}
EVERY = [*METRICS.values(), *((metric, {}) for metric in TABLES.values())]
NAMES = [*METRICS, *TABLES]


def pixels():
    """[N, C, d1, d2] probabilities, and labels of which some are ignored."""
    generator = torch.Generator().manual_seed(5)
    logits = 2 * torch.randn(N, C, *SHAPE, generator=generator)
    target = torch.randint(C, (N, *SHAPE), generator=generator)
    ignored = target.masked_fill(torch.rand(target.shape, generator=generator) < 0.3, IGNORED)
    return logits.softmax(1), target, ignored


def rows_of(probs):
    """The rows of pixels [N d1 ..., C], in the order of the flattened labels."""
    return torch.stack([probs[i, :, j, k] for i in range(len(probs)) for j in range(SHAPE[0]) for k in range(SHAPE[1])])


def same(one, other):
    return torch.equal(one.nan_to_num(nan=-1.0), other.nan_to_num(nan=-1.0))


@pytest.mark.parametrize(("metric", "options"), EVERY, ids=NAMES)
def test_pixels_are_the_flattened_rows(metric, options):
    probs, target, ignored = pixels()
    rows = rows_of(probs)
    assert same(metric(probs, target, **options), metric(rows, target.flatten(), **options))
    counts = ignored.flatten() != IGNORED
    expected = metric(rows[counts], ignored.flatten()[counts], **options)
    assert same(metric(probs, ignored, ignore_index=IGNORED, **options), expected)
    # Rows [N, C] may be ignored, too.
    assert same(metric(rows, ignored.flatten(), ignore_index=IGNORED, **options), expected)


@pytest.mark.parametrize(("metric", "options"), METRICS.values(), ids=METRICS)
def test_per_image_is_the_mean_over_images(metric, options):
    probs, _, ignored = pixels()
    ignored[1] = IGNORED  # an image without counted pixels is left out
    counts = ignored.flatten(1) != IGNORED
    each = [metric(rows_of(probs[[i]])[counts[i]], ignored[i].flatten()[counts[i]], **options) for i in (0, 2)]
    found = metric(probs, ignored, ignore_index=IGNORED, per="image", **options)
    assert torch.equal(found, torch.stack(each).mean(0))
    assert not torch.equal(found, metric(probs, ignored, ignore_index=IGNORED, **options))
    nothing = metric(probs, torch.full_like(ignored, IGNORED), ignore_index=IGNORED, per="image", **options)
    assert nothing.shape == found.shape and bool(nothing.isnan().all())
    assert bool(metric(probs[:0], ignored[:0], per="image", **options).isnan().all())


def test_every_metric_of_labels_is_tested():
    functions = {name: getattr(metrics, name) for name in metrics.__all__}
    of_labels = {
        name
        for name, one in functions.items()
        if inspect.isfunction(one) and "target" in inspect.signature(one).parameters
    }
    tested = {metric.__name__ for metric, _ in METRICS.values()} | set(TABLES)
    assert of_labels == tested
    for name in of_labels:
        parameters = inspect.signature(functions[name]).parameters
        assert "ignore_index" in parameters and ("per" in parameters) == (name not in TABLES), name


def test_confidence_and_correct_of_images():
    probs, target, _ = pixels()
    confidence, top = probs.max(1)
    correct = top == target
    expected = metrics.expected_calibration_error(probs, target, per="image")
    assert expected == metrics.expected_calibration_error(confidence=confidence, correct=correct, per="image")
    assert expected == metrics.expected_calibration_error(probs, correct=correct, per="image")
    assert metrics.accuracy(correct=correct, per="image") == metrics.accuracy(probs, target, per="image")
    assert metrics.aurc(probs, correct=correct) == metrics.aurc(
        confidence=confidence.flatten(), correct=correct.flatten()
    )


def test_arrays_give_arrays():
    probs, _, ignored = pixels()
    found = metrics.brier_score(probs.numpy(), ignored.numpy(), ignore_index=IGNORED, per="image")
    assert isinstance(found, np.float64)
    assert found == metrics.brier_score(probs, ignored, ignore_index=IGNORED, per="image").item()


def test_log_probabilities_of_pixels():
    probs, target, _ = pixels()
    rows = rows_of(probs).log()
    assert torch.equal(metrics.nll(probs.log(), target, log=True), metrics.nll(rows, target.flatten(), log=True))


def test_values_of_ignored_pixels_are_not_looked_at():
    probs, target, _ = pixels()
    target[0, 0, 0] = IGNORED
    expected = metrics.nll(probs, target, ignore_index=IGNORED)
    probs[0, :, 0, 0] = torch.nan
    assert torch.equal(metrics.nll(probs, target, ignore_index=IGNORED), expected)
    with pytest.raises(ValueError, match=r"nll: probs must be in \[0, 1\], got NaN in row 0"):
        metrics.nll(probs, target.clamp(max=C - 1))


@pytest.mark.parametrize("per", ["set", "image"])
def test_errors_name_the_row_among_all_pixels(per):
    probs, target, _ = pixels()
    target[0, 0, 0] = IGNORED
    spoiled = probs.clone()
    spoiled[1, 0, 0, 1] = 7.0
    with pytest.raises(ValueError, match=r"expected_calibration_error: probs must be .* in row 11;"):
        metrics.expected_calibration_error(spoiled, target, ignore_index=IGNORED, per=per)
    target[2, 4, 1] = 9
    with pytest.raises(IndexError, match=r"must be in \[0, 4\) or ignore_index, got 9 at row 29"):
        metrics.expected_calibration_error(probs, target, ignore_index=IGNORED, per=per)


ONE_IMAGE = r"got \[3, 4\]; for one image \[C, d1, ...\] pass probs\[None\] and target\[None\]$"


@pytest.mark.parametrize(
    ("given", "options", "error", "message"),
    [
        (((2, 3, 3), (2, 3)), {}, ValueError, r"fit as both; for pixels pass ignore_index=-100"),
        (((2, 5, 3), (2, 5)), {"ignore_index": 0}, ValueError, "target must be .* take no batch of sets"),
        (((2, 5, 3), (2, 5)), {"per": "image"}, ValueError, "target must be .* take no batch of sets"),
        *((((5, 3, 4), (3, 4)), one, ValueError, ONE_IMAGE) for one in ({}, {"ignore_index": 9}, {"per": "image"})),
        (((6, 3), (6,)), {"per": "image"}, ValueError, r"per='image' must have probs \[N, C, d1, ...\]"),
        (((2, 3, 4), (2, 5)), {}, ValueError, r"\[N\] = \[2, 3\] or \[N, d1, ...\] = \[2, 4\], got \[2, 5\]"),
        (((2, 3, 4), (2, 4)), {"per": "row"}, ValueError, "per must be one of set, image, got 'row'"),
        (((2, 3, 4), (2, 4)), {"ignore_index": 0.5}, TypeError, "ignore_index must be an int or None, got 0.5"),
    ],
)
def test_errors(given, options, error, message):
    probs, target = (torch.full(shape, value) for shape, value in zip(given, (1 / given[0][1], 0), strict=True))
    with pytest.raises(error, match=f"nll: .*{message}"):
        metrics.nll(probs, target, **options)


def test_shapes_that_fit_as_both_are_pixels_where_the_caller_says_so():
    probs, target = torch.rand(2, 3, 3).softmax(1), torch.randint(3, (2, 3))
    expected = metrics.nll(probs.movedim(1, -1).flatten(0, 1), target.flatten())
    assert torch.equal(metrics.nll(probs, target, ignore_index=-100), expected)


def test_ignored_rows_have_no_place_beside_correct():
    probs, target, _ = pixels()
    correct = probs.argmax(1) == target
    with pytest.raises(ValueError, match="ignore_index goes with probs and target, got correct; leave the rows out"):
        metrics.aurc(probs, correct=correct, ignore_index=0)
    with pytest.raises(ValueError, match=r"correct must be \[N, d1, ...\] = \[3, 5, 2\], got \[3, 2, 5\]"):
        metrics.aurc(confidence=probs.amax(1), correct=correct.mT, per="image")
    with pytest.raises(ValueError, match="expected either target or correct, got neither"):
        metrics.aurc(probs, per="image")


def test_grid_of_pixels_is_the_flattened_grid():
    probs, _, ignored = pixels()
    axes = {"gammas": [0.0, 1.0], "temperatures": [0.5, 1.0, 2.0]}
    options = {"criteria": ("ece", "nll"), "input_kind": "probs", "ignore_index": IGNORED}
    found = fk.calibration_grid(probs, ignored, **axes, **options)
    flat = fk.calibration_grid(rows_of(probs), ignored.flatten(), **axes, **options)
    for criterion in options["criteria"]:
        assert torch.equal(found.tables[criterion], flat.tables[criterion])
    arrays = fk.calibration_grid(probs.numpy(), ignored.numpy(), **axes, **options)
    assert np.array_equal(arrays.tables["ece"], flat.tables["ece"].numpy())

    of_pixels, of_rows = (fk.CalibrationGridState(**axes, **options, estimator="equal_width") for _ in range(2))
    for i in range(N):  # batches
        of_pixels.update(probs[[i]], ignored[[i]])
        of_rows.update(rows_of(probs[[i]]), ignored[i].flatten())
    assert of_pixels.n_samples == of_rows.n_samples == int((ignored != IGNORED).sum())
    assert of_pixels.n_classes == C
    for criterion in options["criteria"]:
        assert torch.equal(of_pixels.compute().tables[criterion], of_rows.compute().tables[criterion])


def test_grid_names_labels_that_do_not_fit_the_pixels():
    probs, target, _ = pixels()
    with pytest.raises(
        ValueError, match=r"calibration_grid: target must be \[N, d1, ...\] = \[3, 5, 2\], got \[3, 5\]"
    ):
        fk.calibration_grid(probs, target[..., 0], [0.0], [1.0], input_kind="probs")
    state = fk.CalibrationGridState([0.0], [1.0])
    with pytest.raises(ValueError, match=r"CalibrationGridState.update: target must be \[N, d1, ...\] = \[3, 5, 2\]"):
        state.update(probs, target[:2])
