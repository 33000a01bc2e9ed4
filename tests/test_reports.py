"""Reports, plans and descriptions are values; JSON, text and Python show the same fields."""

from __future__ import annotations

import json
import re
from dataclasses import FrozenInstanceError, fields
from pathlib import Path

import pytest
from click.testing import CliRunner

import jacstore
from helpers_process import write_target
from jacstore.base.schema import Reported
from jacstore.cli.commands import main
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
    new = ["--out", str(target.parent / "new")]
    return {
        BuildReport: (store.built, ["build", str(target), "--out", store.path]),
        BuildForecast: (plan_build(mlp(10), target.parent / "new"), ["build", str(target), *new, "--dry-run"]),
        StoreInfo: (store.summary(), ["info", store.path]),
        GramReport: (kernel.assembled, ["gram", store.path, "--out", kernel.path]),
        GramForecast: (plan_for(store, out=target.parent / "new"), ["gram", store.path, *new, "--dry-run"]),
        KernelInfo: (kernel.summary(), ["info", kernel.path]),
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
