"""Reference values for a kernel: `J (Jᵀ z)` for random z, and single entries, in float64 from what is stored.

Nothing of the code that assembles kernels is used. Weights are taken tile by tile, `z` restricted to a range of
examples, so that a wrong tile shows in the rows and the range that it belongs to. Columns of rows are read once, and
factors twice. Examples that are known to hold NaN or infinity count as zero.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from jacstore.base.budget import VERIFY, Budget
from jacstore.base.modes import Mode
from jacstore.store.arrays import operand_array
from jacstore.store.reader import JacobianStore
from jacstore.terms.kinds import Leaf, expand

# Slabs of rows in memory while one takes the place of the last.
SLABS_ALIVE = 2


@dataclass(frozen=True, kw_only=True)
class Query:
    """The products and entries to compute: `weights` `(M, K)` restricted to `ranges` of examples, and `entries`.

    `entries` are (n, k, m, o); trace sums over outputs, so k and o are 0 there.
    """

    mode: Mode
    weights: np.ndarray
    ranges: tuple[tuple[int, int], ...]
    entries: tuple[tuple[int, int, int, int], ...]


@dataclass(kw_only=True)
class ReferenceValues:
    """Products `(N, K, ranges)`, K = 1 for trace and one range for blocks, and values of the entries."""

    products: np.ndarray
    entries: np.ndarray


def stream(
    rows: JacobianStore, cols: JacobianStore, query: Query, memory: int, leaves: Sequence[int] | None = None
) -> ReferenceValues:
    """Products and entries over some leaves, all if not given."""
    k = query.mode.outputs_kept(rows.n_outputs)
    ranges = 1 if query.mode.within_examples else len(query.ranges)
    values = ReferenceValues(products=np.zeros((rows.n_examples, k, ranges)), entries=np.zeros(len(query.entries)))
    for part in _parts(rows, cols, range(len(rows.leaves)) if leaves is None else leaves, memory):
        _add(values, part, query, memory)
    return values


def _parts(rows: JacobianStore, cols: JacobianStore, leaves: Sequence[int], memory: int) -> Iterator[_Part]:
    """Factored leaves one by one, columns of the others side by side."""
    alike = (rows.leaves, rows.operands) == (cols.leaves, cols.operands)
    runs: list[tuple[int, int]] = []
    for leaf in (rows.leaves[index] for index in leaves):
        if alike and not leaf.dense:
            if leaf.size:
                yield _Factors(rows, cols, leaf, memory)
        elif runs and runs[-1][1] == leaf.offset:
            runs[-1] = (runs[-1][0], leaf.offset + leaf.size)
        elif leaf.size:
            runs.append((leaf.offset, leaf.offset + leaf.size))
    for first, last in runs:
        yield from _slabs(rows, cols, first, last, memory)


class _Part(Protocol):
    """Some columns of J on both sides, a few examples at a time; their numbers are to be multiplied by `scale`."""

    size: int
    scale: float

    def blocks(self, side: int) -> Iterator[tuple[int, int, Any]]:
        """First and last example of each block, and its rows in the part's own form."""

    def pull(self, block: Any, weights: np.ndarray) -> np.ndarray:
        """`sum_nk weights[n, k] row[n, k]`, `(size,)`."""

    def push(self, block: Any, sums: np.ndarray) -> np.ndarray:
        """Rows times `(r, size)`: `(n, K, r)`."""

    def pick(self, block: Any, first: int, last: int, outputs: slice) -> Any:
        """Some examples and outputs of a block."""

    def rows(self, block: Any) -> np.ndarray:
        """Rows `(n, K, size)`."""

    def outputs(self, block: Any) -> int:
        """Outputs of a block."""


def _add(values: ReferenceValues, part: _Part, query: Query, memory: int) -> None:
    examples = _Examples(part, query.entries)
    if query.mode.within_examples:
        for a, b, block in part.blocks(0):
            examples.keep(0, a, b, block)
            for n in range(a, b):
                one = part.pick(block, n - a, n - a + 1, slice(None))
                sums = part.pull(one, query.weights[n : n + 1])
                values.products[n] += part.scale**2 * part.push(one, sums[None])[0]
    else:
        width = max(1, Budget(memory).split(**VERIFY)["sums"] // (8 * part.size))
        crossed = query.mode.crosses_outputs
        turns = [slice(None)] if crossed else [slice(k, k + 1) for k in range(query.weights.shape[1])]
        for first in range(0, len(query.ranges), width):
            ranges = query.ranges[first : first + width]
            for outputs in turns:
                sums = _pulled(part, query.weights, ranges, outputs, examples)
                for a, b, block in part.blocks(0):
                    examples.keep(0, a, b, block)
                    pushed = part.scale**2 * part.push(part.pick(block, 0, b - a, outputs), sums)
                    to = slice(None) if query.mode.sums_outputs else outputs
                    values.products[a:b, to, first : first + width] += pushed
    values.entries += part.scale**2 * examples.products(query.mode)


def _pulled(
    part: _Part, weights: np.ndarray, ranges: Sequence[tuple[int, int]], outputs: slice, examples: _Examples
) -> np.ndarray:
    """`Jᵀ z` for each range of examples, `(ranges, size)`."""
    sums = np.zeros((len(ranges), part.size))
    for a, b, block in part.blocks(1):
        examples.keep(1, a, b, block)
        for at, (first, last) in enumerate(ranges):
            c, d = max(a, first), min(b, last)
            if c < d:
                sums[at] += part.pull(part.pick(block, c - a, d - a, outputs), weights[c:d, outputs])
    return sums


class _Examples:
    """Rows of the examples whose kernel entries are asked for."""

    def __init__(self, part: _Part, entries: Sequence[tuple[int, int, int, int]]) -> None:
        self.part, self.entries = part, entries
        self.needed = ({n for n, _, _, _ in entries}, {m for _, _, m, _ in entries})
        self.kept: tuple[dict[int, Any], dict[int, Any]] = ({}, {})

    def keep(self, side: int, a: int, b: int, block: Any) -> None:
        for n in self.needed[side]:
            if a <= n < b and n not in self.kept[side]:
                picked = self.part.pick(block, n - a, n - a + 1, slice(None))
                # Copies: views would keep all of the block.
                whole = isinstance(picked, np.ndarray)
                self.kept[side][n] = picked.copy() if whole else {name: v.copy() for name, v in picked.items()}

    def products(self, mode: Mode) -> np.ndarray:
        values = np.zeros(len(self.entries))
        for at, (n, k, m, o) in enumerate(self.entries):
            left, right = self.kept[0][n], self.kept[0 if mode.within_examples else 1][m]
            pairs = [(p, p) for p in range(self.part.outputs(left))] if mode.sums_outputs else [(k, o)]
            for p, q in pairs:
                one = self.part.rows(self.part.pick(left, 0, 1, slice(p, p + 1)))
                other = self.part.rows(self.part.pick(right, 0, 1, slice(q, q + 1)))
                values[at] += one.reshape(-1) @ other.reshape(-1)
        return values


class _Slab:
    """Some columns of the stored rows of all examples, in memory."""

    scale = 1.0

    def __init__(self, sides: tuple[np.ndarray, np.ndarray]) -> None:
        self.sides, self.size = sides, sides[0].shape[2]

    def blocks(self, side: int) -> Iterator[tuple[int, int, np.ndarray]]:
        yield 0, len(self.sides[side]), self.sides[side]

    def pull(self, block: np.ndarray, weights: np.ndarray) -> np.ndarray:
        return weights.reshape(-1) @ block.reshape(-1, self.size)

    def push(self, block: np.ndarray, sums: np.ndarray) -> np.ndarray:
        return (block.reshape(-1, self.size) @ sums.T).reshape(*block.shape[:2], len(sums))

    def pick(self, block: np.ndarray, first: int, last: int, outputs: slice) -> np.ndarray:
        return block[first:last, outputs]

    def rows(self, block: np.ndarray) -> np.ndarray:
        return block

    def outputs(self, block: np.ndarray) -> int:
        return block.shape[1]


def _slabs(rows: JacobianStore, cols: JacobianStore, first: int, last: int, memory: int) -> Iterator[_Slab]:
    """Columns of J, as many whole pieces at a time as the memory holds of all examples."""
    stores = [rows] if cols is rows else [rows, cols]
    piece = rows.side.piece_columns
    column = 8 * sum(store.n_examples * store.n_outputs for store in stores)
    width = max(1, Budget(memory).split(**VERIFY)["rows"] // SLABS_ALIVE // column // piece) * piece
    # Pieces are counted among the columns that are stored as rows.
    shift = next(
        (f.dense.start - f.offset for f in rows.leaves if f.dense and f.offset <= first < f.offset + f.size), 0
    )
    borders = [first, *range((first + shift) // piece * piece + width - shift, last, width), last]
    for a, b in itertools.pairwise(borders):
        read = [np.empty((store.n_examples, store.n_outputs, b - a)) for store in stores]
        for store, out in zip(stores, read, strict=True):
            store.read_rows(0, store.n_examples, a, b, out)
            out[store.nonfinite_examples] = 0
        yield _Slab((read[0], read[-1]))


class _Factors:
    """A factored leaf; single products are never expanded, sums of several are, a few examples at a time."""

    def __init__(self, rows: JacobianStore, cols: JacobianStore, leaf: Leaf, memory: int) -> None:
        self.stores, self.leaf, self.memory = (rows, cols), leaf, memory
        term = leaf.factored[0]
        self.term = term if len(leaf.terms) == 1 and term.in_verify and term.scale else None
        self.scale = 1.0 if self.term is None else term.scale
        self.size = leaf.size
        self.cotangents = {term.cotangents for term in leaf.factored}

    def blocks(self, side: int) -> Iterator[tuple[int, int, dict[str, np.ndarray]]]:
        store = self.stores[side]
        numbers = sum(math.prod(store.layouts[operand_array(name)].shape[1:]) for name in self.leaf.operands)
        if self.term is None:
            numbers += 2 * store.n_outputs * self.leaf.size
        at_once = max(1, Budget(self.memory).split(**VERIFY)["rows"] // SLABS_ALIVE // (24 * numbers))
        for unit in range(store.n_units):
            start, stop = store.unit_range(unit)
            whole = {name: store.read_operand(name, start, stop) for name in self.leaf.operands}
            for n in store.unit(unit).nonfinite_examples:
                for values in whole.values():
                    values[n - start] = 0
            for a in range(start, stop, at_once):
                b = min(a + at_once, stop)
                yield a, b, {name: _wide(values[a - start : b - start]) for name, values in whole.items()}

    def pick(self, block: Any, first: int, last: int, outputs: slice) -> Any:
        return {
            name: values[first:last, outputs] if name in self.cotangents else values[first:last]
            for name, values in block.items()
        }

    def outputs(self, block: Any) -> int:
        return int(block[next(iter(self.cotangents))].shape[1])

    def rows(self, block: Any) -> np.ndarray:
        made: np.ndarray = expand(self.leaf.terms, block, self.leaf.size)
        return made / self.scale

    def pull(self, block: Any, weights: np.ndarray) -> np.ndarray:
        if self.term is None:
            return weights.reshape(-1) @ self.rows(block).reshape(-1, self.size)
        d = np.einsum("nk,nkgtd->ngtd", weights, block[self.term.cotangents])
        return self.term.summed_row(block, d)

    def push(self, block: Any, sums: np.ndarray) -> np.ndarray:
        if self.term is None:
            rows = self.rows(block)
            return (rows.reshape(-1, self.size) @ sums.T).reshape(*rows.shape[:2], len(sums))
        d = block[self.term.cotangents]
        pushed = np.empty((*d.shape[:2], len(sums)))
        for at, one in enumerate(sums):
            pushed[..., at] = np.einsum("ngtd,nkgtd->nk", self.term.met(block, one, d), d)
        return pushed


def _wide(values: np.ndarray) -> np.ndarray:
    return values if values.dtype.kind == "i" else values.astype(np.float64)
