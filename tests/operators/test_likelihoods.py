"""A likelihood is one class: whatever uses likelihoods takes it from where it is registered."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from click.testing import CliRunner
from scipy.special import expit

import jacstore
from jacstore.cli.commands import main
from jacstore.operators.likelihoods import LIKELIHOODS, Diagonal, Likelihood
from jacstore.testing import mlp
from support import error, refused, rows_of

ALPHA = 0.3


class Bernoulli(Likelihood):
    """Outputs that are logits of independent events."""

    name, loss = "bernoulli", "logistic"

    def gradient(self, f, y):
        return expit(f) - y

    def curvature(self, f):
        return Diagonal(expit(f) * expit(-f))

    def root(self, f):
        return np.sqrt(expit(f) * expit(-f))[:, :, None] * np.eye(f.shape[1])


# Negative log-likelihoods of one example.
LOSSES = {
    "gaussian": lambda f, y: jnp.sum((f - y) ** 2) / 2,
    "softmax": lambda f, y: jax.nn.logsumexp(f) * y.sum() - f @ y,
    "bernoulli": lambda f, y: jnp.sum(jnp.logaddexp(0.0, f) - f * y),
}


@pytest.fixture(autouse=True)
def bernoulli(monkeypatch):
    """One more likelihood, registered as those of jacstore are."""
    monkeypatch.setitem(LIKELIHOODS, "bernoulli", Bernoulli())


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    folder = tmp_path_factory.mktemp("place")
    store = jacstore.build(mlp(6), folder / "run.jac", dtype="float64")
    return store, jacstore.gram(store, out=folder / "run.ntk", dtype="float64")


def blocks_of(name, f):
    """Λ `(N, K, K)` by JAX; for targets that are probabilities it does not depend on them."""
    with jax.enable_x64(True):
        one_hot = jnp.eye(f.shape[1])[0]
        return np.asarray(jax.vmap(jax.hessian(lambda one: LOSSES[name](one, one_hot)))(jnp.asarray(f, jnp.float64)))


@pytest.mark.parametrize("name", LOSSES)
def test_the_derivatives_of_a_likelihood_are_those_of_its_loss(name):
    f = np.random.default_rng(0).normal(size=(5, 3)) * 3
    y = np.eye(3)[[0, 2, 1, 1, 0]]
    with jax.enable_x64(True):
        gradients = jax.vmap(jax.grad(LOSSES[name]))(jnp.asarray(f), jnp.asarray(y))
    likelihood, blocks = LIKELIHOODS[name], blocks_of(name, f)
    assert error(likelihood.gradient(f, y), gradients) < 1e-13
    assert error(jacstore.loss_gradients(f, y, likelihood.loss), gradients) < 1e-13
    identity = np.tile(np.eye(3), (5, 1, 1))
    assert error(likelihood.curvature(f).times(identity, slice(None)), blocks) < 1e-13
    root = likelihood.root(f)
    assert error(root @ root.transpose(0, 2, 1), blocks) < 1e-13


@pytest.mark.parametrize("name", LOSSES)
def test_all_that_uses_likelihoods_takes_one_by_its_name(name, place):
    store, kernel = place
    rows, blocks = rows_of(store), blocks_of(name, store.outputs)
    n, k, p = store.n_examples, store.n_outputs, store.n_parameters
    curvature = np.einsum("nkp,nkl,nlq->pq", rows.reshape(n, k, p), blocks, rows.reshape(n, k, p))
    assert error(jacstore.ggn(store, name, ALPHA), curvature + ALPHA * np.eye(p)) < 1e-12
    assert error(jacstore.operator(store).ggn(name) @ np.eye(p), curvature) < 1e-12
    traces = np.trace(curvature), np.trace(np.asarray(jacstore.weighted(kernel, store.outputs, name)))
    assert traces[1] == pytest.approx(traces[0], rel=1e-12)
    given = {"alpha": ALPHA, "n": 2, "key": 1, "likelihood": name}
    by_kernel = jacstore.sample(store, kernel, method="eigh", keep=False, **given)
    streamed = jacstore.sample(store, method="lanczos", error=1e-10, **given)
    assert error(streamed, by_kernel) < 1e-7


@pytest.mark.parametrize("name", LOSSES)
def test_the_flag_takes_every_likelihood_and_help_names_it(name, place, tmp_path):
    store = place[0]
    words = ["--alpha", "1", "--n", "2", "--key", "3", "--out", str(tmp_path / "drawn.npy")]
    ran = CliRunner().invoke(main, ["sample", store.path, *words, "--likelihood", name, "--method", "ggn"])
    assert ran.exit_code == 0, ran.output
    drawn = jacstore.sample(store, alpha=1.0, n=2, key=3, likelihood=name, method="ggn")
    assert np.array_equal(np.load(tmp_path / "drawn.npy"), drawn)
    assert "[gaussian|softmax|bernoulli]" in "".join(CliRunner().invoke(main, ["sample", "--help"]).output.split())


def test_an_unknown_likelihood_is_refused_alike_wherever_it_is_given(place):
    store, kernel = place
    calls = [
        lambda: jacstore.ggn(store, "poisson"),
        lambda: jacstore.operator(store).ggn("poisson"),
        lambda: jacstore.weighted(kernel, store.outputs, "poisson"),
        lambda: jacstore.sample(store, alpha=1.0, n=1, key=0, likelihood="poisson"),
    ]
    texts = {refused(call) for call in calls}
    assert texts == {"--likelihood poisson: allowed are gaussian, softmax, bernoulli (likelihood=)"}


def test_outputs_are_asked_for_only_where_the_curvature_depends_on_them():
    some = jacstore.build(mlp(6, outputs=[0, 2]), None)
    assert 'outputs="all"' in refused(jacstore.ggn, some, "softmax")
    for name in ("gaussian", "bernoulli"):
        assert jacstore.ggn(some, name, ALPHA).shape == (some.n_parameters,) * 2
