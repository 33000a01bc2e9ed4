"""Run items with Dask: on threads of this process, on local worker processes, or on a cluster elsewhere."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Callable, Iterator
from queue import Empty, SimpleQueue
from typing import Any

import dask
from dask.threaded import get
from distributed import Client, KilledWorker, LocalCluster, Nanny, wait

from jacstore.base.events import ItemDone, Listener
from jacstore.base.limits import LIMITS
from jacstore.base.threads import settings_in_force, within_settings
from jacstore.errors import InvalidRequestError, RunInterruptedError
from jacstore.kernels.context import Work
from jacstore.kernels.item import run_item
from jacstore.kernels.plan.reports import ItemResult

# Items of this process at once where each is one tile: one computes, the other is written.
ITEMS_ALIVE = 2


def on_threads(work: Work, todo: list[int], listener: Listener, stop: Callable[[], bool]) -> list[ItemResult]:
    """One item after the other, each on all cores: BLAS has the threads. Small items are written meanwhile."""
    abandoned, running = threading.Event(), threading.Semaphore(ITEMS_ALIVE)
    run = within_settings(settings_in_force(), run_item)

    def one(number: int) -> ItemResult:
        with running:
            if stop() or abandoned.is_set():
                raise RunInterruptedError("interrupted before an item")
            result = run(work, number, listener, lambda: stop() or abandoned.is_set())
        listener(ItemDone(item=number))
        return result

    alive = ITEMS_ALIVE if work.kernel.plan.resident else 1
    # A graph of our own: thousands of delayed calls would each be looked up among all others.
    try:
        return list(get({("item", n): (one, n) for n in todo}, [("item", n) for n in todo], num_workers=alive))
    finally:
        # After an error or Ctrl-C Dask returns at once; running items must stop before their lock is given up.
        abandoned.set()
        for _ in range(ITEMS_ALIVE):
            running.acquire()
        running.release(ITEMS_ALIVE)


def on_cluster(
    client: Any, work: Work, todo: list[int], listener: Listener, stop: Callable[[], bool]
) -> list[ItemResult]:
    """Items on worker processes; a worker that dies is replaced and its items run again."""
    token = os.urandom(4).hex()
    futures = [
        client.submit(run_item, work, number, key=f"jacstore-item-{number}-{token}", pure=False) for number in todo
    ]
    done: SimpleQueue[Any] = SimpleQueue()
    for future in futures:
        future.add_done_callback(done.put)
    results: list[ItemResult] = []
    try:
        while len(results) < len(futures):
            if stop():
                raise RunInterruptedError("interrupted")
            # Signals are noticed between waits.
            with contextlib.suppress(Empty):
                results.append(_result(done.get(timeout=0.2)))
                listener(ItemDone(item=results[-1].item))
    except BaseException:
        # Work that has begun cannot be cancelled: it is told to end, and waited for.
        work.announce_end()
        begun = {key for keys in client.processing().values() for key in keys}
        client.cancel([future for future in futures if future.key not in begun])
        with contextlib.suppress(TimeoutError), client.as_current():
            wait([future for future in futures if future.key in begun], timeout=LIMITS.ending_seconds)
        raise
    finally:
        client.cancel(futures)
    return results


def _result(future: Any) -> ItemResult:
    try:
        found: ItemResult = future.result()
    except KilledWorker as error:
        raise InvalidRequestError(
            f"an item's worker died again and again ({error.last_worker}), most often for want of memory; give less "
            "--memory (memory=) or fewer --workers (workers=) and run the same command again"
        ) from error
    return found


@contextlib.contextmanager
def connect(address: str) -> Iterator[Any]:
    try:
        client = Client(address, timeout="10s", set_as_default=False)
    except (OSError, ValueError) as error:
        raise InvalidRequestError(
            f"--scheduler {address}: no Dask scheduler answers there ({error}) (scheduler=)"
        ) from error
    try:
        yield client
    finally:
        client.close()


class _HiddenMain:
    """The main module made one of no file while processes are spawned: they would run it again, as a script.

    Spawned processes do so for functions that are defined there; what runs on ours is defined in jacstore. The module
    itself stays, so that threads of the caller find and send what is in it.
    """

    def __init__(self) -> None:
        self._lock, self._inside = threading.Lock(), 0
        self._module: dict[str, Any] = {}
        self._kept: dict[str, Any] = {}

    def __enter__(self) -> None:
        with self._lock:
            self._inside += 1
            if self._inside == 1:
                self._module = vars(sys.modules["__main__"])
                self._kept = {name: self._module[name] for name in ("__spec__", "__file__") if name in self._module}
                self._module.update(dict.fromkeys(self._kept))

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._inside -= 1
            if not self._inside:
                self._module.update(self._kept)


_HIDDEN_MAIN = _HiddenMain()


class _Nanny(Nanny):
    """Starts a worker, and another one when it dies, without the script that called us."""

    async def instantiate(self) -> Any:
        with _HIDDEN_MAIN:
            return await super().instantiate()


@contextlib.contextmanager
def cluster_at(scheduler: str, workers: int) -> Iterator[Any]:
    """A client of a cluster: a local one of single-threaded spawned processes, or the one at an address."""
    if scheduler != "processes":
        with connect(scheduler) as client:
            yield client
        return
    settings = {
        "distributed.worker.multiprocessing-method": "spawn",
        "distributed.nanny.pre-spawn-environ": {},
        "distributed.admin.low-level-log-length": 0,
    }
    with (
        dask.config.set(settings),
        LocalCluster(
            n_workers=workers,
            threads_per_worker=1,
            processes=True,
            worker_class=_Nanny,
            dashboard_address="127.0.0.1:0",
            # jacstore keeps its own budget; a killed worker would only repeat its item.
            memory_limit=0,
            silence_logs=40,
        ) as cluster,
        # What the caller computes meanwhile, in other threads, is nothing to this cluster.
        Client(cluster, set_as_default=False) as client,
    ):
        yield client
