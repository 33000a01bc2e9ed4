"""In: sizes and budgets, as integers. Out: what will be stored and read, decided and refused before any work.

Two plans. A `StorePlan` cuts N examples into units and P columns into pieces. A `GramPlan` cuts the kernel into tiles,
tiles into groups whose accumulators fit in memory together, and columns into slabs; it counts bytes, passes and flops.
"""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from jacstore.errors import Refused

MODES = ("full", "trace", "diagonal", "blocks")
MAX_FILES = 20_000
MAX_ITEMS = 10_000
# A file of 64 MB keeps 300 GB within 5,000 files; a piece of at most 1 MB is checked and copied inside the cache.
FILE_BYTES = 64_000_000
PIECE_BYTES = 1_000_000
PIECE_COLUMNS = (64, 2048)
UNIT_BYTES = 1_000_000_000
# Wide slabs keep BLAS busy; beyond this depth a float32 product would lose digits before its float64 sum.
SLAB_COLUMNS = 4096
TILE_ROWS = 2048
IO_THREADS = 4
# Products of pairs of positions are formed in blocks of about this size, several at once.
PRODUCT_BYTES = 2_000_000
PRODUCT_COPIES = 12
# Rows that are formed from factors take about this much at once, or one channel of cotangents if that is more.
EXPANDED_BYTES = 32_000_000


# ---------------------------------------------------------------------------------------------------------------- store


@dataclass(frozen=True, kw_only=True)
class StorePlan:
    """How `(N, K, P_dense)` rows are cut: `unit_size` examples a unit, `piece_columns` a piece, pieces a file.

    `factor_bytes` of factors come with each example; `n_columns` is 0 where there are factors alone.
    """

    n_examples: int
    n_outputs: int
    n_columns: int
    itemsize: int
    unit_size: int
    piece_columns: int
    pieces_per_file: int
    factor_bytes: int = 0
    factor_files: int = 0

    @property
    def n_units(self) -> int:
        return -(-self.n_examples // self.unit_size)

    @property
    def n_files(self) -> int:
        """Files of rows, factors, outputs and norms, and records."""
        rows = -(-self.n_columns // (self.piece_columns * self.pieces_per_file))
        return self.n_units * (rows + self.factor_files + 3)

    @property
    def bytes_rows(self) -> int:
        """Bytes of the rows, not compressed."""
        return self.n_examples * self.n_outputs * self.n_columns * self.itemsize

    @property
    def bytes_stored(self) -> int:
        """Bytes of rows and factors, not compressed."""
        return self.bytes_rows + self.n_examples * self.factor_bytes

    @property
    def unit_bytes(self) -> int:
        """Bytes of one unit's rows and factors in memory."""
        return self.unit_size * (self.n_outputs * self.n_columns * self.itemsize + self.factor_bytes)


def plan_store(
    *,
    n_examples: int,
    n_outputs: int,
    n_columns: int,
    itemsize: int,
    memory: int,
    unit_size: int | None = None,
    factor_bytes: int = 0,
    factor_files: int = 0,
) -> StorePlan:
    """Choose unit, piece and file sizes.

    A unit takes an eighth of the memory: two are alive while one is written and the next computed. A piece spans all
    rows of its unit and few enough columns that a slab of all N*K rows, one piece wide, is small.
    """
    example_bytes = n_outputs * n_columns * itemsize
    if unit_size is None:
        largest = max(1, min(memory // 8, UNIT_BYTES) // (example_bytes + factor_bytes))
        unit_size = _even(n_examples, min(largest, max(1, -(-n_examples // 8))))
    unit_size = min(unit_size, n_examples)
    n_columns_or_one = max(1, n_columns)
    by_slab = memory // (8 * n_examples * n_outputs * itemsize)
    by_piece = PIECE_BYTES // (unit_size * n_outputs * itemsize)
    columns = min(max(min(by_slab, by_piece), PIECE_COLUMNS[0]), PIECE_COLUMNS[1], n_columns_or_one)
    columns = _even(n_columns_or_one, columns)
    total = n_examples * example_bytes
    file_bytes = max(FILE_BYTES, total // (MAX_FILES // 2))
    pieces = max(1, -(-n_columns // columns))
    files = max(1, -(-unit_size * example_bytes // file_bytes))
    rounded = -(-files // IO_THREADS) * IO_THREADS
    if 1 < files < pieces and rounded * -(-n_examples // unit_size) <= MAX_FILES // 2:
        # A unit's files are written several at a time: a last one alone would leave the disk half idle.
        files = rounded
    per_file = -(-pieces // min(files, pieces))
    plan = StorePlan(
        n_examples=n_examples,
        n_outputs=n_outputs,
        n_columns=n_columns,
        itemsize=itemsize,
        unit_size=unit_size,
        piece_columns=columns,
        pieces_per_file=per_file,
        factor_bytes=factor_bytes,
        factor_files=factor_files,
    )
    if plan.n_files > 4 * MAX_FILES:
        raise Refused(
            f"units of {unit_size} examples would make {plan.n_files:,} files; at most {4 * MAX_FILES:,} are allowed: "
            "give a larger --unit-size (unit_size=)"
        )
    return plan


def _even(total: int, at_most: int) -> int:
    """The size that cuts `total` into as few parts as `at_most` does, as evenly as it can."""
    return -(-total // (-(-total // at_most)))


# ----------------------------------------------------------------------------------------------------------------- gram


@dataclass(frozen=True, kw_only=True)
class Side:
    """One side of the kernel: a store's examples, cut by its units and by the kernel's tiles."""

    n_examples: int
    unit_size: int
    piece_columns: int
    itemsize: int

    def tiles(self, tile: int) -> int:
        return -(-self.n_examples // tile)

    def examples(self, tile: int, first: int, last: int) -> tuple[int, int]:
        """Examples of tiles first to last - 1."""
        return min(first * tile, self.n_examples), min(last * tile, self.n_examples)

    def examples_read(self, start: int, stop: int) -> int:
        """Examples of the units that the range touches: a piece is read whole."""
        if start >= stop:
            return 0
        first = start // self.unit_size * self.unit_size
        last = min(-(-stop // self.unit_size) * self.unit_size, self.n_examples)
        return last - first

    def columns_read(self, start: int, stop: int, n_columns: int) -> int:
        """Columns of the pieces that the range touches."""
        first = start // self.piece_columns * self.piece_columns
        return min(-(-stop // self.piece_columns) * self.piece_columns, n_columns) - first


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

    mode: str
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

    @property
    def items(self) -> list[Item]:
        return [
            Item(number=g * len(self.splits) + s, group=g, split=s, columns=columns, steps=self.split_steps[s])
            for g in range(len(self.groups))
            for s, columns in enumerate(self.splits)
        ]

    def tiles_of(self, group: Group) -> list[tuple[int, int]]:
        """Tiles that a group computes: only `i <= j` of a symmetric kernel, only `i == j` for mode blocks."""
        return list(_tiles(group, self.symmetric, self.mode))

    @property
    def grid(self) -> tuple[int, int]:
        """Tiles along each side."""
        return self.rows.tiles(self.tile), self.cols.tiles(self.tile)

    @property
    def tiles_total(self) -> int:
        """Tiles computed; mirrors of a symmetric kernel are not counted."""
        return sum(len(self.tiles_of(group)) for group in self.groups)

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
        return block_shape(self.mode, b - a, d - c, self.n_outputs)

    def to_dict(self) -> dict[str, Any]:
        """As JSON."""
        return asdict(self)


def block_shape(mode: str, m: int, n: int, n_outputs: int) -> tuple[int, ...]:
    """Kernel entries between m and n examples."""
    shapes: dict[str, tuple[int, ...]] = {
        "full": (m * n_outputs, n * n_outputs),
        "trace": (m, n),
        "diagonal": (n_outputs, m, n),
        "blocks": (m, n_outputs, n_outputs),
    }
    return shapes[mode]


def _tiles(group: Group, symmetric: bool, mode: str) -> Iterator[tuple[int, int]]:
    (a, b), (c, d) = group.rows, group.cols
    for i in range(a, b):
        first = max(c, i) if symmetric or mode == "blocks" else c
        for j in range(first, min(d, i + 1) if mode == "blocks" else d):
            yield i, j


@dataclass(frozen=True, kw_only=True)
class _Sizes:
    """What the memory of a group depends on; all numbers are bytes or counts."""

    mode: str
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
        return 8 * math.prod(block_shape(self.mode, m, n, self.n_outputs))

    def ranges(self, group: Group) -> list[tuple[Side, int, int]]:
        """Example ranges that a group reads; a symmetric group's two ranges are merged where they touch."""
        a, b = self.rows.examples(self.tile, *group.rows)
        c, d = self.cols.examples(self.tile, *group.cols)
        return merge_ranges(self.rows, (a, b), self.cols, (c, d), self.symmetric)

    def fixed(self, group: Group) -> int:
        """Bytes that do not depend on the width of a slab."""
        accumulators = 0
        for j in range(*group.cols):
            # The rows of a column of tiles are one range: down to the diagonal, or on it, or all.
            first = j if self.mode == "blocks" else group.rows[0]
            last = min(group.rows[1], j + 1) if self.symmetric else group.rows[1]
            a, b = self.rows.examples(self.tile, first, max(first, last))
            c, d = self.cols.examples(self.tile, j, j + 1)
            accumulators += self.block_bytes(b - a, d - c)
        edge = min(self.tile, self.rows.n_examples), min(self.tile, self.cols.n_examples)
        # A tile that is finished by itself is written while the next one is computed.
        alive = 2 if self.resident else 1
        tiles = alive * (accumulators + self.tile_copies * self.block_bytes(*edge))
        return tiles + self.io_bytes + self.factors(group)

    def factors(self, group: Group) -> int:
        """Bytes of factors in memory, and of products of pairs of positions on every core."""
        if not self.steps:
            return 0
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
        slabs = 2 * self.slab_copies * EXPANDED_BYTES if any(step.expanded for step in self.steps) else 0
        pairs = max((step.positions * self.n_outputs) ** 2 for step in self.steps) * self.product_itemsize
        # Factors are held as they are read and once more in the order that products want.
        products = PRODUCT_COPIES * max(PRODUCT_BYTES, pairs)
        return 2 * examples * numbers * self.product_itemsize + products + slabs

    def per_column(self, group: Group) -> int:
        """Bytes that each column of a slab takes."""
        examples = sum(stop - start for _, start, stop in self.ranges(group))
        return examples * self.n_outputs * self.product_itemsize * self.slab_copies

    def examples_read(self, group: Group) -> int:
        return sum(side.examples_read(start, stop) for side, start, stop in self.ranges(group))


def merge_ranges(
    rows: Side, row_range: tuple[int, int], cols: Side, col_range: tuple[int, int], symmetric: bool
) -> list[tuple[Side, int, int]]:
    """Example ranges to read for a group: one where both sides are the same store and the ranges touch, else two."""
    (a, b), (c, d) = row_range, col_range
    if symmetric and max(a, c) <= min(b, d):
        return [(rows, min(a, c), max(b, d))]
    return [(rows, a, b), (cols, c, d)]


def plan_gram(
    *,
    mode: str,
    rows: Side,
    cols: Side | None,
    n_outputs: int,
    n_columns: int,
    product_itemsize: int,
    memory: int,
    workers: int = 1,
    tile: int | None = None,
    leaf_borders: Sequence[int] | None = None,
    engine_copies: tuple[int, int] = (2, 3),
    steps: tuple[Step, ...] = (),
    factor_bytes: tuple[int, int] = (0, 0),
) -> GramPlan:
    """Choose tiles, groups and slabs with the fewest bytes read that the memory allows.

    Parameters
    ----------
    cols
        The other store's side for a rectangular kernel; None for a symmetric one.
    memory
        Bytes for all workers together; each gets its share.
    leaf_borders
        First column of each leaf, for kernels kept leaf by leaf; splits then fall on these borders.
    engine_copies
        Copies of a slab and of a tile that the engine holds.
    steps
        Of factored leaves; `n_columns` then counts only what is stored as rows.
    factor_bytes
        Stored bytes of factors of an example, on both sides.

    Raises
    ------
    Refused
        If not even one tile and one slab fit, naming the memory that would do; or if there would be too many tiles.
    """
    symmetric = cols is None
    cols = cols or rows
    share = memory // workers
    piece = max(rows.piece_columns, cols.piece_columns)
    # Where nothing is stored as rows and all factors fit, each tile is finished by itself.
    resident = bool(steps) and not n_columns and workers == 1 and not any(step.expanded for step in steps)
    io_bytes = IO_THREADS * 3 * max(s.unit_size * s.piece_columns * s.itemsize for s in (rows, cols)) * n_outputs
    per_side = math.isqrt(MAX_FILES // len(leaf_borders or [0]))
    tiles = [tile] if tile else _tile_sizes(mode, rows, cols, n_outputs, per_side)
    variants = [(True, False)] * resident + [(False, True)] * any(s.patch_numbers for s in steps) + [(False, False)]
    best: GramPlan | None = None
    needed = 0
    for size in tiles:
        # Many small tiles cost files and slow products: they are weighed only while nothing fits.
        if best is not None and (best.passes <= 1 or max(rows.tiles(size), cols.tiles(size)) > 40):
            break
        for held, patches in variants:
            sizes = _Sizes(
                mode=mode,
                symmetric=symmetric,
                n_outputs=n_outputs,
                rows=rows,
                cols=cols,
                tile=min(size, max(rows.n_examples, cols.n_examples)),
                product_itemsize=product_itemsize,
                slab_copies=engine_copies[0],
                tile_copies=engine_copies[1],
                io_bytes=io_bytes,
                steps=steps,
                resident=held,
                patches_kept=patches,
            )
            fits = _fits(sizes, share, min(piece, n_columns))
            found = [
                _finish(sizes, groups, schedule, share, n_columns, piece, workers, leaf_borders, factor_bytes)
                for schedule, groups in _schedules(sizes, fits)
            ]
            if found:
                plan = min(found, key=lambda p: p.bytes_expected)
                # A smaller tile must save a tenth of the reading to be worth its slower products.
                if best is None or plan.bytes_expected < 0.9 * best.bytes_expected:
                    best = plan
            if best is not None and (best.resident or best.patches_kept):
                break
            # The worst group of one tile: off the diagonal, with rows on both sides.
            n, m = rows.tiles(sizes.tile), cols.tiles(sizes.tile)
            worst = [Group(rows=(0, 1), cols=(min(m, 2) - 1, min(m, 2))), Group(rows=(0, 1), cols=(0, 1))]
            if n > 2 and symmetric:
                worst.append(Group(rows=(0, 1), cols=(2, 3)))
            need = max(sizes.fixed(g) + sizes.per_column(g) * min(piece, n_columns) for g in worst)
            needed = min(needed, need) if needed else need
    if best is None:
        raise Refused(
            f"--memory: {share:,} bytes for each of {workers} worker(s) cannot hold one tile and one slab; give at "
            f"least {needed * workers:,} bytes (memory=), fewer --workers or a smaller --tile"
        )
    files = best.grid[0] * (1 if mode == "blocks" else best.grid[1]) * len(leaf_borders or [0])
    if files > MAX_FILES or len(best.items) > MAX_ITEMS:
        raise Refused(
            f"the kernel would be {files:,} tiles in {len(best.items):,} items; at most {MAX_FILES:,} and "
            f"{MAX_ITEMS:,} are allowed: give a larger --tile (tile=) or more --memory (memory=)"
        )
    return best


def _tile_sizes(mode: str, rows: Side, cols: Side, n_outputs: int, per_side: int) -> list[int]:
    """Tile edges in examples to try, largest first: about `TILE_ROWS` kernel rows, then less for short memory."""
    n = max(rows.n_examples, cols.n_examples)
    smallest = -(-n // per_side)
    edge = max(TILE_ROWS // (n_outputs if mode == "full" else 1), smallest, 1)
    sizes = []
    while True:
        sizes.append(_even(n, min(n, edge)))
        if edge == smallest:
            return list(dict.fromkeys(sizes))
        edge = max(edge // 2, smallest)


def _fits(sizes: _Sizes, share: int, width: int) -> Callable[[Group], bool]:
    def fits(group: Group) -> bool:
        return sizes.fixed(group) + sizes.per_column(group) * width <= share

    return fits


def _schedules(sizes: _Sizes, fits: Callable[[Group], bool]) -> Iterator[tuple[str, tuple[Group, ...]]]:
    """Ways to cut the kernel into groups that fit."""
    n, m = sizes.rows.tiles(sizes.tile), sizes.cols.tiles(sizes.tile)
    if sizes.resident:
        tiles = [Group(rows=(i, i + 1), cols=(j, j + 1)) for i in range(n) for j in range(m)]
        wanted = tuple(g for g in tiles if list(_tiles(g, sizes.symmetric, sizes.mode)))
        if all(fits(group) for group in wanted):
            yield "tile by tile, factors in memory", wanted
        return
    everything = Group(rows=(0, n), cols=(0, m))
    if fits(everything):
        yield "one pass", (everything,)
        return
    if sizes.mode == "blocks":
        groups = _along_diagonal(n, fits)
        if groups:
            yield "row ranges", groups
        return
    if sizes.symmetric:
        strips = _strips(n, fits)
        if strips:
            yield "strips", strips
    squares = _rectangles(sizes, n, m, fits)
    if squares:
        yield "squares", squares


def _along_diagonal(n: int, fits: Callable[[Group], bool]) -> tuple[Group, ...]:
    groups, start = [], 0
    while start < n:
        stop = n
        while stop > start and not fits(Group(rows=(start, stop), cols=(start, stop))):
            stop -= 1
        if stop == start:
            return ()
        groups.append(Group(rows=(start, stop), cols=(start, stop)))
        start = stop
    return tuple(groups)


def _strips(n: int, fits: Callable[[Group], bool]) -> tuple[Group, ...]:
    """Column strips from the right: each needs all rows above its end, and those are fewer and fewer.

    The transpose of the strips of formulas.md section 2, `a_{q+1} = sqrt(a_q^2 - 2 S)`, in whole tiles.
    """
    groups, end = [], n
    while end > 0:
        start = 0
        while start < end and not fits(Group(rows=(0, end), cols=(start, end))):
            start += 1
        if start == end:
            return ()
        groups.append(Group(rows=(0, end), cols=(start, end)))
        end = start
    return tuple(groups)


def _rectangles(sizes: _Sizes, n: int, m: int, fits: Callable[[Group], bool]) -> tuple[Group, ...]:
    """Blocks of r by s tiles, squares for a symmetric kernel, with the fewest bytes read."""
    best: tuple[int, tuple[Group, ...]] = (0, ())
    for r in range(n, 0, -1):
        s = r if sizes.symmetric else _widest(r, m, fits)
        if s == 0:
            continue
        groups = tuple(
            Group(rows=(i, min(i + r, n)), cols=(j, min(j + s, m)))
            for i in range(0, n, r)
            for j in range(0, m, s)
            if not sizes.symmetric or i <= j
        )
        if not all(fits(group) for group in groups):
            continue
        read = sum(sizes.examples_read(group) for group in groups)
        if not best[1] or read < best[0]:
            best = (read, groups)
        if sizes.symmetric:
            break
    return best[1]


def _widest(r: int, m: int, fits: Callable[[Group], bool]) -> int:
    """The most columns of tiles that fit beside r rows of tiles: wider blocks take more, so it is found by halving."""
    low, high = 0, m
    while low < high:
        middle = (low + high + 1) // 2
        if fits(Group(rows=(0, r), cols=(m - middle, m))):
            low = middle
        else:
            high = middle - 1
    return low


def _finish(
    sizes: _Sizes,
    groups: tuple[Group, ...],
    schedule: str,
    share: int,
    n_columns: int,
    piece_columns: int,
    workers: int,
    leaf_borders: Sequence[int] | None,
    factor_bytes: tuple[int, int],
) -> GramPlan:
    """Fill in slab width, splits over workers and the counts."""
    room = min((share - sizes.fixed(g)) // max(1, sizes.per_column(g)) for g in groups)
    pieces = max(1, min(room, SLAB_COLUMNS, max(1, n_columns) + piece_columns - 1) // piece_columns)
    width = pieces * piece_columns
    memory = max(sizes.fixed(g) + sizes.per_column(g) * min(width, n_columns) for g in groups)
    # Groups are independent; columns are split only as far as groups do not keep all workers busy.
    wanted = -(-workers // len(groups)) if workers > 1 else 1
    splits = _split_columns(n_columns, piece_columns, wanted, leaf_borders)
    if len(splits) < wanted and len(sizes.steps) > 1:
        # Splits without columns of their own take steps.
        splits += ((n_columns, n_columns),) * min(wanted - len(splits), len(sizes.steps) - (n_columns == 0))
    split_steps = _split_steps(sizes, splits)
    stored = [sizes.rows] if sizes.symmetric else [sizes.rows, sizes.cols]
    plan = GramPlan(
        mode=sizes.mode,
        symmetric=sizes.symmetric,
        n_outputs=sizes.n_outputs,
        n_columns=n_columns,
        rows=sizes.rows,
        cols=sizes.cols,
        tile=sizes.tile,
        groups=groups,
        splits=splits,
        slab_columns=width,
        piece_columns=piece_columns,
        schedule=schedule if len(splits) == 1 else f"{schedule}, columns in {len(splits)}",
        memory_bytes=memory * min(workers, len(groups) * len(splits)),
        bytes_expected=0,
        bytes_stored=sum(side.n_examples * side.itemsize for side in stored) * sizes.n_outputs * n_columns
        + sum(side.n_examples * size for side, size in zip(stored, factor_bytes, strict=False)),
        flops=0,
        steps=sizes.steps,
        split_steps=split_steps,
        resident=sizes.resident,
        patches_kept=sizes.patches_kept,
    )
    slabs = [slab for columns in splits for slab in plan.slabs(columns)]
    read = 0
    for side, start, stop in (r for g in groups for r in sizes.ranges(g)):
        columns = sum(side.columns_read(a, b, n_columns) for a, b in slabs)
        read += side.examples_read(start, stop) * side.itemsize * sizes.n_outputs * columns
    if sizes.resident:
        read = plan.bytes_stored
    elif sizes.steps:
        for g in groups:
            for side, start, stop in sizes.ranges(g):
                each = factor_bytes[0] if side is sizes.rows else factor_bytes[1]
                read += side.examples_read(start, stop) * each
    products = sum(math.prod(plan.tile_shape(i, j)) for g in groups for i, j in plan.tiles_of(g))
    depth = n_columns * (sizes.n_outputs if sizes.mode == "trace" else 1)
    pairs = sum(
        math.prod(block_shape("trace" if sizes.mode != "blocks" else "blocks", *shape, 1)[:2])
        for g in groups
        for i, j in plan.tiles_of(g)
        for shape in [_tile_examples(plan, i, j)]
    )
    examples = sum(stop - start for g in groups for _, start, stop in sizes.ranges(g))
    factored = sum(step.flops_pair * pairs + step.flops_example * examples for step in sizes.steps)
    return replace(plan, bytes_expected=read, flops=2 * products * depth + factored)


def _tile_examples(plan: GramPlan, i: int, j: int) -> tuple[int, int]:
    a, b = plan.rows.examples(plan.tile, i, i + 1)
    c, d = plan.cols.examples(plan.tile, j, j + 1)
    return b - a, d - c


def _split_steps(sizes: _Sizes, splits: tuple[tuple[int, int], ...]) -> tuple[tuple[int, ...], ...]:
    """Steps of each split: the costliest first, each to the split with the least to do."""
    pairs = sizes.rows.n_examples * sizes.cols.n_examples // (2 if sizes.symmetric else 1)
    outputs = sizes.n_outputs ** (2 if sizes.mode in ("full", "blocks") else 1)
    loads = [2 * (b - a) * pairs * outputs for a, b in splits]
    taken: list[list[int]] = [[] for _ in splits]
    costs = [s.flops_pair * pairs + s.flops_example * sizes.rows.n_examples for s in sizes.steps]
    for number in sorted(range(len(costs)), key=lambda n: -costs[n]):
        split = min(range(len(splits)), key=lambda s: loads[s])
        taken[split].append(number)
        loads[split] += costs[number]
    return tuple(tuple(sorted(numbers)) for numbers in taken)


def _split_columns(
    n_columns: int, piece: int, wanted: int, leaf_borders: Sequence[int] | None
) -> tuple[tuple[int, int], ...]:
    """About equal column ranges; their borders are borders of pieces, or of leaves where leaves are kept apart."""
    allowed = sorted({*leaf_borders, n_columns}) if leaf_borders else [*range(0, n_columns, piece), n_columns]
    borders = {0, n_columns}
    for part in range(1, wanted):
        target = part * n_columns / wanted
        after = bisect.bisect_left(allowed, target)
        borders.add(min(allowed[max(0, after - 1) : after + 1], key=lambda border: abs(border - target)))
    ordered = sorted(borders)
    return tuple(itertools.pairwise(ordered)) or ((0, 0),)
