"""Find up to which dimension products with a Hessian and its inverse are possible within a memory, and how fast.

For the loss `L(x) = sum (2 x_i + 0.5)²` of f(x) = 2 x + 0.5, linear, so that the generalised Gauss-Newton matrix is
the Hessian, 8 I. Products: with the explicit Hessian, by a Hessian-vector product (jvp of the gradient, HVP), by a
Gauss-Newton-vector product (jvp, then vjp, GVP), and by a GVP from a store of f's Jacobian. Inverse products: an
explicit solve, conjugate gradients on HVP, GVP and the store, and the dual solve from the kernel. J is D x D and stored
as rows, so the store grows with D² although each row has one number: nothing here is what a store is for.

Every way runs in a child process of its own that may not allocate more than the limit; the first dimension at which it
cannot, or takes longer than --seconds, is recorded as where it fails, and why.

    python pipelines/hessian_products.py --largest 1e8 --memory 8GB
"""

from __future__ import annotations

import argparse
import csv
import gc
import json
import math
import os
import resource
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

DAMPING = 1.0  # what is added to the Hessian before it is inverted: alpha of the dual solve
PRODUCTS = ("explicit", "HVP", "GVP", "store")
INVERSES = ("explicit solve", "CG with HVP", "CG with GVP", "CG with the store", "dual solve")
TOLERANCE = 1e-4  # relative, float32
# What errors of want of memory say, whoever raises them.
WANTING = ("memory", "alloc", "resource_exhausted", "resource temporarily unavailable", "mmap")
OK, MEMORY, TIME = "ok", "out of memory", "out of time"


@dataclass(frozen=True, kw_only=True)
class Row:
    """One way at one dimension: seconds of a product, of its preparation, and the error, or why it failed."""

    way: str
    inverse: bool
    dimension: int
    outcome: str
    seconds: float
    seconds_before: float
    error: float


# ---- what a child does ----


def loss(x: Any) -> Any:
    """`sum (2 x_i + 0.5)²`."""
    return (function(x) ** 2).sum()


def function(x: Any) -> Any:
    """The linear map whose outputs the loss squares."""
    return 2 * x + 0.5


def hvp(x: Any, v: Any) -> Any:
    """The Hessian times v."""
    import jax

    return jax.jvp(jax.grad(loss), (x,), (v,))[1]


def gvp(x: Any, v: Any) -> Any:
    """`Jᵀ H_out J v` with `H_out = 2 I`, the Hessian of the sum of squares in the outputs."""
    import jax

    _, pushed = jax.jvp(function, (x,), (v,))
    (pulled,) = jax.vjp(function, x)[1](2 * pushed)
    return pulled


def ways(name: str, inverse: bool, d: int, folder: str) -> Callable[[np.ndarray], Any]:
    """Prepare a way; the result maps a vector `(D,)` to a product or a solution."""
    import jax
    import jax.numpy as jnp

    x = jnp.linspace(-1, 1, d, dtype=jnp.float32)
    if name in ("explicit", "explicit solve"):
        matrix = jax.jit(jax.hessian(loss))(x).block_until_ready()
        if not inverse:
            multiply = jax.jit(jnp.matmul)
            return lambda v: multiply(matrix, v).block_until_ready()
        solve = jax.jit(lambda h, v: jnp.linalg.solve(h + DAMPING * jnp.eye(d, dtype=h.dtype), v))
        return lambda v: solve(matrix, v).block_until_ready()
    if name in ("HVP", "GVP", "CG with HVP", "CG with GVP"):
        product = hvp if "HVP" in name else gvp
        if not inverse:
            compiled = jax.jit(product)
            return lambda v: compiled(x, v).block_until_ready()
        cg = jax.scipy.sparse.linalg.cg
        solved = jax.jit(lambda x, v: cg(lambda w: product(x, w) + DAMPING * w, v, tol=1e-6, maxiter=50)[0])
        return lambda v: solved(x, v).block_until_ready()
    return from_store(name, d, folder)


def from_store(name: str, d: int, folder: str) -> Callable[[np.ndarray], Any]:
    """Ways with the Jacobian of f in a store: one example with D outputs; `H_out = 2 I` doubles `JᵀJ`."""
    from scipy.sparse.linalg import LinearOperator, cg

    import jacstore

    if 4 * d * d > _budget():
        raise MemoryError(f"rows of {d:,} x {d:,} take {4 * d * d / 1e9:,.0f} GB")
    problem = jacstore.Problem(
        apply=lambda p, shift: 2 * p + shift,
        params=np.linspace(-1, 1, d, dtype=np.float32),
        inputs=np.full((1,), 0.5, np.float32),
    )
    store = jacstore.build(problem, Path(folder) / "run.jac", memory=_budget())
    jacobian = jacstore.operator(store, memory=_budget())
    ggn = jacobian.ggn()
    if name == "store":
        return lambda v: 2 * ggn.matvec(v)
    if name == "CG with the store":
        damped = LinearOperator((d, d), lambda v: 2 * ggn.matvec(v) + DAMPING * v, dtype=np.float64)
        return lambda v: cg(damped, v, rtol=1e-6, maxiter=50)[0]
    # (2 JᵀJ + a I)⁻¹ v = (v - Jᵀ (G + a/2 I)⁻¹ J v) / a
    kernel = jacstore.gram(store, Path(folder) / "run.ntk", memory=_budget())
    factor = jacstore.KernelFactor(kernel, DAMPING / 2, memory=_budget(), keep=False)
    return lambda v: (v - jacobian.rmatvec(factor.solve(jacobian.matvec(v)))) / DAMPING


def _budget() -> int:
    """Half of what the limit leaves of the address space: the rest is for threads' stacks and the allocator."""
    return max(1, (resource.getrlimit(resource.RLIMIT_AS)[0] - _allocated()) // 2)


def _allocated() -> int:
    """Bytes of address space in use."""
    return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()


def child(name: str, inverse: bool, dimensions: list[int], memory: int, seconds: float, folder: str) -> None:
    """Run one way at rising dimensions under a limit on what is allocated beyond the imports; print each result."""
    import jax
    import jax.numpy as jnp

    jax.block_until_ready(jax.jit(jnp.cos)(jnp.ones(1)))
    used = _allocated()
    resource.setrlimit(resource.RLIMIT_AS, (used + memory, used + memory))
    for dimension in dimensions:
        # Not caught: it ends the process even inside a library.
        signal.setitimer(signal.ITIMER_REAL, seconds)
        try:
            with tempfile.TemporaryDirectory(dir=folder) as place:
                found = measured(partial(ways, name, inverse, dimension, place), inverse, dimension)
        except Exception as error:
            text = " ".join(str(error).split())
            wanting = isinstance(error, MemoryError) or any(word in text.lower() for word in WANTING)
            if not wanting:
                raise
            found = {"outcome": MEMORY, "why": text[:200]}
        print(json.dumps(found), flush=True)
        if found["outcome"] != OK:
            return
        jax.clear_caches()
        gc.collect()


def measured(prepare: Callable[[], Callable[[np.ndarray], Any]], inverse: bool, d: int) -> dict[str, Any]:
    """Prepare a way, run it twice, time the second run, and compare with the closed form: 8 v, or v / (8 + damping)."""
    v = np.random.default_rng(0).standard_normal(d, np.float32)
    started = time.perf_counter()
    run = prepare()
    run(v)
    before = time.perf_counter() - started
    started = time.perf_counter()
    found = np.asarray(run(v))
    seconds = time.perf_counter() - started
    scale = 1 / (8 + DAMPING) if inverse else 8
    # In pieces: the check takes no memory of its own.
    gaps = [float(np.square(found[a : a + 2**20] - scale * v[a : a + 2**20]).sum()) for a in range(0, d, 2**20)]
    norms = [float(np.square(v[a : a + 2**20]).sum()) for a in range(0, d, 2**20)]
    error = math.sqrt(sum(gaps) / sum(norms)) / scale
    return {"outcome": OK, "seconds": seconds, "seconds_before": before, "error": error}


# ---- what the parent does ----


def attempt(name: str, inverse: bool, dimensions: list[int], options: argparse.Namespace) -> list[tuple[Row, str]]:
    """One way at rising dimensions in a child process; a crash for want of memory counts as such."""
    with tempfile.TemporaryDirectory(prefix="hessian-") as folder:
        asked = [name, inverse, dimensions, options.memory_bytes, options.seconds, folder]
        command = [sys.executable, str(Path(__file__).resolve()), "--child", json.dumps(asked)]
        # One arena for all threads: each further one would reserve 64 MB of address space.
        environment = {**os.environ, "MALLOC_ARENA_MAX": "1"}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    found: list[dict[str, Any]] = [json.loads(line) for line in done.stdout.splitlines()]
    if done.returncode == -signal.SIGALRM:
        found.append({"outcome": TIME, "why": f"more than {options.seconds:.0f} s"})
    elif done.returncode:
        last = (done.stderr.strip().splitlines() or [""])[-1]
        if done.returncode > 0 and not any(word in done.stderr.lower() for word in WANTING):
            raise SystemExit(f"{name} failed: {last}")
        found.append({"outcome": MEMORY, "why": f"the process ended with {done.returncode}: {last[:160]}"})
    results = []
    for dimension, one in zip(dimensions, found, strict=False):
        numbers = {key: one.get(key, math.nan) for key in ("seconds", "seconds_before", "error")}
        row = Row(way=name, inverse=inverse, dimension=dimension, outcome=one["outcome"], **numbers)
        results.append((row, one.get("why", "")))
    return results


def main(argv: list[str] | None = None) -> list[Row]:
    """Run all ways until each fails; print a table; write CSV and figure."""
    parser = argparse.ArgumentParser(description="Products with a Hessian and its inverse, until they fail.")
    parser.add_argument("--largest", type=float, default=1e8, metavar="D", help="dimension, up to 1e9 (%(default)g)")
    parser.add_argument("--memory", default="8GB", metavar="SIZE", help="a child may allocate (%(default)s)")
    parser.add_argument("--seconds", type=float, default=60, metavar="S", help="a child may take (%(default)g)")
    parser.add_argument("--out", type=Path, default=Path("hessian-run"), metavar="DIR", help="(%(default)s)")
    parser.add_argument("--ways", nargs="+", choices=PRODUCTS + INVERSES, metavar="WAY", help="only these")
    parser.add_argument("--small", action="store_true", help="up to 100, to try that it runs")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.child:
        child(*json.loads(options.child))
        return []
    from jacstore.base.machine import parse_size

    if options.small:
        options.largest = min(options.largest, 1e2)
    options.memory_bytes = parse_size(options.memory, "--memory")
    options.out.mkdir(parents=True, exist_ok=True)
    dimensions = [10**power for power in range(1, 10) if 10**power <= options.largest]
    if not dimensions:
        raise SystemExit(f"--largest {options.largest:g}: give at least 10")
    rows = []
    for inverse, names in ((False, PRODUCTS), (True, INVERSES)):
        for name in names:
            if options.ways and name not in options.ways:
                continue
            for row, why in attempt(name, inverse, dimensions, options):
                rows.append(row)
                said = f"{row.seconds:.2g} s, error {row.error:.1e}" if row.outcome == OK else f"{row.outcome}: {why}"
                print(f"  {name}, D = {row.dimension:,}: {said}", flush=True)
    report(rows, dimensions, options)
    return rows


def report(rows: list[Row], dimensions: list[int], options: argparse.Namespace) -> None:
    """The table, the CSV, the figure, and whether Gauss-Newton and Hessian agree."""
    from common import table

    for inverse, known in ((False, PRODUCTS), (True, INVERSES)):
        names = [name for name in known if any(row.way == name for row in rows)]
        lines: list[tuple[str, ...]] = [("D", *names)]
        if not names:
            continue
        by_place = {(row.way, row.dimension): row for row in rows if row.inverse == inverse}
        for d in dimensions:
            cells = []
            for name in names:
                row = by_place.get((name, d))
                cells.append("-" if row is None else f"{row.seconds:.2g}" if row.outcome == OK else row.outcome)
            lines.append((f"{d:,}", *cells))
        kind = "inverse products" if inverse else "products"
        table(f"Seconds of {kind}, {options.memory} for each process", lines)
    worst = {
        row.way: max(r.error for r in rows if r.way == row.way and r.outcome == OK) for row in rows if row.error >= 0
    }
    table("Largest relative error against the closed form", [(way, f"{error:.1e}") for way, error in worst.items()])
    if max(worst.values()) > TOLERANCE:
        raise SystemExit(f"a way differs from the closed form by {max(worst.values()):.1e}")
    if {"HVP", "GVP"} <= worst.keys():
        print(f"\nHessian = GGN: HVP and GVP agree with 8 v to {max(worst['HVP'], worst['GVP']):.1e}")
    path = options.out / "hessian-products.csv"
    with open(path, "w", newline="") as file:
        writer = csv.DictWriter(file, list(asdict(rows[0])))
        writer.writeheader()
        writer.writerows(asdict(row) for row in rows)
    draw(options.out / "hessian-products.png", rows, options.memory)
    print(f"csv      {path}\nfigure   {options.out / 'hessian-products.png'}")


def draw(path: Path, rows: list[Row], memory: str) -> None:
    """Seconds over dimension; a cross marks where a way fails."""
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context({"font.size": 12}):
        drawing = Figure(figsize=(14, 5.6), layout="constrained")
        for axes, inverse, names in zip(drawing.subplots(1, 2), (False, True), (PRODUCTS, INVERSES), strict=True):
            for name, marker in zip(names, "osd^v", strict=False):
                mine = [row for row in rows if row.way == name and row.inverse == inverse]
                if not mine:
                    continue
                done = [row for row in mine if row.outcome == OK]
                (line,) = axes.loglog(
                    [row.dimension for row in done], [row.seconds for row in done], marker=marker, label=name
                )
                failed = [row.dimension for row in mine if row.outcome != OK]
                if failed and done:
                    axes.plot(failed, [done[-1].seconds], "x", color=line.get_color(), markersize=11, mew=3)
            axes.set_xlabel("dimension D")
            axes.set_ylabel("seconds, second run")
            axes.set_title("Inverse products" if inverse else "Products")
            axes.grid(True, which="major", alpha=0.3)
            if axes.lines:
                axes.legend(fontsize=10)
        drawing.suptitle(f"Hessian of sum (2 x + 0.5)²; crosses: fails within {memory} or its time")
        drawing.savefig(path, dpi=120)


if __name__ == "__main__":
    from common import leave

    leave(main)
