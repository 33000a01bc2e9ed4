"""What trust costs: `build` and `gram` with checksums and norms, and with either switched off, alternating in one run.

    python pipelines/bench_trust.py --examples 512

Checksums are the crc32c of every piece that is written or read. Norms are the squared row norms that the device takes,
the look at the effect of rounding, and the comparison with a kernel's diagonal. Each round runs all three settings one
after the other; medians are printed, and what share of the whole the part takes that was left out. Norms of
convolutions multiply factors and cost more than those of rows: they are reported, not bounded.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import shutil
import statistics
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import jax.numpy as jnp
from crc32c import crc32c

import headline
import jacstore

SETTINGS = ("everything", "no checksums", "no norms")
NETS = {"mlp-dense": ("mlp", "dense"), "mlp-factored": ("mlp", "factored"), "cnn-factored": ("cnn", "factored")}


def _no_checksum(data: Any, value: int = 0) -> int:
    return 0


def _no_squares(rows: Any) -> Any:
    return jnp.zeros((*rows.shape[:2], 1), jnp.float32)


def _no_norms(leaf: Any, operands: Any, xp: Any) -> Any:
    return xp.zeros((*operands[leaf.terms[0].cotangents].shape[:2], 1), xp.float32)


@contextlib.contextmanager
def without(setting: str) -> Iterator[None]:
    """Leave out what the setting names, wherever it is computed."""
    replaced: dict[str, Any] = {}
    if setting == "no checksums":
        users = [name for name, module in sys.modules.items() if vars(module).get("crc32c") is crc32c]
        replaced = {f"{name}.crc32c": _no_checksum for name in users if name.startswith("jacstore.")}
    if setting == "no norms":
        replaced = {
            "jacstore.rows.device_pass._partial_squares": _no_squares,
            "jacstore.rows.device_pass.squared_norms": _no_norms,
            "jacstore.store.unit_form.observed_rounding": lambda *given: None,
            "jacstore.kernels.diagonal.Diagonal.compare": lambda *given: (0.0, 1.0, ""),
        }
    with contextlib.ExitStack() as stack:
        for name, instead in replaced.items():
            stack.enter_context(mock.patch(name, instead))
        yield


def measure(net: str, layout: str, given: argparse.Namespace) -> dict[str, float]:
    """Median seconds of build, compiling apart, and of gram in each setting, and the share of each part."""
    problem = headline.problem(net, given.examples // (8 if net == "cnn" else 1), None)
    seconds: dict[tuple[str, str], list[float]] = {}
    for _ in range(given.rounds):
        for setting in SETTINGS:
            shutil.rmtree(given.out, ignore_errors=True)
            with without(setting):
                store = jacstore.build(problem, given.out / "run.jac", layout=layout, codec="none", memory=given.memory)
                kernel = jacstore.gram(store, out=given.out / "run.ntk", memory=given.memory)
            built = store.report["seconds_total"] - store.report["seconds_compile"]
            seconds.setdefault(("build", setting), []).append(built)
            seconds.setdefault(("gram", setting), []).append(kernel.report["seconds_total"])
    shutil.rmtree(given.out)
    median = {key: statistics.median(values) for key, values in seconds.items()}
    figures = {}
    for what in ("build", "gram"):
        whole = median[what, SETTINGS[0]]
        figures[f"{what}_seconds"] = whole
        for setting in SETTINGS[1:]:
            figures[f"{what}_share_{setting.split()[1]}"] = 1 - median[what, setting] / whole
    return figures


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    """Run and print the table; returns the figures."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--examples", type=int, default=512, help="of the MLP; the CNN has an eighth of them")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--nets", nargs="+", choices=NETS, default=list(NETS), metavar="NET", help="(%(default)s)")
    parser.add_argument("--memory", default="4GB")
    parser.add_argument("--out", type=Path, default=Path("bench-run"))
    given = parser.parse_args(arguments)
    figures = {}
    print(f"{'':13}  {'build':^27}  {'gram':^27}")
    print(f"{'':13}" + f"  {'seconds':>7} {'checksums':>9} {'norms':>9}" * 2)
    for net, layout in (NETS[name] for name in given.nets):
        f = figures[f"{net} {layout}"] = measure(net, layout, given)
        parts = [
            f"  {f[f'{what}_seconds']:7.2f} {f[f'{what}_share_checksums']:9.1%} {f[f'{what}_share_norms']:9.1%}"
            for what in ("build", "gram")
        ]
        print(f"{net + ' ' + layout:13}" + "".join(parts), flush=True)
    print(json.dumps(figures))
    return figures


if __name__ == "__main__":
    main(sys.argv[1:])
