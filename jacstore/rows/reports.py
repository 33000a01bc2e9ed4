"""What a build says of itself: what it would do and what it did, as values whose fields are the keys of its JSON."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from jacstore.base import machine
from jacstore.base.schema import Reported
from jacstore.store.reports import LeafFacts

if TYPE_CHECKING:
    from jacstore.store.writer import StoreWriter

R = TypeVar("R", bound="BuildReport")


@dataclass(frozen=True, kw_only=True)
class BuildForecast(Reported):
    """What a build would do, and whether storing pays against recomputing blocks of rows."""

    store: str
    examples: int
    outputs: int
    parameters: int
    terms: list[LeafFacts]
    leaves: int
    bytes_to_store: int
    bytes_free: int
    bytes_dense: int
    begun: bool
    units_done: int
    units_total: int
    unit_size: int
    batch_size: int
    output_batch: int
    batches: int
    files: int
    codec: str
    memory: int
    memory_parts: dict[str, int]
    device_pass_bytes: int
    expected_seconds_compile: float
    expected_seconds_device: float
    expected_seconds_write: float
    recompute_passes: float
    expected_seconds_recompute: float
    expected_seconds_store: float
    storing_pays: bool
    # Where the store is in a bucket, by kind.
    expected_requests: dict[str, int]


@dataclass(frozen=True, kw_only=True)
class BuildReport(Reported):
    """What a build did: counts, bytes and seconds."""

    store: str
    examples: int
    outputs: int
    parameters: int
    units_total: int
    bytes_stored: int
    bytes_dense: int
    complete: bool
    zero_leaves: list[str]
    leaves: int
    units_computed: int
    units_reused: int
    seconds_total: float
    peak_rss: int
    seconds_compile: float
    seconds_device: float
    seconds_write: float
    codec: str
    batch_size: int | None
    # Batches that each device computed.
    batches_by_device: list[int]
    # Where the store is in a bucket, by kind.
    requests: dict[str, int]

    @classmethod
    def of(cls: type[R], writer: StoreWriter, started: float, **more: Any) -> R:
        """The report of a build by `writer` that began at `started` (`time.perf_counter()`)."""
        facts = writer.store.summary()
        return cls(
            store=facts.store,
            examples=facts.examples,
            outputs=facts.outputs,
            parameters=facts.parameters,
            units_total=facts.units_total,
            bytes_stored=facts.bytes_stored,
            bytes_dense=facts.bytes_dense,
            complete=facts.complete,
            zero_leaves=facts.zero_leaves,
            leaves=len(facts.leaves),
            units_computed=len(writer.units) - len(writer.missing) - writer.reused,
            units_reused=writer.reused,
            seconds_total=time.perf_counter() - started,
            peak_rss=machine.peak_rss(),
            codec=writer.store.choices.codec,
            requests=writer.requests,
            **more,
        )


@dataclass(frozen=True, kw_only=True)
class TorchBuildReport(BuildReport):
    """The same of a module of PyTorch: nothing is compiled, examples are compared with autograd all along."""

    seconds_compile: float = 0.0
    # What each step before the first batch took.
    seconds_start: dict[str, float]
    seconds_audit: float
    examples_audited: int
    # Whether examples were mapped over, or taken one at a time.
    vmap: bool
