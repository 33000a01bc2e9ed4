"""A second build of an equal function compiles nothing and traces it once; anything else is compiled, never guessed."""

from __future__ import annotations

import gc
import weakref
from contextlib import contextmanager, suppress

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jacstore
from helpers_errors import refusal
from jacstore.errors import InvalidFunctionError
from jacstore.problem import program

N, WIDTH, K = 6, 40, 3
draw = np.random.default_rng(0)
X = draw.standard_normal((N, WIDTH)).astype(np.float32)


def params(seed=0):
    fresh = np.random.default_rng(seed)
    return {
        "v": fresh.standard_normal((WIDTH, WIDTH)).astype(np.float32) / WIDTH,
        "w": fresh.standard_normal((WIDTH, K)).astype(np.float32),
    }


def network(p, x):
    return jnp.tanh(x @ p["v"]) @ p["w"]


@contextmanager
def compilations():
    """The programs that XLA compiles inside."""
    seen = []
    jax.monitoring.register_event_duration_secs_listener(
        lambda name, *_, fun_name="", **__: seen.append(fun_name) if "backend_compile" in name else None
    )
    try:
        yield seen
    finally:
        jax.monitoring.clear_event_listeners()


def true_rows(apply, p, x, dtype=np.float32):
    """Rows `(N, K, P)` in float64 by `jax.jacrev`."""
    with jax.enable_x64(True):
        wide = jax.tree_util.tree_map(lambda leaf: jnp.asarray(leaf, jnp.float64), p)
        found = [jax.jacrev(apply)(wide, jnp.asarray(one, jnp.float64)) for one in x]
        parts = [np.concatenate([np.asarray(leaf).reshape(K, -1) for leaf in each.values()], -1) for each in found]
        return np.stack(parts)


def rows_of(apply, p, x=X, **options):
    problem = jacstore.Problem(apply=apply, params=p, inputs=x, batched=options.pop("batched", False))
    return jacstore.build(problem, None, unit_size=N, **options)


def built(apply, p, x=X, **options):
    return np.asarray(rows_of(apply, p, x, **options).array.compute(scheduler="synchronous")).reshape(N, K, -1)


def assert_rows(found, wanted, limit=1e-5):
    assert np.linalg.norm(found - wanted) <= limit * np.linalg.norm(wanted)


@pytest.mark.parametrize(
    "options",
    [{}, {"layout": "dense"}, {"dtype": "float64"}, {"dtype": "bfloat16"}, {"output_batch": 2}, {"batched": True}],
    ids=str,
)
def test_a_second_build_traces_the_function_once_and_compiles_nothing(options):
    calls = []

    def counted(p, x):
        calls.append(0)
        return network(p, x)

    built(counted, params(), **options)
    calls.clear()
    other = np.random.default_rng(5).standard_normal(X.shape).astype(np.float32)
    with compilations() as seen:
        found = built(counted, params(1), other, **options)
    assert (len(calls), seen) == (1, [])
    assert_rows(found, true_rows(network, params(1), other), 2e-2 if options.get("dtype") == "bfloat16" else 1e-5)


def test_a_function_that_is_defined_anew_for_each_build_is_compiled_once():
    for seed in range(3):
        with compilations() as seen:
            found = built(lambda p, x, shift=0.5: network(p, x) + shift, params(seed))
        assert_rows(found, true_rows(network, params(seed), X))
        assert bool(seen) == (seed == 0)


def test_kernels_of_checkpoints_compile_once_and_are_those_of_their_parameters():
    with compilations() as seen:
        jacstore.ntk(network, params(), X)
        first = len(seen)
        for seed in (1, 2, 3):
            rows = true_rows(network, params(seed), X).reshape(N * K, -1)
            assert_rows(jacstore.ntk(network, params(seed), X), rows @ rows.T)
    assert len(seen) == first


def test_of_other_shapes_types_or_options_another_program_is_compiled():
    built(network, params())
    for changed in ({"x": X.astype(np.float16)}, {"dtype": "float64"}, {"layout": "dense"}, {"batch_size": 3}):
        with compilations() as seen:
            found = built(network, params(1), **changed)
        assert seen
        assert_rows(found, true_rows(network, params(1), changed.get("x", X)), 1e-4)


class Scaled:
    """One function object whose number, array, table of arrays or branch is changed between builds."""

    def __init__(self):
        self.number, self.array, self.held, self.squared = 2.0, np.full(K, 3, np.float32), {"b": jnp.ones(K)}, False
        self.inner = jax.jit(lambda y: y * self.array)

    def __call__(self, p, x):
        y = network(p, x) * self.number * self.array * self.held["b"]
        return y * y if self.squared else y


def change_number(f):
    f.number = 5.0


def change_in_place(f):
    f.array[1] = -7


def change_array(f):
    f.array = np.full(K, 4, np.float32)


def change_held(f):
    f.held["b"] = jnp.full(K, 0.25)


def change_branch(f):
    f.squared = True


@pytest.mark.parametrize("change", [change_number, change_in_place, change_array, change_held, change_branch])
def test_what_a_function_closes_over_and_was_changed_between_builds_is_seen(change):
    function = Scaled()
    for _ in range(2):
        assert_rows(built(function, params()), true_rows(function, params(), X))
    change(function)
    for seed in (0, 1):
        assert_rows(built(function, params(seed)), true_rows(function, params(seed), X))


def test_arrays_that_were_changed_in_place_never_come_back_with_a_kept_program():
    """The first array holds other numbers now, a second one those that the first had."""
    first = Scaled()
    built(first, params())
    first.array[:] = -1
    second = Scaled()
    for batch_size in (None, 2, 3):
        found = built(second, params(1), batch_size=batch_size)
        assert_rows(found, true_rows(second, params(1), X))


def test_programs_of_a_build_during_which_an_array_or_a_number_changed_are_not_used_for_the_old_values():
    for change in (change_in_place, change_number):
        function = Scaled()
        before = function.array.copy(), function.number
        problem = jacstore.Problem(apply=function, params=params(), inputs=X)
        with suppress(InvalidFunctionError):
            jacstore.build(problem, None, unit_size=N, listener=lambda event, f=function, c=change: c(f))
        function.array[:], function.number = before
        for seed in (0, 1):
            assert_rows(built(function, params(seed)), true_rows(function, params(seed), X))


def test_gains_that_are_made_of_parameters_are_those_of_each_build():
    def apply(p, x):
        return jnp.tanh(x @ (p["v"] * p["mask"])) @ p["w"]

    for seed in (0, 1, 0):
        mask = np.random.default_rng(seed).choice(np.array([0, 2], np.float32), (WIDTH, WIDTH))
        problem = jacstore.Problem(apply=apply, params={**params(seed), "mask": mask}, inputs=X, select="v|w")
        store = jacstore.build(problem, None, unit_size=N, layout="factored")
        assert any(term.kind == "gain" for leaf in store.leaves for term in leaf.terms)
        found = np.asarray(store.array.compute(scheduler="synchronous")).reshape(N, K, -1)
        wanted = true_rows(lambda p, x, m=mask: apply({**p, "mask": jnp.asarray(m)}, x), params(seed), X)
        assert_rows(found, wanted)


def test_a_jit_inside_that_kept_an_old_value_is_refused_and_not_reused():
    scale = [2.0]
    inner = jax.jit(lambda y: y * scale[0])

    def apply(p, x):
        return inner(network(p, x))

    built(apply, params())
    built(apply, params(1))
    scale[0] = 5.0
    problem = jacstore.Problem(apply=apply, params=params(), inputs=X)
    assert "change from call to call" in refusal(jacstore.build, problem, error=InvalidFunctionError)


def test_noise_is_refused_after_an_equal_function_without_it():
    noise, noisy = np.random.default_rng(0), [False]

    def apply(p, x):
        return network(p, x) * (1 + noisy[0] * noise.random())

    built(apply, params())
    noisy[0] = True
    problem = jacstore.Problem(apply=apply, params=params(), inputs=X)
    assert "change from call to call" in refusal(jacstore.build, problem, error=InvalidFunctionError)


def test_outputs_that_are_not_finite_are_refused_in_a_second_build_too():
    built(network, params())
    bad = params(1)
    bad["w"][0, 1] = np.inf
    problem = jacstore.Problem(apply=network, params=bad, inputs=X)
    assert "'w' is not finite" in refusal(jacstore.build, problem, error=InvalidFunctionError)


def test_scalars_of_the_parameters_that_scale_a_gradient_are_those_of_each_build():
    def apply(p, x):
        return p["s"] * jnp.tanh(x @ (p["t"] * p["v"])) @ p["w"]

    for scale in (1.5, 4.0, -0.25):
        p = {"s": np.float32(2), "t": np.float32(scale), **params()}
        found = built(apply, p, layout="factored")
        assert_rows(found, true_rows(apply, p, X))
        assert_rows(jacstore.ntk(apply, p, X), (rows := true_rows(apply, p, X).reshape(N * K, -1)) @ rows.T)


def test_what_a_callback_computes_is_never_taken_for_known():
    table = [2.0]

    def apply(p, x):
        like = jax.ShapeDtypeStruct((K,), np.float32)
        return network(p, x) + jax.pure_callback(lambda: np.full(K, table[0], np.float32), like)

    for value in (2.0, 3.0):
        table[0] = value
        with compilations() as seen:
            store = rows_of(apply, params())
        assert seen
        np.testing.assert_allclose(store.outputs, np.stack([network(params(), x) for x in X]) + value, 1e-5)


def test_a_rule_for_batches_of_the_users_own_is_never_taken_for_known():
    factor = [2.0]

    def make():
        @jax.custom_batching.custom_vmap
        def doubled(y):
            return y * 2.0

        @doubled.def_vmap
        def rule(size, batched, y):
            return y * factor[0], batched[0]

        return lambda p, x: network(p, x) + jax.lax.stop_gradient(doubled(x[:K]))

    for value in (2.0, 2.0):
        factor[0] = value
        with compilations() as seen:
            rows_of(make(), params())
        assert seen


@pytest.mark.parametrize(
    "setting",
    [
        lambda: jax.threefry_partitionable(False),
        lambda: jax.default_prng_impl("rbg"),
        lambda: jax.numpy_dtype_promotion("strict"),
    ],
)
def test_programs_of_another_setting_of_jax_are_not_used(setting):
    def apply(p, x):
        return network(p, x) * jax.random.uniform(jax.random.key(3), (K,), dtype=x.dtype)

    found = {}
    for within in ("default", "set", "default", "set"):
        with setting() if within == "set" else jax.enable_x64(False):
            rows = built(apply, params())
        np.testing.assert_array_equal(found.setdefault(within, rows), rows)
    program.forget()
    with setting():
        np.testing.assert_array_equal(built(apply, params()), found["set"])


def test_emptying_the_caches_of_jax_empties_this_one():
    built(network, params())
    jax.clear_caches()
    with compilations() as seen:
        built(network, params())
    assert seen


def test_other_kinds_of_parameters_and_inputs_of_the_same_shapes_are_not_mixed_up():
    def apply(p, x):
        x = x["a"] if isinstance(x, dict) else x[0]
        return network(p, x)

    for inputs in ({"a": X}, (X,), {"a": X}):
        found = built(apply, params(), inputs)
        assert_rows(found, true_rows(network, params(), X))


def test_neither_functions_nor_parameters_are_held_and_programs_are_few():
    class Apply:
        def __call__(self, p, x):
            return network(p, x)

    function, p = Apply(), {name: jax.device_put(value) for name, value in params().items()}
    watched = [weakref.ref(function), *map(weakref.ref, p.values())]
    rows_of(function, p)
    del function, p
    gc.collect()
    assert [ref() is None for ref in watched] == [True] * 3
    for shift in range(2 * program.KEPT):
        rows_of(lambda p, x, shift=shift: network(p, x) + shift, params())
    assert len(program.kept_programs) <= program.KEPT


def test_programs_that_close_over_large_arrays_are_not_kept(limits):
    limits(kept_constants_bytes=100)
    table = jnp.asarray(params()["v"])
    for _ in range(2):
        with compilations() as seen:
            built(lambda p, x: network(p, x @ table), params())
        assert seen
