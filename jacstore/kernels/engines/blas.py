"""Products of slabs of rows, or of factors of rows, added to the accumulators of kernel tiles by BLAS.

Products are formed in the type of `precision`; sums over slabs are always float64.
"""

from __future__ import annotations

import math
import platform
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol

import numpy as np

from jacstore.base import machine
from jacstore.base.limits import LIMITS, PRODUCT_BYTES
from jacstore.base.modes import Mode
from jacstore.base.threads import all_done, blas_threads
from jacstore.terms.factor_set import FactorSet

# Examples of a tile that a single thread multiplies: cutting it up would cost more than it gains.
LEAST_SPLIT = 128
# Blocks of a tile that is not small, enough for the cores of most machines.
LEAST_BLOCKS = 16


class Engine(Protocol):
    """Tile arithmetic. Operands are `(n, K, w)`: examples, outputs, columns of a slab.

    Attributes
    ----------
    slab_dtype, factor_dtype
        The types that slabs and factors are read into.
    rounded_to
        The lower type that rows are rounded to before they are multiplied, None if they are taken as they are.
    device
        Where products are formed.
    slab_copies, tile_copies
        Host copies of a slab and of a tile that are alive at once, for the plan.
    """

    name: str
    slab_dtype: np.dtype[Any]
    factor_dtype: np.dtype[Any]
    slab_copies: int
    tile_copies: int
    rounded_to: str | None
    device: str

    def zeros(self, shape: tuple[int, ...]) -> Any:
        """A new accumulator."""

    def load(self, slab: np.ndarray, turn: int = 0) -> Any:
        """The slab where products are formed; the host buffer may be overwritten afterwards.

        Slabs of one `turn` are multiplied with each other, those of the next one perhaps elsewhere.
        """

    def add(self, mode: Mode, total: Any, a: Any, rows: slice, b: Any, cols: slice, columns: slice) -> Any:
        """The accumulator plus the product of examples `rows` of `a` with examples `cols` of `b` over `columns`."""

    def load_factors(self, factors: FactorSet) -> FactorSet:
        """Factors where products are formed."""

    def add_factors(self, mode: Mode, total: Any, a: FactorSet, rows: slice, b: FactorSet, cols: slice) -> Any:
        """The accumulator plus products of factored rows, formed without the rows."""

    def fetch(self, total: Any) -> np.ndarray:
        """The accumulator as float64 on the host."""

    def restore(self, total: np.ndarray) -> Any:
        """An accumulator from what `fetch` gave."""


class BlasEngine:
    """NumPy's BLAS; a product of a slab with itself is a symmetric rank-k update, which costs half."""

    name = "blas"
    slab_copies = 2
    tile_copies = 3
    rounded_to: str | None = None
    device = f"cpu: {platform.machine()}"

    def __init__(self, precision: str, threads: int | None = None) -> None:
        self.slab_dtype = self.factor_dtype = np.dtype(precision)
        self._threads = threads or machine.cores()
        self._pool = ThreadPoolExecutor(self._threads, "jacstore-product")
        self._buffers = _Buffers()

    def zeros(self, shape: tuple[int, ...]) -> np.ndarray:
        return np.zeros(shape)

    def load(self, slab: np.ndarray, turn: int = 0) -> np.ndarray:
        return slab

    def add(
        self, mode: Mode, total: np.ndarray, a: np.ndarray, rows: slice, b: np.ndarray, cols: slice, columns: slice
    ) -> np.ndarray:
        left, right = a[rows, :, columns], b[cols, :, columns]
        if mode.within_examples:
            total += np.matmul(left, right.transpose(0, 2, 1))
        elif mode.crosses_outputs:
            self._add_product(total, left.reshape(-1, left.shape[2]), right.reshape(-1, right.shape[2]))
        elif mode.sums_outputs and left.flags.c_contiguous and right.flags.c_contiguous:
            # Outputs side by side are just more columns.
            self._add_product(total, left.reshape(len(left), -1), right.reshape(len(right), -1))
        else:
            for k in range(left.shape[1]):
                self._add_product(total if mode.sums_outputs else total[k], left[:, k], right[:, k])
        return total

    def _add_product(self, total: np.ndarray, left: np.ndarray, right: np.ndarray) -> None:
        # NumPy calls syrk when both operands are one array, and then the result is symmetric to the bit.
        same = left.shape == right.shape and left.ctypes.data == right.ctypes.data
        least, most = LIMITS.slab_block
        edge = max(least, min(most, max(total.shape) // 6))
        down, along = (-(-n // max(1, -(-n // edge))) for n in total.shape)
        self._each_block(
            [
                (slice(i, i + down), slice(j, j + along))
                for i in range(0, len(left), down)
                # The lower half of a tile on the diagonal is the mirror of the upper one.
                for j in range(i if same else 0, len(right), along)
            ],
            lambda i, j: np.add(total[i, j], self._buffers.matmul(0, left[i], right[j].T), out=total[i, j]),
        )

    def _each_block(self, blocks: list[tuple[slice, slice]], work: Callable[[slice, slice], Any]) -> None:
        """Work on blocks of a tile, one for each core; a single one may use all threads of BLAS."""
        if len(blocks) < 2:
            for block in blocks:
                work(*block)
            return

        def one(block: tuple[slice, slice]) -> None:
            # As in an item; threads of a pool do not inherit it.
            with np.errstate(over="ignore", invalid="ignore"):
                work(*block)

        with blas_threads(1):
            all_done(self._pool, one, blocks)

    def load_factors(self, factors: FactorSet) -> FactorSet:
        return factors

    def add_factors(
        self, mode: Mode, total: np.ndarray, a: FactorSet, rows: slice, b: FactorSet, cols: slice
    ) -> np.ndarray:
        """Blocks that stay in the cache, one per core: numbers are then multiplied one by one at full speed too."""
        m, n = rows.stop - rows.start, cols.stop - cols.start
        if mode.within_examples:
            for part in a.own_parts(rows):
                total += part
            return total
        same = a is b and rows == cols
        down, along = _cut(m, n, a.block(PRODUCT_BYTES // self.factor_dtype.itemsize))
        jobs = [
            (slice(i, min(i + down, m)), slice(j, min(j + along, n)))
            for i in range(0, m, down)
            # The lower half of a tile on the diagonal is the mirror of the upper one.
            for j in range(i if same else 0, n, along)
        ]

        def add(i: slice, j: slice) -> None:
            left = slice(rows.start + i.start, rows.start + i.stop)
            right = slice(cols.start + j.start, cols.start + j.stop)
            target = mode.view(total, i, j, a.n_outputs)
            for part in a.parts(mode, left, b, right, matmul=self._buffers.matmul):
                target += part

        self._each_block(jobs, add)
        return total

    def fetch(self, total: np.ndarray) -> np.ndarray:
        return total

    def restore(self, total: np.ndarray) -> np.ndarray:
        return total


class _Buffers(threading.local):
    """Memory of each thread for the products of a block: fresh pages would cost a tenth of the arithmetic."""

    def __init__(self) -> None:
        self._held: dict[int, np.ndarray] = {}

    def matmul(self, number: int, x: np.ndarray, y: np.ndarray) -> np.ndarray:
        """`x @ y` in buffer `number` of this thread, which the next product into it overwrites."""
        shape = (*x.shape[:-1], y.shape[-1])
        held = self._held.get(number)
        if held is None or held.size < math.prod(shape) or held.dtype != x.dtype:
            held = self._held[number] = np.empty(math.prod(shape), x.dtype)
        return np.matmul(x, y, out=held[: math.prod(shape)].reshape(shape))


def _cut(m: int, n: int, block: tuple[int, int]) -> tuple[int, int]:
    """Examples down and along of the blocks of a tile: about `block`, in an even number, at least `LEAST_BLOCKS`.

    The blocks do not depend on the number of threads: on some processors BLAS rounds a product by its shape, so that
    other blocks would be other bits.
    """
    down = m if m <= min(block[0], LEAST_SPLIT) else -(-m // (2 * -(-m // (2 * block[0]))))
    along = -(-n // -(-n // block[1]))
    while -(-m // down) * -(-n // along) < LEAST_BLOCKS and max(down, along) > LEAST_SPLIT:
        if along >= down:
            along = -(-along // 2)
        else:
            down = -(-down // 2)
    return down, along


def symmetrize(tile: np.ndarray) -> np.ndarray:
    """A tile on the diagonal, of any mode, with its lower half replaced by the mirror of its upper half, in place."""
    n = tile.shape[-1]
    lower = np.tril_indices(n, -1) if n <= 64 else None
    for matrix in tile.reshape(-1, n, n):
        if lower is not None:
            matrix[lower] = matrix.T[lower]
            continue
        # Row blocks: index arrays of a large tile would be larger than the tile.
        for a in range(0, n, 64):
            b = min(a + 64, n)
            matrix[a:b, :a] = matrix[:a, a:b].T
            block = matrix[a:b, a:b]
            block[...] = np.triu(block) + np.triu(block, 1).T
    return tile
