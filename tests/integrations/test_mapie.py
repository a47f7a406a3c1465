"""MAPIE's conformal sets of a calibrated scikit-learn classifier."""

import numpy as np
from conftest import peer
from sklearn.datasets import load_digits
from sklearn.linear_model import LogisticRegression

import focalkern as fk


def test_prediction_sets_of_a_calibrated_classifier():
    mapie = peer("mapie.classification")
    x, y = load_digits(return_X_y=True)
    x = x[:, ::4] / 16  # a quarter of the pixels, so that some rows need sets with several classes
    model = fk.CalibratedClassifier(LogisticRegression(max_iter=2000), cv=3).fit(x[:600], y[:600])
    sets = mapie.SplitConformalClassifier(model, confidence_level=0.9, prefit=True)
    sets.conformalize(x[600:1200], y[600:1200])
    predicted, members = sets.predict_set(x[1200:])
    assert np.array_equal(predicted, model.predict(x[1200:]))
    of_label = members[np.arange(len(y) - 1200), y[1200:], 0]
    assert 0.8 < of_label.mean() < 1
    # The set of a row holds its most probable class first.
    top = model.predict_proba(x[1200:]).argmax(1)
    some = members[:, :, 0].any(1)
    assert members[np.arange(len(top)), top, 0][some].all()
