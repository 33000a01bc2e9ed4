"""Jobs in child processes that are killed at a step of the write protocol, or whenever the parent says so.

Children are forked from a server that has imported everything and computed nothing, so that one costs its work only.
"""

from __future__ import annotations

import errno
import fcntl
import json
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["jacstore.rows.build", "jacstore.kernels.gram", "jacstore.testing"])

# One column of pieces, so that a slab is a piece: 66 columns are 5 slabs.
PIECE_COLUMNS = 14
# Examples a unit of a large build.
LARGE_UNIT = 10


@dataclass(frozen=True, kw_only=True)
class Job:
    """A build, or a gram with a checkpoint after every slab, small enough to be killed at every step.

    Kind "parts" is a gram in two parts, one after the other, whose sums over half of the columns are added up at last.
    `large` makes a job an MLP of some 300,000 parameters and 400 examples, with checkpoints when they are due. Without
    `locks` its file system has none.
    """

    kind: str
    out: str
    store: str = ""
    large: bool = False
    locks: bool = True
    options: tuple[tuple[str, Any], ...] = ()

    def run(self, listener: Callable[[Any], None]) -> Any:
        from jacstore.base.limits import LIMITS
        from jacstore.kernels import gram
        from jacstore.rows import build
        from jacstore.testing import mlp

        if not self.locks:
            fcntl.flock = _no_locks
        if not self.large:
            LIMITS.piece_columns, LIMITS.slab_columns = (PIECE_COLUMNS, PIECE_COLUMNS), PIECE_COLUMNS
            # Due at once, however quick the first one was.
            LIMITS.checkpoint_share = 1e9
        options: dict[str, Any] = dict(self.options)
        if self.kind == "parts":
            for part in ((1, 2), (2, 2)):
                kernel = gram.gram(self.store, out=self.out, listener=listener, part=part, **options)
            return kernel
        if self.kind == "gram":
            return gram.gram(self.store, out=self.out, listener=listener, **options)
        if self.large:
            problem = mlp(400, sizes=(64, 512, 512, 10), outputs="sum")
            return build.build(
                problem, self.out, layout="dense", unit_size=LARGE_UNIT, codec="none", listener=listener, **options
            )
        return build.build(mlp(10), self.out, unit_size=2, batch_size=1, codec="none", listener=listener, **options)


def _no_locks(*_: object) -> None:
    raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """How a child ended: its exit code, its report if it finished, and the steps and work it had done."""

    exitcode: int
    report: dict[str, Any]
    steps: list[str]
    examples: int
    slabs: list[int]

    @property
    def killed(self) -> bool:
        return self.exitcode == -signal.SIGKILL


def run_job(job: Job, notes: Path, *, at_step: int = 0, when: str = "", after: float | None = None) -> Outcome:
    """Run a job in a child; kill it before step number `at_step`, before a step `when`, or `after` some seconds.

    `when` is "step name" and ends a step's text, such as "rename ledger/unit-0000003.json".
    """
    for name in ("steps", "work", "report"):
        (notes / name).unlink(missing_ok=True)
    child = CONTEXT.Process(target=_child, args=(job, str(notes), at_step, when))
    child.start()
    child.join(after)
    if after is not None and child.is_alive():
        child.kill()
    child.join()
    work = _lines(notes / "work")
    report = notes / "report"
    return Outcome(
        exitcode=child.exitcode or 0,
        report=json.loads(report.read_text()) if report.exists() else {},
        steps=_lines(notes / "steps"),
        examples=sum(int(line.split()[1]) for line in work if line.startswith("batch")),
        slabs=[int(line.split()[1]) for line in work if line.startswith("slab")],
    )


def _lines(path: Path) -> list[str]:
    return path.read_text().splitlines() if path.exists() else []


def _child(job: Job, notes: str, at_step: int, when: str) -> None:
    import jacstore.storage.files
    from jacstore.base.events import BatchDone, SlabDone

    # Each line is one append, so that a killed child's notes are whole.
    steps = os.open(f"{notes}/steps", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    work = os.open(f"{notes}/work", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    count = 0
    lock = threading.Lock()

    def before_step(step: str, name: str) -> None:
        nonlocal count
        with lock:
            count += 1
            if count == at_step or (when and f"{step} {name}".endswith(when)):
                os.kill(os.getpid(), signal.SIGKILL)
            os.write(steps, f"{step} {name}\n".encode())

    def listener(event: Any) -> None:
        if isinstance(event, BatchDone):
            os.write(work, f"batch {event.examples}\n".encode())
        elif isinstance(event, SlabDone):
            os.write(work, f"slab {event.slab}\n".encode())

    jacstore.storage.files.before_step = before_step
    result = job.run(listener)
    Path(notes, "report").write_text(json.dumps(result.report))
