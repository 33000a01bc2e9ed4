"""Compute one item of a plan and write its tiles, or its partial sums, to disk.

An item owns the accumulators of a group of tiles over a range of columns. While one slab is multiplied the next is
read.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np

from jacstore.base import machine
from jacstore.base.events import CheckpointDone, Listener, SlabDone, silent
from jacstore.base.threads import blas_threads
from jacstore.errors import JacstoreError, RunInterruptedError
from jacstore.kernels.context import Work
from jacstore.kernels.finish import partial_name, write_tiles
from jacstore.kernels.plan.plan import GramPlan, Item, Step
from jacstore.kernels.plan.reports import ItemResult, Spent
from jacstore.kernels.slabs import Slabs, column_starts, group_ranges
from jacstore.storage.buckets import requests
from jacstore.storage.checkpoints import Checkpoints, NoCheckpoints, write_sums
from jacstore.store.reader import JacobianStore
from jacstore.store.unit_buffers import to_bfloat16
from jacstore.terms.expand_rows import expanded_slabs
from jacstore.terms.factor_set import FactorSet
from jacstore.terms.kinds import Leaf


def run_item(
    work: Work, number: int, listener: Listener = silent, stop: Callable[[], bool] = lambda: False
) -> ItemResult:
    """Compute one item and leave its sums on disk; returns counts and seconds.

    An item may run twice, after a worker died: it writes the same bytes to the same places.
    """
    with blas_threads(work.item_threads()):
        try:
            item = work.kernel.plan.items[number]
            return ItemRun(work, item, listener, lambda: stop() or work.asked_to_end()).run()
        except JacstoreError:
            raise
        except Exception as error:
            group = work.kernel.plan.groups[work.kernel.plan.items[number].group]
            error.add_note(f"in item {number}: tiles {group.rows} x {group.cols}")
            raise


class ItemRun:
    """One item being computed."""

    def __init__(self, work: Work, item: Item, listener: Listener, stop: Callable[[], bool]) -> None:
        self.work, self.item, self.listener, self.stop = work, item, listener, stop
        self.kernel, self.plan = work.kernel, work.kernel.plan
        self.group = self.plan.groups[item.group]
        self.tiles = self.plan.tiles_of(self.group)
        self.engine = work.engine()
        self.times = {"seconds_read": 0.0, "seconds_compute": 0.0, "seconds_write": 0.0}
        self.checkpoints: Checkpoints | NoCheckpoints = Checkpoints(
            self.kernel, item.number, [self.plan.tile_shape(i, j) for i, j in self.tiles]
        )
        self.leaves = [(0, *item.columns)]
        self.empty_leaves: list[int] = []
        if self.kernel.leaves:
            self.leaves = _leaf_ranges(work.rows, self.plan, item)
            self.empty_leaves = _empty_leaves(work.rows, item)
        self.partial_sums: dict[str, list[int]] = {}

    def run(self) -> ItemResult:
        before = requests()
        # Numbers beyond their type become infinite; the comparison with the norms names them.
        with np.errstate(over="ignore", invalid="ignore"):
            # One item computes while another one writes.
            with self.work.compute_lock:
                totals, read = self._compute()
            if not self.kernel.leaves:
                self._finish_leaf(0, totals)
        if self.plan.resident:
            self.work.spare_tiles.extend(total for total in totals if isinstance(total, np.ndarray))
        spent = self._with_times(read)
        self.kernel.ledger.record("item", self.item.number, {**spent.to_dict(), **self.partial_sums})
        self.checkpoints.clear()
        made = dict(requests() - before)
        return ItemResult(
            item=self.item.number, peak_rss=machine.peak_rss(), pid=os.getpid(), requests=made, spent=spent
        )

    def _with_times(self, read: Spent) -> Spent:
        """What was read, with the seconds that all of it took."""
        times = self.times
        return replace(
            read,
            seconds_read=times["seconds_read"],
            seconds_compute=times["seconds_compute"],
            seconds_write=times["seconds_write"],
        )

    def _compute(self) -> tuple[list[Any], Spent]:
        """Sums of all tiles, and what was read; kernels that are kept leaf by leaf are written meanwhile."""
        read_before = self._bytes()
        slabs = self.plan.slabs(self.item.columns)
        n_work = len(slabs) + len(self.item.steps)
        first, totals = self.checkpoints.load(n_work)
        totals = [self.engine.restore(t) for t in totals] if totals else self._zeros()
        for leaf in self.empty_leaves:
            self._finish_leaf(leaf, self._zeros())
        totals = self._add_slabs(slabs, first, totals, n_work)
        for index, number in enumerate(self.item.steps, start=len(slabs)):
            if index >= first:
                self._pause(index, n_work, totals)
                totals = self._add_step(number, totals)
                self._checkpoint(index + 1, n_work, totals)
        files_read, decoded = (after - before for after, before in zip(self._bytes(), read_before, strict=True))
        return totals, Spent(bytes_read=files_read, decoded_bytes=decoded, slabs=n_work - first)

    def _add_slabs(self, slabs: list[tuple[int, int]], first: int, totals: list[Any], n_work: int) -> list[Any]:
        """Add products of all columns stored as rows."""
        source = Slabs(self.work.rows, self.work.cols, self.plan, self.group, self.engine.slab_dtype)
        with contextlib.closing(source.read(slabs[first:])) as stream:
            for index, ((a, b), buffers, waited) in enumerate(stream, start=first):
                self._pause(index, n_work, totals)
                self.times["seconds_read"] += waited
                started = time.perf_counter()
                operands = [self.engine.load(buffer, index) for buffer in buffers]
                for leaf, c, d in self.leaves:
                    if max(a, c) >= min(b, d):
                        continue
                    self._add(totals, operands, slice(max(a, c) - a, min(b, d) - a))
                    if d <= b and self.kernel.leaves:
                        self.times["seconds_compute"] += time.perf_counter() - started
                        # A leaf that ended before the checkpoint is finished already.
                        self._finish_leaf(leaf, totals)
                        started = time.perf_counter()
                        totals = self._zeros()
                self.times["seconds_compute"] += time.perf_counter() - started
                self.listener(SlabDone(item=self.item.number, slab=index, bytes_read=sum(x.nbytes for x in buffers)))
                self._checkpoint(index + 1, n_work, totals)
        return totals

    def _pause(self, index: int, n_work: int, totals: list[Any]) -> None:
        """Stop here if asked to, with a checkpoint."""
        if self.stop():
            self.checkpoints.save(index, map(self.engine.fetch, totals))
            raise RunInterruptedError(f"interrupted in item {self.item.number}, slab {index} of {n_work}")

    def _checkpoint(self, index: int, n_work: int, totals: list[Any]) -> None:
        if index < n_work and self.checkpoints.due():
            self.checkpoints.save(index, map(self.engine.fetch, totals))
            self.listener(CheckpointDone(item=self.item.number, slab=index))

    def _add_step(self, number: int, totals: list[Any]) -> list[Any]:
        """Add products of factored leaves that share factors."""
        step, leaves = self.plan.steps[number], self.work.rows.leaves
        started = time.perf_counter()
        sources = [self._operands(store, a, b, step) for store, a, b in self._sources()]
        self.times["seconds_read"] += time.perf_counter() - started
        implicit = [n for n in step.leaves if n not in step.expanded]
        apart = [[n] for n in implicit] if self.kernel.leaves else [implicit] if implicit else []
        for chosen in apart:
            started = time.perf_counter()
            sets = [self._factor_set(key, [leaves[n] for n in chosen], source) for key, source in sources]
            for index, rows, cols in self._places():
                totals[index] = self.engine.add_factors(self.plan.mode, totals[index], sets[0], rows, sets[-1], cols)
            self.times["seconds_compute"] += time.perf_counter() - started
            if self.kernel.leaves:
                self._finish_leaf(chosen[0], totals)
                totals = self._zeros()
        for n in step.expanded:
            started = time.perf_counter()
            factors = [source for _, source in sources]
            stream = expanded_slabs(
                leaves[n],
                factors,
                self.plan.slab_columns,
                patches_kept=self.plan.patches_kept,
                threads=self.work.threads,
            )
            for turn, slabs in enumerate(stream):
                operands = [self.engine.load(self._as_slab(slab), turn) for slab in slabs]
                self._add(totals, operands, slice(0, operands[0].shape[-1]))
            self.times["seconds_compute"] += time.perf_counter() - started
            if self.kernel.leaves:
                self._finish_leaf(n, totals)
                totals = self._zeros()
        read = sum(values.nbytes for _, source in sources for values in source.values())
        self.listener(SlabDone(item=self.item.number, slab=number, bytes_read=read))
        return totals

    def _sources(self) -> list[tuple[JacobianStore, int, int]]:
        """Stores and example ranges that factors are taken from: all examples where factors stay in memory."""
        stores = (self.work.rows, self.work.cols or self.work.rows)
        if self.plan.resident:
            kept = stores[: 1 if self.plan.symmetric else 2]
            return [(store, 0, store.n_examples) for store in kept]
        return [(stores[side], a, b) for side, a, b in group_ranges(self.plan, self.group)]

    def _operands(self, store: JacobianStore, start: int, stop: int, step: Step) -> tuple[Any, dict[str, np.ndarray]]:
        """Operands of a step, with a key under which they are kept for the next item where all stay in memory."""
        names = dict.fromkeys(name for n in step.leaves for name in self.work.rows.leaves[n].operands)
        key = (id(store), step.leaves, str(self.engine.factor_dtype))
        kept = self.work.cache
        if self.plan.resident and key in kept:
            return key, kept[key]
        found = {name: store.read_operand(name, start, stop, self.engine.factor_dtype) for name in names}
        if self.plan.resident:
            kept[key] = found
        return key, found

    def _factor_set(self, key: Any, leaves: list[Leaf], operands: dict[str, np.ndarray]) -> Any:
        """Factors ready to be multiplied."""
        key = ("set", key, tuple(leaf.path for leaf in leaves))
        if self.plan.resident and key in self.work.cache:
            return self.work.cache[key]
        made = self.engine.load_factors(FactorSet(leaves, operands))
        if self.plan.resident:
            self.work.cache[key] = made
        return made

    def _as_slab(self, slab: np.ndarray) -> np.ndarray:
        """Rows of factors in the type of slabs."""
        if self.engine.slab_dtype == np.uint16:
            return to_bfloat16(slab)
        return slab.astype(self.engine.slab_dtype, copy=False)

    def _bytes(self) -> tuple[int, int]:
        stores = {id(s): s for s in (self.work.rows, self.work.cols) if s is not None}.values()
        return sum(s.files.bytes_read for s in stores), sum(s.decoded_bytes_read for s in stores)

    def _zeros(self) -> list[Any]:
        return [self._zero(self.plan.tile_shape(i, j)) for i, j in self.tiles]

    def _zero(self, shape: tuple[int, ...]) -> Any:
        for n, held in enumerate(self.work.spare_tiles):
            if held.shape == shape:
                del self.work.spare_tiles[n]
                held.fill(0)
                return held
        return self.engine.zeros(shape)

    def _add(self, totals: list[Any], operands: list[Any], columns: slice) -> None:
        """Add the product of one slab to every tile of the group."""
        plan, side = self.plan, operands[-1]
        origin = [a for _, a, _ in group_ranges(plan, self.group)]
        for index, rows, cols in self._places(origin):
            totals[index] = self.engine.add(plan.mode, totals[index], operands[0], rows, side, cols, columns)

    def _places(self, origin: list[int] | None = None) -> Iterator[tuple[int, slice, slice]]:
        """For each tile its number and its examples, counted from the first ones that are in memory."""
        plan = self.plan
        origin = [a for _, a, _ in self._sources()] if origin is None else origin
        for index, (i, j) in enumerate(self.tiles):
            a, b = plan.rows.examples(plan.tile, i, i + 1)
            c, d = plan.cols.examples(plan.tile, j, j + 1)
            yield index, slice(a - origin[0], b - origin[0]), slice(c - origin[-1], d - origin[-1])

    def _finish_leaf(self, leaf: int, totals: list[Any]) -> None:
        """Write the tiles of a finished sum, or the partial sum where columns are split over items."""
        started = time.perf_counter()
        host = map(self.engine.fetch, totals)
        if len(self.plan.splits) > 1 and not self.kernel.leaves:
            self.partial_sums = {"checksums": write_sums(self.kernel, partial_name(self.item.number), host)}
        else:
            write_tiles(self.work, self.item.group, leaf, zip(self.tiles, host, strict=True))
        self.times["seconds_write"] += time.perf_counter() - started


def leaves_finished_by(rows: JacobianStore, plan: GramPlan, item: Item) -> set[int]:
    """The leaves whose kernels an item finishes, where they are kept apart."""
    columns = {n for n, _, _ in _leaf_ranges(rows, plan, item)}
    return columns.union(_empty_leaves(rows, item), *(plan.steps[number].leaves for number in item.steps))


def _leaf_ranges(rows: JacobianStore, plan: GramPlan, item: Item) -> list[tuple[int, int, int]]:
    """(index, first, last) of the columns of each leaf that an item sums apart."""
    first, last = item.columns
    starts = column_starts(rows, plan)
    leaves = [(n, a, a + leaf.size) for n, (leaf, a) in enumerate(zip(rows.leaves, starts, strict=True))]
    return [(n, a, b) for n, a, b in leaves if first <= a < b <= last]


def _empty_leaves(rows: JacobianStore, item: Item) -> list[int]:
    """Leaves without columns; their kernels are zero and belong to the first item of a group."""
    return [n for n, leaf in enumerate(rows.leaves) if leaf.size == 0 and item.split == 0]
