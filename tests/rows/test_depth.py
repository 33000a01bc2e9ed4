"""What a build traces, walks and compiles grows with the depth of a network as its own program does, and no faster."""

from __future__ import annotations

from collections import Counter
from contextlib import contextmanager

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jacstore
from jacstore.problem import probes, twofold
from jacstore.problem.fingerprint import backward
from jacstore.problem.problem import prepare
from jacstore.rows import device_pass, row_check
from jacstore.rows.trace.backward import Backward
from jacstore.rows.trace.cut import cut_before_products
from jacstore.rows.trace.find_terms import Finder
from jacstore.store import unit_form

WIDTH, EXAMPLES = 32, 4


def residual(depth, apply=None):
    """A problem of so many residual blocks, their weights of 1,024 entries each."""
    draw = np.random.default_rng(0)

    def block():
        made = {name: draw.standard_normal((WIDTH, WIDTH)).astype(np.float32) / WIDTH for name in ("v", "w")}
        return {**made, "b": np.zeros(WIDTH, np.float32)}

    def network(params, x):
        for layer in params:
            x = x + jnp.tanh(x @ layer["v"] + layer["b"]) @ layer["w"]
        return x[:3]

    inputs = draw.standard_normal((EXAMPLES, WIDTH)).astype(np.float32)
    return jacstore.Problem(apply=apply or network, params=[block() for _ in range(depth)], inputs=inputs)


@contextmanager
def compilations():
    """The programs that XLA compiles inside."""
    seen = []
    jax.monitoring.register_event_duration_secs_listener(
        lambda name, *_, **__: seen.append(name) if "backend_compile" in name else None
    )
    try:
        yield seen
    finally:
        jax.monitoring.clear_event_listeners()


@pytest.mark.parametrize("layout", ["auto", "dense"])
def test_a_build_traces_the_function_six_times_and_compiles_as_many_programs_for_any_depth(layout):
    # What JAX compiles once per process, such as conversions, is compiled before anything is counted.
    jacstore.build(residual(3), None, layout=layout, unit_size=EXAMPLES)
    programs = {}
    for depth in (2, 9):
        problem, calls = residual(depth), []

        def counted(params, x, apply=problem.apply, calls=calls):
            calls.append(0)
            return apply(params, x)

        with compilations() as seen:
            jacstore.build(residual(depth, counted), None, layout=layout, unit_size=EXAMPLES)
        # Its shapes, two calls for the probe, its fingerprint, the cut, the check of rows.
        assert len(calls) == 6
        programs[depth] = len(seen)
    # The probe, the check of rows, the device pass; norms of factors.
    assert programs[2] == programs[9] <= 4


def test_norms_of_leaves_that_are_made_alike_are_traced_once(monkeypatch):
    traced = Counter()
    real = device_pass.squared_norms

    def counted(leaf, *given):
        traced[leaf] += 1
        return real(leaf, *given)

    monkeypatch.setattr(device_pass, "squared_norms", counted)
    # Sizes that no other test has, so that JAX has kept none of them.
    jacstore.build(residual(7), None, unit_size=EXAMPLES, output_batch=2)
    assert set(traced.values()) == {1} and len(traced) <= 3


def test_the_finder_and_the_cut_take_steps_in_proportion_to_the_equations(monkeypatch):
    taken = Counter()
    for step in (Finder._follow, Finder._rooted, Finder._product):

        def counted(self, *given, step=step, **named):
            taken[step] += 1
            return step(self, *given, **named)

        monkeypatch.setattr(Finder, step.__name__, counted)
    seen = []
    for depth in (4, 8, 16):
        taken.clear()
        cut = cut_before_products(prepare(residual(depth)), "auto", False)
        seen.append((sum(taken.values()), len(cut._flat.closed.jaxpr.eqns)))
    (a, e), (b, f), (c, g) = seen
    assert c - b <= 2 * (b - a) and g - f == 2 * (f - e)
    assert c < 3 * g


def test_the_look_at_rounding_takes_each_factor_as_often_at_any_depth(monkeypatch):
    """Once it took the absolute values of all factors for each leaf: a second for a unit of 200 blocks."""
    taken = Counter()

    class Counted(dict):
        def __getitem__(self, name):
            taken[name] += 1
            return super().__getitem__(name)

        def items(self):
            taken.update(list(self))
            return super().items()

    real = unit_form.observed_rounding
    monkeypatch.setattr(
        unit_form,
        "observed_rounding",
        lambda leaves, rows, operands, *rest: real(leaves, rows, Counted(operands), *rest),
    )
    most = {}
    for depth in (2, 9):
        taken.clear()
        jacstore.build(residual(depth), None, unit_size=EXAMPLES)
        most[depth] = max(taken.values())
    assert most[2] == most[9] < 40


def test_the_cut_does_not_trace_for_shapes_that_are_known():
    calls = []

    def function(selected, rest, example):
        calls.append(0)
        return selected[0] @ example

    outputs = jax.ShapeDtypeStruct((3,), np.float32)
    Backward(backward(function, [np.ones((3, 2), np.float32)], [], np.ones(2, np.float32), outputs), 1)
    assert len(calls) == 1


def products_with_vectors(lowered):
    """How many products of a matrix with one vector are in a program."""
    shapes = [line.split(" : (")[1].split(")")[0] for line in lowered.as_text().splitlines() if "dot_general" in line]
    return sum(any(part.count("x") < 2 for part in shape.split(", ")) for shape in shapes)


def test_checks_of_dense_layers_hold_no_product_with_a_single_vector(monkeypatch):
    compiled = []

    def kept(lowered):
        compiled.append(lowered)
        return twofold.compiled_quickly(lowered)

    monkeypatch.setattr(probes, "compiled_quickly", kept)
    monkeypatch.setattr(row_check, "compiled_quickly", kept)
    jacstore.build(residual(3), None, unit_size=EXAMPLES)
    assert [products_with_vectors(lowered) for lowered in compiled] == [0, 0]


def branch(params, x):
    return jax.lax.cond(x[0] > 0, lambda w: w @ x, lambda w: -(w @ x), params["w"])


def look_up(params, x):
    like = jax.ShapeDtypeStruct((2,), np.float32)
    return params["w"] @ jax.pure_callback(lambda x: x, like, x, vmap_method="sequential")


def without_products(params, x):
    return jnp.sum(params["w"] * x, -1)


@pytest.mark.parametrize("apply", [branch, look_up, without_products])
def test_what_a_batch_computes_otherwise_is_checked_one_example_at_a_time(apply):
    inputs = np.ones((3, 2), np.float32)
    problem = jacstore.Problem(apply=apply, params={"w": np.ones((3, 2), np.float32)}, inputs=inputs)
    assert not prepare(problem).two_at_once
    assert jacstore.build(problem, None).report["complete"]


def test_a_function_that_cannot_be_computed_for_two_examples_is_checked_for_one(monkeypatch):
    def refuses(function):
        def of_two(*given):
            raise NotImplementedError("no rule for a batch")

        return of_two

    monkeypatch.setattr(probes, "of_two", refuses)
    monkeypatch.setattr(row_check, "of_two", refuses)
    problem = residual(2)
    assert prepare(problem).two_at_once
    assert jacstore.build(problem, None, unit_size=EXAMPLES).report["complete"]


def test_a_program_compiled_quickly_computes_the_same():
    draw = np.random.default_rng(0)
    weights, signals = draw.standard_normal((6, 9)), draw.standard_normal((2, 6, 10))

    def spectrum(w, rest, x):
        return jnp.fft.irfft(jnp.fft.rfft(x).T @ w, axis=-1)

    with jax.enable_x64(True):
        given = (weights, (), signals)
        found = np.asarray(twofold.compiled_quickly(jax.jit(twofold.of_two(spectrum)).lower(*given))(*given))
    wanted = [np.fft.irfft(np.fft.rfft(x).T @ weights, axis=-1) for x in signals]
    assert np.linalg.norm(found - np.stack(wanted)) <= 1e-12 * np.linalg.norm(wanted)
