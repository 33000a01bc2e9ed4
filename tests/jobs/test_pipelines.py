"""The pipelines and notebooks run, at toy size, and print what they promise."""

from __future__ import annotations

import csv
import importlib.util
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import bench_contraction
import bench_trust
import compare_laplace
import compare_peers
import compile_time
import device_check
import headline
import issue30
import jacstore
import layerwise
import mnist_all_outputs
import model_zoo
import precision
import roofline
import soak
import training
import transformer
from jacstore.base.events import ItemDone, SlabDone
from jacstore.errors import DamagedDataError, RunInterruptedError
from jacstore.problem.problem import prepare
from jacstore.rows.trace.cut import cut_before_products
from jacstore.terms.kinds import KINDS
from peers import child, serve

ROOT = Path(__file__).resolve().parents[2]


def run(folder: Path, *words: str) -> str:
    """Standard output of a Python command in a folder; notebooks take few examples."""
    environment = {**os.environ, "MPLBACKEND": "agg", "NOTEBOOK_EXAMPLES": "30"}
    command = [sys.executable, *words]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_digits_prints_accuracies_and_draws_a_figure_and_a_rerun_reuses_everything(tmp_path: Path) -> None:
    first = run(tmp_path, str(ROOT / "pipelines" / "digits.py"), "--small", "--out", "run")
    assert "kernel ridge regression on its NTK" in first
    assert "random kernel entries against float64" in first
    assert (tmp_path / "run" / "digits.png").stat().st_size > 10_000
    second = run(tmp_path, str(ROOT / "pipelines" / "digits.py"), "--small", "--out", "run", "--leave-one-out", "9")
    assert "refitting 9 examples without each" in second
    assert second.count(" 0 computed") == 4


@pytest.mark.parametrize(("net", "outputs"), [("mlp", "all"), pytest.param("cnn", "sum", marks=pytest.mark.slow)])
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


@pytest.mark.slow
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


@pytest.mark.parametrize("net", ["mlp", pytest.param("cnn", marks=pytest.mark.slow)])
def test_kernels_of_leaves_add_up_and_shares_of_the_trace_are_those_of_the_norms(tmp_path: Path, net: str) -> None:
    *leaves, whole = rows = layerwise.main(["--small", "--nets", net, "--memory", "500MB", "--out", str(tmp_path)])
    norms = jacstore.open(tmp_path / net / "train.jac").norms.sum((0, 1))
    assert [row.share_of_trace for row in leaves] == pytest.approx(norms / norms.sum(), rel=1e-5)
    assert whole.share_of_trace == pytest.approx(1) and whole.alignment_with_whole == pytest.approx(1)
    assert sum(row.parameters for row in leaves) == whole.parameters
    assert len((tmp_path / "layerwise.csv").read_text().splitlines()) == 1 + len(rows)
    assert (tmp_path / "layerwise.png").stat().st_size > 20_000


def test_leaves_that_do_not_add_up_to_the_kernel_stop_the_pipeline() -> None:
    with pytest.raises(SystemExit, match="do not add up"):
        layerwise.check_sum(np.eye(3) * 1.01, np.eye(3), 1e-3)


@pytest.mark.slow
def test_a_kernel_that_is_not_stored_answers_as_the_stored_one(tmp_path: Path) -> None:
    words = ["--small", "--memory", "500MB", "--widths", "8", "24", "--out"]
    stored = mnist_all_outputs.main([*words, str(tmp_path / "stored")])
    lazy = mnist_all_outputs.main([*words, str(tmp_path / "lazy"), "--largest-kernel", "1kB"])
    assert [row.kernel for row in stored + lazy] == ["stored", "stored", "lazy", "lazy"]
    assert not (tmp_path / "lazy" / "width-8" / "train.ntk").exists()
    for one, other in zip(stored, lazy, strict=True):
        assert other.largest_eigenvalue == pytest.approx(one.largest_eigenvalue, rel=1e-5)
        assert other.test_accuracy == pytest.approx(one.test_accuracy, abs=0.051)  # one of 20
        assert one.bytes_store < one.bytes_rows
    assert len((tmp_path / "lazy" / "mnist-all-outputs.csv").read_text().splitlines()) == 3
    assert (tmp_path / "lazy" / "mnist-all-outputs.png").stat().st_size > 20_000


@pytest.mark.parametrize(("channels", "size"), [((3, 4, 6), 8), ((3, 64, 64), 4)])
def test_bare_products_of_headline_are_those_of_the_cheapest_form_of_each_leaf(channels, size):
    params = headline.cnn_params(channels=channels)
    params["dense"]["weight"] = params["dense"]["weight"][: channels[-1] * (size // 4) ** 2]
    images = np.ones((2, size, size, 3), np.float32)
    task = jacstore.Problem(apply=headline.cnn, params=params, inputs=images, outputs="sum")
    store = jacstore.build(task, None, layout="factored")
    first, last = channels[1:]
    found = sorted(headline.bare_shapes(store))
    biases, head = [(1, first), (1, last)], [(1, last * (size // 4) ** 2), (1, 10)]
    # Rows of a filter, or pairs of its positions.
    second = [(1, 9 * first * last)] if size == 8 else [(4, first), (4, last)]
    assert found == sorted([(1, 27 * first), *second, *biases, *head])
    bare = headline.Bare(store, rows=8)
    bare.measure()
    assert len(bare.seconds) == 1 and min(bare.seconds[0]) >= 0


@pytest.mark.slow
def test_headline_reads_factors_once_and_agrees_with_plain_gradients(tmp_path):
    figures = headline.main(["--examples", "40", "--outputs", "all", "--memory", "2GB", "--out", str(tmp_path)])
    assert figures["passes"] == 1 and figures["largest_error"] <= 1e-6
    assert figures["smaller"] > 100 and figures["parameters"] == 2_383_370
    built = headline.main(["--examples", "8", "--net", "cnn", "--no-kernel", "--out", str(tmp_path / "cnn")])
    assert built["smaller"] > 13 and "seconds_gram" not in built and not (tmp_path / "cnn/kernel.ntk").exists()


@pytest.mark.slow
def test_device_check_runs_small_and_its_checks_hold(tmp_path: Path) -> None:
    # Time enough for a busy machine: what is asserted does not depend on it.
    printed = run(tmp_path, str(ROOT / "pipelines" / "device_check.py"), "--small", "--minutes", "60")
    figures = json.loads(printed)
    assert figures["ok"] and not figures["failed"] and not figures["skipped"]
    assert figures["factored"]["passes"] == figures["dense"]["passes"] == 1
    # What the guard would find if products were of 16 bits.
    errors = figures["tf32"]["largest_errors"]
    assert errors["fast"] > 10 * device_check.SPOILED > 10 * errors["dense"]
    terms = {kind for leaves in figures["kinds"]["terms"].values() for leaf in leaves for kind in leaf.split("+")}
    assert terms == set(KINDS)


def test_sections_without_time_are_skipped_and_what_ends_one_leaves_the_others() -> None:
    checks = device_check.Run(600, small=True)

    def stopped(run: device_check.Run) -> dict[str, float]:
        raise RunInterruptedError("stopped between units")

    def fails(run: device_check.Run) -> dict[str, float]:
        run.check("error", 0.5, 0.1)
        raise ValueError("no device")

    checks.do("late", lambda run: {}, needs=601, most=1)
    checks.do("long", stopped, needs=1, most=1)
    checks.do("broken", fails, needs=1, most=1)
    checks.do("good", lambda run: {"rate": 2.0}, needs=1, most=1)
    assert checks.skipped.keys() == {"late", "long"}
    assert checks.failed == ["broken: error 0.5, allowed 1e-01", "broken: ValueError: no device"]
    assert checks.figures["good"]["rate"] == 2.0


def test_a_section_that_cannot_be_interrupted_does_not_outlast_the_run(tmp_path: Path) -> None:
    lines = (
        "import sys, threading",
        f"sys.path.insert(0, {str(ROOT / 'pipelines')!r})",
        "import device_check",
        "device_check.MARGIN = 0",
        "checks = device_check.Run(3, small=True)",
        "checks.watch()",
        "checks.do('compiles', lambda run: threading.Event().wait(), needs=0, most=300)",
    )
    figures = json.loads(run(tmp_path, "-c", "\n".join(lines)))
    assert figures["skipped"].keys() == {"compiles"}


@pytest.mark.slow
def test_compare_peers_measures_jacstore_alone(tmp_path: Path) -> None:
    words = (str(ROOT / "pipelines" / "compare_peers.py"), "--small", "--net", "cnn", "--out", "out", "--rounds", "1")
    figures = json.loads(run(tmp_path, *words).splitlines()[-1])
    assert {row["way"] for row in figures["rows"]} == {"RAM", "disk"}
    assert all(row["seconds"] > 0 and row["largest_error"] == 0 for row in figures["rows"])
    assert (tmp_path / "out" / "peers-cnn-small.png").stat().st_size > 5_000
    assert len((tmp_path / "out" / "peers-cnn-small.csv").read_text().splitlines()) == 1 + 2 + 2


def test_a_sweep_is_read_back_from_its_csv_for_the_same_network_and_examples(tmp_path: Path) -> None:
    answers = [{"seconds": 2.5, "products_done": 1, "products": 3, "kinks": 0}, {"failed": "out of memory"}]
    swept = [
        child.Measured(
            setting=child.Setting(tool="torch.func", way=f"way {n}", block=8), phase="sweep", round=1, answer=answer
        )
        for n, answer in enumerate(answers)
    ]
    compare_peers.write_csv(tmp_path / "kept.csv", "mlp", 16, [*swept, replace(swept[0], phase="round")])
    found = compare_peers.read_sweep(tmp_path / "kept.csv", "mlp", 16)
    assert found == swept
    assert [m.remark for m in found] == ["extrapolated from 1 of 3", "out of memory"]
    assert compare_peers.read_sweep(tmp_path / "kept.csv", "mlp", 32) == []


PEERS = {"--neural-tangents": "JACSTORE_NEURAL_TANGENTS", "--torch": "JACSTORE_TORCH"}


@pytest.mark.parametrize("net", ["mlp", "cnn"])
@pytest.mark.parametrize("option", PEERS)
def test_peers_compute_the_kernel_that_jacstore_does(tmp_path: Path, option: str, net: str) -> None:
    interpreter = os.environ.get(PEERS[option])
    if not interpreter:
        pytest.skip(f"{PEERS[option]} names no interpreter")
    words = ("--small", "--net", net, "--rounds", "1", "--patience", "900", "--out", str(tmp_path), option, interpreter)
    figures = json.loads(run(tmp_path, str(ROOT / "pipelines" / "compare_peers.py"), *words).splitlines()[-1])
    theirs = [row for row in figures["rows"] if row["tool"] != "jacstore"]
    assert {row["way"] for row in theirs} == set(compare_peers.WAYS[theirs[0]["tool"]])
    assert all(row["largest_error"] < 4e-6 and row["kinks"] == 0 for row in theirs)


class Rows:
    """A tool whose Jacobian is given; counts how often it was asked for rows."""

    def __init__(self, rows: np.ndarray) -> None:
        self.given, self.asked = rows, 0

    def rows(self, examples: slice) -> np.ndarray:
        self.asked += 1
        return self.given[examples]

    def product(self, left: np.ndarray, right: np.ndarray) -> np.ndarray:
        return left @ right.T


@pytest.mark.parametrize("way", ["again", "kept"])
def test_a_peer_is_asked_for_each_block_on_and_above_the_diagonal_once(tmp_path: Path, way: str) -> None:
    tool = Rows(np.random.default_rng(0).standard_normal((12, 5), np.float32))
    request = {"way": way, "block": 4, "seconds": 60, "kernel": str(tmp_path / "kernel.npy")}
    answer = serve.measure(tool, 12, request)
    assert answer["products_done"] == answer["products"] == 6
    assert tool.asked == serve.totals(12, 4, way == "kept")["rows"] == (3 if way == "kept" else 6)
    assert np.allclose(np.load(tmp_path / "kernel.npy"), tool.given @ tool.given.T, rtol=1e-5)


def test_a_peer_out_of_time_is_extrapolated_from_the_blocks_it_finished(tmp_path: Path) -> None:
    tool = Rows(np.ones((12, 5), np.float32))
    request = {"way": "again", "block": 4, "seconds": 0, "kernel": str(tmp_path / "kernel.npy")}
    answer = serve.measure(tool, 12, request)
    assert (answer["products_done"], answer["products"]) == (1, 6)
    assert answer["seconds"] == pytest.approx(6 * answer["seconds_measured"])
    assert np.isnan(np.load(tmp_path / "kernel.npy")).sum() == 144 - 16


def test_a_peer_that_crashes_or_never_answers_is_recorded_as_such(tmp_path: Path) -> None:
    for program, said in (("raise SystemExit(7)", "exit status 7"), ("input(); input()", "not one block within")):
        script = tmp_path / "script.py"
        script.write_text(program)
        tool = child.Child(sys.executable, str(script), tmp_path / "network.npz", 10**9, patience=0.5)
        assert said in tool.ask({"seconds": 0.1})["failed"]


def test_kernels_that_differ_are_refused_and_examples_at_a_kink_are_counted() -> None:
    rows = np.random.default_rng(0).standard_normal((60, 8))
    kernel = rows @ rows.T
    moved = kernel.copy()
    moved[3] += 1e-3
    moved[:, 3] += 1e-3
    largest, kinks = child.check_kernel(moved.astype(np.float32), kernel, "moved")
    assert largest < child.TOLERANCE and kinks == 1
    with pytest.raises(DamagedDataError, match="60 examples"):
        child.check_kernel(1.001 * kernel, kernel, "scaled")


@pytest.mark.slow
def test_hessian_products_agree_and_a_way_that_needs_too_much_memory_is_recorded(tmp_path: Path) -> None:
    script = str(ROOT / "pipelines" / "hessian_products.py")
    ways = ("--ways", "HVP", "GVP", "dual solve")
    printed = run(tmp_path, script, "--small", "--out", "out", *ways)
    assert "Hessian = GGN" in printed and "dual solve" in printed
    printed = run(tmp_path, script, "--largest", "1e5", "--memory", "600MB", "--out", "out", "--ways", "explicit")
    assert "explicit, D = 100,000: out of memory" in printed
    lines = (tmp_path / "out" / "hessian-products.csv").read_text().splitlines()
    assert lines[-1].startswith("explicit,False,100000,out of memory,nan")
    assert (tmp_path / "out" / "hessian-products.png").stat().st_size > 10_000


@pytest.mark.slow
def test_sampling_ablation_rejects_few_points(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    arrays = {
        f"{kind}_{part}": rng.integers(0, top, size=(40, *shape), dtype=np.uint8)
        for part in ("train", "test")
        for kind, top, shape in (("x", 256, (28, 28)), ("y", 10, ()))
    }
    np.savez(tmp_path / "data.npz", **arrays)
    words = ("--data", "data.npz", "--small", "--out", "out", "--memory", "500MB", "--normal-examples", "8")
    verdicts = json.loads(run(tmp_path, str(ROOT / "pipelines" / "sampling_ablation.py"), *words).splitlines()[-1])
    assert all({1, 2} <= set(verdict["rejected"]) for verdict in verdicts.values())
    lines = (tmp_path / "out" / "sampling.csv").read_text().splitlines()
    assert len(lines) == 1 + 2 + 4 + 4 + 2 + 1  # a header and the rows of each way
    accepted = [line for line in lines if line.startswith("perturb and solve")]
    assert float(accepted[0].split(",")[2]) > 0.01
    assert (tmp_path / "out" / "sampling.png").stat().st_size > 20_000


def test_torch_rows_compares_bytes_speed_and_rows(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    script = str(ROOT / "pipelines" / "torch_rows.py")
    printed = run(tmp_path, script, "--small", "--examples", "6", "--memory", "500MB")
    table = json.loads(printed.splitlines()[-1])
    assert [row["net"] for row in table] == ["mlp", "cnn", "text"]
    assert all(row["largest_row_error"] <= 1e-5 and row["bytes_stored"] < row["bytes_dense"] for row in table)
    assert all(row["examples_per_second"] > 0 and row["jacrev_per_second"] > 0 and row["factored"] for row in table)


# Models whose products all have factors: the most of their parameters that are rows beside normalisation and early
# convolutions, in per cent. Of the others errors are tested only.
FACTORED = {
    "flax_resnet18": 1,
    "flax_vit": 1,
    "flax_lstm": 5,
    "flax_scanned_layers": 2,
    "nnx_transformer": 1,
    "equinox_cnn": 12,
    "haiku_mlp": 1,
    "haiku_cnn": 5,
    "torch_resnet18": 2,
    "torch_bert": 2,
    "torch_llama": 1,
    "torch_t5_encoder": 2,
}
ZOO = {
    ("flax",): ["flax_lstm"],
    ("haiku",): ["haiku_mlp"],
    ("torch",): ["torch_lora"],
}


def run_zoo(folder: Path, models: list[str]) -> None:
    words = ("--size", "tiny", "--memory", "1GB", "--models", ",".join(models), "--out", "zoo.csv")
    run(folder, str(ROOT / "pipelines" / "model_zoo.py"), *words)
    with open(folder / "zoo.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["model"] for row in rows] == models
    for row in rows:
        assert 0 < float(row["largest_error"]) <= 4e-6, row
        assert float(row["share_rows_apart"]) <= FACTORED.get(row["model"], 100) / 100, row


@pytest.mark.parametrize("libraries", ZOO, ids="-".join)
def test_models_of_other_libraries_have_the_rows_of_their_own_framework_and_factors(tmp_path, libraries):
    for library in libraries:
        _needed(library)
    run_zoo(tmp_path, ZOO[libraries])


@pytest.mark.slow
@pytest.mark.parametrize("model", sorted(set(model_zoo.MODELS) - {name for names in ZOO.values() for name in names}))
def test_the_rest_of_the_models_have_the_rows_of_their_own_framework_and_factors(tmp_path, model):
    library = {"nnx": "flax", "torch": "transformers"}.get(model.split("_")[0], model.split("_")[0])
    _needed(library)
    run_zoo(tmp_path, [model])


def _needed(library: str) -> None:
    if importlib.util.find_spec(library) is None:
        pytest.skip(f"{library} is not installed")


def test_a_model_whose_library_is_missing_is_left_out_with_one_line(capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "haiku", None)
    assert model_zoo.main(["--size", "tiny", "--models", "haiku_mlp"]) == []
    assert capsys.readouterr().out == "haiku_mlp: left out, haiku is not installed (pip install 'jacstore[zoo]')\n"


def test_a_model_that_the_zoo_does_not_have_is_refused_with_those_it_has(capsys):
    with pytest.raises(SystemExit):
        model_zoo.main(["--models", "haiku_mlp,vgg"])
    assert "--models vgg: allowed are flax_resnet18, flax_vit" in capsys.readouterr().err


def test_implicit_and_expanded_contractions_give_one_kernel() -> None:
    figures = bench_contraction.main(["--examples", "12", "--channels", "16", "32", "--rounds", "1"])
    assert figures["largest_difference"] <= 1e-6 and figures["parameters"] == 9 * 16 * 32


def test_issue30_stores_convolutions_as_rows_and_dense_layers_by_factors():
    task = issue30.problem(1)
    leaves = cut_before_products(prepare(task), "auto", float64=False).leaves
    kinds = {leaf.path: leaf.terms[0].kind for leaf in leaves if leaf.path.endswith("weight")}
    assert kinds == {**{f"conv{n}/weight": "dense" for n in range(5)}, "dense0/weight": "dot", "dense1/weight": "dense"}
    assert {leaf.path: leaf.shape for leaf in leaves}["dense0/weight"] == (16_384, 96)
    assert sum(leaf.size for leaf in leaves) == 2_551_553


@pytest.mark.slow
def test_issue30_says_what_the_whole_run_takes(tmp_path, capsys):
    words = ["--examples", "3", "--size", "64", "--checked", "3", "--memory", "2GB", "--out", str(tmp_path)]
    figures = issue30.main(words)
    assert figures["checked"] == 6 and figures["largest_error"] <= 2e-6 and figures["passes"] == 1
    # Images of this size have factored convolutions beside 93,345 columns of rows.
    assert figures["whole_flops"] > issue30.WHOLE**2 * 93_345
    assert 93_345 < figures["whole_bytes_stored"] / 4 / issue30.WHOLE < figures["parameters"] / 5
    assert figures["whole_hours_recomputed"] == pytest.approx(300 * figures["whole_hours_build"])
    assert figures["whole_bytes_dense"] == 4 * issue30.WHOLE * figures["parameters"]
    assert "conv4/weight" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize(("outputs", "layers"), [pytest.param("loglik", 2, marks=pytest.mark.slow), ("logits", 1)])
def test_the_transformers_kernel_is_exact_and_its_table_is_looked_up_and_multiplied(tmp_path, outputs, layers):
    words = [
        "--layers",
        str(layers),
        "--width",
        "64",
        "--vocabulary",
        "400",
        "--length",
        "8",
        "--examples",
        "6",
        "--checked",
        "4",
    ]
    figures = transformer.main([*words, "--outputs", outputs, "--memory", "2GB", "--out", str(tmp_path)])
    assert figures["error_float64"] <= 1e-12 and figures["error_float32"] <= 2e-6 and figures["passes"] == 1
    assert figures["smaller"] > 3
    leaves = {leaf.path: leaf.terms for leaf in jacstore.open(tmp_path / "store.jac").leaves}
    assert sorted(term.kind for term in leaves["embedding"]) == ["dot", "index"]
    for n in range(layers):
        query, key, value, out, up, down = (
            leaves[f"layer{n}/{name}"] for name in ("query", "key", "value", "out", "up/weight", "down/weight")
        )
        assert all([term.kind for term in terms] == ["dot"] for terms in (query, key, value, out, up, down))
        assert query[0].inputs == key[0].inputs == value[0].inputs
        assert len({term[0].cotangents for term in (query, key, value)}) == 3
        assert leaves[f"layer{n}/up/bias"][0].cotangents == up[0].cotangents
        # What leaves a layer's two halves is added up: their cotangents differ, and nothing goes into both.
        assert len({term[0].inputs for term in (query, out, up, down)}) == 4


@pytest.mark.slow
def test_expected_errors_of_each_stored_type_hold_and_are_not_far_too_large(tmp_path):
    rng = np.random.default_rng(0)
    digits = rng.integers(0, 256, size=(40, 28, 28)) * (rng.random((40, 28, 28)) < 0.2)
    arrays = {f"x_{part}": digits.astype(np.uint8) for part in ("train", "test")}
    labels = {f"y_{part}": rng.integers(0, 10, size=40, dtype=np.uint8) for part in ("train", "test")}
    np.savez(tmp_path / "data.npz", **arrays, **labels)
    words = ["--data", str(tmp_path / "data.npz"), "--examples", "30", "--nets", "mlp", "--memory", "1GB"]
    rows = precision.main(words)
    assert len(rows) == len(precision.ROWS)
    assert all(1 <= row["ratio"] <= 30 and row["expected"] <= row["worst"] for row in rows), rows


@pytest.mark.parametrize(
    "nets", [["mlp-dense"], pytest.param(["mlp-dense", "mlp-factored", "cnn-factored"], marks=pytest.mark.slow)]
)
def test_what_trust_costs_is_measured_for_rows_factors_and_convolutions(tmp_path, nets):
    figures = bench_trust.main(["--examples", "16", "--rounds", "1", "--nets", *nets, "--out", str(tmp_path / "run")])
    assert set(figures) == {net.replace("-", " ") for net in nets}
    assert all(found[f"{what}_seconds"] > 0 for found in figures.values() for what in ("build", "gram"))
    assert not (tmp_path / "run").exists()


def test_soak_kills_and_damages_and_finds_nothing_wrong(tmp_path):
    figures = soak.main(["--minutes", "0.01", "--seed", "3", "--out", str(tmp_path)])
    assert figures["violations"] == 0 and figures["problems"] == 1
    assert figures["processes"] >= 2 and figures["faults"] >= 2
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_predictive_variances_by_the_kernel_and_by_the_normal_matrix_agree(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    arrays = {f"x_{part}": rng.integers(0, 256, size=(12, 28, 28), dtype=np.uint8) for part in ("train", "test")}
    labels = {f"y_{part}": rng.integers(0, 10, size=12, dtype=np.uint8) for part in ("train", "test")}
    np.savez(tmp_path / "data.npz", **arrays, **labels)
    words = ["--data", str(tmp_path / "data.npz"), "--examples", "6", "--others", "3", "--memory", "500MB"]
    rows = compare_laplace.main([*words, "--out", str(tmp_path / "out")])
    assert [row["failed"] for row in rows] == ["", ""]
    assert rows[0]["difference"] == 0 and 0 < rows[1]["difference"] < 1e-3
    assert (tmp_path / "out" / "laplace.png").stat().st_size > 10_000


def test_bare_products_are_timed_on_all_cores_and_after_slabs_only():
    task = headline.problem("mlp", 6, None)
    bare = headline.Bare(jacstore.build(task, None), rows=8)
    bare.pause = 0
    bare(ItemDone(item=0))
    assert not bare.seconds
    bare(SlabDone(item=0, slab=0, bytes_read=0))
    assert len(bare.seconds) == 1
    a, b = np.random.default_rng(0).standard_normal((2, 7, 5), np.float32)
    out = np.zeros((7, 7), np.float32)
    bare.multiply(a, b, out)
    np.testing.assert_allclose(out, a @ b.T, rtol=1e-5)


def test_training_compiles_nothing_after_the_first_checkpoint_and_agrees_with_bare_rows(tmp_path):
    words = ["--examples", "12", "--checkpoints", "3", "--csv", str(tmp_path / "t.csv")]
    lines = training.main([*words, "--figure", str(tmp_path / "t.png")])
    assert [line.compilations for line in lines[1:]] == [0, 0]
    assert max(line.largest_difference for line in lines) < 1e-5 and lines[-1].moved > lines[0].moved == 0
    assert (tmp_path / "t.png").stat().st_size > 10_000


def test_compile_time_has_a_line_for_each_depth(tmp_path):
    sizes = ["--width", "8", "--examples", "2", "--outputs", "2", "--rounds", "1"]
    lines = compile_time.main(["--depths", "2", *sizes, "--csv", str(tmp_path / "c.csv")])
    assert [line.blocks for line in lines] == [2] and lines[0].ratio == lines[0].seconds_build / lines[0].seconds_jacrev


@pytest.mark.parametrize("engine", ["blas", "xla"])
def test_roofline_names_the_part_that_bounds_each_stage_and_draws_it(tmp_path, engine):
    words = [
        "--jobs",
        "mlp",
        "--engine",
        engine,
        "--examples",
        "8",
        "--whole",
        "80",
        "--tile",
        "64",
        "--out",
        str(tmp_path),
    ]
    parts = roofline.main([*words, "--csv", str(tmp_path / "r.csv"), "--figure", str(tmp_path / "r.png")])
    with open(tmp_path / "r.csv", newline="") as file:
        assert [row["part"] for row in csv.DictReader(file)] == [one.part for one in parts]
    assert (tmp_path / "r.png").stat().st_size > 10_000
    assert sorted(path.name for path in tmp_path.iterdir()) == ["r.csv", "r.png"]
    for stage in ("build", "gram"):
        *of_stage, whole = (one for one in parts if one.stage == stage)
        assert whole.seconds_least == max(one.seconds_least for one in of_stage)
        assert [one.seconds_least for one in of_stage if one.bounds] == [whole.seconds_least]
    products = next(one for one in parts if one.part == "products")
    # All 80 rows are half a square of pairs; the one tile of 8 rows was multiplied whole.
    assert products.whole_seconds_least == pytest.approx(products.seconds_least * 50)
    assert ("to device" in {one.part for one in parts}) == (engine == "xla")
