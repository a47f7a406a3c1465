"""Compare calibrators for one classifier: the recommended one, the reason, its cost, and its effect on each class.

    python examples/compare.py
    python examples/compare.py --report report      # one page with diagrams: report/report.html

The classifier is scikit-learn's logistic regression on the digits images.
"""

import argparse

import numpy as np
from sklearn.datasets import load_digits
from sklearn.linear_model import LogisticRegression

import focalkern as fk

CANDIDATES = ("none", "temperature", "focal-temperature", "structured-vector", "isotonic")


def classifier_rows():
    """Probabilities [N, 10] and labels [N] of 600 validation and 797 test images that it was not fitted on."""
    images, labels = load_digits(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(labels))
    train, val, test = np.split(order, [400, 1000])
    classifier = LogisticRegression(C=1e4, max_iter=5000).fit(images[train] / 16, labels[train])
    return [(classifier.predict_proba(images[rows] / 16), labels[rows]) for rows in (val, test)]


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--report", metavar="DIR", help="write a page with diagrams there (needs matplotlib)")
    chosen = parser.parse_args(arguments)

    # Log-probabilities are logits; for probabilities pass input_kind="probs".
    validation, test = classifier_rows()
    study = fk.compare_calibrators(validation, test, candidates=CANDIDATES, input_kind="probs")
    print(study.verdict)
    for warning in study.verdict.warnings:
        print(f"Note: {warning}.")
    print()
    print(study.table())
    print()

    # study.calibrator is the recommended calibrator, fitted. Calibration of each class before and after it:
    probs, labels = test
    calibrated = study.calibrator.predict_proba(probs)
    print("class  rows  ECE before  ECE after")
    for row in fk.per_class_report(probs, labels, calibrated=calibrated):
        print(f"{row['class']:>5}  {row['n']:>4}  {row['ece']:10.4f}  {row['ece_after']:9.4f}")

    if chosen.report:
        print(f"the report is {study.write_report(chosen.report)[-1]}")


if __name__ == "__main__":
    main()
