"""The cache of CPU memory for large results."""

from focalkern.ops._backend import module_or_fallback

__all__ = ["empty_cache"]


def empty_cache() -> None:
    """Frees the CPU memory that focalkern keeps for later gradients and mapped tensors.

    focalkern reuses the memory of freed results of 256 KiB or more for later results of about that size, because page
    faults cost more time than the computation. It keeps at most four blocks. The environment variable
    FOCALKERN_CACHE_MIB limits their total size in MiB (256 by default; 0 keeps none). It is read once, when the first
    such result is computed; a larger result is never kept. Tensors in use are never touched. Only the compiled module
    has this cache. With the stable module or plain torch (``build_info()["kernels"]``) results use torch's own memory,
    the variable is not read, and this function does nothing.

    Raises:
        ValueError: FOCALKERN_CACHE_MIB is not an integer number of MiB. The first large result raises the same error.

    Example:
        >>> probs = fk.focal_calibration_map(torch.zeros(1000, 1000), gamma=1.0)
        >>> del probs  # its memory is kept for the next result
        >>> fk.empty_cache()  # and given back here
    """
    module_or_fallback().empty_cache()
