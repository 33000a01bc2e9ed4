"""Weights inside of scans: the steps are positions of one product, scanned layers are its groups."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jacstore
from jacstore import Problem
from jacstore.testing import dense_kernel, dense_rows, kernel_error


@pytest.fixture(autouse=True)
def _small_leaves_count(limits):
    limits(smallest_factored=0)


def normal(*shape, seed=7):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32) / max(1, shape[-1]) ** 0.5


def two(y):
    flat = jnp.tanh(jnp.ravel(y))
    return jnp.stack([flat.sum(), (flat * jnp.arange(flat.size) / flat.size).sum()])


T, C, H, L = 5, 14, 16, 6
RNN = {"u": normal(H, H), "v": normal(H), "w": normal(C, H)}
LSTM = {"b": normal(4 * H), "hh": normal(4 * H, H), "ih": normal(4 * H, C)}
FLAX = {
    "b": {gate: normal(H, seed=n) for n, gate in enumerate("ifgo")},
    "back": {gate: normal(H, H, seed=4 + n) for n, gate in enumerate("ifgo")},
    "given": {gate: normal(C, H, seed=8 + n) for n, gate in enumerate("ifgo")},
}
STACK = {"b": normal(L, H), "w": normal(L, H, H)}


def rnn(params, x, reverse=False):
    def step(h, xt):
        h = jnp.tanh(xt @ params["w"] + h @ params["u"] + params["v"])
        return h, h

    return two(jax.lax.scan(step, jnp.zeros(H, x.dtype), x, reverse=reverse)[1])


def lstm(params, x):
    def step(carry, xt):
        h, c = carry
        i, f, g, o = jnp.split(params["ih"] @ xt + params["hh"] @ h + params["b"], 4)
        c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
        h = jax.nn.sigmoid(o) * jnp.tanh(c)
        return (h, c), None

    return two(jax.lax.scan(step, (jnp.zeros(H, x.dtype), jnp.zeros(H, x.dtype)), x)[0][0])


def flax_lstm(params, x):
    """As in flax's OptimizedLSTMCell: weights of gates are joined on either side, and either product is split."""

    def joined(weights, given):
        return jnp.split(given @ jnp.concatenate([weights[gate] for gate in "ifgo"], -1), 4, -1)

    def step(carry, xt):
        h, c = carry
        parts = zip(joined(params["given"], xt), joined(params["back"], h), "ifgo", strict=True)
        i, f, g, o = (a + b + params["b"][gate] for a, b, gate in parts)
        c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
        h = jax.nn.sigmoid(o) * jnp.tanh(c)
        return (h, c), None

    return two(jax.lax.scan(step, (jnp.zeros(H, x.dtype), jnp.zeros(H, x.dtype)), x)[0][0])


def gates_side_by_side(params, x):
    """An LSTM whose gates have weights of their own, joined for one product: their gradients are parts of it."""

    def step(carry, xt):
        h, c = carry
        kernels = jnp.concatenate([params[gate] for gate in "fgio"], -1)
        f, g, i, o = jnp.split(jnp.concatenate([xt, h]) @ kernels, 4, -1)
        c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
        h = jax.nn.sigmoid(o) * jnp.tanh(c)
        return (h, c), None

    return two(jax.lax.scan(step, (jnp.zeros(H, x.dtype), jnp.zeros(H, x.dtype)), x)[0][0])


def parts_of_one_weight(params, x):
    """A weight used reversed, halved and in slices at every step."""

    def step(h, xt):
        h = jnp.tanh(h @ params[:H, ::-1] / 2 + xt @ params[H:])
        return h, h

    return two(jax.lax.scan(step, jnp.zeros(H, x.dtype), x)[1])


def layers_in_parts(params, x):
    """Scanned layers whose stacked weights are joined and halved for their product."""

    def step(h, layer):
        a, b = jnp.split(h @ (jnp.concatenate([layer["a"], layer["b"]], -1) / 2), 2, -1)
        return h + jnp.tanh(a) * b, None

    return two(jax.lax.scan(step, x, params)[0])


def mapped(params, x):
    return two(jax.lax.map(lambda xt: jnp.tanh(xt @ params["w"] + params["v"]) @ params["u"], x))


def layers(params, x, wrap=lambda f: f):
    @wrap
    def step(h, layer):
        return h + jnp.tanh(h @ layer["w"] + layer["b"]), None

    return two(jax.lax.scan(step, x, params)[0])


def by_hand(params, x, order=range(L)):
    for n in order:
        x = x + jnp.tanh(x @ params["w"][n] + params["b"][n])
    return two(x)


def layers_of_sequences(params, x):
    """Scanned layers on a sequence, each with a recurrence of its own: a scan in a scan."""

    def layer(x, p):
        def step(h, xt):
            h = jnp.tanh(xt @ p["w"] + h @ p["u"])
            return h, h

        return x + jax.lax.scan(step, jnp.zeros(H, x.dtype), x)[1], None

    return two(jax.lax.scan(layer, x, params)[0])


def decoder(params, ids):
    """A table that is looked up at every step, and its transpose that gives the logits."""

    def step(h, i):
        h = jnp.tanh(params["table"][i] + h @ params["u"])
        return h, jnp.tanh(h @ params["head"])

    return two(jax.lax.scan(step, jnp.zeros(H, params["u"].dtype), ids)[1])


def inside_and_outside(params, x):
    def step(h, xt):
        return jnp.tanh(h + xt @ params), None

    h, _ = jax.lax.scan(step, x[0] @ params, x)
    return two(h @ params[:H, :])


def sums_so_far(params, x, read=lambda total: total):
    def step(total, xt):
        total = total + jnp.outer(xt, xt) @ params
        return total, read(total)

    return two(jax.lax.scan(step, jnp.zeros(params.shape, x.dtype), x)[1])


# (function, parameters, inputs, terms, numbers stored of the weights per example; None: not counted)
SEQUENCES = normal(4, T, C)
FOUND = {
    "rnn": (rnn, RNN, SEQUENCES, "dot dot dot"),
    "rnn, backwards": (lambda p, x: rnn(p, x, reverse=True), RNN, SEQUENCES, "dot dot dot"),
    "lstm": (lstm, LSTM, SEQUENCES, "dot dot dot"),
    "lstm of gates side by side": (
        gates_side_by_side,
        {gate: normal(C + H, H, seed=n) for n, gate in enumerate("fgio")},
        SEQUENCES,
        "dot dot dot dot",
    ),
    "lstm of flax": (flax_lstm, FLAX, SEQUENCES, " ".join(["dense"] * 4 + ["dot"] * 8)),
    "parts of one weight": (parts_of_one_weight, normal(H + C, H), SEQUENCES, "dot+dot"),
    "layers in parts": (
        layers_in_parts,
        {"a": normal(L, H, H), "b": normal(L, H, H, seed=8)},
        normal(4, H),
        "dot dot",
    ),
    "map": (mapped, RNN, SEQUENCES, "dot dot dot"),
    "scanned layers": (layers, STACK, normal(4, H), "dot dot"),
    "scanned layers under remat": (lambda p, x: layers(p, x, jax.checkpoint), STACK, normal(4, H), "dot dot"),
    "scanned layers under jit": (lambda p, x: layers(p, x, jax.jit), STACK, normal(4, H), "dot dot"),
    "scanned layers of sequences": (
        layers_of_sequences,
        {"u": normal(3, H, H), "w": normal(3, H, H)},
        normal(4, 3, H),
        "dot dot",
    ),
    "stacked layers by a loop": (by_hand, STACK, normal(4, H), "dense dot"),
    "stacked layers, some twice": (
        lambda p, x: by_hand(p, x, (0, 2, 2, 5)),
        STACK,
        normal(4, H),
        "dense dot+dot",
    ),
    "look-ups at every step": (
        decoder,
        {"head": normal(H, 40), "table": normal(60, H), "u": normal(H, H)},
        np.random.default_rng(0).integers(0, 60, (4, T)),
        "dot index dot",
    ),
    "sums so far": (sums_so_far, normal(3, 4), normal(3, 3, 3), "dense"),
    "sums so far, read": (lambda p, x: sums_so_far(p, x, jnp.tanh), normal(3, 4), normal(3, 3, 3), "dense"),
    "inside and outside": (inside_and_outside, normal(16, 16), normal(4, 3, 16), "dot+dot+dot"),
}


def problem_of(name):
    apply, params, inputs, _ = FOUND[name]
    return Problem(apply=apply, params=params, inputs=inputs)


@pytest.mark.parametrize("name", FOUND)
def test_rows_norms_and_kernels_of_scanned_weights_are_those_of_jacrev(name):
    problem = problem_of(name)
    rows = dense_rows(problem)
    for layout in ("auto", "dense"):
        store = jacstore.build(problem, None, dtype="float64", layout=layout)
        found = store.array.compute(scheduler="synchronous").reshape(rows.shape)
        assert np.linalg.norm(found - rows) <= 1e-12 * np.linalg.norm(rows)
        np.testing.assert_allclose(store.norms.sum(-1), np.square(rows).sum(-1), rtol=1e-10)
        if layout == "auto":
            assert (
                " ".join("+".join(sorted(term.kind for term in leaf.terms)) for leaf in store.leaves) == FOUND[name][3]
            )
            kernel = jacstore.gram(store).array.compute(scheduler="synchronous")
            assert kernel_error(kernel, dense_kernel(rows)) <= 1e-12


def test_weights_of_one_gate_share_its_cotangents_though_each_product_is_split():
    store = jacstore.build(problem_of("lstm of flax"), None, dtype="float64", layout="factored")
    of = {leaf.path: leaf.terms[0].cotangents for leaf in store.leaves if not leaf.dense}
    assert all(of[f"back/{gate}"] == of[f"given/{gate}"] for gate in "ifgo")
    assert sum(operand.role == "cotangents" for operand in store.operands) == 4


def test_scanned_layers_store_no_more_than_unrolled_ones():
    x = normal(4, H)
    scanned = jacstore.build(Problem(apply=layers, params=STACK, inputs=x), None, dtype="float64", layout="factored")

    def unrolled(params, x):
        for layer in params:
            x = x + jnp.tanh(x @ layer["w"] + layer["b"])
        return two(x)

    each = [{"b": STACK["b"][n], "w": STACK["w"][n]} for n in range(L)]
    by_layer = jacstore.build(Problem(apply=unrolled, params=each, inputs=x), None, dtype="float64", layout="factored")
    assert scanned.bytes_decoded == by_layer.bytes_decoded


def test_a_long_scan_of_a_small_weight_keeps_its_sum_inside():
    def apply(params, x):
        return two(jax.lax.scan(lambda h, xt: (jnp.tanh(h @ params + xt), None), jnp.zeros(2, x.dtype), x)[0])

    problem = Problem(apply=apply, params=normal(2, 2), inputs=normal(3, 200, 2))
    store = jacstore.build(problem, None, dtype="float64")
    assert store.leaves[0].dense
    rows = dense_rows(problem)
    found = store.array.compute(scheduler="synchronous").reshape(rows.shape)
    assert np.linalg.norm(found - rows) <= 1e-12 * np.linalg.norm(rows)


def test_a_store_that_has_a_leaf_as_rows_is_continued_with_rows(monkeypatch, tmp_path):
    """As an earlier version, which found no factors inside of scans, has begun it."""
    problem = problem_of("rnn")
    with monkeypatch.context() as earlier:
        earlier.setattr("jacstore.rows.trace.backward._opened", lambda eqn, inputs: None)
        begun = jacstore.build(problem, tmp_path / "run.jac", dtype="float64", unit_size=2, part="1/2")
    assert all(leaf.dense for leaf in begun.leaves) and not begun.complete
    store = jacstore.build(problem, tmp_path / "run.jac", dtype="float64")
    assert store.complete and store.report["units_reused"] == 1
    rows = dense_rows(problem)
    found = store.array.compute(scheduler="synchronous").reshape(rows.shape)
    assert np.linalg.norm(found - rows) <= 1e-12 * np.linalg.norm(rows)


@pytest.mark.parametrize("kind", ["dot", "index"])
def test_a_layer_that_is_called_twice_alike_counts_twice(kind):
    params, x = (normal(14, 3), normal(4, 2, 14)) if kind == "dot" else (normal(9, 3), np.arange(20).reshape(4, 5) % 9)

    def layer(params, x):
        return jnp.tanh(x @ params if kind == "dot" else params[x])

    problem = Problem(apply=lambda p, x: (layer(p, x) + layer(p, x)).sum(0), params=params, inputs=x)
    store, rows = jacstore.build(problem, None, dtype="float64", layout="factored"), dense_rows(problem)
    (leaf,) = store.leaves
    assert [term.kind for term in leaf.terms] == [kind] * 2 and len(store.operands) == 2
    found = store.array.compute(scheduler="synchronous").reshape(rows.shape)
    assert np.linalg.norm(found - rows) <= 1e-12 * np.linalg.norm(rows)
    np.testing.assert_allclose(store.norms.sum(-1), np.square(rows).sum(-1), rtol=1e-10)
    assert kernel_error(jacstore.gram(store).array.compute(scheduler="synchronous"), dense_kernel(rows)) <= 1e-12
