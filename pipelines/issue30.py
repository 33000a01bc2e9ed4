"""A network of convolutions on large images: which leaves are rows, which are factors, and what 30,000 images take.

    python pipelines/issue30.py --examples 32

3 x 3 convolutions 32-64-128-256-256 with 2 x 2 max-pool after the first four and 4 x 4 after the fifth, dense
16384-96-1, on generated images of 3 x 512 x 512 (2.55M parameters, one output). A convolution's factors take as many
numbers as its images and cotangents have, so that under the rule of two all of these are stored as rows; the dense
layers are factored. Kernel entries are compared with rows of plain `jax.vjp` in float64.
"""

from __future__ import annotations

import argparse
import itertools
import json
import shutil
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jacstore
from common import conv, conv_init, dense, dense_init, leave, leaves_table, table
from jacstore.base.machine import format_size, parse_size
from jacstore.base.modes import Mode
from jacstore.kernels.plan.plan import GramPlan
from jacstore.kernels.plan.schedule import plan_gram
from jacstore.kernels.plan.steps import plan_steps
from jacstore.store.layout import Side, plan_store

CHANNELS = (3, 32, 64, 128, 256, 256)
POOLS = (2, 2, 2, 2, 4)
HIDDEN = 96
SIZE = 512
WHOLE = 30_000  # the examples of the run that is extrapolated
BLOCK = 100  # examples along each side of a block where rows are not stored but recomputed
TILE, SLAB = 2048, 4096  # rows and columns of the bare product; a long run's tiles and slabs have this size
FLIP = 1e-6


def network(params: Any, image: jax.Array) -> jax.Array:
    """One output `(1,)` of one image `(size, size, 3)`."""
    x = image
    for n, width in enumerate(POOLS):
        x = jax.nn.relu(conv(params[f"conv{n}"], x))
        x = jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, (width, width, 1), (width, width, 1), "VALID")
    return dense(params["dense1"], jax.nn.relu(dense(params["dense0"], x.reshape(-1))))


def problem(examples: int, size: int = SIZE) -> jacstore.Problem:
    """The network with normal weights at normal images `(size, size, 3)`; sizes are multiples of 64."""
    rng = np.random.default_rng(0)
    params = {f"conv{n}": conv_init(rng, a, b) for n, (a, b) in enumerate(itertools.pairwise(CHANNELS))}
    flat = (size // np.prod(POOLS)) ** 2 * CHANNELS[-1]
    params["dense0"], params["dense1"] = dense_init(rng, flat, HIDDEN), dense_init(rng, HIDDEN, 1)
    images = rng.standard_normal((examples, size, size, 3), np.float32)
    return jacstore.Problem(apply=network, params=params, inputs=images)


def errors(task: jacstore.Problem, kernel: np.ndarray, count: int) -> tuple[np.ndarray, int]:
    """`|G_ij - exact| / sqrt(G_ii G_jj)` of all pairs of `count` random examples, and how many met a flip.

    Exact rows are those of plain `jax.vjp` in float64. A ReLU or a maximum may fall the other way in float32; an entry
    that is off by more than `FLIP` is compared with rows of plain float32 instead and counted.
    """
    picked = np.random.default_rng(1).permutation(len(kernel))[:count]
    with jax.enable_x64(True), jax.default_matmul_precision("highest"):

        @partial(jax.jit, static_argnums=1)
        def row(image: jax.Array, dtype: Any) -> jax.Array:
            given = jax.tree.map(lambda leaf: jnp.asarray(leaf, dtype), task.params)
            outputs, pullback = jax.vjp(lambda p: network(p, image.astype(dtype)), given)
            return jnp.concatenate([leaf.ravel() for leaf in jax.tree.leaves(pullback(jnp.ones_like(outputs))[0])])

        def relative(dtype: Any) -> np.ndarray:
            rows = np.stack([np.asarray(row(task.inputs[n], dtype), np.float64) for n in picked])
            exact = rows @ rows.T
            scale = np.sqrt(np.outer(np.diag(exact), np.diag(exact)))
            return (np.abs(kernel[np.ix_(picked, picked)] - exact) / scale)[np.triu_indices(len(picked))]

        off = relative(np.float64)
        flipped = off > FLIP
        if flipped.any():
            off = np.where(flipped, relative(np.float32), off)
    return off, int(flipped.sum())


def bare_flops_per_second(rows: int = TILE, columns: int = SLAB) -> float:
    """Speed of sgemm on tiles and slabs as large as a long run's, the best of three."""
    a = np.random.default_rng(0).standard_normal((rows, columns), np.float32)
    b, out = a.copy(), np.empty((rows, rows), np.float32)
    seconds = []
    for _ in range(4):
        started = time.perf_counter()
        np.matmul(a, b.T, out=out)
        seconds.append(time.perf_counter() - started)
    return 2 * rows**2 * columns / min(seconds[1:])


def planned(store: jacstore.JacobianStore, examples: int, memory: int) -> tuple[int, GramPlan]:
    """Bytes that a store of so many examples takes, and the plan of its kernel."""
    kept = plan_store(
        n_examples=examples,
        n_outputs=store.n_outputs,
        n_columns=store.n_columns,
        itemsize=4,
        memory=memory,
        factor_bytes=store.factor_bytes,
    )
    plan = plan_gram(
        mode=Mode.FULL,
        rows=Side(n_examples=examples, unit_size=kept.unit_size, piece_columns=kept.piece_columns, itemsize=4),
        cols=None,
        n_outputs=store.n_outputs,
        n_columns=store.n_columns,
        product_itemsize=4,
        memory=memory,
        steps=plan_steps(store.leaves, store.operands, store.n_outputs, examples, Mode.FULL),
        factor_bytes=(store.factor_bytes, store.factor_bytes),
    )
    return kept.bytes_stored, plan


def whole_run(store: jacstore.JacobianStore, kernel: jacstore.Kernel, memory: int) -> dict[str, Any]:
    """What `WHOLE` examples take on this machine: bytes and flops by the planner, hours by the speeds of this run."""
    stored, plan = planned(store, WHOLE, memory)
    computing = store.report["seconds_total"] - store.report["seconds_compile"]
    rate, bare = store.n_examples / computing, bare_flops_per_second()
    read = kernel.report["bytes_read"] / kernel.report["seconds_read"]
    # Of the upper half of the blocks each needs the rows of two sets of examples, those on the diagonal of one.
    blocks = WHOLE // BLOCK
    return {
        "whole_bytes_stored": stored,
        "whole_bytes_dense": WHOLE * store.n_outputs * store.n_parameters * 4,
        "whole_passes": plan.passes,
        "whole_flops": plan.flops,
        "whole_hours_build": WHOLE / rate / 3600,
        "whole_hours_gram": max(plan.flops / bare, plan.bytes_expected / read) / 3600,
        "whole_hours_recomputed": blocks**2 * BLOCK / rate / 3600,
        "examples_per_second": rate,
        "bare_gflops": bare / 1e9,
        "gram_gflops": kernel.report["flops"] / kernel.report["seconds_compute"] / 1e9,
        "read_gb_per_second": read / 1e9,
    }


def show(figures: dict[str, Any]) -> None:
    """Print the figures as tables."""
    f = figures
    table(
        f"{f['examples']:,} examples",
        [
            ("stored", format_size(f["bytes_stored"])),
            ("rows in float32", format_size(f["bytes_dense"])),
            ("build, compile time apart", f"{f['examples_per_second']:.2f} examples/s"),
            ("gram at this size", f"{f['gram_gflops']:.0f} GFLOP/s"),
            (f"bare sgemm, {TILE:,} x {SLAB:,}", f"{f['bare_gflops']:.0f} GFLOP/s"),
            (f"largest error of {f['checked']} entries", f"{f['largest_error']:.1e} of sqrt(G_ii G_jj)"),
            ("of these compared in float32, a flip met", f"{f['flips']}"),
        ],
    )
    table(
        f"What {WHOLE:,} examples would take at these speeds",
        [
            ("stored", format_size(f["whole_bytes_stored"])),
            ("rows in float32", format_size(f["whole_bytes_dense"])),
            ("passes over the store", f"{f['whole_passes']:.2f}"),
            ("flop of the kernel", f"{f['whole_flops']:.3g}"),
            ("build", f"{f['whole_hours_build']:.1f} h"),
            ("gram, at the speed of bare sgemm or of reading", f"{f['whole_hours_gram']:.2f} h"),
            (
                f"instead recomputed in blocks of {BLOCK} x {BLOCK}, upper half only",
                f"{f['whole_hours_recomputed']:,.0f} h",
            ),
        ],
    )


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    """Run and print; returns the figures."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--examples", type=int, default=32)
    parser.add_argument("--size", type=int, default=SIZE, help="edge of the images, a multiple of 64")
    parser.add_argument("--checked", type=int, default=6, help="examples whose kernel entries are compared")
    parser.add_argument("--memory", default="8GB")
    parser.add_argument("--out", type=Path, default=Path("issue30-run"))
    given = parser.parse_args(arguments)
    if given.size < 64 or given.size % 64:
        parser.error(f"--size {given.size}: allowed are multiples of 64")
    task = problem(given.examples, given.size)
    for name in ("store.jac", "kernel.ntk"):
        shutil.rmtree(given.out / name, ignore_errors=True)
    store = jacstore.build(task, given.out / "store.jac", memory=given.memory)
    leaves_table(store)
    kernel = jacstore.gram(store, out=given.out / "kernel.ntk", memory=given.memory)
    off, flips = errors(task, kernel.array.compute(), given.checked)
    figures = {
        "examples": store.n_examples,
        "parameters": store.n_parameters,
        "bytes_stored": store.report["bytes_stored"],
        "bytes_dense": store.report["bytes_dense"],
        "seconds_compile": store.report["seconds_compile"],
        "seconds_build": store.report["seconds_total"],
        "seconds_gram": kernel.report["seconds_total"],
        "passes": kernel.report["passes"],
        "checked": len(off),
        "largest_error": float(off.max()),
        "flips": flips,
        **whole_run(store, kernel, parse_size(given.memory, "--memory")),
    }
    show(figures)
    print(json.dumps(figures))
    return figures


if __name__ == "__main__":
    leave(partial(main, sys.argv[1:]))
