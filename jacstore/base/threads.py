"""Threads: pools that keep what JAX was told, tasks that are over when an error is raised, how many threads BLAS uses.

What JAX is told by `with jax.enable_x64(True):` holds for the thread that says so and for no other. Tasks of a `Pool`
run under the settings of the thread that submits them.

The number of threads of BLAS belongs to the process. Limits that begin and end in several threads must not undo each
other: the smallest of those that hold counts, and the last that ends brings back what was there before the first.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import partial
from threading import Lock, Thread
from typing import Any, TypeVar

from threadpoolctl import threadpool_limits

Task = TypeVar("Task")
Result = TypeVar("Result")

# Settings of JAX that a thread may have of its own; each is the name of a context manager, and of a flag.
SETTINGS = (
    "allow_f16_reductions",
    "check_tracer_leaks",
    "debug_infs",
    "debug_key_reuse",
    "debug_nans",
    "default_device",
    "default_matmul_precision",
    "default_prng_impl",
    "disable_jit",
    "enable_checks",
    "enable_custom_prng",
    "enable_x64",
    "legacy_prng_key",
    "log_compiles",
    "numpy_dtype_promotion",
    "numpy_rank_promotion",
    "softmax_custom_jvp",
    "threefry_partitionable",
    "transfer_guard_device_to_device",
    "transfer_guard_device_to_host",
    "transfer_guard_host_to_device",
)

_lock = Lock()
_wanted: list[int] = []
_set: list[int] = []
_before: list[threadpool_limits] = []


def settings_in_force() -> dict[str, Any]:
    """What JAX is told in the calling thread."""
    # A process that has not imported it, such as one that multiplies stored rows, has told it nothing.
    jax = sys.modules.get("jax")
    if jax is None or not hasattr(jax, "enable_x64"):
        return {}
    flags = {name: f"jax_{name}" for name in SETTINGS if hasattr(jax, name)}
    return {name: getattr(jax.config, flag) for name, flag in flags.items() if hasattr(jax.config, flag)}


def within_settings(settings: Mapping[str, Any], work: Callable[..., Result]) -> Callable[..., Result]:
    """A function that does `work` under these settings of JAX, in whatever thread it is called."""
    return partial(_within, settings, work)


def _within(settings: Mapping[str, Any], work: Callable[..., Result], *given: Any, **named: Any) -> Result:
    here = settings_in_force()
    with contextlib.ExitStack() as stack:
        for name, value in settings.items():
            if here[name] != value:
                stack.enter_context(getattr(sys.modules["jax"], name)(value))
        return work(*given, **named)


class Pool(ThreadPoolExecutor):
    """A pool whose tasks run under the settings of JAX of the thread that submits them."""

    def submit(self, fn: Callable[..., Result], /, *args: Any, **kwargs: Any) -> Future[Result]:
        """Begin `fn(*args, **kwargs)` in a thread."""
        return super().submit(within_settings(settings_in_force(), fn), *args, **kwargs)


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
