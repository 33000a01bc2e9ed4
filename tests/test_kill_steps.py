"""Killed before every single step of the write protocol, the same command continues, and what it calls done is right.

The process is this one: from the chosen step on nothing is done any more, and its locks stay behind. Every other kill
is a power cut, which takes along what was not flushed. `python tests/test_kill_steps.py` does both at every step, kills
the next run as well, and prints how many steps and runs that were. `test_kill.py` kills real processes.
"""

from __future__ import annotations

import shutil
import sys
from collections import Counter
from pathlib import Path

import pytest
from helpers_faults import Knife, bits, is_right, make, quick, ram_folder

import jacstore
import jacstore.checkpoints
from jacstore import gram
from jacstore.progress import BatchDone, SlabDone
from jacstore.testing import Counting

EXAMPLES = "0:3"
UNITS_ALIVE = 2


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
        patch.setattr(jacstore.checkpoints, "CHECKPOINT_SHARE", 1e9)
        yield


class Scene:
    """A job, its steps and its result when nobody kills it, and places to run it anew."""

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
        self.killed = self.resumed = 0

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
        # Verifying takes longer than all the rest: every fourth is.
        assert done.complete and is_right(place / "out", self.truth, verified=self.resumed % 4 == 0)
        self.check_what_is_kept(done, seen, kept, 2 if again_at else 1)

    def check_what_is_said(self, place):
        """Nothing that is called complete is wrong; returns the units that are done."""
        if not (place / "out" / "zarr.json").exists():
            return 0
        opened = jacstore.open(place / "out")
        info = opened.info()
        if (info["complete"] and info["dtype"] != "float64") or (self.job is not overwrite and info["complete"]):
            assert is_right(place / "out", self.truth)
        return info.get("units_done", 0) if self.job is build else 0

    def check_what_is_kept(self, done, seen, kept, kills):
        """Of what was computed before a kill no more is repeated than what was on its way."""
        if self.job is build:
            assert done.report["units_reused"] >= kept
            repeated = sum(event.examples for event in seen.of(BatchDone)) - done.n_examples
            assert repeated <= kills * UNITS_ALIVE * done.unit_size
        elif self.job in (one_gram, two_parts):
            assert len(seen.of(SlabDone)) <= len(self.seen.of(SlabDone)) + kills


@pytest.fixture
def scene(request):
    with ram_folder() as folder:
        yield lambda kind, name: Scene(kind, name, folder)


@pytest.mark.parametrize(("kind", "name"), CASES)
def test_a_kill_before_any_step_loses_and_falsifies_nothing(kind, name, scene):
    scene = scene(kind, name)
    for at in range(1, len(scene.whole.steps) + 1):
        scene.kill_and_resume(at, power_cut=at % 2 == 0)
    assert scene.resumed == len(scene.whole.steps) > 20


@pytest.mark.parametrize(("kind", "name"), [("dense", "build"), ("dense", "two_parts"), ("factored", "one_gram")])
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


# --- by hand ----------------------------------------------------------------------------------------------------------


def main():
    print(f"{'store':10} {'job':12} {'steps':>6} {'kills':>7} {'resumed':>8}")
    total = Counter()
    with quick() as patch, ram_folder() as folder:
        patch.setattr(jacstore.checkpoints, "CHECKPOINT_SHARE", 1e9)
        for kind, name in CASES:
            scene = Scene(kind, name, folder / f"{kind}-{name}")
            for at in range(1, len(scene.whole.steps) + 1):
                for power_cut in (False, True):
                    scene.kill_and_resume(at, power_cut=power_cut)
                    scene.kill_and_resume(at, power_cut=power_cut, again_at=1 + at * 7 % 30)
            counts = {"steps": len(scene.whole.steps), "kills": scene.killed, "resumed": scene.resumed}
            total.update(counts)
            print(f"{kind:10} {name:12} {counts['steps']:>6} {counts['kills']:>7} {counts['resumed']:>8}", flush=True)
    print(
        f"{'':10} {'all':12} {total['steps']:>6} {total['kills']:>7} {total['resumed']:>8}: nothing lost, nothing wrong"
    )


if __name__ == "__main__":
    sys.exit(main())
