"""Print a table of what each stored type costs in bytes and in errors of kernel entries, on MNIST as an npz file.

    python pipelines/precision.py --data mnist.npz

For a dense and a convolutional network, trained a little: the largest error of all entries of the kernel against one of
float64, relative to `sqrt(G_ii G_jj)`, beside what jacstore says to expect at most, six standard deviations of its
roundings, and the worst case. `dense` stores rows, `auto` factors where they are smaller.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np

import common
import jacstore
import mnist

STORED = ("float32", "float16", "bfloat16")
# Stored type and layout, and precision of the products.
ROWS = [
    *((dtype, layout, "float32") for dtype in STORED for layout in ("auto", "dense")),
    ("float32", "dense", "fast"),
    ("float64", "auto", "float64"),
]


def main(argv: list[str] | None = None) -> list[dict[str, Any]]:
    """Print the table and return its rows."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--data", type=Path, required=True, metavar="PATH", help="npz as for mnist.py")
    parser.add_argument("--examples", type=int, default=200, metavar="N", help="(%(default)s)")
    parser.add_argument("--nets", nargs="+", choices=sorted(mnist.NETS), default=sorted(mnist.NETS))
    parser.add_argument("--memory", default="4GB", metavar="SIZE", help="(%(default)s)")
    given = parser.parse_args(argv)
    data = mnist.mnist(given.data, given.examples, 1)
    rows = [row for net in given.nets for row in measured(net, data, given.memory)]
    header = ("network", "stored", "layout", "products", "bytes", "largest error", "expected", "ratio", "worst case")
    print(" ".join(f"{name:>13}" for name in header))
    for row in rows:
        figures = (f"{row['largest']:.1e}", f"{row['expected']:.1e}", f"{row['ratio']:.1f}", f"{row['worst']:.1e}")
        words = (row["net"], row["stored"], row["layout"], row["products"], f"{row['bytes']:,}", *figures)
        print(" ".join(f"{word:>13}" for word in words))
    print(json.dumps(rows))
    return rows


def measured(net: str, data: common.Data, memory: str) -> list[dict[str, Any]]:
    """Figures of one network for each stored type."""
    initial, apply = mnist.NETS[net]
    settings = common.Settings(data="mnist", net=net, examples=len(data.train), epochs=3, rate=1e-3)
    params = common.train(initial(0), apply, data, settings)
    problem = jacstore.Problem(apply=apply, params=params, inputs=data.train)
    truth = values(jacstore.build(problem, None, dtype="float64", layout="dense", memory=memory), "float64", memory)[0]
    found = []
    for dtype, layout, products in ROWS:
        store = jacstore.build(problem, None, dtype=dtype, layout=layout, memory=memory)
        kernel, numerics = values(store, products, memory)
        scale = np.sqrt(np.diag(truth))
        largest = float(np.max(np.abs(kernel - truth) / np.outer(scale, scale)))
        found.append(
            {
                "net": net,
                "stored": dtype,
                "layout": layout,
                "products": products,
                "bytes": store.info()["bytes_stored"],
                "largest": largest,
                "expected": numerics["expected_error"],
                "worst": numerics["worst_case"],
                "ratio": numerics["expected_error"] / max(largest, 1e-300),
            }
        )
    return found


def values(store: jacstore.JacobianStore, products: str, memory: str) -> tuple[np.ndarray, dict[str, Any]]:
    """A kernel and its numerical record."""
    kernel = jacstore.gram(store, precision=products, memory=memory)
    return kernel.array.compute(scheduler="synchronous"), kernel.info()["numerics"]


if __name__ == "__main__":
    common.leave(main)
