"""Threads: tasks of a pool that are all over when an error is raised, and how many threads BLAS may use for a while.

The number of threads of BLAS belongs to the process. Limits that begin and end in several threads must not undo each
other: the smallest of those that hold counts, and the last that ends brings back what was there before the first.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from threading import Lock, Thread
from typing import Any, TypeVar

from threadpoolctl import threadpool_limits

Task = TypeVar("Task")
Result = TypeVar("Result")

_lock = Lock()
_wanted: list[int] = []
_set: list[int] = []
_before: list[threadpool_limits] = []


def all_done(pool: ThreadPoolExecutor, work: Callable[[Task], Result], tasks: Iterable[Task]) -> list[Result]:
    """The result of each task, in order.

    After an error or Ctrl-C, tasks that have not begun are cancelled and running ones are waited for, so that the
    caller may use the memory and files that they were given.
    """
    futures: list[Future[Result]] = []
    try:
        futures.extend(pool.submit(work, task) for task in tasks)
        return [future.result() for future in futures]
    finally:
        for future in futures:
            future.cancel()
        wait(futures)


@contextlib.contextmanager
def blas_threads(count: int | None) -> Iterator[None]:
    """BLAS with at most so many threads inside; None changes nothing."""
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
    # The first one knows what was there before.
    _before.extend(found[: not _before])
    _set[:] = [count]


def _elsewhere(work: Callable[[], Any]) -> None:
    # threadpoolctl ignores all threads but the one that was first to set a limit, for as long as that one lives.
    thread = Thread(target=work, name="jacstore-blas")
    thread.start()
    thread.join()
