"""Compare ways to draw posterior samples on MNIST, how good and how fast they are: a table, a CSV file and a figure.

A network of about 15,000 parameters is trained on all of MNIST; 200 samples of its Laplace posterior with prior
precision 0.1 are drawn from a fixed subset of examples by contour integral quadrature (CIQ) with 1 to 20 points, in
primal and dual form, and by ways without it. Squared Mahalanobis distances are compared with chi-squared by Kolmogorov
and Smirnov; a sharper test looks only at the space that the data determine. Subset and key stand here, before any
result.

    python pipelines/sampling_ablation.py --data mnist.npz --laplace /path/to/python

That interpreter needs `pip install laplace-torch torch numpy`: its samples of the same posterior (`full`) stand beside.
"""

from __future__ import annotations

import argparse
import csv
import itertools
import json
import subprocess
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import matplotlib
import numpy as np
from jax.flatten_util import ravel_pytree
from matplotlib.figure import Figure

import common
import jacstore
from compare_laplace import save
from jacstore.base.machine import format_size
from jacstore.inference.linalg.quadrature import quadrature
from jacstore.inference.noise import KeyedNoise
from jacstore.inference.sampling_methods import Request, by_primal_quadrature
from mnist import mnist

EXAMPLES = 400  # the first ones of the training set; 4,000 rows
KEY = 1
ALPHA = 0.1
SAMPLES = 200
# Of images of 14 x 14: 15,018 parameters.
WIDTHS = (196, 64, 32, 10)
LEVEL = 0.05
SMALLEST_P = 1e-320  # what the figure shows of a p-value of 0
QQ = (2, 4, 6, 10, 20)


@dataclass(frozen=True, kw_only=True)
class Row:
    """One set of samples: how it was drawn, p-values, seconds, passes over J (NaN where no store is read)."""

    way: str
    q: int | None
    p_full: float
    p_data: float
    p_null: float
    seconds: float
    passes: float


def main(argv: list[str] | None = None) -> list[Row]:
    """Run the ablation and return its rows."""
    options = parse(argv)
    out: Path = options.out
    data = mnist(options.data, options.train, options.test)
    settings = common.Settings(
        data="sampling",
        net="-".join(map(str, options.widths)),
        examples=options.train,
        epochs=options.epochs,
        rate=2e-3,
        batch=64,
    )
    params, _ = common.trained(out, settings, initial(settings.seed, options.widths), apply, data)
    score = common.accuracy(common.predict(apply, params, data.test), data.test_labels)
    problem = jacstore.Problem(apply=apply, params=params, inputs=data.train[: options.examples])
    started = time.perf_counter()
    store = jacstore.build(problem, out / "sampling.jac", memory=options.memory)
    kernel = jacstore.gram(store, out / "sampling.ntk", memory=options.memory)
    seconds = time.perf_counter() - started
    rows_count = store.n_examples * store.n_outputs
    print(f"network  {store.n_parameters:,} parameters, {score:.1%} of {len(data.test):,} test examples right")
    study = Study(store, kernel, options)
    print(
        f"subset   {store.n_examples} examples, {rows_count:,} rows, rank {study.rank}, condition of A "
        f"{study.largest / ALPHA:.2g}; alpha {ALPHA}, {options.samples} samples, key {KEY}"
    )
    print(f"store and kernel, on disk: {seconds:.1f} s; what follows starts from them, but for model evaluations")
    study.exact_ways()
    study.quadratures()
    study.krylov(params, data.train[: options.examples])
    if options.laplace:
        study.laplace(params, data)
    if options.normal_examples:
        study.normal(apply, params, data.train[: options.normal_examples])
    report(study, out)
    return study.rows


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Ways to draw Laplace posterior samples, compared.")
    parser.add_argument(
        "--data", type=Path, required=True, metavar="PATH", help="npz with x_train, y_train, x_test, y_test"
    )
    parser.add_argument("--examples", type=int, default=EXAMPLES, metavar="N", help="of the posterior (%(default)s)")
    parser.add_argument("--samples", type=int, default=SAMPLES, metavar="N", help="(%(default)s)")
    parser.add_argument("--points", type=int, default=20, metavar="Q", help="largest number (%(default)s)")
    parser.add_argument(
        "--krylov", type=int, default=10, metavar="Q", help="points of the matrix-free runs; 0 leaves them out (10)"
    )
    parser.add_argument("--error", type=float, default=1e-2, help="of the matrix-free solver, relative (%(default)s)")
    parser.add_argument(
        "--normal-examples", type=int, default=0, metavar="N", help="also JᵀJ with Cholesky at so many, up to 60000"
    )
    parser.add_argument("--laplace", metavar="PYTHON", help="interpreter with laplace-torch, to stand beside")
    parser.add_argument("--epochs", type=int, default=12, help="of training (%(default)s)")
    parser.add_argument("--memory", default="8GB", metavar="SIZE", help="(%(default)s)")
    parser.add_argument("--out", type=Path, default=Path("sampling-run"), metavar="DIR", help="(%(default)s)")
    parser.add_argument("--small", action="store_true", help="tiny sizes, to try that it runs")
    options = parser.parse_args(argv)
    options.train, options.test, options.widths = 60_000, 10_000, WIDTHS
    if options.small:
        options.train, options.test, options.epochs, options.examples = 30, 20, 1, 6
        options.widths, options.samples, options.points, options.krylov = (196, 4, 3, 10), 40, 4, min(options.krylov, 3)
        options.normal_examples = min(options.normal_examples, 8)
    if not 1 <= options.krylov + 1 <= options.points + 1 or options.points < 1:
        raise SystemExit(f"--points {options.points}, --krylov {options.krylov}: give points >= 1, krylov <= points")
    return options


def initial(seed: int, widths: tuple[int, ...]) -> common.Params:
    """Parameters of dense layers before training."""
    rng = np.random.default_rng(seed)
    return {f"dense{i}": common.dense_init(rng, a, b) for i, (a, b) in enumerate(itertools.pairwise(widths))}


def shrunk(image: jax.Array) -> jax.Array:
    """The 196 pixels of an image averaged to 14 x 14."""
    return common.pool(image[..., None]).reshape(-1)


def apply(params: common.Params, image: jax.Array) -> jax.Array:
    """Map one image `(28, 28)`, averaged to 14 x 14, to ten outputs."""
    x = shrunk(image)
    for index in range(2):
        x = jax.nn.relu(common.dense(params[f"dense{index}"], x))
    return common.dense(params["dense2"], x)


class Study:
    """Sets of samples of one posterior, each timed and tested."""

    def __init__(self, store: Any, kernel: Any, options: argparse.Namespace) -> None:
        self.store, self.kernel, self.options = store, kernel, options
        self.rows: list[Row] = []
        self.plots: dict[str, Any] = {}
        # Kept with the kernel, so that no timed run has to compute it but the one that is about it.
        started = time.perf_counter()
        self.factor = jacstore.KernelFactor(kernel, ALPHA, "eigh", memory=options.memory)
        self.eigen_seconds = time.perf_counter() - started
        self.largest = ALPHA + float(self.factor.eigenvalues[-1])
        self.rank = int((self.factor.eigenvalues > self.factor.error).sum())

    def add(
        self,
        way: str,
        q: int | None,
        draw: Callable[[], np.ndarray],
        tested: bool = True,
        seconds: float | None = None,
    ) -> np.ndarray:
        """Time a set of samples, unless its seconds are given, and test it."""
        before, started = self.store.decoded_bytes_read, time.perf_counter()
        samples = draw()
        seconds = time.perf_counter() - started if seconds is None else seconds
        read = (self.store.decoded_bytes_read - before) / self.store.bytes_decoded
        p = {"full": np.nan, "data": np.nan, "null": np.nan}
        if tested:
            found = jacstore.sample_tests(samples, self.store, self.kernel, ALPHA, memory=self.options.memory)
            p |= found.p_values
            self.plots[way if q is None else f"{way} {q}"] = found.full
        row = Row(
            way=way, q=q, p_full=p["full"], p_data=p["data"], p_null=p["null"], seconds=seconds, passes=read or np.nan
        )
        self.rows.append(row)
        print(f"  {way} {q or ''}: p {row.p_full:.3g}, in the data space {row.p_data:.3g}, {seconds:.1f} s", flush=True)
        return samples

    def sampled(self, method: str, **more: Any) -> Callable[[], np.ndarray]:
        """A call of `jacstore.sample`."""
        options = {"alpha": ALPHA, "n": self.options.samples, "key": KEY, "memory": self.options.memory, **more}
        return lambda: jacstore.sample(self.store, self.kernel, method=method, **options)

    def exact_ways(self) -> None:
        """Without a quadrature."""
        self.add("perturb and solve", None, self.sampled("perturb"))
        self.add("eigendecomposition (kept)", None, self.sampled("eigh"))

    def quadratures(self) -> None:
        """Both forms at every number of points; the primal form with exact solves by the eigendecomposition."""
        for q in range(1, self.options.points + 1):
            self.add("dual CIQ", q, self.sampled("ciq-dual", q=q))
        operator = jacstore.operator(self.store, memory=self.options.memory)
        v = self.noise()
        projected = self.factor.eigenvectors.T @ operator.matmat(v)
        values = np.maximum(self.factor.eigenvalues, 1e-300)
        for q in range(1, self.options.points + 1):
            rule = quadrature(ALPHA, self.largest, q)
            below, above = rule.inverse_root(np.array(ALPHA)), rule.inverse_root(ALPHA + self.factor.eigenvalues)
            inner = self.factor.eigenvectors @ (((above - below) / values)[:, None] * projected)
            self.add(
                "primal CIQ, exact solves", q, lambda inner=inner, below=below: (below * v + operator.rmatmat(inner)).T
            )

    def krylov(self, params: common.Params, images: np.ndarray) -> None:
        """The primal form with a Krylov solver, products by a model's derivatives or from the store."""
        q = self.options.krylov
        if not q:
            return
        request = Request(alpha=ALPHA, method="ciq-primal", error=self.options.error, q=q)
        operator = jacstore.operator(self.store, memory=self.options.memory, precision="float64").ggn()
        steps: list[int] = []

        def draw(product: Callable[[np.ndarray], np.ndarray]) -> np.ndarray:
            found, count = by_primal_quadrature(product, self.noise(), request)
            steps.append(count)
            return found.T

        self.add("primal CIQ on the store", q, lambda: draw(operator.matmat))
        self.add("primal CIQ, model evaluations", q, lambda: draw(model_ggn(params, images)))
        print(f"  products with A: {steps[0]:,} on the store, {steps[1]:,} by model evaluations")

    def normal(self, function: common.Apply, params: common.Params, images: np.ndarray) -> None:
        """JᵀJ with Cholesky, for as many examples as one likes: another posterior, so untested against this kernel."""
        problem = jacstore.Problem(apply=function, params=params, inputs=images)
        store = jacstore.build(problem, self.options.out / f"sampling-{len(images)}.jac", memory=self.options.memory)
        options = {"alpha": ALPHA, "n": self.options.samples, "key": KEY, "memory": self.options.memory}
        name = f"JᵀJ and Cholesky, {len(images):,} examples"
        self.add(name, None, lambda: jacstore.sample(store, method="ggn", **options), tested=False)

    def laplace(self, params: common.Params, data: common.Data) -> None:
        """laplace-torch's posterior of all parameters, `full`, on the same network and examples, from the start."""
        n = self.options.examples
        with tempfile.TemporaryDirectory() as folder:
            given, out = Path(folder) / "given.npz", Path(folder) / "samples.npy"
            images = np.stack([np.asarray(shrunk(image)) for image in data.train[:n]])
            save(given, params, images, data.train_labels[:n], ALPHA, samples=self.options.samples, key=KEY)
            command = [self.options.laplace, str(Path(__file__).parent / "peers" / "with_laplace.py")]
            done = subprocess.run([*command, str(given), str(out)], capture_output=True, text=True, check=False)
            if done.returncode:
                print(f"  laplace-torch failed: {(done.stderr.strip().splitlines() or ['no word'])[-1][:200]}")
                return
            figures = json.loads(done.stdout.splitlines()[-1])
            samples = np.load(out).astype(np.float64)
        self.add("laplace-torch, full", None, lambda: samples, seconds=figures["seconds"])
        print(
            f"  laplace-torch: {figures['seconds_fit']:.1f} s of these to fit; "
            f"{format_size(int(figures['peak_bytes']))} of memory at most"
        )

    def noise(self) -> np.ndarray:
        """The noise of the key, `(P, n)`."""
        return KeyedNoise(key=KEY, n=self.options.samples).parameters(0, self.store.n_parameters)


def model_ggn(params: common.Params, images: np.ndarray) -> Callable[[np.ndarray], np.ndarray]:
    """`JᵀJ V` by forward and reverse derivatives of the network, no store: what there is without jacstore."""
    with jax.enable_x64(True):
        wide = jax.tree_util.tree_map(lambda leaf: jnp.asarray(leaf, jnp.float64), params)
        flat, unravel = ravel_pytree(wide)
        inputs = jnp.asarray(images, jnp.float64)

        @jax.jit
        def product(columns: jax.Array) -> jax.Array:
            def outputs(vector: jax.Array) -> jax.Array:
                return jax.vmap(apply, (None, 0))(unravel(vector), inputs)

            _, push = jax.linearize(outputs, flat)
            _, pull = jax.vjp(outputs, flat)
            return jax.lax.map(lambda v: pull(push(v))[0], columns, batch_size=20)

    def matmat(block: np.ndarray) -> np.ndarray:
        with jax.enable_x64(True):
            return np.asarray(product(jnp.asarray(block.T))).T

    return matmat


def report(study: Study, out: Path) -> None:
    """Print the table, write CSV and figure."""
    lines: list[tuple[str, ...]] = [("way", "points", "p full", "p data", "p null", "seconds", "passes")]
    for row in study.rows:
        p = [f"{value:.2g}" for value in (row.p_full, row.p_data, row.p_null)]
        lines.append((row.way, str(row.q or "-"), *p, f"{row.seconds:.2f}", f"{row.passes:.0f}"))
    common.table(f"{study.options.samples} samples, key {KEY}", lines)
    print(f"\neigendecomposition of the kernel, once: {study.eigen_seconds:.1f} s (0 s are reading it back)")
    verdicts = {
        way: {
            "rejected": [row.q for row in study.rows if row.way == way and row.p_full < LEVEL],
            "accepted": [row.q for row in study.rows if row.way == way and row.p_full >= LEVEL],
        }
        for way in ("dual CIQ", "primal CIQ, exact solves")
    }
    with open(out / "sampling.csv", "w", newline="") as file:
        writer = csv.DictWriter(file, list(asdict(study.rows[0])))
        writer.writeheader()
        writer.writerows(asdict(row) for row in study.rows)
    draw(out / "sampling.png", study)
    print(f"on disk  {format_size(sum(common.bytes_on_disk(out / name) for name in ('sampling.jac', 'sampling.ntk')))}")
    print(f"figure   {out / 'sampling.png'}\ncsv      {out / 'sampling.csv'}")
    print(json.dumps(verdicts))


def draw(path: Path, study: Study) -> None:
    """P-values over points, quantiles against quantiles, and seconds."""
    with matplotlib.rc_context({"font.size": 11}):
        drawing = Figure(figsize=(17, 5.6), layout="constrained")
        left, middle, right = drawing.subplots(1, 3)
        for way, marker in (("dual CIQ", "o"), ("primal CIQ, exact solves", "s")):
            rows = [row for row in study.rows if row.way == way]
            for field, style in (("p_full", "-"), ("p_data", ":")):
                shown = [max(getattr(row, field), SMALLEST_P) for row in rows]
                label = f"{way}, {'all' if field == 'p_full' else 'data space'}"
                left.plot([row.q for row in rows], np.log10(shown), style, marker=marker, markersize=4, label=label)
        left.axhline(np.log10(LEVEL), color="grey", linewidth=0.8)
        left.set_yscale("symlog", linthresh=3)
        left.set_yticks([-300, -100, -30, -10, -3, -1, 0])
        left.set_yticklabels(["-300", "-100", "-30", "-10", "-3", "-1", "0"])
        left.set_xlabel("quadrature points Q")
        left.set_ylabel("log10 of the p-value (grey: 0.05)")
        left.set_title("Kolmogorov-Smirnov test of squared distances")
        left.legend(fontsize=9)
        names = ["perturb and solve", *(f"primal CIQ, exact solves {q}" for q in QQ)]
        for name in names:
            if name in study.plots:
                test = study.plots[name]
                label = name.replace(", exact solves", ", Q =")
                middle.plot(test.expected, test.found, ".", markersize=4, label=label)
        expected = study.plots["perturb and solve"].expected
        middle.plot(expected[[0, -1]], expected[[0, -1]], color="grey", linewidth=0.8)
        middle.set_yscale("log")
        middle.set_xlabel("quantile of chi-squared")
        middle.set_ylabel("quantile of squared distances")
        middle.set_title("Quantiles, all of the space")
        middle.legend(fontsize=9)
        chosen = [row for row in study.rows if row.way != "primal CIQ, exact solves" and row.q in (None, 10, 20)]
        chosen = chosen or study.rows[:3]
        labels = [row.way if row.q is None else f"{row.way}, Q = {row.q}" for row in chosen]
        right.barh(labels, [row.seconds for row in chosen])
        right.set_xscale("log")
        right.invert_yaxis()
        right.set_xlabel(f"seconds for {study.options.samples} samples")
        right.set_title("Time of a set")
        drawing.savefig(path, dpi=110)


if __name__ == "__main__":
    common.leave(main)
