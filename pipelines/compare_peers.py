"""How long the kernel of one network takes: jacstore, neural-tangents and torch.func, side by side on one machine.

    python pipelines/compare_peers.py --net mlp --neural-tangents NT/bin/python --torch TORCH/bin/python

mlp: 784-1024-1024-512-10, N = 2,048; cnn: that of headline.py, N = 512; float32, outputs summed, generated inputs. The
peers' interpreters are those of environments of their own, made for example by

    python3.11 -m venv NT && NT/bin/pip install jax==0.4.23 jaxlib==0.4.23 "numpy<2" "scipy<1.13" neural-tangents==0.6.5
    python3.11 -m venv TORCH && TORCH/bin/pip install torch==2.13.0 numpy

A sweep runs every way of every tool at every block size once, each up to --sweep-seconds. Then alternating rounds: both
ways of jacstore, and of each peer the fastest way with every other one that took at most twice as long, each at its
fastest block size and up to --seconds; medians are printed. Whatever was stopped by these limits was extrapolated from
the blocks that were finished, and the table says from how many of how many. Compile time is apart; "once" is a first
run, with it. All kernels are compared entry by entry. The sweep is kept in the CSV and not repeated: delete it to start
anew.
"""

from __future__ import annotations

import argparse
import csv
import json
import shutil
import statistics
import sys
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure

import headline
from common import leave, table
from jacstore.base.machine import available_memory, format_size, parse_size
from jacstore.errors import InvalidRequestError
from peers.child import PATIENCE, Child, Measured, Setting, check_kernel

TOOLS = ("jacstore", "neural-tangents", "torch.func")
SCRIPTS = {"jacstore": "with_jacstore.py", "neural-tangents": "with_neural_tangents.py", "torch.func": "with_torch.py"}
WAYS = {
    "jacstore": ("RAM", "disk"),
    "neural-tangents": ("jacobian contraction", "ntk-vector products", "structured derivatives"),
    "torch.func": ("vmap(grad)", "vmap(jacrev)", "vmap(grad) kept", "ntk-vector products"),
}
EXAMPLES = {"mlp": 2048, "cnn": 512}
BLOCKS = {"mlp": (128, 512, 2048), "cnn": (32, 128, 512)}
# Ways of a peer that the sweep found slower than its fastest by more than this stay out of the rounds.
NEAR = 2.0
JACSTORE_PATIENCE = 600.0
FACTS = (
    "seconds",
    "seconds_measured",
    "seconds_compile",
    "seconds_build",
    "products_done",
    "products",
    "peak_bytes",
    "failed",
)


@dataclass(kw_only=True)
class Comparison:
    """One network, the tools that compute its kernel, and what they took."""

    children: dict[str, Child]
    folder: Path
    memory: int
    measured: list[Measured] = field(default_factory=list)
    reference: np.ndarray | None = None

    def run(self, settings: Iterable[Setting], phase: str, number: int, seconds: float) -> None:
        """Measure each setting once, in order."""
        for setting in settings:
            path = self.folder / "kernel.npy"
            path.unlink(missing_ok=True)
            request = {"way": setting.way, "block": setting.block, "seconds": seconds, "kernel": str(path)}
            answer = self.children[setting.tool].ask({**request, "memory": self.memory})
            if "failed" not in answer:
                kernel = np.load(path)
                if self.reference is None:
                    self.reference = kernel.astype(np.float64)
                answer["largest_error"], answer["kinks"] = check_kernel(kernel, self.reference, str(setting))
            self.measured.append(Measured(setting=setting, phase=phase, round=number, answer=answer))
            print(f"{phase} {number}: {setting}: {self.measured[-1].seconds:.3g} s {self.measured[-1].remark}".rstrip())

    def of(self, setting: Setting, phase: str) -> list[Measured]:
        return [m for m in self.measured if m.setting == setting and m.phase == phase]

    def fastest(self) -> list[Measured]:
        """Of each way the run of the sweep at its fastest block size, where one ended."""
        found: dict[tuple[str, str], Measured] = {}
        for m in self.measured:
            way = (m.setting.tool, m.setting.way)
            if m.phase == "sweep" and np.isfinite(m.seconds) and (way not in found or m.seconds < found[way].seconds):
                found[way] = m
        return list(found.values())

    def finals(self) -> list[Setting]:
        """What runs in the rounds."""
        best = self.fastest()
        least = {m.setting.tool: min(x.seconds for x in best if x.setting.tool == m.setting.tool) for m in best}
        return [m.setting for m in best if m.setting.tool == "jacstore" or m.seconds <= NEAR * least[m.setting.tool]]


def write_network(path: Path, net: str, examples: int, small: bool) -> None:
    """Parameters and inputs that all tools read."""
    task = headline.problem(net, examples, None)
    params, inputs = task.params, task.inputs
    if small and net == "mlp":
        params, inputs = headline.mlp_params(widths=(12, 20, 16, 10)), inputs[:, :12]
    if small and net == "cnn":
        params, inputs = headline.cnn_params(channels=(3, 4, 6)), inputs[:, :8, :8]
    arrays = {
        f"{layer}/{leaf}": np.asarray(value) for layer, leaves in params.items() for leaf, value in leaves.items()
    }
    np.savez(path, net=net, inputs=inputs, **arrays)


def write_csv(path: Path, net: str, n: int, measured: Sequence[Measured]) -> None:
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["net", "examples", "phase", "round", "tool", "way", "block", *FACTS, "largest_error", "kinks"])
        for m in measured:
            known = [m.answer.get(fact, "") for fact in (*FACTS, "largest_error", "kinks")]
            writer.writerow([net, n, m.phase, m.round, m.setting.tool, m.setting.way, m.setting.block, *known])


def read_sweep(path: Path, net: str, n: int) -> list[Measured]:
    """Runs of an earlier sweep of the same network."""
    if not path.exists():
        return []
    found = []
    with path.open(newline="") as file:
        for row in csv.DictReader(file):
            if (row["net"], row["examples"], row["phase"]) != (net, str(n), "sweep"):
                continue
            answer = {
                fact: row[fact] if fact == "failed" else float(row[fact])
                for fact in (*FACTS, "largest_error", "kinks")
                if row[fact]
            }
            setting = Setting(tool=row["tool"], way=row["way"], block=int(row["block"]))
            found.append(Measured(setting=setting, phase="sweep", round=1, answer=answer))
    return found


def summary(comparison: Comparison, finals: list[Setting]) -> list[dict[str, Any]]:
    """One row a way: medians of the rounds, or the one run of the sweep; ratios are to jacstore in RAM, same round."""
    rows = []
    base = [m.seconds for m in comparison.of(finals[0], "round")]
    for swept in comparison.fastest():
        setting, rounds = swept.setting, comparison.of(swept.setting, "round")
        runs = rounds or [swept]
        # Rounds alternate, so that each is compared with jacstore's of about the same moment.
        bases = base if rounds else [statistics.median(base)]
        ratios = [m.seconds / b for m, b in zip(runs, bases, strict=True)]
        seconds = statistics.median(m.seconds for m in runs)
        remarks = sorted({m.remark for m in runs} - {""}) + ([] if rounds else ["swept once"])
        known = [m.answer for m in runs if "failed" not in m.answer]
        # A program that was compiled in the sweep is not compiled again in the rounds.
        compiling = max(m.answer.get("seconds_compile", 0.0) for m in [swept, *rounds])
        rows.append(
            {
                "tool": setting.tool,
                "way": setting.way,
                "block": setting.block,
                "seconds": seconds,
                "ratio": statistics.median(ratios),
                "compile": compiling,
                "once": seconds + compiling,
                "peak": max((a["peak_bytes"] for a in known), default=0),
                "largest_error": max((a["largest_error"] for a in known), default=np.nan),
                "kinks": max((a["kinks"] for a in known), default=0),
                "extrapolated": not all(m.whole for m in runs),
                "remark": "; ".join(remarks),
            }
        )
    return rows


def show(title: str, rows: list[dict[str, Any]], swept: list[Measured]) -> None:
    """Print the sweep and the medians."""
    head: tuple[str, ...] = ("", "block", "seconds", "compile s", "peak", "")
    sweep = [
        (
            f"{m.setting.tool} {m.setting.way}",
            f"{m.setting.block or ''}",
            "-" if "failed" in m.answer else f"{m.seconds:.3g}",
            "-" if "failed" in m.answer else f"{m.answer['seconds_compile']:.1f}",
            "-" if "failed" in m.answer else format_size(m.answer["peak_bytes"]),
            m.remark,
        )
        for m in swept
    ]
    table(f"{title}: the sweep", [head, *sweep])
    head = ("", "block", "seconds", "x jacstore", "once s", "peak", "error", "kinks", "")
    lines = [
        (
            f"{row['tool']} {row['way']}",
            f"{row['block'] or ''}",
            f"{row['seconds']:.3g}",
            f"{row['ratio']:.3g}",
            f"{row['once']:.3g}",
            format_size(row["peak"]),
            f"{row['largest_error']:.0e}",
            f"{row['kinks']:.0f}",
            row["remark"],
        )
        for row in rows
    ]
    table(f"{title}: alternating rounds, medians", [head, *lines])


def draw(path: Path, title: str, rows: list[dict[str, Any]]) -> None:
    """Seconds of each way at its best block size; hatched where extrapolated."""
    colours = dict(zip(TOOLS, ("#1b9e77", "#d95f02", "#7570b3"), strict=True))
    figure = Figure(figsize=(10, 1.6 + 0.5 * len(rows)), layout="constrained")
    axes = figure.subplots()
    for place, row in enumerate(rows):
        hatch = "//" if row["extrapolated"] else None
        axes.barh(place, row["seconds"], color=colours[row["tool"]], hatch=hatch, edgecolor="white")
        axes.text(row["seconds"], place, f"  {row['seconds']:.3g} s, {row['ratio']:.3g} x", va="center")
    axes.set_yticks(
        range(len(rows)),
        [
            f"{row['tool']}: {row['way']}" + (f", {row['block']} x {row['block']}" if row["block"] else "")
            for row in rows
        ],
    )
    axes.invert_yaxis()
    axes.set_xscale("log")
    axes.set_xlim(right=4 * max(row["seconds"] for row in rows))
    axes.set_xlabel("seconds for the whole kernel, compile time apart (hatched: extrapolated from finished blocks)")
    axes.set_title(title)
    figure.savefig(path, dpi=120)


def ratios(rows: list[dict[str, Any]]) -> dict[str, float]:
    """How many times as long as jacstore in RAM the best way of each peer takes, and structured derivatives."""
    found = {
        tool: min(row["ratio"] for row in rows if row["tool"] == tool)
        for tool in TOOLS[1:]
        if any(row["tool"] == tool for row in rows)
    }
    for row in rows:
        if row["way"] == "structured derivatives":
            found["structured derivatives"] = row["ratio"]
    return found


def options(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__.split("\n")[0], epilog=__doc__.partition("\n\n")[2],
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("--net", choices=("mlp", "cnn"), default="mlp")
    parser.add_argument("--neural-tangents", metavar="PYTHON", help="an interpreter that has neural-tangents")
    parser.add_argument("--torch", metavar="PYTHON", help="an interpreter that has torch")
    parser.add_argument("--examples", type=int, help="N; default 2,048 for mlp, 512 for cnn")
    parser.add_argument(
        "--blocks", type=int, nargs="+", help="block sizes to sweep; those that do not divide N are left out"
    )
    parser.add_argument("--rounds", type=int, default=3, help="0: the sweep alone")
    parser.add_argument("--seconds", type=float, default=30.0, help="limit of one setting in a round")
    parser.add_argument("--sweep-seconds", type=float, default=6.0, help="limit of one setting in the sweep")
    parser.add_argument(
        "--memory", help="what each tool may allocate, such as 14GB; default two thirds of what is free"
    )
    parser.add_argument(
        "--patience", type=float, default=PATIENCE, help="seconds after which a peer that finished no block is given up"
    )
    parser.add_argument("--out", type=Path, default=Path("peers-run"))
    parser.add_argument("--small", action="store_true", help="tiny networks, 16 examples")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    """Run, print, draw; returns the rows of the table and the ratios."""
    given = options(arguments)
    n = given.examples or (16 if given.small else EXAMPLES[given.net])
    blocks = [b for b in given.blocks or ((8, 16) if given.small else BLOCKS[given.net]) if n % b == 0]
    if not blocks:
        raise InvalidRequestError(
            f"--blocks {given.blocks}: allowed are sizes that divide the {n} examples (--examples)"
        )
    memory = parse_size(given.memory, "--memory") or available_memory() * 2 // 3
    interpreters = {"jacstore": sys.executable, "neural-tangents": given.neural_tangents, "torch.func": given.torch}
    given.out.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix="compare-peers-"))
    network = folder / "network.npz"
    write_network(network, given.net, n, given.small)
    # The others are compared with jacstore's kernel, which is not made in steps that could be stopped.
    patience = {
        tool: max(given.patience, JACSTORE_PATIENCE) if tool == "jacstore" else given.patience for tool in TOOLS
    }
    children = {
        tool: Child(found, SCRIPTS[tool], network, memory, patience[tool])
        for tool, found in interpreters.items()
        if found
    }
    kept = given.out / f"peers-{given.net}{'-small' if given.small else ''}.csv"
    comparison = Comparison(children=children, folder=folder, memory=memory, measured=read_sweep(kept, given.net, n))
    known = {m.setting for m in comparison.measured}
    wanted = [
        Setting(tool=tool, way=way, block=block)
        for tool in children
        for way in WAYS[tool]
        for block in ([0] if tool == "jacstore" else blocks)
    ]
    comparison.measured = [m for m in comparison.measured if m.setting in wanted]
    try:
        # jacstore's kernel comes first: the others are compared with it.
        fresh = [s for s in wanted if s not in known or s.tool == "jacstore"]
        comparison.measured = [m for m in comparison.measured if m.setting not in fresh]
        comparison.run(fresh, "sweep", 1, given.sweep_seconds)
        comparison.measured.sort(key=lambda m: wanted.index(m.setting))
        finals = comparison.finals()
        if not finals or finals[0].tool != "jacstore":
            raise InvalidRequestError(
                f"jacstore itself failed ({comparison.measured[0].remark}); give more --memory, or fewer --examples"
            )
        for number in range(1, given.rounds + 1):
            comparison.run(finals, "round", number, given.seconds)
    finally:
        for child in children.values():
            child.close()
        shutil.rmtree(folder)
        write_csv(kept, given.net, n, comparison.measured)
    if not given.rounds:
        print(f"swept; kept in {kept}")
        return {"net": given.net, "examples": n}
    rows = summary(comparison, finals)
    title = f"{given.net}{' (small)' if given.small else ''}, N = {n:,}, summed output, float32"
    show(title, rows, [m for m in comparison.measured if m.phase == "sweep"])
    draw(kept.with_suffix(".png"), title, rows)
    figures = {"net": given.net, "examples": n, "rows": rows, "ratios": ratios(rows)}
    for name, ratio in figures["ratios"].items():
        print(f"best of {name} takes {ratio:.3g} times as long as jacstore in RAM")
    print(json.dumps(figures))
    return figures


if __name__ == "__main__":
    leave(main)
