"""Linear algebra of large symmetric matrices.

`cholesky_eigh` in blocks, `block_cg` and `lanczos` by products alone, `quadrature` for inverse square roots.
"""
