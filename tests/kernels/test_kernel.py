"""Claims about kernels: plain Zarr for any reader, whole for ours whatever is stored, never wrong when damaged."""

from __future__ import annotations

import json
import pickle
import sys
from pathlib import Path

import dask.array as da
import numpy as np
import pytest
import zarr
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import jacstore
from jacstore import StoreWriter
from jacstore.errors import DamagedDataError, IncompleteError
from jacstore.kernels.kernel import Kernel, open_kernel
from support import computed, flipped, refused

# A fault that has been reported and not been mended; the mark goes with the fault.
quick = settings(max_examples=25, deadline=None, database=None, suppress_health_check=list(HealthCheck))
MODES = ("full", "trace", "diagonal", "blocks")
LEAVES = {"body/w": (3, 5), "b": (4,), ".": ()}
MEMORY = "200MB"


def store_of(n, k=2, seed=0, unit_size=3, **options):
    rng = np.random.default_rng(seed)
    rows = {path: rng.normal(size=(n, k, *shape)) for path, shape in LEAVES.items()}
    options = {"dtype": "float64", "codec": "lz4", "memory": MEMORY} | options
    with StoreWriter(options.pop("path", None), LEAVES, n, k, unit_size=unit_size, **options) as writer:
        for start, stop in writer.missing:
            writer.write_unit(start, {leaf: array[start:stop] for leaf, array in rows.items()})
    return writer.store, np.concatenate([a.reshape(n, k, -1) for a in rows.values()], -1)


def kernel_of(a, b, mode):
    products = np.einsum("ikp,jlp->ikjl", a, b, optimize=True)
    if mode == "full":
        return products.reshape(a.shape[0] * a.shape[1], -1)
    return np.einsum({"trace": "ikjk->ij", "diagonal": "ikjk->kij", "blocks": "ikil->ikl"}[mode], products)


def assembled(path, mode="full", n=7, other=None, **options):
    """A kernel and the true one."""
    store, rows = store_of(n)
    columns, other_rows = (None, rows) if other is None else store_of(other, seed=1, unit_size=2)
    kernel = jacstore.gram(store, columns, path, mode=mode, memory=MEMORY, **{"tile": 3} | options)
    return kernel, kernel_of(rows, other_rows, mode)


def assert_close(found, truth, limit=1e-13):
    assert found.shape == truth.shape
    assert np.abs(found - truth).max(initial=0) <= limit * max(np.abs(truth).max(initial=0), 1e-300)


# --- read by anybody --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mode", "other"), [*((mode, None) for mode in MODES), ("full", 4), ("trace", 4), ("diagonal", 4)]
)
def test_zarr_and_dask_read_a_kernel_without_jacstore(mode, other, tmp_path):
    kernel, truth = assembled(tmp_path / "k", mode, other=other)
    assert_close(zarr.open_group(tmp_path / "k", mode="r")["kernel"][...], truth)
    np.testing.assert_array_equal(computed(da.from_zarr(tmp_path / "k", component="kernel")), computed(kernel.array))


def test_xarray_reads_a_kernel_with_its_dimension_names(tmp_path):
    xarray = pytest.importorskip("xarray")
    _, truth = assembled(tmp_path / "k", "diagonal")
    with xarray.open_zarr(tmp_path / "k", consolidated=False) as found:
        assert found["kernel"].dims == ("output", "example", "other_example")
        assert_close(found["kernel"].values, truth)


@pytest.mark.parametrize(
    ("mode", "other"), [*((mode, None) for mode in MODES), ("full", 4), ("trace", 4), ("diagonal", 4)]
)
def test_to_xarray_names_the_example_and_output_of_every_entry(mode, other, tmp_path):
    pytest.importorskip("xarray")
    kernel, truth = assembled(tmp_path / "k", mode, other=other)
    found = kernel.to_xarray()
    assert found.chunks is not None and found.attrs["mode"] == mode
    assert_close(found.values, truth)
    n, m, k = kernel.plan.rows.n_examples, kernel.plan.cols.n_examples, kernel.plan.n_outputs
    assert {name: sorted({*values.values.tolist()}) for name, values in found.coords.items()} == {
        name: list(range({"example": n, "other_example": m}.get(name, k))) for name in found.coords
    }
    if mode == "full":
        rows = (found.example == 2) & (found.output == 1)
        columns = (found.other_example == 3) & (found.other_output == 0)
        assert found[rows.values, columns.values].values.tolist() == [[found.values[2 * k + 1, 3 * k]]]


def test_to_xarray_without_xarray_says_what_to_install(tmp_path, monkeypatch):
    kernel, _ = assembled(tmp_path / "k", "trace")
    monkeypatch.setitem(sys.modules, "xarray", None)
    with pytest.raises(
        ModuleNotFoundError, match=r"^Kernel.to_xarray needs xarray \(.*pip install 'jacstore\[xarray\]'$"
    ):
        kernel.to_xarray()


@pytest.mark.parametrize("mode", ["full", "trace", "diagonal"])
def test_lower_tiles_are_mirrors_to_the_bit_and_diagonal_tiles_symmetric(mode, tmp_path):
    assembled(tmp_path / "k", mode)
    found = zarr.open_array(tmp_path / "k" / "kernel", mode="r")[...]
    np.testing.assert_array_equal(found, np.swapaxes(found, -1, -2))


@pytest.mark.parametrize("mode", ["full", "trace", "diagonal"])
def test_tiles_that_a_triangle_leaves_out_are_nan_to_any_reader_and_whole_to_ours(mode, tmp_path):
    kernel, truth = assembled(tmp_path / "k", mode, triangle=True)
    found = zarr.open_array(tmp_path / "k" / "kernel", mode="r")[...]
    edge = 3 * (2 if mode == "full" else 1)
    i, j = np.ogrid[: truth.shape[-2], : truth.shape[-1]]
    lower = np.broadcast_to(i // edge > j // edge, truth.shape)
    assert np.isnan(found[lower]).all()
    assert_close(found[~lower], truth[~lower])
    assert_close(computed(kernel.array), truth)
    files = [f for f in (tmp_path / "k" / "kernel" / "c").rglob("*") if f.is_file()]
    assert len(files) == kernel.plan.tiles_total == 6


@pytest.mark.parametrize("mode", MODES)
def test_kernels_of_leaves_add_up_to_the_kernel(mode, tmp_path):
    kernel, truth = assembled(tmp_path / "k", mode, by_leaf=True)
    assert_close(computed(kernel.array), truth)
    assert list(kernel.leaf_arrays) == list(COLUMNS)
    for leaf, wanted in kernels_of_leaves(mode).items():
        assert_close(computed(kernel.leaf_arrays[leaf]), wanted)


COLUMNS = {"body/w": slice(0, 15), "b": slice(15, 19), ".": slice(19, 20)}


def kernels_of_leaves(mode):
    rows = store_of(7)[1]
    return {leaf: kernel_of(rows[..., columns], rows[..., columns], mode) for leaf, columns in COLUMNS.items()}


@pytest.mark.parametrize("mode", MODES)
def test_zarr_and_dask_read_the_kernel_of_a_leaf_without_jacstore(mode, tmp_path):
    assembled(tmp_path / "k", mode, by_leaf=True)
    names = {"body/w": "body%2Fw", "b": "b", ".": "%2E"}
    for leaf, wanted in kernels_of_leaves(mode).items():
        assert_close(zarr.open_array(tmp_path / "k" / "leaves" / names[leaf], mode="r")[...], wanted)
        assert_close(computed(da.from_zarr(tmp_path / "k", component=f"leaves/{names[leaf]}")), wanted)


def test_a_float32_kernel_is_the_float64_one_rounded_once(tmp_path):
    wide, _ = assembled(tmp_path / "a")
    narrow, _ = assembled(tmp_path / "b", dtype="float32")
    assert narrow.array.dtype == np.float32
    np.testing.assert_array_equal(computed(narrow.array), computed(wide.array).astype(np.float32))


# --- slices -----------------------------------------------------------------------------------------------------------


@given(
    mode=st.sampled_from(MODES),
    n=st.integers(1, 8),
    other=st.none() | st.integers(1, 6),
    tile=st.integers(1, 9),
    by_leaf=st.booleans(),
    triangle=st.booleans(),
    data=st.data(),
)
@quick
def test_any_slice_of_the_array_is_that_of_numpy(mode, n, other, tile, by_leaf, triangle, data):
    other = None if mode == "blocks" else other
    kernel, truth = assembled(
        None, mode, n, other, tile=tile, by_leaf=by_leaf, triangle=triangle and other is None and mode != "blocks"
    )
    whole = computed(kernel.array)
    assert_close(whole, truth)
    for _ in range(3):
        index = tuple(data.draw(st.slices(size)) for size in truth.shape)
        np.testing.assert_array_equal(computed(kernel.array[index]), whole[index])


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("index", [0, np.s_[:, -1], np.s_[1, 1]])
def test_an_integer_index_drops_its_axis(mode, index):
    kernel, _ = assembled(None, mode)
    np.testing.assert_array_equal(computed(kernel.array[index]), computed(kernel.array)[index])


@pytest.mark.parametrize("triangle", [False, True])
def test_lists_masks_and_diagonals_work_as_in_numpy(triangle):
    kernel, _ = assembled(None, triangle=triangle)
    whole = computed(kernel.array)
    np.testing.assert_array_equal(computed(kernel.array[[5, 0, 13]]), whole[[5, 0, 13]])
    np.testing.assert_array_equal(computed(kernel.array[:, whole[0] > 0]), whole[:, whole[0] > 0])
    np.testing.assert_array_equal(computed(da.diag(kernel.array)), np.diag(whole))


def test_as_ntk_has_one_block_of_outputs_for_each_pair_of_examples():
    kernel, truth = assembled(None, other=4)
    assert_close(computed(kernel.as_ntk()), truth.reshape(7, 2, 4, 2).transpose(0, 2, 1, 3))
    assert "--mode full (mode=)" in refused(assembled(None, "trace")[0].as_ntk)


# --- damage -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("triangle", [False, True])
def test_a_flipped_byte_of_any_tile_stops_every_reader_and_names_the_tile(triangle, tmp_path):
    kernel, _ = assembled(tmp_path / "k", triangle=triangle)
    for file in sorted(f for f in (tmp_path / "k" / "kernel" / "c").rglob("*") if f.is_file()):
        good, (i, j) = file.read_bytes(), file.relative_to(tmp_path / "k" / "kernel" / "c").parts
        for position in (0, len(good) // 2, len(good) - 5):
            file.write_bytes(flipped(good, position))
            text = refused(computed, open_kernel(str(tmp_path / "k")).array, error=DamagedDataError)
            assert f"tile ({i}, {j})" in text and "run the same gram again" in text
            with pytest.raises(ValueError, match="hecksum"):
                zarr.open_array(tmp_path / "k" / "kernel", mode="r")[...]
        file.write_bytes(good)
    assert_close(computed(kernel.array), computed(open_kernel(str(tmp_path / "k")).array), 0)


def test_the_checksum_inside_a_tile_is_seen_by_zarr(tmp_path):
    assembled(tmp_path / "k")
    file = tmp_path / "k" / "kernel" / "c" / "0" / "0"
    good = file.read_bytes()
    for position in range(len(good) - 4, len(good)):
        file.write_bytes(flipped(good, position))
        with pytest.raises(ValueError, match="hecksum"):
            zarr.open_array(tmp_path / "k" / "kernel", mode="r")[...]


def test_a_tile_that_is_short_gone_or_another_is_noticed(tmp_path):
    assembled(tmp_path / "k", "trace", n=6)
    one, other = tmp_path / "k" / "kernel" / "c" / "0" / "0", tmp_path / "k" / "kernel" / "c" / "1" / "1"
    a, b = one.read_bytes(), other.read_bytes()
    one.write_bytes(b)
    other.write_bytes(a)
    assert "differ from the recorded checksum" in refused(
        computed, open_kernel(str(tmp_path / "k")).array, error=DamagedDataError
    )
    other.write_bytes(b)
    one.write_bytes(a[:-20])
    assert "before what was recorded" in refused(
        computed, open_kernel(str(tmp_path / "k")).array, error=DamagedDataError
    )
    one.unlink()
    assert "is missing" in refused(computed, open_kernel(str(tmp_path / "k")).array, error=DamagedDataError)


def test_a_kernel_that_is_not_finished_is_refused_with_the_command_that_finishes_it(tmp_path):
    assembled(tmp_path / "k")
    record = next((tmp_path / "k" / "ledger").glob("tiles-*.json"))
    record.unlink()
    kernel = open_kernel(str(tmp_path / "k"))
    assert not kernel.complete
    assert f"--out {tmp_path / 'k'}" in refused(lambda: kernel.array, error=IncompleteError)


def test_a_tile_without_a_record_is_not_trusted(tmp_path):
    assembled(tmp_path / "k")
    record = next((tmp_path / "k" / "ledger").glob("tiles-*.json"))
    facts = json.loads(record.read_text())
    del facts["files"]["kernel/c/1/1"]
    record.write_text(json.dumps(facts))
    text = refused(computed, open_kernel(str(tmp_path / "k")).array, error=DamagedDataError)
    assert "the record of group 0 of tiles is damaged" in text


# --- the object -------------------------------------------------------------------------------------------------------


def test_a_kernel_on_disk_can_be_opened_and_pickled_and_one_in_ram_cannot(tmp_path):
    kernel, truth = assembled(tmp_path / "k")
    opened = jacstore.open(tmp_path / "k")
    assert isinstance(opened, Kernel)
    assert_close(computed(opened.array), truth)
    assert_close(computed(pickle.loads(pickle.dumps(kernel)).array), truth)
    assert "--scheduler threads" in refused(pickle.dumps, assembled(None)[0])


def test_opening_one_for_the_other_is_refused(tmp_path):
    store, _ = store_of(4, path=tmp_path / "s")
    jacstore.gram(store, None, tmp_path / "k", memory=MEMORY)
    assert "not a kernel" in refused(open_kernel, str(tmp_path / "s"))
    assert "not a store" in refused(jacstore.gram, tmp_path / "k", None, tmp_path / "again", memory=MEMORY)


def test_a_kernel_names_its_store_relative_to_itself(tmp_path):
    (tmp_path / "deep" / "er").mkdir(parents=True)
    store, _ = store_of(4, path=tmp_path / "s")
    kernel = jacstore.gram(store, None, tmp_path / "deep" / "er" / "k", memory=MEMORY)
    (relative,) = kernel.stores
    assert not Path(relative).is_absolute()
    assert (tmp_path / "deep" / "er" / "k" / relative).resolve() == tmp_path / "s"


@pytest.mark.parametrize("mode", MODES)
def test_info_counts_what_is_there(mode, tmp_path):
    kernel, truth = assembled(tmp_path / "k", mode)
    info = kernel.info()
    assert info["shape"] == list(truth.shape) and info["mode"] == mode and info["complete"]
    assert info["tiles_total"] == info["tiles_done"] == (3 if mode == "blocks" else 6)
    files = [f for f in (tmp_path / "k" / "kernel" / "c").rglob("*") if f.is_file()]
    assert info["bytes_stored"] == sum(f.stat().st_size for f in files)
    assert json.loads(json.dumps(info)) == info
