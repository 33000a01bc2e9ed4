"""Progress events of a build or a gram, handed to listeners outside the work.

The same events draw the progress bar and let tests count what was done.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Started:
    """Work begins: `done` of `total` pieces exist already. `what` is "units" or "items"."""

    what: str
    total: int
    done: int


@dataclass(frozen=True, kw_only=True)
class BatchDone:
    """One device pass has been copied to the host: `examples` more of the running unit."""

    examples: int


@dataclass(frozen=True, kw_only=True)
class UnitDone:
    """A unit is durable: its record has been renamed into place."""

    unit: int
    examples: int
    bytes_stored: int


@dataclass(frozen=True, kw_only=True)
class SlabDone:
    """One slab has been added to the accumulators of an item."""

    item: int
    slab: int
    bytes_read: int


@dataclass(frozen=True, kw_only=True)
class CheckpointDone:
    """The accumulators of an item are on disk; a kill now repeats nothing before `slab`."""

    item: int
    slab: int


@dataclass(frozen=True, kw_only=True)
class ItemDone:
    """An item is durable."""

    item: int


@dataclass(frozen=True, kw_only=True)
class Waiting:
    """The run waits for another process; `reason` is one line for the user."""

    reason: str


Event = Started | BatchDone | UnitDone | SlabDone | CheckpointDone | ItemDone | Waiting
Listener = Callable[[Event], None]


def silent(event: Event) -> None:
    """Do nothing: the default listener."""
