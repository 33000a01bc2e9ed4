"""Hold one unit of an array in memory, laid out as the pieces of its files.

Values are put where they are written from, so that nothing is copied twice on its way from the device to the disk.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from jacstore.storage.chunks import ArrayLayout


def storage_dtype(dtype: str) -> str:
    """The type in the file: bfloat16 is stored as uint16, Zarr has no such type."""
    return "uint16" if dtype == "bfloat16" else dtype


def to_bfloat16(values: np.ndarray) -> np.ndarray:
    """Round float values to bfloat16, nearest even, as uint16."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    # Rounding must not carry a NaN into infinity.
    return np.where(np.isnan(values), np.uint16(0x7FC0), rounded)


def from_bfloat16(bits: np.ndarray) -> np.ndarray:
    """The float32 values of bfloat16 stored as uint16."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


class UnitBlock:
    """One unit of an array `(N, ..., columns)` that is cut into pieces along its first and last axes.

    Parameters
    ----------
    layout
        The array's layout; a piece holds all examples of a unit.
    dtype
        The numbers' own type; `bfloat16` where the layout has uint16.
    """

    def __init__(self, layout: ArrayLayout, dtype: str) -> None:
        self.layout, self.dtype = layout, dtype
        self.columns, self._width = layout.shape[-1], layout.piece[-1]
        # Filled at once, padding included: touching new memory page by page while rows arrive took ten times longer.
        self._pieces = np.full((-(-self.columns // self._width), *layout.piece), layout.fill, layout.dtype)

    def put(self, at: tuple[Any, ...], values: np.ndarray, first: int = 0) -> None:
        """Store `values` `(n, ..., w)` at `at` of the first axes and at columns `first` to `first + w` of the last."""
        at = (*at, *[slice(None)] * (self._pieces.ndim - 2 - len(at)))
        with np.errstate(over="ignore", invalid="ignore"):
            if self.dtype == "bfloat16" and values.dtype != np.uint16:
                values = to_bfloat16(values.astype(np.float32))
            width, done, total = self._width, 0, values.shape[-1]
            while done < total:
                piece, left = divmod(first + done, width)
                whole = (total - done) // width
                if left == 0 and whole:
                    part = values[..., done : done + whole * width]
                    part = part.reshape(*part.shape[:-1], whole, width)
                    self._pieces[slice(piece, piece + whole), *at] = np.moveaxis(part, -2, 0)
                    done += whole * width
                else:
                    count = min(width - left, total - done)
                    self._pieces[piece, *at, slice(left, left + count)] = values[..., done : done + count]
                    done += count

    def example(self, n: int) -> np.ndarray:
        """The numbers `(..., columns)` of the unit's n-th example, as a reader will get them."""
        held = np.moveaxis(self._pieces[:, n], 0, -2)
        values = held.reshape(*held.shape[:-2], -1)[..., : self.columns]
        return from_bfloat16(values) if self.dtype == "bfloat16" else values

    def weighted(self, n: int, weights: np.ndarray) -> np.ndarray:
        """`weights @ example(n)` in float64, weights along the first axis; one piece at a time is converted."""
        parts = []
        for piece in self._pieces[:, n]:
            values = from_bfloat16(piece) if self.dtype == "bfloat16" else piece
            parts.append(np.tensordot(weights, values.astype(np.float64), 1))
        return np.concatenate(parts, -1)[..., : self.columns]

    def clear(self, count: int) -> None:
        """Put the fill value beyond the first `count` examples, where the array ends."""
        self._pieces[:, count:] = self.layout.fill

    def pieces(self, file: int) -> Iterator[np.ndarray | None]:
        """Pieces of the unit's `file`-th file in index order; None beyond the array."""
        per_file = self.layout.per_file[-1]
        for index in range(file * per_file, (file + 1) * per_file):
            yield self._pieces[index] if index < len(self._pieces) else None
