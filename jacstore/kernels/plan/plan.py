"""The plan of a kernel, as values: its sides, groups of tiles, items, steps.

Tiles are rectangles of the kernel, groups are tiles whose accumulators fit in memory together, slabs are columns of J.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

from jacstore.base.modes import Mode
from jacstore.store.layout import Side


@dataclass(frozen=True, kw_only=True)
class Group:
    """Tiles whose accumulators are in memory together: rows of tiles `rows[0]:rows[1]` by columns of tiles `cols`."""

    rows: tuple[int, int]
    cols: tuple[int, int]


@dataclass(frozen=True, kw_only=True)
class Step:
    """Factored leaves that are contracted together.

    `numbers` of factors are read for each example; `expanded` leaves form `channel_columns` columns of rows a channel,
    from up to `patch_numbers` of patches; products of the others run over pairs of up to `positions` positions.
    """

    leaves: tuple[int, ...]
    expanded: tuple[int, ...]
    numbers: int
    channel_columns: int
    patch_numbers: int
    positions: int
    flops_pair: int
    flops_example: int


@dataclass(frozen=True, kw_only=True)
class Item:
    """One task: a group over a range of columns of J stored as rows, and over some steps of factored leaves."""

    number: int
    group: int
    split: int
    columns: tuple[int, int]
    steps: tuple[int, ...] = ()


@dataclass(frozen=True, kw_only=True)
class GramPlan:
    """How a kernel is assembled. Resolved once, kept with the kernel and reused by every rerun."""

    mode: Mode
    symmetric: bool
    n_outputs: int
    n_columns: int
    rows: Side
    cols: Side
    tile: int
    groups: tuple[Group, ...]
    splits: tuple[tuple[int, int], ...]
    slab_columns: int
    piece_columns: int
    schedule: str
    memory_bytes: int
    bytes_expected: int
    bytes_stored: int
    flops: int
    steps: tuple[Step, ...] = ()
    split_steps: tuple[tuple[int, ...], ...] = ()
    resident: bool = False
    patches_kept: bool = False

    @property
    def passes(self) -> float:
        """Expected reads of the stored J, in units of its size."""
        return self.bytes_expected / self.bytes_stored

    @cached_property
    def items(self) -> tuple[Item, ...]:
        """All items by their number. There may be thousands, and each of them asks for its own: they are made once."""
        return tuple(
            Item(number=g * len(self.splits) + s, group=g, split=s, columns=columns, steps=self.split_steps[s])
            for g in range(len(self.groups))
            for s, columns in enumerate(self.splits)
        )

    @property
    def n_items(self) -> int:
        return len(self.groups) * len(self.splits)

    def items_of(self, group: int) -> tuple[Item, ...]:
        """The items of a group, one for each split."""
        return self.items[group * len(self.splits) : (group + 1) * len(self.splits)]

    def tiles_of(self, group: Group) -> list[tuple[int, int]]:
        """Tiles that a group computes: only `i <= j` of a symmetric kernel, only `i == j` for mode blocks."""
        return list(tiles_within(group, self.symmetric, self.mode))

    @property
    def grid(self) -> tuple[int, int]:
        """Tiles along each side."""
        return self.rows.tiles(self.tile), self.cols.tiles(self.tile)

    @property
    def tiles_total(self) -> int:
        """Tiles computed; mirrors of a symmetric kernel are not counted."""
        return sum(len(self.tiles_of(group)) for group in self.groups)

    @property
    def tiles_stored(self) -> int:
        """Tiles of the whole kernel, mirrors included."""
        return self.mode.tiles_stored(*self.grid)

    def slabs(self, columns: tuple[int, int]) -> list[tuple[int, int]]:
        """Slabs of an item's columns, in the order in which they are added. Their borders are borders of pieces."""
        start, stop = columns
        if start >= stop:
            return []
        first = start // self.piece_columns * self.piece_columns
        borders = [start, *range(first + self.slab_columns, stop, self.slab_columns), stop]
        return list(itertools.pairwise(borders))

    def tile_shape(self, i: int, j: int) -> tuple[int, ...]:
        """Shape of the accumulator of tile (i, j)."""
        a, b = self.rows.examples(self.tile, i, i + 1)
        c, d = self.cols.examples(self.tile, j, j + 1)
        return self.mode.shape(b - a, d - c, self.n_outputs)

    def to_dict(self) -> dict[str, Any]:
        """As JSON."""
        return asdict(self) | {"mode": self.mode.value}


def tiles_within(group: Group, symmetric: bool, mode: Mode) -> Iterator[tuple[int, int]]:
    (a, b), (c, d) = group.rows, group.cols
    for i in range(a, b):
        first = max(c, i) if symmetric or mode.within_examples else c
        for j in range(first, min(d, i + 1) if mode.within_examples else d):
            yield i, j


def merge_ranges(
    rows: Side, row_range: tuple[int, int], cols: Side, col_range: tuple[int, int], symmetric: bool
) -> list[tuple[Side, int, int]]:
    """Example ranges to read for a group: one where both sides are the same store and the ranges touch, else two."""
    (a, b), (c, d) = row_range, col_range
    if symmetric and max(a, c) <= min(b, d):
        return [(rows, min(a, c), max(b, d))]
    return [(rows, a, b), (cols, c, d)]
