"""Per-example Jacobians computed once, stored, and turned into kernels."""

from __future__ import annotations

import importlib
from typing import Any

__version__ = "0.1.0"

# The public names, by the module that defines them; __init__.pyi says the same to type checkers. A name is loaded when
# it is first used, because importing jax, zarr and dask takes seconds.
_PUBLIC = {
    "kernels.gram": ("gram", "open"),
    "inference.attribution": ("gradient_dot", "influence", "loss_gradients", "top_examples"),
    "rows.build": ("build",),
    "operators.autodiff": ("ggn_operator", "hvp_operator", "jacobian_operator"),
    "inference.gradient_flow": ("gradient_flow",),
    "errors": (
        "DamagedDataError",
        "IncompleteError",
        "InvalidFunctionError",
        "InvalidRequestError",
        "JacstoreError",
        "LockedError",
        "NonFiniteError",
        "RequestMismatchError",
        "RunInterruptedError",
        "SelectedStateWarning",
        # their names of before
        "Damaged",
        "Incomplete",
        "Interrupted",
        "Locked",
        "Mismatch",
        "NonFinite",
        "ProbeFailed",
        "Refused",
        "SelectedState",
    ),
    "inference.kept_factors": ("clean",),
    "inference.factorize": ("spectrum",),
    "inference.sample_tests": ("sample_tests",),
    "in_memory": ("ntk",),
    "kernels.kernel": ("Kernel",),
    "inference.linalg.block_cg": ("block_cg",),
    "kernels.lazy": ("lazy_kernel",),
    "operators.ggn_matrix": ("ggn",),
    "operators.stored": ("operator",),
    "inference.posterior": ("sample", "sample_from"),
    "problem.problem": ("Problem",),
    "inference.kernel_ridge": ("KernelRidge",),
    "inference.kernel_factor": ("KernelFactor",),
    "store.reader": ("JacobianStore",),
    "problem.loading": ("load_target",),
    "reporting.page": ("report",),
    "verification.verify": ("verify",),
    "inference.weighted_kernels": ("weighted", "with_precisions"),
    "store.writer": ("StoreWriter",),
}
# Public modules, loaded when first used; the last three need the extras of their names, so `import *` leaves them out.
_MODULES = ("errors", "terms", "testing", "equinox", "flax", "torch")
# Named otherwise where they are defined, because they would hide a builtin there.
_DEFINED_AS = {"open": "open_path"}

_HOMES = {name: module for module, names in _PUBLIC.items() for name in names}
__all__ = list(_HOMES)


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return importlib.import_module(f"jacstore.{name}")
    if name not in _HOMES:
        raise AttributeError(f"module 'jacstore' has no attribute {name!r}")
    return getattr(importlib.import_module(f"jacstore.{_HOMES[name]}"), _DEFINED_AS.get(name, name))


def __dir__() -> list[str]:
    return sorted([*__all__, *_MODULES, *(name for name in globals() if name.startswith("__"))])
