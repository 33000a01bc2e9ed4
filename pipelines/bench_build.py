"""How close `build` comes to its two bare limits: the device pass alone, and writing the same bytes alone.

    python pipelines/bench_build.py --examples 512

An MLP 784-1024-1024-512-10 with summed output (2.4M parameters). A build that overlaps well takes as long as the slower
of the two, or as the processor time of both together on all cores. Rounds alternate; medians are printed.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jacstore
from jacstore.base.budget import BUILD, Budget
from jacstore.base.devices import device_memory
from jacstore.base.events import Started
from jacstore.base.machine import cores, parse_size
from jacstore.problem.problem import prepare
from jacstore.rows.device_pass import DevicePass
from jacstore.rows.trace.cut import cut_before_products
from jacstore.storage.chunks import compress


def mlp_problem(examples: int, widths: list[int]) -> jacstore.Problem:
    """A dense network with normal weights on normal inputs, the gradient of its summed outputs."""
    keys = jax.random.split(jax.random.key(0), len(widths))
    params = {
        f"dense{n}": {"weight": jax.random.normal(key, (a, b)) / np.sqrt(a), "bias": jnp.zeros(b)}
        for n, (key, a, b) in enumerate(zip(keys, widths, widths[1:], strict=False))
    }

    def apply(params: Any, x: jax.Array) -> jax.Array:
        for n in range(len(widths) - 1):
            layer = params[f"dense{n}"]
            x = (jax.nn.relu(x) if n else x) @ layer["weight"] + layer["bias"]
        return x

    inputs = np.random.default_rng(0).standard_normal((examples, widths[0]), np.float32)
    return jacstore.Problem(apply=apply, params=params, inputs=inputs, outputs="sum")


def timed(work: Callable[[], Any]) -> tuple[float, float]:
    """Wall and processor seconds."""
    wall, busy = time.perf_counter(), time.process_time()
    work()
    return time.perf_counter() - wall, time.process_time() - busy


def device_alone(passes: DevicePass, n_examples: int) -> None:
    """All rows computed and waited for, none kept."""
    for start in range(0, n_examples, passes.batch_size):
        stop = min(start + passes.batch_size, n_examples)
        for first, values in passes.dispatch(passes.prepared.read(start, stop)):
            passes.fetch(first, values, stop - start)


def write_alone(folder: Path, store: jacstore.JacobianStore, piece: np.ndarray) -> None:
    """The same files, each encoded with the same codec, written and flushed, by as many threads as a build uses."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    layout = store.layouts["rows"]

    def one(job: tuple[int, int]) -> None:
        pieces = sum(1 for where in layout.pieces_of((job[0], 0, job[1])) if where[2].start < where[2].stop)
        descriptor = os.open(folder / f"{job[0]}-{job[1]}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        for _ in range(pieces):
            os.write(descriptor, compress(piece, layout.codec))
        os.fsync(descriptor)
        os.close(descriptor)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(one, np.ndindex(layout.files_along(0), layout.files_along(2))))


def measure(problem: jacstore.Problem, dtype: str, given: argparse.Namespace) -> dict[str, float]:
    """Medians of alternating rounds."""
    path, bare = given.out / f"bench-{dtype}.jac", given.out / "bare"
    rounds = []
    memory = parse_size(given.memory, "--memory")
    prepared = prepare(problem)
    for _ in range(given.rounds):
        begun: list[tuple[float, float]] = []

        def note_start(event: Any, begun: list[tuple[float, float]] = begun) -> None:
            if isinstance(event, Started):
                begun.append((time.perf_counter(), time.process_time()))

        shutil.rmtree(path, ignore_errors=True)
        os.sync()
        store = jacstore.build(
            problem, path, memory=given.memory, dtype=dtype, layout="dense", codec=given.codec, listener=note_start
        )
        wall = time.perf_counter() - begun[0][0] - store.report["seconds_compile"]
        passes = DevicePass(
            prepared,
            cut_before_products(prepared, "dense", float64=False),
            stored_dtype=dtype,
            budget=device_memory(None, Budget(memory).split(**BUILD)),
            unit_size=store.unit_size,
            batch_size=store.report["batch_size"],
        )
        sample = np.empty(store.layouts["rows"].piece, store.layouts["rows"].dtype)
        block = np.empty((sample.shape[0], 1, sample.shape[2]), sample.dtype)
        store.read_rows(0, sample.shape[0], 0, sample.shape[2], block)
        device = timed(lambda passes=passes: device_alone(passes, len(problem.inputs)))
        os.sync()
        write = timed(lambda store=store, block=block: write_alone(bare, store, block))
        rounds.append(
            {
                "build": wall,
                "device_alone": device[0],
                "write_alone": write[0],
                "cpu_per_core": (device[1] + write[1]) / cores(),
                "bytes": float(store.report["bytes_stored"]),
            }
        )
        rounds[-1]["limit"] = max(1.25 * max(device[0], write[0]), 1.15 * rounds[-1]["cpu_per_core"])
        rounds[-1]["build_to_limit"] = wall / rounds[-1]["limit"]
    shutil.rmtree(path)
    shutil.rmtree(bare)
    return {key: statistics.median(r[key] for r in rounds) for key in rounds[0]} | {"batch": passes.batch_size}


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    """Run and print the table; returns the figures."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--examples", type=int, default=512)
    parser.add_argument("--widths", type=int, nargs="+", default=[784, 1024, 1024, 512, 10])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--memory", default="8GB")
    parser.add_argument("--codec", default="none")
    parser.add_argument("--out", type=Path, default=Path("bench-run"))
    given = parser.parse_args(arguments)
    problem = mlp_problem(given.examples, given.widths)
    figures = {}
    print("dtype       GB   device s   write s   cpu/core s   build s   build / limit")
    for dtype in ("float32", "bfloat16"):
        f = figures[dtype] = measure(problem, dtype, given)
        print(
            f"{dtype:8} {f['bytes'] / 1e9:5.2f} {f['device_alone']:10.2f} {f['write_alone']:9.2f} "
            f"{f['cpu_per_core']:12.2f} {f['build']:9.2f} {f['build_to_limit']:15.2f}",
            flush=True,
        )
    print("limit: the larger of 1.25 x max(device, write) and 1.15 x processor seconds of both / cores")
    print(json.dumps(figures))
    return figures


if __name__ == "__main__":
    main(sys.argv[1:])
