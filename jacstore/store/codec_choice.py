"""Choose the codec that takes the least time to compute, encode and write, measured on a first batch."""

from __future__ import annotations

import os
import tempfile
import time
from pathlib import Path

import numpy as np

from jacstore.base import machine
from jacstore.base.limits import CODECS
from jacstore.storage.buckets import is_address
from jacstore.storage.chunks import compress
from jacstore.storage.files import UNFLUSHED, explain
from jacstore.store.layout import PIECE_BYTES

# Bytes a second that a bucket takes from one machine over many requests at once: about 5 Gbit/s.
BUCKET_SPEED = 6e8


def fastest_codec(sample: list[np.ndarray], disk_speed: float, computing: float = 0.0) -> str:
    """The codec with the least expected time to compute, encode and write, measured on rows of a first batch.

    Float rows seldom compress by more than a tenth, but rows of a ReLU network on sparse images are mostly zeros.

    Parameters
    ----------
    disk_speed
        Bytes a second.
    computing
        Seconds per byte that the encoding cores spend on computing rows; 0 where an accelerator computes them.
    """
    rows = [leaf[:, 0] for leaf in sample]
    kept = max(1, 4 * PIECE_BYTES // sum(row[0].nbytes for row in rows))
    flat = np.ascontiguousarray(np.concatenate([row[:kept] for row in rows], -1)).reshape(-1)
    length = PIECE_BYTES // flat.itemsize
    pieces = [flat[a : a + length] for a in range(0, len(flat), length)]
    pieces = pieces[:: max(1, len(pieces) // 16)]
    total = sum(piece.nbytes for piece in pieces)
    seconds = {"none": max(computing, 1 / disk_speed)}
    for codec in CODECS[1:]:
        began = time.perf_counter()
        encoded = sum(len(compress(piece, codec)) for piece in pieces)
        encoding = (time.perf_counter() - began) / total / machine.cores()
        # A gain of less than a tenth is not worth decoding for.
        seconds[codec] = 1.1 * max(computing + encoding, encoded / total / disk_speed)
    return min(seconds, key=lambda codec: seconds[codec])


def measured_disk_speed(place: str | Path) -> float:
    """Bytes a second of writing and flushing a small file there, the faster of two: a first one may wait for others.

    A bucket is not measured: a single put says little of many at once.
    """
    if is_address(place):
        return BUCKET_SPEED
    folder = Path(place).absolute()
    while not folder.is_dir():
        folder = folder.parent
    data = np.random.default_rng(0).bytes(max(4096, min(16_000_000, machine.free_disk(folder) // 16)))
    try:
        return len(data) / min(_seconds_to_write(data, folder) for _ in range(2))
    except OSError as error:
        raise explain(error, folder, 0) from error


def _seconds_to_write(data: bytes, folder: Path) -> float:
    """Seconds of writing and flushing a file that is gone afterwards; where none can be flushed, of writing it."""
    began = time.perf_counter()
    with tempfile.TemporaryFile(dir=folder) as file:
        file.write(data)
        file.flush()
        try:
            os.fsync(file.fileno())
        except OSError as error:
            if error.errno not in UNFLUSHED:
                raise
    return time.perf_counter() - began
