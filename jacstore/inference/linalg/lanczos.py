"""Functions of a symmetric matrix times vectors, by Krylov methods that need only products with the matrix.

Every vector has a Krylov space of its own; all of them share each product with the matrix.

References
----------
Jegerlehner 1996, arXiv:hep-lat/9612014 (conjugate gradients for many shifts). Golub, Van Loan, Matrix Computations,
2013, section 10.3 (Lanczos with full reorthogonalization).
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from scipy.linalg import eigh_tridiagonal

Product = Callable[[np.ndarray], np.ndarray]
Function = Callable[[np.ndarray], np.ndarray]

FIRST_CHECK, GROWTH = 8, 1.25
NEGLIGIBLE = 1e-3  # share of the tolerance below which a shift's residual is worth no more steps
BROKEN = 1e-13  # a direction smaller than this beside the matrix is rounding: the Krylov space is complete


@dataclass(frozen=True, kw_only=True)
class Shifted:
    """The weighted sum of solutions, products with the matrix, and true relative residuals at the smallest shift."""

    value: np.ndarray
    products: int
    residuals: np.ndarray


def shifted_cg(
    product: Product,
    block: np.ndarray,
    shifts: np.ndarray,
    weights: np.ndarray,
    *,
    tolerance: float,
    max_steps: int = 5000,
    stop: Callable[[], None] = lambda: None,
) -> Shifted:
    """`sum_q w_q (M + s_q I)⁻¹ block` for positive definite `M + s_q I`: one product per step, whatever the shifts.

    Parameters
    ----------
    block
        `(rows, n)`.
    tolerance
        Relative residual at the smallest shift; those of the others are smaller.
    stop
        Called before each step; may raise.

    Warns
    -----
    UserWarning
        If `max_steps` are not enough, or if rounding left a true residual more than ten times as large.
    """
    order = np.argsort(shifts)
    moved, weights = shifts[order] - shifts[order[0]], weights[order]
    base = float(shifts[order[0]])
    norms = np.linalg.norm(block, axis=0)
    scale = np.where(norms > 0, norms, 1)
    run = _ShiftedRun(block / scale, moved, weights, NEGLIGIBLE * tolerance)
    products = 0
    while products < max_steps and run.residual() > tolerance:
        stop()
        run.step(product(run.directions[0]) + base * run.directions[0])
        products += 1
    true = block / scale - (product(run.first) + base * run.first)
    residuals = np.linalg.norm(true, axis=0)
    if residuals.max() > 10 * tolerance:
        warnings.warn(
            f"after {products} steps the largest true relative residual is {residuals.max():.2g}, wanted "
            f"{tolerance:.2g}; give a larger error, or precision float64",
            stacklevel=2,
        )
    return Shifted(value=run.total * scale, products=products + 1, residuals=residuals)


class _ShiftedRun:
    """Recurrences of every column `(n,)` and shift `(Q, n)`; the first shift is zero."""

    def __init__(self, block: np.ndarray, shifts: np.ndarray, weights: np.ndarray, negligible: float) -> None:
        self.shifts, self.weights, self.negligible, n = shifts[:, None], weights, negligible, block.shape[1]
        self.active = list(range(len(shifts)))
        self.r, self.directions = block.copy(), np.repeat(block[None], len(shifts), 0)
        self.first, self.total = np.zeros_like(block), np.zeros_like(block)
        self.square = np.square(block).sum(0)
        self.zeta, self.zeta_before = np.ones((2, len(shifts), n))
        self.length_before, self.turn_before = np.ones(n), np.zeros(n)

    def residual(self) -> float:
        return float(np.sqrt(self.square.max()))

    def step(self, w: np.ndarray) -> None:
        """Advance all shifts with `w`, the product with the direction of the first."""
        curvature = (self.directions[0] * w).sum(0)
        # A column that is solved exactly, or was zero, is not changed any more.
        alive = (self.square > 0) & (curvature > 0)
        length = np.divide(self.square, curvature, out=np.zeros_like(curvature), where=alive)
        below = length * self.turn_before * (self.zeta_before - self.zeta)
        below += self.zeta_before * self.length_before * (1 + self.shifts * length)
        above = self.zeta * self.zeta_before * self.length_before
        zeta = np.divide(above, below, out=np.zeros_like(above), where=(below != 0) & alive)
        ratio = np.divide(zeta, self.zeta, out=np.zeros_like(zeta), where=self.zeta != 0)
        self.first += length * self.directions[0]
        for q in self.active:
            self.total += (self.weights[q] * length * ratio[q]) * self.directions[q]
        self.r -= length * w
        square = np.where(alive, np.square(self.r).sum(0), 0)
        turn = np.divide(square, self.square, out=np.zeros_like(square), where=alive)
        # Larger shifts are solved sooner; the first decides when all are.
        self.active = [q for q in self.active if q == 0 or (zeta[q] * np.sqrt(square)).max() > self.negligible]
        for q in self.active:
            self.directions[q] *= turn * ratio[q] ** 2
            self.directions[q] += zeta[q] * self.r
        self.zeta_before, self.zeta, self.square = self.zeta, zeta, square
        self.length_before, self.turn_before = np.where(alive, length, 1), turn


class Lanczos:
    """Tridiagonal matrices of a symmetric product, one for each column of a block, and their orthonormal bases."""

    def __init__(self, product: Product, block: np.ndarray) -> None:
        self.product, self.norms = product, np.linalg.norm(block, axis=0)
        self.basis = [block / np.where(self.norms > 0, self.norms, 1)]
        self.diagonal: list[np.ndarray] = []
        self.beside: list[np.ndarray] = []

    @property
    def complete(self) -> bool:
        """Whether every Krylov space is invariant."""
        return bool(self.beside) and not self.beside[-1].any()

    def step(self) -> None:
        """One product."""
        w = np.asarray(self.product(self.basis[-1]), np.float64)
        size = np.linalg.norm(w, axis=0)
        self.diagonal.append((self.basis[-1] * w).sum(0))
        for _ in range(2):  # twice is enough
            for v in self.basis:
                w = w - v * (v * w).sum(0)
        left = np.linalg.norm(w, axis=0)
        largest = np.maximum(size, np.abs(self.diagonal).max(0))
        left[(left <= BROKEN * largest) | (len(self.diagonal) >= len(w))] = 0
        self.beside.append(left)
        self.basis.append(np.where(left > 0, w / np.where(left > 0, left, 1), 0))

    def spectra(self) -> list[tuple[np.ndarray, np.ndarray]]:
        """Ritz values and vectors of every column."""
        d = np.array(self.diagonal)
        e = np.array(self.beside)[:-1]
        return [eigh_tridiagonal(d[:, j], e[:, j]) for j in range(d.shape[1])]

    def combined(self, coefficients: np.ndarray) -> np.ndarray:
        """`sum_k basis_k coefficients_k` with coefficients `(k, n)`, times the norms of the block."""
        total = np.zeros_like(self.basis[0])
        for v, c in zip(self.basis, coefficients, strict=False):
            total += v * c
        return total * self.norms


def lanczos_function(
    product: Product,
    block: np.ndarray,
    function: Function,
    size: Function,
    *,
    tolerance: float,
    max_steps: int = 2000,
    stop: Callable[[], None] = lambda: None,
) -> tuple[np.ndarray, int]:
    """`function(M) block` and the products that it took.

    Parameters
    ----------
    function
        A vectorized function of eigenvalues.
    size
        Squared norm in which an error counts, as a function of eigenvalues.
    tolerance
        Steps end when the last quarter of them changed the result by less, relative to its size.
    """
    run, before, check = Lanczos(product, block), np.zeros((0, block.shape[1])), FIRST_CHECK
    steps = 0
    while True:
        stop()
        run.step()
        steps += 1
        if steps < min(check, max_steps) and not run.complete:
            continue
        check = int(check * GROWTH) + 1
        found = np.empty((steps, block.shape[1]))
        change = 0.0
        for j, (values, vectors) in enumerate(run.spectra()):
            found[:, j] = vectors @ (function(values) * vectors[0])
            moved = found[:, j].copy()
            moved[: len(before)] -= before[:, j]
            whole, part = ((size(values) * np.square(vectors.T @ x)).sum() for x in (found[:, j], moved))
            change = max(change, float(np.sqrt(part / whole)) if whole > 0 else 0.0)
        if change <= tolerance or run.complete or steps >= max_steps:
            break
        before = found
    if change > tolerance and not run.complete:
        warnings.warn(
            f"{steps} Lanczos steps still change the result by {change:.2g}, wanted {tolerance:.2g}; give a larger "
            "error or another method",
            stacklevel=2,
        )
    return run.combined(found), steps


def largest_eigenvalue(product: Product, rows: int, steps: int = 30) -> float:
    """Estimate the largest eigenvalue of a positive semidefinite matrix from above, by Lanczos from a random vector."""
    run = Lanczos(product, np.random.default_rng(0).standard_normal((rows, 1)))
    for _ in range(min(steps, rows)):
        run.step()
        if run.complete:
            break
    ((values, vectors),) = run.spectra()
    # Some eigenvalue lies within the Ritz residual; this early it is the largest.
    return float(max(values[-1], 0) + run.beside[-1][0] * abs(vectors[-1, -1]))
