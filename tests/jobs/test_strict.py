"""Under JAX's strict flags, rank promotion refused and type promotion strict, everything comes out the same."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jacstore
from jacstore import Problem

N, D, K = 5, 6, 3


def strict(params, x):
    """A network that is clean under both flags."""
    y = jax.lax.conv_general_dilated(x[None], params["conv"], (2, 2), "SAME")[0]
    h = jnp.tanh(y).reshape(-1)
    return h @ params["w"] + params["b"]


def problem() -> Problem:
    draw = np.random.default_rng(0)
    shapes = {"conv": (8, 4, 3, 3), "w": (8 * 9, K), "b": (K,)}
    params = {name: draw.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}
    return Problem(apply=strict, params=params, inputs=draw.normal(size=(N, 4, D, D)).astype(np.float32))


def results(layout: str, dtype: str, folder) -> list[np.ndarray]:
    store = jacstore.build(problem(), folder / f"{layout}{dtype}", dtype=dtype, layout=layout, memory="500MB")
    kernel = jacstore.gram(store, engine="xla", memory="500MB").array.compute(scheduler="synchronous")
    assert jacstore.verify(store, problem(), memory="500MB").ok
    return [np.asarray(store.array.compute(), np.float64), kernel]


@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16"])
@pytest.mark.parametrize("layout", ["dense", "factored"])
def test_rows_and_kernels_are_equal_under_strict_flags(layout: str, dtype: str, tmp_path) -> None:
    (tmp_path / "strict").mkdir()
    plain = results(layout, dtype, tmp_path)
    with jax.numpy_rank_promotion("raise"), jax.numpy_dtype_promotion("strict"):
        found = results(layout, dtype, tmp_path / "strict")
    assert all(np.array_equal(a, b) for a, b in zip(plain, found, strict=True))


def test_operators_without_a_store_work_under_strict_flags() -> None:
    with jax.numpy_rank_promotion("raise"), jax.numpy_dtype_promotion("strict"):
        j = jacstore.jacobian_operator(problem())
        x = np.ones((j.shape[1], 2))
        assert np.isfinite(j.T @ (j @ x)).all()
        loss = lambda f, t: jnp.sum(jnp.square(f - t))  # noqa: E731
        targets = np.zeros((N, K), np.float32)
        for operator in (jacstore.ggn_operator, jacstore.hvp_operator):
            assert np.isfinite(operator(problem(), loss, targets) @ x).all()
