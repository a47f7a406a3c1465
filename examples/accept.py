"""Accept the answers of a model whose error rate has a bound, and send the others to a human.

    python examples/accept.py

A question has two to five options. The model gives each a log-probability; an option that the question lacks has -inf.
Three sets of questions: one calibrates, one chooses the threshold, one tests both. The answers here are simulated.
"""

import torch

import focalkern as fk


def answers(n):
    """Log-probabilities of the options [n, 5] of an over-confident model, and the right options [n]."""
    lacks = torch.arange(5) >= torch.randint(2, 6, (n, 1))
    true = (3 * torch.randn(n, 5)).masked_fill(lacks, -torch.inf)
    return 2 * true.log_softmax(1), torch.multinomial(true.softmax(1), 1).squeeze(1)


torch.manual_seed(0)
(log_probs, right), (of_choice, right_of_choice), (of_test, right_of_test) = (answers(4000) for _ in range(3))

calibrator = fk.TemperatureScaling().fit(log_probs, right)
probs = calibrator.predict_proba(of_choice)
threshold = fk.accept_threshold(probs, right_of_choice, max_risk=0.05, confidence=0.95)
print(threshold)

confidence, answer = calibrator.predict_proba(of_test).max(1)
accepted, wrong = confidence >= threshold.threshold, answer != right_of_test
print(f"test: coverage {accepted.float().mean():.3f} risk {wrong[accepted].float().mean():.4f}")
print(f"all answers accepted: risk {wrong.float().mean():.4f}")
