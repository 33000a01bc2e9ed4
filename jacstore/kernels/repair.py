"""Recompute the damaged tiles of a finished group, and only those, to the same bits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from jacstore.base.events import Listener, silent
from jacstore.base.threads import blas_threads
from jacstore.kernels.context import Work
from jacstore.kernels.finish import store_tiles
from jacstore.kernels.item import ItemRun
from jacstore.kernels.plan.plan import Group, Item
from jacstore.kernels.plan.reports import Spent
from jacstore.storage.checkpoints import NoCheckpoints


class _Repair(ItemRun):
    """Some tiles of a finished group once more, with the same sums in the same order: the same bits."""

    def __init__(self, work: Work, item: Item, array: int, tiles: list[tuple[int, int]], **listening: Any) -> None:
        super().__init__(work, item, **listening)
        rows, cols = [i for i, _ in tiles], [j for _, j in tiles]
        self.group = Group(rows=(min(rows), max(rows) + 1), cols=(min(cols), max(cols) + 1))
        self.tiles, self.array = tiles, array
        self.checkpoints = NoCheckpoints()
        self.found: list[np.ndarray] = []

    def totals(self) -> tuple[list[np.ndarray], Spent]:
        """Sums of the tiles over this item's columns, none where they belong to another leaf; and what was read."""
        totals, read = self._compute()
        if not self.kernel.leaves:
            self._finish_leaf(0, totals)
        return self.found, self._with_times(read)

    def _finish_leaf(self, leaf: int, totals: list[Any]) -> None:
        if leaf == self.array:
            self.found = [np.array(self.engine.fetch(total)) for total in totals]


def repair_tiles(
    work: Work,
    number: int,
    tiles: list[tuple[int, int]],
    listener: Listener = silent,
    stop: Callable[[], bool] = lambda: False,
) -> Spent:
    """Recompute some tiles of a finished group, and only those; the record of the others stays as it is."""
    kernel, plan = work.kernel, work.kernel.plan
    group, array = divmod(number, len(kernel.layouts))
    totals: list[np.ndarray] = []
    spent: list[Spent] = []
    # The number of threads decides about bits.
    with blas_threads(work.item_threads()):
        for item in plan.items_of(group):
            repair = _Repair(work, item, array, tiles, listener=listener, stop=stop)
            found, once = repair.totals()
            spent.append(once)
            # In item order, as they are added up when a group is finished.
            if found and len(plan.splits) > 1 and not kernel.leaves:
                totals = totals or [np.zeros_like(part) for part in found]
                totals = [total + part for total, part in zip(totals, found, strict=True)]
            else:
                totals = found or totals
    record = kernel.ledger.read("tiles", number)
    for i, j in tiles:
        # Should this attempt die while writing, the next one looks again.
        kernel.mark(array, i, j)
    again = store_tiles(work, array, zip(tiles, totals, strict=True))
    off = again.diagonal_error
    off = None if off is None else max(off, record.get("diagonal_error") or 0.0)
    kernel.ledger.record(
        "tiles", number, {**record, "diagonal_error": off, "files": {**record["files"], **again.files}}
    )
    kernel.ledger.forget("suspect", number)
    return Spent.total(spent)
