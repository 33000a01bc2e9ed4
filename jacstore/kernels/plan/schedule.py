"""Choose the plan of a kernel that reads the fewest bytes within a memory, or say why none fits.

Groups of tiles are one pass, strips, squares, rectangles or ranges along the diagonal, as large as the memory allows;
columns and steps are split over workers.
"""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from jacstore.base.budget import Budget
from jacstore.base.limits import IO_THREADS, LIMITS, MAX_FILES, MAX_ITEMS
from jacstore.base.modes import Mode
from jacstore.errors import InvalidRequestError
from jacstore.kernels.plan.memory import Footprint
from jacstore.kernels.plan.plan import GramPlan, Group, Step, tiles_within
from jacstore.store.layout import Side, even

TILE_ROWS = 2048


def plan_gram(
    *,
    mode: Mode,
    rows: Side,
    cols: Side | None,
    n_outputs: int,
    n_columns: int,
    product_itemsize: int,
    memory: int,
    workers: int = 1,
    machines: int = 1,
    tile: int | None = None,
    leaf_borders: Sequence[int] | None = None,
    engine_copies: tuple[int, int] = (2, 3),
    steps: tuple[Step, ...] = (),
    factor_bytes: tuple[int, int] = (0, 0),
    at_once: int = IO_THREADS,
) -> GramPlan:
    """Choose tiles, groups and slabs with the fewest bytes read that the memory allows.

    Parameters
    ----------
    cols
        The other store's side for a rectangular kernel; None for a symmetric one.
    memory
        Bytes for all workers of a machine together; each gets its share.
    workers, machines
        Workers on a machine, and machines that each compute a part of the items.
    leaf_borders
        First column of each leaf, for kernels kept leaf by leaf; splits then fall on these borders.
    engine_copies
        Copies of a slab and of a tile that the engine holds.
    steps
        Of factored leaves; `n_columns` then counts only what is stored as rows.
    factor_bytes
        Stored bytes of factors of an example, on both sides.
    at_once
        Files that are read at the same time.

    Raises
    ------
    InvalidRequestError
        If not even one tile and one slab fit, naming the memory that would do; or if there would be too many tiles.
    """
    symmetric = cols is None
    cols = cols or rows
    share, sharing = Budget(memory).each(workers), workers * machines
    piece = max(rows.piece_columns, cols.piece_columns)
    # Where nothing is stored as rows and all factors fit, each tile is finished by itself.
    resident = bool(steps) and not n_columns and sharing == 1 and not any(step.expanded for step in steps)
    io_bytes = _io_bytes(rows, cols, n_outputs, at_once)
    per_side = math.isqrt(MAX_FILES // len(leaf_borders or [0]))
    tiles = [tile] if tile else _tile_sizes(mode, rows, cols, n_outputs, per_side)
    # Patches are cut anew for the columns of each slab, once in all: memory for whole ones is in older plans alone.
    best: GramPlan | None = None
    needed = 0
    for size in tiles:
        # Many small tiles cost files and slow products: they are weighed only while nothing fits.
        if best is not None and (best.passes <= 1 or max(rows.tiles(size), cols.tiles(size)) > 40):
            break
        for held in [True] * resident + [False]:
            sizes = Footprint(
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
                patches_kept=False,
            )
            fits = _fits(sizes, share, min(piece, n_columns))
            found = [
                _finish(
                    sizes, groups, schedule, share, n_columns, piece, workers * machines, leaf_borders, factor_bytes
                )
                for schedule, groups in _schedules(sizes, fits)
            ]
            if found:
                plan = min(found, key=lambda p: p.bytes_expected)
                # A smaller tile must save a tenth of the reading to be worth its slower products.
                if best is None or plan.bytes_expected < 0.9 * best.bytes_expected:
                    best = plan
            if best is not None and best.resident:
                break
            # The worst group of one tile: off the diagonal, with rows on both sides.
            n, m = rows.tiles(sizes.tile), cols.tiles(sizes.tile)
            worst = [Group(rows=(0, 1), cols=(min(m, 2) - 1, min(m, 2))), Group(rows=(0, 1), cols=(0, 1))]
            if n > 2 and symmetric:
                worst.append(Group(rows=(0, 1), cols=(2, 3)))
            need = max(sizes.fixed(g) + sizes.per_column(g) * min(piece, n_columns) for g in worst)
            needed = min(needed, need) if needed else need
    if best is None:
        raise InvalidRequestError(
            f"--memory: {share:,} bytes for each of {workers} worker(s) cannot hold one tile and one slab; give at "
            f"least {needed * workers:,} bytes (memory=), fewer --workers or a smaller --tile"
        )
    files = best.tiles_stored * len(leaf_borders or [0])
    if files > MAX_FILES or best.n_items > MAX_ITEMS:
        raise InvalidRequestError(
            f"the kernel would be {files:,} tiles in {best.n_items:,} items; at most {MAX_FILES:,} and "
            f"{MAX_ITEMS:,} are allowed: give a larger --tile (tile=) or more --memory (memory=)"
        )
    return best


def worker_parts(
    plan: GramPlan, product_itemsize: int, engine_copies: tuple[int, int], at_once: int = IO_THREADS
) -> dict[str, int]:
    """Bytes that a worker holds for the largest group of a plan, by name."""
    sizes = Footprint(
        mode=plan.mode,
        symmetric=plan.symmetric,
        n_outputs=plan.n_outputs,
        rows=plan.rows,
        cols=plan.cols,
        tile=plan.tile,
        product_itemsize=product_itemsize,
        slab_copies=engine_copies[0],
        tile_copies=engine_copies[1],
        io_bytes=_io_bytes(plan.rows, plan.cols, plan.n_outputs, at_once),
        steps=plan.steps,
        resident=plan.resident,
        patches_kept=plan.patches_kept,
    )
    width = min(plan.slab_columns, plan.n_columns)
    return max((sizes.parts(group, width) for group in plan.groups), key=lambda parts: sum(parts.values()))


def _io_bytes(rows: Side, cols: Side, n_outputs: int, at_once: int) -> int:
    """Bytes of the pieces that are read at once: encoded, decoded and on their way into a slab."""
    return at_once * 3 * max(s.unit_size * s.piece_columns * s.itemsize for s in (rows, cols)) * n_outputs


def _tile_sizes(mode: Mode, rows: Side, cols: Side, n_outputs: int, per_side: int) -> list[int]:
    """Tile edges in examples to try, largest first: about `TILE_ROWS` kernel rows, then less for short memory."""
    n = max(rows.n_examples, cols.n_examples)
    smallest = -(-n // per_side)
    edge = max(TILE_ROWS // mode.rows_per_example(n_outputs), smallest, 1)
    sizes = []
    while True:
        sizes.append(even(n, min(n, edge)))
        if edge == smallest:
            return list(dict.fromkeys(sizes))
        edge = max(edge // 2, smallest)


def _fits(sizes: Footprint, share: int, width: int) -> Callable[[Group], bool]:
    def fits(group: Group) -> bool:
        return sizes.fixed(group) + sizes.per_column(group) * width <= share

    return fits


def _schedules(sizes: Footprint, fits: Callable[[Group], bool]) -> Iterator[tuple[str, tuple[Group, ...]]]:
    """Ways to cut the kernel into groups that fit."""
    n, m = sizes.rows.tiles(sizes.tile), sizes.cols.tiles(sizes.tile)
    if sizes.resident:
        tiles = [Group(rows=(i, i + 1), cols=(j, j + 1)) for i in range(n) for j in range(m)]
        wanted = tuple(g for g in tiles if list(tiles_within(g, sizes.symmetric, sizes.mode)))
        if all(fits(group) for group in wanted):
            yield "tile by tile, factors in memory", wanted
        return
    everything = Group(rows=(0, n), cols=(0, m))
    if fits(everything):
        yield "one pass", (everything,)
        return
    if sizes.mode.within_examples:
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


def _rectangles(sizes: Footprint, n: int, m: int, fits: Callable[[Group], bool]) -> tuple[Group, ...]:
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
    sizes: Footprint,
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
    pieces = max(1, min(room, LIMITS.slab_columns, max(1, n_columns) + piece_columns - 1) // piece_columns)
    width = pieces * piece_columns
    of_worker = max(sum(sizes.parts(g, min(width, n_columns)).values()) for g in groups)
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
        memory_bytes=of_worker * min(workers, len(groups) * len(splits)),
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
    depth = n_columns * sizes.mode.products_per_entry(sizes.n_outputs)
    pairs = sum(sizes.mode.example_pairs(*_tile_examples(plan, i, j)) for g in groups for i, j in plan.tiles_of(g))
    examples = sum(stop - start for g in groups for _, start, stop in sizes.ranges(g))
    factored = sum(step.flops_pair * pairs + step.flops_example * examples for step in sizes.steps)
    return replace(plan, bytes_expected=read, flops=2 * products * depth + factored)


def _tile_examples(plan: GramPlan, i: int, j: int) -> tuple[int, int]:
    a, b = plan.rows.examples(plan.tile, i, i + 1)
    c, d = plan.cols.examples(plan.tile, j, j + 1)
    return b - a, d - c


def _split_steps(sizes: Footprint, splits: tuple[tuple[int, int], ...]) -> tuple[tuple[int, ...], ...]:
    """Steps of each split: the costliest first, each to the split with the least to do."""
    pairs = sizes.rows.n_examples * sizes.cols.n_examples // (2 if sizes.symmetric else 1)
    outputs = sizes.mode.output_pairs(sizes.n_outputs)
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
