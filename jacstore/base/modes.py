"""The mode of a kernel: which products of rows of J it holds, and where each stands in its array.

A row of J belongs to an example and an output, so a product of two rows belongs to two examples, n and m, and to two
outputs, k and o. For N and M examples and K outputs:

* full `(N*K, M*K)`: every product, `J Jᵀ` itself.
* trace `(N, M)`: products of equal outputs (k = o), added up over outputs.
* diagonal `(K, N, M)`: products of equal outputs, each output by itself.
* blocks `(N, K, K)`: products of equal examples (n = m), hence of one store.

In all of them the last two axes are those of a matrix, or of a stack of matrices. So whatever the mode, the mirror
image of a tile is the tile with these axes swapped, and its diagonal is that of these axes.
"""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # --help lists the modes and loads no heavy library
    import numpy as np


class Mode(StrEnum):
    """Which products of rows a kernel holds; as text, the word of `mode=`, of `--mode` and of what is stored."""

    FULL = "full"
    TRACE = "trace"
    DIAGONAL = "diagonal"
    BLOCKS = "blocks"

    # ---- which products ----

    @property
    def crosses_outputs(self) -> bool:
        """Whether each output is paired with every output (full, blocks), not only with itself."""
        return self in (Mode.FULL, Mode.BLOCKS)

    @property
    def sums_outputs(self) -> bool:
        """Whether products are added up over outputs (trace)."""
        return self is Mode.TRACE

    @property
    def within_examples(self) -> bool:
        """Whether each example is paired only with itself (blocks): only tiles (i, i) exist, and only of one store."""
        return self is Mode.BLOCKS

    @property
    def holds_every_product(self) -> bool:
        """Whether the kernel is all of `J Jᵀ` (full)."""
        return self is Mode.FULL

    @property
    def is_matrix(self) -> bool:
        """Whether the kernel is one matrix (full, trace), not a stack of them."""
        return self in (Mode.FULL, Mode.TRACE)

    # ---- how many ----

    def rows_per_example(self, outputs: int) -> int:
        """Lines of a matrix of the kernel that belong to one example of an axis of examples."""
        return outputs if self is Mode.FULL else 1

    def outputs_kept(self, outputs: int) -> int:
        """Numbers that a row of J leaves per example where its outputs are, or are not, added up."""
        return 1 if self is Mode.TRACE else outputs

    def products_per_entry(self, outputs: int) -> int:
        """Products of two rows that are added up in one entry."""
        return outputs if self is Mode.TRACE else 1

    def output_pairs(self, outputs: int) -> int:
        """Pairs of outputs that are multiplied for each pair of examples."""
        return outputs**2 if self.crosses_outputs else outputs

    def example_pairs(self, m: int, n: int) -> int:
        """Pairs of examples that a tile of m by n examples holds."""
        return m if self is Mode.BLOCKS else m * n

    def tiles_stored(self, down: int, across: int) -> int:
        """Tiles of a kernel that is so many tiles high and wide, mirror images included."""
        return down if self is Mode.BLOCKS else down * across

    # ---- where they stand ----

    @property
    def dimensions(self) -> tuple[str, ...]:
        """Names of the axes."""
        return {
            Mode.FULL: ("row", "column"),
            Mode.TRACE: ("example", "other_example"),
            Mode.DIAGONAL: ("output", "example", "other_example"),
            Mode.BLOCKS: ("example", "output", "other_output"),
        }[self]

    def coordinates(self, n: int, m: int, outputs: int) -> dict[str, tuple[str, list[int]]]:
        """The examples and outputs along each axis of a kernel between n and m examples, by name, with their axis."""
        if self is Mode.FULL:
            along = {"": ("row", n), "other_": ("column", m)}
            return {
                f"{other}{name}": (axis, numbers)
                for other, (axis, examples) in along.items()
                for name, numbers in (
                    ("example", [example for example in range(examples) for _ in range(outputs)]),
                    ("output", list(range(outputs)) * examples),
                )
            }
        lengths = dict(zip(self.dimensions, self.shape(n, m, outputs), strict=True))
        return {axis: (axis, list(range(length))) for axis, length in lengths.items()}

    @property
    def example_axes(self) -> tuple[int, int]:
        """The axes along which the examples of rows and those of columns lie; one and the same for blocks."""
        return {Mode.FULL: (0, 1), Mode.TRACE: (0, 1), Mode.DIAGONAL: (1, 2), Mode.BLOCKS: (0, 0)}[self]

    @property
    def equation(self) -> str:
        """For einsum of rows `(n, K, P)` and `(m, K, P)`; full gives `(n, K, m, K)`, which `shape` joins."""
        return {
            Mode.FULL: "nkp,mop->nkmo",
            Mode.TRACE: "nkp,mkp->nm",
            Mode.DIAGONAL: "nkp,mkp->knm",
            Mode.BLOCKS: "nkp,nop->nko",
        }[self]

    def shape(self, m: int, n: int, outputs: int) -> tuple[int, ...]:
        """Shape of the kernel, or of a tile, between m and n examples."""
        shapes: dict[Mode, tuple[int, ...]] = {
            Mode.FULL: (m * outputs, n * outputs),
            Mode.TRACE: (m, n),
            Mode.DIAGONAL: (outputs, m, n),
            Mode.BLOCKS: (m, outputs, outputs),
        }
        return shapes[self]

    def chunk(self, i: int, j: int) -> tuple[int, ...]:
        """Place of tile (i, j) in the grid of chunks."""
        places: dict[Mode, tuple[int, ...]] = {
            Mode.FULL: (i, j),
            Mode.TRACE: (i, j),
            Mode.DIAGONAL: (0, i, j),
            Mode.BLOCKS: (i, 0, 0),
        }
        return places[self]

    def entry(self, n: int, k: int, m: int, o: int, outputs: int) -> tuple[int, ...]:
        """Place in a tile of the product of output k of its example n with output o of its example m."""
        places: dict[Mode, tuple[int, ...]] = {
            Mode.FULL: (n * outputs + k, m * outputs + o),
            Mode.TRACE: (n, m),
            Mode.DIAGONAL: (k, n, m),
            Mode.BLOCKS: (n, k, o),
        }
        return places[self]

    def view(self, tile: np.ndarray, i: slice, j: slice, outputs: int) -> np.ndarray:
        """The part of a tile between examples i and j: `(n, K, m, K)` for full, `(n, m)`, `(K, n, m)`, `(n, K, K)`."""
        if self is Mode.FULL:
            m, n = (length // outputs for length in tile.shape)
            return tile.reshape(m, outputs, n, outputs)[i, :, j]
        return tile[:, i, j] if self is Mode.DIAGONAL else tile[i, j] if self is Mode.TRACE else tile[i]

    # ---- numbers that belong to rows of J, `(n, K)` ----

    def by_example(self, tile: np.ndarray, k: int) -> np.ndarray:
        """Entries of a tile as `(n, k, m, k)`, with k = 1 where a mode adds over outputs."""
        tile = tile.sum(0) if self is Mode.DIAGONAL else tile
        return tile.reshape(tile.shape[0] // k, k, tile.shape[1] // k, k)

    def over_outputs(self, values: np.ndarray) -> np.ndarray:
        """The numbers as they are, or their sums `(n, 1)` where outputs are added up."""
        return values.sum(1, keepdims=True) if self is Mode.TRACE else values

    def on_diagonal(self, squares: np.ndarray) -> np.ndarray:
        """Squared norms as the diagonal of a tile: full `(n*K,)`, trace `(n,)`, diagonal `(K, n)`, blocks `(n, K)`."""
        if self is Mode.FULL:
            return squares.reshape(-1)
        if self is Mode.TRACE:
            return squares.sum(-1)
        return squares.T if self is Mode.DIAGONAL else squares

    def row_on_diagonal(self, at: tuple[int, ...], outputs: int) -> tuple[int, list[int]]:
        """The example of a tile, and those of its outputs, that a place on the diagonal belongs to."""
        if self is Mode.FULL:
            return at[0] // outputs, [at[0] % outputs]
        if self is Mode.TRACE:
            return at[0], list(range(outputs))
        return (at[1], [at[0]]) if self is Mode.DIAGONAL else (at[0], [at[1]])
