"""In: slabs of rows. Out: their products, added to the accumulators of kernel tiles. This engine is BLAS on the CPU.

Products are formed in the type of `precision`; sums over slabs are always float64.
"""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np

PRECISIONS = ("float64", "float32", "fast")


class Engine(Protocol):
    """Tile arithmetic. Operands are `(n, K, w)`: examples, outputs, columns of a slab.

    Attributes
    ----------
    slab_dtype
        The type that slabs are read into.
    slab_copies, tile_copies
        Host copies of a slab and of a tile that are alive at once, for the plan.
    """

    name: str
    slab_dtype: np.dtype[Any]
    slab_copies: int
    tile_copies: int

    def zeros(self, shape: tuple[int, ...]) -> Any:
        """A new accumulator."""

    def load(self, slab: np.ndarray) -> Any:
        """The slab where products are formed; the host buffer may be overwritten afterwards."""

    def add(self, mode: str, total: Any, a: Any, rows: slice, b: Any, cols: slice, columns: slice) -> Any:
        """The accumulator plus the product of examples `rows` of `a` with examples `cols` of `b` over `columns`."""

    def fetch(self, total: Any) -> np.ndarray:
        """The accumulator as float64 on the host."""

    def restore(self, total: np.ndarray) -> Any:
        """An accumulator from what `fetch` gave."""


class BlasEngine:
    """NumPy's BLAS; a product of a slab with itself is a symmetric rank-k update, which costs half."""

    name = "blas"
    slab_copies = 2
    tile_copies = 3

    def __init__(self, precision: str) -> None:
        self.slab_dtype = np.dtype(precision)
        self._scratch = np.empty(0, self.slab_dtype)

    def zeros(self, shape: tuple[int, ...]) -> np.ndarray:
        return np.zeros(shape)

    def load(self, slab: np.ndarray) -> np.ndarray:
        return slab

    def add(
        self, mode: str, total: np.ndarray, a: np.ndarray, rows: slice, b: np.ndarray, cols: slice, columns: slice
    ) -> np.ndarray:
        left, right = a[rows, :, columns], b[cols, :, columns]
        if mode == "full":
            self._add_product(total, left.reshape(-1, left.shape[2]), right.reshape(-1, right.shape[2]))
        elif mode == "trace" and left.flags.c_contiguous and right.flags.c_contiguous:
            # Outputs side by side are just more columns.
            self._add_product(total, left.reshape(len(left), -1), right.reshape(len(right), -1))
        elif mode == "trace":
            for k in range(left.shape[1]):
                self._add_product(total, left[:, k], right[:, k])
        elif mode == "diagonal":
            for k in range(left.shape[1]):
                self._add_product(total[k], left[:, k], right[:, k])
        else:
            total += np.matmul(left, right.transpose(0, 2, 1))
        return total

    def _add_product(self, total: np.ndarray, left: np.ndarray, right: np.ndarray) -> None:
        if self._scratch.size < total.size:
            self._scratch = np.empty(total.size, self.slab_dtype)
        product = self._scratch[: total.size].reshape(total.shape)
        # NumPy calls syrk when both operands are one array, and then the result is symmetric to the bit.
        np.matmul(left, right.T, out=product)
        np.add(total, product, out=total)

    def fetch(self, total: np.ndarray) -> np.ndarray:
        return total

    def restore(self, total: np.ndarray) -> np.ndarray:
        return total


def symmetrize(mode: str, tile: np.ndarray) -> np.ndarray:
    """A diagonal tile with its lower half replaced by the mirror of its upper half, in place."""
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
