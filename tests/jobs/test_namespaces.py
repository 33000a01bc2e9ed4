"""Two machines, as far as one kernel can play them: process ids, host names and networks of their own.

Containers of one machine with the host's network have one name and one boot, but each its own process ids; nodes of a
cluster have other names. Both share the folder.
"""

from __future__ import annotations

import json
import signal
import subprocess

import pytest

import jacstore
from helpers_process import Command, write_target
from jacstore.testing import dense_rows, mlp, row_error

CONTAINER = ("unshare", "--pid", "--fork", "--mount-proc", "--kill-child")
NODE = ("unshare", "--uts", "--net", "--pid", "--fork", "--mount-proc", "--kill-child", "bash", "-c")


def other_node(*command: str) -> list[str]:
    """A command on a node of another name, without a network."""
    return [*NODE, 'hostname another-node && exec "$@"', "node", *command]


PLACES = {"container": lambda *command: [*CONTAINER, *command], "node": other_node}


@pytest.fixture(params=PLACES)
def place(request):
    """How a command is started there."""
    prefix = PLACES[request.param]
    if subprocess.run(prefix("true"), capture_output=True, check=False).returncode:
        pytest.skip("this system gives no namespaces to this user")
    return prefix


def test_a_living_run_that_cannot_be_asked_about_keeps_its_units(place, tmp_path):
    target, out = write_target(tmp_path), tmp_path / "run.jac"
    words = ("build", f"{target}:held", "--out", out, "--codec", "none", "--unit-size", 2, "--batch-size", 2)
    with Command(*words, prefix=place()) as first:
        first.wait_for(lambda: (out / "ledger/unit-0000000.json").exists() and (tmp_path / "reached").exists())
        with Command(*words, prefix=place()) as second:
            code, _, errors = second.finish()
        assert code == 2 and f"{out} is being worked on by host" in errors
        (tmp_path / "go").touch()
        code, _, errors = first.finish()
        assert code == 0, errors
    assert row_error(jacstore.open(out).array.compute(), dense_rows(mlp(10))) <= 1e-6


def test_what_was_interrupted_here_ends_there(place, tmp_path):
    target, out = write_target(tmp_path), tmp_path / "run.jac"
    words = ("build", f"{target}:held", "--out", out, "--codec", "none", "--unit-size", 2, "--batch-size", 2)
    with Command(*words) as first:
        first.wait_for(lambda: (out / "ledger/unit-0000000.json").exists() and (tmp_path / "reached").exists())
        first.signal(signal.SIGTERM)
        (tmp_path / "go").touch()
        code, _, errors = first.finish()
        assert code == 130, errors
    done = len(jacstore.open(out).ledger.done("unit"))
    assert 1 <= done < 5
    with Command(*words, "--json", prefix=place()) as second:
        code, text, errors = second.finish()
    assert code == 0, errors
    assert json.loads(text)["units_reused"] == done
