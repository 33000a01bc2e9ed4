"""Products with J, the Hessian and the GGN by automatic differentiation, against dense algebra in float64."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.sparse.linalg import cg, lsmr

import jacstore
import jacstore.operators.autodiff
from jacstore import Problem
from jacstore.errors import InvalidRequestError
from jacstore.testing import cnn, dense_outputs, dense_rows, mlp, nested
from support import normal

# Twenty examples of 64 kB.
LARGE = (20, 16_000)
LABELS = np.random.default_rng(3).integers(0, 3, 11)


def cross_entropy(outputs, label):
    return jax.nn.logsumexp(outputs) - outputs[label]


def assert_close(found, truth, limit=1e-11):
    assert found.shape == truth.shape
    assert np.linalg.norm(found - truth) <= limit * np.linalg.norm(truth)


def hessian(problem, loss, targets):
    """The Hessian of the summed loss, dense, in float64; parameters flat in tree order."""
    with jax.enable_x64(True), jax.default_matmul_precision("highest"):
        leaves, treedef = jax.tree_util.tree_flatten(problem.params)
        sizes = np.cumsum([0, *(leaf.size for leaf in leaves)])

        def total(flat):
            parts = [flat[a:b].reshape(x.shape) for a, b, x in zip(sizes, sizes[1:], leaves, strict=False)]
            params = jax.tree_util.tree_unflatten(treedef, parts)
            outputs = jax.vmap(lambda x: problem.apply(params, x))(jnp.asarray(problem.inputs, np.float64))
            return jax.vmap(loss)(outputs, jnp.asarray(targets)).sum()

        flat = jnp.concatenate([jnp.ravel(jnp.asarray(leaf, np.float64)) for leaf in leaves])
        return np.asarray(jax.jit(jax.hessian(total))(flat))


@pytest.mark.parametrize("make", [lambda: mlp(11), lambda: cnn(5, outputs=[2, 0]), nested, lambda: mlp(6, select="w")])
def test_jvp_and_vjp_are_products_with_the_dense_jacobian(make):
    problem = make()
    rows = dense_rows(problem)
    rows = rows.reshape(-1, rows.shape[-1])
    jacobian = jacstore.jacobian_operator(problem, dtype="float64", batch_size=4)
    assert jacobian.shape == rows.shape
    v, u = normal(rows.shape[1], 3), normal(rows.shape[0], 3)
    assert_close(jacobian @ v, rows @ v)
    assert_close(jacobian.T @ u, rows.T @ u)
    assert_close(jacobian @ v[:, 0], rows @ v[:, 0])
    assert_close(jacobian.H @ u[:, 0], rows.T @ u[:, 0])


def test_hvp_and_gvp_are_products_with_the_dense_matrices(limits):
    limits(columns_together=2)
    problem = mlp(11)
    rows, outputs = dense_rows(problem), dense_outputs(problem)
    p = np.exp(outputs) / np.exp(outputs).sum(1, keepdims=True)
    blocks = np.stack([np.diag(row) - np.outer(row, row) for row in p])
    dense = np.einsum("nkp,nkl,nlq->pq", rows, blocks, rows, optimize=True)
    v = normal(66, 5)
    by_array = jacstore.ggn_operator(problem, cross_entropy, LABELS, dtype="float64", batch_size=4)
    by_number = jacstore.ggn_operator(
        problem, lambda outputs, n: cross_entropy(outputs, jnp.asarray(LABELS)[n]), alpha=0.5, dtype="float64"
    )
    assert_close(by_array @ v, dense @ v)
    assert_close(by_number @ v, dense @ v + 0.5 * v)
    exact = hessian(problem, cross_entropy, LABELS)
    second = jacstore.hvp_operator(problem, cross_entropy, LABELS, dtype="float64", batch_size=3)
    assert_close(second @ v, exact @ v)
    assert_close(second.T @ v[:, 0], exact @ v[:, 0])


def test_products_without_a_store_are_those_of_the_store():
    problem = mlp(11)
    store = jacstore.build(problem, None, dtype="float64")
    stored, free = jacstore.operator(store), jacstore.jacobian_operator(problem, dtype="float64")
    v, u = normal(66, 2), normal(33, 2)
    assert_close(free @ v, stored @ v)
    assert_close(free.T @ u, stored.T @ u)
    gvp = jacstore.ggn_operator(problem, cross_entropy, LABELS, dtype="float64")
    assert_close(gvp @ v, stored.ggn("softmax") @ v)
    tree = free.unravel(v, like=problem.params)
    np.testing.assert_array_equal(free.ravel(tree), v)


def test_hessian_and_ggn_agree_where_outputs_are_linear_and_solvers_invert_them():
    x = normal(40, 9).astype(np.float32)
    linear = Problem(apply=lambda w, x: x @ w, params=normal(9, 2).astype(np.float32), inputs=x)
    targets = {"y": normal(40, 2)}

    def squares(outputs, target):
        return ((outputs - target["y"]) ** 2).sum() / 2

    options = {"alpha": 0.1, "dtype": "float64"}
    ggn = jacstore.ggn_operator(linear, squares, targets, **options)
    hvp = jacstore.hvp_operator(linear, squares, targets, **options)
    v = normal(18)
    assert_close(ggn @ v, hvp @ v)
    dense = np.kron(x.astype(np.float64).T @ x, np.eye(2)) + 0.1 * np.eye(18)
    solved, failed = cg(hvp, v, rtol=1e-12)
    assert failed == 0
    assert_close(solved, np.linalg.solve(dense, v), 1e-9)
    jacobian = jacstore.jacobian_operator(linear, dtype="float64")
    fitted = lsmr(jacobian, targets["y"].ravel(), atol=1e-12, btol=1e-12)[0].reshape(9, 2)
    assert_close(fitted, np.linalg.lstsq(x.astype(np.float64), targets["y"])[0], 1e-9)


def test_float32_products_hold_their_bound():
    problem = cnn(5)
    rows = dense_rows(problem).reshape(15, -1)
    jacobian = jacstore.jacobian_operator(problem)
    v, u = normal(rows.shape[1], 2), normal(15, 2)
    assert_close(jacobian @ v, rows @ v, 2e-6)
    assert_close(jacobian.T @ u, rows.T @ u, 2e-6)


def test_batches_shrink_until_their_program_fits():
    problem = mlp(64, sizes=(50, 300, 3))
    jacobian = jacstore.jacobian_operator(problem, memory="2MB")
    rows = jacobian @ normal(jacobian.shape[1], 4)
    (program,) = jacobian._programs._compiled.values()
    assert program.batch < 64 or program.columns < 4
    assert_close(rows, jacstore.jacobian_operator(problem, memory="4GB") @ normal(jacobian.shape[1], 4), 2e-6)


@jax.custom_vjp
def backwards_only(x):
    return x


backwards_only.defvjp(lambda x: (x, None), lambda _, c: (c,))


def test_what_cannot_be_is_refused_in_one_line():
    problem = mlp(11)
    no_jvp = Problem(apply=lambda w, x: backwards_only(x * w), params=np.ones(3, np.float32), inputs=normal(4, 3))
    for call, text in (
        (lambda: jacstore.ggn_operator(problem, lambda outputs, n: outputs), "scalar"),
        (lambda: jacstore.ggn_operator(problem, lambda outputs, n: 1 / 0), "loss raised"),
        (lambda: jacstore.hvp_operator(problem, cross_entropy, LABELS[:5]), "targets="),
        (lambda: jacstore.hvp_operator(problem, cross_entropy, LABELS, alpha=-1), "alpha="),
        (lambda: jacstore.jacobian_operator(problem, dtype="bfloat16"), "dtype="),
        (lambda: jacstore.jacobian_operator(problem, batch_size=0), "batch_size="),
        (lambda: jacstore.jacobian_operator(problem, memory="50kB") @ normal(66, 90), "memory="),
        (lambda: jacstore.jacobian_operator(problem, memory="1500", batch_size=11) @ normal(66), "memory="),
        (lambda: jacstore.jacobian_operator(problem) @ (1j * normal(66)), "real"),
        (lambda: jacstore.jacobian_operator(no_jvp) @ normal(3), "custom_vjp"),
    ):
        with pytest.raises(InvalidRequestError, match=text) as caught:
            call()
        assert "\n" not in str(caught.value)
    assert_close(jacstore.jacobian_operator(no_jvp).T @ np.ones(12), np.float32(no_jvp.inputs).sum(0), 1e-6)


def test_no_columns_narrow_types_and_small_alphas_are_taken():
    problem = jacstore.Problem(
        apply=lambda p, x: jnp.tanh(x @ p), params=normal(3, 2).astype(jnp.bfloat16), inputs=normal(4, 3).astype("f4")
    )
    narrow = jacstore.Problem(
        apply=lambda p, x: jnp.tanh(x.astype(jnp.bfloat16) @ p), params=problem.params, inputs=problem.inputs
    )
    jacobian = jacstore.jacobian_operator(narrow)
    assert (jacobian @ np.zeros((6, 0))).shape == (8, 0) and (jacobian.T @ np.zeros((8, 0))).shape == (6, 0)
    dense = jacobian @ np.eye(6)
    assert np.linalg.norm(jacobian.T @ np.eye(8) - dense.T) <= 0.05 * np.linalg.norm(dense)
    store = jacstore.build(problem, None)
    ggn = jacstore.operator(store, precision="float64").ggn(alpha=1e-8)
    plain = jacstore.operator(store, precision="float64").ggn()
    ones = np.ones(6, np.float16)
    assert ggn @ ones - plain @ ones == pytest.approx(np.full(6, 1e-8), rel=1e-3)
    assert np.isfinite(jacstore.operator(store).ggn(alpha=1e6) @ ones).all()
    params = {"e": np.zeros((0, 3)), "w": np.ones(3)}
    empty = jacstore.Problem(apply=lambda p, x: jnp.stack([x @ p["w"], x[0]]), params=params, inputs=normal(4, 3))
    tree = jacstore.operator(jacstore.build(empty, None)).unravel(np.ones((3, 2)))
    assert tree["e"].shape == (2, 0, 3) and tree["w"].shape == (2, 3)


# --- inputs in memory -------------------------------------------------------------------------------------------------


class Chunked:
    """An array in chunks, as Zarr's are."""

    def __init__(self, chunk):
        self.values = np.random.default_rng(0).standard_normal(LARGE, dtype=np.float32)
        self.shape, self.dtype, self.chunks = LARGE, self.values.dtype, (chunk, LARGE[1])

    def __getitem__(self, at):
        return self.values[at]


def large(chunk):
    return Problem(
        apply=lambda p, x: x[:50] @ p["w"], params={"w": np.ones((50, 3), np.float32)}, inputs=Chunked(chunk)
    )


def reads_of(monkeypatch):
    """The numbers of examples of each read that follows."""
    seen, read = [], Problem.read

    def counted(problem, start, stop):
        seen.append(stop - start)
        return read(problem, start, stop)

    monkeypatch.setattr(Problem, "read", counted)
    return seen


@pytest.mark.parametrize("kind", ["jvp", "vjp", "gvp", "hvp"])
def test_no_more_examples_are_read_at_once_than_memory_allows_with_their_chunks(kind, monkeypatch):
    problem, memory = large(5), 6_000_000
    seen = reads_of(monkeypatch)
    operator = {
        "jvp": jacstore.jacobian_operator,
        "vjp": lambda *given, **named: jacstore.jacobian_operator(*given, **named).T,
        "gvp": lambda *given, **named: jacstore.ggn_operator(*given, cross_entropy, LABELS[:1].repeat(20), **named),
        "hvp": lambda *given, **named: jacstore.hvp_operator(*given, cross_entropy, LABELS[:1].repeat(20), **named),
    }[kind]
    ones = np.ones(60 if kind == "vjp" else 150)
    truth = operator(problem, memory="1GB") @ ones
    each, beside = problem.bytes_held()
    assert max(seen) == 20 and 2 * 20 * each + beside > memory * 3 // 8
    seen.clear()
    assert_close(operator(problem, memory=memory) @ ones, truth, 2e-6)
    assert max(seen) > 1 and 2 * max(seen) * each + beside <= memory * 3 // 8


@pytest.mark.parametrize(("batch_size", "said"), [(None, "smaller chunks"), (20, "smaller batch_size=")])
def test_inputs_whose_chunks_or_batches_do_not_fit_are_refused(batch_size, said):
    problem = large(20 if batch_size is None else 1)
    jacobian = jacstore.jacobian_operator(problem, memory=6_000_000, batch_size=batch_size)
    with pytest.raises(InvalidRequestError, match=said):
        jacobian @ np.ones(150)


def test_memory_of_an_accelerator_is_not_taken_from_that_for_columns(monkeypatch):
    problem = mlp(11)
    truth = jacstore.jacobian_operator(problem) @ np.ones(66)
    monkeypatch.setattr(jacstore.operators.autodiff, "on_accelerator", lambda: True)
    monkeypatch.setattr(jacstore.operators.autodiff, "device_memory", lambda given, budget: 100 * budget.total)
    assert_close(jacstore.jacobian_operator(problem, memory="1GB") @ np.ones(66), truth)
