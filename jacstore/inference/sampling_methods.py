"""The samplers: from columns `y = J v` of noise to the columns that `Jᵀ` is applied to for a posterior sample.

With `A = alpha I + Jᵀ J` every sampler below is `z = v / sqrt(alpha) + Jᵀ w(J v)`: two passes over J for any number of
samples, and `w` from the kernel `G = J Jᵀ = U diag(lam) Uᵀ`.

* perturb, cg: `w = (G + alpha I)⁻¹ (e - y / sqrt(alpha))`, e standard normal: covariance exactly `A⁻¹`;
* eigh, lanczos: `w = U diag(c) Uᵀ y`, `c = -1 / (sqrt(alpha) sqrt(alpha+lam) (sqrt(alpha) + sqrt(alpha+lam)))`:
  `A^{-1/2} v`;
* ciq-dual: `w = -sum_q w_q / (s_q + alpha) (G + (s_q + alpha) I)⁻¹ y`, the same by contour integral quadrature.

References
----------
Pleiss et al. 2020, arXiv:2006.11267.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from jacstore.errors import InvalidRequestError
from jacstore.inference.kernel_factor import KernelFactor
from jacstore.inference.kernel_matrix import KernelMatrix, require_memory
from jacstore.inference.linalg.block_cg import block_cg
from jacstore.inference.linalg.cholesky_eigh import Cholesky, bytes_needed, cholesky
from jacstore.inference.linalg.lanczos import lanczos_function, largest_eigenvalue, shifted_cg
from jacstore.inference.linalg.quadrature import Quadrature, points, quadrature
from jacstore.inference.weighted_kernels import likelihood_roots, weighted
from jacstore.operators.likelihoods import likelihood_of

# A tolerance beyond which float64 recurrences gain nothing.
SMALLEST_TOLERANCE = 1e-12


class WeightedJacobian:
    """`Lᵀ J` for `Λ = L Lᵀ`, one block of Λ per example; J itself where Λ is the identity."""

    def __init__(self, jacobian: Any, likelihood: str) -> None:
        self.jacobian, self.likelihood = jacobian, likelihood
        self.shape: tuple[int, int] = jacobian.shape
        jacobian.weights(likelihood)  # refuses stores without such a likelihood
        constant = likelihood_of(likelihood).constant
        self.roots = None if constant else likelihood_roots(jacobian.store.outputs, likelihood)

    def times(self, columns: np.ndarray) -> np.ndarray:
        """`Lᵀ J columns` `(R, m)`: one pass."""
        return self._weigh(self.jacobian.matmat(columns), "nlk,nlm->nkm")

    def transposed(self, rows: np.ndarray) -> np.ndarray:
        """`Jᵀ L rows` `(P, m)`: one pass."""
        found: np.ndarray = self.jacobian.rmatmat(self._weigh(rows, "nkl,nlm->nkm"))
        return found

    def _weigh(self, rows: np.ndarray, equation: str) -> np.ndarray:
        if self.roots is None:
            return rows
        shaped = rows.reshape(*self.roots.shape[:2], -1)
        return np.einsum(equation, self.roots, shaped, optimize=True).reshape(rows.shape)


class DualKernel:
    """`G = Lᵀ J Jᵀ L`: from a stored kernel, or with two passes over J per product."""

    def __init__(self, jacobian: WeightedJacobian, kernel: Any, memory: int | str | None, keep: bool) -> None:
        self.jacobian, self.kernel, self.memory, self.keep = jacobian, kernel, memory, keep
        self.rows = jacobian.shape[0]

    def array(self) -> tuple[Any, int | None]:
        """The kernel for solvers, and its rows per example where it does not say."""
        if self.kernel is None:
            raise InvalidRequestError('this method needs a stored kernel; give kernel= or use method="cg" (--method)')
        if self.jacobian.roots is None:
            return self.kernel, None
        store = self.jacobian.jacobian.store
        return weighted(self.kernel, store.outputs, self.jacobian.likelihood), store.n_outputs

    def factor(self, alpha: float, method: str) -> KernelFactor:
        matrix, outputs = self.array()
        return KernelFactor(matrix, alpha, method, outputs=outputs, memory=self.memory, keep=self.keep)

    def load(self) -> np.ndarray:
        """All of it, with memory for a second one."""
        matrix, outputs = self.array()
        require_memory(2 * bytes_needed("kept", self.rows), self.memory, f"{self.rows:,} rows twice", "leave rows out")
        return KernelMatrix(matrix, outputs).load()

    def matmat(self, block: np.ndarray) -> np.ndarray:
        """G times `(R, m)`."""
        if self.kernel is None:
            return self.jacobian.times(self.jacobian.transposed(block))
        matrix, outputs = self.array()
        return KernelMatrix(matrix, outputs).matmat(block)


@dataclass(frozen=True, kw_only=True)
class Request:
    """The method of sampling and its options."""

    alpha: float
    method: str
    error: float
    q: int | None


Dual = Callable[[DualKernel, Request, np.ndarray, np.ndarray | None, Callable[[], None]], np.ndarray]


def perturbed(
    kernel: DualKernel, request: Request, y: np.ndarray, e: np.ndarray | None, stop: Callable[[], None]
) -> np.ndarray:
    """`(G + alpha I)⁻¹ (e - y / sqrt(alpha))` by a Cholesky factor."""
    assert e is not None
    found: np.ndarray = kernel.factor(request.alpha, "cholesky").solve(e - y / math.sqrt(request.alpha))
    return found


def perturbed_iteratively(
    kernel: DualKernel, request: Request, y: np.ndarray, e: np.ndarray | None, stop: Callable[[], None]
) -> np.ndarray:
    """The same by block conjugate gradients."""
    assert e is not None
    largest = largest_eigenvalue(kernel.matmat, kernel.rows)
    tolerance = _tolerance(request.error, math.sqrt(1 + largest / request.alpha))

    def product(block: np.ndarray) -> np.ndarray:
        stop()
        return kernel.matmat(block)

    operator = _Symmetric(shape=(kernel.rows, kernel.rows), matmat=product)
    right = e - y / math.sqrt(request.alpha)
    return block_cg(operator, right, alpha=request.alpha, tolerance=tolerance, max_steps=5000).value


@dataclass(frozen=True, kw_only=True)
class _Symmetric:
    shape: tuple[int, int]
    matmat: Callable[[np.ndarray], np.ndarray]


def by_eigenvectors(
    kernel: DualKernel, request: Request, y: np.ndarray, e: np.ndarray | None, stop: Callable[[], None]
) -> np.ndarray:
    """`U diag(c) Uᵀ y` by an eigendecomposition."""
    factor = kernel.factor(request.alpha, "eigh")
    vectors = factor.eigenvectors
    return vectors @ (_coefficients(factor.eigenvalues, request.alpha)[:, None] * (vectors.T @ y))


def by_lanczos(
    kernel: DualKernel, request: Request, y: np.ndarray, e: np.ndarray | None, stop: Callable[[], None]
) -> np.ndarray:
    """The same by Lanczos on G, all columns sharing each product; their bases are held beside the memory."""
    alpha = request.alpha

    def size(values: np.ndarray) -> np.ndarray:
        # Squared size in the norm of A, in which samples are judged.
        return np.maximum(values, 0) * (np.maximum(values, 0) + alpha)

    # The change over the last steps stands for the error; convergence is geometric.
    found, _ = lanczos_function(
        kernel.matmat,
        y,
        lambda values: _coefficients(np.maximum(values, 0), alpha),
        size,
        tolerance=_tolerance(request.error, 10),
        stop=stop,
    )
    return found


def by_dual_quadrature(
    kernel: DualKernel, request: Request, y: np.ndarray, e: np.ndarray | None, stop: Callable[[], None]
) -> np.ndarray:
    """`-sum_q w_q / (s_q + alpha) (G + (s_q + alpha) I)⁻¹ y`: one Cholesky factor per point, or one Krylov space."""
    if kernel.kernel is None:
        rule = quadrature_for(kernel.matmat, kernel.rows, request, dual=True)
        shifts = rule.shifts + request.alpha
        tolerance = _tolerance(request.error, math.sqrt(rule.largest / rule.smallest))
        return -shifted_cg(kernel.matmat, y, shifts, rule.weights / shifts, tolerance=tolerance, stop=stop).value
    matrix = kernel.load()
    rule = quadrature_for(lambda block: matrix @ block, kernel.rows, request, dual=True)
    total = np.zeros_like(y)
    for shift, weight in zip(rule.shifts + request.alpha, rule.weights, strict=True):
        stop()
        upper, failed = cholesky(matrix.copy(), float(shift))
        if failed:
            raise InvalidRequestError(
                f"the kernel + {shift:.3g} I is not positive definite (row {failed - 1}); give a larger alpha (--alpha)"
            )
        total -= weight / shift * Cholesky(upper, float(shift)).solve(y)[0]
    return total


def by_primal_quadrature(
    product: Callable[[np.ndarray], np.ndarray],
    v: np.ndarray,
    request: Request,
    stop: Callable[[], None] = lambda: None,
) -> tuple[np.ndarray, int]:
    """`A^{-1/2} v` `(P, n)` and the number of products with `Jᵀ Λ J`, one per step of a Krylov solver for all points.

    The product may come from a store or from a model's own derivatives.
    """
    rule = quadrature_for(product, len(v), request, dual=False)
    # Residuals of the solver enter the error in the norm of A with at most their own relative size.
    solved = shifted_cg(
        product, v, rule.shifts + request.alpha, rule.weights, tolerance=_tolerance(request.error, 1), stop=stop
    )
    return solved.value, solved.products


def quadrature_for(product: Callable[[np.ndarray], np.ndarray], rows: int, request: Request, dual: bool) -> Quadrature:
    """The rule for `A = alpha I + M`, whose smallest eigenvalue is taken to be alpha, as it is where M is singular."""
    largest = request.alpha + largest_eigenvalue(product, rows)
    q = points(request.alpha, largest, request.error, dual) if request.q is None else request.q
    return quadrature(request.alpha, largest, q)


def _coefficients(values: np.ndarray, alpha: float) -> np.ndarray:
    root, roots = math.sqrt(alpha), np.sqrt(alpha + values)
    found: np.ndarray = -1 / (root * roots * (root + roots))
    return found


def _tolerance(error: float, condition: float) -> float:
    return max(SMALLEST_TOLERANCE, error / condition)


DUALS: dict[str, Dual] = {
    "perturb": perturbed,
    "cg": perturbed_iteratively,
    "eigh": by_eigenvectors,
    "lanczos": by_lanczos,
    "ciq-dual": by_dual_quadrature,
}
NEEDS_ROW_NOISE = ("perturb", "cg")
