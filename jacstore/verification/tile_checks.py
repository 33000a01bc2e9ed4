"""Checks of tiles as they are read, each by itself and against what the stores say that it should give."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np

from jacstore.base.modes import Mode
from jacstore.base.precision import ROUNDOFF, SIGMAS, product_bound, rounding_error, squares_bound
from jacstore.errors import DamagedDataError
from jacstore.kernels.diagonal import Diagonal, diagonal_of, longest_sum
from jacstore.kernels.kernel import Kernel
from jacstore.store.reader import JacobianStore
from jacstore.verification.reference import Query, ReferenceValues
from jacstore.verification.report import Tally

# The error of `J (Jᵀ z)` in float64 itself.
REFERENCE = 64 * ROUNDOFF["float64"]


@dataclass(kw_only=True)
class TileFindings:
    """Findings from a kernel's tiles: those found wrong by (array, i, j), True where their bytes match the record."""

    bad: dict[tuple[int, int, int], bool] = field(default_factory=dict)
    frobenius: float = 0.0
    largest_norm: float = 0.0


@dataclass(frozen=True, kw_only=True)
class EntryBounds:
    """Bounds on the error of an entry against the stored rows: relative to `sqrt(G_ii G_jj)`, and to `|G_ij|`.

    The second matters for nearly parallel rows: their products have one sign, so that partial sums are as large as the
    entry and roundings may all go to one side, as on the diagonal.
    """

    error: float
    one_sided: float

    @classmethod
    def of(cls, kernel: Kernel, stores: list[JacobianStore]) -> EntryBounds:
        """Bounds from a kernel's precision and its stores' rounding; worst cases if there is no store."""
        columns = longest_sum(stores[0]) if stores else 2**31
        amplified = max((store.rounding["amplification"] for store in stores), default=1.0)
        error = product_bound(kernel.precision, kernel.engine, columns) * amplified + ROUNDOFF[kernel.dtype.name]
        if kernel.rounded_to:
            error += max((rounding_error(kernel.rounded_to, store.rounding)[0] for store in stores), default=1.0)
        return cls(error=error, one_sided=squares_bound(kernel.precision, kernel.engine, columns) * amplified)

    def worst(self, off: np.ndarray, scale: np.ndarray, error: float, size: np.ndarray) -> tuple[float, float]:
        """The difference that is largest against its bound, and the bound, both relative to `scale`.

        A difference may be `error` of the scale and `one_sided` of the size.
        """
        scale = np.where(scale > 0, scale, np.finfo(float).tiny)
        figures = np.where(off == 0, 0.0, off / scale)
        bounds = error + self.one_sided * np.where(np.isfinite(size), size / scale, 1.0)
        if not figures.size:
            return 0.0, error
        at = np.unravel_index(np.argmax(figures / bounds), figures.shape)
        return float(figures[at]), float(bounds[at])


class StoreValues:
    """The values that the tiles of one array should give."""

    def __init__(
        self,
        *,
        query: Query,
        values: ReferenceValues,
        norms: tuple[np.ndarray, np.ndarray],
        spans: list[tuple[int, int]],
        known: tuple[set[int], set[int]],
        diagonal: Diagonal | None,
    ) -> None:
        self.query, self.values, self.norms, self.spans, self.known = query, values, norms, spans, known
        self.diagonal = diagonal
        self.products, self.squares = np.zeros_like(values.products), np.zeros_like(values.products)

    @property
    def scales(self) -> tuple[np.ndarray, np.ndarray]:
        """`(N, K)` squared norms of rows and of columns, K = 1 for trace."""
        left, right = map(self.query.mode.over_outputs, self.norms)
        return left, right


class TileChecks:
    """Tiles of one array as they are read."""

    def __init__(
        self,
        kernel: Kernel,
        index: int,
        expected: StoreValues | None,
        bounds: EntryBounds,
        findings: TileFindings,
        tallies: dict[str, Tally],
    ) -> None:
        self.kernel, self.index, self.expected, self.bounds = kernel, index, expected, bounds
        self.findings, self.tallies, self.plan = findings, tallies, kernel.plan

    def read(self, i: int, j: int) -> None:
        """Check the bytes of a tile, then its symmetry, diagonal and entries."""
        where = f"{self.kernel.path}: {self.kernel.named(self.index, i, j)}"
        try:
            tile, mirror = self.kernel.checked_tile(self.index, i, j)
        except DamagedDataError as error:
            self.tallies["checksums"].fault(f"{where}: {error}; run the same gram again to recompute this tile")
            self._wrong(i, j, False)
            return
        pairs = [(tile, mirror)] if mirror is not None else []
        if self.plan.symmetric and i == j:
            pairs.append((tile, np.swapaxes(tile, -1, -2)))
        for one, other in pairs:
            if not np.array_equal(_bits(one), _bits(other)):
                self.tallies["symmetry"].fault(f"{where} is not the mirror of its counterpart")
                self._wrong(i, j, True)
        tile = np.asarray(tile, np.float64)
        times = 2 if self.plan.symmetric and i != j else 1
        squares = np.square(tile)
        self.findings.frobenius += times * float(squares.sum())
        if self.plan.symmetric and i == j:
            self.findings.largest_norm = max(self.findings.largest_norm, float(diagonal_of(tile).max(initial=0)))
        if self.expected is not None:
            self._diagonal(self.expected, i, j, tile, where)
            self._entries(self.expected, i, j, tile, where)
            self._multiply(self.expected.products, i, j, tile, self.expected.query.weights)
            # A bound for roundings of the products to one side: weights have random signs.
            self._multiply(self.expected.squares, i, j, squares, np.square(self.expected.query.weights))

    def _wrong(self, i: int, j: int, as_recorded: bool) -> None:
        self.findings.bad[self.index, i, j] = as_recorded

    def _diagonal(self, expected: StoreValues, i: int, j: int, tile: np.ndarray, where: str) -> None:
        if expected.diagonal is None or i != j:
            return
        figure, bound, what = expected.diagonal.compare(self.index, i, tile)
        tally = self.tallies["diagonal"]
        if not tally.see(figure, bound, f"{where}: {what}"):
            self._wrong(i, j, True)

    def _entries(self, expected: StoreValues, i: int, j: int, tile: np.ndarray, where: str) -> None:
        a, b = self.plan.rows.examples(self.plan.tile, i, i + 1)
        c, d = self.plan.cols.examples(self.plan.tile, j, j + 1)
        scales = expected.scales
        for at, (n, k, m, o) in enumerate(expected.query.entries):
            if not (a <= n < b and c <= m < d) or (self.kernel.exact_diagonal and (n, k) == (m, o)):
                continue
            place = self.plan.mode.entry(n - a, k, m - c, o, self.plan.n_outputs)
            scale = math.sqrt(scales[0][n, k] * scales[1][m, o])
            off = np.abs(tile[place] - expected.values.entries[at])
            size = np.abs(expected.values.entries[at])
            fine = self.tallies["entries"].see(
                *self.bounds.worst(off, np.array(scale), self.bounds.error + REFERENCE, size),
                f"{where}: entry of example {n}, output {k} with example {m}, output {o}",
            )
            if not fine:
                self._wrong(i, j, True)

    def _multiply(self, into: np.ndarray, i: int, j: int, tile: np.ndarray, weights: np.ndarray) -> None:
        """Add the products of a tile, and of its mirror image, with the weights of their columns."""
        assert self.expected is not None
        rows = self.plan.rows.examples(self.plan.tile, i, i + 1)
        cols = self.plan.cols.examples(self.plan.tile, j, j + 1)
        if any(self.expected.known):
            tile = np.where(np.isfinite(tile), tile, 0.0)
        into[slice(*rows), :, self._span(self.expected, j)] += self._times(tile, weights[slice(*cols)])
        if self.plan.symmetric and i != j:
            mirrored = self._times(np.swapaxes(tile, -1, -2), weights[slice(*rows)])
            into[slice(*cols), :, self._span(self.expected, i)] += mirrored

    def _span(self, expected: StoreValues, j: int) -> int:
        if self.plan.mode.within_examples:
            return 0
        return next(at for at, (first, last) in enumerate(expected.spans) if first <= j < last)

    def _times(self, tile: np.ndarray, weights: np.ndarray) -> np.ndarray:
        """A tile times weights `(m, K)`: `(n, K)`, K = 1 for trace."""
        mode = self.plan.mode
        if mode.is_matrix:
            per_example = mode.rows_per_example(self.plan.n_outputs)
            return (tile @ weights[:, :per_example].reshape(-1)).reshape(-1, per_example)
        # A stack has a matrix for each example, or for each output.
        vectors = weights if mode.within_examples else weights.T
        products: np.ndarray = np.matmul(tile, vectors[:, :, None])[..., 0]
        return products if mode.within_examples else products.T

    def compare(self, tally: Tally) -> None:
        """Compare the products of tiles with those of the stored rows, range by range."""
        expected = self.expected
        if expected is None:
            return
        left, right = expected.scales
        weights = expected.query.weights[:, : right.shape[1]]
        weighted = np.where(weights == 0, 0.0, right * np.square(weights))
        bound = self.bounds.error + REFERENCE
        off = np.abs(expected.products - expected.values.products)
        within = self.plan.mode.within_examples
        for at, (first, last) in enumerate([(0, 1)] if within else expected.spans):
            for i in range(self.plan.grid[0]):
                tiles = [(i, i)] if within else [(i, j) for j in range(first, last)]
                stored = [(min(t), max(t)) if self.plan.symmetric else t for t in tiles]
                if any(self.findings.bad.get((self.index, *t)) is False for t in stored):
                    continue
                a, b = self.plan.rows.examples(self.plan.tile, i, i + 1)
                scale = self._scale(left[a:b], weighted, expected.query.ranges[at], (a, b))
                difference = off[a:b, :, at].copy()
                difference[[n - a for n in expected.known[0] if a <= n < b]] = 0
                # With random signs, such a sum is at most so many standard deviations, or the sum of all its terms.
                deviations = min(SIGMAS, math.sqrt(weighted.size))
                size = deviations * np.sqrt(expected.squares[a:b, :, at])
                figure, most = self.bounds.worst(difference, scale, bound, size)
                named = ", ".join(f"({p}, {q})" for p, q in stored)
                if not tally.see(figure, most, f"{self.kernel.path}: tile {named}{self._of()}"):
                    for t in stored:
                        self._wrong(*t, True)

    def _of(self) -> str:
        return f" of leaf {self.kernel.leaves[self.index]}" if self.kernel.leaves else ""

    def _scale(
        self, left: np.ndarray, weighted: np.ndarray, columns: tuple[int, int], rows: tuple[int, int]
    ) -> np.ndarray:
        """The scale of errors, `sqrt(G_ii sum_j G_jj z_j²)`, `(n, K)`."""
        mode = self.plan.mode
        met = weighted[slice(*(rows if mode.within_examples else columns))]
        # The sum over j runs over the examples and the outputs that a row is paired with.
        axes = [axis for axis, paired in enumerate((not mode.within_examples, mode.crosses_outputs)) if paired]
        scale: np.ndarray = np.sqrt(left * met.sum(tuple(axes), keepdims=True))
        return scale


def outer_norms(mode: Mode, one: np.ndarray, other: np.ndarray) -> np.ndarray:
    """Products of norms of rows in the shape of a tile, from squared norms `(n, K)` and `(m, K)`."""
    left, right = (np.sqrt(mode.on_diagonal(squares)) for squares in (one, other))
    products: np.ndarray = left[..., :, None] * right[..., None, :]
    return products


def squared_norms(store: JacobianStore, leaf: int | None) -> np.ndarray:
    """Squared norms `(N, K)` of all of a row or of one leaf's part."""
    found = store.norms
    return np.nan_to_num(found.sum(-1) if leaf is None else found[..., leaf])


def _bits(values: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(values).view(np.uint64 if values.dtype.itemsize == 8 else np.uint32)
