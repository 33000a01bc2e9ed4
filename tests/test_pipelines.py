"""The pipelines and notebooks run, at toy size, and print what they promise."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import headline

ROOT = Path(__file__).resolve().parent.parent


def run(folder: Path, *words: str) -> str:
    """Standard output of a Python command in a folder."""
    environment = {**os.environ, "MPLBACKEND": "agg"}
    command = [sys.executable, *words]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_digits_prints_accuracies_and_draws_a_figure_and_a_rerun_reuses_everything(tmp_path: Path) -> None:
    first = run(tmp_path, str(ROOT / "pipelines" / "digits.py"), "--small", "--out", "run")
    assert "kernel ridge regression on its NTK" in first
    assert "random kernel entries against float64" in first
    assert (tmp_path / "run" / "digits.png").stat().st_size > 10_000
    second = run(tmp_path, str(ROOT / "pipelines" / "digits.py"), "--small", "--out", "run")
    assert second.count(" 0 computed") == 4


@pytest.mark.parametrize(("net", "outputs"), [("mlp", "all"), ("cnn", "sum")])
def test_mnist_runs_from_an_npz(tmp_path: Path, net: str, outputs: str) -> None:
    rng = np.random.default_rng(0)
    arrays = {
        f"{kind}_{part}": rng.integers(0, top, size=(40, *shape), dtype=np.uint8)
        for part in ("train", "test")
        for kind, top, shape in (("x", 256, (28, 28)), ("y", 10, ()))
    }
    np.savez(tmp_path / "data.npz", **arrays)
    words = ("--data", "data.npz", "--net", net, "--outputs", outputs, "--small", "--memory", "500MB")
    printed = run(tmp_path, str(ROOT / "pipelines" / "mnist.py"), *words)
    assert "Largest eigenvalues" in printed
    assert (tmp_path / "mnist-run" / "mnist.png").exists()


def test_bench_gram_compares_with_bare_blas_in_one_run(tmp_path: Path) -> None:
    words = ("--rows", "300", "--parameters", "2000", "--rounds", "1", "--memory", "500MB")
    figures = json.loads(run(tmp_path, str(ROOT / "pipelines" / "bench_gram.py"), *words).splitlines()[-1])
    assert figures["passes"] == 1.0
    assert all(figures[key] > 0 for key in ("bare", "arithmetic", "gram"))


def test_bench_build_compares_with_device_and_disk_in_one_run(tmp_path: Path) -> None:
    words = ("--examples", "20", "--widths", "30", "20", "5", "--rounds", "1", "--memory", "500MB")
    figures = json.loads(run(tmp_path, str(ROOT / "pipelines" / "bench_build.py"), *words).splitlines()[-1])
    assert figures["float32"]["bytes"] > 1.5 * figures["bfloat16"]["bytes"]
    assert all(figures["float32"][key] > 0 for key in ("build", "device_alone", "write_alone", "limit"))


@pytest.mark.parametrize("notebook", sorted((ROOT / "notebooks").glob("*.ipynb")), ids=lambda path: path.stem)
def test_the_cells_of_a_notebook_run_in_order(tmp_path: Path, notebook: Path) -> None:
    cells = json.loads(notebook.read_text())["cells"]
    source = "\n\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "code")
    script = tmp_path / "cells.py"
    script.write_text(source)
    run(tmp_path, str(script))
    assert any(cell["outputs"] for cell in cells if cell["cell_type"] == "code"), "save it with its outputs"


def test_headline_reads_factors_once_and_agrees_with_plain_gradients(tmp_path):
    figures = headline.main(["--examples", "40", "--outputs", "all", "--memory", "2GB", "--out", str(tmp_path)])
    assert figures["passes"] == 1 and figures["largest_error"] <= 1e-6
    assert figures["smaller"] > 100 and figures["parameters"] == 2_383_370
