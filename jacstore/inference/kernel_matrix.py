"""A kernel as a matrix in float64, whole, by panels of rows or as products, from disk, from Dask or from an array.

It holds what a solver has to know of a kernel, whoever made it: rows per example, how its entries are rounded, and its
identity. All values are float64.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import dask.array as da
import numpy as np

from jacstore.base.machine import default_memory, format_size
from jacstore.base.modes import Mode
from jacstore.base.precision import ROUNDOFF
from jacstore.errors import InvalidRequestError
from jacstore.kernels.kernel import Kernel, open_kernel
from jacstore.kernels.lazy import DescribedArray

# Unit roundoff of what a kernel is stored in, and of the products that it is a sum of (fast: TF32 at worst).
STORED = {dtype: ROUNDOFF[dtype] for dtype in ("float64", "float32", "float16")}
PRODUCTS = {**ROUNDOFF, "fast": ROUNDOFF["tf32"]}
AHEAD = 2  # tiles that are read while another is used
SQUARE = 1024  # edge of the squares in which a matrix is compared with its transpose
# A matrix further than this from its transpose is not a kernel; separate products differ a thousand times less.
ASYMMETRY = 1e-6

Tile = tuple[slice, slice, np.ndarray]


class KernelMatrix:
    """A kernel `(rows, columns)` of mode full or trace, or a matrix in its place.

    Parameters
    ----------
    given
        A `Kernel`, its path, or a NumPy or Dask array.
    outputs
        Rows per example; known for a `Kernel`, 1 for an array if not given.

    Attributes
    ----------
    roundoff
        `u` such that the entries are known to about `u |G_ij|`.
    exact_diagonal
        Whether the diagonal was replaced, so that this is not `J Jᵀ` of the stored J.
    """

    def __init__(self, given: Any, outputs: int | None = None) -> None:
        if isinstance(given, str | Path):
            given = open_kernel(str(given))
        self.array: Any  # NumPy or Dask, (rows, columns)
        self.kernel: Kernel | None = given if isinstance(given, Kernel) else None
        self.exact_diagonal = False
        if self.kernel is not None:
            self._describe_kernel(self.kernel, outputs)
        else:
            self._describe_array(given, outputs)
        self.shape: tuple[int, int] = (self.array.shape[0], self.array.shape[1])
        if self.shape[0] % self.n_outputs or self.shape[1] % self.n_outputs:
            raise InvalidRequestError(
                f"{self.where}: {self.shape} is not a multiple of {self.n_outputs} outputs; change outputs="
            )

    def _describe_kernel(self, kernel: Kernel, outputs: int | None) -> None:
        mode = kernel.plan.mode
        if not mode.is_matrix:
            raise InvalidRequestError(
                f"{kernel.path} has mode {mode}; allowed are full and trace: assemble with --mode full (mode=)"
            )
        self.n_outputs = mode.rows_per_example(kernel.plan.n_outputs)
        if outputs not in (None, self.n_outputs):
            raise InvalidRequestError(
                f"outputs={outputs}: {kernel.path} has {self.n_outputs} row(s) per example; leave outputs= out"
            )
        self.array, self.where, self.mode, self.symmetric = kernel.array, kernel.path, mode, kernel.plan.symmetric
        self.roundoff = max(STORED[kernel.dtype.name], PRODUCTS[kernel.precision])
        self.exact_diagonal = bool(getattr(kernel, "exact_diagonal", False))

    def _describe_array(self, given: Any, outputs: int | None) -> None:
        if hasattr(given, "tocsr"):
            raise InvalidRequestError(
                f"a kernel of type {type(given).__name__}: sparse matrices are not supported; give its .toarray()"
            )
        array = given if isinstance(given, da.Array) else np.asarray(given)
        if array.ndim != 2 or array.dtype.kind not in "fiu" or 0 in array.shape:
            raise InvalidRequestError(
                f"a kernel of shape {array.shape} and type {array.dtype}; allowed are a jacstore.Kernel, its path, or "
                "a real matrix (rows, columns) of NumPy or Dask"
            )
        self.array, self.where, self.mode, self.symmetric = array, "the kernel", Mode.FULL, False
        self.n_outputs = 1 if outputs is None else outputs
        if not isinstance(self.n_outputs, int | np.integer) or self.n_outputs < 1:
            raise InvalidRequestError(f"outputs={outputs}: must be an integer of at least 1")
        self.roundoff = STORED.get(array.dtype.name, STORED["float64"])
        if isinstance(given, DescribedArray):
            self.roundoff, self.exact_diagonal = given.roundoff, given.exact_diagonal
            self.mode = Mode(given.kernel_mode)

    @property
    def n_examples(self) -> int:
        """Examples along the rows."""
        return self.shape[0] // self.n_outputs

    def require_symmetric(self) -> None:
        """Refuse a kernel between two stores; arrays are checked for symmetry when they are loaded."""
        if (self.kernel is not None and not self.symmetric) or self.shape[0] != self.shape[1]:
            raise InvalidRequestError(
                f"{self.where} is rectangular {self.shape}, between two stores; needed is the kernel of one store"
            )

    def tiles(self) -> Iterator[Tile]:
        """Rows, columns and float64 values of each tile; of a stored symmetric kernel only those with i <= j.

        The next tiles are read while the caller works on one.
        """
        if self.kernel is None:
            for rows, block in self.panels(SQUARE):
                yield rows, slice(0, self.shape[1]), block
            return
        kernel, plan = self.kernel, self.kernel.plan
        plan_rows, plan_columns = plan.grid
        pairs = [(i, j) for i in range(plan_rows) for j in range(i if self.symmetric else 0, plan_columns)]

        def read(pair: tuple[int, int]) -> Tile:
            i, j = pair
            spans = [side.examples(plan.tile, n, n + 1) for side, n in ((plan.rows, i), (plan.cols, j))]
            rows, columns = (slice(a * self.n_outputs, b * self.n_outputs) for a, b in spans)
            total = kernel.read_tile(0, i, j).astype(np.float64, copy=False)
            for leaf in range(1, len(kernel.layouts)):
                total = total + kernel.read_tile(leaf, i, j)
            return rows, columns, total

        yield from _ahead(read, pairs)

    def panels(self, height: int) -> Iterator[tuple[slice, np.ndarray]]:
        """Slices of whole examples and their rows `(about height, columns)` in float64."""
        step = max(1, height // self.n_outputs) * self.n_outputs
        for start in range(0, self.shape[0], step):
            rows = slice(start, min(start + step, self.shape[0]))
            yield rows, np.asarray(self.array[rows], np.float64)

    def load(self) -> np.ndarray:
        """All of a symmetric kernel, `(R, R)` float64, C order, a copy.

        Raises
        ------
        InvalidRequestError
            If an entry is not finite, or if it is not symmetric.
        """
        whole = np.empty(self.shape)
        if isinstance(self.array, da.Array) and self.kernel is None:
            # Not by `da.store`, which would fill a copy on a cluster's worker.
            stops = np.cumsum(self.array.chunks[0])
            for number, (stop, height) in enumerate(zip(stops, self.array.chunks[0], strict=True)):
                whole[stop - height : stop] = self.array.blocks[number].compute()
        elif self.kernel is None:
            whole[...] = self.array
        for rows, columns, tile in self.tiles() if self.kernel is not None else ():
            whole[rows, columns] = tile
            if self.symmetric:
                whole[columns, rows] = tile.T
        self._check(whole)
        return whole

    def _check(self, whole: np.ndarray) -> None:
        for start in range(0, len(whole), SQUARE):
            finite = np.isfinite(whole[start : start + SQUARE]).all(1)
            if not finite.all():
                # Rows of one example put NaN into a column of all others; its own place on the diagonal names it.
                own = np.isfinite(np.diagonal(whole))
                row = start + int(np.argmin(finite)) if own.all() else int(np.argmin(own))
                raise InvalidRequestError(
                    f"{self.where} holds NaN or infinity in row {row} ({self.name_row(row)}); build without "
                    "--allow-nonfinite, or leave such examples out"
                )
        if not self.symmetric:
            largest = float(np.abs(np.diagonal(whole)).max())
            for a in range(0, len(whole), SQUARE):
                for b in range(a, len(whole), SQUARE):
                    upper = whole[a : a + SQUARE, b : b + SQUARE]
                    lower = whole[b : b + SQUARE, a : a + SQUARE].T
                    if np.abs(upper - lower).max() > ASYMMETRY * max(largest, np.abs(upper).max()):
                        raise InvalidRequestError(
                            f"{self.where} is not symmetric; needed is the kernel of examples with themselves"
                        )

    def name_row(self, row: int) -> str:
        """The example, and the output where there are several, of a row."""
        example, output = divmod(row, self.n_outputs)
        return f"example {example}" if self.n_outputs == 1 else f"example {example}, output {output}"

    def matmat(self, block: np.ndarray) -> np.ndarray:
        """Product with `(columns, B)` in one pass over the kernel, whatever B."""
        total = np.zeros((self.shape[0], block.shape[1]))
        for rows, columns, tile in self.tiles():
            total[rows] += tile @ block[columns]
            if self.symmetric and rows != columns:
                total[columns] += tile.T @ block[rows]
        return total


def _ahead(read: Callable[[Any], Any], todo: Iterable[Any]) -> Iterator[Any]:
    """Results of `read` in order, a few of them computed while the caller uses another."""
    with ThreadPoolExecutor(AHEAD) as pool:
        waiting: deque[Future[Any]] = deque()
        try:
            for one in todo:
                waiting.append(pool.submit(read, one))
                if len(waiting) > AHEAD:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        finally:
            for future in waiting:
                future.cancel()


def cross_gram(given: Any, of: KernelMatrix) -> KernelMatrix:
    """A kernel between other examples (rows) and those of `of` (columns).

    Raises
    ------
    InvalidRequestError
        If its columns are not the rows of `of`.
    """
    cross = KernelMatrix(given, None if isinstance(given, Kernel | str | Path) else of.n_outputs)
    if cross.n_outputs != of.n_outputs or cross.mode != of.mode or cross.shape[1] != of.shape[0]:
        raise InvalidRequestError(
            f"{cross.where} is {cross.shape}, mode {cross.mode}, and {of.where} is {of.shape}, mode {of.mode}; needed "
            "are columns that are the rows of the second: gram(other_store, store) in the same mode"
        )
    if cross.kernel is not None and of.kernel is not None:
        asked = cross.kernel.request
        if (asked.other or asked.store) != of.kernel.request.store:
            raise InvalidRequestError(
                f"{cross.where} was made from another store than {of.where}; its columns must be the rows of that one: "
                "gram(other_store, store)"
            )
    return cross


def require_memory(needed: int, memory: int | str | None, what: str, instead: str) -> None:
    """Refuse work that does not fit in memory, before anything is allocated."""
    allowed = default_memory(memory)
    if needed > allowed:
        raise InvalidRequestError(
            f"{what} takes {format_size(needed)} of memory, allowed are {format_size(allowed)}; give more "
            f"(--memory, memory=) or {instead}"
        )


@dataclass(frozen=True, kw_only=True)
class Columns:
    """How right-hand sides were given: by row `(R, ...)` or by example `(N, K, ...)`."""

    by_example: bool
    outputs: int
    trailing: tuple[int, ...]

    def restore(self, flat: np.ndarray) -> np.ndarray:
        """`(..., rows, B)` in the shape of what was given."""
        *lead, rows, _ = flat.shape
        axes = (rows // self.outputs, self.outputs) if self.by_example else (rows,)
        return flat.reshape(*lead, *axes, *self.trailing)


def as_columns(given: Any, rows: int, outputs: int, name: str) -> tuple[np.ndarray, Columns]:
    """Right-hand sides as `(rows, B)` float64, and how to give results back in the same shape.

    Raises
    ------
    InvalidRequestError
        If the shape does not belong to these rows, or if a number is not finite.
    """
    if np.iscomplexobj(given):
        raise InvalidRequestError(f"{name} is complex; allowed are real numbers")
    array = np.asarray(given, np.float64)
    by_example = array.ndim > 1 and array.shape[:2] == (rows // outputs, outputs)
    if array.ndim == 0 or (array.shape[0] != rows and not by_example):
        raise InvalidRequestError(
            f"{name} has shape {array.shape}; allowed are ({rows}, ...), one for each row of the kernel, or "
            f"({rows // outputs}, {outputs}, ...), by example and output"
        )
    by_example = by_example and array.shape[0] != rows
    flat = array.reshape(rows, -1)
    if not np.isfinite(flat).all():
        raise InvalidRequestError(f"{name} holds NaN or infinity in row {int(np.argmin(np.isfinite(flat).all(1)))}")
    return flat, Columns(by_example=by_example, outputs=outputs, trailing=array.shape[1 + by_example :])


def offset_like(offset: Any, shape: tuple[int, ...], name: str) -> np.ndarray:
    """An offset in float64 for an array of this shape: an array of the same shape, one number, or None for 0."""
    taken = np.asarray(0.0 if offset is None else offset, np.float64)
    if taken.ndim and taken.shape != shape:
        raise InvalidRequestError(f"{name} has shape {taken.shape}; allowed are {shape} or one number")
    return taken
