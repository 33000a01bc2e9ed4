"""Train a network, build stores and kernels, fit a regression and draw a figure: what the pipelines share.

Kernel ridge regression predicts `K(x, X) (K(X, X) + ridge I)⁻¹ y`, in float64, with the
neural tangent kernel of the trained network (Jacot et al. 2018, arXiv:1806.07572; Lee et al. 2019, arXiv:1902.06720).
"""

from __future__ import annotations

import csv
import json
import math
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import matplotlib
import numpy as np
import scipy.linalg
from matplotlib.figure import Figure

import jacstore
from jacstore.base.machine import format_size
from jacstore.errors import JacstoreError

Params = Any  # a pytree of arrays
Apply = Callable[[Params, Any], Any]

LEADING = 50  # eigenvalues that the figure shows
DRAWN = 1000  # examples that it shows at most, evenly picked
CHECKED = 200  # kernel entries compared with float64
REFITTED = 1e-6  # how far leave-one-out may be from refitting, relative to the largest target


@dataclass(frozen=True, kw_only=True)
class Data:
    """Training and test examples `(N, ...)` float32 with their labels `(N,)` integer."""

    train: np.ndarray
    train_labels: np.ndarray
    test: np.ndarray
    test_labels: np.ndarray
    classes: int = 10


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What decides the trained parameters; kept beside them, so that a rerun takes only its own."""

    data: str
    net: str
    examples: int
    epochs: int
    batch: int = 32
    rate: float = 2e-3
    seed: int = 0


# ---- data ----


def generated(examples: int, test_examples: int, seed: int = 0) -> Data:
    """Return images `(28, 28)` in [0, 1] of ten blotches, each moved by up to three pixels and with noise on it."""
    rng = np.random.default_rng(seed)
    blotches = np.kron(rng.random((10, 7, 7)) < 0.35, np.ones((4, 4)))
    count = examples + test_examples
    labels = rng.integers(10, size=count)
    moved = [np.roll(blotches[label], rng.integers(-3, 4, size=2), (0, 1)) for label in labels]
    noisy = np.clip(
        np.stack(moved) * rng.uniform(0.3, 1, (count, 1, 1)) + 0.3 * rng.standard_normal((count, 28, 28)), 0, 1
    )
    images = noisy.astype(np.float32)
    return Data(
        train=images[:examples], train_labels=labels[:examples], test=images[examples:], test_labels=labels[examples:]
    )


# ---- training ----


def one_hot(labels: np.ndarray, classes: int) -> np.ndarray:
    """Targets `(N, C)` with mean zero over the classes, which a kernel without a bias can fit."""
    return (np.eye(classes)[labels] - 1 / classes).astype(np.float64)


def trained(folder: Path, settings: Settings, initial: Params, apply: Apply, data: Data) -> tuple[Params, bool]:
    """Return parameters trained on `data`, and whether they were read from `folder` instead.

    They are kept in `params.npz`: another version of the compiler may round otherwise, and a store accepts only the
    parameters that it was begun with.
    """
    path = folder / "params.npz"
    leaves, structure = jax.tree_util.tree_flatten(initial)
    wanted = asdict(settings)
    if path.exists():
        with np.load(path) as kept:
            found = json.loads(str(kept["settings"]))
            if found != wanted:
                changed = ", ".join(
                    f"{name}: {found.get(name)} -> {wanted[name]}" for name in wanted if found.get(name) != wanted[name]
                )
                raise SystemExit(f"{path} was trained with other settings ({changed}): give another --out")
            return jax.tree_util.tree_unflatten(structure, [kept[f"leaf{i}"] for i in range(len(leaves))]), True
    params = jax.tree_util.tree_map(np.asarray, train(initial, apply, data, settings))
    folder.mkdir(parents=True, exist_ok=True)
    partial_path = folder / f"params.{os.getpid()}.partial.npz"
    arrays = {f"leaf{i}": leaf for i, leaf in enumerate(jax.tree_util.tree_leaves(params))}
    np.savez(partial_path, settings=json.dumps(wanted), **arrays)
    partial_path.replace(path)
    return params, False


def train(params: Params, apply: Apply, data: Data, settings: Settings) -> Params:
    """Fit the mean squared error to the targets by Adam (Kingma and Ba 2015, arXiv:1412.6980), step size falling to 0.

    The squared error, because the kernel regression minimises the same.
    """
    targets = jnp.asarray(one_hot(data.train_labels, data.classes), jnp.float32)
    inputs = jnp.asarray(data.train)
    n, batch = len(inputs), min(settings.batch, len(inputs))
    steps = settings.epochs * (n // batch)

    def loss(params: Params, rows: jax.Array) -> jax.Array:
        outputs = jax.vmap(apply, (None, 0))(params, inputs[rows])
        return jnp.mean(jnp.sum((outputs - targets[rows]) ** 2, axis=-1))

    # A loop in Python: inside `lax.scan` the convolutions took eight times as long on CPU.
    @jax.jit
    def step(state: tuple[Params, Params, Params], t: jax.Array, rows: jax.Array) -> tuple[Params, Params, Params]:
        params, mean, square = state
        gradient = jax.grad(loss)(params, rows)
        mean = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, mean, gradient)
        square = jax.tree.map(lambda s, g: 0.999 * s + 0.001 * g * g, square, gradient)
        rate = settings.rate * (1 - t / steps) * jnp.sqrt(1 - 0.999 ** (t + 1)) / (1 - 0.9 ** (t + 1))
        params = jax.tree.map(lambda p, m, s: p - rate * m / (jnp.sqrt(s) + 1e-8), params, mean, square)
        return params, mean, square

    rng = np.random.default_rng(settings.seed)
    zeros = jax.tree.map(jnp.zeros_like, params)
    state = (jax.tree.map(jnp.asarray, params), zeros, zeros)
    for epoch in range(settings.epochs):
        order = rng.permutation(n)[: n // batch * batch].reshape(-1, batch)
        for index, rows in enumerate(order):
            state = step(state, jnp.float32(epoch * len(order) + index), rows)
    return state[0]


def predict(apply: Apply, params: Params, inputs: np.ndarray, batch: int = 1000) -> np.ndarray:
    """Return the outputs `(N, C)` in float64, a batch at a time."""
    outputs = jax.jit(jax.vmap(apply, (None, 0)))
    return np.concatenate(
        [np.asarray(outputs(params, inputs[i : i + batch]), np.float64) for i in range(0, len(inputs), batch)]
    )


def accuracy(outputs: np.ndarray, labels: np.ndarray) -> float:
    """Return the share of examples whose largest output is their label."""
    return float(np.mean(np.argmax(outputs, axis=1) == labels))


# ---- layers ----


def dense_init(rng: np.random.Generator, width_in: int, width_out: int) -> dict[str, np.ndarray]:
    """Return a dense layer's parameters, scaled for rectified inputs (He et al. 2015, arXiv:1502.01852)."""
    weight = rng.standard_normal((width_in, width_out)) * math.sqrt(2 / width_in)
    return {"weight": weight.astype(np.float32), "bias": np.zeros(width_out, np.float32)}


def conv_init(rng: np.random.Generator, channels_in: int, channels_out: int) -> dict[str, np.ndarray]:
    """Return a 3 x 3 convolution's parameters, scaled likewise; kernel `(3, 3, channels_in, channels_out)`."""
    weight = rng.standard_normal((3, 3, channels_in, channels_out)) * math.sqrt(2 / (9 * channels_in))
    return {"weight": weight.astype(np.float32), "bias": np.zeros(channels_out, np.float32)}


def dense(layer: Params, x: jax.Array) -> jax.Array:
    """Apply a dense layer to one vector `(width_in,)`."""
    return x @ layer["weight"] + layer["bias"]


def conv(layer: Params, x: jax.Array) -> jax.Array:
    """Apply a 3 x 3 convolution to one image `(height, width, channels_in)`, same size out."""
    y = jax.lax.conv_general_dilated(
        x[None], layer["weight"], (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
    )
    return y[0] + layer["bias"]


def pool(x: jax.Array) -> jax.Array:
    """Average 2 x 2 pixels of one image `(height, width, channels)`; even sizes only."""
    height, width, channels = x.shape
    return x.reshape(height // 2, 2, width // 2, 2, channels).mean((1, 3))


# ---- kernel regression ----


def leading_eigenvalues(kernel: np.ndarray, count: int = LEADING) -> np.ndarray:
    """Return the `count` largest eigenvalues in falling order: exactly when small, else by subspace iteration."""
    if len(kernel) <= 20 * count:
        return scipy.linalg.eigvalsh(kernel)[::-1][:count]
    return leading_eigenpairs(lambda block: kernel @ block, len(kernel), count)[0]


def leading_eigenpairs(
    multiply: Callable[[np.ndarray], np.ndarray], rows: int, count: int = LEADING, rounds: int = 3
) -> tuple[np.ndarray, np.ndarray]:
    """Return the `count` largest eigenvalues in falling order and vectors `(rows, count)`, in `rounds + 1` products.

    References
    ----------
    Halko, Martinsson, Tropp 2011, arXiv:0909.4061, algorithm 4.4, with twice as many directions as eigenvalues.
    """
    basis = np.random.default_rng(0).standard_normal((rows, min(rows, 2 * count)))
    for _ in range(rounds):
        basis, _ = np.linalg.qr(multiply(basis))
    values, vectors = scipy.linalg.eigh(basis.T @ multiply(basis))
    return values[::-1][:count], basis @ vectors[:, ::-1][:, :count]


def by_example(kernel: np.ndarray, picked: np.ndarray, examples: int) -> np.ndarray:
    """Sum the outputs of `(N*K, N*K)` for the picked examples: entry (n, m) is the trace of block (n, m)."""
    outputs = len(kernel) // examples
    blocks = kernel.reshape(examples, outputs, examples, outputs)
    return sum(blocks[:, k, :, k][np.ix_(picked, picked)] for k in range(outputs))


def entry_errors(
    apply: Apply, params: Params, inputs: np.ndarray, outputs: str, kernel: np.ndarray, count: int = CHECKED
) -> np.ndarray:
    """Return `|G_ij - exact| / sqrt(G_ii G_jj)` of `count` random entries, exact by plain `jax.vjp` in float64.

    Nothing of jacstore takes part in the exact values.
    """
    k = len(kernel) // len(inputs)
    with jax.enable_x64(True):
        params = jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.float64), params)

        @jax.jit
        def row(image: jax.Array, output: jax.Array) -> jax.Array:
            values, pullback = jax.vjp(lambda p: apply(p, image), params)
            cotangent = jnp.ones_like(values) if outputs == "sum" else jnp.zeros_like(values).at[output].set(1)
            return jnp.concatenate([leaf.ravel() for leaf in jax.tree.leaves(pullback(cotangent)[0])])

        errors = []
        for i, j in np.random.default_rng(1).integers(len(kernel), size=(count, 2)):
            a, b = (np.asarray(row(inputs[n // k].astype(np.float64), n % k)) for n in (i, j))
            errors.append(abs(kernel[i, j] - a @ b) / np.sqrt((a @ a) * (b @ b)))
    return np.array(errors)


def refitting_difference(kernel: np.ndarray, targets: np.ndarray, added: float, examples: int, count: int) -> float:
    """Leave-one-out by its formula against refitting without each example, with `count` examples in all.

    Returns the largest difference of a prediction relative to the largest target.
    """
    k = len(kernel) // examples
    kernel, targets = kernel[: count * k, : count * k], targets[:count]
    formula = jacstore.KernelFactor(kernel, added, outputs=k).loo(targets).mean.reshape(count * k, -1)
    flat, largest = targets.reshape(count * k, -1), 0.0
    for start in range(0, count * k, k):
        mine = np.arange(start, start + k)
        rest = np.delete(np.arange(count * k), mine)
        damped = kernel[np.ix_(rest, rest)] + added * np.eye(len(rest))
        refitted = kernel[np.ix_(mine, rest)] @ scipy.linalg.solve(damped, flat[rest], assume_a="pos")
        largest = max(largest, float(np.abs(refitted - formula[mine]).max()))
    return largest / float(np.abs(targets).max())


# ---- what is shown ----


class Times:
    """Seconds of each stage, in the order in which they ran."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Add what the body takes to `name`."""
        start = time.perf_counter()
        yield
        self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start


def bytes_on_disk(path: Path) -> int:
    """Return the bytes of all files under `path`."""
    return sum(file.stat().st_size for file in path.rglob("*") if file.is_file())


def table(title: str, rows: list[tuple[str, ...]]) -> None:
    """Print rows of text in aligned columns."""
    widths = [max(len(cell) for cell in column) for column in zip(*rows, strict=True)]
    print(f"\n{title}")
    for first, *rest in rows:
        cells = [first.ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(rest, widths[1:], strict=True))]
        print("  " + "  ".join(cells))


def write_csv(path: Path, rows: Sequence[Any]) -> None:
    """Write dataclasses of one kind, a line each."""
    with open(path, "w", newline="") as file:
        writer = csv.DictWriter(file, list(asdict(rows[0])))
        writer.writeheader()
        writer.writerows(asdict(row) for row in rows)


def leaves_table(store: jacstore.JacobianStore) -> None:
    """Print for each leaf its shape, terms, the numbers stored for an example against its rows', and why."""
    rows = [("leaf", "shape", "terms", "stored", "of rows", "why")]
    for leaf in store.info()["leaves"]:
        shape, terms = "x".join(map(str, leaf["shape"])), "+".join(leaf["terms"])
        rows.append((leaf["path"], shape, terms, f"{leaf['numbers']:,}", f"{leaf['numbers_dense']:,}", leaf["why"]))
    table("Leaves: terms, numbers stored for an example against those of its rows", rows)


def figure(path: Path, kernel: np.ndarray, labels: np.ndarray, eigenvalues: np.ndarray, title: str) -> None:
    """Draw the kernel `(N, N)` ordered by class, each entry divided by its diagonal, and the leading eigenvalues."""
    order = np.argsort(labels, kind="stable")
    scale = 1 / np.sqrt(np.diag(kernel)[order])
    cosine = kernel[np.ix_(order, order)] * scale[:, None] * scale
    starts = np.flatnonzero(np.diff(labels[order], prepend=-1))
    middles = (starts + np.append(starts[1:], len(order))) / 2

    with matplotlib.rc_context({"font.size": 12}):
        drawing = Figure(figsize=(13, 5.8), layout="constrained")
        left, right = drawing.subplots(1, 2)
        image = left.imshow(cosine, cmap="viridis")
        left.set_xticks(middles, [str(label) for label in labels[order][starts]])
        left.set_yticks(middles, [str(label) for label in labels[order][starts]])
        left.tick_params(length=0)
        for start in starts[1:]:
            left.axhline(start - 0.5, color="white", linewidth=0.5)
            left.axvline(start - 0.5, color="white", linewidth=0.5)
        left.set_xlabel("training examples, ordered by class")
        left.set_ylabel("training examples, ordered by class")
        left.set_title("Neural tangent kernel, cosine of two examples")
        drawing.colorbar(image, ax=left, shrink=0.85)

        positive = eigenvalues[eigenvalues > 0]
        right.loglog(np.arange(1, len(positive) + 1), positive, marker="o", markersize=4, linewidth=1)
        right.set_xlabel("index of the eigenvalue")
        right.set_ylabel("eigenvalue")
        right.set_title(f"Leading {len(positive)} eigenvalues")
        right.grid(True, which="both", alpha=0.3)
        drawing.suptitle(title)
        drawing.savefig(path, dpi=120)


# ---- the whole run ----


def run(
    *,
    out: Path,
    settings: Settings,
    initial: Params,
    apply: Apply,
    data: Data,
    outputs: str,
    memory: str,
    ridge: float,
    refitted: int = 0,
) -> dict[str, float]:
    """Train, build both stores, assemble both kernels, regress, print, draw; return the test accuracies.

    Every stage continues what an earlier run in the same folder left. With `refitted` the training examples are also
    predicted by leaving each out, and that is compared with refitting on so many.
    """
    times, stem = Times(), settings.data

    def path(ending: str) -> Path:
        return out / f"{stem}{ending}"

    with times.stage("train"):
        params, reused = trained(out, settings, initial, apply, data)
    parameters = sum(leaf.size for leaf in jax.tree_util.tree_leaves(params))
    print(f"network  {parameters:,} parameters, {settings.examples:,} examples ({'reused' if reused else 'trained'})")

    make = partial(jacstore.Problem, apply=apply, params=params, outputs=outputs)
    with times.stage("build"):
        store = jacstore.build(make(inputs=data.train), path(".jac"), memory=memory)
        _say_reused(path(".jac"), store.report, "units")
        test_store = jacstore.build(make(inputs=data.test), path("-test.jac"), memory=memory)
        _say_reused(path("-test.jac"), test_store.report, "units")
    with times.stage("gram"):
        train_kernel = jacstore.gram(store, out=path(".ntk"), memory=memory, mode="full")
        _say_reused(path(".ntk"), train_kernel.report, "tiles")
        test_kernel = jacstore.gram(test_store, store, out=path("-test.ntk"), memory=memory, mode="full")
        _say_reused(path("-test.ntk"), test_kernel.report, "tiles")

    with times.stage("check"):
        kernel = jacstore.open(path(".ntk")).array.compute()
        errors = entry_errors(apply, params, data.train, outputs, kernel)
    print(f"{len(errors)} random kernel entries against float64: largest error {errors.max():.1e} of sqrt(G_ii G_jj)")
    with times.stage("solve"):
        picked = np.arange(0, len(data.train), math.ceil(len(data.train) / DRAWN))
        drawn_kernel = by_example(kernel, picked, len(data.train))
        targets = one_hot(data.train_labels, data.classes)
        network = predict(apply, params, data.test)
        residuals = targets - predict(apply, params, data.train)
        eigenvalues, added = leading_eigenvalues(kernel), ridge * float(np.trace(kernel)) / len(kernel)
        if refitted:
            count = min(refitted, len(data.train))
            difference = refitting_difference(kernel, targets, added, len(data.train), count)
        del kernel  # the solver takes as much memory
        # The second right-hand side is regression in the model linearised at the trained parameters.
        model = jacstore.KernelRidge(added).fit(train_kernel, np.stack([targets, residuals], -1))
        alone, correction = np.moveaxis(model.predict(test_kernel), -1, 0)
        left_out = model.factor_.loo(targets).mean if refitted else None
    if left_out is not None:
        score = accuracy(left_out, data.train_labels)
        print(
            f"leave-one-out: {score:.1%} of the {len(data.train):,} training examples right; largest difference from "
            f"refitting {count} examples without each {difference:.1e}"
        )
        if not difference <= REFITTED:
            raise SystemExit(f"leave-one-out differs from refitting by {difference:.1e}, allowed {REFITTED:.0e}")

    scores = {
        "network": accuracy(network, data.test_labels),
        "kernel ridge regression on its NTK": accuracy(alone, data.test_labels),
        "network corrected by the kernel": accuracy(network + correction, data.test_labels),
    }
    drawn = path(".png")
    title = f"{stem}, {settings.net}: {parameters:,} parameters, {len(data.train):,} examples, outputs: {outputs}"
    figure(drawn, drawn_kernel, data.train_labels[picked], eigenvalues, title)
    _summary(
        scores,
        eigenvalues,
        added,
        times,
        store,
        [path(".jac"), path("-test.jac"), path(".ntk"), path("-test.ntk")],
        data,
    )
    print(f"\nfigure   {drawn}")
    return scores


def _say_reused(path: Path, report: dict[str, Any], what: str) -> None:
    computed, reused = report[f"{what}_computed"], report[f"{what}_reused"]
    print(f"{path}  {what}: {computed:,} computed, {reused:,} reused, {report['seconds_total']:.1f} s")


def _summary(
    scores: dict[str, float],
    eigenvalues: np.ndarray,
    added: float,
    times: Times,
    store: Any,
    paths: list[Path],
    data: Data,
) -> None:
    table(f"Accuracy on {len(data.test):,} test examples", [(name, f"{score:.1%}") for name, score in scores.items()])
    table(
        "Largest eigenvalues of the kernel",
        [(f"{i + 1}", f"{value:.4g}") for i, value in enumerate(eigenvalues[:5])]
        + [("added to the diagonal", f"{added:.3g}")],
    )
    rows = [(str(path), format_size(bytes_on_disk(path))) for path in paths]
    unstored = store.n_examples * store.n_outputs * store.n_parameters * 4
    table("On disk", [*rows, (f"rows of {paths[0].name}, were they float32", format_size(unstored))])
    table("Seconds", [(name, f"{seconds:.1f}") for name, seconds in times.seconds.items()])


def leave(main: Callable[[], object]) -> None:
    """Run a pipeline as a command: what jacstore refuses becomes one line and its exit code."""
    try:
        main()
    except JacstoreError as error:
        print(error, file=sys.stderr)
        raise SystemExit(error.exit_code) from None
