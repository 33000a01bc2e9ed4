"""Regression, uncertainty and evidence from the kernel G of a store and alpha, without another pass over J.

With `C = (G + alpha I)⁻¹`, alpha the ridge of a regression and the prior precision of a Laplace posterior, whose
precision is `A = alpha I + Jᵀ J`: weights `w = C (y - f0)`, predictions `f0(x*) + G* w` and their covariance
`(G** - G* C G*ᵀ) / alpha`; all leave-one-out quantities come from the diagonal blocks of C.

References
----------
Rasmussen, Williams, Gaussian Processes for Machine Learning, 2006, chapters 2 and 5. Immer, Korzepa, Bauer 2021,
arXiv:2008.08400. Golub, Heath, Wahba 1979, doi:10.1080/00401706.1979.10489751.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from jacstore.errors import InvalidRequestError
from jacstore.inference.factorize import METHODS, checked_alphas, factorize
from jacstore.inference.kernel_matrix import Columns, KernelMatrix, as_columns, cross_gram, offset_like
from jacstore.inference.linalg.cholesky_eigh import PANEL, Eigen
from jacstore.kernels.kernel import Kernel, open_kernel


@dataclass(frozen=True, kw_only=True)
class LeaveOneOut:
    """The prediction of each example from all other examples.

    Attributes
    ----------
    mean
        In the shape of `y`; the prediction of the example's rows.
    covariance
        `(N, K, K)`, unit noise included.
    """

    mean: np.ndarray
    covariance: np.ndarray


class KernelFactor:
    """A factorization of a symmetric kernel, and answers from it.

    For a kernel on disk it is kept in the kernel's folder and used again as long as the kernel has the same bytes.

    Parameters
    ----------
    kernel
        A `Kernel` of mode full or trace or its path, or a symmetric NumPy or Dask matrix `(R, R)`.
    alpha
        Above 0. With method eigh it may be a sequence: then every answer has a leading axis over alphas.
    method
        cholesky (R³/3 operations), or eigh (about 9 R³), which then serves any alpha.
    outputs
        Rows per example, for a matrix that is not a `Kernel`.
    memory
        Bytes that may be allocated, such as "8GB"; half of what is available if not given.
    keep
        Whether to keep the factorization with a kernel on disk.

    Attributes
    ----------
    reused
        Whether a kept factorization was used.
    error
        Approximate bound `u ‖G‖_F` on the change of the kernel by rounding, in the spectral norm.

    Raises
    ------
    InvalidRequestError
        If the kernel is not symmetric or not finite, does not fit in memory, or if the factorization fails.

    Warns
    -----
    UserWarning
        If alpha is below `error`, or an eigenvalue below `-error`.
    """

    def __init__(
        self,
        kernel: Any,
        alpha: Any,
        method: str = "cholesky",
        *,
        outputs: int | None = None,
        memory: int | str | None = None,
        keep: bool = True,
    ) -> None:
        if method not in METHODS:
            raise InvalidRequestError(f"method={method!r}: allowed are {', '.join(METHODS)}")
        alphas = checked_alphas(alpha, method)
        self.gram = KernelMatrix(kernel, outputs)
        self.gram.require_symmetric()
        self._factor, norm, self.reused = factorize(self.gram, method, alphas, memory, keep)
        self.error = self.gram.roundoff * norm
        self._scalar = np.ndim(alpha) == 0
        self._warn()

    @property
    def method(self) -> str:
        return self._factor.method

    @property
    def alpha(self) -> Any:
        """One number, or `(A,)`."""
        return float(self._factor.alphas[0]) if self._scalar else self._factor.alphas

    @property
    def n_rows(self) -> int:
        return self.gram.shape[0]

    @property
    def n_outputs(self) -> int:
        return self.gram.n_outputs

    @property
    def n_examples(self) -> int:
        return self.gram.n_examples

    @property
    def eigenvalues(self) -> np.ndarray:
        """Ascending eigenvalues of G `(R,)`, those that rounding made negative as 0; method eigh only."""
        return self._eigen().clipped

    @property
    def eigenvectors(self) -> np.ndarray:
        """Orthonormal eigenvectors of G in the columns of `(R, R)`; method eigh only."""
        return self._eigen().vectors

    def at(self, alpha: Any) -> KernelFactor:
        """The same eigendecomposition with another alpha or other alphas; method eigh only."""
        eigen = self._eigen()
        other = object.__new__(KernelFactor)
        other.gram, other.error, other.reused = self.gram, self.error, self.reused
        other._factor = Eigen(eigen.values, eigen.vectors, checked_alphas(alpha, "eigh"))
        other._scalar = np.ndim(alpha) == 0
        other._warn()
        return other

    # ---- answers ----

    def solve(self, y: Any) -> np.ndarray:
        """`C y` for `y` `(R, ...)` or `(N, K, ...)`, in the shape of `y`."""
        flat, columns = self._columns(y)
        return self._out(columns.restore(self._factor.solve(flat)))

    def logdet(self) -> Any:
        """log det(G + alpha I)."""
        return self._out(self._factor.logdet())

    def logdet_posterior(self, n_parameters: int) -> Any:
        """log det A of the posterior precision `A = alpha I + Jᵀ J` `(P, P)`.

        Raises
        ------
        InvalidRequestError
            If G is not `J Jᵀ`: mode trace, or a replaced diagonal.
        """
        self.require_jacobian("logdet_posterior")
        return self._out(n_parameters * np.log(self._factor.alphas) + self._factor.logdet_ratio())

    def diag_inv(self, blocks: bool = False) -> np.ndarray:
        """Diagonal of C `(R,)`, or with `blocks` its K x K blocks `(N, K, K)`."""
        found = self._factor.inverse_blocks(self.n_outputs if blocks else 1).copy()
        return self._out(found if blocks else found.reshape(len(found), -1))

    def leverage(self) -> np.ndarray:
        """Diagonal of the smoother `G C` `(R,)`: how much each row's own target decides its fit."""
        return self._out(self._factor.leverage())

    def effective_dimension(self) -> Any:
        """Trace of `G C`, the sum of `lam / (lam + alpha)`."""
        return self._out(self._factor.leverage().sum(1))

    def loo(self, y: Any, f0: Any = None) -> LeaveOneOut:
        """Prediction of every example by the others, all of its outputs left out together.

        Parameters
        ----------
        y
            Targets `(R, ...)` or `(N, K, ...)`.
        f0
            The outputs that the kernel's prediction is added to, such as the network's, in the shape of `y`; 0 if None.
        """
        flat, columns = self._residual(y, f0)
        target, _ = self._columns(y)
        weights, k = self._factor.solve(flat), self.n_outputs
        inverse = np.linalg.inv(self._factor.inverse_blocks(k))
        shaped = weights.reshape(*inverse.shape[:2], k, -1)
        mean = target - (inverse @ shaped).reshape(weights.shape)
        covariance = inverse / self._factor.alphas[:, None, None, None]
        return LeaveOneOut(mean=self._out(columns.restore(mean)), covariance=self._out(covariance))

    def gcv(self, y: Any, f0: Any = None) -> Any:
        """Generalised cross-validation `(|w|² / R) / (tr C / R)²`, summed over right-hand sides."""
        flat, _ = self._residual(y, f0)
        squares = np.square(self._factor.solve(flat)).sum((1, 2))
        trace = self._factor.inverse_blocks(1).sum((1, 2, 3))
        return self._out(squares * self.n_rows / trace**2)

    def predict(self, cross: Any, y: Any, f0: Any = None, f0_cross: Any = None) -> np.ndarray:
        """`f0(x*) + G* C (y - f0)` at other examples, in one pass over their kernel whatever the number of alphas.

        Parameters
        ----------
        cross
            Kernel between the other examples (rows) and these (columns), `gram(other_store, store)`.
        y, f0
            As for `loo`.
        f0_cross
            f0 at the other examples, in the shape of the result; 0 if not given.
        """
        gram = cross_gram(cross, self.gram)
        flat, columns = self._residual(y, f0)
        weights = self._factor.solve(flat)
        product = gram.matmat(np.concatenate(list(weights), 1))
        stacked = np.stack(np.split(product, len(weights), 1))
        found = columns.restore(stacked)
        return self._out(found + offset_like(f0_cross, found.shape[1:], "f0_cross"))

    def predictive_covariance(self, cross: Any, blocks: Any) -> np.ndarray:
        """`(G** - G* C G*ᵀ) / alpha` of each other example with itself, `(M, K, K)`, without noise.

        Parameters
        ----------
        cross
            Kernel between the other examples (rows) and these (columns).
        blocks
            G** of each other example: a kernel of mode blocks, or `(M, K, K)`. For mode trace its trace is taken, and
            `(M,)` is allowed.
        """
        gram, k = cross_gram(cross, self.gram), self.n_outputs
        own = self._own_blocks(blocks, gram)
        found = np.empty((len(self._factor.alphas), len(own), k, k))
        for rows, panel in gram.panels(PANEL):
            span = slice(rows.start // k, rows.stop // k)
            found[:, span] = own[span] - self._factor.inverse_grams(panel.T, k)
        return self._out(found / self._factor.alphas[:, None, None, None])

    def require_jacobian(self, what: str) -> None:
        """Refuse a quantity that is only defined where G is `J Jᵀ` of the stored J."""
        if self.gram.exact_diagonal:
            raise InvalidRequestError(
                f"{what}: the diagonal of {self.gram.where} was replaced by exact norms, so it is not J Jᵀ of the "
                "stored J; assemble a kernel without that"
            )
        if self.gram.mode.sums_outputs:
            raise InvalidRequestError(
                f"{what}: {self.gram.where} has mode {self.gram.mode}, the sum over outputs, which is not J Jᵀ; "
                "assemble with --mode full (mode=)"
            )

    # ---- helpers ----

    def _eigen(self) -> Eigen:
        if not isinstance(self._factor, Eigen):
            raise InvalidRequestError(
                'this needs an eigendecomposition, the factor is a Cholesky factor; give method="eigh"'
            )
        return self._factor

    def _columns(self, y: Any) -> tuple[np.ndarray, Columns]:
        return as_columns(y, self.n_rows, self.n_outputs, "y")

    def _residual(self, y: Any, f0: Any) -> tuple[np.ndarray, Columns]:
        target = np.asarray(y, np.float64)
        return self._columns(target - offset_like(f0, target.shape, "f0"))

    def _out(self, found: np.ndarray) -> Any:
        """Drop the axis over alphas if one alpha was given as a number."""
        if not self._scalar:
            return found
        return found[0] if found.ndim > 1 else float(found[0])

    def _own_blocks(self, blocks: Any, cross: KernelMatrix) -> np.ndarray:
        k = self.n_outputs
        blocks = open_kernel(str(blocks)) if isinstance(blocks, str | Path) else blocks
        if isinstance(blocks, Kernel) and not blocks.plan.mode.within_examples:
            raise InvalidRequestError(
                f"blocks has mode {blocks.mode}; assemble the other store's own kernel with --mode blocks (mode=)"
            )
        array = np.asarray(getattr(blocks, "array", blocks), np.float64)
        if self.gram.mode.sums_outputs and array.ndim == 3:
            array = np.trace(array, axis1=1, axis2=2)
        if array.shape not in ((cross.n_examples, k, k), *[(cross.n_examples,)] * (k == 1)):
            raise InvalidRequestError(
                f"blocks has shape {array.shape}; allowed is ({cross.n_examples}, {k}, {k}), one for each example of "
                "cross"
            )
        return array.reshape(-1, k, k)

    def _warn(self) -> None:
        smallest = float(self._factor.alphas.min())
        figures = f"rounding changes {self.gram.where} by up to about {self.error:.2g} (u ‖G‖_F)"
        if smallest < self.error:
            warnings.warn(f"alpha {smallest:.2g} is below the kernel's error: {figures}", stacklevel=3)
        if isinstance(self._factor, Eigen) and -self._factor.values[0] > max(self.error, _eigh_error(self._factor)):
            warnings.warn(
                f"the smallest eigenvalue of {self.gram.where} is {self._factor.values[0]:.2g}, taken as 0; {figures}: "
                "the kernel may not be positive semidefinite",
                stacklevel=3,
            )


def _eigh_error(eigen: Eigen) -> float:
    """Bound on the error of LAPACK in an eigenvalue."""
    return len(eigen.values) * 2.0**-53 * float(np.abs(eigen.values).max())
