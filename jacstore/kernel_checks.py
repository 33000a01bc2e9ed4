"""In: a kernel and, if it is there, its store. Out: checks of every tile, and of the whole against what is stored.

Tiles are read once: every byte, symmetry, the diagonal against the exact norms, random entries, and products of tiles
with random weights against `J (Jᵀ z)`, which find any wrong tile with probability near 1 and name it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import scipy.linalg

from jacstore.bounds import ROUNDOFF, SIGMAS, product_bound, rounding_error, squares_bound
from jacstore.errors import Damaged, JacstoreError
from jacstore.kernel import Kernel
from jacstore.norms import Diagonal, diagonal_of, stored_norms
from jacstore.products import Found, Wanted, stream
from jacstore.report import FAILED, OK, Check, Tally, skipped
from jacstore.store import JacobianStore

VALUES = ("diagonal", "entries", "products with random weights")
EIGENVALUES = ("largest eigenvalue", "smallest eigenvalue")
# Ranges of tiles that weights are restricted to; more would cost more than they tell.
MOST_RANGES = 64
# Kernels of up to this many rows are decomposed; of larger ones so many steps of Lanczos are taken.
DECOMPOSED, LANCZOS_STEPS = 2000, 16
# What `J (Jᵀ z)` in float64 is off itself.
REFERENCE = 64 * ROUNDOFF["float64"]


class KernelChecks:
    """Checks of a kernel; `stores` are those of its rows and columns, or None with the reason in `why`.

    Attributes
    ----------
    bad
        Tiles (array, i, j) found wrong: True where the bytes are those recorded.
    store_fault
        Why the store could not be read, if so.
    """

    def __init__(self, kernel: Kernel, stores: list[JacobianStore] | None, why: str, memory: int) -> None:
        self.kernel, self.stores, self.why, self.memory = kernel, stores, why, memory
        self.plan = kernel.plan
        self.bad: dict[tuple[int, int, int], bool] = {}
        self.store_fault = ""
        self.frobenius = 0.0
        self.largest_norm = 0.0
        self.error, self.one_sided = self._entry_errors()

    def _entry_errors(self) -> tuple[float, float]:
        """Errors that add up in a right entry against the stored rows: relative to `sqrt(G_ii G_jj)`, and to `|G_ij|`.

        The second is that of rows which are nearly parallel: their products are of one sign, so that partial sums are
        as large as the entry and roundings may all go to one side, as they do on the diagonal.
        """
        kernel, stores = self.kernel, self.stores or []
        columns = stores[0].n_parameters if stores else 2**31
        amplified = max((store.rounding["amplification"] for store in stores), default=1.0)
        error = product_bound(kernel.precision, kernel.engine, columns) * amplified + ROUNDOFF[kernel.dtype.name]
        if kernel.rounded_to:
            error += max((rounding_error(kernel.rounded_to, store.rounding)[0] for store in stores), default=1.0)
        return error, squares_bound(kernel.precision, kernel.engine, columns) * amplified

    def run(self, samples: int, draw: np.random.Generator) -> Iterator[Check]:
        records = self._records()
        yield records
        expected, why = self._expected(samples, draw)
        tallies = {name: Tally(name) for name in ("checksums", "symmetry", "diagonal", "entries")}
        weighted = Tally(VALUES[2])
        for index in range(len(self.kernel.layouts)):
            tiles = _Tiles(self, index, expected[index] if expected else None, tallies)
            for i, j in self._tiles(index):
                tiles.read(i, j)
            tiles.compare(weighted)
        yield tallies["checksums"].done()
        symmetric = self.plan.symmetric
        yield tallies["symmetry"].done() if symmetric else skipped("symmetry", "the kernel is between two stores")
        for tally in (tallies["diagonal"], tallies["entries"], weighted):
            if expected is None:
                yield skipped(tally.name, why)
            elif tally.name == "diagonal" and not symmetric:
                yield skipped(tally.name, "the kernel is between two stores")
            else:
                yield tally.done()
        yield from self._eigenvalues(draw)

    def _tiles(self, index: int) -> Iterator[tuple[int, int]]:
        done = set(self.kernel.ledger.done("tiles"))
        for number, group in enumerate(self.plan.groups):
            if number * len(self.kernel.layouts) + index in done:
                yield from self.plan.tiles_of(group)

    def _records(self) -> Check:
        """Every tile has a record, and records list the files that there have to be, no others."""
        kernel, tally = self.kernel, Tally("records")
        done = set(kernel.ledger.done("tiles"))
        for number in range(len(self.plan.groups) * len(kernel.layouts)):
            group, what = self.plan.groups[number // len(kernel.layouts)], ""
            expected = {name for names in kernel.files_of(number).values() for name in names}
            if number not in done:
                what = "has no record"
            else:
                try:
                    listed = kernel.ledger.read("tiles", number)["files"]
                    if set(listed) != expected:
                        what = f"has a record without {min(expected - set(listed), default='')!r}"
                except (Damaged, KeyError, TypeError) as error:
                    what = f"has a damaged record ({error})"
            if what:
                tally.fault(
                    f"{kernel.path}: the group of tiles {group.rows} x {group.cols} {what}; run the same gram again"
                )
        return tally.done()

    def _expected(self, samples: int, draw: np.random.Generator) -> tuple[list[_Expected] | None, str]:
        """What each array should give for random weights and entries, from the stores; None and why not."""
        if self.stores is None:
            return None, self.why
        try:
            arrays = len(self.kernel.layouts)
            return [self._expected_of(index, -(-samples // arrays), draw) for index in range(arrays)], ""
        except JacstoreError as error:
            self.store_fault = str(error)
            return None, "the store cannot be read"

    def _expected_of(self, index: int, samples: int, draw: np.random.Generator) -> _Expected:
        assert self.stores is not None
        rows, cols = self.stores[0], self.stores[-1]
        m, k = cols.n_examples, rows.n_outputs
        known = [set(store.nonfinite_examples) for store in (rows, cols)]
        weights = draw.choice([-1.0, 1.0], (m, k)) * draw.uniform(0.5, 1.5, (m, k))
        if self.plan.mode == "trace":
            weights[:] = weights[:, :1]
        weights[sorted(known[1])] = 0
        tiles = self.plan.grid[1]
        width = -(-tiles // MOST_RANGES)
        spans = [(a, min(a + width, tiles)) for a in range(0, tiles, width)]
        ranges = tuple(self.plan.cols.examples(self.plan.tile, a, b) for a, b in spans)
        entries = self._chosen(samples, known, draw)
        leaves = [index] if self.kernel.leaves else None
        wanted = Wanted(mode=self.plan.mode, weights=weights, ranges=ranges, entries=entries)
        norms = [_norms(store, index if leaves else None) for store in (rows, cols)]
        found = stream(rows, cols, wanted, self.memory, leaves)
        if self.kernel.exact_diagonal:
            self._exchange_diagonal(found, wanted, spans, leaves)
        return _Expected(
            wanted=wanted,
            found=found,
            norms=(norms[0], norms[1]),
            spans=spans,
            known=(known[0], known[1]),
            diagonal=Diagonal(rows, self.kernel) if self.plan.symmetric else None,
        )

    def _exchange_diagonal(
        self, found: Found, wanted: Wanted, spans: list[tuple[int, int]], leaves: list[int] | None
    ) -> None:
        """Account for a diagonal of exact norms where that of the stored rows would be."""
        assert self.stores is not None
        store = self.stores[0]
        for unit in range(store.n_units):
            start, stop = store.unit_range(unit)
            difference = np.zeros((stop - start, store.n_outputs))
            for index in leaves or range(len(store.leaves)):
                leaf = store.leaves[index]
                difference += store.norms[start:stop, :, index] - stored_norms(store, leaf, start, stop, self.memory)
            change = np.nan_to_num(difference) * wanted.weights[start:stop]
            if wanted.mode == "trace":
                change = change.sum(1, keepdims=True)
            for n in range(start, stop):
                span = next(at for at, (_, b) in enumerate(spans) if n // self.plan.tile < b)
                found.products[n, :, 0 if wanted.mode == "blocks" else span] += change[n - start]

    def _chosen(
        self, samples: int, known: list[set[int]], draw: np.random.Generator
    ) -> tuple[tuple[int, int, int, int], ...]:
        """Random entries (n, k, m, l) of tiles that are stored."""
        rows, cols = self.plan.rows.n_examples, self.plan.cols.n_examples
        found = []
        for _ in range(samples):
            n, m = int(draw.integers(rows)), int(draw.integers(cols))
            k, o = (int(x) for x in draw.integers(self.plan.n_outputs, size=2))
            if self.plan.symmetric and n // self.plan.tile > m // self.plan.tile:
                n, m = m, n
            if self.plan.mode == "blocks":
                m = n
            if self.plan.mode == "trace":
                k = o = 0
            if n not in known[0] and m not in known[1]:
                found.append((n, k, m, k if self.plan.mode == "diagonal" else o))
        return tuple(found)

    def differences(self, again: Kernel) -> Iterator[tuple[tuple[int, int, int], float, float]]:
        """For each tile the difference from another kernel that is largest against its bound, and that bound.

        Both are relative to the norms. The other kernel is one of the same stores.
        """
        assert self.stores is not None
        known = [set(store.nonfinite_examples) for store in (self.stores[0], self.stores[-1])]
        for index in range(len(self.kernel.layouts)):
            left, right = (
                np.sqrt(_norms(store, index if self.kernel.leaves else None))
                for store in (self.stores[0], self.stores[-1])
            )
            for i, j in self._tiles(index):
                if self.bad.get((index, i, j)) is False:
                    continue
                right_one = again.read_tile(index, i, j)
                off = np.abs(self.kernel.read_tile(index, i, j) - right_one)
                if self.kernel.exact_diagonal and i == j:
                    diagonal_of(off)[...] = 0
                a, b = self.plan.rows.examples(self.plan.tile, i, i + 1)
                c, d = self.plan.cols.examples(self.plan.tile, j, j + 1)
                one, other = left[a:b].copy(), right[c:d].copy()
                one[[n - a for n in known[0] if a <= n < b]] = np.inf
                other[[n - c for n in known[1] if c <= n < d]] = np.inf
                scale = _outer(self.kernel.mode, one, other)
                off = np.where(np.isfinite(scale), off, 0.0)
                yield (index, i, j), *self.worst(off, scale, self.error, np.abs(right_one))

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

    # ------------------------------------------------------------------------------------------------- eigenvalues

    def _eigenvalues(self, draw: np.random.Generator) -> Iterator[Check]:
        kernel = self.kernel
        why = ""
        if not self.plan.symmetric:
            why = "the kernel is between two stores"
        elif self.bad or not kernel.complete:
            why = "tiles are missing or wrong"
        elif not math.isfinite(self.frobenius):
            why = "the kernel holds NaN or infinity"
        if why:
            yield from (skipped(name, why) for name in EIGENVALUES)
            return
        lowest, highest, how = _extreme(kernel, draw)
        # Products that round make a right kernel negative by no more than this.
        bound = -self.error * max(highest, self.largest_norm * math.sqrt(kernel.shape[-1]))
        if kernel.exact_diagonal and self.stores:
            bound -= Diagonal(self.stores[0], kernel).bound * self.largest_norm
        unit = ROUNDOFF[kernel.dtype.name] + ROUNDOFF["float64" if kernel.precision == "float64" else "float32"]
        needed = max(0.0, -lowest) + unit * math.sqrt(self.frobenius)
        yield Check(name=EIGENVALUES[0], state=OK, figure=highest, where=how)
        yield Check(
            name=EIGENVALUES[1],
            state=OK if lowest >= bound else FAILED,
            figure=lowest,
            bound=bound,
            where=f"{how}; a Cholesky factorization needs at least about {needed:.2g} added to the diagonal",
        )


class _Expected:
    """What the tiles of one array should give."""

    def __init__(
        self,
        *,
        wanted: Wanted,
        found: Found,
        norms: tuple[np.ndarray, np.ndarray],
        spans: list[tuple[int, int]],
        known: tuple[set[int], set[int]],
        diagonal: Diagonal | None,
    ) -> None:
        self.wanted, self.found, self.norms, self.spans, self.known = wanted, found, norms, spans, known
        self.diagonal = diagonal
        self.products, self.squares = np.zeros_like(found.products), np.zeros_like(found.products)

    def scales(self, mode: str) -> tuple[np.ndarray, np.ndarray]:
        """`(N, K)` norms of rows and of columns, K = 1 for trace."""
        left, right = self.norms
        return (left.sum(1, keepdims=True), right.sum(1, keepdims=True)) if mode == "trace" else (left, right)


class _Tiles:
    """Tiles of one array as they are read."""

    def __init__(self, checks: KernelChecks, index: int, expected: _Expected | None, tallies: dict[str, Tally]) -> None:
        self.checks, self.index, self.expected, self.tallies = checks, index, expected, tallies
        self.kernel, self.plan = checks.kernel, checks.plan

    def read(self, i: int, j: int) -> None:
        """Check the bytes of a tile, then what can be said of it alone."""
        where = f"{self.kernel.path}: {self.kernel.named(self.index, i, j)}"
        try:
            tile, mirror = self.kernel.checked_tile(self.index, i, j)
        except Damaged as error:
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
        self.checks.frobenius += times * float(squares.sum())
        if self.plan.symmetric and i == j:
            self.checks.largest_norm = max(self.checks.largest_norm, float(diagonal_of(tile).max(initial=0)))
        if self.expected is not None:
            self._diagonal(self.expected, i, j, tile, where)
            self._entries(self.expected, i, j, tile, where)
            self._multiply(self.expected.products, i, j, tile, self.expected.wanted.weights)
            # What roundings of the products to one side may amount to: weights have random signs.
            self._multiply(self.expected.squares, i, j, squares, np.square(self.expected.wanted.weights))

    def _wrong(self, i: int, j: int, as_recorded: bool) -> None:
        self.checks.bad[self.index, i, j] = as_recorded

    def _diagonal(self, expected: _Expected, i: int, j: int, tile: np.ndarray, where: str) -> None:
        if expected.diagonal is None or i != j:
            return
        figure, bound, what = expected.diagonal.compare(self.index, i, tile)
        tally = self.tallies["diagonal"]
        if not tally.see(figure, bound, f"{where}: {what}"):
            self._wrong(i, j, True)

    def _entries(self, expected: _Expected, i: int, j: int, tile: np.ndarray, where: str) -> None:
        a, b = self.plan.rows.examples(self.plan.tile, i, i + 1)
        c, d = self.plan.cols.examples(self.plan.tile, j, j + 1)
        scales = expected.scales(self.plan.mode)
        for at, (n, k, m, o) in enumerate(expected.wanted.entries):
            if not (a <= n < b and c <= m < d) or (self.kernel.exact_diagonal and (n, k) == (m, o)):
                continue
            place = {
                "full": ((n - a) * self.plan.n_outputs + k, (m - c) * self.plan.n_outputs + o),
                "trace": (n - a, m - c),
                "diagonal": (k, n - a, m - c),
                "blocks": (n - a, k, o),
            }[self.plan.mode]
            scale = math.sqrt(scales[0][n, k] * scales[1][m, o])
            off = np.abs(tile[place] - expected.found.entries[at])
            size = np.abs(expected.found.entries[at])
            fine = self.tallies["entries"].see(
                *self.checks.worst(off, np.array(scale), self.checks.error + REFERENCE, size),
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

    def _span(self, expected: _Expected, j: int) -> int:
        if self.plan.mode == "blocks":
            return 0
        return next(at for at, (first, last) in enumerate(expected.spans) if first <= j < last)

    def _times(self, tile: np.ndarray, weights: np.ndarray) -> np.ndarray:
        """A tile times weights `(m, K)`: `(n, K)`."""
        mode, k = self.plan.mode, self.plan.n_outputs
        if mode == "full":
            return (tile @ weights.reshape(-1)).reshape(-1, k)
        if mode == "trace":
            return (tile @ weights[:, :1]).reshape(-1, 1)
        product = np.matmul(tile, weights.T[:, :, None] if mode == "diagonal" else weights[:, :, None])[..., 0]
        return product.T if mode == "diagonal" else product

    def compare(self, tally: Tally) -> None:
        """Compare the products of tiles with those of the stored rows, range by range."""
        expected = self.expected
        if expected is None:
            return
        left, right = expected.scales(self.plan.mode)
        weights = expected.wanted.weights[:, : right.shape[1]]
        weighted = np.where(weights == 0, 0.0, right * np.square(weights))
        bound = self.checks.error + REFERENCE
        off = np.abs(expected.products - expected.found.products)
        for at, (first, last) in enumerate(expected.spans if self.plan.mode != "blocks" else [(0, 1)]):
            for i in range(self.plan.grid[0]):
                tiles = [(i, i)] if self.plan.mode == "blocks" else [(i, j) for j in range(first, last)]
                stored = [(min(t), max(t)) if self.plan.symmetric else t for t in tiles]
                if any(self.checks.bad.get((self.index, *t)) is False for t in stored):
                    continue
                a, b = self.plan.rows.examples(self.plan.tile, i, i + 1)
                scale = self._scale(left[a:b], weighted, expected.wanted.ranges[at], (a, b))
                difference = off[a:b, :, at].copy()
                difference[[n - a for n in expected.known[0] if a <= n < b]] = 0
                # Of random signs, such a sum is at most as many standard deviations, or its terms all together.
                deviations = min(SIGMAS, math.sqrt(weighted.size))
                size = deviations * np.sqrt(expected.squares[a:b, :, at])
                figure, most = self.checks.worst(difference, scale, bound, size)
                named = ", ".join(f"({p}, {q})" for p, q in stored)
                if not tally.see(figure, most, f"{self.kernel.path}: tile {named}{self._of()}"):
                    for t in stored:
                        self._wrong(*t, True)

    def _of(self) -> str:
        return f" of leaf {self.kernel.leaves[self.index]}" if self.kernel.leaves else ""

    def _scale(
        self, left: np.ndarray, weighted: np.ndarray, columns: tuple[int, int], rows: tuple[int, int]
    ) -> np.ndarray:
        """What errors are relative to, `sqrt(G_ii sum_j G_jj z_j²)`, `(n, K)`."""
        if self.plan.mode == "blocks":
            total = weighted[slice(*rows)].sum(1, keepdims=True)
        elif self.plan.mode == "diagonal":
            total = weighted[slice(*columns)].sum(0, keepdims=True)
        else:
            total = weighted[slice(*columns)].sum(keepdims=True)
        scale: np.ndarray = np.sqrt(left * total)
        return scale


def _outer(mode: str, one: np.ndarray, other: np.ndarray) -> np.ndarray:
    """Products of norms `(n, K)` and `(m, K)` of rows, in the shape of a tile."""
    if mode == "full":
        return np.outer(one.reshape(-1), other.reshape(-1))
    if mode == "trace":
        return np.outer(np.linalg.norm(one, axis=1), np.linalg.norm(other, axis=1))
    found: np.ndarray = np.einsum("nk,nl->nkl", one, one) if mode == "blocks" else np.einsum("nk,mk->knm", one, other)
    return found


def _norms(store: JacobianStore, leaf: int | None) -> np.ndarray:
    """Squared norms `(N, K)` of all of a row or of one leaf's part."""
    found = store.norms
    return np.nan_to_num(found.sum(-1) if leaf is None else found[..., leaf])


def _bits(values: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(values).view(np.uint64 if values.dtype.itemsize == 8 else np.uint32)


def _extreme(kernel: Kernel, draw: np.random.Generator) -> tuple[float, float, str]:
    """Smallest and largest eigenvalue, or estimates, and how they were found."""
    size = kernel.shape[-1]
    if kernel.mode == "blocks" or size <= DECOMPOSED:
        values = [_decomposed(kernel, at) for at in range(kernel.plan.grid[0] if kernel.mode == "blocks" else 1)]
        return min(low for low, _ in values), max(high for _, high in values), "all eigenvalues computed"
    array = kernel.array if kernel.mode != "diagonal" else kernel.array[0]
    where = " of output 0" if kernel.mode == "diagonal" else ""

    def times(x: np.ndarray) -> np.ndarray:
        product: np.ndarray = (array.astype(np.float64) @ x).compute(scheduler="synchronous")
        return product

    low, high = lanczos(times, draw.normal(size=size), min(LANCZOS_STEPS, size))
    return low, high, f"estimated by {LANCZOS_STEPS} steps of Lanczos{where}"


def _decomposed(kernel: Kernel, at: int) -> tuple[float, float]:
    piece = kernel.layouts[0].piece[0]
    part = kernel.array[at * piece : (at + 1) * piece] if kernel.mode == "blocks" else kernel.array
    values = np.asarray(part.compute(scheduler="synchronous"), np.float64)
    found = np.linalg.eigvalsh(values)
    return float(found.min()), float(found.max())


def lanczos(times: Any, start: np.ndarray, steps: int) -> tuple[float, float]:
    """Extreme Ritz values of a symmetric matrix after some steps from `start`, orthogonalized anew at each.

    They lie inside the spectrum: the smallest eigenvalue is at most the first, the largest at least the second.
    """
    basis = [start / np.linalg.norm(start)]
    diagonal: list[float] = []
    beside: list[float] = []
    for step in range(steps):
        vector = times(basis[-1])
        diagonal.append(float(vector @ basis[-1]))
        known = np.stack(basis)
        for _ in range(2):
            vector = vector - known.T @ (known @ vector)
        length = float(np.linalg.norm(vector))
        if step + 1 == steps or length <= 1e-12 * max(map(abs, diagonal)):
            break
        beside.append(length)
        basis.append(vector / length)
    values = scipy.linalg.eigvalsh_tridiagonal(diagonal, beside[: len(diagonal) - 1])
    return float(values[0]), float(values[-1])
