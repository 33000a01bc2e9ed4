"""30,000 examples on two cores: an MLP's kernel from factors, and how fast each part is beside its bare limit.

    python pipelines/headline.py --data mnist.npz --net mlp
    python pipelines/headline.py --net cnn --examples 512

mlp: 784-1024-1024-512-10. cnn: 3 x 3 convolutions 64-128-256-512 with 2 x 2 max-pool on 3 x 32 x 32 generated images,
dense 2048-10. Outputs are summed, or kept apart by --outputs all. Without --data the inputs are normal. 200 random
entries of the kernel are compared with rows from `jax.grad` in float64; bare sgemm multiplies matrices of the shapes
that the cheapest form of each leaf takes, between the slabs of the kernel, and ordinary batch gradients, one for each
output, are timed in the same run.
"""

from __future__ import annotations

import argparse
import json
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
from jacstore.base import machine
from jacstore.base.events import SlabDone
from jacstore.base.threads import blas_threads

MLP = (784, 1024, 1024, 512, 10)
CHANNELS = (3, 64, 128, 256, 512)
CHECKED = 200


def mlp_params(seed: int = 0, widths: tuple[int, ...] = MLP) -> dict[str, Any]:
    keys = jax.random.split(jax.random.key(seed), len(widths))
    return {
        f"dense{n}": {"weight": jax.random.normal(key, (a, b)) * (2 / a) ** 0.5, "bias": jnp.zeros(b)}
        for n, (key, a, b) in enumerate(zip(keys, widths, widths[1:], strict=False))
    }


def mlp(params: Any, x: jax.Array) -> jax.Array:
    for n in range(len(params)):
        layer = params[f"dense{n}"]
        x = (jax.nn.relu(x) if n else x) @ layer["weight"] + layer["bias"]
    return x


def cnn_params(seed: int = 0, channels: tuple[int, ...] = CHANNELS) -> dict[str, Any]:
    keys = jax.random.split(jax.random.key(seed), len(channels))
    params = {
        f"conv{n}": {"weight": jax.random.normal(key, (3, 3, a, b)) * (2 / (9 * a)) ** 0.5, "bias": jnp.zeros(b)}
        for n, (key, a, b) in enumerate(zip(keys, channels, channels[1:], strict=False))
    }
    width = channels[-1] * 4
    return {**params, "dense": {"weight": jax.random.normal(keys[-1], (width, 10)) / width**0.5, "bias": jnp.zeros(10)}}


def cnn(params: Any, x: jax.Array) -> jax.Array:
    x = x[None]
    for n in range(len(params) - 1):
        layer = params[f"conv{n}"]
        x = jax.lax.conv_general_dilated(x, layer["weight"], (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
        x = jax.nn.relu(x + layer["bias"])
        x = jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")
    return x.reshape(-1) @ params["dense"]["weight"] + params["dense"]["bias"]


def problem(net: str, examples: int, data: Path | None, outputs: str = "sum") -> jacstore.Problem:
    """The network with normal weights at MNIST digits or at normal inputs."""
    rng = np.random.default_rng(0)
    if net == "cnn":
        x = rng.standard_normal((examples, 32, 32, 3), np.float32)
        return jacstore.Problem(apply=cnn, params=cnn_params(), inputs=x, outputs=outputs)
    if data is None:
        x = rng.standard_normal((examples, MLP[0]), np.float32)
    else:
        with np.load(data) as arrays:
            x = arrays["x_train"][:examples].reshape(-1, MLP[0]).astype(np.float32) / 255
    return jacstore.Problem(apply=mlp, params=mlp_params(), inputs=x, outputs=outputs)


def unit_cotangents(task: jacstore.Problem) -> np.ndarray:
    """One for each output `(K, 10)`."""
    return np.ones((1, 10), np.float32) if task.outputs == "sum" else np.eye(10, dtype=np.float32)


def gradients_per_second(task: jacstore.Problem, batch: int) -> float:
    """Examples a second of ordinary jitted batch gradients, one for each output; the median of several."""
    x = jnp.asarray(task.inputs[:batch])

    def loss(params: Any, x: jax.Array, cotangent: jax.Array) -> jax.Array:
        return (jax.vmap(lambda one: task.apply(params, one))(x) @ cotangent).sum()

    step = jax.jit(jax.grad(loss))
    cotangents = unit_cotangents(task)

    def gradients() -> None:
        for cotangent in cotangents:
            jax.block_until_ready(step(task.params, x, cotangent))

    with jax.default_matmul_precision("highest"):
        seconds = [_timed(gradients) for _ in range(8)][1:]
    return len(x) / sorted(seconds)[len(seconds) // 2]


def _timed(work: Callable[[], Any]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def largest_error(task: jacstore.Problem, kernel: jacstore.Kernel, count: int = CHECKED) -> tuple[float, int]:
    """The largest of some random entries' errors against float64 rows, relative to `sqrt(G_ii G_jj)`, and flips.

    A ReLU or a maximum may fall the other way in float32; an entry that is off by more than 1e-6 is compared with rows
    of plain `jax.grad` in float32 instead and counted as a flip.
    """
    rng = np.random.default_rng(1)
    cotangents = unit_cotangents(task)
    pairs = rng.integers(0, len(task.inputs) * len(cotangents), (count, 2))
    with jax.enable_x64(True):
        params = jax.tree_util.tree_map(lambda leaf: jnp.asarray(leaf, jnp.float64), task.params)
        row = jax.jit(jax.grad(lambda params, x, cotangent: task.apply(params, x) @ cotangent))

        def flat(index: int, dtype: Any) -> np.ndarray:
            n, k = divmod(index, len(cotangents))
            with jax.default_matmul_precision("highest"):
                given = jax.tree_util.tree_map(lambda leaf: leaf.astype(dtype), params)
                leaves = jax.tree_util.tree_leaves(
                    row(given, jnp.asarray(task.inputs[n], dtype), jnp.asarray(cotangents[k], dtype))
                )
            return np.concatenate([np.ravel(leaf).astype(np.float64) for leaf in leaves])

        def error(i: int, j: int, dtype: Any) -> float:
            a, b = flat(i, dtype), flat(j, dtype)
            return float(abs(found - a @ b) / np.sqrt((a @ a) * (b @ b)))

        worst, flips = 0.0, 0
        for i, j in pairs:
            found = float(kernel.array[int(i), int(j)].compute())
            off = error(i, j, jnp.float64)
            if off > 1e-6:
                off, flips = error(i, j, jnp.float32), flips + 1
            worst = max(worst, off)
    return worst, flips


def bare_shapes(store: jacstore.JacobianStore) -> list[tuple[int, int]]:
    """Rows per example and depth of the matrix products that make up the kernel, each leaf in its cheapest form.

    A leaf with many positions is a product of its rows, or one of inputs and one of cotangents of all positions,
    whichever takes fewer operations. What is added and multiplied number by number is not counted.
    """
    k, shapes = store.n_outputs, {operand.name: operand.shape for operand in store.operands}
    found: dict[Any, list[tuple[int, int]]] = {"rows": [(k, sum(leaf.size for leaf in store.leaves if leaf.dense))]}
    for leaf in store.leaves:
        for term in leaf.factored:
            *inputs, cotangents = term.operands
            *_, positions, width = shapes[cotangents]
            if not inputs:
                if positions > 1 or cotangents not in found:
                    found.setdefault((cotangents, "sum"), [(k, width)])
                continue
            pairs = [(int(np.prod(shapes[inputs[0]][:-1])), shapes[inputs[0]][-1]), (positions * k, width)]
            rows = [(k, leaf.size)]
            if _operations(rows) < _operations(pairs):
                found[leaf.path] = rows
            else:
                found |= {inputs[0]: pairs[:1], cotangents: pairs[1:]}
                if positions == 1:
                    found.pop((cotangents, "sum"), None)
    return [shape for shapes in found.values() for shape in shapes if shape[1]]


def _operations(shapes: list[tuple[int, int]]) -> int:
    return sum(2 * rows**2 * depth for rows, depth in shapes)


class Bare:
    """Bare sgemm of a kernel's shapes, timed before, after and between its slabs: machines wander."""

    def __init__(self, store: jacstore.JacobianStore, rows: int = 2048, pause: float = 5.0) -> None:
        self.examples, self.pause, self.last = store.n_examples, pause, -1e9
        self.shapes, self.spent, self.cpu_spent = bare_shapes(store), 0.0, 0.0
        # One example at least; slabs as deep as those of a gram.
        self.sizes = [(max(1, min(rows // r, self.examples)), min(depth, 4096)) for r, depth in self.shapes]
        self.seconds: list[tuple[float, float]] = []
        self.cores = machine.cores()
        self.pool = ThreadPoolExecutor(self.cores)
        rng = np.random.default_rng(0)
        most = max(n * r * depth for (r, _), (n, depth) in zip(self.shapes, self.sizes, strict=True))
        self.numbers = rng.standard_normal((2, most), np.float32)
        # Fresh pages would cost as much as a shallow product.
        self.out = np.zeros(max((n * r) ** 2 for (r, _), (n, _) in zip(self.shapes, self.sizes, strict=True)), "f4")

    def __call__(self, event: Any) -> None:
        # After a slab, and not after a tile: while one is written, the next is computed.
        if isinstance(event, SlabDone) and time.perf_counter() - self.last >= self.pause:
            self.measure()

    def measure(self) -> None:
        with blas_threads(1):
            self._measure()

    def _measure(self) -> None:
        started, cpu_started, total, cpu = time.perf_counter(), time.process_time(), 0.0, 0.0
        for (r, depth), (n, deep) in zip(self.shapes, self.sizes, strict=True):
            a, b = (side[: n * r * deep].reshape(n * r, deep) for side in self.numbers)
            out = self.out[: (n * r) ** 2].reshape(n * r, n * r)
            begun, used = time.perf_counter(), time.process_time()
            # The upper half of the kernel.
            share = depth / deep * (self.examples / n) ** 2 / 2
            self.multiply(a, b, out)
            total += (time.perf_counter() - begun) * share
            cpu += (time.process_time() - used) * share
        self.seconds.append((total, cpu))
        self.last = time.perf_counter()
        self.spent += self.last - started
        self.cpu_spent += time.process_time() - cpu_started

    def multiply(self, a: np.ndarray, b: np.ndarray, out: np.ndarray) -> None:
        """`a @ b.T` on all cores, some rows on each: inside a gram BLAS itself may be limited to one thread."""
        step = -(-len(a) // self.cores)
        parts = [slice(first, first + step) for first in range(0, len(a), step)]
        list(self.pool.map(lambda part: np.matmul(a[part], b.T, out=out[part]), parts))

    def median(self) -> tuple[float, float]:
        """Seconds, and seconds of all cores together."""
        wall, cpu = zip(*self.seconds, strict=True)
        return statistics.median(wall), statistics.median(cpu)


def kernel_figures(task: jacstore.Problem, store: jacstore.JacobianStore, out: Path, memory: str) -> dict[str, Any]:
    """The kernel's time, counts and error, and bare products of the same shapes."""
    bare = Bare(store)
    for _ in range(3):
        bare.measure()
    del bare.seconds[0]
    # What bare products take meanwhile is not the kernel's.
    begun, used = time.perf_counter() - bare.spent, time.process_time() - bare.cpu_spent
    kernel = jacstore.gram(store, out=out, memory=memory, dtype="float32", listener=bare)
    done, used = time.perf_counter() - bare.spent - begun, time.process_time() - bare.cpu_spent - used
    for _ in range(2):
        bare.measure()
    gram = kernel.report
    wall, cpu = bare.median()
    figures = {
        "seconds_gram": done,
        "passes": gram["passes"],
        "schedule": gram["schedule"],
        "gflops": gram["flops"] / max(gram["seconds_compute"], 1e-9) / 1e9,
        "seconds_compute": gram["seconds_compute"],
        "seconds_bare": wall,
        "arithmetic_to_bare": wall / gram["seconds_compute"],
        "cpu_seconds_gram": used,
        "cpu_seconds_bare": cpu,
    }
    figures["largest_error"], figures["flips"] = largest_error(task, kernel)
    return figures


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    """Run and print; returns the figures."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--net", choices=("mlp", "cnn"), default="mlp")
    parser.add_argument("--data", type=Path, help="npz with x_train, for the MLP")
    parser.add_argument("--examples", type=int, default=30_000)
    parser.add_argument("--outputs", choices=("sum", "all"), default="sum")
    parser.add_argument("--batch-size", type=int, help="examples of a device pass and of a batch gradient")
    parser.add_argument("--no-kernel", action="store_true", help="only build")
    parser.add_argument("--memory", default="8GB")
    parser.add_argument("--out", type=Path, default=Path("headline-run"))
    given = parser.parse_args(arguments)
    task = problem(given.net, given.examples, given.data, given.outputs)
    for name in ("store.jac", "kernel.ntk"):
        shutil.rmtree(given.out / name, ignore_errors=True)
    before = gradients_per_second(task, given.batch_size or 64)
    started = time.perf_counter()
    store = jacstore.build(task, given.out / "store.jac", memory=given.memory, batch_size=given.batch_size)
    built = time.perf_counter()
    # Machines wander: gradients are timed on both sides of the build, bare products on both sides of the kernel.
    gradients = (before + gradients_per_second(task, given.batch_size or 64)) / 2
    build = store.report
    computing = build["seconds_total"] - build["seconds_compile"]
    figures = {
        "net": given.net,
        "examples": given.examples,
        "parameters": store.n_parameters,
        "seconds_build": built - started,
        "seconds_compile": build["seconds_compile"],
        "examples_per_second": given.examples / computing,
        "gradients_per_second": gradients,
        "build_to_gradients": given.examples / computing / gradients,
        "bytes_stored": build["bytes_stored"],
        "bytes_dense": build["bytes_dense"],
        "smaller": build["bytes_dense"] / build["bytes_stored"],
    }
    if not given.no_kernel:
        figures.update(kernel_figures(task, store, given.out / "kernel.ntk", given.memory))
        figures["seconds_both"] = figures["seconds_build"] + figures["seconds_gram"]
    for key, value in figures.items():
        print(f"{key:22} {value:.4g}" if isinstance(value, float) else f"{key:22} {value}", flush=True)
    print(json.dumps(figures))
    return figures


if __name__ == "__main__":
    main(sys.argv[1:])
