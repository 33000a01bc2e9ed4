"""The diagonal of a symmetric kernel against the exact squared norms of its rows."""

from __future__ import annotations

import math
from functools import cached_property
from typing import Any

import numpy as np

from jacstore.base.precision import ROUNDOFF, norm_bound, squares_bound
from jacstore.errors import DamagedDataError
from jacstore.kernels.kernel import Kernel
from jacstore.store.arrays import operand_array
from jacstore.store.norms import allowance, largest_difference
from jacstore.store.reader import JacobianStore


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
        """The exact diagonal of tile (i, i), in the shape of its mode."""
        a, b = self.plan.rows.examples(self.plan.tile, i, i + 1)
        found = self.norms[a:b, :, leaf] if self.by_leaf else self.norms[a:b].sum(-1)
        return np.ascontiguousarray(self.plan.mode.on_diagonal(found))

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
        n, outputs = self.plan.mode.row_on_diagonal(at, self.plan.n_outputs)
        return self.plan.rows.examples(self.plan.tile, i, i + 1)[0] + n, outputs

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
