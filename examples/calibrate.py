"""Calibrate a classifier from its validation logits, print the metrics of test rows, and save the calibrator.

    python examples/calibrate.py                # naive Bayes on the digits images, strongly over-confident
    python examples/calibrate.py logits.npz     # val_logits, val_labels, test_logits, test_labels: see train.py

It writes calibrator.json, which fk.load_calibrator and the command focalkern apply read.
"""

import argparse

import numpy as np
import torch
from sklearn.datasets import load_digits
from sklearn.naive_bayes import GaussianNB

import focalkern as fk


def naive_bayes():
    """Logits [N, 10] and labels [N] of 600 validation and 597 test images that the classifier was not fitted on."""
    images, labels = load_digits(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(labels))
    train, val, test = np.split(order, [600, 1200])
    classifier = GaussianNB(var_smoothing=0.01).fit(images[train], labels[train])
    return [(classifier.predict_log_proba(images[rows]), labels[rows]) for rows in (val, test)]


def report(name, log_probs, labels):
    nll = fk.metrics.nll(log_probs, labels, log=True)
    ece = fk.metrics.expected_calibration_error(np.exp(log_probs), labels)
    print(f"{name:18}  NLL {nll:.4f}  ECE {ece:.4f}")


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("file", nargs="?", help=".npz of val_logits, val_labels, test_logits and test_labels")
    parser.add_argument("--out", default="calibrator.json")
    chosen = parser.parse_args(arguments)
    if chosen.file is None:
        (val_logits, val_labels), (test_logits, test_labels) = naive_bayes()
    else:
        with np.load(chosen.file) as file:
            val_logits, val_labels = file["val_logits"], file["val_labels"]
            test_logits, test_labels = file["test_logits"], file["test_labels"]

    # Fitted on validation rows. AutoCalibrator chooses by cross-validation, and prefers simpler calibrators.
    calibrator = fk.AutoCalibrator().fit(val_logits, val_labels)
    print(f"chosen by {len(val_labels)} validation rows: {calibrator.verdict_.use}")
    for candidate in calibrator.table_:
        print(f"    {candidate['name']:18}  cross-validated NLL {candidate['loss']:.4f}")

    print(f"{len(test_labels)} test rows:")
    before = torch.from_numpy(test_logits).log_softmax(-1).numpy()
    report("before", before, test_labels)
    report("after", calibrator.predict_log_proba(test_logits), test_labels)
    # Even a perfectly calibrated model has an ECE above 0.
    floor = fk.bootstrap.bias_floor(calibrator.predict_proba(test_logits))["ece_equal_width"]
    print(f"{'perfect calibration':18}  ECE {floor.mean:.4f} on average")

    calibrator.save(chosen.out)
    loaded = fk.load_calibrator(chosen.out)
    print(f"saved in {chosen.out}; the first test row: {np.round(loaded.predict_proba(test_logits[:1]), 3)[0]}")
    # For a torch network: torch.nn.Sequential(network, loaded.as_module()) returns calibrated log-probabilities.


if __name__ == "__main__":
    main()
