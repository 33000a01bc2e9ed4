"""What a group of tiles takes in memory, part by part, and what it reads, in bytes or counts."""

from __future__ import annotations

import math
from dataclasses import dataclass

from jacstore.base.limits import LIMITS, PRODUCT_BYTES
from jacstore.base.modes import Mode
from jacstore.kernels.plan.plan import Group, Step, merge_ranges
from jacstore.store.layout import Side

# Products of pairs of positions that are alive at once, on all cores and in all orders.
PRODUCT_COPIES = 16


@dataclass(frozen=True, kw_only=True)
class Footprint:
    """What the memory of a group depends on."""

    mode: Mode
    symmetric: bool
    n_outputs: int
    rows: Side
    cols: Side
    tile: int
    product_itemsize: int
    slab_copies: int
    tile_copies: int
    io_bytes: int
    steps: tuple[Step, ...]
    resident: bool
    patches_kept: bool

    def block_bytes(self, m: int, n: int) -> int:
        return 8 * math.prod(self.mode.shape(m, n, self.n_outputs))

    def ranges(self, group: Group) -> list[tuple[Side, int, int]]:
        """Example ranges that a group reads; a symmetric group's two ranges are merged where they touch."""
        a, b = self.rows.examples(self.tile, *group.rows)
        c, d = self.cols.examples(self.tile, *group.cols)
        return merge_ranges(self.rows, (a, b), self.cols, (c, d), self.symmetric)

    def parts(self, group: Group, width: int) -> dict[str, int]:
        """Bytes of everything that one worker holds for a group, with slabs of `width` columns, by name."""
        accumulators = 0
        for j in range(*group.cols):
            # The rows of a column of tiles are one range: down to the diagonal, or on it, or all.
            first = j if self.mode.within_examples else group.rows[0]
            last = min(group.rows[1], j + 1) if self.symmetric else group.rows[1]
            a, b = self.rows.examples(self.tile, first, max(first, last))
            c, d = self.cols.examples(self.tile, j, j + 1)
            accumulators += self.block_bytes(b - a, d - c)
        edge = min(self.tile, self.rows.n_examples), min(self.tile, self.cols.n_examples)
        # A tile that is finished by itself is written while the next one is computed.
        alive = 2 if self.resident else 1
        return {
            "accumulators": alive * accumulators,
            "tile_copies": alive * self.tile_copies * self.block_bytes(*edge),
            "reading": self.io_bytes,
            **self.factors(group),
            "slabs": self.per_column(group) * width,
        }

    def fixed(self, group: Group) -> int:
        """Bytes that do not depend on the width of a slab."""
        return sum(self.parts(group, 0).values())

    def factors(self, group: Group) -> dict[str, int]:
        """Bytes of factors in memory, of products of pairs of positions on every core, and of rows that are formed."""
        if not self.steps:
            return {}
        if self.resident:
            sides = [self.rows] if self.symmetric else [self.rows, self.cols]
            examples = sum(side.n_examples for side in sides)
            numbers = sum(step.numbers for step in self.steps)
        else:
            examples = sum(stop - start for _, start, stop in self.ranges(group))
            numbers = max(
                step.numbers
                + step.channel_columns * self.n_outputs * self.slab_copies
                + (step.patch_numbers if self.patches_kept else 0)
                for step in self.steps
            )
        formed = 2 * self.slab_copies * LIMITS.expanded_bytes if any(step.expanded for step in self.steps) else 0
        pairs = max((step.positions * self.n_outputs) ** 2 for step in self.steps) * self.product_itemsize
        return {
            # Factors are held as they are read and once more in the order that products want.
            "factors": 2 * examples * numbers * self.product_itemsize,
            "products": PRODUCT_COPIES * max(PRODUCT_BYTES, pairs),
            "rows_formed": formed,
        }

    def per_column(self, group: Group) -> int:
        """Bytes that each column of a slab takes."""
        examples = sum(stop - start for _, start, stop in self.ranges(group))
        return examples * self.n_outputs * self.product_itemsize * self.slab_copies

    def examples_read(self, group: Group) -> int:
        return sum(side.examples_read(start, stop) for side, start, stop in self.ranges(group))
