"""Claims about plans: everything is computed once, memory holds, bytes are counted right, refusals can be followed."""

from __future__ import annotations

import json
import math
import re
import time
from collections import Counter
from functools import cache
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import HealthCheck, assume, example, given, settings
from hypothesis import strategies as st

from jacstore import Problem, build
from jacstore.base import limits
from jacstore.base.modes import Mode
from jacstore.base.schema import typed
from jacstore.errors import InvalidRequestError
from jacstore.kernels.plan.plan import GramPlan, Group, Step
from jacstore.kernels.plan.rates import ELEMENTWISE, Rates, measured_rates
from jacstore.kernels.plan.schedule import plan_gram
from jacstore.kernels.plan.steps import plan_steps
from jacstore.store import layout
from jacstore.store.layout import Side, StorePlan, plan_store
from jacstore.terms import Dot, Leaf, Operand

GIB = 2**30
quick = settings(max_examples=50, deadline=None, database=None, suppress_health_check=list(HealthCheck))


def log_integers(low, high):
    """Integers of every order of magnitude."""
    return st.floats(math.log(low), math.log(high)).map(lambda x: min(max(round(math.exp(x)), low), high))


# --- stores -----------------------------------------------------------------------------------------------------------

STORES = st.fixed_dictionaries(
    {
        "n_examples": log_integers(1, 1_000_000),
        "n_outputs": log_integers(1, 1000),
        "n_columns": log_integers(1, 10_000_000),
        "itemsize": st.sampled_from([2, 4, 8]),
        "memory": log_integers(1, 10**12),
    }
)


def covers(total, size):
    """Say whether cuts of `size` cover `total`, the last one not empty and none smaller than evenness asks for."""
    parts = -(-total // size)
    return (parts - 1) * size < total <= parts * size


@given(sizes=STORES, unit_size=st.none() | log_integers(1, 2_000_000))
@quick
def test_units_pieces_and_files_cover_the_array_exactly(sizes, unit_size):
    try:
        plan = plan_store(**sizes, unit_size=unit_size)
    except InvalidRequestError as refusal:
        assert "--unit-size" in str(refusal) and "files" in str(refusal)
        return
    assert covers(plan.n_examples, plan.unit_size)
    assert plan.n_units == -(-plan.n_examples // plan.unit_size)
    assert covers(plan.n_columns, plan.piece_columns)
    assert 1 <= plan.pieces_per_file <= -(-plan.n_columns // plan.piece_columns)
    files = math.ceil(math.ceil(plan.n_columns / plan.piece_columns) / plan.pieces_per_file)
    assert plan.n_files == plan.n_units * (files + 3)
    assert plan.n_files <= 4 * limits.MAX_FILES
    assert plan.bytes_rows == math.prod(sizes[k] for k in ("n_examples", "n_outputs", "n_columns", "itemsize"))
    if unit_size is not None:
        assert plan.unit_size == min(unit_size, plan.n_examples)


@given(sizes=STORES)
@quick
def test_a_chosen_unit_takes_an_eighth_of_the_memory_and_a_chosen_piece_no_more(sizes):
    try:
        plan = plan_store(**sizes)
    except InvalidRequestError:
        return
    example = plan.n_outputs * plan.n_columns * plan.itemsize
    assert plan.unit_bytes <= max(sizes["memory"] // 8, example)
    slab = plan.n_examples * plan.n_outputs * plan.itemsize * plan.piece_columns
    piece = plan.unit_size * plan.n_outputs * plan.itemsize * plan.piece_columns
    narrowest = plan.piece_columns <= limits.LIMITS.piece_columns[0]
    assert narrowest or (slab <= sizes["memory"] // 8 and piece <= layout.PIECE_BYTES)


@given(sizes=STORES)
@example(sizes={"n_examples": 8103, "n_outputs": 1, "n_columns": 8_886_111, "itemsize": 8, "memory": 1})
@quick
def test_a_store_has_at_most_twenty_thousand_files_unless_its_units_are_tiny(sizes):
    try:
        plan = plan_store(**sizes)
    except InvalidRequestError:
        return
    assert plan.n_files <= limits.MAX_FILES + 4 * plan.n_units


def test_too_many_files_are_refused_and_the_advice_helps():
    sizes = {"n_examples": 100_000, "n_outputs": 1, "n_columns": 1000, "itemsize": 4, "memory": 10**9}
    with pytest.raises(
        InvalidRequestError, match=r"400,000 files; at most 80,000 .* larger --unit-size \(unit_size=\)"
    ):
        plan_store(**sizes, unit_size=1)
    assert plan_store(**sizes, unit_size=100).n_files <= 80_000


# --- kernels: a model of its own --------------------------------------------------------------------------------------


@st.composite
def sides(draw):
    return Side(
        n_examples=draw(log_integers(1, 40)),
        unit_size=draw(st.integers(1, 20)),
        piece_columns=draw(st.integers(1, 16)),
        itemsize=draw(st.sampled_from([2, 4, 8])),
    )


@st.composite
def requests(draw, **fixed):
    rows = draw(sides())
    mode = draw(st.sampled_from(Mode))
    n_columns = draw(log_integers(1, 80))
    borders = draw(st.none() | st.sets(st.integers(1, n_columns), max_size=4))
    return {
        "mode": mode,
        "rows": rows,
        "cols": None if mode == "blocks" else draw(st.none() | sides()),
        "n_outputs": draw(st.integers(1, 4)),
        "n_columns": n_columns,
        "product_itemsize": draw(st.sampled_from([2, 4, 8])),
        "memory": draw(log_integers(1000, 10**6)),
        "workers": draw(st.integers(1, 4)),
        "tile": draw(st.none() | st.integers(1, 50)),
        "leaf_borders": None if borders is None else sorted({0, *(b for b in borders if b < n_columns)}),
    } | fixed


def planned(request):
    """The plan, with as much memory as it takes."""
    memory = request["memory"]
    while True:
        try:
            return plan_gram(**request | {"memory": memory}), memory
        except InvalidRequestError as refusal:
            assume("tiles in" not in str(refusal))
            memory = 2 * memory


def named_memory(refusal):
    """Bytes that a refusal asks for."""
    return int(re.search(r"give at least ([\d,]+) bytes \(memory=\)", str(refusal))[1].replace(",", ""))


def ranges_of(plan, group):
    """(side, first, last) of the examples that a group reads: one range where both sides overlap or touch."""
    a, b = (min(t * plan.tile, plan.rows.n_examples) for t in group.rows)
    c, d = (min(t * plan.tile, plan.cols.n_examples) for t in group.cols)
    if plan.symmetric and (set(range(a, b + 1)) & set(range(c, d + 1))):
        return [(plan.rows, min(a, c), max(b, d))]
    return [(plan.rows, a, b), (plan.cols, c, d)]


def bytes_touched(plan, groups):
    """Count the bytes of every piece that every slab of every group touches, one example and one column at a time."""
    slabs = [slab for columns in plan.splits for slab in plan.slabs(columns)]
    total = 0
    for side, a, b in (part for group in groups for part in ranges_of(plan, group)):
        examples = touched(side.n_examples, side.unit_size, a, b)
        columns = sum(touched(plan.n_columns, side.piece_columns, first, last) for first, last in slabs)
        total += examples * columns * plan.n_outputs * side.itemsize
    return total


@cache
def touched(total, size, first, last):
    """How many of `total` lie in parts of `size` that the range touches."""
    parts = {n // size for n in range(first, last)}
    return sum(n // size in parts for n in range(total))


def bytes_held(plan, group, width, request, copies=(2, 3)):
    """Bytes of a group's accumulators, scratch tiles, slabs and buffers of reading threads."""
    held = sum(8 * math.prod(plan.tile_shape(i, j)) for i, j in plan.tiles_of(group))
    edge = (min(plan.tile, side.n_examples) for side in (plan.rows, plan.cols))
    held += copies[1] * 8 * math.prod(plan.mode.shape(*edge, plan.n_outputs))
    examples = sum(b - a for _, a, b in ranges_of(plan, group))
    held += copies[0] * examples * plan.n_outputs * width * request["product_itemsize"]
    piece = max(side.unit_size * side.piece_columns * side.itemsize for side in (plan.rows, plan.cols))
    return held + limits.IO_THREADS * 3 * piece * plan.n_outputs


# --- kernels: properties ----------------------------------------------------------------------------------------------


@given(request=requests())
@quick
def test_every_tile_is_computed_once_and_mirrors_never(request):
    plan, _ = planned(request)
    across, down = plan.grid
    wanted = {
        (i, j)
        for i in range(across)
        for j in range(down)
        if (i == j if plan.mode == "blocks" else i <= j or not plan.symmetric)
    }
    computed = Counter(tile for group in plan.groups for tile in plan.tiles_of(group))
    assert set(computed) == wanted
    assert set(computed.values()) == {1}
    assert plan.tiles_total == len(wanted)
    assert covers(plan.rows.n_examples, min(plan.tile, plan.rows.n_examples))


@given(request=requests())
@quick
def test_every_column_is_in_one_slab_of_each_group_and_one_item_a_split(request):
    plan, _ = planned(request)
    assert [item.number for item in plan.items] == list(range(len(plan.groups) * len(plan.splits)))
    for group in range(len(plan.groups)):
        columns = [item.columns for item in plan.items if item.group == group]
        slabs = [slab for split in columns for slab in plan.slabs(split)]
        assert slabs[0][0] == 0 and slabs[-1][1] == plan.n_columns
        assert all(a < b for a, b in slabs)
        assert all(left[1] == right[0] for left, right in pairwise(slabs))
        assert max(b - a for a, b in slabs) <= plan.slab_columns
    # Inside a split a slab ends where a piece ends, so that no piece is read twice.
    inner = [b for split in plan.splits for _, b in plan.slabs(split)[:-1]]
    assert all(b % plan.piece_columns == 0 for b in inner)


@given(request=requests())
@quick
def test_a_leaf_that_is_kept_apart_is_summed_by_one_item(request):
    assume(request["leaf_borders"])
    plan, _ = planned(request)
    borders = {border for split in plan.splits for border in split}
    assert borders <= {*request["leaf_borders"], plan.n_columns}


@given(request=requests())
@quick
def test_the_plan_stays_within_the_memory(request):
    plan, memory = planned(request)
    assert plan.memory_bytes <= memory
    width = min(plan.slab_columns, plan.n_columns)
    running = min(request["workers"], len(plan.items))
    largest = max(bytes_held(plan, group, width, request) for group in plan.groups)
    assert plan.memory_bytes == largest * running


@given(request=requests())
@quick
def test_expected_bytes_are_those_of_the_pieces_touched(request):
    plan, _ = planned(request)
    assert plan.bytes_expected == bytes_touched(plan, plan.groups)
    stores = [plan.rows] if plan.symmetric else [plan.rows, plan.cols]
    stored = sum(side.n_examples * side.itemsize for side in stores) * plan.n_outputs * plan.n_columns
    assert plan.bytes_stored == stored
    assert plan.passes == plan.bytes_expected / stored
    if plan.schedule == "one pass" and plan.rows.piece_columns == plan.cols.piece_columns:
        assert plan.passes == 1


@given(request=requests())
@quick
def test_flops_are_two_for_each_kernel_entry_and_column(request):
    plan, _ = planned(request)
    entries = sum(math.prod(plan.tile_shape(i, j)) for group in plan.groups for i, j in plan.tiles_of(group))
    outputs = plan.n_outputs if plan.mode == "trace" else 1
    assert plan.flops == 2 * entries * plan.n_columns * outputs


@given(request=requests())
@quick
def test_a_plan_survives_json(request):
    plan, _ = planned(request)
    assert typed(GramPlan, json.loads(json.dumps(plan.to_dict()))) == plan


@given(request=requests(memory=1))
@quick
def test_a_refusal_names_a_memory_that_suffices(request):
    with pytest.raises(InvalidRequestError, match="--memory") as caught:
        plan_gram(**request)
    memory = named_memory(caught.value)
    assert plan_gram(**request | {"memory": memory}).memory_bytes <= memory


def greedy_strips(plan, fits):
    """Column strips from the right, as wide as fits."""
    groups, end = [], plan.grid[0]
    while end:
        start = next((s for s in range(end) if fits(Group(rows=(0, end), cols=(s, end)))), None)
        if start is None:
            return None
        groups.append(Group(rows=(0, end), cols=(start, end)))
        end = start
    return groups


def largest_squares(plan, fits):
    """The largest squares of which all fit."""
    n = plan.grid[0]
    for r in range(n, 0, -1):
        groups = [
            Group(rows=(i, min(i + r, n)), cols=(j, min(j + r, n))) for i in range(0, n, r) for j in range(i, n, r)
        ]
        if all(fits(group) for group in groups):
            return groups
    return None


TEN_PERCENT_FEWER = {
    "mode": Mode.FULL,
    "rows": Side(n_examples=20, unit_size=1, piece_columns=1, itemsize=2),
    "cols": None,
    "n_outputs": 1,
    "n_columns": 1,
    "product_itemsize": 2,
    "memory": 1097,
    "workers": 1,
    "leaf_borders": None,
}


@given(request=requests(cols=None, workers=1, leaf_borders=None), tile=st.integers(1, 8))
@example(request=TEN_PERCENT_FEWER, tile=3)
@quick
def test_of_strips_and_squares_the_plan_takes_the_fewer_bytes(request, tile):
    assume(request["mode"] != "blocks")
    plan, memory = planned(request | {"tile": tile})
    width = min(plan.piece_columns, plan.n_columns)
    ways = [
        groups
        for groups in (
            way(plan, lambda g: bytes_held(plan, g, width, request) <= memory)
            for way in (greedy_strips, largest_squares)
        )
        if groups
    ]
    # Both ways read slabs of whole pieces, so bytes do not depend on how wide a slab is.
    assert plan.bytes_expected == min(bytes_touched(plan, groups) for groups in ways)


# --- kernels: known sizes ---------------------------------------------------------------------------------------------


def big(n_examples, memory, **changes):
    side = Side(n_examples=n_examples, unit_size=512, piece_columns=512, itemsize=4)
    request = {
        "mode": Mode.FULL,
        "rows": side,
        "cols": None,
        "n_outputs": 1,
        "n_columns": 2_400_000,
        "product_itemsize": 4,
    }
    return plan_gram(**request | {"memory": memory} | changes)


def strips_of_the_formula(rows, elements):
    """formulas.md section 2: `a_{q+1} = sqrt(a_q^2 - 2 S)`, passes `sum a_q / R`."""
    ends = [float(rows)]
    while ends[-1] ** 2 > 2 * elements:
        ends.append(math.sqrt(ends[-1] ** 2 - 2 * elements))
    return sum(ends) / rows


@pytest.mark.parametrize(
    ("rows", "gib", "schedule"),
    [
        (30_000, 16, "one pass"),
        (100_000, 16, "strips"),
        (100_000, 139, "one pass"),
        (300_000, 64, "squares"),
        (300_000, 139, "strips"),
        (300_000, 16, "squares"),
    ],
)
def test_passes_are_those_of_the_formula(rows, gib, schedule):
    plan = big(rows, gib * GIB)
    # Accumulators are float64 here.
    elements = gib * GIB / 8
    expected = strips_of_the_formula(rows, elements)
    if schedule == "squares":
        expected = min(expected, math.ceil(rows / math.sqrt(elements)))
    bound = max(1.0, rows / math.sqrt(2 * elements))
    print(f"{rows} rows, {gib} GiB: bound {bound:.2f}, formula {expected:.2f}, plan {plan.passes:.2f} {plan.schedule}")
    assert plan.schedule == schedule
    assert bound <= plan.passes
    # Whole tiles, two slabs and the units at the borders of groups cost a little.
    assert plan.passes <= 1.1 * expected


@pytest.mark.parametrize(
    ("outputs", "other"),
    [
        (1, None),
        (10, None),
        (1, 300_000),
        (10, 300_000),
    ],
)
@pytest.mark.parametrize("gib", [16, 64])
def test_a_plan_for_a_kernel_of_300000_rows_takes_under_two_seconds(gib, outputs, other):
    cols = None if other is None else Side(n_examples=other // outputs, unit_size=512, piece_columns=512, itemsize=4)
    started = time.process_time()
    plan = big(300_000 // outputs, gib * GIB, cols=cols, n_outputs=outputs)
    assert time.process_time() - started < 2
    assert len(plan.items) <= limits.MAX_ITEMS
    assert math.prod(plan.grid) <= limits.MAX_FILES


def test_too_many_tiles_are_refused_and_the_advice_helps():
    side = Side(n_examples=150, unit_size=10, piece_columns=8, itemsize=4)
    request = {"mode": Mode.FULL, "rows": side, "cols": None, "n_outputs": 1, "n_columns": 20, "product_itemsize": 4}
    with pytest.raises(InvalidRequestError, match=r"22,500 tiles .* at most 20,000 .*--tile \(tile=\)"):
        plan_gram(**request, memory=10**9, tile=1)
    assert plan_gram(**request, memory=10**9, tile=2).tiles_total == 75 * 76 // 2


@pytest.mark.parametrize("leaves", [1, 8, 100])
def test_tiles_that_nobody_asked_for_never_make_too_many_files(leaves):
    plan = big(300_000, 64 * GIB, leaf_borders=[2_400_000 * n // leaves for n in range(leaves)])
    assert math.prod(plan.grid) * leaves <= limits.MAX_FILES


def test_by_leaf_every_tile_counts_once_for_each_leaf():
    side = Side(n_examples=100, unit_size=10, piece_columns=8, itemsize=4)
    request = {"mode": Mode.FULL, "rows": side, "cols": None, "n_outputs": 1, "n_columns": 20, "product_itemsize": 4}
    with pytest.raises(InvalidRequestError, match="30,000 tiles"):
        plan_gram(**request, memory=10**9, tile=1, leaf_borders=[0, 5, 11])


def test_more_workers_split_columns_before_they_read_anything_twice():
    one, four = (big(30_000, 64 * GIB, workers=w) for w in (1, 4))
    assert one.passes == four.passes == 1
    assert [len(p.groups) for p in (one, four)] == [1, 1]
    assert [len(p.items) for p in (one, four)] == [1, 4]


def test_a_store_plan_is_frozen_and_keyword_only():
    with pytest.raises(TypeError):
        StorePlan(1, 2, 3, 4, 5, 6, 7)


def test_operations_of_a_dense_layer_are_those_of_one_product_of_inputs_and_one_of_cotangents():
    store = build(Problem(apply=apply_layer, params=LAYER, inputs=np.ones((6, 5), np.float32)), None, layout="factored")
    steps = plan_steps(store.leaves, store.operands, store.n_outputs, store.n_examples, Mode.FULL)
    # Not twice, although the bias has a leaf of its own.
    assert sum(step.flops_pair for step in steps) == 2 * 5 + 2 * 3 * 3 * 3 + ELEMENTWISE * 3 * 3


LAYER = {"bias": np.ones(3, np.float32), "weight": np.ones((5, 3), np.float32)}


def apply_layer(params, x):
    return x @ params["weight"] + params["bias"]


def test_rates_decide_how_leaves_are_contracted_and_not_how_operations_are_counted():
    shapes = {"x": (1, 4, 5), "d": (1, 4, 6)}
    operands = [
        Operand(name=name, role=role, shape=shapes[name]) for name, role in (("x", "inputs"), ("d", "cotangents"))
    ]
    term = Dot(inputs="x", cotangents="d", scale=1.0, views=())
    leaf = Leaf(path="w", shape=(5, 6), dtype="float32", offset=0, terms=(term,))
    implicit, expanded = 2 * 16 * (5 + 6) + 16 * ELEMENTWISE, 2 * 30
    for rates, chosen, flops in (
        (Rates(), (0,), expanded),
        (Rates(elementwise=1, expanding=64), (), implicit),
        (Rates(elementwise=10**6, expanding=64), (0,), expanded),
    ):
        (step,) = plan_steps([leaf], operands, 1, 50, Mode.FULL, rates)
        assert (step.expanded, step.flops_pair) == (chosen, flops)


def test_rates_are_measured_once_and_are_powers_of_four():
    found = measured_rates()
    assert found is measured_rates()
    assert all(4 ** round(math.log(rate, 4)) == rate for rate in found.to_dict().values())


def test_no_memory_is_kept_for_patches_so_that_a_kernel_reads_no_more_for_them():
    side = Side(n_examples=4096, unit_size=256, piece_columns=1, itemsize=4)
    step = Step(
        leaves=(0,),
        expanded=(0,),
        numbers=1000,
        channel_columns=1000,
        patch_numbers=20_000,
        positions=1,
        flops_pair=1,
        flops_example=1,
    )
    plan = plan_gram(
        mode=Mode.FULL,
        rows=side,
        cols=None,
        n_outputs=1,
        n_columns=0,
        product_itemsize=4,
        memory=2**30,
        tile=256,
        steps=(step,),
        factor_bytes=(4000, 4000),
    )
    assert plan.passes == 1 and not plan.patches_kept
