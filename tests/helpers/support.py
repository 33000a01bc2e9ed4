"""What the tests of several rooms use: texts of refusals, errors, arrays in memory, bytes that are changed."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from jacstore.errors import InvalidRequestError


def refused(call, *given, error=InvalidRequestError, **named):
    with pytest.raises(error) as caught:
        call(*given, **named)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def error(found, truth):
    found, truth = np.asarray(found), np.asarray(truth)
    assert found.shape == truth.shape
    return np.linalg.norm(found - truth) / np.linalg.norm(truth)


def computed(array):
    return array.compute(scheduler="synchronous")


def rows_of(store):
    return store.array.compute(scheduler="synchronous")


def values(kernel):
    return kernel.array.compute(scheduler="synchronous")


def terms_of(store):
    return " ".join("+".join(sorted(term.kind for term in leaf.terms)) for leaf in store.leaves)


def flipped(data, position):
    return data[:position] + bytes([data[position] ^ 16]) + data[position + 1 :]


def normal(*shape):
    return np.random.default_rng(5).standard_normal(shape)


def three(y):
    """Three outputs of any array."""
    flat = jnp.tanh(jnp.ravel(y))
    return jnp.stack([flat.sum(), (flat * jnp.arange(flat.size) / flat.size).sum(), (flat**2).sum()])


class Table:
    """A dataset of Hugging Face in what matters: a shape, columns, lists until another format is asked for."""

    column_names = ("pixels",)

    def __init__(self, rows, convert=np.ndarray.tolist):
        self.rows, self.convert, self.shape = rows, convert, (len(rows), 1)

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, i):
        return {"pixels": self.convert(self.rows[i])}

    def with_format(self, kind):
        return Table(self.rows, {"numpy": np.asarray}[kind])
