"""Finish tiles: add up partial sums of items, check and mirror the diagonal, write tiles and their records."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from crc32c import crc32c

from jacstore.base.schema import Open, typed
from jacstore.errors import DamagedDataError
from jacstore.kernels.context import Work
from jacstore.kernels.diagonal import require_right
from jacstore.kernels.engines.blas import symmetrize
from jacstore.kernels.kernel import Kernel, TilesRecord
from jacstore.kernels.plan.reports import Spent
from jacstore.storage.chunks import raw


@dataclass(frozen=True, kw_only=True)
class PartialRecord(Open):
    """What the record of an item says whose columns are only a part of all."""

    checksums: tuple[int, ...]


def partial_name(item: int) -> str:
    """File of an item's partial sums."""
    return f"partials/item-{item:07d}.bin"


def write_tiles(work: Work, group: int, leaf: int, tiles: Any) -> None:
    """Write the tiles of a group for one leaf and mark them as finished."""
    kernel, number = work.kernel, group * len(work.kernel.layouts) + leaf
    stored = store_tiles(work, leaf, tiles)
    record = {"tiles": stored.tiles, "diagonal_error": stored.diagonal_error, "files": stored.files}
    kernel.ledger.record("tiles", number, record)


def store_tiles(work: Work, leaf: int, tiles: Any) -> TilesRecord:
    """Write tiles; returns what their record says.

    Raises
    ------
    DamagedDataError
        Naming the tile whose diagonal is further off than rounding explains; it is not written.
    """
    kernel = work.kernel
    files: dict[str, Any] = {}
    count, off = 0, 0.0 if kernel.plan.symmetric else None
    for (i, j), total in tiles:
        tile = symmetrize(total) if kernel.plan.symmetric and i == j else total
        if work.diagonal is not None and i == j:
            where = f"{kernel.path}: {kernel.named(leaf, i, j)}"
            off = max(off or 0.0, require_right(work.diagonal.compare(leaf, i, tile), where))
            if kernel.exact_diagonal:
                work.diagonal.replace(leaf, i, tile)
        files |= kernel.write_tile(leaf, i, j, tile)
        count += 1
    kernel.files.sync_folders(files)
    return TilesRecord(tiles=count, diagonal_error=off, files=files)


def finish_group(work: Work, group: int) -> Spent:
    """Add up the partial sums of a group in item order and write its tiles."""
    kernel, plan = work.kernel, work.kernel.plan
    started = time.perf_counter()
    items = plan.items_of(group)
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
                        raise DamagedDataError(f"{partial_name(item.number)} differs from its recorded checksum")
                total += part
            offset += total.nbytes
            yield (i, j), total

    write_tiles(work, group, 0, sums())
    for item in items:
        kernel.files.remove(partial_name(item.number))
    return Spent(seconds_write=time.perf_counter() - started)


def _partial_checksums(kernel: Kernel, item: int, n_tiles: int) -> tuple[int, ...]:
    """Checksums of an item's partial sums, one per tile."""
    with _recomputed(kernel, item):
        record = typed(PartialRecord, kernel.ledger.read("item", item))
        if len(record.checksums) != n_tiles:
            raise DamagedDataError(f"the record of item {item} is about other tiles than its own")
    return record.checksums


@contextlib.contextmanager
def _recomputed(kernel: Kernel, item: int) -> Iterator[None]:
    """Make an item unfinished whose partial sums turn out to be damaged."""
    try:
        yield
    except DamagedDataError as error:
        kernel.ledger.forget("item", item)
        raise DamagedDataError(f"{kernel.path}: {error}; run the same gram again to recompute this item") from error
