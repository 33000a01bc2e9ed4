"""Checks of the extreme eigenvalues of a kernel whose tiles were checked, computed or estimated by Lanczos."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import scipy.linalg

from jacstore.base.precision import ROUNDOFF
from jacstore.kernels.diagonal import Diagonal
from jacstore.kernels.kernel import Kernel
from jacstore.store.reader import JacobianStore
from jacstore.verification.report import FAILED, OK, Check, skipped
from jacstore.verification.tile_checks import EntryBounds, TileFindings

EIGENVALUES = ("largest eigenvalue", "smallest eigenvalue")
# Kernels of up to this many rows are decomposed; larger ones get this many steps of Lanczos.
DECOMPOSED, LANCZOS_STEPS = 2000, 16


def eigenvalues(
    kernel: Kernel,
    findings: TileFindings,
    bounds: EntryBounds,
    stores: list[JacobianStore] | None,
    draw: np.random.Generator,
) -> Iterator[Check]:
    """Check the extreme eigenvalues against how far below zero rounding may take one; say what factorizing needs."""
    why = ""
    if not kernel.plan.symmetric:
        why = "the kernel is between two stores"
    elif findings.bad or not kernel.complete:
        why = "tiles are missing or wrong"
    elif not math.isfinite(findings.frobenius):
        why = "the kernel holds NaN or infinity"
    if why:
        yield from (skipped(name, why) for name in EIGENVALUES)
        return
    lowest, highest, how = _extreme(kernel, draw)
    # Rounded products make the eigenvalues of a right kernel negative by no more than this: errors of random signs by
    # their norm; errors to one side, which shrink G as a whole and leave it positive, by their spread around half of
    # the largest.
    bound = -bounds.error * max(highest, findings.largest_norm * math.sqrt(kernel.shape[-1]))
    bound -= bounds.one_sided / 2 * math.sqrt(findings.frobenius)
    if kernel.exact_diagonal and stores:
        bound -= Diagonal(stores[0], kernel).bound * findings.largest_norm
    unit = ROUNDOFF[kernel.dtype.name] + ROUNDOFF["float64" if kernel.precision == "float64" else "float32"]
    needed = max(0.0, -lowest) + unit * math.sqrt(findings.frobenius)
    yield Check(name=EIGENVALUES[0], state=OK, figure=highest, where=how)
    yield Check(
        name=EIGENVALUES[1],
        state=OK if lowest >= bound else FAILED,
        figure=lowest,
        bound=bound,
        where=f"{how}; a Cholesky factorization needs at least about {needed:.2g} added to the diagonal",
    )


def _extreme(kernel: Kernel, draw: np.random.Generator) -> tuple[float, float, str]:
    """Smallest and largest eigenvalue, or estimates, and how they were found."""
    size, mode = kernel.shape[-1], kernel.plan.mode
    if mode.within_examples or size <= DECOMPOSED:
        values = [_decomposed(kernel, at) for at in range(kernel.plan.grid[0] if mode.within_examples else 1)]
        return min(low for low, _ in values), max(high for _, high in values), "all eigenvalues computed"
    array = kernel.array if mode.is_matrix else kernel.array[0]
    where = "" if mode.is_matrix else " of output 0"

    def times(x: np.ndarray) -> np.ndarray:
        product: np.ndarray = (array.astype(np.float64) @ x).compute(scheduler="synchronous")
        return product

    low, high = lanczos(times, draw.normal(size=size), min(LANCZOS_STEPS, size))
    return low, high, f"estimated by {LANCZOS_STEPS} steps of Lanczos{where}"


def _decomposed(kernel: Kernel, at: int) -> tuple[float, float]:
    piece = kernel.layouts[0].piece[0]
    part = kernel.array[at * piece : (at + 1) * piece] if kernel.plan.mode.within_examples else kernel.array
    values = np.asarray(part.compute(scheduler="synchronous"), np.float64)
    found = np.linalg.eigvalsh(values)
    return float(found.min()), float(found.max())


def lanczos(times: Any, start: np.ndarray, steps: int) -> tuple[float, float]:
    """Extreme Ritz values of a symmetric matrix after some steps from `start`, orthogonalized anew at each.

    They lie inside the spectrum: the smallest eigenvalue is at most the first, the largest at least the second.
    """
    basis = [start / np.linalg.norm(start)]
    diagonal: list[float] = []
    beside: list[float] = []
    for step in range(steps):
        vector = times(basis[-1])
        diagonal.append(float(vector @ basis[-1]))
        known = np.stack(basis)
        for _ in range(2):
            vector = vector - known.T @ (known @ vector)
        length = float(np.linalg.norm(vector))
        if step + 1 == steps or length <= 1e-12 * max(map(abs, diagonal)):
            break
        beside.append(length)
        basis.append(vector / length)
    values = scipy.linalg.eigvalsh_tridiagonal(diagonal, beside[: len(diagonal) - 1])
    return float(values[0]), float(values[-1])
