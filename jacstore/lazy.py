"""In: stores. Out: a kernel that is not stored: a lazy Dask array whose blocks are computed when asked for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import dask.array as da
import numpy as np

from jacstore import hierarchy
from jacstore.engine import BlasEngine
from jacstore.errors import Mismatch, Refused
from jacstore.plan import MODES, SLAB_COLUMNS, block_shape
from jacstore.schema import short_hash
from jacstore.store import JacobianStore, open_store
from jacstore.views import resolve


def lazy_kernel(
    store: JacobianStore | str | Path,
    mode: str = "full",
    other: JacobianStore | str | Path | None = None,
    *,
    tile: int = 256,
    precision: str | None = None,
) -> da.Array:
    """A kernel that is not stored: a lazy Dask array whose tiles are computed from the store when asked for.

    Each tile reads the rows of its examples, so a whole pass over the array reads the store many times: this is for
    kernels larger than any disk, of which some tiles are wanted.

    Parameters
    ----------
    tile
        Edge of a tile in examples.
    """
    rows, cols = as_store(store), None if other is None else as_store(other)
    check_mode(mode, cols)
    tile = hierarchy.parse_count(tile, "--tile") or 1
    if precision not in (None, "float32", "float64"):
        raise Refused(f"precision={precision}: a lazy kernel is computed by BLAS; allowed are float32 and float64")
    rows.require_complete()
    if cols is not None:
        cols.require_complete()
        refuse_unlike(rows, cols)
    view = _ComputedKernel(rows, cols or rows, mode, precision or default_precision(rows, cols))
    chunks = block_shape(mode, tile, tile, rows.n_outputs)
    name = f"jacstore-lazy-{short_hash([rows.identity(), (cols or rows).identity(), mode, tile, precision])}"
    return da.from_array(view, chunks=chunks, name=name, asarray=False)


class _ComputedKernel:
    """A kernel as an array-like for Dask whose blocks are computed from the stores."""

    def __init__(self, rows: JacobianStore, cols: JacobianStore, mode: str, precision: str) -> None:
        self.rows, self.cols, self.mode, self.precision = rows, cols, mode, precision
        self.shape = block_shape(mode, rows.n_examples, cols.n_examples, rows.n_outputs)
        self.ndim = len(self.shape)
        self.dtype = np.dtype("float64")

    def __getitem__(self, index: Any) -> np.ndarray:
        spans, within = resolve(index, self.shape)
        if any(a == b for a, b in spans):
            return np.empty([b - a for a, b in spans], self.dtype)[within]
        k = self.rows.n_outputs if self.mode == "full" else 1
        axes = {"full": (0, 1), "trace": (0, 1), "diagonal": (1, 2), "blocks": (0, 0)}[self.mode]
        examples = [(spans[axis][0] // k, -(-spans[axis][1] // k)) for axis in axes]
        block = self._block(*examples)
        for axis in set(axes):
            first = examples[axes.index(axis)][0] * k
            spans[axis] = (spans[axis][0] - first, spans[axis][1] - first)
        block = block[tuple(slice(a, b) for a, b in spans)]
        picked: np.ndarray = block[within]
        return picked

    def _block(self, rows: tuple[int, int], cols: tuple[int, int]) -> np.ndarray:
        """The kernel between two ranges of examples, streamed over columns."""
        engine = BlasEngine(self.precision)
        m, n, k = rows[1] - rows[0], cols[1] - cols[0], self.rows.n_outputs
        total = engine.zeros(block_shape(self.mode, m, n, k))
        width = max(1, SLAB_COLUMNS // self.rows.side.piece_columns) * self.rows.side.piece_columns
        same = self.rows is self.cols and rows == cols
        for a in range(0, self.rows.n_parameters, width):
            b = min(a + width, self.rows.n_parameters)
            left = np.empty((m, k, b - a), engine.slab_dtype)
            self.rows.read_rows(*rows, a, b, left)
            right = left if same else np.empty((n, k, b - a), engine.slab_dtype)
            if not same:
                self.cols.read_rows(*cols, a, b, right)
            engine.add(self.mode, total, left, slice(0, m), right, slice(0, n), slice(0, b - a))
        return total


def default_precision(rows: JacobianStore, cols: JacobianStore | None) -> str:
    return "float64" if "float64" in (rows.dtype, (cols or rows).dtype) else "float32"


def as_store(given: JacobianStore | str | Path) -> JacobianStore:
    return given if isinstance(given, JacobianStore) else open_store(str(given))


def check_mode(mode: str, cols: Any) -> None:
    if mode not in MODES:
        raise Refused(f"--mode {mode}: allowed are {', '.join(MODES)} (mode=)")
    if mode == "blocks" and cols is not None:
        raise Refused("--mode blocks is each example with itself and takes one store; leave out OTHER (other=)")


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
        raise Mismatch(
            f"{rows.path} and {cols.path} differ in {', '.join(differing)}; a rectangular kernel needs rows of "
            "the same parameters: build both stores from one network"
        )
