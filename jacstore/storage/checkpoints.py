"""Save the accumulators of a running item, so that it can continue after a kill."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from crc32c import crc32c

from jacstore.base.limits import LIMITS
from jacstore.base.schema import Open, typed
from jacstore.errors import DamagedDataError
from jacstore.storage.chunks import raw
from jacstore.storage.files import Files
from jacstore.storage.ledger import Ledger, record_name


class Holder(Protocol):
    """Where accumulators are kept: a kernel, or another folder with a ledger."""

    files: Files
    ledger: Ledger


@dataclass(frozen=True, kw_only=True)
class CheckpointRecord(Open):
    """The record of a checkpoint: the first slab that is not in the sums, and the checksums of the sums."""

    slab: int
    checksums: tuple[int, ...]


class Checkpoints:
    """Accumulators of a running item in two alternating files, each valid once its record is there."""

    def __init__(self, kernel: Holder, item: int, shapes: list[tuple[int, ...]]) -> None:
        self.kernel, self.item, self.shapes = kernel, item, shapes
        self.cost = 8 * sum(int(np.prod(shape)) for shape in shapes) / LIMITS.checkpoint_speed
        self.turn = 0
        self.last = time.perf_counter()

    def due(self) -> bool:
        """Whether writing a checkpoint now keeps checkpoints within their share of the time."""
        spent = time.perf_counter() - self.last
        return self.kernel.files.address is not None and spent > self.cost / LIMITS.checkpoint_share

    def save(self, slab: int, totals: Iterable[np.ndarray]) -> None:
        """Write the sums over all slabs before `slab`; they may be fetched one by one."""
        if self.kernel.files.address is None or slab == 0:
            return
        started = time.perf_counter()
        kind, name = f"checkpoint-{self.turn}", sums_name(self.item, self.turn)
        self.kernel.ledger.forget(kind, self.item)
        checksums = write_sums(self.kernel, name, totals)
        self.kernel.ledger.record(kind, self.item, {"slab": slab, "checksums": checksums})
        self.turn = 1 - self.turn
        self.last = time.perf_counter()
        self.cost = self.last - started

    def load(self, slabs: int) -> tuple[int, list[np.ndarray]]:
        """The newest valid checkpoint before slab `slabs`: its slab and sums; slab 0 and nothing if there is none."""
        found = []
        for turn in (0, 1):
            with contextlib.suppress(DamagedDataError):
                record = typed(CheckpointRecord, self.kernel.ledger.read(f"checkpoint-{turn}", self.item))
                if record.slab < slabs:
                    found.append((record.slab, turn, record.checksums))
        for slab, turn, checksums in sorted(found, reverse=True):
            totals = [np.empty(shape) for shape in self.shapes]
            views = [raw(total) for total in totals]
            offsets = np.cumsum([0, *(len(view) for view in views[:-1])])
            with contextlib.suppress(DamagedDataError):
                name = sums_name(self.item, turn)
                self.kernel.files.read_into(name, list(zip(map(int, offsets), views, strict=True)))
                if tuple(crc32c(view) for view in views) == checksums:
                    self.turn = 1 - turn
                    return slab, totals
        return 0, []

    def clear(self) -> None:
        """Remove what is no longer needed."""
        for name in checkpoint_names(self.item):
            self.kernel.files.remove(name)


def sums_name(item: int, turn: int) -> str:
    """File of the sums of a checkpoint."""
    return f"checkpoints/item-{item:07d}-{turn}.bin"


def checkpoint_names(item: int) -> list[str]:
    """All files of an item's checkpoints; the record of each goes before its sums."""
    pairs = ((record_name(f"checkpoint-{turn}", item), sums_name(item, turn)) for turn in (0, 1))
    return [name for pair in pairs for name in pair]


class NoCheckpoints:
    """Checkpoints that save nothing, for work too small to be continued half done."""

    def due(self) -> bool:
        """Never."""
        return False

    def save(self, slab: int, totals: Iterable[np.ndarray]) -> None:
        """Keep nothing."""

    def load(self, slabs: int) -> tuple[int, list[np.ndarray]]:
        """From the beginning."""
        return 0, []

    def clear(self) -> None:
        """Nothing is there."""


def write_sums(kernel: Holder, name: str, totals: Iterable[np.ndarray]) -> list[int]:
    """Write accumulators one after the other into a flushed file; returns the checksum of each."""
    checksums: list[int] = []

    def views() -> Iterator[memoryview]:
        for total in totals:
            view = raw(np.ascontiguousarray(total))
            checksums.append(crc32c(view))
            yield view

    kernel.files.write(name, views())
    kernel.files.sync_folders([name])
    return checksums
