"""Which rate bounds each stage of a job, from rates of this machine, and what was measured beside it.

    python pipelines/roofline.py --csv roofline.csv --figure roofline.png
    python pipelines/roofline.py --examples 128 --whole 30000

Jobs: the MLP and the CNN of headline.py and the network of issue30.py, each built on disk and assembled there. First
the rates are measured, each in the way in which a stage uses it: matrix products of a tile and a slab, on the device or
by the host's BLAS; ordinary batch gradients; copies to the device and back; writing with a flush; reading from the page
cache. What a stage has to do, divided by its rate, is the least time of that part, and the largest part bounds the
stage, because parts overlap. Seconds of compilation are left out. `--whole` adds the same least times for that many
examples: parts of a build grow with the examples, products with the pairs of tiles on and above the diagonal.

On a device the engine is XLA, elsewhere BLAS; `--engine` chooses. The CSV has a line for each part of a stage.
"""

from __future__ import annotations

import argparse
import math
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import headline
import issue30
import jacstore
from common import leave, table, write_csv
from jacstore.store.codec_choice import measured_disk_speed

TILE = 2048  # rows of the products that are measured, of twice as many columns
COPIED = 64_000_000  # bytes of a copy that is measured
REPEATS = 5
JOBS: dict[str, Callable[[int, int], jacstore.Problem]] = {
    "mlp": lambda examples, size: headline.problem("mlp", examples, None),
    "cnn": lambda examples, size: headline.problem("cnn", examples, None),
    "issue30": issue30.problem,
}


@dataclass(frozen=True, kw_only=True)
class Rates:
    """What this machine does in a second: floating-point operations, or bytes."""

    products: float
    to_device: float
    from_device: float
    disk_write: float
    disk_read: float


@dataclass(frozen=True, kw_only=True)
class Part:
    """One part of a stage: the least time that its rate allows, for the examples that ran and for the whole job.

    `seconds_measured` is what the job's report says of the part; 0 where parts of a stage are not told apart.
    """

    job: str
    stage: str
    part: str
    examples: int
    amount: float
    rate: float
    seconds_least: float
    seconds_measured: float
    bounds: bool
    whole_examples: int
    whole_seconds_least: float


# ---- rates ----


def measured_rates(engine: str, folder: Path, tile: int = TILE) -> Rates:
    """The best of several runs of each."""
    numbers = np.random.default_rng(0).standard_normal(COPIED // 4, np.float32)
    on_device = jax.block_until_ready(jax.device_put(numbers))
    # A second array each time: JAX keeps the host's copy of an array that was fetched.
    fetched = [jax.block_until_ready(on_device + n) for n in range(REPEATS)]
    fetch = iter(fetched)
    file = folder / "rates.bin"
    file.write_bytes(numbers.tobytes())
    try:
        return Rates(
            products=products_per_second(engine, tile, 2 * tile),
            to_device=COPIED / fastest(lambda: jax.block_until_ready(jax.device_put(numbers))),
            from_device=COPIED / fastest(lambda: np.array(next(fetch))),
            disk_write=measured_disk_speed(folder),
            disk_read=COPIED / fastest(lambda: np.fromfile(file, np.float32)),
        )
    finally:
        file.unlink()


def products_per_second(engine: str, tile: int, slab: int) -> float:
    """Floating-point operations per second of float32 products of a tile, on the device or by BLAS."""
    a = np.random.default_rng(0).standard_normal((tile, slab), np.float32)
    if engine == "blas":
        b, out = a.copy(), np.empty((tile, tile), np.float32)
        return 2 * tile**2 * slab / fastest(lambda: np.matmul(a, b.T, out=out))
    product = jax.jit(lambda a: jnp.matmul(a, a.T, precision=jax.lax.Precision.HIGHEST))
    there = jax.device_put(a)
    jax.block_until_ready(product(there))
    return 2 * tile**2 * slab / fastest(lambda: jax.block_until_ready(product(there)))


def fastest(work: Callable[[], Any]) -> float:
    """Seconds of the fastest of several runs."""
    seconds = []
    for _ in range(REPEATS):
        started = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - started)
    return max(min(seconds), 1e-9)


# ---- stages ----


def stages(name: str, engine: str, examples: int, size: int, whole: int, rates: Rates, out: Path) -> list[Part]:
    """Build and assemble one job; the parts of both stages."""
    task = JOBS[name](examples, size)
    gradients = batch_gradients_per_second(task)
    store = jacstore.build(task, out / f"{name}.jac", memory="8GB", codec="none")
    kernel = jacstore.gram(store, out=out / f"{name}.ntk", memory="8GB", engine=engine, dtype="float32")
    built, gram = store.report, kernel.report
    kernel_bytes = gram["rows"] * (gram["rows"] + 1) / 2 * 4
    common = {"job": name, "examples": examples, "whole_examples": whole}
    linear, square = whole / examples, whole**2 / 2 / multiplied_pairs(gram)
    build = [
        part("gradients", examples, gradients, built["seconds_device"], linear),
        part("to host", built["bytes_stored"], rates.from_device, 0.0, linear),
        part("write", built["bytes_stored"], rates.disk_write, built["seconds_write"], linear),
    ]
    products = [
        part("read", gram["bytes_read"], rates.disk_read, gram["seconds_read"], linear),
        part("products", gram["flops"], rates.products, gram["seconds_compute"], square),
        part("write", kernel_bytes, rates.disk_write, gram["seconds_write"], square),
    ]
    if engine == "xla":
        products.insert(1, part("to device", gram["bytes_read"], rates.to_device, 0.0, linear))
        products.insert(3, part("to host", kernel_bytes, rates.from_device, 0.0, square))
    return [
        Part(**common, stage=stage, bounds=one["seconds_least"] == max(p["seconds_least"] for p in parts), **one)
        for stage, parts in (("build", build), ("gram", products))
        for one in [*parts, whole_stage(stage, parts, built if stage == "build" else gram)]
    ]


def multiplied_pairs(gram: dict[str, Any]) -> float:
    """Pairs of rows that were multiplied: tiles of the diagonal are multiplied whole."""
    side = (math.sqrt(1 + 8 * gram["tiles_total"]) - 1) / 2  # tiles along a side, of a triangle of so many
    return (gram["rows"] / side) ** 2 * gram["tiles_total"]


def part(what: str, amount: float, rate: float, measured: float, growth: float) -> dict[str, Any]:
    """The figures of one part of a stage."""
    return {
        "part": what,
        "amount": amount,
        "rate": rate,
        "seconds_least": amount / rate,
        "seconds_measured": measured,
        "whole_seconds_least": amount / rate * growth,
    }


def whole_stage(stage: str, parts: list[dict[str, Any]], report: dict[str, Any]) -> dict[str, Any]:
    """The stage itself: the largest of its parts, since they overlap, beside all seconds but those of compiling."""
    return {
        "part": "all",
        "amount": 0.0,
        "rate": 0.0,
        "seconds_least": max(one["seconds_least"] for one in parts),
        "seconds_measured": report["seconds_total"] - report.get("seconds_compile", 0.0),
        "whole_seconds_least": max(one["whole_seconds_least"] for one in parts),
    }


def batch_gradients_per_second(task: jacstore.Problem, batch: int = 64) -> float:
    """Examples per second of ordinary jitted gradients of the summed outputs, a batch at a time."""
    x = jnp.asarray(task.inputs[: min(batch, len(task.inputs))])

    @jax.jit
    def step(params: Any, x: jax.Array) -> Any:
        return jax.grad(lambda params: jax.vmap(lambda one: task.apply(params, one))(x).sum())(params)

    with jax.default_matmul_precision("highest"):
        jax.block_until_ready(step(task.params, x))
        return len(x) / fastest(lambda: jax.block_until_ready(step(task.params, x)))


# ---- what is shown ----


def draw(parts: list[Part], where: str, path: Path) -> None:
    """A row for each stage: a bar for the least time of each part, a mark for what the whole stage took."""
    from matplotlib.figure import Figure

    colours = {
        "gradients": "#1b6ca8",
        "products": "#1b6ca8",
        "read": "#7fb069",
        "write": "#d1603d",
        "to device": "#8d6cab",
        "to host": "#c9ced6",
    }
    rows = list(dict.fromkeys((one.job, one.stage) for one in parts))
    drawing = Figure(figsize=(8, 0.8 * len(rows) + 1.6), layout="constrained")
    axes = drawing.subplots()
    for place, row in enumerate(rows):
        mine = [one for one in parts if (one.job, one.stage) == row]
        bars = [one for one in mine if one.part != "all"]
        height = 0.8 / len(bars)
        for n, one in enumerate(bars):
            y = place - 0.4 + (n + 0.5) * height
            axes.barh(y, max(one.seconds_least, 1e-6), height * 0.9, color=colours[one.part])
            axes.text(one.seconds_least * 1.1, y, one.part, va="center", fontsize=7, color="#444444")
        measured = next(one.seconds_measured for one in mine if one.part == "all")
        axes.plot([measured] * 2, [place - 0.42, place + 0.42], color="black", linewidth=2)
    axes.plot([], [], color="black", linewidth=2, label="measured, the whole stage")
    examples = {one.job: one.examples for one in parts}
    axes.set_yticks(
        range(len(rows)), [f"{job}: {stage}\n{examples[job]:,} examples" for job, stage in rows], fontsize=9
    )
    axes.invert_yaxis()
    axes.set_xscale("log")
    axes.set_xlim(right=axes.get_xlim()[1] * 2)
    axes.set_xlabel("seconds; a bar is the least time that the measured rate allows")
    axes.set_title(f"Least time of each part, {where}", fontsize=10)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, loc="lower right", fontsize=8)
    path.parent.mkdir(parents=True, exist_ok=True)
    drawing.savefig(path, dpi=150)


def show(parts: list[Part], rates: Rates, where: str) -> None:
    """Print the rates and the parts."""
    table(
        f"Rates, {where}",
        [
            ("float32 products", f"{rates.products / 1e9:,.1f} GFLOP/s"),
            *((name, f"{getattr(rates, name) / 1e9:.2f} GB/s") for name in Rates.__annotations__ if name != "products"),
        ],
    )
    rows: list[tuple[str, ...]] = [("job", "stage", "part", "least s", "measured s", "bounds", "whole job, least s")]
    for one in parts:
        measured = f"{one.seconds_measured:.3g}" if one.seconds_measured else "-"
        bounds = "<" if one.bounds and one.part != "all" else ""
        least, whole = f"{one.seconds_least:.3g}", f"{one.whole_seconds_least:,.3g}"
        rows.append((one.job, one.stage, one.part, least, measured, bounds, whole))
    table("Stages: the least time of each part, and what was measured", rows)


def main(arguments: list[str] | None = None) -> list[Part]:
    """Measure, print, write and draw; returns the parts."""
    parser = argparse.ArgumentParser(
        description=__doc__.split("\n")[0],
        epilog=__doc__.partition("\n\n")[2],
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    on_cpu = jax.default_backend() == "cpu"
    parser.add_argument("--jobs", nargs="+", choices=tuple(JOBS), default=tuple(JOBS))
    parser.add_argument("--engine", choices=("blas", "xla"), default="blas" if on_cpu else "xla")
    parser.add_argument("--examples", type=int, default=256, help="of each job that runs")
    parser.add_argument("--size", type=int, default=128, help="pixels along a side of issue30's images")
    parser.add_argument("--whole", type=int, default=30_000, help="examples of the job that is extrapolated")
    parser.add_argument("--tile", type=int, default=TILE, help="rows of the products that are measured")
    parser.add_argument("--out", type=Path, help="folder for stores and kernels, removed afterwards")
    parser.add_argument("--csv", type=Path)
    parser.add_argument("--figure", type=Path)
    given = parser.parse_args(arguments)
    where = jax.devices()[0].device_kind if given.engine == "xla" else "BLAS on this machine"
    folder = Path(tempfile.mkdtemp(prefix="roofline-", dir=given.out))
    try:
        rates = measured_rates(given.engine, folder, given.tile)
        sizes = given.engine, given.examples, given.size, given.whole
        parts = [one for name in given.jobs for one in stages(name, *sizes, rates, folder)]
    finally:
        shutil.rmtree(folder)
    show(parts, rates, where)
    if given.csv:
        write_csv(given.csv, parts)
    if given.figure:
        draw(parts, where, given.figure)
    return parts


if __name__ == "__main__":
    leave(lambda: main(sys.argv[1:]))
