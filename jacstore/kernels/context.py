"""Hold what an item needs wherever it runs: stores, kernel, engine, and what stays in memory between items."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from jacstore.kernels.diagonal import Diagonal
from jacstore.kernels.engines.blas import BlasEngine, Engine
from jacstore.kernels.kernel import Kernel
from jacstore.storage.ledger import Fence, Lock
from jacstore.store.reader import JacobianStore


@dataclass(frozen=True, kw_only=True)
class Work:
    """What an item needs, small enough to send to another process: stores and kernel travel as their paths."""

    rows: JacobianStore
    cols: JacobianStore | None
    kernel: Kernel
    threads: int | None
    device_memory: int | None
    # Devices as they were asked for: each process has its own.
    devices: Any = None
    # The lock of the run; work for a run that has ended stops.
    fence: Fence | None = None
    # The lock itself, where the run is.
    lock: Lock | None = field(default=None, compare=False, repr=False)
    # What stays in memory from item to item of this process: engine, diagonal, factors.
    cache: dict[Any, Any] = field(default_factory=dict, compare=False, repr=False)
    # Accumulators of finished tiles, to be used again.
    spare_tiles: list[Any] = field(default_factory=list, compare=False, repr=False)
    # Held by the item of this process that computes.
    compute_lock: Any = field(default_factory=threading.Lock, compare=False, repr=False)

    def __reduce__(self) -> tuple[Any, ...]:
        return partial(
            _fenced,
            rows=self.rows,
            cols=self.cols,
            kernel=self.kernel,
            threads=self.threads,
            device_memory=self.device_memory,
            fence=self.fence,
            devices=self.devices,
        ), ()

    def announce_end(self) -> None:
        """Tell items in other processes to stop with a checkpoint."""
        if self.lock is not None:
            self.lock.announce_end()

    def asked_to_end(self) -> bool:
        """Whether items are to stop: their run was interrupted, or has ended."""
        return self.fence is not None and self.fence.asked_to_end()

    def engine(self) -> Engine:
        """An engine for one item; that of BLAS keeps its threads and buffers from item to item."""
        if "engine" in self.cache:
            kept: Engine = self.cache["engine"]
            return kept
        kernel, stored = self.kernel, common_dtype(self.rows, self.cols)
        made = make_engine(kernel.engine, kernel.precision, stored, self.device_memory, self.threads, self.devices)
        # That of a device counts the memory that the accumulators of its item leave.
        return self.cache.setdefault("engine", made) if made.name == "blas" else made

    @property
    def diagonal(self) -> Diagonal | None:
        """What the diagonal of a symmetric kernel should be."""
        if not self.kernel.plan.symmetric:
            return None
        if "diagonal" not in self.cache:
            self.cache["diagonal"] = Diagonal(self.rows, self.kernel)
        found: Diagonal = self.cache["diagonal"]
        return found

    def item_threads(self) -> int | None:
        """Threads of BLAS while an item is computed, or some of its tiles once more.

        Tiles from factors in memory are cut into a block a core; setting the number of threads for each takes its time.
        """
        return 1 if self.kernel.plan.resident else self.threads


def _fenced(**given: Any) -> Work:
    """Work as it arrives in another process, where nobody else holds the lock."""
    work = Work(**given)
    if work.fence is not None:
        work.kernel.files.fences.append(work.fence.require)
    return work


def common_dtype(rows: JacobianStore, cols: JacobianStore | None) -> str:
    """The stored type of both sides, float32 where they differ: slabs of one group have one type."""
    return rows.dtype if cols is None or cols.dtype == rows.dtype else "float32"


def make_engine(
    name: str,
    precision: str,
    stored: str,
    device_memory: int | None,
    threads: int | None = None,
    devices: Any = None,
) -> Engine:
    if name == "blas":
        return BlasEngine(precision, threads)
    from jacstore.kernels.engines.xla import xla_engine

    return xla_engine(precision, stored, device_memory, devices)
