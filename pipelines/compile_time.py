"""How the seconds of a small build grow with a network's depth, beside tracing and compiling its Jacobian in plain JAX.

    python pipelines/compile_time.py --depths 10 50 100 200 --csv compile_time.csv

Residual blocks `x + tanh(x V + b) W` of one width, few examples, several outputs. A build does everything that it does:
it traces and examines the function, finds the terms, compiles and runs the device pass, checks the rows, and keeps the
store in RAM. Beside it stands what `jax.jit(jax.vmap(jax.jacrev(apply)))` takes to be traced and compiled, without
running it. Both run in processes of their own, alternating, after a network of one block has brought what JAX compiles
once; medians of the rounds are printed, of seconds by the clock and of all cores together.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jacstore
from common import table, write_csv


@dataclass(frozen=True, kw_only=True)
class Line:
    """Median seconds of both ways at one depth, and how many times longer a build takes."""

    blocks: int
    seconds_build: float
    seconds_jacrev: float
    ratio: float
    cpu_seconds_build: float
    cpu_seconds_jacrev: float
    cpu_ratio: float


def residual(depth: int, width: int, examples: int, outputs: int) -> jacstore.Problem:
    """A problem of so many blocks."""
    draw = np.random.default_rng(0)

    def block() -> dict[str, np.ndarray]:
        made = {name: draw.standard_normal((width, width)).astype(np.float32) / width for name in ("v", "w")}
        return {**made, "b": np.zeros(width, np.float32)}

    def network(params: Any, x: jax.Array) -> jax.Array:
        for layer in params:
            x = x + jnp.tanh(x @ layer["v"] + layer["b"]) @ layer["w"]
        return x[:outputs]

    inputs = draw.standard_normal((examples, width)).astype(np.float32)
    return jacstore.Problem(apply=network, params=[block() for _ in range(depth)], inputs=inputs)


def built(problem: jacstore.Problem) -> None:
    """A whole build in RAM."""
    jacstore.build(problem, None)


def compiled(problem: jacstore.Problem) -> None:
    """Plain JAX's program of the same rows, not run."""
    rows = jax.vmap(jax.jacrev(problem.apply), (None, 0))
    jax.jit(rows).lower(problem.params, problem.inputs).compile()


WAYS = {"build": built, "jacrev": compiled}


def measure(way: str, depth: int, given: argparse.Namespace) -> dict[str, float]:
    """Seconds of one way in this process, by the clock and of all cores."""
    sizes = given.width, given.examples, given.outputs
    WAYS[way](residual(1, *sizes))
    problem = residual(depth, *sizes)
    clock, cores = time.perf_counter(), time.process_time()
    WAYS[way](problem)
    return {"seconds": time.perf_counter() - clock, "cpu_seconds": time.process_time() - cores}


def in_a_process(way: str, depth: int, given: argparse.Namespace) -> dict[str, float]:
    """The same in a process of its own."""
    sizes = (f"--{name}={getattr(given, name)}" for name in ("width", "examples", "outputs"))
    command = [sys.executable, __file__, "--one", way, "--depths", str(depth), *sizes]
    found: dict[str, float] = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout)
    return found


def main(arguments: list[str] | None = None) -> list[Line]:
    """Run and print; returns a line for each depth."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--depths", type=int, nargs="+", default=[10, 50, 100, 200])
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--examples", type=int, default=64)
    parser.add_argument("--outputs", type=int, default=10)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--csv", type=Path)
    parser.add_argument("--one", choices=tuple(WAYS), help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    if given.one:
        print(json.dumps(measure(given.one, given.depths[0], given)))
        return []
    lines: list[Line] = []
    for depth in given.depths:
        found: dict[str, list[dict[str, float]]] = {way: [] for way in WAYS}
        for _ in range(given.rounds):
            for way in WAYS:
                found[way].append(in_a_process(way, depth, given))
        clock, cores = (
            [statistics.median(one[unit] for one in found[way]) for way in WAYS] for unit in ("seconds", "cpu_seconds")
        )
        lines.append(
            Line(
                blocks=depth,
                seconds_build=clock[0],
                seconds_jacrev=clock[1],
                ratio=clock[0] / clock[1],
                cpu_seconds_build=cores[0],
                cpu_seconds_jacrev=cores[1],
                cpu_ratio=cores[0] / cores[1],
            )
        )
    cells = [tuple(asdict(lines[0])), *(tuple(f"{n:.3g}" for n in asdict(line).values()) for line in lines)]
    table("A build beside the compilation of jacrev", cells)
    if given.csv:
        write_csv(given.csv, lines)
    return lines


if __name__ == "__main__":
    main()
