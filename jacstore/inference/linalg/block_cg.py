"""Solve `(G + alpha I) X = Y` by block conjugate gradients, for kernels too large to factorize.

All right-hand sides share each pass over the kernel, one pass per step. The block of residuals is kept as `Q C` with
orthonormal Q, which no dependence between right-hand sides can break: directions that became dependent are dropped.

References
----------
O'Leary 1980, doi:10.1016/0024-3795(80)90247-5. Dubrulle 2001, Retooling the method of block conjugate gradients, ETNA
12, 216-233.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from jacstore.errors import InvalidRequestError
from jacstore.inference.kernel_matrix import KernelMatrix, as_columns

# Directions smaller than this share of the largest are dropped: they are rounding.
DEPENDENT = 1e-14
# A restart from the true residual that gains less than this factor gains nothing any more.
GAIN = 0.5

Product = Callable[[np.ndarray], np.ndarray]


@dataclass(frozen=True, kw_only=True)
class Stats:
    """Counts and residuals of an iteration.

    Attributes
    ----------
    steps, passes
        One pass over the kernel per step, and one for each true residual that was computed.
    residuals
        True relative residuals `‖Y - (G + alpha I) X‖ / ‖Y‖` of each right-hand side, `(B,)`.
    history
        Largest relative residual after each step, according to the recursion.
    directions
        How many directions the last step had; fewer than right-hand sides if some were dependent.
    """

    steps: int
    passes: int
    residuals: np.ndarray
    history: tuple[float, ...]
    directions: int


@dataclass(frozen=True, kw_only=True)
class Solution:
    """A solution, its statistics, and in words why the iteration stopped."""

    value: np.ndarray
    stats: Stats
    reason: str
    converged: bool


def block_cg(
    matrix: Any,
    y: Any,
    *,
    alpha: float = 0.0,
    tolerance: float = 1e-8,
    max_steps: int = 1000,
    preconditioner: Any = None,
    outputs: int | None = None,
) -> Solution:
    """Solve `(M + alpha I) X = Y` for a symmetric positive definite matrix.

    Parameters
    ----------
    matrix
        A `Kernel` or its path, whose tiles are then read once per step; a NumPy or Dask matrix; or anything with
        `matmat`, such as a `scipy.sparse.linalg.LinearOperator`.
    y
        Right-hand sides `(R, ...)`, or `(N, K, ...)` for a kernel with K rows per example.
    alpha
        At least 0.
    tolerance
        True relative residual that every right-hand side must reach; rounding limits it to about `1e-16 ‖G‖ / alpha`.
    max_steps
        Most steps, restarts included.
    preconditioner
        Approximate inverse, symmetric positive definite: a function of a block `(R, B)`, or anything with `matmat`.
    outputs
        Rows per example, for a matrix that is not a `Kernel`.

    Returns
    -------
    Solution
        With the value in the shape of `y`.

    Warns
    -----
    UserWarning
        If the tolerance was not reached; the text is the `reason`.
    """
    if np.ndim(alpha) or not 0 <= alpha < np.inf:
        raise InvalidRequestError(f"alpha={alpha}: allowed is one number of at least 0")
    if not 0 < tolerance < 1 or max_steps < 1:
        raise InvalidRequestError(
            f"tolerance={tolerance}, max_steps={max_steps}: allowed are 0 < tolerance < 1, max_steps >= 1"
        )
    product, rows, k = _as_product(matrix, outputs)
    flat, columns = as_columns(y, rows, k, "y")
    # Scaled first: squares of very large or small numbers are infinite or zero.
    largest = np.abs(flat).max(0)
    norms = largest * np.linalg.norm(flat / np.where(largest > 0, largest, 1), axis=0)
    run = _Run(product=product, alpha=float(alpha), precondition=_as_precondition(preconditioner), max_steps=max_steps)
    value, residuals = np.zeros_like(flat), np.zeros_like(norms)
    reason, converged = "all right-hand sides are zero: so is the solution", True
    asked = norms > 0
    if asked.any():
        scaled, reason, converged, residuals[asked] = _iterate(run, flat[:, asked] / norms[asked], tolerance)
        value[:, asked] = scaled * norms[asked]
    stats = Stats(
        steps=run.steps,
        passes=run.passes,
        residuals=residuals,
        history=tuple(run.history),
        directions=run.directions,
    )
    if not converged:
        warnings.warn(reason, stacklevel=2)
    return Solution(value=columns.restore(value), stats=stats, reason=reason, converged=converged)


def _as_product(matrix: Any, outputs: int | None) -> tuple[Product, int, int]:
    """The product with a block, the number of rows, and the number of rows per example."""
    if hasattr(matrix, "matmat"):
        if matrix.shape[0] != matrix.shape[1]:
            raise InvalidRequestError(f"the operator is {tuple(matrix.shape)}; needed is a symmetric one")
        return matrix.matmat, matrix.shape[0], outputs or 1
    gram = KernelMatrix(matrix, outputs)
    gram.require_symmetric()
    return gram.matmat, gram.shape[0], gram.n_outputs


def _as_precondition(given: Any) -> Product | None:
    if given is None or callable(getattr(given, "matmat", None)):
        return None if given is None else given.matmat
    if not callable(given):
        raise InvalidRequestError(
            f"preconditioner of type {type(given).__name__}; allowed are a function or an object with matmat"
        )
    product: Product = given
    return product


@dataclass(kw_only=True)
class _Run:
    """The problem, and counts over all restarts."""

    product: Product
    alpha: float
    precondition: Product | None
    max_steps: int
    history: list[float] = field(default_factory=list)
    steps: int = 0
    passes: int = 0
    directions: int = 0

    def apply(self, block: np.ndarray) -> np.ndarray:
        """`(M + alpha I) block`: one pass."""
        self.passes += 1
        return np.asarray(self.product(block), np.float64) + self.alpha * block


def _iterate(run: _Run, y: np.ndarray, tolerance: float) -> tuple[np.ndarray, str, bool, np.ndarray]:
    """Runs, each from the true residual that the one before left, until the true residual is small or gains nothing."""
    x, residual = np.zeros_like(y), y
    before = np.inf
    while True:
        step, trouble = _run_once(run, residual, tolerance)
        x = x + step
        residual = y - run.apply(x)
        true = np.linalg.norm(residual, axis=0)
        found = f"the largest true relative residual is {true.max():.2g} after {run.steps} steps"
        if true.max() <= tolerance:
            return x, f"converged: {found}, allowed {tolerance:.2g}", True, true
        if trouble:
            return x, f"{trouble}; {found}, wanted {tolerance:.2g}", False, true
        if not true.max() <= GAIN * before:
            return (
                x,
                f"stagnated: {found}, wanted {tolerance:.2g}; rounding allows no better, alpha is small beside the "
                "largest eigenvalue: give a larger alpha or tolerance",
                False,
                true,
            )
        before = true.max()


def _run_once(run: _Run, residual: np.ndarray, tolerance: float) -> tuple[np.ndarray, str]:
    """An update of the solution, by the recursion alone, and the reason if it stopped short of the tolerance."""
    x = np.zeros_like(residual)
    q, s, c = _orthonormal(residual, run.precondition)
    while c.size:
        if run.steps >= run.max_steps:
            return x, f"stopped at max_steps={run.max_steps}: raise it, or alpha, or give a preconditioner"
        w = run.apply(s)
        run.steps += 1
        run.directions = s.shape[1]
        if not np.isfinite(w).all():
            return x, "a product with the matrix holds NaN or infinity"
        curvature = s.T @ w
        inverse = _inverse(curvature)
        if inverse is None:
            return x, (
                f"not positive definite: the smallest curvature of a direction is {_smallest(curvature):.2g} of the "
                "largest; give a larger alpha"
            )
        x += s @ (inverse @ c)
        q, z, turn = _orthonormal(q - w @ inverse, run.precondition)
        s, c = z + s @ turn.T, turn @ c
        largest = float(np.linalg.norm(q @ c, axis=0).max()) if c.size else 0.0
        run.history.append(largest)
        if largest <= tolerance:
            break
    return x, ""


def _orthonormal(block: np.ndarray, precondition: Product | None) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """`q`, `M q` and `c` with `block = q c` up to rounding and `qᵀ M q = I`; dependent directions are left out."""
    if precondition is None:
        q, r = np.linalg.qr(block)
        left, sizes, right = np.linalg.svd(r, full_matrices=False)
        keep = sizes > DEPENDENT * max(1, len(sizes)) * sizes[0]
        q = q @ left[:, keep]
        return q, q, sizes[keep, None] * right[keep]
    turn = np.eye(block.shape[1])
    for _ in range(2):  # once more, since a Gram matrix sees dependence only to the square root of rounding
        z = np.asarray(precondition(block), np.float64)
        sizes, vectors = np.linalg.eigh((gram := block.T @ z) / 2 + gram.T / 2)
        keep = sizes > DEPENDENT * max(1, len(sizes)) * sizes[-1]
        roots, kept = np.sqrt(sizes[keep]), vectors[:, keep]
        block, z = block @ (kept / roots), z @ (kept / roots)
        turn = (roots[:, None] * kept.T) @ turn
    return block, z, turn


def _scaled(curvature: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Symmetric part with a unit diagonal, and the roots of the diagonal."""
    roots = np.sqrt(np.abs(np.diagonal(curvature)))
    roots = np.where(roots == 0, 1, roots)
    return (curvature + curvature.T) / 2 / roots / roots[:, None], roots


def _smallest(curvature: np.ndarray) -> float:
    values = np.linalg.eigvalsh(_scaled(curvature)[0])
    return float(values[0] / np.abs(values).max())


def _inverse(curvature: np.ndarray) -> np.ndarray | None:
    """Inverse of a small symmetric matrix on the directions that are not rounding; None if one has no curvature."""
    scaled, roots = _scaled(curvature)
    values, vectors = np.linalg.eigh(scaled)
    noise = DEPENDENT * len(values) * np.abs(values).max()
    if values[0] < -noise or values[-1] <= noise:
        return None
    keep = values > noise
    found: np.ndarray = (vectors[:, keep] / values[keep]) @ vectors[:, keep].T / roots / roots[:, None]
    return found
