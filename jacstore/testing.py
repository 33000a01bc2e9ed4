"""Tools for tests: tiny problems, dense float64 truth, measures of errors, listeners that count or stop.

The package itself imports nothing from here. The truth shares no line with the package's own device pass: one
`jax.jacrev` per example, in float64, and NumPy from there on.
"""

from __future__ import annotations

import contextlib
import itertools
import re
import threading
from collections import Counter
from collections.abc import Iterator
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np

from jacstore.base.events import Event
from jacstore.base.modes import Mode
from jacstore.problem.problem import Problem

# What "equal" means without more: rows ‖a-b‖/‖b‖, kernels |Δ_ij| / sqrt(G_ii G_jj).
TOLERANCE = {"float32": 2e-6, "float64": 1e-12}


# ------------------------------------------------------------------------------------------------------- tiny problems


def mlp(n: int = 10, *, sizes: tuple[int, ...] = (5, 7, 3), seed: int = 0, **fields: Any) -> Problem:
    """A tanh network with biases on `n` examples; P = 66, K = 3 unless `sizes` says otherwise."""
    draw = np.random.default_rng(seed)
    params = {
        f"layer{index}": {"b": _normal(draw, b), "w": _normal(draw, a, b) / np.float32(a**0.5)}
        for index, (a, b) in enumerate(itertools.pairwise(sizes))
    }
    return _problem(_mlp, params, _normal(draw, n, sizes[0]), fields)


def cnn(n: int = 6, *, seed: int = 0, **fields: Any) -> Problem:
    """A 3 x 3 convolution with stride 2, tanh, and a dense layer on 6 x 6 images of two channels; P = 127, K = 3."""
    draw = np.random.default_rng(seed)
    params = {
        "conv": {"b": _normal(draw, 4), "w": _normal(draw, 4, 2, 3, 3) / 4},
        "head": {"b": _normal(draw, 3), "w": _normal(draw, 16, 3) / 4},
    }
    return _problem(_cnn, params, _normal(draw, n, 2, 6, 6), fields)


def nested(n: int = 8, *, seed: int = 0, **fields: Any) -> Problem:
    """Tuples in dicts, keys to encode, a scalar leaf, leaves that are no floats, a pytree of outputs; P = 16, K = 4."""
    draw = np.random.default_rng(seed)
    params = {
        "a/b": (_normal(draw, 4, 3), {"scale": np.float32(1.5), "steps": np.arange(3)}),
        "100%": [_normal(draw, 3), None, "tanh"],
    }
    inputs = {"x": _normal(draw, n, 4), "shift": _normal(draw, n)}
    return _problem(_nested, params, inputs, fields)


def _normal(draw: np.random.Generator, *shape: int) -> np.ndarray:
    return draw.normal(size=shape).astype(np.float32)


def _problem(apply: Any, params: Any, inputs: Any, fields: dict[str, Any]) -> Problem:
    return Problem(**{"apply": apply, "params": params, "inputs": inputs, **fields})


def _mlp(params: Any, x: Any) -> Any:
    *hidden, last = [params[f"layer{index}"] for index in range(len(params))]
    for layer in hidden:
        x = jnp.tanh(x @ layer["w"] + layer["b"])
    return x @ last["w"] + last["b"]


def _cnn(params: Any, image: Any) -> Any:
    y = jax.lax.conv(image[None], params["conv"]["w"], (2, 2), "VALID")[0]
    y = jnp.tanh(y + params["conv"]["b"][:, None, None]).reshape(-1)
    return y @ params["head"]["w"] + params["head"]["b"]


def _nested(params: Any, example: Any) -> Any:
    w, more = params["a/b"]
    bias, _, kind = params["100%"]
    y = getattr(jnp, kind)(example["x"] @ w + bias) * more["scale"] + more["steps"]
    return {"y": y, "sum": (y * example["shift"]).sum()}


# --------------------------------------------------------------------------------------------------------- dense truth


def dense_rows(problem: Problem) -> np.ndarray:
    """All rows `(N, K, P)` by `jax.jacrev` in float64, columns in tree order of the selected leaves."""
    parts = _truth(problem, jax.jacrev)
    return np.concatenate([part.reshape(*part.shape[:2], -1) for part in parts], -1)


def dense_outputs(problem: Problem) -> np.ndarray:
    """The chosen outputs `(N, K)` in float64."""
    return _truth(problem, lambda outputs: lambda moving, example: [outputs(moving, example)])[0]


def _truth(problem: Problem, transform: Any) -> list[np.ndarray]:
    """What a transformation of `outputs(moving leaves, example)` gives for every example, as a list of arrays."""
    with jax.enable_x64(True), jax.default_matmul_precision("highest"):
        named, treedef = jax.tree_util.tree_flatten_with_path(problem.params, is_leaf=lambda leaf: leaf is None)
        leaves = [_wide(leaf) for _, leaf in named]
        chosen = [n for n, (path, leaf) in enumerate(named) if _floating(leaf) and _selected(problem.select, path)]

        def outputs(moving: list[Any], example: Any) -> Any:
            whole = dict(enumerate(leaves)) | dict(zip(chosen, moving, strict=True))
            params = jax.tree_util.tree_unflatten(treedef, [whole[n] for n in range(len(leaves))])
            if problem.batched:
                batch = jax.tree_util.tree_map(lambda leaf: leaf[None], example)
                result = jax.tree_util.tree_map(lambda leaf: leaf[0], problem.apply(params, batch))
            else:
                result = problem.apply(params, example)
            flat = jnp.concatenate([jnp.ravel(leaf) for leaf in jax.tree_util.tree_leaves(result)])
            if isinstance(problem.outputs, str):
                return flat if problem.outputs == "all" else flat.sum(keepdims=True)
            return flat[np.asarray(problem.outputs)]

        inputs = jax.tree_util.tree_map(_wide, problem.read(0, problem.n_examples))
        moving = [leaves[n] for n in chosen]
        return [np.asarray(part) for part in jax.jit(jax.vmap(transform(outputs), (None, 0)))(moving, inputs)]


def _floating(leaf: Any) -> bool:
    return hasattr(leaf, "dtype") and jnp.issubdtype(leaf.dtype, np.floating)


def _wide(leaf: Any) -> Any:
    return jnp.asarray(leaf, np.float64) if _floating(leaf) else leaf


def _selected(select: Any, path: Any) -> bool:
    if select is None:
        return True
    text = jax.tree_util.keystr(path, simple=True, separator="/")
    return bool(select(text) if callable(select) else re.search(select, text))


def dense_kernel(rows: np.ndarray, other: np.ndarray | None = None, mode: str = "full") -> np.ndarray:
    """The kernel of rows `(N, K, P)`, or between them and `other`, in the shapes of `jacstore.gram`'s modes."""
    a, b = rows.astype(np.float64), (rows if other is None else other).astype(np.float64)
    found: np.ndarray = np.einsum(Mode(mode).equation, a, b, optimize=True)
    return found.reshape(Mode(mode).shape(len(a), len(b), a.shape[1]))


# -------------------------------------------------------------------------------------------------------------- errors


def row_errors(rows: Any, truth: np.ndarray) -> np.ndarray:
    """`‖a - b‖ / ‖b‖` of every row; rows `(N * K, P)` or `(N, K, P)`. A zero row must be met exactly."""
    truth = truth.reshape(-1, truth.shape[-1]).astype(np.float64)
    difference = np.linalg.norm(np.asarray(rows).reshape(truth.shape).astype(np.float64) - truth, axis=-1)
    norms = np.linalg.norm(truth, axis=-1)
    return np.where(difference == 0, 0.0, difference / np.where(norms == 0, np.finfo(float).tiny, norms))


def row_error(rows: Any, truth: np.ndarray) -> float:
    """The largest of `row_errors`."""
    return float(row_errors(rows, truth).max())


def kernel_error(
    kernel: Any, truth: np.ndarray, rows: np.ndarray | None = None, other: np.ndarray | None = None, mode: str = "full"
) -> float:
    """The largest `|Δ_ij| / sqrt(G_ii G_jj)`.

    `G_ii` are squared norms of `rows` `(N, K, P)` (and of `other`); without them they are the diagonal of `truth`,
    which then has to be a symmetric kernel of mode full or trace.
    """
    left, right = _scales(truth) if rows is None else (_norms(rows, mode), _norms(rows, mode))
    if other is not None:
        right = _norms(other, mode)
    scale = left[..., :, None] * right[..., None, :]
    difference = np.abs(np.asarray(kernel, np.float64) - truth)
    return float(np.max(np.where(difference == 0, 0.0, difference / np.where(scale == 0, np.finfo(float).tiny, scale))))


def _scales(truth: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    diagonal = np.sqrt(np.diagonal(truth, axis1=-2, axis2=-1))
    return diagonal, diagonal


def _norms(rows: np.ndarray, mode: str) -> np.ndarray:
    return np.sqrt(Mode(mode).on_diagonal(np.square(rows.astype(np.float64)).sum(-1)))


# ----------------------------------------------------------------------------------------------------------- listeners


class Counting:
    """A listener that keeps all events, whatever thread they come from."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self._lock = threading.Lock()

    def __call__(self, event: Event) -> None:
        with self._lock:
            self.events.append(event)

    def of(self, kind: type) -> list[Any]:
        """The events of one kind, in order."""
        return [event for event in self.events if isinstance(event, kind)]

    @property
    def counts(self) -> Counter[str]:
        """How often each kind came."""
        return Counter(type(event).__name__ for event in self.events)


class Stopping(Counting):
    """A listener that is also a `stop`: it asks to stop after so many events of one kind."""

    def __init__(self, kind: type, after: int = 1) -> None:
        super().__init__()
        self.kind, self.after = kind, after

    def stop(self) -> bool:
        """Whether enough has been seen."""
        return len(self.of(self.kind)) >= self.after


@contextlib.contextmanager
def contraction(way: str) -> Iterator[None]:
    """Plans made meanwhile multiply factors "implicit", or "expanded" wherever rows can be formed from them."""
    with mock.patch(
        "jacstore.kernels.plan.steps.expanding_pays", lambda costs, _: way == "expanded" and costs[1] < 2**62
    ):
        yield
