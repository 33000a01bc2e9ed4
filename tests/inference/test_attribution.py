"""Claims about attribution and training curves: equal to gradients formed one by one, lazy, never whole in memory."""

from __future__ import annotations

import functools
import tracemalloc

import dask.array as da
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.linalg import expm
from scipy.special import softmax

import jacstore
from jacstore import KernelFactor
from jacstore.errors import InvalidRequestError
from jacstore.testing import dense_outputs, dense_rows, mlp
from support import error

N, M, K = 14, 9, 3


def refused(call, *given, **named):
    with pytest.raises(InvalidRequestError) as caught:
        call(*given, **named)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    """Two checkpoints of a network: their problems for N training and M other examples, and kernels in float64."""
    folder, found = tmp_path_factory.mktemp("checkpoints"), []
    for seed in (0, 1):
        params = mlp(1, seed=seed).params
        pair = [mlp(size, seed=7 + size, params=params) for size in (N, M)]
        stores = [
            jacstore.build(p, folder / f"{seed}-{p.n_examples}.jac", dtype="float64", codec="none", memory="500MB")
            for p in pair
        ]
        kernel = jacstore.gram(stores[0], out=folder / f"{seed}.ntk", tile=4, memory="500MB")
        cross = jacstore.gram(stores[1], stores[0], folder / f"{seed}-cross.ntk", tile=4, memory="500MB")
        found.append((*pair, kernel, cross))
    return found


@functools.cache
def truth_of(problem):
    """Rows and outputs of one of the problems, computed once."""
    return dense_rows(problem), dense_outputs(problem)


def loss_rows(problem, labels, loss):
    """The gradient of each example's loss, by `jax.grad` of the loss itself, in float64: `(N, P)`."""
    rows, outputs = truth_of(problem)
    with jax.enable_x64(True):
        slopes = jax.vmap(jax.grad(loss))(jnp.asarray(outputs), jnp.asarray(labels))
    return np.einsum("nk,nkp->np", np.asarray(slopes), rows)


def cross_entropy(outputs, label):
    return -jax.nn.log_softmax(outputs)[label]


def squared(outputs, target):
    return jnp.sum((outputs - target) ** 2) / 2


def residuals_of(problem, labels, loss):
    return jacstore.loss_gradients(truth_of(problem)[1], labels, loss)


LABELS, OTHER_LABELS = np.arange(N) % K, np.arange(M)[::-1] % K


def test_gradient_dots_are_inner_products_of_loss_gradients(checkpoints):
    train, other, kernel, cross = checkpoints[0]
    a, b = loss_rows(train, LABELS, cross_entropy), loss_rows(other, OTHER_LABELS, cross_entropy)
    r, s = residuals_of(train, LABELS, "softmax"), residuals_of(other, OTHER_LABELS, "softmax")
    scores = jacstore.gradient_dot(cross, s, r)
    assert isinstance(scores, da.Array) and scores.chunks == ((4, 4, 1), (4, 4, 4, 2))
    assert error(scores, b @ a.T) < 1e-10
    assert error(jacstore.gradient_dot(kernel, r), a @ a.T) < 1e-10
    assert error(jacstore.gradient_dot(da.from_array(np.asarray(cross.array), chunks=5), s, r), b @ a.T) < 1e-10
    targets = np.random.default_rng(0).normal(size=(N, K))
    a = loss_rows(train, targets, squared)
    assert error(jacstore.gradient_dot(kernel, residuals_of(train, targets, "squared")), a @ a.T) < 1e-10


def test_scores_of_several_checkpoints_are_added(checkpoints):
    rates, truth = (0.1, 0.03), 0.0
    kernels, rows, columns = [], [], []
    for rate, (train, other, _, cross) in zip(rates, checkpoints, strict=True):
        a, b = loss_rows(train, LABELS, cross_entropy), loss_rows(other, OTHER_LABELS, cross_entropy)
        truth = truth + rate * b @ a.T
        kernels.append(cross)
        rows.append(residuals_of(other, OTHER_LABELS, "softmax"))
        columns.append(residuals_of(train, LABELS, "softmax"))
    assert error(jacstore.gradient_dot(kernels, rows, columns, weights=rates), truth) < 1e-10
    summed = jacstore.gradient_dot(kernels, rows, columns)
    assert error(summed, sum(jacstore.gradient_dot(*one) for one in zip(kernels, rows, columns, strict=True))) < 1e-12


@pytest.mark.parametrize("method", ["cholesky", "eigh"])
@pytest.mark.parametrize("alpha", [1e-3, 1.0])
def test_damped_influence_is_the_inner_product_in_the_inverse_precision(method, alpha, checkpoints):
    train, other, kernel, cross = checkpoints[0]
    j, g = (truth_of(problem)[0].reshape(-1, 66) for problem in (train, other))
    precision = alpha * np.eye(j.shape[1]) + j.T @ j
    factor = KernelFactor(kernel, alpha, method)
    assert error(jacstore.influence(factor, cross), g @ np.linalg.solve(precision, j.T)) < 1e-8
    a, b = loss_rows(train, LABELS, cross_entropy), loss_rows(other, OTHER_LABELS, cross_entropy)
    r, s = residuals_of(train, LABELS, "softmax"), residuals_of(other, OTHER_LABELS, "softmax")
    scores = jacstore.influence(factor, cross, s, r)
    assert isinstance(scores, da.Array)
    assert error(scores, b @ np.linalg.solve(precision, a.T)) < 1e-8
    assert error(scores[2:5, ::3], (b @ np.linalg.solve(precision, a.T))[2:5, ::3]) < 1e-8


def test_influence_says_how_a_prediction_changes_with_a_target(checkpoints):
    _, _, kernel, cross = checkpoints[0]
    factor, y = KernelFactor(kernel, 0.1), np.random.default_rng(0).normal(size=(N, K))
    moved = y.copy()
    moved[4, 1] += 1
    change = factor.predict(cross, moved) - factor.predict(cross, y)
    assert error(change.ravel(), jacstore.influence(factor, cross)[:, 4 * K + 1].compute()) < 1e-10


def test_the_largest_and_smallest_scores_are_found_and_are_never_whole_in_memory():
    size, tile = 2000, 200
    draw = np.random.default_rng(0).normal(size=(size, size))
    lazy = da.from_array(draw, chunks=tile).map_blocks(lambda block: block * 2)
    jacstore.top_examples(lazy[:tile, :tile], 1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(da.core.config.config, "scheduler", "synchronous")
        tracemalloc.start()
        top = jacstore.top_examples(lazy, 7)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert peak < draw.nbytes / 4
    order = np.argsort(-draw, axis=1)[:, :7]
    assert np.array_equal(top.indices, order)
    assert np.array_equal(top.scores, 2 * np.take_along_axis(draw, order, 1))
    small = jacstore.top_examples(lazy[:40], 3, largest=False)
    assert np.array_equal(small.indices, np.argsort(draw[:40], axis=1)[:, :3])
    assert "1 <= k <= N" in refused(jacstore.top_examples, lazy, size + 1)


def test_top_examples_of_a_stored_kernel(checkpoints):
    train, other, _, cross = checkpoints[0]
    r, s = residuals_of(train, LABELS, "softmax"), residuals_of(other, OTHER_LABELS, "softmax")
    scores = jacstore.gradient_dot(cross, s, r)
    top = jacstore.top_examples(scores, 6)
    dense = np.asarray(scores)
    assert np.array_equal(top.indices, np.argsort(-dense, axis=1)[:, :6])
    assert np.array_equal(top.scores, -np.sort(-dense, axis=1)[:, :6])


def test_loss_gradients_are_those_of_jax():
    outputs, labels = np.random.default_rng(0).normal(size=(N, K)) * 4, LABELS
    truth = jax.vmap(jax.grad(cross_entropy))(jnp.asarray(outputs, jnp.float32), jnp.asarray(labels))
    assert error(jacstore.loss_gradients(outputs, labels), truth) < 1e-5
    soft = softmax(np.random.default_rng(1).normal(size=(N, K)), 1)
    assert error(jacstore.loss_gradients(outputs, soft), softmax(outputs, 1) - soft) < 1e-14
    assert error(jacstore.loss_gradients(outputs, labels, "squared"), outputs - np.eye(K)[labels]) < 1e-14
    assert "squared, softmax" in refused(jacstore.loss_gradients, outputs, labels, "hinge")
    for wrong in (labels + 1, labels[1:], labels.astype(float), np.ones((N, K + 1))):
        assert "below 3" in refused(jacstore.loss_gradients, outputs, wrong)


def test_what_does_not_belong_together_is_refused(checkpoints, tmp_path):
    train, other, kernel, cross = checkpoints[0]
    r, s = residuals_of(train, LABELS, "softmax"), residuals_of(other, OTHER_LABELS, "softmax")
    assert "rectangular" in refused(jacstore.gradient_dot, cross, s)
    assert "column_residuals has shape (9, 3)" in refused(jacstore.gradient_dot, cross, s, s)
    assert "every checkpoint" in refused(jacstore.gradient_dot, [kernel, kernel], [r])
    assert "every checkpoint" in refused(jacstore.gradient_dot, [kernel], [r], weights=[1.0, 2.0])
    assert "all need the same" in refused(jacstore.gradient_dot, [kernel, cross], [r, s], [r, r])
    trace = jacstore.gram(f"{kernel.path}/{kernel.stores[0]}", out=tmp_path / "t.ntk", mode="trace")
    assert "mode trace" in refused(jacstore.gradient_dot, trace, r)
    grid = KernelFactor(kernel, [1.0, 2.0], "eigh")
    assert "factor.at(alpha)" in refused(jacstore.influence, grid, cross)
    assert "both residuals=" in refused(jacstore.influence, grid.at(1.0), cross, s)
    assert "gram(other_store, store)" in refused(jacstore.influence, grid.at(1.0), np.ones((27, 39)))


# --- training curves --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rank", [6, 40])
def test_training_curves_are_those_of_the_differential_equation(rank):
    draw = np.random.default_rng(0)
    j, other = (draw.normal(size=(size, rank)) / 4 for size in (12 * 2, 5 * 2))
    gram, cross = j @ j.T, other @ j.T
    y, f0, y_cross, f0_cross = (draw.normal(size=(size, 2)) for size in (12, 12, 5, 5))
    times = np.array([0.0, 1e-3, 0.3, 4.0, 50.0])
    factor = KernelFactor(gram, 1.0, "eigh", outputs=2)
    curve = jacstore.gradient_flow(factor, times, y, f0, cross=cross, f0_cross=f0_cross, y_cross=y_cross)
    # The whole system at once: d(train, test)/dt = -(G, G*) (train - y).
    whole = np.zeros((34, 34))
    whole[:24, :24], whole[24:, :24] = -gram, -cross
    start = np.concatenate([(f0 - y).ravel(), f0_cross.ravel()])
    for n, t in enumerate(times):
        state = expm(t * whole) @ start
        assert error(curve.train[n], y + state[:24].reshape(12, 2)) < 1e-10
        assert error(curve.test[n], state[24:].reshape(5, 2)) < 1e-10
    assert error(curve.train_error, np.mean((curve.train - y) ** 2, (1, 2))) < 1e-10
    assert error(curve.test_error, np.mean((curve.test - y_cross) ** 2, (1, 2))) < 1e-12
    assert np.all(np.diff(curve.train_error) < 0) and np.array_equal(curve.times, times)


def test_the_end_of_training_is_regression_without_damping():
    draw = np.random.default_rng(0)
    j, other = draw.normal(size=(10, 30)), draw.normal(size=(4, 30))
    y = draw.normal(size=10)
    factor = KernelFactor(j @ j.T, 1e-9, "eigh")
    curve = jacstore.gradient_flow(factor, [1e6], y, cross=other @ j.T)
    assert error(curve.train[0], y) < 1e-10
    assert error(curve.test[0], other @ np.linalg.lstsq(j, y, rcond=None)[0]) < 1e-8
    assert curve.test_error is None and jacstore.gradient_flow(factor, [1.0], y).test is None


def test_a_direction_without_curvature_moves_at_a_steady_rate():
    # An example whose gradient is zero never moves; one that only the others see moves as t at first.
    gram = np.diag([2.0, 0.0])
    curve = jacstore.gradient_flow(
        KernelFactor(gram, 1.0, "eigh"), [0.5, 7.0], np.array([1.0, 3.0]), cross=np.array([[0.0, 0.1]])
    )
    assert error(curve.train, [[1 - np.exp(-1.0), 0], [1 - np.exp(-14.0), 0]]) < 1e-14
    assert error(curve.test, [[0.1 * 0.5 * 3], [0.1 * 7 * 3]]) < 1e-14


def test_curves_that_cannot_be_are_refused():
    factor = KernelFactor(np.eye(3), 1.0, "eigh")
    for times in ([-1.0], [np.inf], [np.nan], 1.0):
        assert "finite numbers (T,)" in refused(jacstore.gradient_flow, factor, times, np.ones(3))
    assert "needs cross=" in refused(jacstore.gradient_flow, factor, [1.0], np.ones(3), y_cross=np.ones(2))
    assert 'method="eigh"' in refused(jacstore.gradient_flow, KernelFactor(np.eye(3), 1.0), [1.0], np.ones(3))
