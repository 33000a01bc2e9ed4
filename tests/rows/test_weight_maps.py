"""What stands between a weight and its product: complex numbers, linear maps, look-ups of every kind.

Rows and kernels are those of jacrev, and factors are found where there are any.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jacstore
from jacstore import Problem
from jacstore.testing import dense_kernel, dense_rows, kernel_error
from support import terms_of, three

LAX_CONV = jax.lax.conv_general_dilated


@pytest.fixture(autouse=True)
def _small_leaves_count(limits):
    limits(smallest_factored=0)


def normal(*shape, seed=7):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32) / max(1, shape[0]) ** 0.5


def two(y):
    return three(y)[:2]


W = normal(24, 20)
X = normal(4, 24)
IDS = np.array([[0, 3, 3], [9, 1, 0], [2, 2, 2], [7, 8, 5]])
PERM = np.random.default_rng(0).permutation(24)
PERM20 = np.random.default_rng(0).permutation(20).astype(np.int32)
OUTSIDE = np.array([40, 0, -3], np.int32)
MASK = np.random.default_rng(0).random((24, 20)) < 0.5
LORA = {"w": W, "a": normal(24, 2), "b": normal(2, 20)}


def spectrum(params, x):
    return two(jnp.fft.irfft(jnp.fft.rfft(x).T @ params, axis=-1))


def cast(params, x):
    return two(jnp.abs((x * jnp.exp(1j * x)) @ params.astype(jnp.complex64)))


def two_parts(params, x):
    return two(jnp.abs(x @ (params["re"] + 1j * params["im"])))


def imaginary(params, x):
    return two(((x + 1j * x**2) @ params).imag)


def conv(x, w):
    return LAX_CONV(x[None], w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))[0]


def grouped(x, w):
    numbers = ("NHWC", "HWIO", "NHWC")
    return LAX_CONV(x[None], w, (1, 1), "SAME", dimension_numbers=numbers, feature_group_count=2)[0]


def projection(params, x):
    return three((conv(x, params["a"]) + conv(x, params["b"])).mean((0, 1)))


SHARED_IMAGE = {"a": normal(3, 3, 4, 8), "b": normal(1, 1, 4, 8)}

# (function, parameters, inputs, terms of the leaves in tree order)
FOUND = {
    "complex spectrum": (spectrum, normal(6, 9), normal(4, 6, 10), "dense"),
    "cast to complex": (cast, W, X, "dense"),
    "real and imaginary parts": (two_parts, {"re": W, "im": normal(24, 20, seed=1)}, X, "dense dense"),
    "imaginary part": (imaginary, W, X, "dense"),
    "two convolutions of one image": (projection, SHARED_IMAGE, normal(4, 16, 16, 4), "dense dense"),
    "gain (1,)": (lambda p, x: two(x @ (p["w"] / p["g"])), {"w": W, "g": np.float32([2])}, X, "dense dot"),
    "gain (1, 1)": (lambda p, x: two(x @ (p["w"] * p["g"])), {"w": W, "g": np.float32([[2]])}, X, "dense dot"),
    "scaled by columns": (lambda p, x: two(x @ (p * jnp.arange(1, 21))), W, X, "dot"),
    "divided by rows": (lambda p, x: two(x @ (p / jnp.arange(1, 25)[:, None])), W, X, "dot"),
    "scaled by another weight": (
        lambda p, x: two(x @ (p["w"] * p["g"])),
        {"w": W, "g": normal(20)},
        X,
        "dense dot",
    ),
    "masked": (lambda p, x: two(x @ (p * MASK)), W, X, "gain"),
    "centred": (lambda p, x: two(x @ (p - p.mean(0))), W, X, "dot+dot"),
    "centred by rows": (lambda p, x: two(x @ (p - p.mean(1, keepdims=True))), W, X, "dot+dot"),
    "low rank added": (lambda p, x: two(x @ (p["w"] + 0.5 * p["a"] @ p["b"])), LORA, X, "dot dot dot"),
    "columns of a weight": (lambda p, x: two(x[:9] @ p[:9, 2:17]), W, X, "dot"),
    "strided and reversed": (lambda p, x: two(x[:12] @ p[::2, ::-1]), W, X, "dot"),
    "two halves": (lambda p, x: two(jnp.tanh(x[:12] @ p[:12]) + x[12:] @ p[12:]), W, X, "dot+dot"),
    "concatenated": (
        lambda p, x: two(x @ jnp.concatenate([p["a"], p["b"]], 1)),
        {"a": W, "b": normal(24, 9)},
        X,
        "dot dot",
    ),
    "concatenated rows": (
        lambda p, x: two(x @ jnp.concatenate([p["a"], p["b"]])),
        {"a": W[:10], "b": W[10:]},
        X,
        "dot dot",
    ),
    "padded": (lambda p, x: two(jnp.pad(x, 2) @ jnp.pad(p, ((1, 3), (0, 2)))), W, X, "dot"),
    "permuted rows": (lambda p, x: two(x @ p[PERM]), W, X, "dot"),
    "permuted columns": (lambda p, x: two(x @ p[:, PERM[:20] % 20]), W, X, "dot"),
    "one of stacked weights": (lambda p, x: two(x @ p[1]), normal(3, 24, 20), X, "dot"),
    "heads of a weight": (
        lambda p, x: two(jnp.einsum("c,chd->hd", x, (p * jnp.arange(1, 6)).reshape(24, 4, 5))),
        normal(24, 4, 5),
        X,
        "dot",
    ),
    "channels of a filter": (
        lambda p, x: three(conv(x[..., :3], p[:, :, :3] * jnp.arange(1, 65)).mean((0, 1))),
        normal(3, 3, 4, 64),
        normal(4, 4, 4, 4),
        "conv",
    ),
    "window of a filter": (
        lambda p, x: three(conv(x, p[::-1]).mean((0, 1))),
        normal(3, 3, 4, 64),
        normal(4, 4, 4, 4),
        "dense",
    ),
    "scaled by a rounded weight": (
        lambda p, x: two(x @ (p["w"] * (p["g"] * 9).astype(jnp.int32).astype(p["w"].dtype))),
        {"w": W, "g": normal(20)},
        X,
        "dense dot",
    ),
    "scaled by a weight in 16 bits": (
        lambda p, x: two(x @ (p["w"] * jax.lax.stop_gradient(p["g"]).astype(jnp.bfloat16).astype(p["w"].dtype))),
        {"w": W, "g": normal(20)},
        X,
        "dense dot",
    ),
    "rows taken at clipped places": (
        lambda p, x: two(x[:3] @ jnp.take(p, OUTSIDE, axis=0, mode="clip")),
        W,
        X,
        "dot",
    ),
    "rows taken one by one": (
        lambda p, x: two(x[:20] @ jax.vmap(lambda n: jax.lax.dynamic_index_in_dim(p.T, n))(PERM20)[:, 0]),
        W,
        X,
        "dense",
    ),
    "filter in groups as a sum": (
        lambda p, x: three(grouped(x, p.sum(0)).mean((0, 1))),
        normal(3, 3, 3, 2, 8),
        normal(4, 4, 4, 4),
        "dense",
    ),
    "filter in groups as a product": (
        lambda p, x: three(grouped(x, jnp.tensordot(p["m"], p["w"], 1)).mean((0, 1))),
        {"m": normal(3), "w": normal(3, 3, 3, 2, 8)},
        normal(4, 4, 4, 4),
        "dense dense",
    ),
    "vmapped look-up": (lambda p, i: two(jax.vmap(lambda n: p[n])(i)), normal(40, 6), IDS, "index"),
    "single id": (lambda p, i: two(p[i[0]]), normal(40, 6), IDS, "index"),
    "look-up of columns": (lambda p, i: two(p.T[:, i]), normal(40, 6), IDS, "index"),
    "look-up along axis 1": (lambda p, i: two(jnp.take(p, i, axis=1)), normal(6, 40), IDS, "index"),
    "dynamic index": (lambda p, i: two(jax.lax.dynamic_index_in_dim(p, i[0])), normal(40, 6), IDS, "index"),
    "dynamic index under vmap": (
        lambda p, i: two(jax.vmap(lambda n: jax.lax.dynamic_index_in_dim(p, n))(i)),
        normal(40, 6),
        IDS,
        "index",
    ),
    "scaled look-up": (lambda p, i: two((p * jnp.arange(1, 7))[i] * 6**0.5), normal(40, 6), IDS, "index"),
    "scaled and tied": (
        lambda p, i: two(jnp.tanh(p[i] * 6**0.5) @ p.T),
        normal(400, 6),
        IDS,
        "dot+index",
    ),
}


def problem_of(name):
    apply, params, inputs, _ = FOUND[name]
    return Problem(apply=apply, params=params, inputs=inputs)


@pytest.mark.parametrize("name", FOUND)
def test_rows_norms_and_kernels_are_those_of_jacrev(name):
    problem = problem_of(name)
    rows = dense_rows(problem)
    store = jacstore.build(problem, None, dtype="float64")
    assert terms_of(store) == FOUND[name][3]
    found = store.array.compute(scheduler="synchronous").reshape(rows.shape)
    assert np.linalg.norm(found - rows) <= 1e-12 * np.linalg.norm(rows)
    np.testing.assert_allclose(store.norms.sum(-1), np.square(rows).sum(-1), rtol=1e-10)
    kernel = jacstore.gram(store).array.compute(scheduler="synchronous")
    assert kernel_error(kernel, dense_kernel(rows)) <= 1e-12


@pytest.mark.parametrize("layout", ["dense", "auto", "factored"])
@pytest.mark.parametrize("name", ["two convolutions of one image", "complex spectrum", "centred", "low rank added"])
def test_every_layout_gives_the_same_rows(name, layout):
    problem = problem_of(name)
    rows = dense_rows(problem)
    store = jacstore.build(problem, None, dtype="float64", layout=layout)
    found = store.array.compute(scheduler="synchronous").reshape(rows.shape)
    assert np.linalg.norm(found - rows) <= 1e-12 * np.linalg.norm(rows)
