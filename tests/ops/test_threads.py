"""Eight Python threads over all operators give bitwise the results of one; steps leave no tensor allocated."""

import gc
import threading

import pytest
import torch

import focalkern as fk

ROUNDS, THREADS = 6, 8


def batch(seed):
    generator = torch.Generator().manual_seed(seed)
    logits = 3 * torch.randn(300, 17, generator=generator)
    return logits, torch.randint(17, (300,), generator=generator)


def with_gradient(function):
    def run(seed):
        logits, target = batch(seed)
        logits.requires_grad_()
        loss = function(logits, target)
        loss.sum().backward()
        return loss.detach(), logits.grad

    return run


HEAD = torch.randn(17, 17, generator=torch.Generator().manual_seed(1))
OPERATORS = {
    "focal_loss": with_gradient(lambda z, y: fk.focal_loss(z, y, 2.0)),
    "focal_loss, table": with_gradient(lambda z, y: fk.focal_loss(z, y, fk.FLSD_53, reduction="none")),
    "focal_loss, probabilities": with_gradient(lambda z, y: fk.focal_loss(z, z.detach().softmax(-1), 1.5)),
    "sigmoid_focal_loss": with_gradient(lambda z, y: fk.sigmoid_focal_loss(z, y, reduction="mean")),
    "asymmetric_loss": with_gradient(lambda z, y: fk.asymmetric_loss(z, y)),
    "quality_focal_loss": with_gradient(lambda z, y: fk.quality_focal_loss(z, z.detach().sigmoid())),
    "varifocal_loss": with_gradient(lambda z, y: fk.varifocal_loss(z, z.detach().sigmoid())),
    "matchability_loss": with_gradient(lambda z, y: fk.matchability_loss(z, y)),
    "ia_bce_loss": with_gradient(lambda z, y: fk.ia_bce_loss(z, y)),
    "linear_focal_loss": with_gradient(lambda z, y: fk.linear_focal_loss(z, HEAD, y)),
    "properized_focal_loss": with_gradient(lambda z, y: fk.properized_focal_loss(z, y)),
    "focal_calibration_map": with_gradient(lambda z, y: fk.focal_calibration_map(z, 1.0, 2.0)),
    "binary_focal_calibration_map": with_gradient(lambda z, y: fk.binary_focal_calibration_map(z, 1.0)),
    "spline_calibration_map": with_gradient(
        lambda z, y: fk.spline_calibration_map(z, 2.0, 1e-3, 0.0, torch.arange(-2.0, 2.0), torch.ones(4))
    ),
    "inverse_focal_calibration_map": with_gradient(lambda z, y: fk.inverse_focal_calibration_map(z, 1.0)),
    "calibration_grid": lambda seed: tuple(
        fk.calibration_grid(*batch(seed), [0.0, 1.0], [1.0, 2.0], criteria=("ece", "nll", "brier")).tables.values()
    ),
    "fit": lambda seed: (torch.tensor(fk.FocalTemperatureScaling().fit_quietly(*batch(seed)).temperature_),),
}


def shared(calibrator):
    """Every thread calls all prediction methods of the same fitted calibrator."""
    calibrator.fit_quietly(*batch(99))

    def run(seed):
        logits, _ = batch(seed)
        return calibrator.predict_proba(logits), calibrator.predict_log_proba(logits), calibrator.predict(logits)

    return run


def calibrators():
    scaling = fk.TemperatureScaling()
    made = {
        "temperature": fk.TemperatureScaling(),
        "focal": fk.FocalTemperatureScaling(criterion="brier"),
        "bins": fk.HistogramBinning(n_bins=5),
        "bins after a scaling": fk.HistogramBinning(n_bins=5, scaling=scaling),
        "isotonic": fk.IsotonicCalibration(),
        "structured": fk.StructuredScaling(kind="vector"),
        "auto": fk.AutoCalibrator(),
    }
    return {name: shared(calibrator) for name, calibrator in made.items()}


def test_eight_threads_may_share_a_calibrator():
    check_threads(calibrators())


def test_eight_threads_give_the_bits_of_one():
    check_threads(OPERATORS)


def check_threads(operators):
    expected = {name: [run(seed) for seed in range(ROUNDS)] for name, run in operators.items()}
    differ, ready = [], threading.Barrier(THREADS)

    def work(number):
        try:
            ready.wait()
            # Each thread begins at another operator, so that different operators run at the same time.
            names = [*operators][number:] + [*operators][:number]
            for seed in range(ROUNDS):
                for name in names:
                    found = operators[name](seed)
                    if not all(map(torch.equal, found, expected[name][seed])):
                        differ.append(name)
        except BaseException as error:  # an assertion in a thread would be lost
            differ.append(repr(error))

    threads = [threading.Thread(target=work, args=(number,)) for number in range(THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not differ


def live_tensors():
    gc.collect()
    return sum(type(value) in (torch.Tensor, torch.nn.Parameter) for value in gc.get_objects())


LOSSES = [fk.FocalLoss(), fk.FLSDLoss(), fk.AdaFocalLoss(), fk.DualFocalLoss(), fk.BrierLoss(), fk.MMCELoss()]
LOSSES += [fk.SigmoidFocalLoss(), fk.LinearFocalLoss(17, 17), fk.LogitNormPenalty()]


@pytest.mark.parametrize("loss", LOSSES, ids=lambda loss: type(loss).__name__)
def test_steps_leave_no_tensor_behind(loss):
    def steps(n):
        for seed in range(n):
            logits, target = batch(seed)
            loss(logits.requires_grad_(), target).backward()

    steps(2)
    before = live_tensors()
    steps(20)
    assert live_tensors() <= before
