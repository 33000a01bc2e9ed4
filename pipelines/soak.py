"""Problems whose processes are killed and whose files are damaged, again and again: is what is called done right?

    python pipelines/soak.py --minutes 20 --seed 0

Each problem is first built and multiplied undisturbed. Then the same commands run in processes of their own that are
killed at random times and started again; files of the results are torn, changed, swapped or removed; what is read must
be what the undisturbed run holds, bit for bit, or be refused by name; and the same commands must mend it. The summary
counts all of it; a violation is printed, its folder kept, and the exit code is 1.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import multiprocessing
import random
import shutil
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["jacstore.rows.build", "jacstore.kernels.gram", "jacstore.testing"])
DAMAGES = ("flip", "tear", "remove", "swap", "zeros")
# A job that was killed this often is left alone, so that every problem ends.
KILLS_A_JOB = 6


@dataclass(frozen=True, kw_only=True)
class Case:
    """A problem, by the seed that it is drawn from, and the options of its build and of its gram."""

    seed: int
    net: str
    examples: int
    build: dict[str, Any]
    gram: dict[str, Any]
    parts: int


@dataclass
class Tally:
    """What has happened so far."""

    counts: Counter[str] = field(default_factory=Counter)
    violations: list[str] = field(default_factory=list)

    def check(self, holds: bool, what: str) -> None:
        """Keep and print a violation."""
        if not holds:
            self.violations.append(what)
            print(f"VIOLATION: {what}", flush=True)


def draw_case(seed: int) -> Case:
    """A small problem with settings that cut it into many pieces."""
    draw = random.Random(seed)
    examples = draw.randrange(3, 60)
    mode = draw.choice(["full", "full", "trace", "diagonal", "blocks"])
    return Case(
        seed=seed,
        net=draw.choice(["mlp", "cnn", "tied"]),
        examples=examples,
        build={
            "dtype": draw.choice(["float32", "float32", "float64", "bfloat16", "float16"]),
            "layout": draw.choice(["auto", "dense", "factored"]),
            "codec": draw.choice(["none", "lz4", "zstd"]),
            "unit_size": draw.randrange(1, max(2, examples // 2)),
            "batch_size": draw.randrange(1, 8),
        },
        gram={
            "mode": mode,
            "tile": draw.randrange(max(1, examples // 6), examples + 1),
            "by_leaf": draw.random() < 0.2,
            "triangle": draw.random() < 0.3 and mode != "blocks",
        },
        parts=draw.choice([1, 1, 2, 3]),
    )


def problem_of(case: Case) -> Any:
    """The problem of a case; the same in every process."""
    import jax.numpy as jnp
    import numpy as np

    from jacstore.testing import cnn, mlp

    draw = random.Random(case.seed + 1)
    outputs = draw.choice(["all", "sum"])
    if case.net == "cnn":
        return cnn(case.examples, seed=case.seed, outputs=outputs)
    sizes = tuple(draw.randrange(2, 40) for _ in range(draw.randrange(2, 5)))
    if case.net == "mlp":
        return mlp(case.examples, sizes=sizes, seed=case.seed, outputs=outputs)
    tied = {"w": np.random.default_rng(case.seed).normal(size=(sizes[0], sizes[0])).astype(np.float32)}
    inputs = mlp(case.examples, sizes=(sizes[0], 1), seed=case.seed).inputs
    return mlp(1, params=tied, inputs=inputs, outputs=outputs, apply=lambda p, x: jnp.tanh(x @ p["w"]) @ p["w"].T)


# ----------------------------------------------------------------------------------------------- work in own processes


def work(what: str, case: Case, place: str, answer: str) -> None:
    """One command in a process of its own; leaves what it found as JSON."""
    import jacstore
    from jacstore.errors import JacstoreError
    from jacstore.kernels import gram as assembly
    from jacstore.rows import build as builder

    store, kernel = f"{place}/run.jac", f"{place}/run.ntk"
    try:
        if what == "build":
            found: Any = builder.build(problem_of(case), store, **case.build).report
        elif what == "gram":
            for number in range(1, case.parts + 1):
                done = assembly.gram(store, out=kernel, part=(number, case.parts), **case.gram)
            found = done.report
        elif what.startswith("verify"):
            target = problem_of(case) if what == "verify store" else None
            found = jacstore.verify(store if target else kernel, target, samples=8).to_dict()
        else:
            path = store if what == "read store" else kernel
            opened = jacstore.open(path)
            found = {"complete": opened.complete, "digest": digest(opened) if opened.complete else None}
    except JacstoreError as error:
        found = {"error": type(error).__name__, "code": error.exit_code, "text": str(error)}
    Path(answer).write_text(json.dumps(found))


def digest(opened: Any) -> str:
    """A hash of everything that a store or kernel holds, read with every check."""
    import jacstore

    found = hashlib.sha256()
    if isinstance(opened, jacstore.Kernel):
        arrays = opened.leaf_arrays or {"": opened.array}
        for name in sorted(arrays):
            found.update(arrays[name].compute(scheduler="synchronous").tobytes())
    else:
        rows = opened.array.compute(scheduler="synchronous")
        for values in (rows, opened.outputs, opened.norms):
            found.update(values.tobytes())
    return found.hexdigest()


def run(what: str, case: Case, place: Path, *, kill_after: float | None = None) -> tuple[dict[str, Any] | None, float]:
    """What a process answered, None if it was killed before, and its seconds."""
    answer = place / "answer.json"
    answer.unlink(missing_ok=True)
    started = time.perf_counter()
    child = CONTEXT.Process(target=work, args=(what, case, str(place), str(answer)))
    child.start()
    child.join(kill_after)
    if child.is_alive():
        child.kill()
    child.join()
    seconds = time.perf_counter() - started
    if kill_after is None and not answer.exists():
        return {"error": "crash", "code": child.exitcode, "text": f"{what} ended with {child.exitcode}"}, seconds
    return (json.loads(answer.read_text()) if child.exitcode == 0 else None), seconds


# ------------------------------------------------------------------------------------------------------- what is done


def disturb(what: str, case: Case, place: Path, truth: dict[str, Any], draw: random.Random, tally: Tally) -> None:
    """Run a command, killed at random times, until it ends by itself; then everything it made is right."""
    reading = "read store" if what == "build" else "read kernel"
    found, kills = None, 0
    while found is None:
        after = draw.random() * 1.3 * truth["seconds"][what] if kills < KILLS_A_JOB else None
        kept = finished(what, case, place)
        found, _ = run(what, case, place, kill_after=after)
        tally.counts["processes"] += 1
        if found is None:
            kills += 1
            tally.counts["kills"] += 1
            if draw.random() < 0.3 and (place / ("run.jac" if what == "build" else "run.ntk") / "zarr.json").exists():
                said, _ = run(reading, case, place)
                right = said == truth[reading] or said == {"complete": False, "digest": None}
                tally.check(right, f"case {case.seed}: after a kill of {what}, {reading} says {said}")
    tally.check("error" not in found, f"case {case.seed}: {what} says {found}")
    reused = found.get("units_reused" if what == "build" else "tiles_reused", 0)
    tally.check(reused >= kept, f"case {case.seed}: {what} used {reused} of {kept} finished pieces again")
    tally.counts["finished pieces kept"] += kept
    said, _ = run(reading, case, place)
    tally.check(said == truth[reading], f"case {case.seed}: {what} ended after {kills} kills, {reading} says {said}")
    verify(reading.replace("read", "verify"), case, place, tally)


def finished(what: str, case: Case, place: Path) -> int:
    """Units, or tiles of a gram in one part, that have a record."""
    if what == "build":
        return len(list((place / "run.jac" / "ledger").glob("unit-*.json")))
    records = (place / "run.ntk" / "ledger").glob("tiles-*.json")
    return sum(json.loads(path.read_text())["tiles"] for path in records) if case.parts == 1 else 0


def verify(what: str, case: Case, place: Path, tally: Tally) -> None:
    """What nothing was done to is verified."""
    said, _ = run(what, case, place)
    tally.check(said is not None and said.get("ok", False), f"case {case.seed}: {what} says {said}")
    tally.counts["verified"] += 1


def damage(path: Path, draw: random.Random) -> str:
    """Hurt one file of a store or kernel; returns how."""
    files = sorted(p for p in path.rglob("*") if p.is_file() and p.name != "zarr.json" and p.stat().st_size)
    first, second, how = draw.choice(files), draw.choice(files), draw.choice(DAMAGES)
    data = first.read_bytes()
    if how == "flip":
        place = draw.randrange(len(data))
        first.write_bytes(data[:place] + bytes([data[place] ^ 1 << draw.randrange(8)]) + data[place + 1 :])
    elif how == "tear":
        first.write_bytes(data[: draw.randrange(len(data))])
    elif how == "swap":
        first.write_bytes(second.read_bytes())
        second.write_bytes(data)
    elif how == "zeros":
        first.write_bytes(bytes(len(data)))
    else:
        first.unlink()
    return how


def hurt_and_mend(case: Case, place: Path, truth: dict[str, Any], draw: random.Random, tally: Tally) -> None:
    """Damage store and kernel: each read is right or refused by name, and the same commands mend both."""
    for name, reading in (("run.jac", "read store"), ("run.ntk", "read kernel")):
        for _ in range(draw.randrange(1, 4)):
            tally.counts[f"faults: {damage(place / name, draw)}"] += 1
            tally.counts["faults"] += 1
        mended = False
        for _ in range(6):
            said, _ = run(reading, case, place)
            right = said == truth[reading]
            named = said is not None and (said.get("code") == 3 or said == {"complete": False, "digest": None})
            tally.check(right or named, f"case {case.seed}: damaged, {reading} says {said}")
            # A reader stops at the first place, and does not need every byte; verify leaves a note of every one.
            checked, _ = run(reading.replace("read", "verify"), case, place)
            fine = checked is not None and checked.get("ok", False)
            tally.check(right or not fine, f"case {case.seed}: damaged, and verify says {checked}")
            tally.counts["verified"] += 1
            mended = right and fine
            if mended:
                break
            tally.counts["named by verify alone" if right else "named"] += 1
            run("build" if name == "run.jac" else "gram", case, place)
        tally.counts["mended or harmless"] += mended
        tally.check(mended, f"case {case.seed}: {name} is not mended by six rounds: {said}")


def soak(case: Case, place: Path, tally: Tally) -> None:
    """One problem: undisturbed, then killed and resumed, then damaged and mended."""
    draw = random.Random(case.seed + 2)
    truth: dict[str, Any] = {"seconds": {}}
    calm = place / "calm"
    calm.mkdir(parents=True)
    for what in ("build", "gram", "read store", "read kernel"):
        truth[what], truth["seconds"][what] = run(what, case, calm)
        if "error" in truth[what]:
            # Some settings are refused, such as a value beyond float16: they are refused again, and that is all.
            tally.counts["refused"] += 1
            again, _ = run(what, case, calm)
            tally.check(
                truth[what]["code"] == 2 and again == truth[what], f"case {case.seed}: {what} says {truth[what]}"
            )
            return
    rough = place / "rough"
    rough.mkdir()
    for what in ("build", "gram"):
        disturb(what, case, rough, truth, draw, tally)
    hurt_and_mend(case, rough, truth, draw, tally)


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    """Soak for some minutes, print the summary and return it."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--minutes", type=float, default=20.0)
    parser.add_argument("--seed", type=int, default=0, help="the first problem; each further one has the next number")
    parser.add_argument("--out", type=Path, help="where folders are made and, after a violation, kept")
    given = parser.parse_args(arguments)
    tally, seed = Tally(), given.seed
    until = time.monotonic() + 60 * given.minutes
    top = Path(tempfile.mkdtemp(prefix="jacstore-soak-", dir=given.out))
    while time.monotonic() < until:
        place, before = top / f"case-{seed}", len(tally.violations)
        soak(draw_case(seed), place, tally)
        tally.counts["problems"] += 1
        if len(tally.violations) == before:
            shutil.rmtree(place)
        seed += 1
        if tally.counts["problems"] % 10 == 0:
            print(f"{tally.counts['problems']} problems, {tally.counts['kills']} kills", file=sys.stderr, flush=True)
    for what, count in sorted(tally.counts.items()):
        print(f"{count:>8,}  {what}")
    print(f"{len(tally.violations):>8,}  violations")
    if not tally.violations:
        shutil.rmtree(top)
    return {**tally.counts, "violations": len(tally.violations)}


if __name__ == "__main__":
    sys.exit(1 if main()["violations"] else 0)
