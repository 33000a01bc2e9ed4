"""Kernels that are not stored: lazy Dask arrays whose blocks are computed from stores when they are asked for."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import dask.array as da
import numpy as np

from jacstore.base.limits import LIMITS
from jacstore.base.modes import Mode
from jacstore.base.options import parse_count
from jacstore.base.precision import ROUNDOFF
from jacstore.base.schema import short_hash
from jacstore.errors import InvalidRequestError, RequestMismatchError
from jacstore.kernels.engines.blas import BlasEngine, symmetrize
from jacstore.kernels.plan.plan import Step
from jacstore.kernels.plan.steps import plan_steps
from jacstore.storage.indexing import resolve
from jacstore.store.reader import JacobianStore, open_store
from jacstore.terms.expand_rows import expanded_slabs
from jacstore.terms.factor_set import FactorSet

Side = tuple[JacobianStore, int, int]  # a store, and the range of its examples


class DescribedArray(da.Array):
    """A lazy float64 kernel, made from stored or computed products; arrays derived from it lose these attributes.

    Attributes
    ----------
    roundoff
        `u` such that the entries are known to about `u |G_ij|`.
    exact_diagonal
        Whether the diagonal of the kernel was replaced by exact norms.
    kernel_mode
        Mode of the kernel: full, trace, diagonal or blocks.
    """

    roundoff: float
    exact_diagonal: bool
    kernel_mode: str


def described(array: da.Array, *, roundoff: float, exact_diagonal: bool, mode: str) -> DescribedArray:
    """The array with what is known of it."""
    found = DescribedArray(array.dask, array.name, array.chunks, dtype=array.dtype)
    found.roundoff, found.exact_diagonal, found.kernel_mode = roundoff, exact_diagonal, mode
    return found


def lazy_kernel(
    store: JacobianStore | str | Path,
    mode: str = "full",
    other: JacobianStore | str | Path | None = None,
    *,
    tile: int = 256,
    precision: str | None = None,
) -> da.Array:
    """A kernel that is not stored: a lazy Dask array whose tiles are computed from the store when asked for.

    Each tile reads what is stored of its examples, so a whole pass over the array reads the store many times: this is
    for kernels larger than any disk, of which some tiles are wanted. Factors are multiplied as `gram` does it.

    Parameters
    ----------
    tile
        Edge of a tile in examples.
    """
    rows, cols = as_store(store), None if other is None else as_store(other)
    chosen = as_mode(mode, cols)
    tile = parse_count(tile, "--tile") or 1
    if precision not in (None, "float32", "float64"):
        raise InvalidRequestError(
            f"precision={precision}: a lazy kernel is computed by BLAS; allowed are float32 and float64"
        )
    rows.require_complete()
    if cols is not None:
        cols.require_complete()
        refuse_unlike(rows, cols)
    view = _ComputedKernel(rows, cols or rows, chosen, precision or default_precision(rows, cols), tile)
    chunks = chosen.shape(tile, tile, rows.n_outputs)
    name = f"jacstore-lazy-{short_hash([rows.identity(), (cols or rows).identity(), mode, tile, precision])}"
    found = da.from_array(view, chunks=chunks, name=name, asarray=False)
    return described(found, roundoff=ROUNDOFF[view.precision], exact_diagonal=False, mode=chosen.value)


class _ComputedKernel:
    """A kernel as an array-like for Dask whose blocks are computed from the stores."""

    def __init__(self, rows: JacobianStore, cols: JacobianStore, mode: Mode, precision: str, tile: int) -> None:
        self.rows, self.cols, self.mode, self.precision, self.tile = rows, cols, mode, precision, tile
        self.shape = mode.shape(rows.n_examples, cols.n_examples, rows.n_outputs)
        self.ndim = len(self.shape)
        self.dtype = np.dtype("float64")
        alike = made_alike(rows, cols)
        self.steps = plan_steps(rows.leaves, rows.operands, rows.n_outputs, tile, mode) if alike else ()
        self.runs = _runs(rows, factored=not alike)
        # Blocks that Dask asks for together would set the number of BLAS threads for each other.
        self.compute_lock = threading.Lock()

    def __reduce__(self) -> tuple[Any, ...]:
        return (_ComputedKernel, (self.rows, self.cols, self.mode, self.precision, self.tile))

    def __getitem__(self, index: Any) -> np.ndarray:
        spans, within = resolve(index, self.shape)
        if any(a == b for a, b in spans):
            return np.empty([b - a for a, b in spans], self.dtype)[within]
        k, axes = self.mode.rows_per_example(self.rows.n_outputs), self.mode.example_axes
        examples = [(spans[axis][0] // k, -(-spans[axis][1] // k)) for axis in axes]
        block = self._block(*examples)
        for axis in set(axes):
            first = examples[axes.index(axis)][0] * k
            spans[axis] = (spans[axis][0] - first, spans[axis][1] - first)
        block = block[tuple(slice(a, b) for a, b in spans)]
        picked: np.ndarray = block[within]
        return picked

    def _block(self, rows: tuple[int, int], cols: tuple[int, int]) -> np.ndarray:
        """The kernel between two ranges of examples, factored leaves first, then columns of rows."""
        engine = BlasEngine(self.precision)
        # One side where both are the same.
        sides = list(dict.fromkeys([(self.rows, *rows), (self.cols, *cols)]))
        total = engine.zeros(self.mode.shape(rows[1] - rows[0], cols[1] - cols[0], self.rows.n_outputs))
        with self.compute_lock:
            for step in self.steps:
                self._add_factors(engine, total, step, sides)
            width = max(1, LIMITS.slab_columns // self.rows.side.piece_columns) * self.rows.side.piece_columns
            for first, last in self.runs:
                for a in range(first, last, width):
                    b = min(a + width, last)
                    slabs = [np.empty((n - m, store.n_outputs, b - a), engine.slab_dtype) for store, m, n in sides]
                    for (store, m, n), slab in zip(sides, slabs, strict=True):
                        store.read_rows(m, n, a, b, slab)
                    self._add_slabs(engine, total, slabs)
        # Factors of examples with themselves are multiplied in pairs i <= j alone.
        return symmetrize(total) if len(sides) == 1 else total

    def _add_factors(self, engine: BlasEngine, total: np.ndarray, step: Step, sides: Sequence[Side]) -> None:
        """Add products of leaves that share factors, each factor read once."""
        leaves = self.rows.leaves
        names = dict.fromkeys(name for index in step.leaves for name in leaves[index].operands)
        read = [{name: store.read_operand(name, a, b, engine.factor_dtype) for name in names} for store, a, b in sides]
        implicit = [leaves[index] for index in step.leaves if index not in step.expanded]
        if implicit:
            sets = [FactorSet(implicit, operands) for operands in read]
            spans = [slice(0, factors.n_examples) for factors in sets]
            engine.add_factors(self.mode, total, sets[0], spans[0], sets[-1], spans[-1])
        for index in step.expanded:
            for slabs in expanded_slabs(leaves[index], read, LIMITS.slab_columns, patches_kept=False):
                self._add_slabs(engine, total, slabs)

    def _add_slabs(self, engine: BlasEngine, total: np.ndarray, slabs: Sequence[np.ndarray]) -> None:
        left, right = slabs[0], slabs[-1]
        engine.add(self.mode, total, left, slice(0, len(left)), right, slice(0, len(right)), slice(0, left.shape[2]))


def _runs(store: JacobianStore, factored: bool) -> list[tuple[int, int]]:
    """Ranges of columns whose rows are formed: all, or those that are stored as rows."""
    runs: list[tuple[int, int]] = []
    for leaf in store.leaves:
        if not leaf.size or not (leaf.dense or factored):
            continue
        if runs and runs[-1][1] == leaf.offset:
            runs[-1] = (runs[-1][0], leaf.offset + leaf.size)
        else:
            runs.append((leaf.offset, leaf.offset + leaf.size))
    return runs


def made_alike(rows: JacobianStore, cols: JacobianStore) -> bool:
    """Whether two stores hold the same leaves by the same terms of the same operands."""
    terms = [[leaf.terms for leaf in store.leaves] for store in (rows, cols)]
    return terms[0] == terms[1] and rows.operands == cols.operands


def default_precision(rows: JacobianStore, cols: JacobianStore | None) -> str:
    return "float64" if "float64" in (rows.dtype, (cols or rows).dtype) else "float32"


def as_store(given: JacobianStore | str | Path) -> JacobianStore:
    return given if isinstance(given, JacobianStore) else open_store(str(given))


def as_mode(given: str, cols: JacobianStore | None) -> Mode:
    """The mode of a kernel with the examples of `cols`, or of one store.

    Raises
    ------
    InvalidRequestError
        If there is no such mode, or if it takes one store.
    """
    if given not in [*Mode]:
        raise InvalidRequestError(f"--mode {given}: allowed are {', '.join(Mode)} (mode=)")
    mode = Mode(given)
    if mode.within_examples and cols is not None:
        raise InvalidRequestError(
            f"--mode {mode} pairs each example with itself and takes one store; leave out OTHER (other=)"
        )
    return mode


def refuse_unlike(rows: JacobianStore, cols: JacobianStore) -> None:
    """Refuse a rectangular kernel between rows that are not about the same parameters."""
    # The same function is printed in another way by another JAX, and for inputs of another type or shape.
    alike = [(s.versions.get("jax"), s.requested.get("inputs"), s.dtype == "float64") for s in (rows, cols)]
    comparable = alike[0] == alike[1]
    pairs: list[tuple[str, Any, Any]] = [
        (field, rows.requested.get(field), cols.requested.get(field))
        for field in ("parameters", "selection", "constants", "outputs", "function")
        if field in rows.requested and field in cols.requested and (field != "function" or comparable)
    ]
    pairs.append(("leaves", [(f.path, f.shape) for f in rows.leaves], [(f.path, f.shape) for f in cols.leaves]))
    pairs.append(("n_outputs", rows.n_outputs, cols.n_outputs))
    differing = [field for field, a, b in pairs if a != b]
    if differing:
        raise RequestMismatchError(
            f"{rows.path} and {cols.path} differ in {', '.join(differing)}; a rectangular kernel needs rows of "
            "the same parameters: build both stores from one network"
        )
