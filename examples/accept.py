"""Accept the answers of a model whose error rate has a bound, and send the others to a human.

    python examples/accept.py --max-risk 0.02

A question has two to five options. The model gives each a log-probability; an option that the question lacks has -inf.
Three sets of questions: one calibrates, one chooses the threshold, one tests both. The answers here are simulated.
"""

import argparse

import torch

import focalkern as fk

OPTIONS = 5


def answers(n, generator):
    """Log-probabilities of the options [n, OPTIONS] of an over-confident model, and the right options [n]."""
    true = 3 * torch.randn(n, OPTIONS, generator=generator)
    there = torch.randint(2, OPTIONS + 1, (n, 1), generator=generator)
    true = true.masked_fill(torch.arange(OPTIONS) >= there, -torch.inf)
    right = torch.multinomial(true.softmax(-1), 1, generator=generator).squeeze(1)
    return 2 * true.log_softmax(-1), right


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--max-risk", type=float, default=0.02)
    parser.add_argument("--confidence", type=float, default=0.95)
    chosen = parser.parse_args(arguments)
    generator = torch.Generator().manual_seed(0)
    calibration, choice, test = (answers(4000, generator) for _ in range(3))

    calibrator = fk.TemperatureScaling().fit(*calibration)
    probs, right = calibrator.predict_proba(choice[0]), choice[1]
    threshold = fk.accept_threshold(probs, right, max_risk=chosen.max_risk, confidence=chosen.confidence)
    print(threshold)

    probs, right = calibrator.predict_proba(test[0]), test[1]
    accepted, wrong = probs.amax(1) >= threshold.threshold, probs.argmax(1) != right
    print(f"test: coverage {accepted.float().mean():.3f} risk {wrong[accepted].float().mean():.4f}")
    curve = fk.metrics.risk_coverage(probs, right)
    for coverage in (0.25, 0.5, 0.75, 1.0):
        at = int((curve.coverage - coverage).abs().argmin())
        print(f"  the most confident {coverage:4.0%}: risk {curve.risk[at]:.4f}")


if __name__ == "__main__":
    main()
