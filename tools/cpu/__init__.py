"""Instruction counts of the CPU kernels."""
