"""Speed and memory of the operators compared with their alternatives. Run ``python -m benchmarks --help``."""
