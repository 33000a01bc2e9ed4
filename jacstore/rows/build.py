"""Builds a store from a problem, complete for its part; what exists already is kept.

Five things overlap: reading inputs (a thread), the device pass (asynchronous), copying to the host (here), encoding and
writing (threads of the writer). At most two units are alive: the one being filled and the one being written.
`overlap` says how much of this the memory allows.
"""

from __future__ import annotations

import math
import time
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jacstore.base.budget import BUILD, WITHOUT_STORE, Budget
from jacstore.base.devices import device, device_memory, local_devices, on_accelerator
from jacstore.base.events import BatchDone, Listener, Started, silent
from jacstore.base.limits import LIMITS
from jacstore.base.machine import format_size
from jacstore.base.precision import NORM_RUN, compute_dtype
from jacstore.base.threads import Pool
from jacstore.errors import InvalidRequestError, RunInterruptedError, SelectedStateWarning
from jacstore.problem.parameters import state_among
from jacstore.problem.problem import Prepared, Problem, prepare
from jacstore.rows.device_pass import BatchRows, DevicePass
from jacstore.rows.options import BuildOptions
from jacstore.rows.overlap import LANDED, Needs, Overlap, plan_overlap
from jacstore.rows.reports import BuildForecast, BuildReport
from jacstore.rows.row_check import RowCheck, leaves_checked
from jacstore.rows.trace.cut import CutBackward, cut_before_products, cut_with_rows
from jacstore.rows.unit import SpareBlocks, Unit, refuse_other_inputs
from jacstore.storage import zarr_group
from jacstore.storage.buckets import free_bytes, is_address, refuse_unknown
from jacstore.storage.files import Memory
from jacstore.storage.runs import keep_run
from jacstore.store.arrays import factor_bytes
from jacstore.store.codec_choice import fastest_codec, measured_disk_speed
from jacstore.store.layout import StorePlan, plan_store
from jacstore.store.reader import JacobianStore
from jacstore.store.reports import leaf_table
from jacstore.store.requests import request_of, require_same
from jacstore.store.unit_buffers import storage_dtype
from jacstore.store.writer import ARRAYS, StoreWriter, refuse_small_disk

# What a disk is taken to write when nothing may be written to measure it, in bytes per second.
DISK_SPEED = 5e8


def build(
    problem: Problem,
    out: str | Path | None = None,
    *,
    memory: int | str | None = None,
    device_memory: int | str | None = None,
    dtype: str = "float32",
    layout: str = "auto",
    batch_size: int | None = None,
    output_batch: int | None = None,
    unit_size: int | None = None,
    codec: str = "auto",
    examples: tuple[int, int] | str | None = None,
    part: tuple[int, int] | str | None = None,
    devices: str | int | Sequence[int] | None = None,
    allow_nonfinite: bool = False,
    overwrite: bool = False,
    listener: Listener = silent,
    stop: Callable[[], bool] | None = None,
) -> JacobianStore:
    """Compute the per-example Jacobian of a problem once and store it; a rerun computes only what is missing.

    Parameters
    ----------
    problem
        The function, its parameters and its inputs.
    out
        Folder of the store; None or "memory://" for RAM, which moves to a temporary folder beyond `memory`.
    memory
        Bytes to allocate on the host, such as "8GB"; half of what is available if not given.
    device_memory
        The same for the accelerator; three quarters of its memory if not given.
    dtype
        What is stored. "float64" also computes in float64; otherwise parameters keep their own precision.
    layout
        "dense" stores rows; "auto" and "factored" choose smaller exact forms where there are any.
    batch_size, output_batch, unit_size
        Examples per device pass, outputs per pass, examples per unit; chosen from the memory if not given.
    codec
        "auto" measures a first batch.
    examples
        Range `(A, B)` or "A:B" of the inputs that the store is about.
    part
        `(I, N)` or "I/N": only the I-th of N parts of the units, counted from 1.
    devices
        Which devices of this process compute: "all", the first N, or their numbers such as "0,2" or `[0, 2]`; batches
        go round them. All if not given, or those on which parameters were placed.
    allow_nonfinite
        Store rows with NaN or infinity instead of stopping.
    overwrite
        Delete what is there and start over.
    listener
        Called with progress events.
    stop
        Asked between batches; when it says true, the build ends with `RunInterruptedError`.

    Returns
    -------
    JacobianStore
        With `.report`: the keys of `jacstore build --json`.

    Raises
    ------
    InvalidRequestError
        For anything that the caller must change; nothing finished is lost.
    """
    started = time.perf_counter()
    options = BuildOptions.among(locals())
    job = _Job(problem, out, options)
    state = state_among(leaf.path for leaf in job.leaves)
    if state:
        warnings.warn(state, SelectedStateWarning, stacklevel=2)
    found = job.existing()
    chosen, proposed = (found.choices.codec, None) if found else job.choose()
    writer = StoreWriter(
        out,
        job.leaves,
        job.prepared.n_examples,
        job.prepared.n_outputs,
        operands=job.operands,
        dtype=options.dtype,
        codec=chosen,
        unit_size=options.unit_size,
        proposed_unit_size=proposed,
        memory=options.memory,
        outputs_dtype=job.outputs_dtype,
        requested=job.requested,
        numerics=job.numerics,
        left_out=job.prepared.left_out,
        part=options.part,
        allow_nonfinite=options.allow_nonfinite,
        overwrite=options.overwrite,
        listener=listener,
        stop=stop or (lambda: False),
    )
    with writer:
        listener(Started(what="units", total=len(writer.units), done=writer.reused))
        refuse_other_inputs(writer, job.prepared.read, job.prepared.input_bytes, job.memory)
        times = job.run(writer, listener, stop or (lambda: False))
    store = writer.store
    store.built = BuildReport.of(
        writer,
        started,
        seconds_compile=job.seconds_compile,
        **times,
        batch_size=job.device_pass.batch_size if job.device_pass else None,
        batches_by_device=job.device_pass.batches if job.device_pass else [],
    )
    if store.built.units_computed:
        keep_run(store.ledger, "build", {**store.report, "memory": job.memory})
    return store


def plan_build(problem: Problem, out: str | Path | None = None, **options: Any) -> BuildForecast:
    """What `build` would do, with a timed batch; writes nothing. Options are those of `build`.

    Raises
    ------
    InvalidRequestError
        As `build` would, where a store of another request or a folder of others is at `out`.
    """
    return _Job(problem, out, BuildOptions(**options)).describe()


class _Job:
    """One build: the prepared problem and what is decided for it."""

    def __init__(self, problem: Problem, out: str | Path | None, options: BuildOptions) -> None:
        self.options, self.memory = options, options.memory
        self.out = "memory://" if out is None else str(out)
        refuse_unknown(self.out)
        self.devices = local_devices(options.devices)
        self.prepared, self.shift = _restrict(prepare(problem, float64=options.float64), options)
        self._take(cut_before_products(self.prepared, options.layout, options.float64))
        self.requested = {
            **self.prepared.requested,
            "examples": [self.shift, self.shift + self.prepared.n_examples],
            "layout": options.layout,
            "codec": options.codec,
        }
        self.device_pass: DevicePass | None = None
        self.seconds_compile = 0.0
        # Inputs and rows of the first pass, if they were computed to choose a codec: the build begins with them.
        self.first: tuple[Any, BatchRows] | None = None

    def _take(self, cut: CutBackward) -> None:
        self.cut, self.leaves, self.operands = cut, cut.leaves, cut.operands
        self.n_columns = sum(leaf.size for leaf in cut.leaves if leaf.dense)

    @property
    def outputs_dtype(self) -> str:
        return "float64" if self.options.float64 else "float32"

    @property
    def numerics(self) -> dict[str, Any]:
        """What decides the digits of the rows."""
        where = device()
        return {
            "computing": "float64" if self.options.float64 else "the parameters' own",
            "lowest": self.prepared.lowest,
            "products": "highest precision",
            "norms": f"{compute_dtype(self.options.dtype)} over runs of {NORM_RUN}, float64 beyond",
            "device": f"{where.platform}: {where.device_kind}",
        }

    def existing(self) -> JacobianStore | None:
        """The store to continue, if there is one: its resolved choices are kept."""
        files = zarr_group.place(self.out, self.memory)
        if self.options.overwrite or files.address is None or files.size(zarr_group.ROOT) is None:
            return None
        return self._continued(JacobianStore(files, self.out))

    def _continued(self, store: JacobianStore) -> JacobianStore:
        """A store that is there: the request is said in its words, and leaves that it has as rows stay rows."""
        rows = {leaf.path for leaf in store.leaves if leaf.dense}
        if any(not leaf.dense and leaf.path in rows for leaf in self.leaves):
            self._take(cut_with_rows(self.prepared, self.cut, rows, self.options.layout))
        self.requested |= {"function": self.prepared.requested_like(store.requested)["function"]}
        return store

    def plan(self) -> StorePlan:
        return plan_store(
            n_examples=self.prepared.n_examples,
            n_outputs=self.prepared.n_outputs,
            n_columns=self.n_columns,
            factor_bytes=factor_bytes(self.operands, self.prepared.n_outputs, self.options.dtype),
            itemsize=np.dtype(storage_dtype(self.options.dtype)).itemsize,
            memory=self.memory,
            unit_size=self.options.unit_size,
        )

    def propose(self, disk_speed: float | None = None) -> tuple[StorePlan, str]:
        """Unit size and codec for a new store; `auto` encodes rows of a first batch."""
        plan = self.plan()
        if self.options.codec != "auto" or self.out == "memory://":
            return plan, self.options.codec if self.options.codec != "auto" else "none"
        passes = self.compile(plan.unit_size)
        examples = self.prepared.read(0, min(passes.batch_size, plan.unit_size, self.prepared.n_examples))
        seconds = 0.0
        for _ in range(2):
            # The first run is slower than all others, by what does not matter where a run takes long.
            if seconds < LIMITS.long_run_seconds:
                began = time.perf_counter()
                batch = next(self._rows(examples))
                seconds = time.perf_counter() - began
        self.first = examples, batch
        size = sum(values.nbytes for values in [*batch.rows, *batch.factors.values()])
        computing = seconds / size if device().platform == "cpu" else 0.0
        sample = [*batch.rows, *(v.reshape(len(v), 1, -1) for v in batch.factors.values() if v.dtype.kind != "i")]
        return plan, fastest_codec(sample, disk_speed or measured_disk_speed(self.out), computing)

    def choose(self) -> tuple[str, int]:
        """Codec and unit size for a new store."""
        refuse_small_disk(self.out, self.plan())
        plan, codec = self.propose()
        return codec, plan.unit_size

    def compile(self, unit_size: int) -> DevicePass:
        """Compile the device pass once; refuse units that do not fit."""
        if self.device_pass is None:
            budget = Budget(self.memory).split(**BUILD)
            self.device_pass = DevicePass(
                self.prepared,
                self.cut,
                stored_dtype=self.options.dtype,
                budget=device_memory(self.options.device_memory, budget),
                unit_size=unit_size,
                batch_size=self.options.batch_size,
                output_batch=self.options.output_batch,
                landing=budget["device_pass"] // LANDED,
                device_memory=self.options.device_memory,
                devices=self.devices,
            )
            self.seconds_compile = self.device_pass.seconds_compile
        return self.device_pass

    def _rows(self, examples: Any) -> Iterator[BatchRows]:
        assert self.device_pass is not None
        count = len(jax.tree_util.tree_leaves(examples)[0])
        for first, values in self.device_pass.dispatch(examples):
            yield self.device_pass.fetch(first, values, count)

    def _begins(self, start: int, last: int) -> bool:
        """Whether what was computed to choose a codec is the first batch of this unit.

        Its examples may be too many: another run that began together may have made smaller units.
        """
        if self.first is None or self.device_pass is None or start:
            return False
        return len(self.first[1].outputs) == min(self.device_pass.batch_size, last)

    def run(self, writer: StoreWriter, listener: Listener, stop: Callable[[], bool]) -> dict[str, float]:
        """Compute and write the missing units."""
        missing = writer.missing
        times = {"seconds_device": 0.0, "seconds_write": 0.0}
        first, self.first = self.first if missing and self._begins(*missing[0]) else None, None
        if not missing:
            return times
        check = RowCheck(self.prepared, self.leaves, self.options.dtype, self.memory)
        first_pass = self.device_pass.bytes_needed if first and self.device_pass else 0
        free = Budget(self.memory).beside(
            store_in_ram=writer.files.bytes_held, row_check=check.bytes_needed, device_pass=first_pass
        )
        # Memory of the first units is touched while the program compiles, or while the first passes run.
        spare = SpareBlocks(writer, min(2, len(missing), max(0, free // self._unit_bytes(writer))))
        passes = self.compile(writer.store.unit_size)
        held = writer.files.bytes_held
        if writer.files.address and writer.files.copies:
            # Objects are put from copies of a unit, up to all of it at once.
            held += self._unit_bytes(writer)
        store = held + writer.bytes_expected if isinstance(writer.files, Memory) and writer.files.in_memory else 0
        overlap = self._overlap(self._unit_bytes(writer), writer.store.unit_size, held, store)
        if isinstance(writer.files, Memory):
            writer.files.limit = overlap.store_limit
        spare.keep(overlap.waiting + 1)
        batches = [
            (start, last, a, min(a + passes.batch_size, last))
            for start, last in missing
            for a in range(start, last, passes.batch_size)
        ]
        inputs_pool, units_pool = Pool(1, "jacstore-input"), Pool(1, "jacstore-unit")
        writing: list[Future[float]] = []
        stopped = False
        try:
            inputs = _ahead(inputs_pool, lambda batch: self.prepared.read(batch[2], batch[3]), batches, overlap.reads)
            ordered = _rows_in_order(passes, inputs, overlap.depth, first)
            del first
            unit: Unit | None = None
            began = begun = time.perf_counter()
            seconds = 0.0
            for (start, last, a, b), examples, rows in ordered:
                if stop():
                    stopped = True
                    break
                if unit is None:
                    unit = Unit(writer, start, last, self.outputs_dtype, spare, check, seconds)
                times["seconds_device"] += time.perf_counter() - began
                completes = rows.last and b == last
                if completes and writing:
                    # Of complete units one at most is not stored yet, so that a kill loses no more.
                    times["seconds_write"] += writing.pop().result()
                began = time.perf_counter()
                unit.fill(a, rows)
                if rows.last:
                    unit.take_inputs(a, examples)
                    listener(BatchDone(examples=b - a))
                times["seconds_device"] += time.perf_counter() - began
                if completes:
                    writing.append(units_pool.submit(unit.write))
                    if not overlap.waiting:
                        times["seconds_write"] += writing.pop().result()
                    unit = None
                    seconds, begun = time.perf_counter() - begun, time.perf_counter()
                began = time.perf_counter()
            times["seconds_write"] += sum(future.result() for future in writing)
        finally:
            # Whatever ended this loop, a unit that is being written is finished.
            inputs_pool.shutdown(cancel_futures=True)
            units_pool.shutdown()
        if stopped:
            raise RunInterruptedError(
                f"interrupted; finished work is kept, {len(writer.missing)} of {len(writer.units)} units missing"
            )
        return times

    @staticmethod
    def _unit_bytes(writer: StoreWriter) -> int:
        return writer.store.bytes_decoded // writer.store.n_examples * writer.store.unit_size

    def _overlap(self, unit: int, unit_size: int, held: int = 0, store: int = 0) -> Overlap:
        """What goes on at the same time, for units of `unit` bytes; refused where not even one of each thing fits."""
        passes = self.compile(unit_size)
        each, chunks = self.prepared.input_bytes
        needs = Needs(
            unit=unit,
            one_pass=passes.bytes_needed,
            landed=passes.landed_bytes,
            batch=each * passes.batch_size,
            chunks=chunks,
            checking=leaves_checked(self.leaves, self.memory)[1],
            held=held,
            store=store,
        )
        accelerator = None
        if on_accelerator():
            accelerator = device_memory(self.options.device_memory, Budget(self.memory))
        found = plan_overlap(self.memory, needs, accelerator, len(passes.batches))
        if found is None:
            raise InvalidRequestError(
                f"--memory {self.memory:,}: one unit of {unit_size} example(s) takes {format_size(unit)} "
                f"(unit_buffers), a device pass {format_size(passes.bytes_needed)} (device_pass) and reading its "
                f"inputs, whole chunks of them, {format_size(chunks + 2 * needs.batch)} (inputs); give more memory "
                f"(memory=){_smaller(passes.batch_size, unit_size)}, or inputs= in smaller chunks"
            )
        return found

    def seconds_per_example(self) -> float:
        """Median of three timed batches, compile time apart."""
        plan = self.plan()
        passes = self.compile(plan.unit_size)
        count = min(passes.batch_size, self.prepared.n_examples)
        examples = self.prepared.read(0, count)
        seconds = []
        for _ in range(3):
            began = time.perf_counter()
            for _rows in self._rows(examples):
                pass
            seconds.append(time.perf_counter() - began)
        return sorted(seconds)[1] / count

    def begun(self) -> JacobianStore | None:
        """The store that a build would continue, if there is one and it may."""
        files = zarr_group.begun(self.out, self.memory, ARRAYS)
        if files is None:
            return None
        store, prepared = self._continued(JacobianStore(files, self.out)), self.prepared
        wanted = request_of(self.leaves, prepared.n_examples, prepared.n_outputs, self.options.dtype, self.requested)
        require_same(store, wanted, self.leaves, self.options.unit_size)
        return store

    def _expected_requests(self, plan: StorePlan, begun: JacobianStore | None) -> dict[str, int]:
        """Puts of the units that are missing; metadata, locks, and records that are read come on top."""
        if not is_address(self.out):
            return {}
        missing = plan.n_units - (0 if begun is None else len(begun.ledger.done("unit")))
        return {"put": missing * (replace(plan, factor_files=len(self.operands)).n_files // plan.n_units)}

    def describe(self) -> BuildForecast:
        """The plan as numbers, and whether storing pays against recomputing blocks of rows."""
        found = None if self.options.overwrite else self.begun()
        if found is not None:
            self.options = replace(self.options, unit_size=found.unit_size, codec=found.choices.codec)
        plan, codec = self.propose(DISK_SPEED)
        in_ram, copied = self.out == "memory://", plan.unit_bytes if is_address(self.out) else 0
        # A run that would be refused for want of memory is refused here as well.
        overlap = self._overlap(plan.unit_bytes, plan.unit_size, copied, plan.bytes_stored if in_ram else 0)
        each = self.seconds_per_example()
        n, row_bytes = plan.n_examples, plan.bytes_stored
        seconds_device = n * each
        seconds_write = row_bytes / DISK_SPEED
        # Without a store, blocks of rows that fill half the memory are each multiplied with all earlier blocks.
        blocks = max(1, math.ceil(row_bytes / max(1, Budget(self.memory).split(**WITHOUT_STORE)["rows"])))
        recomputed = (blocks + 1) / 2
        seconds_stored = max(seconds_device, seconds_write) + row_bytes / (2 * DISK_SPEED)
        seconds_recomputed = recomputed * seconds_device
        return BuildForecast(
            store=self.out,
            examples=n,
            outputs=plan.n_outputs,
            parameters=sum(leaf.size for leaf in self.leaves),
            terms=leaf_table(self.leaves, self.operands, plan.n_outputs),
            leaves=len(self.leaves),
            bytes_to_store=row_bytes,
            bytes_free=self.memory if in_ram else free_bytes(self.out),
            bytes_dense=n * plan.n_outputs * sum(leaf.size for leaf in self.leaves) * 4,
            begun=found is not None,
            units_done=0 if found is None else len(found.ledger.done("unit")),
            units_total=plan.n_units,
            unit_size=plan.unit_size,
            batch_size=self.device_pass.batch_size if self.device_pass else 0,
            output_batch=self.device_pass.output_batch if self.device_pass else 0,
            batches=plan.n_units * math.ceil(plan.unit_size / self.device_pass.batch_size if self.device_pass else 1),
            files=plan.n_files,
            codec=codec,
            memory=self.memory,
            memory_parts=dict(overlap.parts.parts),
            device_pass_bytes=self.device_pass.bytes_needed if self.device_pass else 0,
            expected_seconds_compile=self.seconds_compile,
            expected_seconds_device=seconds_device,
            expected_seconds_write=seconds_write,
            recompute_passes=recomputed,
            expected_seconds_recompute=seconds_recomputed,
            expected_seconds_store=seconds_stored,
            storing_pays=seconds_stored < seconds_recomputed,
            expected_requests=self._expected_requests(plan, found),
        )


def _rows_in_order(
    passes: DevicePass,
    inputs: Iterator[tuple[Any, Future[Any]]],
    depth: int,
    ready: tuple[Any, BatchRows] | None = None,
) -> Iterator[tuple[Any, Any, BatchRows]]:
    """Batch, inputs and rows of each device pass; up to `depth` passes are begun before the first is waited for.

    `ready` holds inputs and rows of the first of them, if it was made already.
    """
    started: deque[tuple[Any, Any, int, Any]] = deque()
    for batch, reading in inputs:
        if ready is not None:
            started.append((batch, ready[0], 0, ready[1]))
            examples, made, ready = ready[0], 1, None
            if depth == 1:
                yield _landed(passes, *started.popleft())
        else:
            # Slow inputs hold nothing back: what has been begun is landed while they are read. But nothing has been
            # begun while there are only rows at hand.
            while started and not isinstance(started[0][3], BatchRows) and not reading.done():
                yield _landed(passes, *started.popleft())
            examples, made = reading.result(), 0
        for first, values in passes.dispatch(examples, made):
            started.append((batch, examples, first, values))
            if len(started) >= depth:
                yield _landed(passes, *started.popleft())
    while started:
        yield _landed(passes, *started.popleft())


def _landed(passes: DevicePass, batch: Any, examples: Any, first: int, values: Any) -> tuple[Any, Any, BatchRows]:
    rows = values if isinstance(values, BatchRows) else passes.fetch(first, values, batch[3] - batch[2])
    return batch, examples, rows


def _smaller(batch_size: int, unit_size: int) -> str:
    """What may be made smaller of a build that does not fit; nothing smaller than one."""
    batch, unit = ", a smaller --batch-size (batch_size=)", ", a smaller --unit-size (unit_size=)"
    return batch * (batch_size > 1) + unit * (unit_size > 1)


def _ahead(pool: Pool, read: Callable[[Any], Any], batches: list[Any], reads: int) -> Iterator[tuple[Any, Future[Any]]]:
    """Pairs of batch and the reading of its inputs, up to `reads` of them begun ahead."""
    waiting: deque[tuple[Any, Future[Any]]] = deque()
    for batch in batches:
        waiting.append((batch, pool.submit(read, batch)))
        if len(waiting) > reads:
            yield waiting.popleft()
    yield from waiting


def _restrict(prepared: Prepared, options: BuildOptions) -> tuple[Prepared, int]:
    """The problem of the examples that are asked for, and the first of them."""
    first, last = options.range_of(prepared.n_examples)
    read = prepared.read
    shifted = replace(prepared, n_examples=last - first, read=lambda a, b: read(first + a, first + b))
    return shifted, first
