"""Killed before every single step of the write protocol, the same command continues, and what it calls done is right.

The process is this one: from the chosen step on nothing is done any more, and its locks stay behind. Every other kill
is a power cut, which takes along what was not flushed. `python tests/test_kill_steps.py` does both at every step of
every job, kills the next run as well, and prints how many steps and runs that were. Real processes are killed in
`test_kill.py`.
"""

from __future__ import annotations

import contextlib
import shutil
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

import jacstore
import jacstore.storage.checkpoints
from helpers_faults import Knife, bits, is_right, make, quick, ram_folder
from jacstore import gram
from jacstore.base.events import BatchDone, SlabDone
from jacstore.base.limits import LIMITS
from jacstore.errors import RequestMismatchError
from jacstore.testing import Counting

EXAMPLES = "0:3"


def build(kind, place, listener):
    return make(kind, place / "out", examples=EXAMPLES, listener=listener)


def one_gram(kind, place, listener):
    return gram(place / "run.jac", place / "out", tile=2, listener=listener)


def two_parts(kind, place, listener):
    for part in ("2/2", "1/2"):
        kernel = gram(place / "run.jac", place / "out", tile=2, part=part, listener=listener)
    return kernel


def by_leaf(kind, place, listener):
    return gram(place / "run.jac", place / "out", tile=2, by_leaf=True, triangle=True, listener=listener)


def overwrite(kind, place, listener):
    """A store of another type stands there; once it is gone, going on is a plain build."""
    there = place / "out" / "zarr.json"
    other = there.exists() and jacstore.open(place / "out").dtype == "float64"
    return make(kind, place / "out", examples=EXAMPLES, overwrite=other, listener=listener)


JOBS = {job.__name__: job for job in (build, one_gram, two_parts, by_leaf, overwrite)}
CASES = [(kind, name) for kind in ("dense", "factored") for name in JOBS]


@pytest.fixture(scope="module", autouse=True)
def quickly():
    with quick() as patch:
        # A checkpoint is due after every slab, however quick the first one was.
        patch.setattr(LIMITS, "checkpoint_share", 1e9)
        yield


class Scene:
    """A job, its steps and its result when nobody kills it, and places to run it anew."""

    verified_every = 4

    def __init__(self, kind, name, folder):
        self.kind, self.job, self.folder = kind, JOBS[name], folder
        self.start = folder / "start"
        make(kind, self.start / "run.jac", examples=EXAMPLES)
        if name == "overwrite":
            make(kind, self.start / "out", examples=EXAMPLES, dtype="float64")
        place, self.whole = self.fresh(), Knife()
        self.seen = Counting()
        assert self.run(place, self.whole, self.seen).complete
        self.truth = bits(jacstore.open(place / "out"))
        self.killed = self.resumed = self.verified = 0

    def fresh(self):
        shutil.rmtree(self.folder / "place", ignore_errors=True)
        return Path(shutil.copytree(self.start, self.folder / "place"))

    def run(self, place, knife, seen=None):
        return knife.run(lambda: self.job(self.kind, place, seen or Counting()), place / "out")

    def kill_and_resume(self, at, *, power_cut, again_at=0):
        """Kill before a step, and the next run too if `again_at` says where; then let it finish."""
        place, seen = self.fresh(), Counting()
        first = Knife(at, power_cut)
        assert self.run(place, first, seen) is None
        self.killed += 1
        kept = self.check_what_is_said(place)
        if again_at:
            second = Knife(again_at, power_cut)
            if self.run(place, second, seen) is None:
                self.killed += 1
                kept = max(kept, self.check_what_is_said(place))
        done = self.run(place, Knife(), seen)
        self.resumed += 1
        # Verifying takes longer than all the rest.
        verified = self.resumed % self.verified_every == 0
        assert done.complete and is_right(place / "out", self.truth, verified=verified)
        self.verified += verified
        self.check_what_is_kept(done, seen, kept, 2 if again_at else 1)

    def check_what_is_said(self, place):
        """Nothing that is called complete is wrong; returns the units that are done."""
        if not (place / "out" / "zarr.json").exists():
            return 0
        opened = jacstore.open(place / "out")
        info = opened.info()
        if (info["complete"] and info["dtype"] != "float64") or (self.job is not overwrite and info["complete"]):
            assert is_right(place / "out", self.truth, verified=True)
            self.verified += 1
        return info.get("units_done", 0) if self.job is build else 0

    def check_what_is_kept(self, done, seen, kept, kills):
        """Of what was computed before a kill no more is repeated than what was on its way."""
        if self.job is build:
            assert done.report["units_reused"] >= kept
            repeated = sum(event.examples for event in seen.of(BatchDone)) - done.n_examples
            # A complete unit, which was being stored, and what was begun of the next.
            assert repeated < kills * 2 * done.unit_size
        elif self.job in (one_gram, two_parts):
            assert len(seen.of(SlabDone)) <= len(self.seen.of(SlabDone)) + kills


@pytest.fixture
def scene(request):
    with ram_folder() as folder:
        yield lambda kind, name: Scene(kind, name, folder)


# Of builds and grams; all steps of the rest are killed by hand.
QUICK = {("dense", "build"): 1, ("dense", "one_gram"): 1, ("factored", "build"): 6, ("factored", "one_gram"): 2}


@pytest.mark.parametrize(
    ("kind", "name", "every"),
    [
        *((*case, every) for case, every in QUICK.items()),
        *(pytest.param(*case, 1, marks=pytest.mark.slow) for case in CASES if QUICK.get(case) != 1),
    ],
)
def test_a_kill_before_any_step_loses_and_falsifies_nothing(kind, name, every, scene):
    scene = scene(kind, name)
    steps = range(1, len(scene.whole.steps) + 1, every)
    for count, at in enumerate(steps):
        scene.kill_and_resume(at, power_cut=count % 2 == 0)
    assert scene.resumed == len(steps) > 20


SLOW = [pytest.param(*case, marks=pytest.mark.slow) for case in (("dense", "two_parts"), ("factored", "one_gram"))]


@pytest.mark.parametrize(("kind", "name"), [("dense", "build"), *SLOW])
def test_the_run_that_sweeps_may_be_killed_too(kind, name, scene):
    scene = scene(kind, name)
    # One place of each kind of step, as late as it comes.
    last = {step: at for at, (step, _) in enumerate(scene.whole.steps, start=1)}
    for at in last.values():
        for again_at in range(1, 8):
            scene.kill_and_resume(at, power_cut=False, again_at=again_at)
    assert scene.killed > scene.resumed == 7 * len(last)


def test_all_kinds_of_steps_are_met(scene):
    met = Counter(step for name in JOBS for step, _ in scene("dense", name).whole.steps)
    flushing = {"fsync", "fsync folder", "fsync record", "fsync renamed"}
    assert set(met) == {"create", "clear", "write", "record", "rename", "remove"} | flushing


# --- what is kept beside stores and kernels ---------------------------------------------------------------------------


def normal_matrix(place, alpha=0.1, **options):
    return jacstore.ggn(place / "run.jac", "gaussian", alpha, out=place / "out", **options)


def samples(place, alpha=0.1, **options):
    draw = {"alpha": alpha, "n": 2, "key": 0, "method": "perturb", "out": place / "out.npy"}
    return jacstore.sample(place / "run.jac", place / "run.ntk", **draw, **options)


def factor(place, alpha=0.1):
    return jacstore.KernelFactor(jacstore.open(place / "run.ntk"), alpha).solve(np.arange(6.0).reshape(3, 2))


@pytest.fixture
def start():
    """A store of factors and its kernel, and a function that gives a copy of both."""
    with ram_folder() as folder:
        make("factored", folder / "start" / "run.jac", examples=EXAMPLES)
        gram(folder / "start" / "run.jac", folder / "start" / "run.ntk", tile=2)

        def fresh():
            shutil.rmtree(folder / "place", ignore_errors=True)
            return Path(shutil.copytree(folder / "start", folder / "place"))

        yield fresh


def steps_of(job, place):
    knife = Knife()
    return knife.run(lambda: job(place), place / "out"), knife.steps


@pytest.mark.parametrize("job", [normal_matrix, pytest.param(samples, marks=pytest.mark.slow), factor])
def test_a_kill_before_any_step_of_what_is_kept_beside_changes_no_result(job, start):
    truth, steps = steps_of(job, start())
    assert len(steps) > 10
    for at in range(1, len(steps) + 1):
        place = start()
        assert Knife(at).run(lambda place=place: job(place), place / "out") is None
        assert np.array_equal(job(place), truth), at
        # What the second run kept is what it gave.
        assert np.array_equal(job(place), truth), at


@pytest.mark.parametrize("job", [normal_matrix, samples])
def test_an_overwriting_that_is_killed_leaves_nothing_to_another_request(job, start):
    truth = job(start(), 0.3)
    _, steps = steps_of(job, start())
    # Nearly all of another request: a checkpoint or a finished pass is there, the result is not.
    last = max(at for at, (step, _) in enumerate(steps, start=1) if step == "write")
    place = start()
    assert Knife(last).run(lambda: job(place), place / "out") is None
    half = shutil.copytree(place, place.parent / "half")
    for at in range(1, 13):
        shutil.rmtree(place)
        shutil.copytree(half, place)
        Knife(at).run(lambda: job(place, 0.2, overwrite=True), place / "out")
        with contextlib.suppress(RequestMismatchError):
            assert np.array_equal(job(place, 0.3), truth), at


# --- by hand ----------------------------------------------------------------------------------------------------------


def main():
    columns = ("steps", "kills", "resumed", "verified")
    print(f"{'store':10} {'job':12}" + "".join(f"{name:>9}" for name in columns))
    total, Scene.verified_every = Counter(), 1
    with quick() as patch, ram_folder() as folder:
        patch.setattr(LIMITS, "checkpoint_share", 1e9)
        for kind, name in CASES:
            scene = Scene(kind, name, folder / f"{kind}-{name}")
            for at in range(1, len(scene.whole.steps) + 1):
                scene.kill_and_resume(at, power_cut=at % 2 == 0)
                scene.kill_and_resume(at, power_cut=at % 2 == 1, again_at=1 + at * 7 % 30)
            counts = dict(
                zip(columns, (len(scene.whole.steps), scene.killed, scene.resumed, scene.verified), strict=True)
            )
            total.update(counts)
            print(f"{kind:10} {name:12}" + "".join(f"{counts[key]:>9,}" for key in columns), flush=True)
    print(f"{'':10} {'all':12}" + "".join(f"{total[key]:>9,}" for key in columns) + ": nothing lost, nothing wrong")


if __name__ == "__main__":
    sys.exit(main())
