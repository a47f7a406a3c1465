"""Some draws of random_cases.py, which takes any number of them by hand."""

import random_cases

FIRST, COUNT = 500, 350  # a few seconds


def test_random_cases():
    problems = [random_cases.run(seed) for seed in range(FIRST, FIRST + COUNT)]
    assert [problem for problem in problems if problem is not None] == []
