"""Kernels weighted by a likelihood, or by prior precisions of their leaves, as lazy Dask arrays.

The generalised Gauss-Newton matrix of a likelihood is `Jᵀ Λ J` with `Λ_n = L_n L_nᵀ` `(K, K)` for each example, so the
kernel that takes the place of `J Jᵀ` is `blockdiag(L)ᵀ J Jᵀ blockdiag(L)`: small transforms of what is stored. With a
prior precision `pi_g` for each group of leaves it is `J diag(1 / pi) Jᵀ`, a sum of kernels that are kept apart by leaf.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import reduce
from operator import add
from typing import Any

import dask.array as da
import numpy as np

from jacstore.base.precision import ROUNDOFF
from jacstore.errors import InvalidRequestError
from jacstore.inference.kernel_matrix import PRODUCTS, KernelMatrix
from jacstore.kernels.kernel import Kernel, open_kernel
from jacstore.kernels.lazy import described
from jacstore.operators.likelihoods import likelihood_of

SIDES = ("both", "columns", "rows")


def likelihood_roots(outputs: Any, likelihood: str = "softmax") -> np.ndarray:
    """`L` `(N, K, K)` with `L Lᵀ = Λ`, the curvature of a likelihood at outputs `(N, K)`, checked."""
    chosen = likelihood_of(likelihood)
    values = np.asarray(outputs, np.float64)
    if values.ndim != 2 or not np.isfinite(values).all():
        raise InvalidRequestError(
            f"outputs of shape {values.shape}; allowed are finite numbers (N, K), such as store.outputs"
        )
    return chosen.root(values)


def weighted(kernel: Any, outputs: Any, likelihood: str = "softmax", sides: str = "both") -> da.Array:
    """A kernel of mode full weighted by a likelihood, as a lazy Dask array of the same shape.

    Use it as `KernelFactor(weighted(kernel, store.outputs), alpha, outputs=K)`.

    Parameters
    ----------
    kernel
        A `Kernel` of mode full or its path, or a matrix.
    outputs
        Outputs `(N, K)`, before the softmax, of the examples on the weighted side.
    likelihood
        softmax or gaussian.
    sides
        both, of a symmetric kernel; columns or rows, of the kernel between other examples and these.

    References
    ----------
    Immer, Korzepa, Bauer 2021, arXiv:2008.08400.
    """
    if sides not in SIDES:
        raise InvalidRequestError(f"sides={sides!r}: allowed are {', '.join(SIDES)}")
    roots = likelihood_roots(outputs, likelihood)
    examples, k, _ = roots.shape
    gram = KernelMatrix(kernel, None if getattr(kernel, "mode", None) else k)
    if not gram.mode.holds_every_product or gram.n_outputs != k:
        raise InvalidRequestError(f"{gram.where} has mode {gram.mode} and {gram.n_outputs} outputs; needed: full, {k}")
    axes = {"both": (0, 1), "columns": (1,), "rows": (0,)}[sides]
    if any(gram.shape[axis] != examples * k for axis in axes):
        raise InvalidRequestError(
            f"{gram.where} is {gram.shape} and outputs are of {examples} examples x {k}; change sides= or both"
        )
    array = da.asarray(gram.array)
    array = array.rechunk(tuple(whole_examples(chunks, k) for chunks in array.chunks)).astype(np.float64)
    stacked = roots.reshape(-1, k)
    pairs: list[Any] = []
    for axis, index in ((0, "ik"), (1, "jl")):
        part = da.from_array(stacked, chunks=(array.chunks[axis], k)) if axis in axes else None
        pairs += [part, index if part is not None else None]
    found = da.blockwise(_weigh, "ij", array, "ij", *pairs, concatenate=True, dtype=np.float64, meta=np.empty((0, 0)))
    return described(found, roundoff=gram.roundoff, exact_diagonal=gram.exact_diagonal, mode="full")


def with_precisions(kernel: Any, precisions: Mapping[str, float]) -> da.Array:
    """`sum_g G_g / pi_g`, a kernel under a prior precision for each group of leaves, as a lazy Dask array of its shape.

    It stands for the posterior precision `A = diag(pi) + Jᵀ J` with alpha = 1: in `KernelFactor(found, 1.0, outputs=K)`
    `predictive_covariance` takes the kernels with others changed in the same way, and
    `log det A = sum_g P_g log pi_g + factor.logdet()`.

    Parameters
    ----------
    kernel
        A `Kernel` that was assembled with `by_leaf=True`, or its path; any mode, symmetric or not.
    precisions
        Positive numbers by the path of a leaf, or by the common beginning of a group of paths: "layer0" stands for
        "layer0/w" and "layer0/b". If several match, the longest counts. Every leaf needs one.

    Raises
    ------
    InvalidRequestError
        Naming leaves without a precision, groups without a leaf, or a precision that is not positive.
    """
    kernel = kernel if isinstance(kernel, Kernel) else open_kernel(str(kernel))
    if not kernel.leaves:
        raise InvalidRequestError(f"{kernel.path} is one sum over all leaves; assemble with --by-leaf (by_leaf=True)")
    for group, value in precisions.items():
        if not 0 < value < np.inf:
            raise InvalidRequestError(f"precisions[{group!r}] = {value}: must be a finite number above 0")
        if not any(_within(path, group) for path in kernel.leaves):
            raise InvalidRequestError(f"precisions[{group!r}]: no leaf begins so; there are {', '.join(kernel.leaves)}")
    groups = {path: [group for group in precisions if _within(path, group)] for path in kernel.leaves}
    missing = [path for path, found in groups.items() if not found]
    if missing:
        raise InvalidRequestError(f"precisions= names no precision of {', '.join(missing)}; every leaf needs one")
    arrays = kernel.leaf_arrays
    found = reduce(add, (arrays[path].astype(np.float64) / precisions[max(groups[path], key=len)] for path in groups))
    roundoff = max(ROUNDOFF[kernel.dtype.name], PRODUCTS[kernel.precision])
    return described(found, roundoff=roundoff, exact_diagonal=kernel.exact_diagonal, mode=kernel.mode)


def _within(path: str, group: str) -> bool:
    return path == group or path.startswith(group + "/")


def whole_examples(chunks: tuple[int, ...], k: int) -> tuple[int, ...]:
    """Chunks along one axis that cut no example."""
    ends = np.unique([*(np.cumsum(chunks)[:-1] // k * k), sum(chunks)])
    return tuple(np.diff([0, *ends[ends > 0]]))


def _weigh(block: np.ndarray, rows: np.ndarray | None, columns: np.ndarray | None) -> np.ndarray:
    """`blockdiag(rows)ᵀ block blockdiag(columns)`; the roots of the examples stand one below the other, `(n*K, K)`."""
    if rows is not None:
        block = _from_left(rows, block)
    if columns is not None:
        block = _from_left(columns, block.T).T
    return block


def _from_left(roots: np.ndarray, block: np.ndarray) -> np.ndarray:
    k = roots.shape[1]
    turned = roots.reshape(-1, k, k).transpose(0, 2, 1) @ block.reshape(-1, k, block.shape[1])
    return turned.reshape(block.shape)
