"""Stream panels of a store for chosen examples, one chunk of examples at a time.

A chunk is a run of whole units if memory allows: a stored piece spans a unit, so that nothing is read twice. While one
chunk is multiplied the next is read.
"""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Generator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np

from jacstore.errors import InvalidRequestError
from jacstore.operators.panels import Held, Panel
from jacstore.store.reader import JacobianStore

# Arrays begin at multiples of a cache line.
ALIGNED = 64


@dataclass(frozen=True, kw_only=True)
class Chunk:
    """Examples `start` to `stop` are read; of these `local`, None for all, are examples `where` of the chosen ones."""

    start: int
    stop: int
    local: np.ndarray | None
    where: slice | np.ndarray


@dataclass(frozen=True, kw_only=True)
class Job:
    """What is read together: some panels for a chunk."""

    panels: tuple[Panel, ...]
    chunk: Chunk


def chosen_examples(n_examples: int, examples: Any) -> np.ndarray:
    """Numbers of the chosen examples: a slice, integers in any order, or a mask.

    Raises
    ------
    InvalidRequestError
        If there is none, or one that the store does not have.
    """
    allowed = f"allowed are a slice, integers below {n_examples}, or {n_examples} booleans; change examples="
    if isinstance(examples, slice):
        index: Any = examples
    else:
        index = np.asarray(examples)
        if index.ndim != 1 or index.dtype.kind not in "iub":
            raise InvalidRequestError(f"examples is {index.dtype} of shape {index.shape}; {allowed}")
    try:
        found = np.arange(n_examples)[index]
    except (IndexError, TypeError, ValueError) as error:
        raise InvalidRequestError(f"examples: {error}; {allowed}") from error
    if not len(found):
        raise InvalidRequestError(f"examples names no example; {allowed}")
    return found


def chunks(examples: np.ndarray, n_examples: int, size: int) -> list[Chunk]:
    """The chosen examples in runs of `size` examples of the store, in the store's order."""
    order = np.argsort(examples, kind="stable")
    ordered = examples[order]
    borders = np.searchsorted(ordered, np.arange(0, n_examples + size, size))
    found = []
    for a, b in itertools.pairwise(borders):
        if a == b:
            continue
        start, stop = int(ordered[a]), int(ordered[b - 1]) + 1
        consecutive = np.arange(b - a)
        local = None if np.array_equal(ordered[a:b], start + consecutive) else ordered[a:b] - start
        where: slice | np.ndarray = order[a:b]
        if np.array_equal(order[a:b], order[a] + consecutive):
            where = slice(int(order[a]), int(order[a] + b - a))
        found.append(Chunk(start=start, stop=stop, local=local, where=where))
    return found


def stream(
    store: JacobianStore, jobs: Sequence[Job], dtype: np.dtype[Any], ahead: bool
) -> Generator[tuple[Job, list[Held]], None, None]:
    """Yield each job with what its panels hold; with `ahead` the next is read meanwhile, in memory of its own.

    What is yielded may be overwritten when the next is asked for.
    """
    size = max((job_bytes(job, dtype) for job in jobs), default=0)
    rooms = [_Room(size) for _ in range(2 if ahead else 1)]

    def read(index: int) -> list[Held]:
        room = rooms[index % len(rooms)]
        room.clear()
        chunk = jobs[index].chunk
        held = [panel.read(store, chunk.start, chunk.stop, dtype, room.empty) for panel in jobs[index].panels]
        if chunk.local is None:
            return held
        return [{name: values[chunk.local] for name, values in part.items()} for part in held]

    if not ahead:
        for index, job in enumerate(jobs):
            yield job, read(index)
        return
    with ThreadPoolExecutor(1, "jacstore-stream") as pool:
        pending = pool.submit(read, 0) if jobs else None
        for index, job in enumerate(jobs):
            assert pending is not None
            held = pending.result()
            pending = pool.submit(read, index + 1) if index + 1 < len(jobs) else None
            yield job, held


def count(job: Job) -> int:
    """Examples of a job."""
    chunk = job.chunk
    return chunk.stop - chunk.start if chunk.local is None else len(chunk.local)


def job_bytes(job: Job, dtype: np.dtype[Any]) -> int:
    """Bytes of what a job holds in memory."""
    count = job.chunk.stop - job.chunk.start
    copies = 1 if job.chunk.local is None else 2
    return copies * sum(count * panel.numbers * dtype.itemsize + ALIGNED * panel.arrays for panel in job.panels)


class _Room:
    """Memory that is used again: touching new memory takes as long as reading into it."""

    def __init__(self, size: int) -> None:
        self._held = np.empty(size, np.uint8)
        self._used = 0

    def clear(self) -> None:
        """Give all of it free."""
        self._used = 0

    def empty(self, shape: Sequence[int], dtype: Any) -> np.ndarray:
        """As `np.empty`, within this memory while there is some."""
        size = math.prod(map(operator.index, shape)) * np.dtype(dtype).itemsize
        start, self._used = self._used, self._used + -(-size // ALIGNED) * ALIGNED
        if start + size > self._held.nbytes:
            return np.empty(shape, dtype)
        return self._held[start : start + size].view(dtype).reshape(shape)
