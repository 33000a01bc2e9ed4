"""Killed at any step, the same command continues: nothing finished is repeated, nothing is lost, bit for bit.

By hand, `python tests/test_kill.py --kills 20 --seed 0` kills a build and a gram of some seconds at random times.
"""

from __future__ import annotations

import argparse
import random
import tempfile
import time
from pathlib import Path

import pytest

import jacstore
from helpers_kill import LARGE_UNIT, Job, Outcome, run_job
from helpers_process import contents

UNIT_EXAMPLES, UNITS, SLABS = 2, 5, 5
WITHOUT_LOCKS = " without locks"
ARRAYS = {"build": ("rows", "factors", "outputs", "norms"), "gram": ("kernel",), "parts": ("kernel",)}


class Scene:
    """A job, how it ends when nobody kills it, and a place to run it anew."""

    def __init__(self, kind: str, folder: Path) -> None:
        self.kind, self.folder = kind.removesuffix(WITHOUT_LOCKS), folder
        self.locks = kind == self.kind
        self.store = folder / "store.jac"
        if self.kind != "build":
            assert run_job(Job(kind="build", out=str(self.store)), folder).exitcode == 0
        started = time.perf_counter()
        self.whole = run_job(self.job("whole"), folder)
        self.seconds = time.perf_counter() - started
        assert self.whole.exitcode == 0
        self.truth = self.arrays("whole")

    def job(self, name: str) -> Job:
        """The same work in another place."""
        options = () if self.kind == "build" else (("tile", 4),)
        out, store = str(self.folder / name), str(self.store)
        return Job(kind=self.kind, out=out, store=store, options=options, locks=self.locks)

    def arrays(self, name: str) -> dict[str, bytes]:
        return contents(self.folder / name, *ARRAYS[self.kind])


def check_continued(scene: Scene, name: str, killed: Outcome) -> None:
    """Run the same job again and compare all that a reader can see with the run that nobody killed."""
    job = scene.job(name)
    kept = list((Path(job.out) / "ledger").glob("unit-*.json"))
    again = run_job(job, scene.folder)
    assert again.exitcode == 0
    assert scene.arrays(name) == scene.truth
    assert jacstore.open(job.out).complete and again.report["complete"]
    if scene.kind == "build":
        assert again.report["units_reused"] == len(kept)
        assert again.report["units_computed"] == UNITS - len(kept)
        repeated = killed.examples + again.examples - UNITS * UNIT_EXAMPLES
        # One complete unit, which was being stored, and what was begun of the next.
        assert repeated < 2 * UNIT_EXAMPLES and killed.examples // UNIT_EXAMPLES - len(kept) <= 1
    else:
        # The last slab before the kill may not have reached a checkpoint; every other one is multiplied once.
        assert len(killed.slabs) + len(again.slabs) <= SLABS + 1
        if scene.kind == "gram":
            assert again.slabs == list(range(SLABS - len(again.slabs), SLABS))


@pytest.fixture(scope="module")
def scenes(tmp_path_factory):
    made: dict[str, Scene] = {}

    def scene(kind: str) -> Scene:
        if kind not in made:
            made[kind] = Scene(kind, tmp_path_factory.mktemp(kind.replace(" ", "-")))
        return made[kind]

    return scene


@pytest.mark.parametrize("kind", ["build", "gram", "parts", "gram without locks", "parts without locks"])
@pytest.mark.parametrize("share", [0.1, 0.5, 0.9])
def test_a_kill_at_a_step_repeats_one_piece_of_work_at_most(kind, share, scenes):
    scene = scenes(kind)
    step = round(share * len(scene.whole.steps))
    killed = run_job(scene.job(f"step-{step}"), scene.folder, at_step=step)
    assert killed.killed and len(killed.steps) == step - 1
    check_continued(scene, f"step-{step}", killed)


@pytest.mark.parametrize("kind", ["build without locks", "gram without locks"])
def test_a_kill_while_others_would_wait_for_the_killed_one_is_taken_over(kind, scenes):
    scene = scenes(kind)
    killed = run_job(scene.job("held"), scene.folder, when="create zarr.json")
    assert killed.killed and len(list((scene.folder / "held").rglob("*.held"))) == 1
    check_continued(scene, "held", killed)
    assert not list((scene.folder / "held").rglob("*.held"))


@pytest.mark.parametrize("kind", ["build", "gram"])
@pytest.mark.parametrize("draw", [1, 2, 3])
def test_a_kill_at_any_time_repeats_one_piece_of_work_at_most(kind, draw, scenes):
    scene = scenes(kind)
    # Whenever it comes, before the first step or after the last, the claim is the same.
    after = random.random() * scene.seconds
    killed = run_job(scene.job(f"time-{draw}"), scene.folder, after=after)
    assert killed.killed or killed.exitcode == 0
    check_continued(scene, f"time-{draw}", killed)


@pytest.mark.parametrize("kind", ["gram", "parts"])
def test_every_start_may_be_killed_as_long_as_each_gets_somewhere(kind, scenes):
    scene, name, runs = scenes(kind), "again-and-again", 0
    while not (outcome := run_job(scene.job(name), scene.folder, at_step=len(scene.whole.steps) // 2)).report:
        assert outcome.killed
        runs += 1
        assert runs < 10
    assert runs >= 1 and scene.arrays(name) == scene.truth


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("kind", ["build", "gram", "parts"])
def test_a_kill_at_every_step_repeats_one_piece_of_work_at_most(kind, scenes):
    scene = scenes(kind)
    for step in range(1, len(scene.whole.steps) + 1):
        killed = run_job(scene.job(f"every-{step}"), scene.folder, at_step=step)
        assert killed.killed
        check_continued(scene, f"every-{step}", killed)


def leftovers(out: Path) -> list[str]:
    """Files that no reader needs: locks, temporary records, checkpoints and partial sums of what is finished."""
    kept = (".guard", ".creating")
    return [
        name
        for name in contents(out)
        if name.startswith(("partials/", "checkpoints/"))
        or name.startswith(("ledger/lock-", "ledger/checkpoint-"))
        or (Path(name).name.startswith(".") and Path(name).name not in kept)
    ]


@pytest.mark.parametrize("kind", ["build", "gram", "parts"])
def test_a_run_that_nobody_kills_leaves_nothing_behind(kind, scenes):
    assert leftovers(scenes(kind).folder / "whole") == []


@pytest.mark.parametrize(
    ("kind", "when"),
    [
        ("build", "rename ledger/unit-0000001.json"),
        ("gram", "write checkpoints/item-0000000-1.bin"),
        pytest.param("gram", "rename ledger/checkpoint-0-0000000.json"),
        pytest.param("gram", "rename ledger/tiles-0000000.json"),
        pytest.param("gram", "rename ledger/item-0000000.json"),
        pytest.param("gram", "remove checkpoints/item-0000000-1.bin"),
        pytest.param("parts", "rename ledger/item-0000000.json"),
        pytest.param("parts", "rename ledger/tiles-0000000.json"),
        pytest.param("parts", "remove partials/item-0000000.bin"),
    ],
)
def test_what_a_killed_run_leaves_behind_is_swept_by_the_next(kind, when, scenes):
    scene, name = scenes(kind), when.replace("/", " ")
    assert run_job(scene.job(name), scene.folder, when=when).killed
    assert run_job(scene.job(name), scene.folder).exitcode == 0
    assert leftovers(scene.folder / name) == []


# --- by hand ----------------------------------------------------------------------------------------------------------


def kill_often(kind: str, kills: int, draw: random.Random, folder: Path) -> None:
    """Kill a large job at random times until there were enough kills, starting anew whenever it gets to its end."""
    job = Job(kind=kind, out=str(folder / f"{kind}-whole"), store=str(folder / "build-whole"), large=True)
    started = time.perf_counter()
    whole = run_job(job, folder)
    seconds = time.perf_counter() - started
    truth = contents(Path(job.out), *ARRAYS[kind])
    unit, all_work = ("examples", whole.examples) if kind == "build" else ("slabs", len(whole.slabs))
    size = sum(map(len, truth.values())) / 1e6
    print(f"\n{kind}: {seconds:.1f} s, {all_work} {unit}, {len(whole.steps)} steps, {size:.0f} MB")
    print(f"{'kill':>5} {'after s':>8} {'steps':>7} {unit:>9} {'finished':>9} {'complete and lost':>18}")
    done = attempt = work = before = 0
    while done < kills:
        out = folder / f"{kind}-{attempt}"
        again = Job(kind=kind, out=str(out), store=job.store, large=True)
        after = draw.random() * seconds
        outcome = run_job(again, folder, after=after)
        count = outcome.examples if kind == "build" else len(outcome.slabs)
        work += count
        if outcome.killed:
            done += 1
            records = len(list((out / "ledger").glob("unit-*.json" if kind == "build" else "checkpoint-*.json")))
            lost = count // LARGE_UNIT + before - records if kind == "build" else 0
            print(f"{done:>5} {after:>8.2f} {len(outcome.steps):>7} {count:>9} {records:>9} {lost:>18}")
            assert lost <= 1
            before = records
        if not outcome.killed or done == kills:
            if outcome.killed:
                outcome = run_job(again, folder)
                work += outcome.examples if kind == "build" else len(outcome.slabs)
            same = contents(out, *ARRAYS[kind]) == truth
            print(f"      finished: equal to the bit: {same}; {unit} computed: {work} of {all_work}")
            assert outcome.exitcode == 0 and same
            attempt, work, before = attempt + 1, 0, 0


def main() -> None:
    parser = argparse.ArgumentParser(description=kill_often.__doc__)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="jacstore-kill-") as folder:
        for kind in ("build", "gram"):
            kill_often(kind, given.kills, random.Random(given.seed), Path(folder))


if __name__ == "__main__":
    main()
