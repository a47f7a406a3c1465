"""Trains networks on real data with every loss of four papers and prints the papers' tables: python -m
benchmarks.train_study."""
