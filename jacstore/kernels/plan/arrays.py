"""The arrays that a plan makes of a kernel: their names, their layouts and the bytes that they take."""

from __future__ import annotations

import math
from collections.abc import Sequence
from urllib.parse import quote

from jacstore.kernels.plan.plan import GramPlan
from jacstore.storage.chunks import ArrayLayout

WHOLE, LEAVES = "kernel", "leaves"


def array_names(leaves: Sequence[str]) -> list[str]:
    """Array of each leaf's kernel, or the one array of the whole kernel where leaves are not kept apart."""
    if not leaves:
        return [WHOLE]
    # A path is one name: its slashes are encoded, and so is a dot that could climb out of the folder.
    quoted = [quote(path, safe="") for path in leaves]
    return [f"{LEAVES}/{'%2E' + name[1:] if name.startswith('.') else name}" for name in quoted]


def layouts(plan: GramPlan, leaves: Sequence[str], dtype: str) -> list[ArrayLayout]:
    """Zarr arrays of a kernel; a chunk is a tile."""
    n, m = plan.rows.n_examples, plan.cols.n_examples
    shape = plan.mode.shape(n, m, plan.n_outputs)
    piece = plan.mode.shape(min(plan.tile, n), min(plan.tile, m), plan.n_outputs)
    return [
        ArrayLayout(
            name=name,
            shape=shape,
            piece=piece,
            per_file=(1,) * len(shape),
            dtype=dtype,
            codec="none",
            dimensions=plan.mode.dimensions,
        )
        for name in array_names(leaves)
    ]


def expected_bytes(plan: GramPlan, leaves: Sequence[str], itemsize: int, triangle: bool) -> int:
    """Bytes of the tile files of a kernel, mirrors included."""
    piece = math.prod(plan.mode.shape(plan.tile, plan.tile, plan.n_outputs)) * itemsize
    tiles = plan.tiles_total if triangle else plan.tiles_stored
    return tiles * piece * len(leaves or [WHOLE])
