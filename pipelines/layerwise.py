"""Compute the kernel of each leaf of two networks, on MNIST or generated images: a table, a CSV file and a figure.

`J Jᵀ` is a sum over leaves, so `gram --by-leaf` says which layer makes the kernel. For every leaf of a trained dense
and a trained convolutional network: its share of the parameters and of the kernel's trace, the alignment of its kernel
with the whole one and with the labels, and the test accuracy of regression with its kernel alone. The kernels of the
leaves must add up to the kernel that was assembled as a whole, within what rounding of products explains.

    python pipelines/layerwise.py --data mnist.npz

References
----------
Cortes, Mohri, Rostamizadeh 2012, Algorithms for learning kernels based on centered alignment, arXiv:1203.0550.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.figure import Figure

import common
import jacstore
from jacstore.base.precision import product_bound
from mnist import NETS, mnist_or_generated, settings_for

RIDGE = 1e-4  # of the mean of the kernel's diagonal
WHOLE = "all leaves"


@dataclass(frozen=True, kw_only=True)
class Row:
    """One leaf of one network; alignments are cosines of kernels, with the labels after centering both."""

    net: str
    leaf: str
    parameters: int
    share_of_parameters: float
    share_of_trace: float
    alignment_with_whole: float
    alignment_with_labels: float
    test_accuracy: float


def main(argv: list[str] | None = None) -> list[Row]:
    """Run both networks and return a row for each leaf, and one for each whole kernel."""
    options = parse(argv)
    data = mnist_or_generated(options.data, options.examples, options.test_examples)
    options.out.mkdir(parents=True, exist_ok=True)
    rows: list[Row] = []
    for net in options.nets:
        rows += leaves_of(net, data, options)
    common.write_csv(options.out / "layerwise.csv", rows)
    draw(options.out / "layerwise.png", rows, len(data.train))
    print(f"\ncsv      {options.out / 'layerwise.csv'}\nfigure   {options.out / 'layerwise.png'}")
    return rows


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Kernels of single leaves: which layer makes the kernel.")
    parser.add_argument("--data", type=Path, metavar="PATH", help="npz with x_train, y_train, x_test, y_test")
    parser.add_argument("--examples", type=int, default=1000, metavar="N", help="to train on (%(default)s)")
    parser.add_argument("--test-examples", type=int, default=1000, metavar="M", help="to test on (%(default)s)")
    parser.add_argument("--nets", nargs="+", choices=sorted(NETS), default=["mlp", "cnn"], help="(mlp cnn)")
    parser.add_argument("--memory", default="4GB", metavar="SIZE", help="for build and gram (%(default)s)")
    parser.add_argument("--out", type=Path, default=Path("layerwise-run"), metavar="DIR", help="(%(default)s)")
    parser.add_argument("--small", action="store_true", help="tiny sizes, to try that it runs")
    options = parser.parse_args(argv)
    if options.small:
        options.examples, options.test_examples = min(options.examples, 30), min(options.test_examples, 20)
    return options


def leaves_of(net: str, data: common.Data, options: argparse.Namespace) -> list[Row]:
    """Train a network, assemble its kernel leaf by leaf and as a whole, compare, and print a table."""
    out: Path = options.out / net
    initial, apply = NETS[net]
    settings = settings_for(net, len(data.train), small=options.small)
    settings = replace(settings, data="mnist" if options.data else "generated")
    params, _ = common.trained(out, settings, initial(settings.seed), apply, data)
    score = common.accuracy(common.predict(apply, params, data.test), data.test_labels)

    problems = [jacstore.Problem(apply=apply, params=params, inputs=x) for x in (data.train, data.test)]
    store = jacstore.build(problems[0], out / "train.jac", memory=options.memory)
    test_store = jacstore.build(problems[1], out / "test.jac", memory=options.memory)
    whole = jacstore.gram(store, out=out / "train.ntk", memory=options.memory, mode="trace")
    parts = jacstore.gram(store, out=out / "leaves.ntk", memory=options.memory, mode="trace", by_leaf=True)
    cross = jacstore.gram(test_store, store, out=out / "cross.ntk", memory=options.memory, mode="trace", by_leaf=True)

    kernel = whole.array.compute()
    kernels = {path: array.compute() for path, array in parts.leaf_arrays.items()}
    crosses = {path: array.compute() for path, array in cross.leaf_arrays.items()}
    sizes = {leaf.path: leaf.size for leaf in store.leaves}
    rows = [
        measured(net, path, sizes[path] / store.n_parameters, sizes[path], kernels[path], crosses[path], kernel, data)
        for path in kernels
    ]
    rows.append(measured(net, WHOLE, 1.0, store.n_parameters, kernel, sum(crosses.values()), kernel, data))
    show(net, rows, score, len(data.test))
    check_sum(sum(kernels.values()), kernel, 2 * rounding_of(whole, store))
    return rows


def measured(
    net: str,
    leaf: str,
    share: float,
    parameters: int,
    kernel: np.ndarray,
    cross: np.ndarray,
    whole: np.ndarray,
    data: common.Data,
) -> Row:
    """What is said of one kernel `(N, N)` beside the whole one."""
    targets = common.one_hot(data.train_labels, data.classes)
    model = jacstore.KernelRidge(RIDGE * float(np.trace(kernel)) / len(kernel)).fit(kernel, targets)
    return Row(
        net=net,
        leaf=leaf,
        parameters=parameters,
        share_of_parameters=share,
        share_of_trace=float(np.trace(kernel) / np.trace(whole)),
        alignment_with_whole=alignment(kernel, whole),
        alignment_with_labels=alignment(centered(kernel), centered(targets @ targets.T)),
        test_accuracy=common.accuracy(model.predict(cross), data.test_labels),
    )


def alignment(a: np.ndarray, b: np.ndarray) -> float:
    """Cosine of two kernels as vectors; 0 where one is zero, as that of the last bias is after centering."""
    norms = float(np.linalg.norm(a) * np.linalg.norm(b))
    return float((a * b).sum()) / norms if norms else 0.0


def centered(kernel: np.ndarray) -> np.ndarray:
    """The kernel of features less their mean."""
    means = kernel.mean(0)
    return kernel - means - means[:, None] + means.mean()


def rounding_of(kernel: Any, store: Any) -> float:
    """What products of the stored rows may miss of a kernel entry, relative to `sqrt(G_ii G_jj)`."""
    bound = product_bound(kernel.precision, kernel.engine, store.n_parameters)
    return float(bound * store.rounding["amplification"])


def check_sum(added: np.ndarray, kernel: np.ndarray, bound: float) -> None:
    """Print how far the leaves' kernels are from adding up to the whole, and stop if that is more than rounding."""
    roots = np.sqrt(np.diag(kernel))
    largest = float(np.abs((added - kernel) / (roots[:, None] * roots)).max())
    print(f"sum of the leaves' kernels: largest difference {largest:.1e} of sqrt(G_ii G_jj), bound {bound:.1e}")
    if not largest <= bound:
        raise SystemExit(f"the leaves' kernels do not add up to the kernel: {largest:.1e} is above {bound:.1e}")


def show(net: str, rows: list[Row], score: float, tested: int) -> None:
    """Print the table of one network."""
    lines: list[tuple[str, ...]] = [
        ("leaf", "parameters", "of parameters", "of trace", "with whole", "with labels", "test accuracy")
    ]
    for row in rows:
        shares = [f"{share:.1%}" for share in (row.share_of_parameters, row.share_of_trace)]
        cosines = [f"{cosine:.3f}" for cosine in (row.alignment_with_whole, row.alignment_with_labels)]
        lines.append((row.leaf, f"{row.parameters:,}", *shares, *cosines, f"{row.test_accuracy:.1%}"))
    common.table(f"{net}: kernels of its leaves, alignments, and regression with each kernel alone", lines)
    print(f"the network itself: {score:.1%} of {tested:,} test examples right")


def draw(path: Path, rows: list[Row], examples: int) -> None:
    """A row of three charts for each network, a bar for each leaf."""
    nets = list(dict.fromkeys(row.net for row in rows))
    with matplotlib.rc_context({"font.size": 12}):
        drawing = Figure(figsize=(16, 1 + 4.4 * len(nets)), layout="constrained")
        for axes, net in zip(drawing.subplots(len(nets), 3, squeeze=False), nets, strict=True):
            mine = [row for row in rows if row.net == net]
            leaves = [row for row in mine if row.leaf != WHOLE]
            bars(
                axes[0],
                leaves,
                {"of the trace": "share_of_trace", "of the parameters": "share_of_parameters"},
                "share of the whole, %",
            )
            bars(
                axes[1],
                mine,
                {"with the whole kernel": "alignment_with_whole", "with the labels, centered": "alignment_with_labels"},
                "alignment, cosine of two kernels",
                percent=False,
            )
            bars(axes[2], mine, {"regression, this kernel alone": "test_accuracy"}, "test accuracy, %")
            axes[0].set_ylabel(f"{net}, {mine[-1].parameters:,} parameters", fontweight="bold")
        drawing.suptitle(f"Kernels of single leaves, summed over outputs, {examples:,} training examples")
        drawing.savefig(path, dpi=110)


def bars(axes: Any, rows: list[Row], fields: dict[str, str], label: str, percent: bool = True) -> None:
    """Horizontal bars side by side, the first leaf on top."""
    places, height = np.arange(len(rows)), 0.8 / len(fields)
    for index, (name, field) in enumerate(fields.items()):
        values = [getattr(row, field) * (100 if percent else 1) for row in rows]
        axes.barh(places + (index - (len(fields) - 1) / 2) * height, values, height, label=name)
    axes.set_yticks(places, [row.leaf for row in rows])
    axes.invert_yaxis()
    axes.set_xlim(0, 100 if percent else 1)
    axes.set_xlabel(label)
    axes.grid(True, axis="x", alpha=0.3)
    axes.legend(fontsize=10, loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=len(fields), frameon=False)


if __name__ == "__main__":
    common.leave(main)
