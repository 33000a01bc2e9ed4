"""Read the rows of a group of tiles in slabs of columns, the next one while one is multiplied."""

from __future__ import annotations

import time
from collections.abc import Generator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from jacstore.kernels.plan.plan import GramPlan, Group, merge_ranges
from jacstore.store.reader import JacobianStore


def group_ranges(plan: GramPlan, group: Group) -> list[tuple[int, int, int]]:
    """(side, first example, last example) to read for a group; side 0 is the rows' store, 1 the columns'."""
    rows = plan.rows.examples(plan.tile, *group.rows)
    cols = plan.cols.examples(plan.tile, *group.cols)
    merged = merge_ranges(plan.rows, rows, plan.cols, cols, plan.symmetric)
    return [(0 if plan.symmetric else n, a, b) for n, (_, a, b) in enumerate(merged)]


class Slabs:
    """Slabs of a group's rows, the next one being read while the caller multiplies."""

    def __init__(
        self, rows: JacobianStore, cols: JacobianStore | None, plan: GramPlan, group: Group, dtype: np.dtype[Any]
    ) -> None:
        stores = (rows, cols or rows)
        self.sources = [(stores[side], a, b) for side, a, b in group_ranges(plan, group)]
        width = min(plan.slab_columns, plan.n_columns)
        self.buffers = [
            [np.empty((b - a) * plan.n_outputs * width, dtype) for _, a, b in self.sources] for _ in range(2)
        ]
        self.n_outputs, self.n_columns = plan.n_outputs, plan.n_columns

    def read(
        self, slabs: list[tuple[int, int]]
    ) -> Generator[tuple[tuple[int, int], list[np.ndarray], float], None, None]:
        """Yield column range, one array `(n, K, w)` for each source, and the seconds waited for them."""
        with ThreadPoolExecutor(1, "jacstore-slab") as pool:
            pending = pool.submit(self._fill, slabs[0], 0) if slabs else None
            for index, slab in enumerate(slabs):
                started = time.perf_counter()
                assert pending is not None
                ready = pending.result()
                waited = time.perf_counter() - started
                if index + 1 < len(slabs):
                    pending = pool.submit(self._fill, slabs[index + 1], (index + 1) % 2)
                yield slab, ready, waited

    def _fill(self, slab: tuple[int, int], turn: int) -> list[np.ndarray]:
        filled = []
        for (store, a, b), buffer in zip(self.sources, self.buffers[turn], strict=True):
            width = slab[1] - slab[0]
            view = buffer[: (b - a) * self.n_outputs * width].reshape(b - a, self.n_outputs, width)
            if self.n_columns != store.n_columns:
                # Where stores hold leaves by other terms, both sides are read as whole rows.
                store.read_rows(a, b, *slab, view)
            else:
                store.read("rows", a, b, *slab, view)
            filled.append(view)
        return filled


def column_starts(store: JacobianStore, plan: GramPlan) -> list[int]:
    """First column of each leaf among those that slabs run over; -1 for a leaf that has none."""
    if plan.n_columns == store.n_parameters:
        return [leaf.offset for leaf in store.leaves]
    return [leaf.dense.start if leaf.dense else -1 for leaf in store.leaves]
