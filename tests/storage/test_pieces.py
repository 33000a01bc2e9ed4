"""Claims about files: plain Zarr v3 that zarr-python reads, every byte under a checksum, bfloat16 rounded right."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest
import zarr
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from jacstore.base.limits import CODECS
from jacstore.errors import DamagedDataError
from jacstore.storage import zarr_group
from jacstore.storage.chunks import ArrayLayout, FileEncoder, FileRecord, decode, raw
from jacstore.storage.files import Folder
from jacstore.store.unit_buffers import from_bfloat16, to_bfloat16
from support import flipped

DTYPES = ("float32", "float64", "float16", "uint16")
quick = settings(max_examples=40, deadline=None, database=None, suppress_health_check=list(HealthCheck))


@st.composite
def layouts(draw):
    axes = draw(st.integers(1, 3))
    shape = tuple(draw(st.integers(1, 9)) for _ in range(axes))
    return ArrayLayout(
        name=draw(st.sampled_from(["rows", "leaves/a%2Fb"])),
        shape=shape,
        piece=tuple(draw(st.integers(1, n + 1)) for n in shape),
        per_file=tuple(draw(st.integers(1, 3)) for _ in shape),
        dtype=draw(st.sampled_from(DTYPES)),
        codec=draw(st.sampled_from(CODECS)),
        dimensions=("example", "output", "parameter")[:axes],
    )


def sharded(codec="none", dtype="float32"):
    return ArrayLayout(
        name="rows",
        shape=(4, 10),
        piece=(4, 3),
        per_file=(1, 2),
        dtype=dtype,
        codec=codec,
        dimensions=("example", "parameter"),
    )


def values_of(layout):
    values = np.random.default_rng(0).normal(size=layout.shape)
    return to_bfloat16(values) if layout.dtype == "uint16" else values.astype(layout.dtype)


def grid(layout):
    return np.ndindex(*(layout.files_along(axis) for axis in range(len(layout.shape))))


def encoded(layout, at, values):
    """The bytes of one file, and what has to be recorded of it."""
    encoder, data = FileEncoder(layout), b""
    for where in layout.pieces_of(at):
        piece = None
        if all(s.start < s.stop for s in where):
            piece = np.full(layout.piece, layout.fill, layout.dtype)
            piece[tuple(slice(0, s.stop - s.start) for s in where)] = values[where]
        data += b"".join(encoder.encode(piece))
    return data + b"".join(encoder.close()), encoder.record()


def written(folder, layout, values, files=None):
    """Write an array, or only some of its files, below a folder; returns the record of each file."""
    zarr_group.create(Folder(folder), [layout], {"kind": "store"})
    records = {}
    for at in grid(layout) if files is None else files:
        data, records[at] = encoded(layout, at, values)
        Folder(folder).write(layout.file_name(at), [data])
    return records


def opened(folder, layout):
    return zarr.open_array(folder / layout.name, mode="r")


# --- the format -------------------------------------------------------------------------------------------------------


@given(layout=layouts())
@quick
def test_zarr_reads_every_layout(layout, tmp_path_factory):
    folder, values = tmp_path_factory.mktemp("layout"), values_of(layout)
    written(folder, layout, values)
    np.testing.assert_array_equal(opened(folder, layout)[...], values)


@given(layout=layouts())
@quick
def test_the_pieces_of_all_files_cover_the_array_once(layout):
    cells = Counter(
        cell
        for at in grid(layout)
        for where in layout.pieces_of(at)
        for cell in np.ndindex(*(s.stop - s.start for s in where))
        for cell in [tuple(s.start + c for s, c in zip(where, cell, strict=True))]
    )
    assert set(cells) == set(np.ndindex(*layout.shape))
    assert set(cells.values()) == {1}


@given(layout=layouts())
@quick
def test_every_piece_is_read_back_where_its_record_says(layout):
    values = values_of(layout)
    for at in grid(layout):
        data, record = encoded(layout, at, values)
        assert len(data) == record.size
        again = FileRecord.from_list(json.loads(json.dumps(record.to_list())))
        for where, (offset, size, checksum) in zip(layout.pieces_of(at), again.pieces, strict=True):
            if size == 0:
                assert any(s.start >= s.stop for s in where)
                continue
            out = np.empty(layout.piece, layout.dtype)
            decode(memoryview(data)[offset : offset + size], (offset, size, checksum), out, layout, "file")
            found = out[tuple(slice(0, s.stop - s.start) for s in where)]
            np.testing.assert_array_equal(found, values[where])


@given(layout=layouts(), data=st.data())
@quick
def test_a_range_of_columns_looks_at_its_own_pieces_only(layout, data):
    layout = replace(layout, per_file=(*[1] * (len(layout.shape) - 1), layout.per_file[-1]))
    first = data.draw(st.integers(0, layout.shape[-1] - 1))
    last = data.draw(st.integers(first + 1, layout.shape[-1]))
    for at in grid(layout):
        _, record = encoded(layout, at, values_of(layout))
        listed = json.loads(json.dumps(record.to_list()))
        wanted = [
            (index, where)
            for index, where in enumerate(layout.pieces_of(at))
            if max(first, where[-1].start) < min(last, where[-1].stop)
        ]
        assert list(layout.pieces_within(at, first, last)) == wanted
        for index, _ in wanted:
            assert FileRecord.piece_of(listed, index) == record.pieces[index]
    for damaged in ([], [1], [1, [2, "x"]], [1, 5], None):
        with pytest.raises(DamagedDataError, match="not readable"):
            FileRecord.piece_of(damaged, 0)


@pytest.mark.parametrize("codec", CODECS)
def test_metadata_is_plain_zarr_with_names_and_a_fill_of_nan(codec, tmp_path):
    layout = sharded(codec)
    written(tmp_path, layout, values_of(layout))
    metadata = json.loads((tmp_path / "rows" / "zarr.json").read_text())
    assert metadata["zarr_format"] == 3
    assert metadata["dimension_names"] == ["example", "parameter"]
    assert metadata["fill_value"] == "NaN"
    assert metadata["chunk_key_encoding"] == {"name": "default", "configuration": {"separator": "/"}}
    (sharding,) = metadata["codecs"]
    inner = [entry["name"] for entry in sharding["configuration"]["codecs"]]
    # Of a checksum around a whole shard one piece could not be read without all the others.
    assert inner == (["bytes", "crc32c"] if codec == "none" else ["bytes", "blosc", "crc32c"])
    assert [entry["name"] for entry in sharding["configuration"]["index_codecs"]] == ["bytes", "crc32c"]


@pytest.mark.parametrize("dtype", DTYPES)
def test_what_is_missing_reads_as_nan(dtype, tmp_path):
    layout = sharded(dtype=dtype)
    values = values_of(layout)
    written(tmp_path, layout, values, files=[(0, 0)])
    found = opened(tmp_path, layout)[...]
    np.testing.assert_array_equal(found[:, :6], values[:, :6])
    missing = from_bfloat16(found[:, 6:]) if dtype == "uint16" else found[:, 6:]
    assert np.isnan(missing).all()


@pytest.mark.parametrize("codec", CODECS)
def test_padding_at_the_border_is_nan(codec):
    layout = sharded(codec)
    data, record = encoded(layout, (0, 1), values_of(layout))
    out = np.empty(layout.piece, layout.dtype)
    offset, size, _ = record.pieces[1]
    decode(memoryview(data)[offset : offset + size], record.pieces[1], out, layout, "file")
    assert np.isnan(out[:, 1:]).all() and np.isfinite(out[:, :1]).all()


# --- checksums --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("codec", CODECS)
def test_zarr_notices_any_flipped_byte(codec, tmp_path):
    """Every byte of a shard: encoded pieces, their checksums, the index and its checksum."""
    layout = sharded(codec)
    values = values_of(layout)
    written(tmp_path, layout, values)
    path = tmp_path / layout.file_name((0, 0))
    good = path.read_bytes()
    for position in range(len(good)):
        path.write_bytes(flipped(good, position))
        with pytest.raises(ValueError, match="hecksum"):
            opened(tmp_path, layout)[...]
    path.write_bytes(good)
    np.testing.assert_array_equal(opened(tmp_path, layout)[...], values)


@pytest.mark.parametrize("codec", CODECS)
def test_a_piece_with_any_flipped_byte_is_refused(codec):
    layout = sharded(codec)
    data, record = encoded(layout, (0, 0), values_of(layout))
    out = np.empty(layout.piece, layout.dtype)
    for piece in record.pieces:
        offset, size, _ = piece
        for position in range(offset, offset + size):
            with pytest.raises(DamagedDataError, match=f"bytes {offset} to {offset + size} differ"):
                decode(memoryview(flipped(data, position))[offset : offset + size], piece, out, layout, "file")


def test_without_a_codec_a_piece_is_decoded_where_it_was_read():
    layout = sharded()
    data, record = encoded(layout, (0, 0), values_of(layout))
    offset, size, _ = record.pieces[1]
    out = np.frombuffer(data[offset : offset + size], "float32").reshape(layout.piece).copy()
    before = out.copy()
    decode(raw(out), record.pieces[1], out, layout, "file")
    np.testing.assert_array_equal(out, before)


# --- bfloat16 ---------------------------------------------------------------------------------------------------------


def test_bfloat16_is_rounded_as_ml_dtypes_does():
    """Every upper half of a float32 with lower halves at and around the tie, and whatever a generator finds."""
    upper = np.arange(2**16, dtype=np.uint32) << 16
    lower = np.array([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF], np.uint32)
    drawn = np.random.default_rng(0).integers(0, 2**32, size=10**6, dtype=np.uint32)
    values = np.concatenate([(upper[:, None] | lower).ravel(), drawn]).view(np.float32)
    with np.errstate(over="ignore", invalid="ignore"):
        truth = values.astype(ml_dtypes.bfloat16)
    found = to_bfloat16(values)
    nan = np.isnan(values)
    np.testing.assert_array_equal(found[~nan], truth.view(np.uint16)[~nan])
    assert (found[nan] == 0x7FC0).all()


def test_bfloat16_is_widened_as_ml_dtypes_does():
    bits = np.arange(2**16, dtype=np.uint16)
    found, truth = from_bfloat16(bits), bits.view(ml_dtypes.bfloat16).astype(np.float32)
    np.testing.assert_array_equal(found, truth)
    finite = np.isfinite(truth)
    np.testing.assert_array_equal(to_bfloat16(found)[finite], bits[finite])
