"""Products of a convolution's rows from its factors, without the rows and with them, in the same run.

    python pipelines/bench_contraction.py --examples 1024

A 3 x 3 convolution of 256 to 512 channels at 4 x 4 positions: a row has 1,179,648 numbers, its factors 12,288. Rounds
alternate between products of all pairs of positions (implicit) and rows formed slab by slab (expanded); bare
`a @ a.T`, counted over a whole row, is what expanding could reach at best. Medians are printed.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jacstore
from jacstore.testing import contraction

WAYS = ("implicit", "expanded")


def problem(examples: int, side: int, channels: tuple[int, int]) -> jacstore.Problem:
    """One convolution with a nonlinear read-out, so that cotangents differ between positions."""
    rng = np.random.default_rng(0)
    a, b = channels
    weight = rng.standard_normal((3, 3, a, b), np.float32) / np.float32((9 * a) ** 0.5)

    def apply(params: Any, x: jax.Array) -> jax.Array:
        y = jax.lax.conv_general_dilated(x[None], params, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
        return jnp.tanh(y).sum()

    x = rng.standard_normal((examples, side, side, a), np.float32)
    return jacstore.Problem(apply=apply, params=weight, inputs=x)


def bare_seconds(examples: int, columns: int, width: int = 4096) -> float:
    """Seconds of `a @ a.T` over all columns, from one slab of them."""
    slab = np.random.default_rng(0).standard_normal((examples, min(width, columns)), np.float32)
    out = np.empty((examples, examples), np.float32)
    np.matmul(slab, slab.T, out=out)
    started = time.perf_counter()
    for _ in range(3):
        np.matmul(slab, slab.T, out=out)
    return (time.perf_counter() - started) / 3 * columns / slab.shape[1]


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    """Run and print; returns the figures."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--examples", type=int, default=1024)
    parser.add_argument("--side", type=int, default=4, help="positions along each axis of the image")
    parser.add_argument("--channels", type=int, nargs=2, default=(256, 512), metavar=("IN", "OUT"))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--memory", default="6GB")
    given = parser.parse_args(arguments)
    store = jacstore.build(problem(given.examples, given.side, given.channels), None, memory=given.memory)
    seconds: dict[str, list[float]] = {"bare": [], **{way: [] for way in WAYS}}
    kernels = {}
    for _ in range(given.rounds):
        seconds["bare"].append(bare_seconds(given.examples, store.n_parameters))
        for way in WAYS:
            with contraction(way):
                kernel = jacstore.gram(store, memory=given.memory)
            if any(bool(step.expanded) != (way == "expanded") for step in kernel.plan.steps):
                raise SystemExit(f"the plan did not take the way that was asked for: {way}")
            seconds[way].append(kernel.report["seconds_compute"])
            kernels[way] = kernel.array.compute(scheduler="synchronous")
    medians = {f"seconds_{name}": statistics.median(values) for name, values in seconds.items()}
    scale = np.sqrt(np.diagonal(kernels["expanded"]))
    figures = {
        "examples": given.examples,
        "parameters": store.n_parameters,
        **medians,
        "implicit_faster_than_expanded": medians["seconds_expanded"] / medians["seconds_implicit"],
        "implicit_faster_than_bare": medians["seconds_bare"] / medians["seconds_implicit"],
        "microseconds_a_pair": medians["seconds_implicit"] * 2e6 / given.examples**2,
        "largest_difference": float(np.max(np.abs(kernels["implicit"] - kernels["expanded"]) / np.outer(scale, scale))),
    }
    for name, value in figures.items():
        print(f"{name:30} {value:.4g}" if isinstance(value, float) else f"{name:30} {value}")
    print(json.dumps(figures))
    return figures


if __name__ == "__main__":
    main(sys.argv[1:])
