"""Bytes: `gram` reads what its plan says, and allocates no more than `--memory`."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import jacstore
from jacstore.terms import Dot, Leaf, Operand

ROWS, PARAMETERS = 3000, 4000

# Runs in a process of its own: the peak of a process that has done other work says nothing.
MEASURE = """
import json, pathlib, sys
import jacstore
from jacstore.kernels import gram as assembly

def status(key):
    line = next(l for l in pathlib.Path("/proc/self/status").read_text().splitlines() if l.startswith(key))
    return int(line.split()[1]) * 1024

def read_characters():
    return int(pathlib.Path("/proc/self/io").read_text().split("rchar:")[1].split()[0])

store, small, out, memory = sys.argv[1:5]
assembly.gram(small, out=out + "-warm", memory="100MB")
pathlib.Path("/proc/self/clear_refs").write_text("5")
baseline, before = status("VmRSS"), read_characters()
kernel = assembly.gram(store, out=out, memory=memory)
print(json.dumps({"extra": status("VmHWM") - baseline, "rchar": read_characters() - before, **kernel.report}))
"""


def random_store(path: Path, rows: int, parameters: int, **options: Any) -> jacstore.JacobianStore:
    """A store of normal rows, one output."""
    with jacstore.StoreWriter(path, {"w": (parameters,)}, rows, 1, **options) as writer:
        for start, stop in writer.missing:
            block = np.random.default_rng(start).standard_normal((stop - start, 1, parameters), np.float32)
            writer.write_unit(start, {"w": block})
    return writer.store


@pytest.fixture(scope="module")
def stores(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A store of 48 MB, built for small memory, and a tiny one to warm up with."""
    folder = tmp_path_factory.mktemp("stores")
    random_store(folder / "large.jac", ROWS, PARAMETERS, memory="20MB")
    random_store(folder / "small.jac", 50, 100)
    return folder / "large.jac", folder / "small.jac"


def measured(stores: tuple[Path, Path], out: Path, memory: str) -> dict[str, Any]:
    """The report of one gram in a new process, with what it allocated and read according to the system."""
    command = [sys.executable, "-c", MEASURE, str(stores[0]), str(stores[1]), str(out), memory]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return dict(json.loads(done.stdout))


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs Linux's /proc")
@pytest.mark.parametrize(("memory", "passes"), [("25MB", "several"), ("40MB", "several"), ("150MB", "one")])
def test_gram_stays_within_memory_and_reads_what_the_plan_says(
    stores: tuple[Path, Path], tmp_path: Path, memory: str, passes: str
) -> None:
    report = measured(stores, tmp_path / "k.ntk", memory)
    budget = int(memory.removesuffix("MB")) * 1_000_000
    print(f"--memory {memory}: {report['extra'] / 1e6:.1f} MB more than before, passes {report['passes']:.3f}")
    assert report["extra"] <= 1.15 * budget
    assert report["passes"] == pytest.approx(report["expected_passes"], rel=1e-12)
    assert (report["passes"] == 1.0) == (passes == "one")
    # What the store counts is what the system saw; records and attributes are the rest.
    assert report["bytes_read"] <= report["rchar"] <= 1.05 * report["bytes_read"] + 1_000_000
    store = jacstore.open(stores[0])
    rows = store.array.compute().astype(np.float64)
    exact = rows @ rows.T
    scale = np.sqrt(np.diag(exact))
    error = np.abs(jacstore.open(tmp_path / "k.ntk").array.compute() - exact) / np.outer(scale, scale)
    assert error.max() <= 2e-6


# As above, for any call: what it allocates beyond what the same call for a small store left behind.
EXTRA = """
import pathlib, sys
import jacstore

def status(key):
    line = next(l for l in pathlib.Path("/proc/self/status").read_text().splitlines() if l.startswith(key))
    return int(line.split()[1]) * 1024

def call(store, memory):
    return {call}

store, small, memory = sys.argv[1:4]
call(small, "100MB")
pathlib.Path("/proc/self/clear_refs").write_text("5")
baseline = status("VmRSS")
found = call(store, memory)
print(status("VmHWM") - baseline)
"""


def extra_bytes(call: str, large: Path, small: Path, memory: str) -> int:
    command = [sys.executable, "-c", EXTRA.replace("{call}", call), str(large), str(small), memory]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return int(done.stdout)


def factored_store(path: Path, n: int, inside: int, outside: int) -> Path:
    """A store of one dense layer by its factors."""
    rng = np.random.default_rng(0)
    term = Dot(inputs="x", cotangents="d", scale=1.0, views=())
    leaf = Leaf(path="w", shape=(inside, outside), dtype="float32", offset=0, terms=(term,))
    operands = [
        Operand(name="x", role="inputs", shape=(1, 1, inside)),
        Operand(name="d", role="cotangents", shape=(1, 1, outside)),
    ]
    with jacstore.StoreWriter(path, [leaf], n, 1, operands=operands, memory="30MB") as writer:
        for start, stop in writer.missing:
            x = rng.standard_normal((stop - start, 1, 1, inside), np.float32)
            d = rng.standard_normal((stop - start, 1, 1, 1, outside), np.float32)
            writer.write_unit(start, {"w": {"x": x, "d": d}})
    return path


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs Linux's /proc")
@pytest.mark.parametrize("memory", ["60MB", "200MB"])
def test_gram_of_factors_stays_within_memory(tmp_path: Path, memory: str) -> None:
    large, small = factored_store(tmp_path / "l", 4000, 300, 200), factored_store(tmp_path / "s", 40, 30, 20)
    call = 'jacstore.gram(store, out=store + memory + ".ntk", memory=memory)'
    assert extra_bytes(call, large, small, memory) <= 1.15 * int(memory.removesuffix("MB")) * 1_000_000


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs Linux's /proc")
@pytest.mark.parametrize("likelihood", ["gaussian", "softmax"])
def test_the_normal_matrix_stays_within_memory(tmp_path: Path, likelihood: str) -> None:
    for name, n, p in (("large", 1500, 1200), ("small", 20, 30)):
        rng = np.random.default_rng(0)
        with jacstore.StoreWriter(tmp_path / name, {"w": (p,)}, n, 4, memory="20MB") as writer:
            for start, stop in writer.missing:
                rows = rng.standard_normal((stop - start, 4, p), np.float32)
                outputs = rng.standard_normal((stop - start, 4))
                writer.write_unit(start, {"w": rows}, outputs=outputs)
    call = f'jacstore.ggn(store, "{likelihood}", 1.0, memory=memory)'
    assert extra_bytes(call, tmp_path / "large", tmp_path / "small", "50MB") <= 1.15 * 50_000_000
