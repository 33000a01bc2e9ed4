"""Find out what a kernel that was begun still needs: items, groups and damaged tiles; remove what dead runs left."""

from __future__ import annotations

import contextlib
from collections import Counter
from typing import Any

import numpy as np

from jacstore.base.events import Listener, silent
from jacstore.errors import DamagedDataError, LockedError
from jacstore.kernels.context import Work
from jacstore.kernels.finish import partial_name
from jacstore.kernels.item import leaves_finished_by
from jacstore.kernels.kernel import Kernel
from jacstore.storage.checkpoints import checkpoint_names
from jacstore.storage.ledger import FOLDER, Lock, record_name, sweep

# Locks on the final sums of groups, numbered apart from items.
FINISH = 1_000_000
# Folders whose files items leave.
SWEPT = (FOLDER, "checkpoints", "partials")


def sweep_items(kernel: Kernel, mine: range) -> None:
    """Remove what dead attempts at these items left: temporary records, and files that finished work needs no more."""
    plan, ledger = kernel.plan, kernel.ledger
    sweep(kernel.files, ["item", "checkpoint-0", "checkpoint-1"], mine)
    groups = {plan.items[number].group for number in mine}
    arrays = len(kernel.layouts)
    sweep(kernel.files, ["tiles"], [group * arrays + leaf for group in groups for leaf in range(arrays)])
    done, finished = set(ledger.done("item")), finished_groups(kernel)
    # Thousands of items leave little: what there is, is listed once and not asked for item by item.
    there = {f"{folder}/{name}" for folder in SWEPT for name in kernel.files.names(folder)}
    for number in mine:
        group = plan.items[number].group
        dead = checkpoint_names(number) if number in done or group in finished else []
        for name in [*dead, *([partial_name(number)] if group in finished else [])]:
            if name in there:
                kernel.files.remove(name)
        if group in finished and Lock.name(FINISH + group, FINISH + group) in there:
            with contextlib.suppress(LockedError), group_lock(kernel, group, silent):
                pass


def group_lock(kernel: Kernel, group: int, listener: Listener) -> contextlib.AbstractContextManager[Any]:
    """A claim on the sums of a group; a kernel in RAM needs none."""
    if kernel.files.address is None:
        return contextlib.nullcontext()
    return Lock(kernel.files, FINISH + group, FINISH + group, listener)


def damaged_tiles(kernel: Kernel) -> dict[int, list[tuple[int, int]]]:
    """Tiles of finished groups that are gone, torn, or were found wrong, by the number of their record.

    A group whose record is damaged is made unfinished again.
    """
    damaged = {}
    for number in kernel.ledger.done("tiles"):
        try:
            tiles = kernel.to_recompute(number)
        except DamagedDataError:
            kernel.ledger.forget("tiles", number)
            # A note about what is computed anew would have it computed once more.
            kernel.ledger.forget("suspect", number)
            continue
        if tiles:
            damaged[number] = tiles
        elif kernel.files.size(record_name("suspect", number)) is not None:
            kernel.ledger.forget("suspect", number)
    return damaged


def items_done(work: Work) -> set[int]:
    """Items whose results are there: tiles, or the partial sums of a group that is still to be added up."""
    kernel, plan = work.kernel, work.kernel.plan
    finished, tiles = finished_groups(kernel), set(kernel.ledger.done("tiles"))
    done = set()
    for number in kernel.ledger.done("item"):
        item = plan.items[number]
        if item.group in finished:
            done.add(number)
        elif kernel.leaves:
            first = item.group * len(kernel.layouts)
            if {first + leaf for leaf in leaves_finished_by(work.rows, plan, item)} <= tiles:
                done.add(number)
        elif kernel.files.size(partial_name(number)) == 8 * sum(
            int(np.prod(plan.tile_shape(i, j))) for i, j in plan.tiles_of(plan.groups[item.group])
        ):
            done.add(number)
    return done


def finished_groups(kernel: Kernel) -> set[int]:
    per_group = len(kernel.layouts)
    counts = Counter(number // per_group for number in kernel.ledger.done("tiles"))
    return {group for group, count in counts.items() if count == per_group}


def group_is_finished(kernel: Kernel, group: int) -> bool:
    """As `finished_groups` says, without listing the records of all others."""
    numbers = range(group * len(kernel.layouts), (group + 1) * len(kernel.layouts))
    return all(kernel.files.size(record_name("tiles", number)) is not None for number in numbers)


def tiles_done(kernel: Kernel) -> int:
    return sum(kernel.record(number).tiles for number in kernel.ledger.done("tiles"))
