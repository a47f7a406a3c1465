"""The CUDA kernels without a GPU: built for the CPU, run, checked, counted."""
