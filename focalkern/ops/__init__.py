"""The fused operators. Only the modules in here import the compiled one."""

# Before any module that imports focalkern.fallback: the compiled module must be the first to define the operators.
from focalkern.ops import _backend as _backend
