"""Every unit is compared with plain gradients before it is stored, whatever the terms say."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jacstore
from jacstore import Problem
from jacstore.base.budget import BUILD
from jacstore.cli import text
from jacstore.errors import InvalidFunctionError
from jacstore.rows.row_check import RowCheck
from jacstore.terms import Dot
from jacstore.testing import cnn, mlp


@pytest.fixture(autouse=True)
def _small_leaves_count(limits):
    limits(smallest_factored=0)


def spoil(monkeypatch, change):
    """Let the finder give wrong terms for the leaf `layer0/w`."""
    import jacstore.rows.trace.cut as trace

    right = trace._cut

    def wrong(*given):
        cut = right(*given)
        leaves = tuple(
            replace(leaf, terms=tuple(change(t) for t in leaf.terms)) if leaf.path == "layer0/w" else leaf
            for leaf in cut.leaves
        )
        return replace(cut, leaves=leaves)

    monkeypatch.setattr(trace, "_cut", wrong)


@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16"])
@pytest.mark.parametrize(
    "change",
    [
        lambda term: replace(term, scale=-term.scale),
        lambda term: replace(term, scale=1.5 * term.scale),
        lambda term: replace(term, views=(("reshape", (7, 5)), ("transpose", (1, 0)))),
    ],
    ids=["sign", "scale", "order"],
)
def test_a_wrong_term_ends_the_build_with_the_leafs_name_and_nothing_is_stored(change, dtype, monkeypatch, tmp_path):
    spoil(monkeypatch, lambda term: change(term) if isinstance(term, Dot) else term)
    with pytest.raises(InvalidFunctionError, match=r"'layer0/w' is not the gradient .*layout='dense'"):
        jacstore.build(mlp(8, outputs="sum"), tmp_path / "run.jac", dtype=dtype, layout="factored", unit_size=4)
    assert not list((tmp_path / "run.jac" / "ledger").glob("unit*"))


@pytest.mark.parametrize("layout", ["auto", "dense", "factored"])
@pytest.mark.parametrize("network", [mlp, cnn])
def test_every_unit_is_compared(network, layout, monkeypatch):
    seen = []
    compare = RowCheck.compare
    monkeypatch.setattr(RowCheck, "compare", lambda self, n, *more: (seen.append(n), compare(self, n, *more)))
    jacstore.build(network(9), None, layout=layout, unit_size=2, dtype="float64")
    assert {n // 2 for n in seen} == set(range(5))


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "float64"])
def test_what_is_right_passes_in_every_type_and_for_every_example(dtype, limits):
    limits(check_share=1e9)
    for problem in (mlp(20), cnn(20), cnn(20, outputs="sum")):
        jacstore.build(problem, None, dtype=dtype, unit_size=10)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_rows_of_which_only_rounding_is_left_are_no_fault(dtype, limits):
    limits(check_share=1e9)
    rng = np.random.default_rng(3)
    params = {"g": rng.normal(size=5)}

    def odd(p, x):
        y = jnp.tanh(jnp.tanh(x * p["g"] + 0.1 * x))
        return jnp.stack([y.sum(), (y * jnp.arange(5) / 5).sum(), (y**3).sum()])

    problem = Problem(
        apply=lambda p, x: jax.vmap(odd, (None, 0))(p, jnp.stack([x, -x])).sum(0),
        params={name: value.astype(dtype) for name, value in params.items()},
        inputs=rng.normal(size=(12, 5)).astype(dtype),
    )
    store = jacstore.build(problem, None, dtype=dtype, unit_size=4)
    assert np.linalg.norm(store.array.compute()) < (1e-4 if dtype == "float32" else 1e-13)


def test_a_wrong_row_is_not_taken_for_rounding_where_other_leaves_cancel(monkeypatch):
    spoil(monkeypatch, lambda term: replace(term, scale=1.2 * term.scale) if isinstance(term, Dot) else term)
    problem = mlp(8, outputs="sum")
    used, params = problem.apply, {**problem.params, "odd": np.ones(4, np.float32)}

    def apply(p, x):
        rest = {k: v for k, v in p.items() if k != "odd"}
        return used(rest, x) + (jnp.tanh(p["odd"] * 0.3).sum() - jnp.tanh(p["odd"] * 0.3).sum())

    with pytest.raises(InvalidFunctionError, match="'layer0/w' is not the gradient"):
        jacstore.build(replace(problem, apply=apply, params=params), None, layout="factored", unit_size=4)


def test_examples_that_are_not_finite_are_left_to_the_build():
    problem = mlp(3)
    problem.inputs[1] = np.nan
    store = jacstore.build(problem, None, unit_size=1, allow_nonfinite=True)
    assert store.nonfinite_examples == [1]


def test_gradients_that_do_not_fit_are_left_out(monkeypatch):
    monkeypatch.setitem(BUILD, "row_check", Fraction(0))
    store = jacstore.build(mlp(4), None)
    assert store.complete


def test_leaves_that_are_zero_for_every_example_are_named(tmp_path):
    problem = mlp(6)
    params = {**problem.params, "mean": np.ones(4, np.float32)}
    used = problem.apply
    problem = replace(problem, apply=lambda p, x: used({k: v for k, v in p.items() if k != "mean"}, x), params=params)
    store = jacstore.build(problem, tmp_path / "run.jac", unit_size=2)
    assert store.report["zero_leaves"] == jacstore.open(tmp_path / "run.jac").info()["zero_leaves"] == ["mean"]
    assert "zero for every example: mean;" in text.build(store.built)
    assert jacstore.build(mlp(6), None).info()["zero_leaves"] == []
