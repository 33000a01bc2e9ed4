"""Is it right? Stores and kernels compared with what is derived afresh.

`verify` chooses: `store_checks`, `target_checks` and `torch_checks` for a store, `kernel_checks` with `tile_checks`
and `eigenvalue_checks` for a kernel, against products of `reference`; all answer with the values of `report`. Nothing
is mended here.
"""
