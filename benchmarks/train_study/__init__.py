"""Trains real networks with every loss of the four papers and prints their tables: python -m benchmarks.train_study."""
