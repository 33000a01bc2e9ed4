"""Factorize a symmetric kernel within the memory, or read the factorization that was kept with it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from jacstore.base.machine import limited_cores
from jacstore.base.schema import Reported
from jacstore.base.threads import blas_threads
from jacstore.errors import InvalidRequestError
from jacstore.inference.kept_factors import kept_for
from jacstore.inference.kernel_matrix import KernelMatrix, require_memory
from jacstore.inference.linalg.cholesky_eigh import (
    Cholesky,
    Eigen,
    Factorization,
    bytes_needed,
    cholesky,
    refuse_32_bit,
)

METHODS = ("cholesky", "eigh")
# Default alphas of the effective dimension, in units of the largest eigenvalue.
SHARES = (1e-2, 1e-4, 1e-6)


def checked_alphas(alpha: Any, method: str) -> np.ndarray:
    """Alphas `(A,)`, checked; several of them only for method eigh."""
    # A copy, so that later changes to the caller's array do not reach the factor.
    try:
        alphas = np.array(alpha, np.float64)
    except (TypeError, ValueError):
        alphas = np.array([])
    if alphas.ndim > 1 or alphas.size == 0 or not np.all((alphas > 0) & np.isfinite(alphas)):
        raise InvalidRequestError(f"--alpha {alpha}: allowed are numbers above 0 (alpha=)")
    if alphas.ndim == 1 and method != "eigh":
        raise InvalidRequestError(f'--alpha {alpha}: several alphas need method="eigh"; give one number (alpha=)')
    return alphas.reshape(-1)


def checked_alpha(alpha: Any) -> float:
    """One alpha, checked."""
    found = checked_alphas(alpha, "eigh")
    if np.ndim(alpha):
        raise InvalidRequestError(f"--alpha {alpha}: allowed is one number above 0 (alpha=)")
    return float(found[0])


def factorize(
    gram: KernelMatrix, method: str, alphas: np.ndarray, memory: int | str | None, keep: bool
) -> tuple[Factorization, float, bool]:
    """The factorization, `‖G‖_F`, and whether a kept factorization was used."""
    rows = gram.shape[0]
    what = f"{method} of {rows:,} rows"
    alpha = float(alphas[0]) if method == "cholesky" else None
    kept = kept_for(gram.kernel, method, alpha) if keep else None
    if kept is not None and kept.record:
        require_memory(bytes_needed("kept", rows), memory, f"reading the {what}", "leave rows out")
        norm, arrays = kept.record.norm, kept.load()
        if arrays is not None:
            found = Cholesky(arrays[0], alpha) if alpha is not None else Eigen(arrays[0], arrays[1], alphas)
            return found, norm, True
    instead = "use jacstore.block_cg" if method == "cholesky" else 'use method="cholesky"'
    require_memory(bytes_needed(method, rows), memory, what, instead)
    if kept is not None:
        kept.require_room()
    with blas_threads(limited_cores()):
        fresh, norm = _compute(gram, method, alphas)
    if kept is not None:
        kept.save(fresh.arrays, norm)
    return fresh, norm, False


def _compute(gram: KernelMatrix, method: str, alphas: np.ndarray) -> tuple[Factorization, float]:
    if method == "eigh":
        refuse_32_bit(gram.shape[0])
    matrix = gram.load()
    norm = float(np.linalg.norm(matrix))
    if method == "eigh":
        values, vectors = np.linalg.eigh(matrix)
        return Eigen(values, vectors, alphas), norm
    alpha = float(alphas[0])
    upper, failed = cholesky(matrix, alpha)
    if failed:
        raise InvalidRequestError(
            f"{gram.where} + alpha I is not positive definite: the factorization failed in row {failed - 1} "
            f"({gram.name_row(failed - 1)}) of {len(matrix):,} with alpha {alpha:.3g}; rounding changes the kernel by "
            f"up to about {gram.roundoff * norm:.2g}: give a larger alpha (--alpha, alpha=), or "
            'method="eigh", which takes negative eigenvalues as 0'
        )
    return Cholesky(upper, alpha), norm


def spectrum(kernel: Any, *, memory: int | str | None = None) -> np.ndarray:
    """All eigenvalues of a symmetric kernel, descending, as computed: rounding may make the last ones negative.

    Those of a kept eigendecomposition are read; otherwise about 4/3 R³ operations.
    """
    gram = KernelMatrix(kernel)
    gram.require_symmetric()
    rows = gram.shape[0]
    kept = kept_for(gram.kernel, "eigh")
    values = kept.load_values() if kept is not None else None
    if values is not None:
        return values[::-1]
    require_memory(bytes_needed("eigvalsh", rows), memory, f"all eigenvalues of {rows:,} rows", "leave rows out")
    refuse_32_bit(rows)
    with blas_threads(limited_cores()):
        return np.linalg.eigvalsh(gram.load())[::-1]


@dataclass(frozen=True, kw_only=True)
class EffectiveDimension(Reported):
    """The effective dimension `sum(lam / (lam + alpha))` at one alpha."""

    alpha: float
    dimension: float


@dataclass(frozen=True, kw_only=True)
class SpectrumReport(Reported):
    """Leading eigenvalues of a kernel, descending, and its effective dimension at some alphas."""

    kernel: str
    rows: int
    eigenvalues: list[float]
    smallest: float
    trace: float
    effective_dimension: list[EffectiveDimension]


def describe_spectrum(
    kernel: str, top: int, alphas: Sequence[float] | None, memory: int | str | None
) -> SpectrumReport:
    """Leading eigenvalues of a kernel on disk, and its effective dimension at some alphas."""
    if top < 1:
        raise InvalidRequestError(f"--top {top}: must be an integer of at least 1 (top=)")
    values = spectrum(kernel, memory=memory)
    clipped = np.maximum(values, 0)
    largest = max(0.0, float(values[0]))
    # A kernel of zeros has no share of its largest eigenvalue.
    shares = [largest * share for share in SHARES] if largest else []
    taken = shares if alphas is None else checked_alphas(alphas, "eigh")
    return SpectrumReport(
        kernel=kernel,
        rows=len(values),
        eigenvalues=values[:top].tolist(),
        smallest=float(values[-1]),
        trace=float(values.sum()),
        effective_dimension=[
            EffectiveDimension(alpha=float(alpha), dimension=float((clipped / (clipped + alpha)).sum()))
            for alpha in taken
        ],
    )
