"""Which training examples move which predictions, from kernels and the derivatives of a loss by the outputs.

With r = dloss/df `(N, K)` the gradient of an example's loss is `g_i = J_iᵀ r_i`, so stored kernels hold every inner
product of such gradients, for any labels and any loss, without another pass over J: gradient dots
`g_i · g_j = r_iᵀ G_ij r_j`, and damped influence `g_iᵀ (alpha I + Jᵀ J)⁻¹ g_j = r_iᵀ (G* C)_ij r_j`. Scores are lazy
Dask arrays, computed tile by tile; `top_examples` never holds more than tiles of them.

References
----------
Pruthi, Liu, Kale, Sundararajan 2020, arXiv:2002.08484 (sums over checkpoints). Koh, Liang 2017, arXiv:1703.04730.
"""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import dask.array as da
import numpy as np
from dask.base import compute

from jacstore.errors import InvalidRequestError
from jacstore.inference.kernel_factor import KernelFactor
from jacstore.inference.kernel_matrix import KernelMatrix, as_columns, cross_gram
from jacstore.inference.linalg.cholesky_eigh import PANEL
from jacstore.inference.weighted_kernels import whole_examples
from jacstore.kernels.kernel import Kernel
from jacstore.operators.likelihoods import LIKELIHOODS
from jacstore.storage.indexing import resolve


def loss_gradients(outputs: Any, targets: Any, loss: str = "softmax") -> np.ndarray:
    """`dloss/df` `(N, K)` at outputs `(N, K)` of each example.

    Parameters
    ----------
    targets
        Integer labels `(N,)`, or `(N, K)`.
    loss
        softmax: cross-entropy of the softmax of the outputs; squared: `|f - y|² / 2`.
    """
    of_losses = {one.loss: one for one in LIKELIHOODS.values()}
    if loss not in of_losses:
        raise InvalidRequestError(
            f"loss={loss!r}: allowed are {', '.join(of_losses)}; for others give dloss/df (N, K) itself"
        )
    f, y = np.asarray(outputs, np.float64), np.asarray(targets)
    if f.ndim != 2:
        raise InvalidRequestError(f"outputs have shape {f.shape}; allowed is (N, K)")
    if y.dtype.kind in "iu" and y.shape == f.shape[:1] and np.isin(y, np.arange(f.shape[1])).all():
        y = np.eye(f.shape[1])[y]
    if y.shape != f.shape:
        raise InvalidRequestError(
            f"targets have shape {y.shape}; allowed are labels ({len(f)},) below {f.shape[1]}, or {f.shape}"
        )
    return of_losses[loss].gradient(f, y)


def gradient_dot(
    kernels: Any, residuals: Any, column_residuals: Any = None, *, weights: Sequence[float] | None = None
) -> da.Array:
    """Scores `r_iᵀ G_ij r_j` `(M, N)`, lazy on Dask.

    Parameters
    ----------
    kernels
        A kernel of mode full, or a list of kernels of the same examples at several checkpoints, whose scores are added.
    residuals
        `dloss/df` of the examples of the rows, `(M, K)`; for several kernels a list of such.
    column_residuals
        `dloss/df` of the examples of the columns, `(N, K)`; for a symmetric kernel those of the rows if not given.
    weights
        Weight of each checkpoint, such as its step size; 1 if not given.
    """
    several = isinstance(kernels, list | tuple)
    grams = list(kernels) if several else [kernels]
    rows = list(residuals) if several else [residuals]
    columns = [None] * len(rows)
    if column_residuals is not None:
        columns = list(column_residuals) if several else [column_residuals]
    factors = [1.0] * len(grams) if weights is None else list(weights)
    if not len(grams) == len(rows) == len(columns) == len(factors) > 0:
        raise InvalidRequestError(
            f"{len(grams)} kernels, {len(rows)} and {len(columns)} residuals, {len(factors)} weights: allowed is one "
            "of each for every checkpoint"
        )
    parts = [factor * _dots(*one) for factor, *one in zip(factors, grams, rows, columns, strict=True)]
    if len({part.shape for part in parts}) > 1:
        raise InvalidRequestError(
            f"the checkpoints' kernels have {[part.shape for part in parts]} examples; all need the same"
        )
    return sum(parts[1:], parts[0])


def _dots(kernel: Any, rows: Any, columns: Any) -> da.Array:
    k = np.shape(rows)[-1] if np.ndim(rows) == 2 else 1
    gram = KernelMatrix(kernel, None if isinstance(kernel, Kernel | str | Path) else k)
    k = gram.n_outputs
    if gram.mode.sums_outputs:
        raise InvalidRequestError(
            f"{gram.where} has mode {gram.mode}, which sums over outputs; assemble with --mode full (mode=)"
        )
    if columns is None:
        gram.require_symmetric()
        columns = rows
    left = _residual_rows(rows, gram.shape[0], k, "residuals")
    right = _residual_rows(columns, gram.shape[1], k, "column_residuals")
    array = da.asarray(gram.array)
    array = array.rechunk(tuple(whole_examples(chunks, k) for chunks in array.chunks))
    sides = [da.from_array(r, chunks=(array.chunks[axis],)) for axis, r in enumerate((left, right))]
    scores: da.Array = da.blockwise(
        _contract,
        "ij",
        array,
        "ij",
        sides[0],
        "i",
        sides[1],
        "j",
        k=k,
        dtype=np.float64,
        meta=np.empty((0, 0)),
        adjust_chunks={index: lambda n: n // k for index in "ij"},
    )
    return scores


def _residual_rows(given: Any, rows: int, k: int, name: str) -> np.ndarray:
    flat, columns = as_columns(given, rows, k, name)
    if columns.trailing not in ((), (1,)):
        raise InvalidRequestError(f"{name} has shape {np.shape(given)}; allowed is ({rows // k}, {k})")
    return flat[:, 0]


def _contract(block: np.ndarray, left: np.ndarray, right: np.ndarray, k: int) -> np.ndarray:
    """`r_iᵀ G_ij r_j` of a block of whole examples."""
    m, n = (size // k for size in block.shape)
    halves = np.einsum("xbk,bk->xb", block.reshape(m * k, n, k), right.reshape(n, k))
    found: np.ndarray = np.einsum("akb,ak->ab", halves.reshape(m, k, n), left.reshape(m, k))
    return found


def influence(factor: KernelFactor, cross: Any, residuals: Any = None, column_residuals: Any = None) -> da.Array:
    """Damped influence of the factor's examples on others, lazy on Dask, panels of other examples at a time.

    Parameters
    ----------
    factor
        Factor of the training examples' kernel, with one alpha: the damping.
    cross
        Kernel between the other examples (rows) and those of the factor (columns).
    residuals, column_residuals
        `dloss/df` `(M, K)` of the other examples, and `(N, K)` of the factor's. Without them the whole `G* C`
        `(M*K, N*K)`: by how much each prediction of kernel regression changes with each target.

    Returns
    -------
    dask.array.Array
        `r_iᵀ (G* C)_ij r_j` `(M, N)`: the inner product of the two loss gradients in the inverse of `alpha I + Jᵀ J`.
    """
    if np.ndim(factor.alpha):
        raise InvalidRequestError(f"a factor with {len(factor.alpha)} alphas; choose one: factor.at(alpha)")
    if (residuals is None) != (column_residuals is None):
        raise InvalidRequestError("give both residuals= and column_residuals=, or neither")
    gram, k = cross_gram(cross, factor.gram), factor.n_outputs
    sides = None
    if residuals is not None:
        sides = (
            _residual_rows(residuals, gram.shape[0], k, "residuals"),
            _residual_rows(column_residuals, gram.shape[1], k, "column_residuals"),
        )
    view = _Influence(factor, gram, sides)
    height = max(1, PANEL // k) * (k if sides is None else 1)
    # Not a hash of the factor, which would read all of it.
    name = f"jacstore-influence-{uuid.uuid4().hex}"
    return da.from_array(view, chunks=(height, view.shape[1]), name=name, asarray=False)


class _Influence:
    """`G* C`, or its contraction, as an array-like for Dask: rows are solved where they are asked for."""

    def __init__(self, factor: KernelFactor, cross: KernelMatrix, sides: tuple[np.ndarray, np.ndarray] | None) -> None:
        self.factor, self.cross, self.sides = factor, cross, sides
        self.k = 1 if sides is None else factor.n_outputs
        self.shape = (cross.shape[0] // self.k, cross.shape[1] // self.k)
        self.ndim, self.dtype = 2, np.dtype("float64")

    def __getitem__(self, index: Any) -> np.ndarray:
        ((low, high), columns), within = resolve(index, self.shape)
        rows = slice(low * self.k, high * self.k)
        block = self.factor.solve(np.asarray(self.cross.array[rows], np.float64).T).T
        if self.sides is not None:
            block = _contract(block, self.sides[0][rows], self.sides[1], self.k)
        picked: np.ndarray = block[:, slice(*columns)][within]
        return picked


@dataclass(frozen=True, kw_only=True)
class Top:
    """For each row of the scores its most extreme columns, the most extreme first: `indices` and `scores` `(M, k)`."""

    indices: np.ndarray
    scores: np.ndarray


def top_examples(scores: Any, k: int, largest: bool = True) -> Top:
    """The k examples with the largest (or smallest) score for each row, tile by tile.

    Parameters
    ----------
    scores
        `(M, N)`, such as `gradient_dot` gives; a lazy array is never whole in memory.
    """
    array = da.asarray(scores)
    if array.ndim != 2 or not isinstance(k, int | np.integer) or isinstance(k, bool) or not 1 <= k <= array.shape[1]:
        raise InvalidRequestError(f"k={k} of scores of shape {array.shape}; allowed are scores (M, N) and 1 <= k <= N")
    signed = k if largest else -k
    indices, values = compute(da.argtopk(array, signed, axis=1), da.topk(array, signed, axis=1))
    return Top(indices=indices, scores=values)
