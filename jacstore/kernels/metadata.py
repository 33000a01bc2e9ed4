"""The root attributes of a kernel as typed values, and checks that refuse those which contradict themselves."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field

from jacstore.base.limits import MAX_FILES, MAX_ITEMS, PRECISIONS
from jacstore.base.modes import Mode
from jacstore.base.schema import Open
from jacstore.kernels.plan.plan import GramPlan, Group
from jacstore.store.layout import Side
from jacstore.store.metadata import LARGEST_ARRAY, Numerics, _check_numerics, _need
from jacstore.terms.kinds import Leaf


@dataclass(frozen=True, kw_only=True)
class KernelRequest(Open):
    """What a kernel was asked to be, as far as reading it needs that."""

    mode: Mode
    dtype: str
    triangle: bool
    store: str
    other: str | None
    exact_diagonal: bool = False
    tile: int | None = None


@dataclass(frozen=True, kw_only=True)
class KernelChoices(Open):
    """What was resolved when a kernel was created."""

    plan: GramPlan
    engine: str
    precision: str
    leaves: tuple[str, ...]
    numerics: Numerics = field(default_factory=Numerics)


@dataclass(frozen=True, kw_only=True)
class KernelAttributes(Open):
    """The attributes of a kernel."""

    stores: tuple[str, ...]
    fingerprint: KernelRequest
    resolved: KernelChoices
    versions: dict[str, str]
    sealed: bool = False


def check_kernel(found: KernelAttributes) -> None:
    """Refuse attributes that contradict themselves.

    Raises
    ------
    DamagedDataError
        Saying what does not agree.
    """
    request, resolved = found.fingerprint, found.resolved
    plan, leaves = resolved.plan, resolved.leaves
    _need(request.dtype in ("float64", "float32"), f"dtype {request.dtype!r} must be float64 or float32")
    _need(request.mode == plan.mode, f"mode {request.mode.value!r} must be that of the plan")
    _need(resolved.engine in ("blas", "xla"), f"engine {resolved.engine!r} must be blas or xla")
    allowed = ", ".join(PRECISIONS)
    _need(resolved.precision in PRECISIONS, f"precision {resolved.precision!r} must be one of {allowed}")
    _check_numerics(resolved.numerics)
    _need(
        len(found.stores) == (1 if plan.symmetric else 2) or len(found.stores) == 1,
        "`stores` must list one or two paths",
    )
    _need(len(set(leaves)) == len(leaves), "every leaf must have a path of its own")
    _check_sides(plan, max(1, len(leaves)))
    _check_groups(plan)
    _check_splits(plan)


def _check_sides(plan: GramPlan, n_leaves: int) -> None:
    sides = (plan.rows, plan.cols)
    _need(
        all(min(s.n_examples, s.unit_size, s.piece_columns, s.itemsize) >= 1 for s in sides), "sides must hold examples"
    )
    _need(plan.rows == plan.cols or not plan.symmetric, "both sides of a symmetric kernel must be the same")
    _need(plan.symmetric or not plan.mode.within_examples, f"mode {plan.mode} must be symmetric")
    _need(min(plan.n_outputs, plan.tile, plan.slab_columns, plan.bytes_stored) >= 1, "sizes must be at least 1")
    files = plan.tiles_stored * n_leaves
    _need(files <= MAX_FILES, f"{files:,} tiles must be at most {MAX_FILES:,}")
    entries = plan.rows.n_examples * plan.cols.n_examples * plan.n_outputs**2
    _need(entries * 8 <= LARGEST_ARRAY, "the kernel must be small enough to be addressed")


def _check_groups(plan: GramPlan) -> None:
    """Every tile is in one group, once."""
    across, down = plan.grid
    _need(len(plan.groups) * len(plan.splits) <= MAX_ITEMS, f"items must be at most {MAX_ITEMS:,}")
    inside = all(_within(group.rows, across) and _within(group.cols, down) for group in plan.groups)
    _need(inside, "groups must be ranges of tiles")
    wanted = _tile_count(plan, Group(rows=(0, across), cols=(0, down)))
    counts = [_tile_count(plan, group) for group in plan.groups]
    _need(min(counts, default=0) >= 1 and sum(counts) == wanted, "groups must hold every tile once")
    tiles = {tile for group in plan.groups for tile in plan.tiles_of(group)}
    _need(len(tiles) == wanted, "groups must hold every tile once")


def _tile_count(plan: GramPlan, group: Group) -> int:
    """How many tiles a group computes, without listing them."""
    (a, b), (c, d) = group.rows, group.cols
    if plan.mode.within_examples:
        return max(0, min(b, d) - max(a, c))
    if not plan.symmetric:
        return (b - a) * (d - c)
    # Columns that cross the diagonal inside the group hold one tile more each; those right of it hold all rows.
    low, high = max(a, c), max(a, c, min(b, d))
    crossing = (high - low) * (low + 1 + high - 2 * a) // 2
    return crossing + max(0, d - max(b, c)) * (b - a)


def _within(span: tuple[int, int], count: int) -> bool:
    return 0 <= span[0] < span[1] <= count


def _check_splits(plan: GramPlan) -> None:
    """Every column and every step is in one split, once."""
    _need(bool(plan.splits) and len(plan.split_steps) == len(plan.splits), "splits must have columns and steps")
    ordered = all(a <= b == c for (a, b), (c, _) in itertools.pairwise(plan.splits))
    first, last = plan.splits[0], plan.splits[-1]
    _need(
        ordered and first[0] == 0 and last[0] <= last[1] == plan.n_columns,
        "splits must hold every column once",
    )
    steps = sorted(number for numbers in plan.split_steps for number in numbers)
    _need(steps == list(range(len(plan.steps))), "splits must hold every step once")
    _need(plan.piece_columns >= 1 or not plan.n_columns, "pieces must have columns")
    for step in plan.steps:
        _need(bool(step.leaves) and set(step.expanded) <= set(step.leaves), "steps must hold leaves")


def check_plan_for(
    plan: GramPlan, rows: Side, cols: Side | None, n_outputs: int, leaves: Sequence[Leaf], n_columns: int
) -> None:
    """Refuse the plan of a kernel whose stores are others than those that are given.

    Parameters
    ----------
    n_columns
        Columns that the store holds as rows.

    Raises
    ------
    DamagedDataError
        Saying what does not agree.
    """
    sides = (rows, cols or rows, cols is None)
    _need((plan.rows, plan.cols, plan.symmetric) == sides, "the plan must have the examples and units of the stores")
    _need(plan.n_outputs == n_outputs, "the plan must have the outputs of the stores")
    stepped = sorted(number for step in plan.steps for number in step.leaves)
    factored = [number for number, leaf in enumerate(leaves) if leaf.size and not leaf.dense]
    # Where the two stores hold leaves by other terms, all are multiplied as rows.
    as_rows = stepped == [] and plan.n_columns == sum(leaf.size for leaf in leaves)
    alike = stepped == factored and plan.n_columns == n_columns
    _need(alike or as_rows, "the plan must take every column of the stores once")
