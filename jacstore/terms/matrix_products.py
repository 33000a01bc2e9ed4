"""Multiply rows, and their transpose, with columns of numbers, from the factors of the rows.

Rows are never formed. A term's block is a stack of matrices `(G, C, D)`, `sum_t a_t ⊗ d_kt` in each group, where a are
layer inputs, or patches of images for a convolution, so that `J v` is `sum_t a_tᵀ V d_kt` and `Jᵀ u` one matrix product
of inputs with `sum_k u_k d_kt`. Columns always stand last: `(size, m)` is `(C, D * m)` without a copy.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from jacstore.base.limits import LIMITS
from jacstore.terms.kinds import Leaf, Operand
from jacstore.terms.term import Factored, Views, mapped, mapped_back

Operands = Mapping[str, np.ndarray]


@dataclass(frozen=True, kw_only=True)
class TermProduct:
    """One term of a leaf, seen as matrices.

    Attributes
    ----------
    term
        The term.
    offset, size
        The leaf's columns.
    shape
        `(G, C, D)`: groups, inputs (window entries times channels for a convolution), channels of cotangents.
    positions
        T.
    moves
        What turns a block `(G, C, D)` into the leaf, as the views of a term.
    room
        Numbers of intermediate products that are aimed at: they stay in the cache or near it.
    """

    term: Factored
    offset: int
    size: int
    shape: tuple[int, int, int]
    positions: int
    moves: Views
    room: int

    @property
    def summed(self) -> int:
        """Numbers of a sum of products with the transpose, per column."""
        return max(self.size, math.prod(self.shape))

    @property
    def in_place(self) -> bool:
        """Whether the leaf's numbers stand in the order of the matrices."""
        return all(kind == "reshape" for kind, _ in self.moves)

    def blocks(self, n_columns: int) -> list[slice]:
        """Columns in blocks that are multiplied at once."""
        width = self._block(n_columns)
        return [slice(a, min(a + width, n_columns)) for a in range(0, n_columns, max(1, width))]

    def numbers(self, n_columns: int) -> int:
        """Numbers of intermediate products for each example."""
        groups, inputs, width = self.shape
        copies = 2 if groups > 1 else 1
        patches = copies * self.positions * inputs * groups if self.term.bare.copies_inputs(groups) else 0
        return patches + copies * groups * self.positions * width * self._block(n_columns)

    def scratch(self, n_columns: int) -> int:
        """Numbers of intermediate products and of one sum over examples that are alive at once."""
        return 2 * max(self.room, self.numbers(n_columns)) + self.summed * self._block(n_columns)

    def _block(self, n_columns: int) -> int:
        return min(n_columns, max(1, LIMITS.product_width // self.shape[2]))

    def matrices(self, columns: np.ndarray, dtype: np.dtype[Any]) -> np.ndarray:
        """The leaf's part of columns `(size, m)` as `(G, C, D * m)`, contiguous."""
        held = mapped_back(columns, self.moves, self.term.fixed, self.shape, trail=1)
        return np.ascontiguousarray(held, dtype).reshape(*self.shape[:2], -1)

    def columns(self, matrices: np.ndarray) -> np.ndarray:
        """The other way: columns `(size, m)` of the leaf from `(G, C, D * m)`."""
        m = matrices.shape[-1] // self.shape[2]
        held = mapped(matrices.reshape(*self.shape, m), self.moves, self.term.fixed, lead=0, trail=1)
        return np.asarray(held.reshape(self.size, m))

    def times(self, operands: Operands, matrices: np.ndarray, into: np.ndarray) -> None:
        """Add products of rows with columns, given as `matrices`, to `into` `(n, K, m)`."""
        m = into.shape[-1]
        for at in self._chunks(operands, m):
            d = self._cotangents(operands, at)
            n, k = d.shape[:2]
            if self.term.source is None:
                summed = d.sum(3).reshape(n * k, -1)
                part = np.matmul(summed, matrices.reshape(summed.shape[1], m)).reshape(n, k, m)
            else:
                through = self.term.bare.through(operands, at, matrices, self.shape, self.positions)
                part = self._along(d, through, m)
            into[at] += part if self.term.scale == 1 else self.term.scale * part

    def add_transposed(self, operands: Operands, weights: np.ndarray, total: np.ndarray) -> None:
        """Add products of the rows' transpose with `weights` `(n, K, m)` to `total` `(G, C, D * m)`, float64."""
        m = weights.shape[-1]
        for at in self._chunks(operands, m):
            d, u = self._cotangents(operands, at), weights[at]
            n, k, groups, t, width = d.shape
            u = u if self.term.scale == 1 else u * u.dtype.type(self.term.scale)
            if self.term.source is None:
                summed = d.sum(3).reshape(n * k, -1)
                total += np.matmul(summed.T, u.reshape(n * k, m)).reshape(total.shape)
                continue
            flat = d.reshape(n, k, -1)
            # (n, G * T * D, m)
            weighted = flat.transpose(0, 2, 1) * u if k == m == 1 else np.matmul(flat.transpose(0, 2, 1), u)
            weighted = weighted.reshape(n, groups, t, width * m)
            self.term.bare.add_weighted(operands, at, weighted, self.shape, total)

    def _chunks(self, operands: Operands, n_columns: int) -> Iterator[slice]:
        """Examples a few at a time."""
        count = len(operands[self.term.cotangents])
        step = max(1, min(self.room // max(1, self.numbers(n_columns)), LIMITS.product_depth // self.positions))
        for a in range(0, count, step):
            yield slice(a, min(a + step, count))

    def _cotangents(self, operands: Operands, at: slice) -> np.ndarray:
        """Cotangents `(n, K, G, T, D)`; the groups of a convolution lie within its channels."""
        d = operands[self.term.cotangents][at]
        groups, _, width = self.shape
        if d.shape[2] == groups:
            return d
        n, k, _, t, _ = d.shape
        return d.reshape(n, k, t, groups, width).transpose(0, 1, 3, 2, 4)

    @staticmethod
    def _along(d: np.ndarray, through: np.ndarray, n_columns: int) -> np.ndarray:
        """Sums over positions and channels of cotangents, `(n, K, m)`."""
        n, k = d.shape[:2]
        if k == 1 and n_columns == 1:
            return np.einsum("nx,nx->n", d.reshape(n, -1), through[..., 0])[:, None, None]
        return np.matmul(d.reshape(n, k, -1), through)


def term_products(leaf: Leaf, offset: int, operands: Mapping[str, Operand], room: int) -> list[TermProduct]:
    """The terms of a factored leaf whose columns begin at `offset`."""
    shapes = {name: operands[name].shape for name in leaf.operands}
    found = []
    for term in leaf.factored:
        shape, moves = term.matrix_form(shapes)
        found.append(
            TermProduct(
                term=term,
                offset=offset,
                size=leaf.size,
                shape=shape,
                positions=shapes[term.cotangents][1],
                moves=moves,
                room=min(LIMITS.product_numbers, room),
            )
        )
    return found
