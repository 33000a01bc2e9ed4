"""J, J Jᵀ and Jᵀ Λ J of a store as SciPy linear operators, which stream the store and never form the matrices.

`J v` and `Jᵀ u` read the store once for any number of columns, `Jᵀ Λ J v` once, `J Jᵀ v` twice. Sums are float64,
products in the type of `precision`.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from scipy.sparse.linalg import LinearOperator

from jacstore.base import machine
from jacstore.base.budget import OPERATOR, Budget
from jacstore.base.limits import IO_THREADS
from jacstore.base.machine import format_size
from jacstore.errors import InvalidRequestError, RequestMismatchError
from jacstore.kernels.kernel import Kernel, open_kernel
from jacstore.kernels.lazy import as_store, default_precision
from jacstore.operators.likelihoods import Weights, given_weights, likelihood_of
from jacstore.operators.panels import Panel, chosen_leaves, panels
from jacstore.operators.parameter_columns import ParameterColumns
from jacstore.operators.streams import Job, chosen_examples, chunks, count, job_bytes, stream
from jacstore.store.reader import JacobianStore

# What is read at once, if memory allows: enough for BLAS, little enough to begin soon.
READ_BYTES = 64_000_000
# Slabs in memory while one is multiplied and the next read; arrays of intermediate products of factors.
SLABS_ALIVE, PRODUCTS_ALIVE = 2, 2


def operator(
    store: JacobianStore | str | Path,
    *,
    memory: int | str | None = None,
    leaves: str | Callable[[str], bool] | None = None,
    examples: Any = None,
    precision: str | None = None,
) -> JacobianOperator:
    """The stored Jacobian `(R, P)` as a `scipy.sparse.linalg.LinearOperator`; row `n * K + k`, columns in tree order.

    Parameters
    ----------
    store
        A finished store or its path.
    memory
        Bytes that a product may allocate, its result included, such as "8GB"; half of what is available if not given.
    leaves
        Regular expression (searched for) or predicate on a leaf's path: only columns of these leaves, side by side.
    examples
        Slice, integers or a mask: only rows of these examples, in this order.
    precision
        Type of the products, float32 or float64; default float64 for float64 stores, else float32.

    Raises
    ------
    InvalidRequestError
        If the store is not finished, or a choice names nothing.
    """
    return JacobianOperator(as_store(store), memory, leaves, examples, precision)


class JacobianOperator(LinearOperator, ParameterColumns):
    """J `(R, P)`; see `jacstore.operator`.

    Attributes
    ----------
    store
        Where rows are read from.
    paths
        For each chosen leaf its shape and columns: path -> (shape, slice).
    examples
        Numbers of the chosen examples, in the order of the rows.
    """

    def __init__(
        self,
        store: JacobianStore,
        memory: int | str | None = None,
        leaves: str | Callable[[str], bool] | None = None,
        examples: Any = None,
        precision: str | None = None,
    ) -> None:
        store.require_complete()
        if precision not in (None, "float32", "float64"):
            raise InvalidRequestError(f"precision {precision!r}: allowed are float32 and float64 (precision=)")
        self.store = store
        self.memory = machine.default_memory(memory)
        self.products = np.dtype(precision or default_precision(store, None))
        self.examples = chosen_examples(store.n_examples, slice(None) if examples is None else examples)
        self._leaves = chosen_leaves(store, _predicate(leaves))
        self.paths = {leaf.path: (leaf.shape, slice(column, column + leaf.size)) for leaf, column in self._leaves}
        n_parameters = sum(leaf.size for leaf, _ in self._leaves)
        if not n_parameters:
            shown = ", ".join(repr(leaf.path) for leaf in store.leaves[:5]) + (", …" if len(store.leaves) > 5 else "")
            raise InvalidRequestError(f"leaves {leaves!r} selects no parameter; there are {shown}; change leaves=")
        super().__init__(np.dtype(np.float64), (len(self.examples) * store.n_outputs, n_parameters))
        # A budget of what sizes are chosen by; what a product takes is counted in bytes, see `room`.
        self._shares = Budget(self.memory).split(**OPERATOR)
        numbers = self._shares["scratch"] // PRODUCTS_ALIVE // np.dtype(np.float64).itemsize
        self.panels = tuple(panels(store, self._leaves, self._slab_columns(), numbers))

    def _slab_columns(self) -> int:
        """Columns of stored rows that are read at once for a unit."""
        row_bytes = self.store.unit_size * self.store.n_outputs * self.products.itemsize
        return max(1, min(READ_BYTES, self._shares["slabs"] // SLABS_ALIVE) // row_bytes)

    # ------------------------------------------------------------------------------------------------ products

    def _matvec(self, x: np.ndarray) -> np.ndarray:
        return self._matmat(x.reshape(-1, 1)).reshape(-1)

    def _rmatvec(self, x: np.ndarray) -> np.ndarray:
        return self._rmatmat(x.reshape(-1, 1)).reshape(-1)

    def _matmat(self, x: np.ndarray) -> np.ndarray:
        columns = real(x)
        m = columns.shape[1]
        y = np.zeros((len(self.examples), self.store.n_outputs, m))
        for panel in self.panels if m else ():
            self._times(panel, columns, y)
        return y.reshape(self.shape[0], m)

    def _rmatmat(self, x: np.ndarray) -> np.ndarray:
        m = x.shape[1]
        u = real(x).reshape(len(self.examples), self.store.n_outputs, m)
        out = np.zeros((self.shape[1], m))
        for panel in self.panels if m else ():
            self._add_transposed(panel, u, out)
        return out

    # What a panel needs is gone when the next one begins.

    def _times(self, panel: Panel, columns: np.ndarray, y: np.ndarray) -> None:
        m = y.shape[2]
        fixed = y.nbytes + self._bytes(panel.width * m + panel.scratch(m))
        loaded = panel.load(columns, self.products)
        for job, (held,) in self._stream((panel,), fixed, m):
            where = job.chunk.where
            if isinstance(where, slice):
                panel.times(held, loaded, y[where])
            else:
                part = np.zeros((len(where), *y.shape[1:]))
                panel.times(held, loaded, part)
                y[where] += part

    def _add_transposed(self, panel: Panel, u: np.ndarray, out: np.ndarray) -> None:
        m = u.shape[2]
        fixed = out.nbytes + 8 * panel.extra(m) + self._bytes(panel.scratch(m))
        sums = panel.sums(out)
        for job, (held,) in self._stream((panel,), fixed, m):
            panel.add_transposed(held, u[job.chunk.where].astype(self.products), sums)
        panel.finish(sums, out)

    def _curvature(self, x: np.ndarray, weights: Weights) -> np.ndarray:
        """Jᵀ Λ J x in one pass: both products of a chunk while it is in memory."""
        columns = real(x)
        m = columns.shape[1]
        numbers = sum(panel.width for panel in self.panels) * m + max(panel.scratch(m) for panel in self.panels)
        extra = sum(panel.extra(m) for panel in self.panels)
        fixed = 8 * (self.shape[1] * m + extra) + self._bytes(numbers)
        jobs = self._jobs(self.panels, fixed, m) if m else None
        if jobs is None:
            # A unit of all columns is too large to be kept for the second product: a second pass.
            y = self._matmat(columns).reshape(len(self.examples), self.store.n_outputs, m)
            return self._rmatmat(weights.times(y, slice(None)).reshape(self.shape[0], m))
        out = np.zeros((self.shape[1], m))
        loaded = [panel.load(columns, self.products) for panel in self.panels]
        sums = [panel.sums(out) for panel in self.panels]
        for job, held in stream(self.store, jobs, self.products, self._ahead(jobs, fixed)):
            y = np.zeros((count(job), self.store.n_outputs, m))
            for panel, part, numbers_ in zip(self.panels, held, loaded, strict=True):
                panel.times(part, numbers_, y)
            u = weights.times(y, job.chunk.where).astype(self.products, copy=False)
            for panel, part, total in zip(self.panels, held, sums, strict=True):
                panel.add_transposed(part, u, total)
        for panel, total in zip(self.panels, sums, strict=True):
            panel.finish(total, out)
        return out

    # -------------------------------------------------------------------------------------------------- memory

    def _bytes(self, numbers: int) -> int:
        return numbers * self.products.itemsize

    def room(self, fixed: int) -> int:
        """Bytes of the budget for what is read, beside a product's result and what it works with."""
        # A reading thread holds a piece, and its encoded body where that is another.
        pieces = max((1 + (part.codec != "none")) * part.piece_bytes for part in self.store.layouts.values())
        return Budget(self.memory).beside(
            store_in_ram=self.store.files.bytes_held, columns=fixed, reading=IO_THREADS * pieces
        )

    def _jobs(self, chosen: tuple[Panel, ...], fixed: int, m: int) -> list[Job] | None:
        """Whole units, several at once while they are small; None if a unit does not fit."""
        example = self._bytes(sum(panel.numbers for panel in chosen)) + 2 * 8 * self.store.n_outputs * m
        unit = self.store.unit_size
        room = self.room(fixed) // (2 if len(self.examples) == self.store.n_examples else 4)
        at_once = max(1, min(READ_BYTES, room) // (example * unit))
        return self._checked(chosen, unit * at_once, fixed)

    def _checked(self, chosen: tuple[Panel, ...], size: int, fixed: int) -> list[Job] | None:
        found = [Job(panels=chosen, chunk=chunk) for chunk in chunks(self.examples, self.store.n_examples, size)]
        return found if max(job_bytes(job, self.products) for job in found) <= self.room(fixed) else None

    def _ahead(self, jobs: list[Job], fixed: int) -> bool:
        """Whether there is memory to read the next job while one is multiplied."""
        return len(jobs) > 1 and 2 * max(job_bytes(job, self.products) for job in jobs) <= self.room(fixed)

    def _stream(self, chosen: tuple[Panel, ...], fixed: int, m: int) -> Any:
        jobs = self._jobs(chosen, fixed, m)
        size = self.store.unit_size
        while jobs is None and size > 1:
            # Pieces span a unit: each is then read once for every part of it.
            size = -(-size // 2)
            jobs = self._checked(chosen, size, fixed)
        if jobs is None:
            smallest = job_bytes(
                Job(panels=chosen, chunk=chunks(self.examples, self.store.n_examples, 1)[0]), self.products
            )
            needed = self.memory - self.room(fixed) + smallest
            raise InvalidRequestError(
                f"--memory {self.memory:,}: a product with {m} column(s) takes {format_size(needed)}; give more "
                "(memory=) or fewer columns at once"
            )
        return stream(self.store, jobs, self.products, self._ahead(jobs, fixed))

    # --------------------------------------------------------------------------------------- other operators

    def gram(self, kernel: Kernel | str | Path | None = None) -> GramOperator:
        """J Jᵀ `(R, R)`: two passes per product, or none with the stored kernel of the same store, or its path."""
        return GramOperator(self, kernel)

    def ggn(self, weights: Any = None, alpha: float = 0.0) -> GGNOperator:
        """The generalised Gauss-Newton matrix `alpha I + Jᵀ Λ J` `(P, P)`, one pass a product.

        Parameters
        ----------
        weights
            Λ: None or "gaussian" for the identity, "softmax" at the store's outputs, its diagonal `(R,)` or `(N, K)`,
            or its blocks `(N, K, K)`; N counts the chosen examples.
        alpha
            Prior precision.
        """
        return GGNOperator(self, self.weights(weights), alpha)

    def weights(self, given: Any = None) -> Weights:
        """Λ of the chosen examples from what `ggn` takes."""
        if given is None or isinstance(given, str):
            likelihood = likelihood_of("gaussian" if given is None else given)
            outputs = np.empty((0, 1)) if likelihood.constant else self.store.outputs[self.examples]
            likelihood.require(outputs, self.store.requested.get("outputs", "all") == "all")
            return likelihood.curvature(outputs.astype(np.float64))
        return given_weights(given, len(self.examples), self.store.n_outputs)


class GramOperator(LinearOperator):
    """J Jᵀ `(R, R)`; see `JacobianOperator.gram`."""

    def __init__(self, jacobian: JacobianOperator, given: Kernel | str | Path | None = None) -> None:
        kernel = open_kernel(str(given)) if isinstance(given, str | Path) else given
        self.jacobian, self.kernel = jacobian, kernel
        if kernel is not None:
            _refuse_other_kernel(jacobian, kernel)
        super().__init__(np.dtype(np.float64), (jacobian.shape[0], jacobian.shape[0]))

    def _matvec(self, x: np.ndarray) -> np.ndarray:
        return self._matmat(x.reshape(-1, 1)).reshape(-1)

    def _matmat(self, x: np.ndarray) -> np.ndarray:
        if self.kernel is None:
            return self.jacobian._matmat(self.jacobian._rmatmat(x))
        n, k = self.jacobian.store.n_examples, self.jacobian.store.n_outputs
        whole = np.zeros((n, k, x.shape[1]))
        # An example may be chosen twice.
        np.add.at(whole, self.jacobian.examples, real(x).reshape(len(self.jacobian.examples), k, x.shape[1]))
        product = (self.kernel.array @ whole.reshape(n * k, x.shape[1])).compute(scheduler="synchronous")
        return np.asarray(product, np.float64).reshape(whole.shape)[self.jacobian.examples].reshape(x.shape)

    def _adjoint(self) -> GramOperator:
        return self


class GGNOperator(LinearOperator):
    """`alpha I + Jᵀ Λ J` `(P, P)`; see `JacobianOperator.ggn`."""

    def __init__(self, jacobian: JacobianOperator, weights: Weights, alpha: float = 0.0) -> None:
        self.jacobian, self.weights, self.alpha = jacobian, weights, real_number(alpha, "alpha")
        super().__init__(np.dtype(np.float64), (jacobian.shape[1], jacobian.shape[1]))

    def _matvec(self, x: np.ndarray) -> np.ndarray:
        return self._matmat(x.reshape(-1, 1)).reshape(-1)

    def _matmat(self, x: np.ndarray) -> np.ndarray:
        product = self.jacobian._curvature(x, self.weights)
        if self.alpha:
            product += self.alpha * real(x).astype(np.float64, copy=False)
        return product

    def _adjoint(self) -> GGNOperator:
        return self


def real(x: np.ndarray) -> np.ndarray:
    """Columns as they came, or InvalidRequestError if they are not real."""
    if x.dtype.kind not in "fiub":
        raise InvalidRequestError(
            f"a product with numbers of type {x.dtype}; allowed are real numbers; split off imaginary parts"
        )
    return x


def real_number(given: Any, name: str) -> float:
    """A finite number that is not negative, or InvalidRequestError."""
    try:
        number = float(given)
    except (TypeError, ValueError):
        number = np.nan
    if not 0 <= number < np.inf:
        raise InvalidRequestError(f"{name} {given!r}: allowed are finite numbers from 0 ({name}=)")
    return number


def _predicate(leaves: str | Callable[[str], bool] | None) -> Callable[[str], bool]:
    if leaves is None:
        return lambda path: True
    if callable(leaves):
        return leaves
    try:
        pattern = re.compile(leaves)
    except (re.error, TypeError) as error:
        raise InvalidRequestError(f"leaves {leaves!r} is not a regular expression: {error}; change leaves=") from error
    return lambda path: pattern.search(path) is not None


def _refuse_other_kernel(jacobian: JacobianOperator, kernel: Kernel) -> None:
    """Refuse a kernel that is not J Jᵀ of this operator's store."""
    store = jacobian.store
    if not kernel.plan.mode.holds_every_product or kernel.leaves:
        raise InvalidRequestError(
            f"{kernel.path}: a kernel of mode {kernel.mode}; needed is one whole kernel of mode full (kernel=)"
        )
    if (kernel.request.store, kernel.request.other) != (store.identity(), None):
        raise RequestMismatchError(f"{kernel.path} is not the kernel of {store.path}; give that store's own (kernel=)")
    if jacobian.shape[1] != store.n_parameters:
        raise InvalidRequestError(
            f"{kernel.path} is a sum over all leaves; the operator has some of them: change leaves= or kernel="
        )
