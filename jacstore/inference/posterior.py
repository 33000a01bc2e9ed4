"""Samples `(n, P)` of the Laplace posterior `N(0, A⁻¹)` of a store and its kernel.

`A = alpha I + Jᵀ Λ J`, Λ from the likelihood; a sample is a deviation from the parameters. The method follows the size:
where P is small, the matrix A itself; where R is moderate, its kernel; else iterations. Any number of samples takes two
passes over J.

References
----------
Daxberger et al. 2021, Laplace Redux, arXiv:2106.14806. Antorán et al. 2023, Sampling-based inference for large linear
models, arXiv:2210.04994 (perturb and solve).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from jacstore.base.budget import Budget
from jacstore.base.events import Listener, silent
from jacstore.base.machine import default_memory
from jacstore.errors import InvalidRequestError
from jacstore.inference.factorize import checked_alpha
from jacstore.inference.kernel_matrix import KernelMatrix, require_memory
from jacstore.inference.linalg.cholesky_eigh import bytes_needed, cholesky, solve_upper
from jacstore.inference.noise import BLOCK, KeyedNoise, Noise
from jacstore.inference.sampling_methods import (
    DUALS,
    NEEDS_ROW_NOISE,
    DualKernel,
    Request,
    WeightedJacobian,
    by_primal_quadrature,
)
from jacstore.kernels.kernel import Kernel, open_kernel
from jacstore.kernels.lazy import as_store
from jacstore.operators.ggn_matrix import ggn
from jacstore.operators.likelihoods import likelihood_of
from jacstore.operators.stored import JacobianOperator
from jacstore.storage.sample_files import SampleFile, kept_in
from jacstore.store.reader import JacobianStore

METHODS = ("auto", *DUALS, "ciq-primal", "ggn")
BY_QUADRATURE = ("ciq-dual", "ciq-primal")
ITERATIVE = ("cg", "lanczos", *BY_QUADRATURE)
WITHOUT_KERNEL = ("cg", "lanczos", "ciq-dual", "ciq-primal", "ggn")


def sample(
    store: JacobianStore | str | Path,
    kernel: Kernel | str | Path | None = None,
    *,
    alpha: float,
    n: int,
    key: int,
    likelihood: str = "gaussian",
    method: str = "auto",
    error: float | None = None,
    q: int | None = None,
    out: str | Path | None = None,
    memory: int | str | None = None,
    precision: str | None = None,
    keep: bool = True,
    overwrite: bool = False,
    listener: Listener = silent,
    stop: Callable[[], bool] | None = None,
) -> np.ndarray:
    """Samples `(n, P)` of the Laplace posterior, as deviations from the parameters, columns in tree order.

    `jacstore.operator(store).unravel(samples.T, like=params)` gives them as a pytree of arrays `(n, *shape)`. The noise
    depends on the key and on the number of the sample alone: more samples leave the first ones as they are, up to
    rounding.

    Parameters
    ----------
    store
        A finished store or its path.
    kernel
        Its kernel of mode full, or the path; None for methods ggn, cg, lanczos, ciq-dual and ciq-primal, which then
        stream the store.
    alpha
        Prior precision.
    n
        Number of samples.
    key
        Integer from 0 below 2**64.
    likelihood
        "gaussian", Λ = I; "softmax" at the store's outputs.
    method
        "ggn": Cholesky of A, one pass. "perturb": perturb and solve with a Cholesky factor of the kernel, two passes;
        "cg": the same by conjugate gradients. `A^{-1/2}` times noise: "eigh", "lanczos", "ciq-dual", two passes;
        "ciq-primal", one pass per step. "auto": ggn where `P <= R` or there is no kernel, if A fits in memory; else
        perturb, if the kernel fits; else cg.
    error
        Target relative error of cg, lanczos and ciq, 1e-4 if not given; decides the number of quadrature points.
    q
        Number of quadrature points, instead of the number from `error`.
    out
        File for the samples, `FILE.npy`; a rerun continues after the last finished pass or returns what is there.
    memory
        Bytes to allocate, such as "8GB"; half of what is available if not given. Bases of lanczos (`8 R n` per step)
        and directions of ciq-primal (`8 P n` per quadrature point) come on top.
    precision
        Type of the products with J, float32 or float64. Default as for `jacstore.operator`, but float64 for iterations
        without a kernel, which would gather rounding.
    keep
        Whether methods perturb and eigh keep the factorization in the kernel's folder, for the next call.
    overwrite
        Delete what is at `out` and start over.
    listener
        Called with progress events of method ggn.
    stop
        Asked between steps; when it says true the call ends with `RunInterruptedError`.

    Raises
    ------
    InvalidRequestError
        If the kernel is not that of the store, its diagonal was replaced, or something does not fit in memory.
    RequestMismatchError
        If `out` holds samples of another request.
    """
    noise = KeyedNoise(key=key, n=n)
    plan = _Plan(store, kernel, alpha, n, likelihood, method, error, q, memory, precision, keep)
    requested = {**plan.requested, "key": int(key), "n": int(n)}
    with kept_in(out, requested, overwrite, listener, stop) as kept:
        return _draw(plan, noise, kept, listener)


def sample_from(
    noise: Noise, store: JacobianStore | str | Path, kernel: Kernel | str | Path | None = None, **options: Any
) -> np.ndarray:
    """Apply the linear map of `sample` to given noise; options as there, without n, key and out."""
    allowed = {"alpha", "likelihood", "method", "error", "q", "memory", "precision", "keep"}
    if not {"alpha"} <= options.keys() <= allowed:
        raise InvalidRequestError(
            f"options {', '.join(options)}; needed is alpha, allowed are {', '.join(sorted(allowed))}"
        )
    defaults = {"likelihood": "gaussian", "method": "auto", "error": None, "q": None, "memory": None, "precision": None}
    plan = _Plan(store, kernel, n=noise.n, **{**defaults, "keep": True, **options})
    with kept_in(None, {}, False, silent, None) as kept:
        return _draw(plan, noise, kept, silent)


class _Plan:
    """Checked options, with the method chosen."""

    def __init__(
        self,
        store: JacobianStore | str | Path,
        kernel: Kernel | str | Path | None,
        alpha: float,
        n: int,
        likelihood: Any,
        method: str,
        error: float | None,
        q: int | None,
        memory: int | str | None,
        precision: str | None,
        keep: bool,
    ) -> None:
        if method not in METHODS:
            raise InvalidRequestError(f"--method {method}: allowed are {', '.join(METHODS)} (method=)")
        alpha = checked_alpha(alpha)
        if error is not None and not 0 < error < 1:
            raise InvalidRequestError(f"--error {error}: allowed are numbers between 0 and 1 (error=)")
        likelihood_of(likelihood)
        if q is not None and method not in BY_QUADRATURE:
            raise InvalidRequestError(
                f"--q: method {method} has no quadrature points; methods {', '.join(BY_QUADRATURE)} do (q=)"
            )
        if error is not None and method not in ("auto", *ITERATIVE):
            raise InvalidRequestError(f"--error: method {method} is exact; it is for {', '.join(ITERATIVE)} (error=)")
        if q is not None and error is not None:
            raise InvalidRequestError("--q and --error exclude each other: points follow from the error (q=, error=)")
        self.memory = default_memory(memory)
        self.store = as_store(store)
        if self.store.nonfinite_examples:
            raise InvalidRequestError(
                f"{self.store.path}: the rows of example {self.store.nonfinite_examples[0]} hold NaN or infinity, so "
                "there is no posterior; leave such examples out of the store (--examples, examples=)"
            )
        opened = open_kernel(str(kernel)) if isinstance(kernel, str | Path) else kernel
        rows, p = self.store.n_examples * self.store.n_outputs, self.store.n_parameters
        require_memory(16 * n * p, self.memory, f"{n:,} samples of {p:,} parameters", "draw fewer (--n, n=)")
        # Beside a pass stand the noise, or the result that it counts itself, and a few columns of rows.
        left = max(1, Budget(self.memory).beside(noise=8 * n * p, columns=8 * n * 3 * rows))
        jacobian = JacobianOperator(self.store, left, precision=precision)
        if opened is not None:
            require_own(jacobian, opened)
        chosen = method if method != "auto" else _regime(jacobian.shape, opened is not None, n, self.memory)
        if opened is None and chosen not in WITHOUT_KERNEL:
            raise InvalidRequestError(
                f"--method {chosen} needs the kernel of the store (kernel=); without one allowed are "
                f"{', '.join(WITHOUT_KERNEL)}"
            )
        if precision is None and (chosen == "ciq-primal" or (opened is None and chosen != "ggn")):
            jacobian = JacobianOperator(self.store, left, precision="float64")
        self.jacobian = jacobian
        self.weighted = WeightedJacobian(jacobian, likelihood)
        if chosen == "ggn":
            # When the matrix is there, noise and samples come beside it.
            needed = 8 * p * p + 16 * n * p
            require_memory(needed, self.memory, f"{n:,} samples beside {p:,} x {p:,} numbers", "draw fewer (--n, n=)")
        # Beside a factorization stand columns of rows, and no columns of parameters.
        factor = max(1, Budget(self.memory).beside(columns=8 * n * 3 * rows))
        self.kernel = DualKernel(self.weighted, opened, factor, keep)
        self.request = Request(alpha=alpha, method=chosen, error=1e-4 if error is None else error, q=q)
        self.requested = {
            "store": self.store.identity(),
            "kernel": None if opened is None else opened.requested,
            "alpha": alpha,
            "likelihood": likelihood,
            "method": method,
            "error": error,
            "q": q,
            "precision": precision,
        }


def require_own(jacobian: JacobianOperator, kernel: Kernel) -> None:
    """Refuse a kernel that is not `J Jᵀ` of the stored J."""
    jacobian.gram(kernel)
    if KernelMatrix(kernel).exact_diagonal:
        raise InvalidRequestError(
            f"{kernel.path}: its diagonal was replaced by exact norms, so it is not J Jᵀ of the stored J and samples "
            "from it would be wrong; assemble a kernel without that (kernel=)"
        )


def _regime(shape: tuple[int, int], has_kernel: bool, n: int, memory: int) -> str:
    rows, p = shape
    columns = 16 * n * p
    normal_fits = 12 * p * p + columns <= memory
    if normal_fits and p <= rows:
        return "ggn"
    if has_kernel and bytes_needed("cholesky", rows) + columns + 24 * n * rows <= memory:
        return "perturb"
    return "ggn" if normal_fits else "cg"


def _draw(plan: _Plan, noise: Noise, kept: SampleFile, listener: Listener) -> np.ndarray:
    """Samples `(n, P)` from noise, continued from what is kept."""
    finished = kept.finished()
    if finished is not None:
        return finished
    request, rows, p = plan.request, *plan.weighted.shape
    method = kept.choice("method", request.method, METHODS[1:])
    if method == "ggn":
        z = _by_normal_matrix(plan, noise, kept, listener)
    elif method == "ciq-primal":
        product = plan.jacobian.ggn(plan.weighted.likelihood).matmat
        z, _ = by_primal_quadrature(product, noise.parameters(0, p), request, kept.stop)
    else:
        root = math.sqrt(request.alpha)
        y = kept.array("projected", lambda: plan.weighted.times(noise.parameters(0, p)))
        e = noise.rows(0, rows) if method in NEEDS_ROW_NOISE else None
        w = kept.array("weights", lambda: DUALS[method](plan.kernel, request, y, e, kept.stop))
        z = plan.weighted.transposed(w)
        for a in range(0, p, BLOCK):
            b = min(a + BLOCK, p)
            z[a:b] += noise.parameters(a, b) / root
    return kept.finish(z.T.astype(plan.jacobian.products, copy=False))


def _by_normal_matrix(plan: _Plan, noise: Noise, kept: SampleFile, listener: Listener) -> np.ndarray:
    """`R⁻¹ v` with the Cholesky factor `A = Rᵀ R`."""
    matrix = ggn(
        plan.store,
        plan.weighted.likelihood,
        plan.request.alpha,
        memory=plan.memory,
        out=kept.folder("ggn"),
        precision=str(plan.jacobian.products),
        listener=listener,
        stop=kept.asked,
    )
    upper, failed = cholesky(matrix, 0.0)
    if failed:
        raise InvalidRequestError(
            f"alpha I + Jᵀ Λ J is not positive definite (row {failed - 1}) with alpha {plan.request.alpha:.3g}; give a "
            "larger alpha (--alpha, alpha=) or precision float64 (precision=)"
        )
    return solve_upper(upper, noise.parameters(0, len(upper)))
