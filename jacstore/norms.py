"""In: a store. Out: squared norms of its rows from the stored numbers, and how far they may be from the exact ones.

The exact ones were taken on the device before rows were rounded. A kernel's diagonal is compared with them when it is
assembled, and again by `verify`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cached_property
from typing import Any

import numpy as np

from jacstore.bounds import (
    LOST,
    ROUNDOFF,
    compute_dtype,
    lost_to_underflow,
    norm_bound,
    squared_magnitudes,
    squares_bound,
)
from jacstore.contraction import product_numbers, squared_norms
from jacstore.errors import DamagedDataError
from jacstore.kernel import Kernel
from jacstore.store import JacobianStore, operand_array
from jacstore.terms import Conv, Dense, Leaf, expand

# Shares of the memory that decoded rows, and products of pairs of positions, may take.
ROWS_SHARE, PAIRS_SHARE = 8, 16
# Columns of a single row that are read at once.
AT_ONCE = 100_000


def leaf_row(store: JacobianStore, leaf: Leaf, n: int, k: int) -> np.ndarray:
    """One row of one leaf in float64, `(size,)`, made from the stored numbers."""
    if leaf.dense:
        row = np.empty(leaf.size)
        for a in range(0, leaf.size, AT_ONCE):
            b = min(a + AT_ONCE, leaf.size)
            some = np.empty((1, store.n_outputs, b - a))
            store.read("rows", n, n + 1, leaf.dense.start + a, leaf.dense.start + b, some)
            row[a:b] = some[0, k]
        return row
    operands = {name: store.read_operand(name, n, n + 1, np.float64) for name in leaf.operands}
    for term in leaf.terms:
        assert not isinstance(term, Dense)
        if operands[term.cotangents].shape[1] > 1:
            operands[term.cotangents] = operands[term.cotangents][:, k : k + 1]
    made: np.ndarray = expand(leaf.terms, operands, leaf.size)[0, 0]
    return made


def stored_norms(store: JacobianStore, leaf: Leaf, start: int, stop: int, memory: int) -> np.ndarray:
    """Squared norms `(n, K)` of one leaf's rows in float64, from the stored numbers."""
    total = np.zeros((stop - start, store.n_outputs))
    if leaf.dense:
        width = max(1, memory // ROWS_SHARE // (8 * total.size))
        first, last = leaf.dense.start, leaf.dense.start + leaf.size
        for a in range(first, last, width):
            rows = np.empty((*total.shape, min(a + width, last) - a))
            store.read("rows", start, stop, a, a + rows.shape[2], rows)
            total += np.einsum("nkp,nkp->nk", rows, rows)
        return total
    if not leaf.size:
        return total
    operands = {name: store.read_operand(name, start, stop, np.float64) for name in leaf.operands}
    step = max(1, memory // PAIRS_SHARE // _pair_bytes(store, leaf))
    for a in range(0, stop - start, step):
        total[a : a + step] = squared_norms(leaf, {k: v[a : a + step] for k, v in operands.items()}).sum(-1)
    return total


def _pair_bytes(store: JacobianStore, leaf: Leaf) -> int:
    """Bytes that products of one example's factors, or its rows, take in float64."""
    rows = 3 * store.n_outputs * leaf.size
    numbers = sum(math.prod(store.layouts[operand_array(name)].shape[1:]) for name in leaf.operands)
    pairs = 0
    for term in leaf.terms:
        assert not isinstance(term, Dense)
        t = store.layouts[operand_array(term.cotangents)].shape[-2]
        shape = store.layouts[operand_array(term.inputs)].shape[1:] if isinstance(term, Conv) else ()
        inside = product_numbers(term, shape) if isinstance(term, Conv) else t * t
        pairs += 3 * (store.n_outputs * t * t + inside) * len(leaf.terms)
    return 8 * (rows + 2 * numbers + pairs)


def allowance(store: JacobianStore, leaf: Leaf, n: int, k: int, more: float = 0.0) -> float:
    """How far the squared norm of one leaf's row may be from the exact one, from what the row is summed from.

    `more` is a further relative error, of products that form a kernel's diagonal.
    """
    if not leaf.size:
        return 0.0
    operands = {name: store.read_operand(name, n, n + 1, np.float64) for name in leaf.operands}
    if leaf.dense:
        size = float(np.linalg.norm(leaf_row(store, leaf, n, k)))
    else:
        size = math.sqrt(squared_magnitudes(leaf, operands)[0, k])
    lost = lost_to_underflow(leaf, operands, k, store.dtype) + math.sqrt(leaf.size) * LOST[compute_dtype(store.dtype)]
    bound = norm_bound(store.dtype, store.lowest, not leaf.dense) + more
    return bound * size**2 * (1 + 4 * ROUNDOFF[store.dtype]) + 2 * lost * size + lost**2


def largest_difference(
    found: np.ndarray, exact: np.ndarray, bound: float, allowed: Callable[[tuple[int, ...]], float]
) -> tuple[float, float, tuple[int, ...] | None]:
    """The largest relative difference of squared norms, what it may be, and the first place out of bound, or None.

    `allowed` gives the absolute difference that a place beyond `bound` may have, infinite where numbers are known to be
    NaN or infinite: sums that cancel keep the rounding of their terms, so the common bound is not the last word.
    """
    with np.errstate(over="ignore", invalid="ignore"):
        off = np.where(found == exact, 0.0, np.abs(found - exact))
        scale = np.maximum(np.maximum(np.abs(exact), np.abs(found)), np.finfo(float).tiny)
        relative = off / scale
    figure = slack = 0.0
    limit = bound
    for entry in np.argwhere(~(relative <= bound)):
        at = tuple(int(x) for x in entry)
        most = allowed(at)
        if not (off[at] <= most or most == math.inf):
            return float(relative[at]), float(most / scale[at]), at
        if most < math.inf and relative[at] * scale[at] / most > slack:
            figure, limit, slack = float(relative[at]), float(most / scale[at]), float(off[at] / most)
        relative[at] = 0.0
    largest = float(relative.max(initial=0.0))
    return (largest, bound, None) if largest / bound >= slack else (figure, limit, None)


def longest_sum(store: JacobianStore) -> int:
    """Products that an entry of a kernel may be summed from: one per column, or per pair of positions of factors."""
    longest = store.n_parameters
    for leaf in store.leaves:
        numbers = [math.prod(store.layouts[operand_array(name)].shape[1:]) for name in leaf.operands]
        longest = max(longest, sum(numbers) ** 2)
    return longest


class Diagonal:
    """The diagonal of a symmetric kernel, and the exact norms that it should be."""

    def __init__(self, store: JacobianStore, kernel: Kernel) -> None:
        self.store, self.plan, self.by_leaf = store, kernel.plan, bool(kernel.leaves)
        self.more = squares_bound(kernel.precision, kernel.engine, longest_sum(store)) + ROUNDOFF[kernel.dtype.name]
        if kernel.rounded_to:
            self.more += 2 * ROUNDOFF[kernel.rounded_to]
        factored = any(not leaf.dense for leaf in store.leaves)
        self.bound = norm_bound(store.dtype, store.lowest, factored) + self.more

    @cached_property
    def norms(self) -> np.ndarray:
        """Exact squared norms `(N, K, L)`."""
        return self.store.norms

    @cached_property
    def _known(self) -> set[int]:
        """Examples that are known to hold NaN or infinity."""
        return set(self.store.nonfinite_examples)

    def exact(self, leaf: int, i: int) -> np.ndarray:
        """The exact diagonal of tile (i, i): full `(n*K,)`, trace `(n,)`, diagonal `(K, n)`, blocks `(n, K)`."""
        a, b = self.plan.rows.examples(self.plan.tile, i, i + 1)
        found = self.norms[a:b, :, leaf] if self.by_leaf else self.norms[a:b].sum(-1)
        shaped = {"full": found.reshape(-1), "trace": found.sum(-1), "diagonal": found.T, "blocks": found}
        return np.ascontiguousarray(shaped[self.plan.mode])

    def compare(self, leaf: int, i: int, tile: np.ndarray) -> tuple[float, float, str]:
        """The largest relative difference in tile (i, i), what it may be, and where it is out of bound, else "".

        A row that is out of the common bound is looked at by itself: sums that cancel keep the rounding of their terms.
        """
        found, exact = diagonal_of(tile), self.exact(leaf, i)

        def allowed(at: tuple[int, ...]) -> float:
            n, outputs = self._row(i, at)
            return math.inf if n in self._known else sum(self._allowance(leaf, n, k) for k in outputs)

        figure, bound, at = largest_difference(found, exact, self.bound, allowed)
        if at is None:
            return figure, bound, ""
        n, outputs = self._row(i, at)
        place = f"example {n}" if len(outputs) > 1 else f"example {n}, output {outputs[0]}"
        return figure, bound, f"the diagonal at {place} is {found[at]:.9g}, the squared norm {exact[at]:.9g}"

    def _row(self, i: int, at: tuple[int, ...]) -> tuple[int, list[int]]:
        """Example and outputs of a place on the diagonal of tile (i, i)."""
        first, k = self.plan.rows.examples(self.plan.tile, i, i + 1)[0], self.plan.n_outputs
        if self.plan.mode == "full":
            return first + at[0] // k, [at[0] % k]
        if self.plan.mode == "trace":
            return first + at[0], list(range(k))
        return (first + at[1], [at[0]]) if self.plan.mode == "diagonal" else (first + at[0], [at[1]])

    def _allowance(self, leaf: int, n: int, k: int) -> float:
        leaves = [self.store.leaves[leaf]] if self.by_leaf else list(self.store.leaves)
        return sum(allowance(self.store, one, n, k, self.more) for one in leaves)

    def replace(self, leaf: int, i: int, tile: np.ndarray) -> None:
        """Put the exact norms on the diagonal of tile (i, i)."""
        diagonal_of(tile)[...] = self.exact(leaf, i)


def diagonal_of(tile: np.ndarray) -> Any:
    """The diagonal of the last two axes as a view that can be written to."""
    return np.einsum("...ii->...i", tile)


def require_right(found: tuple[float, float, str], where: str) -> float:
    """The figure of a comparison; DamagedDataError if it is out of bound."""
    figure, bound, what = found
    if what:
        raise DamagedDataError(
            f"{where}: {what}, a relative difference of {figure:.2g} where {bound:.2g} is allowed; run the same gram "
            "again to recompute this tile, and verify on the store"
        )
    return figure
