"""Memory has one owner: every part of `--memory` has a name, and the parts of every plan add up to at most that."""

from __future__ import annotations

import ast
import re
from fractions import Fraction
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import jacstore
import jacstore.in_memory
import jacstore.rows.build
from jacstore.base import devices
from jacstore.base.budget import BUILD, JOBS, OPERATOR, TORCH_BUILD, Budget
from jacstore.errors import InvalidRequestError
from jacstore.kernels.gram import plan_for
from jacstore.rows.build import plan_build
from jacstore.rows.overlap import IN_FLIGHT, READ_AHEAD, Needs, plan_overlap
from jacstore.testing import cnn, mlp

PACKAGE = Path(jacstore.__file__).parent
MEMORY = st.integers(1, 2**45)
# Names of bytes that are given out.
GIVEN_OUT = re.compile(r"_?(device_|host_)?(memory|budget)|(default|available)_memory|device_budget")
# Expressions that are no share of a budget, and why.
ALLOWED = {
    "device_memory // each": "how many passes fit into the memory of a device",
    "devices * (device_memory // each)": "of as many devices",
}


def names_in(node: ast.AST) -> set[str]:
    """Names, attributes and functions whose value an operand is made of; what stands in brackets of a call is not."""
    if isinstance(node, ast.Call):
        smallest = isinstance(node.func, ast.Name) and node.func.id in ("min", "max")
        return set().union(*map(names_in, node.args)) if smallest else names_in(node.func)
    if isinstance(node, ast.Name):
        return {node.id}
    if isinstance(node, ast.Attribute):
        return {node.attr}
    if isinstance(node, ast.BinOp | ast.UnaryOp | ast.BoolOp | ast.IfExp | ast.Expr):
        return set().union(*map(names_in, ast.iter_child_nodes(node)))
    return set()


def shares_of_memory(source: str) -> list[str]:
    """Expressions that divide or multiply a memory by something."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.FloorDiv | ast.Div | ast.Mult | ast.RShift):
            operands = [node.left] if not isinstance(node.op, ast.Mult) else [node.left, node.right]
            if any(GIVEN_OUT.fullmatch(name) for operand in operands for name in names_in(operand)):
                found.append(ast.unparse(node))
    return found


def test_no_module_takes_a_share_of_memory_by_a_number_of_its_own() -> None:
    for wrong in ("self.memory // SHARE", "4 * memory", "available_memory() // 2", "(memory - 5) / 2", "budget >> 1"):
        assert shares_of_memory(wrong) == [wrong]
    assert shares_of_memory("min(given.memory, MOST) // 8") == ["min(given.memory, MOST) // 8"]
    assert shares_of_memory("8 * rows; total // Budget(memory).split(**BUILD)['rows']") == []
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        module = str(path.relative_to(PACKAGE))
        lines = [line for line in shares_of_memory(path.read_text(encoding="utf-8")) if line not in ALLOWED]
        if lines and module != "base/budget.py":
            found[module] = lines
    assert found == {}


@pytest.mark.parametrize("job", JOBS)
@given(memory=MEMORY)
@settings(max_examples=30, deadline=None)
def test_the_shares_of_every_job_add_up_to_at_most_the_memory(job: str, memory: int) -> None:
    budget = Budget(memory).split(**JOBS[job])
    assert sum(JOBS[job].values()) <= 1
    assert sum(budget.parts.values()) + budget.left == memory
    assert min(budget.parts.values()) >= 0 and budget.left >= 0
    # A share is rounded down by less than a byte.
    assert all(0 <= memory * share - budget[name] < 1 for name, share in JOBS[job].items())


@given(
    memory=MEMORY,
    parts=st.dictionaries(
        st.sampled_from("abcdef"),
        st.fractions(0, 1) | st.integers(-10, 2**45),
        max_size=6,
    ),
)
@settings(max_examples=200, deadline=None)
def test_a_budget_gives_out_at_most_its_total_and_no_part_below_zero(
    memory: int, parts: dict[str, Fraction | int]
) -> None:
    sizes = {name: int(memory * part) if isinstance(part, Fraction) else part for name, part in parts.items()}
    if sum(sizes.values()) > memory or min(sizes.values(), default=0) < 0:
        with pytest.raises(InvalidRequestError, match=r"--memory .* parts .*memory="):
            Budget(memory).split(**parts)
        return
    budget = Budget(memory).split(**parts)
    assert dict(budget.parts) == sizes and budget.left == memory - sum(sizes.values())
    assert budget.beside(more=budget.left) == 0 and budget.beside(more=budget.left + 1) == -1


def test_a_budget_does_not_change() -> None:
    budget = Budget(100).split(rows=Fraction(1, 3))
    with pytest.raises(AttributeError):
        budget.total = 5  # type: ignore[misc]
    with pytest.raises(TypeError):
        budget.parts["rows"] = 5  # type: ignore[index]
    assert budget.split(more=60)["more"] == 60 and budget.left == 67 and Budget(10).each(3) == 3
    assert {"unit_buffers", "device_pass"} <= BUILD.keys() & TORCH_BUILD.keys() and "slabs" in OPERATOR


# --- build ------------------------------------------------------------------------------------------------------------

SIZES = st.integers(0, 30) | st.integers(0, 10**9)


@st.composite
def needs_of_builds(draw: st.DrawFn) -> Needs:
    """A store on disk, or one in RAM that holds a little and will hold as much or more."""
    sizes = {name: draw(SIZES) for name in ("unit", "landed", "batch", "chunks", "checking")}
    held, more = draw(st.just((0, 0)) | st.tuples(st.integers(1, 30), SIZES))
    return Needs(**sizes, one_pass=draw(SIZES.map(lambda size: size + 1)), held=held, store=held + more)


@given(
    memory=st.integers(1, 400) | st.integers(1, 10**10),
    needs=needs_of_builds(),
    accelerator=st.none() | st.integers(1, 10**10),
)
@settings(max_examples=400, deadline=None)
def test_what_a_build_does_at_the_same_time_takes_at_most_the_memory(
    memory: int, needs: Needs, accelerator: int | None
) -> None:
    found = plan_overlap(memory, needs, accelerator)
    on_host = 2 * needs.landed if accelerator is not None else needs.one_pass
    least = needs.unit + needs.checking + needs.chunks + 2 * needs.batch + on_host + needs.held
    if found is None:
        assert least > memory or (accelerator is not None and accelerator < needs.one_pass)
        return
    parts = found.parts
    assert sum(parts.parts.values()) <= memory == parts.total and min(parts.parts.values()) >= 0
    assert parts["unit_buffers"] >= (found.waiting + 1) * needs.unit and parts["row_check"] == needs.checking
    assert parts["inputs"] == needs.chunks + (found.reads + 2) * needs.batch
    assert 0 <= found.waiting < 2 and 0 <= found.reads <= READ_AHEAD and found.waiting < found.depth <= IN_FLIGHT
    if accelerator is None:
        assert parts["device_pass"] == found.depth * needs.one_pass
    else:
        assert found.depth * needs.one_pass <= accelerator and parts["device_pass"] == 2 * needs.landed
    # A store that fits beside the least of everything else, copies of its files among it, stays in RAM.
    if needs.store > needs.held and least - needs.held + needs.store + needs.unit <= memory:
        assert found.store_limit >= needs.store


@pytest.mark.parametrize("out", ["memory://", "run.jac"])
@pytest.mark.parametrize("memory", [6_000, 60_000, 1_000_000, 10**9])
def test_the_parts_of_a_planned_build_add_up_to_at_most_the_memory(out: str, memory: int, tmp_path: Path) -> None:
    where = out if "://" in out else str(tmp_path / out)
    try:
        facts = plan_build(mlp(40), where, memory=memory, layout="dense")
    except InvalidRequestError as refusal:
        assert memory < 60_000 and "--memory" in str(refusal) and "device_pass" in str(refusal)
        return
    parts = facts.memory_parts
    assert sum(parts.values()) <= facts.memory == memory and min(parts.values()) >= 0
    assert {"unit_buffers", "device_pass", "row_check", "inputs"} <= parts.keys()
    assert ("store_in_ram" in parts) == (out == "memory://")


def test_a_store_in_ram_leaves_memory_for_the_units_and_the_pass_beside_it(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    real = jacstore.rows.build.plan_overlap

    def noted(*given: object) -> object:
        seen.append(real(*given))
        return seen[-1]

    monkeypatch.setattr("jacstore.rows.build.plan_overlap", noted)
    memory = 400_000
    store = jacstore.build(mlp(60), None, memory=memory, layout="dense", unit_size=10)
    (overlap,) = seen
    beside = sum(size for name, size in overlap.parts.parts.items() if name != "store_in_ram")
    assert store.files.in_memory and store.files.bytes_held <= store.files.limit <= memory - beside
    assert beside >= store.bytes_decoded // 3  # units and passes are no small matter


def test_a_store_that_does_not_fit_beside_a_pass_moves_to_a_folder() -> None:
    problem, options = mlp(60), {"layout": "dense", "unit_size": 1, "batch_size": 30}
    kept = jacstore.build(problem, None, memory="1GB", **options)
    # All rows alone fit, but not beside the pass and the units.
    store = jacstore.build(problem, None, memory=int(1.1 * kept.files.bytes_held), **options)
    assert kept.files.in_memory and not store.files.in_memory
    assert (store.array.compute() == kept.array.compute()).all()


def test_a_second_store_of_ntk_gets_what_the_first_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    given, real = [], jacstore.in_memory.build

    def noted(*args: object, memory: int, **options: object) -> jacstore.JacobianStore:
        built = real(*args, memory=memory, **options)
        given.append((memory, built.files.bytes_held))
        return built

    monkeypatch.setattr("jacstore.in_memory.build", noted)
    problem = mlp(12)
    jacstore.ntk(problem.apply, problem.params, problem.inputs, problem.inputs[:5], memory="80MB")
    assert given[0][0] == 80_000_000 and given[0][1] > 0 and given[1][0] == 80_000_000 - given[0][1]


# --- gram -------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def stores(tmp_path_factory: pytest.TempPathFactory) -> dict[str, jacstore.JacobianStore]:
    folder = tmp_path_factory.mktemp("stores")
    options = {"memory": "200MB", "codec": "none", "unit_size": 5}
    return {
        "rows": jacstore.build(mlp(30), folder / "rows.jac", layout="dense", **options),
        "factors": jacstore.build(cnn(20), folder / "factors.jac", layout="factored", **options),
        "ram": jacstore.build(mlp(30), None, layout="dense", memory="200MB", unit_size=5),
    }


@given(
    kind=st.sampled_from(["rows", "factors", "ram"]),
    memory=st.floats(4, 9).map(lambda x: int(10**x)),
    mode=st.sampled_from(["full", "trace", "diagonal", "blocks"]),
    workers=st.sampled_from([None, 1, 3]),
    part=st.sampled_from(["1/1", "2/3"]),
    in_ram=st.booleans(),
)
@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
def test_the_parts_of_a_planned_gram_add_up_to_at_most_the_memory(
    stores: dict[str, jacstore.JacobianStore],
    kind: str,
    memory: int,
    mode: str,
    workers: int | None,
    part: str,
    in_ram: bool,
) -> None:
    processes = workers is not None and not in_ram and kind != "ram"
    options = {"scheduler": "processes", "workers": workers} if processes else {}
    out = None if in_ram else str(PACKAGE / "never" / "made")
    try:
        facts = plan_for(stores[kind], None, out, memory=memory, mode=mode, part=part, tile=10, **options)
    except InvalidRequestError as refusal:
        assert "--memory" in str(refusal) and "(memory=)" in str(refusal)
        return
    parts = facts.memory_parts
    assert sum(parts.values()) <= memory and min(parts.values()) >= 0
    held = {name: parts.pop(name) for name in ("stores_in_ram", "kernel_in_ram") if name in parts}
    assert (held["stores_in_ram"] > 0) == (kind == "ram") and ("kernel_in_ram" in held) == in_ram
    assert {"accumulators", "tile_copies", "reading", "slabs"} <= parts.keys()
    if part == "1/1":
        assert sum(parts.values()) == facts.memory
    assert ("factors" in parts) == (kind == "factors")


def test_a_plan_is_not_continued_by_more_workers_than_the_memory_holds(
    stores: dict[str, jacstore.JacobianStore], tmp_path: Path
) -> None:
    out, options = str(tmp_path / "k"), {"tile": 2, "part": "1/2"}
    with pytest.raises(InvalidRequestError) as short:
        plan_for(stores["rows"], None, out, memory=1, **options)
    memory = int(re.search(r"at least ([\d,]+) bytes", str(short.value))[1].replace(",", ""))
    kernel = jacstore.gram(stores["rows"], None, out, memory=memory, **options)
    assert len(kernel.plan.items) > 3 and not kernel.complete
    more = {"scheduler": "processes", "workers": 3} | options
    for refused in (
        lambda: plan_for(stores["rows"], None, out, memory=memory, **more),
        lambda: jacstore.gram(stores["rows"], None, out, memory=memory, **more),
    ):
        with pytest.raises(InvalidRequestError, match=r"--memory .* begun with a plan .* fewer --workers"):
            refused()


# --- the device -------------------------------------------------------------------------------------------------------


class Accelerator:
    """A device with memory of its own; `limit` None for one that does not tell how much."""

    platform = "gpu"

    def __init__(self, limit: int | None) -> None:
        self.limit = limit

    def memory_stats(self) -> dict[str, int] | None:
        return None if self.limit is None else {"bytes_limit": self.limit}


def test_device_memory_means_bytes_of_the_accelerator_or_a_part_of_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    budget = Budget(1000).split(**BUILD)
    # A part of the memory cannot be larger than all of it.
    assert [devices.device_memory(given, budget) for given in (None, 300, 5000)] == [250, 300, 1000]
    monkeypatch.setattr(devices, "device", lambda: Accelerator(80_000))
    assert [devices.device_memory(given, budget) for given in (None, 300, 5000)] == [60_000, 300, 5000]
    monkeypatch.setattr(devices, "device", lambda: Accelerator(None))
    assert devices.device_memory(None, budget) == 1000


def test_products_on_an_accelerator_leave_their_columns_a_part_of_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("jacstore.base.devices.on_accelerator", lambda: True)
    monkeypatch.setattr("jacstore.base.devices.accelerator_memory", lambda: 10**12)
    jacobian = jacstore.jacobian_operator(mlp(6), memory="1GB")
    assert jacobian.matvec([0.0] * jacobian.shape[1]).shape == (18,)


@pytest.mark.parametrize("given", [{}, {"device_memory": "2kB"}])
def test_a_refused_pass_names_the_part_and_the_flag(given: dict[str, str]) -> None:
    with pytest.raises(InvalidRequestError) as refusal:
        jacstore.build(cnn(5), None, memory="8kB", layout="dense", **given)
    line = str(refusal.value)
    assert ("the part device_pass (1/4) of --memory has 2 kB" in line) == (not given)
    assert ("--device-memory has 2 kB" in line) == bool(given)
    assert "--device-memory (device_memory=)" in line and ("--memory (memory=)" in line) == (not given)
