"""How close `gram` comes to bare BLAS: the whole of it, and its arithmetic alone, against `a @ a.T` in the same run.

    python pipelines/bench_gram.py --rows 6000 --parameters 200000

All speeds count 2 N^2 P operations, although a symmetric product needs half of them. Rounds alternate; medians are
printed with the ratio to bare BLAS of the same round.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

import jacstore
from jacstore.base.modes import Mode
from jacstore.kernels.context import Work, make_engine


def random_store(path: Path, rows: int, parameters: int, memory: str) -> jacstore.JacobianStore:
    """A store of normal rows, one output; an existing one of the same shape is used again."""
    with jacstore.StoreWriter(path, {"weights": (parameters,)}, rows, 1, memory=memory) as writer:
        for start, stop in writer.missing:
            rng = np.random.default_rng(start)
            block = rng.standard_normal((stop - start, 1, parameters), np.float32)
            writer.write_unit(start, {"weights": block})
    return writer.store


def forget_cached(path: Path) -> None:
    """Ask the system to drop a folder's files from its cache, so that reading reads the disk."""
    for file in path.rglob("*"):
        if file.is_file():
            descriptor = os.open(file, os.O_RDONLY)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)


def bare_seconds(slab: np.ndarray, repeats: int) -> float:
    """Seconds of one `a @ a.T`, the mean of several in a row."""
    out = np.empty((len(slab), len(slab)), slab.dtype)
    started = time.perf_counter()
    for _ in range(repeats):
        np.matmul(slab, slab.T, out=out)
    return (time.perf_counter() - started) / repeats


def arithmetic_seconds(work: Work, slab: np.ndarray, repeats: int) -> float:
    """Seconds to add one slab in memory to all tiles, as an item does."""
    plan, engine = work.kernel.plan, make_engine("blas", "float32", "float32", None)
    group = plan.groups[0]
    tiles = plan.tiles_of(group)
    totals = [engine.zeros(plan.tile_shape(i, j)) for i, j in tiles]
    columns = slice(0, slab.shape[2])
    started = time.perf_counter()
    for _ in range(repeats):
        operand = engine.load(slab)
        for index, (i, j) in enumerate(tiles):
            rows, cols = (slice(*plan.rows.examples(plan.tile, t, t + 1)) for t in (i, j))
            totals[index] = engine.add(Mode.FULL, totals[index], operand, rows, operand, cols, columns)
    return (time.perf_counter() - started) / repeats


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    """Run and print the table; returns the figures."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rows", type=int, default=6000)
    parser.add_argument("--parameters", type=int, default=200_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--memory", default="8GB")
    parser.add_argument("--out", type=Path, default=Path("bench-run"))
    parser.add_argument("--cold", action="store_true", help="drop the store from the system's cache before each gram")
    given = parser.parse_args(arguments)
    store = random_store(given.out / "bench.jac", given.rows, given.parameters, given.memory)
    kernel_path = given.out / "bench.ntk"
    operations = 2 * given.rows**2 * given.parameters
    rounds = []
    for number in range(given.rounds):
        if given.cold:
            forget_cached(given.out / "bench.jac")
        kernel = jacstore.gram(store, out=kernel_path, memory=given.memory, overwrite=True)
        report = kernel.report
        width = min(kernel.plan.slab_columns, given.parameters)
        slab = np.random.default_rng(number).standard_normal((given.rows, 1, width), np.float32)
        repeats = min(50, max(2, round(5e12 / (2 * given.rows**2 * width))))
        bare = bare_seconds(slab[:, 0], repeats) / (2 * given.rows**2 * width)
        work = Work(rows=store, cols=None, kernel=kernel, threads=None, device_memory=None)
        alone = arithmetic_seconds(work, slab, repeats) / (2 * given.rows**2 * width)
        bare = (bare + bare_seconds(slab[:, 0], repeats) / (2 * given.rows**2 * width)) / 2
        rounds.append(
            {
                "bare": 1 / bare / 1e9,
                "arithmetic": 1 / alone / 1e9,
                "gram": operations / report["seconds_total"] / 1e9,
                "seconds_read": report["seconds_read"],
                "seconds_compute": report["seconds_compute"],
                "seconds_write": report["seconds_write"],
                "seconds_total": report["seconds_total"],
                "passes": report["passes"],
            }
        )
        print(
            f"round {number + 1}: " + ", ".join(f"{key} {value:.4g}" for key, value in rounds[-1].items()), flush=True
        )
    figures: dict[str, Any] = {key: statistics.median(r[key] for r in rounds) for key in rounds[0]}
    figures["arithmetic_to_bare"] = statistics.median(r["arithmetic"] / r["bare"] for r in rounds)
    figures["gram_to_bare"] = statistics.median(r["gram"] / r["bare"] for r in rounds)
    print(f"{given.rows} rows x {given.parameters} parameters, float32, plan: {kernel.plan.schedule}")
    print(f"bare a @ a.T          {figures['bare']:8.1f} GFLOP/s")
    print(f"arithmetic alone      {figures['arithmetic']:8.1f} GFLOP/s  {figures['arithmetic_to_bare']:.3f} of bare")
    print(f"whole gram            {figures['gram']:8.1f} GFLOP/s  {figures['gram_to_bare']:.3f} of bare")
    print(json.dumps(figures))
    shutil.rmtree(kernel_path)
    return figures


if __name__ == "__main__":
    main(sys.argv[1:])
