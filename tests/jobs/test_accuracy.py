"""Claims about numbers: stored rows and kernels against `jax.jacrev` in float64.

With `pytest -s -n 0` it prints the worst error of every combination.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

import jacstore
from jacstore import Problem

MEMORY = "200MB"
ROW_LIMIT = {"float64": 1e-12, "float32": 2e-6, "bfloat16": 8e-3}
# Kernels of bfloat16 rows are compared with the products of those rows: rounding them is the rows' error.
KERNEL_LIMIT = {"float64": 1e-12, "float32": 2e-6, "bfloat16": 2e-6}
MODES = ("full", "trace", "diagonal", "blocks")
WORST: dict[tuple[str, ...], float] = defaultdict(float)


@pytest.fixture(scope="module", autouse=True)
def table():
    """Print the worst errors when all is done."""
    yield
    lines = [f"{'what':9}{'network':14}{'outputs':12}{'dtype':10}{'worst error':>12}"]
    for (what, *key), error in sorted(WORST.items()):
        lines.append(f"{what:9}{key[0]:14}{key[1]:12}{key[2]:10}{error:12.1e}")
    print("\n" + "\n".join(lines))


# --- dense truth ------------------------------------------------------------------------------------------------------


def jacobian(apply, params, inputs, outputs="all", select=None):
    """J `(N, K, P)` in float64: `jax.jacrev` of one example after the other, without anything of jacstore's."""
    flat, treedef = jax.tree_util.tree_flatten_with_path(params)
    paths = ["/".join(str(getattr(k, "key", getattr(k, "idx", None))) for k in keys) for keys, _ in flat]
    with jax.enable_x64(True), jax.default_matmul_precision("highest"):
        leaves = [wide(leaf) for _, leaf in flat]
        moving = [
            i
            for i, (path, leaf) in enumerate(zip(paths, leaves, strict=True))
            if jnp.issubdtype(leaf.dtype, np.floating) and re.search(select or "", path)
        ]

        def chosen(moved, example):
            whole = list(leaves)
            for i, leaf in zip(moving, moved, strict=True):
                whole[i] = leaf
            tree = apply(jax.tree_util.tree_unflatten(treedef, whole), example)
            y = jnp.concatenate([jnp.ravel(leaf) for leaf in jax.tree_util.tree_leaves(tree)])
            return y.sum(keepdims=True) if outputs == "sum" else y if outputs == "all" else y[np.array(outputs)]

        one = jax.jit(lambda example: jax.jacrev(chosen)([leaves[i] for i in moving], example))
        n = len(jax.tree_util.tree_leaves(inputs)[0])
        rows = []
        for i in range(n):
            parts = one(jax.tree_util.tree_map(lambda leaf, i=i: wide(leaf[i]), inputs))
            rows.append(np.concatenate([np.asarray(part).reshape(part.shape[0], -1) for part in parts], 1))
    return np.stack(rows)


def wide(leaf):
    """Floating arrays as float64, others in their own type."""
    array = np.asarray(leaf)
    return jnp.asarray(array.astype(np.float64) if np.issubdtype(array.dtype, np.floating) else array)


def kernel_of(a, b, mode):
    """The kernel between `(N, K, P)` and `(M, K, P)` in float64."""
    products = np.einsum("ikp,jlp->ikjl", a, b, optimize=True)
    if mode == "full":
        return products.reshape(a.shape[0] * a.shape[1], -1)
    equation = {"trace": "ikjk->ij", "diagonal": "ikjk->kij", "blocks": "ikil->ikl"}[mode]
    return np.einsum(equation, products)


def row_error(found, truth):
    """The largest `‖a - b‖ / ‖b‖` of a row; a row of zeros has to be zero."""
    off, size = (np.linalg.norm(x.reshape(-1, x.shape[-1]), axis=1) for x in (found - truth, truth))
    return float(np.max(np.where(off == 0, 0, off / np.where(size == 0, math.ulp(0), size))))


def kernel_error(found, a, b, mode):
    """The largest `|Δ_ij| / sqrt(G_ii G_jj)`."""
    truth = kernel_of(a, b, mode)
    left, right = (np.einsum("ikp,ikp->ik", x, x) for x in (a, b))
    scale = {
        "full": lambda: np.outer(left.ravel(), right.ravel()),
        "trace": lambda: np.outer(left.sum(1), right.sum(1)),
        "diagonal": lambda: np.einsum("ik,jk->kij", left, right),
        "blocks": lambda: np.einsum("ik,il->ikl", left, left),
    }[mode]()
    off = np.abs(found - truth)
    return float(np.max(np.where(off == 0, 0, off / np.sqrt(np.where(scale == 0, math.ulp(0), scale)))))


def check_rows(store, truth, *name):
    """Compare all rows, outputs' count and squared norms of a store with the truth; returns the rows `(N, K, P)`."""
    found = store.array.compute(scheduler="synchronous").astype(np.float64).reshape(truth.shape)
    assert (store.n_examples, store.n_outputs, store.n_parameters) == truth.shape
    error = row_error(found, truth)
    WORST["rows", *name, store.dtype] = max(WORST["rows", *name, store.dtype], error)
    assert error <= ROW_LIMIT[store.dtype]
    # Norms are of the rows before rounding.
    squares = np.square(truth).sum(-1)
    limit = 2 * ROW_LIMIT["float64" if store.dtype == "float64" else "float32"]
    assert np.abs(store.norms.sum(-1) - squares).max(initial=0, where=squares > 0) <= limit * squares.max()
    return found


def check_kernel(array, a, b, mode, dtype, *name):
    found = array.compute(scheduler="synchronous")
    assert found.dtype == np.float64
    error = kernel_error(found, a, b, mode)
    WORST[f"{mode}", *name, dtype] = max(WORST[f"{mode}", *name, dtype], error)
    assert error <= KERNEL_LIMIT[dtype]


# --- networks ---------------------------------------------------------------------------------------------------------


def weights(*shapes):
    rng = np.random.default_rng(len(shapes))
    return [(rng.normal(size=s) / math.sqrt(math.prod(s[:-1]) or 1)).astype(np.float32) for s in shapes]


def mlp(k):
    names = ("w0", "b0", "w1", "b1", "w2", "b2")
    params = dict(zip(names, weights((5, 9), (9,), (9, 8), (8,), (8, k), (k,)), strict=True))

    def apply(p, x):
        x = jnp.tanh(x @ p["w0"] + p["b0"])
        x = jax.nn.relu(x @ p["w1"] + p["b1"])
        return x @ p["w2"] + p["b2"]

    return apply, params, np.random.default_rng(7).normal(size=(7, 5)).astype(np.float32)


def cnn(k):
    params = dict(zip(("c0", "c1", "w"), weights((3, 3, 2, 4), (2, 2, 4, 5), (20, k)), strict=True))

    def convolve(x, kernel, stride):
        numbers = ("NHWC", "HWIO", "NHWC")
        return jax.lax.conv_general_dilated(x[None], kernel, (stride, stride), "SAME", dimension_numbers=numbers)[0]

    def apply(p, x):
        x = jax.nn.gelu(convolve(x, p["c0"], 1))
        x = jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, (2, 2, 1), (2, 2, 1), "VALID")
        return jax.nn.gelu(convolve(x, p["c1"], 2)).ravel() @ p["w"]

    return apply, params, np.random.default_rng(8).normal(size=(5, 8, 8, 2)).astype(np.float32)


def nested(k):
    """Dicts in lists in dicts, a scalar, a weight used twice, an integer leaf; outputs and inputs are pytrees."""
    w, tied, head, gain = weights((4, 6), (6, 6), (6, k), ())
    params = {
        "body": [{"w": w}, {"tied": tied, "steps": np.arange(6, dtype=np.int32)}],
        "head": {"w": head, "gain": gain},
    }

    def apply(p, example):
        x = jnp.sin(example["x"] @ p["body"][0]["w"]) + 0.1 * p["body"][1]["steps"] * example["scale"]
        for _ in range(2):
            x = jnp.tanh(x @ p["body"][1]["tied"])
        y = x @ p["head"]["w"]
        return {"rest": y[1:], "first": [y[:1] * (1 + p["head"]["gain"])]}

    rng = np.random.default_rng(9)
    return apply, params, {"x": rng.normal(size=(6, 4)).astype(np.float32), "scale": np.arange(6, dtype=np.int32)}


def attention(k):
    """Token ids, an embedding, one head of attention, layer norm, the embedding again as the last weight."""
    table, q, key, value, head = weights((11, 4), (4, 4), (4, 4), (4, 4), (11, k))
    params = {"table": table, "qkv": (q, key, value), "head": head}

    def apply(p, tokens):
        x = p["table"][tokens]
        q, key, value = (x @ w for w in p["qkv"])
        x = x + jax.nn.softmax(q @ key.T / 2) @ value
        x = (x - x.mean(-1, keepdims=True)) / jnp.sqrt(x.var(-1, keepdims=True) + 1e-3)
        return (x.mean(0) @ p["table"].T) @ p["head"]

    return apply, params, np.random.default_rng(10).integers(0, 11, size=(6, 3))


NETWORKS = {"mlp": mlp, "cnn": cnn, "nested": nested, "attention": attention}


@cache
def case(network, k, outputs="all", select=None):
    """A network with its true rows `(N, K, P)`."""
    apply, params, inputs = NETWORKS[network](k)
    return apply, params, inputs, jacobian(apply, params, inputs, outputs, select)


@cache
def store_of(network, k, dtype, outputs="all", select=None):
    apply, params, inputs, truth = case(network, k, outputs, select)
    chosen = list(outputs) if isinstance(outputs, tuple) else outputs
    problem = Problem(apply=apply, params=params, inputs=inputs, outputs=chosen, select=select)
    return jacstore.build(problem, None, dtype=dtype, memory=MEMORY, unit_size=4), truth


@pytest.mark.parametrize(
    ("network", "k", "dtype"),
    [
        *((network, 3, dtype) for network in NETWORKS for dtype in ("float64", "float32")),
        *((network, 3, "bfloat16") for network in ("mlp", "cnn")),
        # How many outputs there are decides how rows are computed and laid out, not how they are rounded.
        *(("mlp", k, "float64") for k in (1, 10)),
        *(
            pytest.param(*one, marks=pytest.mark.slow)
            for one in [("mlp", 1, "float32"), ("mlp", 10, "float32"), ("cnn", 1, "float32"), ("cnn", 10, "float32")]
        ),
    ],
)
def test_rows_and_kernel_are_those_of_jacrev(network, k, dtype):
    store, truth = store_of(network, k, dtype)
    rows = check_rows(store, truth, network, f"K={k}")
    against = rows if dtype == "bfloat16" else truth
    for mode in MODES:
        kernel = jacstore.gram(store, mode=mode, memory=MEMORY)
        check_kernel(kernel.array, against, against, mode, dtype, network, f"K={k}")


@pytest.mark.parametrize(
    ("network", "outputs", "select", "dtype"),
    [
        ("mlp", "sum", None, "float64"),
        ("mlp", (2, 0), None, "float64"),
        ("nested", "sum", None, "float64"),
        ("nested", "all", "^head/", "float32"),
        ("attention", (1,), "qkv", "float64"),
    ],
)
def test_chosen_outputs_and_leaves_are_those_of_jacrev(network, outputs, select, dtype):
    store, truth = store_of(network, 3, dtype, outputs, select)
    name = network, select or (outputs if isinstance(outputs, str) else str(list(outputs)))
    check_rows(store, truth, *name)
    check_kernel(jacstore.gram(store, memory=MEMORY).array, truth, truth, "full", dtype, *name)


@pytest.mark.parametrize("network", ["mlp", "nested"])
def test_the_rows_of_summed_outputs_are_the_sums_of_rows(network):
    found = store_of(network, 3, "float64", "sum")[0].array.compute(scheduler="synchronous")
    assert row_error(found[:, None], case(network, 3)[3].sum(1, keepdims=True)) <= 1e-12


@pytest.mark.parametrize("network", list(NETWORKS))
def test_outputs_are_stored_beside_the_rows(network):
    apply, params, inputs, _ = case(network, 3)
    store, _ = store_of(network, 3, "float64")
    with jax.enable_x64(True), jax.default_matmul_precision("highest"):
        tree = jax.jit(jax.vmap(apply, (None, 0)))(*jax.tree_util.tree_map(wide, (params, inputs)))
    truth = np.concatenate([np.asarray(leaf) for leaf in jax.tree_util.tree_leaves(tree)], -1)
    assert row_error(store.outputs, truth) <= 1e-12


@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_a_rectangular_kernel_is_the_product_of_both_jacobians(dtype):
    apply, params, _, truth = case("mlp", 3)
    other = np.random.default_rng(3).normal(size=(4, 5)).astype(np.float32)
    other_truth = jacobian(apply, params, other)
    columns = jacstore.build(Problem(apply=apply, params=params, inputs=other), None, dtype=dtype, memory=MEMORY)
    for mode in ("full", "trace", "diagonal"):
        kernel = jacstore.gram(store_of("mlp", 3, dtype)[0], columns, mode=mode, memory=MEMORY, tile=3)
        check_kernel(kernel.array, truth, other_truth, mode, dtype, "mlp", "x other")


# --- properties -------------------------------------------------------------------------------------------------------

SHAPES = st.lists(st.integers(1, 4), min_size=0, max_size=3).map(tuple)
LEAVES = st.tuples(SHAPES, st.sampled_from(["float32", "float32", "float32", "int32"]))
TREES = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.lists(inner, min_size=1, max_size=3),
        st.lists(inner, min_size=1, max_size=2).map(tuple),
        st.dictionaries(st.sampled_from(["w", "b", "a/b", "x%y", "0"]), inner, min_size=1, max_size=3),
    ),
    max_leaves=6,
)


def is_leaf(node):
    return isinstance(node, tuple) and len(node) == 2 and isinstance(node[1], str)


def random_network(tree, k, seed):
    """Arrays for a tree of (shape, dtype), and an `apply` in which every leaf reaches every output.

    No entry of a row is a difference of large terms: arguments of sine stay below 0.9, mixed signs differ by column.
    """
    rng = np.random.default_rng(seed)

    def values(leaf):
        shape, dtype = leaf
        drawn = rng.integers(1, 4, size=shape) if dtype == "int32" else rng.uniform(-1, 1, size=shape)
        return np.asarray(drawn, dtype)

    params = jax.tree_util.tree_map(values, tree, is_leaf=is_leaf)
    mixing = []
    for leaf in jax.tree_util.tree_leaves(params):
        signs = rng.choice([-1, 1], size=leaf.size)
        mixing.append(rng.uniform(0.1, 0.6, size=(k, leaf.size)) * signs / np.abs(leaf).sum())

    def apply(p, x):
        y = jnp.ones(k, x.dtype)
        for n, (leaf, matrix) in enumerate(zip(jax.tree_util.tree_leaves(p), mixing, strict=True)):
            mixed = matrix.astype(x.dtype) @ jnp.ravel(leaf).astype(x.dtype)
            y = y + 0.3 * jnp.sin(mixed * (1 + x[n % len(x)])) * (1.5 + jnp.cos(y))
        return y

    return apply, params


@given(data=st.data())
@settings(
    max_examples=10, phases=[Phase.generate], deadline=None, database=None, suppress_health_check=list(HealthCheck)
)
def test_rows_and_kernels_do_not_depend_on_tree_sizes_codec_or_tiles(data, tmp_path_factory):
    tree = data.draw(
        TREES.filter(lambda t: any(d == "float32" for _, d in jax.tree_util.tree_leaves(t, is_leaf=is_leaf)))
    )
    n, k = data.draw(st.integers(1, 7), label="N"), data.draw(st.integers(1, 4), label="K")
    outputs = data.draw(st.sampled_from(["all", "sum", tuple(reversed(range(0, k, 2)))]), label="outputs")
    dtype = data.draw(st.sampled_from(["float64", "float32", "bfloat16"]), label="dtype")
    sizes = {
        name: data.draw(st.none() | st.integers(1, most), label=name)
        for name, most in (("batch_size", n + 2), ("output_batch", k + 1), ("unit_size", n + 2))
    }
    codec = data.draw(st.sampled_from(["none", "lz4", "zstd"]), label="codec")
    mode = data.draw(st.sampled_from(MODES), label="mode")
    tile = data.draw(st.none() | st.integers(1, n + 2), label="tile")
    by_leaf, triangle = data.draw(st.booleans(), label="by_leaf"), data.draw(st.booleans(), label="triangle")
    triangle = triangle and mode != "blocks"
    apply, params = random_network(tree, k, data.draw(st.integers(0, 99), label="seed"))
    inputs = np.random.default_rng(n).uniform(-0.5, 0.5, size=(n, 3)).astype(np.float32)

    truth = jacobian(apply, params, inputs, outputs)
    folder = tmp_path_factory.mktemp("property")
    problem = Problem(apply=apply, params=params, inputs=inputs, outputs=outputs)
    store = jacstore.build(problem, folder / "store", dtype=dtype, codec=codec, memory=MEMORY, **sizes)
    rows = check_rows(store, truth, "random", "any")
    kernel = jacstore.gram(
        store, folder / "kernel", mode=mode, tile=tile, by_leaf=by_leaf, triangle=triangle, memory=MEMORY
    )
    against = rows if dtype == "bfloat16" else truth
    check_kernel(kernel.array, against, against, mode, dtype, "random", "any")
    if mode != "blocks":
        whole = kernel.array.compute(scheduler="synchronous")
        np.testing.assert_array_equal(whole, np.swapaxes(whole, -1, -2))
    if by_leaf:
        names = list(kernel.leaf_arrays)
        assert names == [leaf.path for leaf in store.leaves]
        for leaf in store.leaves:
            part = against[..., leaf.offset : leaf.offset + leaf.size]
            check_kernel(kernel.leaf_arrays[leaf.path], part, part, mode, dtype, "random", "by leaf")
