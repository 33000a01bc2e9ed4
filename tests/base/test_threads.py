"""What JAX is told by a `with` statement holds in every thread that jacstore starts for the caller."""

from __future__ import annotations

import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jacstore
from jacstore.base.threads import Pool, settings_in_force, within_settings
from jacstore.testing import dense_kernel, dense_rows, kernel_error

N, D, K = 5, 6, 3
draw = np.random.default_rng(0)
PARAMS = {"v": draw.standard_normal((D, 8)), "w": draw.standard_normal((8, K))}
X = draw.standard_normal((N, D))
SETTINGS = {
    "enable_x64": True,
    "default_matmul_precision": "float32",
    "numpy_rank_promotion": "raise",
    "numpy_dtype_promotion": "strict",
    "default_device": None,
    "default_prng_impl": "rbg",
    "threefry_partitionable": False,
    "debug_nans": True,
    "debug_infs": True,
    "transfer_guard_host_to_device": "log",
}


def network(params, x):
    return jnp.tanh(x @ params["v"]) @ params["w"]


def value_of(name):
    """Another device than the default one stands for no value that can be written down."""
    return jax.devices("cpu")[-1] if name == "default_device" else SETTINGS[name]


def in_force(names=tuple(SETTINGS)):
    return {name: getattr(jax.config, f"jax_{name}") for name in names}


@pytest.mark.parametrize("name", SETTINGS)
def test_a_setting_of_the_calling_thread_holds_in_a_pool_and_is_gone_from_it_afterwards(name):
    with Pool(1) as pool:
        before = pool.submit(in_force).result()
        with getattr(jax, name)(value_of(name)):
            wanted = in_force()
            assert pool.submit(in_force).result() == wanted != before
            assert list(pool.map(lambda _: in_force(), range(3))) == [wanted] * 3
        assert pool.submit(in_force).result() == before == in_force()


def test_a_task_that_was_submitted_outside_does_not_see_what_holds_in_another_thread():
    with Pool(1) as pool, jax.enable_x64(True):
        held = settings_in_force()
        with jax.enable_x64(False):
            found = pool.submit(within_settings(held, in_force)).result()
    assert found["enable_x64"] is True


def test_all_pools_that_run_functions_of_the_user_or_jax_carry_settings():
    package = Path(jacstore.__file__).parent
    plain = []
    for path in sorted(package.rglob("*.py")):
        text, room = path.read_text(), path.relative_to(package).parts[0]
        runs_jax = re.search(r"^(import|from) jax\b", text, re.M) or room in ("problem", "rows")
        if runs_jax and "torch" not in path.parts and re.search(r"\bThreadPoolExecutor\(|\bThread\(", text):
            plain.append(str(path.relative_to(package)))
    assert plain == []


@pytest.fixture
def x64():
    with jax.enable_x64(True):
        yield


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("layout", ["auto", "dense"])
def test_a_problem_in_float64_is_built_multiplied_and_verified_under_enable_x64(x64, layout, dtype, tmp_path):
    problem = jacstore.Problem(apply=network, params=PARAMS, inputs=X)
    rows = dense_rows(problem)
    store = jacstore.build(problem, tmp_path / "j", layout=layout, dtype=dtype, unit_size=2)
    found = np.asarray(store.array.compute(), np.float64).reshape(rows.shape)
    limit = 1e-6 if dtype == "float32" else 1e-12
    assert np.linalg.norm(found - rows) <= limit * np.linalg.norm(rows)
    assert jacstore.verify(store, problem).ok
    for engine in ("xla", "blas"):
        kernel = jacstore.gram(store, engine=engine).array.compute(scheduler="synchronous")
        assert kernel_error(kernel, dense_kernel(rows)) <= limit


def test_operators_without_a_store_compute_in_float64_under_enable_x64(x64):
    problem = jacstore.Problem(apply=network, params=PARAMS, inputs=X)
    rows = dense_rows(problem).reshape(N * K, -1)
    j = jacstore.jacobian_operator(problem)
    columns = draw.standard_normal((rows.shape[1], 2))
    assert np.linalg.norm(j @ columns - rows @ columns) <= 1e-12 * np.linalg.norm(rows @ columns)


class Items:
    """A dataset whose items take the type that JAX computes in."""

    def __len__(self):
        return N

    def __getitem__(self, i):
        return jnp.asarray(X[i])


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("wide", [False, True])
def test_items_of_a_dataset_are_read_under_the_settings_of_the_caller(wide, dtype):
    params = PARAMS if wide else {name: value.astype(np.float32) for name, value in PARAMS.items()}
    with jax.enable_x64(wide):
        problem = jacstore.Problem(apply=network, params=params, inputs=Items())
        store = jacstore.build(problem, None, unit_size=2, dtype=dtype)
        assert jacstore.verify(store, problem).ok
    inputs = X if wide else X.astype(np.float32)
    rows = dense_rows(jacstore.Problem(apply=network, params=params, inputs=inputs))
    found = np.asarray(store.array.compute(), np.float64).reshape(rows.shape)
    assert np.linalg.norm(found - rows) <= 1e-6 * np.linalg.norm(rows)


@pytest.mark.parametrize("name", SETTINGS)
def test_a_build_and_a_kernel_come_out_the_same_under_every_setting(name):
    params = {key: value.astype(np.float32) for key, value in PARAMS.items()}

    def network(params, x):
        return jnp.tanh(x @ params["v"]) @ params["w"]

    def results():
        problem = jacstore.Problem(apply=network, params=params, inputs=X.astype(np.float32))
        store = jacstore.build(problem, None, unit_size=2)
        kernel = jacstore.gram(store, engine="xla").array.compute(scheduler="synchronous")
        assert jacstore.verify(store, problem).ok
        return np.asarray(store.array.compute()), kernel

    plain = results()
    with getattr(jax, name)(value_of(name)):
        found = results()
    for a, b in zip(plain, found, strict=True):
        assert np.linalg.norm(a - b) <= 1e-6 * np.linalg.norm(a)
