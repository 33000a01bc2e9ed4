"""A small transformer with a tied embedding: the terms of its leaves, bytes against rows, and an exact kernel.

    python pipelines/transformer.py --examples 64 --outputs loglik

Two layers, four heads, width 128, a vocabulary of 5,000 whose table is both embedding and output layer, sequences of 32
random ids; layer norm, causal attention, GELU. `--outputs loglik` is the summed log-likelihood of each next token,
`--outputs logits` the logits of three tokens at the last position. The kernel of some examples is compared in float64
with that of `jax.jacrev`.
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
import sys
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jacstore
from common import leave, leaves_table, table
from jacstore.base.machine import format_size

TOKENS = np.array([7, 1, 4])  # whose logits are the outputs
EPSILON = 1e-5


@dataclass(frozen=True, kw_only=True)
class Size:
    """Sizes of the network."""

    layers: int = 2
    heads: int = 4
    width: int = 128
    vocabulary: int = 5000
    length: int = 32


def initial(size: Size, seed: int = 0) -> dict[str, Any]:
    """Normal parameters."""
    rng = np.random.default_rng(seed)
    width, each = size.width, size.width // size.heads

    def normal(*shape: int, fan: int) -> np.ndarray:
        return (rng.standard_normal(shape) / math.sqrt(fan)).astype(np.float32)

    def norm() -> dict[str, np.ndarray]:
        return {"scale": np.ones(width, np.float32), "shift": np.zeros(width, np.float32)}

    def layer() -> dict[str, Any]:
        return {
            "norm1": norm(),
            **{name: normal(width, size.heads, each, fan=width) for name in ("query", "key", "value")},
            "out": normal(size.heads, each, width, fan=width),
            "norm2": norm(),
            "up": {"weight": normal(width, 4 * width, fan=width), "bias": np.zeros(4 * width, np.float32)},
            "down": {"weight": normal(4 * width, width, fan=4 * width), "bias": np.zeros(width, np.float32)},
        }

    params = {f"layer{n}": layer() for n in range(size.layers)}
    params["embedding"] = normal(size.vocabulary, width, fan=width)
    params["positions"] = normal(size.length, width, fan=width)
    return {**params, "norm": norm()}


def layer_norm(p: Any, x: jax.Array) -> jax.Array:
    """Each position `(T, width)` with mean 0 and variance 1, scaled and shifted (Ba et al. 2016, arXiv:1607.06450)."""
    mean = x.mean(-1, keepdims=True)
    return (x - mean) * jax.lax.rsqrt(jnp.square(x - mean).mean(-1, keepdims=True) + EPSILON) * p["scale"] + p["shift"]


def attention(p: Any, x: jax.Array) -> jax.Array:
    """Heads that see earlier positions only (Vaswani et al. 2017, arXiv:1706.03762)."""
    query, key, value = (jnp.einsum("td,dhk->thk", x, p[name]) for name in ("query", "key", "value"))
    scores = jnp.einsum("thk,shk->hts", query, key) / math.sqrt(query.shape[-1])
    earlier = jnp.tril(jnp.ones(scores.shape[1:], bool))
    weights = jax.nn.softmax(jnp.where(earlier, scores, -jnp.inf))
    return jnp.einsum("thk,hkd->td", jnp.einsum("hts,shk->thk", weights, value), p["out"])


def hidden(params: Any, ids: jax.Array) -> jax.Array:
    """What is multiplied by the table for logits, `(T, width)`, of ids `(T,)`."""
    x = params["embedding"][ids] + params["positions"]
    for n in range(len(params) - 3):
        p = params[f"layer{n}"]
        x = x + attention(p, layer_norm(p["norm1"], x))
        wide = jax.nn.gelu(layer_norm(p["norm2"], x) @ p["up"]["weight"] + p["up"]["bias"])
        x = x + wide @ p["down"]["weight"] + p["down"]["bias"]
    return layer_norm(params["norm"], x)


def log_likelihood(params: Any, ids: jax.Array) -> jax.Array:
    """Summed log-likelihood of every id after the first."""
    logits = hidden(params, ids)[:-1] @ params["embedding"].T
    return jnp.take_along_axis(jax.nn.log_softmax(logits), ids[1:, None], -1).sum()


def last_logits(params: Any, ids: jax.Array) -> jax.Array:
    """Logits of some tokens at the last position."""
    return (hidden(params, ids)[-1] @ params["embedding"].T)[TOKENS]


OUTPUTS = {"loglik": log_likelihood, "logits": last_logits}


def problem(examples: int, outputs: str = "loglik", size: Size | None = None) -> jacstore.Problem:
    """The network with normal parameters at random ids."""
    size = size or Size()
    ids = np.random.default_rng(1).integers(0, size.vocabulary, (examples, size.length), dtype=np.int32)
    return jacstore.Problem(apply=OUTPUTS[outputs], params=initial(size), inputs=ids)


def exact_kernel(task: jacstore.Problem, count: int) -> np.ndarray:
    """`J J^T` of the first examples in float64, rows `(count * K, P)` by `jax.jacrev`."""
    with jax.enable_x64(True):
        params = jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.float64), task.params)
        jacobian = jax.jit(jax.jacrev(lambda p, ids: jnp.atleast_1d(task.apply(p, ids))))
        rows = []
        for ids in task.inputs[:count]:
            leaves = jax.tree.leaves(jacobian(params, ids))
            rows.append(np.concatenate([np.reshape(leaf, (len(leaf), -1)) for leaf in leaves], -1))
    stacked = np.concatenate(rows)
    return stacked @ stacked.T


def largest_difference(kernel: np.ndarray, exact: np.ndarray) -> float:
    """Largest `|G_ij - exact_ij| / sqrt(exact_ii exact_jj)`."""
    scale = np.sqrt(np.outer(np.diag(exact), np.diag(exact)))
    return float((np.abs(kernel - exact) / scale).max())


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    """Run and print; returns the figures."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--examples", type=int, default=64)
    parser.add_argument("--outputs", choices=sorted(OUTPUTS), default="loglik")
    parser.add_argument("--checked", type=int, default=16, help="examples whose kernel is compared with jax.jacrev")
    for name, default in asdict(Size()).items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--memory", default="8GB")
    parser.add_argument("--out", type=Path, default=Path("transformer-run"))
    given = parser.parse_args(arguments)
    if given.width % given.heads:
        parser.error(f"--width {given.width}: allowed are multiples of --heads {given.heads}")
    size = Size(**{name: getattr(given, name) for name in asdict(Size())})
    task = problem(given.examples, given.outputs, size)
    for name in ("store.jac", "kernel.ntk"):
        shutil.rmtree(given.out / name, ignore_errors=True)
    store = jacstore.build(task, given.out / "store.jac", memory=given.memory)
    leaves_table(store)
    kernel = jacstore.gram(store, out=given.out / "kernel.ntk", memory=given.memory)
    checked = min(given.checked, given.examples)
    exact = exact_kernel(task, checked)
    wide = jacstore.build(task, None, memory=given.memory, dtype="float64", examples=(0, checked))
    figures = {
        "examples": store.n_examples,
        "outputs": store.n_outputs,
        "parameters": store.n_parameters,
        "bytes_stored": store.report["bytes_stored"],
        "bytes_dense": store.report["bytes_dense"],
        "smaller": store.report["bytes_dense"] / store.report["bytes_stored"],
        "seconds_compile": store.report["seconds_compile"],
        "seconds_build": store.report["seconds_total"],
        "seconds_gram": kernel.report["seconds_total"],
        "passes": kernel.report["passes"],
        "checked": checked,
        "error_float64": largest_difference(jacstore.gram(wide).array.compute(), exact),
        "error_float32": largest_difference(kernel.array[: len(exact), : len(exact)].compute(), exact),
    }
    table(
        f"{store.n_examples:,} examples x {store.n_outputs} outputs x {store.n_parameters:,} parameters",
        [
            ("stored", format_size(figures["bytes_stored"])),
            ("rows in float32", format_size(figures["bytes_dense"])),
            ("times smaller", f"{figures['smaller']:.1f}"),
            ("build", f"{figures['seconds_build']:.1f} s ({figures['seconds_compile']:.1f} s compiling)"),
            ("gram", f"{figures['seconds_gram']:.1f} s, {figures['passes']:.2f} passes"),
            (f"largest error of {checked} examples, float64", f"{figures['error_float64']:.1e} of sqrt(G_ii G_jj)"),
            (f"largest error of {checked} examples, float32", f"{figures['error_float32']:.1e} of sqrt(G_ii G_jj)"),
        ],
    )
    print(json.dumps(figures))
    return figures


if __name__ == "__main__":
    leave(partial(main, sys.argv[1:]))
