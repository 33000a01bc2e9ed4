"""Checks of every tile of a kernel, and of the whole against its store, if that is there.

Tiles are read once: every byte, symmetry, the diagonal against the exact norms, random entries, and products of tiles
with random weights against `J (Jᵀ z)`, which find any wrong tile with probability near 1 and name it.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from jacstore.base.budget import VERIFY, Budget
from jacstore.errors import DamagedDataError, JacstoreError
from jacstore.kernels.diagonal import Diagonal, diagonal_of
from jacstore.kernels.kernel import Kernel
from jacstore.store.norms import stored_norms
from jacstore.store.reader import JacobianStore
from jacstore.verification.eigenvalue_checks import eigenvalues
from jacstore.verification.reference import Query, ReferenceValues, stream
from jacstore.verification.report import Check, Tally, skipped
from jacstore.verification.tile_checks import (
    EntryBounds,
    StoreValues,
    TileChecks,
    TileFindings,
    outer_norms,
    squared_norms,
)

VALUES = ("diagonal", "entries", "products with random weights")
# Most ranges of tiles that weights are restricted to; more would cost more than they tell.
MOST_RANGES = 64


class KernelChecks:
    """Checks of a kernel; `stores` are those of its rows and columns, or None with the reason in `why`.

    Attributes
    ----------
    findings
        What reading the tiles has shown, including the tiles found wrong.
    store_fault
        Why the store could not be read; empty if it could.
    """

    def __init__(self, kernel: Kernel, stores: list[JacobianStore] | None, why: str, memory: int) -> None:
        self.kernel, self.stores, self.why, self.memory = kernel, stores, why, memory
        self.budget = Budget(memory).split(**VERIFY)
        self.plan = kernel.plan
        self.findings = TileFindings()
        self.store_fault = ""
        self.bounds = EntryBounds.of(kernel, stores or [])

    def run(self, samples: int, draw: np.random.Generator) -> Iterator[Check]:
        records = self._records()
        yield records
        expected, why = self._expected(samples, draw)
        tallies = {name: Tally(name) for name in ("checksums", "symmetry", "diagonal", "entries")}
        weighted = Tally(VALUES[2])
        for index in range(len(self.kernel.layouts)):
            tiles = TileChecks(
                self.kernel, index, expected[index] if expected else None, self.bounds, self.findings, tallies
            )
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
        yield from eigenvalues(self.kernel, self.findings, self.bounds, self.stores, draw)

    def _tiles(self, index: int) -> Iterator[tuple[int, int]]:
        done = set(self.kernel.ledger.done("tiles"))
        for number, group in enumerate(self.plan.groups):
            if number * len(self.kernel.layouts) + index in done:
                yield from self.plan.tiles_of(group)

    def _records(self) -> Check:
        """Check that every tile has a record, and that records list exactly the files of their tiles."""
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
                except (DamagedDataError, KeyError, TypeError) as error:
                    what = f"has a damaged record ({error})"
            if what:
                tally.fault(
                    f"{kernel.path}: the group of tiles {group.rows} x {group.cols} {what}; run the same gram again"
                )
        return tally.done()

    def _expected(self, samples: int, draw: np.random.Generator) -> tuple[list[StoreValues] | None, str]:
        """The values that each array should give for random weights and entries; or None, and why they are unknown."""
        if self.stores is None:
            return None, self.why
        try:
            arrays = len(self.kernel.layouts)
            return [self._expected_of(index, -(-samples // arrays), draw) for index in range(arrays)], ""
        except JacstoreError as error:
            self.store_fault = str(error)
            return None, "the store cannot be read"

    def _expected_of(self, index: int, samples: int, draw: np.random.Generator) -> StoreValues:
        assert self.stores is not None
        rows, cols = self.stores[0], self.stores[-1]
        m, k = cols.n_examples, rows.n_outputs
        known = [set(store.nonfinite_examples) for store in (rows, cols)]
        weights = draw.choice([-1.0, 1.0], (m, k)) * draw.uniform(0.5, 1.5, (m, k))
        if self.plan.mode.sums_outputs:
            weights[:] = weights[:, :1]
        weights[sorted(known[1])] = 0
        tiles = self.plan.grid[1]
        width = -(-tiles // MOST_RANGES)
        spans = [(a, min(a + width, tiles)) for a in range(0, tiles, width)]
        ranges = tuple(self.plan.cols.examples(self.plan.tile, a, b) for a, b in spans)
        entries = self._chosen(samples, known, draw)
        leaves = [index] if self.kernel.leaves else None
        query = Query(mode=self.plan.mode, weights=weights, ranges=ranges, entries=entries)
        norms = [squared_norms(store, index if leaves else None) for store in (rows, cols)]
        values = stream(rows, cols, query, self.memory, leaves)
        if self.kernel.exact_diagonal:
            self._exchange_diagonal(values, query, spans, leaves)
        return StoreValues(
            query=query,
            values=values,
            norms=(norms[0], norms[1]),
            spans=spans,
            known=(known[0], known[1]),
            diagonal=Diagonal(rows, self.kernel) if self.plan.symmetric else None,
        )

    def _exchange_diagonal(
        self, values: ReferenceValues, query: Query, spans: list[tuple[int, int]], leaves: list[int] | None
    ) -> None:
        """Adjust the values for a kernel whose diagonal holds exact norms instead of those of the stored rows."""
        assert self.stores is not None
        store = self.stores[0]
        for unit in range(store.n_units):
            start, stop = store.unit_range(unit)
            difference = np.zeros((stop - start, store.n_outputs))
            for index in leaves or range(len(store.leaves)):
                leaf = store.leaves[index]
                stored = stored_norms(store, leaf, start, stop, self.budget["norms"])
                difference += store.norms[start:stop, :, index] - stored
            change = query.mode.over_outputs(np.nan_to_num(difference) * query.weights[start:stop])
            for n in range(start, stop):
                span = next(at for at, (_, b) in enumerate(spans) if n // self.plan.tile < b)
                values.products[n, :, 0 if query.mode.within_examples else span] += change[n - start]

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
            if self.plan.mode.within_examples:
                m = n
            if self.plan.mode.sums_outputs:
                k = 0
            if n not in known[0] and m not in known[1]:
                found.append((n, k, m, o if self.plan.mode.crosses_outputs else k))
        return tuple(found)

    def differences(self, again: Kernel) -> Iterator[tuple[tuple[int, int, int], float, float]]:
        """For each tile the difference from another kernel that is largest against its bound, and that bound.

        Both are relative to the norms. The other kernel is one of the same stores.
        """
        assert self.stores is not None
        known = [set(store.nonfinite_examples) for store in (self.stores[0], self.stores[-1])]
        for index in range(len(self.kernel.layouts)):
            left, right = (
                squared_norms(store, index if self.kernel.leaves else None)
                for store in (self.stores[0], self.stores[-1])
            )
            for i, j in self._tiles(index):
                if self.findings.bad.get((index, i, j)) is False:
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
                scale = outer_norms(self.plan.mode, one, other)
                off = np.where(np.isfinite(scale), off, 0.0)
                yield (index, i, j), *self.bounds.worst(off, scale, self.bounds.error, np.abs(right_one))
