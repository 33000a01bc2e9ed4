"""Per-example Jacobians computed once, stored, and turned into kernels."""

from __future__ import annotations

import importlib
from typing import Any

__version__ = "0.1.0"

# The public names, by the module that defines them; __init__.pyi says the same to type checkers. A name is loaded when
# it is first used, because importing jax, zarr and dask takes seconds.
_PUBLIC = {
    "assembly": ("gram", "open"),
    "attribution": ("gradient_dot", "influence", "loss_gradients", "top_examples"),
    "builder": ("build",),
    "curvature": ("ggn_operator", "hvp_operator", "jacobian_operator"),
    "dynamics": ("gradient_flow",),
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
    "factor_files": ("clean",),
    "factoring": ("spectrum",),
    "goodness": ("sample_tests",),
    "in_memory": ("ntk",),
    "kernel": ("Kernel",),
    "krylov": ("block_cg",),
    "lazy": ("lazy_kernel",),
    "normal_matrix": ("ggn",),
    "operators": ("operator",),
    "posterior": ("sample", "sample_from"),
    "problem": ("Problem",),
    "regression": ("KernelRidge",),
    "solve": ("KernelFactor",),
    "store": ("JacobianStore",),
    "target": ("load_target",),
    "verification": ("verify",),
    "weighting": ("weighted", "with_precisions"),
    "writer": ("StoreWriter",),
}
# Public modules, loaded when first used; `torch` needs the extra of that name, so `import *` leaves them out.
_MODULES = ("errors", "terms", "testing", "torch")
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
