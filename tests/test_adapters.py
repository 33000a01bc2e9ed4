"""Adapters of other libraries: rows are those of `jax.jacrev` on the library's own module, in float64."""

from __future__ import annotations

import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jacstore
from jacstore import Problem
from support import error, refused, rows_of

IMAGES = np.random.default_rng(0).standard_normal((4, 6, 6, 2))
VECTORS = np.random.default_rng(1).standard_normal((4, 5))


def wide(tree):
    """Floating leaves in float64."""
    return jax.tree_util.tree_map(
        lambda leaf: np.asarray(leaf, np.float64) if jnp.issubdtype(leaf.dtype, jnp.floating) else leaf, tree
    )


def moved(tree, seed=3):
    """The same leaves with other values, all above 0: running statistics are not those of the start."""
    draw = np.random.default_rng(seed)
    return jax.tree_util.tree_map(lambda leaf: np.abs(leaf) + draw.uniform(0.2, 1, np.shape(leaf)), tree)


def truth(outputs, params, inputs):
    """Rows `(N*K, P)` of `outputs(params, example)` by jacrev, in float64, columns in tree order."""
    with jax.enable_x64(True):
        rows = []
        for x in inputs:
            jacobian = jax.jacrev(lambda p, x=x: outputs(p, jnp.asarray(x)).ravel())(params)
            leaves = jax.tree_util.tree_leaves(jacobian)
            rows.append(np.concatenate([np.reshape(v, (v.shape[0], -1)) for v in leaves], 1))
        return np.concatenate(rows)


def assert_rows(problem: Problem, expected: np.ndarray) -> None:
    found = rows_of(jacstore.build(problem, dtype="float64"))
    assert error(found, expected) < 1e-12


# --- flax -------------------------------------------------------------------------------------------------------------


def network():
    linen = pytest.importorskip("flax.linen")

    class Network(linen.Module):
        @linen.compact
        def __call__(self, x, train=True):
            x = linen.Conv(3, (3, 3))(x)
            x = linen.BatchNorm(use_running_average=not train)(x)
            x = linen.Dropout(0.5, deterministic=not train)(jnp.tanh(x))
            return linen.Dense(2)(x.mean((1, 2)))

        def features(self, x):
            return x

    return Network()


def variables_of(model):
    found = model.init(jax.random.key(0), IMAGES[:1].astype(np.float32), train=False)
    assert set(found) == {"params", "batch_stats"}
    return {"params": wide(found["params"]), "batch_stats": moved(wide(found["batch_stats"]))}


def test_a_linen_module_with_running_statistics_has_the_rows_of_jacrev():
    model = network()
    import jacstore.flax

    variables = variables_of(model)
    problem = jacstore.flax.linen_problem(model, variables, IMAGES, train=False)

    def outputs(params, x):
        return model.apply({**variables, "params": params}, x[None], train=False)

    assert_rows(problem, truth(outputs, variables["params"], IMAGES))
    store = jacstore.build(problem)
    assert {leaf.path.split("/")[0] for leaf in store.leaves} == {"Conv_0", "BatchNorm_0", "Dense_0"}


def test_a_linen_module_in_training_mode_is_refused_with_what_to_pass():
    model = network()
    import jacstore.flax

    text = refused(jacstore.build, jacstore.flax.linen_problem(model, variables_of(model), IMAGES))
    assert 'collection "batch_stats" is immutable. pass the argument of the module that turns this off' in text


def test_other_statistics_of_a_linen_module_are_another_request(tmp_path):
    model = network()
    import jacstore.flax

    variables = variables_of(model)
    jacstore.build(jacstore.flax.linen_problem(model, variables, IMAGES, train=False), tmp_path / "run.jac")
    changed = {**variables, "batch_stats": moved(variables["batch_stats"])}
    problem = jacstore.flax.linen_problem(model, changed, IMAGES, train=False)
    assert "constants" in refused(jacstore.build, problem, tmp_path / "run.jac")


def test_what_is_no_linen_module_and_variables_without_parameters_are_refused():
    model = network()
    import jacstore.flax

    assert "model is a function" in refused(jacstore.flax.linen_problem, lambda x: x, {}, IMAGES)
    assert "collection params" in refused(jacstore.flax.linen_problem, model, {"kernel": 1}, IMAGES)
    assert "model is a function" in refused(jacstore.flax.nnx_problem, lambda x: x, IMAGES)


def test_an_nnx_module_in_any_mode_has_the_rows_of_jacrev_and_stays_as_it_is():
    nnx = pytest.importorskip("flax.nnx")
    import jacstore.flax

    class Network(nnx.Module):
        def __init__(self, rngs):
            self.first = nnx.Linear(5, 7, rngs=rngs)
            self.norm = nnx.BatchNorm(7, rngs=rngs)
            self.dropout = nnx.Dropout(0.5, rngs=rngs)
            self.layers = nnx.List([nnx.Linear(7, 7, rngs=rngs) for _ in range(2)])
            self.last = nnx.Linear(7, 3, rngs=rngs)

        def __call__(self, x):
            x = self.dropout(self.norm(self.first(x)))
            for layer in self.layers:
                x = jnp.tanh(layer(x))
            return self.last(x)

    model = Network(nnx.Rngs(0))
    model.norm.mean.set_value(jnp.arange(7.0))
    model.norm.var.set_value(0.5 + jnp.arange(7.0))
    model.train()
    problem = jacstore.flax.nnx_problem(model, VECTORS)
    assert not model.dropout.deterministic and not model.norm.use_running_average
    evaluated = nnx.clone(model)
    evaluated.eval()
    definition, params, rest = nnx.split(evaluated, nnx.Param, ...)
    pure = wide(nnx.to_pure_dict(params))

    def outputs(params, x):
        return nnx.merge(definition, params, rest)(x[None])

    assert_rows(problem, truth(outputs, pure, VECTORS))


def test_only_the_variables_that_wrt_names_have_columns():
    nnx = pytest.importorskip("flax.nnx")
    import jacstore.flax

    model = nnx.LoRALinear(5, 3, lora_rank=2, rngs=nnx.Rngs(0))
    store = jacstore.build(jacstore.flax.nnx_problem(model, VECTORS.astype(np.float32), wrt=nnx.LoRAParam))
    assert sorted(leaf.path for leaf in store.leaves) == ["lora/lora_a", "lora/lora_b"]


# --- equinox ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def eqx():
    return pytest.importorskip("equinox")


def test_an_equinox_module_in_training_mode_has_the_rows_of_jacrev_and_stays_as_it_is(eqx):
    import jacstore.equinox

    keys = jax.random.split(jax.random.key(0), 2)
    model = eqx.nn.Sequential(
        [
            eqx.nn.Linear(5, 7, key=keys[0]),
            eqx.nn.Lambda(jnp.tanh),
            eqx.nn.Dropout(0.5),
            eqx.nn.Linear(7, 3, key=keys[1]),
        ]
    )
    problem = jacstore.equinox.equinox_problem(model, VECTORS)
    assert not model[2].inference
    arrays, static = eqx.partition(eqx.nn.inference_mode(model), eqx.is_inexact_array)

    def outputs(arrays, x):
        return eqx.combine(arrays, static)(x)

    assert_rows(problem, truth(outputs, wide(arrays), VECTORS))


def test_an_equinox_module_with_a_state_has_the_rows_of_jacrev(eqx):
    import jacstore.equinox

    class Network(eqx.Module):
        linear: eqx.nn.Linear
        norm: eqx.nn.BatchNorm

        def __init__(self, key):
            self.linear = eqx.nn.Linear(5, 3, key=key)
            self.norm = eqx.nn.BatchNorm(3, axis_name="batch", mode="batch")

        def __call__(self, x, state):
            return self.norm(jnp.tanh(self.linear(x)), state)

    model, state = eqx.nn.make_with_state(Network)(jax.random.key(0))
    # One step of training, so that the statistics are those of data.
    trained = jax.vmap(model, axis_name="batch", in_axes=(0, None), out_axes=(0, None))
    _, state = trained(jnp.asarray(VECTORS, jnp.float32), state)
    with jax.enable_x64(True):
        state = wide(state)
    problem = jacstore.equinox.equinox_problem(model, VECTORS, state=state)
    arrays, static = eqx.partition(eqx.nn.inference_mode(model), eqx.is_inexact_array)

    def outputs(arrays, x):
        return eqx.combine(arrays, static)(x, state)[0]

    assert_rows(problem, truth(outputs, wide(arrays), VECTORS))


def test_leaves_that_wrt_leaves_out_have_no_columns(eqx):
    import jacstore.equinox

    model = eqx.nn.MLP(5, 3, 7, 1, key=jax.random.key(0))
    frozen = jax.tree_util.tree_map(lambda _: False, model)
    last = eqx.tree_at(lambda m: m.layers[-1].weight, frozen, True)
    store = jacstore.build(jacstore.equinox.equinox_problem(model, VECTORS.astype(np.float32), wrt=last))
    assert [leaf.shape for leaf in store.leaves] == [(3, 7)]
    assert "model is a list" in refused(jacstore.equinox.equinox_problem, [1], VECTORS)


# --- what is missing --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("library", ["flax", "equinox"])
def test_an_adapter_without_its_library_says_in_one_line_what_to_install(library):
    code = (
        f"import sys; sys.modules[{library!r}] = None\n"
        f"try:\n    import jacstore.{library}\n"
        "except ModuleNotFoundError as error:\n    print(error)"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout.startswith(f"jacstore.{library} needs {library} (")
    assert ran.stdout.endswith(f"pip install 'jacstore[{library}]'\n") and ran.stdout.count("\n") == 1
