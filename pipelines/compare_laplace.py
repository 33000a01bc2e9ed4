"""Compare predictive variances of jacstore and laplace-torch on MNIST: a table, a CSV file and a figure.

The same trained network, examples and prior precision; variances of the outputs at test examples under the Laplace
posterior for a Gaussian likelihood (Immer et al. 2021, arXiv:2008.08400). jacstore keeps the Jacobian on disk and
factorizes its kernel over examples, or the normal matrix `Jᵀ J + alpha I` over parameters; laplace-torch (`full`)
factorizes that matrix too. Every run is a process of its own: seconds without imports, and the largest resident size.
laplace-torch 0.3's functional form (`gp`) is left out: with several outputs its variances come out negative.

    python pipelines/compare_laplace.py --data mnist.npz --laplace /path/to/python

That interpreter needs `pip install laplace-torch torch numpy`.
"""

from __future__ import annotations

import argparse
import csv
import itertools
import json
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import jax
import matplotlib
import numpy as np
import scipy.linalg
from matplotlib.figure import Figure

import common
import jacstore
from jacstore.base.machine import format_size
from mnist import mnist
from peers.serve import forget_peak, peak_bytes

ALPHA = 1.0
WIDTHS = (784, 8, 8, 10)
EXAMPLES = (100, 200, 400, 800, 1600)
OTHERS = 100
WAYS = ("kernel", "normal", "laplace-torch")


def main(argv: list[str] | None = None) -> list[dict[str, Any]]:
    """Print the table and return its rows."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--data", type=Path, required=True, metavar="PATH", help="npz as for mnist.py")
    parser.add_argument("--laplace", metavar="PYTHON", help="interpreter with laplace-torch; without it jacstore alone")
    parser.add_argument("--examples", type=int, nargs="+", default=list(EXAMPLES), metavar="N", help="(%(default)s)")
    parser.add_argument("--others", type=int, default=OTHERS, metavar="M", help="test examples (%(default)s)")
    parser.add_argument("--alpha", type=float, default=ALPHA, help="prior precision (%(default)s)")
    parser.add_argument("--patience", type=float, default=600, metavar="S", help="seconds for a run (%(default)s)")
    parser.add_argument("--memory", default="4GB", metavar="SIZE", help="of jacstore (%(default)s)")
    parser.add_argument("--out", type=Path, default=Path("laplace-run"), metavar="DIR", help="(%(default)s)")
    parser.add_argument("--run", nargs=3, metavar=("WAY", "NPZ", "NPY"), help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.run:
        print(json.dumps(with_jacstore(*options.run, options.memory)))
        return []
    options.out.mkdir(parents=True, exist_ok=True)
    data = mnist(options.data, max(options.examples), options.others)
    params = trained(data)
    rows = []
    ways = WAYS if options.laplace else WAYS[:2]
    with tempfile.TemporaryDirectory() as folder:
        for n in options.examples:
            given = Path(folder) / "given.npz"
            save(given, params, data.train[:n], data.train_labels[:n], options.alpha, others=flat(data.test))
            found = {way: measured(way, given, Path(folder) / f"{way}.npy", options) for way in ways}
            rows += [{"examples": n, "way": way, **facts} for way, facts in compared(found).items()]
            print(f"  N = {n:,} done", flush=True)
    report(rows, options.out)
    return rows


def trained(data: common.Data) -> common.Params:
    """A small dense network after some epochs."""
    rng = np.random.default_rng(0)
    params = {f"dense{i}": common.dense_init(rng, a, b) for i, (a, b) in enumerate(itertools.pairwise(WIDTHS))}
    settings = common.Settings(data="mnist", net="laplace", examples=len(data.train), epochs=20)
    return jax.tree_util.tree_map(np.asarray, common.train(params, apply, data, settings))


def apply(params: common.Params, image: jax.Array) -> jax.Array:
    """Outputs `(10,)` of one image."""
    x = image.reshape(-1)
    for n in range(len(params) - 1):
        x = jax.nn.relu(common.dense(params[f"dense{n}"], x))
    return common.dense(params[f"dense{len(params) - 1}"], x)


def save(path: Path, params: common.Params, images: np.ndarray, labels: np.ndarray, alpha: float, **more: Any) -> None:
    """What every way is given: parameters by layer and leaf, inputs, targets, prior precision, and `more`."""
    leaves = {f"{layer}/{name}": leaf for layer, leaves in params.items() for name, leaf in leaves.items()}
    targets = common.one_hot(labels, 10).astype(np.float32)
    np.savez(path, inputs=flat(images), targets=targets, alpha=alpha, **leaves, **more)


def flat(images: np.ndarray) -> np.ndarray:
    """Images `(N, ...)` as vectors."""
    return images.reshape(len(images), -1)


def with_jacstore(way: str, given: str, variances: str, memory: str) -> dict[str, Any]:
    """Variances from a store on disk, by the kernel over examples or the normal matrix over parameters."""
    with np.load(given) as file:
        arrays = dict(file)
    params: common.Params = {}
    for name, leaf in arrays.items():
        if "/" in name:
            layer, kind = name.split("/")
            params.setdefault(layer, {})[kind] = leaf
    folder = Path(tempfile.mkdtemp(prefix="jacstore-laplace-"))
    forget_peak()
    started = time.perf_counter()
    try:
        problems = [jacstore.Problem(apply=apply, params=params, inputs=arrays[name]) for name in ("inputs", "others")]
        train, test = (
            jacstore.build(problem, folder / f"{name}.jac", memory=memory)
            for name, problem in zip(("train", "test"), problems, strict=True)
        )
        by_way = by_kernel if way == "kernel" else by_normal_matrix
        np.save(variances, by_way(train, test, float(arrays["alpha"]), folder, memory))
        return {"seconds": time.perf_counter() - started, "peak_bytes": peak_bytes()}
    finally:
        shutil.rmtree(folder)


def by_kernel(
    train: jacstore.JacobianStore, test: jacstore.JacobianStore, alpha: float, folder: Path, memory: str
) -> np.ndarray:
    """Covariances `(M, K, K)` from three kernels and a Cholesky factor of one, `(N*K, N*K)`."""
    kernel = jacstore.gram(train, folder / "train.ntk", memory=memory)
    cross = jacstore.gram(test, other=train, out=folder / "cross.ntk", memory=memory)
    blocks = jacstore.gram(test, out=folder / "blocks.ntk", mode="blocks", memory=memory)
    return jacstore.KernelFactor(kernel, alpha, memory=memory).predictive_covariance(cross, blocks)


def by_normal_matrix(
    train: jacstore.JacobianStore, test: jacstore.JacobianStore, alpha: float, folder: Path, memory: str
) -> np.ndarray:
    """Covariances `(M, K, K)` from `Jᵀ J + alpha I`, `(P, P)`, summed in one pass."""
    normal = jacstore.ggn(train, alpha=alpha, out=folder / "run.ggn", memory=memory)
    root = scipy.linalg.cholesky(normal, lower=True, overwrite_a=True)
    rows = test.array.compute().astype(np.float64)
    halves = scipy.linalg.solve_triangular(root, rows.T, lower=True).reshape(len(root), test.n_examples, -1)
    return np.einsum("pmk,pml->mkl", halves, halves, optimize=True)


def measured(way: str, given: Path, variances: Path, options: argparse.Namespace) -> dict[str, Any]:
    """One way in a process of its own: its figures, or why there are none."""
    if way != "laplace-torch":
        command = [sys.executable, __file__, "--data", str(options.data), "--memory", options.memory]
        command += ["--run", way, str(given), str(variances)]
    else:
        script = Path(__file__).parent / "peers" / "with_laplace.py"
        command = [options.laplace, str(script), str(given), str(variances)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=options.patience)
    except subprocess.TimeoutExpired:
        return {"failed": f"more than {options.patience:.0f} s"}
    if done.returncode:
        words = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
        return {"failed": words[-1][:200]}
    return {**json.loads(done.stdout.splitlines()[-1]), "variances": np.load(variances)}


def compared(found: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Figures with the largest relative difference of the variances of outputs to those by the kernel."""
    ours = found["kernel"].get("variances")
    rows = {}
    for way, facts in found.items():
        theirs = facts.pop("variances", None) if way != "kernel" else ours
        difference = np.nan
        if ours is not None and theirs is not None:
            a, b = (np.einsum("mkk->mk", x.astype(np.float64)) for x in (ours, theirs))
            difference = float(np.max(np.abs(a - b) / a))
        rows[way] = {"seconds": np.nan, "peak_bytes": np.nan, "failed": "", **facts, "difference": difference}
        rows[way].pop("variances", None)
    return rows


def report(rows: list[dict[str, Any]], out: Path) -> None:
    """Print the table, write CSV and figure."""
    lines: list[tuple[str, ...]] = [("examples", "way", "seconds", "peak", "largest difference")]
    for row in rows:
        if row["failed"]:
            lines.append((f"{row['examples']:,}", row["way"], row["failed"], "", ""))
            continue
        peak = format_size(int(row["peak_bytes"]))
        lines.append((f"{row['examples']:,}", row["way"], f"{row['seconds']:.2f}", peak, f"{row['difference']:.1e}"))
    common.table("Predictive variances", lines)
    with open(out / "laplace.csv", "w", newline="") as file:
        # The other interpreter says more of its runs.
        writer = csv.DictWriter(file, list(dict.fromkeys(key for row in rows for key in row)))
        writer.writeheader()
        writer.writerows(rows)
    with matplotlib.rc_context({"font.size": 11}):
        drawing = Figure(figsize=(11, 4.5), layout="constrained")
        for axes, field, label, scale in zip(
            drawing.subplots(1, 2),
            ("seconds", "peak_bytes"),
            ("seconds", "largest resident size in GB"),
            (1, 1e9),
            strict=True,
        ):
            for way in WAYS:
                shown = [row for row in rows if row["way"] == way]
                name = way if way == "laplace-torch" else f"jacstore, {way}"
                axes.plot([r["examples"] for r in shown], [r[field] / scale for r in shown], "o-", label=name)
            axes.set_xscale("log")
            axes.set_yscale("log")
            axes.set_xlabel("examples (10 outputs each)")
            axes.set_ylabel(label)
            axes.legend(fontsize=9)
        drawing.savefig(out / "laplace.png", dpi=110)
    print(f"figure   {out / 'laplace.png'}\ncsv      {out / 'laplace.csv'}")


if __name__ == "__main__":
    common.leave(main)
