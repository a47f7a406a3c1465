"""Speed and memory of the operators beside what one would use instead. Run ``python -m benchmarks --help``."""
