"""Tests of posterior samples: p-values of what they must be distributed like, given the store and its kernel.

`z ~ N(0, A⁻¹)` makes `zᵀ A z` chi-squared with P degrees of freedom. Where P is much larger than the rank r of J that
test hardly sees the data. With `J Jᵀ = U diag(lam) Uᵀ` and `y = Uᵀ J z` a sharper test looks at both parts separately:
`y_i sqrt((lam_i + alpha) / lam_i) ~ N(0, 1)`, and the rest of `alpha |z|²` is chi-squared with P - r degrees.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from scipy import stats

from jacstore.base.budget import Budget
from jacstore.base.machine import default_memory
from jacstore.errors import InvalidRequestError
from jacstore.inference.factorize import checked_alpha
from jacstore.inference.posterior import require_own
from jacstore.inference.sampling_methods import DualKernel, WeightedJacobian
from jacstore.kernels.kernel import Kernel, open_kernel
from jacstore.kernels.lazy import as_store
from jacstore.operators.stored import JacobianOperator
from jacstore.store.reader import JacobianStore

LARGEST_QQ = 1000  # points of a quantile-quantile plot


@dataclass(frozen=True, kw_only=True)
class Test:
    """A Kolmogorov-Smirnov test, and its quantile-quantile plot.

    Attributes
    ----------
    statistic, p_value
        Two-sided.
    expected, found
        Quantiles `(m,)` of the distribution and of the samples, at most 1,000 of them, ascending.
    """

    __test__ = False  # not a test for pytest

    statistic: float
    p_value: float
    expected: np.ndarray
    found: np.ndarray


@dataclass(frozen=True, kw_only=True)
class SampleTests:
    """Tests of samples; a p-value near 0 means that they are not from this posterior.

    Attributes
    ----------
    full
        Squared Mahalanobis distances `zᵀ A z` against chi-squared with P degrees of freedom.
    data
        Their part in the space that the data determine, against chi-squared with `rank` degrees of freedom.
    pooled
        Standardized components in that space against the standard normal distribution.
    null
        The part in the remaining space against chi-squared with `P - rank` degrees of freedom; None if it is empty.
    rank
        Eigenvalues of the kernel above rounding.
    """

    full: Test
    data: Test
    pooled: Test
    null: Test | None
    rank: int

    @property
    def p_values(self) -> dict[str, float]:
        """The p-value of each test."""
        named = {"full": self.full, "data": self.data, "pooled": self.pooled, "null": self.null}
        return {name: test.p_value for name, test in named.items() if test is not None}


def sample_tests(
    samples: Any,
    store: JacobianStore | str | Path,
    kernel: Kernel | str | Path,
    alpha: float,
    *,
    likelihood: str = "gaussian",
    memory: int | str | None = None,
    precision: str | None = None,
    keep: bool = True,
) -> SampleTests:
    """Test samples `(n, P)` of the Laplace posterior: one pass over J, and an eigendecomposition of the kernel.

    Parameters
    ----------
    samples
        Deviations from the parameters, independent of each other.
    store, kernel
        A finished store and its kernel of mode full.
    alpha, likelihood
        Prior precision and likelihood of the posterior.
    memory, precision, keep
        As in `jacstore.sample`.
    """
    budget = Budget(default_memory(memory))
    jacobian = JacobianOperator(as_store(store), budget.total, precision=precision)
    opened = open_kernel(str(kernel)) if isinstance(kernel, str | Path) else kernel
    require_own(jacobian, opened)
    z = np.asarray(samples)
    if z.ndim != 2 or z.shape[1] != jacobian.shape[1] or not len(z):
        raise InvalidRequestError(f"samples of shape {z.shape}; allowed is (n, {jacobian.shape[1]})")
    if z.dtype.kind not in "fiu" or not np.isfinite(z).all():
        raise InvalidRequestError(
            f"samples of type {z.dtype}, or NaN or infinity among them; allowed are finite real numbers"
        )
    alpha = checked_alpha(alpha)
    weighted = WeightedJacobian(jacobian, likelihood)
    # The pass comes first: it may take all of the memory, and so may the factorization beside its result.
    projected = weighted.times(z.T)
    factor = DualKernel(weighted, opened, max(1, budget.beside(columns=projected.nbytes)), keep).factor(alpha, "eigh")
    values = factor.eigenvalues
    rounding = max(factor.error, len(values) * 2.0**-53 * float(values[-1]))
    kept = values > rounding
    # Eigenvalues ascend; there cannot be more of them than parameters.
    kept[: max(0, len(values) - z.shape[1])] = False
    lam, y = values[kept, None], factor.eigenvectors[:, kept].T @ projected
    squares = alpha * np.einsum("ij,ij->i", z, z, dtype=np.float64)
    standard = y * np.sqrt((lam + alpha) / lam)
    left, rank = z.shape[1] - int(kept.sum()), int(kept.sum())
    if not rank:
        raise InvalidRequestError(
            f"{opened.path}: no eigenvalue is above rounding ({rounding:.2g}); there is no data to test"
        )
    return SampleTests(
        full=_test(squares + np.square(projected).sum(0), stats.chi2(z.shape[1])),
        data=_test(np.square(standard).sum(0), stats.chi2(rank)),
        pooled=_test(standard.ravel(), stats.norm()),
        null=_test(squares - alpha * (np.square(y) / lam).sum(0), stats.chi2(left)) if left else None,
        rank=rank,
    )


def _test(values: np.ndarray, distribution: Any) -> Test:
    result = stats.kstest(values, distribution.cdf)
    count = min(len(values), LARGEST_QQ)
    levels = (np.arange(count) + 0.5) / count
    return Test(
        statistic=float(result.statistic),
        p_value=float(result.pvalue),
        expected=distribution.ppf(levels),
        found=np.quantile(values, levels, method="hazen"),
    )
