"""Runs some draws of random_cases.py; run that file for any number of them."""

import random_cases

FIRST, COUNT = 500, 350  # a few seconds


def test_random_cases():
    problems = [random_cases.run(seed) for seed in range(FIRST, FIRST + COUNT)]
    assert [problem for problem in problems if problem is not None] == []
