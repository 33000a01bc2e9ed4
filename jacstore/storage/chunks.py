"""Encode pieces of arrays into Zarr v3 chunk and shard files, and decode them with every checksum verified.

Why not through a Zarr library: each piece must be checked against the ledger before its bytes are trusted, a slab is
read straight into the caller's buffer, and every byte read is counted. The files are plain Zarr v3 all the same: codecs
`bytes`, `blosc` where asked for, and `crc32c`; shards end with the index that `sharding_indexed` defines. The tests
read them with zarr-python.
"""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
from crc32c import crc32c
from numcodecs.blosc import Blosc

from jacstore.errors import DamagedDataError
from jacstore.storage.files import PAGE

BLOSC_LEVELS = {"lz4": 5, "zstd": 1}
CHECKSUM_BYTES = 4
# bfloat16 is stored as uint16; this is its NaN. No index is -1.
FILL = {"uint16": 0x7FC0, "int32": -1}
_ABSENT = 2**64 - 1


@dataclass(frozen=True, kw_only=True)
class ArrayLayout:
    """One Zarr array: `shape`, the shape of a `piece` (chunk, or inner chunk of a shard) and pieces per file.

    `per_file` counts pieces along each axis that share a file; all ones means plain chunks. `fill` is what a missing
    piece reads as: NaN.
    """

    name: str
    shape: tuple[int, ...]
    piece: tuple[int, ...]
    per_file: tuple[int, ...]
    dtype: str
    codec: str
    dimensions: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        """As JSON."""
        return asdict(self)

    @property
    def itemsize(self) -> int:
        return np.dtype(self.dtype).itemsize

    @property
    def sharded(self) -> bool:
        return any(n > 1 for n in self.per_file)

    @property
    def fill(self) -> float | int:
        return FILL.get(self.dtype, math.nan)

    @property
    def piece_bytes(self) -> int:
        return math.prod(self.piece) * self.itemsize

    def files_along(self, axis: int) -> int:
        """How many files the array has along an axis."""
        return -(-self.shape[axis] // (self.piece[axis] * self.per_file[axis]))

    def file_name(self, at: tuple[int, ...]) -> str:
        """The file at a grid position, with Zarr's default chunk key."""
        return "/".join([self.name, "c", *map(str, at)])

    def check_record(self, facts: Any, file: int, name: str) -> None:
        """Refuse a record that cannot be that of the `file`-th file along the last axis.

        Raises
        ------
        DamagedDataError
            If its sizes are not those that this layout gives.
        """
        per_file = math.prod(self.per_file)
        held = min(per_file, -(-self.shape[-1] // self.piece[-1]) - file * self.per_file[-1])
        try:
            total, numbers = facts
            sizes, checksums = numbers[0::2], numbers[1::2]
            integers = all(type(number) is int for number in (total, *numbers))
        except (TypeError, ValueError):
            integers = False
        if not integers or len(sizes) != per_file or len(checksums) != per_file:
            raise DamagedDataError(f"the record of {name} is not readable")
        # Blosc keeps what it cannot compress behind a header of 16 bytes.
        least, most = (self.piece_bytes, self.piece_bytes) if self.codec == "none" else (1, self.piece_bytes + 16)
        ends = held * CHECKSUM_BYTES + (16 * per_file + CHECKSUM_BYTES if self.sharded else 0)
        if (
            not all(least <= size <= most for size in sizes[:held])
            or any(sizes[held:])
            or total != sum(sizes) + ends
            or not all(0 <= checksum < 2**32 for checksum in checksums)
        ):
            raise DamagedDataError(f"the record of {name} has sizes that it cannot have")

    def pieces_of(self, at: tuple[int, ...]) -> Iterator[tuple[slice, ...]]:
        """The region of each piece of a file in index order; regions beyond the array are empty."""
        starts = [[(i * n + m) * p for m in range(n)] for i, n, p in zip(at, self.per_file, self.piece, strict=True)]
        for corner in itertools.product(*starts):
            yield tuple(
                slice(min(a, size), min(a + p, size)) for a, p, size in zip(corner, self.piece, self.shape, strict=True)
            )

    def pieces_within(self, at: tuple[int, ...], first: int, last: int) -> Iterator[tuple[int, tuple[slice, ...]]]:
        """Index and region of each piece of a file that holds any of the last axis' columns `first` to `last`.

        Only for arrays whose files are cut along the last axis alone, as in stores.
        """
        start, width = at[-1] * self.per_file[-1], self.piece[-1]
        low, high = max(0, first // width - start), min(self.per_file[-1], -(-last // width) - start)
        narrow = replace(self, per_file=(1,) * len(at))
        for n in range(low, high):
            yield n, next(narrow.pieces_of((*at[:-1], start + n)))


@dataclass(frozen=True, kw_only=True)
class FileRecord:
    """The contents of a file: for each piece its offset, encoded size without checksum, and crc32c (size 0: absent)."""

    size: int
    pieces: tuple[tuple[int, int, int], ...]

    def to_list(self) -> list[Any]:
        """As compact JSON: size, then size and checksum of each piece; offsets follow from the sizes."""
        return [self.size, [number for _, size, checksum in self.pieces for number in (size, checksum)]]

    @classmethod
    def from_list(cls, given: list[Any]) -> FileRecord:
        """From compact JSON.

        Raises
        ------
        DamagedDataError
            If it is not what `to_list` gives.
        """
        pieces, offset = [], 0
        try:
            for size, checksum in zip(given[1][0::2], given[1][1::2], strict=True):
                pieces.append((offset, operator.index(size), operator.index(checksum)))
                offset += size + CHECKSUM_BYTES if size else 0
            return cls(size=operator.index(given[0]), pieces=tuple(pieces))
        except (TypeError, ValueError, IndexError, KeyError):
            raise DamagedDataError("the record of a file is not readable") from None

    @staticmethod
    def piece_of(given: list[Any], index: int) -> tuple[int, int, int]:
        """One piece from compact JSON; the others are only counted.

        Raises
        ------
        DamagedDataError
            If it is not what `to_list` gives.
        """
        try:
            before = given[1][0 : 2 * index : 2]
            offset = operator.index(sum(before)) + CHECKSUM_BYTES * (len(before) - before.count(0))
            return offset, operator.index(given[1][2 * index]), operator.index(given[1][2 * index + 1])
        except (TypeError, IndexError, KeyError, AttributeError):
            raise DamagedDataError("the record of a file is not readable") from None

    def index_bytes(self) -> bytes:
        """The index of a shard with these pieces, and its checksum."""
        index = np.full((len(self.pieces), 2), _ABSENT, "<u8")
        for entry, (offset, size, _) in zip(index, self.pieces, strict=True):
            if size:
                entry[:] = offset, size + CHECKSUM_BYTES
        body = index.tobytes()
        return body + crc32c(body).to_bytes(CHECKSUM_BYTES, "little")


class FileEncoder:
    """Encode the pieces of one file, one at a time, and collect the numbers for its record."""

    def __init__(self, layout: ArrayLayout) -> None:
        self.layout = layout
        self._pieces: list[tuple[int, int, int]] = []
        self._offset = 0

    def encode(self, piece: np.ndarray | None) -> list[bytes | memoryview]:
        """Bytes of the next piece, padded to full shape and contiguous; None where a region lies beyond the array."""
        if piece is None:
            self._pieces.append((self._offset, 0, 0))
            return []
        body = compress(piece, self.layout.codec)
        checksum = crc32c(body)
        self._pieces.append((self._offset, len(body), checksum))
        self._offset += len(body) + CHECKSUM_BYTES
        return [body, checksum.to_bytes(CHECKSUM_BYTES, "little")]

    def close(self) -> list[bytes | memoryview]:
        """Bytes that end the file: the shard index."""
        if not self.layout.sharded:
            return []
        end = self.record().index_bytes()
        self._offset += len(end)
        return [end]

    def record(self) -> FileRecord:
        """The record of the pieces encoded so far."""
        return FileRecord(size=self._offset, pieces=tuple(self._pieces))


def raw(array: np.ndarray) -> memoryview:
    """The bytes of a contiguous array, not copied."""
    return array.reshape(-1).view(np.uint8).data


def page_aligned(shape: Sequence[int], dtype: str) -> np.ndarray:
    """An uninitialised array that begins at a memory page, as writing past the page cache requires."""
    size = math.prod(shape) * np.dtype(dtype).itemsize
    memory = np.empty(size + PAGE, np.uint8)
    start = -memory.ctypes.data % PAGE
    return memory[start : start + size].view(dtype).reshape(shape)


def compress(piece: np.ndarray, codec: str) -> bytes | memoryview:
    """Encoded body of a contiguous piece, without checksum."""
    if codec == "none":
        return raw(piece)
    encoded: bytes = _blosc(codec).encode(piece.reshape(-1))
    return encoded


def decode(body: memoryview, record: tuple[int, int, int], out: np.ndarray, layout: ArrayLayout, name: str) -> None:
    """Check one encoded piece against its record and decode it into `out`, contiguous and of full piece shape.

    Raises
    ------
    DamagedDataError
        If the bytes are not those that were recorded.
    """
    if crc32c(body) != record[2]:
        raise DamagedDataError(
            f"{name}: bytes {record[0]} to {record[0] + record[1]} differ from the recorded checksum"
        )
    flat = out.reshape(-1).view(np.uint8)
    if layout.codec == "none":
        encoded = np.frombuffer(body, np.uint8)
        if not np.may_share_memory(encoded, flat):
            flat[:] = encoded
        return
    # Blosc would leave the part that a shorter body does not cover unchanged.
    if len(body) < 16 or int.from_bytes(body[4:8], "little") != flat.nbytes:
        raise DamagedDataError(f"{name}: bytes {record[0]} to {record[0] + record[1]} are not a piece of this array")
    try:
        _blosc(layout.codec).decode(body, flat)
    except RuntimeError as error:
        raise DamagedDataError(
            f"{name}: bytes {record[0]} to {record[0] + record[1]} cannot be decoded ({error})"
        ) from None


def _blosc(codec: str) -> Blosc:
    # Bit shuffle was best for float rows, see docs/benchmarks.md.
    return Blosc(cname=codec, clevel=BLOSC_LEVELS[codec], shuffle=Blosc.BITSHUFFLE)


def check_file(data: memoryview, record: FileRecord, layout: ArrayLayout, name: str) -> None:
    """Check every byte of a file against its record: pieces, their stored checksums, and the index of a shard.

    Raises
    ------
    DamagedDataError
        Naming the first bytes that differ.
    """
    if len(data) != record.size:
        raise DamagedDataError(f"{name} has {len(data)} bytes, recorded were {record.size}")
    end = 0
    for piece, (offset, size, checksum) in enumerate(record.pieces):
        if size:
            end = offset + size + CHECKSUM_BYTES
            stored = bytes(data[offset + size : end])
            if crc32c(data[offset : offset + size]) != checksum or stored != checksum.to_bytes(
                CHECKSUM_BYTES, "little"
            ):
                raise DamagedDataError(f"{name}: bytes {offset} to {end} differ from the recorded checksum", piece)
    if layout.sharded and bytes(data[end:]) != record.index_bytes():
        raise DamagedDataError(f"{name}: the index of the shard, from byte {end}, differs from the record")
