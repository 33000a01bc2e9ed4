"""In: stores, a plan and the number of an item. Out: its tiles, or its partial sums, on disk.

An item owns the accumulators of a group of tiles over a range of columns. While one slab is multiplied the next is
read.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
from crc32c import crc32c

from jacstore import machine
from jacstore.blas_threads import blas_threads
from jacstore.blocks import to_bfloat16
from jacstore.checkpoints import Checkpoints, NoCheckpoints, write_sums
from jacstore.engine import BlasEngine, Engine, symmetrize
from jacstore.errors import Damaged, Interrupted, JacstoreError
from jacstore.expansion import expanded_slabs
from jacstore.factors import FactorSet
from jacstore.kernel import Kernel
from jacstore.norms import Diagonal, require_right
from jacstore.pieces import raw
from jacstore.plan import GramPlan, Group, Item, Step, merge_ranges
from jacstore.progress import CheckpointDone, Listener, SlabDone, silent
from jacstore.schema import Open, typed
from jacstore.store import JacobianStore
from jacstore.terms import Leaf


@dataclass(frozen=True, kw_only=True)
class PartialRecord(Open):
    """What the record of an item says whose columns are only a part of all."""

    checksums: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Work:
    """What an item needs, small enough to send to another process: stores and kernel travel as their paths."""

    rows: JacobianStore
    cols: JacobianStore | None
    kernel: Kernel
    threads: int | None
    device_memory: int | None
    # Factors that stay in memory from item to item of this process.
    kept: dict[Any, Any] = field(default_factory=dict, compare=False, repr=False)
    # Accumulators of finished tiles, to be used again.
    spare: list[Any] = field(default_factory=list, compare=False, repr=False)
    # Held by the item of this process that computes.
    turn: Any = field(default_factory=threading.Lock, compare=False, repr=False)

    def __reduce__(self) -> tuple[Any, ...]:
        return partial(
            Work,
            rows=self.rows,
            cols=self.cols,
            kernel=self.kernel,
            threads=self.threads,
            device_memory=self.device_memory,
        ), ()

    def engine(self) -> Engine:
        resolved = self.kernel.resolved
        stored = common_dtype(self.rows, self.cols)
        return make_engine(resolved["engine"], resolved["precision"], stored, self.device_memory, self.threads)

    @property
    def diagonal(self) -> Diagonal | None:
        """What the diagonal of a symmetric kernel should be."""
        if not self.kernel.plan.symmetric:
            return None
        if "diagonal" not in self.kept:
            self.kept["diagonal"] = Diagonal(self.rows, self.kernel)
        found: Diagonal = self.kept["diagonal"]
        return found


def run_item(
    work: Work, number: int, listener: Listener = silent, stop: Callable[[], bool] = lambda: False
) -> dict[str, Any]:
    """Compute one item and leave its result on disk; returns counts and seconds.

    An item may run twice, after a worker died: it writes the same bytes to the same places.
    """
    with blas_threads(_blas_threads(work)):
        try:
            return _Run(work, work.kernel.plan.items[number], listener, stop).run()
        except JacstoreError:
            raise
        except Exception as error:
            group = work.kernel.plan.groups[work.kernel.plan.items[number].group]
            error.add_note(f"in item {number}: tiles {group.rows} x {group.cols}")
            raise


def _blas_threads(work: Work) -> int | None:
    """Threads of BLAS while an item is computed, or some of its tiles once more.

    Tiles from factors in memory are cut into a block a core; setting the number of threads for each takes its time.
    """
    return 1 if work.kernel.plan.resident else work.threads


class _Run:
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
        self.partial_facts: dict[str, Any] = {}

    def run(self) -> dict[str, Any]:
        # One item computes while another one writes.
        with self.work.turn:
            totals, counts = self._compute()
        if not self.kernel.leaves:
            self._finish_leaf(0, totals)
        if self.plan.resident:
            self.work.spare.extend(total for total in totals if isinstance(total, np.ndarray))
        facts = {**counts, **self.times}
        self.kernel.ledger.record("item", self.item.number, {**facts, **self.partial_facts})
        self.checkpoints.clear()
        return {"item": self.item.number, "peak_rss": machine.peak_rss(), **facts}

    def _compute(self) -> tuple[list[Any], dict[str, int]]:
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
        return totals, {"bytes_read": files_read, "decoded_bytes": decoded, "slabs": n_work - first}

    def _add_slabs(self, slabs: list[tuple[int, int]], first: int, totals: list[Any], n_work: int) -> list[Any]:
        """Add products of all columns stored as rows."""
        source = _Slabs(self.work.rows, self.work.cols, self.plan, self.group, self.engine.slab_dtype)
        with contextlib.closing(source.read(slabs[first:])) as stream:
            for index, ((a, b), buffers, waited) in enumerate(stream, start=first):
                self._pause(index, n_work, totals)
                self.times["seconds_read"] += waited
                started = time.perf_counter()
                operands = [self.engine.load(buffer) for buffer in buffers]
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
            raise Interrupted(f"interrupted in item {self.item.number}, slab {index} of {n_work}")

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
            for slabs in expanded_slabs(
                leaves[n],
                factors,
                self.plan.slab_columns,
                patches_kept=self.plan.patches_kept,
                threads=self.work.threads,
            ):
                operands = [self.engine.load(self._as_slab(slab)) for slab in slabs]
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
        return [(stores[side], a, b) for side, a, b in _ranges(self.plan, self.group)]

    def _operands(self, store: JacobianStore, start: int, stop: int, step: Step) -> tuple[Any, dict[str, np.ndarray]]:
        """Operands of a step, with a key under which they are kept for the next item where all stay in memory."""
        names = dict.fromkeys(name for n in step.leaves for name in self.work.rows.leaves[n].operands)
        key = (id(store), step.leaves, str(self.engine.factor_dtype))
        kept = self.work.kept
        if self.plan.resident and key in kept:
            return key, kept[key]
        found = {name: store.read_operand(name, start, stop, self.engine.factor_dtype) for name in names}
        if self.plan.resident:
            kept[key] = found
        return key, found

    def _factor_set(self, key: Any, leaves: list[Leaf], operands: dict[str, np.ndarray]) -> Any:
        """Factors ready to be multiplied."""
        key = ("set", key, tuple(leaf.path for leaf in leaves))
        if self.plan.resident and key in self.work.kept:
            return self.work.kept[key]
        made = self.engine.load_factors(FactorSet(leaves, operands))
        if self.plan.resident:
            self.work.kept[key] = made
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
        for n, held in enumerate(self.work.spare):
            if held.shape == shape:
                del self.work.spare[n]
                held.fill(0)
                return held
        return self.engine.zeros(shape)

    def _add(self, totals: list[Any], operands: list[Any], columns: slice) -> None:
        """Add the product of one slab to every tile of the group."""
        plan, side = self.plan, operands[-1]
        origin = [a for _, a, _ in _ranges(plan, self.group)]
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
            self.partial_facts = {"checksums": write_sums(self.kernel, partial_name(self.item.number), host)}
        else:
            write_tiles(self.work, self.item.group, leaf, zip(self.tiles, host, strict=True))
        self.times["seconds_write"] += time.perf_counter() - started


def leaves_of(rows: JacobianStore, plan: GramPlan, item: Item) -> set[int]:
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


def common_dtype(rows: JacobianStore, cols: JacobianStore | None) -> str:
    """The stored type of both sides, float32 where they differ: slabs of one group have one type."""
    return rows.dtype if cols is None or cols.dtype == rows.dtype else "float32"


def partial_name(item: int) -> str:
    """File of an item's partial sums."""
    return f"partials/item-{item:07d}.bin"


def write_tiles(work: Work, group: int, leaf: int, tiles: Any) -> None:
    """Write the tiles of a group for one leaf and mark them as finished."""
    kernel, number = work.kernel, group * len(work.kernel.layouts) + leaf
    records, off, count = _write(work, leaf, tiles)
    kernel.ledger.record("tiles", number, {"tiles": count, "diagonal_error": off, "files": records})


def _write(work: Work, leaf: int, tiles: Any) -> tuple[dict[str, Any], float | None, int]:
    """Write tiles; returns the records of their files, how far diagonals are from the exact norms, and a count.

    Raises
    ------
    Damaged
        Naming the tile whose diagonal is further off than rounding explains; it is not written.
    """
    kernel = work.kernel
    records: dict[str, Any] = {}
    count, off = 0, 0.0 if kernel.plan.symmetric else None
    for (i, j), total in tiles:
        tile = symmetrize(kernel.mode, total) if kernel.plan.symmetric and i == j else total
        if work.diagonal is not None and i == j:
            where = f"{kernel.path}: {kernel.named(leaf, i, j)}"
            off = max(off or 0.0, require_right(work.diagonal.compare(leaf, i, tile), where))
            if kernel.exact_diagonal:
                work.diagonal.replace(leaf, i, tile)
        records |= kernel.write_tile(leaf, i, j, tile)
        count += 1
    kernel.files.sync_folders(records)
    return records, off, count


def finish_group(work: Work, group: int, _after: Any = None) -> dict[str, Any]:
    """Add up the partial sums of a group in item order and write its tiles."""
    kernel, plan = work.kernel, work.kernel.plan
    started = time.perf_counter()
    items = [item for item in plan.items if item.group == group]
    tiles = plan.tiles_of(plan.groups[group])
    checksums = {item.number: _partial_checksums(kernel, item.number, len(tiles)) for item in items}

    def sums() -> Iterator[tuple[tuple[int, int], np.ndarray]]:
        offset = 0
        for index, (i, j) in enumerate(tiles):
            total = np.zeros(plan.tile_shape(i, j))
            for item in items:
                part = np.empty(total.shape)
                view = raw(part)
                with _recomputed(kernel, item.number):
                    kernel.files.read_into(partial_name(item.number), [(offset, view)])
                    if crc32c(view) != checksums[item.number][index]:
                        raise Damaged(f"{partial_name(item.number)} differs from its recorded checksum")
                total += part
            offset += total.nbytes
            yield (i, j), total

    write_tiles(work, group, 0, sums())
    for item in items:
        kernel.files.remove(partial_name(item.number))
    return {"group": group, "seconds_write": time.perf_counter() - started}


class _Repair(_Run):
    """Some tiles of a finished group once more, with the same sums in the same order: the same bits."""

    def __init__(self, work: Work, item: Item, array: int, tiles: list[tuple[int, int]], **listening: Any) -> None:
        super().__init__(work, item, **listening)
        rows, cols = [i for i, _ in tiles], [j for _, j in tiles]
        self.group = Group(rows=(min(rows), max(rows) + 1), cols=(min(cols), max(cols) + 1))
        self.tiles, self.array = tiles, array
        self.checkpoints = NoCheckpoints()
        self.found: list[np.ndarray] = []

    def totals(self) -> tuple[list[np.ndarray], dict[str, Any]]:
        """Sums of the tiles over this item's columns, none where they belong to another leaf; and what was read."""
        totals, counts = self._compute()
        if not self.kernel.leaves:
            self._finish_leaf(0, totals)
        return self.found, {**counts, **self.times}

    def _finish_leaf(self, leaf: int, totals: list[Any]) -> None:
        if leaf == self.array:
            self.found = [np.array(self.engine.fetch(total)) for total in totals]


def repair_tiles(
    work: Work,
    number: int,
    tiles: list[tuple[int, int]],
    listener: Listener = silent,
    stop: Callable[[], bool] = lambda: False,
) -> dict[str, Any]:
    """Recompute some tiles of a finished group, and only those; the record of the others stays as it is."""
    kernel, plan = work.kernel, work.kernel.plan
    group, array = divmod(number, len(kernel.layouts))
    totals: list[np.ndarray] = []
    facts: dict[str, Any] = {}
    # The number of threads decides about bits.
    with blas_threads(_blas_threads(work)):
        for item in (item for item in plan.items if item.group == group):
            repair = _Repair(work, item, array, tiles, listener=listener, stop=stop)
            found, counts = repair.totals()
            facts = {key: facts.get(key, 0) + value for key, value in counts.items()}
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
    files, off, _ = _write(work, array, zip(tiles, totals, strict=True))
    off = None if off is None else max(off, record.get("diagonal_error") or 0.0)
    kernel.ledger.record("tiles", number, {**record, "diagonal_error": off, "files": {**record["files"], **files}})
    kernel.ledger.forget("suspect", number)
    return {**facts, "tiles": len(tiles)}


def _partial_checksums(kernel: Kernel, item: int, n_tiles: int) -> tuple[int, ...]:
    """Checksums of an item's partial sums, one a tile."""
    with _recomputed(kernel, item):
        record = typed(PartialRecord, kernel.ledger.read("item", item))
        if len(record.checksums) != n_tiles:
            raise Damaged(f"the record of item {item} is about other tiles than its own")
    return record.checksums


@contextlib.contextmanager
def _recomputed(kernel: Kernel, item: int) -> Iterator[None]:
    """Make an item unfinished whose partial sums turn out to be damaged."""
    try:
        yield
    except Damaged as error:
        kernel.ledger.forget("item", item)
        raise Damaged(f"{kernel.path}: {error}; run the same gram again to recompute this item") from error


def _ranges(plan: GramPlan, group: Group) -> list[tuple[int, int, int]]:
    """(side, first example, last example) to read for a group; side 0 is the rows' store, 1 the columns'."""
    rows = plan.rows.examples(plan.tile, *group.rows)
    cols = plan.cols.examples(plan.tile, *group.cols)
    merged = merge_ranges(plan.rows, rows, plan.cols, cols, plan.symmetric)
    return [(0 if plan.symmetric else n, a, b) for n, (_, a, b) in enumerate(merged)]


class _Slabs:
    """Slabs of a group's rows, the next one being read while the caller multiplies."""

    def __init__(
        self, rows: JacobianStore, cols: JacobianStore | None, plan: GramPlan, group: Group, dtype: np.dtype[Any]
    ) -> None:
        stores = (rows, cols or rows)
        self.sources = [(stores[side], a, b) for side, a, b in _ranges(plan, group)]
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


def make_engine(
    name: str, precision: str, stored: str, device_memory: int | None, threads: int | None = None
) -> Engine:
    if name == "blas":
        return BlasEngine(precision, threads)
    from jacstore.engine_xla import XlaEngine

    return XlaEngine(precision, stored, device_memory)
