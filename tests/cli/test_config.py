"""Flags from a TOML file: the same results as flags, one line for every mistake, and the file's words kept."""

from __future__ import annotations

import json

import pytest

import jacstore
from helpers_process import contents, invoke, write_target
from jacstore.storage.runs import kept_config

FILE = """
[build]
out = "run.jac"
unit-size = 2
dtype = "bfloat16"
memory = 200_000_000
[gram]
out = "run.ntk"
mode = "trace"
triangle = true
tile = 3
memory = "200MB"
"""


@pytest.fixture
def target(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    found = write_target(tmp_path)
    (tmp_path / "run.toml").write_text(FILE)
    return str(found)


def test_a_file_asks_for_what_its_flags_ask_for_and_is_kept_with_the_result(target):
    for words in (("build", target), ("gram", "run.jac")):
        ran = invoke(*words, "--config", "run.toml")
        assert ran.exit_code == 0, ran.stderr
    store, kernel = jacstore.open("run.jac"), jacstore.open("run.ntk")
    assert (store.unit_size, store.dtype) == (2, "bfloat16") and (kernel.mode, kernel.triangle) == ("trace", True)
    assert kept_config(store.ledger) == {"out": "run.jac", "unit_size": 2, "dtype": "bfloat16", "memory": 200_000_000}
    assert kept_config(kernel.ledger)["tile"] == 3
    jacstore.report("run.ntk", "page.html")
    with open("page.html") as page:
        assert "--config: triangle" in page.read()
    words = ("--out", "flags.ntk", "--mode", "trace", "--triangle", "--tile", "3", "--memory", "200MB")
    assert invoke("gram", "run.jac", *words).exit_code == 0
    assert jacstore.open("flags.ntk").requested == kernel.requested
    assert kept_config(jacstore.open("flags.ntk").ledger) == {}


def test_a_flag_goes_before_the_file_and_a_rerun_changes_nothing(target, tmp_path):
    words = ("build", target, "--config", "run.toml", "--dtype", "float32")
    assert invoke(*words).exit_code == 0
    assert jacstore.open("run.jac").dtype == "float32"
    before = contents(tmp_path / "run.jac")
    assert json.loads(invoke(*words, "--json").stdout)["units_computed"] == 0
    assert contents(tmp_path / "run.jac") == before


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("[build]\nunit = 2", "unit in [build]: allowed are out, memory, "),
        ("[build]\noverwrite = true", "overwrite in [build]: allowed are"),
        ("[build]\nunit-size = [2]", "unit-size in [build]: allowed are text, numbers, true and false"),
        ("[buidl]\nout = 'x'", "buidl: allowed are the tables [build] and [gram]"),
        ("out = 'x'", "out: allowed are the tables [build] and [gram]"),
        ("[build", "not TOML"),
        ("[build]\nunit-size = 0\nout = 'x'", "--unit-size 0: must be an integer of at least 1"),
        ("[build]\ndtype = 'float8'\nout = 'x'", "--dtype float8: allowed are"),
        ("[build]\nmemory = '3 apples'\nout = 'x'", "--memory 3 apples"),
    ],
)
def test_a_mistake_in_the_file_is_one_line(text, line, target, tmp_path):
    (tmp_path / "run.toml").write_text(text)
    ran = invoke("build", target, "--config", "run.toml")
    assert ran.exit_code == 2 and ran.stderr.count("\n") == 1 and line in ran.stderr, ran.stderr
    assert not (tmp_path / "x").exists()


def test_a_file_that_is_not_there_is_one_line(target):
    ran = invoke("gram", "run.jac", "--config", "none.toml")
    assert ran.exit_code == 2 and "--config none.toml cannot be read" in ran.stderr
