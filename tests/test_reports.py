"""Reports, plans and descriptions are values; JSON, text and Python show the same fields."""

from __future__ import annotations

import ast
import json
import re
from dataclasses import FrozenInstanceError, fields
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

import jacstore
from helpers_process import write_target
from jacstore.base.schema import Reported
from jacstore.cli.commands import main
from jacstore.cli.predict import predict
from jacstore.cli.reports import CleanReport, PredictReport, SampleReport
from jacstore.inference.factorize import SpectrumReport, describe_spectrum
from jacstore.kernels.gram import plan_for
from jacstore.kernels.plan.reports import GramForecast, GramReport, KernelInfo
from jacstore.rows.build import plan_build
from jacstore.rows.reports import BuildForecast, BuildReport
from jacstore.store.reports import StoreInfo
from jacstore.testing import mlp


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A target, its store and its kernel."""
    folder = tmp_path_factory.mktemp("place")
    store = jacstore.build(mlp(10), folder / "run.jac", unit_size=4)
    return write_target(folder), store, jacstore.gram(store, out=folder / "run.ntk")


def values(place):
    """Each kind of report, and the command that prints it."""
    target, store, kernel = place
    predicting = [kernel.path, kernel.path, *(str(target.parent / f"{name}.npy") for name in ("labels", "predicted"))]
    np.save(predicting[2], np.arange(10) % 3)
    new = ["--out", str(target.parent / "new")]
    return {
        BuildReport: (store.built, ["build", str(target), "--out", store.path]),
        BuildForecast: (plan_build(mlp(10), target.parent / "new"), ["build", str(target), *new, "--dry-run"]),
        StoreInfo: (store.summary(), ["info", store.path]),
        GramReport: (kernel.assembled, ["gram", store.path, "--out", kernel.path]),
        GramForecast: (plan_for(store, out=target.parent / "new"), ["gram", store.path, *new, "--dry-run"]),
        KernelInfo: (kernel.summary(), ["info", kernel.path]),
        SpectrumReport: (describe_spectrum(kernel.path, 3, None, None), ["spectrum", kernel.path]),
        PredictReport: (
            predict(*predicting, alpha="0.1"),
            ["predict", *predicting[:2], "--labels", predicting[2], "--out", predicting[3], "--alpha", "0.1"],
        ),
        SampleReport: (
            SampleReport(file="", samples=1, parameters=1, passes=0.0, seconds_total=0.0),
            ["sample", store.path, "--alpha", "1", "--n", "2", "--key", "3", "--out", str(target.parent / "drawn.npy")],
        ),
        CleanReport: (CleanReport(kernel="", removed=[], bytes_freed=0), ["clean", kernel.path]),
    }


def test_what_is_reported_is_a_frozen_value_whose_fields_are_the_keys_of_its_json(place):
    for kind, (value, words) in values(place).items():
        assert type(value) is kind and isinstance(value, Reported)
        names = [one.name for one in fields(value)]
        with pytest.raises(FrozenInstanceError):
            setattr(value, names[0], None)
        printed = CliRunner().invoke(main, [*words, "--json"])
        assert printed.exit_code == 0, printed.output
        assert list(json.loads(printed.stdout.splitlines()[-1])) == names == list(value.to_dict())


def test_reports_and_infos_of_stores_and_kernels_are_dicts_that_json_takes(place):
    _, store, kernel = place
    for report in (store.report, kernel.report, store.info(), kernel.info()):
        assert type(report) is dict and json.loads(json.dumps(report)).keys() == report.keys()
    assert (store.report["units_computed"], kernel.report["tiles_computed"]) == (3, 1)
    assert store.info() == jacstore.open(store.path).info() and kernel.info() == jacstore.open(kernel.path).info()


def test_what_was_opened_reports_nothing(place):
    _, store, kernel = place
    for path in (store.path, kernel.path):
        assert jacstore.open(path).report == {}


def test_a_build_of_pytorch_reports_all_that_a_build_does():
    torch = pytest.importorskip("torch")
    module = torch.nn.Linear(4, 3).eval()
    report = jacstore.torch.build(module, torch.randn(5, 4)).report
    assert {one.name for one in fields(BuildReport)} <= set(report)
    assert set(report) - {one.name for one in fields(BuildReport)} == {
        *("seconds_start", "seconds_audit", "examples_audited", "vmap")
    }


# Who may return a plain dict: JSON that was read or is about to be written, and what is promised to users.
OF_JSON = {
    "base.schema.parse",
    "storage.ledger.read_json",
    "storage.ledger.Ledger.read",
    "storage.zarr_group.read_attributes",
    # what the file of a lock says
    "base.machine.this_process",
    # a record as it was written, with the facts of whoever wrote it
    "store.reader.JacobianStore.record",
    # requests, as they stand in attributes and are compared field by field
    "problem.fingerprint.requested",
    "problem.problem.Prepared.requested_like",
    "rows.torch.network.requested",
    "store.requests.request_of",
    "cli.terminal.to_dict",
    # a file of flags, and what was kept of past runs
    "cli.config.read_config",
    "storage.runs.kept_config",
    "storage.runs.kept_runs",
    # settings of JAX by their names
    "base.threads.settings_in_force",
}
PROMISED = {
    *(f"store.reader.JacobianStore.{name}" for name in ("report", "info", "numerics", "rounding")),
    *(f"kernels.kernel.Kernel.{name}" for name in ("report", "info", "numerics")),
    # scikit-learn's convention
    "inference.kernel_ridge.KernelRidge.get_params",
}


def functions(node, names):
    """Each function below a node of syntax, with its name from the module on."""
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, ast.FunctionDef | ast.ClassDef):
            yield from functions(child, names)
            continue
        if isinstance(child, ast.FunctionDef):
            yield ".".join([*names, child.name]), child
        yield from functions(child, [*names, child.name])


def test_public_functions_return_values_and_plain_dicts_only_at_the_edge_of_json():
    package = Path(jacstore.__file__).parent
    found = {
        name
        for path in package.rglob("*.py")
        for name, function in functions(
            ast.parse(path.read_text(encoding="utf-8")), path.relative_to(package).with_suffix("").parts
        )
        if function.returns is not None
        and "dict[str, Any]" in ast.unparse(function.returns)
        and not any(part.startswith("_") for part in name.split("."))
    }
    assert {name for name in found if not name.endswith(".to_dict")} | {"cli.terminal.to_dict"} == OF_JSON | PROMISED


def test_what_was_validated_is_used_and_not_looked_up_by_key_again():
    package = Path(jacstore.__file__).parent
    raw = re.compile(r"""\.(?:record\([^()]*\)|requested|resolved)(?:\[["']|\.get\()""")
    # What decides a store's rows has fields of whoever wrote it: those alone are looked up by name.
    of_any_writer = {"kernels/lazy.py", "operators/stored.py", "verification/target_checks.py"}
    found = {
        str(path.relative_to(package))
        for path in package.rglob("*.py")
        if raw.search(path.read_text(encoding="utf-8")) is not None
    }
    assert found == of_any_writer


def test_a_record_and_a_request_are_read_as_values(place):
    _, store, kernel = place
    for number in range(store.n_units):
        record, written = store.unit(number), store.record(number)
        assert (record.start, record.stop) == store.unit_range(number)
        assert record.files == written["files"] and record.inputs == written["inputs"]
    assert (kernel.request.store, kernel.request.other, kernel.request.tile) == (store.identity(), None, None)
    assert (kernel.choices.engine, kernel.choices.precision) == (kernel.engine, kernel.precision)
    assert store.choices.codec == store.report["codec"]
