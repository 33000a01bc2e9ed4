"""Claims about `Mode`: it knows where each product of two rows stands, and no other module asks which mode it is."""

from __future__ import annotations

import ast
import copy
import json
import pickle
from itertools import product
from pathlib import Path

import numpy as np
import pytest

import jacstore
from jacstore.base.modes import Mode
from jacstore.base.schema import typed
from jacstore.errors import DamagedDataError

PACKAGE = Path(jacstore.__file__).parent
N, M, K = 3, 4, 2


def is_mode(node: ast.expr) -> bool:
    """Whether an expression is called mode, such as `plan.mode` or `kernel_mode`, or is a member of Mode."""
    name = node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""
    return name.endswith("mode") or (isinstance(node, ast.Attribute) and ast.unparse(node.value) == "Mode")


def names_in(node: ast.AST) -> set[str]:
    """The modes that an expression names, by a string or by a member of Mode."""
    members = {f"Mode.{mode.name}": mode.value for mode in Mode}
    parts = [part for part in ast.walk(node) if isinstance(part, ast.Constant | ast.Attribute)]
    found = {part.value if isinstance(part, ast.Constant) else members.get(ast.unparse(part)) for part in parts}
    return found & set(Mode)


def branches(source: str) -> list[int]:
    """Lines that compare a mode with a name, or look something up by the names of modes."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Compare):
            operands = [node.left, *node.comparators]
            by_name = any(map(is_mode, operands)) and any(names_in(one) for one in operands)
        elif isinstance(node, ast.Match):
            by_name = is_mode(node.subject)
        else:
            by_name = isinstance(node, ast.Dict) and len(set().union(*(names_in(key) for key in node.keys if key))) > 1
        found += [node.lineno] if by_name else []
    return found


def test_nothing_outside_its_module_branches_on_the_name_of_a_mode() -> None:
    found = {
        str(path.relative_to(PACKAGE)): branches(path.read_text(encoding="utf-8")) for path in PACKAGE.rglob("*.py")
    }
    assert found.pop("base/modes.py")
    assert {path: lines for path, lines in found.items() if lines} == {}


@pytest.mark.parametrize(
    "source",
    [
        'plan.mode == "blocks"',
        'x if "full" != kernel.mode else y',
        'mode in ("full", "trace")',
        '{"full": 1, "trace": 2}[m]',
        "match self.mode:\n    case _: pass",
        "gram.mode is Mode.FULL",
        "{Mode.FULL: 1, Mode.TRACE: 2}",
    ],
)
def test_a_branch_on_the_name_of_a_mode_is_noticed(source: str) -> None:
    assert branches(source) == [1]


@pytest.mark.parametrize(
    "source", ['"CLIP" in mode', "cross.mode != of.mode", '{"mode": mode.value}', 'gram(mode="full")']
)
def test_what_is_no_branch_on_the_name_of_a_mode_is_left_alone(source: str) -> None:
    assert branches(source) == []


def products(mode: Mode) -> np.ndarray:
    """The product of every two rows `(N, K, M, K)`; between the examples of one store for blocks."""
    draw = np.random.default_rng(0)
    rows = draw.normal(size=(N, K, 5))
    return np.einsum("nkp,mop->nkmo", rows, rows if mode.within_examples else draw.normal(size=(M, K, 5)))


def tile_of(mode: Mode, whole: np.ndarray) -> np.ndarray:
    """A tile filled entry by entry."""
    tile = np.zeros(mode.shape(*whole.shape[::2], K))
    for n, k, m, o in np.ndindex(*whole.shape):
        if (mode.crosses_outputs or k == o) and (not mode.within_examples or n == m):
            tile[mode.entry(n, k, m, o, K)] += whole[n, k, m, o]
    return tile


@pytest.mark.parametrize("mode", Mode)
def test_a_mode_holds_each_of_its_products_once_and_its_equation_gives_them_in_their_places(mode: Mode) -> None:
    whole = products(mode)
    n, m = whole.shape[::2]
    draw = np.random.default_rng(0)
    rows = draw.normal(size=(N, K, 5))
    other = rows if mode.within_examples else draw.normal(size=(M, K, 5))
    tile = tile_of(mode, whole)
    np.testing.assert_allclose(np.einsum(mode.equation, rows, other).reshape(tile.shape), tile, rtol=1e-13)
    added = mode.example_pairs(n, m) * mode.output_pairs(K)
    assert added == tile.size * mode.products_per_entry(K)
    assert len(mode.dimensions) == tile.ndim == len(mode.chunk(0, 0)) and mode.is_matrix == (tile.ndim == 2)
    lengths = [tile.shape[axis] for axis in mode.example_axes]
    assert lengths == [n * mode.rows_per_example(K), m * mode.rows_per_example(K)]
    assert mode.holds_every_product == (tile.size == whole.size)


@pytest.mark.parametrize("mode", Mode)
def test_the_view_of_some_examples_is_their_tile(mode: Mode) -> None:
    whole = products(mode)
    tile = tile_of(mode, whole)
    i, j = slice(1, 3), slice(1, 3) if mode.within_examples else slice(0, 3)
    view = mode.view(tile, i, j, K)
    np.testing.assert_array_equal(view.reshape(-1), tile_of(mode, whole[i, :, j]).reshape(-1))
    assert np.shares_memory(view, tile)


@pytest.mark.parametrize("mode", Mode)
def test_the_diagonal_is_that_of_the_last_two_axes_and_says_whose_row_it_is(mode: Mode) -> None:
    rows = np.random.default_rng(0).normal(size=(N, K, 5))
    tile = tile_of(mode, np.einsum("nkp,mop->nkmo", rows, rows))
    squares = np.square(rows).sum(-1)
    diagonal = np.diagonal(tile, axis1=-2, axis2=-1)
    np.testing.assert_allclose(diagonal, mode.on_diagonal(squares), rtol=1e-13)
    for at in np.ndindex(*diagonal.shape):
        n, outputs = mode.row_on_diagonal(at, K)
        assert diagonal[at] == pytest.approx(squares[n, outputs].sum())
    assert mode.over_outputs(squares).shape == (N, mode.outputs_kept(K))


@pytest.mark.parametrize("mode", Mode)
def test_stored_tiles_have_chunks_of_their_own(mode: Mode) -> None:
    stored = [(i, j) for i, j in product(range(3), range(4)) if i == j or not mode.within_examples]
    assert len({mode.chunk(i, j) for i, j in stored}) == len(stored) == mode.tiles_stored(3, 4)


@pytest.mark.parametrize("mode", Mode)
def test_a_mode_is_one_value_in_every_process_and_its_word_in_json(mode: Mode) -> None:
    assert pickle.loads(pickle.dumps(mode)) is copy.deepcopy(mode) is typed(Mode, json.loads(json.dumps(mode))) is mode


@pytest.mark.parametrize("value", ["half", "FULL", "", None, 1, ["full"], {"full": 1}])
def test_another_word_is_no_mode(value: object) -> None:
    with pytest.raises(DamagedDataError, match=r"plan\.mode is .*; it has to be one of full, trace, diagonal, blocks"):
        typed(Mode, value, "plan.mode")
