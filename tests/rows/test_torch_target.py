"""Stores of PyTorch are verified against the module that they should be of, and built from targets.

Skipped where torch is not installed.
"""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
from click.testing import CliRunner

import jacstore
from helpers_errors import refusal
from jacstore.cli.commands import main
from jacstore.errors import InvalidRequestError
from jacstore.testing import row_error

torch = pytest.importorskip("torch")
from tests.rows.test_torch import rows_of, truth  # noqa: E402

TARGET = """
import torch
from jacstore.torch import TorchProblem

def problem():
    torch.manual_seed(0)
    module = torch.nn.Sequential(torch.nn.Linear(4, 90), torch.nn.ReLU(), torch.nn.Linear(90, 30))
    inputs = torch.randn(7, 4)
    {change}
    return TorchProblem(module=module, inputs=inputs, outputs=[0, 2, 1])
"""


def target(folder, change="pass"):
    file = folder / f"target{abs(hash(change))}.py"
    file.write_text(TARGET.format(change=change))
    return f"{file}:problem"


@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16"])
@pytest.mark.parametrize("layout", ["auto", "dense"])
def test_the_command_line_builds_a_target_and_proves_every_row_of_it(tmp_path, dtype, layout):
    named, out = target(tmp_path), str(tmp_path / "s")
    arguments = ["build", named, "--out", out, "--dtype", dtype, "--layout", layout, "--unit-size", "3", "--json"]
    built = CliRunner().invoke(main, arguments)
    assert built.exit_code == 0, built.output
    checked = CliRunner().invoke(main, ["verify", out, "--target", named, "--full", "--json"])
    assert checked.exit_code == 0, checked.output
    checks = {check["name"]: check for check in json.loads(checked.stdout.splitlines()[-1])["checks"]}
    names = ("parameters", "function", "constants", "outputs", "selection", "inputs", "examples")
    assert all(checks[f"fingerprint: {name}"]["state"] == "ok" for name in names)
    assert checks["rows"]["state"] == checks["outputs"]["state"] == checks["inputs: all rows"]["state"] == "ok"
    problem = jacstore.load_target(named)
    if dtype == "float64":
        wanted = truth(problem.module, problem.inputs)[:, [0, 2, 1]]
        assert row_error(rows_of(jacstore.open(out)), wanted.reshape(21, -1)) <= 1e-12


CHANGES = {
    "parameters": "module[0].weight.data[0, 0] += 1",
    "function": "module[1] = torch.nn.Tanh()",
    "inputs: all rows": "inputs[5, 0] += 1",
    "examples": "inputs = inputs[:5]",
}


@pytest.mark.parametrize("field", CHANGES)
def test_another_target_fails_and_is_named(tmp_path, field):
    store = jacstore.torch.build(jacstore.load_target(target(tmp_path)), out=tmp_path / "s")
    report = jacstore.verify(store, target(tmp_path, CHANGES[field]), full=True)
    assert not report.ok and any(field in check.name for check in report.failures)


def test_rows_that_are_not_the_modules_are_found(tmp_path, monkeypatch):
    from jacstore.rows.torch.audit import Audit
    from jacstore.rows.torch.device_pass import TorchPass

    run = TorchPass.run

    def off(self, examples):
        for rows in run(self, examples):
            rows.factors["cotangents0"][...] *= 1.01
            rows.norms[:, :, :2] *= 1.01**2
            yield rows

    monkeypatch.setattr(TorchPass, "run", off)
    monkeypatch.setattr(Audit, "_compare", lambda *_: None)
    problem = jacstore.load_target(target(tmp_path))
    store = jacstore.torch.build(problem, out=tmp_path / "s", layout="factored")
    report = jacstore.verify(store, problem, full=True)
    assert "rows" in {check.name for check in report.failures}


def test_a_module_without_inputs_and_a_problem_with_them_twice_are_refused_in_one_line(tmp_path):
    problem = jacstore.load_target(target(tmp_path))
    with pytest.raises(InvalidRequestError, match="TorchProblem"):
        jacstore.torch.build(problem, problem.inputs)
    with pytest.raises(InvalidRequestError, match="inputs is missing"):
        jacstore.torch.build(problem.module)


# --- the options of a build -------------------------------------------------------------------------------------------


def test_the_command_line_takes_every_option_of_a_build_for_a_module_too(tmp_path):
    named, out = target(tmp_path), str(tmp_path / "s")
    options = {"--output-batch": "2", "--codec": "zstd", "--examples": "2:6", "--device-memory": "100MB"}
    words = [word for pair in options.items() for word in pair]
    built = CliRunner().invoke(main, ["build", named, "--out", out, "--unit-size", "3", *words])
    assert built.exit_code == 0, built.output
    assert "4 examples x 3 outputs" in built.output and "2 units computed, 0 reused of 2" in built.output
    store = jacstore.open(out)
    assert store.info()["codecs"] == ["none", "zstd"] and store.requested["examples"] == [2, 6]
    checked = CliRunner().invoke(main, ["verify", out, "--target", named, "--full"])
    assert checked.exit_code == 0, checked.output
    again = CliRunner().invoke(main, ["build", named, "--out", out, *words])
    assert "0 units computed, 2 reused of 2" in again.output
    other = CliRunner().invoke(main, ["build", named, "--out", out, *words[:-2], "--examples", "1:5"])
    assert other.exit_code == 2 and "examples: [2, 6] -> [1, 5]" in other.output


def test_a_range_of_examples_gives_their_rows_and_a_plan_is_refused_in_one_line(tmp_path):
    problem = jacstore.load_target(target(tmp_path))
    store = jacstore.torch.build(problem, dtype="float64", examples=(2, 6))
    wanted = truth(problem.module, problem.inputs[2:6])[:, [0, 2, 1]]
    assert row_error(rows_of(store), wanted.reshape(12, -1)) <= 1e-12
    with pytest.raises(InvalidRequestError, match=r"--examples 2:9: allowed are ranges A:B with 0 <= A < B <= 7"):
        jacstore.torch.build(problem, examples="2:9")
    planned = CliRunner().invoke(main, ["build", target(tmp_path), "--out", str(tmp_path / "s"), "--dry-run"])
    assert planned.exit_code == 2 and planned.output.count("\n") == 1
    assert planned.output.startswith("jacstore: --dry-run")


@pytest.mark.parametrize("output_batch", [1, 2, None])
def test_slices_of_outputs_give_the_same_rows(tmp_path, output_batch, monkeypatch):
    from jacstore.rows.torch.device_pass import TorchPass

    slices, run = [], TorchPass.run

    def counted(self, examples):
        for rows in run(self, examples):
            slices.append(rows.norms.shape[1])
            yield rows

    monkeypatch.setattr(TorchPass, "run", counted)
    problem = jacstore.load_target(target(tmp_path))
    store = jacstore.torch.build(problem, dtype="float64", unit_size=7, output_batch=output_batch)
    assert slices == {1: [1, 1, 1], 2: [2, 1], None: [3]}[output_batch]
    wanted = truth(problem.module, problem.inputs)[:, [0, 2, 1]]
    assert row_error(rows_of(store), wanted.reshape(21, -1)) <= 1e-12


def test_device_memory_bounds_the_batch_of_a_module(tmp_path):
    problem = jacstore.load_target(target(tmp_path))
    small = jacstore.torch.build(problem, layout="dense", device_memory="100kB").report["batch_size"]
    large = jacstore.torch.build(problem, layout="dense", device_memory="1GB").report["batch_size"]
    assert (small, large) == (1, 7)
    text = refusal(jacstore.torch.build, problem, device_memory="100kB", batch_size=7, layout="dense")
    assert "--device-memory 100,000: a batch of 7 example(s)" in text and "--batch-size (batch_size=)" in text


def test_a_codec_is_measured_for_a_store_on_disk_and_kept_when_it_is_continued(tmp_path, monkeypatch):
    import jacstore.rows.torch.build

    problem, measured = jacstore.load_target(target(tmp_path)), []
    monkeypatch.setattr(
        jacstore.rows.torch.build, "fastest_codec", lambda sample, *_: measured.append(len(sample)) or "lz4"
    )
    assert jacstore.torch.build(problem).report["codec"] == "none" and not measured
    first = jacstore.torch.build(problem, out=tmp_path / "s", unit_size=3, part="1/3")
    again = jacstore.torch.build(problem, out=tmp_path / "s")
    assert (first.report["codec"], again.report["codec"], len(measured)) == ("lz4", "lz4", 1)
    assert again.report["units_reused"] == 1 and jacstore.verify(again, problem, full=True).ok


def test_a_store_whose_request_names_neither_examples_nor_codec_is_continued(tmp_path, monkeypatch):
    from jacstore.rows.torch.build import _Job

    requested = _Job._requested
    problem = jacstore.load_target(target(tmp_path))

    def before(self):
        return {name: value for name, value in requested(self).items() if name not in ("examples", "codec")}

    with monkeypatch.context() as patch:
        patch.setattr(_Job, "_requested", before)
        jacstore.torch.build(problem, out=tmp_path / "s", unit_size=3, part="1/3", codec="none")
    assert "codec" not in jacstore.open(tmp_path / "s").requested
    for codec in ("auto", "none"):
        store = jacstore.torch.build(problem, out=tmp_path / "s", codec=codec)
        assert store.complete and store.report["codec"] == "none" and jacstore.verify(store, problem, full=True).ok
    assert "codec: null -> zstd" in refusal(jacstore.torch.build, problem, out=tmp_path / "s", codec="zstd")
    assert "examples: null -> [1, 8]" in refusal(
        jacstore.torch.build, replace(problem, inputs=torch.randn(8, 4)), out=tmp_path / "s", examples=(1, 8)
    )


def test_right_rows_of_a_module_of_which_rounding_leaves_little_are_no_fault(tmp_path):
    # Where tanh is close to 1 its slope is the rounding of 1 - tanh².
    module = torch.nn.Sequential(torch.nn.Linear(10, 4, bias=False), torch.nn.Tanh()).eval()
    torch.nn.init.ones_(module[0].weight)
    inputs = torch.from_numpy(np.random.default_rng(0).normal(size=(64, 10)).astype(np.float32))
    problem = jacstore.torch.TorchProblem(module=module, inputs=inputs)
    store = jacstore.torch.build(problem, out=tmp_path / "run.jac")
    assert jacstore.verify(store, problem, full=True).ok
    with torch.no_grad():
        module[0].weight *= 1.001
    assert jacstore.verify(store, problem, full=True).check("rows").state != "ok"
