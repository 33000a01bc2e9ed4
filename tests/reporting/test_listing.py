"""Lists of what lies in a folder, and what two results were asked for differently."""

from __future__ import annotations

import json
import shutil

import pytest
import zarr

import jacstore
from helpers_process import invoke
from jacstore.reporting.listing import compare, list_folder
from jacstore.testing import mlp
from support import refused


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    where = tmp_path_factory.mktemp("listed")
    jacstore.build(mlp(10), where / "a.jac", unit_size=4, memory="200MB")
    jacstore.build(mlp(10), where / "deep" / "half.jac", unit_size=4, part="1/2", dtype="bfloat16", memory="200MB")
    jacstore.gram(where / "a.jac", where / "a.ntk", memory="200MB", mode="trace")
    jacstore.gram(where / "a.jac", where / "b.ntk", memory="200MB", tile=3, dtype="float32")
    zarr.open_group(where / "foreign", mode="w")
    (where / "empty").mkdir()
    return where


def test_a_folder_lists_stores_and_kernels_with_size_and_state_and_nothing_else(folder):
    found = {one.path.removeprefix(f"{folder}/"): one for one in list_folder(folder).found}
    assert list(found) == ["a.jac", "a.ntk", "b.ntk", "deep/half.jac"]
    assert (found["a.jac"].kind, found["a.jac"].shape, found["a.jac"].state) == ("store", [10, 3, 66], "complete")
    assert found["a.jac"].bytes_stored == jacstore.open(folder / "a.jac").info()["bytes_stored"]
    assert found["a.ntk"].detail == "trace float64" and found["b.ntk"].shape == [30, 30]
    assert found["deep/half.jac"].state == "1 of 3 units" and not found["deep/half.jac"].complete
    assert [one.path for one in list_folder(folder / "a.jac").found] == [str(folder / "a.jac")]


def test_a_damaged_store_is_listed_with_what_is_wrong(folder, tmp_path):
    for name in ("record", "attributes"):
        shutil.copytree(folder / "a.jac", tmp_path / name)
    (tmp_path / "record" / "ledger" / "unit-0000001.json").write_bytes(b"{")
    root = tmp_path / "attributes" / "zarr.json"
    root.write_text(root.read_text().replace('"n_examples"', '"m_examples"').replace("float32", "float16"))
    states = {one.path.rpartition("/")[2]: one.state for one in list_folder(tmp_path).found}
    assert states["record"] == "1 damaged record(s), 2 of 3 units"
    assert "checksum" in states["attributes"]


def test_the_command_lists_in_columns_and_as_json(folder):
    ran = invoke("ls", str(folder))
    assert ran.exit_code == 0 and len(ran.stdout.splitlines()) == 4
    assert ran.stdout.splitlines()[0].endswith("complete") and "10 x 3 x 66" in ran.stdout
    found = json.loads(invoke("ls", str(folder), "--json").stdout)
    assert [one["kind"] for one in found["found"]] == ["store", "kernel", "kernel", "store"]
    assert invoke("ls", str(folder / "empty")).stdout == f"{folder / 'empty'}: no stores and no kernels\n"
    assert "no such folder" in invoke("ls", str(folder / "none")).stderr


def test_differences_are_those_of_the_requests_and_of_nothing_else(folder, tmp_path):
    found = compare(folder / "a.ntk", folder / "b.ntk")
    assert {one.field: (one.first, one.second) for one in found.differences} == {
        "mode": ("trace", "full"),
        "dtype": ("float64", "float32"),
        "tile": (None, 3),
    }
    jacstore.build(mlp(10), tmp_path / "same.jac", unit_size=2, memory="300MB")
    same = compare(folder / "a.jac", tmp_path / "same.jac")
    assert [one.field for one in same.differences] in ([], ["unit_size"])
    jacstore.build(mlp(10, seed=1), tmp_path / "other.jac", unit_size=4, memory="200MB")
    fields = {one.field.split(".")[0] for one in compare(folder / "a.jac", tmp_path / "other.jac").differences}
    assert "params" in fields or any("param" in field for field in fields)


def test_the_command_says_what_differs_and_refuses_a_store_beside_a_kernel(folder):
    ran = invoke("diff", str(folder / "a.ntk"), str(folder / "b.ntk"))
    assert ran.exit_code == 0 and "mode   trace -> full" in ran.stdout and "tile   not given -> 3" in ran.stdout
    assert invoke("diff", str(folder / "a.ntk"), str(folder / "a.ntk")).stdout.endswith("asked for the same\n")
    assert "give two stores or two kernels" in refused(compare, folder / "a.jac", folder / "a.ntk")
