"""Plan the stores of five networks and draw what is stored beside what rows would take; nothing is computed.

    python pipelines/stored.py

Writes `docs/benchmarks/stored.csv` and `docs/_static/stored.png`. Needs matplotlib.
"""

from __future__ import annotations

import argparse
import csv
import json
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import numpy as np

import headline
import issue30
import jacstore
import transformer

ROOT = Path(__file__).resolve().parent.parent
EXAMPLES = 30_000


def mlp() -> jacstore.Problem:
    return headline.problem("mlp", EXAMPLES, None)


def mlp_all_outputs() -> jacstore.Problem:
    return headline.problem("mlp", EXAMPLES, None, outputs="all")


def cnn() -> jacstore.Problem:
    return headline.problem("cnn", EXAMPLES, None)


def large_images() -> jacstore.Problem:
    few = issue30.problem(2)
    # A plan needs no images of their own: one is shown for all.
    return replace(few, inputs=np.broadcast_to(few.inputs[:1], (EXAMPLES, *few.inputs.shape[1:])))


def tied_embedding() -> jacstore.Problem:
    return transformer.problem(1024)


NETWORKS = {
    "mlp": "perceptron, 2.4M parameters",
    "mlp_all_outputs": "the same, ten outputs",
    "cnn": "convolutional network, 1.6M",
    "large_images": "convolutions on 512 x 512 images, 2.5M",
    "tied_embedding": "transformer block, tied embedding",
}
COLUMNS = ("network", "examples", "outputs", "parameters", "bytes_rows", "bytes_stored")


def planned(name: str) -> dict[str, int | str]:
    """What `jacstore build --dry-run` says of one network."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "jacstore", "build", f"{__file__}:{name}", "--out", f"{folder}/plan.jac"]
        ran = subprocess.run([*command, "--dry-run", "--json", "--quiet"], capture_output=True, text=True, check=True)
    plan = json.loads(ran.stdout)
    figures = [plan[key] for key in ("examples", "outputs", "parameters", "bytes_dense", "bytes_to_store")]
    return dict(zip(COLUMNS, (name, *figures), strict=True))


def draw(rows: list[dict[str, str]], out: Path) -> None:
    """A pair of bars for each network, on a logarithmic scale."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 0.75 * len(rows) + 1.1), layout="constrained")
    for place, row in enumerate(rows):
        dense, stored = int(row["bytes_rows"]) / 1e9, int(row["bytes_stored"]) / 1e9
        axes.barh(place - 0.19, dense, 0.36, color="#c9ced6", label="rows of J" if not place else None)
        axes.barh(place + 0.19, stored, 0.36, color="#1b6ca8", label="stored by jacstore" if not place else None)
        axes.text(dense * 1.15, place - 0.19, size_of(dense), va="center", fontsize=9, color="#555555")
        axes.text(stored * 1.15, place + 0.19, size_of(stored), va="center", fontsize=9, color="#1b6ca8")
    labels = [f"{NETWORKS[row['network']]}\n{int(row['examples']):,} examples" for row in rows]
    axes.set_yticks(range(len(rows)), labels, fontsize=9)
    axes.invert_yaxis()
    axes.set_xscale("log")
    axes.set_xlim(right=axes.get_xlim()[1] * 4)
    axes.set_xlabel("gigabytes, float32, nothing left out")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, loc="lower right", fontsize=9)
    out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(out, dpi=160)


def size_of(gigabytes: float) -> str:
    return f"{gigabytes:,.0f} GB" if gigabytes >= 10 else f"{gigabytes:.2g} GB"


def main(arguments: list[str] | None = None) -> list[dict[str, str]]:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--networks", nargs="+", choices=tuple(NETWORKS), default=tuple(NETWORKS))
    parser.add_argument("--csv", type=Path, default=ROOT / "docs/benchmarks/stored.csv")
    parser.add_argument("--figure", type=Path, default=ROOT / "docs/_static/stored.png")
    given = parser.parse_args(arguments)
    rows = [planned(name) for name in given.networks]
    given.csv.parent.mkdir(parents=True, exist_ok=True)
    with given.csv.open("w", newline="", encoding="utf-8") as file:
        table = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        table.writeheader()
        table.writerows(rows)
    written = [{key: str(value) for key, value in row.items()} for row in rows]
    draw(written, given.figure)
    for row in written:
        print(", ".join(f"{key} {value}" for key, value in row.items()))
    return written


if __name__ == "__main__":
    main()
