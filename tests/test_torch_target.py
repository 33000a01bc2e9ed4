"""Stores of PyTorch are verified against the module that they should be of, and built from targets.

Skipped where torch is not installed.
"""

from __future__ import annotations

import json

import pytest
from click.testing import CliRunner

import jacstore
from jacstore.cli.commands import main
from jacstore.errors import InvalidRequestError
from jacstore.testing import row_error

torch = pytest.importorskip("torch")
from test_torch import rows_of, truth  # noqa: E402

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


def test_options_that_a_module_does_not_take_are_refused_in_one_line(tmp_path):
    found = CliRunner().invoke(main, ["build", target(tmp_path), "--out", str(tmp_path / "s"), "--output-batch", "2"])
    assert found.exit_code == 2 and "--output-batch" in found.output
    problem = jacstore.load_target(target(tmp_path))
    with pytest.raises(InvalidRequestError, match="TorchProblem"):
        jacstore.torch.build(problem, problem.inputs)
    with pytest.raises(InvalidRequestError, match="inputs is missing"):
        jacstore.torch.build(problem.module)
