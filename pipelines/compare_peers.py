"""How long the kernel of one network takes: jacstore, neural-tangents and torch.func, side by side on one machine.

    python pipelines/compare_peers.py --net mlp --neural-tangents NT/bin/python --torch TORCH/bin/python

mlp: 784-1024-1024-512-10, N = 2,048; cnn: that of headline.py, N = 512; float32, outputs summed, generated inputs. The
peers' interpreters are those of environments of their own, made for example by

    python3.11 -m venv NT && NT/bin/pip install jax==0.4.23 jaxlib==0.4.23 "numpy<2" "scipy<1.13" neural-tangents==0.6.5
    python3.11 -m venv TORCH && TORCH/bin/pip install torch==2.13.0 numpy

A sweep runs every way of every tool at every block size, each up to --sweep-seconds. The fastest block size of each way
then runs in alternating rounds, each up to --seconds; medians are printed. Whatever was stopped by these limits was
extrapolated from the blocks that were finished, and the table says by how many of how many. Compile time is apart.
All kernels are compared entry by entry.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import selectors
import shutil
import statistics
import subprocess
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
from jacstore.errors import Damaged, Refused
from jacstore.machine import available_memory, format_size, parse_size

CHILDREN = Path(__file__).resolve().parent / "peers"
TOOLS = ("jacstore", "neural-tangents", "torch.func")
SCRIPTS = {"jacstore": "with_jacstore.py", "neural-tangents": "with_neural_tangents.py", "torch.func": "with_torch.py"}
WAYS = {
    "jacstore": ("RAM", "disk"),
    "neural-tangents": ("jacobian contraction", "ntk-vector products", "structured derivatives"),
    "torch.func": ("vmap(grad)", "vmap(jacrev)", "vmap(grad) kept", "ntk-vector products"),
}
EXAMPLES = {"mlp": 2048, "cnn": 512}
BLOCKS = {"mlp": (32, 128, 512, 2048), "cnn": (16, 64, 256)}
# Rounding of float32 sums of 10^6 products, in another order in each tool.
TOLERANCE = 4e-6
# A step that does not end, or a program that does not compile, is given up after this many times the limit, at least:
GIVE_UP, PATIENCE = 4, 30.0


@dataclass(frozen=True, kw_only=True)
class Setting:
    """One way of one tool at one block size; 0 where the tool chooses its own."""

    tool: str
    way: str
    block: int

    def __str__(self) -> str:
        return f"{self.tool} {self.way}" + (f", blocks of {self.block}" if self.block else "")


@dataclass(frozen=True, kw_only=True)
class Measured:
    """What a setting answered in one round."""

    setting: Setting
    phase: str
    round: int
    answer: dict[str, Any]

    @property
    def seconds(self) -> float:
        return float(self.answer.get("seconds", np.inf))

    @property
    def whole(self) -> bool:
        """Whether every block was computed, so that nothing was extrapolated."""
        return "failed" not in self.answer and self.answer["products_done"] == self.answer["products"]

    @property
    def remark(self) -> str:
        if "failed" in self.answer:
            return str(self.answer["failed"])
        return "" if self.whole else f"extrapolated from {self.answer['products_done']} of {self.answer['products']}"


class Child:
    """A tool in its own interpreter, asked by lines of JSON; started again when it died."""

    def __init__(self, interpreter: str, script: str, network: Path, memory: int) -> None:
        self.command = [interpreter, str(CHILDREN / script), str(network), "--memory", str(memory)]
        self.process: subprocess.Popen[str] | None = None

    def ask(self, request: dict[str, Any]) -> dict[str, Any]:
        """The answer, or what kept it from coming."""
        process = self.process = self.process or self._start()
        assert process.stdin is not None and process.stdout is not None
        limit = max(PATIENCE, GIVE_UP * request["seconds"])
        line = ""
        try:
            print(json.dumps(request), file=process.stdin, flush=True)
            with selectors.DefaultSelector() as selector:
                selector.register(process.stdout, selectors.EVENT_READ)
                if not selector.select(limit):
                    self.close()
                    return {"failed": f"not one block within {limit:.0f} s"}
            line = process.stdout.readline()
        except BrokenPipeError:
            pass
        if line:
            return dict(json.loads(line))
        self.close()
        return {"failed": f"out of memory or crashed (exit status {process.returncode})"}

    def _start(self) -> subprocess.Popen[str]:
        paths = (str(CHILDREN.parent), str(CHILDREN.parent.parent), os.environ.get("PYTHONPATH", ""))
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths)), "JAX_PLATFORMS": "cpu"}
        return subprocess.Popen(
            self.command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment, text=True, bufsize=1
        )

    def close(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.communicate()
            self.process = None


@dataclass(kw_only=True)
class Comparison:
    """One network, the tools that compute its kernel, and what they took."""

    children: dict[str, Child]
    folder: Path
    memory: int
    measured: list[Measured] = field(default_factory=list)
    errors: dict[Setting, tuple[float, int]] = field(default_factory=dict)
    reference: np.ndarray | None = None

    def run(self, settings: Iterable[Setting], phase: str, number: int, seconds: float) -> None:
        """Measure each setting once, in order."""
        for setting in settings:
            path = self.folder / "kernel.npy"
            path.unlink(missing_ok=True)
            request = {"way": setting.way, "block": setting.block, "seconds": seconds, "kernel": str(path)}
            answer = self.children[setting.tool].ask({**request, "memory": self.memory})
            self.measured.append(Measured(setting=setting, phase=phase, round=number, answer=answer))
            print(
                f"{phase} {number}: {setting}: {self.measured[-1].seconds:.3g} s {self.measured[-1].remark}".rstrip(),
                flush=True,
            )
            if "failed" not in answer:
                self._compare(setting, np.load(path))

    def _compare(self, setting: Setting, kernel: np.ndarray) -> None:
        if self.reference is None:
            self.reference = kernel.astype(np.float64)
        self.errors[setting] = check_kernel(kernel, self.reference, str(setting))

    def of(self, setting: Setting, phase: str) -> list[Measured]:
        return [m for m in self.measured if m.setting == setting and m.phase == phase]

    def fastest_block(self, tool: str, way: str) -> Setting | None:
        """The setting of a way that the sweep found fastest; None if all failed."""
        swept = [
            m for m in self.measured if (m.setting.tool, m.setting.way) == (tool, way) and "failed" not in m.answer
        ]
        return min(swept, key=lambda m: m.seconds).setting if swept else None


def check_kernel(kernel: np.ndarray, reference: np.ndarray, name: str) -> tuple[float, int]:
    """The largest `|A_ij - B_ij| / sqrt(B_ii B_jj)` of the entries that were computed, and examples left out of it.

    A ReLU or a maximum that lies at its kink within rounding falls another way in another order of sums, and entries of
    that example move by far more than rounding. Examples are left out, the one with most such entries first, until none
    is left, and counted.

    Raises
    ------
    Damaged
        If more than one example in fifty was left out.
    """
    scale = np.sqrt(np.diag(reference))
    errors = np.nan_to_num(np.abs(kernel - reference) / (scale[:, None] * scale), nan=0.0)
    beyond = errors > TOLERANCE
    kinks = 0
    while beyond.any():
        worst = int(beyond.sum(0).argmax())
        beyond[worst], beyond[:, worst] = False, False
        errors[worst], errors[:, worst] = 0.0, 0.0
        kinks += 1
    largest = float(errors.max())
    if kinks > max(1, len(kernel) // 50):
        raise Damaged(
            f"{name}: kernel differs from jacstore's by more than {TOLERANCE:.0e} of sqrt(G_ii G_jj) in entries of "
            f"{kinks} of {len(kernel)} examples, allowed one in fifty"
        )
    return largest, kinks


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


def write_csv(path: Path, measured: Sequence[Measured]) -> None:
    facts = ("seconds", "seconds_measured", "seconds_compile", "seconds_build", "products_done", "products")
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["phase", "round", "tool", "way", "block", *facts, "peak_bytes", "remark"])
        for m in measured:
            known = [m.answer.get(fact, "") for fact in (*facts, "peak_bytes")]
            writer.writerow([m.phase, m.round, m.setting.tool, m.setting.way, m.setting.block, *known, m.remark])


def summary(comparison: Comparison, finals: list[Setting]) -> list[dict[str, Any]]:
    """Medians of the alternating rounds, one row a setting, with the ratio to jacstore in RAM of the same round."""
    base = [m.seconds for m in comparison.of(finals[0], "round")]
    rows = []
    for setting in finals:
        runs = comparison.of(setting, "round")
        error, kinks = comparison.errors[setting]
        rows.append(
            {
                "tool": setting.tool,
                "way": setting.way,
                "block": setting.block,
                "seconds": statistics.median(m.seconds for m in runs),
                "ratio": statistics.median(m.seconds / b for m, b in zip(runs, base, strict=True)),
                "compile": max(
                    m.answer.get("seconds_compile", 0.0) for m in comparison.measured if m.setting == setting
                ),
                "peak": max(m.answer.get("peak_bytes", 0) for m in runs),
                "largest_error": error,
                "kinks": kinks,
                "extrapolated": not all(m.whole for m in runs),
                "remark": "; ".join(sorted({m.remark for m in runs} - {""})),
            }
        )
    return rows


def show(title: str, rows: list[dict[str, Any]], swept: list[Measured]) -> None:
    """Print the sweep and the medians."""
    head = ("swept", "block", "seconds", "compile s", "peak", "")
    sweep = [
        (
            f"{m.setting.tool} {m.setting.way}",
            f"{m.setting.block or ''}",
            "-" if "failed" in m.answer else f"{m.seconds:.3g}",
            f"{m.answer.get('seconds_compile', 0):.1f}",
            format_size(m.answer.get("peak_bytes", 0)),
            m.remark,
        )
        for m in swept
    ]
    table(f"{title}: the sweep", [head, *sweep])
    head = ("", "block", "seconds", "x jacstore", "compile s", "peak", "error", "kinks", "")
    lines = [
        (
            f"{row['tool']} {row['way']}",
            f"{row['block'] or ''}",
            f"{row['seconds']:.3g}",
            f"{row['ratio']:.3g}",
            f"{row['compile']:.1f}",
            format_size(row["peak"]),
            f"{row['largest_error']:.0e}",
            f"{row['kinks']}",
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
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=30.0, help="limit of one setting in a round")
    parser.add_argument("--sweep-seconds", type=float, default=6.0, help="limit of one setting in the sweep")
    parser.add_argument(
        "--memory", help="what each tool may allocate, such as 14GB; default two thirds of what is free"
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
        raise Refused(f"--blocks {given.blocks}: allowed are sizes that divide the {n} examples (--examples)")
    memory = parse_size(given.memory, "--memory") or available_memory() * 2 // 3
    interpreters = {"jacstore": sys.executable, "neural-tangents": given.neural_tangents, "torch.func": given.torch}
    given.out.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix="compare-peers-"))
    network = folder / "network.npz"
    write_network(network, given.net, n, given.small)
    children = {tool: Child(i, SCRIPTS[tool], network, memory) for tool, i in interpreters.items() if i}
    comparison = Comparison(children=children, folder=folder, memory=memory)
    ways = [(tool, way) for tool in children for way in WAYS[tool]]
    try:
        for tool, way in ways:
            swept = [Setting(tool=tool, way=way, block=b) for b in ([0] if tool == "jacstore" else blocks)]
            comparison.run(swept, "sweep", 1, given.sweep_seconds)
        finals = [found for tool, way in ways if (found := comparison.fastest_block(tool, way))]
        for number in range(1, given.rounds + 1):
            comparison.run(finals, "round", number, given.seconds)
    finally:
        for child in children.values():
            child.close()
        shutil.rmtree(folder)
        write_csv(given.out / f"peers-{given.net}.csv", comparison.measured)
    rows = summary(comparison, finals)
    title = f"{given.net}{' (small)' if given.small else ''}, N = {n:,}, summed output, float32"
    show(title, rows, [m for m in comparison.measured if m.phase == "sweep"])
    draw(given.out / f"peers-{given.net}.png", title, rows)
    figures = {"net": given.net, "examples": n, "rows": rows, "ratios": ratios(rows)}
    for name, ratio in figures["ratios"].items():
        print(f"best of {name} takes {ratio:.3g} times as long as jacstore in RAM")
    print(json.dumps(figures))
    return figures


if __name__ == "__main__":
    leave(main)
