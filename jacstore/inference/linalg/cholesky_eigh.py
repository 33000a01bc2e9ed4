"""Cholesky factors and eigendecompositions of symmetric kernels in float64, with one interface.

Both answer the same questions about `C = (G + alpha I)⁻¹`. The first axis of every answer counts alphas: one for a
Cholesky factor, any number for an eigendecomposition. LAPACK is called where no workspace grows with R² in 32 bits.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from scipy.linalg import blas, lapack

from jacstore.base.limits import LIMITS
from jacstore.errors import InvalidRequestError

PANEL = 512  # right-hand sides that are solved together


class Cholesky:
    """`G + alpha I = Uᵀ U`; U is the upper triangle of a C-ordered array, below it anything may stand."""

    method = "cholesky"

    def __init__(self, upper: np.ndarray, alpha: float) -> None:
        self.upper, self.alphas = upper, np.array([alpha])
        self._known: dict[int, np.ndarray] = {}

    @property
    def arrays(self) -> list[np.ndarray]:
        """What is kept of it."""
        return [self.upper]

    def solve(self, block: np.ndarray) -> np.ndarray:
        """`C block` for `(R, B)`: `(1, R, B)`."""
        return solve_upper(self.upper, self.halves(block))[None]

    def halves(self, block: np.ndarray) -> np.ndarray:
        """`U⁻ᵀ block`, whose Gram is `blockᵀ C block`."""
        return solve_upper_transposed(self.upper, block)

    def logdet(self) -> np.ndarray:
        """log det(G + alpha I), `(1,)`."""
        return np.array([2 * np.log(np.diagonal(self.upper)).sum()])

    def logdet_ratio(self) -> np.ndarray:
        """log det(I + G/alpha), `(1,)`."""
        return self.logdet() - len(self.upper) * np.log(self.alphas)

    def inverse_blocks(self, k: int) -> np.ndarray:
        """Diagonal blocks of C, `(1, N, k, k)`; R³ operations, once."""
        if k not in self._known:
            self._known[k] = self._inverse_blocks(k)
        return self._known[k][None]

    def _inverse_blocks(self, k: int) -> np.ndarray:
        rows = len(self.upper)
        if k == 1 and self._known:
            (blocks,) = self._known.values()
            return np.diagonal(blocks, axis1=1, axis2=2).reshape(-1, 1, 1)
        blocks = np.empty((rows // k, k, k))
        step = max(1, PANEL // k) * k
        for a in range(0, rows, step):
            b = min(a + step, rows)
            unit = np.eye(rows - a, b - a)
            # C is the Gram of U⁻ᵀ, whose rows before a are zero.
            blocks[a // k : b // k] = _grams(solve_upper_transposed(self.upper[a:, a:], unit), k)
        return blocks

    def leverage(self) -> np.ndarray:
        """Diagonal of `G C = I - alpha C`, `(1, R)`."""
        return 1 - self.alphas[:, None] * self.inverse_blocks(1).reshape(1, -1)

    def inverse_grams(self, block: np.ndarray, k: int) -> np.ndarray:
        """`(1, M, k, k)`: diagonal blocks of `blockᵀ C block` for `(R, M*k)`."""
        return _grams(self.halves(block), k)[None]


class Eigen:
    """`G = V diag(values) Vᵀ` with ascending values, and any number of alphas."""

    method = "eigh"

    def __init__(self, values: np.ndarray, vectors: np.ndarray, alphas: np.ndarray) -> None:
        self.values, self.vectors, self.alphas = values, vectors, alphas

    @property
    def arrays(self) -> list[np.ndarray]:
        """What is kept of it."""
        return [self.values, self.vectors]

    @property
    def clipped(self) -> np.ndarray:
        """Eigenvalues; those that rounding made negative are 0."""
        return np.maximum(self.values, 0)

    @property
    def _inverse(self) -> np.ndarray:
        """`1 / (lam + alpha)`, `(A, R)`."""
        return 1 / (self.clipped + self.alphas[:, None])

    def solve(self, block: np.ndarray) -> np.ndarray:
        """`C block` for `(R, B)`: `(A, R, B)`."""
        turned = self.vectors.T @ block
        return np.stack([self.vectors @ (inverse[:, None] * turned) for inverse in self._inverse])

    def logdet(self) -> np.ndarray:
        """log det(G + alpha I), `(A,)`."""
        return -np.log(self._inverse).sum(1)

    def logdet_ratio(self) -> np.ndarray:
        """log det(I + G/alpha), `(A,)`."""
        return np.log1p(self.clipped / self.alphas[:, None]).sum(1)

    def inverse_blocks(self, k: int) -> np.ndarray:
        """Diagonal blocks of C, `(A, N, k, k)`."""
        return self._blocks(k, self._inverse)

    def leverage(self) -> np.ndarray:
        """Diagonal of `G C`, `(A, R)`."""
        shares = self.clipped * self._inverse
        return self._blocks(1, shares).reshape(len(shares), -1)

    def _blocks(self, k: int, weights: np.ndarray) -> np.ndarray:
        """Diagonal blocks of `V diag(w) Vᵀ` for each row of weights `(A, R)`."""
        rows = len(self.vectors)
        blocks = np.empty((len(weights), rows // k, k, k))
        step = max(1, PANEL // k) * k
        for a in range(0, rows, step):
            part = self.vectors[a : a + step]
            span = slice(a // k, (a + len(part)) // k)
            if k == 1:
                blocks[:, span, 0, 0] = weights @ (part * part).T
                continue
            stacked = part.reshape(-1, k, rows)
            for index, weight in enumerate(weights):
                blocks[index, span] = (stacked * weight) @ stacked.transpose(0, 2, 1)
        return blocks

    def inverse_grams(self, block: np.ndarray, k: int) -> np.ndarray:
        """`(A, M, k, k)`: diagonal blocks of `blockᵀ C block` for `(R, M*k)`."""
        turned = self.vectors.T @ block
        return np.stack([_grams(np.sqrt(inverse)[:, None] * turned, k) for inverse in self._inverse])


Factorization = Cholesky | Eigen


def _grams(halves: np.ndarray, k: int) -> np.ndarray:
    """Of `(R, M*k)`, the Gram of each k columns: `(M, k, k)`."""
    stacked = np.ascontiguousarray(halves.T).reshape(-1, k, len(halves))
    return stacked @ stacked.transpose(0, 2, 1)


def bytes_needed(method: str, rows: int) -> int:
    """Bytes at the peak of a factorization of R rows, the kernel among them."""
    # numpy.linalg.eigh: the kernel, LAPACK's copy, 2 R² of workspace, and the vectors.
    copies = {"cholesky": 1, "eigh": 5, "eigvalsh": 2, "kept": 1}[method]
    height, width = LIMITS.cholesky_rows, LIMITS.cholesky_columns
    blocks = height * (height + width) if method == "cholesky" and rows > height else 0
    return 8 * (copies * rows * rows + blocks)


def cholesky(matrix: np.ndarray, alpha: float) -> tuple[np.ndarray, int]:
    """Factorize `matrix + alpha I` in place: the array, and the row (from 1) at which it failed; 0 if it did not.

    Only the upper triangle counts. Block row by block row, left-looking: Golub, Van Loan, Matrix Computations, 2013,
    section 4.2.
    """
    rows, height, width = len(matrix), LIMITS.cholesky_rows, LIMITS.cholesky_columns
    matrix[np.diag_indices(rows)] += alpha
    if rows <= height:
        _, failed = _potrf(matrix)
        return matrix, failed
    for a in range(0, rows, height):
        b = min(a + height, rows)
        for c in range(a, rows, width):
            d = min(c + width, rows)
            matrix[a:b, c:d] -= matrix[:a, a:b].T @ matrix[:a, c:d]
        corner = np.ascontiguousarray(matrix[a:b, a:b])
        lower, failed = _potrf(corner)
        matrix[a:b, a:b] = corner
        if failed:
            return matrix, a + failed
        for c in range(b, rows, width):
            right = np.ascontiguousarray(matrix[a:b, c : c + width])
            solved = blas.dtrsm(1.0, lower, right.T, side=1, lower=1, trans_a=1, overwrite_b=1)
            matrix[a:b, c : c + width] = solved.T
    return matrix, 0


def solve_upper_transposed(upper: np.ndarray, block: np.ndarray) -> np.ndarray:
    """`U⁻ᵀ block` for `(R, B)`, forwards block row by block row; only the upper triangle of `upper` is read."""
    solved = np.array(block, np.float64)
    for a, b in _block_rows(len(upper)):
        solved[a:b] -= upper[:a, a:b].T @ solved[:a]
        _solve_corner(upper[a:b, a:b], solved[a:b], a, transposed=True)
    return solved


def solve_upper(upper: np.ndarray, block: np.ndarray) -> np.ndarray:
    """`U⁻¹ block` for `(R, B)`, backwards block row by block row; only the upper triangle of `upper` is read."""
    solved = np.array(block, np.float64)
    for a, b in reversed(_block_rows(len(upper))):
        solved[a:b] -= upper[a:b, b:] @ solved[b:]
        _solve_corner(upper[a:b, a:b], solved[a:b], a, transposed=False)
    return solved


def _block_rows(rows: int) -> list[tuple[int, int]]:
    height = LIMITS.cholesky_rows
    return [(a, min(a + height, rows)) for a in range(0, rows, height)]


def _solve_corner(corner: np.ndarray, block: np.ndarray, first: int, *, transposed: bool) -> None:
    """Overwrite `block` with the solution of a triangular system; `first` is the number of its first row."""
    # LAPACK counts in columns: the transpose of a C-ordered upper triangle is a lower one.
    lower = np.ascontiguousarray(corner).T
    width = LIMITS.cholesky_columns
    for c in range(0, block.shape[1], width):
        found, info = lapack.dtrtrs(lower, block[:, c : c + width], lower=1, trans=0 if transposed else 1)
        if info:
            raise InvalidRequestError(
                f"the triangular solve failed in row {first + info}: the factor's diagonal is zero; use a larger alpha"
            )
        block[:, c : c + width] = found


def _potrf(matrix: np.ndarray) -> tuple[np.ndarray, int]:
    """Uᵀ in the order of LAPACK, sharing the memory of the C-ordered matrix, and the row at which it failed.

    Raises
    ------
    RuntimeError
        If LAPACK made a copy of the array, which is a bug.
    """
    # `clean` would zero the other triangle in a loop with 32-bit offsets.
    lower, failed = lapack.dpotrf(matrix.T, lower=1, clean=0, overwrite_a=1)
    if not np.shares_memory(lower, matrix):
        raise RuntimeError("LAPACK copied the kernel instead of overwriting it")
    finite = np.isfinite(np.diagonal(matrix))
    if not failed and not finite.all():
        # OpenBLAS goes on with NaN as if nothing had happened.
        failed = int(np.argmin(finite)) + 1
    return lower, failed


def refuse_32_bit(rows: int) -> None:
    """Refuse an eigendecomposition that a LAPACK with 32-bit integers would get wrong.

    Raises
    ------
    InvalidRequestError
        If there are more than 32,766 rows and NumPy does not say that its LAPACK counts in 64 bits.
    """
    if rows > LIMITS.lapack_32_bit_rows and not _numpy_counts_in_64_bits():
        raise InvalidRequestError(
            f"{rows:,} rows: NumPy's LAPACK here counts in 32 bits, allowed are {LIMITS.lapack_32_bit_rows:,}; use "
            'method="cholesky" or jacstore.block_cg, or install NumPy from its wheels'
        )


def _numpy_counts_in_64_bits() -> bool:
    """NumPy's wheels carry an OpenBLAS with 64-bit integers, on macOS the like from Accelerate."""
    config: Any = np.show_config(mode="dicts")
    used = config.get("Build Dependencies", {}).get("lapack", {})
    text = f"{used.get('name', '')} {used.get('openblas configuration', '')}".lower()
    return any(sign in text for sign in ("use64bitint", "ilp64", "accelerate"))
