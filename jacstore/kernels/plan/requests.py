"""How many requests a gram makes where its stores or its kernel are in a bucket, from the plan alone."""

from __future__ import annotations

import math
from collections.abc import Sequence

from jacstore.base.limits import LIMITS
from jacstore.kernels.plan.plan import GramPlan, Group, Item, merge_ranges
from jacstore.storage.buckets import is_address
from jacstore.storage.chunks import ArrayLayout
from jacstore.store.arrays import operand_array
from jacstore.store.reader import JacobianStore


def expected_requests(
    plan: GramPlan, rows: JacobianStore, cols: JacobianStore | None, out: str, arrays: int, processes: int
) -> dict[str, int]:
    """Requests of a run that begins anew, by kind, empty without a bucket; locks and records that are read come on top.

    Parameters
    ----------
    arrays
        Arrays of the kernel: one, or one for each leaf.
    processes
        Processes that share the items; factors that stay in memory are read by each.
    """
    sides = (rows, cols or rows)
    found = {}
    if any(is_address(side.path) for side in sides):
        reads = sum(_of_slabs(plan, sides, item) for item in plan.items)
        reads += _of_factors(plan, sides, processes)
        found["get_range"] = reads + _of_norms(plan, sides)
    if is_address(out):
        items = plan.n_items * (2 if len(plan.splits) > 1 and arrays == 1 else 1)
        # Tiles, their records and those of items with their partial sums, and metadata: root, ledger, arrays.
        found["put"] = (plan.tiles_stored + len(plan.groups) + 1) * arrays + items + 2 + (arrays > 1)
    return found


def requests_for(layout: ArrayLayout, columns: tuple[int, int], unit_size: int, examples: tuple[int, int]) -> int:
    """Requests that read columns of the last axis for a range of examples: one an object, more for what is large."""
    (first, last), (start, stop) = columns, examples
    if first >= last or start >= stop:
        return 0
    width, per_file = layout.piece[-1], layout.per_file[-1]
    at_once = max(1, LIMITS.window_bytes // layout.piece_bytes)
    count = 0
    for file in range(first // (width * per_file), -(-last // (width * per_file))):
        low = max(first // width, file * per_file)
        high = min(-(-last // width), (file + 1) * per_file)
        count += -(-(high - low) // at_once)
    return count * (-(-stop // unit_size) - start // unit_size)


def _ranges(plan: GramPlan, group: Group) -> list[tuple[int, int, int]]:
    """Side, first and last example of what a group reads."""
    rows, cols = plan.rows.examples(plan.tile, *group.rows), plan.cols.examples(plan.tile, *group.cols)
    merged = merge_ranges(plan.rows, rows, plan.cols, cols, plan.symmetric)
    return [(0 if plan.symmetric else n, a, b) for n, (_, a, b) in enumerate(merged)]


def _of_slabs(plan: GramPlan, sides: tuple[JacobianStore, JacobianStore], item: Item) -> int:
    """Requests for the columns of an item that are stored as rows."""
    count = 0
    for side, a, b in _ranges(plan, plan.groups[item.group]):
        store = sides[side]
        if not is_address(store.path) or "rows" not in store.layouts:
            continue
        for slab in plan.slabs(item.columns):
            count += requests_for(store.layouts["rows"], slab, store.unit_size, (a, b))
    return count


def _of_factors(plan: GramPlan, sides: tuple[JacobianStore, JacobianStore], processes: int) -> int:
    """Requests for factors: once a process where all stay in memory, else once an item."""
    reads: Sequence[tuple[JacobianStore, int, int, Sequence[int]]]
    if plan.resident:
        kept = sides[: 1 if plan.symmetric else 2]
        reads = [(store, 0, store.n_examples, range(len(plan.steps))) for store in kept] * min(processes, plan.n_items)
    else:
        reads = [
            (sides[side], a, b, item.steps)
            for item in plan.items
            for side, a, b in _ranges(plan, plan.groups[item.group])
        ]
    count = 0
    for store, a, b, steps in reads:
        if not is_address(store.path):
            continue
        for number in steps:
            names = {name for leaf in plan.steps[number].leaves for name in sides[0].leaves[leaf].operands}
            for layout in (store.layouts[operand_array(name)] for name in names):
                count += requests_for(layout, (0, layout.shape[-1]), store.unit_size, (a, b))
    return count


def _of_norms(plan: GramPlan, sides: tuple[JacobianStore, JacobianStore]) -> int:
    """Requests for norms, which the diagonal of a symmetric kernel, and the range of float32, are compared with."""
    return sum(math.ceil(store.n_examples / store.unit_size) for store in set(sides) if is_address(store.path))
