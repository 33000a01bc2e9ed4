"""Assemble a kernel tile by tile: items run on Dask, each reading slabs while it multiplies others.

An item owns the accumulators of a group of tiles over a range of columns, and leaves its result on disk. Nothing here
knows the user's model: a kernel needs only what is stored.
"""

from __future__ import annotations

import contextlib
import importlib.util
import math
import os
import time
from collections import Counter
from collections.abc import Callable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from jacstore.base import machine
from jacstore.base.budget import Budget
from jacstore.base.events import Listener, Started, silent
from jacstore.base.limits import BLAS_PRECISIONS, LIMITS
from jacstore.base.machine import format_size
from jacstore.base.precision import entry_error
from jacstore.errors import DamagedDataError, InvalidRequestError, LockedError
from jacstore.kernels.context import Work, common_dtype, make_engine
from jacstore.kernels.engines.blas import Engine
from jacstore.kernels.executors import cluster_at, connect, on_cluster, on_threads
from jacstore.kernels.finish import finish_group
from jacstore.kernels.kernel import Kernel
from jacstore.kernels.lazy import as_mode, as_store, default_precision, made_alike, refuse_unlike
from jacstore.kernels.metadata import check_plan_for
from jacstore.kernels.plan.arrays import LEAVES, WHOLE, expected_bytes, layouts
from jacstore.kernels.plan.options import GramOptions
from jacstore.kernels.plan.plan import GramPlan, Step
from jacstore.kernels.plan.rates import Rates, measured_rates
from jacstore.kernels.plan.reports import GramForecast, GramReport, ItemResult, Spent
from jacstore.kernels.plan.requests import expected_requests
from jacstore.kernels.plan.schedule import plan_gram, worker_parts
from jacstore.kernels.plan.steps import plan_steps
from jacstore.kernels.repair import repair_tiles
from jacstore.kernels.resume import (
    damaged_tiles,
    finished_groups,
    group_is_finished,
    group_lock,
    items_done,
    sweep_items,
    tiles_done,
)
from jacstore.storage import zarr_group
from jacstore.storage.buckets import free_bytes, is_address, located, refuse_unknown, relative, requests
from jacstore.storage.files import Files
from jacstore.storage.kept_arrays import FACTORS
from jacstore.storage.ledger import Lock, compare_requested
from jacstore.storage.runs import keep_run
from jacstore.store.arrays import operand_array
from jacstore.store.reader import JacobianStore
from jacstore.store.unit_buffers import storage_dtype

KNOWN = (WHOLE, LEAVES, FACTORS, "partials", "checkpoints")


def open_path(path: str | Path) -> JacobianStore | Kernel:
    """Open a store or a kernel, on disk or in a bucket, for reading."""
    files = located(path)
    kind = zarr_group.read_attributes(files, str(path))["kind"]
    return JacobianStore(files, str(path)) if kind == "store" else Kernel(files, str(path))


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
    exact_diagonal: bool = False,
    part: tuple[int, int] | str | None = None,
    scheduler: str = "threads",
    workers: int | None = None,
    devices: str | int | Sequence[int] | None = None,
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
        Type of the products: float64, float32; tf32; bf16x9, bf16x6 or bf16x3, for which a device splits float32 into
        bfloat16 numbers; or fast (16-bit or TF32). Sums are float64. Default float64 for float64 stores, else float32.
    engine
        blas, xla, or auto: xla where there is an accelerator or BLAS has no such precision, else blas.
    tile
        Edge of a kernel tile in examples (in mode full a tile has K times as many rows).
    by_leaf
        Keep one kernel for each parameter leaf; they add up to the kernel.
    triangle
        Store only tiles on and above the diagonal.
    exact_diagonal
        Replace the diagonal by squared norms taken before rows were rounded. The kernel is then not J Jᵀ of the stored
        J, which `Kernel.exact_diagonal` says.
    part
        `(I, N)` or "I/N": only the I-th of N parts of the items, counted from 1; whoever finishes last adds them up.
    scheduler
        threads (here), processes (a local cluster) or the address of a Dask scheduler.
    workers
        Processes to share the work.
    devices
        Which devices of a process multiply, where the engine is xla: "all", the first N, or their numbers such as
        "0,2" or `[0, 2]`; slabs go round them. All if not given.

    Returns
    -------
    Kernel
        With `.report`: the keys of `jacstore gram --json`.
    """
    started = time.perf_counter()
    options = GramOptions.among(locals())
    if other is not None and out is None and not isinstance(other, JacobianStore):
        other, out = None, other
    job = _Job(store, other, out, options)
    kernel = job.create(listener)
    return job.run(kernel, started, listener, stop or (lambda: False))


def plan_for(store: JacobianStore | str | Path, other: Any = None, out: Any = None, **options: Any) -> GramForecast:
    """What `gram` would do, with timed products and reads; writes nothing. Options are those of `gram`.

    Raises
    ------
    InvalidRequestError
        As `gram` would, where a kernel of another request or a folder of others is at `out`.
    """
    return _Job(store, other, out, GramOptions(**options)).describe()


def _accelerator_is_likely() -> bool:
    """Whether a JAX plug-in for a device is installed; JAX itself is not imported to find out."""
    plugins = ("jax_cuda12_plugin", "jax_cuda13_plugin", "jax_rocm60_plugin", "jax_rocm7_plugin", "libtpu")
    asked = os.environ.get("JAX_PLATFORMS", "")
    return asked not in ("cpu",) and (bool(asked) or any(importlib.util.find_spec(p) is not None for p in plugins))


class _Job:
    """One gram: its stores, its checked options and what is decided for it."""

    def __init__(
        self,
        store: JacobianStore | str | Path,
        other: JacobianStore | str | Path | None,
        out: str | Path | None,
        options: GramOptions,
    ) -> None:
        self.options, self.requests_before = options, requests()
        self.rows = as_store(store)
        self.cols = None if other is None else as_store(other)
        self.mode = as_mode(options.mode, self.cols)
        self.out = "memory://" if out is None else str(out)
        refuse_unknown(self.out)
        self.memory, self.device_memory, self.part = options.memory, options.device_memory, options.part
        self.dtype, self.triangle = options.dtype, options.triangle
        self.scheduler, self.workers, self.tile = options.scheduler, options.workers, options.tile
        self._refuse_stores()
        self.precision = options.precision or default_precision(self.rows, self.cols)
        self.engine_name = self._choose_engine(options.engine)
        self._refuse_devices()
        self.requested = {
            "store": self.rows.identity(),
            "other": None if self.cols is None else self.cols.identity(),
            "mode": options.mode,
            "dtype": options.dtype,
            "precision": self.precision,
            "engine": options.engine,
            "tile": options.tile,
            "by_leaf": options.by_leaf,
            "triangle": options.triangle,
            "exact_diagonal": options.exact_diagonal,
            "parts": options.part[1],
        }

    def _refuse_stores(self) -> None:
        """Refuse stores that are unfinished or unlike each other, and options that do not go with them."""
        in_ram = [s.path for s in (self.rows, self.cols) if s is not None and s.files.address is None]
        if in_ram and self.scheduler != "threads":
            raise InvalidRequestError(
                f"--scheduler {self.scheduler}: a store in RAM cannot go to other processes; use --scheduler threads "
                "(scheduler=) or build the store on disk (--out, out=)"
            )
        self.rows.require_complete()
        if self.cols is not None:
            self.cols.require_complete()
            refuse_unlike(self.rows, self.cols)
            if self.cols.identity() == self.rows.identity():
                # A store with itself is symmetric: half the work.
                self.cols = None
        if self.options.exact_diagonal and self.cols is not None:
            raise InvalidRequestError(
                "--exact-diagonal: a kernel between two stores has no diagonal; leave it out (exact_diagonal=)"
            )
        if self.triangle and self.cols is not None:
            raise InvalidRequestError(
                "--triangle: a kernel between two stores has no mirrored half; leave it out (triangle=)"
            )

    def _choose_engine(self, asked: str) -> str:
        if asked == "auto":
            return "xla" if self.precision not in BLAS_PRECISIONS or _accelerator_is_likely() else "blas"
        return asked

    def _refuse_devices(self) -> None:
        """Refuse devices that are not there, and what they do not multiply, before anything is written."""
        if self.engine_name == "blas":
            if self.options.devices is not None:
                raise InvalidRequestError(
                    "--devices: BLAS uses no device of JAX; leave it out (devices=), or use --engine xla (engine=)"
                )
            return
        from jacstore.base.devices import local_devices
        from jacstore.kernels.engines.xla import refuse_unsupported

        local_devices(self.options.devices)
        refuse_unsupported(self.precision)

    @property
    def share(self) -> int:
        """Workers that share the work of one part."""
        return self.workers or (machine.cores() if self.scheduler == "processes" else 1)

    def plan(self) -> GramPlan:
        """The plan for this machine's memory; parts each have a machine of their own."""
        if self.scheduler not in ("threads", "processes") and self.workers is None:
            with connect(self.scheduler) as client:
                self.workers = max(1, len(client.scheduler_info()["workers"]))
        engine, memory = self._engine(), Budget(self.memory).beside(**self._memory_held())
        # Leaves that the two stores hold by different terms can only be compared as rows.
        alike = self.cols is None or made_alike(self.rows, self.cols)
        stores = [s for s in (self.rows, self.cols) if s is not None]
        steps = (
            plan_steps(
                self.rows.leaves,
                self.rows.operands,
                self.rows.n_outputs,
                max(s.n_examples for s in stores),
                self.mode,
                self.rates,
            )
            if alike
            else ()
        )
        starts = [leaf.dense.start if leaf.dense else 0 for leaf in self.rows.leaves]
        if not alike:
            starts = [leaf.offset for leaf in self.rows.leaves]
        return plan_gram(
            mode=self.mode,
            rows=self.rows.side,
            cols=None if self.cols is None else self.cols.side,
            n_outputs=self.rows.n_outputs,
            n_columns=self.rows.n_columns if alike else self.rows.n_parameters,
            product_itemsize=_product_itemsize(engine, steps),
            memory=max(1, memory),
            workers=self.share,
            machines=self.part[1],
            tile=self.tile,
            leaf_borders=starts if self.options.by_leaf else None,
            steps=steps,
            factor_bytes=(self.rows.factor_bytes, (self.cols or self.rows).factor_bytes),
            engine_copies=self._copies(engine),
            at_once=self._at_once,
        )

    @cached_property
    def rates(self) -> Rates:
        """What the choices of a plan are weighed with: measured where factors are multiplied on this host."""
        factored = any(not leaf.dense for leaf in self.rows.leaves)
        return measured_rates() if factored and self.engine_name == "blas" else Rates()

    @property
    def _at_once(self) -> int:
        """Files of J that are read at the same time."""
        return max(store.files.at_once for store in (self.rows, self.cols or self.rows))

    def _copies(self, engine: Engine) -> tuple[int, int]:
        """Copies of a slab and of a tile; what comes from a bucket is copied from answers, and put from a copy."""
        stores = [s for s in (self.rows, self.cols) if s is not None and is_address(s.path)]
        wide = max((np.dtype(storage_dtype(s.dtype)).itemsize for s in stores), default=0)
        return engine.slab_copies - (-wide // engine.slab_dtype.itemsize), engine.tile_copies + is_address(self.out)

    def _engine(self) -> Engine:
        """An engine to plan with and to time, with what an item's may keep on an accelerator."""
        stored = common_dtype(self.rows, self.cols)
        return make_engine(
            self.engine_name, self.precision, stored, self._resident_bytes(), devices=self.options.devices
        )

    def _memory_held(self) -> dict[str, int]:
        """Bytes that stores in RAM hold and a kernel in RAM will take."""
        held = {"stores_in_ram": sum(s.files.bytes_held for s in (self.rows, self.cols) if s is not None)}
        if self.out != "memory://":
            return held
        shape = self.mode.shape(self.rows.n_examples, (self.cols or self.rows).n_examples, self.rows.n_outputs)
        return held | {"kernel_in_ram": int(np.prod(shape)) * np.dtype(self.dtype).itemsize}

    def memory_parts(self, plan: GramPlan) -> dict[str, int]:
        """Bytes on one machine by name: what is held in RAM, and what all workers take for the largest group."""
        engine = self._engine()
        of_worker = worker_parts(plan, _product_itemsize(engine, plan.steps), self._copies(engine), self._at_once)
        running = min(self.share, plan.n_items)
        return {**self._memory_held(), **{name: size * running for name, size in of_worker.items()}}

    def create(self, listener: Listener) -> Kernel:
        """The kernel to work on: a new one, or the one that was begun with the same request."""
        files = zarr_group.place(self.out, 2**62 if self.out == "memory://" else self.memory)
        if files.address is None and self.scheduler != "threads":
            raise InvalidRequestError("a kernel in RAM needs --scheduler threads (scheduler=); or give --out (out=)")
        with zarr_group.creating(files, self.out, KNOWN, self.options.overwrite, listener):
            if files.size(zarr_group.ROOT) is None:
                self._create(files)
            kernel = self._opened(files)
        self._refuse_larger_plan(kernel)
        return kernel

    def _refuse_larger_plan(self, kernel: Kernel) -> None:
        """Refuse to continue a plan that was made for more memory, or for fewer workers on this machine."""
        if kernel.complete:
            return
        parts = self.memory_parts(kernel.plan)
        if Budget(self.memory).beside(**parts) < 0:
            fewer = ", fewer --workers (workers=)" if self.share > 1 else ""
            raise InvalidRequestError(
                f"--memory {self.memory:,}: {self.out} was begun with a plan that takes {sum(parts.values()):,} bytes "
                f"here; give at least that (memory=){fewer} or start over with --overwrite"
            )

    def _opened(self, files: Files) -> Kernel:
        """The kernel that was begun, if it is the one that is asked for; tiles that nobody asks for are its own."""
        kernel = Kernel(files, self.out)
        tile = kernel.request.tile if self.tile is None else self.tile
        compare_requested(self.out, kernel.requested, self.requested | {"tile": tile})
        require_plan_of(kernel, self.rows, self.cols)
        return kernel

    def _refuse_overflow(self) -> None:
        """Refuse rows whose products are beyond the largest float32, where they are computed or kept as such."""
        if self.precision == self.dtype == "float64":
            return
        largest = 1.0
        for store in (self.rows, self.cols or self.rows):
            norms = self.mode.over_outputs(store.norms.sum(2))
            largest *= math.sqrt(norms[np.isfinite(norms)].max(initial=0.0))
        if largest > float(np.finfo(np.float32).max):
            raise InvalidRequestError(
                f"{self.rows.path}: products of rows are up to {largest:.2g}, and float32 ends at 3.4e+38; give "
                "--precision float64 and --dtype float64 (precision=, dtype=), or outputs in a larger unit"
            )

    def _create(self, files: Files) -> None:
        plan = self.plan()
        self._refuse_overflow()
        leaves = [leaf.path for leaf in self.rows.leaves] if self.options.by_leaf else []
        needed = expected_bytes(plan, leaves, np.dtype(self.dtype).itemsize, self.triangle)
        free = free_bytes(self.out)
        if needed > free:
            raise InvalidRequestError(
                f"{self.out}: the kernel takes {format_size(needed)}, its disk has {format_size(free)} free; "
                "choose another disk (--out, out=), --triangle (triangle=True) or --dtype float32 (dtype=)"
            )
        attributes = {
            "kind": "kernel",
            "stores": [relative(s.path, self.out) for s in (self.rows, self.cols) if s is not None],
            "fingerprint": self.requested,
            "resolved": {
                "plan": plan.to_dict(),
                "engine": self.engine_name,
                "precision": self.precision,
                "leaves": leaves,
                "numerics": self._numerics(),
            },
            "versions": zarr_group.versions(),
        }
        zarr_group.create(files, layouts(plan, leaves, self.dtype), attributes, groups=[LEAVES] if leaves else [])

    def _numerics(self) -> dict[str, Any]:
        """What decides the digits of the kernel, and errors of its entries relative to sqrt(G_ii G_jj)."""
        engine = self._engine()
        stores = [s for s in (self.rows, self.cols) if s is not None]
        errors = [
            entry_error(
                s.dtype, s.lowest, s.rounding, self.precision, self.engine_name, engine.rounded_to, s.n_parameters
            )
            for s in stores
        ]
        return {
            "storage": self.dtype,
            "products": self.precision,
            "rounded_to": engine.rounded_to,
            "sums": "float64",
            "device": engine.device,
            "rates": self.rates.to_dict(),
            "expected_error": max(expected for expected, _ in errors),
            "worst_case": max(worst for _, worst in errors),
        }

    def run(self, kernel: Kernel, started: float, listener: Listener, stop: Callable[[], bool]) -> Kernel:
        """Run the missing items of this part, then finish groups whose items are all there."""
        plan, before = kernel.plan, self.requests_before
        items = plan.items
        number, parts = self.part
        mine = range((number - 1) * len(items) // parts, number * len(items) // parts)
        lock = None if kernel.files.address is None else Lock(kernel.files, mine.start, mine.stop - 1, listener, stop)
        with lock or contextlib.nullcontext():
            damaged = damaged_tiles(kernel)
            sweep_items(kernel, mine)
            threads = max(1, machine.cores() // self.share) if self.share > 1 else machine.limited_cores()
            work = Work(
                rows=self.rows,
                cols=self.cols,
                kernel=kernel,
                threads=threads,
                device_memory=self._resident_bytes(),
                fence=lock.fence if lock else None,
                lock=lock,
                devices=self.options.devices,
            )
            done, finished = items_done(work), finished_groups(kernel)
            todo = [n for n in mine if n not in done and items[n].group not in finished]
            tiles_before = tiles_done(kernel) - sum(map(len, damaged.values()))
            listener(Started(what="items", total=len(mine), done=len(mine) - len(todo)))
            repaired = self._repair(work, damaged, listener, stop)
            results = self._execute(work, todo, listener, stop)
            spent = Spent.total([*repaired, *(r.spent for r in results), *self._finish(work, listener)])
            for folder in ("checkpoints", "partials"):
                kernel.files.remove_folder(folder)
        tiles_computed = tiles_done(kernel) - tiles_before
        stored = self.rows.bytes_decoded + (0 if self.cols is None else self.cols.bytes_decoded)
        kernel.assembled = GramReport(
            kernel=kernel.path,
            rows=kernel.shape[-2],
            columns=kernel.shape[-1],
            shape=list(kernel.shape),
            mode=kernel.mode,
            tiles_total=plan.tiles_total * len(kernel.layouts),
            tiles_computed=tiles_computed,
            tiles_reused=tiles_before,
            items_total=len(items),
            items_computed=len(todo),
            items_reused=len(mine) - len(todo),
            passes=spent.decoded_bytes / stored,
            bytes_read=spent.bytes_read,
            flops=plan.flops * len(todo) // len(items),
            seconds_total=time.perf_counter() - started,
            seconds_read=spent.seconds_read,
            seconds_compute=spent.seconds_compute,
            seconds_write=spent.seconds_write,
            peak_rss=max([machine.peak_rss(), *(r.peak_rss for r in results)]),
            engine=kernel.engine,
            schedule=plan.schedule,
            expected_passes=plan.passes,
            rates=kernel.numerics.get("rates", {}),
            complete=kernel.complete,
            requests=_requests(before, results),
        )
        if todo or tiles_computed:
            keep_run(kernel.ledger, "gram", {**kernel.report, "memory": self.memory})
        return kernel

    def _repair(
        self, work: Work, damaged: dict[int, list[tuple[int, int]]], listener: Listener, stop: Callable[[], bool]
    ) -> list[Spent]:
        """Recompute damaged tiles of finished groups; another part may be doing so."""
        kernel, results = work.kernel, []
        for number, tiles in damaged.items():
            group = number // len(kernel.layouts)
            with contextlib.suppress(LockedError), group_lock(kernel, group, listener):
                results.append(repair_tiles(work, number, tiles, listener, stop))
        return results

    def _resident_bytes(self) -> int | None:
        """Bytes of accumulators that may stay on an accelerator."""
        if self.engine_name != "xla":
            return None
        from jacstore.kernels.engines.xla import resident_bytes

        return resident_bytes(self.device_memory)

    def _execute(self, work: Work, todo: list[int], listener: Listener, stop: Callable[[], bool]) -> list[ItemResult]:
        if not todo:
            return []
        if self.scheduler == "threads":
            return on_threads(work, todo, listener, stop)
        with cluster_at(self.scheduler, min(self.share, len(todo))) as client:
            return on_cluster(client, work, todo, listener, stop)

    def _finish(self, work: Work, listener: Listener) -> list[Spent]:
        """Add up partial sums of groups whose items are all done; another part may be doing so."""
        kernel, results = work.kernel, []
        done, finished = items_done(work), finished_groups(kernel)
        for group in range(len(kernel.plan.groups)):
            items = {item.number for item in kernel.plan.items_of(group)}
            if group in finished or not items <= done:
                continue
            with contextlib.suppress(LockedError), group_lock(kernel, group, listener):
                if not group_is_finished(kernel, group):
                    results.append(finish_group(work, group))
        return results

    def describe(self) -> GramForecast:
        """The plan as numbers, with expected seconds from a timed product and a timed read."""
        files = None if self.options.overwrite else zarr_group.begun(self.out, self.memory, KNOWN)
        begun = None if files is None else self._opened(files)
        if begun is not None:
            self._refuse_larger_plan(begun)
        plan = self.plan() if begun is None else begun.plan
        speed, read_speed = self._measured_speeds(plan)
        leaves = [leaf.path for leaf in self.rows.leaves] if self.options.by_leaf else []
        size = expected_bytes(plan, leaves, np.dtype(self.dtype).itemsize, self.triangle)
        accumulators = 8 * max(
            sum(int(np.prod(plan.tile_shape(i, j))) for i, j in plan.tiles_of(group)) for group in plan.groups
        )
        seconds = max(plan.flops / speed, plan.bytes_expected / read_speed)
        interval = accumulators / LIMITS.checkpoint_speed / LIMITS.checkpoint_share
        item_seconds = seconds / plan.n_items
        return GramForecast(
            kernel=self.out,
            shape=list(plan.mode.shape(plan.rows.n_examples, plan.cols.n_examples, plan.n_outputs)),
            mode=plan.mode.value,
            schedule=plan.schedule,
            engine=self.engine_name,
            precision=self.precision,
            passes=plan.passes,
            bytes_read=plan.bytes_expected,
            bytes_to_store=size,
            bytes_free=free_bytes(self.out) if self.out != "memory://" else self.memory,
            flops=plan.flops,
            memory=plan.memory_bytes,
            # Nothing is computed any more for a kernel that is complete.
            memory_parts={} if begun is not None and begun.complete else self.memory_parts(plan),
            items_total=plan.n_items,
            begun=begun is not None,
            tiles_done=0 if begun is None else tiles_done(begun),
            tiles_total=plan.tiles_total * max(1, len(leaves)),
            tile=plan.tile,
            slab_columns=plan.slab_columns,
            files=plan.tiles_stored * max(1, len(leaves)),
            expected_seconds=seconds,
            expected_flops_per_second=speed,
            expected_seconds_lost_by_a_kill=min(interval, item_seconds),
            expected_requests=expected_requests(plan, self.rows, self.cols, self.out, max(1, len(leaves)), self.share),
        )

    def _measured_speeds(self, plan: GramPlan) -> tuple[float, float]:
        """flop/s of one tile's product and bytes/s of one read, each timed twice and the second taken."""
        engine = self._engine()
        examples = min(plan.tile, plan.rows.n_examples, max(1, 2048 // plan.n_outputs))
        width = min(plan.slab_columns, plan.n_columns) or 1024
        array = "rows" if plan.n_columns else operand_array(self.rows.operands[0].name)
        columns = min(width, self.rows.layouts[array].shape[-1])
        stored = np.empty((examples, *self.rows.layouts[array].shape[1:-1], columns), np.float32)
        for _ in range(2):
            started = time.perf_counter()
            self.rows.read(array, 0, examples, 0, columns, stored)
            read = stored.nbytes / (time.perf_counter() - started)
        slab = np.ones((examples, plan.n_outputs, width), engine.slab_dtype)
        operand = engine.load(slab)
        shape = plan.mode.shape(examples, examples, plan.n_outputs)
        total = engine.zeros(shape)
        other = engine.load(slab.copy())
        span = slice(0, examples)
        for _ in range(2):
            started = time.perf_counter()
            total = engine.add(plan.mode, total, operand, span, other, span, slice(0, width))
            engine.fetch(total)
            seconds = time.perf_counter() - started
        depth = width * plan.mode.products_per_entry(plan.n_outputs)
        return 2 * int(np.prod(shape)) * depth / seconds, read


def _product_itemsize(engine: Engine, steps: Sequence[Step]) -> int:
    """Bytes of a number that is multiplied: 16-bit slabs may stand beside factors that are held in more digits."""
    return int(max(engine.slab_dtype.itemsize, engine.factor_dtype.itemsize if steps else 0))


def _requests(before: Counter[str], results: Sequence[ItemResult]) -> dict[str, int]:
    """Requests of this process since `before`, and those of items in other ones."""
    made = requests() - before
    for result in results:
        if result.pid != os.getpid():
            made.update(result.requests)
    return dict(made)


def require_plan_of(kernel: Kernel, rows: JacobianStore, cols: JacobianStore | None) -> None:
    """Refuse a kernel that was planned for other stores, whatever its request says.

    Raises
    ------
    DamagedDataError
        Saying what does not agree.
    """
    side = None if cols is None else cols.side
    try:
        check_plan_for(kernel.plan, rows.side, side, rows.n_outputs, rows.leaves, rows.n_columns)
        if kernel.leaves not in ([], [leaf.path for leaf in rows.leaves]):
            raise DamagedDataError("its leaves must be those of the stores")
    except DamagedDataError as error:
        raise DamagedDataError(f"{kernel.path}: its attributes are damaged: {error}") from error
