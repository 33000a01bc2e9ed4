"""Claims about stores: what is written is read back by anybody; what is damaged or missing never passes as numbers."""

from __future__ import annotations

import errno
import fcntl
import gc
import json
import os
import pickle
import warnings
from itertools import product

import dask.array as da
import ml_dtypes
import numpy as np
import pytest
import zarr
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import jacstore
import jacstore.storage.files
from jacstore import StoreWriter
from jacstore.base.events import UnitDone
from jacstore.base.limits import CODECS
from jacstore.errors import DamagedDataError, IncompleteError, InvalidRequestError, NonFiniteError, RequestMismatchError
from jacstore.storage.chunks import FileRecord, page_aligned, raw
from jacstore.storage.files import PAGE, STAGED, Folder, Memory
from jacstore.store.reader import open_store
from jacstore.store.unit_buffers import from_bfloat16, to_bfloat16
from support import computed, flipped, refused

# A fault that has been reported and not been mended; the mark goes with the fault.
quick = settings(max_examples=20, deadline=None, database=None, suppress_health_check=list(HealthCheck))
LEAVES = {"body/w": (9, 11), "body/b": (7,), "scale": (), "head/a%2Fb": (4, 9)}
N, K, P = 7, 2, 143
# So little that rows come out as shards of two pieces, and enough that a store in RAM stays there.
SMALL = 40_000


def rows_of(n=N, k=K, leaves=LEAVES, seed=0):
    rng = np.random.default_rng(seed)
    return {path: rng.normal(size=(n, k, *shape)).astype(np.float32) for path, shape in leaves.items()}


def flat(rows):
    """`(N, K, P)`."""
    return np.concatenate([a.reshape(*a.shape[:2], -1) for a in rows.values()], -1)


def write(path, rows=None, *, leaves=LEAVES, only=None, order=1, **options):
    """Write all units or those in `only`, and return the store."""
    rows = rows_of() if rows is None else rows
    n, k = next(iter(rows.values())).shape[:2]
    with StoreWriter(path, leaves, n, k, **{"unit_size": 3, "memory": SMALL, "codec": "lz4"} | options) as writer:
        for start, stop in writer.missing[::order]:
            if only is None or start // writer.store.unit_size in only:
                writer.write_unit(start, {leaf: array[start:stop] for leaf, array in rows.items()})
    return writer.store


def assert_holds(store, rows):
    truth = flat(rows)
    np.testing.assert_array_equal(computed(store.array), truth.reshape(-1, truth.shape[-1]))


# --- read by anybody --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("codec", CODECS)
def test_rows_are_shards_that_zarr_and_dask_read_without_jacstore(codec, tmp_path):
    store = write(tmp_path / "s", codec=codec)
    assert store.layouts["rows"].per_file == (1, 1, 2)
    truth = flat(rows_of())
    np.testing.assert_array_equal(zarr.open_group(tmp_path / "s", mode="r")["rows"][...], truth)
    np.testing.assert_array_equal(computed(da.from_zarr(tmp_path / "s", component="rows")), truth)
    norms = np.stack([np.square(a, dtype=np.float64).reshape(N, K, -1).sum(-1) for a in rows_of().values()], -1)
    np.testing.assert_allclose(zarr.open_array(tmp_path / "s" / "norms", mode="r")[...], norms, rtol=1e-14)
    assert_holds(store, rows_of())


def test_xarray_reads_a_store_with_its_dimension_names(tmp_path):
    xarray = pytest.importorskip("xarray")
    write(tmp_path / "s")
    with xarray.open_zarr(tmp_path / "s", consolidated=False) as found:
        assert found["rows"].dims == ("example", "output", "parameter")
        np.testing.assert_array_equal(found["rows"].values, flat(rows_of()))


def test_a_missing_unit_is_nan_to_any_reader_and_refused_by_ours(tmp_path):
    store = write(tmp_path / "s", only=[0, 2])
    truth = flat(rows_of())
    truth[3:6] = np.nan
    np.testing.assert_array_equal(zarr.open_array(tmp_path / "s" / "rows", mode="r")[...], truth)
    np.testing.assert_array_equal(computed(da.from_zarr(tmp_path / "s", component="rows")), truth)
    assert np.isnan(store.norms[3:6]).all() and np.isfinite(store.norms[[0, 1, 2, 6]]).all()
    assert not store.complete
    assert "1 of 3 units missing" in refused(computed, store.array, error=IncompleteError)


def test_a_missing_unit_of_bfloat16_is_nan_to_any_reader(tmp_path):
    write(tmp_path / "s", dtype="bfloat16", only=[0])
    found = zarr.open_array(tmp_path / "s" / "rows", mode="r")[...]
    assert found.dtype == np.uint16
    assert np.isnan(from_bfloat16(found[3:])).all()


# --- reading ----------------------------------------------------------------------------------------------------------


@st.composite
def written(draw):
    """Rows and the arguments of a writer, so that units and pieces fall anywhere."""
    shapes = draw(st.lists(st.lists(st.integers(1, 9), max_size=2).map(tuple), min_size=1, max_size=5))
    leaves = {f"leaf {n}": shape for n, shape in enumerate(shapes)}
    n, k = draw(st.integers(1, 8)), draw(st.integers(1, 4))
    options = {
        "dtype": draw(st.sampled_from(["float32", "bfloat16", "float16", "float64"])),
        "codec": draw(st.sampled_from(["lz4", "zstd"])),
        "unit_size": draw(st.integers(1, 9)),
        "memory": draw(st.sampled_from([1000, 20_000, 10**8])),
        "leaves": leaves,
        "order": draw(st.sampled_from([1, -1])),
    }
    return rows_of(n, k, leaves), options


def as_stored(rows, dtype):
    return from_bfloat16(to_bfloat16(flat(rows))) if dtype == "bfloat16" else flat(rows).astype(dtype)


@given(case=written(), data=st.data())
@quick
def test_any_slice_of_the_array_is_that_of_numpy(case, data, tmp_path_factory):
    rows, options = case
    store = write(tmp_path_factory.mktemp("s") / "s", rows, **options)
    truth = as_stored(rows, options["dtype"])
    truth = truth.reshape(-1, truth.shape[-1])
    assert store.array.dtype == truth.dtype and store.array.shape == truth.shape
    for _ in range(3):
        index = tuple(data.draw(st.slices(size)) for size in truth.shape)
        np.testing.assert_array_equal(computed(store.array[index]), truth[index])


@given(case=written(), data=st.data())
@quick
def test_any_region_is_read_into_any_float_type(case, data, tmp_path_factory):
    rows, options = case
    store = write(tmp_path_factory.mktemp("s") / "s", rows, **options)
    truth = as_stored(rows, options["dtype"])
    n, _, p = truth.shape
    start, first = data.draw(st.integers(0, n - 1)), data.draw(st.integers(0, p - 1))
    stop, last = data.draw(st.integers(start + 1, n)), data.draw(st.integers(first + 1, p))
    dtype = data.draw(st.sampled_from([np.float32, np.float64]))
    out = np.full((stop - start, truth.shape[1], last - first), np.nan, dtype)
    store.read_rows(start, stop, first, last, out)
    np.testing.assert_array_equal(out, truth[start:stop, :, first:last].astype(dtype))


@pytest.mark.parametrize("index", [0, np.int64(3), np.s_[:, 5], np.s_[-1, 2:9]])
def test_an_integer_index_drops_its_axis(index):
    truth = flat(rows_of()).reshape(N * K, P)
    np.testing.assert_array_equal(computed(write(None).array[index]), truth[index])


@pytest.mark.parametrize(
    "index", [np.s_[[3, 1, 9]], np.s_[:, np.arange(P) % 7 == 0], np.s_[None, ..., 3:5], np.s_[5:2]]
)
def test_lists_masks_and_new_axes_work_as_in_numpy(index):
    truth = flat(rows_of()).reshape(N * K, P)
    np.testing.assert_array_equal(computed(write(None).array[index]), truth[index])


def test_a_whole_read_decodes_every_byte_once(tmp_path):
    store = write(tmp_path / "s")
    out = np.empty((N, K, P), np.float32)
    store.read_rows(0, N, 0, P, out)
    assert store.decoded_bytes_read == store.bytes_decoded == N * K * P * 4
    # A slab one piece wide reads that piece alone.
    width = store.layouts["rows"].piece[2]
    store.read_rows(0, N, 0, width, out[:, :, :width])
    assert store.decoded_bytes_read - store.bytes_decoded == N * K * width * 4


@pytest.mark.parametrize("codec", ["none", "lz4"])
def test_bytes_read_are_those_of_the_pieces_without_their_checksums(codec, tmp_path):
    store = write(tmp_path / "s", codec=codec)
    before = store.files.bytes_read
    store.read_rows(0, N, 0, P, np.empty((N, K, P), np.float32))
    records = [
        FileRecord.from_list(f) for u in range(3) for name, f in store.record(u)["files"].items() if "rows" in name
    ]
    assert store.files.bytes_read - before == sum(size for record in records for _, size, _ in record.pieces)


def test_a_store_on_disk_can_be_pickled_and_one_in_ram_cannot(tmp_path):
    store = write(tmp_path / "s")
    assert_holds(pickle.loads(pickle.dumps(store)), rows_of())
    assert "--scheduler threads" in refused(pickle.dumps, write(None))


def test_info_counts_what_is_there(tmp_path):
    rows = rows_of()
    for array in rows.values():
        array[4] = 0
    info = write(tmp_path / "s", rows, only=[1, 2]).info()
    assert (info["units_total"], info["units_done"], info["complete"]) == (3, 2, False)
    assert info["zero_rows"] == K and info["nonfinite_examples"] == []
    assert info["bytes_dense"] == N * K * P * 4
    files = [f for f in (tmp_path / "s").rglob("c/**/*") if f.is_file()]
    assert info["bytes_stored"] == sum(f.stat().st_size for f in files)
    assert json.loads(json.dumps(info)) == info


# --- damage -----------------------------------------------------------------------------------------------------------


def read_everything(path):
    """All rows, outputs and norms of a store opened anew."""
    store = open_store(str(path))
    return computed(store.array), store.outputs, store.norms


def files_of(path, array=""):
    return sorted(f for f in (path / array).rglob("*") if f.is_file() and "/c/" in str(f))


@pytest.mark.parametrize("codec", CODECS)
def test_a_flipped_byte_of_any_piece_stops_every_reader_and_names_unit_and_leaf(codec, tmp_path):
    store = write(tmp_path / "s", codec=codec)
    for file in files_of(tmp_path / "s"):
        good, name = file.read_bytes(), str(file.relative_to(tmp_path / "s"))
        unit = int(name.split("/")[2])
        for offset, size, _ in FileRecord.from_list(store.record(unit)["files"][name]).pieces:
            for position in {offset, offset + size // 2, offset + size - 1}:
                file.write_bytes(flipped(good, position))
                text = refused(read_everything, tmp_path / "s", error=DamagedDataError)
                assert f"unit {unit} (examples {3 * unit} to {min(3 * unit + 2, N - 1)})" in text and name in text
                assert "leaf body/w" in text or "leaf body/b" in text or "leaf head/a%2Fb" in text
                assert open_store(str(tmp_path / "s")).check_unit(unit)
        file.write_bytes(good)
    assert_holds(open_store(str(tmp_path / "s")), rows_of())


@pytest.mark.parametrize("array", ["rows", "outputs", "norms"])
def test_a_check_of_a_unit_notices_any_flipped_byte(array, tmp_path):
    store = write(tmp_path / "s")
    file = files_of(tmp_path / "s", array)[0]
    good = file.read_bytes()
    unseen = []
    for position in range(len(good)):
        file.write_bytes(flipped(good, position))
        if store.check_unit(0) is None:
            unseen.append(position)
    assert unseen == []


@pytest.mark.parametrize("array", ["rows", "outputs", "norms"])
def test_a_file_that_is_short_long_or_gone_is_noticed(array, tmp_path):
    store = write(tmp_path / "s")
    file = files_of(tmp_path / "s", array)[1]
    good = file.read_bytes()
    for data in [good[:n] for n in range(0, len(good), 7)] + [good + b"\0"]:
        file.write_bytes(data)
        assert not store.sizes_match(1)
        assert "bytes, recorded were" in store.check_unit(1)
    end = FileRecord.from_list(store.record(1)["files"][str(file.relative_to(tmp_path / "s"))]).pieces[-1][0]
    file.write_bytes(good[: end + 1])
    assert "before what was recorded" in refused(read_everything, tmp_path / "s", error=DamagedDataError)
    file.unlink()
    assert "is missing" in refused(read_everything, tmp_path / "s", error=DamagedDataError)
    assert not store.sizes_match(1) and store.check_unit(1)
    assert store.check_unit(0) is None and store.sizes_match(0)


@pytest.mark.parametrize("array", ["rows", "norms"])
def test_two_files_of_one_size_that_changed_places_are_noticed(array, tmp_path):
    store = write(tmp_path / "s", codec="none")
    one, other = files_of(tmp_path / "s", array)[:2]
    a, b = one.read_bytes(), other.read_bytes()
    assert len(a) == len(b)
    one.write_bytes(b)
    other.write_bytes(a)
    assert store.sizes_match(0) and store.check_unit(0) and store.check_unit(1)
    refused(read_everything, tmp_path / "s", error=DamagedDataError)


def test_a_damaged_unit_that_was_read_is_written_again(tmp_path):
    write(tmp_path / "s")
    file = files_of(tmp_path / "s", "rows")[1]
    file.write_bytes(flipped(file.read_bytes(), 3))
    refused(read_everything, tmp_path / "s", error=DamagedDataError)
    with StoreWriter(tmp_path / "s", LEAVES, N, K, memory=SMALL) as writer:
        assert writer.missing == [(3, 6)]
    assert_holds(write(tmp_path / "s"), rows_of())
    assert open_store(str(tmp_path / "s")).ledger.done("suspect") == []


def test_a_record_with_any_flipped_bit_is_read_right_or_reported(tmp_path):
    write(tmp_path / "s", leaves={"w": (5,)}, rows=rows_of(leaves={"w": (5,)}))
    record = tmp_path / "s" / "ledger" / "unit-0000001.json"
    good, truth = record.read_bytes(), read_everything(tmp_path / "s")
    for position, bit in product(range(len(good)), (1, 2, 16)):
        record.write_bytes(good[:position] + bytes([good[position] ^ bit]) + good[position + 1 :])
        try:
            found = read_everything(tmp_path / "s")
        except (DamagedDataError, IncompleteError):
            continue
        for a, b in zip(found, truth, strict=True):
            np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize(
    ("good", "bad"), [('"N": 7', '"N": 8'), ('"float32"', '"float33"'), ('"unit_size": 3', '"unit_size": 7')]
)
def test_a_flipped_bit_in_the_attributes_is_reported(good, bad, tmp_path):
    write(tmp_path / "s")
    root = tmp_path / "s" / "zarr.json"
    assert good in root.read_text()
    root.write_text(root.read_text().replace(good, bad))
    refused(read_everything, tmp_path / "s", error=DamagedDataError)


def test_a_folder_that_is_no_store_is_refused(tmp_path):
    assert "no jacstore store" in refused(jacstore.open, tmp_path / "missing")
    zarr.create_group(tmp_path / "group", zarr_format=3)
    assert "not a jacstore store or kernel" in refused(jacstore.open, tmp_path / "group")


def test_a_store_of_a_newer_format_is_refused(tmp_path):
    write(tmp_path / "s")
    root = tmp_path / "s" / "zarr.json"
    root.write_text(root.read_text().replace('"format_version": 1', '"format_version": 99'))
    assert "format version 99" in refused(jacstore.open, tmp_path / "s")


# --- the writer -------------------------------------------------------------------------------------------------------


def test_units_may_come_in_any_order_and_in_several_sessions(tmp_path):
    for only, missing in (([2], [(0, 3), (3, 6)]), ([0], [(3, 6)]), ([1], [])):
        write(tmp_path / "s", only=only)
        with StoreWriter(tmp_path / "s", LEAVES, N, K) as writer:
            assert writer.missing == missing
    assert_holds(open_store(str(tmp_path / "s")), rows_of())


def test_parts_share_the_units_and_both_are_there_in_order(tmp_path):
    rows = rows_of(n=11)
    for part in ((2, 3), (1, 3), (3, 3)):
        write(tmp_path / "s", rows, part=part)
    assert_holds(open_store(str(tmp_path / "s")), rows)


def test_a_unit_twice_is_refused(tmp_path):
    rows = {leaf: array[:3] for leaf, array in rows_of().items()}
    with StoreWriter(tmp_path / "s", LEAVES, N, K, unit_size=3) as writer:
        writer.write_unit(0, rows)
        assert "stored already" in refused(writer.write_unit, 0, rows)
    with StoreWriter(tmp_path / "s", LEAVES, N, K, unit_size=3) as writer:
        assert "stored already" in refused(writer.write_unit, 0, rows)


@pytest.mark.parametrize(
    ("start", "change", "named"),
    [
        (
            0,
            {"body/b": np.zeros((3, K, 8), np.float32)},
            "leaf 'body/b': rows of shape (3, 2, 8), allowed is (3, 2, 7)",
        ),
        (0, {"body/b": np.zeros((2, K, 7), np.float32)}, "allowed is (3, 2, 7)"),
        (0, {"body/b": np.zeros((3, 7), np.float32)}, "allowed is (3, 2, 7)"),
        (0, {"body/b": None}, "leaf 'body/b': no rows given"),
        (0, {"other": np.zeros((3, K, 1))}, "leaf 'other': not a leaf of this store"),
        (6, {}, "rows of shape (3, 2, 9, 11), allowed is (1, 2, 9, 11)"),
        (1, {}, "start 1: no unit"),
        (9, {}, "start 9: no unit"),
        (-3, {}, "start -3: no unit"),
    ],
)
def test_rows_that_do_not_fit_are_refused_and_nothing_is_marked(start, change, named, tmp_path):
    rows = {leaf: array[:3] for leaf, array in rows_of().items()} | change
    rows = {leaf: array for leaf, array in rows.items() if array is not None}
    with StoreWriter(tmp_path / "s", LEAVES, N, K, unit_size=3) as writer:
        assert named in refused(writer.write_unit, start, rows)
        assert writer.missing == [(0, 3), (3, 6), (6, 7)]
    assert files_of(tmp_path / "s") == []


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"dtype": "bfloat16"}, "dtype: float32 -> bfloat16"),
        ({"n_examples": 8}, "n_examples: 7 -> 8"),
        ({"n_outputs": 3}, "n_outputs: 2 -> 3"),
        ({"leaves": {"w": (3,)}}, "leaves: "),
        ({"requested": {"weights": "b"}}, "weights: a -> b"),
        ({"unit_size": 2}, "unit_size: 3 -> 2"),
    ],
)
def test_other_arguments_over_old_bytes_are_refused_and_named(changes, named, tmp_path):
    first = {"leaves": LEAVES, "n_examples": N, "n_outputs": K, "unit_size": 3, "requested": {"weights": "a"}}
    with StoreWriter(tmp_path / "s", **first):
        pass
    assert named in refused(StoreWriter, tmp_path / "s", **first | changes, error=RequestMismatchError)
    with StoreWriter(tmp_path / "s", **first | changes, overwrite=True) as writer:
        assert writer.store.n_units == len(writer.missing)


@pytest.mark.parametrize(
    "changes",
    [
        {"dtype": "int8"},
        {"codec": "gzip"},
        {"unit_size": 0},
        {"n_examples": 0},
        {"n_outputs": 0},
        {"leaves": {}},
        {"leaves": [("w", (2,)), ("w", (3,))]},
        {"memory": 0},
        {"memory": "much"},
    ],
)
def test_arguments_that_cannot_be_are_refused_before_anything_is_made(changes, tmp_path):
    first = {"leaves": LEAVES, "n_examples": N, "n_outputs": K}
    refused(StoreWriter, tmp_path / "s", **first | changes)
    assert not (tmp_path / "s").exists()


def test_leaves_without_any_number_are_refused():
    assert "0" in refused(StoreWriter, None, {"w": (0, 3)}, N, K)


def test_an_empty_leaf_among_others_takes_no_column():
    rows = {
        "none": np.empty((N, K, 0, 3), np.float32),
        "w": rows_of()["body/b"],
        "zero": np.empty((N, K, 0), np.float32),
    }
    store = write(None, rows, leaves={"none": (0, 3), "w": (7,), "zero": (0,)})
    assert [leaf.offset for leaf in store.leaves] == [0, 0, 7]
    assert_holds(store, {"w": rows["w"]})


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_rows_that_are_not_finite_are_refused_and_the_examples_named(bad, tmp_path):
    rows = rows_of()
    rows["body/b"][4, 1, 2] = bad
    assert "example(s) 4 hold" in refused(write, tmp_path / "s", rows, error=NonFiniteError)
    assert open_store(str(tmp_path / "s")).ledger.done("unit") == [0]
    store = write(tmp_path / "s", rows, allow_nonfinite=True)
    assert store.info()["nonfinite_examples"] == [4]
    assert_holds(store, rows)


@pytest.mark.parametrize(
    ("dtype", "value"),
    [
        ("float16", 1e5),
        ("float32", 1e60),
        ("bfloat16", 3.4e38),
    ],
)
def test_rows_that_rounding_makes_infinite_are_refused(dtype, value):
    rows = {"w": np.full((2, 1, 3), value)}
    assert f"as {dtype}" in refused(write, None, rows, leaves={"w": (3,)}, dtype=dtype, error=NonFiniteError)


def test_finite_norms_do_not_hide_rows_that_are_not():
    with StoreWriter(None, {"w": (3,)}, 2, 1, unit_size=2) as writer:
        refused(writer.write_unit, 0, {"w": np.full((2, 1, 3), np.nan)}, norms=np.ones((2, 1, 1)), error=NonFiniteError)


def test_finite_rows_with_squares_beyond_float32_are_stored():
    rows = {"w": np.full((2, 1, 3), 1e30, np.float32)}
    store = write(None, rows, leaves={"w": (3,)})
    np.testing.assert_allclose(store.norms, 3 * np.square(1e30), rtol=1e-6)


@pytest.mark.parametrize("shape", [(2, 3), (5,), (6,), (3, 2, 1)])
def test_outputs_of_another_shape_are_refused(shape):
    with StoreWriter(None, {"w": (4,)}, 3, 2, unit_size=3) as writer:
        rows = {"w": np.ones((3, 2, 4), np.float32)}
        assert "(3, 2)" in refused(writer.write_unit, 0, rows, outputs=np.zeros(shape))


def test_norms_of_another_shape_are_refused():
    with StoreWriter(None, {"w": (4,)}, 3, 2, unit_size=3) as writer:
        refused(writer.write_unit, 0, {"w": np.ones((3, 2, 4), np.float32)}, norms=np.ones(6))


def test_bits_of_bfloat16_are_refused_by_a_store_of_another_type():
    refused(write, None, {"w": np.ones((3, 2, 4), np.uint16)}, leaves={"w": (4,)})


def test_complex_rows_are_refused():
    refused(write, None, {"w": np.ones((3, 2, 4), np.complex64)}, leaves={"w": (4,)})


def test_bfloat16_rows_may_come_as_floats_as_bits_or_as_ml_dtypes():
    rows = rows_of()
    stores = [
        write(None, {leaf: change(array) for leaf, array in rows.items()}, dtype="bfloat16")
        for change in (lambda a: a, to_bfloat16, lambda a: a.astype(ml_dtypes.bfloat16))
    ]
    for store in stores:
        np.testing.assert_array_equal(computed(store.array), as_stored(rows, "bfloat16").reshape(N * K, P))


def test_norms_are_of_the_rows_before_they_are_rounded():
    rows = rows_of()
    truth = np.stack([np.square(a, dtype=np.float64).reshape(N, K, -1).sum(-1) for a in rows.values()], -1)
    for dtype in ("float32", "bfloat16", "float16"):
        np.testing.assert_allclose(write(None, rows, dtype=dtype).norms, truth, rtol=1e-14)


def test_outputs_and_norms_that_are_given_are_kept():
    outputs, norms = np.arange(6.0).reshape(3, 2), np.arange(6.0).reshape(3, 2, 1)
    with StoreWriter(None, {"w": (4,)}, 3, 2, unit_size=3) as writer:
        writer.write_unit(
            0, {"w": np.ones((3, 2, 4), np.float32)}, outputs=outputs, norms=norms, facts={"made": "here"}
        )
    np.testing.assert_array_equal(writer.store.outputs, outputs)
    np.testing.assert_array_equal(writer.store.norms, norms)
    assert writer.store.record(0)["made"] == "here"


def test_the_listener_hears_of_every_unit_once_it_is_durable(tmp_path):
    heard = []

    def listener(event):
        heard.append((event, open_store(str(tmp_path / "s")).ledger.done("unit")))

    write(tmp_path / "s", listener=listener)
    assert [(event.unit, event.examples) for event, _ in heard] == [(0, 3), (1, 3), (2, 1)]
    assert all(isinstance(event, UnitDone) and event.unit in done for event, done in heard)


def test_a_file_that_is_gone_makes_its_unit_missing_again(tmp_path):
    write(tmp_path / "s")
    files_of(tmp_path / "s", "norms")[2].unlink()
    with StoreWriter(tmp_path / "s", LEAVES, N, K) as writer:
        assert writer.missing == [(6, 7)]


def test_a_folder_with_foreign_files_is_refused(tmp_path):
    (tmp_path / "s").mkdir()
    (tmp_path / "s" / "thesis.tex").write_text("years of work")
    for overwrite in (False, True):
        assert "'thesis.tex'" in refused(StoreWriter, tmp_path / "s", LEAVES, N, K, overwrite=overwrite)
    assert (tmp_path / "s" / "thesis.tex").exists()


@pytest.mark.parametrize("codec", CODECS)
def test_rows_that_build_made_are_the_same_through_the_writer(codec, tmp_path):
    params = {"w": rows_of()["body/w"][0, 0], "b": np.zeros(11, np.float32)}
    problem = jacstore.Problem(
        apply=lambda p, x: np.float32(2) * (x @ p["w"] + p["b"])[:2],
        params=params,
        inputs=rows_of()["body/w"][:, 0, :, 0],
    )
    built = jacstore.build(problem, tmp_path / "built", codec=codec, unit_size=3, memory="100MB")
    whole = computed(built.array).reshape(N, K, -1)
    leaves = {leaf.path: leaf.shape for leaf in built.leaves}
    rows = {f.path: whole[..., f.offset : f.offset + f.size].reshape(N, K, *f.shape) for f in built.leaves}
    store = write(tmp_path / "written", rows, leaves=leaves, codec=codec, memory="100MB")
    assert [f.read_bytes() for f in files_of(tmp_path / "written", "rows")] == [
        f.read_bytes() for f in files_of(tmp_path / "built", "rows")
    ]
    np.testing.assert_allclose(store.norms, built.norms, rtol=1e-6)


# --- in RAM -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("codec", ["none", "lz4", "zstd"])
def test_a_store_in_ram_holds_what_one_on_disk_does(codec, tmp_path):
    ram, disk = write(None, codec=codec), write(tmp_path / "s", codec=codec)
    assert ram.layouts["rows"].per_file == (1, 1, 2)
    assert_holds(ram, rows_of())
    assert ram.record(1)["files"] == disk.record(1)["files"]


@pytest.mark.parametrize("place", ["RAM", "disk"])
def test_a_buffer_may_be_used_again_for_the_next(place, tmp_path):
    files = Memory(10**6) if place == "RAM" else Folder(tmp_path)

    def buffers():
        buffer = bytearray(2)
        for n in range(3):
            buffer[:] = bytes([n, n])
            yield memoryview(buffer)

    files.write("x", buffers())
    assert files.read("x") == bytes([0, 0, 1, 1, 2, 2])


@pytest.mark.parametrize("size", [0, 1, PAGE - 1, PAGE, 3 * PAGE + 17])
@pytest.mark.parametrize("why_not", ["", "the file system", "the buffer", "short writes", "the machine"])
def test_what_is_written_past_the_page_cache_is_there_to_the_byte(size, why_not, tmp_path, monkeypatch):
    data = page_aligned((size + 1,), "uint8")
    data[:] = np.random.default_rng(size).integers(0, 256, size + 1)
    control, write = fcntl.fcntl, os.write

    def refusing(descriptor, command, *flags):
        if command == fcntl.F_SETFL and flags[0] & os.O_DIRECT:
            raise OSError(errno.EINVAL, "not here")
        return control(descriptor, command, *flags)

    if why_not == "the file system":
        monkeypatch.setattr(fcntl, "fcntl", refusing)
    elif why_not == "short writes":
        monkeypatch.setattr(os, "write", lambda descriptor, view: write(descriptor, view[:PAGE]))
    elif why_not == "the machine":
        monkeypatch.setattr(jacstore.storage.files, "DIRECT", 0)
    body = data[1:] if why_not == "the buffer" else data[:size]
    assert Folder(tmp_path).write("x", [raw(body), b"and what follows"], cached=False) == size + 16
    assert (tmp_path / "x").read_bytes() == body.tobytes() + b"and what follows"


@pytest.mark.parametrize("sizes", [(STAGED, 4) * 3, (PAGE, PAGE, 5, PAGE), (7,) * 3000, (STAGED - 4, 4, STAGED, 1)])
def test_buffers_of_any_size_are_written_past_the_page_cache_in_whole_pages(sizes, tmp_path, monkeypatch):
    calls, write = [], os.write

    def seen(descriptor, view):
        direct = bool(fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_DIRECT)
        calls.append((direct, write(descriptor, view)))
        return calls[-1][1]

    monkeypatch.setattr(os, "write", seen)
    data = page_aligned((sum(sizes),), "uint8")
    data[:] = np.random.default_rng(0).integers(0, 256, len(data))
    ends = np.cumsum(sizes)
    folder = Folder(tmp_path)

    def buffers():
        for n, (size, end) in enumerate(zip(sizes, ends, strict=True)):
            if n == 2:
                folder.write("meanwhile", [b"another file"], cached=False)
            yield raw(data[end - size : end])

    assert folder.write("x", buffers(), cached=False) == len(data)
    assert (tmp_path / "x").read_bytes() == data.tobytes()
    assert (tmp_path / "meanwhile").read_bytes() == b"another file"
    direct = [size for past, size in calls if past]
    assert all(size % PAGE == 0 for size in direct)
    # Where the file system can do it, whatever is whole pages goes past the cache.
    if direct:
        assert sum(direct) == len(data) // PAGE * PAGE


def test_rows_that_the_page_cache_could_not_keep_are_written_past_it(tmp_path, monkeypatch):
    past, write_file = set(), Folder.write

    def seen(self, name, buffers, cached=True):
        if not cached:
            past.add(name.split("/")[0])
        return write_file(self, name, buffers, cached)

    monkeypatch.setattr(Folder, "write", seen)
    rows = rows_of()
    kept = write(tmp_path / "kept.jac", rows)
    assert not past
    monkeypatch.setattr(jacstore.base.machine, "available_memory", lambda: 2 * kept.bytes_decoded - 1)
    other = write(tmp_path / "other.jac", rows, memory="1GB")
    assert past == {"rows"}
    np.testing.assert_array_equal(other.array.compute(), kept.array.compute())


def test_a_full_disk_is_one_past_the_page_cache_too(tmp_path, monkeypatch):
    def full(descriptor, view):
        raise OSError(errno.ENOSPC, "no space left")

    monkeypatch.setattr(os, "write", full)
    with pytest.raises(InvalidRequestError, match="disk full"):
        Folder(tmp_path).write("x", [raw(page_aligned((PAGE,), "uint8"))], cached=False)


def test_a_store_beyond_its_memory_moves_to_a_temporary_folder_that_goes_quietly_with_it():
    rows = rows_of(n=60)
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        store = write(None, rows, memory="20kB")
        folder = store.files._folder.root
        assert not store.files.in_memory and store.files.bytes_held == 0
        assert len(files_of(folder, "rows")) == 20
        assert_holds(store, rows)
        del store
        gc.collect()
    assert not folder.exists()
    assert [str(warning.message) for warning in heard] == []


def test_a_small_store_stays_in_ram():
    store = write(None, memory="100MB")
    assert store.files.in_memory
    assert store.files.bytes_held >= store.info()["bytes_stored"]


@pytest.mark.parametrize(("dtype", "codec"), list(product(["float32", "bfloat16", "float16", "float64"], CODECS)))
def test_every_type_is_kept_to_the_bit_with_every_codec(dtype, codec, tmp_path):
    rows = rows_of()
    store = write(tmp_path / "s", rows, dtype=dtype, codec=codec)
    np.testing.assert_array_equal(computed(store.array), as_stored(rows, dtype).reshape(N * K, P))


def test_masked_arrays_are_refused_since_their_mask_would_be_lost(tmp_path):
    masked = np.ma.masked_array(np.ones((3, 2)), mask=np.eye(3, 2))
    with pytest.raises(InvalidRequestError, match="masked"):
        jacstore.build(jacstore.Problem(apply=lambda p, x: x @ p, params=np.ones((2, 1)), inputs=masked), None)
    with (
        StoreWriter(None, {"w": (2,)}, 3, 1, unit_size=3, memory="10MB") as writer,
        pytest.raises(InvalidRequestError, match="masked"),
    ):
        writer.write_unit(0, {"w": masked[:, None]})


def test_a_triangle_is_refused_between_two_stores():
    first, second = (write(None, rows_of(seed=seed), memory="10MB") for seed in (0, 1))
    with pytest.raises(InvalidRequestError, match="--triangle"):
        jacstore.gram(first, second, triangle=True)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"leaves": [("a", (-3,))]}, "leaf 'a' of shape (-3,)"),
        ({"leaves": [("a", (2.5,))]}, "leaf 'a' of shape (2.5,)"),
        ({"n_examples": None}, "None examples"),
        ({"n_examples": 2.0}, "2.0 examples"),
        ({"n_outputs": -1}, "-1 outputs"),
    ],
)
def test_a_writer_of_no_such_store_is_refused_and_makes_nothing(given, said, tmp_path):
    with pytest.raises(InvalidRequestError) as caught:
        StoreWriter(tmp_path / "s", **{"leaves": [("a", (3,))], "n_examples": 2, "n_outputs": 1} | given)
    assert said in str(caught.value) and not (tmp_path / "s").exists()


@pytest.mark.parametrize(
    ("rows", "norms", "said"),
    [
        (np.ones((2, 1, 3)), None, "rows of type ndarray"),
        (None, None, "rows of type NoneType"),
        ({"a": np.ones((2, 1, 3))}, -np.ones((2, 1, 1)), "norms: -1"),
    ],
)
def test_a_unit_of_no_such_kind_is_refused_and_may_be_written_again(rows, norms, said):
    with StoreWriter(None, [("a", (3,))], 2, 1, unit_size=2) as writer:
        with pytest.raises(InvalidRequestError) as caught:
            writer.write_unit(0, rows, norms=norms)
        assert said in str(caught.value)
        writer.write_unit(0, {"a": np.ones((2, 1, 3))})
    assert writer.store.complete
