"""Flatten the outputs of a user's `apply` into `(selected, rest, example) -> (K,)`, and choose among them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from operator import index
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jacstore.errors import InvalidRequestError
from jacstore.problem.parameters import Parameters
from jacstore.problem.pytrees import dtype_of, is_kind, paths_and_leaves, type_name
from jacstore.problem.user_errors import reraise_user_error

Flat = Callable[[list[Any], list[Any], Any], jax.Array]


def checked_outputs(outputs: Any) -> str | tuple[int, ...]:
    """The choice of outputs in its one form: "all", "sum" or a tuple of indices."""
    allowed = 'allowed are "all", "sum" or a list of different indices from 0; change outputs='
    if isinstance(outputs, str):
        if outputs not in ("all", "sum"):
            raise InvalidRequestError(f"outputs is {outputs!r}; {allowed}")
        return outputs
    try:
        indices = tuple(outputs)
        if any(isinstance(k, (bool, np.bool_)) for k in indices):
            raise TypeError("a mask, not indices")
        indices = tuple(index(k) for k in indices)
    except TypeError as error:
        raise InvalidRequestError(f"outputs is {outputs!r} ({error}); {allowed}") from error
    repeated = sorted(k for k, count in Counter(indices).items() if count > 1)
    if repeated:
        raise InvalidRequestError(f"outputs names {repeated[0]} twice; {allowed}")
    if not indices or min(indices) < 0:
        raise InvalidRequestError(f"outputs is {list(indices)}; {allowed}")
    return indices


def flat_function(apply: Callable[[Any, Any], Any], batched: bool, parameters: Parameters) -> Flat:
    """All outputs of one example, `(selected, rest, example) -> (K,)`, before the choice."""

    def flat(selected: list[Any], rest: list[Any], example: Any) -> jax.Array:
        params = parameters.join(selected, rest)
        if not batched:
            return flatten_outputs(apply(params, example))
        batch = jax.tree_util.tree_map(lambda leaf: jnp.expand_dims(leaf, 0), example)
        return flatten_outputs(first_of_batch(apply(params, batch), 1))

    return flat


def first_of_batch(outputs: Any, size: int) -> Any:
    """The outputs of the first of `size` examples."""
    for path, leaf in paths_and_leaves(outputs):
        shape = jnp.shape(leaf)
        if shape[:1] != (size,):
            raise InvalidRequestError(
                f"apply returned output {path!r} of shape {shape} for a batch of {size}; with batched=True the first "
                f"axis has to be {size}; change apply= or batched="
            )
    return jax.tree_util.tree_map(lambda leaf: leaf[0], outputs)


def flatten_outputs(outputs: Any) -> jax.Array:
    """A pytree of floating outputs as one vector `(K,)`, leaves in tree order."""
    parts = []
    for path, leaf in paths_and_leaves(outputs):
        dtype = dtype_of(leaf)
        if not is_kind(dtype, np.floating):
            raise InvalidRequestError(
                f"apply returned output {path!r} of type {type_name(leaf)}; outputs have to be floating point; drop or "
                "convert it in apply="
            )
        parts.append(jnp.ravel(leaf))
    if not sum(part.size for part in parts):
        raise InvalidRequestError("apply returned no outputs (K = 0); at least one is needed; change apply=")
    return jnp.concatenate(parts) if len(parts) > 1 else parts[0]


def chosen(flat: jax.Array, outputs: str | Sequence[int]) -> jax.Array:
    """Select the chosen outputs `(K,)` from all outputs."""
    if outputs == "all":
        return flat
    if outputs == "sum":
        return jnp.sum(flat, keepdims=True)
    return flat.at[np.asarray(outputs)].get(mode="promise_in_bounds", unique_indices=True)


def count_chosen(n_all: int, outputs: str | Sequence[int]) -> int:
    """K for a choice among `n_all` outputs, or InvalidRequestError."""
    if isinstance(outputs, tuple) and max(outputs) >= n_all:
        raise InvalidRequestError(
            f"outputs names index {max(outputs)}; apply has {n_all} outputs, 0 to {n_all - 1}; change outputs="
        )
    return n_all if outputs == "all" else 1 if outputs == "sum" else len(outputs)


def calling(example: Any) -> AbstractContextManager[None]:
    """Report what is raised inside as an error of `apply`."""
    given = ", ".join(f"{path!r}: {leaf.dtype}{list(leaf.shape)}" for path, leaf in paths_and_leaves(example))
    return reraise_user_error(
        "apply raised",
        f"it gets params and one example ({given}), no batch axis; change apply=, or batched=True if it needs one",
    )


def traced_outputs(flat: Flat, parameters: Parameters, example: Any) -> tuple[Any, Any]:
    """The program of one example, and shape and type of its outputs `(K,)`; nothing is computed."""
    with calling(example):
        return jax.make_jaxpr(flat, return_shape=True)(parameters.selected, parameters.rest, example)
