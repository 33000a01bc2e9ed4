"""Per-example Jacobians computed once, stored, and turned into kernels."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jacstore.assembly import gram
    from jacstore.assembly import open_path as open
    from jacstore.attribution import gradient_dot, influence, loss_gradients, top_examples
    from jacstore.builder import build, ntk
    from jacstore.curvature import ggn_operator, hvp_operator, jacobian_operator
    from jacstore.dynamics import gradient_flow
    from jacstore.errors import JacstoreError
    from jacstore.factor_files import clean
    from jacstore.factoring import spectrum
    from jacstore.goodness import sample_tests
    from jacstore.kernel import Kernel
    from jacstore.krylov import block_cg
    from jacstore.lazy import lazy_kernel
    from jacstore.normal_matrix import ggn
    from jacstore.operators import operator
    from jacstore.posterior import sample, sample_from
    from jacstore.problem import Problem
    from jacstore.regression import KernelRidge
    from jacstore.solve import KernelFactor
    from jacstore.store import JacobianStore
    from jacstore.target import load_target
    from jacstore.verification import verify
    from jacstore.weighting import weighted, with_precisions
    from jacstore.writer import StoreWriter

__all__ = [
    "JacobianStore",
    "JacstoreError",
    "Kernel",
    "KernelFactor",
    "KernelRidge",
    "Problem",
    "StoreWriter",
    "block_cg",
    "build",
    "clean",
    "ggn",
    "ggn_operator",
    "gradient_dot",
    "gradient_flow",
    "gram",
    "hvp_operator",
    "influence",
    "jacobian_operator",
    "lazy_kernel",
    "load_target",
    "loss_gradients",
    "ntk",
    "open",
    "operator",
    "sample",
    "sample_from",
    "sample_tests",
    "spectrum",
    "top_examples",
    "verify",
    "weighted",
    "with_precisions",
]
__version__ = "0.1.0"

# Names are loaded when first used: importing jax, zarr and dask takes seconds.
_HOMES = {
    "Problem": "problem",
    "build": "builder",
    "clean": "factor_files",
    "ggn": "normal_matrix",
    "ggn_operator": "curvature",
    "gram": "assembly",
    "hvp_operator": "curvature",
    "jacobian_operator": "curvature",
    "lazy_kernel": "lazy",
    "Kernel": "kernel",
    "JacobianStore": "store",
    "StoreWriter": "writer",
    "JacstoreError": "errors",
    "load_target": "target",
    "ntk": "builder",
    "open": "assembly.open_path",
    "KernelFactor": "solve",
    "KernelRidge": "regression",
    "block_cg": "krylov",
    "gradient_dot": "attribution",
    "gradient_flow": "dynamics",
    "influence": "attribution",
    "loss_gradients": "attribution",
    "spectrum": "factoring",
    "top_examples": "attribution",
    "weighted": "weighting",
    "with_precisions": "weighting",
    "operator": "operators",
    "verify": "verification",
    "sample": "posterior",
    "sample_from": "posterior",
    "sample_tests": "goodness",
}


# Submodules for another framework, which has to be installed: `jacstore.torch.build`.
_EXTRAS = ("torch",)


def __getattr__(name: str) -> Any:
    if name in _EXTRAS:
        return importlib.import_module(f"jacstore.{name}")
    if name not in _HOMES:
        raise AttributeError(f"module 'jacstore' has no attribute {name!r}")
    module, _, attribute = _HOMES[name].partition(".")
    return getattr(importlib.import_module(f"jacstore.{module}"), attribute or name)
