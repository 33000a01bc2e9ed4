"""Limit the threads of BLAS for a while.

The number of threads belongs to the process. Limits that begin and end in several threads must not undo each other: the
smallest of those in force counts, and the last one to end restores the number from before the first.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from threading import Lock, Thread
from typing import Any

from threadpoolctl import threadpool_limits

_lock = Lock()
_wanted: list[int] = []
_set: list[int] = []
_before: list[threadpool_limits] = []


@contextlib.contextmanager
def blas_threads(count: int | None) -> Iterator[None]:
    """Limit BLAS to at most this many threads inside the block; None changes nothing."""
    if count is None:
        yield
        return
    with _lock:
        _wanted.append(count)
        _limit()
    try:
        yield
    finally:
        with _lock:
            _wanted.remove(count)
            if _wanted:
                _limit()
            else:
                _set.clear()
                _elsewhere(_before.pop().restore_original_limits)


def _limit() -> None:
    count = min(_wanted)
    if _set == [count]:
        return
    found: list[threadpool_limits] = []
    _elsewhere(lambda: found.append(threadpool_limits(count, "blas")))
    # The first limit remembers the number from before.
    _before.extend(found[: not _before])
    _set[:] = [count]


def _elsewhere(work: Callable[[], Any]) -> None:
    # threadpoolctl ignores all threads but the one that was first to set a limit, for as long as that one lives.
    thread = Thread(target=work, name="jacstore-blas")
    thread.start()
    thread.join()
