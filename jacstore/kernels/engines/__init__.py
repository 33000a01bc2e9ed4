"""Products of slabs: BLAS on the host, XLA on a device.

`blas` and `xla` offer the same methods.
"""
