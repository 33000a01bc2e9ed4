"""The command line: its flags, its one line of error, its one JSON object, its exit codes, what it prints and when."""

from __future__ import annotations

import importlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import click
import numpy as np
import pytest
import zarr

import jacstore
import jacstore.cli.commands
import jacstore.cli.terminal
import jacstore.cli.text
from helpers_kill import Job, run_job
from helpers_limits import limited
from helpers_process import (
    LATCHED,
    LATCHED_LINALG,
    MAIN,
    Command,
    contents,
    environment,
    invoke,
    run_command,
    write_target,
)
from jacstore import StoreWriter, build
from jacstore.base.events import silent
from jacstore.base.machine import format_size
from jacstore.rows.reports import BuildForecast
from jacstore.storage.files import Folder
from jacstore.storage.ledger import Lock
from jacstore.store.reports import LeafFacts
from jacstore.testing import TOLERANCE, mlp, row_error

COMMANDS = jacstore.cli.commands.main.commands
# Keys of the contract.
ALL_KEYS = {
    "build": "store, examples, outputs, parameters, leaves, units_total, units_computed, units_reused, bytes_stored, "
    "bytes_dense, seconds_total, seconds_compile, seconds_device, seconds_write, peak_rss, "
    "batch_size, batches_by_device",
    "gram": "kernel, rows, columns, mode, tiles_total, tiles_computed, tiles_reused, items_total, items_computed, "
    "items_reused, passes, bytes_read, flops, seconds_total, seconds_read, seconds_compute, seconds_write, peak_rss, "
    "engine, schedule",
    "info of a store": "store, examples, outputs, parameters, leaves, units_total, bytes_stored, bytes_dense, "
    "complete, format_version, fingerprint, dtype, codecs",
    "info of a kernel": "kernel, rows, columns, mode, tiles_total, items_total, engine, schedule, complete, "
    "format_version, fingerprint, dtype, codecs",
}
KEYS = {name: set(keys.split(", ")) for name, keys in ALL_KEYS.items()}


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return write_target(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A store of `mlp(10)` in five units."""
    path = tmp_path_factory.mktemp("finished") / "run.jac"
    build(mlp(10), path, unit_size=2)
    return path


@pytest.fixture
def store_path(finished, tmp_path):
    return Path(shutil.copytree(finished, tmp_path / "run.jac"))


def done(*words):
    result = invoke(*words)
    assert result.exit_code == 0, result.stderr
    return result.stdout


def one_object(*words):
    """The JSON object that is all of stdout."""
    text = done(*words, "--json")
    assert text.count("\n") == 1 and text.endswith("}\n")

    def no_constant(name):
        raise AssertionError(f"{name} is not JSON")

    found = json.loads(text, parse_constant=no_constant)
    assert isinstance(found, dict)
    return found


def failed(*words, code=2):
    """The one line on stderr."""
    result = invoke(*words)
    assert result.exit_code == code, (result.stdout, result.stderr)
    assert result.stdout == "" and result.stderr.startswith("jacstore: ")
    assert result.stderr.count("\n") == 1 and result.stderr.endswith("\n")
    return result.stderr


# --- help -------------------------------------------------------------------------------------------------------------


def flags_of_command(name):
    options = [one for one in COMMANDS[name].params if isinstance(one, click.Option)]
    return {flag for one in options for flag in (*one.opts, *one.secondary_opts) if flag.startswith("--")}


@pytest.mark.parametrize("command", COMMANDS)
def test_help_lists_every_flag_of_a_command_among_them_those_of_all_commands(command):
    text = done(command, "--help")
    listed = set(re.findall(r"(?m)^  (?:-\w, )?(--[a-z-]+)(?: / (--[a-z-]+))?", text.split("Options:")[1]))
    assert {flag for line in listed for flag in line if flag} == flags_of_command(command) | {"--help"}
    assert {"--json", "--debug", "--quiet"} <= flags_of_command(command)
    assert all(line == line.rstrip() for line in text.splitlines())


def test_help_lists_the_commands_and_says_how_to_continue():
    text = done("--help")
    assert all(f"\n  {command} " in text for command in COMMANDS)
    assert "Running the same command again continues it." in text
    assert done("-h") == text and re.search(r"\d+\.\d+\.\d+", done("--version"))


def test_help_needs_neither_jax_nor_zarr_nor_dask():
    code = f"import sys, atexit; atexit.register(lambda: print(*sys.modules, file=sys.stderr)); {MAIN}"
    finished = run_command("--help", code=code)
    assert finished.returncode == 0 and not {"jax", "zarr", "dask", "numpy"} & set(finished.stderr.split())


# --- JSON and text ----------------------------------------------------------------------------------------------------


def test_json_is_one_object_with_the_keys_of_the_contract(target, tmp_path):
    out, kernel = tmp_path / "run.jac", tmp_path / "run.ntk"
    report = one_object("build", target, "--out", out, "--unit-size", 4)
    assert KEYS["build"] <= set(report)
    sizes = {key: report[key] for key in ("examples", "outputs", "parameters", "leaves", "units_total", "bytes_dense")}
    assert sizes == {
        "examples": 10,
        "outputs": 3,
        "parameters": 66,
        "leaves": 4,
        "units_total": 3,
        "bytes_dense": 10 * 3 * 66 * 4,
    }
    assert (report["units_computed"], report["units_reused"], report["store"]) == (3, 0, str(out))
    assert report["bytes_stored"] == sum(len(data) for name, data in contents(out).items() if "/c/" in name)
    assert report["seconds_total"] >= report["seconds_compile"] > 0 and report["peak_rss"] > 1e7

    report = one_object("gram", out, "--out", kernel, "--tile", 4)
    assert KEYS["gram"] <= set(report)
    assert (report["rows"], report["columns"], report["mode"], report["engine"]) == (30, 30, "full", "blas")
    assert (report["tiles_total"], report["tiles_computed"], report["tiles_reused"]) == (6, 6, 0)
    assert (report["items_total"], report["items_computed"], report["items_reused"]) == (1, 1, 0)
    assert report["passes"] == 1.0 and report["flops"] == 2 * 66 * 3 * 3 * (4 * 4 * 3 + 4 * 2 * 2 + 2 * 2)

    of_store, of_kernel = one_object("info", out), one_object("info", kernel)
    assert KEYS["info of a store"] <= set(of_store) and KEYS["info of a kernel"] <= set(of_kernel)
    assert of_store["complete"] is True and of_kernel["complete"] is True
    assert of_store["bytes_stored"] == sum(len(data) for name, data in contents(out).items() if "/c/" in name)
    assert of_kernel["dtype"] == "float64" and of_store["dtype"] == "float32"
    leaf = of_store["leaves"][0]
    assert (leaf["path"], leaf["shape"], leaf["terms"]) == ("layer0/b", [7], ["dense"])
    assert leaf["numbers"] == leaf["numbers_dense"] == 3 * 7 and leaf["why"] == "its layer is stored as rows"


@pytest.mark.parametrize("mode", ["full", "trace", "diagonal", "blocks"])
def test_rows_and_columns_are_those_of_the_kernel(mode, finished, tmp_path):
    report = one_object("gram", finished, "--out", tmp_path / "run.ntk", "--mode", mode)
    side = {"full": 30, "trace": 10, "diagonal": 10, "blocks": 3}[mode]
    assert (report["rows"], report["columns"]) == (side, side)


def test_the_second_run_finds_everything_and_says_so(target, tmp_path):
    out, kernel = tmp_path / "run.jac", tmp_path / "run.ntk"
    first = done("build", target, "--out", out, "--unit-size", 5)
    assert "10 examples x 3 outputs x 66 parameters" in first and "complete" in first
    assert "2 units computed, 0 reused of 2 in " in first
    before = contents(out)
    assert "0 units computed, 2 reused of 2\n" in done("build", target, "--out", out)
    assert contents(out) == before
    assert "1 tiles computed, 0 reused of 1 in " in done("gram", out, "--out", kernel)
    before = contents(kernel)
    assert "0 tiles computed, 1 reused of 1\n" in done("gram", out, "--out", kernel)
    assert contents(kernel) == before


def test_an_incomplete_store_says_so_everywhere(tmp_path):
    job = Job(kind="build", out=str(tmp_path / "run.jac"))
    assert run_job(job, tmp_path, when="record ledger/unit-0000002.json").killed
    text = done("info", job.out)
    assert "incomplete: 2 of 5 units" in text
    facts = one_object("info", job.out)
    assert facts["complete"] is False and (facts["units_done"], facts["units_total"]) == (2, 5)
    assert "3 of 5 units missing" in failed("gram", job.out, "--out", tmp_path / "run.ntk")


def test_info_lists_leaves_and_what_was_left_out(tmp_path):
    build(mlp(4, select="w"), tmp_path / "run.jac", codec="none")
    text = done("info", tmp_path / "run.jac")
    assert re.search(r"layer0/w +5x7 +dense +105 of +105 ", text) and "layer0/b  not selected" in text
    assert "zero rows: 0" in text and "NaN or infinity: 0" in text


def test_info_goes_on_where_a_record_is_damaged(tmp_path):
    build(mlp(4), tmp_path / "run.jac", unit_size=2)
    (tmp_path / "run.jac" / "ledger" / "unit-0000001.json").write_text("{")
    result = invoke("info", tmp_path / "run.jac")
    assert result.exit_code == 3 and "incomplete: 1 of 2 units" in result.stdout
    assert "the record of unit 1 is damaged; run the same build again" in result.stderr


def test_the_line_that_completes_a_kernel_can_be_run_as_it_is(finished, tmp_path, monkeypatch):
    monkeypatch.chdir(finished.parent)
    words = ("gram", "run.jac", "--out", tmp_path / "run.ntk", "--part", "1/2")
    with limited(piece_columns=(14, 14)), StoreWriter("run.jac.2", {"w": (66,)}, 2, 1, unit_size=2) as writer:
        writer.write_unit(0, {"w": np.ones((2, 1, 66))})
    done("gram", "run.jac.2", *words[2:])
    with pytest.raises(jacstore.JacstoreError) as caught:
        _ = jacstore.open(tmp_path / "run.ntk").array
    store = re.search(r"jacstore gram (\S+) --out", str(caught.value))[1]
    assert Path(store).exists()


# --- predictions and spectra ------------------------------------------------------------------------------------------


@pytest.fixture
def kernels(finished, tmp_path):
    """The kernel of ten examples, that between four others and these, and labels."""
    build(mlp(4, seed=3, params=mlp(10).params), tmp_path / "other.jac")
    done("gram", finished, "--out", tmp_path / "run.ntk")
    done("gram", tmp_path / "other.jac", finished, "--out", tmp_path / "cross.ntk")
    np.save(tmp_path / "labels.npy", np.arange(10) % 3)
    return tmp_path / "run.ntk", tmp_path / "cross.ntk", "--labels", tmp_path / "labels.npy"


def test_predictions_are_those_of_python_and_say_how_the_left_out_fare(kernels, finished, tmp_path):
    out = tmp_path / "predicted.npy"
    text = done("predict", *kernels, "--alpha", 0.1, "--out", out)
    y = np.eye(3)[np.arange(10) % 3] - 1 / 3
    model = jacstore.KernelRidge(0.1).fit(kernels[0], y)
    assert np.array_equal(np.load(out), model.predict(kernels[1]))
    left_out = model.factor_.loo(y).mean
    accuracy = np.mean(left_out.argmax(1) == np.arange(10) % 3)
    assert text == (
        f"{out}: 4 x 3 predictions from 10 examples, alpha 0.1\n"
        f"leave-one-out: mean squared error {np.mean((y - left_out) ** 2):.4g}, accuracy {accuracy:.1%}\n"
    )
    report = one_object("predict", *kernels, "--alpha", "0.01,0.1,1", "--out", out, "--from-network")
    assert report["alpha"] in report["alphas"] == [0.01, 0.1, 1.0] and report["factor_reused"] is False
    f0, f0_cross = (jacstore.open(path).outputs for path in (finished, tmp_path / "other.jac"))
    model = jacstore.KernelRidge(report["alpha"], method="eigh").fit(kernels[0], y, f0)
    assert row_error(np.load(out)[None], model.predict(kernels[1], f0_cross)[None]) < 1e-12
    np.save(tmp_path / "targets.npy", y)
    report = one_object(
        "predict", *kernels[:3], tmp_path / "targets.npy", "--alpha", 0.1, "--out", out, "--memory", "1GB"
    )
    assert report["factor_reused"] is True and report["loo_accuracy"] is None
    assert sorted(p.name for p in tmp_path.iterdir() if "predicted" in p.name) == ["predicted.npy"]


def test_a_prediction_may_leave_the_kernel_as_it_is(kernels, tmp_path):
    before = contents(kernels[0])
    words = ("predict", *kernels, "--alpha", 0.1, "--out", tmp_path / "p.npy")
    done(*words, "--no-keep")
    assert contents(kernels[0]) == before
    done(*words)
    assert contents(kernels[0]) != before and one_object(*words)["factor_reused"]


@pytest.mark.parametrize(("alpha", "method"), [("0.1", "cholesky"), ("0.1,1", "eigh")])
def test_what_is_kept_beside_a_kernel_is_said_with_its_bytes_and_can_be_removed(alpha, method, kernels, tmp_path):
    before, words = contents(kernels[0]), ("predict", *kernels, "--alpha", alpha, "--out", tmp_path / "p.npy")
    assert one_object("info", kernels[0])["kept"] == []
    assert done("clean", kernels[0]) == f"{kernels[0]}: nothing is kept beside it\n"
    done(*words)
    new = sum(len(data) for name, data in contents(kernels[0], "factors").items())
    (kept,) = one_object("info", kernels[0])["kept"]
    assert (kept["method"], kept["alpha"]) == (method, 0.1 if method == "cholesky" else None)
    # Zarr's own description of the group is not counted.
    assert kept["usable"] and 0 <= new - kept["bytes"] < 500 and kept["bytes"] > 8 * 30**2 / 2
    what = {"cholesky": "Cholesky factor, alpha 0.1", "eigh": "eigendecomposition"}[method]
    assert f"kept beside it: {what}, {format_size(kept['bytes'])}\n" in done("info", kernels[0])
    found = one_object("clean", kernels[0])
    assert found == {"kernel": str(kernels[0]), "removed": [kept], "bytes_freed": kept["bytes"]}
    assert contents(kernels[0]) == before and not (kernels[0] / "factors").exists()
    assert not one_object(*words)["factor_reused"]


def test_what_is_kept_of_other_bytes_or_without_a_record_is_said_and_removed_too(kernels, tmp_path):
    done("predict", *kernels, "--alpha", "0.1", "--out", tmp_path / "p.npy")
    (record,) = (kernels[0] / "ledger").glob("factor-*")
    record.write_text("{}")
    (kept,) = one_object("info", kernels[0])["kept"]
    assert not kept["usable"] and kept["alpha"] is None and kept["bytes"] > 0
    assert "computed from earlier contents of the kernel" in done("clean", kernels[0])
    assert jacstore.clean(kernels[0]) == [] == jacstore.open(kernels[0]).info()["kept"]


def test_only_kernels_are_cleaned_and_not_while_a_factorization_is_written(kernels, finished, tmp_path):
    assert "is a store, not a kernel" in failed("clean", finished)
    done("predict", *kernels, "--alpha", "0.1", "--out", tmp_path / "p.npy")
    before = contents(kernels[0], "factors")
    with Lock(Folder(kernels[0]), 2_000_000, 2_000_000, silent):
        assert "is being worked on" in failed("clean", kernels[0])
    assert contents(kernels[0], "factors") == before
    assert jacstore.clean(jacstore.gram(finished)) == []


def test_what_cannot_be_predicted_is_one_line(kernels, finished, tmp_path):
    alpha, out = ("--alpha", 0.1), ("--out", tmp_path / "predicted.npy")
    assert "ends in .npy" in failed("predict", *kernels, *alpha, "--out", tmp_path / "predicted.txt")
    assert "--alpha often" in failed("predict", *kernels, "--alpha", "often", *out)
    assert "--alpha 0.0" in failed("predict", *kernels, "--alpha", "0", *out)
    assert "not a readable .npy file" in failed("predict", *kernels[:3], tmp_path / "none.npy", *alpha, *out)
    for labels, named in ((np.arange(10), "allowed are 0 to 2"), (np.zeros((9, 3)), "y has shape (9, 3)")):
        np.save(tmp_path / "wrong.npy", labels)
        assert named in failed("predict", *kernels[:3], tmp_path / "wrong.npy", *alpha, *out)
    assert "rectangular" in failed("predict", kernels[1], kernels[1], *kernels[2:], *alpha, *out)
    assert "is a store, not a kernel" in failed("predict", finished, *kernels[1:], *alpha, *out)
    assert "cannot be written" in failed("predict", *kernels, *alpha, "--out", tmp_path / "no" / "p.npy")
    assert not (tmp_path / "predicted.npy").exists()
    result = invoke("predict", *kernels, "--alpha", "1e-9", *out)
    assert result.exit_code == 0 and result.stderr.startswith(
        "jacstore: warning: alpha 1e-09 is below the kernel's error"
    )
    assert result.stderr.count("\n") == 1


def test_the_spectrum_of_a_kernel_is_printed(kernels):
    values = np.linalg.eigvalsh(jacstore.open(kernels[0]).array.compute(scheduler="synchronous"))[::-1]
    text = done("spectrum", kernels[0], "--top", 2)
    assert f"{kernels[0]}: 30 rows, trace {values.sum():.6g}\n" in text
    assert f"eigenvalue     1  {values[0]:.6g}\neigenvalue     2  {values[1]:.6g}\nsmallest " in text
    assert text.count("effective dimension") == 3
    report = one_object("spectrum", kernels[0], "--alpha", "0.5,2")
    assert len(report["eigenvalues"]) == 10 and [one["alpha"] for one in report["effective_dimension"]] == [0.5, 2.0]
    found = report["effective_dimension"][1]["dimension"]
    assert abs(found - np.sum(values / (values + 2))) < 1e-9 * found
    assert "--top 0" in failed("spectrum", kernels[0], "--top", 0)
    assert "rectangular" in failed("spectrum", kernels[1])
    assert "memory" in failed("spectrum", kernels[0], "--memory", "1kB")


# --- signals ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM"])
@pytest.mark.parametrize(
    ("words", "code"),
    [
        (("verify", "run.ntk", "--full"), LATCHED),
        (("verify", "run.jac"), LATCHED),
        (("spectrum", "run.ntk"), LATCHED_LINALG),
        (
            ("predict", "run.ntk", "cross.ntk", "--labels", "labels.npy", "--alpha", "1,2", "--out", "p.npy"),
            LATCHED_LINALG,
        ),
        (("sample", "run.jac", "--alpha", "1", "--n", "2", "--key", "3", "--out", "s.npy"), LATCHED),
    ],
)
def test_a_signal_ends_work_that_does_not_end_and_the_same_command_does_it_then(
    kernels, finished, tmp_path, name, words, code
):
    words = tuple(str(placed(word, finished, tmp_path)) for word in words)
    before = contents(tmp_path)
    latch = tmp_path / "latch"
    latch.mkdir()
    with Command(*words, code=code, LATCH=str(latch), LATCH_COLUMN="0") as command:
        command.wait_for(lambda: list(latch.iterdir()))
        os.kill(command.process.pid, getattr(signal, name))
        # What holds it up is never let go.
        status, stdout, stderr = command.finish()
    doing = "to continue" if words[0] == "sample" else "to start over"
    assert (status, stdout) == (130, ""), stderr
    assert stderr == f"jacstore: {name}: interrupted, nothing is lost; {doing}: jacstore {' '.join(words)}\n"
    left = contents(tmp_path)
    assert before.items() <= left.items() and not [path for path in left if "lock-" in path]
    done(*words)


# What frameworks do at import: only the main thread may.
HANDLING = """
import signal
for number in (signal.SIGINT, signal.SIGTERM):
    signal.signal(number, signal.SIG_IGN)
from jacstore.testing import mlp
problem = mlp(10)
"""
SLOW = """
import time
from pathlib import Path
Path(__file__).with_name("reached").touch()
while True:
    time.sleep(0.005)
"""


def test_a_target_that_handles_signals_at_import_is_verified_as_it_is_built(tmp_path):
    target, out = tmp_path / "net.py", tmp_path / "run.jac"
    target.write_text(HANDLING)
    done("build", target, "--out", out)
    assert "ok" in done("verify", out, "--target", target)


def test_after_a_target_handled_signals_they_stop_the_command_again(tmp_path):
    target, stop = tmp_path / "net.py", jacstore.cli.terminal.Stop()
    target.write_text(HANDLING)
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)}
    try:
        jacstore.cli.commands._loaded(str(target), stop)
        signal.raise_signal(signal.SIGTERM)
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    assert stop.received == "SIGTERM"


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM"])
@pytest.mark.parametrize("words", [("verify", "run.jac", "--target"), ("build", "--out", "new.jac")])
def test_a_signal_ends_a_target_that_does_not_end(finished, tmp_path, name, words):
    target = tmp_path / "net.py"
    target.write_text(SLOW)
    words = *(str(placed(word, finished, tmp_path)) for word in words), str(target)
    with Command(*words) as command:
        command.wait_for((tmp_path / "reached").exists)
        os.kill(command.process.pid, getattr(signal, name))
        status, stdout, stderr = command.finish()
    assert (status, stdout) == (130, ""), stderr
    assert stderr == f"jacstore: {name}: interrupted; to continue: jacstore {' '.join(words)}\n"


def placed(word, finished, folder):
    """A word of a command, with the folder where it names a file."""
    return finished if word == "run.jac" else folder / word if "." in word else word


# --- the plan ---------------------------------------------------------------------------------------------------------


def test_the_plan_of_a_build_is_printed_and_nothing_is_written(target, tmp_path):
    text = done("build", target, "--out", tmp_path / "new" / "run.jac", "--dry-run", "--unit-size", 4)
    for named in ("7.92 kB", "free", "files", "12 in 3 units of 4 examples", "expected", "compiling", "unit_buffers"):
        assert named in text
    assert re.search(r"computes J \d+\.\d times", text) and re.search(r"storing (pays|does not pay)", text)
    facts = one_object("build", target, "--out", tmp_path / "new" / "run.jac", "--dry-run")
    assert facts["bytes_to_store"] == 10 * 3 * 66 * 4 and facts["bytes_free"] > 0
    assert 0 < sum(facts["memory_parts"].values()) <= facts["memory"]
    assert isinstance(facts["storing_pays"], bool) and facts["recompute_passes"] >= 1
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    ("pays", "passes", "said", "unsaid"),
    [
        (True, 1.5, "storing pays", "does not"),
        (False, 1.0, "keep J in RAM with jacstore.build(problem, None), or call jacstore.ntk", "memory://"),
        (False, 1.5, "give more --memory (memory=)", "keep J in RAM"),
    ],
)
def test_a_plan_in_which_storing_does_not_pay_says_what_to_do_instead(target, tmp_path, pays, passes, said, unsaid):
    facts = one_object("build", target, "--out", tmp_path / "run.jac", "--dry-run")
    facts |= {"terms": [LeafFacts(**leaf) for leaf in facts["terms"]], "storing_pays": pays, "recompute_passes": passes}
    last = jacstore.cli.text.plan_build(BuildForecast(**facts)).splitlines()[-1]
    assert last.startswith("against it ") and said in last and unsaid not in last


def test_the_plan_of_a_gram_is_printed_and_nothing_is_written(finished, tmp_path):
    before = contents(finished.parent)
    text = done("gram", finished, "--out", tmp_path / "run.ntk", "--dry-run", "--tile", 4)
    for named in ("30 x 30", "1.00 passes over J", "7.92 kB read", "9 files", "free", "6 tiles", "expected", "a kill"):
        assert named in text
    facts = one_object("gram", finished, "--out", tmp_path / "run.ntk", "--dry-run", "--tile", 4)
    # Tiles at the border are whole chunks in the file.
    assert facts["bytes_to_store"] == 8 * 9 * (4 * 3) ** 2 and facts["passes"] == 1.0
    assert sum(facts["memory_parts"].values()) == facts["memory"] and "accumulators 4.9 kB" in text
    assert os.listdir(tmp_path) == [] and contents(finished.parent) == before


def test_a_plan_looks_at_what_it_would_continue(target, finished, tmp_path):
    out, kernel = tmp_path / "run.jac", tmp_path / "run.ntk"
    done("build", target, "--out", out, "--unit-size", 4, "--part", "1/3")
    before = contents(tmp_path)
    assert f"continues {out}: 1 of 3 units done\n" in done("build", target, "--out", out, "--dry-run")
    facts = one_object("build", target, "--out", out, "--dry-run")
    assert (facts["begun"], facts["units_done"], facts["units_total"], facts["unit_size"]) == (True, 1, 3, 4)
    assert "dtype: float32 -> bfloat16" in failed("build", target, "--out", out, "--dry-run", "--dtype", "bfloat16")
    assert "--unit-size" in failed("build", target, "--out", out, "--dry-run", "--unit-size", 5)
    assert "continues" not in done("build", target, "--out", out, "--dry-run", "--overwrite", "--unit-size", 5)
    assert contents(tmp_path) == before

    done("gram", finished, "--out", kernel, "--tile", 4)
    assert f"continues {kernel}: 6 of 6 tiles done\n" in done("gram", finished, "--out", kernel, "--dry-run")
    # What nobody asks for again is as it was begun.
    assert one_object("gram", finished, "--out", kernel)["tiles_reused"] == 6
    assert "tile: 4 -> 3" in failed("gram", finished, "--out", kernel, "--dry-run", "--tile", 3)
    assert "mode: full -> trace" in failed("gram", finished, "--out", kernel, "--dry-run", "--mode", "trace")
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "mine.txt").write_text("")
    for command in (("build", target), ("gram", finished)):
        assert "not written by jacstore" in failed(*command, "--out", tmp_path / "notes", "--dry-run")


def test_blocks_are_printed_with_all_their_axes(finished, tmp_path):
    assert "10 x 3 x 3, mode blocks" in done("gram", finished, "--out", tmp_path / "b.ntk", "--mode", "blocks")
    assert "--triangle" in failed("gram", finished, "--out", tmp_path / "c.ntk", "--mode", "blocks", "--triangle")


def test_a_kernel_says_where_its_store_is_from_here(finished, tmp_path, monkeypatch):
    done("gram", finished, "--out", tmp_path / "deep" / "run.ntk")
    monkeypatch.chdir(tmp_path)
    (place,) = one_object("info", "deep/run.ntk")["stores"]
    assert Path(place).resolve() == finished and f"from {place}\n" in done("info", "deep/run.ntk")


def test_the_package_runs_as_a_module():
    words = [sys.executable, "-m", "jacstore", "--help"]
    shown = subprocess.run(words, capture_output=True, text=True, check=True).stdout
    assert shown.startswith("Usage: jacstore ") and all(f"\n  {command} " in shown for command in COMMANDS)


def test_a_plan_does_not_overwrite(target, store_path, tmp_path):
    done("gram", store_path, "--out", tmp_path / "run.ntk")
    before = contents(tmp_path)
    done("build", target, "--out", store_path, "--dry-run", "--overwrite")
    done("gram", store_path, "--out", tmp_path / "run.ntk", "--dry-run", "--overwrite")
    assert contents(tmp_path) == before


def test_the_plan_of_what_would_be_refused_is_refused(target, finished, tmp_path):
    assert "--memory" in failed("build", target, "--out", tmp_path / "run.jac", "--dry-run", "--memory", "100B")
    assert "--memory" in failed("gram", finished, "--out", tmp_path / "run.ntk", "--dry-run", "--memory", "100B")
    assert os.listdir(tmp_path) == []


# --- refusals ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("flag", "value", "named"),
    [
        ("dtype", "int8", "float32, bfloat16, float16, float64"),
        ("layout", "sparse", "auto, dense, factored"),
        ("codec", "gzip", "auto, none, lz4, zstd"),
        ("batch-size", "0", "at least 1"),
        ("examples", "5:3", "A:B with 0 <= A < B <= 10"),
        ("examples", "0:11", "A:B with 0 <= A < B <= 10"),
        ("examples", "three", "A:B"),
        ("part", "3/2", "1/2 to 2/2"),
        ("part", "2", "I/N"),
        ("memory", "8 parsecs", "such as 8GB"),
        ("memory", "lots", "such as 8GB"),
    ],
)
def test_a_wrong_value_of_build_is_one_line(flag, value, named, target, tmp_path):
    line = failed("build", target, "--out", tmp_path / "run.jac", f"--{flag}", value)
    assert f"--{flag} {value}" in line and named in line and f"({flag.replace('-', '_')}=)" in line
    assert not (tmp_path / "run.jac").exists()


@pytest.mark.parametrize(
    ("flag", "value", "named"),
    [
        ("dtype", "bfloat16", "float64, float32"),
        ("mode", "half", "full, trace, diagonal, blocks"),
        ("precision", "float16", "float64, float32, bf16x9, bf16x6, bf16x3, tf32, fast"),
        ("engine", "tpu", "auto, blas, xla"),
        ("scheduler", "dask", "threads, processes"),
        ("tile", "0", "at least 1"),
        ("part", "0/2", "1/2 to 2/2"),
        ("memory", "-5GB", "such as 8GB"),
    ],
)
def test_a_wrong_value_of_gram_is_one_line(flag, value, named, finished, tmp_path):
    line = failed("gram", finished, "--out", tmp_path / "run.ntk", f"--{flag}", value)
    assert f"--{flag} {value}" in line and named in line and f"({flag.replace('-', '_')}=)" in line
    assert not (tmp_path / "run.ntk").exists()


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (("--batch-size", "many"), ("--batch-size", "many")),
        (("--batch-sise", "3"), ("--batch-sise", "--batch-size")),
        (("--tile", "3"), ("--tile",)),
    ],
)
def test_a_flag_that_click_refuses_is_one_line_too(words, named, target, tmp_path):
    line = failed("build", target, "--out", tmp_path / "run.jac", *words)
    assert all(text in line for text in named)


@pytest.mark.parametrize("words", [("build",), ("build", "net.py"), ("gram", "run.jac"), ("frobnicate",)])
def test_a_missing_word_is_one_line_too(words):
    failed(*words)


def test_a_size_without_end_is_refused(target, tmp_path):
    line = failed("build", target, "--out", tmp_path / "run.jac", "--memory", "1e400GB")
    assert "--memory 1e400GB" in line and "fault" not in line


def test_combinations_that_cannot_be_are_one_line(finished, tmp_path):
    out = ("--out", tmp_path / "run.ntk")
    assert "--scheduler processes" in failed("gram", finished, *out, "--workers", 2)
    assert "one store" in failed("gram", finished, finished, *out, "--mode", "blocks")
    assert "--engine xla" in failed("gram", finished, *out, "--engine", "blas", "--precision", "fast")
    assert "--scheduler threads" in failed("gram", finished, "--out", "memory://", "--scheduler", "processes")
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("words", [(), ("--json",), ("--quiet",), ("--json", "--quiet")])
def test_an_error_leaves_stdout_empty_whatever_the_flags(words, finished, tmp_path):
    assert "--mode half" in failed("gram", finished, "--out", tmp_path / "run.ntk", "--mode", "half", *words)


WORDS = {
    ("build", "--dtype"): ("base.limits", "DTYPES"),
    ("build", "--layout"): ("rows.options", "LAYOUTS"),
    ("build", "--codec"): ("base.limits", "CODECS"),
    ("gram", "--mode"): ("base.modes", "Mode"),
    ("gram", "--dtype"): ("kernels.plan.options", "KERNEL_DTYPES"),
    ("gram", "--precision"): ("base.limits", "PRECISIONS"),
    ("gram", "--engine"): ("kernels.plan.options", "ENGINES"),
    ("sample", "--likelihood"): ("operators.likelihoods", "LIKELIHOODS"),
    ("sample", "--method"): ("inference.posterior", "METHODS"),
    ("sample", "--precision"): ("kernels.plan.options", "KERNEL_DTYPES"),
}


def options_with_words():
    commands = jacstore.cli.commands.main.commands.items()
    return {
        (name, option.opts[0]): option.type.choices
        for name, command in commands
        for option in command.params
        if isinstance(option.type, click.Choice)
    }


def test_the_words_of_a_flag_are_those_that_its_keyword_allows():
    given = {at: getattr(importlib.import_module(f"jacstore.{module}"), name) for at, (module, name) in WORDS.items()}
    allowed = {at: tuple(words) for at, words in given.items()}
    allowed["build", "--codec"] = ("auto", *allowed["build", "--codec"])
    assert {at: tuple(words) for at, words in options_with_words().items()} == allowed


@pytest.mark.parametrize(("command", "flag"), WORDS)
def test_help_shows_the_words_of_a_flag_and_another_word_is_one_line_with_all_of_them(command, flag):
    words = options_with_words()[command, flag]
    needed = {"build": ["t", "--out", "o"], "gram": ["s", "--out", "o"]}
    needed["sample"] = ["s", "--alpha", "1", "--n", "1", "--key", "1", "--out", "o"]
    assert f"[{'|'.join(words)}]" in "".join(done(command, "--help").split())
    for given in ("half", words[0].upper(), ""):
        result = invoke(command, *needed[command], flag, given)
        assert (result.exit_code, result.stdout) == (2, "")
        assert result.stderr == f"jacstore: {flag} {given}: allowed are {', '.join(words)} ({flag.lstrip('-')}=)\n"


def test_debug_shows_the_traceback_and_the_line(finished, tmp_path):
    result = invoke("gram", finished, "--out", tmp_path / "run.ntk", "--scheduler", "half", "--debug")
    assert result.exit_code == 2 and result.stdout == ""
    assert result.stderr.startswith("Traceback (most recent call last):") and "kernels/plan/options.py" in result.stderr
    assert result.stderr.splitlines()[-1].startswith("jacstore: --scheduler half")


def test_an_unexpected_error_is_one_line_with_its_type(finished, tmp_path, monkeypatch):
    def broken(*_):
        raise ZeroDivisionError("by zero\nand more")

    monkeypatch.setattr("jacstore.kernels.item.ItemRun._add", broken)
    line = failed("gram", finished, "--out", tmp_path / "run.ntk")
    assert "ZeroDivisionError: by zero and more" in line and "in item 0" in line
    assert "internal error; please report it, with the traceback that --debug prints" in line
    result = invoke("gram", finished, "--out", tmp_path / "run.ntk", "--debug")
    assert "in broken" in result.stderr and result.exit_code == 2


def test_exit_codes_are_those_of_the_contract(store_path, tmp_path):
    assert invoke("info", store_path).exit_code == 0
    assert invoke("info", tmp_path).exit_code == 2
    (store_path / "rows/c/0/0/0").unlink()
    assert "rows/c/0/0/0 is missing" in failed("gram", store_path, "--out", tmp_path / "run.ntk", code=3)


# --- what is not ours -------------------------------------------------------------------------------------------------


def test_what_is_not_ours_is_not_opened(tmp_path):
    (tmp_path / "file").write_text("text")
    (tmp_path / "empty").mkdir()
    zarr.create_group(tmp_path / "group", attributes={"kind": "model"})
    zarr.create_array(tmp_path / "array", shape=(3,), dtype="float32")
    for name, named in (("missing", "no zarr.json"), ("file", "no zarr.json"), ("empty", "no zarr.json")):
        assert named in failed("info", tmp_path / name)
    for name in ("group", "array"):
        assert "not a jacstore store or kernel" in failed("info", tmp_path / name)
        assert str(tmp_path / name) in failed("gram", tmp_path / name, "--out", tmp_path / "run.ntk")
    assert "check the path" in failed("info", "memory://")


@pytest.mark.parametrize("words", [(), ("--overwrite",)])
def test_what_is_not_ours_is_never_written_to(words, target, finished, tmp_path):
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "thesis.tex").write_text("years of work")
    (tmp_path / "file").write_text("more of it")
    zarr.create_group(tmp_path / "group", attributes={"kind": "model"})
    before = contents(tmp_path)
    for name, named in (("data", "'thesis.tex', not written by jacstore"), ("file", "is a file")):
        assert named in failed("build", target, "--out", tmp_path / name, *words)
        assert named in failed("gram", finished, "--out", tmp_path / name, *words)
    assert "not a jacstore store or kernel" in failed("build", target, "--out", tmp_path / "group", *words)
    assert {name: data for name, data in contents(tmp_path).items() if "ledger" not in name} == before


@pytest.mark.parametrize("words", [(), ("--overwrite",)])
def test_a_kernel_is_not_written_over_a_store_nor_a_store_over_a_kernel(words, target, store_path, tmp_path):
    kernel = tmp_path / "run.ntk"
    done("gram", store_path, "--out", kernel)
    before = contents(tmp_path)
    failed("gram", store_path, "--out", store_path, *words)
    failed("build", target, "--out", kernel, *words)
    assert "is a kernel, not a store" in failed("gram", kernel, "--out", tmp_path / "other.ntk")
    assert {k: v for k, v in contents(tmp_path).items() if k in before} == before


def change_root(path, **changes):
    root = json.loads((path / "zarr.json").read_text())
    root["attributes"].update(changes)
    (path / "zarr.json").write_text(json.dumps(root))


def test_a_newer_format_is_refused(target, store_path, tmp_path):
    change_root(store_path, format_version=2)
    for words in (
        ("info", store_path),
        ("gram", store_path, "--out", tmp_path / "k"),
        ("build", target, "--out", store_path),
    ):
        assert "format version 2, this jacstore reads up to 1; upgrade jacstore" in failed(*words)
    assert "format version" in failed("build", target, "--out", store_path, "--overwrite")


@pytest.mark.parametrize(
    ("changes", "code"), [({"N": None}, 3), ({"leaves": 3}, 3), ({"resolved": {}}, 3), ({"format_version": "1"}, 2)]
)
def test_damaged_attributes_are_one_line(changes, code, store_path):
    change_root(store_path, **changes)
    assert str(store_path) in failed("info", store_path, code=code)


def test_a_root_that_is_no_json_is_one_line(store_path):
    (store_path / "zarr.json").write_text("{")
    assert "zarr.json is not readable JSON" in failed("info", store_path, code=3)


# --- starting anew ----------------------------------------------------------------------------------------------------


def test_overwrite_starts_anew(target, store_path, tmp_path):
    assert "parameters: " in failed("build", f"{target}:other_weights", "--out", store_path)
    text = done("build", f"{target}:other_weights", "--out", store_path, "--overwrite")
    assert "0 reused" in text and os.listdir(tmp_path) == ["run.jac"]
    done("gram", store_path, "--out", tmp_path / "run.ntk")
    assert "mode: full -> trace" in failed("gram", store_path, "--out", tmp_path / "run.ntk", "--mode", "trace")
    done("gram", store_path, "--out", tmp_path / "run.ntk", "--mode", "trace", "--overwrite")
    assert one_object("info", tmp_path / "run.ntk")["mode"] == "trace"
    assert sorted(os.listdir(tmp_path)) == ["run.jac", "run.ntk"]


def test_overwrite_of_nothing_is_a_start(target, tmp_path):
    assert "complete" in done("build", target, "--out", tmp_path / "run.jac", "--overwrite", "--codec", "none")


def test_overwrite_goes_through_a_link(target, store_path, tmp_path):
    (tmp_path / "link").symlink_to(store_path)
    done("build", f"{target}:other_weights", "--out", tmp_path / "link", "--overwrite")
    assert (tmp_path / "link").is_symlink() and len(os.listdir(tmp_path)) == 2


def test_overwrite_works_on_the_current_folder(target, store_path, monkeypatch):
    monkeypatch.chdir(store_path)
    done("build", f"{target}:other_weights", "--out", ".", "--overwrite")


def test_a_start_that_was_killed_in_the_last_moment_can_be_repeated(target, tmp_path):
    # What zarr-python leaves if it is killed between writing the root's metadata and renaming it.
    (tmp_path / "run.jac").mkdir()
    (tmp_path / "run.jac" / "zarr.0123456789abcdef0123456789abcdef.partial").write_text("{")
    assert "complete" in done("build", target, "--out", tmp_path / "run.jac", "--codec", "none")


# --- progress ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def eager(limits):
    """A line for every event, not every few seconds."""
    limits(progress_seconds=-1.0)


def test_progress_is_lines_on_stderr_where_there_is_no_terminal(eager, target, tmp_path):
    result = invoke("build", target, "--out", tmp_path / "run.jac", "--unit-size", 2, "--batch-size", 1, "--json")
    assert result.exit_code == 0 and json.loads(result.stdout)["units_computed"] == 5
    lines = result.stderr.splitlines()
    assert len(lines) == 1 + 10 + 5
    assert all(re.fullmatch(r"\d of 5 units( and \d examples of the next)?, \d+ s", line) for line in lines)
    assert lines[0].startswith("0 of 5 units") and lines[-1].startswith("5 of 5 units")
    counted = [int(line.split()[0]) for line in lines]
    assert counted == sorted(counted)
    result = invoke("gram", tmp_path / "run.jac", "--out", tmp_path / "run.ntk", "--json")
    assert "0 of 1 items and 1 slabs of the next" in result.stderr and "1 of 1 items, " in result.stderr


@pytest.mark.parametrize("words", [(), ("--json",)])
def test_quiet_is_silent(words, eager, target, tmp_path):
    result = invoke("build", target, "--out", tmp_path / "run.jac", "--quiet", *words)
    assert result.exit_code == 0 and result.stderr == "" and result.stdout
    result = invoke("gram", tmp_path / "run.jac", "--out", tmp_path / "run.ntk", "--quiet", *words)
    assert result.exit_code == 0 and result.stderr == "" and result.stdout


def test_a_reader_that_goes_away_is_no_error(finished):
    read, write = os.pipe()
    os.close(read)
    command = [sys.executable, "-c", MAIN, "info", str(finished)]
    with os.fdopen(write, "w") as nobody:
        run = subprocess.run(command, check=False, stdout=nobody, stderr=subprocess.PIPE, text=True, env=environment())
    assert "Traceback" not in run.stderr and run.returncode in (0, 1), run.stderr


# --- numbers ----------------------------------------------------------------------------------------------------------


def test_the_kernel_of_the_command_line_is_that_of_python(finished, tmp_path):
    done("gram", finished, "--out", tmp_path / "run.ntk", "--tile", 4)
    found = jacstore.open(tmp_path / "run.ntk").array.compute(scheduler="synchronous")
    assert np.array_equal(found, jacstore.gram(finished, tile=4).array.compute(scheduler="synchronous"))
    assert np.array_equal(found, zarr.open_array(tmp_path / "run.ntk/kernel", mode="r")[:])


def test_examples_define_the_store(target, tmp_path):
    report = one_object("build", target, "--out", tmp_path / "run.jac", "--examples", "3:7", "--codec", "none")
    assert report["examples"] == 4
    whole = jacstore.build(mlp(10), None).array.compute(scheduler="synchronous")
    part = jacstore.open(tmp_path / "run.jac").array.compute(scheduler="synchronous")
    assert row_error(part, whole[9:21]) <= TOLERANCE["float32"]
    assert "examples: " in failed(
        "build", target, "--out", tmp_path / "run.jac", "--examples", "4:8", "--codec", "none"
    )
