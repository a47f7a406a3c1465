"""The fused operators. Only the modules in here import the compiled one."""
