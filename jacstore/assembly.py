"""In: stores and a plan. Out: a kernel, tile by tile; items run on Dask, each reading slabs while it multiplies others.

An item owns the accumulators of a group of tiles over a range of columns, and leaves its result on disk. Nothing here
knows the user's model: a kernel needs only what is stored.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import dask
import dask.array as da
import numpy as np
import threadpoolctl
from crc32c import crc32c
from distributed import Client, LocalCluster, wait

from jacstore import hierarchy, machine
from jacstore.engine import PRECISIONS, BlasEngine, Engine, symmetrize
from jacstore.errors import Damaged, Interrupted, JacstoreError, Locked, Mismatch, Refused
from jacstore.files import Files, Folder
from jacstore.kernel import LEAVES, WHOLE, Kernel, expected_bytes, layouts
from jacstore.ledger import Lock, compare_requested
from jacstore.machine import format_size, parse_size
from jacstore.plan import MODES, SLAB_COLUMNS, GramPlan, Group, Item, block_shape, merge_ranges, plan_gram
from jacstore.progress import CheckpointDone, ItemDone, Listener, SlabDone, Started, silent
from jacstore.store import JacobianStore, open_store

KNOWN = (WHOLE, LEAVES, "partials", "checkpoints")
# Checkpoints may take this share of the time; a kill then loses at most their cost divided by it.
CHECKPOINT_SHARE = 0.05
# What writing a first checkpoint is taken to cost, in bytes a second, until one has been timed.
CHECKPOINT_SPEED = 3e8
# Locks on the final sums of groups, numbered apart from items.
FINISH = 1_000_000


def open_path(path: str | Path) -> JacobianStore | Kernel:
    """Open a store or a kernel on disk for reading."""
    kind = hierarchy.read_attributes(Folder(path), str(path))["kind"]
    return open_store(str(path)) if kind == "store" else Kernel(Folder(path), str(path))


def gram(
    store: JacobianStore | str | Path,
    other: JacobianStore | str | Path | None = None,
    out: str | Path | None = None,
    *,
    memory: int | str | None = None,
    device_memory: int | str | None = None,
    mode: str = "full",
    dtype: str = "float64",
    precision: str | None = None,
    engine: str = "auto",
    tile: int | None = None,
    by_leaf: bool = False,
    triangle: bool = False,
    part: tuple[int, int] | str | None = None,
    scheduler: str = "threads",
    workers: int | None = None,
    overwrite: bool = False,
    listener: Listener = silent,
    stop: Callable[[], bool] | None = None,
) -> Kernel:
    """Assemble the kernel of a store, or between two stores; a rerun computes only what is missing.

    Parameters
    ----------
    store, other
        Stores or their paths. With `other` the kernel is rectangular: rows of `store`, columns of `other`. A path in
        the place of `other` whose `out` is missing is taken as `out`.
    out
        Folder of the kernel; None or "memory://" for RAM.
    memory
        Bytes to allocate on the host, all workers together, such as "8GB"; half of what is available if not given.
    device_memory
        Bytes of accumulators that may stay on the accelerator; three quarters of its memory if not given.
    mode
        full `(N*K, M*K)`, trace `(N, M)` (the sum over outputs), diagonal `(K, N, M)` or blocks `(N, K, K)`.
    dtype
        Type of the stored kernel, float64 or float32.
    precision
        Type of the products: float64, float32, or fast (16-bit or TF32); sums are float64. Default float64 for float64
        stores, else float32.
    engine
        blas, xla, or auto: xla where there is an accelerator or precision is fast, else blas.
    tile
        Edge of a kernel tile in examples (in mode full a tile has K times as many rows).
    by_leaf
        Keep one kernel for each parameter leaf; they add up to the kernel.
    triangle
        Store only tiles on and above the diagonal.
    part
        `(I, N)` or "I/N": only the I-th of N parts of the items, counted from 1; whoever finishes last adds them up.
    scheduler
        threads (here), processes (a local cluster) or the address of a Dask scheduler.
    workers
        Processes to share the work.

    Returns
    -------
    Kernel
        With `.report`: the keys of `jacstore gram --json`.
    """
    started = time.perf_counter()
    if other is not None and out is None and not isinstance(other, JacobianStore):
        other, out = None, other
    job = _Job(
        store,
        other,
        out,
        memory=memory,
        device_memory=device_memory,
        mode=mode,
        dtype=dtype,
        precision=precision,
        engine=engine,
        tile=tile,
        by_leaf=by_leaf,
        triangle=triangle,
        part=part,
        scheduler=scheduler,
        workers=workers,
    )
    kernel = job.create(overwrite, listener)
    return job.run(kernel, started, listener, stop or (lambda: False))


def plan_for(store: JacobianStore | str | Path, other: Any = None, out: Any = None, **options: Any) -> dict[str, Any]:
    """What `gram` would do, with timed products and reads; writes nothing. Options are those of `gram`."""
    return _Job(store, other, out, **options).describe()


def lazy_kernel(
    store: JacobianStore | str | Path,
    mode: str = "full",
    other: JacobianStore | str | Path | None = None,
    *,
    tile: int = 256,
    precision: str | None = None,
) -> da.Array:
    """A kernel that is not stored: a lazy Dask array whose tiles are computed from the store when asked for.

    Each tile reads the rows of its examples, so a whole pass over the array reads the store many times: this is for
    kernels larger than any disk, of which some tiles are wanted.

    Parameters
    ----------
    tile
        Edge of a tile in examples.
    """
    rows, cols = _as_store(store), None if other is None else _as_store(other)
    _check_mode(mode, cols)
    rows.require_complete()
    if cols is not None:
        cols.require_complete()
        _refuse_unlike(rows, cols)
    view = _ComputedKernel(rows, cols or rows, mode, precision or _default_precision(rows, cols))
    chunks = block_shape(mode, tile, tile, rows.n_outputs)
    name = f"jacstore-lazy-{hierarchy.short_hash([rows.identity(), (cols or rows).identity(), mode, tile, precision])}"
    return da.from_array(view, chunks=chunks, name=name, asarray=False)


# ------------------------------------------------------------------------------------------------------------- one item


@dataclass(frozen=True, kw_only=True)
class Work:
    """What an item needs, small enough to send to another process: stores and kernel travel as their paths."""

    rows: JacobianStore
    cols: JacobianStore | None
    kernel: Kernel
    threads: int | None
    device_memory: int | None

    def engine(self) -> Engine:
        resolved = self.kernel.resolved
        return _make_engine(resolved["engine"], resolved["precision"], self.rows.dtype, self.device_memory)


def run_item(
    work: Work, number: int, listener: Listener = silent, stop: Callable[[], bool] = lambda: False
) -> dict[str, Any]:
    """Compute one item and leave its result on disk; returns counts and seconds.

    An item may run twice, after a worker died: it writes the same bytes to the same places.
    """
    with threadpoolctl.threadpool_limits(work.threads, "blas"):
        try:
            return _Run(work, work.kernel.plan.items[number], listener, stop).run()
        except JacstoreError:
            raise
        except Exception as error:
            group = work.kernel.plan.groups[work.kernel.plan.items[number].group]
            error.add_note(f"in item {number}: tiles {group.rows} x {group.cols}")
            raise


class _Run:
    """One item being computed."""

    def __init__(self, work: Work, item: Item, listener: Listener, stop: Callable[[], bool]) -> None:
        self.work, self.item, self.listener, self.stop = work, item, listener, stop
        self.kernel, self.plan = work.kernel, work.kernel.plan
        self.group = self.plan.groups[item.group]
        self.tiles = self.plan.tiles_of(self.group)
        self.engine = work.engine()
        self.times = {"seconds_read": 0.0, "seconds_compute": 0.0, "seconds_write": 0.0}
        self.checkpoints = _Checkpoints(self.kernel, item.number, [self.plan.tile_shape(i, j) for i, j in self.tiles])
        self.leaves = self._leaf_ranges()
        self.partial_facts: dict[str, Any] = {}

    def _leaf_ranges(self) -> list[tuple[int, int, int]]:
        """(index, first, last) of the columns that are summed apart: each leaf's with by-leaf, else all."""
        first, last = self.item.columns
        if not self.kernel.leaves:
            return [(0, first, last)]
        leaves = [(n, f.offset, f.offset + f.size) for n, f in enumerate(self.work.rows.leaves)]
        return [(n, a, b) for n, a, b in leaves if first <= a and b <= last]

    def run(self) -> dict[str, Any]:
        read_before = self._bytes()
        slabs = self.plan.slabs(self.item.columns)
        first, totals = self.checkpoints.load()
        begin = self._tiles_begin(slabs, first)
        totals = [self.engine.restore(t) for t in totals] if totals else self._zeros()
        source = _Slabs(self.work.rows, self.work.cols, self.plan, self.group, self.engine.slab_dtype)
        with contextlib.closing(source.read(slabs[first:])) as stream:
            for index, ((a, b), buffers, waited) in enumerate(stream, start=first):
                if self.stop():
                    self.checkpoints.save(index, [self.engine.fetch(t) for t in totals])
                    raise Interrupted(f"interrupted in item {self.item.number}, slab {index} of {len(slabs)}")
                self.times["seconds_read"] += waited
                started = time.perf_counter()
                operands = [self.engine.load(buffer) for buffer in buffers]
                for leaf, c, d in self.leaves:
                    if max(a, c) >= min(b, d):
                        continue
                    self._add(totals, operands, slice(max(a, c) - a, min(b, d) - a))
                    if d <= b:
                        self.times["seconds_compute"] += time.perf_counter() - started
                        if leaf >= begin:
                            self._finish_leaf(leaf, totals)
                        started = time.perf_counter()
                        totals = self._zeros() if self.leaves[-1][0] != leaf else totals
                self.times["seconds_compute"] += time.perf_counter() - started
                self.listener(SlabDone(item=self.item.number, slab=index, bytes_read=sum(x.nbytes for x in buffers)))
                if index + 1 < len(slabs) and self.checkpoints.due():
                    self.checkpoints.save(index + 1, [self.engine.fetch(t) for t in totals])
                    self.listener(CheckpointDone(item=self.item.number, slab=index + 1))
        files_read, decoded = (after - before for after, before in zip(self._bytes(), read_before, strict=True))
        facts = {"bytes_read": files_read, "decoded_bytes": decoded, "slabs": len(slabs) - first, **self.times}
        self.kernel.ledger.record("item", self.item.number, {**facts, **self.partial_facts})
        self.checkpoints.clear()
        return {"item": self.item.number, "peak_rss": machine.peak_rss(), **facts}

    def _tiles_begin(self, slabs: list[tuple[int, int]], first: int) -> int:
        """The first leaf that is still to be finished; those before it ended before the checkpoint."""
        if first >= len(slabs):
            return 0
        return min((leaf for leaf, _, last in self.leaves if last > slabs[first][0]), default=0)

    def _bytes(self) -> tuple[int, int]:
        stores = {id(s): s for s in (self.work.rows, self.work.cols) if s is not None}.values()
        return sum(s.files.bytes_read for s in stores), sum(s.decoded_bytes_read for s in stores)

    def _zeros(self) -> list[Any]:
        return [self.engine.zeros(self.plan.tile_shape(i, j)) for i, j in self.tiles]

    def _add(self, totals: list[Any], operands: list[Any], columns: slice) -> None:
        """Add the product of one slab to every tile of the group."""
        plan, side = self.plan, operands[-1]
        origin = self._origins()
        for index, (i, j) in enumerate(self.tiles):
            a, b = plan.rows.examples(plan.tile, i, i + 1)
            c, d = plan.cols.examples(plan.tile, j, j + 1)
            rows, cols = slice(a - origin[0], b - origin[0]), slice(c - origin[1], d - origin[1])
            totals[index] = self.engine.add(plan.mode, totals[index], operands[0], rows, side, cols, columns)

    def _origins(self) -> tuple[int, int]:
        """First example of the slab that holds the rows, and of the one that holds the columns."""
        ranges = _ranges(self.plan, self.group)
        return ranges[0][1], ranges[-1][1]

    def _finish_leaf(self, leaf: int, totals: list[Any]) -> None:
        """Write the tiles of a finished sum, or the partial sum where columns are split over items."""
        started = time.perf_counter()
        host = [self.engine.fetch(total) for total in totals]
        if len(self.plan.splits) > 1 and not self.kernel.leaves:
            name = partial_name(self.item.number)
            checksums = [crc32c(memoryview(t.reshape(-1).view(np.uint8))) for t in host]
            self.kernel.files.write(name, [memoryview(t.reshape(-1).view(np.uint8)) for t in host])
            self.kernel.files.sync_folders([name])
            self.partial_facts = {"checksums": checksums}
        else:
            write_tiles(self.kernel, self.item.group, leaf, zip(self.tiles, host, strict=True))
        self.times["seconds_write"] += time.perf_counter() - started


def partial_name(item: int) -> str:
    """File of an item's partial sums."""
    return f"partials/item-{item:07d}.bin"


def write_tiles(kernel: Kernel, group: int, leaf: int, tiles: Any) -> None:
    """Write the tiles of a group for one leaf and mark them as finished."""
    records: dict[str, Any] = {}
    count = 0
    for (i, j), total in tiles:
        if kernel.plan.symmetric and i == j:
            total = symmetrize(kernel.mode, total)
        records |= kernel.write_tile(leaf, i, j, total.astype(kernel.dtype, copy=False))
        count += 1
    kernel.files.sync_folders(records)
    number = group * len(kernel.layouts) + leaf
    kernel.ledger.record("tiles", number, {"tiles": count, "files": records})


def finish_group(work: Work, group: int, _after: Any = None) -> dict[str, Any]:
    """Add up the partial sums of a group in item order and write its tiles."""
    kernel, plan = work.kernel, work.kernel.plan
    started = time.perf_counter()
    items = [item for item in plan.items if item.group == group]
    records = [kernel.ledger.read("item", item.number) for item in items]

    def sums() -> Iterator[tuple[tuple[int, int], np.ndarray]]:
        offset = 0
        for index, (i, j) in enumerate(plan.tiles_of(plan.groups[group])):
            total = np.zeros(plan.tile_shape(i, j))
            for item, record in zip(items, records, strict=True):
                part = np.empty(total.shape)
                view = memoryview(part.reshape(-1).view(np.uint8))
                try:
                    kernel.files.read_into(partial_name(item.number), [(offset, view)])
                    if crc32c(view) != record["checksums"][index]:
                        raise Damaged(f"{partial_name(item.number)} differs from its recorded checksum")
                except Damaged as error:
                    kernel.ledger.forget("item", item.number)
                    raise Damaged(f"{kernel.path}: {error}; run the same gram again to recompute this item") from error
                total += part
            offset += total.nbytes
            yield (i, j), total

    write_tiles(kernel, group, 0, sums())
    for item in items:
        kernel.files.remove(partial_name(item.number))
    return {"group": group, "seconds_write": time.perf_counter() - started}


class _Checkpoints:
    """Accumulators of a running item in two alternating files, each valid once its record is there."""

    def __init__(self, kernel: Kernel, item: int, shapes: list[tuple[int, ...]]) -> None:
        self.kernel, self.item, self.shapes = kernel, item, shapes
        self.cost = 8 * sum(int(np.prod(shape)) for shape in shapes) / CHECKPOINT_SPEED
        self.turn = 0
        self.last = time.perf_counter()

    def due(self) -> bool:
        """Whether checkpoints keep within their share of the time if one is written now."""
        return isinstance(self.kernel.files, Folder) and time.perf_counter() - self.last > self.cost / CHECKPOINT_SHARE

    def save(self, slab: int, totals: list[np.ndarray]) -> None:
        """Write the sums over all slabs before `slab`."""
        if not isinstance(self.kernel.files, Folder) or slab == 0:
            return
        started = time.perf_counter()
        kind, name = f"checkpoint-{self.turn}", f"checkpoints/item-{self.item:07d}-{self.turn}.bin"
        self.kernel.ledger.forget(kind, self.item)
        views = [memoryview(np.ascontiguousarray(t).reshape(-1).view(np.uint8)) for t in totals]
        self.kernel.files.write(name, views)
        self.kernel.files.sync_folders([name])
        self.kernel.ledger.record(kind, self.item, {"slab": slab, "checksums": [crc32c(view) for view in views]})
        self.turn = 1 - self.turn
        self.last = time.perf_counter()
        self.cost = self.last - started

    def load(self) -> tuple[int, list[np.ndarray]]:
        """The newest valid checkpoint: its slab and sums; slab 0 and nothing if there is none."""
        found = []
        for turn in (0, 1):
            with contextlib.suppress(Damaged, KeyError):
                record = self.kernel.ledger.read(f"checkpoint-{turn}", self.item)
                found.append((record["slab"], turn, record["checksums"]))
        for slab, turn, checksums in sorted(found, reverse=True):
            totals = [np.empty(shape) for shape in self.shapes]
            views = [memoryview(total.reshape(-1).view(np.uint8)) for total in totals]
            offsets = np.cumsum([0, *(len(view) for view in views[:-1])])
            with contextlib.suppress(Damaged):
                name = f"checkpoints/item-{self.item:07d}-{turn}.bin"
                self.kernel.files.read_into(name, list(zip(map(int, offsets), views, strict=True)))
                if [crc32c(view) for view in views] == checksums:
                    self.turn = 1 - turn
                    return slab, totals
        return 0, []

    def clear(self) -> None:
        """Remove what is no longer needed."""
        for turn in (0, 1):
            self.kernel.ledger.forget(f"checkpoint-{turn}", self.item)
            self.kernel.files.remove(f"checkpoints/item-{self.item:07d}-{turn}.bin")


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
        self.n_outputs = plan.n_outputs

    def read(self, slabs: list[tuple[int, int]]) -> Iterator[tuple[tuple[int, int], list[np.ndarray], float]]:
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
            store.read_rows(a, b, *slab, view)
            filled.append(view)
        return filled


class _ComputedKernel:
    """A kernel as an array-like for Dask whose blocks are computed from the stores."""

    def __init__(self, rows: JacobianStore, cols: JacobianStore, mode: str, precision: str) -> None:
        self.rows, self.cols, self.mode, self.precision = rows, cols, mode, precision
        self.shape = block_shape(mode, rows.n_examples, cols.n_examples, rows.n_outputs)
        self.ndim = len(self.shape)
        self.dtype = np.dtype("float64")

    def __getitem__(self, index: tuple[slice, ...]) -> np.ndarray:
        ranges = [range(*s.indices(n)) for s, n in zip(index, self.shape, strict=True)]
        if not all(len(r) for r in ranges):
            return np.empty([len(r) for r in ranges], self.dtype)
        spans = [(min(r[0], r[-1]), max(r[0], r[-1]) + 1) for r in ranges]
        k = self.rows.n_outputs if self.mode == "full" else 1
        axes = {"full": (0, 1), "trace": (0, 1), "diagonal": (1, 2), "blocks": (0, 0)}[self.mode]
        examples = [(spans[axis][0] // k, -(-spans[axis][1] // k)) for axis in axes]
        block = self._block(*examples)
        for axis in set(axes):
            first = examples[axes.index(axis)][0] * k
            spans[axis] = (spans[axis][0] - first, spans[axis][1] - first)
        block = block[tuple(slice(a, b) for a, b in spans)]
        return block[tuple(slice(None, None, r.step) for r in ranges)]

    def _block(self, rows: tuple[int, int], cols: tuple[int, int]) -> np.ndarray:
        """The kernel between two ranges of examples, streamed over columns."""
        engine = BlasEngine(self.precision)
        m, n, k = rows[1] - rows[0], cols[1] - cols[0], self.rows.n_outputs
        total = engine.zeros(block_shape(self.mode, m, n, k))
        width = max(1, SLAB_COLUMNS // self.rows.side.piece_columns) * self.rows.side.piece_columns
        same = self.rows is self.cols and rows == cols
        for a in range(0, self.rows.n_parameters, width):
            b = min(a + width, self.rows.n_parameters)
            left = np.empty((m, k, b - a), engine.slab_dtype)
            self.rows.read_rows(*rows, a, b, left)
            right = left if same else np.empty((n, k, b - a), engine.slab_dtype)
            if not same:
                self.cols.read_rows(*cols, a, b, right)
            engine.add(self.mode, total, left, slice(0, m), right, slice(0, n), slice(0, b - a))
        return total


# -------------------------------------------------------------------------------------------------------------- one job


def _make_engine(name: str, precision: str, stored: str, device_memory: int | None) -> Engine:
    if name == "blas":
        return BlasEngine(precision)
    from jacstore.engine_xla import XlaEngine

    return XlaEngine(precision, stored, device_memory)


def _accelerator_is_likely() -> bool:
    """Whether a JAX plug-in for a device is installed; JAX itself is not imported to find out."""
    plugins = ("jax_cuda12_plugin", "jax_cuda13_plugin", "jax_rocm60_plugin", "jax_rocm7_plugin", "libtpu")
    asked = os.environ.get("JAX_PLATFORMS", "")
    return asked not in ("cpu",) and (bool(asked) or any(importlib.util.find_spec(p) is not None for p in plugins))


def _default_precision(rows: JacobianStore, cols: JacobianStore | None) -> str:
    return "float64" if "float64" in (rows.dtype, (cols or rows).dtype) else "float32"


def _as_store(given: JacobianStore | str | Path) -> JacobianStore:
    return given if isinstance(given, JacobianStore) else open_store(str(given))


def _check_mode(mode: str, cols: Any) -> None:
    if mode not in MODES:
        raise Refused(f"--mode {mode}: allowed are {', '.join(MODES)} (mode=)")
    if mode == "blocks" and cols is not None:
        raise Refused("--mode blocks is each example with itself and takes one store; leave out OTHER (other=)")


def _refuse_unlike(rows: JacobianStore, cols: JacobianStore) -> None:
    """Refuse a rectangular kernel between rows that are not about the same parameters."""
    pairs: list[tuple[str, Any, Any]] = [
        (field, rows.requested.get(field), cols.requested.get(field))
        for field in ("parameters", "selection", "constants")
        if field in rows.requested and field in cols.requested
    ]
    pairs.append(("leaves", [(f.path, f.shape) for f in rows.leaves], [(f.path, f.shape) for f in cols.leaves]))
    pairs.append(("outputs", rows.n_outputs, cols.n_outputs))
    differing = [field for field, a, b in pairs if a != b]
    if differing:
        raise Mismatch(
            f"{rows.path} and {cols.path} differ in {', '.join(differing)}; a rectangular kernel needs rows of the same "
            "parameters: build both stores from one network"
        )


class _Job:
    """One gram: its stores, its checked options and what is decided for it."""

    def __init__(
        self,
        store: JacobianStore | str | Path,
        other: JacobianStore | str | Path | None,
        out: str | Path | None,
        *,
        memory: int | str | None = None,
        device_memory: int | str | None = None,
        mode: str = "full",
        dtype: str = "float64",
        precision: str | None = None,
        engine: str = "auto",
        tile: int | None = None,
        by_leaf: bool = False,
        triangle: bool = False,
        part: tuple[int, int] | str | None = None,
        scheduler: str = "threads",
        workers: int | None = None,
    ) -> None:
        self.rows = _as_store(store)
        self.cols = None if other is None else _as_store(other)
        _check_mode(mode, self.cols)
        self.out = "memory://" if out is None else str(out)
        self.memory = machine.default_memory(memory)
        self.device_memory = parse_size(device_memory, "--device-memory")
        for name, given, allowed in (
            ("dtype", dtype, ("float64", "float32")),
            ("precision", precision or "float32", PRECISIONS),
            ("engine", engine, ("auto", "blas", "xla")),
        ):
            if given not in allowed:
                raise Refused(f"--{name} {given}: allowed are {', '.join(allowed)} ({name}=)")
        for name, number in (("tile", tile), ("workers", workers)):
            if number is not None and (not isinstance(number, int) or number < 1):
                raise Refused(f"--{name} {number}: must be an integer of at least 1 ({name}=)")
        if scheduler not in ("threads", "processes") and "://" not in scheduler:
            raise Refused(f"--scheduler {scheduler}: allowed are threads, processes or an address (scheduler=)")
        if scheduler == "threads" and (workers or 1) > 1:
            raise Refused("--workers: threads run one item at a time on all cores; use --scheduler processes (scheduler=)")
        self.part = hierarchy.parse_part(part)
        self.rows.require_complete()
        if self.cols is not None:
            self.cols.require_complete()
            _refuse_unlike(self.rows, self.cols)
        self.precision = precision or _default_precision(self.rows, self.cols)
        self.engine_name = self._choose_engine(engine)
        self.scheduler, self.workers, self.tile, self.by_leaf = scheduler, workers, tile, by_leaf
        self.requested = {
            "store": self.rows.identity(),
            "other": None if self.cols is None else self.cols.identity(),
            "mode": mode,
            "dtype": dtype,
            "precision": self.precision,
            "engine": engine,
            "tile": tile,
            "by_leaf": by_leaf,
            "triangle": triangle,
            "parts": self.part[1],
        }
        self.mode, self.dtype, self.triangle = mode, dtype, triangle

    def _choose_engine(self, asked: str) -> str:
        if asked == "auto":
            return "xla" if self.precision == "fast" or _accelerator_is_likely() else "blas"
        if asked == "blas" and self.precision == "fast":
            raise Refused("--precision fast: BLAS has no 16-bit products; use --engine xla (engine=) or float32 (precision=)")
        return asked

    @property
    def share(self) -> int:
        """Workers that share the work of one part."""
        return self.workers or (machine.cores() if self.scheduler == "processes" else 1)

    def plan(self) -> GramPlan:
        """The plan for this machine's memory; parts each have a machine of their own."""
        if self.scheduler not in ("threads", "processes") and self.workers is None:
            with _connect(self.scheduler) as client:
                self.workers = max(1, len(client.scheduler_info()["workers"]))
        engine = _make_engine(self.engine_name, self.precision, self.rows.dtype, self.device_memory)
        memory = self.memory - self._memory_held()
        parts = self.part[1]
        return plan_gram(
            mode=self.mode,
            rows=self.rows.side,
            cols=None if self.cols is None else self.cols.side,
            n_outputs=self.rows.n_outputs,
            n_columns=self.rows.n_parameters,
            product_itemsize=engine.slab_dtype.itemsize,
            memory=max(1, memory) * parts,
            workers=self.share * parts,
            tile=self.tile,
            leaf_borders=[leaf.offset for leaf in self.rows.leaves] if self.by_leaf else None,
            engine_copies=(engine.slab_copies, engine.tile_copies),
        )

    def _memory_held(self) -> int:
        """Bytes of the budget that a kernel in RAM will take."""
        if self.out != "memory://":
            return 0
        shape = block_shape(self.mode, self.rows.n_examples, (self.cols or self.rows).n_examples, self.rows.n_outputs)
        return int(np.prod(shape)) * np.dtype(self.dtype).itemsize

    def create(self, overwrite: bool, listener: Listener) -> Kernel:
        """The kernel to work on: a new one, or the one that was begun with the same request."""
        files = hierarchy.place(self.out, 2**62 if self.out == "memory://" else self.memory)
        if not isinstance(files, Folder) and self.scheduler != "threads":
            raise Refused("a kernel in RAM needs --scheduler threads (scheduler=); or give --out (out=)")
        with hierarchy.creating(files, self.out, KNOWN, overwrite, listener):
            if files.size(hierarchy.ROOT) is None:
                self._create(files)
            kernel = Kernel(files, self.out)
            compare_requested(self.out, kernel.requested, self.requested)
        allowed = self.memory * self.part[1]
        if kernel.plan.memory_bytes > max(allowed, 1) and not kernel.complete:
            raise Refused(
                f"--memory {self.memory:,}: {self.out} was begun with a plan that takes "
                f"{kernel.plan.memory_bytes:,} bytes; give at least that (memory=) or start anew with --overwrite"
            )
        return kernel

    def _create(self, files: Files) -> None:
        plan = self.plan()
        leaves = [leaf.path for leaf in self.rows.leaves] if self.by_leaf else []
        if isinstance(files, Folder):
            needed = expected_bytes(plan, leaves, np.dtype(self.dtype).itemsize, self.triangle)
            free = machine.free_disk(files.root)
            if needed > free:
                raise Refused(
                    f"{self.out}: the kernel takes {format_size(needed)}, its disk has {format_size(free)} free; choose "
                    "another disk (--out, out=), --triangle (triangle=True) or --dtype float32 (dtype=)"
                )
        attributes = {
            "kind": "kernel",
            "stores": [_relative(s.path, self.out) for s in (self.rows, self.cols) if s is not None],
            "fingerprint": self.requested,
            "resolved": {
                "plan": plan.to_dict(),
                "engine": self.engine_name,
                "precision": self.precision,
                "leaves": leaves,
            },
            "versions": hierarchy.versions(),
        }
        hierarchy.create(files, layouts(plan, leaves, self.dtype), attributes, groups=[LEAVES] if leaves else [])

    def run(self, kernel: Kernel, started: float, listener: Listener, stop: Callable[[], bool]) -> Kernel:
        """Run the missing items of this part, then finish groups whose items are all there."""
        plan = kernel.plan
        items = plan.items
        number, parts = self.part
        mine = range((number - 1) * len(items) // parts, number * len(items) // parts)
        lock = Lock(kernel.files, mine.start, mine.stop - 1, listener) if isinstance(kernel.files, Folder) else None
        with lock or contextlib.nullcontext():
            done = set(kernel.ledger.done("item"))
            finished = _finished_groups(kernel)
            todo = [n for n in mine if n not in done and items[n].group not in finished]
            tiles_before = _tiles_done(kernel)
            listener(Started(what="items", total=len(mine), done=len(mine) - len(todo)))
            threads = max(1, machine.cores() // self.share) if self.share > 1 else None
            work = Work(
                rows=self.rows, cols=self.cols, kernel=kernel, threads=threads, device_memory=self._resident_bytes()
            )
            results = self._execute(work, todo, listener, stop)
            results += self._finish(work, listener)
        tiles_computed = _tiles_done(kernel) - tiles_before
        stored = self.rows.bytes_decoded + (0 if self.cols is None else self.cols.bytes_decoded)
        decoded = sum(r.get("decoded_bytes", 0) for r in results)
        kernel.report = {
            "kernel": kernel.path,
            "rows": kernel.shape[-2],
            "columns": kernel.shape[-1],
            "mode": kernel.mode,
            "tiles_total": plan.tiles_total * len(kernel.layouts),
            "tiles_computed": tiles_computed,
            "tiles_reused": tiles_before,
            "items_total": len(items),
            "items_computed": len(todo),
            "items_reused": len(mine) - len(todo),
            "passes": decoded / stored,
            "bytes_read": sum(r.get("bytes_read", 0) for r in results),
            "flops": plan.flops * len(todo) // len(items),
            "seconds_total": time.perf_counter() - started,
            **{key: sum(r.get(key, 0.0) for r in results) for key in ("seconds_read", "seconds_compute", "seconds_write")},
            "peak_rss": max([machine.peak_rss(), *(r.get("peak_rss", 0) for r in results)]),
            "engine": kernel.resolved["engine"],
            "schedule": plan.schedule,
            "expected_passes": plan.passes,
            "complete": kernel.complete,
        }
        return kernel

    def _resident_bytes(self) -> int | None:
        """Bytes of accumulators that may stay on an accelerator."""
        if self.engine_name != "xla":
            return None
        from jacstore.engine_xla import resident_bytes

        return resident_bytes(self.device_memory)

    def _execute(
        self, work: Work, todo: list[int], listener: Listener, stop: Callable[[], bool]
    ) -> list[dict[str, Any]]:
        if not todo:
            return []
        if self.scheduler == "threads":
            return _on_threads(work, todo, listener, stop)
        with _cluster(self.scheduler, min(self.share, len(todo))) as client:
            return _on_cluster(client, work, todo, listener, stop)

    def _finish(self, work: Work, listener: Listener) -> list[dict[str, Any]]:
        """Add up partial sums of groups whose items are all done; another part may be doing so."""
        kernel, results = work.kernel, []
        done, finished = set(kernel.ledger.done("item")), _finished_groups(kernel)
        for group in range(len(kernel.plan.groups)):
            items = {item.number for item in kernel.plan.items if item.group == group}
            if group in finished or not items <= done:
                continue
            lock = Lock(kernel.files, FINISH + group, FINISH + group, listener) if isinstance(kernel.files, Folder) else None
            with contextlib.suppress(Locked), lock or contextlib.nullcontext():
                if group not in _finished_groups(kernel):
                    results.append(finish_group(work, group))
        return results

    def describe(self) -> dict[str, Any]:
        """The plan as numbers, with expected seconds from a timed product and a timed read."""
        plan = self.plan()
        speed, read_speed = self._measured_speeds(plan)
        leaves = [leaf.path for leaf in self.rows.leaves] if self.by_leaf else []
        size = expected_bytes(plan, leaves, np.dtype(self.dtype).itemsize, self.triangle)
        accumulators = 8 * max(
            sum(int(np.prod(plan.tile_shape(i, j))) for i, j in plan.tiles_of(group)) for group in plan.groups
        )
        seconds = max(plan.flops / speed, plan.bytes_expected / read_speed)
        interval = accumulators / CHECKPOINT_SPEED / CHECKPOINT_SHARE
        item_seconds = seconds / len(plan.items)
        return {
            "kernel": self.out,
            "shape": list(block_shape(plan.mode, plan.rows.n_examples, plan.cols.n_examples, plan.n_outputs)),
            "mode": plan.mode,
            "schedule": plan.schedule,
            "engine": self.engine_name,
            "precision": self.precision,
            "passes": plan.passes,
            "bytes_read": plan.bytes_expected,
            "bytes_to_store": size,
            "bytes_free": machine.free_disk(self.out) if self.out != "memory://" else self.memory,
            "flops": plan.flops,
            "memory": plan.memory_bytes,
            "items_total": len(plan.items),
            "tiles_total": plan.tiles_total * max(1, len(leaves)),
            "tile": plan.tile,
            "slab_columns": plan.slab_columns,
            "files": plan.grid[0] * (1 if plan.mode == "blocks" else plan.grid[1]) * max(1, len(leaves)),
            "expected_seconds": seconds,
            "expected_flops_per_second": speed,
            "expected_seconds_lost_by_a_kill": min(interval, item_seconds),
        }

    def _measured_speeds(self, plan: GramPlan) -> tuple[float, float]:
        """flop/s of one tile's product and bytes/s of one read, each timed twice and the second taken."""
        engine = _make_engine(self.engine_name, self.precision, self.rows.dtype, self.device_memory)
        examples = min(plan.tile, plan.rows.n_examples, max(1, 2048 // plan.n_outputs))
        width = min(plan.slab_columns, plan.n_columns)
        slab = np.empty((examples, plan.n_outputs, width), engine.slab_dtype)
        for _ in range(2):
            started = time.perf_counter()
            self.rows.read_rows(0, examples, 0, width, slab)
            read = slab.nbytes / (time.perf_counter() - started)
        operand = engine.load(slab)
        shape = block_shape(plan.mode, examples, examples, plan.n_outputs)
        total = engine.zeros(shape)
        other = engine.load(slab.copy())
        span = slice(0, examples)
        for _ in range(2):
            started = time.perf_counter()
            total = engine.add(plan.mode, total, operand, span, other, span, slice(0, width))
            engine.fetch(total)
            seconds = time.perf_counter() - started
        depth = width * (plan.n_outputs if plan.mode == "trace" else 1)
        return 2 * int(np.prod(shape)) * depth / seconds, read


def _relative(store: str, kernel: str) -> str:
    """A store's path relative to its kernel, so that both can be moved together."""
    if "memory://" in (store, kernel):
        return store
    return os.path.relpath(os.path.abspath(store), os.path.abspath(kernel))


def _finished_groups(kernel: Kernel) -> set[int]:
    per_group = len(kernel.layouts)
    done = kernel.ledger.done("tiles")
    counts = [number // per_group for number in done]
    return {group for group in set(counts) if counts.count(group) == per_group}


def _tiles_done(kernel: Kernel) -> int:
    return sum(kernel.ledger.read("tiles", number)["tiles"] for number in kernel.ledger.done("tiles"))


def _on_threads(
    work: Work, todo: list[int], listener: Listener, stop: Callable[[], bool]
) -> list[dict[str, Any]]:
    """One item after the other, each on all cores: BLAS has the threads."""

    def one(number: int) -> dict[str, Any]:
        if stop():
            raise Interrupted("interrupted before an item")
        result = run_item(work, number, listener, stop)
        listener(ItemDone(item=number))
        return result

    tasks = [dask.delayed(one, pure=False)(number) for number in todo]
    return list(dask.compute(*tasks, scheduler="threads", num_workers=1))


def _on_cluster(
    client: Any, work: Work, todo: list[int], listener: Listener, stop: Callable[[], bool]
) -> list[dict[str, Any]]:
    """Items on worker processes; a worker that dies is replaced and its items run again."""
    token = os.urandom(4).hex()
    futures = [
        client.submit(run_item, work, number, key=f"jacstore-item-{number}-{token}", pure=False) for number in todo
    ]
    results = []
    try:
        pending = set(futures)
        while pending:
            if stop():
                raise Interrupted("interrupted")
            ready = {future for future in pending if future.done()}
            for future in ready:
                results.append(future.result())
                listener(ItemDone(item=results[-1]["item"]))
            pending -= ready
            if pending and not ready:
                # Signals are noticed between waits.
                with contextlib.suppress(TimeoutError):
                    wait(pending, timeout=0.2, return_when="FIRST_COMPLETED")
    finally:
        client.cancel(futures)
    return results


@contextlib.contextmanager
def _connect(address: str) -> Iterator[Any]:
    try:
        client = Client(address, timeout="10s")
    except (OSError, ValueError) as error:
        raise Refused(f"--scheduler {address}: no Dask scheduler answers there ({error}) (scheduler=)") from error
    try:
        yield client
    finally:
        client.close()


@contextlib.contextmanager
def _cluster(scheduler: str, workers: int) -> Iterator[Any]:
    """A client of a cluster: a local one of single-threaded spawned processes, or the one at an address."""
    if scheduler != "processes":
        with _connect(scheduler) as client:
            yield client
        return
    settings = {
        "distributed.worker.multiprocessing-method": "spawn",
        "distributed.nanny.pre-spawn-environ": {},
        "distributed.admin.low-level-log-length": 0,
    }
    with (
        dask.config.set(settings),
        LocalCluster(
            n_workers=workers,
            threads_per_worker=1,
            processes=True,
            dashboard_address=None,
            # jacstore keeps its own budget; a killed worker would only repeat its item.
            memory_limit=0,
            silence_logs=40,
        ) as cluster,
        Client(cluster) as client,
    ):
        yield client
