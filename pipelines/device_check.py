"""One run on an accelerator, at most 8 minutes: are kernels right there, how fast, and how close to its own limits?

    python pipelines/device_check.py --minutes 8 > device.json
    python pipelines/device_check.py --small

Sections: `peak` measures matrix products of each precision, `arithmetic` those of the engine; `engines` compares both
engines with float64, dense and factored, and `kinds` does so for every kind of term in every mode; `tf32` uses numbers
that any product of 16-bit or TF32 operands gets wrong by 5e-4; `precisions` gives error and rate of a kernel in each
named precision that the device has; `factored` builds and assembles the headline MLP from factors at 30,000 examples,
`cnn` the headline CNN at 8,192; `dense` uses 12,000 x 2.4M bfloat16 rows in RAM, `float32` float32 rows. Each has its
time; one that does not fit any more is skipped and named. Progress goes to
stderr, one JSON object to stdout at the end. Exit code 0, or 3 if a check failed.

It needs no network. Beside Python, JAX with its plug-in for the device, NumPy and SciPy it needs jacstore on PYTHONPATH
and these packages, which can be brought along as wheels (`pip download --no-deps`):
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import headline
import jacstore
from jacstore import testing
from jacstore.base import machine
from jacstore.base.events import Started
from jacstore.base.limits import PRECISIONS
from jacstore.base.modes import Mode
from jacstore.errors import InvalidRequestError, RunInterruptedError
from jacstore.kernels.engines.xla import XlaEngine

WHEELS = (
    "zarr msgspec numcodecs crc32c google-crc32c donfig packaging typing-extensions dask distributed cloudpickle "
    "fsspec partd locket toolz pyyaml click jinja2 markupsafe msgpack psutil sortedcontainers tblib tornado urllib3 "
    "zict rich markdown-it-py mdurl pygments threadpoolctl"
)
# float32 rounding of sums; products of 16-bit or TF32 operands are off by 5e-4 on the rows of `tf32`.
TOLERANCE = 2e-6
CHECKED = 20
# On those rows every product is rounded the same way, so that float32 sums lose up to 1e-5 themselves.
SPOILED = 4e-5
# Seconds kept for printing and for what is running when the time is over.
MARGIN = 10.0


class Run:
    """Sections run in order within the time; what they found, what was skipped, which checks failed."""

    def __init__(self, seconds: float, small: bool) -> None:
        self.started, self.small = time.perf_counter(), small
        self.ends = self.started + seconds
        self.figures: dict[str, Any] = {"minutes": seconds / 60, "small": small}
        self.skipped: dict[str, str] = {}
        self.failed: list[str] = []
        self.section, self.section_ends = "start", self.ends
        self._said = threading.Lock()

    def left(self) -> float:
        """Seconds that the running section may still take."""
        return min(self.section_ends, self.ends - MARGIN) - time.perf_counter()

    def over(self) -> bool:
        """For `stop=`: builds and grams end between batches and slabs when the section's time is over."""
        return self.left() <= 0

    def do(self, name: str, work: Callable[[Run], dict[str, Any]], needs: float, most: float) -> None:
        """Run a section if `needs` seconds are left, for at most `most` of 8 minutes, in proportion of others."""
        most *= self.figures["minutes"] / 8
        remaining = self.ends - MARGIN - time.perf_counter()
        if remaining < needs:
            self.skipped[name] = f"{remaining:.0f} s left, it needs {needs:.0f}"
            return
        self.section, self.section_ends = name, time.perf_counter() + most
        began = time.perf_counter()
        self.note("begins")
        try:
            found = work(self)
        except RunInterruptedError as error:
            self.skipped[name] = f"stopped after its {most:.0f} s: {error}"
            return
        # The machine may be here only once: whatever ends one section, the others still run.
        except Exception as error:
            self.failed.append(f"{name}: {type(error).__name__}: {error}")
            self.note(traceback.format_exc())
            return
        self.figures[name] = {**found, "seconds": time.perf_counter() - began}
        self.note(json.dumps(self.figures[name]))

    def check(self, what: str, value: float, limit: float = TOLERANCE) -> float:
        """Keep a figure that must not exceed a limit."""
        if not value <= limit:
            self.failed.append(f"{self.section}: {what} {value:.3g}, allowed {limit:.0e}")
        return value

    def note(self, text: str) -> None:
        print(f"{time.perf_counter() - self.started:6.1f} s  {self.section}: {text}", file=sys.stderr, flush=True)

    def say(self) -> int:
        """Print the object, once: the watchdog and the end may both come here. Returns the exit code."""
        if not self._said.acquire(blocking=False):
            threading.Event().wait(MARGIN)
            return 3 if self.failed else 0
        facts = {"skipped": self.skipped, "failed": self.failed, "ok": not self.failed}
        print(json.dumps({**self.figures, **facts, "seconds_total": time.perf_counter() - self.started}), flush=True)
        return 3 if self.failed else 0

    def watch(self) -> threading.Timer:
        """Compiling cannot be interrupted: at the very end print what is known and leave."""

        def leave() -> None:
            self.skipped[self.section] = "did not end within the time of the whole run"
            os._exit(self.say())

        timer = threading.Timer(self.ends - time.perf_counter(), leave)
        timer.daemon = True
        timer.start()
        return timer


# ------------------------------------------------------------------------------------------------------------- sections


def peak(run: Run) -> dict[str, Any]:
    """GFLOP/s of plain `jnp` products of square matrices, compile time apart, the best of several."""
    n, repeats = (768, 3) if run.small else (8192, 8)
    kinds = {
        "float32": (jnp.float32, lax.Precision.HIGHEST),
        "tf32_or_default": (jnp.float32, lax.Precision.DEFAULT),
        "bfloat16": (jnp.bfloat16, lax.Precision.HIGHEST),
    }
    found = {}
    for name, (dtype, precision) in kinds.items():
        product = jax.jit(
            lambda a, b, precision=precision: jnp.matmul(a, b, precision=precision, preferred_element_type=jnp.float32)
        )
        a = jax.random.normal(jax.random.key(0), (n, n), dtype)
        jax.block_until_ready(product(a, a))
        # The same products in a row: one alone would be waited for longer than it takes.
        seconds = min(_timed(lambda a=a, product=product: [product(a, a) for _ in range(repeats)]) for _ in range(3))
        found[name] = 2 * n**3 * repeats / seconds / 1e9
    return {"gflops": found, "size": n}


def arithmetic(run: Run) -> dict[str, Any]:
    """GFLOP/s of the engine that adds a slab to a tile on the device, and GB/s of bringing the slab there."""
    n, width, repeats = (256, 512, 3) if run.small else (2048, 4096, 20)
    found: dict[str, Any] = {}
    for stored in ("bfloat16", "float32"):
        engine = XlaEngine("float32", stored)
        numbers = np.random.default_rng(0).standard_normal((n, 1, width), np.float32)
        slab = numbers.astype(jnp.bfloat16).view(np.uint16) if stored == "bfloat16" else numbers
        operand, total = engine.load(slab), engine.zeros((n, n))
        where = slice(0, n), slice(0, width)

        def add(engine: XlaEngine = engine, operand: Any = operand, where: Any = where, total: Any = total) -> Any:
            for _ in range(repeats):
                total = engine.add(Mode.FULL, total, operand, where[0], operand, where[0], where[1])
            return total

        total = add()
        # Accumulators are donated: each round goes on with what the last one returned.
        seconds = []
        for _ in range(3):
            began = time.perf_counter()
            total = jax.block_until_ready(add(total=total))
            seconds.append(time.perf_counter() - began)
        gflops = 2 * n * n * width * repeats / min(seconds) / 1e9
        loading = min(_timed(lambda engine=engine, slab=slab: engine.load(slab)) for _ in range(5))
        found[stored] = {
            "gflops": gflops,
            "load_gb_per_second": slab.nbytes / loading / 1e9,
            **share(run, gflops, stored),
        }
    return {**found, "rows": n, "columns": width}


def share(run: Run, gflops: float, products: str) -> dict[str, float]:
    """The share of the peak that `peak` measured for the same products."""
    best = run.figures.get("peak", {}).get("gflops", {}).get(products)
    return {} if best is None else {"share_of_peak": gflops / best}


def _timed(work: Callable[[], Any]) -> float:
    started = time.perf_counter()
    jax.block_until_ready(work())
    return time.perf_counter() - started


def engines(run: Run) -> dict[str, Any]:
    """Both engines against float64 rows of `jax.jacrev` and against each other; bfloat16 against each other alone."""
    found = {}
    problems = {"mlp": testing.mlp(40, sizes=(48, 64, 32, 3)), "cnn": testing.cnn(24)}
    for net, problem in problems.items():
        truth = testing.dense_kernel(testing.dense_rows(problem))
        for layout in ("dense", "factored"):
            store = jacstore.build(problem, None, layout=layout, memory="1GB", stop=run.over)
            kernels = {engine: assembled(run, store, engine=engine) for engine in ("blas", "xla")}
            for engine, kernel in kernels.items():
                name = f"{net}_{layout}_{engine}"
                found[name] = run.check(f"{name} error", testing.kernel_error(kernel, truth))
        store = jacstore.build(problem, None, layout="dense", dtype="bfloat16", memory="1GB", stop=run.over)
        kernels = {engine: assembled(run, store, engine=engine) for engine in ("blas", "xla")}
        name = f"{net}_bfloat16_xla_to_blas"
        found[name] = run.check(f"{name} difference", testing.kernel_error(kernels["xla"], kernels["blas"]))
    return {"largest_errors": found}


def kinds(run: Run) -> dict[str, Any]:
    """Both engines in every mode for each kind of term, against float64 rows; leaves are named with their terms."""
    found: dict[str, float] = {}
    terms: dict[str, list[str]] = {}
    for name, problem in term_problems().items():
        store = jacstore.build(problem, None, layout="factored", memory="1GB", stop=run.over)
        terms[name] = ["+".join(leaf["terms"]) for leaf in store.info()["leaves"]]
        rows = testing.dense_rows(problem)
        for mode in ("full", "blocks", "trace"):
            truth = testing.dense_kernel(rows, mode=mode)
            for engine in ("blas", "xla"):
                kernel = assembled(run, store, engine=engine, mode=mode)
                error = testing.kernel_error(kernel, truth, mode=mode, rows=rows)
                found[f"{name}_{mode}_{engine}"] = run.check(f"{name} {mode} {engine} error", error)
    return {"largest_errors": found, "terms": terms}


def term_problems() -> dict[str, jacstore.Problem]:
    """Networks whose leaves take each form that a store has: products, convolutions, look-ups, gains, sums of them."""
    draw = np.random.default_rng(0)

    def normal(*shape: int) -> np.ndarray:
        return draw.standard_normal(shape, np.float32)

    mask = (draw.random((24, 40)) < 0.5).astype(np.float32)
    table, ids = {"table": normal(50, 12), "out": normal(12, 3)}, draw.integers(0, 50, (16, 6)).astype(np.int32)

    def masked(params: Any, x: Any) -> Any:
        return jnp.tanh(x @ (params["w"] * mask)) @ params["v"]

    def looked_up(params: Any, tokens: Any) -> Any:
        return jnp.tanh(params["table"][tokens].sum(0)) @ params["out"]

    def tied(params: Any, tokens: Any) -> Any:
        return (jnp.tanh(params["table"][tokens].mean(0)) @ params["table"].T)[:3]

    def scanned(params: Any, x: Any) -> Any:
        def step(state: Any, layer: Any) -> Any:
            return jnp.tanh(state @ layer), None

        return lax.scan(step, x, params["stack"])[0] @ params["out"]

    def problem(apply: Any, params: Any, inputs: Any) -> jacstore.Problem:
        return jacstore.Problem(apply=apply, params=params, inputs=inputs)

    return {
        "dot": testing.mlp(16, sizes=(48, 64, 32, 3)),
        "conv": testing.cnn(16),
        "gain": problem(masked, {"w": normal(24, 40) / 5, "v": normal(40, 3)}, normal(16, 24)),
        "index": problem(looked_up, table, ids),
        "sum": problem(tied, {"table": table["table"]}, ids),
        "scan": problem(scanned, {"stack": normal(4, 20, 20) / 5, "out": normal(20, 3)}, normal(16, 20)),
    }


def precisions(run: Run) -> dict[str, Any]:
    """Error and rate of the engine in each precision that the device has, from float32 rows and from factors."""
    problem = network(run, 64 if run.small else 2048)
    found: dict[str, Any] = {}
    for layout in ("factored",) if run.small else ("factored", "dense"):
        store = jacstore.build(problem, None, layout=layout, memory=memory(), stop=run.over)
        exact = assembled(run, store, precision="float64", engine="blas")
        scale = np.sqrt(np.diag(exact))
        for precision in PRECISIONS:
            try:
                kernel = jacstore.gram(store, memory=memory(), engine="xla", precision=precision, stop=run.over)
            except InvalidRequestError as error:
                found[f"{precision}_{layout}"] = {"refused": str(error)}
                continue
            gram = kernel.report
            off = np.abs(np.asarray(kernel.array.compute(scheduler="synchronous")) - exact)
            found[f"{precision}_{layout}"] = {
                "largest_error": float((off / scale[:, None] / scale).max()),
                "gflops": gram["flops"] / gram["seconds_total"] / 1e9,
            }
    return {"precisions": found}


def assembled(run: Run, store: jacstore.JacobianStore, **options: Any) -> np.ndarray:
    """The kernel as an array."""
    kernel = jacstore.gram(store, memory="2GB", stop=run.over, **options)
    return np.asarray(kernel.array.compute(scheduler="synchronous"))


def tf32(run: Run) -> dict[str, Any]:
    """Errors of float32 kernels, and of rows, that products of TF32 or 16-bit operands would spoil."""
    n, p = 64, 512
    draw = np.random.default_rng(0)
    # 1 + 2⁻¹² has more digits than TF32 and bfloat16 keep: both round it to 1, and no sum averages that out.
    spoiled = (draw.choice([-1.0, 1.0], (n, 1, p)) * (1 + 2.0**-12)).astype(np.float32)
    with jacstore.StoreWriter(None, {"weight": (p,)}, n, 1, memory="1GB") as writer:
        for start, stop in writer.missing:
            writer.write_unit(start, {"weight": spoiled[start:stop]})
    exact = testing.dense_kernel(spoiled.astype(np.float64))
    rows = jnp.asarray(spoiled[:, 0])
    default = np.asarray(jnp.matmul(rows, rows.T, precision=lax.Precision.DEFAULT), np.float64)
    found = {
        "dense": run.check(
            "dense kernel", testing.kernel_error(assembled(run, writer.store, engine="xla"), exact), SPOILED
        ),
        "default_precision": testing.kernel_error(default, exact),
        "fast": testing.kernel_error(assembled(run, writer.store, engine="xla", precision="fast"), exact),
    }
    # The same numbers as inputs and weights: forward, backward and factors all multiply them.
    signs = draw.choice([-1.0, 1.0], (48, 16)) * (1 + 2.0**-12)
    params = {"a": signs.astype(np.float32), "b": signs.T.astype(np.float32)}
    problem = jacstore.Problem(
        apply=lambda params, x: (x @ params["a"]) @ params["b"], params=params, inputs=spoiled[:, 0, :48], outputs="sum"
    )
    truth = testing.dense_rows(problem)
    for layout in ("dense", "factored"):
        store = jacstore.build(problem, None, layout=layout, memory="1GB")
        found[f"rows_{layout}"] = run.check(f"rows {layout}", testing.row_error(store.array.compute(), truth), SPOILED)
        kernel = assembled(run, store, engine="xla")
        error = testing.kernel_error(kernel, testing.dense_kernel(truth))
        found[f"kernel_{layout}"] = run.check(f"kernel {layout}", error, SPOILED)
    return {"largest_errors": found}


def factored(run: Run) -> dict[str, Any]:
    """The headline MLP, float32, factors in RAM: build and gram, and random entries against float64."""
    return throughput(run, network(run, 128 if run.small else 30_000), "float32", "auto", "float32")


def network(run: Run, examples: int) -> jacstore.Problem:
    """The headline MLP at normal inputs, or a narrow one."""
    problem = headline.problem("mlp", examples, None)
    if not run.small:
        return problem
    return replace(problem, params=headline.mlp_params(widths=(784, 48, 32, 10)))


def cnn(run: Run) -> dict[str, Any]:
    """The headline CNN, float32, factors in RAM."""
    return throughput(run, headline.problem("cnn", 16 if run.small else 8_192, None), "float32", "auto", "float32")


def dense(run: Run) -> dict[str, Any]:
    """Its rows in bfloat16 in RAM: as many of 12,000 examples as time and memory allow."""
    return throughput(run, that_fits(run, 12_000, "bfloat16"), "bfloat16", "dense", "bfloat16")


def float32(run: Run) -> dict[str, Any]:
    """Its rows in float32: products at full float32 precision."""
    return throughput(run, that_fits(run, 4_000, "float32"), "float32", "dense", "float32")


def that_fits(run: Run, wanted: int, dtype: str) -> jacstore.Problem:
    """The headline MLP on as many examples as half the memory holds and a small build says there is time for."""
    first = network(run, 64 if run.small else 256)
    if run.small:
        return first
    began = time.perf_counter()
    store = jacstore.build(first, None, dtype=dtype, layout="dense", memory=memory(), stop=run.over)
    report, n = store.report, len(first.inputs)
    each = (report["seconds_device"] + report["seconds_write"]) / n
    # Half of the time for the build; the gram reads the same bytes once and its products are quick.
    by_time = int(max(0.0, run.left() / 2 - (time.perf_counter() - began)) / each)
    by_memory = memory() // 2 // (store.n_parameters * (2 if dtype == "bfloat16" else 4))
    examples = max(n, min(wanted, by_time, by_memory) // 256 * 256 if min(by_time, by_memory) < wanted else wanted)
    run.note(f"{examples} examples ({by_time} by time, {by_memory} by memory)")
    return network(run, examples)


def memory() -> int:
    """Bytes that a section may take."""
    return machine.available_memory() * 4 // 5


def throughput(run: Run, problem: jacstore.Problem, dtype: str, layout: str, products: str) -> dict[str, Any]:
    """Rates of build and gram, shares of the measured peak, and what overlapped."""
    budget, begun = memory(), []

    def note_start(event: Any) -> None:
        if isinstance(event, Started):
            begun.append(time.perf_counter())

    store = jacstore.build(problem, None, dtype=dtype, layout=layout, memory=budget, stop=run.over, listener=note_start)
    build = store.report
    wall = time.perf_counter() - begun[0] - build["seconds_compile"]
    run.note(f"built {store.n_examples} examples in {wall:.1f} s")
    kernel = jacstore.gram(store, memory=budget, engine="xla", stop=run.over)
    gram = kernel.report
    device, write = build["seconds_device"], build["seconds_write"]
    gflops = gram["flops"] / gram["seconds_total"] / 1e9
    error = entry_error(problem, kernel)
    limit = TOLERANCE if dtype == "float32" else 2.0**-8
    return {
        "examples": store.n_examples,
        "parameters": store.n_parameters,
        "bytes_stored": build["bytes_stored"],
        "build_seconds": wall,
        "build_seconds_compile": build["seconds_compile"],
        "build_seconds_device": device,
        "build_seconds_write": write,
        "build_examples_per_second": store.n_examples / wall,
        "build_gb_per_second": build["bytes_stored"] / wall / 1e9,
        "build_batch": build["batch_size"],
        # 1: the shorter of the two was wholly hidden behind the other; 0: one after the other.
        "build_hidden": max(0.0, min(1.0, (device + write - wall) / max(min(device, write), 1e-9))),
        "gram_seconds": gram["seconds_total"],
        "gram_seconds_read": gram["seconds_read"],
        "gram_seconds_compute": gram["seconds_compute"],
        "gram_flops": gram["flops"],
        # Of the whole gram: on a device products are waited for only when tiles are fetched.
        "gram_gflops": gflops,
        **{f"gram_{key}": value for key, value in share(run, gflops, products).items()},
        "gram_schedule": gram["schedule"],
        "passes": gram["passes"],
        "gram_share_waiting_for_reads": gram["seconds_read"] / gram["seconds_total"],
        "largest_error": run.check("entries against float64", error, limit),
    }


def entry_error(problem: jacstore.Problem, kernel: jacstore.Kernel) -> float:
    """The largest of some random entries' errors against rows of `jax.grad` in float64, ReLUs at their kink apart."""
    worst, _kinks = headline.largest_error(problem, kernel, CHECKED)
    return worst


# -------------------------------------------------------------------------------------------------------------- command


def main(arguments: list[str] | None = None) -> int:
    """Run all sections; prints the object and returns the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__.split("\n")[0],
        epilog=__doc__.partition("\n\n")[2] + "\n    " + WHEELS.replace(" ", "\n    "),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--minutes", type=float, default=8.0, help="the whole run ends within this time")
    parser.add_argument("--small", action="store_true", help="the same at sizes for a CPU, under a minute")
    given = parser.parse_args(arguments)
    run = Run(given.minutes * 60, given.small)
    timer = run.watch()
    where = jax.devices()[0]
    stats = where.memory_stats() or {}
    run.figures |= {
        "device": where.device_kind,
        "platform": where.platform,
        "device_bytes": stats.get("bytes_limit", 0),
        "versions": {"python": sys.version.split()[0], "jax": jax.__version__, "numpy": np.__version__},
        "jacstore": jacstore.__version__,
        "cores": machine.cores(),
    }
    run.do("peak", peak, 5, 40)
    run.do("arithmetic", arithmetic, 5, 30)
    run.do("engines", engines, 10, 60)
    run.do("kinds", kinds, 10, 60)
    run.do("tf32", tf32, 10, 40)
    run.do("precisions", precisions, 15, 60)
    run.do("factored", factored, 15, 70)
    run.do("cnn", cnn, 20, 110)
    run.do("dense", dense, 20, 110)
    run.do("float32", float32, 20, 60)
    timer.cancel()
    return run.say()


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
