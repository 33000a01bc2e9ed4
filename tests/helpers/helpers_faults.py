"""Small stores and kernels to be hurt, what they hold when nobody hurts them, and builds that compile once."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import settings

import jacstore
import jacstore.kernels.plan.schedule
import jacstore.rows.build
import jacstore.storage.files
import jacstore.storage.ledger
import jacstore.storage.zarr_group
import jacstore.store.layout
from jacstore import Problem
from jacstore.base.limits import LIMITS
from jacstore.testing import mlp


def often(fixed: int, random: int) -> int:
    """How many examples to draw: few that are the same every time, many with `--hypothesis-profile random`."""
    return fixed if settings().derandomize else random


def tokens(n: int = 7, seed: int = 0) -> Problem:
    """Every kind of term: a table that is looked up, a convolution over positions, a dense layer; P = 71, K = 2."""
    draw = np.random.default_rng(seed)
    shapes = {"conv": (3, 3, 4), "head": (4, 2), "scale": (3,), "table": (8, 3)}
    params = {name: draw.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}
    return Problem(apply=_tokens, params=params, inputs=draw.integers(0, 8, size=(n, 5)))


def _tokens(params: Any, ids: Any) -> Any:
    import jax

    y = params["table"][ids] * params["scale"]
    y = jax.lax.conv_general_dilated(y[None], params["conv"], (1,), "VALID", dimension_numbers=("NWC", "WIO", "NWC"))
    return jnp.tanh(y[0]).mean(0) @ params["head"]


PROBLEMS: dict[str, tuple[Problem, dict[str, Any]]] = {
    "dense": (mlp(7), {"layout": "dense"}),
    "factored": (tokens(), {"layout": "factored"}),
}
OPTIONS = {"unit_size": 2, "batch_size": 2, "codec": "none"}


def make(kind: str, out: str | Path | None, **options: Any) -> jacstore.JacobianStore:
    """Build, or continue, one of the two stores: four units, of 7 examples."""
    problem, layout = PROBLEMS[kind]
    return jacstore.build(problem, out, **{**OPTIONS, **layout, **options})


@contextlib.contextmanager
def quick() -> Iterator[pytest.MonkeyPatch]:
    """Probe, trace and compile each problem once; flush nothing; cut rows and slabs into many small ones."""
    made: dict[Any, Any] = {}

    def once(name: str, key: Callable[..., Any]) -> None:
        real = getattr(jacstore.rows.build, name)

        def remembered(*given: Any, **named: Any) -> Any:
            found = (name, *key(*given, **named))
            if found not in made:
                # What a key identifies by its address must stay alive.
                made[found] = (given, real(*given, **named))
            return made[found][1]

        patch.setattr(jacstore.rows.build, name, remembered)

    with pytest.MonkeyPatch.context() as patch:
        once("prepare", lambda problem, **named: (id(problem), *named.items()))
        once("_restrict", lambda prepared, examples: (id(prepared), examples))
        once("cut_before_products", lambda prepared, *rest: (id(prepared), *rest))
        once(
            "DevicePass",
            lambda prepared, cut, *, budget, devices, **named: (id(prepared), id(cut), *devices, *named.items()),
        )
        patch.setattr(jacstore.storage.zarr_group, "versions", functools.cache(jacstore.storage.zarr_group.versions))
        patch.setattr(
            jacstore.storage.zarr_group, "_create_array", _written_once(jacstore.storage.zarr_group._create_array)
        )
        patch.setattr(
            jacstore.storage.zarr_group.zarr,
            "create_group",
            _group_written_once(jacstore.storage.zarr_group.zarr.create_group),
        )
        patch.setattr(os, "fsync", lambda descriptor: None)
        patch.setattr(LIMITS, "piece_columns", (14, 14))
        patch.setattr(LIMITS, "slab_columns", 28)
        yield patch


def _written_once(create: Callable[[Path, Any], None]) -> Callable[[Path, Any], None]:
    """Metadata of equal arrays are equal: Zarr writes them once."""
    known: dict[Any, bytes] = {}

    def again(path: Path, layout: Any) -> None:
        if layout not in known:
            create(path, layout)
            known[layout] = (path / "zarr.json").read_bytes()
        path.mkdir(parents=True, exist_ok=True)
        (path / "zarr.json").write_bytes(known[layout])

    return again


def _group_written_once(create: Callable[..., Any]) -> Callable[..., None]:
    """Likewise for groups without attributes."""
    known: list[bytes] = []

    def again(path: Path, **given: Any) -> None:
        if "attributes" in given or not known:
            create(path, **given)
            if "attributes" not in given:
                known.append((path / "zarr.json").read_bytes())
            return
        path.mkdir(parents=True, exist_ok=True)
        (path / "zarr.json").write_bytes(known[0])

    return again


@contextlib.contextmanager
def ram_folder() -> Iterator[Path]:
    """A folder to be filled and emptied hundreds of times, in memory where there is such a place."""
    shared = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=shared if os.access(shared, os.W_OK) else None) as folder:
        yield Path(folder)


def bits(opened: Any) -> dict[str, bytes]:
    """Everything a store or kernel holds, read with every check, as bytes."""
    if isinstance(opened, jacstore.Kernel):
        opened.require_complete()
        arrays = opened.leaf_arrays or {"kernel": opened.array}
        return {name: array.compute(scheduler="synchronous").tobytes() for name, array in arrays.items()}
    opened.require_complete()
    found = {"outputs": opened.outputs.tobytes(), "norms": opened.norms.tobytes()}
    for name, layout in opened.layouts.items():
        if name not in found:
            values = np.empty(layout.shape, layout.dtype)
            opened.read(name, 0, opened.n_examples, 0, layout.shape[-1], values)
            found[name] = values.tobytes()
    return found


def is_right(path: str | Path, truth: dict[str, bytes], *, verified: bool = False) -> bool:
    """Whether every read of a store or kernel passes its check and is equal, bit for bit, to what nobody disturbed.

    With `verified`, whether `jacstore.verify` agrees as well.
    """
    return bits(jacstore.open(path)) == truth and (not verified or jacstore.verify(path, samples=4).ok)


class Killed(BaseException):
    """Stands for the end of the process."""


class Knife:
    """The seam of the write protocol: counts steps, and from step number `at` on nothing is done any more.

    With `power_cut` all that is not flushed yet is lost as well: content of files, their names, and a last rename.
    """

    def __init__(self, at: int = 0, power_cut: bool = False) -> None:
        self.at, self.power_cut, self.dead = at, power_cut, False
        self.steps: list[tuple[str, str]] = []
        self._lock = threading.Lock()

    def __call__(self, step: str, name: str) -> None:
        with self._lock:
            if not self.dead:
                self.steps.append((step, name))
                self.dead = len(self.steps) == self.at
            if self.dead:
                raise Killed

    def run(self, job: Callable[[], Any], out: Path) -> Any:
        """Run a job whose output is `out`; None if it was killed."""
        leave = jacstore.storage.ledger.Lock.__exit__

        def stay(lock: Any, *exception: object) -> None:
            """A process that dies leaves its locks, and they name a process that is no more."""
            try:
                leave(lock, *exception)
            finally:
                # The lock's own removal is a step, before which a process may die too.
                path = Path(lock.files.address, lock.file)
                if self.dead and path.parent.exists():
                    path.write_text(json.dumps(lock._owner | {"start": "1"}))

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(jacstore.storage.files, "before_step", self)
            patch.setattr(jacstore.storage.ledger.Lock, "__exit__", stay)
            try:
                return job()
            except Killed:
                pass
        if self.power_cut:
            self._lose(out)
        return None

    def _lose(self, out: Path) -> None:
        """Undo what no flush had been asked for before the end."""
        *before, last = self.steps
        flushed = {name for step, name in before if step == "fsync"}
        for place, (step, name) in enumerate(before):
            if step == "write" and name not in flushed and (out / name).exists():
                data = (out / name).read_bytes()
                (out / name).write_bytes(data[: len(data) // 2])
            elif step == "write" and ("fsync folder", str(Path(name).parent)) not in before[place:]:
                (out / name).unlink(missing_ok=True)
        if last[0] == "fsync renamed":
            (out / last[1]).unlink()
        for torn in (out / "ledger").glob(".*.tmp") if last[0] == "fsync record" else ():
            torn.write_bytes(torn.read_bytes()[:10])
