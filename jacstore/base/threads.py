"""Run tasks on a pool of threads; an error is raised only when none of them runs any more."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import TypeVar

Task = TypeVar("Task")
Result = TypeVar("Result")


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
