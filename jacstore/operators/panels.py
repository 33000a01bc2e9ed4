"""Multiply panels of J by columns, or sum products with them into columns.

A panel is a slab of columns stored as rows, or the leaves that share factors. Panels partition what is stored, so that
reading each of them once for all examples is one pass over J.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from jacstore.base.limits import LIMITS
from jacstore.kernels.plan.steps import sharing
from jacstore.store.reader import JacobianStore
from jacstore.terms.kinds import Leaf, expand
from jacstore.terms.matrix_products import TermProduct, term_products

Held = Mapping[str, np.ndarray]
Empty = Callable[..., np.ndarray]


class Panel(Protocol):
    """Columns of J read together.

    Attributes
    ----------
    numbers, arrays
        Numbers read for each example, and the arrays that they stand in.
    width
        Columns of the operator.
    """

    @property
    def numbers(self) -> int: ...
    @property
    def arrays(self) -> int: ...
    @property
    def width(self) -> int: ...
    def scratch(self, n_columns: int) -> int:
        """Numbers of intermediate products."""

    def extra(self, n_columns: int) -> int:
        """Numbers of sums that cannot be formed where the result is."""

    def read(self, store: JacobianStore, start: int, stop: int, dtype: np.dtype[Any], empty: Empty) -> Held:
        """What is stored about examples `start` to `stop`, in memory that `empty` gives."""

    def load(self, columns: np.ndarray, dtype: np.dtype[Any]) -> Any:
        """The panel's part of columns `(P, m)` in the form that `times` multiplies with."""

    def times(self, held: Held, loaded: Any, into: np.ndarray) -> None:
        """Add the product of rows with loaded columns to `into` `(n, K, m)`, float64."""

    def rows(self, held: Held, into: np.ndarray) -> None:
        """Form the rows in `into` `(n, K, P)`, zero so far."""

    def sums(self, out: np.ndarray) -> Any:
        """Where products of the transpose are summed, in `out` `(P, m)` if that can be."""

    def add_transposed(self, held: Held, weights: np.ndarray, sums: Any) -> None:
        """Add the product of the rows' transpose with `weights` `(n, K, m)`."""

    def finish(self, sums: Any, out: np.ndarray) -> None:
        """Bring sums that stand elsewhere to `out` `(P, m)`."""


@dataclass(frozen=True, kw_only=True)
class RowPanel:
    """Columns `first` to `last` of the stored rows; `places` says which of them are which columns of the operator."""

    first: int
    last: int
    n_outputs: int
    # (first, last, column): columns of the panel and where the operator has them
    places: tuple[tuple[int, int, int], ...]

    @property
    def numbers(self) -> int:
        return (self.last - self.first) * self.n_outputs

    @property
    def arrays(self) -> int:
        return 1

    @property
    def width(self) -> int:
        return self.last - self.first

    def scratch(self, n_columns: int) -> int:
        return (self.last - self.first) * n_columns

    def extra(self, n_columns: int) -> int:
        return 0

    def read(self, store: JacobianStore, start: int, stop: int, dtype: np.dtype[Any], empty: Empty) -> Held:
        rows = empty((stop - start, self.n_outputs, self.last - self.first), dtype)
        store.read("rows", start, stop, self.first, self.last, rows)
        return {"rows": rows}

    def load(self, columns: np.ndarray, dtype: np.dtype[Any]) -> np.ndarray:
        # Leaves that were left out may lie between: their rows count for nothing.
        loaded = np.zeros((self.last - self.first, columns.shape[1]), dtype)
        for a, b, column in self.places:
            loaded[a:b] = columns[column : column + b - a]
        return loaded

    def times(self, held: Held, loaded: np.ndarray, into: np.ndarray) -> None:
        rows = held["rows"].reshape(-1, self.last - self.first)
        flat = into.reshape(len(rows), -1)
        for a in range(0, rows.shape[1], LIMITS.slab_columns):
            flat += np.matmul(rows[:, a : a + LIMITS.slab_columns], loaded[a : a + LIMITS.slab_columns])

    def rows(self, held: Held, into: np.ndarray) -> None:
        for a, b, column in self.places:
            into[..., column : column + b - a] = held["rows"][..., a:b]

    def sums(self, out: np.ndarray) -> np.ndarray:
        return out

    def add_transposed(self, held: Held, weights: np.ndarray, sums: np.ndarray) -> None:
        rows = held["rows"].reshape(-1, self.last - self.first)
        flat = weights.reshape(len(rows), -1)
        for n in range(0, len(rows), LIMITS.product_depth):
            part = np.matmul(rows[n : n + LIMITS.product_depth].T, flat[n : n + LIMITS.product_depth])
            for a, b, column in self.places:
                sums[column : column + b - a] += part[a:b]

    def finish(self, sums: np.ndarray, out: np.ndarray) -> None:
        pass


@dataclass(frozen=True, kw_only=True)
class FactorPanel:
    """Leaves that share factors, none of them formed as rows."""

    names: tuple[str, ...]
    terms: tuple[TermProduct, ...]
    numbers: int
    width: int

    @property
    def arrays(self) -> int:
        return len(self.names)

    def scratch(self, n_columns: int) -> int:
        return max(term.scratch(n_columns) for term in self.terms)

    def extra(self, n_columns: int) -> int:
        return sum(term.summed * n_columns for term in self.terms if not _direct(term, n_columns))

    def read(self, store: JacobianStore, start: int, stop: int, dtype: np.dtype[Any], empty: Empty) -> Held:
        return {name: store.read_operand(name, start, stop, dtype, empty) for name in self.names}

    def load(self, columns: np.ndarray, dtype: np.dtype[Any]) -> list[list[np.ndarray]]:
        blocks = [term.blocks(columns.shape[1]) for term in self.terms]
        return [
            [term.matrices(columns[term.offset : term.offset + term.size, at], dtype) for at in spans]
            for term, spans in zip(self.terms, blocks, strict=True)
        ]

    def times(self, held: Held, loaded: list[list[np.ndarray]], into: np.ndarray) -> None:
        for term, blocks in zip(self.terms, loaded, strict=True):
            for at, matrices in zip(term.blocks(into.shape[2]), blocks, strict=True):
                term.times(held, matrices, into[..., at])

    def rows(self, held: Held, into: np.ndarray) -> None:
        for term in self.terms:
            into[..., term.offset : term.offset + term.size] += expand((term.term,), held, term.size)

    def sums(self, out: np.ndarray) -> list[list[np.ndarray]]:
        found = []
        for term in self.terms:
            groups, inputs, width = term.shape
            if _direct(term, out.shape[1]):
                place = out[term.offset : term.offset + term.size]
                found.append([place.reshape(groups, inputs, width * out.shape[1])])
            else:
                spans = term.blocks(out.shape[1])
                found.append([np.zeros((groups, inputs, width * (at.stop - at.start))) for at in spans])
        return found

    def add_transposed(self, held: Held, weights: np.ndarray, sums: list[list[np.ndarray]]) -> None:
        for term, blocks in zip(self.terms, sums, strict=True):
            for at, total in zip(term.blocks(weights.shape[2]), blocks, strict=True):
                term.add_transposed(held, weights[..., at], total)

    def finish(self, sums: list[list[np.ndarray]], out: np.ndarray) -> None:
        for term, blocks in zip(self.terms, sums, strict=True):
            if not _direct(term, out.shape[1]):
                for at, total in zip(term.blocks(out.shape[1]), blocks, strict=True):
                    out[term.offset : term.offset + term.size, at] += term.columns(total)


def _direct(term: TermProduct, n_columns: int) -> bool:
    """Whether a term's sums can be formed in the result itself."""
    return term.in_place and len(term.blocks(n_columns)) == 1


def chosen_leaves(store: JacobianStore, select: Callable[[str], bool]) -> list[tuple[Leaf, int]]:
    """The leaves whose path is selected, each with its first column among them."""
    found, column = [], 0
    for leaf in store.leaves:
        if select(leaf.path):
            found.append((leaf, column))
            column += leaf.size
    return found


def panels(store: JacobianStore, leaves: Sequence[tuple[Leaf, int]], slab_columns: int, room: int) -> list[Panel]:
    """Panels of chosen leaves: slabs of about `slab_columns` stored columns in whole pieces, then sets of factors.

    Intermediate products of factors take about `room` numbers.
    """
    found: list[Panel] = []
    if "rows" in store.layouts:
        piece = store.layouts["rows"].piece[2]
        step = piece * max(1, slab_columns // piece)
        for start in range(0, store.n_columns, step):
            places = []
            for leaf, column in leaves:
                if leaf.dense is None:
                    continue
                a, b = max(start, leaf.dense.start), min(start + step, leaf.dense.start + leaf.size)
                if a < b:
                    places.append((a, b, column + a - leaf.dense.start))
            if places:
                first, last = min(a for a, _, _ in places), max(b for _, b, _ in places)
                found.append(
                    RowPanel(
                        first=first,
                        last=last,
                        n_outputs=store.n_outputs,
                        places=tuple((a - first, b - first, column) for a, b, column in places),
                    )
                )
    operands = {operand.name: operand for operand in store.operands}
    for members, names in sharing([leaf for leaf, _ in leaves]):
        terms = [product for n in members for product in term_products(*leaves[n], operands, room)]
        found.append(
            FactorPanel(
                names=names,
                terms=tuple(terms),
                numbers=sum(operands[name].numbers(store.n_outputs) for name in names),
                width=sum(leaves[n][0].size for n in members),
            )
        )
    return found
