"""Kernel ridge regression in the manner of scikit-learn, with alpha chosen by leave-one-out.

`f(x*) = f0(x*) + G* (G + alpha I)⁻¹ (y - f0)`. The inputs of `fit` and `predict` are kernels, as with scikit-learn's
`kernel="precomputed"`.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from jacstore.errors import InvalidRequestError
from jacstore.inference.kernel_factor import KernelFactor
from jacstore.inference.kernel_matrix import KernelMatrix, as_columns, cross_gram, offset_like
from jacstore.inference.linalg.block_cg import block_cg

METHODS = ("cholesky", "eigh", "cg")
PARAMETERS = ("alpha", "method", "outputs", "memory", "keep", "tolerance")


class KernelRidge:
    """Kernel ridge regression on kernels that jacstore assembled.

    Parameters
    ----------
    alpha
        Added to the diagonal, above 0. A sequence (method eigh): the one with the least squared leave-one-out error.
    method
        cholesky, eigh, or cg for kernels too large to factorize.
    outputs, memory, keep
        As for `KernelFactor`; cg streams the kernel and keeps nothing.
    tolerance
        Tolerance of method cg for the true relative residual.

    Attributes
    ----------
    dual_coef_
        `(G + alpha I)⁻¹ (y - f0)` in the shape of `y`.
    alpha_
        The alpha that was used.
    n_features_in_
        Columns of the kernel, as scikit-learn counts them.
    loo_errors_
        Mean squared leave-one-out error of each alpha, where several were given.
    factor_
        The `KernelFactor`; None for method cg.
    """

    def __init__(
        self,
        alpha: Any = 1.0,
        *,
        method: str = "cholesky",
        outputs: int | None = None,
        memory: int | str | None = None,
        keep: bool = True,
        tolerance: float = 1e-8,
    ) -> None:
        # scikit-learn's convention: parameters are kept as given and checked by fit.
        self.alpha, self.method, self.outputs = alpha, method, outputs
        self.memory, self.keep, self.tolerance = memory, keep, tolerance

    def get_params(self, deep: bool = True) -> dict[str, Any]:
        """The parameters of the constructor."""
        return {name: getattr(self, name) for name in PARAMETERS}

    def set_params(self, **params: Any) -> KernelRidge:
        """Change parameters by name."""
        known = self.get_params()
        for name, value in params.items():
            if name not in known:
                raise InvalidRequestError(f"{name}: no such parameter; allowed are {', '.join(known)}")
            setattr(self, name, value)
        return self

    def __sklearn_tags__(self) -> Any:
        """Tags for scikit-learn: a regressor on square matrices that are split along both axes."""
        from sklearn.utils import InputTags, RegressorTags, Tags, TargetTags

        return Tags(
            estimator_type="regressor",
            target_tags=TargetTags(required=True, multi_output=True),
            regressor_tags=RegressorTags(),
            input_tags=InputTags(pairwise=True),
        )

    def fit(self, kernel: Any, y: Any, f0: Any = None) -> KernelRidge:
        """Fit targets on a symmetric kernel.

        Parameters
        ----------
        kernel
            A `Kernel` or its path, or a matrix `(R, R)`.
        y
            `(R, ...)`, or `(N, K, ...)` for a kernel of mode full.
        f0
            Outputs that the prediction is added to, in the shape of `y`; then `predict` needs them too.
        """
        if self.method not in METHODS:
            raise InvalidRequestError(f"method={self.method!r}: allowed are {', '.join(METHODS)}")
        if y is None:
            raise InvalidRequestError("fit requires y to be passed, but the target y is None; give one row per example")
        vars(self).pop("loo_errors_", None)
        target = np.asarray(y, np.float64)
        residual = target - offset_like(f0, target.shape, "f0")
        self._offset = f0 is not None
        self.factor_: Any  # a KernelFactor, None for cg
        if self.method == "cg":
            self.gram_, self.factor_, self.alpha_ = KernelMatrix(kernel, self.outputs), None, self.alpha
            options = {"alpha": self.alpha, "tolerance": self.tolerance, "outputs": self.outputs}
            self.dual_coef_ = block_cg(kernel, residual, **options).value
            self.n_features_in_ = self.gram_.shape[1]
            return self
        factor = KernelFactor(kernel, self.alpha, self.method, outputs=self.outputs, memory=self.memory, keep=self.keep)
        if np.ndim(self.alpha):
            # The error of a left-out prediction is the residual y - f0 less its own prediction, whatever f0 is.
            missed = residual - factor.loo(residual).mean
            self.loo_errors_ = np.square(missed).reshape(len(missed), -1).mean(1)
            factor = factor.at(float(np.asarray(self.alpha, np.float64)[np.argmin(self.loo_errors_)]))
        self.gram_, self.factor_, self.alpha_ = factor.gram, factor, factor.alpha
        self.dual_coef_ = factor.solve(residual)
        self.n_features_in_ = self.gram_.shape[1]
        return self

    def predict(self, kernel: Any, f0: Any = None) -> np.ndarray:
        """Predictions at other examples, `(S, ...)` or `(M, K, ...)` as `y` was given.

        Parameters
        ----------
        kernel
            Between the other examples (rows) and those of `fit` (columns), `gram(other_store, store)`.
        f0
            At the other examples, in the shape of the result.
        """
        if not hasattr(self, "dual_coef_"):
            raise InvalidRequestError("predict before fit; call fit(kernel, y) first")
        if self._offset and f0 is None:
            raise InvalidRequestError(
                "the model was fitted with f0; give f0 at these examples too, or f0=0 to predict the difference from it"
            )
        gram = cross_gram(kernel, self.gram_)
        flat, columns = as_columns(self.dual_coef_, self.gram_.shape[0], self.gram_.n_outputs, "dual_coef_")
        found = columns.restore(gram.matmat(flat))
        return found + offset_like(f0, found.shape, "f0")

    def score(self, kernel: Any, y: Any, f0: Any = None) -> float:
        """Coefficient of determination `1 - |y - f|² / |y - mean|²`, averaged over outputs.

        For a constant output it is 1 if the prediction is exact and 0 if not, as in scikit-learn.
        """
        target = np.asarray(y, np.float64)
        missed = np.square(target - self.predict(kernel, f0)).sum(0)
        spread = np.square(target - target.mean(0)).sum(0)
        constant = np.where(missed > 0, 0.0, 1.0)
        return float(np.mean(np.where(spread > 0, 1 - missed / np.where(spread > 0, spread, 1), constant)))
