"""Machine code, executed on the CPU."""
