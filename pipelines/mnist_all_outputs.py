"""Assemble kernels of wide networks with all ten outputs, on MNIST or generated images: table, CSV and figure.

Dense networks of two hidden layers of 10 to 10,000 units, before training: the kernel's leading eigenvalues and the
test accuracy of kernel regression. A row of the widest has 108 million numbers, its factors 200 thousand for all ten
outputs. The kernel of N examples has 10 N rows: it is stored and factorized where that fits, by default within the
memory; beyond, its tiles are computed from the store when they are needed, and conjugate gradients multiply by J and
Jᵀ. Without --examples there are as many as can still be factorized.

    python pipelines/mnist_all_outputs.py --data mnist.npz --memory 4GB
"""

from __future__ import annotations

import argparse
import csv
import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import matplotlib
import numpy as np
from matplotlib.figure import Figure

import common
import jacstore
from jacstore.base.machine import format_size, parse_size
from jacstore.inference.linalg.cholesky_eigh import bytes_needed
from mnist import mnist_or_generated

WIDTHS = (10, 100, 1000, 10_000)
OUTPUTS = 10
RIDGE = 1e-3  # of the mean of the kernel's diagonal
TILE = 128  # examples a side of a tile that is not stored
TOLERANCE = 1e-3  # of conjugate gradients; classes are decided long before
PIXELS, MOST = 784, 60_000


@dataclass(frozen=True, kw_only=True)
class Row:
    """One network: sizes, how its kernel was had, seconds, and what the kernel says."""

    width: int
    parameters: int
    examples: int
    kernel: str  # stored or lazy
    bytes_store: int
    bytes_rows: int
    bytes_kernel: int
    seconds_build: float
    seconds_kernel: float
    seconds_spectrum: float
    seconds_regression: float
    largest_eigenvalue: float
    share_of_trace: float  # that the leading eigenvalues have
    test_accuracy: float


Product = Callable[[np.ndarray], np.ndarray]


def main(argv: list[str] | None = None) -> list[Row]:
    """Run all widths and return a row for each."""
    options = parse(argv)
    data = mnist_or_generated(options.data, options.examples, options.test_examples)
    options.out.mkdir(parents=True, exist_ok=True)
    rows, spectra = [], {}
    for width in options.widths:
        row, spectra[width] = network_of(width, data, options)
        rows.append(row)
        print(f"width {width:,}: kernel {row.kernel}, {row.test_accuracy:.1%} of the test examples right", flush=True)
    report(rows, spectra, options)
    return rows


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Kernels of wide dense networks with all ten outputs.")
    parser.add_argument("--data", type=Path, metavar="PATH", help="npz with x_train, y_train, x_test, y_test")
    parser.add_argument("--widths", type=int, nargs="+", default=list(WIDTHS), metavar="W", help="of hidden layers")
    parser.add_argument("--examples", type=int, metavar="N", help="to train on (as many as can be factorized)")
    parser.add_argument("--test-examples", type=int, default=1000, metavar="M", help="to test on (%(default)s)")
    parser.add_argument("--memory", default="2GB", metavar="SIZE", help="for every stage (%(default)s)")
    parser.add_argument(
        "--largest-kernel", metavar="SIZE", help="above which a kernel is not stored (what the memory factorizes)"
    )
    parser.add_argument("--out", type=Path, default=Path("all-outputs-run"), metavar="DIR", help="(%(default)s)")
    parser.add_argument("--small", action="store_true", help="tiny sizes, to try that it runs")
    options = parser.parse_args(argv)
    options.memory_bytes = parse_size(options.memory, "--memory")
    largest = parse_size(options.largest_kernel, "--largest-kernel") if options.largest_kernel else None
    options.largest = min(options.memory_bytes, largest or options.memory_bytes)
    if options.examples is None:
        most = min(MOST, math.isqrt(options.memory_bytes // 8) // OUTPUTS)
        fits = (n for n in range(most, 1, -1) if bytes_needed("cholesky", n * OUTPUTS) <= options.memory_bytes)
        options.examples = next(fits, 1)
    if options.small:
        options.examples, options.test_examples = min(options.examples, 30), min(options.test_examples, 20)
        options.widths = [min(width, 30) for width in options.widths[:2]]
    if min(options.widths) < 1 or options.examples < 1:
        raise SystemExit(f"--widths {options.widths}, --examples {options.examples}: give at least 1")
    return options


def initial(width: int, seed: int = 0) -> common.Params:
    """Parameters of the dense layers, scaled for rectified inputs, in float32 throughout: 100 million of them or so."""
    rng = np.random.default_rng(seed)
    sizes = (PIXELS, width, width, OUTPUTS)
    return {
        f"dense{n}": {
            "weight": rng.standard_normal((a, b), np.float32) * np.float32(math.sqrt(2 / a)),
            "bias": np.zeros(b, np.float32),
        }
        for n, (a, b) in enumerate(itertools.pairwise(sizes))
    }


def apply(params: common.Params, image: jax.Array) -> jax.Array:
    """Map one image `(28, 28)` to ten outputs."""
    x = image.reshape(-1)
    for n in range(2):
        x = jax.nn.relu(common.dense(params[f"dense{n}"], x))
    return common.dense(params["dense2"], x)


def network_of(width: int, data: common.Data, options: argparse.Namespace) -> tuple[Row, np.ndarray]:
    """Build the stores of one network, its kernel in one way or the other, and ask it; with the eigenvalues."""
    out, times, params = options.out / f"width-{width}", common.Times(), initial(width)
    out.mkdir(parents=True, exist_ok=True)
    with times.stage("build"):
        store, test_store = (
            jacstore.build(
                jacstore.Problem(apply=apply, params=params, inputs=inputs), out / name, memory=options.memory
            )
            for name, inputs in (("train.jac", data.train), ("test.jac", data.test))
        )
    kept = bytes_needed("cholesky", store.n_examples * OUTPUTS) <= options.largest
    way = stored if kept else lazy
    eigenvalues, trace, outputs = way(
        store, test_store, common.one_hot(data.train_labels, OUTPUTS), out, times, options
    )
    row = Row(
        width=width,
        parameters=store.n_parameters,
        examples=store.n_examples,
        kernel="stored" if kept else "lazy",
        bytes_store=common.bytes_on_disk(out / "train.jac"),
        bytes_rows=4 * store.n_examples * OUTPUTS * store.n_parameters,
        bytes_kernel=common.bytes_on_disk(out / "train.ntk") if kept else 0,
        **{f"seconds_{name}": times.seconds.get(name, 0.0) for name in ("build", "kernel", "spectrum", "regression")},
        largest_eigenvalue=float(eigenvalues[0]),
        share_of_trace=float(eigenvalues.sum() / trace),
        test_accuracy=common.accuracy(outputs, data.test_labels),
    )
    return row, eigenvalues / trace


Answer = tuple[np.ndarray, float, np.ndarray]  # leading eigenvalues, trace, predictions (M, 10)


def stored(
    store: Any, test_store: Any, targets: np.ndarray, out: Path, times: common.Times, options: argparse.Namespace
) -> Answer:
    """With both kernels on disk and a Cholesky factor."""
    with times.stage("kernel"):
        kernel = jacstore.gram(store, out=out / "train.ntk", memory=options.memory)
        cross = jacstore.gram(test_store, store, out=out / "test.ntk", memory=options.memory)
    with times.stage("spectrum"):
        eigenvalues, _ = common.leading_eigenpairs(lambda block: (kernel.array @ block).compute(), kernel.shape[0])
    with times.stage("regression"):
        trace = float(store.norms.sum())
        alpha = RIDGE * trace / kernel.shape[0]
        model = jacstore.KernelRidge(alpha, memory=options.memory, keep=False).fit(kernel, targets)
        outputs = model.predict(cross)
    return eigenvalues, trace, outputs


def lazy(
    store: Any, test_store: Any, targets: np.ndarray, out: Path, times: common.Times, options: argparse.Namespace
) -> Answer:
    """With nothing but the stores: tiles for products with many columns, J and Jᵀ for products with one."""
    rows = targets.size
    with times.stage("spectrum"):
        kernel = jacstore.lazy_kernel(store, tile=TILE)
        eigenvalues, vectors = common.leading_eigenpairs(lambda block: (kernel @ block).compute(), rows)
    with times.stage("regression"):
        trace = float(store.norms.sum())
        alpha = RIDGE * trace / rows
        product = jacstore.operator(store, memory=options.memory, precision="float64").gram()
        precondition = deflated(eigenvalues, vectors, alpha)
        found = jacstore.block_cg(
            product, targets.reshape(rows, 1), alpha=alpha, tolerance=TOLERANCE, preconditioner=precondition
        )
        print(f"  conjugate gradients: {found.reason}")
        cross = jacstore.lazy_kernel(test_store, other=store, tile=TILE)
        outputs = (cross @ found.value).compute().reshape(-1, OUTPUTS)
    return eigenvalues, trace, outputs


def deflated(eigenvalues: np.ndarray, vectors: np.ndarray, alpha: float) -> Product:
    """About the inverse of `G + alpha I`, times a constant: leading directions are brought down to the last of them."""
    scale = (eigenvalues[-1] + alpha) / (eigenvalues + alpha) - 1
    return lambda block: block + vectors @ (scale[:, None] * (vectors.T @ block))


def report(rows: list[Row], spectra: dict[int, np.ndarray], options: argparse.Namespace) -> None:
    """The table, both CSV files, the figure."""
    first, stem = rows[0], options.out / "mnist-all-outputs"
    lines: list[tuple[str, ...]] = [
        ("width", "parameters", "store", "as rows", "kernel", "on disk", "build", "gram", "spectrum", "regression")
    ]
    for row in rows:
        sizes = [format_size(row.bytes_store), format_size(row.bytes_rows)]
        took = (row.seconds_build, row.seconds_kernel, row.seconds_spectrum, row.seconds_regression)
        disk = format_size(row.bytes_kernel) if row.bytes_kernel else "-"
        seconds = [f"{s:.1f} s" if s else "-" for s in took]
        lines.append((f"{row.width:,}", f"{row.parameters:,}", *sizes, row.kernel, disk, *seconds))
    common.table(f"{first.examples:,} examples x {OUTPUTS} outputs: {first.examples * OUTPUTS:,} rows", lines)
    lines = [("width", "largest eigenvalue", f"first {common.LEADING} of the trace", "test accuracy")]
    lines += [
        (f"{r.width:,}", f"{r.largest_eigenvalue:.4g}", f"{r.share_of_trace:.1%}", f"{r.test_accuracy:.1%}")
        for r in rows
    ]
    common.table(f"What the kernel says; ridge {RIDGE:g} of the mean diagonal", lines)
    common.write_csv(stem.with_suffix(".csv"), rows)
    spectrum = stem.with_name(f"{stem.name}-spectrum.csv")
    with open(spectrum, "w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(("width", "index", "eigenvalue_over_trace"))
        writer.writerows((w, n + 1, value) for w, values in spectra.items() for n, value in enumerate(values))
    draw(stem.with_suffix(".png"), rows, spectra)
    print(f"\ncsv      {stem.with_suffix('.csv')}\ncsv      {spectrum}\nfigure   {stem.with_suffix('.png')}")


def draw(path: Path, rows: list[Row], spectra: dict[int, np.ndarray]) -> None:
    """Spectra, test accuracy and bytes over the width."""
    widths = [row.width for row in rows]
    with matplotlib.rc_context({"font.size": 12}):
        drawing = Figure(figsize=(18, 5.6), layout="constrained")
        left, middle, right = drawing.subplots(1, 3)
        for width, values in spectra.items():
            shown = values[values > 0]
            left.loglog(np.arange(1, len(shown) + 1), shown, marker="o", markersize=3, label=f"width {width:,}")
        left.set_xlabel("index of the eigenvalue")
        left.set_ylabel("eigenvalue / trace")
        left.set_title("Leading eigenvalues")
        left.legend()
        middle.semilogx(widths, [100 * row.test_accuracy for row in rows], marker="o")
        middle.set_ylabel("test accuracy, %")
        middle.set_title(f"Kernel regression on {rows[0].examples:,} examples")
        series = {"rows, were they float32": "bytes_rows", "store": "bytes_store", "kernel on disk": "bytes_kernel"}
        for (label, field), marker in zip(series.items(), "^os", strict=True):
            sizes = [getattr(row, field) or math.nan for row in rows]
            if not all(map(math.isnan, sizes)):
                right.loglog(widths, [size / 1e6 for size in sizes], marker=marker, label=label)
        right.set_ylabel("MB")
        right.set_title("Bytes of the training examples")
        right.legend()
        for axes in (middle, right):
            axes.set_xlabel("width of the two hidden layers, units")
        for axes in (left, middle, right):
            axes.grid(True, which="major", alpha=0.3)
        drawing.suptitle("Neural tangent kernels before training, all ten outputs")
        drawing.savefig(path, dpi=110)


if __name__ == "__main__":
    common.leave(main)
