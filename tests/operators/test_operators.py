"""Products with J, Jᵀ, J Jᵀ and Jᵀ Λ J streamed from a store: equal to dense algebra, each unit read once."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.sparse.linalg import cg, eigsh, lobpcg, lsmr, svds

import jacstore
from helpers_limits import limited
from jacstore import StoreWriter
from jacstore.base.events import SlabDone, Started
from jacstore.errors import (
    DamagedDataError,
    IncompleteError,
    InvalidRequestError,
    RequestMismatchError,
    RunInterruptedError,
)
from jacstore.terms import Conv, Dense, Dot, Index, Leaf, Operand, expand
from jacstore.testing import Counting, Stopping
from support import normal
from tests.terms.test_terms import tiny

# ----------------------------------------------------------------------------------------------------- random stores


class Drawn:
    """Leaves of random geometry, with operands, for a store that no network made."""

    def __init__(self, draw, n_outputs):
        self.draw, self.n_outputs = draw, n_outputs
        self.leaves, self.operands, self.columns, self.rows = [], [], 0, 0

    def number(self, low, high):
        return self.draw(st.integers(low, high))

    def operand(self, role, *shape, ids_below=0):
        operand = Operand(name=f"f{len(self.operands)}", role=role, shape=shape)
        self.operands.append((operand, ids_below))
        return operand.name

    def add(self, shape, *terms):
        size = math.prod(shape)
        path = f"leaf{len(self.leaves)}"
        self.leaves.append(Leaf(path=path, shape=shape, dtype="float32", offset=self.columns, terms=terms))
        self.columns += size

    def scale(self):
        return self.draw(st.sampled_from([1.0, -0.5, 3.0]))

    def dense(self):
        size = self.number(1, 40)
        self.add((size,), Dense(start=self.rows, size=size))
        self.rows += size

    def layer(self):
        """A weight, as it is or transposed, used once or twice, with a bias or without."""
        g, t, c, d = self.number(1, 3), self.number(1, 4), self.number(1, 9), self.number(1, 7)
        views, shape = ((), (g, c, d))
        if self.draw(st.booleans()):
            views, shape = (("reshape", (g, c, d)), ("transpose", (2, 0, 1))), (d, g, c)
        terms, cotangents = [], ""
        for _ in range(self.number(1, 2)):
            cotangents = self.operand("cotangents", g, t, d)
            inputs = self.operand("inputs", g, t, c)
            terms.append(Dot(inputs=inputs, cotangents=cotangents, scale=self.scale(), views=views))
        self.add(shape, *terms)
        if self.draw(st.booleans()):
            self.add((g, d), Dot(inputs=None, cotangents=cotangents, scale=self.scale(), views=()))

    def convolution(self):
        dimensions, groups = self.number(1, 2), self.number(1, 2)
        space = tuple(self.number(2, 5) for _ in range(dimensions))
        window = tuple(self.number(1, 3) for _ in range(dimensions))
        strides = tuple(self.number(1, 2) for _ in range(dimensions))
        dilation = tuple(self.number(1, 2) for _ in range(dimensions))
        spread = tuple(self.number(1, 2) for _ in range(dimensions))
        padding = tuple(self.number(-1, 2) for _ in range(dimensions))
        positions = tuple(self.number(1, 4) for _ in range(dimensions))
        batch, channels, width = self.number(1, 2), self.number(1, 3) * groups, self.number(1, 3) * groups
        block = (*window, channels // groups, width)
        order = tuple(reversed(range(len(block)))) if self.draw(st.booleans()) else None
        term = Conv(
            inputs=self.operand("inputs", batch, *space, channels),
            cotangents=self.operand("cotangents", 1, batch * math.prod(positions), width),
            scale=self.scale(),
            views=(("transpose", order),) if order else (),
            window=window,
            positions=positions,
            strides=strides,
            dilation=dilation,
            padding=padding,
            spread=spread,
            groups=groups,
        )
        self.add(tuple(block[axis] for axis in order) if order else block, term)

    def table(self):
        """A look-up, with or without the product that ties it to an output layer."""
        size, t, d = self.number(1, 12), self.number(1, 5), self.number(1, 6)
        ids = self.operand("ids", t, ids_below=size)
        terms = [
            Index(ids=ids, cotangents=self.operand("cotangents", 1, t, d), scale=self.scale(), views=(), size=size)
        ]
        if self.draw(st.booleans()):
            inputs, cotangents = self.operand("inputs", 1, t, d), self.operand("cotangents", 1, t, size)
            views = (("reshape", (d, size)), ("transpose", (1, 0)))
            terms.append(Dot(inputs=inputs, cotangents=cotangents, scale=self.scale(), views=views))
        self.add((size, d), *terms)


@st.composite
def stores(draw, dtype="float64"):
    """A random store in RAM of one to four layers of every kind, and its rows."""
    n, k = draw(st.integers(1, 7)), draw(st.integers(1, 3))
    drawn = Drawn(draw, k)
    for kind in draw(st.lists(st.sampled_from(["dense", "layer", "convolution", "table"]), min_size=1, max_size=4)):
        getattr(drawn, kind)()
    rng = np.random.default_rng(draw(st.integers(0, 1000)))
    values = {}
    for operand, below in drawn.operands:
        shape = (n, *([k] if operand.role == "cotangents" else []), *operand.shape)
        values[operand.name] = rng.integers(-1, below, shape) if below else rng.standard_normal(shape)
    operands = tuple(operand for operand, _ in drawn.operands)
    unit = draw(st.integers(1, n))
    with StoreWriter(None, tuple(drawn.leaves), n, k, operands=operands, dtype=dtype, unit_size=unit) as writer:
        for start, stop in writer.missing:
            left = {name: held[start:stop] for name, held in values.items()}
            rows = {
                leaf.path: {name: left.pop(name) for name in leaf.operands if name in left}
                if leaf.dense is None
                else rng.standard_normal((stop - start, k, *leaf.shape))
                for leaf in drawn.leaves
            }
            outputs = rng.standard_normal((stop - start, k))
            writer.write_unit(start, rows, outputs=outputs)
    return writer.store


def rows_of(store):
    return store.array.compute(scheduler="synchronous").astype(np.float64)


def assert_close(found, truth, limit=1e-12):
    assert found.shape == truth.shape
    assert np.linalg.norm(found - truth) <= limit * max(np.linalg.norm(truth), 1e-300)


def passes(store, call):
    """What a call returns, and how many times it read what is stored."""
    before = store.decoded_bytes_read
    result = call()
    return result, (store.decoded_bytes_read - before) / store.bytes_decoded


def softmax_blocks(logits):
    p = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
    return np.stack([np.diag(row) - np.outer(row, row) for row in p])


def weighted(rows, blocks):
    """Jᵀ Λ J with a K x K block for each example."""
    by_example = rows.reshape(len(blocks), -1, rows.shape[1])
    return np.einsum("nkp,nkl,nlq->pq", by_example, blocks, by_example, optimize=True)


@settings(max_examples=40, deadline=None)
@given(
    store=stores(),
    m=st.integers(1, 5),
    width=st.sampled_from([1, 8, 4096]),
    depth=st.sampled_from([1, 5, 4096]),
    scratch=st.sampled_from([1, 60, 4_000_000]),
)
def test_products_are_those_of_dense_rows_and_read_each_number_once(store, m, width, depth, scratch):
    with limited(product_width=width, product_depth=depth, product_numbers=scratch, slab_columns=depth):
        compare_products(store, m)


def compare_products(store, m):
    rows, jacobian = rows_of(store), jacstore.operator(store, memory="1GB")
    v, u = normal(rows.shape[1], m), normal(rows.shape[0], m)
    for call, truth, count in (
        (lambda: jacobian @ v, rows @ v, 1),
        (lambda: jacobian.T @ u, rows.T @ u, 1),
        (lambda: jacobian.gram() @ u, rows @ (rows.T @ u), 2),
        (lambda: jacobian.ggn() @ v, rows.T @ (rows @ v), 1),
        (lambda: jacobian.ggn("softmax", 0.5) @ v, weighted(rows, softmax_blocks(store.outputs)) @ v + 0.5 * v, 1),
        (lambda: jacobian @ v[:, 0], rows @ v[:, 0], 1),
        (lambda: jacobian.H @ u[:, 0], rows.T @ u[:, 0], 1),
    ):
        found, read = passes(store, call)
        assert_close(found, truth, 1e-10)
        assert read == count


@settings(max_examples=25, deadline=None)
@given(store=stores(), data=st.data())
def test_leaves_and_examples_are_rows_and_columns_of_the_whole(store, data):
    rows = rows_of(store).reshape(store.n_examples, store.n_outputs, -1)
    paths = data.draw(st.lists(st.sampled_from([leaf.path for leaf in store.leaves]), min_size=1, unique=True))
    examples = np.array(data.draw(st.lists(st.integers(0, store.n_examples - 1), min_size=1, max_size=9)))
    jacobian = jacstore.operator(store, leaves=lambda path: path in paths, examples=examples)
    columns = np.concatenate([np.arange(f.offset, f.offset + f.size) for f in store.leaves if f.path in paths])
    part = rows[examples][..., columns].reshape(-1, len(columns))
    assert jacobian.shape == part.shape
    v, u = normal(part.shape[1], 3), normal(part.shape[0], 3)
    blocks = normal(len(examples), store.n_outputs, store.n_outputs)
    blocks = blocks + blocks.transpose(0, 2, 1)
    diagonal = normal(len(examples), store.n_outputs)
    assert_close(jacobian @ v, part @ v, 1e-10)
    assert_close(jacobian.T @ u, part.T @ u, 1e-10)
    assert_close(jacobian.ggn(blocks) @ v, weighted(part, blocks) @ v, 1e-10)
    for given_as in (diagonal, diagonal.ravel()):
        assert_close(jacobian.ggn(given_as) @ v, part.T @ (diagonal.reshape(-1, 1) * (part @ v)), 1e-10)


# ------------------------------------------------------------------------------------------------------ real networks


@pytest.fixture(scope="module")
def built():
    """Stores of networks with every kind of term, in float64."""
    names = ("tied embedding", "conv, groups")
    with limited(smallest_factored=0):
        return {name: jacstore.build(tiny(name), None, dtype="float64", unit_size=2) for name in names}


def test_products_of_networks_are_those_of_their_rows(built):
    for store in built.values():
        compare_products(store, 3)
    kinds = {term.kind for store in built.values() for leaf in store.leaves for term in leaf.terms}
    assert kinds == {"dot", "conv", "index"}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_narrow_stores_multiply_in_float32_unless_asked_for_float64(dtype):
    @settings(max_examples=10, deadline=None)
    @given(store=stores(dtype=dtype))
    def check(store):
        exact = exact_rows(store)
        v, u = normal(exact.shape[1], 2), normal(exact.shape[0], 2)
        narrow, wide = jacstore.operator(store), jacstore.operator(store, precision="float64")
        assert (narrow.products, wide.products) == (np.float32, np.float64)
        for jacobian, limit in ((narrow, 2e-6), (wide, 1e-12)):
            assert_close(jacobian @ v, exact @ v, limit)
            assert_close(jacobian.T @ u, exact.T @ u, limit)

    check()


def exact_rows(store):
    """Rows in float64 of the stored numbers, whatever their type."""
    held = {o.name: store.read_operand(o.name, 0, store.n_examples, np.float64) for o in store.operands}
    parts = []
    for leaf in store.leaves:
        if leaf.dense is None:
            parts.append(expand(leaf.terms, held, leaf.size))
        else:
            parts.append(np.empty((store.n_examples, store.n_outputs, leaf.size)))
            store.read_rows(0, store.n_examples, leaf.offset, leaf.offset + leaf.size, parts[-1])
    return np.concatenate(parts, -1).reshape(store.n_examples * store.n_outputs, -1)


@pytest.fixture(scope="module")
def mlp():
    """A store of 40 rows x 66 parameters, in float64, and its rows."""
    store = jacstore.build(jacstore_mlp(), None, dtype="float64", unit_size=3)
    return store, rows_of(store)


def jacstore_mlp():
    from jacstore.testing import mlp as problem

    return problem(14)


def test_scipys_solvers_take_the_operators(mlp):
    store, rows = mlp
    jacobian = jacstore.operator(store)
    singular = np.linalg.svd(rows, compute_uv=False)
    np.testing.assert_allclose(np.sort(svds(jacobian, k=4, return_singular_vectors=False)), np.sort(singular[:4]))
    largest = eigsh(jacobian.gram(), k=3, return_eigenvectors=False)
    np.testing.assert_allclose(np.sort(largest), np.sort(singular[:3] ** 2))
    found, _ = lobpcg(jacobian.ggn(), normal(rows.shape[1], 3), tol=1e-9, maxiter=200)
    np.testing.assert_allclose(found, singular[:3] ** 2, rtol=1e-8)
    b = rows @ normal(rows.shape[1])
    assert_close(rows @ lsmr(jacobian, b, atol=1e-13, btol=1e-13, conlim=0, maxiter=5000)[0], b, 1e-8)
    x, failed = cg(jacobian.ggn("softmax", alpha=0.1), normal(rows.shape[1]), rtol=1e-12)
    dense = weighted(rows, softmax_blocks(store.outputs)) + 0.1 * np.eye(rows.shape[1])
    assert failed == 0
    assert_close(x, np.linalg.solve(dense, normal(rows.shape[1])), 1e-9)


def test_a_stored_kernel_makes_gram_products_without_a_pass(mlp):
    store, rows = mlp
    kernel = jacstore.gram(store, tile=5)
    u = normal(len(rows), 2)
    found, read = passes(store, lambda: jacstore.operator(store).gram(kernel) @ u)
    assert_close(found, rows @ (rows.T @ u))
    assert read == 0
    examples = [3, 0, 3]
    part = rows.reshape(14, 3, -1)[examples].reshape(9, -1)
    assert_close(jacstore.operator(store, examples=examples).gram(kernel) @ u[:9], part @ (part.T @ u[:9]))
    other = jacstore.build(jacstore_mlp(), None, dtype="float32")
    with pytest.raises(RequestMismatchError, match="not the kernel of"):
        jacstore.operator(other).gram(kernel)
    with pytest.raises(InvalidRequestError, match="mode trace"):
        jacstore.operator(store).gram(jacstore.gram(store, mode="trace"))
    with pytest.raises(InvalidRequestError, match="leaves="):
        jacstore.operator(store, leaves="layer0").gram(kernel)


def test_pytrees_go_in_and_come_out(mlp):
    store, rows = mlp
    params = jacstore_mlp().params
    jacobian = jacstore.operator(store)
    flat = jacobian.ravel(params)
    assert flat.shape == (66,)
    tree = jacobian.unravel(flat)
    assert set(tree) == {"layer0", "layer1"} and tree["layer0"]["w"].shape == (5, 7)
    np.testing.assert_array_equal(tree["layer1"]["w"], params["layer1"]["w"])
    stacked = {path: {name: np.stack([leaf, 2 * leaf]) for name, leaf in part.items()} for path, part in params.items()}
    columns = jacobian.ravel(stacked)
    assert columns.shape == (66, 2)
    np.testing.assert_array_equal(columns[:, 1], 2 * flat)
    assert jacobian.unravel(columns)["layer0"]["b"].shape == (2, 7)
    part = jacstore.operator(store, leaves="layer1/w")
    moved = part.unravel(part.T @ normal(len(rows)), like=params)
    np.testing.assert_array_equal(moved["layer0"]["w"], params["layer0"]["w"])
    assert_close(moved["layer1"]["w"].ravel(), rows.T[part_of(store, "layer1/w")] @ normal(len(rows)))
    with pytest.raises(InvalidRequestError, match=r"no leaf 'layer0/b'"):
        jacobian.ravel({"layer1": params["layer1"]})
    with pytest.raises(InvalidRequestError, match=r"'layer0/b' of shape \(6,\)"):
        jacobian.ravel({**params, "layer0": {"b": np.zeros(6), "w": params["layer0"]["w"]}})
    with pytest.raises(InvalidRequestError, match="no leaf"):
        jacobian.unravel(flat, like=[params])


def part_of(store, path):
    leaf = next(leaf for leaf in store.leaves if leaf.path == path)
    return slice(leaf.offset, leaf.offset + leaf.size)


def test_what_cannot_be_is_refused_in_one_line(mlp):
    store, _ = mlp
    jacobian = jacstore.operator(store)
    for call, text in (
        (lambda: jacstore.operator(store, leaves="nothing"), "leaves="),
        (lambda: jacstore.operator(store, leaves="("), "leaves="),
        (lambda: jacstore.operator(store, examples=[99]), "examples="),
        (lambda: jacstore.operator(store, examples=[]), "examples="),
        (lambda: jacstore.operator(store, examples=[0.5]), "examples="),
        (lambda: jacstore.operator(store, precision="fast"), "precision="),
        (lambda: jacstore.operator(store, memory="1kB") @ normal(66), "memory="),
        (lambda: jacobian.ggn("no-such-likelihood"), "likelihood="),
        (lambda: jacobian.ggn(np.ones(5)), "weights="),
        (lambda: jacobian.ggn(np.arange(14 * 9.0).reshape(14, 3, 3)), "symmetric"),
        (lambda: jacobian.ggn(alpha=-1), "alpha="),
        (lambda: jacobian @ (1j * normal(66)), "real"),
        (lambda: jacobian.unravel(normal(5)), "shape"),
    ):
        with pytest.raises(InvalidRequestError, match=text) as caught:
            call()
        assert "\n" not in str(caught.value)
    assert (jacobian @ normal(66, 0)).shape == (42, 0)
    assert (jacobian.ggn() @ normal(66, 0)).shape == (66, 0)
    chosen = jacstore.build(mlp_with(outputs=[0, 2]), None)
    with pytest.raises(InvalidRequestError, match='outputs="all"'):
        jacstore.operator(chosen).ggn("softmax")
    with StoreWriter(None, {"w": (4,)}, 3, 1) as writer:
        with pytest.raises(IncompleteError):
            jacstore.operator(writer.store)
        writer.write_unit(0, {"w": np.ones((3, 1, 4))}) if writer.missing == [(0, 3)] else [
            writer.write_unit(a, {"w": np.ones((b - a, 1, 4))}) for a, b in writer.missing
        ]
    with pytest.raises(InvalidRequestError, match="outputs="):
        jacstore.operator(writer.store).ggn("softmax")


def mlp_with(**fields):
    from jacstore.testing import mlp as problem

    return problem(14, **fields)


# ------------------------------------------------------------------------------------------------- the matrix itself


@settings(max_examples=25, deadline=None)
@given(
    store=stores(), likelihood=st.sampled_from(["gaussian", "softmax", "blocks"]), rows=st.sampled_from([1, 4, 4096])
)
def test_the_matrix_is_that_of_dense_rows_in_one_pass(store, likelihood, rows):
    dense, n, k = rows_of(store), store.n_examples, store.n_outputs
    blocks = {"gaussian": np.tile(np.eye(k), (n, 1, 1)), "softmax": softmax_blocks(store.outputs)}.get(likelihood)
    if blocks is None:
        blocks = normal(n, k, k)
        blocks = likelihood = blocks + blocks.transpose(0, 2, 1)
    with limited(ggn_rows=rows, ggn_columns=7 * rows):
        found, read = passes(store, lambda: jacstore.ggn(store, likelihood, 0.3, memory="1GB"))
    assert read == 1
    np.testing.assert_array_equal(found, found.T)
    assert_close(found, weighted(dense, blocks) + 0.3 * np.eye(dense.shape[1]), 1e-11)


def test_a_matrix_on_disk_is_continued_not_begun_again(mlp, tmp_path, limits):
    store, rows = mlp
    out, options = tmp_path / "run.ggn", {"likelihood": "softmax", "alpha": 0.1}
    limits(checkpoint_speed=1e15)
    stopping = Stopping(SlabDone, after=3)
    with pytest.raises(RunInterruptedError):
        jacstore.ggn(store, out=out, listener=stopping, stop=stopping.stop, **options)
    counting = Counting()
    found = jacstore.ggn(store, out=out, listener=counting, **options)
    (started,) = counting.of(Started)
    assert (started.done, len(counting.of(SlabDone)), started.total) == (3, 2, 5)
    truth = weighted(rows, softmax_blocks(store.outputs)) + 0.1 * np.eye(66)
    assert_close(found, truth)
    np.testing.assert_array_equal(found, jacstore.ggn(store, **options))
    again, read = passes(store, lambda: jacstore.ggn(store, out=out, **options))
    assert read == 0
    np.testing.assert_array_equal(again, found)
    np.testing.assert_array_equal(np.load(out / "ggn.npy"), found)
    assert sorted(path.name for path in out.iterdir()) == ["ggn.npy", "ledger"]
    with pytest.raises(RequestMismatchError, match=r"alpha: 0\.1 -> 0\.2"):
        jacstore.ggn(store, "softmax", 0.2, out=out)
    with open(out / "ggn.npy", "r+b") as file:
        file.seek(500)
        file.write(b"x")
    with pytest.raises(DamagedDataError, match="overwrite"):
        jacstore.ggn(store, out=out, **options)
    np.testing.assert_array_equal(jacstore.ggn(store, out=out, overwrite=True, **options), found)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "mine.txt").touch()
    with pytest.raises(InvalidRequestError, match="holds 'mine"):
        jacstore.ggn(store, out=tmp_path / "other")


def test_a_matrix_that_does_not_fit_is_refused_before_anything_is_read(mlp):
    store, _ = mlp
    before = store.decoded_bytes_read
    with pytest.raises(InvalidRequestError, match=r"66 x 66 takes 34.8 kB.*memory="):
        jacstore.ggn(store, memory="30kB")
    assert store.decoded_bytes_read == before
    with pytest.raises(InvalidRequestError, match="likelihood="):
        jacstore.ggn(store, "no-such-likelihood")


# ------------------------------------------------------------------------------------------------------------- memory

MEASURE = """
import json, pathlib, sys
import numpy as np
import jacstore

def status(key):
    line = next(l for l in pathlib.Path("/proc/self/status").read_text().splitlines() if l.startswith(key))
    return int(line.split()[1]) * 1024

path, memory, m = sys.argv[1], sys.argv[2], int(sys.argv[3])
small = jacstore.operator(path, memory="1GB", examples=slice(0, 1), leaves="small")
small.ggn() @ np.ones(small.shape[1])
np.ones((700, 700), np.float32) @ np.ones((700, 700), np.float32)
jacobian = jacstore.operator(path, memory=memory)
v, u = np.ones((jacobian.shape[1], m)), np.ones((jacobian.shape[0], m))
found = {}
calls = {"J v": lambda: jacobian @ v, "J.T u": lambda: jacobian.T @ u, "ggn": lambda: jacobian.ggn() @ v}
for name, call in calls.items():
    pathlib.Path("/proc/self/clear_refs").write_text("5")
    baseline, before = status("VmRSS"), jacobian.store.decoded_bytes_read
    call()
    passes = (jacobian.store.decoded_bytes_read - before) / jacobian.store.bytes_decoded
    found[name] = [status("VmHWM") - baseline, passes]
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def large(tmp_path_factory):
    """A store of 20 MB of rows and 8 MB of factors on disk."""
    path = tmp_path_factory.mktemp("operators") / "large.jac"
    n, c, d, dense = 2000, 600, 400, 2500
    leaves = (
        Leaf(path="small", shape=(16,), dtype="float32", offset=0, terms=(Dense(start=0, size=16),)),
        Leaf(path="rows", shape=(dense,), dtype="float32", offset=16, terms=(Dense(start=16, size=dense),)),
        Leaf(
            path="layer",
            shape=(d, c),
            dtype="float32",
            offset=16 + dense,
            terms=(Dot(inputs="a", cotangents="d", scale=1.0, views=(("reshape", (c, d)), ("transpose", (1, 0)))),),
        ),
    )
    operands = (
        Operand(name="a", role="inputs", shape=(1, 1, c)),
        Operand(name="d", role="cotangents", shape=(1, 1, d)),
    )
    with StoreWriter(path, leaves, n, 1, operands=operands, memory="50MB") as writer:
        for start, stop in writer.missing:
            rng = np.random.default_rng(start)
            count = stop - start
            rows = {leaf.path: rng.standard_normal((count, 1, leaf.size), np.float32) for leaf in leaves[:2]}
            factors = {
                "a": rng.standard_normal((count, 1, 1, c), np.float32),
                "d": rng.standard_normal((count, 1, 1, 1, d), np.float32),
            }
            writer.write_unit(start, {**rows, "layer": factors}, norms=np.ones((count, 1, 3)))
    return path


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs Linux's /proc")
@pytest.mark.parametrize(("memory", "columns", "ggn_passes"), [("20MB", 1, 1), ("25MB", 4, 2), ("90MB", 6, 1)])
def test_products_stay_within_memory_and_read_the_store_once(large, memory, columns, ggn_passes):
    command = [sys.executable, "-c", MEASURE, str(large), memory, str(columns)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    budget = int(memory.removesuffix("MB")) * 1_000_000
    for name, (extra, read) in json.loads(done.stdout).items():
        print(f"{name}, {columns} columns, --memory {memory}: {extra / 1e6:.1f} MB, {read} passes")
        assert extra <= 1.15 * budget
        assert read == (ggn_passes if name == "ggn" else 1)
