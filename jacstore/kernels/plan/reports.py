"""What a kernel and its gram say of themselves, as values whose fields are the keys of their JSON."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from typing import Any

from jacstore.base.schema import Reported


@dataclass(frozen=True, kw_only=True)
class Spent(Reported):
    """What work on tiles read, and how long it took; the fields are also those of an item's record."""

    bytes_read: int = 0
    decoded_bytes: int = 0
    slabs: int = 0
    seconds_read: float = 0.0
    seconds_compute: float = 0.0
    seconds_write: float = 0.0

    @staticmethod
    def total(parts: Iterable[Spent]) -> Spent:
        """All of it together."""
        every = list(parts)
        return Spent(**{one.name: sum(getattr(part, one.name) for part in every) for one in fields(Spent)})


@dataclass(frozen=True, kw_only=True)
class ItemResult:
    """What comes back from the process that computed an item; its sums are on disk."""

    item: int
    peak_rss: int
    pid: int
    requests: dict[str, int]
    spent: Spent


@dataclass(frozen=True, kw_only=True)
class GramForecast(Reported):
    """What a gram would do, with expected seconds from a timed product and a timed read."""

    kernel: str
    shape: list[int]
    mode: str
    schedule: str
    engine: str
    precision: str
    passes: float
    bytes_read: int
    bytes_to_store: int
    bytes_free: int
    flops: int
    memory: int
    memory_parts: dict[str, int]
    items_total: int
    begun: bool
    tiles_done: int
    tiles_total: int
    tile: int
    slab_columns: int
    files: int
    expected_seconds: float
    expected_flops_per_second: float
    expected_seconds_lost_by_a_kill: float
    # Where a store or the kernel is in a bucket, by kind.
    expected_requests: dict[str, int]


@dataclass(frozen=True, kw_only=True)
class GramReport(Reported):
    """What a gram did: counts, bytes and seconds."""

    kernel: str
    rows: int
    columns: int
    shape: list[int]
    mode: str
    tiles_total: int
    tiles_computed: int
    tiles_reused: int
    items_total: int
    items_computed: int
    items_reused: int
    passes: float
    bytes_read: int
    flops: int
    seconds_total: float
    seconds_read: float
    seconds_compute: float
    seconds_write: float
    peak_rss: int
    engine: str
    schedule: str
    expected_passes: float
    rates: dict[str, int]
    complete: bool
    # Where a store or the kernel is in a bucket, by kind, in all processes.
    requests: dict[str, int]


@dataclass(frozen=True, kw_only=True)
class KernelInfo(Reported):
    """Sizes, choices and state of a kernel, as `jacstore info --json` prints them."""

    kernel: str
    stores: list[str]
    mode: str
    rows: int
    columns: int
    shape: list[int]
    examples: list[int]
    outputs: int
    leaves: list[str]
    tiles_total: int
    tiles_done: int
    groups_damaged: Sequence[int]
    items_total: int
    bytes_stored: int
    kept: list[Any]
    engine: str
    precision: str
    exact_diagonal: bool
    numerics: dict[str, Any]
    schedule: str
    complete: bool
    format_version: int
    fingerprint: dict[str, Any]
    dtype: str
    codecs: list[str]
    versions: dict[str, str]
